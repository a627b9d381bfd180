//! Commands that a message tells the user to run.
//!
//! A command that was written by hand into a message loses the flags of the command that failed,
//! and then means another store: a hint after `pf rm --local` once deleted a snapshot in the
//! registry. So a message holds a [`Suggestion`], which is rendered with the [`Flags`] of the
//! running command. No other text may spell a command of `pf`; a test reads the sources for it.

use pfr_schema::RepositoryName;
use std::ffi::OsString;
use std::fmt::{self, Display, Write as _};
use std::path::PathBuf;

/// Names the configuration file.
pub const CONFIG: &str = "PF_CONFIG";
/// Where the configuration is, if that is not set.
const CONFIG_HOME: &str = "XDG_CONFIG_HOME";
/// Where the default local store is.
const DATA_HOME: &str = "XDG_DATA_HOME";
/// Where the capture agent's socket is by default.
const RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";

/// The stores of the running command, as its command line or environment gives them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Registry that was given, or that the last reference names.
    pub registry: Option<String>,
    /// File with authorities that was given.
    pub tls_ca: Option<PathBuf>,
    /// Local store that was given.
    pub store: Option<PathBuf>,
    /// Socket of the capture agent that was given.
    pub agent: Option<PathBuf>,
    /// Whether the command means the local store.
    pub local: bool,
    /// Repository of the last reference.
    pub repository: Option<RepositoryName>,
    /// The variables that say where the configuration, the default store and the agent's socket
    /// are, if they are set: a user may have set them for this one command.
    pub places: Vec<(&'static str, String)>,
}

impl Flags {
    /// The variables of [`Self::places`], as `environment` has them.
    pub fn places_of(environment: impl Fn(&str) -> Option<OsString>) -> Vec<(&'static str, String)> {
        let home = environment("HOME").map(PathBuf::from).unwrap_or_default();
        // A login sets the last one.
        let run = PathBuf::from(format!("/run/user/{}", rustix::process::getuid().as_raw()));
        let places = [
            (CONFIG, None),
            (CONFIG_HOME, Some(home.join(".config"))),
            (DATA_HOME, Some(home.join(".local/share"))),
            (RUNTIME_DIR, Some(run)),
        ];
        let set = |(name, default): (_, Option<PathBuf>)| {
            let value = environment(name).filter(|value| !value.is_empty())?;
            let is_default = default.is_some_and(|default| default == *value);
            (!is_default).then(|| (name, value.to_string_lossy().into_owned()))
        };
        places.into_iter().filter_map(set).collect()
    }
}

/// The stores of a suggested command, which decide the flags that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// The same store as the running command.
    Here,
    Local,
    Registry,
    /// From a registry into the local store.
    Both,
    Agent,
    Nowhere,
}

/// A command line of `pf` to be suggested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suggestion {
    words: Vec<String>,
    scope: Scope,
    names_registry: bool,
    in_repository: bool,
}

impl Suggestion {
    /// A command that means the registry.
    pub fn new(command: &str) -> Self {
        Self { words: vec![command.to_owned()], scope: Scope::Registry, names_registry: false, in_repository: false }
    }

    /// The help of a command: what can be suggested where its arguments are not known.
    pub fn help(command: &str) -> Self {
        Self { scope: Scope::Nowhere, ..Self::new(command).arg("--help") }
    }

    /// Makes it work with the same store as the running command.
    #[must_use]
    pub fn here(self) -> Self {
        Self { scope: Scope::Here, ..self }
    }

    /// Makes it work with the local store.
    #[must_use]
    pub fn local(self) -> Self {
        Self { scope: Scope::Local, ..self }
    }

    /// Makes it read the registry and write the local store.
    #[must_use]
    pub fn both(self) -> Self {
        Self { scope: Scope::Both, ..self }
    }

    /// Makes it ask the capture agent.
    #[must_use]
    pub fn agent(self) -> Self {
        Self { scope: Scope::Agent, ..self }
    }

