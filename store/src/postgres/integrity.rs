//! Quarantine, and who reaches what is damaged.

use super::connection::Tx;
use super::error::Outcome;
use super::lists::paged;
use super::objects::kind_of;
use super::{DOMAIN, uint};
use crate::error::Error;
use crate::metadata::arguments::one_more;
use crate::metadata::{Damage, DamagedRow, Health, ObjectId, Page, children};
use pfr_schema::{Digest, Kind, RepositoryName};
use std::collections::{BTreeSet, HashMap};

/// Snapshots named for each damaged blob.
const SNAPSHOTS: usize = 100;
/// Containers read at a time.
const READ: i64 = 1000;

/// What each object reaches, as numbers that the caller gave out.
type Marks = HashMap<ObjectId, BTreeSet<usize>>;

/// Whether containers of a kind may list others of the same kind.
pub(super) fn nests(kind: Kind) -> bool {
    !matches!(kind, Kind::Blob | Kind::Run | Kind::Tree | Kind::Checkpoint)
}

/// A container and what it lists.
pub(super) type Listed = (ObjectId, Vec<ObjectId>);

/// Which containers are looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Among {
    All,
    /// Those that are marked already: all that reached, as it was quarantined, something that was quarantined before.
    Unwell,
}

/// The containers of a kind that come after `after`, in order of ids; none at the end.
async fn containers(tx: &mut Tx, kind: Kind, among: Among, after: ObjectId) -> Outcome<Vec<Listed>> {
    let statement = match among {
        Among::All => {
            "SELECT c.object, c.children FROM containers c JOIN objects o ON o.id = c.object
             WHERE o.kind = $1 AND c.object > $2 ORDER BY c.object LIMIT $3"
        }
        Among::Unwell => {
            "SELECT c.object, c.children FROM objects o JOIN containers c ON c.object = o.id
             WHERE o.health > 0 AND o.kind = $1 AND o.id > $2 ORDER BY o.id LIMIT $3"
        }
    };
    let rows: Vec<(ObjectId, Vec<u8>)> = sqlx::query_as(statement).bind(kind as i16).bind(after).bind(READ).fetch_all(tx.on()).await?;
    rows.into_iter().map(|(id, packed)| Ok((id, children::unpack(&packed)?))).collect()
}

/// Carries marks up to every container that reaches a marked object.
async fn climb(tx: &mut Tx, marks: &mut Marks, among: Among) -> Outcome<()> {
    // Children come before what may list them, so one look at each kind is enough unless it lists its own.
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_container()) {
        loop {
            let (mut found, mut after): (Vec<(ObjectId, BTreeSet<usize>)>, ObjectId) = (Vec::new(), 0);
            loop {
                let part = containers(tx, kind, among, after).await?;
                let Some((last, _)) = part.last() else { break };
                after = *last;
                for (object, children) in part {
                    let below: BTreeSet<usize> = children.iter().filter_map(|child| marks.get(child)).flatten().copied().collect();
                    if !below.is_empty() && !marks.get(&object).is_some_and(|known| below.is_subset(known)) {
                        found.push((object, below));
                    }
                }
            }
            let done = found.is_empty() || !nests(kind);
            for (object, below) in found {
                marks.entry(object).or_default().extend(below);
            }
            if done {
                break;
            }
        }
    }
    Ok(())
}

/// One at a time decides about health: marks that another has not committed yet would be overlooked.
async fn alone(tx: &mut Tx) -> Outcome<()> {
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('health', 0))").execute(tx.on()).await?;
    Ok(())
}

