//! Command lines that are not run: whether everything that they name is there.
//!
//! Every command needs a rule here. A rule compares options with a help, and packages, tests,
//! scripts, files, stages, services, units, objects and settings with the repository.

use super::page::{files, root};
use super::usage::{Helps, PROGRAMS};
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use yaml_rust2::{Yaml, YamlLoader};

type Checked = Result<(), String>;

/// Checks each command of a line. Scripts may lie beside the page, in `folder`.
pub fn check(helps: &mut Helps, folder: &Path, line: &str) -> Checked {
    commands(line).iter().try_for_each(|words| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        one(helps, folder, &words)
    })
}

/// The scripts that a line runs, relative to the repository.
pub fn scripts(folder: &Path, line: &str) -> Vec<String> {
    let programs = commands(line).into_iter().filter_map(|words| words.into_iter().find(|word| variable(&word.as_str()).is_none()));
    let places = programs.filter_map(|program| {
        let places = [PathBuf::from(&program), folder.join(&program)];
        places.into_iter().find(|place| program.contains('/') && root().join(place).is_file())
    });
    // Without `./`.
    let normal = |place: PathBuf| place.components().filter(|part| matches!(part, Component::Normal(_))).collect::<PathBuf>();
    places.map(|place| normal(place).to_str().unwrap().to_owned()).collect()
}

/// The words of each command of a line, without comments and redirections. Those within `$(…)` are
/// a command, too.
fn commands(line: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word) = (Vec::new(), Vec::new(), None::<String>);
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '#' if word.is_none() => while chars.next_if(|c| *c != '\n').is_some() {},
            '\'' | '"' => word.get_or_insert_default().extend(chars.by_ref().take_while(|inner| *inner != c)),
            '$' if chars.next_if_eq(&'(').is_some() => {
                // So far it is `NAME=`.
                word = None;
                commands.push(std::mem::take(&mut words));
            }
            ' ' => words.extend(word.take()),
            '>' => {
                while chars.next_if_eq(&' ').is_some() {}
                while chars.next_if(|c| *c != ' ').is_some() {}
            }
            '\n' | ';' | '|' | '&' | ')' => {
                words.extend(word.take());
                commands.push(std::mem::take(&mut words));
            }
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    commands.push(words);
    commands.retain(|words| !words.is_empty());
    commands
}

fn one(helps: &mut Helps, folder: &Path, words: &[&str]) -> Checked {
    let assigned = words.iter().take_while(|word| variable(word).is_some()).count();
    let (variables, words) = words.split_at(assigned);
    // Assignments alone are no command.
    let [program, rest @ ..] = words else { return Ok(()) };
    match program.rsplit('/').next().unwrap_or_default() {
        name if PROGRAMS.contains(&name) => helps.check(&words.join(" ")),
        "time" => one(helps, folder, rest),
        "sudo" => match rest {
            ["-u", user, rest @ ..] => unit_has(&format!("User={user}\n")).and_then(|()| one(helps, folder, rest)),
            rest => one(helps, folder, rest),
        },
        "docker" => one(helps, folder, compose(rest)?),
        "kubectl" => one(helps, folder, kubectl(rest)?),
        "helm" => helm(rest),
        "podman" => podman(rest),
        "cargo" => cargo(rest),
        "pip" => rest.iter().skip(1).try_for_each(|package| pip(package)),
        "systemctl" | "journalctl" => systemd(rest),
        "useradd" => unit_has(&format!("User={}\n", rest.last().unwrap_or(&""))),
        "install" => install(rest),
        // Of other programs, the values that our connectors read.
        "vllm" | "sglang" | "curl" => connected(variables, rest),
        _ if program.contains('/') => script(folder, variables, program, rest),
        "cd" | "export" | "git" | "sha256sum" => Ok(()),
        name => Err(format!("nothing checks {name:?}: give it a rule in tests/tests/it/docs/unrun.rs")),
    }
}

fn holds(condition: bool, why: impl FnOnce() -> String) -> Checked {
    if condition { Ok(()) } else { Err(why()) }
}

/// `NAME=value`.
fn variable<'a>(word: &&'a str) -> Option<(&'a str, &'a str)> {
    let (name, value) = word.split_once('=')?;
    (!name.is_empty() && name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_')).then_some((name, value))
}

fn text(name: &str) -> Result<String, String> {
    std::fs::read_to_string(root().join(name)).map_err(|_| format!("there is no file {name}"))
}

/// What follows an option, each time that it is given.
fn values<'a>(words: &[&'a str], option: &str) -> Vec<&'a str> {
    words.windows(2).filter(|pair| pair[0] == option).map(|pair| pair[1]).collect()
}

