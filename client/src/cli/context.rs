//! What was configured: registry, token, local store, and the output. Flags win over the environment, that over the file.

use super::args::{Global, Where};
use super::config::{Config, DEFAULT_REGISTRY, Environment, Secret};
use super::failure::Failure;
use super::output::Out;
use super::progress;
use super::side::Side;
use super::suggest::{Site, Suggestion};
use pfr_client::{AgentClient, Remote, RemoteOptions};
use pfr_schema::{ErrorCode, Reference};
use pfr_store::{Options, Store};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Everything a command needs besides its own arguments.
pub struct Context {
    /// Where results go.
    pub out: Out,
    /// Whether they are one JSON document.
    pub json: bool,
    /// Whether to keep quiet about how it goes.
    pub quiet: bool,
    global: Global,
    settings: Settings,
    /// What commands in messages need to mean the same stores.
    site: RefCell<Site>,
}

/// Settings from all sources, resolved.
#[derive(Clone, Debug)]
pub struct Settings {
    registry: String,
    file: Config,
    token: Option<Secret>,
    store: Option<PathBuf>,
    agent: Option<PathBuf>,
    retries: Option<u32>,
    retry_for: Option<u64>,
}

impl Context {
    /// Of this process.
    pub fn new(global: Global) -> Result<Self, Failure> {
        let environment = Environment::of_process();
        let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty());
        let file = Config::load(variable("PF_CONFIG").map(PathBuf::from).as_deref(), &environment)?;
        let token = match variable("PF_TOKEN").map(|t| t.into_string()) {
            None => None,
            Some(Ok(token)) => Some(Secret(token)),
            Some(Err(_)) => return Err(Failure::usage("PF_TOKEN is not text")),
        };
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let store = global.store.clone().filter(|path| !path.as_os_str().is_empty());
        let site = Site { registry: given(&global.registry), store, ..Site::default() };
        let tries = (global.retries, global.retry_for);
        let settings = Settings::resolve(global.registry.clone(), global.store.clone(), tries, file, token, &environment);
        Ok(Self { out: Out::stdout(), json: global.json, quiet: global.quiet, global, settings, site: site.into() })
    }

    /// The options that all programs share, as they were given.
    pub fn global(&self) -> &Global {
        &self.global
    }

    /// What commands in messages need to mean the same stores as the command that runs.
    pub fn site(&self) -> Site {
        self.site.borrow().clone()
    }

    /// The registry that `reference` lives in.
    pub fn remote(&self, reference: Option<&Reference>) -> Result<Remote, Failure> {
        self.note(reference);
        let url = self.settings.registry_of(reference);
        let token = self.settings.token_for(url).map(|s| s.0.clone());
        let defaults = RemoteOptions::default();
        let retries = self.settings.retries.unwrap_or(defaults.retries);
        let retry_for = match (self.settings.retries, self.settings.retry_for) {
            (Some(_), _) => Duration::ZERO,
            (None, Some(seconds)) => Duration::from_secs(seconds),
            (None, None) => defaults.retry_for,
        };
        let on_retry = Some(progress::on_retry(self.quiet || self.json));
        Ok(Remote::new(url, RemoteOptions { token, retries, retry_for, on_retry, ..defaults })?)
    }

    /// The local store, made if there is none.
    pub async fn store(&self) -> Result<Store, Failure> {
        Ok(Store::open(self.store_dir()?, Options::default()).await?)
    }

    /// The local store, if there is one: looking at nothing should not make something.
    pub async fn existing_store(&self) -> Result<Store, Failure> {
        let dir = self.store_dir()?;
        let exists = dir.join("metadata.sqlite").try_exists();
        if !exists.map_err(|e| Failure::io(&format!("cannot open the local store at {}", dir.display()), &e))? {
            return Err(Failure::bare(ErrorCode::NotFound, format!("there is no local store at {}", dir.display()))
                .hint("the first pull makes one; --store or PF_STORE says where it is"));
        }
        self.store().await
    }

    /// Remembers which stores `reference` means, for commands in messages.
    fn note(&self, reference: Option<&Reference>) {
        let mut site = self.site.borrow_mut();
        if let Some(reference) = reference {
            site.repository = Some(reference.repository.clone());
            if reference.registry.is_some() {
                site.registry.clone_from(&reference.registry);
            }
        }
    }

    /// What a command looks at: the local store, or the registry of `reference`.
    pub async fn side(&self, at: Where, reference: Option<&Reference>) -> Result<Side, Failure> {
        if !at.local {
            return Ok(Side::Remote(self.remote(reference)?));
        }
        self.note(reference);
        self.site.borrow_mut().local = true;
        if let Some(registry) = reference.and_then(|r| r.registry.as_ref()) {
            let failure = Failure::usage(format!("--local means the local store, but the reference names the registry {registry}"));
            let host = registry.split("://").nth(1).unwrap_or_default();
            // It may be a part of a repository's name that looks like a host.
            return Err(match host.parse::<pfr_schema::RepositoryName>() {
                Ok(_) => failure.hint(format!("if {host} is a part of the repository's name, write /{host}/…")),
                Err(_) => failure,
            });
        }
        Ok(Side::Local(self.existing_store().await?))
    }

    /// The capture agent of this host: the one at `given`, else the configured one.
    pub fn agent(&self, given: Option<&Path>) -> Result<AgentClient, Failure> {
        let given = given.filter(|path| !path.as_os_str().is_empty());
        self.site.borrow_mut().agent = given.map(Path::to_owned);
        let socket = given.or(self.settings.agent.as_deref());
        let socket =
            socket.ok_or_else(|| Failure::usage("there is no home directory to look for a capture agent in").hint("use --agent SOCKET"))?;
        Ok(AgentClient::new(socket)?)
    }

    /// A command in a message, with the flags that it needs here.
    pub fn suggest(&self, command: &Suggestion) -> String {
        format!("`{}`", command.render(&self.site.borrow()))
    }

    /// Size above which the local store gives up what was not used for longest.
    pub fn max_store_size(&self) -> Option<pfr_client::ByteSize> {
        self.settings.file.max_store_size
    }

    fn store_dir(&self) -> Result<&Path, Failure> {
        self.settings
            .store
            .as_deref()
            .ok_or_else(|| Failure::usage("there is no home directory to keep a local store in").hint("use --store DIR"))
    }
}

