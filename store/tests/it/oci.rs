//! Images and uploads of the OCI API, over the same tables, packs and collection as snapshots.

use crate::common::rig::{Backend, Rig};
use crate::common::{accuse, pieces, repository, snapshot, tag};
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::codec::Codec;
use pfr_schema::digest::Algorithm;
use pfr_schema::frame::end_mark;
use pfr_schema::{Digest, Document, ErrorCode, Kind, RepositoryName, media_type};
use pfr_store::{BodyStream, Error, ManifestName, NewImage, Options, PackState, Store, document_frame};
use pfr_testkit::frames;
use serde_json::{Value, json};

on_backends!([sqlite = SqliteDisk, postgres_s3 = PostgresS3]:
    chunks_go_to_any_replica_and_make_one_blob,
    a_last_chunk_counts_only_if_it_ends_the_upload,
    an_image_holds_what_it_lists_until_it_is_deleted,
    a_manifest_is_refused_without_what_it_lists,
    a_blob_that_nothing_holds_is_not_there,
    a_rebuild_brings_images_back,
    what_an_immutable_tag_needs_stays,
    the_bytes_of_a_manifest_may_be_a_blob,
    a_manifest_that_is_listed_twice_is_named_once,
    a_layer_that_may_be_missing_shows_nothing_of_other_repositories,
    a_snapshot_is_an_artifact_and_an_image_is_no_snapshot,
    an_image_that_is_uploaded_as_a_manifest_leaves_no_pack,
    a_push_heals_a_damaged_image,
);

fn body(bytes: &[u8]) -> BodyStream {
    let pieces: Vec<pfr_store::Result<Bytes>> = bytes.chunks(50_000).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
    futures::stream::iter(pieces).boxed()
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let byte = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..len).map(byte).collect()
}

fn other() -> RepositoryName {
    "team/other".parse().unwrap()
}

async fn put(store: &Store, repository: &RepositoryName, content: &[u8]) -> Digest {
    let digest = Digest::sha256(content);
    store.put_blob(repository, digest, content.len() as u64, body(content)).await.unwrap();
    digest
}

async fn read(store: &Store, digest: &Digest, from: u64, to: u64) -> Vec<u8> {
    let pieces: Vec<Bytes> = store.raw(digest, from..to).await.unwrap().try_collect().await.unwrap();
    pieces.concat()
}

fn pointer(media_type: &str, content: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": Digest::sha256(content), "size": content.len()})
}

fn image(config: &[u8], layers: &[&[u8]], subject: Option<&[u8]>) -> Vec<u8> {
    let mut document = json!({
        "schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "config": pointer("x/config", config),
        "layers": layers.iter().map(|layer| pointer("x/layer", layer)).collect::<Vec<_>>(),
    });
    if let Some(subject) = subject {
        document["subject"] = pointer(media_type::OCI_MANIFEST, subject);
    }
    serde_json::to_vec(&document).unwrap()
}

async fn is_sound(rig: &Rig) {
    let audit = rig.metadata.audit(false).await.unwrap();
    assert_eq!(audit.wrong, 0, "{:?}", audit.discrepancies);
}

