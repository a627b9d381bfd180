//! Every command that a message prints, pasted into a shell that knows nothing of the command
//! before: it must mean the same store.

use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, repository, selector, tag, target};
use pfr_client::{Destination, Progress, PushTarget, Source, pull, push};
use pfr_schema::{Digest, RepositoryName};
use pfr_store::{Options, Store};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Four stores that hold the same snapshots: two registries and two local stores. The configuration
/// file names one of each, so a command that loses its flags finds something to read, and to
/// delete, in the wrong place.
struct World {
    given: Registry,
    configured: Registry,
    home: TempDir,
    /// Directories of the snapshots `base` and `x`, whose parent is `base`.
    sources: [TempDir; 2],
    digest: Digest,
}

/// One of the four stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    GivenRegistry,
    ConfiguredRegistry,
    GivenStore,
    ConfiguredStore,
}

const PLACES: [Place; 4] = [Place::GivenRegistry, Place::ConfiguredRegistry, Place::GivenStore, Place::ConfiguredStore];

impl Place {
    /// Name of a repository that only this store has.
    fn marker(self) -> &'static str {
        match self {
            Self::GivenRegistry => "only/given-registry",
            Self::ConfiguredRegistry => "only/configured-registry",
            Self::GivenStore => "only/given-store",
            Self::ConfiguredStore => "only/configured-store",
        }
    }
}

/// A way to say which store a command means.
struct Way {
    place: Place,
    /// What references begin with.
    prefix: String,
    flags: Vec<String>,
    environment: Vec<(&'static str, String)>,
}

impl World {
    async fn new() -> Self {
        let (given, configured, home) = (Registry::start().await, Registry::start().await, tempfile::tempdir().unwrap());
        let sources = [directory(SMALL, &[1, 2]), directory(SMALL, &[1, 2, 3])];
        let mut world = Self { given, configured, home, sources, digest: Digest::sha256(b"") };
        for place in PLACES {
            world.digest = world.put(place).await;
        }
        let config = world.home.path().join(".config/pf");
        std::fs::create_dir_all(&config).unwrap();
        std::fs::write(config.join("config.toml"), format!("registry = {:?}\n", world.configured.url)).unwrap();
        world
    }

    /// Stores the snapshots, in a local store by pulling them.
    async fn put(&self, place: Place) -> Digest {
        let marker = || place.marker().parse::<RepositoryName>().unwrap();
        let progress = Progress::default();
        let registry = match place {
            Place::GivenRegistry => &self.given,
            Place::ConfiguredRegistry => &self.configured,
            Place::GivenStore | Place::ConfiguredStore => {
                let store = Store::open(&self.store_dir(place), Options::default()).await.unwrap();
                let mut digest = None;
                for (name, into) in [("base", marker()), ("base", repository()), ("x", repository())] {
                    let destination = Destination::Store { store: store.clone(), repository: into, tag: Some(tag(name)) };
                    let pulled = pull(&self.given.remote(), &repository(), &selector(name), &destination, &progress).await;
                    digest = Some(pulled.unwrap().digest);
                }
                return digest.unwrap();
            }
        };
        let [base, next] = self.sources.each_ref().map(|dir| Source::Directory(dir.path().into()));
        let remote = registry.remote();
        let marked = PushTarget { repository: marker(), ..target("base") };
        push(&base, &remote, marked, &progress).await.unwrap();
        let parent = push(&base, &remote, target("base"), &progress).await.unwrap().digest;
        push(&next, &remote, PushTarget { parents: vec![parent], ..target("x") }, &progress).await.unwrap().digest
    }

    fn store_dir(&self, place: Place) -> PathBuf {
        // A space, so that a path that is not quoted fails.
        self.home.path().join(if place == Place::GivenStore { "a store" } else { ".local/share/pf" })
    }

