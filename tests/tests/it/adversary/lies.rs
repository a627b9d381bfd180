//! A client makes the right bytes visible, or none, also if the registry lies.

use super::{nothing_published, same_files};
use pfr_schema::codec::Codec;
use pfr_schema::frame::{self, Header};
use pfr_schema::{Digest, Kind};
use pfr_tests::{Fate, Output, Pf, Registry, Seen, Shape, SnapshotDir, Wire, front, seed};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

const PAGES: u64 = 200;
const MEMORY: u64 = 256 << 20;

fn pushed() -> (Registry, SnapshotDir, Pf) {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..PAGES).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    (registry, dir, pf)
}

/// Pulls, and repeats a failed request once. The proxy falsifies every attempt, so more attempts
/// would only take time.
fn pull(host: &Pf, into_directory: bool) -> Output {
    let out = host.path("out");
    let target = into_directory.then(|| out.to_str().unwrap());
    host.run(&["pull", "a:t", "--retries", "1"].into_iter().chain(target).collect::<Vec<_>>())
}

fn endless_frames(_: &[Digest]) -> Fate {
    Fate::Endless(Wire::blob(&[5; 4000]))
}

/// One frame that claims to be `digest`.
fn claim(digest: Digest, codec: Codec, raw_len: u64, payload: &[u8]) -> Vec<u8> {
    let header = Header { codec, kind: Kind::Blob, digest, raw_len, stored_len: payload.len() as u64 };
    [frame::encode(&header, payload), frame::end_mark(1)].concat()
}

fn instead(body: Vec<u8>) -> Fate {
    Fate::Instead(200, "application/vnd.pf.frames.v1", body)
}

/// An answer that gives the frames a URL at which nothing listens.
fn located(digests: &[Digest], expires_seconds: u64, offset: u64, length: u64) -> Fate {
    let extent = serde_json::json!({"url": "http://127.0.0.1:1/", "offset": offset, "length": length, "digests": digests});
    let locations = serde_json::json!({"expires_seconds": expires_seconds, "extents": [extent]});
    Fate::Instead(200, "application/vnd.pf.frame-locations.v1+json", locations.to_string().into_bytes())
}

