//! Domains: nothing that is stored is shared, deletion leaves nothing, and a folder is all that
//! moves.

use crate::common::rig::{Backend, Rig};
use crate::common::{page, pieces, push, repository, snapshot, tag};
use futures::future::join_all;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore as _, ObjectStoreExt as _};
use pfr_schema::{Digest, DomainName, ErrorCode, Kind};
use pfr_store::{Budget, DomainHome, DomainPacks, DomainTables, Domains, Error, GcOptions, Options, RunEnd, Store};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

fn name(text: &str) -> DomainName {
    text.parse().unwrap()
}

/// The domains `a` and `b`, and the default one.
async fn three(domains: &Domains) -> [Store; 3] {
    for domain in ["a", "b"] {
        assert!(domains.create(&name(domain)).await.unwrap().1);
    }
    [domains.default_store().clone(), domains.open(&name("a")).await.unwrap(), domains.open(&name("b")).await.unwrap()]
}

async fn at(store: &Store, name: &str) -> Result<Digest, ErrorCode> {
    store.tag(&repository(), &tag(name)).await.map(|row| row.digest).map_err(|error| error.code())
}

async fn remove(domains: &Domains) {
    assert_eq!(domains.remove_deleted(&Budget::default()).await.unwrap(), RunEnd::Finished);
}

async fn below(rig: &Rig, domain: &str) -> Vec<Path> {
    rig.list(Some(&format!("domains/{domain}"))).await
}

async fn a_domain_shares_nothing_with_others(backend: Backend) {
    let rig = Rig::new(backend).await;
    let domains = rig.domains(4).await;
    let stores = three(&domains).await;
    let s = snapshot(&[1, 2, 3], vec![]);
    for (at_work, store) in stores.iter().enumerate() {
        let session = store.open_push(&repository()).await.unwrap();
        let wanted: Vec<_> = s.pages.iter().map(|page| (Digest::sha256(page), Kind::Blob)).collect();
        assert_eq!(store.missing(&session.id, wanted).await.unwrap().len(), s.pages.len(), "{at_work} speaks of another domain");
        let (ingested, committed) = push(store, &s, "t").await.unwrap();
        assert_eq!(ingested.new, ingested.frames, "{at_work}");
        assert!(committed.created);
    }
    // Names are each domain's own.
    let other = snapshot(&[7], vec![]);
    push(&stores[1], &other, "t").await.unwrap();
    stores[2].delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
    assert_eq!(at(&stores[0], "t").await, Ok(s.manifest.digest));
    assert_eq!(at(&stores[1], "t").await, Ok(other.manifest.digest));
    assert!(at(&stores[2], "t").await.is_err());
    // Collection in one domain leaves the others as they are.
    rig.wait(Duration::from_secs(48 * 3600));
    let gc = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    for _ in 0..3 {
        rig.wait(Duration::from_secs(3600));
        stores[2].gc(&gc, &mut |_| ()).await.unwrap();
    }
    assert!(below(&rig, "b").await.iter().all(|path| !path.as_ref().ends_with(".pfpack")), "b is empty");
    for store in &stores[..2] {
        store.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    }
    for store in &stores {
        assert_eq!(store.metadata().audit(false).await.unwrap().wrong, 0);
    }
    let listed = domains.list(None, 10).await.unwrap();
    assert_eq!(listed.rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(), ["a", "b", "default"]);
}

