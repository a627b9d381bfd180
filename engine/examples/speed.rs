//! Speed of the engine: `cargo run --release -p pfr-engine --example speed -- [threads]`.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use pfr_engine::{Engine, default_cache_dir, locate_model};
use std::time::Instant;

fn main() {
    let threads = std::env::args().nth(1).map_or(0, |a| a.parse().unwrap());
    let model = locate_model(&default_cache_dir().unwrap()).unwrap();
    let start = Instant::now();
    let mut engine = Engine::load(&model, threads).unwrap();
    println!("load {:.2} s, {}", start.elapsed().as_secs_f64(), engine.model().isa());
    for length in [64, 512, 2048] {
        let tokens: Vec<u32> = (0..length).map(|i| i * 7919 % 40_000 + 100).collect();
        let seq = engine.create();
        let start = Instant::now();
        engine.prefill(seq, &tokens).unwrap();
        let prefill = f64::from(length) / start.elapsed().as_secs_f64();
        let start = Instant::now();
        engine.generate(seq, 32).unwrap();
        let generate = 32.0 / start.elapsed().as_secs_f64();
        println!("{length} tokens: prefill {prefill:.0} tokens/s, then generation {generate:.0} tokens/s");
    }
}
