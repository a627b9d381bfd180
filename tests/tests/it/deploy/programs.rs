//! The variables and commands of the programs, and programs that run with an environment.

use super::files::{deployed, text};
use crate::docs::usage::Helps;
use pfr_tests::binary;
use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};

/// Variables with names and values.
pub type Environment = Vec<(String, String)>;

/// The variables that a command reads, as its help lists them.
pub fn variables(program: &str, command: &str) -> BTreeSet<String> {
    let output = Command::new(binary(program)).args([command, "--help"]).env_clear().output().unwrap();
    // Lines are wrapped anywhere.
    let help = String::from_utf8(output.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    help.split("[env: ").skip(1).filter_map(|rest| rest.split(['=', ']']).next()).map(str::to_owned).collect()
}

/// A program with nothing in its environment but this.
pub fn command(program: &str, arguments: &[&str], environment: &Environment) -> Command {
    let mut command = Command::new(binary(program));
    command.env_clear().envs(environment.iter().map(|(name, value)| (name, value))).args(arguments).stdin(Stdio::null());
    command
}

/// Runs a program to its end.
pub fn run(program: &str, arguments: &[&str], environment: &Environment) -> Output {
    command(program, arguments, environment).output().unwrap()
}

/// The same environment with other values for some of its variables. Each must be there.
pub fn replaced(environment: &Environment, values: &[(&str, String)]) -> Environment {
    for (name, _) in values {
        assert!(environment.iter().any(|(there, _)| there == name), "there is no {name} in {environment:?}");
    }
    let value = |name: &str| values.iter().find(|(other, _)| *other == name).map(|(_, value)| value.clone());
    environment.iter().map(|(name, old)| (name.clone(), value(name).unwrap_or_else(|| old.clone()))).collect()
}

/// A running program, killed when dropped.
pub struct Running {
    child: Child,
    /// The first line of its output.
    pub line: String,
}

impl Running {
    /// Starts it, and waits until it says that it listens.
    pub fn start(program: &str, arguments: &[&str], environment: &Environment) -> Self {
        let mut child = command(program, arguments, environment).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let mut errors = child.stderr.take().unwrap();
        if !line.starts_with("listening on ") {
            drop(child.kill());
            panic!("{program} {arguments:?}: {}", std::io::read_to_string(errors).unwrap_or_default());
        }
        // A program that cannot write its log waits.
        std::thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
        Self { child, line: line.trim_end().to_owned() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn every_variable_of_ours_is_a_setting_of_its_program() {
    let mut known = variables("pf-registry", "serve");
    known.extend(variables("pf-agent", "serve"));
    // A token is in no help: the flag would be seen by every user.
    known.insert("PF_AGENT_TOKEN".to_owned());
    let (mut found, mut faults) = (BTreeSet::new(), Vec::new());
    for name in deployed().into_iter().chain(["registry/pf-registry.service", "capture-agent/pf-agent.service"].map(str::to_owned)) {
        let text = text(&name);
        let words = text.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
        // One that ends with `_` is the beginning of several.
        let ours = words.filter(|word| (word.starts_with("PF_REGISTRY_") || word.starts_with("PF_AGENT_")) && !word.ends_with('_'));
        for word in ours {
            found.insert(word.to_owned());
            if !known.contains(word) {
                faults.push(format!("{name}: {word}"));
            }
        }
    }
    assert!(faults.is_empty(), "no program reads these:\n{}", faults.join("\n"));
    assert!(found.len() > 15 && known.len() > 40, "{found:?}");
}

#[test]
fn every_command_in_the_notes_of_the_chart_exists() {
    let mut helps = Helps::default();
    let mut checked = 0;
    for line in text("deploy/helm/pf/templates/NOTES.txt").replace("\\\n", " ").lines() {
        if let Some(at) = line.find("pf-registry token") {
            helps.check(line[at..].trim_end_matches(['"', ')'])).unwrap_or_else(|why| panic!("{line}: {why}"));
            checked += 1;
        }
    }
    assert_eq!(checked, 2);
}
