//! The OCI Distribution API as its clients use it.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, until_metric};
use pfr_schema::{AccessToken, Digest, media_type};
use pfr_store::Damage;
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;

/// A repository, as the clients of this API write it.
const NAME: &str = "/v2/team/agent";

async fn send(request: RequestBuilder) -> Response {
    request.send().await.expect("an answer")
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers().get(name).unwrap_or_else(|| panic!("no {name}: {response:?}")).to_str().expect("text")
}

/// The code of an error, checked for the form of all errors.
async fn refused(response: Response, status: u16) -> String {
    assert_eq!(response.status().as_u16(), status, "{response:?}");
    assert_eq!(header(&response, "content-type"), "application/json");
    let errors: Value = response.json().await.expect("JSON");
    let error = &errors["errors"][0];
    assert!(error["message"].is_string() && error["detail"]["request_id"].is_string(), "{errors}");
    error["code"].as_str().expect("a code").to_owned()
}

/// Begins an upload; its address.
async fn begin(registry: &Registry, name: &str) -> String {
    let response = send(registry.request(Method::POST, &format!("{name}/blobs/uploads/"))).await;
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    header(&response, "location").to_owned()
}

async fn put_blob(registry: &Registry, name: &str, content: &[u8]) -> Digest {
    let digest = Digest::sha256(content);
    let location = begin(registry, name).await;
    let response = send(registry.request(Method::PUT, &format!("{location}?digest={digest}")).body(content.to_vec())).await;
    assert_eq!(response.status(), StatusCode::CREATED, "{response:?}");
    assert_eq!(header(&response, "location"), format!("{name}/blobs/{digest}"));
    assert_eq!(header(&response, "docker-content-digest"), digest.to_string());
    digest
}

fn image(subject: Option<&Digest>, annotation: &str) -> Vec<u8> {
    let config = json!({"mediaType": "x/config", "digest": Digest::sha256(b"{}"), "size": 2});
    let mut document = json!({
        "schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "config": config, "layers": [], "annotations": {"name": annotation}
    });
    if let Some(subject) = subject {
        document["subject"] = json!({"mediaType": media_type::OCI_MANIFEST, "digest": subject, "size": 1});
    }
    document.to_string().into_bytes()
}

async fn put_manifest(registry: &Registry, address: &str, document: &[u8]) -> Response {
    send(registry.request(Method::PUT, address).header("content-type", media_type::OCI_MANIFEST).body(document.to_vec())).await
}

