//! A registry on a disk without space: it starts, and serves what it has.

use pfr_tests::{Pf, Registry, Shape, SmallDisk, SnapshotDir};
use std::io::Write as _;
use std::path::Path;

/// Writes to a file until the disk is full.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
}

#[test]
fn a_registry_killed_on_a_full_disk_starts_again_serves_reads_and_takes_pushes_once_there_is_space() {
    let home = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(&home.path().join("data"), 16) else { return };
    let mut registry = Registry::over(disk.path(), &[]);
    let pf = Pf::new(&registry.url());
    let numbers: Vec<u64> = (0..40).collect();
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &numbers);
    pf.run(&["push", dir.arg(), "a:before"]).ok();
    for start in 0..3 {
        let filler = disk.path().join(format!("fill-{start}"));
        fill(&filler);
        registry.restart();
        pf.run(&["verify", "a:before"]).ok();
        fill(&disk.path().join(format!("more-{start}")));
    }
    for start in 0..3 {
        for name in ["fill", "more"] {
            std::fs::remove_file(disk.path().join(format!("{name}-{start}"))).unwrap();
        }
    }
    let dir = SnapshotDir::write(&pf.path("dir2"), Shape::SMALL, &(20..60).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "a:after"]).ok();
    registry.restart();
    pf.run(&["verify", "a:after"]).ok();
}
