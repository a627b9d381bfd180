//! The audit log: which caller changed what, and which was refused.
//!
//! ```text
//! request ─▶ Trail ─▶ Access: caller, domain, repository ─▶ work that is no transaction: its record, then the work
//!                       │                                 └▶ change: its record, in the transaction of the change
//!                       └▶ refused, or failed: its record, then the answer; repeated ones are counted
//! table audit_log of each domain ─▶ GET /v1/audit
//!                                └▶ AuditFile, which follows all domains
//! ```
//!
//! The table is the log. A change is never acknowledged without its record, and work never begins
//! without it. A refusal whose record cannot be written is a refusal all the same: it is counted in
//! `pf_audit_missed_records_total`, and the request has its line in the process's log. Decision 50
//! has the reasons.

mod file;
mod operations;
mod repeats;

pub(crate) use file::AuditFile;

use crate::auth::{KnownCaller, Target};
use crate::config::Config;
use crate::domains::{Domain, Domains};
use crate::metrics::AUDIT_MISSED;
use crate::problem::ApiError;
use crate::reload::Reload;
use crate::routes;
use axum::extract::{FromRequestParts as _, RawPathParams};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use axum::response::Response;
use operations::{Operation, Operations, When};
use parking_lot::Mutex;
use pfr_schema::api::{AuditOutcome, AuditRecord};
use pfr_schema::{Digest, DomainName, ErrorCode, RepositoryName, Tag};
use pfr_service::problem;
use pfr_service::task::Task;
use pfr_store::{AuditEntry, Budget, Error, Freeing};
use repeats::{Pending, Repeats};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// How long the answer to a refused request waits for its record.
const PATIENCE: Duration = Duration::from_secs(5);
/// Errors of requests that had no turn: nothing was tried.
const TURNED_AWAY: [ErrorCode; 3] = [ErrorCode::RateLimited, ErrorCode::Overloaded, ErrorCode::Timeout];
/// How often it is looked whether something was counted for a minute.
const LOOK: Duration = Duration::from_secs(10);

/// What all requests share.
pub(crate) struct Audit {
    operations: Operations,
    /// Whether reads are recorded.
    reads: bool,
    repeats: Repeats,
    /// A record may have been written, or the operator asks for the file to be opened again.
    written: Notify,
}

impl Audit {
    pub(crate) fn new(config: &Config) -> Arc<Self> {
        let operations = Operations::of(routes::DOCUMENT, routes::actions_of_others());
        Arc::new(Self { operations, reads: config.audit_reads, repeats: Repeats::default(), written: Notify::new() })
    }

    /// Writes what was counted, every minute, and the rest at the end.
    pub(crate) async fn run(&self, domains: &Domains, stopping: &Budget) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = stopping.used_up() => {}
            }
            let is_last = stopping.is_used_up();
            for pending in self.repeats.due(is_last) {
                self.write(domains, pending).await;
            }
            if is_last {
                return;
            }
        }
    }

    /// Writes the record of a refusal or a failure. If that fails, it is missed.
    async fn write(&self, domains: &Domains, pending: Pending) {
        let Pending { domain, mut entry } = pending;
        let operation = entry.record.operation.clone();
        let adding = async {
            let log = match domains.get(&domain).await {
                Ok(domain) => domain.store.clone(),
                // The log of the default domain has it for the operators of the registry: those of
                // that one domain must not learn from it what there is, or is not, in another.
                Err(_) => {
                    entry.of_registry = true;
                    domains.default_domain().store.clone()
                }
            };
            log.metadata().add_audit_record(entry).await
        };
        let added = tokio::time::timeout(PATIENCE, adding).await;
        let reason = match added {
            Ok(Ok(())) => return self.written.notify_one(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {PATIENCE:?}"),
        };
        metrics::counter!(AUDIT_MISSED).increment(1);
        tracing::warn!(reason, operation, "a refused or failed request is missing in the audit log");
    }
}

impl Reload for Audit {
    /// The file is opened for each batch: it is told to write one.
    fn reload(&self, at_once: bool) {
        if at_once {
            self.written.notify_one();
        }
    }
}

/// What runs for the audit log beside requests.
pub(crate) struct Auditing(Vec<(Budget, Task<()>)>);

impl Auditing {
    /// Begins to write what was counted, and to follow the log in a file if there is to be one.
    pub(crate) fn begin(audit: Arc<Audit>, domains: Domains, file: Option<AuditFile>) -> Self {
        let counting = Budget::default();
        let stopping = counting.clone();
        let mut tasks = vec![(counting, pfr_service::task::spawn(async move { audit.run(&domains, &stopping).await }))];
        if let Some(file) = file {
            let following = Budget::default();
            tasks.push((following.clone(), pfr_service::task::spawn(file.run(following))));
        }
        Self(tasks)
    }

    /// Ends it, when no request is served any more: what was counted is written, and then the file
    /// gets it.
    pub(crate) async fn end(self) {
        for (stopping, task) in self.0 {
            stopping.end();
            if let Err(error) = task.await {
                tracing::error!(%error, "a task of the audit log failed");
            }
        }
    }
}

