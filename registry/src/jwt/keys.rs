//! Sets of public keys (JWKS, RFC 7517).

use super::settings::SignatureAlgorithm;
use jsonwebtoken::DecodingKey;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, KeyOperations, PublicKeyUse};
use pfr_schema::json;
use serde::Deserialize;
use serde_json::Value;

/// Bytes of a set at most.
pub(crate) const BYTES: usize = 256 << 10;
/// Keys of a set at most.
const KEYS: usize = 100;
/// Keys that are tried at most, if several have one id.
const TRIED: usize = 4;

/// The public keys of an issuer.
#[derive(Clone, Debug, Default)]
pub struct KeySet(Vec<Key>);

/// A key, and the one algorithm that it is used with.
#[derive(Clone, Debug)]
struct Key {
    id: Option<String>,
    algorithm: SignatureAlgorithm,
    key: DecodingKey,
}

#[derive(Deserialize)]
struct Document {
    keys: Vec<Value>,
}

impl KeySet {
    /// Reads a set. Keys for other purposes or algorithms are left out, as the standard asks.
    ///
    /// # Errors
    /// What is wrong with it; also that no key is left.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let Document { keys } = json::parse("key set", bytes, BYTES as u64).map_err(|error| error.to_string())?;
        if keys.len() > KEYS {
            return Err(format!("key set: at most {KEYS} keys, found {}", keys.len()));
        }
        let found = keys.len();
        let keys: Vec<Key> = keys.into_iter().filter_map(|key| serde_json::from_value(key).ok()).filter_map(|jwk| Key::of(&jwk)).collect();
        if keys.is_empty() {
            return Err(format!("key set: of {found} keys, none is a public key for RS256, ES256 or EdDSA signatures"));
        }
        Ok(Self(keys))
    }

    /// How many keys it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it has none. A set that was read has some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The keys that may have made a signature. A token that names no key is taken only if there is
    /// no choice.
    pub(super) fn find(&self, id: Option<&str>, algorithm: SignatureAlgorithm) -> Vec<&DecodingKey> {
        let fit = self.0.iter().filter(|key| key.algorithm == algorithm && (id.is_none() || key.id.as_deref() == id));
        let found: Vec<&DecodingKey> = fit.map(|key| &key.key).take(TRIED).collect();
        if id.is_none() && found.len() > 1 { Vec::new() } else { found }
    }
}

impl Key {
    fn of(jwk: &Jwk) -> Option<Self> {
        let (algorithm, named) = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => (SignatureAlgorithm::Rs256, KeyAlgorithm::RS256),
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => (SignatureAlgorithm::Es256, KeyAlgorithm::ES256),
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
                (SignatureAlgorithm::EdDsa, KeyAlgorithm::EdDSA)
            }
            _ => return None,
        };
        let common = &jwk.common;
        let is_for_signatures = common.public_key_use.as_ref().is_none_or(|r#use| *r#use == PublicKeyUse::Signature)
            && common.key_operations.as_ref().is_none_or(|operations| operations.contains(&KeyOperations::Verify));
        if !is_for_signatures || common.key_algorithm.is_some_and(|other| other != named) {
            return None;
        }
        Some(Self { id: common.key_id.clone(), algorithm, key: DecodingKey::from_jwk(jwk).ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_testkit::jwt::{Signer, jwks};
    use serde_json::json;

    fn parsed(keys: Value) -> Result<KeySet, String> {
        KeySet::parse(json!({"keys": keys}).to_string().as_bytes())
    }

    #[test]
    fn keys_are_found_by_id_and_algorithm() {
        let (rsa, ec, ed) = (Signer::rs256("a"), Signer::es256("b"), Signer::eddsa("b"));
        let keys = KeySet::parse(jwks(&[&rsa, &ec, &ed]).as_bytes()).unwrap();
        assert_eq!(keys.len(), 3);
        let found = |id, algorithm| keys.find(id, algorithm).len();
        assert_eq!((found(Some("a"), SignatureAlgorithm::Rs256), found(Some("a"), SignatureAlgorithm::Es256)), (1, 0));
        assert_eq!((found(Some("b"), SignatureAlgorithm::Es256), found(Some("b"), SignatureAlgorithm::EdDsa)), (1, 1));
        assert_eq!((found(Some("c"), SignatureAlgorithm::Rs256), found(None, SignatureAlgorithm::Rs256)), (0, 1));
        let two = KeySet::parse(jwks(&[&ec, &Signer::es256("c")]).as_bytes()).unwrap();
        assert!(two.find(None, SignatureAlgorithm::Es256).is_empty(), "there is a choice");
    }

    #[test]
    fn only_public_keys_for_our_signatures_count() {
        let changed = |name: &str, value: Value| {
            let mut jwk = Signer::rs256("a").jwk();
            jwk[name] = value;
            parsed(json!([jwk]))
        };
        assert!(changed("use", Value::Null).is_ok() && changed("alg", Value::Null).is_ok() && changed("kid", Value::Null).is_ok());
        for (name, value) in
            [("use", json!("enc")), ("alg", json!("RS512")), ("alg", json!("HS256")), ("key_ops", json!(["sign"])), ("n", json!(7))]
        {
            assert!(changed(name, value.clone()).unwrap_err().contains("none is a public key"), "{name} {value}");
        }
        let mut ec = Signer::es256("a").jwk();
        ec["crv"] = "P-384".into();
        for key in [json!({"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}), ec, json!({}), json!(null), json!("x")] {
            assert!(parsed(json!([key.clone()])).is_err(), "{key}");
            // One that is not understood does not keep the others out.
            assert_eq!(parsed(json!([key, Signer::eddsa("b").jwk()])).unwrap().len(), 1);
        }
    }

    #[test]
    fn a_set_has_limits() {
        let key = Signer::eddsa("a").jwk();
        assert_eq!(parsed(json!(vec![&key; KEYS])).unwrap().len(), KEYS);
        assert!(parsed(json!(vec![&key; KEYS + 1])).unwrap_err().contains("at most 100"));
        for bytes in [&b""[..], b"[]", b"{}", b"{\"keys\": {}}", b"{\"keys\": []}", &[b' '; BYTES + 1]] {
            assert!(KeySet::parse(bytes).is_err());
        }
    }
}
