//! Where the credentials of a bucket come from, and an early error if there are none.
//!
//! Without any in the environment the object store asks the metadata service of a cloud host.
//! Elsewhere nothing answers at its address, and the first request would fail after many seconds
//! with words about that address.

use crate::error::{Error, Result};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::signer::Url;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Where a metadata service is if `AWS_METADATA_ENDPOINT` does not say.
const METADATA_ENDPOINT: &str = "http://169.254.169.254";
/// How long one may take to answer. It is on the same host, or there is none.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How to give credentials.
const HOW: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if they are temporary) in the environment of this \
                   process, or give the host or pod a role";

/// The metadata service that credentials must come from, if the environment has none.
///
/// # Errors
/// [`Error::Invalid`] if half of a pair of keys is given, or the service is turned off.
pub(super) fn metadata_service(storage: &str, builder: &AmazonS3Builder, environment: &[(String, String)]) -> Result<Option<String>> {
    let given = |key: AmazonS3ConfigKey| builder.get_config_value(&key).is_some_and(|value| !value.is_empty());
    let half = |missing: &str, there: &str| Error::Invalid(format!("{storage}: {there} is set and {missing} is not; set both"));
    match (given(AmazonS3ConfigKey::AccessKeyId), given(AmazonS3ConfigKey::SecretAccessKey)) {
        (true, true) => return Ok(None),
        (true, false) => return Err(half("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")),
        (false, true) => return Err(half("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")),
        (false, false) => {}
    }
    let from_elsewhere = (given(AmazonS3ConfigKey::WebIdentityTokenFile) && given(AmazonS3ConfigKey::RoleArn))
        || given(AmazonS3ConfigKey::ContainerCredentialsRelativeUri)
        || (given(AmazonS3ConfigKey::ContainerCredentialsFullUri) && given(AmazonS3ConfigKey::ContainerAuthorizationTokenFile))
        || builder.get_config_value(&AmazonS3ConfigKey::SkipSignature).is_some_and(|skip| skip == "true");
    if from_elsewhere {
        return Ok(None);
    }
    let disabled = |(name, value): &(String, String)| name == "AWS_EC2_METADATA_DISABLED" && value.eq_ignore_ascii_case("true");
    if environment.iter().any(disabled) {
        return Err(Error::Invalid(format!("{storage} needs credentials and there are none: {HOW}")));
    }
    Ok(Some(builder.get_config_value(&AmazonS3ConfigKey::MetadataEndpoint).unwrap_or_else(|| METADATA_ENDPOINT.to_owned())))
}

/// Checks that a metadata service answers.
///
/// # Errors
/// [`Error::Invalid`] if nothing answers: then there are no credentials.
pub(super) async fn must_answer(storage: &str, service: &str) -> Result<()> {
    match tokio::time::timeout(TIMEOUT, answers(service)).await {
        Ok(true) => Ok(()),
        _ => Err(Error::Invalid(format!(
            "{storage} needs credentials and there are none: {HOW} (no metadata service answers at {service} either)"
        ))),
    }
}

/// What to add to a failure of the first request when credentials came from a metadata service.
pub(super) fn hint(service: &str) -> String {
    format!("credentials were looked for at the metadata service {service}; if it has none, {HOW}")
}

/// Whether a service answers there.
async fn answers(service: &str) -> bool {
    let Ok(url) = Url::parse(service) else { return false };
    let Some(host) = url.host_str() else { return false };
    let (bare, port) = (host.trim_matches(['[', ']']), url.port_or_known_default().unwrap_or(80));
    let Ok(mut stream) = TcpStream::connect((bare, port)).await else { return false };
    let ask = format!("GET /latest/meta-data/ HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await.is_ok() && stream.read(&mut [0; 1]).await.is_ok_and(|bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use crate::storage::{StorageOptions, open};
    use pfr_schema::ErrorCode;
    use std::time::{Duration, Instant};

    fn s3(environment: &[(&str, &str)]) -> StorageOptions {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        StorageOptions { environment, retries: 0, ..StorageOptions::default() }
    }

    #[test]
    fn half_a_pair_of_keys_is_refused_by_the_name_of_the_other() {
        for (given, missing) in [("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")] {
            let error = open("s3://bucket/p", &s3(&[(given, "hush-hush")])).unwrap_err();
            assert_eq!(error.code(), ErrorCode::InvalidRequest);
            assert!(error.to_string().contains(&format!("{missing} is not")) && !error.to_string().contains("hush"), "{error}");
        }
    }

    #[tokio::test]
    async fn without_credentials_the_error_names_them_and_comes_soon() {
        // One address refuses, one takes the connection and says nothing.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        for service in ["http://127.0.0.1:1".to_owned(), format!("http://{}", silent.local_addr().unwrap())] {
            let options =
                s3(&[("AWS_METADATA_ENDPOINT", &service), ("AWS_ENDPOINT_URL", "http://127.0.0.1:1"), ("AWS_ALLOW_HTTP", "true")]);
            let (_, storage) = open("s3://bucket/p", &options).unwrap();
            let start = Instant::now();
            let error = storage.probe().await.unwrap_err();
            assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
            assert_eq!(error.code(), ErrorCode::InvalidRequest, "{error}");
            for part in ["s3://bucket/p", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "environment", &service] {
                assert!(error.to_string().contains(part), "{part} is not in: {error}");
            }
        }
        let error = open("s3://bucket/p", &s3(&[("AWS_EC2_METADATA_DISABLED", "true")])).unwrap_err();
        assert!(error.to_string().contains("AWS_ACCESS_KEY_ID"), "{error}");
    }

    #[tokio::test]
    async fn a_metadata_service_without_a_role_is_named_as_where_credentials_were_looked_for() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let service = format!("http://{}", listener.local_addr().unwrap());
        pfr_service::task::spawn(async move {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 4096]).await;
                let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await;
            }
        });
        let (_, storage) = open("s3://bucket/p", &s3(&[("AWS_METADATA_ENDPOINT", &service)])).unwrap();
        let error = storage.probe().await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
        assert!(error.to_string().contains(&service) && error.to_string().contains("AWS_ACCESS_KEY_ID"), "{error}");
    }
}