/// Most characters of a subject.
const SUBJECT: usize = 64;
/// Segments of paths that name a subject.
const SUBJECTS: [&str; 5] = ["domain", "token", "task", "run", "agent"];

/// What a request is about.
#[derive(Clone, Default)]
struct About {
    domain: Option<DomainName>,
    repository: Option<RepositoryName>,
    tag: Option<Tag>,
    digest: Option<Digest>,
    subject: Option<String>,
    /// It is about the registry itself.
    of_registry: bool,
}

/// One request on its way into the audit log. Clones belong to the same request.
#[derive(Clone)]
pub(crate) struct Trail(Arc<Inner>);

struct Inner {
    audit: Arc<Audit>,
    operation: Option<Arc<Operation>>,
    request_id: String,
    from: Option<IpAddr>,
    caller: KnownCaller,
    /// None until the caller is known.
    about: Mutex<Option<About>>,
    /// Whether its access has been asked for.
    is_counted: AtomicBool,
}

impl Trail {
    /// The trail of a request to a route.
    pub(crate) fn new(
        audit: &Arc<Audit>,
        method: &Method,
        route: &str,
        request_id: &str,
        from: Option<IpAddr>,
        caller: KnownCaller,
    ) -> Self {
        let operation = audit.operations.find(method.as_str(), route);
        let (audit, request_id, about, is_counted) = (Arc::clone(audit), request_id.to_owned(), Mutex::default(), AtomicBool::default());
        Self(Arc::new(Inner { audit, operation, request_id, from, caller, about, is_counted }))
    }

