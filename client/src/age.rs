//! Ages and pauses.

use std::str::FromStr;
use std::time::Duration;

/// The units of an age. Months are none: `1M` would be a month, and `1m` is a minute.
const UNITS: [&str; 6] = ["s", "m", "min", "h", "d", "w"];

/// A time such as `30d`, `12h` or `1w 2d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Age(pub Duration);

impl FromStr for Age {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut units = text.split(|c: char| c.is_ascii_digit() || c.is_whitespace()).filter(|unit| !unit.is_empty());
        let time = if units.all(|unit| UNITS.contains(&unit)) { humantime::parse_duration(text).ok() } else { None };
        time.map(Self).ok_or_else(|| format!("expected numbers with s, m (minutes), h, d or w, such as 12h or 1w 2d, found {text:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_only_units_that_cannot_be_confused() {
        let seconds = |text: &str| text.parse::<Age>().map(|age| age.0.as_secs());
        for (text, expected) in
            [("0s", 0), ("45s", 45), ("1m", 60), ("30min", 1800), ("12h", 43_200), ("30d", 2_592_000), ("1w 2d", 777_600), ("1h30m", 5400)]
        {
            assert_eq!(seconds(text), Ok(expected), "{text}");
        }
        for wrong in ["1M", "1 M", "2months", "1y", "1D", "1H", "5ms", "1minute", "30", "", "d", "-1d", "1.5h", "99999999999999w"] {
            let error = seconds(wrong).unwrap_err();
            assert!(error.contains("m (minutes)"), "{error}");
        }
    }
}
