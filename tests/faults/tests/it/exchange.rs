//! Copies, exports and imports whose programs and registries are killed: the same command again
//! does the rest, and what was acknowledged is complete, also in an encrypted domain.

use pfr_tests::{Pf, Registry, Shape, SnapshotDir, seed};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

/// Attempts of a command that may be killed.
const RISKY: usize = 2;

/// Two registries, of which the second one encrypts, and a client with a directory of exports.
struct Exchange {
    random: StdRng,
    registries: [Registry; 2],
    pf: Pf,
    kills: u64,
}

impl Exchange {
    /// Runs a command, which may be killed, until it succeeds.
    fn finish(&mut self, arguments: &[&str]) {
        for attempt in 0.. {
            let mut child = self.pf.command(arguments).spawn().unwrap();
            if attempt < RISKY {
                std::thread::sleep(Duration::from_millis(self.random.random_range(1..120)));
                match self.random.random_range(0..3) {
                    0 => {
                        drop(child.kill());
                        self.kills += 1;
                    }
                    1 => {
                        let chosen = self.random.random_range(0..2);
                        self.registries[chosen].restart();
                        self.kills += 1;
                    }
                    _ => {}
                }
            }
            let output = child.wait_with_output().unwrap();
            if output.status.success() {
                return;
            }
            assert!(attempt < RISKY, "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }

    /// That a reference leads to this snapshot, and every byte of it is there.
    fn has(&self, reference: &str, digest: &str) {
        let found = self.pf.json(&["inspect", reference]);
        assert_eq!(found["summary"]["digest"], digest, "{reference}");
        self.pf.run(&["verify", reference]).ok();
    }
}

fn survives(kills_wanted: u64) {
    let home = tempfile::tempdir().unwrap();
    let key = home.path().join("domains.key");
    std::fs::write(&key, format!("{}=\n", "A".repeat(43))).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let encrypts = ["--encrypt-new-domains", "--key-file", key.to_str().unwrap()];
    let registries = [Registry::over(&home.path().join("a/data"), &[]), Registry::over(&home.path().join("b/data"), &encrypts)];
    let pf = Pf::new(&registries[0].url());
    let mut exchange = Exchange { random: StdRng::seed_from_u64(seed()), registries, pf, kills: 0 };
    let (place, other) = (exchange.pf.path("exports").display().to_string(), exchange.registries[1].url());
    let (mut told, mut round) = (Vec::new(), 0);
    while exchange.kills < kills_wanted {
        round += 1;
        let numbers: Vec<u64> = (0..40).map(|_| exchange.random.random_range(0..200)).collect();
        let dir = SnapshotDir::write(&exchange.pf.path("dir"), Shape::SMALL, &numbers);
        let source = format!("team/agent:t{round}");
        let digest = exchange.pf.run(&["push", dir.arg(), &source]).ok().last_line().to_owned();
        let (copied, imported) = (format!("{other}/team/copied:t{round}"), format!("{other}/team/imported:t{round}"));
        exchange.finish(&["copy", &source, &copied]);
        exchange.has(&copied, &digest);
        exchange.finish(&["export", &source, &place]);
        exchange.finish(&["import", &place, &imported, "--from", &source]);
        exchange.has(&imported, &digest);
        told.extend([(copied, digest.clone()), (imported, digest)]);
    }
    exchange.registries[1].restart();
    for (reference, digest) in &told {
        exchange.has(reference, digest);
    }
    println!("{round} rounds, {} kills", exchange.kills);
}

#[test]
fn copies_exports_and_imports_are_finished_after_kills() {
    survives(3);
}

mod long {
    #[test]
    fn copies_exports_and_imports_are_finished_after_kills() {
        super::survives(60);
    }
}
