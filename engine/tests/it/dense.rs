//! The dense core in shared memory gives the bits of the engine in ordinary memory.

use pfr_engine::blocks::Placement;
use pfr_engine::compute::{Core, Dense};
use pfr_engine::text::PROSE;
use pfr_engine::{Engine, Sampler, default_cache_dir, locate_model};

#[test]
fn the_dense_core_gives_the_bits_of_the_engine_over_any_garbage() {
    let model = locate_model(&default_cache_dir().unwrap()).unwrap();
    let mut engine = Engine::load(&model, 2).unwrap();
    let mut core = Dense::load(&model, 2, 8, Placement { seed: Some(5), dirty: Some(6) }).unwrap();
    let tokens = &engine.tokenize(PROSE).unwrap()[..29];
    assert_eq!(core.tokenize(PROSE).unwrap()[..29], *tokens);
    let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();

    let seq = engine.create();
    engine.prefill(seq, tokens).unwrap();
    let other = core.blocks_mut().create().unwrap();
    let mut logits = core.compute(other, tokens).unwrap();
    // The rest of the page after the last token must not matter: it is never zeroed.
    let page = *core.blocks().blocks(other).unwrap()["main"].last().unwrap();
    let row = 3 * 64 * 2;
    for byte in 14 * row..15 * row {
        assert!(core.blocks_mut().poke("main", page, byte));
    }
    for step in 0..6 {
        assert!(bits(&engine.logits(seq).unwrap()) == bits(&logits), "step {step}");
        let token = Sampler::Greedy.choose(&logits);
        engine.generate(seq, 1).unwrap();
        logits = core.compute(other, &[token]).unwrap();
    }
}
