//! Runs scenarios: side by side where they may, alone where they must.

use std::{
    collections::VecDeque,
    fs::File,
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use droptrace::diagnose::Drop as Labelled;
use nix::sys::resource::{Resource, setrlimit};
use serde_json::json;

use crate::{
    Result,
    test::{Kernel, Labels, Outcome, Place, Scenario, Test, late},
    trace::Trace,
};

/// Scenarios that run side by side.
const SIDE_BY_SIDE: usize = 4;
/// The longest that one scenario may take, and one that is [long](Place::Long).
const LIMIT: Duration = Duration::from_mins(4);
const LONG_LIMIT: Duration = Duration::from_mins(12);

/// How many ended which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// All held.
    pub passed: usize,
    /// Something did not hold.
    pub failed: usize,
    /// Could not occur here.
    pub skipped: usize,
}

/// Where results go: a file of JSON lines, and a line each on standard output.
struct Results {
    file: Mutex<File>,
    totals: Mutex<Totals>,
}

/// Sockets, devices and namespaces that scenarios hold open at once.
const OPEN_FILES: u64 = 65_536;

/// Runs these scenarios, with a droptrace over all of them if `with_droptrace`.
pub fn run(scenarios: &[Scenario], results: &Path, with_droptrace: bool) -> Result<Totals> {
    let file = File::create(results)
        .with_context(|| format!("cannot write the results to {}", results.display()))?;
    let results = Arc::new(Results {
        file: Mutex::new(file),
        totals: Mutex::default(),
    });
    results.line(&json!({
        "type": "plan",
        "scenarios": scenarios.iter().map(|scenario| scenario.name).collect::<Vec<_>>(),
    }))?;
    setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)
        .context("cannot raise the limit of open files")?;
    let trace = if with_droptrace {
        Some(Arc::new(Trace::start(&[])?))
    } else {
        None
    };
    let numbered: Vec<(u8, Scenario)> = (1..=u8::MAX).cycle().zip(scenarios.iter().copied()).collect();
    let (alone, shared): (Vec<_>, Vec<_>) = numbered.into_iter().partition(|(_, scenario)| scenario.alone);
    let queue = Arc::new(Mutex::new(VecDeque::from(shared)));
    let workers: Vec<_> = (0..SIDE_BY_SIDE)
        .map(|_| {
            let (queue, results, trace) = (Arc::clone(&queue), Arc::clone(&results), trace.clone());
            thread::spawn(move || -> Result<()> {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    match next {
                        Some((number, scenario)) => one(number, scenario, trace.as_ref(), &results)?,
                        None => return Ok(()),
                    }
                }
            })
        })
        .collect();
    for worker in workers {
        worker
            .join()
            .map_err(|_| anyhow::anyhow!("a worker of the scenario runner panicked"))??;
    }
    for (number, scenario) in alone {
        one(number, scenario, trace.as_ref(), &results)?;
    }
    if let Some(trace) = &trace {
        results.record(
            "droptrace-stays-readable",
            Duration::ZERO,
            whole_run(trace),
            &Labels::new(),
        )?;
    }
    let totals = *results.totals.lock().unwrap_or_else(PoisonError::into_inner);
    println!(
        "{} passed, {} failed, {} skipped",
        totals.passed, totals.failed, totals.skipped
    );
    Ok(totals)
}

/// Causes of packets for a socket, of which a kernel that hides the socket may not say in which netns they were.
const FOR_A_SOCKET: [&str; 8] = [
    "paws-established",
    "socket-backlog-full",
    "tcp-challenge-ack",
    "tcp-memory",
    "tcp-out-of-window",
    "tcp-zero-window",
    "udp-memory",
    "kernel-reason",
];

