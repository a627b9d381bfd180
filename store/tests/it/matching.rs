//! `match` finds the deepest snapshot among all of a repository, by an index that is always
//! complete.

use crate::common::rig::{Backend, Rig};
use crate::common::{accuse, pieces, property, repository, stream};
use pfr_schema::api::{MatchRequest, MatchResponse};
use pfr_schema::checkpoint::{ABI, Checkpoint, Key};
use pfr_schema::run::Run;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, Group, GroupKind, PageTree, RunRef, SCHEMA, TreeSequence};
use pfr_schema::{Digest, Kind, media_type, prefix};
use pfr_store::{Budget, PrefixMark, PrefixPath, Prefixed, Store, document_frame};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

on_backends!([memory = Memory, sqlite = SqliteDisk, postgres = PostgresDisk]:
    the_deepest_of_all_snapshots_is_found,
    the_deepest_page_of_full_attention_is_found,
);
on_backends!([sqlite = SqliteDisk, postgres = PostgresDisk]:
    what_a_rebuild_brings_back_is_found,
    snapshots_that_are_indexed_already_or_gone_are_left_out,
    refusals_are_told_and_no_salt_is,
    some_of_many_long_lists_are_read_to_explain_refusals,
    a_match_is_not_explained_by_shorter_snapshots,
    what_is_quarantined_is_passed_over,
    fsck_finds_and_corrects_rows_of_the_index,
    fsck_takes_a_damaged_list_of_tokens_for_no_fault_of_the_index,
    a_snapshot_of_a_conversation_serves_where_another_one_parts_from_it,
    a_search_of_very_many_lengths_ends_and_says_so,
    a_search_that_is_misled_at_every_block_ends_and_says_so,
);

/// Lengths around the ends of blocks, and of digits of their number.
const LENGTHS: [u64; 18] = [0, 1, 15, 16, 17, 32, 255, 256, 257, 272, 300, 511, 4095, 4096, 4100, 4112, 4400, 8200];

/// Tokens of a page.
const PAGE: u32 = 16;

/// Tokens that are the common ones up to some position, and then one of a few other lists.
#[derive(Clone, Debug)]
struct Way {
    length: u64,
    leaves: u64,
    to: u32,
}

impl Way {
    fn tokens(&self) -> Vec<u32> {
        (0..self.length).map(|i| if i < self.leaves { i as u32 } else { 1_000_000 * self.to + i as u32 }).collect()
    }
}

fn way() -> impl Strategy<Value = Way> {
    let length = (proptest::sample::select(&LENGTHS[..]), 0_u64..3).prop_map(|(length, more)| length + more);
    let leaves = prop_oneof![2 => Just(u64::MAX), 1 => proptest::sample::select(&LENGTHS[..])];
    (length, leaves, 1_u32..3).prop_map(|(length, leaves, to)| Way { length, leaves, to })
}

/// The prefix key and token list of a snapshot, if it has them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum List {
    Whole,
    None,
    Wrong,
}

#[derive(Clone, Debug)]
struct Spec {
    way: Way,
    salt: bool,
    list: List,
    holds: Holds,
}

/// What a snapshot has besides its tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Holds {
    Checkpoint,
    /// A group of full attention with pages of 16 tokens.
    Pages,
    /// The same, and a window.
    Window,
}

fn spec() -> impl Strategy<Value = Spec> {
    let list = prop_oneof![6 => Just(List::Whole), 1 => Just(List::None), 1 => Just(List::Wrong)];
    (way(), proptest::bool::weighted(0.1), list).prop_map(|(way, salt, list)| Spec { way, salt, list, holds: Holds::Checkpoint })
}

fn salt(salted: bool) -> String {
    if salted { "secret".into() } else { String::new() }
}

fn fingerprint() -> Digest {
    Digest::sha256(b"deployment")
}

/// Pushes a snapshot with a configuration of its own.
async fn push(store: &Store, spec: &Spec, number: usize) -> Digest {
    push_documents(store, spec, number).await.manifest
}

