//! The first program of a guest: mounts what Linux programs expect, runs one command, reports how it ended, powers off.
//!
//! Serial port 0 carries the command's streams; port 1, which is also `/run/droptrace/results`, carries lines of
//! results, of which the first one is this program's `{"type":"start"}` and the last one its `{"type":"exit","status":N}`; the kernel's console is
//! on port 2.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
use nix::sys::wait::{WaitStatus, waitpid};
use serde::Deserialize;

/// Where the host writes what to do.
const ORDER: &str = "/etc/droptrace/command.json";

/// Where a command writes its results.
const RESULTS: &str = "/run/droptrace/results";

/// The status of a command that could not be started, as shells give it.
const NOT_STARTED: i32 = 127;

/// File systems: type, mount point, options. One that a kernel lacks is left out with a message.
const MOUNTS: &[(&str, &str, &str)] = &[
    ("proc", "/proc", ""),
    ("sysfs", "/sys", ""),
    ("devtmpfs", "/dev", ""),
    ("devpts", "/dev/pts", "ptmxmode=0666"),
    ("tmpfs", "/dev/shm", ""),
    ("tmpfs", "/run", "mode=0755"),
    ("tmpfs", "/tmp", "mode=1777"),
    ("cgroup2", "/sys/fs/cgroup", ""),
    ("bpf", "/sys/fs/bpf", ""),
    ("tracefs", "/sys/kernel/tracing", ""),
    ("debugfs", "/sys/kernel/debug", ""),
];

/// What the host asks for.
#[derive(Deserialize)]
struct Order {
    /// The command and its arguments; none asks for a shell.
    command: Vec<String>,
    /// Rows and columns of the terminal that a shell is on, where the host knows them.
    terminal: Option<(u16, u16)>,
}

nix::ioctl_write_ptr_bad!(
    /// Tells a terminal its size (drivers/tty/tty_io.c).
    set_window_size,
    libc::TIOCSWINSZ,
    libc::winsize
);

fn main() {
    let status = guest().unwrap_or_else(|error| {
        eprintln!("init: {error:#}");
        NOT_STARTED
    });
    if let Err(error) = report(status) {
        eprintln!("init: cannot report the exit status: {error:#}");
    }
    nix::unistd::sync();
    let Err(error) = reboot(RebootMode::RB_POWER_OFF);
    eprintln!("init: cannot power off: {error}");
}

fn guest() -> Result<i32> {
    for (kind, target, options) in MOUNTS {
        // Some mount points are made by the file system above them.
        fs::create_dir_all(target).ok();
        if let Err(error) = mount(
            Some(*kind),
            *target,
            Some(*kind),
            MsFlags::empty(),
            Some(*options),
        ) {
            eprintln!("init: no {kind} at {target}: {error}");
        }
    }
    fs::create_dir_all("/run/droptrace").context("cannot make /run/droptrace")?;
    fs::create_dir_all("/run/netns").context("cannot make /run/netns")?;
    std::os::unix::fs::symlink("/dev/ttyS1", RESULTS).with_context(|| format!("cannot link {RESULTS}"))?;
    nix::unistd::sethostname("guest").context("cannot set the host name")?;

    let order = fs::read(ORDER).with_context(|| format!("cannot read {ORDER}"))?;
    let order: Order = serde_json::from_slice(&order).with_context(|| format!("{ORDER} is not an order"))?;
    let interactive = order.command.is_empty();
    let command = if interactive {
        // A shell with job control wants a session of its own on the terminal.
        ["setsid", "-c", "bash"].map(str::to_owned).into()
    } else {
        order.command
    };

    let streams = serial("/dev/ttyS0", !interactive)?;
    if let Some((rows, columns)) = order.terminal {
        let size = libc::winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: the descriptor is open, and the kernel only reads `size`, which outlives the call.
        unsafe { set_window_size(streams.as_raw_fd(), &raw const size) }
            .context("cannot set the size of the terminal")?;
    }
    // Kept open so that the port keeps its mode while the command opens and closes it.
    let results = serial("/dev/ttyS1", true)?;
    writeln!(&mut &results, "{{\"type\":\"start\"}}")?;
    bring_up_loopback();
    run(&command, &streams)
}

/// Opens a serial port; a raw one carries bytes as they are.
fn serial(path: &str, raw: bool) -> Result<File> {
    let port = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .with_context(|| format!("cannot open {path}"))?;
    if raw {
        let mut mode = tcgetattr(&port).with_context(|| format!("cannot ask {path}"))?;
        cfmakeraw(&mut mode);
        tcsetattr(&port, SetArg::TCSANOW, &mode).with_context(|| format!("cannot set {path}"))?;
    }
    Ok(port)
}

fn bring_up_loopback() {
    let up = Command::new("/sbin/ip")
        .args(["link", "set", "lo", "up"])
        .status();
    if !up.is_ok_and(|status| status.success()) {
        eprintln!("init: cannot bring up the loopback device");
    }
}

/// Runs the command and reaps every orphan until it ends.
fn run(command: &[String], streams: &File) -> Result<i32> {
    let (program, arguments) = command.split_first().context("an empty command")?;
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let mut prepared = Command::new(program);
    prepared
        .args(arguments)
        .env_clear()
        .env("PATH", path)
        .env("HOME", "/root")
        .env("TERM", "linux")
        .env("RUST_BACKTRACE", "1")
        .current_dir("/root")
        .stdin(Stdio::from(streams.try_clone()?))
        .stdout(Stdio::from(streams.try_clone()?))
        .stderr(Stdio::from(streams.try_clone()?));
    let child = match prepared.spawn() {
        Ok(child) => child,
        Err(error) => {
            writeln!(&mut &*streams, "init: cannot start {program}: {error}")?;
            return Ok(NOT_STARTED);
        }
    };
    let child = nix::unistd::Pid::from_raw(child.id().cast_signed());
    loop {
        match waitpid(None, None).context("cannot wait for the command")? {
            WaitStatus::Exited(pid, status) if pid == child => return Ok(status),
            WaitStatus::Signaled(pid, signal, _) if pid == child => {
                return Ok(128 + signal as i32);
            }
            _ => {}
        }
    }
}

fn report(status: i32) -> Result<()> {
    let mut port = OpenOptions::new().write(true).open("/dev/ttyS1")?;
    writeln!(port, "{{\"type\":\"exit\",\"status\":{status}}}")?;
    nix::sys::termios::tcdrain(&port)?;
    Ok(())
}
