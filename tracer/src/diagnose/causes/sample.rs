//! Events in the shape in which each kernel gives them, for the tests of the rules.

use std::net::{IpAddr, SocketAddr};

use droptrace_common::{EventHeader, FieldId, Site, bits, route};

use crate::diagnose::{Drop, Facts, RawEvent, RouteAnswer, diagnose};

/// The kernels that the rules are tested for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kernel {
    V5_10,
    V6_1,
    V6_12,
    V7_3,
}

pub(super) use Kernel::{V5_10, V6_1, V6_12, V7_3};

impl Kernel {
    pub(super) const ALL: [Self; 4] = [V5_10, V6_1, V6_12, V7_3];
}

/// What `at` makes of IPv4 and IPv6 on each kernel.
pub(super) fn of_both_versions(at: impl Fn(Kernel, u8) -> Sample) -> Vec<Sample> {
    Kernel::ALL
        .into_iter()
        .flat_map(|kernel| [at(kernel, 4), at(kernel, 6)])
        .collect()
}

pub(super) const SYN: u8 = 2;
pub(super) const SYN_ACK: u8 = 18;
pub(super) const ACK: u8 = 16;
pub(super) const RST: u8 = 4;

/// An event in the making, and what context would know of it.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) kernel: Kernel,
    header: EventHeader,
    packet: Vec<u8>,
    fields: Vec<(FieldId, u64)>,
    facts: Facts,
}

impl Sample {
    /// Seen by a hook of its own.
    pub(super) fn hook(kernel: Kernel, site: Site) -> Self {
        Self {
            kernel,
            header: EventHeader {
                site: site as u16,
                ktime_ns: 1,
                netns: 4_026_532_000,
                segments: 1,
                protocol: 0x0800,
                ..EventHeader::default()
            },
            packet: Vec::new(),
            fields: Vec::new(),
            facts: Facts {
                hz: Some(250),
                netns: 4_026_532_000,
                netns_name: Some("host".to_owned()),
                ..Facts::default()
            },
        }
    }

    /// Seen when it was freed, with a hint if `site` is one. Kernels with reasons say NOT_SPECIFIED.
    pub(super) fn freed(kernel: Kernel, site: Site, location: &str) -> Self {
        let mut sample = Self::hook(kernel, site);
        sample.header.location = 0xffff_ffff_8100_0000;
        sample.facts.location = Some(location.to_owned());
        if kernel != V5_10 {
            sample.header.reason = 2;
            sample.facts.reason = Some("NOT_SPECIFIED".to_owned());
        }
        sample
    }

    /// The kernel's reason, by name.
    pub(super) fn reason(mut self, reason: &str) -> Self {
        assert_ne!(self.kernel, V5_10, "5.10 has no reasons");
        self.header.reason = 3;
        self.facts.reason = Some(reason.to_owned());
        self
    }

    /// The name of its reason.
    pub(super) fn reason_name(&self) -> Option<&str> {
        self.facts.reason.as_deref()
    }

    /// The reason on kernels from `since` on.
    pub(super) fn reason_since(self, since: Kernel, reason: &str) -> Self {
        if self.kernel >= since {
            self.reason(reason)
        } else {
            self
        }
    }

    /// A counter that moved, by name.
    pub(super) fn counter(mut self, name: &str) -> Self {
        self.facts.reason = Some(name.to_owned());
        self
    }

    /// The packet has more bytes of data than were captured.
    pub(super) fn more_data(mut self, bytes: u32) -> Self {
        self.header.len += bytes;
        self
    }

    pub(super) fn bits(mut self, wanted: u32) -> Self {
        self.header.bits |= wanted;
        self
    }

    pub(super) fn field(mut self, id: FieldId, value: u64) -> Self {
        self.fields.push((id, value));
        self
    }

    pub(super) fn address(self, hi: FieldId, lo: FieldId, address: &str) -> Self {
        let (high, low) = halves(address.parse().expect("an address"));
        self.field(hi, high).field(lo, low)
    }

    /// A conntrack tuple, `source` and `destination` with ports.
    pub(super) fn tuple(self, ids: [FieldId; 5], source: &str, destination: &str) -> Self {
        let source: SocketAddr = source.parse().expect("an address with port");
        let destination: SocketAddr = destination.parse().expect("an address with port");
        let (source_hi, source_lo) = halves(source.ip());
        let (destination_hi, destination_lo) = halves(destination.ip());
        let ports = u64::from(source.port()) << 16 | u64::from(destination.port());
        [source_hi, source_lo, destination_hi, destination_lo, ports]
            .into_iter()
            .zip(ids)
            .fold(self, |sample, (value, id)| sample.field(id, value))
    }

    /// Came by this device.
    pub(super) fn on(mut self, device: &str) -> Self {
        self.header.iif = 2;
        self.header.ifindex = 2;
        self.facts.devices.insert(2, device.to_owned());
        self
    }

