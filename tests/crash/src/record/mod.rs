//! Records what real programs do to the files below one directory, by tracing their system calls
//! (ptrace).
//!
//! A tracer sees everything: SQLite's own writes, and calls that do not use the C library. A call
//! that may change files and is not modelled fails the recording, so a new one cannot be
//! overlooked. The tracer lets only one thread at a time into a call that changes files, so that
//! the trace has these calls in the order in which they took place.

mod calls;
mod model;
mod process;

use crate::trace::{Op, Trace};
use calls::{Call, Effects};
use model::Model;
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::{HashSet, VecDeque};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Records programs one after the other.
#[derive(Debug)]
pub struct Recorder(Arc<Mutex<Model>>);

/// A running program that is recorded. Killed when dropped.
#[derive(Debug)]
pub struct Recorded {
    leader: Pid,
    thread: Option<JoinHandle<Result<WaitStatus, String>>>,
}

/// Whether this process may trace its children.
#[must_use]
pub fn is_possible() -> bool {
    let dir = tempfile::tempdir().unwrap();
    let recorder = Recorder::new(dir.path());
    recorder.start(Command::new("true")).is_ok_and(|program| program.wait().is_ok())
}

impl Recorder {
    /// Records what happens below `root`. The files that are there now count as durable.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self(Arc::new(Mutex::new(Model::of(root))))
    }

    /// Starts a program. Its children are recorded, too.
    ///
    /// # Errors
    /// A text that says why the program cannot be started or traced.
    pub fn start(&self, command: Command) -> Result<Recorded, String> {
        let (model, (started, starting)) = (Arc::clone(&self.0), channel());
        let thread = std::thread::spawn(move || Tracer::new(model).run(command, &started));
        match starting.recv() {
            Ok(leader) => Ok(Recorded { leader, thread: Some(thread) }),
            Err(_) => Err(thread.join().unwrap().err().unwrap_or_else(|| "it ended at once".into())),
        }
    }

    /// The number of operations so far: everything that a program has acknowledged by now depends
    /// on these only.
    #[must_use]
    pub fn position(&self) -> usize {
        locked(&self.0).trace.ops.len()
    }

    /// The number of the first operation for which `is_it` holds, after the first `from`
    /// operations.
    #[must_use]
    pub fn find(&self, from: usize, is_it: impl Fn(&Op) -> bool) -> Option<usize> {
        locked(&self.0).trace.ops.iter().enumerate().skip(from).find(|(_, op)| is_it(op)).map(|(at, _)| at)
    }

    /// From now on, kills a program before the first operation after so many: before a call that
    /// may be one is made.
    pub fn kill_at(&self, position: usize) {
        locked(&self.0).kill_at = position;
    }

    /// The trace.
    ///
    /// # Errors
    /// A text with the first call that the model does not have.
    pub fn finish(self) -> Result<Trace, String> {
        let model = locked(&self.0);
        model.fault.clone().map_or_else(|| Ok(model.trace.clone()), Err)
    }
}

impl Recorded {
    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        // It may have ended by itself.
        let _ = kill(self.leader, signal);
    }

    /// Waits until it has ended, with all its children.
    ///
    /// # Errors
    /// A text that says why the program could not be traced to its end.
    pub fn wait(mut self) -> Result<WaitStatus, String> {
        self.thread.take().map_or_else(|| Err("it was waited for".into()), |thread| thread.join().unwrap())
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.signal(Signal::SIGKILL);
            drop(thread.join());
        }
    }
}

fn locked(model: &Mutex<Model>) -> MutexGuard<'_, Model> {
    model.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A system call at its entry: the process, the number of the call and its arguments.
type Entered = (Pid, u64, [u64; 6]);

struct Tracer {
    model: Arc<Mutex<Model>>,
    /// The first thread of the program.
    leader: Option<Pid>,
    /// Known threads. Each new thread first stops with a SIGSTOP of the kernel's tracing, which
    /// must not be passed on to it.
    seen: HashSet<Pid>,
    /// The thread inside a call that changes files.
    inside: Option<(Pid, Call)>,
    /// Threads that wait at the entry of a call, with this call.
    waiting: VecDeque<Entered>,
}

impl Tracer {
    fn new(model: Arc<Mutex<Model>>) -> Self {
        Self { model, leader: None, seen: HashSet::new(), inside: None, waiting: VecDeque::new() }
    }

