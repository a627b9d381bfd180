//! The files below the root as the programs have made them: turns calls into operations on nodes.

use super::calls::{Call, Shape, shape};
use super::process;
use crate::disk::Disk;
use crate::trace::{Action, Node, Op, ROOT, Synced, Trace};
use nix::libc;
use nix::unistd::Pid;
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// The suffix of files that programs may map for writing: SQLite's wal-index, which every start
/// makes again.
const MAPPED: &str = "-shm";

/// FICLONE and FICLONERANGE of `linux/fs.h`.
const CLONES: [u64; 2] = [0x4004_9409, 0x4020_940d];

#[derive(Debug)]
pub(super) struct Model {
    root: PathBuf,
    pub trace: Trace,
    /// Nodes by the file system's numbers.
    by_inode: HashMap<u64, Node>,
    /// What names mean now.
    names: HashMap<(Node, OsString), Node>,
    /// Size of each file as the trace has it.
    sizes: HashMap<Node, u64>,
    next: Node,
    /// The first thing that was done and is not modelled.
    pub fault: Option<String>,
    /// Operations after which the program is killed.
    pub kill_at: usize,
}

impl Model {
    pub fn of(root: &Path) -> Self {
        let root = root.canonicalize().unwrap();
        let trace = Trace { before: Disk::default(), ops: Vec::new(), mapped: BTreeSet::new() };
        let mut model = Self {
            root: root.clone(),
            trace,
            by_inode: HashMap::new(),
            names: HashMap::new(),
            sizes: HashMap::new(),
            next: ROOT,
            fault: None,
            kill_at: usize::MAX,
        };
        model.adopt(&root);
        model
    }

    /// Adds the files that are there at the beginning.
    fn adopt(&mut self, path: &Path) -> Node {
        let node = self.node(path);
        let metadata = path.symlink_metadata().unwrap();
        if metadata.is_dir() {
            let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
            for entry in entries {
                let below = self.adopt(&entry.path());
                self.trace.before.name(node, entry.file_name(), Some(below));
                self.names.insert((node, entry.file_name()), below);
            }
        } else if metadata.is_file() {
            self.trace.before.add_file(node, std::fs::read(path).unwrap());
            self.sizes.insert(node, metadata.len());
        }
        node
    }

    /// A new node for what lies at `path`. It is on disk from the start, without a name.
    fn node(&mut self, path: &Path) -> Node {
        let node = self.next;
        self.next += 1;
        let metadata = path.symlink_metadata().unwrap();
        if metadata.is_dir() {
            self.trace.before.add_directory(node);
        } else if metadata.is_symlink() {
            self.trace.before.add_link(node, std::fs::read_link(path).unwrap());
        } else {
            self.trace.before.add_file(node, Vec::new());
            self.sizes.insert(node, 0);
        }
        self.by_inode.insert(metadata.ino(), node);
        node
    }

