//! Keys that wrap those of domains: files, commands, their rotation, and the first start.

use super::{holds, key_file, key_text, keys, name, open, options};
use crate::common::rig::{Backend, Rig};
use crate::common::{leaks, push, repository, snapshot, tag};
use async_trait::async_trait;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use pfr_store::{Clock, DomainHome, DomainPacks, DomainTables, Domains, Error, KeyOptions, Keys, Metadata, Options, SqliteMetadata, Store};
use pfr_testkit::storage::{Call, Hooks, Moment, hooked};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

async fn kept(rig: &Rig) -> String {
    String::from_utf8(rig.bytes(&Path::from("domains/sealed/pf-key")).await).unwrap()
}

async fn decides(domains: &Domains) -> String {
    domains.default_store().metadata().domain_key(name("sealed")).await.unwrap().unwrap() + "\n"
}

async fn a_new_key_wraps_again_without_a_pack_and_a_kill_in_between_does_no_harm(backend: Backend) {
    let (rig, dir) = (Rig::new(backend).await, tempfile::tempdir().unwrap());
    let (sealed, s) = (name("sealed"), snapshot(&[1, 2], vec![]));
    let first = rig.domains_with(2, keys(&dir, 'a')).await;
    first.create_as(&sealed, Some(true)).await.unwrap();
    push(&first.open(&sealed).await.unwrap(), &s, "t").await.unwrap();
    let (before, packs) = (kept(&rig).await, rig.list(None).await);

    let both = KeyOptions { old_key_file: options(&dir, "a.key", 'a').key_file, ..options(&dir, "b.key", 'b') };
    let both = Keys::new(both).unwrap();
    let second = rig.domains_with(2, both.clone()).await;
    // It opens what the old key wrapped, before and after.
    second.open(&sealed).await.unwrap().verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    assert!(second.rewrap(&sealed).await.unwrap());
    assert!(!second.rewrap(&name("default")).await.unwrap(), "it is not encrypted");
    assert!(matches!(second.rewrap(&name("nobody")).await, Err(Error::DomainUnknown(_))));
    let after = kept(&rig).await;
    assert!(after != before && after == decides(&second).await);
    assert_eq!(rig.list(None).await, packs);
    // A kill after the catalogue had the new one, and before the storage: the next run writes it,
    // and so does the next process that opens the domain.
    for again in [true, false] {
        rig.put(&Path::from("domains/sealed/pf-key"), before.clone().into_bytes()).await;
        let next = rig.domains_with(2, both.clone()).await;
        match again {
            true => assert!(next.rewrap(&sealed).await.unwrap()),
            false => drop(next.open(&sealed).await.unwrap()),
        }
        assert_eq!(kept(&rig).await, after, "once more changes nothing");
    }
    let new = rig.domains_with(2, keys(&dir, 'b')).await;
    new.open(&sealed).await.unwrap().verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    let old = rig.domains_with(2, keys(&dir, 'a')).await;
    let error = old.open(&sealed).await.unwrap_err();
    let file = dir.path().join("a.key").display().to_string();
    assert!(matches!(&error, Error::Locked(reason) if reason.contains(&file) && reason.contains("old-key-file")), "{error}");
    let none = rig.domains(2).await;
    assert!(matches!(none.open(&sealed).await, Err(Error::Locked(_))));
    assert!(matches!(none.create_as(&name("other"), Some(true)).await, Err(Error::Invalid(_))));
    // The process that had it open goes on.
    first.open(&sealed).await.unwrap().verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
}

on_backends!([sqlite_disk = SqliteDisk, postgres_s3 = PostgresS3]:
    a_new_key_wraps_again_without_a_pack_and_a_kill_in_between_does_no_harm,
);

/// Another process wraps the key again right before this one writes it beside the packs.
#[derive(Debug)]
struct Meanwhile(Domains, AtomicBool);

