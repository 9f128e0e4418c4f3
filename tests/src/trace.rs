//! A running droptrace, and what it has said so far.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use droptrace::diagnose::{Brief, Counts, Coverage, Drop as Labelled, Name, Reconciled, Record, Summary};
use jiff::Timestamp;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{Netns, Result};

/// The program under test.
pub const PROGRAM: &str = "/usr/bin/droptrace";
/// Attaching all hooks in an emulated guest.
const START: Duration = Duration::from_mins(3);
/// A counts record after it was asked for.
const COUNTS: Duration = Duration::from_secs(45);
/// A clean end after SIGINT.
const END: Duration = Duration::from_mins(1);

/// `droptrace live --json`, read line by line on a thread of its own.
#[derive(Debug)]
pub struct Trace {
    child: Child,
    said: Arc<Said>,
}

#[derive(Debug, Default)]
struct Said {
    so_far: Mutex<SoFar>,
    more: Condvar,
}

/// All that a droptrace has said.
#[derive(Debug, Default)]
pub struct SoFar {
    /// Every coverage record, in order.
    pub coverage: Vec<Coverage>,
    /// Every drop, in order.
    pub drops: Vec<Arc<Labelled>>,
    /// Names that came later than drops, in order.
    pub names: Vec<Name>,
    /// Every drop in short, in order.
    pub briefs: Vec<Brief>,
    /// The last totals.
    pub counts: Option<Counts>,
    /// The end of the run.
    pub summary: Option<Summary>,
    /// Lines of standard error.
    pub errors: Vec<String>,
    /// Lines that are no record.
    pub unreadable: Vec<String>,
    /// Standard output was closed.
    pub ended: bool,
}

impl SoFar {
    /// What was said at the end of the run of a counter of a netns.
    pub fn reconciled(&self, netns: &Netns, counter: &str) -> Result<Reconciled> {
        let summary = self.summary.as_ref().context("droptrace gave no summary")?;
        summary
            .reconcile
            .iter()
            .find(|row| row.netns == netns.inode() && row.counter == counter)
            .cloned()
            .with_context(|| format!("{counter} is not in {:?}", summary.reconcile))
    }
}

impl Trace {
    /// Starts `droptrace live --json` with more arguments; it has attached all hooks when this returns.
    pub fn start(arguments: &[&str]) -> Result<Self> {
        let mut child = Command::new(PROGRAM)
            .args(["live", "--json"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {PROGRAM}"))?;
        let said = Arc::new(Said::default());
        let output = child.stdout.take().context("droptrace has no standard output")?;
        let errors = child.stderr.take().context("droptrace has no standard error")?;
        thread::spawn({
            let said = Arc::clone(&said);
            move || {
                for line in BufReader::new(output).lines().map_while(std::result::Result::ok) {
                    said.line(&line);
                }
                said.change(|so_far| so_far.ended = true);
            }
        });
        thread::spawn({
            let said = Arc::clone(&said);
            move || {
                for line in BufReader::new(errors).lines().map_while(std::result::Result::ok) {
                    eprintln!("droptrace: {line}");
                    said.change(|so_far| so_far.errors.push(line));
                }
            }
        });
        let trace = Self { child, said };
        trace
            .wait_for("the coverage record", START, |so_far| !so_far.coverage.is_empty())
            .with_context(|| format!("droptrace live --json {arguments:?}"))?;
        Ok(trace)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Looks at what was said so far.
    pub fn look<T>(&self, see: impl FnOnce(&SoFar) -> T) -> T {
        see(&self.said.lock())
    }

    /// Waits until something was said.
    pub fn wait_for(&self, what: &str, limit: Duration, mut seen: impl FnMut(&SoFar) -> bool) -> Result<()> {
        let until = Instant::now() + limit;
        let mut so_far = self.said.lock();
        while !seen(&so_far) {
            let left = until.saturating_duration_since(Instant::now());
            if so_far.ended || left.is_zero() {
                let why = if so_far.ended {
                    "it ended".to_owned()
                } else {
                    format!("not within {limit:?}")
                };
                bail!(
                    "droptrace did not give {what}: {why}; standard error: {:?}; no records: {:?}",
                    so_far.errors,
                    so_far.unreadable
                );
            }
            so_far = self
                .said
                .more
                .wait_timeout(so_far, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Ok(())
    }

    /// Asks for the exact totals of this moment.
    pub fn counts(&self) -> Result<Counts> {
        let asked = Timestamp::now();
        self.signal(Signal::SIGUSR1)?;
        let fresh = |counts: &Option<Counts>| {
            counts
                .as_ref()
                .is_some_and(|counts| counts.time.parse::<Timestamp>().is_ok_and(|time| time >= asked))
        };
        self.wait_for("fresh counts", COUNTS, |so_far| fresh(&so_far.counts))?;
        self.look(|so_far| so_far.counts.clone()).context("no counts")
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.child.id() as i32), signal)
            .with_context(|| format!("cannot send {signal} to droptrace"))
    }

    /// Interrupts it and waits for its end; gives its exit status and all that it said.
    pub fn stop(mut self) -> Result<(std::process::ExitStatus, SoFar)> {
        // It may have ended by itself.
        let _ = self.signal(Signal::SIGINT);
        let until = Instant::now() + END;
        loop {
            if let Some(status) = self.child.try_wait()? {
                // What was written before the end is still being read.
                let _ = self.wait_for("its last line", Duration::from_secs(5), |so_far| so_far.ended);
                let so_far = std::mem::take(&mut *self.said.lock());
                return Ok((status, so_far));
            }
            if Instant::now() > until {
                bail!("droptrace did not end within {END:?} after SIGINT");
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills it without a chance to clean up, and reaps it.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Said {
    fn lock(&self) -> MutexGuard<'_, SoFar> {
        self.so_far.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut SoFar)) {
        change(&mut self.lock());
        self.more.notify_all();
    }

    fn line(&self, line: &str) {
        let record = serde_json::from_str::<Record>(line);
        self.change(|so_far| match record {
            Ok(Record::Coverage(coverage)) => so_far.coverage.push(coverage),
            Ok(Record::Drop(drop)) => so_far.drops.push(Arc::from(drop)),
            Ok(Record::Brief(brief)) => so_far.briefs.push(*brief),
            Ok(Record::Counts(counts)) => so_far.counts = Some(counts),
            Ok(Record::Name(name)) => so_far.names.push(name),
            Ok(Record::Summary(summary)) => so_far.summary = Some(summary),
            Err(error) => so_far.unreadable.push(format!("{error}: {line}")),
        });
    }
}
