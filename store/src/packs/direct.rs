//! Writes of packs past the page cache (`O_DIRECT`).
//!
//! The kernel copies what a program writes into fresh pages of the page cache, and that costs more
//! than to hash the bytes. A write past it is a copy into memory that is used again, and the disk
//! reads from there. But then the first reader waits for the disk: see [`PageCache`].

use super::files::PART;
use bytes::Bytes;
use pfr_service::buffers::{Buffer, Pool};
use pfr_service::durable::Unfinished;
use rustix::io::pwrite;
use serde::Deserialize;
use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

/// What memory, positions and lengths must be multiples of. Disks want 512 or 4096; one that wants
/// more refuses the write.
const BLOCK: usize = 4 << 10;
/// Memory with room for a part that begins at a multiple of [`BLOCK`]. A pack that is being written
/// uses one at a time. As many are kept as uploads go at full speed by default: 12 MiB.
static STAGED: Pool = Pool::new(PART + BLOCK, 6);

/// Whether packs that are written pass through the page cache: the memory in which the system keeps
/// what was written and read last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageCache {
    /// They do, and stay there until the memory is needed. A reader that comes soon does not wait
    /// for the disk.
    Keep,
    /// They do not, where the file system can do without it: what is written costs less processor
    /// time and leaves the memory to others. The first reader waits for the disk.
    Bypass,
}

impl PageCache {
    /// Every setting.
    pub const ALL: [Self; 2] = [Self::Keep, Self::Bypass];
    /// The default of registries: what is pushed is often pulled soon.
    pub const OF_REGISTRIES: Self = Self::Keep;
    /// The default of the stores of hosts: what is captured is pushed soon, and what is pulled is
    /// restored soon.
    pub const OF_HOSTS: Self = Self::Keep;

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Bypass => "bypass",
        }
    }
}

impl fmt::Display for PageCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PageCache {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|setting| setting.name() == text);
        known.ok_or_else(|| format!("expected keep or bypass, found {text:?}"))
    }
}

/// How the whole parts of one file get past the page cache.
///
/// Its other parts go through the page cache, by the file's first handle. Linux lets both be mixed:
/// a write past the page cache first writes back and drops what is cached of its range, and what is
/// cached later is read from the disk. Only two writes at once into one page of the cache could
/// lose bytes. There are none: a whole part has its pages for itself, and a part is written in one
/// way after the other.
#[derive(Debug, Default)]
pub(super) struct Direct {
    /// The second handle of the file. It is opened for the first whole part: most packs of forks
    /// have none. None inside if that failed.
    handle: OnceLock<Option<OwnedFd>>,
    /// Whether a write was refused. Then none is tried again.
    is_refused: AtomicBool,
}

impl Direct {
    /// Writes a part past the page cache, if it is whole. Returns how many of its bytes were
    /// written, from its beginning: the others must go through the page cache.
    ///
    /// # Errors
    /// Those of the file system, but for a refusal of such writes.
    pub(super) fn write(&self, file: &Unfinished, pieces: &[Bytes], at: u64) -> io::Result<usize> {
        let bytes: usize = pieces.iter().map(Bytes::len).sum();
        if bytes != PART || !at.is_multiple_of(PART as u64) || self.is_refused.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let Some(handle) = self.handle.get_or_init(|| open(file)) else { return Ok(0) };
        let (memory, begin) = staged(pieces);
        self.write_blocks(&memory[begin..], at, &mut |blocks, at| Ok(pwrite(handle, blocks, at)?))
    }

