//! Sockets by address and port, from sock_diag.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use netlink_packet_core::Parseable;
use netlink_packet_sock_diag::{
    constants::{IPPROTO_TCP, IPPROTO_UDP, TCP_LISTEN},
    inet::{ExtensionFlags, InetRequest, InetResponseHeader, SocketId, StateFlags, Timer},
};

use super::netlink::{Message, Netlink, attributes, family, word};
use crate::diagnose::{Packet, SocketMemory};

/// `SOCK_DIAG_BY_FAMILY` (`include/uapi/linux/sock_diag.h`).
const BY_FAMILY: u16 = 20;
/// `INET_DIAG_SKV6ONLY` (`include/uapi/linux/inet_diag.h`).
const V6ONLY: u16 = 11;
/// `INET_DIAG_SKMEMINFO` (`include/uapi/linux/inet_diag.h`): `SK_MEMINFO_VARS` words (`include/uapi/linux/sock_diag.h`).
const SKMEMINFO: u16 = 7;
/// `INET_DIAG_CGROUP_ID`, which is told unasked.
const CGROUP_ID: u16 = 21;
/// `sizeof(struct inet_diag_msg)`.
const DIAG_MSG: usize = 72;
/// Offset of `idiag_ext` in `struct inet_diag_req_v2`.
const EXTENSIONS: usize = 2;
/// `INET_DIAG_NOCOOKIE`.
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// A listening TCP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listening {
    pub(super) address: SocketAddr,
    /// Device that it is bound to, 0 for none.
    pub(super) ifindex: u32,
    /// Takes IPv6 only.
    pub(super) v6only: bool,
    /// Connections that wait for accept().
    pub(super) queue_length: u32,
    /// `sk_max_ack_backlog`.
    pub(super) queue_limit: u32,
    pub(super) inode: u64,
}

/// Tries whether the kernel lists TCP sockets, without listing any; loads `tcp_diag` where need be.
///
/// # Errors
/// The kernel has no `tcp_diag`, or did not answer.
pub(super) fn try_listing(diag: &mut Netlink) -> io::Result<()> {
    let id = SocketId::new_v4();
    let family = family(id.source_address);
    diag.dump(BY_FAMILY, &request(family, IPPROTO_TCP, StateFlags::empty(), id))
        .map(|_| ())
}

/// Whether sock_diag lists UDP sockets without loading a module.
pub(super) fn lists_udp() -> bool {
    std::path::Path::new("/sys/module/udp_diag").exists()
}

/// The listeners on a port, of both families; port 0 means all.
///
/// # Errors
/// The kernel has no `tcp_diag`, or did not answer.
pub(super) fn listeners(diag: &mut Netlink, port: u16) -> io::Result<Vec<Listening>> {
    let mut found = Vec::new();
    for mut id in [SocketId::new_v4(), SocketId::new_v6()] {
        id.source_port = port;
        for message in dump(diag, id, StateFlags::LISTEN)? {
            found.extend(
                listening(&message).filter(|listening| port == 0 || listening.address.port() == port),
            );
        }
    }
    Ok(found)
}

fn listening(message: &Message) -> Option<Listening> {
    let header = InetResponseHeader::parse(&message.body).ok()?;
    (header.state == TCP_LISTEN).then(|| Listening {
        address: SocketAddr::new(header.socket_id.source_address, header.socket_id.source_port),
        ifindex: header.socket_id.interface_id,
        v6only: attributes(&message.body, DIAG_MSG)
            .any(|(attribute, value)| attribute == V6ONLY && value.first() == Some(&1)),
        queue_length: header.recv_queue,
        queue_limit: header.send_queue,
        inode: u64::from(header.inode),
    })
}

/// The listener that the kernel chooses for a packet to `to` on device `ifindex`: one bound to the address before one
/// bound to any, then one bound to the device, then one of the packet's own family
/// (`inet_lookup_listener`/`compute_score`, `net/ipv4/inet_hashtables.c`; `inet6_lookup_listener`, 5.10 - 7.3).
/// `inode`, when the kernel told it, decides among those that share address and port.
pub(super) fn choose(
    listeners: &[Listening],
    to: IpAddr,
    ifindex: u32,
    inode: Option<u64>,
) -> Option<&Listening> {
    if let Some(listening) = inode.and_then(|inode| listeners.iter().find(|each| each.inode == inode)) {
        return Some(listening);
    }
    listeners
        .iter()
        .filter_map(|each| score(each, to, ifindex).map(|score| (score, each)))
        // The first of equals, as the kernel keeps the first with the best score.
        .reduce(|best, next| if next.0 > best.0 { next } else { best })
        .map(|(_, listening)| listening)
}

fn score(listening: &Listening, to: IpAddr, ifindex: u32) -> Option<u8> {
    let bound = listening.address.ip();
    let to = to.to_canonical();
    if bound.is_ipv4() && !to.is_ipv4() || bound.is_ipv6() && to.is_ipv4() && listening.v6only {
        return None;
    }
    let exact = bound.to_canonical() == to;
    if !exact && !bound.is_unspecified() || listening.ifindex != 0 && listening.ifindex != ifindex {
        return None;
    }
    Some(
        u8::from(exact) << 2
            | u8::from(listening.ifindex != 0) << 1
            | u8::from(bound.is_ipv4() == to.is_ipv4()),
    )
}

