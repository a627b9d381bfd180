//! Domains over every pair of metadata and storage: domains share nothing, other replicas see that
//! a domain was deleted, a killed registry finishes what it began, and a domain moves to another
//! registry.

use super::backend::{Backend, Database, Packs, assert_same};
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, files, seed, wait_for};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use std::time::Duration;

/// A client with a home directory of its own, whose registry is this domain.
fn host(registry: &Registry, domain: &str) -> Pf {
    Pf::new(&format!("{}/domains/{domain}", registry.url()))
}

fn create(registry: &Registry, domain: &str) {
    let answer = registry.ask("PUT", &format!("/v1/domains/{domain}"));
    assert!(answer.starts_with("HTTP/1.1 20"), "{answer}");
}

fn is_unknown(registry: &Registry, domain: &str) -> bool {
    registry.ask("GET", &format!("/domains/{domain}/v1/repositories")).contains("\"code\":\"domain_unknown\"")
}

/// Waits until a domain is deleted to its last byte, and its name is free.
fn wait_until_gone(registry: &Registry, domain: &str) {
    wait_for("the domain to be gone", 60, || {
        let answer = registry.ask("GET", &format!("/v1/domains/{domain}"));
        assert!(answer.contains("\"deleting\"") || answer.contains("\"domain_unknown\""), "{answer}");
        answer.starts_with("HTTP/1.1 404").then_some(())
    });
}

/// Short leases: a registry deletes the bytes of a deleted domain a second time after the length of
/// a lease, and the tests wait for that.
const OPTIONS: [&str; 4] = ["--lease-seconds", "2", "--gc-interval-seconds", "0"];

fn everyday_use(database: Database, packs: Packs) {
    let backend = Backend::new(database, packs);
    let mut registry = backend.registry(&OPTIONS);
    for domain in ["acme", "b-2"] {
        create(&registry, domain);
    }
    let hosts = [Pf::new(&registry.url()), host(&registry, "acme"), host(&registry, "b-2")];
    let same = SnapshotDir::write(&hosts[0].path("same"), Shape::SMALL, &(0..300).collect::<Vec<_>>());
    for (number, pf) in hosts.iter().enumerate() {
        let pushed = pf.json(&["push", same.arg(), "team/agent:same"]);
        assert!(
            pushed["sent_bytes"].as_u64().unwrap() >= 300 * Shape::SMALL.page_bytes() as u64,
            "domain number {number} shares blobs with another: {pushed}"
        );
        let own = SnapshotDir::write(&pf.path("own"), Shape::SMALL, &(number as u64 * 1000..number as u64 * 1000 + 50).collect::<Vec<_>>());
        pf.run(&["push", own.arg(), "team/agent:own"]).ok();
    }
    registry.restart();
    let own = |pf: &Pf| pf.tags("team/agent")["own"].clone();
    assert!(own(&hosts[0]) != own(&hosts[1]) && own(&hosts[1]) != own(&hosts[2]));
    // A reference may name the domain.
    let reference = format!("{}/domains/acme/team/agent:own", registry.url());
    hosts[0].run(&["pull", &reference, hosts[0].path("out").to_str().unwrap()]).ok();
    assert_same(&hosts[0].path("out"), &hosts[1].path("own"));
    let unknown = host(&registry, "nobody").run(&["ls"]);
    assert!(unknown.code == 5 && unknown.stderr.contains("/domains/NAME"), "{unknown:?}");

    assert!(registry.ask("DELETE", "/v1/domains/acme").starts_with("HTTP/1.1 202"));
    assert!(is_unknown(&registry, "acme"));
    wait_until_gone(&registry, "acme");
    assert!(backend.below("domains/acme").is_empty());
    assert!(!backend.has_tables(registry.data(), "acme") && backend.has_tables(registry.data(), "b-2"));
    for pf in [&hosts[0], &hosts[2]] {
        pf.run(&["verify", "team/agent:same"]).ok();
    }
}

// `.config/nextest.toml` chooses pairs of back ends by these names.

#[test]
fn sqlite_and_a_directory() {
    everyday_use(Database::Sqlite, Packs::Directory);
}

#[test]
fn postgres_and_a_bucket() {
    everyday_use(Database::Postgres, Packs::Bucket);
}

mod long {
    use super::*;

    #[test]
    fn sqlite_and_a_bucket() {
        everyday_use(Database::Sqlite, Packs::Bucket);
    }

    #[test]
    fn postgres_and_a_directory() {
        everyday_use(Database::Postgres, Packs::Directory);
    }

    #[test]
    fn a_killed_registry_finishes_what_it_began() {
        kills(Database::Sqlite, Packs::Directory, 25);
        kills(Database::Postgres, Packs::Bucket, 25);
    }
}

