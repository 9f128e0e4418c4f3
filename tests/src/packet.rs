//! Packets made and read by hand.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, bail};
use etherparse::{IpNumber, NetSlice, PacketBuilder, SlicedPacket, TcpOptionElement, TransportSlice};

use crate::{Result, Tun};

/// TCP flag FIN.
pub const FIN: u8 = 1;
/// TCP flag SYN.
pub const SYN: u8 = 2;
/// TCP flag RST.
pub const RST: u8 = 4;
/// TCP flag PSH.
pub const PSH: u8 = 8;
/// TCP flag ACK.
pub const ACK: u8 = 16;

/// A TCP segment to be made.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Source.
    pub src: SocketAddr,
    /// Destination.
    pub dst: SocketAddr,
    /// Flags: [`SYN`] and so on.
    pub flags: u8,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledged sequence number, with [`ACK`].
    pub acknowledged: u32,
    /// Timestamp option: own value, echoed value.
    pub timestamp: Option<(u32, u32)>,
    /// Authentication option (RFC 5925), instead of all others: number of the key; its code is none of any key's.
    pub authentication: Option<u8>,
    /// Payload.
    pub data: Vec<u8>,
}

impl Segment {
    /// A SYN.
    pub fn syn(src: SocketAddr, dst: SocketAddr, sequence: u32) -> Self {
        Self {
            src,
            dst,
            flags: SYN,
            sequence,
            acknowledged: 0,
            timestamp: None,
            authentication: None,
            data: Vec::new(),
        }
    }

    /// With the authentication option, by the key of this number.
    #[must_use]
    pub fn authentication(mut self, key: u8) -> Self {
        self.authentication = Some(key);
        self
    }

    /// With the timestamp option.
    #[must_use]
    pub fn timestamp(mut self, value: u32, echo: u32) -> Self {
        self.timestamp = Some((value, echo));
        self
    }

    /// With these flags instead.
    #[must_use]
    pub fn flags(mut self, flags: u8) -> Self {
        self.flags = flags;
        self
    }

    /// With this payload.
    #[must_use]
    pub fn data(mut self, data: &[u8]) -> Self {
        self.data = data.to_vec();
        self
    }

    /// The IP packet.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut tcp = ip_builder(self.src.ip(), self.dst.ip(), HOPS)?.tcp(
            self.src.port(),
            self.dst.port(),
            self.sequence,
            64240,
        );
        let has = |flag| self.flags & flag != 0;
        if has(SYN) {
            tcp = tcp.syn();
        }
        if has(FIN) {
            tcp = tcp.fin();
        }
        if has(RST) {
            tcp = tcp.rst();
        }
        if has(PSH) {
            tcp = tcp.psh();
        }
        if has(ACK) {
            tcp = tcp.ack(self.acknowledged);
        }
        let mut options = Vec::new();
        if has(SYN) {
            options.push(TcpOptionElement::MaximumSegmentSize(1400));
        }
        if let Some((value, echo)) = self.timestamp {
            options.extend([
                TcpOptionElement::Noop,
                TcpOptionElement::Noop,
                TcpOptionElement::Timestamp(value, echo),
            ]);
        }
        let tcp = if let Some(key) = self.authentication {
            // Kind, length, number of the key, number of the next one, code of 12 bytes.
            let mut option = [0x5a; 16];
            option[..4].copy_from_slice(&[29, 16, key, key]);
            tcp.options_raw(&option)
        } else {
            tcp.options(&options)
        };
        let tcp = tcp.context("too many TCP options")?;
        let mut bytes = Vec::with_capacity(tcp.size(self.data.len()));
        tcp.write(&mut bytes, &self.data)
            .context("cannot make the segment")?;
        Ok(bytes)
    }
}

/// TTL or hop limit of a packet that is made without another.
const HOPS: u8 = 64;

fn ip_builder(
    src: IpAddr,
    dst: IpAddr,
    hops: u8,
) -> Result<etherparse::PacketBuilderStep<etherparse::IpHeaders>> {
    Ok(match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => PacketBuilder::ipv4(src.octets(), dst.octets(), hops),
        (IpAddr::V6(src), IpAddr::V6(dst)) => PacketBuilder::ipv6(src.octets(), dst.octets(), hops),
        _ => bail!("{src} and {dst} are of two families"),
    })
}

