use super::*;

#[test]
fn any_kind_of_agent_gives_a_repository() {
    let prefix: RepositoryName = "team/old".parse().unwrap();
    for (kind, expected) in [
        ("claude-code", "team/old/claude-code"),
        ("vLLM 0.11", "team/old/vllm-0-11"),
        ("../../etc/passwd", "team/old/etc-passwd"),
        ("--__", "team/old/agent"),
        ("", "team/old/agent"),
        ("ä", "team/old/agent"),
    ] {
        assert_eq!(repository(&prefix, kind).unwrap().as_str(), expected, "{kind:?}");
    }
    assert_eq!(repository(&prefix, &"x".repeat(1000)).unwrap().as_str().len(), 9 + KIND_BYTES);
    let long: RepositoryName = "p".repeat(255).parse().unwrap();
    assert!(repository(&long, "x").is_err());
}