async fn chunks_go_to_any_replica_and_make_one_blob(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let (store, another) = (&rig.store, rig.another().await);
    let content = bytes(1, 3_000_000);
    for algorithm in [Algorithm::Sha256, Algorithm::Sha512] {
        let digest = Digest::of(algorithm, &content);
        let upload = store.open_push(&repository()).await.unwrap().id;
        assert_eq!(store.append_upload(&upload, Some(0), body(&content[..1_200_000])).await.unwrap(), 1_200_000);
        // Another process has nothing but the tables and the packs.
        let there = another.live_push(&repository(), &upload).await.unwrap();
        assert_eq!(another.upload_received(&there).await.unwrap(), 1_200_000);
        for wrong in [0, 1_199_999, 3_000_000] {
            let error = another.append_upload(&there, Some(wrong), body(b"x")).await.unwrap_err();
            assert!(matches!(error, Error::UploadMoved { received: 1_200_000, .. }), "{error}");
        }
        let cut = futures::stream::iter([Ok(Bytes::from_static(b"x")), Err(Error::Input("cut".into()))]).boxed();
        assert_eq!(another.append_upload(&there, None, cut).await.unwrap_err().code(), ErrorCode::Truncated);
        assert_eq!(another.append_upload(&there, None, body(&content[1_200_000..])).await.unwrap(), 3_000_000);
        let parts = rig.metadata.upload_parts((*upload).clone(), 0, 1000).await.unwrap();
        assert!(parts.len() > 3 && parts.len() < 60, "{} parts", parts.len());

        let wrong = Digest::of(algorithm, b"other");
        assert_eq!(store.finish_upload(&repository(), &upload, wrong).await.unwrap_err().code(), ErrorCode::DigestMismatch);
        assert_eq!(store.blob(&repository(), &wrong).await.unwrap(), None);
        store.finish_upload(&repository(), &upload, digest).await.unwrap();
        assert!(matches!(another.live_push(&repository(), &upload).await, Err(Error::PushUnknown(_))), "the upload is over");
        assert_eq!(another.blob(&repository(), &digest).await.unwrap(), Some(3_000_000));
        assert_eq!(another.blob(&other(), &digest).await.unwrap(), None, "of this repository only");
        assert_eq!(read(&another, &digest, 0, 3_000_000).await, content);
        assert_eq!(read(&another, &digest, 1_048_570, 2_097_160).await, content[1_048_570..2_097_160]);
        // The parts are garbage at once, and the blob is not.
        rig.seconds(1);
        while rig.metadata.collect(1000).await.unwrap().more {}
        let digests: Vec<Digest> = parts.iter().map(|part| part.digest).collect();
        assert!(rig.metadata.find(digests).await.unwrap().iter().all(Option::is_none));
        assert!(rig.metadata.find(vec![digest]).await.unwrap()[0].is_some());
    }
    is_sound(&rig).await;
    rig.collect().await;
    assert_eq!(store.blob(&repository(), &Digest::sha256(&content)).await.unwrap(), None, "nothing listed it within its lease");
    assert_eq!(rig.pack_files().await.len(), 0);
}

async fn a_last_chunk_counts_only_if_it_ends_the_upload(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let (store, digest) = (&rig.store, Digest::sha256(b"hello world"));
    let upload = store.open_push(&repository()).await.unwrap().id;
    store.append_upload(&upload, Some(0), body(b"hello ")).await.unwrap();
    let team = repository();
    let finish = |digest| store.finish_upload_with(&team, &upload, digest, 6, body(b"world"));
    assert_eq!(finish(Digest::sha256(b"other")).await.unwrap_err().code(), ErrorCode::DigestMismatch);
    assert_eq!(store.upload_received(&upload).await.unwrap(), 6);
    finish(digest).await.unwrap();
    assert_eq!(read(store, &digest, 0, 11).await, b"hello world");
    // Cancelled by another request while it was being finished.
    let upload = store.open_push(&repository()).await.unwrap().id;
    store.append_upload(&upload, Some(0), body(b"hello ")).await.unwrap();
    store.abort(&upload).await.unwrap();
    let error = store.finish_upload(&repository(), &upload, Digest::sha256(b"hello ")).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::PushUnknown, "{error}");
    is_sound(&rig).await;
}

