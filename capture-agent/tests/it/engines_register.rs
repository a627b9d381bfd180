//! Registrations: what is refused, and that nothing that is accepted can point outside of its
//! memory.

use crate::common::layout::{Group, Spec};
use crate::common::{Host, host};
use pfr_agent::engines::{Attached, Link};
use pfr_agent::memory::{Available, HostMemory, PageMemory};
use pfr_agent::{Error, Result};
use pfr_schema::agent::EngineState;
use pfr_schema::engine::{CallError, Register, ToEngine, Verb};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

#[derive(Debug)]
struct NoLink;

#[async_trait::async_trait]
impl Link for NoLink {
    async fn call(&self, _call: ToEngine) -> Result<Value, CallError> {
        Ok(json!({}))
    }
}

fn attach(host: &Host, register: Register) -> Result<Attached> {
    attach_sized(host, register, |described| described)
}

fn attach_sized(host: &Host, register: Register, size: impl Fn(u64) -> u64) -> Result<Attached> {
    let ring = host.agent.engines().ring();
    let memory = |bytes: u64| -> Arc<dyn PageMemory> {
        Arc::new(HostMemory::new(vec![0; size(bytes).min(1 << 24) as usize], ring.clone(), Available::system()))
    };
    let memories = register.memories.iter().map(|m| memory(m.bytes)).collect();
    host.agent.engines().attach(register, memories, Arc::new(NoLink))
}

fn hybrid() -> Value {
    json!(Spec::hybrid("e").register(0))
}

fn layer_share(cell: u64, held: Value) -> Value {
    json!({"layer": "l", "outer": 1, "cell": cell, "share": {"of": 4, "held": held}})
}

