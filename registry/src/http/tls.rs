//! TLS before HTTP: the certificate and its key, which may be renewed while the registry serves.
//!
//! A connection keeps the certificate that it began with. A pair that cannot be used leaves the one
//! before in force: a registry with an old certificate is better than one with none.

use crate::config::Config;
use crate::metrics as names;
use crate::reload::{Reload, Watched};
use parking_lot::{Mutex, RwLock};
use pfr_client::human;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::pki_types::pem::{Error as PemError, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, InconsistentKeys, RootCertStore, ServerConfig};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio_rustls::TlsAcceptor;

/// Bytes of a file at most. Chains have a few thousand.
const FILE_BYTES: u64 = 1 << 20;
/// What follows the handshake. The registry speaks no other version.
const PROTOCOL: &[u8] = b"http/1.1";

/// Why a certificate or a key cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is too long for a certificate or a key.
    #[error("{} has more than {FILE_BYTES} bytes, too many for a certificate or a key", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// A file does not have what belongs there.
    #[error("{} has no {what}: expected PEM, with lines -----BEGIN {marker}-----{}", path.display(), advice(marker))]
    Missing {
        /// The file.
        path: PathBuf,
        /// What it should have.
        what: &'static str,
        /// How that begins.
        marker: &'static str,
    },
    /// The key is another certificate's.
    #[error("the key in {} is not that of the certificate in {}: both must come from the same request", key.display(), certificate.display())]
    Mismatch {
        /// The file with the certificate.
        certificate: PathBuf,
        /// The file with the key.
        key: PathBuf,
    },
    /// It has expired.
    #[error("the certificate in {} {times}", certificate.display())]
    Untimely {
        /// The file with the certificate.
        certificate: PathBuf,
        /// `expired on …`.
        times: String,
    },
    /// It is not valid yet.
    #[error("the certificate in {} is not valid before {begins}", certificate.display())]
    Early {
        /// The file with the certificate.
        certificate: PathBuf,
        /// When it will be.
        begins: String,
    },
    /// rustls does not accept them.
    #[error("the certificate in {} and the key in {} cannot be used: {source}", certificate.display(), key.display())]
    Refused {
        /// The file with the certificate.
        certificate: PathBuf,
        /// The file with the key.
        key: PathBuf,
        /// Its reason.
        source: rustls::Error,
    },
}

fn advice(marker: &str) -> &'static str {
    if marker.ends_with("KEY") { "; a key that is encrypted cannot be used" } else { "" }
}

/// The certificate of the registry.
pub(crate) struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    acceptor: RwLock<TlsAcceptor>,
    watched: Mutex<Watched>,
    /// The files have a pair that will be valid later: it is looked at again until then.
    has_early: AtomicBool,
}

impl Tls {
    /// The certificate that the settings name; none if they name none.
    ///
    /// # Errors
    /// [`TlsError`] says which file, and what to do.
    pub(crate) fn of(config: &Config) -> Result<Option<Self>, TlsError> {
        if !config.has_tls() {
            return Ok(None);
        }
        let (certificate, key) = (config.tls_cert.clone(), config.tls_key.clone());
        let watched = Mutex::new(Watched::new(vec![certificate.clone(), key.clone()]));
        let pair = read(&certificate, &key)?;
        // There is no better one, and clients that check nothing, as some probes, get on with it.
        if let Err(error) = pair.is_timely(&certificate) {
            tracing::error!(%error, "clients will refuse the certificate: renew it");
        }
        let acceptor = RwLock::new(pair.in_force(&certificate));
        Ok(Some(Self { certificate, key, acceptor, watched, has_early: AtomicBool::default() }))
    }

    /// For a new connection.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        self.acceptor.read().clone()
    }
}

impl Reload for Tls {
    fn reload(&self, at_once: bool) {
        let has_changed = self.watched.lock().is_due(at_once);
        if !has_changed && !self.has_early.load(Ordering::Relaxed) {
            return;
        }
        let pair = read(&self.certificate, &self.key).and_then(|pair| pair.is_timely(&self.certificate).map(|()| pair));
        // The clock of its authority may be ahead by a few seconds.
        self.has_early.store(matches!(pair, Err(TlsError::Early { .. })), Ordering::Relaxed);
        match pair {
            Ok(pair) => *self.acceptor.write() = pair.in_force(&self.certificate),
            // It was said when the files changed, or will be when they have settled.
            Err(_) if !has_changed => {}
            Err(error) => {
                metrics::counter!(names::RELOAD_ERRORS, "what" => "certificate").increment(1);
                tracing::error!(%error, "the new certificate cannot be used; the one before stays in force");
            }
        }
    }
}

/// A certificate and its key, as they were read.
struct Pair {
    acceptor: TlsAcceptor,
    /// The registry's own certificate.
    own: CertificateDer<'static>,
    /// How many there are, with those above it.
    certificates: usize,
}

