//! The workload: snapshot directories of TinyLlama's shape with real KV bytes, made once by `pf-kv`
//! and kept in a cache.

use crate::Result;
use serde::Deserialize;
use std::collections::HashSet;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A page's K or V bytes in a file.
#[derive(Clone, Debug)]
pub struct Blob {
    /// The file.
    pub path: PathBuf,
    /// Its SHA-256.
    pub digest: [u8; 32],
    /// Its bytes.
    pub len: usize,
}

impl Blob {
    /// `sha256:…`.
    pub fn name(&self) -> String {
        format!("sha256:{}", hex::encode(self.digest))
    }
}

/// A snapshot directory.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The directory.
    pub dir: PathBuf,
    /// Its blobs in page order, each once.
    pub blobs: Vec<Blob>,
}

/// A snapshot, and a fork of it in which one page of a hundred is new.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Pages of each.
    pub pages: usize,
    /// The snapshot.
    pub base: Snapshot,
    /// The fork.
    pub fork: Snapshot,
}

#[derive(Deserialize)]
struct Manifest {
    pages: Vec<Page>,
}

#[derive(Deserialize)]
struct Page {
    k: String,
    v: String,
}

impl Snapshot {
    /// The snapshot in this directory.
    pub fn read(dir: PathBuf) -> Result<Self> {
        let manifest: Manifest = serde_json::from_slice(&std::fs::read(dir.join("page_manifest.json"))?)?;
        let mut blobs = Vec::with_capacity(2 * manifest.pages.len());
        let mut seen = HashSet::new();
        for name in manifest.pages.iter().flat_map(|page| [&page.k, &page.v]) {
            let hex = name.strip_prefix("sha256:").ok_or("a digest that is not sha256")?;
            let mut digest = [0; 32];
            hex::decode_to_slice(hex, &mut digest)?;
            if seen.insert(digest) {
                let path = dir.join("blobs/sha256").join(&hex[..2]).join(hex);
                let len = usize::try_from(path.metadata()?.len())?;
                blobs.push(Blob { path, digest, len });
            }
        }
        Ok(Self { dir, blobs })
    }

    /// Raw bytes of its blobs.
    pub fn bytes(&self) -> u64 {
        self.blobs.iter().map(|blob| blob.len as u64).sum()
    }

    /// Reads every file once, so that the page cache has it.
    pub fn warm(&self) -> Result<()> {
        let mut buffer = vec![0; 1 << 20];
        self.blobs.iter().try_for_each(|blob| read_through(&blob.path, &mut buffer))
    }

    /// Copies the snapshot to `dir`. Links the blobs that `sibling` has.
    fn copy_to(&self, dir: &Path, sibling: Option<&Path>) -> Result<Self> {
        for blob in &self.blobs {
            let name = blob.path.strip_prefix(&self.dir)?;
            let path = dir.join(name);
            std::fs::create_dir_all(path.parent().ok_or("no parent")?)?;
            match sibling.map(|sibling| sibling.join(name)).filter(|there| there.exists()) {
                Some(there) => std::fs::hard_link(there, path)?,
                None => std::fs::copy(&blob.path, path).map(drop)?,
            }
        }
        std::fs::copy(self.dir.join("page_manifest.json"), dir.join("page_manifest.json"))?;
        Self::read(dir.to_owned())
    }
}

impl Workload {
    /// The workload of `pages` pages; made by `pf_kv` if the cache does not hold it.
    pub fn prepare(pages: usize, pf_kv: &Path) -> Result<Self> {
        let dir = cache_dir()?.join(format!("tinyllama-{pages}-seed1"));
        let (base, fork) = (dir.join("base"), dir.join("fork"));
        if !fork.join("page_manifest.json").exists() {
            if dir.exists() {
                std::fs::remove_dir_all(&dir)?;
            }
            std::fs::create_dir_all(&dir)?;
            eprintln!("making {pages} pages of real KV bytes; the next run finds them in the cache");
            let status = Command::new(pf_kv)
                .args(["tinyllama", "--seed", "1", "--fork-percent", "1", "--pages", &pages.to_string()])
                .args(["--out".as_ref(), base.as_os_str(), "--fork-out".as_ref(), fork.as_os_str()])
                .status()
                .map_err(|e| format!("pf-kv: {e}; build it with `cargo build --release -p pfr-engine`"))?;
            if !status.success() {
                return Err(format!("pf-kv ended with {status}").into());
            }
        }
        Ok(Self { pages, base: Snapshot::read(base)?, fork: Snapshot::read(fork)? })
    }

    /// Raw bytes of the blobs that only the fork has.
    pub fn new_bytes(&self) -> u64 {
        let old: HashSet<[u8; 32]> = self.base.blobs.iter().map(|blob| blob.digest).collect();
        self.fork.blobs.iter().filter(|blob| !old.contains(&blob.digest)).map(|blob| blob.len as u64).sum()
    }

    /// Copies the workload to another directory, for a place that should read from its own file
    /// system.
    pub fn copy_to(&self, dir: &Path) -> Result<Self> {
        let base = self.base.copy_to(&dir.join("base"), None)?;
        let fork = self.fork.copy_to(&dir.join("fork"), Some(&base.dir))?;
        Ok(Self { pages: self.pages, base, fork })
    }
}

fn cache_dir() -> Result<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = var("PF_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|dir| dir.join("pf")))
        .or_else(|| var("HOME").map(|dir| dir.join(".cache/pf")))
        .ok_or("no cache directory: set PF_CACHE")?;
    Ok(base.join("bench"))
}

/// Reads every file below `dir` once, so that the page cache has it.
pub fn warm_dir(dir: &Path) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    each_file(dir, &mut |path| read_through(path, &mut buffer))
}

/// Bytes of all files below `dir`.
pub fn dir_bytes(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    each_file(dir, &mut |path| {
        // A server may delete a temporary file meanwhile.
        bytes += path.metadata().map_or(0, |metadata| metadata.len());
        Ok(())
    })?;
    Ok(bytes)
}

/// Empties every file below `dir` and leaves the files: their space is free again. Removing
/// thousands of files here would slow down the next program that creates files: ext4 skips, one by
/// one, each inode that was freed in the last minutes.
pub fn empty_dir(dir: &Path) -> Result<()> {
    each_file(dir, &mut |path| Ok(File::options().write(true).open(path)?.set_len(0)?))
}

fn each_file(dir: &Path, work: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() { each_file(&entry.path(), work)? } else { work(&entry.path())? }
    }
    Ok(())
}

fn read_through(path: &Path, buffer: &mut [u8]) -> Result<()> {
    let mut file = File::open(path)?;
    while file.read(buffer)? > 0 {}
    Ok(())
}
