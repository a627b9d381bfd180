//! What a caller may do and see.
//!
//! The unit of secrecy is the domain; a repository is a unit of permission. A caller that may not
//! pull a repository finds neither the repository nor a snapshot of it: not by name, not by digest,
//! not by pushing the digest. Blobs below a snapshot are shared by the repositories of a domain.
//! The digest of such a blob can be learned only from a node that lists it, or from the blob
//! itself.

use crate::audit::Trail;
use crate::domains::Domain;
use crate::jwt::Subject;
use crate::problem::ApiError;
use pfr_schema::api::RepositoryInfo;
use pfr_schema::{AccessScope, Action, Digest, DomainName, ErrorCode, Kind, RepositoryName};
use pfr_store::{AccessTokenRow, Error, LivePush, Page, PushId};
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

/// Repositories read at a time where a caller may not see all of them.
const READ: usize = 1000;

/// The caller of a request.
#[derive(Clone)]
pub(crate) enum Caller {
    /// Any: the registry requires no tokens, or the action is open to all.
    Anyone,
    /// The holder of a valid token.
    Holder(Arc<AccessTokenRow>),
    /// Who the valid token of an issuer is about.
    Subject(Arc<Subject>),
}

/// What a token permits.
#[derive(Clone, Copy)]
struct Grant<'a> {
    /// The only domain in which it does; none for every domain.
    domain: Option<&'a DomainName>,
    scopes: &'a [AccessScope],
}

/// What an action is about.
#[derive(Clone, Copy)]
pub(crate) enum Target<'a> {
    /// A repository.
    Repository(&'a RepositoryName),
    /// All of a domain.
    Domain,
    /// As many repositories of a domain as the caller may.
    Some,
    /// Nothing that is kept from the holder of a token.
    Nothing,
    /// The registry, whatever the domain.
    Registry,
}

