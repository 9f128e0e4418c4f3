//! `cargo xtask test`: formatting, lints, unit tests, a run on this host, and the guests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::build;
use crate::guest::{Containers, Guest, Kernel, Record, SERIES, Series, Tools};
use crate::host;
use crate::report::{GUEST, Report, Stage};
use crate::results::{self, Check, Status, Tally};
use crate::shell::{self, step};
use crate::toolchain::Toolchain;
use crate::workspace::Workspace;

/// The series on which every scenario runs without being asked.
const EVERYTHING_ON: &[&str] = &["5.10", "7.x"];

/// The series on which pods are tested without being asked.
const PODS_ON: &str = "6.1";

/// How long all scenarios may take in one guest.
const GUEST_LIMIT: Duration = Duration::from_mins(25);

/// The series on which it is measured.
const ATTACH_ON: &[&str] = &["6.1", "6.12", "7.x"];

/// How long attaching all hooks may take where an instruction takes a nanosecond. 5.10 is not held to it: few of its hooks
/// can do without the symbols and with trampolines.
const ATTACH_LIMIT: Duration = Duration::from_millis(1500);

/// A host on which that is measured.
struct AttachCase {
    name: &'static str,
    /// What makes the guest such a host.
    before: &'static str,
}

/// A fresh host, and one that does NAT and IPVS, as nodes of Kubernetes do, where a dozen more hooks have
/// a place.
const ATTACH_CASES: &[AttachCase] = &[
    AttachCase {
        name: "all hooks attached in counted time",
        before: ":",
    },
    AttachCase {
        name: "all hooks attached in counted time, conntrack and IPVS loaded",
        before: "modprobe -a nf_conntrack ip_vs nf_reject_ipv4 nf_reject_ipv6",
    },
];

/// Writes the seconds since boot before droptrace starts, and once all its hooks are attached. The kernel works on for
/// some seconds after it has booted, which is not to be measured.
const ATTACH_SCRIPT: &str = "\
sleep 5
read before rest </proc/uptime
droptrace live --no-tui -o /tmp/drops -- sh -c 'read after rest </proc/uptime; echo $after >/tmp/after' || exit
read after </tmp/after
echo $before $after >/run/droptrace/results";

/// What `cargo xtask test` is asked.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// All scenarios on all kernels, and write the result to docs/test-results.md and docs/confusion-matrix.md
    #[arg(long)]
    full: bool,
    /// Only guests with these kernels
    #[arg(long = "kernel", value_name = "KERNEL")]
    kernels: Vec<String>,
    /// Only scenarios whose name contains this
    #[arg(long, value_name = "PATTERN")]
    only: Option<String>,
    /// Boot no guests
    #[arg(long, conflicts_with_all = ["full", "guests"])]
    no_guests: bool,
    /// Nothing but the guests
    #[arg(long, conflicts_with = "full")]
    guests: bool,
}

/// Runs the stages; the last line tells how many checks ended which way.
pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    let chosen = choose(&arguments.kernels)?;
    let mut report = Report::default();
    if !arguments.guests {
        report.stage("formatting", || formatting(workspace));
        report.stage("lints", || lints(workspace));
        report.stage("unit tests", || unit_tests(workspace));
        report.stage("release build", || release_build(workspace));
        report.stage("host run", || vec![host::check()]);
    }
    if !arguments.no_guests {
        match prepare_guests(workspace) {
            Ok((tools, programs)) => {
                for series in chosen.iter().copied() {
                    let families = !arguments.full && !EVERYTHING_ON.contains(&series.name);
                    let scope = Scope {
                        choice: if families { Choice::Families } else { Choice::Usual },
                        only: arguments.only.as_deref(),
                    };
                    guest_stages(&mut report, workspace, &tools, &programs, series, &scope);
                }
                if arguments.only.is_none() {
                    let chosen = chosen.iter().copied();
                    for series in chosen.filter(|series| arguments.full || series.name == PODS_ON) {
                        pods_stage(&mut report, workspace, &tools, &programs, series);
                    }
                }
                if arguments.full {
                    long_stages(&mut report, workspace, &tools, &programs, &chosen);
                }
            }
            Err(error) => report.stage("guests", || {
                vec![Check::failed("preparation", format!("{error:#}"))]
            }),
        }
    }
    report.print();
    if arguments.full {
        let date = jiff::Timestamp::now().strftime("%Y-%m-%d");
        let run = format!("`cargo xtask test --full` on {date}, at {}", workspace.commit());
        let docs = workspace.root.join("docs");
        fs::create_dir_all(&docs)?;
        for (name, page) in [
            ("test-results.md", report.markdown(&run)),
            ("confusion-matrix.md", report.matrix().markdown(&run)),
        ] {
            let path = docs.join(name);
            fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
            step(&format!("wrote {}", path.display()));
        }
    }
    let total = report.total();
    println!("{total}");
    Ok(if total.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The series to test: those asked for, else all.
fn choose(names: &[String]) -> Result<Vec<&'static Series>> {
    if names.is_empty() {
        return Ok(SERIES.iter().collect());
    }
    names.iter().map(|name| Series::named(name)).collect()
}

