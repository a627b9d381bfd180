//! Byte-level BPE with the `smollm` pre-tokeniser: digits one by one, the rest as in GPT-2.
//!
//! Vocabulary and merges come from the model file. Decoding what was encoded gives the text back
//! byte for byte; a text holding one of the few bytes this vocabulary lacks (six control characters
//! and the lead bytes of unassigned planes) is refused instead of being changed.

use crate::error::EngineError;
use crate::gguf::Gguf;
use std::collections::HashMap;

const CONTRACTIONS: [&str; 7] = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"];
const CONTROL: i64 = 3;

/// Translates between text and token numbers.
#[derive(Debug)]
pub struct Tokenizer {
    /// Bytes each token stands for.
    bytes: Vec<Box<[u8]>>,
    /// Token of each single byte.
    of_byte: Vec<Option<u32>>,
    /// Merge of two tokens: its rank (lower first) and its result.
    merges: HashMap<(u32, u32), (u32, u32)>,
    /// Tokens such as `<|im_end|>`, recognised in text before anything else.
    special: Vec<(String, u32)>,
    bos: u32,
    eos: u32,
}

impl Tokenizer {
    /// Builds the tables from a model file's `tokenizer.ggml.*` metadata.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] for another tokeniser, [`EngineError::Gguf`] for tables that
    /// contradict each other.
    pub fn from_gguf(gguf: &Gguf<'_>) -> Result<Self, EngineError> {
        let (model, pre) = (gguf.text("tokenizer.ggml.model")?, gguf.text("tokenizer.ggml.pre")?);
        if (model, pre) != ("gpt2", "smollm") {
            return Err(EngineError::Unsupported(format!("tokeniser {model}/{pre}, expected gpt2/smollm")));
        }
        let tokens = gguf.texts("tokenizer.ggml.tokens")?;
        let kinds = gguf.integers("tokenizer.ggml.token_type")?;
        if tokens.len() != kinds.len() || tokens.len() > u32::MAX as usize {
            return Err(EngineError::Gguf(format!("{} tokens but {} token types", tokens.len(), kinds.len())));
        }
        let byte_of = byte_alphabet();
        let mut id_of = HashMap::with_capacity(tokens.len());
        let mut tables = Self { bytes: Vec::new(), of_byte: vec![None; 256], merges: HashMap::new(), special: Vec::new(), bos: 0, eos: 0 };
        for (id, (token, kind)) in (0_u32..).zip(tokens.iter().zip(kinds)) {
            if kind == CONTROL {
                tables.special.push(((*token).to_owned(), id));
                tables.bytes.push(token.as_bytes().into());
                continue;
            }
            let bytes: Option<Box<[u8]>> = token.chars().map(|c| byte_of.get(&c).copied()).collect();
            let bytes = bytes.ok_or_else(|| EngineError::Gguf(format!("token {id} is not written in the byte alphabet")))?;
            if let [byte] = *bytes {
                tables.of_byte[usize::from(byte)] = Some(id);
            }
            tables.bytes.push(bytes);
            id_of.insert(*token, id);
        }
        // The longest first, so that none hides behind its own prefix.
        tables.special.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        let mut joined = String::new();
        for (rank, merge) in (0_u32..).zip(gguf.texts("tokenizer.ggml.merges")?) {
            let unknown = || EngineError::Gguf(format!("merge {merge:?} names tokens that do not exist"));
            let (left, right) = merge.split_once(' ').ok_or_else(unknown)?;
            joined.clear();
            joined.extend([left, right]);
            let id = |text: &str| id_of.get(text).copied().ok_or_else(unknown);
            tables.merges.entry((id(left)?, id(right)?)).or_insert((rank, id(&joined)?));
        }
        tables.bos = tables.known(gguf.integer("tokenizer.ggml.bos_token_id")?)?;
        tables.eos = tables.known(gguf.integer("tokenizer.ggml.eos_token_id")?)?;
        Ok(tables)
    }

    fn known(&self, id: usize) -> Result<u32, EngineError> {
        let known = u32::try_from(id).ok().filter(|_| id < self.bytes.len());
        known.ok_or_else(|| EngineError::Gguf(format!("special token {id} is outside the vocabulary")))
    }

