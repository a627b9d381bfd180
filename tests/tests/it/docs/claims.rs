//! Checks claims of the pages against their sources.

use super::page::{Mark, Page, all, root};
use serde_json::Value;
use std::collections::BTreeSet;

fn text(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The text between a heading and the next one of level 2.
fn section<'a>(text: &'a str, heading: &str) -> &'a str {
    let (_, rest) = text.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no {heading}"));
    rest.split("\n## ").next().unwrap()
}

/// Numbers with a unit, such as `0.57 ms` and `20–36 ms`.
fn measured(text: &str) -> BTreeSet<String> {
    const UNITS: [&str; 5] = ["ms", "s", "GB", "MB", "%"];
    let words: Vec<&str> = text.split_whitespace().collect();
    let clean = |word: &str| word.trim_end_matches(['.', ',', ':', ';', ')']).to_owned();
    let pairs =
        words.windows(2).filter(|pair| pair[0].starts_with(|c: char| c.is_ascii_digit()) && UNITS.contains(&clean(pair[1]).as_str()));
    pairs.map(|pair| format!("{} {}", pair[0], clean(pair[1]))).collect()
}

#[test]
fn every_number_that_the_readme_advertises_was_measured() {
    let (readme, performance) = (text("README.md"), text("docs/performance.md"));
    let claimed = measured(section(&readme, "## What you gain"));
    assert!(claimed.len() >= 5, "{claimed:?}");
    // Columns of a table are padded, and lines of a sentence are wrapped.
    let performance = performance.split_whitespace().collect::<Vec<_>>().join(" ");
    let unbacked: Vec<&String> = claimed.iter().filter(|number| !performance.contains(number.as_str())).collect();
    assert!(unbacked.is_empty(), "docs/performance.md has no {unbacked:?}: update the README with the measurements");
}

#[test]
fn numbers_with_their_units_are_found() {
    let found = measured("A pause of 0.57 ms, or 20–36 ms.\nOf 1.48 GB 1 % is new (after 0.10 s). In 2,000 tokens");
    assert_eq!(found, ["0.10 s", "0.57 ms", "1 %", "1.48 GB", "20–36 ms"].map(str::to_owned).into());
}

#[test]
fn every_promise_of_the_readme_names_a_test() {
    let readme = text("README.md");
    let promises: Vec<&str> = section(&readme, "## What it promises").split("\n* ").skip(1).collect();
    assert!(promises.len() >= 8);
    for promise in promises {
        let folders = ["](tests/", "](store/tests/", "](client/tests/", "](registry/tests/"];
        assert!(folders.iter().any(|folder| promise.contains(folder)), "no test: {promise}");
    }
}

/// An operator looks there before an upgrade.
#[test]
fn every_migration_is_in_the_changelog_with_what_it_does() {
    let changelog = text("CHANGELOG.md");
    let (_, table) = changelog.split_once("\n### Migrations\n").unwrap();
    let rows = table.split("\n### ").next().unwrap().lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let rows: Vec<Vec<&str>> = rows.map(|row| row.split(" | ").collect()).filter(|row: &Vec<&str>| row[0] != "migration").collect();
    for (number, row) in (1..).zip(&rows) {
        assert!(row.len() == 3 && row[0].parse::<usize>() == Ok(number) && ["yes", "no"].contains(&row[2]), "row {number}: {row:?}");
    }
    for folder in ["sqlite", "postgres"] {
        let migrations = std::fs::read_dir(root().join("migrations").join(folder)).unwrap().count();
        assert_eq!(rows.len(), migrations, "a row for each migration of {folder}");
    }
}

/// The requests that commands on the pages send with curl, as `GET /v1/stats`.
fn requests() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for page in all() {
        let run = page.blocks.iter().filter(|block| !matches!(block.mark, Mark::NotRun(_)));
        for step in run.flat_map(|block| &block.steps).filter(|step| step.command.contains("curl ")) {
            let command = step.command.replace("http://127.0.0.1:5077", "").replace("$API", "/v1").replace("$REPO", "/v1/repositories/r");
            let words: Vec<&str> = command.split_whitespace().collect();
            let named = words.windows(2).find(|pair| pair[0] == "-X").map(|pair| pair[1]);
            let method = named.unwrap_or(if words.contains(&"-d") { "POST" } else { "GET" });
            let paths = words.iter().filter_map(|word| word.trim_matches(['"', '\'', ')']).split('?').next());
            found.extend(paths.filter(|path| path.starts_with('/')).map(|path| format!("{method} {path}")));
        }
    }
    found
}

#[test]
fn every_operation_of_the_api_is_sent_by_a_command_on_the_pages() {
    let document: Value = serde_json::from_str(&text("registry/openapi.json")).unwrap();
    let requests = requests();
    let mut missing = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let parts: Vec<&str> = path.split('/').collect();
        for method in item.as_object().unwrap().keys() {
            let is_sent = requests.iter().any(|request| {
                let (sent, to) = request.split_once(' ').unwrap();
                let to: Vec<&str> = to.split('/').collect();
                let is_there = to.len() == parts.len() && parts.iter().zip(&to).all(|(part, to)| part.starts_with('{') || part == to);
                is_there && sent.eq_ignore_ascii_case(method)
            });
            if !is_sent {
                missing.push(format!("{method} {path}"));
            }
        }
    }
    assert!(missing.is_empty(), "no page has a `curl` line with {missing:?}");
}