    /// The call that a thread is about to make, if it may change files below the root.
    pub fn begun(&mut self, thread: Pid, number: u64, arguments: &[u64; 6]) -> Option<Call> {
        let descriptor = |at: usize| arguments[at] as i32;
        let root = self.root.clone();
        let below = |directory: Option<usize>, at: usize| {
            let directory = directory.map_or(libc::AT_FDCWD, descriptor);
            process::path(thread, directory, arguments[at]).filter(|path| path.starts_with(&root))
        };
        let written = |at: usize| process::place(thread, descriptor(at)).filter(|path| path.starts_with(&root));
        let open = |path: PathBuf, flags: i32| {
            let makes = flags & libc::O_CREAT != 0;
            let empties = flags & libc::O_TRUNC != 0;
            (makes || empties).then(|| Call::Open { existed: path.exists(), path, empties })
        };
        match shape(number)? {
            Shape::Open => open(below(None, 0)?, arguments[1] as i32),
            Shape::OpenAt => {
                let (path, flags) = (below(Some(0), 1)?, arguments[2] as i32);
                if flags & libc::O_TMPFILE == libc::O_TMPFILE {
                    return self.fault(format!("a file without a name in {}", path.display()));
                }
                open(path, flags)
            }
            Shape::Creat => open(below(None, 0)?, libc::O_CREAT | libc::O_TRUNC),
            Shape::Write => written(0).map(|_| Call::Write { descriptor: descriptor(0), offset: None }),
            Shape::WriteAt(at) => written(0).map(|_| Call::Write { descriptor: descriptor(0), offset: Some(arguments[at]) }),
            Shape::Copy(to, offset) => written(to).map(|_| {
                let address = offset.map(|at| arguments[at]).filter(|address| *address != 0);
                Call::Write { descriptor: descriptor(to), offset: address.and_then(|address| process::number(thread, address)) }
            }),
            Shape::Truncate => below(None, 0).map(|path| Call::Resize { path }),
            Shape::FTruncate => written(0).map(|path| Call::Resize { path }),
            Shape::Allocate => {
                let path = written(0)?;
                if arguments[1] as i32 & !libc::FALLOC_FL_KEEP_SIZE != 0 {
                    return self.fault(format!("fallocate with mode {:#x} of {}", arguments[1], path.display()));
                }
                Some(Call::Resize { path })
            }
            Shape::MakeDirectory => below(None, 0).map(|path| Call::MakeDirectory { path }),
            Shape::MakeDirectoryAt => below(Some(0), 1).map(|path| Call::MakeDirectory { path }),
            Shape::MakeName { directory, path } => below(directory, path).map(|path| Call::MakeName { path }),
            Shape::Remove => below(None, 0).map(|path| Call::Remove { path }),
            Shape::RemoveAt => below(Some(0), 1).map(|path| Call::Remove { path }),
            Shape::Rename => self.rename(below(None, 0), below(None, 1)),
            Shape::RenameAt { flags } => {
                let (from, to) = (below(Some(0), 1), below(Some(2), 3));
                if flags && arguments[4] as u32 & !libc::RENAME_NOREPLACE != 0 {
                    return self.fault(format!("renameat2 with flags {:#x}", arguments[4]));
                }
                self.rename(from, to)
            }
            Shape::Sync => written(0).map(|_| Call::Sync { descriptor: descriptor(0) }),
            Shape::SyncFs => self.is_of_this_file_system(thread, descriptor(0)).then_some(Call::SyncAll),
            Shape::SyncAll => Some(Call::SyncAll),
            Shape::Map => {
                let writes = arguments[2] as i32 & libc::PROT_WRITE != 0 && arguments[3] as i32 & libc::MAP_SHARED != 0;
                let path = writes.then(|| written(4)).flatten()?;
                self.map(&path)
            }
            Shape::Control if CLONES.contains(&arguments[1]) => written(0).map(|_| Call::Clone),
            Shape::Control => None,
            Shape::Never => self.fault(format!("system call {number}")),
        }
    }

    fn rename(&mut self, from: Option<PathBuf>, to: Option<PathBuf>) -> Option<Call> {
        match (from, to) {
            (Some(from), Some(to)) => Some(Call::Rename { from, to }),
            (None, None) => None,
            (from, to) => self.fault(format!("a rename across the root, from {from:?} to {to:?}")),
        }
    }

    fn map(&mut self, path: &Path) -> Option<Call> {
        if !path.as_os_str().as_encoded_bytes().ends_with(MAPPED.as_bytes()) {
            return self.fault(format!("{} is mapped to be written", path.display()));
        }
        let node = self.find(path)?;
        self.trace.mapped.insert(node);
        None
    }

    fn fault(&mut self, words: String) -> Option<Call> {
        self.fault.get_or_insert(format!("not modelled: {words}"));
        None
    }

    fn is_of_this_file_system(&self, thread: Pid, descriptor: i32) -> bool {
        let device = |path: &Path| path.metadata().map(|metadata| metadata.dev()).ok();
        device(&process::descriptor(thread, descriptor)).is_some_and(|found| Some(found) == device(&self.root))
    }

