//! Clients that push and clients that pull at once, beside one client that moves the same bytes
//! alone: the throughput of all together, and how evenly they share it.

use super::{Args, Company};
use crate::Result;
use crate::contender::pf;
use crate::meter::settle;
use crate::micro::line;
use crate::report::Spread;
use crate::usage::together;
use std::ffi::OsStr;
use std::path::Path;

/// What a round, or the median of several, found.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    /// Throughput of all together over that of one client alone.
    pub total: f64,
    /// The smallest share of a push, or of a pull, over the largest one.
    pub least: f64,
}

/// Returns the medians.
pub fn run(company: &Company, args: &Args, folder: &Path) -> Result<Shares> {
    let rounds: Vec<Shares> = (0..args.rounds).map(|_| round(company, args, folder)).collect::<Result<_>>()?;
    let what = format!("{0} pushes and {0} pulls at once", args.clients);
    let of = |value: fn(&Shares) -> f64| rounds.iter().map(value).collect::<Vec<f64>>();
    Ok(Shares {
        total: line(&format!("{what}: throughput, over that of one client alone"), &of(|shares| shares.total), "×"),
        least: line(&format!("{what}: the smallest share, over the largest one"), &of(|shares| shares.least), "×"),
    })
}

/// A registry of its own: one client pushes and pulls a snapshot that is as large as all others
/// together. Then come all others.
fn round(company: &Company, args: &Args, folder: &Path) -> Result<Shares> {
    let dir = tempfile::tempdir_in(folder)?;
    let data = dir.path().join("registry");
    let (_server, url) = pf::serve(&company.registry, &["--data".as_ref(), data.as_os_str()])?;
    let [large, pulled]: [&OsStr; 2] = ["bench/large:latest".as_ref(), "bench/pulled:latest".as_ref()];
    let alone = |arguments: &[&OsStr]| -> Result<f64> {
        let command = company.client(&url, &dir.path().join("alone"), arguments)?;
        settle(folder)?;
        Ok(together(vec![command])?.iter().sum())
    };
    alone(&["push".as_ref(), company.pulled.as_os_str(), pulled])?;
    let one = alone(&["push".as_ref(), company.large.as_os_str(), large])? + alone(&["pull".as_ref(), large])?;
    let mut commands = company.pushes(&url, dir.path())?;
    for number in 0..args.clients {
        commands.push(company.client(&url, &dir.path().join(format!("pulls-{number}")), &["pull".as_ref(), pulled])?);
    }
    settle(folder)?;
    let seconds = together(commands)?;
    let (pushes, pulls) = seconds.split_at(company.snapshots.len());
    let longest = seconds.iter().copied().fold(0.001, f64::max);
    Ok(Shares { total: one / longest, least: least(pushes).min(least(pulls)) })
}

/// All move the same bytes: the last one to end had the smallest share of the time until then.
fn least(seconds: &[f64]) -> f64 {
    Spread::of(seconds.iter().copied()).map_or(0.0, |spread| spread.min / spread.max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_to_end_had_the_smallest_share() {
        assert!((least(&[2.0, 4.0, 3.0]) - 0.5).abs() < 1e-9);
        assert!((least(&[2.0, 2.0]) - 1.0).abs() < 1e-9);
    }
}
