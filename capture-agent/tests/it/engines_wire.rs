//! Engines over a real socket, with real shared memory.

use crate::common::client::{Client, memfd, memfd_of};
use crate::common::engine::{Core, Synthetic};
use crate::common::layout::Spec;
use crate::common::{Host, host, host_with, tokens, until};
use pfr_agent::{Agent, Error};
use pfr_schema::agent::{EngineState, Push, SnapshotRequest};
use pfr_schema::engine::{MAX_MESSAGE, MatchKeys, Registered, binary, packed};
use pfr_schema::media_type;
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncReadExt as _;

struct Server {
    host: Host,
    socket: PathBuf,
    _task: tokio::task::JoinSet<()>,
}

async fn serve(host: Host) -> Server {
    let socket = host.dir.path().join("engines.sock");
    let mut task = tokio::task::JoinSet::new();
    let (agent, path) = (host.agent.clone(), socket.clone());
    task.spawn(async move { agent.engines().serve(agent.clone(), &path).await.unwrap() });
    until("the socket is there", || socket.exists()).await;
    Server { host, socket, _task: task }
}

fn request() -> SnapshotRequest {
    SnapshotRequest { reference: "team/agent:now".into(), push: Push::Never, ..SnapshotRequest::default() }
}

/// Registers a member (a process of an engine) that shares all memory of a synthetic engine.
async fn member(agent: &Agent, socket: &Path, spec: Spec, name: &str) -> (Client, Arc<Core>) {
    let core = Core::new(agent, spec);
    core.add("s", &tokens(31));
    let mut client = Client::connect(socket).await;
    let answer = client.register(&json!(core.spec.register(0)), &[&memfd(name, &core, 0)]).await.unwrap();
    let registered: Registered = serde_json::from_value(answer["ok"].clone()).unwrap_or_else(|e| panic!("{e}: {answer}"));
    assert_eq!(registered.fingerprint, pfr_schema::prefix::fingerprint(&core.spec.deployment));
    (client, core)
}

fn is_mapped(name: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains(name)
}

#[tokio::test]
async fn an_engine_behind_a_socket_is_captured_like_one_in_this_process() {
    let server = serve(host().await).await;
    let (client, core) = member(&server.host.agent, &server.socket, Spec::hybrid("remote"), "pf-captured").await;
    let obeying = tokio::spawn(client.obey(Arc::clone(&core)));
    let remote = server.host.agent.snapshot("remote", request()).await.unwrap();
    until("the engine is not paused and the pin is released", || !core.is_paused() && core.pins() == 0).await;

    let local = Synthetic::start(&server.host.agent, Spec::hybrid("local").placed(9, 32));
    local.add("s", &tokens(31));
    let local = server.host.agent.snapshot("local", request()).await.unwrap();
    let store = server.host.agent.store();
    let (remote, local) = (store.manifest(&remote.digest).await.unwrap(), store.manifest(&local.digest).await.unwrap());
    assert_eq!(remote.layers, local.layers);
    obeying.abort();
}

#[tokio::test]
async fn the_end_of_a_connection_ends_its_mappings_and_calls() {
    let server = serve(host().await).await;
    let agent = &server.host.agent;
    let (mut client, _core) = member(agent, &server.socket, Spec::hybrid("e"), "pf-unmapped").await;
    assert!(is_mapped("pf-unmapped"));
    assert!(matches!(agent.engines().list()[0].state, EngineState::Ready {}));
    let running = tokio::spawn({
        let agent = agent.clone();
        async move { agent.snapshot("e", request()).await }
    });
    assert_eq!(client.receive().await.unwrap()["call"], "pause");
    drop(client);
    let error = running.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    until("the agent does not list the engine any more", || agent.engines().list().is_empty()).await;
    until("its memory is unmapped", || !is_mapped("pf-unmapped")).await;
}

#[tokio::test]
async fn an_engine_that_answers_a_pause_too_late_is_resumed() {
    let server = serve(host_with(|config| config.engine_timeout = Duration::from_millis(200)).await).await;
    let agent = server.host.agent.clone();
    let (mut client, _core) = member(&agent, &server.socket, Spec::hybrid("e"), "pf-late").await;
    let running = tokio::spawn(async move { agent.snapshot("e", request()).await });
    let pause = client.receive().await.unwrap();
    assert_eq!(pause["call"], "pause");
    // The engine does not answer. The agent gives the capture up, and sends `resume`.
    assert_eq!(client.receive().await.unwrap()["call"], "resume");
    assert!(matches!(running.await.unwrap(), Err(Error::Lost { .. })));
    client.send(&json!({"id": pause["id"], "ok": {}}), &[]).await;
    until("the engine is still registered", || !server.host.agent.engines().list().is_empty()).await;
}

