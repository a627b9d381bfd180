//! The failure of a command: an exit code, a message, and a hint for the user.

use super::output::human::{printable, without_passwords};
use super::output::paint::Paint;
use super::suggest::{Advice, Flags, Suggestion};
use pfr_client::json::ErrorDocument;
use pfr_schema::{ErrorCode, FormatError, Reference, RepositoryName, Selector};
use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

/// The reason why a command ended early.
#[derive(Debug)]
pub enum Failure {
    /// The reader of stdout has closed it. The command succeeds.
    BrokenPipe,
    /// The command was interrupted: a message without the word error.
    Interrupted {
        /// Exit code.
        exit: u8,
        /// The message.
        message: String,
    },
    /// An error.
    Error {
        /// The kind, which decides the exit code.
        code: ErrorCode,
        /// The message: what failed, and where.
        message: String,
        /// Advice for the user.
        hint: Option<Advice>,
        /// Whether the same may succeed later.
        retryable: bool,
    },
}

impl Failure {
    /// An error without a hint.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self::Error { code, message: message.into(), hint: None, retryable: code.retryable() }
    }

    /// The command line is wrong: exit code 1.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, message)
    }

    /// A bug: exit code 70.
    pub fn bug(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, message)
    }

    /// An error of a registry, with the code's hint.
    pub fn of_code(code: ErrorCode, message: impl Into<String>) -> Self {
        Self::Error { code, message: message.into(), hint: hint(code), retryable: code.retryable() }
    }

    /// A file or stream failed: a full disk and missing permissions have their own exit codes.
    pub fn io(what: &str, error: &io::Error) -> Self {
        let code = ErrorCode::of_io(error.kind()).unwrap_or(ErrorCode::InvalidRequest);
        Self::Error { code, message: format!("{what}: {error}"), hint: file_hint(code), retryable: code.retryable() }
    }

    /// An end that is no error.
    pub fn interrupted(exit: u8, message: impl Into<String>) -> Self {
        Self::Interrupted { exit, message: message.into() }
    }

    /// Replaces the hint of the code.
    #[must_use]
    pub fn hint(mut self, advice: impl Into<Advice>) -> Self {
        if let Self::Error { hint, .. } = &mut self {
            *hint = Some(advice.into());
        }
        self
    }

    /// Puts a description of the operation before the message.
    #[must_use]
    pub fn context(mut self, what: &str) -> Self {
        if let Self::Error { message, .. } = &mut self {
            *message = format!("{what}: {message}");
        }
        self
    }

    /// Completes the hint with what is known of the reference that the command was about.
    #[must_use]
    pub fn about(mut self, reference: &Reference) -> Self {
        if let Self::Error { code, hint: advice, .. } = &mut self {
            match (*code, &reference.selector) {
                // A registry that does not answer, not the local store.
                (ErrorCode::Unavailable, _) if *advice == hint(ErrorCode::Unavailable) => {
                    if let Some(words) = without_host(reference) {
                        *advice = advice.take().map(|said| said.text(format!("; {words}")));
                    }
                }
                (ErrorCode::SnapshotUnknown, Some(Selector::Tag { tag, back })) if *back > 0 => {
                    let tag = Selector::Tag { tag: tag.clone(), back: 0 };
                    let log = Suggestion::new("log").here().arg(Reference { selector: Some(tag), ..reference.clone() });
                    *advice = Some(log.then(" shows its ancestors, and names a parent that is not in this repository"));
                }
                _ => {}
            }
        }
        self
    }

    /// Completes the commands in the hint with the flags of the command that failed.
    #[must_use]
    pub fn at(mut self, flags: &Flags) -> Self {
        if let Self::Error { hint: Some(hint), .. } = &mut self {
            *hint = hint.render(flags).into();
        }
        self
    }

    /// The process exit code.
    pub fn exit(&self) -> u8 {
        match self {
            Self::BrokenPipe => 0,
            Self::Interrupted { exit, .. } => *exit,
            Self::Error { code, .. } => code.exit_code(),
        }
    }

    /// The error as `--json` gives it.
    pub fn document(&self) -> ErrorDocument {
        let (code, hint, retryable) = match self {
            Self::Error { code, hint, retryable, .. } => (code.name(), hint.as_ref().map(shown), *retryable),
            Self::BrokenPipe | Self::Interrupted { .. } => ("interrupted", None, false),
        };
        ErrorDocument { code, message: self.to_string(), hint, retryable, exit_code: self.exit() }
    }

    /// Writes the message to stderr and gives the exit code.
    pub fn report(&self, json: bool) -> ExitCode {
        let paint = Paint::for_stream(io::stderr().is_terminal());
        let mut stderr = io::stderr().lock();
        // An error here means that stderr is closed, and there is no other place to report that.
        let _ = match self {
            Self::BrokenPipe => Ok(()),
            _ if json => writeln!(stderr, "{}", self.document()),
            Self::Interrupted { message, .. } => writeln!(stderr, "{message}"),
            Self::Error { message, hint, .. } => {
                let hint = hint.as_ref().map(|h| format!("\n  {} {}", paint.bold("hint:"), shown(h))).unwrap_or_default();
                writeln!(stderr, "{} {}{hint}", paint.red("error:"), shown(message))
            }
        };
        ExitCode::from(self.exit())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BrokenPipe => f.write_str("the output was closed"),
            Self::Interrupted { message, .. } | Self::Error { message, .. } => f.write_str(&shown(message)),
        }
    }
}

