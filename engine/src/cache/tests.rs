//! Tests of the paged cache without a model.

use super::*;

const SHAPE: KvShape = KvShape { layers: 2, heads: 1, head_dim: 4 };

fn append(cache: &mut PagedCache, seq: SeqId, count: usize, value: u16) {
    let start = cache.tokens(seq).unwrap();
    cache.extend(seq, count).unwrap();
    for position in start..start + count {
        for layer in 0..SHAPE.layers {
            cache.sequence(seq).unwrap().write(layer, position, &[value; 4], &[value + 1; 4]);
        }
    }
}

fn state(cache: &PagedCache, seq: SeqId) -> Vec<(Vec<u8>, Vec<u8>)> {
    cache.blocks(seq).unwrap().iter().map(|b| cache.page(*b)).map(|(k, v)| (k.to_vec(), v.to_vec())).collect()
}

#[test]
fn a_fork_shares_full_pages_and_copies_the_last_one_when_written() {
    let mut cache = PagedCache::new(SHAPE, 8, None);
    let a = cache.create();
    append(&mut cache, a, 20, 5);
    let b = cache.fork(a).unwrap();
    assert_eq!(cache.blocks(a).unwrap(), cache.blocks(b).unwrap());
    let before = state(&cache, a);
    append(&mut cache, b, 1, 9);
    assert_eq!(state(&cache, a), before);
    assert_eq!(cache.blocks(a).unwrap()[0], cache.blocks(b).unwrap()[0]);
    assert_ne!(cache.blocks(a).unwrap()[1], cache.blocks(b).unwrap()[1]);
    append(&mut cache, a, 1, 9);
    assert_eq!(state(&cache, a), state(&cache, b));
    cache.free(a).unwrap();
    cache.free(b).unwrap();
    assert_eq!(cache.free_blocks(), 8);
}

#[test]
fn reused_blocks_are_zero_and_placement_only_moves_them() {
    let mut states = Vec::new();
    for placement in [None, Some(1), Some(2)] {
        let mut cache = PagedCache::new(SHAPE, 3, placement);
        let old = cache.create();
        append(&mut cache, old, 48, 7);
        cache.free(old).unwrap();
        let seq = cache.create();
        append(&mut cache, seq, 17, 1);
        let pages = state(&cache, seq);
        let (k, v) = &pages[1];
        assert!(k[8..128].iter().chain(&v[8..128]).all(|b| *b == 0));
        states.push(pages);
    }
    assert!(states.iter().all(|s| *s == states[0]));
}

#[test]
fn a_full_pool_is_an_error_that_changes_nothing() {
    let mut cache = PagedCache::new(SHAPE, 2, Some(3));
    let a = cache.create();
    append(&mut cache, a, 20, 5);
    let b = cache.fork(a).unwrap();
    assert!(matches!(cache.extend(b, 1), Err(EngineError::PoolFull { .. })));
    assert_eq!(state(&cache, a), state(&cache, b));
    assert_eq!(cache.tokens(b).unwrap(), 20);
    assert!(matches!(cache.extend(SeqId(99), 1), Err(EngineError::NoSequence(99))));
}

#[test]
fn restore_checks_pages() {
    let mut cache = PagedCache::new(SHAPE, 4, None);
    let a = cache.create();
    append(&mut cache, a, 20, 5);
    let pages = state(&cache, a);
    let borrowed: Vec<_> = pages.iter().map(|(k, v)| (k.as_slice(), v.as_slice())).collect();
    let b = cache.restore(20, &borrowed).unwrap();
    assert_eq!(state(&cache, b), pages);
    assert!(cache.restore(19, &borrowed).is_err(), "slot 3 of the last page is not zero");
    assert!(cache.restore(33, &borrowed).is_err());
    assert!(cache.restore(32, &[(&[], &[]), (&[], &[])]).is_err());
    assert!(matches!(cache.restore(20, &borrowed), Err(EngineError::PoolFull { .. })));
    assert_eq!((cache.free_blocks(), cache.tables.len()), (0, 2));
}
