//! Checkpoints in a store: what is accepted, what a proof covers, and which snapshot given tokens can be resumed from.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod common;

use common::{blob_frame, pieces, repository, store, stream};
use pfr_schema::api::{MatchRequest, MatchResponse};
use pfr_schema::checkpoint::{ABI, Checkpoint, Dtype, Key, Layout, Tensor};
use pfr_schema::snapshot::{Descriptor, Manifest, RANK, SnapshotConfig};
use pfr_schema::tree::{Document, Group, GroupKind, PageTree};
use pfr_schema::{Digest, ErrorCode, Kind, Limits, media_type, prefix};
use pfr_store::{Error, Result, Store, document_frame};
use std::collections::BTreeMap;

fn layout(strides: &[i64]) -> Layout {
    Layout { tag: "test".into(), strides: Some(strides.to_vec()), offset: Some(0) }
}

fn tensor(name: &str, shape: &[u64], layout: Layout, payload: &[u8]) -> Tensor {
    let limits = Limits::default();
    Tensor::describe(name.into(), "recurrent".into(), None, shape.to_vec(), Dtype::F32, Dtype::F32, layout, payload, &limits).unwrap()
}

fn floats(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| (i as f32 * 0.5).to_le_bytes()).collect()
}

fn fingerprint() -> Digest {
    Digest::sha256(b"deployment")
}

fn key(tokens: &[u32], salt: &str, adapter: Option<&str>) -> Key {
    let prefix = prefix::key(&fingerprint(), salt, adapter, tokens);
    let adapter = adapter.map(str::to_owned);
    Key { scheme: prefix::SCHEME.into(), prefix, tokens: tokens.len() as u64, alignment: 1, salt: salt.into(), adapter }
}

/// A snapshot of checkpoints and tokens; parts may be changed before they are pushed.
struct Made {
    config: SnapshotConfig,
    checkpoints: Vec<(Option<&'static str>, Checkpoint)>,
    payloads: Vec<Vec<u8>>,
    tokens: Option<Vec<u32>>,
}

fn made(tokens: &[u32]) -> Made {
    let key = key(tokens, "", None);
    let config = SnapshotConfig {
        fingerprint: Some(fingerprint()),
        boundary: Some(key.tokens),
        prefix: Some(key.clone()),
        ..SnapshotConfig::default()
    };
    let payload = floats(6);
    let tensors = vec![tensor("state", &[2, 3], layout(&[3, 1]), &payload)];
    let checkpoint = Checkpoint { abi: ABI.into(), key, tensors };
    Made { config, checkpoints: vec![(None, checkpoint)], payloads: vec![payload], tokens: Some(tokens.to_vec()) }
}

impl Made {
    fn of(tensors: Vec<Tensor>, payloads: Vec<Vec<u8>>) -> Self {
        let mut made = made(&[1, 2, 3]);
        (made.checkpoints[0].1.tensors, made.payloads) = (tensors, payloads);
        made
    }

    /// Everything but the manifest, in the order in which it can be stored, and the manifest.
    fn documents(&self) -> (Vec<Document>, Document) {
        let config = Document::new(Kind::Blob, self.config.to_bytes());
        let (mut documents, mut layers) = (vec![], vec![]);
        for (rank, checkpoint) in &self.checkpoints {
            let document = Document::new(Kind::Checkpoint, checkpoint.to_bytes());
            let mut layer = Descriptor::of(media_type::CHECKPOINT, &document);
            layer.annotations = rank.map(|rank| (RANK.to_owned(), rank.to_owned())).into_iter().collect();
            layers.push(layer);
            documents.push(document);
        }
        if let Some(tokens) = &self.tokens {
            let tokens = Document::new(Kind::Blob, tokens.iter().flat_map(|token| token.to_le_bytes()).collect());
            layers.push(Descriptor::of(media_type::TOKENS, &tokens));
            documents.push(tokens);
        }
        let manifest = Manifest::snapshot(&config, layers, BTreeMap::new()).to_document();
        documents.push(config);
        (documents, manifest)
    }

