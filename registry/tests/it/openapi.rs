//! The API's document is what clients are written against: a change of it is a decision, not an
//! accident.

use crate::common::Registry;
use pfr_schema::api::{AgentReport, RetentionPolicies, SigningPolicies};
use serde_json::{Value, json};
use std::collections::BTreeSet;
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

#[tokio::test]
async fn the_document_is_served_as_it_is_made() {
    let registry = Registry::start().await;
    let answer = registry.get("/openapi.json").await;
    assert_eq!(answer.headers()["content-type"], "application/json");
    assert!(answer.text().await.expect("text") == pfr_registry::routes::openapi());
}

/// Operations in the table of `docs/protocol.md`: words in backticks such as `GET …/tags/{tag}`.
#[test]
fn the_protocol_page_lists_every_operation_and_no_other() {
    let document: Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("the document is JSON");
    let operations = document["paths"].as_object().expect("paths").iter().flat_map(|(path, item)| {
        item.as_object().expect("operations").keys().map(move |method| format!("{} {path}", method.to_uppercase()))
    });
    let operations: BTreeSet<String> = operations.collect();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/protocol.md");
    let text = std::fs::read_to_string(&page).expect("the page");
    let endpoints = text.split("\n## ").find(|section| section.starts_with("Endpoints\n")).expect("a section of endpoints");
    let rows = endpoints.lines().filter(|line| line.starts_with('|'));
    let words = rows.flat_map(|row| row.split('`').skip(1).step_by(2));
    let listed: BTreeSet<String> = words
        .filter(|word| ["GET ", "PUT ", "POST ", "DELETE "].iter().any(|method| word.starts_with(method)))
        .map(|word| word.replace('…', "/v1/repositories/{repo}"))
        .collect();
    let lacks: Vec<&String> = operations.difference(&listed).collect();
    let more: Vec<&String> = listed.difference(&operations).collect();
    assert!(lacks.is_empty() && more.is_empty(), "{}: lacks {lacks:?}, and has {more:?}, which are no routes", page.display());
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
    assert!(!ids.is_empty());
}

/// What JSON Schema 2020-12, which OpenAPI 3.1 uses, says of a schema's own words. Nested schemas
/// are looked at in their turn.
fn check_schema(schema: &Value, place: &str) {
    let Some(words) = schema.as_object() else {
        assert!(schema.is_boolean(), "{place} is no schema: {schema}");
        return;
    };
    let nested = |word: &str, schema: &Value| check_schema(schema, &format!("{place}/{word}"));
    let types: Vec<&Value> = match words.get("type") {
        Some(Value::Array(types)) => types.iter().collect(),
        one => one.into_iter().collect(),
    };
    for name in types {
        let known = ["null", "boolean", "object", "array", "number", "integer", "string"];
        assert!(known.iter().any(|known| name == known), "{place}: unknown type {name}");
    }
    for (word, value) in words {
        match word.as_str() {
            // A list of schemas was `items` in older drafts.
            "items" | "additionalProperties" | "not" => nested(word, value),
            "prefixItems" | "oneOf" | "anyOf" | "allOf" => {
                let schemas = value.as_array().unwrap_or_else(|| panic!("{place}/{word} is no list"));
                assert!(!schemas.is_empty(), "{place}/{word} is empty");
                schemas.iter().for_each(|schema| nested(word, schema));
            }
            "properties" => value.as_object().expect("properties by name").iter().for_each(|(name, schema)| nested(name, schema)),
            "required" => {
                for name in value.as_array().expect("a list of names") {
                    let name = name.as_str().expect("a name");
                    assert!(words["properties"].get(name).is_some(), "{place} requires {name}, which it does not have");
                }
            }
            "minimum" | "maximum" | "minLength" | "maxLength" | "minItems" | "maxItems" => {
                assert!(value.is_number(), "{place}/{word} is no number: {value}");
            }
            "$ref" | "pattern" | "format" | "description" | "title" => assert!(value.is_string(), "{place}/{word}: {value}"),
            "enum" | "examples" => assert!(value.is_array(), "{place}/{word}: {value}"),
            "type" | "default" | "example" | "const" | "deprecated" => {}
            other => panic!("{place}: {other:?} is no word of OpenAPI 3.1 that is known here"),
        }
    }
    for (least, most) in [("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems")] {
        if let (Some(least), Some(most)) = (words.get(least), words.get(most)) {
            assert!(least.as_f64() <= most.as_f64(), "{place}: {least} to {most}");
        }
    }
}

