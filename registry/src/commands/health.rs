//! `pf-registry health`: asks the registry of this machine whether it serves. For health checks
//! where there is no other HTTP client, such as in an image.

use super::Settings;
use super::tool::{print, runtime};
use crate::Error;
use clap::Args;
use pfr_schema::api::Problem;
use serde::Serialize;
use std::time::Duration;

/// Longer than `/readyz` takes to find that the store does not answer.
const LIMIT: Duration = Duration::from_secs(6);

/// Arguments of `health`.
#[derive(Args)]
pub(crate) struct Health {
    /// Ask only whether the process works, and not whether it reaches its database and its storage.
    #[arg(long)]
    live: bool,
    /// Print the result as JSON; an error is one JSON object on standard error.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

/// What is printed of a registry that serves.
#[derive(Serialize)]
struct Healthy {
    status: &'static str,
}

pub(super) fn run(args: Health) -> Result<(), Error> {
    let url = args.settings.read()?.own_url();
    let (path, word) = if args.live { ("/livez", "alive") } else { ("/readyz", "ready") };
    let asked = runtime()?.block_on(ask(&format!("{url}{path}")));
    asked.map_err(|reason| match reason {
        Sick::Silent(reason) => Error::Unhealthy(format!("the registry at {url} does not answer: {reason}")),
        Sick::Refuses(reason) => Error::Unhealthy(format!("the registry at {url} is not {word}: {reason}")),
    })?;
    print(&Healthy { status: word }, args.json, |healthy| format!("{}\n", healthy.status));
    Ok(())
}

/// Why a registry does not serve.
enum Sick {
    /// No answer came.
    Silent(String),
    /// Its answer, with what it says.
    Refuses(String),
}

async fn ask(url: &str) -> Result<(), Sick> {
    let client = reqwest::Client::builder()
        // A certificate names the host as clients write it, and not the address that this machine
        // uses for itself. The request holds no token, and only the status of its answer decides.
        .tls_danger_accept_invalid_certs(true)
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .user_agent(concat!("pf-registry/", env!("CARGO_PKG_VERSION")))
        .timeout(LIMIT)
        .build()
        .map_err(|error| Sick::Silent(pfr_client::reason(&error)))?;
    let answer = client.get(url).send().await.map_err(|error| Sick::Silent(pfr_client::reason(&error)))?;
    let status = answer.status();
    if status.is_success() {
        return Ok(());
    }
    // Another program may listen there: its answer has no problem.
    let detail = answer.json::<Problem>().await.map(|problem| format!(": {}", problem.detail)).unwrap_or_default();
    Err(Sick::Refuses(format!("it answers {}{detail}", status.as_u16())))
}
