//! Signatures, and where they are required.

use crate::digest::Digest;
use crate::error::FormatError;
use crate::name::{RepositoryName, Tag};
use crate::pattern::Pattern;
use crate::signature::{PublicKey, is_companion};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

api! {
    /// A signature of a snapshot, in the form of cosign. A registry does not say whether it is
    /// good: its reader checks it with a public key.
    #[derive(Eq)]
    pub struct Signature {
        /// What was signed: JSON that names the digest of the snapshot.
        pub payload: String,
        /// The signature of the bytes of `payload`, in base64.
        pub signature: String,
        /// The id of the key, as the payload says it: the SHA-256 of its SPKI.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub key_id: Option<Digest>,
        /// Milliseconds since 1970, UTC, as the payload says it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub signed_at: Option<u64>,
    }

    /// A signature to be stored.
    #[derive(Eq)]
    #[serde(deny_unknown_fields)]
    pub struct NewSignature {
        /// What was signed, to the byte.
        #[cfg_attr(feature = "openapi", schema(max_length = 65536))]
        pub payload: String,
        /// The signature of these bytes, in base64.
        #[cfg_attr(feature = "openapi", schema(max_length = 16384))]
        pub signature: String,
    }

    /// Adds signatures to a snapshot.
    #[serde(deny_unknown_fields)]
    pub struct SignRequest {
        /// The signatures. Those that it has already are left out.
        #[cfg_attr(feature = "openapi", schema(max_items = 100))]
        pub signatures: Vec<NewSignature>,
    }

    /// The signatures of a snapshot.
    pub struct Signatures {
        /// The snapshot.
        pub digest: Digest,
        /// Its signatures.
        pub signatures: Vec<Signature>,
    }

    /// A manifest with signatures of a snapshot.
    #[derive(Eq, Hash)]
    pub struct SignatureManifest {
        /// The snapshot, which need not be there.
        pub snapshot: Digest,
        /// The manifest.
        pub manifest: Digest,
    }

    /// Manifests with signatures, in the order in which they came.
    pub struct SignatureList {
        /// One page of them.
        pub signatures: Vec<SignatureManifest>,
        /// Pass as `after` to get the next page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub next: Option<String>,
    }

    /// Tags that may be put only on what is signed.
    #[derive(Eq)]
    #[serde(deny_unknown_fields)]
    pub struct SigningPolicy {
        /// Its name, for people: 1 to 64 letters, digits and signs of ASCII. No other policy of the
        /// domain has it.
        #[cfg_attr(feature = "openapi", schema(pattern = "^[!-~]{1,64}$", example = "releases"))]
        pub name: String,
        /// The repositories.
        pub repositories: Pattern,
        /// The tags; all if there is none here.
        #[cfg_attr(feature = "openapi", schema(max_items = 100))]
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub tags: Vec<Pattern>,
        /// Public keys in PEM. A signature by one of them is enough.
        #[cfg_attr(feature = "openapi", schema(min_items = 1, max_items = 100))]
        pub keys: Vec<PublicKey>,
    }

    /// The signing policies of a domain. A tag needs what each policy for it asks for.
    #[derive(Eq, Default)]
    #[serde(deny_unknown_fields)]
    pub struct SigningPolicies {
        /// The policies.
        #[cfg_attr(feature = "openapi", schema(max_items = 100))]
        pub policies: Vec<SigningPolicy>,
    }
}

impl SigningPolicies {
    /// Policies, and patterns or keys of a policy.
    pub const MOST: usize = 100;

