//! The form of a snapshot's page that verifies it, and its result.

use super::links::Links;
use super::page::{Page, Place};
use super::snapshot::trail;
use super::words::{bytes, count, digest, number};
use crate::app::App;
use crate::auth::{Access, Pull};
use crate::http::path::Path;
use crate::v1::Answer;
use axum::extract::State;
use axum::response::Response;
use maud::html;
use pfr_client::human::duration;
use pfr_schema::Selector;
use std::time::Instant;

/// Verifies a snapshot, and shows the result as a page. Takes as long as reading the snapshot.
pub(crate) async fn verify(
    Access { to: repository, domain, caller, .. }: Access<Pull>,
    State(app): State<App>,
    Path(selector): Path<Selector>,
) -> Answer<Response> {
    let (links, begun) = (Links::of(&domain.name), Instant::now());
    let snapshot = domain.store.resolve(&repository, &selector).await?;
    let permit = app.verification()?;
    let verified = domain.store.verify_in(&snapshot, Some(permit), &mut |_| {}).await?;
    let body = html! {
        p.good role="status" { strong { "Every blob is what its name says." } }
        p { (digest(snapshot)) }
        dl.facts {
            div { dt { "Blobs read" } dd { (number(verified.blobs)) } }
            div { dt { "Bytes hashed" } dd { (bytes(verified.bytes)) } }
            div { dt { "Took" } dd { (duration(begun.elapsed())) } }
        }
        @if verified.values_computed + verified.values_attested > 0 {
            p {
                "State tensors: the values of " (number(verified.values_computed)) " were computed and are right. "
                @if verified.values_attested > 0 { (count(verified.values_attested, "tensor")) " of an opaque layout can only be compared by bytes, which are right." }
            }
        }
        p { a href=(links.snapshot(&repository, &snapshot)) { "Back to the snapshot" } }
    };
    let trail = trail(&links, &repository);
    Ok(Page { domain: &domain.name, caller: Some(&caller), place: Place::Elsewhere, title: "Verified", trail, body }.respond())
}
