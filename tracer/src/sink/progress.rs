//! What the user sees while a capture file is written.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    time::Instant,
};

use super::{Origin, Pcapng, Sink, learn_netns, pcapng::Storage, summary, words};
use crate::diagnose::{Coverage, Record};

/// A capture file, with a line of progress on a terminal and the summary at the end.
pub struct Captured<S> {
    file: Pcapng<S>,
    name: String,
    started: Instant,
    /// Standard error is a terminal.
    terminal: bool,
    /// Where the summary goes.
    summary: Box<dyn Write + Send>,
    coverage: Option<Coverage>,
    netns_names: BTreeMap<u32, String>,
}

impl<S: Storage> Captured<S> {
    /// Around `file`, which is called `name`; progress is shown on standard error where that is a `terminal`.
    pub fn new(file: Pcapng<S>, name: String, terminal: bool, summary: Box<dyn Write + Send>) -> Self {
        Self {
            file,
            name,
            started: Instant::now(),
            terminal,
            summary,
            coverage: None,
            netns_names: BTreeMap::new(),
        }
    }

    /// A failure with the file's name and the next step; what ends a run as it should stays as it is.
    fn told(&self, error: io::Error) -> io::Error {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::FileTooLarge => error,
            kind => {
                self.clear();
                let text = format!(
                    "cannot write {0}: {error}; all that was written until then is whole; next: make room, and `droptrace show {0}` reads it",
                    self.name
                );
                io::Error::new(kind, text)
            }
        }
    }

    /// Clears the line of progress.
    fn clear(&self) {
        if self.terminal {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl<S: Storage> Sink for Captured<S> {
    fn record(&mut self, record: &Record, origin: Option<Origin<'_>>) -> io::Result<()> {
        learn_netns(&mut self.netns_names, record);
        if let Record::Coverage(coverage) = record {
            if self.coverage.is_none() {
                let _ = writeln!(
                    io::stderr(),
                    "capturing drops of {} to {}; {}; Ctrl-C ends it",
                    words::scope(coverage),
                    self.name,
                    words::coverage(coverage)
                );
            }
            self.coverage = Some(coverage.clone());
        }
        self.file
            .record(record, origin)
            .map_err(|error| self.told(error))?;
        if let Record::Summary(end) = record {
            self.clear();
            let text = summary::text(end, self.coverage.as_ref(), &self.netns_names);
            self.summary.write_all(text.trim_start().as_bytes())?;
            writeln!(
                self.summary,
                "{} in {}, {} bytes; next: droptrace show {}",
                words::count(self.file.drops(), "drop"),
                self.name,
                self.file.written(),
                self.name
            )?;
        }
        Ok(())
    }

    fn hidden(&mut self, record: &Record) {
        learn_netns(&mut self.netns_names, record);
    }

    fn tick(&mut self) -> io::Result<()> {
        if self.terminal {
            // A terminal that is gone does not end a capture.
            let _ = write!(
                io::stderr(),
                "\r\x1b[K{}: {}, {} KiB",
                words::elapsed(self.started.elapsed().as_secs()),
                words::count(self.file.drops(), "drop"),
                self.file.written() / 1024
            );
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.clear();
        self.file.finish()
    }
}
