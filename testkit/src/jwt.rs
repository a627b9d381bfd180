//! Issuers of tokens (JWT): their keys, as JWKS, and tokens signed by them.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use ring::rand::SystemRandom;
use ring::rsa::{KeyPairComponents, PublicKeyComponents};
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RSA_PKCS1_SHA256, RsaKeyPair};
use ring::{hmac, rand};
use serde_json::{Value, json};

/// The key of the example in RFC 7515, appendix A.2: ring does not make RSA keys. Its primes and
/// what follows from them are `p`, `q`, `dp`, `dq` and `qi`.
const N: &str = "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-yRT-SFd2lZS-pCgNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2CapHg665xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5IhlJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRWyuXpoQ";
const E: &str = "AQAB";
const D: &str = "Eq5xpGnNCivDflJsRQBXHx1hdR1k6Ulwe2JZD50LpXyWPEAeP88vLNO97IjlA7_GQ5sLKMgvfTeXZx9SE-7YwVol2NXOoAJe46sui395IW_GO-pWJ1O0BkTGoVEn2bKVRUCgu-GjBVaYLU6f3l9kJfFNS3E0QbVdxzubSu3Mkqzjkn439X0M_V51gfpRLI9JYanrC4D4qAdGcopV_0ZHHzQlBjudU2QvXt4ehNYTCBr6XCLQUShb1juUO1ZdiYoFaFQT5Tw8bGUl_x_jTj3ccPDVZFD9pIuhLhBOneufuBiB4cS98l2SR_RQyGWSeWjnczT0QU91p1DhOVRuOopznQ";
const P: &str = "4BzEEOtIpmVdVEZNCqS7baC4crd0pqnRH_5IB3jw3bcxGn6QLvnEtfdUdiYrqBdss1l58BQ3KhooKeQTa9AB0Hw_Py5PJdTJNPY8cQn7ouZ2KKDcmnPGBY5t7yLc1QlQ5xHdwW1VhvKn-nXqhJTBgIPgtldC-KDV5z-y2XDwGUc";
const Q: &str = "uQPEfgmVtjL0Uyyx88GZFF1fOunH3-7cepKmtH4pxhtCoHqpWmT8YAmZxaewHgHAjLYsp1ZSe7zFYHj7C6ul7TjeLQeZD_YwD66t62wDmpe_HlB-TnBA-njbglfIsRLtXlnDzQkv5dTltRJ11BKBBypeeF6689rjcJIDEz9RWdc";
const DP: &str = "BwKfV3Akq5_MFZDFZCnW-wzl-CCo83WoZvnLQwCTeDv8uzluRSnm71I3QCLdhrqE2e9YkxvuxdBfpT_PI7Yz-FOKnu1R6HsJeDCjn12Sk3vmAktV2zb34MCdy7cpdTh_YVr7tss2u6vneTwrA86rZtu5Mbr1C1XsmvkxHQAdYo0";
const DQ: &str = "h_96-mK1R_7glhsum81dZxjTnYynPbZpHziZjeeHcXYsXaaMwkOlODsWa7I9xXDoRwbKgB719rrmI2oKr6N3Do9U0ajaHF-NKJnwgjMd2w9cjz3_-kyNlxAr2v4IKhGNpmM5iIgOS1VZnOZ68m6_pbLBSp3nssTdlqvd0tIiTHU";
const QI: &str = "IYd7DHOhrWvxkwPQsRM2tOgrjbcrfvtQJipd-DlcxyVuuM9sQLdgjVk2oy26F0EmpScGLq2MowX7fhd_QJQ3ydy5cY7YIBi87w93IKLEdfnbJtoOPLUW0ITrJReOgo1cq9SbsxYawBgfp_gh6A5603k2-ZQwVK0JKSHuLFkuQ3U";

/// A key of an issuer.
pub struct Signer {
    id: String,
    key: Key,
}

enum Key {
    Rsa(Box<RsaKeyPair>),
    Ec(EcdsaKeyPair),
    Ed(Ed25519KeyPair),
}

impl Signer {
    /// The RSA key; every test has the same.
    #[must_use]
    pub fn rs256(id: &str) -> Self {
        let [n, e, d, p, q, dp, dq, qi] = [N, E, D, P, Q, DP, DQ, QI].map(|text| BASE64.decode(text).unwrap());
        let components = KeyPairComponents { public_key: PublicKeyComponents { n, e }, d, p, q, dP: dp, dQ: dq, qInv: qi };
        Self { id: id.into(), key: Key::Rsa(Box::new(RsaKeyPair::from_components(&components).unwrap())) }
    }

