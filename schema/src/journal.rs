//! The journal: changes of names, kept beside the packs, so that a lost database loses nothing that was acknowledged.
//!
//! Packs alone bring back blobs and containers; which of them are snapshots of which repository, and where tags point, is said here.
//! An object of the journal is one JSON document, named by the first number in it and by the digest of its bytes:
//! `journal/00000000000000000017-<sha256>.json`. Numbers order the records; a record may lie in several objects. A *checkpoint*
//! holds everything up to its last number, from nothing; what lies before it may be forgotten.

use crate::digest::Digest;
use crate::error::FormatError;
use crate::limits::Limits;
use crate::name::{RepositoryName, Tag};
use serde::{Deserialize, Serialize};

/// First part of every key of the journal.
pub const PREFIX: &str = "journal";
/// Version of the document.
const VERSION: u32 = 1;

/// A change of names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Record {
    /// A manifest became a snapshot of a repository.
    Snapshot {
        /// The repository.
        repository: RepositoryName,
        /// The manifest.
        manifest: Digest,
        /// Parents, in order.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        parents: Vec<Digest>,
        /// `artifactType`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        artifact_type: Option<String>,
        /// Digest of the manifest's subject.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        subject: Option<Digest>,
        /// Milliseconds since 1970.
        at: u64,
        /// Raw bytes that it brought first.
        new_bytes: u64,
    },
    /// A tag was pointed at a snapshot of its repository.
    Tag {
        /// The repository.
        repository: RepositoryName,
        /// The tag.
        tag: Tag,
        /// The snapshot.
        manifest: Digest,
        /// Milliseconds since 1970.
        at: u64,
    },
    /// A tag was deleted.
    Untag {
        /// The repository.
        repository: RepositoryName,
        /// The tag.
        tag: Tag,
    },
    /// A snapshot was deleted, with the tags that pointed at it.
    Delete {
        /// The repository.
        repository: RepositoryName,
        /// The snapshot.
        manifest: Digest,
    },
}

/// A record and its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Numbered {
    /// Its number.
    pub seq: u64,
    /// The change.
    pub change: Record,
}

/// An object of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    version: u32,
    /// Last number in it. A checkpoint holds everything up to here.
    pub last: u64,
    /// Whether it begins from nothing.
    pub checkpoint: bool,
    /// The records, in order.
    pub records: Vec<Numbered>,
}

impl Journal {
    /// Changes, in order.
    #[must_use]
    pub fn changes(records: Vec<Numbered>) -> Self {
        Self { version: VERSION, last: records.last().map_or(0, |r| r.seq), checkpoint: false, records }
    }

    /// Everything up to `last`, from nothing.
    #[must_use]
    pub fn checkpoint(last: u64, records: Vec<Record>) -> Self {
        let records = records.into_iter().map(|change| Numbered { seq: last, change }).collect();
        Self { version: VERSION, last, checkpoint: true, records }
    }