#[tokio::test]
async fn a_member_that_sends_requests_learns_what_is_staged_and_may_send_binary_requests() {
    let server = serve(host().await).await;
    let mut spec = Spec::hybrid("asks");
    spec.verbs = vec![pfr_schema::engine::Verb::Request];
    let (mut client, _core) = member(&server.host.agent, &server.socket, spec, "pf-told").await;
    let staged = client.receive().await.unwrap();
    assert_eq!(
        (&staged["call"], &staged["args"]["boundaries"], &staged["args"]["expected"]),
        (&json!("staged"), &json!([]), &json!(false))
    );
    client.send(&json!({"id": staged["id"], "ok": {}}), &[]).await;
    let request = binary::encode(9, &MatchKeys { tokens: 90, ..MatchKeys::default() });
    let mut framed = (request.len() as u32).to_le_bytes().to_vec();
    framed.extend(&request);
    client.send_bytes(&framed, &[]).await;
    let answer = client.receive().await.unwrap();
    assert_eq!((&answer["id"], &answer["ok"]["match"]), (&json!(9), &json!("none")), "{answer}");
    let mut packed = async |json: Value, tokens: &[u32]| {
        let body = packed::encode(&serde_json::to_vec(&json).unwrap(), tokens);
        client.send_bytes(&[&(body.len() as u32).to_le_bytes()[..], &body].concat(), &[]).await;
        client.receive().await.unwrap()
    };
    let answer = packed(json!({"id": 10, "call": "match", "args": {"tokens": []}}), &[7; 90]).await;
    assert_eq!((&answer["id"], &answer["ok"]["match"]), (&json!(10), &json!("none")), "{answer}");
    let answer = packed(json!({"id": 11, "call": "report", "args": {"outcomes": []}}), &[7; 90]).await;
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(11), &json!("invalid_request")), "{answer}");
    // The request announces one key and does not contain it: the agent closes the connection.
    let at = framed.len() - 4;
    framed[at] = 1;
    client.send_bytes(&framed, &[]).await;
    assert_eq!(client.receive().await, None);
}

#[tokio::test]
async fn the_tokens_of_a_held_sequence_may_come_packed() {
    let server = serve(host().await).await;
    let mut spec = Spec::hybrid("e");
    spec.verbs = vec![pfr_schema::engine::Verb::Hold];
    let (mut client, core) = member(&server.host.agent, &server.socket, spec, "pf-packed").await;
    let obeying = tokio::spawn(async move {
        while let Some(message) = client.receive().await {
            let call = serde_json::from_value(json!({"call": message["call"], "args": message["args"]})).unwrap();
            let mut answer = json!({"id": message["id"], "ok": core.answer(call).unwrap()});
            if message["call"] != "hold" {
                client.send(&answer, &[]).await;
                continue;
            }
            let tokens: Vec<u32> = serde_json::from_value(std::mem::replace(&mut answer["ok"]["tokens"], json!([]))).unwrap();
            let body = packed::encode(&serde_json::to_vec(&answer).unwrap(), &tokens);
            client.send_bytes(&[&(body.len() as u32).to_le_bytes()[..], &body].concat(), &[]).await;
        }
    });
    let report = server.host.agent.snapshot("e", request()).await.unwrap();
    assert_eq!((report.boundary, report.tokens), (30, 31));
    let store = server.host.agent.store();
    let manifest = store.manifest(&report.digest).await.unwrap();
    let stored = store.read(&manifest.layers_of(media_type::TOKENS).next().unwrap().digest).await.unwrap();
    let expected: Vec<u8> = tokens(31).iter().flat_map(|token| token.to_le_bytes()).collect();
    assert_eq!(stored[..], expected[..]);
    obeying.abort();
}

