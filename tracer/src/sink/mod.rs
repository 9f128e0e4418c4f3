//! Where records go: text, JSON lines, a capture file, or the terminal.
//!
//! A sink renders [`Record`]s and decides nothing: what a drop means is settled
//! before it comes here, so that every sink says the same.

mod json;
mod pcapng;
mod progress;
#[cfg(test)]
pub(crate) mod samples;
mod select;
mod summary;
mod text;
mod tui;
pub(crate) mod words;

use std::{collections::BTreeMap, io};

pub use json::Json;
pub use pcapng::{Pcapng, Storage};
pub use progress::{Captured, Written};
pub use select::{Asked, Selected, Selection};
pub use text::{Paint, Text};
pub use tui::Tui;

use droptrace_common::BriefEvent;

use crate::diagnose::{Facts, RawEvent, Record};

/// What a drop was made from.
#[derive(Clone, Copy, Debug)]
pub enum Origin<'a> {
    /// An event in full: kept by a capture file, so that a label can be made again.
    Event {
        /// The raw event.
        event: &'a RawEvent,
        /// What was known of its surroundings.
        facts: &'a Facts,
    },
    /// A brief record, and its wall clock time in nanoseconds since 1970 UTC.
    Brief(&'a BriefEvent, i128),
}

impl<'a> Origin<'a> {
    /// The event in full and its facts, if it is one.
    pub fn event(self) -> Option<(&'a RawEvent, &'a Facts)> {
        match self {
            Self::Event { event, facts } => Some((event, facts)),
            Self::Brief(..) => None,
        }
    }
}

/// A place where records go.
///
/// Errors end a run. By their kind the caller knows why: [`io::ErrorKind::BrokenPipe`] (the reader went away: a quiet
/// end), [`io::ErrorKind::FileTooLarge`] (the size limit of the file is reached: a normal end, `size`), any other kind is
/// a failure. After an error of the first two kinds [`Sink::record`] may still be called with the
/// [`Record::Summary`], for which a sized file keeps room.
pub trait Sink: Send {
    /// Takes one record; `origin` comes with a drop that was made from an event.
    fn record(&mut self, record: &Record, origin: Option<Origin<'_>>) -> io::Result<()>;

    /// A record that is not shown; names in it are of use all the same.
    fn hidden(&mut self, _record: &Record) {}

    /// No record follows at once: what was gathered goes out now.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Called about once a second, for sinks that show the passing of time.
    fn tick(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Nothing more will come.
    fn finish(&mut self) -> io::Result<()>;
}

/// A terminal that knows no escape sequences, as `TERM` says.
pub fn is_dumb_terminal() -> bool {
    std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb")
}

/// Names of network namespaces, taken from whatever record tells one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Learned {
    /// Their own names.
    netns: BTreeMap<u32, String>,
    /// Pods and containers that have them.
    holders: BTreeMap<u32, String>,
}

impl Learned {
    /// Takes what a record tells.
    pub(crate) fn learn(&mut self, record: &Record) {
        let mut learn = |inode: u32, name: &Option<String>| keep(&mut self.netns, inode, name.as_ref());
        match record {
            Record::Coverage(coverage) => {
                for (inode, name) in coverage.scope.netns.iter().zip(&coverage.scope.netns_names) {
                    learn(*inode, name);
                }
            }
            Record::Drop(drop) => {
                if let Some(inode) = drop.netns {
                    learn(inode, &drop.netns_name);
                    keep(
                        &mut self.holders,
                        inode,
                        drop.pod.as_ref().or(drop.container.as_ref()),
                    );
                }
            }
            Record::Name(name) => {
                keep(
                    &mut self.holders,
                    name.netns,
                    name.pod.as_ref().or(name.container.as_ref()),
                );
            }
            // What it names was told by a drop before.
            Record::Brief(_) | Record::Counts(_) => {}
            Record::Summary(summary) => {
                for row in &summary.reconcile {
                    learn(row.netns, &row.netns_name);
                }
                for open in &summary.syn_unanswered {
                    learn(open.netns, &open.netns_name);
                }
            }
        }
    }

    /// Who has a netns, else its own name.
    pub(crate) fn name(&self, netns: u32) -> Option<&str> {
        let name = self.holders.get(&netns).or_else(|| self.netns.get(&netns));
        name.map(String::as_str)
    }

    /// The own names of network namespaces.
    pub(crate) const fn of_netns(&self) -> &BTreeMap<u32, String> {
        &self.netns
    }
}

fn keep(names: &mut BTreeMap<u32, String>, inode: u32, name: Option<&String>) {
    if let Some(name) = name
        && names.get(&inode) != Some(name)
    {
        names.insert(inode, name.clone());
    }
}
