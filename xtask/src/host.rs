//! droptrace on this machine: even a kernel with little to offer must show a UDP packet to a closed port.

use std::io::{BufRead as _, BufReader, Read as _, Seek as _};
use std::net::UdpSocket;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::results::Check;
use crate::shell;

/// What the check is called.
const NAME: &str = "a UDP packet to a closed port";

/// How long looking at what is built already, attaching and the run may take.
const LIMIT: Duration = Duration::from_mins(2);

/// The capabilities of which one is needed for loading BPF programs: `CAP_SYS_ADMIN` and `CAP_BPF`
/// (`include/uapi/linux/capability.h`).
const BPF_CAPABILITIES: u64 = (1 << 21) | (1 << 39);

/// Runs `cargo xtask run -- live --json --for 5s`, as a user would, and looks for the packet.
pub(crate) fn check() -> Check {
    if let Some(reason) = refused() {
        return Check::skipped(NAME, reason);
    }
    match watch() {
        Ok(detail) => Check::passed(NAME, detail),
        Err(error) => Check::failed(NAME, format!("{error:#}")),
    }
}

/// Why no program can load BPF here, if that is so.
fn refused() -> Option<String> {
    if !shell::is_root() {
        return Some("needs root: run `sudo -E cargo xtask test`".to_owned());
    }
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())?;
    (effective & BPF_CAPABILITIES == 0)
        .then(|| "this host refuses BPF: neither CAP_BPF nor CAP_SYS_ADMIN here".to_owned())
}

fn watch() -> Result<String> {
    let mut said = tempfile::tempfile().context("cannot make a temporary file")?;
    // This program itself, which becomes droptrace.
    let mut child = Command::new(std::env::current_exe().context("cannot find this program")?)
        .args(["run", "--", "live", "--json", "--for", "5s"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(said.try_clone()?)
        .spawn()
        .context("cannot start droptrace")?;
    let output = child.stdout.take().context("droptrace has no output")?;
    let seen = read(&lines_of(output));
    // After its last line droptrace has ended, or it is stuck.
    std::thread::sleep(Duration::from_secs(1));
    let Some(status) = child.try_wait()? else {
        child.kill().ok();
        child.wait()?;
        bail!("droptrace did not end within {} s", LIMIT.as_secs());
    };
    if !status.success() {
        let mut text = String::new();
        said.rewind()?;
        said.read_to_string(&mut text).ok();
        bail!("droptrace ended with {status}: {}", text.trim());
    }
    seen
}

/// The lines of a stream, read by a thread of its own so that waiting for one can be bounded.
fn lines_of(output: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(std::io::Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Reads records until droptrace ends; sends the packet once all hooks are attached.
fn read(lines: &Receiver<String>) -> Result<String> {
    let end = Instant::now() + LIMIT;
    let mut packet = None;
    let mut gaps = 0;
    let mut label = None;
    while let Ok(line) = lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
        let record: Value =
            serde_json::from_str(&line).with_context(|| format!("not a line of JSON: {line}"))?;
        match record["type"].as_str() {
            Some("coverage") if packet.is_none() => {
                gaps = record["gaps"].as_array().map_or(0, Vec::len);
                packet = Some(send_to_closed_port()?);
            }
            Some("drop") => {
                let ports = (record["sport"].as_u64(), record["dport"].as_u64());
                let wanted = packet.map(|(from, to)| (Some(u64::from(from)), Some(u64::from(to))));
                if record["protocol"] == "udp" && Some(ports) == wanted {
                    label = record["cause"].as_str().map(str::to_owned);
                }
            }
            _ => {}
        }
    }
    if packet.is_none() {
        bail!("droptrace never said that its hooks are attached");
    }
    let label = label.context("the packet was not shown")?;
    Ok(format!("shown as {label}; {gaps} gaps named"))
}

/// Sends one packet over the loopback device to a port on which nobody listens; returns both ports.
fn send_to_closed_port() -> Result<(u16, u16)> {
    let closed = UdpSocket::bind("127.0.0.1:0")?.local_addr()?;
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket
        .send_to(b"droptrace", closed)
        .context("cannot send a UDP packet")?;
    Ok((socket.local_addr()?.port(), closed.port()))
}
