//! Signatures on this side: keys in files, and the check before a snapshot is fetched.

use crate::error::{Error, Result};
use pfr_schema::Digest;
use pfr_schema::api::Signature;
use pfr_schema::signature::{KEY_FILE_MAX, PublicKey};
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// The public keys of a file in PEM, of which any may have signed.
///
/// # Errors
/// [`Error::Io`], [`Error::Document`]; [`Error::Refused`] for a file that is too large.
pub fn public_keys(path: &Path) -> Result<Vec<PublicKey>> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(KEY_FILE_MAX + 1).read_to_string(&mut text));
    read.map_err(Error::io("read", path))?;
    PublicKey::parse_all(&text).map_err(Error::document(path))
}

/// The first signature of a snapshot by one of these keys, and the key.
///
/// # Errors
/// [`Error::NotSigned`].
pub fn find_signature<'a>(digest: &Digest, signatures: &'a [Signature], keys: &'a [PublicKey]) -> Result<(&'a Signature, &'a PublicKey)> {
    let found = signatures.iter().find_map(|signature| Some((signature, pfr_store::signer(signature, digest, keys)?)));
    found.ok_or(Error::NotSigned { digest: *digest, signatures: signatures.len(), keys: keys.len() })
}
