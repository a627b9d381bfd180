//! Garbage collection in the tables. docs/gc.md explains why it is safe.
//!
//! A call is a sequence of short transactions, each of one set of candidates (`sweep.rs`). A
//! database with one writer needs no locks: there a transaction takes one set after the other until
//! another transaction waits. On a shared database, collection pauses while other transactions run.

use super::sessions::forget_expired;
use super::sql::values;
use super::sweep::set;
use super::tx::{Backend, Mode, Outcome, Tx};
use super::{Collected, ObjectId};
use crate::error::{Error, Result};
use std::collections::HashSet;
use std::time::Instant;

/// How long a node is deferred if its children are not known.
const DEFERRED_MS: u64 = 24 * 3600 * 1000;

/// Collects until about `budget` objects are deleted or no candidate is due.
pub(super) async fn collect(backend: &dyn Backend, budget: usize) -> Result<Collected> {
    let sessions = backend.run(Mode::WRITE.named("forget_expired"), (), |tx, ()| Box::pin(forget_expired(tx))).await?;
    let mut done = Collected { sessions, ..Collected::default() };
    let mut deferred = HashSet::new();
    loop {
        let started = Instant::now();
        let left = (budget as u64).saturating_sub(done.released + done.unclaimed);
        let room = usize::try_from(left).unwrap_or(usize::MAX).min(backend.sweep());
        let step = match backend.run(Mode::WRITE.named("sweep"), room, |tx, room| Box::pin(sweep(tx, *room))).await {
            Ok(step) => step,
            // The transaction was rolled back. Defer the node, and collect the other candidates.
            Err(Error::Broken { container, .. }) if deferred.insert(container) => {
                backend.run(Mode::WRITE.named("defer"), container, |tx, container| Box::pin(defer(tx, *container))).await?;
                done.deferred += 1;
                continue;
            }
            // Return the counts of the earlier transactions. If the error persists, the next call
            // reports it.
            Err(error) if done.examined > 0 => {
                tracing::debug!(%error, "garbage collection: a transaction failed after others had succeeded");
                done.more = true;
                return Ok(done);
            }
            Err(error) => return Err(error),
        };
        add(&mut done, step);
        backend.give_way(started.elapsed()).await;
        if !done.more || step.examined == 0 || done.released + done.unclaimed >= budget as u64 {
            return Ok(done);
        }
    }
}

/// Adds the counts of a later step.
fn add(done: &mut Collected, step: Collected) {
    done.examined += step.examined;
    done.released += step.released;
    done.unclaimed += step.unclaimed;
    done.frame_bytes += step.frame_bytes;
    done.more = step.more;
}

/// Defers a node as a lease does: it returns to the queue when this time is over.
async fn defer(tx: &mut dyn Tx, container: ObjectId) -> Outcome<()> {
    let until = tx.now().await?.saturating_add(DEFERRED_MS);
    tx.execute("UPDATE objects SET keep_until = $1 WHERE id = $2", values![until, container]).await?;
    Ok(())
}

/// One transaction: sets of candidates until about `room` objects are deleted.
async fn sweep(tx: &mut dyn Tx, room: usize) -> Outcome<Collected> {
    let mut done = Collected::default();
    loop {
        let deleted = usize::try_from(done.released + done.unclaimed).unwrap_or(usize::MAX);
        let room_of_set = room.saturating_sub(deleted).min(tx.round());
        let step = set(tx, room_of_set).await?;
        add(&mut done, step);
        let full = done.released + done.unclaimed >= room as u64;
        if full || !step.more || step.examined == 0 || !tx.may_go_on() {
            return Ok(done);
        }
    }
}
