//! Domains over HTTP: the base path, the catalogue, and that no request reaches another domain.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, ok, problem, refused, until_metric};
use pfr_schema::api::{self, DomainState};
use pfr_schema::{Digest, ErrorCode, Kind, media_type};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::json;
use std::time::Duration;

async fn create(registry: &Registry, name: &str) -> StatusCode {
    let answer = registry.request(Method::PUT, &format!("/v1/domains/{name}")).send().await.expect("an answer");
    let status = answer.status();
    let domain: api::DomainInfo = ok(answer).await;
    assert_eq!((domain.name.as_str(), domain.state), (name, DomainState::Live));
    status
}

/// Pushes to a domain as the client does: with its base path before everything.
async fn push(registry: &Registry, base: &str, pages: &[u64], tag: &str) -> api::Committed {
    let s = snapshot(pages.iter().copied(), vec![]);
    let opened: api::Push = ok(registry.post(&format!("{base}/v1/repositories/{REPO}/pushes"), &json!({})).await).await;
    let session = format!("{base}/v1/repositories/{REPO}/pushes/{}", opened.id);
    let wanted = json!({"groups": [{"kind": Kind::Manifest, "digests": [s.manifest]}]});
    let missing: api::MissingResponse = ok(registry.post(&format!("{session}/missing"), &wanted).await).await;
    assert_eq!(missing.missing, [(0, 1)], "{base} knows it already");
    let stored: api::FramesStored = ok(registry.put_frames(&session, s.stream()).await).await;
    // The configuration of a later push is that of the first.
    assert!(stored.new + 1 >= stored.frames, "{base} shares bytes with another domain");
    ok(registry.post(&format!("{session}/commit"), &json!({"manifest": s.manifest, "tag": tag})).await).await
}

#[tokio::test]
async fn the_same_requests_in_two_domains_know_nothing_of_each_other() {
    let registry = Registry::start().await;
    assert_eq!(create(&registry, "acme").await, StatusCode::CREATED);
    assert_eq!(create(&registry, "acme").await, StatusCode::OK, "once more changes nothing");
    for base in ["", "/domains/acme"] {
        push(&registry, base, &[1, 2, 3], "t").await;
    }
    push(&registry, "/domains/acme", &[7, 8], "only-here").await;
    let tags = |base: &str| {
        let path = format!("{base}/v1/repositories/{REPO}/tags");
        let registry = &registry;
        async move { ok::<api::TagList>(registry.get(&path).await).await.tags.len() }
    };
    assert_eq!((tags("").await, tags("/domains/default").await, tags("/domains/acme").await), (1, 1, 2));
    // A session of one domain is none in another, and a digest of one cannot be read in another.
    let session: api::Push = ok(registry.post(&format!("/domains/acme/v1/repositories/{REPO}/pushes"), &json!({})).await).await;
    let path = format!("/v1/repositories/{REPO}/pushes/{}/missing", session.id);
    refused(registry.post(&path, &json!({"groups": []})).await, ErrorCode::PushUnknown).await;
    let secret = snapshot([7, 8], vec![]);
    for path in [format!("snapshots/{}", secret.manifest), "tags/only-here".to_owned()] {
        let answer = registry.get(&format!("/v1/repositories/{REPO}/{path}")).await;
        assert_eq!(problem(answer).await.status, 404, "{path}");
    }
    let digests = json!({"digests": [secret.manifest]});
    refused(registry.post(&format!("/v1/repositories/{REPO}/frames"), &digests).await, ErrorCode::BlobUnknown).await;
    let stats = |base: &'static str| {
        let registry = &registry;
        async move { ok::<api::Stats>(registry.get(&format!("{base}/v1/stats")).await).await }
    };
    assert_eq!((stats("").await.snapshots.len(), stats("/domains/acme").await.snapshots.len()), (1, 2));
    // Background work, collections and metrics are each domain's own.
    let report: api::GcReport = ok(registry.post("/domains/acme/v1/gc", &json!({"dry_run": false})).await).await;
    assert!(problem(registry.get(&format!("/v1/gc/{}", report.id)).await).await.status == 404);
    let tasks = |base: &'static str| {
        let registry = &registry;
        async move { ok::<api::TaskList>(registry.get(&format!("{base}/v1/tasks")).await).await.tasks.len() }
    };
    assert_eq!(tasks("").await, tasks("/domains/acme").await + 1, "only the default domain removes the deleted ones");
    let metrics = registry.get("/metrics").await.text().await.expect("text");
    for line in [
        "pf_store_disk_bytes ",
        "pf_store_disk_bytes{domain=\"acme\"} ",
        "pf_store_packs 1",
        "pf_store_packs{domain=\"acme\"} 2",
        "pf_store_small_packs{domain=\"acme\"} 2",
        "pf_task_runs_total{task=\"scrub\",domain=\"acme\"} ",
    ] {
        assert!(metrics.lines().any(|found| found.starts_with(line)), "{line}: {metrics}");
    }
    until_metric(&registry, "pf_gc_runs_total{trigger=\"request\",outcome=\"done\",domain=\"acme\"} 1").await;
    until_metric(&registry, "pf_gc_freed_objects_total{domain=\"acme\"} 0").await;
    assert!(!metrics.contains("pf_gc_runs_total{trigger=\"request\",outcome=\"done\"}"), "the collection of another domain: {metrics}");
}

