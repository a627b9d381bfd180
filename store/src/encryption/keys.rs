//! The keys that wrap those of domains: a file with a key, or a command that asks a key service.

use super::segments::{DomainKey, hex};
use super::wrapped::WrappedKey;
use crate::error::{Error, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pfr_schema::DomainName;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fmt;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

/// Bytes of a key.
const KEY: usize = 32;
/// Bytes of a key file, at most: 44 characters and what surrounds them.
const FILE: u64 = 256;
/// Bytes of what a command says about its failure that are repeated.
const WORDS: u64 = 500;
/// Permissions that a key file must not give: any to others, and more than reading to its group.
const FORBIDDEN: u32 = 0o037;

/// Where the keys are that wrap those of domains.
#[derive(Clone, Debug)]
pub struct KeyOptions {
    /// A file with 32 random bytes as base64, which wraps.
    pub key_file: Option<PathBuf>,
    /// A program that wraps in its place.
    pub key_command: Option<PathBuf>,
    /// The key file that was in use before: it unwraps only.
    pub old_key_file: Option<PathBuf>,
    /// Whether a new domain is encrypted unless its maker says otherwise.
    pub encrypt_new: bool,
    /// How long the command may take. Default 30 s.
    pub command_timeout: Duration,
}

impl Default for KeyOptions {
    fn default() -> Self {
        let command_timeout = Duration::from_secs(30);
        Self { key_file: None, key_command: None, old_key_file: None, encrypt_new: false, command_timeout }
    }
}

/// The keys that wrap those of domains. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    /// The one that wraps.
    current: Option<WrappingKey>,
    old: Option<KeyFile>,
    encrypt_new: bool,
}

#[derive(Clone, Debug)]
enum WrappingKey {
    File(KeyFile),
    Command(KeyCommand),
}

/// Its `Debug` does not show the key.
#[derive(Clone)]
struct KeyFile {
    path: PathBuf,
    key: Arc<LessSafeKey>,
    /// 16 digits that tell it from others.
    id: String,
}

impl fmt::Debug for KeyFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyFile").field("path", &self.path).field("id", &self.id).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug)]
struct KeyCommand {
    program: PathBuf,
    timeout: Duration,
}

impl Keys {
    /// Reads the key files.
    ///
    /// # Errors
    /// [`Error::Locked`] for a file that cannot be read, that other users can read, or that is no
    /// key; [`Error::Invalid`] if new domains are to be encrypted without a key, or if two keys
    /// would wrap.
    pub fn new(options: KeyOptions) -> Result<Self> {
        let current = match (options.key_file, options.key_command) {
            (Some(_), Some(_)) => return Err(Error::Invalid("give a key file or a key command, not both: one of them wraps".into())),
            (Some(file), None) => Some(WrappingKey::File(KeyFile::read(file)?)),
            (None, Some(program)) => Some(WrappingKey::Command(KeyCommand { program, timeout: options.command_timeout })),
            (None, None) => None,
        };
        if options.encrypt_new && current.is_none() {
            return Err(Error::Invalid("new domains are to be encrypted, and there is no key: give a key file or a key command".into()));
        }
        let old = options.old_key_file.map(KeyFile::read).transpose()?;
        Ok(Self { current, old, encrypt_new: options.encrypt_new })
    }

    /// Whether a new domain is encrypted unless its maker says otherwise.
    #[must_use]
    pub(crate) fn encrypt_new(&self) -> bool {
        self.encrypt_new
    }

    /// A new key of a domain, wrapped.
    pub(crate) async fn wrap_new(&self) -> Result<WrappedKey> {
        let mut secret = [0; KEY];
        random(&mut secret)?;
        self.wrap(&secret).await
    }

    /// The key of a domain.
    ///
    /// # Errors
    /// [`Error::Locked`] if the key that wrapped it is not there, or is another one.
    pub(crate) async fn unwrap(&self, name: &DomainName, wrapped: &WrappedKey) -> Result<Arc<DomainKey>> {
        let key = DomainKey::new(&self.secret(name, wrapped).await?)?;
        Ok(Arc::new(key))
    }

    /// The same key of a domain, wrapped with the key that wraps now; none if it is already.
    ///
    /// A command wraps again each time: only it knows whether its own key is another one now.
    pub(crate) async fn rewrap(&self, name: &DomainName, wrapped: &WrappedKey) -> Result<Option<WrappedKey>> {
        // Also of one that need not be wrapped again: it must be usable.
        let secret = self.secret(name, wrapped).await?;
        match &self.current {
            Some(WrappingKey::File(file)) if file.id == wrapped.wrapped_by => Ok(None),
            _ => self.wrap(&secret).await.map(Some),
        }
    }

