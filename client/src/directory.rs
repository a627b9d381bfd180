//! Directory.

/// A directory.
#[derive(Debug)]
pub struct Directory {}
