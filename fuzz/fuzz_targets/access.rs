#![no_main]
//! Access tokens, scopes, tokens of issuers and their key sets: no input causes a panic, and only a
//! token that the issuer's key has signed is accepted.

use libfuzzer_sys::fuzz_target;
use pfr_registry::jwt::keys::KeySet;
use pfr_registry::jwt::settings::{self, IssuerSettings};
use pfr_registry::jwt::token::Unverified;
use pfr_schema::{AccessScope, AccessToken};
use std::sync::LazyLock;

/// A key that signed nothing here: the example of RFC 8037, appendix A.
const KEYS: &str = r#"{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}"#;

static ISSUER: LazyLock<IssuerSettings> = LazyLock::new(|| {
    let file = "[[issuers]]\nissuer = 'a'\naudiences = ['b']\njwks-file = 'c'\n[[issuers.rules]]\nsubject = '*'\nscopes = ['*:pull']\n";
    settings::parse(file).expect("a file").remove(0)
});
static OURS: LazyLock<KeySet> = LazyLock::new(|| KeySet::parse(KEYS.as_bytes()).expect("a key"));

fuzz_target!(|text: &str| {
    if let Ok(token) = AccessToken::parse(text) {
        assert_eq!(token.expose(), text);
    }
    if let Ok(scope) = text.parse::<AccessScope>() {
        assert_eq!(scope.to_string().parse::<AccessScope>().expect("a printed scope parses"), scope);
    }
    let _ = settings::parse(text);
    if let Ok(keys) = KeySet::parse(text.as_bytes()) {
        assert!(!keys.is_empty() && keys.len() <= 100);
    }
    if let Ok(token) = Unverified::parse(text) {
        assert!(token.verify(&ISSUER, &OURS).is_err());
    }
    // Arbitrary text is rarely a token with three parts. So the text is also used as the content of
    // the first two parts.
    let mut parts = text.splitn(2, '\n');
    let encoded = |part: Option<&str>| base64url(part.unwrap_or_default().as_bytes());
    let token = format!("{}.{}.AAAA", encoded(parts.next()), encoded(parts.next()));
    if let Ok(token) = Unverified::parse(&token) {
        assert!(token.verify(&ISSUER, &OURS).is_err());
    }
});

fn base64url(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let number = three.iter().fold(0_u32, |number, byte| number << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        text.extend((0..=three.len()).map(|at| DIGITS[(number >> (18 - 6 * at) & 63) as usize] as char));
    }
    text
}