impl Caller {
    /// What its token permits; none if it needs no token.
    fn grant(&self) -> Option<Grant<'_>> {
        match self {
            Self::Anyone => None,
            Self::Holder(token) => Some(Grant { domain: token.domain.as_ref(), scopes: &token.scopes }),
            Self::Subject(subject) => Some(Grant { domain: subject.domain.as_ref(), scopes: &subject.scopes }),
        }
    }

    /// Permits or refuses an action.
    ///
    /// # Errors
    /// `domain_unknown` and `repository_unknown` for what the caller may not see, whether or not it
    /// exists. `denied` for what it may see.
    pub(super) fn decide(&self, action: Action, domain: &DomainName, target: Target<'_>) -> Result<(), ApiError> {
        let Some(token) = self.grant() else { return Ok(()) };
        let denied = || ApiError::new(ErrorCode::Denied, format!("the access token does not permit the action {:?} here", action.name()));
        let is_permitted = match target {
            Target::Nothing => true,
            Target::Registry => token.domain.is_none() && token.scopes.iter().any(|scope| scope.permits_everywhere(action)),
            _ if token.domain.is_some_and(|own| own != domain) => return Err(elsewhere(domain, &self.home())),
            Target::Domain => token.scopes.iter().any(|scope| scope.permits_everywhere(action)),
            Target::Some => token.scopes.iter().any(|scope| scope.names(action)),
            Target::Repository(repository) => {
                let permits = |action| token.scopes.iter().any(|scope| scope.permits(action, repository));
                if !permits(action) && !permits(Action::Pull) {
                    return Err(ApiError::from(Error::RepositoryUnknown(repository.clone())).hidden());
                }
                permits(action)
            }
        };
        if is_permitted { Ok(()) } else { Err(denied()) }
    }

    /// Scopes with the repositories that the caller sees; none if it sees all of the domain.
    fn sees_only(&self) -> Option<Vec<&AccessScope>> {
        let token = self.grant()?;
        let pulls: Vec<&AccessScope> = token.scopes.iter().filter(|scope| scope.names(Action::Pull)).collect();
        if pulls.iter().any(|scope| scope.permits_everywhere(Action::Pull)) { None } else { Some(pulls) }
    }

    /// Whether the caller sees every repository of the domain that it was admitted to.
    pub(crate) fn sees_everything(&self) -> bool {
        self.sees_only().is_none()
    }

    /// Whether the caller sees a repository of the domain that it was admitted to.
    pub(crate) fn sees(&self, repository: &RepositoryName) -> bool {
        self.sees_only().is_none_or(|scopes| scopes.iter().any(|scope| scope.permits(Action::Pull, repository)))
    }

    /// Whether the caller may operate a domain.
    pub(crate) fn operates(&self, domain: &DomainName) -> bool {
        self.decide(Action::Admin, domain, Target::Domain).is_ok()
    }

    /// Whether the caller is known to be an administrator of a repository. Without tokens no caller
    /// is.
    pub(crate) fn administers(&self, domain: &DomainName, repository: &RepositoryName) -> bool {
        !matches!(self, Self::Anyone) && self.decide(Action::Admin, domain, Target::Repository(repository)).is_ok()
    }

    /// Whether the caller may operate the registry: its domains and tokens.
    pub(crate) fn operates_registry(&self) -> bool {
        self.decide(Action::Admin, &DomainName::default(), Target::Registry).is_ok()
    }

    /// The public part of its token; of the token of an issuer, its subject and issuer.
    pub(crate) fn id(&self) -> Option<&str> {
        match self {
            Self::Anyone => None,
            Self::Holder(token) => Some(token.id.as_str()),
            Self::Subject(subject) => Some(&subject.name),
        }
    }

    /// The label of its token; of the token of an issuer, its subject and issuer.
    pub(crate) fn label(&self) -> Option<&str> {
        match self {
            Self::Anyone => None,
            Self::Holder(token) => Some(&token.label),
            Self::Subject(subject) => Some(&subject.name),
        }
    }

    /// The only domain that its token is for.
    pub(crate) fn domain(&self) -> Option<&DomainName> {
        self.grant().and_then(|token| token.domain)
    }

    /// A domain that is not hidden from the caller: the one that its token is for, or the default
    /// one.
    pub(crate) fn home(&self) -> DomainName {
        self.domain().cloned().unwrap_or_default()
    }

    /// The repositories of a domain that the caller sees, by name.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn repositories(
        &self,
        domain: &Domain,
        mut after: Option<String>,
        limit: usize,
    ) -> Result<Page<RepositoryInfo>, ApiError> {
        let Some(scopes) = self.sees_only() else { return Ok(domain.store.repositories(after, limit).await?) };
        let mut rows: Vec<RepositoryInfo> = Vec::new();
        // Whole pages are read, so that neither the length of this one nor its cursor tells of a
        // repository that the caller does not see.
        while let Some(start) = skip(&scopes, after.as_deref()) {
            let page = domain.store.repositories(start, READ).await?;
            for row in page.rows {
                if scopes.iter().any(|scope| scope.permits(Action::Pull, &row.name)) {
                    if rows.len() == limit {
                        return Ok(Page { next: rows.last().map(|row| row.name.to_string()), rows });
                    }
                    rows.push(row);
                }
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        Ok(Page { rows, next: None })
    }

    /// Which of these blobs are missing, as [`pfr_store::Store::missing`]: a snapshot that the
    /// caller does not see is.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn missing(&self, domain: &Domain, push: &LivePush, wanted: Vec<(Digest, Kind)>) -> Result<Vec<usize>, ApiError> {
        let hidden = self.hidden(domain, || wanted.iter().map(|(digest, _)| *digest).collect()).await?;
        if hidden.is_empty() {
            return Ok(domain.store.missing(push, wanted).await?);
        }
        // Not asked for, so not leased: a lease is how the commit knows an upload.
        let (mut missing, mut positions, mut seen) = (Vec::new(), Vec::new(), Vec::new());
        for (position, (digest, kind)) in wanted.into_iter().enumerate() {
            if hidden.contains(&digest) {
                missing.push(position);
            } else {
                positions.push(position);
                seen.push((digest, kind));
            }
        }
        missing.extend(domain.store.missing(push, seen).await?.into_iter().map(|at| positions[at]));
        missing.sort_unstable();
        Ok(missing)
    }

    /// Refuses to download a snapshot that the caller does not see, and notes which one.
    ///
    /// # Errors
    /// `blob_unknown`, as for one that is not stored.
    pub(crate) async fn must_see(&self, domain: &Domain, digests: &[Digest], trail: &Trail) -> Result<(), ApiError> {
        let hidden = self.hidden(domain, || digests.to_vec()).await?;
        match digests.iter().find(|digest| hidden.contains(digest)) {
            Some(digest) => {
                trail.is_about(*digest);
                Err(ApiError::from(Error::BlobUnknown { digest: *digest, kind: Kind::Blob }).hidden())
            }
            None => Ok(()),
        }
    }

    /// Refuses to commit a snapshot that the caller neither sees nor uploaded in this session: its
    /// digest alone must not open it.
    ///
    /// # Errors
    /// `blob_unknown`, as for one that is not stored.
    pub(crate) async fn must_have(&self, domain: &Domain, push: &PushId, manifest: Digest) -> Result<(), ApiError> {
        if self.hidden(domain, || vec![manifest]).await?.is_empty() || domain.store.metadata().has_leased(push.clone(), manifest).await? {
            return Ok(());
        }
        Err(ApiError::from(Error::BlobUnknown { digest: manifest, kind: Kind::Manifest }).hidden())
    }

    /// Of these digests, those of snapshots that are in no repository that the caller sees.
    async fn hidden(&self, domain: &Domain, digests: impl FnOnce() -> Vec<Digest>) -> Result<HashSet<Digest>, ApiError> {
        let Some(scopes) = self.sees_only() else { return Ok(HashSet::new()) };
        let places = domain.store.metadata().snapshot_places(digests()).await?;
        let sees = |repository: &RepositoryName| scopes.iter().any(|scope| scope.permits(Action::Pull, repository));
        let (seen, unseen): (Vec<_>, Vec<_>) = places.into_iter().partition(|(_, repository)| sees(repository));
        let seen: HashSet<Digest> = seen.into_iter().map(|(digest, _)| digest).collect();
        Ok(unseen.into_iter().map(|(digest, _)| digest).filter(|digest| !seen.contains(digest)).collect())
    }
}

