//! Guests: an unmodified Debian kernel in an emulator, with droptrace and the tools in an initial file system.

mod archive;
mod containers;
mod emulator;
mod kernel;
mod tools;

use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

pub(crate) use archive::Archive;
pub(crate) use containers::Containers;
pub(crate) use kernel::{Kernel, Record, SERIES, Series};
pub(crate) use tools::{LEFT_OUT, Tools};

use emulator::EMULATOR;

use crate::shell::step;

/// Where the program that runs first in a guest reads what it shall do.
const COMMAND_FILE: &str = "etc/droptrace/command.json";

/// How often the host looks whether the emulator has ended.
const POLL: Duration = Duration::from_millis(50);

/// How often a guest is booted whose kernel crashes before it runs any program.
const BOOTS: u32 = 4;

/// How many lines of the kernel's console an error shows.
const CONSOLE_TAIL: usize = 40;

/// What a guest is to be.
pub(crate) struct Guest<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) tools: &'a Tools,
    /// The program that runs first in the guest.
    pub(crate) init: PathBuf,
    /// Archives of more programs, beside the tools.
    pub(crate) more: Vec<PathBuf>,
    /// Files of this machine and where they stand in the guest.
    pub(crate) files: Vec<(PathBuf, String)>,
    /// The command; none gives a shell on this terminal.
    pub(crate) command: Vec<String>,
    pub(crate) cpus: u32,
    /// Memory in MiB.
    pub(crate) memory: u32,
    /// Count instructions instead of time: 1 ns each, one CPU.
    pub(crate) icount: bool,
    /// Where what the command writes goes; none is this program's standard output.
    pub(crate) log: Option<File>,
    /// A guest that has not ended by then is stopped.
    pub(crate) limit: Duration,
}

/// What the program that runs first in a guest is told.
#[derive(Serialize)]
struct Order<'a> {
    command: &'a [String],
    /// Rows and columns of the terminal that a shell is on; a serial port does not carry them.
    terminal: Option<(u16, u16)>,
}

/// What happened in a guest that ended by itself.
pub(crate) struct Outcome {
    /// The command's exit status; 128 and the signal's number when a signal ended it.
    pub(crate) status: i32,
    /// The lines that the command wrote to `/run/droptrace/results`.
    pub(crate) results: Vec<String>,
    /// Kernel warnings seen on its console.
    pub(crate) warnings: Vec<String>,
}

/// The first line of the results: written by the program that runs first in the guest.
const START: &str = r#"{"type":"start"}"#;

/// The last line of the results: written by the program that runs first in the guest.
#[derive(Deserialize)]
struct Exit {
    #[serde(rename = "type")]
    kind: String,
    status: i32,
}

