//! Codecs on the wire. A registry says which codecs it takes, and refuses the others. A client that
//! does not know every codec gets frames in codecs that it knows.

use crate::common::{REPO, Registry, ok, refused};
use pfr_registry::config::StoredCodecs;
use pfr_schema::codec::{CODECS_HEADER, Codec, Codecs};
use pfr_schema::frame::{Event, Header, Parser};
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, Kind, Limits, api, media_type};
use pfr_testkit::frames::{encoded, of, stream};
use pfr_testkit::snapshot::numbers;
use reqwest::Method;
use serde_json::json;

const BYTES: usize = 20_000;
const TENSOR: [Codec; 4] = [Codec::Bf16Bitmaps, Codec::Bf16Huffman, Codec::F16Huffman, Codec::Fp8Huffman];

/// Commits a snapshot with an attachment in each tensor codec. Returns the raw bytes of the
/// attachments.
async fn pushed(registry: &Registry) -> Vec<Vec<u8>> {
    let blobs: Vec<Vec<u8>> = (0..4).map(|seed| numbers(seed, BYTES)).collect();
    let layer = |raw: &Vec<u8>| Descriptor::of(media_type::OCTETS, &Document::new(Kind::Blob, raw.clone()));
    let config = Document::new(Kind::Blob, SnapshotConfig::default().to_bytes());
    let manifest = Manifest::snapshot(&config, blobs.iter().map(layer).collect(), Default::default()).to_document();
    let attachments = TENSOR.iter().zip(&blobs).map(|(codec, raw)| encoded(*codec, raw));
    let push = registry.open_push(REPO).await;
    let all = stream(attachments.chain([of(&config), of(&manifest)]));
    let _: api::FramesStored = ok(registry.put_frames(&push, all).await).await;
    let _: api::Committed = ok(registry.post(&format!("{push}/commit"), &json!({"manifest": manifest.digest, "tag": "t"})).await).await;
    blobs
}

/// Fetches blobs as a client that sends `header` as the codecs that it knows. Returns the headers
/// of the frames, and whether the answer had a `Content-Length`.
async fn fetched(registry: &Registry, blobs: &[Vec<u8>], header: Option<&str>) -> (Vec<Header>, bool) {
    let digests: Vec<Digest> = blobs.iter().map(|raw| Digest::sha256(raw)).collect();
    let request = registry.request(Method::POST, &format!("/v1/repositories/{REPO}/frames")).json(&json!({"digests": digests}));
    let request = header.into_iter().fold(request, |request, value| request.header(CODECS_HEADER, value));
    let response = request.send().await.expect("an answer");
    let told = response.headers().contains_key("content-length");
    let body = response.bytes().await.expect("a body");
    let mut parser = Parser::new(Limits::default());
    parser.push(body.clone());
    let mut headers = Vec::new();
    while let Some(event) = parser.next().expect("a well-formed stream") {
        if let Event::Begin(header) = event {
            headers.push(header);
        }
    }
    let came: Vec<Vec<u8>> = crate::common::snapshot::decode(body).into_iter().map(|(_, raw)| raw).collect();
    assert!(came == blobs);
    (headers, told)
}

#[tokio::test]
async fn a_client_gets_frames_in_the_codecs_that_it_names_and_raw_ones_otherwise() {
    let registry = Registry::start().await;
    let blobs = pushed(&registry).await;
    let all = Codecs::ALL.to_string();
    for (header, known) in [
        (None, Codecs::LEAST),
        (Some("raw"), Codecs::LEAST),
        (Some("of-tomorrow, bf16-huffman"), Codecs::LEAST.with(Codec::Bf16Huffman)),
        (Some(",;q=1, BF16-HUFFMAN"), Codecs::LEAST),
        (Some(all.as_str()), Codecs::ALL),
    ] {
        let (headers, told) = fetched(&registry, &blobs, header).await;
        let expected: Vec<Codec> = TENSOR.iter().map(|codec| if known.contains(*codec) { *codec } else { Codec::Raw }).collect();
        assert_eq!(headers.iter().map(|header| header.codec).collect::<Vec<_>>(), expected, "{header:?}");
        assert_eq!(told, known == Codecs::ALL, "{header:?}");
    }
}

#[tokio::test]
async fn a_session_says_which_codecs_it_takes_and_refuses_others() {
    let registry = Registry::start().await;
    let pushes = format!("/v1/repositories/{REPO}/pushes");
    let session: api::Push = ok(registry.post(&pushes, &json!({})).await).await;
    assert_eq!(session.codecs, Codecs::ALL);

    let some = Codecs::LEAST.with(Codec::Bf16Bitmaps);
    let registry = Registry::start_with(|config| config.codecs = StoredCodecs(some)).await;
    let session: api::Push = ok(registry.post(&pushes, &json!({})).await).await;
    assert_eq!(session.codecs, some);
    let push = format!("{pushes}/{}", session.id);
    let raw = numbers(1, BYTES);
    let _: api::FramesStored = ok(registry.put_frames(&push, stream([encoded(Codec::Bf16Bitmaps, &raw)])).await).await;
    let response = registry.put_frames(&push, stream([encoded(Codec::Bf16Huffman, &numbers(2, BYTES))])).await;
    let detail = refused(response, ErrorCode::CorruptFrame).await;
    assert!(detail.contains("codec bf16-huffman: not taken here, only raw, zstd, bf16-bitmaps"), "{detail}");
}

#[tokio::test]
async fn blobs_that_were_stored_before_codecs_were_restricted_stay_readable() {
    let registry = Registry::start().await;
    let blobs = pushed(&registry).await;
    let data = registry.dir.path().join("store");
    let files = registry.stop_keeping_files().await;
    let registry = Registry::start_again(&data, |config| config.codecs = "none".parse().unwrap()).await;
    let (headers, _) = fetched(&registry, &blobs, Some(&Codecs::ALL.to_string())).await;
    assert_eq!(headers.iter().map(|header| header.codec).collect::<Vec<_>>(), TENSOR);
    drop(files);
}
