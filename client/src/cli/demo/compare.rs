//! Whether two snapshot directories are the same, byte for byte.

use super::carve::{MANIFEST, blob, manifest};
use crate::cli::failure::Failure;
use pfr_schema::Digest;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// What was compared and found equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Page files.
    pub files: u64,
    /// Bytes in them.
    pub bytes: u64,
}

/// Compares manifests and all page bytes; every byte of `b` is hashed as well.
///
/// Where `a` keeps a page compressed, the hash alone is the proof.
pub fn compare(a: &Path, b: &Path) -> Result<Compared, Failure> {
    let read = |path: &Path| fs::read(path).map_err(|e| Failure::new(4, format!("cannot read {}: {e}", path.display())));
    if read(&a.join(MANIFEST))? != read(&b.join(MANIFEST))? {
        return Err(Failure::new(4, format!("the manifests in {} and {} differ", a.display(), b.display())));
    }
    let manifest = manifest(b)?;
    let digests: BTreeSet<Digest> = manifest.pages().iter().flat_map(|p| [p.k, p.v]).collect();
    let mut compared = Compared::default();
    for digest in digests {
        let (file_a, file_b) = (blob(a, &digest), blob(b, &digest));
        let bytes = read(&file_b)?;
        let same = file_a.extension().is_some() || read(&file_a)? == bytes;
        if !same || Digest::of(digest.algorithm(), &bytes) != digest {
            return Err(Failure::new(4, format!("{} and {} differ", file_a.display(), file_b.display())));
        }
        compared.files += 1;
        compared.bytes += bytes.len() as u64;
    }
    Ok(compared)
}
