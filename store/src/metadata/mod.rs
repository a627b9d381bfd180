//! The metadata: every transaction that the store makes, each atomic and durable when it returns
//! (but for [`Mode::UNDOABLE`] and [`Mode::UNDOABLE_GROW`]).
//!
//! The logic of each transaction is written once, here, over the row operations of a [`tx::Tx`].
//! SQLite (the embedded store) and PostgreSQL (replicas) are the two databases that run it
//! (`backends/`); one behaviour suite (`tests/it/metadata`) runs against both. Time is the
//! database's own.
//!
//! A transaction locks all objects that it changes with one statement, in id order, before packs,
//! tags and sessions: so transactions never deadlock. One that changes nodes, live bytes of packs,
//! which snapshots there are or where tags point locks objects, too. So a transaction that must be
//! alone locks the table of objects first, and no other table that they change
//! (`objects::lock_all`). Some of them write tags before snapshots and some after: such a lock of
//! both would deadlock in either order. Every statement that deletes checks its condition again.
//!
//! What the store notes of a snapshot (its agent, its rows in the prefix index, the blobs that it
//! brings into its repository) needs no lock of its object. So a transaction that changes several
//! rows of manifests locks them in id order with one statement (`snapshots::lock_rows`), after
//! objects and before tags.

pub(crate) mod accept;
mod access;
mod agents;
pub(crate) mod arguments;
mod audit;
mod audit_log;
mod blobs;
mod by_agent;
pub(crate) mod children;
mod collect;
mod commit;
mod domains;
mod events;
pub(crate) mod fail;
mod images;
mod index;
mod integrity;
mod journal;
mod leases;
mod lineage;
mod lists;
mod names;
mod objects;
mod once;
mod packs;
mod plan;
mod prefixes;
mod queue;
mod quota;
mod restore;
mod retention;
mod rows;
mod runs;
mod sessions;
mod signing;
pub(crate) mod small;
mod snapshots;
pub(crate) mod sql;
mod stats;
mod sweep;
pub(crate) mod tx;
mod uploads;

pub use once::*;
pub use rows::*;

use crate::Result;
use crate::room::{Freeing, MadeRoom};
use async_trait::async_trait;
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{AccessTokenId, Digest, DigestPrefix, DomainName, Kind, RepositoryName, Tag};
use std::sync::Arc;
use std::time::Duration;
use tx::{AnyBackend, Mode};

