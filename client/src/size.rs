//! Sizes in bytes, as users write them in options and settings.

use pfr_schema::api::LEAST_SCRUB_RATE;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::str::FromStr;

/// A number of bytes: `50GiB`, `1.5TB`, `1000`. Units with an `i` are powers of 1,024, those
/// without of 1,000. In a file, a number without a unit need not be text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

/// Units in lower case, and their bytes.
const UNITS: [(&str, u64); 11] = [
    ("", 1),
    ("b", 1),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("pib", 1 << 50),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a size such as 50GiB, 1.5TB or 1000, found {text:?}");
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (digits, unit) = text.split_at(end);
        let unit = unit.trim().to_ascii_lowercase();
        let factor = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, factor)| *factor).ok_or_else(wrong)?;
        let bytes = match digits.parse::<u64>() {
            Ok(whole) => whole.checked_mul(factor).ok_or_else(wrong)?,
            Err(_) => {
                let number: f64 = digits.parse().map_err(|_| wrong())?;
                // Below 2^53 the result is exact. Above, an error of a few bytes does not matter.
                (number * factor as f64) as u64
            }
        };
        Ok(Self(bytes))
    }
}

/// The rate of a scrub, in bytes per second, from the command line.
///
/// # Errors
/// It is no size, or a scrub would not end: the reason.
pub fn scrub_rate(text: &str) -> Result<ByteSize, String> {
    let rate: ByteSize = text.parse()?;
    if rate.0 < LEAST_SCRUB_RATE {
        let least = crate::human::bytes(LEAST_SCRUB_RATE);
        return Err(format!("expected {least} a second or more, such as 100MB, found {text:?}; leave it out for no limit"));
    }
    Ok(rate)
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberOrText)
    }
}

struct NumberOrText;

impl Visitor<'_> for NumberOrText {
    type Value = ByteSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as \"50GiB\", \"1.5TB\" or 1000")
    }

    fn visit_u64<E: Error>(self, bytes: u64) -> Result<ByteSize, E> {
        Ok(ByteSize(bytes))
    }

    fn visit_i64<E: Error>(self, bytes: i64) -> Result<ByteSize, E> {
        u64::try_from(bytes).map(ByteSize).map_err(|_| E::custom(format!("a size is not negative, found {bytes}")))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<ByteSize, E> {
        text.parse().map_err(E::custom)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn sizes_are_read_and_nonsense_is_refused() {
        let cases = [("50GiB", 50 << 30), ("1000", 1000), ("1.5 kB", 1500), ("0", 0), ("2 tib", 2 << 40), ("7b", 7)];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
            assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }
        for text in ["", "GiB", "1.2.3MB", "-1", "5 apples", "99999999999TiB", "1e3"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_file_has_a_size_as_text_or_as_a_number() {
        let read = |text: &str| pfr_service::settings::read::<BTreeMap<String, ByteSize>>(text).map(|table| table["a"]);
        for (text, bytes) in [("a = \"2MiB\"", 2 << 20), ("a = \"1000\"", 1000), ("a = 1000", 1000), ("a = 0", 0)] {
            assert_eq!(read(text).ok(), Some(ByteSize(bytes)), "{text}");
        }
        for text in ["a = -1", "a = 1.5", "a = \"many\"", "a = true"] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
