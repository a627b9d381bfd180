//! `pf-agent`: the capture agent as a daemon.

fn main() {}
