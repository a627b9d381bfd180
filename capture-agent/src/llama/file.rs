//! A state file as memory: pages, the head, and state tensors one after another, each at an address
//! of its own. A page has the rows of [`PAGE_TOKENS`] cells of every block of its section; the last
//! one ends with zeros that are not in the file.

use crate::memory::{Available, Bytewise, MemoryError, Ring};
use pfr_schema::digest::Hasher;
use pfr_schema::llama::{At, Block, Source, State};
use pfr_schema::{Algorithm, Digest, FormatError};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

/// Cells of a page.
pub(super) const PAGE_TOKENS: u32 = 16;
/// Bytes that are read at once where all are read.
const PIECE: usize = 1 << 20;

/// A file on disk, as the parser reads it.
pub(super) struct OnDisk<'a> {
    pub file: &'a File,
    pub bytes: u64,
}

impl Source for OnDisk<'_> {
    fn load(&mut self, at: At, into: &mut [u8]) -> Result<(), FormatError> {
        self.file.read_exact_at(into, at.file).map_err(|error| FormatError::Field {
            document: "state file of llama.cpp",
            path: format!("byte {}", at.file),
            expected: format!("{} bytes", into.len()),
            found: error.to_string(),
        })
    }
    fn reaches(&self, at: At) -> bool {
        at.file <= self.bytes
    }
    fn ends(&self, at: At) -> bool {
        at.file == self.bytes
    }
}

/// What lies at a range of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Of {
    /// The pages of a section.
    Pages { section: usize, page_bytes: u64 },
    /// The head.
    Head,
    /// A block of a section.
    Block { section: usize, block: usize },
}

/// A range of addresses.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub of: Of,
    pub start: u64,
    pub bytes: u64,
}

/// A state file as memory.
#[derive(Debug)]
pub(super) struct StateFile {
    file: File,
    pub state: State,
    /// Ascending and without gaps.
    pub regions: Vec<Region>,
    /// Parts of the head: where each begins in the head, and in the file.
    gaps: Vec<(u64, Range<u64>)>,
    size: u64,
    /// Length and time of change of a file that is only read.
    frozen: Option<(u64, i64, i64)>,
    ring: Ring,
}

impl StateFile {
    /// A file that was parsed. `frozen`: no process writes it any more.
    pub fn new(file: File, state: State, frozen: bool, ring: Ring) -> std::io::Result<Self> {
        let frozen = if frozen { Some(stamp(&file)?) } else { None };
        let (mut regions, mut size) = (Vec::new(), 0);
        let mut add = |of: Of, bytes: u64| {
            if bytes > 0 {
                regions.push(Region { of, start: size, bytes });
                size += bytes;
            }
        };
        add(Of::Head, state.head_bytes);
        for (number, section) in state.sections.iter().enumerate() {
            if section.is_complete(state.boundary) {
                let one: u64 = section.blocks.iter().map(page_bytes).sum();
                let pages = (section.positions.len() as u64).div_ceil(u64::from(PAGE_TOKENS));
                add(Of::Pages { section: number, page_bytes: one }, pages * one);
            } else {
                let blocks = section.blocks.iter().enumerate();
                blocks.for_each(|(block, rows)| add(Of::Block { section: number, block }, rows.bytes));
            }
        }
        let (mut gaps, mut passed) = (Vec::new(), 0);
        for gap in state.gaps() {
            let bytes = gap.end - gap.start;
            gaps.push((passed, gap));
            passed += bytes;
        }
        Ok(Self { file, state, regions, gaps, size, frozen, ring })
    }

    /// The head.
    pub fn head(&self) -> std::io::Result<Vec<u8>> {
        let mut head = vec![0; usize::try_from(self.state.head_bytes).unwrap_or(usize::MAX)];
        for (start, gap) in &self.gaps {
            let start = *start as usize;
            self.file.read_exact_at(&mut head[start..start + (gap.end - gap.start) as usize], gap.start)?;
        }
        Ok(head)
    }

    /// The digest of the file.
    pub fn digest(&self) -> std::io::Result<Digest> {
        let (mut hasher, mut at, mut buffer) = (Hasher::new(Algorithm::Sha256), 0, vec![0; PIECE]);
        while at < self.state.bytes {
            let now = usize::try_from(self.state.bytes - at).unwrap_or(PIECE).min(PIECE);
            self.file.read_exact_at(&mut buffer[..now], at)?;
            hasher.update(&buffer[..now]);
            at += now as u64;
        }
        Ok(hasher.finish())
    }

