//! A failure as a page, if a browser asks: what happened, what to do, and the way back.

use super::page::{Page, Place};
use crate::http::base;
use axum::extract::Request;
use axum::http::header;
use axum::response::Response;
use maud::html;
use pfr_schema::{DomainName, ErrorCode};
use pfr_service::problem::ApiError;

/// A request of a browser for a page: its failure is shown as one.
pub(crate) struct Browser {
    domain: DomainName,
}

impl Browser {
    /// The browser that sent this request, if it is one and asks for a page. Below `/v1` every
    /// failure is a document, for all callers.
    pub(crate) fn of(request: &Request) -> Option<Self> {
        let path = request.uri().path();
        if path.starts_with("/v1/") {
            return None;
        }
        let accepts = request.headers().get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let mut types = accepts.flat_map(|accept| accept.split(',')).map(|range| range.split(';').next().unwrap_or_default().trim());
        types
            .any(|range| range.eq_ignore_ascii_case("text/html"))
            .then(|| Self { domain: base::domain_in(request.extensions()).unwrap_or_default() })
    }

    /// The failure, as the same problem that other callers get.
    pub(crate) fn problem(&self, failure: &ApiError, request_id: &str) -> Response {
        let code = failure.code;
        // The links of a domain that does not exist would lead nowhere.
        let default = DomainName::default();
        let domain = if code == ErrorCode::DomainUnknown { &default } else { &self.domain };
        let body = html! {
            p { (failure.detail) }
            @if code.retryable() { p { "The same request may succeed later." } }
            dl.facts {
                div { dt { "Status" } dd { (failure.status.as_u16()) } }
                div { dt { "Code" } dd { code { (code.name()) } } }
                div { dt { "Request" } dd { code { (request_id) } } }
            }
            p { "The registry's log has the request by this id." }
        };
        let page = Page { domain, place: Place::Elsewhere, title: code.title(), trail: html! {}, body };
        page.respond_with(failure.status)
    }
}
