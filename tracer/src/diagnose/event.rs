//! A raw event as user space holds it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytes::Bytes;
use droptrace_common::{EventHeader, Field, FieldId, PACKET_MAX, Site, bits};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

/// Why bytes are not an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeError(pub &'static str);

impl std::fmt::Display for DecodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "not a raw event: {}", self.0)
    }
}

impl std::error::Error for DecodeError {}

/// What a hook sent, decoded.
#[derive(Clone, Debug, PartialEq)]
pub struct RawEvent {
    /// The fixed part.
    pub header: EventHeader,
    /// The hook or branch.
    pub site: Site,
    /// Packet bytes from the network header on.
    pub packet: Bytes,
    /// Values that the hook read.
    fields: Vec<(FieldId, u64)>,
    /// The bytes as they came, for the capture file.
    wire: Bytes,
}

impl RawEvent {
    /// Decodes what the ring or a capture file holds.
    pub fn decode(wire: Bytes) -> Result<Self, DecodeError> {
        const HEADER: usize = size_of::<EventHeader>();
        const FIELD: usize = size_of::<Field>();
        if wire.len() < HEADER + PACKET_MAX {
            return Err(DecodeError("too short"));
        }
        // SAFETY: the length was checked, EventHeader is plain bytes without padding, and the read is unaligned.
        let header = unsafe { wire.as_ptr().cast::<EventHeader>().read_unaligned() };
        let site = Site::from_number(header.site).ok_or(DecodeError("site of a later version"))?;
        if usize::from(header.packet_len) > PACKET_MAX {
            return Err(DecodeError("packet longer than its area"));
        }
        let rest = &wire[HEADER + PACKET_MAX..];
        if rest.len() < usize::from(header.fields) * FIELD {
            return Err(DecodeError("fields cut off"));
        }
        let fields = rest
            .chunks_exact(FIELD)
            .take(usize::from(header.fields))
            .filter_map(|chunk| {
                // SAFETY: the chunk has the size of a Field, which is plain bytes without padding.
                let field = unsafe { chunk.as_ptr().cast::<Field>().read_unaligned() };
                FieldId::from_number(field.id).map(|id| (id, field.value))
            })
            .collect();
        let packet = wire.slice(HEADER..HEADER + usize::from(header.packet_len));
        Ok(Self {
            header,
            site,
            packet,
            fields,
            wire,
        })
    }

    /// An event made from its parts, for counters and tests. Packet bytes and fields beyond the limits are cut off.
    ///
    /// # Panics
    /// Never: what it builds is well formed.
    pub fn new(header: EventHeader, packet: &[u8], fields: &[(FieldId, u64)]) -> Self {
        let mut wire = Vec::with_capacity(droptrace_common::EVENT_MAX);
        let mut header = header;
        header.packet_len = packet.len().min(PACKET_MAX) as u16;
        let fields = &fields[..fields.len().min(droptrace_common::FIELDS_MAX)];
        header.fields = fields.len() as u16;
        // SAFETY: EventHeader is plain bytes without padding.
        wire.extend_from_slice(unsafe {
            std::slice::from_raw_parts((&raw const header).cast::<u8>(), size_of::<EventHeader>())
        });
        let mut area = [0; PACKET_MAX];
        area[..usize::from(header.packet_len)].copy_from_slice(&packet[..usize::from(header.packet_len)]);
        wire.extend_from_slice(&area);
        for (id, value) in fields {
            wire.extend_from_slice(&(*id as u32).to_ne_bytes());
            wire.extend_from_slice(&0u32.to_ne_bytes());
            wire.extend_from_slice(&value.to_ne_bytes());
        }
        Self::decode(wire.into()).expect("an event made from its parts is well formed")
    }

    /// The bytes as they came.
    pub fn wire(&self) -> &Bytes {
        &self.wire
    }

    /// The first value of this field.
    pub fn field(&self, id: FieldId) -> Option<u64> {
        self.fields
            .iter()
            .find(|(each, _)| *each == id)
            .map(|(_, value)| *value)
    }