/// Name, answer to a request for these digests, exit code.
type Lie = (&'static str, fn(&[Digest]) -> Fate, i32);

const LIES: &[Lie] = &[
    ("another blob's frame", |_| instead(Wire::stream(&[Wire::blob(b"another")])), 4),
    ("other bytes under the asked name", |d| instead(claim(d[0], Codec::Raw, 5, b"wrong")), 4),
    ("a stream of nothing, well ended", |_| instead(Wire::stream(&[])), 4),
    ("not frames", |_| instead(b"<html><body>It works! This is not a stream of frames.</body></html>".to_vec()), 4),
    ("frames that were not requested, without end", endless_frames, 4),
    ("noughts without end", |_| Fate::Endless(vec![0; 64 << 10]), 4),
    (
        "an exabyte",
        |d| instead(Header { codec: Codec::Raw, kind: Kind::Blob, digest: d[0], raw_len: 1 << 60, stored_len: 1 << 60 }.to_bytes()),
        4,
    ),
    ("a zip bomb", |d| instead(claim(d[0], Codec::Zstd, 16 << 10, &zstd::bulk::compress(&vec![0; 32 << 20], 1).unwrap())), 4),
    ("frames at a place of exabytes", |d| located(d, 60, 0, 1 << 62), 7),
    ("frames at the end of what can be counted", |d| located(d, 60, u64::MAX - 10, 10), 7),
    ("frames at a place until the end of time", |d| located(d, u64::MAX, 0, 1 << 20), 7),
    ("a blob a thousand times too large", |d| instead(claim(d[0], Codec::Raw, 16 << 20, &vec![0; 16 << 20])), 4),
];

fn check(lie: &Lie, of_pages: bool, into_directory: bool, registry: &str) -> Result<(), String> {
    let (name, answer, code) = *lie;
    let what =
        format!("{name}, for {}, into a {}", if of_pages { "pages" } else { "nodes" }, if into_directory { "directory" } else { "store" });
    let liar = front(registry, move |seen: &Seen| match seen.asked() {
        Some(digests) if seen.asks_for_pages() == of_pages => answer(&digests),
        _ => Fate::Pass,
    });
    let host = Pf::new(&liar.url);
    let output = pull(&host, into_directory);
    assert!(liar.struck() > 0, "{what}: no request came");
    nothing_published(&host, &host.path("out"), &what);
    assert!(output.peak_memory < MEMORY, "{what}: {} MiB", output.peak_memory >> 20);
    let said = output.stderr.starts_with("error: ") && output.stdout.is_empty();
    if output.code == code && said { Ok(()) } else { Err(format!("{what}: expected exit code {code}, found {output:?}")) }
}

fn failures(cases: &[(&Lie, bool, bool)], registry: &str) -> Vec<String> {
    cases.iter().filter_map(|&(lie, of_pages, into_directory)| check(lie, of_pages, into_directory, registry).err()).collect()
}

/// Whether it is about pages, and pulled into a directory. Two that follow each other have both of
/// each.
const WAYS: [(bool, bool); 4] = [(false, false), (true, true), (false, true), (true, false)];

#[test]
fn frames_that_are_not_what_was_asked_for_are_refused_and_nothing_is_published() {
    lies(2);
}

/// Each lie in so many ways.
fn lies(ways: usize) {
    let (registry, dir, _pf) = pushed();
    let url = &*registry.url();
    let ways_of = |number: usize| WAYS.into_iter().cycle().skip(2 * number).take(ways);
    let cases: Vec<(&Lie, bool, bool)> = LIES
        .iter()
        .enumerate()
        .flat_map(|(number, lie)| ways_of(number).map(move |(of_pages, into_directory)| (lie, of_pages, into_directory)))
        .collect();
    // Some lies make the client wait before it asks again: those wait at the same time.
    let failed: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = cases.chunks(cases.len().div_ceil(4)).map(|some| scope.spawn(move || failures(some, url))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
    let host = Pf::new(&registry.url());
    pull(&host, true).ok();
    same_files(&host.path("out"), &dir.path, "the registry itself");
}

/// The same frames with the same names, lengths and checksums that fit, and other bytes: only a
/// digest can tell.
fn forged(stream: &[u8]) -> Vec<u8> {
    let limits = pfr_schema::Limits::default();
    let (mut at, mut frames) = (0, Vec::new());
    while at + frame::END_LEN < stream.len() {
        let end = at + Header::len(pfr_schema::Algorithm::Sha256);
        let header = Header::parse_exact(&stream[at..end], at as u64, &limits).unwrap();
        let stored = usize::try_from(header.stored_len).unwrap();
        let mut raw = pfr_schema::codec::decode(header.codec, &stream[end..end + stored], header.raw_len).unwrap();
        if raw.starts_with(b"{") {
            // Still the same document, spelled otherwise.
            raw.push(b'\n');
        } else {
            raw.fill(0);
        }
        let raw_len = raw.len() as u64;
        frames.push(frame::encode(&Header { codec: Codec::Raw, raw_len, stored_len: raw_len, ..header }, &raw));
        at = end + stored + 4;
    }
    Wire::stream(&frames)
}

#[test]
fn well_formed_frames_of_forged_bytes_are_refused_by_their_digests() {
    let (registry, _dir, _pf) = pushed();
    for nth in 0..6 {
        for into_directory in [false, true] {
            let mut count = 0;
            let liar = front(&registry.url(), move |seen: &Seen| {
                count += u32::from(seen.asked().is_some());
                if seen.asked().is_some() && count == nth + 1 { Fate::change(|body| forged(&body)) } else { Fate::Pass }
            });
            let host = Pf::new(&liar.url);
            let output = pull(&host, into_directory);
            let what = format!("request {nth} for frames, into a {}", if into_directory { "directory" } else { "store" });
            if liar.struck() == 0 {
                // There are fewer requests.
                assert!(nth >= 4, "{what}: no request came");
                assert_eq!(output.code, 0, "{what}: {output:?}");
                continue;
            }
            nothing_published(&host, &host.path("out"), &what);
            assert_eq!(output.code, 4, "{what}: {output:?}");
            assert!(output.stderr.contains("sha256:"), "{what}: it names the blob: {output:?}");
        }
    }
}

/// The answer to a request about a snapshot.
type Answer = Box<dyn Fn() -> Fate + Send>;

#[test]
fn answers_that_are_not_the_protocols_are_refused_and_nothing_is_published() {
    let (registry, _dir, _pf) = pushed();
    let problem = br#"{"type":"urn:pf:problem:internal","title":"t","status":500,"detail":"d","code":"internal","retryable":false}"#;
    let cases: Vec<(&str, Answer, i32)> = vec![
        ("a page for people", Box::new(|| Fate::Instead(200, "text/html", b"<html>".to_vec())), 1),
        ("half a document", Box::new(|| Fate::change(|body| body[..body.len() / 2].to_vec())), 1),
        ("a document without end", Box::new(|| Fate::Endless(vec![b' '; 1 << 20])), 1),
        ("a redirection", Box::new(|| Fate::Instead(302, "text/html", Vec::new())), 1),
        ("a bug", Box::new(move || Fate::Instead(500, "application/problem+json", problem.to_vec())), 70),
        ("a gateway's 500", Box::new(|| Fate::Instead(500, "text/plain", b"oops".to_vec())), 7),
        ("a 404 that is not the registry's", Box::new(|| Fate::Instead(404, "text/plain", b"nope".to_vec())), 1),
    ];
    let mut failed = Vec::new();
    for (name, fate, code) in cases {
        let liar = front(&registry.url(), move |seen: &Seen| if is_snapshot(seen) { fate() } else { Fate::Pass });
        let host = Pf::new(&liar.url);
        let output = pull(&host, false);
        assert!(liar.struck() > 0, "{name}: no request came");
        nothing_published(&host, &host.path("out"), name);
        assert!(output.peak_memory < MEMORY, "{name}: {} MiB", output.peak_memory >> 20);
        if output.code != code || !output.stderr.starts_with("error: ") {
            failed.push(format!("{name}: expected exit code {code}, found {output:?}"));
        }
    }
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
}

fn is_snapshot(seen: &Seen) -> bool {
    seen.path.contains("/snapshots/")
}

#[test]
fn a_registry_that_tells_of_another_snapshot_than_was_asked_for_by_digest_is_refused() {
    let (registry, _dir, pf) = pushed();
    let other = SnapshotDir::write(&pf.path("other"), Shape::SMALL, &[1, 2, 3]);
    let theirs = pf.run(&["push", other.arg(), "a:other"]).ok().last_line().to_owned();
    let ours = pf.tags("a")["t"].clone();
    let (from, to) = (ours.clone(), theirs);
    let liar = front(&registry.url(), move |seen: &Seen| {
        let (from, to) = (from.clone(), to.clone());
        let swap = move |body: Vec<u8>| String::from_utf8(body).unwrap().replace(&from, &to).into_bytes();
        if is_snapshot(seen) { Fate::change(swap) } else { Fate::Pass }
    });
    let host = Pf::new(&liar.url);
    let output = host.run(&["pull", &format!("a@{ours}")]);
    assert_eq!(output.code, 1, "{output:?}");
    assert!(output.stderr.contains("the request names"), "{output:?}");
    nothing_published(&host, &host.path("out"), "another snapshot");
}

#[test]
fn any_bytes_of_any_answer_may_be_wrong_and_the_truth_or_nothing_is_published() {
    wrong_bytes(20);
}

mod long {
    #[test]
    fn frames_that_are_not_what_was_asked_for_are_refused_and_nothing_is_published() {
        super::lies(4);
    }

    #[test]
    fn any_bytes_of_any_answer_may_be_wrong_and_the_truth_or_nothing_is_published() {
        super::wrong_bytes(40);
    }
}

fn wrong_bytes(rounds: u32) {
    let (registry, dir, _pf) = pushed();
    let mut random = StdRng::seed_from_u64(seed());
    let (mut refused, mut harmless) = (0, 0);
    for round in 0..rounds {
        let (nth, share, bit) = (random.random_range(0..6_u32), random.random_range(0.0..1.0), random.random_range(0..8));
        let mut count = 0;
        let liar = front(&registry.url(), move |_: &Seen| {
            count += 1;
            let flip = move |mut body: Vec<u8>| {
                let at = (body.len() as f64 * share) as usize;
                body.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << bit);
                body
            };
            if count - 1 == nth { Fate::change(flip) } else { Fate::Pass }
        });
        let host = Pf::new(&liar.url);
        let output = pull(&host, round % 2 == 0);
        assert!([0, 1, 4, 5, 7].contains(&output.code), "round {round}: {output:?}");
        assert!(!output.stderr.contains("panicked"), "round {round}: {output:?}");
        if output.code == 0 {
            // The JSON of the answer has parts that the client does not use.
            harmless += 1;
            if round % 2 == 0 {
                same_files(&host.path("out"), &dir.path, &format!("round {round}"));
            } else {
                host.run(&["verify", "--local", "a:t"]).ok();
            }
        } else {
            refused += 1;
            nothing_published(&host, &host.path("out"), &format!("round {round}"));
        }
    }
    println!("{refused} refused, {harmless} harmless");
    assert!(refused * 4 > rounds, "{refused} of {rounds} flips were refused");
}

#[test]
fn a_push_to_a_registry_that_lies_ends_without_a_panic_and_never_says_it_was_stored_when_it_was_not() {
    let (registry, _dir, pf) = pushed();
    let answers: [(&str, &'static [u8]); 9] = [
        ("/missing", br#"{"missing":[[0,18446744073709551615]]}"#),
        ("/missing", br#"{"missing":[[99999,3]]}"#),
        ("/missing", br#"{"missing":[[1,1],[0,1]]}"#),
        ("/missing", br#"{"missing":[]}"#),
        ("/missing", br#"{"missing":[[18446744073709551615,2]]}"#),
        ("/pushes", br#"{"id":"../../x","lease_seconds":0,"max_digests":0,"max_frames_bytes":0}"#),
        ("/pushes", br#"{"id":"","lease_seconds":0,"max_digests":1,"max_frames_bytes":1}"#),
        ("/commit", br#"{"digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","created":true,"logical_bytes":0,"new_bytes":0}"#),
        ("/frames", br#"{"frames":0,"new":0,"bytes":0}"#),
    ];
    for (i, (end, body)) in answers.into_iter().enumerate() {
        let liar = front(&registry.url(), move |seen: &Seen| {
            if seen.path.ends_with(end) { Fate::Instead(200, "application/json", body.to_vec()) } else { Fate::Pass }
        });
        let dir = SnapshotDir::write(&pf.path(&format!("lied-to-{i}")), Shape::TINY, &[1000 + i as u64, 2000 + i as u64]);
        let host = Pf::new(&liar.url);
        let (tag, text) = (format!("a:lied-to-{i}"), String::from_utf8_lossy(body));
        let output = host.run(&["push", dir.arg(), &tag]);
        assert!(liar.struck() > 0, "{text}: no request came");
        assert!([0, 1, 4, 5, 7].contains(&output.code) && !output.stderr.contains("panicked"), "{end} {text}: {output:?}");
        if output.code == 0 {
            pf.run(&["verify", &tag]).ok();
        }
    }
}
