//! The command line: arguments and wiring only, one file per command.

mod args;
mod capture;
mod explain;
mod live;
pub mod options;
pub mod problem;
pub mod run;
mod schema;
mod show;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::Parser;

use self::{
    args::{Cli, Command},
    problem::Problem,
};

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return args::report(&error),
    };
    let result = match cli.command {
        Command::Live(args) => live::run(args),
        Command::Capture(args) => capture::run(args),
        Command::Show(args) => show::run(&args),
        Command::Doctor(_) => Err(anyhow::anyhow!("not built yet")),
        Command::Explain(args) => explain::run(&args),
        Command::Schema => schema::run(),
    };
    result.unwrap_or_else(|error| report(&error))
}

/// Tells an error in one line; a reader that went away is none.
fn report(error: &anyhow::Error) -> ExitCode {
    if is_closed_pipe(error) {
        return ExitCode::SUCCESS;
    }
    let (text, status) = match error.downcast_ref::<Problem>() {
        Some(problem) => (problem.to_string(), problem.status()),
        None => (
            format!("{error:#}; next: `droptrace doctor` shows what this host offers"),
            problem::FAILURE.into(),
        ),
    };
    complain("error", &text);
    status
}

/// Whether the reader of our output went away.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// One line on standard error, whatever the text holds.
fn complain(kind: &str, text: &str) {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    // Nobody is left to tell when standard error is closed.
    let _ = writeln!(io::stderr(), "droptrace: {kind}: {line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_found_below_other_errors() {
        let error = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)).context("writing");
        assert!(is_closed_pipe(&error));
        assert!(!is_closed_pipe(&anyhow::anyhow!("no")));
    }
}
