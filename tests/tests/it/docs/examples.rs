//! The files that operators copy: annotated settings, which the real programs read, and systemd
//! units.

use super::page::root;
use pfr_testkit::tls::Authority;
use pfr_tests::{binary, own_address, skip, wait_for};
use std::collections::BTreeSet;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// All keys of a settings file, including those that are commented out.
pub fn keys(text: &str) -> BTreeSet<String> {
    text.lines().filter_map(|line| Some(key(line)?.0.to_owned())).collect()
}

/// A line `key = value`, or `# key = value`.
fn key(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.strip_prefix("# ").unwrap_or(line).split_once(" = ")?;
    (!key.is_empty() && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'-')).then_some((key, value))
}

/// A settings file in which no key is commented out.
fn uncommented(text: &str) -> String {
    text.lines().filter_map(key).map(|(key, value)| format!("{key} = {value}\n")).collect()
}

/// A program with its settings file, and a command that reads it.
struct Example {
    file: &'static str,
    program: &'static str,
    args: &'static [&'static str],
    variable: &'static str,
}

const EXAMPLES: [Example; 3] = [
    Example { file: "client/config.toml", program: "pf", args: &["completions", "bash"], variable: "PF_CONFIG" },
    Example { file: "registry/pf-registry.toml", program: "pf-registry", args: &["rebuild", "--data"], variable: "PF_REGISTRY_CONFIG" },
    // `pf-agent` has no command that ends by itself. A test below starts its unit with this file.
    Example { file: "capture-agent/pf-agent.toml", program: "pf-agent", args: &["serve"], variable: "PF_AGENT_CONFIG" },
];

impl Example {
    /// Runs the program with `settings` as its file.
    fn run(&self, settings: &str, dir: &Path) -> Output {
        let file = dir.join("settings.toml");
        std::fs::write(&file, settings).unwrap();
        let mut command = Command::new(binary(self.program));
        command.env_clear().env("HOME", dir).env(self.variable, &file).args(self.args);
        if self.args.last() == Some(&"--data") {
            command.arg(dir.join("data"));
        }
        command.output().unwrap()
    }
}

#[test]
fn the_annotated_settings_have_every_key_and_parse() {
    for example in &EXAMPLES {
        let dir = tempfile::tempdir().unwrap();
        // `pf-registry rebuild` wants packs.
        std::fs::create_dir_all(dir.path().join("data/packs")).unwrap();
        let text = std::fs::read_to_string(root().join(example.file)).unwrap();
        // The parser's error about an unknown key lists all keys that it knows.
        let refused = example.run("no-such-key = 1\n", dir.path());
        let error = String::from_utf8(refused.stderr).unwrap();
        let (_, known) = error.split_once("expected one of").unwrap_or_else(|| panic!("{}: {error}", example.program));
        let known: BTreeSet<String> = known.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        assert!(refused.status.code() == Some(1) && known.len() >= 5, "{error}");
        assert_eq!(keys(&text), known, "{}: the annotated file has other keys than the program", example.file);
        if example.program == "pf-agent" {
            continue;
        }
        for settings in [text.clone(), uncommented(&text)] {
            let output = example.run(&settings, dir.path());
            assert!(output.status.success(), "{}: {output:?}\n{settings}", example.file);
        }
    }
}

#[test]
fn the_defaults_in_the_annotated_settings_of_pf_are_those_of_its_help() {
    let text = std::fs::read_to_string(root().join("client/config.toml")).unwrap();
    let help = String::from_utf8(Command::new(binary("pf")).arg("--help").output().unwrap().stdout).unwrap();
    for (name, value) in text.lines().filter_map(key).filter(|(name, _)| name.starts_with("retr")) {
        let option = help.lines().position(|line| line.trim_start().starts_with(&format!("--{name} "))).unwrap();
        let words = help.lines().skip(option).take(3).flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ");
        assert!(words.contains(&format!("[default: {value}")), "{name} = {value}: {words}");
    }
}

/// The unit of a service.
struct Unit {
    path: PathBuf,
    text: String,
}

impl Unit {
    fn read(name: &str) -> Self {
        let path = root().join(name);
        Self { text: std::fs::read_to_string(&path).unwrap(), path }
    }

    /// The value of a key that occurs exactly once.
    fn get(&self, key: &str) -> &str {
        let values: Vec<&str> = self.text.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect();
        let [value] = values[..] else { panic!("{}: {key} occurs {} times", self.path.display(), values.len()) };
        value
    }