/// Turns the end of a command into one check.
fn command(name: &str, command: &mut Command) -> Check {
    match shell::run_long(command) {
        Ok(()) => Check::passed(name, ""),
        Err(error) => Check::failed(name, format!("{error:#}")),
    }
}

fn formatting(workspace: &Workspace) -> Vec<Check> {
    vec![command(
        "rustfmt",
        workspace.cargo().args(["fmt", "--all", "--check"]),
    )]
}

fn lints(workspace: &Workspace) -> Vec<Check> {
    let mut checks = vec![command(
        "clippy",
        workspace
            .cargo()
            .args(["clippy", "--quiet", "--workspace", "--exclude", "droptrace-ebpf"])
            .args(["--all-targets", "--", "-Dwarnings"]),
    )];
    let toolchain = workspace.lock_cache().and_then(|_lock| Toolchain::get(workspace));
    checks.push(match toolchain {
        Ok(toolchain) => command(
            "clippy of the BPF programs",
            toolchain
                .cargo(workspace, "clippy")
                .args(["--quiet", "--release", "--target-dir"])
                .arg(workspace.target.join("bpf"))
                .args(["--", "-Dwarnings"]),
        ),
        Err(error) => Check::failed("clippy of the BPF programs", format!("{error:#}")),
    });
    checks.push(if shell::which("cargo-deny").is_some() {
        command(
            "cargo-deny",
            workspace
                .cargo()
                .args(["deny", "--offline", "check", "bans", "licenses", "sources"]),
        )
    } else {
        Check::skipped("cargo-deny", "not installed: `cargo install cargo-deny`")
    });
    checks
}

fn unit_tests(workspace: &Workspace) -> Vec<Check> {
    let output = workspace
        .cargo()
        .args([
            "test",
            "--quiet",
            "--no-fail-fast",
            "--workspace",
            "--exclude",
            "droptrace-ebpf",
        ])
        // One line per test, whatever `--quiet` says of cargo itself.
        .args(["--", "--format=pretty"])
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => return vec![Check::failed("cargo test", error.to_string())],
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let mut checks = results::parse_cargo_test(&text);
    let failed = checks.iter().any(|check| check.status == Status::Failed);
    if !output.status.success() {
        eprint!("{text}{}", String::from_utf8_lossy(&output.stderr));
    }
    if checks.is_empty() || (!output.status.success() && !failed) {
        checks.push(Check::failed("cargo test", output.status.to_string()));
    }
    checks
}

/// Builds what users get, fully static.
fn release_build(workspace: &Workspace) -> Vec<Check> {
    const NAME: &str = "a fully static droptrace";
    match build::static_release(workspace) {
        Ok(_) => vec![Check::passed(NAME, "")],
        Err(error) => vec![Check::failed(NAME, format!("{error:#}"))],
    }
}

/// The emulator, the tools and the programs of the guests.
fn prepare_guests(workspace: &Workspace) -> Result<(Tools, PathBuf)> {
    let tools = {
        let _lock = workspace.lock_cache()?;
        Tools::get(workspace)?
    };
    Ok((tools, build::guest_programs(workspace, true)?))
}

/// Which scenarios a guest runs.
struct Scope<'a> {
    choice: Choice,
    only: Option<&'a str>,
}

