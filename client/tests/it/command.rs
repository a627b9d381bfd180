//! The real `pf` in empty surroundings: exit codes, and what goes to which stream.

use crate::common::agent::{Answer, agent, drained, warmed};
use crate::common::commands;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// `pf` with no configuration but what the test gives it.
fn pf(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf"));
    command.env_clear().env("HOME", home).args(args).stdin(Stdio::null());
    command
}

fn run(home: &Path, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = pf(home, args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

#[test]
fn help_and_version_go_to_stdout_and_succeed() {
    let home = tempfile::tempdir().unwrap();
    for args in [&[][..], &["--help"], &["--version"], &["push", "--help"], &["help", "stats"]] {
        let (code, stdout, stderr) = run(home.path(), args);
        assert_eq!((code, stderr.as_str()), (0, ""), "{args:?}");
        assert!(!stdout.is_empty() && !stdout.contains('\x1b'), "{args:?}: {stdout}");
    }
}

#[test]
fn the_help_says_what_cannot_be_guessed() {
    let home = tempfile::tempdir().unwrap();
    for (command, says) in [
        ("--help", "Commands that list, change or check a store use the registry; --local selects the local store."),
        ("--help", "`pf snapshot` makes the tag from the name of the sequence"),
        ("snapshot --help", "Without a tag, the tag is the sequence's name; without a REF, the repository is engines/ENGINE"),
        ("drain --help", "what is not captured by then is listed, and later pushes go on in the background [default: 600 for the pushes]"),
        ("ls --help", "Number of retries of a failed request [default: 5]. If it is given, --retry-for has no effect"),
        ("tasks pause --help", "A task that `pf tasks` lists"),
        ("tasks resume --help", "A task that `pf tasks` lists"),
    ] {
        let (code, stdout, stderr) = run(home.path(), &command.split(' ').collect::<Vec<_>>());
        let words = stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(code == 0 && words.contains(says), "{command}: {stdout}{stderr}");
    }
}

#[test]
fn a_command_for_the_agent_refuses_a_registry_on_the_command_line_and_no_other() {
    let home = tempfile::tempdir().unwrap();
    let commands: [&[&str]; 10] = [
        &["engines"],
        &["sequences", "e"],
        &["snapshot", "e", "team/agent:x"],
        &["restore", "team/agent:x", "e"],
        &["restores"],
        &["restores", "e"],
        &["pushes"],
        &["drain", "team/agent"],
        &["warm", "team/agent"],
        &["jobs"],
    ];
    for command in commands {
        let args = [command, &["--agent", "/nonexistent/agent.sock"]].concat();
        let (code, _, stderr) = run(home.path(), &[&args[..], &["--registry", "http://127.0.0.1:9"]].concat());
        assert!(code == 1 && stderr.contains("its own registry") && stderr.contains("PF_AGENT_REGISTRY"), "{args:?}: {stderr}");
        let output = pf(home.path(), &args).env("PF_REGISTRY", "http://127.0.0.1:9").output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{args:?}: the variable is for commands that ask a registry");
    }
}

#[test]
fn no_error_repeats_the_password_of_an_address() {
    let home = tempfile::tempdir().unwrap();
    let secret = "http://usr:hush@127.0.0.1:5077/team/agent:x";
    for args in [
        &["inspect", secret][..],
        &["inspect", secret, "--json"],
        &["push", secret, "team/agent:y"],
        &["rm", "team/agent:y", secret],
        &["diff", "team/agent:y", secret],
        &["prune", secret, "--untagged"],
        &["ls", "team/agent", secret],
        &["ls", "--registry", "http://usr:hush@127.0.0.1:5077"],
        &["images", "--registry", "http://usr:hush@127.0.0.1:5077"],
        &[secret],
    ] {
        let (code, stdout, stderr) = run(home.path(), args);
        assert!(code == 1 && stdout.is_empty() && !stderr.is_empty(), "{args:?}: {stdout}{stderr}");
        assert!(!stderr.contains("hush") && !stderr.contains("usr"), "{args:?}: {stderr}");
    }
}

#[test]
fn the_agent_is_quoted_with_the_places_where_it_looked_and_the_option_that_it_refused() {
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("agent.sock");
    let answer = |request: &str| match request.split('/').nth(3) {
        Some("short") => {
            Answer::Problem(409, "boundary_mismatch", "a resume begins at token position 47, the end of the snapshot, not at 3")
        }
        _ => Answer::Problem(404, "tag_unknown", "team/chat has no tag keep"),
    };
    agent(&socket, answer);
    let socket = socket.to_str().unwrap();
    let digest = "team/chat@2a19b2c9309a";
    for (args, says) in [
        (&["restore", "team/chat:keep", "e"][..], "in the registry only; restore it with --local if it is only in the agent's store"),
        (&["restore", digest, "e"], "the agent looked in its own store and in the registry"),
        (&["restore", "team/chat:keep", "e", "--local"], "with --local the agent looks in its own store only"),
        (&["snapshot", "e", "team/chat:y", "--parent", "team/chat:keep"], "--parent takes a digest, or a reference in the agent's store"),
        (&["restore", "team/chat:keep", "short", "--position", "3"], "the snapshot cannot be resumed at --position 3: a resume begins"),
    ] {
        let (_, _, stderr) = run(home.path(), &[args, &["--agent", socket]].concat());
        assert!(stderr.contains(says), "{args:?}: {stderr}");
    }
}

#[test]
fn a_pull_into_a_second_reference_is_refused_before_anything_is_asked() {
    let home = tempfile::tempdir().unwrap();
    let (code, _, stderr) = run(home.path(), &["pull", "team/agent:a", "team/agent:x", "--registry", "http://127.0.0.1:1"]);
    assert!(code == 1 && stderr.contains("write ./team/agent:x"), "{stderr}");
}

#[test]
fn a_time_with_the_unit_of_a_month_is_refused() {
    let home = tempfile::tempdir().unwrap();
    for args in [&["prune", "team/agent", "--older-than", "1M"][..], &["tasks", "pause", "compaction", "--for", "1M"]] {
        let (code, _, stderr) = run(home.path(), args);
        assert!(code == 1 && stderr.contains("m (minutes)"), "{args:?}: {stderr}");
    }
}

#[test]
fn a_wrong_command_line_exits_1_and_leaves_stdout_alone() {
    let home = tempfile::tempdir().unwrap();
    let cases: [&[&str]; 8] = [
        &["nonsense"],
        &["push", "./x"],
        &["inspect", "Upper/Case"],
        &["push", "./x", "a:b~1"],
        &["push", "./x", "a:b", "--if-tag-is", "maybe"],
        &["rm", "a"],
        &["fork", "a:b", "-n", "0"],
        &["verify"],
    ];
    for args in cases {
        let (code, stdout, stderr) = run(home.path(), args);
        assert_eq!((code, stdout.as_str()), (1, ""), "{args:?}: {stderr}");
        assert!(!stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn a_variable_that_is_set_to_nothing_is_not_set() {
    let home = tempfile::tempdir().unwrap();
    let mut command = pf(home.path(), &["ls", "--local"]);
    let output = command.envs(["PF_REGISTRY", "PF_STORE", "PF_RETRIES", "PF_TOKEN", "PF_CONFIG"].map(|name| (name, ""))).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(5) && stderr.contains(".local/share/pf"), "{stderr}");
}

#[test]
fn a_drain_names_the_engine_that_could_not_be_asked() {
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("agent.sock");
    agent(&socket, |_| {
        let problem =
            json!({"type": "t", "title": "t", "status": 409, "detail": "rank 1 is missing", "code": "engine_busy", "retryable": true});
        let failed = json!([{"engine": "vllm", "sequence": "", "problem": problem}]);
        Answer::Json(drained(&json!({"plan": [], "done": [], "failed": failed, "bytes": 0, "eta_seconds": null, "recompute_tokens": 0})))
    });
    let output = pf(home.path(), &["drain", "team/evacuated", "--agent", socket.to_str().unwrap()]).output().unwrap();
    let (stdout, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(3), "{stdout}{stderr}");
    assert!(stdout.contains("vllm: rank 1 is missing") && !stdout.contains("nothing"), "{stdout}");
    assert!(stderr.contains("1 engine could not be asked for sequences"), "{stderr}");
}

#[test]
fn a_warm_waits_for_its_job_unless_it_is_detached() {
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("agent.sock");
    let mut asked = 0;
    agent(&socket, move |request| {
        asked += u32::from(request == "GET /v1/jobs/1");
        Answer::Json(match request {
            "GET /v1/jobs/1" if asked > 1 => warmed("done"),
            _ => warmed("running"),
        })
    });
    let socket = socket.to_str().unwrap();
    let (code, stdout, stderr) = run(home.path(), &["warm", "team/agent:y", "--detach", "--agent", socket]);
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "1\n", ""));
    let (code, stdout, stderr) = run(home.path(), &["warm", "team/agent:y", "--agent", socket]);
    assert!(code == 0 && stdout.contains("here, 9 B received"), "{stdout}{stderr}");
    assert!(stderr.starts_with("job 1; it goes on without this command"), "{stderr}");
}

#[test]
fn an_id_of_an_agent_that_no_registry_takes_is_refused_by_the_name_of_its_option() {
    let home = tempfile::tempdir().unwrap();
    for id in ["", &"é".repeat(256)] {
        let (code, _, stderr) = run(home.path(), &["stats", "team/agent", "--agent", id, "--registry", "http://127.0.0.1:1"]);
        assert!(code == 1 && stderr.contains("--agent <ID>") && stderr.contains("1 to 255 characters"), "{stderr}");
    }
}

#[test]
fn looking_at_a_local_store_does_not_make_one() {
    let home = tempfile::tempdir().unwrap();
    let (code, _, stderr) = run(home.path(), &["ls", "--local"]);
    assert_eq!(code, 5, "{stderr}");
    assert!(stderr.contains("hint: ") && stderr.contains(".local/share/pf"), "{stderr}");
    assert_eq!(home.path().read_dir().unwrap().count(), 0);
}

/// The registry does not answer, and the local store is missing: each side has its own exit code.
#[test]
fn every_command_means_the_registry_unless_it_is_told_to_use_the_local_store() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).display().to_string();
    let (key, tokens, export) = (path("a.key"), path("tokens.json"), path("export"));
    assert_eq!(run(home.path(), &["keygen", &key]).0, 0);
    std::fs::write(&tokens, "[1, 2, 3]").unwrap();
    let fingerprint = pfr_schema::Digest::sha256(b"f").to_string();
    let cases: [&[&str]; 16] = [
        &["ls"],
        &["log", "team/agent:a"],
        &["inspect", "team/agent:a"],
        &["diff", "team/agent:a", ":b"],
        &["tag", "team/agent:a", "b"],
        &["fork", "team/agent:a", "-n", "2"],
        &["rm", "team/agent:a"],
        &["prune", "*", "--untagged"],
        &["stats"],
        &["df"],
        &["gc"],
        &["scrub"],
        &["verify", "team/agent:a"],
        &["sign", "team/agent:a", "--key", &key],
        &["match", "team/agent", "--tokens", &tokens, "--fingerprint", &fingerprint],
        &["export", "team/agent:a", &export],
    ];
    for args in cases {
        let args = [args, &["--registry", "http://127.0.0.1:1", "--retries", "0"]].concat();
        let (code, _, stderr) = run(home.path(), &args);
        assert_eq!(code, 7, "{args:?}: {stderr}");
        let (code, _, stderr) = run(home.path(), &[&args[..], &["--local"]].concat());
        assert!(code == 5 && stderr.contains("there is no local store"), "{args:?}: {stderr}");
    }
    // `import` makes the local store that it lacks, and `pin` is refused without --local.
    let seen: BTreeSet<String> = cases.iter().map(|args| args[0]).chain(["import", "pin"]).map(str::to_owned).collect();
    let takes_local = |command: &String| {
        let help = run(home.path(), &[command, "--help"]).1;
        help.split_whitespace().collect::<Vec<_>>().join(" ").contains("--local The local store, not the registry")
    };
    assert_eq!(commands(home.path()).into_iter().filter(takes_local).collect::<BTreeSet<_>>(), seen);
}

