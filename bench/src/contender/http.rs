//! A plain HTTP client for peers: one request for each blob, as many at a time as there are
//! connections, which are kept alive. Their number is found by trial before the run.

use super::{Contender, Found};
use crate::Result;
use crate::meter::{Meter, Reported, Step};
use crate::usage::Server;
use crate::workload::{Blob, Snapshot, Workload, dir_bytes, warm_dir};
use reqwest::header::CONTENT_TYPE;
use reqwest::{RequestBuilder, Response, StatusCode};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Numbers of connections to try.
const CONNECTIONS: [usize; 3] = [4, 8, 16];
/// Blobs in each trial.
const TRIAL_BLOBS: usize = 1024;
/// Longest time for a request.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A runtime for clients, in this process.
pub fn runtime() -> std::result::Result<Runtime, String> {
    // A process can set it only once. It does not matter which one is set: this is plain HTTP.
    let _ = rustls::crypto::ring::default_provider().install_default();
    tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(|e| format!("no threads for a client: {e}"))
}

/// What has moved so far.
#[derive(Clone, Copy, Default)]
pub struct Moved {
    /// Bytes of bodies.
    pub bytes: u64,
    /// Requests.
    pub requests: u64,
}

impl Moved {
    /// What has moved since `before`.
    pub fn since(self, before: Self) -> Reported {
        let (bytes, requests) = (self.bytes - before.bytes, self.requests - before.requests);
        Reported { bytes_moved: Some(bytes), round_trips: Some(requests), client_memory: None }
    }
}

/// The client, which counts.
pub struct Http {
    /// Its connections.
    pub client: reqwest::Client,
    /// How many there are.
    pub connections: usize,
    bytes: AtomicU64,
    requests: AtomicU64,
}

impl Http {
    /// A client with so many connections.
    pub fn new(connections: usize) -> Result<Self> {
        let client = reqwest::Client::builder().no_proxy().tcp_nodelay(true).pool_max_idle_per_host(connections).timeout(TIMEOUT);
        Ok(Self { client: client.build()?, connections, bytes: AtomicU64::new(0), requests: AtomicU64::new(0) })
    }

    /// What it has moved.
    pub fn moved(&self) -> Moved {
        Moved { bytes: self.bytes.load(Ordering::Relaxed), requests: self.requests.load(Ordering::Relaxed) }
    }

    /// Sends a request.
    pub async fn send(&self, request: RequestBuilder) -> Result<Response> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        Ok(request.send().await?)
    }

    /// Sends a blob to a URL.
    pub async fn put(&self, url: impl reqwest::IntoUrl, blob: &Blob) -> Result<Response> {
        self.bytes.fetch_add(blob.len as u64, Ordering::Relaxed);
        // The file is in the page cache, so this takes far less than a millisecond and needs no
        // other thread.
        let body = std::fs::read(&blob.path)?;
        self.send(self.client.put(url).header(CONTENT_TYPE, "application/octet-stream").body(body)).await
    }

    /// Fetches a blob into a file of its own in `dir`, and compares it with its digest as it comes.
    pub async fn save(&self, url: &str, hex: &str, dir: &Path) -> Result<()> {
        let mut response = self.send(self.client.get(url)).await?.error_for_status()?;
        let (mut file, mut hasher) = (File::create_new(dir.join(hex))?, Sha256::new());
        while let Some(bytes) = response.chunk().await? {
            self.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            hasher.update(&bytes);
            file.write_all(&bytes)?;
        }
        if hex::encode(hasher.finalize()) == hex { Ok(()) } else { Err(format!("{hex} came damaged").into()) }
    }

    /// Runs `work` on every item, as many at a time as there are connections.
    pub async fn each<T, W, F>(&self, items: Vec<T>, work: W) -> Result<()>
    where
        T: Clone + Send + Sync + 'static,
        W: Fn(T) -> F + Clone + Send + 'static,
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let (items, next) = (Arc::new(items), Arc::new(AtomicUsize::new(0)));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..self.connections {
            let (items, next, work) = (Arc::clone(&items), Arc::clone(&next), work.clone());
            tasks.spawn(async move {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(item.clone()).await?;
                }
                Ok(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done?.map_err(|e: Box<dyn std::error::Error + Send + Sync>| e)?;
        }
        Ok(())
    }
}

/// The status that was expected, or an error.
pub fn expect(response: Response, status: StatusCode) -> Result<Response> {
    if response.status() == status { Ok(response) } else { Err(format!("{}: {}", response.url().path(), response.status()).into()) }
}

/// Makes a directory of pulled files durable, and only then visible.
pub fn publish(partial: &Path, dir: &Path) -> Result<()> {
    rustix::fs::syncfs(File::open(partial)?)?;
    std::fs::rename(partial, dir)?;
    Ok(File::open(dir.parent().ok_or("no parent")?)?.sync_all()?)
}

/// A server that keeps what is PUT under a URL.
struct Objects {
    http: Arc<Http>,
    base: String,
}

impl Objects {
    /// Objects below the URL `base`.
    fn new(base: String, connections: usize) -> Result<Self> {
        Ok(Self { http: Arc::new(Http::new(connections)?), base })
    }

