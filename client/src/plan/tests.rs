use super::*;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Group, PageTree};
use pfr_schema::{flat, geometry, media_type};
use std::collections::HashSet;
use std::sync::Mutex;

const LIMITS: fn() -> Limits = Limits::default;

/// A source made of documents, which counts its reads.
struct Side<const NEAR: bool> {
    documents: HashMap<Digest, Document>,
    reads: Mutex<Vec<usize>>,
}

impl<const NEAR: bool> PlanSource for Side<NEAR> {
    const NEAR: bool = NEAR;

    async fn documents(&self, items: &[Item]) -> Result<Vec<Document>> {
        self.reads.lock().unwrap().push(items.len());
        Ok(items.iter().map(|item| self.documents[&item.digest].clone()).collect())
    }
}

#[derive(Default)]
struct Has {
    digests: HashSet<Digest>,
    asked: Mutex<Vec<usize>>,
}

impl PlanDestination for Has {
    async fn lacks(&self, items: &[Item]) -> Result<Vec<usize>> {
        self.asked.lock().unwrap().push(items.len());
        Ok((0..items.len()).filter(|i| !self.digests.contains(&items[*i].digest)).collect())
    }
}

fn page(n: u32) -> Digest {
    Digest::sha256(&n.to_le_bytes())
}

/// A manifest over one tree of `pages` pages, K and V alike where `n` says so, and its other
/// documents.
fn snapshot(pages: std::ops::Range<u32>, extra: Vec<Descriptor>) -> (Document, Vec<Document>) {
    let geometry = geometry::Geometry { page_size_tokens: 1, n_layers: 1, n_heads: 1, head_dim: 5, dtype: geometry::Dtype::Bf16 };
    let entries = pages.clone().map(|n| flat::Page { ix: n - pages.start, k: page(n), v: page(n + 1_000_000) }).collect();
    let flat = flat::FlatManifest::new(geometry, entries, vec![], &LIMITS()).unwrap();
    let (tree, mut documents) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
    let tree = tree.to_document();
    let config = Document::new(Kind::Blob, SnapshotConfig::default().to_bytes());
    let layers = [vec![Descriptor::of(media_type::TREE, &tree)], extra].concat();
    let manifest = Manifest::snapshot(&config, layers, Default::default()).to_document();
    documents.extend([tree, manifest.clone()]);
    (manifest, documents)
}

fn side<const NEAR: bool>(documents: Vec<Document>) -> Side<NEAR> {
    Side { documents: documents.into_iter().map(|d| (d.digest, d)).collect(), reads: Mutex::default() }
}

fn item(manifest: &Document) -> Item {
    Item::manifest(manifest.digest)
}

#[tokio::test]
async fn everything_moves_to_an_empty_destination_children_first() {
    let (manifest, documents) = snapshot(0..2000, vec![]);
    let (runs, has) = (documents.len() - 2, Has::default());
    let plan = plan(item(&manifest), &side::<true>(documents), &has, &LIMITS()).await.unwrap();
    assert_eq!(plan.blobs.len(), 4001, "pages and the configuration");
    let kinds: Vec<Kind> = plan.containers.iter().map(|d| d.kind).collect();
    assert_eq!(kinds, [vec![Kind::Run; runs], vec![Kind::Tree, Kind::Manifest]].concat());
    assert_eq!(*has.asked.lock().unwrap(), [3, runs, 4000], "manifest, configuration and tree in one");
    let totals = Totals::of(plan.containers.iter().filter(|d| d.kind != Kind::Run), &LIMITS()).unwrap();
    assert_eq!((totals.pages, totals.blobs, totals.bytes), (2000, plan.blobs.len() as u64 + plan.containers.len() as u64, plan.bytes()));
}

