//! Keys in PEM: SPKI for public ones, PKCS#8 for private ones, both of ed25519.

use crate::digest::Digest;
use crate::error::FormatError;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Bytes of a file with keys.
pub const KEY_FILE_MAX: u64 = 64 << 10;
/// Keys in one file.
const MOST: usize = 100;

const PUBLIC: &str = "PUBLIC KEY";
const PRIVATE: &str = "PRIVATE KEY";
/// The bytes before the 32 bytes of a public key: a sequence, the algorithm (1.3.101.112), a bit
/// string.
const SPKI: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
/// The same for a private key, whose 32 bytes are an octet string in another one.
const PKCS8: [u8; 16] = [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// A public key of ed25519.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// The key with these bytes.
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Its id: the SHA-256 of its SPKI in DER.
    #[must_use]
    pub fn id(&self) -> Digest {
        Digest::sha256(&self.to_der())
    }

    fn to_der(self) -> Vec<u8> {
        SPKI.iter().chain(&self.0).copied().collect()
    }

    /// The public keys of a text with one or more of them.
    ///
    /// # Errors
    /// [`FormatError::Field`] if it has none, or one of another kind.
    pub fn parse_all(text: &str) -> Result<Vec<Self>, FormatError> {
        let mut keys = Vec::new();
        for block in blocks(text)? {
            if block.label != PUBLIC {
                return Err(wrong(PUBLIC, block.label));
            }
            let key = block.der.strip_prefix(&SPKI[..]).and_then(|key| key.try_into().ok());
            keys.push(Self(key.ok_or_else(|| wrong("a public key of ed25519", "a key of another kind"))?));
        }
        match keys.len() {
            0 => Err(wrong(PUBLIC, "no key")),
            1..=MOST => Ok(keys),
            more => Err(FormatError::TooLarge { what: "keys in a file", found: more as u64, limit: MOST as u64 }),
        }
    }
}

impl FromStr for PublicKey {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        match Self::parse_all(text)?[..] {
            [key] => Ok(key),
            _ => Err(wrong("one public key", "several")),
        }
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&pem(PUBLIC, &self.to_der()))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", self.id())
    }
}

impl TryFrom<String> for PublicKey {
    type Error = FormatError;

    fn try_from(text: String) -> Result<Self, FormatError> {
        text.parse()
    }
}

impl From<PublicKey> for String {
    fn from(key: PublicKey) -> Self {
        key.to_string()
    }
}

/// The PKCS#8 in DER of a text with one private key. Errors never show any of it.
///
/// # Errors
/// [`FormatError::Field`].
pub fn private_key_der(text: &str) -> Result<Vec<u8>, FormatError> {
    let mut blocks = blocks(text)?;
    match (blocks.pop(), blocks.is_empty()) {
        (Some(block), true) if block.label == PRIVATE => Ok(block.der),
        (Some(block), true) if block.label.starts_with("ENCRYPTED") => {
            Err(wrong("a private key without a passphrase", "an encrypted one; `openssl pkcs8` decrypts those of openssl"))
        }
        (Some(block), true) => Err(wrong(PRIVATE, block.label)),
        (Some(_), false) => Err(wrong("one private key", "several blocks")),
        (None, _) => Err(wrong(PRIVATE, "no key")),
    }
}

/// The text of a private key, of its 32 secret bytes.
#[must_use]
pub fn private_key_pem(seed: &[u8; 32]) -> String {
    pem(PRIVATE, &PKCS8.iter().chain(seed).copied().collect::<Vec<u8>>())
}

fn pem(label: &str, der: &[u8]) -> String {
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", STANDARD.encode(der))
}

fn wrong(expected: &str, found: &str) -> FormatError {
    FormatError::field("key file", "PEM", expected, found)
}

struct Block<'a> {
    label: &'a str,
    der: Vec<u8>,
}

