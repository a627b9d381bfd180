use super::*;
use proptest::prelude::*;

fn d(n: u8) -> Digest {
    Digest::sha256(&[n])
}

fn sample() -> Value {
    serde_json::json!({
        "schema_version": 1, "media_type": MEDIA_TYPE,
        "agent": { "kind": "claude-code", "version": "0.1.0", "fingerprint": "f" },
        "model": { "base": d(1), "diff": d(2) },
        "cache": { "layout": "paged-batchinvariant-v1", "manifest": d(3) },
        "world": { "fs": d(4), "env": d(5), "procs": d(6) },
        "effects": { "ledger": d(7) }, "trace": { "messages": d(8) },
        "created_at": "2026-05-05T14:11:00Z", "parents": [d(9), d(10), d(9)]
    })
}

fn parse(value: &Value) -> Result<Image, FormatError> {
    Image::parse(&serde_json::to_vec(value).unwrap())
}

#[test]
fn an_image_names_its_layers_and_parents() {
    let image = parse(&sample()).unwrap();
    assert_eq!(image.digest, Digest::sha256(&serde_json::to_vec(&sample()).unwrap()));
    assert_eq!((image.cache, image.parents), (d(3), vec![d(9), d(10)]));
    let names: Vec<&str> = image.layers.iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!(names, ["effects.ledger", "model.base", "model.diff", "trace.messages", "world.env", "world.fs", "world.procs"]);
}

#[test]
fn names_of_layers_stay_within_a_directory_and_apart() {
    let mut value = sample();
    value["../.."] =
        serde_json::json!({ "/etc/passwd": d(20), "\u{0}etc\\passwd": d(21), "_etc_passwd": d(22), "": d(23), "note": "sha1:x", "n": 1 });
    let image = parse(&value).unwrap();
    let names: Vec<&str> = image.layers.iter().map(|layer| layer.name.as_str()).filter(|name| name.starts_with('_')).collect();
    value["image"] = serde_json::json!({ "json": d(24) });
    assert!(parse(&value).unwrap().layers.iter().any(|layer| layer.name == "image.json.2"));
    assert_eq!(names, ["_____._", "_____._etc_passwd", "_____._etc_passwd.2", "_____._etc_passwd.3"]);
}

#[test]
fn what_is_wrong_is_named() {
    for (at, wrong, expected) in [
        ("/schema_version", serde_json::json!(2), "$.schema_version"),
        ("/media_type", serde_json::json!("x"), "$.media_type"),
        ("/model/base", serde_json::json!("sha256:../../etc/passwd"), "$.model.base"),
        ("/cache/manifest", serde_json::json!("sha256:ABC"), "digest"),
        ("/parents", serde_json::json!([d(1), d(2), d(3)]), "$.parents"),
        ("/agent/kind", serde_json::json!("x".repeat(MAX_TEXT + 1)), "limit"),
        ("/agent", serde_json::json!({}), "kind"),
    ] {
        let mut value = sample();
        *value.pointer_mut(at).unwrap() = wrong;
        let message = parse(&value).unwrap_err().to_string();
        assert!(message.contains(expected), "{at}: {message}");
        assert!(message.len() < 1000, "{message}");
    }
    let mut many = sample();
    many["more"] = (0..=MAX_LAYERS).map(|n| (n.to_string(), serde_json::json!(d(0)))).collect::<Map<_, _>>().into();
    assert!(matches!(parse(&many), Err(FormatError::TooLarge { .. })));
    assert!(matches!(Image::parse(&vec![b' '; MAX_BYTES as usize + 1]), Err(FormatError::TooLarge { .. })));
    assert!(Image::parse("[".repeat(100_000).as_bytes()).is_err());
}

/// What must hold of every image that parses.
fn check(bytes: &[u8]) {
    let Ok(image) = Image::parse(bytes) else { return };
    assert_eq!(image.digest, Digest::sha256(bytes));
    assert!(image.parents.len() <= 2 && image.layers.len() <= MAX_LAYERS);
    let names: HashSet<&str> = image.layers.iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!(names.len(), image.layers.len());
    assert!(names.iter().all(|name| pfr_client::directory::layout::is_component(name)));
}

proptest! {
    #[test]
    fn any_bytes_end_in_an_image_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check(&bytes);
    }

    #[test]
    fn any_damage_ends_in_an_image_or_an_error(at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
        let mut bytes = serde_json::to_vec(&sample()).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        check(&bytes);
        if cut {
            bytes.truncate(at);
        }
        check(&bytes);
    }

    #[test]
    fn any_sections_keep_the_limits(sections in prop::collection::vec((".{0,12}", prop::collection::vec((".{0,80}", 0_u8..9), 0..20)), 0..20)) {
        let mut value = sample();
        for (section, fields) in sections {
            let fields: Map<String, Value> = fields.into_iter().map(|(key, n)| (key, serde_json::json!(d(n)))).collect();
            value.as_object_mut().unwrap().entry(section).or_insert(fields.into());
        }
        check(&serde_json::to_vec(&value).unwrap());
    }
}
