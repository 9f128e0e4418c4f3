//! A program that watches the kernel while something is measured.

use std::{
    fs,
    process::Child,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use nix::{
    sys::signal::{Signal, kill},
    time::ClockId,
    unistd::Pid,
};

use crate::Result;

/// It is idle if in this time it uses less than this part of it; droptrace looks at the system about once a second.
const REST: Duration = Duration::from_millis(500);
const IDLE: u32 = 10;
/// The longest that it may be at work on what was done, in an emulated guest.
const LIMIT: Duration = Duration::from_mins(3);

/// By what it is seen that a program has nothing left to do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Quiet {
    /// It hardly uses the CPU.
    Idle,
    /// This file does not grow: it asks the kernel all the time whether there is something.
    Output(&'static str),
}

/// A running program; killed when this value goes.
#[derive(Debug)]
pub(super) struct Process {
    /// What it is called in the figures.
    pub(super) name: &'static str,
    pub(super) child: Child,
    pub(super) quiet: Quiet,
}

impl Process {
    /// Waits until it has nothing left to do; gives its CPU time so far.
    pub(super) fn rest(&self) -> Result<Duration> {
        let until = Instant::now() + LIMIT;
        let mut last = self.look()?;
        loop {
            thread::sleep(REST);
            let now = self.look()?;
            let quiet = match self.quiet {
                Quiet::Idle => now.0.saturating_sub(last.0) < REST / IDLE,
                Quiet::Output(_) => now.1 == last.1,
            };
            if quiet {
                return Ok(now.0);
            }
            last = now;
            ensure!(
                Instant::now() < until,
                "it does not come to rest within {LIMIT:?}"
            );
        }
    }

    /// Its CPU time, and how much it has written where that tells.
    fn look(&self) -> Result<(Duration, u64)> {
        let written = match self.quiet {
            Quiet::Idle => 0,
            Quiet::Output(path) => fs::metadata(path)?.len(),
        };
        Ok((self.cpu_time()?, written))
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

    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.pid(), signal).with_context(|| format!("cannot send {signal} to {}", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
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
