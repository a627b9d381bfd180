//! Commands in the messages of the programs: each is one that its program has, with these options.

use super::page::{files, root};
use super::usage::{Helps, is_ours};

/// Crates whose messages people read.
const FOLDERS: [&str; 5] = ["client/src/", "registry/src/", "capture-agent/src/", "store/src/", "service/src/"];

/// Commands between backticks in the code of a line. Comments are not messages.
fn commands(line: &str) -> impl Iterator<Item = &str> {
    let code = if line.trim_start().starts_with("//") { "" } else { line };
    let is_whole = |text: &&str| text.split(' ').nth(1).is_some_and(|word| word.starts_with(|c: char| c.is_alphabetic() || c == '-'));
    code.split('`').skip(1).step_by(2).filter(|text| is_ours(text)).filter(is_whole)
}

#[test]
fn a_message_names_only_commands_that_there_are() {
    let (mut helps, mut faults, mut seen) = (Helps::default(), Vec::new(), 0);
    let ours = |file: &String| FOLDERS.iter().any(|folder| file.starts_with(folder));
    for name in files(|file| file.ends_with(".rs")).into_iter().filter(ours) {
        let text = std::fs::read_to_string(root().join(&name)).unwrap();
        for (number, line) in text.lines().enumerate() {
            for command in commands(line) {
                seen += 1;
                faults.extend(helps.check(command).err().map(|why| format!("{name}:{}: {why}", number + 1)));
            }
        }
    }
    assert!(seen > 10, "found only {seen}");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn commands_are_found_in_messages_and_not_in_comments() {
    assert_eq!(
        commands("says(\"`pf-registry serve --data DIR` starts one, `pf` does not\")").collect::<Vec<_>>(),
        ["pf-registry serve --data DIR"]
    );
    assert_eq!(commands("    /// `pf-registry serve`").count(), 0);
}
