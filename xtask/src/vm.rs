//! `cargo xtask vm`: one guest for a developer.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::build;
use crate::guest::{Containers, Guest, Series, Tools};
use crate::shell::step;
use crate::workspace::Workspace;

/// What `cargo xtask vm` is asked.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The series: 5.10, 6.1, 6.12 or 7.x
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Number of CPUs
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Memory in MiB
    #[arg(long, default_value_t = 1024)]
    memory: u32,
    /// Count instructions instead of time: 1 ns each, on one CPU
    #[arg(long)]
    icount: bool,
    /// Put a file of this machine into the guest
    #[arg(long = "file", value_name = "HOST:GUEST")]
    files: Vec<String>,
    /// Write the lines that the command writes to /run/droptrace/results to this file
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
    /// Stop the guest after so many seconds [default: 300 with a COMMAND, none for a shell]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Put a container runtime into the guest: containerd, and the network plugins of CNI
    #[arg(long)]
    containers: bool,
    /// Leave the BPF object out of the guest's droptrace
    #[arg(long)]
    without_bpf: bool,
    /// What to run; a shell when nothing is given
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Boots the guest and ends with the command's exit status.
pub(crate) fn run(workspace: &Workspace, arguments: Arguments) -> Result<ExitCode> {
    let series = Series::named(&arguments.kernel)?;
    let files = arguments
        .files
        .iter()
        .map(|pair| {
            let (host, inside) = pair
                .split_once(':')
                .with_context(|| format!("`--file {pair}` is not HOST:GUEST"))?;
            Ok((PathBuf::from(host), inside.to_owned()))
        })
        .collect::<Result<Vec<_>>>()?;
    let (tools, kernel, more) = {
        let _lock = workspace.lock_cache()?;
        let tools = Tools::get(workspace)?;
        let kernel = series.newest(workspace, &tools)?;
        let more = if arguments.containers {
            vec![Containers::get(workspace)?.archive]
        } else {
            Vec::new()
        };
        (tools, kernel, more)
    };
    let programs = build::guest_programs(workspace, !arguments.without_bpf)?;
    let mut all_files = build::files_for_guests(&programs);
    all_files.extend(files);
    let limit = arguments.timeout.unwrap_or(if arguments.command.is_empty() {
        u64::from(u32::MAX)
    } else {
        300
    });
    step(&format!(
        "booting Linux {} (package {}) in an emulator",
        kernel.release, kernel.version
    ));
    let outcome = Guest {
        kernel: &kernel,
        tools: &tools,
        init: programs.join("droptrace-init"),
        more,
        files: all_files,
        command: arguments.command,
        cpus: arguments.cpus,
        memory: arguments.memory,
        icount: arguments.icount,
        log: None,
        limit: Duration::from_secs(limit),
    }
    .run()?;
    for warning in &outcome.warnings {
        step(&format!("the guest's kernel says: {warning}"));
    }
    if let Some(path) = arguments.results {
        let mut text = outcome.results.join("\n");
        if !text.is_empty() {
            text.push('\n');
        }
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(ExitCode::from(u8::try_from(outcome.status).unwrap_or(1)))
}
