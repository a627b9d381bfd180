//! The file of issuers: whose tokens are access tokens, and what these permit.
//!
//! ```toml
//! [[issuers]]
//! issuer = "https://kubernetes.default.svc.cluster.local"
//! audiences = ["pf-registry"]
//! jwks-file = "/etc/pf-registry/cluster.jwks"
//!
//! [[issuers.rules]]
//! subject = "system:serviceaccount:agents:*"
//! scopes = ["agents/*:pull,push"]
//! ```

use pfr_schema::pattern::matches;
use pfr_schema::{AccessScope, DomainName};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Issuers at most.
const ISSUERS: usize = 32;
/// Rules of an issuer at most.
const RULES: usize = 256;
/// Audiences of an issuer, and claims of a rule, at most.
const NAMES: usize = 16;
/// Bytes of a pattern for a claim at most.
const PATTERN: usize = 1024;
/// The longest difference of clocks that is forgiven, in seconds.
const SKEW: u64 = 600;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    issuers: Vec<IssuerSettings>,
}

/// An issuer, and what its tokens permit.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct IssuerSettings {
    /// Its name in tokens (`iss`), to the letter.
    pub issuer: String,
    /// The registry's names (`aud`), of which a token must have one.
    pub audiences: Vec<String>,
    /// Algorithms of signatures that are accepted. Default: all three.
    #[serde(default = "all_algorithms")]
    pub algorithms: Vec<SignatureAlgorithm>,
    /// File with its public keys; it or `jwks_url`.
    pub jwks_file: Option<PathBuf>,
    /// Where it publishes its keys, over https.
    pub jwks_url: Option<String>,
    /// Seconds that its clock and ours may differ. Default 60, at most 600.
    #[serde(default = "one_minute")]
    pub clock_skew_seconds: u64,
    /// What its tokens permit: the first rule that fits decides.
    pub rules: Vec<Rule>,
}

/// How a token may be signed. Not among these are `none`, and algorithms with a shared secret: a
/// public key would be one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum SignatureAlgorithm {
    /// RSA (PKCS 1, version 1.5) with SHA-256, and keys of 2,048 bits or more.
    #[serde(rename = "RS256")]
    Rs256,
    /// ECDSA on the curve P-256 with SHA-256.
    #[serde(rename = "ES256")]
    Es256,
    /// Ed25519.
    #[serde(rename = "EdDSA")]
    EdDsa,
}

/// What some tokens of an issuer permit.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rule {
    /// Pattern for the subject (`sub`): `*` stands for any characters.
    pub subject: String,
    /// Patterns for other claims, all of which must fit. A claim that is a list fits if one of its
    /// texts does.
    #[serde(default)]
    pub claims: BTreeMap<String, String>,
    /// What is permitted.
    pub scopes: Vec<AccessScope>,
    /// The only domain in which it is; none for every domain.
    pub domain: Option<DomainName>,
}

impl Rule {
    /// Whether the claims of a token fit.
    #[must_use]
    pub fn fits(&self, subject: &str, claims: &Map<String, Value>) -> bool {
        let fits = |(name, pattern): (&String, &String)| match claims.get(name) {
            Some(Value::String(text)) => matches(pattern, text),
            Some(Value::Array(all)) => all.iter().filter_map(Value::as_str).any(|text| matches(pattern, text)),
            _ => false,
        };
        matches(&self.subject, subject) && self.claims.iter().all(fits)
    }
}

fn all_algorithms() -> Vec<SignatureAlgorithm> {
    vec![SignatureAlgorithm::Rs256, SignatureAlgorithm::Es256, SignatureAlgorithm::EdDsa]
}

fn one_minute() -> u64 {
    60
}

/// Reads the text of the file.
///
/// # Errors
/// What is wrong, and where.
pub fn parse(text: &str) -> Result<Vec<IssuerSettings>, String> {
    let File { issuers } = pfr_service::settings::read(text)?;
    bounded("issuers", issuers.len(), ISSUERS)?;
    for (at, issuer) in issuers.iter().enumerate() {
        let name = &issuer.issuer;
        issuer.check().map_err(|reason| format!("issuer {name:?}: {reason}"))?;
        if issuers[..at].iter().any(|other| other.issuer == *name) {
            return Err(format!("issuer {name:?} is there twice"));
        }
    }
    Ok(issuers)
}

impl IssuerSettings {
    fn check(&self) -> Result<(), String> {
        if self.issuer.is_empty() {
            return Err("expected the name that its tokens have as \"iss\"".into());
        }
        bounded("audiences", self.audiences.len(), NAMES)?;
        if self.audiences.iter().any(String::is_empty) {
            return Err("an audience is empty".into());
        }
        bounded("algorithms", self.algorithms.len(), all_algorithms().len())?;
        match (&self.jwks_file, &self.jwks_url) {
            (Some(_), None) => {}
            // Keys that anyone on the way could replace prove nothing.
            (None, Some(url)) if url.starts_with("https://") => {}
            (None, Some(_)) => return Err("jwks-url: expected https://…".into()),
            _ => return Err("give jwks-file or jwks-url".into()),
        }
        if self.clock_skew_seconds > SKEW {
            return Err(format!("clock-skew-seconds: at most {SKEW}"));
        }
        bounded("rules", self.rules.len(), RULES)?;
        self.rules.iter().try_for_each(Rule::check)
    }
}

