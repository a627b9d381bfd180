//! The page of a snapshot: what it holds, what it costs, its parents and children, and the commands
//! that use it.

use super::bars;
use super::links::{Links, origin};
use super::page::{Page, Place};
use super::repository::{cost, costs_key};
use super::words::{ago, bytes, count, digest, number, short};
use crate::app::App;
use crate::auth::{Access, Pull};
use crate::domains::Domain;
use crate::http::path::Path;
use crate::v1::Answer;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use maud::{Markup, html};
use pfr_schema::api::{Signature, SnapshotDetail, SnapshotStats, SnapshotSummary};
use pfr_schema::checkpoint::{Checkpoint, Tensor};
use pfr_schema::container::Container;
use pfr_schema::snapshot::{Descriptor, Exactness, RANK, SnapshotConfig, TITLE};
use pfr_schema::tree::{GroupKind, PageTree};
use pfr_schema::{Digest, Kind, Reference, RepositoryName, Selector, Tag, media_type};
use std::collections::BTreeMap;

/// The most rows of a table whose length a document decides.
const ROWS: usize = 200;
/// The most children that the page lists.
const CHILDREN: usize = 50;
/// The most tags that the page lists.
const TAGS: usize = 1000;
/// The most characters of a name or value of the engine configuration.
const CHARACTERS: usize = 200;

/// The page of a snapshot.
pub(crate) async fn snapshot(
    Access { to: repository, domain, caller, .. }: Access<Pull>,
    State(app): State<App>,
    Path(selector): Path<Selector>,
    headers: HeaderMap,
) -> Answer<Response> {
    let (links, now) = (Links::of(&domain.name), domain.store.options().clock.now());
    let snapshot = domain.store.resolve(&repository, &selector).await?;
    let _permit = app.documents().await?;
    let detail = domain.store.detail(&repository, &snapshot).await?;
    let stats = domain.store.snapshot_stats(&repository, &snapshot).await?;
    let family = Family::of(&domain, &repository, &detail.summary).await?;
    let checkpoints = checkpoints(&domain, &detail).await;
    let (summary, config) = (&detail.summary, &detail.config);
    // If the snapshot has several tags, show the one in the request.
    let tag = selector.tag().filter(|tag| summary.tags.contains(tag)).or(summary.tags.first());
    let reference = reference(origin(&headers, app.has_tls), &links, &repository, tag, snapshot);
    let title = tag.map_or_else(|| snapshot.short(), ToString::to_string);
    let body = html! {
        p { (digest(snapshot)) }
        (tags(&summary.tags))
        section {
            h2 id="about" { "About" }
            dl.facts {
                div { dt { "Pushed" } dd { (ago(summary.pushed_at, now)) } }
                @if let Some(tokens) = prefix_length(&detail) { div { dt { "Tokens" } dd { (number(tokens)) } } }
                div { dt { "Logical" } dd { (bytes(summary.logical_bytes)) } }
                (fact("Agent", config.agent.as_deref()))
                (fact("Engine", config.engine.as_deref()))
                (fact("Captured", config.created.as_deref()))
                (fact("Exactness", config.exactness.map(exactness)))
                (fact("Adapter", config.prefix.as_ref().and_then(|prefix| prefix.adapter.as_deref())))
                @if let Some(fingerprint) = &config.fingerprint { div { dt { "Fingerprint" } dd { (digest(fingerprint)) } } }
            }
            @if !config.unrecorded.is_empty() {
                p { "Not recorded, though it could change the next token: " (config.unrecorded.join(", ")) }
            }
        }
        (signatures(&detail.signatures, now))
        section {
            h2 id="costs" { "What it costs" }
            (costs(&stats))
            p { "To delete it:" }
            p { code.command { "pf rm " (whole(&reference, snapshot)) } }
        }
        section {
            h2 id="family" { "Parents and children" }
            (family.show(&links, &repository))
        }
        section {
            h2 id="commands" { "Use it" }
            p { "On a host, into its local store:" }
            p { code.command { "pf pull " (reference) } }
            p { "Into a running engine on a host with " code { "pf-agent" } "; " code { "pf engines" } " lists the engines:" }
            p { code.command { "pf restore " (reference) " ENGINE" } }
            p { "Eight forks of it, which copy nothing:" }
            p { code.command { "pf fork " (reference) " -n 8" } }
        }
        section {
            h2 id="verification" { "Verification" }
            p { "Reads and hashes every blob that the snapshot reaches: " (bytes(summary.logical_bytes)) ". This takes as long as reading it." }
            form method="post" action=(links.verify(&repository, &snapshot)) { button type="submit" { "Verify now" } }
        }
        (groups(&detail.trees))
        (states(&checkpoints))
        (others(&detail))
        (configuration(config))
        p { a href=(links.api_snapshot(&repository, &snapshot)) { "All documents of this snapshot as JSON" } }
    };
    let trail = trail(&links, &repository);
    Ok(Page { domain: &domain.name, caller: Some(&caller), place: Place::Elsewhere, title: &title, trail, body }.respond())
}

