//! Images: manifests and indexes that were pushed by the OCI API, and what lists say of them.
//!
//! An image is a row of `manifests` as a snapshot is one, with the same tags, references, journal
//! and audit log. The lists of snapshots leave it out.

use super::arguments::{at_most, check_artifact_type, cursor, numbered, one_more, paged};
use super::commit::insert_snapshot;
use super::names::{Allowed, Target, lock_with_targets, note, put_tags_at, visible};
use super::quota::Growth;
use super::sessions::{LivePush, close_push, live_push};
use super::snapshots::{find_manifest, used};
use super::sql::{Column, Sql, values};
use super::tx::{Outcome, Tx};
use super::{ManifestName, ManifestRow, NewImage, ObjectId, Page, PushId, SignatureManifest, audit_log, blobs, children, quota};
use crate::error::Error;
use pfr_schema::journal::Record;
use pfr_schema::signature::{ARTIFACT, signed_by, tag_of};
use pfr_schema::{Digest, Kind, RepositoryName, Tag};
use std::collections::{BTreeSet, HashSet};
use std::slice;

pub(super) async fn put(tx: &mut dyn Tx, push: &PushId, image: &NewImage) -> Outcome<bool> {
    let LivePush { repository, name, now, .. } = live_push(tx, push).await?;
    check_artifact_type(image.artifact_type.as_deref())?;
    let digest = image.manifest;
    let unknown = || Error::BlobUnknown { digest, kind: Kind::Image };
    let find = "SELECT id FROM objects WHERE digest = $1";
    let object: ObjectId = tx.first(find, values![&digest]).await?.ok_or_else(unknown)?;
    let before = lock_with_targets(tx, repository, object, &image.moves).await?;
    // Read only now, when a transaction that collected or quarantined it has ended.
    let find = "SELECT o.kind, o.size, o.refs, c.logical_bytes, c.new_bytes, c.children
                FROM objects o JOIN containers c ON c.object = o.id WHERE o.id = $1 AND o.health = 0";
    let row: Option<(Kind, u64, u64, u64, u64, Vec<u8>)> = tx.first(find, values![object]).await?;
    let (kind, size, refs, reach, new, packed) = row.filter(|row| row.0.satisfies(Kind::Image)).ok_or_else(unknown)?;
    let existing = find_manifest(tx, repository, &digest).await?;
    let mut missing = blobs::absent(tx, repository, &children::unpack(&packed)?, &image.manifests).await?;
    let optional: HashSet<&Digest> = image.optional.iter().collect();
    missing.retain(|child| !optional.contains(child));
    if !missing.is_empty() {
        return Err(Error::Missing { container: digest, missing }.into());
    }
    let mut records = Vec::new();
    let manifest = match existing {
        Some((id, _)) => {
            used(tx, id).await?;
            id
        }
        None => {
            let record = Record::Snapshot {
                repository: name.clone(),
                manifest: digest,
                parents: Vec::new(),
                artifact_type: image.artifact_type.clone(),
                subject: image.subject,
                at: now,
                // Only the first repository that has it counts its new bytes.
                new_bytes: if refs == 0 { size.saturating_add(new) } else { 0 },
            };
            let id = insert_snapshot(tx, repository, object, kind, &record, size.saturating_add(reach), None).await?;
            tx.execute("UPDATE manifests SET linked = true WHERE id = $1", values![id]).await?;
            records.push(record);
            id
        }
    };
    let target = Target { manifest, object, digest };
    let allowed = Allowed::new(image.audit.as_ref(), image.signed.as_ref());
    records.extend(put_tags_at(tx, (repository, &name), target, &image.moves, before, allowed).await?);
    close_push(tx, push).await?;
    if existing.is_none() {
        quota::grow(tx, Growth { snapshots: 1, ..Growth::default() }).await?;
    }
    note(tx, &records).await?;
    let (is_new, tags) = (existing.is_none(), image.moves.iter().map(|moved| &moved.tag).collect::<Vec<&Tag>>());
    audit_log::note(tx, image.audit.as_ref(), is_new, |record| audit_log::about_names(record, &name, Some(digest), &tags)).await?;
    Ok(is_new)
}

pub(super) async fn manifest(tx: &mut dyn Tx, repository: &RepositoryName, name: &ManifestName) -> Outcome<Option<ManifestRow>> {
    let row: Option<(i64, Digest, u64)> = match name {
        ManifestName::Digest(digest) => {
            let find = "SELECT m.id, o.digest, o.size FROM objects o JOIN manifests m ON m.object = o.id
                        JOIN repositories r ON r.id = m.repository WHERE o.digest = $1 AND r.name = $2";
            tx.first(find, values![digest, repository]).await?
        }
        ManifestName::Tag(tag) => {
            let find = "SELECT m.id, o.digest, o.size FROM tags t JOIN manifests m ON m.id = t.manifest JOIN objects o ON o.id = m.object
                        JOIN repositories r ON r.id = t.repository WHERE t.name = $1 AND r.name = $2";
            tx.first(find, values![tag, repository]).await?
        }
    };
    Ok(row.map(|(id, digest, size)| ManifestRow { id, digest, size }))
}

