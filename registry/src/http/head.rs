//! Line ends in request heads and between chunks: a line feed without a carriage return is
//! refused.
//!
//! hyper accepts a bare line feed as the end of a line. A proxy in front may not, and then the two
//! see different headers. So this filter sees the bytes of a connection before hyper does. It
//! replaces a bare line feed in a head by a byte that is never legal there, and hyper answers 400
//! and closes the connection. It skips bodies by the length in the head, or chunk by chunk. Between
//! chunks hyper takes any byte for a part of a trailer: a bare line feed there ends the input, and
//! the body with an error. When the filter cannot tell where the next head begins, it checks
//! nothing more on that connection.

/// Bytes of a line that are kept: enough for the headers with the length of the body.
const LINE: usize = 256;
/// A byte that is never legal in a head.
const FORBIDDEN: u8 = 0;

/// The position of a connection in its stream of requests.
#[derive(Debug, Default)]
pub(crate) struct Heads {
    state: State,
    /// Complete heads.
    ended: u64,
}

#[derive(Debug)]
enum State {
    Head(Head),
    Body(u64),
    Chunks(Chunk),
    /// A bare line feed stood between chunks.
    Broken,
    /// The beginning of the next head is not known.
    Unknown,
}

impl Default for State {
    fn default() -> Self {
        Self::Head(Head::default())
    }
}

#[derive(Debug, Default)]
struct Head {
    line: Vec<u8>,
    /// Length of the line, including bytes that are not kept.
    length: usize,
    before: u8,
    lines: usize,
    content_length: Option<u64>,
    chunked: bool,
    odd: bool,
}

#[derive(Clone, Copy, Debug)]
enum Chunk {
    /// In the line with the size of a chunk: the number so far, whether it has digits, and whether
    /// it is complete.
    Size(u64, bool, bool),
    SizeEnd(u64),
    Data(u64),
    DataEnd,
    /// In the lines after the last chunk, with the number of bytes seen of the current one.
    Trailer(u64),
    TrailerEnd(u64),
}

impl Heads {
    /// Number of complete heads.
    pub(crate) fn ended(&self) -> u64 {
        self.ended
    }

    /// Whether a bare line feed stood between chunks.
    pub(crate) fn are_broken(&self) -> bool {
        matches!(self.state, State::Broken)
    }

    /// Checks nothing more.
    pub(crate) fn stop(&mut self) {
        self.state = State::Unknown;
    }

    /// Checks the next bytes, and replaces a bare line feed in a head. Returns how many of them may
    /// be read: those before a bare line feed between chunks, and none after one.
    pub(crate) fn check(&mut self, bytes: &mut [u8]) -> usize {
        let (all, mut bytes) = (bytes.len(), bytes);
        while !bytes.is_empty() {
            let seen = match &mut self.state {
                State::Unknown => break,
                State::Broken => return all - bytes.len(),
                State::Body(left) => {
                    let seen = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= seen as u64;
                    if *left == 0 {
                        self.state = State::default();
                    }
                    seen
                }
                State::Chunks(Chunk::Data(left)) if *left > 0 => {
                    let seen = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= seen as u64;
                    seen
                }
                State::Chunks(chunk) => {
                    self.state = chunk.next(bytes[0]);
                    usize::from(!matches!(self.state, State::Broken))
                }
                State::Head(head) => match head.take(&mut bytes[0]) {
                    None => 1,
                    Some(next) => {
                        self.ended += 1;
                        self.state = next;
                        1
                    }
                },
            };
            bytes = &mut bytes[seen..];
        }
        all
    }
}

impl Head {
    /// Takes the next byte. Returns the next state if the byte was the last of the head.
    fn take(&mut self, byte: &mut u8) -> Option<State> {
        if *byte != b'\n' {
            if self.line.len() < LINE {
                self.line.push(*byte);
            }
            self.length += 1;
            self.before = *byte;
            return None;
        }
        if self.before != b'\r' {
            *byte = FORBIDDEN;
            return Some(State::Unknown);
        }
        self.before = 0;
        let (empty, complete) = (self.length == 1, self.length == self.line.len());
        self.line.pop();
        let line = std::mem::take(&mut self.line);
        self.length = 0;
        if empty {
            // Empty lines before a request are skipped.
            return (self.lines > 0).then(|| self.body());
        }
        if self.lines > 0 {
            self.header(&line, complete);
        }
        self.lines += 1;
        None
    }

    fn header(&mut self, line: &[u8], complete: bool) {
        let text = String::from_utf8_lossy(line).to_ascii_lowercase();
        let Some((name, value)) = text.split_once(':') else { return };
        let value = value.trim();
        match name.trim() {
            "content-length" => match value.parse() {
                Ok(length) if complete && self.content_length.is_none() && value.bytes().all(|b| b.is_ascii_digit()) => {
                    self.content_length = Some(length);
                }
                _ => self.odd = true,
            },
            "transfer-encoding" => {
                self.odd |= !complete || self.chunked || value != "chunked";
                self.chunked = true;
            }
            _ => {}
        }
    }

