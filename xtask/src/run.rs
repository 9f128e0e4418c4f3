//! `cargo xtask run`: set up, build, and run droptrace as root.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result};

use crate::build;
use crate::shell;
use crate::workspace::Workspace;

/// What `cargo xtask run` is asked.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Arguments for droptrace, for example `live --json`
    #[arg(last = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// Builds droptrace and becomes it.
pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    let program = build::static_release(workspace)?;
    let error = shell::as_root(&program)?.args(&arguments.arguments).exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}
