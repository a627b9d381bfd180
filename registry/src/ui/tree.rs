//! The order and the lines in which lineages are drawn.
//!
//! A snapshot is drawn below its first parent. The child with the longest continuation goes on in
//! the column of its parent, so an agent's steps are one line however many there are. Its siblings
//! branch off to the right before it, the oldest first.
//!
//! ```text
//! ● step-1
//! ├─● try-1
//! ├─● try-2
//! │ ● try-2, continued
//! ● step-2
//! ```

use maud::{Markup, html};
use pfr_schema::Digest;
use pfr_schema::api::SnapshotStats;
use std::collections::HashMap;

/// Columns that are drawn. A snapshot further to the right is drawn in the last one.
const COLUMNS: usize = 8;
/// Width of a column, in CSS pixels.
const COLUMN: usize = 12;
/// Where the dot of a row is, from its upper edge.
const DOT: usize = 18;

/// How a snapshot follows from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joint {
    /// No parent of it is here.
    Root,
    /// It goes on below its parent.
    Continues(usize),
    /// It branches off its parent; `more` says whether the parent's line goes on.
    Branches { parent: usize, more: bool },
}

/// A row of the drawing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// Position of the snapshot in the list that was given.
    pub(super) snapshot: usize,
    /// Its column.
    pub(super) column: usize,
    pub(super) joint: Joint,
    /// Which columns to its left have a line that goes on, of those that are drawn.
    lines: Vec<bool>,
    /// Whether a child is drawn below it.
    goes_on: bool,
}

/// The lineages of snapshots that are in the order of their pushes; the one that was pushed to last
/// comes first.
pub(super) fn rows(snapshots: &[SnapshotStats]) -> Vec<Row> {
    let family = Family::of(snapshots);
    let mut rows = Vec::with_capacity(snapshots.len());
    let mut lines: Vec<bool> = Vec::new();
    let mut next: Vec<(usize, usize, Joint)> = family.roots.iter().rev().map(|root| (*root, 0, Joint::Root)).collect();
    while let Some((snapshot, column, joint)) = next.pop() {
        lines.resize(column, false);
        if let Joint::Branches { more, .. } = joint {
            lines[column - 1] = more;
        }
        let (branches, main) = family.children(snapshot);
        rows.push(Row {
            snapshot,
            column,
            joint,
            lines: lines[..column.min(COLUMNS)].to_vec(),
            goes_on: main.is_some() || !branches.is_empty(),
        });
        next.extend(main.map(|child| (child, column, Joint::Continues(snapshot))));
        let last = branches.last().copied();
        let branch = |child: usize| {
            let more = main.is_some() || Some(child) != last;
            (child, column + 1, Joint::Branches { parent: snapshot, more })
        };
        next.extend(branches.iter().rev().map(|child| branch(*child)));
    }
    rows
}

/// Parents and children.
struct Family {
    roots: Vec<usize>,
    children: Vec<Vec<usize>>,
    /// Snapshots in the longest line below each.
    heights: Vec<usize>,
}

impl Family {
    fn of(snapshots: &[SnapshotStats]) -> Self {
        let at: HashMap<&Digest, usize> = snapshots.iter().enumerate().map(|(i, snapshot)| (&snapshot.digest, i)).collect();
        let mut children = vec![Vec::new(); snapshots.len()];
        let mut parents = vec![None; snapshots.len()];
        let mut roots = Vec::new();
        for (i, snapshot) in snapshots.iter().enumerate() {
            parents[i] = snapshot.parents.iter().find_map(|parent| at.get(parent).copied());
            match parents[i] {
                Some(parent) => children[parent].push(i),
                None => roots.push(i),
            }
        }
        // Parents before children, whatever the order of the pushes was.
        let (mut order, mut next) = (Vec::with_capacity(snapshots.len()), roots.clone());
        while let Some(i) = next.pop() {
            order.push(i);
            next.extend(&children[i]);
        }
        let (mut heights, mut newest) = (vec![0; snapshots.len()], (0..snapshots.len()).collect::<Vec<_>>());
        for i in order.into_iter().rev() {
            if let Some(parent) = parents[i] {
                heights[parent] = heights[parent].max(heights[i] + 1);
                newest[parent] = newest[parent].max(newest[i]);
            }
        }
        roots.sort_unstable_by_key(|root| std::cmp::Reverse(newest[*root]));
        Self { roots, children, heights }
    }

    /// The children that branch off, and the one that goes on in the same column. Of several that
    /// go on equally far, none is it.
    fn children(&self, of: usize) -> (Vec<usize>, Option<usize>) {
        let mut branches = self.children[of].clone();
        let most = branches.iter().map(|child| self.heights[*child]).max();
        let mut longest = (0..branches.len()).filter(|i| Some(self.heights[branches[*i]]) == most);
        let main = match (longest.next(), longest.next()) {
            (Some(one), None) => Some(one),
            _ => None,
        };
        let main = main.map(|main| branches.remove(main));
        (branches, main)
    }
}

