//! Signatures: they stay with their snapshot and go with it, and policies let tags be put only on
//! what is signed.

use crate::common::rig::{Backend, Rig};
use crate::common::watched::Watched;
use crate::common::{Snapshot, pieces, push, repository, snapshot, tag};
use futures::{StreamExt as _, stream};
use pfr_schema::api::{NewSignature, SigningPolicies};
use pfr_schema::signature::{self, Layer, MOST, PublicKey};
use pfr_schema::{Digest, ErrorCode, RepositoryName};
use pfr_store::{
    AuditEntry, AuditFilter, AuditRecord, Budget, Error, Metadata, NameChange, Options, PrivateKey, QuotaLimits, Store, TagMove, signer,
};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

on_backends!([sqlite = SqliteDisk, postgres = PostgresDisk]:
    signatures_are_one_manifest_that_goes_with_its_snapshot,
    a_deletion_of_many_takes_the_references_of_each,
    two_that_sign_at_once_are_both_kept,
    a_kill_between_two_manifests_leaves_every_signature,
    a_signature_is_acknowledged_only_when_the_journal_has_it,
    a_tag_is_put_only_on_what_a_key_of_each_policy_has_signed,
    a_signature_made_by_cosign_counts_and_is_kept_when_another_is_added,
    what_is_no_signature_is_left_out,
    a_rebuild_brings_signatures_back_and_no_policies,
    an_immutable_tag_of_signatures_stays_and_the_next_signature_is_found,
    an_eviction_takes_signatures_with_their_snapshot_only,
    a_deletion_takes_no_image_that_only_has_the_tag_of_signatures,
    a_manifest_that_is_full_is_not_replaced_by_one_that_no_reader_takes,
    what_is_no_signature_costs_a_reader_no_more_than_signatures_do,
    a_signature_replaces_no_signatures_of_another_snapshot,
    the_key_of_a_policy_finds_a_place_among_signatures_by_others,
    a_pusher_cannot_put_another_image_in_the_place_of_a_policys_signature,
);

fn key() -> PrivateKey {
    PrivateKey::generate().unwrap().0
}

fn other() -> RepositoryName {
    "other/place".parse().unwrap()
}

async fn sign(store: &Store, key: &PrivateKey, digest: Digest) -> pfr_store::Result<usize> {
    let new = key.sign(digest, &repository(), 1_700_000_000_000);
    Ok(store.add_signatures(&repository(), &digest, &[new]).await?.len())
}

async fn is_signed_by(store: &Store, digest: &Digest, key: &PrivateKey) -> bool {
    let keys = [key.public()];
    store.signatures(&repository(), digest).await.unwrap().iter().any(|one| signer(one, digest, &keys).is_some())
}

async fn manifests(store: &Store) -> usize {
    store.signature_list(&repository(), None, 100).await.unwrap().rows.len()
}

async fn set(metadata: &dyn Metadata, policies: Value) {
    let policies: SigningPolicies = serde_json::from_value(json!({"policies": policies})).unwrap();
    policies.check().unwrap();
    metadata.set_signing(policies, None).await.unwrap();
}

async fn put_blob(store: &Store, bytes: &[u8]) -> Digest {
    let digest = Digest::sha256(bytes);
    let body = stream::iter([Ok(bytes::Bytes::copy_from_slice(bytes))]).boxed();
    store.put_blob(&repository(), digest, bytes.len() as u64, body).await.unwrap();
    digest
}

/// A manifest of a signature as `cosign sign` pushes it: without a subject, at a tag.
async fn as_cosign_does(store: &Store, digest: Digest, new: &NewSignature) {
    let config = b"{\"architecture\":\"\"}";
    let mut layer = Layer::of(new);
    layer.annotations.insert("dev.sigstore.cosign/certificate".into(), "PEM".into());
    let (config, _) = (put_blob(store, config).await, put_blob(store, new.payload.as_bytes()).await);
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": [layer],
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": 19},
    });
    let at = signature::tag_of(&digest).unwrap();
    store.put_image(&repository(), serde_json::to_vec(&manifest).unwrap(), None, vec![at]).await.unwrap();
}

