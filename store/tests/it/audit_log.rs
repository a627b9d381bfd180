//! The audit log: a record is there exactly if its change is, for each kind of change.

use crate::common::rig::{Backend, Rig};
use crate::common::{pieces, push, repository, snapshot, tag};
use pfr_schema::api::AuditOutcome;
use pfr_schema::{DomainName, ErrorCode};
use pfr_store::{
    AuditEntry, AuditFilter, AuditRecord, Metadata, NameChange, NewAccessToken, Once, Options, PushId, QuotaLimits, Store, TagMove,
};
use std::time::Duration;

fn entry(operation: &str) -> AuditEntry {
    let record = AuditRecord {
        operation: operation.into(),
        action: "push".into(),
        status: Some(201),
        token: Some("0123456789abcdef".into()),
        label: Some("a label".into()),
        from: Some("192.0.2.7".into()),
        request_id: Some("trace-1".into()),
        ..AuditRecord::default()
    };
    AuditEntry { record, status_if_there: Some(200), of_registry: false, overrides: false }
}

/// All records, oldest first.
async fn records(metadata: &dyn Metadata) -> Vec<AuditRecord> {
    let all = AuditFilter { with_registry: true, oldest_first: true, ..AuditFilter::default() };
    metadata.audit_records(all, None, 1000).await.unwrap().rows
}

/// Operation, status and what it was about.
async fn said(metadata: &dyn Metadata) -> Vec<(String, Option<u16>, String)> {
    let about = |record: &AuditRecord| {
        let digest = record.digest.map(|digest| digest.short());
        let tag = record.tag.as_ref().map(|tag| format!("{tag} of {}", record.tags.unwrap_or(1)));
        [digest, tag, record.subject.clone()].into_iter().flatten().collect::<Vec<_>>().join(" ")
    };
    records(metadata).await.iter().map(|record| (record.operation.clone(), record.status, about(record))).collect()
}

async fn every_change_of_names_has_its_record_and_a_refused_or_repeated_one_has_none(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1, 2], vec![]);
    let audited = |operation: &str| rig.store.audited(entry(operation));
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.store.ingest(&session.id, pieces(&s.stream(), 777)).await.unwrap();
    for _ in 0..2 {
        // The second is answered as the first was.
        let commit = audited("commit");
        commit.commit_in(&repository(), &session.id, s.manifest.digest, Some(tag("t")), None).await.unwrap();
    }
    let again = rig.store.open_push(&repository()).await.unwrap();
    rig.store.missing(&again.id, vec![(s.manifest.digest, pfr_schema::Kind::Manifest)]).await.unwrap();
    audited("commit").commit_in(&repository(), &again.id, s.manifest.digest, None, None).await.unwrap();

    let (fork, _) = NameChange::fork(s.manifest.digest, "f", 3).unwrap();
    audited("fork").change_names(&repository(), fork.clone(), None).await.unwrap();
    let refused = audited("fork").change_names(&repository(), fork, None).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::TagMoved);
    let once = Once { session: PushId("0190aaaa-0000-7000-8000-000000000001".into()), request: s.manifest.digest };
    let put = NameChange::PutTags { snapshot: s.manifest.digest, moves: vec![TagMove { tag: tag("u"), expected: None }] };
    for _ in 0..2 {
        audited("put_tag").change_names(&repository(), put.clone(), Some(once.clone())).await.unwrap();
    }
    let untag = NameChange::DeleteTag { tag: tag("u"), expected: None };
    audited("delete_tag").change_names(&repository(), untag.clone(), None).await.unwrap();
    assert!(audited("delete_tag").change_names(&repository(), untag, None).await.is_err());
    // A change that no request asks for has no record.
    push(&rig.store, &snapshot(&[9], vec![]), "quiet").await.unwrap();
    let delete = NameChange::DeleteSnapshot { snapshot: s.manifest.digest, etag: None };
    audited("delete_snapshot").change_names(&repository(), delete, None).await.unwrap();

    let short = s.manifest.digest.short();
    let expected = [
        ("commit", 201, format!("{short} t of 1")),
        ("commit", 200, short.clone()),
        ("fork", 201, format!("{short} f-1 of 3")),
        ("put_tag", 201, format!("{short} u of 1")),
        ("delete_tag", 201, "u of 1".to_owned()),
        ("delete_snapshot", 201, short),
    ];
    let expected = expected.map(|(operation, status, about)| (operation.to_owned(), Some(status), about));
    assert_eq!(said(&*rig.metadata).await, expected);
    let first = &records(&*rig.metadata).await[0];
    assert_eq!(
        (first.repository.as_ref(), first.token.as_deref(), first.from.as_deref(), first.outcome),
        (Some(&repository()), Some("0123456789abcdef"), Some("192.0.2.7"), AuditOutcome::Done)
    );
    assert_eq!(first.at, rig.now.load(std::sync::atomic::Ordering::SeqCst));
}

