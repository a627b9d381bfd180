//! The snapshots that a warm job is asked for: references, and patterns of them.

use crate::Agent;
use crate::error::{Error, Result};
use pfr_client::Site;
use pfr_schema::{Pattern, Reference, RepositoryName, Selector, Tag};

/// Snapshots of one job.
const MAX: usize = 1000;

/// A reference of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    text: String,
    /// As the text names it.
    pub registry: Option<String>,
    what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum What {
    One(RepositoryName, Selector),
    /// Tags of repositories.
    Tags(Pattern, Pattern),
    /// The snapshots that were pushed last.
    Newest(Pattern, usize),
}

/// A snapshot to be looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// The base URL.
    pub registry: String,
    pub repository: RepositoryName,
    pub selector: Selector,
}

impl Found {
    /// Its name for people.
    pub fn reference(&self) -> String {
        let (registry, repository, selector) = (Some(self.registry.clone()), self.repository.clone(), Some(self.selector.clone()));
        Reference { registry, repository, selector }.to_string()
    }
}

impl Wanted {
    /// Reads a reference in which `*` stands for any characters of repository and tag.
    pub fn parse(text: &str, newest: Option<u32>) -> Result<Self> {
        // A star stands where a letter may stand, so a letter shows where the parts begin.
        let plain: Reference = text.replace('*', "x").parse()?;
        let is_pattern = text.contains('*');
        let tag = match &plain.selector {
            None => None,
            Some(Selector::Tag { tag, back: 0 }) => Some(tag),
            Some(_) if is_pattern => {
                return Err(Error::Invalid(format!("{text:?}: a pattern ends in a tag, or in the name of a repository")));
            }
            Some(_) => None,
        };
        if newest.is_some() && plain.selector.is_some() {
            return Err(Error::Invalid(format!("{text:?}: the newest snapshots are those of a repository, without a tag")));
        }
        let registry = plain.registry.clone();
        let wanted = |what| Ok(Self { text: text.to_owned(), registry, what });
        if !is_pattern && newest.is_none() {
            return wanted(What::One(plain.repository.clone(), plain.selector_or_latest()));
        }
        let tag_length = tag.map_or(0, |tag| 1 + tag.as_str().len());
        let end = text.len().saturating_sub(tag_length);
        let start = end.saturating_sub(plain.repository.as_str().len());
        let (Some(repository), Some(suffix)) = (text.get(start..end), text.get(end..)) else {
            return Err(Error::Internal(format!("{text:?} is cut within a character")));
        };
        if text[..start].contains('*') {
            return Err(Error::Invalid(format!("{text:?}: the address of a registry has no *")));
        }
        let repository: Pattern = repository.parse()?;
        match newest {
            Some(newest) => wanted(What::Newest(repository, newest as usize)),
            None => wanted(What::Tags(repository, if tag.is_some() { suffix[1..].parse()? } else { Tag::LATEST.parse()? })),
        }
    }

    /// The text of the request.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Finds the snapshots, at most so many that a job has room for.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are more; [`Error::Client`].
    pub async fn find(&self, agent: &Agent, room: usize) -> Result<Vec<Found>> {
        let registry = agent.registry_of(self.registry.as_deref())?;
        let found = |repository: &RepositoryName, selector| Found { registry: registry.clone(), repository: repository.clone(), selector };
        let (pattern, all) = match &self.what {
            What::One(repository, selector) => return Ok(vec![found(repository, selector.clone())]),
            What::Tags(pattern, _) | What::Newest(pattern, _) => (pattern, Site::Registry(agent.config().remote(&registry)?)),
        };
        let repositories: Vec<RepositoryName> = match pattern.as_str().contains('*') {
            true => all.repositories().await?.into_iter().map(|info| info.name).filter(|name| pattern.matches(name.as_str())).collect(),
            false => vec![pattern.as_str().parse()?],
        };
        let mut here = Vec::new();
        for repository in &repositories {
            let selectors: Vec<Selector> = match &self.what {
                What::Newest(_, newest) => {
                    let newest = all.newest_snapshots(repository, *newest).await?;
                    newest.into_iter().map(|summary| Selector::Digest(summary.digest)).collect()
                }
                What::Tags(_, tags) => {
                    let tags = all.tags(repository).await?.into_iter().map(|info| info.name).filter(|tag| tags.matches(tag.as_str()));
                    tags.map(|tag| Selector::Tag { tag, back: 0 }).collect()
                }
                What::One(..) => Vec::new(),
            };
            here.extend(selectors.into_iter().map(|selector| found(repository, selector)));
            if here.len() > room {
                let what = format!("{:?} and what stands before it match more than {MAX} snapshots; ask for fewer at a time", self.text);
                return Err(Error::Invalid(what));
            }
        }
        Ok(here)
    }
}

/// Room for further snapshots in a job that has so many.
pub(super) fn room(found: usize) -> usize {
    MAX.saturating_sub(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pattern(text: &str) -> Pattern {
        text.parse().unwrap()
    }

    #[test]
    fn a_star_may_stand_in_repository_and_tag() {
        let what = |text: &str, newest| Wanted::parse(text, newest).map(|wanted| (wanted.registry, wanted.what)).unwrap();
        let host = || Some("http://127.0.0.1:5077".to_owned());
        assert_eq!(what("team/*:latest", None), (None, What::Tags(pattern("team/*"), pattern("latest"))));
        assert_eq!(what("http://127.0.0.1:5077/*:step-*", None), (host(), What::Tags(pattern("*"), pattern("step-*"))));
        assert_eq!(what("127.0.0.1:5077/team/a*", None), (host(), What::Tags(pattern("team/a*"), pattern("latest"))));
        assert_eq!(what("team/agent", Some(3)), (None, What::Newest(pattern("team/agent"), 3)));
        assert_eq!(what("team/*", Some(3)), (None, What::Newest(pattern("team/*"), 3)));
        let one = |selector: &str| What::One("team/agent".parse().unwrap(), selector.parse().unwrap());
        assert_eq!(what("team/agent", None), (None, one("latest")));
        assert_eq!(what("team/agent:x~2", None), (None, one("x~2")));
        for (wrong, newest) in [
            ("", None),
            ("Team/*", None),
            ("team/*~2", None),
            ("team/*@abcdefabcdef", None),
            ("team/agent:x", Some(1)),
            ("http://*/a:b", None),
        ] {
            assert!(Wanted::parse(wrong, newest).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(chars in proptest::collection::vec(any::<char>(), 0..40), newest in any::<Option<u32>>()) {
            let text: String = chars.into_iter().collect();
            drop(Wanted::parse(&text, newest));
        }

        #[test]
        fn a_pattern_of_repositories_is_the_text_before_the_tag(
            parts in proptest::collection::vec(proptest::sample::select(vec!["a", "*", "b-c", "*-x"]), 1..4),
            tag in proptest::option::of(proptest::sample::select(vec!["*", "v*", "latest"])),
        ) {
            let repository = format!("team/{}*", parts.join("/"));
            let text = tag.map_or_else(|| repository.clone(), |tag| format!("{repository}:{tag}"));
            let wanted = Wanted::parse(&text, None).unwrap();
            prop_assert_eq!(wanted.what, What::Tags(pattern(&repository), pattern(tag.unwrap_or("latest"))));
        }
    }
}