#[test]
fn a_replica_notices_that_another_one_deleted_a_domain() {
    let backend = Backend::new(Database::Postgres, Packs::Bucket);
    let (first, second) = (backend.registry(&OPTIONS), backend.registry(&OPTIONS));
    create(&first, "acme");
    let pf = host(&second, "acme");
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINY, &[1, 2]);
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    assert!(first.ask("DELETE", "/v1/domains/acme").starts_with("HTTP/1.1 202"));
    wait_for("the other replica to notice", 5, || is_unknown(&second, "acme").then_some(()));
    assert_eq!(pf.run(&["push", dir.arg(), "a:t", "--retries", "0"]).code, 5);
    wait_until_gone(&second, "acme");
    // A new domain of the same name is empty on both replicas.
    create(&second, "acme");
    for registry in [&first, &second] {
        assert!(registry.ask("GET", "/domains/acme/v1/repositories").ends_with("{\"repositories\":[]}"));
    }
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    host(&first, "acme").run(&["verify", "a:t"]).ok();
}

/// Kills a registry while it makes a domain and while it deletes one, and checks that the domain
/// can be used in between.
fn kills(database: Database, packs: Packs, rounds: u32) {
    let mut random = StdRng::seed_from_u64(seed());
    let backend = Backend::new(database, packs);
    let mut registry = backend.registry(&OPTIONS);
    let own = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&own.path("dir"), Shape::TINY, &[1, 2, 3]);
    own.run(&["push", dir.arg(), "a:t"]).ok();
    for round in 0..rounds {
        let domain = format!("d{round}");
        for (method, path) in [("PUT", format!("/v1/domains/{domain}")), ("DELETE", format!("/v1/domains/{domain}"))] {
            let wait = Duration::from_micros(random.random_range(0..30_000));
            std::thread::scope(|scope| {
                let address = registry.address().to_owned();
                scope.spawn(move || pfr_tests::ask(&address, method, &path));
                std::thread::sleep(wait);
                registry.restart();
            });
            if method == "PUT" {
                create(&registry, &domain);
                let pf = host(&registry, &domain);
                pf.run(&["push", dir.arg(), "a:t"]).ok();
                pf.run(&["verify", "a:t"]).ok();
            }
        }
        let answer = registry.ask("DELETE", &format!("/v1/domains/{domain}"));
        assert!(answer.starts_with("HTTP/1.1 202") || answer.starts_with("HTTP/1.1 404"), "{answer}");
        assert!(is_unknown(&registry, &domain));
        // The registry is also killed while it deletes the domain's tables and bytes.
        std::thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
        registry.restart();
    }
    for round in 0..rounds {
        let domain = format!("d{round}");
        wait_until_gone(&registry, &domain);
        assert!(backend.below(&format!("domains/{domain}")).is_empty());
        assert!(!backend.has_tables(registry.data(), &domain), "{domain}");
    }
    own.run(&["verify", "a:t"]).ok();
    assert!(!registry.log().contains("code=\"internal\""), "{}", registry.log());
}

#[test]
fn a_killed_registry_finishes_what_it_began() {
    kills(Database::Sqlite, Packs::Directory, 3);
    kills(Database::Postgres, Packs::Bucket, 2);
}

/// Runs a subcommand of `pf-registry` on a data directory.
fn tool(data: &std::path::Path, arguments: &[&str]) -> String {
    let mut command = std::process::Command::new(pfr_tests::binary("pf-registry"));
    let output = command.args(arguments).arg("--data").arg(data).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_domain_moves_to_another_registry_by_a_copy_of_its_folder_and_a_rebuild() {
    let mut registry = Registry::start();
    create(&registry, "acme");
    create(&registry, "empty");
    let pf = host(&registry, "acme");
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..100).collect::<Vec<_>>());
    let digest = pf.run(&["push", dir.arg(), "team/agent:t"]).ok().last_line().to_owned();
    pf.run(&["fork", "team/agent:t", "-n", "2", "--prefix", "f"]).ok();
    registry.kill();

    let there = pf.path("there");
    let packs = registry.data().join("domains/acme/packs");
    for (name, bytes) in files(&packs) {
        let to = there.join("domains/acme/packs").join(name);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::write(to, bytes).unwrap();
    }
    let said = tool(&there, &["rebuild", "--domain", "acme"]);
    assert!(said.contains("1 snapshot and 3 tags"), "{said}");
    let other = Registry::over(&there, &[]);
    let moved = host(&other, "acme");
    assert_eq!(moved.tags("team/agent")["f-2"], digest);
    moved.run(&["pull", "team/agent:t", moved.path("out").to_str().unwrap()]).ok();
    assert_same(&moved.path("out"), &dir.path);
    drop(other);
    for command in [&["fsck", "--domain", "acme"][..], &["scrub", "--domain", "acme", "--full"], &["gc", "--domain", "acme"]] {
        tool(&there, command);
    }

    // The catalogue is lost together with the default domain's tables: a rebuild finds the other
    // domains.
    for file in ["metadata.sqlite", "metadata.sqlite-wal", "metadata.sqlite-shm"] {
        let _ = std::fs::remove_file(registry.data().join(file));
    }
    let said = tool(registry.data(), &["rebuild"]);
    assert!(said.contains("acme: found on the storage") && said.contains("empty: found"), "{said}");
    registry.restart();
    host(&registry, "acme").run(&["verify", "team/agent:t"]).ok();
    assert!(registry.ask("GET", "/domains/empty/v1/repositories").ends_with("{\"repositories\":[]}"));
}
