//! Signatures and images of other domains: what is put there, and how much of it is found.

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use pfr_schema::api::{NewSignature, SigningPolicies};
use pfr_schema::signature::{self, Layer};
use pfr_schema::{Digest, RepositoryName, Tag, media_type};
use pfr_store::{Error, ManifestName, PrivateKey, Result, Store, signer};
use serde_json::{Value, json};
use std::sync::OnceLock;

/// Keys that sign. Policies ask for the first.
pub const KEYS: usize = 2;
/// Different images.
pub const IMAGES: u8 = 3;
/// When everything is signed: the same signature again is the same bytes.
const AT: u64 = 1_700_000_000_000;

fn key(number: usize) -> &'static PrivateKey {
    static ALL: OnceLock<[PrivateKey; KEYS]> = OnceLock::new();
    let made = || std::array::from_fn(|_| PrivateKey::generate().map_or_else(|error| unreachable!("no key: {error}"), |(key, _)| key));
    &ALL.get_or_init(made)[number]
}

/// The tag that only a snapshot with a signature of the first key gets.
fn admitting(snapshot: &Digest) -> Tag {
    let hex = snapshot.to_string();
    format!("signed-{}", &hex[hex.len() - 12..]).parse().unwrap_or_else(|_| unreachable!())
}

/// Signs a snapshot.
///
/// # Errors
/// Those of the store.
pub async fn sign(store: &Store, repository: &RepositoryName, snapshot: Digest, number: usize) -> Result<()> {
    let new = key(number).sign(snapshot, repository, AT);
    store.add_signatures(repository, &snapshot, &[new]).await.map(drop)
}

/// Puts a signature of another digest where those of `snapshot` are looked for, as a client that
/// pushes images can.
///
/// # Errors
/// Those of the store.
pub async fn forge(store: &Store, repository: &RepositoryName, snapshot: Digest) -> Result<()> {
    let new: NewSignature = key(0).sign(Digest::sha256(b"another"), repository, AT);
    let config = put_blob(store, repository, b"{\"architecture\":\"\"}").await?;
    put_blob(store, repository, new.payload.as_bytes()).await?;
    let manifest = json!({
        "schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "layers": [Layer::of(&new)],
        "config": pointer("application/vnd.oci.image.config.v1+json", &config),
    });
    match put(store, repository, &manifest, signature::tag_of(&snapshot)).await {
        // Where the policy holds, a signature by its key keeps its place.
        Err(Error::SignatureRequired { .. }) => Ok(()),
        done => done,
    }
}

/// Puts the tag on a snapshot for which the policy asks for a signature.
///
/// # Errors
/// Those of the store: [`Error::SignatureRequired`] if there is none.
pub async fn admit(store: &Store, repository: &RepositoryName, snapshot: Digest) -> Result<()> {
    let policies = json!({"policies": [
        {"name": "signed", "repositories": repository, "tags": ["signed-*"], "keys": [key(0).public()]},
    ]});
    let policies: SigningPolicies = serde_json::from_value(policies).map_err(|e| Error::Internal(e.to_string()))?;
    store.metadata().set_signing(policies, None).await?;
    store.put_tag(repository, admitting(&snapshot), snapshot, None).await
}

/// Whether the tag is on the snapshot.
///
/// # Errors
/// Those of the store.
pub async fn is_admitted(store: &Store, repository: &RepositoryName, snapshot: &Digest) -> Result<bool> {
    let row = store.find_manifest(repository, ManifestName::Tag(admitting(snapshot))).await?;
    Ok(row.is_some_and(|row| row.digest == *snapshot))
}

/// The numbers of the keys that have signed a snapshot.
///
/// # Errors
/// Those of the store.
pub async fn signers(store: &Store, repository: &RepositoryName, snapshot: &Digest) -> Result<Vec<usize>> {
    let found = store.signatures(repository, snapshot).await?;
    let has_signed = |number: &usize| found.iter().any(|one| signer(one, snapshot, &[key(*number).public()]).is_some());
    Ok((0..KEYS).filter(has_signed).collect())
}

/// Pushes an image as OCI clients do: its blobs, then its manifest with a tag.
///
/// # Errors
/// Those of the store.
pub async fn push_image(store: &Store, repository: &RepositoryName, number: u8) -> Result<()> {
    let (config, layer) = parts(number);
    let (config, layer) = (put_blob(store, repository, &config).await?, put_blob(store, repository, &layer).await?);
    let manifest = json!({
        "schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "config": pointer("x/config", &config),
        "layers": [pointer("x/layer", &layer)],
    });
    put(store, repository, &manifest, tag_of_image(number)).await
}

/// The numbers of the images of a repository, each read to its last byte.
///
/// # Errors
/// In words: what is lost or corrupt.
pub async fn images(store: &Store, repository: &RepositoryName) -> std::result::Result<Vec<u8>, String> {
    let mut found = Vec::new();
    for number in 0..IMAGES {
        let Some(tag) = tag_of_image(number) else { continue };
        let row = store.find_manifest(repository, ManifestName::Tag(tag)).await.map_err(|e| e.to_string())?;
        let Some(row) = row else { continue };
        let words = |e: Error| format!("LOST: of image {number}: {e}");
        store.read_image(&row.digest).await.map_err(words)?;
        let (config, layer) = parts(number);
        for part in [config, layer] {
            let bytes = store.read(&Digest::sha256(&part)).await.map_err(words)?;
            if bytes != part {
                return Err(format!("CORRUPT: image {number} has other bytes"));
            }
        }
        found.push(number);
    }
    Ok(found)
}

fn tag_of_image(number: u8) -> Option<Tag> {
    format!("v{number}").parse().ok()
}

/// Configuration and layer of an image.
fn parts(number: u8) -> (Vec<u8>, Vec<u8>) {
    (format!("{{\"image\":{number}}}").into_bytes(), vec![number; 3000])
}

fn pointer(media_type: &str, content: &Bytes) -> Value {
    json!({"mediaType": media_type, "digest": Digest::sha256(content), "size": content.len()})
}

async fn put_blob(store: &Store, repository: &RepositoryName, content: &[u8]) -> Result<Bytes> {
    let bytes = Bytes::copy_from_slice(content);
    let body = stream::iter([Ok(bytes.clone())]).boxed();
    store.put_blob(repository, Digest::sha256(content), content.len() as u64, body).await?;
    Ok(bytes)
}

async fn put(store: &Store, repository: &RepositoryName, manifest: &Value, tag: Option<Tag>) -> Result<()> {
    let bytes = serde_json::to_vec(manifest).map_err(|e| Error::Internal(e.to_string()))?;
    store.put_image(repository, bytes, None, tag.into_iter().collect()).await.map(drop)
}