/// Calls a macro with the list of all transactions.
///
/// Each has its documentation, its name, what it takes and gives, and how it is run: a
/// `Mode` and the work of the transaction, or `COMPOSED` and a function that runs several.
#[doc(hidden)]
#[macro_export]
macro_rules! metadata_transactions {
    ($apply:ident) => {
        $apply! {
            /// Opens a push session in `repository`, which is created if it is new (it shows once
            /// something is committed).
            open_push(push: PushId, repository: RepositoryName, lease: Duration) -> ()
                = GROW |tx| sessions::open_push(tx, push, repository, *lease);
            /// The repository of a live session, whose lease is renewed.
            renew_push(push: PushId, lease: Duration) -> RepositoryName = COMPOSED |database| sessions::renew_push(database, push, lease);
            /// Ends a session and with it its leases. Ending a session twice is no error.
            close_push(push: PushId) -> () = WRITE |tx| sessions::close_push(tx, push);
            /// Sessions that live, oldest first.
            unfinished(limit: usize) -> Vec<Unfinished> = READ |tx| sessions::unfinished(tx, *limit);
            /// Sessions that the next collection forgets: open or ended, they have expired.
            expired_sessions() -> u64 = READ |tx| sessions::expired(tx);
            /// Ends every session that lives and gives up every pack that is being written; returns
            /// how many sessions. For a store of one host.
            end_pushes() -> u64 = WRITE |tx| sessions::end_all(tx);
            /// Ends every session that was opened for a capture; returns how many.
            end_captures() -> u64 = WRITE |tx| sessions::end_captures(tx);
            /// Of these objects, those that a lease covers.
            leases(ids: Vec<ObjectId>) -> Vec<(ObjectId, Lease)> = READ |tx| leases::of(tx, ids);
            /// Records a pack before its upload starts.
            begin_pack(key: String, lease: Duration) -> PackId = WRITE |tx| index::begin_pack(tx, key, *lease);
            /// Renews the lease of a pack that is being written, and of the session that it is
            /// written for.
            ///
            /// # Errors
            /// [`crate::Error::PackLost`] if it is not being written any more,
            /// [`crate::Error::PushUnknown`] if the session is over: nothing was renewed.
            renew_pack(push: Option<PushId>, pack: PackId, lease: Duration) -> ()
                = WRITE |tx| index::renew_pack(tx, push.as_ref(), *pack, *lease);
            /// Indexes a durable pack: objects, nodes, child counts; all or nothing. Frames
            /// come in stream order, children before the nodes that list them. A blob that is
            /// stored already keeps its place.
            ///
            /// # Errors
            /// [`crate::Error::Missing`] or [`crate::Error::WrongShape`] if a node's children are
            /// not all stored as it says. [`crate::Error::PackLost`] if collection gave the pack up
            /// in the meantime, whatever the state of the session: the bytes must be uploaded
            /// again, and only the caller may know that they are on storage.
            finish_pack(push: PushId, pack: PackId, sizes: PackSizes, frames: Vec<NewFrame>, lease: Duration) -> PackStored
                = GROW |tx| index::finish_pack(tx, push, *pack, *sizes, frames, *lease);
            /// Positions in `wanted` of what is not stored (as that kind). The rest is leased to
            /// the session, as long as that lives.
            missing(push: PushId, wanted: Vec<(Digest, Kind)>, lease: Duration) -> Vec<usize>
                = COMPOSED |database| objects::missing(database, push, wanted, lease);
            /// Where blobs lie; `None` for what is not stored.
            locate(digests: Vec<Digest>) -> Vec<Option<Location>> = READ |tx| objects::locate(tx, digests);
            /// Objects by digest.
            find(digests: Vec<Digest>) -> Vec<Option<ObjectRow>> = READ |tx| objects::find(tx, digests);
            /// Objects by row id; ids that do not exist are left out.
            objects(ids: Vec<ObjectId>) -> Vec<ObjectRow> = READ |tx| objects::objects(tx, ids);
            /// A session whose lease has not run out, open or ended.
            ///
            /// # Errors
            /// [`crate::Error::PushUnknown`] if there is none.
            session(session: PushId) -> Session = READ |tx| sessions::session(tx, session);
            /// Makes a snapshot visible, in one transaction; ends the session and with it its
            /// leases. Until the session would have expired, the same commit of the same session
            /// again does nothing and answers as the first did, whatever became of the snapshot
            /// since.
            commit(push: PushId, commit: Commit) -> Committed = GROW |tx| commit::commit(tx, push, commit);
            /// The snapshot a tag points at.
            tag(repository: RepositoryName, tag: Tag) -> TagRow = SNAPSHOT |tx| lists::tag(tx, repository, tag);
            /// Tags by name.
            tags(repository: RepositoryName, after: Option<String>, limit: usize) -> Page<TagRow>
                = SNAPSHOT |tx| lists::tags(tx, repository, after.as_deref(), *limit);
            /// Points tags at a snapshot of the repository; all or nothing.
            ///
            /// # Errors
            /// [`crate::Error::TagImmutable`] if a retention policy keeps one where it is; so do
            /// all changes here that move or delete tags, but those of an administrator.
            /// [`crate::Error::SignatureRequired`] if a signing policy asks for more than `signed`
            /// says; so do all changes here that put tags.
            put_tags(repository: RepositoryName, snapshot: Digest, moves: Vec<TagMove>) -> ()
                = GROW |tx| names::put_tags(tx, repository, snapshot, moves, names::Allowed::default());
            /// Makes a change of tags or snapshots. With `once`, while the lease of its session
            /// lasts, the same change again does nothing and answers as the first did. With
            /// `audit`, a change that was made is in the audit log, in the same transaction.
            ///
            /// # Errors
            /// Those of the change, which then may be asked for again; [`crate::Error::Invalid`] if
            /// the session stands for something else.
            change_names(repository: RepositoryName, change: NameChange, once: Option<Once>, lease: Duration, audit: Option<AuditEntry>, signed: Option<Signed>)
                -> ()
                = COMPOSED |database| names::change_names(database, repository, change, once, lease, audit, signed);
            /// Notes that a tag that points at `at` was put there because an upstream has it there;
            /// the next move forgets it. Nothing happens if it points elsewhere by now.
            mark_followed(repository: RepositoryName, tag: Tag, at: Digest) -> () = GROW |tx| names::mark_followed(tx, repository, tag, at);
            /// Deletes a tag.
            delete_tag(repository: RepositoryName, tag: Tag, expected: Option<TagState>) -> ()
                = WRITE |tx| names::delete_tag(tx, repository, tag, *expected, false);
            /// One snapshot.
            snapshot(repository: RepositoryName, digest: Digest) -> SnapshotRow = SNAPSHOT |tx| lists::snapshot(tx, repository, digest);
            /// Goes from a snapshot to its first parent, `back` times or as far as the repository
            /// has them.
            ancestor(repository: RepositoryName, from: Digest, back: u64) -> Ancestor
                = SNAPSHOT |tx| lineage::ancestor(tx, repository, from, *back);
            /// The same from the snapshot that a tag points at.
            ancestor_of_tag(repository: RepositoryName, tag: Tag, back: u64) -> Ancestor
                = SNAPSHOT |tx| lineage::ancestor_of_tag(tx, repository, tag, *back);
            /// A snapshot and its ancestors in the repository, breadth first, at most `limit`, and
            /// whether there are more.
            lineage(repository: RepositoryName, digest: Digest, limit: usize) -> (Vec<SnapshotRow>, bool)
                = SNAPSHOT |tx| lineage::lineage(tx, repository, digest, *limit);
            /// Snapshots of the repository that name `parent` as a parent, the oldest first.
            continuations(repository: RepositoryName, parent: Digest, limit: usize) -> Vec<SnapshotRow>
                = SNAPSHOT |tx| lineage::continuations(tx, repository, parent, *limit);
            /// Finds the snapshots of the most tokens, less than `below`, that begin as a request
            /// does, and some that share most of it. Makes at most `look_ups` in the index.
            find_prefixes(repository: RepositoryName, path: Arc<PrefixPath>, below: Option<u64>, look_ups: usize) -> PrefixHits
                = SNAPSHOT |tx| prefixes::find(tx, repository, path, *below, *look_ups);
            /// Snapshots with the deepest waypoint that a request has too, before `below` tokens.
            passing(repository: RepositoryName, path: Arc<PrefixPath>, below: Option<u64>) -> Option<PrefixPassing>
                = SNAPSHOT |tx| prefixes::passing(tx, repository, path, *below);
            /// Snapshots that are not in the prefix index yet, by the row ids of their
            /// manifests.
            unprefixed(after: i64, limit: usize) -> Vec<(i64, Digest)> = READ |tx| prefixes::unprefixed(tx, *after, *limit);
            /// Puts snapshots into the prefix index; returns how many were not in it.
            index_prefixes(marks: Vec<(i64, Vec<PrefixMark>)>) -> u64 = GROW |tx| prefixes::index(tx, marks);
            /// Snapshots in the order of the row ids of their manifests, each with what the prefix
            /// index has of it.
            prefixed(after: i64, limit: usize) -> Vec<Prefixed> = SNAPSHOT |tx| prefixes::prefixed(tx, *after, *limit);
            /// The prefix lengths of snapshots of a repository, as the prefix index has them; those
            /// that are not in it, or say no length, are left out.
            prefix_lengths(repository: RepositoryName, snapshots: Vec<Digest>) -> Vec<(Digest, u64)>
                = SNAPSHOT |tx| prefixes::lengths(tx, repository, snapshots);
            /// Replaces the rows of snapshots in the prefix index, by the row ids of their
            /// manifests. A snapshot that is gone is left out.
            correct_prefixes(marks: Vec<(i64, Vec<PrefixMark>)>) -> () = WRITE |tx| prefixes::correct(tx, marks);
            /// Snapshots whose digest begins so, at most `limit`.
            snapshots_like(repository: RepositoryName, prefix: DigestPrefix, limit: usize) -> Vec<Digest>
                = SNAPSHOT |tx| lists::snapshots_like(tx, repository, prefix, *limit);
            /// Snapshots, newest first.
            snapshots(repository: RepositoryName, after: Option<String>, limit: usize) -> Page<SnapshotRow>
                = SNAPSHOT |tx| lists::snapshots(tx, repository, after.as_deref(), *limit);
            /// Deletes a snapshot and the tags that point at it.
            delete_snapshot(repository: RepositoryName, digest: Digest) -> ()
                = WRITE |tx| snapshots::delete_snapshot(tx, repository, digest, None, false);
            /// The same, if its entity tag is still this one: then its tags are those that the
            /// caller saw.
            delete_snapshot_if(repository: RepositoryName, digest: Digest, etag: Digest) -> ()
                = WRITE |tx| snapshots::delete_snapshot(tx, repository, digest, Some(etag), false);
            /// Repositories by name.
            repositories(after: Option<String>, limit: usize) -> Page<RepositoryInfo>
                = READ |tx| lists::repositories(tx, after.as_deref(), *limit);
            /// What the snapshots of a repository cost that follow the manifest `after`, some of
            /// them; `reached` is what counts as reached before. With `only`, those of them that
            /// are named there.
            costs(repository: RepositoryName, after: i64, only: Option<Vec<Digest>>, reached: Arc<ObjectSet>) -> CostsPage
                = SNAPSHOT |tx| stats::costs(tx, repository, *after, only.as_deref(), reached);
            /// Snapshots of a repository whose agent is not in the tables, by the row ids of their
            /// manifests.
            unread_agents(repository: RepositoryName, after: i64, limit: usize) -> Vec<(i64, Digest)>
                = READ |tx| by_agent::unread(tx, repository, *after, *limit);
            /// Notes agents of snapshots that were not in the tables, by the row ids of their
            /// manifests; empty if the configuration names none.
            note_agents(agents: Vec<(i64, String)>) -> () = WRITE |tx| by_agent::note(tx, agents);
            /// The snapshots of a repository that an agent's id is noted of, the oldest first.
            snapshots_of_agent(repository: RepositoryName, agent: String) -> Vec<Digest>
                = READ |tx| by_agent::snapshots(tx, repository, agent);
            /// The references that go when snapshots of a repository are deleted with their tags
            /// and signatures: objects, and how many references to each. Also how many of the
            /// snapshots there are.
            deletion(repository: RepositoryName, snapshots: Vec<Digest>) -> (u64, Vec<(ObjectId, u64)>)
                = SNAPSHOT |tx| stats::deletion(tx, repository, snapshots);
            /// The objects that some nodes list, and those of further references: which of them
            /// nothing else holds, and how often the others are held. Looks at one node, and at
            /// further ones as long as the packed lists of all of them have at most `list_bytes`
            /// bytes: one or two for each object. `left` has the other nodes.
            held(nodes: Vec<ObjectId>, further: Vec<(ObjectId, u64)>, list_bytes: u64) -> Held
                = SNAPSHOT |tx| stats::held(tx, nodes, further, *list_bytes);
            /// What one snapshot costs; its new bytes are all that it reaches.
            cost(repository: RepositoryName, snapshot: Digest) -> Costs = SNAPSHOT |tx| stats::cost(tx, repository, snapshot);
            /// Bytes of all packs that are not deleted yet.
            disk_bytes() -> u64 = READ |tx| packs::disk_bytes(tx);

            /// Takes due GC candidates from the queue. Deletes about `budget` objects that nothing
            /// holds and no lease covers, and what only they held. The rest stays in the queue.
            /// Also forgets push sessions that ended.
            collect(budget: usize) -> Collected = COMPOSED |database| collect::collect(database, budget);
            /// Entries of the queue, without taking them, in the order in which collection would:
            /// those that are `due`, or all.
            queue(due: bool, limit: usize) -> Vec<Queued> = READ |tx| queue::queue(tx, *due, *limit);
            /// Objects of a pack that nothing holds and no lease covers.
            unclaimed(pack: PackId) -> Vec<ObjectId> = READ |tx| queue::unclaimed(tx, *pack, usize::MAX);
            /// Objects of these packs that nothing holds, leased or not.
            unheld(packs: Vec<PackId>) -> Vec<ObjectId> = READ |tx| queue::unheld(tx, packs);
            /// Marks as emptied at most `limit` packs: those that nothing points to, and those
            /// still being written after their lease.
            empty_packs(limit: usize) -> Emptied = WRITE |tx| packs::empty(tx, *limit);
            /// Packs that are being written, those that count as abandoned first.
            writing_packs(limit: usize) -> Vec<PackRow> = READ |tx| packs::writing(tx, *limit);
            /// Packs that were emptied longer ago than `grace`.
            emptied_packs(grace: Duration, limit: usize) -> Vec<PackRow> = READ |tx| packs::emptied(tx, *grace, *limit);
            /// Deletes the rows of emptied packs whose bytes are gone.
            forget_packs(packs: Vec<PackId>) -> () = WRITE |tx| packs::forget(tx, packs);
            /// Deletes the row of a pack whose writer gave it up and deleted its bytes. Nothing
            /// happens if it is not being written any more.
            forget_unfinished_pack(pack: PackId) -> () = WRITE |tx| packs::forget_unfinished(tx, *pack);
            /// Claims for the caller, for the time of `claim`, live packs less than half of whose
            /// frames are live, emptiest first.
            claim_sparse_packs(limit: usize, claim: Duration) -> Vec<PackRow> = WRITE |tx| packs::claim_sparse(tx, *limit, *claim);
            /// Counts live packs, and those of them that are small beside a full one, whether they
            /// may be merged or not.
            count_packs(full: FullPack) -> PackCounts = READ |tx| small::count(tx, *full);
            /// Small packs that may be merged, smallest first: live, unclaimed, at least half
            /// alive, and without damage.
            small_packs(full: FullPack, limit: usize) -> Vec<PackRow> = READ |tx| small::list(tx, *full, *limit);
            /// Claims for the caller, for the time of `claim`, small packs that are worth merging,
            /// of those with an id below `below`; none if no tier is due. Refused while the
            /// database's disk is nearly full: merging needs space and frees little.
            claim_small_packs(full: FullPack, below: Option<PackId>, claim: Duration) -> Vec<PackRow>
                = GROW |tx| small::claim(tx, *full, *below, *claim);
            /// Objects that lie in a pack, in order of offset, damaged ones too.
            pack_contents(pack: PackId) -> Vec<Packed> = READ |tx| packs::contents(tx, *pack);
            /// Makes a pack that compaction wrote live and points what it moved to it. Old packs
            /// that nothing points to any more are marked as emptied.
            ///
            /// # Errors
            /// [`crate::Error::PackLost`] if collection gave the new pack up in the meantime;
            /// nothing was changed.
            finish_compaction(pack: PackId, sizes: PackSizes, moved: Vec<Moved>) -> ()
                = WRITE |tx| packs::finish_compaction(tx, *pack, *sizes, moved);
            /// Writes (or updates) the row of a run, and forgets all but the newest [`GC_RUNS`].
            record_gc_run(run: GcRun) -> () = WRITE |tx| runs::record(tx, run);
            /// Runs, newest first.
            gc_runs(after: Option<String>, limit: usize) -> Page<GcRun> = READ |tx| runs::list(tx, after.as_deref(), *limit);
            /// Marks a snapshot as used now.
            touch_snapshot(repository: RepositoryName, digest: Digest) -> () = WRITE |tx| snapshots::touch(tx, repository, digest);
            /// Keeps a snapshot from eviction for a reason, or no longer for that one. Returns
            /// whether any reason is left.
            pin_snapshot(repository: RepositoryName, digest: Digest, reason: Pin, pinned: bool) -> bool
                = WRITE |tx| snapshots::pin(tx, repository, digest, *reason, *pinned);
            /// Snapshots that eviction leaves, and why; by repository, the newest first in each.
            pinned(limit: usize) -> Vec<PinnedSnapshot> = SNAPSHOT |tx| snapshots::pinned(tx, *limit);
            /// How many snapshots there are, and how many of them are pinned.
            count_snapshots() -> (u64, u64) = READ |tx| snapshots::count(tx);
            /// Snapshots that may be evicted, least recently used first.
            evictable(limit: usize) -> Vec<Evictable> = READ |tx| snapshots::evictable(tx, *limit);
            /// Deletes a snapshot as [`Metadata::delete_snapshot`] does, unless it was pinned, used
            /// or deleted since it was listed. Returns whether it did.
            evict_snapshot(snapshot: Evictable) -> bool = WRITE |tx| snapshots::evict(tx, snapshot);

            /// Packs by id, whatever their state.
            packs(after: Option<PackId>, limit: usize) -> Vec<PackRow> = READ |tx| packs::packs(tx, *after, *limit);
            /// Quarantines blobs, if they still lie in the pack in which they were found bad, and
            /// marks the nodes that reach them as incomplete. Returns those that were
            /// quarantined now. Costs one look at every node.
            quarantine(damage: Vec<Damage>) -> Vec<Digest> = LONG_WRITE |tx| integrity::quarantine(tx, damage);
            /// Lifts the quarantine of blobs that were found good where they lie, each with the key
            /// of that pack; a copy elsewhere is not touched. Returns how many. Nodes among
            /// them, and above them, are for [`Self::reassess`].
            lift_quarantine(good: Vec<(Digest, String)>) -> u64 = LONG_WRITE |tx| integrity::lift_quarantine(tx, good);
            /// Quarantined blobs, and the snapshots that reach them. Costs one look at every
            /// incomplete node.
            damaged(after: Option<String>, limit: usize) -> Page<DamagedRow>
                = SNAPSHOT |tx| integrity::damaged(tx, after.as_deref(), *limit);
            /// Clears the mark of nodes below which everything is complete again; returns how many.
            /// Does nothing unless something was healed since the last time. Costs one look at
            /// every incomplete node.
            reassess() -> u64 = LONG_WRITE |tx| integrity::reassess(tx);
            /// Recomputes references, live bytes and sizes from nodes, manifests and tags, in one
            /// state of the tables, and compares; corrects them if `repair`. Also finds packs that
            /// are marked as emptied although blobs use them, and objects that nothing holds and
            /// that collection's queue lacks. If the children of a node are not known, no reference
            /// is corrected.
            audit(repair: bool) -> Audit = COMPOSED |database| audit::audit(database, repair);

            /// Changes of names whose journal object is not recorded yet, oldest first. Numbers
            /// become visible in their order: once a number was seen here or in [`Self::names`], no
            /// smaller one appears.
            unjournaled(limit: usize) -> Vec<Unjournaled> = SNAPSHOT |tx| journal::unjournaled(tx, *limit);
            /// Records journal objects, all or none: changes between the numbers of an object of
            /// changes lie in it. Twice is no error.
            journaled(rows: Vec<JournalRow>) -> () = COMPOSED |database| journal::journaled(database, rows);
            /// Where the log of events stands. The first call begins it: no event is kept before.
            /// `epoch` is what it is called then.
            begin_events(epoch: String) -> EventLog = GROW |tx| events::begin(tx, epoch);
            /// Events with greater numbers than `after`, in their order, and where the log stands.
            /// An event is here when its change is in the journal. Once a number was seen here, no
            /// smaller one appears.
            events(after: u64, limit: usize) -> EventPage = SNAPSHOT |tx| events::after(tx, *after, *limit);
            /// Lets the events of collections appear, unless changes of names wait for the journal:
            /// then they appear with these. Returns whether none is left.
            note_collections() -> bool = WRITE |tx| events::note_collections(tx);
            /// Deletes events: those that are older than `kept`, and then those below the newest
            /// `rows` numbers, each time about `limit`, the oldest first. Returns how many in all.
            trim_events(kept: Duration, rows: u64, limit: usize) -> u64 = WRITE |tx| events::trim(tx, *kept, *rows, *limit);
            /// Begins a walk over all names: returns the number of the last change that every page
            /// contains, and where to begin.
            begin_names() -> (u64, NamesCursor) = SNAPSHOT |tx| journal::begin_names(tx);
            /// About `limit` names as records, and where to go on. Each page is a state of its own:
            /// what changed since the walk began may be in it or not, but not a snapshot that is
            /// newer. So a walk and all changes after its number, replayed over it up to where it
            /// ended, are the names.
            names(cursor: NamesCursor, limit: usize) -> (Vec<Record>, Option<NamesCursor>)
                = SNAPSHOT |tx| journal::names(tx, cursor, *limit);
            /// How far the journal has grown; objects are counted up to `most`.
            journal_state(most: usize) -> JournalState = SNAPSHOT |tx| journal::state(tx, *most);
            /// Objects of the journal, in order.
            journal() -> Vec<JournalRow> = READ |tx| journal::journal(tx);
            /// Keys of at most `limit` objects that the newest summary makes superfluous,
            /// changes first, oldest first.
            superfluous_journal(limit: usize) -> Vec<String> = SNAPSHOT |tx| journal::superfluous(tx, *limit);
            /// Forgets journal objects whose bytes are gone.
            forget_journal(keys: Vec<String>) -> () = WRITE |tx| journal::forget(tx, keys);
            /// Whether the tables are empty: no pack, no repository.
            is_empty() -> bool = READ |tx| packs::is_empty(tx);
            /// The id that the marker on the storage must have. None until it is entered: the
            /// marker has it before.
            storage_id() -> Option<String> = READ |tx| packs::storage_id(tx);
            /// Enters the id of the storage if the tables have none. Returns the id that they have
            /// afterwards, which another process may have entered.
            enter_storage_id(id: String) -> String = WRITE |tx| packs::enter_storage_id(tx, id);
            /// Forgets the id of the storage: a rebuild takes that of the marker.
            forget_storage_id() -> () = WRITE |tx| packs::forget_storage_id(tx);
            /// Takes in a pack that was found on storage: its frames become plain blobs, those that
            /// are known stay where they are, unless they are damaged or a frame here says that
            /// they are nodes: it takes their place. Twice is no error.
            adopt_pack(key: String, sizes: PackSizes, frames: Vec<NewFrame>, lease: Duration) -> PackStored
                = WRITE |tx| index::adopt_pack(tx, key, *sizes, frames, *lease);
            /// Makes stored blobs nodes; returns those that lack children and stay blobs.
            adopt_containers(containers: Vec<(Digest, Kind, NewContainer)>) -> Vec<Digest>
                = WRITE |tx| index::adopt_containers(tx, containers);
            /// Replays journal records, in order, over the names that there are, and continues
            /// their numbering after `last`. A snapshot that exists stays where it is in lists.
            /// Records of snapshots that should exist after these and whose manifest is not stored
            /// (as a manifest) are returned and skipped, and a tag that should point at one is not
            /// there. No new changes are noted.
            restore_names(records: Vec<Record>, last: u64) -> Vec<Record> = WRITE |tx| restore::restore_names(tx, records, *last);

            /// A domain other than the default one. The catalogue is in the default domain's
            /// tables; those of other domains have it too, and it stays empty there.
            domain(name: DomainName) -> Option<DomainRow> = READ |tx| domains::domain(tx, name);
            /// Domains by name, without the default one.
            domains(after: Option<String>, limit: usize) -> Page<DomainRow>
                = READ |tx| domains::domains(tx, after.as_deref(), *limit);
            /// The row of a domain, made if there is none, and whether it was. A new one is
            /// encrypted if it gets a wrapped key.
            ///
            /// # Errors
            /// [`crate::Error::DomainBusy`] while a domain of this name is being deleted.
            create_domain(name: DomainName, key: Option<String>, audit: Option<AuditEntry>) -> (DomainRow, bool)
                = GROW |tx| domains::create_domain(tx, name, key.as_deref(), audit.as_ref());
            /// The wrapped key of a domain, also of the default one; none if it is not encrypted.
            domain_key(name: DomainName) -> Option<String> = READ |tx| domains::key(tx, name);
            /// Gives a domain that is empty its wrapped key; returns the one that it has then:
            /// another process may have been first.
            enter_domain_key(name: DomainName, wrapped: String) -> String = GROW |tx| domains::enter_key(tx, name, wrapped);
            /// Replaces the wrapped key of a domain, if it is this one still; returns whether it
            /// was.
            rewrap_domain_key(name: DomainName, from: String, to: String, audit: Option<AuditEntry>) -> bool
                = WRITE |tx| domains::rewrap_key(tx, name, (from.as_str(), to.as_str()), audit.as_ref());
            /// Begins the deletion of a domain, whose wrapped key is gone then, and revokes its
            /// access tokens; once more changes nothing. The audit log has a record for each of
            /// these tokens too. With `is_left` a domain without a row gets one, as a domain that
            /// is being deleted: bytes of it are left, and the catalogue was lost.
            ///
            /// # Errors
            /// [`crate::Error::DomainUnknown`], without `is_left`.
            delete_domain(name: DomainName, is_left: bool, audit: Option<AuditEntry>) -> DomainRow
                = WRITE |tx| domains::delete_domain(tx, name, *is_left, audit.as_ref());
            /// Domains that are being deleted, and what is next for each. `grace` passes between
            /// the first and the last time that they are emptied, and again before the row goes.
            deleted_domains(grace: Duration) -> Vec<(DomainName, DomainStep)> = READ |tx| domains::deleted_domains(tx, *grace);
            /// Whether a domain is being deleted and was not emptied for the last time. To be asked
            /// before each deletion: a new domain may have the place of one that is gone.
            may_empty_domain(name: DomainName) -> bool = READ |tx| domains::may_empty_domain(tx, name);
            /// Notes that tables and bytes of a domain that is being deleted are gone, for the
            /// first or the last time. Later times are not noted.
            domain_emptied(name: DomainName, is_last: bool) -> () = WRITE |tx| domains::domain_emptied(tx, name, *is_last);
            /// Deletes the row of a domain that was emptied for the last time.
            forget_domain(name: DomainName) -> () = WRITE |tx| domains::forget_domain(tx, name);

            /// An access token, also one that is not valid any more. Tokens are in the default
            /// domain's tables; those of other domains have the table too, and it stays empty
            /// there.
            access_token(id: AccessTokenId) -> Option<AccessTokenRow> = READ |tx| access::token(tx, id);
            /// Access tokens by id.
            access_tokens(after: Option<String>, limit: usize) -> Page<AccessTokenRow>
                = READ |tx| access::tokens(tx, after.as_deref(), *limit);
            /// Adds an access token; returns its row, or none if the id is taken. The time of the
            /// database is that of its creation. Forgets tokens that have not been valid for
            /// `kept`.
            ///
            /// # Errors
            /// [`crate::Error::DomainUnknown`] if it is for a domain that does not exist, or that
            /// is being deleted. [`crate::Error::Invalid`] if it would have expired already.
            create_access_token(token: AccessTokenRow, kept: Duration, audit: Option<AuditEntry>) -> Option<AccessTokenRow>
                = GROW |tx| access::create(tx, token, *kept, audit.as_ref());
            /// Revokes an access token; once more changes nothing.
            ///
            /// # Errors
            /// [`crate::Error::TokenUnknown`].
            revoke_access_token(id: AccessTokenId, audit: Option<AuditEntry>) -> AccessTokenRow
                = WRITE |tx| access::revoke(tx, id, audit.as_ref());
            /// Notes that an access token is used now, unless the last note is younger than
            /// `resolution`.
            access_token_used(id: AccessTokenId, resolution: Duration) -> () = WRITE |tx| access::used(tx, id, *resolution);
            /// Of these digests, those of snapshots, with each repository that has the snapshot.
            ///
            /// A caller that may not read those repositories must not learn of the snapshot.
            snapshot_places(digests: Vec<Digest>) -> Vec<(Digest, RepositoryName)> = READ |tx| access::places(tx, digests);
            /// Whether a session, live or ended, leases a blob: it uploaded the blob, or was told
            /// that the blob is present. Where several sessions lease it, an older one counts as
            /// one of them.
            has_leased(push: PushId, digest: Digest) -> bool = READ |tx| access::has_leased(tx, push, digest);

            /// The quota of this domain, if it has one.
            quota() -> Option<Quota> = READ |tx| quota::quota(tx);
            /// Sets the quota of this domain; without any limit it has none. The first quota counts
            /// what the tables hold, and every change waits for that.
            set_quota(limits: QuotaLimits, audit: Option<AuditEntry>) -> Option<Quota>
                = LONG_WRITE |tx| quota::set(tx, limits, audit.as_ref());
            /// Refuses where the quota leaves no room for another blob, unless something is
            /// damaged: an upload may replace it.
            ///
            /// # Errors
            /// [`crate::Error::QuotaExceeded`].
            has_room() -> () = READ |tx| quota::has_room(tx);
            /// The retention policies of this domain.
            retention() -> Retention = READ |tx| retention::retention(tx);
            /// Sets the retention policies of this domain, all at once.
            set_retention(policies: RetentionPolicies, audit: Option<AuditEntry>) -> ()
                = WRITE |tx| retention::set(tx, policies, audit.as_ref());
            /// The signing policies of this domain.
            signing() -> Signing = READ |tx| signing::signing(tx);
            /// Sets the signing policies of this domain, all at once.
            set_signing(policies: SigningPolicies, audit: Option<AuditEntry>) -> ()
                = WRITE |tx| signing::set(tx, policies, audit.as_ref());
            /// Manifests with signatures of a manifest of the repository, which need not be there,
            /// oldest first.
            signature_manifests(repository: RepositoryName, subject: Digest, limit: usize) -> Vec<ManifestRow>
                = READ |tx| images::signature_manifests(tx, repository, subject, *limit);
            /// All manifests with signatures, oldest first.
            signature_list(repository: RepositoryName, after: Option<String>, limit: usize) -> Page<SignatureManifest>
                = READ |tx| images::signature_list(tx, repository, after.as_deref(), *limit);
            /// Snapshots of a repository that its images list; none if there is no such repository.
            listed_snapshots(repository: RepositoryName) -> Vec<Digest> = SNAPSHOT |tx| images::listed_snapshots(tx, repository);
            /// Deletes a snapshot that a policy chose, with its tags, unless its tags or the
            /// policies were changed since, it was pinned, or an image of its repository lists it.
            expire_snapshot(expiring: Expiring, audit: Option<AuditEntry>) -> Expiry
                = WRITE |tx| snapshots::expire(tx, expiring, audit.as_ref());
            /// Puts an image into the repository of a session, and points tags at it, in one
            /// transaction; ends the session and with it its leases. Returns whether the repository
            /// did not have it before. A snapshot that the repository has only gets the tags.
            ///
            /// # Errors
            /// [`crate::Error::Missing`] if the repository lacks something that it lists.
            put_image(push: PushId, image: NewImage) -> bool = GROW |tx| images::put(tx, push, image);
            /// A manifest of a repository: of an image, or of a snapshot.
            manifest(repository: RepositoryName, name: ManifestName) -> Option<ManifestRow>
                = READ |tx| images::manifest(tx, repository, name);
            /// All tags of a repository by name: those of images too.
            all_tags(repository: RepositoryName, after: Option<String>, limit: usize) -> Page<Tag>
                = READ |tx| images::tags(tx, repository, after.as_deref(), *limit);
            /// Manifests of a repository that refer to `subject`, of one type or of any, in the
            /// order of their row ids, after `after`.
            referrers(repository: RepositoryName, subject: Digest, artifact_type: Option<String>, after: i64, limit: usize)
                -> Vec<ManifestRow>
                = READ |tx| images::referrers(tx, repository, subject, artifact_type.as_deref(), *after, *limit);
            /// Puts a stored blob into the repository of a session.
            ///
            /// # Errors
            /// [`crate::Error::BlobUnknown`] if it is not stored.
            link_blob(push: PushId, digest: Digest) -> () = GROW |tx| blobs::link(tx, push, digest);
            /// Manifests of a repository for which [`Metadata::link_manifests`] is still to be
            /// called, in the order of their row ids, after `after`.
            unlinked_manifests(repository: RepositoryName, after: i64, limit: usize) -> Vec<Unlinked>
                = READ |tx| blobs::unlinked(tx, repository, *after, *limit);
            /// Puts what manifests list into their repository. Those that are gone, or of which it
            /// was done, are left out.
            link_manifests(repository: RepositoryName, manifests: Vec<Listing>) -> ()
                = GROW |tx| blobs::link_manifests(tx, repository, manifests);
            /// Takes a blob out of a repository. Manifests that list it still hold it.
            ///
            /// # Errors
            /// [`crate::Error::BlobUnknown`] if the repository does not have it;
            /// [`crate::Error::NeededByTag`] if an immutable tag needs it.
            unlink_blob(repository: RepositoryName, digest: Digest, audit: Option<AuditEntry>) -> ()
                = WRITE |tx| blobs::unlink(tx, repository, digest, audit.as_ref());
            /// The size of a blob, if the repository has it and something holds or leases it.
            blob(repository: RepositoryName, digest: Digest) -> Option<u64> = READ |tx| blobs::blob(tx, repository, digest);
            /// Repositories that have a blob, by name, at most `limit`.
            blob_places(digest: Digest, limit: usize) -> Vec<RepositoryName> = READ |tx| blobs::places(tx, digest, *limit);
            /// Of these digests, those that the repository has neither as blobs nor as manifests;
            /// with `as_manifests` those that it does not have as manifests.
            blobs_missing(repository: RepositoryName, digests: Vec<Digest>, as_manifests: bool) -> Vec<Digest>
                = READ |tx| blobs::missing(tx, repository, digests, *as_manifests);
            /// Bytes that an upload has received: whole chunks.
            upload_received(push: PushId) -> u64 = READ |tx| uploads::received(tx, push);
            /// Parts of an upload in order, from byte `from` on.
            upload_parts(push: PushId, from: u64, limit: usize) -> Vec<UploadPart> = READ |tx| uploads::parts(tx, push, *from, *limit);
            /// Adds parts, which are stored, to an upload that has received `begin_at` bytes, and
            /// renews its lease. Returns the bytes that it has received then.
            ///
            /// # Errors
            /// [`crate::Error::UploadMoved`] if it has received more or fewer bytes by now.
            append_upload(push: PushId, begin_at: u64, parts: Vec<UploadPart>, lease: Duration) -> u64
                = GROW |tx| uploads::append(tx, push, *begin_at, parts, *lease);
            /// Takes the bytes from `from` on out of an upload again, if it has received `to`
            /// bytes.
            ///
            /// # Errors
            /// [`crate::Error::PushUnknown`].
            cut_upload(push: PushId, from: u64, to: u64, lease: Duration) -> () = WRITE |tx| uploads::cut(tx, push, *from, *to, *lease);
            /// Adds a record to the audit log.
            add_audit_record(entry: AuditEntry) -> () = WRITE |tx| audit_log::add(tx, entry);
            /// Records of the audit log.
            ///
            /// # Errors
            /// [`crate::Error::Invalid`] for a cursor that is none.
            audit_records(filter: AuditFilter, after: Option<String>, limit: usize) -> Page<AuditRecord>
                = SNAPSHOT |tx| audit_log::records(tx, filter, after.as_deref(), *limit);
            /// The number of the newest record of the audit log; 0 without any.
            last_audit_record() -> u64 = READ |tx| audit_log::last(tx);
            /// Deletes records of the audit log: those that are older than `kept`, and then those
            /// below the newest `rows` numbers, each time at most `limit`, the oldest first.
            /// Returns how many in all.
            trim_audit_log(kept: Duration, rows: u64, limit: usize) -> u64 = WRITE |tx| audit_log::trim(tx, *kept, *rows, *limit);
            /// Keeps what an agent reports now, instead of its last report. `label` is that of its
            /// token. If it is a new agent and there are very many, it takes the place of one that
            /// has not reported for hours. If the host goes down soon after, the report may be
            /// lost: another one follows.
            ///
            /// # Errors
            /// [`crate::Error::Format`] if it is a new agent, and all of very many have reported
            /// within hours.
            report_agent(name: AgentName, label: Option<String>, report: AgentReport) -> ()
                = UNDOABLE_GROW |tx| agents::report(tx, name, label.as_deref(), report);
            /// Agents by name, each with its last report.
            agents(after: Option<String>, limit: usize) -> Page<AgentInfo> = READ |tx| agents::list(tx, after.as_deref(), *limit);
            /// Deletes the last report of an agent; returns whether there was one. It is audited
            /// only if there was.
            forget_agent(name: AgentName, audit: Option<AuditEntry>) -> bool = WRITE |tx| agents::forget(tx, name, audit.as_ref());
            /// Deletes reports that are older than `kept`; returns how many.
            forget_agents(kept: Duration) -> u64 = WRITE |tx| agents::forget_old(tx, *kept);
        }
    };
}