async fn a_deleted_domain_leaves_no_byte_and_no_table(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let domains = rig.domains(4).await;
    let [default, a, b] = three(&domains).await;
    let s = snapshot(&[1, 2], vec![]);
    for store in [&default, &a, &b] {
        push(store, &s, "t").await.unwrap();
    }
    let session = a.open_push(&repository()).await.unwrap();
    let other = rig.domains(4).await;
    other.open(&name("a")).await.unwrap();

    assert!(domains.delete(&name("a"), false).await.unwrap().deleting_since.is_some());
    assert!(domains.delete(&name("a"), false).await.is_ok(), "once more changes nothing");
    assert!(matches!(domains.open(&name("a")).await, Err(Error::DomainUnknown(_))));
    let refused = domains.create(&name("a")).await.unwrap_err();
    assert!(matches!(refused, Error::DomainBusy(_)) && refused.code() == ErrorCode::DomainBusy, "{refused}");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert!(matches!(other.open(&name("a")).await, Err(Error::DomainUnknown(_))), "another process notices");

    remove(&domains).await;
    assert_eq!(below(&rig, "a").await, []);
    assert!(!rig.has_tables("a") && rig.has_tables("b"));
    // An upload in flight ends, and its bytes are deleted.
    let refused = a.ingest(&session.id, pieces(&snapshot(&[9], vec![]).stream(), 500)).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::DomainUnknown, "{refused}");
    rig.put(&Path::from("domains/a/ff/late.pfpack"), page(1)).await;
    remove(&other).await;
    assert_eq!(below(&rig, "a").await, []);
    rig.put(&Path::from("domains/a/ff/later.pfpack"), page(1)).await;
    assert!(domains.get(&name("a")).await.is_ok(), "the name is not free before the longest upload is over");
    rig.wait(default.options().lease);
    remove(&domains).await;
    assert_eq!(below(&rig, "a").await, []);
    // A slow process notices that it is over; then a new domain may have the place.
    rig.put(&Path::from("domains/a/pf-store"), page(1)).await;
    remove(&other).await;
    assert_eq!(below(&rig, "a").await.len(), 1, "nothing is deleted any more");
    rig.packs.delete(&Path::from("domains/a/pf-store")).await.unwrap();
    assert!(matches!(domains.create(&name("a")).await, Err(Error::DomainBusy(_))));
    rig.wait(default.options().lease);
    remove(&domains).await;
    assert!(matches!(domains.get(&name("a")).await, Err(Error::DomainUnknown(_))));
    remove(&domains).await;

    // A new one of the same name knows nothing of the old one, also where that is still open.
    domains.create(&name("a")).await.unwrap();
    assert_eq!(at(&other.open(&name("a")).await.unwrap(), "t").await, Err(ErrorCode::RepositoryUnknown));
    for store in [&default, &b] {
        store.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    }
}

async fn a_domain_moves_with_its_folder(backend: Backend) {
    let rig = Rig::new(backend).await;
    let domains = rig.domains(4).await;
    let [_, a, _] = three(&domains).await;
    let (s, t) = (snapshot(&[1, 2, 3], vec![]), snapshot(&[3, 4], vec![]));
    push(&a, &s, "s").await.unwrap();
    push(&a, &t, "t").await.unwrap();

    let there = Rig::new(backend).await;
    for path in below(&rig, "a").await {
        there.put(&path, rig.bytes(&path).await).await;
    }
    let elsewhere = there.domains(4).await;
    assert_eq!(elsewhere.find().await.unwrap(), [name("a")], "a lost catalogue is found on the storage");
    let refused = elsewhere.open(&name("a")).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Unavailable, "it is not served before it is rebuilt: {refused}");
    let report = elsewhere.adopt(&name("a")).await.unwrap().rebuild(&mut |_| ()).await.unwrap();
    assert_eq!((report.snapshots, report.tags, report.lost.len(), report.refused.len()), (2, 2, 0, 0), "{report:?}");
    let moved = elsewhere.open(&name("a")).await.unwrap();
    assert_eq!((at(&moved, "s").await, at(&moved, "t").await), (Ok(s.manifest.digest), Ok(t.manifest.digest)));
    for snapshot in [&s, &t] {
        moved.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
    }
}

async fn the_default_store_does_not_look_into_other_domains(backend: Backend) {
    let rig = Rig::new(backend).await;
    let domains = rig.domains(4).await;
    let [default, a, _] = three(&domains).await;
    let s = snapshot(&[1], vec![]);
    push(&default, &s, "t").await.unwrap();
    push(&a, &snapshot(&[2, 3], vec![]), "t").await.unwrap();
    // A rebuild would name it.
    rig.put(&Path::from("domains/a/no/pack"), page(5)).await;
    let before = below(&rig, "a").await;
    let gc = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    rig.wait(Duration::from_secs(48 * 3600));
    default.gc(&gc, &mut |_| ()).await.unwrap();
    assert_eq!(below(&rig, "a").await, before);
    let new = rig.beside().await;
    let report = new.store.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!((report.packs, report.snapshots, report.refused.len()), (1, 1, 0), "{report:?}");
}

