//! `docs/programs.md` against `--help`: every command of every program, and every option of every
//! command.

use super::page::root;
use super::usage::{Helps, PROGRAMS};
use pfr_tests::binary;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

const PAGE: &str = "docs/programs.md";
/// Options of every command.
const EVERYWHERE: [&str; 2] = ["--help", "--version"];

/// What the page says of one program.
#[derive(Default)]
struct Program {
    /// Of the list of commands.
    listed: BTreeSet<String>,
    /// Options by command; those that all commands share are under the empty name.
    options: BTreeMap<String, BTreeSet<String>>,
}

/// The page, program by program.
fn page() -> BTreeMap<String, Program> {
    let text = std::fs::read_to_string(root().join(PAGE)).unwrap();
    let (mut programs, mut program, mut command) = (BTreeMap::<String, Program>::new(), String::new(), None);
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            program = heading.trim_matches('`').to_owned();
            command = None;
            if heading.starts_with('`') {
                programs.insert(program.clone(), Program::default());
            }
        } else if let Some(heading) = line.strip_prefix("### ") {
            let name = heading.strip_prefix(&format!("`{program} ")).map(|name| name.trim_end_matches('`'));
            command = Some(name.unwrap_or_default().to_owned());
        } else if let Some(said) = programs.get_mut(&program) {
            if let Some(name) = line.strip_prefix(&format!("{program} ")).filter(|_| command.is_none()) {
                said.listed.extend(name.split(' ').next().map(str::to_owned));
            }
            if let (Some(command), Some(row)) = (&command, line.strip_prefix("| `-")) {
                let option = row.split(['`', ' ', '=', '[']).next().unwrap_or_default();
                said.options.entry(command.clone()).or_default().insert(format!("-{option}"));
            }
        }
    }
    programs
}

/// Keys of the annotated settings file of a program, as flags.
fn settings(file: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(root().join(file)).unwrap();
    super::examples::keys(&text).into_iter().map(|key| format!("--{key}")).collect()
}

#[test]
fn the_page_on_programs_has_every_command_and_every_option() {
    let pages = page();
    assert_eq!(pages.keys().map(String::as_str).collect::<Vec<_>>(), ["pf-agent", "pf-kv", "pf-registry"], "{PAGE}");
    let mut helps = Helps::default();
    let mut faults = Vec::new();
    for (program, said) in &pages {
        let mut commands = helps.of(std::slice::from_ref(program)).commands.clone();
        commands.remove("help");
        if said.listed != commands {
            faults.push(format!("{program}: the list has {:?}, --help has {commands:?}", said.listed));
        }
        // A command may have commands of its own.
        let nested = commands.iter().flat_map(|command| {
            let own = helps.of(&[program.clone(), command.clone()]).commands.clone();
            own.into_iter().filter(|own| own != "help").map(move |own| format!("{command} {own}"))
        });
        let nested: Vec<String> = nested.collect();
        // It has no options then but those of its commands.
        let alone = commands.iter().filter(|command| !nested.iter().any(|own| own.split(' ').next() == Some(command.as_str())));
        for command in alone.chain(&nested) {
            let of = |command: &str| said.options.get(command).cloned().unwrap_or_default();
            let mut found: BTreeSet<String> = of(command).union(&of("")).cloned().collect();
            // Keys of the settings file are explained there.
            match (program.as_str(), command.as_str()) {
                ("pf-registry", "serve") => found.extend(settings("registry/pf-registry.toml")),
                ("pf-agent", "serve") => {
                    found.extend(settings("capture-agent/pf-agent.toml"));
                    // A token on the command line could be read by every user of the machine.
                    found.remove("--token");
                }
                _ => {}
            }
            let words: Vec<String> = std::iter::once(program.as_str()).chain(command.split(' ')).map(str::to_owned).collect();
            let help = helps.of(&words).options.iter();
            let help: BTreeSet<String> =
                help.filter(|option| option.starts_with("--") && !EVERYWHERE.contains(&option.as_str())).cloned().collect();
            let lacks: Vec<&String> = help.difference(&found).collect();
            let invents: Vec<&String> = found.difference(&help).collect();
            if !lacks.is_empty() || !invents.is_empty() {
                faults.push(format!("{program} {command}: the page lacks {lacks:?} and invents {invents:?}"));
            }
        }
    }
    assert!(faults.is_empty(), "{PAGE}:\n{}", faults.join("\n"));
}

#[test]
fn every_program_names_itself_in_its_version() {
    for program in PROGRAMS {
        let output = Command::new(binary(program)).arg("--version").output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{program} {}\n", env!("CARGO_PKG_VERSION")));
    }
}