    /// The trail of a request.
    ///
    /// # Errors
    /// None: every request has one.
    pub(crate) fn of(parts: &Parts) -> Result<Self, ApiError> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| ApiError::internal("a request without a trail"))
    }

    /// The source address of the request.
    pub(crate) fn source(&self) -> Option<IpAddr> {
        self.0.from
    }

    /// Whether the access of this request is asked for the first time. A layer in front of a
    /// handler may ask before the handler does: that is one request all the same.
    pub(crate) fn is_first(&self) -> bool {
        !self.0.is_counted.swap(true, Ordering::Relaxed)
    }

    /// Notes which snapshot the request of a known caller is about, where its path does not say.
    pub(crate) fn is_about(&self, snapshot: Digest) {
        if let Some(about) = self.0.about.lock().as_mut() {
            about.digest = Some(snapshot);
        }
    }

    /// Notes what the request of a known caller is about.
    pub(crate) async fn about(&self, parts: &mut Parts, domain: &DomainName, target: Target<'_>) {
        let segments = RawPathParams::from_request_parts(parts, &()).await.ok();
        let segment = |name: &str| segments.as_ref().and_then(|all| all.iter().find(|(found, _)| *found == name)).map(|(_, text)| text);
        let is_harmless = |text: &&str| text.len() <= SUBJECT && text.bytes().all(|byte| byte.is_ascii_graphic());
        let of_registry = matches!(target, Target::Registry);
        let repository = match target {
            Target::Repository(repository) => Some(repository.clone()),
            _ => None,
        };
        *self.0.about.lock() = Some(About {
            domain: (!of_registry).then(|| domain.clone()),
            repository,
            tag: ["tag", "reference"].into_iter().find_map(segment).and_then(|text| text.parse().ok()),
            digest: ["ref", "reference", "digest"].into_iter().find_map(segment).and_then(|text| text.parse().ok()),
            subject: SUBJECTS.into_iter().find_map(segment).filter(is_harmless).map(str::to_owned),
            of_registry,
        });
    }

    /// The caller may do what it asks for: records it, if it is not recorded together with what it
    /// does.
    ///
    /// # Errors
    /// Those of the store; the work must not begin then.
    pub(crate) async fn begin(&self, domain: &Domain) -> Result<(), ApiError> {
        let wanted = match self.0.operation.as_deref().map(|operation| operation.when) {
            Some(When::Before) => true,
            Some(When::IfReads) => self.0.audit.reads,
            _ => false,
        };
        if !wanted {
            return Ok(());
        }
        let entry = self.entry(AuditOutcome::Begun, None);
        let metadata = domain.store.metadata();
        let added = match metadata.add_audit_record(entry.clone()).await {
            // Work for operators: a collection must be possible on a full disk.
            Err(Error::Full(_)) => {
                let _room = metadata.make_room(Freeing::Deletion).await?;
                metadata.add_audit_record(entry).await
            }
            added => added,
        };
        added?;
        self.0.audit.written.notify_one();
        Ok(())
    }

    /// The entry of a change that its transaction writes: `status` is that of its answer,
    /// `if_there` that of the answer if nothing had to be made.
    pub(crate) fn change(&self, status: u16, if_there: Option<u16>) -> AuditEntry {
        let entry = self.entry(AuditOutcome::Done, Some(status));
        let about = (entry.record.domain.as_ref(), entry.record.repository.as_ref());
        let overrides = about.0.zip(about.1).is_some_and(|(domain, repository)| self.0.caller.caller().administers(domain, repository));
        AuditEntry { status_if_there: if_there, overrides, ..entry }
    }

    fn entry(&self, outcome: AuditOutcome, status: Option<u16>) -> AuditEntry {
        let inner = &*self.0;
        let About { domain, repository, tag, digest, subject, of_registry } = inner.about.lock().clone().unwrap_or_default();
        let caller = inner.caller.caller();
        let record = AuditRecord {
            operation: inner.operation.as_deref().map(|operation| operation.id.clone()).unwrap_or_default(),
            action: inner.operation.as_deref().map(|operation| operation.action.to_owned()).unwrap_or_default(),
            outcome,
            status,
            token: caller.id().map(str::to_owned),
            label: caller.label().filter(|label| caller.id() != Some(*label)).map(str::to_owned),
            token_domain: caller.domain().cloned(),
            from: inner.from.map(|address| address.to_string()),
            request_id: Some(inner.request_id.clone()),
            domain,
            repository,
            tag,
            digest,
            subject,
            ..AuditRecord::default()
        };
        AuditEntry { record, status_if_there: None, of_registry, overrides: false }
    }

    /// The request is answered: records a refusal for lack of permission, a change or work that
    /// failed or came too early for a limit, and an upload beyond a quota.
    pub(crate) async fn close(&self, domains: &Domains, ending: Ending) {
        let inner = &*self.0;
        let Some(operation) = &inner.operation else { return };
        let Ending { status, code, is_hidden } = ending;
        if !status.is_client_error() && !status.is_server_error() {
            if operation.when == When::InTransaction {
                inner.audit.written.notify_one();
            }
            return;
        }
        let (is_known, is_limited) = (inner.about.lock().is_some(), code == ErrorCode::RateLimited);
        let changes = matches!(operation.when, When::InTransaction | When::Before);
        // A limit refuses changes. It also hides the refusals of a caller without a valid token
        // that is refused too often: these are refusals for lack of permission.
        let lacks_permission =
            matches!(code, ErrorCode::Unauthorized | ErrorCode::Denied | ErrorCode::TagImmutable | ErrorCode::SignatureRequired);
        let is_refusal = is_hidden || lacks_permission || (is_limited && (changes || !is_known));
        // A request that was turned away before anything was tried is no failed change.
        let has_failed = is_known && ((changes && !TURNED_AWAY.contains(&code)) || code == ErrorCode::QuotaExceeded);
        if operation.when == When::Never || !(is_refusal || has_failed) {
            return;
        }
        let outcome = if is_refusal { AuditOutcome::Refused } else { AuditOutcome::Failed };
        let mut entry = self.entry(outcome, Some(status.as_u16()));
        entry.record.code = Some(code.name().to_owned());
        // A caller that is unknown, or is not for the domain that it names, concerns the registry.
        let is_strange = code == ErrorCode::Unauthorized || code == ErrorCode::DomainUnknown;
        entry.of_registry |= is_strange || entry.record.domain.is_none();
        let domain = entry.record.domain.clone().filter(|_| !entry.of_registry).unwrap_or_default();
        let due = inner.audit.repeats.take(Pending { domain, entry });
        if due.is_empty() {
            return;
        }
        // In a task of its own: a client that leaves without reading its answer must not take its
        // record with it.
        let (audit, domains) = (Arc::clone(&inner.audit), domains.clone());
        let writing = pfr_service::task::spawn(async move {
            for pending in due {
                audit.write(&domains, pending).await;
            }
        });
        if let Err(error) = writing.await {
            tracing::error!(%error, "writing a record of the audit log failed");
        }
    }
}

/// How a request ended.
pub(crate) struct Ending {
    status: StatusCode,
    /// Means something for errors only.
    code: ErrorCode,
    /// The answer said that there is no such thing, because the caller may not see it.
    is_hidden: bool,
}

impl Ending {
    pub(crate) fn of(response: &Response) -> Self {
        let failure = response.extensions().get::<problem::ApiError>();
        Self {
            status: response.status(),
            code: failure.map_or(ErrorCode::InvalidRequest, |failure| failure.code),
            is_hidden: failure.is_some_and(|failure| failure.is_hidden),
        }
    }
}

/// The entry of a change that a command on the registry's machine makes.
pub(crate) fn of_command(operation: &str) -> AuditEntry {
    let record = AuditRecord {
        operation: operation.to_owned(),
        action: pfr_schema::Action::Admin.name().to_owned(),
        label: Some("command line".to_owned()),
        ..AuditRecord::default()
    };
    AuditEntry { record, status_if_there: None, of_registry: true, overrides: false }
}

/// The entry of a deletion that a background task of a domain makes.
pub(crate) fn of_task(task: &str, domain: &DomainName) -> AuditEntry {
    let record = AuditRecord {
        operation: task.to_owned(),
        action: pfr_schema::Action::Delete.name().to_owned(),
        label: Some("background task".to_owned()),
        domain: Some(domain.clone()),
        ..AuditRecord::default()
    };
    AuditEntry { record, status_if_there: None, of_registry: false, overrides: false }
}