async fn signatures_are_one_manifest_that_goes_with_its_snapshot(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    rig.metadata.set_quota(QuotaLimits { snapshots: Some(100), ..QuotaLimits::default() }, None).await.unwrap();
    let (signed, left) = (snapshot(&[1], vec![]), snapshot(&[2], vec![]));
    push(&rig.store, &signed, "a").await.unwrap();
    push(&rig.store, &left, "b").await.unwrap();
    let (digest, keys) = (signed.manifest.digest, [key(), key()]);
    assert_eq!(rig.store.signatures(&repository(), &digest).await.unwrap(), []);
    for (n, key) in keys.iter().enumerate() {
        assert_eq!(sign(&rig.store, key, digest).await.unwrap(), n + 1);
        assert_eq!(sign(&rig.store, key, digest).await.unwrap(), n + 1, "the same again is left out");
        assert_eq!(manifests(&rig.store).await, 1, "each manifest replaces the one before");
    }
    assert_eq!(sign(&rig.store, &keys[0], left.manifest.digest).await.unwrap(), 1);
    for key in &keys {
        assert!(is_signed_by(&rig.store, &digest, key).await);
    }
    let detail = rig.store.detail(&repository(), &digest).await.unwrap();
    assert_eq!(detail.signatures, rig.store.signatures(&repository(), &digest).await.unwrap());
    assert_eq!(detail.signatures[1].key_id, Some(keys[1].public().id()));
    // Two snapshots, and two manifests with signatures.
    assert_eq!(rig.metadata.quota().await.unwrap().unwrap().used_snapshots, 4);
    assert_eq!(rig.store.tags(&repository(), None, 100).await.unwrap().rows.len(), 2, "tags of signatures are no tags of snapshots");
    rig.collect().await;
    assert!(is_signed_by(&rig.store, &digest, &keys[0]).await, "a collection leaves them");
    let used = async || rig.metadata.quota().await.unwrap().unwrap().used_bytes;
    let both = BTreeMap::from([(repository(), BTreeSet::from([digest, left.manifest.digest]))]);
    let (before, freed) = (used().await, rig.store.freed_by(&both, &Budget::default()).await.unwrap().unwrap());

    rig.store.delete_snapshot(&repository(), &digest).await.unwrap();
    assert_eq!((manifests(&rig.store).await, rig.metadata.quota().await.unwrap().unwrap().used_snapshots), (1, 2));
    assert_eq!(rig.store.signatures(&repository(), &digest).await.unwrap(), []);
    assert!(is_signed_by(&rig.store, &left.manifest.digest, &keys[0]).await);
    rig.store.delete_snapshot(&repository(), &left.manifest.digest).await.unwrap();
    rig.collect().await;
    assert_eq!((freed.snapshots, freed.stored_bytes), (2, before - used().await), "what they free was said before, signatures included");
    let audit = rig.metadata.audit(false).await.unwrap();
    assert_eq!(audit.wrong, 0, "{:#?}", audit.discrepancies);
    let found = rig.metadata.find(vec![digest, left.manifest.digest]).await.unwrap();
    assert!(found.iter().all(Option::is_none), "nothing of it is stored any more");
    // Without its snapshot none can be added.
    let refused = sign(&rig.store, &keys[0], digest).await.unwrap_err();
    assert!(matches!(refused.code(), ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown), "{refused}");
}

async fn a_deletion_of_many_takes_the_references_of_each(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let mut snapshots = Vec::new();
    for n in 0..4 {
        let s = snapshot(&[n], vec![]);
        push(&rig.store, &s, &format!("t{n}")).await.unwrap();
        snapshots.push(s.manifest.digest);
    }
    // The first by its subject, the second by its tag, the third by both, the last not at all.
    sign(&rig.store, &key(), snapshots[0]).await.unwrap();
    for n in [1, 2] {
        as_cosign_does(&rig.store, snapshots[n], &key().sign(snapshots[n], &repository(), 1_700_000_000_000)).await;
    }
    sign(&rig.store, &key(), snapshots[2]).await.unwrap();
    let deletion = async |of: &[Digest]| {
        let (found, mut references) = rig.metadata.deletion(repository(), of.to_vec()).await.unwrap();
        references.sort_unstable();
        (found, references)
    };
    let (mut found, mut each) = (0, Vec::new());
    for (digest, signed) in snapshots.iter().zip([true, true, true, false]) {
        let (one, references) = deletion(&[*digest]).await;
        assert_eq!(references.len() > 1, signed, "{references:?}");
        found += one;
        each.extend(references);
    }
    each.sort_unstable();
    let all: Vec<Digest> = snapshots.iter().copied().chain([Digest::sha256(b"absent")]).collect();
    assert_eq!(deletion(&all).await, (found, each));
    assert_eq!(deletion(&[]).await, (0, vec![]));
}

