//! Which model a server runs: the engine configuration, computed from the files that it names.

use super::http::{Http, Props};
use super::settings::LlamaServer;
use crate::error::{Error, Result, blocking};
use parking_lot::Mutex;
use pfr_schema::digest::Hasher;
use pfr_schema::{Algorithm, Digest};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes that are read at once.
const PIECE: usize = 8 << 20;
/// Files whose digests are kept.
const REMEMBERED: usize = 1000;

/// SHA-256 of files. A file is read once, until device, inode, size, or a time of change differ.
#[derive(Debug)]
pub(super) struct Digests {
    /// Where they are kept.
    path: PathBuf,
    known: Mutex<BTreeMap<String, Digest>>,
    /// Held while a file is read: others that ask for it wait.
    reading: Mutex<()>,
}

impl Digests {
    pub fn open(path: PathBuf) -> Self {
        // Without the file, models are read again.
        let known = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        Self { path, known: Mutex::new(known), reading: Mutex::default() }
    }

    /// The digest of a file. Blocks.
    fn of(&self, path: &Path) -> Result<Digest> {
        let io = || Error::io(format!("model file {}", path.display()));
        let mut file = File::open(path).map_err(io())?;
        let _reading = self.reading.lock();
        let before = stamp(&file).map_err(io())?;
        if let Some(digest) = self.known.lock().get(&before) {
            return Ok(*digest);
        }
        let (mut hasher, mut buffer) = (Hasher::new(Algorithm::Sha256), vec![0; PIECE]);
        loop {
            match file.read(&mut buffer).map_err(io())? {
                0 => break,
                now => hasher.update(&buffer[..now]),
            }
        }
        if stamp(&file).map_err(io())? != before {
            return Err(Error::Invalid(format!("model file {} changed while it was read", path.display())));
        }
        let digest = hasher.finish();
        self.remember(before, digest);
        Ok(digest)
    }

    fn remember(&self, stamp: String, digest: Digest) {
        let mut known = self.known.lock();
        known.insert(stamp, digest);
        while known.len() > REMEMBERED {
            known.pop_first();
        }
        let kept =
            serde_json::to_vec(&*known).map_err(std::io::Error::other).and_then(|json| pfr_service::durable::replace(&self.path, &json));
        if let Err(error) = kept {
            tracing::warn!(file = %self.path.display(), %error, "digest of a model not kept, it will be computed again");
        }
    }
}

fn stamp(file: &File) -> std::io::Result<String> {
    let stat = file.metadata()?;
    let (modified, changed) = ((stat.mtime(), stat.mtime_nsec()), (stat.ctime(), stat.ctime_nsec()));
    Ok(format!("{}:{}:{}:{}.{}:{}.{}", stat.dev(), stat.ino(), stat.len(), modified.0, modified.1, changed.0, changed.1))
}

/// The files of a model that is split: `NAME-00001-of-00003.gguf` and the others.
fn shards(path: &Path) -> Vec<PathBuf> {
    let split = || {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (name, first) = rest.rsplit_once('-')?;
        let count = count.parse::<u32>().ok().filter(|n| count.len() == 5 && first.len() == 5 && (1..1000).contains(n))?;
        Some((1..=count).map(|number| path.with_file_name(format!("{name}-{number:05}-of-{count:05}.gguf"))).collect())
    };
    split().unwrap_or_else(|| vec![path.into()])
}

/// The digest of a model: that of its file; of a split one, that of the list `sha256sum` prints.
fn weights(digests: &Digests, path: &Path) -> Result<Digest> {
    let files = shards(path);
    let [one] = &files[..] else {
        let mut list = String::new();
        for file in &files {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            list += &format!("{}  {name}\n", digests.of(file)?.hex());
        }
        return Ok(Digest::sha256(list.as_bytes()));
    };
    digests.of(one)
}

/// The engine configuration of a server.
pub(super) async fn deployment(server: &LlamaServer, http: &Http, digests: &Arc<Digests>) -> Result<(Props, BTreeMap<String, Value>)> {
    let props = http.props().await?;
    let adapters = http.adapters().await?;
    let model = server.model.clone().unwrap_or_else(|| PathBuf::from(&props.model));
    if !model.is_absolute() {
        let hint =
            format!("the server names its model {:?}, which is no absolute path: say \"model\" in the agent's settings", props.model);
        return Err(Error::Invalid(hint));
    }
    let (digests, kept) = (Arc::clone(digests), adapters.clone());
    let (weights, adapters) = blocking("digest of a model", move || {
        let adapters = kept.iter().map(|(path, scale)| Ok(format!("{} {scale}", digests.of(Path::new(path))?)));
        Ok::<_, Error>((weights(&digests, &model)?, adapters.collect::<Result<Vec<String>>>()?))
    })
    .await?;
    let mut deployment: BTreeMap<String, Value> = [
        ("engine", json!(format!("llama.cpp {}", props.build))),
        ("backend", json!(format!("llama-server {}", props.build))),
        ("weights", json!(weights.to_string())),
        ("n_ctx", json!(props.context)),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect();
    if !adapters.is_empty() {
        deployment.insert("adapters".into(), json!(adapters));
    }
    Ok((props, deployment))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_computed_once_until_the_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let (model, kept) = (dir.path().join("m.gguf"), dir.path().join("kept.json"));
        std::fs::write(&model, "one").unwrap();
        let digests = Digests::open(kept.clone());
        assert_eq!(weights(&digests, &model).unwrap(), Digest::sha256(b"one"));
        // A remembered digest is used, also by the next agent.
        digests.known.lock().values_mut().for_each(|digest| *digest = Digest::sha256(b"remembered"));
        let stamp = digests.known.lock().first_key_value().unwrap().0.clone();
        digests.remember(stamp, Digest::sha256(b"remembered"));
        assert_eq!(weights(&Digests::open(kept), &model).unwrap(), Digest::sha256(b"remembered"));
        // The same name and length, another file: as editors save.
        let other = dir.path().join("other");
        std::fs::write(&other, "two").unwrap();
        std::fs::rename(&other, &model).unwrap();
        assert_eq!(weights(&digests, &model).unwrap(), Digest::sha256(b"two"));
    }

    #[test]
    fn all_files_of_a_split_model_count() {
        let dir = tempfile::tempdir().unwrap();
        let file = |n: u32| dir.path().join(format!("m-{n:05}-of-00002.gguf"));
        std::fs::write(file(1), "a").unwrap();
        let digests = Digests::open(dir.path().join("kept.json"));
        assert!(weights(&digests, &file(1)).unwrap_err().to_string().contains("m-00002-of-00002"));
        std::fs::write(file(2), "b").unwrap();
        let (a, b) = (Digest::sha256(b"a").hex(), Digest::sha256(b"b").hex());
        let list = format!("{a}  m-00001-of-00002.gguf\n{b}  m-00002-of-00002.gguf\n");
        assert_eq!(weights(&digests, &file(1)).unwrap(), Digest::sha256(list.as_bytes()));
        assert_eq!(shards(Path::new("/m/of-1.gguf")), [PathBuf::from("/m/of-1.gguf")]);
    }
}
