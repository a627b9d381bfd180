//! Codecs on real pages: bytes saved, and speed on one core, beside zstd and a plain copy.
//!
//! All contenders take turns in each round, so that a busy machine slows all of them alike. Each
//! page counts with its fastest round: other programs make a round slower, and never faster.

use crate::Result;
use crate::contender::sibling;
use crate::goals::{self, Fact};
use crate::machine::describe;
use crate::workload::{Snapshot, Workload};
use pfr_schema::codec::{Codec, Decoder, Kernel, TensorEncoder};
use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;
use zstd::bulk::{Compressor, Decompressor};

/// Arguments of `codecs`.
#[derive(clap::Args)]
pub struct Args {
    /// Pages of the workload, 360,448 bytes each
    #[arg(long, default_value_t = 128)]
    pages: usize,
    /// Snapshot directory to take pages from instead, as `pf-kv` writes them
    #[arg(long)]
    from: Option<PathBuf>,
    /// Rounds; each page counts with its fastest
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Also zstd-19: minutes a round
    #[arg(long)]
    slow: bool,
}

/// Encodes and decodes pages in memory that it keeps.
trait Coder {
    fn encode<'a>(&'a mut self, raw: &'a [u8]) -> Result<&'a [u8]>;
    /// Decodes to `raw`, which is empty and has room.
    fn decode(&mut self, stored: &[u8], raw_len: usize, raw: &mut Vec<u8>) -> Result<()>;
}

/// A plain copy.
#[derive(Default)]
struct Copy(Vec<u8>);

impl Coder for Copy {
    fn encode<'a>(&'a mut self, raw: &'a [u8]) -> Result<&'a [u8]> {
        self.0.clear();
        self.0.extend_from_slice(raw);
        Ok(&self.0)
    }

    fn decode(&mut self, stored: &[u8], _: usize, raw: &mut Vec<u8>) -> Result<()> {
        raw.extend_from_slice(stored);
        Ok(())
    }
}

/// One of ours.
struct Tensor {
    codec: Codec,
    kernel: Kernel,
    encoder: TensorEncoder,
}

impl Coder for Tensor {
    fn encode<'a>(&'a mut self, raw: &'a [u8]) -> Result<&'a [u8]> {
        Ok(self.encoder.encode(raw).unwrap_or(raw))
    }

    fn decode(&mut self, stored: &[u8], raw_len: usize, raw: &mut Vec<u8>) -> Result<()> {
        let codec = if stored.len() == raw_len { Codec::Raw } else { self.codec };
        let mut decoder = Decoder::with_kernel(codec, raw_len as u64, self.kernel)?;
        decoder.update_some(stored, usize::MAX, raw)?;
        Ok(decoder.finish()?)
    }
}

struct Zstd {
    encoder: Compressor<'static>,
    decoder: Decompressor<'static>,
    stored: Vec<u8>,
}

impl Coder for Zstd {
    fn encode<'a>(&'a mut self, raw: &'a [u8]) -> Result<&'a [u8]> {
        self.stored.clear();
        self.stored.reserve(zstd::zstd_safe::compress_bound(raw.len()));
        self.encoder.compress_to_buffer(raw, &mut self.stored)?;
        Ok(&self.stored)
    }

    fn decode(&mut self, stored: &[u8], _: usize, raw: &mut Vec<u8>) -> Result<()> {
        self.decoder.decompress_to_buffer(stored, raw)?;
        Ok(())
    }
}

struct Contender {
    name: String,
    coder: Box<dyn Coder>,
    pages: Vec<Measured>,
}

/// A page as one contender stores it.
struct Measured {
    stored: Vec<u8>,
    /// Seconds.
    encode: f64,
    decode: f64,
}