#[tokio::test]
async fn nothing_is_asked_below_a_node_that_the_destination_holds() {
    let (manifest, documents) = snapshot(0..2000, vec![]);
    let mut has = Has::default();
    has.digests.insert(manifest.digest);
    let near = plan(item(&manifest), &side::<true>(documents.clone()), &has, &LIMITS()).await.unwrap();
    let far_side = side::<false>(documents.clone());
    let far = plan(item(&manifest), &far_side, &has, &LIMITS()).await.unwrap();
    assert!([&near, &far].iter().all(|plan| plan.blobs.is_empty() && plan.containers.is_empty()));
    assert!(far_side.reads.lock().unwrap().is_empty());

    let mut has = Has { digests: documents.iter().map(|d| d.digest).collect(), ..Has::default() };
    let first_run = documents.iter().find(|d| d.kind == Kind::Run).unwrap();
    for lost in [manifest.digest, documents.iter().find(|d| d.kind == Kind::Tree).unwrap().digest, first_run.digest] {
        has.digests.remove(&lost);
    }
    let source = side::<false>(documents.clone());
    let plan = plan(item(&manifest), &source, &has, &LIMITS()).await.unwrap();
    let pages = children(first_run, &LIMITS()).unwrap().len();
    assert_eq!((plan.containers.len(), plan.blobs.len()), (3, pages + 1));
    assert_eq!(*source.reads.lock().unwrap(), [1, 1, 1], "three nodes, one on each level");
}

#[tokio::test]
async fn a_plan_in_parts_is_the_plan_and_no_question_is_about_all_pages() {
    let (manifest, documents) = snapshot(0..2000, vec![]);
    let some: HashSet<Digest> = (0..2000).filter(|n| n % 3 == 0).map(page).collect();
    let has = || Has { digests: some.clone(), ..Has::default() };
    let source = side::<false>(documents);
    let whole = plan(item(&manifest), &source, &has(), &LIMITS()).await.unwrap();
    let has = has();
    let Above { plan: above, chunks } = plan_above(item(&manifest), &source, &has, &LIMITS()).await.unwrap();
    assert!(chunks.len() > 3 && above.containers.iter().all(|document| document.kind != Kind::Run));
    let totals = Totals::of(&above.containers, &LIMITS()).unwrap();
    let (mut blobs, mut containers, mut listed) = (above.blobs, Vec::new(), 0);
    for part in chunks.chunks(2) {
        let below = plan_below(part, &blobs, &source, &has, &LIMITS()).await.unwrap();
        blobs.extend(below.plan.blobs);
        containers.extend(below.plan.containers);
        listed += below.listed;
    }
    containers.extend(above.containers);
    assert_eq!(blobs, whole.blobs);
    let digests = |documents: &[Document]| documents.iter().map(|document| document.digest).collect::<HashSet<_>>();
    assert_eq!(digests(&containers), digests(&whole.containers));
    let others = containers.iter().filter(|document| document.kind != Kind::Run).map(|document| document.bytes.len() as u64).sum::<u64>();
    let config = blobs[0].bytes();
    assert_eq!(listed + others + config, totals.bytes, "what is listed adds up");
    assert!(has.asked.lock().unwrap().iter().all(|asked| *asked < 4000), "{:?}", has.asked);
    assert!(plan_below(&[], &[], &source, &has, &LIMITS()).await.unwrap().plan.containers.is_empty());
}

#[tokio::test]
async fn a_blob_listed_twice_moves_once_and_as_a_node_if_it_is_one() {
    let (_, documents) = snapshot(0..10, vec![]);
    let tree = documents.iter().find(|d| d.kind == Kind::Tree).unwrap();
    let as_blob = Descriptor { media_type: media_type::OCTETS.into(), ..Descriptor::of(media_type::TREE, tree) };
    let page_again = Descriptor { digest: page(3), size: 10, ..as_blob.clone() };
    let (manifest, documents) = snapshot(0..10, vec![as_blob, page_again]);
    for plan in [
        plan(item(&manifest), &side::<true>(documents.clone()), &Has::default(), &LIMITS()).await.unwrap(),
        plan(item(&manifest), &side::<false>(documents.clone()), &Has::default(), &LIMITS()).await.unwrap(),
    ] {
        let digests: HashSet<Digest> = plan.blobs.iter().map(|b| b.digest).chain(plan.containers.iter().map(|d| d.digest)).collect();
        assert_eq!(digests.len(), plan.blobs.len() + plan.containers.len());
        assert_eq!(plan.blobs.len(), 21);
        assert!(plan.containers.iter().any(|d| d.kind == Kind::Tree));
    }
}

#[test]
fn lists_are_cut_in_order_and_without_loss() {
    for limit in [1, 129, 500, 10_000] {
        let parts = cut((0..50_u64).collect(), |n| *n, limit);
        assert_eq!(parts.concat(), (0..50).collect::<Vec<_>>());
        let fits = |part: &Vec<u64>| part.len() == 1 || part.iter().map(|n| n + FRAME_OVERHEAD).sum::<u64>() <= limit;
        assert!(parts.iter().all(fits), "{limit}: {parts:?}");
    }
}