async fn changes_of_the_catalogue_have_their_record_in_the_log_of_the_default_domain(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let domains = rig.domains(2).await;
    let acme: DomainName = "acme".parse().unwrap();
    let of_registry = |operation: &str| AuditEntry { of_registry: true, ..entry(operation) };
    for _ in 0..2 {
        domains.audited(of_registry("create_domain")).create(&acme).await.unwrap();
    }
    let new = NewAccessToken { label: "x".into(), domain: Some(acme.clone()), scopes: vec!["*:pull".parse().unwrap()], expires_at: None };
    let tokens = domains.audited(of_registry("create_token")).access_tokens();
    let (token, _) = tokens.create(new.clone()).await.unwrap();
    let other = NewAccessToken { label: "y".into(), domain: None, expires_at: Some(1 << 47), ..new.clone() };
    // Of another domain, and of this one: these are not revoked by hand.
    let (others, left) = (tokens.create(other).await.unwrap().0.id(), tokens.create(new.clone()).await.unwrap().0.id());
    let nowhere = NewAccessToken { domain: Some("nowhere".parse().unwrap()), ..new };
    assert!(tokens.create(nowhere).await.is_err());
    let id = token.id();
    domains.audited(of_registry("revoke_token")).access_tokens().revoke(&id).await.unwrap();
    let quota = QuotaLimits { snapshots: Some(5), ..QuotaLimits::default() };
    let store = domains.open(&acme).await.unwrap();
    store.metadata().set_quota(quota, Some(entry("set_quota"))).await.unwrap();
    assert_eq!(said(store.metadata()).await, [("set_quota".to_owned(), Some(201), String::new())]);
    assert_eq!(records(store.metadata()).await[0].new_quota, Some(quota));
    store.metadata().set_quota(QuotaLimits::default(), Some(entry("set_quota"))).await.unwrap();
    assert_eq!(records(store.metadata()).await[1].new_quota, Some(QuotaLimits::default()), "no limits are said too");
    for _ in 0..2 {
        domains.audited(of_registry("delete_domain")).delete(&acme, false).await.unwrap();
    }
    assert!(domains.audited(of_registry("delete_domain")).delete(&"nowhere".parse().unwrap(), false).await.is_err());

    let default = domains.default_store().metadata();
    let expected = [
        ("create_domain", 201, "acme"),
        ("create_domain", 200, "acme"),
        ("create_token", 201, id.as_str()),
        ("create_token", 201, others.as_str()),
        ("create_token", 201, left.as_str()),
        ("revoke_token", 201, id.as_str()),
        ("revoke_token", 201, left.as_str()),
        ("delete_domain", 201, "acme"),
        ("delete_domain", 201, "acme"),
    ];
    assert_eq!(said(default).await, expected.map(|(operation, status, about)| (operation.to_owned(), Some(status), about.to_owned())));
    let made: Vec<_> = records(default).await.into_iter().filter_map(|record| record.new_token).collect();
    let values: Vec<_> = made.iter().map(|token| (token.label.as_str(), token.domain.as_ref(), token.expires_at)).collect();
    assert_eq!(values, [("x", Some(&acme), None), ("y", None, Some(1 << 47)), ("x", Some(&acme), None)]);
    assert!(made.iter().all(|token| token.scopes.len() == 1 && token.scopes[0].to_string() == "*:pull"), "{made:?}");
    let log = format!("{:?}", records(default).await);
    assert!(!log.contains(&token.expose()[21..85]), "the secret of a token is in its record");
    // Not for an operator of the default domain alone.
    assert_eq!(default.audit_records(AuditFilter::default(), None, 10).await.unwrap().rows, []);
}