#[tokio::test]
async fn what_cannot_be_is_refused_with_the_reason() {
    let host = host().await;
    drop(attach(&host, serde_json::from_value(hybrid()).unwrap()).unwrap());
    let max = u64::MAX;
    let cases: &[(&str, Value, &str)] = &[
        ("/protocol", json!(1), "protocol 4 is spoken here, found 1"),
        ("/engine", json!(""), "the engine's name"),
        ("/engine", json!("a/b"), "the engine's name"),
        ("/engine", json!("x".repeat(65)), "the engine's name"),
        ("/member", json!("é"), "the member's name"),
        ("/world", json!(0), "1 to 4096 ranks"),
        ("/rank", json!(1), "rank 1 of 1"),
        ("/deployment/weights", json!(7), "the deployment's \"weights\""),
        ("/deployment/backend", json!(""), "the deployment's \"backend\""),
        ("/deployment/extra", json!({"a": 1}), "the deployment's \"extra\""),
        ("/deployment/extra", json!(1.5), "the deployment's \"extra\""),
        ("/deployment/extra", json!("x".repeat(70_000)), "a deployment of"),
        ("/memories/0/bytes", json!(0), "memory \"kv\": 0 bytes"),
        ("/memories/0/offset", json!(max), "memory \"kv\""),
        ("/memories/0/name", json!("other"), "no memory \"kv\""),
        ("/memories/0/kind", json!("cuda-ipc"), "64 bytes in hex"),
        ("/memories/0/handle", json!("00"), "only CUDA IPC has a handle"),
        ("/groups/1/name", json!("main"), "twice"),
        ("/groups/0/name", json!(""), "1 to 200 bytes"),
        ("/groups/0/block_tokens", json!(0), "blocks of 0 tokens"),
        ("/groups/0/block_tokens", json!(8), "the geometry says 4"),
        ("/groups/0/blocks", json!(0), "0 blocks"),
        ("/groups/0/blocks", json!(u32::MAX), "ends at byte"),
        ("/groups/0/null_block", json!(256), "null block"),
        ("/groups/0/window", json!(4), "exactly for a sliding window"),
        ("/groups/2/window", Value::Null, "exactly for a sliding window"),
        ("/groups/2/window", json!(0), "exactly for a sliding window"),
        ("/groups/0/layout", json!("opaque/x"), "has a geometry"),
        ("/groups/1/layout", json!("mine"), "starts with \"opaque/\""),
        ("/groups/0/geometry", Value::Null, "starts with \"opaque/\""),
        ("/groups/0/geometry/n_layers", json!(4), "the geometry says 1024"),
        ("/groups/0/geometry/n_heads", json!(u32::MAX), "too large"),
        ("/groups/0/components/0/name", json!("v"), "components are"),
        ("/groups/1/components", json!([]), "components are"),
        ("/groups/1/components/0/parts", json!([]), "has no parts"),
        ("/groups/1/components/0/parts/0/offset", json!(max), "ends at byte"),
        ("/groups/1/components/0/parts/0/block_stride", json!(max), "ends at byte"),
        ("/groups/1/components/0/parts/0/block_stride", json!(1), "blocks overlap"),
        ("/groups/1/components/0/parts/0/bytes", json!(0), "a part of 0 bytes"),
        ("/groups/1/components/0/parts/0/bytes", json!(max), "blocks overlap"),
        ("/groups/1/components/0/parts/2/memory", json!("nowhere"), "lies in two memories"),
        ("/groups/0/components/1/parts/0/bytes", json!(100), "different sizes"),
        ("/groups/1/states", json!([]), ""),
        ("/groups/3/states", json!([]), "has states and no components"),
        ("/groups/3/block_tokens", json!(2), "1 token a block"),
        ("/groups/3/states/0/name", json!("layers.1.ssm"), "twice"),
        ("/groups/3/states/0/kind", json!("weights"), "its kind is"),
        ("/groups/3/states/0/kind", json!("other:"), "its kind is"),
        ("/groups/3/states/0/storage_dtype", json!("f33"), "f33"),
        ("/groups/3/states/0/logical_dtype", json!(""), ""),
        ("/groups/3/states/0/shape", json!([25]), "do not lie in 96 bytes"),
        ("/groups/3/states/0/shape", json!([0]), "a dimension of 0"),
        ("/groups/3/states/0/shape", json!([max]), "do not lie in 96 bytes"),
        ("/groups/3/states/0/layout/strides", json!([-1]), "do not lie in 96 bytes"),
        ("/groups/3/states/0/layout/strides", json!([1, 1]), "2 strides for 1 dimensions"),
        ("/groups/3/states/0/layout/offset", json!(max), "do not lie in 96 bytes"),
        ("/groups/3/states/0/part/offset", json!(max), "ends at byte"),
        ("/parallel", json!(["tp"]), "keys of numbers"),
        ("/parallel", json!(["weights"]), "keys of numbers"),
        ("/groups/0/uncut", json!("x".repeat(201)), "a reason of more than"),
        ("/groups/1/components/0/parts/0/share", layer_share(64, json!([[0, 3]])), "has 192 bytes, the part 256"),
        ("/groups/1/components/0/parts/0/share", layer_share(64, json!([[0, 3], [2, 3]])), "twice"),
        ("/groups/1/components/0/parts/0/share", layer_share(64, json!([[2, 6]])), "units 2..6 of 4"),
        ("/groups/3/states/0/share", json!({"axis": 0, "share": {"of": 48, "held": [[0, 23]]}}), "23 units along dimension 0"),
        ("/groups/3/states/0/share", json!({"axis": 1, "share": {"of": 48, "held": [[0, 24]]}}), "24 units along dimension 1"),
        ("/groups/3/states/0/part/share", layer_share(24, json!([[0, 4]])), "along a dimension"),
    ];
    for (path, value, reason) in cases {
        let mut register = hybrid();
        match register.pointer_mut(path) {
            Some(place) => *place = value.clone(),
            None => {
                let (parent, key) = path.rsplit_once('/').unwrap();
                register.pointer_mut(parent).unwrap().as_object_mut().unwrap().insert(key.into(), value.clone());
            }
        }
        let result = serde_json::from_value(register).map(|register| attach(&host, register));
        if *path == "/groups/1/states" {
            assert!(result.unwrap().is_ok(), "an empty list is no states");
            continue;
        }
        match result {
            Ok(Err(Error::Protocol { reason: found, .. })) => assert!(found.contains(reason), "{path} = {value}: {found}"),
            other => panic!("{path} = {value}: {other:?}"),
        }
        assert!(host.agent.engines().list().is_empty(), "{path}");
    }
}