pub(super) async fn quarantine(tx: &mut Tx, damage: &[Damage]) -> Outcome<Vec<Digest>> {
    alone(tx).await?;
    let now = tx.now().await?;
    let digests: Vec<Digest> = damage.iter().map(|d| d.digest).collect();
    let ids: Vec<ObjectId> =
        sqlx::query_scalar("SELECT id FROM objects WHERE domain = $1 AND digest = ANY($2) ORDER BY id FOR NO KEY UPDATE")
            .bind(DOMAIN)
            .bind(super::keys(&digests))
            .fetch_all(tx.on())
            .await?;
    let (mut quarantined, mut marks) = (Vec::new(), Marks::new());
    for Damage { digest, pack, reason } in damage {
        // A copy that collection or a push has put elsewhere is not what was found bad.
        let object: Option<ObjectId> = sqlx::query_scalar(
            "UPDATE objects SET health = $1 WHERE id = ANY($2) AND digest = $3 AND health <> $1
             AND pack = (SELECT id FROM packs WHERE key = $4) RETURNING id",
        )
        .bind(Health::Damaged as i16)
        .bind(ids.clone())
        .bind(digest.to_key())
        .bind(pack)
        .fetch_optional(tx.on())
        .await?;
        let Some(object) = object else { continue };
        tx.wrote(1);
        let insert = "INSERT INTO damage (object, reason, found_at) VALUES ($1, $2, $3)
                      ON CONFLICT (object) DO UPDATE SET reason = excluded.reason, found_at = excluded.found_at";
        tx.execute(sqlx::query(insert).bind(object).bind(reason.replace('\0', "\u{fffd}")).bind(now)).await?;
        marks.insert(object, BTreeSet::from([0]));
        quarantined.push(*digest);
    }
    if marks.is_empty() {
        return Ok(quarantined);
    }
    // Until nothing new is found: who was storing a container above one that is marked now was waited for.
    loop {
        let before = marks.len();
        climb(tx, &mut marks, Among::All).await?;
        let marked: BTreeSet<ObjectId> = marks.keys().copied().collect();
        let ids: Vec<ObjectId> = marked.into_iter().collect();
        super::objects::lock(tx, &ids).await?;
        let mark = sqlx::query("UPDATE objects SET health = $1 WHERE id = ANY($2) AND health = $3");
        tx.execute(mark.bind(Health::Incomplete as i16).bind(ids).bind(Health::Whole as i16)).await?;
        if marks.len() == before {
            return Ok(quarantined);
        }
    }
}

/// Object, digest, kind, reason, time: a quarantined blob as it lies in the tables.
type RawDamage = (ObjectId, Vec<u8>, i16, Option<String>, Option<i64>);

pub(super) async fn damaged(tx: &mut Tx, after: Option<&str>, limit: usize) -> Outcome<Page<DamagedRow>> {
    let after: ObjectId = match after {
        None => 0,
        Some(cursor) => cursor.parse().map_err(|_| Error::Invalid(format!("{cursor:?} is no cursor of this list")))?,
    };
    let found: Vec<RawDamage> = sqlx::query_as(
        "SELECT o.id, o.digest, o.kind, d.reason, d.found_at FROM objects o LEFT JOIN damage d ON d.object = o.id
         WHERE o.health > 0 AND o.health = $1 AND o.id > $2 ORDER BY o.id LIMIT $3",
    )
    .bind(Health::Damaged as i16)
    .bind(after)
    .bind(one_more(limit))
    .fetch_all(tx.on())
    .await?;
    let page = paged(found, limit, |row| row.0.to_string());
    if page.rows.is_empty() {
        return Ok(Page { rows: Vec::new(), next: None });
    }
    let mut marks: Marks = page.rows.iter().enumerate().map(|(number, row)| (row.0, BTreeSet::from([number]))).collect();
    climb(tx, &mut marks, Among::Unwell).await?;
    let mut snapshots: Vec<Vec<(RepositoryName, Digest)>> = vec![Vec::new(); page.rows.len()];
    let rows: Vec<(ObjectId, String, Vec<u8>)> = sqlx::query_as(
        "SELECT m.object, r.name, o.digest FROM manifests m JOIN repositories r ON r.id = m.repository
         JOIN objects o ON o.id = m.object WHERE o.health > 0 ORDER BY m.id",
    )
    .fetch_all(tx.on())
    .await?;
    for (object, name, key) in rows {
        let Some(reached) = marks.get(&object) else { continue };
        let snapshot: (RepositoryName, Digest) = (name.parse()?, Digest::from_key(&key)?);
        for number in reached {
            if let Some(list) = snapshots.get_mut(*number).filter(|list| list.len() < SNAPSHOTS) {
                list.push(snapshot.clone());
            }
        }
    }
    let rows = page
        .rows
        .into_iter()
        .zip(snapshots)
        .map(|((_, key, kind, reason, found_at), snapshots)| {
            Ok(DamagedRow {
                digest: Digest::from_key(&key)?,
                kind: kind_of(kind)?,
                reason: reason.unwrap_or_default(),
                found_at: found_at.map_or(0, uint),
                snapshots,
            })
        })
        .collect::<Outcome<_>>()?;
    Ok(Page { rows, next: page.next })
}

