//! The keys that wrap those of encrypted domains: files, or a command in the place of a key
//! service. Each is replaced by the next one, and destroyed when nothing needs it any more.

use pfr_store::{Error, KeyOptions, Keys, Result};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Wraps with the key of this number, and unwraps with those that are not destroyed.
const COMMAND: &str = r#"#!/bin/sh
cd "${0%/*}" || exit 1
read -r now <now
read -r least <least
read -r line
case $1 in
wrap) echo "v$now:$line" ;;
unwrap)
  number=${line%%:*}
  [ "${number#v}" -ge "$least" ] || { echo "key $number is destroyed" >&2; exit 1; }
  echo "${line#*:}"
  ;;
esac
"#;

/// The keys that wrap.
#[derive(Debug)]
pub struct Keyring {
    /// Not in memory: programs may not be run from there.
    dir: TempDir,
    by_command: bool,
    /// The number of the key that wraps.
    current: u32,
    /// Whether the one before is still there.
    is_turning: bool,
}

impl Keyring {
    /// The first key.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn new(by_command: bool) -> io::Result<Self> {
        let ring = Self { dir: tempfile::tempdir()?, by_command, current: 0, is_turning: false };
        if by_command {
            write(&ring.dir.path().join("command"), COMMAND, 0o700)?;
        }
        ring.note()?;
        Ok(ring)
    }

    /// Those that wrap and unwrap now.
    ///
    /// # Errors
    /// Those of the store.
    pub fn keys(&self) -> Result<Keys> {
        if self.by_command {
            return Keys::new(KeyOptions { key_command: Some(self.dir.path().join("command")), ..KeyOptions::default() });
        }
        let old_key_file = self.is_turning.then(|| self.file(self.current - 1));
        Keys::new(KeyOptions { key_file: Some(self.file(self.current)), old_key_file, ..KeyOptions::default() })
    }

    /// Lets the next key wrap, unless the one before it is still needed.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn turn(&mut self) -> Result<()> {
        if !self.is_turning {
            (self.current, self.is_turning) = (self.current + 1, true);
            self.note().map_err(failed)?;
        }
        Ok(())
    }

    /// Destroys the key before the present one.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn settle(&mut self) -> Result<()> {
        if std::mem::take(&mut self.is_turning) {
            self.note().map_err(failed)?;
            if !self.by_command {
                std::fs::remove_file(self.file(self.current - 1)).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn file(&self, number: u32) -> PathBuf {
        self.dir.path().join(format!("{number}.key"))
    }

    /// Writes what the keys are now.
    fn note(&self) -> io::Result<()> {
        if self.by_command {
            let least = self.current - u32::from(self.is_turning);
            write(&self.dir.path().join("now"), &format!("{}\n", self.current), 0o600)?;
            return write(&self.dir.path().join("least"), &format!("{least}\n"), 0o600);
        }
        // 32 bytes as base64: 43 characters of one letter.
        let letter = char::from(b'A' + (self.current % 26) as u8);
        write(&self.file(self.current), &format!("{}A=\n", letter.to_string().repeat(42)), 0o600)
    }
}

fn write(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    std::fs::write(path, text)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

fn failed(error: io::Error) -> Error {
    Error::Unavailable { what: "directory", reason: error.to_string() }
}
