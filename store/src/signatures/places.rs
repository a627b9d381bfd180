//! Which signatures the manifest of signatures lists. It has [`MOST`] places, and a caller with the
//! right to push could fill all of them.
//!
//! So signatures by keys of signing policies come first. Such a signature replaces an older one by
//! the same key. If no place is free, it takes the place of a signature by a key that is in no
//! policy. A signature by a key that is in no policy takes a free place, or is refused.

use pfr_schema::signature::{Layer, MOST, PublicKey};

/// The key of a signing policy that has signed, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Signer {
    pub key: PublicKey,
    /// The time that the signature gives.
    pub at: u64,
}

/// A signature as a layer of the manifest.
#[derive(Clone, Debug)]
pub(super) struct Signed {
    pub layer: Layer,
    /// The signer, if its key is in a signing policy.
    pub by: Option<Signer>,
}

impl Signed {
    /// Whether `other` is by the same key, and newer. Two signatures with the same time both stay:
    /// otherwise two mirrors would replace one by the other for ever.
    fn is_older_than(&self, other: &Self) -> bool {
        self.by.zip(other.by).is_some_and(|(own, other)| own.key == other.key && own.at < other.at)
    }
}

/// The layers of the next manifest. `None` if there is no place for the fresh signatures.
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
        Signed { layer, by: by.map(|(key, at)| Signer { key: PublicKey::new([key; 32]), at }) }
    }

    fn layers(all: &[Signed]) -> Vec<Layer> {
        all.iter().map(|one| one.layer.clone()).collect()
    }

    #[test]
    fn a_signature_by_a_policys_key_takes_a_place_from_others_and_never_loses_its_own() {
        let full: Vec<Signed> = (0..MOST as u64).map(|n| one(n, None)).collect();
        assert_eq!(place(full.clone(), vec![one(1000, None)]), None);
        let (a, b) = (one(1, Some((1, 5))), one(2, Some((2, 5))));
        let placed = place(full.clone(), vec![a.clone(), b.clone()]).expect("two places");
        assert_eq!(placed, [layers(&full[2..]), layers(&[a.clone(), b.clone()])].concat(), "the oldest signatures by other keys go");
        // A fresh signature by another key does not get a place in this way.
        assert_eq!(place(full[1..].to_vec(), vec![a.clone(), one(1000, None), one(1001, None)]), None);
        let placed = place(full[1..].to_vec(), vec![a.clone(), one(1000, None)]).expect("one place is free");
        assert_eq!(placed.len(), MOST);
        assert!(placed.contains(&a.layer) && !placed.contains(&full[1].layer));
        // The place of a signature by another policy's key is never taken.
        let keys: Vec<Signed> = (0..MOST as u64).map(|n| one(n, Some((u8::try_from(n).expect("small"), 5)))).collect();
        assert_eq!(place(keys.clone(), vec![one(7, Some((200, 5)))]), None);
        assert_eq!(place(keys, vec![one(7, Some((3, 6)))]).expect("its own place").len(), MOST);
    }

    #[test]
    fn the_newest_signature_of_a_key_stays_in_any_order_of_arrival() {
        let (old, new, other) = (one(1, Some((1, 5))), one(2, Some((1, 6))), one(3, Some((2, 5))));
        assert_eq!(place(vec![old.clone(), other.clone()], vec![new.clone()]), Some(layers(&[other.clone(), new.clone()])));
        assert_eq!(
            place(vec![other.clone(), new.clone()], vec![old]),
            Some(layers(&[other, new.clone()])),
            "an old signature that comes late is left out"
        );
        let same = one(4, Some((1, 6)));
        assert_eq!(place(vec![new.clone()], vec![same.clone()]), Some(layers(&[new.clone(), same])), "both have the same time");
        assert_eq!(place(vec![new.clone()], vec![new.clone()]), Some(layers(&[new])));
    }
}