#[async_trait]
impl Hooks for Meanwhile {
    async fn before(&self, call: &Call) -> object_store::Result<Option<object_store::Error>> {
        let is_key = call.moment == Moment::Put && call.location.as_ref() == "domains/sealed/pf-key";
        if is_key && !self.1.swap(true, Ordering::SeqCst) {
            assert!(self.0.rewrap(&name("sealed")).await.unwrap());
        }
        Ok(None)
    }
}

#[tokio::test]
async fn a_process_that_is_late_leaves_no_key_that_the_old_file_wrapped() {
    let (dir, tables) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (sealed, at) = (name("sealed"), Path::from("domains/sealed/pf-key"));
    let metadata: Arc<dyn Metadata> = SqliteMetadata::open_in_memory(Clock::system()).await.unwrap();
    let process = |bucket: &Arc<dyn ObjectStore>, keys: Keys| {
        let default = Store::new(Arc::clone(bucket), Arc::clone(&metadata), Options::default());
        let packs = DomainPacks::Bucket(Arc::clone(bucket));
        Domains::with_keys(default, Some(DomainHome { tables: DomainTables::Files(tables.path().to_owned()), packs }), keys)
    };
    let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    process(&bucket, keys(&dir, 'a')).create_as(&sealed, Some(true)).await.unwrap();
    // As if the process had been killed before it wrote the key.
    bucket.delete(&at).await.unwrap();
    let both = KeyOptions { old_key_file: options(&dir, "a.key", 'a').key_file, ..options(&dir, "b.key", 'b') };
    let meanwhile = Arc::new(Meanwhile(process(&bucket, Keys::new(both).unwrap()), AtomicBool::new(false)));
    let late = process(&hooked(Arc::clone(&bucket), meanwhile.clone()), keys(&dir, 'a'));
    late.open(&sealed).await.unwrap();
    assert!(meanwhile.1.load(Ordering::SeqCst));
    let kept = bucket.get(&at).await.unwrap().bytes().await.unwrap();
    let decides = metadata.domain_key(sealed.clone()).await.unwrap().unwrap();
    assert_eq!(std::str::from_utf8(&kept).unwrap().trim_end(), decides);
    process(&bucket, keys(&dir, 'b')).open(&sealed).await.unwrap();
}

#[tokio::test]
async fn a_wrapped_key_that_was_cut_while_it_was_written_is_written_again() {
    let (dir, tables) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (sealed, at) = (name("sealed"), Path::from("domains/sealed/pf-key"));
    let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let process = async |tables: &std::path::Path| {
        let metadata: Arc<dyn Metadata> = SqliteMetadata::open(&tables.join("metadata.sqlite"), Clock::system()).await.unwrap();
        let default = Store::new(Arc::clone(&bucket), metadata, Options::default());
        let home = DomainHome { tables: DomainTables::Files(tables.to_owned()), packs: DomainPacks::Bucket(Arc::clone(&bucket)) };
        Domains::with_keys(default, Some(home), keys(&dir, 'a'))
    };
    process(tables.path()).await.create_as(&sealed, Some(true)).await.unwrap();
    let whole = bucket.get(&at).await.unwrap().bytes().await.unwrap();
    for end in [0, 1, whole.len() / 2, whole.len() - 2] {
        bucket.put(&at, whole.slice(..end).into()).await.unwrap();
        process(tables.path()).await.open(&sealed).await.unwrap();
        assert_eq!(bucket.get(&at).await.unwrap().bytes().await.unwrap(), whole, "the catalogue has it: {end}");
    }
    // Without the catalogue nothing has it: the domain is not taken for one without a key.
    let others = tempfile::tempdir().unwrap();
    bucket.put(&at, whole.slice(..20).into()).await.unwrap();
    let refused = process(others.path()).await.adopt(&sealed).await.unwrap_err();
    assert!(matches!(refused, Error::Locked(_)), "{refused}");
    // And a place with nothing else in it is free.
    bucket.delete(&Path::from("domains/sealed/pf-store")).await.unwrap();
    assert!(process(others.path()).await.create_as(&sealed, Some(true)).await.unwrap().1);
}