/// The parts of a snapshot that `match` reads.
struct Pushed {
    manifest: Digest,
    config: Digest,
    list: Digest,
    checkpoint: Digest,
}

async fn push_documents(store: &Store, spec: &Spec, number: usize) -> Pushed {
    let (tokens, salt) = (spec.way.tokens(), salt(spec.salt));
    let prefix = prefix::key(&fingerprint(), &salt, None, &tokens);
    let key = Key { scheme: prefix::SCHEME.into(), prefix, tokens: tokens.len() as u64, alignment: 1, salt, adapter: None };
    let agent = Some(format!("agent-{number}"));
    let checkpoint = Checkpoint { abi: ABI.into(), key: key.clone(), tensors: Vec::new() };
    let checkpoint = Document::new(Kind::Checkpoint, checkpoint.to_bytes());
    let config = SnapshotConfig { agent, fingerprint: Some(fingerprint()), prefix: Some(key), ..SnapshotConfig::default() };
    let config = Document::new(Kind::Blob, config.to_bytes());
    let listed = if spec.list == List::Wrong { vec![7; tokens.len()] } else { tokens };
    let list = Document::new(Kind::Blob, listed.iter().flat_map(|token| token.to_le_bytes()).collect());
    let groups: &[GroupKind] = match spec.holds {
        Holds::Checkpoint => &[],
        Holds::Pages => &[GroupKind::FullAttention],
        Holds::Window => &[GroupKind::FullAttention, GroupKind::SlidingWindow],
    };
    let (page, pages) = (Document::new(Kind::Blob, vec![7; 8]), (listed.len() as u32).div_ceil(PAGE));
    // Without a tree nothing lists it, and a long list of tokens would have more pages than a run.
    let of_run = if groups.is_empty() { 1 } else { pages.max(1) as usize };
    let run = Document::new(Kind::Run, Run::new(1, 8, vec![page.digest; of_run]).unwrap().to_bytes());
    let trees: Vec<Document> = groups.iter().map(|kind| tree(*kind, &run, pages).to_document()).collect();
    let mut layers: Vec<Descriptor> = trees.iter().map(|tree| Descriptor::of(media_type::TREE, tree)).collect();
    layers.extend((spec.holds == Holds::Checkpoint).then(|| Descriptor::of(media_type::CHECKPOINT, &checkpoint)));
    layers.extend((spec.list != List::None).then(|| Descriptor::of(media_type::TOKENS, &list)));
    let manifest = Manifest::snapshot(&config, layers, BTreeMap::new()).to_document();
    let session = store.open_push(&repository()).await.unwrap();
    let documents = [&page, &run].into_iter().chain(&trees).chain([&checkpoint, &config, &list, &manifest]);
    let frames = stream(documents.map(document_frame));
    store.ingest(&session.id, pieces(&frames, 65536)).await.unwrap();
    store.commit(&session.id, manifest.digest, None, None).await.unwrap();
    Pushed { manifest: manifest.digest, config: config.digest, list: list.digest, checkpoint: checkpoint.digest }
}

fn tree(kind: GroupKind, run: &Document, pages: u32) -> PageTree {
    PageTree {
        schema: SCHEMA.into(),
        layout: "opaque/test".into(),
        page_size_tokens: PAGE,
        page_bytes: 8,
        geometry: None,
        components: vec!["kv".into()],
        group: Group { name: format!("{kind:?}"), kind },
        rank: 0,
        world: 1,
        runs: (pages > 0).then_some(RunRef { digest: run.digest, pages }).into_iter().collect(),
        ix: (0..pages).collect(),
        sequences: vec![TreeSequence { id: "s".into(), ix: (0..pages).collect(), fill: 0 }],
        flat_digest: None,
    }
}