/// A message or a hint as people and programs may see it.
fn shown(text: &impl fmt::Display) -> String {
    without_passwords(&printable(&text.to_string()))
}

impl From<FormatError> for Failure {
    fn from(error: FormatError) -> Self {
        Self::of_code(error.code(), error.to_string())
    }
}

impl From<pfr_store::Error> for Failure {
    fn from(error: pfr_store::Error) -> Self {
        let code = error.local_code();
        let hint = match code {
            ErrorCode::Unavailable => Some("--store or PF_STORE says where the local store is".into()),
            ErrorCode::Denied => {
                Some("check the owner and the permissions of the store's directory; --store or PF_STORE names another".into())
            }
            ErrorCode::RepositoryUnknown => Some(Suggestion::new("ls").local().then(" lists the repositories there are")),
            ErrorCode::SnapshotUnknown | ErrorCode::TagUnknown => {
                Some(Suggestion::new("ls").local().repository().then(" lists its tags and snapshots"))
            }
            ErrorCode::CorruptStore => Some("pull the snapshot again: that heals the store".into()),
            ErrorCode::StorageFull => Some(full("on the store's disk", |command| command.local(), FREES)),
            code => hint(code),
        };
        Self::Error { code, message: format!("local store: {error}"), hint, retryable: code.retryable() }
    }
}

impl From<pfr_client::Error> for Failure {
    fn from(error: pfr_client::Error) -> Self {
        use pfr_client::{Distrust, Error};
        let (code, message, retryable) = (error.code(), error.to_string(), error.retryable());
        let hint = match error {
            Error::Store(error) => return error.into(),
            Error::TokenOverHttp { .. } => Some(
                "PF_TOKEN_OVER_HTTP=1, or `token-over-http = true` in the configuration file, allows it where the network is trusted"
                    .into(),
            ),
            Error::Certificate { reason: Distrust::Issuer, .. } => {
                Some("--tls-ca FILE, PF_TLS_CA, or `tls-ca` in the configuration file name the certificate of an authority".into())
            }
            // The message says what to do; the registry is up.
            Error::Certificate { .. } => None,
            // The hints of the codes are about the registry.
            Error::NoAgent { .. } => Some(
                "`pf-agent serve` starts one; --agent, PF_AGENT_SOCKET, or `agent` in the configuration file say where its socket is"
                    .into(),
            ),
            Error::AgentGone { .. } => Some(Suggestion::new("engines").agent().then(" says whether it is back; look before you ask again")),
            Error::AgentSilent { .. } => {
                Some("it runs and hangs, or this machine is very busy: its log may say why; engines go on without it".into())
            }
            Error::Agent { .. } => agent_hint(code),
            Error::Io { .. } => file_hint(code),
            Error::Layout { .. } => layout_hint(code),
            // It answered: it is up.
            Error::Registry { .. } if code == ErrorCode::Unavailable => {
                Some("the registry answers, and its log says what it cannot reach; run the same command again in a while".into())
            }
            _ => hint(code),
        };
        Self::Error { code, message, hint, retryable }
    }
}

/// The hint for an error of a file.
fn file_hint(code: ErrorCode) -> Option<Advice> {
    match code {
        ErrorCode::StorageFull => Some("free space on that disk, and run the same command again".into()),
        ErrorCode::Denied => Some("check the owner and the permissions of that path".into()),
        _ => None,
    }
}