async fn an_image_holds_what_it_lists_until_it_is_deleted(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    let (config, layer) = (b"{}".to_vec(), bytes(2, 200_000));
    for content in [&config, &layer] {
        put(store, &repository(), content).await;
    }
    let first = image(&config, &[&layer[..]], None);
    let digest = store.put_image(&repository(), first.clone(), None, vec![tag("v1"), tag("latest")]).await.unwrap();
    assert_eq!(digest, Digest::sha256(&first));
    let again = store.put_image(&repository(), first.clone(), Some(digest), vec![tag("v1")]).await.unwrap();
    assert_eq!(again, digest, "the same again changes nothing");
    let signature = image(&config, &[], Some(&first[..]));
    store.put_image(&repository(), signature.clone(), None, vec![]).await.unwrap();
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [pointer(media_type::OCI_MANIFEST, &first)]})).unwrap();
    store.put_image(&repository(), index.clone(), None, vec![tag("all")]).await.unwrap();
    assert!(store.mount_blob(&other(), Digest::sha256(&layer), &[repository()]).await.unwrap());
    assert!(!store.mount_blob(&other(), Digest::sha256(b"nothing"), &[repository()]).await.unwrap());
    rig.collect().await;
    is_sound(&rig).await;
    assert_eq!(read(store, &Digest::sha256(&layer), 0, 200_000).await, layer);
    assert_eq!(store.blob(&other(), &Digest::sha256(&layer)).await.unwrap(), Some(200_000), "while it is stored");
    let tags = store.all_tags(&repository(), None, 2).await.unwrap();
    assert_eq!((tags.rows, tags.next.as_deref()), (vec![tag("all"), tag("latest")], Some("latest")));
    let team = repository();
    let of = |kind: Option<&str>| store.referrers(&team, digest, kind.map(str::to_owned), 0, 10);
    assert_eq!(of(None).await.unwrap()[0].digest, Digest::sha256(&signature));
    assert_eq!((of(Some("x/config")).await.unwrap().len(), of(Some("x/other")).await.unwrap().len()), (1, 0));

    store.delete_snapshot(&repository(), &digest).await.unwrap();
    assert_eq!(store.find_manifest(&repository(), ManifestName::Tag(tag("v1"))).await.unwrap(), None);
    rig.collect().await;
    assert!(rig.metadata.find(vec![digest]).await.unwrap()[0].is_some(), "the index holds it");
    store.delete_blob(&repository(), &Digest::sha256(&layer)).await.unwrap();
    assert_eq!(store.blob(&repository(), &Digest::sha256(&layer)).await.unwrap(), None);
    for document in [&index, &signature] {
        store.delete_snapshot(&repository(), &Digest::sha256(document)).await.unwrap();
    }
    rig.collect().await;
    assert_eq!(rig.pack_files().await.len(), 0, "nothing holds anything");
    is_sound(&rig).await;
}

async fn a_manifest_is_refused_without_what_it_lists(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    put(store, &repository(), b"{}").await;
    put(store, &other(), b"elsewhere").await;
    // One answer, whether another repository has it or none.
    for absent in [&b"elsewhere"[..], b"nowhere"] {
        let error = store.put_image(&repository(), image(b"{}", &[absent], None), None, vec![tag("t")]).await.unwrap_err();
        assert!(matches!(&error, Error::Missing { missing, .. } if *missing == [Digest::sha256(absent)]), "{error}");
    }
    let index = json!({"schemaVersion": 2, "manifests": [pointer(media_type::OCI_MANIFEST, b"nowhere")]});
    let error = store.put_image(&repository(), serde_json::to_vec(&index).unwrap(), None, vec![]).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::MissingBlobs);
    // A blob that a client calls a manifest is none.
    let index = json!({"schemaVersion": 2, "manifests": [pointer(media_type::OCI_MANIFEST, b"{}")]});
    let error = store.put_image(&repository(), serde_json::to_vec(&index).unwrap(), None, vec![]).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::MissingBlobs);
    let mut sized = serde_json::from_slice::<Value>(&image(b"{}", &[], None)).unwrap();
    sized["config"]["size"] = 3.into();
    let error = store.put_image(&repository(), serde_json::to_vec(&sized).unwrap(), None, vec![]).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::LengthMismatch);
    let named = store.put_image(&repository(), image(b"{}", &[], None), Some(Digest::sha256(b"x")), vec![]).await;
    assert_eq!(named.unwrap_err().code(), ErrorCode::DigestMismatch);
    // A layer that must not be distributed, and a subject, need not be there.
    let mut foreign = serde_json::from_slice::<Value>(&image(b"{}", &[], Some(b"nowhere"))).unwrap();
    foreign["layers"] = json!([pointer("application/vnd.oci.image.layer.nondistributable.v1.tar", b"foreign")]);
    let foreign = serde_json::to_vec(&foreign).unwrap();
    store.put_image(&repository(), foreign.clone(), None, vec![tag("t")]).await.unwrap();
    is_sound(&rig).await;
    let report = store.find_manifest(&repository(), ManifestName::Tag(tag("t"))).await.unwrap();
    assert_eq!(report.unwrap().digest, Digest::sha256(&foreign));
}

