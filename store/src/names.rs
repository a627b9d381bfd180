//! Changes of tags and snapshots: each is answered only when the journal has every change on which
//! the answer depends.
//!
//! A change is one transaction, and its journal object comes after it. If that object cannot be
//! written, or the process ends in between, the caller gets no answer, repeats the request, and
//! finds its own change. So a refusal waits for the journal as a success does: "the tag is there
//! already" would be wrong for a tag that a rebuild does not bring back.

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{NameChange, Once, PushId};
use crate::room::Freeing;
use pfr_schema::api::{Committed, TagState};
use pfr_schema::{Digest, RepositoryName, Tag};

impl Store {
    /// Makes a change. With `once`, a repeated request gets the answer of the first one, for the
    /// length of a lease.
    ///
    /// # Errors
    /// Those of the change; [`Error::Invalid`] if the session of `once` stands for another request.
    #[boxed]
    pub async fn change_names(&self, repository: &RepositoryName, change: NameChange, once: Option<Once>) -> Result<()> {
        let repository = repository.clone();
        // Until the journal is written.
        let _room = match change {
            NameChange::PutTags { .. } => None,
            NameChange::DeleteTag { .. } | NameChange::DeleteSnapshot { .. } => Some(self.metadata.make_room(Freeing::Deletion).await?),
        };
        let mut signed = None;
        let done = loop {
            let (change, once, audit) = (change.clone(), once.clone(), self.audit_entry());
            let done = self.metadata.change_names(repository.clone(), change, once, self.options.lease, audit, signed.clone()).await;
            if !self.is_signed_after_all(done.as_ref().err(), &mut signed).await? {
                break done;
            }
        };
        self.journaled(done).await
    }

    /// The snapshot that the change named which `once` asks for, if it was made before: to be asked
    /// before the words of a request are resolved, for after the change they may mean something
    /// else.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the session stands for another request.
    #[boxed]
    pub async fn changed_before(&self, repository: &RepositoryName, once: &Once) -> Result<Option<Digest>> {
        match self.metadata.session(once.session.clone()).await {
            Ok(session) => {
                let snapshot = session.was_ended_by(repository, once)?;
                self.flush_journal().await?;
                Ok(snapshot)
            }
            Err(Error::PushUnknown(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// [`Store::commit`] in a session that must be one of `repository`. The same commit again is
    /// answered as the first was.
    ///
    /// # Errors
    /// As [`Store::commit`]; [`Error::PushUnknown`] also if the session belongs to another
    /// repository.
    #[boxed]
    pub async fn commit_in(
        &self,
        repository: &RepositoryName,
        push: &PushId,
        manifest: Digest,
        tag: Option<Tag>,
        if_tag_is: Option<TagState>,
    ) -> Result<Committed> {
        let unknown = || Error::PushUnknown(push.0.clone());
        match self.live_push(repository, push).await {
            Ok(_) => self.commit_as(push, manifest, tag, if_tag_is, None).await,
            Err(Error::PushUnknown(_)) => {
                let session = self.metadata.session(push.clone()).await?;
                let ended = session.ended.filter(|_| session.repository == *repository);
                let done = ended.and_then(|ended| ended.answer_to_commit(&manifest, tag.as_ref())).ok_or_else(unknown)?;
                self.flush_journal().await?;
                Ok(done.of(manifest))
            }
            Err(error) => Err(error),
        }
    }

    /// The outcome of a change of names, when all that it may speak of is in the journal.
    pub(crate) async fn journaled<T>(&self, outcome: Result<T>) -> Result<T> {
        // An unreachable database has not answered about tags and snapshots, and would not answer
        // now.
        if !outcome.as_ref().is_err_and(|error| error.code().status() >= 500) {
            self.flush_journal().await?;
        }
        outcome
    }
}
