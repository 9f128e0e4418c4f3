//! What user space alone does with an event: the benchmark `pipeline` of droptrace, on this machine.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::figures::Machine;
use super::machine::Watch;
use crate::shell::{self, step};
use crate::workspace::Workspace;

/// The sinks that the benchmark writes to.
const SINKS: &[&str] = &["json", "pcapng"];

/// Events that it puts through at once.
const EVENTS: f64 = 1000.0;

/// Events on one thread, from the bytes of the ring to the bytes of a sink.
#[derive(Serialize)]
pub(super) struct UserSpace {
    pub(super) sink: String,
    /// Of this machine's own time: others differ.
    pub(super) events_per_second: f64,
    pub(super) allocations_per_event: f64,
}

/// What the benchmark found, and what the machine did meanwhile.
#[derive(Serialize)]
pub(super) struct Found {
    pub(super) sinks: Vec<UserSpace>,
    pub(super) machine: Machine,
}

/// Criterion's `estimates.json`, as far as it is needed.
#[derive(Deserialize)]
struct Estimates {
    mean: Estimate,
}

#[derive(Deserialize)]
struct Estimate {
    /// Nanoseconds.
    point_estimate: f64,
}

/// Runs the benchmark.
///
/// # Errors
/// It cannot be built, fails, or does not say what is expected.
pub(super) fn measure(workspace: &Workspace) -> Result<Found> {
    let bench = |last: &[&str]| {
        let mut command = Command::new("cargo");
        command
            .current_dir(&workspace.root)
            .args([
                "bench",
                "--quiet",
                "--package",
                "droptrace",
                "--bench",
                "pipeline",
            ])
            .args(last);
        command
    };
    step("building the benchmark of user space");
    shell::run_long(&mut bench(&["--no-run"]))?;
    step("measuring user space");
    let watch = Watch::start()?;
    let said = shell::output(&mut bench(&[]))?;
    let machine = watch.end("user space")?;
    let sinks = SINKS
        .iter()
        .map(|sink| {
            let path = workspace
                .target
                .join(format!("criterion/pipeline/{sink}/new/estimates.json"));
            let text =
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let estimates: Estimates = serde_json::from_str(&text)?;
            Ok(UserSpace {
                sink: (*sink).to_owned(),
                events_per_second: EVENTS / (estimates.mean.point_estimate * 1e-9),
                allocations_per_event: allocations(&said, sink)
                    .with_context(|| format!("the benchmark tells no allocations to {sink}: {said}"))?,
            })
        })
        .collect::<Result<_>>()?;
    Ok(Found { sinks, machine })
}

/// Reads `allocations per event to json: 12.0`.
fn allocations(said: &str, sink: &str) -> Option<f64> {
    said.lines()
        .find_map(|line| {
            line.strip_prefix("allocations per event to ")?
                .strip_prefix(sink)?
                .strip_prefix(": ")
        })?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_read() {
        let said = "x\nallocations per event to json: 12.5\nallocations per event to pcapng: 20.0\n";
        assert_eq!(allocations(said, "json"), Some(12.5));
        assert_eq!(allocations(said, "pcapng"), Some(20.0));
        assert_eq!(allocations(said, "text"), None);
    }
}