    /// Every way to mean each of the four stores.
    fn ways(&self) -> Vec<Way> {
        let way = |place, prefix: &str, flags: &[&str], environment: &[(&'static str, &str)]| Way {
            place,
            prefix: prefix.to_owned(),
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            environment: environment.iter().map(|(name, value)| (*name, (*value).to_owned())).collect(),
        };
        let (url, store) = (self.given.url.as_str(), self.store_dir(Place::GivenStore).display().to_string());
        vec![
            way(Place::GivenRegistry, "", &["--registry", url], &[]),
            way(Place::GivenRegistry, "", &["--remote"], &[("PF_REGISTRY", url)]),
            way(Place::GivenRegistry, &format!("{url}/"), &[], &[]),
            way(Place::ConfiguredRegistry, "", &[], &[]),
            way(Place::GivenStore, "", &["--local", "--store", &store], &[]),
            way(Place::GivenStore, "", &["--local"], &[("PF_STORE", &store)]),
            way(Place::ConfiguredStore, "", &["--local"], &[]),
        ]
    }

    /// Runs `pf`; the exit code, and everything it says.
    fn pf(&self, way: &Way, args: &[&str]) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pf"));
        command.env_clear().env("HOME", self.home.path()).envs(way.environment.iter().cloned());
        said(command.args(args).args(&way.flags))
    }

    /// Pastes a command into a shell of the same user.
    fn paste(&self, line: &str) -> (i32, String) {
        let programs = Path::new(env!("CARGO_BIN_EXE_pf")).parent().unwrap();
        said(Command::new("/bin/sh").env_clear().env("HOME", self.home.path()).env("PATH", programs).args(["-c", line]))
    }

