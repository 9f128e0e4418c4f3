//! Netlink, as far as context needs it: requests with their answers, and a
//! subscription. Only the attributes that are wanted are read, by number, so
//! that what a later kernel adds or reshapes does no harm.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NLMSG_ALIGNTO, NetlinkBuffer, NlasIterator};
use netlink_sys::{Socket, SocketAddr};
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::{TimeVal, TimeValLike},
};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// The dumped table changed meanwhile (`include/uapi/linux/netlink.h`).
const NLM_F_DUMP_INTR: u16 = 0x10;
const HEADER: usize = 16;
/// How often a dump that was interrupted by a change is tried.
const ATTEMPTS: u32 = 4;
/// The kernel answers at once; a longer wait would be a fault here.
const PATIENCE_MS: i64 = 500;

/// One message of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// Type, such as `RTM_NEWROUTE`.
    pub(super) kind: u16,
    /// What follows the netlink header.
    pub(super) body: Vec<u8>,
}

/// A netlink socket; it stays in the netns in which it was opened.
pub(super) struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    /// Opens a socket for requests in the netns of the calling thread.
    pub(super) fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Without strict checks the kernel ignores the filter of a dump (4.20 and later have them).
        let _ = socket.set_netlink_get_strict_chk(true);
        let netlink = Self { socket, sequence: 0 };
        setsockopt(
            &netlink.as_fd(),
            sockopt::ReceiveTimeout,
            &TimeVal::milliseconds(PATIENCE_MS),
        )?;
        Ok(netlink)
    }

    /// Opens a socket that hears these groups (a mask of `RTMGRP_…`) and never blocks.
    pub(super) fn subscribe(protocol: isize, groups: u32) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind(&SocketAddr::new(0, groups))?;
        socket.set_non_blocking(true)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Asks for a table.
    ///
    /// # Errors
    /// What the kernel answered, `WouldBlock` when it did not, `Interrupted` when the table never stood still.
    pub(super) fn dump(&mut self, kind: u16, body: &[u8]) -> io::Result<Vec<Message>> {
        for _ in 0..ATTEMPTS {
            self.send(kind, NLM_F_DUMP, body)?;
            let (messages, interrupted) = self.answer(true)?;
            if !interrupted {
                return Ok(messages);
            }
        }
        Err(io::Error::new(
            io::ErrorKind::Interrupted,
            "the table changed during every dump",
        ))
    }

    /// Asks for one thing.
    ///
    /// # Errors
    /// See [`Self::dump`].
    pub(super) fn ask(&mut self, kind: u16, body: &[u8]) -> io::Result<Message> {
        self.send(kind, 0, body)?;
        let (messages, _) = self.answer(false)?;
        messages
            .into_iter()
            .next()
            .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
    }

    /// What the subscription heard, empty when nothing is left.
    ///
    /// # Errors
    /// `ENOBUFS` when messages were lost: the tables must be asked for anew.
    pub(super) fn heard(&self) -> io::Result<Vec<Message>> {
        match self.socket.recv_from_full() {
            Ok((bytes, _)) => Ok(split(&bytes)
                .map(|part| Message {
                    kind: part.message_type(),
                    body: part.payload().to_vec(),
                })
                .collect()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    fn send(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut request = Vec::with_capacity(HEADER + body.len());
        request.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
        request.extend_from_slice(&kind.to_ne_bytes());
        request.extend_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
        request.extend_from_slice(&self.sequence.to_ne_bytes());
        request.extend_from_slice(&[0; 4]);
        request.extend_from_slice(body);
        self.socket.send(&request, 0).map(|_| ())
    }

    /// Reads until the answer to the last request is complete; left-overs of earlier ones are skipped.
    fn answer(&mut self, dump: bool) -> io::Result<(Vec<Message>, bool)> {
        let mut messages = Vec::new();
        let mut interrupted = false;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            for part in split(&bytes).filter(|part| part.sequence_number() == self.sequence) {
                interrupted |= part.flags() & NLM_F_DUMP_INTR != 0;
                match part.message_type() {
                    NLMSG_DONE => return Ok((messages, interrupted)),
                    NLMSG_ERROR => {
                        let code = word(part.payload(), 0).map_or(0, |word| word as i32);
                        return if code == 0 {
                            Ok((messages, interrupted))
                        } else {
                            Err(io::Error::from_raw_os_error(-code))
                        };
                    }
                    kind => messages.push(Message {
                        kind,
                        body: part.payload().to_vec(),
                    }),
                }
            }
            if !dump && !messages.is_empty() {
                return Ok((messages, interrupted));
            }
        }
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the socket, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.socket.as_raw_fd()) }
    }
}