    async fn wrap(&self, secret: &[u8; KEY]) -> Result<WrappedKey> {
        let id = DomainKey::new(secret)?.id();
        match &self.current {
            Some(WrappingKey::File(file)) => {
                let key = file.wrap(&id, secret)?;
                Ok(WrappedKey::new(id, file.id.clone(), key))
            }
            Some(WrappingKey::Command(command)) => {
                let key = command.run("wrap", &STANDARD.encode(secret)).await?;
                if key.is_empty() {
                    return Err(command.failed("wrap", "it printed nothing"));
                }
                let wrapped = WrappedKey::new(id, WrappedKey::BY_COMMAND.to_owned(), key);
                // A key that could not be unwrapped would be found out at the next start.
                self.secret(&DomainName::default(), &wrapped).await?;
                Ok(wrapped)
            }
            // Not locked: to try again does not help.
            None => Err(Error::Invalid("no key is given that wraps the key of a domain: give a key file or a key command".into())),
        }
    }

    /// The secret bytes of a domain's key.
    async fn secret(&self, name: &DomainName, wrapped: &WrappedKey) -> Result<[u8; KEY]> {
        let secret = if wrapped.wrapped_by == WrappedKey::BY_COMMAND {
            let Some(WrappingKey::Command(command)) = &self.current else {
                return Err(Error::Locked(format!("the key of domain {name} was wrapped by a key command: give that command")));
            };
            let printed = command.run("unwrap", &wrapped.key).await?;
            let secret = STANDARD.decode(printed.as_bytes()).ok().and_then(|bytes| bytes.try_into().ok());
            secret.ok_or_else(|| command.failed("unwrap", "it did not print 32 bytes as base64"))?
        } else {
            let file = self.files().find(|file| file.id == wrapped.wrapped_by);
            let file = file.ok_or_else(|| self.no_file(name, &wrapped.wrapped_by))?;
            file.unwrap(wrapped).ok_or_else(|| {
                Error::Locked(format!("the wrapped key of domain {name} is damaged: {} does not open it", file.path.display()))
            })?
        };
        if DomainKey::new(&secret)?.id() != wrapped.id {
            return Err(Error::Locked(format!("the key of domain {name} has the id {}, and another key was unwrapped", wrapped.id)));
        }
        Ok(secret)
    }

    fn files(&self) -> impl Iterator<Item = &KeyFile> {
        let current = match &self.current {
            Some(WrappingKey::File(file)) => Some(file),
            _ => None,
        };
        current.into_iter().chain(&self.old)
    }

    fn no_file(&self, name: &DomainName, id: &str) -> Error {
        let given: Vec<String> = self.files().map(|file| format!("{} is {}", file.path.display(), file.id)).collect();
        let given = if given.is_empty() { "no key file is given".to_owned() } else { given.join(", ") };
        Error::Locked(format!(
            "the key of domain {name} was wrapped with the key {id}; {given}. Give the file with that key as key-file, or as old-key-file \
             until `pf-registry domain rewrap` has run"
        ))
    }
}

impl KeyFile {
    fn read(path: PathBuf) -> Result<Self> {
        let refused = |reason: &str| Error::Locked(format!("key file {}: {reason}", path.display()));
        let text = read_private(&path, &refused)?;
        let bytes = STANDARD.decode(text.trim()).ok().and_then(|bytes| <[u8; KEY]>::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| refused("it is not 32 bytes as base64; make one with `openssl rand -base64 32`"))?;
        let key = UnboundKey::new(&AES_256_GCM, &bytes).map_err(|_| refused("the cipher refuses it"))?;
        let hashed = digest(&SHA256, &[b"pf key file v1".as_slice(), &bytes[..]].concat());
        let id = hex(&hashed.as_ref()[..8]);
        Ok(Self { path, key: Arc::new(LessSafeKey::new(key)), id })
    }

