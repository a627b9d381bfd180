//! Which registries are trusted: those with a certificate from an authority that this machine
//! trusts, or from one of the user's own.

use super::Remote;
use crate::error::{Error, Result};
use crate::human;
use reqwest::Certificate;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{Error as PemError, PemObject as _};
use rustls::{CertificateError, InvalidMessage, RootCertStore};
use std::fmt;
use std::path::Path;

/// Bytes of a file with certificates at most: all public authorities together have 200,000.
const BYTES: u64 = 4 << 20;

/// The certificates of authorities in a file, none without a file.
///
/// # Errors
/// The file cannot be read, is too large, or has no certificate or a damaged one.
pub fn extra_roots(path: Option<&Path>) -> Result<Vec<Certificate>> {
    use std::io::Read as _;
    let Some(path) = path else { return Ok(Vec::new()) };
    let refused = |reason: String| Error::Refused { path: path.into(), reason };
    let mut pem = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(BYTES + 1).read_to_end(&mut pem));
    read.map_err(Error::io("read", path))?;
    if pem.len() as u64 > BYTES {
        return Err(refused(format!("it has more than {} MiB: expected certificates only", BYTES >> 20)));
    }
    let mut roots = Vec::new();
    for (at, found) in CertificateDer::pem_slice_iter(&pem).enumerate() {
        let damaged = |reason: String| refused(format!("its certificate {} is damaged: {reason}", at + 1));
        let certificate = found.map_err(|error| damaged(damage(&error)))?;
        // The client does the same with all of them, and does not say which one is damaged.
        let no_certificate = |_| damaged("its bytes are no X.509 certificate".to_owned());
        RootCertStore::empty().add(certificate.clone()).map_err(no_certificate)?;
        roots.push(Certificate::from_der(&certificate).map_err(|error| damaged(error.to_string()))?);
    }
    if roots.is_empty() {
        return Err(refused("it has no certificate: expected PEM, with lines -----BEGIN CERTIFICATE-----".to_owned()));
    }
    Ok(roots)
}

/// What is wrong with a section of PEM.
fn damage(error: &PemError) -> String {
    match error {
        PemError::MissingSectionEnd { .. } => "its last line, -----END CERTIFICATE-----, is missing".to_owned(),
        PemError::IllegalSectionStart { .. } => "its first line is not -----BEGIN CERTIFICATE-----".to_owned(),
        PemError::Base64Decode(_) => "it is not base64".to_owned(),
        other => other.to_string(),
    }
}

/// Why a certificate is not trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Distrust {
    /// Its authority is unknown here.
    Issuer,
    /// It is for other names: these.
    Name(Vec<String>),
    /// It has expired; when, in milliseconds since 1970, if that is known.
    Expired(Option<u64>),
    /// It is not valid yet.
    Early,
    /// Another reason, in the words of the TLS library.
    Other(String),
}

impl Distrust {
    fn of(error: &CertificateError) -> Self {
        match error {
            // A certificate of another authority of the same name has a wrong signature.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::Issuer,
            CertificateError::NotValidForName => Self::Name(Vec::new()),
            CertificateError::NotValidForNameContext { presented, .. } => Self::Name(presented.iter().map(|name| plain(name)).collect()),
            CertificateError::Expired => Self::Expired(None),
            CertificateError::ExpiredContext { not_after, .. } => Self::Expired(not_after.as_secs().checked_mul(1000)),
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Self::Early,
            other => Self::Other(other.to_string()),
        }
    }
}

/// `DnsName("registry.example.com")` without what is around the name.
fn plain(presented: &str) -> String {
    let name = presented.split_once('(').map_or(presented, |(_, rest)| rest.trim_end_matches(')'));
    name.trim_matches('"').to_owned()
}

