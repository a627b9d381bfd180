//! Links from page to page: to files that exist, and to headings in them.

use super::page::root;
use std::path::Path;

/// Broken links of a page, with their places.
pub fn broken(name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(name)).unwrap();
    let here = Path::new(name).parent().unwrap();
    let mut broken = Vec::new();
    for (i, line) in prose(&text) {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = if file.is_empty() { root().join(name) } else { root().join(here).join(file) };
            let has = |text: &str| prose(text).any(|(_, line)| line.starts_with('#') && anchor(line) == heading);
            if !path.exists() {
                broken.push(format!("{name}:{i}: there is no {file}"));
            } else if !heading.is_empty() && !std::fs::read_to_string(&path).is_ok_and(|text| has(&text)) {
                broken.push(format!("{name}:{i}: {target}: no such heading"));
            }
        }
    }
    broken
}

/// Lines outside of fenced blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(i, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((i + 1, line))
    })
}

/// What a heading is called in a link.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_')).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_are_called_as_in_links() {
        assert_eq!(anchor("## TLS and authentication"), "tls-and-authentication");
        assert_eq!(anchor("## Prefix key `pf-prefix-v1`"), "prefix-key-pf-prefix-v1");
        assert_eq!(anchor("### A. B, C"), "a-b-c");
    }
}
