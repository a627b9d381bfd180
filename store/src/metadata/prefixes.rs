//! The prefix index: its rows, and the search for the longest snapshot that is a prefix of a
//! request.

use super::arguments::at_most;
use super::names::visible;
use super::rows::{PASSES, WAYPOINT, levels, short, steps, waypoints};
use super::snapshots::lock_rows;
use super::sql::{Column, Sql, values};
use super::tx::{Outcome, Tx};
use super::{PrefixHit, PrefixHits, PrefixMark, PrefixPassing, PrefixPath, Prefixed};
use pfr_schema::{Digest, RepositoryName, prefix};
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

/// Tokens of a block.
const BLOCK: u64 = prefix::BLOCK as u64;

/// Maximum number of snapshots of one length in an answer, the newest ones.
const DEEPEST: i64 = 32;
/// Maximum number of snapshots in an answer that share a beginning with the request.
const NEAR: usize = 8;
/// Maximum number of snapshots in an answer that have one waypoint, the newest ones.
const PASSING: i64 = 32;
/// Lengths that are tried with one statement, of snapshots whose tokens are not known.
const LENGTHS: usize = 1024;

/// Writes the rows of snapshots: each is a repository, the row id of a manifest, and its rows.
pub(super) async fn insert(tx: &mut dyn Tx, snapshots: &[(i64, i64, &[PrefixMark])]) -> Outcome<()> {
    type Row = (i64, PrefixMark, i64);
    let insert = "INSERT INTO prefixes (repository, key, tokens, proof, manifest)
                  SELECT u.repository, u.key, u.tokens, u.proof, u.manifest
                  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[])
                  AS u(repository, key, tokens, proof, manifest) ON CONFLICT DO NOTHING";
    let rows = |(repository, manifest, marks): &(i64, i64, &[PrefixMark])| -> Vec<Row> {
        marks.iter().map(|mark| (*repository, *mark, *manifest)).collect()
    };
    let mut rows: Vec<Row> = snapshots.iter().flat_map(rows).collect();
    // In the order of the table: neighbours lie on one page, which is then changed once.
    rows.sort_unstable();
    let of = |field: fn(&Row) -> i64| -> Column { rows.iter().map(field).collect() };
    let columns = vec![of(|row| row.0), of(|row| row.1.key), of(|row| row.1.tokens), of(|row| row.1.proof), of(|row| row.2)];
    tx.execute_each(insert, columns, &[]).await?;
    Ok(())
}

/// Manifests without rows in the index, by row id.
pub(super) async fn unprefixed(tx: &mut dyn Tx, after: i64, limit: usize) -> Outcome<Vec<(i64, Digest)>> {
    let find = "SELECT m.id, o.digest FROM manifests m JOIN objects o ON o.id = m.object
                WHERE NOT m.prefixed AND m.id > $1 ORDER BY m.id LIMIT $2";
    tx.query(find, values![after, at_most(limit)]).await
}

/// Writes the rows of snapshots that have none yet; one that was deleted meanwhile is left out.
///
/// Two statements for all of them, and not two for each: after each statement with RETURNING,
/// SQLite goes through all that its transaction has journaled, so the time would be quadratic.
pub(super) async fn index(tx: &mut dyn Tx, found: &[(i64, Vec<PrefixMark>)]) -> Outcome<u64> {
    let done = "UPDATE manifests SET prefixed = true WHERE id = ANY($1) AND NOT prefixed RETURNING id, repository";
    let ids: Vec<i64> = found.iter().map(|(manifest, _)| *manifest).collect();
    lock_rows(tx, &ids).await?;
    let repositories: HashMap<i64, i64> = tx.returning::<(i64, i64)>(done, values![ids]).await?.into_iter().collect();
    let here = found.iter().filter_map(|(manifest, marks)| Some((*repositories.get(manifest)?, *manifest, marks.as_slice())));
    let snapshots: Vec<(i64, i64, &[PrefixMark])> = here.collect();
    insert(tx, &snapshots).await?;
    Ok(repositories.len() as u64)
}

/// Prefix lengths of snapshots, as the index has them.
pub(super) async fn lengths(tx: &mut dyn Tx, repository: &RepositoryName, snapshots: &[Digest]) -> Outcome<Vec<(Digest, u64)>> {
    let id = visible(tx, repository).await?;
    let find = "SELECT o.digest, p.tokens FROM objects o JOIN manifests m ON m.repository = $1 AND m.object = o.id
                JOIN prefixes p ON p.manifest = m.id AND p.tokens >= 0 WHERE o.digest = ANY($2)";
    tx.query(find, values![id, snapshots]).await
}