async fn two_that_sign_at_once_are_both_kept(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let (another, keys) = (rig.another().await, [key(), key(), key()]);
    let digest = s.manifest.digest;
    let (first, second, third) =
        tokio::join!(sign(&rig.store, &keys[0], digest), sign(&another, &keys[1], digest), sign(&rig.store, &keys[2], digest));
    assert!(first.is_ok() && second.is_ok() && third.is_ok(), "{first:?} {second:?} {third:?}");
    for key in &keys {
        assert!(is_signed_by(&rig.store, &digest, key).await);
    }
    let at = signature::tag_of(&digest).unwrap();
    let at = rig.store.find_manifest(&repository(), pfr_store::ManifestName::Tag(at)).await.unwrap().unwrap();
    let (bytes, _) = rig.store.read_image(&at.digest).await.unwrap();
    assert_eq!(signature::layers(&bytes, &rig.store.options().limits).unwrap().len(), 3, "cosign finds all of them at the tag");
    assert_eq!(rig.metadata.audit(false).await.unwrap().wrong, 0);
}

async fn a_kill_between_two_manifests_leaves_every_signature(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let (digest, keys) = (s.manifest.digest, [key(), key(), key()]);
    sign(&rig.store, &keys[0], digest).await.unwrap();
    let watched = Watched::new(Arc::clone(&rig.metadata));
    let store = Store::new(Arc::clone(&rig.packs), Arc::clone(&watched) as Arc<dyn Metadata>, rig.options());
    // The tag has moved, and the manifest before is still there.
    watched.fail("change_names", 1);
    assert_eq!(sign(&store, &keys[1], digest).await.unwrap(), 2, "none is listed twice");
    assert_eq!(manifests(&rig.store).await, 2);
    // Nothing has moved.
    watched.fail("put_image", 1);
    assert_eq!(sign(&store, &keys[2], digest).await.unwrap_err().code(), ErrorCode::Unavailable);
    assert_eq!(rig.store.signatures(&repository(), &digest).await.unwrap().len(), 2);
    assert_eq!(sign(&store, &keys[2], digest).await.unwrap(), 3);
    rig.store.delete_snapshot(&repository(), &digest).await.unwrap();
    let left = rig.store.signature_list(&repository(), None, 100).await;
    assert_eq!(left.unwrap_err().code(), ErrorCode::RepositoryUnknown, "all of them went with it");
}

async fn a_signature_is_acknowledged_only_when_the_journal_has_it(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let (digest, key) = (s.manifest.digest, key());
    let watched = Watched::new(Arc::clone(&rig.metadata));
    let store = Store::new(Arc::clone(&rig.packs), Arc::clone(&watched) as Arc<dyn Metadata>, rig.options());
    // A kill after the transaction, and before the journal.
    watched.fail("journaled", 1);
    assert_eq!(sign(&store, &key, digest).await.unwrap_err().code(), ErrorCode::Unavailable);
    assert!(!rig.metadata.unjournaled(10).await.unwrap().is_empty());
    assert_eq!(sign(&store, &key, digest).await.unwrap(), 1, "it is there");
    assert_eq!(rig.metadata.unjournaled(10).await.unwrap(), []);
}