/// Images read at a time. Each lists 40,000 blobs at most.
const IMAGES: usize = 100;

/// Snapshots of a repository that its images list: its indexes mostly.
pub(super) async fn listed_snapshots(tx: &mut dyn Tx, repository: &RepositoryName) -> Outcome<Vec<Digest>> {
    let id: Option<i64> = tx.first("SELECT id FROM repositories WHERE name = $1", values![repository]).await?;
    match id {
        Some(id) => listed_in(tx, id).await,
        None => Ok(Vec::new()),
    }
}

async fn listed_in(tx: &mut dyn Tx, repository: i64) -> Outcome<Vec<Digest>> {
    let (mut found, mut after) = (Vec::new(), 0_i64);
    loop {
        let find = "SELECT m.id, c.children FROM manifests m JOIN containers c ON c.object = m.object
                    WHERE m.repository = $1 AND m.id > $2 AND m.is_image ORDER BY m.id LIMIT $3";
        let rows: Vec<(i64, Vec<u8>)> = tx.query(find, values![repository, after, at_most(IMAGES)]).await?;
        let Some((last, _)) = rows.last() else { return Ok(found) };
        after = *last;
        let mut listed: BTreeSet<ObjectId> = BTreeSet::new();
        for (_, packed) in &rows {
            listed.extend(children::unpack(packed)?);
        }
        let find = "SELECT o.digest FROM objects o JOIN manifests m ON m.object = o.id
                    WHERE o.id = ANY($1) AND m.repository = $2 AND NOT m.is_image";
        let listed: Vec<ObjectId> = listed.into_iter().collect();
        found.extend(tx.query::<Digest>(find, values![&listed, repository]).await?);
    }
}

/// Whether an image of a repository lists a snapshot of it, whose object is locked.
pub(super) async fn is_listed(tx: &mut dyn Tx, repository: i64, object: ObjectId, snapshot: &Digest) -> Outcome<bool> {
    // Mostly nothing refers to it but repositories and tags: then no image need be read.
    let more = "SELECT o.refs > (SELECT COUNT(*) FROM manifests m WHERE m.object = o.id)
                  + (SELECT COUNT(*) FROM tags t JOIN manifests m ON m.id = t.manifest WHERE m.object = o.id)
                FROM objects o WHERE o.id = $1";
    let more: bool = tx.one(more, values![object]).await?;
    Ok(more && listed_in(tx, repository).await?.contains(snapshot))
}

/// All tags by name: those of images and those of snapshots.
pub(super) async fn tags(tx: &mut dyn Tx, repository: &RepositoryName, after: Option<&str>, limit: usize) -> Outcome<Page<Tag>> {
    let id = visible(tx, repository).await?;
    let find = "SELECT name FROM tags WHERE repository = $1 AND name > $2 ORDER BY name LIMIT $3";
    let rows: Vec<Tag> = tx.query(find, values![id, cursor(after, "")?, one_more(limit)]).await?;
    Ok(paged(rows, limit, ToString::to_string))
}

pub(super) async fn referrers(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    subject: &Digest,
    artifact_type: Option<&str>,
    after: i64,
    limit: usize,
) -> Outcome<Vec<ManifestRow>> {
    let find = "SELECT m.id, o.digest, o.size FROM manifests m JOIN repositories r ON r.id = m.repository JOIN objects o ON o.id = m.object
                WHERE r.name = $1 AND m.subject = $2 AND ($3 IS NULL OR COALESCE(m.artifact_type, '') = $3) AND m.id > $4 ORDER BY m.id LIMIT $5";
    let rows: Vec<(i64, Digest, u64)> = tx.query(find, values![repository, subject, artifact_type, after, at_most(limit)]).await?;
    Ok(rows.into_iter().map(|(id, digest, size)| ManifestRow { id, digest, size }).collect())
}

/// A manifest with signatures.
pub(super) struct SignatureRow {
    pub manifest: i64,
    pub object: ObjectId,
    pub digest: Digest,
    size: u64,
}

