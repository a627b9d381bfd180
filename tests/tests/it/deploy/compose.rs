//! The compose file: its registries start with their environment, and serve one store.

use super::files::{interpolated, text, yaml};
use super::kubernetes::is_command;
use super::programs::{Environment, replaced, run};
use pfr_testkit::{postgres, s3};
use pfr_tests::{Pf, Registry, Shape, SnapshotDir};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

pub const FILE: &str = "deploy/compose/compose.yaml";

/// The compose file with the variables of an `.env`.
pub struct Compose {
    file: Value,
}

impl Compose {
    /// With these variables, besides passwords that every `.env` has.
    pub fn read(variables: &[(&'static str, String)]) -> Self {
        let mut all = BTreeMap::from(["POSTGRES_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY"].map(|name| (name, "hush".to_owned())));
        all.extend(variables.iter().cloned());
        Self { file: yaml(FILE, &interpolated(&text(FILE), &all)).remove(0) }
    }

    pub fn service(&self, name: &str) -> &Value {
        let service = &self.file["services"][name];
        assert!(service.is_object(), "there is no service {name}");
        service
    }

    pub fn environment(&self, service: &str) -> Environment {
        let variables = self.service(service)["environment"].as_object().unwrap();
        // Anything but text is written as compose would not.
        variables
            .iter()
            .map(|(name, value)| (name.clone(), value.as_str().unwrap_or_else(|| panic!("{name}: {value}")).to_owned()))
            .collect()
    }

    /// The words of a list.
    pub fn list(&self, service: &str, key: &str) -> Vec<String> {
        let words = self.service(service)[key].as_array().unwrap_or_else(|| panic!("{service} has no list {key}"));
        words.iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    }

    /// The environment of a registry, with database and bucket of these servers.
    pub fn registry(&self, service: &str, database: String, s3: &s3::Server) -> Environment {
        let servers = s3.env();
        let mut values = vec![("PF_REGISTRY_DATABASE", database)];
        values.extend(servers.iter().map(|(name, value)| (name.as_str(), value.clone())));
        replaced(&self.environment(service), &values)
    }
}

/// Starts a registry as the compose file does, on an address of this test.
pub fn start(compose: &Compose, service: &str, environment: &Environment) -> Registry {
    assert_eq!(compose.list(service, "command"), ["serve"]);
    Registry::start_with(false, &[], environment)
}

/// Makes a token as the page says, and a host that is logged in.
pub fn logged_in(url: &str, environment: &Environment) -> Pf {
    let made = run("pf-registry", &["token", "create", "--label", "operator", "--scope", "*:pull,push,delete,admin"], environment);
    assert!(made.status.success(), "{made:?}");
    let pf = Pf::new(url);
    let file = pf.path("token");
    std::fs::write(&file, &made.stdout).unwrap();
    log_in(&pf, &file, url);
    pf
}

/// Stores the token for another address.
pub fn log_in(pf: &Pf, token: &Path, url: &str) {
    pf.run(&["login", url, "--token-file", token.to_str().unwrap()]).ok();
}

/// Makes the bucket as the service `bucket` does: by its script, with the real `weed`.
pub fn make_bucket(compose: &Compose, s3: &s3::Server) {
    // The script calls it `weed`; `PF_TEST_WEED` may name a file of another name.
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(s3::find().expect("a SeaweedFS").canonicalize().unwrap(), folder.path().join("weed")).unwrap();
    let entry = compose.list("bucket", "entrypoint");
    let script = compose.list("bucket", "command").remove(0).replace("s3:9333", &s3.master());
    let path = format!("{}:/usr/bin:/bin", folder.path().display());
    let made = Command::new(&entry[0]).args(&entry[1..]).arg(script).env("PATH", path).stdin(Stdio::null()).output().unwrap();
    assert!(made.status.success(), "{made:?}");
}

/// S3 servers refuse some names of buckets. `weed shell` ends with 0 even then, so the script looks
/// at the list.
#[test]
fn the_s3_server_of_the_compose_file_makes_its_bucket() {
    let compose = Compose::read(&[]);
    make_bucket(&compose, &s3::Server::start());
}

#[test]
fn the_registries_of_the_compose_file_serve_one_store_and_either_may_die() {
    let s3 = s3::Server::shared();
    let compose = Compose::read(&[("S3_BUCKET", s3.bucket())]);
    let environment = compose.registry("registry-1", postgres::database(), &s3);
    assert_eq!(compose.environment("registry-1"), compose.environment("registry-2"));
    let mut registries = ["registry-1", "registry-2"].map(|name| start(&compose, name, &environment));
    // With the environment as it is they may listen for other machines: they start behind a proxy.
    let mut pf = logged_in(&registries[0].url(), &environment);
    log_in(&pf, &pf.path("token"), &registries[1].url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..50).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "team/agent:first"]).ok();
    pf.talk_to(&registries[1].url());
    pf.run(&["verify", "team/agent:first"]).ok();
    let health = |registry: &Registry| {
        let at = replaced(&environment, &[("PF_REGISTRY_LISTEN", registry.address().to_owned())]);
        let test = compose.service("registry-1")["healthcheck"]["test"].as_array().unwrap();
        let words: Vec<&str> = test.iter().map(|word| word.as_str().unwrap()).collect();
        assert_eq!(words[0], "CMD");
        run(words[1], &words[2..], &at).status.code()
    };
    registries[0].kill();
    assert_eq!([&registries[0], &registries[1]].map(health), [Some(7), Some(0)]);
    pf.run(&["tag", "team/agent:first", "second"]).ok();
    registries[0].restart();
    pf.talk_to(&registries[0].url());
    assert_eq!(pf.tags("team/agent").len(), 2);
}

