//! The hybrid model: the same bits however tokens are cut, wherever blocks lie and whatever lay in
//! them before.

use pfr_engine::blocks::Placement;
use pfr_engine::compute::Core;
use pfr_engine::hybrid::{Hybrid, VOCABULARY, WINDOW};
use pfr_engine::rng::Rng;
use pfr_engine::{EngineError, PAGE_TOKENS, SeqId};

fn engine(placement: Placement) -> Hybrid {
    Hybrid::new(7, 32, placement).unwrap()
}

fn prompt(tokens: usize) -> Vec<u32> {
    let mut rng = Rng::new(3);
    (0..tokens).map(|_| rng.below(VOCABULARY) as u32).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// Logits of `count` steps that follow `token`. Each step takes the token with the highest one.
fn go_on(engine: &mut Hybrid, seq: SeqId, mut token: u32, count: usize) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for _ in 0..count {
        let logits = engine.compute(seq, &[token]).unwrap();
        token = pfr_engine::Sampler::Greedy.choose(&logits);
        all.push(bits(&logits));
    }
    all
}

#[test]
fn a_prompt_gives_the_same_bits_as_single_steps_in_any_blocks_over_any_garbage() {
    let tokens = prompt(3 * WINDOW + 5);
    let mut plain = engine(Placement::default());
    let seq = plain.blocks_mut().create().unwrap();
    let want = bits(&plain.compute(seq, &tokens).unwrap());
    assert!(want.iter().all(|x| f32::from_bits(*x).is_finite()) && want.iter().any(|x| *x != want[0]));

    for (seed, dirty) in [(None, None), (Some(4), None), (None, Some(5)), (Some(6), Some(7))] {
        let mut engine = engine(Placement { seed, dirty });
        // Blocks that another sequence has left behind come first.
        let other = engine.blocks_mut().create().unwrap();
        engine.compute(other, &prompt(60)).unwrap();
        engine.blocks_mut().free(other).unwrap();
        let seq = engine.blocks_mut().create().unwrap();
        let mut last = Vec::new();
        for token in &tokens {
            last = bits(&engine.compute(seq, &[*token]).unwrap());
        }
        assert!(last == want, "placement {seed:?}, garbage {dirty:?}");
        assert_eq!(go_on(&mut engine, seq, 1, 30), go_on_fresh(&tokens, 30));
    }
}

fn go_on_fresh(tokens: &[u32], count: usize) -> Vec<Vec<u32>> {
    let mut engine = engine(Placement::default());
    let seq = engine.blocks_mut().create().unwrap();
    engine.compute(seq, tokens).unwrap();
    go_on(&mut engine, seq, 1, count)
}

#[test]
fn a_fork_goes_on_like_the_original_and_neither_disturbs_the_other() {
    for length in [WINDOW + 7, 4 * PAGE_TOKENS, 1] {
        let mut engine = engine(Placement { seed: Some(1), dirty: Some(2) });
        let seq = engine.blocks_mut().create().unwrap();
        engine.compute(seq, &prompt(length)).unwrap();
        let fork = engine.blocks_mut().fork(seq).unwrap();
        // The original runs first, with other tokens: its writes must not reach the fork.
        go_on(&mut engine, seq, 2, 20);
        assert_eq!(go_on(&mut engine, fork, 1, 20), go_on_fresh(&prompt(length), 20), "{length}");
        engine.blocks_mut().free(seq).unwrap();
        engine.blocks_mut().free(fork).unwrap();
        assert!(engine.blocks().used().iter().all(|used| used.blocks.is_empty()), "every block came back");
    }
}