    /// First number in it.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.records.first().map_or(self.last, |r| r.seq)
    }

    /// Its key and its bytes.
    #[must_use]
    pub fn to_object(&self) -> (String, Vec<u8>) {
        let bytes = crate::json::bytes(self);
        let digest = Digest::sha256(&bytes);
        (format!("{PREFIX}/{:020}-{}.json", self.first(), digest.hex()), bytes)
    }

    /// Parses the object at `key`.
    ///
    /// # Errors
    /// [`FormatError`] if the bytes are not those that the key names, or no journal.
    pub fn parse(key: &str, bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let fail = |reason: String| FormatError::Journal { reason };
        let hex = key.rsplit_once('-').and_then(|(_, rest)| rest.strip_suffix(".json"));
        let expected: Digest = hex
            .and_then(|hex| format!("sha256:{hex}").parse().ok())
            .ok_or_else(|| fail(format!("{key:?} is no key of a journal object")))?;
        let found = Digest::sha256(bytes);
        if found != expected {
            return Err(FormatError::DigestMismatch { expected, found });
        }
        let journal: Self = crate::json::parse("journal", bytes, limits.journal_bytes)?;
        if journal.version != VERSION {
            return Err(fail(format!("it has version {}, this program knows {VERSION}: use a newer one", journal.version)));
        }
        if journal.records.windows(2).any(|pair| pair[0].seq > pair[1].seq) || journal.records.iter().any(|r| r.seq > journal.last) {
            return Err(fail("its records are out of order".into()));
        }
        Ok(journal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn journal() -> Journal {
        let (repository, tag): (RepositoryName, Tag) = ("team/agent".parse().expect("a name"), "main".parse().expect("a tag"));
        let manifest = Digest::sha256(b"manifest");
        let at = 1_700_000_000_000;
        let changes = [
            Record::Snapshot {
                repository: repository.clone(),
                manifest,
                parents: vec![Digest::sha256(b"parent")],
                artifact_type: Some("application/x".into()),
                subject: None,
                at,
                new_bytes: 7,
            },
            Record::Tag { repository: repository.clone(), tag: tag.clone(), manifest, at },
            Record::Untag { repository: repository.clone(), tag },
            Record::Delete { repository, manifest },
        ];
        Journal::changes(changes.into_iter().zip(17..).map(|(change, seq)| Numbered { seq, change }).collect())
    }

    fn record() -> impl Strategy<Value = Record> {
        let repository = "[a-z]{1,8}(/[a-z0-9]{1,8})?".prop_map(|name| name.parse::<RepositoryName>().expect("a name"));
        let tag = "[a-z0-9_]{1,12}".prop_map(|tag| tag.parse::<Tag>().expect("a tag"));
        let digest = any::<u64>().prop_map(|n| Digest::sha256(&n.to_le_bytes()));
        let digests = proptest::collection::vec(digest.clone(), 0..4);
        let optional = (proptest::option::of("\\PC{0,12}"), proptest::option::of(digest.clone()));
        prop_oneof![
            (repository.clone(), digest.clone(), digests, optional, any::<u64>(), any::<u64>()).prop_map(
                |(repository, manifest, parents, (artifact_type, subject), at, new_bytes)| {
                    Record::Snapshot { repository, manifest, parents, artifact_type, subject, at, new_bytes }
                }
            ),
            (repository.clone(), tag.clone(), digest.clone(), any::<u64>()).prop_map(|(repository, tag, manifest, at)| Record::Tag {
                repository,
                tag,
                manifest,
                at
            }),
            (repository.clone(), tag).prop_map(|(repository, tag)| Record::Untag { repository, tag }),
            (repository, digest).prop_map(|(repository, manifest)| Record::Delete { repository, manifest }),
        ]
    }

    proptest! {
        #[test]
        fn any_records_read_back(records in proptest::collection::vec((1..5_u64, record()), 0..20), checkpoint in any::<bool>()) {
            let limits = Limits::default();
            let mut seq = 0;
            let numbered: Vec<Numbered> = records
                .into_iter()
                .map(|(step, change)| {
                    seq += step;
                    Numbered { seq, change }
                })
                .collect();
            let journal = if checkpoint {
                Journal::checkpoint(seq, numbered.into_iter().map(|n| n.change).collect())
            } else {
                Journal::changes(numbered)
            };
            let (key, bytes) = journal.to_object();
            prop_assert_eq!(Journal::parse(&key, &bytes, &limits).expect("just written"), journal);
        }

        #[test]
        fn any_bytes_are_taken_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let key = format!("journal/1-{}.json", Digest::sha256(&bytes).hex());
            prop_assert!(Journal::parse(&key, &bytes, &Limits::default()).is_err());
        }
    }

    #[test]
    fn an_object_reads_back_and_any_changed_byte_is_refused() {
        let (key, bytes) = journal().to_object();
        assert!(key.starts_with("journal/00000000000000000017-"), "{key}");
        let limits = Limits::default();
        assert_eq!(Journal::parse(&key, &bytes, &limits).expect("just written"), journal());
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1;
            assert!(Journal::parse(&key, &wrong, &limits).is_err(), "byte {at}");
        }
    }

    #[test]
    fn keys_and_documents_that_are_none_are_refused() {
        let limits = Limits::default();
        assert!(Journal::parse("journal/1.json", b"{}", &limits).is_err());
        let parse = |bytes: &[u8]| Journal::parse(&format!("journal/1-{}.json", Digest::sha256(bytes).hex()), bytes, &limits);
        assert!(parse(b"{}").is_err());
        let newer = br#"{"version":9,"last":1,"checkpoint":true,"records":[]}"#;
        assert!(parse(newer).expect_err("a newer version").to_string().contains("version 9"));
        let mut wrong = journal();
        wrong.records.swap(0, 1);
        assert!(parse(&crate::json::bytes(&wrong)).is_err());
    }
}
