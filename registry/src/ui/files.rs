//! The stylesheet and the icon. They are the same for all callers and all domains.

use crate::auth::{Access, AllRepositories, Open};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::IntoResponse;
use pfr_schema::Digest;
use std::sync::LazyLock;

const STYLE: &str = include_str!("style.css");
const ICON: &str = include_str!("icon.svg");

/// Address of the stylesheet. It changes with the content, so that browsers may keep it for ever.
pub(super) static STYLE_LINK: LazyLock<String> =
    LazyLock::new(|| format!("/ui/-/style.css?v={}", Digest::sha256(STYLE.as_bytes()).short()));
/// Address of the icon.
pub(super) static ICON_LINK: LazyLock<String> = LazyLock::new(|| format!("/ui/-/icon.svg?v={}", Digest::sha256(ICON.as_bytes()).short()));

/// The stylesheet of all pages.
pub(crate) async fn style(_: Access<Open, AllRepositories>) -> impl IntoResponse {
    (kept("text/css; charset=utf-8"), STYLE)
}

/// The icon of all pages.
pub(crate) async fn icon(_: Access<Open, AllRepositories>) -> impl IntoResponse {
    (kept("image/svg+xml"), ICON)
}

fn kept(media_type: &'static str) -> [(HeaderName, HeaderValue); 3] {
    [
        (header::CONTENT_TYPE, HeaderValue::from_static(media_type)),
        (header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=31536000, immutable")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ]
}
