//! The check of a token. Nothing in it is believed before its signature is proven, except for the
//! choice of issuer and key to prove it with.

use super::crypto;
use super::keys::KeySet;
use super::settings::{IssuerSettings, SignatureAlgorithm};
use jsonwebtoken::dangerous::insecure_decode_claims;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, Validation, decode, decode_header};
use pfr_client::text::one_line;
use pfr_schema::{AccessScope, Digest, DomainName};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Bytes of a token at most. Those of Kubernetes have about 1,200, with many groups 4,000.
pub const BYTES: usize = 16 << 10;
/// Characters of a subject in the log.
const SHOWN: usize = 200;

/// Why a token is refused. For the log: its sender does not learn it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Not a token.
    #[error("the token of an issuer is malformed")]
    Malformed,
    /// Too large.
    #[error("the token of an issuer is larger than 16 KiB")]
    TooLarge,
    /// An issuer that no setting names.
    #[error("no setting names the issuer of the token")]
    UnknownIssuer,
    /// A signature that is not accepted: none, one with a shared secret, one that the settings of
    /// the issuer leave out.
    #[error("the algorithm of the token's signature is not accepted")]
    Algorithm,
    /// A header that must be understood, and is not.
    #[error("the token has a critical header that is not known here")]
    Critical,
    /// A key that the issuer does not have.
    #[error("the token is signed by a key that its issuer does not have")]
    UnknownKey,
    /// The signature is wrong.
    #[error("the signature of the token is wrong")]
    Signature,
    /// It was valid.
    #[error("the token has expired")]
    Expired,
    /// It will be valid.
    #[error("the token is not valid yet")]
    Early,
    /// It is for others.
    #[error("the token is for another audience")]
    Audience,
    /// A claim that is missing, or has another type: `exp`, `nbf`, `iss`, `aud`, `sub`.
    #[error("the token lacks a claim that it must have, or has it in another form")]
    Claims,
    /// It is valid, and permits nothing here.
    #[error("the token is valid, and no rule of its issuer fits it")]
    NoRule,
}

/// Whether a text has the form of a token: three parts in the characters of base64url.
#[must_use]
pub fn looks_like(text: &str) -> bool {
    let legal = |part: &str| part.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    let mut parts = text.split('.');
    let three = (parts.next(), parts.next(), parts.next(), parts.next());
    // An unsigned one has an empty end, and is refused as what it is.
    matches!(three, (Some(head), Some(claims), Some(end), None) if [head, claims, end].into_iter().all(legal) && !head.is_empty() && !claims.is_empty())
}

/// A token that says where it comes from. It has no `Debug`, which would show it.
#[derive(Clone)]
pub struct Unverified<'a> {
    text: &'a str,
    algorithm: SignatureAlgorithm,
    key: Option<String>,
    issuer: String,
}

#[derive(Deserialize)]
struct Issued {
    iss: String,
}

/// Who a valid token is about, and what it permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// For logs: subject and issuer, on one line.
    pub name: String,
    /// The only domain that it is for; none for every domain.
    pub domain: Option<DomainName>,
    /// What it permits, at least one.
    pub scopes: Vec<AccessScope>,
}

