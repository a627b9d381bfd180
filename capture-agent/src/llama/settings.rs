//! Which servers of llama.cpp are captured.

use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::str::FromStr;

/// A `llama-server` whose slots are captured and restored.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LlamaServer {
    /// Name of the engine on this host.
    pub name: String,
    /// Where it listens.
    pub url: String,
    /// The folder that it was started with as `--slot-save-path`.
    pub slot_save_path: PathBuf,
    /// The model's file, where this host has it under another path than the server says.
    #[serde(default)]
    pub model: Option<PathBuf>,
    /// A file with the server's API key.
    #[serde(default)]
    pub api_key_file: Option<PathBuf>,
}

impl LlamaServer {
    /// Checks each setting for itself.
    ///
    /// # Errors
    /// A text that names the wrong setting, and what was expected.
    pub fn check(&self) -> Result<(), String> {
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if !(1..=64).contains(&self.name.len()) || !self.name.chars().all(legal) {
            return Err(format!("llama: name: 1 to 64 letters, digits, '.', '_' or '-', found {:?}", self.name));
        }
        let url = self.url.parse::<reqwest::Url>().ok();
        if !url.is_some_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host() && url.query().is_none()) {
            return Err(format!("llama {:?}: url: http(s)://host:port expected, found {:?}", self.name, self.url));
        }
        for path in [Some(&self.slot_save_path), self.model.as_ref(), self.api_key_file.as_ref()].into_iter().flatten() {
            if !path.is_absolute() {
                return Err(format!("llama {:?}: an absolute path expected, found {}", self.name, path.display()));
            }
        }
        Ok(())
    }
}

/// `name=NAME,url=URL,slot-save-path=DIR`, and the other keys likewise.
impl FromStr for LlamaServer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut keys = Map::new();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("KEY=VALUE expected, found {part:?}"))?;
            if keys.insert(key.trim().into(), Value::String(value.trim().into())).is_some() {
                return Err(format!("{key} is given twice"));
            }
        }
        serde_json::from_value(Value::Object(keys)).map_err(|error| error.to_string())
    }
}