/// A setting of the registry, in seconds.
fn seconds(settings: &str, key: &str) -> u64 {
    let value = settings.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
    value.unwrap_or_else(|| panic!("no {key}")).parse().unwrap()
}

#[test]
fn the_time_until_deleted_bytes_are_free_is_that_of_the_defaults() {
    let settings = text("registry/pf-registry.toml");
    let (interval, grace) = (seconds(&settings, "gc-interval-seconds"), seconds(&settings, "gc-grace-seconds"));
    // Half an interval until the first collection, the grace period, half an interval until the
    // next one.
    let sentence = format!("about {} minutes", (interval + grace) / 60);
    let pages = ["docs/operations.md", "docs/quickstart.md", "docs/concepts.md", "docs/troubleshooting.md"];
    for page in pages {
        let words = text(page).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&sentence), "{page} does not say {sentence:?}");
    }
    let most = (2 * interval * 5 / 4 + grace).div_ceil(60);
    let operations = text("docs/operations.md");
    assert!(operations.contains(&format!("never more than {most} minutes")), "{most} minutes at most");
}

#[test]
fn pages_that_start_a_registry_say_to_stop_another_one_first() {
    for page in all().iter().filter(|page| page.is_run()) {
        let page_text = text(&page.name);
        // Readers do not see a block in a comment, and do not run it.
        let hidden = |line: usize| page_text.lines().nth(line - 1).is_some_and(|line| line.trim_start().starts_with("<!--"));
        let run = page.blocks.iter().filter(|block| block.mark == Mark::Run && !hidden(block.line));
        let mut steps = run.flat_map(|block| &block.steps);
        let starts = |command: &str| command.starts_with("pf-registry serve ") && command.ends_with('&');
        let Some(first) = steps.find(|step| starts(step.command.split("  #").next().unwrap().trim_end())) else { continue };
        let before: String = page_text.lines().take(first.line).collect::<Vec<_>>().join(" ").to_lowercase();
        assert!(says_so(&before), "{}:{}: say before this to stop any registry: another page may have started one", page.name, first.line);
    }
}

fn says_so(text: &str) -> bool {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    words.contains("stop any registry") || words.contains("if a registry runs on this machine already, stop it")
}

#[test]
fn the_page_for_trouble_starts_no_second_registry() {
    let page = Page::read("docs/troubleshooting.md");
    let commands: Vec<&str> = page.blocks.iter().flat_map(|block| &block.steps).map(|step| step.command.as_str()).collect();
    let starting: Vec<&&str> = commands.iter().filter(|command| command.contains("pf-registry serve")).collect();
    assert!(
        !starting.is_empty() && starting.iter().all(|command| command.starts_with("curl ") && command.contains(" || ")),
        "{starting:?}"
    );
}

#[test]
fn help_and_pages_agree_on_what_may_run_beside_a_registry() {
    let help = |command: &str| {
        let output = std::process::Command::new(pfr_tests::binary("pf-registry")).args([command, "--help"]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    for command in ["gc", "scrub", "fsck"] {
        assert!(help(command).contains("May run beside a registry that serves the same store"), "{command}");
    }
    assert!(help("rebuild").contains("Nothing else may use the store meanwhile"));
    assert!(text("docs/programs.md").contains("`gc`, `scrub` and `fsck` may run beside a registry"));
    assert!(text("docs/operations.md").contains("`gc`, `scrub`, `fsck` may run beside it"));
}

/// Other packages, or some of them by `-p`, would have other features, and be compiled again.
#[test]
fn the_demo_builds_what_a_release_build_builds() {
    let demo = text("demo");
    let builds: Vec<&str> = demo.lines().filter(|line| line.contains("cargo build")).collect();
    // From any folder: the settings in `.cargo` are those of the one that Cargo runs in.
    assert_eq!(builds, [r#"(cd -- "$root" && cargo build --release)"#]);
}

#[test]
fn what_the_normal_run_leaves_out_is_in_the_long_run() {
    let profiles = text(".config/nextest.toml");
    let filter = |profile: &str| {
        let (_, rest) = profiles.split_once(&format!("\n[profile.{profile}]\n")).unwrap();
        rest.lines().find_map(|line| line.strip_prefix("default-filter = ")).unwrap().to_owned()
    };
    assert!(filter("default").contains("not test(/(^|::)long::/)"), "{}", filter("default"));
    assert_eq!(filter("long"), "\"all()\"");
    let check = text("check");
    assert!(check.contains("\n  profile=long\n") && check.contains(" --profile \"$profile\" "), "./check long runs another profile");
}

/// The targets are a workspace of their own, which the normal run does not build.
#[test]
fn every_fuzz_target_is_a_program_on_its_page() {
    let names = |text: &str, before: &str, after: &str| -> BTreeSet<String> {
        let parts = text.split(before).skip(1).filter_map(|rest| Some(rest.split_once(after)?.0.to_owned()));
        parts.collect()
    };
    let programs = names(&text("fuzz/Cargo.toml"), "[[bin]]\nname = \"", "\"");
    let folder = std::fs::read_dir(root().join("fuzz/fuzz_targets")).unwrap();
    let files: BTreeSet<String> = folder.map(|file| file.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned()).collect();
    let page = text("fuzz/README.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split(" |").next());
    let listed: BTreeSet<String> = rows.flat_map(|cell| cell.split(", ")).map(|name| name.trim_matches('`').to_owned()).collect();
    assert!(programs.len() > 10);
    assert_eq!((&files, &listed), (&programs, &programs));
}