#[tokio::test]
async fn a_layer_is_once_in_a_component() {
    let host = host().await;
    let mut register: Register = serde_json::from_value(hybrid()).unwrap();
    let mut name = |names: [&str; 3]| {
        for (part, name) in register.groups[1].components[0].parts.iter_mut().zip(names) {
            let mut share = layer_share(64, json!([[0, 4]]));
            share["layer"] = json!(name);
            part.share = Some(serde_json::from_value(share).unwrap());
        }
        attach(&host, register.clone()).map(drop)
    };
    name(["a", "b", "c"]).unwrap();
    let error = name(["a", "b", "a"]).unwrap_err();
    assert!(matches!(&error, Error::Protocol { reason, .. } if reason.contains("has a layer twice")), "{error}");
}

#[tokio::test]
async fn memory_of_another_size_than_described_is_refused() {
    let host = host().await;
    let register = Spec::flat("e").register(0);
    let error = attach_sized(&host, register.clone(), |bytes| bytes - 1).unwrap_err();
    assert!(matches!(&error, Error::Protocol { reason, .. } if reason.contains("is described with")), "{error}");
    let error = host.agent.engines().attach(register, Vec::new(), Arc::new(NoLink)).unwrap_err();
    assert!(matches!(&error, Error::Protocol { reason, .. } if reason.contains("1 memories described, 0 handed over")), "{error}");
}

#[tokio::test]
async fn members_that_do_not_go_together_are_refused() {
    let host = host().await;
    let mut spec = Spec::hybrid("e").ranks(3);
    spec.deployment.insert("tp".into(), json!(3));
    let _first = attach(&host, spec.register(0)).unwrap();
    type Case = (&'static str, fn(&mut Register), &'static str);
    let cases: [Case; 7] = [
        ("name", |r| r.member = "worker-0".into(), "another member has this name"),
        ("world", |r| r.world = 2, "2 ranks, the others 3"),
        ("deployment", |r| drop(r.deployment.insert("tp".into(), json!(2))), "not that of the others: tp"),
        ("rank", |r| r.rank = 0, "has the memory of rank 0 already"),
        ("groups", |r| drop(r.groups.pop()), "its groups are not those of rank 0"),
        ("parallel", |r| r.parallel = vec!["tp".into()], "ranks share the state by \"tp\""),
        ("window", |r| r.groups[2].window = Some(11), "its groups are not those of rank 0"),
    ];
    for (what, change, reason) in cases {
        let mut register = spec.register(1);
        change(&mut register);
        let error = attach(&host, register).unwrap_err();
        assert!(matches!(&error, Error::Invalid(found) if found.contains(reason)), "{what}: {error}");
    }
}

#[tokio::test]
async fn an_engine_is_ready_when_every_rank_and_verb_is_there() {
    let host = host().await;
    let missing = || match &host.agent.engines().list()[0].state {
        EngineState::Incomplete { missing } => missing.clone(),
        state => format!("{state:?}"),
    };
    let mut spec = Spec::flat("e").ranks(2);
    spec.verbs = vec![Verb::Pause];
    let first = attach(&host, spec.register(0)).unwrap();
    assert_eq!(missing(), "the memory of rank 1 of 2");
    assert!(matches!(host.agent.engines().get("e"), Err(Error::Incomplete { .. })));
    let _second = attach(&host, spec.register(1)).unwrap();
    assert_eq!(missing(), "a member that serves table");
    let mut scheduler = spec.register(0);
    (scheduler.member, scheduler.verbs) = ("scheduler".into(), vec![Verb::Table]);
    (scheduler.groups, scheduler.memories) = (Vec::new(), Vec::new());
    let scheduler = attach(&host, scheduler).unwrap();
    assert_eq!(missing(), "Ready");
    let engine = host.agent.engines().get("e").unwrap();
    assert!(engine.serves(Verb::Pause) && engine.serves(Verb::Table) && !engine.serves(Verb::Pin));
    drop(scheduler);
    assert_eq!(missing(), "a member that serves table");
    drop(first);
    assert_eq!(missing(), "the memory of rank 0 of 2");
}