/// How many listeners have this one's address, port and device: SO_REUSEPORT makes more than one.
/// And how many of those have more in their queue than its limit (`sk_acceptq_is_full`, `include/net/sock.h`).
pub(super) fn sharing(listeners: &[Listening], chosen: &Listening) -> (u32, u32) {
    let alike = || {
        listeners
            .iter()
            .filter(|each| each.address == chosen.address && each.ifindex == chosen.ifindex)
    };
    let full = alike().filter(|each| each.queue_length > each.queue_limit);
    (alike().count() as u32, full.count() as u32)
}

/// A socket that a packet is for or from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Local {
    pub(super) inode: u64,
    pub(super) memory: SocketMemory,
    /// Number of its cgroup.
    pub(super) cgroup: Option<u64>,
}

/// The socket that a packet from `remote` to `local` is for, in the kernel's own lookup; `None` where there
/// is no such socket, or one that no process holds any more (TIME_WAIT).
///
/// # Errors
/// The kernel has no `tcp_diag` or `udp_diag`, or did not answer; or the protocol has no such sockets.
pub(super) fn lookup(
    diag: &mut Netlink,
    protocol: u8,
    local: SocketAddr,
    remote: SocketAddr,
    ifindex: u32,
) -> io::Result<Option<Local>> {
    let (from, to) = match protocol {
        IPPROTO_TCP => (local, remote),
        // "src and dst are swapped for historical reasons" (`udp_dump_one`, `net/ipv4/udp_diag.c`, 5.10 - 7.3).
        IPPROTO_UDP => (remote, local),
        _ => {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "packets of this protocol belong to no socket that can be looked up",
            ));
        }
    };
    let id = SocketId {
        source_port: from.port(),
        destination_port: to.port(),
        source_address: from.ip(),
        destination_address: to.ip(),
        interface_id: ifindex,
        cookie: NO_COOKIE,
    };
    let mut request = request(family(local.ip()), protocol, StateFlags::all(), id);
    request[EXTENSIONS] = ExtensionFlags::SKMEMINFO.bits();
    match diag.ask(BY_FAMILY, &request) {
        Ok(message) => {
            let header = InetResponseHeader::parse(&message.body)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
            let inode = u64::from(header.inode);
            let of_packet = inode != 0 && header.socket_id.source_port == local.port();
            Ok(of_packet.then(|| Local {
                inode,
                memory: memory(&message.body),
                cgroup: attributes(&message.body, DIAG_MSG)
                    .find(|(attribute, _)| *attribute == CGROUP_ID)
                    .and_then(|(_, value)| Some(u64::from_ne_bytes(value.try_into().ok()?))),
            }))
        }
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What a socket's memory information says (`sk_get_meminfo`, `net/core/sock.c`, 5.10 - 7.3).
fn memory(body: &[u8]) -> SocketMemory {
    let information = attributes(body, DIAG_MSG).find(|(attribute, _)| *attribute == SKMEMINFO);
    let number = |index: usize| {
        information
            .and_then(|(_, value)| word(value, index * 4))
            .map(u64::from)
    };
    SocketMemory {
        queued: number(0),
        receive_buffer: number(1),
        send_buffer: number(3),
        backlog: number(7),
        drops: number(8),
    }
}

/// A socket that waits for the answer to its SYN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Connecting {
    /// Names the socket for its whole life.
    pub(super) cookie: u64,
    pub(super) local: IpAddr,
    pub(super) remote: SocketAddr,
    /// SYNs sent again so far.
    pub(super) retransmissions: u8,
}

/// The sockets in SYN_SENT.
///
/// # Errors
/// See [`listeners`].
pub(super) fn connecting(diag: &mut Netlink) -> io::Result<Vec<Connecting>> {
    let mut found = Vec::new();
    for id in [SocketId::new_v4(), SocketId::new_v6()] {
        for message in dump(diag, id, StateFlags::SYN_SENT)? {
            let Ok(header) = InetResponseHeader::parse(&message.body) else {
                continue;
            };
            let retransmissions = match header.timer {
                Some(Timer::Retransmit(_, count)) => count,
                _ => 0,
            };
            let id = header.socket_id;
            found.push(Connecting {
                cookie: u64::from_ne_bytes(id.cookie),
                local: id.source_address,
                remote: SocketAddr::new(id.destination_address, id.destination_port),
                retransmissions,
            });
        }
    }
    Ok(found)
}

/// The local end of each handshake that waits for its last ACK.
///
/// # Errors
/// See [`listeners`].
pub(super) fn requests(diag: &mut Netlink) -> io::Result<Vec<SocketAddr>> {
    let mut found = Vec::new();
    for id in [SocketId::new_v4(), SocketId::new_v6()] {
        let answers = dump(diag, id, StateFlags::SYN_RECV)?;
        let headers = answers
            .iter()
            .filter_map(|message| InetResponseHeader::parse(&message.body).ok());
        found
            .extend(headers.map(|header| {
                SocketAddr::new(header.socket_id.source_address, header.socket_id.source_port)
            }));
    }
    Ok(found)
}

