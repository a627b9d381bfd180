//! The command `pf import processfork`: its arguments and its output.

use crate::{self as import, ImageReport, Outcome, Target};
use pfr_client::Progress;
use pfr_client::cli::output::human::{bytes, count, number, one_line, short_digests};
use pfr_client::cli::output::paint::Style;
use pfr_client::cli::output::table::{Column, Table};
use pfr_client::cli::progress::{Status, watch};
use pfr_client::cli::{Context, Encode, Failure, Global, Program, STYLES, repository_of};
use pfr_schema::{ErrorCode, Reference};
use serde::Serialize;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  pf import processfork ~/.processfork --dry-run
  pf import processfork ~/.processfork --repository team/old
  pf import processfork ~/.processfork/images/9f86d081884c….json --local

Images of agent KIND go to PREFIX/KIND. Each gets the first 16 digits of its own digest as its tag. Run the command again \
when there are more images: it neither makes nor sends what is there already.";

/// Import the images of ProcessFork stores, with their lineage
#[derive(Debug, clap::Parser)]
#[command(name = "pf import processfork", bin_name = "pf import processfork", version, styles = STYLES, after_help = EXAMPLES, max_term_width = 120)]
pub struct ImportProcessfork {
    #[command(flatten)]
    global: Global,
    /// Directories of stores, or single images in them; with an image come its ancestors
    #[arg(value_name = "STORE|FILE", required = true, value_hint = clap::ValueHint::AnyPath)]
    paths: Vec<PathBuf>,
    /// Import into repositories below this one; it may name a registry
    #[arg(long, value_name = "PREFIX", default_value = "processfork")]
    repository: Reference,
    /// Import into the local store, not into a registry
    #[arg(long)]
    local: bool,
    /// Import nothing: read and check everything except the contents of pages
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    encode: Encode,
}

impl Program for ImportProcessfork {
    fn resume_hint(&self) -> Option<&'static str> {
        Some("run the same command again to resume")
    }

    fn global(&self) -> &Global {
        &self.global
    }

    async fn run(self, context: &mut Context) -> Result<(), Failure> {
        processfork(context, self).await
    }
}

/// The result of an import.
#[derive(Serialize)]
struct Report {
    imported: usize,
    unchanged: usize,
    planned: usize,
    failed: usize,
    /// Images not reached, because the destination failed.
    not_tried: usize,
    images: Vec<ImageReport>,
}

async fn processfork(context: &mut Context, args: ImportProcessfork) -> Result<(), Failure> {
    let prefix = repository_of(&args.repository)?;
    if let (true, Some(registry)) = (args.local, &args.repository.registry) {
        return Err(Failure::usage(format!("--local is the local store, but --repository names the registry {registry}")));
    }
    let compression = context.compression(args.encode.compression);
    let mut images = import::Import::open(args.paths.clone(), prefix, compression).await?;
    let target = match (args.dry_run, args.local) {
        (true, _) => Target::Nowhere,
        (false, true) => Target::Store(context.store().await?),
        (false, false) => Target::Registry(context.remote(Some(&args.repository))?),
    };
    let mut reports = Vec::new();
    let ended = loop {
        let progress = Progress::default();
        let work = images.next(&target, &progress);
        match watch(context.quiet, || Status::of(&progress), work).await {
            Ok(Some(report)) => reports.push(report),
            Ok(None) => break Ok(()),
            Err(error) => break Err(Failure::from(error)),
        }
    };
    // The image that ended the import is neither in `reports` nor waiting.
    let not_tried = images.waiting() + usize::from(ended.is_err());
    let report = Report::new(reports, not_tried);
    let failed = report.failed;
    show(context, &report)?;
    ended?;
    if failed > 0 {
        let of = count(report.images.len() as u64, "image");
        return Err(Failure::new(ErrorCode::InvalidRequest, format!("{failed} of {of} could not be imported")));
    }
    Ok(())
}

impl Report {
    fn new(images: Vec<ImageReport>, not_tried: usize) -> Self {
        let of = |outcome| images.iter().filter(|image| image.outcome == outcome).count();
        let (imported, unchanged) = (of(Outcome::Imported), of(Outcome::Unchanged));
        Self { imported, unchanged, planned: of(Outcome::Planned), failed: of(Outcome::Failed), not_tried, images }
    }
}

fn show(context: &mut Context, report: &Report) -> Result<(), Failure> {
    if context.json {
        return context.out.json(report);
    }
    let mut table = Table::new([
        Column::left("IMAGE").fixed(),
        Column::left("").fixed().style(Style::Dim),
        Column::left("REF"),
        Column::left("SNAPSHOT").fixed(),
        Column::right("PAGES"),
        Column::right("SIZE"),
        Column::right("NEW"),
    ]);
    for image in &report.images {
        let reference = image.repository.iter().zip(&image.tag).map(|(repository, tag)| format!("{repository}:{tag}")).collect();
        let sizes = match image.outcome {
            Outcome::Failed => [String::new(), String::new(), String::new()],
            Outcome::Planned => [number(image.pages), bytes(image.bytes_raw), String::new()],
            Outcome::Imported | Outcome::Unchanged => [number(image.pages), bytes(image.bytes_raw), bytes(image.bytes_new)],
        };
        let [pages, size, new] = sizes;
        let snapshot = image.digest.map(|digest| digest.short()).unwrap_or_default();
        table.row([name(image), outcome(image.outcome).into(), reference, snapshot, pages, size, new]);
    }
    if !report.images.is_empty() {
        context.out.table(&table)?;
    }
    for image in &report.images {
        for line in remarks(image) {
            context.out.line(format!("{}: {}", name(image), one_line(&line)))?;
        }
    }
    if !context.quiet {
        let summary = context.out.paint.dim(&summary(report));
        context.out.line(summary)?;
    }
    Ok(())
}

fn name(image: &ImageReport) -> String {
    one_line(&short_digests(&image.image))
}

fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Imported => "imported",
        Outcome::Unchanged => "unchanged",
        Outcome::Planned => "would be imported",
        Outcome::Failed => "failed",
    }
}

/// Errors and notes, which the table has no column for.
fn remarks(image: &ImageReport) -> Vec<String> {
    let error = image.error.iter().map(|error| error.message.clone());
    // A failed image has no snapshot, so it has no lineage either.
    let missing = image.parents_missing.iter().filter(|_| image.error.is_none());
    let missing = missing.map(|parent| format!("without its parent {}, which is not among the imported images", parent.short()));
    error.chain(missing).chain(image.notes.iter().cloned()).collect()
}

fn summary(report: &Report) -> String {
    let parts = [
        (report.imported, "imported"),
        (report.unchanged, "there already"),
        (report.planned, "would be imported"),
        (report.failed, "failed"),
        (report.not_tried, "not tried"),
    ];
    let parts: Vec<String> = parts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
    let images = count((report.images.len() + report.not_tried) as u64, "image");
    if parts.is_empty() { images } else { format!("{images}: {}", parts.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_fits_120_columns() {
        use clap::CommandFactory as _;
        ImportProcessfork::command().debug_assert();
        let help = ImportProcessfork::command().term_width(120).render_long_help().to_string();
        assert!(help.lines().all(|line| pfr_client::cli::output::human::columns(line) <= 120), "{help}");
    }

    #[test]
    fn the_summary_leaves_out_what_is_zero() {
        let report = |imported, failed, not_tried| Report { imported, unchanged: 0, planned: 0, failed, not_tried, images: Vec::new() };
        assert_eq!(summary(&report(0, 0, 0)), "0 images");
        assert_eq!(summary(&report(0, 0, 3)), "3 images: 3 not tried");
    }
}
