//! The programs of the limit, and the refusals of `run`, as processes.

use pfr_testkit::directory;
use pfr_testkit::snapshot::Shape;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf-bench"));
    command.args(args);
    command
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// How many blobs are hashed side by side.
const LANES: [&str; 2] = ["four", "as-pf"];

/// A server of the limit.
struct Server {
    lanes: &'static str,
    child: Child,
    address: String,
    dir: PathBuf,
}

impl Server {
    fn start(lanes: &'static str, dir: PathBuf) -> Self {
        let mut command = bench(&["limit-side", "serve", "--lanes", lanes, "--dir"]);
        let mut child = command.arg(&dir).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
        let mut address = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut address).expect("its address");
        Self { lanes, child, address: address.trim().into(), dir }
    }

    fn push(&self, snapshot: &Path) -> Output {
        push(&self.address, snapshot)
    }

    fn pull(&self, into: &Path, form: &str) -> Output {
        let mut command = bench(&["limit-side", "pull", "--from", &self.address, "--form", form, "--connections", "3"]);
        command.args(["--lanes", self.lanes, "--into"]).arg(into).output().expect("it runs")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn push(address: &str, snapshot: &Path) -> Output {
    let mut command = bench(&["limit-side", "push", "--to", address, "--connections", "3", "--snapshot"]);
    command.arg(snapshot).output().expect("it runs")
}

/// All files below a directory, by name.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            found.push((name, std::fs::read(&path).expect("a file")));
        }
    }
    found.sort();
    found
}

fn snapshot(dir: &Path) -> PathBuf {
    let root = dir.join("snapshot");
    directory::write(&root, "page_manifest.json", Shape::SMALL, &(0..70).collect::<Vec<u64>>());
    root
}

#[test]
fn the_limit_gives_back_what_it_was_given_in_every_form() {
    for lanes in LANES {
        let dir = tempfile::tempdir().unwrap();
        let (snapshot, server) = (snapshot(dir.path()), Server::start(lanes, dir.path().join("server")));
        let pushed = server.push(&snapshot);
        assert!(pushed.status.success(), "{}", words(&pushed));
        for form in ["packs", "files", "memory"] {
            let pulled = server.pull(&dir.path().join(form), form);
            assert!(pulled.status.success(), "{form}: {}", words(&pulled));
        }
        let blobs = files(&snapshot.join("blobs"));
        assert_eq!(blobs.len(), 140);
        assert!(files(&dir.path().join("files")) == blobs, "other files");
        let bytes: usize = blobs.iter().map(|(_, bytes)| bytes.len()).sum();
        for packs in [server.dir.clone(), dir.path().join("packs")] {
            assert_eq!(files(&packs).iter().map(|(_, bytes)| bytes.len()).sum::<usize>(), bytes);
        }
        assert!(!dir.path().join("memory").exists(), "written to disk");
    }
}

#[test]
fn the_limit_refuses_bytes_that_are_not_what_their_name_says() {
    for lanes in LANES {
        let dir = tempfile::tempdir().unwrap();
        let (snapshot, server) = (snapshot(dir.path()), Server::start(lanes, dir.path().join("server")));
        let (name, mut bytes) = files(&snapshot.join("blobs")).swap_remove(17);
        let path = snapshot.join("blobs/sha256").join(&name[..2]).join(&name);
        bytes[5] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert!(!server.push(&snapshot).status.success(), "stored");
        assert!(server.pull(&dir.path().join("none"), "files").status.success());
        assert!(files(&dir.path().join("none")).is_empty(), "of a push that was refused");
        bytes[5] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let pushed = server.push(&snapshot);
        assert!(pushed.status.success(), "{}", words(&pushed));
        for entry in std::fs::read_dir(&server.dir).unwrap() {
            let pack = entry.unwrap().path();
            let mut bytes = std::fs::read(&pack).unwrap();
            if let Some(last) = bytes.last_mut() {
                *last ^= 1;
            }
            std::fs::write(&pack, &bytes).unwrap();
        }
        let pulled = server.pull(&dir.path().join("damaged"), "memory");
        assert!(!pulled.status.success() && words(&pulled).contains("is not what its name says"), "{}", words(&pulled));
    }
}

#[test]
fn a_server_that_hangs_up_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let pushed = push(&address, &snapshot(dir.path()));
    assert!(!pushed.status.success() && words(&pushed).starts_with("pf-bench: "), "{}", words(&pushed));
}

#[test]
fn a_peer_that_is_not_installed_is_refused_with_the_command_that_installs_it() {
    for (peer, command) in [
        ("docker-registry", "apt-get install docker-registry"),
        ("restic", "apt-get install restic"),
        ("redis", "apt-get install redis-server"),
        ("mooncake", "pip install mooncake-transfer-engine-non-cuda"),
        ("lmcache", "pip install lmcache"),
    ] {
        let output = bench(&["run", "--only", peer]).env("PATH", "/nonexistent").output().unwrap();
        assert!(!output.status.success() && words(&output).contains(command), "{peer}: {}", words(&output));
    }
    let output = bench(&["run", "--only", "nonsense"]).output().unwrap();
    assert!(!output.status.success() && words(&output).contains("possible values"), "{}", words(&output));
}
