//! `pf-man FOLDER` writes the manual pages of `pf`, `pf-registry` and `pf-agent`, one for each
//! command, from what the programs parse. `tools/release` packs them.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let folder = arguments.next().filter(|folder| !folder.as_os_str().as_encoded_bytes().starts_with(b"-"));
    let (Some(folder), None) = (folder, arguments.next()) else {
        // A closed standard error leaves no place to report that it is closed.
        let _ = writeln!(io::stderr(), "usage: pf-man FOLDER, whose name does not begin with -");
        return ExitCode::from(2);
    };
    match write(&folder) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "pf-man: cannot write to {}: {error}", folder.display());
            ExitCode::FAILURE
        }
    }
}

fn write(folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for command in [pfr_client::cli::command(), pfr_registry::commands::command(), pfr_agent::program::command()] {
        clap_mangen::generate_to(command, folder)?;
    }
    Ok(())
}