    /// Runs in one thread from start to end: the kernel takes requests about a traced process from
    /// that thread only.
    fn run(mut self, mut command: Command, started: &Sender<Pid>) -> Result<WaitStatus, String> {
        // SAFETY: between fork and exec the child makes one system call, which allocates nothing
        // and takes no lock.
        unsafe { command.pre_exec(|| Ok(ptrace::traceme()?)) };
        let child = command.spawn().map_err(|e| format!("{command:?}: {e}"))?;
        let leader = Pid::from_raw(child.id() as i32);
        self.leader = Some(leader);
        self.seen.insert(leader);
        let words = |what: &'static str| move |e: Errno| format!("{what}: {e}");
        waitpid(leader, Some(WaitPidFlag::__WALL)).map_err(words("waiting for the first stop"))?;
        let options = Options::PTRACE_O_TRACESYSGOOD
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK
            | Options::PTRACE_O_TRACEEXEC
            | Options::PTRACE_O_EXITKILL;
        ptrace::setoptions(leader, options).map_err(words("tracing"))?;
        go_on(leader, None);
        // `Recorder::start` waits for this.
        let _ = started.send(leader);
        let mut ended = None;
        loop {
            // Ignore children of other threads: they are not traced here.
            match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)) {
                Ok(WaitStatus::PtraceSyscall(thread)) => self.at_call(thread),
                Ok(WaitStatus::PtraceEvent(thread, ..)) => go_on(thread, None),
                Ok(WaitStatus::Stopped(thread, Signal::SIGSTOP)) if self.seen.insert(thread) => go_on(thread, None),
                Ok(WaitStatus::Stopped(thread, signal)) => go_on(thread, Some(signal)),
                Ok(status @ (WaitStatus::Exited(thread, _) | WaitStatus::Signaled(thread, ..))) => {
                    if thread == leader {
                        ended = Some(status);
                    }
                    self.gone(thread);
                }
                Ok(_) | Err(Errno::EINTR) => {}
                Err(Errno::ECHILD) => return ended.ok_or_else(|| "it ended unseen".into()),
                Err(error) => return Err(format!("waiting: {error}")),
            }
        }
    }

    fn at_call(&mut self, thread: Pid) {
        // The thread may have been killed meanwhile. Then its end is reported next.
        let Ok(info) = ptrace::syscall_info(thread) else { return go_on(thread, None) };
        match info.op {
            nix::libc::PTRACE_SYSCALL_INFO_ENTRY => {
                // SAFETY: `op` says which member the kernel has written.
                let entry = unsafe { info.u.entry };
                self.waiting.push_back((thread, entry.nr, entry.args));
            }
            nix::libc::PTRACE_SYSCALL_INFO_EXIT => {
                if let Some((_, call)) = self.inside.take_if(|(inside, _)| *inside == thread) {
                    // SAFETY: as above.
                    let exit = unsafe { info.u.exit };
                    locked(&self.model).done(thread, call, (exit.is_error == 0).then_some(exit.sval));
                }
                go_on(thread, None);
            }
            _ => go_on(thread, None),
        }
        self.let_in();
    }

    /// Lets threads into their calls, until one is inside a call that changes files. Calls that
    /// change none go on in any case.
    fn let_in(&mut self) {
        let mut still = VecDeque::new();
        while let Some(entered @ (thread, number, arguments)) = self.waiting.pop_front() {
            match calls::effects(number) {
                Effects::None => go_on(thread, None),
                Effects::Some if self.inside.is_some() => still.push_back(entered),
                Effects::Some => {
                    let mut model = locked(&self.model);
                    self.inside = model.begun(thread, number, &arguments).map(|call| (thread, call));
                    if self.inside.is_some() && model.trace.ops.len() >= model.kill_at {
                        // A thread that is killed at the entry of a call does not make it. That the
                        // program has ended meanwhile is reported next.
                        let _ = self.leader.map(|leader| kill(leader, Signal::SIGKILL));
                    } else {
                        go_on(thread, None);
                    }
                }
            }
        }
        self.waiting = still;
    }

    fn gone(&mut self, thread: Pid) {
        self.inside.take_if(|(inside, _)| *inside == thread);
        self.waiting.retain(|(waiting, ..)| *waiting != thread);
        self.let_in();
    }
}

/// Lets a thread go on to its next call. If it was killed meanwhile, that is reported next.
fn go_on(thread: Pid, signal: Option<Signal>) {
    let _ = ptrace::syscall(thread, signal);
}