/// Snapshots by the row ids of their manifests, each with its rows in the index.
pub(super) async fn prefixed(tx: &mut dyn Tx, after: i64, limit: usize) -> Outcome<Vec<Prefixed>> {
    let find = "SELECT m.id, m.repository, o.digest, m.prefixed FROM manifests m JOIN objects o ON o.id = m.object
                WHERE m.id > $1 AND NOT m.is_image ORDER BY m.id LIMIT $2";
    let snapshots: Vec<(i64, i64, Digest, bool)> = tx.query(find, values![after, at_most(limit)]).await?;
    let ids: Vec<i64> = snapshots.iter().map(|(id, ..)| *id).collect();
    let find = "SELECT manifest, repository, key, tokens, proof FROM prefixes WHERE manifest = ANY($1)";
    let mut rows: HashMap<i64, Vec<(i64, PrefixMark)>> = HashMap::new();
    for (manifest, repository, key, tokens, proof) in tx.query::<(i64, i64, i64, i64, i64)>(find, values![&ids]).await? {
        rows.entry(manifest).or_default().push((repository, PrefixMark { key, tokens, proof }));
    }
    let of = |(id, repository, digest, is_indexed): (i64, i64, Digest, bool)| {
        let (here, elsewhere): (Vec<_>, Vec<_>) = rows.remove(&id).unwrap_or_default().into_iter().partition(|row| row.0 == repository);
        Prefixed { manifest: id, digest, is_indexed, marks: here.into_iter().map(|row| row.1).collect(), elsewhere: elsewhere.len() }
    };
    Ok(snapshots.into_iter().map(of).collect())
}

/// Replaces the rows of snapshots.
pub(super) async fn correct(tx: &mut dyn Tx, found: &[(i64, Vec<PrefixMark>)]) -> Outcome<()> {
    let ids: Vec<i64> = found.iter().map(|(manifest, _)| *manifest).collect();
    // A snapshot whose row is locked keeps its repository.
    lock_rows(tx, &ids).await?;
    for (manifest, marks) in found {
        let done = "UPDATE manifests SET prefixed = true WHERE id = $1 RETURNING repository";
        if let Some(repository) = tx.returning(done, values![*manifest]).await?.pop() {
            tx.execute("DELETE FROM prefixes WHERE manifest = $1", values![*manifest]).await?;
            insert(tx, &[(repository, *manifest, marks.as_slice())]).await?;
        }
    }
    Ok(())
}

/// Finds the longest snapshots, with less than `below` tokens, that are a prefix of a request, and
/// those that share the longest beginning with it. Makes at most `look_ups` in the index.
pub(super) async fn find(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    path: &PrefixPath,
    below: Option<u64>,
    look_ups: usize,
) -> Outcome<PrefixHits> {
    let repository = visible(tx, repository).await?;
    let all = path.tokens().len() as u64;
    let Some(most) = below.map_or(Some(all), |below| below.checked_sub(1)) else { return Ok(PrefixHits::default()) };
    let mut search = Search { tx, repository, path, most: all.min(most), near: Vec::new(), left: look_ups, truncated: false };
    let mut deepest = search.listed().await?;
    let least = deepest.iter().map(|hit| hit.tokens).max();
    deepest.extend(search.unlisted(least.unwrap_or(0)).await?);
    let tokens = deepest.iter().map(|hit| hit.tokens).max();
    deepest.retain(|hit| Some(hit.tokens) == tokens);
    deepest.sort_by_key(|hit| Reverse(hit.manifest));
    Ok(PrefixHits { deepest, near: search.near, look_ups: look_ups - search.left, truncated: search.truncated })
}

