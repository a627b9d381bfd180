//! Keys of ed25519, by ring: what TLS uses here already.

use crate::error::{Error, Result};
use pfr_schema::api::{NewSignature, Signature};
use pfr_schema::signature::{self, Payload, PublicKey};
use pfr_schema::{Digest, FormatError, RepositoryName};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use std::fmt;

/// A key that signs.
pub struct PrivateKey(Ed25519KeyPair);

impl PrivateKey {
    /// A new key, and its text in PEM, which is all that can bring it back.
    ///
    /// # Errors
    /// [`Error::Internal`] if the system gives no random bytes.
    pub fn generate() -> Result<(Self, String)> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|e| Error::Internal(format!("the system gives no random bytes: {e}")))?;
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed).map_err(|e| Error::Internal(format!("a seed is no key: {e}")))?;
        Ok((Self(pair), signature::private_key_pem(&seed)))
    }

    /// Reads a key: PKCS#8 in PEM, without a passphrase, as openssl and [`Self::generate`] write
    /// it.
    ///
    /// # Errors
    /// [`Error::Format`], [`Error::Invalid`] for a key of another kind. Neither shows any of it.
    pub fn parse(pem: &str) -> Result<Self> {
        let der = signature::private_key_der(pem)?;
        let other = |_| Error::Invalid("the private key is not one of ed25519; `openssl genpkey -algorithm ed25519` makes one".into());
        Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der).map(Self).map_err(other)
    }

    /// The key that checks its signatures.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        let bytes = self.0.public_key().as_ref();
        PublicKey::new(bytes.try_into().unwrap_or_else(|_| unreachable!("a public key of ed25519 has 32 bytes")))
    }

    /// Signs a snapshot, for a repository. `now` is in milliseconds since 1970.
    #[must_use]
    pub fn sign(&self, snapshot: Digest, repository: &RepositoryName, now: u64) -> NewSignature {
        let payload = Payload::new(snapshot, repository, &self.public(), now / 1000).to_text();
        let signature = self.0.sign(payload.as_bytes());
        NewSignature::new(payload, signature.as_ref())
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateKey(of {:?})", self.public())
    }
}

/// The first of these keys that has signed this snapshot; what the payload says of the key does not
/// count.
#[must_use]
pub fn signer<'a>(signature: &Signature, snapshot: &Digest, keys: &'a [PublicKey]) -> Option<&'a PublicKey> {
    let checked = |signature: &Signature| -> std::result::Result<Vec<u8>, FormatError> {
        let bytes = signature::decode(&signature.signature)?;
        NewSignature::from(signature.clone()).check(snapshot).map(|()| bytes)
    };
    let bytes = checked(signature).ok()?;
    keys.iter().find(|key| UnparsedPublicKey::new(&ED25519, key.as_bytes()).verify(signature.payload.as_bytes(), &bytes).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_good_for_its_key_its_snapshot_and_its_bytes_only() {
        let (key, pem) = PrivateKey::generate().expect("a key");
        let (other, _) = PrivateKey::generate().expect("another");
        let read = PrivateKey::parse(&pem).expect("what was written");
        assert_eq!(read.public(), key.public());
        assert!(!format!("{key:?}").contains(pem.lines().nth(1).expect("three lines")));
        let (snapshot, repository) = (Digest::sha256(b"manifest"), "team/agent".parse().expect("a name"));
        let good = Signature::from(read.sign(snapshot, &repository, 1_700_000_000_000));
        assert_eq!(good.signed_at, Some(1_700_000_000_000));
        let keys = [other.public(), key.public()];
        assert_eq!(signer(&good, &snapshot, &keys), Some(&key.public()));
        assert_eq!(signer(&good, &snapshot, &keys[..1]), None, "another key");
        assert_eq!(signer(&good, &Digest::sha256(b"other"), &keys), None, "another snapshot");
        let moved = Signature { payload: good.payload.replace("team/agent", "team/other"), ..good.clone() };
        assert_eq!(signer(&moved, &snapshot, &keys), None, "other bytes");
        // A payload may claim any key.
        let claimed = Signature { key_id: Some(other.public().id()), ..good };
        assert_eq!(signer(&claimed, &snapshot, &keys), Some(&key.public()));
    }

    #[test]
    fn a_private_key_has_the_public_key_of_rfc_8032() {
        let seed: [u8; 32] = [
            0x9d, 0x61, 0xb1, 0x9d, 0xef, 0xfd, 0x5a, 0x60, 0xba, 0x84, 0x4a, 0xf4, 0x92, 0xec, 0x2c, 0xc4, 0x44, 0x49, 0xc5, 0x69, 0x7b,
            0x32, 0x69, 0x19, 0x70, 0x3b, 0xac, 0x03, 0x1c, 0xae, 0x7f, 0x60,
        ];
        let key = PrivateKey::parse(&signature::private_key_pem(&seed)).expect("a key");
        let public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
        let hex: String = key.public().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, public);
    }
}
