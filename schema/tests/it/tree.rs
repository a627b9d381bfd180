use crate::common::{GEOMETRY, Random, assert_refused, cases, digest, manifest, mutate, small_limits};
use pfr_schema::ErrorCode::{InvalidDocument, TooLarge};
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::run::Run;
use pfr_schema::tree::{Document, Group, GroupKind, PageTree, SCHEMA};
use pfr_schema::{Digest, FormatError, Kind, Limits};
use proptest::prelude::*;

fn to_tree(flat: &FlatManifest) -> (PageTree, Vec<Document>) {
    PageTree::from_flat(flat, Group::default(), 0, 1).unwrap()
}

fn parse_runs(documents: &[Document]) -> Vec<Run> {
    documents.iter().map(|d| Run::parse(&d.bytes, &Limits::default()).unwrap()).collect()
}

/// flat → tree → bytes → tree → flat.
fn round_trip(flat: &FlatManifest) -> Vec<u8> {
    let limits = Limits::default();
    let (tree, documents) = to_tree(flat);
    let stored = tree.to_document();
    assert_eq!(stored.kind, Kind::Tree);
    assert_eq!(stored.digest, Digest::sha256(&stored.bytes));
    let read = PageTree::parse(&stored.bytes, &limits).unwrap();
    assert_eq!(read, tree);
    assert_eq!(tree.runs.len(), documents.len());
    for (document, (name, shape)) in documents.iter().zip(tree.run_shapes()) {
        let run = Run::parse(&document.bytes, &limits).unwrap();
        assert_eq!((document.digest, run.shape()), (name, shape));
    }
    read.to_flat(&parse_runs(&documents), &limits).unwrap().to_bytes()
}

/// A small tree: pages 3, 4, 5 and 9, two sequences.
fn small() -> (FlatManifest, PageTree, Vec<Document>) {
    let page = |ix: u32| Page { ix, k: digest(&format!("k{ix}")), v: digest(&format!("v{ix}")) };
    let sequence = |id: &str, ixs: &[u32], fill| Sequence { id: id.into(), page_ixs: ixs.to_vec(), fill_in_last_page: fill };
    let sequences = vec![sequence("a", &[3, 4, 5, 9], 7), sequence("b", &[9, 4], 0)];
    let flat = FlatManifest::new(GEOMETRY, [3, 4, 5, 9].map(page).to_vec(), sequences, &Limits::default()).unwrap();
    let (tree, runs) = to_tree(&flat);
    (flat, tree, runs)
}

fn parse(text: &str) -> Result<PageTree, FormatError> {
    PageTree::parse(text.as_bytes(), &Limits::default())
}

#[test]
fn the_tree_says_what_the_flat_manifest_says() {
    let (flat, tree, runs) = small();
    assert_eq!(tree.schema, SCHEMA);
    assert_eq!(tree.pages(), 4);
    assert_eq!(tree.tokens(), 3 * 16 + 7);
    assert_eq!(tree.page_bytes, flat.page_bytes());
    assert_eq!(tree.flat_digest, Some(Digest::sha256(&flat.to_bytes())));
    assert_eq!(runs.len(), 1);
    assert_eq!(round_trip(&flat), flat.to_bytes());
}

#[test]
fn sizes_around_the_cuts_survive_the_tree() {
    for pages in [0, 1, 63, 64, 65, 1023, 1024, 1025, 3000] {
        let flat = manifest(pages as u64, pages);
        assert_eq!(round_trip(&flat), flat.to_bytes(), "{pages} pages");
    }
}

#[test]
fn the_same_pages_share_runs_whatever_their_places_are() {
    let flat = manifest(11, 2000);
    let moved: Vec<_> = flat.pages().iter().map(|p| Page { ix: p.ix * 3 + 17, ..p.clone() }).collect();
    let moved = FlatManifest::new(GEOMETRY, moved, vec![], &Limits::default()).unwrap();
    assert_eq!(to_tree(&flat).1, to_tree(&moved).1);
    assert_ne!(to_tree(&flat).0.to_bytes(), to_tree(&moved).0.to_bytes());
}

