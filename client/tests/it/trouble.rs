//! Lost answers, refusals, cuts and lies: what a push or pull makes of them.

use crate::common::sample::{LARGE, SMALL, directory, everything, page, write};
use crate::common::{Registry, files, is_empty, memory, pull_dir, pull_store, push_dir, remote, repository, same_files, tag, target};
use pfr_client::{Progress, Source, push};
use pfr_schema::api::{ForkRequest, FreedRequest, TagRequest, TagState};
use pfr_schema::codec::Codec;
use pfr_schema::frame::{self, Header};
use pfr_schema::{Digest, ErrorCode, Kind};
use pfr_testkit::front::{Fate, Front, Seen, first};

fn upload(seen: &Seen) -> bool {
    seen.method == "PUT" && seen.path.ends_with("/frames")
}

fn download(seen: &Seen) -> bool {
    seen.method == "POST" && seen.path.ends_with("/frames")
}

fn commit(seen: &Seen) -> bool {
    seen.path.ends_with("/commit")
}

fn any(_: &Seen) -> bool {
    true
}

#[tokio::test]
async fn every_single_request_may_be_refused_for_a_while_or_lose_its_answer() {
    let source = directory(SMALL, &(0..100).collect::<Vec<_>>());
    let registry = Registry::start().await;
    let front = Front::start(&registry.url, |_| Fate::Pass);
    push_dir(&remote(&front.url), source.path(), "t").await.unwrap();
    let pushing = front.seen().len();
    pull_store(&remote(&front.url), "t", &memory().await).await.unwrap();
    let pulling = front.seen().len() - pushing;
    assert!(pushing > 3 && pulling > 3, "{pushing} requests of a push, {pulling} of a pull");
    for (fate, name) in [(refused as fn() -> Fate, "refused"), (|| Fate::LoseAnswer, "lost")] {
        for nth in 0..pushing.max(pulling) {
            let registry = Registry::start().await;
            let front = Front::start(&registry.url, only(nth, fate));
            let pushed = push_dir(&remote(&front.url), source.path(), "t").await.unwrap_or_else(|e| panic!("push, {name} {nth}: {e}"));
            assert_eq!(front.struck(), usize::from(nth < pushing), "push, {name} {nth} of {pushing}");
            registry.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
            let store = memory().await;
            let front = Front::start(&registry.url, only(nth, fate));
            pull_store(&remote(&front.url), "t", &store).await.unwrap_or_else(|e| panic!("pull, {name} {nth}: {e}"));
            assert_eq!(front.struck(), usize::from(nth < pulling), "pull, {name} {nth} of {pulling}");
            store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
        }
    }
}

/// A rule that gives `fate` to one request, counted from 0.
fn only(nth: usize, fate: fn() -> Fate) -> impl FnMut(&Seen) -> Fate + Send + 'static {
    let mut count = 0;
    move |_| {
        count += 1;
        if count == nth + 1 { fate() } else { Fate::Pass }
    }
}

fn refused() -> Fate {
    Fate::Refuse(ErrorCode::Overloaded)
}

#[tokio::test]
async fn a_directory_that_is_replaced_during_its_push_ends_the_push_before_anything_is_sent() {
    let registry = Registry::start().await;
    let source = directory(LARGE, &(0..50).collect::<Vec<_>>());
    let (path, mut is_replaced) = (source.path().to_owned(), false);
    let front = Front::start(&registry.url, move |seen| {
        // The documents are read, and no file of a page was looked at.
        if seen.path.ends_with("/missing") && !is_replaced {
            is_replaced = true;
            std::fs::remove_dir_all(path.join("blobs")).unwrap();
            write(&path, "page_manifest.json", LARGE, &(100..150).collect::<Vec<_>>());
        }
        Fate::Pass
    });
    let error = push_dir(&remote(&front.url), source.path(), "t").await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidRequest);
    assert!(error.to_string().ends_with("it changed while it was being pushed: push again"), "{error}");
    assert!(!front.seen().iter().any(upload));
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_has_happened_even_under_compare_and_swap() {
    let registry = Registry::start().await;
    let front = Front::start(&registry.url, first(1, commit, || Fate::LoseAnswer));
    let source = directory(SMALL, &[1, 2]);
    let target = pfr_client::PushTarget { if_tag_is: Some(TagState::Absent), ..target("t") };
    let pushed = push(&Source::Directory(source.path().into()), &remote(&front.url), target, &Progress::default()).await.unwrap();
    assert_eq!(registry.remote().tag(&repository(), &tag("t")).await.unwrap().digest, pushed.digest);
    assert!(pushed.created, "the first commit made it");
    // The answer is that of the commit, and not what the client makes of what it finds.
    let front = Front::start(&registry.url, first(1, commit, || Fate::LoseAnswer));
    let again = push_dir(&remote(&front.url), source.path(), "t").await.unwrap();
    assert!(!again.created && again.digest == pushed.digest, "{again:?}");
}