    /// Lets systemd check the unit, with our program where the unit expects it.
    fn verify(&self, program: &str) {
        if Command::new("systemd-analyze").arg("--version").stdout(Stdio::null()).status().is_err() {
            return skip("systemd", &format!("systemd-analyze, which checks {}, is not installed", self.path.display()));
        }
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join(self.path.file_name().unwrap());
        let installed = self.get("ExecStart").split(' ').next().unwrap();
        std::fs::write(&copy, self.text.replace(installed, binary(program).to_str().unwrap())).unwrap();
        let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&copy).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        // systemd-analyze only warns about an unknown key, and succeeds.
        assert!(output.status.success() && said.trim().is_empty(), "{}: {said}", self.path.display());
    }

    /// Lets systemd say how much of the system the service could reach if it were taken over: from
    /// 0 (nothing) to 10 (everything).
    fn assert_exposure_is_at_most(&self, limit: f64) {
        let asked = Command::new("systemd-analyze").args(["security", "--offline=true", "--no-pager"]).arg(&self.path).output();
        let Ok(output) = asked else {
            return skip("systemd", "systemd-analyze, which rates units, is not installed");
        };
        let said = String::from_utf8_lossy(&output.stdout);
        let rated = said.lines().find_map(|line| line.split("Overall exposure level for ").nth(1)?.split_whitespace().nth(1));
        let rated: f64 = rated.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{}: {output:?}", self.path.display()));
        assert!(rated <= limit, "{} is rated {rated}, {limit} is allowed:\n{said}", self.path.display());
    }

    /// The command that the unit starts, with the settings file of the repository.
    fn command(&self, program: &str, settings: &str) -> Command {
        let mut words = self.get("ExecStart").split(' ');
        assert_eq!(words.next().unwrap(), format!("/usr/local/bin/{program}"));
        let mut command = Command::new(binary(program));
        command.env_clear().stdout(Stdio::piped()).stderr(Stdio::null());
        for word in words {
            let installed = format!("/etc/{program}/{program}.toml");
            command.arg(if word == installed { root().join(settings).display().to_string() } else { word.to_owned() });
        }
        command
    }
}

/// Sends the unit's stop signal to the program and expects exit code 0.
fn stop(mut child: Child, signal: &str) {
    let signal = signal.strip_prefix("SIG").unwrap();
    assert!(Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap().success());
    let status = wait_for("the program to end", 60, || child.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

fn first_line(child: &mut Child) -> String {
    use std::io::BufRead as _;
    let mut line = String::new();
    std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    line
}

#[test]
fn the_unit_of_the_registry_starts_and_stops_it() {
    let unit = Unit::read("registry/pf-registry.service");
    unit.verify("pf-registry");
    unit.assert_exposure_is_at_most(2.0);
    let settings = std::fs::read_to_string(root().join("registry/pf-registry.toml")).unwrap();
    let data = format!("data = \"/var/lib/{}\"", unit.get("StateDirectory"));
    assert!(settings.contains(&data), "the settings file does not use the unit's state directory: {data}");
    let dir = tempfile::tempdir().unwrap();
    let mut command = unit.command("pf-registry", "registry/pf-registry.toml");
    // Environment variables override the settings file, as those of the unit's EnvironmentFile do.
    command.env("PF_REGISTRY_DATA", dir.path().join("data")).env("PF_REGISTRY_LISTEN", format!("{}:0", own_address()));
    let mut child = command.spawn().unwrap();
    let line = first_line(&mut child);
    assert!(line.starts_with("listening on http://"), "{line}");
    stop(child, unit.get("KillSignal"));
}

#[test]
fn the_unit_of_the_registry_gives_it_time_to_drain() {
    let unit = Unit::read("registry/pf-registry.service");
    let settings = std::fs::read_to_string(root().join("registry/pf-registry.toml")).unwrap();
    let grace = settings.lines().find_map(|line| line.strip_prefix("shutdown-grace = ")).unwrap();
    let (grace, limit): (u64, u64) = (grace.parse().unwrap(), unit.get("TimeoutStopSec").parse().unwrap());
    // Up to one grace period for requests in flight, one for a collection on request, and two
    // seconds for blocking work.
    assert!(limit > 2 * grace + 2, "{limit} s are not enough for a grace of {grace} s");
    assert!(unit.get("LimitNOFILE").parse::<u64>().unwrap() >= 4096);
}

#[test]
fn the_unit_of_the_agent_starts_and_stops_it() {
    let unit = Unit::read("capture-agent/pf-agent.service");
    unit.verify("pf-agent");
    // It needs devices and their memory, which a registry does not.
    unit.assert_exposure_is_at_most(3.0);
    assert_eq!(unit.get("Type"), "notify");
    let dir = tempfile::tempdir().unwrap();
    let manager = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // Every key of the annotated file is set. Flags override those that depend on this machine.
    let settings = uncommented(&std::fs::read_to_string(root().join("capture-agent/pf-agent.toml")).unwrap());
    std::fs::write(dir.path().join("pf-agent.toml"), &settings).unwrap();
    std::fs::write(dir.path().join("token"), "a token\n").unwrap();
    Authority::new().write(dir.path().join("ca.pem"));
    let mut command = unit.command("pf-agent", dir.path().join("pf-agent.toml").to_str().unwrap());
    command.env("NOTIFY_SOCKET", dir.path().join("notify")).env("HOME", dir.path());
    command.arg("--metrics-listen").arg(format!("{}:0", own_address()));
    for (flag, name) in
        [("--data", "data"), ("--socket", "a.sock"), ("--engine-socket", "e.sock"), ("--token-file", "token"), ("--tls-ca", "ca.pem")]
    {
        command.arg(flag).arg(dir.path().join(name));
    }
    let mut child = command.spawn().unwrap();
    let line = first_line(&mut child);
    assert!(line.starts_with("listening on "), "{line}");
    let mut state = [0; 64];
    let length = manager.recv(&mut state).unwrap();
    assert_eq!(&state[..length], b"READY=1");
    stop(child, "SIGTERM");
}

#[test]
fn commented_keys_are_keys_and_sentences_are_not() {
    let text = "# A sentence with = in it.\n# retry-for = 120\nlog = \"info\"\n# PF_X = no\n";
    assert_eq!(keys(text), BTreeSet::from(["retry-for".to_owned(), "log".to_owned()]));
    assert_eq!(uncommented(text), "retry-for = 120\nlog = \"info\"\n");
}
