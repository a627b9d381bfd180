//! `/docs`: the API, from its own description. It is the same for all callers and all domains, so
//! it is made once.

use super::page::{Page, Place, respond_with};
use crate::auth::{Access, AllRepositories, Open};
use crate::routes;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::Response;
use maud::{Markup, html};
use pfr_schema::{DomainName, ErrorCode};
use serde_json::Value;
use std::sync::OnceLock;

/// The titles of groups of operations, in the order of the page.
const GROUPS: [(&str, &str); 4] =
    [("read", "Reading"), ("push", "Pushing"), ("write", "Tags, forks and deletion"), ("operations", "Operations")];
/// Where references within the description begin.
const SCHEMAS: &str = "#/components/schemas/";

/// The page of the API.
pub(crate) async fn docs(_: Access<Open, AllRepositories>) -> Response {
    static PAGE: OnceLock<Bytes> = OnceLock::new();
    let page = PAGE.get_or_init(|| page(routes::DOCUMENT).into());
    respond_with(StatusCode::OK, page.clone())
}

fn page(document: &str) -> String {
    // It is JSON: a test compares it with what the routes say.
    let document: Value = serde_json::from_str(document).unwrap_or_default();
    let body = body(&document);
    let domain = DomainName::default();
    Page { domain: &domain, caller: None, place: Place::Api, title: "The HTTP API", trail: html! {}, body }.text()
}

/// An operation of the description.
struct Operation<'a> {
    method: String,
    path: &'a str,
    what: &'a Value,
}

impl<'a> Operation<'a> {
    fn all(document: &'a Value) -> Vec<Self> {
        let of_path = |(path, item): (&'a String, &'a Value)| {
            entries(item).map(move |(method, what)| Self { method: method.to_uppercase(), path, what })
        };
        entries(&document["paths"]).flat_map(of_path).collect()
    }

    fn id(&self) -> &'a str {
        text(&self.what["operationId"])
    }

    fn group(&self) -> &'a str {
        text(&self.what["tags"][0])
    }
}

/// The members of an object; none of anything else.
fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn body(document: &Value) -> Markup {
    let operations = Operation::all(document);
    html! {
        p { (prose(text(&document["info"]["description"]))) }
        p {
            "Paths that begin with " code { "/v1" } " are those of the domain " code { "default" } "; with "
            code { "/domains/NAME" } " in front, those of another one. A registry that requires tokens takes one as "
            code { "Authorization: Bearer TOKEN" } ", or as the password of HTTP Basic with any user name. A "
            code { "/" } " in the name of a repository is " code { "%2F" } " in a path. "
            a href="/openapi.json" { "The same as OpenAPI 3.1" } "."
        }
        nav aria-label="Operations" {
            @for (group, name) in GROUPS {
                h2 { a href={ "#" (group) } { (name) } }
                ul {
                    @for operation in operations.iter().filter(|operation| operation.group() == group) {
                        li { a href={ "#" (operation.id()) } { code { (operation.method) " " (operation.path) } } " " (text(&operation.what["summary"])) }
                    }
                }
            }
            p { a href="#errors" { "Error codes" } " · " a href="#schemas" { "Types" } }
        }
        @for (group, name) in GROUPS {
            section {
                h2 id=(group) { (name) }
                @for operation in operations.iter().filter(|operation| operation.group() == group) { (of_operation(operation)) }
            }
        }
        section {
            h2 id="errors" { "Error codes" }
            p {
                "An error is " code { "application/problem+json" } " of the type " (reference("Problem"))
                ". Each code has one status. A program may try again what is marked so, after the seconds of "
                code { "Retry-After" } " if the answer has it."
            }
            (errors())
        }
        section {
            h2 id="schemas" { "Types" }
            @for (name, schema) in entries(&document["components"]["schemas"]) {
                article {
                    h3 id={ "type-" (name) } { (name) }
                    (described(schema))
                    @if schema["properties"].is_null() { p { (type_of(schema)) } }
                    (properties(schema, &format!("type-{name}")))
                }
            }
        }
    }
}

fn of_operation(operation: &Operation<'_>) -> Markup {
    let (id, what) = (operation.id(), operation.what);
    let action = text(&what["x-pf-action"]);
    html! {
        article {
            h3 id=(id) { code { (operation.method) " " (operation.path) } }
            p { strong { (text(&what["summary"])) } }
            (described(what))
            p {
                @if action == "open" { "Every caller may ask this." }
                @else { "The token must permit " code { (action) } "." }
            }
            @if items(&what["parameters"]).next().is_some() {
                div.scroll role="region" aria-label={ "Parameters of " (id) } tabindex="0" {
                    table {
                        thead { tr { th scope="col" { "Parameter" } th scope="col" { "In" } th scope="col" { "Type" } th scope="col" { "Meaning" } } }
                        tbody {
                            @for parameter in items(&what["parameters"]) {
                                tr {
                                    th scope="row" { code { (text(&parameter["name"])) } @if parameter["required"] == true { " (required)" } }
                                    td { (text(&parameter["in"])) }
                                    td { (type_of(&parameter["schema"])) }
                                    td { (prose(text(&parameter["description"]))) }
                                }
                            }
                        }
                    }
                }
            }
            @for (kind, content) in entries(&what["requestBody"]["content"]) {
                h4 { "Request: " code { (kind) } }
                (content_of(content, &format!("{id}, request, {kind}")))
            }
            @for (status, response) in entries(&what["responses"]).filter(|(status, _)| is_success(status)) {
                h4 { "Answer " (status) ": " (prose(text(&response["description"]))) }
                @for (kind, content) in entries(&response["content"]) {
                    p { code { (kind) } }
                    (content_of(content, &format!("{id}, answer {status}, {kind}")))
                }
            }
            h4 { "Errors" }
            ul {
                @for (status, response) in entries(&what["responses"]).filter(|(status, _)| !is_success(status)) {
                    li {
                        (status) ": "
                        @for (at, code) in text(&response["description"]).split(", ").enumerate() {
                            @if at > 0 { ", " }
                            a href={ "#error-" (code) } { code { (code) } }
                        }
                    }
                }
            }
        }
    }
}

