//! Where packs lie.

use object_store::path::Path;

/// Folder of what a probe of the storage writes; without permission to delete, it stays there.
pub(crate) const PROBES: &str = "probe";

/// Where a pack lies. Two hex digits of the random end of its key spread packs over 256 folders.
pub(crate) fn path(key: &str) -> Path {
    let shard = key.get(key.len().saturating_sub(2)..).unwrap_or("00");
    Path::from(format!("{shard}/{key}.pfpack"))
}

/// The key of the pack that lies there; none if that is no place of a pack.
pub(crate) fn key_of(location: &Path) -> Option<&str> {
    location.filename()?.strip_suffix(".pfpack").filter(|key| path(key) == *location)
}
