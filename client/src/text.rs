//! Comparing names.

use std::cmp::Ordering;

/// Natural order: `fork-2` before `fork-10`.
#[must_use]
pub fn natural(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    while let (Some(l), Some(r)) = (left.chars().next(), right.chars().next()) {
        if l.is_ascii_digit() && r.is_ascii_digit() {
            let (x, y) = (digits(left), digits(right));
            let (x_value, y_value) = (x.trim_start_matches('0'), y.trim_start_matches('0'));
            let order = x_value.len().cmp(&y_value.len()).then_with(|| x_value.cmp(y_value));
            if order != Ordering::Equal {
                return order;
            }
            (left, right) = (&left[x.len()..], &right[y.len()..]);
        } else if l == r {
            (left, right) = (&left[l.len_utf8()..], &right[r.len_utf8()..]);
        } else {
            return l.cmp(&r);
        }
    }
    // Names with equal numbers, such as 1 and 01, still have an order.
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

fn digits(text: &str) -> &str {
    &text[..text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_are_in_the_order_of_their_numbers() {
        let mut names = ["fork-10", "fork-2", "fork", "fork-1", "a10b3", "a10b12", "a9", "01", "1", "fork-18446744073709551617", "fork-3"];
        names.sort_by(|a, b| natural(a, b));
        let sorted = ["01", "1", "a9", "a10b3", "a10b12", "fork", "fork-1", "fork-2", "fork-3", "fork-10", "fork-18446744073709551617"];
        assert_eq!(names, sorted);
    }
}