async fn ask(store: &Store, tokens: Vec<u32>, salted: bool) -> MatchResponse {
    let request = MatchRequest { tokens, fingerprint: fingerprint(), salt: salt(salted), adapter: None };
    store.match_prefix(&repository(), &request).await.unwrap()
}

/// The deepest snapshot by looking at all, the newest of equal ones.
fn deepest(snapshots: &[(Digest, Spec)], tokens: &[u32], salted: bool) -> (Option<Digest>, u64) {
    let fits = |(_, spec): &&(Digest, Spec)| spec.salt == salted && tokens.starts_with(&spec.way.tokens());
    let found = snapshots.iter().filter(fits).max_by_key(|(_, spec)| spec.way.length);
    (found.map(|(digest, _)| *digest), found.map_or(0, |(_, spec)| spec.way.length))
}

async fn the_deepest_of_all_snapshots_is_found(on: Backend) {
    let cases = (proptest::collection::vec(spec(), 9..40), proptest::collection::vec((way(), any::<bool>()), 1..12), 0_usize..9);
    property(on.some(24, 3), cases, move |(specs, asked, deleted)| async move {
        let rig = Rig::new(on).await;
        let store = &rig.store;
        let mut snapshots = Vec::new();
        for (number, spec) in specs.into_iter().enumerate() {
            snapshots.push((push(store, &spec, number).await, spec));
        }
        let (gone, _) = snapshots.remove(deleted);
        store.delete_snapshot(&repository(), &gone).await.unwrap();
        let digests = snapshots.iter().map(|(digest, _)| *digest).chain([gone]).collect();
        let lengths = store.prefix_lengths(&repository(), digests).await.unwrap();
        assert_eq!(lengths, snapshots.iter().map(|(digest, spec)| (*digest, spec.way.length)).collect());
        for round in 0..2 {
            for (way, salted) in &asked {
                let (tokens, salted) = (way.tokens(), *salted && way.to == 1);
                let expected = deepest(&snapshots, &tokens, salted);
                let found = ask(store, tokens, salted).await;
                assert_eq!((found.digest, found.boundary), expected, "{way:?} {salted} of {snapshots:?}");
                assert!(found.rejected.len() <= 8 && found.rejected.iter().all(|one| Some(one.digest) != found.digest));
                assert!(found.rejected.is_sorted_by(|a, b| a.common >= b.common));
            }
            if on == Backend::Memory || round > 0 {
                break;
            }
            // As if all had been committed before there was an index.
            assert_ne!(rig.sql("SELECT COUNT(*) FROM prefixes"), "0");
            rig.sql("DELETE FROM prefixes");
            rig.sql("UPDATE manifests SET prefixed = false");
            assert_eq!(store.index_prefixes(&Budget::default()).await.unwrap(), snapshots.len() as u64);
            assert_eq!(store.index_prefixes(&Budget::default()).await.unwrap(), 0);
        }
        for (digest, _) in &snapshots {
            store.delete_snapshot(&repository(), digest).await.unwrap();
        }
        if on != Backend::Memory {
            assert_eq!(rig.sql("SELECT COUNT(*) FROM prefixes"), "0", "rows go with their snapshots");
        }
    })
    .await;
}

fn on_the_way(length: u64) -> Spec {
    Spec { way: Way { length, leaves: u64::MAX, to: 1 }, salt: false, list: List::Whole, holds: Holds::Checkpoint }
}

/// Where a snapshot can be resumed by a request with these tokens, if anywhere.
fn legal(spec: &Spec, tokens: &[u32]) -> u64 {
    let own = spec.way.tokens();
    let agree = own.iter().zip(tokens).take_while(|(a, b)| a == b).count() as u64;
    match (agree == spec.way.length, spec.holds, spec.list) {
        (true, ..) => agree,
        (false, Holds::Pages, List::Whole) => agree / u64::from(PAGE) * u64::from(PAGE),
        _ => 0,
    }
}