#[test]
fn the_document_keeps_the_rules_of_openapi_3_1() {
    let document: Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("the document is JSON");
    assert!(document["openapi"].as_str().is_some_and(|version| version.starts_with("3.1.")), "{}", document["openapi"]);
    for (name, schema) in document["components"]["schemas"].as_object().expect("schemas") {
        check_schema(schema, name);
    }
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("operations") {
            let place = format!("{method} {path}");
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            let mut in_path = BTreeSet::new();
            let mut seen = BTreeSet::new();
            for parameter in &parameters {
                let (name, at) = (parameter["name"].as_str().expect("a name"), parameter["in"].as_str().expect("a place"));
                assert!(seen.insert((name, at)), "{place}: {name} twice");
                assert!(["path", "query", "header", "cookie"].contains(&at), "{place}: {name} in {at}");
                if at == "path" {
                    assert_eq!(parameter["required"], true, "{place}: {name}");
                    in_path.insert(name);
                }
                let schema = &parameter["schema"];
                check_schema(schema, &format!("{place} {name}"));
                if schema["type"] == "integer" {
                    assert!(schema["minimum"].is_number() && schema["maximum"].is_number(), "{place}: {name} has no bounds");
                }
            }
            let named: BTreeSet<&str> = path.split('{').skip(1).filter_map(|rest| rest.split('}').next()).collect();
            assert_eq!(in_path, named, "{place}");
            let bodies = operation["requestBody"].get("content").into_iter().chain(
                operation["responses"].as_object().expect("responses").iter().filter_map(|(status, response)| {
                    assert!(status.len() == 3 && response["description"].is_string(), "{place}: {status}");
                    response.get("content")
                }),
            );
            for (kind, body) in bodies.flat_map(|content| content.as_object().expect("bodies by media type")) {
                assert!(kind.contains('/'), "{place}: {kind}");
                if let Some(schema) = body.get("schema") {
                    check_schema(schema, &format!("{place} {kind}"));
                }
            }
        }
    }
}

#[test]
fn the_document_says_the_bounds_that_the_registry_keeps() {
    let document: Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("the document is JSON");
    let schemas = &document["components"]["schemas"];
    assert_eq!((&schemas["RepositoryName"]["minLength"], &schemas["RepositoryName"]["maxLength"]), (&json!(1), &json!(255)));
    assert_eq!(
        (&schemas["ForkRequest"]["properties"]["count"]["minimum"], &schemas["ForkRequest"]["properties"]["count"]["maximum"]),
        (&json!(1), &json!(10_000))
    );
    for name in ["Digest", "Tag", "TagState", "Selector"] {
        assert!(schemas[name]["pattern"].is_string(), "{name} has no pattern");
    }
    let pair = json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2});
    for (word, value) in pair.as_object().expect("words") {
        assert_eq!(&schemas["Pair"][word], value, "{word} of {}", schemas["Pair"]);
    }
}