impl Rule {
    fn check(&self) -> Result<(), String> {
        bounded("scopes", self.scopes.len(), AccessScope::MOST)?;
        if self.claims.len() > NAMES {
            return Err(format!("claims: at most {NAMES} of a rule"));
        }
        let patterns = self.claims.values().chain([&self.subject]);
        if patterns.into_iter().any(|pattern| !(1..=PATTERN).contains(&pattern.len())) {
            return Err(format!("a pattern for a claim has 1 to {PATTERN} bytes; * stands for anything"));
        }
        Ok(())
    }
}

fn bounded(what: &str, found: usize, most: usize) -> Result<(), String> {
    if (1..=most).contains(&found) { Ok(()) } else { Err(format!("{what}: expected 1 to {most}, found {found}")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const FILE: &str = r#"
        [[issuers]]
        issuer = "https://issuer"
        audiences = ["pf"]
        jwks-url = "https://issuer/keys"
        [[issuers.rules]]
        subject = "system:serviceaccount:agents:*"
        claims = { groups = "ops*", tenant = "acme" }
        scopes = ["agents/*:push,pull"]
        domain = "acme"
    "#;

    #[test]
    fn a_file_has_defaults() {
        let issuers = parse(FILE).unwrap();
        let [issuer] = &issuers[..] else { panic!("{issuers:?}") };
        assert_eq!(
            (issuer.algorithms.len(), issuer.clock_skew_seconds, issuer.rules[0].scopes[0].to_string().as_str()),
            (3, 60, "agents/*:pull,push")
        );
    }

    #[test]
    fn what_would_open_too_much_is_refused() {
        for (from, to, says) in [
            ("audiences = [\"pf\"]", "audiences = []", "audiences: expected 1 to 16, found 0"),
            ("audiences = [\"pf\"]", "", "audiences"),
            ("audiences = [\"pf\"]", "audiences = [\"\"]", "an audience is empty"),
            ("\"https://issuer\"", "\"\"", "\"iss\""),
            ("jwks-url = \"https://", "jwks-url = \"http://", "expected https://"),
            ("jwks-url", "jwks-file = \"x\"\njwks-url", "give jwks-file or jwks-url"),
            ("jwks-url = \"https://issuer/keys\"", "", "give jwks-file or jwks-url"),
            ("jwks-url", "algorithms = [\"HS256\"]\njwks-url", "HS256"),
            ("jwks-url", "algorithms = [\"none\"]\njwks-url", "none"),
            ("jwks-url", "algorithms = []\njwks-url", "algorithms"),
            ("jwks-url", "clock-skew-seconds = 601\njwks-url", "at most 600"),
            ("subject = \"system:serviceaccount:agents:*\"", "", "subject"),
            ("system:serviceaccount:agents:*", "", "1 to 1024 bytes"),
            ("[\"agents/*:push,pull\"]", "[]", "scopes"),
            ("agents/*:push,pull", "agents/*:write", "pull, push, delete and admin"),
            ("domain", "domian", "domian"),
        ] {
            let error = parse(&FILE.replacen(from, to, 1)).unwrap_err();
            assert!(error.contains(says), "{from} → {to}: {error}");
        }
        assert!(parse(&format!("{FILE}{FILE}")).unwrap_err().contains("twice"));
        assert!(parse("").unwrap_err().contains("issuers"));
    }

    #[test]
    fn a_rule_fits_if_all_its_patterns_do() {
        let rule = parse(FILE).unwrap().remove(0).rules.remove(0);
        let fits = |subject: &str, claims: Value| rule.fits(subject, claims.as_object().unwrap());
        let subject = "system:serviceaccount:agents:runner";
        assert!(fits(subject, json!({"groups": ["dev", "ops-eu"], "tenant": "acme"})));
        assert!(fits(subject, json!({"groups": "ops", "tenant": "acme"})));
        assert!(!fits("system:serviceaccount:other:runner", json!({"groups": "ops", "tenant": "acme"})));
        assert!(!fits("x system:serviceaccount:agents:runner", json!({"groups": "ops", "tenant": "acme"})));
        for claims in [
            json!({"groups": ["dev"], "tenant": "acme"}),
            json!({"groups": "ops", "tenant": "acme2"}),
            json!({"groups": "ops"}),
            json!({"groups": [["ops"], 7, null], "tenant": "acme"}),
            json!({"groups": {"ops": "ops"}, "tenant": "acme"}),
        ] {
            assert!(!fits(subject, claims.clone()), "{claims}");
        }
    }
}
