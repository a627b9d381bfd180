//! The program `pf-import-processfork`, which runs as `pf import processfork`.

fn main() -> std::process::ExitCode {
    pfr_client::cli::run::<pfr_import_processfork::command::ImportProcessfork>()
}