/// A UDP datagram in an IP packet.
pub fn udp(src: SocketAddr, dst: SocketAddr, data: &[u8]) -> Result<Vec<u8>> {
    udp_with_hops(src, dst, data, HOPS)
}

/// The same with this TTL or hop limit. IPv4 says `don't fragment`.
pub fn udp_with_hops(src: SocketAddr, dst: SocketAddr, data: &[u8], hops: u8) -> Result<Vec<u8>> {
    let udp = ip_builder(src.ip(), dst.ip(), hops)?.udp(src.port(), dst.port());
    let mut bytes = Vec::with_capacity(udp.size(data.len()));
    udp.write(&mut bytes, data).context("cannot make the datagram")?;
    Ok(bytes)
}

/// An ICMP echo request.
pub fn echo_request(src: IpAddr, dst: IpAddr) -> Result<Vec<u8>> {
    let builder = ip_builder(src, dst, HOPS)?;
    let mut bytes = Vec::new();
    match src {
        IpAddr::V4(_) => builder.icmpv4_echo_request(7, 1).write(&mut bytes, b"hello"),
        IpAddr::V6(_) => builder.icmpv6_echo_request(7, 1).write(&mut bytes, b"hello"),
    }
    .context("cannot make the echo request")?;
    Ok(bytes)
}

/// The first fragment of a packet: all of it, but it says that more follows. What follows the IP header must be a
/// multiple of 8 bytes.
pub fn first_fragment(packet: &[u8], id: u16) -> Result<Vec<u8>> {
    const FRAGMENT: u8 = 44;
    const MORE: u8 = 1;
    let mut bytes = packet.to_vec();
    if packet.first().is_some_and(|first| first >> 4 == 4) {
        bytes[4..6].copy_from_slice(&id.to_be_bytes());
        bytes[6..8].copy_from_slice(&[0x20, 0]);
        let (header, _) = etherparse::Ipv4Header::from_slice(&bytes).context("no IPv4 header")?;
        let checksum = header.calc_header_checksum();
        bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
    } else {
        let [high, low] = id.to_be_bytes();
        let extension = [bytes[6], 0, 0, MORE, 0, 0, high, low];
        bytes[6] = FRAGMENT;
        bytes.splice(40..40, extension);
        let length = u16::try_from(bytes.len() - 40)?;
        bytes[4..6].copy_from_slice(&length.to_be_bytes());
    }
    Ok(bytes)
}

/// An IP packet of any protocol with this payload.
pub fn raw(src: IpAddr, dst: IpAddr, protocol: u8, data: &[u8]) -> Result<Vec<u8>> {
    let builder = ip_builder(src, dst, HOPS)?;
    let mut bytes = Vec::new();
    builder
        .write(&mut bytes, IpNumber(protocol), data)
        .context("cannot make the packet")?;
    Ok(bytes)
}

/// An ICMP error about a packet that ends a pending connection: host unreachable for IPv4, port
/// unreachable for IPv6.
///
/// Those are the codes that `tcp_v4_err` (net/ipv4/tcp_ipv4.c) and `icmpv6_err_convert`
/// (net/ipv6/icmp.c) take as the end of a request, 5.10 - 7.3.
pub fn fatal_unreachable(src: IpAddr, dst: IpAddr, about: &[u8]) -> Result<Vec<u8>> {
    let quoted = &about[..about.len().min(200)];
    let builder = ip_builder(src, dst, HOPS)?;
    let mut bytes = Vec::new();
    match src {
        IpAddr::V4(_) => builder
            .icmpv4(etherparse::Icmpv4Type::DestinationUnreachable(
                etherparse::icmpv4::DestUnreachableHeader::Host,
            ))
            .write(&mut bytes, quoted),
        IpAddr::V6(_) => builder
            .icmpv6(etherparse::Icmpv6Type::DestinationUnreachable(
                etherparse::icmpv6::DestUnreachableCode::Port,
            ))
            .write(&mut bytes, quoted),
    }
    .context("cannot make the ICMP error")?;
    Ok(bytes)
}