    /// Every value of this field, in order.
    pub fn all(&self, id: FieldId) -> impl Iterator<Item = u64> + '_ {
        self.fields
            .iter()
            .filter(move |(each, _)| *each == id)
            .map(|(_, value)| *value)
    }

    /// The address in two fields.
    pub fn address(&self, hi: FieldId, lo: FieldId) -> Option<IpAddr> {
        Some(address_from_halves(self.field(hi)?, self.field(lo)?))
    }

    /// Whether all these bits are set.
    pub fn has(&self, wanted: u32) -> bool {
        self.header.bits & wanted == wanted
    }

    /// Whether the segment is a TCP SYN without ACK.
    pub fn is_syn(&self) -> bool {
        self.has(bits::SYN)
    }

    /// The packet's headers, as far as they were captured.
    pub fn parse(&self) -> Packet {
        Packet::parse(&self.packet)
    }
}

/// An address from its two halves; an IPv4-mapped one becomes IPv4.
pub fn address_from_halves(hi: u64, lo: u64) -> IpAddr {
    Ipv6Addr::from((u128::from(hi) << 64) | u128::from(lo)).to_canonical()
}

/// What the headers say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packet {
    /// Source address.
    pub src: Option<IpAddr>,
    /// Destination address.
    pub dst: Option<IpAddr>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// Source port (TCP, UDP, SCTP).
    pub sport: Option<u16>,
    /// Destination port.
    pub dport: Option<u16>,
    /// TCP header.
    pub tcp: Option<Tcp>,
    /// ICMP or ICMPv6 type and code.
    pub icmp: Option<(u8, u8)>,
    /// Bytes of all headers of a TCP segment, options included, whether they were captured or not.
    pub headers: Option<u32>,
}

/// What a TCP header says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tcp {
    /// Flags byte: FIN 1, SYN 2, RST 4, PSH 8, ACK 16, URG 32.
    pub flags: u8,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement number.
    pub acknowledgement: u32,
    /// Timestamp option (value, echo).
    pub timestamp: Option<(u32, u32)>,
}

impl Tcp {
    /// Flags as tcpdump writes them: `S`, `S.` → here `SA`, ACK alone `.`.
    pub fn flags_text(self) -> String {
        self.write_flags(String::new())
    }

    /// The same, in place of another text.
    pub(super) fn write_flags(self, mut text: String) -> String {
        text.clear();
        let letters = [(2, 'S'), (1, 'F'), (4, 'R'), (8, 'P'), (32, 'U')];
        text.extend(
            letters
                .into_iter()
                .filter(|(bit, _)| self.flags & bit != 0)
                .map(|(_, letter)| letter),
        );
        if self.flags & 16 != 0 {
            text.push(if text.is_empty() { '.' } else { 'A' });
        }
        text
    }
}

impl Packet {
    /// Whether it is to an address of IPv6; one whose headers were not captured passes for IPv4.
    pub fn is_ipv6(&self) -> bool {
        self.dst.is_some_and(|dst| dst.is_ipv6())
    }

