//! The machine fails the registry: a disk that turns read-only, no file handles left. Errors are
//! clear, reads go on as far as they can, and it recovers by itself.

use pfr_tests::{LoopDisk, Pf, Registry, Shape, SmallDisk, SnapshotDir, skip, wait_for};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

fn small(pf: &Pf, name: &str, first: u64) -> SnapshotDir {
    SnapshotDir::write(&pf.path(name), Shape::SMALL, &(first..first + 100).collect::<Vec<_>>())
}

fn errors(registry: &Registry, code: &str) -> u64 {
    let metrics = registry.metrics();
    let line = metrics.lines().find(|line| line.starts_with(&format!("pf_errors_total{{code=\"{code}\"}}")));
    line.and_then(|line| line.rsplit(' ').next()).map_or(0, |value| value.parse().unwrap())
}

#[test]
fn packs_on_a_disk_that_turns_read_only_are_still_read_and_a_push_waits_until_it_is_writable() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 32) else { return };
    let storage = format!("file://{}", disk.path().join("packs").display());
    let registry = Registry::over(&folder.path().join("data"), &["--storage", &storage, "--gc-interval-seconds", "0"]);
    let pf = Pf::new(&registry.url());
    let (first, second) = (small(&pf, "first", 0), small(&pf, "second", 1000));
    pf.run(&["push", first.arg(), "a:first"]).ok();
    let before = pf.visible();
    disk.remount("ro");
    let push = pf.command(&["push", second.arg(), "a:second", "--retries", "60"]).spawn().unwrap();
    wait_for("the push to be told", 60, || (errors(&registry, "unavailable") > 0).then_some(()));
    assert_eq!(pf.visible(), before);
    pf.run(&["verify", "a:first"]).ok();
    pf.run(&["pull", "a:first", pf.path("out").to_str().unwrap()]).ok();
    assert!(registry.get("/readyz").starts_with("HTTP/1.1 200"), "it can be read");
    disk.remount("rw");
    let output = push.wait_with_output().unwrap();
    assert!(output.status.success(), "it is tried again: {}", String::from_utf8_lossy(&output.stderr));
    pf.run(&["verify", "a:second"]).ok();
    // If it stays read-only, the push ends with a message.
    disk.remount("ro");
    let output = pf.run(&["push", small(&pf, "third", 2000).arg(), "a:third", "--retries", "0"]);
    assert_eq!(output.code, 7, "{output:?}");
    assert!(output.stderr.contains("cannot reach its packs") && output.stderr.contains("says nothing about what it holds"), "{output:?}");
    let log = registry.log();
    assert!(log.contains("Read-only file system"), "the operator is told why: {log}");
    assert!(!log.contains("code=\"internal\"") && !log.contains("corrupt_store"), "{log}");
    disk.remount("rw");
    pf.run(&["push", pf.path("third").to_str().unwrap(), "a:third"]).ok();
    pf.run(&["verify", "a:third"]).ok();
}

#[test]
fn a_registry_that_starts_on_a_read_only_disk_serves_reads_and_takes_pushes_once_it_is_writable() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 32) else { return };
    let data = disk.path().join("data");
    let mut first = Registry::over(&data, &[]);
    let pf = Pf::new(&first.url());
    pf.run(&["push", small(&pf, "first", 0).arg(), "a:first"]).ok();
    first.kill();
    disk.remount("ro");
    // Its log goes to another disk, which the harness finds beside the data.
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&data, &link).unwrap();
    let registry = Registry::over(&link, &["--gc-interval-seconds", "0"]);
    let pf = Pf::new(&registry.url());
    pf.run(&["verify", "a:first"]).ok();
    pf.run(&["pull", "a:first", pf.path("out").to_str().unwrap()]).ok();
    let second = small(&pf, "second", 1000);
    let push = pf.command(&["push", second.arg(), "a:second", "--retries", "60"]).spawn().unwrap();
    wait_for("the push to be told", 60, || (errors(&registry, "unavailable") > 0).then_some(()));
    wait_for("the log to say why", 60, || registry.log().contains("readonly database").then_some(()));
    // A read that goes on while the disk becomes writable keeps what its process knows of the log
    // read-only.
    let pushed = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !pushed.load(Ordering::Relaxed) {
                    drop(registry.get("/v1/repositories"));
                }
            });
        }
        disk.remount("rw");
        let output = push.wait_with_output().unwrap();
        pushed.store(true, Ordering::Relaxed);
        output
    });
    assert!(output.status.success(), "without a restart: {}", String::from_utf8_lossy(&output.stderr));
    pf.run(&["verify", "a:second"]).ok();
    pf.run(&["verify", "a:first"]).ok();
}

