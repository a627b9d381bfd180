//! The journal: every change of tags and snapshots, kept beside the packs. With packs and journal,
//! a lost database is rebuilt without the loss of an acknowledged change.
//!
//! Packs alone bring back blobs and nodes. The journal says which of them are snapshots of which
//! repository, and where tags point. An object of the journal is one JSON document, named by a
//! number in it and by the digest of its bytes:
//!
//! ```text
//! journal/<first number>-<sha256>.json                  changes
//! journal/<last number>-<set>-<part>-<sha256>.json      a part of a journal summary
//! ```
//!
//! Numbers order the records; a record may be in several objects. A *journal summary* holds all
//! tags and snapshots, in parts that are numbered from 0; the last part is marked. A rebuild needs
//! one complete summary and the changes after its number. The summary may hold some of these
//! changes already: a change that is replayed twice has the same result.

use crate::digest::Digest;
use crate::error::{FormatError, shorten};
use crate::limits::Limits;
use crate::name::{RepositoryName, Tag};
use serde::{Deserialize, Serialize};

/// First part of every key of the journal.
pub const PREFIX: &str = "journal";
/// Version of the document.
const VERSION: u32 = 1;

/// A change of a tag or of a snapshot.
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
        /// Raw bytes that were new in the domain when it was pushed.
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

/// Identifies a part of a journal summary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Identifies the summary: 32 hexadecimal digits. A later summary has a greater value.
    pub set: String,
    /// The number of the part: from 0, without gaps.
    pub number: u32,
    /// Whether it is the last part of the summary.
    pub end: bool,
}

/// An object of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    version: u32,
    /// Last number in it. A summary replaces all changes up to this number.
    pub last: u64,
    /// The part of a summary that this object is; none if it has changes.
    #[serde(default, rename = "checkpoint", skip_serializing_if = "Option::is_none")]
    pub summary: Option<Part>,
    /// The records, in order.
    pub records: Vec<Numbered>,
}

impl Numbered {
    /// Bytes of the record in an object.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        crate::json::bytes(self).len() as u64 + 1
    }
}

impl Journal {
    /// Bytes of an object besides its records, at most.
    pub const ENVELOPE: u64 = 256;

    /// Changes, in order.
    #[must_use]
    pub fn changes(records: Vec<Numbered>) -> Self {
        Self { version: VERSION, last: records.last().map_or(0, |r| r.seq), summary: None, records }
    }

    /// A part of the summary at `last`. All its records have that number.
    #[must_use]
    pub fn part(last: u64, part: Part, records: Vec<Record>) -> Self {
        let records = records.into_iter().map(|change| Numbered { seq: last, change }).collect();
        Self { version: VERSION, last, summary: Some(part), records }
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
        (self.key(&Digest::sha256(&bytes)).to_string(), bytes)
    }

    fn key(&self, digest: &Digest) -> Key {
        let part = self.summary.as_ref().map(|part| (part.set.clone(), part.number));
        Key { number: if part.is_some() { self.last } else { self.first() }, part, digest: *digest }
    }

    /// Parses the object at `key`.
    ///
    /// # Errors
    /// [`FormatError`] if the bytes are not those that the key names, or no journal.
    pub fn parse(key: &str, bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let named = Key::parse(key)?;
        let found = Digest::sha256(bytes);
        if found != named.digest {
            return Err(FormatError::DigestMismatch { expected: named.digest.to_string(), found: found.to_string() });
        }
        let journal = Self::from_bytes(bytes, limits)?;
        let expected = journal.key(&found);
        if expected != named {
            return Err(fail(format!("it lies at {key:?} and belongs at {expected}")));
        }
        Ok(journal)
    }