    async fn push(&self, store: &Store) -> Result<Digest> {
        let session = store.open_push(&repository()).await?;
        let (documents, manifest) = self.documents();
        let frames = self.payloads.iter().map(|p| blob_frame(p)).chain(documents.iter().chain([&manifest]).map(document_frame));
        store.ingest(&session.id, pieces(&stream(frames), 100_000)).await?;
        store.commit(&session.id, manifest.digest, None, None).await?;
        Ok(manifest.digest)
    }
}

#[tokio::test]
async fn a_checkpoint_is_taken_only_with_payloads_of_the_stated_length() {
    let store = store().await;
    let whole = made(&[1, 2, 3]);
    let mut without = made(&[1, 2, 3]);
    without.payloads.clear();
    let error = without.push(&store).await.unwrap_err();
    assert!(matches!(&error, Error::Missing { missing, .. } if *missing == [Digest::sha256(&whole.payloads[0])]), "{error}");
    // The right hash and another length.
    let mut longer = made(&[1, 2, 3]);
    longer.checkpoints[0].1.tensors[0].payload_bytes += 4;
    let error = longer.push(&store).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::LengthMismatch, "{error}");
    // A frame that says it is the payload and is not.
    let session = store.open_push(&repository()).await.unwrap();
    let mut lying = blob_frame(&whole.payloads[0]).to_vec();
    let at = lying.len() - 6;
    lying[at] ^= 1;
    assert!(store.ingest(&session.id, pieces(&stream([lying.into()]), 100)).await.is_err());
    whole.push(&store).await.unwrap();
}

#[tokio::test]
async fn a_proof_computes_every_value_that_can_be_computed_and_counts_the_others() {
    let store = store().await;
    let opaque = Layout { tag: "vendor".into(), strides: None, offset: None };
    let (plain, large) = (floats(6), floats(3 << 20));
    // 12 MiB pass in pieces: once in order, once from a buffer.
    let tensors = vec![
        tensor("plain", &[2, 3], layout(&[3, 1]), &plain),
        tensor("transposed", &[3, 2], layout(&[1, 3]), &plain),
        tensor("opaque", &[7], opaque, &plain),
        tensor("large", &[3, 1 << 20], layout(&[1 << 20, 1]), &large),
        tensor("large, some", &[1 << 10, 5], layout(&[3 << 10, 2]), &large),
        tensor("large, transposed", &[1 << 20, 3], layout(&[1, 1 << 20]), &large),
    ];
    let digest = Made::of(tensors, vec![plain, large]).push(&store).await.unwrap();
    let verified = store.verify(&digest, &mut |_| ()).await.unwrap();
    assert_eq!((verified.values_computed, verified.values_attested), (5, 1));
}

#[tokio::test]
async fn a_wrong_value_hash_is_found_and_its_tensor_named() {
    let large = floats(3 << 20);
    let other = tensor("other", &[1], layout(&[1]), &floats(1)).value_hash;
    for (name, payload, shape, strides) in [
        ("small", floats(6), vec![2, 3], vec![3, 1]),
        ("large-in-order", large.clone(), vec![3, 1 << 20], vec![1 << 20, 1]),
        ("large-transposed", large, vec![1 << 20, 3], vec![1, 1 << 20]),
    ] {
        let store = store().await;
        let mut wrong = tensor(name, &shape, layout(&strides), &payload);
        wrong.value_hash = other;
        let made = Made::of(vec![wrong], vec![payload]);
        let checkpoint = made.documents().0[0].digest;
        let digest = made.push(&store).await.unwrap();
        let error = store.verify(&digest, &mut |_| ()).await.unwrap_err();
        assert!(matches!(&error, Error::WrongValue { checkpoint: found, .. } if *found == checkpoint), "{error}");
        assert!(error.to_string().contains(name) && error.code() == ErrorCode::ValueHashMismatch, "{error}");
    }
}

#[tokio::test]
async fn a_value_that_its_type_cannot_hold_is_found() {
    let store = store().await;
    let payload = floats(6);
    let mut wrong = tensor("state", &[2, 3], layout(&[3, 1]), &payload);
    wrong.logical_dtype = Dtype::I32;
    let digest = Made::of(vec![wrong], vec![payload]).push(&store).await.unwrap();
    let error = store.verify(&digest, &mut |_| ()).await.unwrap_err().to_string();
    assert!(error.contains("\"state\", element [0, 1]: 5e-1 in f32 cannot be said in i32"), "{error}");
}