#[test]
fn a_file_system_that_turns_itself_read_only_costs_nothing_that_was_acknowledged() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = LoopDisk::mount(folder.path(), 48) else { return };
    let mut registry = Registry::over(&disk.path().join("data"), &["--gc-interval-seconds", "0"]);
    let pf = Pf::new(&registry.url());
    let (first, second) = (small(&pf, "first", 0), small(&pf, "second", 1000));
    pf.run(&["push", first.arg(), "a:first"]).ok();
    let before = pf.visible();
    disk.fail();
    // SQLite maps its shared memory from a file: the system may end the process (SIGBUS) when that
    // can no longer be written. Either way this push is not acknowledged; acknowledged ones are
    // there afterwards.
    let output = pf.run(&["push", second.arg(), "a:second", "--retries", "1"]);
    assert_eq!(output.code, 7, "{output:?}");
    registry.kill();
    disk.repair();
    registry.restart();
    assert_eq!(pf.visible(), before);
    pf.run(&["verify", "a:first"]).ok();
    pf.run(&["push", second.arg(), "a:second"]).ok();
    pf.run(&["verify", "a:second"]).ok();
}

/// Limits the number of open files of a process.
fn limit_files(pid: u32, files: u32) -> bool {
    let limited = Command::new("prlimit").arg(format!("--pid={pid}")).arg(format!("--nofile={files}:{files}")).status();
    limited.is_ok_and(|status| status.success())
}

/// An answer over a connection that stays open.
fn ask(stream: &mut TcpStream, path: &str) -> String {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let (mut answer, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        let text = String::from_utf8_lossy(&answer).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length: ").map(str::to_owned));
            if length.is_some_and(|length| body.len() >= length.trim().parse().unwrap()) || text.ends_with("0\r\n\r\n") {
                return text;
            }
        }
        let read = stream.read(&mut piece).unwrap();
        assert!(read > 0, "the connection was closed: {text}");
        answer.extend_from_slice(&piece[..read]);
    }
}

/// Clock ticks (hundredths of a second) that a process has worked.
fn worked(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

fn refusals(registry: &Registry) -> usize {
    registry.log().matches("cannot accept").count()
}

/// Opens connections that say nothing until the registry has no file left for another; no more of
/// them than the system queues.
fn exhaust(registry: &Registry) -> Vec<TcpStream> {
    let before = refusals(registry);
    let idle = (0..100).map(|_| TcpStream::connect(registry.address()).unwrap()).collect();
    wait_for("it to run out of files", 30, || (refusals(registry) > before).then_some(()));
    idle
}

#[test]
fn without_files_left_it_says_so_neither_spins_nor_dies_and_answers_again() {
    let folder = tempfile::TempDir::new().unwrap();
    let mut registry = Registry::over(&folder.path().join("data"), &[]);
    let pf = Pf::new(&registry.url());
    pf.run(&["push", small(&pf, "first", 0).arg(), "a:first"]).ok();
    let mut before = TcpStream::connect(registry.address()).unwrap();
    assert!(ask(&mut before, "/v1/repositories/a/snapshots/first").starts_with("HTTP/1.1 200"));
    if !limit_files(registry.pid(), 64) {
        return skip("prlimit", "prlimit cannot limit the open files of the registry");
    }
    let idle = exhaust(&registry);
    // An open connection is served while no other file is needed; otherwise the request is refused
    // with a problem.
    assert!(ask(&mut before, "/v1/repositories/a/tags").starts_with("HTTP/1.1 200"));
    let refused = ask(&mut before, "/v1/repositories/a/snapshots/first/page-manifest");
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("\"code\":\"unavailable\""), "{refused}");
    assert!(refused.contains("cannot reach its packs") && refused.contains("\"retryable\":true"), "{refused}");
    // It looks now and then whether it can accept, and does not spin.
    let (ticks, lines, start) = (worked(registry.pid()), refusals(&registry), Instant::now());
    wait_for("some more tries", 60, || (refusals(&registry) >= lines + 10).then_some(()));
    let (ticks, seconds) = (worked(registry.pid()) - ticks, start.elapsed().as_secs_f64());
    assert!(seconds > 0.5 && (ticks as f64) < seconds * 50.0, "{ticks} ticks in {seconds} s");
    drop(idle);
    pf.run(&["verify", "a:first"]).ok();
    assert!(ask(&mut before, "/v1/repositories/a/snapshots/first/page-manifest").starts_with("HTTP/1.1 200"), "the same connection too");
    pf.run(&["push", small(&pf, "second", 1000).arg(), "a:second"]).ok();
    let log = registry.log();
    assert!(log.contains("Too many open files") && !log.contains("corrupt_store"), "{log}");
    assert_eq!(errors(&registry, "internal"), 0);

    // Connections that never end: it closes those that say nothing.
    registry.kill();
    let registry = Registry::over(&folder.path().join("data"), &["--header-seconds", "1"]);
    let pf = Pf::new(&registry.url());
    assert!(limit_files(registry.pid(), 64));
    let idle = exhaust(&registry);
    pf.run(&["verify", "a:second"]).ok();
    drop(idle);
}