    fn body(&self) -> State {
        match (self.odd, self.chunked, self.content_length) {
            (true, ..) | (_, true, Some(_)) => State::Unknown,
            (_, true, None) => State::Chunks(Chunk::Size(0, false, false)),
            (_, _, Some(length)) if length > 0 => State::Body(length),
            _ => State::default(),
        }
    }
}

impl Chunk {
    fn next(self, byte: u8) -> State {
        State::Chunks(match (self, byte) {
            (Self::Size(size, true, _), b'\r') => Self::SizeEnd(size),
            (Self::Size(size, true, _), b' ' | b'\t' | b';') => Self::Size(size, true, true),
            (Self::Size(size, digits, true), byte) if byte != b'\n' => Self::Size(size, digits, true),
            (Self::Size(size, _, false), byte) if byte.is_ascii_hexdigit() && size >> 60 == 0 => {
                Self::Size(size << 4 | (byte as char).to_digit(16).map_or(0, u64::from), true, false)
            }
            (Self::SizeEnd(0), b'\n') => Self::Trailer(0),
            (Self::SizeEnd(size), b'\n') => Self::Data(size),
            (Self::Data(0), b'\r') => Self::DataEnd,
            (Self::DataEnd, b'\n') => Self::Size(0, false, false),
            (Self::Trailer(seen), b'\r') => Self::TrailerEnd(seen),
            (Self::Trailer(seen), byte) if byte != b'\n' => Self::Trailer(seen + 1),
            (Self::TrailerEnd(0), b'\n') => return State::default(),
            (Self::TrailerEnd(_), b'\n') => Self::Trailer(0),
            (Self::Size(..) | Self::Data(_) | Self::Trailer(_), b'\n') => return State::Broken,
            _ => return State::Unknown,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that hyper gets if they arrive in parts of `part` bytes, and the number of
    /// complete heads.
    fn seen(stream: &[u8], part: usize) -> (Vec<u8>, u64) {
        let (mut bytes, mut heads) = (stream.to_vec(), Heads::default());
        let passed = bytes.chunks_mut(part).map(|part| heads.check(part)).sum();
        bytes.truncate(passed);
        (bytes, heads.ended())
    }

    #[test]
    fn a_bare_line_feed_between_chunks_ends_the_input() {
        let head = "PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        for (before, after) in [
            ("0\r\n", "\n"),
            ("0\r\n", "\nGET / HTTP/1.1\r\nhost: x\r\n\r\n"),
            ("0\r\nt: u", "\n\r\n"),
            ("0\r\nt: u\r\n", "\n"),
            ("0", "\n\r\n"),
            ("1;x=y", "\na\r\n0\r\n\r\n"),
            ("1\r\n\n", "\n0\r\n\r\n"),
        ] {
            let stream = format!("{head}{before}{after}");
            for part in [1, 2, 5, stream.len()] {
                let (bytes, _) = seen(stream.as_bytes(), part);
                assert_eq!(String::from_utf8_lossy(&bytes), format!("{head}{before}"), "{stream:?} in parts of {part}");
            }
        }
    }

    #[test]
    fn bare_line_feeds_are_spoiled_in_heads_and_nowhere_else() {
        let good: [(&[u8], u64); 6] = [
            (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", 1),
            (b"\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n", 2),
            (b"PUT / HTTP/1.1\r\nContent-Length: 4\r\n\r\n\n\na\nGET / HTTP/1.1\r\nhost: x\r\n\r\n", 2),
            (b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\n\n\n\n\r\nA\r\n0123456\n89\r\n0\r\nt: u\r\n\r\nGET / HTTP/1.1\r\n\r\n", 2),
            // The beginning of the next head cannot be known here, so nothing is replaced.
            (b"PUT / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n\n\n\n", 1),
            (b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\n\n\n", 1),
        ];
        for (stream, ended) in good {
            for part in [1, 2, 3, 7, stream.len()] {
                let (bytes, found) = seen(stream, part);
                assert_eq!((bytes.as_slice(), found), (stream, ended), "{}", String::from_utf8_lossy(stream));
            }
        }
        let bad: [&[u8]; 6] = [
            b"GET / HTTP/1.1\nhost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: x\nx: y\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: x\r\n\n",
            b"\nGET / HTTP/1.1\r\nhost: x\r\n\r\n",
            b"PUT / HTTP/1.1\r\nContent-Length: 1\r\n\r\n\nGET / HTTP/1.1\nhost: x\r\n\r\n",
            b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n\n\r\n0\r\n\r\nGET / HTTP/1.1\nhost: x\r\n\r\n",
        ];
        for stream in bad {
            for part in [1, 5, stream.len()] {
                let (bytes, _) = seen(stream, part);
                assert_eq!(bytes.iter().filter(|byte| **byte == FORBIDDEN).count(), 1, "{}", String::from_utf8_lossy(stream));
            }
        }
    }
}
