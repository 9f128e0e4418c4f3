//! `droptrace live`.

use std::{
    io::{IsTerminal, stdout},
    path::{Path, PathBuf},
    process::ExitCode,
};

use super::{
    args::LiveArgs,
    options::{MAX_SIZE, Output, RunOptions},
    run,
};
use crate::sink::is_dumb_terminal;

pub(super) fn run(args: LiveArgs) -> anyhow::Result<ExitCode> {
    let options = options(args, stdout().is_terminal() && !is_dumb_terminal() && has_size());
    options.check()?;
    run::run(&options)
}

/// Whether the terminal knows how large it is. A serial console often does not, and a full screen of nothing is of no use.
fn has_size() -> bool {
    crossterm::terminal::size().is_ok_and(|(columns, rows)| columns > 0 && rows > 0)
}

fn options(args: LiveArgs, full_screen: bool) -> RunOptions {
    let file: Option<PathBuf> = args.output.filter(|path| path != Path::new("-"));
    let output = match (args.json, file) {
        (true, file) => Output::Json(file),
        (false, Some(file)) => Output::Text(Some(file)),
        (false, None) if full_screen && !args.no_tui => Output::Tui,
        (false, None) => Output::Text(None),
    };
    RunOptions {
        scope: args.run.scope,
        pods: args.run.pods.into(),
        output,
        command: args.run.command,
        benign: args.run.benign,
        every_drop: args.run.every_drop,
        ipvs: args.run.ipvs,
        hide_symbols: args.run.hide_symbols,
        max_size: MAX_SIZE,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::args::{Cli, Command};

    fn output(words: &[&str], full_screen: bool) -> RunOptions {
        let Command::Live(args) = Cli::try_parse_from([&["droptrace", "live"], words].concat())
            .unwrap()
            .command
        else {
            panic!("not live");
        };
        options(args, full_screen)
    }

    #[test]
    fn the_output_follows_the_arguments_and_the_terminal() {
        let file = || Some(PathBuf::from("f"));
        for (words, full_screen, expected) in [
            (&[][..], true, Output::Tui),
            (&[], false, Output::Text(None)),
            (&["--no-tui"], true, Output::Text(None)),
            (&["--json"], true, Output::Json(None)),
            (&["--json", "-o", "f"], true, Output::Json(file())),
            (&["--json", "-o", "-"], true, Output::Json(None)),
            (&["-o", "f"], true, Output::Text(file())),
        ] {
            assert_eq!(output(words, full_screen).output, expected, "{words:?}");
        }
    }

    #[test]
    fn a_command_needs_a_file() {
        for words in [&["--", "ls"][..], &["--json", "--", "ls"]] {
            assert!(output(words, true).check().is_err(), "{words:?}");
        }
        assert!(output(&["--json", "-o", "f", "--", "ls"], true).check().is_ok());
    }
}