async fn the_deepest_page_of_full_attention_is_found(on: Backend) {
    let holds = prop_oneof![4 => Just(Holds::Pages), 1 => Just(Holds::Window), 1 => Just(Holds::Checkpoint)];
    let spec = (spec(), holds).prop_map(|(spec, holds)| Spec { holds, ..spec });
    // No waypoint has more snapshots than are looked at, so the answer is exact.
    let cases = (proptest::collection::vec(spec, 9..30), proptest::collection::vec(way(), 1..12));
    property(on.some(24, 3), cases, move |(specs, asked)| async move {
        let rig = Rig::new(on).await;
        let mut snapshots = Vec::new();
        for (number, spec) in specs.into_iter().enumerate() {
            snapshots.push((push(&rig.store, &spec, number).await, spec));
        }
        for round in 0..2 {
            for way in &asked {
                let tokens = way.tokens();
                let ours = || snapshots.iter().filter(|(_, spec)| !spec.salt);
                let best = ours().map(|(_, spec)| legal(spec, &tokens)).max().unwrap_or(0);
                let found = ask(&rig.store, tokens.clone(), false).await;
                assert_eq!(found.boundary, best, "{way:?} of {snapshots:?}: {found:?}");
                let same = |(digest, spec): &&(Digest, Spec)| Some(*digest) == found.digest && legal(spec, &tokens) == best;
                let held = ours().find(same).map(|(_, spec)| spec.way.length);
                assert_eq!(found.tokens, held.unwrap_or(0), "{way:?} of {snapshots:?}: {found:?}");
            }
            if on == Backend::Memory || round > 0 {
                break;
            }
            // As if all had been committed before there were waypoints.
            rig.sql("DELETE FROM prefixes WHERE tokens = -2");
            rig.sql("UPDATE manifests SET prefixed = false");
            assert_eq!(rig.store.index_prefixes(&Budget::default()).await.unwrap(), snapshots.len() as u64);
        }
    })
    .await;
}

/// The index has to lead there: too many snapshots are newer, and differ from the beginning.
async fn a_snapshot_of_a_conversation_serves_where_another_one_parts_from_it(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let pages = |length, leaves, to| Spec { way: Way { length, leaves, to }, holds: Holds::Pages, ..on_the_way(0) };
    let old = push(store, &pages(8200, u64::MAX, 1), 0).await;
    for number in 1..60 {
        push(store, &pages(300, 20, number + 10), 0).await;
    }
    // It parts in the middle of a page.
    let tokens = pages(8000, 5007, 2).way.tokens();
    let found = ask(store, tokens.clone(), false).await;
    assert_eq!((found.digest, found.boundary, found.tokens), (Some(old), 4992, 8200));
    // Of a shorter prompt the whole pages serve, and one with another salt gets nothing.
    let found = ask(store, tokens[..100].to_vec(), false).await;
    assert_eq!((found.digest, found.boundary), (Some(old), 96));
    assert_eq!(ask(store, tokens, true).await.digest, None);
}

async fn a_search_of_very_many_lengths_ends_and_says_so(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let unlisted = push(store, &Spec { list: List::None, ..on_the_way(300) }, 0).await;
    // So many are newer that it is not looked at as one of the newest.
    for number in 1..12 {
        push(store, &Spec { way: Way { length: 20, leaves: 0, to: number }, salt: true, ..on_the_way(0) }, 0).await;
    }
    let tokens = on_the_way(50_000).way.tokens();
    let found = ask(store, tokens.clone(), false).await;
    assert_eq!((found.digest, found.truncated), (Some(unlisted), false));
    // The rows of snapshots of 40,000 other lengths that do not list their tokens.
    rig.sql(
        "INSERT INTO prefixes WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 40000)
         SELECT p.repository, p.key, p.tokens + n, n, (SELECT MAX(id) FROM manifests) FROM prefixes p, n WHERE p.tokens = 300",
    );
    let found = ask(store, tokens.clone(), false).await;
    assert_eq!((found.digest, found.truncated), (None, true), "{:?}", found.rejected);
    // A shorter request has few lengths to try.
    let found = ask(store, tokens[..4000].to_vec(), false).await;
    assert_eq!((found.digest, found.truncated), (Some(unlisted), false));
    let found = ask(store, tokens[..299].to_vec(), false).await;
    assert_eq!((found.digest, found.truncated), (None, false));
    // Snapshots that list their tokens are found first, and only the lengths beyond are tried.
    let listed = push(store, &on_the_way(400), 1).await;
    let found = ask(store, tokens.clone(), false).await;
    assert_eq!((found.digest, found.boundary, found.truncated), (Some(listed), 400, true));
    let longer = push(store, &on_the_way(16_000), 1).await;
    let found = ask(store, tokens, false).await;
    assert_eq!((found.digest, found.boundary, found.truncated), (Some(longer), 16_000, false));
}