#[test]
fn a_key_file_that_others_can_read_or_that_is_no_key_is_refused_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let good = key_text('a');
    let long = good.repeat(100);
    let cases = [
        ("world.key", good.as_str(), 0o644, "chmod 600"),
        ("group.key", good.as_str(), 0o660, "chmod 600"),
        ("short.key", "YWJj", 0o600, "32 bytes as base64"),
        ("text.key", "no key at all", 0o600, "32 bytes as base64"),
        ("empty.key", "", 0o600, "32 bytes as base64"),
        ("long.key", long.as_str(), 0o600, "too long"),
    ];
    for (file, text, mode, words) in cases {
        let path = key_file(&dir, file, text, mode);
        let error = Keys::new(KeyOptions { key_file: Some(path.clone()), ..KeyOptions::default() }).unwrap_err();
        let said = error.to_string();
        assert!(said.contains(words) && said.contains(&path.display().to_string()), "{said}");
        assert!(text.len() < 10 || !said.contains(text.trim()), "{said} tells the key");
    }
    for path in [dir.path().to_owned(), dir.path().join("nothing")] {
        let error = Keys::new(KeyOptions { old_key_file: Some(path), ..KeyOptions::default() }).unwrap_err();
        assert!(matches!(error, Error::Locked(_)), "{error}");
    }
    let path = key_file(&dir, "kubernetes.key", &good, 0o440);
    let keys = Keys::new(KeyOptions { key_file: Some(path.clone()), encrypt_new: true, ..KeyOptions::default() }).unwrap();
    assert!(!format!("{keys:?}").contains(&good[..10]), "{keys:?}");
    for wrong in [
        KeyOptions { encrypt_new: true, ..KeyOptions::default() },
        KeyOptions { key_file: Some(path), key_command: Some("/bin/true".into()), ..KeyOptions::default() },
    ] {
        assert!(matches!(Keys::new(wrong), Err(Error::Invalid(_))));
    }
}

fn command(dir: &TempDir, script: &str) -> KeyOptions {
    let path = key_file(dir, "command", &format!("#!/bin/sh\n{script}\n"), 0o700);
    KeyOptions { key_command: Some(path), command_timeout: Duration::from_secs(2), ..KeyOptions::default() }
}

#[tokio::test]
async fn a_command_wraps_in_the_place_of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let script = "case $1 in wrap) printf 'kms:'; cat;; unwrap) sed s/^kms://;; *) exit 9;; esac";
    let (sealed, s) = (name("sealed"), snapshot(&[1], vec![]));
    {
        let domains = open(&data, command(&dir, script)).await.unwrap();
        domains.create_as(&sealed, Some(true)).await.unwrap();
        push(&domains.open(&sealed).await.unwrap(), &s, "t").await.unwrap();
        assert!(domains.rewrap(&sealed).await.unwrap());
        assert!(decides(&domains).await.contains("\"kms:"));
    }
    let again = open(&data, command(&dir, script)).await.unwrap();
    again.open(&sealed).await.unwrap().verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    // From a file to the command, with both.
    let files = open(&dir.path().join("other"), options(&dir, "a.key", 'a')).await.unwrap();
    files.create_as(&sealed, Some(true)).await.unwrap();
    drop(files);
    let both = KeyOptions { old_key_file: options(&dir, "a.key", 'a').key_file, ..command(&dir, script) };
    let both = open(&dir.path().join("other"), both).await.unwrap();
    assert!(both.rewrap(&sealed).await.unwrap());
    assert!(decides(&both).await.contains("\"wrapped_by\":\"command\""));
}