#[test]
fn a_setting_that_does_not_exist_is_refused_with_its_place() {
    let home = tempfile::tempdir().unwrap();
    let config = home.path().join("config.toml");
    std::fs::write(&config, "registry = \"http://r\"\ntokn = \"hush\"\n").unwrap();
    let output = pf(home.path(), &["ls"]).env("PF_CONFIG", &config).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.contains("config.toml") && stderr.contains("tokn"), "{stderr}");
}

#[test]
fn a_source_that_is_not_there_is_said_to_be_so() {
    let home = tempfile::tempdir().unwrap();
    let (code, _, stderr) = run(home.path(), &["push", "team/agent:x", "team/agent:y", "--registry", "http://127.0.0.1:1"]);
    assert_eq!(code, 5, "{stderr}");
    assert!(stderr.contains("team/agent:x is not a directory"), "{stderr}");
}

#[test]
fn a_reader_that_has_read_enough_is_no_failure() {
    let home = tempfile::tempdir().unwrap();
    // The pipe has no reader any more when the program begins to write.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = pf(home.path(), &["completions", "zsh"]).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
}

#[test]
fn the_usage_does_not_depend_on_the_environment() {
    let home = tempfile::tempdir().unwrap();
    for args in [&["push"][..], &["fork"], &["verify"], &["match"], &["gc", "--max-size"], &["prune"]] {
        let (code, _, plain) = run(home.path(), args);
        let variables = [("PF_REGISTRY", "http://r:1"), ("PF_STORE", "/s"), ("PF_RETRIES", "3"), ("PF_AGENT_SOCKET", "/a")];
        let output = pf(home.path(), args).envs(variables).output().unwrap();
        assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap()), (Some(code), plain), "{args:?}");
    }
    // The program alone prints its help, also where variables are set.
    let output = pf(home.path(), &[]).env("PF_REGISTRY", "http://r:1").output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && stdout.contains("Usage: pf") && stdout.contains("prune"), "{stdout}");
}

