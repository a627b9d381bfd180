//! The configuration of a command: registry, token, local store, and output. Flags win over the
//! environment, which wins over the file.

use super::args::{Global, Repositories, Where};
use super::config::{DEFAULT_REGISTRY, Overrides, agent_socket, store_dir};
use super::failure::{Failure, without_host};
use super::output::Out;
use super::progress;
use super::suggest::{CONFIG, Flags, Suggestion};
use super::usage;
use parking_lot::Mutex;
use pfr_client::export::PlaceOptions;
use pfr_client::{AgentClient, Remote, RemoteOptions, Site, StoredTokens, registry_url, same_registry, same_server};
use pfr_schema::codec::Compression;
use pfr_schema::signature::PublicKey;
use pfr_schema::{ErrorCode, Reference};
use pfr_service::{Secret, UserDirs};
use pfr_store::{Options, Store};
use serde::Serialize;
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Everything a command needs besides its own arguments.
pub struct Context {
    /// The output for results.
    pub out: Out,
    /// Whether results are one JSON document.
    pub json: bool,
    /// Whether to leave out progress bars and summaries.
    pub quiet: bool,
    global: Global,
    settings: Settings,
    /// Flags for the commands in messages, so that they mean the same stores.
    flags: RefCell<Flags>,
    /// The last reference that the command looked up.
    reference: RefCell<Option<Reference>>,
    /// What a user reads after the word `interrupted`.
    interrupted: Arc<Mutex<Option<String>>>,
    /// Whether the command line names a registry; environment and file do not count.
    names_registry: bool,
}

/// Settings from all sources, resolved.
#[derive(Clone, Debug)]
pub struct Settings {
    /// All settings except the tokens.
    all: Overrides,
    /// The base URL of the configured registry.
    registry: String,
    /// The token from the environment. It is sent only to the server of `registry`.
    token: Option<Secret>,
    /// The registry and the token from the configuration file. The token is sent only to that
    /// registry's server.
    file_token: (String, Option<Secret>),
    /// Tokens from earlier logins.
    stored: StoredTokens,
}

impl Context {
    /// The context of this process.
    pub fn new(global: Global) -> Result<Self, Failure> {
        let dirs = UserDirs::of_process();
        let file = std::env::var_os(CONFIG).filter(|path| !path.is_empty()).map(PathBuf::from);
        let file = Overrides::load(file.as_deref(), &dirs)?;
        let mut given = global.settings.clone();
        // A flag without a value counts as not given.
        given.registry = given.registry.filter(|url| !url.is_empty());
        given.store = given.store.filter(|path| !path.as_os_str().is_empty());
        given.tls_ca = given.tls_ca.filter(|path| !path.as_os_str().is_empty());
        given.token = Secret::from_env("PF_TOKEN");
        given.token_over_http =
            std::env::var("PF_TOKEN_OVER_HTTP").ok().filter(|text| !text.is_empty()).map(|text| text == "1" || text == "true");
        let (registry, store, tls_ca) = (given.registry.clone(), given.store.clone(), given.tls_ca.clone());
        let places = Flags::places_of(|name| std::env::var_os(name));
        let flags = Flags { registry, store, tls_ca, places, ..Flags::default() };
        let names_registry = given.registry.is_some() && usage::has_flag(std::env::args_os(), "--registry");
        let settings = Settings::resolve(given, file, &dirs);
        let (out, json, quiet) = (Out::stdout(), global.json, global.quiet);
        let (flags, reference, interrupted) = (flags.into(), RefCell::default(), Arc::default());
        Ok(Self { out, json, quiet, global, settings, flags, reference, interrupted, names_registry })
    }

    /// From now on, a signal that ends the command tells the user this: what is done, or how to go
    /// on.
    pub fn when_interrupted(&self, words: impl Into<String>) {
        *self.interrupted.lock() = Some(words.into());
    }

    /// The words of [`Self::when_interrupted`]. They outlive the command.
    pub fn interrupted(&self) -> Arc<Mutex<Option<String>>> {
        Arc::clone(&self.interrupted)
    }

    /// The options that all commands share, as they were given.
    pub fn global(&self) -> &Global {
        &self.global
    }

    /// Adds to a failure the reference that the command looked up last, and the flags that the
    /// commands in its hint need.
    pub fn explain(&self, failure: Failure) -> Failure {
        let failure = match &*self.reference.borrow() {
            Some(reference) => failure.about(reference),
            None => failure,
        };
        failure.at(&self.flags())
    }

    /// Flags for the commands in messages, so that they mean the same stores as the running
    /// command.
    pub fn flags(&self) -> Flags {
        self.flags.borrow().clone()
    }

    /// The registry that `reference` names, or else the configured one.
    pub fn remote(&self, reference: Option<&Reference>) -> Result<Remote, Failure> {
        self.note(reference);
        let url = self.settings.registry_of(reference);
        self.remote_at(url, self.settings.token_for(url)?)
    }