/// What must hold for the droptrace that ran over all scenarios.
fn whole_run(trace: &Trace) -> Result<Outcome> {
    let counts = trace.counts()?;
    trace.look(|so_far| {
        anyhow::ensure!(
            so_far.unreadable.is_empty(),
            "lines that are no record: {:?}",
            so_far.unreadable
        );
        anyhow::ensure!(
            counts.uncounted == 0,
            "{} drops are in no total; calls passed over: {:?}",
            counts.uncounted,
            counts.passed_over
        );
        // Where the kernel gives no netns, droptrace must not either.
        let hides_socket = Kernel::running()?.hides_socket();
        let may_be_nowhere = |drop: &Labelled| {
            hides_socket
                && (["paws-established", "tcp-zero-window", "socket-backlog-full", "tcp-memory", "udp-memory"].contains(&drop.cause.as_str())
                    || drop.evidence.get("location").and_then(|place| place.as_str())
                        == Some("tcp_validate_incoming"))
        };
        let lines: Vec<_> = so_far
            .drops
            .iter()
            .filter(|drop| drop.netns.is_none() && !drop.benign && !may_be_nowhere(drop))
            .collect();
        anyhow::ensure!(lines.is_empty(), "drops without a netns: {lines:?}");
        let nowhere: Vec<_> = counts
            .causes
            .iter()
            .filter(|count| count.netns == 0 && !count.benign)
            .filter(|count| !hides_socket || !FOR_A_SOCKET.contains(&count.cause.as_str()))
            .collect();
        anyhow::ensure!(nowhere.is_empty(), "drops without a netns: {nowhere:?}");
        Ok(Outcome::Passed(format!(
            "{} full events ({} without some fact, which the system did not give in time), {} lost, {} hints orphaned, {} clashes resolved",
            so_far.drops.len(),
            so_far.drops.iter().filter(|drop| late(drop)).count(),
            counts.lost_events,
            counts.hints_orphaned,
            counts.clashes_resolved
        )))
    })
}

/// Runs one scenario on a thread of its own, so that one that hangs is left behind.
fn one(number: u8, scenario: Scenario, trace: Option<&Arc<Trace>>, results: &Results) -> Result<()> {
    let started = Instant::now();
    let (say, heard) = mpsc::channel();
    let trace = trace.cloned();
    thread::spawn(move || {
        let mut labels = Labels::new();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let test = Test::new(scenario.name, number, trace)?;
            let outcome = (scenario.run)(&test);
            labels = test.labels();
            outcome
        }))
        .unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked")));
        // Nobody listens any more when the time was up.
        let _ = say.send((outcome, labels));
    });
    let limit = match scenario.place {
        Place::Long => LONG_LIMIT,
        Place::Usual | Place::Pods => LIMIT,
    };
    let (outcome, labels) = heard
        .recv_timeout(limit)
        .unwrap_or_else(|_| (Err(anyhow::anyhow!("not done within {limit:?}")), Labels::new()));
    results.record(scenario.name, started.elapsed(), outcome, &labels)
}

impl Results {
    fn record(&self, name: &str, took: Duration, outcome: Result<Outcome>, labels: &Labels) -> Result<()> {
        let (status, detail) = match outcome {
            Ok(Outcome::Passed(detail)) => ("passed", detail),
            Ok(Outcome::Skipped(reason)) => ("skipped", reason),
            Err(error) => ("failed", format!("{error:#}")),
        };
        {
            let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
            match status {
                "passed" => totals.passed += 1,
                "skipped" => totals.skipped += 1,
                _ => totals.failed += 1,
            }
        }
        println!("{status:7} {name} ({:.1} s): {detail}", took.as_secs_f64());
        self.line(&json!({
            "type": "result",
            "scenario": name,
            "status": status,
            "detail": detail,
            "labels": labels,
            "seconds": (took.as_secs_f64() * 100.0).round() / 100.0,
        }))
    }

    fn line(&self, value: &serde_json::Value) -> Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(file, "{value}").context("cannot write a result")?;
        file.flush().context("cannot write a result")
    }
}
