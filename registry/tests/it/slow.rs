//! Slow clients of every kind, and an innocent one beside them.

use crate::common::snapshot::{Snapshot, decode, page, snapshot, stream};
use crate::common::{REPO, Registry, ok, refused};
use pfr_schema::api::{self, FramesStored};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, Kind, media_type};
use pfr_testkit::snapshot::repeated;
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::Interest;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// After what time a slow client comes back.
const BACK: Duration = Duration::from_secs(5);
/// Longer than any of this takes, on any machine.
const FOR_EVER: Duration = Duration::from_secs(60);

fn large(seed: u64, mib: usize) -> Document {
    Document::new(Kind::Blob, page(seed).into_iter().cycle().take(mib << 20).collect())
}

/// What slow clients do.
#[derive(Clone)]
struct Slow {
    address: SocketAddr,
    push: String,
    digest: Digest,
    /// How many have connected.
    connected: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Upload,
    LargeFrame,
    Json,
    ChunkedJson,
    Download,
    Idle,
    Headers,
    Events,
    ImageUpload,
    ImageManifest,
    ImageDownload,
    ReadManifest,
}

const WAYS: [Way; 12] = [
    Way::Upload,
    Way::LargeFrame,
    Way::Json,
    Way::ChunkedJson,
    Way::Download,
    Way::Idle,
    Way::Headers,
    Way::Events,
    Way::ImageUpload,
    Way::ImageManifest,
    Way::ImageDownload,
    Way::ReadManifest,
];

/// A repository of images.
const IMAGES: &str = "/v2/slow/images";

impl Slow {
    async fn new(registry: &Registry) -> Self {
        let push = registry.open_push(REPO).await;
        let blob = large(7, 24);
        let _: FramesStored = ok(registry.put_frames(&push, stream(std::slice::from_ref(&blob))).await).await;
        registry.push(REPO, &snapshot(0..2, vec![]), Some("base")).await;
        for content in [b"{}".to_vec(), blob.bytes.to_vec()] {
            let post = registry.request(Method::POST, &format!("{IMAGES}/blobs/uploads/?digest={}", Digest::sha256(&content)));
            assert_eq!(post.body(content).send().await.expect("an answer").status(), StatusCode::CREATED);
        }
        let config = json!({"mediaType": "x/config", "digest": Digest::sha256(b"{}"), "size": 2});
        let image = json!({
            "schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "config": config, "layers": [],
            "annotations": {"name": "large ".repeat(600_000)}
        });
        let put = registry.request(Method::PUT, &format!("{IMAGES}/manifests/large")).header("content-type", media_type::OCI_MANIFEST);
        assert_eq!(put.body(image.to_string()).send().await.expect("an answer").status(), StatusCode::CREATED);
        Self { address: registry.address, push, digest: blob.digest, connected: Arc::default() }
    }

    /// As [`Self::once`], again and again: a client that is refused comes back.
    async fn go(self, way: Way, number: u64) {
        // Some pages that are complete, or most of one that is not.
        let mut upload = match way {
            Way::Upload => stream_of((0..40).map(|i| Document::new(Kind::Blob, page(number << 32 | i).repeat(40)))),
            Way::LargeFrame => stream_of([large(number, 3)]),
            _ => Vec::new(),
        };
        let length = upload.len();
        let mut at_once = length * 9 / 10;
        loop {
            // An error is the registry's way to end a connection.
            drop(self.once(way, number, length, upload.split_at(at_once)).await);
            // A client that sends megabytes again and again is not slow.
            at_once = length.min(64 << 10);
            upload.truncate(at_once * 2);
            tokio::time::sleep(BACK).await;
        }
    }

