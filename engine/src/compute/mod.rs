//! The interface of a model with its memory to a serving process: the same for the dense and the
//! hybrid model.
//!
//! A core computes tokens and holds state; its caller chooses the next token. Between steps a
//! sequence has state for its first T tokens (its boundary).

mod dense;

pub use dense::Dense;
pub(crate) use dense::full_attention;

use crate::blocks::Blocks;
use crate::cache::SeqId;
use crate::error::EngineError;

/// A model, its blocks in shared memory, and the sequences in them.
pub trait Core: Send {
    /// Digest of the weights, `sha256:…`.
    fn weights(&self) -> String;
    /// Name of the model.
    fn model(&self) -> &'static str;
    /// Tokens in the vocabulary.
    fn vocabulary(&self) -> usize;
    /// Maximum number of tokens of a sequence.
    fn context(&self) -> usize;
    /// Text to tokens.
    ///
    /// # Errors
    /// [`EngineError::Tokenize`].
    fn tokenize(&self, text: &str) -> Result<Vec<u32>, EngineError>;
    /// Tokens to text.
    fn detokenize(&self, tokens: &[u32]) -> String;
    /// Memory, groups and tables.
    fn blocks(&self) -> &Blocks;
    /// The same, to hand out and take back.
    fn blocks_mut(&mut self) -> &mut Blocks;
    /// Computes tokens (at least one) after those that a sequence has, and returns the logits after
    /// the last one. On an error with one token nothing has changed; with more, some may have been
    /// computed.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`], [`EngineError::Token`], [`EngineError::ContextFull`],
    /// [`EngineError::PoolFull`].
    fn compute(&mut self, seq: SeqId, tokens: &[u32]) -> Result<Vec<f32>, EngineError>;
}

/// Fails unless every token is in the vocabulary and `start + tokens` fit the context.
///
/// # Errors
/// [`EngineError::Token`], [`EngineError::ContextFull`].
pub fn check(core: &dyn Core, start: usize, tokens: &[u32]) -> Result<(), EngineError> {
    let (vocabulary, limit) = (core.vocabulary(), core.context());
    if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
        return Err(EngineError::Token { token: *token, vocabulary });
    }
    let total = start + tokens.len();
    if total > limit { Err(EngineError::ContextFull { tokens: total, limit }) } else { Ok(()) }
}
