//! `docs/protocol.md` says what the code does: its table of codes and its list of endpoints.

use pfr_schema::ErrorCode;
use std::path::Path;

fn document() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/protocol.md");
    std::fs::read_to_string(path).expect("the protocol's document")
}

#[test]
fn the_table_of_codes_is_the_closed_set() {
    let document = document();
    let (_, errors) = document.split_once("## Errors").expect("a section on errors");
    let rows: Vec<Vec<&str>> = errors
        .lines()
        .take_while(|line| !line.starts_with("## "))
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`')).collect())
        .collect();
    let documented: Vec<[String; 4]> = rows.iter().map(|r| [r[0], r[1], r[2], r[3]].map(str::to_owned)).collect();
    let real: Vec<[String; 4]> = ErrorCode::ALL
        .iter()
        .map(|code| {
            let retryable = if code.retryable() { "yes" } else { "no" };
            [code.name().to_owned(), code.status().to_string(), code.exit_code().to_string(), retryable.to_owned()]
        })
        .collect();
    assert_eq!(documented, real);
}

#[test]
fn every_path_of_the_service_is_mentioned() {
    let text = pfr_registry::routes::openapi();
    let openapi: serde_json::Value = serde_json::from_str(&text).expect("the document is JSON");
    let document = document();
    for path in openapi["paths"].as_object().expect("paths").keys() {
        let short = path.replace("/v1/repositories/{repo}", "…");
        assert!(document.contains(path) || document.contains(&short), "{path} is not in docs/protocol.md");
    }
}
