//! `match-keys` as bytes. It is made for every request while a state lies ready, on the thread that
//! schedules, and its keys would be three times as long in JSON.
//!
//! ```text
//! u8 1 | u64 id | u64 tokens | u64 computed | text salt | u8 0, or u8 1 and text adapter | u32 keys | keys × (u64 length, 32 bytes)
//! text = u32 bytes, and these bytes of UTF-8                                                   all numbers little-endian
//! ```
//!
//! The first byte tells it from JSON, which begins with `{`. The answer is JSON.

use super::ask::{MAX_KEYS, MatchKeys};
use crate::digest::{Algorithm, Digest};

/// First byte of a message in this form.
pub const MATCH_KEYS: u8 = 1;
/// Bytes of a salt or an adapter's name.
pub const MAX_TEXT: usize = 1 << 20;

/// Bytes of a key.
const KEY: usize = 32;

/// The body of a message that makes the call under this id.
#[must_use]
pub fn encode(id: u64, call: &MatchKeys) -> Vec<u8> {
    let mut body = vec![MATCH_KEYS];
    for number in [id, call.tokens, call.computed] {
        body.extend(number.to_le_bytes());
    }
    let text = |body: &mut Vec<u8>, text: &str| {
        body.extend((text.len() as u32).to_le_bytes());
        body.extend(text.as_bytes());
    };
    text(&mut body, &call.salt);
    body.push(u8::from(call.adapter.is_some()));
    if let Some(adapter) = &call.adapter {
        text(&mut body, adapter);
    }
    body.extend((call.keys.len() as u32).to_le_bytes());
    for (length, key) in &call.keys {
        body.extend(length.to_le_bytes());
        body.extend(key.as_bytes());
    }
    body
}

/// Reads a body, its first byte included: the id and the call.
///
/// # Errors
/// What is wrong. Nothing is allocated for lengths that the body does not have.
pub fn parse(body: &[u8]) -> Result<(u64, MatchKeys), String> {
    let mut reader = Reader(body);
    if reader.array::<1>()? != [MATCH_KEYS] {
        return Err(format!("a call in binary form begins with {MATCH_KEYS}"));
    }
    let (id, tokens, computed) = (reader.number()?, reader.number()?, reader.number()?);
    let salt = reader.text("salt")?;
    let adapter = match reader.array()? {
        [0] => None,
        [1] => Some(reader.text("adapter")?),
        [other] => return Err(format!("0 or 1 says whether there is an adapter, found {other}")),
    };
    let count = u32::from_le_bytes(reader.array()?) as usize;
    if count > MAX_KEYS {
        return Err(format!("{count} keys, the limit is {MAX_KEYS}"));
    }
    if reader.0.len() != count * (8 + KEY) {
        return Err(format!("{count} keys are announced, {} bytes follow", reader.0.len()));
    }
    let mut keys = Vec::with_capacity(count);
    for _ in 0..count {
        let length = reader.number()?;
        let key = Digest::from_bytes(Algorithm::Sha256, &reader.array::<KEY>()?).map_err(|e| e.to_string())?;
        keys.push((length, key));
    }
    let call = MatchKeys { tokens, computed, salt, adapter, keys };
    call.check()?;
    Ok((id, call))
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (found, rest) = self.0.split_first_chunk::<N>().ok_or_else(|| format!("{N} bytes expected, found {}", self.0.len()))?;
        self.0 = rest;
        Ok(*found)
    }

    fn number(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &str) -> Result<String, String> {
        let bytes = u32::from_le_bytes(self.array()?) as usize;
        if bytes > MAX_TEXT {
            return Err(format!("the {what} has {bytes} bytes, the limit is {MAX_TEXT}"));
        }
        let (text, rest) = self.0.split_at_checked(bytes).ok_or_else(|| format!("the {what} ends after {} bytes", self.0.len()))?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).map_err(|e| format!("the {what}: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn call(keys: &[u64]) -> MatchKeys {
        let keys = keys.iter().map(|at| (*at, Digest::sha256(&at.to_le_bytes()))).collect();
        MatchKeys { tokens: 100, computed: 16, salt: "tenant".into(), adapter: Some("ä".into()), keys }
    }

    #[test]
    fn the_bytes_are_those_of_the_connectors() {
        // The unit tests of the connectors have the same bytes.
        let call = MatchKeys { tokens: 3, computed: 1, salt: "s".into(), adapter: None, keys: vec![(2, Digest::sha256(b"k"))] };
        let expected = [
            "01",
            "0700000000000000",
            "0300000000000000",
            "0100000000000000",
            "01000000",
            "73",
            "00",
            "01000000",
            "0200000000000000",
            &Digest::sha256(b"k").hex(),
        ];
        assert_eq!(hex::encode(encode(7, &call)), expected.concat());
    }

    #[test]
    fn malformed_calls_are_refused_with_the_reason() {
        let good = encode(7, &call(&[16, 61]));
        assert_eq!(parse(&good), Ok((7, call(&[16, 61]))));
        for (bytes, word) in [
            (good[..good.len() - 1].to_vec(), "bytes follow"),
            ([&good[..], &[0]].concat(), "bytes follow"),
            (good[..20].to_vec(), "8 bytes expected"),
            (encode(7, &call(&[61, 16])), "follows"),
            (encode(7, &call(&[16, 16])), "follows"),
            (encode(7, &call(&[101])), "the request has 100"),
            (vec![], "1 bytes expected"),
            (vec![b'{'], "begins with"),
        ] {
            let refusal = parse(&bytes).expect_err(word);
            assert!(refusal.contains(word), "{refusal}");
        }
        let mut long = good.clone();
        long[25..29].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(parse(&long).is_err_and(|refusal| refusal.contains("limit")));
        let mut flag = good;
        flag[35] = 2;
        assert!(parse(&flag).is_err_and(|refusal| refusal.contains("0 or 1")));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic_and_a_parsed_call_encodes_to_the_same_bytes(
            mut bytes in proptest::collection::vec(any::<u8>(), 1..200),
        ) {
            bytes[0] = MATCH_KEYS;
            if let Ok((id, call)) = parse(&bytes) {
                prop_assert_eq!(encode(id, &call), bytes);
            }
        }

        #[test]
        fn encoded_calls_parse_to_the_same_call(
            id: u64,
            tokens in 0_u64..1_000_000,
            salt in ".{0,30}",
            adapter in proptest::option::of(".{0,30}"),
            lengths in proptest::collection::btree_set(0_u64..1_000_000, 0..20),
        ) {
            let keys = lengths.into_iter().filter(|length| *length <= tokens).map(|length| (length, Digest::sha256(&length.to_le_bytes())));
            let call = MatchKeys { tokens, computed: tokens / 2, salt, adapter, keys: keys.collect() };
            prop_assert_eq!(parse(&encode(id, &call)), Ok((id, call)));
        }
    }
}
