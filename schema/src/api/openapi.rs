//! Validated names are strings on the wire.

use super::TagState;
use crate::access::{AccessScope, AccessTokenId};
use crate::digest::Digest;
use crate::name::{AgentName, DomainName, RepositoryName, Selector, Tag};
use crate::pattern::Pattern;
use crate::signature::PublicKey;
use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

fn string(pattern: &str, example: &str) -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::Type(Type::String)).pattern(Some(pattern)).examples([example])
}
macro_rules! string_schema {
    ($type:ty, $pattern:expr, $example:literal $(, $bound:ident = $number:literal)*) => {
        impl PartialSchema for $type {
            fn schema() -> RefOr<Schema> {
                string($pattern, $example)$(.$bound(Some($number)))*.into()
            }
        }
        impl ToSchema for $type {}
    };
}
string_schema!(
    Digest,
    "^(sha256|blake3):[0-9a-f]{64}$|^sha512:[0-9a-f]{128}$",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
);
string_schema!(
    TagState,
    "^absent$|^(sha256|blake3):[0-9a-f]{64}$|^sha512:[0-9a-f]{128}$",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
);
string_schema!(
    Selector,
    concat!(
        "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(~(100000|[0-9]{0,5}))?$",
        "|^@[0-9a-f]{6,128}$|^@?(sha256|blake3):[0-9a-f]{6,64}$|^@?sha512:[0-9a-f]{6,128}$"
    ),
    "latest~2"
);
string_schema!(Tag, "^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$", "latest");
string_schema!(
    RepositoryName,
    r"^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*$",
    "team/agent",
    min_length = 1,
    max_length = 255
);
string_schema!(AgentName, "^[A-Za-z0-9_][A-Za-z0-9._-]{0,252}$", "gpu-1");
string_schema!(DomainName, "^[a-z0-9]+((_|__|-+)[a-z0-9]+)*$", "acme", min_length = 1, max_length = 40);
string_schema!(Pattern, "^[A-Za-z0-9*._/-]{1,255}$", "team/*");
string_schema!(
    PublicKey,
    "^-----BEGIN PUBLIC KEY-----",
    "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n"
);
string_schema!(AccessTokenId, "^[0-9a-f]{16}$", "0193a7c2e41f0b5d");
string_schema!(AccessScope, r"^[A-Za-z0-9*._/-]{1,255}:(pull|push|delete|admin)(,(pull|push|delete|admin))*$", "team/*:pull,push");

/// A token id: every number of 32 bits.
pub(super) struct TokenId;

impl PartialSchema for TokenId {
    fn schema() -> RefOr<Schema> {
        let number = ObjectBuilder::new().schema_type(SchemaType::Type(Type::Integer));
        number.minimum(Some(0)).maximum(Some(u32::MAX)).description(Some("A token id.")).into()
    }
}
impl ToSchema for TokenId {}

/// Two numbers. As a list of a fixed length it means the same as `prefixItems` does, and older
/// tools understand it too.
pub(super) struct Pair;

impl PartialSchema for Pair {
    fn schema() -> RefOr<Schema> {
        let number = ObjectBuilder::new().schema_type(SchemaType::Type(Type::Integer)).minimum(Some(0));
        ArrayBuilder::new().items(number).min_items(Some(2)).max_items(Some(2)).description(Some("Two numbers.")).into()
    }
}
impl ToSchema for Pair {}