async fn a_tag_is_put_only_on_what_a_key_of_each_policy_has_signed(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let (one, two) = (snapshot(&[1], vec![]), snapshot(&[2], vec![]));
    let (team, releases, stranger) = (key(), key(), key());
    push(&rig.store, &one, "before").await.unwrap();
    let policies = json!([
        {"name": "team", "repositories": "team/*", "tags": ["v*", "prod"], "keys": [team.public()]},
        {"name": "releases", "repositories": "*", "tags": ["v*"], "keys": [stranger.public(), releases.public()]},
    ]);
    set(&*rig.metadata, policies.clone()).await;
    // Another tag, and a push without one.
    push(&rig.store, &two, "wip").await.unwrap();
    let (first, second) = (one.manifest.digest, two.manifest.digest);
    let put = async |name: &str, digest| rig.store.put_tag(&repository(), tag(name), digest, None).await;
    let refusal = |done: pfr_store::Result<()>| match done.unwrap_err() {
        Error::SignatureRequired { policy, .. } => policy,
        error => panic!("{error}"),
    };
    assert_eq!(refusal(put("prod", second).await), "team");
    sign(&rig.store, &stranger, second).await.unwrap();
    assert_eq!(refusal(put("prod", second).await), "team");
    sign(&rig.store, &team, second).await.unwrap();
    put("prod", second).await.unwrap();
    put("v1", second).await.unwrap();
    // The first of the policies that is not satisfied is named.
    sign(&rig.store, &team, first).await.unwrap();
    assert_eq!(refusal(put("v1", first).await), "releases");
    assert_eq!(rig.store.tag(&repository(), &tag("v1")).await.unwrap().digest, second, "it stays where it was");
    // Forks are tags: all or none.
    assert_eq!(refusal(rig.store.fork(&repository(), first, "v", 3).await.map(drop)), "releases");
    assert_eq!(rig.store.fork(&repository(), second, "v", 3).await.unwrap().len(), 3);
    // A push with such a tag lands nowhere; without the tag it does, and is signed then.
    let third = snapshot(&[3], vec![]);
    let refused = push(&rig.store, &third, "prod").await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::SignatureRequired);
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.store.ingest(&session.id, pieces(&third.stream(), 777)).await.unwrap();
    rig.store.commit(&session.id, third.manifest.digest, None, None).await.unwrap();
    sign(&rig.store, &team, third.manifest.digest).await.unwrap();
    put("prod", third.manifest.digest).await.unwrap();
    // A tag that is where it should be is not put again, by whatever policy.
    set(&*rig.metadata, json!([{"name": "all", "repositories": "*", "keys": [releases.public()]}])).await;
    put("prod", third.manifest.digest).await.unwrap();
    assert_eq!(refusal(put("other", third.manifest.digest).await), "all");
    // Images as well.
    let (config, manifest) = (put_blob(&rig.store, b"{}").await, "application/vnd.oci.image.manifest.v1+json");
    let image =
        json!({"schemaVersion": 2, "mediaType": manifest, "layers": [], "config": {"mediaType": "x/y", "digest": config, "size": 2}});
    let put_image = async |name| rig.store.put_image(&repository(), serde_json::to_vec(&image).unwrap(), None, name).await;
    assert_eq!(refusal(put_image(vec![tag("image")]).await.map(drop)), "all");
    put_image(vec![]).await.unwrap();
    // An administrator is bound too, and changes the policy instead.
    let record = AuditRecord { operation: "put_tag".into(), ..AuditRecord::default() };
    let admin = rig.store.audited(AuditEntry { record, status_if_there: None, of_registry: false, overrides: true });
    let change = NameChange::PutTags { snapshot: first, moves: vec![TagMove { tag: tag("mine"), expected: None }] };
    assert_eq!(refusal(admin.change_names(&repository(), change, None).await), "all");
    let log = rig.metadata.audit_records(AuditFilter::default(), None, 10).await.unwrap();
    assert!(log.rows.iter().all(|record| record.operation != "put_tag"), "nothing was done");
    // Policies that change between the check and the transaction: the check is made again.
    let version = rig.metadata.signing().await.unwrap().version;
    set(&*rig.metadata, policies).await;
    let known = Some(pfr_store::Signed { version, policies: vec!["team".into()], replaced: vec![] });
    let change = NameChange::PutTags { snapshot: first, moves: vec![TagMove { tag: tag("prod"), expected: None }] };
    let old = rig.metadata.change_names(repository(), change, None, rig.options().lease, None, known).await.unwrap_err();
    assert_eq!(old.code(), ErrorCode::SignatureRequired, "what was found by other policies says nothing");
    put("prod", first).await.unwrap();
    // A signature in another repository says nothing here.
    push_to(&rig.store, &other(), &two).await;
    let elsewhere = rig.store.put_tag(&other(), tag("v1"), second, None).await.unwrap_err();
    assert_eq!(elsewhere.code(), ErrorCode::SignatureRequired);
}

async fn push_to(store: &Store, repository: &RepositoryName, snapshot: &Snapshot) {
    let session = store.open_push(repository).await.unwrap();
    store.ingest(&session.id, pieces(&snapshot.stream(), 777)).await.unwrap();
    store.commit(&session.id, snapshot.manifest.digest, None, None).await.unwrap();
}