    /// Is on the device with this index by now.
    pub(super) fn moved_to(mut self, index: u32) -> Self {
        self.header.ifindex = index;
        self
    }

    /// Leaves by this device.
    pub(super) fn leaving(mut self, device: &str) -> Self {
        self.header.iif = 0;
        self.header.ifindex = 3;
        self.facts.devices.insert(3, device.to_owned());
        self.field(FieldId::Route, route::ELSEWHERE)
    }

    /// Its route leads by this device and gateway.
    pub(super) fn routed(self, device: &str, gateway: &str) -> Self {
        self.fact(|facts| {
            facts.route = Some(RouteAnswer {
                device: Some(device.to_owned()),
                gateway: Some(gateway.parse().expect("an address")),
                kind: "unicast".to_owned(),
                ..RouteAnswer::default()
            });
        })
    }

    pub(super) fn sysctl(mut self, name: &str, value: &str) -> Self {
        self.facts.sysctls.insert(name.to_owned(), value.to_owned());
        self
    }

    pub(super) fn fact(mut self, set: impl FnOnce(&mut Facts)) -> Self {
        set(&mut self.facts);
        self
    }

    /// A TCP segment, with the bits that the kernel side sets for it.
    pub(super) fn tcp(self, source: &str, destination: &str, flags: u8) -> Self {
        self.tcp_with(source, destination, flags, 1000, None)
    }

    pub(super) fn tcp_with(
        self,
        source: &str,
        destination: &str,
        flags: u8,
        sequence: u32,
        timestamp: Option<u32>,
    ) -> Self {
        let (source_ip, destination_ip) = (endpoint(source), endpoint(destination));
        let words = if timestamp.is_some() { 8 } else { 5 };
        let mut segment = Vec::new();
        segment.extend_from_slice(&source_ip.port().to_be_bytes());
        segment.extend_from_slice(&destination_ip.port().to_be_bytes());
        segment.extend_from_slice(&sequence.to_be_bytes());
        segment.extend_from_slice(&[0, 0, 0, 0, words << 4, flags, 255, 255, 0, 0, 0, 0]);
        if let Some(timestamp) = timestamp {
            segment.extend_from_slice(&[1, 1, 8, 10]);
            segment.extend_from_slice(&timestamp.to_be_bytes());
            segment.extend_from_slice(&[0, 0, 0, 0]);
        }
        let kind = match flags & (SYN | ACK) {
            SYN => bits::SYN,
            SYN_ACK => bits::SYN_ACK,
            _ => 0,
        };
        let reset = if flags & RST == 0 { 0 } else { bits::RST };
        self.bits(bits::TCP | kind | reset)
            .ip(6, source_ip.ip(), destination_ip.ip(), &segment)
    }

    /// A UDP datagram.
    pub(super) fn udp(self, source: &str, destination: &str) -> Self {
        let (source, destination) = (endpoint(source), endpoint(destination));
        let mut datagram = Vec::new();
        datagram.extend_from_slice(&source.port().to_be_bytes());
        datagram.extend_from_slice(&destination.port().to_be_bytes());
        datagram.extend_from_slice(&[0, 8, 0, 0]);
        self.bits(bits::UDP)
            .ip(17, source.ip(), destination.ip(), &datagram)
    }

    fn ip(mut self, protocol: u8, source: IpAddr, destination: IpAddr, payload: &[u8]) -> Self {
        let length = payload.len() as u16;
        let mut packet = Vec::new();
        match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                packet.extend_from_slice(&[0x45, 0]);
                packet.extend_from_slice(&(length + 20).to_be_bytes());
                packet.extend_from_slice(&[0, 0, 0, 0, 64, protocol, 0, 0]);
                packet.extend_from_slice(&source.octets());
                packet.extend_from_slice(&destination.octets());
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                packet.extend_from_slice(&[0x60, 0, 0, 0]);
                packet.extend_from_slice(&length.to_be_bytes());
                packet.extend_from_slice(&[protocol, 64]);
                packet.extend_from_slice(&source.octets());
                packet.extend_from_slice(&destination.octets());
                self.header.protocol = 0x86dd;
            }
            _ => panic!("one packet, one family"),
        }
        packet.extend_from_slice(payload);
        self.header.len = packet.len() as u32;
        self.packet = packet;
        self
    }

    /// There are so many bytes less than its headers say.
    pub(super) fn shorter(mut self, bytes: u32) -> Self {
        self.header.len -= bytes;
        self
    }

    pub(super) fn event(&self) -> RawEvent {
        RawEvent::new(self.header, &self.packet, &self.fields)
    }

    /// The labelled drop.
    pub(super) fn label(&self) -> Drop {
        diagnose(&self.event(), &self.facts)
    }
}

fn endpoint(text: &str) -> SocketAddr {
    text.parse().expect("an address with port")
}

fn halves(address: IpAddr) -> (u64, u64) {
    let bits = match address {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    ((bits >> 64) as u64, bits as u64)
}
