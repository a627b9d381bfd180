//! `pf sign`, `pf keygen` and `pf signing`; `pf verify --key`.

use super::{read, shown};
use crate::cli::args::{Keygen, Sign, Signing, SigningCommand, Where};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{age, now_ms};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use crate::cli::suggest::Suggestion;
use pfr_client::{find_signature, public_keys};
use pfr_schema::api::SigningPolicies;
use pfr_schema::signature::{KEY_FILE_MAX, PublicKey};
use pfr_schema::{Digest, Pattern, Reference, json};
use pfr_service::durable::sync_dir;
use pfr_store::PrivateKey;
use serde::Serialize;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Bytes of a file with policies.
const POLICIES_MAX: u64 = 16 << 20;

/// A signature that is good.
#[derive(Serialize)]
struct Signed {
    digest: Digest,
    key_id: Digest,
    #[serde(skip_serializing_if = "Option::is_none")]
    signed_at: Option<u64>,
}

pub async fn sign(context: &mut Context, args: Sign) -> Result<(), Failure> {
    let key = private_key(&args.key)?;
    let repository = &args.reference.repository;
    let site = context.site(args.at, Some(&args.reference)).await?;
    let (digest, mut signatures) = site.signatures(repository, &args.reference.selector_or_latest()).await?;
    let keys = [key.public()];
    let is_new = find_signature(&digest, &signatures, &keys).is_err();
    if is_new {
        signatures = site.add_signatures(repository, &digest, vec![key.sign(digest, repository, now_ms())]).await?;
    }
    let (signature, key) = find_signature(&digest, &signatures, &keys)?;
    let signed = Signed { digest, key_id: key.id(), signed_at: signature.signed_at };
    let word = if is_new { "signed" } else { "already signed" };
    let line = format!("{word} {}, key {}", args.reference, key.id().short());
    context.report(&signed, [line], &digest.to_string())
}

/// Reads a private key.
pub fn private_key(path: &Path) -> Result<PrivateKey, Failure> {
    let bytes = read(path, KEY_FILE_MAX)?;
    let text = String::from_utf8(bytes).map_err(|_| Failure::usage("expected a private key in PEM").context(&shown(path)))?;
    PrivateKey::parse(&text).map_err(|error| Failure::usage(error.to_string()).context(&shown(path)))
}

/// `pf verify --key`: only the signature is checked.
pub async fn verify(context: &mut Context, at: Where, reference: &Reference, path: &Path) -> Result<(), Failure> {
    let keys = public_keys(path)?;
    let site = context.site(at, Some(reference)).await?;
    let (digest, signatures) = site.signatures(&reference.repository, &reference.selector_or_latest()).await?;
    // The hint of the code is for a push and a pull.
    let found = find_signature(&digest, &signatures, &keys).map_err(|error| match signatures.is_empty() {
        true => Failure::from(error).hint(Suggestion::help("sign").then(" says how to make one")),
        false => Failure::from(error).hint("the file of --key may hold the public keys of several signers"),
    });
    let (signature, key) = found?;
    let signed = Signed { digest, key_id: key.id(), signed_at: signature.signed_at };
    if context.json {
        return context.out.json(&signed);
    }
    let time = signature.signed_at.map(|at| format!(", {}", age(at, now_ms()))).unwrap_or_default();
    let paint = context.out.paint;
    context.out.line(format!("{} {reference}  {}  by the key {}{time}", paint.green("signed"), paint.yellow(&digest.short()), key.id()))
}

/// A new pair of keys.
#[derive(Serialize)]
struct Keys {
    private: PathBuf,
    public: PathBuf,
    key_id: Digest,
}

pub fn keygen(context: &mut Context, args: Keygen) -> Result<(), Failure> {
    let (private, public) = (args.file.clone(), with_pub(&args.file));
    for path in [&private, &public] {
        if path.symlink_metadata().is_ok() {
            let message = format!("{} exists already; a key is never overwritten", path.display());
            return Err(Failure::usage(message).hint("give another FILE, or move this one away"));
        }
    }
    let (key, pem) = PrivateKey::generate()?;
    create(&private, 0o600, &pem)?;
    // Without its public key a private one is of no use, and would be in the way of the next try.
    create(&public, 0o644, &key.public().to_string()).inspect_err(|_| drop(std::fs::remove_file(&private)))?;
    let folder = private.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    sync_dir(folder).map_err(|e| Failure::io(&format!("cannot write {}", folder.display()), &e))?;
    let key_id = key.public().id();
    let lines = [format!("private key: {}", private.display()), format!("public key:  {}", public.display())];
    context.report(&Keys { private, public, key_id }, lines, &key_id.to_string())
}

fn with_pub(path: &Path) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(".pub");
    name.into()
}

fn create(path: &Path, mode: u32, text: &str) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::io(&format!("cannot write {}", path.display()), &e);
    let mut file: File = OpenOptions::new().write(true).create_new(true).mode(mode).open(path).map_err(failed)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.map_err(|error| {
        drop(std::fs::remove_file(path));
        failed(error)
    })
}

pub async fn run(context: &mut Context, args: Signing) -> Result<(), Failure> {
    let remote = context.remote(None)?;
    match args.command {
        None => show(context, &remote.signing().await?),
        Some(SigningCommand::Set { file }) => {
            let bytes = read(&file, POLICIES_MAX)?;
            let policies = json::parse::<SigningPolicies>("signing policies", &bytes, POLICIES_MAX);
            let policies = policies.and_then(|policies| policies.check().map(|()| policies));
            let policies = policies.map_err(|error| Failure::usage(error.to_string()).context(&shown(&file)))?;
            show(context, &remote.set_signing(&policies).await?)
        }
    }
}

fn show(context: &mut Context, policies: &SigningPolicies) -> Result<(), Failure> {
    if context.json {
        return context.out.json(policies);
    }
    if policies.policies.is_empty() {
        return context.out.line("no policies");
    }
    let mut table =
        Table::new([Column::left("POLICY").style(Style::Bold), Column::left("REPOSITORIES"), Column::left("TAGS"), Column::left("KEYS")]);
    for policy in &policies.policies {
        let tags = policy.tags.iter().map(Pattern::as_str).collect::<Vec<_>>().join(" ");
        let tags = if tags.is_empty() { "*".to_owned() } else { tags };
        let keys = policy.keys.iter().map(|key: &PublicKey| key.id().short()).collect::<Vec<_>>().join(" ");
        table.row([policy.name.clone(), policy.repositories.to_string(), tags, keys]);
    }
    context.out.table(&table)
}
