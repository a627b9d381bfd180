use super::*;
use crate::trace::{Op, ROOT, Synced};

const FILE: Node = 1;

fn trace(actions: Vec<Action>) -> Trace {
    let mut before = Disk::default();
    before.add_directory(ROOT);
    before.add_file(FILE, Vec::new());
    let ops = actions.into_iter().map(|action| Op { action, path: "f".into() }).collect();
    Trace { before, ops, mapped: BTreeSet::new() }
}

fn write(offset: u64, text: &str) -> Action {
    Action::Write { file: FILE, offset, bytes: text.as_bytes().into() }
}

fn rename(from: &str, to: &str) -> Action {
    Action::Rename { directory: ROOT, from: from.into(), to: to.into(), node: FILE }
}

fn name(name: &str) -> Action {
    Action::Name { directory: ROOT, name: name.into(), node: Some(FILE), needs: None }
}

/// The possible contents of the file `new` after a power cut at the end; `None` if it is absent.
fn contents(actions: Vec<Action>) -> BTreeSet<Option<String>> {
    let trace = trace(actions);
    let states = States::of(&trace, Bound::LONG, 1, |_| true);
    let content = |state: &State| states.disk(state).files().get(Path::new("new")).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    states.states.iter().filter(|state| states.at(state) == trace.ops.len()).map(content).collect()
}

fn texts(texts: &[Option<&str>]) -> BTreeSet<Option<String>> {
    texts.iter().map(|text| text.map(str::to_owned)).collect()
}

#[test]
fn a_file_renamed_into_place_without_a_sync_may_be_empty_or_absent() {
    let found = contents(vec![name("tmp"), write(0, "ab"), rename("tmp", "new")]);
    assert_eq!(found, texts(&[None, Some(""), Some("\0\0"), Some("ab")]));
}

#[test]
fn a_file_synced_before_its_rename_is_whole_or_absent() {
    let found = contents(vec![name("tmp"), write(0, "ab"), Action::Sync(Synced::File(FILE)), rename("tmp", "new")]);
    assert_eq!(found, texts(&[None, Some("ab")]));
}

#[test]
fn a_file_whose_directory_was_synced_too_is_there() {
    let actions =
        vec![name("tmp"), write(0, "ab"), Action::Sync(Synced::File(FILE)), rename("tmp", "new"), Action::Sync(Synced::Directory(ROOT))];
    assert_eq!(contents(actions), texts(&[Some("ab")]));
}

#[test]
fn writes_that_were_not_synced_reach_the_disk_in_any_order() {
    let found = contents(vec![name("new"), Action::Sync(Synced::Directory(ROOT)), write(0, "a"), write(1, "b")]);
    assert!(found.contains(&Some("\0b".into())) && found.contains(&Some("a".into())) && found.contains(&Some(String::new())), "{found:?}");
}

#[test]
fn a_rename_between_directories_never_loses_its_file() {
    let mut trace = trace(vec![
        Action::Name { directory: ROOT, name: "new".into(), node: Some(FILE), needs: None },
        Action::Name { directory: 2, name: "old".into(), node: None, needs: Some(0) },
    ]);
    trace.before.add_directory(2);
    trace.before.name(ROOT, "d".into(), Some(2));
    trace.before.name(2, "old".into(), Some(FILE));
    let states = States::of(&trace, Bound::LONG, 1, |_| true);
    assert_eq!(states.states.len(), 3);
    assert!(states.states.iter().all(|state| !states.disk(state).files().is_empty()));
}