    /// Whether `x` is there, in each of the four stores.
    async fn holds(&self) -> [bool; 4] {
        let mut holds = [false; 4];
        for (held, place) in holds.iter_mut().zip(PLACES) {
            *held = match place {
                Place::GivenRegistry => self.given.store.snapshot(&repository(), &self.digest).await.is_ok(),
                Place::ConfiguredRegistry => self.configured.store.snapshot(&repository(), &self.digest).await.is_ok(),
                _ => {
                    let store = Store::open(&self.store_dir(place), Options::default()).await.unwrap();
                    store.snapshot(&repository(), &self.digest).await.is_ok()
                }
            };
        }
        holds
    }
}

fn said(command: &mut Command) -> (i32, String) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    (output.status.code().unwrap(), format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

/// The commands in a message: they are between backticks.
fn commands(text: &str) -> Vec<String> {
    let found: Vec<String> = text.split('`').skip(1).step_by(2).filter(|part| part.starts_with("pf ")).map(str::to_owned).collect();
    assert!(!found.is_empty(), "no command in {text}");
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_that_rm_prints_deletes_in_the_same_store_and_in_no_other() {
    let world = World::new().await;
    for way in world.ways() {
        let (code, text) = world.pf(&way, &["rm", &format!("{}team/agent:x", way.prefix)]);
        assert_eq!(code, 0, "{text}");
        assert_eq!(world.holds().await, [true; 4], "a tag was deleted, and no snapshot");
        let [delete] = &commands(&text)[..] else { panic!("one command in {text}") };
        let (code, text) = world.paste(delete);
        assert_eq!(code, 0, "{delete}: {text}");
        assert_eq!(world.holds().await, PLACES.map(|place| place != way.place), "{delete}");
        // The command that the deletion suggests next collects in the same place; only a registry
        // is asked for it.
        let [collect] = &commands(&text)[..] else { panic!("one command in {text}") };
        let (code, text) = world.paste(&format!("{collect} --json"));
        let remote = matches!(way.place, Place::GivenRegistry | Place::ConfiguredRegistry);
        assert!(code == 0 && text.contains(r#""trigger":"request""#) == remote, "{collect}: {text}");
        world.put(way.place).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_in_hints_read_the_same_store() {
    let world = World::new().await;
    let absent = Digest::sha256(b"absent").to_string();
    for way in world.ways() {
        let reference = |text: &str| format!("{}{text}", way.prefix);
        // A command that fails, and what the pasted command shows if it looks at the right store.
        let provoked: [(&[&str], &str); 8] = [
            (&["ls", &reference("no/such")], way.place.marker()),
            (&["prune", "no/such", "--untagged"], way.place.marker()),
            (&["inspect", &reference(&format!("{}:absent", way.place.marker()))], "1 snapshot"),
            (&["rm", &reference(way.place.marker())], "1 snapshot"),
            (&["rm", &reference(&format!("{}:absent*", way.place.marker()))], "1 snapshot"),
            (&["rm", &reference("team/agent:x~1")], "tags"),
            (&["stats", &reference("team/agent:x")], "tags"),
            (&["tag", &reference("team/agent:x"), "moved", "--if-tag-is", &absent], "2 snapshots"),
        ];
        for (args, shows) in provoked {
            if args[0] == "prune" && !way.prefix.is_empty() {
                continue; // It takes no references.
            }
            let (code, text) = world.pf(&way, args);
            assert!(code > 0, "{args:?}: {text}");
            for command in commands(&text) {
                let (code, seen) = world.paste(&command);
                assert!(code == 0 && seen.contains(shows), "{args:?} {:?}: {command}: {seen}", way.flags);
                let others = PLACES.iter().filter(|place| **place != way.place);
                assert!(others.into_iter().all(|place| !seen.contains(place.marker())), "{command}: {seen}");
            }
        }
    }
    assert_eq!(world.holds().await, [true; 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_in_hints_work_as_printed() {
    let world = World::new().await;
    let (url, other) = (world.given.url.clone(), world.configured.url.clone());
    let store = world.store_dir(Place::GivenStore).display().to_string();
    let fresh = world.home.path().join("fresh").display().to_string();
    let way = Way { place: Place::ConfiguredRegistry, prefix: String::new(), flags: Vec::new(), environment: Vec::new() };
    let cases: Vec<Vec<String>> = [
        vec!["pin", "team/agent:x", "--store", &store],
        vec!["pin", "team/agent:x", "--remove", "--store", &store],
        vec!["ls", "--pinned", "--store", &store],
        vec!["ls", "team/agent", "--pinned", "--store", &store],
        vec!["gc", "--max-size", "1GiB", "--store", &store],
        vec!["push", "team/absent:x", "team/agent:y", "--store", &store],
        vec!["push", &format!("{url}/team/agent:x"), "team/agent:y", "--store", &fresh],
        vec!["diff", &format!("{url}/team/agent:x"), &format!("{other}/team/agent:base"), "--store", &fresh],
        vec!["match", "team/agent", "--tokens", "-", "--fingerprint", &Digest::sha256(b"f").to_string(), "--registry", &url],
    ]
    .into_iter()
    .map(|case| case.into_iter().map(str::to_owned).collect())
    .collect();
    for case in cases {
        let args: Vec<&str> = case.iter().map(String::as_str).collect();
        let (code, text) = world.pf(&way, &args);
        assert!(code > 0, "{args:?}: {text}");
        for command in commands(&text) {
            let (code, seen) = world.paste(&command);
            assert_eq!(code, 0, "{args:?}: {command}: {seen}");
        }
    }
    // The pin above was set and removed in the store that was given, and what was pulled is in the
    // fresh one.
    let store = Store::open(&world.home.path().join("fresh"), Options::default()).await.unwrap();
    let pulled: RepositoryName = repository();
    assert!(store.snapshot(&pulled, &world.digest).await.is_ok());
}

/// Answers as an agent whose engine is unknown, except when its engines are listed.
fn agent(socket: &Path) {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, mut request) = (stream.unwrap(), [0; 4096]);
            let n = stream.read(&mut request).unwrap();
            let (status, kind, body) = if request[..n].starts_with(b"GET /v1/engines ") {
                ("200 OK", "application/json", r#"{"engines":[]}"#)
            } else {
                let problem =
                    r#"{"type":"t","title":"t","status":404,"detail":"no engine \"e\"","code":"engine_unknown","retryable":false}"#;
                ("404 Not Found", "application/problem+json", problem)
            };
            let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.write_all((head + body).as_bytes()).unwrap();
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hint_about_an_agent_names_its_socket() {
    let world = World::new().await;
    let socket = world.home.path().join("an agent.sock");
    agent(&socket);
    let way = |environment| Way { place: Place::ConfiguredRegistry, prefix: String::new(), flags: Vec::new(), environment };
    let given = socket.display().to_string();
    for (way, args) in [
        (way(vec![]), vec!["snapshot", "e", "team/agent:y", "--agent", &given]),
        (way(vec![("PF_AGENT_SOCKET", given.clone())]), vec!["restore", "team/agent:x", "e"]),
    ] {
        let (code, text) = world.pf(&way, &args);
        assert_eq!(code, 5, "{text}");
        let [engines] = &commands(&text)[..] else { panic!("one command in {text}") };
        let (code, seen) = world.paste(engines);
        assert!(code == 0 && seen.contains("no engine is registered"), "{engines}: {seen}");
    }
}