fn dump(diag: &mut Netlink, id: SocketId, states: StateFlags) -> io::Result<Vec<Message>> {
    let family = family(id.source_address);
    diag.dump(BY_FAMILY, &request(family, IPPROTO_TCP, states, id))
        .map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel lists no TCP sockets (module tcp_diag is missing)",
            ),
            _ => error,
        })
}

/// `struct inet_diag_req_v2`.
fn request(family: u8, protocol: u8, states: StateFlags, id: SocketId) -> Vec<u8> {
    use netlink_packet_core::Emitable;
    let request = InetRequest {
        family,
        protocol,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id: id,
    };
    let mut body = vec![0; request.buffer_len()];
    request.emit(&mut body);
    body
}

/// A packet as raw sockets see it, whose protocol stands in the place of the port; one with ports stays as it is.
pub(super) fn as_raw(mut packet: Packet) -> Packet {
    if let (None, Some(protocol)) = (packet.dport, packet.protocol) {
        (packet.sport, packet.dport) = (Some(0), Some(protocol.into()));
    }
    packet
}

/// Source and destination of a packet as the host at `local` sees them: (local, remote).
pub(super) fn ends(
    source: SocketAddr,
    destination: SocketAddr,
    source_is_local: bool,
    destination_is_local: bool,
    outgoing: bool,
) -> Option<(SocketAddr, SocketAddr)> {
    match (source_is_local, destination_is_local) {
        (true, true) if outgoing => Some((source, destination)),
        (_, true) => Some((destination, source)),
        (true, false) => Some((source, destination)),
        (false, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(address: &str, inode: u64) -> Listening {
        Listening {
            address: address.parse().unwrap(),
            ifindex: 0,
            v6only: false,
            queue_length: 0,
            queue_limit: 128,
            inode,
        }
    }

    fn chosen(listeners: &[Listening], to: &str, ifindex: u32) -> Option<u64> {
        choose(listeners, to.parse().unwrap(), ifindex, None).map(|each| each.inode)
    }

    #[test]
    fn the_address_counts_more_than_the_device_and_that_more_than_the_family() {
        let listeners = [
            on("[::]:80", 1),
            on("0.0.0.0:80", 2),
            Listening {
                ifindex: 3,
                ..on("[::]:80", 3)
            },
            on("192.0.2.1:80", 4),
        ];
        assert_eq!(chosen(&listeners, "192.0.2.1", 3), Some(4));
        assert_eq!(chosen(&listeners, "192.0.2.2", 3), Some(3));
        assert_eq!(chosen(&listeners, "192.0.2.2", 2), Some(2));
        assert_eq!(chosen(&listeners, "2001:db8::1", 2), Some(1));
        assert_eq!(chosen(&listeners[..1], "192.0.2.2", 2), Some(1));
        assert_eq!(chosen(&listeners[3..], "192.0.2.2", 2), None);
        assert_eq!(chosen(&listeners[1..2], "2001:db8::1", 2), None);
    }

    #[test]
    fn v6only_takes_no_v4() {
        let only = Listening {
            v6only: true,
            ..on("[::]:80", 1)
        };
        assert_eq!(chosen(std::slice::from_ref(&only), "192.0.2.1", 0), None);
        assert_eq!(chosen(&[only], "2001:db8::1", 0), Some(1));
        assert_eq!(chosen(&[on("[::ffff:192.0.2.1]:80", 5)], "192.0.2.1", 0), Some(5));
    }

    #[test]
    fn the_kernels_inode_decides_among_equals() {
        let listeners = [on("0.0.0.0:80", 1), on("0.0.0.0:80", 2), on("[::]:80", 3)];
        assert_eq!(chosen(&listeners, "192.0.2.1", 0), Some(1));
        let two = choose(&listeners, "192.0.2.1".parse().unwrap(), 0, Some(2)).unwrap();
        assert_eq!(two.inode, 2);
        assert_eq!(sharing(&listeners, two), (2, 0));
        let full = Listening {
            queue_length: 129,
            ..on("0.0.0.0:80", 2)
        };
        assert_eq!(sharing(&[listeners[0].clone(), full], two), (2, 1));
    }

    #[test]
    fn the_local_end_of_a_packet_is_found() {
        let a: SocketAddr = "192.0.2.1:1000".parse().unwrap();
        let b: SocketAddr = "192.0.2.2:80".parse().unwrap();
        assert_eq!(ends(a, b, false, true, false), Some((b, a)));
        assert_eq!(ends(a, b, true, false, true), Some((a, b)));
        assert_eq!(ends(a, b, true, true, true), Some((a, b)));
        assert_eq!(ends(a, b, true, true, false), Some((b, a)));
        assert_eq!(ends(a, b, false, false, false), None);
    }
}
