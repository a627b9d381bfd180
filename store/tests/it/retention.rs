//! Retention: a run deletes what the dry run says and nothing else, whatever happens meanwhile;
//! immutable tags stay where they are.

use crate::common::rig::{Backend, Rig};
use crate::common::watched::Watched;
use crate::common::{Snapshot, pieces, push, repository, snapshot, tag};
use pfr_schema::api::{RetentionPolicies, RetentionReport, SnapshotSummary, snapshot_etag};
use pfr_schema::{Digest, ErrorCode, RepositoryName, media_type};
use pfr_store::{
    AuditEntry, AuditFilter, AuditRecord, Budget, Expiring, Expiry, Metadata, NameChange, Options, Pin, QuotaLimits, Store, TagMove,
};
use serde_json::{Value, json};
use std::sync::Arc;

on_backends!([sqlite = SqliteDisk, postgres = PostgresDisk]:
    a_run_deletes_what_the_dry_run_says_and_leaves_tables_and_quota_right,
    what_changed_since_it_was_chosen_stays,
    a_dry_run_that_is_cut_while_it_counts_says_so,
    a_run_that_is_cut_is_continued_and_the_journal_has_what_it_deleted,
    runs_of_two_processes_at_once_delete_each_snapshot_once,
    an_immutable_tag_is_moved_and_deleted_by_administrators_only,
    a_lineage_loses_its_oldest_first_so_that_a_cut_makes_no_new_end,
    a_snapshot_that_an_index_lists_stays,
);

fn policies(policies: Value) -> RetentionPolicies {
    let policies: RetentionPolicies = serde_json::from_value(json!({"policies": policies})).unwrap();
    policies.check().unwrap();
    policies
}

async fn set(metadata: &dyn Metadata, document: Value) {
    metadata.set_retention(policies(document), None).await.unwrap();
}

fn entry(operation: &str) -> AuditEntry {
    let record = AuditRecord { operation: operation.into(), ..AuditRecord::default() };
    AuditEntry { record, status_if_there: None, of_registry: false, overrides: false }
}

async fn run(store: &Store, dry_run: bool) -> pfr_store::Result<RetentionReport> {
    let mut report = RetentionReport::default();
    store.audited(entry("retention")).retain(dry_run, &Budget::default(), &mut report).await?;
    Ok(report)
}

fn other() -> RepositoryName {
    "other/place".parse().unwrap()
}

/// Pushes to another repository than [`push`] does.
async fn push_to(store: &Store, repository: &RepositoryName, snapshot: &Snapshot, name: &str) {
    let session = store.open_push(repository).await.unwrap();
    store.ingest(&session.id, pieces(&snapshot.stream(), 777)).await.unwrap();
    store.commit(&session.id, snapshot.manifest.digest, Some(tag(name)), None).await.unwrap();
}

/// So many snapshots in the usual repository, a minute apart, each the child of the one before.
async fn chain(rig: &Rig, many: u64) -> Vec<Digest> {
    let mut made = Vec::new();
    for n in 0..many {
        let s = snapshot(&[n], made.last().copied().into_iter().collect());
        push(&rig.store, &s, &format!("t{n}")).await.unwrap();
        made.push(s.manifest.digest);
        rig.seconds(60);
    }
    made
}

async fn left(store: &Store, repository: &RepositoryName) -> Vec<Digest> {
    match store.snapshots(repository, None, 100).await {
        Ok(page) => page.rows.into_iter().map(|row| row.digest).collect(),
        Err(error) if error.code() == ErrorCode::RepositoryUnknown => Vec::new(),
        Err(error) => panic!("{error}"),
    }
}

/// What the audit log says: operation, policy, snapshot.
async fn recorded(metadata: &dyn Metadata) -> Vec<(String, Option<String>, Option<Digest>)> {
    let all = AuditFilter { oldest_first: true, ..AuditFilter::default() };
    let records = metadata.audit_records(all, None, 1000).await.unwrap().rows;
    records.into_iter().map(|record| (record.operation, record.subject, record.digest)).collect()
}

