//! The manual pages: one for each command, from what the programs parse.

use crate::docs::usage::Helps;
use pfr_tests::{binary, files};
use std::process::Command;

#[test]
fn every_command_has_a_manual_page_with_its_options_and_a_second_run_writes_the_same() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for folder in [&first, &second] {
        let output = Command::new(binary("pf-man")).arg(folder.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let pages = files(first.path());
    assert!(pages == files(second.path()), "a second run writes other pages");
    let mut helps = Helps::default();
    let mut checked = 0;
    for program in ["pf", "pf-registry", "pf-agent"] {
        let mut paths = vec![vec![program.to_owned()]];
        while let Some(path) = paths.pop() {
            let page = first.path().join(format!("{}.1", path.join("-")));
            let text = std::fs::read_to_string(&page).unwrap_or_else(|e| panic!("{}: {e}", page.display()));
            // Those of programs beside `pf` are in their own help, and not in the parser of `pf`.
            let help = helps.of(&path);
            for option in help
                .options
                .iter()
                .filter(|option| option.starts_with("--") && path[path.len() - 1] != "processfork" && path != ["pf", "demo"])
            {
                let written = option.replace('-', "\\-");
                assert!(text.contains(&written) || text.contains(option.as_str()), "{}: no {option}", page.display());
            }
            paths.extend(
                help.commands.iter().filter(|command| *command != "help").map(|command| [path.clone(), vec![command.clone()]].concat()),
            );
            checked += 1;
        }
    }
    assert!(checked > 35 && pages.len() >= checked, "{checked} commands, {} pages", pages.len());
    let wrong = Command::new(binary("pf-man")).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    for option in ["--help", "--version"] {
        let wrong = Command::new(binary("pf-man")).arg(option).current_dir(second.path()).output().unwrap();
        let usage = String::from_utf8_lossy(&wrong.stderr);
        assert!(wrong.status.code() == Some(2) && usage.starts_with("usage: pf-man FOLDER"), "{option}: {usage}");
        assert!(!second.path().join(option).exists(), "{option} is not a folder");
    }
}