    /// Its next argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Display) -> Self {
        let word = argument.to_string();
        self.names_registry |= word.starts_with("http://") || word.starts_with("https://");
        self.words.push(word);
        self
    }

    /// Its next argument is the repository that the running command is about, if there is one.
    #[must_use]
    pub fn repository(self) -> Self {
        Self { in_repository: true, ..self }
    }

    /// Advice that begins with this command.
    pub fn then(self, text: &str) -> Advice {
        Advice::default().run(self).text(text)
    }

    /// The command line, with these flags.
    pub fn render(&self, flags: &Flags) -> String {
        let local = self.scope == Scope::Local || (self.scope == Scope::Here && flags.local);
        let stored = local || self.scope == Scope::Both;
        let socket = self.scope == Scope::Agent && flags.agent.is_none();
        let decides = |name: &str| match name {
            RUNTIME_DIR => socket,
            // The agent's socket is there, too, if the other variable is not set.
            DATA_HOME => (stored && flags.store.is_none()) || socket,
            _ => self.scope != Scope::Nowhere,
        };
        let places = flags.places.iter().filter(|(name, _)| decides(name));
        let mut words: Vec<String> = places.map(|(name, value)| format!("{name}={}", quoted(value))).collect();
        words.push("pf".to_owned());
        words.extend(self.words.iter().map(|word| quoted(word)));
        if let Some(repository) = flags.repository.as_ref().filter(|_| self.in_repository) {
            words.push(repository.to_string());
        }
        let registry = !local && !matches!(self.scope, Scope::Agent | Scope::Nowhere);
        if local {
            words.push("--local".to_owned());
        }
        let mut flag = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                words.extend([name.to_owned(), quoted(&value)]);
            }
        };
        flag("--registry", flags.registry.clone().filter(|_| registry && !self.names_registry));
        flag("--tls-ca", flags.tls_ca.as_ref().filter(|_| registry).map(|path| path.display().to_string()));
        let store = flags.store.as_ref().filter(|_| stored);
        flag("--store", store.map(|path| path.display().to_string()));
        flag("--agent", flags.agent.as_ref().filter(|_| self.scope == Scope::Agent).map(|path| path.display().to_string()));
        words.join(" ")
    }
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@~,=+%".contains(c);
    if !word.is_empty() && word.chars().all(plain) && !word.starts_with('~') {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Advice for the user: text with commands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advice(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Run(Suggestion),
}

impl Advice {
    /// Adds text.
    #[must_use]
    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.0.push(Part::Text(text.into()));
        self
    }

    /// Adds a command.
    #[must_use]
    pub fn run(mut self, command: Suggestion) -> Self {
        self.0.push(Part::Run(command));
        self
    }

    /// The text, each command in it complete and between backticks.
    pub fn render(&self, flags: &Flags) -> String {
        self.0.iter().fold(String::new(), |mut all, part| {
            // Writing to a string does not fail.
            let _ = match part {
                Part::Text(text) => all.write_str(text),
                Part::Run(command) => write!(all, "`{}`", command.render(flags)),
            };
            all
        })
    }
}

impl From<&str> for Advice {
    fn from(text: &str) -> Self {
        Self::default().text(text)
    }
}