async fn a_run_deletes_what_the_dry_run_says_and_leaves_tables_and_quota_right(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let quota = QuotaLimits { snapshots: Some(100), ..QuotaLimits::default() };
    rig.metadata.set_quota(quota, None).await.unwrap();
    let made = chain(&rig, 8).await;
    rig.store.delete_tag(&repository(), &tag("t2"), None).await.unwrap();
    rig.store.put_tag(&repository(), tag("kept"), made[3], None).await.unwrap();
    rig.store.pin(&repository(), &made[4], Pin::ByHand, true).await.unwrap();
    push_to(&rig.store, &other(), &snapshot(&[100], vec![]), "old").await;
    // Nothing is deleted without a policy, and by one for another repository.
    assert_eq!(run(&rig.store, false).await.unwrap(), RetentionReport { complete: true, ..RetentionReport::default() });
    set(&*rig.metadata, json!([{"name": "none", "repositories": "none/*", "keep_last": 1}])).await;
    assert_eq!(run(&rig.store, false).await.unwrap().snapshots, 0);

    set(
        &*rig.metadata,
        json!([
            {"name": "last", "repositories": "team/*", "keep_last": 3, "tags": ["t*"]},
            {"name": "age", "repositories": "*", "untagged": true, "max_age_seconds": 60},
            {"name": "keep", "repositories": "team/*", "keep_tags": ["kept"]},
        ]),
    )
    .await;
    let dry = run(&rig.store, true).await.unwrap();
    assert_eq!(left(&rig.store, &repository()).await.len(), 8, "a dry run deletes nothing");
    // The newest three of t0, t1, t4 to t7 stay, t3 has a tag that keeps it, and t4 is pinned.
    let said: Vec<(Digest, &str)> = dry.deleted.iter().map(|d| (d.digest, d.policy.as_deref().unwrap())).collect();
    assert_eq!(said, [(made[1], "last"), (made[0], "last"), (made[2], "age")]);
    assert_eq!((dry.dry_run, dry.snapshots, dry.kept, dry.complete), (true, 3, 6, true));
    assert!(dry.freed.is_some_and(|freed| freed.snapshots == 3 && freed.bytes > 0 && freed.stored_bytes > 0), "{:?}", dry.freed);
    let done = run(&rig.store, false).await.unwrap();
    assert_eq!(done, RetentionReport { dry_run: false, freed: None, ..dry });
    assert_eq!(left(&rig.store, &repository()).await, [made[7], made[6], made[5], made[4], made[3]]);
    assert_eq!(left(&rig.store, &other()).await.len(), 1, "it has a tag");
    let expected = [(made[1], "last"), (made[0], "last"), (made[2], "age")];
    let expected = expected.map(|(digest, policy)| ("retention".to_owned(), Some(policy.to_owned()), Some(digest)));
    assert_eq!(recorded(&*rig.metadata).await, expected);
    assert_eq!(run(&rig.store, false).await.unwrap().snapshots, 0, "a second run has nothing to do");

    assert_eq!(rig.metadata.quota().await.unwrap().unwrap().used_snapshots, 6);
    rig.collect().await;
    let audit = rig.metadata.audit(false).await.unwrap();
    assert_eq!(audit.wrong, 0, "{:#?}", audit.discrepancies);
    for digest in left(&rig.store, &repository()).await {
        rig.store.verify(&digest, &mut |_| ()).await.unwrap();
    }
}