/// What an answer says: its status, the names of its headers, and its words without digests and
/// other numbers.
async fn said(request: RequestBuilder) -> (StatusCode, Vec<String>, String) {
    let answer = request.send().await.expect("an answer");
    let mut names: Vec<String> = answer.headers().keys().map(ToString::to_string).collect();
    names.sort();
    let (status, text) = (answer.status(), answer.text().await.expect("a body"));
    let is_number = |word: &str| word.len() >= 8 && word.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    let words: Vec<&str> = words.map(|word| if is_number(word) { "#" } else { word }).collect();
    (status, names, words.join(" "))
}

/// Every request of a domain that names a digest, about this one.
fn about(registry: &Registry, session: &str, digest: Digest) -> Vec<(String, RequestBuilder)> {
    let repo = format!("/v1/repositories/{REPO}");
    let image = json!({
        "schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "layers": [{"mediaType": "x/layer", "digest": digest, "size": 1}],
        "config": {"mediaType": "x/config", "digest": digest, "size": 1}
    });
    let plain = [
        (Method::GET, format!("{repo}/snapshots/{digest}")),
        (Method::GET, format!("{repo}/snapshots/{digest}/lineage")),
        (Method::GET, format!("{repo}/snapshots/{digest}/page-manifest")),
        (Method::GET, format!("{repo}/snapshots/{digest}/diff/t")),
        (Method::GET, format!("{repo}/snapshots/t/diff/{digest}")),
        (Method::POST, format!("{repo}/snapshots/{digest}/verify")),
        (Method::DELETE, format!("{repo}/snapshots/{digest}")),
        (Method::GET, format!("/ui/{REPO}/{digest}")),
        (Method::HEAD, format!("/v2/team/agent/blobs/{digest}")),
        (Method::GET, format!("/v2/team/agent/blobs/{digest}")),
        (Method::DELETE, format!("/v2/team/agent/blobs/{digest}")),
        (Method::HEAD, format!("/v2/team/agent/manifests/{digest}")),
        (Method::GET, format!("/v2/team/agent/manifests/{digest}")),
        (Method::DELETE, format!("/v2/team/agent/manifests/{digest}")),
        (Method::GET, format!("/v2/team/agent/referrers/{digest}")),
        (Method::POST, format!("/v2/team/agent/blobs/uploads/?mount={digest}")),
        (Method::POST, format!("/v2/team/agent/blobs/uploads/?mount={digest}&from=team/agent")),
        (Method::POST, format!("/v2/team/agent/blobs/uploads/?mount={digest}&from=domains/acme/team/agent")),
    ];
    let with_body = [
        (Method::PUT, format!("{repo}/tags/stolen"), json!({"snapshot": digest})),
        (Method::POST, format!("{repo}/forks"), json!({"snapshot": digest, "count": 2, "prefix": "stolen"})),
        (Method::POST, format!("{repo}/frames"), json!({"digests": [digest]})),
        (Method::POST, format!("{session}/commit"), json!({"manifest": digest, "tag": "stolen"})),
    ];
    let plain = plain.map(|(method, path)| (format!("{method} {path}"), registry.request(method, &path)));
    let with_body = with_body.map(|(method, path, body)| (format!("{method} {path}"), registry.request(method, &path).json(&body)));
    let image =
        registry.request(Method::PUT, "/v2/team/agent/manifests/stolen").header("content-type", media_type::OCI_MANIFEST).json(&image);
    plain.into_iter().chain(with_body).chain([("an image that lists it".to_owned(), image)]).collect()
}

