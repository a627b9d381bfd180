//! Parsing of foreign JSON, documents and requests alike: a size limit, then errors that carry a
//! JSON path.

mod strict;

use crate::error::{FormatError, shorten};
use serde::de::DeserializeOwned;
use serde_path_to_error::Segment;
use std::io::{self, BufWriter, Write};
use strict::Strict;

/// Parses a whole document of at most `limit` bytes. Trailing bytes are refused, and an array where
/// an object belongs.
///
/// # Errors
/// [`FormatError::TooLarge`]; [`FormatError::Json`] with the JSON path, what was expected there and
/// what was found.
pub fn parse<T: DeserializeOwned>(document: &'static str, bytes: &[u8], limit: u64) -> Result<T, FormatError> {
    if bytes.len() as u64 > limit {
        return Err(FormatError::TooLarge { what: document, found: bytes.len() as u64, limit });
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(Strict(&mut deserializer)).map_err(|e| FormatError::Json {
        document,
        path: shorten(path(e.path())),
        reason: shorten(e.inner().to_string()),
    })?;
    deserializer.end().map_err(|e| FormatError::Json { document, path: "$".into(), reason: e.to_string() })?;
    Ok(value)
}

/// The same for a document of many small values. It is parsed without paths first, since they take
/// a string for each key; one that is wrong is parsed again, to say where.
///
/// # Errors
/// As [`parse`].
pub(crate) fn parse_many<T: DeserializeOwned>(document: &'static str, bytes: &[u8], limit: u64) -> Result<T, FormatError> {
    if bytes.len() as u64 <= limit {
        let mut deserializer = serde_json::Deserializer::from_slice(bytes);
        let parsed: Result<T, serde_json::Error> = serde::Deserialize::deserialize(Strict(&mut deserializer));
        if let Ok(value) = parsed
            && deserializer.end().is_ok()
        {
            return Ok(value);
        }
    }
    parse(document, bytes, limit)
}

/// Takes a value apart that was parsed before, as strictly as [`parse`] does.
///
/// # Errors
/// What was expected, what was found, and the JSON path.
pub fn from_value<T: DeserializeOwned>(value: serde_json::Value) -> Result<T, String> {
    serde_path_to_error::deserialize(Strict(value)).map_err(|e| format!("{} at {}", shorten(e.inner().to_string()), path(e.path())))
}

/// `$.pages[3].k`. Segments that the parser does not know are left out.
fn path(path: &serde_path_to_error::Path) -> String {
    path.iter().fold("$".into(), |path, segment| match segment {
        Segment::Seq { index } => format!("{path}[{index}]"),
        Segment::Map { key } => format!("{path}.{key}"),
        Segment::Enum { variant } => format!("{path}.{variant}"),
        Segment::Unknown => path,
    })
}

/// Compact JSON in field order. Our documents contain nothing that can fail to serialize.
pub(crate) fn bytes<T: serde::Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_else(|e| unreachable!("documents have string keys and finite numbers only: {e}"))
}

/// Writes the same bytes, a few at a time.
///
/// # Errors
/// Those of the writer.
pub(crate) fn write<T: serde::Serialize>(value: &T, writer: impl Write) -> io::Result<()> {
    let mut writer = BufWriter::new(writer);
    serde_json::to_writer(&mut writer, value)?;
    writer.flush()
}