/// The statement that finds the signatures of one subject, by its digest and its tag.
macro_rules! signatures {
    ($subject:literal, $tag:literal) => {
        concat!(
            "SELECT m.id, m.object, o.digest, o.size FROM manifests m JOIN objects o ON o.id = m.object
             WHERE m.is_image AND m.id IN (SELECT s.id FROM manifests s WHERE s.repository = $3 AND s.artifact_type = $4 AND s.subject = ",
            $subject,
            " UNION SELECT t.manifest FROM tags t WHERE t.repository = $3 AND t.name = ",
            $tag,
            ") AND ($6 = false OR (m.artifact_type = $4 AND m.subject = ",
            $subject,
            ") OR (m.subject IS NULL AND (SELECT COUNT(*) FROM tags t WHERE t.manifest = m.id) = 1
                   AND o.refs <= (SELECT COUNT(*) FROM manifests n WHERE n.object = o.id)
                     + (SELECT COUNT(*) FROM tags t JOIN manifests n ON n.id = t.manifest WHERE n.object = o.id)))
             ORDER BY m.id LIMIT $5"
        )
    };
}

/// Manifests with signatures of some subjects, oldest first and at most `limit` of each: those that
/// refer to it, and the one at the tag by which cosign finds them. Any image may be put at that
/// tag. With `only_its_own` it is left out if it is more than signatures: if it has another tag, an
/// index lists it, or it refers to something.
pub(super) async fn signatures_of(
    tx: &mut dyn Tx,
    repository: i64,
    subjects: &[Digest],
    only_its_own: bool,
    limit: usize,
) -> Outcome<Vec<SignatureRow>> {
    const FIND: Sql = Sql::of_each(
        concat!(
            "SELECT f.id, f.object, f.digest, f.size FROM unnest($1::bytea[], $2::text[]) AS u(subject, tag) JOIN LATERAL (",
            signatures!("u.subject", "u.tag"),
            ") f ON true"
        ),
        signatures!("$1", "$2"),
    );
    let tag = |subject: &Digest| tag_of(subject).map_or_else(String::new, |tag| tag.to_string());
    let columns: Vec<Column> = vec![subjects.iter().copied().collect(), subjects.iter().map(tag).collect()];
    let values = values![repository, ARTIFACT, at_most(limit), only_its_own];
    let mut rows: Vec<(i64, ObjectId, Digest, u64)> = tx.rows(FIND, columns, values, false).await?;
    rows.sort_unstable_by_key(|row| row.0);
    Ok(rows.into_iter().map(|(manifest, object, digest, size)| SignatureRow { manifest, object, digest, size }).collect())
}

pub(super) async fn signature_manifests(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    subject: &Digest,
    limit: usize,
) -> Outcome<Vec<ManifestRow>> {
    let id: Option<i64> = tx.first("SELECT id FROM repositories WHERE name = $1", values![repository]).await?;
    let Some(id) = id else { return Ok(Vec::new()) };
    let rows = signatures_of(tx, id, slice::from_ref(subject), false, limit).await?;
    Ok(rows.into_iter().map(|SignatureRow { manifest: id, digest, size, .. }| ManifestRow { id, digest, size }).collect())
}

pub(super) async fn signature_list(
    tx: &mut dyn Tx,
    repository: &RepositoryName,
    after: Option<&str>,
    limit: usize,
) -> Outcome<Page<SignatureManifest>> {
    type Row = (i64, Digest, Option<Digest>, Option<String>);
    let id = visible(tx, repository).await?;
    let find = "SELECT m.id, o.digest, CASE WHEN m.artifact_type = $2 THEN m.subject ELSE NULL END,
                  (SELECT MIN(t.name) FROM tags t WHERE t.manifest = m.id AND t.name LIKE 'sha256-%.sig')
                FROM manifests m JOIN objects o ON o.id = m.object
                WHERE m.repository = $1 AND m.id > $3 AND m.is_image AND ((m.artifact_type = $2 AND m.subject IS NOT NULL)
                  OR EXISTS (SELECT 1 FROM tags t WHERE t.manifest = m.id AND t.name LIKE 'sha256-%.sig'))
                ORDER BY m.id LIMIT $4";
    let listed = |(_, manifest, subject, tag): Row| {
        let by_tag = || signed_by(&tag?.parse().ok()?);
        Some(SignatureManifest { snapshot: subject.or_else(by_tag)?, manifest })
    };
    let mut from = numbered(after, 0)?;
    loop {
        let rows: Vec<Row> = tx.query(find, values![id, ARTIFACT, from, one_more(limit)]).await?;
        let page = paged(rows, limit, |row| row.0.to_string());
        from = page.rows.last().map_or(from, |row| row.0);
        let rows: Vec<SignatureManifest> = page.rows.into_iter().filter_map(listed).collect();
        // A reader takes an empty page that leads to another for a list without an end.
        if !rows.is_empty() || page.next.is_none() {
            return Ok(Page { rows, next: page.next });
        }
    }
}
