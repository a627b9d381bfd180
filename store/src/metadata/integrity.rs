//! Quarantine, and which nodes reach what is damaged.

use super::arguments::{numbered, one_more, paged};
use super::sql::{Sql, values};
use super::tx::{Outcome, Tx};
use super::{Damage, DamagedRow, Health, ObjectId, Page, children, objects};
use pfr_schema::{Digest, Kind, RepositoryName};
use std::collections::{BTreeSet, HashMap};

/// Snapshots named for each damaged blob.
const SNAPSHOTS: usize = 100;
/// Nodes read at a time.
const READ: i64 = 1000;

/// What each object reaches, as numbers that the caller gave out.
type Marks = HashMap<ObjectId, BTreeSet<usize>>;

/// Whether nodes of a kind may list others of the same kind.
pub(super) fn nests(kind: Kind) -> bool {
    !matches!(kind, Kind::Blob | Kind::Run | Kind::Tree | Kind::Checkpoint)
}

/// Which nodes are looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Among {
    All,
    /// Those that are marked already: all that reached, as it was quarantined, something that was
    /// quarantined before.
    Unwell,
}

/// The nodes of a kind that come after `after`, in order of ids; none at the end.
async fn containers(tx: &mut dyn Tx, kind: Kind, among: Among, after: ObjectId) -> Outcome<Vec<(ObjectId, Vec<ObjectId>)>> {
    let find = match among {
        Among::All => {
            "SELECT c.object, c.children FROM containers c JOIN objects o ON o.id = c.object
             WHERE o.kind = $1 AND c.object > $2 ORDER BY c.object LIMIT $3"
        }
        Among::Unwell => {
            "SELECT c.object, c.children FROM objects o /* INDEXED BY objects_unwell */ JOIN containers c ON c.object = o.id
             WHERE o.health > 0 AND o.kind = $1 AND o.id > $2 ORDER BY o.id LIMIT $3"
        }
    };
    let rows: Vec<(ObjectId, Vec<u8>)> = tx.query(find, values![kind, after, READ]).await?;
    rows.into_iter().map(|(id, packed)| Ok((id, children::unpack(&packed)?))).collect()
}

