//! Completions of the line that is being typed, as a shell gets them.

use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, pf, push_dir, target};
use pfr_client::{Progress, PushTarget, Source, push};
use std::path::Path;
use std::process::{Command, Stdio};

/// The words that bash offers, each from the last end of a word on that readline sees.
fn completed(home: &Path, registry: &str, line: &str) -> Vec<String> {
    const ASK: &str = r#"
        source <(pf completions bash) || exit 1
        COMP_WORDBREAKS=$' \t\n"\'><=;|&(:' COMP_LINE=$1 COMP_POINT=${#1}
        _pf_complete
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let programs = Path::new(env!("CARGO_BIN_EXE_pf")).parent().unwrap();
    let mut bash = Command::new("bash");
    bash.args(["--noprofile", "--norc", "-c", ASK, "bash", line]).env_clear().stdin(Stdio::null());
    bash.env("HOME", home).env("PF_STORE", home.join("store")).env("PF_REGISTRY", registry);
    let output = bash.env("PATH", format!("{}:/usr/bin:/bin", programs.display())).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn repositories_and_tags_are_completed_as_the_registry_has_them() {
    let (registry, home) = (Registry::start().await, tempfile::tempdir().unwrap());
    let source = directory(SMALL, &[1, 2, 3]);
    for tag in ["step-1", "step-2", "main"] {
        push_dir(&registry.remote(), source.path(), tag).await.unwrap();
    }
    let other = PushTarget { repository: "other/agent".parse().unwrap(), ..target("x") };
    push(&Source::Directory(source.path().into()), &registry.remote(), other, &Progress::default()).await.unwrap();
    let completed = |line: &str| completed(home.path(), &registry.url, line);

    assert_eq!(completed("pf pull team/agent:st"), ["step-1", "step-2"]);
    assert_eq!(completed("pf pull team/agent:"), ["main", "step-1", "step-2"]);
    assert_eq!(completed("pf push ./dir x/y:z --parent team/agent:m"), ["main"]);
    // The only repository that begins like this.
    assert_eq!(completed("pf inspect te"), ["team/agent:main", "team/agent:step-1", "team/agent:step-2"]);
    let all = completed("pf inspect ");
    assert!(["other/agent:", "team/agent:"].iter().all(|name| all.contains(&(*name).to_owned())), "{all:?}");
    // Where a repository is meant, no tag follows.
    assert_eq!(completed("pf stats te"), ["team/agent"]);
    assert_eq!(completed("pf com"), ["completions"]);
    // The store that the line names is asked, and no host whose name is being typed.
    for line in ["pf pull --registry http://127.0.0.1:1 te", "pf ls --local te", "pf pull http://te", "pf pull team/agent@"] {
        assert_eq!(completed(line), [""; 0], "{line}");
    }
    // Other shells use the scripts of clap, which pass words on as they were typed.
    for shell in ["zsh", "fish"] {
        let (code, script, _) = pf(home.path(), &["completions", shell]);
        assert!(code == 0 && script.contains("PF_COMPLETE="), "{shell}: {script}");
    }
    let mut fish = Command::new(env!("CARGO_BIN_EXE_pf"));
    fish.env_clear().env("HOME", home.path()).env("PF_REGISTRY", &registry.url).env("PF_COMPLETE", "fish");
    let output = fish.args(["--", "pf", "pull", "team/agent:st"]).output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(stdout.lines().filter_map(|line| line.split('\t').next()).collect::<Vec<_>>(), ["team/agent:step-1", "team/agent:step-2"]);
}
