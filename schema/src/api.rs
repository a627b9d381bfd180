//! Requests and responses of `/v1`, as JSON. `docs/protocol.md` tells how they follow each other.

use crate::digest::Digest;
use crate::error::ErrorCode;
use crate::kind::Kind;
use crate::name::{DomainName, RepositoryName, Tag};
use crate::snapshot::{Manifest, SnapshotConfig};
use crate::tree::PageTree;
use serde::{Deserialize, Serialize};

// Requests refuse fields they do not know: a misspelt condition must not be ignored. Answers may
// grow.
macro_rules! api {
    ($($(#[$meta:meta])* pub struct $name:ident { $($(#[$field_meta:meta])* pub $field:ident: $type:ty,)* })*) => {
        $(#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        $(#[$meta])*
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* })*
    };
}

#[cfg(feature = "openapi")]
mod openapi {
    //! Validated names are strings on the wire.
    use super::{Digest, DomainName, RepositoryName, Tag, TagState};
    use crate::name::Selector;
    use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, SchemaType, Type};
    use utoipa::openapi::{RefOr, Schema};
    use utoipa::{PartialSchema, ToSchema};

    fn string(pattern: &str, example: &str) -> ObjectBuilder {
        ObjectBuilder::new().schema_type(SchemaType::Type(Type::String)).pattern(Some(pattern)).examples([example])
    }
    macro_rules! string_schema {
        ($type:ty, $pattern:expr, $example:literal $(, $bound:ident = $number:literal)*) => {
            impl PartialSchema for $type {
                fn schema() -> RefOr<Schema> {
                    string($pattern, $example)$(.$bound(Some($number)))*.into()
                }
            }
            impl ToSchema for $type {}
        };
    }
    string_schema!(
        Digest,
        "^(sha256|blake3):[0-9a-f]{64}$|^sha512:[0-9a-f]{128}$",
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    );
    string_schema!(
        TagState,
        "^absent$|^(sha256|blake3):[0-9a-f]{64}$|^sha512:[0-9a-f]{128}$",
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    );
    string_schema!(
        Selector,
        concat!(
            "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(~(100000|[0-9]{0,5}))?$",
            "|^@[0-9a-f]{6,128}$|^@?(sha256|blake3):[0-9a-f]{6,64}$|^@?sha512:[0-9a-f]{6,128}$"
        ),
        "latest~2"
    );
    string_schema!(Tag, "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$", "latest");
    string_schema!(
        RepositoryName,
        r"^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*$",
        "team/agent",
        min_length = 1,
        max_length = 255
    );
    string_schema!(DomainName, "^[a-z0-9]+((_|__|-+)[a-z0-9]+)*$", "acme", min_length = 1, max_length = 40);

    /// Two numbers. As a list of a fixed length it means the same as `prefixItems` does, and older
    /// tools understand it too.
    pub(super) struct Pair;

    impl PartialSchema for Pair {
        fn schema() -> RefOr<Schema> {
            let number = ObjectBuilder::new().schema_type(SchemaType::Type(Type::Integer)).minimum(Some(0));
            ArrayBuilder::new().items(number).min_items(Some(2)).max_items(Some(2)).description(Some("Two numbers.")).into()
        }
    }
    impl ToSchema for Pair {}
}

