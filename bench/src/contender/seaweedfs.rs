//! SeaweedFS: a distributed object store, here as one process with an S3 gateway, behind the same
//! HTTP client as docker-registry. Without identities, so nothing is signed. It neither syncs nor
//! takes names that are digests: a pull verifies, writes files, and ends with one `syncfs`.

use super::http::{Peer, Serves};
use super::{Found, Programs, install};
use crate::Result;
use crate::usage::Server;
use pfr_testkit::s3;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Longest time until the server has volumes to write to.
const READY: Duration = Duration::from_secs(120);

struct SeaweedFs {
    program: PathBuf,
}

/// Finds the program.
pub fn find(_: &Programs) -> Found {
    let program = s3::find().ok_or_else(|| install("seaweedfs", s3::INSTALL))?;
    Peer::of(SeaweedFs { program })
}

impl Serves for SeaweedFs {
    const DATA: &'static str = "registry";

    /// Returns when the bucket `bench` takes objects.
    fn serve(&self, dir: &Path, runtime: &Runtime) -> Result<(Server, String)> {
        let data = dir.join(Self::DATA);
        std::fs::create_dir(&data)?;
        let (ports, log) = (s3::free_ports(), dir.join("weed.log"));
        let mut command = Command::new(&self.program);
        let server = Server::start(command.args(s3::arguments(&data, ports)).current_dir(dir), ports[6], &log)?;
        let bucket = format!("http://127.0.0.1:{}/bench", ports[6]);
        runtime.block_on(ready(&bucket)).map_err(|e| format!("{e}: {}", crate::usage::tail(&log)))?;
        Ok((server, bucket))
    }
}

/// Makes the bucket, and an object in it: the gateway answers before there is a volume.
async fn ready(bucket: &str) -> Result<()> {
    let client = reqwest::Client::builder().no_proxy().timeout(READY).build()?;
    let deadline = Instant::now() + READY;
    let put = async |url: String| client.put(url).body("ready").send().await.is_ok_and(|response| response.status().is_success());
    while Instant::now() < deadline {
        // It may be there from an earlier attempt.
        put(bucket.to_owned()).await;
        if put(format!("{bucket}/ready")).await {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Err("seaweedfs takes no objects".into())
}