/// The hint for an error of a place of exports.
fn layout_hint(code: ErrorCode) -> Option<Advice> {
    match code {
        ErrorCode::Unauthorized => {
            Some("PF_OCI_USERNAME and PF_OCI_PASSWORD, or `docker login`, give the credentials for that registry".into())
        }
        ErrorCode::Denied => Some("the credentials do not permit this there".into()),
        ErrorCode::MissingBlobs | ErrorCode::DigestMismatch | ErrorCode::CorruptFrame | ErrorCode::Truncated => {
            Some("the export is not complete, or damaged: export again; nothing of the snapshot became visible".into())
        }
        ErrorCode::Unavailable | ErrorCode::RateLimited => {
            Some("run the same command again in a while: it transfers what is missing".into())
        }
        _ => None,
    }
}

/// The hint for an error of the capture agent. Its store and its registry are not those of `pf`.
fn agent_hint(code: ErrorCode) -> Option<Advice> {
    match code {
        ErrorCode::Unauthorized => {
            Some("the agent needs a token for its registry: give it PF_AGENT_TOKEN or --token-file, or log in as its user".into())
        }
        // Each command says where the agent looked.
        ErrorCode::RepositoryUnknown | ErrorCode::SnapshotUnknown | ErrorCode::TagUnknown => None,
        ErrorCode::StorageFull => Some("free space on the disk of the agent's store, and run the same command again".into()),
        ErrorCode::Denied => Some("check the owner and the permissions of the agent's data directory".into()),
        ErrorCode::Unavailable => Some("the agent's log says what it cannot reach".into()),
        code => hint(code),
    }
}

/// What a collection does where no reader needs a grace period, or where it does not count.
const FREES: &str = "frees what was deleted";

/// How to free space where snapshots are stored. `collects` says what a collection does there.
fn full(what: &str, scope: impl Fn(Suggestion) -> Suggestion, collects: &str) -> Advice {
    Advice::from(format!("free space {what}: "))
        .run(scope(Suggestion::new("stats")))
        .text(" shows what deleting each snapshot would free, ")
        .run(scope(Suggestion::new("gc")))
        .text(" ")
        .text(collects)
        .text("; then run the same command again")
}

/// The hint for an error of a registry, if there is one.
pub fn hint(code: ErrorCode) -> Option<Advice> {
    Some(match code {
        ErrorCode::RepositoryUnknown => Suggestion::new("ls").then(" lists the repositories there are"),
        ErrorCode::SnapshotUnknown | ErrorCode::TagUnknown => {
            Suggestion::new("ls").repository().then(" lists its tags and snapshots; images are for OCI clients (docs/oci.md)")
        }
        // Of all these codes only this one comes from a local store, too.
        ErrorCode::TagMoved => Suggestion::new("ls")
            .here()
            .repository()
            .then(" shows where the tag is now; run the command again with --if-tag-is and that digest, or with another tag"),
        ErrorCode::TagImmutable => {
            Suggestion::new("retention").then(" shows the policy; on a registry without tokens take its pattern back first")
        }
        ErrorCode::StorageFull => full(
            "on the registry's disk",
            |command| command,
            "collects what was deleted, which leaves the disk when the grace period is over, or at once by `pf-registry gc --grace 0 \
             --data DIR` on the registry's machine",
        ),
        ErrorCode::QuotaExceeded => full("in the domain, or ask the registry's operator for more", |command| command, FREES),
        ErrorCode::Unauthorized => Suggestion::new("login").then(
            " stores a token for this registry; PF_TOKEN, too, is only for the registry of --registry, PF_REGISTRY or the configuration",
        ),
        ErrorCode::EngineUnknown => Suggestion::new("engines").agent().then(" lists the engines of this host"),
        code => text_hint(code)?.into(),
    })
}

