//! A process of its own that has a socket, and does with it what a scenario wants.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, UdpSocket},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use nix::sys::signal::Signal;
use socket2::{Domain, Protocol, Socket, Type};

use crate::{Netns, Result, cgroup::Cgroup};

/// Time between datagrams that are sent one by one.
pub const PACE: Duration = Duration::from_millis(400);

/// What the process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Listens for TCP connections, and accepts none.
    Listen,
    /// The same, and uses all the CPU time that it gets.
    Spin,
    /// The same, and waits for a child so that it cannot be interrupted.
    Wait,
    /// Takes datagrams, and reads none.
    Datagrams,
    /// Sends datagrams when it is told to.
    Send,
}

/// The process; it is killed when this value goes.
#[derive(Debug)]
pub struct Actor {
    child: Child,
}

impl Actor {
    /// Starts it in a netns and, if there is one, a cgroup; on return it has its socket. `number` is the backlog, or how
    /// many datagrams it sends.
    pub fn start(
        netns: &Netns,
        cgroup: Option<&Cgroup>,
        role: Role,
        address: SocketAddr,
        number: u32,
    ) -> Result<Self> {
        let role = role.to_possible_value().context("a role has a name")?;
        let child = netns.enter(|| {
            Command::new("/proc/self/exe")
                .args(["act", role.get_name(), &address.to_string(), &number.to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .context("cannot start a process of its own")
        })?;
        let mut actor = Self { child };
        if let Some(cgroup) = cgroup {
            cgroup.set("cgroup.procs", &actor.pid().to_string())?;
        }
        actor.go()?;
        Ok(actor)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it do its next step, and waits until that is done; gives what it says.
    pub fn go(&mut self) -> Result<String> {
        let stdin = self.child.stdin.as_mut().context("its input")?;
        stdin.write_all(b"\n")?;
        stdin.flush()?;
        let stdout = self.child.stdout.as_mut().context("its output")?;
        let mut said = Vec::new();
        let mut byte = [0];
        while stdout.read(&mut byte)? == 1 && byte[0] != b'\n' {
            said.push(byte[0]);
        }
        let said = String::from_utf8_lossy(&said).into_owned();
        ensure!(!said.is_empty(), "the process ended");
        Ok(said)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.pid())?);
        nix::sys::signal::kill(pid, signal).context("cannot send a signal")
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        // One that is gone needs no more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the process itself runs.
pub fn act(role: Role, address: SocketAddr, number: u32) -> Result<()> {
    let mut lines = BufReader::new(std::io::stdin()).lines();
    let mut told = || {
        lines
            .next()
            .context("the scenario ended")?
            .map_err(anyhow::Error::from)
    };
    told()?;
    match role {
        Role::Listen | Role::Spin | Role::Wait => {
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
            if address.is_ipv6() {
                socket.set_only_v6(true)?;
            }
            socket.bind(&address.into())?;
            socket.listen(i32::try_from(number)?)?;
            println!("listening");
            match role {
                Role::Spin => loop {
                    std::hint::spin_loop();
                },
                Role::Wait => wait_for_child(),
                _ => {}
            }
            stay(socket)
        }
        Role::Datagrams => {
            let socket = UdpSocket::bind(address)?;
            println!("bound");
            stay(socket)
        }
        Role::Send => {
            let any = crate::sockets::any(address.ip());
            let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
            println!("bound");
            told()?;
            let refused = (0..number)
                .filter(|_| {
                    thread::sleep(PACE);
                    socket.send_to(b"hello", address).is_err()
                })
                .count();
            println!("{refused} refused");
            stay(socket)
        }
    }
}

/// Keeps the socket until the process is killed.
fn stay<T>(_socket: T) -> Result<()> {
    thread::sleep(Duration::from_mins(10));
    bail!("nobody ended the process")
}

/// Waits for a child that does not end, in state D: as vfork() does, but with a memory of its own.
fn wait_for_child() {
    let flags = libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: without CLONE_VM the child has its own copy of everything, like one of fork(), and only sleeps.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if pid == 0 {
        loop {
            // SAFETY: has no preconditions. Ends with its parent.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::close_range(0, u32::MAX, 0);
                libc::pause();
            }
        }
    }
}
