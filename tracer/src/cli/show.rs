//! `droptrace show`: the records of a capture file.

use std::{
    collections::BTreeSet,
    io::{IsTerminal, Write, stdout},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context;

use super::{
    args::ShowArgs,
    complain,
    problem::{self, Problem},
};
use crate::{
    diagnose::{Name, Record},
    sink::{Asked, Json, Learned, Paint, Selection, Sink, Text, words},
    source::file::{self, FileError},
};

/// What failed where an answer could not be written.
const WRITING: &str = "cannot write what was read";

pub(super) fn run(args: &ShowArgs) -> anyhow::Result<ExitCode> {
    let mut selection = Selection {
        pods: args.pod.clone(),
        containers: args.container.clone(),
        ..args.scope.selection(args.benign)?
    };
    let filters = selection.words();
    find_netns(args, &mut selection)?;
    let paint = Paint::for_terminal(stdout().is_terminal());
    if args.json {
        show(args, &selection, &filters, Json::new(stdout()))
    } else {
        show(args, &selection, &filters, Text::new(stdout(), paint))
    }
}

/// What was shown of a file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Shown {
    records: u64,
    drops: u64,
    wanted: u64,
    summary: bool,
}

fn show(
    args: &ShowArgs,
    selection: &Selection,
    filters: &str,
    mut sink: impl Sink,
) -> anyhow::Result<ExitCode> {
    let path = &args.file;
    let mut shown = Shown::default();
    let mut wish = Wish {
        selection,
        duration: args.scope.duration,
        first_ktime_ns: None,
    };
    let names = late_names(path);
    let records = match file::open(path) {
        Ok(records) => records,
        Err(error) => return Ok(refuse(path, &error, &shown)),
    };
    let mut bears = Bears::default();
    let mut failed = None;
    for entry in records {
        let record = match entry {
            Ok(entry) => entry.record,
            Err(error) => {
                failed = Some(error);
                continue;
            }
        };
        if shown.records == 0 && !args.json {
            head(filters, args.scope.duration)?;
        }
        bears.learn(&record);
        let named = with_names(&record, &names);
        let named = named.as_ref().unwrap_or(&record);
        // A line of JSON stays as it was told.
        let told = if args.json { &record } else { named };
        if pass(named, &mut wish, &mut shown) {
            sink.record(told, None).context(WRITING)?;
        } else {
            sink.hidden(told);
        }
    }
    sink.finish().context(WRITING)?;
    if !args.json && shown.wanted < shown.drops {
        writeln!(
            stdout(),
            "{} of {} drops shown; totals are those of the whole capture",
            shown.wanted,
            shown.drops
        )
        .context(WRITING)?;
    }
    if let Some(error) = failed {
        return Ok(refuse(path, &error, &shown));
    }
    bears.check(args)?;
    if !shown.summary {
        complain(
            "note",
            &format!(
                "{} has no summary: its capture was killed, or still runs; all that it holds was shown",
                name(path)
            ),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The names that the file tells later than drops. Standard input cannot be read twice: there they stand where they were told.
fn late_names(path: &Path) -> Vec<Name> {
    if path == Path::new("-") {
        return Vec::new();
    }
    // What is wrong with the file is told when it is shown.
    file::names(path).unwrap_or_default()
}

/// A drop with the names that came later; `None` where there are none.
fn with_names(record: &Record, names: &[Name]) -> Option<Record> {
    let Record::Drop(drop) = record else {
        return None;
    };
    if names.is_empty() {
        return None;
    }
    let mut drop = drop.clone();
    for name in names {
        name.join(&mut drop);
    }
    Some(Record::Drop(drop))
}

/// Names the filters, before anything is shown.
fn head(filters: &str, duration: Option<Duration>) -> anyhow::Result<()> {
    let mut filters = vec![filters.to_owned()];
    filters.extend(duration.map(|duration| format!("first {}", humantime::format_duration(duration))));
    filters.retain(|filter| !filter.is_empty());
    if !filters.is_empty() {
        writeln!(stdout(), "only drops of: {}", filters.join(", ")).context(WRITING)?;
    }
    Ok(())
}

/// Which drops to show.
struct Wish<'a> {
    selection: &'a Selection,
    duration: Option<Duration>,
    first_ktime_ns: Option<u64>,
}

impl Wish<'_> {
    fn wants<'a>(&mut self, ktime_ns: u64, drop: impl Into<Asked<'a>>) -> bool {
        let first = *self.first_ktime_ns.get_or_insert(ktime_ns);
        let since = Duration::from_nanos(ktime_ns.saturating_sub(first));
        self.duration.is_none_or(|duration| since <= duration) && self.selection.wants(drop)
    }
}

