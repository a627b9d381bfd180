//! The lines that tests and the demo exchange with a serving engine.

use crate::error::EngineError;
use pfr_schema::error::ErrorCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, BufRead, Read};

/// Maximum bytes of one line.
const MAX_LINE: u64 = 16 << 20;

/// A line on standard input.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Command {
    /// A new sequence: computes all of the prompt and chooses a first token.
    Open(Prompt),
    /// Generates `count` tokens.
    Generate {
        /// The sequence.
        sequence: String,
        /// Steps.
        count: u64,
        /// Milliseconds from one step to the next.
        #[serde(default)]
        delay_ms: u64,
    },
    /// More of a prompt: ends generation, computes the chosen token and these after it, chooses the
    /// next. If memory is full, some of them may have been computed.
    Append {
        /// The sequence.
        sequence: String,
        /// The prompt to append.
        #[serde(flatten)]
        prompt: Prompt,
    },
    /// Ends generation.
    Stop(Named),
    /// A new sequence with the same state.
    Fork(Named),
    /// Forgets a sequence.
    Free(Named),
    /// Tells a sequence's tokens.
    Tokens(Named),
    /// Names all sequences.
    Sequences {},
    /// Digest of all blocks that are held.
    Memory {},
    /// Turns the bits of one byte of live memory.
    Poke {
        /// The group.
        group: String,
        /// The block.
        block: u32,
        /// The byte, counted over the block's components or state tensors in order.
        byte: u64,
    },
    /// Ends the process, as does the end of input.
    Quit {},
}

/// A prompt as text or as tokens, one of them.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    /// Text.
    pub text: Option<String>,
    /// Tokens.
    pub tokens: Option<Vec<u32>>,
}

/// Names a sequence.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// The sequence.
    pub sequence: String,
}

/// A line on standard output.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Line {
    /// First line: the engine takes commands.
    Ready {
        /// Name under which it registers.
        engine: String,
        /// The model.
        model: String,
        /// Digest of the weights.
        weights: String,
        /// Digest of the engine configuration.
        fingerprint: String,
        /// The process.
        pid: u32,
    },
    /// An agent has accepted the registration.
    Attached {
        /// The agent's version.
        agent: String,
        /// The fingerprint it computed.
        fingerprint: String,
    },
    /// An agent has refused the registration.
    Refused {
        /// The error code.
        code: ErrorCode,
        /// The reason, for people.
        detail: String,
    },
    /// The connection to the agent has ended.
    Detached {
        /// The reason, for people.
        reason: String,
    },
    /// The agent paused the engine.
    Paused {},
    /// The engine goes on.
    Resumed {},
    /// Answer to `open` and `fork`; also tells of a sequence that an agent restored.
    Opened {
        /// The sequence.
        sequence: String,
        /// Its tokens, the last of them chosen and not yet computed.
        tokens: Vec<u32>,
    },
    /// One step was done.
    Token {
        /// The sequence.
        sequence: String,
        /// The token that comes next.
        token: u32,
        /// That token as text.
        text: String,
        /// SHA-256 of the little-endian bits of the step's logits.
        logits: String,
        /// T after the step: tokens whose state is in memory.
        boundary: u64,
    },
    /// Generation has ended: done, stopped, or failed (then an error came before).
    Generated {
        /// The sequence.
        sequence: String,
        /// Steps done.
        count: u64,
    },
    /// Answer to `append`.
    Appended {
        /// The sequence.
        sequence: String,
        /// Its tokens, the last of them chosen and not yet computed.
        tokens: Vec<u32>,
    },
    /// Answer to `free`.
    Freed {
        /// The sequence.
        sequence: String,
    },
    /// Answer to `tokens`.
    Tokens {
        /// The sequence.
        sequence: String,
        /// Computed tokens, then the chosen one.
        tokens: Vec<u32>,
        /// T.
        boundary: u64,
        /// All tokens as text.
        text: String,
    },
    /// Answer to `sequences`.
    Sequences(Vec<String>),
    /// Answer to `memory`.
    Memory {
        /// SHA-256 over all blocks that sequences, pins and restores hold.
        digest: String,
        /// Held blocks by group.
        used: BTreeMap<String, Vec<u32>>,
        /// Free blocks by group.
        free: BTreeMap<String, usize>,
    },
    /// Answer to `poke`.
    Poked {},
    /// A command failed; nothing has changed.
    Error {
        /// The command.
        command: String,
        /// The error code.
        code: ErrorCode,
        /// The reason, for people.
        detail: String,
    },
}

/// The sampling settings of this engine: it always takes the token with the highest logit.
#[must_use]
pub fn sampling() -> BTreeMap<String, Value> {
    BTreeMap::from([("temperature".to_owned(), Value::from(0))])
}

/// The error code of a failure.
#[must_use]
pub fn code(error: &EngineError) -> ErrorCode {
    match error {
        EngineError::NoSequence(_) => ErrorCode::SequenceUnknown,
        EngineError::PoolFull { .. } => ErrorCode::NoRoom,
        EngineError::Prompt | EngineError::Token { .. } | EngineError::ContextFull { .. } | EngineError::Tokenize { .. } => {
            ErrorCode::InvalidRequest
        }
        _ => ErrorCode::Internal,
    }
}

/// The next line's command; `None` at the end of input, an inner error for a line that is none.
///
/// # Errors
/// As reading does.
pub fn read(input: &mut impl BufRead) -> io::Result<Option<Result<Command, String>>> {
    let mut line = Vec::new();
    if input.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    if line.last() != Some(&b'\n') && line.len() as u64 == MAX_LINE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a line over 16 MiB"));
    }
    Ok(Some(serde_json::from_slice(&line).map_err(|error| error.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn commands_are_read() {
        let mut input = &b"{\"open\":{\"text\":\"hi\"}}\n{\"memory\":{}}\n{\"stop\":{\"x\":1}}\n{\"quit\":{}}"[..];
        let mut next = || read(&mut input).unwrap();
        assert_eq!(next(), Some(Ok(Command::Open(Prompt { text: Some("hi".into()), tokens: None }))));
        assert_eq!(next(), Some(Ok(Command::Memory {})));
        assert!(matches!(next(), Some(Err(_))));
        assert_eq!(next(), Some(Ok(Command::Quit {})));
        assert_eq!(next(), None);
    }

    proptest! {
        #[test]
        fn any_line_is_a_command_or_an_error(line in "\\PC{0,100}") {
            prop_assert!(read(&mut line.as_bytes()).is_ok());
        }
    }
}
