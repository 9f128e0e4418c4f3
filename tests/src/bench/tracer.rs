//! A droptrace that writes to a file, so that nobody reads along while something is measured.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{BufRead, BufReader, ErrorKind},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, bail, ensure};
use droptrace::diagnose::{Counts, Record};
use nix::sys::signal::Signal;

use super::process::{Process, Quiet};
use crate::{Result, netns, trace::PROGRAM};

/// Where it writes.
const OUTPUT: &str = "/tmp/bench-drops.json";
/// How often its output is looked at.
const POLL: Duration = Duration::from_millis(5);
/// Attaching all hooks, an answer, or the end, in an emulated guest.
const LIMIT: Duration = Duration::from_mins(3);
/// Longer than droptrace holds an event back for its facts.
const FACTS: Duration = Duration::from_millis(500);

/// A way of running droptrace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mode {
    /// What it is called in the figures.
    pub(super) name: &'static str,
    arguments: &'static [&'static str],
}

impl Mode {
    /// As it comes: in a flood, a sample has lines.
    pub(super) const DEFAULT: Self = Self {
        name: "droptrace",
        arguments: &[],
    };
    /// A line for every drop.
    pub(super) const EVERY_DROP: Self = Self {
        name: "droptrace --every-drop",
        arguments: &["--every-drop"],
    };

    /// Whether this droptrace has such a mode, by its help.
    pub(super) fn exists(self) -> Result<bool> {
        let help = netns::run(&format!("{PROGRAM} live --help"))?;
        Ok(self.arguments.iter().all(|option| help.contains(option)))
    }
}

/// A running droptrace and what it has written.
#[derive(Debug)]
pub(super) struct Tracer {
    pub(super) process: Process,
    output: BufReader<File>,
    /// A line of which the end is not written yet.
    half: String,
    /// Lines by cause, in full and in short.
    events: BTreeMap<String, u64>,
    /// Source ports of lines by cause.
    ports: BTreeMap<String, BTreeSet<u16>>,
    attached: bool,
    counts: Option<Counts>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    /// From SIGINT to the prompt.
    pub(super) after_signal: Duration,
    /// From the last line to the prompt; the kernel keeps the time of a write to one tick (4 ms).
    pub(super) after_line: Duration,
}

impl Tracer {
    /// Starts it without waiting for anything.
    pub(super) fn spawn(mode: Mode) -> Result<Self> {
        File::create(OUTPUT).with_context(|| format!("cannot write {OUTPUT}"))?;
        let child = Command::new(PROGRAM)
            .args(["live", "--json", "-o", OUTPUT])
            .args(mode.arguments)
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {PROGRAM}"))?;
        Ok(Self {
            process: Process {
                name: mode.name,
                child,
                quiet: Quiet::Idle,
            },
            output: BufReader::new(File::open(OUTPUT)?),
            half: String::new(),
            events: BTreeMap::new(),
            ports: BTreeMap::new(),
            attached: false,
            counts: None,
        })
    }

    /// Starts it; it has attached all hooks, and has nothing left to do, when this returns.
    pub(super) fn start(mode: Mode) -> Result<Self> {
        let mut tracer = Self::spawn(mode)?;
        tracer.wait_for("the coverage record", |tracer| tracer.attached)?;
        tracer.process.rest()?;
        Ok(tracer)
    }

    /// Reads what it has written meanwhile until something holds.
    pub(super) fn wait_for(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) -> Result<()> {
        let until = Instant::now() + LIMIT;
        loop {
            self.read()?;
            if holds(self) {
                return Ok(());
            }
            if let Some(status) = self.process.child.try_wait()? {
                bail!("droptrace ended before {what}: {status}");
            }
            ensure!(Instant::now() < until, "no {what} within {LIMIT:?}");
            thread::sleep(POLL);
        }
    }

    /// Takes every whole line that is new.
    fn read(&mut self) -> Result<()> {
        while self.output.read_line(&mut self.half)? > 0 && self.half.ends_with('\n') {
            let line = std::mem::take(&mut self.half);
            let record =
                serde_json::from_str(&line).with_context(|| format!("a line that is no record: {line}"))?;
            self.take(record);
        }
        Ok(())
    }

    fn take(&mut self, record: Record) {
        match record {
            Record::Coverage(_) => self.attached = true,
            Record::Drop(drop) => self.take_drop(drop.cause, drop.sport),
            Record::Brief(brief) => self.take_drop(brief.cause, brief.sport),
            Record::Counts(counts) => self.counts = Some(counts),
            Record::Name(_) | Record::Summary(_) => {}
        }
    }

    fn take_drop(&mut self, cause: String, source_port: Option<u16>) {
        if let Some(port) = source_port {
            self.ports.entry(cause.clone()).or_default().insert(port);
        }
        *self.events.entry(cause).or_default() += 1;
    }

    /// Lines of a cause so far.
    pub(super) fn events(&self, cause: &str) -> u64 {
        self.events.get(cause).copied().unwrap_or(0)
    }

    /// Different source ports of a cause's packets with a line.
    pub(super) fn ports(&self, cause: &str) -> BTreeSet<u16> {
        self.ports.get(cause).cloned().unwrap_or_default()
    }

    /// The exact totals of this moment, once every event before it has its line.
    pub(super) fn counts(&mut self) -> Result<Counts> {
        thread::sleep(FACTS);
        let asked = jiff::Timestamp::now();
        self.process.signal(Signal::SIGUSR1)?;
        let fresh = |counts: &Counts| {
            counts
                .time
                .parse::<jiff::Timestamp>()
                .is_ok_and(|time| time >= asked)
        };
        self.wait_for("fresh counts", |tracer| tracer.counts.as_ref().is_some_and(fresh))?;
        self.counts.clone().context("no counts")
    }

    /// Interrupts it and waits for its end.
    pub(super) fn stop(mut self) -> Result<End> {
        let asked = Instant::now();
        self.process.signal(Signal::SIGINT)?;
        let status = self.process.child.wait()?;
        let after_signal = asked.elapsed();
        let last_line = Path::new(OUTPUT).metadata()?.modified()?;
        let after_line = SystemTime::now().duration_since(last_line).unwrap_or_default();
        ensure!(status.success(), "droptrace ended with {status}");
        Ok(End {
            after_signal,
            after_line,
        })
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        match fs::remove_file(OUTPUT) {
            Err(error) if error.kind() != ErrorKind::NotFound => eprintln!("cannot remove {OUTPUT}: {error}"),
            _ => {}
        }
    }
}
