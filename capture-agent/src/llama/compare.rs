//! Compares two state files by what they mean: a slot has another number than the one that was
//! saved, and a cache may have its cells in another order.

use super::file::StateFile;
use pfr_schema::llama::{Block, Section};

/// Bytes that are read at once.
const PIECE: u64 = 1 << 20;

/// Returns how two files differ; `None` if they hold the same state.
pub(super) fn difference(one: &StateFile, two: &StateFile) -> std::io::Result<Option<String>> {
    if one.state.tokens != two.state.tokens {
        return Ok(Some(format!("{} tokens, {} expected", two.state.tokens.len(), one.state.tokens.len())));
    }
    let (form, other) = (one.state.form(), two.state.form());
    if form != other {
        return Ok(Some(format!("{other}; {form} expected")));
    }
    for (number, (a, b)) in one.state.sections.iter().zip(&two.state.sections).enumerate() {
        let (first, second) = (order(a), order(b));
        let positions = |section: &Section, order: &[usize]| -> Vec<u32> { order.iter().map(|at| section.positions[*at]).collect() };
        let extra = |section: &Section, order: &[usize]| -> Vec<u8> {
            let bytes = section.extra.len() / section.positions.len().max(1);
            order.iter().flat_map(|at| &section.extra[at * bytes..(at + 1) * bytes]).copied().collect()
        };
        if positions(a, &first) != positions(b, &second) || extra(a, &first) != extra(b, &second) {
            return Ok(Some(format!("other cells in section {number}")));
        }
        let plain = first.is_sorted() && second.is_sorted();
        for (block, other) in a.blocks.iter().zip(&b.blocks) {
            let equal = if plain { whole(one, block, two, other)? } else { cells(one, (block, &first), two, (other, &second))? };
            if !equal {
                return Ok(Some(format!("other {:?} in layer {} of section {number}", block.role, block.number)));
            }
        }
    }
    Ok(None)
}

/// The cells in the order of their positions.
fn order(section: &Section) -> Vec<usize> {
    let mut order: Vec<usize> = (0..section.positions.len()).collect();
    order.sort_unstable_by_key(|at| section.positions[*at]);
    order
}

/// Blocks with their cells in one order.
fn whole(one: &StateFile, block: &Block, two: &StateFile, other: &Block) -> std::io::Result<bool> {
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for at in (0..block.bytes).step_by(PIECE as usize) {
        let now = PIECE.min(block.bytes - at) as usize;
        a.resize(now, 0);
        b.resize(now, 0);
        one.read_at(&mut a, block.at + at)?;
        two.read_at(&mut b, other.at + at)?;
        if a != b {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Blocks with their cells in two orders.
fn cells(
    one: &StateFile,
    (block, first): (&Block, &[usize]),
    two: &StateFile,
    (other, second): (&Block, &[usize]),
) -> std::io::Result<bool> {
    // Transposed: one element of each cell. Otherwise: one row at a time.
    let unit = if block.transposed { block.element.bytes() } else { block.row };
    let (mut a, mut b) = (vec![0; unit as usize], vec![0; unit as usize]);
    for strip in 0..block.row / unit {
        let start = strip * first.len() as u64 * unit;
        for (at, to) in first.iter().zip(second) {
            one.read_at(&mut a, block.at + start + *at as u64 * unit)?;
            two.read_at(&mut b, other.at + start + *to as u64 * unit)?;
            if a != b {
                return Ok(false);
            }
        }
    }
    Ok(true)
}