#[tokio::test]
async fn names_whose_answers_are_lost_are_as_wished() {
    let registry = Registry::start().await;
    let source = directory(SMALL, &[1, 2]);
    let digest = push_dir(&registry.remote(), source.path(), "t").await.unwrap().digest;
    let front = |matches| Front::start(&registry.url, first(1, matches, || Fate::LoseAnswer));
    let fork = ForkRequest { snapshot: "t".into(), count: 3, prefix: "f".into() };
    let remote_of = |front: &Front| remote(&front.url);
    let forked = remote_of(&front(any)).fork(&repository(), &fork).await.unwrap();
    assert_eq!(forked.tags.len(), 3);
    let again = registry.remote().fork(&repository(), &fork).await.unwrap_err();
    assert_eq!(again.code(), ErrorCode::TagMoved, "asked for anew it is a conflict");
    let request = TagRequest { snapshot: "t".into(), if_tag_is: Some(TagState::Absent) };
    remote_of(&front(any)).put_tag(&repository(), &tag("n"), &request).await.unwrap();
    remote_of(&front(any)).delete_tag(&repository(), &tag("n"), Some(TagState::At(digest))).await.unwrap();
    assert_eq!(registry.remote().delete_tag(&repository(), &tag("n"), None).await.unwrap_err().code(), ErrorCode::TagUnknown);
    remote_of(&front(any)).delete_snapshot(&repository(), &digest).await.unwrap();
}

