#![no_main]
//! Server-sent events: the same blocks however the bytes come, and none that holds more than it
//! may. An event id that parses prints as itself.

use libfuzzer_sys::fuzz_target;
use pfr_schema::api::EventId;
use pfr_schema::sse::{Block, Blocks};

fn blocks(pieces: &[&[u8]]) -> Option<Vec<Block>> {
    let (mut blocks, mut found) = (Blocks::default(), Vec::new());
    for piece in pieces {
        blocks.push(piece);
        while let Some(block) = blocks.pop().ok()? {
            assert!(block.data.len() <= 4 << 20);
            found.push(block);
        }
    }
    Some(found)
}

fuzz_target!(|input: &[u8]| {
    let middle = input.first().map_or(0, |first| usize::from(*first).min(input.len()));
    assert_eq!(blocks(&[input]), blocks(&[&input[..middle], &input[middle..]]));
    if let Ok(text) = std::str::from_utf8(input)
        && let Ok(id) = text.parse::<EventId>()
    {
        assert_eq!(id.to_string(), text);
    }
});
