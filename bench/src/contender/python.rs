//! Peers whose client is a Python package: a Python process that puts from, and gets into, memory
//! that this process shares with it. So the bytes are read and verified here, as fast as those of
//! other contenders, and Python only names them.
//!
//! There are two pieces of memory: while Python works on one, the other is filled or verified.

use crate::Result;
use crate::pack::{Lanes, Piece, Promise, Source, verify};
use crate::usage::{Server, tail};
use crate::workload::Blob;
use pfr_engine::cache::PageMemory as _;
use pfr_engine::shared::SharedMemory;
use serde::Deserialize;
use serde_json::json;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// What both scripts begin with.
const SERVE: &str = include_str!("python/serve.py");
/// Bytes of a piece of shared memory.
const HALF: usize = 24 << 20;
/// Blobs in a request.
const BATCH: usize = 128;
/// Longest wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Whether a Python has a module. Otherwise says how to install it.
pub fn check(python: &Path, name: &str, module: &str, command: &str) -> std::result::Result<(), String> {
    let output = Command::new(python).args(["-c", &format!("import {module}")]).stdin(Stdio::null()).output();
    let why = match output {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().lines().last().unwrap_or("no reason given").to_owned(),
        Err(error) => error.to_string(),
    };
    Err(format!("{name} is not installed for {} ({why}): {command}", python.display()))
}

/// A Python process that answers requests.
pub struct Python {
    server: Server,
    requests: ChildStdin,
    answers: Receiver<String>,
    log: PathBuf,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Done(usize),
    Error(String),
}

impl Python {
    /// Starts `script`, and waits until it is ready. Its words go to a file in `dir`.
    pub fn start(python: &Path, script: &str, arguments: &[&OsStr], dir: &Path, name: &str) -> Result<Self> {
        let log = dir.join(format!("{name}.log"));
        let mut child = Command::new(python)
            .arg("-c")
            .arg(format!("{SERVE}\n\n{script}"))
            .args(arguments)
            .current_dir(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log)?)
            .spawn()?;
        let requests = child.stdin.take().ok_or("no stdin")?;
        let lines = BufReader::new(child.stdout.take().ok_or("no stdout")?).lines();
        let (sender, answers) = channel();
        // Ends with the process.
        std::thread::spawn(move || lines.map_while(std::result::Result::ok).try_for_each(|line| sender.send(line)));
        let mut started = Self { server: Server::new(child), requests, answers, log };
        started.answer()?;
        Ok(started)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    fn ask(&mut self, what: &str, half: usize, blobs: &[Blob]) -> Result<()> {
        let names: Vec<String> = blobs.iter().map(Blob::name).collect();
        let lens: Vec<usize> = blobs.iter().map(|blob| blob.len).collect();
        Ok(writeln!(self.requests, "{}", json!({"do": what, "half": half, "names": names, "lens": lens}))?)
    }

    fn answer(&mut self) -> Result<usize> {
        let line = self.answers.recv_timeout(TIMEOUT).map_err(|e| format!("no answer ({e}): {}", tail(&self.log)))?;
        match serde_json::from_str(&line)? {
            Answer::Done(count) => Ok(count),
            Answer::Error(words) => Err(words.into()),
        }
    }
}

/// A client, and the memory that it shares with this process.
pub struct Client {
    python: Python,
    halves: [SharedMemory; 2],
}

impl Client {
    /// Starts `script`, which gets the files behind the memory as its first arguments.
    pub fn start(python: &Path, script: &str, arguments: &[&OsStr], dir: &Path, name: &str) -> Result<Self> {
        let halves = [SharedMemory::new("pf-bench", HALF)?, SharedMemory::new("pf-bench", HALF)?];
        let path = |half: &SharedMemory| OsString::from(format!("/proc/{}/fd/{}", std::process::id(), half.descriptor().as_raw_fd()));
        let paths = halves.each_ref().map(path);
        let all: Vec<&OsStr> = paths.iter().map(OsString::as_os_str).chain(arguments.iter().copied()).collect();
        Ok(Self { python: Python::start(python, script, &all, dir, name)?, halves })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.python.pid()
    }

    /// Puts every blob.
    pub fn put(&mut self, blobs: &[Blob]) -> Result<()> {
        let batches = batches(blobs);
        for (number, batch) in batches.iter().enumerate() {
            let half = number % 2;
            let pieces: Vec<Piece> = batch.iter().map(Piece::of).collect();
            let bytes: usize = batch.iter().map(|blob| blob.len).sum();
            Source::default().read(&pieces, self.halves[half].bytes_mut().get_mut(..bytes).ok_or("a blob is too large")?)?;
            if number > 0 {
                self.python.answer()?;
            }
            self.python.ask("put", half, batch)?;
        }
        if batches.is_empty() { Ok(()) } else { self.python.answer().map(drop) }
    }

