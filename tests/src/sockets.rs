//! Sockets inside a network namespace.

use std::{
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{Netns, Result};

/// A TCP socket that listens with this backlog and accepts nothing by itself.
pub fn listen(netns: &Netns, address: SocketAddr, backlog: i32) -> Result<Socket> {
    netns
        .enter(|| {
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
            socket.set_reuse_address(true)?;
            if address.is_ipv6() {
                socket.set_only_v6(true)?;
            }
            socket.bind(&address.into())?;
            socket.listen(backlog)?;
            Ok(socket)
        })
        .with_context(|| format!("cannot listen on {address}"))
}

/// A connection that must succeed within half a minute.
pub fn connect(netns: &Netns, from: Option<SocketAddr>, to: SocketAddr) -> Result<TcpStream> {
    netns.enter(|| connect_here(from, to))
}

/// The same where this thread is.
pub fn connect_here(from: Option<SocketAddr>, to: SocketAddr) -> Result<TcpStream> {
    let socket = new_client(from, to)?;
    socket
        .connect_timeout(&to.into(), Duration::from_secs(30))
        .with_context(|| format!("cannot connect to {to}"))?;
    Ok(socket.into())
}

/// A connection attempt that has sent its SYN and is not waited for.
pub fn start_connect(netns: &Netns, from: Option<SocketAddr>, to: SocketAddr) -> Result<Socket> {
    netns.enter(|| {
        let socket = new_client(from, to)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&to.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => return Err(error).with_context(|| format!("cannot send a SYN to {to}")),
        }
        Ok(socket)
    })
}

fn new_client(from: Option<SocketAddr>, to: SocketAddr) -> Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    if let Some(from) = from {
        socket.set_reuse_address(true)?;
        socket
            .bind(&from.into())
            .with_context(|| format!("cannot bind to {from}"))?;
    }
    Ok(socket)
}

/// A UDP socket.
pub fn udp(netns: &Netns, address: SocketAddr) -> Result<UdpSocket> {
    netns.enter(|| UdpSocket::bind(address).with_context(|| format!("cannot bind UDP to {address}")))
}

/// Accepts one connection, waiting at most half a minute.
pub fn accept(listener: &Socket) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        match listener.accept() {
            Ok((socket, _)) => {
                socket.set_nonblocking(false)?;
                return Ok(socket.into());
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                ensure!(
                    Instant::now() < until,
                    "no connection to accept within half a minute"
                );
                thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error).context("cannot accept"),
        }
    }
}

/// Connections that wait in the accept queue of the listener on this port.
///
/// `/proc/net/tcp` shows `sk_ack_backlog` as the receive queue of a listener
/// (`get_tcp4_sock`, net/ipv4/tcp_ipv4.c, 5.10 - 7.3).
pub fn accept_queue(netns: &Netns, address: SocketAddr) -> Result<u64> {
    const LISTEN: &str = "0A";
    let file = if address.is_ipv6() { "tcp6" } else { "tcp" };
    let text = netns.proc_net(file)?;
    for line in text.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, local, _, state, queues, ..] = words[..] else {
            continue;
        };
        if state == LISTEN && local.ends_with(&format!(":{:04X}", address.port())) {
            let (_, receive) = queues.split_once(':').context("a queue column without a colon")?;
            return Ok(u64::from_str_radix(receive, 16)?);
        }
    }
    bail!("nobody listens on {address}")
}

/// Waits until something holds, asking every few milliseconds, for at most half a minute.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(30);
    while !holds()? {
        ensure!(Instant::now() < until, "{what}: not within half a minute");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The any-address of the family of this one.
pub fn any(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
    }
}