    /// Sends every blob.
    async fn push(&self, blobs: &[Blob]) -> Result<()> {
        let (http, base) = (Arc::clone(&self.http), self.base.clone());
        let put = move |blob: Blob| {
            let (http, url) = (Arc::clone(&http), format!("{base}/{}", hex::encode(blob.digest)));
            async move {
                http.put(url, &blob).await?.error_for_status()?;
                Ok(())
            }
        };
        self.http.each(blobs.to_vec(), put).await
    }

    /// Fetches every blob into `dir`, which appears when it is complete and durable.
    async fn pull(&self, blobs: &[Blob], dir: &Path) -> Result<()> {
        let partial = Arc::new(dir.with_extension("partial"));
        std::fs::create_dir_all(&*partial)?;
        let (http, base, into) = (Arc::clone(&self.http), self.base.clone(), Arc::clone(&partial));
        let save = move |hex: String| {
            let (http, url, into) = (Arc::clone(&http), format!("{base}/{hex}"), Arc::clone(&into));
            async move { http.save(&url, &hex, &into).await }
        };
        self.http.each(blobs.iter().map(|blob| hex::encode(blob.digest)).collect(), save).await?;
        publish(&partial, dir)
    }

    /// Measures a push and a pull of a server that keeps its data in `data`.
    fn round(&self, runtime: &Runtime, servers: &[u32], workload: &Workload, data: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let (raw, blobs, dir) = (workload.base.bytes(), &workload.base.blobs, data.parent().ok_or("no parent")?);
        workload.base.warm()?;
        meter.measure(Step::Push, raw, dir, servers, || {
            runtime.block_on(self.push(blobs))?;
            Ok(self.http.moved().since(Moved::default()))
        })?;
        let pushed = self.http.moved();
        meter.stored(dir_bytes(data)?);
        warm_dir(data)?;
        meter.measure(Step::PullDir, raw, dir, servers, || {
            runtime.block_on(self.pull(blobs, &dir.join("pulled")))?;
            Ok(self.http.moved().since(pushed))
        })
    }
}

/// A server of objects.
pub trait Serves {
    /// Where it keeps them, in the directory in which it is started.
    const DATA: &'static str;

    /// Starts it in `dir`. Returns it, and the URL below which it keeps objects.
    fn serve(&self, dir: &Path, runtime: &Runtime) -> Result<(Server, String)>;
}

/// A contender that keeps each blob as an object.
pub struct Peer<S> {
    server: S,
    runtime: Runtime,
    connections: usize,
}

impl<S: Serves + 'static> Peer<S> {
    /// The contender that starts this server.
    pub fn of(server: S) -> Found {
        Ok(Box::new(Self { server, runtime: runtime()?, connections: 8 }))
    }
}

impl<S: Serves> Contender for Peer<S> {
    fn prepare(&mut self, workload: &Workload, parent: &Path) -> Result<Option<String>> {
        let (best, words) = best_connections(workload, parent, |part, dir, connections| {
            let (_server, url) = self.server.serve(dir, &self.runtime)?;
            let objects = Objects::new(url, connections)?;
            let start = Instant::now();
            self.runtime.block_on(objects.push(&part.blobs))?;
            self.runtime.block_on(objects.pull(&part.blobs, &dir.join("pulled")))?;
            Ok(start.elapsed())
        })?;
        self.connections = best;
        Ok(Some(words))
    }

    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let (server, url) = self.server.serve(dir, &self.runtime)?;
        Objects::new(url, self.connections)?.round(&self.runtime, &[server.pid()], workload, &dir.join(S::DATA), meter)
    }
}

/// Tries numbers of connections on a part of the workload. Returns the best, and the result in
/// words. `trial` pushes and pulls in an empty directory, and returns how long that took: without
/// the start of the server.
pub fn best_connections(
    workload: &Workload,
    parent: &Path,
    mut trial: impl FnMut(&Snapshot, &Path, usize) -> Result<Duration>,
) -> Result<(usize, String)> {
    let blobs: Vec<Blob> = workload.base.blobs.iter().take(TRIAL_BLOBS).cloned().collect();
    let part = Snapshot { dir: workload.base.dir.clone(), blobs };
    part.warm()?;
    let mut found = Vec::new();
    for connections in CONNECTIONS {
        let dir = tempfile::tempdir_in(parent)?;
        found.push((trial(&part, dir.path(), connections)?.as_secs_f64(), connections));
    }
    let best = found.iter().min_by(|a, b| a.0.total_cmp(&b.0)).ok_or("nothing tried")?.1;
    let tried: Vec<String> = found.iter().map(|(seconds, connections)| format!("{connections}: {seconds:.2} s")).collect();
    Ok((best, format!("{best} connections ({} blobs pushed and pulled with {})", part.blobs.len(), tried.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_number_of_connections_moves_the_blobs_fastest_whatever_its_server_takes_to_start() {
        let parent = tempfile::tempdir().unwrap();
        let empty = Snapshot { dir: parent.path().to_owned(), blobs: Vec::new() };
        let workload = Workload { pages: 0, base: empty.clone(), fork: empty };
        let trial = |_: &Snapshot, _: &Path, connections: usize| Ok(Duration::from_secs(if connections == 16 { 1 } else { 60 }));
        let (best, words) = best_connections(&workload, parent.path(), trial).unwrap();
        assert_eq!(best, 16);
        assert!(words.contains("4: 60.00 s, 8: 60.00 s, 16: 1.00 s"), "{words}");
    }
}
