//! Runs the scenarios inside a guest.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use droptrace::plan::Reasons;
use droptrace_tests::{
    Result,
    actor::{self, Role},
    bench, netns, run, scenarios,
    test::Place,
};

/// Makes the kernel drop packets in known numbers, and checks what droptrace says of them.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run scenarios; exit status 1 if one failed.
    Run {
        /// Every scenario, also those that take minutes.
        #[arg(long, conflicts_with_all = ["families", "long"])]
        full: bool,
        /// One scenario per family of causes.
        #[arg(long)]
        families: bool,
        /// Only scenarios that take minutes, most of which they wait.
        #[arg(long, conflicts_with = "families")]
        long: bool,
        /// Only scenarios that need a container runtime.
        #[arg(long, conflicts_with_all = ["families", "full", "long"])]
        pods: bool,
        /// Only scenarios whose name contains this, or another one of these.
        #[arg(long, value_name = "PATTERN")]
        only: Vec<String>,
        /// Where the results go, as JSON lines.
        #[arg(long, value_name = "FILE")]
        results: PathBuf,
        /// Only provoke the drops and check the kernel's own counters.
        #[arg(long)]
        no_droptrace: bool,
    },
    /// Measure what droptrace costs, and what it delivers.
    Bench {
        /// What to measure, in this order.
        #[arg(long = "part", value_name = "PART", required = true)]
        parts: Vec<bench::Part>,
        /// Less of everything.
        #[arg(long)]
        quick: bool,
        /// Where the figures go, as JSON lines.
        #[arg(long, value_name = "FILE")]
        results: PathBuf,
    },
    /// Name the scenarios.
    List,
    /// Name the running kernel's drop reasons, as droptrace keeps them for its documentation.
    Reasons,
    /// What a scenario starts as a process of its own.
    #[command(hide = true)]
    Act {
        role: Role,
        address: SocketAddr,
        number: u32,
    },
}

fn main() -> ExitCode {
    match execute(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("droptrace-tests: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn execute(command: Command) -> Result<ExitCode> {
    match command {
        Command::List => {
            for scenario in scenarios::all() {
                println!("{}", scenario.name);
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench {
            parts,
            quick,
            results,
        } => {
            netns::ensure_guest()?;
            let size = if quick {
                bench::Size::QUICK
            } else {
                bench::Size::FULL
            };
            bench::run(&parts, &size, &results)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Reasons => {
            for name in Reasons::of_kernel(Path::new("/sys/kernel/btf/vmlinux"))?.all() {
                println!("{name}");
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Act {
            role,
            address,
            number,
        } => actor::act(role, address, number).map(|()| ExitCode::SUCCESS),
        Command::Run {
            full,
            families,
            long,
            pods,
            only,
            results,
            no_droptrace,
        } => {
            netns::ensure_guest()?;
            let chosen: Vec<_> = scenarios::all()
                .into_iter()
                .filter(|scenario| !families || scenario.family)
                .filter(|scenario| match scenario.place {
                    Place::Usual => !long && !pods,
                    Place::Long => full || long,
                    Place::Pods => pods,
                })
                .filter(|scenario| only.is_empty() || only.iter().any(|only| scenario.name.contains(only)))
                .collect();
            anyhow::ensure!(
                !chosen.is_empty(),
                "no scenario has such a name; `droptrace-tests list` names them"
            );
            let totals = run::run(&chosen, &results, !no_droptrace)?;
            Ok(if totals.failed == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
    }
}