#[tokio::test]
async fn documents_that_contradict_each_other_are_not_committed() {
    let store = store().await;
    let good = || made(&[1, 2, 3]);
    good().push(&store).await.unwrap();
    let mut boundary = good();
    boundary.config.boundary = Some(4);
    let mut prefix = good();
    prefix.config.prefix = Some(key(&[1, 2, 4], "", None));
    let mut twice = good();
    let mut second = twice.checkpoints[0].1.clone();
    second.tensors[0].name = "second".into();
    twice.checkpoints = vec![(None, twice.checkpoints[0].1.clone()), (Some("0"), second.clone())];
    let mut spelt = good();
    spelt.checkpoints[0].0 = Some("one");
    let mut later = good();
    (later.config.prefix, later.config.boundary) = (None, None);
    let mut other = second.clone();
    other.key = key(&[1, 2], "", None);
    later.checkpoints.push((Some("1"), other));
    for (what, made) in [("boundary", boundary), ("prefix", prefix), ("twice", twice), ("spelt", spelt), ("later", later)] {
        let error = made.push(&store).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidDocument, "{what}: {error}");
    }
    let mut ranks = good();
    ranks.checkpoints.push((Some("1"), second));
    ranks.push(&store).await.unwrap();
}

fn request(tokens: &[u32]) -> MatchRequest {
    MatchRequest { tokens: tokens.to_vec(), fingerprint: fingerprint(), salt: String::new(), adapter: None }
}

async fn ask(store: &Store, request: &MatchRequest) -> MatchResponse {
    store.match_prefix(&repository(), request).await.unwrap()
}

#[tokio::test]
async fn the_deepest_boundary_wins_at_and_between_the_ends_of_blocks() {
    let store = store().await;
    let tokens: Vec<u32> = (0..100).collect();
    let mut digests = BTreeMap::new();
    // Not in the order of their depth.
    for boundary in [64, 1, 50, 16, 15, 17, 33, 0] {
        digests.insert(boundary, made(&tokens[..boundary]).push(&store).await.unwrap());
    }
    for length in 0..=100 {
        let response = ask(&store, &request(&tokens[..length])).await;
        let (boundary, digest) = digests.range(..=length).next_back().unwrap();
        assert_eq!((response.digest, response.boundary), (Some(*digest), *boundary as u64), "{length} tokens");
    }
}

#[tokio::test]
async fn of_equal_boundaries_the_newest_wins() {
    let store = store().await;
    made(&[1, 2, 3]).push(&store).await.unwrap();
    let mut second = made(&[1, 2, 3]);
    second.config.agent = Some("second".into());
    let newest = second.push(&store).await.unwrap();
    assert_eq!(ask(&store, &request(&[1, 2, 3])).await.digest, Some(newest));
}

#[tokio::test]
async fn each_part_of_the_key_that_fails_is_named() {
    let tokens: Vec<u32> = (0..40).collect();
    let other = Digest::sha256(b"other");
    let differing = [&tokens[..30], &[7; 20]].concat();
    let ask_for = |change: &dyn Fn(&mut MatchRequest)| {
        let mut request = request(&tokens);
        change(&mut request);
        request
    };
    let store = store().await;
    let digest = made(&tokens).push(&store).await.unwrap();
    for (request, common, reason) in [
        (ask_for(&|r| r.fingerprint = other), 0, format!("another deployment fingerprint: {}, not {other}", fingerprint())),
        (ask_for(&|r| r.salt = "x".into()), 0, "another salt".into()),
        (ask_for(&|r| r.adapter = Some("a".into())), 0, "another adapter: None, not Some(\"a\")".into()),
        (ask_for(&|r| r.tokens = differing.clone()), 30, "tokens differ from position 30, before the boundary 40".into()),
        (ask_for(&|r| r.tokens.truncate(39)), 39, "the request ends at 39 tokens, before the boundary 40".into()),
        (ask_for(&|r| r.tokens.clear()), 0, "the request ends at 0 tokens".into()),
    ] {
        let response = ask(&store, &request).await;
        assert_eq!((response.digest, response.boundary), (None, 0), "{reason}");
        let [rejected] = &response.rejected[..] else { panic!("{:?}", response.rejected) };
        assert_eq!((rejected.digest, rejected.common), (digest, common), "{reason}");
        assert!(rejected.reason.starts_with(&reason), "{}: {reason}", rejected.reason);
    }
}

