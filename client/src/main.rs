//! The `pf` command.

fn main() -> std::process::ExitCode {
    pfr_client::cli::main()
}
