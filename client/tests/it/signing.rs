//! `pf keygen`, `sign`, `verify --key`, `pull --verify-key`, `push --sign-key` and `signing`.

use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, memory, pf, pull_store, push_dir, repository, selector, tag};
use base64::Engine as _;
use pfr_client::Error;
use pfr_schema::ErrorCode;
use pfr_schema::api::{NewSignature, SignRequest};
use pfr_store::PrivateKey;
use pfr_testkit::front::{Fate, Front, Seen};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A pair of keys in `dir`: the files.
fn keys(dir: &Path, name: &str) -> [String; 2] {
    let private = dir.join(name);
    let (code, _, stderr) = pf(dir, &["keygen", private.to_str().unwrap()]);
    assert_eq!(code, 0, "{stderr}");
    let text = |path: PathBuf| path.to_str().unwrap().to_owned();
    [text(private.clone()), text(dir.join(format!("{name}.pub")))]
}

fn json_of(dir: &Path, args: &[&str]) -> Value {
    let (code, stdout, stderr) = pf(dir, &[args, &["--json"]].concat());
    assert_eq!(code, 0, "{args:?}: {stderr}");
    serde_json::from_str(&stdout).unwrap()
}

#[test]
fn a_new_key_is_readable_by_its_owner_only_and_is_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let [private, public] = keys(dir.path(), "a.key");
    let mode = |path: &str| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&private), 0o600);
    let before = (std::fs::read(&private).unwrap(), std::fs::read(&public).unwrap());
    let (code, _, stderr) = pf(dir.path(), &["keygen", &private]);
    assert!(code == 1 && stderr.contains("never overwritten"), "{stderr}");
    // Nor if only one of the two is there.
    let other = dir.path().join("b.key");
    std::fs::write(dir.path().join("b.key.pub"), "mine").unwrap();
    let (code, ..) = pf(dir.path(), &["keygen", other.to_str().unwrap()]);
    assert!(code == 1 && !other.exists());
    assert_eq!((std::fs::read(&private).unwrap(), std::fs::read(&public).unwrap()), before);
    let (code, ..) = pf(dir.path(), &["keygen", "/nowhere/at/all"]);
    assert_ne!(code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_snapshot_is_verified_by_its_key_there_and_offline_after_a_pull() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let dir = dir.path();
    push_dir(&registry.remote(), directory(SMALL, &[1, 2]).path(), "a").await.unwrap();
    let ([private, public], [_, other]) = (keys(dir, "a.key"), keys(dir, "b.key"));
    let url = registry.url.as_str();
    let verify = |key: &str, more: &[&str]| pf(dir, &[&["verify", "team/agent:a", "--key", key], more].concat());
    let (code, _, stderr) = verify(&public, &["--registry", url]);
    assert!(code == 4 && stderr.contains("it has no signature"), "{code}: {stderr}");
    let signed = json_of(dir, &["sign", "team/agent:a", "--key", &private, "--registry", url]);
    let again = json_of(dir, &["sign", "team/agent:a", "--key", &private, "--registry", url]);
    assert_eq!(signed, again, "the same key signs once");
    let (code, stdout, stderr) = verify(&public, &["--registry", url]);
    assert!(code == 0 && stdout.contains("signed") && stdout.contains(signed["key_id"].as_str().unwrap()), "{stdout}{stderr}");
    let (code, _, stderr) = verify(&other, &["--registry", url]);
    assert!(code == 4 && stderr.contains("only a signature by another one"), "{stderr}");
    let (code, _, stderr) = verify(&private, &["--registry", url]);
    assert!(code != 0 && stderr.contains("PUBLIC KEY") && !stderr.contains("MC4C"), "{stderr}");
    let (_, stdout, _) = pf(dir, &["inspect", "team/agent:a", "--registry", url]);
    assert!(stdout.contains("signature") && stdout.contains(signed["key_id"].as_str().unwrap()), "{stdout}");
    // The local copy has it, too.
    let (code, _, stderr) = pf(dir, &["pull", "team/agent:a", "--registry", url]);
    assert_eq!(code, 0, "{stderr}");
    drop(registry);
    let (code, stdout, stderr) = verify(&public, &["--local"]);
    assert!(code == 0 && stdout.contains("signed"), "{stdout}{stderr}");
    assert_eq!(verify(&other, &["--local"]).0, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_with_a_key_fetches_nothing_of_what_is_not_signed_by_it() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let dir = dir.path();
    let digest = push_dir(&registry.remote(), directory(SMALL, &[1, 2]).path(), "a").await.unwrap().digest;
    let (mine, other) = (PrivateKey::generate().unwrap().0, PrivateKey::generate().unwrap().0);
    let (store, trusting) = (memory().await, registry.remote().verifying(vec![mine.public()]));
    let refused = async |signatures: usize| {
        let before = trusting.round_trips();
        match pull_store(&trusting, "a", &store).await.unwrap_err() {
            Error::NotSigned { signatures: found, .. } => assert_eq!(found, signatures),
            error => panic!("{error}"),
        }
        assert_eq!(trusting.round_trips() - before, 1, "only the snapshot was asked about");
        assert!(crate::common::is_empty(&store).await);
    };
    refused(0).await;
    let sign = async |key: &PrivateKey, forged: bool| {
        let mut new = key.sign(digest, &repository(), 1_700_000_000_000);
        if forged {
            // It says that it is by the trusted key.
            new.payload = mine.sign(digest, &repository(), 1).payload;
        }
        registry.remote().sign(&repository(), &digest, &SignRequest { signatures: vec![new] }).await.unwrap();
    };
    sign(&other, false).await;
    refused(1).await;
    sign(&other, true).await;
    refused(2).await;
    sign(&mine, false).await;
    pull_store(&trusting, "a", &store).await.unwrap();
    assert_eq!(store.signatures(&repository(), &digest).await.unwrap().len(), 3);
    // A second pull asks once, as it does without a key.
    let again = pull_store(&trusting, "a", &store).await.unwrap();
    assert_eq!((again.round_trips, again.blobs_received), (1, 0));

    // The command: by its option, its variable and the configuration file.
    let [_, stranger] = keys(dir, "s.key");
    let config = dir.join("config.toml");
    std::fs::write(&config, format!("verify-key = {stranger:?}\n")).unwrap();
    for (option, variable, file) in [(true, false, false), (false, true, false), (false, false, true)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pf"));
        command.env_clear().env("HOME", dir).args(["pull", "team/agent:a", "--registry", &registry.url]).arg(dir.join("out"));
        if option {
            command.args(["--verify-key", &stranger]);
        }
        if variable {
            command.env("PF_VERIFY_KEY", &stranger);
        }
        if file {
            command.env("PF_CONFIG", &config);
        }
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(4) && stderr.contains("only signatures by others"), "{stderr}");
        assert!(!dir.join("out/page_manifest.json").exists());
    }
    let trusted = dir.join("trusted.pub");
    std::fs::write(&trusted, format!("{}{}", std::fs::read_to_string(&stranger).unwrap(), mine.public())).unwrap();
    let (code, _, stderr) = pf(dir, &["pull", "team/agent:a", "--registry", &registry.url, "--verify-key", trusted.to_str().unwrap()]);
    assert_eq!(code, 0, "one of two keys is enough: {stderr}");
    let (code, _, stderr) = pf(dir, &["pull", "team/agent:a", "--registry", &registry.url, "--verify-key", "/nowhere.pub"]);
    assert!(code != 0 && stderr.contains("/nowhere.pub"), "a key that cannot be read is no key that is not asked for: {stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_signs_before_it_puts_a_tag_that_needs_it_and_a_local_signature_goes_along() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let dir = dir.path();
    let [private, public] = keys(dir, "a.key");
    let policies = dir.join("signing.json");
    let policy = json!({"name": "prod", "repositories": "*", "tags": ["prod*"], "keys": [std::fs::read_to_string(&public).unwrap()]});
    std::fs::write(&policies, json!({"policies": [policy]}).to_string()).unwrap();
    let url = registry.url.as_str();
    let (code, stdout, stderr) = pf(dir, &["signing", "set", policies.to_str().unwrap(), "--registry", url]);
    assert!(code == 0 && stdout.contains("prod*"), "{stdout}{stderr}");
    assert_eq!(json_of(dir, &["signing", "--registry", url])["policies"][0]["name"], "prod");
    let source = directory(SMALL, &[1, 2]);
    let push = |from: &str, name: &str, more: &[&str]| {
        let target = format!("team/agent:{name}");
        pf(dir, &[&["push", from, &target, "--registry", url], more].concat())
    };
    let from = source.path().to_str().unwrap();
    let (code, _, stderr) = push(from, "prod", &[]);
    assert!(code == 4 && stderr.contains("--sign-key"), "{code}: {stderr}");
    assert!(registry.store.tags(&repository(), None, 10).await.is_err(), "nothing landed");
    let (code, _, stderr) = push(from, "prod", &["--sign-key", &private, "--if-tag-is", "absent"]);
    assert_eq!(code, 0, "{stderr}");
    let (code, _, stderr) = push(from, "prod", &["--sign-key", &private, "--if-tag-is", "absent"]);
    assert_eq!(code, 3, "the tag is compared as without a signature: {stderr}");
    let digest = registry.store.tag(&repository(), &tag("prod")).await.unwrap().digest;
    assert_eq!(registry.store.signatures(&repository(), &digest).await.unwrap().len(), 1);
    // By way of the local store, where it is signed.
    let other = directory(SMALL, &[3, 4]);
    let (code, ..) = push(other.path().to_str().unwrap(), "wip", &[]);
    assert_eq!(code, 0);
    assert_eq!(pf(dir, &["pull", "team/agent:wip", "--registry", url]).0, 0);
    assert_eq!(pf(dir, &["sign", "team/agent:wip", "--local", "--key", &private]).0, 0);
    let (code, _, stderr) = push("team/agent:wip", "prod-2", &[]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(
        registry.store.resolve(&repository(), &selector("prod-2")).await.unwrap(),
        registry.store.resolve(&repository(), &selector("wip")).await.unwrap()
    );
    // A wrong policy is not sent.
    std::fs::write(&policies, r#"{"policies": [{"name": "p", "repositories": "*", "keys": []}]}"#).unwrap();
    let (code, _, stderr) = pf(dir, &["signing", "set", policies.to_str().unwrap(), "--registry", url]);
    assert!(code == 1 && stderr.contains("$.policies[0].keys"), "{stderr}");
    assert_eq!(registry.store.metadata().signing().await.unwrap().version, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_digest_is_signed_and_verified_as_itself_whatever_the_registry_says() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let dir = dir.path();
    let asked = push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap().digest;
    let other = push_dir(&registry.remote(), directory(SMALL, &[2]).path(), "b").await.unwrap().digest;
    let [private, public] = keys(dir, "a.key");
    assert_eq!(pf(dir, &["sign", "team/agent:b", "--key", &private, "--registry", &registry.url]).0, 0);
    // Questions about any snapshot are answered with the signed one.
    let front = Front::start(&registry.url, move |seen: &Seen| match seen.method.as_str() {
        "GET" if seen.path.contains("/snapshots/") => Fate::Redirect(format!("/v1/repositories/team%2Fagent/snapshots/{other}")),
        _ => Fate::Pass,
    });
    for name in [format!("team/agent@{asked}"), format!("team/agent@{}", asked.short())] {
        let (code, stdout, stderr) = pf(dir, &["verify", &name, "--key", &public, "--registry", &front.url]);
        assert!(code != 0 && stderr.contains("the request names"), "{code}: {stdout}{stderr}");
        // A new key would sign the other one.
        let [another, _] = keys(dir, &format!("{}.key", name.len()));
        let (code, stdout, stderr) = pf(dir, &["sign", &name, "--key", &another, "--registry", &front.url]);
        assert!(code != 0 && stderr.contains("the request names"), "{code}: {stdout}{stderr}");
    }
    assert_eq!(registry.store.signatures(&repository(), &other).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_takes_its_signatures_along_before_it_puts_a_tag_that_needs_them() {
    let (registry, other, dir) = (Registry::start().await, Registry::start().await, tempfile::tempdir().unwrap());
    let dir = dir.path();
    let [private, public] = keys(dir, "a.key");
    for (name, page) in [("signed", 1), ("plain", 2)] {
        push_dir(&registry.remote(), directory(SMALL, &[page]).path(), name).await.unwrap();
    }
    assert_eq!(pf(dir, &["sign", "team/agent:signed", "--key", &private, "--registry", &registry.url]).0, 0);
    let policies = dir.join("signing.json");
    let policy = json!({"name": "prod", "repositories": "*", "tags": ["prod*"], "keys": [std::fs::read_to_string(&public).unwrap()]});
    std::fs::write(&policies, json!({"policies": [policy]}).to_string()).unwrap();
    assert_eq!(pf(dir, &["signing", "set", policies.to_str().unwrap(), "--registry", &other.url]).0, 0);
    let copy = |from: &str, to: &str, more: &[&str]| {
        let (from, to) = (format!("{}/team/agent:{from}", registry.url), format!("{}/team/agent:{to}", other.url));
        pf(dir, &[&["copy", &from, &to], more].concat())
    };
    let (code, _, stderr) = copy("plain", "prod", &[]);
    assert_eq!(code, 4, "{stderr}");
    let (code, _, stderr) = copy("signed", "prod", &["--if-tag-is", "absent"]);
    assert_eq!(code, 0, "{stderr}");
    let (code, _, stderr) = copy("signed", "prod", &["--if-tag-is", "absent"]);
    assert_eq!(code, 3, "the tag is compared as without a signature: {stderr}");
    let (code, _, stderr) = pf(dir, &["verify", "team/agent:prod", "--key", &public, "--registry", &other.url]);
    assert_eq!(code, 0, "{stderr}");
}

/// Another implementation reads our keys and signatures, and we read its keys.
#[tokio::test(flavor = "multi_thread")]
async fn openssl_verifies_what_we_sign_and_signs_what_we_verify() {
    if Command::new("openssl").arg("version").output().is_err() {
        return pfr_testkit::run::skip("openssl", "there is no openssl");
    }
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let dir = dir.path();
    let openssl = |args: &[&str]| {
        let output = Command::new("openssl").args(args).current_dir(dir).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let digest = push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap().digest;
    let [private, public] = keys(dir, "ours.key");
    let signed = json_of(dir, &["sign", "team/agent:a", "--key", &private, "--registry", &registry.url]);
    let one = registry.store.signatures(&repository(), &digest).await.unwrap().remove(0);
    std::fs::write(dir.join("payload"), &one.payload).unwrap();
    std::fs::write(dir.join("signature"), base64::engine::general_purpose::STANDARD.decode(&one.signature).unwrap()).unwrap();
    openssl(&["pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", &public, "-in", "payload", "-sigfile", "signature"]);
    // It derives the same public key, and the id is the hash of that.
    assert_eq!(openssl(&["pkey", "-in", &private, "-pubout"]), std::fs::read(&public).unwrap());
    let der = openssl(&["pkey", "-pubin", "-in", &public, "-outform", "DER"]);
    assert_eq!(signed["key_id"], pfr_schema::Digest::sha256(&der).to_string());

    openssl(&["genpkey", "-algorithm", "ed25519", "-out", "theirs.key"]);
    openssl(&["pkey", "-in", "theirs.key", "-pubout", "-out", "theirs.pub"]);
    openssl(&["pkeyutl", "-sign", "-rawin", "-inkey", "theirs.key", "-in", "payload", "-out", "theirs.sig"]);
    let new = NewSignature::new(one.payload, &std::fs::read(dir.join("theirs.sig")).unwrap());
    registry.remote().sign(&repository(), &digest, &SignRequest { signatures: vec![new] }).await.unwrap();
    let theirs = dir.join("theirs.pub");
    let verify = |key: &str| pf(dir, &["verify", "team/agent:a", "--key", key, "--registry", &registry.url]);
    let (code, _, stderr) = verify(theirs.to_str().unwrap());
    assert_eq!(code, 0, "{stderr}");
    let by_theirs = dir.join("theirs.key");
    assert_eq!(pf(dir, &["sign", "team/agent:a", "--key", by_theirs.to_str().unwrap(), "--registry", &registry.url]).0, 0);
    // Keys of another kind are refused in words.
    openssl(&["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", "ec.key"]);
    openssl(&["pkey", "-in", "ec.key", "-pubout", "-out", "ec.pub"]);
    let (code, _, stderr) = verify(dir.join("ec.pub").to_str().unwrap());
    assert!(code != 0 && stderr.contains("ed25519"), "{stderr}");
    let ec = dir.join("ec.key");
    let (code, _, stderr) = pf(dir, &["sign", "team/agent:a", "--key", ec.to_str().unwrap(), "--registry", &registry.url]);
    assert!(code == 1 && stderr.contains("ed25519"), "{stderr}");
    assert_eq!(registry.remote().snapshot(&repository(), &selector("a")).await.unwrap().signatures.len(), 2);
    assert_eq!(ErrorCode::SignatureRequired.exit_code(), 4);
}