#[test]
fn every_refusal_of_a_tree_names_the_path() {
    let (_, tree, _) = small();
    let text = String::from_utf8(tree.to_bytes()).unwrap();
    let run = tree.runs[0].digest;
    let flat = tree.flat_digest.unwrap();
    let at = |path: &str, expected: &str, found: &str| format!("page tree: at {path}: expected {expected}, found {found}");
    let geometry = r#""geometry":{"page_size_tokens":16,"n_layers":2,"n_heads":2,"head_dim":4,"dtype":"bf16"},"#;
    let flat_digest = format!(r#","flat_digest":"{flat}""#);
    let (flat, flat_blake3) = (flat.to_string(), flat.to_string().replace("sha256", "blake3"));
    let (listed, taken) = (r#"],"ix":[[3,3],[9,1]]"#, r#""ix":[[9,1],[4,1]]"#);
    let table = [
        ("schema", "pf.page-tree.v1", "pf.page-tree.v2", at("$.schema", r#""pf.page-tree.v1""#, r#""pf.page-tree.v2""#)),
        (
            "layout",
            "paged-batchinvariant-v1",
            "paged",
            at("$.layout", r#""paged-batchinvariant-v1" or a layout that starts with "opaque/""#, r#""paged""#),
        ),
        (
            "components",
            r#"["k","v"]"#,
            r#"["v","k"]"#,
            at("$.components", r#"["k","v"], ["kv"], ["latent"] or ["state"]"#, r#"["v", "k"]"#),
        ),
        ("one component", r#"["k","v"]"#, r#"["kv"]"#, at("$.components", r#"["k","v"] for this layout"#, r#"["kv"]"#)),
        (
            "no tokens",
            r#""page_size_tokens":16,"page_bytes""#,
            r#""page_size_tokens":0,"page_bytes""#,
            at("$.page_size_tokens", "a positive number", "0"),
        ),
        (
            "other page size",
            r#""page_size_tokens":16,"page_bytes""#,
            r#""page_size_tokens":17,"page_bytes""#,
            at("$.page_size_tokens", "16 as the geometry says", "17"),
        ),
        ("other page bytes", r#""page_bytes":512"#, r#""page_bytes":511"#, at("$.page_bytes", "512 as the geometry says", "511")),
        ("no page bytes", r#""page_bytes":512"#, r#""page_bytes":0"#, at("$.page_bytes", "a positive number", "0")),
        (
            "no geometry",
            geometry,
            "",
            at("$.geometry", r#"a geometry exactly when the layout is "paged-batchinvariant-v1""#, r#"layout "paged-batchinvariant-v1""#),
        ),
        (
            "geometry of an opaque layout",
            "paged-batchinvariant-v1",
            "opaque/x",
            at("$.geometry", r#"a geometry exactly when the layout is "paged-batchinvariant-v1""#, r#"layout "opaque/x""#),
        ),
        (
            "no flat digest",
            &flat_digest,
            "",
            at("$.flat_digest", r#"a digest exactly when the layout is "paged-batchinvariant-v1""#, r#"layout "paged-batchinvariant-v1""#),
        ),
        (
            "flat digest of another algorithm",
            &flat,
            &flat_blake3,
            at("$.flat_digest", "a sha256 digest, as of every document", &flat_blake3),
        ),
        ("rank", r#""rank":0"#, r#""rank":1"#, at("$.rank", "a rank below world", "rank 1 of 1")),
        ("world", r#""world":1"#, r#""world":0"#, at("$.rank", "a rank below world", "rank 0 of 0")),
        ("group", r#""name":"main""#, r#""name":"""#, at("$.group.name", "1 to 200 bytes", "0 bytes")),
        ("empty run", r#""pages":4"#, r#""pages":0"#, at("$.runs[0].pages", "1 to 1024", "0")),
        ("long run", r#""pages":4"#, r#""pages":1025"#, at("$.runs[0].pages", "1 to 1024", "1025")),
        ("pages without ix", r#""pages":4"#, r#""pages":5"#, at("$.ix", "5 indices, as many as the runs have pages", "4")),
        ("empty range", listed, r#"],"ix":[[3,4],[9,0]]"#, at("$.ix[1]", "a non-empty range of 32-bit indices", "[9,0]")),
        (
            "range past 32 bits",
            listed,
            r#"],"ix":[[3,3],[4294967295,2]]"#,
            at("$.ix[1]", "a non-empty range of 32-bit indices", "[4294967295,2]"),
        ),
        ("ranges to be merged", listed, r#"],"ix":[[3,3],[6,1]]"#, at("$.ix[1]", "adjoining ranges to be merged", "[6,1]")),
        ("ix twice", listed, r#"],"ix":[[3,3],[5,1]]"#, at("$.ix", "ascending indices, each once", "5")),
        ("ix descending", listed, r#"],"ix":[[9,1],[3,3]]"#, at("$.ix", "ascending indices, each once", "3")),
        ("a sequence into a gap", taken, r#""ix":[[9,1],[4,3]]"#, at("$.sequences[1].ix", "the ix of a page in $.ix", "6")),
        ("a sequence before the first page", taken, r#""ix":[[9,1],[2,3]]"#, at("$.sequences[1].ix", "the ix of a page in $.ix", "2")),
        ("a sequence after the last page", taken, r#""ix":[[11,1],[4,1]]"#, at("$.sequences[1].ix", "the ix of a page in $.ix", "11")),
        ("ids", r#""id":"b""#, r#""id":"a""#, at("$.sequences[1].id", "ids ascending, each once", r#""a""#)),
        ("fill", r#""fill":7"#, r#""fill":16"#, at("$.sequences[0].fill", "less than the page size 16 (0 = full)", "16")),
        (
            "fill without pages",
            r#"[[3,3],[9,1]],"fill":7"#,
            r#"[],"fill":7"#,
            at("$.sequences[0].fill", "0 for a sequence without pages", "7"),
        ),
    ];
    for (what, from, to, message) in table {
        assert!(text.contains(from), "{what}: {from} is not in {text}");
        assert_refused(what, parse(&text.replacen(from, to, 1)), &message, InvalidDocument);
    }
    for (what, from, to, message) in [
        ("unknown field", r#""rank":0"#, r#""tank":0,"rank":0"#, "page tree: at $.tank: unknown field `tank`"),
        ("upper-case digest", &run.to_string(), &run.to_string().to_uppercase(), "page tree: at $.runs[0].digest: invalid digest"),
        ("unknown kind", "full-attention", "half-attention", "page tree: at $.group.kind: unknown variant `half-attention`"),
        ("trailing bytes", r#""}"#, r#""}]"#, "page tree: at $: trailing characters"),
    ] {
        let at = text.rfind(from).unwrap();
        let error = parse(&format!("{}{to}{}", &text[..at], &text[at + from.len()..])).unwrap_err().to_string();
        assert!(error.starts_with(message), "{what}: {error}");
    }
}

#[test]
fn limits_of_a_tree_are_enforced() {
    let (_, tree, _) = small();
    let text = tree.to_bytes();
    let limits = |change: fn(&mut Limits)| {
        let mut limits = Limits { pages: 4, sequences: 2, sequence_pages: 6, page_bytes: 512, ..small_limits() };
        change(&mut limits);
        PageTree::parse(&text, &limits)
    };
    assert!(limits(|_| ()).is_ok());
    assert_refused("pages", limits(|l| l.pages = 3), "list of page indices is too large: 4, the limit is 3", TooLarge);
    assert_refused("sequences", limits(|l| l.sequences = 1), "sequences in a tree is too large: 2, the limit is 1", TooLarge);
    assert_refused("listed", limits(|l| l.sequence_pages = 5), "page indices in sequences is too large: 6, the limit is 5", TooLarge);
    assert_refused("page", limits(|l| l.page_bytes = 511), "a page in bytes is too large: 512, the limit is 511", TooLarge);
    assert_refused(
        "document",
        limits(|l| l.document_bytes = 100),
        &format!("page tree is too large: {}, the limit is 100", text.len()),
        TooLarge,
    );
}

#[test]
fn a_short_tree_that_stands_for_billions_of_indices_is_refused_or_checked_without_walking_them() {
    let (_, tree, _) = small();
    let text = String::from_utf8(tree.to_bytes()).unwrap();
    let billions = text.replace(r#"],"ix":[[3,3],[9,1]]"#, r#"],"ix":[[0,4294967295]]"#);
    assert_refused("ix", parse(&billions), "list of page indices is too large: 4294967295, the limit is 16777216", TooLarge);
    // 64 Mi indices in sequences are allowed; a kilobyte can say so, and must not cost seconds.
    let runs = vec![format!(r#"{{"digest":"{}","pages":1024}}"#, tree.runs[0].digest); 1024].join(",");
    let many = vec![format!("[0,{}]", 1 << 20); 64].join(",");
    let wide = format!(
        r#"{{"schema":"{SCHEMA}","layout":"opaque/x","page_size_tokens":16,"page_bytes":1,"components":["kv"],"group":{{"name":"main","kind":"full-attention"}},"rank":0,"world":1,"runs":[{runs}],"ix":[[0,{}]],"sequences":[{{"id":"a","ix":[{many}],"fill":0}}]}}"#,
        1 << 20
    );
    assert_eq!(parse(&wide).unwrap().tokens(), (64 << 20) * 16);
    let more = wide.replace(r#""sequences":[{"id":"a","ix":["#, r#""sequences":[{"id":"a","ix":[[7,1],"#);
    assert_refused("sequence", parse(&more), "list of page indices is too large: 67108865, the limit is 67108864", TooLarge);
}

#[test]
fn opaque_layouts_have_no_flat_form() {
    let (_, tree, runs) = small();
    let mut opaque =
        PageTree { layout: "opaque/vendor".into(), geometry: None, flat_digest: None, components: vec!["latent".into()], ..tree };
    opaque.group.kind = GroupKind::Mla;
    assert_eq!(PageTree::parse(&opaque.to_bytes(), &Limits::default()).unwrap(), opaque);
    let error = opaque.to_flat(&parse_runs(&runs), &Limits::default()).unwrap_err().to_string();
    assert_eq!(
        error,
        r#"page tree: at $.layout: expected "paged-batchinvariant-v1", the only layout with a flat form, found "opaque/vendor""#
    );
    opaque.layout = format!("opaque/{}", "x".repeat(194));
    assert_eq!(PageTree::parse(&opaque.to_bytes(), &Limits::default()).unwrap_err().code(), InvalidDocument);
}

#[test]
fn runs_that_do_not_belong_to_the_tree_give_no_flat_manifest() {
    let limits = Limits::default();
    let (_, tree, runs) = small();
    let runs = parse_runs(&runs);
    let error = tree.to_flat(&[], &limits).unwrap_err().to_string();
    assert_eq!(error, "page tree: at $.runs: expected 4 pages in all, found 0");
    assert!(tree.to_flat(&[runs[0].clone(), runs[0].clone()], &limits).is_err());
    let mut digests = runs[0].digests().to_vec();
    digests.swap(0, 1);
    let other = Run::new(2, 512, digests).unwrap();
    let named = tree.flat_digest.unwrap().to_string();
    assert!(matches!(tree.to_flat(&[other], &limits), Err(FormatError::DigestMismatch { expected, .. }) if expected == named));
    let error = tree.to_flat_of([Run::parse(b"", &limits)], &limits).unwrap_err().to_string();
    assert!(error.starts_with("page run: "), "the error of the run is the one that is told: {error}");
    let mut lying = tree;
    lying.flat_digest = Some(digest("another manifest"));
    assert!(matches!(lying.to_flat(&runs, &limits), Err(FormatError::DigestMismatch { .. })));
}

#[test]
fn an_unchecked_tree_neither_panics_nor_takes_the_memory_it_asks_for() {
    let (_, mut tree, runs) = small();
    tree.sequences[0].fill = u32::MAX;
    assert_eq!(tree.tokens(), 64);
    tree.sequences[0].ix = serde_json::from_str("[[0,4294967295],[0,4294967295]]").unwrap();
    tree.page_size_tokens = u32::MAX;
    assert!(tree.tokens() > 1 << 32);
    assert!(tree.to_flat(&parse_runs(&runs), &Limits::default()).is_err());
}

#[test]
fn a_shard_that_could_not_be_read_back_cannot_be_made() {
    let (flat, ..) = small();
    assert!(PageTree::from_flat(&flat, Group::default(), 1, 2).is_ok());
    assert!(PageTree::from_flat(&flat, Group::default(), 2, 2).is_err());
    assert!(PageTree::from_flat(&flat, Group { name: String::new(), kind: GroupKind::Mla }, 0, 1).is_err());
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn flat_to_tree_to_flat_is_the_identity(seed in any::<u64>(), pages in prop_oneof![4 => 0_usize..200, 1 => 0_usize..3000]) {
        let flat = manifest(seed, pages);
        prop_assert_eq!(round_trip(&flat), flat.to_bytes());
    }

    #[test]
    fn a_tree_that_parses_is_read_back_from_its_own_bytes(seed in any::<u64>()) {
        let bytes = to_tree(&manifest(seed, 5)).0.to_bytes();
        let mut random = Random(seed);
        for _ in 0..50 {
            if let Ok(tree) = PageTree::parse(&mutate(&bytes, &mut random), &Limits::default()) {
                prop_assert_eq!(PageTree::parse(&tree.to_bytes(), &Limits::default()).unwrap(), tree);
            }
        }
    }
}
