//! x
mod narrator;
mod processes;
mod stage;
use super::args::Demo;
use super::context::Context;
use super::failure::Failure;
pub async fn run(_c: &mut Context, _a: Demo) -> Result<(), Failure> { Ok(()) }
