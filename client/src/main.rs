//! The `pf` command. Everything is in [`cli`]; the library half of this crate is `pfr_client`.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
