//! An array is no object, wherever an object belongs.

use crate::common::{assert_refused, digest};
use pfr_schema::ErrorCode::InvalidDocument;
use pfr_schema::api::{CommitRequest, DigestGroup, ForkRequest, FramesRequest, GcRequest, MissingRequest, MissingResponse, Push};
use pfr_schema::checkpoint::Checkpoint;
use pfr_schema::flat::FlatManifest;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, PageTree};
use pfr_schema::{FormatError, Kind, Limits, json, media_type};
use serde::de::DeserializeOwned;

const NO_OBJECT: &str = "invalid type: an array, expected an object";

fn refused<T: std::fmt::Debug>(result: Result<T, FormatError>, place: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(NO_OBJECT) && error.contains(&format!(" at {place}: ")), "{place}: {error}");
}

#[test]
fn an_array_is_no_document() {
    let limits = Limits::default();
    let config = |text: &str| SnapshotConfig::parse(text.as_bytes(), &limits);
    refused(config("[]"), "$");
    refused(config(r#"[null,null,{},null,null,null,{},[],[],null,null]"#), "$");
    refused(Manifest::parse(b"[2]", &limits), "$");
    refused(PageTree::parse(b"[]", &limits), "$");
    refused(FlatManifest::parse(b"[]", &limits), "$");
    refused(Checkpoint::parse(b"[]", &limits), "$");
}

#[test]
fn an_array_is_no_object_inside_a_document_either() {
    let limits = Limits::default();
    let blob = Document::new(Kind::Blob, b"{}".to_vec());
    let layer = Descriptor::of(media_type::OCTETS, &blob);
    let good = Manifest::snapshot(&blob, vec![layer.clone()], Default::default()).to_document();
    Manifest::parse(&good.bytes, &limits).unwrap();
    let text = String::from_utf8(good.bytes).unwrap();
    let array = format!(r#"["{}","{}",2,{{}}]"#, media_type::OCTETS, layer.digest);
    let object = serde_json::to_string(&layer).unwrap();
    refused(Manifest::parse(text.replace(&object, &array).as_bytes(), &limits), "$.layers[0]");
    let subject = text.replacen('{', &format!(r#"{{"subject":{array},"#), 1);
    refused(Manifest::parse(subject.as_bytes(), &limits), "$.subject");
}

#[test]
fn an_array_is_no_request() {
    fn request<T: DeserializeOwned + std::fmt::Debug>(text: &str) -> Result<T, FormatError> {
        json::parse("request body", text.as_bytes(), u64::MAX)
    }
    let digest = digest("x");
    refused(request::<FramesRequest>(&format!(r#"[["{digest}"]]"#)), "$");
    refused(request::<CommitRequest>(&format!(r#"["{digest}","tag"]"#)), "$");
    refused(request::<ForkRequest>(r#"["latest",2,"p"]"#), "$");
    refused(request::<GcRequest>("[]"), "$");
    refused(request::<MissingRequest>(&format!(r#"{{"groups":[["blob",["{digest}"]]]}}"#)), "$.groups[0]");
    assert_eq!(request::<MissingRequest>(&format!(r#"{{"groups":[{{"kind":"blob","digests":["{digest}"]}}]}}"#)).unwrap().groups.len(), 1);
    assert_eq!(request::<GcRequest>("{}").unwrap(), GcRequest::default());
}

#[test]
fn lists_and_pairs_are_arrays_as_before() {
    let response: pfr_schema::api::MissingResponse = json::parse("answer", br#"{"missing":[[1,2],[5,1]]}"#, 100).unwrap();
    assert_eq!(response.missing, [(1, 2), (5, 1)]);
    let long: Result<Vec<u8>, _> = json::parse("answer", b"[1,2,3]", 3);
    assert!(matches!(long, Err(FormatError::TooLarge { found: 7, limit: 3, .. })));
}

#[test]
fn claims_are_for_those_that_know_them_only() {
    let old = r#"{"id":"x","lease_seconds":1,"max_digests":1,"max_frames_bytes":1}"#;
    assert_eq!(serde_json::from_str::<Push>(old).unwrap().claim_seconds, 0);
    let group = |claim| serde_json::to_string(&DigestGroup { kind: Kind::Blob, digests: vec![], claim }).unwrap();
    assert_eq!(
        (group(None).as_str(), group(Some(0)).as_str()),
        (r#"{"kind":"blob","digests":[]}"#, r#"{"kind":"blob","digests":[],"claim":0}"#)
    );
    let answer = |coming, wait_ms| serde_json::to_string(&MissingResponse { missing: vec![(0, 2)], coming, wait_ms }).unwrap();
    assert_eq!(answer(vec![], None), r#"{"missing":[[0,2]]}"#);
    assert_eq!(answer(vec![(1, 1)], Some(200)), r#"{"missing":[[0,2]],"coming":[[1,1]],"wait_ms":200}"#);
}

#[test]
fn the_time_of_a_capture_is_rfc_3339() {
    let parse = |created: &str| SnapshotConfig::parse(format!(r#"{{"created":"{created}"}}"#).as_bytes(), &Limits::default());
    for good in [
        "2026-11-22T05:00:00Z",
        "2026-11-22t05:00:00.123456789z",
        "2026-11-22T05:00:00+02:00",
        "1969-12-31T23:59:60Z",
        "2024-02-29T00:00:00-00:00",
    ] {
        assert_eq!(parse(good).unwrap().created.as_deref(), Some(good));
    }
    for bad in ["yesterday", "", "2026-11-22", "2026-11-22T05:00:00", "2026-02-29T00:00:00Z", "2026-13-01T00:00:00Z", "1763787600"] {
        let message = format!("snapshot configuration: at $.created: expected an RFC 3339 time such as 2026-01-31T12:00:00Z, found {bad}");
        assert_refused(bad, parse(bad), &message, InvalidDocument);
    }
}
