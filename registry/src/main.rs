//! `pf-registry`: a registry, and the tools for its store.

fn main() -> std::process::ExitCode {
    pfr_registry::commands::main()
}
