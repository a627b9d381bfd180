use crate::common::{Random, cases};
use pfr_schema::{Algorithm, Digest, Hasher};
use proptest::prelude::*;

#[test]
fn each_algorithm_gives_its_published_digest_of_abc() {
    let known = [
        (Algorithm::Sha256, "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        (Algorithm::Blake3, "blake3:6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"),
        (
            Algorithm::Sha512,
            "sha512:ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a\
             2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f",
        ),
    ];
    for (algorithm, text) in known {
        assert_eq!(Digest::of(algorithm, b"abc").to_string(), text);
    }
}

/// From NIST's examples of SHA-256, FIPS 180-4: one block, two blocks, a million letters.
#[test]
fn published_digests_come_out_side_by_side() {
    let million = vec![b'a'; 1_000_000];
    let known: [(&[u8], &str); 4] = [
        (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        (b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"),
        (&million, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
    ];
    for (blob, hex) in known {
        for count in 0..34 {
            let digests = Digest::of_each(Algorithm::Sha256, &vec![blob; count]);
            assert_eq!(digests.len(), count);
            assert!(digests.iter().all(|digest| digest.hex() == hex));
        }
    }
}

#[test]
fn numbers_and_names_of_algorithms_never_change() {
    let table: Vec<_> = Algorithm::ALL.iter().map(|a| (*a as u8, a.name(), a.len())).collect();
    assert_eq!(table, [(1, "sha256", 32), (2, "blake3", 32), (3, "sha512", 64)]);
    for number in 0..=255 {
        assert_eq!(Algorithm::from_number(number).map(|a| a as u8), (1..=3).contains(&number).then_some(number));
    }
}

#[test]
fn only_the_one_spelling_of_a_digest_is_read() {
    let hex = "a".repeat(64);
    let refused = [
        (String::new(), "expected <algorithm>:<hex>"),
        ("sha256".into(), "expected <algorithm>:<hex>"),
        (format!("sha256{hex}"), "expected <algorithm>:<hex>"),
        (format!("SHA256:{hex}"), "unknown algorithm; known are sha256, blake3, sha512"),
        (format!("md5:{hex}"), "unknown algorithm; known are sha256, blake3, sha512"),
        (format!(":{hex}"), "unknown algorithm; known are sha256, blake3, sha512"),
        (format!(" sha256:{hex}"), "unknown algorithm; known are sha256, blake3, sha512"),
        (format!("sha256:{}", &hex[1..]), "wrong number of hex digits"),
        (format!("sha256:{hex}a"), "wrong number of hex digits"),
        (format!("sha256:{hex}\n"), "wrong number of hex digits"),
        (format!("sha512:{hex}"), "wrong number of hex digits"),
        (format!("sha256:{}", hex.to_uppercase()), "expected lower-case hex digits"),
        (format!("sha256:g{}", &hex[1..]), "expected lower-case hex digits"),
        (format!("sha256:é{}", &hex[2..]), "expected lower-case hex digits"),
        (format!("sha256::{}", &hex[1..]), "expected lower-case hex digits"),
    ];
    for (text, reason) in refused {
        let message = format!("invalid digest {text:?}: {reason}");
        assert_eq!(text.parse::<Digest>().unwrap_err().to_string(), message);
    }
}

#[test]
fn a_long_text_is_not_repeated_whole_in_the_error() {
    let error = "é".repeat(100_000).parse::<Digest>().unwrap_err().to_string();
    assert!(error.len() < 1000, "{} bytes", error.len());
}

#[test]
fn keys_of_unknown_algorithms_or_lengths_are_refused() {
    let key = Digest::sha256(b"x").to_key();
    assert_eq!(Digest::from_key(&key).unwrap(), Digest::sha256(b"x"));
    for bad in [&[][..], &[1], &[0; 33], &[4; 33], &key[..32], &[&key[..], &[0]].concat(), &[3; 33], &[255; 1000]] {
        assert!(Digest::from_key(bad).is_err(), "{bad:02x?}");
    }
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn blobs_of_any_lengths_have_the_same_digests_alone_and_together(
        seed in any::<u64>(), count in 0_usize..40, most in prop_oneof![1_usize..70, 1_usize..3000], alike in any::<bool>()
    ) {
        let mut random = Random(seed);
        let length = random.below(most);
        let blobs: Vec<Vec<u8>> = (0..count).map(|_| if alike { length } else { random.below(most) }).collect::<Vec<_>>()
            .into_iter().map(|length| random.bytes(length)).collect();
        let blobs: Vec<&[u8]> = blobs.iter().map(|blob| &blob[..]).collect();
        for algorithm in Algorithm::ALL {
            let alone: Vec<_> = blobs.iter().map(|blob| Digest::of(algorithm, blob)).collect();
            prop_assert_eq!(Digest::of_each(algorithm, &blobs), alone);
        }
    }
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn digests_survive_text_json_and_keys(raw in any::<[u8; 64]>(), which in 0_usize..3) {
        let algorithm = Algorithm::ALL[which];
        let digest = Digest::from_bytes(algorithm, &raw[..algorithm.len()]).unwrap();
        prop_assert_eq!(digest.to_string().parse::<Digest>().unwrap(), digest);
        prop_assert_eq!(serde_json::from_str::<Digest>(&serde_json::to_string(&digest).unwrap()).unwrap(), digest);
        prop_assert_eq!(Digest::from_key(&digest.to_key()).unwrap(), digest);
        prop_assert!(digest.hex().starts_with(&digest.short()));
        prop_assert_eq!(digest.short().len(), 12);
    }

    #[test]
    fn hashing_in_pieces_is_hashing_the_whole(bytes in prop::collection::vec(any::<u8>(), 0..5000), at in any::<prop::sample::Index>()) {
        for algorithm in Algorithm::ALL {
            let (a, b) = bytes.split_at(at.index(bytes.len() + 1));
            let mut hasher = Hasher::new(algorithm);
            hasher.update(a);
            hasher.update(b);
            prop_assert_eq!(hasher.finish(), Digest::of(algorithm, &bytes));
        }
    }

    #[test]
    fn text_that_parses_as_a_digest_prints_as_it_was(text in "(sha256|blake3|sha512|sha1)?:?[0-9a-fA-F]{0,128}") {
        if let Ok(digest) = text.parse::<Digest>() {
            prop_assert_eq!(digest.to_string(), text);
        }
    }
}
