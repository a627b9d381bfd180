//! Whether a state that lies ready belongs to the prefix of a request.

use super::plan::Plan;
use pfr_schema::Digest;
use pfr_schema::engine::{Match, MatchKeys};

/// A request, by its tokens or by the keys of its prefixes.
#[derive(Clone, Debug)]
pub(super) enum Asked {
    Tokens(Match),
    Keys(MatchKeys),
}

impl Asked {
    fn salt(&self) -> (&str, Option<&str>) {
        match self {
            Self::Tokens(request) => (&request.salt, request.adapter.as_deref()),
            Self::Keys(request) => (&request.salt, request.adapter.as_deref()),
        }
    }

    /// Tokens of the request, and tokens whose state the engine has.
    fn lengths(&self) -> (u64, u64) {
        match self {
            Self::Tokens(request) => (request.tokens.len() as u64, request.computed),
            Self::Keys(request) => (request.tokens, request.computed),
        }
    }
}

/// The answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// The state at this token position does.
    At(u64),
    /// The state may, up to this position at most; the keys do not tell where the tokens part.
    Tokens(u64),
    /// It does not; the number of equal tokens as far as known, and the reason.
    Not(u64, String),
    /// The request has no key of this length: it was asked before the engine knew of the state.
    NotAsked,
}

/// Checks a state against a request. `rungs` are the state's keys at the lengths of the ladder.
pub(super) fn fits(plan: &Plan, rungs: &[(u64, Digest)], request: &Asked) -> Fit {
    let Plan { boundary, key, legal, .. } = plan;
    if (key.salt.as_str(), key.adapter.as_deref()) != request.salt() {
        return Fit::Not(0, format!("the prefix key does not hold: salt or adapter of the state at {boundary} are not the request's"));
    }
    let (length, computed) = request.lengths();
    let agree = match request {
        Asked::Tokens(request) => by_tokens(plan, request),
        Asked::Keys(request) => by_keys(plan, rungs, request),
    };
    // One token at least is left to compute: its logits are needed.
    let deepest = |agree: u64| legal.deepest(agree.min(length.saturating_sub(1))).filter(|position| *position > computed);
    match agree {
        Err(Parted::NotAsked) => Fit::NotAsked,
        Err(Parted::At(agree, why)) => deepest(agree).map_or(Fit::Not(agree, why), Fit::At),
        // Keys of longer prefixes would not tell more, since one differs.
        Err(Parted::Within { agree, end, why }) => match deepest(end.saturating_sub(1)).filter(|_| agree > 0) {
            Some(position) => Fit::Tokens(position),
            None => Fit::Not(agree, why),
        },
        Ok(agree) => match deepest(agree) {
            Some(position) => Fit::At(position),
            None if length == *boundary => {
                Fit::Not(agree, format!("the state is at {boundary} tokens, the request has no more: no token is left to compute"))
            }
            None => Fit::Not(agree, format!("the engine has state for {computed} tokens already, kept ready is {boundary}")),
        },
    }
}

/// The tokens of a request are not all of those of the state.
enum Parted {
    /// So many are equal.
    At(u64, String),
    /// So many are equal, and fewer than `end`.
    Within {
        agree: u64,
        end: u64,
        why: String,
    },
    NotAsked,
}

/// The number of equal tokens, if those of the state are.
fn by_tokens(Plan { boundary, tokens, .. }: &Plan, request: &Match) -> Result<u64, Parted> {
    let computed = tokens.iter().take(usize::try_from(*boundary).unwrap_or(usize::MAX));
    let agree = computed.zip(&request.tokens).take_while(|(a, b)| a == b).count() as u64;
    let length = request.tokens.len() as u64;
    if agree == *boundary {
        Ok(agree)
    } else if agree == length {
        Err(Parted::At(agree, too_short(*boundary, length)))
    } else {
        Err(Parted::At(agree, format!("the prefix key does not hold: token {agree} differs from that of the state at {boundary}")))
    }
}

fn by_keys(Plan { boundary, key, .. }: &Plan, rungs: &[(u64, Digest)], request: &MatchKeys) -> Result<u64, Parted> {
    let compared = || rungs.iter().filter_map(|(at, rung)| Some((*at, *rung == request.key(*at)?)));
    let agree = compared().take_while(|(_, equal)| *equal).last().map_or(0, |(at, _)| at);
    let differs = compared().find(|(_, equal)| !equal).map(|(at, _)| at);
    if request.tokens < *boundary {
        let end = differs.unwrap_or(request.tokens + 1);
        return Err(Parted::Within { agree, end, why: too_short(*boundary, request.tokens) });
    }
    let before = |end: u64| {
        let why = format!("the prefix key does not hold: a token from {agree} to {} differs from that of the state at {boundary}", end - 1);
        Parted::Within { agree, end, why }
    };
    match request.key(*boundary) {
        Some(found) if found == key.prefix => Ok(*boundary),
        Some(_) => Err(before(differs.unwrap_or(*boundary))),
        // At equal lengths no key is needed to say no.
        None if request.tokens == *boundary => Ok(*boundary),
        // Engines ask for short prefixes first: one that differs is enough.
        None => Err(differs.map_or(Parted::NotAsked, before)),
    }
}