pub(super) async fn lift_quarantine(tx: &mut Tx, good: &[(Digest, String)]) -> Outcome<u64> {
    alone(tx).await?;
    let mut lifted: Vec<ObjectId> = Vec::new();
    for (digest, pack) in good {
        // A container's children may be damaged: whether they are is for the reassessment.
        let object: Option<ObjectId> = sqlx::query_scalar(
            "UPDATE objects SET health = CASE kind WHEN 0 THEN 0::smallint ELSE $1 END WHERE id =
             (SELECT id FROM objects WHERE domain = $2 AND digest = $3 AND health = $4 AND pack = (SELECT id FROM packs WHERE key = $5) FOR NO KEY UPDATE)
             AND health = $4 RETURNING id",
        )
        .bind(Health::Incomplete as i16)
        .bind(DOMAIN)
        .bind(digest.to_key())
        .bind(Health::Damaged as i16)
        .bind(pack)
        .fetch_optional(tx.on())
        .await?;
        lifted.extend(object);
    }
    if lifted.is_empty() {
        return Ok(0);
    }
    tx.wrote(lifted.len());
    tx.execute(sqlx::query("DELETE FROM damage WHERE object = ANY($1)").bind(lifted.clone())).await?;
    note_healed(tx).await?;
    Ok(lifted.len() as u64)
}

/// Notes that something became well, for the next reassessment. A row each time: nobody waits for anybody.
pub(super) async fn note_healed(tx: &mut Tx) -> Outcome<()> {
    tx.execute(sqlx::query("INSERT INTO healed DEFAULT VALUES")).await.map(|_| ())
}

pub(super) async fn reassess(tx: &mut Tx) -> Outcome<u64> {
    alone(tx).await?;
    if tx.execute(sqlx::query("DELETE FROM healed")).await? == 0 {
        return Ok(0);
    }
    // Locked: who heals one of them at the same time is waited for.
    let unwell: Vec<(ObjectId, i16)> =
        sqlx::query_as("SELECT id, health FROM objects WHERE health > 0 ORDER BY id FOR NO KEY UPDATE").fetch_all(tx.on()).await?;
    let (damaged, marked): (Vec<_>, Vec<_>) = unwell.into_iter().partition(|(_, health)| *health == Health::Damaged as i16);
    if marked.is_empty() {
        return Ok(0);
    }
    let mut marks: Marks = damaged.into_iter().map(|(object, _)| (object, BTreeSet::from([0]))).collect();
    if !marks.is_empty() {
        climb(tx, &mut marks, Among::Unwell).await?;
    }
    let whole: Vec<ObjectId> = marked.into_iter().map(|(object, _)| object).filter(|object| !marks.contains_key(object)).collect();
    tx.execute_any(&whole, || sqlx::query("UPDATE objects SET health = 0 WHERE id = ANY($1)").bind(whole.clone())).await
}
