//! The pages for operators, as a browser gets them.

mod tokens;

use crate::common::counted::Counted;
use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, ok, problem};
use object_store::memory::InMemory;
use pfr_client::human::bytes;
use pfr_schema::checkpoint::{ABI, Checkpoint, Dtype, Key, Layout, Tensor};
use pfr_schema::journal::Record;
use pfr_schema::snapshot::{Descriptor, Exactness, SnapshotConfig, TITLE};
use pfr_schema::tree::Document;
use pfr_schema::{AccessToken, Digest, ErrorCode, Kind, Limits, api, media_type, prefix};
use pfr_store::{Clock, Metadata, NewAccessToken, Options, SqliteMetadata, Store};
use pfr_testkit::frames;
use pfr_testkit::snapshot::{Shape, Snapshot};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// As browsers send it.
const ACCEPT: &str = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
const PAGE: &str = "/ui/team%2Fagent";
const HOSTILE: &str = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>";

async fn browse(registry: &Registry, path: &str) -> Response {
    browse_as(registry, None, path).await
}

/// As a browser whose user has entered a token.
async fn browse_as(registry: &Registry, token: Option<&AccessToken>, path: &str) -> Response {
    signed(registry.request(Method::GET, path), token).send().await.expect("an answer")
}

fn signed(request: RequestBuilder, token: Option<&AccessToken>) -> RequestBuilder {
    let request = request.header("accept", ACCEPT);
    match token {
        Some(token) => request.basic_auth("me", Some(token.expose())),
        None => request,
    }
}

/// The text of a page, checked for what every page must be.
async fn page_with(status: StatusCode, answer: Response) -> String {
    let (url, found, headers) = (answer.url().clone(), answer.status(), answer.headers().clone());
    let text = answer.text().await.expect("a body");
    assert_eq!(found, status, "{url}: {text}");
    assert_eq!(headers["content-type"], "text/html; charset=utf-8", "{url}");
    assert_eq!(headers["cache-control"], "private, no-cache", "{url}");
    assert_eq!(headers["x-content-type-options"], "nosniff", "{url}");
    let policy = headers["content-security-policy"].to_str().expect("text");
    assert!(policy.starts_with("default-src 'none'; style-src 'self';") && !policy.contains("script"), "{url}: {policy}");
    assert!(text.starts_with("<!DOCTYPE html><html lang=\"en\">"), "{url}: {text}");
    for needed in ["<title>", "<main id=\"content\">", "<h1>", "name=\"viewport\""] {
        assert!(text.contains(needed), "{url} lacks {needed}");
    }
    for forbidden in ["<script", "<img", " style=", " onclick", "javascript:", "http-equiv"] {
        assert!(!text.contains(forbidden), "{url} has {forbidden}: {text}");
    }
    text
}

async fn page(registry: &Registry, path: &str) -> String {
    page_with(StatusCode::OK, browse(registry, path).await).await
}

/// The links of a page that stay in the registry.
fn links(page: &str) -> Vec<String> {
    let hrefs = page.split(" href=\"").skip(1).filter_map(|rest| rest.split('"').next());
    hrefs.filter(|href| !href.starts_with('#')).map(|href| href.replace("&amp;", "&")).collect()
}

async fn push(registry: &Registry, base: &str, snapshot: &Snapshot, more: &[Document], tag: Option<&str>) {
    let repository = format!("{base}/v1/repositories/{REPO}/pushes");
    let session: api::Push = ok(registry.post(&repository, &json!({})).await).await;
    let path = format!("{repository}/{}", session.id);
    let blobs = more.iter().chain(snapshot.blobs());
    let _: api::FramesStored = ok(registry.put_frames(&path, frames::stream(blobs.map(frames::of))).await).await;
    let commit = json!({"manifest": snapshot.digest(), "tag": tag});
    let _: api::Committed = ok(registry.post(&format!("{path}/commit"), &commit).await).await;
}