fn too_short(boundary: u64, length: u64) -> String {
    format!("the state is at {boundary} tokens, the request has {length}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::checkpoint::Key;
    use pfr_schema::prefix;
    use pfr_schema::resume::Legal;
    use pfr_schema::tree::GroupKind;

    fn tokens(count: u32) -> Vec<u32> {
        (0..count).map(|i| i * 7).collect()
    }

    fn fingerprint() -> Digest {
        Digest::sha256(b"f")
    }

    fn plan() -> Plan {
        let computed = &tokens(62)[..61];
        let prefix = prefix::key(&fingerprint(), "s", None, computed);
        let key = Key { scheme: prefix::SCHEME.into(), prefix, tokens: 61, alignment: 1, salt: "s".into(), adapter: None };
        let legal = Legal::of(61, [], false);
        Plan { boundary: 61, key, tokens: tokens(62), legal, paged: Vec::new(), states: Vec::new(), resharded: None }
    }

    fn keys(tokens: &[u32], lengths: &[u64]) -> Asked {
        let key = |length: &u64| (*length, prefix::key(&fingerprint(), "s", None, &tokens[..*length as usize]));
        let keys = lengths.iter().map(key).collect();
        Asked::Keys(MatchKeys { tokens: tokens.len() as u64, salt: "s".into(), keys, ..MatchKeys::default() })
    }

    #[test]
    fn keys_and_tokens_give_one_answer() {
        let plan = plan();
        let rungs = prefix::rungs(&fingerprint(), "s", None, &plan.tokens[..61]);
        let ask = |asked: &Asked| fits(&plan, &rungs, asked);
        let all = [16, 32, 61];
        assert_eq!(ask(&keys(&tokens(90), &all)), Fit::At(61));
        for at in [0, 15, 16, 40, 60] {
            let mut other = tokens(90);
            other[at] += 1;
            let Fit::Not(agree, why) = ask(&keys(&other, &all)) else { panic!("token {at}") };
            assert!(agree <= at as u64, "{agree} equal, token {at} differs");
            let Fit::Not(exact, _) = ask(&Asked::Tokens(Match { tokens: other, salt: "s".into(), ..Match::default() })) else {
                panic!("token {at}")
            };
            assert_eq!(exact, at as u64);
            let words: Vec<u64> = why.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
            assert!(words[0] <= at as u64 && at as u64 <= words[1], "{why}");
        }
        let Fit::Not(_, short) = ask(&keys(&tokens(40), &[16, 32])) else { panic!("too short") };
        assert!(short.contains("the request has 40"), "{short}");
        let Fit::Not(_, equal) = ask(&keys(&tokens(61), &[16, 32])) else { panic!("no token is left") };
        assert!(equal.contains("no token is left"), "{equal}");
        assert_eq!(ask(&keys(&tokens(90), &[16, 32])), Fit::NotAsked);
        let mut other = tokens(90);
        other[20] += 1;
        let Fit::Not(16, why) = ask(&keys(&other, &[16, 32])) else { panic!("a short prefix that differs") };
        assert!(why.contains("a token from 16 to 31"), "{why}");
    }

    #[test]
    fn pages_of_full_attention_fit_up_to_the_token_that_differs() {
        let plan = Plan { legal: Legal::of(61, [(GroupKind::FullAttention, 8)], false), ..plan() };
        let rungs = prefix::rungs(&fingerprint(), "s", None, &plan.tokens[..61]);
        let by_keys = |tokens: &[u32], lengths: &[u64]| fits(&plan, &rungs, &keys(tokens, lengths));
        let by_tokens = |tokens: &[u32], computed| {
            fits(&plan, &rungs, &Asked::Tokens(Match { tokens: tokens.to_vec(), computed, salt: "s".into(), ..Match::default() }))
        };
        for at in 0..61 {
            let mut other = tokens(90);
            other[at] += 1;
            let deepest = at as u64 / 8 * 8;
            let exact = by_tokens(&other, 0);
            assert!(if deepest > 0 { exact == Fit::At(deepest) } else { matches!(exact, Fit::Not(..)) }, "{at}: {exact:?}");
            assert!(deepest == 0 || matches!(by_tokens(&other, deepest), Fit::Not(..)), "the engine has as much");
            // Keys promise nothing, and never too little.
            match by_keys(&other, &[16, 32, 61]) {
                Fit::Tokens(most) => assert!(at >= 16 && most >= deepest, "{at}: {most}"),
                Fit::Not(..) => assert!(at < 16),
                fit => panic!("{at}: {fit:?}"),
            }
        }
        for length in 1..=61 {
            // A token is left to compute.
            let deepest = (length as u64 - 1) / 8 * 8;
            let exact = by_tokens(&tokens(length), 0);
            assert!(if deepest > 0 { exact == Fit::At(deepest) } else { matches!(exact, Fit::Not(..)) }, "{length}: {exact:?}");
            let given: Vec<u64> = [16, 32].into_iter().filter(|at| *at <= u64::from(length)).collect();
            let found = by_keys(&tokens(length), &given);
            let expected = match length {
                0..16 => matches!(found, Fit::Not(..)),
                61 => found == Fit::At(56),
                _ => found == Fit::Tokens(deepest),
            };
            assert!(expected, "{length}: {found:?}");
        }
        assert_eq!(by_keys(&tokens(90), &[16, 32, 61]), Fit::At(61));
    }
}
