//! The documentation is run: every command line of the README and of the pages, in the order in
//! which a reader types them, with its output compared where it is shown. [`page`] says how a block
//! is marked, [`shell`] where it is run, [`compare`] what counts.

mod check;
mod claims;
mod compare;
mod examples;
mod links;
mod messages;
pub mod page;
mod programs;
mod shell;
mod unrun;
pub mod usage;
mod width;

use compare::compare;
use page::{Mark, Page, REASONS, all, root};
use pfr_tests::skip;
use shell::{INSTALLED, Shell, folder_of};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use usage::Helps;

/// Pages share the ports that they name. Each test is a process of its own under nextest; elsewhere
/// they wait for each other.
static PORTS: Mutex<()> = Mutex::new(());

/// Runs all blocks of a page.
fn run(name: &str) {
    let _ports = PORTS.lock().unwrap_or_else(PoisonError::into_inner);
    let page = Page::read(name);
    if ["python3 ", shell::BEHIND_TLS, shell::LLAMA].iter().any(|word| page.is_run_by(word)) && !has_python() {
        return skip("python", &format!("{name} wants Python 3.11 or newer as python3"));
    }
    let mut shell: Option<Shell> = None;
    for block in &page.blocks {
        match (&block.mark, &shell) {
            (Mark::NotRun(_), _) => continue,
            // The README and the quick start begin with how the programs get on the path; the other
            // pages take it for done.
            (Mark::Run, None) if says_how(&page) => shell = Some(Shell::new()),
            (Mark::Run, Some(_)) => {}
            (Mark::Run, None) | (Mark::Fresh, _) => {
                // Programs of the old shell end first: they hold the ports.
                drop(shell.take());
                shell = Some(Shell::new().with_programs());
            }
        }
        let shell = shell.as_mut().unwrap();
        for (i, step) in block.steps.iter().enumerate() {
            let place = format!("{name}:{}: $ {}", step.line, step.command);
            let words = || step.command.split_whitespace();
            let lacks = INSTALLED.iter().find(|program| words().any(|word| word == **program) && folder_of(program).is_none());
            if let Some(program) = lacks {
                skip(program, &format!("{place}\n{program} is not installed"));
                continue;
            }
            let outcome = shell.run(step).unwrap_or_else(|why| panic!("{place}\n{why}"));
            let code_is_shown = block.steps.get(i + 1).is_some_and(|next| next.command.starts_with("echo $?"));
            assert!(outcome.code == 0 || code_is_shown, "{place}\nexit code {}:\n{}", outcome.code, outcome.output);
            if !step.shown.is_empty() {
                compare(&step.shown, &outcome.output).unwrap_or_else(|why| panic!("{place}\n{why}"));
            }
        }
    }
}

pub fn has_python() -> bool {
    let check = ["-c", "import sys; sys.exit(sys.version_info < (3, 11))"];
    Command::new("python3").args(check).status().is_ok_and(|status| status.success())
}

fn says_how(page: &Page) -> bool {
    page.blocks.iter().flat_map(|block| &block.steps).any(|step| step.command.starts_with("export PATH="))
}

