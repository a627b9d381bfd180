//! Data flows one way between the modules of the agent.

use std::path::{Path, PathBuf};

/// Each module may use those before it. The modules that are not in the list are used by all
/// (errors, settings, metrics) or use all (the agent itself, its control interface).
const ORDER: &[&str] = &["memory", "copies", "engines", "llama", "snapshot", "saves", "restore", "library", "jobs"];

fn sources(path: &Path, into: &mut Vec<PathBuf>) {
    if path.is_dir() {
        std::fs::read_dir(path).unwrap().for_each(|entry| sources(&entry.unwrap().path(), into));
    } else if path.exists() {
        into.push(path.into());
    }
}

#[test]
fn a_module_uses_only_those_before_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    for (place, name) in ORDER.iter().enumerate() {
        let mut files = Vec::new();
        sources(&root.join(name), &mut files);
        sources(&root.join(format!("{name}.rs")), &mut files);
        assert!(!files.is_empty(), "there is no module {name}");
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            let code = || text.lines().filter(|line| !line.trim_start().starts_with("//"));
            assert!(code().all(|line| !line.contains("crate::{")), "one `use` for each module, not {file:?}");
            for later in &ORDER[place + 1..] {
                if code().any(|line| line.contains(&format!("crate::{later}"))) {
                    wrong.push(format!("{} uses {later}", file.strip_prefix(&root).unwrap().display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
