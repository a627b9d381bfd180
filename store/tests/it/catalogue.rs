//! A failure in one domain does not affect other domains, and a short failure closes no domain.

use crate::common::watched::Watched;
use async_trait::async_trait;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use pfr_schema::{DomainName, ErrorCode};
use pfr_store::{Budget, Clock, DomainHome, DomainPacks, DomainTables, Domains, Error, Options, RunEnd, SqliteMetadata, Store};
use pfr_testkit::storage::{Call, Hooks, Moment, hooked, reset};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// While the flag is set, every deletion in the domain `a` fails.
#[derive(Debug, Default)]
struct Keeping(AtomicBool);

#[async_trait]
impl Hooks for Keeping {
    async fn before(&self, call: &Call) -> object_store::Result<Option<object_store::Error>> {
        let of_a = call.moment == Moment::Delete && call.location.as_ref().starts_with("domains/a/");
        if of_a && self.0.load(Ordering::SeqCst) { Err(reset()) } else { Ok(None) }
    }
}

/// Domains whose catalogue and storage fail when a test says so. Leases end at once, so each call
/// of `remove` takes the next of three steps for each deleted domain: delete its tables and bytes,
/// delete them once more, delete its row in the catalogue.
struct Rig {
    domains: Domains,
    catalogue: Arc<Watched>,
    storage: Arc<Keeping>,
    bucket: Arc<dyn ObjectStore>,
    _tables: TempDir,
}

impl Rig {
    async fn new() -> Self {
        let (storage, tables) = (Arc::new(Keeping::default()), tempfile::tempdir().unwrap());
        let bucket = hooked(Arc::new(InMemory::new()), storage.clone());
        let catalogue = Watched::new(SqliteMetadata::open_in_memory(Clock::system()).await.unwrap());
        let options = Options { lease: Duration::ZERO, ..Options::default() };
        let default = Store::new(bucket.clone(), catalogue.clone(), options);
        let home = DomainHome { tables: DomainTables::Files(tables.path().to_owned()), packs: DomainPacks::Bucket(bucket.clone()) };
        Self { domains: Domains::new(default, Some(home)), catalogue, storage, bucket, _tables: tables }
    }

    /// A rig with the domains `a` and `b`, which are being deleted.
    async fn deleting() -> Self {
        let rig = Self::new().await;
        for domain in ["a", "b"] {
            rig.domains.create(&name(domain)).await.unwrap();
            rig.domains.delete(&name(domain), false).await.unwrap();
        }
        rig
    }

    async fn remove(&self) -> Result<RunEnd, Error> {
        self.domains.remove_deleted(&Budget::default()).await
    }

    async fn exists(&self, domain: &str) -> bool {
        match self.domains.get(&name(domain)).await {
            Ok(_) => true,
            Err(Error::DomainUnknown(_)) => false,
            Err(error) => panic!("{error}"),
        }
    }
}

fn name(text: &str) -> DomainName {
    text.parse().unwrap()
}

#[tokio::test]
async fn a_domain_whose_bytes_cannot_be_deleted_keeps_no_other_from_being_removed() {
    let rig = Rig::deleting().await;
    rig.storage.0.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        let failed = rig.remove().await.unwrap_err();
        assert_eq!(failed.code(), ErrorCode::Unavailable, "{failed}");
    }
    assert!(rig.exists("a").await && !rig.exists("b").await);
    rig.storage.0.store(false, Ordering::SeqCst);
    for _ in 0..3 {
        assert_eq!(rig.remove().await.unwrap(), RunEnd::Finished);
    }
    assert!(!rig.exists("a").await);
}

#[tokio::test]
async fn a_call_of_the_catalogue_that_fails_for_one_domain_keeps_no_other_from_being_removed() {
    for (transaction, runs_before) in [("may_empty_domain", 0), ("domain_emptied", 0), ("forget_domain", 2)] {
        let rig = Rig::deleting().await;
        for _ in 0..runs_before {
            assert_eq!(rig.remove().await.unwrap(), RunEnd::Finished, "{transaction}");
        }
        // The next such call is that for `a`: domains are taken in the order of their names.
        rig.catalogue.fail(transaction, 1);
        let failed = rig.remove().await.unwrap_err();
        assert!(failed.to_string().contains(transaction), "{failed}");
        for _ in runs_before + 1..3 {
            assert_eq!(rig.remove().await.unwrap(), RunEnd::Finished, "{transaction}");
        }
        assert!(rig.exists("a").await && !rig.exists("b").await, "{transaction}: one run was lost for `a` and none for `b`");
        assert_eq!(rig.remove().await.unwrap(), RunEnd::Finished, "{transaction}");
        assert!(!rig.exists("a").await, "{transaction}");
    }
}

#[tokio::test]
async fn a_catalogue_that_cannot_be_read_for_a_moment_closes_no_domain() {
    let rig = Rig::new().await;
    rig.domains.create(&name("a")).await.unwrap();
    let open = rig.domains.open(&name("a")).await.unwrap();
    // For a second, the catalogue is not asked again whether an open domain exists.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    rig.catalogue.fail("domains", 1);
    assert_eq!(rig.domains.open_all().await.unwrap_err().code(), ErrorCode::Unavailable);
    // The row of `a` is in the list, and is not asked for again.
    rig.catalogue.fail("domain", 1);
    let opened = rig.domains.open_all().await.unwrap();
    assert!(opened.len() == 1 && opened[0].1.is_same(&open));
    // A row that cannot be read does not prove that the domain was deleted.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(rig.domains.open(&name("a")).await.unwrap_err().code(), ErrorCode::Unavailable);
    assert!(rig.domains.open(&name("a")).await.unwrap().is_same(&open));
}

#[tokio::test]
async fn what_is_left_of_a_domain_is_entered_only_as_one_that_is_being_deleted() {
    let rig = Rig::new().await;
    // Its marker was removed, and then the catalogue was lost.
    rig.bucket.put(&Path::from("domains/a/ff/left.pfpack"), vec![1_u8].into()).await.unwrap();
    rig.catalogue.fail("delete_domain", 1);
    let failed = rig.domains.delete(&name("a"), false).await.unwrap_err();
    assert_eq!(failed.code(), ErrorCode::Unavailable, "{failed}");
    assert!(!rig.exists("a").await, "it would be live, and in the clear");
    assert!(rig.domains.delete(&name("a"), false).await.unwrap().deleting_since.is_some());
    for _ in 0..3 {
        assert_eq!(rig.remove().await.unwrap(), RunEnd::Finished);
    }
    assert!(!rig.exists("a").await && rig.domains.create(&name("a")).await.unwrap().1, "the name is free");
}