macro_rules! pages {
    ($($test:ident: $name:literal,)*) => {
        const PAGES: &[&str] = &[$($name),*];
        $(#[test] fn $test() { run($name); })*
    };
}

pages! {
    the_readme_works_as_written: "README.md",
    the_quick_start_works_as_written: "docs/quickstart.md",
    the_concepts_work_as_written: "docs/concepts.md",
    the_api_guide_works_as_written: "docs/api.md",
    the_page_on_capture_works_as_written: "docs/capture.md",
    the_page_on_connectors_works_as_written: "docs/connectors.md",
    the_page_on_the_fault_harness_works_as_written: "tests/faults/README.md",
    the_page_on_the_command_line_works_as_written: "docs/cli.md",
    the_page_on_deployment_works_as_written: "docs/deploy.md",
    the_page_on_exports_works_as_written: "docs/export.md",
    the_page_on_tokens_works_as_written: "docs/identity.md",
    the_page_on_llama_cpp_works_as_written: "docs/llama-cpp.md",
    the_page_on_mirroring_works_as_written: "docs/mirroring.md",
    the_page_on_operations_works_as_written: "docs/operations.md",
    the_page_on_performance_works_as_written: "docs/performance.md",
    the_page_on_scaling_works_as_written: "docs/scaling.md",
    the_page_on_the_service_works_as_written: "docs/service.md",
    the_page_on_signatures_works_as_written: "docs/signing.md",
    the_page_on_testing_works_as_written: "docs/testing.md",
    the_page_on_troubleshooting_works_as_written: "docs/troubleshooting.md",
}

#[test]
fn every_page_with_commands_is_run() {
    let with_commands: BTreeSet<String> = all().into_iter().filter(Page::is_run).map(|page| page.name).collect();
    assert_eq!(with_commands, PAGES.iter().map(|name| (*name).to_owned()).collect(), "list the page in tests/tests/it/docs/mod.rs");
}

#[test]
fn commands_that_are_not_run_are_listed_and_exist() {
    let mut helps = Helps::default();
    let (mut faults, mut reasons) = (Vec::new(), BTreeSet::new());
    for page in all() {
        for block in &page.blocks {
            let Mark::NotRun(reason) = block.mark else { continue };
            reasons.insert(reason);
            println!("{}:{} is not run: {reason}", page.name, block.line);
            for step in &block.steps {
                println!("    $ {}", step.command);
                let folder = Path::new(&page.name).parent().unwrap();
                let fault = unrun::check(&mut helps, folder, &step.command).err();
                faults.extend(fault.map(|why| format!("{}:{}: {why}", page.name, step.line)));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert_eq!(reasons, BTreeSet::from(REASONS), "a reason that no block has is no reason any more");
}

#[test]
fn check_runs_the_scripts_of_blocks_that_run_the_checks() {
    let check = std::fs::read_to_string(root().join("check")).unwrap();
    let mut scripts = BTreeSet::new();
    for page in all() {
        let blocks = page.blocks.iter().filter(|block| block.mark == Mark::NotRun("runs the checks themselves"));
        let folder = Path::new(&page.name).parent().unwrap();
        scripts.extend(blocks.flat_map(|block| &block.steps).flat_map(|step| unrun::scripts(folder, &step.command)));
    }
    assert!(scripts.remove("check") && scripts.len() >= 5, "{scripts:?}");
    let left: Vec<&String> = scripts.iter().filter(|script| !check.contains(script.as_str())).collect();
    assert!(left.is_empty(), "neither ./check nor the pages run {left:?}");
}

#[test]
fn the_page_on_testing_says_how_many_commands_are_not_run_and_why() {
    let text = std::fs::read_to_string(root().join("docs/testing.md")).unwrap();
    let (_, section) = text.split_once("## Commands on the pages").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let (mut run, mut others) = (0, BTreeMap::from(REASONS.map(|reason| (reason, 0))));
    for block in all().iter().flat_map(|page| &page.blocks).filter(|block| block.seen) {
        *if let Mark::NotRun(reason) = block.mark { others.get_mut(reason).unwrap() } else { &mut run } += block.steps.len();
    }
    let not_run: usize = others.values().sum();
    let sentence = format!("Readers see {} command lines: {run} are run, and {not_run} are not.", run + not_run);
    let said = section.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains(&sentence), "docs/testing.md lacks the sentence {sentence:?}");
    let listed: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
    let rows = REASONS.map(|reason| format!("| `{reason}` | {} |", others[reason]));
    let agree = listed.len() == rows.len() && listed.iter().zip(&rows).all(|(line, row)| line.starts_with(row));
    assert!(agree, "its table begins with other words than:\n{}", rows.join("\n"));
}

#[test]
fn commands_named_in_sentences_exist() {
    let mut helps = Helps::default();
    let mut faults = Vec::new();
    for page in all() {
        for (line, span) in page.spans.iter().filter(|(_, span)| usage::is_ours(span)) {
            faults.extend(helps.check(span).err().map(|why| format!("{}:{line}: `{span}`: {why}", page.name)));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_link_leads_somewhere() {
    let faults: Vec<String> = all().iter().flat_map(|page| links::broken(&page.name)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_overview_of_commands_is_complete() {
    let text = std::fs::read_to_string(root().join("docs/cli.md")).unwrap();
    let listed: BTreeSet<String> = text.lines().filter_map(|line| line.strip_prefix("pf ")?.split(' ').next()).map(str::to_owned).collect();
    let mut helps = Helps::default();
    let mut there = helps.of(&["pf".to_owned()]).commands.clone();
    there.remove("help");
    assert_eq!(listed, there, "docs/cli.md lists other commands than `pf --help`");
}
