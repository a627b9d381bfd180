//! For operators and monitoring: liveness, readiness, metrics, the API's description. They are
//! exempt from the limits on requests and on connections.

use crate::app::App;
use crate::auth::{Access, Admin, AllRepositories, Metrics, Open};
use crate::domains::Domain;
use crate::failures;
use crate::metrics::{DATABASE_UP, DISK, PACKS, ROWS_WRITTEN, SMALL_PACKS, TRACES_DROPPED, of_domain, set_quota, set_tasks};
use crate::problem::ApiError;
use crate::routes;
use crate::v1::Answer;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use futures::StreamExt as _;
use pfr_schema::ErrorCode;
use std::time::Duration;
use tokio::time::Instant;

/// How long the store may take to answer; for a scrape, the databases of all domains together.
const READY: Duration = Duration::from_secs(5);
/// How long a scrape waits for the database of one domain, while it asks those of others.
const OF_DOMAIN: Duration = Duration::from_secs(3);
/// Databases that a scrape asks at a time.
const AT_ONCE: usize = 8;

/// The process runs
#[utoipa::path(
    get, path = "/livez", operation_id = "livez", tag = "operations",
    responses((status = 200, description = "Alive", body = String, content_type = "text/plain"), failures::Alive),
)]
pub(crate) async fn livez(_: Access<Open, AllRepositories>) -> &'static str {
    "alive\n"
}

/// The store can be reached
#[utoipa::path(
    get, path = "/readyz", operation_id = "readyz", tag = "operations",
    responses((status = 200, description = "Ready", body = String, content_type = "text/plain"), failures::Ready),
)]
pub(crate) async fn readyz(_: Access<Open, AllRepositories>, State(app): State<App>) -> Answer<&'static str> {
    match tokio::time::timeout(READY, app.domains.default_domain().store.ready()).await {
        Ok(ready) => ready?,
        Err(_) => {
            let detail = "the registry's store does not answer; this says nothing about what it holds, try again";
            return Err(ApiError::new(ErrorCode::Unavailable, detail).because(format!("no answer within {READY:?}")));
        }
    }
    Ok("ready\n")
}

/// Metrics for Prometheus
///
/// A registry may be set to give them to every caller.
#[utoipa::path(
    get, path = "/metrics", operation_id = "metrics", tag = "operations",
    responses((status = 200, description = "Prometheus text", body = String, content_type = "text/plain"), failures::Scraping),
)]
pub(crate) async fn metrics(_: Access<Admin, Metrics>, State(app): State<App>) -> impl IntoResponse {
    let domains = app.domains.all();
    for domain in &domains {
        set_tasks(&domain.name, &domain.schedule.tasks());
        metrics::counter!(ROWS_WRITTEN, of_domain(&domain.name)).absolute(domain.store.metadata().rows_written());
    }
    metrics::counter!(TRACES_DROPPED).absolute(pfr_service::traces::dropped());
    // A scrape must work when the store does not: then the gauges keep their last values.
    let all = domains.len();
    let reads = domains.into_iter().map(|domain| async move {
        let read = tokio::time::timeout(OF_DOMAIN, set_stored(&domain)).await;
        let reason = match read {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {OF_DOMAIN:?}"),
        };
        Err(format!("domain {}: {reason}", domain.name))
    });
    let mut reads = futures::stream::iter(reads).buffer_unordered(AT_ONCE);
    let (until, mut read, mut failed) = (Instant::now() + READY, 0, None);
    while let Ok(Some(done)) = tokio::time::timeout_at(until, reads.next()).await {
        match done {
            Ok(()) => read += 1,
            Err(reason) => failed = failed.or(Some(reason)),
        }
    }
    metrics::gauge!(DATABASE_UP).set(if read == all { 1.0 } else { 0.0 });
    if read < all {
        let error = failed.unwrap_or_else(|| format!("no answer within {READY:?}"));
        tracing::warn!(error, domains = all - read, "metrics: what is on storage and the backlog of collection cannot be read");
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render())
}

/// Sets the gauges of what the tables of a domain say.
async fn set_stored(domain: &Domain) -> pfr_store::Result<()> {
    domain.collector.backlog().await?;
    let (metadata, labels) = (domain.store.metadata(), || of_domain(&domain.name));
    metrics::gauge!(DISK, labels()).set(metadata.disk_bytes().await? as f64);
    let packs = metadata.count_packs(domain.store.full_pack()).await?;
    metrics::gauge!(PACKS, labels()).set(packs.live as f64);
    metrics::gauge!(SMALL_PACKS, labels()).set(packs.small as f64);
    if let Some(quota) = metadata.quota().await? {
        set_quota(&domain.name, &quota);
    }
    Ok(())
}