async fn what_an_immutable_tag_needs_stays(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    for content in [&b"{}"[..], b"one", b"two"] {
        put(store, &repository(), content).await;
    }
    let (one, two) = (image(b"{}", &[&b"one"[..]], None), image(b"{}", &[&b"two"[..]], None));
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [pointer(media_type::OCI_MANIFEST, &one)]})).unwrap();
    for (document, name) in [(&one, vec![]), (&two, vec![tag("main")]), (&index, vec![tag("v1")])] {
        store.put_image(&repository(), document.clone(), None, name).await.unwrap();
    }
    let policies = json!({"policies": [{"name": "releases", "repositories": "team/*", "immutable_tags": ["v*"]}]});
    rig.metadata.set_retention(serde_json::from_value(policies).unwrap(), None).await.unwrap();
    let team = repository();
    for refused in [
        store.delete_blob(&team, &Digest::sha256(b"one")).await,
        store.delete_blob(&team, &Digest::sha256(b"{}")).await,
        store.delete_snapshot(&team, &Digest::sha256(&one)).await,
    ] {
        let refused = refused.unwrap_err();
        assert!(matches!(&refused, Error::NeededByTag { tag: found, .. } if *found == tag("v1")), "{refused}");
        assert_eq!(refused.code(), ErrorCode::TagImmutable);
    }
    // The same manifest is refused again while its blobs are missing.
    store.delete_blob(&team, &Digest::sha256(b"two")).await.unwrap();
    let error = store.put_image(&team, two.clone(), None, vec![tag("again")]).await.unwrap_err();
    assert!(matches!(&error, Error::Missing { missing, .. } if *missing == [Digest::sha256(b"two")]), "{error}");
    put(store, &team, b"two").await;
    store.put_image(&team, two, None, vec![tag("again")]).await.unwrap();
    assert_eq!(store.blob(&team, &Digest::sha256(b"one")).await.unwrap(), Some(3));
    is_sound(&rig).await;
}

async fn the_bytes_of_a_manifest_may_be_a_blob(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    for place in [repository(), other()] {
        put(store, &place, b"{}").await;
    }
    let hidden = image(b"{}", &[], None);
    let digest = store.put_image(&repository(), hidden.clone(), None, vec![tag("v1")]).await.unwrap();
    // A client that has the bytes stores them as a blob like any other, and gets no manifest.
    assert_eq!(put(store, &other(), &hidden).await, digest);
    assert_eq!(store.blob(&other(), &digest).await.unwrap(), Some(hidden.len() as u64));
    assert_eq!(store.find_manifest(&other(), ManifestName::Digest(digest)).await.unwrap(), None);
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [pointer(media_type::OCI_MANIFEST, &hidden)]})).unwrap();
    let error = store.put_image(&other(), index, None, vec![]).await.unwrap_err();
    assert!(matches!(&error, Error::Missing { missing, .. } if *missing == [digest]), "{error}");
    let artifact = image(b"{}", &[&hidden[..]], None);
    store.put_image(&other(), artifact, None, vec![tag("layout")]).await.unwrap();

    let rebuilt = rig.beside().await;
    rebuilt.store.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!(rebuilt.store.blob(&other(), &digest).await.unwrap(), Some(hidden.len() as u64));
    assert_eq!(rebuilt.store.blob(&repository(), &digest).await.unwrap(), None, "there it is a manifest only");
    is_sound(&rebuilt).await;
}

