//! Memos: what frees of packets came to a moment ago. In a flood each packet is like the one before, and what it is counted
//! as need not be found out anew: a few words are compared, and one is added to.

use crate::CountKey;

/// Memos of a CPU; a power of two.
pub const MEMOS: usize = 64;
/// Words of a packet, from the network header on, that are compared.
pub const MEMO_WORDS: usize = 7;

/// What the count key of a free without a hint follows from.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Like {
    /// See [`crate::EventHeader::location`].
    pub location: u64,
    /// Address of the device, of the route with its flags, of the `struct net` of the packet's socket and of the one that
    /// received it; 0 for none.
    pub device: u64,
    /// See [`Like::device`].
    pub refdst: u64,
    /// See [`Like::device`].
    pub sk_net: u64,
    /// See [`Like::device`].
    pub rx_net: u64,
    /// See [`crate::EventHeader::reason`].
    pub reason: u64,
    /// Bytes of the `sk_buff`: those with `pkt_type`, `ipvs_property`, `active_extensions`, then its protocol.
    pub kind: u64,
    /// The packet, in the CPU's byte order.
    pub packet: [u64; MEMO_WORDS],
}

/// What frees like one before are counted as. Its counts only grow while it is of one key, and those of all memos and of the
/// count map together are the key's. One that held for none of late goes to another key, and its counts to the map first.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memo {
    /// Odd while it is written; 0 for one that was never used.
    pub serial: u64,
    /// How many keys it has had.
    pub keys: u64,
    /// The jiffy from which it holds no longer.
    pub until: u64,
    /// What it is compared with.
    pub like: Like,
    /// Bits of [`Like::packet`] that matter.
    pub mask: [u64; MEMO_WORDS],
    /// Bytes that the packet must have.
    pub least: u64,
    /// 0: the key's events are left out, since there are too many; 1: nobody wants them.
    pub quiet: u64,
    /// Index of the device, where the packets have one.
    pub ifindex: u64,
    /// Packets, by [`Memo::quiet`]; the last are those that travelled as brief records.
    pub packets: [u64; 3],
    /// Of those left out, and those that travelled in short, how many an event that was sent came after.
    pub settled: u64,
    /// The key.
    pub key: CountKey,
}

/// What a CPU remembers of the frees on it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Frees {
    /// How many calls of the program that looks at frees are under way.
    pub running: u64,
    /// Packets whose free was looked at, until the last of the tracepoint's programs has seen it, by their address.
    pub done: [u64; 8],
    /// What an address is passed by, so that the verifier takes it for a number.
    pub way: u64,
    /// What those before came to.
    pub memos: [Memo; MEMOS],
}