/// The refusal of a token of one domain in another. It is the same whether or not there is that
/// other one, and tells of the holder's own domain only.
fn elsewhere(domain: &DomainName, own: &DomainName) -> ApiError {
    let address = match *own == DomainName::default() {
        true => "without /domains/NAME at its end".to_owned(),
        false => format!("with /{}/{own} at its end", DomainName::FOLDER),
    };
    let detail = format!(
        "domain {domain} does not exist for this access token, which is for the domain {own}: use the registry's address {address}"
    );
    ApiError::new(ErrorCode::DomainUnknown, detail).hidden()
}

/// Where the list of repositories goes on, at or behind `after`, such that no repository that a
/// scope matches is left out. None: behind all of them.
#[expect(clippy::option_option, reason = "the inner one is a cursor, and none is the beginning of the list")]
fn skip(scopes: &[&AccessScope], after: Option<&str>) -> Option<Option<String>> {
    let at = after.unwrap_or_default();
    let starts = scopes.iter().map(|scope| scope.repositories().literal_start());
    let ahead = starts.filter(|start| *start > at || at.starts_with(start));
    let first = ahead.map(|start| if start > at { before(start) } else { at.to_owned() }).min()?;
    let first = first.max(at.to_owned());
    Some((!first.is_empty()).then_some(first))
}

/// A text that is less than `start`, and not less than any other name that is.
fn before(start: &str) -> String {
    let mut text = start.to_owned();
    match text.pop() {
        // `~` is greater than every character of a name.
        Some(last) => format!("{text}{}~", char::from_u32(u32::from(last).saturating_sub(1)).unwrap_or(' ')),
        None => text,
    }
}

/// Whose token a request carries, for its log line, for the audit log and for the page of a
/// refusal: set once it is known.
#[derive(Clone, Default)]
pub(crate) struct KnownCaller(Arc<OnceLock<Caller>>);

impl KnownCaller {
    pub(super) fn set(&self, caller: &Caller) {
        self.0.get_or_init(|| caller.clone());
    }

    /// The public part of the token; of the token of an issuer, its subject and issuer.
    pub(crate) fn id(&self) -> Option<&str> {
        self.0.get().and_then(Caller::id)
    }

    /// The caller, as far as it is known.
    pub(crate) fn caller(&self) -> Caller {
        self.0.get().cloned().unwrap_or(Caller::Anyone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_skip_what_no_scope_matches_and_nothing_else() {
        let mut names: Vec<&str> =
            vec!["a", "a-b", "a/x", "ab", "b", "b/1", "b/2", "ba", "c-d", "c.d", "c/d", "c0", "c_d", "d", "zz", "zz/1", "0", "9/9"];
        names.sort_unstable();
        for patterns in [&["a/*"][..], &["b*"], &["zz"], &["c/*", "0"], &["*/1"], &["a", "b/2"], &["c*d", "9*"], &["nothing/*"], &["d"]] {
            let scopes: Vec<AccessScope> = patterns.iter().map(|pattern| format!("{pattern}:pull").parse().unwrap()).collect();
            let scopes: Vec<&AccessScope> = scopes.iter().collect();
            let wanted = |name: &str| scopes.iter().any(|scope| scope.repositories().matches(name));
            for page in 1..4 {
                let (mut found, mut after, mut pages) = (Vec::new(), None, 0);
                while let Some(start) = skip(&scopes, after.as_deref()) {
                    assert!(start.as_deref().unwrap_or_default() >= after.as_deref().unwrap_or_default(), "{patterns:?} goes back");
                    let rest: Vec<&str> = names.iter().copied().filter(|name| *name > start.as_deref().unwrap_or_default()).collect();
                    found.extend(rest.iter().take(page).copied().filter(|name| wanted(name)));
                    if rest.len() <= page {
                        break;
                    }
                    after = Some(rest[page - 1].to_owned());
                    pages += 1;
                    assert!(pages < 100, "{patterns:?} does not end");
                }
                let expected: Vec<&str> = names.iter().copied().filter(|name| wanted(name)).collect();
                assert_eq!(found, expected, "{patterns:?} by {page}");
            }
        }
    }
}
