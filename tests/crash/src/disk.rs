//! A state of a disk: the bytes of each file, and the node that each name in a directory points at.

use crate::trace::{Action, Node, ROOT};
use pfr_schema::Digest;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The content of a mapped file after a power cut: neither zeros nor what the program wrote.
const GARBAGE: u8 = 0xa5;

/// Files and directories. Cheap to clone: contents are shared until they are written.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    files: BTreeMap<Node, File>,
    directories: BTreeMap<Node, BTreeMap<OsString, Node>>,
    links: BTreeMap<Node, PathBuf>,
}

/// The bytes of a file, and their digest if it was computed after the last change.
#[derive(Clone, Debug, Default)]
struct File {
    bytes: Arc<Vec<u8>>,
    digest: Option<Digest>,
}

/// How much of a write reached the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tear {
    /// Only this many bytes from its start. The file does not grow beyond them.
    First(usize),
    /// All bytes after this many. The bytes before them keep their old value, or are zero behind
    /// the old end of the file.
    Last(usize),
    /// Only the size of the file: the added bytes are zero.
    Size,
}

impl Disk {
    /// Adds a file. It has no path until [`Self::name`] gives it one.
    pub fn add_file(&mut self, node: Node, bytes: Vec<u8>) {
        self.files.insert(node, File { bytes: Arc::new(bytes), digest: None });
    }

    /// Adds a directory. It has no path until [`Self::name`] gives it one.
    pub fn add_directory(&mut self, node: Node) {
        self.directories.entry(node).or_default();
    }

    /// Adds a symbolic link. It has no path until [`Self::name`] gives it one.
    pub fn add_link(&mut self, node: Node, target: PathBuf) {
        self.links.insert(node, target);
    }

    /// Points a name in a directory at a node. Without a node, removes the name.
    pub fn name(&mut self, directory: Node, name: OsString, node: Option<Node>) {
        let names = self.directories.entry(directory).or_default();
        match node {
            Some(node) => drop(names.insert(name, node)),
            None => drop(names.remove(&name)),
        }
    }

    /// Applies an operation. A trace's disk already has all nodes that its operations give names
    /// to.
    pub fn apply(&mut self, action: &Action) {
        match action {
            Action::Name { directory, name, node, .. } => self.name(*directory, name.clone(), *node),
            Action::Rename { directory, from, to, node } => {
                self.name(*directory, from.clone(), None);
                self.name(*directory, to.clone(), Some(*node));
            }
            Action::Write { file, offset, bytes } => self.write(*file, *offset, bytes),
            Action::Resize { file, size } => self.change(*file).resize(*size as usize, 0),
            Action::Sync(_) => {}
        }
    }

    /// Applies only a part of a write. Other operations are applied completely.
    pub fn apply_torn(&mut self, action: &Action, tear: Tear) {
        let Action::Write { file, offset, bytes } = action else { return self.apply(action) };
        match tear {
            Tear::First(count) => self.write(*file, *offset, &bytes[..count.min(bytes.len())]),
            Tear::Last(from) => self.write(*file, *offset + from.min(bytes.len()) as u64, &bytes[from.min(bytes.len())..]),
            Tear::Size => {
                let end = *offset as usize + bytes.len();
                let content = self.change(*file);
                content.resize(content.len().max(end), 0);
            }
        }
    }

