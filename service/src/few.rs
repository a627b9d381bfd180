//! Lists of names in messages: the first few, so that a message stays readable with 50,000 of them.

/// Characters of a name that are shown.
const SHOWN: usize = 200;

/// The first names, at most `named` of them, and how many more there are; `none` without a name.
pub fn few<S: AsRef<str>>(names: impl IntoIterator<Item = S, IntoIter: ExactSizeIterator>, named: usize) -> String {
    let mut names = names.into_iter();
    let first: Vec<String> = names.by_ref().take(named).map(|name| name.as_ref().chars().take(SHOWN).collect()).collect();
    match (first.is_empty(), names.len()) {
        (true, 0) => "none".to_owned(),
        (_, 0) => first.join(", "),
        (_, more) => format!("{} and {more} more", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::few;

    #[test]
    fn a_list_names_the_first_and_counts_the_others() {
        let names: Vec<String> = (0..50_000).map(|i| format!("s{i}")).collect();
        let say = |count: usize| few(&names[..count], 3);
        assert_eq!((say(0), say(2)), ("none".to_owned(), "s0, s1".to_owned()));
        assert_eq!(say(3), "s0, s1, s2");
        assert_eq!(say(50_000), "s0, s1, s2 and 49997 more");
        assert_eq!(few(["x".repeat(1000)], 3).len(), 200);
    }
}