async fn a_search_that_is_misled_at_every_block_ends_and_says_so(on: Backend) {
    let rig = Rig::new(on).await;
    let short = push(&rig.store, &on_the_way(20), 0).await;
    let path = Arc::new(PrefixPath::new(on_the_way(8000).way.tokens(), &fingerprint(), "", None));
    let key = |block: u64| i64::from_be_bytes(*path.key(block * 16).unwrap().as_bytes().first_chunk().unwrap());
    let keys: Vec<String> = (1..=500).map(|block| format!("({})", key(block))).collect();
    // The rows of snapshots that go on at each block, and not as the request does.
    rig.sql(&format!(
        "INSERT INTO prefixes SELECT p.repository, v.column1, -1, 0, p.manifest FROM prefixes p, (VALUES {}) AS v WHERE p.tokens = 20",
        keys.join(", ")
    ));
    let find = |look_ups| rig.metadata.find_prefixes(repository(), Arc::clone(&path), None, look_ups);
    let found = find(usize::MAX).await.unwrap();
    assert_eq!((found.deepest.first().map(|hit| hit.digest), found.truncated), (Some(short), false));
    assert!(found.look_ups > 1000, "{found:?}");
    assert_eq!(find(found.look_ups).await.unwrap(), found);
    let cut = find(500).await.unwrap();
    assert!(cut.deepest.is_empty() && cut.truncated && cut.look_ups <= 500, "{cut:?}");
}

async fn what_a_rebuild_brings_back_is_found(on: Backend) {
    let rig = Rig::new(on).await;
    let old = push(&rig.store, &on_the_way(300), 0).await;
    for number in 1..12 {
        push(&rig.store, &Spec { way: Way { length: 400, leaves: 200, to: number }, ..on_the_way(0) }, 0).await;
    }
    let rebuilt = rig.beside().await;
    rebuilt.store.rebuild(&mut |_| ()).await.unwrap();
    for store in [&rig.store, &rebuilt.store] {
        let found = ask(store, on_the_way(310).way.tokens(), false).await;
        assert_eq!((found.digest, found.boundary), (Some(old), 300));
        // Of eleven that differ from token 200 on, eight are in the answer.
        assert_eq!(found.rejected.iter().map(|one| one.common).collect::<Vec<_>>(), [200; 8]);
    }
}

async fn what_is_quarantined_is_passed_over(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let good = push(store, &on_the_way(300), 0).await;
    // Three that are longer and fit, and one that would be read to say why it does not.
    let manifest = push(store, &on_the_way(400), 1).await;
    let config = push_documents(store, &on_the_way(410), 2).await;
    let checkpoint = push_documents(store, &on_the_way(420), 3).await;
    let list = push_documents(store, &on_the_way(640), 4).await;
    accuse(store, &[manifest, config.config, checkpoint.checkpoint, list.list]).await;
    let found = ask(store, on_the_way(500).way.tokens(), false).await;
    assert_eq!((found.digest, found.boundary), (Some(good), 300), "{:?}", found.rejected);
    let reason = |digest: Digest| found.rejected.iter().find(|one| one.digest == digest).map(|one| (one.common, one.reason.as_str()));
    for damaged in [manifest, config.manifest, checkpoint.manifest] {
        assert_eq!(reason(damaged), Some((0, "it is damaged")));
    }
    assert_eq!(reason(list.manifest).map(|(common, _)| common), Some(0), "its tokens cannot be compared");
}