#[tokio::test]
async fn a_command_that_fails_hangs_or_gives_something_else_makes_no_domain_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("echo the key service is away >&2; exit 3", "the key service is away"),
        ("sleep 20", "did not end within 2 s"),
        ("sleep 20 & wait", "did not end within 2 s"),
        ("cat >/dev/null", "printed nothing"),
        ("head -c 100000 /dev/zero | tr '\\0' x", "16 KiB"),
        ("echo one; echo two", "more than one line"),
        ("head -c 9 /dev/urandom; printf '\\377'", "no text"),
        ("if [ $1 = wrap ]; then echo x; else echo AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=; fi", "another key"),
        ("echo x", "32 bytes"),
    ];
    for (at, (script, words)) in cases.into_iter().enumerate() {
        let domains = open(&dir.path().join(format!("data-{at}")), command(&dir, script)).await.unwrap();
        let begin = Instant::now();
        let error = domains.create_as(&name("sealed"), Some(true)).await.unwrap_err();
        assert!(begin.elapsed() < Duration::from_secs(20), "{script}");
        assert!(matches!(&error, Error::Locked(reason) if reason.contains(words)), "{script}: {error}");
        assert!(matches!(domains.get(&name("sealed")).await, Err(Error::DomainUnknown(_))), "{script}");
    }
    let missing = KeyOptions { key_command: Some(dir.path().join("nothing")), ..KeyOptions::default() };
    let domains = open(&dir.path().join("data"), missing).await.unwrap();
    let error = domains.create_as(&name("sealed"), Some(true)).await.unwrap_err();
    assert!(error.to_string().contains("cannot be started"), "{error}");
}

/// Files of packs and journal.
fn packs(data: &std::path::Path) -> BTreeMap<String, u64> {
    leaks::files(&data.join("packs"))
}

/// A copy of a data directory whose database is lost.
fn without_database(data: &std::path::Path, copy: &std::path::Path) -> PathBuf {
    for file in packs(data).keys() {
        let to = copy.join("packs").join(file);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(data.join("packs").join(file), to).unwrap();
    }
    copy.to_owned()
}

fn new_domains(options: KeyOptions) -> KeyOptions {
    KeyOptions { encrypt_new: true, ..options }
}

#[tokio::test]
async fn the_default_domain_is_encrypted_from_its_first_byte_on_or_never() {
    let dir = tempfile::tempdir().unwrap();
    let (data, s) = (dir.path().join("data"), snapshot(&[1, 2], vec![]));
    // Tables alone are no byte: it is new still.
    drop(open(&data, KeyOptions::default()).await.unwrap());
    let domains = open(&data, new_domains(options(&dir, "a.key", 'a'))).await.unwrap();
    let info = domains.get(&name("default")).await.unwrap();
    assert!(info.encrypted && packs(&data).keys().eq(["pf-key"]), "{:?}", packs(&data));
    push(domains.default_store(), &s, "t").await.unwrap();
    for file in packs(&data).keys().filter(|file| file.contains('/')) {
        let bytes = std::fs::read(data.join("packs").join(file)).unwrap();
        assert!(!holds(&bytes, &s.pages[0][..64]) && !holds(&bytes, b"team/agent"), "{file}");
    }
    drop(domains);
    // The wrong key, and none: nothing is opened or written.
    let before = packs(&data);
    for wrong in [options(&dir, "b.key", 'b'), new_domains(options(&dir, "b.key", 'b')), KeyOptions::default()] {
        assert!(matches!(open(&data, wrong).await, Err(Error::Locked(_))));
        assert_eq!(packs(&data), before);
    }
    // The right key is enough: whether new domains are encrypted changes nothing here.
    let domains = open(&data, options(&dir, "a.key", 'a')).await.unwrap();
    domains.default_store().verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    drop(domains);
    // The database is lost: the key beside the packs is found again.
    let lost = without_database(&data, &dir.path().join("lost"));
    assert!(matches!(open(&lost, KeyOptions::default()).await, Err(Error::Locked(_))), "it is not taken for a new one");
    let domains = open(&lost, options(&dir, "a.key", 'a')).await.unwrap();
    let report = domains.default_store().rebuild(&mut |_| ()).await.unwrap();
    assert_eq!((report.snapshots, report.tags, report.refused.len()), (1, 1, 0), "{report:?}");
    domains.default_store().verify(&s.manifest.digest, &mut |_| ()).await.unwrap();

    // A store that holds something in the clear stays so.
    let plain: PathBuf = dir.path().join("plain");
    let domains = open(&plain, KeyOptions::default()).await.unwrap();
    push(domains.default_store(), &s, "t").await.unwrap();
    drop(domains);
    let unmarked = without_database(&plain, &dir.path().join("unmarked"));
    std::fs::remove_file(unmarked.join("packs/pf-store")).unwrap();
    let domains = open(&unmarked, new_domains(options(&dir, "a.key", 'a'))).await.unwrap();
    assert!(!domains.default_store().is_encrypted(), "packs in the clear lie there");
    for (data, is_lost) in [(plain.clone(), false), (without_database(&plain, &dir.path().join("lost-too")), true)] {
        let domains = open(&data, new_domains(options(&dir, "a.key", 'a'))).await.unwrap();
        assert!(!domains.default_store().is_encrypted(), "lost: {is_lost}");
        if is_lost {
            domains.default_store().rebuild(&mut |_| ()).await.unwrap();
        }
        domains.default_store().verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
        // New ones are encrypted.
        assert!(domains.create(&name("sealed")).await.unwrap().0.encrypted);
    }
}

