//! Whether a command line names commands and options that the programs have, as their `--help`
//! tells.

use pfr_tests::binary;
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Output};

pub const PROGRAMS: [&str; 6] = ["pf", "pf-registry", "pf-agent", "pf-kv", "pf-bench", "pf-faults"];

/// Whether a line runs one of our programs.
pub fn is_ours(line: &str) -> bool {
    line.split(' ').next().is_some_and(|word| PROGRAMS.contains(&word))
}

/// Whether a line looks like a command, ours or another that readers type.
pub fn is_command(line: &str) -> bool {
    let first = line.split(' ').next().unwrap_or_default();
    let others = ["cargo", "curl", "git", "pip", "python3"];
    is_ours(line) || others.contains(&first) || first.starts_with("./") || is_variable(first)
}

/// `NAME=value`.
fn is_variable(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| !name.is_empty() && name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'))
}

/// What a program's help lists.
#[derive(Debug, Default)]
pub struct Help {
    pub commands: BTreeSet<String>,
    pub options: BTreeSet<String>,
}

impl Help {
    fn parse(text: &str) -> Self {
        let mut help = Self::default();
        let mut in_commands = false;
        for line in text.lines() {
            if !line.starts_with(' ') && !line.is_empty() {
                in_commands = line == "Commands:";
            }
            let words = line.trim_start().split([' ', ',', '[', '=']).filter(|word| !word.is_empty());
            help.options.extend(words.take_while(|word| word.starts_with('-')).map(str::to_owned));
            if in_commands && line.starts_with("  ") && !line.starts_with("   ") {
                help.commands.extend(line.split_whitespace().next().map(str::to_owned));
            }
        }
        help
    }
}

/// Helps that were asked for.
#[derive(Default)]
pub struct Helps(BTreeMap<Vec<String>, Help>);

impl Helps {
    pub fn of(&mut self, path: &[String]) -> &Help {
        self.0.entry(path.to_vec()).or_insert_with(|| {
            let output = run(path);
            assert!(output.status.success(), "{path:?} --help: {output:?}");
            Help::parse(&String::from_utf8_lossy(&output.stdout))
        })
    }

    /// Checks each command of a line that runs one of our programs.
    pub fn check(&mut self, line: &str) -> Result<(), String> {
        let line = line.split("  #").next().unwrap_or_default();
        line.split([';', '|', '&', '\n']).try_for_each(|command| self.check_one(command))
    }

    fn check_one(&mut self, command: &str) -> Result<(), String> {
        let mut words = command.split_whitespace().skip_while(|word| is_variable(word)).peekable();
        let program = words.next().and_then(|word| word.rsplit('/').next()).unwrap_or_default();
        if !PROGRAMS.contains(&program) {
            return Ok(());
        }
        let mut path = vec![program.to_owned()];
        // `pf help push` is `pf push --help`.
        words.next_if_eq(&"help");
        while let Some(word) = words.peek() {
            let help = self.of(&path);
            if help.commands.is_empty() || word.starts_with('-') || is_placeholder(word) {
                break;
            }
            let listed = help.commands.contains(*word);
            path.push((*word).to_owned());
            // An alias has a help of its own and is not listed.
            if !listed && !run(&path).status.success() {
                return Err(format!("there is no command {:?}", path.join(" ")));
            }
            words.next();
        }
        let is_option = |word: &&str| word.starts_with('-') && word.len() > 1 && !word.ends_with('…');
        for word in words.filter(is_option) {
            let option = word.split(['=', '[']).next().unwrap_or_default().trim_end_matches([']', ',', '.']);
            if !self.of(&path).options.contains(option) {
                return Err(format!("{} has no option {option:?}", path.join(" ")));
            }
        }
        Ok(())
    }
}

/// `--help` of a program or of one of its commands.
fn run(path: &[String]) -> Output {
    Command::new(binary(&path[0])).args(&path[1..]).arg("--help").output().unwrap()
}

/// `COMMAND`, `…`: stands for any command.
fn is_placeholder(word: &str) -> bool {
    word.starts_with(|c: char| c.is_uppercase() || matches!(c, '…' | '<' | '[')) || word.starts_with("...")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_is_held_against_the_help() {
        let mut helps = Helps::default();
        for line in [
            "pf push DIR REF --parent X",
            "PF_STORE=/x target/release/pf gc --max-size=1GiB  # --nonsense",
            "pf import processfork S --dry-run",
            "pf import ./backup team/agent:x --from y",
            "pf fork a:b -n 3 ; pf ls",
            "pf COMMAND --help",
            "cat x | pf match R --tokens -",
            "other --nonsense",
        ] {
            assert_eq!(helps.check(line), Ok(()), "{line}");
        }
        for line in ["pf nonsense", "pf ls --nonsense", "true && pf-registry serve --nonsense=1", "pf import ./x --nonsense"] {
            assert!(helps.check(line).is_err(), "{line}");
        }
    }
}
