//! `pf diff`: what differs between two snapshots.

use crate::cli::args::{Diff, Relative};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::bar::stacked;
use crate::cli::output::human::{bytes, number, one_line};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use crate::cli::suggest::{Advice, Suggestion};
use pfr_client::Site;
use pfr_schema::api::GroupDiff;
use pfr_schema::{Reference, Tag};

pub async fn run(context: &mut Context, args: Diff) -> Result<(), Failure> {
    let b = args.b.seen_from(&args.a);
    let site = context.site(args.at, Some(&args.a)).await?;
    if let Site::Registry(_) = &site
        && (b.repository != args.a.repository || b.registry != args.a.registry)
    {
        let diff = Suggestion::new("diff").local().arg(local(&args.a)).arg(local(&b));
        let hint = with_tag(&args).unwrap_or_else(|| {
            Advice::from("the local store compares any two: ")
                .run(Suggestion::new("pull").both().arg(&args.a))
                .text(", ")
                .run(Suggestion::new("pull").both().arg(&b))
                .text(", then ")
                .run(diff)
        });
        let message = format!("a registry compares snapshots of one repository, found {} and {b}", args.a);
        return Err(Failure::usage(message).hint(hint));
    }
    let diff = site.diff((&args.a.repository, &args.a.selector_or_latest()), (&b.repository, &b.selector_or_latest())).await?;
    if context.json {
        return context.out.json(&diff);
    }
    let paint = context.out.paint;
    let label = |r: &Reference| one_line(&r.selector_or_latest().to_string());
    context.out.pairs(&[
        ("A", format!("{}  {}", paint.yellow(&diff.a.short()), label(&args.a))),
        ("B", format!("{}  {}", paint.yellow(&diff.b.short()), label(&b))),
    ])?;
    if diff.a == diff.b {
        return context.out.line("the same snapshot");
    }
    context.out.line("")?;
    let ranks = diff.groups.iter().any(|g| g.rank > 0);
    let mut table = Table::new([
        Column::left("GROUP").style(Style::Bold),
        Column::right("TOKENS"),
        Column::right("PAGES"),
        Column::right("SHARED"),
        Column::right("ONLY A"),
        Column::right("ONLY B"),
        Column::left("COMMON").optional(),
    ]);
    let scale = diff.groups.iter().map(|g| g.bytes_shared + g.bytes_only.0.max(g.bytes_only.1)).max().unwrap_or(0);
    for g in &diff.groups {
        table.row(row(g, ranks, scale));
    }
    if diff.other_bytes_only != (0, 0) {
        let (a, b) = diff.other_bytes_only;
        table.row(["other layers".into(), String::new(), String::new(), String::new(), bytes(a), bytes(b)]);
    }
    context.out.table(&table)
}

/// How to compare with a tag of the first one's repository, if the second one is a word that may be
/// meant as one.
fn with_tag(args: &Diff) -> Option<Advice> {
    let Relative::Other(Reference { registry: None, repository, selector: None }) = &args.b else { return None };
    let tag: Tag = repository.as_str().parse().ok()?;
    let diff = Suggestion::new("diff").arg(&args.a).arg(format!(":{tag}"));
    Some(diff.then(&format!(" compares it with the tag {tag} of {}", args.a.repository)))
}

/// The same reference in the local store.
fn local(reference: &Reference) -> Reference {
    Reference { registry: None, ..reference.clone() }
}

fn row(g: &GroupDiff, ranks: bool, scale: u64) -> [String; 7] {
    let name = one_line(&g.group);
    [
        if ranks { format!("{name} rank {}", g.rank) } else { name },
        change(g.tokens),
        change(g.pages),
        format!("{} ({})", number(g.pages_shared), bytes(g.bytes_shared)),
        bytes(g.bytes_only.0),
        bytes(g.bytes_only.1),
        stacked(g.bytes_shared, g.bytes_only.0.max(g.bytes_only.1), scale, 20).trim_end().to_owned(),
    ]
}

/// `512`, or `512 → 640`.
fn change((a, b): (u64, u64)) -> String {
    if a == b { number(a) } else { format!("{} → {}", number(a), number(b)) }
}

#[cfg(test)]
mod tests {
    use super::change;

    #[test]
    fn equal_numbers_are_written_once() {
        assert_eq!([change((512, 512)), change((512, 1640))], ["512", "512 → 1,640"]);
    }
}
