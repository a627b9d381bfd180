//! Servers of llama.cpp that hang, die, lie or are busy: each has an answer, and no file stays.

use crate::common::llama::Fault;
use crate::common::{config, until};
use crate::llama::{Rig, code};
use pfr_agent::Agent;
use pfr_schema::ErrorCode;
use pfr_schema::agent::EngineState;
use pfr_testkit::disk::SmallDisk;
use pfr_testkit::llama::{File, tokens};
use std::time::Duration;

async fn rig() -> Rig {
    let rig = Rig::start().await;
    rig.a.put(0, &File::dense(tokens(40), 2, 64));
    rig
}

#[tokio::test(flavor = "multi_thread")]
async fn each_failure_of_a_save_has_a_name_and_leaves_no_file() {
    let rig = rig().await;
    for (fault, expected, word) in [
        (Fault::Dies, ErrorCode::EngineLost, "llama-server at http"),
        (Fault::Short, ErrorCode::EngineRefused, "says that it wrote"),
        (Fault::Fails, ErrorCode::EngineRefused, "Unable to save slot"),
        (Fault::Elsewhere, ErrorCode::Unavailable, "--slot-save-path"),
        (Fault::Restarts, ErrorCode::EngineLost, "started anew"),
    ] {
        rig.a.fault(fault);
        let refused = rig.snapshot("a", Some("0"), "one").await;
        assert_eq!(code(&refused), expected, "{fault:?}: {refused:?}");
        assert!(refused.unwrap_err().to_string().contains(word), "{fault:?}");
        assert!(rig.a.files().is_empty(), "{fault:?}: {:?}", rig.a.files());
    }
    rig.a.fault(Fault::None);
    rig.snapshot("a", Some("0"), "one").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_folder_of_the_server_is_told_by_name_and_nothing_stays_there() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(&dir.path().join("slots"), 4) else { return };
    let rig = Rig::in_folder(dir).await;
    rig.a.put(0, &File::dense(tokens(40), 2, 64));
    rig.a.put(1, &File::dense(tokens(400), 8, 1024));
    let full = rig.snapshot("a", Some("1"), "large").await;
    assert_eq!(code(&full), ErrorCode::StorageFull, "{full:?}");
    assert!(full.unwrap_err().to_string().contains("slots"), "it names the folder");
    assert!(rig.a.files().is_empty(), "{:?}", rig.a.files());
    // A smaller slot is captured, and a restore wants room before it writes.
    rig.snapshot("a", Some("0"), "small").await.unwrap();
    let full = rig.restore("b", Some("2"), "small").await;
    assert_eq!(code(&full), ErrorCode::NoRoom, "{full:?}");
    assert!(rig.b.files().is_empty() && rig.b.state.lock().restored.is_empty());
    // The folder can be removed only without the disk.
    let dir = rig.dir;
    drop(disk);
    drop(dir);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_hangs_is_given_up_and_its_late_file_is_removed() {
    let rig = rig().await;
    rig.a.fault(Fault::Hangs);
    let lost = rig.snapshot("a", Some("0"), "one").await;
    assert_eq!(code(&lost), ErrorCode::EngineLost);
    assert!(lost.unwrap_err().to_string().contains("did not answer save"));
    // The save goes on when its request has ended.
    until("the late file is there", || !rig.a.files().is_empty()).await;
    until("the late file is gone", || rig.a.files().is_empty()).await;
    rig.a.fault(Fault::None);
    rig.snapshot("a", Some("0"), "one").await.unwrap();
    rig.a.fault(Fault::Hangs);
    assert_eq!(code(&rig.restore("a", Some("1"), "one").await), ErrorCode::EngineLost);
    until("no file is there", || rig.a.files().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_slot_is_waited_for_and_then_refused() {
    let rig = rig().await;
    rig.a.state.lock().busy = Some(0);
    let refused = rig.snapshot("a", Some("0"), "one").await;
    assert_eq!(code(&refused), ErrorCode::EngineBusy);
    assert!(refused.unwrap_err().to_string().contains("a request in slot 0"));
    let state = rig.a.state.clone();
    let done = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        state.lock().busy = None;
    });
    rig.snapshot("a", Some("0"), "one").await.unwrap();
    done.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_does_not_hold_the_state_is_no_restore() {
    let rig = rig().await;
    rig.snapshot("a", Some("0"), "one").await.unwrap();
    rig.b.fault(Fault::Used);
    let refused = rig.restore("b", None, "one").await;
    assert_eq!(code(&refused), ErrorCode::LiveMismatch);
    assert!(refused.unwrap_err().to_string().contains("V in layer 1"));
    assert!(rig.b.files().is_empty());
    assert_eq!(rig.host.agent.llamas().list()[1].restores, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_that_share_a_folder_leave_each_others_files_and_remove_their_own() {
    let rig = rig().await;
    let dir = tempfile::tempdir().unwrap();
    let with = |name: &str| pfr_agent::Config { llama: vec![rig.a.settings(name)], ..config(dir.path()) };
    drop(Agent::open(with("c")).await.unwrap());
    let id = std::fs::read_to_string(dir.path().join("llama-id")).unwrap();
    let folder = rig.a.state.lock().folder.clone();
    // As two agents leave them that were killed.
    let own = folder.join(format!("pf-{id}-0.bin"));
    for file in [&own, &folder.join("pf-0123456789ab-0.bin"), &folder.join("saved-by-hand.bin")] {
        std::fs::write(file, "x").unwrap();
    }
    let second = Agent::open(with("c")).await.unwrap();
    until("the agent has removed its file", || !own.exists()).await;
    rig.snapshot("a", Some("0"), "one").await.unwrap();
    let mut left = rig.a.files();
    left.sort();
    assert_eq!(left, ["pf-0123456789ab-0.bin", "saved-by-hand.bin"]);
    drop(second);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_is_listed_with_the_reason() {
    let rig = rig().await;
    rig.a.state.lock().model = "relative.gguf".into();
    let refused = rig.snapshot("a", Some("0"), "one").await;
    assert!(refused.unwrap_err().to_string().contains("\"model\" in the agent's settings"));
    let states = || rig.host.agent.llamas().list().into_iter().map(|info| info.state).collect::<Vec<_>>();
    until("the reason is listed", || matches!(&states()[0], EngineState::Incomplete { missing } if missing.contains("relative.gguf")))
        .await;
}