impl<'a> Unverified<'a> {
    /// Reads what says how to check the token.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn parse(text: &'a str) -> Result<Self, Refusal> {
        if text.len() > BYTES {
            return Err(Refusal::TooLarge);
        }
        if !looks_like(text) {
            return Err(Refusal::Malformed);
        }
        // The library knows no algorithm `none`: such a header does not parse.
        let header = decode_header(text).map_err(|_| Refusal::Malformed)?;
        if header.crit.is_some() {
            return Err(Refusal::Critical);
        }
        let algorithm = match header.alg {
            Algorithm::RS256 => SignatureAlgorithm::Rs256,
            Algorithm::ES256 => SignatureAlgorithm::Es256,
            Algorithm::EdDSA => SignatureAlgorithm::EdDsa,
            _ => return Err(Refusal::Algorithm),
        };
        let Issued { iss } = insecure_decode_claims(text).map_err(|_| Refusal::Malformed)?;
        Ok(Self { text, algorithm, key: header.kid, issuer: iss })
    }

    /// The issuer that it names.
    #[must_use]
    pub fn issuer(&self) -> &str {
        &self.issuer
    }

    /// Proves it by the keys of its issuer, and finds what it permits.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn verify(&self, issuer: &IssuerSettings, keys: &KeySet) -> Result<Subject, Refusal> {
        crypto::install();
        if !issuer.algorithms.contains(&self.algorithm) {
            return Err(Refusal::Algorithm);
        }
        let mut validation = Validation::new(match self.algorithm {
            SignatureAlgorithm::Rs256 => Algorithm::RS256,
            SignatureAlgorithm::Es256 => Algorithm::ES256,
            SignatureAlgorithm::EdDsa => Algorithm::EdDSA,
        });
        validation.leeway = issuer.clock_skew_seconds;
        validation.validate_nbf = true;
        validation.set_audience(&issuer.audiences);
        validation.set_issuer(&[&issuer.issuer]);
        validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
        let mut refusal = Refusal::UnknownKey;
        for key in keys.find(self.key.as_deref(), self.algorithm) {
            match decode::<Map<String, Value>>(self.text, key, &validation) {
                Ok(token) => return permitted(issuer, &token.claims),
                Err(error) => refusal = Refusal::of(error.kind()),
            }
            if refusal != Refusal::Signature {
                break;
            }
        }
        Err(refusal)
    }
}

/// What the first rule that fits permits.
fn permitted(issuer: &IssuerSettings, claims: &Map<String, Value>) -> Result<Subject, Refusal> {
    let subject = claims.get("sub").and_then(Value::as_str).ok_or(Refusal::Claims)?;
    let rule = issuer.rules.iter().find(|rule| rule.fits(subject, claims)).ok_or(Refusal::NoRule)?;
    let name = format!("{} of {}", shown(subject), issuer.issuer);
    Ok(Subject { name, domain: rule.domain.clone(), scopes: rule.scopes.clone() })
}

/// A subject on one line. It is what the audit log and the limits on requests know a caller by, so
/// two that begin alike differ also where they are too long.
fn shown(subject: &str) -> String {
    let text = one_line(subject);
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…{}", &text[..end], Digest::sha256(subject.as_bytes()).short()),
        None => text,
    }
}

