//! The reserve of free space: a push gets no space before it is complete, and it is enough for the
//! work that frees space, also for a store that was stopped.

use super::*;

/// Floor of free bytes on a disk of so many.
const fn floor(total: u64) -> u64 {
    total / 20
}

fn len(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |metadata| metadata.len())
}

/// Sets the length of a file, as if what lies behind it had been freed.
fn cut(file: &Path, bytes: u64) {
    std::fs::File::options().write(true).open(file).unwrap().set_len(bytes).unwrap();
}

/// Lets other programs take or release space, so that `bytes` are free.
fn leave(disk: &Path, bytes: u64) {
    let path = disk.join("ballast");
    let file = std::fs::File::options().create(true).append(true).open(&path).unwrap();
    match available(disk).checked_sub(bytes) {
        Some(more) => (&file).write_all(&vec![1; more as usize]).unwrap(),
        None => file.set_len(len(&path) + available(disk) - bytes).unwrap(),
    }
    assert!(available(disk).abs_diff(bytes) <= 4096, "{} bytes are free, and not {bytes}", available(disk));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_is_refused_while_the_reserve_is_incomplete_and_all_that_comes_back_goes_to_the_reserve() {
    const MIB: u64 = 64;
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), MIB as u32) else { return };
    let mut trial = Trial::on(disk.path(), folder.path(), seed());
    assert!(trial.push(1).await);
    let reserve = trial.registry.data().join("metadata.sqlite-reserve");
    let (whole, floor) = (len(&reserve), floor(MIB << 20));
    assert!(whole >= 1 << 20 && whole < floor, "{whole} bytes of {floor}");

    // A collection has used it, and other programs have taken that space. Less comes back than it
    // had, then just so much that a push would have space without it.
    for (free, refilled) in [(whole / 2, whole / 2), (floor + whole / 2, whole)] {
        cut(&reserve, 0);
        leave(disk.path(), free);
        assert!(!trial.push(1).await, "{free} bytes are free, and the reserve lacks {whole}");
        // It is as long as the database asks for, and that may have grown by some pages.
        assert!(len(&reserve).abs_diff(refilled) <= whole / 4, "{} bytes of {refilled}", len(&reserve));
    }

    // It cannot be grown while a collection is at work. Its space is not given away either.
    cut(&reserve, 0);
    let collecting = std::fs::File::open(&reserve).unwrap();
    collecting.lock_shared().unwrap();
    leave(disk.path(), floor + whole / 2);
    assert!(!trial.push(1).await, "the space of the reserve is given away");
    assert_eq!(len(&reserve), 0);
    drop(collecting);

    // Pushes succeed again once there is space for both, and the reserve is complete before.
    leave(disk.path(), floor + 2 * whole);
    assert!(trial.push(1).await);
    assert!(len(&reserve) >= whole, "{} bytes of {whole}", len(&reserve));
    trial.verify().await;
}

/// Deletions at 0 bytes free that docs/operations.md promises.
const DELETIONS: usize = 100;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_0_bytes_free_a_stopped_store_is_checked_collected_and_started_and_100_snapshots_are_deleted() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 64) else { return };
    let mut trial = Trial::on(disk.path(), folder.path(), seed());
    for _ in 0..DELETIONS + 5 {
        assert!(trial.push(3).await);
    }
    trial.registry.kill();
    for command in ["fsck", "gc"] {
        take_all(disk.path());
        let output = tool(trial.registry.data(), command, &["--json"]).output().unwrap();
        assert!(output.status.success(), "{command}: {output:?}");
    }
    take_all(disk.path());
    trial.registry.restart();
    for number in 0..=DELETIONS {
        let Some((tag, digest)) = trial.told.pop_first() else { panic!("there are some") };
        let deleted = trial.client.delete(format!("{}/snapshots/{digest}", trial.base())).send().await.unwrap();
        assert!(deleted.status().is_success(), "{tag}, after {number} deletions: {}", deleted.text().await.unwrap());
        if number == 0 {
            // That one has truncated the log. Others take its space, and the reserve is as small as
            // that of a new store.
            let reserve = trial.registry.data().join("metadata.sqlite-reserve");
            cut(&reserve, len(&reserve).min(1 << 20));
            take_all(disk.path());
            assert_eq!(available(disk.path()), 0);
        }
    }
    assert!(!trial.push(1).await, "deletions free nothing before a collection");
    trial.verify().await;
    let output = tool(trial.registry.data(), "gc", &["--grace", "0"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(trial.push(1).await, "there is space again, and a push finds none");
    trial.verify().await;
    trial.fsck();
}