impl From<String> for Advice {
    fn from(text: String) -> Self {
        Self::default().text(text)
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(&Flags::default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn flags() -> Flags {
        Flags {
            registry: Some("http://r:1".into()),
            tls_ca: None,
            store: Some("/my store".into()),
            agent: Some("/a.sock".into()),
            local: true,
            repository: Some("team/agent".parse().unwrap()),
            places: Vec::new(),
        }
    }

    #[test]
    fn a_command_carries_the_places_that_the_environment_names_and_that_decide() {
        let set = |names: &'static [&'static str]| {
            let places = Flags::places_of(|name| names.contains(&name).then(|| format!("/a {name}").into()));
            Flags { places, ..Flags::default() }
        };
        let (ls, pull) = (Suggestion::new("ls"), Suggestion::new("pull").both());
        assert_eq!(set(&[]), Flags::default());
        let all = set(&[CONFIG, CONFIG_HOME, DATA_HOME]);
        // Tokens of earlier logins are in the second, wherever the configuration is.
        let two = "PF_CONFIG='/a PF_CONFIG' XDG_CONFIG_HOME='/a XDG_CONFIG_HOME'";
        assert_eq!(ls.render(&all), format!("{two} pf ls"));
        assert_eq!(pull.render(&all), format!("{two} XDG_DATA_HOME='/a XDG_DATA_HOME' pf pull"));
        assert_eq!(pull.render(&Flags { store: Some("/s".into()), ..all.clone() }), format!("{two} pf pull --store /s"));
        let jobs = Suggestion::new("jobs").agent();
        assert_eq!(jobs.render(&set(&[DATA_HOME])), "XDG_DATA_HOME='/a XDG_DATA_HOME' pf jobs");
        assert_eq!(jobs.render(&set(&[RUNTIME_DIR])), "XDG_RUNTIME_DIR='/a XDG_RUNTIME_DIR' pf jobs");
        assert_eq!(jobs.render(&Flags { agent: Some("/s".into()), ..set(&[RUNTIME_DIR]) }), "pf jobs --agent /s");
        assert_eq!(pull.render(&set(&[RUNTIME_DIR])), "pf pull");
        assert_eq!(ls.render(&set(&[CONFIG_HOME, DATA_HOME])), "XDG_CONFIG_HOME='/a XDG_CONFIG_HOME' pf ls");
        let usual = |name: &str| {
            Some(match name {
                "HOME" => "/h".into(),
                DATA_HOME => "/h/.local/share".into(),
                RUNTIME_DIR => format!("/run/user/{}", rustix::process::getuid().as_raw()).into(),
                _ => "/h/.config".into(),
            })
        };
        assert_eq!(Flags::places_of(usual), [(CONFIG, "/h/.config".to_owned())]);
        assert_eq!(Suggestion::help("rm").render(&all), "pf rm --help");
    }

    #[test]
    fn a_command_carries_the_flags_of_the_running_one() {
        let (here, there) = (flags(), Flags { local: false, ..flags() });
        let rm = Suggestion::new("rm").here().arg("team/agent:x");
        assert_eq!(rm.render(&here), "pf rm team/agent:x --local --store '/my store'");
        assert_eq!(rm.render(&there), "pf rm team/agent:x --registry http://r:1");
        assert_eq!(rm.render(&Flags::default()), "pf rm team/agent:x");
        let (trusting, here) = (Flags { tls_ca: Some("/my ca".into()), ..there }, Flags { tls_ca: Some("/ca".into()), ..here });
        assert_eq!(rm.render(&trusting), "pf rm team/agent:x --registry http://r:1 --tls-ca '/my ca'");
        assert!(!rm.render(&here).contains("--tls-ca"), "no registry is asked");
        let (here, there) = (flags(), Flags { local: false, ..flags() });
        assert_eq!(Suggestion::new("ls").repository().render(&here), "pf ls team/agent --registry http://r:1");
        assert_eq!(Suggestion::new("engines").agent().render(&here), "pf engines --agent /a.sock");
        let pull = Suggestion::new("pull").both().arg("https://s/a:b");
        assert_eq!(pull.render(&here), "pf pull https://s/a:b --store '/my store'");
        assert_eq!([Suggestion::help("log").render(&here), Suggestion::help("log").render(&there)], ["pf log --help"; 2]);
    }

    #[test]
    fn words_survive_the_shell() {
        let shell = |word: &str| {
            let command = format!("printf %s {}", quoted(word));
            String::from_utf8(std::process::Command::new("sh").args(["-c", &command]).output().unwrap().stdout).unwrap()
        };
        for word in ["team/agent:try-*", "it's", "a b", "~x", "$HOME", "", "a\"b"] {
            assert_eq!(shell(word), word);
        }
    }

    /// A command that is spelled by hand has no flags.
    #[test]
    fn no_message_spells_a_command_by_hand() {
        let mut found = Vec::new();
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                let text = text.split("#[cfg(test)]").next().unwrap_or_default();
                let spelled = |line: &&str| line.contains("`pf ") && !line.trim_start().starts_with("//");
                // Help texts are no messages: nothing has failed there.
                if path.components().any(|part| part.as_os_str() == "args" || part.as_os_str() == "args.rs") {
                    continue;
                }
                found.extend(text.lines().filter(spelled).map(|line| format!("{}: {}", path.display(), line.trim())));
            }
        }
        assert!(found.is_empty(), "use a Suggestion: {found:#?}");
    }
}