async fn snapshots_that_are_indexed_already_or_gone_are_left_out(on: Backend) {
    let rig = Rig::new(on).await;
    for (number, length) in [300, 4400, 20].into_iter().enumerate() {
        push(&rig.store, &on_the_way(length), number).await;
    }
    let in_order = |mut snapshots: Vec<Prefixed>| {
        snapshots.iter_mut().for_each(|snapshot| snapshot.marks.sort_unstable());
        snapshots
    };
    let before = in_order(rig.metadata.prefixed(0, 10).await.unwrap());
    rig.sql("DELETE FROM prefixes");
    rig.sql("UPDATE manifests SET prefixed = false");
    let mut marks: Vec<(i64, Vec<PrefixMark>)> = before.iter().map(|one| (one.manifest, one.marks.clone())).collect();
    assert_eq!(rig.metadata.index_prefixes(marks[1..2].to_vec()).await.unwrap(), 1);
    let other = vec![PrefixMark { key: 1, tokens: 2, proof: 3 }];
    marks[1].1.clone_from(&other);
    marks.push((1 << 40, other));
    assert_eq!(rig.metadata.index_prefixes(marks).await.unwrap(), 2);
    assert_eq!(in_order(rig.metadata.prefixed(0, 10).await.unwrap()), before);
}

async fn refusals_are_told_and_no_salt_is(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let longer = push(store, &on_the_way(640), 0).await;
    let salted = push(store, &Spec { salt: true, ..on_the_way(100) }, 0).await;
    for number in 1..9 {
        push(store, &Spec { way: Way { length: 20, leaves: 0, to: number }, ..on_the_way(0) }, 0).await;
    }
    // The older ones are not among the newest: the index leads to those that share most.
    let found = ask(store, on_the_way(600).way.tokens(), false).await;
    assert_eq!((found.digest, found.boundary), (None, 0));
    assert_eq!((found.rejected[0].digest, found.rejected[0].common), (longer, 600));
    assert!(found.rejected[0].reason.contains("exactly 640 tokens; the request has 600"), "{:?}", found.rejected);
    assert!(found.rejected.iter().all(|one| one.digest != salted));
    store.delete_snapshot(&repository(), &longer).await.unwrap();
    let found = ask(store, on_the_way(120).way.tokens(), true).await;
    assert_eq!((found.digest, found.boundary), (Some(salted), 100));
    let newest = push(store, &Spec { salt: true, ..on_the_way(110) }, 0).await;
    let found = ask(store, on_the_way(120).way.tokens(), false).await;
    let about_it = found.rejected.iter().find(|one| one.digest == newest).unwrap();
    assert_eq!((about_it.common, about_it.reason.as_str()), (0, "another salt"));
}

async fn some_of_many_long_lists_are_read_to_explain_refusals(on: Backend) {
    let rig = Rig::new(on).await;
    // Lists of 0.6 MB.
    let way = |to| Way { length: 150_000, leaves: 1600, to };
    for to in 1..=5 {
        push(&rig.store, &Spec { way: way(to), ..on_the_way(0) }, 0).await;
    }
    let found = ask(&rig.store, way(9).tokens(), false).await;
    assert_eq!((found.digest, found.truncated), (None, false));
    assert_eq!(found.rejected.iter().map(|one| one.common).collect::<Vec<_>>(), [1600, 1600, 1600, 0, 0]);
    assert!(found.rejected[3..].iter().all(|one| one.reason.contains("too many to compare them all")), "{:?}", found.rejected);
}

