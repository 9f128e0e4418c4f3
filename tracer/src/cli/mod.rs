//! The command line: arguments and wiring only, one file per command.

mod args;
mod capture;
mod doctor;
mod explain;
mod late;
mod limits;
mod live;
pub mod options;
mod pods;
pub mod problem;
pub mod run;
mod schema;
mod show;
mod suggest;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Context as _;

use self::{
    args::{Cli, Command},
    problem::Problem,
};
use crate::context::ContextError;

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    keep_memory_small();
    let cli = match Cli::of(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => return args::report(&error, std::env::args_os().nth(1).as_deref()),
    };
    let result = match cli.command {
        Command::Live(args) => live::run(args),
        Command::Capture(args) => capture::run(args),
        Command::Show(args) => show::run(&args),
        Command::Pods(args) => pods::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Schema => schema::run(),
    };
    result.unwrap_or_else(|error| report(&error))
}

/// Has the C library give back what is freed: by default it keeps an arena for each thread, and, after the first large block
/// was freed, as much as that of every later one.
fn keep_memory_small() {
    #[cfg(target_env = "gnu")]
    for (option, value) in [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, 128 << 10)] {
        // SAFETY: no thread but this one is there yet.
        unsafe { libc::mallopt(option, value) };
    }
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
            let next = if text.contains("next: ") {
                ""
            } else if is_full(error) {
                "; next: make room there, or write to another place"
            } else {
                "; next: `droptrace doctor` shows what this host offers"
            };
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

/// Whether there is no more room where we write.
fn is_full(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| {
            matches!(
                cause.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            )
        })
}

/// Writes the whole answer of a command.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("cannot write to standard output")
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
    fn a_full_disk_asks_for_room() {
        let full = anyhow::Error::from(io::Error::from(io::ErrorKind::StorageFull)).context("cannot write");
        assert!(
            told(&full)
                .0
                .ends_with("next: make room there, or write to another place")
        );
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
