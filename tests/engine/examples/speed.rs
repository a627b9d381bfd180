//! Speed of the engine: `cargo run --release --example speed -- [threads]`.
#![allow(clippy::unwrap_used, clippy::print_stdout)]
use pfr_engine::*;
use std::time::Instant;
fn main() {
    let cache = default_cache_dir().unwrap();
    let t = Instant::now();
    let model = std::env::var("GGUF").map(Into::into).unwrap_or_else(|_| locate_model(&cache).unwrap());
    println!("locate {:?}", t.elapsed());
    let threads = std::env::args().nth(1).map_or(0, |a| a.parse().unwrap());
    let t = Instant::now();
    let mut e = Engine::load(&model, threads).unwrap();
    println!("load {:?} {}", t.elapsed(), e.model().isa());
    let prompt = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nWhat is the capital of France, and why is the sky blue?<|im_end|>\n<|im_start|>assistant\n";
    let toks = e.tokenize(prompt).unwrap();
    println!("{toks:?}");
    let s = e.create();
    let t = Instant::now();
    e.prefill(s, &toks).unwrap();
    println!("prefill {} {:?}", toks.len(), t.elapsed());
    let t = Instant::now();
    let g = e.generate(s, 100).unwrap();
    println!("gen 100: {:?}/tok\n{}", t.elapsed() / 100, e.detokenize(&g));
    for n in [512, 2048] {
        let toks: Vec<u32> = (0..n).map(|i| (i * 7919 % 40000 + 100) as u32).collect();
        let s = e.create();
        let t = Instant::now();
        e.prefill(s, &toks).unwrap();
        let d = t.elapsed();
        println!("prefill {n} {d:?} {:.0} tok/s", n as f64 / d.as_secs_f64());
        let t = Instant::now();
        e.generate(s, 20).unwrap();
        println!("gen at {n}: {:?}/tok", t.elapsed() / 20);
    }
}
