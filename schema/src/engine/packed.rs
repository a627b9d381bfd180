//! Messages with many tokens, packed. An engine has tokens as numbers. To make JSON of 380,000 of
//! them takes a connector tens of milliseconds, and no other thread of the engine runs meanwhile
//! (docs/performance.md).
//!
//! ```text
//! u8 2 | u32 bytes | so many bytes of JSON | the tokens to the end, u32 each     little-endian
//! ```
//!
//! The first byte tells it from JSON, which begins with `{`. The JSON is the message with
//! `"tokens":[]`. The calls `match` and `find` (in its `request`) may be sent like this, and the
//! answer to `hold`. They may also be sent in JSON alone.

use super::{Message, ToAgent, ToEngine};
use serde_json::Value;

/// First byte of a message in this form.
pub const PACKED: u8 = 2;

/// The body of a message of its JSON and its tokens.
#[must_use]
pub fn encode(json: &[u8], tokens: &[u32]) -> Vec<u8> {
    let mut body = Vec::with_capacity(5 + json.len() + 4 * tokens.len());
    body.push(PACKED);
    body.extend((json.len() as u32).to_le_bytes());
    body.extend(json);
    body.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    body
}

/// Splits a body, its first byte included, into JSON and tokens.
///
/// # Errors
/// In words, what is wrong. Allocates no more than the body.
pub fn split(body: &[u8]) -> Result<(&[u8], Vec<u32>), String> {
    let (head, rest) = body.split_first_chunk::<5>().ok_or_else(|| format!("5 bytes expected, found {}", body.len()))?;
    let [kind, length @ ..] = *head;
    if kind != PACKED {
        return Err(format!("a message with packed tokens begins with {PACKED}"));
    }
    let length = u32::from_le_bytes(length) as usize;
    let (json, tokens) =
        rest.split_at_checked(length).ok_or_else(|| format!("{length} bytes of JSON are announced, {} follow", rest.len()))?;
    let (tokens, []) = tokens.as_chunks::<4>() else {
        return Err(format!("a token has 4 bytes, {} bytes follow", tokens.len()));
    };
    Ok((json, tokens.iter().map(|token| u32::from_le_bytes(*token)).collect()))
}

/// Gives a call its tokens.
///
/// # Errors
/// The call has no tokens, or had some.
pub fn unpack_call(call: &mut ToAgent, tokens: Vec<u32>) -> Result<(), String> {
    let place = match call {
        ToAgent::Match(request) => Some(&mut request.tokens),
        ToAgent::Find(find) => find.request.as_mut().map(|request| &mut request.tokens),
        _ => None,
    };
    let place = place.ok_or("this call has no tokens")?;
    if !place.is_empty() {
        return Err("tokens are in the JSON, and packed too".into());
    }
    *place = tokens;
    Ok(())
}

