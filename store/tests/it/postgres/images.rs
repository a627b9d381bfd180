//! Images that are pushed while something that they list is deleted.

use super::connect;
use super::sessions::{say, until_waiting};
use crate::common::{repository, tag};
use bytes::Bytes;
use futures::StreamExt as _;
use object_store::memory::InMemory;
use pfr_schema::{Digest, media_type};
use pfr_store::{Error, Metadata, Options, Store};
use pfr_testkit::postgres;
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};
use std::sync::Arc;

/// A store, and a connection of another process that is in a transaction.
async fn fleet() -> (String, Store, PgConnection) {
    let url = postgres::database();
    let metadata: Arc<dyn Metadata> = connect(&url).await;
    let store = Store::new(Arc::new(InMemory::new()), metadata, Options::default());
    for content in [&b"{}"[..], b"layer"] {
        let body = futures::stream::iter([Ok(Bytes::copy_from_slice(content))]).boxed();
        store.put_blob(&repository(), Digest::sha256(content), content.len() as u64, body).await.unwrap();
    }
    let mut other = PgConnection::connect(&url).await.unwrap();
    say(&mut other, "BEGIN".into()).await;
    (url, store, other)
}

fn pointer(media_type: &str, content: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": Digest::sha256(content), "size": content.len()})
}

fn image() -> Vec<u8> {
    let document = json!({"schemaVersion": 2, "config": pointer("x/config", b"{}"), "layers": [pointer("x/layer", b"layer")]});
    document.to_string().into_bytes()
}

fn index() -> Vec<u8> {
    json!({"schemaVersion": 2, "manifests": [pointer(media_type::OCI_MANIFEST, &image())]}).to_string().into_bytes()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_whose_blob_or_manifest_is_being_deleted_waits_and_is_refused() {
    let (url, store, mut other) = fleet().await;
    store.put_image(&repository(), image(), None, vec![]).await.unwrap();
    let rows = |table: &str| format!("DELETE FROM {table} WHERE object = (SELECT id FROM objects WHERE size = {})", image().len());
    let blob = "DELETE FROM repository_blobs WHERE object = (SELECT id FROM objects WHERE size = 5)".to_owned();
    for (deletion, document, absent) in [(blob, image(), Digest::sha256(b"layer")), (rows("manifests"), index(), Digest::sha256(&image()))]
    {
        say(&mut other, deletion).await;
        let pushing = tokio::spawn({
            let store = store.clone();
            async move { store.put_image(&repository(), document, None, vec![tag("v1")]).await }
        });
        until_waiting(&url, 1, &pushing).await;
        say(&mut other, "COMMIT; BEGIN".into()).await;
        let refused = pushing.await.unwrap().unwrap_err();
        assert!(matches!(&refused, Error::Missing { missing, .. } if *missing == [absent]), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_that_an_image_comes_to_need_meanwhile_is_not_deleted() {
    let (url, store, mut other) = fleet().await;
    let policies = json!({"policies": [{"name": "releases", "repositories": "*", "immutable_tags": ["v*"]}]});
    store.metadata().set_retention(serde_json::from_value(policies).unwrap(), None).await.unwrap();
    store.put_image(&repository(), image(), None, vec![]).await.unwrap();
    // As a push of the image does it.
    say(&mut other, "SELECT 1 FROM repository_blobs FOR KEY SHARE".into()).await;
    let deleting = tokio::spawn({
        let store = store.clone();
        async move { store.delete_blob(&repository(), &Digest::sha256(b"layer")).await }
    });
    until_waiting(&url, 1, &deleting).await;
    let name = "INSERT INTO tags (repository, name, manifest, updated_at) SELECT repository, 'v1', id, 1 FROM manifests";
    say(&mut other, format!("{name}; UPDATE objects SET refs = refs + 1 WHERE id = (SELECT object FROM manifests); COMMIT")).await;
    let refused = deleting.await.unwrap().unwrap_err();
    assert!(matches!(&refused, Error::NeededByTag { tag: found, .. } if *found == tag("v1")), "{refused}");
    let audit = store.metadata().audit(false).await.unwrap();
    assert_eq!(audit.wrong, 0, "{:?}", audit.discrepancies);
}