#[tokio::test]
async fn a_default_domain_that_was_started_in_the_clear_and_never_written_to_can_be_encrypted() {
    let dir = tempfile::tempdir().unwrap();
    let (data, s) = (dir.path().join("data"), snapshot(&[1, 2], vec![]));
    let plain = open(&data, KeyOptions::default()).await.unwrap();
    plain.default_store().begin_serving().await.unwrap();
    assert!(packs(&data).keys().eq(["pf-store"]), "{:?}", packs(&data));
    drop(plain);
    // Without its tables, nothing says that no pack was written.
    let lost = without_database(&data, &dir.path().join("lost"));
    let domains = open(&lost, new_domains(options(&dir, "a.key", 'a'))).await.unwrap();
    assert!(!domains.default_store().is_encrypted());
    let domains = open(&data, new_domains(options(&dir, "a.key", 'a'))).await.unwrap();
    assert!(domains.default_store().is_encrypted() && packs(&data).keys().eq(["pf-key", "pf-store"]), "{:?}", packs(&data));
    domains.default_store().begin_serving().await.unwrap();
    push(domains.default_store(), &s, "t").await.unwrap();
    for file in packs(&data).keys().filter(|file| file.contains('/')) {
        assert!(std::fs::read(data.join("packs").join(file)).unwrap().starts_with(b"pfs1"), "{file}");
    }
}

#[tokio::test]
async fn processes_with_other_settings_put_no_plaintext_into_an_encrypted_default_domain() {
    let dir = tempfile::tempdir().unwrap();
    let (data, s) = (dir.path().join("data"), snapshot(&[1, 2], vec![]));
    let plain = open(&data, KeyOptions::default()).await.unwrap();
    let sealed = open(&data, new_domains(options(&dir, "a.key", 'a'))).await.unwrap();
    assert!(!plain.default_store().is_encrypted() && sealed.default_store().is_encrypted());
    let refused = push(plain.default_store(), &s, "t").await.unwrap_err();
    assert!(matches!(&refused, Error::Locked(reason) if reason.contains("start this one again")), "{refused}");
    push(sealed.default_store(), &s, "t").await.unwrap();
    // Nor a name: the process that has the key journals it.
    let refused = plain.default_store().put_tag(&repository(), tag("u"), s.manifest.digest, None).await.unwrap_err();
    assert!(matches!(refused, Error::Locked(_)), "{refused}");
    sealed.default_store().flush_journal().await.unwrap();
    for file in packs(&data).keys().filter(|file| file.contains('/')) {
        let bytes = std::fs::read(data.join("packs").join(file)).unwrap();
        assert!(bytes.starts_with(b"pfs1") && !holds(&bytes, b"team/agent"), "{file}");
    }

    // The first that writes decides, also if it is killed before it has written anything.
    let data = dir.path().join("other");
    let plain = open(&data, KeyOptions::default()).await.unwrap();
    let decided = plain.default_store().metadata().enter_domain_key(name("default"), String::new()).await.unwrap();
    assert_eq!(decided, "");
    let late = open(&data, new_domains(options(&dir, "a.key", 'a'))).await.unwrap();
    assert!(!late.default_store().is_encrypted() && packs(&data).is_empty());
    push(plain.default_store(), &s, "t").await.unwrap();
    late.default_store().verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    // And a push does.
    let data = dir.path().join("third");
    let plain = open(&data, KeyOptions::default()).await.unwrap();
    push(plain.default_store(), &s, "t").await.unwrap();
    let entered = plain.default_store().metadata().enter_domain_key(name("default"), "late".into()).await.unwrap();
    assert_eq!(entered, "");
}