/// Marks every node that reaches a marked object.
async fn climb(tx: &mut dyn Tx, marks: &mut Marks, among: Among) -> Outcome<()> {
    // Children come before what may list them, so one look at each kind is enough unless it lists
    // its own.
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

/// One transaction at a time decides about health: marks that another has not committed yet would
/// be overlooked.
async fn alone(tx: &mut dyn Tx) -> Outcome<()> {
    const ALONE: Sql = Sql::only_postgres("SELECT 1 FROM pg_advisory_xact_lock(hashtextextended('health ' || current_schema()::text, 0))");
    tx.query::<i64>(ALONE, &[]).await?;
    Ok(())
}

pub(super) async fn quarantine(tx: &mut dyn Tx, damage: &[Damage]) -> Outcome<Vec<Digest>> {
    alone(tx).await?;
    let now = tx.now().await?;
    let digests: Vec<Digest> = damage.iter().map(|d| d.digest).collect();
    let find = "SELECT id FROM objects WHERE digest = ANY($1) ORDER BY id FOR NO KEY UPDATE";
    let ids: Vec<ObjectId> = tx.query(find, values![digests.as_slice()]).await?;
    let (mut quarantined, mut marks) = (Vec::new(), Marks::new());
    for Damage { digest, pack, reason } in damage {
        // A copy that collection or a push has put elsewhere is not what was found bad.
        let update = "UPDATE objects SET health = $1 WHERE id = ANY($2) AND digest = $3 AND health <> $1
                      AND pack = (SELECT id FROM packs WHERE key = $4) RETURNING id";
        let object: Option<ObjectId> = tx.returning(update, values![Health::Damaged, &ids, digest, pack]).await?.pop();
        let Some(object) = object else { continue };
        let insert = "INSERT INTO damage (object, reason, found_at) VALUES ($1, $2, $3)
                      ON CONFLICT (object) DO UPDATE SET reason = excluded.reason, found_at = excluded.found_at";
        tx.execute(insert, values![object, reason.replace('\0', "\u{fffd}"), now]).await?;
        marks.insert(object, BTreeSet::from([0]));
        quarantined.push(*digest);
    }
    if marks.is_empty() {
        return Ok(quarantined);
    }
    // Repeat until nothing new is found, since a concurrent transaction may have stored a node
    // above a marked one.
    loop {
        let before = marks.len();
        climb(tx, &mut marks, Among::All).await?;
        let marked: BTreeSet<ObjectId> = marks.keys().copied().collect();
        let ids: Vec<ObjectId> = marked.into_iter().collect();
        objects::lock(tx, &ids).await?;
        let mark = "UPDATE objects SET health = $1 WHERE id = ANY($2) AND health = $3";
        tx.execute(mark, values![Health::Incomplete, ids, Health::Complete]).await?;
        if marks.len() == before || !tx.is_concurrent() {
            return Ok(quarantined);
        }
    }
}

/// Whether there is something that an upload may heal: a quarantined blob, or a node that is marked
/// because it reaches one.
pub(super) async fn is_unwell(tx: &mut dyn Tx) -> Outcome<bool> {
    let find = "SELECT id FROM objects /* INDEXED BY objects_unwell */ WHERE health > 0 ORDER BY id LIMIT 1";
    Ok(tx.first::<ObjectId>(find, &[]).await?.is_some())
}

/// Object, digest, kind, reason, time: a quarantined blob as it lies in the tables.
type RawDamage = (ObjectId, Digest, Kind, Option<String>, Option<u64>);

pub(super) async fn damaged(tx: &mut dyn Tx, after: Option<&str>, limit: usize) -> Outcome<Page<DamagedRow>> {
    let find = "SELECT o.id, o.digest, o.kind, d.reason, d.found_at FROM objects o LEFT JOIN damage d ON d.object = o.id
                WHERE o.health > 0 AND o.health = $1 AND o.id > $2 ORDER BY o.id LIMIT $3";
    let found: Vec<RawDamage> = tx.query(find, values![Health::Damaged, numbered(after, 0)?, one_more(limit)]).await?;
    let page = paged(found, limit, |row| row.0.to_string());
    if page.rows.is_empty() {
        return Ok(Page { rows: Vec::new(), next: None });
    }
    let mut marks: Marks = page.rows.iter().enumerate().map(|(number, row)| (row.0, BTreeSet::from([number]))).collect();
    climb(tx, &mut marks, Among::Unwell).await?;
    let mut snapshots: Vec<Vec<(RepositoryName, Digest)>> = vec![Vec::new(); page.rows.len()];
    let find = "SELECT m.object, r.name, o.digest FROM manifests m JOIN repositories r ON r.id = m.repository
                JOIN objects o ON o.id = m.object WHERE o.health > 0 ORDER BY m.id";
    for (object, name, digest) in tx.query::<(ObjectId, RepositoryName, Digest)>(find, &[]).await? {
        for number in marks.get(&object).into_iter().flatten() {
            if let Some(list) = snapshots.get_mut(*number).filter(|list| list.len() < SNAPSHOTS) {
                list.push((name.clone(), digest));
            }
        }
    }
    let row = |((_, digest, kind, reason, found_at), snapshots): (RawDamage, _)| DamagedRow {
        digest,
        kind,
        reason: reason.unwrap_or_default(),
        found_at: found_at.unwrap_or(0),
        snapshots,
    };
    Ok(Page { rows: page.rows.into_iter().zip(snapshots).map(row).collect(), next: page.next })
}

pub(super) async fn lift_quarantine(tx: &mut dyn Tx, good: &[(Digest, String)]) -> Outcome<u64> {
    alone(tx).await?;
    let mut lifted: Vec<ObjectId> = Vec::new();
    for (digest, pack) in good {
        // A node's children may be damaged: whether they are is for the reassessment.
        let update = "UPDATE objects SET health = CASE kind WHEN 0 THEN 0 ELSE $1::bigint END WHERE id =
                        (SELECT id FROM objects WHERE digest = $2 AND health = $3
                         AND pack = (SELECT id FROM packs WHERE key = $4) FOR NO KEY UPDATE)
                      AND health = $3 RETURNING id";
        let values = values![Health::Incomplete, digest, Health::Damaged, pack];
        lifted.extend(tx.returning::<ObjectId>(update, values).await?);
    }
    if lifted.is_empty() {
        return Ok(0);
    }
    tx.execute("DELETE FROM damage WHERE object = ANY($1)", values![&lifted]).await?;
    note_healed(tx).await?;
    Ok(lifted.len() as u64)
}

/// Notes that something was healed, for the next reassessment. A row each time: no transaction
/// waits for another.
pub(super) async fn note_healed(tx: &mut dyn Tx) -> Outcome<()> {
    tx.execute("INSERT INTO healed DEFAULT VALUES", &[]).await.map(|_| ())
}

pub(super) async fn reassess(tx: &mut dyn Tx) -> Outcome<u64> {
    alone(tx).await?;
    // With a condition: SQLite writes a page when it deletes all of nothing.
    if tx.execute("DELETE FROM healed WHERE id >= 0", &[]).await? == 0 {
        return Ok(0);
    }
    // Locked: a transaction that heals one of them at the same time is waited for.
    let find = "SELECT id, health FROM objects WHERE health > 0 ORDER BY id FOR NO KEY UPDATE";
    let unwell: Vec<(ObjectId, Health)> = tx.query(find, &[]).await?;
    let (damaged, marked): (Vec<_>, Vec<_>) = unwell.into_iter().partition(|(_, health)| *health == Health::Damaged);
    if marked.is_empty() {
        return Ok(0);
    }
    let mut marks: Marks = damaged.into_iter().map(|(object, _)| (object, BTreeSet::from([0]))).collect();
    if !marks.is_empty() {
        climb(tx, &mut marks, Among::Unwell).await?;
    }
    let complete: Vec<ObjectId> = marked.into_iter().map(|(object, _)| object).filter(|object| !marks.contains_key(object)).collect();
    if complete.is_empty() {
        return Ok(0);
    }
    tx.execute("UPDATE objects SET health = 0 WHERE id = ANY($1)", values![complete]).await
}