macro_rules! declare {
    ($($(#[$attribute:meta])* $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $mode:ident |$with:ident| $work:expr;)+) => {
        /// The transactions of the store.
        #[async_trait]
        pub trait Metadata: Send + Sync + std::fmt::Debug + 'static {
            $($(#[$attribute])* async fn $name(&self, $($argument: $type),*) -> Result<$result>;)+

            /// Makes room for work that frees space, if the metadata are on a disk that may be
            /// full. The room is kept until the returned value is dropped. Transactions that store
            /// something new are refused while such a disk is nearly full.
            async fn make_room(&self, _work: Freeing) -> Result<MadeRoom> {
                Ok(MadeRoom::default())
            }

            /// Due GC candidates.
            async fn candidates(&self, limit: usize) -> Result<Vec<Candidate>> {
                Ok(self.queue(true, limit).await?.into_iter().map(|queued| queued.candidate).collect())
            }

            /// Rows inserted, updated or deleted since the process started: what a transaction
            /// costs.
            fn rows_written(&self) -> u64;
        }

        #[async_trait]
        impl Metadata for AnyBackend {
            $(async fn $name(&self, $($argument: $type),*) -> Result<$result> {
                run!($mode, (&*self.0), $name, $with, ($($argument),*), $work)
            })+

            async fn make_room(&self, work: Freeing) -> Result<MadeRoom> {
                self.0.make_room(work).await
            }

            fn rows_written(&self) -> u64 {
                self.0.rows_written()
            }
        }
    };
}

macro_rules! run {
    (COMPOSED, $backend:tt, $name:ident, $database:ident, ($($argument:ident),*), $work:expr) => {{
        let $database = $backend;
        $work.await
    }};
    ($mode:ident, $backend:tt, $name:ident, $tx:ident, ($($argument:ident),*), $work:expr) => {
        $backend.run(Mode::$mode.named(stringify!($name)), ($($argument,)*), |$tx, ($($argument,)*)| Box::pin($work)).await
    };
}

metadata_transactions!(declare);