/// The words that are neither options nor values of `with_value`.
fn plain<'a>(words: &[&'a str], with_value: &[&str]) -> Vec<&'a str> {
    let is_value = |i: usize| i > 0 && with_value.contains(&words[i - 1]);
    words.iter().enumerate().filter(|(i, word)| !word.starts_with('-') && !is_value(*i)).map(|(_, word)| *word).collect()
}

/// Whether a text has it as a word of its own.
fn has_word(text: &str, word: &str) -> bool {
    text.split(|c: char| !(c.is_alphanumeric() || matches!(c, '-' | '_'))).any(|found| found == word)
}

/// A script of the repository. It knows each variable, option and word, or `check` calls it so.
fn script(folder: &Path, variables: &[&str], program: &str, rest: &[&str]) -> Checked {
    let places = [root().join(program), root().join(folder).join(program)];
    let path = places.iter().find(|path| path.is_file()).ok_or_else(|| format!("there is no script {program}"))?;
    if program == "./check" {
        let output = Command::new(path).arg("--help").output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        let unknown = rest.iter().find(|word| !help.lines().any(|line| line.starts_with(&format!("  {word} "))));
        holds(unknown.is_none(), || format!("./check does not know {unknown:?}"))?;
    }
    let known = std::fs::read_to_string(path).unwrap() + &text("check")?;
    let words = rest.iter().copied().filter(|word| !root().join(word).exists());
    // A script of a folder runs others there.
    let beside = Path::new(program).parent().filter(|folder| folder.components().count() > 1);
    let others = || files(|_| true).into_iter().filter(|name| beside.is_some_and(|folder| Path::new(name).starts_with(folder)));
    let names = variables.iter().filter_map(variable).map(|(name, _)| name);
    let names = names.filter(|name| !others().any(|other| text(&other).is_ok_and(|text| has_word(&text, name))));
    let unknown = names.chain(words).find(|word| !has_word(&known, word));
    holds(unknown.is_none(), || format!("{program} does not know {unknown:?}"))
}

fn connected(variables: &[&str], rest: &[&str]) -> Checked {
    let known = text("capture-agent/connectors/pyproject.toml")?;
    let variables = || variables.iter().filter_map(variable);
    let unknown = variables().find(|(name, _)| !has_word(&known, name));
    holds(unknown.is_none(), || format!("no connector has the variable {unknown:?}"))?;
    variables().map(|(_, value)| value).chain(rest.iter().copied()).filter(|value| value.starts_with('{')).try_for_each(|document| {
        serde_json::from_str::<serde_json::Value>(document).map(drop).map_err(|error| format!("{document}: {error}"))
    })
}