    /// The policies for a tag. The tags of signatures have none: they could not be put otherwise.
    pub fn of<'a>(&'a self, repository: &'a RepositoryName, tag: &'a Tag) -> impl Iterator<Item = &'a SigningPolicy> {
        self.policies.iter().filter(move |policy| {
            let is_meant = policy.tags.is_empty() || policy.tags.iter().any(|pattern| pattern.matches(tag.as_str()));
            is_meant && policy.repositories.matches(repository.as_str()) && !is_companion(tag)
        })
    }

    /// Refuses policies that are no policies.
    ///
    /// # Errors
    /// [`FormatError::Field`] with the place, what was expected there and what was found.
    pub fn check(&self) -> Result<(), FormatError> {
        let fail = |path: String, expected: String, found: String| Err(FormatError::field("signing policies", path, expected, found));
        let most = Self::MOST;
        if self.policies.len() > most {
            return fail("$.policies".into(), format!("at most {most} policies"), self.policies.len().to_string());
        }
        let mut names = HashSet::new();
        for (at, policy) in self.policies.iter().enumerate() {
            let place = |field: &str| format!("$.policies[{at}].{field}");
            let is_name = (1..=64).contains(&policy.name.len()) && policy.name.bytes().all(|byte| byte.is_ascii_graphic());
            if !is_name || !names.insert(&policy.name) {
                return fail(place("name"), "1 to 64 letters, digits and signs that no other policy has".into(), policy.name.clone());
            }
            if policy.tags.len() > most {
                return fail(place("tags"), format!("at most {most} patterns"), policy.tags.len().to_string());
            }
            if !(1..=most).contains(&policy.keys.len()) {
                return fail(place("keys"), format!("1 to {most} public keys"), policy.keys.len().to_string());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn policies(policies: Value) -> SigningPolicies {
        serde_json::from_value(json!({"policies": policies})).unwrap()
    }

    fn key() -> Value {
        json!(PublicKey::new([1; 32]))
    }

    #[test]
    fn a_policy_that_cannot_be_meant_is_refused_with_its_place() {
        let policy = |more: Value| {
            let mut policy = json!({"name": "p", "repositories": "*", "keys": [key()]});
            policy.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            policy
        };
        assert_eq!(policies(json!([policy(json!({"tags": ["v*"]}))])).check(), Ok(()));
        for (wrong, place) in [
            (json!({"name": ""}), "[0].name"),
            (json!({"name": "a b"}), "[0].name"),
            (json!({"keys": []}), "[0].keys"),
            (json!({"keys": vec![key(); 101]}), "[0].keys"),
            (json!({"tags": vec!["a"; 101]}), "[0].tags"),
        ] {
            let error = policies(json!([policy(wrong)])).check().unwrap_err().to_string();
            assert!(error.contains(place), "{error}");
        }
        let twice = policies(json!([policy(json!({})), policy(json!({}))])).check().unwrap_err().to_string();
        assert!(twice.contains("[1].name"), "{twice}");
        assert!(policies(Value::Array((0..101).map(|n| policy(json!({"name": n.to_string()}))).collect())).check().is_err());
        for wrong in [json!({"repositories": "a b"}), json!({"keys": ["PEM"]}), json!({"keys": null}), json!({"key": 1})] {
            assert!(serde_json::from_value::<SigningPolicy>(policy(wrong.clone())).is_err(), "{wrong}");
        }
    }

    #[test]
    fn policies_add_up_and_leave_the_tags_of_signatures() {
        let all = policies(json!([
            {"name": "team", "repositories": "team/*", "keys": [key()]},
            {"name": "releases", "repositories": "*", "tags": ["v*"], "keys": [key()]},
        ]));
        let said = |repository: &str, tag: &str| -> Vec<String> {
            let (repository, tag) = (repository.parse().unwrap(), tag.parse().unwrap());
            all.of(&repository, &tag).map(|policy| policy.name.clone()).collect()
        };
        assert_eq!(said("team/a", "v1"), ["team", "releases"]);
        assert_eq!(said("team/a", "wip"), ["team"]);
        assert_eq!(said("other", "v1"), ["releases"]);
        assert!(said("other", "wip").is_empty());
        assert!(said("team/a", &format!("sha256-{}.sig", Digest::sha256(b"").hex())).is_empty());
    }
}
