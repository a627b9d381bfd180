//! `pf match`: finds the snapshot that holds the state of the longest prefix of given tokens, or
//! says why there is none.

use crate::cli::args::{Match, Short};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{count, number, one_line};
use crate::cli::suggest::Suggestion;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use pfr_client::Site;
use pfr_schema::agent::{Difference, EngineInfo};
use pfr_schema::api::MatchRequest;
use pfr_schema::{Digest, DigestPrefix, ErrorCode, Reference, RepositoryName, Selector};
use std::collections::BTreeSet;

/// The largest file of tokens, in bytes: 16 Mi tokens as JSON take about 8 bytes each.
const TOKENS_MAX: u64 = 128 << 20;
/// How many differing fields are listed, at most, for a snapshot of another engine configuration.
const FIELDS: usize = 10;
const TRUNCATED: &str = "the search ended at its limit: there may be a longer match";

/// Snapshots that are asked for their fingerprint, the newest, if it is cut short.
const ASKED: usize = 256;
/// How many of them are asked at once.
const AT_ONCE: usize = 8;

pub async fn run(context: &mut Context, args: Match) -> Result<(), Failure> {
    let repository = &args.repository.repository;
    let site = context.site(args.site, Some(&args.repository)).await?;
    let (fingerprint, engine) = match (&args.fingerprint, &args.engine) {
        (Some(Short::Full(fingerprint)), _) => (*fingerprint, None),
        (Some(Short::Prefix(prefix)), _) => (complete(&site, &args.repository, prefix).await?, None),
        (None, Some(engine)) => {
            let engine = context.agent_beside_registry(args.at.agent.as_deref())?.engine(engine).await?;
            (engine.fingerprint, Some(engine))
        }
        (None, None) => return Err(Failure::usage("--fingerprint or --engine is needed")),
    };
    let tokens = tokens(&super::read(&args.tokens, TOKENS_MAX)?)
        .map_err(|reason| Failure::usage(format!("{}: {reason}", super::shown(&args.tokens))))?;
    let given = tokens.len() as u64;
    let request = MatchRequest { tokens, fingerprint, salt: args.salt, adapter: args.adapter };
    let found = site.match_prefix(repository, &request).await?;
    let Some(digest) = found.digest else {
        if context.json {
            context.out.json(&found)?;
        }
        for rejected in found.rejected.iter().filter(|_| !context.json && !context.quiet) {
            let common = count(rejected.common, "token");
            context.out.note(&format!("{}  {common} in common: {}", rejected.digest.short(), one_line(&rejected.reason)))?;
            if let Some(engine) = &engine {
                for difference in differences(&site, repository, engine, rejected.digest).await {
                    context.out.note(&format!("  {}", one_line(&difference.to_string())))?;
                }
            }
        }
        if found.truncated && !context.json && !context.quiet {
            context.out.note(TRUNCATED)?;
        }
        let message = format!("no snapshot in {repository} that these tokens can be resumed from");
        let hint = Suggestion::new("ls").here().repository().then(" lists its tags and snapshots");
        return Err(Failure::new(ErrorCode::SnapshotUnknown, message).hint(hint));
    };
    let mut saved = format!("{} of {} tokens need not be computed", number(found.boundary), number(given));
    if found.tokens > found.boundary {
        saved += &format!(", from the beginning of a snapshot of {} tokens", number(found.tokens));
    }
    let truncated = found.truncated.then(|| TRUNCATED.to_owned());
    context.report(&found, [saved].into_iter().chain(truncated), &digest.to_string())
}

/// The fingerprint of a snapshot of the repository that begins so: no other one can match.
async fn complete(site: &Site, of: &Reference, prefix: &DigestPrefix) -> Result<Digest, Failure> {
    let repository = &of.repository;
    let snapshots = site.newest_snapshots(repository, ASKED).await?;
    let asked = snapshots.iter().map(|snapshot| async move {
        match site.detail(repository, &Selector::Digest(snapshot.digest)).await {
            Ok(detail) => Ok(detail.config.fingerprint),
            // It was deleted meanwhile.
            Err(error) if error.code() == ErrorCode::SnapshotUnknown => Ok(None),
            Err(error) => Err(error),
        }
    });
    let found: Vec<Option<Digest>> = stream::iter(asked).buffered(AT_ONCE).try_collect().await?;
    let found: BTreeSet<Digest> = found.into_iter().flatten().filter(|fingerprint| prefix.matches(fingerprint)).collect();
    let mut all = found.iter();
    match (all.next(), all.next()) {
        (Some(only), None) => Ok(*only),
        (None, _) => {
            let among = match snapshots.len() {
                ASKED => format!("the newest {ASKED} snapshots of {repository}"),
                _ => format!("the snapshots of {repository}"),
            };
            let message = format!("none of {among} has a fingerprint that begins with {prefix}");
            let newest = snapshots.first().map(|newest| Reference { selector: Some(Selector::Digest(newest.digest)), ..of.clone() });
            let show = |newest| Suggestion::new("inspect").here().arg(newest).then(" shows that of the newest one");
            Err(newest.into_iter().map(show).fold(Failure::new(ErrorCode::SnapshotUnknown, message), Failure::hint))
        }
        _ => {
            let all: Vec<String> = found.iter().map(ToString::to_string).collect();
            Err(Failure::of_code(ErrorCode::AmbiguousDigest, format!("{prefix} begins several fingerprints: {}", all.join(", "))))
        }
    }
}

/// The fields of the engine configuration in which a refused snapshot differs. They are additional:
/// the caller has printed the reason already. So the result is empty if the snapshot was deleted
/// meanwhile, or if the registry cannot be reached.
async fn differences(site: &Site, repository: &RepositoryName, engine: &EngineInfo, digest: Digest) -> Vec<Difference> {
    match site.detail(repository, &Selector::Digest(digest)).await {
        Ok(detail) if detail.config.fingerprint != Some(engine.fingerprint) => {
            let mut differs = Difference::all(&engine.deployment, &detail.config.deployment);
            differs.truncate(FIELDS);
            differs
        }
        _ => Vec::new(),
    }
}

/// Reads tokens: a JSON array, or little-endian u32 numbers. Bytes that begin with `[` and end with
/// `]` or white space are JSON: as u32 numbers, their last token id would be larger than any
/// vocabulary.
fn tokens(bytes: &[u8]) -> Result<Vec<u32>, String> {
    let json = bytes.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'[')
        && bytes.last().is_some_and(|b| *b == b']' || b.is_ascii_whitespace());
    if json {
        return serde_json::from_slice(bytes).map_err(|e| format!("not a JSON array of token ids: {e}"));
    }
    let (whole, rest) = bytes.as_chunks::<4>();
    if rest.is_empty() {
        Ok(whole.iter().map(|four| u32::from_le_bytes(*four)).collect())
    } else {
        Err(format!("expected a JSON array of token ids, or u32 numbers of 4 bytes each; found {} bytes", bytes.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_as_json_or_binary() {
        assert_eq!(tokens(b" [1, 2,\n3]\n").unwrap(), [1, 2, 3]);
        assert_eq!(tokens(&[1, 0, 0, 0, 91, 0, 0, 0]).unwrap(), [1, 91]);
        assert_eq!(tokens(&[91, 0, 0, 0]).unwrap(), [91]);
        assert!(tokens(b"[1, -2]").is_err());
        assert!(tokens(b"12345").is_err());
        assert!(tokens(b"").unwrap().is_empty());
    }
}
