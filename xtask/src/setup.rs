//! `cargo xtask setup`: fetch everything now, so that later commands work offline.

use std::process::ExitCode;

use anyhow::Result;

use crate::guest::{Containers, SERIES, Tools};
use crate::shell::{self, step};
use crate::toolchain::Toolchain;
use crate::workspace::Workspace;

/// What `cargo xtask setup` is asked.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Also fetch the emulator, and the kernels and tools of the guests
    #[arg(long)]
    guests: bool,
}

/// Fetches what is missing.
pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    let _lock = workspace.lock_cache()?;
    shell::run(workspace.cargo().args(["fetch", "--quiet", "--locked"]))?;
    let toolchain = Toolchain::get(workspace)?;
    step(&format!(
        "ready: BPF objects are linked by {}",
        toolchain.linker().display()
    ));
    if arguments.guests {
        let tools = Tools::get(workspace)?;
        Containers::get(workspace)?;
        for series in SERIES {
            let kernel = series.newest(workspace, &tools)?;
            step(&format!(
                "ready: guests with Linux {} (package {})",
                kernel.release, kernel.version
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}