#[tokio::test]
async fn a_member_may_have_32_open_calls_and_a_further_one_is_refused() {
    // A registry that takes connections and never answers. After some time the agent answers a
    // resume from this registry with `later`.
    let silent = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let server = serve(host_with(|config| config.registry = Some(url)).await).await;
    let mut spec = Spec::hybrid("asks");
    spec.verbs = vec![pfr_schema::engine::Verb::Request];
    let (mut client, _core) = member(&server.host.agent, &server.socket, spec, "pf-calls").await;
    const CALLS: u64 = 400;
    let mut burst = Vec::new();
    for id in 1..=CALLS {
        let request = json!({"tokens": 40, "keys": []});
        let args = json!({"reference": "team/agent:now", "first": true, "request": request});
        let call = serde_json::to_vec(&json!({"id": id, "call": "resume", "args": args})).unwrap();
        burst.extend((call.len() as u32).to_le_bytes());
        burst.extend(call);
    }
    client.send_bytes(&burst, &[]).await;
    let (mut waited, mut refused) = (Vec::new(), Vec::new());
    while (waited.len() + refused.len()) < CALLS as usize {
        let message = client.receive().await.expect("the connection lives");
        if message.get("call").is_some() {
            continue;
        }
        let id = message["id"].as_u64().unwrap();
        match message["error"]["code"].as_str() {
            Some("overloaded") => refused.push(id),
            None if message["ok"]["match"] == "later" => waited.push(id),
            _ => panic!("{message}"),
        }
    }
    assert!(!refused.is_empty() && refused.iter().all(|id| *id > 32), "{} refused: {refused:?}", refused.len());
    assert!(waited.len() >= 32);
    // The open calls have ended, so the next one is accepted.
    client.send(&json!({"id": 500, "call": "report", "args": {"outcomes": []}}), &[]).await;
    let answer = async {
        loop {
            let message = client.receive().await.expect("the connection lives");
            if message["id"] == 500 && message.get("call").is_none() {
                return message;
            }
        }
    };
    assert_eq!(answer.await["ok"], json!({}));
}

#[tokio::test]
async fn only_the_owner_opens_the_socket_and_the_socket_of_a_dead_agent_is_replaced() {
    let server = serve(host().await).await;
    assert_eq!(std::fs::metadata(&server.socket).unwrap().permissions().mode() & 0o777, 0o600);
    let error = server.host.agent.engines().serve(server.host.agent.clone(), &server.socket).await.unwrap_err();
    assert!(matches!(&error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse), "{error}");

    let dead = server.host.dir.path().join("dead.sock");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    assert!(std::os::unix::net::UnixStream::connect(&dead).is_err());
    let agent = server.host.agent.clone();
    let serving = tokio::spawn({
        let dead = dead.clone();
        async move { agent.engines().serve(agent.clone(), &dead).await }
    });
    until("the agent listens", || std::os::unix::net::UnixStream::connect(&dead).is_ok()).await;
    serving.abort();
    assert!(serving.await.unwrap_err().is_cancelled());
    assert!(!dead.exists());
}

/// Sends a registration and returns the text of its refusal. Checks that the agent then closes the
/// connection.
async fn refusal(server: &Server, register: &Value, descriptors: &[&OwnedFd]) -> String {
    let mut client = Client::connect(&server.socket).await;
    let answer = client.register(register, descriptors).await.expect("an answer");
    assert_eq!(client.receive().await, None, "the connection stays open");
    answer["error"]["detail"].as_str().unwrap_or_else(|| panic!("no refusal: {answer}")).to_owned()
}

#[tokio::test]
async fn descriptors_that_do_not_fit_are_refused_and_closed() {
    let server = serve(host().await).await;
    let core = Core::new(&server.host.agent, Spec::flat("e"));
    let register = json!(core.spec.register(0));
    let good = memfd("pf-good", &core, 0);
    let small = memfd_of("pf-small", &[0; 4096]);
    assert!(refusal(&server, &register, &[]).await.contains("1 descriptors are described, 0 came"));
    assert!(refusal(&server, &register, &[&small]).await.contains("of a memory of 4096 bytes"));

    // After this test drops its writing end, only the agent may hold one.
    let (reading, writing) = std::os::unix::net::UnixStream::pair().unwrap();
    let writing: OwnedFd = writing.into();
    assert!(refusal(&server, &register, &[&good, &writing]).await.contains("1 descriptors are described, 2 came"));
    drop(writing);
    reading.set_nonblocking(true).unwrap();
    let mut reading = tokio::net::UnixStream::from_std(reading).unwrap();
    let end = tokio::time::timeout(Duration::from_secs(10), reading.read(&mut [0; 1])).await.expect("the agent keeps it open");
    assert_eq!(end.unwrap(), 0);

    let mut client = Client::connect(&server.socket).await;
    let many: Vec<&OwnedFd> = std::iter::repeat_n(&good, 100).collect();
    client.send(&json!({"id": 1, "call": "register", "args": register}), &many).await;
    assert_eq!(client.receive().await, None);
    assert!(server.host.agent.engines().list().is_empty());
}

