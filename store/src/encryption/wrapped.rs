//! A domain's key as it is kept: wrapped with a key that the registry does not keep.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A domain's key, wrapped. `Display` gives the line of JSON that is kept.
///
/// ```json
/// {"version":1,"cipher":"aes-256-gcm","id":"5f1d09c3","wrapped_by":"3c4d…","key":"…"}
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrappedKey {
    version: u32,
    cipher: String,
    /// The id of the domain's key.
    pub(super) id: String,
    /// The id of the key file that wrapped it, or [`Self::BY_COMMAND`].
    pub(super) wrapped_by: String,
    /// The domain's key: base64, or what the command printed.
    pub(super) key: String,
}

impl WrappedKey {
    /// Bytes of the longest.
    pub const LONGEST: usize = 64 << 10;
    /// In the place of the key file's id.
    pub(super) const BY_COMMAND: &str = "command";
    /// Bytes of the longest key that a command gives.
    pub(super) const LONGEST_KEY: usize = 16 << 10;

    const VERSION: u32 = 1;
    const CIPHER: &str = "aes-256-gcm";

    pub(super) fn new(id: String, wrapped_by: String, key: String) -> Self {
        Self { version: Self::VERSION, cipher: Self::CIPHER.to_owned(), id, wrapped_by, key }
    }

    /// Whether a command may have printed this: one line of ASCII, and not a long one.
    pub(super) fn may_be_key(text: &str) -> bool {
        text.len() <= Self::LONGEST_KEY && text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic())
    }

    /// Whether a text is the beginning of a wrapped key, which was cut while it was written.
    pub(super) fn is_cut(text: &str) -> bool {
        serde_json::from_str::<serde::de::IgnoredAny>(text).is_err_and(|e| e.is_eof())
    }

    /// Reads the line that [`fmt::Display`] gives.
    ///
    /// # Errors
    /// [`Error::Locked`] for any other text.
    pub fn parse(text: &str) -> Result<Self> {
        let refused = |reason: &str| Error::Locked(format!("{reason}: a newer version of pf wrote it, or it is damaged"));
        if text.len() > Self::LONGEST {
            return Err(refused("the wrapped key is too long"));
        }
        let wrapped: Self = serde_json::from_str(text).map_err(|e| refused(&format!("the wrapped key cannot be read ({e})")))?;
        let is_id = |id: &str, digits| id.len() == digits && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if wrapped.version != Self::VERSION || wrapped.cipher != Self::CIPHER {
            return Err(refused(&format!("the wrapped key is of version {} for {:?}", wrapped.version, wrapped.cipher)));
        }
        if !is_id(&wrapped.id, 8) || !(wrapped.wrapped_by == Self::BY_COMMAND || is_id(&wrapped.wrapped_by, 16)) {
            return Err(refused("the wrapped key has no valid ids"));
        }
        if wrapped.key.is_empty() || !Self::may_be_key(&wrapped.key) {
            return Err(refused("the wrapped key has no key of a valid length"));
        }
        Ok(wrapped)
    }
}

impl fmt::Display for WrappedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = r#"{"version":1,"cipher":"aes-256-gcm","id":"5f1d09c3","wrapped_by":"3c4d3c4d3c4d3c4d","key":"AAEC"}"#;

    #[test]
    fn a_wrapped_key_is_one_line_that_reads_back() {
        let wrapped = WrappedKey::parse(GOOD).expect("a wrapped key");
        assert_eq!(wrapped.to_string(), GOOD);
        assert_eq!(WrappedKey::parse(&format!("{GOOD}\n")).expect("a line"), wrapped);
    }

    #[test]
    fn every_beginning_of_a_wrapped_key_is_one_that_was_cut() {
        for end in 0..GOOD.len() {
            assert!(WrappedKey::is_cut(&GOOD[..end]), "{end}");
        }
        for text in [GOOD, &format!("{GOOD}\n"), "nonsense", "{\"version\":2}"] {
            assert!(!WrappedKey::is_cut(text), "{text}");
        }
    }

    #[test]
    fn what_is_no_wrapped_key_is_refused_and_nothing_is_guessed() {
        let long = GOOD.replace("AAEC", &"A".repeat(WrappedKey::LONGEST));
        let cases = [
            GOOD.replace("\"version\":1", "\"version\":2"),
            GOOD.replace("aes-256-gcm", "rot13"),
            GOOD.replace("5f1d09c3", "5F1D09C3"),
            GOOD.replace("5f1d09c3", ""),
            GOOD.replace("3c4d3c4d3c4d3c4d", "nobody"),
            GOOD.replace("AAEC", ""),
            GOOD.replace("AAEC", "A\\nB"),
            GOOD.replace("AAEC", &"A".repeat(WrappedKey::LONGEST_KEY + 1)),
            GOOD.replace('}', ",\"more\":1}"),
            GOOD[..GOOD.len() - 1].to_owned(),
            String::new(),
            long,
        ];
        for text in cases {
            assert!(matches!(WrappedKey::parse(&text), Err(Error::Locked(_))), "{text:.200}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,300}") {
            if let Ok(wrapped) = WrappedKey::parse(&text) {
                prop_assert_eq!(WrappedKey::parse(&wrapped.to_string()).expect("it reads back"), wrapped);
            }
        }
    }
}
