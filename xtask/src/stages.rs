//! `cargo xtask test`: formatting, lints, unit tests, a run on this host, and the guests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::build;
use crate::guest::{self, Guest, Kernel, Record, SERIES, Series, Tools};
use crate::host;
use crate::report::{Report, Stage};
use crate::results::{self, Check, Status};
use crate::shell::{self, step};
use crate::toolchain::Toolchain;
use crate::workspace::Workspace;

/// The series on which every scenario runs without being asked.
const EVERYTHING_ON: &[&str] = &["5.10", "7.x"];

/// How long all scenarios may take in one guest.
const GUEST_LIMIT: Duration = Duration::from_mins(25);

/// How long attaching all hooks may take where an instruction takes a nanosecond. 5.10 is not held to it: few of its
/// hooks can do without the symbols and with trampolines.
const ATTACH_LIMIT: Duration = Duration::from_millis(1500);

/// The series on which it is measured.
const ATTACH_ON: &[&str] = &["6.1", "6.12", "7.x"];

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
    /// All scenarios on all kernels, and write the result to docs/test-results.md
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
        report.stage("host run", || host_run(workspace));
        report.stage("release build", || release_build(workspace));
    }
    if !arguments.no_guests {
        match prepare_guests(workspace) {
            Ok((tools, programs)) => {
                for series in chosen {
                    let scope = Scope {
                        families: !arguments.full && !EVERYTHING_ON.contains(&series.name),
                        only: arguments.only.as_deref(),
                    };
                    guest_stages(&mut report, workspace, &tools, &programs, series, &scope);
                }
            }
            Err(error) => report.stage("guests", || {
                vec![Check::failed("preparation", format!("{error:#}"))]
            }),
        }
    }
    report.print();
    if arguments.full {
        let path = workspace.root.join("docs/test-results.md");
        fs::create_dir_all(workspace.root.join("docs"))?;
        fs::write(&path, report.markdown(&commit(workspace)))
            .with_context(|| format!("cannot write {}", path.display()))?;
        step(&format!("wrote {}", path.display()));
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
    match shell::run(command) {
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

fn host_run(workspace: &Workspace) -> Vec<Check> {
    match build::guest_programs(workspace, true) {
        Ok(folder) => vec![host::check(&folder.join("droptrace"))],
        Err(error) => vec![Check::failed("build", format!("{error:#}"))],
    }
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
        guest::ensure_emulator()?;
        Tools::get(workspace)?
    };
    Ok((tools, build::guest_programs(workspace, true)?))
}

/// Which scenarios a guest runs.
struct Scope<'a> {
    families: bool,
    only: Option<&'a str>,
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
            vec![attach_time(workspace, tools, programs, &kernel)]
        });
    }
    let stage = guest_stage(report, workspace, tools, programs, &kernel, scope);
    let record = series.record(workspace);
    if stage.tally().failed == 0 {
        let whole = scope.only.is_none();
        if whole && record.passed.as_ref() != Some(&kernel.version) {
            let passed = Some(kernel.version);
            if let Err(error) = series.keep_record(workspace, &Record { passed }) {
                step(&format!("cannot keep which kernel passed: {error:#}"));
            }
        }
        return;
    }
    let Some(good) = record.passed.filter(|passed| *passed != kernel.version) else {
        return;
    };
    let version = &kernel.version;
    report.note(format!(
        "the kernel package {version} never passed before; the last one that did is {good}"
    ));
    if let Some(kernel) = series.cached(workspace, &good) {
        guest_stage(report, workspace, tools, programs, &kernel, scope);
    } else {
        report.note(format!(
            "{good} is no longer in the cache, so that it could not be tried again"
        ));
    }
}

fn guest_stage<'a>(
    report: &'a mut Report,
    workspace: &Workspace,
    tools: &Tools,
    programs: &Path,
    kernel: &Kernel,
    scope: &Scope<'_>,
) -> &'a Stage {
    let name = format!("guest {} (package {})", kernel.series.name, kernel.version);
    report.stage(&name, || {
        boot(workspace, tools, programs, kernel, scope)
            .unwrap_or_else(|error| vec![Check::failed("guest", format!("{error:#}"))])
    });
    report.last()
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
    let log = folder.join(format!("{}.log", kernel.series.name));
    step(&format!("what the guest prints goes to {}", log.display()));
    let mut command: Vec<String> = ["droptrace-tests", "run", "--results", "/run/droptrace/results"]
        .map(str::to_owned)
        .into();
    command.push(if scope.families { "--families" } else { "--full" }.to_owned());
    if let Some(pattern) = scope.only {
        command.extend(["--only".to_owned(), pattern.to_owned()]);
    }
    let start = Instant::now();
    let outcome = Guest {
        kernel,
        tools,
        init: programs.join("droptrace-init"),
        files: build::files_for_guests(programs),
        command,
        cpus: 2,
        memory: 1024,
        icount: false,
        log: Some(File::create(&log).with_context(|| format!("cannot write {}", log.display()))?),
        limit: GUEST_LIMIT,
    }
    .run()?;
    fs::write(
        folder.join(format!("{}.jsonl", kernel.series.name)),
        outcome.results.join("\n"),
    )?;
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
fn attach_time(workspace: &Workspace, tools: &Tools, programs: &Path, kernel: &Kernel) -> Check {
    const NAME: &str = "all hooks attached in counted time";
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
            files: vec![(droptrace, "/usr/bin/droptrace".to_owned())],
            command: ["sh", "-c", ATTACH_SCRIPT].map(str::to_owned).into(),
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
        Ok(time) if time <= ATTACH_LIMIT => Check::passed(NAME, format!("{:.2} s", time.as_secs_f64())),
        Ok(time) => Check::failed(
            NAME,
            format!(
                "{:.2} s, more than {:.1} s",
                time.as_secs_f64(),
                ATTACH_LIMIT.as_secs_f64()
            ),
        ),
        Err(error) => Check::failed(NAME, format!("{error:#}")),
    }
}

/// The commit that is tested, for the written result.
fn commit(workspace: &Workspace) -> String {
    let git =
        |arguments: &[&str]| shell::output(Command::new("git").current_dir(&workspace.root).args(arguments));
    match (
        git(&["rev-parse", "--short=12", "HEAD"]),
        git(&["status", "--porcelain"]),
    ) {
        (Ok(commit), Ok(changes)) if changes.is_empty() => commit.trim().to_owned(),
        (Ok(commit), _) => format!("{} with uncommitted changes", commit.trim()),
        (Err(_), _) => "unknown commit".to_owned(),
    }
}