/// The way to a page below a repository.
pub(super) fn trail(links: &Links, repository: &RepositoryName) -> Markup {
    html! {
        nav.trail aria-label="Path" {
            a href=(links.repositories()) { "Repositories" } " / " a href=(links.repository(repository)) { (repository) }
        }
    }
}

/// How a command names the snapshot, by this tag if it has one.
fn reference(origin: Option<String>, links: &Links, repository: &RepositoryName, tag: Option<&Tag>, snapshot: Digest) -> Reference {
    let selector = match tag {
        Some(tag) => Selector::Tag { tag: tag.clone(), back: 0 },
        None => Selector::Digest(snapshot),
    };
    let reference = Reference { registry: None, repository: repository.clone(), selector: Some(selector) };
    let Some(origin) = origin else { return reference };
    let there = Reference { registry: Some(format!("{origin}{}", links.base())), ..reference.clone() };
    // The browser chose the host name: show it only if a command can parse it back.
    if there.to_string().parse().is_ok_and(|parsed: Reference| parsed == there) { there } else { reference }
}

/// The same snapshot by its whole digest, for commands that must not follow a tag.
fn whole(reference: &Reference, snapshot: Digest) -> Reference {
    Reference { selector: Some(Selector::Digest(snapshot)), ..reference.clone() }
}

fn prefix_length(detail: &SnapshotDetail) -> Option<u64> {
    let SnapshotConfig { boundary, prefix, .. } = &detail.config;
    boundary.or(prefix.as_ref().map(|prefix| prefix.tokens)).or(detail.trees.iter().map(PageTree::tokens).max())
}

fn fact(name: &str, value: Option<&str>) -> Markup {
    html! { @if let Some(value) = value { div { dt { (name) } dd { (value) } } } }
}

fn exactness(exactness: Exactness) -> &'static str {
    match exactness {
        Exactness::BitExact => "bit-exact",
        Exactness::NearExact => "near-exact: low-order bits may differ",
    }
}

fn tags(tags: &[Tag]) -> Markup {
    html! {
        @if !tags.is_empty() {
            ul.tags aria-label="Tags" {
                @for tag in tags.iter().take(TAGS) { li { (tag) } }
                @if tags.len() > TAGS { li.more { (number((tags.len() - TAGS) as u64)) " more" } }
            }
        }
    }
}

/// The signatures. Which keys are trusted is not known here.
fn signatures(signatures: &[Signature], now: u64) -> Markup {
    html! {
        section {
            h2 id="signatures" { "Signatures" }
            @if signatures.is_empty() { p.empty { "It is not signed." } }
            @else {
                ul {
                    @for signature in signatures {
                        li {
                            @match &signature.key_id {
                                Some(key) => { "key " (digest(key)) }
                                None => { "a key that is not named" }
                            }
                            @if let Some(at) = signature.signed_at { ", " (ago(at, now)) }
                        }
                    }
                }
                p { "Keys and times are what the signers say. " code { "pf verify --key FILE" } " checks a signature." }
            }
        }
    }
}

fn costs(stats: &SnapshotStats) -> Markup {
    html! {
        (costs_key())
        div.large { (bars::cost(cost(stats), stats.logical)) }
        dl.facts {
            div { dt { "Exclusive" } dd { (bytes(stats.exclusive)) } }
            div { dt { "Shared" } dd { (bytes(stats.shared)) } }
            div { dt { "New" } dd { (bytes(stats.new)) } }
        }
        p {
            "Deleting this snapshot"
            @if !stats.tags.is_empty() { " and its " (count(stats.tags.len() as u64, "tag")) }
            " frees " strong { (bytes(stats.exclusive)) } " after garbage collection and its grace period."
        }
    }
}

/// The nearest relatives of a snapshot.
struct Family {
    /// Parents, and whether each is in the repository.
    parents: Vec<(Digest, bool)>,
    /// One more than are named, if there are more.
    children: Vec<(Digest, Vec<Tag>)>,
}