#[tokio::test]
async fn a_key_is_not_wrapped_again_with_success_while_its_storage_is_away() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let domains = open(&data, new_domains(options(&dir, "a.key", 'a'))).await.unwrap();
    push(domains.default_store(), &snapshot(&[1], vec![]), "t").await.unwrap();
    drop(domains);
    let both = KeyOptions { old_key_file: options(&dir, "a.key", 'a').key_file, ..options(&dir, "b.key", 'b') };
    let domains = open(&data, both).await.unwrap();
    let (here, away) = (data.join("packs"), data.join("away"));
    std::fs::rename(&here, &away).unwrap();
    std::fs::create_dir(&here).unwrap();
    let error = domains.rewrap(&name("default")).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { what: "storage", .. }), "{error}");
    assert!(packs(&data).is_empty());
    std::fs::remove_dir(&here).unwrap();
    std::fs::rename(&away, &here).unwrap();
    assert!(domains.rewrap(&name("default")).await.unwrap());
    let kept = std::fs::read_to_string(here.join("pf-key")).unwrap();
    let decides = domains.default_store().metadata().domain_key(name("default")).await.unwrap().unwrap();
    assert_eq!(kept.trim_end(), decides);
}

#[tokio::test]
async fn a_key_service_that_refuses_is_not_asked_for_each_request() {
    let dir = tempfile::tempdir().unwrap();
    let (data, runs) = (dir.path().join("data"), dir.path().join("runs"));
    let sealed = name("sealed");
    open(&data, command(&dir, "cat")).await.unwrap().create_as(&sealed, Some(true)).await.unwrap();
    let script = format!("echo run >> {}; echo it is away >&2; exit 1", runs.display());
    let domains = open(&data, command(&dir, &script)).await.unwrap();
    for _ in 0..3 {
        assert!(domains.open_all().await.unwrap().is_empty());
        let error = domains.open(&sealed).await.unwrap_err();
        assert!(matches!(&error, Error::Locked(reason) if reason.contains("it is away")), "{error}");
    }
    assert_eq!(std::fs::read_to_string(&runs).unwrap(), "run\n");
    // Another process asks at once.
    open(&data, command(&dir, "cat")).await.unwrap().open(&sealed).await.unwrap();
}