async fn what_changed_since_it_was_chosen_stays(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let made = chain(&rig, 2).await;
    let metadata = &*rig.metadata;
    let all = json!([{"name": "all", "repositories": "*", "max_age_seconds": 1}]);
    set(metadata, all.clone()).await;
    let version = metadata.retention().await.unwrap().version;
    let chosen = async |digest: &Digest| {
        let SnapshotSummary { digest, tags, pushed_at, .. } = rig.store.snapshot(&repository(), digest).await.unwrap().into();
        Expiring { repository: repository(), digest, etag: snapshot_etag(&digest, &tags), pushed_at, version }
    };
    let expire = async |expiring: &Expiring| metadata.expire_snapshot(expiring.clone(), Some(entry("expire"))).await.unwrap();
    let first = chosen(&made[0]).await;
    rig.store.put_tag(&repository(), tag("more"), made[0], None).await.unwrap();
    assert_eq!(expire(&first).await, Expiry::Kept, "it has got a tag");
    let first = chosen(&made[0]).await;
    rig.store.pin(&repository(), &made[0], Pin::UntilPushed, true).await.unwrap();
    assert_eq!(expire(&first).await, Expiry::Kept, "it was pinned");
    rig.store.pin(&repository(), &made[0], Pin::UntilPushed, false).await.unwrap();
    set(metadata, all).await;
    assert_eq!(expire(&first).await, Expiry::Kept, "the policies were set again");
    assert_eq!(metadata.retention().await.unwrap().version, version + 1);
    assert_eq!(recorded(metadata).await, []);
    let chosen_before = Expiring { version: version + 1, ..chosen(&made[0]).await };
    rig.store.delete_snapshot(&repository(), &made[0]).await.unwrap();
    push(&rig.store, &snapshot(&[0], vec![]), "t0").await.unwrap();
    rig.store.put_tag(&repository(), tag("more"), made[0], None).await.unwrap();
    let now = Expiring { version: version + 1, ..chosen(&made[0]).await };
    assert_eq!((now.etag, now.digest), (chosen_before.etag, chosen_before.digest), "it has the same tags as before");
    assert_eq!(expire(&chosen_before).await, Expiry::Kept, "it was deleted, and pushed again");
    assert_eq!(recorded(metadata).await, []);
    assert_eq!([expire(&now).await, expire(&now).await], [Expiry::Deleted, Expiry::Gone]);
    let elsewhere = Expiring { repository: other(), ..now.clone() };
    assert_eq!(expire(&elsewhere).await, Expiry::Gone);
    assert_eq!(recorded(metadata).await, [("expire".to_owned(), None, Some(made[0]))]);
    // A budget that is used up ends a run between two deletions.
    let (budget, mut report) = (Budget::default(), RetentionReport::default());
    budget.end();
    rig.store.retain(false, &budget, &mut report).await.unwrap();
    assert_eq!((report.snapshots, report.complete), (0, false));
}

async fn a_dry_run_that_is_cut_while_it_counts_says_so(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let made = chain(&rig, 3).await;
    set(&*rig.metadata, json!([{"name": "all", "repositories": "*", "max_age_seconds": 1}])).await;
    // Before the snapshots are looked for, before what they hold, and in the midst of that.
    for transaction in ["listed_snapshots", "deletion", "held"] {
        let (watched, budget) = (Watched::new(Arc::clone(&rig.metadata)), Budget::default());
        let store = Store::new(Arc::clone(&rig.packs), Arc::clone(&watched) as Arc<dyn Metadata>, rig.options());
        watched.end_at(transaction, &budget);
        let mut report = RetentionReport::default();
        store.retain(true, &budget, &mut report).await.unwrap();
        let chosen = if transaction == "listed_snapshots" { 0 } else { 3 };
        assert_eq!((report.complete, report.freed, report.snapshots), (false, None, chosen), "{transaction}");
    }
    let whole = run(&rig.store, true).await.unwrap();
    assert!(whole.complete && whole.freed.is_some_and(|freed| freed.snapshots == 3), "{whole:?}");
    assert_eq!(left(&rig.store, &repository()).await.len(), made.len());
}