impl Refusal {
    fn of(kind: &ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidSignature | ErrorKind::InvalidAlgorithm => Self::Signature,
            ErrorKind::ExpiredSignature => Self::Expired,
            ErrorKind::ImmatureSignature => Self::Early,
            ErrorKind::InvalidAudience => Self::Audience,
            ErrorKind::InvalidIssuer => Self::UnknownIssuer,
            ErrorKind::MissingRequiredClaim(_) | ErrorKind::InvalidClaimFormat(_) => Self::Claims,
            _ => Self::Malformed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jwt::settings;
    use pfr_testkit::jwt::{Signer, claims, jwks};
    use proptest::prelude::*;
    use serde_json::json;

    const ISSUER: &str = "https://issuer.example";

    fn issuer(more: &str) -> IssuerSettings {
        let text = format!(
            "[[issuers]]\nissuer = {ISSUER:?}\naudiences = [\"pf\"]\njwks-file = \"-\"\n{more}\n\
             [[issuers.rules]]\nsubject = \"*\"\nscopes = [\"*:pull\"]\n"
        );
        settings::parse(&text).unwrap().remove(0)
    }

    fn keys(signers: &[&Signer]) -> KeySet {
        KeySet::parse(jwks(signers).as_bytes()).unwrap()
    }

    fn check(token: &str, issuer: &IssuerSettings, keys: &KeySet) -> Result<Subject, Refusal> {
        Unverified::parse(token)?.verify(issuer, keys)
    }

    #[test]
    fn the_log_learns_the_reason() {
        let (signer, other) = (Signer::es256("k"), Signer::eddsa("k"));
        let (issuer, keys) = (issuer("algorithms = [\"ES256\"]"), keys(&[&signer, &other]));
        let good = claims(ISSUER, "pf", "me");
        let with = |name: &str, value: Value| {
            let mut claims = good.clone();
            claims[name] = value;
            signer.token(&claims)
        };
        assert_eq!(check(&signer.token(&good), &issuer, &keys).unwrap().name, "me of https://issuer.example");
        // A token that does not name its key has it all the same if there is one that fits.
        assert!(check(&signer.token_with(&json!({"alg": "ES256"}), &good), &issuer, &keys).is_ok());
        for (token, reason) in [
            (with("exp", json!(1)), Refusal::Expired),
            (with("nbf", json!(u64::MAX / 2)), Refusal::Early),
            (with("aud", json!("x")), Refusal::Audience),
            (with("sub", json!(null)), Refusal::Claims),
            (with("exp", json!("x")), Refusal::Claims),
            (other.token(&good), Refusal::Algorithm),
            (Signer::es256("k").token(&good), Refusal::Signature),
            (Signer::es256("x").token(&good), Refusal::UnknownKey),
            (signer.token_with(&json!({"alg": "ES256", "kid": "k", "crit": []}), &good), Refusal::Critical),
            (signer.token_with(&json!({"alg": "none"}), &good), Refusal::Malformed),
            (signer.token_with(&json!({"alg": "HS256"}), &good), Refusal::Algorithm),
            ("a.b".to_owned(), Refusal::Malformed),
            ("a.b.".to_owned() + &"c".repeat(BYTES), Refusal::TooLarge),
        ] {
            assert_eq!(check(&token, &issuer, &keys), Err(reason), "{reason}");
        }
    }

    #[test]
    fn a_name_in_the_log_is_one_short_line() {
        let signer = Signer::eddsa("k");
        let name = |subject: &str| check(&signer.token(&claims(ISSUER, "pf", subject)), &issuer(""), &keys(&[&signer])).unwrap().name;
        let subject = format!("a\nb\u{1b}[1m\u{202e}{}", "x".repeat(1000));
        let long = name(&subject);
        assert!(long.starts_with("a\\u{a}b\\u{1b}[1m\\u{202e}xxx") && long.chars().count() < 250, "{long}");
        assert_ne!(name(&format!("{subject}x")), long, "another subject has another name");
        assert_eq!(name("repo:acme/agents:ref:refs/heads/main"), format!("repo:acme/agents:ref:refs/heads/main of {ISSUER}"));
    }

    proptest! {
        #[test]
        fn no_text_is_a_panic_or_a_valid_token(text in "\\PC*", header in "\\PC{0,80}", claims in "\\PC{0,200}") {
            use base64::Engine as _;
            use base64::engine::general_purpose::URL_SAFE_NO_PAD;
            let (issuer, keys) = (issuer(""), keys(&[&Signer::rs256("k")]));
            let encoded = format!("{}.{}.AAAA", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims));
            prop_assert!(check(&text, &issuer, &keys).is_err() && check(&encoded, &issuer, &keys).is_err());
        }

        #[test]
        fn no_changed_token_is_valid(at in any::<prop::sample::Index>(), byte in proptest::char::range('!', '~')) {
            let signer = Signer::rs256("k");
            let (issuer, keys) = (issuer(""), keys(&[&signer]));
            let good = signer.token(&claims(ISSUER, "pf", "me"));
            let at = at.index(good.len());
            let changed = format!("{}{byte}{}", &good[..at], &good[at + 1..]);
            prop_assert_eq!(check(&changed, &issuer, &keys).is_ok(), changed == good);
        }

        #[test]
        fn no_bytes_are_a_panic_in_a_key_set(bytes in prop::collection::vec(any::<u8>(), 0..200), n in "\\PC{0,40}", e in "\\PC{0,8}") {
            let _ = KeySet::parse(&bytes);
            // Numbers that are none, or small ones: a signature by such a key is wrong.
            let document = json!({"keys": [{"kty": "RSA", "n": n, "e": e}, {"kty": "OKP", "crv": "Ed25519", "x": n}, {"kty": "EC", "crv": "P-256", "x": n, "y": e}]});
            if let Ok(keys) = KeySet::parse(document.to_string().as_bytes()) {
                for signer in [Signer::rs256("k"), Signer::es256("k"), Signer::eddsa("k")] {
                    let token = signer.token_with(&json!({"alg": signer.algorithm()}), &claims(ISSUER, "pf", "me"));
                    prop_assert!(check(&token, &issuer(""), &keys).is_err());
                }
            }
        }
    }
}