async fn a_manifest_that_is_listed_twice_is_named_once(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    put(store, &repository(), b"{}").await;
    let listed = image(b"{}", &[], None);
    let digest = store.put_image(&repository(), listed.clone(), None, vec![]).await.unwrap();
    let twice = [pointer(media_type::OCI_MANIFEST, &listed), pointer(media_type::OCI_MANIFEST, &listed)];
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": twice})).unwrap();
    let manifest = store.put_image(&repository(), index.clone(), None, vec![]).await.unwrap();
    // There it is only a blob.
    put(store, &other(), &listed).await;
    let before = store.put_image(&other(), index, None, vec![]).await.unwrap_err();
    // The transaction asks once more: it may have been deleted since.
    let (artifact_type, subject, audit, signed) = (None, None, None, None);
    let (moves, optional, manifests) = (vec![], vec![], vec![digest; 2]);
    let new = NewImage { manifest, artifact_type, subject, moves, optional, manifests, audit, signed };
    let session = store.open_push(&other()).await.unwrap();
    let within = rig.metadata.put_image((*session.id).clone(), new).await.unwrap_err();
    for error in [before, within] {
        assert!(matches!(&error, Error::Missing { missing, .. } if *missing == [digest]), "{error:?}");
    }
}

async fn a_blob_that_nothing_holds_is_not_there(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    let digest = put(store, &repository(), b"{}").await;
    assert_eq!(store.blob(&repository(), &digest).await.unwrap(), Some(2), "leased");
    rig.wait(Options::default().lease);
    rig.seconds(1);
    assert_eq!(store.blob(&repository(), &digest).await.unwrap(), None, "garbage, though no collection took it yet");
    assert!(!store.mount_blob(&other(), digest, &[repository()]).await.unwrap());
    // The upload that follows saves it.
    put(store, &repository(), b"{}").await;
    while rig.metadata.collect(1000).await.unwrap().more {}
    assert_eq!(store.blob(&repository(), &digest).await.unwrap(), Some(2));
    store.put_image(&repository(), image(b"{}", &[], None), None, vec![tag("v1")]).await.unwrap();
    rig.wait(Options::default().lease);
    rig.seconds(1);
    assert_eq!(store.blob(&repository(), &digest).await.unwrap(), Some(2), "held");
}

async fn a_rebuild_brings_images_back(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    let layer = bytes(3, 100_000);
    for content in [&b"{}"[..], &layer[..]] {
        put(store, &repository(), content).await;
    }
    let first = image(b"{}", &[&layer[..]], None);
    let digest = store.put_image(&repository(), first.clone(), None, vec![tag("v1")]).await.unwrap();
    let signature = image(b"{}", &[], Some(&first[..]));
    store.put_image(&repository(), signature.clone(), None, vec![]).await.unwrap();
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [pointer(media_type::OCI_MANIFEST, &first)]})).unwrap();
    let nested = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [pointer(media_type::OCI_INDEX, &index)]})).unwrap();
    for document in [&index, &nested] {
        store.put_image(&repository(), document.clone(), None, vec![]).await.unwrap();
    }
    store.put_image(&repository(), nested.clone(), None, vec![tag("nested")]).await.unwrap();

    let rebuilt = rig.beside().await;
    let report = rebuilt.store.rebuild(&mut |_| ()).await.unwrap();
    assert!(report.lost.is_empty() && report.refused.is_empty(), "{report:?}");
    let store = &rebuilt.store;
    for (name, document) in [("v1", &first), ("nested", &nested)] {
        let found = store.find_manifest(&repository(), ManifestName::Tag(tag(name))).await.unwrap();
        assert_eq!(found.unwrap().digest, Digest::sha256(document), "{name}");
    }
    assert_eq!(store.blob(&repository(), &Digest::sha256(&layer)).await.unwrap(), Some(100_000));
    let referrers = store.referrers(&repository(), digest, Some("x/config".to_owned()), 0, 10).await.unwrap();
    assert_eq!(referrers[0].digest, Digest::sha256(&signature));
    rebuilt.collect().await;
    is_sound(&rebuilt).await;
    assert_eq!(read(store, &Digest::sha256(&layer), 0, 100_000).await, layer);
}

