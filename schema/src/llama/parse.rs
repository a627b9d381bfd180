//! The parser.

use super::{Block, Element, MAGIC, Role, Section, State, VERSION};
use crate::error::FormatError;
use crate::limits::Limits;

/// Streams of a cache: sequences that a context can have.
const MAX_STREAMS: u32 = 256;
/// Layers of a model.
const MAX_LAYERS: u32 = 4096;
/// Size of a rotation.
const MAX_ROTATION: u32 = 1 << 16;
/// Sections of a file: full attention, windows, recurrent state.
const MAX_SECTIONS: usize = 3;
/// Words before the sections: 64 MiB.
const MAX_WORDS: u32 = 16 << 20;
/// Bytes of a cell's state in one layer.
const MAX_ROW: u64 = 64 << 20;
/// Bytes of a file.
const MAX_FILE: u64 = 1 << 44;
/// Bytes of [`super::Section::extra`] for a cell.
const EXTRA: usize = 12;
/// Cells that are read at once.
const CELLS: u32 = 4096;

/// A place in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct At {
    /// Bytes of the file before it.
    pub file: u64,
    /// Of these, bytes of the head.
    pub head: u64,
}

/// Bytes to parse.
pub trait Source {
    /// Copies bytes of the head.
    ///
    /// # Errors
    /// A [`FormatError`] if they are not there.
    fn load(&mut self, at: At, into: &mut [u8]) -> Result<(), FormatError>;

    /// Whether everything before this place is there.
    fn reaches(&self, at: At) -> bool;

    /// Whether this place is the end.
    fn ends(&self, at: At) -> bool;
}

/// A complete file in memory.
#[derive(Clone, Copy, Debug)]
pub struct Bytes<'a>(pub &'a [u8]);

/// The head of a file, without the rows.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a>(pub &'a [u8]);

fn copy(from: &[u8], start: u64, at: At, into: &mut [u8]) -> Result<(), FormatError> {
    let start = usize::try_from(start).unwrap_or(usize::MAX);
    let found = from.get(start..).and_then(|rest| rest.get(..into.len()));
    into.copy_from_slice(found.ok_or_else(|| cut(at))?);
    Ok(())
}

impl Source for Bytes<'_> {
    fn load(&mut self, at: At, into: &mut [u8]) -> Result<(), FormatError> {
        copy(self.0, at.file, at, into)
    }
    fn reaches(&self, at: At) -> bool {
        at.file <= self.0.len() as u64
    }
    fn ends(&self, at: At) -> bool {
        at.file == self.0.len() as u64
    }
}

impl Source for Head<'_> {
    fn load(&mut self, at: At, into: &mut [u8]) -> Result<(), FormatError> {
        copy(self.0, at.head, at, into)
    }
    fn reaches(&self, at: At) -> bool {
        at.head <= self.0.len() as u64
    }
    fn ends(&self, at: At) -> bool {
        at.head == self.0.len() as u64
    }
}

fn field(at: At, expected: impl ToString, found: impl ToString) -> FormatError {
    FormatError::field("state file of llama.cpp", format!("byte {}", at.file), expected, found)
}

fn cut(at: At) -> FormatError {
    field(at, "more bytes", "the end of the file")
}

/// Parses a file, or the head of one.
///
/// # Errors
/// [`FormatError`] with the byte, what was expected there, and what was found: an unknown version,
/// type or form, media, a file that is cut or goes on, and one that can be read in two ways.
/// [`FormatError::TooLarge`] for more than `limits` allow.
pub fn parse(source: &mut dyn Source, limits: &Limits) -> Result<State, FormatError> {
    let mut reader = Reader { source, at: At::default() };
    reader.exactly("the magic number of a saved sequence", MAGIC)?;
    reader.exactly("version", VERSION)?;
    let tokens = reader.tokens()?;
    if tokens.is_empty() {
        return Ok(State { tokens, boundary: 0, sections: Vec::new(), bytes: reader.at.file, head_bytes: reader.at.head });
    }
    let mut search = Search { tokens: tokens.len(), found: Vec::new(), deepest: None };
    search.go(&mut reader, &mut Vec::new());
    let Search { mut found, deepest, .. } = search;
    let state = match (found.pop(), found.is_empty(), deepest) {
        (Some(state), true, _) => state,
        (None, _, Some((_, error))) => return Err(error),
        _ => return Err(field(At::default(), "sections that can be read in one way", "two ways")),
    };
    let state = State { tokens, ..state };
    for section in &state.sections {
        let page = section.blocks.iter().fold(0_u64, |sum, block| sum.saturating_add(block.row));
        if page > limits.page_bytes {
            return Err(FormatError::TooLarge { what: "the state of one token in bytes", found: page, limit: limits.page_bytes });
        }
    }
    Ok(state)
}

