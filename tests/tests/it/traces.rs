//! Traces from the command to the database, and what a collector may not do to the work.

use crate::replicas::backend::{Backend, Database, Packs};
use pfr_testkit::collector::{Collector, Manner, Span};
use pfr_tests::{Fate, Pf, Registry, Shape, SnapshotDir, binary, front, own_address, wait_for};
use std::collections::{BTreeSet, HashMap};
use std::net::TcpListener;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const INTERNAL: i32 = 1;
const SERVER: i32 = 2;
const CLIENT: i32 = 3;

fn registry_with(variables: &[(&str, &str)], options: &[&str]) -> Registry {
    let variables: Vec<(String, String)> = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Registry::start_with(true, options, &variables)
}

fn run(pf: &Pf, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let output = pf.command(arguments).envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn push(pf: &Pf, reference: &str, variables: &[(&str, &str)]) {
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..40).collect::<Vec<_>>());
    run(pf, &["push", dir.arg(), reference], variables);
}

/// The spans of the trace that a command began, once `last` is among them and none lacks the span
/// above it.
fn trace_of(collector: &Collector, command: &str, last: impl Fn(&Span) -> bool) -> Vec<Span> {
    wait_for("the spans of a trace", 30, || {
        let spans = collector.spans();
        let first = spans.iter().find(|span| span.name == command && span.parent.is_empty())?;
        let trace: Vec<Span> = spans.iter().filter(|span| span.trace == first.trace).cloned().collect();
        let ids: BTreeSet<&str> = trace.iter().map(|span| span.id.as_str()).collect();
        let is_complete = trace.iter().all(|span| span.parent.is_empty() || ids.contains(span.parent.as_str()));
        (is_complete && trace.iter().any(&last)).then_some(trace)
    })
}

/// The spans above one, the nearest first.
fn above<'a>(trace: &'a [Span], span: &'a Span) -> Vec<&'a Span> {
    let by_id: HashMap<&str, &Span> = trace.iter().map(|span| (span.id.as_str(), span)).collect();
    std::iter::successors(by_id.get(span.parent.as_str()).copied(), |span| by_id.get(span.parent.as_str()).copied()).collect()
}

fn attribute<'a>(span: &'a Span, name: &str) -> &'a str {
    span.attributes.get(name).map_or("", String::as_str)
}

#[test]
fn a_push_is_one_trace_from_the_command_through_a_proxy_to_the_database_and_the_storage() {
    let collector = Collector::start(Manner::Take);
    let registry = registry_with(&[(ENDPOINT, collector.url.as_str())], &[]);
    let proxy = front(&registry.url(), |_| Fate::Pass);
    let pf = Pf::new(&proxy.url);
    push(&pf, "team/agent:t", &[(ENDPOINT, collector.url.as_str()), ("OTEL_SERVICE_NAME", "my-client")]);
    let trace = trace_of(&collector, "pf push", |span| attribute(span, "db.operation.name") == "commit");
    let first = trace.iter().find(|span| span.parent.is_empty()).unwrap();
    assert_eq!((first.service.as_str(), first.kind, attribute(first, "process.exit.code")), ("my-client", INTERNAL, "0"));
    assert_eq!(trace.iter().filter(|span| span.parent.is_empty()).count(), 1, "one beginning");

    for (name, of) in [
        ("commit", "db.operation.name"),
        ("finish_pack", "db.operation.name"),
        ("put part", "pf.storage.key"),
        ("complete pack", "pf.storage.key"),
        ("verify frames", "pf.bytes"),
        ("put journal", "pf.bytes"),
    ] {
        let inner = trace.iter().find(|span| span.name == name && span.service == "pf-registry");
        let inner = inner.unwrap_or_else(|| panic!("no {name} in {trace:#?}"));
        assert!(!attribute(inner, of).is_empty(), "{inner:?}");
        let above = above(&trace, inner);
        let served = above.iter().find(|span| span.kind == SERVER).unwrap_or_else(|| panic!("{name} is below no request"));
        let asked = above.iter().find(|span| span.service == "my-client").unwrap();
        assert_eq!((served.parent.as_str(), asked.kind), (asked.id.as_str(), CLIENT), "{name}");
        assert_eq!(above.last().unwrap().id, first.id, "{name}");
        assert_eq!(attribute(served, "pf.request_id"), attribute(asked, "pf.request_id"), "{name}");
        assert!(served.start <= inner.start && inner.start <= inner.end, "{name}");
    }
    let commit = trace.iter().find(|span| span.name == "commit").unwrap();
    assert_eq!((attribute(commit, "db.system.name"), commit.kind), ("sqlite", CLIENT));
    for served in trace.iter().filter(|span| span.kind == SERVER) {
        assert!(attribute(served, "http.route").starts_with("/v1/"), "{served:?}");
        assert!(attribute(served, "url.path").starts_with("/v1/"), "{served:?}");
        assert!(!attribute(served, "http.response.status_code").is_empty(), "{served:?}");
        assert_eq!(served.name, format!("{} {}", attribute(served, "http.request.method"), attribute(served, "http.route")));
    }
    for asked in trace.iter().filter(|span| span.kind == CLIENT && span.service == "my-client" && span.attributes.contains_key("url.full"))
    {
        assert_eq!(attribute(asked, "server.address"), own_address().to_string(), "{asked:?}");
    }
}

