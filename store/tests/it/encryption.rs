//! Encrypted domains: no plaintext on storage, nothing but what was written there is read, and
//! nothing is read without the key.

mod keys;

use crate::common::leaks;
use crate::common::rig::{Backend, Rig};
use crate::common::{Snapshot, blob_frame, page, pieces, push, repository, snapshot, snapshot_of, stream, tag};
use futures::future::join_all;
use object_store::path::Path;
use pfr_schema::{Digest, DomainName, ErrorCode};
use pfr_store::{Budget, DomainHome, DomainPacks, DomainTables, Domains, Error, KeyOptions, Keys, Options, ScrubOptions, Store};
use pfr_testkit::snapshot::Shape;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use tempfile::TempDir;

fn name(text: &str) -> DomainName {
    text.parse().unwrap()
}

/// 32 bytes as base64: 43 characters of one digit.
fn key_text(digit: char) -> String {
    format!("{}A=\n", digit.to_string().repeat(42))
}

/// A key file with these permissions.
fn key_file(dir: &TempDir, file: &str, text: &str, mode: u32) -> PathBuf {
    let path = dir.path().join(file);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

/// Options with the key file `file`.
fn options(dir: &TempDir, file: &str, digit: char) -> KeyOptions {
    KeyOptions { key_file: Some(key_file(dir, file, &key_text(digit), 0o600)), ..KeyOptions::default() }
}

fn keys(dir: &TempDir, digit: char) -> Keys {
    Keys::new(options(dir, &format!("{digit}.key"), digit)).unwrap()
}

/// The domains of a process whose data directory is `dir`.
async fn open(dir: &std::path::Path, options: KeyOptions) -> Result<Domains, Error> {
    let keys = Keys::new(options)?;
    let store = keys.open_default(Store::open(dir, Options::default()).await?).await?;
    let packs = DomainPacks::Files { root: dir.to_owned(), inside: "packs" };
    Ok(Domains::with_keys(store, Some(DomainHome { tables: DomainTables::Files(dir.to_owned()), packs }), keys))
}

fn holds(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

async fn bytes_below(rig: &Rig, domain: &str) -> Vec<(Path, Vec<u8>)> {
    let mut found = Vec::new();
    for path in rig.list(Some(&format!("domains/{domain}"))).await {
        let bytes = rig.bytes(&path).await;
        found.push((path, bytes));
    }
    found
}

async fn an_encrypted_domain_works_as_another_and_leaves_no_plaintext(backend: Backend) {
    let (rig, dir) = (Rig::new(backend).await, tempfile::tempdir().unwrap());
    let domains = rig.domains_with(4, keys(&dir, 'a')).await;
    let s = snapshot(&[1, 2, 3], vec![]);
    for (domain, encrypted) in [("sealed", true), ("plain", false)] {
        let (info, is_new) = domains.create_as(&name(domain), Some(encrypted)).await.unwrap();
        assert!(is_new && info.encrypted == encrypted);
        let refused = domains.create_as(&name(domain), Some(!encrypted)).await.unwrap_err();
        assert!(matches!(refused, Error::Invalid(_)), "{refused}");
        let store = domains.open(&name(domain)).await.unwrap();
        assert_eq!(store.is_encrypted(), encrypted);
        push(&store, &s, "a-tag").await.unwrap();
        // Pages are stored once within it, also over another session.
        let session = store.open_push(&repository()).await.unwrap();
        let again = store.ingest(&session.id, pieces(&s.stream(), 500)).await.unwrap();
        assert_eq!(again.new, 0, "{domain}");
        store.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
        assert!(store.ranges(&[s.manifest.digest], pfr_schema::codec::Codecs::ALL).await.unwrap().is_none() == encrypted);
        assert_eq!(store.metadata().audit(false).await.unwrap().wrong, 0);
        // A test that could not find it would prove nothing.
        let found = bytes_below(&rig, domain).await;
        let shows = |part: &[u8]| found.iter().any(|(_, bytes)| holds(bytes, part));
        for part in s.pages.iter().map(|page| &page[..64]).chain([b"a-tag".as_slice(), b"PFpack", b"team/agent"]) {
            assert_eq!(shows(part), !encrypted, "{domain}: {}", String::from_utf8_lossy(part));
        }
        assert_eq!(found.iter().any(|(path, _)| path.as_ref().ends_with("/pf-key")), encrypted);
    }
    let listed = domains.list(None, 10).await.unwrap().rows;
    assert_eq!(
        listed.iter().map(|row| (row.name.as_str(), row.encrypted)).collect::<Vec<_>>(),
        [("default", false), ("plain", false), ("sealed", true)]
    );
}

async fn two_processes_that_make_a_domain_at_once_have_one_key(backend: Backend) {
    let (rig, dir) = (Rig::new(backend).await, tempfile::tempdir().unwrap());
    let mut processes = Vec::new();
    for _ in 0..3 {
        processes.push(rig.domains_with(2, keys(&dir, 'a')).await);
    }
    let (sealed, s) = (name("sealed"), snapshot(&[1, 2], vec![]));
    for made in join_all(processes.iter().map(|domains| domains.create_as(&sealed, Some(true)))).await {
        assert!(made.unwrap().0.encrypted);
    }
    push(&processes[0].open(&sealed).await.unwrap(), &s, "t").await.unwrap();
    for domains in &processes {
        domains.open(&sealed).await.unwrap().verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    }
    let kept = String::from_utf8(rig.bytes(&Path::from("domains/sealed/pf-key")).await).unwrap();
    let decides = processes[0].default_store().metadata().domain_key(sealed).await.unwrap().unwrap();
    assert_eq!(kept.trim_end(), decides);
}

async fn deleting_a_domain_destroys_its_key_before_its_bytes(backend: Backend) {
    let (rig, dir) = (Rig::still(backend, Options::default()).await, tempfile::tempdir().unwrap());
    let domains = rig.domains_with(4, keys(&dir, 'a')).await;
    let (sealed, s) = (name("sealed"), snapshot(&[1, 2], vec![]));
    domains.create_as(&sealed, Some(true)).await.unwrap();
    push(&domains.open(&sealed).await.unwrap(), &s, "t").await.unwrap();
    let copy = bytes_below(&rig, "sealed").await;
    let metadata = domains.default_store().metadata();
    assert!(metadata.domain_key(sealed.clone()).await.unwrap().is_some());
    domains.delete(&sealed, false).await.unwrap();
    assert_eq!(metadata.domain_key(sealed.clone()).await.unwrap(), None, "at once");
    domains.remove_deleted(&Budget::default()).await.unwrap();
    assert!(bytes_below(&rig, "sealed").await.is_empty());
    // A copy of the packs without the key, as of a bucket that keeps old versions, says nothing.
    let there = Rig::new(backend).await;
    for (path, bytes) in copy.into_iter().filter(|(path, _)| !path.as_ref().ends_with("/pf-key")) {
        there.put(&path, bytes).await;
    }
    let elsewhere = there.domains_with(2, keys(&dir, 'a')).await;
    let report = elsewhere.adopt(&sealed).await.unwrap().rebuild(&mut |_| ()).await.unwrap();
    assert!(report.objects == 0 && report.snapshots == 0 && !report.refused.is_empty(), "{report:?}");
    assert!(report.refused.iter().any(|reason| reason.contains("pf-key is not beside the packs")), "{report:?}");
}

async fn making_a_domain_where_another_lies_never_replaces_its_key(backend: Backend) {
    let (rig, dir) = (Rig::new(backend).await, tempfile::tempdir().unwrap());
    let domains = rig.domains_with(4, keys(&dir, 'a')).await;
    let s = snapshot(&[1, 2, 3], vec![]);
    for (domain, encrypted) in [("sealed", true), ("plain", false)] {
        domains.create_as(&name(domain), Some(encrypted)).await.unwrap();
        push(&domains.open(&name(domain)).await.unwrap(), &s, "t").await.unwrap();
    }
    // The catalogue is lost, and a request makes the domains before they are rebuilt.
    let there = Rig::new(backend).await;
    for domain in ["sealed", "plain"] {
        for (path, bytes) in bytes_below(&rig, domain).await {
            there.put(&path, bytes).await;
        }
    }
    let (sealed, before) = (name("sealed"), there.list(None).await);
    let key = there.bytes(&Path::from("domains/sealed/pf-key")).await;
    for (keys, encrypted) in [(keys(&dir, 'b'), Some(true)), (Keys::default(), None)] {
        let elsewhere = there.domains_with(2, keys).await;
        let refused = elsewhere.create_as(&sealed, encrypted).await.unwrap_err();
        assert!(matches!(refused, Error::Locked(_)), "{refused}");
        assert!(matches!(elsewhere.get(&sealed).await, Err(Error::DomainUnknown(_))));
    }
    let elsewhere = there.domains_with(2, keys(&dir, 'a')).await;
    for (domain, encrypted) in [("sealed", false), ("plain", true)] {
        let refused = elsewhere.create_as(&name(domain), Some(encrypted)).await.unwrap_err();
        assert!(matches!(refused, Error::Invalid(_)), "{refused}");
        assert!(matches!(elsewhere.get(&name(domain)).await, Err(Error::DomainUnknown(_))));
    }
    let refused = elsewhere.create_as(&sealed, Some(true)).await.unwrap_err();
    assert!(matches!(refused, Error::Unavailable { what: "metadata", .. }), "{refused}");
    assert_eq!(there.bytes(&Path::from("domains/sealed/pf-key")).await, key);
    assert_eq!(there.list(None).await, before);
    let report = elsewhere.adopt(&sealed).await.unwrap().rebuild(&mut |_| ()).await.unwrap();
    assert_eq!((report.snapshots, report.refused.len()), (1, 0), "{report:?}");
    elsewhere.open(&sealed).await.unwrap().verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn nothing_is_stored_while_the_key_beside_the_packs_is_another(backend: Backend) {
    let (rig, dir) = (Rig::new(backend).await, tempfile::tempdir().unwrap());
    let domains = rig.domains_with(2, keys(&dir, 'a')).await;
    for domain in ["sealed", "other"] {
        domains.create_as(&name(domain), Some(true)).await.unwrap();
    }
    let (sealed, at) = (name("sealed"), Path::from("domains/sealed/pf-key"));
    let right = rig.bytes(&at).await;
    for wrong in [rig.bytes(&Path::from("domains/other/pf-key")).await, b"no key".to_vec()] {
        rig.put(&at, wrong.clone()).await;
        let next = rig.domains_with(2, keys(&dir, 'a')).await;
        let refused = push(&next.open(&sealed).await.unwrap(), &snapshot(&[1], vec![]), "t").await.unwrap_err();
        assert!(matches!(refused, Error::Locked(_)), "{refused}");
        assert!(matches!(next.rewrap(&sealed).await, Err(Error::Locked(_))));
        assert_eq!(rig.bytes(&at).await, wrong, "the key of other packs is not replaced");
        assert!(!rig.list(Some("domains/sealed")).await.iter().any(|path| path.as_ref().ends_with(".pfpack")));
    }
    rig.put(&at, right).await;
    let next = rig.domains_with(2, keys(&dir, 'a')).await;
    push(&next.open(&sealed).await.unwrap(), &snapshot(&[1], vec![]), "t").await.unwrap();
}

async fn a_domain_is_rebuilt_elsewhere_with_the_key_and_not_without(backend: Backend) {
    let (rig, dir) = (Rig::new(backend).await, tempfile::tempdir().unwrap());
    let domains = rig.domains_with(4, keys(&dir, 'a')).await;
    let (sealed, s) = (name("sealed"), snapshot(&[1, 2, 3], vec![]));
    domains.create_as(&sealed, Some(true)).await.unwrap();
    push(&domains.open(&sealed).await.unwrap(), &s, "t").await.unwrap();
    for digit in ['b', 'a'] {
        let there = Rig::new(backend).await;
        for (path, bytes) in bytes_below(&rig, "sealed").await {
            there.put(&path, bytes).await;
        }
        let before = there.list(None).await;
        let elsewhere = there.domains_with(2, keys(&dir, digit)).await;
        assert_eq!(elsewhere.find().await.unwrap(), std::slice::from_ref(&sealed));
        assert!(elsewhere.get(&sealed).await.unwrap().encrypted);
        if digit == 'b' {
            let error = elsewhere.adopt(&sealed).await.unwrap_err();
            let says = [dir.path().join("b.key").display().to_string(), "old-key-file".to_owned(), "sealed".to_owned()];
            assert!(says.iter().all(|words| error.to_string().contains(words)), "{error}");
            assert_eq!(there.list(None).await, before, "nothing is written");
            continue;
        }
        let report = elsewhere.adopt(&sealed).await.unwrap().rebuild(&mut |_| ()).await.unwrap();
        assert_eq!((report.snapshots, report.tags, report.lost.len(), report.refused.len()), (1, 1, 0, 0), "{report:?}");
        let moved = elsewhere.open(&sealed).await.unwrap();
        moved.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
        assert_eq!(moved.tag(&repository(), &tag("t")).await.unwrap().digest, s.manifest.digest);
        // Encrypted packs do not come into a domain that is not.
        let plain = Rig::new(backend).await;
        let domains = plain.domains_with(2, keys(&dir, 'a')).await;
        domains.create_as(&sealed, Some(false)).await.unwrap();
        for (path, bytes) in bytes_below(&rig, "sealed").await {
            plain.put(&path, bytes).await;
        }
        let refused = domains.adopt(&sealed).await.unwrap().rebuild(&mut |_| ()).await.unwrap_err();
        assert!(matches!(refused, Error::Invalid(_)), "{refused}");
    }
}

on_backends!([sqlite_disk = SqliteDisk, postgres_s3 = PostgresS3]:
    an_encrypted_domain_works_as_another_and_leaves_no_plaintext,
    two_processes_that_make_a_domain_at_once_have_one_key,
    deleting_a_domain_destroys_its_key_before_its_bytes,
    a_domain_is_rebuilt_elsewhere_with_the_key_and_not_without,
    making_a_domain_where_another_lies_never_replaces_its_key,
    nothing_is_stored_while_the_key_beside_the_packs_is_another,
);

/// An encrypted domain in a directory, and two snapshots in a pack each, the second one of many
/// segments.
async fn two_packs() -> (TempDir, Store, [(Snapshot, PathBuf); 2]) {
    let dir = tempfile::tempdir().unwrap();
    let domains = open(&dir.path().join("data"), options(&dir, "a.key", 'a')).await.unwrap();
    let sealed = name("sealed");
    domains.create_as(&sealed, Some(true)).await.unwrap();
    let store = domains.open(&sealed).await.unwrap();
    let root = dir.path().join("data/domains/sealed/packs");
    let mut seen: Vec<String> = Vec::new();
    let mut made = Vec::new();
    // A few large pages: segments are what counts.
    for (shape, numbers) in [(Shape::TINY, (0..3).collect::<Vec<u64>>()), (Shape::SMALL, (100..124).collect())] {
        let s = snapshot_of(shape, &numbers, vec![]);
        push(&store, &s, "t").await.unwrap();
        let files: Vec<String> = leaks::files(&root).into_keys().filter(|file| file.ends_with(".pfpack")).collect();
        let new = files.iter().find(|file| !seen.contains(file)).unwrap();
        made.push((s, root.join(new)));
        seen = files;
    }
    (dir, store, made.try_into().ok().unwrap())
}

#[tokio::test]
async fn whatever_is_changed_in_a_pack_is_an_error_with_its_name_and_a_push_heals_it() {
    const SEGMENT: usize = 65_584;
    type Change = fn(&mut Vec<u8>, &[u8]);
    let cases: [(&str, Change); 11] = [
        ("magic", |bytes, _| bytes[0] ^= 4),
        ("key id", |bytes, _| bytes[5] ^= 4),
        ("salt", |bytes, _| bytes[20] ^= 4),
        ("ciphertext", |bytes, _| bytes[SEGMENT + 4000] ^= 4),
        ("tag", |bytes, _| bytes[2 * SEGMENT - 1] ^= 4),
        ("last tag", |bytes, _| *bytes.last_mut().unwrap() ^= 4),
        ("swapped segments", |bytes, _| bytes.copy_within(..SEGMENT, SEGMENT)),
        ("another pack", |bytes, other| *bytes = other.to_vec()),
        ("cut at a segment", |bytes, _| bytes.truncate(2 * SEGMENT)),
        ("cut within one", |bytes, _| bytes.truncate(2 * SEGMENT + 30_000)),
        ("empty", |bytes, _| bytes.clear()),
    ];
    for (what, change) in cases {
        let (_dir, store, [(small, first), (large, second)]) = two_packs().await;
        let (mut bytes, other) = (std::fs::read(&second).unwrap(), std::fs::read(&first).unwrap());
        assert!(bytes.len() > 4 * SEGMENT, "{}", bytes.len());
        change(&mut bytes, &other);
        std::fs::write(&second, bytes).unwrap();
        let key = second.file_stem().unwrap().to_str().unwrap().to_owned();
        let mut errors = 0;
        for page in &large.pages {
            match store.read(&Digest::sha256(page)).await {
                Ok(found) => assert_eq!(found[..], page[..], "{what}"),
                Err(error) => {
                    assert!(error.code() == ErrorCode::CorruptStore && error.to_string().contains(&key), "{what}: {error}");
                    errors += 1;
                }
            }
        }
        // The last segment has the index and documents, and no page perhaps.
        assert!(errors > 0 || what == "last tag", "{what}");
        let report = store.scrub(&ScrubOptions::default(), &mut |_| ()).await.unwrap();
        assert!(report.unread.is_empty() && report.damaged.len() + report.bad_packs.len() > 0, "{what}: {report:?}");
        push_again(&store, &large).await;
        for s in [&small, &large] {
            store.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
        }
    }
}

/// Sends everything of a snapshot; what is damaged is healed.
async fn push_again(store: &Store, s: &Snapshot) {
    let session = store.open_push(&repository()).await.unwrap();
    store.ingest(&session.id, pieces(&s.stream(), 70_000)).await.unwrap();
    store.commit(&session.id, s.manifest.digest, Some(tag("t")), None).await.unwrap();
}

/// A pack that was written in parts, with a blob of many segments.
#[tokio::test]
async fn large_blobs_are_written_in_parts_and_read_in_ranges() {
    let dir = tempfile::tempdir().unwrap();
    let domains = open(&dir.path().join("data"), options(&dir, "a.key", 'a')).await.unwrap();
    let sealed = name("sealed");
    domains.create_as(&sealed, Some(true)).await.unwrap();
    let store = domains.open(&sealed).await.unwrap();
    let blob: Vec<u8> = (0..23_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let session = store.open_push(&repository()).await.unwrap();
    let frames = stream([blob_frame(&page(1)), blob_frame(&blob), blob_frame(&page(2))]);
    store.ingest(&session.id, pieces(&frames, 100_000)).await.unwrap();
    let digest = Digest::sha256(&blob);
    for range in [0..1, 0..23_000_000, 65_000..66_000, 4_194_000..9_000_001, 22_999_999..23_000_000] {
        use futures::TryStreamExt as _;
        let read: Vec<bytes::Bytes> = store.raw(&digest, range.clone()).await.unwrap().try_collect().await.unwrap();
        assert!(read.concat() == blob[range.start as usize..range.end as usize], "{range:?}");
    }
    let report = store.scrub(&ScrubOptions { full: true, ..ScrubOptions::default() }, &mut |_| ()).await.unwrap();
    assert!(report.damaged.is_empty() && report.bad_packs.is_empty() && report.frames == 3, "{report:?}");
}