impl Pair {
    /// Whether clients would find it valid at this time.
    fn is_timely(&self, file: &Path) -> Result<(), TlsError> {
        let now = UnixTime::now();
        let times = match times(&self.own, now) {
            None => return Ok(()),
            Some(CertificateError::NotValidYetContext { not_before, .. }) => {
                return Err(TlsError::Early { certificate: file.into(), begins: date(not_before.as_secs()) });
            }
            Some(CertificateError::ExpiredContext { not_after, .. }) => format!("expired on {}", date(not_after.as_secs())),
            Some(other) => other.to_string(),
        };
        Err(TlsError::Untimely { certificate: file.into(), times })
    }

    /// What handshakes use from now on.
    fn in_force(self, file: &Path) -> TlsAcceptor {
        let expires = not_after(&self.own);
        if let Some(seconds) = expires {
            metrics::gauge!(names::TLS_EXPIRY).set(seconds as f64);
        }
        tracing::info!(file = %file.display(), certificates = self.certificates, expires = expires.map(date), "TLS certificate read");
        self.acceptor
    }
}

/// Reads a certificate and its key.
fn read(certificate: &Path, key: &Path) -> Result<Pair, TlsError> {
    let absent = |path: &Path, what, marker| TlsError::Missing { path: path.into(), what, marker };
    let pem = contents(certificate)?;
    let chain: Result<Vec<CertificateDer<'static>>, PemError> = CertificateDer::pem_slice_iter(&pem).collect();
    let chain = chain.unwrap_or_default();
    let private = PrivateKeyDer::from_pem_slice(&contents(key)?).map_err(|_| absent(key, "private key", "PRIVATE KEY"))?;
    let own = chain.first().cloned().ok_or_else(|| absent(certificate, "certificate", "CERTIFICATE"))?;
    let certificates = chain.len();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private));
    let mut config = config.map_err(|source| match source {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            TlsError::Mismatch { certificate: certificate.into(), key: key.into() }
        }
        source => TlsError::Refused { certificate: certificate.into(), key: key.into(), source },
    })?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok(Pair { acceptor: TlsAcceptor::from(Arc::new(config)), own, certificates })
}

fn date(seconds: u64) -> String {
    human::rfc3339(seconds.saturating_mul(1000))
}

fn contents(path: &Path) -> Result<Vec<u8>, TlsError> {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(FILE_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|source| TlsError::Read { path: path.into(), source })?;
    // A chain that is cut may still be one, of fewer certificates.
    if bytes.len() as u64 > FILE_BYTES {
        return Err(TlsError::TooLong { path: path.into() });
    }
    Ok(bytes)
}

/// When a certificate stops to be valid, in seconds since 1970.
fn not_after(certificate: &CertificateDer<'_>) -> Option<u64> {
    // At the end of all times every certificate has expired.
    match times(certificate, UnixTime::since_unix_epoch(Duration::from_secs(u64::MAX))) {
        Some(CertificateError::ExpiredContext { not_after, .. }) => Some(not_after.as_secs()),
        _ => None,
    }
}

