//! `pf-agent`: the capture agent.

fn main() -> std::process::ExitCode {
    pfr_agent::program::main()
}