struct Reader<'a> {
    source: &'a mut dyn Source,
    at: At,
}

/// A way to read a section.
#[derive(Clone, Copy)]
enum Form {
    Attention { extra: bool, values: bool },
    Recurrent,
}

const FORMS: [Form; 5] = [
    Form::Attention { extra: false, values: true },
    Form::Attention { extra: true, values: true },
    Form::Attention { extra: false, values: false },
    Form::Attention { extra: true, values: false },
    Form::Recurrent,
];

/// All ways to read the sections.
struct Search {
    tokens: usize,
    found: Vec<State>,
    /// The error of the attempt that came farthest.
    deepest: Option<(u64, FormatError)>,
}

impl Search {
    fn go(&mut self, reader: &mut Reader<'_>, so_far: &mut Vec<Section>) {
        let start = reader.at;
        if reader.source.ends(start) {
            match boundary(so_far, start) {
                Ok(boundary) => self.found.push(State {
                    tokens: Vec::new(),
                    boundary,
                    sections: so_far.clone(),
                    bytes: start.file,
                    head_bytes: start.head,
                }),
                Err(error) => self.note(start, error),
            }
            return;
        }
        if so_far.len() == MAX_SECTIONS {
            return self.note(start, field(start, format!("the end after {MAX_SECTIONS} sections"), "more bytes"));
        }
        for form in FORMS {
            // Two ways are enough to refuse a file.
            if self.found.len() > 1 {
                return;
            }
            reader.at = start;
            let section = match form {
                Form::Attention { extra, values } => reader.attention(self.tokens, extra, values),
                Form::Recurrent => reader.recurrent(self.tokens),
            };
            match section {
                Ok(section) => {
                    so_far.push(section);
                    self.go(reader, so_far);
                    so_far.pop();
                }
                Err(error) => self.note(reader.at, error),
            }
        }
    }

    fn note(&mut self, at: At, error: FormatError) {
        if self.deepest.as_ref().is_none_or(|(deepest, _)| *deepest < at.file) {
            self.deepest = Some((at.file, error));
        }
    }
}

