//! Brief records: what travels of a drop that is asked for, but has no full event.

use crate::{CountKey, MEMO_WORDS};

/// Bytes of the packet that a brief record holds, from the network header on.
pub const BRIEF_PACKET: usize = MEMO_WORDS * size_of::<u64>();

/// A drop in short: what it was counted as, and its packet. Its cause, evidence and remedy are those of the full events
/// that were counted as the same.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BriefEvent {
    /// See [`crate::EventHeader::ktime_ns`].
    pub ktime_ns: u64,
    /// What it was counted as.
    pub key: CountKey,
    /// See [`crate::EventHeader::ifindex`].
    pub ifindex: u32,
    /// See [`crate::EventHeader::len`].
    pub len: u32,
    /// Valid bytes of the packet area.
    pub packet_len: u16,
    /// See [`crate::EventHeader::protocol`].
    pub protocol: u16,
    /// See [`crate::EventHeader::pkt_type`].
    pub pkt_type: u16,
    /// Whether it was seen at its free: 1 or 0.
    pub freed: u16,
    /// The packet, in the CPU's byte order.
    pub packet: [u64; MEMO_WORDS],
}

impl BriefEvent {
    /// The bytes of the packet that it holds.
    pub fn bytes(&self) -> &[u8] {
        let length = usize::from(self.packet_len).min(BRIEF_PACKET);
        // SAFETY: the area is as long as that, and any words are bytes.
        unsafe { core::slice::from_raw_parts(self.packet.as_ptr().cast(), length) }
    }

    /// A record as the ring holds it; None for bytes of another length.
    pub fn decode(wire: &[u8]) -> Option<Self> {
        // SAFETY: the length was checked, the record is plain numbers without padding, and the read is unaligned.
        (wire.len() == size_of::<Self>()).then(|| unsafe { wire.as_ptr().cast::<Self>().read_unaligned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back() {
        let mut packet = [0; MEMO_WORDS];
        packet[0] = u64::from_ne_bytes([0x45, 1, 2, 3, 4, 5, 6, 7]);
        let record = BriefEvent {
            ktime_ns: 7,
            packet_len: 3,
            packet,
            ..BriefEvent::default()
        };
        // SAFETY: the record is plain numbers without padding.
        let wire =
            unsafe { core::slice::from_raw_parts((&raw const record).cast::<u8>(), size_of::<BriefEvent>()) };
        assert_eq!(wire.len(), 104);
        assert_eq!(BriefEvent::decode(wire), Some(record));
        assert_eq!(BriefEvent::decode(&wire[1..]), None);
        assert_eq!(record.bytes(), [0x45, 1, 2]);
        let beyond = BriefEvent {
            packet_len: u16::MAX,
            ..record
        };
        assert_eq!(beyond.bytes().len(), BRIEF_PACKET);
    }
}