impl Family {
    async fn of(domain: &Domain, repository: &RepositoryName, summary: &SnapshotSummary) -> Answer<Self> {
        let mut parents = Vec::new();
        for parent in &summary.parents {
            let is_here = match domain.store.snapshot(repository, parent).await {
                Ok(_) => true,
                Err(pfr_store::Error::SnapshotUnknown { .. }) => false,
                Err(error) => return Err(error.into()),
            };
            parents.push((*parent, is_here));
        }
        let children = domain.store.continuations(repository, &summary.digest, CHILDREN + 1).await?;
        Ok(Self { parents, children: children.into_iter().map(|child| (child.digest, child.tags)).collect() })
    }

    fn show(&self, links: &Links, repository: &RepositoryName) -> Markup {
        html! {
            @if self.parents.is_empty() { p { "It begins a lineage." } }
            @else {
                ul {
                    @for (parent, is_here) in &self.parents {
                        li {
                            "parent "
                            @if *is_here { a href=(links.snapshot(repository, parent)) { (short(parent)) } }
                            @else { (digest(parent)) " is not in this repository" }
                        }
                    }
                }
            }
            @if self.children.is_empty() { p { "No snapshot continues it." } }
            @else {
                ul {
                    @for (child, tags) in self.children.iter().take(CHILDREN) {
                        li {
                            "child " a href=(links.snapshot(repository, child)) { (short(child)) }
                            @if let Some(tag) = tags.first() { " " (tag) }
                            @if tags.len() > 1 { " and " (count(tags.len() as u64 - 1, "more tag")) }
                        }
                    }
                }
                @if self.children.len() > CHILDREN { p { "The fork tree has more." } }
            }
        }
    }
}

/// The page trees.
fn groups(trees: &[PageTree]) -> Markup {
    html! {
        @if !trees.is_empty() {
            section {
                h2 id="groups" { "Page groups" }
                div.scroll role="region" aria-labelledby="groups" tabindex="0" {
                    table {
                        thead {
                            tr {
                                th scope="col" { "Group" }
                                th scope="col" { "Rank" }
                                th scope="col" { "Kind" }
                                th scope="col" { "Geometry" }
                                th.number scope="col" { "Tokens" }
                                th.number scope="col" { "Tokens per page" }
                                th.number scope="col" { "Pages" }
                                th.number scope="col" { "Page chunks" }
                                th.number scope="col" { "Sequences" }
                                th.number scope="col" { "Bytes per page" }
                            }
                        }
                        tbody {
                            @for tree in trees.iter().take(ROWS) {
                                tr {
                                    th scope="row" { (tree.group.name) }
                                    td { (tree.rank) " of " (tree.world) }
                                    td { (kind(tree.group.kind)) }
                                    td { (geometry(tree)) }
                                    td.number { (number(tree.tokens())) }
                                    td.number { (tree.page_size_tokens) }
                                    td.number { (number(tree.pages())) }
                                    td.number { (number(tree.runs.len() as u64)) }
                                    td.number { (number(tree.sequences.len() as u64)) }
                                    td.number { (bytes(tree.page_bytes.saturating_mul(tree.components.len() as u64))) " (" (tree.components.join(", ")) ")" }
                                }
                            }
                        }
                    }
                }
                (left_out(trees.len()))
            }
        }
    }
}

fn kind(kind: GroupKind) -> &'static str {
    match kind {
        GroupKind::FullAttention => "full attention",
        GroupKind::SlidingWindow => "sliding window",
        GroupKind::Mla => "latent attention",
        GroupKind::Recurrent => "recurrent",
    }
}

fn geometry(tree: &PageTree) -> Markup {
    html! {
        @if let Some(shape) = tree.geometry {
            (count(shape.n_layers.into(), "layer")) " × " (count(shape.n_heads.into(), "head")) " × " (shape.head_dim) ", " (format!("{:?}", shape.dtype).to_lowercase())
        } @else { code { (tree.layout) } }
    }
}

/// A checkpoint of a rank, or why it cannot be shown.
type Shown = (String, Result<Checkpoint, String>);

/// The checkpoints. One that cannot be read does not hide the rest of the snapshot.
async fn checkpoints(domain: &Domain, detail: &SnapshotDetail) -> Vec<Shown> {
    let mut shown = Vec::new();
    for layer in detail.manifest.layers_of(media_type::CHECKPOINT) {
        let rank = layer.annotations.get(RANK).cloned().unwrap_or_else(|| "0".into());
        let checkpoint = match domain.store.container(&layer.digest, Kind::Checkpoint).await {
            Ok(Container::Checkpoint(checkpoint)) => Ok(checkpoint),
            Ok(_) => Err("it is no checkpoint".to_owned()),
            Err(error) => Err(crate::problem::ApiError::from(error).detail.clone()),
        };
        shown.push((rank, checkpoint));
    }
    shown
}

