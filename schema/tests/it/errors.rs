use pfr_schema::{ErrorCode, FormatError};
use std::collections::HashSet;

#[test]
fn every_code_is_named_as_serde_spells_it() {
    for code in ErrorCode::ALL {
        assert_eq!(serde_json::to_value(code).unwrap(), code.name(), "{code:?}");
        assert_eq!(serde_json::from_value::<ErrorCode>(code.name().into()).unwrap(), *code);
        assert_eq!(code.to_string(), code.name());
    }
}

#[test]
fn names_of_codes_are_unique_and_an_unknown_one_is_refused() {
    let names: HashSet<_> = ErrorCode::ALL.iter().map(|c| c.name()).collect();
    assert_eq!(names.len(), ErrorCode::ALL.len());
    assert!(serde_json::from_str::<ErrorCode>("\"no_such_code\"").is_err());
}

#[test]
fn only_conflicts_haste_and_server_side_statuses_are_worth_a_retry_and_no_failure_exits_with_success() {
    for code in ErrorCode::ALL {
        assert!((400..600).contains(&code.status()), "{code}");
        assert!(!code.retryable() || matches!(code.status(), 409 | 429) || code.status() >= 500, "{code}");
        assert_ne!(code.exit_code(), 0, "{code}");
        // 2 is what a shell and clap call a usage error, 128 and up are signals.
        assert!(code.exit_code() != 2 && code.exit_code() < 128, "{code}");
    }
}

#[test]
fn every_format_error_has_the_code_of_its_meaning() {
    let name = || "sha256:0".to_owned();
    let inexact =
        FormatError::InexactStorage { tensor: "t".into(), index: vec![1], value: "-0".into(), storage: "f32".into(), logical: "i8".into() };
    let table = [
        (FormatError::Digest { found: "x".into(), reason: "y" }, ErrorCode::InvalidName),
        (FormatError::Name { what: "tag", found: "x".into(), reason: "y" }, ErrorCode::InvalidName),
        (FormatError::Json { document: "d", path: "$".into(), reason: "r".into() }, ErrorCode::InvalidDocument),
        (FormatError::Field { document: "d", path: "$".into(), expected: "e".into(), found: "f".into() }, ErrorCode::InvalidDocument),
        (FormatError::TooLarge { what: "w", found: 2, limit: 1 }, ErrorCode::TooLarge),
        (FormatError::Frame { position: 0, reason: "r".into() }, ErrorCode::CorruptFrame),
        (FormatError::Codec { codec: "zstd", reason: "r".into() }, ErrorCode::CorruptFrame),
        (FormatError::Pack { reason: "r".into() }, ErrorCode::CorruptFrame),
        (FormatError::Truncated { position: 0, reason: "r" }, ErrorCode::Truncated),
        (FormatError::DigestMismatch { expected: name(), found: name() }, ErrorCode::DigestMismatch),
        (FormatError::LengthMismatch { digest: name(), expected: 1, found: 2 }, ErrorCode::LengthMismatch),
        (FormatError::PayloadHashMismatch { tensor: "t".into(), expected: name(), found: name() }, ErrorCode::PayloadHashMismatch),
        (FormatError::ValueHashMismatch { tensor: "t".into(), expected: name(), found: name() }, ErrorCode::ValueHashMismatch),
        (inexact, ErrorCode::InexactStorage),
    ];
    for (error, code) in table {
        assert_eq!(error.code(), code, "{error}");
    }
}