async fn what_a_killed_process_began_is_finished_by_the_next(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    // Creation: the row; row and tables, without a marker.
    let first = rig.domains(2).await;
    first.default_store().metadata().create_domain(name("a"), None, None).await.unwrap();
    first.default_store().metadata().create_domain(name("b"), None, None).await.unwrap();
    first.adopt(&name("b")).await.unwrap();
    assert!(matches!(first.adopt(&name("nobody")).await, Err(Error::DomainUnknown(_))));
    let second = rig.domains(2).await;
    assert!(!second.create(&name("a")).await.unwrap().1 && !second.create(&name("b")).await.unwrap().1);
    for domain in ["a", "b"] {
        assert!(below(&rig, domain).await.iter().any(|path| path.as_ref().ends_with("/pf-store")), "{domain} has a marker");
        push(&second.open(&name(domain)).await.unwrap(), &s, "t").await.unwrap();
    }
    // Deletion: the row; row and marker; row, marker and tables; everything but the row.
    first.delete(&name("a"), false).await.unwrap();
    rig.packs.delete(&Path::from("domains/a/pf-store")).await.unwrap();
    let third = rig.domains(2).await;
    assert_eq!(third.find().await.unwrap(), [name("b")], "half a domain is none");
    remove(&third).await;
    assert!(!rig.has_tables("a") && below(&rig, "a").await.is_empty());
    let fourth = rig.domains(2).await;
    for _ in 0..2 {
        rig.wait(fourth.default_store().options().lease);
        remove(&fourth).await;
    }
    assert_eq!(fourth.list(None, 10).await.unwrap().rows.len(), 2);
    assert_eq!(at(&fourth.open(&name("b")).await.unwrap(), "t").await, Ok(s.manifest.digest));
}

async fn a_domain_that_was_half_removed_when_the_catalogue_was_lost_goes_with_one_more_deletion(backend: Backend) {
    let rig = Rig::new(backend).await;
    let [_, a, _] = three(&rig.domains(2).await).await;
    push(&a, &snapshot(&[1], vec![]), "t").await.unwrap();
    // Of a the marker and the tables were removed. Nothing was removed of b.
    let there = Rig::still(backend, Options::default()).await;
    for path in rig.list(Some("domains")).await {
        if !path.as_ref().ends_with("domains/a/pf-store") {
            there.put(&path, rig.bytes(&path).await).await;
        }
    }
    let domains = there.domains(2).await;
    assert_eq!(domains.left().await.unwrap(), [name("a")]);
    for encrypted in [None, Some(false), Some(true)] {
        let refused = domains.create_as(&name("a"), encrypted).await.unwrap_err();
        assert!(
            matches!(&refused, Error::Invalid(reason) if reason.contains("is mounted") && reason.contains("delete it once more")),
            "{encrypted:?}: {refused}"
        );
        assert!(matches!(domains.get(&name("a")).await, Err(Error::DomainUnknown(_))), "{encrypted:?}");
    }
    for unknown in ["b", "c"] {
        assert!(matches!(domains.delete(&name(unknown), false).await, Err(Error::DomainUnknown(_))), "{unknown}");
    }
    let complete = below(&there, "b").await;
    assert!(domains.delete(&name("a"), false).await.unwrap().deleting_since.is_some());
    assert!(domains.left().await.unwrap().is_empty(), "the catalogue knows of it");
    for _ in 0..3 {
        remove(&domains).await;
        there.wait(domains.default_store().options().lease);
    }
    assert_eq!((below(&there, "a").await.len(), below(&there, "b").await), (0, complete));
    assert!(domains.create(&name("a")).await.unwrap().1, "the name is free");
    push(&domains.open(&name("a")).await.unwrap(), &snapshot(&[2], vec![]), "t").await.unwrap();
}

on_every_backend!(
    a_domain_shares_nothing_with_others,
    a_deleted_domain_leaves_no_byte_and_no_table,
    a_domain_moves_with_its_folder,
    the_default_store_does_not_look_into_other_domains,
    what_a_killed_process_began_is_finished_by_the_next,
    a_domain_that_was_half_removed_when_the_catalogue_was_lost_goes_with_one_more_deletion,
);

/// A storage that is not mounted looks like a removal that was cut.
#[tokio::test]
async fn tables_whose_packs_are_out_of_sight_go_only_if_these_are_said_to_be_lost() {
    let [tables, mounted, unmounted] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    // Each process has a new catalogue: that of the one before is lost.
    let process = async |packs: &TempDir| {
        let default = Store::open_in_memory(Options::default()).await.unwrap();
        let packs = DomainPacks::Files { root: packs.path().to_owned(), inside: "" };
        Domains::new(default, Some(DomainHome { tables: DomainTables::Files(tables.path().to_owned()), packs }))
    };
    let [_, a, _] = three(&process(&mounted).await).await;
    push(&a, &snapshot(&[1], vec![]), "t").await.unwrap();
    drop(a);
    let database = |domain: &str| tables.path().join("domains").join(domain).join("metadata.sqlite");

    let domains = process(&unmounted).await;
    for _ in 0..2 {
        let refused = domains.delete(&name("a"), false).await.unwrap_err();
        assert!(matches!(&refused, Error::Invalid(reason) if reason.contains("mounted") && reason.contains("?lost=true")), "{refused}");
    }
    assert!(matches!(domains.get(&name("a")).await, Err(Error::DomainUnknown(_))));
    // Nothing says that there is more of b.
    domains.delete(&name("b"), false).await.unwrap();
    remove(&domains).await;
    assert!(database("a").exists() && !database("b").exists());
    // With its storage it is complete, and found.
    let again = process(&mounted).await;
    for lost in [false, true] {
        assert!(matches!(again.delete(&name("a"), lost).await, Err(Error::DomainUnknown(_))), "{lost}");
    }
    assert_eq!(again.find().await.unwrap(), [name("a"), name("b")]);
    assert!(at(&again.open(&name("a")).await.unwrap(), "t").await.is_ok());
    drop(again);
    domains.delete(&name("a"), true).await.unwrap();
    remove(&domains).await;
    assert!(!database("a").exists());
}