#[test]
fn every_layer_kind_and_every_state_tensor_matters() {
    let tokens = prompt(2 * WINDOW);
    let want = go_on_fresh(&tokens, 1);
    let groups = engine(Placement::default()).blocks().layouts();
    for group in &groups {
        let parts = group.components.iter().flat_map(|c| &c.parts).chain(group.states.iter().map(|s| &s.part));
        let mut begins = 0;
        for part in parts {
            let mut engine = engine(Placement::default());
            let seq = engine.blocks_mut().create().unwrap();
            engine.compute(seq, &tokens).unwrap();
            let block = *engine.blocks().blocks(seq).unwrap()[&group.name].last().unwrap();
            // Exponent and sign of some value: byte 1 of a bfloat16, byte 3 of an f32, behind
            // padding.
            assert!(engine.blocks_mut().poke(&group.name, block, begins + 16 + 3));
            assert!(go_on(&mut engine, seq, 1, 1) != want, "group {}, part at {begins}", group.name);
            begins += part.bytes;
        }
        assert!(!engine(Placement::default()).blocks_mut().poke(&group.name, 1, begins), "one byte too far");
    }
}

#[test]
fn blocks_fall_out_of_the_window_and_pins_keep_them() {
    let mut engine = engine(Placement { seed: None, dirty: Some(9) });
    let seq = engine.blocks_mut().create().unwrap();
    let tokens = prompt(200);
    let mut pinned = None;
    for (computed, token) in (1..).zip(&tokens) {
        engine.compute(seq, &[*token]).unwrap();
        let columns = engine.blocks().blocks(seq).unwrap()["window"].clone();
        assert_eq!(columns.len(), usize::div_ceil(computed, PAGE_TOKENS));
        for (column, block) in columns.iter().enumerate() {
            // A column is held as long as the token at the boundary sees one of its tokens.
            let seen = (column + 1) * PAGE_TOKENS + WINDOW > computed + 1;
            assert_eq!(*block != 0, seen, "column {column} at {computed}");
        }
        if computed == 64 {
            pinned = Some((engine.blocks_mut().pin(seq).unwrap(), columns[1..].to_vec()));
        }
    }
    let (pin, blocks) = pinned.unwrap();
    engine.blocks_mut().free(seq).unwrap();
    let held = |engine: &Hybrid| engine.blocks().used().into_iter().find(|u| u.group == "window").unwrap().blocks;
    let mut want = blocks;
    want.sort_unstable();
    assert_eq!(held(&engine), want);
    engine.blocks_mut().unpin(pin);
    assert!(engine.blocks().used().iter().all(|used| used.blocks.is_empty()));
}

#[test]
fn allocated_blocks_are_those_of_a_sequence_that_ran() {
    for boundary in [1, 15, 16, 17, 39, 40, 47, 48, 55, 56, 57, 120] {
        let mut engine = engine(Placement::default());
        let ran = engine.blocks_mut().create().unwrap();
        engine.compute(ran, &prompt(boundary)).unwrap();
        let taken = engine.blocks_mut().allocate(boundary).unwrap();
        let shape = |seq| {
            let blocks = engine.blocks().blocks(seq).unwrap();
            blocks.into_iter().map(|(name, columns)| (name, columns.iter().map(|b| *b == 0).collect::<Vec<_>>())).collect::<Vec<_>>()
        };
        let (ran, taken) = (shape(ran), shape(taken));
        assert_eq!(ran[2], taken[2], "window at {boundary}");
        assert_eq!(ran[0].1.len(), taken[0].1.len(), "main at {boundary}");
    }
}

#[test]
fn a_full_pool_and_bad_tokens_change_nothing() {
    let mut engine = Hybrid::new(7, 3, Placement::default()).unwrap();
    let seq = engine.blocks_mut().create().unwrap();
    engine.compute(seq, &prompt(2 * PAGE_TOKENS)).unwrap();
    let before = engine.blocks().digest();
    let fork = engine.blocks_mut().fork(seq).unwrap();
    // Three window blocks, one of them null: two are held by both, none is left.
    assert!(matches!(engine.compute(fork, &[1]), Err(EngineError::PoolFull { .. })));
    assert!(matches!(engine.compute(fork, &[VOCABULARY as u32]), Err(EngineError::Token { .. })));
    engine.blocks_mut().free(fork).unwrap();
    assert!(matches!(engine.compute(fork, &[1]), Err(EngineError::NoSequence(_))));
    assert_eq!(engine.blocks().digest(), before);
    assert_ne!(Hybrid::new(8, 3, Placement::default()).unwrap().weights(), engine.weights());
}