    /// Parses IPv4 or IPv6 and the transport header behind it; stops where the bytes end.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut packet = Self::default();
        let transport = match bytes.first().map(|first| first >> 4) {
            Some(4) => packet.parse_v4(bytes),
            Some(6) => packet.parse_v6(bytes),
            _ => None,
        };
        if let Some(transport) = transport {
            packet.parse_transport(transport);
            if packet.tcp.is_some()
                && let Some(offset) = transport.get(12)
            {
                packet.headers = Some((bytes.len() - transport.len()) as u32 + u32::from(offset >> 4) * 4);
            }
        }
        packet
    }

    fn parse_v4<'a>(&mut self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        if bytes.len() < Ipv4Hdr::LEN {
            return None;
        }
        // SAFETY: the length was checked; Ipv4Hdr is plain bytes.
        let header = unsafe { bytes.as_ptr().cast::<Ipv4Hdr>().read_unaligned() };
        self.src = Some(Ipv4Addr::from(header.src_addr).into());
        self.dst = Some(Ipv4Addr::from(header.dst_addr).into());
        self.protocol = Some(bytes[9]);
        let fragment_offset = u16::from_be_bytes([bytes[6], bytes[7]]) & 0x1fff;
        if fragment_offset != 0 {
            return None;
        }
        bytes.get(usize::from(bytes[0] & 0xf) * 4..)
    }

    fn parse_v6<'a>(&mut self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        if bytes.len() < Ipv6Hdr::LEN {
            return None;
        }
        // SAFETY: the length was checked; Ipv6Hdr is plain bytes.
        let header = unsafe { bytes.as_ptr().cast::<Ipv6Hdr>().read_unaligned() };
        self.src = Some(Ipv6Addr::from(header.src_addr).into());
        self.dst = Some(Ipv6Addr::from(header.dst_addr).into());
        let mut next = bytes[6];
        let mut rest = &bytes[Ipv6Hdr::LEN..];
        // Hop-by-hop, routing, destination options, fragment; bounded by the captured bytes.
        while matches!(next, 0 | 43 | 44 | 60) {
            let (following, length) = (*rest.first()?, *rest.get(1)?);
            let length = if next == 44 {
                8
            } else {
                (usize::from(length) + 1) * 8
            };
            if next == 44 && u16::from_be_bytes([*rest.get(2)?, *rest.get(3)?]) & 0xfff8 != 0 {
                self.protocol = Some(following);
                return None;
            }
            rest = rest.get(length..)?;
            next = following;
        }
        self.protocol = Some(next);
        Some(rest)
    }

    fn parse_transport(&mut self, bytes: &[u8]) {
        let word = |at: usize| Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
        let double = |at: usize| Some(u32::from(word(at)?) << 16 | u32::from(word(at + 2)?));
        match self.protocol {
            Some(6 | 17 | 132 | 136) => {
                self.sport = word(0);
                self.dport = word(2);
            }
            Some(1 | 58) => {
                if let [kind, code, ..] = *bytes {
                    self.icmp = Some((kind, code));
                }
            }
            _ => {}
        }
        if self.protocol == Some(6)
            && let (Some(sequence), Some(acknowledgement), Some(&offset), Some(&flags)) =
                (double(4), double(8), bytes.get(12), bytes.get(13))
        {
            let options_end = (usize::from(offset >> 4) * 4).min(bytes.len());
            let timestamp = bytes.get(20..options_end).and_then(timestamp_option);
            self.tcp = Some(Tcp {
                flags,
                sequence,
                acknowledgement,
                timestamp,
            });
        }
    }

    /// `tcp`, `udp`, …, or the number.
    pub fn protocol_name(&self) -> Option<String> {
        self.write_protocol_name(String::new())
    }

    /// The same, in place of another text.
    pub(super) fn write_protocol_name(&self, mut text: String) -> Option<String> {
        text.clear();
        match self.protocol? {
            1 => text.push_str("icmp"),
            2 => text.push_str("igmp"),
            6 => text.push_str("tcp"),
            17 => text.push_str("udp"),
            58 => text.push_str("icmpv6"),
            132 => text.push_str("sctp"),
            other => text.push_str(&other.to_string()),
        }
        Some(text)
    }
}

/// Finds option 8 (RFC 7323) among TCP options.
fn timestamp_option(mut options: &[u8]) -> Option<(u32, u32)> {
    while let [kind, rest @ ..] = options {
        match kind {
            0 => return None,
            1 => options = rest,
            8 if options.len() >= 10 => {
                let number = |at: usize| {
                    u32::from_be_bytes([options[at], options[at + 1], options[at + 2], options[at + 3]])
                };
                return Some((number(2), number(6)));
            }
            _ => options = options.get(usize::from((*rest.first()?).max(2))..)?,
        }
    }
    None
}
