#![doc = include_str!("serve.md")]

mod calls;
mod commands;
mod lines;
mod pause;
mod sequences;

pub use lines::{Command, Line, Named, Prompt, read};

use crate::attach;
use crate::blocks::Pin;
use crate::cache::SeqId;
use crate::compute::Core;
use crate::error::EngineError;
use pfr_schema::engine::{OracleRequest, PROTOCOL, Register, Verb};
use sequences::Sequences;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

/// The text of `--help`: the purpose of the process, and the lines that it reads and writes.
pub const HELP: &str = include_str!("serve.md");

/// The settings of a serving engine.
#[derive(Clone, Debug)]
pub struct Options {
    /// Socket of the capture agent; without it the engine serves only its standard input.
    pub agent: Option<PathBuf>,
    /// The name under which the engine registers.
    pub name: String,
    /// The verbs that the engine offers.
    pub verbs: Vec<Verb>,
    /// The number of ranks that the engine claims to have. It has one: other numbers are for tests
    /// of refusals.
    pub world: u32,
    /// The rank that the engine claims to be.
    pub rank: u32,
    /// Fields to add to the engine configuration, or to replace in it.
    pub deployment: BTreeMap<String, Value>,
    /// The tenant salt of sequences that the command `open` makes.
    pub salt: String,
    /// The adapter of sequences that the command `open` makes.
    pub adapter: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            agent: None,
            name: "engine".into(),
            verbs: vec![Verb::Pause, Verb::Table, Verb::Pin, Verb::Oracle, Verb::Allocate],
            world: 1,
            rank: 0,
            deployment: BTreeMap::new(),
            salt: String::new(),
            adapter: None,
        }
    }
}

enum Event {
    Command(Result<Command, String>),
    /// Standard input has ended.
    End,
    Agent(attach::Event),
}

/// The connection to the agent.
struct Link {
    connection: u64,
    stream: UnixStream,
}

struct Server {
    options: Options,
    sequences: Sequences,
    out: Sender<Line>,
    link: Option<Link>,
    pause: pause::Pause,
    /// Commands that wait for the end of the pause.
    held: VecDeque<Command>,
    pins: BTreeMap<u64, Pin>,
    next_pin: u64,
    /// Calls for logits that wait for their step.
    logits_calls: Vec<(u64, OracleRequest)>,
    quit: bool,
}

/// Serves until the input ends or the command `quit` comes.
///
/// # Errors
/// [`EngineError::Memory`] if the memory cannot be handed to the agent's thread.
pub fn run<R, W>(core: Box<dyn Core>, options: Options, input: R, output: W) -> Result<(), EngineError>
where
    R: BufRead + Send + 'static,
    W: Write + Send + 'static,
{
    let register = registration(&*core, &options);
    let fingerprint = pfr_schema::prefix::fingerprint(&register.deployment).to_string();
    let (events, inbox) = mpsc::channel();
    let (out, lines) = mpsc::channel();
    let writer = std::thread::spawn(move || write(output, &lines));
    let ready = Line::Ready {
        engine: options.name.clone(),
        model: core.model().into(),
        weights: core.weights(),
        fingerprint,
        pid: std::process::id(),
    };
    // A send fails only if the thread that writes has ended, because nothing reads standard output
    // any more.
    let _ = out.send(ready);
    attach(&*core, &options, register, &events)?;
    std::thread::spawn(move || listen(input, &events));
    let mut server = Server {
        options,
        sequences: Sequences::new(core),
        out,
        link: None,
        pause: pause::Pause::default(),
        held: VecDeque::new(),
        pins: BTreeMap::new(),
        next_pin: 1,
        logits_calls: Vec::new(),
        quit: false,
    };
    server.serve(&inbox);
    drop(server);
    // A panic of the thread that writes is ignored: a caller could not act on it.
    let _ = writer.join();
    Ok(())
}

fn registration(core: &dyn Core, options: &Options) -> Register {
    let mut deployment = BTreeMap::from([
        ("weights".to_owned(), Value::from(core.weights())),
        ("engine".to_owned(), Value::from(concat!("pf-reference/", env!("CARGO_PKG_VERSION")))),
        ("backend".to_owned(), Value::from("reference-cpu")),
        ("model".to_owned(), Value::from(core.model())),
        ("deterministic".to_owned(), Value::from(true)),
        ("tp".to_owned(), Value::from(1)),
        ("pp".to_owned(), Value::from(1)),
    ]);
    deployment.extend(options.deployment.clone());
    Register {
        protocol: PROTOCOL,
        engine: options.name.clone(),
        member: "engine".into(),
        verbs: options.verbs.clone(),
        rank: options.rank,
        world: options.world,
        deployment,
        parallel: Vec::new(),
        memories: core.blocks().memories().0,
        groups: core.blocks().layouts(),
    }
}

