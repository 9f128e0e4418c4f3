//! The command line: arguments and wiring only, one file per command.

mod args;
mod capture;
mod doctor;
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
use crate::context::ContextError;

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
        Command::Doctor(args) => doctor::run(&args),
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
    let (text, status) = told(error);
    complain("error", &text);
    status.into()
}

/// The line for an error, with the next step, and the exit status.
fn told(error: &anyhow::Error) -> (String, u8) {
    if let Some(problem) = error.downcast_ref::<Problem>() {
        return (problem.to_string(), problem.status());
    }
    match error.downcast_ref::<ContextError>() {
        // These texts name the next step themselves.
        Some(error @ ContextError::Start(_)) => (error.to_string(), problem::FAILURE),
        Some(error) => (error.to_string(), problem::USAGE),
        None => {
            let text = format!("{error:#}");
            let next = "; next: `droptrace doctor` shows what this host offers";
            let next = if text.contains("next: ") { "" } else { next };
            (text + next, problem::FAILURE)
        }
    }
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

    #[test]
    fn every_error_has_a_status_and_one_next_step() {
        let unknown = ContextError::NetnsName("web".into());
        assert_eq!(told(&unknown.into()).1, problem::USAGE);
        let (text, status) = told(&anyhow::anyhow!("no BTF; next: use another kernel"));
        assert_eq!(text.matches("next: ").count(), 1);
        assert_eq!(status, problem::FAILURE);
        let (text, _) = told(&anyhow::anyhow!("cannot").context("attaching"));
        assert!(text.starts_with("attaching: cannot; next: "), "{text}");
    }
}
