//! What a snapshot directory must not be: each refusal comes before anything is sent, and says
//! where and what.

use crate::common::sample::{SMALL, blob_path, directory, page, put_blob, write, write_checkpoint};
use crate::common::{push_dir, remote};
use pfr_client::Remote;
use pfr_schema::{Digest, ErrorCode};
use std::os::unix::fs::symlink;
use std::path::Path;

/// A name, what to do to a good directory, and what the error must have: its code, and words in its
/// message.
type Case = (&'static str, fn(&Path), ErrorCode, &'static [&'static str]);

fn blob(root: &Path, number: u64) -> std::path::PathBuf {
    blob_path(root, &Digest::sha256(&page(number, 128)))
}

fn edit(root: &Path, name: &str, from: &str, to: &str) {
    let text = std::fs::read_to_string(root.join(name)).unwrap();
    assert!(text.contains(from), "{text}");
    std::fs::write(root.join(name), text.replacen(from, to, 1)).unwrap();
}

async fn check(cases: &[Case]) {
    // This port is closed: a request would be another error.
    let remote = remote("http://127.0.0.1:1");
    for case in cases {
        refuses(&remote, case).await;
        assert_eq!(remote.round_trips(), 0, "{}: something was sent", case.0);
    }
}

async fn refuses(remote: &Remote, (name, spoil, code, words): &Case) {
    let dir = directory(SMALL, &[0, 1, 2]);
    spoil(dir.path());
    let error = push_dir(remote, dir.path(), "t").await.unwrap_err();
    assert_eq!(error.code(), *code, "{name}: {error}");
    for word in *words {
        assert!(error.to_string().contains(word), "{name}: {word:?} is not in: {error}");
    }
}

#[tokio::test]
async fn documents_and_blobs_that_are_not_as_they_say() {
    use ErrorCode::*;
    check(&[
        (
            "no page manifest",
            |r| std::fs::remove_file(r.join("page_manifest.json")).unwrap(),
            InvalidRequest,
            &["no page_manifest.json in it. If a pull made this directory, run that pull again"],
        ),
        ("not JSON", |r| std::fs::write(r.join("page_manifest.json"), "{").unwrap(), InvalidDocument, &["page_manifest.json"]),
        ("another layout", |r| edit(r, "page_manifest.json", "paged-batchinvariant-v1", "x"), InvalidDocument, &["$.layout", "paged-batch"]),
        ("an unknown dtype", |r| edit(r, "page_manifest.json", "bf16", "fp4"), InvalidDocument, &["dtype", "fp4"]),
        ("other spelling", |r| edit(r, "page_manifest.json", ":", ": "), InvalidDocument, &["canonical"]),
        ("an ix that is none", |r| edit(r, "page_manifest.json", "[0,1,2]", "[0,1,9]"), InvalidDocument, &["$.logical_seqs[0].page_ixs[2]"]),
        ("a config that is none", |r| std::fs::write(r.join("config.json"), r#"{"agnet":1}"#).unwrap(), InvalidDocument, &["config.json", "agnet"]),
        (
            "three parents",
            |r| {
                let digest = Digest::sha256(b"");
                std::fs::write(r.join("config.json"), format!(r#"{{"parents":["{digest}","{digest}","{digest}"]}}"#)).unwrap();
            },
            InvalidDocument,
            &["config.json", "$.parents"],
        ),
        (
            "a checkpoint of another version",
            |r| {
                write_checkpoint(r);
                edit(r, "checkpoint.json", "pf.checkpoint.v1", "pf.checkpoint.v9");
            },
            InvalidDocument,
            &["checkpoint.json", "$.abi"],
        ),
        (
            "one and several page manifests",
            |r| write(r, "page_manifest.main.0.json", SMALL, &[1]),
            InvalidRequest,
            &["both page_manifest.json and"],
        ),
        ("a manifest that is none", |r| std::fs::write(r.join("snapshot.json"), "{}").unwrap(), InvalidDocument, &["snapshot.json"]),
        (
            "a manifest of nothing that is here",
            |r| {
                let config = Digest::sha256(b"x");
                let text = format!(
                    r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","artifactType":"application/vnd.pf.snapshot.v1+json","config":{{"mediaType":"application/vnd.pf.snapshot.config.v1+json","digest":"{config}","size":1}},"layers":[]}}"#
                );
                std::fs::write(r.join("snapshot.json"), text).unwrap();
            },
            InvalidRequest,
            &["config.json", "not there. If a pull made this directory, run that pull again"],
        ),
    ])
    .await;
}

#[tokio::test]
async fn files_that_are_none_and_links_that_leave() {
    use ErrorCode::*;
    check(&[
        (
            "an attachment that is a link out",
            |r| {
                std::fs::create_dir(r.join("attachments")).unwrap();
                symlink("/etc/hostname", r.join("attachments/x")).unwrap();
            },
            InvalidRequest,
            &["leaves the directory"],
        ),
        ("attachments that are elsewhere", |r| symlink("/etc", r.join("attachments")).unwrap(), InvalidRequest, &["leaves the directory"]),
        (
            "a configuration that is a link out",
            |r| symlink("/etc/hostname", r.join("config.json")).unwrap(),
            InvalidRequest,
            &["leaves the directory"],
        ),
        (
            "tokens that are a socket",
            |r| drop(std::os::unix::net::UnixListener::bind(r.join("tokens.bin")).unwrap()),
            InvalidRequest,
            &["expected a regular file"],
        ),
        (
            "an attachment in a folder",
            |r| std::fs::create_dir_all(r.join("attachments/folder")).unwrap(),
            InvalidRequest,
            &["is a directory"],
        ),
        (
            "an attachment that no title can name",
            |r| {
                std::fs::create_dir(r.join("attachments")).unwrap();
                std::fs::write(r.join("attachments/a\nb"), "").unwrap();
            },
            InvalidRequest,
            &["no attachment may have this name"],
        ),
    ])
    .await;
}

/// Which files are looked at depends on what the registry lacks, so it is asked before.
#[tokio::test]
async fn files_of_blobs_are_looked_at_before_any_is_sent() {
    use ErrorCode::*;
    let registry = crate::common::Registry::start().await;
    let cases: &[Case] = &[
        ("a missing page", |r| std::fs::remove_file(blob(r, 3)).unwrap(), MissingBlobs, &["$.pages[1].v", ".zst"]),
        ("a short page", |r| std::fs::write(blob(r, 2), "short").unwrap(), LengthMismatch, &["$.pages[1].k", "has 5 bytes, 128 expected"]),
        (
            "a checkpoint without a payload",
            |r| {
                write_checkpoint(r);
                std::fs::remove_file(blob_path(r, &Digest::sha256(&page(7_005_000, 5000)))).unwrap();
            },
            MissingBlobs,
            &["checkpoint.json", "$.tensors[1].payload_hash"],
        ),
        (
            "a page that is a link out",
            |r| {
                let outside = r.parent().unwrap().join(format!("{}-out", r.file_name().unwrap().display()));
                std::fs::rename(blob(r, 2), &outside).unwrap();
                symlink(&outside, blob(r, 2)).unwrap();
            },
            InvalidRequest,
            &["leaves the directory"],
        ),
        (
            "a folder of blobs that is a link out",
            |r| {
                let outside = tempfile::tempdir().unwrap().keep();
                std::fs::rename(r.join("blobs"), outside.join("blobs")).unwrap();
                symlink(outside.join("blobs"), r.join("blobs")).unwrap();
            },
            InvalidRequest,
            &["leaves the directory"],
        ),
        (
            "a page that is a folder",
            |r| {
                std::fs::remove_file(blob(r, 2)).unwrap();
                std::fs::create_dir(blob(r, 2)).unwrap();
            },
            InvalidRequest,
            &["is a directory"],
        ),
    ];
    for case in cases {
        refuses(&registry.remote(), case).await;
        assert!(registry.packs().is_empty(), "{}: something was sent", case.0);
    }
}

#[tokio::test]
async fn links_that_stay_inside_are_followed() {
    let registry = crate::common::Registry::start().await;
    let dir = directory(SMALL, &[0, 1]);
    let same = push_dir(&registry.remote(), dir.path(), "a").await.unwrap();
    let moved = dir.path().join("moved");
    std::fs::rename(blob(dir.path(), 2), &moved).unwrap();
    symlink("../../../moved", blob(dir.path(), 2)).unwrap();
    std::fs::rename(dir.path().join("page_manifest.json"), dir.path().join("real.json")).unwrap();
    symlink("real.json", dir.path().join("page_manifest.json")).unwrap();
    let fresh = crate::common::Registry::start().await;
    assert_eq!(push_dir(&fresh.remote(), dir.path(), "a").await.unwrap().digest, same.digest);
}

#[tokio::test]
async fn a_path_that_is_no_directory_is_refused() {
    let remote = remote("http://127.0.0.1:1");
    let file = tempfile::NamedTempFile::new().unwrap();
    assert_eq!(push_dir(&remote, file.path(), "t").await.unwrap_err().code(), ErrorCode::InvalidRequest);
    assert_eq!(push_dir(&remote, Path::new("/does/not/exist"), "t").await.unwrap_err().code(), ErrorCode::NotFound);
}

#[tokio::test]
async fn a_blob_of_another_algorithm_is_found_in_its_own_folder() {
    let registry = crate::common::Registry::start().await;
    let dir = tempfile::tempdir().unwrap();
    let bytes = page(1, 128);
    let digest = Digest::of(pfr_schema::Algorithm::Blake3, &bytes);
    let sha = put_blob(dir.path(), &bytes);
    let folder = blob_path(dir.path(), &digest);
    std::fs::create_dir_all(folder.parent().unwrap()).unwrap();
    std::fs::rename(blob_path(dir.path(), &sha), &folder).unwrap();
    let page = pfr_schema::flat::Page { ix: 0, k: digest, v: digest };
    let flat = pfr_schema::flat::FlatManifest::new(SMALL.geometry, vec![page], vec![], &pfr_schema::Limits::default()).unwrap();
    std::fs::write(dir.path().join("page_manifest.json"), flat.to_bytes()).unwrap();
    let pushed = push_dir(&registry.remote(), dir.path(), "t").await.unwrap();
    registry.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
    let copy = tempfile::tempdir().unwrap();
    crate::common::pull_dir(&registry.remote(), "t", copy.path()).await.unwrap();
    crate::common::same_files(dir.path(), copy.path());
}

/// Agents run pushes and pulls on tasks of their own.
#[test]
fn pushes_and_pulls_can_be_spawned() {
    fn is_send<T: Send>(_: &T) {}
    let remote = remote("http://127.0.0.1:1");
    let (source, progress) = (pfr_client::Source::Directory(".".into()), pfr_client::Progress::default());
    is_send(&pfr_client::push(&source, &remote, crate::common::target("t"), &progress));
    let (repository, selector) = (crate::common::repository(), crate::common::selector("t"));
    let destination = pfr_client::Destination::Directory { path: ".".into(), store: None };
    is_send(&pfr_client::pull(&remote, &repository, &selector, &destination, &progress));
}

#[tokio::test]
async fn an_attachment_over_the_limit_is_refused_before_it_is_read() {
    let dir = directory(SMALL, &[0, 1]);
    std::fs::create_dir(dir.path().join("attachments")).unwrap();
    // No disk holds this, and no minute is long enough to hash it.
    std::fs::File::create(dir.path().join("attachments/sparse")).unwrap().set_len(65 << 30).unwrap();
    let remote = remote("http://127.0.0.1:1");
    let pushed = tokio::time::timeout(std::time::Duration::from_secs(20), push_dir(&remote, dir.path(), "t")).await;
    let error = pushed.expect("it is not read").unwrap_err();
    assert_eq!(error.code(), ErrorCode::TooLarge, "{error}");
    assert!(error.to_string().contains("attachments/sparse") && error.to_string().contains("68719476736"), "{error}");
}