async fn records_are_kept_for_a_time_and_up_to_a_number(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let metadata = &*rig.metadata;
    for n in 0..20 {
        metadata.add_audit_record(entry(&format!("{n}"))).await.unwrap();
        rig.seconds(60);
    }
    let left = async || records(metadata).await.into_iter().map(|record| record.operation).collect::<Vec<_>>();
    let minutes = |n: u64| Duration::from_secs(n * 60);
    assert_eq!(metadata.trim_audit_log(minutes(100), 20, 100).await.unwrap(), 0);
    assert_eq!(metadata.trim_audit_log(minutes(15), 1 << 40, 3).await.unwrap(), 3, "in steps");
    assert_eq!(metadata.trim_audit_log(minutes(15), 1 << 40, 100).await.unwrap(), 2);
    assert_eq!(left().await[0], "5");
    assert_eq!(metadata.trim_audit_log(minutes(100), 4, 100).await.unwrap(), 11);
    assert_eq!(left().await, ["16", "17", "18", "19"]);
    assert_eq!(metadata.trim_audit_log(Duration::ZERO, 4, 100).await.unwrap(), 4);
    metadata.add_audit_record(entry("next")).await.unwrap();
    assert_eq!(metadata.last_audit_record().await.unwrap(), 21, "no number is used twice");
}

/// A reader that asks for the oldest first misses no record, although others are written meanwhile.
async fn a_reader_that_follows_sees_each_record_once(backend: Backend) {
    const WRITERS: usize = 4;
    const EACH: usize = 50;
    let rig = Rig::still(backend, Options::default()).await;
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let metadata = std::sync::Arc::clone(&rig.metadata);
            tokio::spawn(async move {
                for n in 0..EACH {
                    metadata.add_audit_record(entry(&format!("{writer} {n}"))).await.unwrap();
                }
            })
        })
        .collect();
    let (mut seen, mut after) = (Vec::new(), None);
    while seen.len() < WRITERS * EACH {
        let filter = AuditFilter { oldest_first: true, ..AuditFilter::default() };
        let page = rig.metadata.audit_records(filter, after.clone(), 7).await.unwrap();
        if let Some(last) = page.rows.last() {
            after = Some(last.number.to_string());
        }
        seen.extend(page.rows.into_iter().map(|record| record.operation));
        assert!(seen.len() <= WRITERS * EACH);
        if writers.iter().all(tokio::task::JoinHandle::is_finished) && seen.len() < WRITERS * EACH {
            let left = rig.metadata.audit_records(AuditFilter { oldest_first: true, ..AuditFilter::default() }, after.clone(), 1).await;
            assert!(!left.unwrap().rows.is_empty(), "{} of {} were seen", seen.len(), WRITERS * EACH);
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), WRITERS * EACH);
}