/// Class that makes room for the lines of a row; the stylesheet has one for each column.
pub(super) fn indent(row: &Row) -> String {
    format!("indent-{}", row.column.min(COLUMNS))
}

/// The lines of a row. They reach from the upper to the lower edge, however high the row is.
pub(super) fn lines(row: &Row) -> Markup {
    let x = |column: usize| COLUMN * column.min(COLUMNS) + COLUMN / 2;
    let own = x(row.column);
    let through = row.lines.iter().enumerate().filter(|(_, goes_on)| **goes_on).map(|(column, _)| x(column));
    html! {
        svg.lines width=(COLUMN * (row.column.min(COLUMNS) + 1)) height="100%" aria-hidden="true" {
            @for x in through { line x1=(x) y1="0" x2=(x) y2="100%" {} }
            @match row.joint {
                Joint::Root => {}
                Joint::Continues(_) => { line x1=(own) y1="0" x2=(own) y2=(DOT) {} }
                Joint::Branches { .. } => {
                    @let from = x(row.column - 1);
                    path d={ "M" (from) " 0V" (DOT) "H" (own) } {}
                }
            }
            @if row.goes_on { line x1=(own) y1=(DOT) x2=(own) y2="100%" {} }
            circle cx=(own) cy=(DOT) r="4" {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Snapshots by the numbers of their parents.
    fn family(parents: &[&[usize]]) -> Vec<SnapshotStats> {
        let digest = |n: usize| Digest::sha256(&n.to_le_bytes());
        let snapshot = |(n, parents): (usize, &&[usize])| SnapshotStats {
            repository: "r".parse().unwrap(),
            digest: digest(n),
            tags: vec![],
            parents: parents.iter().map(|n| digest(*n)).collect(),
            pushed_at: n as u64,
            logical: 0,
            new: 0,
            shared: 0,
            exclusive: 0,
        };
        parents.iter().enumerate().map(snapshot).collect()
    }

    /// The drawing in letters.
    fn drawn(parents: &[&[usize]]) -> Vec<String> {
        let draw = |row: Row| {
            let mut text = String::new();
            for (column, line) in row.lines.iter().enumerate() {
                let elbow = matches!(row.joint, Joint::Branches { .. }) && column + 1 == row.column;
                text.push_str(match (elbow, line) {
                    (true, true) => "├─",
                    (true, false) => "└─",
                    (false, true) => "│ ",
                    (false, false) => "  ",
                });
            }
            let dot = if row.goes_on { "●" } else { "○" };
            format!("{text}{dot} {}", row.snapshot)
        };
        rows(&family(parents)).into_iter().map(draw).collect()
    }

    #[test]
    fn steps_are_one_line_and_forks_branch_off_it() {
        let parents: &[&[usize]] = &[&[], &[0], &[0], &[1], &[3], &[2], &[1]];
        assert_eq!(drawn(parents), ["● 0", "├─● 2", "│ ○ 5", "● 1", "├─○ 6", "● 3", "○ 4"]);
    }

    #[test]
    fn forks_that_go_on_equally_far_all_branch_off() {
        let parents: &[&[usize]] = &[&[], &[0], &[0], &[1], &[2]];
        assert_eq!(drawn(parents), ["● 0", "├─● 1", "│ ○ 3", "└─● 2", "  ○ 4"]);
    }

    #[test]
    fn the_lineage_that_was_pushed_to_last_comes_first_and_unknown_parents_begin_one() {
        let parents: &[&[usize]] = &[&[], &[], &[0], &[77], &[1, 2]];
        assert_eq!(drawn(parents), ["● 1", "○ 4", "○ 3", "● 0", "○ 2"]);
        // A mirror may bring children before their parents.
        assert_eq!(drawn(&[&[1], &[]]), ["● 1", "○ 0"]);
    }

    #[test]
    fn every_snapshot_is_drawn_once_however_long_the_chain() {
        let parents: Vec<Vec<usize>> = (0_usize..10_000).map(|n| n.checked_sub(1).into_iter().collect()).collect();
        let parents: Vec<&[usize]> = parents.iter().map(Vec::as_slice).collect();
        let rows = rows(&family(&parents));
        assert_eq!((rows.len(), rows.iter().map(|row| row.column).max()), (10_000, Some(0)));
        // A comb: each tooth branches off the one before, and its sibling goes no further.
        let teeth: Vec<Vec<usize>> = (0_usize..2001).map(|n| if n == 0 { vec![] } else { vec![(n - 1) / 2 * 2] }).collect();
        let teeth: Vec<&[usize]> = teeth.iter().map(Vec::as_slice).collect();
        assert_eq!(super::rows(&family(&teeth)).len(), 2001);
    }
}
