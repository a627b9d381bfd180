//! Opens the stores of a registry: metadata in SQLite or PostgreSQL, packs in a directory or a
//! bucket, in any combination.

use crate::config::Config;
use crate::redirect::Redirects;
use object_store::ObjectStore;
use object_store::signer::Url;
use pfr_store::storage::Storage;
use pfr_store::{
    DomainHome, DomainPacks, DomainTables, Domains, Error, Keys, Metadata, Options, PostgresMetadata, PostgresOptions, Result,
    SqliteMetadata, Store,
};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Open domains, with the parts that only a registry uses.
pub struct Opened {
    /// The domains, of which the default one is open.
    pub domains: Domains,
    /// The storage that clients are redirected to for large downloads, if any.
    pub redirects: Option<Redirects>,
}

/// Opens the domains that the settings name.
///
/// # Errors
/// Those of the store.
pub async fn open(config: &Config) -> Result<Domains> {
    Ok(open_parts(config).await?.domains)
}

/// The same, with the parts that only a registry uses.
///
/// # Errors
/// Those of the store; [`Error::Invalid`] for a storage that lacks a feature that the settings
/// need.
pub async fn open_parts(config: &Config) -> Result<Opened> {
    let options = config.store_options();
    // Before anything is made.
    let keys = Keys::new(config.key_options())?;
    if config.database.is_empty() && config.storage.is_empty() {
        let store = keys.open_default(Store::open(&config.data, options).await?).await?;
        let home = DomainHome { tables: DomainTables::Files(config.data.clone()), packs: beside_data(config) };
        return Ok(Opened { domains: Domains::with_keys(store, Some(home), keys), redirects: None });
    }
    let (packs, storage) = packs(config)?;
    probe(&storage).await?;
    let dir = storage.dir().map(std::path::Path::to_owned);
    let redirects = match config.redirect_downloads {
        false => None,
        true if storage.can_sign() => Some(Redirects::new(storage, Duration::from_secs(config.redirect_seconds))),
        true => return Err(Error::Invalid(format!("{} has no signed URLs; redirect-downloads needs them", storage.url()))),
    };
    let (metadata, tables) = metadata(config, &options).await?;
    let mut store = Store::new(Arc::clone(&packs), metadata, options);
    if let Some(dir) = &dir {
        store = store.with_packs_dir(dir);
    }
    let store = keys.open_default(store).await?;
    let packs = match dir {
        None => DomainPacks::Bucket(packs),
        Some(root) if !config.storage.is_empty() => DomainPacks::Files { root, inside: "" },
        Some(_) => beside_data(config),
    };
    Ok(Opened { domains: Domains::with_keys(store, Some(DomainHome { tables, packs }), keys), redirects })
}

/// The directory that `storage` names; none if it names no directory.
pub(crate) fn directory(config: &Config) -> Option<PathBuf> {
    Url::parse(&config.storage).ok().filter(|url| url.scheme() == "file")?.to_file_path().ok()
}

/// The packs of other domains where those of the default one are in the data directory.
fn beside_data(config: &Config) -> DomainPacks {
    DomainPacks::Files { root: config.data.clone(), inside: "packs" }
}

fn packs(config: &Config) -> Result<(Arc<dyn ObjectStore>, Storage)> {
    if !config.storage.is_empty() {
        return pfr_store::storage::open(&config.storage, &config.storage_options());
    }
    let dir =
        std::path::absolute(config.data.join("packs")).map_err(|e| Error::Unavailable { what: "directory", reason: e.to_string() })?;
    pfr_store::storage::open_dir(&dir)
}

async fn metadata(config: &Config, options: &Options) -> Result<(Arc<dyn Metadata>, DomainTables)> {
    if !config.database.is_empty() {
        let postgres = PostgresOptions { max_connections: config.database_connections, ..PostgresOptions::default() };
        let metadata = Arc::new(PostgresMetadata::open(config.database.expose(), postgres).await?);
        return Ok((Arc::clone(&metadata).metadata(), DomainTables::Postgres(metadata)));
    }
    pfr_store::storage::make_dir(&config.data)?;
    let file = config.data.join("metadata.sqlite");
    let metadata = SqliteMetadata::open_above(&file, options.clock.clone(), options.min_free).await?;
    Ok((metadata, DomainTables::Files(config.data.clone())))
}

/// Logs which operations the storage supports. Only writing and reading are required; the rest is
/// for information.
async fn probe(storage: &Storage) -> Result<()> {
    let seen = match storage.probe().await {
        // A registry must start without free space: otherwise no space could be freed.
        Err(Error::Full(reason)) => {
            tracing::warn!(storage = storage.url(), reason, "storage is full: pushes are refused until space is freed");
            return Ok(());
        }
        other => other?,
    };
    macro_rules! line {
        ($level:ident, $words:literal) => {
            tracing::$level!(
                storage = storage.url(),
                write = true,
                read = true,
                list = seen.list,
                delete = seen.delete,
                create_if_absent = seen.create_if_absent,
                signed_urls = storage.can_sign(),
                $words
            )
        };
    }
    if seen.list && seen.delete {
        line!(info, "storage checked");
    } else {
        line!(warn, "storage checked: without delete no space is ever freed, without list the metadata cannot be rebuilt");
    }
    Ok(())
}
