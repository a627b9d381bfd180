//! What a program did to the files below one directory, in order.

use crate::disk::Disk;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file, a directory or a symbolic link: what names in directories mean.
pub type Node = usize;

/// The recorded directory itself.
pub const ROOT: Node = 0;

/// One operation, and the path that it was applied to, below the root, for people and for labels.
#[derive(Clone, Debug)]
pub struct Op {
    /// What it did.
    pub action: Action,
    /// Its path at that time.
    pub path: PathBuf,
}

/// What an operation did.
#[derive(Clone, Debug)]
pub enum Action {
    /// A name in a directory means this node from now on, or nothing.
    Name {
        /// The directory.
        directory: Node,
        /// The name in it.
        name: OsString,
        /// What it means.
        node: Option<Node>,
        /// The operation without which this one is never on disk: a rename does not lose its file.
        needs: Option<usize>,
    },
    /// A rename inside one directory, which is atomic.
    Rename {
        /// The directory.
        directory: Node,
        /// The old name.
        from: OsString,
        /// The new name, which may exist already.
        to: OsString,
        /// What it names.
        node: Node,
    },
    /// Bytes of a file.
    Write {
        /// The file.
        file: Node,
        /// Position in the file.
        offset: u64,
        /// The bytes.
        bytes: Arc<[u8]>,
    },
    /// A file was truncated, or extended by zeros.
    Resize {
        /// The file.
        file: Node,
        /// Its size since then.
        size: u64,
    },
    /// Makes operations before it durable.
    Sync(Synced),
}

/// What a sync makes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Synced {
    /// The bytes and the size of a file, not its name.
    File(Node),
    /// The names in a directory.
    Directory(Node),
    /// All files and names.
    All,
}

impl Action {
    /// Whether `synced` makes it durable.
    #[must_use]
    pub fn is_covered_by(&self, synced: Synced) -> bool {
        match (self, synced) {
            (Self::Sync(_), _) => false,
            (_, Synced::All) => true,
            (Self::Write { file, .. } | Self::Resize { file, .. }, Synced::File(node)) => *file == node,
            (Self::Name { directory, .. } | Self::Rename { directory, .. }, Synced::Directory(node)) => *directory == node,
            _ => false,
        }
    }

    /// The file whose bytes, or the directory whose names it changes.
    #[must_use]
    pub fn target(&self) -> Option<Node> {
        match self {
            Self::Name { directory: node, .. } | Self::Rename { directory: node, .. } => Some(*node),
            Self::Write { file, .. } | Self::Resize { file, .. } => Some(*file),
            Self::Sync(_) => None,
        }
    }
}

/// All operations, and what there was before them.
#[derive(Clone, Debug)]
pub struct Trace {
    /// What was on disk before, durably.
    pub before: Disk,
    /// What was done.
    pub ops: Vec<Op>,
    /// Files that were mapped for writing: after a power cut they may hold anything.
    pub mapped: BTreeSet<Node>,
}

impl Trace {
    /// The trace of the same program without those syncs that `dropped` names by their number and
    /// path, as if it had never called them.
    #[must_use]
    pub fn without_syncs(&self, dropped: impl Fn(usize, &Path, Synced) -> bool) -> Self {
        let mut trace = self.clone();
        for (at, op) in trace.ops.iter_mut().enumerate() {
            if let Action::Sync(synced) = op.action
                && dropped(at, &op.path, synced)
            {
                // A sync of a file that does not exist covers nothing, and positions stay as they
                // are.
                op.action = Action::Sync(Synced::File(Node::MAX));
            }
        }
        trace
    }

    /// Number, path and target of each sync.
    pub fn syncs(&self) -> impl Iterator<Item = (usize, &Path, Synced)> {
        self.ops.iter().enumerate().filter_map(|(at, op)| match op.action {
            Action::Sync(synced) => Some((at, op.path.as_path(), synced)),
            _ => None,
        })
    }

    /// An operation in words.
    #[must_use]
    pub fn words(&self, at: usize) -> String {
        let op = &self.ops[at];
        let path = if op.path.as_os_str().is_empty() { Path::new(".") } else { &op.path }.display();
        match &op.action {
            Action::Name { node: Some(_), .. } => format!("{at}: name {path}"),
            Action::Name { node: None, .. } => format!("{at}: remove {path}"),
            Action::Rename { from, .. } => format!("{at}: rename {} to {path}", from.display()),
            Action::Write { offset, bytes, .. } => format!("{at}: write {} bytes at {offset} of {path}", bytes.len()),
            Action::Resize { size, .. } => format!("{at}: resize {path} to {size}"),
            Action::Sync(Synced::All) => format!("{at}: sync everything"),
            Action::Sync(_) => format!("{at}: sync {path}"),
        }
    }
}
