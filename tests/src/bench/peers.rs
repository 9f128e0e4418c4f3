//! Other tracers, as Debian packages them, doing the same as droptrace in the same boot.

use std::{
    fs::{self, File},
    io::{self, Write},
    net::{Ipv4Addr, UdpSocket},
    os::fd::OwnedFd,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use nix::{
    mount::{MsFlags, mount},
    pty::openpty,
    sys::signal::Signal,
};

use super::{
    load::CLOSED,
    process::{Process, Quiet},
};
use crate::{Result, netns::modprobe};

/// Where `cargo xtask bench` puts them, with libraries of their own.
const ROOT: &str = "/peers";
/// Where one writes.
const OUTPUT: &str = "/tmp/bench-peer.txt";
/// How long one may take from its start to its first output, and from the signal to its end.
const LIMIT: Duration = Duration::from_mins(3);
/// What is looked at, and shown, of the output of one that starts or failed.
const SHOWN: usize = 500;

/// Another tracer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    /// What it is called in the figures.
    pub(super) name: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
    /// The same such that something is written as soon as a drop was seen.
    at_once: &'static [&'static str],
    /// What is typed once it runs.
    input: &'static str,
    /// What it writes once, or just before, it is attached.
    attached: &'static str,
    quiet: Quiet,
    /// What is typed after SIGINT to end it; empty: that ends it.
    last_input: &'static str,
    /// It is on a terminal: elsewhere it holds back what it writes.
    terminal: bool,
    /// Drops that a line of its output tells.
    told: fn(&str) -> Option<u64>,
}

/// All that are measured.
pub(super) const PEERS: &[Peer] = &[
    Peer {
        name: "bpftrace, count per reason",
        program: "bpftrace",
        arguments: &["-e", "tracepoint:skb:kfree_skb { @[args->reason] = count(); }"],
        at_once: &[
            "-e",
            "tracepoint:skb:kfree_skb { @[args->reason] = count(); } interval:ms:10 { print(@); }",
        ],
        input: "",
        attached: "Attach",
        quiet: Quiet::Idle,
        last_input: "",
        terminal: false,
        told: of_map,
    },
    Peer {
        name: "bpftrace, printf per drop",
        program: "bpftrace",
        arguments: PRINTF,
        at_once: PRINTF,
        input: "",
        attached: "Attach",
        quiet: Quiet::Idle,
        last_input: "",
        terminal: false,
        told: |line| line.starts_with("drop ").then_some(1),
    },
    Peer {
        name: "pwru, drop function only",
        program: "pwru",
        arguments: DROP_FUNCTION,
        at_once: DROP_FUNCTION,
        input: "",
        attached: "Listening for events",
        quiet: Quiet::Output(OUTPUT),
        last_input: "",
        terminal: false,
        told: |line| line.starts_with("0x").then_some(1),
    },
    Peer {
        name: "dropwatch",
        program: "dropwatch",
        arguments: &["-l", "kas"],
        at_once: &["-l", "kas"],
        input: "start\n",
        attached: "Kernel monitoring activated",
        quiet: Quiet::Idle,
        last_input: "exit\n",
        terminal: true,
        told: of_place,
    },
];

const PRINTF: &[&str] = &[
    "-e",
    r#"tracepoint:skb:kfree_skb { printf("drop %d %s\n", args->reason, ksym(args->location)); }"#,
];

/// The function of each kernel through which a packet is freed as dropped (net/core/skbuff.c): `kfree_skb_reason` from 5.17
/// on, `sk_skb_reason_drop` from 6.11 on.
const DROP_FUNCTION: &[&str] = &["--filter-func", "kfree_skb_reason|sk_skb_reason_drop"];

/// Reads `@[72]: 1000`, as bpftrace prints a map of counts.
fn of_map(line: &str) -> Option<u64> {
    line.strip_prefix("@[")?.rsplit_once("]: ")?.1.trim().parse().ok()
}

/// Reads `5 drops at __udp4_lib_rcv+235 (0xffffffffa670b135) [software]`.
fn of_place(line: &str) -> Option<u64> {
    line.split_once(" drops at ")?.0.trim().parse().ok()
}

/// What one told from its start to its end.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) drops: u64,
    pub(super) after_signal: Duration,
}

/// A running peer.
#[derive(Debug)]
pub(super) struct Running {
    peer: Peer,
    pub(super) process: Process,
    /// Held open: the end of its input is its end.
    input: File,
}

/// Makes the place where they run.
///
/// # Errors
/// They are not in this guest.
pub(super) fn prepare() -> Result<()> {
    ensure!(
        Path::new(ROOT).join("usr").is_dir(),
        "no other tracers in {ROOT}: `cargo xtask bench` puts them there"
    );
    for folder in ["proc", "sys", "dev", "tmp"] {
        let inside = Path::new(ROOT).join(folder);
        if inside.is_dir() {
            continue;
        }
        fs::create_dir_all(&inside)?;
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(
            Some(&Path::new("/").join(folder)),
            &inside,
            None::<&str>,
            flags,
            None::<&str>,
        )
        .with_context(|| format!("cannot bind /{folder} to {}", inside.display()))?;
    }
    // For dropwatch, which asks for it itself where there is a modprobe.
    modprobe("drop_monitor")
}

