use crate::common::cases;
use pfr_schema::{AgentName, Algorithm, Digest, DigestPrefix, DomainName, ErrorCode, Reference, RepositoryName, Selector, Tag};
use proptest::prelude::*;

const HEX: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

#[test]
fn repository_names_follow_the_oci_grammar() {
    for name in ["a", "0", "team/agent", "a/b/c/d", "a.b", "a_b", "a__b", "a-b", "a---b", "a.b_c-d/e__f", &"a".repeat(255)] {
        assert_eq!(name.parse::<RepositoryName>().unwrap().as_str(), name);
    }
}

#[test]
fn hostile_repository_names_are_refused() {
    let long = "a".repeat(256);
    let hostile = [
        "",
        " ",
        "/",
        "//",
        "a/",
        "/a",
        "a//b",
        ".",
        "..",
        "../x",
        "a/../b",
        "a/./b",
        "a/..",
        "./a",
        ".a",
        "a.",
        "-a",
        "a-",
        "_a",
        "a_",
        "a..b",
        "a._b",
        "a.-b",
        "a___b",
        "a_-b",
        "A",
        "Team/agent",
        "a b",
        "a\tb",
        "a\nb",
        "a\n",
        "\na",
        "a\0b",
        "\0",
        "a\\b",
        "a:b",
        "a@b",
        "a~b",
        "a%2fb",
        "a%00",
        "a?b",
        "a#b",
        "a*b",
        "a&b",
        "a+b",
        "a=b",
        "a,b",
        "ä",
        "a/ä",
        "аgent",
        "a\u{200b}b",
        "a\u{2044}b",
        "ａ",
        "🦀",
        "a/-",
        "a/_/b",
        "c:",
        "http://x",
        "\u{feff}a",
        "a\r",
        "con/../aux",
        "~",
        "$HOME",
        "a;b",
        "a'b",
        "a\"b",
        "<a>",
        &long,
    ];
    for name in hostile {
        let error = name.parse::<RepositoryName>().unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidName, "{name:?}");
        assert!(error.to_string().starts_with("invalid repository name "), "{error}");
        assert!(serde_json::from_value::<RepositoryName>(name.into()).is_err(), "{name:?} in JSON");
    }
}