    /// Opens a connection and begins; then sends, or takes, some bytes now and then for as long as
    /// the registry lets it.
    async fn once(&self, way: Way, number: u64, length: usize, upload: (&[u8], &[u8])) -> std::io::Result<()> {
        let Self { address, push, digest, connected } = self;
        let socket = TcpSocket::new_v4()?;
        if matches!(way, Way::Download | Way::ImageDownload | Way::ReadManifest | Way::Events) {
            // What they do not take is not in the system's buffers either.
            socket.set_recv_buffer_size(4096)?;
        }
        let mut stream = socket.connect(*address).await?;
        connected.fetch_add(1, Ordering::Relaxed);
        let head = |method: &str, path: &str, kind: &str, rest: &str| {
            format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n{rest}\r\n")
        };
        let json = "application/json";
        let pause = Duration::from_millis(500);
        // The bytes that are sent at once, and those that are sent bit by bit.
        let (first, rest): (Vec<u8>, Vec<u8>) = match way {
            Way::Upload | Way::LargeFrame => {
                let head = head("PUT", &format!("{push}/frames"), media_type::FRAMES, &format!("content-length: {length}\r\n"));
                let (begun, rest) = upload;
                ([head.as_bytes(), begun].concat(), rest[..rest.len() - 1].to_vec())
            }
            Way::Json => {
                let head = head("POST", &format!("{push}/missing"), json, "content-length: 8000000\r\n");
                ([head.as_bytes(), &vec![b' '; 400_000]].concat(), vec![b' '; 100_000])
            }
            Way::ChunkedJson => {
                let head = head("POST", &format!("{push}/missing"), json, "transfer-encoding: chunked\r\n");
                ([head.as_bytes(), b"800000\r\n", &[b' '; 100]].concat(), vec![b' '; 100_000])
            }
            Way::ImageUpload => {
                let path = format!("{IMAGES}/blobs/uploads/?digest={}", Digest::sha256(&number.to_le_bytes()));
                let head = head("POST", &path, "application/octet-stream", "content-length: 8000000\r\n");
                ([head.as_bytes(), &vec![1; 400_000]].concat(), vec![1; 100_000])
            }
            Way::ImageManifest => {
                let head = head("PUT", &format!("{IMAGES}/manifests/slow"), media_type::OCI_MANIFEST, "content-length: 3000000\r\n");
                ([head.as_bytes(), &vec![b' '; 400_000]].concat(), vec![b' '; 100_000])
            }
            Way::Download | Way::ImageDownload | Way::ReadManifest | Way::Events => {
                let body = json!({"digests": [digest]}).to_string();
                let length = format!("content-length: {}\r\n", body.len());
                let request = match way {
                    Way::ImageDownload => head("GET", &format!("{IMAGES}/blobs/{digest}"), json, ""),
                    Way::ReadManifest => head("GET", &format!("{IMAGES}/manifests/large"), json, ""),
                    Way::Events => head("GET", "/v1/events", json, ""),
                    _ => head("POST", &format!("/v1/repositories/{REPO}/frames"), json, &length) + &body,
                };
                stream.write_all(request.as_bytes()).await?;
                let mut some = [0; 320];
                loop {
                    stream.read_exact(&mut some).await?;
                    tokio::time::sleep(pause).await;
                }
            }
            Way::Idle => (Vec::new(), Vec::new()),
            Way::Headers => (b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: ".to_vec(), vec![b'y'; 100_000]),
        };
        stream.write_all(&first).await?;
        for bits in rest.chunks(320) {
            tokio::time::sleep(pause).await;
            stream.write_all(bits).await?;
        }
        // The registry may end the connection: `besiege` counts a client that notices.
        while !stream.ready(Interest::READABLE).await?.is_read_closed() {
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }
}

fn stream_of(blobs: impl IntoIterator<Item = Document>) -> Vec<u8> {
    stream(&blobs.into_iter().collect::<Vec<_>>())
}

/// What an innocent client does, how long each took, and how often it was told to come back.
struct Times {
    push: Duration,
    pull: Duration,
    tag: Duration,
    refused: usize,
}

impl Times {
    /// Sends until the answer is not a 503, after the time that each 503 names, as `pf` does.
    async fn served(&mut self, request: RequestBuilder) -> Response {
        loop {
            let again = request.try_clone().expect("a body in memory");
            let answer = again.send().await.expect("an answer");
            if answer.status() != StatusCode::SERVICE_UNAVAILABLE {
                return answer;
            }
            self.refused += 1;
            let seconds = answer.headers()["retry-after"].to_str().expect("text").parse().expect("seconds");
            tokio::time::sleep(Duration::from_secs(seconds)).await;
        }
    }
}

/// One takes too short to be compared.
const TAGS: u32 = 20;

async fn innocent(registry: &Registry, seed: u64) -> Times {
    let sample: Snapshot = snapshot(seed..seed + 20, vec![]);
    let bulk: Vec<Document> = (0..8).map(|i| large(seed << 8 | i, 1)).collect();
    let mut times = Times { push: Duration::ZERO, pull: Duration::ZERO, tag: Duration::ZERO, refused: 0 };
    let post = |path: &str, body: &Value| registry.request(Method::POST, path).json(body);
    let begun = Instant::now();
    let pushes = format!("/v1/repositories/{REPO}/pushes");
    let push: api::Push = ok(times.served(post(&pushes, &json!({}))).await).await;
    let push = format!("{pushes}/{}", push.id);
    // Large enough that its questions take turns.
    let digests: Vec<Digest> = (0..5000_u64).map(|i| Digest::sha256(&i.to_le_bytes())).collect();
    let groups = json!({"groups": [{"kind": "blob", "digests": digests}]});
    let _: api::MissingResponse = ok(times.served(post(&format!("{push}/missing"), &groups)).await).await;
    for frames in [stream(&bulk), sample.stream()] {
        let put = registry.request(Method::PUT, &format!("{push}/frames")).header("content-type", media_type::FRAMES);
        let _: FramesStored = ok(times.served(put.body(frames)).await).await;
    }
    let commit = json!({"manifest": sample.manifest, "tag": format!("t{seed}")});
    let _: api::Committed = ok(times.served(post(&format!("{push}/commit"), &commit)).await).await;
    times.push = begun.elapsed();
    let begun = Instant::now();
    let mut wanted: Vec<Digest> = bulk.iter().map(|blob| blob.digest).collect();
    wanted.extend(sample.digests());
    let frames = post(&format!("/v1/repositories/{REPO}/frames"), &json!({"digests": wanted}));
    let pulled = decode(times.served(frames).await.bytes().await.expect("a whole body"));
    assert_eq!(pulled.len(), wanted.len());
    times.pull = begun.elapsed();
    let begun = Instant::now();
    for _ in 0..TAGS {
        let tag = registry.request(Method::GET, &format!("/v1/repositories/{REPO}/tags/t{seed}"));
        assert_eq!(times.served(tag).await.status(), StatusCode::OK);
    }
    times.tag = begun.elapsed() / TAGS;
    times
}

/// Begins so many slow clients of each way. They come back until the set is dropped.
async fn besiege(registry: &Registry, slow: &Slow, ways: &[Way], each: u64) -> JoinSet<()> {
    let (mut clients, begun, before) = (JoinSet::new(), Instant::now(), slow.connected.load(Ordering::Relaxed));
    for number in 0..each {
        for way in ways {
            clients.spawn(slow.clone().go(*way, 1 << 40 | number));
        }
    }
    // The registry ends those that are too slow, some of them before the last one has connected.
    while slow.connected.load(Ordering::Relaxed) < before + clients.len() {
        assert!(begun.elapsed() < FOR_EVER, "not all of them are connected");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // They begin with what fills the system's buffers, as fast as anybody.
    let (mut before, mut after) = (f64::MIN, 0.0);
    while after - before > f64::from(1 << 20) {
        assert!(begun.elapsed() < FOR_EVER * 2, "they are not slow");
        tokio::time::sleep(Duration::from_secs(1)).await;
        before = after;
        after = metric(registry, "pf_frames_received_bytes_total").await;
    }
    clients
}

/// The value of a metric without labels, 0 if it is not there.
async fn metric(registry: &Registry, name: &str) -> f64 {
    let metrics = registry.get("/metrics").await.text().await.expect("text");
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    metrics.lines().find_map(value).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_innocent_client_beside_slow_ones_of_every_kind_is_served() {
    let registry = Registry::start().await;
    let slow = Slow::new(&registry).await;
    let alone = innocent(&registry, 1000).await;
    let besieged = besiege(&registry, &slow, &WAYS, 10).await;
    let beside = tokio::time::timeout(FOR_EVER, innocent(&registry, 2000)).await.expect("an innocent client is served");
    for (what, alone, beside) in [("push", alone.push, beside.push), ("pull", alone.pull, beside.pull), ("GET tag", alone.tag, beside.tag)]
    {
        println!("{what}: {alone:?} alone, {beside:?} beside {} slow clients", besieged.len());
        assert!(beside < Duration::from_secs(10).max(alone * 10), "{what}: {alone:?} alone, {beside:?} beside slow clients");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn as_many_clients_as_there_are_connections_shut_no_other_out() {
    let registry = Registry::start_with(|config| config.max_connections = 12).await;
    let slow = Slow::new(&registry).await;
    for ways in [&[Way::Idle, Way::Headers][..], &[Way::Upload, Way::Download, Way::ChunkedJson][..]] {
        let mut clients = JoinSet::new();
        for number in 0..30 {
            clients.spawn(slow.clone().go(ways[number % ways.len()], number as u64));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        for path in ["/livez", "/readyz", "/metrics", "/v1/repositories"] {
            // A new connection each time, as a supervisor has.
            let client = reqwest::Client::builder().no_proxy().build().expect("a client");
            let asked = async {
                loop {
                    // It may be closed like any other before its request is there.
                    if let Ok(answer) = client.get(registry.url(path)).send().await {
                        return answer.status();
                    }
                }
            };
            assert_eq!(tokio::time::timeout(FOR_EVER, asked).await.expect("an answer"), StatusCode::OK, "{path} beside {ways:?}");
        }
    }
}

#[tokio::test]
async fn a_json_body_has_a_time_within_which_it_must_be_there() {
    let registry = Registry::start_with(|config| {
        config.json_body_seconds = 1;
        config.body_bytes_per_second = 1;
    })
    .await;
    let slow = Slow::new(&registry).await;
    let mut stream = TcpStream::connect(registry.address).await.expect("a connection");
    let head = format!(
        "POST {}/missing HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n",
        slow.push
    );
    stream.write_all(head.as_bytes()).await.expect("written");
    let (mut reader, mut writer) = stream.into_split();
    let trickle = tokio::spawn(async move {
        while writer.write_all(&[b' '; 100]).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let mut status = [0; 12];
    tokio::time::timeout(FOR_EVER, reader.read_exact(&mut status)).await.expect("an answer").expect("an answer");
    assert_eq!(&status, b"HTTP/1.1 504");
    trickle.abort();
}

#[tokio::test]
async fn a_scrub_has_a_least_rate_and_takes_no_place_of_a_verification() {
    let registry = Registry::start().await;
    let slow = Slow::new(&registry).await;
    for rate in ["0", "1", "65535"] {
        let detail = refused(registry.post(&format!("/v1/scrub?rate={rate}"), &json!({})).await, ErrorCode::InvalidRequest).await;
        assert!(detail.contains("65536"), "{detail}");
    }
    // It reads 24 MiB: minutes.
    let scrubs: Vec<_> = (0..3).map(|_| tokio::spawn(registry.request(Method::POST, "/v1/scrub?rate=65536").send())).collect();
    let one_is_left = async {
        while scrubs.iter().filter(|scrub| scrub.is_finished()).count() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(FOR_EVER, one_is_left).await.expect("two of three are refused");
    let _: api::Verified = ok(registry.post(&format!("/v1/repositories/{REPO}/snapshots/base/verify"), &json!({})).await).await;
    for scrub in scrubs {
        match scrub.is_finished() {
            true => drop(refused(scrub.await.unwrap().unwrap(), ErrorCode::Overloaded).await),
            false => scrub.abort(),
        }
    }
    drop(slow);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_verification_keeps_its_place_until_its_client_leaves_and_then_ends_and_frees_it() {
    let registry = Registry::start().await;
    registry.push(REPO, &snapshot(0..2, vec![]), Some("base")).await;
    let documents = repeated(64 << 20);
    let manifest = documents.last().map(|manifest| manifest.digest);
    let push = registry.open_push(REPO).await;
    let _: FramesStored = ok(registry.put_frames(&push, stream(&documents)).await).await;
    let _: api::Committed = ok(registry.post(&format!("{push}/commit"), &json!({"manifest": manifest, "tag": "long"})).await).await;
    let verify = |tag: &str| registry.request(Method::POST, &format!("/v1/repositories/{REPO}/snapshots/{tag}/verify")).send();
    // To its end.
    let started = Instant::now();
    refused(verify("long").await.unwrap(), ErrorCode::ValueHashMismatch).await;
    let whole = started.elapsed();
    let started = Instant::now();
    let mut asked: Vec<_> = (0..3).map(|_| tokio::spawn(verify("long"))).collect();
    let one_has_ended = async {
        loop {
            if let Some(at) = asked.iter().position(JoinHandle::is_finished) {
                return at;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let at = tokio::time::timeout(FOR_EVER, one_has_ended).await.expect("one of three is refused");
    let third = asked.remove(at);
    refused(third.await.unwrap().unwrap(), ErrorCode::Overloaded).await;
    // The clients of the other two leave.
    asked.iter().for_each(JoinHandle::abort);
    let has_a_place = async {
        loop {
            let answer = verify("base").await.unwrap();
            if answer.status() != StatusCode::SERVICE_UNAVAILABLE {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let answer = tokio::time::timeout(FOR_EVER, has_a_place).await.expect("no place is freed");
    let freed = started.elapsed();
    let _: api::Verified = ok(answer).await;
    assert!(freed < whole * 3 / 4, "{freed:?} of {whole:?}");
}

mod long {
    use super::*;

    /// What some rounds took together: a single one that waited long shows.
    async fn together(registry: &Registry, from: u64, rounds: u64) -> Times {
        let mut all = Times { push: Duration::ZERO, pull: Duration::ZERO, tag: Duration::ZERO, refused: 0 };
        for round in 0..rounds {
            let one = innocent(registry, from + round * 100).await;
            all.push += one.push;
            all.pull += one.pull;
            all.tag += one.tag;
            all.refused += one.refused;
        }
        all
    }

    const ROUNDS: u64 = 7;

    /// `cargo nextest run --workspace --profile long -E 'test(slow::long::)' --no-capture` prints
    /// the ratios.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_innocent_client_beside_five_hundred_slow_ones_takes_about_as_long_as_alone() {
        let registry = Registry::start().await;
        let slow = Slow::new(&registry).await;
        together(&registry, 1000, 2).await;
        let mixed: Vec<Vec<Way>> = std::iter::once(WAYS.to_vec()).chain(WAYS.map(|way| vec![way])).collect();
        for (i, ways) in mixed.iter().enumerate() {
            let alone = together(&registry, 100_000 * (i as u64 + 1) + 50_000, ROUNDS).await;
            let besieged = besiege(&registry, &slow, ways, 500 / ways.len() as u64).await;
            let beside = together(&registry, 100_000 * (i as u64 + 1), ROUNDS).await;
            // A client that waits too long for a place is told to come back, and `pf` does.
            println!("{} times 503 in {ROUNDS} rounds beside {ways:?}", beside.refused);
            for (what, alone, beside) in
                [("push", alone.push, beside.push), ("pull", alone.pull, beside.pull), ("GET tag", alone.tag, beside.tag)]
            {
                let ratio = beside.as_secs_f64() / alone.as_secs_f64();
                println!("{what}: {alone:?} alone, {beside:?} beside slow clients {ways:?}: {ratio:.2}");
                assert!(beside <= alone * 2, "{what} beside {ways:?}: {ratio:.2}");
            }
            drop(besieged);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
}
