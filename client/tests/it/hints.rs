//! Every command that a message prints, pasted into a shell that knows nothing of the command
//! before: it must mean the same store.
//!
//! A case names the places in the sources whose commands it runs: the file, the function, the
//! command, and a number if the function has several of them. A place without a case fails a test.

use crate::common::agent::{Answer, agent, captured, drained, push as agent_push, warmed};
use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, repository, selector, tag, target};
use pfr_client::{Destination, Progress, PushTarget, Source, pull, push};
use pfr_schema::{Digest, RepositoryName};
use pfr_store::{Options, Store};
use pfr_testkit::front::{Fate, Front, Seen};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
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

impl Place {
    fn is_local(self) -> bool {
        matches!(self, Self::GivenStore | Self::ConfiguredStore)
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
        // Another configuration, which names the other registry and the other store.
        let (other, store) = (world.home.path().join("another/pf"), world.store_dir(Place::GivenStore).display().to_string());
        std::fs::create_dir_all(&other).unwrap();
        std::fs::write(other.join("config.toml"), format!("registry = {:?}\nstore = {store:?}\n", world.given.url)).unwrap();
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
        self.home.path().join(if place == Place::GivenStore { "a store/pf" } else { ".local/share/pf" })
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
        let other = |path: &str| self.home.path().join(path).display().to_string();
        vec![
            way(Place::GivenRegistry, "", &["--registry", url], &[]),
            way(Place::GivenRegistry, "", &["--remote"], &[("PF_REGISTRY", url)]),
            way(Place::GivenRegistry, &format!("{url}/"), &[], &[]),
            way(Place::ConfiguredRegistry, "", &[], &[]),
            way(Place::GivenStore, "", &["--local", "--store", &store], &[]),
            way(Place::GivenStore, "", &["--local"], &[("PF_STORE", &store)]),
            way(Place::ConfiguredStore, "", &["--local"], &[]),
            way(Place::GivenRegistry, "", &[], &[("PF_CONFIG", &other("another/pf/config.toml"))]),
            way(Place::GivenStore, "", &["--local"], &[("PF_CONFIG", &other("another/pf/config.toml"))]),
            way(Place::GivenRegistry, "", &[], &[("XDG_CONFIG_HOME", &other("another"))]),
            way(Place::GivenStore, "", &["--local"], &[("XDG_CONFIG_HOME", &other("another"))]),
            way(Place::GivenStore, "", &["--local"], &[("XDG_DATA_HOME", &other("a store"))]),
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

    /// Pastes a command that collects: a registry is asked for it, or the local store does it.
    fn collects(&self, way: &Way, command: &str) {
        let (code, text) = self.paste(&format!("{command} --json"));
        let requested = text.contains(r#""trigger":"request""#);
        assert!(code == 0 && requested != way.place.is_local(), "{command}: {text}");
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

/// The commands in a message: they are between backticks. They are those of these places in the
/// sources, and no others.
fn commands(sites: &[&str], text: &str) -> Vec<String> {
    // A command may begin with variables of the environment.
    let program = |part: &str| part.starts_with("pf ") || (part.contains(" pf ") && part.split(' ').next().unwrap().contains('='));
    let found: Vec<String> = text.split('`').skip(1).step_by(2).filter(|part| program(part)).map(str::to_owned).collect();
    let mut expected: Vec<&str> = sites.iter().filter_map(|site| site.split(' ').nth(2)).collect();
    let mut printed: Vec<&str> = found.iter().filter_map(|command| command.split(' ').skip_while(|word| *word != "pf").nth(1)).collect();
    expected.sort_unstable();
    printed.sort_unstable();
    assert_eq!(printed, expected, "{text}");
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_that_rm_prints_deletes_in_the_same_store_and_in_no_other() {
    let world = World::new().await;
    for way in world.ways() {
        let (code, text) = world.pf(&way, &["rm", &format!("{}team/agent:x", way.prefix)]);
        assert_eq!(code, 0, "{text}");
        assert_eq!(world.holds().await, [true; 4], "a tag was deleted, and no snapshot");
        let [delete] = &commands(&["commands/remove.rs remains rm"], &text)[..] else { panic!("one command in {text}") };
        let (code, text) = world.paste(delete);
        assert_eq!(code, 0, "{delete}: {text}");
        assert_eq!(world.holds().await, PLACES.map(|place| place != way.place), "{delete}");
        // The command that the deletion suggests next collects in the same place; only a registry
        // is asked for it.
        let [collect] = &commands(&["commands/remove.rs carry_out gc"], &text)[..] else { panic!("one command in {text}") };
        world.collects(&way, collect);
        world.put(way.place).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_that_prune_prints_collects_in_the_same_store() {
    let world = World::new().await;
    for way in world.ways() {
        let prune = ["prune", &format!("{}only/*", way.prefix), "--tag", "*"];
        if way.place.is_local() {
            let base = format!("{}:base", way.place.marker());
            assert_eq!(world.pf(&way, &["pin", &base]).0, 0);
            let (code, text) = world.pf(&way, &prune);
            assert!(code == 0 && text.contains("1 of them because they are pinned"), "{text}");
            let [list] = &commands(&["commands/prune.rs print ls"], &text)[..] else { panic!("one command in {text}") };
            let (code, text) = world.paste(list);
            assert!(code == 0 && text.contains(way.place.marker()), "{list}: {text}");
            assert_eq!(world.pf(&way, &["pin", &base, "--remove"]).0, 0);
        }
        let (code, text) = world.pf(&way, &prune);
        assert!(code == 0 && text.contains("1 snapshot deleted"), "{text}");
        let [collect] = &commands(&["commands/prune.rs print gc"], &text)[..] else { panic!("one command in {text}") };
        world.collects(&way, collect);
        world.put(way.place).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_in_hints_read_the_same_store() {
    let world = World::new().await;
    let absent = Digest::sha256(b"absent").to_string();
    for way in world.ways() {
        let reference = |text: &str| format!("{}{text}", way.prefix);
        // Where the command is made for a registry and for a local store, a command that fails, and
        // what the pasted command shows if it looks at the right store.
        let both = |site| [site, site];
        let provoked: [([&str; 2], &[&str], &str); 10] = [
            (["failure.rs hint ls", "failure.rs from ls"], &["ls", &reference("no/such")], way.place.marker()),
            (both("commands/prune.rs repositories ls"), &["prune", &reference("no/such"), "--untagged"], way.place.marker()),
            (
                ["failure.rs hint ls 2", "failure.rs from ls 2"],
                &["inspect", &reference(&format!("{}:absent", way.place.marker()))],
                "1 snapshot",
            ),
            (both("commands/remove.rs one ls"), &["rm", &reference(way.place.marker())], "1 snapshot"),
            (both("commands/remove.rs add ls"), &["rm", &reference(&format!("{}:absent*", way.place.marker()))], "1 snapshot"),
            (both("commands/remove.rs one inspect"), &["rm", &reference("team/agent:x~1")], "tags"),
            (both("args/reference.rs repository_of inspect"), &["stats", &reference("team/agent:x")], "tags"),
            (both("failure.rs about log"), &["inspect", &reference("team/agent:x~7")], "base"),
            (both("failure.rs hint ls 3"), &["tag", &reference("team/agent:x"), "moved", "--if-tag-is", &absent], "2 snapshots"),
            (both("usage.rs tip ls"), &["images"], way.place.marker()),
        ];
        for (sites, args, shows) in provoked {
            if args[0] == "images" && !way.prefix.is_empty() {
                continue; // It takes no reference.
            }
            let (code, text) = world.pf(&way, args);
            assert!(code > 0, "{args:?}: {text}");
            for command in commands(&[sites[usize::from(way.place.is_local())]], &text) {
                let (code, seen) = world.paste(&command);
                assert!(code == 0 && seen.contains(shows), "{args:?} {:?}: {command}: {seen}", way.flags);
                let others = PLACES.iter().filter(|place| **place != way.place);
                assert!(others.into_iter().all(|place| !seen.contains(place.marker())), "{command}: {seen}");
                assert_eq!(command.contains(" --local"), way.place.is_local(), "{args:?} {:?}: {command}", way.flags);
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
    let fingerprint = Digest::sha256(b"f").to_string();
    let address = url.strip_prefix("http://").unwrap();
    let cases: [(&[&str], &[&str]); 17] = [
        (&["commands/gc.rs pin pin"], &["pin", "team/agent:x", "--store", &store]),
        (&["commands/gc.rs pin pin"], &["pin", "team/agent:x", "--remove", "--store", &store]),
        (&["commands/pins.rs list ls"], &["ls", "--pinned", "--store", &store]),
        (&["commands/pins.rs list ls"], &["ls", "team/agent", "--pinned", "--store", &store]),
        (&["commands/gc.rs run gc"], &["gc", "--max-size", "1GiB", "--store", &store]),
        (&["commands/gc.rs run gc 2"], &["gc", "--unfinished", "--store", &store]),
        (&["commands/push.rs origin ls"], &["push", "team/absent:x", "team/agent:y", "--store", &store]),
        (&["commands/push.rs classify pull"], &["push", &format!("{url}/team/agent:x"), "team/agent:y", "--store", &fresh]),
        (&["commands/gc.rs pin pull"], &["pin", "team/agent:base", "--local", "--store", &fresh]),
        (
            &["commands/diff.rs run pull", "commands/diff.rs run pull 2", "commands/diff.rs run diff"],
            &["diff", &format!("{url}/team/agent:x"), &format!("{other}/team/agent:base"), "--store", &fresh],
        ),
        (&["commands/diff.rs with_tag diff"], &["diff", "team/agent:x", "base"]),
        (&["args/reference.rs repository_of ls"], &["ls", address]),
        (&["commands/list.rs advise ls"], &["ls", &format!("{url}/domains/default")]),
        (&["commands/matching.rs run ls"], &["match", "team/agent", "--tokens", "-", "--fingerprint", &fingerprint, "--registry", &url]),
        (
            &["commands/matching.rs complete inspect"],
            &["match", "team/agent", "--tokens", "-", "--fingerprint", &fingerprint[..18], "--registry", &url],
        ),
        (&["commands/tasks.rs unknown tasks"], &["tasks", "resume", "no-such", "--registry", &url]),
        (&["commands/agent.rs unknown engines"], &["engines", "--fleet", "--forget", "no-such", "--registry", &url]),
    ];
    for (sites, args) in cases {
        let (code, text) = world.pf(&way, args);
        assert!(code > 0, "{args:?}: {text}");
        for command in commands(sites, &text) {
            let (code, seen) = world.paste(&command);
            assert_eq!(code, 0, "{args:?}: {command}: {seen}");
            let registry = args.contains(&"--registry");
            assert!(!registry || command.ends_with(&format!("--registry {url}")), "{args:?}: {command}");
        }
    }
    // The pin above was set and removed in the store that was given; the pulled snapshot is in
    // the fresh one.
    let store = Store::open(&world.home.path().join("fresh"), Options::default()).await.unwrap();
    let pulled: RepositoryName = repository();
    assert!(store.snapshot(&pulled, &world.digest).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_interrupted_pull_left_is_freed_by_the_command_that_is_printed() {
    let world = World::new().await;
    for way in world.ways().into_iter().filter(|way| way.place.is_local()) {
        let dir = world.store_dir(way.place);
        let paste_one = |sites: &[&str], args: &[&str], printed: &str| {
            let (code, text) = world.pf(&way, args);
            assert_eq!(code, 0, "{text}");
            let found = commands(sites, &text);
            assert!(found[0].contains(printed), "{args:?}: {found:?}");
            world.collects(&way, &found[0]);
        };
        for (site, args) in [("commands/usage.rs unfinished gc", &["ls"][..]), ("commands/gc.rs print gc", &["gc"])] {
            {
                // As a killed process leaves it: a session that has neither ended nor committed.
                let store = Store::open(&dir, Options::default()).await.unwrap();
                let session = store.open_push(&repository()).await.unwrap();
                let asked = vec![(world.digest, pfr_schema::Kind::Manifest)];
                assert!(store.missing(&session.id, asked).await.unwrap().is_empty());
                store.delete_snapshot(&repository(), &world.digest).await.unwrap();
            }
            paste_one(&[site], args, "pf gc --unfinished --local");
            let (code, text) = world.pf(&way, args);
            assert!(code == 0 && !text.contains("unfinished"), "it is freed: {text}");
            world.put(way.place).await;
        }
        // Blobs of a deleted snapshot that have no lease.
        for (site, args) in [("commands/usage.rs unfinished gc", &["ls"][..]), ("commands/usage.rs rows gc", &["df"])] {
            let (code, text) = world.pf(&way, &["rm", &format!("team/agent@{}", world.digest), "--quiet"]);
            assert_eq!(code, 0, "{text}");
            paste_one(&[site], args, "pf gc --local");
            let (code, text) = world.pf(&way, args);
            assert!(code == 0 && !text.contains('`'), "it is freed: {text}");
            world.put(way.place).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_registry_is_shown_and_freed_by_the_commands_that_are_printed() {
    let world = World::new().await;
    let front = Front::start(&world.given.url, |seen: &Seen| match (seen.method.as_str(), seen.path.ends_with("/pushes")) {
        ("POST", true) => Fate::Refuse(pfr_schema::ErrorCode::StorageFull),
        _ => Fate::Pass,
    });
    let way = Way { place: Place::GivenRegistry, prefix: format!("{}/", front.url), flags: Vec::new(), environment: Vec::new() };
    let source = world.sources[0].path().to_str().unwrap();
    let (code, text) = world.pf(&way, &["push", source, &format!("{}team/agent:y", way.prefix)]);
    assert_eq!(code, 8, "{text}");
    let found = commands(&["failure.rs full stats", "failure.rs full gc"], &text);
    let (code, seen) = world.paste(&found[0]);
    assert!(code == 0 && seen.contains(Place::GivenRegistry.marker()), "{}: {seen}", found[0]);
    world.collects(&way, &found[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_policy_that_keeps_a_tag_in_its_place_is_shown_by_the_command_that_is_printed() {
    let world = World::new().await;
    let policies = json!({"policies": [{"name": "releases", "repositories": "*", "immutable_tags": ["x"]}]});
    world.given.remote().set_retention(&serde_json::from_value(policies).unwrap()).await.unwrap();
    for way in world.ways().iter().filter(|way| way.place == Place::GivenRegistry) {
        let (code, text) = world.pf(way, &["tag", &format!("{}team/agent:base", way.prefix), "x"]);
        assert!(code == 6 && text.contains("on a registry without tokens take its pattern back first"), "{text}");
        for command in commands(&["failure.rs hint retention"], &text) {
            let (code, seen) = world.paste(&command);
            assert!(code == 0 && seen.contains("releases"), "{command}: {seen}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tips_for_the_words_of_other_tools_run_as_printed() {
    let world = World::new().await;
    let url = world.given.url.as_str();
    let store = world.store_dir(Place::GivenStore).display().to_string();
    let here = ["--registry", url, "--store", &store];
    for (sites, word, shows) in [
        (&["usage.rs tip df"][..], "info", "total"),
        (&["usage.rs tip log"], "history", "Usage: pf log"),
        (&["usage.rs tip inspect"], "show", "Usage: pf inspect"),
        (&["usage.rs tip rm"], "rmi", "Usage: pf rm"),
        (&["usage.rs tip prune", "usage.rs tip gc"], "forget", "Usage: pf prune"),
        (&["usage.rs tip copy"], "cp", "Usage: pf copy"),
        (&["usage.rs tip snapshot"], "save", "Usage: pf snapshot"),
        (&["usage.rs tip restore"], "load", "Usage: pf restore"),
        (&["usage.rs tip verify", "usage.rs tip scrub"], "fsck", "Usage: pf verify"),
        (&["usage.rs tip fork"], "branch", "Usage: pf fork"),
    ] {
        for side in ["--remote", "--local"] {
            let way = Way { place: Place::ConfiguredRegistry, prefix: String::new(), flags: Vec::new(), environment: Vec::new() };
            let (code, text) = world.pf(&way, &[&[word, side], &here[..]].concat());
            assert_eq!(code, 1, "{text}");
            let mut all = String::new();
            for command in commands(sites, &text) {
                let flags = if side == "--local" { format!(" --local --store '{store}'") } else { format!(" --registry {url}") };
                assert!(command.ends_with(" --help") || command.ends_with(&flags), "{word} {side}: {command}");
                let (code, seen) = world.paste(&command);
                assert_eq!(code, 0, "{word}: {command}: {seen}");
                all += &seen;
            }
            assert!(all.contains(shows), "{word}: {all}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_where_a_reference_is_expected_gets_a_tip_that_runs_as_printed() {
    let world = World::new().await;
    let way = Way { place: Place::ConfiguredRegistry, prefix: String::new(), flags: Vec::new(), environment: Vec::new() };
    let (code, text) = world.pf(&way, &["push", "team/agent:x", "oci://registry.example/team/agent:x"]);
    assert_eq!(code, 1, "{text}");
    let mut all = String::new();
    for command in commands(&["usage.rs of_place export", "usage.rs of_place import"], &text) {
        let (code, seen) = world.paste(&command);
        assert_eq!(code, 0, "{command}: {seen}");
        all += &seen;
    }
    assert!(all.contains("Usage: pf export") && all.contains("Usage: pf import"), "{all}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_would_keep_nothing_and_what_is_not_signed_get_help_that_runs_as_printed() {
    let world = World::new().await;
    let way = Way { place: Place::ConfiguredRegistry, prefix: String::new(), flags: Vec::new(), environment: Vec::new() };
    let key = world.home.path().join("a.key").display().to_string();
    assert_eq!(world.pf(&way, &["keygen", &key]).0, 0);
    let public = format!("{key}.pub");
    for (site, args, exits, shows) in [
        ("commands/prune.rs run rm", &["prune", "team/agent", "--keep-last", "0"][..], 1, "Usage: pf rm"),
        ("commands/signing.rs verify sign", &["verify", "team/agent:x", "--key", &public], 4, "Usage: pf sign"),
    ] {
        let (code, text) = world.pf(&way, args);
        assert!(code == exits && !text.contains("--sign-key"), "{code}: {text}");
        let [command] = &commands(&[site], &text)[..] else { panic!("one command in {text}") };
        let (code, seen) = world.paste(command);
        assert!(code == 0 && seen.contains(shows), "{command}: {seen}");
    }
    assert_eq!(world.holds().await, [true; 4], "nothing was deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_the_events_says_how_to_go_on() {
    let world = World::new().await;
    let way = Way { place: Place::ConfiguredRegistry, prefix: String::new(), flags: Vec::new(), environment: Vec::new() };
    let (code, text) = world.pf(&way, &["events", "team/*", "--once"]);
    assert_eq!(code, 0, "{text}");
    let [command] = &commands(&["commands/events.rs run events"], &text)[..] else { panic!("one command in {text}") };
    let (code, seen) = world.paste(command);
    assert!(code == 0 && !seen.contains("tagged") && !seen.contains("pushed"), "nothing has happened since: {command}: {seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hint_about_an_agent_names_its_socket() {
    let world = World::new().await;
    let socket = world.home.path().join("an agent.sock");
    agent(&socket, move |request| match request {
        "GET /v1/engines" => Answer::Json(json!({"engines": []})),
        "GET /v1/pushes" => Answer::Json(json!({"pushes": [agent_push("failed")]})),
        "POST /v1/jobs" => Answer::Json(warmed("running")),
        "GET /v1/jobs" => Answer::Json(json!({"jobs": [warmed("done")]})),
        "DELETE /v1/jobs/1" => Answer::Json(warmed("cancelled")),
        "DELETE /v1/jobs/none" => Answer::Problem(404, "not_found", "there is no job"),
        "GET /v1/jobs/1" => Answer::Json(drained(&json!({
            "plan": [{"engine": "e", "sequence": "s", "reference": "team/x/e:s", "boundary": 3, "bytes": 10}], "done": [],
            "failed": [{"engine": "e", "sequence": "s", "problem": {
                "type": "t", "title": "t", "status": 504, "detail": "its push goes on", "code": "timeout", "retryable": true,
            }}],
            "bytes": 10, "recompute_tokens": 3,
        }))),
        // It ends in the middle of a capture.
        "POST /v1/engines/gone/snapshots" => Answer::Gone,
        "POST /v1/engines/slow/snapshots" => Answer::Json(captured("failed")),
        _ => Answer::Problem(404, "engine_unknown", "no engine \"e\""),
    });
    let way = |environment| Way { place: Place::ConfiguredRegistry, prefix: String::new(), flags: Vec::new(), environment };
    let given = socket.display().to_string();
    let none = "no engine is registered";
    for (way, site, args, exits, shows) in [
        (way(vec![]), "failure.rs hint engines", vec!["snapshot", "e", "team/agent:y", "--agent", &given], 5, none),
        (way(vec![("PF_AGENT_SOCKET", given.clone())]), "failure.rs hint engines", vec!["restore", "team/agent:x", "e"], 5, none),
        (way(vec![]), "failure.rs from engines", vec!["snapshot", "gone", "team/agent:y", "--agent", &given], 7, none),
        (
            way(vec![]),
            "commands/capture.rs pushes pushes",
            vec!["snapshot", "slow", "team/agent:y", "--push", "wait", "--agent", &given],
            7,
            "no room",
        ),
        (way(vec![]), "commands/drain.rs run pushes", vec!["drain", "team/x", "--quiet", "--agent", &given], 7, "no room"),
        (way(vec![]), "commands/jobs.rs finished jobs", vec!["warm", "team/y", "--agent", &given], 7, "cancelled"),
        (way(vec![]), "commands/jobs.rs unknown jobs", vec!["jobs", "cancel", "none", "--agent", &given], 5, "done"),
    ] {
        let (code, text) = world.pf(&way, &args);
        assert_eq!(code, exits, "{text}");
        let [command] = &commands(&[site], &text)[..] else { panic!("one command in {text}") };
        let (code, seen) = world.paste(command);
        assert!(code == 0 && seen.contains(shows), "{command}: {seen}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_did_not_find_is_looked_for_where_it_looked() {
    let world = World::new().await;
    let url = world.given.url.clone();
    for (socket, code, reference, shows) in [
        ("tag.sock", "tag_unknown", format!("{url}/team/agent:none"), "base"),
        ("repository.sock", "repository_unknown", format!("{url}/team/none:x"), Place::GivenRegistry.marker()),
        ("own.sock", "repository_unknown", "none/*".to_owned(), ""),
    ] {
        let socket = world.home.path().join(socket);
        let mut failed = warmed("failed");
        let problem = json!({"type": "t", "title": "t", "status": 404, "detail": "there is none", "code": code, "retryable": false});
        failed["warm"]["items"][0]["reference"] = json!(reference);
        failed["warm"]["items"][0]["state"] = json!("failed");
        failed["warm"]["items"][0]["problem"] = problem.clone();
        failed["error"] = problem;
        agent(&socket, move |_| Answer::Json(failed.clone()));
        let way = Way { place: Place::ConfiguredRegistry, prefix: String::new(), flags: Vec::new(), environment: Vec::new() };
        let (code, text) = world.pf(&way, &["warm", &reference, "--quiet", "--agent", &socket.display().to_string()]);
        assert!(code == 5 && !text.contains("run the same command again"), "{code}: {text}");
        if shows.is_empty() {
            assert!(text.contains("the agent looked in its own registry"), "{text}");
            continue;
        }
        let found = commands(&["commands/jobs.rs nowhere ls"], &text);
        let command = found.iter().find(|command| command.contains("pf ls")).unwrap_or_else(|| panic!("no command in {text}"));
        let (code, seen) = world.paste(command);
        assert!(code == 0 && seen.contains(shows), "{command}: {seen}");
    }
}

/// Places without a case here, and why.
const ELSEWHERE: [(&str, &str); 4] = [
    ("commands/gc.rs remotely gc", "it is printed after ten minutes; a unit test in that file runs it after less"),
    ("failure.rs hint login", "it needs a registry that requires tokens, and reads one: login.rs"),
    ("usage.rs tip login", "the same"),
    ("commands/push.rs refused login", "the same"),
];

/// The places in the sources of `pf` where a command for a message is made.
fn places() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cli");
    let (mut found, mut folders) = (BTreeSet::new(), vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let file = path.strip_prefix(&root).unwrap().display().to_string();
            let text = std::fs::read_to_string(&path).unwrap();
            let (mut function, mut seen) = (String::new(), BTreeMap::<String, usize>::new());
            for line in text.split("#[cfg(test)]").next().unwrap().lines() {
                if let Some((before, rest)) = line.split_once("fn ")
                    && before.split_whitespace().all(|word| word == "async" || word.starts_with("pub"))
                {
                    function = rest.split(['(', '<']).next().unwrap().to_owned();
                }
                for made in line.split("Suggestion::").skip(1).filter(|made| made.starts_with("new(") || made.starts_with("help(")) {
                    let command = made.split('"').nth(1).unwrap_or_else(|| panic!("{file}: no command in {line}"));
                    let name = format!("{file} {function} {command}");
                    let times = seen.entry(name.clone()).or_default();
                    *times += 1;
                    found.insert(if *times == 1 { name } else { format!("{name} {times}") });
                }
            }
        }
    }
    found
}

#[test]
fn every_place_where_a_message_gets_a_command_has_a_case_here() {
    let own = include_str!("hints.rs");
    let is_place = |text: &&str| {
        let words: Vec<&str> = text.split(' ').collect();
        (3..=4).contains(&words.len()) && words[0].ends_with(".rs") && words[0] != "hints.rs"
    };
    let named: BTreeSet<String> = own.split('"').filter(is_place).map(str::to_owned).collect();
    let places = places();
    assert!(places.len() > 40 && ELSEWHERE.iter().all(|(place, _)| places.contains(*place)), "{places:#?}");
    let without: Vec<&String> = places.difference(&named).collect();
    assert!(without.is_empty(), "no case here runs the commands that are made in: {without:#?}");
    let stale: Vec<&String> = named.difference(&places).collect();
    assert!(stale.is_empty(), "nothing is made in: {stale:#?}");
}
