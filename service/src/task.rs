//! Tasks of the runtime, and work that blocks, without their types.
//!
//! For each type of future that is a task, the compiler makes a copy of what tokio does around it,
//! and one more for the second kind of scheduler: some 1,600 lines of LLVM's language each, an
//! eighth of the agent. Here the future and its result are boxed, so that there is one copy. Of a
//! [`JoinSet`] there is one for each type of result.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, JoinError, JoinHandle, JoinSet};

type Output = Box<dyn Any + Send>;
type Work = Pin<Box<dyn Future<Output = Output> + Send>>;
type BlockingWork = Box<dyn FnOnce() -> Output + Send>;

/// A task that runs. Its result comes from awaiting it; if it is dropped, the task goes on.
pub struct Task<T> {
    handle: JoinHandle<Output>,
    result: PhantomData<fn() -> T>,
}

/// Runs a future in the background. Must be called within a runtime.
#[track_caller]
pub fn spawn<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Task<T> {
    spawn_on(&Handle::current(), work)
}

/// Runs a future in the background of this runtime.
#[track_caller]
pub fn spawn_on<T: Send + 'static>(runtime: &Handle, work: impl Future<Output = T> + Send + 'static) -> Task<T> {
    // Boxed first: a future that awaits a captured one has room for it twice.
    let work = Box::pin(work);
    Task::of(start(runtime, Box::pin(async { Box::new(work.await) as Output })))
}

/// Runs a future in the background, as one of a set of tasks. Must be called within a runtime.
#[track_caller]
pub fn spawn_in<T: Send + 'static>(set: &mut JoinSet<T>, work: impl Future<Output = T> + Send + 'static) -> AbortHandle {
    start_in(set, Box::pin(work))
}

/// Runs work that blocks, on a thread where it may. It starts soon, and cannot be stopped once it
/// has. Must be called within a runtime.
#[track_caller]
pub fn spawn_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
    Task::of(start_blocking(Box::new(|| Box::new(work()))))
}

#[track_caller]
fn start(runtime: &Handle, work: Work) -> JoinHandle<Output> {
    runtime.spawn(work)
}

#[track_caller]
fn start_in<T: Send + 'static>(set: &mut JoinSet<T>, work: Pin<Box<dyn Future<Output = T> + Send>>) -> AbortHandle {
    set.spawn(work)
}

#[track_caller]
fn start_blocking(work: BlockingWork) -> JoinHandle<Output> {
    tokio::task::spawn_blocking(work)
}

impl<T> Task<T> {
    fn of(handle: JoinHandle<Output>) -> Self {
        Self { handle, result: PhantomData }
    }

    /// Stops the task where it waits next.
    pub fn abort(&self) {
        self.handle.abort();
    }

    /// With this the task can be stopped later.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        self.handle.abort_handle()
    }

    /// Whether the task has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.handle.is_finished()
    }
}

/// The result of the task, or that it panicked or was stopped.
impl<T: 'static> Future for Task<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let output = ready!(Pin::new(&mut self.handle).poll(cx))?;
        Poll::Ready(Ok(*output.downcast().unwrap_or_else(|_| unreachable!("a task gives what it was started for"))))
    }
}

