//! Server-sent events, as a client reads them: blocks of lines, with an empty line behind each.
//!
//! ```text
//! id: 019a3f0e5c7b7d42b1e6a90cfe541d20-42
//! event: tagged
//! data: {"id":"019a3f0e5c7b7d42b1e6a90cfe541d20-42",…}
//! ```
//!
//! A line that begins with a colon is a comment. A block without data only says an id.

use crate::error::FormatError;

/// Bytes of a block at most.
const MOST: usize = 1 << 20;

/// A block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Its id, if it has one: where a reader goes on that was cut after it.
    pub id: Option<String>,
    /// The kind of the event; empty if the block has none.
    pub event: String,
    /// The rest. Several lines have line feeds between them.
    pub data: String,
}

/// Takes a stream apart, in pieces as they come.
#[derive(Debug, Default)]
pub struct Blocks {
    /// Bytes without a complete line.
    held: Vec<u8>,
    block: Block,
    /// Whether a line of the block was read.
    has_lines: bool,
    /// Bytes of the block so far.
    bytes: usize,
}

impl Blocks {
    /// Adds bytes that came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// The next block, once it is complete. A block of comments alone is one without anything.
    ///
    /// # Errors
    /// [`FormatError::TooLarge`] for a block of more than a MiB. What follows cannot be read.
    pub fn pop(&mut self) -> Result<Option<Block>, FormatError> {
        let mut read = 0;
        let mut done = None;
        while let Some(length) = self.held[read..].iter().position(|byte| *byte == b'\n') {
            let line = String::from_utf8_lossy(&self.held[read..read + length]).into_owned();
            read += length + 1;
            let line = line.strip_suffix('\r').unwrap_or(&line);
            if !line.is_empty() {
                self.bytes += length;
                self.line(line);
                if self.bytes > MOST {
                    break;
                }
            } else if self.has_lines {
                (self.has_lines, self.bytes) = (false, 0);
                done = Some(std::mem::take(&mut self.block));
                break;
            }
        }
        self.held.drain(..read);
        let found = self.bytes + if done.is_none() { self.held.len() } else { 0 };
        if found > MOST {
            return Err(FormatError::TooLarge { what: "bytes of a server-sent event", found: found as u64, limit: MOST as u64 });
        }
        Ok(done)
    }

    fn line(&mut self, line: &str) {
        self.has_lines = true;
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match name {
            "id" if !value.contains('\0') => self.block.id = Some(value.to_owned()),
            "event" => value.clone_into(&mut self.block.event),
            "data" => {
                if !self.block.data.is_empty() {
                    self.block.data.push('\n');
                }
                self.block.data.push_str(value);
            }
            // A comment, or a field of a later version.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(pieces: &[&[u8]]) -> Result<Vec<Block>, FormatError> {
        let (mut blocks, mut found) = (Blocks::default(), Vec::new());
        for piece in pieces {
            blocks.push(piece);
            while let Some(block) = blocks.pop()? {
                found.push(block);
            }
        }
        Ok(found)
    }

    fn block(id: Option<&str>, event: &str, data: &str) -> Block {
        Block { id: id.map(str::to_owned), event: event.into(), data: data.into() }
    }

    #[test]
    fn blocks_comments_and_ids_alone() {
        let text =
            b"retry: 2000\nid: a-1\n\n:\n\n\n\nid:a-2\r\nevent: pushed\r\ndata: {\"x\":1}\r\n\r\ndata\ndata: y\nfuture: z\n\nid: a-3\n";
        let expected = [block(Some("a-1"), "", ""), block(None, "", ""), block(Some("a-2"), "pushed", "{\"x\":1}"), block(None, "", "y")];
        assert_eq!(all(&[text]).expect("text"), expected, "the last one is not complete");
    }

    #[test]
    fn a_block_without_an_end_is_refused_before_it_fills_the_memory() {
        let mut blocks = Blocks::default();
        let refused = (0..40).find_map(|_| {
            blocks.push(&[b'x'; 64 << 10]);
            blocks.pop().err()
        });
        assert!(matches!(refused, Some(FormatError::TooLarge { .. })), "one line");
        let line = [b"data: ".as_slice(), &[b'x'; 1000], b"\n"].concat();
        assert!(all(&vec![line.as_slice(); 2000]).is_err(), "many lines");
        let comment = [b":".as_slice(), &[b'x'; 1000], b"\n\n"].concat();
        assert_eq!(all(&vec![comment.as_slice(); 2000]).expect("short blocks").len(), 2000);
    }

    proptest! {
        #[test]
        fn blocks_are_the_same_however_the_bytes_come(
            wanted in proptest::collection::vec(("[0-9a-f-]{0,9}", "[a-z]{1,9}", "[^\\r\\n\0]{1,30}"), 0..6),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..9),
        ) {
            let text: String = wanted.iter().map(|(id, event, data)| format!("id: {id}\nevent: {event}\ndata: {data}\n\n")).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &text.as_bytes()[pair[0]..pair[1]]).collect();
            let expected: Vec<Block> = wanted.iter().map(|(id, event, data)| block(Some(id.as_str()), event, data)).collect();
            prop_assert_eq!(all(&pieces).expect("short blocks"), expected);
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(all(&[&bytes]).is_ok());
        }
    }
}
