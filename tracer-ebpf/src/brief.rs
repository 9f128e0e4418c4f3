//! Brief records: see [`droptrace_common::BriefEvent`]. One goes to a ring of its own, so that a flood of them takes no room
//! from full events.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::helpers::bpf_ktime_get_ns;
use droptrace_common::{BRIEF_PACKET, BriefEvent, CountKey, Like, MEMO_WORDS, Memo};

use crate::{
    emit::{EventBuffer, SAMPLING},
    maps::BRIEFS,
    packet, skb,
};

/// Whether drops without a full event travel in short. Where not, the verifier removes what would send them.
#[inline(always)]
pub(crate) fn wanted() -> bool {
    // SAFETY: a plain number in read-only data; volatile, since user space replaced it.
    unsafe { read_volatile(&raw const SAMPLING.briefs) != 0 }
}

/// What a record says beside the key and the packet.
struct About {
    ktime_ns: u64,
    ifindex: u32,
    len: u32,
    packet_len: u16,
    protocol: u16,
    pkt_type: u16,
    freed: bool,
}

/// Sends the drop whose packet is in the buffer, and which was counted under this key; `freed` where it was seen at its free.
/// False: the ring is full.
#[inline(always)]
pub(crate) fn of_event(buffer: &EventBuffer, key: &CountKey, ifindex: u32, freed: bool, now: u64) -> bool {
    let header = &buffer.header;
    let about = About {
        ktime_ns: now,
        ifindex,
        len: header.len,
        packet_len: header.packet_len,
        protocol: header.protocol,
        pkt_type: header.pkt_type,
        freed,
    };
    send(&about, key, |index| {
        packet::word(&buffer.packet, index * size_of::<u64>())
    })
}

/// Sends the drop that its hook tells, whose packet is in the buffer, and which is like those of the memo. False: the ring is full.
#[inline(always)]
pub(crate) fn of_told(buffer: &EventBuffer, memo: &Memo) -> bool {
    // SAFETY: no precondition.
    let now = unsafe { bpf_ktime_get_ns() };
    of_event(buffer, &memo.key, buffer.header.iif, false, now)
}

/// Sends a packet whose free is like those of the memo. False: the ring is full.
#[inline(always)]
pub(crate) fn of_free(skb: u64, like: &Like, linear: u64, memo: &Memo) -> bool {
    let (len, came_by) = skb::length_and_device(skb);
    let (pkt_type, protocol) = skb::type_and_protocol(like.kind);
    let at_hand = if linear < u64::from(len) {
        linear
    } else {
        u64::from(len)
    };
    let about = About {
        // SAFETY: no precondition.
        ktime_ns: unsafe { bpf_ktime_get_ns() },
        ifindex: if memo.ifindex == 0 {
            came_by
        } else {
            memo.ifindex as u32
        },
        len,
        packet_len: if at_hand < BRIEF_PACKET as u64 {
            at_hand
        } else {
            BRIEF_PACKET as u64
        } as u16,
        protocol,
        pkt_type,
        freed: true,
    };
    send(&about, &memo.key, |index| like.packet[index])
}

/// Sends a record whose packet has these words. The kernel wakes user space for it if that has read all before.
#[inline(always)]
fn send(about: &About, key: &CountKey, word: impl Fn(usize) -> u64) -> bool {
    let Some(mut entry) = BRIEFS.reserve::<BriefEvent>(0) else {
        return false;
    };
    let record = entry.as_mut_ptr();
    // SAFETY: the entry is as large as a record, and all of it is written. Volatile, since the compiler's own way would be a
    // loop over bytes.
    unsafe {
        write_volatile(&raw mut (*record).ktime_ns, about.ktime_ns);
        write_volatile(&raw mut (*record).key.location, key.location);
        write_volatile(&raw mut (*record).key.netns, key.netns);
        write_volatile(&raw mut (*record).key.reason, key.reason);
        write_volatile(&raw mut (*record).key.bits, key.bits);
        write_volatile(&raw mut (*record).key.site, key.site);
        write_volatile(&raw mut (*record).key.pad, 0);
        write_volatile(&raw mut (*record).ifindex, about.ifindex);
        write_volatile(&raw mut (*record).len, about.len);
        write_volatile(&raw mut (*record).packet_len, about.packet_len);
        write_volatile(&raw mut (*record).protocol, about.protocol);
        write_volatile(&raw mut (*record).pkt_type, about.pkt_type);
        write_volatile(&raw mut (*record).freed, u16::from(about.freed));
        for index in 0..MEMO_WORDS {
            write_volatile(&raw mut (*record).packet[index], word(index));
        }
    }
    entry.submit(0);
    true
}