/// A snapshot in which everything that its writer chooses is hostile, and what it needs besides its
/// own blobs.
fn hostile() -> (Snapshot, Vec<Document>) {
    let payload = Document::new(Kind::Blob, vec![7; 16]);
    let layout = Layout { tag: HOSTILE.into(), strides: Some(vec![1]), offset: Some(0) };
    let (name, kind) = (HOSTILE.to_owned(), format!("other:{HOSTILE}"));
    let tensor = Tensor::describe(name, kind, Some(3), vec![16], Dtype::U8, Dtype::U8, layout, &payload.bytes, &Limits::default());
    let tokens: Vec<u32> = (0..16).collect();
    let fingerprint = Digest::sha256(b"configuration");
    let key = Key {
        scheme: prefix::SCHEME.into(),
        prefix: prefix::key(&fingerprint, "a secret salt", None, &tokens),
        tokens: 16,
        alignment: 16,
        salt: "a secret salt".into(),
        adapter: Some(HOSTILE.into()),
    };
    let checkpoint = Checkpoint { abi: ABI.into(), key: key.clone(), tensors: vec![tensor.expect("a tensor")] };
    let checkpoint = Document::new(Kind::Checkpoint, checkpoint.to_bytes());
    let attachment = Document::new(Kind::Blob, b"attached".to_vec());
    let mut attached = Descriptor::of(media_type::OCTETS, &attachment);
    attached.annotations.insert(TITLE.into(), HOSTILE.into());
    let values = || [(HOSTILE.to_owned(), Value::from(HOSTILE))].into();
    let config = SnapshotConfig {
        agent: Some(HOSTILE.into()),
        engine: Some(HOSTILE.into()),
        deployment: values(),
        sampling: values(),
        unrecorded: vec![HOSTILE.into()],
        fingerprint: Some(fingerprint),
        boundary: Some(16),
        prefix: Some(key),
        exactness: Some(Exactness::BitExact),
        parents: vec![Digest::sha256(b"not here")],
        created: Some("2026-01-31T12:00:00Z".into()),
    };
    let layers = vec![Descriptor::of(media_type::CHECKPOINT, &checkpoint), attached];
    (Shape::TINY.snapshot(&[1, 2]).config(config).layers(layers).build(), vec![payload, checkpoint, attachment])
}

#[tokio::test]
async fn an_empty_registry_says_so_on_every_page() {
    let registry = Registry::start().await;
    let overview = page(&registry, "/").await;
    for words in ["Nothing has been pushed yet", "No push is under way", "No garbage collection has found anything yet", "collection"] {
        assert!(overview.contains(words), "{words}: {overview}");
    }
    assert!(!overview.contains("id=\"domains\""), "one domain is no list");
    assert!(page(&registry, "/ui/-/repositories").await.contains("Nothing has been pushed yet"));
    assert!(page(&registry, "/ui/-/storage").await.contains("begins the chart"));
    assert!(page(&registry, "/ui/-/tasks").await.contains("scrub"));
    let engines = page(&registry, "/ui/-/engines").await;
    for words in ["No agent has reported", "No engine is known", "No drain and no warm"] {
        assert!(engines.contains(words), "{words}: {engines}");
    }
}

#[tokio::test]
async fn pages_show_what_was_pushed_and_what_it_costs() {
    let registry = Registry::start().await;
    let base = snapshot(0..40, vec![]);
    let fork = snapshot(0..44, vec![base.manifest]);
    registry.push(REPO, &base, Some("step-1")).await;
    registry.push(REPO, &fork, Some("step-2")).await;
    let _: api::Forked =
        ok(registry.post(&format!("/v1/repositories/{REPO}/forks"), &json!({"snapshot": "step-2", "count": 9, "prefix": "try"})).await)
            .await;
    let open = registry.open_push("another").await;
    let stats: api::Stats = ok(registry.get(&format!("/v1/repositories/{REPO}/stats")).await).await;

    let overview = page(&registry, "/").await;
    let logical = bytes(stats.logical);
    for words in ["href=\"/ui/team%2Fagent\">team/agent</a>", "<th scope=\"row\">another</th>", &logical, ">11<"] {
        assert!(overview.contains(words), "{words}: {overview}");
    }
    let tree = page(&registry, PAGE).await;
    for snapshot in &stats.snapshots {
        let words = format!("{} exclusive, {} shared; {} were new", bytes(snapshot.exclusive), bytes(snapshot.shared), bytes(snapshot.new));
        assert!(tree.contains(&words), "{words}: {tree}");
        assert!(tree.contains(&format!("href=\"{PAGE}/{}\"", snapshot.digest)), "{tree}");
    }
    assert!(tree.contains(&format!(", continues {}", base.manifest.short())) && tree.contains("begins a lineage"), "{tree}");
    assert!(tree.contains("<li class=\"more\">4 more</li>"), "of ten tags, six are named: {tree}");

    let by_tag = page(&registry, &format!("{PAGE}/step-2")).await;
    let by_digest = page(&registry, &format!("{PAGE}/{}", fork.manifest)).await;
    let address = registry.address;
    for words in [
        format!("pf pull http://{address}/team/agent:step-2"),
        format!("pf restore http://{address}/team/agent:step-2 ENGINE"),
        format!("pf rm http://{address}/team/agent@{}", fork.manifest),
        format!("frees <strong>{}</strong>", bytes(stats.snapshots[1].exclusive)),
        format!("href=\"{PAGE}/{}\"", base.manifest),
        "2 layers × 2 heads × 8, f16".to_owned(),
        "full attention".to_owned(),
        "and its 10 tags".to_owned(),
        "It is not signed.".to_owned(),
    ] {
        assert!(by_tag.contains(&words) && by_digest.contains(&words), "{words}: {by_tag}");
    }
    // Of its tags, the one that was asked for.
    let by_fork = page(&registry, &format!("{PAGE}/try-3")).await;
    for words in ["<title>try-3 –", "<h1>try-3</h1>", &format!("pf pull http://{address}/team/agent:try-3<")] {
        assert!(by_fork.contains(words), "{words}: {by_fork}");
    }
    assert!(by_tag.contains("<h1>step-2</h1>") && by_digest.contains("<h1>step-2</h1>"), "{by_digest}");
    let base_page = page(&registry, &format!("{PAGE}/{}", base.manifest)).await;
    assert!(base_page.contains("child ") && base_page.contains(&format!("href=\"{PAGE}/{}\"", fork.manifest)), "{base_page}");
    let _ = registry.delete(&open).await;
}

