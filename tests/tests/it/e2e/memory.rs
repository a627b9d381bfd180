//! Memory is bounded whatever the size of snapshots and blobs, as the operating system counts it.

use pfr_schema::{Algorithm, Hasher};
use pfr_tests::{Pf, Registry, Shape, SnapshotDir};
use std::io::{BufReader, Write as _};

const LIMIT: u64 = 256 << 20;

fn check(what: &str, registry: &Registry, peaks: &[(&str, u64)]) {
    let mib = |bytes: u64| bytes >> 20;
    println!(
        "{what}: registry {} MiB, {:?} MiB",
        mib(registry.peak_memory()),
        peaks.iter().map(|(n, p)| (*n, mib(*p))).collect::<Vec<_>>()
    );
    assert!(registry.peak_memory() < LIMIT, "{what}: the registry took {} MiB", mib(registry.peak_memory()));
    for (name, peak) in peaks {
        assert!(*peak > 1 << 20, "{what}: {name} was not measured");
        assert!(*peak < LIMIT, "{what}: {name} took {} MiB", mib(*peak));
    }
}

/// Each page is two blobs of 180,224 bytes.
fn snapshot_of(pages: u64) {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINYLLAMA, &(0..pages).collect::<Vec<_>>());
    check(&format!("{pages} pages"), &registry, &transfer(&pf, &dir));
}

/// Pushes a directory, pulls it into a store and into the directory `out`. Returns the peak memory
/// of each.
fn transfer(pf: &Pf, dir: &SnapshotDir) -> [(&'static str, u64); 3] {
    let push = pf.run(&["push", dir.arg(), "a:t"]).ok().peak_memory;
    // No more than two copies at a time: the disk of a test machine is small.
    std::fs::remove_dir_all(&dir.path).unwrap();
    let pull = pf.run(&["pull", "a:t"]).ok().peak_memory;
    std::fs::remove_dir_all(pf.path("store")).unwrap();
    let directory = pf.run(&["pull", "a:t", pf.path("out").to_str().unwrap()]).ok().peak_memory;
    [("push", push), ("pull", pull), ("pull into a directory", directory)]
}

fn blob_of(bytes: u64) {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINY, &[1, 2]);
    std::fs::create_dir(dir.path.join("attachments")).unwrap();
    let mut file = std::fs::File::create(dir.path.join("attachments/large")).unwrap();
    let piece = Shape::of(pfr_schema::geometry::Geometry { head_dim: 1 << 17, ..Shape::TINY.geometry }).page(7);
    let (mut written, mut hasher) = (0_u64, Hasher::new(Algorithm::Sha256));
    while written < bytes {
        for part in [&written.to_le_bytes()[..], &piece] {
            file.write_all(part).unwrap();
            hasher.update(part);
            written += part.len() as u64;
        }
    }
    drop(file);
    let expected = hasher.finish();
    check(&format!("a blob of {} MiB", bytes >> 20), &registry, &transfer(&pf, &dir));
    let mut hasher = Hasher::new(Algorithm::Sha256);
    let file = std::fs::File::open(pf.path("out").join("attachments/large")).unwrap();
    std::io::copy(&mut BufReader::with_capacity(1 << 20, file), &mut hasher).unwrap();
    assert_eq!(hasher.finish(), expected);
}

#[test]
fn a_snapshot_of_400_megabytes_passes_in_256_mib() {
    snapshot_of(1110);
}

#[test]
fn a_single_blob_of_400_megabytes_passes_in_256_mib() {
    blob_of(400 << 20);
}

mod long {
    use super::{blob_of, snapshot_of};

    #[test]
    fn a_snapshot_of_one_and_a_half_gigabytes_passes_in_256_mib() {
        snapshot_of(4096);
    }

    #[test]
    fn a_single_blob_of_three_gigabytes_passes_in_256_mib() {
        blob_of(3 << 30);
    }
}
