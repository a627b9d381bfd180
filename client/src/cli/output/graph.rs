//! A history drawn in lanes, as `git log --graph` does: children above their parents, forks side by
//! side.

use pfr_schema::Digest;
use std::collections::{BTreeSet, HashMap, HashSet};

/// A node: what it is and where it comes from.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its name.
    pub digest: Digest,
    /// Parents; those not among the nodes are left out of the drawing.
    pub parents: Vec<Digest>,
}

/// One line of the drawing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The lanes.
    pub lanes: String,
    /// Position of the node that this line shows, if it shows one.
    pub node: Option<usize>,
}

/// Draws `nodes`, which are given newest first.
pub fn draw(nodes: &[Node]) -> Vec<Line> {
    let mut lanes: Vec<Option<Digest>> = Vec::new();
    let mut lines = Vec::new();
    let known: HashSet<Digest> = nodes.iter().map(|n| n.digest).collect();
    // Lane of the node on the last line, if its line of descent ends there.
    let mut ended: Option<usize> = None;
    for index in order(nodes) {
        let node = &nodes[index];
        let lane = lanes.iter().position(|l| *l == Some(node.digest)).unwrap_or_else(|| {
            let others = row(&lanes, |_| '│');
            let lane = open(&mut lanes, node.digest);
            // Directly below a root it would look like its parent.
            if ended == Some(lane) {
                lines.push(Line { lanes: others, node: None });
            }
            lane
        });
        lines.push(Line { lanes: row(&lanes, |i| if i == lane { '●' } else { '│' }), node: Some(index) });
        let mut parents: Vec<Digest> = node.parents.iter().filter(|p| known.contains(*p)).copied().collect();
        parents.dedup();
        let lane_of = |lanes: &[Option<Digest>], parent: &Digest| lanes.iter().position(|l| *l == Some(*parent));
        // The lane goes on to the first parent that no other lane leads to.
        let heir = parents.iter().position(|p| lane_of(&lanes, p).is_none());
        if let Some(heir) = heir {
            lanes[lane] = Some(parents[heir]);
        }
        for (n, parent) in parents.iter().enumerate() {
            if heir == Some(n) {
                continue;
            }
            match lane_of(&lanes, parent) {
                None => {
                    let side = open(&mut lanes, *parent);
                    lines.push(connect(&lanes, lane, side, Bend::Opens));
                }
                Some(to) if heir.is_none() && n + 1 == parents.len() => {
                    let (stays, ends) = (to.min(lane), to.max(lane));
                    lines.push(connect(&lanes, stays, ends, Bend::Ends));
                    lanes[stays] = Some(*parent);
                    lanes[ends] = None;
                }
                Some(to) => lines.push(connect(&lanes, lane, to, Bend::Touches)),
            }
        }
        ended = parents.is_empty().then_some(lane);
        if parents.is_empty() {
            lanes[lane] = None;
        }
        while lanes.last() == Some(&None) {
            lanes.pop();
        }
    }
    lines
}

fn open(lanes: &mut Vec<Option<Digest>>, digest: Digest) -> usize {
    let free = lanes.iter().position(Option::is_none).unwrap_or_else(|| {
        lanes.push(None);
        lanes.len() - 1
    });
    lanes[free] = Some(digest);
    free
}

fn row(lanes: &[Option<Digest>], mark: impl Fn(usize) -> char) -> String {
    let marks: Vec<String> = lanes.iter().enumerate().map(|(i, l)| if l.is_some() { mark(i).to_string() } else { " ".into() }).collect();
    marks.join(" ").trim_end().to_owned()
}

/// The fate of the other lane of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bend {
    Opens,
    Ends,
    Touches,
}

/// A line between two lanes: `stays` goes on below, `other` does as `bend` says.
fn connect(lanes: &[Option<Digest>], stays: usize, other: usize, bend: Bend) -> Line {
    let (low, high) = (stays.min(other), stays.max(other));
    let mut text = String::new();
    for (i, lane) in lanes.iter().enumerate() {
        let occupied = lane.is_some();
        let mark = match (bend, i == low) {
            (Bend::Opens, left) if i == other => ['╮', '╭'][usize::from(left)],
            (Bend::Ends, left) if i == other => ['╯', '╰'][usize::from(left)],
            (_, left) if i == low || i == high => ['┤', '├'][usize::from(left)],
            _ if i > low && i < high => ['─', '┼'][usize::from(occupied)],
            _ => [' ', '│'][usize::from(occupied)],
        };
        text.push(mark);
        text.push(if i >= low && i < high { '─' } else { ' ' });
    }
    Line { lanes: text.trim_end().to_owned(), node: None }
}