/// The blocks of a text. What stands between them is skipped, as everywhere with PEM.
fn blocks(text: &str) -> Result<Vec<Block<'_>>, FormatError> {
    if text.len() as u64 > KEY_FILE_MAX {
        return Err(FormatError::TooLarge { what: "a key file in bytes", found: text.len() as u64, limit: KEY_FILE_MAX });
    }
    let mut blocks = Vec::new();
    let mut open: Option<(&str, String)> = None;
    for line in text.lines().map(str::trim) {
        let of = |begin: &str| line.strip_prefix(begin).and_then(|rest| rest.strip_suffix("-----"));
        match (&mut open, of("-----BEGIN "), of("-----END ")) {
            (None, Some(label), _) => open = Some((label, String::new())),
            (Some((label, digits)), None, Some(end)) if *label == end => {
                let der = STANDARD.decode(&*digits).map_err(|_| wrong("base64", "other characters, or a wrong length"))?;
                blocks.push(Block { label, der });
                open = None;
            }
            (Some(_), Some(_), _) | (_, None, Some(_)) => return Err(wrong("blocks that begin and end", "other lines")),
            (Some((_, digits)), None, None) => digits.push_str(line),
            (None, None, None) => {}
        }
    }
    if open.is_some() { Err(wrong("the end of a key", "the end of the file")) } else { Ok(blocks) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of RFC 8410, section 10, in the form in which openssl prints keys.
    const PRIVATE_PEM: &str =
        "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
    const PUBLIC_PEM: &str =
        "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n";
    /// The form of a key of P-256, which `cosign generate-key-pair` makes.
    const P256_PEM: &str = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEAAECAwQFBgcICQoLDA0ODxAREhMU\nFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0+Pw==\n-----END PUBLIC KEY-----\n";

    #[test]
    fn keys_print_what_they_were_read_from() {
        let key: PublicKey = PUBLIC_PEM.parse().unwrap();
        assert_eq!(key.to_string(), PUBLIC_PEM);
        assert_eq!(serde_json::from_str::<PublicKey>(&serde_json::to_string(&key).unwrap()).unwrap(), key);
        let der = private_key_der(PRIVATE_PEM).unwrap();
        let seed: [u8; 32] = der[16..].try_into().unwrap();
        assert_eq!(private_key_pem(&seed), PRIVATE_PEM);
        let several = format!("the first\n{PUBLIC_PEM}\r\nand {PUBLIC_PEM}").replace("and -", "-");
        assert_eq!(PublicKey::parse_all(&several), Ok(vec![key; 2]));
        assert!(several.parse::<PublicKey>().is_err());
    }

    #[test]
    fn other_files_are_refused_and_no_secret_is_shown() {
        for (text, expected) in [
            ("", "no key"),
            (PRIVATE_PEM, "PRIVATE KEY"),
            (P256_PEM, "another kind"),
            (&PUBLIC_PEM[..70], "the end of the file"),
            (PUBLIC_PEM.replace("MCow", "MC%w").as_str(), "base64"),
            (PUBLIC_PEM.repeat(101).as_str(), "keys in a file"),
            (PUBLIC_PEM.repeat(1000).as_str(), "too large"),
            (format!("-----BEGIN X-----\n{PUBLIC_PEM}").as_str(), "begin and end"),
        ] {
            let error = PublicKey::parse_all(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let encrypted = PRIVATE_PEM.replace("PRIVATE", "ENCRYPTED SIGSTORE PRIVATE");
        for (text, expected) in [
            ("", "no key"),
            (PUBLIC_PEM, "PUBLIC KEY"),
            (encrypted.as_str(), "passphrase"),
            (PRIVATE_PEM.repeat(2).as_str(), "several"),
            (PRIVATE_PEM.replace("MC4C", "MC%C").as_str(), "base64"),
        ] {
            let error = private_key_der(text).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("CAQAwBQYDK2Vw"), "{error}");
        }
    }
}