#[tokio::test]
async fn a_blob_comes_in_chunks_in_their_order() {
    let registry = Registry::start().await;
    let content: Vec<u8> = (0..3_000_u32).map(|i| (i % 251) as u8).collect();
    let digest = Digest::sha256(&content);
    let location = begin(&registry, NAME).await;
    let chunk = |from: usize, to: usize| {
        let request = registry.request(Method::PATCH, &location).header("content-range", format!("{from}-{}", to - 1));
        request.body(content[from..to].to_vec())
    };
    let response = send(chunk(1_000, 2_000)).await;
    assert_eq!((header(&response, "location"), header(&response, "range")), (&location[..], "0-0"));
    assert_eq!(refused(response, 416).await, "BLOB_UPLOAD_INVALID");
    let response = send(chunk(0, 1_000)).await;
    assert_eq!((response.status(), header(&response, "range")), (StatusCode::ACCEPTED, "0-999"));
    assert_eq!(refused(send(chunk(0, 1_000)).await, 416).await, "BLOB_UPLOAD_INVALID");
    // A stream says no range.
    let response = send(registry.request(Method::PATCH, &location).body(content[1_000..2_500].to_vec())).await;
    assert_eq!(header(&response, "range"), "0-2499");
    let response = registry.get(&location).await;
    assert_eq!((response.status(), header(&response, "range")), (StatusCode::NO_CONTENT, "0-2499"));
    let wrong = format!("{location}?digest={}", Digest::sha256(b"x"));
    assert_eq!(refused(send(registry.request(Method::PUT, &wrong)).await, 400).await, "DIGEST_INVALID");
    let last = registry.request(Method::PUT, &format!("{location}?digest={digest}")).header("content-range", "2500-2999");
    assert_eq!(send(last.body(content[2_500..].to_vec())).await.status(), StatusCode::CREATED);
    assert_eq!(refused(registry.get(&location).await, 404).await, "BLOB_UPLOAD_UNKNOWN");

    let address = format!("{NAME}/blobs/{digest}");
    let response = registry.get(&address).await;
    assert_eq!((response.status(), header(&response, "content-length")), (StatusCode::OK, "3000"));
    assert_eq!(response.bytes().await.expect("all of it"), content);
    let response = send(registry.request(Method::HEAD, &address)).await;
    assert_eq!((response.status(), header(&response, "content-length")), (StatusCode::OK, "3000"));
    let part = send(registry.request(Method::GET, &address).header("range", "bytes=2990-9999")).await;
    assert_eq!((part.status(), header(&part, "content-range")), (StatusCode::PARTIAL_CONTENT, "bytes 2990-2999/3000"));
    assert_eq!(part.bytes().await.expect("a part"), content[2_990..]);
    let beyond = send(registry.request(Method::GET, &address).header("range", "bytes=3000-")).await;
    assert_eq!(beyond.status(), StatusCode::RANGE_NOT_SATISFIABLE);
    assert_eq!(refused(registry.get(&format!("/v2/team/other/blobs/{digest}")).await, 404).await, "BLOB_UNKNOWN");
    assert_eq!(refused(registry.get(&format!("{NAME}/blobs/sha256:12")).await, 400).await, "DIGEST_INVALID");

    // A last chunk that did not end the upload is sent again.
    let location = begin(&registry, NAME).await;
    assert_eq!(send(registry.request(Method::PATCH, &location).body("hello ")).await.status(), StatusCode::ACCEPTED);
    let end = |named: Digest| registry.request(Method::PUT, &format!("{location}?digest={named}")).body("world");
    assert_eq!(refused(send(end(Digest::sha256(b"x"))).await, 400).await, "DIGEST_INVALID");
    assert_eq!(send(end(Digest::sha256(b"hello world"))).await.status(), StatusCode::CREATED);

    // Cancelled; all in one request; taken out of the repository.
    let location = begin(&registry, NAME).await;
    assert_eq!(registry.delete(&location).await.status(), StatusCode::NO_CONTENT);
    assert_eq!(refused(registry.delete(&location).await, 404).await, "BLOB_UPLOAD_UNKNOWN");
    let once = registry.request(Method::POST, &format!("{NAME}/blobs/uploads/?digest={}", Digest::sha256(b"once")));
    assert_eq!(send(once.body("once")).await.status(), StatusCode::CREATED);
    assert_eq!(registry.delete(&address).await.status(), StatusCode::ACCEPTED);
    assert_eq!(refused(registry.get(&address).await, 404).await, "BLOB_UNKNOWN");
    assert_eq!(refused(registry.delete(&address).await, 404).await, "BLOB_UNKNOWN");
}

