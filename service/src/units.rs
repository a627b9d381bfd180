//! Sizes and numbers for people, the same in all messages.

/// `12.3 MiB`: three digits, binary units.
#[must_use]
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    // 1023.96 KiB would print as 1024 KiB.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.decimals$} {}", UNITS[unit])
}

/// `12,345`.
#[must_use]
pub fn number(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits_and_never_four() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (10 * 1024, "10.0 KiB"),
            (1023 * 1024, "1.00 MiB"),
            (123 << 20, "123 MiB"),
            (u64::MAX, "16.0 EiB"),
        ];
        for (n, text) in cases {
            assert_eq!(bytes(n), text);
        }
    }

    #[test]
    fn numbers_are_grouped() {
        let shown = [0, 999, 1000, 12_345, 999_999, 1_234_567].map(number);
        assert_eq!(shown, ["0", "999", "1,000", "12,345", "999,999", "1,234,567"]);
    }
}