/// The boundary, which all sections must share.
fn boundary(sections: &[Section], at: At) -> Result<u64, FormatError> {
    let mut last = sections.iter().map(|section| section.positions.iter().max().copied().unwrap_or_default());
    let first = last.next().ok_or_else(|| cut(at))?;
    match last.find(|other| *other != first) {
        Some(other) => Err(field(at, format!("all sections up to position {first}"), format!("one up to {other}"))),
        None => Ok(u64::from(first) + 1),
    }
}

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<(), FormatError> {
        self.source.load(self.at, into)?;
        self.at.file += into.len() as u64;
        self.at.head += into.len() as u64;
        Ok(())
    }

    fn u32(&mut self) -> Result<u32, FormatError> {
        self.array().map(u32::from_le_bytes)
    }

    fn i32(&mut self) -> Result<i32, FormatError> {
        self.array().map(i32::from_le_bytes)
    }

    /// A number within bounds.
    fn within(&mut self, what: &str, least: u32, most: u32) -> Result<u32, FormatError> {
        let (at, found) = (self.at, self.u32()?);
        if (least..=most).contains(&found) { Ok(found) } else { Err(field(at, format!("{what}, {least} to {most}"), found)) }
    }

    fn exactly(&mut self, what: &str, expected: u32) -> Result<(), FormatError> {
        let (at, found) = (self.at, self.u32()?);
        if found == expected { Ok(()) } else { Err(field(at, format!("{what} {expected}"), found)) }
    }

    /// Passes over rows.
    fn skip(&mut self, bytes: u64) -> Result<u64, FormatError> {
        let start = self.at.file;
        let end = start.checked_add(bytes).filter(|end| *end <= MAX_FILE);
        self.at.file = end.ok_or(FormatError::TooLarge { what: "a state file in bytes", found: u64::MAX, limit: MAX_FILE })?;
        if self.source.reaches(self.at) { Ok(start) } else { Err(cut(self.at)) }
    }

    fn tokens(&mut self) -> Result<Vec<u32>, FormatError> {
        let count = self.within("words", 0, MAX_WORDS)?;
        let start = self.at;
        let end = At { file: start.file + 4 * u64::from(count), head: start.head + 4 * u64::from(count) };
        if !self.source.reaches(end) {
            return Err(cut(start));
        }
        let mut bytes = vec![0; 4 * count as usize];
        self.fill(&mut bytes)?;
        let words: Vec<i32> = bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect();
        let tokens = match &words[..] {
            [-1, 1, count, rest @ ..] => {
                let count = usize::try_from(*count).unwrap_or(usize::MAX);
                match rest.split_at_checked(count) {
                    Some((tokens, [0])) => tokens,
                    Some((_, [_, ..])) => return Err(field(start, "a slot with text alone", "images or other media")),
                    _ => return Err(field(start, format!("{count} tokens and a 0"), format!("{} words", rest.len()))),
                }
            }
            [-1, version, ..] => return Err(field(start, "tokens in form 1", format!("form {version}"))),
            tokens => tokens,
        };
        let token = |token: &i32| u32::try_from(*token).map_err(|_| field(start, "tokens of 0 or more", token));
        tokens.iter().map(token).collect()
    }

    /// Cells, their number first: none for a stream without.
    fn cells(&mut self, tokens: usize, extra: bool) -> Result<(Vec<u32>, Vec<u8>), FormatError> {
        let count = self.within("cells of as many tokens at most", 0, u32::try_from(tokens).unwrap_or(u32::MAX))?;
        let (mut positions, mut extras) = (Vec::new(), Vec::new());
        let mut seen = vec![false; if count == 0 { 0 } else { tokens }];
        let length = if extra { 12 + EXTRA } else { 12 };
        while (positions.len() as u32) < count {
            let now = (count - positions.len() as u32).min(CELLS) as usize;
            let (at, mut bytes) = (self.at, vec![0; now * length]);
            self.fill(&mut bytes)?;
            for (number, cell) in bytes.chunks_exact(length).enumerate() {
                let passed = (number * length) as u64;
                let (position, more) = self.cell(cell, &mut seen, At { file: at.file + passed, head: at.head + passed })?;
                positions.push(position);
                extras.extend_from_slice(more);
            }
        }
        Ok((positions, extras))
    }

    /// The position of a cell, and its 12 bytes more. An error counts from this cell.
    fn cell<'b>(&mut self, cell: &'b [u8], seen: &mut [bool], at: At) -> Result<(u32, &'b [u8]), FormatError> {
        let end = std::mem::replace(&mut self.at, at);
        let (position, rest) = split(cell);
        let (sequences, rest) = split(rest);
        let (more, sequence) = rest.split_at(rest.len() - 4);
        if sequences != 1 {
            return Err(field(at, "a cell of 1 sequence", sequences));
        }
        if split(sequence).0.cast_signed() < 0 {
            return Err(field(at, "a cell of a sequence of 0 or more", split(sequence).0.cast_signed()));
        }
        match seen.get_mut(position as usize) {
            Some(seen) if !*seen => *seen = true,
            Some(_) => return Err(field(at, "cells with each position once", position)),
            None => return Err(field(at, format!("a cell with a position below {}", seen.len()), position.cast_signed())),
        }
        self.at = end;
        Ok((position, more))
    }

    fn attention(&mut self, tokens: usize, extra: bool, values: bool) -> Result<Section, FormatError> {
        let streams = self.within("streams", 1, MAX_STREAMS)?;
        let mut section: Option<Section> = None;
        for _ in 0..streams {
            let at = self.at;
            let (positions, extra) = self.cells(tokens, extra)?;
            if positions.is_empty() {
                continue;
            }
            if section.is_some() {
                return Err(field(at, "the sequence in one stream", "another"));
            }
            let transposed = self.within("whether V is transposed", 0, 1)? == 1;
            let layers = self.within("layers", 1, MAX_LAYERS)?;
            let rotation = [self.within("the rotation of K", 0, MAX_ROTATION)?, self.within("the rotation of V", 0, MAX_ROTATION)?];
            let (cells, mut blocks) = (positions.len() as u64, Vec::new());
            for number in 0..layers {
                blocks.push(self.rows(Role::K, number, cells)?);
            }
            for number in 0..if values { layers } else { 0 } {
                blocks.push(if transposed { self.columns(number, cells)? } else { self.rows(Role::V, number, cells)? });
            }
            section = Some(Section { streams, positions, extra, rotation, blocks });
        }
        section.ok_or_else(|| field(self.at, "a stream with cells", "none"))
    }

    fn recurrent(&mut self, tokens: usize) -> Result<Section, FormatError> {
        self.exactly("cells:", 1)?;
        let position = self.within("a position of a token", 0, u32::try_from(tokens - 1).unwrap_or(u32::MAX))?;
        self.exactly("sequences:", 0)?;
        self.exactly("S is transposed:", 0)?;
        let layers = self.within("layers", 1, MAX_LAYERS)?;
        let mut blocks = Vec::new();
        while !self.source.ends(self.at) {
            let at = self.at;
            blocks.push(self.rows(Role::R, blocks.len() as u32, 1)?);
            if blocks.len() as u64 > 2 * u64::from(layers) {
                return Err(field(at, format!("R and S of {layers} layers"), "more"));
            }
        }
        let half = blocks.len() / 2;
        let form = |block: &Block| (block.element, block.row);
        let (first, second) = blocks.split_at_mut(half);
        second.iter_mut().zip(0..).for_each(|(block, number)| (block.role, block.number) = (Role::S, number));
        let even = |half: &[Block]| half.windows(2).all(|pair| form(&pair[0]) == form(&pair[1]));
        if half == 0 || first.len() != second.len() || !even(first) || !even(second) {
            return Err(field(self.at, "as many R of one form as S of one form", format!("{} blocks", blocks.len())));
        }
        Ok(Section { streams: 0, positions: vec![position], extra: Vec::new(), rotation: [0; 2], blocks })
    }

    fn element(&mut self, role: Role) -> Result<Element, FormatError> {
        let (at, number) = (self.at, self.i32()?);
        Element::from_number(number).ok_or_else(|| field(at, format!("a known type of {role:?}"), number))
    }

    fn rows(&mut self, role: Role, number: u32, cells: u64) -> Result<Block, FormatError> {
        let element = self.element(role)?;
        let (at, row) = (self.at, self.array().map(u64::from_le_bytes)?);
        if row == 0 || row > MAX_ROW || !row.is_multiple_of(element.bytes()) {
            return Err(field(at, format!("bytes of a row of {element:?}"), row));
        }
        let bytes = row * cells;
        Ok(Block { role, number, element, row, transposed: false, at: self.skip(bytes)?, bytes })
    }

    fn columns(&mut self, number: u32, cells: u64) -> Result<Block, FormatError> {
        let (at, element) = (self.at, self.element(Role::V)?);
        if !element.is_plain() {
            return Err(field(at, "a type of V that can be transposed", element.name()));
        }
        self.exactly("bytes of an element:", element.bytes() as u32)?;
        let row = u64::from(self.within("rows", 1, (MAX_ROW / 8) as u32)?) * element.bytes();
        let bytes = row * cells;
        Ok(Block { role: Role::V, number, element, row, transposed: true, at: self.skip(bytes)?, bytes })
    }
}

/// The first number, and the rest.
fn split(bytes: &[u8]) -> (u32, &[u8]) {
    bytes.split_first_chunk::<4>().map_or((0, bytes), |(word, rest)| (u32::from_le_bytes(*word), rest))
}
