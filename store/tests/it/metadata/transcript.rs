//! The answers to all reads of metadata, as text without row ids. Two implementations must give the
//! same text after the same transactions.

use super::model::Universe;
use crate::common::repository;
use pfr_schema::Digest;
use pfr_store::{AuditFilter, AuditRecord, FullPack, Metadata, NamesCursor, ObjectId, PackId, PinnedSnapshot};
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::time::Duration;

/// What `metadata` says about everything.
pub async fn of(metadata: &dyn Metadata, universe: &Universe) -> String {
    let mut text = String::new();
    let digests = universe.digests();
    let rows = metadata.find(digests.clone()).await.unwrap();
    let names: HashMap<ObjectId, Digest> = rows.iter().flatten().map(|row| (row.id, row.digest)).collect();
    for row in rows.iter().flatten() {
        let children: Vec<&Digest> = row.children.iter().map(|id| &names[id]).collect();
        writeln!(text, "{} {:?} {} {} {} {children:?}", row.digest, row.kind, row.size, row.frame_len, row.refs).unwrap();
    }
    writeln!(text, "{:?}", metadata.locate(digests).await.unwrap()).unwrap();
    let mut keys: HashMap<PackId, String> = HashMap::new();
    let mut after = None;
    loop {
        // By pages: the next one begins behind the last row.
        let page = metadata.packs(after, 3).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some(last.id);
        for pack in &page {
            let contents: Vec<_> =
                metadata.pack_contents(pack.id).await.unwrap().into_iter().map(|p| (p.digest, p.offset, p.frame_len)).collect();
            let unheld: Vec<Digest> = metadata.unheld(vec![pack.id]).await.unwrap().iter().map(|id| names[id]).collect();
            let unclaimed: Vec<Digest> = metadata.unclaimed(pack.id).await.unwrap().iter().map(|id| names[id]).collect();
            let sizes = (pack.bytes, pack.frame_bytes, pack.live_bytes);
            writeln!(text, "{} {:?} {sizes:?} {contents:?} {unheld:?} {unclaimed:?}", pack.key, pack.state).unwrap();
            keys.insert(pack.id, pack.key.clone());
        }
    }
    for grace in [0, 20] {
        let emptied = metadata.emptied_packs(Duration::from_secs(grace), 4).await.unwrap();
        writeln!(text, "{:?}", emptied.iter().map(|pack| &keys[&pack.id]).collect::<Vec<_>>()).unwrap();
    }
    writeln!(text, "{} bytes, {:?}", metadata.disk_bytes().await.unwrap(), metadata.is_empty().await.unwrap()).unwrap();
    writeln!(text, "{:?}", metadata.count_packs(FullPack { bytes: 4096, frames: 64 }).await.unwrap()).unwrap();
    for PinnedSnapshot { repository, snapshot, pins } in metadata.pinned(3).await.unwrap() {
        writeln!(text, "{repository} {} {:?} {pins:?}", snapshot.digest, snapshot.tags).unwrap();
    }
    writeln!(text, "{:?} {}", metadata.count_snapshots().await.unwrap(), metadata.expired_sessions().await.unwrap()).unwrap();
    writeln!(text, "{:?} {:?}", metadata.evictable(3).await.unwrap(), metadata.repositories(None, 10).await.unwrap()).unwrap();
    let mut cursor = changes(&mut text, metadata).await;
    loop {
        let (records, next) = metadata.names(cursor, 2).await.unwrap();
        writeln!(text, "{records:?}").unwrap();
        match next {
            Some(next) => cursor = next,
            None => break,
        }
    }
    pages(&mut text, metadata).await;
    writeln!(text, "{:?} {:?}", metadata.quota().await.unwrap(), metadata.has_room().await.map_err(|e| e.to_string())).unwrap();
    audit_log(&mut text, metadata).await;
    text
}

/// The audit log in both orders, by pages, with and without conditions. Of numbers only the order
/// means something.
async fn audit_log(text: &mut String, metadata: &dyn Metadata) {
    let all = AuditFilter { with_registry: true, ..AuditFilter::default() };
    for filter in [
        all.clone(),
        AuditFilter::default(),
        AuditFilter { oldest_first: true, ..all.clone() },
        AuditFilter { token: Some("a token".into()), ..all.clone() },
        AuditFilter { repository: Some(repository()), since: Some(1_020_000), until: Some(1_200_000), ..all.clone() },
        AuditFilter { repository: Some("another".parse().unwrap()), ..all.clone() },
        AuditFilter { token: Some("no\0token".into()), ..all },
    ] {
        let (mut records, mut after): (Vec<AuditRecord>, Option<String>) = (Vec::new(), None);
        loop {
            let page = metadata.audit_records(filter.clone(), after, 3).await.unwrap();
            records.extend(page.rows);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        let is_next = |a: &AuditRecord, b: &AuditRecord| if filter.oldest_first { a.number < b.number } else { a.number > b.number };
        assert!(records.is_sorted_by(is_next), "{filter:?}: {records:?}");
        let newest = metadata.last_audit_record().await.unwrap();
        assert!(records.iter().all(|record| record.number <= newest));
        for record in records {
            writeln!(text, "{:?}", AuditRecord { number: 0, ..record }).unwrap();
        }
    }
}

/// Changes and the journal. Only the order of numbers means something: a transaction that is taken
/// back may use some up. Returns where a walk over all names begins.
async fn changes(text: &mut String, metadata: &dyn Metadata) -> NamesCursor {
    let (unjournaled, journal) = (metadata.unjournaled(1000).await.unwrap(), metadata.journal().await.unwrap());
    let (last, cursor) = metadata.begin_names().await.unwrap();
    let numbers: BTreeSet<u64> =
        unjournaled.iter().map(|change| change.seq).chain(journal.iter().flat_map(|row| [row.first, row.last])).collect();
    assert!(numbers.iter().all(|number| *number <= last), "{numbers:?} were handed out, {last} is said to be the last");
    let rank = |number: u64| numbers.range(..number).count();
    assert!(unjournaled.is_sorted_by(|a, b| a.seq < b.seq));
    for change in &unjournaled {
        writeln!(text, "{} {:?}", rank(change.seq), change.record).unwrap();
    }
    for row in &journal {
        writeln!(text, "{} {}-{} {} {}", row.key, rank(row.first), rank(row.last), row.summary, row.records).unwrap();
    }
    cursor
}

/// Lists by pages, to their end.
async fn pages(text: &mut String, metadata: &dyn Metadata) {
    let mut after = None;
    loop {
        let page = metadata.damaged(after, 2).await.unwrap();
        writeln!(text, "{:?}", page.rows).unwrap();
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    loop {
        let page = metadata.gc_runs(after, 2).await.unwrap();
        writeln!(text, "{page:?}").unwrap();
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    loop {
        // A repository without snapshots is refused everywhere.
        let Ok(page) = metadata.snapshots(repository(), after, 2).await else { return };
        for row in page.rows {
            let one = metadata.snapshot(repository(), row.digest).await.unwrap();
            assert_eq!(one, row);
            writeln!(text, "{:?}", (row.digest, row.tags, row.parents, row.pushed_at, row.logical_bytes, row.new_bytes)).unwrap();
        }
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    loop {
        let page = metadata.tags(repository(), after, 2).await.unwrap();
        for row in &page.rows {
            assert_eq!(&metadata.tag(repository(), row.name.clone()).await.unwrap(), row);
        }
        writeln!(text, "{page:?}").unwrap();
        after = page.next;
        if after.is_none() {
            break;
        }
    }
}