#[test]
fn refusals_of_names_say_why() {
    for (name, message) in [
        ("", r#"invalid repository name "": expected 1 to 255 bytes"#),
        ("a//b", r#"invalid repository name "a//b": a component is empty"#),
        ("a-", r#"invalid repository name "a-": a component ends with a separator"#),
        ("a..b", r#"invalid repository name "a..b": separators are one of . _ __ or dashes"#),
        (
            "../x",
            r#"invalid repository name "../x": expected lower-case letters, digits and single separators (. _ __ -), not at the ends of a component"#,
        ),
        ("aB", r#"invalid repository name "aB": expected lower-case letters, digits and single separators (. _ __ -)"#),
    ] {
        assert_eq!(name.parse::<RepositoryName>().unwrap_err().to_string(), message);
    }
    let error = "é".repeat(100_000).parse::<RepositoryName>().unwrap_err().to_string();
    assert!(error.len() < 1000, "a long name is not repeated whole: {} bytes", error.len());
}

#[test]
fn agents_have_the_names_of_hosts() {
    for name in ["a", "GPU-1", "node_1", "gpu-1.rack-2.example.com", &"a".repeat(253)] {
        assert_eq!(name.parse::<AgentName>().unwrap().as_str(), name);
    }
    for name in ["", "-a", ".", "..", "a/b", "a b", "é", "a\0", "a\n", &"a".repeat(254)] {
        assert_eq!(name.parse::<AgentName>().unwrap_err().code(), ErrorCode::InvalidName, "{name:?}");
    }
}

#[test]
fn tags_follow_the_oci_grammar() {
    for tag in ["latest", "v1.2.3", "_x", "A-b_c.D", "0", &"t".repeat(128)] {
        assert_eq!(tag.parse::<Tag>().unwrap().as_str(), tag);
    }
    let long = "t".repeat(129);
    for tag in ["", ".", "..", ".a", "-a", "a/b", "../a", "a b", "a:b", "a@b", "a~1", "ä", "a\0", "a\n", "\na", "a%", "é", &long] {
        let error = tag.parse::<Tag>().unwrap_err();
        assert!(error.to_string().starts_with("invalid tag "), "{tag:?}: {error}");
        assert!(serde_json::from_value::<Tag>(tag.into()).is_err(), "{tag:?} in JSON");
    }
}

#[test]
fn domain_names_are_one_component_without_dots() {
    for name in ["a", "0", "acme", "a_b", "a__b", "a-b", "a---b", "default", &"a".repeat(40)] {
        assert_eq!(name.parse::<DomainName>().unwrap().as_str(), name);
    }
    let long = "a".repeat(41);
    for name in
        ["", ".", "..", "a.b", "a/b", "../a", "a/", "-a", "a-", "_a", "a_", "a___b", "A", "a b", "a%61", "a\0", "a\n", "é", "\"", &long]
    {
        let error = name.parse::<DomainName>().unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidName, "{name:?}");
        assert!(error.to_string().starts_with("invalid domain name "), "{name:?}: {error}");
        assert!(serde_json::from_value::<DomainName>(name.into()).is_err(), "{name:?} in JSON");
    }
    assert!(DomainName::default().is_default() && !"acme".parse::<DomainName>().unwrap().is_default());
}

#[test]
fn references_are_read_as_documented() {
    let digest: Digest = format!("sha256:{HEX}").parse().unwrap();
    let tag = |tag: &str, back| Some(Selector::Tag { tag: tag.parse().unwrap(), back });
    let table = [
        ("team/agent".to_owned(), None, "team/agent", None),
        ("team/agent:v1".into(), None, "team/agent", tag("v1", 0)),
        ("team/agent:v1~".into(), None, "team/agent", tag("v1", 1)),
        ("team/agent:v1~7".into(), None, "team/agent", tag("v1", 7)),
        ("team/agent~2".into(), None, "team/agent", tag("latest", 2)),
        ("team/agent~".into(), None, "team/agent", tag("latest", 1)),
        ("a:v1~100000".into(), None, "a", tag("v1", 100_000)),
        (format!("a@sha256:{HEX}"), None, "a", Some(Selector::Digest(digest))),
        (format!("a:sha256:{HEX}"), None, "a", Some(Selector::Digest(digest))),
        ("http://localhost:8080/a/b:c".into(), Some("http://localhost:8080"), "a/b", tag("c", 0)),
        ("https://[::1]:8080/a".into(), Some("https://[::1]:8080"), "a", None),
        (format!("https://pf.example.com/a@sha256:{HEX}"), Some("https://pf.example.com"), "a", Some(Selector::Digest(digest))),
        // A host without a scheme, as docker has it.
        ("localhost:5077/team/agent:1".into(), Some("http://localhost:5077"), "team/agent", tag("1", 0)),
        ("localhost/agent".into(), Some("http://localhost"), "agent", None),
        ("127.0.0.1:5077/agent:1~2".into(), Some("http://127.0.0.1:5077"), "agent", tag("1", 2)),
        ("127.1.2.3/agent".into(), Some("http://127.1.2.3"), "agent", None),
        ("[::1]:5077/agent".into(), Some("http://[::1]:5077"), "agent", None),
        ("[2001:db8::1]/agent".into(), Some("https://[2001:db8::1]"), "agent", None),
        ("registry:5000/agent".into(), Some("https://registry:5000"), "agent", None),
        (format!("pf.example.com/team/agent@sha256:{HEX}"), Some("https://pf.example.com"), "team/agent", Some(Selector::Digest(digest))),
        ("10.0.0.7/agent:v1.2".into(), Some("https://10.0.0.7"), "agent", tag("v1.2", 0)),
        ("http://pf.example.com/agent".into(), Some("http://pf.example.com"), "agent", None),
        ("https://localhost:5077/agent".into(), Some("https://localhost:5077"), "agent", None),
        // Domains.
        ("localhost:5077/domains/acme/team/agent:1".into(), Some("http://localhost:5077/domains/acme"), "team/agent", tag("1", 0)),
        ("https://h/domains/a-b/agent".into(), Some("https://h/domains/a-b"), "agent", None),
        ("https://h/domains/default/agent".into(), Some("https://h"), "agent", None),
        ("https://h/domains/default/domains/a/b".into(), Some("https://h"), "domains/a/b", None),
        ("https://h/domains/acme".into(), Some("https://h"), "domains/acme", None),
        ("domains/acme/agent".into(), None, "domains/acme/agent", None),
        // Components that are no host, and those that only look like one.
        ("agent.v2:1".into(), None, "agent.v2", tag("1", 0)),
        ("localhost:5077".into(), None, "localhost", tag("5077", 0)),
        ("team/a.b/c".into(), None, "team/a.b/c", None),
        ("/my.team/agent:1".into(), None, "my.team/agent", tag("1", 0)),
        ("/localhost/agent".into(), None, "localhost/agent", None),
    ];
    for (text, registry, repository, selector) in table {
        let reference: Reference = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(reference.registry.as_deref(), registry, "{text}");
        assert_eq!(reference.repository.as_str(), repository, "{text}");
        assert_eq!(reference.selector, selector, "{text}");
        assert_eq!(reference.to_string().parse::<Reference>().unwrap(), reference, "{text}");
    }
    assert_eq!("a".parse::<Reference>().unwrap().selector_or_latest().to_string(), "latest");
}

#[test]
fn hostile_references_are_refused() {
    let long = format!("http://h/{}", "a".repeat(3000));
    let digest = format!("a:v1@sha256:{HEX}");
    let upper = format!("a@sha256:{}", HEX.to_uppercase());
    let hostile = [
        "",
        ":",
        "@",
        "~",
        "a:",
        "a@",
        "a:b:c",
        "a@b",
        "a:b~c",
        "a:~1",
        "a:b~-1",
        "a:b~+1",
        "a:b~1~2",
        "a:b~100001",
        "a:b~4294967296",
        "a:b~99999999999999999999",
        "a:b~ 1",
        "a:b~1 ",
        "a~1:b",
        "../a:b",
        "a/../b",
        "a:../b",
        "HTTP://h/a",
        "ftp://h/a",
        "oci://h/a",
        "://h/a",
        "team:tag/agent",
        "localhost:/a",
        "h:123456/a",
        "http://h:80x/a",
        "user@h.example/a",
        "/team/agent",
        "/tmp/x",
        "//h.example/a",
        "a@2a19b",
        "a@2A19B2",
        "a@sha256:2a19b",
        "a@md5:2a19b2c9",
        "sha256:2a19b2c9309a",
        "http://",
        "http:///a",
        "http://h",
        "http://h/",
        "http://h//a",
        "http://h/a/",
        "http://user:secret@h/a",
        "http://user@h/a",
        "http://h?x/a",
        "http://h#x/a",
        "http://h x/a",
        "http://h\n/a",
        "http://h\\evil/a",
        "http://h%2f/a",
        "http://:80/a",
        "http://hé/a",
        "file:///etc/passwd",
        "http://h/../a",
        "a\0",
        "a:b\0",
        "a:b\n",
        &long,
        &digest,
        &upper,
    ];
    for text in hostile {
        match text.parse::<Reference>() {
            Err(error) => {
                assert_eq!(error.code(), ErrorCode::InvalidName, "{text:?}");
                assert!(!error.to_string().contains('\n') && error.to_string().len() < 2000, "{error}");
            }
            Ok(reference) => panic!("{text:?} accepted as {reference:?}"),
        }
    }
}

#[test]
fn digests_may_be_cut_short() {
    let digest: Digest = format!("sha256:{HEX}").parse().unwrap();
    let other = Digest::sha256(b"other");
    for (text, whole) in
        [("a@ba7816", "a@ba7816"), ("a@sha256:ba7816bf8f", "a@sha256:ba7816bf8f"), (&format!("a@{HEX}"), &format!("a@{HEX}"))]
    {
        let reference: Reference = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(reference.to_string(), whole);
        let Some(Selector::Prefix(prefix)) = &reference.selector else { panic!("{text}: {reference:?}") };
        assert!(prefix.matches(&digest) && !prefix.matches(&other), "{text}");
        let ranges = prefix.key_ranges();
        let within = |digest: &Digest| ranges.iter().any(|(first, last)| (first..=last).contains(&&digest.to_key()));
        assert!(within(&digest) && !within(&other), "{text}");
        // As a part of a REST path, and back.
        let selector = reference.selector.clone().unwrap();
        assert_eq!(selector.to_string().parse::<Selector>().unwrap(), selector, "{text}");
    }
    // Without a mark in front it is a tag.
    assert!(matches!("ba7816bf8f01".parse::<Selector>().unwrap(), Selector::Tag { .. }));
    let blake: DigestPrefix = "blake3:ba7816".parse().unwrap();
    assert!(!blake.matches(&digest) && blake.key_ranges().len() == 1);
    let sha512 = Digest::of(Algorithm::Sha512, b"x");
    let long: DigestPrefix = sha512.hex()[..100].parse().unwrap();
    assert!(long.matches(&sha512) && long.key_ranges().len() == 1, "only sha512 has that many digits");
}

#[test]
fn refusals_of_references_say_what_to_write() {
    for (text, words) in [
        ("ftp://h/a", "http://HOST or https://HOST"),
        ("sha256:2a19b2c9309a", "REPOSITORY@DIGEST"),
        ("a@2a19b", "at least 6 hex digits"),
        ("a@2A19B2", "lower-case hex"),
        ("team:tag/agent", "a tag comes after the repository"),
        ("/team/big", "such as /my.team/agent; leave it out"),
        ("http://h/", "expected a repository after the registry's address"),
        ("http://h/domains/acme/", "expected a repository after the registry's address"),
        ("localhost/", "expected a repository after the registry's address"),
    ] {
        let error = text.parse::<Reference>().unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
}

fn repository() -> impl Strategy<Value = String> {
    let component = "[a-z0-9]{1,5}((\\.|_|__|-{1,3})[a-z0-9]{1,4}){0,2}";
    let path = prop::collection::vec(component, 1..5).prop_map(|c| c.join("/"));
    (any::<bool>(), path).prop_map(|(like_a_domain, path)| if like_a_domain { format!("domains/{path}") } else { path })
}

fn reference() -> impl Strategy<Value = Reference> {
    let selector = prop_oneof![
        Just(None),
        ("[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", 0_u32..=100_000)
            .prop_map(|(tag, back)| Some(Selector::Tag { tag: tag.parse().unwrap(), back })),
        any::<u64>().prop_map(|n| Some(Selector::Digest(Digest::sha256(&n.to_le_bytes())))),
        "((sha256|blake3):)?[0-9a-f]{6,63}".prop_map(|prefix| Some(Selector::Prefix(prefix.parse().unwrap()))),
    ];
    (prop::option::of("https?://[a-z0-9.-]{1,20}(:[0-9]{1,5})?(/domains/[a-z0-9]{1,5}(-[a-z]{1,3})?)?"), repository(), selector)
        .prop_map(|(registry, repository, selector)| Reference { registry, repository: repository.parse().unwrap(), selector })
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn references_survive_their_text(reference in reference()) {
        prop_assert_eq!(reference.to_string().parse::<Reference>().unwrap(), reference.clone());
        if let Some(selector) = reference.selector {
            prop_assert_eq!(selector.to_string().parse::<Selector>().unwrap(), selector);
        }
    }

    /// The parser against the grammar as a regular expression would have it, on text made of the
    /// characters that matter.
    #[test]
    fn repository_names_are_exactly_the_grammar(name in "[a-c.._/-]{0,12}") {
        let component = |c: &str| {
            let mut rest = c;
            loop {
                let word = rest.trim_start_matches(['a', 'b', 'c']);
                if word.len() == rest.len() { return false }
                if word.is_empty() { return true }
                let after = word.trim_start_matches(['.', '_', '-']);
                let separator = &word[..word.len() - after.len()];
                if !(separator == "." || separator == "_" || separator == "__" || separator.chars().all(|c| c == '-')) { return false }
                rest = after;
            }
        };
        prop_assert_eq!(name.parse::<RepositoryName>().is_ok(), name.split('/').all(component));
        prop_assert_eq!(name.parse::<DomainName>().is_ok(), !name.contains(['/', '.']) && component(&name));
    }

    #[test]
    fn any_text_is_refused_or_means_one_thing(text in prop_oneof!["[a-zA-Z0-9:@~/._-]{0,40}", "https?://[a-z:@/~.]{0,20}", any::<String>()]) {
        if let Ok(reference) = text.parse::<Reference>() {
            prop_assert_eq!(reference.to_string().parse::<Reference>().unwrap(), reference);
        }
        let _ = text.parse::<RepositoryName>();
        let _ = text.parse::<Tag>();
        let _ = text.parse::<Selector>();
    }

    /// A name is joined to paths and URLs: nothing in it may mean anything there.
    #[test]
    fn a_name_that_parses_is_safe_in_paths_and_urls(text in any::<String>()) {
        if let Ok(name) = text.parse::<RepositoryName>() {
            prop_assert!(name.as_str().bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-/".contains(&b)));
            prop_assert!(name.as_str().split('/').all(|c| !c.is_empty() && !c.starts_with('.')));
        }
        if let Ok(name) = text.parse::<DomainName>() {
            prop_assert!(name.as_str().bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-".contains(&b)));
            prop_assert_eq!(serde_json::from_value::<DomainName>(name.as_str().into()).unwrap(), name);
        }
    }
}
