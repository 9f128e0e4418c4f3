//! One record per line, in the form that `docs/json.md` describes.

use std::io::{self, Write};

use super::{Origin, Sink};
use crate::diagnose::Record;

/// Writes JSON lines, each as soon as it comes.
#[derive(Debug)]
pub struct Json<W> {
    out: W,
    line: Vec<u8>,
}

impl<W: Write> Json<W> {
    /// A sink that writes to `out`.
    pub fn new(out: W) -> Self {
        Self {
            out,
            line: Vec::new(),
        }
    }
}

impl<W: Write + Send> Sink for Json<W> {
    fn record(&mut self, record: &Record, _: Option<Origin<'_>>) -> io::Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, record)?;
        self.line.push(b'\n');
        self.out.write_all(&self.line)?;
        self.out.flush()
    }

    fn finish(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