#[test]
fn replicas_and_registries_before_an_upstream_continue_a_trace() {
    let collector = Collector::start(Manner::Take);
    let backend = Backend::new(Database::Postgres, Packs::Bucket);
    let options = ["--otlp-endpoint", &collector.url];
    let replicas = [backend.registry(&options), backend.registry(&options)];
    let near = registry_with(&[(ENDPOINT, collector.url.as_str())], &["--upstream", &replicas[1].url()]);
    let variables = [(ENDPOINT, collector.url.as_str())];
    push(&Pf::new(&replicas[0].url()), "a:t", &variables);
    run(&Pf::new(&near.url()), &["pull", "a:t"], &variables);

    let of_database = |span: &Span| attribute(span, "db.system.name") == "postgresql";
    let processes = |trace: &[Span]| trace.iter().map(|span| span.process.clone()).collect::<BTreeSet<_>>();
    let pushed = trace_of(&collector, "pf push", |span| of_database(span) && attribute(span, "db.operation.name") == "commit");
    assert!(processes(&pushed).contains(&replicas[0].pid().to_string()));
    let pulled = trace_of(&collector, "pf pull", |span| span.name == "get pack" && span.process == replicas[1].pid().to_string());
    let expected = [replicas[1].pid(), near.pid()].map(|pid| pid.to_string());
    assert!(expected.iter().all(|pid| processes(&pulled).contains(pid)), "{:?}", processes(&pulled));
    assert!(!processes(&pulled).contains(&replicas[0].pid().to_string()), "the other replica has no part in it");
    let far = pulled.iter().find(|span| of_database(span)).unwrap();
    let above = above(&pulled, far);
    assert!(above.iter().any(|span| span.process == near.pid().to_string()), "{above:#?}");
}

#[test]
fn headers_are_sent_and_no_secret_is_in_any_span() {
    let collector = Collector::start(Manner::Take);
    let variables = [(ENDPOINT, collector.url.as_str()), ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=hush%2Chush")];
    let registry = registry_with(&variables, &["--require-tokens"]);
    let made = Command::new(binary("pf-registry"))
        .args(["token", "create", "--label", "test", "--scope", "*:pull,push,delete,admin", "--data"])
        .arg(registry.data())
        .output()
        .unwrap();
    let made = String::from_utf8(made.stdout).unwrap();
    let token = made.trim();
    assert!(token.len() > 40, "no token in {made}");
    let pf = Pf::new(&registry.url());
    push(&pf, "team/agent:t", &[&variables[..], &[("PF_TOKEN", token)]].concat());
    let trace = trace_of(&collector, "pf push", |span| attribute(span, "db.operation.name") == "commit");
    assert!(trace.len() > 10, "{trace:#?}");
    assert!(collector.heads().iter().all(|head| head.starts_with("post /v1/traces ") && head.contains("\r\napi-key: hush,hush\r\n")));
    assert!(collector.has_seen("commit"), "bytes are searched");
    for secret in [token, &token[token.len() / 2..], "hush", "Bearer"] {
        assert!(!collector.has_seen(secret), "{secret}");
        assert!(!registry.log().contains(secret), "{secret}");
    }
}

#[test]
fn a_collector_that_hangs_refuses_or_is_away_does_not_hold_up_a_push() {
    let (hanging, refusing) = (Collector::start(Manner::Hang), Collector::start(Manner::Refuse));
    let away = format!("http://{}", TcpListener::bind((own_address(), 0)).unwrap().local_addr().unwrap());
    for url in [&hanging.url, &refusing.url, &away] {
        let variables = [(ENDPOINT, url.as_str()), ("OTEL_EXPORTER_OTLP_TIMEOUT", "60000")];
        let registry = registry_with(&variables, &[]);
        let pf = Pf::new(&registry.url());
        let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..40).collect::<Vec<_>>());
        let started = Instant::now();
        let output = run(&pf, &["push", dir.arg(), "a:t"], &variables);
        // One request to a collector that hangs would take a minute.
        assert!(started.elapsed() < Duration::from_secs(30), "{url}: {:?}", started.elapsed());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!said.contains("collector") && !said.contains("trace"), "a user has asked for a push: {said}");
    }
    // What was sent may not have been read yet.
    wait_for("both to be asked", 30, || (!hanging.heads().is_empty() && !refusing.heads().is_empty()).then_some(()));
}

