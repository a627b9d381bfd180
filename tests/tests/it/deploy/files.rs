//! The files of `deploy/` and their contents.

use crate::docs::page::{files, root};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use yaml_rust2::{Yaml, YamlLoader};

/// The text of a file of the repository.
pub fn text(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The files below `deploy/`, relative to the repository.
pub fn deployed() -> Vec<String> {
    files(|_| true).into_iter().filter(|name| name.starts_with("deploy/")).collect()
}

/// The documents of a text in YAML.
pub fn yaml(name: &str, text: &str) -> Vec<Value> {
    let documents = YamlLoader::load_from_str(text).unwrap_or_else(|e| panic!("{name}: {e}"));
    documents.iter().map(json).filter(|document| !document.is_null()).collect()
}

fn json(yaml: &Yaml) -> Value {
    match yaml {
        Yaml::String(text) => Value::from(text.as_str()),
        Yaml::Integer(number) => Value::from(*number),
        Yaml::Real(text) => text.parse::<f64>().map_or(Value::Null, Value::from),
        Yaml::Boolean(is) => Value::from(*is),
        Yaml::Array(items) => items.iter().map(json).collect(),
        Yaml::Hash(entries) => {
            let name = |key: &Yaml| key.as_str().unwrap_or_else(|| panic!("a key that is no text: {key:?}")).to_owned();
            Value::Object(entries.iter().map(|(key, value)| (name(key), json(value))).collect::<Map<_, _>>())
        }
        Yaml::Null | Yaml::Alias(_) | Yaml::BadValue => Value::Null,
    }
}

/// `${NAME:-default}` and `${NAME:?message}` of a compose file, with these variables.
pub fn interpolated(text: &str, variables: &BTreeMap<&str, String>) -> String {
    let mut parts = text.split("${");
    let mut found = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (inside, rest) = part.split_once('}').unwrap_or_else(|| panic!("no end: {part}"));
        let (name, default) = inside.split_once(":-").map_or((inside, None), |(name, default)| (name, Some(default)));
        let name = name.split_once(":?").map_or(name, |(name, _)| name);
        let value = variables.get(name).map(String::as_str).filter(|value| !value.is_empty()).or(default);
        found += value.unwrap_or_else(|| panic!("{name} has neither a value nor a default"));
        found += rest;
    }
    found
}

#[test]
fn every_yaml_and_json_file_can_be_read() {
    let mut read = 0;
    // Templates of the chart become YAML when Helm renders them: deploy/check.
    for name in deployed().iter().filter(|name| !name.contains("/templates/")) {
        if name.ends_with(".yaml") {
            assert!(!yaml(name, &text(name)).is_empty(), "{name} is empty");
            read += 1;
        } else if name.ends_with(".json") {
            serde_json::from_str::<Value>(&text(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            read += 1;
        }
    }
    assert!(read >= 15, "only {read} files");
}

#[test]
fn every_image_has_our_version_or_its_own_and_names_no_host() {
    let version = env!("CARGO_PKG_VERSION");
    let mut images = BTreeSet::new();
    for name in deployed() {
        let text = text(&name);
        for line in text.lines() {
            let words = line.split(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '=' | '{' | '}' | '(' | ')'));
            // `${PF_IMAGE:-pf-registry:0.1.0}` too.
            images.extend(words.map(|word| word.rsplit(":-").next().unwrap_or_default().to_owned()).filter(|word| is_image(word)));
        }
        for ours in ["pf-registry:", "pf-agent:"] {
            let versions = text.match_indices(ours).map(|(at, _)| &text[at + ours.len()..]);
            let wrong = versions.filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit())).find(|rest| !rest.starts_with(version));
            assert_eq!(wrong, None, "{name}: another version than {version}");
        }
    }
    assert!(["caddy:2-alpine", "postgres:17-alpine", "debian:trixie-slim"].iter().all(|image| images.contains(*image)), "{images:?}");
    // A name whose first part has a dot or a port is that of a host.
    let hosts: Vec<&String> =
        images.iter().filter(|image| image.split_once('/').is_some_and(|(first, _)| first.contains(['.', ':']))).collect();
    assert!(hosts.is_empty(), "{hosts:?}");
    let chart = &yaml("Chart.yaml", &text("deploy/helm/pf/Chart.yaml"))[0];
    assert_eq!((&chart["version"], &chart["appVersion"]), (&version.into(), &version.into()));
    for image in ["pf-registry", "pf-agent"] {
        assert!(text("deploy/kustomize/example/kustomization.yaml").contains(&format!("newName: {image}, newTag: {version}")), "{image}");
    }
}

/// `name:tag` with a tag of letters, digits and signs, and no address or time.
fn is_image(word: &str) -> bool {
    let Some((name, tag)) = word.rsplit_once(':') else { return false };
    let known = ["caddy", "postgres", "seaweedfs", "debian", "rust", "pf-registry", "pf-agent"];
    known.iter().any(|known| name.split('/').next_back() == Some(known)) && tag.starts_with(|c: char| c.is_ascii_alphanumeric())
}

#[test]
fn variables_of_a_compose_file_are_replaced() {
    let variables = BTreeMap::from([("A", "x".to_owned()), ("EMPTY", String::new())]);
    assert_eq!(interpolated("p ${A:?no} ${B:-1}:${A} ${EMPTY:-2}", &variables), "p x 1:x 2");
}
