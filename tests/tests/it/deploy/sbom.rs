//! The bill of materials: every crate that is compiled in, with its licence and its checksum.

use crate::docs::has_python;
use crate::docs::page::root;
use pfr_tests::skip;
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;

const PROGRAMS: [&str; 3] = ["pfr-client", "pfr-registry", "pfr-agent"];

fn made() -> Vec<u8> {
    let mut command = Command::new("python3");
    let output = command.arg(root().join("tools/sbom")).args(PROGRAMS).env("SOURCE_DATE_EPOCH", "1700000000").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn the_bill_of_materials_has_every_crate_and_a_second_one_is_the_same() {
    if !has_python() {
        return skip("python", "tools/sbom wants Python 3.11 or newer as python3");
    }
    let text = made();
    assert!(text == made(), "a second one differs");
    let bill: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&"CycloneDX".into(), &"1.6".into()));
    assert_eq!(bill["metadata"]["timestamp"], "2023-11-14T22:13:20Z");
    assert!(bill["serialNumber"].as_str().is_some_and(|number| number.starts_with("urn:uuid:") && number.len() == 45), "{bill}");
    let components = bill["components"].as_array().unwrap();
    let mut refs = BTreeSet::from([bill["metadata"]["component"]["bom-ref"].as_str().unwrap()]);
    for component in components {
        let name = component["name"].as_str().unwrap();
        assert!(refs.insert(component["bom-ref"].as_str().unwrap()), "{name} is there twice");
        let licence = &component["licenses"][0];
        assert!(["expression", "license"].iter().any(|kind| !licence[*kind].is_null()), "{name} has no licence");
        let is_ours = name.starts_with("pfr-");
        let hash = component["hashes"][0]["content"].as_str().unwrap_or_default();
        assert_eq!(hash.len(), if is_ours { 0 } else { 64 }, "{name}: its checksum");
        assert_eq!(component["purl"].is_null(), is_ours, "{name}");
    }
    let has = |name: &str| components.iter().any(|component| component["name"] == name);
    assert!(PROGRAMS.iter().chain(&["tokio", "rustls", "ring", "libsqlite3-sys", "sqlx-postgres"]).all(|name| has(name)));
    // Only tests need it.
    assert!(!has("proptest") && !has("pfr-testkit"));
    let mut described = 0;
    for dependency in bill["dependencies"].as_array().unwrap() {
        let of = dependency["dependsOn"].as_array().unwrap().iter().chain([&dependency["ref"]]);
        let unknown: Vec<&str> = of.map(|name| name.as_str().unwrap()).filter(|name| !refs.contains(name)).collect();
        assert!(unknown.is_empty(), "{}: {unknown:?}", dependency["ref"]);
        described += 1;
    }
    assert_eq!(described, refs.len());
}