#[tokio::test]
async fn a_window_needs_the_columns_that_the_next_token_looks_back_on() {
    let host = host().await;
    let mut spec = Spec::with("e", vec![Group::window("near", 10), Group::recurrent("state", &[("s", 1)])]);
    spec.groups[0].block_tokens = 4;
    let _attached = attach(&host, spec.register(0)).unwrap();
    let engine = host.agent.engines().get("e").unwrap();
    let [near, state] = engine.groups(0) else { panic!("two groups") };
    // The token at T sees tokens T − 9 to T.
    for (boundary, columns) in [(0, 0..0), (1, 0..1), (9, 0..3), (12, 0..3), (13, 1..4), (16, 1..4), (17, 2..5)] {
        assert_eq!(near.columns(boundary), columns, "T = {boundary}");
    }
    assert_eq!((state.columns(0), state.columns(100)), (0..1, 0..1));
}

/// Any place in a document, replaced by something.
fn mutate(document: &mut Value, mut place: usize, with: &Value) {
    fn count(value: &Value) -> usize {
        1 + match value {
            Value::Array(list) => list.iter().map(count).sum(),
            Value::Object(map) => map.values().map(count).sum(),
            _ => 0,
        }
    }
    fn replace(value: &mut Value, place: &mut usize, with: &Value) -> bool {
        if *place == 0 {
            *value = with.clone();
            return true;
        }
        *place -= 1;
        match value {
            Value::Array(list) => list.iter_mut().any(|value| replace(value, place, with)),
            Value::Object(map) => map.values_mut().any(|value| replace(value, place, with)),
            _ => false,
        }
    }
    place %= count(document);
    replace(document, &mut place, with);
}

fn anything() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (0_u64..5000).prop_map(Value::from),
        any::<u32>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop_oneof![Just("k"), Just("kv"), Just("main"), Just("f16"), Just("full-attention"), Just("recurrent"), Just("")]
            .prop_map(Value::from),
        Just(json!([])),
        Just(json!([4, 6])),
        Just(json!({})),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]
    #[test]
    fn nothing_that_is_accepted_points_outside_of_its_memory(changes in proptest::collection::vec((any::<usize>(), anything()), 1..4)) {
        static RUNTIME: OnceLock<(tokio::runtime::Runtime, Host)> = OnceLock::new();
        let (_runtime, host) = RUNTIME.get_or_init(|| {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let host = runtime.block_on(host());
            (runtime, host)
        });
        let mut register = hybrid();
        for (place, with) in &changes {
            mutate(&mut register, *place, with);
        }
        let Ok(register) = serde_json::from_value::<Register>(register) else { return Ok(()) };
        let name = register.engine.clone();
        let Ok(_attached) = attach(host, register) else { return Ok(()) };
        let Ok(engine) = host.agent.engines().get(&name) else { return Ok(()) };
        for group in engine.groups(0) {
            for block in [0, group.layout.blocks - 1] {
                let pages = (0..group.layout.components.len()).map(|component| group.page(component, block));
                let states = group.layout.states.iter().map(|state| group.state(state, block));
                for (memory, page) in pages.chain(states) {
                    prop_assert!(page.spans.iter().all(|span| span.offset.checked_add(span.bytes).is_some_and(|end| end <= memory.size())));
                }
            }
        }
    }
}