/// A command of Docker Compose, and the command that it runs in a container.
fn compose<'a>(rest: &'a [&'a str]) -> Result<&'a [&'a str], String> {
    let file = yaml("deploy/compose/compose.yaml")?;
    let service = |name: &str| holds(!file[0]["services"][name].is_badvalue(), || format!("compose.yaml has no service {name:?}"));
    match rest {
        ["compose", "up", "--detach"] => Ok(&[]),
        ["compose", "cp", from, _] => service(from.split(':').next().unwrap_or_default()).map(|()| &[][..]),
        ["compose", "exec", "-T", name, command @ ..] => service(name).map(|()| command),
        _ => Err(format!("no rule knows docker {}", rest.join(" "))),
    }
}

/// A command of `kubectl`, and the command that it runs in a pod.
fn kubectl<'a>(rest: &'a [&'a str]) -> Result<&'a [&'a str], String> {
    let (rest, command) = rest.iter().position(|word| *word == "--").map_or((rest, &[][..]), |at| (&rest[..at], &rest[at + 1..]));
    let mut objects = yaml("deploy/kustomize/base/registry.yaml")?;
    for file in ["base/agent.yaml", "example/namespace.yaml"] {
        objects.extend(yaml(&format!("deploy/kustomize/{file}"))?);
    }
    let object = |kind: &str, name: &str| {
        let found = objects.iter().any(|object| object["kind"].as_str() == Some(kind) && object["metadata"]["name"].as_str() == Some(name));
        holds(found, || format!("deploy/kustomize has no {kind} {name:?}"))
    };
    let pods = |word: &str| match word.split_once('/') {
        Some(("deploy" | "deployment", name)) => object("Deployment", name),
        Some(("daemonset", name)) => object("DaemonSet", name),
        _ => Err(format!("{word:?} is no deployment and no daemonset")),
    };
    let deployed = files(|name| name.ends_with(".yaml")).into_iter().filter(|name| name.starts_with("deploy/"));
    let deployed: String = deployed.map(|name| text(&name).unwrap_or_default()).collect();
    let is_there = |name: &str| {
        let is = |line: &str| line.split([' ', '{', '}', ',']).any(|word| word.trim_end_matches(':') == name);
        holds(deployed.lines().filter(|line| !line.contains('#')).any(is), || format!("nothing in deploy/ has the name {name:?}"))
    };
    values(rest, "-n").iter().chain(&values(rest, "--namespace")).try_for_each(|name| object("Namespace", name))?;
    values(rest, "--from-env-file").iter().try_for_each(|name| text(name).map(drop))?;
    match plain(rest, &["-n", "--namespace", "--from-env-file", "--from-literal"])[..] {
        ["apply", folder] if rest.contains(&"-k") => text(&format!("deploy/kustomize/{folder}/kustomization.yaml")).map(drop),
        ["rollout", "status", pod] | ["exec", pod] => pods(pod),
        ["create", "namespace", name] => object("Namespace", name),
        ["create", "secret", "generic", name] => is_there(name),
        ["label", "node", "NODE", label] => is_there(label.split('=').next().unwrap_or_default()),
        _ => Err(format!("no rule knows kubectl {}", rest.join(" "))),
    }
    .map(|()| command)
}

fn yaml(name: &str) -> Result<Vec<Yaml>, String> {
    YamlLoader::load_from_str(&text(name)?).map_err(|error| format!("{name}: {error}"))
}

/// The chart, and the values that are set.
fn helm(rest: &[&str]) -> Checked {
    let [_, _, chart] = plain(rest, &["--namespace", "--set"])[..] else { return Err("helm wants a command, a name and a chart".into()) };
    text(&format!("{chart}/Chart.yaml"))?;
    let known = yaml(&format!("{chart}/values.yaml"))?.remove(0);
    for set in values(rest, "--set") {
        let mut at = &known;
        for name in set.split('=').next().unwrap_or_default().split('.') {
            // Any setting, and any label.
            if at.as_hash().is_some_and(|map| map.keys().any(|key| key.as_str().is_some_and(|key| key.starts_with("PF_")))) {
                break;
            }
            at = &at[name];
            holds(!at.is_badvalue(), || format!("values.yaml has no {name:?} of {set:?}"))?;
        }
    }
    Ok(())
}

fn podman(rest: &[&str]) -> Checked {
    holds(rest.first() == Some(&"build"), || format!("no rule knows podman {}", rest.join(" ")))?;
    let file = values(rest, "-f").into_iter().map(text).collect::<Result<String, String>>()?;
    let unknown = values(rest, "--target").into_iter().find(|stage| !file.lines().any(|line| line.ends_with(&format!(" AS {stage}"))));
    holds(unknown.is_none(), || format!("there is no stage {unknown:?}"))
}

fn pip(package: &str) -> Checked {
    if let Some(wheel) = package.strip_suffix(".whl") {
        let (name, rest) = wheel.split_once('-').unwrap_or_default();
        let made = has_word(&text("tools/wheels/build")?, &name.replace('_', "-"));
        return holds(made && rest.starts_with(concat!(env!("CARGO_PKG_VERSION"), "-")), || format!("nothing makes {package}"));
    }
    let (folder, extra) = package.trim_end_matches(']').split_once('[').unwrap_or((package, ""));
    let project = text(&format!("{folder}/pyproject.toml"))?;
    holds(extra.is_empty() || project.contains(&format!("\n{extra} = [")), || format!("{folder} has no extra {extra:?}"))
}

/// The systemd units of the repository.
fn units() -> Vec<(String, String)> {
    files(|name| name.ends_with(".service")).into_iter().map(|name| (name.clone(), text(&name).unwrap())).collect()
}

fn unit_has(what: &str) -> Checked {
    holds(units().iter().any(|(_, unit)| unit.contains(what)), || format!("no unit has {what:?}"))
}

fn systemd(rest: &[&str]) -> Checked {
    let known = |word: &&&str| {
        ["enable", "restart", "daemon-reload"].contains(*word)
            || units().iter().any(|(name, _)| name.ends_with(&format!("/{word}.service")))
    };
    let unknown = plain(rest, &[]).into_iter().find(|word| !known(&word));
    holds(unknown.is_none(), || format!("there is no unit {unknown:?}"))
}

/// Files that exist, or that the reader writes, become those that a unit names.
fn install(rest: &[&str]) -> Checked {
    let [source, destination] = plain(rest, &["-m"])[..] else { return Err("one file and one place are expected".into()) };
    let name = source.rsplit('/').next().unwrap_or_default();
    let place = if destination.ends_with('/') { format!("{destination}{name}") } else { destination.to_owned() };
    let is_unit = place == format!("/etc/systemd/system/{name}") && units().iter().any(|(unit, _)| unit == source);
    holds(is_unit || units().iter().any(|(_, unit)| has_path(unit, &place)), || format!("no unit names {place}"))?;
    let is_program = source.strip_prefix("target/release/").is_some_and(|name| PROGRAMS.contains(&name));
    holds(is_program || name == source || root().join(source).is_file(), || format!("there is no file {source}"))
}

fn has_path(unit: &str, path: &str) -> bool {
    unit.split([' ', '\n', '=']).any(|word| word.trim_start_matches('-') == path)
}

fn cargo(rest: &[&str]) -> Checked {
    let rest: Vec<&str> = rest.iter().copied().filter(|word| !word.starts_with('+')).take_while(|word| *word != "--").collect();
    let (help, rest) = match rest[..] {
        ["nextest", "run", ref rest @ ..] => (&["nextest", "run"][..], rest),
        // It takes the options of `check`, and its own help lists others.
        ["clippy", ref rest @ ..] => (&["check"][..], rest),
        [ref command @ ("build" | "check" | "fmt" | "install"), ref rest @ ..] => (std::slice::from_ref(command), rest),
        // It may not be installed.
        ["fuzz", "list"] => return Ok(()),
        ["fuzz", "run", ref rest @ ..] => {
            let [target] = plain(rest, &["-s"])[..] else { return Err("one target is expected".into()) };
            return holds(text("fuzz/Cargo.toml")?.contains(&format!("\nname = \"{target}\"\n")), || {
                format!("there is no fuzz target {target:?}")
            });
        }
        _ => return Err(format!("no rule knows cargo {}", rest.join(" "))),
    };
    let output = Command::new("cargo").args(help).arg("--help").output().map_err(|error| format!("cargo: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let unknown = rest.iter().find(|word| word.starts_with('-') && !has_word(&said, word));
    holds(unknown.is_none(), || format!("cargo {} has no option {unknown:?}", help.join(" ")))?;
    let packages = packages();
    let mut folders = Vec::new();
    for name in values(rest, "-p") {
        let found = packages.iter().find(|(package, _)| package == name).ok_or_else(|| format!("there is no package {name:?}"))?;
        folders.push(found.1.clone());
    }
    if folders.is_empty() {
        folders = packages.into_iter().map(|(_, folder)| folder).collect();
    }
    let profiles = text(".config/nextest.toml")?;
    let unknown = values(rest, "--profile").into_iter().find(|name| !profiles.contains(&format!("[profile.{name}]")));
    holds(unknown.is_none(), || format!("there is no profile {unknown:?}"))?;
    let others = plain(rest, &["-p", "--profile", "-E"]);
    if help == ["install"] {
        return others
            .into_iter()
            .try_for_each(|name| holds(has_word(&text("check")?, name), || format!("./check does not install {name:?}")));
    }
    let filters = values(rest, "-E").into_iter().map(|filter| {
        filter
            .strip_prefix("test(")
            .and_then(|filter| filter.strip_suffix(')'))
            .ok_or_else(|| format!("no rule knows the filter {filter:?}"))
    });
    for filter in filters.chain(others.into_iter().map(Ok)) {
        let (filter, modules) = (filter?, folders.iter().flat_map(|folder| modules(folder)));
        let found = modules.into_iter().any(|module| format!("{module}::").contains(filter));
        holds(found, || format!("no tests are called {filter:?} there"))?;
    }
    Ok(())
}

/// Packages of the repository, and their folders.
fn packages() -> Vec<(String, PathBuf)> {
    let name =
        |file: &String| Some(text(file).ok()?.lines().find_map(|line| line.strip_prefix("name = \""))?.trim_end_matches('"').to_owned());
    let manifests = files(|name| name == "Cargo.toml");
    manifests.iter().filter_map(|file| Some((name(file)?, Path::new(file).parent()?.to_owned()))).collect()
}

/// Modules of a package's tests, each with the names of those around it.
fn modules(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for within in ["src", "tests/it"].map(|part| folder.join(part)) {
        let sources = files(|name| name.ends_with(".rs")).into_iter().filter(|name| Path::new(name).starts_with(&within));
        for source in sources {
            let text = text(&source).unwrap_or_default();
            let module = Path::new(&source).strip_prefix(&within).unwrap().with_extension("");
            let module = module.to_str().unwrap().trim_end_matches("/mod").replace('/', "::");
            let inner = text.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(" {"));
            found.extend(inner.map(|inner| format!("{module}::{inner}")));
            if text.contains("test]") {
                found.push(module);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(line: &str) -> Checked {
        check(&mut Helps::default(), Path::new("fuzz"), line)
    }

    #[test]
    fn a_line_is_split_into_commands() {
        let words = |line: &str| commands(line).iter().map(|words| words.join(" ")).collect::<Vec<_>>();
        assert_eq!(words("A=1 x 'b c' > f && y --z   # no"), ["A=1 x b c", "y --z"]);
        assert_eq!(words("T=$(x exec -- y \"a|b\")"), ["x exec -- y a|b"]);
        assert_eq!(words("export T=$(x)"), ["export", "x"]);
        assert_eq!(scripts(Path::new("fuzz"), "A=1 ./seed x && ./check && ls ./demo"), ["fuzz/seed", "check"]);
    }

    #[test]
    fn what_a_line_names_is_there() {
        for line in [
            "PF_LONG=1 registry/check-requests",
            "PF_REQUIRE=python ./check long",
            "./seed",
            "cargo nextest run --profile long -p pfr-tests -E 'test(e2e::crash::long)'",
            "cargo nextest run -p pfr-faults long:: --no-capture",
            "cargo build -p pfr-registry --bins && target/release/pf-bench gc --json x",
            "docker compose exec -T registry-1 pf-registry token create --label a --scope b",
            "T=$(kubectl exec -n pf deploy/pf-registry -- pf-registry token create --label a)",
            "helm upgrade pf deploy/helm/pf --set registry.settings.ANY=1 --set registry.serviceMonitor.enabled=true",
            "sudo install -D -m 0644 registry/pf-registry.toml /etc/pf-registry/pf-registry.toml",
            "pip install './capture-agent/connectors[vllm]'",
        ] {
            assert_eq!(checked(line), Ok(()), "{line}");
        }
    }

    #[test]
    fn what_a_line_names_and_is_not_there_is_a_fault() {
        for line in [
            "unknown",
            "PF_SHORT=1 registry/check-requests",
            "registry/check-nothing",
            "./check typo",
            "capture-agent/connectors/lint --mend",
            "cargo nextest run -p pfr-tests -E 'test(e2e::crush)'",
            "cargo nextest run -p pfr-store -E 'test(e2e::crash)'",
            "cargo nextest run --profile short",
            "cargo build -p pfr-nothing",
            "cargo build --bin-s",
            "RUSTC_BOOTSTRAP=1 cargo fuzz run nothing",
            "docker compose exec -T registry-9 pf-registry token create",
            "docker compose exec -T registry-1 pf-registry nothing",
            "kubectl exec -n pf deploy/pf-agent -- pf ls",
            "kubectl exec -n pf deploy/pf-registry -- pf nothing",
            "kubectl exec -n other deploy/pf-registry -- pf ls",
            "kubectl apply -k nothing",
            "kubectl create secret generic pf-nothing",
            "kubectl label node NODE pf-nothing=true",
            "helm install pf deploy/helm/pf --set registry.nothing=1",
            "podman build -f deploy/Containerfile --target nothing .",
            "pip install pf_client-9.9.9-py3-none-any.whl",
            "pip install './capture-agent/connectors[nothing]'",
            "sudo systemctl restart nothing",
            "sudo -u nobody pf-registry health",
            "sudo install -m 0600 secrets.env /etc/pf/secrets.env",
            "sudo install registry/nothing.service /etc/systemd/system/",
            "vllm serve --kv-transfer-config '{\"a\": }'",
            "PF_NOTHING='{}' sglang serve",
        ] {
            assert!(checked(line).is_err(), "{line}");
        }
    }
}