#[test]
fn only_the_registries_reach_both_the_proxy_and_the_database() {
    let compose = Compose::read(&[]);
    for (service, networks) in [
        ("proxy", &["front"][..]),
        ("registry-1", &["front", "back"]),
        ("registry-2", &["front", "back"]),
        ("postgres", &["back"]),
        ("s3", &["back"]),
        ("bucket", &["back"]),
    ] {
        assert_eq!(compose.list(service, "networks"), networks, "{service}");
        let is_public = !compose.service(service)["ports"].is_null();
        assert_eq!(is_public, service == "proxy", "{service}: ports");
    }
    assert_eq!(compose.file["networks"]["back"]["internal"], true);
    assert_eq!(compose.file["services"].as_object().unwrap().len(), 6);
    // The proxy asks the names of the registries, at the port where they listen.
    let registries = compose.environment("proxy").into_iter().find(|(name, _)| name == "PF_REGISTRIES").unwrap().1;
    assert_eq!(registries, "registry-1:5077 registry-2:5077");
    let variables: BTreeMap<String, String> = compose.environment("registry-1").into_iter().collect();
    assert_eq!(variables["PF_REGISTRY_LISTEN"], "0.0.0.0:5077");
    // The keys of the registries are those that the S3 server accepts.
    let identities: Value = serde_json::from_str(compose.file["configs"]["s3"]["content"].as_str().unwrap()).unwrap();
    let keys = &identities["identities"][0]["credentials"][0];
    assert_eq!(
        (&keys["accessKey"], &keys["secretKey"]),
        (&variables["AWS_ACCESS_KEY_ID"].as_str().into(), &variables["AWS_SECRET_ACCESS_KEY"].as_str().into())
    );
    is_command(&[vec!["pf-registry".to_owned()], compose.list("registry-1", "command")].concat());
}

/// The page and the file name these lines for a database or a bucket elsewhere.
#[test]
fn without_its_database_or_bucket_no_service_waits_for_one_that_is_gone() {
    let full = Compose::read(&[]).file;
    let services = |file: &Value| file["services"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let waited_for = |file: &Value| -> Vec<(String, String)> {
        let all = file["services"].as_object().unwrap().iter();
        let on = |service: &Value| service["depends_on"].as_object().into_iter().flat_map(|on| on.keys().cloned()).collect::<Vec<_>>();
        all.flat_map(|(name, service)| on(service).into_iter().map(move |other| (name.clone(), other))).collect()
    };
    for gone in [&["postgres"][..], &["s3", "bucket"], &["postgres", "s3", "bucket"]] {
        let mut file = full.clone();
        for name in gone {
            file["services"].as_object_mut().unwrap().remove(*name).unwrap();
            for registry in ["registry-1", "registry-2"] {
                file["services"][registry]["depends_on"].as_object_mut().unwrap().remove(*name);
            }
        }
        let left = services(&file);
        let lost: Vec<_> = waited_for(&file).into_iter().filter(|(_, other)| !left.contains(other)).collect();
        assert!(lost.is_empty(), "without {gone:?}: {lost:?}");
    }
    // Only the registries wait for them, as the page says.
    let outside = |(name, other): &(String, String)| !name.starts_with("registry-") && ["postgres", "s3"].contains(&other.as_str());
    let others: Vec<_> = waited_for(&full).into_iter().filter(outside).collect();
    assert_eq!(others, [("bucket".to_owned(), "s3".to_owned())]);
    let page = text("docs/deploy.md");
    assert!(page.contains("below `depends_on` of `x-registry`") && text(FILE).contains("`depends_on` of `x-registry`"));
}

#[test]
fn the_example_of_an_environment_has_every_variable_of_the_compose_file() {
    let (file, example) = (text(FILE), text("deploy/compose/env.example"));
    let used = file.split("${").skip(1).filter_map(|part| part.split([':', '}']).next());
    let listed = |name: &str| example.lines().any(|line| line.starts_with(&format!("{name}=")));
    let missing: Vec<&str> = used.filter(|name| !listed(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    // Defaults are the same in both.
    for line in example.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, value)) = line.split_once('=') else { continue };
        assert!(file.contains(&format!("${{{name}:?")) || file.contains(&format!("${{{name}:-{value}}}")), "{line}");
    }
}