#[tokio::test]
async fn what_another_domain_holds_is_answered_as_what_nobody_holds() {
    let registry = Registry::start().await;
    create(&registry, "acme").await;
    push(&registry, "", &[1, 2], "t").await;
    push(&registry, "/domains/acme", &[7, 8], "t").await;
    let (secret, session) = (snapshot([7, 8], vec![]), registry.open_push(REPO).await);
    let nobody = Digest::sha256(b"nobody holds it");
    // The configuration is that of the snapshot that is here.
    for blob in secret.blobs.iter().filter(|blob| blob.digest != secret.config) {
        let wanted = json!({"groups": [{"kind": blob.kind, "digests": [blob.digest]}]});
        let missing: api::MissingResponse = ok(registry.post(&format!("{session}/missing"), &wanted).await).await;
        assert_eq!(missing.missing, [(0, 1)], "{:?} {}", blob.kind, blob.digest);
        let (held, unknown) = (about(&registry, &session, blob.digest), about(&registry, &session, nobody));
        for ((place, held), (_, unknown)) in held.into_iter().zip(unknown) {
            assert_eq!(said(held).await, said(unknown).await, "{place}, of a {:?}", blob.kind);
        }
    }
    // The same requests succeed where it is: they ask for what there is.
    for path in ["/v1/repositories/team%2Fagent/snapshots/", "/v2/team/agent/manifests/"] {
        let answer = registry.get(&format!("/domains/acme{path}{}", secret.manifest)).await;
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn a_domain_that_does_not_exist_is_unknown_to_every_request() {
    let registry = Registry::start().await;
    let document: serde_json::Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("JSON");
    for (path, item) in document["paths"].as_object().expect("paths") {
        if !path.starts_with("/v1/") || path.starts_with("/v1/domains") || path.starts_with("/v1/tokens") {
            continue;
        }
        let path = path.replace("{repo}", "a").replace("{id}", "0190aaaa-0000-7000-8000-000000000001").replace("{run}", "x");
        let path =
            path.replace("{ref}", "t").replace("{other}", "u").replace("{tag}", "t").replace("{task}", "scrub").replace("{agent}", "a");
        for method in item.as_object().expect("operations").keys() {
            let method: Method = method.to_uppercase().parse().expect("a method");
            let answer = registry.request(method.clone(), &format!("/domains/nobody{path}")).send().await.expect("an answer");
            refused(answer, ErrorCode::DomainUnknown).await;
            let answer = registry.request(method, &format!("/domains/No.Body{path}")).send().await.expect("an answer");
            refused(answer, ErrorCode::InvalidName).await;
        }
    }
    for path in ["/domains/nobody", "/domains/nobody/livez", "/domains/nobody/metrics", "/domains"] {
        refused(registry.get(path).await, ErrorCode::NotFound).await;
    }
}

#[tokio::test]
async fn the_catalogue_belongs_to_no_domain() {
    let registry = Registry::start().await;
    create(&registry, "acme").await;
    refused(registry.get("/domains/acme/v1/domains").await, ErrorCode::NotFound).await;
    refused(registry.put("/domains/acme/v1/domains/b", &json!({})).await, ErrorCode::NotFound).await;
    refused(registry.delete("/domains/acme/v1/domains/acme").await, ErrorCode::NotFound).await;
    refused(registry.delete("/v1/domains/default").await, ErrorCode::InvalidRequest).await;
    refused(registry.delete("/v1/domains/b").await, ErrorCode::DomainUnknown).await;
    refused(registry.get("/v1/domains/b").await, ErrorCode::DomainUnknown).await;
    refused(registry.put("/v1/domains/a.b", &json!({})).await, ErrorCode::InvalidName).await;
    let list: api::DomainList = ok(registry.get("/v1/domains?limit=1").await).await;
    assert_eq!((list.domains[0].name.as_str(), list.next.as_deref()), ("acme", Some("acme")));
    let rest: api::DomainList = ok(registry.get("/v1/domains?limit=1&after=acme").await).await;
    assert_eq!((rest.domains[0].name.as_str(), rest.next), ("default", None));
}

#[tokio::test]
async fn a_deleted_domain_is_unknown_at_once_and_gone_after_a_lease() {
    let registry = Registry::start_with(|config| config.lease_seconds = 1).await;
    create(&registry, "acme").await;
    push(&registry, "/domains/acme", &[1], "t").await;
    let folder = registry.dir.path().join("store/domains/acme");
    assert!(folder.join("packs/pf-store").exists());
    let answer = registry.delete("/v1/domains/acme").await;
    assert_eq!(answer.status(), StatusCode::ACCEPTED);
    refused(registry.get("/domains/acme/v1/repositories").await, ErrorCode::DomainUnknown).await;
    refused(registry.put("/v1/domains/acme", &json!({})).await, ErrorCode::DomainBusy).await;
    let deleting: api::DomainInfo = ok(registry.get("/v1/domains/acme").await).await;
    assert_eq!(deleting.state, DomainState::Deleting);
    while registry.get("/v1/domains/acme").await.status() == StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!folder.exists());
    create(&registry, "acme").await;
    let repositories: api::RepositoryList = ok(registry.get("/domains/acme/v1/repositories").await).await;
    assert_eq!(repositories.repositories, []);
}

#[tokio::test]
async fn what_is_left_of_a_domain_whose_packs_are_out_of_sight_is_deleted_only_as_lost() {
    let registry = Registry::start().await;
    create(&registry, "acme").await;
    push(&registry, "/domains/acme", &[1], "t").await;
    let files = registry.stop_keeping_files().await;
    let data = files.path().join("store");
    for entry in std::fs::read_dir(&data).expect("the data directory") {
        let entry = entry.expect("an entry");
        if entry.file_name().to_string_lossy().starts_with("metadata.sqlite") {
            // The last connection may be closing, and removes the log itself.
            match std::fs::remove_file(entry.path()) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("the catalogue is not lost: {error}"),
                _ => {}
            }
        }
    }
    let folder = data.join("domains/acme");
    std::fs::rename(folder.join("packs"), data.join("elsewhere")).expect("the packs are out of sight");
    let registry = Registry::start_again(&data, |config| config.lease_seconds = 1).await;
    let detail = refused(registry.delete("/v1/domains/acme").await, ErrorCode::InvalidRequest).await;
    assert!(detail.contains("?lost=true"), "{detail}");
    refused(registry.delete("/v1/domains/acme?lost=yes").await, ErrorCode::InvalidRequest).await;
    refused(registry.get("/v1/domains/acme").await, ErrorCode::DomainUnknown).await;
    assert!(folder.join("metadata.sqlite").exists());
    assert_eq!(registry.delete("/v1/domains/acme?lost=true").await.status(), StatusCode::ACCEPTED);
    while registry.get("/v1/domains/acme").await.status() == StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!folder.exists());
}

#[tokio::test]
async fn a_store_without_a_place_for_them_has_no_other_domains() {
    let store = pfr_store::Store::open_in_memory(pfr_store::Options::default()).await.expect("a store");
    let registry = Registry::start_over(store).await;
    refused(registry.put("/v1/domains/acme", &json!({})).await, ErrorCode::InvalidRequest).await;
}
