//! Reads lists page by page to their end. A list comes from another program, and may have no end.

use crate::error::{Error, Result};

/// Names that a list may have, parents and tags of a snapshot counted too: a gigabyte or so, and
/// more than a registry is made for.
const NAMES: usize = 5_000_000;
/// Pages that a list may have: those of so many names, if each is half full. A registry fills every
/// page but the last.
const PAGES: u64 = 10_000;

/// One page: its entries, and the cursor of the next page if there is one.
pub type PageOf<T> = (Vec<T>, Option<String>);

/// An entry of a list.
pub trait Entry {
    /// The number of names in it.
    fn names(&self) -> usize {
        1
    }
}

impl Entry for pfr_schema::api::RepositoryInfo {}
impl Entry for pfr_schema::api::AgentInfo {}
impl Entry for pfr_schema::api::TagInfo {}
impl Entry for pfr_schema::api::SignatureManifest {}
impl Entry for pfr_schema::api::SnapshotSummary {
    fn names(&self) -> usize {
        1 + self.parents.len() + self.tags.len()
    }
}

/// Reads page after page from `place` until there is no other, or there are `most` entries.
///
/// # Errors
/// Those of `page`; [`Error::Protocol`] for a list that does not end.
pub async fn all_pages<T, E, F>(place: &str, most: usize, page: impl Fn(Option<String>) -> F) -> std::result::Result<Vec<T>, E>
where
    T: Entry,
    E: From<Error>,
    F: Future<Output = std::result::Result<PageOf<T>, E>>,
{
    let (mut all, mut walk, mut after) = (Vec::new(), Walk::default(), None);
    loop {
        let (entries, next) = page(after).await?;
        let names = entries.iter().map(Entry::names).sum();
        all.extend(entries);
        match next {
            Some(next) if all.len() < most => {
                walk.on(place, names, &next)?;
                after = Some(next);
            }
            _ => break,
        }
    }
    all.truncate(most);
    Ok(all)
}

/// The progress of reading a list.
#[derive(Debug, Default)]
struct Walk {
    names: usize,
    pages: u64,
    /// A cursor that was seen, renewed at page 1, 2, 4, 8 and so on. A cycle of any length comes
    /// back to it, so this one is enough.
    seen: Option<String>,
}

impl Walk {
    /// Goes on to the page at `next`, after one with so many names.
    fn on(&mut self, place: &str, names: usize, next: &str) -> Result<()> {
        self.names = self.names.saturating_add(names);
        self.pages += 1;
        // A page may be short, but it must lead somewhere else.
        let why = if names == 0 {
            "an empty page leads to another"
        } else if self.seen.as_deref() == Some(next) {
            "it leads back to where it has been"
        } else if self.names > NAMES || self.pages > PAGES {
            "that is more than any registry is made for"
        } else {
            if self.pages.is_power_of_two() {
                self.seen = Some(next.to_owned());
            }
            return Ok(());
        };
        let reason = format!("a list does not end: after {} names it goes on at {next:.100?}; {why}", self.names);
        Err(Error::Protocol { url: place.to_owned(), reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    struct One;
    impl Entry for One {}

    async fn walk(most: usize, page: impl Fn(usize) -> PageOf<One>) -> (usize, Result<usize>) {
        let asked = Cell::new(0);
        let pages = |_| {
            asked.set(asked.get() + 1);
            let page = page(asked.get() - 1);
            async move { Ok::<_, Error>(page) }
        };
        let all = all_pages("here", most, pages).await.map(|all| all.len());
        (asked.get(), all)
    }

    fn ones(n: usize) -> Vec<One> {
        (0..n).map(|_| One).collect()
    }

    #[tokio::test]
    async fn a_list_that_ends_is_read_to_its_end() {
        let (asked, all) = walk(usize::MAX, |n| (ones(3), (n < 9).then(|| n.to_string()))).await;
        assert_eq!((asked, all.unwrap()), (10, 30));
        let (asked, all) = walk(4, |n| (ones(3), Some(n.to_string()))).await;
        assert_eq!((asked, all.unwrap()), (2, 4));
    }

    #[tokio::test]
    async fn a_list_without_an_end_is_given_up() {
        let refused = |all: Result<usize>, why: &str| assert!(all.unwrap_err().to_string().contains(why), "{why}");
        let (asked, all) = walk(usize::MAX, |_| (ones(1), Some("a".into()))).await;
        assert_eq!(asked, 2);
        refused(all, "leads back");
        let (asked, all) = walk(usize::MAX, |n| (ones(1), Some((n % 7).to_string()))).await;
        assert!(asked <= 32, "{asked}");
        refused(all, "leads back");
        refused(walk(usize::MAX, |n| (Vec::new(), Some(n.to_string()))).await.1, "empty page");
        let (asked, all) = walk(usize::MAX, |n| (ones(1000), Some(n.to_string()))).await;
        assert_eq!(asked, NAMES / 1000 + 1);
        refused(all, "more than any registry");
        let (asked, all) = walk(usize::MAX, |n| (ones(1), Some(n.to_string()))).await;
        assert_eq!(asked as u64, PAGES + 1, "one name a page");
        refused(all, "more than any registry");
    }
}