#[test]
fn words_of_other_tools_work_or_get_a_tip() {
    let home = tempfile::tempdir().unwrap();
    let (code, stdout, _) = run(home.path(), &["version"]);
    assert!(code == 0 && stdout.starts_with("pf "), "{stdout}");
    let (code, document, _) = run(home.path(), &["version", "--json"]);
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    assert!(code == 0 && stdout.trim_end() == format!("pf {}", document["version"].as_str().unwrap()), "{document}");
    for (alias, command) in [("list", "ls"), ("delete", "rm")] {
        assert_eq!(run(home.path(), &[alias, "--help"]).1, run(home.path(), &[command, "--help"]).1);
    }
    for (word, says) in [("images", "`pf ls`"), ("auth", "`pf login`"), ("forget", "pf prune")] {
        let (code, stdout, stderr) = run(home.path(), &[word]);
        assert!(code == 1 && stdout.is_empty() && stderr.contains("hint:") && stderr.contains(says), "{word}: {stderr}");
    }
}

/// `pf`, linked into a directory of its own.
fn linked(directory: &Path) -> std::path::PathBuf {
    let path = directory.join("pf");
    std::fs::hard_link(env!("CARGO_BIN_EXE_pf"), &path).unwrap();
    path
}

#[test]
fn a_command_that_is_a_program_beside_pf_gets_the_arguments_and_gives_its_exit_code() {
    use std::os::unix::fs::PermissionsExt;
    // Beside the build: a hard link cannot lead to another file system.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = linked(dir.path());
    for (command, program) in [(&["demo"][..], "pf-demo"), (&["import", "processfork"], "pf-import-processfork")] {
        let script = dir.path().join(program);
        std::fs::write(&script, "#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 5\n").unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        let arguments = [&["--json", "--store", "a b"], command, &["--help", "--keep=x", "--", "y"]].concat();
        let output = Command::new(&path).env_clear().env("HOME", dir.path()).args(arguments).output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert_eq!(stdout.lines().collect::<Vec<_>>(), ["--store", "a b", "--json", "--help", "--keep=x", "--", "y"]);
        assert_eq!(output.status.code(), Some(5));
        let output = Command::new(&path).env_clear().env("HOME", dir.path()).arg("help").args(command).output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert_eq!((stdout.as_str(), output.status.code()), ("--help\n", Some(5)), "the help of a program is its own");
    }
}

#[test]
fn a_command_whose_program_is_missing_says_what_is_missing_and_where() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = Command::new(linked(dir.path())).env_clear().env("HOME", dir.path()).arg("demo").output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(5), "{stderr}");
    assert!(stderr.contains("pf-demo is missing") && stderr.contains("hint: "), "{stderr}");
}