/// This document
#[utoipa::path(
    get, path = "/openapi.json", operation_id = "openapi", tag = "operations",
    responses((status = 200, description = "OpenAPI", body = Object), failures::Describing),
)]
pub(crate) async fn openapi(_: Access<Open, AllRepositories>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], routes::DOCUMENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::routes;
    use crate::storage::Opened;
    use axum::Router;
    use axum::body::{Body, to_bytes};
    use axum::http::{Request, StatusCode};
    use hyper::service::Service as _;
    use hyper_util::service::TowerToHyperService;
    use pfr_schema::AccessToken;
    use pfr_store::{Clock, Domains, Options, Store};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::time::{pause, sleep, timeout};

    /// A store whose database answers until `hangs` is set.
    async fn store(hangs: &Arc<AtomicBool>) -> Store {
        let (hangs, own) = (Arc::clone(hangs), std::thread::current().id());
        // Each transaction asks for the time, in the thread of the database.
        let clock = Clock::new(move || {
            while hangs.load(Ordering::Relaxed) && std::thread::current().id() != own {
                std::thread::park();
            }
            Clock::system().now()
        });
        Store::open_in_memory(Options { clock, ..Options::default() }).await.unwrap()
    }

    /// A registry over one domain.
    fn app(store: Store, config: &Config) -> App {
        let opened = Opened { domains: Domains::new(store, None), redirects: None };
        App::new(opened, crate::metrics::recorder().unwrap(), None, config)
    }

    async fn service(hangs: &Arc<AtomicBool>, config: &Config) -> Router {
        routes::service(app(store(hangs).await, config), None)
    }

    /// Status and text of the answer, and how long it took.
    async fn scrape(service: &Router) -> (StatusCode, String, Duration) {
        let token = AccessToken::new([1; 8], [2; 32]);
        let request = Request::get("/metrics")
            .header(header::HOST, "localhost")
            .header(header::AUTHORIZATION, format!("Bearer {}", token.expose()))
            .body(Body::empty())
            .unwrap();
        let begun = Instant::now();
        let asked = TowerToHyperService::new(service.clone()).call(request);
        let answer = timeout(Duration::from_secs(60), asked).await.expect("an answer").unwrap();
        let (status, body) = (answer.status(), to_bytes(answer.into_body(), usize::MAX).await.unwrap());
        (status, String::from_utf8(body.to_vec()).unwrap(), begun.elapsed())
    }

    #[tokio::test]
    async fn a_scrape_ends_although_the_database_hangs_and_says_so() {
        let hangs = Arc::new(AtomicBool::new(false));
        let open = service(&hangs, &Config::default()).await;
        let guarded = service(&hangs, &Config { require_tokens: true, ..Config::default() }).await;
        let is_up = |text: &str, value: &str| text.lines().any(|line| line == format!("pf_database_up {value}"));
        let (status, text, _) = scrape(&open).await;
        assert!(status == StatusCode::OK && is_up(&text, "1"), "{status}: {text}");
        hangs.store(true, Ordering::Relaxed);
        // Time passes when nothing else is to be done.
        pause();
        let (status, text, took) = scrape(&open).await;
        assert!(status == StatusCode::OK && is_up(&text, "0"), "{status}: {text}");
        assert!(took < Duration::from_secs(10), "{took:?}");
        // Whether the token is valid is not known.
        let (status, text, took) = scrape(&guarded).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }

    #[tokio::test]
    async fn a_database_that_hangs_keeps_no_gauges_of_other_domains_from_being_read() {
        let (hangs, answers) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let app = app(store(&answers).await, &Config::default());
        // In the order of their names it is the first of them.
        for (name, hangs) in [("hangs", &hangs), ("well", &answers)] {
            app.domains.serve(&name.parse().unwrap(), store(hangs).await);
        }
        hangs.store(true, Ordering::Relaxed);
        let service = routes::service(app.clone(), None);
        let read = async {
            while !app.metrics.render().lines().any(|line| line == r#"pf_store_packs{domain="well"} 0"#) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            () = read => {}
            (_, text, _) = scrape(&service) => panic!("the other domain was not read: {text}"),
        }
        app.domains.stop();
    }
}
