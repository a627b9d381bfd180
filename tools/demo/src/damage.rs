//! Simulates damage on a disk.

use pfr_client::cli::Failure;
use std::fs;
use std::path::{Path, PathBuf};

/// Flips one bit in the middle of the largest pack under `store`, which is nearly all pages.
/// Returns the file.
pub fn turn_a_bit(store: &Path) -> Result<PathBuf, Failure> {
    let failed = |path: &Path, e: std::io::Error| Failure::usage(format!("cannot damage {}: {e}", path.display()));
    let mut packs = Vec::new();
    let root = store.join("packs");
    for shard in fs::read_dir(&root).map_err(|e| failed(&root, e))?.flatten().filter(|entry| entry.path().is_dir()) {
        for entry in fs::read_dir(shard.path()).map_err(|e| failed(&shard.path(), e))?.flatten() {
            packs.push((entry.metadata().map_err(|e| failed(&entry.path(), e))?.len(), entry.path()));
        }
    }
    let (_, pack) = packs.into_iter().max().ok_or_else(|| Failure::bug(format!("{} holds no packs", root.display())))?;
    let mut bytes = fs::read(&pack).map_err(|e| failed(&pack, e))?;
    let middle = bytes.len() / 2;
    if let Some(byte) = bytes.get_mut(middle) {
        *byte ^= 1;
    }
    fs::write(&pack, bytes).map_err(|e| failed(&pack, e))?;
    Ok(pack)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_of_the_largest_pack_is_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let shard = dir.path().join("packs/0a");
        fs::create_dir_all(&shard).unwrap();
        fs::write(shard.join("small.pfpack"), [0; 3]).unwrap();
        fs::write(shard.join("large.pfpack"), [0; 9]).unwrap();
        assert_eq!(turn_a_bit(dir.path()).unwrap(), shard.join("large.pfpack"));
        assert_eq!(fs::read(shard.join("large.pfpack")).unwrap(), [0, 0, 0, 0, 1, 0, 0, 0, 0]);
        assert_eq!(fs::read(shard.join("small.pfpack")).unwrap(), [0; 3]);
        assert_eq!(turn_a_bit(&dir.path().join("none")).unwrap_err().exit(), 1);
    }
}
