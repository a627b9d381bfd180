//! `pf events`: what happens in a registry.

use crate::cli::args::{Events, Repositories};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, utc};
use crate::cli::suggest::Suggestion;
use pfr_client::{EventFilter, Followed};
use pfr_schema::api;
use serde_json::json;

pub async fn run(context: &mut Context, args: Events) -> Result<(), Failure> {
    let Events { repository, kind, after, once } = args;
    let mut again = Suggestion::new("events");
    let (registry, repository) = repository.map_or((None, None), |named| (named.registry, Some(named.pattern)));
    if let Some(pattern) = &repository {
        again = again.arg(Repositories { registry: None, pattern: pattern.clone() });
    }
    if let Some(kind) = &kind {
        again = again.arg("--kind").arg(kind.name());
    }
    if once {
        again = again.arg("--once");
    }
    let mut events = context.remote_of(registry.as_deref())?.events(&EventFilter { repository, kind, after, once });
    while let Some(followed) = events.next().await? {
        match followed {
            Followed::Event(event) if context.json => context.out.json(&event)?,
            Followed::Event(event) => context.out.line(line(&event))?,
            Followed::Reset(reset) if context.json => {
                context.out.json(&json!({"kind": api::RESET, "id": reset.id, "reason": reset.reason}))?;
            }
            Followed::Reset(reset) => context.out.note(&format!("some events are missing here: {}", reset.reason))?,
        }
        // A reader in a pipe gets each event when it happens.
        context.out.flush()?;
    }
    if let Some(id) = events.last().filter(|_| !context.json && !context.quiet) {
        let again = context.suggest(&again.arg("--after").arg(id));
        context.out.note(&format!("{again} goes on from here"))?;
    }
    Ok(())
}

fn line(event: &api::Event) -> String {
    let repository = event.repository.as_ref().map(ToString::to_string).unwrap_or_default();
    let what = match (&event.tag, &event.digest, &event.collection) {
        (Some(tag), Some(digest), _) => format!("{repository}:{tag}  {}", digest.short()),
        (Some(tag), None, _) => format!("{repository}:{tag}"),
        (None, Some(digest), _) => format!("{repository}@{}", digest.short()),
        (None, None, Some(done)) => format!("{}, {} freed", count(done.objects, "blob"), bytes(done.freed_bytes)),
        (None, None, None) => repository,
    };
    format!("{}  {:<9}  {what}", utc(event.at), event.kind.name())
}
