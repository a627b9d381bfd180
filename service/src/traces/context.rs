//! W3C `traceparent` and `tracestate`: how a trace passes from one process to the next.

use super::RUNNING;
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use std::str::FromStr as _;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

const PARENT: HeaderName = HeaderName::from_static("traceparent");
const STATE: HeaderName = HeaderName::from_static("tracestate");
/// Bytes of a `traceparent` of version 00.
const LENGTH: usize = 55;
/// Bytes of a `tracestate` that is passed on at most, as the recommendation says.
const STATE_BYTES: usize = 512;

/// Adds the headers that make the current span the parent of what the receiver does. None without
/// an exported span.
pub fn inject(headers: &mut HeaderMap) {
    if RUNNING.get().is_none() {
        return;
    }
    let context = Span::current().context();
    let span = context.span();
    let span = span.span_context();
    if !span.is_valid() {
        return;
    }
    if let Ok(value) = HeaderValue::try_from(written(span)) {
        headers.insert(PARENT, value);
    }
    let state = span.trace_state().header();
    if !state.is_empty()
        && let Ok(value) = HeaderValue::try_from(state)
    {
        headers.insert(STATE, value);
    }
}

/// Makes the span that the headers name the parent of `span`, which must not have been entered yet.
/// Headers that are malformed, or there twice, are ignored: `span` then begins a trace.
pub fn adopt(span: &Span, headers: &HeaderMap) {
    if RUNNING.get().is_none() || span.is_disabled() {
        return;
    }
    if let Some(parent) = parent(headers) {
        // Fails only for a span that is not exported.
        let _ = span.set_parent(Context::new().with_remote_span_context(parent));
    }
}

fn written(span: &SpanContext) -> String {
    format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), (span.trace_flags() & TraceFlags::SAMPLED).to_u8())
}

fn parent(headers: &HeaderMap) -> Option<SpanContext> {
    let mut given = headers.get_all(PARENT).iter();
    let (trace, span, flags) = match (given.next(), given.next()) {
        (Some(one), None) => parsed(one.to_str().ok()?)?,
        _ => return None,
    };
    // Several headers would have to be joined; one is what every program sends.
    let state = headers.get(STATE).and_then(|state| state.to_str().ok()).filter(|state| state.len() <= STATE_BYTES);
    let state = state.and_then(|state| TraceState::from_str(state).ok()).unwrap_or_default();
    Some(SpanContext::new(trace, span, flags, true, state))
}

/// A `traceparent` in its parts. A later version may have more parts behind these.
fn parsed(text: &str) -> Option<(TraceId, SpanId, TraceFlags)> {
    let known = text.get(..LENGTH)?;
    let mut parts = known.split('-');
    let version = hex::<2>(parts.next()?)?;
    let (trace, span, flags) = (hex::<32>(parts.next()?)?, hex::<16>(parts.next()?)?, hex::<2>(parts.next()?)?);
    let rest = &text[LENGTH..];
    let is_version = match version {
        0 => rest.is_empty(),
        0xff => false,
        _ => rest.is_empty() || rest.starts_with('-'),
    };
    if !is_version || parts.next().is_some() || trace == 0 || span == 0 {
        return None;
    }
    let flags = TraceFlags::new(u8::try_from(flags).ok()?) & TraceFlags::SAMPLED;
    Some((TraceId::from(trace), SpanId::from(u64::try_from(span).ok()?), flags))
}

/// Exactly `DIGITS` lower-case hexadecimal digits.
fn hex<const DIGITS: usize>(text: &str) -> Option<u128> {
    let is_hex = text.len() == DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_hex.then(|| u128::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn headers(values: &[&str]) -> HeaderMap {
        values.iter().map(|value| (PARENT, HeaderValue::from_str(value).unwrap())).collect()
    }

    #[test]
    fn what_is_sent_is_read_back() {
        let span = parent(&headers(&[GOOD])).unwrap();
        assert_eq!(written(&span), GOOD);
        assert!(span.is_remote() && span.is_sampled() && span.is_valid());
        let unsampled = GOOD.replace("-01", "-00");
        assert_eq!(written(&parent(&headers(&[&unsampled])).unwrap()), unsampled);
        // Flags that are not known are not passed on.
        assert_eq!(written(&parent(&headers(&[&GOOD.replace("-01", "-ff")])).unwrap()), GOOD);
    }

    #[test]
    fn a_later_version_is_read_as_far_as_it_is_known() {
        for later in [GOOD.replacen("00-", "01-", 1), format!("{}-and-more", GOOD.replacen("00-", "cc-", 1))] {
            assert_eq!(written(&parent(&headers(&[&later])).unwrap()), GOOD, "{later}");
        }
    }

    #[test]
    fn what_is_malformed_is_ignored() {
        let zero_trace = format!("00-{}-b7ad6b7169203331-01", "0".repeat(32));
        let zero_span = format!("00-0af7651916cd43dd8448eb211c80319c-{}-01", "0".repeat(16));
        for bad in [
            "",
            "00",
            &GOOD[..54],
            &format!("{GOOD}-00"),
            &format!("{GOOD}0"),
            &GOOD.to_uppercase(),
            &GOOD.replacen("00-", "ff-", 1),
            &GOOD.replacen("00-", "+0-", 1),
            &format!("{}x", GOOD.replacen("00-", "01-", 1)),
            &GOOD.replace('-', "_"),
            &format!(" {}", &GOOD[..54]),
            &zero_trace,
            &zero_span,
        ] {
            assert!(parent(&headers(&[bad])).is_none(), "{bad:?}");
        }
        assert!(parent(&headers(&[GOOD, GOOD])).is_none(), "which of two?");
        let mut bytes = HeaderMap::new();
        bytes.insert(PARENT, HeaderValue::from_bytes(b"00-\xff").unwrap());
        assert!(parent(&bytes).is_none());
    }

    #[test]
    fn a_state_is_passed_on_if_it_is_one_and_not_long() {
        let state = |state: &str| {
            let mut headers = headers(&[GOOD]);
            headers.insert(STATE, HeaderValue::from_str(state).unwrap());
            parent(&headers).unwrap().trace_state().header()
        };
        assert_eq!(state("vendor=a,other=b"), "vendor=a,other=b");
        assert_eq!(state("no state"), "");
        assert_eq!(state(&format!("vendor={}", "a".repeat(STATE_BYTES))), "");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_ignored_and_what_is_read_is_written_alike(text in "[ -~]{0,80}") {
            if let Some(span) = parent(&headers(&[&text])) {
                prop_assert!(span.is_valid());
                prop_assert_eq!(&written(&span)[2..53], &text[2..53]);
            }
        }

        #[test]
        fn a_changed_byte_is_read_or_ignored(at in 0..LENGTH, byte in b' '..=b'~') {
            let mut bytes = GOOD.as_bytes().to_vec();
            bytes[at] = byte;
            let text = String::from_utf8(bytes).unwrap();
            if let Some(span) = parent(&headers(&[&text])) {
                prop_assert_eq!(&written(&span)[2..53], &text[2..53]);
            }
        }

        #[test]
        fn every_span_is_read_back(trace in 1..=u128::MAX, span in 1..=u64::MAX, sampled in any::<bool>()) {
            let text = format!("00-{trace:032x}-{span:016x}-0{}", u8::from(sampled));
            prop_assert_eq!(written(&parent(&headers(&[&text])).unwrap()), text);
        }
    }
}
