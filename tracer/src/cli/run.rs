//! The live pipeline.

use std::process::ExitCode;

use super::options::RunOptions;

/// Runs the pipeline until it ends.
pub fn run(_: &RunOptions) -> anyhow::Result<ExitCode> {
    anyhow::bail!("the BPF object is missing in this build")
}