async fn a_match_is_not_explained_by_shorter_snapshots(on: Backend) {
    let rig = Rig::new(on).await;
    let (short, long) = (push_documents(&rig.store, &on_the_way(100), 0).await, push(&rig.store, &on_the_way(300), 1).await);
    let other = push(&rig.store, &Spec { way: Way { length: 400, leaves: 200, to: 2 }, ..on_the_way(0) }, 2).await;
    // It would be refused if it were read.
    accuse(&rig.store, &[short.config]).await;
    let found = ask(&rig.store, on_the_way(310).way.tokens(), false).await;
    assert_eq!((found.digest, found.boundary), (Some(long), 300));
    assert_eq!(found.rejected.iter().map(|one| (one.digest, one.common)).collect::<Vec<_>>(), [(other, 200)]);
    // It is, where it is the only one that would fit.
    let found = ask(&rig.store, on_the_way(110).way.tokens(), false).await;
    assert_eq!(found.digest, None);
    assert!(found.rejected.iter().any(|one| one.digest == short.manifest && one.reason == "it is damaged"), "{:?}", found.rejected);
}

/// 275 blocks: two rows that say that the snapshot goes on, and one where it ends.
const THREE_ROWS: u64 = 4400;

async fn fsck_finds_and_corrects_rows_of_the_index(on: Backend) {
    let way = Way { length: THREE_ROWS, leaves: u64::MAX, to: 1 };
    let rig = Rig::new(on).await;
    let store = &rig.store;
    push(store, &Spec { way: Way { length: 300, ..way.clone() }, salt: false, list: List::None, holds: Holds::Checkpoint }, 0).await;
    let whole = push(store, &Spec { way: way.clone(), salt: false, list: List::Whole, holds: Holds::Checkpoint }, 1).await;
    let sound = store.fsck(false, &mut |_| ()).await.unwrap();
    assert_eq!(sound.wrong, 0, "{sound:?}");
    for (spoil, differences) in [
        ("DELETE FROM prefixes", 2),
        ("DELETE FROM prefixes WHERE tokens < 0", 1),
        ("DELETE FROM prefixes WHERE tokens >= 0", 2),
        ("UPDATE prefixes SET key = key + 1 WHERE tokens < 0", 1),
        ("UPDATE prefixes SET proof = proof + 1 WHERE tokens >= 0", 2),
        ("UPDATE prefixes SET repository = repository + 1", 2),
        ("INSERT INTO prefixes SELECT repository, key + 1, tokens, proof, manifest FROM prefixes WHERE tokens < 0", 1),
        ("UPDATE manifests SET prefixed = false", 2),
    ] {
        rig.sql(spoil);
        let found = store.fsck(false, &mut |_| ()).await.unwrap();
        assert_eq!((found.wrong, found.repaired), (differences, false), "{spoil}: {found:?}");
        assert!(found.discrepancies.iter().any(|words| words.starts_with(&format!("snapshot {whole}: "))), "{spoil}: {found:?}");
        let repaired = store.fsck(true, &mut |_| ()).await.unwrap();
        assert_eq!((repaired.wrong, repaired.repaired), (differences, true), "{spoil}: {repaired:?}");
        assert_eq!(store.fsck(false, &mut |_| ()).await.unwrap(), sound, "{spoil}");
        let matched = ask(store, way.tokens(), false).await;
        assert_eq!((matched.digest, matched.boundary), (Some(whole), THREE_ROWS), "{spoil}");
    }
}

async fn fsck_takes_a_damaged_list_of_tokens_for_no_fault_of_the_index(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let way = Way { length: THREE_ROWS, leaves: u64::MAX, to: 1 };
    let pushed = push_documents(store, &Spec { way, salt: false, list: List::Whole, holds: Holds::Checkpoint }, 0).await;
    accuse(store, &[pushed.list]).await;
    let found = store.fsck(true, &mut |_| ()).await.unwrap();
    assert!(found.discrepancies.iter().all(|words| !words.contains("prefix index")), "{found:?}");
}