api! {
    /// An error, RFC 9457.
    pub struct Problem {
        /// Reference to the code's documentation.
        pub r#type: String,
        /// The code's meaning in a few words.
        pub title: String,
        /// HTTP status.
        pub status: u16,
        /// What happened, where, and what to do.
        pub detail: String,
        /// One of a closed set.
        pub code: ErrorCode,
        /// Whether trying the same again can help.
        pub retryable: bool,
        /// Blobs that a node lists and the registry lacks (the first few).
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub missing: Vec<Digest>,
        /// The request's id, as in the server's log.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub request_id: Option<String>,
    }

    /// A push session: a lease on everything it asks about or uploads.
    pub struct Push {
        /// The session's id.
        pub id: String,
        /// Seconds until the lease ends unless the session is used; each use renews it.
        pub lease_seconds: u64,
        /// Most digests in one `missing` or `frames` request.
        pub max_digests: u64,
        /// Bytes of frames that one request should carry at most. A single larger blob is allowed.
        pub max_frames_bytes: u64,
    }

    /// Digests to be read as one kind.
    #[serde(deny_unknown_fields)]
    pub struct DigestGroup {
        /// The kind.
        pub kind: Kind,
        /// The digests.
        pub digests: Vec<Digest>,
    }

    /// Which of these does the registry lack?
    #[serde(deny_unknown_fields)]
    pub struct MissingRequest {
        /// Digests, grouped by kind.
        pub groups: Vec<DigestGroup>,
    }

    /// What the registry lacks.
    pub struct MissingResponse {
        /// Positions in the concatenated groups as `[start, count]`, ascending.
        #[cfg_attr(feature = "openapi", schema(value_type = Vec<openapi::Pair>))]
        pub missing: Vec<(u64, u64)>,
    }

    /// What became of uploaded frames. Sent when they are durable.
    pub struct FramesStored {
        /// Frames received.
        pub frames: u64,
        /// Of these, blobs the store did not have.
        pub new: u64,
        /// Payload bytes received.
        pub bytes: u64,
    }

    /// Makes a snapshot visible.
    #[serde(deny_unknown_fields)]
    pub struct CommitRequest {
        /// The manifest, uploaded before.
        pub manifest: Digest,
        /// A tag to point at it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tag: Option<Tag>,
        /// Move the tag only from this state.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub if_tag_is: Option<TagState>,
    }

    /// A snapshot was committed.
    pub struct Committed {
        /// The snapshot.
        pub digest: Digest,
        /// Whether this repository did not have it before.
        pub created: bool,
        /// Raw bytes it reaches. A blob counts once for each node that lists it.
        pub logical_bytes: u64,
        /// Raw bytes that it brought first.
        pub new_bytes: u64,
    }

    /// Is there a snapshot that these tokens can be resumed from?
    #[serde(deny_unknown_fields)]
    pub struct MatchRequest {
        /// Token ids.
        pub tokens: Vec<u32>,
        /// Deployment fingerprint.
        pub fingerprint: Digest,
        /// Tenant salt.
        #[serde(default)]
        pub salt: String,
        /// Adapter (LoRA).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub adapter: Option<String>,
    }

    /// The deepest boundary at which both keys hold.
    pub struct MatchResponse {
        /// The snapshot; absent if there is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub digest: Option<Digest>,
        /// Tokens whose state it gives; 0 if there is none.
        pub boundary: u64,
        /// The nearest that did not match, and why; the deepest first, a few at most.
        pub rejected: Vec<MatchRejected>,
    }

    /// A snapshot that does not match.
    pub struct MatchRejected {
        /// The snapshot.
        pub digest: Digest,
        /// Tokens that agree.
        pub common: u64,
        /// Why not.
        pub reason: String,
    }

    /// One snapshot in a list.
    pub struct SnapshotSummary {
        /// The snapshot.
        pub digest: Digest,
        /// Tags that point at it.
        pub tags: Vec<Tag>,
        /// Its parents.
        pub parents: Vec<Digest>,
        /// Milliseconds since 1970, UTC, of the push.
        pub pushed_at: u64,
        /// Raw bytes it reaches.
        pub logical_bytes: u64,
        /// Raw bytes that it brought first.
        pub new_bytes: u64,
    }

    /// Snapshots of a repository, newest first.
    pub struct SnapshotList {
        /// One page of them.
        pub snapshots: Vec<SnapshotSummary>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }

    /// One snapshot, whole.
    pub struct SnapshotDetail {
        /// As in lists.
        pub summary: SnapshotSummary,
        /// The manifest.
        #[cfg_attr(feature = "openapi", schema(value_type = Object))]
        pub manifest: Manifest,
        /// Its configuration.
        #[cfg_attr(feature = "openapi", schema(value_type = Object))]
        pub config: SnapshotConfig,
        /// Its page trees.
        #[cfg_attr(feature = "openapi", schema(value_type = Vec<Object>))]
        pub trees: Vec<PageTree>,
    }

    /// A snapshot and everything above it in the repository.
    pub struct Lineage {
        /// The snapshot asked for first, then ancestors, nearest first. Parents that are not in the
        /// repository are named only.
        pub snapshots: Vec<SnapshotSummary>,
        /// Whether the repository has more ancestors than are listed.
        pub truncated: bool,
    }

    /// What differs between two snapshots in one group of one rank.
    pub struct GroupDiff {
        /// Group name.
        pub group: String,
        /// Rank.
        pub rank: u32,
        /// Tokens of the longest sequence, in each.
        #[cfg_attr(feature = "openapi", schema(value_type = openapi::Pair))]
        pub tokens: (u64, u64),
        /// Pages in each.
        #[cfg_attr(feature = "openapi", schema(value_type = openapi::Pair))]
        pub pages: (u64, u64),
        /// Pages found in both.
        pub pages_shared: u64,
        /// Raw bytes of blobs only in the first, only in the second.
        #[cfg_attr(feature = "openapi", schema(value_type = openapi::Pair))]
        pub bytes_only: (u64, u64),
        /// Raw bytes of blobs in both.
        pub bytes_shared: u64,
    }

    /// What differs between two snapshots.
    pub struct Diff {
        /// The first.
        pub a: Digest,
        /// The second.
        pub b: Digest,
        /// By group and rank.
        pub groups: Vec<GroupDiff>,
        /// Raw bytes of the other layers (checkpoint tensors, attachments) only in the first, only
        /// in the second.
        #[cfg_attr(feature = "openapi", schema(value_type = openapi::Pair))]
        pub other_bytes_only: (u64, u64),
    }

    /// A tag.
    pub struct TagInfo {
        /// Its name.
        pub name: Tag,
        /// The snapshot it points at.
        pub digest: Digest,
        /// Milliseconds since 1970, UTC, of the last move.
        pub updated_at: u64,
    }

    /// Tags of a repository by name.
    pub struct TagList {
        /// One page of them.
        pub tags: Vec<TagInfo>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }

    /// Points a tag at a snapshot of the same repository.
    #[serde(deny_unknown_fields)]
    pub struct TagRequest {
        /// The snapshot: a tag, `tag~N` or a digest, which may be cut short.
        #[cfg_attr(feature = "openapi", schema(value_type = crate::name::Selector))]
        pub snapshot: String,
        /// Move the tag only from this state; same meaning as `If-Match`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub if_tag_is: Option<TagState>,
    }

    /// Makes tags that point at one snapshot. No bytes move.
    #[serde(deny_unknown_fields)]
    pub struct ForkRequest {
        /// The snapshot: a tag, `tag~N` or a digest, which may be cut short.
        #[cfg_attr(feature = "openapi", schema(value_type = crate::name::Selector))]
        pub snapshot: String,
        /// How many, 1 to 10,000.
        #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 10000))]
        pub count: u32,
        /// Tags are named `<prefix>-1` … `<prefix>-<count>`; existing ones make the request fail as
        /// a whole.
        #[cfg_attr(feature = "openapi", schema(pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,121}$"))]
        pub prefix: String,
    }

    /// Forks made.
    pub struct Forked {
        /// The snapshot they point at.
        pub digest: Digest,
        /// The new tags.
        pub tags: Vec<Tag>,
    }

    /// A domain: repositories that share storage with each other, and with no others.
    pub struct DomainInfo {
        /// Its name.
        pub name: DomainName,
        /// Whether it is being deleted.
        pub state: DomainState,
        /// Milliseconds since 1970, UTC; absent for the default domain.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub created_at: Option<u64>,
        /// When its deletion began, if it did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub deleting_since: Option<u64>,
    }

    /// Domains by name, the default domain first.
    pub struct DomainList {
        /// One page of them.
        pub domains: Vec<DomainInfo>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }

    /// A repository.
    pub struct RepositoryInfo {
        /// Its name.
        pub name: RepositoryName,
        /// Snapshots in it.
        pub snapshots: u64,
        /// Tags in it.
        pub tags: u64,
        /// Milliseconds since 1970, UTC, of the newest push.
        pub updated_at: u64,
    }

    /// Repositories by name.
    pub struct RepositoryList {
        /// One page of them.
        pub repositories: Vec<RepositoryInfo>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }

    /// What one snapshot costs, in raw bytes.
    pub struct SnapshotStats {
        /// Its repository.
        pub repository: RepositoryName,
        /// The snapshot.
        pub digest: Digest,
        /// Tags that point at it.
        pub tags: Vec<Tag>,
        /// Parents.
        pub parents: Vec<Digest>,
        /// Bytes it reaches, each blob once.
        pub logical: u64,
        /// Bytes that it brought first.
        pub new: u64,
        /// Bytes that something else holds as well.
        pub shared: u64,
        /// Bytes that deleting it (and its tags) would free.
        pub exclusive: u64,
    }

    /// How much snapshots share. All in bytes.
    pub struct Stats {
        /// The repository, or none for the whole domain.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub repository: Option<RepositoryName>,
        /// Sum over snapshots of the raw bytes each reaches.
        pub logical: u64,
        /// Raw bytes of what they reach, each blob once.
        pub unique: u64,
        /// Encoded bytes of the same, with frame headers.
        pub stored: u64,
        /// `logical / unique`; 1 if there is nothing.
        pub dedup_ratio: f64,
        /// `unique / stored`; 1 if there is nothing.
        pub codec_ratio: f64,
        /// Bytes of all packs on disk, with what is not or no longer reached; whole domain.
        pub disk: u64,
        /// Snapshots that are counted and not listed.
        #[serde(default)]
        pub omitted: u64,
        /// Snapshots, oldest first; of more than 10,000 the last.
        pub snapshots: Vec<SnapshotStats>,
    }

    /// Blobs to send.
    #[serde(deny_unknown_fields)]
    pub struct FramesRequest {
        /// In the order in which they are to come.
        pub digests: Vec<Digest>,
    }

    /// Where the frames that were asked for lie: together, in this order, they are the stream
    /// without its end mark.
    pub struct FrameLocations {
        /// Seconds after which the URLs are refused. Ask again then.
        pub expires_seconds: u64,
        /// Ranges of objects.
        pub extents: Vec<FrameExtent>,
    }

    /// Frames that lie back to back.
    pub struct FrameExtent {
        /// Where to `GET` them, without the registry's token. Any holder of the URL can read the
        /// object.
        pub url: String,
        /// First byte, for `Range`.
        pub offset: u64,
        /// Bytes.
        pub length: u64,
        /// The blobs, in order. The reader verifies each.
        pub digests: Vec<Digest>,
    }

    /// A snapshot was proven whole: every blob read and hashed, every value hash that can be
    /// computed was.
    pub struct Verified {
        /// The snapshot.
        pub digest: Digest,
        /// Blobs read, nodes included.
        pub blobs: u64,
        /// Raw bytes hashed.
        pub bytes: u64,
        /// Checkpoint tensors whose value hash was computed and is right.
        #[serde(default)]
        pub values_computed: u64,
        /// Checkpoint tensors of an opaque layout: the value hash is their writer's word.
        #[serde(default)]
        pub values_attested: u64,
    }

    /// What a collection freed, and why. Numbers grow while it runs.
    #[derive(Default)]
    pub struct GcReport {
        /// Its id.
        pub id: String,
        /// Why it ran: `schedule`, `command` or `request`.
        pub trigger: String,
        /// Nothing was changed: the numbers say what would be freed.
        pub dry_run: bool,
        /// Milliseconds since 1970.
        pub started_at: u64,
        /// Milliseconds since 1970; none while it runs, or if it was killed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub finished_at: Option<u64>,
        /// Blobs deleted because the snapshots or tags that held them were deleted.
        pub released: u64,
        /// Blobs deleted because they were uploaded and never committed.
        pub unclaimed: u64,
        /// Bytes of their frames.
        pub freed_bytes: u64,
        /// Push sessions that had ended and were forgotten.
        pub sessions: u64,
        /// Packs that nothing points to any more: they wait for the end of the grace period.
        pub packs_emptied: u64,
        /// Packs whose upload never ended: they wait for it too.
        pub packs_abandoned: u64,
        /// Packs whose live frames were copied by compaction: they are emptied.
        pub packs_compacted: u64,
        /// Small packs whose live frames were copied by merging: they are emptied.
        #[serde(default)]
        pub packs_merged: u64,
        /// Bytes of the frames that were copied.
        pub moved_bytes: u64,
        /// Packs whose bytes were deleted: the grace period since they were emptied had passed.
        pub packs_deleted: u64,
        /// Their bytes on storage.
        pub deleted_bytes: u64,
        /// Bytes of emptied packs, which stay on storage for the grace period.
        pub draining_bytes: u64,
        /// When the grace period of the last of them ends: milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub draining_ends_at: Option<u64>,
        /// What no snapshot holds and what stays for now. None for a scheduled run, and while a run
        /// lasts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub protected: Option<Protected>,
        /// Objects of the journal that a journal summary replaced.
        pub journal_deleted: u64,
        /// Snapshots evicted to keep a local store within its size.
        pub evicted: u64,
        /// Nodes that nothing holds and whose children are not known, because their rows cannot be
        /// read: kept for a day, with all below them. `fsck` names them.
        #[serde(default, alias = "parked")] // the name in reports of earlier runs
        pub deferred: u64,
        /// What ended it early.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub error: Option<String>,
    }

    /// Blobs that no snapshot holds and that stay: a push or pull under way leases them.
    #[derive(Default)]
    pub struct Protected {
        /// Blobs.
        pub objects: u64,
        /// Bytes of their frames.
        pub bytes: u64,
        /// When the last of these leases ends, unless it is renewed: milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expires_at: Option<u64>,
        /// The push sessions that hold these leases, at most a hundred. A pull into a local store
        /// is one too.
        pub sessions: Vec<OpenSession>,
    }

    /// A push session that is neither committed nor over.
    pub struct OpenSession {
        /// Its repository.
        pub repository: RepositoryName,
        /// When its lease ends, unless it is used until then: milliseconds since 1970.
        pub expires_at: u64,
    }

    /// What takes up room. The bytes of the rows add up to `disk_bytes`.
    #[derive(Default)]
    pub struct Usage {
        /// All packs on storage.
        pub disk_bytes: u64,
        /// Blobs that snapshots hold.
        pub live_bytes: u64,
        /// Blobs that no snapshot holds and that stay for now.
        pub leased: Protected,
        /// Blobs that no snapshot holds and that the next garbage collection frees.
        pub garbage_bytes: u64,
        /// Room in packs that no blob uses: indexes, and what compaction gives back.
        pub dead_bytes: u64,
        /// Deleted packs that stay for the grace period.
        pub draining_bytes: u64,
        /// When the grace period of the last of them ends: milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub draining_ends_at: Option<u64>,
        /// Packs whose upload has not ended, as far as the storage tells their size.
        pub unfinished_bytes: u64,
        /// How many there are.
        pub unfinished_packs: u64,
        /// When the last of them counts as given up, unless its upload goes on: milliseconds since
        /// 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub unfinished_ends_at: Option<u64>,
        /// Snapshots, over all repositories.
        pub snapshots: u64,
        /// Of these, pinned: eviction leaves them.
        pub pinned: u64,
    }

    /// Runs of collection, newest first.
    pub struct GcRuns {
        /// The runs.
        pub runs: Vec<GcReport>,
        /// Cursor of the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }

    /// Asks for a collection.
    #[derive(Default)]
    #[serde(deny_unknown_fields, default)]
    pub struct GcRequest {
        /// Change nothing, say what would be freed.
        pub dry_run: bool,
    }

    /// A background task of a registry; docs/operations.md lists them.
    pub struct TaskInfo {
        /// Its name.
        pub name: String,
        /// What it does now.
        pub state: TaskState,
        /// Time between the end of a run and the start of the next, about; 0 if it never starts by
        /// itself.
        pub interval_seconds: u64,
        /// Runs of this process that ended.
        pub runs: u64,
        /// Of these, runs that failed.
        pub errors: u64,
        /// Time that runs of this process took, all together.
        pub busy_seconds: f64,
        /// Start of the last run, in milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub started_at: Option<u64>,
        /// End of the last run that succeeded.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub succeeded_at: Option<u64>,
        /// Time that the last run took.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub last_seconds: Option<f64>,
        /// Why the last run failed; none once a run succeeded.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub error: Option<String>,
        /// When the next run is due.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next_run_at: Option<u64>,
        /// End of its pause, if it is paused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub pause_ends_at: Option<u64>,
    }

    /// The background tasks of a registry, as the replica that answers knows them.
    pub struct TaskList {
        /// In the order in which tasks that are due together run.
        pub tasks: Vec<TaskInfo>,
    }

    /// Asks for a pause of a background task.
    #[serde(deny_unknown_fields)]
    pub struct PauseRequest {
        /// How long, from 1 second to 30 days.
        #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 2_592_000))]
        pub seconds: u64,
    }

    /// A blob whose bytes are bad.
    pub struct DamagedBlob {
        /// The blob.
        pub digest: Digest,
        /// What was found.
        pub reason: String,
        /// Snapshots that reach it, as `repository@digest`, at most a hundred. None: it was dead
        /// space, and nothing is lost.
        pub snapshots: Vec<String>,
    }

    /// What a scrub found.
    #[derive(Default)]
    pub struct ScrubReport {
        /// Packs read from their first byte to their last.
        pub packs: u64,
        /// Frames in them.
        pub frames: u64,
        /// Bytes read.
        pub bytes: u64,
        /// Whether every blob was hashed, and not only its checksum compared.
        pub full: bool,
        /// Packs that metadata names and that are not there, or are cut, or whose index is bad;
        /// with what was found.
        pub bad_packs: Vec<String>,
        /// Bad frames that no blob uses any more, in words: what a repair left behind, for example.
        /// Nothing is lost with them.
        #[serde(default)]
        pub dead_frames: Vec<String>,
        /// Packs that could not be read this time, and why: nothing is known of them.
        #[serde(default)]
        pub unread: Vec<String>,
        /// Blobs that are bad, quarantined now or before.
        pub damaged: Vec<DamagedBlob>,
        /// Of these, how many were fetched again from the mirror.
        pub healed: u64,
    }

    /// What a check of the tables found.
    #[derive(Default)]
    pub struct FsckReport {
        /// Objects looked at.
        pub objects: u64,
        /// Nodes read and compared with their rows.
        pub containers: u64,
        /// Packs looked at.
        pub packs: u64,
        /// Differences, in words, at most a thousand.
        pub discrepancies: Vec<String>,
        /// All differences.
        pub wrong: u64,
        /// Whether they were corrected.
        pub repaired: bool,
    }

    /// What was brought back from packs and journal.
    #[derive(Default)]
    pub struct RebuildReport {
        /// Packs taken in.
        pub packs: u64,
        /// Objects that are no complete pack, with what they are; left as they lie.
        pub refused: Vec<String>,
        /// Blobs.
        pub objects: u64,
        /// Nodes.
        pub containers: u64,
        /// Objects of the journal that were read.
        pub journal: u64,
        /// Snapshots that are back.
        pub snapshots: u64,
        /// Tags that are back.
        pub tags: u64,
        /// Snapshots of which something is not there, in words.
        pub lost: Vec<String>,
        /// Other domains that were found on the storage: each is a store to rebuild.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub domains: Vec<DomainName>,
    }
}

/// Whether a domain can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum DomainState {
    /// It can.
    Live,
    /// It cannot: its tables and bytes are being deleted.
    Deleting,
}

/// What a background task does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// It waits for its next run.
    Idle,
    /// It runs.
    Running,
    /// It does not run before its pause ends.
    Paused,
    /// It never starts by itself.
    Off,
}

/// Where a tag should point for an update to happen: at a digest, or nowhere (`"absent"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagState {
    /// The tag does not exist.
    Absent,
    /// The tag points at this snapshot.
    At(Digest),
}

impl std::fmt::Display for TagState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Absent => f.write_str("absent"),
            Self::At(digest) => digest.fmt(f),
        }
    }
}

impl std::str::FromStr for TagState {
    type Err = crate::FormatError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "absent" { Ok(Self::Absent) } else { text.parse().map(Self::At) }
    }
}

impl Serialize for TagState {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TagState {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Problem {
    /// A problem with the code's own title, status and retry rule.
    #[must_use]
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        Self {
            r#type: format!("urn:pf:problem:{code}"),
            title: code.title().into(),
            status: code.status(),
            detail: detail.into(),
            code,
            retryable: code.retryable(),
            missing: Vec::new(),
            request_id: None,
        }
    }
}