fn is_success(status: &str) -> bool {
    status.starts_with(['2', '3'])
}

/// Type and example of a body. `of` names the body among all of the page.
fn content_of(content: &Value, of: &str) -> Markup {
    html! {
        p { "Type: " (type_of(&content["schema"])) }
        @match &content["example"] {
            Value::Null => {}
            Value::String(words) => { (example(words, of)) }
            json => { (example(&format!("{json:#}"), of)) }
        }
    }
}

fn example(body: &str, of: &str) -> Markup {
    html! { pre tabindex="0" role="region" aria-label={ "Example: " (of) } { code { (body) } } }
}

/// All error codes with their meaning.
fn errors() -> Markup {
    html! {
        div.scroll role="region" aria-labelledby="errors" tabindex="0" {
            table {
                thead {
                    tr {
                        th scope="col" { "Code" }
                        th scope="col" { "Status" }
                        th scope="col" { "Meaning" }
                        th scope="col" { "Try again" }
                        th scope="col" { "Exit code of pf" }
                    }
                }
                tbody {
                    @for code in ErrorCode::ALL {
                        tr {
                            th scope="row" id={ "error-" (code.name()) } { code { (code.name()) } }
                            td { (code.status()) }
                            td { (code.title()) }
                            td { @if code.retryable() { "yes" } @else { "no" } }
                            td { (code.exit_code()) }
                        }
                    }
                }
            }
        }
    }
}

/// The members of an object.
fn properties(schema: &Value, label: &str) -> Markup {
    let is_required = |name: &str| items(&schema["required"]).any(|required| required == name);
    html! {
        @if entries(&schema["properties"]).next().is_some() {
            div.scroll role="region" aria-labelledby=(label) tabindex="0" {
                table {
                    thead { tr { th scope="col" { "Member" } th scope="col" { "Type" } th scope="col" { "Meaning" } } }
                    tbody {
                        @for (name, member) in entries(&schema["properties"]) {
                            tr {
                                th scope="row" { code { (name) } @if is_required(name) { " (required)" } }
                                td { (type_of(member)) }
                                td { (prose(text(&member["description"]))) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn described(what: &Value) -> Markup {
    html! {
        @for paragraph in text(&what["description"]).split("\n\n").filter(|paragraph| !paragraph.is_empty()) {
            p { (prose(paragraph)) }
        }
    }
}

/// A text in which words in backticks are code.
fn prose(text: &str) -> Markup {
    html! {
        @for (at, part) in text.split('`').enumerate() {
            @if !at.is_multiple_of(2) { code { (part) } } @else { (part) }
        }
    }
}

fn reference(name: &str) -> Markup {
    html! { a href={ "#type-" (name) } { (name) } }
}

/// The type of a value and its conditions, in words.
fn type_of(schema: &Value) -> Markup {
    if let Some(name) = text(&schema["$ref"]).strip_prefix(SCHEMAS) {
        return reference(name);
    }
    let choices: Vec<&Value> = ["oneOf", "anyOf", "allOf"].into_iter().flat_map(|word| items(&schema[word])).collect();
    let choices: Vec<&Value> = choices.into_iter().filter(|choice| choice["type"] != "null").collect();
    if !choices.is_empty() {
        return html! { @for (at, choice) in choices.iter().enumerate() { @if at > 0 { " or " } (type_of(choice)) } };
    }
    if let Some(values) = schema["enum"].as_array() {
        return html! { @for (at, value) in values.iter().enumerate() { @if at > 0 { ", " } code { (text(value)) } } };
    }
    let kinds = match &schema["type"] {
        Value::Array(kinds) => kinds.iter().map(text).filter(|kind| *kind != "null").collect::<Vec<_>>().join(" or "),
        kind => text(kind).to_owned(),
    };
    let bounds = bounds(schema);
    html! {
        @if kinds == "array" { "list of " (type_of(&schema["items"])) }
        @else if schema["format"] == "binary" { "bytes" }
        @else if kinds.is_empty() { "any value" }
        @else { (kinds) }
        @if let Some(bounds) = bounds { ", " (bounds) }
        @if !schema["default"].is_null() { ", otherwise " code { (schema["default"].to_string()) } }
    }
}

/// The least and the greatest value, length or number of items.
fn bounds(schema: &Value) -> Option<String> {
    let of = |least: &str, most: &str, unit: &str| match (&schema[least], &schema[most]) {
        (Value::Null, Value::Null) => None,
        (least, Value::Null) => Some(format!("at least {least}{unit}")),
        (Value::Null, most) => Some(format!("at most {most}{unit}")),
        (least, most) => Some(format!("{least} to {most}{unit}")),
    };
    of("minimum", "maximum", "").or_else(|| of("minLength", "maxLength", " characters")).or_else(|| of("minItems", "maxItems", " items"))
}
