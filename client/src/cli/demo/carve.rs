//! Parts of a snapshot directory as snapshot directories of their own: what a host would have captured had it looked earlier,
//! or at one of several sequences. Page bytes are linked, not copied.

use crate::cli::failure::Failure;
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::{Digest, Limits};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the manifest in a snapshot directory.
pub const MANIFEST: &str = "page_manifest.json";

/// Reads the manifest of a snapshot directory.
pub fn manifest(dir: &Path) -> Result<FlatManifest, Failure> {
    let path = dir.join(MANIFEST);
    let bytes = fs::read(&path).map_err(|e| failed("read", &path, &e))?;
    FlatManifest::parse(&bytes, &Limits::default()).map_err(|e| Failure::from(e).context(&path.display().to_string()))
}

/// The file with the bytes of `digest`: raw, or compressed with `.zst` at its end.
pub fn blob(dir: &Path, digest: &Digest) -> PathBuf {
    let hex = digest.hex();
    let raw = dir.join("blobs").join(digest.algorithm().name()).join(&hex[..2]).join(&hex);
    let compressed = raw.with_extension("zst");
    if !raw.exists() && compressed.exists() { compressed } else { raw }
}

/// Writes to `to` what is left of `from` when every sequence is cut to the pages that `keep` says (none: left out).
pub fn carve(from: &Path, to: &Path, keep: impl Fn(&Sequence) -> usize) -> Result<(), Failure> {
    let whole = manifest(from)?;
    let mut numbers: BTreeMap<u32, u32> = BTreeMap::new();
    let mut sequences = Vec::new();
    for sequence in whole.sequences() {
        let kept = keep(sequence).min(sequence.page_ixs.len());
        if kept == 0 {
            continue;
        }
        let mut page_ixs = Vec::with_capacity(kept);
        for ix in &sequence.page_ixs[..kept] {
            let next = numbers.len() as u32;
            page_ixs.push(*numbers.entry(*ix).or_insert(next));
        }
        let fill_in_last_page = if kept == sequence.page_ixs.len() { sequence.fill_in_last_page } else { 0 };
        sequences.push(Sequence { id: sequence.id.clone(), page_ixs, fill_in_last_page });
    }
    let pages: Vec<Page> = whole.pages().iter().filter_map(|p| Some(Page { ix: *numbers.get(&p.ix)?, k: p.k, v: p.v })).collect();
    for digest in pages.iter().flat_map(|p| [&p.k, &p.v]) {
        link(&blob(from, digest), from, to)?;
    }
    let part = FlatManifest::new(*whole.geometry(), pages, sequences, &Limits::default())?;
    let path = to.join(MANIFEST);
    fs::create_dir_all(to).and_then(|()| fs::write(&path, part.to_bytes())).map_err(|e| failed("write", &path, &e))
}

/// A copy of a snapshot directory in which one byte in the middle of one blob is another one. Returns the file.
pub fn damaged_copy(from: &Path, to: &Path, blob_of: impl Fn(&FlatManifest) -> Option<Digest>) -> Result<PathBuf, Failure> {
    carve(from, to, |s| s.page_ixs.len())?;
    let victim = blob_of(&manifest(to)?).ok_or_else(|| Failure::new(1, format!("{} has no page to damage", to.display())))?;
    let file = blob(to, &victim);
    let mut bytes = fs::read(&file).map_err(|e| failed("read", &file, &e))?;
    let middle = bytes.len() / 2;
    if let Some(byte) = bytes.get_mut(middle) {
        *byte ^= 1;
    }
    // The file is a link to the good one: it must be replaced, not written to.
    fs::remove_file(&file).and_then(|()| fs::write(&file, bytes)).map_err(|e| failed("write", &file, &e))?;
    Ok(file)
}

fn link(file: &Path, from: &Path, to: &Path) -> Result<(), Failure> {
    let target = to.join(file.strip_prefix(from).unwrap_or(file));
    if target.exists() {
        return Ok(());
    }
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent).map_err(|e| failed("create", parent, &e))?;
    }
    // Not every file system has links, and none has them across its borders.
    fs::hard_link(file, &target).or_else(|_| fs::copy(file, &target).map(drop)).map_err(|e| failed("read", file, &e))
}

fn failed(action: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(if error.kind() == std::io::ErrorKind::NotFound { 5 } else { 1 }, format!("cannot {action} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::geometry::{Dtype, Geometry};

    fn sample(dir: &Path) {
        let geometry = Geometry { page_size_tokens: 2, n_layers: 1, n_heads: 1, head_dim: 1, dtype: Dtype::F32 };
        let page = |ix: u32| {
            let put = |tag: u8| {
                let bytes = [tag, ix as u8, 0, 0, 0, 0, 0, 0];
                let digest = Digest::sha256(&bytes);
                let path = blob(dir, &digest);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, bytes).unwrap();
                digest
            };
            Page { ix, k: put(0), v: put(1) }
        };
        let pages = (0..4).map(page).collect();
        let sequence = |id: &str, ixs: &[u32]| Sequence { id: id.into(), page_ixs: ixs.into(), fill_in_last_page: 1 };
        let sequences = vec![sequence("a", &[0, 1, 2]), sequence("b", &[0, 3])];
        fs::write(dir.join(MANIFEST), FlatManifest::new(geometry, pages, sequences, &Limits::default()).unwrap().to_bytes()).unwrap();
    }

    #[test]
    fn a_part_has_its_own_pages_numbered_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (whole, part) = (dir.path().join("whole"), dir.path().join("part"));
        fs::create_dir_all(&whole).unwrap();
        sample(&whole);
        carve(&whole, &part, |s| if s.id == "b" { 2 } else { 0 }).unwrap();
        let manifest = manifest(&part).unwrap();
        assert_eq!((manifest.pages().len(), manifest.sequences().len()), (2, 1));
        assert_eq!(manifest.sequences()[0].page_ixs, [0, 1]);
        assert_eq!(manifest.sequences()[0].fill_in_last_page, 1);
        for page in manifest.pages() {
            assert_eq!(Digest::sha256(&fs::read(blob(&part, &page.v)).unwrap()), page.v);
        }
    }

    #[test]
    fn a_shorter_part_ends_with_a_full_page() {
        let dir = tempfile::tempdir().unwrap();
        sample(dir.path());
        let part = dir.path().join("part");
        carve(dir.path(), &part, |_| 1).unwrap();
        assert_eq!(manifest(&part).unwrap().sequences()[0].fill_in_last_page, 0);
    }

    #[test]
    fn damage_stays_in_the_copy() {
        let dir = tempfile::tempdir().unwrap();
        sample(dir.path());
        let copy = dir.path().join("copy");
        let file = damaged_copy(dir.path(), &copy, |m| m.pages().first().map(|p| p.k)).unwrap();
        let good = manifest(dir.path()).unwrap().pages()[0].k;
        assert_ne!(Digest::sha256(&fs::read(file).unwrap()), good);
        assert_eq!(Digest::sha256(&fs::read(blob(dir.path(), &good)).unwrap()), good);
    }
}