async fn a_signature_made_by_cosign_counts_and_is_kept_when_another_is_added(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let (digest, theirs, ours) = (s.manifest.digest, key(), key());
    set(&*rig.metadata, json!([{"name": "all", "repositories": "*", "keys": [theirs.public()]}])).await;
    as_cosign_does(&rig.store, digest, &theirs.sign(digest, &repository(), 1)).await;
    rig.store.put_tag(&repository(), tag("signed"), digest, None).await.unwrap();
    assert_eq!(sign(&rig.store, &ours, digest).await.unwrap(), 2);
    let list = rig.store.signature_list(&repository(), None, 100).await.unwrap().rows;
    assert_eq!(list.iter().map(|row| row.snapshot).collect::<Vec<_>>(), [digest]);
    let (bytes, image) = rig.store.read_image(&list[0].manifest).await.unwrap();
    assert_eq!(image.subject, Some(digest));
    let layers = signature::layers(&bytes, &rig.store.options().limits).unwrap();
    assert_eq!(layers[0].annotations["dev.sigstore.cosign/certificate"], "PEM");
    assert!(is_signed_by(&rig.store, &digest, &theirs).await && is_signed_by(&rig.store, &digest, &ours).await);
    rig.store.delete_snapshot(&repository(), &digest).await.unwrap();
    assert_eq!(rig.store.signature_list(&repository(), None, 100).await.unwrap_err().code(), ErrorCode::RepositoryUnknown);
}

async fn what_is_no_signature_is_left_out(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let (digest, mine) = (s.manifest.digest, key());
    let good = mine.sign(digest, &repository(), 1);
    for wrong in [
        NewSignature { payload: "{}".into(), ..good.clone() },
        NewSignature { signature: "%".into(), ..good.clone() },
        mine.sign(Digest::sha256(b"other"), &repository(), 1),
    ] {
        let refused = rig.store.add_signatures(&repository(), &digest, &[good.clone(), wrong]).await.unwrap_err();
        assert_eq!(refused.code(), ErrorCode::InvalidDocument, "{refused}");
    }
    assert_eq!(manifests(&rig.store).await, 0, "all or none");
    // An index at the tag, a payload that is larger than it says, a signature of other bytes.
    let at = signature::tag_of(&digest).unwrap();
    let index = json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []});
    rig.store.put_image(&repository(), serde_json::to_vec(&index).unwrap(), None, vec![at.clone()]).await.unwrap();
    assert_eq!(rig.store.signatures(&repository(), &digest).await.unwrap(), []);
    let large = "x".repeat(1 << 20);
    let mut lies = Layer::of(&NewSignature::new(large.clone(), &[1; 64]));
    lies.size = 10;
    let (manifest, config) = signature::manifest(digest, 1, &[lies]);
    put_blob(&rig.store, large.as_bytes()).await;
    put_blob(&rig.store, &config).await;
    // A store that believes the size refuses the manifest; one that does not leaves the layer out.
    let _ = rig.store.put_image(&repository(), manifest, None, vec![]).await;
    assert_eq!(rig.store.signatures(&repository(), &digest).await.unwrap(), []);
    // The index only loses the tag.
    assert_eq!(sign(&rig.store, &mine, digest).await.unwrap(), 1);
    let index = Digest::sha256(&serde_json::to_vec(&index).unwrap());
    assert!(rig.store.find_manifest(&repository(), pfr_store::ManifestName::Digest(index)).await.unwrap().is_some());
    // Tags that only look like those of signatures make no empty page that leads to another.
    for n in 0..3 {
        let (config, name) = (put_blob(&rig.store, b"{}").await, tag(&format!("sha256-{n}{}.sig", "x".repeat(63))));
        let image = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": [],
            "config": {"mediaType": "x/y", "digest": config, "size": 2}, "annotations": {"n": n.to_string()},
        });
        rig.store.put_image(&repository(), serde_json::to_vec(&image).unwrap(), None, vec![name]).await.unwrap();
    }
    let (mut after, mut seen) = (None, 0);
    loop {
        let page = rig.store.signature_list(&repository(), after, 1).await.unwrap();
        seen += page.rows.len();
        assert!(!page.rows.is_empty() || page.next.is_none());
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen, manifests(&rig.store).await);
    // Too many.
    let many: Vec<NewSignature> = (0..MOST as u64).map(|n| mine.sign(digest, &repository(), (n + 10) * 1000)).collect();
    let refused = rig.store.add_signatures(&repository(), &digest, &many).await.unwrap_err();
    assert!(refused.to_string().contains("at most 100"), "{refused}");
    assert!(is_signed_by(&rig.store, &digest, &mine).await);
    assert!(!is_signed_by(&rig.store, &digest, &key()).await);
}

