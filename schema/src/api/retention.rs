//! Retention: which snapshots a registry deletes by itself, and which tags stay where they are.

use crate::digest::Digest;
use crate::error::FormatError;
use crate::name::{RepositoryName, Selector, Tag};
use crate::pattern::Pattern;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

api! {
    /// What a registry deletes by itself in some repositories, and what it keeps there.
    ///
    /// It deletes the snapshots that meet every criterion that is given: `tags` and `untagged`,
    /// `below`, `keep_last`, `max_age_seconds`. Without `keep_last` and `max_age_seconds` it
    /// deletes nothing.
    #[derive(Eq)]
    #[serde(deny_unknown_fields)]
    pub struct RetentionPolicy {
        /// Its name, for people: 1 to 64 letters, digits and signs of ASCII. No other policy of the
        /// domain has it.
        #[cfg_attr(feature = "openapi", schema(pattern = "^[!-~]{1,64}$", example = "forks"))]
        pub name: String,
        /// The repositories.
        pub repositories: Pattern,
        /// Only snapshots whose tags all match one of these; then one without a tag stays.
        #[cfg_attr(feature = "openapi", schema(max_items = 100))]
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub tags: Vec<Pattern>,
        /// Only snapshots without a tag; together with `tags`, these as well.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pub untagged: bool,
        /// Only snapshots that descend from this one, as complete branches: one stays while one
        /// that descends from it stays. Where there is no such snapshot, nothing is deleted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub below: Option<Selector>,
        /// Keep the newest so many of those that `tags`, `untagged` and `below` select.
        #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 1_000_000_000))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub keep_last: Option<u64>,
        /// Of what these are the newest. Not with `below`, which keeps the ancestors of what stays.
        #[serde(default)]
        pub keep_last_of: KeepLastOf,
        /// Only snapshots pushed longer ago than this.
        #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 3_155_760_000_u64))]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub max_age_seconds: Option<u64>,
        /// A snapshot with such a tag stays, whatever other policies say.
        #[cfg_attr(feature = "openapi", schema(max_items = 100))]
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub keep_tags: Vec<Pattern>,
        /// The same, and only administrators move or delete such a tag once it is there.
        #[cfg_attr(feature = "openapi", schema(max_items = 100))]
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub immutable_tags: Vec<Pattern>,
    }

    /// The retention policies of a domain. Each goes for itself: a snapshot is deleted if one of
    /// them says so, unless one keeps it.
    #[derive(Eq, Default)]
    #[serde(deny_unknown_fields)]
    pub struct RetentionPolicies {
        /// The policies.
        #[cfg_attr(feature = "openapi", schema(max_items = 100))]
        pub policies: Vec<RetentionPolicy>,
    }

    /// Asks for a run of the retention policies.
    #[serde(deny_unknown_fields)]
    pub struct RetentionRequest {
        /// Delete nothing, only say what would be deleted.
        #[serde(default)]
        pub dry_run: bool,
    }

    /// What a run of the retention policies deleted.
    #[derive(Default)]
    pub struct RetentionReport {
        /// Whether it was a dry run: nothing was changed, and the rest says what would be deleted.
        pub dry_run: bool,
        /// Snapshots that were deleted.
        pub snapshots: u64,
        /// The first 10,000 of them, in the order in which they were deleted.
        pub deleted: Vec<DeletedSnapshot>,
        /// Snapshots that stay, in the repositories for which there is a policy.
        pub kept: u64,
        /// Whether it got to the end. It did not if the registry stops, or if the policies or tags
        /// were changed meanwhile: the next run goes on.
        pub complete: bool,
        /// Of a dry run: what the deletions would free together. Absent if these are more than
        /// 100,000 snapshots, or if the run did not get to the end.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub freed: Option<super::Freed>,
    }

    /// A snapshot that was deleted, with its tags.
    pub struct DeletedSnapshot {
        /// Its repository.
        pub repository: RepositoryName,
        /// The snapshot.
        pub digest: Digest,
        /// Tags that pointed at it.
        pub tags: Vec<Tag>,
        /// Milliseconds since 1970, UTC, of the push.
        pub pushed_at: u64,
        /// Raw bytes it reached.
        pub logical_bytes: u64,
        /// Name of the policy that says so; absent if no policy does.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub policy: Option<String>,
    }
}

/// Of what the last snapshots are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum KeepLastOf {
    /// The newest of each repository.
    #[default]
    Repository,
    /// The last of each lineage: of the snapshots that lead to one without children.
    Lineage,
}

impl RetentionPolicy {
    /// Whether it deletes anything.
    #[must_use]
    pub fn deletes(&self) -> bool {
        self.keep_last.is_some() || self.max_age_seconds.is_some()
    }
}

impl RetentionPolicies {
    /// Policies, and patterns of one kind in a policy.
    pub const MOST: usize = 100;
    /// The greatest `keep_last`.
    pub const MOST_LAST: u64 = 1_000_000_000;
    /// The greatest `max_age_seconds`: 100 years.
    pub const MOST_SECONDS: u64 = 3_155_760_000;

    /// The policies for a repository.
    pub fn of<'a>(&'a self, repository: &'a RepositoryName) -> impl Iterator<Item = &'a RetentionPolicy> {
        self.policies.iter().filter(|policy| policy.repositories.matches(repository.as_str()))
    }