/// Hints without a command.
fn text_hint(code: ErrorCode) -> Option<&'static str> {
    Some(match code {
        ErrorCode::InvalidName => "a reference is [[http(s)://]host[:port]/[domains/NAME/]]repository[:tag[~N]|@digest]",
        ErrorCode::DomainUnknown => {
            "an address that ends with /domains/NAME is that domain's; one without it is that of the domain `default`"
        }
        ErrorCode::AmbiguousDigest => "run the same command with one of these digests, or more of its digits",
        ErrorCode::CorruptFrame | ErrorCode::Truncated | ErrorCode::DigestMismatch => {
            "the bytes do not match their digest; nothing of the snapshot became visible"
        }
        ErrorCode::LengthMismatch => "the snapshot's documents do not fit its blobs; nothing of the snapshot became visible",
        ErrorCode::CorruptStore => "push the snapshot again from a good copy: that heals the store",
        ErrorCode::MissingBlobs => "the source is not complete; push from a copy that has every page",
        ErrorCode::SignatureRequired => {
            "push with --sign-key, or sign the snapshot by its digest and put the tag then; a pull needs --verify-key with the signer's public key"
        }
        ErrorCode::PushUnknown => "the upload's lease ended; run the same command again: it sends what is missing",
        ErrorCode::Denied => "the token does not cover this repository or action; ask the registry's operator for one that does",
        ErrorCode::Overloaded | ErrorCode::RateLimited | ErrorCode::Timeout => {
            "run the same command again in a while: it transfers what is missing"
        }
        ErrorCode::Unavailable => {
            "is the registry up? `pf-registry serve --data DIR` starts one; --registry or PF_REGISTRY says where it is"
        }
        ErrorCode::Internal => "this is a bug; please report it with the message above",
        ErrorCode::PayloadHashMismatch | ErrorCode::ValueHashMismatch | ErrorCode::LiveMismatch | ErrorCode::OracleMismatch => {
            "the state is not the one that was captured; the sequence was not started"
        }
        ErrorCode::FingerprintMismatch | ErrorCode::GeometryMismatch | ErrorCode::RankMismatch => {
            "restore into an engine with the same weights, kernels and parallelism"
        }
        ErrorCode::TornCopy | ErrorCode::EngineBusy | ErrorCode::EngineLost => "run the same command again in a while",
        ErrorCode::NoRoom => "free memory or disk on this host and run the same command again; nothing was changed",
        ErrorCode::NotExact => "take the snapshot without asking for exactness, or turn off what cannot be recorded",
        ErrorCode::SequenceUnknown => "--sequence takes one of the names above; an engine has sequences while it works on requests",
        _ => return None,
    })
}

