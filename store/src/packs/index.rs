//! A pack's index as it lies on storage.

use crate::Store;
use crate::error::{Error, Result};
use bytes::Bytes;
use pfr_schema::pack::{Entry, FOOTER_LEN, Footer};

/// What a pack says that lies in it.
pub(crate) struct Index {
    /// Where the frames end.
    pub frames_end: u64,
    /// Bytes of the whole pack.
    pub len: u64,
    pub entries: Vec<Entry>,
}

/// The outcome of reading a pack's index.
pub(crate) enum IndexFound {
    Good(Index),
    /// With the bytes of the pack and what is wrong.
    Bad(u64, String),
    NoPack,
}

/// Reads and checks a pack's footer and index.
pub(crate) async fn read_index(store: &Store, key: &str) -> Result<IndexFound> {
    let Some(len) = store.pack_len(key).await? else { return Ok(IndexFound::NoPack) };
    let Some(footer_at) = len.checked_sub(FOOTER_LEN as u64) else {
        return Ok(IndexFound::Bad(len, format!("it has {len} bytes: no footer fits into it")));
    };
    let footer = match store.read_pack(key, footer_at..len).await {
        Err(error @ Error::Altered { .. }) => return Ok(IndexFound::Bad(len, error.to_string())),
        footer => footer?,
    };
    let Some(footer) = footer else { return Ok(IndexFound::NoPack) };
    let footer = match Footer::parse(&footer, len) {
        Ok(footer) => footer,
        Err(error) => return Ok(IndexFound::Bad(len, error.to_string())),
    };
    let index = match footer.index_len {
        0 => Ok(Some(Bytes::new())),
        _ => store.read_pack(key, footer.index_offset..footer_at).await,
    };
    let index = match index {
        Err(error @ Error::Altered { .. }) => return Ok(IndexFound::Bad(len, error.to_string())),
        index => index?,
    };
    let Some(index) = index else { return Ok(IndexFound::NoPack) };
    let limits = store.options.limits.clone();
    let parsed = pfr_service::task::spawn_blocking(move || footer.parse_index(&index, &limits)).await?;
    Ok(match parsed {
        Ok(entries) => IndexFound::Good(Index { frames_end: footer.index_offset, len, entries }),
        Err(error) => IndexFound::Bad(len, error.to_string()),
    })
}