fn states(checkpoints: &[Shown]) -> Markup {
    html! {
        @for (i, (rank, checkpoint)) in checkpoints.iter().enumerate() {
            @let id = format!("checkpoint-{i}");
            section {
                h2 id=(id) { "Checkpoint of rank " (rank) }
                @match checkpoint {
                    Err(reason) => { p.bad { "It cannot be shown: " (reason) } }
                    Ok(checkpoint) => {
                        p { "State after " (count(checkpoint.key.tokens, "token")) ", of prefix " (digest(checkpoint.key.prefix)) }
                        div.scroll role="region" aria-labelledby=(id) tabindex="0" {
                            table {
                                thead {
                                    tr {
                                        th scope="col" { "Tensor" }
                                        th scope="col" { "Kind" }
                                        th.number scope="col" { "Layer" }
                                        th scope="col" { "Shape" }
                                        th scope="col" { "Type" }
                                        th scope="col" { "Stored as" }
                                        th.number scope="col" { "Bytes" }
                                        th scope="col" { "Value hash" }
                                        th scope="col" { "Payload hash" }
                                    }
                                }
                                tbody { @for tensor in checkpoint.tensors.iter().take(ROWS) { (state(tensor)) } }
                            }
                        }
                        (left_out(checkpoint.tensors.len()))
                    }
                }
            }
        }
    }
}

fn state(tensor: &Tensor) -> Markup {
    let shape: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
    html! {
        tr {
            th scope="row" { (tensor.name) }
            td { (tensor.kind) }
            td.number { @if let Some(layer) = tensor.layer { (layer) } }
            td { (shape.join(" × ")) }
            td { (tensor.logical_dtype.name()) }
            td { (tensor.storage_dtype.name()) @if !tensor.layout.tag.is_empty() { ", " (tensor.layout.tag) } }
            td.number { (bytes(tensor.payload_bytes)) }
            td { (digest(tensor.value_hash)) }
            td { (digest(tensor.payload_hash)) }
        }
    }
}

/// What is neither pages nor state.
fn others(detail: &SnapshotDetail) -> Markup {
    let is_other = |layer: &&Descriptor| ![media_type::TREE, media_type::CHECKPOINT].contains(&layer.media_type.as_str());
    let others: Vec<&Descriptor> = detail.manifest.layers.iter().filter(is_other).collect();
    html! {
        @if !others.is_empty() {
            section {
                h2 id="others" { "Tokens and attachments" }
                div.scroll role="region" aria-labelledby="others" tabindex="0" {
                    table {
                        thead { tr { th scope="col" { "Name" } th scope="col" { "Type" } th.number scope="col" { "Bytes" } th scope="col" { "Digest" } } }
                        tbody {
                            @for layer in others.iter().take(ROWS) {
                                tr {
                                    th scope="row" { (layer.annotations.get(TITLE).map_or_else(|| name(&layer.media_type), String::as_str)) }
                                    td { code { (layer.media_type) } }
                                    td.number { (bytes(layer.size)) }
                                    td { (digest(layer.digest)) }
                                }
                            }
                        }
                    }
                }
                (left_out(others.len()))
            }
        }
    }
}

fn name(media_type: &str) -> &'static str {
    match media_type {
        media_type::TOKENS => "token ids",
        media_type::ORACLE => "logits check",
        media_type::SHARDS => "shares of the ranks",
        _ => "attachment",
    }
}

fn configuration(config: &SnapshotConfig) -> Markup {
    let tables = [("deployment", "Engine configuration", &config.deployment), ("sampling", "Sampling", &config.sampling)];
    html! { @for (id, title, values) in tables { @if !values.is_empty() { (settings(id, title, values)) } } }
}

fn settings(id: &str, title: &str, values: &BTreeMap<String, serde_json::Value>) -> Markup {
    let cut = |text: String| match text.char_indices().nth(CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    };
    html! {
        section {
            h2 id=(id) { (title) }
            div.scroll role="region" aria-labelledby=(id) tabindex="0" {
                table {
                    thead { tr { th scope="col" { "Name" } th scope="col" { "Value" } } }
                    tbody {
                        @for (name, value) in values.iter().take(ROWS) {
                            tr {
                                th scope="row" { (cut(name.clone())) }
                                td { (cut(value.as_str().map_or_else(|| value.to_string(), str::to_owned))) }
                            }
                        }
                    }
                }
            }
            (left_out(values.len()))
        }
    }
}

/// Says that a table is not complete.
fn left_out(rows: usize) -> Markup {
    html! { @if rows > ROWS { p { "The first " (ROWS) " of " (number(rows as u64)) "; the JSON below has all." } } }
}
