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

use std::io;

pub use json::Json;
pub use pcapng::{Pcapng, Storage};
pub use progress::Captured;
pub use select::{Selected, Selection};
pub use text::{Paint, Text};
pub use tui::Tui;

use crate::diagnose::{Facts, RawEvent, Record};

/// What a drop was made from: kept by a capture file, so that a label can be made again.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// The raw event.
    pub event: &'a RawEvent,
    /// What was known of its surroundings.
    pub facts: &'a Facts,
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

    /// Called about once a second, for sinks that show the passing of time or gather writes.
    fn tick(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Nothing more will come.
    fn finish(&mut self) -> io::Result<()>;
}
