//! The Containerfile: the commands of its images.

use super::files::text;
use super::kubernetes::is_command;

/// Arguments of an instruction in its JSON form, such as `CMD ["serve"]`.
fn listed(line: &str) -> Option<Vec<String>> {
    serde_json::from_str(&line[line.find('[')?..]).ok()
}

#[test]
fn images_start_and_check_our_programs_and_run_as_no_root() {
    let file = text("deploy/Containerfile");
    for program in ["registry", "agent"] {
        let (_, stage) = file.split_once(&format!("FROM base AS {program}\n")).unwrap();
        let stage = stage.split("\nFROM ").next().unwrap();
        let of = |instruction: &str| {
            let lines: Vec<&str> = stage.lines().filter(|line| line.starts_with(instruction)).collect();
            let [line] = lines[..] else { panic!("{program}: {instruction} occurs {} times", lines.len()) };
            line.to_owned()
        };
        assert_eq!(of("USER "), "USER 65532:65532");
        let start = [listed(&of("ENTRYPOINT ")).unwrap(), listed(&of("CMD ")).unwrap()].concat();
        assert_eq!(start, [format!("pf-{program}"), "serve".to_owned()]);
        let check = listed(of("HEALTHCHECK ").split_once(" CMD ").unwrap().1).unwrap();
        assert_eq!(check, [format!("pf-{program}"), "health".to_owned()]);
        for command in [start, check] {
            is_command(&command);
        }
        assert!(stage.contains(&format!("COPY --from=build /image/usr/local/bin/pf-{program} /usr/local/bin/pf-{program}\n")), "{stage}");
        // The base image may have no shell.
        assert!(!stage.contains("\nRUN "), "{stage}");
    }
    assert!(file.trim_end().ends_with("CMD [\"pf-registry\", \"health\"]"), "the registry is the last stage: it is built if none is named");
}

#[test]
fn crates_are_listed_after_all_of_them_were_downloaded() {
    let lists = ["tools/wheels/licenses", "tools/sbom"];
    for (name, lists) in [("deploy/Containerfile", &lists[..1]), ("tools/release", &lists[..])] {
        let file = text(name);
        let commands: Vec<&str> = file.lines().map(str::trim_start).filter(|line| !line.starts_with('#')).collect();
        let at = |words: &str| commands.iter().position(|line| line.contains(words)).unwrap_or_else(|| panic!("{name} runs no {words}"));
        let is_in_order = |list: &&str| at("cargo fetch --locked") < at("cargo build --release") && at("cargo build --release") < at(list);
        assert!(lists.iter().all(is_in_order), "{name}");
    }
}

#[test]
fn what_an_image_is_built_from_is_in_the_context() {
    let ignored = text(".dockerignore");
    let ignored: Vec<&str> = ignored.lines().filter_map(|line| line.strip_prefix('/')).collect();
    assert!(ignored.contains(&"target") && ignored.contains(&".git"), "{ignored:?}");
    let manifest = text("Cargo.toml");
    let (_, members) = manifest.split_once("members = [").unwrap();
    let members = members.split(']').next().unwrap().split(',').map(|member| member.trim().trim_matches('"'));
    let missing: Vec<&str> =
        members.filter(|member| ignored.iter().any(|name| member == name || member.starts_with(&format!("{name}/")))).collect();
    assert!(missing.is_empty(), "cargo wants {missing:?}, which .dockerignore leaves out");
}