async fn a_run_that_is_cut_is_continued_and_the_journal_has_what_it_deleted(backend: Backend) {
    let rig = Rig::new(backend).await;
    let (one, two, young) = (snapshot(&[1], vec![]), snapshot(&[2], vec![]), snapshot(&[3], vec![]));
    push_to(&rig.store, &other(), &one, "a").await;
    push(&rig.store, &two, "b").await.unwrap();
    rig.seconds(100);
    push(&rig.store, &young, "c").await.unwrap();
    set(&*rig.metadata, json!([{"name": "age", "repositories": "*", "max_age_seconds": 60}])).await;
    let watched = Watched::new(Arc::clone(&rig.metadata));
    let store = Store::new(Arc::clone(&rig.packs), Arc::clone(&watched) as Arc<dyn Metadata>, rig.options());
    watched.fail("expire_snapshot", 1);
    assert_eq!(run(&store, false).await.unwrap_err().code(), ErrorCode::Unavailable);
    assert_eq!((left(&store, &other()).await.len(), left(&store, &repository()).await.len()), (1, 2));
    // As after a kill between the deletions of the first repository and the journal.
    watched.fail("unjournaled", 1);
    assert_eq!(run(&store, false).await.unwrap_err().code(), ErrorCode::Unavailable);
    assert_eq!((left(&store, &other()).await.len(), left(&store, &repository()).await.len()), (0, 2));
    let rest = run(&store, false).await.unwrap();
    assert_eq!(rest.deleted.iter().map(|d| d.digest).collect::<Vec<_>>(), [two.manifest.digest]);
    let new = rig.over_memory(rig.fork().await).await;
    new.store.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!((left(&new.store, &other()).await, left(&new.store, &repository()).await), (vec![], vec![young.manifest.digest]));
    // Policies are in the database only: a rebuilt one deletes nothing by itself.
    assert_eq!(new.metadata.retention().await.unwrap().policies, RetentionPolicies::default());
}

async fn runs_of_two_processes_at_once_delete_each_snapshot_once(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let made = chain(&rig, 20).await;
    set(&*rig.metadata, json!([{"name": "branch", "repositories": "*", "below": made[4], "max_age_seconds": 1}])).await;
    let another = rig.another().await;
    let (first, second) = tokio::join!(run(&rig.store, false), run(&another, false));
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(first.snapshots + second.snapshots, 15, "{first:?} {second:?}");
    let mut recorded: Vec<Digest> = recorded(&*rig.metadata).await.into_iter().filter_map(|(.., digest)| digest).collect();
    assert_eq!(recorded, made[5..].iter().rev().copied().collect::<Vec<_>>(), "from the end of the branch");
    recorded.sort();
    recorded.dedup();
    assert_eq!(recorded.len(), 15);
    assert_eq!(left(&rig.store, &repository()).await.len(), 5);
    assert_eq!(rig.metadata.audit(false).await.unwrap().wrong, 0);
}

async fn an_immutable_tag_is_moved_and_deleted_by_administrators_only(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let (one, two) = (snapshot(&[1], vec![]), snapshot(&[2], vec![]));
    push(&rig.store, &one, "v1").await.unwrap();
    push(&rig.store, &two, "main").await.unwrap();
    set(
        &*rig.metadata,
        json!([
            {"name": "releases", "repositories": "team/*", "immutable_tags": ["v*"]},
            {"name": "age", "repositories": "*", "max_age_seconds": 1},
        ]),
    )
    .await;
    let (first, second) = (one.manifest.digest, two.manifest.digest);
    let changes = rig.metadata.unjournaled(100).await.unwrap();
    let put = |snapshot| NameChange::PutTags { snapshot, moves: vec![TagMove { tag: tag("v1"), expected: None }] };
    let forbidden = [
        put(second),
        NameChange::DeleteTag { tag: tag("v1"), expected: None },
        NameChange::DeleteSnapshot { snapshot: first, etag: None },
        NameChange::DeleteSnapshot { snapshot: first, etag: Some(snapshot_etag(&first, &[tag("v1")])) },
    ];
    for change in &forbidden {
        for store in [&rig.store, &rig.store.audited(entry("user"))] {
            let refused = store.change_names(&repository(), change.clone(), None).await.unwrap_err();
            assert_eq!(refused.code(), ErrorCode::TagImmutable, "{change:?}: {refused}");
            assert!(refused.to_string().contains("v1"), "{refused}");
        }
    }
    let again = push(&rig.store, &two, "v1").await.unwrap_err();
    assert_eq!(again.code(), ErrorCode::TagImmutable, "a push moves it no more than another change");
    assert_eq!(rig.store.tag(&repository(), &tag("v1")).await.unwrap().digest, first);
    assert_eq!((rig.metadata.unjournaled(100).await.unwrap(), recorded(&*rig.metadata).await), (changes, vec![]));
    // It stays, and so does its snapshot; a new one is made; other repositories have none.
    rig.store.change_names(&repository(), put(first), None).await.unwrap();
    push(&rig.store, &two, "v2").await.unwrap();
    push_to(&rig.store, &other(), &one, "v1").await;
    push_to(&rig.store, &other(), &two, "v1").await;
    rig.seconds(100);
    let gone = run(&rig.store, false).await.unwrap();
    assert_eq!((gone.snapshots, left(&rig.store, &repository()).await), (2, vec![second, first]), "{gone:?}");
    // An administrator may.
    let admin = rig.store.audited(AuditEntry { overrides: true, ..entry("admin") });
    admin.change_names(&repository(), put(second), None).await.unwrap();
    push(&admin, &one, "v2").await.unwrap();
    for change in [forbidden[1].clone(), NameChange::DeleteSnapshot { snapshot: first, etag: None }] {
        admin.change_names(&repository(), change, None).await.unwrap();
    }
    assert_eq!(left(&rig.store, &repository()).await, [second]);
}

