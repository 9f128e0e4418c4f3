//! The live pipeline.

use std::process::ExitCode;

use super::{options::RunOptions, problem::Problem};

/// Runs the pipeline until it ends.
///
/// # Errors
/// Something that the run cannot do without failed; the message names the next step.
pub fn run(_: &RunOptions) -> anyhow::Result<ExitCode> {
    Err(Problem::failure(
        "this droptrace was built without its BPF object, so it cannot watch a kernel",
        "build it with `cargo xtask build`; the other commands work as they are",
    )
    .into())
}