    /// Gets every blob; `hash`: compares each with its digest.
    pub fn get(&mut self, blobs: &[Blob], hash: Option<Lanes>) -> Result<()> {
        let batches = batches(blobs);
        if let Some(first) = batches.first() {
            self.python.ask("get", 0, first)?;
        }
        for (number, batch) in batches.iter().enumerate() {
            self.python.answer()?;
            if let Some(next) = batches.get(number + 1) {
                self.python.ask("get", (number + 1) % 2, next)?;
            }
            if let Some(lanes) = hash {
                let promised: Vec<Promise> = batch.iter().map(Promise::of).collect();
                verify(&promised, self.halves[number % 2].bytes(), lanes)?;
            }
        }
        Ok(())
    }
}

/// Consecutive blobs that fit into a piece of shared memory.
fn batches(blobs: &[Blob]) -> Vec<&[Blob]> {
    let mut batches = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, blob) in blobs.iter().enumerate() {
        if i > start && (i - start == BATCH || bytes + blob.len > HALF) {
            batches.push(&blobs[start..i]);
            (start, bytes) = (i, 0);
        }
        bytes += blob.len;
    }
    if start < blobs.len() {
        batches.push(&blobs[start..]);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blobs(lens: &[usize], dir: &Path) -> Vec<Blob> {
        let made = lens.iter().zip(0..).map(|(len, number)| {
            let bytes = pfr_testkit::snapshot::bytes(number, *len);
            let path = dir.join(number.to_string());
            std::fs::write(&path, &bytes).unwrap();
            Blob { path, digest: pfr_schema::Digest::sha256(&bytes).as_bytes().try_into().unwrap(), len: *len }
        });
        made.collect()
    }

    #[test]
    fn batches_keep_all_blobs_and_fit() {
        let blob = |len| Blob { path: PathBuf::new(), digest: [0; 32], len };
        let blobs: Vec<Blob> = (0..300).map(|i| blob(if i % 100 == 0 { HALF } else { 1000 })).collect();
        let batches = batches(&blobs);
        assert_eq!(batches.iter().map(|batch| batch.len()).sum::<usize>(), 300);
        assert!(batches.iter().all(|batch| batch.len() <= BATCH && batch.iter().map(|blob| blob.len).sum::<usize>() <= HALF));
    }

    /// The real script and a real Python; only the peer behind it is a dictionary.
    const DICTIONARY: &str = r#"
class Dictionary:
    def __init__(self, halves):
        self.halves, self.kept = halves, {}
    def put(self, half, names, lens):
        for name, offset, length in zip(names, half.offsets(lens), lens):
            self.kept[name] = half.memory[offset : offset + length]
    def get(self, half, names, lens):
        print("noise")
        for name, offset, length in zip(names, half.offsets(lens), lens):
            half.memory[offset : offset + length] = self.kept[name]
serve(Dictionary([Half(path) for path in sys.argv[1:3]]))
"#;

    #[test]
    fn what_python_put_it_gets_and_damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let all = blobs(&[100_000; 300], dir.path());
        let mut client = Client::start(Path::new("python3"), DICTIONARY, &[], dir.path(), "dictionary").unwrap();
        client.put(&all).unwrap();
        client.get(&all, Some(Lanes::Four)).unwrap();
        let mut other = all.clone();
        other[299].digest = [7; 32];
        let error = client.get(&other, None).unwrap_err().to_string();
        assert!(error.starts_with("KeyError"), "{error}");
        // Under another name it has other bytes.
        let mut wrong = all[..1].to_vec();
        std::fs::write(&wrong[0].path, vec![1; 100_000]).unwrap();
        client.put(&wrong).unwrap();
        wrong[0].len = 100_000;
        let error = client.get(&wrong, Some(Lanes::AsPf)).unwrap_err().to_string();
        assert!(error.contains("is not what its name says"), "{error}");
    }

    #[test]
    fn a_script_that_ends_is_an_error_with_its_words() {
        let dir = tempfile::tempdir().unwrap();
        let failed = Client::start(Path::new("python3"), "raise SystemExit('no such peer')", &[], dir.path(), "none");
        let error = failed.err().unwrap().to_string();
        assert!(error.contains("no such peer"), "{error}");
        let missing = check(Path::new("python3"), "peer", "pf_no_such_module", "pip install peer").unwrap_err();
        assert!(missing.contains("No module named 'pf_no_such_module'") && missing.ends_with(": pip install peer"), "{missing}");
    }
}
