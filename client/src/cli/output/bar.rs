//! Small proportional bars made of characters.

/// A bar of `width` columns for a whole of `scale`: `solid` filled, then `light` shaded, the rest
/// blank.
///
/// A number above zero gets at least one column, so that a small fork differs from an empty one.
pub fn stacked(solid: u64, light: u64, scale: u64, width: usize) -> String {
    if scale == 0 {
        return " ".repeat(width);
    }
    let columns = |n: u64| {
        let exact = (u128::from(n) * width as u128 + u128::from(scale) / 2) / u128::from(scale);
        usize::try_from(exact).unwrap_or(width).max(usize::from(n > 0)).min(width)
    };
    let total = columns(solid.saturating_add(light)).max(usize::from(solid > 0) + usize::from(light > 0)).min(width);
    let filled = columns(solid).min(total - usize::from(light > 0 && total > 1));
    format!("{}{}{}", "█".repeat(filled), "░".repeat(total - filled), " ".repeat(width - total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_proportional_and_always_as_wide() {
        assert_eq!(stacked(50, 50, 100, 10), "█████░░░░░");
        assert_eq!(stacked(0, 50, 100, 10), "░░░░░     ");
        assert_eq!(stacked(0, 0, 100, 4), "    ");
        assert_eq!(stacked(1, 0, 0, 4), "    ");
    }

    #[test]
    fn little_is_not_nothing() {
        assert_eq!(stacked(1, 999, 1000, 10), "█░░░░░░░░░");
        assert_eq!(stacked(999, 1, 1000, 10), "█████████░");
        assert_eq!(stacked(1, 0, 1000, 10), "█         ");
        assert_eq!(stacked(u64::MAX, u64::MAX, u64::MAX, 3), "██░");
    }
}