/// Finds snapshots that share the deepest waypoint with a request; one before `below` tokens, if
/// deeper ones were found in vain.
pub(super) async fn passing(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    path: &PrefixPath,
    below: Option<u64>,
) -> Outcome<Option<PrefixPassing>> {
    const EXIST: Sql = Sql::of_each(
        "SELECT u.key, p.found FROM unnest($1::bigint[]) AS u(key) JOIN LATERAL
         (SELECT 1::bigint AS found FROM prefixes WHERE repository = $2 AND key = u.key AND tokens = $3 LIMIT 1) p ON true",
        "SELECT $1, 1 FROM prefixes WHERE repository = $2 AND key = $1 AND tokens = $3 LIMIT 1",
    );
    let repository = visible(tx, repository).await?;
    let all = path.tokens().len() as u64;
    let most = below.map_or(all, |below| all.min(below.saturating_sub(1)));
    let positions: Vec<u64> = waypoints(most / BLOCK).collect();
    let next = |at: u64| waypoints(u64::MAX).find(|next| *next > at).map_or(u64::MAX, |next| next.saturating_mul(BLOCK));
    let keys = positions.iter().map(|at| path.mark(*at)).collect();
    let found: Vec<(i64, i64)> = tx.rows(EXIST, vec![keys], values![repository, WAYPOINT], false).await?;
    let found: HashSet<i64> = found.into_iter().map(|(key, _)| key).collect();
    let Some(at) = positions.into_iter().rev().find(|at| found.contains(&path.mark(*at))) else { return Ok(None) };
    let find = "SELECT o.digest FROM (SELECT manifest FROM prefixes WHERE repository = $1 AND key = $2 AND tokens = $3 AND proof = 0
                                      ORDER BY manifest DESC LIMIT $4) p
                JOIN manifests m ON m.id = p.manifest JOIN objects o ON o.id = m.object ORDER BY p.manifest DESC";
    let snapshots = tx.query(find, values![repository, path.mark(at), WAYPOINT, PASSING]).await?;
    Ok(Some(PrefixPassing { tokens: at * BLOCK, next: next(at), snapshots }))
}

struct Search<'a> {
    tx: &'a mut dyn Tx,
    repository: i64,
    path: &'a PrefixPath,
    /// Tokens of a snapshot that is wanted, at most.
    most: u64,
    near: Vec<Digest>,
    /// Look-ups that may still be made.
    left: usize,
    /// Whether there was something more to look up.
    truncated: bool,
}

/// A step of the search.
enum Look {
    /// Positions behind one whose last digits are zeros; the second number says how many.
    Beyond(u64, u32),
    /// Snapshots that end in the block behind a position.
    Ends(u64),
}

