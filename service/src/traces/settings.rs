//! Where traces go, and which: the standard variables, and what a program's own settings say.

use crate::Secret;
use opentelemetry::KeyValue;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::TelemetryResourceDetector;
use opentelemetry_sdk::trace::Sampler;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Certificate, Url};
use std::time::Duration;
use tracing_subscriber::filter::Targets;

/// Spans of our crates from `info` on.
const FILTER: &str = "pfr_=info";
/// Limit on one request to the collector.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a file with certificates at most.
const CERTIFICATES: u64 = 4 << 20;

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
const TRACES_HEADERS: &str = "OTEL_EXPORTER_OTLP_TRACES_HEADERS";
const TRACE_FILTER: &str = "PF_TRACE_FILTER";

/// What a program's own settings say about traces. Each wins over its standard variable; empty is
/// not given.
#[derive(Clone, Debug, Default)]
pub struct TraceSettings {
    /// Base URL of the collector, as in `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub endpoint: String,
    /// Headers of each request, as in `OTEL_EXPORTER_OTLP_HEADERS`.
    pub headers: Secret,
    /// Which spans are exported, as in `PF_TRACE_FILTER`.
    pub filter: String,
}

/// Why spans cannot be exported as the settings say.
#[derive(Debug, thiserror::Error)]
#[error("{setting}: {reason}")]
pub struct TraceError {
    /// The variable or the setting.
    setting: &'static str,
    /// What was expected. Values are not quoted: they may hold a password.
    reason: String,
}

impl TraceError {
    /// Whether a variable is wrong that is meant for every program of the machine: that is no
    /// reason to refuse the work of this one.
    pub(super) fn is_standard(&self) -> bool {
        self.setting.starts_with("OTEL_")
    }

    pub(super) fn new(setting: &'static str, reason: impl Into<String>) -> Self {
        Self { setting, reason: reason.into() }
    }
}

/// Settings, complete.
pub(super) struct Settings {
    pub endpoint: Url,
    /// The setting that named the endpoint.
    pub named_by: &'static str,
    pub headers: HeaderMap,
    pub timeout: Duration,
    pub roots: Vec<Certificate>,
    pub sampler: Sampler,
    pub filter: Targets,
    attributes: Vec<KeyValue>,
}

impl Settings {
    /// What all spans of this process have in common.
    pub(super) fn resource(&self) -> Resource {
        Resource::builder_empty().with_detector(Box::new(TelemetryResourceDetector)).with_attributes(self.attributes.clone()).build()
    }
}

/// The settings of the variables and of a program; none if no collector is named, or if a variable
/// says that there is no export.
pub(super) fn read(
    program: &'static str,
    given: &TraceSettings,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<Settings>, TraceError> {
    let is_off = |name: &str, word: &str| variable(name).is_some_and(|value| value.trim().eq_ignore_ascii_case(word));
    if is_off("OTEL_SDK_DISABLED", "true") || is_off("OTEL_TRACES_EXPORTER", "none") {
        return Ok(None);
    }
    let (named_by, endpoint) = if !given.endpoint.is_empty() {
        ("otlp-endpoint", endpoint("otlp-endpoint", &given.endpoint, true)?)
    } else if let Some(url) = variable(TRACES_ENDPOINT) {
        (TRACES_ENDPOINT, endpoint(TRACES_ENDPOINT, &url, false)?)
    } else if let Some(url) = variable(ENDPOINT) {
        (ENDPOINT, endpoint(ENDPOINT, &url, true)?)
    } else {
        return Ok(None);
    };
    for name in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
        match variable(name).as_deref().map(str::trim) {
            None => {}
            // The variable for traces wins.
            Some("http/protobuf") => break,
            Some(_) => {
                let reason = "expected http/protobuf, the only protocol that is spoken here; \
                              OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is for traces alone, and OTEL_SDK_DISABLED=true turns them off";
                return Err(TraceError::new(name, reason));
            }
        }
    }
    let headers = match (given.headers.is_empty(), variable(TRACES_HEADERS), variable(HEADERS)) {
        (false, ..) => headers("otlp-headers", given.headers.expose())?,
        (true, Some(text), _) => headers(TRACES_HEADERS, &text)?,
        (true, None, Some(text)) => headers(HEADERS, &text)?,
        (true, None, None) => HeaderMap::new(),
    };
    let (filter_name, filter) = match (given.filter.is_empty(), variable(TRACE_FILTER)) {
        (false, _) => ("trace-filter", given.filter.clone()),
        (true, Some(filter)) => (TRACE_FILTER, filter),
        (true, None) => (TRACE_FILTER, FILTER.to_owned()),
    };
    let filter: Targets = filter.parse().map_err(|_| {
        TraceError::new(filter_name, "expected a level, or modules with levels, such as info or pfr_store=debug,pfr_registry=info")
    })?;
    Ok(Some(Settings {
        endpoint,
        named_by,
        headers,
        timeout: timeout(variable)?,
        roots: roots(variable)?,
        sampler: sampler(variable)?,
        filter,
        attributes: attributes(program, variable)?,
    }))
}