fn contenders(slow: bool) -> Result<Vec<Contender>> {
    let mut all: Vec<(String, Box<dyn Coder>)> = vec![("copy".into(), Box::<Copy>::default())];
    for codec in [Codec::Bf16Bitmaps, Codec::Bf16Huffman] {
        let kernels = if codec == Codec::Bf16Bitmaps { Kernel::available() } else { vec![Kernel::detect()] };
        for kernel in kernels {
            let name = if codec == Codec::Bf16Bitmaps { format!("{} ({})", codec.name(), kernel.name()) } else { codec.name().into() };
            all.push((name, Box::new(Tensor { codec, kernel, encoder: TensorEncoder::with_kernel(codec, kernel)? })));
        }
    }
    for level in [1].into_iter().chain(slow.then_some(19)) {
        let coder = Zstd { encoder: Compressor::new(level)?, decoder: Decompressor::new()?, stored: Vec::new() };
        all.push((format!("zstd-{level}"), Box::new(coder)));
    }
    Ok(all.into_iter().map(|(name, coder)| Contender { name, coder, pages: Vec::new() }).collect())
}

/// Measures and prints the table.
pub fn run(args: &Args) -> Result<()> {
    let snapshot = match &args.from {
        Some(dir) => Snapshot::read(dir.clone())?,
        None => Workload::prepare(args.pages, &sibling("pf-kv")?)?.base,
    };
    let blobs = &snapshot.blobs[..snapshot.blobs.len().min(2 * args.pages)];
    let pages = blobs.iter().map(|blob| Ok(std::fs::read(&blob.path)?)).collect::<Result<Vec<_>>>()?;
    let bytes: usize = pages.iter().map(Vec::len).sum();
    let mut all = contenders(args.slow)?;
    let mut raw = Vec::with_capacity(pages.iter().map(Vec::len).max().unwrap_or(0));
    for contender in &mut all {
        for page in &pages {
            let stored = contender.coder.encode(page)?.to_vec();
            raw.clear();
            contender.coder.decode(&stored, page.len(), &mut raw)?;
            if raw != *page {
                return Err(format!("{} gives other bytes back", contender.name).into());
            }
            contender.pages.push(Measured { stored, encode: f64::MAX, decode: f64::MAX });
        }
    }
    for _ in 0..args.rounds {
        for contender in &mut all {
            for (page, measured) in pages.iter().zip(&mut contender.pages) {
                let start = Instant::now();
                black_box(contender.coder.encode(black_box(page))?);
                measured.encode = measured.encode.min(start.elapsed().as_secs_f64());
                raw.clear();
                let start = Instant::now();
                contender.coder.decode(black_box(&measured.stored), page.len(), &mut raw)?;
                black_box(&raw);
                measured.decode = measured.decode.min(start.elapsed().as_secs_f64());
            }
        }
    }
    let machine = describe(&[]);
    println!("{} × {}, {}; one core\n", machine.cores, machine.cpu, machine.kernel);
    println!("| {} blobs, {:.1} MB | encode GB/s | decode GB/s | ratio |\n|---|---|---|---|", pages.len(), bytes as f64 / 1e6);
    let mut facts = Vec::new();
    for contender in &all {
        let speed = |seconds: fn(&Measured) -> f64| bytes as f64 / contender.pages.iter().map(seconds).sum::<f64>() / 1e9;
        let stored: usize = contender.pages.iter().map(|page| page.stored.len()).sum();
        let (encode, decode, ratio) = (speed(|page| page.encode), speed(|page| page.decode), bytes as f64 / stored as f64);
        println!("| {} | {encode:.3} | {decode:.3} | {ratio:.3} |", contender.name);
        match contender.name.as_str() {
            "bf16-bitmaps (AVX-512)" => facts.extend([(Fact::HotEncode, encode), (Fact::HotDecode, decode), (Fact::HotRatio, ratio)]),
            "bf16-bitmaps (portable)" => facts.push((Fact::HotRatio, ratio)),
            "bf16-huffman" => facts.push((Fact::ColdRatio, ratio)),
            _ => {}
        }
    }
    println!("\n{}", goals::render(&goals::of_facts(&facts)));
    Ok(())
}
