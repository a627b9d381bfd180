//! Where a snapshot goes: the local repository and tag, and the registry behind it.

use crate::error::{Error, Result};
use pfr_schema::agent::Push;
use pfr_schema::{Reference, RepositoryName, Tag};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the commit of a snapshot has begun: from then on it cannot be given up. All clones are
/// one.
#[derive(Clone, Debug, Default)]
pub(crate) struct CommitBegun(Arc<AtomicBool>);

impl CommitBegun {
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub fn get(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Where a snapshot goes.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub repository: RepositoryName,
    pub tag: Option<Tag>,
    /// The registry to push to, unless it stays here.
    registry: Option<String>,
    /// Whether it may be evicted although no registry has it: no request asked for it.
    pub is_cached: bool,
    pub commit_begun: CommitBegun,
}

impl Target {
    /// Reads the reference of a request; `default` is the agent's registry.
    pub fn parse(reference: &str, push: Push, default: Option<&str>) -> Result<Self> {
        let reference: Reference = reference.parse()?;
        let tag = reference.selector.map(|selector| selector.tag().cloned().ok_or(selector)).transpose();
        let tag = tag.map_err(|other| Error::Invalid(format!("a snapshot is stored under a tag, not under \"{other}\"")))?;
        let registry = reference.registry.or_else(|| default.map(|url| url.trim_end_matches('/').to_owned()));
        let registry = match (push, registry) {
            (Push::Never, _) => None,
            (_, Some(registry)) => Some(registry),
            (_, None) => {
                let hint = "the reference names no registry and the agent has none; name one, or ask for push \"never\"";
                return Err(Error::Invalid(hint.into()));
            }
        };
        Ok(Self { repository: reference.repository, tag, registry, is_cached: false, commit_begun: CommitBegun::default() })
    }

    /// The tag, or one made of the sequence's name.
    pub fn tag_for(&self, sequence: &str) -> Result<Tag> {
        if let Some(tag) = &self.tag {
            return Ok(tag.clone());
        }
        let legal = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-') { c } else { '-' };
        let name: String = sequence.chars().map(legal).collect();
        let name = name.trim_start_matches(['.', '-']);
        Ok(name[..name.len().min(128)].parse()?)
    }

    /// The reference in the local store.
    pub fn local(&self, tag: &Tag) -> String {
        format!("{}:{tag}", self.repository)
    }

    /// The reference to push to, with host.
    pub fn remote(&self, tag: &Tag) -> Option<String> {
        self.registry.as_ref().map(|registry| format!("{registry}/{}:{tag}", self.repository))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequences_name_is_the_tag_where_none_was_given() {
        let target = Target::parse("team/agent", Push::Never, None).unwrap();
        for (sequence, tag) in [("step-9", "step-9"), ("chat 7/ä", "chat-7--"), ("--x", "x")] {
            assert_eq!(target.tag_for(sequence).unwrap().as_str(), tag);
        }
        assert!(target.tag_for("…").is_err());
        assert_eq!(Target::parse("team/agent:now", Push::Never, None).unwrap().tag_for("x").unwrap().as_str(), "now");
    }

    #[test]
    fn a_push_needs_a_registry_and_a_tag_is_no_digest() {
        assert!(Target::parse("team/agent", Push::Background, None).is_err());
        let target = Target::parse("team/agent:a", Push::Wait, Some("http://r:1/")).unwrap();
        assert_eq!(target.remote(&"a".parse().unwrap()).unwrap(), "http://r:1/team/agent:a");
        let named = Target::parse("http://other/team/agent:a", Push::Wait, Some("http://r:1")).unwrap();
        assert_eq!(named.remote(&"a".parse().unwrap()).unwrap(), "http://other/team/agent:a");
        assert!(Target::parse("team/agent:a~1", Push::Never, None).is_err());
        let digest = pfr_schema::Digest::sha256(b"x");
        assert!(Target::parse(&format!("team/agent@{digest}"), Push::Never, None).is_err());
    }
}