impl Search<'_> {
    /// The deepest of the snapshots whose tokens are known. Deeper positions are looked at first,
    /// so the first that is found is the deepest. A look is in vain if the snapshots at a position
    /// differ from the request later: in the worst case one look for each block, and then the limit
    /// on look-ups ends the search.
    async fn listed(&mut self) -> Outcome<Vec<PrefixHit>> {
        let blocks = self.most / BLOCK;
        let mut looks = vec![Look::Ends(0), Look::Beyond(0, levels(blocks))];
        while let Some(look) = looks.pop() {
            match look {
                Look::Beyond(at, level) => {
                    let positions: Vec<(u64, u32)> = steps(at, level, blocks).collect();
                    if !self.may_look_up(positions.len() + 1) {
                        return Ok(Vec::new());
                    }
                    let next = self.existing(positions).await?;
                    if next.is_empty() {
                        self.note_near(at).await?;
                    }
                    for (at, level, ends) in next {
                        if ends {
                            looks.push(Look::Ends(at));
                        }
                        looks.push(Look::Beyond(at, level));
                    }
                }
                Look::Ends(at) => {
                    let lengths: Vec<u64> = (at * BLOCK..(at + 1) * BLOCK).rev().filter(|tokens| *tokens <= self.most).collect();
                    if !self.may_look_up(lengths.len()) {
                        return Ok(Vec::new());
                    }
                    let found = self.ending(at, lengths).await?;
                    if !found.is_empty() {
                        return Ok(found);
                    }
                }
            }
        }
        Ok(Vec::new())
    }

    /// Takes so many look-ups from those that are left. If they are too few, the search ends.
    fn may_look_up(&mut self, count: usize) -> bool {
        let left = self.left.checked_sub(count);
        self.truncated |= left.is_none();
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }

    /// Of these positions, with their levels, those at which there are rows, ascending; and whether
    /// a snapshot ends there.
    async fn existing(&mut self, positions: Vec<(u64, u32)>) -> Outcome<Vec<(u64, u32, bool)>> {
        const FIND: Sql = Sql::of_each(
            "SELECT u.key, p.tokens FROM unnest($1::bigint[]) AS u(key) JOIN LATERAL
             (SELECT tokens FROM prefixes WHERE repository = $2 AND key = u.key AND tokens >= $3 ORDER BY tokens DESC LIMIT 1) p ON true",
            "SELECT $1, tokens FROM prefixes WHERE repository = $2 AND key = $1 AND tokens >= $3 ORDER BY tokens DESC LIMIT 1",
        );
        let keys = positions.iter().map(|(at, _)| self.path.mark(*at)).collect();
        let rows: Vec<(i64, i64)> = self.tx.rows(FIND, vec![keys], values![self.repository, PASSES], false).await?;
        let found: HashMap<i64, i64> = rows.into_iter().collect();
        let with = |(at, level): (u64, u32)| Some((at, level, *found.get(&self.path.mark(at))? > PASSES));
        Ok(positions.into_iter().filter_map(with).collect())
    }

    /// The newest snapshots of these numbers of tokens whose row lies at a position.
    async fn ending(&mut self, at: u64, lengths: Vec<u64>) -> Outcome<Vec<PrefixHit>> {
        const FIND: Sql = Sql::of_each(
            "SELECT u.tokens, p.manifest, o.digest FROM unnest($1::bigint[], $2::bigint[]) AS u(tokens, proof) JOIN LATERAL
             (SELECT manifest FROM prefixes WHERE repository = $3 AND key = $4 AND tokens = u.tokens AND proof = u.proof
              ORDER BY manifest DESC LIMIT $5) p ON true
             JOIN manifests m ON m.id = p.manifest JOIN objects o ON o.id = m.object",
            "SELECT $1, p.manifest, o.digest FROM
             (SELECT manifest FROM prefixes WHERE repository = $3 AND key = $4 AND tokens = $1 AND proof = $2
              ORDER BY manifest DESC LIMIT $5) p
             JOIN manifests m ON m.id = p.manifest JOIN objects o ON o.id = m.object",
        );
        let proofs = lengths.iter().map(|tokens| self.path.key(*tokens).as_ref().map_or(0, short)).collect();
        let columns = vec![lengths.into_iter().collect(), proofs];
        let rows: Vec<(u64, i64, Digest)> =
            self.tx.rows(FIND, columns, values![self.repository, self.path.mark(at), DEEPEST], false).await?;
        Ok(rows.into_iter().map(|(tokens, manifest, digest)| PrefixHit { digest, tokens, manifest }).collect())
    }

    /// The deepest of the snapshots whose tokens are not known, of `least` tokens at least: their
    /// lengths are tried, the longest first. Nothing leads to the right one: only the key of all
    /// their tokens is known, and a key says nothing about the keys before it. So the limit on
    /// look-ups ends the search, however many lengths there are.
    async fn unlisted(&mut self, least: u64) -> Outcome<Vec<PrefixHit>> {
        let find = "WITH RECURSIVE lengths(tokens) AS (
              SELECT MAX(tokens) FROM prefixes WHERE repository = $1 AND key = $2 AND tokens >= $3 AND tokens <= $4
              UNION ALL SELECT (SELECT MAX(p.tokens) FROM prefixes p WHERE p.repository = $1 AND p.key = $2
                                AND p.tokens >= $3 AND p.tokens < lengths.tokens) FROM lengths WHERE lengths.tokens IS NOT NULL)
            SELECT tokens FROM lengths WHERE tokens IS NOT NULL LIMIT $5";
        let (root, mut most) = (self.path.mark(0), self.most);
        loop {
            // With none left, one more says whether there is a length that is not tried.
            let count = self.left.clamp(1, LENGTHS);
            // Shorter ones were found with those whose tokens are known.
            let lengths: Vec<u64> = self.tx.query(find, values![self.repository, root, least.max(BLOCK), most, count as u64]).await?;
            let Some(shortest) = lengths.last().copied() else { return Ok(Vec::new()) };
            if !self.may_look_up(lengths.len()) {
                return Ok(Vec::new());
            }
            let complete = lengths.len() < count;
            let found = self.ending(0, lengths).await?;
            if complete || !found.is_empty() {
                return Ok(found);
            }
            most = shortest - 1;
        }
    }

    /// Notes snapshots that have a row at a position: they share the way up to there with the
    /// request.
    async fn note_near(&mut self, at: u64) -> Outcome<()> {
        if self.near.len() >= NEAR {
            return Ok(());
        }
        let find = "SELECT o.digest FROM (SELECT tokens, manifest FROM prefixes WHERE repository = $1 AND key = $2 AND tokens >= $4
                                          ORDER BY tokens DESC, proof DESC, manifest DESC LIMIT $3) p
                    JOIN manifests m ON m.id = p.manifest JOIN objects o ON o.id = m.object ORDER BY p.tokens DESC, p.manifest DESC";
        let room = at_most(NEAR - self.near.len());
        let found: Vec<Digest> = self.tx.query(find, values![self.repository, self.path.mark(at), room, PASSES]).await?;
        self.near.extend(found);
        Ok(())
    }
}
