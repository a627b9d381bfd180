//! A failure as a page, if a browser asks: what happened, what to do, and the way back. The failure
//! of a caller without a token is the page to sign in.

use super::links::origin;
use super::page::{Page, Place};
use crate::auth::Caller;
use crate::http::base;
use crate::http::observe::Observation;
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use maud::{Markup, html};
use pfr_schema::{DomainName, ErrorCode};
use pfr_service::problem::ApiError;

/// A request of a browser for a page: its failure is shown as one.
pub(crate) struct Browser {
    domain: DomainName,
    /// The address of the registry, as the browser has it.
    origin: Option<String>,
}

impl Browser {
    /// The browser behind a request for a page. Below `/v1` every failure is a document, for all
    /// callers.
    pub(crate) fn of(request: &Request, has_tls: bool) -> Option<Self> {
        let path = request.uri().path();
        if path.starts_with("/v1/") {
            return None;
        }
        let accepts = request.headers().get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let mut types = accepts.flat_map(|accept| accept.split(',')).map(|range| range.split(';').next().unwrap_or_default().trim());
        types
            .any(|range| range.eq_ignore_ascii_case("text/html"))
            .then(|| Self { domain: base::domain_in(request.extensions()).unwrap_or_default(), origin: origin(request.headers(), has_tls) })
    }

    /// The failure, as the same problem that other callers get.
    pub(crate) fn problem(&self, failure: &ApiError, observation: &Observation) -> Response {
        let (code, caller) = (failure.code, observation.caller.caller());
        // The links of a domain that the caller does not see would lead nowhere.
        let home = caller.home();
        let domain = if code == ErrorCode::DomainUnknown { &home } else { &self.domain };
        let body = html! {
            p { (failure.detail) }
            @if code.retryable() { p { "The same request may succeed later." } }
            (remedy(code, &caller, self.origin.as_deref()))
            dl.facts {
                div { dt { "Status" } dd { (failure.status.as_u16()) } }
                div { dt { "Code" } dd { code { (code.name()) } } }
                div { dt { "Request" } dd { code { (observation.id) } } }
            }
            p { "The registry's log has the request by this id." }
        };
        let is_unknown = code == ErrorCode::Unauthorized;
        let title = if is_unknown { "Sign in" } else { code.title() };
        let caller = (!is_unknown).then_some(&caller);
        let page = Page { domain, caller, place: Place::Elsewhere, title, trail: html! {}, body };
        let mut response = page.respond_with(failure.status);
        if let Some(seconds) = failure.retry_after() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// A token that may read everything and change nothing, as one word of a shell.
const LOOK_AROUND: &str = r#"'{"label":"browser","scopes":["*:pull"]}'"#;

/// What to do about a refusal that depends on the token. It does not depend on what there is.
fn remedy(code: ErrorCode, caller: &Caller, origin: Option<&str>) -> Markup {
    html! {
        @match (code, caller.label()) {
            (ErrorCode::Unauthorized, _) => {
                p { "Load this page again. Your browser asks for a user name and a password: enter any user name, and an access token as the password." }
                @if let Some(origin) = origin {
                    p { "An operator of this registry makes tokens. This command makes one to look around, and asks for the operator's own:" }
                    p { code.command { "curl -u operator -d " (LOOK_AROUND) " -H 'Content-Type: application/json' " (origin) "/v1/tokens" } }
                }
                p { "The operator's own token is made on the machine of the registry; " code { "pf-registry token create --help" } " says how." }
            }
            (ErrorCode::DomainUnknown | ErrorCode::RepositoryUnknown | ErrorCode::Denied, Some(label)) => {
                p { "This is what the token " strong { (label) } " may see. Another token may see more: to sign in with it, open a private window, or close all windows of the browser first." }
            }
            _ => {}
        }
    }
}