impl Guest<'_> {
    /// Boots the guest, waits for its command and returns how it ended. Where the kernel crashes before it runs any program,
    /// which emulated ones do once in a while, it is booted again, [`BOOTS`] times in all.
    ///
    /// # Errors
    /// When the emulator cannot be started, the kernel crashes, or the time limit passes; the error shows the end of
    /// the kernel's console.
    pub(crate) fn run(&self) -> Result<Outcome> {
        for _ in 1..BOOTS {
            match self.boot()? {
                Ok(outcome) => return Ok(outcome),
                Err(words) => step(&format!(
                    "the kernel crashed before it ran a program; booting again. Its last words:\n{words}"
                )),
            }
        }
        self.boot()?.or_else(|words| {
            bail!(
                "the guest's kernel crashed {BOOTS} times before it ran a program; its last words:\n{words}"
            )
        })
    }

    /// Boots once. The inner error is the end of the console of a kernel that crashed before it ran a program.
    fn boot(&self) -> Result<Result<Outcome, String>> {
        let work = tempfile::Builder::new()
            .prefix("droptrace-guest-")
            .tempdir()
            .context("cannot make a temporary folder")?;
        let initrd = work.path().join("initrd");
        let results = work.path().join("results");
        let console = work.path().join("console");
        self.write_initrd(&initrd)
            .context("cannot write the guest's initial file system")?;

        let limit = self.limit;
        let mut emulator = self.emulator(&initrd, &results, &console)?;
        let mut child = emulator
            .spawn()
            .with_context(|| format!("cannot start {EMULATOR}"))?;
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            if start.elapsed() > limit {
                child.kill().ok();
                child.wait()?;
                break None;
            }
            std::thread::sleep(POLL);
        };

        let console = String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
        let results = String::from_utf8_lossy(&fs::read(&results).unwrap_or_default()).into_owned();
        let mut lines: Vec<String> = results.lines().map(str::to_owned).collect();
        let started = lines.first().is_some_and(|line| line == START);
        if started {
            lines.remove(0);
        }
        let exit = lines.last().and_then(|line| exit_status(line));
        match (status, exit) {
            (_, Some(status)) => {
                lines.pop();
                Ok(Ok(Outcome {
                    status,
                    results: lines,
                    warnings: kernel_warnings(&console),
                }))
            }
            (Some(status), None) if status.success() && !started => Ok(Err(tail(&console))),
            (None, None) => bail!(
                "the guest did not end within {} s; its kernel's last words:\n{}",
                limit.as_secs(),
                tail(&console)
            ),
            (Some(status), None) if status.success() => bail!(
                "the guest's kernel crashed or its first program ended; its last words:\n{}",
                tail(&console)
            ),
            (Some(status), None) => bail!("{EMULATOR} failed: {status}\n{}", tail(&console)),
        }
    }

    /// Writes the tools, the kernel's modules, more programs and what belongs to this guest alone, one after the other.
    fn write_initrd(&self, path: &Path) -> Result<()> {
        let mut out = BufWriter::new(File::create(path)?);
        let modules = self.kernel.modules();
        for part in [&self.tools.archive, &modules].into_iter().chain(&self.more) {
            let mut part = File::open(part).with_context(|| format!("cannot read {}", part.display()))?;
            io::copy(&mut part, &mut out)?;
        }
        let mut archive = Archive::new(out);
        for folder in [
            "dev",
            "etc",
            "etc/droptrace",
            "proc",
            "root",
            "run",
            "sys",
            "tmp",
            "var",
        ] {
            archive.directory(folder)?;
        }
        archive.symlink("var/run", "/run")?;
        archive.symlink("var/tmp", "/tmp")?;
        archive.device("dev/console", 5, 1)?;
        archive.device("dev/null", 1, 3)?;
        archive.file("etc/hostname", 0o644, b"guest\n")?;
        archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n::1 localhost\n")?;
        archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
        archive.file("etc/group", 0o644, b"root:x:0:\n")?;
        let order = serde_json::to_vec(&Order {
            command: &self.command,
            terminal: self.command.is_empty().then(terminal_size).flatten(),
        })?;
        archive.file(COMMAND_FILE, 0o644, &order)?;
        archive.copy(&self.init, "init")?;
        for (source, target) in &self.files {
            let target = target.trim_start_matches('/');
            for (position, _) in target.match_indices('/') {
                let folder = &target[..position];
                // Making a folder that is there already changes nothing; a link such as `bin` must stay one.
                if folder.contains('/') || !matches!(folder, "bin" | "sbin" | "lib" | "lib64") {
                    archive.directory(folder)?;
                }
            }
            archive.copy(source, target)?;
        }
        archive.finish()?;
        Ok(())
    }

    /// The emulator's command line.
    ///
    /// Serial ports of the guest: 0 carries the command's streams, 1 the results, 2 the kernel's console.
    fn emulator(&self, initrd: &Path, results: &Path, console: &Path) -> Result<Command> {
        let mut command = self.tools.emulator.command();
        let mut append =
            "console=ttyS2 loglevel=5 panic=-1 oops=panic mitigations=off random.trust_cpu=on net.ifnames=0"
                .to_owned();
        command.args(["-M", "q35", "-cpu", "max", "-display", "none", "-nodefaults"]);
        command.args(["-no-reboot", "-nic", "none"]);
        if self.icount {
            command.args(["-accel", "tcg", "-icount", "shift=0,sleep=off", "-smp", "1"]);
            append.push_str(" tsc=reliable");
        } else {
            command.args(["-accel", "tcg,thread=multi", "-smp"]);
            command.arg(self.cpus.to_string());
        }
        command.arg("-m").arg(self.memory.to_string());
        command.arg("-kernel").arg(self.kernel.image());
        command.arg("-initrd").arg(initrd);
        command.args(["-append", &append]);
        let interactive = self.command.is_empty();
        // In a shell, Ctrl-C belongs to the guest; with a command it stops the guest.
        let signal = if interactive { "off" } else { "on" };
        command.arg("-chardev");
        command.arg(format!("stdio,id=streams,signal={signal}"));
        command.args(["-serial", "chardev:streams"]);
        for path in [results, console] {
            command.arg("-serial").arg(format!("file:{}", path.display()));
        }
        if !interactive {
            command.stdin(Stdio::null());
        }
        if let Some(log) = &self.log {
            let log = log.try_clone()?;
            command.stderr(log.try_clone()?);
            command.stdout(log);
        }
        Ok(command)
    }
}

/// Rows and columns of the terminal on this program's standard input, if it is one and knows.
fn terminal_size() -> Option<(u16, u16)> {
    let output = Command::new("stty")
        .arg("size")
        .stdin(Stdio::inherit())
        .output()
        .ok()?;
    parse_size(&String::from_utf8_lossy(&output.stdout))
}

/// Reads what `stty size` prints.
fn parse_size(text: &str) -> Option<(u16, u16)> {
    let (rows, columns) = text.trim().split_once(' ')?;
    let size = (rows.parse().ok()?, columns.parse().ok()?);
    (size.0 > 0 && size.1 > 0).then_some(size)
}

fn exit_status(line: &str) -> Option<i32> {
    let exit: Exit = serde_json::from_str(line).ok()?;
    (exit.kind == "exit").then_some(exit.status)
}

/// Lines in which the kernel says that something in it is wrong.
fn kernel_warnings(console: &str) -> Vec<String> {
    console
        .lines()
        .filter(|line| {
            ["WARNING: ", "BUG: ", "Oops: "]
                .iter()
                .any(|mark| line.contains(mark))
        })
        .map(str::to_owned)
        .collect()
}

fn tail(console: &str) -> String {
    let lines: Vec<_> = console.lines().collect();
    lines[lines.len().saturating_sub(CONSOLE_TAIL)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exit_line_is_an_exit() {
        assert_eq!(exit_status(r#"{"type":"exit","status":3}"#), Some(3));
        assert_eq!(exit_status(r#"{"type":"result","status":3}"#), None);
        assert_eq!(exit_status(r#"{"type":"result","status":"passed"}"#), None);
        assert_eq!(exit_status(""), None);
    }

    #[test]
    fn a_terminal_without_a_size_has_none() {
        assert_eq!(parse_size("40 120\n"), Some((40, 120)));
        assert_eq!(parse_size("0 0\n"), None);
        assert_eq!(parse_size(""), None);
    }

    #[test]
    fn kernel_warnings_are_seen() {
        let console = "[    1.0] all is well\n\
                       [    2.0] WARNING: CPU: 0 PID: 1 at net/core/skbuff.c:1 f+0x1\n\
                       [    3.0] BUG: kernel NULL pointer dereference\n";
        assert_eq!(kernel_warnings(console).len(), 2);
    }
}
