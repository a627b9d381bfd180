//! The store alone.
use crate::Result;
/// Arguments of `store`.
#[derive(clap::Args)]
pub struct Args {}
/// Measures.
pub fn run(_: &Args) -> Result<()> { Ok(()) }