async fn a_lineage_loses_its_oldest_first_so_that_a_cut_makes_no_new_end(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let made = chain(&rig, 12).await;
    set(&*rig.metadata, json!([{"name": "turns", "repositories": "*", "keep_last": 3, "keep_last_of": "lineage"}])).await;
    let dry = run(&rig.store, true).await.unwrap();
    let said: Vec<Digest> = dry.deleted.iter().map(|deleted| deleted.digest).collect();
    assert_eq!(said, made[..9]);
    // As a run that is killed after five.
    let version = rig.metadata.retention().await.unwrap().version;
    for digest in &said[..5] {
        let SnapshotSummary { digest, tags, pushed_at, .. } = rig.store.snapshot(&repository(), digest).await.unwrap().into();
        let expiring = Expiring { repository: repository(), digest, etag: snapshot_etag(&digest, &tags), pushed_at, version };
        assert_eq!(rig.metadata.expire_snapshot(expiring, None).await.unwrap(), Expiry::Deleted);
    }
    let rest = run(&rig.store, false).await.unwrap();
    assert_eq!((rest.snapshots, rest.complete), (4, true));
    assert_eq!(left(&rig.store, &repository()).await, [made[11], made[10], made[9]]);
}

async fn a_snapshot_that_an_index_lists_stays(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let (listed, other_one) = (snapshot(&[1], vec![]), snapshot(&[2], vec![]));
    for (pushed, name) in [(&listed, "a"), (&other_one, "b")] {
        push(&rig.store, pushed, name).await.unwrap();
        push_to(&rig.store, &other(), pushed, name).await;
    }
    let bytes = &listed.manifest.bytes;
    let row = json!({"mediaType": media_type::OCI_MANIFEST, "digest": listed.manifest.digest, "size": bytes.len()});
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [row]})).unwrap();
    let index = rig.store.put_image(&repository(), index, None, vec![tag("all")]).await.unwrap();
    set(&*rig.metadata, json!([{"name": "age", "repositories": "*", "max_age_seconds": 1}])).await;
    rig.seconds(100);
    // Also where it was chosen before the index came.
    let version = rig.metadata.retention().await.unwrap().version;
    let SnapshotSummary { digest, tags, pushed_at, .. } = rig.store.snapshot(&repository(), &listed.manifest.digest).await.unwrap().into();
    let chosen = Expiring { repository: repository(), digest, etag: snapshot_etag(&digest, &tags), pushed_at, version };
    assert_eq!(rig.metadata.expire_snapshot(chosen, None).await.unwrap(), Expiry::Kept);
    let dry = run(&rig.store, true).await.unwrap();
    let done = run(&rig.store, false).await.unwrap();
    assert_eq!(done, RetentionReport { dry_run: false, freed: None, ..dry });
    assert_eq!((done.snapshots, done.kept, done.complete), (3, 1, true), "the index is of one repository");
    assert_eq!(left(&rig.store, &repository()).await, [digest]);
    assert_eq!(left(&rig.store, &other()).await, []);
    rig.store.delete_snapshot(&repository(), &index).await.unwrap();
    assert_eq!(run(&rig.store, false).await.unwrap().snapshots, 1);
    assert_eq!(rig.metadata.audit(false).await.unwrap().wrong, 0);
}