/// If a record cannot be written, because the disk is full or the table is not there, its change is
/// not made.
async fn a_change_that_cannot_be_recorded_is_not_made(backend: Backend) {
    let rig = Rig::new(backend).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "t").await.unwrap();
    let store = rig.store.audited(entry("put_tag"));
    let session = rig.store.open_push(&repository()).await.unwrap();
    let next = snapshot(&[2], vec![]);
    rig.store.ingest(&session.id, pieces(&next.stream(), 777)).await.unwrap();
    rig.sql("ALTER TABLE audit_log RENAME TO elsewhere");
    assert!(store.put_tag(&repository(), tag("u"), s.manifest.digest, None).await.is_err());
    assert!(store.delete_snapshot(&repository(), &s.manifest.digest).await.is_err());
    assert!(store.commit_in(&repository(), &session.id, next.manifest.digest, Some(tag("t")), None).await.is_err());
    let names = rig.store.tags(&repository(), None, 10).await.unwrap().rows;
    assert_eq!(names.iter().map(|row| (row.name.as_str(), row.digest)).collect::<Vec<_>>(), [("t", s.manifest.digest)]);
    rig.sql("ALTER TABLE elsewhere RENAME TO audit_log");
    store.commit_in(&repository(), &session.id, next.manifest.digest, Some(tag("t")), None).await.unwrap();
    assert_eq!(records(&*rig.metadata).await.len(), 1);
}

async fn a_list_has_the_records_of_its_filter_in_its_order(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let (tokens, repositories) = ([None, Some("one"), Some("two")], [None, Some("a"), Some("b")]);
    for n in 0..27_usize {
        let mut entry = entry(&n.to_string());
        entry.record.token = tokens[n % 3].map(str::to_owned);
        entry.record.repository = repositories[n / 3 % 3].map(|name| name.parse().unwrap());
        rig.metadata.add_audit_record(entry).await.unwrap();
    }
    let all = records(&*rig.metadata).await;
    for (token, repository) in tokens.iter().flat_map(|token| repositories.iter().map(move |repository| (*token, *repository))) {
        for oldest_first in [true, false] {
            let filter = AuditFilter {
                token: token.map(str::to_owned),
                repository: repository.map(|name| name.parse().unwrap()),
                oldest_first,
                ..AuditFilter::default()
            };
            let is_meant = |record: &&AuditRecord| {
                (token.is_none() || record.token == filter.token) && (repository.is_none() || record.repository == filter.repository)
            };
            let mut expected: Vec<AuditRecord> = all.iter().filter(is_meant).cloned().collect();
            if !oldest_first {
                expected.reverse();
            }
            let (mut found, mut after) = (Vec::new(), None);
            loop {
                let page = rig.metadata.audit_records(filter.clone(), after, 2).await.unwrap();
                found.extend(page.rows);
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
            assert_eq!(found, expected, "{token:?} in {repository:?}, oldest first: {oldest_first}");
        }
    }
}

/// The journal has no records: a rebuilt database begins a new log.
async fn a_rebuilt_database_begins_a_new_log(backend: Backend) {
    let rig = Rig::new(backend).await;
    let store: Store = rig.store.audited(entry("commit"));
    push(&store, &snapshot(&[1], vec![]), "t").await.unwrap();
    assert_eq!(records(&*rig.metadata).await.len(), 1);
    let lost = rig.beside().await;
    lost.store.audited(entry("rebuild")).rebuild(&mut |_| ()).await.unwrap();
    assert_eq!(lost.store.tags(&repository(), None, 10).await.unwrap().rows.len(), 1);
    assert_eq!(records(&*lost.metadata).await, []);
}

on_every_backend!(
    every_change_of_names_has_its_record_and_a_refused_or_repeated_one_has_none,
    changes_of_the_catalogue_have_their_record_in_the_log_of_the_default_domain,
    records_are_kept_for_a_time_and_up_to_a_number,
    a_reader_that_follows_sees_each_record_once,
    a_change_that_cannot_be_recorded_is_not_made,
    a_list_has_the_records_of_its_filter_in_its_order,
    a_rebuilt_database_begins_a_new_log,
);