/// The URL that spans are sent to; with `is_base` the path of traces is added to it.
fn endpoint(setting: &'static str, text: &str, is_base: bool) -> Result<Url, TraceError> {
    let wrong = || {
        let reason = "expected http://HOST:PORT or https://HOST:PORT, without user and password: \
                      what authenticates belongs into the headers";
        TraceError::new(setting, reason)
    };
    let mut url: Url = text.trim().parse().map_err(|_| wrong())?;
    let is_web = matches!(url.scheme(), "http" | "https") && url.host_str().is_some_and(|host| !host.is_empty());
    if !is_web || !url.username().is_empty() || url.password().is_some() {
        return Err(wrong());
    }
    if is_base && let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().extend(["v1", "traces"]);
    }
    Ok(url)
}

fn headers(setting: &'static str, text: &str) -> Result<HeaderMap, TraceError> {
    let wrong = || TraceError::new(setting, "expected NAME=VALUE,NAME=VALUE, with %2C for a comma in a value");
    let mut headers = HeaderMap::new();
    for (name, value) in pairs(text).ok_or_else(wrong)? {
        let name = HeaderName::try_from(name).map_err(|_| wrong())?;
        let mut value = HeaderValue::try_from(value).map_err(|_| wrong())?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

fn timeout(variable: &dyn Fn(&str) -> Option<String>) -> Result<Duration, TraceError> {
    for name in ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"] {
        if let Some(text) = variable(name) {
            let given: Option<u64> = text.trim().parse().ok().filter(|millis| (1..=600_000).contains(millis));
            return given.map(Duration::from_millis).ok_or_else(|| TraceError::new(name, "expected milliseconds, 1 to 600000"));
        }
    }
    Ok(TIMEOUT)
}

/// Certificates of authorities that are trusted besides those that this machine trusts.
fn roots(variable: &dyn Fn(&str) -> Option<String>) -> Result<Vec<Certificate>, TraceError> {
    use std::io::Read as _;
    for name in ["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"] {
        if let Some(path) = variable(name) {
            let mut pem = Vec::new();
            let read = std::fs::File::open(path).and_then(|file| file.take(CERTIFICATES).read_to_end(&mut pem));
            read.map_err(|error| TraceError::new(name, format!("the file cannot be read: {error}")))?;
            let roots = Certificate::from_pem_bundle(&pem).ok().filter(|roots| !roots.is_empty());
            return roots.ok_or_else(|| TraceError::new(name, "expected a file with certificates (PEM)"));
        }
    }
    Ok(Vec::new())
}

fn sampler(variable: &dyn Fn(&str) -> Option<String>) -> Result<Sampler, TraceError> {
    let name = variable("OTEL_TRACES_SAMPLER").unwrap_or_else(|| "parentbased_always_on".to_owned());
    let (root, follows_parent) = match name.trim().strip_prefix("parentbased_") {
        Some(root) => (root, true),
        None => (name.trim(), false),
    };
    let sampler = match root {
        "always_on" => Sampler::AlwaysOn,
        "always_off" => Sampler::AlwaysOff,
        "traceidratio" => {
            let ratio = variable("OTEL_TRACES_SAMPLER_ARG").map_or(Some(1.0), |text| text.trim().parse::<f64>().ok());
            let ratio = ratio.filter(|ratio| (0.0..=1.0).contains(ratio));
            Sampler::TraceIdRatioBased(ratio.ok_or_else(|| TraceError::new("OTEL_TRACES_SAMPLER_ARG", "expected a number from 0 to 1"))?)
        }
        _ => {
            let reason = "expected always_on, always_off or traceidratio, or one of these after parentbased_";
            return Err(TraceError::new("OTEL_TRACES_SAMPLER", reason));
        }
    };
    Ok(if follows_parent { Sampler::ParentBased(Box::new(sampler)) } else { sampler })
}

/// Later ones win: `OTEL_SERVICE_NAME` over `OTEL_RESOURCE_ATTRIBUTES`, and that over ours.
fn attributes(program: &'static str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Vec<KeyValue>, TraceError> {
    const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
    let mut attributes = vec![
        KeyValue::new("service.name", program),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("process.pid", i64::from(std::process::id())),
    ];
    if let Some(text) = variable(ATTRIBUTES) {
        let pairs = pairs(&text).ok_or_else(|| TraceError::new(ATTRIBUTES, "expected NAME=VALUE,NAME=VALUE"))?;
        attributes.extend(pairs.into_iter().map(|(name, value)| KeyValue::new(name, value)));
    }
    if let Some(name) = variable("OTEL_SERVICE_NAME") {
        attributes.push(KeyValue::new("service.name", name));
    }
    Ok(attributes)
}

/// `a=b,c=d` with percent-encoded names and values.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        Some((decoded(name.trim())?, decoded(value.trim())?)).filter(|(name, _)| !name.is_empty())
    };
    pairs.map(pair).collect()
}

