//! Examples of bodies in the OpenAPI document. They are in one file, `examples.json`, by operation:
//! the body of a request, and that of its answers, by status or by media type where there are
//! several. An example beside a handler wins.

use serde_json::Value;
use std::sync::LazyLock;
use utoipa::openapi::path::Operation;
use utoipa::openapi::{Content, RefOr};

/// A test says which operation lacks one.
static EXAMPLES: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(include_str!("examples.json")).unwrap_or_default());

/// Adds the examples of an operation.
pub(crate) fn add(operation: &mut Operation) {
    let examples = &EXAMPLES[operation.operation_id.as_deref().unwrap_or_default()];
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        for content in body.content.values_mut() {
            set(content, &examples["request"]);
        }
    }
    let answers = &examples["answers"];
    for (status, response) in &mut operation.responses.responses {
        let RefOr::T(response) = response else { continue };
        if !status.starts_with('2') {
            continue;
        }
        for (kind, content) in &mut response.content {
            let found = [&answers[kind.as_str()], &answers[status.as_str()], &examples["answer"]];
            if let Some(example) = found.into_iter().find(|example| !example.is_null()) {
                set(content, example);
            }
        }
    }
}

fn set(content: &mut RefOr<Content>, example: &Value) {
    if let RefOr::T(content) = content
        && content.example.is_none()
        && !example.is_null()
    {
        content.example = Some(example.clone());
    }
}
