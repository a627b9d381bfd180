//! A full disk: a clear error, reads go on, and when there is room again the same push succeeds.

use pfr_tests::{Pf, Registry, Shape, SmallDisk, SnapshotDir};

#[test]
fn a_full_disk_is_said_clearly_reads_go_on_and_a_retry_succeeds() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 32) else {
        // Not a silent pass: the name of what did not run is in the output, and CI runs as root.
        println!("not run: a full disk needs the right to mount a tmpfs");
        return;
    };
    let ballast = disk.path().join("ballast");
    let registry = Registry::over(&disk.path().join("data"), &[]);
    let pf = Pf::new(&registry.url());
    let small = SnapshotDir::write(&pf.path("small"), Shape::SMALL, &(0..100).collect::<Vec<_>>());
    let large = SnapshotDir::write(&pf.path("large"), Shape::SMALL, &(1000..1500).collect::<Vec<_>>());
    pf.run(&["push", small.arg(), "a:small"]).ok();
    std::fs::write(&ballast, vec![1; 18 << 20]).unwrap();
    let before = pf.visible();
    let output = pf.run(&["push", large.arg(), "a:large"]);
    assert_eq!(output.code, 7, "{output:?}");
    assert!(output.stderr.contains("full"), "{output:?}");
    assert_eq!(pf.visible(), before);
    pf.run(&["verify", "a:small"]).ok();
    pf.run(&["pull", "a:small"]).ok();
    std::fs::remove_file(&ballast).unwrap();
    pf.run(&["push", large.arg(), "a:large"]).ok();
    pf.run(&["verify", "a:large"]).ok();
}
