//! Nothing. `tests/faults/planted` builds it beside `pf-faults`: a build with an example takes the
//! features that tests need, so the dependencies that `./check` has built are used again.

fn main() {}
