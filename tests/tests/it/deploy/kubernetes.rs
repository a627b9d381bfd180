//! The Kustomize base: objects that find each other, probes that are routes, and programs that
//! start with the environment of their pods. `deploy/check` compares the Helm chart with it, and
//! validates both against the schemas of Kubernetes.

use super::files::{deployed, text, yaml};
use super::programs::{Environment, Running, replaced, run};
use crate::docs::usage::Helps;
use pfr_testkit::tls::Authority;
use pfr_testkit::{postgres, s3};
use pfr_tests::own_address;
use serde_json::Value;
use std::collections::BTreeSet;

/// Whether each selected label is one of these.
fn selects(selector: &Value, labels: &Value) -> bool {
    let (selector, labels) = (selector.as_object().unwrap(), labels.as_object().unwrap());
    !selector.is_empty() && selector.iter().all(|(name, value)| labels.get(name) == Some(value))
}

fn base() -> Vec<Value> {
    let files = deployed().into_iter().filter(|name| name.starts_with("deploy/kustomize/base/") && !name.ends_with("/kustomization.yaml"));
    files.flat_map(|name| yaml(&name, &text(&name))).collect()
}

fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("there is no {kind} {name}"))
}

/// Pods of the base: the object that makes them, and their specification.
fn pods(objects: &[Value]) -> Vec<(&str, &Value)> {
    let made = objects.iter().filter(|object| ["Deployment", "DaemonSet"].iter().any(|kind| object["kind"] == *kind));
    made.map(|object| (object["metadata"]["name"].as_str().unwrap(), &object["spec"]["template"]["spec"])).collect()
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn words(value: &Value) -> Vec<String> {
    items(value).iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// Panics unless this is a command of one of our programs.
pub fn is_command(words: &[String]) {
    let line = words.join(" ");
    Helps::default().check(&line).unwrap_or_else(|why| panic!("{line}: {why}"));
}

#[test]
fn selectors_find_the_pods_and_every_program_has_its_policy() {
    let objects = base();
    for (name, _) in pods(&objects) {
        let labels = |kind: &str| &object(&objects, kind, name)["spec"]["template"]["metadata"]["labels"];
        let kind = if name == "pf-agent" { "DaemonSet" } else { "Deployment" };
        assert!(selects(&object(&objects, kind, name)["spec"]["selector"]["matchLabels"], labels(kind)), "{name}");
        let policy = &object(&objects, "NetworkPolicy", name)["spec"];
        assert!(selects(&policy["podSelector"]["matchLabels"], labels(kind)), "{name}");
        assert_eq!(words(&policy["policyTypes"]), ["Ingress", "Egress"], "{name}");
    }
    let registry = &object(&objects, "Deployment", "pf-registry")["spec"]["template"]["metadata"]["labels"];
    assert!(selects(&object(&objects, "Service", "pf-registry")["spec"]["selector"], registry));
    assert!(selects(&object(&objects, "PodDisruptionBudget", "pf-registry")["spec"]["selector"]["matchLabels"], registry));
    // The agent reaches the registry, at the port of its pods.
    let egress = &object(&objects, "NetworkPolicy", "pf-agent")["spec"]["egress"];
    let to_registry = items(egress).iter().find(|rule| items(&rule["to"]).iter().any(|to| selects_pods(to, registry))).expect("a rule");
    assert_eq!(to_registry["ports"][0]["port"], 5077);
}

fn selects_pods(to: &Value, labels: &Value) -> bool {
    to["namespaceSelector"].is_null() && to["podSelector"]["matchLabels"].is_object() && selects(&to["podSelector"]["matchLabels"], labels)
}

#[test]
fn probes_are_routes_or_commands_and_ports_and_volumes_are_there() {
    let (objects, routes) = (base(), serde_json::from_str::<Value>(&text("registry/openapi.json")).unwrap());
    let mut probes = BTreeSet::new();
    for (name, pod) in pods(&objects) {
        let volumes: BTreeSet<&str> = items(&pod["volumes"]).iter().map(|volume| volume["name"].as_str().unwrap()).collect();
        let mut mounted = BTreeSet::new();
        for container in items(&pod["initContainers"]).iter().chain(items(&pod["containers"])) {
            mounted.extend(items(&container["volumeMounts"]).iter().map(|mount| mount["name"].as_str().unwrap()));
            let confined = &container["securityContext"];
            assert!(confined["readOnlyRootFilesystem"] == true && confined["allowPrivilegeEscalation"] == false, "{name}: {confined}");
            assert_eq!(words(&confined["capabilities"]["drop"]), ["ALL"], "{name}");
        }
        assert_eq!(volumes, mounted, "{name}: volumes and mounts");
        let container = &pod["containers"][0];
        let ports: Vec<&Value> = items(&container["ports"]).iter().map(|port| &port["name"]).collect();
        for probe in
            ["startupProbe", "livenessProbe", "readinessProbe"].iter().map(|probe| &container[*probe]).filter(|probe| !probe.is_null())
        {
            if let Some(path) = probe["httpGet"]["path"].as_str() {
                assert!(routes["paths"][path]["get"].is_object(), "{name}: {path} is no route");
                assert!(ports.contains(&&probe["httpGet"]["port"]), "{name}: {probe}");
                probes.insert(path.to_owned());
            } else {
                is_command(&words(&probe["exec"]["command"]));
                probes.insert(words(&probe["exec"]["command"]).join(" "));
            }
            assert!(probe["timeoutSeconds"].is_null() || probe["timeoutSeconds"].as_u64() >= Some(5), "{name}: {probe}");
        }
        is_command(&[vec![name.to_owned()], words(&container["args"])].concat());
        let nobody = if name == "pf-agent" { &container["securityContext"] } else { &pod["securityContext"] };
        assert!(nobody["runAsNonRoot"] == true && nobody["runAsUser"] == 65532, "{name}: {nobody}");
        assert!(container["resources"]["limits"]["memory"].is_string(), "{name}");
    }
    let expected = ["/livez", "/readyz", "pf-agent health"].map(str::to_owned);
    assert_eq!(probes, expected.into());
    let service = &object(&objects, "Service", "pf-registry")["spec"]["ports"][0];
    assert_eq!(
        service["targetPort"],
        object(&objects, "Deployment", "pf-registry")["spec"]["template"]["spec"]["containers"][0]["ports"][0]["name"]
    );
}

#[test]
fn pods_get_the_time_that_their_programs_take_to_stop() {
    let grace = |settings: &str| -> u64 {
        let settings = text(settings);
        settings.lines().find_map(|line| line.strip_prefix("shutdown-grace = ")).unwrap().parse().unwrap()
    };
    let objects = base();
    let pod = |kind: &str, name: &str| object(&objects, kind, name)["spec"]["template"]["spec"].clone();
    let (registry, agent) = (pod("Deployment", "pf-registry"), pod("DaemonSet", "pf-agent"));
    let before = registry["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().unwrap();
    // As in the units: docs/service.md.
    assert!(registry["terminationGracePeriodSeconds"].as_u64().unwrap() > before + 2 * grace("registry/pf-registry.toml") + 2);
    assert!(agent["terminationGracePeriodSeconds"].as_u64().unwrap() > grace("capture-agent/pf-agent.toml") + 10);
    let compose = text("deploy/compose/compose.yaml");
    let limit: u64 = compose.split("stop_grace_period: ").nth(1).unwrap().split('s').next().unwrap().parse().unwrap();
    assert!(limit > 2 * grace("registry/pf-registry.toml") + 2);
}

/// The variables that a container itself sets.
fn environment(container: &Value) -> Environment {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    // The name of the node is known to its pods only.
    let given = items(&container["env"]).iter().filter(|variable| variable.get("valueFrom").is_none());
    given.map(|variable| (text(&variable["name"]), text(&variable["value"]))).collect()
}

/// Lines `NAME=value`.
fn lines(text: &str) -> Environment {
    let pairs = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[test]
fn the_registry_starts_with_the_environment_of_its_pods_and_is_healthy() {
    let (objects, dir) = (base(), tempfile::tempdir().unwrap());
    let container = &object(&objects, "Deployment", "pf-registry")["spec"]["template"]["spec"]["containers"][0];
    let example = &yaml("example", &text("deploy/kustomize/example/kustomization.yaml"))[0];
    let settings =
        items(&example["configMapGenerator"][0]["literals"]).iter().map(|line| line.as_str().unwrap()).collect::<Vec<_>>().join("\n");
    let secrets = text("deploy/kustomize/example/secrets.env");
    // Where the manifests take them from.
    for source in ["configMapRef", "secretRef"] {
        assert!(items(&container["envFrom"]).iter().any(|from| from[source]["name"] == "pf-registry"), "{source}");
    }
    let given = [environment(container), lines(&settings), lines(&secrets)].concat();
    let s3 = s3::Server::shared();
    let (certificate, key) = Authority::new().certificate(&["pf-registry"]).write(dir.path());
    let s3_is = |name: &str| s3.env().into_iter().find(|(there, _)| there == name).unwrap().1;
    let mut environment = replaced(
        &given,
        &[
            ("PF_REGISTRY_LISTEN", format!("{}:0", own_address())),
            ("PF_REGISTRY_DATABASE", postgres::database()),
            ("PF_REGISTRY_STORAGE", format!("s3://{}/registry", s3.bucket())),
            ("PF_REGISTRY_TLS_CERT", certificate.display().to_string()),
            ("PF_REGISTRY_TLS_KEY", key.display().to_string()),
            ("AWS_ACCESS_KEY_ID", s3_is("AWS_ACCESS_KEY_ID")),
            ("AWS_SECRET_ACCESS_KEY", s3_is("AWS_SECRET_ACCESS_KEY")),
            ("AWS_REGION", s3_is("AWS_REGION")),
        ],
    );
    // The example has it as a comment.
    assert!(text("deploy/kustomize/example/kustomization.yaml").contains("# - AWS_ENDPOINT_URL="));
    environment.extend(s3.env().into_iter().filter(|(name, _)| ["AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP"].contains(&name.as_str())));
    let registry = Running::start("pf-registry", &["serve"], &environment);
    let address = registry.line.strip_prefix("listening on https://").unwrap_or_else(|| panic!("{}", registry.line)).to_owned();
    let at = replaced(&environment, &[("PF_REGISTRY_LISTEN", address)]);
    let health = run("pf-registry", &["health"], &at);
    assert_eq!((health.status.code(), health.stdout.as_slice()), (Some(0), b"ready\n".as_slice()), "{health:?}");
    // As it is given to the pods, it may listen for other machines.
    let listed = run("pf-registry", &["token", "list"], &replaced(&environment, &[("PF_REGISTRY_LISTEN", "0.0.0.0:5077".to_owned())]));
    assert!(listed.status.success(), "{listed:?}");
}

#[test]
fn the_agent_starts_with_the_environment_of_its_pods_and_is_healthy() {
    let (objects, dir) = (base(), tempfile::tempdir().unwrap());
    let pod = &object(&objects, "DaemonSet", "pf-agent")["spec"]["template"]["spec"];
    let path = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(dir.path().join("token"), "a token\n").unwrap();
    Authority::new().write(dir.path().join("ca.crt"));
    let environment = replaced(
        &environment(&pod["containers"][0]),
        &[
            ("PF_AGENT_DATA", path("data")),
            ("PF_AGENT_SOCKET", path("agent.sock")),
            ("PF_AGENT_ENGINE_SOCKET", path("engines.sock")),
            ("PF_AGENT_TOKEN_FILE", path("token")),
            ("PF_AGENT_TLS_CA", path("ca.crt")),
        ],
    );
    let agent = Running::start("pf-agent", &["serve"], &environment);
    assert!(agent.line.contains(&path("engines.sock")), "{}", agent.line);
    let health = run("pf-agent", &["health"], &environment);
    assert_eq!((health.status.code(), health.stdout.as_slice()), (Some(0), b"ready\n".as_slice()), "{health:?}");
    // The folders that the first container makes are those that the agent writes to.
    let made = words(&pod["initContainers"][0]["command"]);
    let hosts: Vec<&str> = items(&pod["volumes"]).iter().filter_map(|volume| volume["hostPath"]["path"].as_str()).collect();
    assert!(hosts.len() == 2 && hosts.iter().all(|folder| made.iter().any(|word| word == folder)), "{made:?} {hosts:?}");
}