    /// Whether two references mean the same registry. Those that name none mean the configured one.
    pub fn is_same_registry(&self, a: &Reference, b: &Reference) -> bool {
        same_registry(self.settings.registry_of(Some(a)), self.settings.registry_of(Some(b)))
    }

    /// The base URL of the registry that an argument names, or else of the configured registry.
    pub fn registry_at(&self, given: Option<&str>) -> Result<String, Failure> {
        let Some(given) = given else { return Ok(self.settings.registry.clone()) };
        let refused = || Failure::usage(format!("{given:?} names no registry: expected https://HOST[:PORT][/domains/NAME]"));
        registry_url(given).ok_or_else(refused)
    }

    /// The tokens of earlier logins.
    pub fn tokens(&self) -> &StoredTokens {
        &self.settings.stored
    }

    /// The registry with this base URL.
    pub fn remote_at(&self, url: &str, token: Option<Secret>) -> Result<Remote, Failure> {
        Ok(Remote::new(url, RemoteOptions { token, ..self.remote_options() })?)
    }

    /// How to reach the places where exports are: remote options and credentials.
    pub fn place_options(&self) -> PlaceOptions {
        let user = std::env::var("PF_OCI_USERNAME").ok().filter(|user| !user.is_empty());
        let folder = std::env::var_os("DOCKER_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from);
        let folder = folder.or_else(|| Some(UserDirs::of_process().home?.join(".docker")));
        PlaceOptions {
            remote: self.remote_options(),
            login: user.zip(Secret::from_env("PF_OCI_PASSWORD")),
            docker: folder.map(|folder| folder.join("config.json")),
        }
    }

    /// How to reach a registry, without a token.
    fn remote_options(&self) -> RemoteOptions {
        let token_over_http = self.settings.all.token_over_http.unwrap_or(false);
        let on_retry = Some(progress::on_retry(self.quiet || self.json));
        let extra_roots = self.settings.all.tls_ca.clone();
        RemoteOptions { token_over_http, extra_roots, on_retry, ..retries(&self.settings.all) }
    }

    /// The local store. Creates it if it does not exist.
    pub async fn store(&self) -> Result<Store, Failure> {
        Ok(Store::open(self.store_dir()?, Options::default()).await?)
    }

    /// The local store, if it exists: a command that only reads does not create one.
    pub async fn existing_store(&self) -> Result<Store, Failure> {
        let dir = self.store_dir()?;
        let exists = dir.join("metadata.sqlite").try_exists();
        if !exists.map_err(|e| Failure::io(&format!("cannot open the local store at {}", dir.display()), &e))? {
            return Err(Failure::new(ErrorCode::NotFound, format!("there is no local store at {}", dir.display()))
                .hint("the first pull makes one; --store or PF_STORE says where it is"));
        }
        self.store().await
    }

    /// Remembers `reference` with its repository and registry, for errors and for the commands in
    /// messages.
    fn note(&self, reference: Option<&Reference>) {
        let mut flags = self.flags.borrow_mut();
        if let Some(reference) = reference {
            *self.reference.borrow_mut() = Some(reference.clone());
            flags.repository = Some(reference.repository.clone());
            if reference.registry.is_some() {
                flags.registry.clone_from(&reference.registry);
            }
        }
    }

    /// The site that a command works with: the local store, or the registry of `reference`.
    pub async fn site(&self, at: Where, reference: Option<&Reference>) -> Result<Site, Failure> {
        if !at.local {
            return Ok(Site::Registry(self.remote(reference)?));
        }
        self.note(reference);
        self.flags.borrow_mut().local = true;
        if let Some(reference) = reference
            && let Some(registry) = &reference.registry
        {
            let failure = Failure::usage(format!("--local means the local store, but the reference names the registry {registry}"));
            return Err(match without_host(reference) {
                Some(advice) => failure.hint(advice),
                None => failure,
            });
        }
        Ok(Site::Store(self.existing_store().await?))
    }

    /// The site of the repositories that patterns match: the local store, or the registry that they
    /// name.
    pub async fn site_of(&self, at: Where, repositories: &[Repositories]) -> Result<Site, Failure> {
        let named = repositories.iter().find_map(|repositories| repositories.registry.as_deref());
        match named {
            Some(url) if at.local => Err(Failure::usage(format!("--local means the local store, but a pattern names the registry {url}"))),
            Some(url) => {
                let configured = &self.settings.registry;
                let mut meant = repositories.iter().map(|repositories| repositories.registry.as_ref().unwrap_or(configured));
                if meant.any(|meant| !same_registry(meant, url)) {
                    return Err(Failure::usage("the patterns name several registries; use one command for each"));
                }
                Ok(Site::Registry(self.remote_of(named)?))
            }
            None => self.site(at, None).await,
        }
    }

    /// The registry at `named`, or else the configured one.
    pub fn remote_of(&self, named: Option<&str>) -> Result<Remote, Failure> {
        let Some(url) = named else { return self.remote(None) };
        self.flags.borrow_mut().registry = Some(url.to_owned());
        self.remote_at(url, self.settings.token_for(url)?)
    }

    /// The capture agent of this host: the one at `given`, or the configured one. A registry on the
    /// command line is refused: it would have no effect.
    pub fn agent(&self, given: Option<&Path>) -> Result<AgentClient, Failure> {
        if self.names_registry {
            let message = "--registry has no effect here: the capture agent pushes to its own registry, and pulls from it";
            return Err(Failure::usage(message).hint(
                "`pf-agent serve --registry URL`, PF_AGENT_REGISTRY or `registry` in the agent's settings file names it; \
                 the REF of a snapshot or a restore may begin with the address of another one",
            ));
        }
        self.agent_beside_registry(given)
    }

    /// The capture agent, for a command that sends requests to a registry too, so that `--registry`
    /// has an effect.
    pub fn agent_beside_registry(&self, given: Option<&Path>) -> Result<AgentClient, Failure> {
        let given = given.filter(|path| !path.as_os_str().is_empty());
        self.flags.borrow_mut().agent = given.map(Path::to_owned);
        let socket = given.or(self.settings.all.agent.as_deref());
        let socket =
            socket.ok_or_else(|| Failure::usage("there is no home directory to look for a capture agent in").hint("use --agent SOCKET"))?;
        Ok(AgentClient::new(socket)?)
    }

    /// Writes what a command did: one JSON document, or `lines` for people and then `last` for
    /// scripts.
    pub fn report<T: Serialize>(&mut self, report: &T, lines: impl IntoIterator<Item = String>, last: &str) -> Result<(), Failure> {
        if self.json {
            return self.out.json(report);
        }
        for line in lines.into_iter().filter(|_| !self.quiet) {
            self.out.note(&line)?;
        }
        self.out.line(last)
    }

    /// A command in a message, with the flags that it needs here.
    pub fn suggest(&self, command: &Suggestion) -> String {
        format!("`{}`", command.render(&self.flags.borrow()))
    }

    /// Size above which the local store evicts the least recently used snapshots.
    pub fn max_store_size(&self) -> Option<pfr_client::ByteSize> {
        self.settings.all.max_store_size
    }

    /// The compression of snapshot directories: the given one, else that of the configuration file,
    /// else the default.
    pub fn compression(&self, given: Option<Compression>) -> Compression {
        given.or(self.settings.all.compression).unwrap_or_default()
    }

    /// The public keys for a pull: one of them must have signed the snapshot. They are read from
    /// the given file, or else from the file that the configuration names. `None`: neither is
    /// there, and no signature is needed.
    pub fn verify_keys(&self, given: Option<&Path>) -> Result<Option<Vec<PublicKey>>, Failure> {
        let given = given.filter(|path| !path.as_os_str().is_empty()).or(self.settings.all.verify_key.as_deref());
        Ok(given.map(pfr_client::public_keys).transpose()?)
    }

    fn store_dir(&self) -> Result<&Path, Failure> {
        let store = self.settings.all.store.as_deref();
        store.ok_or_else(|| Failure::usage("there is no home directory to keep a local store in").hint("use --store DIR"))
    }
}

impl Settings {
    fn resolve(mut given: Overrides, mut file: Overrides, dirs: &UserDirs) -> Self {
        let token = given.token.take();
        // A text that is no address is refused when it is used.
        let url_of = |given: Option<&str>| {
            let given = given.unwrap_or(DEFAULT_REGISTRY);
            registry_url(given).unwrap_or_else(|| given.to_owned())
        };
        let file_registry = url_of(file.registry.as_deref());
        let file_token = (file_registry, file.token.take());
        let mut all = given.or(file);
        all.store = all.store.or_else(|| store_dir(dirs));
        all.agent = all.agent.or_else(|| agent_socket(dirs));
        let registry = url_of(all.registry.as_deref());
        Self { all, registry, token, file_token, stored: StoredTokens::of(dirs) }
    }

