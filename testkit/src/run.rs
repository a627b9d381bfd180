//! Settings of a test run, from environment variables.
//!
//! | variable | meaning |
//! |---|---|
//! | `PF_LONG=1` | the long run: random tests draw a new seed |
//! | `PF_SEED=N` | every random test uses this seed, to repeat a failure |
//! | `PF_REQUIRE=mounts,gpu` | a test that needs one of these capabilities fails if the machine lacks it, instead of being skipped |

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};

/// Capabilities that a machine may lack, as `PF_REQUIRE` names them.
///
/// * `mounts`: the right to mount a tmpfs
/// * `loop-devices`: the right to mount ext4 over a loop device, and a kernel that can make it fail
/// * `prlimit`: the right to limit the open files of another process, by util-linux's `prlimit`
/// * `python`: `python3`
/// * `gpu`: a CUDA device
/// * `ptrace`: the right to trace child processes
/// * `systemd`: `systemd-analyze`
/// * `caddy`: the proxy `caddy`
/// * `openssl`: the command `openssl`, version 3
/// * `skopeo`: the client `skopeo` of container registries
/// * `buildah`: `buildah`, and the right to make images with it
/// * `oras`: the package `oras` for `python3`, in the folder that `PF_TEST_ORAS` names or installed
pub const CAPABILITIES: [&str; 12] =
    ["mounts", "loop-devices", "prlimit", "python", "gpu", "ptrace", "systemd", "caddy", "openssl", "skopeo", "buildah", "oras"];

/// The variable that lists the capabilities that this machine must have.
const REQUIRE: &str = "PF_REQUIRE";

/// The seed of a normal run. It is always the same, so that a new failure comes from the change
/// under test.
const FIXED: u64 = 20_260_801;

/// Whether this is the long run.
#[must_use]
pub fn long() -> bool {
    std::env::var("PF_LONG").is_ok_and(|value| !matches!(value.as_str(), "" | "0"))
}

/// A random number from the keys of the standard hasher, which needs no dependency.
#[must_use]
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The seed of a random test, which it also prints. `PF_SEED` if that is set; otherwise a new one
/// in the long run, and a fixed one in the normal run.
#[must_use]
pub fn seed() -> u64 {
    let given = std::env::var("PF_SEED").ok();
    let given = given.map(|text| text.parse().unwrap_or_else(|error| panic!("PF_SEED={text:?}: expected a number: {error}")));
    let seed = given.unwrap_or_else(|| if long() { random() } else { FIXED });
    println!("seed = {seed} (repeat with PF_SEED={seed})");
    seed
}

/// Prints that the test is not run because this machine lacks `capability`.
///
/// # Panics
/// If `PF_REQUIRE` lists the capability: the machine must have it, so the test fails.
pub fn skip(capability: &str, reason: &str) {
    println!("{}", refusal(capability, reason, &std::env::var(REQUIRE).unwrap_or_default()).unwrap_or_else(|failure| panic!("{failure}")));
}

/// The line that a skipped test prints, or the reason why it may not be skipped.
fn refusal(capability: &str, reason: &str, required: &str) -> Result<String, String> {
    assert!(CAPABILITIES.contains(&capability), "unknown capability {capability:?}, expected one of {CAPABILITIES:?}");
    let mut names = required.split(',').map(str::trim).filter(|name| !name.is_empty());
    if let Some(unknown) = names.clone().find(|name| !CAPABILITIES.contains(name)) {
        return Err(format!("{REQUIRE} names the unknown capability {unknown:?}, expected some of {CAPABILITIES:?}"));
    }
    match names.any(|name| name == capability) {
        true => Err(format!("{REQUIRE} says that this machine has {capability:?}, but {reason}")),
        false => Ok(format!("not run: {reason} (capability {capability})")),
    }
}

#[cfg(test)]
mod tests {
    use super::refusal;

    #[test]
    fn a_skipped_test_fails_if_the_machine_must_have_the_capability() {
        for required in ["mounts", "gpu,mounts", " gpu , mounts ,"] {
            let failure = refusal("mounts", "this process may not mount", required).unwrap_err();
            assert!(failure.contains("mounts") && failure.contains("this process may not mount"), "{failure}");
        }
        for required in ["", ",", "gpu", "gpu,python"] {
            assert!(refusal("mounts", "this process may not mount", required).unwrap().starts_with("not run: "), "{required}");
        }
    }

    #[test]
    fn an_unknown_requirement_fails() {
        assert!(refusal("gpu", "there is none", "mount").unwrap_err().contains("\"mount\""));
    }
}