/// Why a value is not what a schema says; none if it is. Knows the words that `check_schema` does.
fn contradiction(document: &Value, schema: &Value, value: &Value, place: &str) -> Option<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        return contradiction(document, &document.pointer(&reference[1..]).cloned().unwrap_or_default(), value, place);
    }
    let fails = |why: &str| Some(format!("{place}: {value} {why} {schema}"));
    let kinds: Vec<&str> = match &schema["type"] {
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        kind => kind.as_str().into_iter().collect(),
    };
    let is = |kind: &&str| match *kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        _ => value.is_number(),
    };
    if !kinds.is_empty() && !kinds.iter().any(is) {
        return fails("has not the type of");
    }
    if schema["enum"].as_array().is_some_and(|values| !values.contains(value)) {
        return fails("is none of");
    }
    let size = value.as_f64().or(value.as_str().map(|text| text.chars().count() as f64)).or(value.as_array().map(|list| list.len() as f64));
    let words = if value.is_string() {
        ["minLength", "maxLength"]
    } else if value.is_array() {
        ["minItems", "maxItems"]
    } else {
        ["minimum", "maximum"]
    };
    if let Some(size) = size {
        let [least, most] = words.map(|word| schema[word].as_f64());
        if least.is_some_and(|least| size < least) || most.is_some_and(|most| size > most) {
            return fails("is out of the bounds of");
        }
    }
    for word in ["oneOf", "anyOf"] {
        let choices = schema[word].as_array().into_iter().flatten();
        let reasons: Vec<Option<String>> = choices.map(|choice| contradiction(document, choice, value, place)).collect();
        if !reasons.is_empty() && reasons.iter().all(Option::is_some) {
            return reasons.into_iter().flatten().next();
        }
    }
    let parts = schema["allOf"].as_array().into_iter().flatten().map(|part| contradiction(document, part, value, place));
    let items = value.as_array().filter(|_| schema.get("items").is_some()).into_iter().flatten();
    let items = items.map(|item| contradiction(document, &schema["items"], item, &format!("{place}[]")));
    let members = value.as_object().into_iter().flatten().map(|(name, member)| match schema["properties"].get(name) {
        Some(schema) => contradiction(document, schema, member, &format!("{place}.{name}")),
        // A misspelt name; an object without properties may be anything.
        None if schema["properties"].is_object() => Some(format!("{place} has {name:?}, which {schema} has not")),
        None => None,
    });
    let required = schema["required"].as_array().filter(|_| value.is_object()).into_iter().flatten();
    let lacking =
        required.filter(|name| value.get(name.as_str().unwrap_or_default()).is_none()).map(|name| Some(format!("{place} lacks {name}")));
    parts.chain(items).chain(members).chain(lacking).flatten().next()
}

#[test]
fn every_operation_has_examples_that_its_types_allow_and_error_codes_with_their_status() {
    let document: Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("the document is JSON");
    let codes: Vec<&str> = pfr_schema::ErrorCode::ALL.iter().map(|code| code.name()).collect();
    let mut examples = 0;
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("operations") {
            let place = format!("{method} {path}");
            let request = operation["requestBody"]["content"].as_object().into_iter().flatten();
            let responses = operation["responses"].as_object().expect("responses");
            let answers = responses.iter().filter(|(status, _)| status.starts_with('2'));
            let answers = answers.flat_map(|(_, response)| response["content"].as_object().into_iter().flatten());
            for (kind, content) in request.chain(answers) {
                // There is no text that shows bytes.
                if content["schema"]["format"] == "binary" {
                    continue;
                }
                let example = content.get("example").unwrap_or_else(|| panic!("{place}: {kind} has no example"));
                assert_eq!(contradiction(&document, &content["schema"], example, &place), None);
                examples += 1;
            }
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                assert!(parameter["description"].is_string(), "{place}: {} is not described", parameter["name"]);
            }
            let errors: Vec<_> = responses.iter().filter(|(status, _)| status.starts_with(['4', '5'])).collect();
            assert!(!errors.is_empty(), "{place} has no errors");
            for (status, response) in errors {
                for name in response["description"].as_str().expect("a description").split(", ") {
                    let code = codes.iter().position(|code| *code == name).map(|at| pfr_schema::ErrorCode::ALL[at]);
                    let code = code.unwrap_or_else(|| panic!("{place}: {status} says {name:?}, which is no error code"));
                    assert_eq!(&code.status().to_string(), status, "{place}: {name}");
                }
            }
        }
    }
    assert!(examples > 50, "{examples} examples");
}

/// A checker that refuses nothing would prove nothing.
#[test]
fn an_example_that_a_type_does_not_allow_is_found() {
    let document: Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("the document is JSON");
    let refuses = |name: &str, value: Value| {
        let schema = json!({"$ref": format!("#/components/schemas/{name}")});
        contradiction(&document, &schema, &value, name).is_some()
    };
    let digest = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    assert!(!refuses("ForkRequest", json!({"snapshot": "latest", "count": 2, "prefix": "try"})));
    assert!(refuses("ForkRequest", json!({"snapshot": "latest", "count": 0, "prefix": "try"})));
    assert!(refuses("ForkRequest", json!({"snapshot": "latest", "count": "2", "prefix": "try"})));
    assert!(refuses("ForkRequest", json!({"snapshot": "latest", "prefix": "try"})));
    assert!(!refuses("TagList", json!({"tags": [{"name": "a", "digest": digest, "updated_at": 1}]})));
    assert!(refuses("TagList", json!({"tags": [{"name": "a", "digest": digest, "updated_at": 1, "updated": 1}]})));
    assert!(refuses("TagList", json!({"tags": [{"name": "a", "digest": digest, "updated_at": -1}]})));
    assert!(refuses("EventKind", json!("moved")) && !refuses("EventKind", json!("tagged")));
    assert!(!refuses("Followed", json!({"id": "a-1", "at": 1, "kind": "tagged"})));
    assert!(!refuses("Followed", json!({"id": "a-1", "reason": "the events before it are forgotten"})));
    assert!(refuses("Followed", json!({"id": "a-1"})));
}

