//! The engine with the real model: is it right, and does it keep its promises bit for bit?

use pfr_engine::dump::{MANIFEST, Manifest, write_snapshot_dir};
use pfr_engine::rng::Rng;
use pfr_engine::text::{PROSE, corpus};
use pfr_engine::tinyllama::{self, Source, write_tinyllama_dir, write_tinyllama_fork};
use pfr_engine::{Engine, EngineError, Options, PAGE_TOKENS, SeqId, default_cache_dir, locate_model};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;

/// The weights, loaded once for all tests of this file.
fn base() -> &'static Engine {
    static BASE: OnceLock<Engine> = OnceLock::new();
    BASE.get_or_init(|| {
        let model = locate_model(&default_cache_dir().unwrap()).unwrap();
        Engine::load_with(&model, Options { blocks: 1, ..Options::default() }).unwrap()
    })
}

fn engine() -> Engine {
    base().sibling(Options { blocks: 64, ..Options::default() })
}

fn prose(tokens: usize) -> Vec<u32> {
    let mut all = base().tokenize(PROSE).unwrap();
    assert!(all.len() >= tokens, "the prose has {} tokens", all.len());
    all.truncate(tokens);
    all
}

type State = (Vec<(Vec<u8>, Vec<u8>)>, Vec<u32>);

/// Pages and logits of a sequence, as bits.
fn state(engine: &mut Engine, seq: SeqId) -> State {
    let logits = engine.logits(seq).unwrap().iter().map(|x| x.to_bits()).collect();
    (pages(engine, seq), logits)
}

fn pages(engine: &Engine, seq: SeqId) -> Vec<(Vec<u8>, Vec<u8>)> {
    let pages = engine.pages(seq).unwrap().iter().map(|b| engine.page_bytes(*b));
    pages.map(|(k, v)| (k.to_vec(), v.to_vec())).collect()
}

fn restore(engine: &mut Engine, tokens: &[u32], pages: &[(Vec<u8>, Vec<u8>)]) -> Result<SeqId, EngineError> {
    let pages: Vec<_> = pages.iter().map(|(k, v)| (k.as_slice(), v.as_slice())).collect();
    engine.restore(tokens, &pages)
}

#[test]
fn the_model_speaks_english_and_knows_paris() {
    let mut engine = engine();
    let seq = engine.create();
    let prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    engine.prefill(seq, &engine.tokenize(prompt).unwrap()).unwrap();
    let answer = engine.generate(seq, 8).unwrap();
    assert_eq!(engine.detokenize(&answer[..7]), "The capital of France is Paris.");
    assert_eq!(answer[7], engine.tokenizer().eos());
}

#[test]
fn tokens_are_the_published_ones_and_text_survives() {
    let engine = base();
    assert_eq!(
        engine.tokenize("<|im_start|>system\nYou are a helpful AI assistant").unwrap(),
        [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173]
    );
    for text in ["", " ", "12345", "it's  3 o'clock\r\n\tnow ", "naïve 日本語 🙂 ½ <|im_end|> <|im_", "<|endoftext|><<|>", PROSE] {
        assert_eq!(engine.detokenize(&engine.tokenize(text).unwrap()), text);
    }
    let mut rng = Rng::new(5);
    for _ in 0..300 {
        // Characters of the planes in use; the vocabulary lacks the lead bytes of the others.
        let text: String = (0..rng.below(60))
            .filter_map(|_| char::from_u32(rng.below([0x7F, 0x3000, 0x1_0000, 0x2_0000][rng.clone().below(4)]) as u32))
            .filter(|c| !"\u{4}\u{6}\u{13}\u{14}\u{16}\u{1d}".contains(*c))
            .collect();
        assert_eq!(engine.detokenize(&engine.tokenize(&text).unwrap()), text, "{text:?}");
    }
    assert!(matches!(engine.tokenize("a<|im_end|>b\u{4}"), Err(EngineError::Tokenize { byte: 4, offset: 12 })));
}

#[test]
fn bits_do_not_depend_on_chunks_threads_or_placement() {
    // More than a pass through the layers takes (128), so that one call has two of them.
    let tokens = prose(130);
    let run = |options: Options, cuts: &[usize]| {
        let mut engine = base().sibling(Options { blocks: 16, ..options });
        let seq = engine.create();
        let mut from = 0;
        for to in cuts.iter().copied().chain([tokens.len()]) {
            engine.prefill(seq, &tokens[from..to]).unwrap();
            from = to;
        }
        state(&mut engine, seq)
    };
    let want = run(Options { threads: 1, ..Options::default() }, &[]);
    let singles: Vec<usize> = (56..72).collect();
    assert!(run(Options { threads: 1, placement: Some(1), ..Options::default() }, &singles) == want, "one by one");
    assert!(run(Options { threads: 2, placement: Some(2), ..Options::default() }, &[1, 7, 63, 64, 65, 80]) == want, "in pieces");
    assert!(run(Options { threads: 5, ..Options::default() }, &[129]) == want, "five threads");
}

