#![no_main]
//! A message of the engine protocol that parses is a message when it is said again, in JSON and in
//! binary form.

use libfuzzer_sys::fuzz_target;
use pfr_schema::engine::{Message, ToAgent, ToEngine, binary};
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
});
