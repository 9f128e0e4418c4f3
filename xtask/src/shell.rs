//! Running other programs: what failed, with which arguments, and what it said.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// How often a long command is said to run still.
const STILL_RUNS_EVERY: Duration = Duration::from_secs(30);

/// Says on standard error what is being done now.
pub(crate) fn step(message: &str) {
    eprintln!("==> {message}");
}

/// The command line for messages, with the bare name of the program.
fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program());
    std::iter::once(program.file_name().unwrap_or(command.get_program()))
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Runs a command that shares this program's streams.
///
/// # Errors
/// When it cannot be started or ends with a status other than 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command_status(command)?;
    ended_well(command, status)
}

/// The same for a command that may be silent for minutes: says now and then that it still runs.
///
/// # Errors
/// As those of [`run`].
pub(crate) fn run_long(command: &mut Command) -> Result<()> {
    let started = Instant::now();
    let (ended, running) = mpsc::channel::<()>();
    let status = thread::scope(|scope| {
        scope.spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = running.recv_timeout(STILL_RUNS_EVERY) {
                let seconds = started.elapsed().as_secs();
                step(&format!(
                    "still at it, for {} min {:02} s",
                    seconds / 60,
                    seconds % 60
                ));
            }
        });
        let status = command_status(command);
        drop(ended);
        status
    })?;
    ended_well(command, status)
}

fn command_status(command: &mut Command) -> Result<ExitStatus> {
    command
        .status()
        .with_context(|| format!("cannot start `{}`", describe(command)))
}

fn ended_well(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("`{}` failed: {status}", describe(command));
    }
    Ok(())
}

/// Runs a command and returns its standard output.
///
/// # Errors
/// When it cannot be started or ends with a status other than 0; the error carries what it wrote.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start `{}`", describe(command)))?;
    if !output.status.success() {
        bail!(
            "`{}` failed: {}\n{}{}",
            describe(command),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("the output of `{}` is not UTF-8", describe(command)))
}

/// Finds a program in `PATH` and in the folders for system programs, which a user's `PATH` often lacks.
pub(crate) fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|candidate| candidate.is_file())
}

/// Whether this process is root.
pub(crate) fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    Path::new("/proc/self")
        .metadata()
        .is_ok_and(|metadata| metadata.uid() == 0)
}

/// A command that runs as root: through `sudo` where this process is not root.
///
/// # Errors
/// When this process is not root and there is no `sudo`.
pub(crate) fn as_root(program: impl AsRef<OsStr>) -> Result<Command> {
    if is_root() {
        return Ok(Command::new(program));
    }
    if which("sudo").is_none() {
        bail!(
            "`{}` needs root, and there is no sudo: run this command as root",
            program.as_ref().to_string_lossy()
        );
    }
    let mut command = Command::new("sudo");
    command.arg("--").arg(program);
    Ok(command)
}