#[test]
fn a_restored_sequence_goes_on_as_if_nothing_had_happened() {
    // In the middle of a page, one slot before its end, at a boundary, and one slot after.
    for length in [23, 31, 32, 33] {
        let mut engine = engine();
        let seq = engine.create();
        engine.prefill(seq, &prose(length)).unwrap();
        let saved = pages(&engine, seq);
        assert_eq!(saved.len(), length.div_ceil(PAGE_TOKENS));
        let uninterrupted = engine.generate(seq, 10).unwrap();

        let mut other = base().sibling(Options { blocks: 16, placement: Some(9), threads: 1 });
        let restored = restore(&mut other, &prose(length), &saved).unwrap();
        assert_eq!(other.generate(restored, 10).unwrap(), uninterrupted, "{length}");
        assert!(state(&mut other, restored) == state(&mut engine, seq), "{length}");
    }
}

#[test]
fn the_stored_bytes_are_what_generation_reads() {
    let mut engine = engine();
    let seq = engine.create();
    engine.prefill(seq, &prose(40)).unwrap();
    let mut saved = pages(&engine, seq);
    let original = restore(&mut engine, &prose(40), &saved).unwrap();
    assert!(engine.logits(original).unwrap() == engine.logits(seq).unwrap());
    let last = saved[0].1.len() - 1;
    saved[0].1[last] ^= 0x80; // the sign of one number of V
    let changed = restore(&mut engine, &prose(40), &saved).unwrap();
    assert!(engine.logits(changed).unwrap() != engine.logits(seq).unwrap());
}

#[test]
fn forks_diverge_without_touching_each_other() {
    let mut engine = engine();
    let parent = engine.create();
    engine.prefill(parent, &prose(36)).unwrap();
    let before = state(&mut engine, parent);
    let (a, b) = (engine.fork(parent).unwrap(), engine.fork(parent).unwrap());
    assert_eq!(engine.pages(a).unwrap(), engine.pages(b).unwrap());
    let (x, y) = (engine.tokenize(" Then the door").unwrap(), engine.tokenize(" But nobody").unwrap());
    engine.prefill(a, &x).unwrap();
    engine.prefill(b, &y).unwrap();
    engine.generate(b, 5).unwrap();
    engine.generate(a, 5).unwrap();
    assert!(state(&mut engine, parent) == before, "the parent is as it was");
    assert_eq!(engine.pages(a).unwrap()[..2], engine.pages(parent).unwrap()[..2]);
    let all: BTreeSet<_> = [a, b, parent].map(|s| engine.pages(s).unwrap()[2]).into();
    assert_eq!(all.len(), 3);

    let alone = engine.create();
    let tokens = engine.tokens(a).unwrap().to_vec();
    engine.prefill(alone, &tokens).unwrap();
    assert!(state(&mut engine, alone) == state(&mut engine, a), "a fork is what its tokens alone would give");
    for seq in [a, b, parent, alone] {
        engine.free(seq).unwrap();
    }
    assert_eq!(engine.cache().free_blocks(), 64);
}

#[test]
fn errors_change_nothing() {
    let mut engine = base().sibling(Options { blocks: 2, ..Options::default() });
    let seq = engine.create();
    assert!(matches!(engine.generate(seq, 1), Err(EngineError::EmptySequence(_))));
    engine.prefill(seq, &prose(20)).unwrap();
    let before = state(&mut engine, seq);
    assert!(matches!(engine.prefill(seq, &[1, 49_152]), Err(EngineError::Token { token: 49_152, vocabulary: 49_152 })));
    assert!(matches!(engine.prefill(seq, &[1; 13]), Err(EngineError::PoolFull { blocks: 2, .. })));
    assert!(matches!(engine.prefill(seq, &[1; 8173]), Err(EngineError::ContextFull { tokens: 8193, limit: 8192 })));
    assert!(matches!(restore(&mut engine, &prose(20), &before.0), Err(EngineError::PoolFull { .. })));
    assert!(matches!(restore(&mut engine, &prose(20), &before.0[..1]), Err(EngineError::Restore(_))));
    assert!(state(&mut engine, seq) == before);
    engine.free(seq).unwrap();
    assert!(matches!(engine.fork(seq), Err(EngineError::NoSequence(_))));
    assert!(matches!(engine.prefill(seq, &[1]), Err(EngineError::NoSequence(_))));
}

