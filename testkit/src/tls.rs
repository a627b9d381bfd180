//! Certificates for tests: an authority, and the certificates that it signs. Each test makes new
//! ones, so the repository holds no certificate that could expire.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair, KeyUsagePurpose, date_time_ymd,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An authority that signs certificates.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, as PEM.
#[derive(Clone, Debug)]
pub struct Certified {
    /// The certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

impl Authority {
    /// A new authority. Each has a name of its own, as authorities do.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "no two are the same")]
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name = name(&format!("authority {:016x}", crate::run::random()));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// The certificate of the authority, as PEM. Clients must trust it.
    #[must_use]
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Writes the certificate of the authority into a file, as PEM. Returns the path.
    pub fn write(&self, path: PathBuf) -> PathBuf {
        std::fs::write(&path, self.pem()).unwrap();
        path
    }

    /// A certificate for these host names or IP addresses, valid for centuries.
    #[must_use]
    pub fn certificate(&self, names: &[&str]) -> Certified {
        self.sign(params(names))
    }

    /// A certificate that was valid in the year 2000 only.
    #[must_use]
    pub fn expired(&self, names: &[&str]) -> Certified {
        let mut params = params(names);
        (params.not_before, params.not_after) = (date_time_ymd(2000, 1, 1), date_time_ymd(2001, 1, 1));
        self.sign(params)
    }

    /// A certificate that will be valid from the year 4000 on.
    #[must_use]
    pub fn early(&self, names: &[&str]) -> Certified {
        let mut params = params(names);
        params.not_before = date_time_ymd(4000, 1, 1);
        self.sign(params)
    }

    /// A certificate that is valid from this time on, in seconds since 1970.
    #[must_use]
    pub fn valid_from(&self, names: &[&str], seconds: u64) -> Certified {
        let mut params = params(names);
        params.not_before = date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Certified {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Certified { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

impl Certified {
    /// Writes the certificate and the key into a directory as `tls.crt` and `tls.key`, each by a
    /// rename, as tools that renew certificates do. Returns the two paths.
    pub fn write(&self, dir: &Path) -> (PathBuf, PathBuf) {
        let [certificate, key] = [("tls.crt", &self.certificate), ("tls.key", &self.key)].map(|(name, text)| {
            let path = dir.join(name);
            let new = dir.join(format!("{name}.new"));
            std::fs::write(&new, text).unwrap();
            std::fs::rename(&new, &path).unwrap();
            path
        });
        (certificate, key)
    }
}

fn params(names: &[&str]) -> CertificateParams {
    let mut params = CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap();
    params.distinguished_name = name(names.first().unwrap_or(&"nobody"));
    params
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}