/// Gives an answer its tokens.
///
/// # Errors
/// It is no answer with tokens, or had some.
pub fn unpack_answer(answer: &mut Message<ToEngine>, tokens: Vec<u32>) -> Result<(), String> {
    let Message::Ok { ok, .. } = answer else { return Err("this answer has no tokens".into()) };
    match ok.get_mut("tokens") {
        Some(Value::Array(place)) if place.is_empty() => {
            place.extend(tokens.into_iter().map(Value::from));
            Ok(())
        }
        Some(_) => Err("tokens are in the JSON, and packed too".into()),
        None => Err("this answer has no tokens".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Find, Match, MatchKeys, Sequence};
    use super::*;
    use proptest::prelude::*;

    fn call(json: &str) -> ToAgent {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn the_bytes_are_those_of_the_connectors() {
        // The unit tests of the connectors have the same bytes.
        let json = br#"{"id":7,"call":"match","args":{"tokens":[],"salt":""}}"#;
        let head = [&[2, json.len() as u8, 0, 0, 0][..], json].concat();
        let body = [&head[..], &[1, 0, 0, 0, 0, 81, 2, 0]].concat();
        assert_eq!(encode(json, &[1, 151_808]), body);
        assert_eq!(split(&body), Ok((&json[..], vec![1, 151_808])));
        assert_eq!(split(&head), Ok((&json[..], vec![])));
    }

    #[test]
    fn malformed_bodies_are_refused_with_the_reason() {
        let good = encode(b"{}", &[1, 2]);
        for (bytes, word) in [
            (vec![], "5 bytes expected, found 0"),
            (good[..4].to_vec(), "5 bytes expected, found 4"),
            (good[..6].to_vec(), "2 bytes of JSON are announced, 1 follow"),
            (good[..good.len() - 1].to_vec(), "7 bytes follow"),
            ([&[1], &good[1..]].concat(), "begins with 2"),
            (vec![PACKED, 255, 255, 255, 255, b'{', b'}'], "4294967295 bytes of JSON are announced, 2 follow"),
        ] {
            let refusal = split(&bytes).expect_err(word);
            assert!(refusal.contains(word), "{refusal}");
        }
    }

    #[test]
    fn tokens_go_where_a_message_has_none() {
        let (mut asked, tokens) = (call(r#"{"call":"match","args":{"tokens":[]}}"#), vec![1, 2]);
        assert_eq!(unpack_call(&mut asked, tokens.clone()), Ok(()));
        assert_eq!(asked, ToAgent::Match(Match { tokens: tokens.clone(), ..Match::default() }));
        assert!(unpack_call(&mut asked, tokens.clone()).is_err_and(|why| why.contains("too")));
        let mut find = call(r#"{"call":"find","args":{"name":"f","request":{"tokens":[]}}}"#);
        assert_eq!(unpack_call(&mut find, tokens.clone()), Ok(()));
        let request = Some(Match { tokens: tokens.clone(), ..Match::default() });
        assert_eq!(find, ToAgent::Find(Find { name: "f".into(), request, ..Find::default() }));
        let nameless = ToAgent::Find(Find { name: "f".into(), ..Find::default() });
        for mut without in [nameless, ToAgent::MatchKeys(MatchKeys::default())] {
            assert!(unpack_call(&mut without, tokens.clone()).is_err_and(|why| why.contains("no tokens")));
        }
        let sequence = Sequence { id: "s".into(), ..Sequence::default() };
        let mut answer = Message::Ok { id: 1, ok: serde_json::to_value(&sequence).unwrap() };
        assert_eq!(unpack_answer(&mut answer, tokens.clone()), Ok(()));
        assert!(unpack_answer(&mut answer, tokens.clone()).is_err_and(|why| why.contains("too")));
        let Message::Ok { ok, .. } = answer else { panic!("an answer") };
        assert_eq!(serde_json::from_value::<Sequence>(ok).unwrap(), Sequence { tokens: tokens.clone(), ..sequence });
        let mut empty = Message::Ok { id: 1, ok: serde_json::json!({}) };
        assert!(unpack_answer(&mut empty, tokens).is_err_and(|why| why.contains("no tokens")));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic_and_what_it_splits_encodes_to_the_same_bytes(
            announced in 0_u8..40,
            rest in proptest::collection::vec(any::<u8>(), 0..80),
        ) {
            let body = [&[PACKED, announced, 0, 0, 0][..], &rest].concat();
            match split(&body) {
                Ok((json, tokens)) => prop_assert_eq!(encode(json, &tokens), body),
                Err(_) => prop_assert!(rest.len() < announced.into() || (rest.len() - usize::from(announced)) % 4 != 0),
            }
        }

        #[test]
        fn a_packed_call_is_the_call_in_json(
            tokens in proptest::collection::vec(any::<u32>(), 0..50),
            salt in ".{0,30}",
            adapter in proptest::option::of(".{0,30}"),
            computed: u64,
        ) {
            let whole = ToAgent::Match(Match { tokens: tokens.clone(), computed, salt, adapter, of: None });
            let mut empty = whole.clone();
            if let ToAgent::Match(request) = &mut empty {
                request.tokens.clear();
            }
            let json = serde_json::to_vec(&empty).unwrap();
            let body = encode(&json, &tokens);
            let (json, found) = split(&body).unwrap();
            let mut call: ToAgent = serde_json::from_slice(json).unwrap();
            prop_assert_eq!(unpack_call(&mut call, found), Ok(()));
            prop_assert_eq!(call, whole);
        }
    }
}
