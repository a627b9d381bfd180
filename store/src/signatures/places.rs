//! The places of a manifest of signatures: [`MOST`], and the right to push is enough to fill them.
//!
//! So keys of signing policies come first: a signature by one of them replaces the older one by the
//! same key, and takes the place of one by another key if none is free. One by another key takes a
//! free place, or is refused.

use pfr_schema::signature::{Layer, MOST, PublicKey};

/// The key of a signing policy that has signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct By {
    pub key: PublicKey,
    /// When, as it says.
    pub at: u64,
}

/// A signature, and the key of a policy that has made it, if one has.
#[derive(Clone, Debug)]
pub(super) struct Signed {
    pub layer: Layer,
    pub by: Option<By>,
}

impl Signed {
    /// Whether the other one is by the same key, and newer. Two of one moment may stay both:
    /// mirrors would replace one by the other for ever.
    fn is_older_than(&self, other: &Self) -> bool {
        self.by.zip(other.by).is_some_and(|(own, other)| own.key == other.key && own.at < other.at)
    }
}

/// The layers of the next manifest; none if there is no place.
pub(super) fn place(there: Vec<Signed>, fresh: Vec<Signed>) -> Option<Vec<Layer>> {
    let is_fresh = |one: &Signed| !there.iter().any(|old| old.layer == one.layer || one.is_older_than(old));
    let fresh: Vec<Signed> = fresh.into_iter().filter(is_fresh).collect();
    let mut kept: Vec<Signed> = there.into_iter().filter(|old| !fresh.iter().any(|one| old.is_older_than(one))).collect();
    let of_others = fresh.iter().filter(|one| one.by.is_none()).count();
    if kept.len() + of_others > MOST && of_others > 0 {
        return None;
    }
    let mut surplus = (kept.len() + fresh.len()).saturating_sub(MOST);
    kept.retain(|old| {
        let goes = surplus > 0 && old.by.is_none();
        surplus -= usize::from(goes);
        !goes
    });
    (surplus == 0).then(|| kept.into_iter().chain(fresh).map(|one| one.layer).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::api::NewSignature;

    fn one(n: u64, by: Option<(u8, u64)>) -> Signed {
        let layer = Layer::of(&NewSignature::new(format!("{n} {by:?}"), &[1; 64]));
        Signed { layer, by: by.map(|(key, at)| By { key: PublicKey::new([key; 32]), at }) }
    }

    fn layers(all: &[Signed]) -> Vec<Layer> {
        all.iter().map(|one| one.layer.clone()).collect()
    }

    #[test]
    fn a_key_of_a_policy_always_finds_a_place_and_others_take_none_from_it() {
        let full: Vec<Signed> = (0..MOST as u64).map(|n| one(n, None)).collect();
        assert_eq!(place(full.clone(), vec![one(1000, None)]), None);
        let (a, b) = (one(1, Some((1, 5))), one(2, Some((2, 5))));
        let placed = place(full.clone(), vec![a.clone(), b.clone()]).expect("two places");
        assert_eq!(placed, [layers(&full[2..]), layers(&[a.clone(), b.clone()])].concat(), "the oldest of others go");
        // Not for one that comes with it.
        assert_eq!(place(full[1..].to_vec(), vec![a.clone(), one(1000, None), one(1001, None)]), None);
        let placed = place(full[1..].to_vec(), vec![a.clone(), one(1000, None)]).expect("one place is free");
        assert_eq!(placed.len(), MOST);
        assert!(placed.contains(&a.layer) && !placed.contains(&full[1].layer));
        // Places of other keys of policies are never taken.
        let keys: Vec<Signed> = (0..MOST as u64).map(|n| one(n, Some((u8::try_from(n).expect("small"), 5)))).collect();
        assert_eq!(place(keys.clone(), vec![one(7, Some((200, 5)))]), None);
        assert_eq!(place(keys, vec![one(7, Some((3, 6)))]).expect("its own place").len(), MOST);
    }

    #[test]
    fn the_newest_signature_of_a_key_stays_whatever_comes_first() {
        let (old, new, other) = (one(1, Some((1, 5))), one(2, Some((1, 6))), one(3, Some((2, 5))));
        assert_eq!(place(vec![old.clone(), other.clone()], vec![new.clone()]), Some(layers(&[other.clone(), new.clone()])));
        assert_eq!(place(vec![other.clone(), new.clone()], vec![old]), Some(layers(&[other, new.clone()])), "a late old one is left out");
        let same = one(4, Some((1, 6)));
        assert_eq!(place(vec![new.clone()], vec![same.clone()]), Some(layers(&[new.clone(), same])), "of one moment");
        assert_eq!(place(vec![new.clone()], vec![new.clone()]), Some(layers(&[new])));
    }
}