    /// Bytes of the file, which must be there.
    pub fn read_at(&self, into: &mut [u8], at: u64) -> std::io::Result<()> {
        self.file.read_exact_at(into, at)
    }

    /// Where the byte at an address lies in the file, and how many follow it there. `None` for
    /// zeros that are not in the file.
    fn piece(&self, offset: u64) -> (Option<u64>, u64) {
        let region = &self.regions[self.regions.partition_point(|region| region.start <= offset) - 1];
        let inner = offset - region.start;
        match region.of {
            Of::Head => {
                let (start, gap) = &self.gaps[self.gaps.partition_point(|(start, _)| *start <= inner) - 1];
                (Some(gap.start + inner - start), gap.end - gap.start - (inner - start))
            }
            Of::Block { section, block } => {
                let block = &self.state.sections[section].blocks[block];
                (Some(block.at + inner), block.bytes - inner)
            }
            Of::Pages { section, page_bytes: bytes } => {
                let section = &self.state.sections[section];
                let (page, mut rest) = (inner / bytes, inner % bytes);
                let within = section.blocks.iter().find(|block| {
                    let here = rest < page_bytes(block);
                    rest -= if here { 0 } else { page_bytes(block) };
                    here
                });
                // A page is as long as its blocks.
                within.map_or((None, bytes - inner % bytes), |block| row(block, section.positions.len() as u64, page, rest))
            }
        }
    }
}

fn page_bytes(block: &Block) -> u64 {
    block.row * u64::from(PAGE_TOKENS)
}

/// The same within the rows that a page has of a block.
fn row(block: &Block, cells: u64, page: u64, rest: u64) -> (Option<u64>, u64) {
    let tokens = u64::from(PAGE_TOKENS);
    let filled = (cells - page * tokens).min(tokens);
    // Rows, or elements, one after another: those of this page begin at `start`.
    let (start, unit, rest) = if block.transposed {
        let unit = block.element.bytes();
        (rest / (tokens * unit) * cells * unit, unit, rest % (tokens * unit))
    } else {
        (0, block.row, rest)
    };
    if rest < filled * unit {
        (Some(block.at + start + page * tokens * unit + rest), filled * unit - rest)
    } else {
        (None, tokens * unit - rest)
    }
}

fn stamp(file: &File) -> std::io::Result<(u64, i64, i64)> {
    use std::os::unix::fs::MetadataExt as _;
    let stat = file.metadata()?;
    Ok((stat.len(), stat.mtime(), stat.mtime_nsec()))
}

impl Bytewise for StateFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn budget(&self) -> (&Ring, &Available) {
        static AVAILABLE: std::sync::LazyLock<Available> = std::sync::LazyLock::new(Available::system);
        (&self.ring, &*AVAILABLE)
    }

    fn reachable(&self) -> Result<(), MemoryError> {
        let what = "read a state file";
        match (self.frozen, stamp(&self.file)) {
            (Some(before), Ok(now)) if before != now => Err(MemoryError::Unreachable { what, reason: "another process changed it".into() }),
            (_, Err(source)) => Err(MemoryError::File { what, source }),
            _ => Ok(()),
        }
    }

    fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let (mut at, mut rest) = (offset, into);
        while !rest.is_empty() {
            let (place, bytes) = self.piece(at);
            let (now, later) = rest.split_at_mut(usize::try_from(bytes).unwrap_or(usize::MAX).min(rest.len()));
            match place {
                Some(place) => {
                    self.file.read_exact_at(now, place).map_err(|source| MemoryError::File { what: "read a state file", source })?
                }
                None => now.fill(0),
            }
            at += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Bytes other than 0 where the file has none are dropped: the comparison afterwards finds
    /// that.
    fn store(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        let (mut at, mut rest) = (offset, from);
        while !rest.is_empty() {
            let (place, bytes) = self.piece(at);
            let (now, later) = rest.split_at(usize::try_from(bytes).unwrap_or(usize::MAX).min(rest.len()));
            if let Some(place) = place {
                self.file.write_all_at(now, place).map_err(|source| MemoryError::File { what: "write a state file", source })?;
            }
            at += now.len() as u64;
            rest = later;
        }
        Ok(())
    }
}
