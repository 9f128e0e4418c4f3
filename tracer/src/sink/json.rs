//! One record per line, in the form that `docs/json.md` describes.

use std::io::{self, BufWriter, Write};

use super::{Origin, Sink};
use crate::diagnose::Record;

/// Writes JSON lines; those that come at once together.
#[derive(Debug)]
pub struct Json<W: Write> {
    out: BufWriter<W>,
}

impl<W: Write> Json<W> {
    /// A sink that writes to `out`.
    pub fn new(out: W) -> Self {
        Self {
            out: BufWriter::new(out),
        }
    }
}

impl<W: Write + Send> Sink for Json<W> {
    fn record(&mut self, record: &Record, _: Option<Origin<'_>>) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, record)?;
        self.out.write_all(b"\n")
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn finish(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
