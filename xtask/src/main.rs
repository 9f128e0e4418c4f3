//! Sets up, builds, runs and tests droptrace.

mod bench;
mod build;
mod debian;
mod guest;
mod host;
mod matrix;
mod report;
mod results;
mod run;
mod setup;
mod shell;
mod stages;
mod store;
mod toolchain;
mod vm;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// Sets up, builds, runs and tests droptrace
///
/// Each command finds or fetches what it needs, says what and why, and asks nothing. Downloads come from the Debian
/// mirror that this machine's apt is configured with and from cargo's registry; they are kept in a cache outside of
/// the checkout and work offline from then on.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", disable_help_subcommand = true, after_help = ENVIRONMENT)]
struct Arguments {
    #[command(subcommand)]
    command: Subcommands,
}

/// What the environment may say.
const ENVIRONMENT: &str = "\
Environment:
  DROPTRACE_CACHE          where downloads are kept [default: ~/.cache/droptrace]
  DROPTRACE_DEBIAN_MIRROR  another Debian mirror: the address of the folder with dists/ and pool/";

#[derive(Subcommand)]
enum Subcommands {
    /// Run droptrace as root, for example `cargo xtask run -- live`
    Run(run::Arguments),
    /// Test everything: formatting, lints, unit tests, this host, guests with four kernels
    Test(stages::Arguments),
    /// Build the BPF object and droptrace, and print the program's path
    Build(build::Arguments),
    /// Measure what droptrace costs and delivers, in guests, and write docs/performance.md
    Bench(bench::Arguments),
    /// Run a command, or a shell, in an emulated guest with one of Debian's kernels
    Vm(vm::Arguments),
    /// Fetch what the other commands need, so that they work offline
    Setup(setup::Arguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match dispatch(arguments.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Subcommands) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    match command {
        Subcommands::Run(arguments) => run::run(&workspace, &arguments),
        Subcommands::Test(arguments) => stages::run(&workspace, &arguments),
        Subcommands::Setup(arguments) => setup::run(&workspace, &arguments),
        Subcommands::Build(arguments) => build::run(&workspace, &arguments),
        Subcommands::Bench(arguments) => bench::run(&workspace, &arguments),
        Subcommands::Vm(arguments) => vm::run(&workspace, arguments),
    }
}