/// Scenarios by how long they take.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// One per family of causes.
    Families,
    /// All but those that take minutes.
    Usual,
    /// Those that take minutes.
    Long,
    /// Those that need a container runtime.
    Pods,
}

impl Choice {
    /// Memory of its guest in MiB: a runtime's files are in it.
    const fn memory(self) -> u32 {
        match self {
            Self::Families | Self::Usual | Self::Long => 1024,
            Self::Pods => 2048,
        }
    }
}

/// Tests one series; where its newest package fails that never passed, also the last one that did.
fn guest_stages(
    report: &mut Report,
    workspace: &Workspace,
    tools: &Tools,
    programs: &Path,
    series: &'static Series,
    scope: &Scope<'_>,
) {
    let kernel = workspace
        .lock_cache()
        .and_then(|_lock| series.newest(workspace, tools));
    let kernel = match kernel {
        Ok(kernel) => kernel,
        Err(error) => {
            report.stage(&format!("guest {}", series.name), || {
                vec![Check::failed("kernel", format!("{error:#}"))]
            });
            return;
        }
    };
    if ATTACH_ON.contains(&series.name) && scope.only.is_none() {
        report.stage(&format!("attach time on {}", series.name), || {
            ATTACH_CASES
                .iter()
                .map(|case| attach_time(workspace, tools, programs, &kernel, case))
                .collect()
        });
    }
    let record = series.record(workspace);
    let passed = newest_or_last_good(report, &record, &kernel.version, |report, version| {
        let older;
        let kernel = if version == kernel.version {
            &kernel
        } else {
            older = series.cached(workspace, version)?;
            &older
        };
        Some(guest_stage(report, workspace, tools, programs, kernel, scope).tally())
    });
    let whole = scope.only.is_none();
    if passed && whole && record.passed.as_ref() != Some(&kernel.version) {
        let passed = Some(kernel.version);
        if let Err(error) = series.keep_record(workspace, &Record { passed }) {
            step(&format!("cannot keep which kernel passed: {error:#}"));
        }
    }
}

/// Tests the newest package and says whether it passed. Where one fails that never passed, the last one that did is tested
/// beside it: what fails there, too, is no matter of the new kernel.
///
/// `test` adds the stage of a version to the report; `None` says that the version is no longer there.
fn newest_or_last_good(
    report: &mut Report,
    record: &Record,
    newest: &str,
    mut test: impl FnMut(&mut Report, &str) -> Option<Tally>,
) -> bool {
    if test(report, newest).is_some_and(|tally| tally.failed == 0) {
        return true;
    }
    let Some(good) = record.passed.as_deref().filter(|good| *good != newest) else {
        return false;
    };
    report.note(format!(
        "the kernel package {newest} never passed before; the last one that did is {good}"
    ));
    if test(report, good).is_none() {
        report.note(format!(
            "{good} is no longer in the cache, so that it could not be tried again"
        ));
    }
    false
}

fn guest_stage<'a>(
    report: &'a mut Report,
    workspace: &Workspace,
    tools: &Tools,
    programs: &Path,
    kernel: &Kernel,
    scope: &Scope<'_>,
) -> &'a Stage {
    let name = format!("{GUEST}{} (package {})", kernel.series.name, kernel.version);
    report.stage(&name, || {
        boot(workspace, tools, programs, kernel, scope)
            .unwrap_or_else(|error| vec![Check::failed("guest", format!("{error:#}"))])
    });
    report.last()
}

/// Runs the scenarios that need a container runtime.
fn pods_stage(
    report: &mut Report,
    workspace: &Workspace,
    tools: &Tools,
    programs: &Path,
    series: &'static Series,
) {
    let scope = Scope {
        choice: Choice::Pods,
        only: None,
    };
    report.stage(&format!("{GUEST}{}, with pods", series.name), || {
        workspace
            .lock_cache()
            .and_then(|_lock| series.newest(workspace, tools))
            .and_then(|kernel| boot(workspace, tools, programs, &kernel, &scope))
            .unwrap_or_else(|error| vec![Check::failed("guest", format!("{error:#}"))])
    });
}

