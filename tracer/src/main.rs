//! The `droptrace` binary.
fn main() {}
