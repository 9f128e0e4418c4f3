//! What the user sees while a capture file is written.

use std::{
    io::{self, Write},
    time::Instant,
};

use super::{Learned, Origin, Pcapng, Sink, pcapng::Storage, summary, words};
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
    names: Learned,
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
            names: Learned::default(),
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
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush().map_err(|error| self.told(error))
    }

    fn record(&mut self, record: &Record, origin: Option<Origin<'_>>) -> io::Result<()> {
        self.names.learn(record);
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
            let text = summary::text(end, self.coverage.as_ref(), &self.names);
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
        self.names.learn(record);
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

/// Lines that go to a file: says on standard error where they go, and at the end how many drops are there.
pub struct Written<S> {
    sink: S,
    name: String,
    drops: u64,
    begun: bool,
    /// Where it is said.
    says: Box<dyn Write + Send>,
}

impl<S: Sink> Written<S> {
    /// Around `sink`, which writes to the file called `name`; it is said on `says`.
    pub fn new(sink: S, name: String, says: Box<dyn Write + Send>) -> Self {
        Self {
            sink,
            name,
            drops: 0,
            begun: false,
            says,
        }
    }
}

impl<S: Sink> Sink for Written<S> {
    fn record(&mut self, record: &Record, origin: Option<Origin<'_>>) -> io::Result<()> {
        self.sink.record(record, origin)?;
        // Nobody may be left to be told; the file is what counts.
        match record {
            Record::Coverage(coverage) if !self.begun => {
                self.begun = true;
                let _ = writeln!(
                    self.says,
                    "writing drops of {} to {}; {}; Ctrl-C ends it",
                    words::scope(coverage),
                    self.name,
                    words::coverage(coverage)
                );
            }
            Record::Drop(_) | Record::Brief(_) => self.drops += 1,
            Record::Summary(end) => {
                let _ = writeln!(
                    self.says,
                    "{} in {}; ended by {} after {:.1} s",
                    words::count(self.drops, "drop"),
                    self.name,
                    end.ended,
                    end.seconds
                );
            }
            Record::Coverage(_) | Record::Name(_) | Record::Counts(_) => {}
        }
        Ok(())
    }

    fn hidden(&mut self, record: &Record) {
        self.sink.hidden(record);
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }

    fn tick(&mut self) -> io::Result<()> {
        self.sink.tick()
    }

    fn finish(&mut self) -> io::Result<()> {
        self.sink.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::sink::{Json, samples};

    #[derive(Clone, Default)]
    struct Said(Arc<Mutex<Vec<u8>>>);

    impl Write for Said {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_file_is_named_at_the_start_and_at_the_end() {
        let said = Said::default();
        let mut sink = Written::new(Json::new(Vec::new()), "drops.json".into(), Box::new(said.clone()));
        sink.record(&Record::Coverage(samples::coverage()), None).unwrap();
        sink.record(&Record::Coverage(samples::coverage()), None).unwrap();
        sink.record(&Record::Drop(Box::new(samples::accept_queue())), None)
            .unwrap();
        sink.record(&Record::Summary(samples::summary()), None).unwrap();
        let text = String::from_utf8(said.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.starts_with("writing drops of netns web"), "{text}");
        assert!(text.contains("to drops.json; coverage 2/3 hooks"), "{text}");
        assert!(text.contains("\n1 drop in drops.json; ended by "), "{text}");
    }
}
