//! Names in a snapshot directory: the one place where a digest, a group or a title becomes a path.

use pfr_schema::snapshot::{Descriptor, Manifest, TITLE};
use pfr_schema::{Digest, media_type};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// The page manifest of a snapshot with one page tree.
pub(crate) const PAGE_MANIFEST: &str = "page_manifest.json";
pub(crate) const CONFIG: &str = "config.json";
pub(crate) const CHECKPOINT: &str = "checkpoint.json";
pub(crate) const TOKENS: &str = "tokens.bin";
pub(crate) const ATTACHMENTS: &str = "attachments";
/// The folder of unfinished attachments. A temporary name beside an attachment could be the title
/// of another one.
pub(crate) const UNFINISHED: &str = ".attachments.tmp";
/// The verbatim manifest, where the other files do not say everything.
pub(crate) const SNAPSHOT: &str = "snapshot.json";
pub(crate) const BLOBS: &str = "blobs";
const PREFIX: &str = "page_manifest.";
const SUFFIX: &str = ".json";

/// The file of a raw blob.
#[must_use]
pub fn blob(digest: &Digest) -> PathBuf {
    let hex = digest.hex();
    let mut path = PathBuf::with_capacity(160);
    path.extend([BLOBS, digest.algorithm().name(), &hex[..2], &hex]);
    path
}

/// The same file, zstd-compressed.
#[must_use]
pub fn encoded(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".zst");
    name.into()
}

/// The page manifest of a group and rank. Every character of a group's name but letters, digits,
/// `_` and `-` is escaped as `%` and hex: the name may come from another host.
pub(crate) fn page_manifest(group: &str, rank: u32) -> String {
    let mut name = String::from(PREFIX);
    for byte in group.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => name.push(char::from(byte)),
            _ => name.push_str(&format!("%{byte:02x}")),
        }
    }
    format!("{name}.{rank}{SUFFIX}")
}

/// The group and rank of a file named by [`page_manifest`]; `None` if it is named otherwise.
pub(crate) fn group_and_rank(name: &str) -> Option<(String, u32)> {
    let (escaped, rank) = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.rsplit_once('.')?;
    let mut bytes = Vec::new();
    let mut rest = escaped.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next()?, rest.next()?];
            bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    let (group, rank) = (String::from_utf8(bytes).ok()?, rank.parse().ok()?);
    // One spelling only, so that no two files mean one tree.
    (page_manifest(&group, rank) == name).then_some((group, rank))
}

/// Whether a file of this name may say that a directory is complete: a pull writes it last.
pub(crate) fn says_complete(name: &str) -> bool {
    matches!(name, PAGE_MANIFEST | SNAPSHOT) || group_and_rank(name).is_some()
}

/// Whether `name` is one plain component of a path.
#[must_use]
pub fn is_component(name: &str) -> bool {
    let plain = !name.contains(['/', '\\']) && !name.chars().any(char::is_control);
    plain && !matches!(name, "" | "." | "..") && name.len() <= 255
}

/// Files outside of `blobs/` that hold what a manifest lists, each path once; the rest lies in
/// `blobs/`.
///
/// # Errors
/// The title that no file may have.
pub(crate) fn named_files(manifest: &Manifest) -> Result<Vec<(&Descriptor, PathBuf)>, &str> {
    let mut files = vec![(&manifest.config, PathBuf::from(CONFIG))];
    let mut taken: HashSet<PathBuf> = HashSet::new();
    let alone = |media_type| manifest.layers_of(media_type).count() == 1;
    for layer in &manifest.layers {
        let path = match (layer.media_type.as_str(), layer.annotations.get(TITLE)) {
            (media_type::TREE, _) => continue,
            (media_type::CHECKPOINT, _) if alone(media_type::CHECKPOINT) => PathBuf::from(CHECKPOINT),
            (media_type::CHECKPOINT, _) => continue,
            (media_type::TOKENS, None) if alone(media_type::TOKENS) => PathBuf::from(TOKENS),
            (_, Some(title)) if is_component(title) => Path::new(ATTACHMENTS).join(title),
            (_, Some(title)) => return Err(title),
            (_, None) => continue,
        };
        if taken.insert(path.clone()) {
            files.push((layer, path));
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_read_back_from_its_file_name() {
        for group in ["main", "../../etc", "a.b", "ä/%", "-", "x y"] {
            let name = page_manifest(group, 7);
            assert!(is_component(&name) && !name.contains(".."), "{group}: {name}");
            assert_eq!(group_and_rank(&name), Some((group.to_owned(), 7)));
        }
        for name in
            [PAGE_MANIFEST, "page_manifest.a.b.json", "page_manifest.%4.1.json", "page_manifest.%61.1.json", "page_manifest.a.01.json"]
        {
            assert_eq!(group_and_rank(name), None, "{name}");
        }
    }

    #[test]
    fn only_the_files_that_a_pull_writes_last_say_that_a_directory_is_complete() {
        for (name, says) in [
            (PAGE_MANIFEST, true),
            ("page_manifest.main.0.json", true),
            (SNAPSHOT, true),
            (CONFIG, false),
            (CHECKPOINT, false),
            (TOKENS, false),
            (BLOBS, false),
            ("page_manifest.json.tmp", false),
        ] {
            assert_eq!(says_complete(name), says, "{name}");
        }
    }

    #[test]
    fn a_title_is_one_plain_component() {
        for bad in ["", ".", "..", "a/b", "/etc/passwd", "..\\x", "a\0b", "a\nb", &"x".repeat(256)] {
            assert!(!is_component(bad), "{bad:?}");
        }
        for good in ["a", ".hidden", "a.b", "ü", "..."] {
            assert!(is_component(good), "{good:?}");
        }
    }
}
