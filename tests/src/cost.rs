//! What the programs cost, as the kernel measures it (`kernel.bpf_stats_enabled`, kernel/bpf/syscall.c).

use std::{collections::BTreeMap, fs, time::Duration};

use anyhow::Context as _;

use crate::Result;

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Calls and run time of every program so far, by program id.
type Readings = BTreeMap<u32, (String, u64, Duration)>;

/// What one program did during a measurement.
#[derive(Debug)]
pub(crate) struct Ran {
    /// Its name, of which the kernel keeps 15 letters.
    pub(crate) name: String,
    /// At least one.
    pub(crate) calls: u64,
    /// Of all calls together.
    pub(crate) time: Duration,
}

/// A measurement in progress. The kernel measures until it is dropped, which itself costs a little per call.
#[derive(Debug)]
pub(crate) struct Cost {
    before: Readings,
}

impl Cost {
    /// Starts to measure.
    ///
    /// # Errors
    /// The kernel does not let this process.
    pub(crate) fn start() -> Result<Self> {
        fs::write(SWITCH, "1").context("cannot have the kernel measure BPF programs")?;
        Ok(Self { before: read()? })
    }

    /// Every program that ran since.
    ///
    /// # Errors
    /// The kernel does not list its programs.
    pub(crate) fn programs(&self) -> Result<Vec<Ran>> {
        let rows = read()?.into_iter().map(|(id, (name, calls, time))| {
            let (_, calls_before, time_before) = self.before.get(&id).cloned().unwrap_or_default();
            Ran {
                name,
                calls: calls - calls_before,
                time: time.saturating_sub(time_before),
            }
        });
        Ok(rows.filter(|ran| ran.calls > 0).collect())
    }

    /// The same in words: name, calls, time per call.
    ///
    /// # Errors
    /// As those of [`Self::programs`].
    pub(crate) fn so_far(&self) -> Result<String> {
        let rows: Vec<String> = self
            .programs()?
            .into_iter()
            .map(|Ran { name, calls, time }| {
                format!("{name} {calls} × {} ns", time.as_nanos() / u128::from(calls))
            })
            .collect();
        Ok(rows.join(", "))
    }
}

impl Drop for Cost {
    fn drop(&mut self) {
        // A guest that keeps measuring is only a little slower.
        let _ = fs::write(SWITCH, "0");
    }
}

fn read() -> Result<Readings> {
    aya::programs::loaded_programs()
        .map(|program| {
            let program = program.context("cannot list BPF programs")?;
            let name = program.name_as_str().unwrap_or("?").to_owned();
            Ok((program.id(), (name, program.run_count(), program.run_time())))
        })
        .collect()
}