    fn write(&mut self, file: Node, offset: u64, bytes: &[u8]) {
        let (start, content) = (offset as usize, self.change(file));
        content.resize(content.len().max(start + bytes.len()), 0);
        content[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn change(&mut self, file: Node) -> &mut Vec<u8> {
        let file = self.files.entry(file).or_default();
        file.digest = None;
        Arc::make_mut(&mut file.bytes)
    }

    /// Computes the digests of all files, so that clones compute only those of the files that they
    /// change.
    pub fn settle(&mut self) {
        for file in self.files.values_mut() {
            file.digest.get_or_insert_with(|| Digest::sha256(&file.bytes));
        }
    }

    /// A digest of the paths that `counts` selects and of the contents there. Of the files in
    /// `mapped`, only the sizes count.
    #[must_use]
    pub fn digest(&self, mapped: &BTreeSet<Node>, counts: impl Fn(&Path) -> bool) -> Digest {
        let mut text = Vec::new();
        self.walk(ROOT, Path::new(""), &mut |path, node| {
            if !counts(path) {
                return;
            }
            text.extend(path.as_os_str().as_encoded_bytes());
            let content = match (self.files.get(&node), self.links.get(&node)) {
                (Some(file), _) if mapped.contains(&node) => format!("\0mapped {}\0", file.bytes.len()),
                (Some(file), _) => format!("\0{}\0", file.digest.unwrap_or_else(|| Digest::sha256(&file.bytes))),
                (None, Some(target)) => format!("\0link {}\0", target.display()),
                (None, None) => "\0directory\0".to_owned(),
            };
            text.extend(content.bytes());
        });
        Digest::sha256(&text)
    }

    /// Writes the paths that `counts` selects into the empty directory `to`. The files in `mapped`
    /// get arbitrary bytes.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write_out(&self, to: &Path, mapped: &BTreeSet<Node>, counts: impl Fn(&Path) -> bool) -> std::io::Result<()> {
        let mut result = Ok(());
        let put = |path: &Path, node: Node| -> std::io::Result<()> {
            let place = to.join(path);
            match (self.files.get(&node), self.links.get(&node)) {
                (Some(file), _) if mapped.contains(&node) => std::fs::write(place, vec![GARBAGE; file.bytes.len()]),
                (Some(file), _) => std::fs::write(place, &*file.bytes),
                (None, Some(target)) => std::os::unix::fs::symlink(target, place),
                (None, None) => std::fs::create_dir(place),
            }
        };
        self.walk(ROOT, Path::new(""), &mut |path, node| {
            if result.is_ok() && counts(path) {
                result = put(path, node);
            }
        });
        result
    }

    /// Paths of all files, and their contents.
    #[must_use]
    pub fn files(&self) -> BTreeMap<PathBuf, Arc<Vec<u8>>> {
        let mut files = BTreeMap::new();
        self.walk(ROOT, Path::new(""), &mut |path, node| {
            if let Some(file) = self.files.get(&node) {
                files.insert(path.to_owned(), Arc::clone(&file.bytes));
            }
        });
        files
    }

    /// Calls `see` with every path below `directory`, and with a directory before its entries.
    fn walk(&self, directory: Node, path: &Path, see: &mut impl FnMut(&Path, Node)) {
        let Some(names) = self.directories.get(&directory) else { return };
        for (name, node) in names {
            let below = path.join(name);
            see(&below, *node);
            self.walk(*node, &below, see);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(offset: u64, bytes: &[u8]) -> Action {
        Action::Write { file: 1, offset, bytes: bytes.into() }
    }

    fn content(disk: &Disk) -> Vec<u8> {
        disk.files()[Path::new("f")].to_vec()
    }

    fn disk(bytes: &[u8]) -> Disk {
        let mut disk = Disk::default();
        disk.add_directory(ROOT);
        disk.add_file(1, bytes.to_vec());
        disk.name(ROOT, "f".into(), Some(1));
        disk
    }

    #[test]
    fn a_write_beyond_the_end_leaves_zeros_and_a_torn_one_leaves_what_was_there() {
        let mut whole = disk(b"abcd");
        whole.apply(&write(6, b"xy"));
        assert_eq!(content(&whole), b"abcd\0\0xy");
        for (tear, expected) in [(Tear::First(1), b"aXcd".to_vec()), (Tear::Last(1), b"abYZ\0".to_vec()), (Tear::Size, b"abcd\0".to_vec())]
        {
            let mut torn = disk(b"abcd");
            match tear {
                Tear::First(_) => torn.apply_torn(&write(1, b"XY"), tear),
                Tear::Last(_) => torn.apply_torn(&write(1, b"XYZ\0"), tear),
                Tear::Size => torn.apply_torn(&write(2, b"XYZ"), tear),
            }
            assert_eq!(content(&torn), expected, "{tear:?}");
        }
    }

    #[test]
    fn what_no_name_reaches_is_gone_and_a_clone_does_not_change_with_its_original() {
        let mut before = disk(b"abcd");
        before.settle();
        let mut after = before.clone();
        after.apply(&write(0, b"X"));
        assert_eq!((content(&before), content(&after)), (b"abcd".to_vec(), b"Xbcd".to_vec()));
        let all = |_: &Path| true;
        assert_ne!(before.digest(&BTreeSet::new(), all), after.digest(&BTreeSet::new(), all));
        after.apply(&Action::Name { directory: ROOT, name: "f".into(), node: None, needs: None });
        assert!(after.files().is_empty());
    }
}