impl Peer {
    fn spawn(self, arguments: &[&str]) -> Result<Running> {
        let output = File::create(OUTPUT).with_context(|| format!("cannot write {OUTPUT}"))?;
        let mut command = Command::new("chroot");
        command.args([ROOT, self.program]).args(arguments);
        let terminal = self.terminal.then(|| openpty(None, None)).transpose()?;
        if let Some(pty) = &terminal {
            command.stdin(pty.slave.try_clone()?);
            command.stdout(pty.slave.try_clone()?);
            command.stderr(pty.slave.try_clone()?);
        } else {
            command.stdin(Stdio::piped());
            command.stdout(output.try_clone()?);
            command.stderr(output.try_clone()?);
        }
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {}", self.name))?;
        // Its own ends of a terminal are the only ones that must stay open.
        drop(command);
        let mut input = match (child.stdin.take(), terminal) {
            (Some(pipe), _) => File::from(OwnedFd::from(pipe)),
            (None, Some(pty)) => {
                let mut screen = File::from(pty.master.try_clone()?);
                let mut output = output;
                // Ends, by an error, with the program.
                thread::spawn(move || io::copy(&mut screen, &mut output));
                File::from(pty.master)
            }
            (None, None) => bail!("no input"),
        };
        input.write_all(self.input.as_bytes())?;
        Ok(Running {
            peer: self,
            process: Process {
                name: self.name,
                child,
                quiet: self.quiet,
            },
            input,
        })
    }

    /// Starts it; it is attached when this returns: the first drop is told.
    ///
    /// # Errors
    /// It ends, or tells no drop.
    pub(super) fn start(self) -> Result<Running> {
        let mut running = self.spawn(self.arguments)?;
        running.attached()?;
        Ok(running)
    }

    /// From its start to the first drop in its output, with one packet to a closed port every few milliseconds.
    ///
    /// # Errors
    /// It ends, or tells no drop.
    pub(super) fn first_drop(self, every: Duration) -> Result<(Duration, Duration)> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let started = Instant::now();
        let mut running = self.spawn(self.at_once)?;
        while told(self)? == 0 {
            running.alive()?;
            ensure!(
                started.elapsed() < LIMIT,
                "no drop told within {LIMIT:?}: {}",
                output()?
            );
            socket.send_to(b"closed", (Ipv4Addr::LOCALHOST, CLOSED))?;
            thread::sleep(every);
        }
        let first = started.elapsed();
        Ok((first, running.stop()?.after_signal))
    }
}

impl Running {
    /// Waits until it says that it is attached, and does nothing for a while.
    fn attached(&mut self) -> Result<()> {
        let until = Instant::now() + LIMIT;
        while !output()?.contains(self.peer.attached) {
            self.alive()?;
            ensure!(Instant::now() < until, "it is not attached within {LIMIT:?}");
            thread::sleep(Duration::from_millis(50));
        }
        self.process.rest()?;
        self.alive()
    }

    fn alive(&mut self) -> Result<()> {
        if let Some(status) = self.process.child.try_wait()? {
            bail!("it ended with {status}: {}", output()?);
        }
        Ok(())
    }

    /// Ends it, and reads what it told.
    ///
    /// # Errors
    /// It ended before, or does not end.
    pub(super) fn stop(mut self) -> Result<Told> {
        self.process.rest()?;
        self.alive()?;
        let asked = Instant::now();
        self.process.signal(Signal::SIGINT)?;
        if !self.peer.last_input.is_empty() {
            // By then it is back at its prompt.
            thread::sleep(Duration::from_secs(1));
            self.input.write_all(self.peer.last_input.as_bytes())?;
        }
        while self.process.child.try_wait()?.is_none() {
            ensure!(asked.elapsed() < LIMIT, "it does not end within {LIMIT:?}");
            thread::sleep(Duration::from_millis(5));
        }
        let after_signal = asked.elapsed();
        // What it wrote to a terminal last is on its way to the file.
        thread::sleep(Duration::from_millis(100));
        let drops = told(self.peer)?;
        Ok(Told { drops, after_signal })
    }
}

/// Drops that its output tells so far.
fn told(peer: Peer) -> Result<u64> {
    let output = fs::read(OUTPUT)?;
    let text = String::from_utf8_lossy(&output);
    Ok(text.lines().filter_map(peer.told).sum())
}

/// The beginning of what it wrote, on one line.
fn output() -> Result<String> {
    let output = fs::read(OUTPUT)?;
    let text = String::from_utf8_lossy(&output);
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(line.chars().take(SHOWN).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_are_read() {
        assert_eq!(of_map("@[72]: 1000"), Some(1000));
        assert_eq!(of_map("@[SKB_DROP_REASON_NO_SOCKET]: 5"), Some(5));
        assert_eq!(of_map("Attaching 1 probe..."), None);
        let line = "5 drops at __udp4_lib_rcv+235 (0xffffffffa670b135) [software]";
        assert_eq!(of_place(line), Some(5));
        assert_eq!(of_place("Enabling monitoring..."), None);
    }
}
