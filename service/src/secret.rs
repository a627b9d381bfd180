//! Tokens and passwords that cannot be printed.

use serde::Deserialize;
use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

/// A token. `Debug` does not show it, and there is no `Display`.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// A secret with this text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The secret in an environment variable. An empty variable counts as unset. Bytes that are not
    /// UTF-8 become characters that an HTTP header must not have, so the first use of the secret
    /// fails.
    #[must_use]
    pub fn from_env(name: &str) -> Option<Self> {
        let text = std::env::var_os(name)?;
        (!text.is_empty()).then(|| Self(text.to_string_lossy().into_owned()))
    }

    /// The text: for the code that sends it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether the text is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<secret>")
    }
}

/// Accepts any text, because an error message would contain the secret.
impl FromStr for Secret {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

/// A URL that may hold a password. `Display` and `Debug` leave out user, password, query and
/// fragment.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct SecretUrl(Secret);

impl SecretUrl {
    /// Whether the URL is empty, because none was configured.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The URL with its password: for the code that connects.
    #[must_use]
    pub fn expose(&self) -> &str {
        self.0.expose()
    }
}

/// Accepts any text, because an error message would contain the password.
impl FromStr for SecretUrl {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(Secret::new(text)))
    }
}

impl fmt::Display for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((scheme, rest)) = self.expose().split_once("://") else {
            return f.write_str(if self.is_empty() { "" } else { "…" });
        };
        let address = rest.rsplit_once('@').map_or(rest, |(_, address)| address);
        write!(f, "{scheme}://{}", address.split(['?', '#']).next().unwrap_or_default())
    }
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_printed() {
        assert!(!format!("{:?}", Some(Secret::new("hush"))).contains("hush"));
    }

    #[test]
    fn a_url_is_printed_without_user_password_and_options() {
        for (url, shown) in [
            ("postgres://user:hush@host:5/db?password=hush", "postgres://host:5/db"),
            ("postgres://host/db", "postgres://host/db"),
            ("postgres://u:h@us:hush@host/db#hush", "postgres://host/db"),
            ("hush", "…"),
            ("", ""),
        ] {
            let Ok(url) = url.parse::<SecretUrl>();
            assert_eq!(url.to_string(), shown);
            assert!(!format!("{url:?}").contains("hush"), "{url:?}");
        }
    }
}
