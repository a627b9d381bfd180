#![no_main]
//! Payloads, manifests and keys of signatures: whatever is sent, nothing panics, and nothing is
//! signed by a key that did not sign it.

use libfuzzer_sys::fuzz_target;
use pfr_schema::api::{NewSignature, Signature, SigningPolicies};
use pfr_schema::signature::{self, Payload, PublicKey};
use pfr_schema::{Digest, Limits, Tag};
use pfr_store::{PrivateKey, signer};
use std::sync::LazyLock;

/// A key that signed nothing here: the example of RFC 8410, section 10.
const KEY: &str = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n";

static KEYS: LazyLock<Vec<PublicKey>> = LazyLock::new(|| PublicKey::parse_all(KEY).expect("a key"));

fuzz_target!(|text: &str| {
    // Printed it may be a little longer, and there is a limit.
    if let Ok(payload) = Payload::parse(text)
        && text.len() < 32 << 10
    {
        assert_eq!(Payload::parse(&payload.to_text()).as_ref(), Ok(&payload));
        let signed = Signature::from(NewSignature::new(text.to_owned(), &[1; 64]));
        assert!(signer(&signed, &payload.snapshot, &KEYS).is_none());
    }
    if let Ok(layers) = signature::layers(text.as_bytes(), &Limits::default()) {
        assert!(layers.len() <= signature::MOST);
        let (manifest, _) = signature::manifest(Digest::sha256(b""), 0, &layers);
        assert_eq!(signature::layers(&manifest, &Limits::default()).expect("what was written"), layers);
        assert!(layers.iter().filter_map(signature::Layer::signature).all(|text| signature::decode(text).is_ok()));
    }
    if let Ok(keys) = PublicKey::parse_all(text) {
        let printed: String = keys.iter().map(ToString::to_string).collect();
        assert_eq!(PublicKey::parse_all(&printed).expect("prints what parses"), keys);
    }
    let _ = PrivateKey::parse(text);
    if let Ok(policies) = serde_json::from_str::<SigningPolicies>(text) {
        let _ = policies.check();
    }
    if let Ok(tag) = text.parse::<Tag>()
        && let Some(snapshot) = signature::signed_by(&tag)
    {
        assert!(signature::is_companion(&tag));
        assert_eq!(signature::tag_of(&snapshot), Some(tag));
    }
});