/// An Ethernet frame around an IP packet or anything else.
pub fn frame(dst: [u8; 6], src: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(14 + payload.len());
    bytes.extend_from_slice(&dst);
    bytes.extend_from_slice(&src);
    bytes.extend_from_slice(&ethertype.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// A packet that the kernel sent.
#[derive(Clone, Debug)]
pub struct Packet {
    /// The bytes from the IP header on.
    pub bytes: Vec<u8>,
    /// Source; the port is 0 unless TCP or UDP.
    pub src: SocketAddr,
    /// Destination; the port is 0 unless TCP or UDP.
    pub dst: SocketAddr,
    /// Protocol.
    pub protocol: IpNumber,
    /// TCP part.
    pub tcp: Option<Tcp>,
    /// Payload of UDP or TCP.
    pub data: Vec<u8>,
}

/// TCP part of a [`Packet`].
#[derive(Clone, Debug)]
pub struct Tcp {
    /// Flags: [`SYN`] and so on.
    pub flags: u8,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledged sequence number.
    pub acknowledged: u32,
    /// Window, as the header gives it.
    pub window: u16,
    /// Timestamp option: own value, echoed value.
    pub timestamp: Option<(u32, u32)>,
}

impl Packet {
    /// Reads an IP packet; `None` if it is none.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let sliced = SlicedPacket::from_ip(bytes).ok()?;
        let (src, dst, protocol) = match sliced.net? {
            NetSlice::Ipv4(ip) => (
                IpAddr::V4(ip.header().source_addr()),
                IpAddr::V4(ip.header().destination_addr()),
                ip.payload_ip_number(),
            ),
            NetSlice::Ipv6(ip) => (
                IpAddr::V6(ip.header().source_addr()),
                IpAddr::V6(ip.header().destination_addr()),
                ip.payload().ip_number,
            ),
            NetSlice::Arp(_) => return None,
        };
        let (ports, tcp, data) = match sliced.transport {
            Some(TransportSlice::Tcp(tcp)) => (
                (tcp.source_port(), tcp.destination_port()),
                Some(Tcp {
                    flags: [
                        (tcp.fin(), FIN),
                        (tcp.syn(), SYN),
                        (tcp.rst(), RST),
                        (tcp.psh(), PSH),
                        (tcp.ack(), ACK),
                    ]
                    .into_iter()
                    .filter(|(set, _)| *set)
                    .fold(0, |flags, (_, flag)| flags | flag),
                    sequence: tcp.sequence_number(),
                    acknowledged: tcp.acknowledgment_number(),
                    window: tcp.window_size(),
                    timestamp: tcp.options_iterator().flatten().find_map(|option| match option {
                        TcpOptionElement::Timestamp(value, echo) => Some((value, echo)),
                        _ => None,
                    }),
                }),
                tcp.payload().to_vec(),
            ),
            Some(TransportSlice::Udp(udp)) => (
                (udp.source_port(), udp.destination_port()),
                None,
                udp.payload().to_vec(),
            ),
            _ => ((0, 0), None, Vec::new()),
        };
        Some(Self {
            bytes: bytes.to_vec(),
            src: SocketAddr::new(src, ports.0),
            dst: SocketAddr::new(dst, ports.1),
            protocol,
            tcp,
            data,
        })
    }

    /// Whether it is a TCP segment with all of these flags.
    pub fn has(&self, flags: u8) -> bool {
        self.tcp.as_ref().is_some_and(|tcp| tcp.flags & flags == flags)
    }

    /// Whether it goes from here to there.
    pub fn goes(&self, src: SocketAddr, dst: SocketAddr) -> bool {
        self.src == src && self.dst == dst
    }
}

/// The client's end of a TCP connection, played by hand over a [`Tun`].
#[derive(Clone, Debug)]
pub struct Client {
    /// Own address.
    pub local: SocketAddr,
    /// The kernel's address.
    pub remote: SocketAddr,
    /// Next sequence number to send.
    pub sequence: u32,
    /// Next sequence number expected.
    pub expected: u32,
    /// Own timestamp, sent with each segment; `None` without the option.
    pub timestamp: Option<u32>,
    /// The kernel's last timestamp.
    pub echo: u32,
}

impl Client {
    /// One that has sent nothing yet.
    pub fn new(local: SocketAddr, remote: SocketAddr, sequence: u32, timestamp: Option<u32>) -> Self {
        Self {
            local,
            remote,
            sequence,
            expected: 0,
            timestamp,
            echo: 0,
        }
    }

    /// Sends a SYN and takes the SYN-ACK; the last ACK is not sent.
    pub fn syn(&mut self, wire: &Tun) -> Result<()> {
        wire.send(&self.segment(SYN, &[]).bytes()?)?;
        let (local, remote) = (self.local, self.remote);
        let answer = wire.receive(&format!("SYN-ACK from {remote} to {local}"), |packet| {
            packet.goes(remote, local) && packet.has(SYN | ACK)
        })?;
        self.sequence = self.sequence.wrapping_add(1);
        self.took(&answer);
        Ok(())
    }

    /// Sends SYN and, if a SYN-ACK comes within half a second, ACK.
    pub fn try_connect(&mut self, wire: &Tun) -> Result<bool> {
        wire.send(&self.segment(SYN, &[]).bytes()?)?;
        let (local, remote) = (self.local, self.remote);
        let answer = wire.receive_within(Duration::from_millis(500), |packet| {
            packet.goes(remote, local) && packet.has(SYN | ACK)
        });
        let Some(answer) = answer else {
            return Ok(false);
        };
        self.sequence = self.sequence.wrapping_add(1);
        self.took(&answer);
        self.send(wire, ACK, &[])?;
        Ok(true)
    }

    /// Sends SYN, takes SYN-ACK, sends ACK.
    pub fn connect(&mut self, wire: &Tun) -> Result<()> {
        self.syn(wire)?;
        self.send(wire, ACK, &[])
    }

    /// Sends a segment and moves the sequence number on.
    pub fn send(&mut self, wire: &Tun, flags: u8, data: &[u8]) -> Result<()> {
        wire.send(&self.segment(flags, data).bytes()?)?;
        self.sequence = self
            .sequence
            .wrapping_add(data.len() as u32)
            .wrapping_add(u32::from(flags & (SYN | FIN) != 0));
        Ok(())
    }

    /// A segment that fits now.
    pub fn segment(&self, flags: u8, data: &[u8]) -> Segment {
        Segment {
            src: self.local,
            dst: self.remote,
            flags,
            sequence: self.sequence,
            acknowledged: self.expected,
            timestamp: self.timestamp.map(|value| (value, self.echo)),
            authentication: None,
            data: data.to_vec(),
        }
    }

    /// Waits for a segment of the kernel with these flags and acknowledges it in memory.
    pub fn take(&mut self, wire: &Tun, flags: u8) -> Result<Packet> {
        let (local, remote) = (self.local, self.remote);
        let packet = wire.receive(
            &format!("segment {flags:#x} from {remote} to {local}"),
            |packet| packet.goes(remote, local) && packet.has(flags),
        )?;
        self.took(&packet);
        Ok(packet)
    }

    fn took(&mut self, packet: &Packet) {
        if let Some(tcp) = &packet.tcp {
            self.expected = tcp
                .sequence
                .wrapping_add(packet.data.len() as u32)
                .wrapping_add(u32::from(tcp.flags & (SYN | FIN) != 0));
            if let Some((value, _)) = tcp.timestamp {
                self.echo = value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_read_as_they_were_made() {
        for (src, dst) in [
            ("10.1.0.2:1000", "10.1.0.1:80"),
            ("[fd00::2]:1000", "[fd00::1]:80"),
        ] {
            let (src, dst) = (src.parse().unwrap(), dst.parse().unwrap());
            let made = Segment {
                src,
                dst,
                flags: ACK | PSH,
                sequence: 7,
                acknowledged: 9,
                timestamp: Some((11, 13)),
                authentication: None,
                data: b"abc".to_vec(),
            };
            let read = Packet::parse(&made.bytes().unwrap()).unwrap();
            assert!(read.goes(src, dst));
            assert!(read.has(ACK | PSH) && !read.has(SYN));
            let tcp = read.tcp.unwrap();
            assert_eq!((tcp.sequence, tcp.acknowledged), (7, 9));
            assert_eq!(tcp.timestamp, Some((11, 13)));
            assert_eq!(read.data, b"abc");
        }
    }
}
