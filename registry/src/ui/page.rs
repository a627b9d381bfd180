//! The frame around every page, and the headers that keep it closed.

use super::files::{ICON_LINK, STYLE_LINK};
use super::links::Links;
use crate::auth::Caller;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use maud::{DOCTYPE, Markup, html};
use pfr_client::text::printable;
use pfr_schema::DomainName;

/// Nothing runs in a page, nothing comes from another host, forms go to this registry, and no other
/// page may show this one in a frame. So a name that would get past the escaping still could do
/// nothing.
const CONTENT_SECURITY_POLICY: &str =
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// A page, as text, as a response.
pub(super) fn respond_with(status: StatusCode, page: impl Into<Body>) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        // What a page shows changes all the time, and is for this caller only.
        (header::CACHE_CONTROL, "private, no-cache"),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // `no-referrer` would take the origin off the forms.
        (header::REFERRER_POLICY, "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    let headers = headers.map(|(name, value)| (name, HeaderValue::from_static(value)));
    (status, headers, page.into()).into_response()
}

/// The entries of the navigation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Overview,
    Repositories,
    Storage,
    Engines,
    Tasks,
    /// Below one of them, or a problem.
    Elsewhere,
    /// The API: one page for all domains, so it leads to none.
    Api,
}

/// A page.
pub(super) struct Page<'a> {
    pub(super) domain: &'a DomainName,
    /// Offered is what this caller may use. None: nothing but to sign in.
    pub(super) caller: Option<&'a Caller>,
    pub(super) place: Place,
    /// Its heading, and the beginning of its title.
    pub(super) title: &'a str,
    /// What comes before the heading: the way here.
    pub(super) trail: Markup,
    pub(super) body: Markup,
}

impl Page<'_> {
    /// The page as a response.
    pub(super) fn respond(self) -> Response {
        self.respond_with(StatusCode::OK)
    }

    pub(super) fn respond_with(self, status: StatusCode) -> Response {
        respond_with(status, self.text())
    }

    /// The page as text.
    pub(super) fn text(self) -> String {
        // The one place through which everything goes that a user chose: names, labels, documents.
        // `maud` has escaped what would be markup; this is what would not be seen.
        printable(&self.render().into_string())
    }

    fn render(self) -> Markup {
        let links = Links::of(self.domain);
        let operates = self.caller.is_some_and(|caller| caller.operates(self.domain));
        let entries = [
            (Place::Overview, links.overview(), "Overview", self.caller.is_some()),
            (Place::Repositories, links.repositories(), "Repositories", self.caller.is_some()),
            (Place::Storage, links.storage(), "Storage", operates),
            (Place::Engines, links.engines(), "Engines", operates),
            (Place::Tasks, links.tasks(), "Tasks", operates),
        ];
        html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    title { (self.title) " – pf registry" }
                    link rel="stylesheet" href=(*STYLE_LINK);
                    link rel="icon" type="image/svg+xml" href=(*ICON_LINK);
                }
                body {
                    a.skip href="#content" { "Skip to the content" }
                    header {
                        p.brand {
                            @if self.place == Place::Api { "pf registry" } @else { a href=(links.overview()) { "pf registry" } }
                            @if !self.domain.is_default() { " " span.domain { "domain " strong { (self.domain) } } }
                        }
                        @if self.caller.is_some() {
                            nav aria-label="Pages" {
                                ul {
                                    @for (place, href, name, _) in entries.iter().filter(|entry| entry.3) {
                                        li { a href=(href) aria-current=[(*place == self.place).then_some("page")] { (name) } }
                                    }
                                }
                            }
                        }
                    }
                    main id="content" {
                        (self.trail)
                        h1 { (self.title) }
                        (self.body)
                    }
                    footer {
                        p {
                            "pf-registry " (env!("CARGO_PKG_VERSION")) " · "
                            a href="/docs" { "the API" } " · " a href="/openapi.json" { "as OpenAPI" }
                            @if self.caller.is_some_and(Caller::operates_registry) { " · " a href="/metrics" { "metrics" } }
                            @if let Some(label) = self.caller.and_then(Caller::label) { " · signed in with the token " strong { (label) } }
                        }
                    }
                }
            }
        }
    }
}