fn attach(core: &dyn Core, options: &Options, register: Register, events: &Sender<Event>) -> Result<(), EngineError> {
    let Some(socket) = options.agent.clone() else { return Ok(()) };
    let descriptors = core.blocks().memories().1.iter().map(BorrowedFd::try_clone_to_owned).collect::<Result<Vec<OwnedFd>, _>>();
    let descriptors = descriptors.map_err(|source| EngineError::Memory { what: "share memory", source })?;
    let events = events.clone();
    std::thread::spawn(move || attach::run(&socket, &register, &descriptors, |event| events.send(Event::Agent(event)).is_ok()));
    Ok(())
}

/// Reads commands until input ends.
fn listen(mut input: impl BufRead, events: &Sender<Event>) {
    while let Ok(Some(command)) = read(&mut input) {
        if events.send(Event::Command(command)).is_err() {
            return;
        }
    }
    let _ = events.send(Event::End);
}

/// Writes lines until there are no more. It runs in a thread of its own, so that a slow reader
/// never stops the engine.
fn write(mut output: impl Write, lines: &Receiver<Line>) {
    for line in lines {
        let Ok(mut bytes) = serde_json::to_vec(&line) else { continue };
        bytes.push(b'\n');
        if output.write_all(&bytes).and_then(|()| output.flush()).is_err() {
            return;
        }
    }
}

impl Server {
    fn serve(&mut self, inbox: &Receiver<Event>) {
        while !self.quit {
            match self.wait(inbox) {
                Ok(event) => self.event(event),
                Err(RecvTimeoutError::Timeout) if self.pause.is_on() => self.go_on_if_due(),
                Err(RecvTimeoutError::Timeout) => self.step(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.answer_oracles();
        }
    }

    /// The next event; a timeout if a step or the end of a pause is due instead.
    fn wait(&self, inbox: &Receiver<Event>) -> Result<Event, RecvTimeoutError> {
        let due = if self.pause.is_on() { self.pause.until() } else { self.sequences.due() };
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        match left {
            None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(Duration::ZERO) => inbox.try_recv().map_err(|error| match error {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            }),
            Some(left) => inbox.recv_timeout(left),
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::End => self.quit = true,
            Event::Command(Ok(command)) => self.command(command),
            Event::Command(Err(detail)) => self.error("line", pfr_schema::ErrorCode::InvalidRequest, detail),
            Event::Agent(event) => self.agent(event),
        }
    }

    fn step(&mut self) {
        let now = Instant::now();
        let Some(seq) = self.sequences.next(now) else { return };
        self.sequences.stepped(seq);
        let step = self.sequences.step(seq);
        let Some(sequence) = self.sequences.all.get_mut(&seq) else { return };
        let Some(job) = &mut sequence.job else { return };
        match step {
            Ok(step) => {
                job.left -= 1;
                job.done += 1;
                job.due = now + job.delay;
                let over = job.left == 0;
                let text = self.sequences.core.detokenize(&[step.token]);
                let logits = sequences::digest(&step.logits);
                self.say(Line::Token { sequence: seq.to_string(), token: step.token, text, logits, boundary: step.boundary });
                if over {
                    self.end(seq);
                }
            }
            Err(error) => {
                self.error("generate", lines::code(&error), error.to_string());
                self.end(seq);
            }
        }
    }

    /// Ends generation of a sequence, if it generates.
    fn end(&mut self, seq: SeqId) {
        let job = self.sequences.all.get_mut(&seq).and_then(|sequence| sequence.job.take());
        if let Some(job) = job {
            self.say(Line::Generated { sequence: seq.to_string(), count: job.done });
        }
    }

    fn say(&self, line: Line) {
        // Without a reader the line is dropped: the engine still serves the agent.
        let _ = self.out.send(line);
    }

    fn error(&self, command: &str, code: pfr_schema::ErrorCode, detail: String) {
        self.say(Line::Error { command: command.into(), code, detail });
    }
}