    fn registry_of<'a>(&'a self, reference: Option<&'a Reference>) -> &'a str {
        reference.and_then(|r| r.registry.as_deref()).unwrap_or(&self.registry)
    }

    /// The token for the registry with this URL. A token is sent to one server only: a pull from
    /// another registry does not send it.
    fn token_for(&self, url: &str) -> Result<Option<Secret>, Failure> {
        let given = self.token.as_ref().filter(|_| same_server(url, &self.registry));
        let (file_registry, token) = &self.file_token;
        let in_file = || token.as_ref().filter(|_| same_server(url, file_registry));
        match given.or_else(in_file) {
            Some(token) => Ok(Some(token.clone())),
            None => Ok(self.stored.token_for(url)?),
        }
    }
}

/// How long a registry is tried again. A time that the user gives counts from the start.
fn retries(settings: &Overrides) -> RemoteOptions {
    let defaults = RemoteOptions::default();
    match (settings.retries, settings.retry_for) {
        (Some(retries), _) => RemoteOptions { retries, retry_for: Duration::ZERO, ..defaults },
        (None, Some(seconds)) => RemoteOptions { retry_for: Duration::from_secs(seconds), retry_from_start: true, ..defaults },
        (None, None) => defaults,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(flag: Option<&str>, file: &str, token: Option<&str>) -> Settings {
        let dirs = UserDirs { home: Some("/h".into()), ..UserDirs::default() };
        let given = Overrides { registry: flag.map(Into::into), token: token.map(Secret::new), ..Overrides::default() };
        Settings::resolve(given, pfr_service::settings::read(file).unwrap(), &dirs)
    }

    #[test]
    fn the_reference_wins_over_the_flag_and_the_flag_over_the_file() {
        let reference: Reference = "https://there/a:b".parse().unwrap();
        let all = settings(Some("http://flag/"), "registry = \"http://file\"", None);
        assert_eq!(all.registry_of(Some(&reference)), "https://there");
        assert_eq!(all.registry_of(None), "http://flag");
        assert_eq!(settings(None, "registry = \"http://file/\"", None).registry_of(None), "http://file");
        assert_eq!(settings(None, "", None).registry_of(None), DEFAULT_REGISTRY);
    }

    #[test]
    fn a_registry_without_a_scheme_is_that_of_a_reference_with_this_host() {
        let registry = |flag, file: &str| settings(flag, file, None).registry_of(None).to_owned();
        assert_eq!(registry(Some("localhost:5377"), ""), "http://localhost:5377");
        assert_eq!(registry(Some("pf.example:443/domains/acme/"), ""), "https://pf.example:443/domains/acme");
        assert_eq!(registry(None, "registry = \"127.0.0.1:1\""), "http://127.0.0.1:1");
        // It is refused when it is used.
        assert_eq!(registry(Some("here"), ""), "here");
        let given = settings(Some("localhost:5377"), "", Some("hush"));
        assert_eq!(given.token_for("http://localhost:5377").unwrap(), Some(Secret::new("hush")));
    }

    #[test]
    fn a_flag_for_retries_wins_over_the_file() {
        let of = |(retries, retry_for), file| {
            let given = Overrides { retries, retry_for, ..Overrides::default() };
            let all = Settings::resolve(given, pfr_service::settings::read(file).unwrap(), &UserDirs::default()).all;
            (all.retries, all.retry_for)
        };
        let file = "retries = 3\nretry-for = 30";
        assert_eq!(of((Some(9), Some(60)), file), (Some(9), Some(60)));
        assert_eq!(of((None, None), file), (Some(3), Some(30)));
        assert_eq!(of((None, None), ""), (None, None));
    }

    #[test]
    fn a_time_for_retries_that_is_given_counts_from_the_start() {
        let of = |retries, retry_for| {
            let options = super::retries(&Overrides { retries, retry_for, ..Overrides::default() });
            (options.retries, options.retry_for.as_secs(), options.retry_from_start)
        };
        assert_eq!(of(None, None), (5, 120, false));
        assert_eq!(of(None, Some(60)), (5, 60, true));
        assert_eq!(of(Some(9), Some(60)), (9, 0, false));
        assert_eq!(of(None, Some(0)), (5, 0, true));
    }

    #[test]
    fn a_token_goes_to_the_registry_of_its_source_only() {
        let hush = Secret::new("hush");
        let file = settings(None, "registry = \"http://file/\"\ntoken = \"hush\"", None);
        let token = |settings: &Settings, url: &str| settings.token_for(url).unwrap();
        assert_eq!(token(&file, "http://file"), Some(hush.clone()));
        assert_eq!(token(&file, "http://file/domains/acme"), Some(hush.clone()));
        assert_eq!(token(&file, "http://stranger"), None);
        let given = settings(Some("http://flag/domains/acme"), "", Some("hush"));
        assert_eq!(token(&given, "http://flag"), Some(hush));
        for stranger in ["http://stranger", "https://flag", "http://flag:81", DEFAULT_REGISTRY] {
            assert_eq!(token(&given, stranger), None, "{stranger}");
        }
    }

    #[test]
    fn the_store_is_in_the_home_directory_unless_told_otherwise() {
        assert_eq!(settings(None, "", None).all.store, Some("/h/.local/share/pf".into()));
        assert_eq!(settings(None, "store = \"/s\"", None).all.store, Some("/s".into()));
    }
}