/// Why a certificate is not valid at a time; none if it is.
///
/// rustls parses certificates, but does not show their times. It names them when it refuses one,
/// and checks them before the signature.
fn times(certificate: &CertificateDer<'_>, at: UnixTime) -> Option<CertificateError> {
    use CertificateError::{ExpiredContext, NotValidYetContext};
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    match verify_server_cert_signed_by_trust_anchor(&parsed, &RootCertStore::empty(), &[], at, &[]) {
        Err(rustls::Error::InvalidCertificate(error @ (ExpiredContext { .. } | NotValidYetContext { .. }))) => Some(error),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_testkit::tls::Authority;

    fn config(certificate: &Path, key: &Path) -> Config {
        Config { tls_cert: certificate.into(), tls_key: key.into(), ..Config::default() }
    }

    #[test]
    fn the_end_of_a_certificate_is_known() {
        let authority = Authority::new();
        let expired = authority.expired(&["localhost"]).certificate;
        let expired = CertificateDer::from_pem_slice(expired.as_bytes()).unwrap();
        assert_eq!(not_after(&expired), Some(978_307_200), "2001-01-01");
        let valid = CertificateDer::from_pem_slice(authority.certificate(&["localhost"]).certificate.as_bytes()).unwrap();
        assert!(not_after(&valid).is_some_and(|end| end > 60_000_000_000), "{:?}", not_after(&valid));
        assert_eq!(not_after(&CertificateDer::from(vec![0; 100])), None);
    }

    #[test]
    fn a_pair_that_cannot_be_used_is_refused_by_the_name_of_its_file() {
        let (authority, dir) = (Authority::new(), tempfile::tempdir().unwrap());
        let (certificate, key) = authority.certificate(&["localhost"]).write(dir.path());
        assert!(Tls::of(&config(&certificate, &key)).unwrap().is_some());
        assert!(Tls::of(&Config::default()).unwrap().is_none());
        let other = dir.path().join("other");
        let refusal = |certificate: &Path, key: &Path| Tls::of(&config(certificate, key)).err().unwrap().to_string();
        std::fs::write(&other, authority.certificate(&["localhost"]).key).unwrap();
        assert!(refusal(&certificate, &other).contains("is not that of the certificate"), "{}", refusal(&certificate, &other));
        for (text, says) in [
            ("", "no certificate"),
            ("-----BEGIN CERTIFICATE-----\n????\n-----END CERTIFICATE-----\n", "no certificate"),
            ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be used"),
        ] {
            std::fs::write(&other, text).unwrap();
            assert!(refusal(&other, &key).contains(says), "{}", refusal(&other, &key));
        }
        // The certificate is at the beginning of the file.
        let mut long = std::fs::read(&certificate).unwrap();
        long.resize(FILE_BYTES as usize, b'\n');
        std::fs::write(&other, &long).unwrap();
        assert!(Tls::of(&config(&other, &key)).unwrap().is_some());
        long.push(b'\n');
        std::fs::write(&other, &long).unwrap();
        assert!(refusal(&other, &key).contains("other has more than 1048576 bytes"), "{}", refusal(&other, &key));
        let absent = refusal(&certificate, &dir.path().join("absent"));
        assert!(absent.starts_with("cannot read ") && absent.contains("absent: No such file"), "{absent}");
        std::fs::write(&other, "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n").unwrap();
        assert!(refusal(&certificate, &other).contains("encrypted"), "{}", refusal(&certificate, &other));
    }

    #[test]
    fn a_broken_new_pair_leaves_the_old_one_in_force_until_it_is_mended() {
        let (authority, dir) = (Authority::new(), tempfile::tempdir().unwrap());
        let first = authority.certificate(&["localhost"]);
        let (certificate, key) = first.write(dir.path());
        let tls = Tls::of(&config(&certificate, &key)).unwrap().unwrap();
        let in_force = || Arc::as_ptr(tls.acceptor().config());
        let old = in_force();
        let looks = || (0..3).for_each(|_| tls.reload(false));
        looks();
        assert_eq!(in_force(), old, "nothing has changed");
        // The certificate without its key, as in the middle of a renewal; and what is none.
        std::fs::write(&certificate, authority.certificate(&["localhost"]).certificate).unwrap();
        looks();
        tls.reload(true);
        assert_eq!(in_force(), old);
        std::fs::remove_file(&certificate).unwrap();
        looks();
        assert_eq!(in_force(), old);
        // Renewals that every client would refuse.
        for untimely in [authority.expired(&["localhost"]), authority.early(&["localhost"])] {
            untimely.write(dir.path());
            looks();
            assert_eq!(in_force(), old);
        }
        authority.certificate(&["localhost"]).write(dir.path());
        looks();
        assert_ne!(in_force(), old);
    }

    #[test]
    fn a_renewal_that_is_early_by_a_moment_is_taken_when_it_is_valid() {
        let (authority, dir) = (Authority::new(), tempfile::tempdir().unwrap());
        let (certificate, key) = authority.certificate(&["localhost"]).write(dir.path());
        let tls = Tls::of(&config(&certificate, &key)).unwrap().unwrap();
        let in_force = || Arc::as_ptr(tls.acceptor().config());
        let old = in_force();
        authority.valid_from(&["localhost"], UnixTime::now().as_secs() + 3).write(dir.path());
        (0..3).for_each(|_| tls.reload(false));
        assert_eq!(in_force(), old, "clients would refuse it");
        let begun = std::time::Instant::now();
        while in_force() == old {
            assert!(begun.elapsed() < Duration::from_secs(60), "it is never taken");
            std::thread::sleep(Duration::from_millis(50));
            tls.reload(false);
        }
        let new = in_force();
        tls.reload(false);
        assert_eq!(in_force(), new, "and not again at each look");
    }

    #[test]
    fn a_certificate_out_of_its_time_is_served_only_for_want_of_another() {
        let (authority, dir) = (Authority::new(), tempfile::tempdir().unwrap());
        for (certified, says) in
            [(authority.expired(&["localhost"]), "expired on 2001-01-01"), (authority.early(&["localhost"]), "is not valid before ")]
        {
            let (certificate, key) = certified.write(dir.path());
            assert!(Tls::of(&config(&certificate, &key)).unwrap().is_some());
            let error = read(&certificate, &key).unwrap_or_else(|e| panic!("{e}")).is_timely(&certificate).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