impl<T> fmt::Debug for Task<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.handle.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::sync::mpsc;
    use std::time::Duration;
    use tokio::time::timeout;

    const SOON: Duration = Duration::from_secs(60);

    /// Files of Rust below a folder, without tests.
    fn sources(folder: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) =
            entries.filter(|path| !path.ends_with("tests")).partition(|path| path.is_dir());
        let files = files.into_iter().filter(|file| file.extension().is_some_and(|end| end == "rs") && !file.ends_with("tests.rs"));
        files.chain(folders.iter().flat_map(|folder| sources(folder))).collect()
    }

    /// Whether a line starts a task or blocking work without this module. Threads and processes
    /// are started in other words.
    fn starts_a_task(line: &str) -> bool {
        line.match_indices("spawn").any(|(at, _)| {
            let (before, rest) = (&line[..at], &line[at..]);
            let is_called =
                ["(", "_blocking(", "_on(", "_blocking_on(", "_local("].iter().any(|end| rest["spawn".len()..].starts_with(end));
            let is_ours = ["pfr_service::task::", "crate::task::"].iter().any(|path| before.ends_with(path));
            let is_thread =
                ["spawn()", "spawn(move ||", "spawn(||"].iter().any(|call| rest.starts_with(call)) || before.ends_with("thread::");
            is_called && !is_ours && !is_thread && !before.ends_with("fn ")
        })
    }

    #[test]
    fn the_crates_of_the_product_start_tasks_here_only() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        let files: Vec<PathBuf> = ["service", "store", "client", "registry", "capture-agent"]
            .iter()
            .flat_map(|name| sources(&root.join(name).join("src")))
            .collect();
        assert!(files.len() > 300, "{} files: where are the others?", files.len());
        let mut found = Vec::new();
        for file in files.iter().filter(|file| !file.ends_with("service/src/task.rs")) {
            let text = fs::read_to_string(file).expect("text");
            found.extend(
                text.lines()
                    .enumerate()
                    .filter(|(_, line)| starts_a_task(line))
                    .map(|(at, line)| format!("{}:{}: {}", file.display(), at + 1, line.trim())),
            );
        }
        assert!(found.is_empty(), "use pfr_service::task:\n{}", found.join("\n"));
        assert!(starts_a_task("drop(runtime.spawn(task));") && starts_a_task("task::spawn_blocking(work)"));
        assert!(!starts_a_task("Command::new(program).spawn()") && !starts_a_task("pfr_service::task::spawn(work)"));
    }

    #[tokio::test]
    async fn a_task_gives_its_result() {
        assert_eq!(spawn(async { 7_u8 }).await.expect("a number"), 7);
        assert_eq!(spawn_on(&Handle::current(), async { "seven".to_owned() }).await.expect("a string"), "seven");
        assert_eq!(spawn_blocking(|| vec![7_u64; 3]).await.expect("numbers"), [7; 3]);
        let task = spawn(async {});
        timeout(SOON, async {
            while !task.is_finished() {
                tokio::task::yield_now().await
            }
        })
        .await
        .expect("it ends");
        task.await.expect("nothing");
    }

    #[tokio::test]
    async fn a_set_of_tasks_gives_all_results() {
        let mut set = JoinSet::new();
        for number in 0..3 {
            spawn_in(&mut set, async move { number });
        }
        let mut results = timeout(SOON, set.join_all()).await.expect("all end");
        results.sort_unstable();
        assert_eq!(results, [0, 1, 2]);
    }

    #[tokio::test]
    async fn a_panic_is_an_error_of_the_task_alone() {
        let panicked = spawn(async { assert!(std::hint::black_box(false), "the reason") }).await.expect_err("a panic");
        assert!(panicked.is_panic() && panicked.to_string().contains("the reason"), "{panicked}");
        let panicked = spawn_blocking(|| assert!(std::hint::black_box(false), "the reason")).await.expect_err("a panic");
        assert!(panicked.is_panic(), "{panicked}");
    }

    #[tokio::test]
    async fn a_dropped_task_goes_on_and_a_stopped_one_does_not() {
        let (said, heard) = mpsc::channel();
        let other = said.clone();
        drop(spawn(async move { other.send(1).expect("it is heard") }));
        timeout(SOON, async {
            while heard.try_recv().is_err() {
                tokio::task::yield_now().await
            }
        })
        .await
        .expect("it goes on");
        let stopped = [spawn(std::future::pending::<()>()), spawn(std::future::pending())];
        stopped[0].abort();
        stopped[1].abort_handle().abort();
        for task in stopped {
            assert!(timeout(SOON, task).await.expect("it ends").expect_err("it was stopped").is_cancelled());
        }
        drop(said);
    }
}