    /// Whether a tag keeps its snapshot.
    #[must_use]
    pub fn keeps(&self, repository: &RepositoryName, tag: &Tag) -> bool {
        self.of(repository).any(|policy| policy.keep_tags.iter().chain(&policy.immutable_tags).any(|pattern| pattern.matches(tag.as_str())))
    }

    /// Whether only administrators move or delete a tag.
    #[must_use]
    pub fn is_immutable(&self, repository: &RepositoryName, tag: &Tag) -> bool {
        self.of(repository).any(|policy| policy.immutable_tags.iter().any(|pattern| pattern.matches(tag.as_str())))
    }

    /// Refuses policies that are no policies.
    ///
    /// # Errors
    /// [`FormatError::Field`] with the place, what was expected there and what was found.
    pub fn check(&self) -> Result<(), FormatError> {
        let fail = |path: String, expected: String, found: String| Err(FormatError::field("retention policies", path, expected, found));
        if self.policies.len() > Self::MOST {
            return fail("$.policies".into(), format!("at most {} policies", Self::MOST), self.policies.len().to_string());
        }
        let mut names = HashSet::new();
        for (at, policy) in self.policies.iter().enumerate() {
            let place = |field: &str| format!("$.policies[{at}].{field}");
            let is_name = (1..=64).contains(&policy.name.len()) && policy.name.bytes().all(|byte| byte.is_ascii_graphic());
            if !is_name || !names.insert(&policy.name) {
                return fail(place("name"), "1 to 64 letters, digits and signs that no other policy has".into(), policy.name.clone());
            }
            for (field, patterns) in [("tags", &policy.tags), ("keep_tags", &policy.keep_tags), ("immutable_tags", &policy.immutable_tags)]
            {
                if patterns.len() > Self::MOST {
                    return fail(place(field), format!("at most {} patterns", Self::MOST), patterns.len().to_string());
                }
            }
            for (field, found, most) in
                [("keep_last", policy.keep_last, Self::MOST_LAST), ("max_age_seconds", policy.max_age_seconds, Self::MOST_SECONDS)]
            {
                if let Some(found) = found.filter(|found| !(1..=most).contains(found)) {
                    return fail(place(field), format!("1 to {most}"), found.to_string());
                }
            }
            let selects = !policy.tags.is_empty() || policy.untagged || policy.below.is_some();
            if selects && !policy.deletes() {
                return fail(place("keep_last"), "keep_last or max_age_seconds".into(), "neither: other criteria only narrow these".into());
            }
            if policy.keep_last_of == KeepLastOf::Lineage && (policy.keep_last.is_none() || policy.below.is_some()) {
                return fail(place("keep_last_of"), "\"lineage\" only with keep_last and without below".into(), "\"lineage\"".into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn policies(policies: Value) -> RetentionPolicies {
        serde_json::from_value(json!({"policies": policies})).unwrap()
    }

    #[test]
    fn a_policy_that_cannot_be_meant_is_refused_with_its_place() {
        let policy = |more: Value| {
            let mut policy = json!({"name": "p", "repositories": "*"});
            policy.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            policy
        };
        for right in [json!({}), json!({"keep_last": 1, "keep_last_of": "lineage"}), json!({"max_age_seconds": 1, "below": "base~1"})] {
            assert_eq!(policies(json!([policy(right)])).check(), Ok(()));
        }
        for (wrong, place) in [
            (json!({"name": ""}), "[0].name"),
            (json!({"name": "a b"}), "[0].name"),
            (json!({"keep_last": 0}), "[0].keep_last"),
            (json!({"max_age_seconds": RetentionPolicies::MOST_SECONDS + 1}), "[0].max_age_seconds"),
            (json!({"untagged": true}), "[0].keep_last"),
            (json!({"tags": ["a"]}), "[0].keep_last"),
            (json!({"below": "base"}), "[0].keep_last"),
            (json!({"max_age_seconds": 1, "keep_last_of": "lineage"}), "[0].keep_last_of"),
            (json!({"keep_last": 1, "below": "base", "keep_last_of": "lineage"}), "[0].keep_last_of"),
            (json!({"keep_tags": vec!["a"; 101]}), "[0].keep_tags"),
        ] {
            let error = policies(json!([policy(wrong)])).check().unwrap_err().to_string();
            assert!(error.contains(place), "{error}");
        }
        let twice = policies(json!([policy(json!({})), policy(json!({}))])).check().unwrap_err().to_string();
        assert!(twice.contains("[1].name"), "{twice}");
        assert!(policies(Value::Array((0..101).map(|n| policy(json!({"name": n.to_string()}))).collect())).check().is_err());
        for wrong in [json!({"repositories": "a b"}), json!({"below": "~"}), json!({"keep": 1}), json!({"keep_last_of": "tag"})] {
            assert!(serde_json::from_value::<RetentionPolicy>(policy(wrong.clone())).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_tag_is_kept_by_any_policy_for_its_repository() {
        let all = policies(json!([
            {"name": "a", "repositories": "team/*", "keep_tags": ["main"]},
            {"name": "b", "repositories": "*", "immutable_tags": ["v*"]},
        ]));
        let said = |repository: &str, tag: &str| {
            let (repository, tag) = (repository.parse().unwrap(), tag.parse().unwrap());
            (all.keeps(&repository, &tag), all.is_immutable(&repository, &tag))
        };
        assert_eq!(said("team/a", "main"), (true, false));
        assert_eq!(said("other", "main"), (false, false));
        assert_eq!([said("team/a", "v1"), said("other", "v1")], [(true, true); 2]);
        assert_eq!(said("team/a", "wip"), (false, false));
    }
}
