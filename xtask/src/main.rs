//! Sets up, builds, runs and tests droptrace.
fn main() {}