#[tokio::test]
async fn what_a_writer_chose_is_escaped_and_its_salt_is_not_shown() {
    let registry = Registry::start().await;
    let (snapshot, more) = hostile();
    push(&registry, "", &snapshot, &more, None).await;
    let tree = page(&registry, PAGE).await;
    assert!(tree.contains("its parent is not listed") && tree.contains(">16<"), "{tree}");
    let text = page(&registry, &format!("{PAGE}/{}", snapshot.digest())).await;
    let escaped = "&lt;script&gt;alert(1)&lt;/script&gt;&quot;'&gt;&lt;img src=x onerror=alert(2)&gt;";
    // Agent, engine, adapter, what was not recorded, two tables of two, tensor, its kind, its
    // layout, and the attachment.
    assert_eq!(text.matches(escaped).count(), 12, "{text}");
    assert!(!text.contains("a secret salt"), "{text}");
    for words in ["bit-exact", "is not in this repository", "pfv1:sha256:", ">u8<", "Checkpoint of rank 0"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    // A host that no command understands is not shown.
    let request = registry.request(Method::GET, &format!("{PAGE}/{}", snapshot.digest())).header("accept", ACCEPT);
    let text = page_with(StatusCode::OK, request.header("host", "a;reboot.localhost").send().await.expect("an answer")).await;
    assert!(!text.contains("reboot") && text.contains("pf pull team/agent@sha256:"), "{text}");
    let path = format!("{PAGE}/%3Cscript%3Ealert(1)%3C%2Fscript%3E");
    let text = page_with(StatusCode::BAD_REQUEST, browse(&registry, &path).await).await;
    assert!(text.contains("&lt;script&gt;alert(1)"), "{text}");
}

/// Text that turns itself around says something else than it is, without any markup.
#[tokio::test]
async fn characters_that_would_not_be_seen_are_shown() {
    const TURNED: &str = "build\u{202e}enihcam\u{200b}";
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let operator = registry.token(&["*:pull,push"]).await;
    let new =
        NewAccessToken { label: TURNED.into(), domain: None, scopes: vec!["team/*:pull".parse().expect("a scope")], expires_at: None };
    let token = registry.tokens().create(new).await.expect("a token").0;
    let text = page_with(StatusCode::OK, browse_as(&registry, Some(&token), "/").await).await;
    assert!(text.contains("<strong>build\\u{202e}enihcam\\u{200b}</strong>") && !text.contains('\u{202e}'), "{text}");
    let refused = page_with(StatusCode::FORBIDDEN, browse_as(&registry, Some(&token), "/ui/-/tasks").await).await;
    assert!(refused.contains("<strong>build\\u{202e}enihcam") && !refused.contains('\u{202e}'), "{refused}");
    // What a writer chose, and what a request says.
    let config = SnapshotConfig { agent: Some(TURNED.into()), ..SnapshotConfig::default() };
    let turned = Shape::TINY.snapshot(&[1]).config(config).build();
    let repository = format!("/v1/repositories/{REPO}/pushes");
    let session: api::Push = ok(registry.send_as(&operator, registry.request(Method::POST, &repository)).await).await;
    let path = format!("{repository}/{}", session.id);
    let frames = registry.request(Method::PUT, &format!("{path}/frames")).header("content-type", media_type::FRAMES);
    let frames = frames.body(frames::stream(turned.blobs().into_iter().map(frames::of)));
    let _: api::FramesStored = ok(registry.send_as(&operator, frames).await).await;
    let commit = registry.request(Method::POST, &format!("{path}/commit")).json(&json!({"manifest": turned.digest()}));
    let _: api::Committed = ok(registry.send_as(&operator, commit).await).await;
    let shown = page_with(StatusCode::OK, browse_as(&registry, Some(&token), &format!("{PAGE}/{}", turned.digest())).await).await;
    assert!(shown.contains("<dd>build\\u{202e}enihcam\\u{200b}</dd>") && !shown.contains('\u{202e}'), "{shown}");
    let malformed = browse_as(&registry, Some(&token), "/ui/a%E2%80%AEb").await;
    assert!(!page_with(StatusCode::BAD_REQUEST, malformed).await.contains('\u{202e}'));
}

#[tokio::test]
async fn engines_and_drains_are_shown_as_reported_and_texts_of_agents_are_escaped() {
    let registry = Registry::start().await;
    let engine = |engine: &str, state: &str, text: &str| {
        json!({
            "engine": engine, "model": text, "fingerprint": Digest::sha256(b"f"), "state": state, "note": text,
            "snapshots": 1234, "restores": 0, "staged": 2,
        })
    };
    let job = |kind: &str, state: &str, about: &str| {
        json!({
            "id": "j", "kind": kind, "about": about, "state": state, "started_at": 1, "bytes_done": 5_000_000, "bytes_total": 10_000_000,
            "seconds_left": 90, "note": about,
        })
    };
    let report = json!({
        "version": HOSTILE, "interval_seconds": 30,
        "engines": [engine("vllm-0", "ready", "a model"), engine(HOSTILE, "busy", HOSTILE)],
        "jobs": [job("drain", "running", "team/away"), job("warm", "cancelled", HOSTILE)],
    });
    assert!(registry.put("/v1/agents/gpu-1", &report).await.status().is_success());
    let text = page(&registry, "/ui/-/engines").await;
    for words in [">gpu-1<", ">vllm-0<", ">a model<", "ready: a model", ">1,234<", "drain team/away", "running", "cancelled", ">90 s<"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    // The version; engine, model and note of one engine; reference and note of one job.
    let escaped = "&lt;script&gt;alert(1)&lt;/script&gt;&quot;'&gt;&lt;img src=x onerror=alert(2)&gt;";
    assert_eq!(text.matches(escaped).count(), 6, "{text}");
    for number in 2..5 {
        assert!(registry.put(&format!("/v1/agents/gpu-{number}"), &report).await.status().is_success());
    }
    let first = page(&registry, "/ui/-/engines?limit=3").await;
    let next = links(&first).into_iter().find(|link| link.contains("after=")).expect("a next page");
    assert!(!first.contains(">gpu-4<") && page(&registry, &next).await.contains(">gpu-4<"), "{next}");
}

#[tokio::test]
async fn the_address_above_the_pages_leads_to_the_first_one() {
    let registry = Registry::start().await;
    let _: api::DomainInfo = ok(registry.put("/v1/domains/acme", &json!({})).await).await;
    for (path, leads) in [("/ui", "/"), ("/ui/", "/"), ("/domains/acme/ui", "/domains/acme/"), ("/domains/acme/ui/", "/domains/acme/")] {
        let answer = browse(&registry, path).await;
        assert_eq!(answer.url().path(), leads, "{path}");
        assert!(page_with(StatusCode::OK, answer).await.contains("<h1>Overview</h1>"), "{path}");
    }
    assert_eq!(browse(&registry, "/domains/nobody/ui").await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn failures_are_pages_for_browsers_and_documents_for_others() {
    let registry = Registry::start().await;
    for (path, status, words) in [
        (PAGE, 404, "No such repository"),
        ("/ui/team%2Fagent/step-1", 404, "No such repository"),
        ("/ui/Team", 400, "A name, reference or digest is malformed"),
        ("/ui/-", 400, "A name, reference or digest is malformed"),
        ("/ui/-/storage?limit=0", 400, "expected a limit from 1 to 1000"),
        ("/nonsense", 404, "No such address"),
        ("/domains/nobody/", 404, "No such domain"),
        ("/domains/nobody/ui/-/storage", 404, "No such domain"),
        ("/ui/team%2Fagent/step-1/verify", 405, "does not allow GET"),
    ] {
        let answer = browse(&registry, path).await;
        let id = answer.headers()["x-request-id"].to_str().expect("text").to_owned();
        let text = page_with(StatusCode::from_u16(status).expect("a status"), answer).await;
        assert!(text.contains(words) && text.contains(&id), "{path}: {words}: {text}");
        assert_eq!(problem(registry.get(path).await).await.status, status, "{path}");
    }
    let answer = browse(&registry, "/v1/repositories/team%2Fagent/tags").await;
    assert_eq!(problem(answer).await.code, ErrorCode::RepositoryUnknown, "the API answers everyone alike");
    let base = snapshot(0..3, vec![]);
    registry.push(REPO, &base, None).await;
    for page in ["0", "2", "x"] {
        page_with(StatusCode::BAD_REQUEST, browse(&registry, &format!("{PAGE}?page={page}")).await).await;
    }
    let unknown = format!("{PAGE}/{}", Digest::sha256(b"other"));
    assert!(page_with(StatusCode::NOT_FOUND, browse(&registry, &unknown).await).await.contains("No such snapshot"));
}

#[tokio::test]
async fn a_verification_is_asked_for_by_a_form_of_this_site_only() {
    let registry = Registry::start().await;
    let base = snapshot(0..20, vec![]);
    registry.push(REPO, &base, Some("step-1")).await;
    let form = format!("{PAGE}/{}/verify", base.manifest);
    let shown = page(&registry, &format!("{PAGE}/step-1")).await;
    assert!(shown.contains(&format!("<form method=\"post\" action=\"{form}\">")), "{shown}");
    let submit = async |name: &'static str, value: String| {
        let request = registry.request(Method::POST, &form).header("accept", ACCEPT);
        request.header("content-type", "application/x-www-form-urlencoded").header(name, value).send().await.expect("an answer")
    };
    for (name, value) in
        [("sec-fetch-site", "cross-site".to_owned()), ("origin", "https://evil.example".to_owned()), ("origin", "null".to_owned())]
    {
        let text = page_with(StatusCode::FORBIDDEN, submit(name, value).await).await;
        assert!(text.contains("a page of another site"), "{text}");
    }
    for (name, value) in [("sec-fetch-site", "same-origin".to_owned()), ("origin", registry.url(""))] {
        let text = page_with(StatusCode::OK, submit(name, value).await).await;
        assert!(text.contains("Every blob is what its name says.") && text.contains(&base.manifest.to_string()), "{text}");
    }
    // Bytes that rot are found.
    for pack in packs(registry.dir.path()) {
        let mut bytes = std::fs::read(&pack).expect("read");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(pack, bytes).expect("written");
    }
    let text = page_with(StatusCode::INTERNAL_SERVER_ERROR, submit("sec-fetch-site", "same-origin".into()).await).await;
    assert!(text.contains("A stored blob is damaged"), "{text}");
}

fn packs(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let (mut found, mut dirs) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|kind| kind == "pfpack") {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty());
    found
}

/// Follows every link from these pages, as far as it stays in the registry. Checks each page, and
/// returns the texts by their addresses.
async fn crawl(registry: &Registry, token: Option<&AccessToken>, starts: &[&str]) -> BTreeMap<String, String> {
    let (mut texts, mut next) = (BTreeMap::new(), starts.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>());
    while let Some(path) = next.pop() {
        if texts.contains_key(&path) {
            continue;
        }
        let answer = browse_as(registry, token, &path).await;
        let is_document = path.contains("/v1/") || ["/metrics", "/openapi.json"].contains(&path.as_str());
        if is_document || ["/ui/-/style", "/ui/-/icon"].iter().any(|file| path.contains(file)) {
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
            texts.insert(path, answer.text().await.expect("text"));
            continue;
        }
        let text = page_with(StatusCode::OK, answer).await;
        for link in links(&text) {
            assert!(link.starts_with('/'), "{path}: {link} leads out of the registry");
            next.push(link);
        }
        let head = signed(registry.request(Method::HEAD, &path), token).send().await.expect("an answer");
        let found = (head.status(), head.headers()["content-type"].to_str().ok());
        assert_eq!(found, (StatusCode::OK, Some("text/html; charset=utf-8")), "{path}");
        assert!(head.bytes().await.expect("no body").is_empty());
        texts.insert(path, text);
    }
    texts
}

#[tokio::test]
async fn every_link_of_every_page_leads_somewhere() {
    let registry = Registry::start().await;
    let _: api::DomainInfo = ok(registry.put("/v1/domains/acme", &json!({})).await).await;
    let (stranger, more) = hostile();
    for base in ["", "/domains/acme"] {
        push(&registry, base, &stranger, &more, None).await;
    }
    // More than a page of the tree, and more than a page of repositories.
    let mut parent = None;
    for step in 0..102_u64 {
        let next = snapshot(step..step + 3, parent.into_iter().collect());
        registry.push(REPO, &next, Some(&format!("step-{step}"))).await;
        parent = Some(next.manifest);
    }
    for number in 0..21 {
        registry.push(&format!("more%2Fr-{number}"), &snapshot([number], vec![]), None).await;
    }
    let _: api::GcReport = ok(registry.post("/v1/gc", &json!({})).await).await;
    let pages = crawl(&registry, None, &["/", "/ui/-/repositories?limit=7"]).await;
    for wanted in
        ["/domains/acme/", "/domains/acme/ui/team%2Fagent", "/domains/acme/ui/-/tasks", "/ui/team%2Fagent?page=2", "/ui/more%2Fr-20"]
    {
        assert!(pages.contains_key(wanted), "{wanted}: {:?}", pages.keys());
    }
    assert!(pages.len() > 140, "{}", pages.len());
}

#[tokio::test]
async fn storage_over_time_is_drawn_from_the_collections() {
    let registry = Registry::start_with(|config| (config.gc_grace_seconds, config.gc_interval_seconds) = (0, 0)).await;
    for round in 0..3_u64 {
        let lost = snapshot(round * 100..round * 100 + 30, vec![]);
        registry.push(REPO, &lost, None).await;
        let gone = registry.delete(&format!("/v1/repositories/{REPO}/snapshots/{}", lost.manifest)).await;
        assert!(gone.status().is_success());
        let begun: api::GcReport = ok(registry.post("/v1/gc", &json!({})).await).await;
        let ended = async {
            loop {
                let report: api::GcReport = ok(registry.get(&format!("/v1/gc/{}", begun.id)).await).await;
                if report.finished_at.is_some() {
                    return report;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let report = tokio::time::timeout(Duration::from_secs(60), ended).await.expect("it ends");
        assert!(report.disk_bytes.is_some(), "{report:?}");
    }
    let text = page(&registry, "/ui/-/storage").await;
    for words in ["bytes of all packs: ", "<td class=\"wide\">request</td>", "Storage after", "<path class=\"line\" d=\"M0 "] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(page(&registry, "/ui/-/storage?limit=2").await.matches("<td class=\"wide\">request</td>").count(), 2);
    assert!(page(&registry, "/ui/-/storage?limit=2").await.contains("Earlier collections"));
}

#[tokio::test]
async fn what_is_used_of_a_quota_is_shown_beside_its_limits() {
    let registry = Registry::start().await;
    registry.push(REPO, &snapshot(0..4, vec![]), Some("t")).await;
    assert!(!page(&registry, "/ui/-/storage").await.contains("id=\"quota\""), "there is none");
    let limits = json!({"bytes": 1_u64 << 40, "snapshots": 2_000});
    assert!(registry.put("/v1/domains/default/quota", &limits).await.status().is_success());
    let text = page(&registry, "/ui/-/storage").await;
    let row = |name: &str, used: &str, limit: &str| {
        format!("<th scope=\"row\">{name}</th><td class=\"number\">{used}</td><td class=\"number\">{limit}</td>")
    };
    let usage: api::Usage = ok(registry.get("/v1/usage").await).await;
    let used = usage.quota.expect("a quota").used_bytes;
    for row in [row("Bytes", &bytes(used), &bytes(1 << 40)), row("Snapshots", "1", "2,000")] {
        assert!(text.contains(&row), "{row}: {text}");
    }
    assert!(used > 0 && !text.contains("<th scope=\"row\">Blobs</th>"), "no limit was set on blobs: {text}");
}

#[tokio::test]
async fn the_stylesheet_is_kept_by_browsers_and_changes_its_address_with_its_content() {
    let registry = Registry::start().await;
    let text = page(&registry, "/").await;
    let style = links(&text).into_iter().find(|link| link.contains("style.css")).expect("a stylesheet");
    let answer = registry.get(&style).await;
    assert_eq!(answer.headers()["content-type"], "text/css; charset=utf-8");
    assert_eq!(answer.headers()["cache-control"], "public, max-age=31536000, immutable");
    let css = answer.text().await.expect("text");
    assert!(style.ends_with(&Digest::sha256(css.as_bytes()).short()), "{style}");
    assert!(!css.contains("url(") && !css.contains("@import"), "nothing comes from elsewhere");
}

/// Snapshots that each add two pages to a common beginning, and a tag for each: pages and nodes are
/// uploaded, and the names are written into the tables at once.
async fn forks(registry: &Registry, count: u64) {
    const PAGES: u64 = 1100;
    let shape = Shape::TINY;
    let common: Vec<u64> = (0..PAGES).collect();
    let base = shape.snapshot(&common).build();
    let mut blobs: Vec<Document> = base.blobs().into_iter().cloned().collect();
    let snapshot = |manifest, parents, at| Record::Snapshot {
        repository: "team/agent".parse().expect("a name"),
        manifest,
        parents,
        artifact_type: None,
        subject: None,
        at,
        new_bytes: 0,
    };
    let mut records = vec![snapshot(base.digest(), vec![], 1)];
    for fork in 0..count {
        let pages: Vec<u64> = common.iter().copied().chain([PAGES + 2 * fork, PAGES + 2 * fork + 1]).collect();
        let made = shape.snapshot(&pages).parents(vec![base.digest()]).build();
        blobs.extend(made.trees[0].pages[2 * PAGES as usize..].iter().chain(made.documents()).cloned());
        records.push(snapshot(made.digest(), vec![base.digest()], 2 + fork));
        let tag = format!("fork-{fork}").parse().expect("a tag");
        records.push(Record::Tag { repository: "team/agent".parse().expect("a name"), tag, manifest: made.digest(), at: 2 + fork });
    }
    let push = registry.open_push(REPO).await;
    let mut seen = BTreeSet::new();
    blobs.retain(|blob| seen.insert(blob.digest));
    let _: api::FramesStored = ok(registry.put_frames(&push, frames::stream(blobs.iter().map(frames::of))).await).await;
    assert!(registry.store.metadata().restore_names(records, 1).await.expect("restored").is_empty());
}

/// The least time of a few requests, or of the first that takes less than `limit`.
async fn least_time(registry: &Registry, path: &str, limit: Duration) -> Duration {
    let mut least = Duration::MAX;
    for _ in 0..5 {
        let begun = Instant::now();
        page(registry, path).await;
        least = least.min(begun.elapsed());
        if least < limit {
            break;
        }
    }
    least
}

/// 100 ms are the goal for the program as it is built for use; the tests' one is not optimized.
/// `pf-bench requests` measures statistics and forks of an agent of 380,000 tokens.
#[tokio::test]
async fn hundreds_of_forks_are_drawn_counted_and_forked_in_a_tenth_of_a_second() {
    are_fast(200).await;
}

mod long {
    #[tokio::test]
    async fn a_thousand_forks_are_drawn_counted_and_forked_in_a_tenth_of_a_second() {
        super::are_fast(1000).await;
    }
}

/// `count` forks of one snapshot, a multiple of a hundred.
async fn are_fast(count: u64) {
    let limit = Duration::from_millis(if cfg!(debug_assertions) { 500 + count } else { 100 });
    let registry = Registry::start().await;
    forks(&registry, count).await;
    let last = count / 100 + 1;
    let first = page(&registry, PAGE).await;
    assert!(first.contains(&format!("Page 1 of {last}")) && first.matches("<tr>").count() == 101, "{first}");
    assert!(first.matches(", branches off ").count() == 99, "{first}");
    let text = page(&registry, &format!("{PAGE}?page={last}")).await;
    let before = format!("rel=\"prev\" href=\"/ui/team%2Fagent?page={}\"", last - 1);
    assert!(text.contains(&format!("fork-{}", count - 1)) && text.contains(&before), "{text}");
    for path in [PAGE.to_owned(), format!("{PAGE}?page={last}"), format!("{PAGE}/fork-7"), "/".to_owned()] {
        let time = least_time(&registry, &path, limit).await;
        eprintln!("{path} with {count} forks: {:.1} ms", time.as_secs_f64() * 1000.0);
        assert!(time < limit, "{path}: {time:?}, the limit is {limit:?}");
    }
    let repository = format!("/v1/repositories/{REPO}");
    let (mut counted, mut forked) = (Duration::MAX, Duration::MAX);
    for round in 0..5 {
        let begun = Instant::now();
        let stats: api::Stats = ok(registry.get(&format!("{repository}/stats")).await).await;
        counted = counted.min(begun.elapsed());
        assert_eq!(stats.snapshots.len() as u64, count + 1);
        let wanted = json!({"snapshot": "fork-7", "count": 12, "prefix": format!("try-{round}")});
        let begun = Instant::now();
        let made: api::Forked = ok(registry.post(&format!("{repository}/forks"), &wanted).await).await;
        forked = forked.min(begun.elapsed());
        assert_eq!(made.tags.len(), 12);
        if counted < limit && forked < limit {
            break;
        }
    }
    eprintln!("statistics of {count} forks: {counted:?}; a fork into 12: {forked:?}");
    assert!(counted < limit && forked < limit, "{counted:?} and {forked:?}, the limit is {limit:?}");
}

/// The fewest transactions of a few requests, or of the first that has at most `most`: work in the
/// background has some too.
async fn least_transactions(registry: &Registry, counted: &Counted, path: &str, most: usize) -> usize {
    let mut least = usize::MAX;
    for _ in 0..5 {
        let before = counted.calls();
        page(registry, path).await;
        least = least.min(counted.calls() - before);
        if least <= most {
            break;
        }
    }
    least
}

/// A page may be slow on a busy machine. With a database on another one, each transaction is a
/// round trip or several.
#[tokio::test]
async fn pages_of_many_forks_and_packs_take_few_transactions() {
    let counted = Counted::new(SqliteMetadata::open_in_memory(Clock::system()).await.expect("metadata"));
    let store = Store::new(Arc::new(InMemory::new()), Arc::clone(&counted) as Arc<dyn Metadata>, Options::default());
    let registry = Registry::start_over(store).await;
    forks(&registry, 200).await;
    // Each push leaves a pack, and an entry of the queue of collection.
    for number in 0..60 {
        registry.push("team%2Fother", &snapshot([10_000 + number], vec![]), Some(&format!("t-{number}"))).await;
    }
    // The costs of 64 snapshots are one transaction.
    let costs = 201_usize.div_ceil(64) + 1;
    for (path, most) in [
        (PAGE.to_owned(), costs + 8),
        (format!("{PAGE}?page=3"), costs + 8),
        (format!("{PAGE}/fork-7"), 40),
        ("/".to_owned(), costs + 40),
        ("/ui/-/repositories".to_owned(), costs + 12),
        ("/ui/-/storage".to_owned(), 30),
        ("/ui/-/engines".to_owned(), 1),
        ("/ui/-/tasks".to_owned(), 0),
    ] {
        let found = least_transactions(&registry, &counted, &path, most).await;
        println!("{path}: {found} transactions, at most {most} are allowed");
        assert!(found <= most && (found > 0 || most == 0), "{path}: {found} transactions, at most {most} are allowed");
    }
}

#[tokio::test]
async fn the_page_of_the_api_has_every_operation_type_and_error_code_and_asks_for_no_token() {
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let text = page_with(StatusCode::OK, browse(&registry, "/docs").await).await;
    let document: Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("JSON");
    let mut ids = BTreeSet::new();
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("operations") {
            let id = operation["operationId"].as_str().expect("an id");
            let heading = format!("<h3 id=\"{id}\"><code>{} {path}</code></h3>", method.to_uppercase());
            assert!(text.contains(&heading), "{heading}");
            assert!(text.contains(&format!("<li><a href=\"#{id}\">")), "{id} is not in the list");
        }
    }
    for name in document["components"]["schemas"].as_object().expect("schemas").keys() {
        assert!(text.contains(&format!("<h3 id=\"type-{name}\">")), "{name}");
    }
    for code in ErrorCode::ALL {
        assert!(text.contains(&format!("id=\"error-{}\"", code.name())), "{code}");
    }
    for id in text.split(" id=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
        assert!(ids.insert(id), "{id} twice");
    }
    // Nothing is loaded from elsewhere, and each link within the page leads to something.
    for target in text.split(" href=\"#").skip(1).filter_map(|rest| rest.split('"').next()) {
        assert!(ids.contains(target), "#{target} leads nowhere");
    }
    assert!(!text.contains("http://") && !text.contains("src="), "something is loaded from elsewhere");
    assert!(text.contains("&quot;prefix&quot;: &quot;try&quot;"), "examples are shown");
    // The same for a domain, whether or not it exists, and for a browser that sends a wrong token.
    for path in ["/domains/acme/docs", "/domains/nowhere/docs"] {
        assert_eq!(page_with(StatusCode::OK, browse(&registry, path).await).await, text, "{path}");
    }
    let other = registry.token(&["nothing/*:pull"]).await;
    assert_eq!(page_with(StatusCode::OK, browse_as(&registry, Some(&other), "/docs").await).await, text);
}