/// An image that lists `layer` of another repository as one that it may lack.
fn with_foreign(layer: &[u8]) -> Value {
    let mut document: Value = serde_json::from_slice(&image(b"{}", &[], None)).unwrap();
    document["layers"] = json!([pointer("application/vnd.oci.image.layer.nondistributable.v1.tar", layer)]);
    document
}

async fn a_layer_that_may_be_missing_shows_nothing_of_other_repositories(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    let (secret, config) = (bytes(4, 2013), Digest::sha256(b"{}"));
    for content in [&b"{}"[..], &secret[..]] {
        put(store, &repository(), content).await;
    }
    store.put_image(&repository(), image(b"{}", &[&secret[..]], None), None, vec![tag("v1")]).await.unwrap();
    put(store, &other(), b"{}").await;
    for hidden in [&secret[..], b"nowhere"] {
        let mut guess = with_foreign(hidden);
        guess["layers"][0]["size"] = 7.into();
        store.put_image(&other(), serde_json::to_vec(&guess).unwrap(), None, vec![]).await.unwrap();
    }
    let foreign = serde_json::to_vec(&with_foreign(&secret)).unwrap();
    store.put_image(&other(), foreign, None, vec![tag("v1")]).await.unwrap();
    let secret = Digest::sha256(&secret);
    assert_eq!(store.blob(&other(), &secret).await.unwrap(), None);

    let rebuilt = rig.beside().await;
    rebuilt.store.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!(rebuilt.store.blob(&other(), &secret).await.unwrap(), None, "a rebuild shows no more");
    assert_eq!(rebuilt.store.blob(&other(), &config).await.unwrap(), Some(2));
    assert_eq!(rebuilt.store.blob(&repository(), &secret).await.unwrap(), Some(2013));
    is_sound(&rebuilt).await;
}

async fn a_snapshot_is_an_artifact_and_an_image_is_no_snapshot(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    let pushed = snapshot(&[1, 2], vec![]);
    crate::common::push(store, &pushed, "state").await.unwrap();
    put(store, &repository(), b"{}").await;
    let picture = image(b"{}", &[], Some(&pushed.manifest.bytes[..]));
    store.put_image(&repository(), picture.clone(), None, vec![tag("signature")]).await.unwrap();

    let row = store.find_manifest(&repository(), ManifestName::Tag(tag("state"))).await.unwrap().unwrap();
    let (bytes, described) = store.read_image(&row.digest).await.unwrap();
    assert_eq!((row.digest, &bytes[..]), (pushed.manifest.digest, &pushed.manifest.bytes[..]));
    assert_eq!(described.artifact_type.as_deref(), Some(media_type::SNAPSHOT));
    // Its blobs are read by ranges, however they are stored.
    let tree = &pushed.tree;
    assert_eq!(store.blob(&repository(), &tree.digest).await.unwrap(), Some(tree.bytes.len() as u64));
    assert_eq!(read(store, &tree.digest, 0, tree.bytes.len() as u64).await, tree.bytes);
    assert_eq!(read(store, &tree.digest, 7, 30).await, tree.bytes[7..30]);
    assert_eq!(store.referrers(&repository(), row.digest, None, 0, 10).await.unwrap().len(), 1);
    // A further tag, as `crane tag` puts it. Elsewhere its pages would be missing.
    store.put_image(&repository(), bytes.to_vec(), None, vec![tag("copy")]).await.unwrap();
    let error = store.put_image(&other(), bytes.to_vec(), None, vec![tag("copy")]).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidRequest, "{error}");

    let tags: Vec<String> = store.tags(&repository(), None, 10).await.unwrap().rows.into_iter().map(|row| row.name.to_string()).collect();
    assert_eq!(tags, ["copy", "state"], "lists of snapshots leave images out");
    assert_eq!(store.snapshots(&repository(), None, 10).await.unwrap().rows.len(), 1);
    assert_eq!(store.repositories(None, 10).await.unwrap().rows[0].snapshots, 1);
    assert_eq!(store.snapshot(&repository(), &Digest::sha256(&picture)).await.unwrap_err().code(), ErrorCode::SnapshotUnknown);
    is_sound(&rig).await;
}