#[test]
fn dropped_spans_are_counted_and_said_once() {
    let refusing = Collector::start(Manner::Refuse);
    let registry = registry_with(&[(ENDPOINT, refusing.url.as_str())], &[]);
    assert!(registry.metric("pf_traces_dropped_spans_total") == 0.0);
    let pf = Pf::new(&registry.url());
    let mut dropped = 0.0;
    for tag in ["a:1", "a:2"] {
        push(&pf, tag, &[]);
        dropped =
            wait_for("more dropped spans", 60, || Some(registry.metric("pf_traces_dropped_spans_total")).filter(|now| *now > dropped));
    }
    let said = registry.log().lines().filter(|line| line.contains("spans are dropped")).count();
    assert_eq!(said, 1, "{}", registry.log());
}

#[test]
fn variables_for_other_programs_are_said_once_and_hold_up_nothing() {
    let grpc: &[(&str, &str)] = &[(ENDPOINT, "http://127.0.0.1:1"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")];
    let password: &[(&str, &str)] = &[(ENDPOINT, "http://user:hush@host")];
    for (variables, name) in [(grpc, "OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf"), (password, "http://HOST:PORT")] {
        let registry = registry_with(variables, &[]);
        let of_command = String::from_utf8(run(&Pf::new(&registry.url()), &["ls"], variables).stderr).unwrap();
        for said in [of_command, registry.log()] {
            assert_eq!(said.matches("no traces are sent").count(), 1, "{said}");
            assert!(said.contains(name) && !said.contains("hush"), "{said}");
        }
    }
}

#[test]
fn a_malformed_parent_is_ignored_and_the_request_begins_a_trace() {
    let collector = Collector::start(Manner::Take);
    let registry = registry_with(&[(ENDPOINT, collector.url.as_str())], &[]);
    let proxy = front(&registry.url(), |_| Fate::With("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"));
    push(&Pf::new(&proxy.url), "a:t", &[(ENDPOINT, collector.url.as_str())]);
    let served = wait_for("a request", 30, || {
        let served: Vec<Span> = collector.spans().into_iter().filter(|span| span.kind == SERVER).collect();
        (!served.is_empty()).then_some(served)
    });
    assert!(served.iter().all(|span| span.parent.is_empty() && span.trace != "0af7651916cd43dd8448eb211c80319c"), "{served:#?}");
}

#[test]
fn callers_behind_a_proxy_choose_no_trace_unless_the_registry_trusts_them() {
    for (options, continues) in [(&["--proxies", "1"][..], false), (&["--proxies", "1", "--trust-traces"], true)] {
        let collector = Collector::start(Manner::Take);
        let registry = registry_with(&[(ENDPOINT, collector.url.as_str())], options);
        push(&Pf::new(&registry.url()), "a:t", &[(ENDPOINT, collector.url.as_str())]);
        let served = wait_for("the commit", 30, || {
            let is_commit = |span: &Span| span.kind == SERVER && attribute(span, "http.route").ends_with("/commit");
            collector.spans().into_iter().find(is_commit)
        });
        assert_eq!(!served.parent.is_empty(), continues, "{options:?}: {served:?}");
    }
}

#[test]
fn a_bad_setting_is_refused_by_name_and_switches_turn_traces_off() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let refused = pf.command(&["ls"]).env(ENDPOINT, "http://127.0.0.1:1").env("PF_TRACE_FILTER", "hush=hush=hush").output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("PF_TRACE_FILTER: expected a level") && !said.contains("hush"), "{said}");
    let refused = Command::new(binary("pf-registry"))
        .args(["serve", "--listen", "127.0.0.1:0", "--otlp-endpoint", "hush", "--data"])
        .arg(pf.path("data"))
        .output()
        .unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("otlp-endpoint: expected http://HOST:PORT") && !said.contains("hush"), "{said}");

    let collector = Collector::start(Manner::Take);
    for off in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none"), ("OTEL_TRACES_SAMPLER", "always_off")] {
        push(&pf, "a:t", &[(ENDPOINT, collector.url.as_str()), off]);
        assert!(collector.heads().is_empty(), "{off:?}");
    }
}