#[tokio::test]
async fn a_command_that_hangs_is_killed_with_what_it_has_started() {
    let dir = tempfile::tempdir().unwrap();
    let late = dir.path().join("late");
    let script = format!("(sleep 3; echo still here > {}) & wait", late.display());
    let hangs = KeyOptions { command_timeout: Duration::from_secs(1), ..command(&dir, &script) };
    let domains = open(&dir.path().join("data"), hangs).await.unwrap();
    let error = domains.create_as(&name("sealed"), Some(true)).await.unwrap_err();
    assert!(error.to_string().contains("did not end within 1 s"), "{error}");
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(!late.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn domains_whose_key_service_hangs_keep_no_other_from_opening_and_are_tried_again() {
    const LIMIT: Duration = Duration::from_secs(5);
    let dir = tempfile::tempdir().unwrap();
    let (data, answers) = (dir.path().join("data"), dir.path().join("answers"));
    let sealed: Vec<_> = (0..6).map(|n| name(&format!("sealed-{n}"))).collect();
    {
        let domains = open(&data, command(&dir, "cat")).await.unwrap();
        for name in &sealed {
            domains.create_as(name, Some(true)).await.unwrap();
        }
        domains.create_as(&name("clear"), Some(false)).await.unwrap();
    }
    let script = format!("if [ -e {} ]; then sleep 2; cat; else sleep 60; fi", answers.display());
    let hangs = KeyOptions { command_timeout: LIMIT, ..command(&dir, &script) };
    let domains = open(&data, hangs).await.unwrap();
    let begin = Instant::now();
    let opened = domains.open_all().await.unwrap();
    assert_eq!(opened.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["clear"]);
    assert!(begin.elapsed() < LIMIT, "it waited for key services that hang: {:?}", begin.elapsed());
    for name in &sealed {
        let error = domains.open(name).await.unwrap_err();
        assert!(matches!(&error, Error::Locked(reason) if reason.contains("did not end within 5 s")), "{error}");
    }
    assert!(begin.elapsed() < 2 * LIMIT, "they were asked one after another: {:?}", begin.elapsed());

    // It answers again, slowly. While it is asked, requests learn at once that it did not.
    std::fs::write(&answers, "").unwrap();
    let mut was_refused_at_once = false;
    let opened = loop {
        let look = tokio::spawn({
            let domains = domains.clone();
            async move { domains.open_all().await.unwrap() }
        });
        tokio::time::sleep(Duration::from_millis(500)).await;
        let asked = Instant::now();
        if let Err(error) = domains.open(&sealed[0]).await {
            assert!(matches!(error, Error::Locked(_)), "{error}");
            was_refused_at_once = asked.elapsed() < Duration::from_secs(1);
            assert!(was_refused_at_once, "{:?}", asked.elapsed());
        }
        let opened = look.await.unwrap();
        if opened.len() == sealed.len() + 1 {
            break opened;
        }
        assert!(begin.elapsed() < 12 * LIMIT, "they were not tried again");
    };
    assert!(was_refused_at_once && opened.iter().any(|(name, _)| *name == sealed[5]));
}

/// A directory that may be written to, and whose folders may not be listed.
#[derive(Debug)]
struct Hidden;

#[async_trait]
impl Hooks for Hidden {
    async fn before(&self, call: &Call) -> object_store::Result<Option<object_store::Error>> {
        let denied = Box::new(std::io::Error::from(std::io::ErrorKind::PermissionDenied));
        match call.moment {
            Moment::ListFolder => Err(object_store::Error::Generic { store: "test", source: denied }),
            _ => Ok(None),
        }
    }
}

#[tokio::test]
async fn in_a_folder_that_may_not_be_listed_only_a_domain_in_the_clear_is_made() {
    let (dir, tables) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let metadata: Arc<dyn Metadata> = SqliteMetadata::open_in_memory(Clock::system()).await.unwrap();
    let bucket = hooked(Arc::new(InMemory::new()), Arc::new(Hidden));
    let default = Store::new(Arc::clone(&bucket), metadata, Options::default());
    let home = DomainHome { tables: DomainTables::Files(tables.path().to_owned()), packs: DomainPacks::Bucket(bucket) };
    let domains = Domains::with_keys(default, Some(home), keys(&dir, 'a'));
    let refused = domains.create_as(&name("sealed"), Some(true)).await.unwrap_err();
    assert!(matches!(refused, Error::NotPermitted { .. }), "packs in the clear may lie there: {refused}");
    assert!(domains.create_as(&name("clear"), Some(false)).await.unwrap().1);
    let unknown = domains.delete(&name("nobody"), false).await.unwrap_err();
    assert!(matches!(unknown, Error::DomainUnknown(_)), "nothing is seen of it: {unknown}");
}