impl AsRawFd for Netlink {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// The messages of one datagram.
fn split(bytes: &[u8]) -> impl Iterator<Item = NetlinkBuffer<&[u8]>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(rest).ok()?;
        let length = (message.length() as usize).next_multiple_of(usize::from(NLMSG_ALIGNTO));
        rest = rest.get(length..).unwrap_or_default();
        Some(message)
    })
}

/// The attributes (number, value) behind a fixed head of `head` bytes; ends at the first malformed one.
pub(super) fn attributes(body: &[u8], head: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let bytes = body.get(head..).unwrap_or_default();
    NlasIterator::new(bytes).map_while(Result::ok).map(|attribute| {
        let (kind, length) = (attribute.kind(), attribute.value_length());
        // `value()` borrows the buffer object; the bytes themselves live as long as `body`.
        (kind, &attribute.into_inner()[4..4 + length])
    })
}

/// Appends an attribute.
pub(super) fn put(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    body.extend_from_slice(&kind.to_ne_bytes());
    body.extend_from_slice(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// Number of four bytes at `at`, native order.
pub(super) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Number of two bytes at `at`, native order.
pub(super) fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Number of two bytes at `at`, network order.
pub(super) fn port(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// A text without its final zero.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The address of this family at the start of the bytes.
pub(super) fn address(family: u8, bytes: &[u8]) -> Option<IpAddr> {
    if i32::from(family) == libc::AF_INET {
        let octets: [u8; 4] = bytes.get(..4)?.try_into().ok()?;
        Some(Ipv4Addr::from(octets).into())
    } else {
        let octets: [u8; 16] = bytes.get(..16)?.try_into().ok()?;
        Some(Ipv6Addr::from(octets).into())
    }
}

/// The bytes of an address.
pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// `AF_INET` or `AF_INET6`.
pub(super) const fn family(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_round_trip_and_end_where_cut() {
        let mut body = vec![7, 7];
        put(&mut body, 3, b"eth0\0");
        // Padding counts from the start of the attributes, hence the head must be aligned for that.
        let mut aligned = vec![0; 4];
        put(&mut aligned, 3, b"eth0\0");
        put(&mut aligned, 4, &9u32.to_ne_bytes());
        let found: Vec<_> = attributes(&aligned, 4).collect();
        assert_eq!(found, [(3, &b"eth0\0"[..]), (4, &9u32.to_ne_bytes()[..])]);
        assert_eq!(text(found[0].1), "eth0");
        assert_eq!(attributes(&aligned[..18], 4).count(), 1);
        assert_eq!(attributes(&[], 12).count(), 0);
    }

    #[test]
    fn datagrams_split_and_stop_at_garbage() {
        let mut bytes = Vec::new();
        for kind in [16u16, 24] {
            bytes.extend_from_slice(&17u32.to_ne_bytes());
            bytes.extend_from_slice(&kind.to_ne_bytes());
            bytes.extend_from_slice(&[0; 10]);
            bytes.extend_from_slice(&[5, 0, 0, 0]);
        }
        let kinds: Vec<_> = split(&bytes).map(|part| part.message_type()).collect();
        assert_eq!(kinds, [16, 24]);
        assert_eq!(split(&bytes[..10]).count(), 0);
        assert_eq!(split(&[0; 64]).count(), 0);
    }
}