/// A percent-encoded text; none if it is not one.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |digit: u8| char::from(digit).to_digit(16);
        let (high, low) = (digit(rest.next()?)?, digit(rest.next()?)?);
        bytes.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use opentelemetry::Key;
    use proptest::prelude::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Option<Settings>, TraceError> {
        settings_of(&TraceSettings::default(), variables)
    }

    fn settings_of(given: &TraceSettings, variables: &[(&str, &str)]) -> Result<Option<Settings>, TraceError> {
        read("pf", given, &|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    fn refusal(variables: &[(&str, &str)]) -> String {
        settings(variables).err().map(|error| error.to_string()).unwrap_or_else(|| panic!("{variables:?} is accepted"))
    }

    #[test]
    fn without_a_collector_there_is_no_export() {
        let headers = ("OTEL_EXPORTER_OTLP_HEADERS", "a=b");
        assert!(settings(&[]).unwrap().is_none());
        assert!(settings(&[headers, ("OTEL_TRACES_SAMPLER", "nonsense")]).unwrap().is_none());
        assert!(settings(&[(ENDPOINT, "http://c:4318"), ("OTEL_SDK_DISABLED", "TRUE")]).unwrap().is_none());
        assert!(settings(&[(ENDPOINT, "http://c:4318"), ("OTEL_TRACES_EXPORTER", "none")]).unwrap().is_none());
    }

    #[test]
    fn the_endpoint_of_traces_is_used_as_it_is_and_the_other_gets_the_path() {
        let cases: [(&[(&str, &str)], &str); 3] = [
            (&[(ENDPOINT, "http://c:4318")], "http://c:4318/v1/traces"),
            (&[(ENDPOINT, "https://c/otlp/")], "https://c/otlp/v1/traces"),
            (&[(TRACES_ENDPOINT, "http://c:1/in"), (ENDPOINT, "http://d:2")], "http://c:1/in"),
        ];
        for (variables, expected) in cases {
            assert_eq!(settings(variables).unwrap().unwrap().endpoint.as_str(), expected);
        }
        let given = TraceSettings { endpoint: "http://mine:1".into(), ..TraceSettings::default() };
        let both = settings_of(&given, &[(TRACES_ENDPOINT, "http://c:1")]).unwrap().unwrap();
        assert_eq!(both.endpoint.as_str(), "http://mine:1/v1/traces", "a program's own setting wins");
    }

    #[test]
    fn a_bad_value_names_its_variable_and_is_not_quoted() {
        let to = (ENDPOINT, "http://c:4318");
        for endpoint in ["hush:4318", "hush", "ftp://hush", "http://", "http://user:hush@c:4318", "http://hush@c"] {
            let error = refusal(&[(ENDPOINT, endpoint)]);
            assert!(error.starts_with(ENDPOINT) && error.contains("http://HOST:PORT") && !error.contains("hush"), "{error}");
        }
        for (name, value) in [
            (HEADERS, "hush"),
            (HEADERS, "a=hush%"),
            (TRACES_HEADERS, "a b=hush"),
            (HEADERS, "a=hush%0a"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "hush"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/hush/none.pem"),
            ("OTEL_TRACES_SAMPLER", "hush"),
            ("OTEL_RESOURCE_ATTRIBUTES", "hush"),
            (TRACE_FILTER, "hush=hush=hush"),
        ] {
            let error = refusal(&[to, (name, value)]);
            assert!(error.starts_with(name) && !error.contains("hush"), "{name}: {error}");
        }
        for ratio in ["-1", "1.5", "NaN", "hush"] {
            let error = refusal(&[to, ("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", ratio)]);
            assert!(error.starts_with("OTEL_TRACES_SAMPLER_ARG") && !error.contains("hush"), "{error}");
        }
        let protocols = [("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")];
        assert!(settings(&[to, protocols[0], protocols[1]]).unwrap().is_some(), "the variable for traces wins");
    }

    #[test]
    fn headers_are_decoded_and_marked_as_secrets() {
        let found = settings(&[(ENDPOINT, "http://c"), (HEADERS, "api-key=a%2Cb%3D, x-team = core ,")]).unwrap().unwrap().headers;
        let mut found: Vec<(&str, &str)> = found.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        found.sort_unstable();
        assert_eq!(found, [("api-key", "a,b="), ("x-team", "core")]);
        let found = settings(&[(ENDPOINT, "http://c"), (HEADERS, "api-key=hush")]).unwrap().unwrap().headers;
        assert!(!format!("{found:?}").contains("hush"));
    }

    #[test]
    fn a_service_is_named_by_its_variable_its_attributes_or_its_program() {
        let named = |variables: &[(&str, &str)]| {
            let all: Vec<(&str, &str)> = std::iter::once((ENDPOINT, "http://c")).chain(variables.iter().copied()).collect();
            let resource = settings(&all).unwrap().unwrap().resource();
            let text = |key: &'static str| resource.get(&Key::from_static_str(key)).map(|value| value.to_string());
            (text("service.name").unwrap(), text("team"))
        };
        let attributes = ("OTEL_RESOURCE_ATTRIBUTES", "service.name=theirs,team=core");
        assert_eq!(named(&[]), ("pf".into(), None));
        assert_eq!(named(&[attributes]), ("theirs".into(), Some("core".into())));
        assert_eq!(named(&[attributes, ("OTEL_SERVICE_NAME", "mine")]), ("mine".into(), Some("core".into())));
    }

    proptest! {
        #[test]
        fn any_text_is_decoded_or_refused(text in "[ -~]{0,40}") {
            let _ = pairs(&text);
            if !text.contains('%') {
                prop_assert_eq!(decoded(&text), Some(text));
            }
        }

        #[test]
        fn what_is_encoded_is_decoded(bytes in "\\PC{0,12}") {
            let encoded: String = bytes.bytes().map(|byte| format!("%{byte:02X}")).collect();
            prop_assert_eq!(decoded(&encoded), Some(bytes));
        }
    }
}