    /// Parses an object whose key is not known or not checked.
    ///
    /// # Errors
    /// [`FormatError`] if it is no journal.
    pub fn from_bytes(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let journal: Self = crate::json::parse("journal", bytes, limits.journal_bytes)?;
        if journal.version != VERSION {
            return Err(fail(format!("it has version {}, this program knows {VERSION}: use a newer one", journal.version)));
        }
        match &journal.summary {
            Some(part) => {
                if !is_set(&part.set) {
                    return Err(fail(format!("{:?} is no journal summary's name", shorten(part.set.clone()))));
                }
                if journal.records.iter().any(|r| r.seq != journal.last) {
                    return Err(fail("records of a journal summary have its number".into()));
                }
            }
            None => {
                if journal.records.windows(2).any(|pair| pair[0].seq > pair[1].seq) {
                    return Err(fail("its records are out of order".into()));
                }
                if journal.records.last().map_or(0, |r| r.seq) != journal.last {
                    return Err(fail("its last number is not that of its last record".into()));
                }
            }
        }
        Ok(journal)
    }
}

fn fail(reason: String) -> FormatError {
    FormatError::Journal { reason }
}

fn is_set(set: &str) -> bool {
    set.len() == 32 && set.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// The key of a journal object, parsed. Keys of parts sort by number, summary and part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The first number in an object of changes; the last number of a summary.
    pub number: u64,
    /// The summary and the number of the part, if the object is a part of a summary.
    pub part: Option<(String, u32)>,
    /// Digest of the object's bytes.
    pub digest: Digest,
}

impl Key {
    /// Parses a key.
    ///
    /// # Errors
    /// [`FormatError::Journal`] if no journal object can have this key.
    pub fn parse(key: &str) -> Result<Self, FormatError> {
        let parsed = || {
            let name = key.strip_prefix(PREFIX)?.strip_prefix('/')?.strip_suffix(".json")?;
            let (number, rest) = name.split_once('-')?;
            let (part, hex) = match rest.rsplit_once('-') {
                Some((part, hex)) => {
                    let (set, number) = part.split_once('-')?;
                    (Some((set.to_owned(), number.parse().ok()?)), hex)
                }
                None => (None, rest),
            };
            if part.as_ref().is_some_and(|(set, _)| !is_set(set)) {
                return None;
            }
            let digest = format!("sha256:{hex}").parse().ok()?;
            // Accept only the canonical spelling, because keys are compared as text.
            Some(Self { number: number.parse().ok()?, part, digest }).filter(|parsed| parsed.to_string() == key)
        };
        parsed().ok_or_else(|| fail(format!("{:?} is no key of a journal object", shorten(key.to_owned()))))
    }

