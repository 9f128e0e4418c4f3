//! `droptrace show`: the records of a capture file.

use std::{
    io::{BufWriter, IsTerminal, Write, stdout},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context;

use super::{args::ShowArgs, complain, problem};
use crate::{
    diagnose::Record,
    sink::{Json, Paint, Selection, Sink, Text},
    source::file::{self, FileError},
};

pub(super) fn run(args: &ShowArgs) -> anyhow::Result<ExitCode> {
    let selection = args.scope.selection(args.benign)?;
    let paint = Paint::for_terminal(stdout().is_terminal());
    let out = BufWriter::new(stdout());
    if args.json {
        show(args, &selection, Json::new(out))
    } else {
        show(args, &selection, Text::new(out, paint))
    }
}

/// What was shown of a file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Shown {
    drops: u64,
    wanted: u64,
    summary: bool,
}

fn show(args: &ShowArgs, selection: &Selection, mut sink: impl Sink) -> anyhow::Result<ExitCode> {
    let path = &args.file;
    let records = match file::open(path) {
        Ok(records) => records,
        Err(error) => return Ok(refuse(path, &error)),
    };
    let mut shown = Shown::default();
    let mut wish = Wish {
        selection,
        duration: args.scope.duration,
        first_ktime_ns: None,
    };
    let mut failed = None;
    for entry in records {
        match entry {
            Ok(entry) => {
                if pass(&entry.record, &mut wish, &mut shown) {
                    sink.record(&selection.narrow(entry.record), None)
                        .context("writing what was read")?;
                }
            }
            Err(error) => failed = Some(error),
        }
    }
    sink.finish().context("writing what was read")?;
    if !args.json && shown.wanted < shown.drops {
        writeln!(
            stdout(),
            "{} of {} drops shown; totals are those of the whole capture",
            shown.wanted,
            shown.drops
        )?;
    }
    if let Some(error) = failed {
        return Ok(refuse(path, &error));
    }
    if !shown.summary {
        complain(
            "note",
            &format!(
                "{} has no summary: its capture was killed, or still runs; all that it holds was shown",
                path.display()
            ),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Which drops to show.
struct Wish<'a> {
    selection: &'a Selection,
    duration: Option<Duration>,
    first_ktime_ns: Option<u64>,
}

impl Wish<'_> {
    fn wants(&mut self, drop: &crate::diagnose::Drop) -> bool {
        let first = *self.first_ktime_ns.get_or_insert(drop.ktime_ns);
        let since = Duration::from_nanos(drop.ktime_ns.saturating_sub(first));
        self.duration.is_none_or(|duration| since <= duration) && self.selection.wants(drop)
    }
}

fn pass(record: &Record, wish: &mut Wish<'_>, shown: &mut Shown) -> bool {
    match record {
        Record::Drop(drop) => {
            let wanted = wish.wants(drop);
            shown.drops += 1;
            shown.wanted += u64::from(wanted);
            wanted
        }
        Record::Summary(_) => {
            shown.summary = true;
            true
        }
        Record::Coverage(_) | Record::Counts(_) => true,
    }
}

fn refuse(path: &Path, error: &FileError) -> ExitCode {
    complain(
        "error",
        &format!("{}: {error}; next: {}", path.display(), error.next_step()),
    );
    problem::FAILURE.into()
}
