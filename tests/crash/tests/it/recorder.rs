//! The recorder sees what programs do, whichever way they do it.

use pfr_crash::record::{Recorder, is_possible};
use pfr_crash::trace::Trace;
use pfr_tests::skip;
use std::path::Path;
use std::process::Command;

/// What a shell script does in an empty directory; none where this process may not trace others.
fn recorded(script: &str) -> Option<Result<Trace, String>> {
    if !is_possible() {
        skip("ptrace", "this process may not trace its children");
        return None;
    }
    let home = tempfile::tempdir().unwrap();
    let recorder = Recorder::new(home.path());
    let mut command = Command::new("sh");
    command.args(["-e", "-c", script]).current_dir(home.path());
    recorder.start(command).unwrap().wait().unwrap();
    let trace = recorder.finish();
    // All operations, in order, give what is there.
    if let Ok(trace) = &trace {
        let mut disk = trace.before.clone();
        trace.ops.iter().for_each(|op| disk.apply(&op.action));
        let found: Vec<_> = disk.files().into_iter().map(|(path, bytes)| (path, bytes.to_vec())).collect();
        assert_eq!(found, pfr_tests::files(home.path()), "the trace is not what was done");
    }
    Some(trace)
}

#[test]
fn a_trace_played_again_gives_what_the_program_left() {
    let script = "
        mkdir -p a/b; echo one >a/b/f; echo two >>a/b/f; cp a/b/f copy; truncate -s 3 copy; ln copy hard; mv a/b/f a/g; mv hard copy2
        (echo three >child) & wait; rm a/g; echo four >a/g; rmdir a/b; ln -s nowhere a/link; sync a/g; sync";
    let Some(trace) = recorded(script) else { return };
    let trace = trace.unwrap();
    let words: Vec<String> = (0..trace.ops.len()).map(|at| trace.words(at)).collect();
    for expected in ["name a/b/f", "resize copy to 3", "rename hard to copy2", "remove a/b/f", "name child", "sync a/g", "sync everything"]
    {
        assert!(words.iter().any(|word| word.ends_with(expected)), "{expected:?} is not in {words:#?}");
    }
    assert!(trace.syncs().all(|(_, path, _)| path == Path::new("a/g") || path == Path::new("")));
}

#[test]
fn what_is_not_modelled_fails_the_recording() {
    let Some(trace) = recorded("mkfifo pipe") else { return };
    assert!(trace.unwrap_err().starts_with("not modelled"));
}