impl fmt::Display for Distrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Issuer => f.write_str(
                "no authority that this machine trusts has signed it; if it has one of your own, name the file with that one's \
                 certificate in the setting tls-ca",
            ),
            Self::Name(names) if names.is_empty() => f.write_str("it is for another name; the registry needs one for this address"),
            Self::Name(names) => {
                write!(
                    f,
                    "it is for {}, and not for this address; use that name, or a certificate for this one",
                    pfr_service::few(names, 5)
                )
            }
            Self::Expired(at) => {
                let at = at.map(|at| format!(" at {}", human::rfc3339(at))).unwrap_or_default();
                write!(f, "it expired{at}; the registry needs a new one, or the clock of this machine is wrong")
            }
            Self::Early => f.write_str("it is not valid yet; the clock of this machine is wrong, or that of its authority"),
            Self::Other(reason) => f.write_str(reason),
        }
    }
}

impl Remote {
    /// What TLS has to say about a request that failed, if it does.
    pub(super) fn untrusted(&self, error: &reqwest::Error) -> Option<Error> {
        let url = self.url().to_owned();
        match tls_error(error)? {
            rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
                let plain = url.replacen("https://", "http://", 1);
                Some(Error::Url { url, reason: format!("it speaks http, not https; write {plain}") })
            }
            rustls::Error::InvalidCertificate(reason) => Some(Error::Certificate { url, reason: Distrust::of(reason) }),
            _ => None,
        }
    }
}

/// The error of TLS that an error holds.
fn tls_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a rustls::Error> {
    std::iter::successors(Some(error), |error| error.source()).find_map(|error| {
        // An I/O error does not name the error that it holds as its source.
        let held = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        error.downcast_ref::<rustls::Error>().or_else(|| held.and_then(|held| tls_error(held)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_a_certificate_are_shown_plainly() {
        for (presented, shown) in
            [("DnsName(\"a.example\")", "a.example"), ("IpAddress(127.0.0.1)", "127.0.0.1"), ("DirectoryName", "DirectoryName"), ("", "")]
        {
            assert_eq!(plain(presented), shown);
        }
    }

    #[test]
    fn a_file_without_a_certificate_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.pem");
        assert!(extra_roots(None).unwrap().is_empty());
        assert!(matches!(extra_roots(Some(&path)), Err(Error::Io { .. })));
        for text in ["", "nonsense"] {
            std::fs::write(&path, text).unwrap();
            let error = extra_roots(Some(&path)).unwrap_err().to_string();
            assert!(error.contains("ca.pem: it has no certificate"), "{text:?}: {error}");
        }
        std::fs::write(&path, pfr_testkit::tls::Authority::new().pem()).unwrap();
        assert_eq!(extra_roots(Some(&path)).unwrap().len(), 1);
    }

    #[test]
    fn a_damaged_certificate_is_named_by_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.pem");
        let good = pfr_testkit::tls::Authority::new().pem();
        let cut = good.split_once("-----END").unwrap().0;
        for (damaged, reason) in [
            ("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", "it is not base64"),
            // Base64, and no certificate.
            ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "its bytes are no X.509 certificate"),
            (cut, "its last line, -----END CERTIFICATE-----, is missing"),
        ] {
            std::fs::write(&path, format!("{good}{damaged}")).unwrap();
            let error = extra_roots(Some(&path)).unwrap_err().to_string();
            assert!(error.contains("ca.pem: its certificate 2 is damaged: ") && error.contains(reason), "{damaged:?}: {error}");
        }
    }

    #[test]
    fn a_file_that_is_too_large_is_refused_and_not_read_in_part() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.pem");
        let good = pfr_testkit::tls::Authority::new().pem();
        let comment = |bytes: u64| format!("{good}{}", "#".repeat(usize::try_from(bytes).unwrap() - good.len()));
        std::fs::write(&path, comment(BYTES)).unwrap();
        assert_eq!(extra_roots(Some(&path)).unwrap().len(), 1);
        std::fs::write(&path, comment(BYTES + 1)).unwrap();
        let error = extra_roots(Some(&path)).unwrap_err().to_string();
        assert!(error.contains("ca.pem: it has more than 4 MiB"), "{error}");
    }
}