/// A connection that another domain had used would answer from its tables, or write to them.
#[tokio::test(flavor = "multi_thread")]
async fn three_domains_take_turns_on_one_connection() {
    let rig = Rig::new(Backend::PostgresDisk).await;
    let domains = rig.domains(1).await;
    let stores = three(&domains).await;
    let own = |store: usize, round: u64| snapshot(&[store as u64 * 1000 + round, 5], vec![]);
    for round in 0..6 {
        // One after the other: each statement is prepared on the tables of one domain and run on
        // those of the next.
        for (number, store) in stores.iter().enumerate() {
            push(store, &own(number, round), "t").await.unwrap();
            // Without a transaction in the default domain, refused in a transaction in all.
            assert!(store.tag(&repository(), &tag("none")).await.is_err());
            assert!(store.delete_tag(&repository(), &tag("none"), None).await.is_err());
        }
        for (number, store) in stores.iter().enumerate() {
            assert_eq!(at(store, "t").await, Ok(own(number, round).manifest.digest), "round {round}, domain {number}");
            assert_eq!(store.snapshots(&repository(), None, 100).await.unwrap().rows.len() as u64, round + 1);
        }
    }
    // All at once, and some give up in the middle.
    let at_once = (0..24_u64).map(|i| {
        let (number, store) = (i as usize % 3, stores[i as usize % 3].clone());
        tokio::spawn(async move {
            let snapshot = own(number, 100 + i);
            let work = push(&store, &snapshot, "u");
            match i % 4 {
                0 => drop(tokio::time::timeout(Duration::from_millis(i), work).await),
                _ => drop(work.await.unwrap()),
            }
        })
    });
    for ended in join_all(at_once).await {
        ended.unwrap();
    }
    for (number, store) in stores.iter().enumerate() {
        let audit = store.metadata().audit(false).await.unwrap();
        assert_eq!(audit.wrong, 0, "{:?}", audit.discrepancies);
        for row in store.snapshots(&repository(), None, 100).await.unwrap().rows {
            let mine = (0..200).any(|round| own(number, round).manifest.digest == row.digest);
            assert!(mine, "domain {number} has a snapshot of another one");
        }
    }
}

/// Pages of the list: the default domain is where its name is.
#[tokio::test]
async fn the_default_domain_is_listed_once() {
    let rig = Rig::new(Backend::SqliteDisk).await;
    let domains = rig.domains(1).await;
    for others in [&[][..], &["a"], &["x"], &["b", "y", "z"]] {
        for other in others {
            domains.create(&name(other)).await.unwrap();
        }
        let whole = domains.list(None, 100).await.unwrap().rows;
        assert_eq!(whole.iter().filter(|row| row.name.is_default()).count(), 1);
        for limit in 1..=6 {
            let (mut found, mut after) = (Vec::new(), None);
            loop {
                let page = domains.list(after, limit).await.unwrap();
                assert!(page.rows.len() <= limit);
                found.extend(page.rows);
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
            assert_eq!(found, whole, "limit {limit}");
        }
    }
    assert!(matches!(domains.delete(&DomainName::default(), false).await, Err(Error::Invalid(_))));
}

/// A folder of a bucket is a store like any other: nothing above it is seen.
#[tokio::test]
async fn objects_of_a_domain_lie_below_its_folder_only() {
    let rig = Rig::new(Backend::SqliteDisk).await;
    let domains = rig.domains(1).await;
    let [_, a, _] = three(&domains).await;
    push(&a, &snapshot(&[1], vec![]), "t").await.unwrap();
    let outside: Vec<Path> = rig.list(None).await.into_iter().filter(|path| !path.prefix_matches(&Path::from("domains"))).collect();
    assert_eq!(outside, []);
    let folder = PrefixStore::new(Arc::clone(&rig.packs), "domains/a");
    assert!(folder.head(&Path::from("pf-store")).await.is_ok());
    assert!(!folder.list_with_delimiter(None).await.unwrap().common_prefixes.is_empty());
}