/// Every file below a directory with its bytes.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut out = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(at) = todo.pop() {
        for entry in std::fs::read_dir(at).unwrap().map(|e| e.unwrap().path()) {
            if entry.is_dir() {
                todo.push(entry);
            } else {
                out.push((entry.strip_prefix(dir).unwrap().display().to_string(), std::fs::read(&entry).unwrap()));
            }
        }
    }
    out.sort();
    out
}

#[test]
fn a_snapshot_directory_holds_the_state_and_nothing_of_its_placement() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, placement| {
        let mut engine = base().sibling(Options { blocks: 16, placement, threads: 0 });
        let a = engine.create();
        engine.prefill(a, &prose(39)).unwrap();
        let b = engine.fork(a).unwrap();
        engine.prefill(b, &prose(9)).unwrap();
        let path = dir.path().join(name);
        let written = write_snapshot_dir(&path, &engine, &[b, a]).unwrap();
        assert_eq!((written.pages, written.blobs, written.bytes), (4, 8, 8 * 184_320));
        assert!(matches!(write_snapshot_dir(&path, &engine, &[a]), Err(EngineError::Snapshot(_))));
        files(&path)
    };
    let (one, two) = (write("one", None), write("two", Some(77)));
    assert!(one == two);
    let (name, manifest) = one.last().unwrap();
    assert_eq!(name, MANIFEST);
    let manifest = std::str::from_utf8(manifest).unwrap();
    let head = r#"{"layout":"paged-batchinvariant-v1","page_size_tokens":16,"n_layers":30,"n_heads":3,"head_dim":64,"dtype":"bf16","pages":[{"ix":0,"k":"sha256:"#;
    let tail = r#""logical_seqs":[{"id":"seq-1","page_ixs":[0,1,2],"fill_in_last_page":7},{"id":"seq-2","page_ixs":[0,1,3],"fill_in_last_page":0}]}"#;
    assert!(manifest.starts_with(head) && manifest.ends_with(tail), "{manifest}");
    // The same bits on every machine: these pages are constants.
    let parsed = Manifest::read(&dir.path().join("one")).unwrap();
    assert_eq!(parsed.pages[0].k, "sha256:803f4c85a3fa2f3d456165adb71a128a184e06f9a9b8251442fc612efc322037");
    assert_eq!(parsed.pages[2].v, "sha256:d5c74bf761f093764e5c2391eb57b1c2d851eefc74c02650d75c97b8042af565");
}

#[test]
fn tinyllama_directories_are_unique_real_and_fork_by_links() {
    let mut engine = engine();
    let sequences = corpus(&mut engine, None, 128, 1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (base, fork, again) = (dir.path().join("base"), dir.path().join("fork"), dir.path().join("again"));
    let source = Source::new(&engine, &sequences, 7).unwrap();
    let written = write_tinyllama_dir(&base, source, 20).unwrap();
    assert_eq!((written.pages, written.blobs, written.bytes), (20, 40, 40 * 180_224));
    write_tinyllama_dir(&again, source, 20).unwrap();
    assert!(files(&base) == files(&again), "the seed decides");

    let written = write_tinyllama_fork(&base, &fork, source, 10.0, 1).unwrap();
    assert_eq!((written.pages, written.blobs, written.bytes), (20, 4, 4 * 180_224));
    let (a, b) = (Manifest::read(&base).unwrap(), Manifest::read(&fork).unwrap());
    assert_eq!(a.pages[..18], b.pages[..18]);
    assert!((18..20).all(|i| a.pages[i].k != b.pages[i].k && a.pages[i].v != b.pages[i].v));
    assert_eq!(files(&fork).len(), 41);

    // Slot (layer 0, head 0): 16 vectors that follow each other in one layer and head of the
    // source.
    let hex = &a.pages[3].k["sha256:".len()..];
    let page = std::fs::read(base.join("blobs/sha256").join(&hex[..2]).join(hex)).unwrap();
    let vector = |token: usize| &page[token * tinyllama::SHAPE.row_bytes()..][..128];
    let rows: Vec<_> = sequences.iter().map(|s| pages(&engine, *s)).collect();
    let found = rows.iter().any(|pages| {
        let at = |lane: usize, t: usize| &pages[t / 16].0[((lane / 3 * 16 + t % 16) * 3 + lane % 3) * 128..][..128];
        (0..90).any(|lane| (0..=128 - 16).any(|start| (0..16).all(|t| at(lane, start + t) == vector(t))))
    });
    assert!(found);
}
