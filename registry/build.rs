//! Has the linker fold functions that were compiled to the same code.
//!
//! Generic code, most of it of HTTP, is compiled once for each type, often to the same
//! instructions. Only lld does this: the linker that rustc brings and uses by itself on x86-64
//! Linux. Anywhere else the program is larger, and works the same.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|found| found == value);
    let own_linker = std::env::var("CARGO_ENCODED_RUSTFLAGS").is_ok_and(|flags| flags.contains("linker") || flags.contains("fuse-ld"));
    if is("PROFILE", "release") && is("TARGET", "x86_64-unknown-linux-gnu") && !own_linker && brings_lld() {
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
    }
}

fn brings_lld() -> bool {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let Ok(output) = Command::new(rustc).args(["--print", "sysroot"]).output() else { return false };
    let sysroot = String::from_utf8_lossy(&output.stdout);
    Path::new(sysroot.trim()).join("lib/rustlib/x86_64-unknown-linux-gnu/bin/gcc-ld/ld.lld").exists()
}
