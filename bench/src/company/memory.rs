//! Peak memory of a registry while clients push and others ask for statistics of an agent with many
//! forks.

use super::{Args, Company};
use crate::Result;
use crate::contender::{http, pf};
use crate::micro::{line, ui};
use crate::usage::{mib, peak_memory, together};
use pfr_client::{Remote, RemoteOptions};
use pfr_schema::RepositoryName;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Returns the peak since the start of the registry, MiB.
pub fn run(company: &Company, args: &Args, folder: &Path) -> Result<f64> {
    let dir = tempfile::tempdir_in(folder)?;
    let data = dir.path().join("registry");
    let (server, url) = pf::serve(&company.registry, &["--data".as_ref(), data.as_os_str()])?;
    let runtime = http::runtime()?;
    let client = reqwest::Client::builder().no_proxy().build()?;
    runtime.block_on(ui::forks(&client, &url, args.tokens, args.forks))?;
    let peak = || peak_memory(server.pid()).map(mib).ok_or("the registry has ended");
    let before = peak()?;
    let agent: RepositoryName = "bench/agent".parse()?;
    let remote = Remote::new(&url, RemoteOptions::default())?;
    let pushes = company.pushes(&url, dir.path())?;
    let (is_over, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| -> Result<()> {
        let ask = || -> Result<()> {
            while !is_over.load(Ordering::Relaxed) {
                runtime.block_on(remote.stats(Some(&agent)))?;
                answers.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        let asking: Vec<_> = (0..args.asking).map(|_| scope.spawn(ask)).collect();
        let pushed = together(pushes);
        is_over.store(true, Ordering::Relaxed);
        pushed?;
        asking.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?)
    })?;
    let (during, answers) = (peak()?, answers.into_inner());
    line(&format!("peak memory of the registry after {} forks of an agent", args.forks), &[before], "MiB");
    line(&format!("{} pushes and {} statistics at once: answers meanwhile", args.clients, args.asking), &[answers as f64], "statistics");
    Ok(line(&format!("{} pushes and {} statistics at once: peak memory of the registry", args.clients, args.asking), &[during], "MiB"))
}
