//! Addresses of pages.

use axum::http::{HeaderMap, header};
use pfr_schema::{Digest, DomainName, RepositoryName};
use std::fmt::Display;

/// Makes the addresses of the pages of one domain.
#[derive(Clone, Debug)]
pub(crate) struct Links {
    /// The base path of the domain, empty for the default one.
    base: String,
}

impl Links {
    pub(super) fn of(domain: &DomainName) -> Self {
        let base = if domain.is_default() { String::new() } else { format!("/{}/{domain}", DomainName::FOLDER) };
        Self { base }
    }

    /// The base path of the domain, empty for the default one.
    pub(super) fn base(&self) -> &str {
        &self.base
    }

    pub(super) fn overview(&self) -> String {
        format!("{}/", self.base)
    }

    /// `-` is no repository, so these pages are in the way of none.
    fn fixed(&self, page: &str) -> String {
        format!("{}/ui/-/{page}", self.base)
    }

    pub(super) fn repositories(&self) -> String {
        self.fixed("repositories")
    }

    pub(super) fn storage(&self) -> String {
        self.fixed("storage")
    }

    pub(super) fn engines(&self) -> String {
        self.fixed("engines")
    }

    pub(super) fn tasks(&self) -> String {
        self.fixed("tasks")
    }

    pub(super) fn repository(&self, repository: &RepositoryName) -> String {
        format!("{}/ui/{}", self.base, segment(repository))
    }

    pub(super) fn snapshot(&self, repository: &RepositoryName, snapshot: &Digest) -> String {
        format!("{}/{snapshot}", self.repository(repository))
    }

    pub(super) fn verify(&self, repository: &RepositoryName, snapshot: &Digest) -> String {
        format!("{}/verify", self.snapshot(repository, snapshot))
    }

    /// The same snapshot in the API.
    pub(super) fn api_snapshot(&self, repository: &RepositoryName, snapshot: &Digest) -> String {
        format!("{}/v1/repositories/{}/snapshots/{snapshot}", self.base, segment(repository))
    }
}

/// The address of the registry as a browser named it, for commands to copy; none if that is none
/// which a shell takes as one word.
pub(super) fn origin(headers: &HeaderMap, has_tls: bool) -> Option<String> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let scheme = if has_tls || text("x-forwarded-proto") == Some("https") { "https" } else { "http" };
    let host = text(header::HOST.as_str()).filter(|host| !host.is_empty())?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    host.bytes().all(is_plain).then(|| format!("{scheme}://{host}"))
}

/// The next page of a list, from its first page and its cursor.
pub(super) fn after(list: &str, cursor: &str) -> String {
    format!("{list}?after={}", segment(cursor))
}

/// Text as one segment of a path, or as a value of a query.
fn segment(text: impl Display) -> String {
    let mut segment = String::new();
    for byte in text.to_string().bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => segment.push(char::from(byte)),
            _ => segment.push_str(&format!("%{byte:02X}")),
        }
    }
    segment
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_one_segment_below_its_domain() {
        let repository: RepositoryName = "team/agent".parse().unwrap();
        let acme = Links::of(&"acme".parse().unwrap());
        assert_eq!(acme.repository(&repository), "/domains/acme/ui/team%2Fagent");
        let links = Links::of(&DomainName::default());
        assert_eq!((links.overview().as_str(), links.tasks().as_str()), ("/", "/ui/-/tasks"));
        assert_eq!(after(&links.repositories(), "a/b&c d\"é"), "/ui/-/repositories?after=a%2Fb%26c%20d%22%C3%A9");
    }

    #[test]
    fn commands_name_the_registry_as_the_browser_did() {
        let found = |given: &[(&'static str, &str)], has_tls| {
            let mut headers = HeaderMap::new();
            for (name, value) in given {
                headers.append(*name, value.parse().unwrap());
            }
            origin(&headers, has_tls)
        };
        assert_eq!(found(&[("host", "pf.example:5077")], false).as_deref(), Some("http://pf.example:5077"));
        assert_eq!(found(&[("host", "pf.example:5077")], true).as_deref(), Some("https://pf.example:5077"));
        assert_eq!(found(&[("host", "[::1]"), ("x-forwarded-proto", "https")], false).as_deref(), Some("https://[::1]"));
        for host in ["", "a;reboot", "a b", "$(x)", "a'b"] {
            assert_eq!(found(&[("host", host)], false), None, "{host}");
        }
        assert_eq!(found(&[], false), None);
    }
}