/// Every list and every number that a schema allows, with its place.
fn lists_and_numbers<'a>(document: &'a Value, schema: &'a Value, place: &str, found: &mut Vec<(String, &'a Value)>) {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = document.pointer(&reference[1..]).unwrap_or_else(|| panic!("{reference} leads nowhere"));
        return lists_and_numbers(document, target, place, found);
    }
    if schema["type"] == "array" || schema["type"] == "integer" {
        found.push((place.to_owned(), schema));
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        lists_and_numbers(document, property, &format!("{place}.{name}"), found);
    }
    for choice in ["oneOf", "anyOf", "allOf"].into_iter().flat_map(|word| schema[word].as_array().into_iter().flatten()) {
        lists_and_numbers(document, choice, place, found);
    }
    if let Some(items) = schema.get("items") {
        lists_and_numbers(document, items, &format!("{place}[]"), found);
    }
}

#[test]
fn lists_and_numbers_in_request_bodies_have_the_bounds_that_the_registry_keeps() {
    let document: Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("the document is JSON");
    let mut found = Vec::new();
    let operations = document["paths"].as_object().expect("paths").iter().flat_map(|(_, item)| item.as_object().expect("operations"));
    for (_, operation) in operations {
        if let Some(schema) = operation["requestBody"]["content"]["application/json"].get("schema") {
            lists_and_numbers(&document, schema, operation["operationId"].as_str().expect("an id"), &mut found);
        }
    }
    let config = pfr_registry::Config::default();
    let bounds = |place: &str| match place {
        // A token and its comma.
        "match_prefix.tokens" => json!([null, config.max_json_bytes / 2]),
        "match_prefix.tokens[]" => json!([0, u32::MAX]),
        "create_token.scopes" => json!([1, 32]),
        "create_token.expires_at" => json!([0, pfr_schema::AccessToken::LATEST_END]),
        "fork.count" => json!([1, 10_000]),
        "set_quota.bytes" | "set_quota.objects" | "set_quota.snapshots" => json!([0, pfr_schema::api::QuotaLimits::MOST]),
        "pause_task.seconds" => json!([1, 30 * 86_400]),
        "set_retention.policies[].keep_last" => json!([1, RetentionPolicies::MOST_LAST]),
        "set_retention.policies[].max_age_seconds" => json!([1, RetentionPolicies::MOST_SECONDS]),
        place if place.starts_with("set_retention.") => json!([null, RetentionPolicies::MOST]),
        "set_signing.policies[].keys" => json!([1, SigningPolicies::MOST]),
        place if place.starts_with("set_signing.") => json!([null, SigningPolicies::MOST]),
        "sign.signatures" => json!([null, pfr_schema::signature::MOST]),
        "report_agent.interval_seconds" => json!([1, AgentReport::LONGEST_INTERVAL]),
        "report_agent.engines" => json!([null, AgentReport::ENGINES]),
        "report_agent.jobs" => json!([null, AgentReport::JOBS]),
        place if place.starts_with("report_agent.") => json!([0, AgentReport::MOST]),
        _ => json!([null, config.max_digests]),
    };
    for (place, schema) in &found {
        let (least, most) = if schema["type"] == "array" { ("minItems", "maxItems") } else { ("minimum", "maximum") };
        assert_eq!(json!([schema[least], schema[most]]), bounds(place), "{place}: {schema}");
    }
    assert!(found.len() >= 7, "{found:?}");
}

#[test]
fn references_lead_somewhere() {
    let text = pfr_registry::routes::openapi();
    let document: serde_json::Value = serde_json::from_str(&text).expect("the document is JSON");
    for reference in text.split('"').filter(|word| word.starts_with("#/")) {
        assert!(document.pointer(&reference[1..]).is_some(), "{reference} leads nowhere");
    }
}
