//! The API's document is what clients are written against: a change of it is a decision, not an accident.

use std::path::Path;

#[test]
fn the_document_is_the_golden_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi.json");
    let made = pfr_registry::routes::openapi();
    if std::env::var_os("PF_BLESS").is_some() {
        std::fs::write(&path, &made).expect("the golden file can be written");
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    let first =
        made.lines().zip(golden.lines()).position(|(a, b)| a != b).unwrap_or_else(|| made.lines().count().min(golden.lines().count()));
    assert!(
        made == golden,
        "{} differs from what the routes say, first in line {}:\n  golden {:?}\n  made   {:?}\nif that is meant, run with PF_BLESS=1",
        path.display(),
        first + 1,
        golden.lines().nth(first),
        made.lines().nth(first),
    );
}

#[test]
fn every_operation_has_an_id_words_and_its_failures() {
    let document: serde_json::Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("the document is JSON");
    let mut ids = std::collections::BTreeSet::new();
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("operations") {
            let place = format!("{method} {path}");
            let id = operation["operationId"].as_str().unwrap_or_default();
            assert!(!id.is_empty() && ids.insert(id.to_owned()), "{place}: the operation id {id:?} is missing or taken");
            assert!(operation["summary"].as_str().is_some_and(|s| !s.is_empty()), "{place} has no summary");
            let responses = operation["responses"].as_object().expect("responses");
            if path.starts_with("/v1") {
                for status in ["400", "500", "503"] {
                    let problem = &responses[status]["content"]["application/problem+json"]["schema"]["$ref"];
                    assert_eq!(problem, "#/components/schemas/Problem", "{place}: {status} is no problem");
                }
            }
        }
    }
    assert_eq!(ids.len(), 32, "operations: {ids:?}");
}

#[test]
fn references_lead_somewhere() {
    let text = pfr_registry::routes::openapi();
    let document: serde_json::Value = serde_json::from_str(&text).expect("the document is JSON");
    for reference in text.split('"').filter(|word| word.starts_with("#/")) {
        assert!(document.pointer(&reference[1..]).is_some(), "{reference} leads nowhere");
    }
}