    /// Writes whole blocks. Returns how many of the bytes were written before a refusal.
    fn write_blocks(&self, blocks: &[u8], at: u64, write: &mut dyn FnMut(&[u8], u64) -> io::Result<usize>) -> io::Result<usize> {
        let mut done = 0;
        while done < blocks.len() {
            match write(&blocks[done..], at + done as u64) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                // If it ends inside a block, the next one is refused.
                Ok(written) => done += written,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // EINVAL, EOPNOTSUPP: memory, position or length are not as this disk wants them,
                // or the file system takes no such writes after all.
                Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
                    self.is_refused.store(true, Ordering::Relaxed);
                    say_once(&error);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Whether parts are written past the page cache.
    #[cfg(test)]
    pub(super) fn is_used(&self) -> bool {
        matches!(self.handle.get(), Some(Some(_))) && !self.is_refused.load(Ordering::Relaxed)
    }
}

/// The second handle of a file; none if parts of it must go through the page cache.
fn open(file: &Unfinished) -> Option<OwnedFd> {
    // The page cache is all that a tmpfs has. Since Linux 6.6 it takes O_DIRECT all the same, and
    // the bytes would be copied twice. The number is TMPFS_MAGIC of linux/magic.h.
    if rustix::fs::fstatfs(file.as_file()).is_ok_and(|system| system.f_type == 0x0102_1994) {
        return None;
    }
    file.open_direct().inspect_err(say_once).ok()
}

/// A store on such a file system would say it for every pack.
fn say_once(error: &io::Error) {
    static SAID: Once = Once::new();
    SAID.call_once(|| tracing::info!(%error, "the file system takes no writes past the page cache: packs are written through it"));
}

/// The pieces one behind the other, and where they begin in the memory: at a multiple of [`BLOCK`].
fn staged(pieces: &[Bytes]) -> (Buffer, usize) {
    let mut memory = STAGED.take();
    let begin = memory.as_ptr().align_offset(BLOCK);
    memory.resize(begin, 0);
    for piece in pieces {
        memory.extend_from_slice(piece);
    }
    (memory, begin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_setting_is_read_as_it_is_written() {
        for setting in PageCache::ALL {
            assert_eq!(setting.to_string().parse::<PageCache>(), Ok(setting));
        }
        assert_eq!("skip".parse::<PageCache>().unwrap_err(), "expected keep or bypass, found \"skip\"");
    }

    #[test]
    fn a_part_lies_at_a_multiple_of_the_block_in_memory_that_is_used_again() {
        let pieces: Vec<Bytes> = (0..9_usize).map(|n| Bytes::from(vec![n as u8; if n < 8 { PART / 8 - 1 } else { 8 }])).collect();
        let (memory, begin) = staged(&pieces);
        assert!((memory.as_ptr() as usize + begin).is_multiple_of(BLOCK));
        assert_eq!(memory.capacity(), STAGED.size(), "a buffer that has grown does not go back to the pool");
        assert!(memory[begin..] == pieces.concat());
    }

    /// Writes blocks with a disk that answers by `answer`: how many bytes it takes, or why none.
    /// Returns what it has then.
    fn written(direct: &Direct, blocks: &[u8], mut answer: impl FnMut(&[u8]) -> io::Result<usize>) -> (Vec<u8>, io::Result<usize>) {
        let mut disk = Vec::new();
        let result = direct.write_blocks(blocks, PART as u64, &mut |bytes, at| {
            assert_eq!(at, PART as u64 + disk.len() as u64);
            let taken = answer(bytes)?;
            disk.extend_from_slice(&bytes[..taken]);
            Ok(taken)
        });
        (disk, result)
    }

    #[test]
    fn a_refusal_leaves_the_rest_to_the_page_cache_and_holds_for_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let folder = std::sync::Arc::new(OwnedFd::from(std::fs::File::open(dir.path()).unwrap()));
        let file = Unfinished::create_new(folder, "pack#1".into(), 0o600).unwrap();
        let part = [Bytes::from(vec![7; PART])];
        for kind in [ErrorKind::InvalidInput, ErrorKind::Unsupported] {
            for before in [0, BLOCK, BLOCK + 512] {
                let (direct, mut calls) = (Direct::default(), 0);
                let (disk, result) = written(&direct, &part[0], |_| {
                    calls += 1;
                    if calls == 1 && before > 0 { Ok(before) } else { Err(kind.into()) }
                });
                assert_eq!((disk.len(), result.unwrap()), (before, before));
                assert_eq!(direct.write(&file, &part, 0).unwrap(), 0);
                assert!(!direct.is_used());
            }
        }
        assert_eq!(file.as_file().metadata().unwrap().len(), 0);
    }

    #[test]
    fn an_error_is_no_refusal() {
        for kind in [ErrorKind::StorageFull, ErrorKind::Other] {
            let direct = Direct::default();
            let (_, result) = written(&direct, &[7; 2 * BLOCK], |_| Err(kind.into()));
            assert_eq!(result.unwrap_err().kind(), kind);
            assert!(!direct.is_refused.load(Ordering::Relaxed));
        }
        let (_, result) = written(&Direct::default(), &[7; BLOCK], |_| Ok(0));
        assert_eq!(result.unwrap_err().kind(), ErrorKind::WriteZero);
    }

    proptest! {
        #[test]
        fn all_blocks_are_written_in_their_places_however_short_the_writes_are(
            shorts in prop::collection::vec(1..6 * BLOCK, 1..12),
            interrupted: bool,
        ) {
            let blocks: Vec<u8> = (0..8 * BLOCK).map(|at| (at / 7) as u8).collect();
            let (mut shorts, mut calls) = (shorts.into_iter().cycle(), 0);
            let (disk, result) = written(&Direct::default(), &blocks, |bytes| {
                calls += 1;
                if interrupted && calls % 2 == 1 {
                    return Err(ErrorKind::Interrupted.into());
                }
                Ok(shorts.next().unwrap_or(1).min(bytes.len()))
            });
            prop_assert_eq!(result.unwrap(), blocks.len());
            prop_assert!(disk == blocks);
        }
    }
}