    /// Notes what a call has done; `result` is none if it failed.
    pub fn done(&mut self, thread: Pid, call: Call, result: Option<i64>) {
        let Some(result) = result else { return };
        match call {
            Call::Open { path, existed: false, .. } => {
                let node = self.node(&path);
                self.give_name(&path, Some(node), None);
            }
            Call::Open { path, empties, .. } if empties => self.resized(&path),
            Call::Open { .. } => {}
            Call::Write { descriptor, offset } => self.written(thread, descriptor, offset, result as u64),
            Call::Resize { path } => self.resized(&path),
            Call::MakeDirectory { path } => {
                let node = self.node(&path);
                self.give_name(&path, Some(node), None);
            }
            Call::MakeName { path } => {
                let node = self.find(&path).unwrap_or_else(|| self.node(&path));
                self.give_name(&path, Some(node), None);
            }
            Call::Remove { path } => self.give_name(&path, None, None),
            Call::Rename { from, to } => self.renamed(&from, &to),
            Call::Sync { descriptor } => {
                if let Some(path) = process::place(thread, descriptor)
                    && let Some(node) = self.find(&path)
                {
                    let synced = if path.is_dir() { Synced::Directory(node) } else { Synced::File(node) };
                    self.note(&path, Action::Sync(synced));
                }
            }
            Call::Clone => drop(self.fault("a file that shares blocks with another one".into())),
            Call::SyncAll => self.note(&self.root.clone(), Action::Sync(Synced::All)),
        }
    }

    fn written(&mut self, thread: Pid, descriptor: i32, offset: Option<u64>, count: u64) {
        let Some(path) = process::place(thread, descriptor) else { return };
        let Some(file) = self.find(&path).filter(|_| count > 0) else { return };
        let Some(offset) = offset.or_else(|| process::position(thread, descriptor)?.checked_sub(count)) else {
            return drop(self.fault(format!("a write to {} at no position", path.display())));
        };
        let mut bytes = vec![0; count as usize];
        // No other thread has changed it since, so the file has what was written.
        let read = File::open(process::descriptor(thread, descriptor)).and_then(|found| found.read_exact_at(&mut bytes, offset));
        if let Err(error) = read {
            // Only a kill closes a file while a thread that writes to it is stopped. Nothing
            // follows the write then, and nothing has synced it: any power cut may lose it.
            assert!(process::place(thread, descriptor).is_none(), "{}: {error}", path.display());
            return;
        }
        let size = self.sizes.entry(file).or_default();
        *size = (*size).max(offset + count);
        self.note(&path, Action::Write { file, offset, bytes: bytes.into() });
    }

    /// A file may have another size now.
    fn resized(&mut self, path: &Path) {
        let (Some(file), Ok(metadata)) = (self.find(path), path.metadata()) else { return };
        if self.sizes.insert(file, metadata.len()) != Some(metadata.len()) {
            self.note(path, Action::Resize { file, size: metadata.len() });
        }
    }

    fn renamed(&mut self, from: &Path, to: &Path) {
        let (Some(node), Some(old), Some(new)) = (self.find(to), self.parent(from), self.parent(to)) else {
            return drop(self.fault(format!("a rename of {}", from.display())));
        };
        let name = |path: &Path| path.file_name().unwrap_or_default().to_owned();
        if old == new {
            self.means(old, name(from), None);
            self.means(old, name(to), Some(node));
            return self.note(to, Action::Rename { directory: old, from: name(from), to: name(to), node });
        }
        let comes = self.trace.ops.len();
        self.give_name(to, Some(node), None);
        self.give_name(from, None, Some(comes));
    }

    fn give_name(&mut self, path: &Path, node: Option<Node>, needs: Option<usize>) {
        let Some(directory) = self.parent(path) else {
            return drop(self.fault(format!("a name in an unknown directory: {}", path.display())));
        };
        let name = path.file_name().unwrap_or_default().to_owned();
        self.means(directory, name.clone(), node);
        self.note(path, Action::Name { directory, name, node, needs });
    }

    /// A name means something else now. The file system gives the number of a node without names to
    /// the next one.
    fn means(&mut self, directory: Node, name: OsString, node: Option<Node>) {
        let before = match node {
            Some(node) => self.names.insert((directory, name), node),
            None => self.names.remove(&(directory, name)),
        };
        if let Some(before) = before
            && !self.names.values().any(|other| *other == before)
        {
            self.by_inode.retain(|_, other| *other != before);
        }
    }

    fn note(&mut self, path: &Path, action: Action) {
        let path = path.strip_prefix(&self.root).unwrap_or(path).to_owned();
        self.trace.ops.push(Op { action, path });
    }

    fn parent(&self, path: &Path) -> Option<Node> {
        self.find(path.parent()?)
    }

    /// The node at a path, links not followed.
    fn find(&self, path: &Path) -> Option<Node> {
        self.by_inode.get(&path.symlink_metadata().ok()?.ino()).copied()
    }
}
