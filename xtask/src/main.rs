//! Sets up, builds, runs and tests droptrace.
#![allow(dead_code, reason = "the commands that use the rest come next")]

mod build;
mod debian;
mod guest;
mod shell;
mod store;
mod toolchain;
mod vm;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// Sets up, builds, runs and tests droptrace.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", version, disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Subcommands,
}

#[derive(Subcommand)]
enum Subcommands {
    /// Build the BPF object and droptrace, and print the program's path
    Build(build::Arguments),
    /// Run a command, or a shell, in an emulated guest with one of Debian's kernels
    Vm(vm::Arguments),
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
        Subcommands::Build(arguments) => build::run(&workspace, &arguments),
        Subcommands::Vm(arguments) => vm::run(&workspace, arguments),
    }
}