/// Positions of the nodes so that every child comes before its parents; otherwise the given order.
fn order(nodes: &[Node]) -> Vec<usize> {
    let position: HashMap<Digest, usize> = nodes.iter().enumerate().map(|(i, n)| (n.digest, i)).collect();
    let mut children = vec![0_usize; nodes.len()];
    for parent in nodes.iter().flat_map(|n| &n.parents) {
        if let Some(&p) = position.get(parent) {
            children[p] += 1;
        }
    }
    let mut ready: BTreeSet<usize> = (0..nodes.len()).filter(|i| children[*i] == 0).collect();
    let mut sorted = Vec::with_capacity(nodes.len());
    while let Some(next) = ready.pop_first() {
        sorted.push(next);
        for parent in &nodes[next].parents {
            if let Some(&p) = position.get(parent) {
                children[p] -= 1;
                if children[p] == 0 {
                    ready.insert(p);
                }
            }
        }
    }
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `a:b` is a child `a` of `b`.
    fn drawing(history: &[&str]) -> String {
        let digest = |name: &str| Digest::sha256(name.as_bytes());
        let split = |line: &str| -> (String, Vec<String>) {
            let (name, parents) = line.split_once(':').unwrap_or((line, ""));
            (name.to_owned(), parents.split_terminator(',').map(str::to_owned).collect())
        };
        let nodes: Vec<Node> = history
            .iter()
            .map(|l| split(l))
            .map(|(n, p)| Node { digest: digest(&n), parents: p.iter().map(|p| digest(p)).collect() })
            .collect();
        let text = |l: &Line| match l.node {
            Some(i) => format!("{} {}", l.lanes, split(history[i]).0),
            None => l.lanes.clone(),
        };
        draw(&nodes).iter().map(text).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_history_without_forks_is_one_lane() {
        assert_eq!(drawing(&["c:b", "b:a", "a"]), "● c\n● b\n● a");
    }

    #[test]
    fn forks_join_their_parent() {
        assert_eq!(drawing(&["f3:b", "f2:b", "f1:b", "b:a", "a"]), "● f3\n│ ● f2\n├─╯\n│ ● f1\n├─╯\n● b\n● a");
    }

    #[test]
    fn longer_forks_keep_their_lane() {
        assert_eq!(drawing(&["y:x", "f:b", "x:b", "b"]), "● y\n│ ● f\n● │ x\n├─╯\n● b");
    }

    #[test]
    fn merges_open_a_lane() {
        assert_eq!(drawing(&["m:a,b", "b:r", "a:r", "r"]), "● m\n├─╮\n│ ● b\n● │ a\n├─╯\n● r");
    }

    #[test]
    fn children_come_first_whatever_the_clock_said() {
        assert_eq!(drawing(&["a", "b:a"]), "● b\n● a");
    }

    #[test]
    fn unknown_parents_end_a_lane_and_roots_do_not_touch() {
        assert_eq!(drawing(&["b:gone", "x"]), "● b\n\n● x");
    }

    #[test]
    fn a_root_above_another_line_is_not_drawn_as_its_child() {
        assert_eq!(drawing(&["s3", "s2:s1", "s1"]), "● s3\n\n● s2\n● s1");
        assert_eq!(drawing(&["a:r", "b:r", "root", "c", "r"]), "● a\n│ ● b\n├─╯\n│ ● root\n│\n│ ● c\n● r");
    }

    #[test]
    fn a_merge_reaches_over_lanes() {
        assert_eq!(drawing(&["p:r", "q:s", "m:r,s", "r", "s"]), "● p\n│ ● q\n│ │ ● m\n├─┼─┤\n│ ├─╯\n● │ r\n  ● s");
    }
}