#[tokio::test]
async fn a_download_and_a_missing_blob_are_no_cut_answers() {
    let registry = Registry::start().await;
    // More than one piece of a stream.
    let content: Vec<u8> = (0..3_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let digest = put_blob(&registry, NAME, &content).await;
    let address = format!("{NAME}/blobs/{digest}");
    assert_eq!(registry.get(&address).await.bytes().await.expect("all of it"), content);
    assert_eq!(send(registry.request(Method::HEAD, &address)).await.status(), StatusCode::OK);
    let missing = format!("{NAME}/blobs/{}", Digest::sha256(b"missing"));
    assert_eq!(send(registry.request(Method::HEAD, &missing)).await.status(), StatusCode::NOT_FOUND);
    for (method, status) in [("GET", 200), ("HEAD", 200), ("HEAD", 404)] {
        let line = format!(r#"pf_http_requests_total{{route="/v2/{{repo}}/blobs/{{digest}}",method="{method}",status="{status}"}} 1"#);
        until_metric(&registry, &line).await;
    }
    let metrics = registry.get("/metrics").await.text().await.expect("text");
    assert!(!metrics.contains(r#"status="cut""#), "{metrics}");
}

#[tokio::test]
async fn manifests_have_tags_and_referrers() {
    let registry = Registry::start().await;
    assert_eq!(refused(registry.get(&format!("{NAME}/tags/list")).await, 404).await, "NAME_UNKNOWN");
    let first = image(None, "first");
    let digest = Digest::sha256(&first);
    assert_eq!(refused(put_manifest(&registry, &format!("{NAME}/manifests/v1"), &first).await, 404).await, "MANIFEST_BLOB_UNKNOWN");
    put_blob(&registry, NAME, b"{}").await;
    let response = put_manifest(&registry, &format!("{NAME}/manifests/v1"), &first).await;
    assert_eq!((response.status(), header(&response, "location")), (StatusCode::CREATED, &format!("{NAME}/manifests/{digest}")[..]));
    let response = registry.get(&format!("{NAME}/manifests/v1")).await;
    assert_eq!(header(&response, "content-type"), media_type::OCI_MANIFEST);
    assert_eq!(header(&response, "docker-content-digest"), digest.to_string());
    assert_eq!(response.bytes().await.expect("a manifest"), first);

    // By digest, also a SHA-512, with several tags at once.
    let long = Digest::of(pfr_schema::digest::Algorithm::Sha512, &first);
    let response = put_manifest(&registry, &format!("{NAME}/manifests/{long}?tag=a&tag=b&tag=a"), &first).await;
    assert_eq!((response.status(), header(&response, "oci-tag")), (StatusCode::CREATED, "a, b"));
    let response = send(registry.request(Method::HEAD, &format!("{NAME}/manifests/a"))).await;
    assert_eq!(header(&response, "docker-content-digest"), long.to_string());
    let wrong = format!("{NAME}/manifests/{}", Digest::sha256(b"x"));
    assert_eq!(refused(put_manifest(&registry, &wrong, &first).await, 400).await, "DIGEST_INVALID");
    assert_eq!(refused(put_manifest(&registry, &format!("{NAME}/manifests/t"), b"[]").await, 400).await, "MANIFEST_INVALID");
    let as_index = registry.request(Method::PUT, &format!("{NAME}/manifests/t")).header("content-type", media_type::OCI_INDEX);
    assert_eq!(refused(send(as_index.body(first.clone())).await, 400).await, "MANIFEST_INVALID");
    let huge = vec![b' '; (4 << 20) + 1];
    assert_eq!(refused(put_manifest(&registry, &format!("{NAME}/manifests/t"), &huge).await, 413).await, "SIZE_INVALID");

    let page = registry.get(&format!("{NAME}/tags/list?n=2")).await;
    assert_eq!(header(&page, "link"), format!("<{NAME}/tags/list?n=2&last=b>; rel=\"next\""));
    assert_eq!(page.json::<Value>().await.expect("JSON"), json!({"name": "team/agent", "tags": ["a", "b"]}));
    let page = registry.get(&format!("{NAME}/tags/list?n=2&last=b")).await;
    assert!(page.headers().get("link").is_none());
    assert_eq!(page.json::<Value>().await.expect("JSON")["tags"], json!(["v1"]));
    let catalog: Value = registry.get("/v2/_catalog").await.json().await.expect("JSON");
    assert_eq!(catalog, json!({"repositories": ["team/agent"]}));

    let signature = image(Some(&digest), "signature");
    let response = put_manifest(&registry, &format!("{NAME}/manifests/{}", Digest::sha256(&signature)), &signature).await;
    assert_eq!(header(&response, "oci-subject"), digest.to_string());
    for (query, count) in [("", 1), ("?artifactType=x%2Fconfig", 1), ("?artifactType=x%2Fother", 0)] {
        let response = registry.get(&format!("{NAME}/referrers/{digest}{query}")).await;
        assert_eq!(header(&response, "content-type"), media_type::OCI_INDEX);
        assert_eq!(response.headers().contains_key("oci-filters-applied"), !query.is_empty());
        let index: Value = response.json().await.expect("JSON");
        assert_eq!(index["manifests"].as_array().expect("a list").len(), count, "{index}");
        if count > 0 {
            let descriptor = &index["manifests"][0];
            assert_eq!((&descriptor["artifactType"], &descriptor["annotations"]["name"]), (&json!("x/config"), &json!("signature")));
            assert_eq!((&descriptor["size"], &descriptor["mediaType"]), (&json!(signature.len()), &json!(media_type::OCI_MANIFEST)));
        }
    }
    assert_eq!(refused(registry.get(&format!("{NAME}/referrers/{digest}?after=x")).await, 400).await, "UNSUPPORTED");
    assert_eq!(refused(registry.get(&format!("{NAME}/referrers/sha256:12")).await, 400).await, "DIGEST_INVALID");
    let nobodys = registry.get(&format!("/v2/nothing/here/referrers/{digest}")).await;
    assert_eq!(nobodys.json::<Value>().await.expect("JSON")["manifests"], json!([]));

    assert_eq!(registry.delete(&format!("{NAME}/manifests/a")).await.status(), StatusCode::ACCEPTED);
    assert_eq!(refused(registry.get(&format!("{NAME}/manifests/a")).await, 404).await, "MANIFEST_UNKNOWN");
    assert_eq!(registry.delete(&format!("{NAME}/manifests/{digest}")).await.status(), StatusCode::ACCEPTED);
    assert_eq!(refused(registry.get(&format!("{NAME}/manifests/v1")).await, 404).await, "MANIFEST_UNKNOWN");
    let patch = send(registry.request(Method::PATCH, &format!("{NAME}/manifests/v1"))).await;
    assert_eq!(refused(patch, 405).await, "UNSUPPORTED");
}

/// Otherwise a client that asks before it uploads could never heal it.
#[tokio::test]
async fn what_is_damaged_is_pushed_again() {
    let registry = Registry::start().await;
    let (blob, document, tag) = (put_blob(&registry, NAME, b"{}").await, image(None, "first"), format!("{NAME}/manifests/v1"));
    assert_eq!(put_manifest(&registry, &tag, &document).await.status(), StatusCode::CREATED);
    let head = async |address: &str| send(registry.request(Method::HEAD, address)).await.status();
    let blob_address = format!("{NAME}/blobs/{blob}");
    for digest in [blob, Digest::sha256(&document)] {
        let pack = registry.store.metadata().locate(vec![digest]).await.expect("a look-up")[0].clone().expect("a blob").pack;
        let damage = Damage { digest, pack, reason: "it was misread".into() };
        registry.store.metadata().quarantine(vec![damage]).await.expect("a quarantine");
    }
    for address in [&blob_address, &tag] {
        assert_eq!(head(address).await, StatusCode::NOT_FOUND, "{address}");
        assert_eq!(registry.get(address).await.status(), StatusCode::INTERNAL_SERVER_ERROR, "a reader is told of the damage");
    }
    put_blob(&registry, NAME, b"{}").await;
    assert_eq!(put_manifest(&registry, &tag, &document).await.status(), StatusCode::CREATED);
    for address in [&blob_address, &tag] {
        assert_eq!(head(address).await, StatusCode::OK, "{address}");
    }
}

#[tokio::test]
async fn what_a_client_pushed_is_inert_in_a_browser() {
    let registry = Registry::start().await;
    let blob = put_blob(&registry, NAME, b"{}").await;
    let script = "<script>fetch('/v1/tokens', {method: 'POST'})</script>";
    let mut page: Value = serde_json::from_slice(&image(None, script)).expect("JSON");
    page["mediaType"] = "text/html".into();
    let put = registry.request(Method::PUT, &format!("{NAME}/manifests/page")).body(page.to_string());
    assert_eq!(send(put).await.status(), StatusCode::CREATED);
    for address in [format!("{NAME}/manifests/page"), format!("{NAME}/blobs/{blob}")] {
        let answer = registry.get(&address).await;
        assert_eq!(header(&answer, "content-security-policy"), "sandbox; default-src 'none'", "{address}");
        assert_eq!(header(&answer, "x-content-type-options"), "nosniff", "{address}");
    }
}

#[tokio::test]
async fn snapshots_are_artifacts_that_can_be_read_signed_and_tagged() {
    let registry = Registry::start().await;
    let pushed = snapshot(0..4, vec![]);
    registry.push(REPO, &pushed, Some("state")).await;
    let response = registry.get(&format!("{NAME}/manifests/state")).await;
    assert_eq!(header(&response, "docker-content-digest"), pushed.manifest.to_string());
    let bytes = response.bytes().await.expect("a manifest");
    let manifest: Value = serde_json::from_slice(&bytes).expect("JSON");
    assert_eq!(manifest["artifactType"], media_type::SNAPSHOT);
    let layers = manifest["layers"].as_array().expect("layers").iter().chain([&manifest["config"]]);
    for layer in layers {
        let digest = layer["digest"].as_str().expect("a digest");
        let blob = registry.get(&format!("{NAME}/blobs/{digest}")).await.bytes().await.expect("a blob");
        assert_eq!(Digest::sha256(&blob).to_string(), digest);
    }
    put_blob(&registry, NAME, b"{}").await;
    let signature = image(Some(&pushed.manifest), "signature");
    assert_eq!(put_manifest(&registry, &format!("{NAME}/manifests/signed"), &signature).await.status(), StatusCode::CREATED);
    let index: Value = registry.get(&format!("{NAME}/referrers/{}", pushed.manifest)).await.json().await.expect("JSON");
    assert_eq!(index["manifests"][0]["digest"], Digest::sha256(&signature).to_string());
    assert_eq!(put_manifest(&registry, &format!("{NAME}/manifests/copy"), &bytes).await.status(), StatusCode::CREATED);
    assert_eq!(refused(put_manifest(&registry, "/v2/team/other/manifests/copy", &bytes).await, 400).await, "MANIFEST_INVALID");
    let tags: Value = registry.get(&format!("/v1/repositories/{REPO}/tags")).await.json().await.expect("JSON");
    let names: Vec<&Value> = tags["tags"].as_array().expect("tags").iter().map(|tag| &tag["name"]).collect();
    assert_eq!(names, ["copy", "state"], "lists of snapshots leave images out");
}

/// Sends a request as Docker does: with any user, and the token as the password.
async fn as_docker(registry: &Registry, token: &AccessToken, method: Method, path: &str) -> Response {
    send(registry.request(method, path).basic_auth("docker", Some(token.expose()))).await
}

#[tokio::test]
async fn a_token_is_the_password_and_opens_its_repositories_only() {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), |_| ()).await;
    let digest = put_blob(&registry, NAME, b"secret").await;
    put_blob(&registry, "/v2/domains/default/team/agent", b"{}").await;
    let (mine, team) = (registry.token(&["mine/*:pull,push"]).await, registry.token(&["*:pull,push"]).await);
    registry.stopped().await;
    let registry = Registry::start_again(data.path(), |config| config.require_tokens = true).await;
    let ping = registry.get("/v2/").await;
    assert_eq!(header(&ping, "docker-distribution-api-version"), "registry/2.0");
    assert!(header(&ping, "www-authenticate").starts_with("Basic "));
    assert_eq!(refused(ping, 401).await, "UNAUTHORIZED");
    assert_eq!(as_docker(&registry, &mine, Method::GET, "/v2/").await.status(), StatusCode::OK);
    let hidden = as_docker(&registry, &mine, Method::GET, &format!("{NAME}/blobs/{digest}")).await;
    assert_eq!(refused(hidden, 404).await, "NAME_UNKNOWN");
    // A mount from a repository that the caller does not see begins an upload, as from none.
    for query in [format!("mount={digest}&from=team/agent"), format!("mount={digest}"), format!("mount={}", Digest::sha256(b"x"))] {
        let answer = as_docker(&registry, &mine, Method::POST, &format!("/v2/mine/a/blobs/uploads/?{query}")).await;
        assert_eq!(answer.status(), StatusCode::ACCEPTED, "{query}");
        let answer = as_docker(&registry, &team, Method::POST, &format!("/v2/mine/a/blobs/uploads/?{query}")).await;
        let is_there = query.contains(&digest.hex());
        assert_eq!(answer.status(), if is_there { StatusCode::CREATED } else { StatusCode::ACCEPTED }, "{query}");
        if is_there {
            let address = header(&answer, "location").to_owned();
            assert_eq!(as_docker(&registry, &mine, Method::GET, &address).await.text().await.expect("text"), "secret");
            assert_eq!(as_docker(&registry, &mine, Method::DELETE, &address).await.status(), StatusCode::FORBIDDEN);
            let delete = registry.token(&["mine/*:delete,pull"]).await;
            assert_eq!(as_docker(&registry, &delete, Method::DELETE, &address).await.status(), StatusCode::ACCEPTED);
        }
    }
    registry.stopped().await;
}

#[tokio::test]
async fn a_name_may_begin_with_its_domain() {
    let registry = Registry::start().await;
    assert!(registry.put("/v1/domains/acme", &json!({})).await.status().is_success());
    let name = "/v2/domains/acme/team/agent";
    let digest = put_blob(&registry, name, b"{}").await;
    let document = image(None, "of acme");
    let response = put_manifest(&registry, &format!("{name}/manifests/t"), &document).await;
    assert_eq!(response.status(), StatusCode::CREATED);
    assert!(header(&response, "location").starts_with(name));
    assert_eq!(refused(registry.get(&format!("{NAME}/blobs/{digest}")).await, 404).await, "BLOB_UNKNOWN");
    assert_eq!(registry.get("/domains/acme/v2/team/agent/manifests/t").await.bytes().await.expect("bytes"), document);
    let tags: Value = registry.get(&format!("{name}/tags/list")).await.json().await.expect("JSON");
    assert_eq!(tags, json!({"name": "domains/acme/team/agent", "tags": ["t"]}));
    let nowhere = registry.get("/v2/domains/nowhere/team/agent/tags/list").await;
    assert_eq!(refused(nowhere, 404).await, "NAME_UNKNOWN");
}

#[tokio::test]
async fn an_upload_that_stalls_is_cut_and_goes_on_where_it_was() {
    let registry = Registry::start_with(|config| config.body_idle_seconds = 1).await;
    let location = begin(&registry, NAME).await;
    let patch = |body: &'static str| registry.request(Method::PATCH, &location).body(body);
    assert_eq!(header(&send(patch("one ")).await, "range"), "0-3");
    let stream = futures::stream::iter([Ok::<_, std::io::Error>("two ")]);
    let stream = futures::StreamExt::chain(stream, futures::stream::pending());
    let stalled = send(registry.request(Method::PATCH, &location).body(reqwest::Body::wrap_stream(stream))).await;
    assert_eq!(refused(stalled, 504).await, "UNAVAILABLE");
    assert_eq!(header(&registry.get(&location).await, "range"), "0-3");
    assert_eq!(header(&send(patch("three")).await, "range"), "0-8");
    let digest = Digest::sha256(b"one three");
    let done = send(registry.request(Method::PUT, &format!("{location}?digest={digest}"))).await;
    assert_eq!(done.status(), StatusCode::CREATED);
}

/// Four large documents are read at once. Those already read do not count among the four, however
/// long their clients take.
#[tokio::test]
async fn slow_readers_of_large_manifests_do_not_hold_up_other_documents() {
    let registry = Registry::start_with(|config| config.queue_seconds = 30).await;
    put_blob(&registry, NAME, b"{}").await;
    let document = image(None, &"large ".repeat(600_000));
    assert_eq!(put_manifest(&registry, &format!("{NAME}/manifests/large"), &document).await.status(), StatusCode::CREATED);
    let sample = snapshot(0..2, vec![]);
    registry.push(REPO, &sample, Some("latest")).await;
    let mut slow = Vec::new();
    for _ in 0..12 {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(4096).expect("a small buffer");
        let mut stream = socket.connect(registry.address).await.expect("a connection");
        let head = format!("GET {NAME}/manifests/large HTTP/1.1\r\nhost: localhost\r\n\r\n");
        stream.write_all(head.as_bytes()).await.expect("written");
        let mut answer = [0; 15];
        stream.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 200 OK");
        slow.push(stream);
    }
    let begun = Instant::now();
    let path = format!("/v1/repositories/{REPO}/snapshots/{}", sample.manifest);
    assert_eq!(registry.get(&path).await.status(), StatusCode::OK);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn the_quota_of_the_domain_holds_for_images() {
    let registry = Registry::start().await;
    let content = vec![7; 100_000];
    assert!(registry.put("/v1/domains/default/quota", &json!({"bytes": 50_000, "snapshots": 1})).await.status().is_success());
    let location = begin(&registry, NAME).await;
    let address = format!("{location}?digest={}", Digest::sha256(&content));
    assert_eq!(refused(send(registry.request(Method::PUT, &address).body(content)).await, 403).await, "DENIED");
    put_blob(&registry, NAME, b"{}").await;
    for (tag, status) in [("one", 201), ("two", 403), ("one", 201)] {
        let answer = put_manifest(&registry, &format!("{NAME}/manifests/{tag}"), &image(None, tag)).await;
        assert_eq!(answer.status().as_u16(), status, "{tag}");
    }
}

#[tokio::test]
async fn what_an_immutable_tag_needs_is_deleted_by_administrators_only() {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), |_| ()).await;
    let config = put_blob(&registry, NAME, b"{}").await;
    let document = image(None, "release");
    assert_eq!(put_manifest(&registry, &format!("{NAME}/manifests/v1"), &document).await.status(), StatusCode::CREATED);
    let policies = json!({"policies": [{"name": "releases", "repositories": "team/*", "immutable_tags": ["v*"]}]});
    assert!(registry.put("/v1/retention", &policies).await.status().is_success());
    let (user, administrator) = (registry.token(&["*:pull,push,delete"]).await, registry.token(&["*:pull,push,delete,admin"]).await);
    registry.stopped().await;

    let registry = Registry::start_again(data.path(), |config| config.require_tokens = true).await;
    let blob = format!("{NAME}/blobs/{config}");
    for address in [&blob, &format!("{NAME}/manifests/v1"), &format!("{NAME}/manifests/{}", Digest::sha256(&document))] {
        assert_eq!(refused(as_docker(&registry, &user, Method::DELETE, address).await, 403).await, "DENIED", "{address}");
    }
    assert_eq!(as_docker(&registry, &user, Method::GET, &blob).await.status(), StatusCode::OK);
    assert_eq!(as_docker(&registry, &administrator, Method::DELETE, &blob).await.status(), StatusCode::ACCEPTED);
    assert_eq!(as_docker(&registry, &user, Method::GET, &blob).await.status(), StatusCode::NOT_FOUND);
    registry.stopped().await;
}