#[tokio::test]
async fn a_connection_that_does_not_register_is_closed() {
    let server = serve(host_with(|config| config.engine_timeout = Duration::from_millis(100)).await).await;
    let mut silent = Client::connect(&server.socket).await;
    assert_eq!(silent.receive().await, None);

    let mut long = Client::connect(&server.socket).await;
    long.send_bytes(&(MAX_MESSAGE + 1).to_le_bytes(), &[]).await;
    assert_eq!(long.receive().await, None);

    let mut early = Client::connect(&server.socket).await;
    early.send(&json!({"id": 7, "call": "abandon", "args": {"restore": "x"}}), &[]).await;
    let answer = early.receive().await.unwrap();
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(7), &json!("invalid_request")));
    assert_eq!(early.receive().await, None);
}

#[tokio::test]
async fn invalid_calls_are_answered_and_the_connection_stays_open() {
    let server = serve(host().await).await;
    let (mut client, _core) = member(&server.host.agent, &server.socket, Spec::hybrid("e"), "pf-senseless").await;
    for call in [
        json!({"id": 2, "call": "dance", "args": {}}),
        json!({"id": 3, "call": "fill", "args": {"restore": 1}}),
        json!({"id": 4, "call": "register", "args": Spec::flat("e").register(0)}),
    ] {
        client.send(&call, &[]).await;
        let answer = client.receive().await.unwrap();
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&call["id"], &json!("invalid_request")), "{answer}");
    }
    // An answer to no call is ignored.
    client.send(&json!({"id": 99, "ok": {}}), &[]).await;
    client.send(&json!({"id": 5, "call": "dance"}), &[]).await;
    assert_eq!(client.receive().await.unwrap()["id"], 5);
    assert_eq!(server.host.agent.engines().list().len(), 1);
}

#[tokio::test]
async fn a_first_message_that_is_no_object_is_refused_with_the_type_that_was_found() {
    let server = serve(host().await).await;
    for (message, found) in [("[]", "an array"), ("7", "a number"), ("\"x\"", "a text"), ("true", "a boolean"), ("null", "null")] {
        let mut client = Client::connect(&server.socket).await;
        let mut bytes = (message.len() as u32).to_le_bytes().to_vec();
        bytes.extend(message.as_bytes());
        client.send_bytes(&bytes, &[]).await;
        let answer = client.receive().await.unwrap_or_else(|| panic!("{message} is not answered"));
        let detail = answer["error"]["detail"].as_str().unwrap_or_default();
        assert!(detail.contains(&format!("a JSON object, found {found}")), "{message}: {answer}");
    }
}

#[tokio::test]
async fn invalid_bytes_end_only_the_connection_that_sent_them() {
    let server = serve(host_with(|config| config.engine_timeout = Duration::from_millis(200)).await).await;
    let (mut good, _core) = member(&server.host.agent, &server.socket, Spec::hybrid("e"), "pf-any").await;
    let strategy = proptest::collection::vec(proptest::prelude::any::<u8>(), 1..200);
    let mut inputs: Vec<Vec<u8>> = Vec::new();
    let mut random = TestRunner::default();
    for _ in 0..40 {
        inputs.push(strategy.new_tree(&mut random).unwrap().current());
    }
    for bytes in &inputs {
        let mut bad = Client::connect(&server.socket).await;
        bad.send_bytes(bytes, &[]).await;
        let mut framed = (bytes.len() as u32).to_le_bytes().to_vec();
        framed.extend(bytes);
        let mut worse = Client::connect(&server.socket).await;
        worse.send_bytes(&framed, &[]).await;
        let answer = worse.receive().await;
        assert!(answer.is_none_or(|answer| answer.get("error").is_some()), "{bytes:?}");
    }
    good.send(&json!({"id": 5, "call": "dance"}), &[]).await;
    assert_eq!(good.receive().await.unwrap()["id"], 5);
}