async fn an_image_that_is_uploaded_as_a_manifest_leaves_no_pack(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    put(store, &repository(), b"{}").await;
    let picture = image(b"{}", &[], None);
    let digest = store.put_image(&repository(), picture.clone(), None, vec![tag("image")]).await.unwrap();
    let files = rig.pack_files().await;
    let session = store.open_push(&repository()).await.unwrap().id;
    let upload = frames::stream([frames::of(&Document { digest, kind: Kind::Manifest, bytes: picture })]);
    let refused = store.ingest(&session, pieces(&upload, 777)).await.unwrap_err();
    assert!(matches!(&refused, Error::Invalid(text) if text.contains("is stored as an image")), "{refused}");
    assert_eq!(rig.pack_files().await, files, "the bytes of the refused pack are deleted");
    let packs = rig.metadata.packs(None, 100).await.unwrap();
    assert!(packs.iter().all(|pack| pack.state == PackState::Live), "and its row: {packs:?}");
    is_sound(&rig).await;
}

async fn a_push_heals_a_damaged_image(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let store = &rig.store;
    let (config, layer) = (put(store, &repository(), b"{}").await, put(store, &repository(), b"layer").await);
    let picture = image(b"{}", &[&b"layer"[..]], None);
    let digest = store.put_image(&repository(), picture.clone(), None, vec![tag("v1")]).await.unwrap();
    accuse(store, &[layer, digest]).await;
    assert!(store.is_damaged(&layer).await.unwrap() && !store.is_damaged(&config).await.unwrap());
    // What it lists comes first, as in every push.
    let error = store.put_image(&repository(), picture.clone(), None, vec![tag("v1")]).await.unwrap_err();
    assert!(matches!(&error, Error::Missing { missing, .. } if *missing == [layer]), "{error}");
    put(store, &repository(), b"layer").await;
    assert_eq!(store.put_image(&repository(), picture.clone(), None, vec![tag("v1")]).await.unwrap(), digest);
    assert!(store.damaged().await.unwrap().is_empty());
    assert_eq!(store.read_image(&digest).await.unwrap().0, picture);
    is_sound(&rig).await;
}

/// A reader of raw bytes gets any part of a blob, in every codec.
#[tokio::test]
async fn encoded_blobs_are_read_by_ranges() {
    let store = Store::open_in_memory(Options::default()).await.unwrap();
    let raw: Vec<u8> = (0..400_000_u32).flat_map(|i| [(i % 7) as u8, 0x3f]).collect();
    let digest = Digest::sha256(&raw);
    let document = document_frame(&Document::new(Kind::Blob, raw.clone()));
    for frame in [frames::encoded(Codec::Bf16Bitmaps, &raw), frames::encoded(Codec::Bf16Huffman, &raw), document, frames::blob(&raw)] {
        let store = Store::open_in_memory(Options::default()).await.unwrap();
        let session = store.open_push(&repository()).await.unwrap().id;
        let stream = [frame, end_mark(1).into()].map(Ok::<Bytes, std::io::Error>);
        store.ingest(&session, futures::stream::iter(stream)).await.unwrap();
        for (from, to) in [(0, raw.len()), (1, 2), (399_999, 700_001), (raw.len() - 5, raw.len()), (9, 9)] {
            assert_eq!(read(&store, &digest, from as u64, to as u64).await, raw[from..to], "{from}..{to}");
        }
    }
    assert_eq!(store.raw(&digest, 0..1).await.err().map(|error| error.code()), Some(ErrorCode::BlobUnknown));
}