#[tokio::test]
async fn a_session_that_the_registry_forgot_is_opened_again() {
    let registry = Registry::start_with(|c| c.max_frames_bytes = 200_000).await;
    let source = directory(LARGE, &(0..40).collect::<Vec<_>>());
    let mut uploads = 0;
    let front = Front::start(&registry.url, move |seen| {
        uploads += usize::from(upload(seen));
        // Four are under way at a time: two have arrived.
        if uploads == 6 && upload(seen) { Fate::Refuse(ErrorCode::PushUnknown) } else { Fate::Pass }
    });
    let progress = Progress::default();
    let pushed = push(&Source::Directory(source.path().into()), &remote(&front.url), target("t"), &progress).await.unwrap();
    assert_eq!(pushed.bytes_deduplicated + pushed.bytes_sent_raw, pushed.bytes_raw, "the registry had none of it before");
    let moved = (progress.bytes_done(), progress.bytes_done() + progress.bytes_deduplicated());
    assert_eq!(moved, (pushed.bytes_sent_raw, progress.bytes_total()), "what was sent in vain counts");
    let opened = front.seen().iter().filter(|s| s.path.ends_with("/pushes")).count();
    assert_eq!(opened, 2);
    let sent: usize = front.seen().iter().filter(|s| upload(s)).map(|s| s.body.len()).sum();
    assert!(sent < 2 * 80 * 16_384, "{sent} bytes: what had arrived was sent again");
    let front = Front::start(&registry.url, first(100, upload, || Fate::Refuse(ErrorCode::PushUnknown)));
    let other = directory(LARGE, &[1000]);
    assert_eq!(push_dir(&remote(&front.url), other.path(), "t").await.unwrap_err().code(), ErrorCode::PushUnknown, "not for ever");
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_was_stopped_is_not_waited_for_for_hours_to_count_bytes() {
    // It takes connections and never answers.
    let silent = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let (remote, start) = (remote(&format!("http://{}", silent.local_addr().unwrap())), tokio::time::Instant::now());
    let freed = remote.freed(&FreedRequest { repositories: Vec::new() }).await;
    assert_eq!(freed.unwrap_err().code(), ErrorCode::Unavailable);
    // It is asked three times, and given up each time after 20 seconds without a sign of life.
    assert!(start.elapsed().as_secs() < 120, "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_failed_push_is_aborted_and_tells_the_first_cause() {
    let registry = Registry::start().await;
    let front = Front::start(&registry.url, first(100, upload, || Fate::Refuse(ErrorCode::Denied)));
    let source = directory(SMALL, &[1]);
    let error = push_dir(&remote(&front.url), source.path(), "t").await.unwrap_err();
    assert_eq!((error.code(), error.code().exit_code()), (ErrorCode::Denied, 6));
    assert!(front.seen().last().is_some_and(|s| s.method == "DELETE"), "{:?}", front.seen());
}

#[tokio::test]
async fn a_cut_pull_goes_on_with_the_rest() {
    let registry = Registry::start().await;
    let source = directory(LARGE, &(0..200).collect::<Vec<_>>());
    let pushed = push_dir(&registry.remote(), source.path(), "t").await.unwrap();
    let halves = || first(3, |seen| download(seen) && seen.body.len() > 10_000, || Fate::Cut(2_000_000));
    let store = memory().await;
    let front = Front::start(&registry.url, halves());
    pull_store(&remote(&front.url), "t", &store).await.unwrap();
    store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
    let asked: Vec<usize> = front.seen().iter().filter(|s| download(s)).map(|s| s.body.len()).filter(|b| *b > 1_000).collect();
    assert!(asked.len() == 4 && asked.windows(2).all(|w| w[1] < w[0]), "bytes of digests asked for: {asked:?}");

    let dir = tempfile::tempdir().unwrap();
    let front = Front::start(&registry.url, halves());
    let pulled = pull_dir(&remote(&front.url), "t", dir.path()).await.unwrap();
    same_files(source.path(), dir.path());
    assert!(pulled.bytes_received < 400 * 16_384 * 3 / 2, "{}", pulled.bytes_received);
}

#[tokio::test]
async fn a_pull_that_brings_nothing_gives_up_and_can_be_run_again() {
    let registry = Registry::start().await;
    let source = directory(LARGE, &(0..100).collect::<Vec<_>>());
    push_dir(&registry.remote(), source.path(), "t").await.unwrap();
    // The first answer of pages is cut in its middle, the ones after it at once.
    let mut pages = 0;
    let front = Front::start(&registry.url, move |seen| {
        pages += usize::from(download(seen) && seen.body.len() > 5_000);
        match pages {
            0 => Fate::Pass,
            1 => Fate::Cut(1_500_000),
            _ => Fate::Cut(10),
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let error = pull_dir(&remote(&front.url), "t", dir.path()).await.unwrap_err();
    assert_eq!(error.code().exit_code(), 7, "{error}");
    let left = files(dir.path());
    assert!(!left.contains_key("page_manifest.json") && left.len() > 50 && !left.keys().any(|n| n.ends_with(".tmp")), "{:?}", left.keys());
    let refused = push_dir(&registry.remote(), dir.path(), "u").await.unwrap_err();
    assert!(refused.to_string().contains("run that pull again"), "{refused}");
    let again = pull_dir(&registry.remote(), "t", dir.path()).await.unwrap();
    assert!(again.bytes_received < 200 * 16_384 - 1_000_000, "{}", again.bytes_received);
    same_files(source.path(), dir.path());
}

/// Frames of one stream, taken apart.
fn parse(stream: &[u8]) -> Vec<(Header, Vec<u8>)> {
    let mut parser = frame::Parser::new(Default::default());
    parser.push(stream.to_vec().into());
    let (mut frames, mut current) = (Vec::new(), None);
    while let Some(event) = parser.next().unwrap() {
        match event {
            frame::Event::Begin(header) => current = Some((header, Vec::new())),
            frame::Event::Payload(bytes) => current.as_mut().unwrap().1.extend_from_slice(&bytes),
            frame::Event::Finish { .. } => frames.extend(current.take()),
            frame::Event::End => {}
        }
    }
    frames
}

fn stream(frames: &[(Header, Vec<u8>)]) -> Vec<u8> {
    let mut out: Vec<u8> = frames.iter().flat_map(|(header, payload)| frame::encode(header, payload)).collect();
    out.extend(frame::end_mark(frames.len() as u64));
    out
}

fn other_bytes(body: Vec<u8>) -> Vec<u8> {
    let mut frames = parse(&body);
    let (header, payload) = frames.last_mut().unwrap();
    header.codec = Codec::Raw;
    (header.raw_len, header.stored_len) = (payload.len() as u64, payload.len() as u64);
    payload[0] ^= 1;
    stream(&frames)
}

fn flipped_bit(mut body: Vec<u8>) -> Vec<u8> {
    let at = body.len() - 40;
    body[at] ^= 4;
    body
}

fn swapped(body: Vec<u8>) -> Vec<u8> {
    let mut frames = parse(&body);
    frames.reverse();
    stream(&frames)
}

fn unasked(body: Vec<u8>) -> Vec<u8> {
    let mut frames = parse(&body);
    let bytes = page(424_242, 1000);
    let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest: Digest::sha256(&bytes), raw_len: 1000, stored_len: 1000 };
    frames.push((header, bytes));
    stream(&frames)
}

fn fewer(body: Vec<u8>) -> Vec<u8> {
    let mut frames = parse(&body);
    frames.pop();
    stream(&frames)
}

fn larger(body: Vec<u8>) -> Vec<u8> {
    let mut frames = parse(&body);
    let bytes = vec![0; 50_000];
    let (header, payload) = frames.last_mut().unwrap();
    *payload = zstd::bulk::compress(&bytes, 1).unwrap();
    (header.codec, header.raw_len, header.stored_len) = (Codec::Zstd, 50_000, payload.len() as u64);
    stream(&frames)
}

type Lie = fn(Vec<u8>) -> Vec<u8>;

fn nonsense(_: Vec<u8>) -> Vec<u8> {
    b"this is not a stream of frames, it is a sentence that goes on for longer than any header".to_vec()
}

#[tokio::test]
async fn a_lying_registry_publishes_nothing_here() {
    let registry = Registry::start().await;
    let source = directory(SMALL, &(0..100).collect::<Vec<_>>());
    push_dir(&registry.remote(), source.path(), "t").await.unwrap();
    let lies: [(&str, Lie); 7] = [
        ("other bytes", other_bytes),
        ("a flipped bit", flipped_bit),
        ("another order", swapped),
        ("a frame that was not requested", unasked),
        ("a frame too few", fewer),
        ("another length", larger),
        ("nonsense", nonsense),
    ];
    // The first answers are the manifest, what it lists, its runs; the fourth is pages.
    for nth in [0_usize, 1, 3] {
        for (name, lie) in lies {
            if name == "another order" && nth == 0 {
                continue;
            }
            let rule = move |count: &mut usize, seen: &Seen| {
                *count += usize::from(download(seen));
                if download(seen) && *count > nth { Fate::change(lie) } else { Fate::Pass }
            };
            let (mut a, mut b) = (0, 0);
            let (one, two) = (Front::start(&registry.url, move |s| rule(&mut a, s)), Front::start(&registry.url, move |s| rule(&mut b, s)));
            let (store, dir) = (memory().await, tempfile::tempdir().unwrap());
            let into_store = pull_store(&remote(&one.url), "t", &store).await.unwrap_err();
            let into_dir = pull_dir(&remote(&two.url), "t", dir.path()).await.unwrap_err();
            for error in [&into_store, &into_dir] {
                assert_eq!(error.code().exit_code(), 4, "{name} in answer {nth}: {error} ({})", error.code());
            }
            assert!(is_empty(&store).await, "{name} in answer {nth}");
            let left = files(dir.path());
            assert!(!left.keys().any(|n| n.ends_with(".json") || n.ends_with(".tmp")), "{name} in answer {nth}: {:?}", left.keys());
        }
    }
}

#[tokio::test]
async fn an_answer_about_another_snapshot_is_refused() {
    let registry = Registry::start().await;
    let source = directory(SMALL, &[1]);
    let digest = push_dir(&registry.remote(), source.path(), "t").await.unwrap().digest;
    let lie = |body: Vec<u8>| {
        let text = String::from_utf8(body).unwrap();
        let real = text.split("\"digest\":\"").nth(1).unwrap()[..71].to_owned();
        text.replacen(&real, &Digest::sha256(b"other").to_string(), 1).into_bytes()
    };
    let rule = move |seen: &Seen| if seen.path.contains("/snapshots/") { Fate::change(lie) } else { Fate::Pass };
    let front = Front::start(&registry.url, rule);
    let error = pull_store(&remote(&front.url), &digest.to_string(), &memory().await).await.unwrap_err();
    assert!(error.to_string().contains("the request names"), "{error}");
}

#[tokio::test]
async fn something_else_than_a_registry_is_told_apart() {
    let registry = Registry::start().await;
    let front = Front::start(&registry.url, |_| Fate::change(|_| b"<html>".to_vec()));
    let error = pull_dir(&remote(&front.url), "t", tempfile::tempdir().unwrap().path()).await.unwrap_err();
    assert!(error.to_string().contains("is it a pf registry"), "{error}");
    let source = everything();
    let error = push_dir(&remote(&front.url), source.path(), "t").await.unwrap_err();
    assert!(error.to_string().contains("does not parse"), "{error}");
}

#[tokio::test]
async fn a_registry_that_says_nothing_is_given_up() {
    // The kernel takes the connection; no program ever reads from it.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let idle_timeout = std::time::Duration::from_millis(200);
    let options = pfr_client::RemoteOptions {
        retries: 0,
        retry_for: std::time::Duration::ZERO,
        idle_timeout,
        ..pfr_client::RemoteOptions::default()
    };
    let silent = pfr_client::Remote::new(&url, options).unwrap();
    let error = silent.stats(None).await.unwrap_err();
    assert!(error.to_string().contains("no byte moved"), "{error}");
    let frames = || futures::StreamExt::boxed(futures::stream::pending());
    let error = silent.put_frames(&repository(), "x", frames).await.unwrap_err();
    assert!(error.to_string().contains("no byte moved"), "{error}");
    drop(listener);
}

#[tokio::test]
async fn a_large_blob_in_crumbs_arrives_whole_or_not_at_all() {
    let registry = Registry::start().await;
    let source = directory(SMALL, &[1]);
    std::fs::create_dir(source.path().join("attachments")).unwrap();
    std::fs::write(source.path().join("attachments/large"), page(5, 12 << 20)).unwrap();
    push_dir(&registry.remote(), source.path(), "t").await.unwrap();
    let front = Front::start(&registry.url, first(100, download, || Fate::change(flipped_bit)));
    let dir = tempfile::tempdir().unwrap();
    pull_dir(&remote(&front.url), "t", dir.path()).await.unwrap_err();
    let late = |mut body: Vec<u8>| {
        body.get_mut(6 << 20).into_iter().for_each(|byte| *byte ^= 1);
        body
    };
    let rule = move |seen: &Seen| if download(seen) { Fate::change(late) } else { Fate::Pass };
    let front = Front::start(&registry.url, rule);
    let error = pull_dir(&remote(&front.url), "t", dir.path()).await.unwrap_err();
    assert_eq!(error.code().exit_code(), 4, "{error}");
    assert!(!files(dir.path()).keys().any(|name| name.contains("large")), "{:?}", files(dir.path()).keys());
    pull_dir(&registry.remote(), "t", dir.path()).await.unwrap();
    same_files(source.path(), dir.path());
}
