//! A droptrace that writes to a file, so that nobody reads along while something is measured.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{BufRead, BufReader, ErrorKind},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, bail, ensure};
use droptrace::diagnose::{Counts, Drop as Labelled, Record};
use nix::{
    sys::signal::{Signal, kill},
    time::ClockId,
    unistd::Pid,
};

use crate::{Result, sockets::wait_until, trace::PROGRAM};

/// Where it writes.
const OUTPUT: &str = "/tmp/bench-drops.json";
/// How often its output is looked at.
const POLL: Duration = Duration::from_millis(5);
/// Attaching all hooks, an answer, or the end, in an emulated guest.
const LIMIT: Duration = Duration::from_mins(3);
/// droptrace is idle if in this time it uses less than this part of it; it looks at the system about once a second.
const REST: Duration = Duration::from_millis(500);
const IDLE: u32 = 10;
/// Longer than droptrace holds an event back for its facts.
const FACTS: Duration = Duration::from_millis(500);

/// A running droptrace and what it has written.
#[derive(Debug)]
pub(super) struct Tracer {
    child: Child,
    output: BufReader<File>,
    /// A line of which the end is not written yet.
    half: String,
    /// Lines by cause.
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
    pub(super) fn spawn() -> Result<Self> {
        File::create(OUTPUT).with_context(|| format!("cannot write {OUTPUT}"))?;
        let child = Command::new(PROGRAM)
            .args(["live", "--json", "-o", OUTPUT])
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {PROGRAM}"))?;
        Ok(Self {
            child,
            output: BufReader::new(File::open(OUTPUT)?),
            half: String::new(),
            events: BTreeMap::new(),
            ports: BTreeMap::new(),
            attached: false,
            counts: None,
        })
    }

    /// Starts it; it has attached all hooks, and has nothing left to do, when this returns.
    pub(super) fn start() -> Result<Self> {
        let mut tracer = Self::spawn()?;
        tracer.wait_for("the coverage record", |tracer| tracer.attached)?;
        tracer.rest()?;
        Ok(tracer)
    }

    /// Waits until it has nothing left to do; gives its CPU time so far.
    pub(super) fn rest(&self) -> Result<Duration> {
        let mut last = self.cpu_time()?;
        wait_until("an idle droptrace", || {
            thread::sleep(REST);
            let now = self.cpu_time()?;
            let used = now.saturating_sub(std::mem::replace(&mut last, now));
            Ok(used < REST / IDLE)
        })?;
        Ok(last)
    }

    /// Reads what it has written meanwhile until something holds.
    pub(super) fn wait_for(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) -> Result<()> {
        let until = Instant::now() + LIMIT;
        loop {
            self.read()?;
            if holds(self) {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
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
            Record::Drop(drop) => self.take_drop(*drop),
            Record::Counts(counts) => self.counts = Some(counts),
            Record::Summary(_) => {}
        }
    }

    fn take_drop(&mut self, drop: Labelled) {
        if let Some(port) = drop.sport {
            self.ports.entry(drop.cause.clone()).or_default().insert(port);
        }
        *self.events.entry(drop.cause).or_default() += 1;
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
        self.signal(Signal::SIGUSR1)?;
        let fresh = |counts: &Counts| {
            counts
                .time
                .parse::<jiff::Timestamp>()
                .is_ok_and(|time| time >= asked)
        };
        self.wait_for("fresh counts", |tracer| tracer.counts.as_ref().is_some_and(fresh))?;
        self.counts.clone().context("no counts")
    }

    /// CPU time of all its threads, those that have ended included.
    pub(super) fn cpu_time(&self) -> Result<Duration> {
        let time = ClockId::pid_cpu_clock_id(self.pid())?.now()?;
        Ok(time.into())
    }

    /// Resident memory, in KiB.
    pub(super) fn resident(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        resident(&status).context("no VmRSS")
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.pid(), signal).with_context(|| format!("cannot send {signal} to droptrace"))
    }

    /// Interrupts it and waits for its end.
    pub(super) fn stop(mut self) -> Result<End> {
        let asked = Instant::now();
        self.signal(Signal::SIGINT)?;
        let status = self.child.wait()?;
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
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        match fs::remove_file(OUTPUT) {
            Err(error) if error.kind() != ErrorKind::NotFound => eprintln!("cannot remove {OUTPUT}: {error}"),
            _ => {}
        }
    }
}

/// Reads `VmRSS` of a `/proc/PID/status`, in KiB (`task_mem`, fs/proc/task_mmu.c, 5.10 - 7.3).
fn resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_read() {
        assert_eq!(
            resident("Name:\tdroptrace\nVmHWM:\t   20480 kB\nVmRSS:\t   18244 kB\n"),
            Some(18_244)
        );
        assert_eq!(resident("Name:\tkthreadd\n"), None);
    }
}