    /// Number of tokens.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.bytes.len()
    }

    /// Begin-of-sequence token; for this model `<|im_start|>`.
    #[must_use]
    pub fn bos(&self) -> u32 {
        self.bos
    }

    /// End-of-sequence token; for this model `<|im_end|>`.
    #[must_use]
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// Text to tokens; special tokens written in the text are recognised.
    ///
    /// # Errors
    /// [`EngineError::Tokenize`] if a byte of the text has no token.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let mut out = Vec::new();
        let mut plain = 0;
        let mut at = 0;
        while let Some(found) = text[at..].find('<') {
            at += found;
            if let Some((name, id)) = self.special.iter().find(|(name, _)| text[at..].starts_with(name.as_str())) {
                self.encode_plain(&text[plain..at], plain, &mut out)?;
                out.push(*id);
                at += name.len();
                plain = at;
            } else {
                at += 1;
            }
        }
        self.encode_plain(&text[plain..], plain, &mut out)?;
        Ok(out)
    }

    fn encode_plain(&self, text: &str, base: usize, out: &mut Vec<u32>) -> Result<(), EngineError> {
        let mut offset = base;
        for piece in pieces(text) {
            let start = out.len();
            for (i, byte) in piece.bytes().enumerate() {
                let id = self.of_byte[usize::from(byte)];
                out.push(id.ok_or(EngineError::Tokenize { byte, offset: offset + i })?);
            }
            self.merge(out, start);
            offset += piece.len();
        }
        Ok(())
    }

    /// Applies the best merge among `out[start..]` until none is left.
    fn merge(&self, out: &mut Vec<u32>, start: usize) {
        loop {
            let candidates = out[start..].windows(2).enumerate();
            let merges = candidates.filter_map(|(i, pair)| self.merges.get(&(pair[0], pair[1])).map(|(rank, id)| (*rank, i, *id)));
            let Some((_, i, id)) = merges.min() else { return };
            out[start + i] = id;
            out.remove(start + i + 1);
        }
    }

    /// Tokens to the bytes they stand for; unknown numbers stand for nothing.
    #[must_use]
    pub fn decode_bytes(&self, tokens: &[u32]) -> Vec<u8> {
        tokens.iter().filter_map(|t| self.bytes.get(*t as usize)).flatten().copied().collect()
    }

    /// Tokens to text; a character cut in the middle becomes U+FFFD.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        String::from_utf8_lossy(&self.decode_bytes(tokens)).into_owned()
    }
}

/// GPT-2's alphabet: the character that stands for each byte in token texts.
fn byte_alphabet() -> HashMap<char, u8> {
    let plain = |b: &u8| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let direct = (0..=255).filter(plain).map(|b| (char::from(b), b));
    let moved = (0..=255).filter(|b| !plain(b));
    direct.chain(('\u{100}'..).zip(moved)).collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Digit,
    Space,
    Other,
}

fn class(c: char) -> Class {
    match c {
        c if c.is_numeric() => Class::Digit,
        c if c.is_alphabetic() => Class::Letter,
        c if c.is_whitespace() => Class::Space,
        _ => Class::Other,
    }
}

/// Splits text the way the regular expressions of the reference do: each digit alone, then
/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+` on what lies between digits.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let piece = &rest[..first_piece(rest)?];
        rest = &rest[piece.len()..];
        Some(piece)
    })
}

/// Length in bytes of the first piece; `None` for an empty text.
fn first_piece(text: &str) -> Option<usize> {
    let first = text.chars().next()?;
    let run = |from: usize, of: Class| from + text[from..].find(|c| class(c) != of).unwrap_or(text.len() - from);
    if let Some(contraction) = CONTRACTIONS.iter().find(|c| text.starts_with(**c)) {
        return Some(contraction.len());
    }
    let body = usize::from(first == ' ');
    let body_class = text[body..].chars().next().map(class);
    Some(match body_class {
        Some(Class::Digit) if body == 0 => first.len_utf8(),
        Some(kind @ (Class::Letter | Class::Other)) => run(body, kind),
        _ => {
            // White space: all of it at the end of a fragment, else all but the last character.
            let end = run(0, Class::Space);
            let last = text[..end].chars().next_back().map_or(0, char::len_utf8);
            let at_end = text[end..].chars().next().is_none_or(|c| class(c) == Class::Digit);
            if at_end || last == end { end } else { end - last }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str) -> Vec<&str> {
        let pieces: Vec<&str> = pieces(text).collect();
        assert_eq!(pieces.concat(), text);
        pieces
    }

    #[test]
    fn splits_like_the_reference() {
        assert_eq!(split("Hello world, it's 2024!"), ["Hello", " world", ",", " it", "'s", " ", "2", "0", "2", "4", "!"]);
        assert_eq!(split("a  b\n\n c  "), ["a", " ", " b", "\n\n", " c", "  "]);
        assert_eq!(split("x = 1\n\ty"), ["x", " =", " ", "1", "\n", "\t", "y"]);
        assert_eq!(split("we'll 'tis don't"), ["we", "'ll", " '", "tis", " don", "'t"]);
        assert_eq!(split("é 日本 ½ 🙂"), ["é", " 日本", " ", "½", " 🙂"]);
        assert!(split("").is_empty());
    }

    #[test]
    fn the_alphabet_covers_every_byte_once() {
        let alphabet = byte_alphabet();
        assert_eq!(alphabet.len(), 256);
        assert_eq!((alphabet[&'Ġ'], alphabet[&'Ċ'], alphabet[&'A']), (b' ', b'\n', b'A'));
    }
}
