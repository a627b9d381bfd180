#![no_main]
//! A message of the engine protocol that parses is a message when it is said again: in JSON, in
//! binary form, and with packed tokens, which go where its JSON has none.

use libfuzzer_sys::fuzz_target;
use pfr_schema::engine::{Message, ToAgent, ToEngine, binary, packed};
use serde::{Serialize, de::DeserializeOwned};

fn again<C: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let Ok(message) = serde_json::from_slice::<Message<C>>(bytes) else { return };
    let said = serde_json::to_vec(&message).expect("messages are JSON");
    serde_json::from_slice::<Message<C>>(&said).expect("what was said parses");
}

fuzz_target!(|bytes: &[u8]| {
    again::<ToAgent>(bytes);
    again::<ToEngine>(bytes);
    if let Ok((id, call)) = binary::parse(bytes) {
        assert_eq!(binary::encode(id, &call), bytes, "one call, one encoding");
    }
    if let Ok((json, tokens)) = packed::split(bytes) {
        assert_eq!(packed::encode(json, &tokens), bytes, "one message, one encoding");
        if let Ok(mut call) = serde_json::from_slice::<ToAgent>(json)
            && packed::unpack_call(&mut call, tokens.clone()).is_ok()
        {
            let refused = packed::unpack_call(&mut call, tokens.clone()).is_err();
            assert!(refused || tokens.is_empty(), "tokens come once");
        }
        if let Ok(mut answer) = serde_json::from_slice::<Message<ToEngine>>(json) {
            let _ = packed::unpack_answer(&mut answer, tokens);
        }
    }
});