/// How to write the repository if the host of a reference was meant as a part of its name.
pub fn without_host(reference: &Reference) -> Option<String> {
    let (_, host) = reference.registry.as_deref()?.split_once("://")?;
    let name: RepositoryName = host.parse().ok()?;
    Some(format!("if {name} is a part of the repository's name, write /{name}/…"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_may_be_a_part_of_the_name_is_told_from_one_that_may_not() {
        let said = |text: &str| without_host(&text.parse().unwrap());
        assert_eq!(said("my.team/agent:x").as_deref(), Some("if my.team is a part of the repository's name, write /my.team/…"));
        for other in ["my.team:80/agent:x", "/my.team/agent:x", "team/agent:x"] {
            assert_eq!(said(other), None, "{other}");
        }
    }

    #[test]
    fn every_code_ends_in_a_documented_exit_code() {
        for code in ErrorCode::ALL {
            let exit = Failure::of_code(*code, "x").exit();
            assert!([1, 3, 4, 5, 6, 7, 8, 70].contains(&exit), "{code} exits {exit}");
        }
    }

    #[test]
    fn a_closed_pipe_is_success_and_ctrl_c_is_130() {
        assert_eq!(Failure::BrokenPipe.exit(), 0);
        assert_eq!(Failure::interrupted(130, "interrupted").exit(), 130);
    }

    #[test]
    fn context_keeps_code_and_hint() {
        let failure = Failure::of_code(ErrorCode::TagMoved, "tag x is elsewhere").context("push");
        let document = failure.document();
        assert_eq!((failure.exit(), document.message.as_str()), (3, "push: tag x is elsewhere"));
        assert!(document.hint.is_some());
    }

    #[test]
    fn as_json_an_error_has_code_message_hint_retryable_and_exit_code() {
        let flags = Flags { registry: Some("http://r:1".into()), ..Flags::default() };
        let document = Failure::of_code(ErrorCode::RepositoryUnknown, "no \x1b such").at(&flags).document().to_string();
        let value: serde_json::Value = serde_json::from_str(&document).unwrap();
        let hint = "`pf ls --registry http://r:1` lists the repositories there are";
        let expected = serde_json::json!({
            "code": "repository_unknown", "message": "no \\u{1b} such", "hint": hint, "retryable": false, "exit_code": 5,
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn an_error_says_whether_the_same_may_succeed_later() {
        let retryable = |failure: Failure| failure.document().retryable;
        assert!(retryable(pfr_client::Error::Unreachable { url: "https://h".into(), reason: "reset".into(), attempts: 6 }.into()));
        assert!(retryable(Failure::of_code(ErrorCode::Overloaded, "x")));
        // Of the same kind, but the answer says more than the code does.
        let foreign = |status| pfr_client::Error::Foreign { url: "https://h".into(), status, found: "HTML".into() };
        assert_eq!([503, 501].map(|status| retryable(foreign(status).into())), [true, false]);
        let gone = pfr_client::Error::AgentGone { socket: "/s".into(), reason: "reset".into() };
        assert!(!retryable(gone.into()) && !retryable(Failure::usage("x")) && !retryable(Failure::interrupted(130, "x")));
        assert!(retryable(pfr_client::Error::AgentSilent { socket: "/s".into(), limit: std::time::Duration::from_secs(30) }.into()));
    }

    #[test]
    fn a_host_that_does_not_answer_may_be_a_part_of_the_name() {
        let said = |failure: Failure, reference: &str| failure.about(&reference.parse().unwrap()).document().hint.unwrap();
        let away = || pfr_client::Error::Unreachable { url: "https://my.team".into(), reason: "no such host".into(), attempts: 1 };
        let hint = said(away().into(), "my.team/agent:x");
        assert!(
            hint.contains("is the registry up?") && hint.ends_with("; if my.team is a part of the repository's name, write /my.team/…")
        );
        assert!(!said(away().into(), "team/agent:x").contains("part of"), "no host is in the reference");
        let store = pfr_store::Error::Unavailable { what: "packs", reason: "gone".into() };
        assert!(!said(store.into(), "my.team/agent:x").contains("part of"), "the local store has no host");
    }

    #[test]
    fn a_registry_that_answers_is_up() {
        let problem = Box::new(pfr_schema::api::Problem::new(ErrorCode::Unavailable, "the registry cannot reach its packs"));
        let failure = Failure::from(pfr_client::Error::Registry { problem }).about(&"my.team/agent:x".parse().unwrap());
        let hint = failure.document().hint.unwrap();
        assert!(hint.starts_with("the registry answers") && !hint.contains("is the registry up?") && !hint.contains("part of"), "{hint}");
    }

    #[test]
    fn no_message_and_no_hint_shows_a_password() {
        let url = "http://me:hush@h/x";
        let failure = Failure::usage(format!("found {url}")).hint(Suggestion::new("ls").arg("--registry").arg(url).then(" lists it"));
        let document = failure.document();
        assert_eq!(document.message, "found http://h/x");
        assert_eq!(document.hint.unwrap(), "`pf ls --registry http://h/x` lists it");
    }

    #[test]
    fn a_full_disk_and_missing_permissions_have_their_own_exit_codes() {
        let exit = |kind: io::ErrorKind| Failure::io("cannot write x", &kind.into()).exit();
        assert_eq!([exit(io::ErrorKind::StorageFull), exit(io::ErrorKind::QuotaExceeded)], [8, 8]);
        assert_eq!([exit(io::ErrorKind::PermissionDenied), exit(io::ErrorKind::ReadOnlyFilesystem)], [6, 6]);
        assert_eq!([exit(io::ErrorKind::NotFound), exit(io::ErrorKind::Other)], [5, 1]);
    }

    #[test]
    fn space_is_freed_where_it_is_missing() {
        let flags = Flags { registry: Some("http://r:1".into()), store: Some("/s".into()), ..Flags::default() };
        let hint = |failure: Failure| failure.at(&flags).document().hint.unwrap();
        let local = hint(pfr_store::Error::Full("x".into()).into());
        assert!(local.contains("`pf stats --local --store /s`") && local.contains("`pf gc --local --store /s`"), "{local}");
        let remote = hint(Failure::of_code(ErrorCode::StorageFull, "x"));
        assert!(remote.contains("`pf stats --registry http://r:1`") && remote.contains("`pf gc --registry http://r:1`"), "{remote}");
        assert!(remote.contains("grace period") && !local.contains("grace period"), "{remote} {local}");
        let quota = hint(Failure::of_code(ErrorCode::QuotaExceeded, "x"));
        assert!(quota.starts_with("free space in the domain") && quota.contains("`pf stats --registry http://r:1`"), "{quota}");
        let full = pfr_client::Error::Io { action: "write", path: "/out".into(), source: io::ErrorKind::StorageFull.into() };
        assert!(!hint(full.into()).contains('`'), "neither frees space for a directory");
    }
}