impl Settings {
    fn resolve(
        registry: Option<String>,
        store: Option<PathBuf>,
        (retries, retry_for): (Option<u32>, Option<u64>),
        file: Config,
        token: Option<Secret>,
        environment: &Environment,
    ) -> Self {
        let given = registry.filter(|r| !r.is_empty()).or_else(|| file.registry.clone());
        Self {
            registry: base_url(given.as_deref().unwrap_or(DEFAULT_REGISTRY)).to_owned(),
            token,
            store: store.filter(|s| !s.as_os_str().is_empty()).or_else(|| file.store.clone()).or_else(|| environment.store_dir()),
            agent: file.agent.clone().or_else(|| environment.agent_socket()),
            retries: retries.or(file.retries),
            retry_for: retry_for.or(file.retry_for),
            file,
        }
    }

    fn registry_of<'a>(&'a self, reference: Option<&'a Reference>) -> &'a str {
        reference.and_then(|r| r.registry.as_deref()).unwrap_or(&self.registry)
    }

    /// `PF_TOKEN` is for whatever registry this command talks to; the file's token for the file's registry only,
    /// so that pulling from a stranger does not hand it out.
    fn token_for(&self, url: &str) -> Option<&Secret> {
        let files = base_url(self.file.registry.as_deref().unwrap_or(DEFAULT_REGISTRY));
        self.token.as_ref().or_else(|| self.file.token.as_ref().filter(|_| url == files))
    }
}

fn base_url(url: &str) -> &str {
    url.trim_end_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(flag: Option<&str>, file: &str, token: Option<&str>) -> Settings {
        let environment = Environment { home: Some("/h".into()), ..Environment::default() };
        Settings::resolve(
            flag.map(Into::into),
            None,
            (None, None),
            toml::from_str(file).unwrap(),
            token.map(|t| Secret(t.into())),
            &environment,
        )
    }

    #[test]
    fn the_reference_wins_over_the_flag_and_the_flag_over_the_file() {
        let reference: Reference = "https://there/a:b".parse().unwrap();
        let all = settings(Some("http://flag/"), "registry = \"http://file\"", None);
        assert_eq!(all.registry_of(Some(&reference)), "https://there");
        assert_eq!(all.registry_of(None), "http://flag");
        assert_eq!(settings(Some(""), "registry = \"http://file/\"", None).registry_of(None), "http://file");
        assert_eq!(settings(None, "", None).registry_of(None), DEFAULT_REGISTRY);
    }

    #[test]
    fn how_often_and_how_long_to_try_again_comes_from_the_flag_and_else_from_the_file() {
        let of = |flags, file| {
            let file = toml::from_str(file).unwrap();
            let settings = Settings::resolve(None, None, flags, file, None, &Environment::default());
            (settings.retries, settings.retry_for)
        };
        let file = "retries = 3\nretry-for = 30";
        assert_eq!(of((Some(9), Some(60)), file), (Some(9), Some(60)));
        assert_eq!(of((None, None), file), (Some(3), Some(30)));
        assert_eq!(of((None, None), ""), (None, None));
    }

    #[test]
    fn the_files_token_goes_to_the_files_registry_only() {
        let hush = Secret("hush".into());
        let file = settings(None, "registry = \"http://file/\"\ntoken = \"hush\"", None);
        assert_eq!(file.token_for("http://file"), Some(&hush));
        assert_eq!(file.token_for("http://stranger"), None);
        assert_eq!(settings(None, "", Some("hush")).token_for("http://stranger"), Some(&hush));
    }

    #[test]
    fn the_store_is_in_the_home_directory_unless_told_otherwise() {
        assert_eq!(settings(None, "", None).store, Some("/h/.local/share/pf".into()));
        assert_eq!(settings(None, "store = \"/s\"", None).store, Some("/s".into()));
    }
}