async fn a_rebuild_brings_signatures_back_and_no_policies(backend: Backend) {
    let rig = Rig::new(backend).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let (digest, mine) = (s.manifest.digest, key());
    sign(&rig.store, &mine, digest).await.unwrap();
    sign(&rig.store, &key(), digest).await.unwrap();
    set(&*rig.metadata, json!([{"name": "all", "repositories": "*", "keys": [PublicKey::new([1; 32])]}])).await;
    let new = rig.over_memory(rig.fork().await).await;
    new.store.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!(new.store.signatures(&repository(), &digest).await.unwrap().len(), 2);
    assert!(is_signed_by(&new.store, &digest, &mine).await);
    assert_eq!(manifests(&new.store).await, 1);
    assert_eq!(new.metadata.signing().await.unwrap().policies, SigningPolicies::default());
    new.store.delete_snapshot(&repository(), &digest).await.unwrap();
    assert_eq!(new.metadata.audit(false).await.unwrap().wrong, 0);
}

async fn an_immutable_tag_of_signatures_stays_and_the_next_signature_is_found(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let policies = json!({"policies": [{"name": "all", "repositories": "*", "immutable_tags": ["*"]}]});
    rig.metadata.set_retention(serde_json::from_value(policies).unwrap(), None).await.unwrap();
    let (digest, keys) = (s.manifest.digest, [key(), key()]);
    sign(&rig.store, &keys[0], digest).await.unwrap();
    assert_eq!(sign(&rig.store, &keys[1], digest).await.unwrap(), 2);
    assert_eq!(manifests(&rig.store).await, 2);
    for key in &keys {
        assert!(is_signed_by(&rig.store, &digest, key).await);
    }
}

async fn an_eviction_takes_signatures_with_their_snapshot_only(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    sign(&rig.store, &key(), s.manifest.digest).await.unwrap();
    let evictable = rig.metadata.evictable(10).await.unwrap();
    assert_eq!(evictable.iter().map(|row| row.digest).collect::<Vec<_>>(), [s.manifest.digest]);
    assert!(rig.metadata.evict_snapshot(evictable[0].clone()).await.unwrap());
    assert_eq!(rig.store.signature_list(&repository(), None, 100).await.unwrap_err().code(), ErrorCode::RepositoryUnknown);
}

/// An image that says `n`, at these tags.
async fn put_image(store: &Store, n: u32, tags: Vec<pfr_schema::Tag>) -> Digest {
    let config = put_blob(store, b"{}").await;
    let image = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": [],
        "config": {"mediaType": "x/y", "digest": config, "size": 2}, "annotations": {"n": n.to_string()},
    });
    store.put_image(&repository(), serde_json::to_vec(&image).unwrap(), None, tags).await.unwrap()
}

async fn a_deletion_takes_no_image_that_only_has_the_tag_of_signatures(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let snapshots = [1, 2, 3].map(|n| snapshot(&[n], vec![]));
    let mut digests = Vec::new();
    for (s, name) in snapshots.iter().zip(["a", "b", "c"]) {
        push(&rig.store, s, name).await.unwrap();
        digests.push(s.manifest.digest);
    }
    let at = |n: usize| signature::tag_of(&digests[n]).unwrap();
    let is_there = async |digest| rig.store.find_manifest(&repository(), pfr_store::ManifestName::Digest(digest)).await.unwrap().is_some();
    // A push may put the tag on an image that has another tag, or that an index lists.
    let release = put_image(&rig.store, 1, vec![tag("release")]).await;
    assert_eq!(put_image(&rig.store, 1, vec![at(0)]).await, release);
    let listed = put_image(&rig.store, 2, vec![at(1)]).await;
    let size = rig.store.read(&listed).await.unwrap().len();
    let index = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": listed, "size": size}],
    });
    rig.store.put_image(&repository(), serde_json::to_vec(&index).unwrap(), None, vec![tag("index")]).await.unwrap();
    as_cosign_does(&rig.store, digests[2], &key().sign(digests[2], &repository(), 1)).await;
    let by_cosign = rig.store.find_manifest(&repository(), pfr_store::ManifestName::Tag(at(2))).await.unwrap().unwrap().digest;
    for digest in &digests {
        rig.store.delete_snapshot(&repository(), digest).await.unwrap();
    }
    assert!(is_there(release).await && is_there(listed).await);
    let tags = rig.store.all_tags(&repository(), None, 100).await.unwrap().rows;
    assert!(tags.contains(&tag("release")), "{tags:?}");
    assert!(!is_there(by_cosign).await, "signatures without a subject go");
    assert_eq!(rig.metadata.audit(false).await.unwrap().wrong, 0);
}

/// Pushes layers as signatures of a snapshot, as any program may.
async fn put_layers(store: &Store, digest: Digest, payloads: &[&[u8]], layers: &[Layer], tags: Vec<pfr_schema::Tag>) {
    let (manifest, config) = signature::manifest(digest, 1, layers);
    put_blob(store, &config).await;
    for payload in payloads {
        put_blob(store, payload).await;
    }
    store.put_image(&repository(), manifest, None, tags).await.unwrap();
}

