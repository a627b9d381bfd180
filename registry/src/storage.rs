//! Where a registry's store lives.

use crate::config::Config;
use pfr_store::{Result, Store};

/// Opens the store that the settings name.
///
/// # Errors
/// Those of the store.
pub async fn open(config: &Config) -> Result<Store> {
    Store::open(&config.data, config.store_options()).await
}