    /// Base64 of nonce, ciphertext and tag.
    fn wrap(&self, id: &str, secret: &[u8; KEY]) -> Result<String> {
        let mut nonce = [0; NONCE_LEN];
        random(&mut nonce)?;
        let mut sealed = secret.to_vec();
        let done = self.key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), about(id), &mut sealed);
        done.map_err(|_| Error::Internal("the cipher refused a key of a domain".into()))?;
        Ok(STANDARD.encode([&nonce[..], &sealed[..]].concat()))
    }

    fn unwrap(&self, wrapped: &WrappedKey) -> Option<[u8; KEY]> {
        let mut bytes = STANDARD.decode(&wrapped.key).ok()?;
        let (nonce, sealed) = bytes.split_first_chunk_mut::<NONCE_LEN>()?;
        let opened = self.key.open_in_place(Nonce::assume_unique_for_key(*nonce), about(&wrapped.id), sealed).ok()?;
        (&*opened).try_into().ok()
    }
}

/// The additional data that bind a wrapped key.
fn about(id: &str) -> Aad<Vec<u8>> {
    Aad::from([b"pf wrapped key v1 ".as_slice(), id.as_bytes()].concat())
}

fn random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|e| Error::Internal(format!("the system gives no random bytes: {e}")))
}

/// The text of a file that only its owner can change, and that other users cannot read.
fn read_private(path: &Path, refused: &dyn Fn(&str) -> Error) -> Result<String> {
    let unread = |e: std::io::Error| refused(&format!("it cannot be read: {e}"));
    // A pipe would keep the start waiting.
    if !std::fs::metadata(path).map_err(unread)?.is_file() {
        return Err(refused("it is not a file"));
    }
    let file = std::fs::File::open(path).map_err(unread)?;
    let mode = file.metadata().map_err(unread)?.mode() & 0o777;
    if mode & FORBIDDEN != 0 {
        let path = path.display();
        return Err(refused(&format!("its permissions ({mode:o}) let other users read or change it: `chmod 600 {path}`")));
    }
    let mut text = String::new();
    file.take(FILE + 1).read_to_string(&mut text).map_err(unread)?;
    if text.len() as u64 > FILE { Err(refused("it is too long for a key")) } else { Ok(text) }
}

impl KeyCommand {
    /// Runs the program with `verb` as its argument and a line on standard input; returns the line
    /// that it prints.
    async fn run(&self, verb: &str, line: &str) -> Result<String> {
        match tokio::time::timeout(self.timeout, self.run_to_end(verb, line)).await {
            Ok(printed) => printed,
            // Dropping it has killed the program, and what that has started.
            Err(_) => Err(self.failed(verb, &format!("it did not end within {} s", self.timeout.as_secs_f32()))),
        }
    }

    async fn run_to_end(&self, verb: &str, line: &str) -> Result<String> {
        let mut command = Command::new(&self.program);
        command.arg(verb).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.process_group(0).spawn().map_err(|e| self.failed(verb, &format!("it cannot be started: {e}")))?;
        let group = Group(child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)));
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let give = async {
            if let Some(mut stdin) = stdin {
                // A program that does not read it says why by its exit status.
                let _ = stdin.write_all(format!("{line}\n").as_bytes()).await;
            }
        };
        let longest = WrappedKey::LONGEST_KEY as u64 + 2;
        let ((), printed, words) = futures::join!(give, read(stdout, longest), read(stderr, WORDS));
        let status = child.wait().await.map_err(|e| self.failed(verb, &e.to_string()))?;
        group.ended();
        if !status.success() {
            let words = String::from_utf8_lossy(&words);
            let words: String = words.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            return Err(self.failed(verb, &format!("{status}: {words}")));
        }
        let printed = String::from_utf8(printed).map_err(|_| self.failed(verb, "it printed bytes that are no text"))?;
        let printed = printed.trim();
        if !WrappedKey::may_be_key(printed) {
            return Err(self.failed(verb, "it printed more than one line, or a line of more than 16 KiB, or other characters than ASCII"));
        }
        Ok(printed.to_owned())
    }

    fn failed(&self, verb: &str, reason: &str) -> Error {
        Error::Locked(format!("key command `{} {verb}`: {reason}", self.program.display()))
    }
}

/// A program that was not waited for, and what it has started: a script that is killed alone would
/// leave the program behind that hangs.
struct Group(Option<Pid>);

impl Group {
    /// Its number may be that of others from now on.
    fn ended(mut self) {
        self.0 = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may have ended by itself.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// The first bytes that come. The rest is read, and dropped, so that the program can end.
async fn read(from: Option<impl AsyncRead + Unpin>, limit: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(mut from) = from {
        let _ = (&mut from).take(limit).read_to_end(&mut bytes).await;
        let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
    }
    bytes
}