    /// A new ECDSA key on the curve P-256.
    #[must_use]
    pub fn es256(id: &str) -> Self {
        let random = SystemRandom::new();
        let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, document.as_ref(), &random).unwrap();
        Self { id: id.into(), key: Key::Ec(key) }
    }

    /// A new Ed25519 key.
    #[must_use]
    pub fn eddsa(id: &str) -> Self {
        let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        Self { id: id.into(), key: Key::Ed(Ed25519KeyPair::from_pkcs8(document.as_ref()).unwrap()) }
    }

    /// The name of its algorithm.
    #[must_use]
    pub fn algorithm(&self) -> &'static str {
        match self.key {
            Key::Rsa(_) => "RS256",
            Key::Ec(_) => "ES256",
            Key::Ed(_) => "EdDSA",
        }
    }

    /// Its public part.
    #[must_use]
    pub fn jwk(&self) -> Value {
        let mut jwk = match &self.key {
            Key::Rsa(_) => json!({"kty": "RSA", "n": N, "e": E}),
            Key::Ec(key) => {
                // 4, x and y.
                let (x, y) = key.public_key().as_ref()[1..].split_at(32);
                json!({"kty": "EC", "crv": "P-256", "x": BASE64.encode(x), "y": BASE64.encode(y)})
            }
            Key::Ed(key) => json!({"kty": "OKP", "crv": "Ed25519", "x": BASE64.encode(key.public_key().as_ref())}),
        };
        jwk["kid"] = self.id.clone().into();
        jwk["alg"] = self.algorithm().into();
        jwk["use"] = "sig".into();
        jwk
    }

    /// A token with these claims.
    #[must_use]
    pub fn token(&self, claims: &Value) -> String {
        self.token_with(&json!({"alg": self.algorithm(), "typ": "JWT", "kid": self.id}), claims)
    }

    /// A token with this header, whatever it says.
    #[must_use]
    pub fn token_with(&self, header: &Value, claims: &Value) -> String {
        let message = message(header, claims);
        let random = SystemRandom::new();
        let signature = match &self.key {
            Key::Rsa(key) => {
                let mut signature = vec![0; key.public().modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &random, message.as_bytes(), &mut signature).unwrap();
                signature
            }
            Key::Ec(key) => key.sign(&random, message.as_bytes()).unwrap().as_ref().to_vec(),
            Key::Ed(key) => key.sign(message.as_bytes()).as_ref().to_vec(),
        };
        format!("{message}.{}", BASE64.encode(signature))
    }
}

/// A set of keys, as an issuer publishes it.
#[must_use]
pub fn jwks(signers: &[&Signer]) -> String {
    json!({"keys": signers.iter().map(|signer| signer.jwk()).collect::<Vec<_>>()}).to_string()
}

/// The claims of a token that is valid for an hour from now.
#[must_use]
pub fn claims(issuer: &str, audience: &str, subject: &str) -> Value {
    let now = now();
    json!({"iss": issuer, "aud": [audience], "sub": subject, "iat": now, "nbf": now, "exp": now + 3600})
}

/// Seconds since 1970.
#[must_use]
pub fn now() -> u64 {
    std::time::UNIX_EPOCH.elapsed().unwrap().as_secs()
}

/// A token without a signature.
#[must_use]
pub fn unsigned(header: &Value, claims: &Value) -> String {
    format!("{}.", message(header, claims))
}

/// A token that is signed by a shared secret.
#[must_use]
pub fn hs256(secret: &[u8], header: &Value, claims: &Value) -> String {
    let message = message(header, claims);
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), message.as_bytes());
    format!("{message}.{}", BASE64.encode(tag))
}

/// Random bytes, in the characters of a token.
#[must_use]
pub fn noise(bytes: usize) -> String {
    let mut noise = vec![0; bytes];
    rand::SecureRandom::fill(&SystemRandom::new(), &mut noise).unwrap();
    BASE64.encode(noise)
}

fn message(header: &Value, claims: &Value) -> String {
    format!("{}.{}", BASE64.encode(header.to_string()), BASE64.encode(claims.to_string()))
}