/// The layer of a payload that is no text.
fn no_text(n: u8) -> ([u8; 2], Layer) {
    let payload = [0xff, n];
    let layer = Layer::of(&NewSignature::new("x".into(), &[1; 64]));
    (payload, Layer { digest: Digest::sha256(&payload), size: 2, ..layer })
}

async fn a_manifest_that_is_full_is_not_replaced_by_one_that_no_reader_takes(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let (digest, mine, at) = (s.manifest.digest, key(), signature::tag_of(&s.manifest.digest).unwrap());
    // One signature, a hundred times.
    let theirs = key().sign(digest, &repository(), 1);
    let same = vec![Layer::of(&theirs); MOST];
    put_layers(&rig.store, digest, &[theirs.payload.as_bytes()], &same, vec![at.clone()]).await;
    assert_eq!(sign(&rig.store, &mine, digest).await.unwrap(), 2, "one stays, and one is added");
    assert!(is_signed_by(&rig.store, &digest, &mine).await);
    // A good one among a hundred layers of which the others are nothing.
    let (payloads, mut layers): (Vec<[u8; 2]>, Vec<Layer>) = (1..100).map(no_text).unzip();
    let good = mine.sign(digest, &repository(), 7_000);
    layers.insert(0, Layer::of(&good));
    assert_eq!(layers.len(), MOST);
    let payloads: Vec<&[u8]> = payloads.iter().map(|bytes| &bytes[..]).chain([good.payload.as_bytes()]).collect();
    put_layers(&rig.store, digest, &payloads, &layers, vec![at]).await;
    let refused = sign(&rig.store, &key(), digest).await.unwrap_err();
    assert!(refused.to_string().contains("at most 100"), "{refused}");
    assert!(is_signed_by(&rig.store, &digest, &mine).await);
}

async fn what_is_no_signature_costs_a_reader_no_more_than_signatures_do(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let digest = s.manifest.digest;
    let all: Vec<([u8; 2], Layer)> = (0..150).map(no_text).collect();
    for part in all.chunks(50) {
        let payloads: Vec<&[u8]> = part.iter().map(|(payload, _)| &payload[..]).collect();
        let mut layers: Vec<Layer> = part.iter().map(|(_, layer)| layer.clone()).collect();
        put_layers(&rig.store, digest, &payloads, &layers, vec![]).await;
        // The same layers again, in another manifest.
        layers.reverse();
        put_layers(&rig.store, digest, &[], &layers, vec![]).await;
    }
    let watched = Watched::new(Arc::clone(&rig.metadata));
    let store = Store::new(Arc::clone(&rig.packs), Arc::clone(&watched) as Arc<dyn Metadata>, rig.options());
    assert_eq!(store.signatures(&repository(), &digest).await.unwrap(), []);
    assert!(watched.calls() < 5 * MOST, "{} transactions", watched.calls());
}

async fn a_signature_replaces_no_signatures_of_another_snapshot(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let (one, two, mine) = (snapshot(&[1], vec![]), snapshot(&[2], vec![]), key());
    push(&rig.store, &one, "a").await.unwrap();
    push(&rig.store, &two, "b").await.unwrap();
    let (first, second) = (one.manifest.digest, two.manifest.digest);
    // Signatures of the second snapshot, at the tag of those of the first.
    let good = mine.sign(second, &repository(), 1);
    let at = signature::tag_of(&first).unwrap();
    put_layers(&rig.store, second, &[good.payload.as_bytes()], &[Layer::of(&good)], vec![at]).await;
    sign(&rig.store, &mine, first).await.unwrap();
    assert!(is_signed_by(&rig.store, &first, &mine).await && is_signed_by(&rig.store, &second, &mine).await);
    assert_eq!(manifests(&rig.store).await, 2);
    assert_eq!(rig.metadata.audit(false).await.unwrap().wrong, 0);
}