    /// The prefix that the keys of all parts of its summary share. None for an object of changes.
    #[must_use]
    pub fn set_prefix(&self) -> Option<String> {
        self.part.as_ref().map(|(set, _)| format!("{PREFIX}/{:020}-{set}-", self.number))
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.part {
            Some((set, part)) => write!(f, "{PREFIX}/{:020}-{set}-{part:010}-{}.json", self.number, self.digest.hex()),
            None => write!(f, "{PREFIX}/{:020}-{}.json", self.number, self.digest.hex()),
        }
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
        fn any_records_read_back(records in proptest::collection::vec((1..5_u64, record()), 0..20), summary in any::<bool>()) {
            let limits = Limits::default();
            let mut seq = 0;
            let numbered: Vec<Numbered> = records
                .into_iter()
                .map(|(step, change)| {
                    seq += step;
                    Numbered { seq, change }
                })
                .collect();
            let bytes: u64 = Journal::ENVELOPE + numbered.iter().map(Numbered::bytes).sum::<u64>();
            let journal = if summary {
                let part = Part { set: format!("{seq:032x}"), number: seq as u32, end: seq % 2 == 0 };
                Journal::part(seq, part, numbered.into_iter().map(|n| n.change).collect())
            } else {
                Journal::changes(numbered)
            };
            let (key, object) = journal.to_object();
            // In a summary, every record has the last number, which may have more digits than the
            // number that was counted.
            prop_assert!(object.len() as u64 <= bytes + 2 * journal.records.len() as u64);
            let bytes = object;
            let parsed = Key::parse(&key).expect("just written");
            prop_assert_eq!(parsed.to_string(), &key[..]);
            prop_assert_eq!(parsed.set_prefix().is_some_and(|prefix| key.starts_with(&prefix)), summary);
            prop_assert_eq!(Journal::parse(&key, &bytes, &limits).expect("just written"), journal);
        }

        #[test]
        fn any_bytes_are_taken_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let key = format!("journal/{:020}-{}.json", 1, Digest::sha256(&bytes).hex());
            prop_assert!(Journal::parse(&key, &bytes, &Limits::default()).is_err());
            drop(Key::parse(&String::from_utf8_lossy(&bytes)));
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
    fn malformed_keys_and_documents_are_refused() {
        let limits = Limits::default();
        let hex = Digest::sha256(b"{}").hex();
        let keys = [
            "journal/1.json".to_owned(),
            format!("journal/1-{hex}.json"),
            format!("other/{:020}-{hex}.json", 1),
            format!("journal/{:020}-{hex}.json#1", 1),
            format!("journal/{:020}-0-{:010}-{hex}.json", 1, 1),
            format!("journal/{:020}-{:032x}-1-{hex}.json", 1, 1),
            format!("journal/{:020}-{:032X}-{:010}-{hex}.json", 1, 0xabc, 1),
            format!("journal/{:020}--{hex}.json", 1),
        ];
        for key in keys {
            let error = Journal::parse(&key, b"{}", &limits).expect_err(&key);
            assert!(error.to_string().contains("is no key"), "{key}: {error}");
        }
        assert!(Journal::parse(&format!("journal/{:020}-{hex}.json", 1), b"{}", &limits).is_err());
        let newer = br#"{"version":9,"last":1,"records":[]}"#;
        assert!(Journal::from_bytes(newer, &limits).expect_err("a newer version").to_string().contains("version 9"));
        let refused = |journal: &Journal, why: &str| {
            let error = Journal::from_bytes(&crate::json::bytes(journal), &limits).expect_err(why);
            assert!(error.to_string().contains(why), "{error}");
        };
        let mut wrong = journal();
        wrong.records.swap(0, 1);
        refused(&wrong, "out of order");
        refused(&Journal { last: 21, ..journal() }, "last number");
        let part = |set: &str| Part { set: set.into(), number: 3, end: true };
        refused(&Journal { summary: Some(part(&"0".repeat(32))), ..journal() }, "have its number");
        refused(&Journal::part(1, part("00"), vec![]), "no journal summary's name");
        assert!(Journal::from_bytes(br#"{"version":1,"last":0,"checkpoint":{"set":"0","number":1},"records":[]}"#, &limits).is_err());
    }

    #[test]
    fn an_object_is_refused_under_another_key() {
        let limits = Limits::default();
        let part = |number| Part { set: "0123456789abcdef".repeat(2), number, end: false };
        let (key, bytes) = Journal::part(7, part(1), vec![]).to_object();
        assert_eq!(key, format!("journal/{:020}-{}-{:010}-{}.json", 7, part(1).set, 1, Digest::sha256(&bytes).hex()));
        assert!(Journal::parse(&key, &bytes, &limits).is_ok());
        let digest = Digest::sha256(&bytes);
        for elsewhere in [
            Key { number: 8, part: Some((part(1).set, 1)), digest },
            Key { number: 7, part: Some((part(1).set, 2)), digest },
            Key { number: 7, part: Some(("f".repeat(32), 1)), digest },
            Key { number: 7, part: None, digest },
        ] {
            let error = Journal::parse(&elsewhere.to_string(), &bytes, &limits).expect_err("another key");
            assert!(error.to_string().contains("belongs at"), "{error}");
        }
    }
}