/// Runs the scenarios that take minutes, on all these kernels at once: they wait most of the time.
fn long_stages(
    report: &mut Report,
    workspace: &Workspace,
    tools: &Tools,
    programs: &Path,
    chosen: &[&'static Series],
) {
    step("long scenarios, on all kernels at once");
    let scope = Scope {
        choice: Choice::Long,
        only: None,
    };
    let kernels: Vec<_> = chosen
        .iter()
        .map(|series| {
            let kernel = workspace
                .lock_cache()
                .and_then(|_lock| series.newest(workspace, tools));
            (series.name, kernel)
        })
        .collect();
    let results: Vec<_> = thread::scope(|threads| {
        let running: Vec<_> = kernels
            .iter()
            .map(|(series, kernel)| {
                let scope = &scope;
                threads.spawn(move || {
                    let start = Instant::now();
                    let checks = match kernel {
                        Ok(kernel) => boot(workspace, tools, programs, kernel, scope)
                            .unwrap_or_else(|error| vec![Check::failed("guest", format!("{error:#}"))]),
                        Err(error) => vec![Check::failed("kernel", format!("{error:#}"))],
                    };
                    (
                        format!("{GUEST}{series}, long scenarios"),
                        checks,
                        start.elapsed(),
                    )
                })
            })
            .collect();
        running.into_iter().map(thread::ScopedJoinHandle::join).collect()
    });
    for result in results {
        match result {
            Ok((name, checks, duration)) => report.add(name, checks, duration),
            Err(_) => report.stage("long scenarios", || {
                vec![Check::failed("guest", "the thread that ran it panicked")]
            }),
        }
    }
}

/// Boots a guest that runs the scenarios.
fn boot(
    workspace: &Workspace,
    tools: &Tools,
    programs: &Path,
    kernel: &Kernel,
    scope: &Scope<'_>,
) -> Result<Vec<Check>> {
    let folder = workspace.target.join("guests");
    fs::create_dir_all(&folder)?;
    let name = match scope.choice {
        Choice::Families | Choice::Usual => kernel.series.name.to_owned(),
        Choice::Long => format!("{}-long", kernel.series.name),
        Choice::Pods => format!("{}-pods", kernel.series.name),
    };
    let log = folder.join(format!("{name}.log"));
    step(&format!("what the guest prints goes to {}", log.display()));
    let mut command: Vec<String> = ["droptrace-tests", "run", "--results", "/run/droptrace/results"]
        .map(str::to_owned)
        .into();
    let mut more = Vec::new();
    if scope.choice == Choice::Pods {
        let _lock = workspace.lock_cache()?;
        more.push(Containers::get(workspace)?.archive);
    }
    if let Some(pattern) = scope.only {
        command.extend(["--full".to_owned(), "--only".to_owned(), pattern.to_owned()]);
    } else {
        match scope.choice {
            Choice::Families => command.push("--families".to_owned()),
            Choice::Usual => {}
            Choice::Long => command.push("--long".to_owned()),
            Choice::Pods => command.push("--pods".to_owned()),
        }
    }
    let start = Instant::now();
    let outcome = Guest {
        kernel,
        tools,
        init: programs.join("droptrace-init"),
        more,
        files: build::files_for_guests(programs),
        command,
        cpus: 2,
        memory: scope.choice.memory(),
        icount: false,
        log: Some(File::create(&log).with_context(|| format!("cannot write {}", log.display()))?),
        limit: GUEST_LIMIT,
    }
    .run()?;
    fs::write(folder.join(format!("{name}.jsonl")), outcome.results.join("\n"))?;
    let mut checks = results::parse_guest(&outcome.results);
    for warning in outcome.warnings {
        checks.push(Check::failed("kernel warning", warning));
    }
    let failed = checks.iter().any(|check| check.status == Status::Failed);
    if outcome.status != 0 && !failed {
        checks.push(Check::failed(
            "droptrace-tests",
            format!("exit status {} although no scenario failed", outcome.status),
        ));
    }
    step(&format!(
        "Linux {}: {} in {} s",
        kernel.release,
        results::tally(&checks),
        start.elapsed().as_secs()
    ));
    Ok(checks)
}

/// Measures, in counted time, how long the droptrace that users get takes to attach all hooks.
fn attach_time(
    workspace: &Workspace,
    tools: &Tools,
    programs: &Path,
    kernel: &Kernel,
    AttachCase { name, before }: &AttachCase,
) -> Check {
    let measured = || -> Result<Duration> {
        let log = workspace
            .target
            .join("guests")
            .join(format!("{}-attach.log", kernel.series.name));
        fs::create_dir_all(workspace.target.join("guests"))?;
        let droptrace = build::static_release(workspace)?;
        let outcome = Guest {
            kernel,
            tools,
            init: programs.join("droptrace-init"),
            more: Vec::new(),
            files: vec![(droptrace, "/usr/bin/droptrace".to_owned())],
            command: ["sh", "-c", &format!("{before} || exit\n{ATTACH_SCRIPT}")]
                .map(str::to_owned)
                .into(),
            cpus: 1,
            memory: 1024,
            icount: true,
            log: Some(File::create(&log)?),
            limit: Duration::from_mins(5),
        }
        .run()?;
        results::parse_interval(&outcome.results).with_context(|| {
            format!(
                "nothing was measured; droptrace said what is in {}",
                log.display()
            )
        })
    };
    match measured() {
        Ok(time) if time <= ATTACH_LIMIT => Check::passed(name, format!("{:.2} s", time.as_secs_f64())),
        Ok(time) => Check::failed(
            name,
            format!(
                "{:.2} s, more than {:.2} s",
                time.as_secs_f64(),
                ATTACH_LIMIT.as_secs_f64()
            ),
        ),
        Err(error) => Check::failed(name, format!("{error:#}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: &str = "7.4.1-1";
    const GOOD: &str = "7.3.4-1";

    /// Runs the decision with packages of which these pass and those are there; gives what was tested, and the report.
    fn decide(passed_before: Option<&str>, passing: &[&str], there: &[&str]) -> (bool, Vec<String>, Report) {
        let mut report = Report::default();
        let record = Record {
            passed: passed_before.map(str::to_owned),
        };
        let mut tested = Vec::new();
        let passed = newest_or_last_good(&mut report, &record, NEW, |report, version| {
            if !there.contains(&version) {
                return None;
            }
            tested.push(version.to_owned());
            report.stage(&format!("guest 7.x (package {version})"), || {
                vec![if passing.contains(&version) {
                    Check::passed("storm", "")
                } else {
                    Check::failed("storm", "totals differ")
                }]
            });
            Some(report.last().tally())
        });
        (passed, tested, report)
    }

    #[test]
    fn a_new_package_that_fails_is_reported_beside_the_last_good_one() {
        let (passed, tested, report) = decide(Some(GOOD), &[GOOD], &[NEW, GOOD]);
        assert!(!passed);
        assert_eq!(tested, [NEW, GOOD]);
        assert_eq!(report.total().to_string(), "1 passed, 1 failed, 0 skipped");
        let page = report.markdown("abc");
        for part in [
            "| guest 7.x (package 7.4.1-1) | 0.0 | 0 | 1 | 0 |",
            "| guest 7.x (package 7.3.4-1) | 0.0 | 1 | 0 | 0 |",
            "the kernel package 7.4.1-1 never passed before; the last one that did is 7.3.4-1",
        ] {
            assert!(page.contains(part), "no `{part}` in {page}");
        }
    }

    #[test]
    fn the_last_good_package_is_tested_only_beside_a_new_one_that_fails() {
        let (passed, tested, _) = decide(Some(GOOD), &[NEW, GOOD], &[NEW, GOOD]);
        assert!(passed);
        assert_eq!(tested, [NEW]);
        // One that passed before and fails now: the fault is here.
        let (passed, tested, _) = decide(Some(NEW), &[], &[NEW, GOOD]);
        assert!(!passed);
        assert_eq!(tested, [NEW]);
        let (passed, tested, _) = decide(None, &[], &[NEW, GOOD]);
        assert!(!passed);
        assert_eq!(tested, [NEW]);
    }

    #[test]
    fn a_last_good_package_that_is_gone_is_said() {
        let (passed, tested, report) = decide(Some(GOOD), &[GOOD], &[NEW]);
        assert!(!passed);
        assert_eq!(tested, [NEW]);
        assert!(
            report
                .markdown("abc")
                .contains("7.3.4-1 is no longer in the cache")
        );
    }
}