fn pass(record: &Record, wish: &mut Wish<'_>, shown: &mut Shown) -> bool {
    shown.records += 1;
    let wanted = match record {
        Record::Drop(drop) => wish.wants(drop.ktime_ns, &**drop),
        Record::Brief(brief) => wish.wants(brief.ktime_ns, &**brief),
        Record::Summary(_) => {
            shown.summary = true;
            return true;
        }
        Record::Coverage(_) | Record::Name(_) | Record::Counts(_) => return true,
    };
    shown.drops += 1;
    shown.wanted += u64::from(wanted);
    wanted
}

/// The namespaces that records bear.
#[derive(Debug, Default)]
struct Bears {
    names: Learned,
    inodes: BTreeSet<u32>,
}

impl Bears {
    fn learn(&mut self, record: &Record) {
        self.names.learn(record);
        self.inodes.extend(self.names.of_netns().keys());
        match record {
            Record::Coverage(coverage) => self.inodes.extend(&coverage.scope.netns),
            Record::Drop(drop) => self.inodes.extend(drop.netns),
            Record::Name(name) => self.inodes.extend([name.netns]),
            Record::Brief(brief) => self.inodes.extend(brief.netns),
            Record::Counts(counts) => self.inodes.extend(counts.causes.iter().map(|total| total.netns)),
            Record::Summary(summary) => {
                self.inodes
                    .extend(summary.counts.causes.iter().map(|total| total.netns));
                self.inodes.extend(summary.reconcile.iter().map(|row| row.netns));
                self.inodes
                    .extend(summary.syn_unanswered.iter().map(|open| open.netns));
            }
        }
        // 0: the kernel did not say.
        self.inodes.remove(&0);
    }

    /// Inodes of what the user named.
    fn inodes_of<'a>(&'a self, asked: &'a str) -> impl Iterator<Item = u32> + 'a {
        self.inodes.iter().copied().filter(move |inode| {
            inode.to_string() == asked || self.names.of_netns().get(inode).is_some_and(|name| name == asked)
        })
    }

    /// A name or number that no record bears is a mistake.
    fn check(&self, args: &ShowArgs) -> Result<(), Problem> {
        let Some(wrong) = asked_netns(args).find(|asked| self.inodes_of(asked).next().is_none()) else {
            return Ok(());
        };
        let known: Vec<_> = self
            .inodes
            .iter()
            .filter_map(|inode| {
                words::netns(Some(*inode), self.names.of_netns().get(inode).map(String::as_str))
            })
            .collect();
        Err(Problem::usage(
            format!("{} has no record of netns {wrong}", name(&args.file)),
            if known.is_empty() {
                "leave --netns out: no record tells its netns".to_owned()
            } else {
                format!("name one that it has: {}", known.join(", "))
            },
        ))
    }
}

/// What was asked for by name or number; a path exists by itself.
fn asked_netns(args: &ShowArgs) -> impl Iterator<Item = &String> {
    args.scope.netns.iter().filter(|netns| !netns.contains('/'))
}

/// Looks for what was named before anything is shown. A name that some record gives to an inode stands for that inode in
/// all of them. Standard input cannot be read twice: there a mistake is told at the end.
fn find_netns(args: &ShowArgs, selection: &mut Selection) -> Result<(), Problem> {
    if asked_netns(args).next().is_none() || args.file == Path::new("-") {
        return Ok(());
    }
    // What is wrong with the file is told when it is shown; what is lost of it might bear the name.
    let Ok(records) = file::open(&args.file) else {
        return Ok(());
    };
    let mut bears = Bears::default();
    for entry in records {
        let Ok(entry) = entry else {
            return Ok(());
        };
        bears.learn(&entry.record);
    }
    bears.check(args)?;
    for asked in asked_netns(args) {
        selection
            .netns
            .extend(bears.inodes_of(asked).map(|inode| inode.to_string()));
    }
    Ok(())
}

/// How a file is called in a message.
fn name(path: &Path) -> String {
    if path == Path::new("-") {
        "standard input".to_owned()
    } else {
        path.display().to_string()
    }
}

fn refuse(path: &Path, error: &FileError, shown: &Shown) -> ExitCode {
    let next = error.next_step(shown.records > 0);
    complain("error", &format!("{}: {error}; next: {next}", name(path)));
    problem::FAILURE.into()
}
