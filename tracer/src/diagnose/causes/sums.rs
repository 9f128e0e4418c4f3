//! What a packet's own bytes prove: checksums that do not fit, lengths and fields that cannot be.

use std::net::IpAddr;

use crate::diagnose::RawEvent;

/// A checksum that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    /// Whose: `IPv4 header`, `TCP`, `UDP`, `ICMP`, `ICMPv6`.
    pub(super) layer: &'static str,
    /// As the packet has it.
    pub(super) carried: u16,
    /// As it should be.
    pub(super) correct: u16,
}

/// The first checksum that is wrong; `None` if none is, as far as the captured bytes tell. One that the sender's kernel
/// left to a device, as between containers of one host, is not wrong.
pub(super) fn wrong(packet: &[u8]) -> Option<Wrong> {
    let ip = Ip::parse(packet)?;
    if ip.version == 4 {
        let header = packet.get(..ip.header).filter(|header| header.len() >= 20)?;
        let carried = word(header, 10)?;
        let correct = !sum(header, 10, 0);
        if carried != correct {
            return Some(Wrong {
                layer: "IPv4 header",
                carried,
                correct,
            });
        }
    }
    if ip.fragment {
        return None;
    }
    let segment = packet.get(ip.header..ip.length)?;
    let (layer, place) = match (ip.protocol, ip.version) {
        (6, _) => ("TCP", 16),
        (17, _) => ("UDP", 6),
        (1, 4) => ("ICMP", 2),
        (58, 6) => ("ICMPv6", 2),
        _ => return None,
    };
    let carried = word(segment, place)?;
    let pseudo = if layer == "ICMP" {
        0
    } else {
        let addresses = packet.get(if ip.version == 4 { 12..20 } else { 8..40 })?;
        let length = u32::try_from(segment.len()).ok()?;
        u32::from(sum(addresses, usize::MAX, 0)) + u32::from(ip.protocol) + length
    };
    let left_to_device = layer != "ICMP" && carried == fold(pseudo);
    if left_to_device || layer == "UDP" && carried == 0 {
        return None;
    }
    let correct = match !sum(segment, place, pseudo) {
        0 if layer == "UDP" => 0xffff,
        correct => correct,
    };
    (carried != correct).then_some(Wrong {
        layer,
        carried,
        correct,
    })
}

/// What is wrong with a packet's headers besides checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The IP header's own fields.
    Header(&'static str),
    /// There are fewer bytes than the IP header says.
    Truncated,
    /// The header of TCP or UDP.
    Transport(&'static str),
}

impl Fault {
    /// In words.
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Header(text) | Self::Transport(text) => text,
            Self::Truncated => "fewer bytes than the IP header says",
        }
    }
}

/// What is wrong with the headers, as far as the captured bytes tell.
pub(super) fn fault(event: &RawEvent) -> Option<Fault> {
    let packet = &event.packet;
    let first = packet.first()?;
    match first >> 4 {
        4 if first & 0xf < 5 => return Some(Fault::Header("IPv4 header shorter than 20 bytes")),
        4 | 6 => {}
        _ => return Some(Fault::Header("neither IPv4 nor IPv6")),
    }
    let ip = Ip::parse(packet)?;
    if ip.length < ip.header {
        return Some(Fault::Header("IPv4 packet shorter than its header"));
    }
    if let Some(IpAddr::V6(source)) = event.parse().src
        && (source.is_multicast() || source.is_loopback())
    {
        return Some(Fault::Header("source address that no received packet may have"));
    }
    if ip.length > event.header.len as usize {
        return Some(Fault::Truncated);
    }
    if ip.fragment {
        return None;
    }
    let segment = packet.get(ip.header..)?;
    match ip.protocol {
        6 if segment.get(12).is_some_and(|words| words >> 4 < 5) => {
            Some(Fault::Transport("TCP header shorter than 20 bytes"))
        }
        17 if word(segment, 4)
            .is_some_and(|length| length != 0 && usize::from(length) > ip.length - ip.header) =>
        {
            Some(Fault::Transport("UDP datagram longer than its IP packet"))
        }
        _ => None,
    }
}

/// What an IP header says of its packet.
struct Ip {
    version: u8,
    /// Bytes of the header.
    header: usize,
    /// Bytes of header and rest.
    length: usize,
    /// What follows; an extension header of IPv6 is not looked behind.
    protocol: u8,
    fragment: bool,
}

impl Ip {
    fn parse(packet: &[u8]) -> Option<Self> {
        const MORE_OR_OFFSET: u16 = 0x3fff;
        match packet.first()? >> 4 {
            4 => Some(Self {
                version: 4,
                header: usize::from(packet[0] & 0xf) * 4,
                length: usize::from(word(packet, 2)?),
                protocol: *packet.get(9)?,
                fragment: word(packet, 6)? & MORE_OR_OFFSET != 0,
            }),
            6 => Some(Self {
                version: 6,
                header: 40,
                length: 40 + usize::from(word(packet, 4)?),
                protocol: *packet.get(6)?,
                fragment: false,
            }),
            _ => None,
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// The Internet checksum of these bytes, not complemented; the two at `but` count as zero.
fn sum(bytes: &[u8], but: usize, start: u32) -> u16 {
    let words = bytes.chunks(2).enumerate().map(|(index, pair)| {
        if index * 2 == but {
            0
        } else {
            u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or_default())
        }
    });
    fold(start + words.sum::<u32>())
}

fn fold(sum: u32) -> u16 {
    let once = (sum & 0xffff) + (sum >> 16);
    ((once & 0xffff) + (once >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A datagram whose checksums fit.
    fn datagram() -> Vec<u8> {
        let mut packet = vec![
            0x45, 0, 0, 33, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 9, 10, 0, 0, 1, // IPv4
            0x0f, 0xa0, 0x23, 0x28, 0, 13, 0, 0, b'h', b'e', b'l', b'l', b'o',
        ];
        let checksum = !sum(&packet[..20], 10, 0);
        set(&mut packet, 10, checksum);
        let pseudo = u32::from(sum(&packet[12..20], usize::MAX, 0)) + 17 + 13;
        let checksum = !sum(&packet[20..], 6, pseudo);
        set(&mut packet, 26, checksum);
        packet
    }

    fn set(packet: &mut [u8], at: usize, value: u16) {
        packet[at..at + 2].copy_from_slice(&value.to_be_bytes());
    }

    #[test]
    fn the_sum_of_the_rfc_is_right() {
        // RFC 1071, section 3.
        assert_eq!(
            sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7], usize::MAX, 0),
            0xddf2
        );
    }

    #[test]
    fn a_wrong_checksum_is_told_from_one_that_is_not_there() {
        let right = datagram();
        assert_eq!(wrong(&right), None);
        let mut broken = right.clone();
        broken[32] ^= 1;
        let seen = wrong(&broken).unwrap();
        assert_eq!(seen.layer, "UDP");
        assert_eq!(Some(seen.carried), word(&right, 26));
        let mut header = right.clone();
        header[8] -= 1;
        assert_eq!(wrong(&header).unwrap().layer, "IPv4 header");
        let mut without = right.clone();
        set(&mut without, 26, 0);
        assert_eq!(wrong(&without), None);
        // Left to a device: the sum of the pseudo header only.
        let mut partial = right.clone();
        let pseudo = u32::from(sum(&right[12..20], usize::MAX, 0)) + 17 + 13;
        set(&mut partial, 26, fold(pseudo));
        assert_eq!(wrong(&partial), None);
        // Not all of it was captured.
        assert_eq!(wrong(&broken[..30]), None);
    }
}