async fn the_key_of_a_policy_finds_a_place_among_signatures_by_others(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let (digest, operator, pusher) = (s.manifest.digest, key(), key());
    set(&*rig.metadata, json!([{"name": "v", "repositories": "*", "tags": ["v*"], "keys": [operator.public()]}])).await;
    let many: Vec<NewSignature> = (0..MOST as u64).map(|n| pusher.sign(digest, &repository(), n * 1000)).collect();
    // Manifests that refer to the snapshot, older than what follows, and all places at the tag.
    let all: Vec<Layer> = many.iter().map(Layer::of).collect();
    let payloads: Vec<&[u8]> = many.iter().map(|one| one.payload.as_bytes()).collect();
    put_layers(&rig.store, digest, &payloads, &all, vec![]).await;
    let at = signature::tag_of(&digest).unwrap();
    let reversed: Vec<Layer> = all.iter().rev().cloned().collect();
    put_layers(&rig.store, digest, &[], &reversed, vec![at]).await;
    assert_eq!(rig.store.signatures(&repository(), &digest).await.unwrap().len(), MOST);
    let another = rig.store.add_signatures(&repository(), &digest, &[pusher.sign(digest, &repository(), 500_000)]).await.unwrap_err();
    assert!(another.to_string().contains("at most 100"), "{another}");

    let sign_at = async |seconds: u64| {
        let new = operator.sign(digest, &repository(), seconds * 1000);
        rig.store.add_signatures(&repository(), &digest, &[new]).await.unwrap()
    };
    assert_eq!(sign_at(10).await.len(), MOST);
    assert!(is_signed_by(&rig.store, &digest, &operator).await);
    rig.store.put_tag(&repository(), tag("v1"), digest, None).await.unwrap();
    // The next one by that key takes its own place, and an old one that comes late takes none.
    for seconds in [20, 10, 20] {
        let all = sign_at(seconds).await;
        let own: Vec<u64> =
            all.iter().filter(|one| signer(one, &digest, &[operator.public()]).is_some()).filter_map(|one| one.signed_at).collect();
        assert_eq!((all.len(), own), (MOST, vec![20_000]), "{seconds}");
    }
    // Others take no place from it.
    let refused = rig.store.add_signatures(&repository(), &digest, &[pusher.sign(digest, &repository(), 600_000)]).await.unwrap_err();
    assert!(refused.to_string().contains("at most 100"), "{refused}");
    assert!(is_signed_by(&rig.store, &digest, &operator).await);
    assert_eq!(rig.metadata.audit(false).await.unwrap().wrong, 0);
}

async fn a_pusher_cannot_put_another_image_in_the_place_of_a_policys_signature(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    let (digest, operator, second, pusher) = (s.manifest.digest, key(), key(), key());
    let keys = json!([operator.public(), second.public()]);
    set(&*rig.metadata, json!([{"name": "v", "repositories": "*", "tags": ["v*"], "keys": keys}])).await;
    // What is there before the operator signs keeps nothing from that.
    as_cosign_does(&rig.store, digest, &pusher.sign(digest, &repository(), 1)).await;
    sign(&rig.store, &operator, digest).await.unwrap();
    sign(&rig.store, &second, digest).await.unwrap();
    let at = signature::tag_of(&digest).unwrap();
    let put = async |subject: Digest, signers: &[&PrivateKey]| {
        let new: Vec<NewSignature> = signers.iter().map(|key| key.sign(digest, &repository(), 2000)).collect();
        for one in &new {
            put_blob(&rig.store, one.payload.as_bytes()).await;
        }
        let (manifest, config) = signature::manifest(subject, 1, &new.iter().map(Layer::of).collect::<Vec<_>>());
        put_blob(&rig.store, &config).await;
        rig.store.put_image(&repository(), manifest, None, vec![at.clone()]).await
    };
    let too_few: [&[&PrivateKey]; 3] = [&[], &[&pusher], &[&pusher, &operator]];
    for signers in too_few {
        let refused = put(digest, signers).await.unwrap_err();
        assert_eq!(refused.code(), ErrorCode::SignatureRequired, "{refused}");
    }
    let elsewhere = put(Digest::sha256(b"another"), &[&operator, &second]).await.unwrap_err();
    assert_eq!(elsewhere.code(), ErrorCode::SignatureRequired, "no signature could be added to it");
    assert!(is_signed_by(&rig.store, &digest, &operator).await && is_signed_by(&rig.store, &digest, &second).await);
    // Signatures by all of the keys may come in another manifest, and others may be added.
    put(digest, &[&second, &operator]).await.unwrap();
    sign(&rig.store, &pusher, digest).await.unwrap();
    rig.store.put_tag(&repository(), tag("v1"), digest, None).await.unwrap();
    // Without a policy any image may have the tag.
    set(&*rig.metadata, json!([])).await;
    put(digest, &[&pusher]).await.unwrap();
    assert_eq!(rig.metadata.audit(false).await.unwrap().wrong, 0);
}