#[tokio::test]
async fn a_snapshot_without_state_is_legal_at_its_own_boundary_only() {
    let store = store().await;
    let mut plain = made(&(0..20).collect::<Vec<_>>());
    (plain.checkpoints, plain.payloads) = (vec![], vec![]);
    let digest = plain.push(&store).await.unwrap();
    let response = ask(&store, &request(&(0..25).collect::<Vec<_>>())).await;
    assert_eq!((response.digest, response.boundary), (Some(digest), 20));
    let response = ask(&store, &request(&(0..17).collect::<Vec<_>>())).await;
    assert_eq!((response.digest, response.rejected[0].common), (None, 17));
}

#[tokio::test]
async fn a_recurrent_group_without_a_checkpoint_does_not_match() {
    let store = store().await;
    let flat = common::snapshot(&[1], vec![]).flat;
    for (kind, matches) in [(GroupKind::Recurrent, false), (GroupKind::FullAttention, true)] {
        let (tree, runs) = PageTree::from_flat(&flat, Group { name: "linear".into(), kind }, 0, 1).unwrap();
        let tree = tree.to_document();
        let made = made(&[1, 2]);
        let config = Document::new(Kind::Blob, made.config.to_bytes());
        let manifest = Manifest::snapshot(&config, vec![Descriptor::of(media_type::TREE, &tree)], BTreeMap::new()).to_document();
        let session = store.open_push(&repository()).await.unwrap();
        let pages = [2, 3].map(|number| blob_frame(&common::page(number)));
        let frames = pages.into_iter().chain(runs.iter().chain([&tree, &config, &manifest]).map(document_frame));
        store.ingest(&session.id, pieces(&stream(frames), 1000)).await.unwrap();
        store.commit(&session.id, manifest.digest, None, None).await.unwrap();
        let response = ask(&store, &request(&[1, 2, 3])).await;
        assert_eq!(response.digest, matches.then_some(manifest.digest), "{kind:?}");
        if !matches {
            assert_eq!(response.rejected[0].common, 2);
            assert_eq!(response.rejected[0].reason, "no checkpoint at the boundary 2: group \"linear\" is recurrent");
        }
    }
}

#[tokio::test]
async fn a_snapshot_that_lies_about_its_tokens_or_tells_nothing_does_not_match() {
    let store = store().await;
    // The tokens agree, the prefix is another's.
    let mut lying = made(&[1, 2, 3]);
    let prefix = Key { prefix: Digest::sha256(b"other"), ..key(&[1, 2, 3], "", None) };
    (lying.config.prefix, lying.checkpoints[0].1.key) = (Some(prefix.clone()), prefix);
    let lying = lying.push(&store).await.unwrap();
    let mut silent = made(&[1, 2]);
    (silent.config.prefix, silent.config.boundary) = (None, None);
    let silent = silent.push(&store).await.unwrap();
    let mut scheme = made(&[1]);
    let theirs = Key { scheme: "engine-v0".into(), ..key(&[1], "", None) };
    (scheme.config.prefix, scheme.checkpoints[0].1.key) = (Some(theirs.clone()), theirs);
    let scheme = scheme.push(&store).await.unwrap();
    let response = ask(&store, &request(&[1, 2, 3, 4])).await;
    assert_eq!(response.digest, None);
    let reason = |digest| response.rejected.iter().find(|one| one.digest == digest).unwrap().reason.as_str();
    assert_eq!(response.rejected[0].digest, lying, "the nearest comes first");
    assert_eq!(reason(lying), "all 3 tokens agree, and the prefix key does not");
    assert_eq!(reason(silent), "it does not say which prefix its state belongs to");
    assert_eq!(reason(scheme), "another prefix scheme: \"engine-v0\", not \"pf-prefix-v1\"");
}

#[tokio::test]
async fn the_list_of_refusals_is_short_and_the_deepest_come_first() {
    let store = store().await;
    for length in 1..=20_u32 {
        let tokens: Vec<u32> = (0..length).chain([1000 + length]).collect();
        made(&tokens).push(&store).await.unwrap();
    }
    let response = ask(&store, &request(&(0..50).collect::<Vec<_>>())).await;
    assert_eq!(response.rejected.iter().map(|one| one.common).collect::<Vec<_>>(), [20, 19, 18, 17, 16, 15, 14, 13]);
    let unknown = store.match_prefix(&"no/where".parse().unwrap(), &request(&[])).await.unwrap_err();
    assert_eq!(unknown.code(), ErrorCode::RepositoryUnknown);
}
