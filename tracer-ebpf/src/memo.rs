//! Memos: see [`droptrace_common::Memo`]. One is made only of a free whose event is not sent, and never used in place of a
//! hint.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::helpers::bpf_jiffies64;
use droptrace_common::{
    CountKey, CountValue, Frees, Like, MEMO_WORDS, MEMOS, Memo, PACKET_MAX, SCOPE_PORT, bits,
};
use network_types::ip::IpProto;

use crate::{
    brief,
    emit::{EventBuffer, Work},
    hint, kernel,
    maps::{COUNTS, FREES, HINTED_UNTIL},
    packet::{self, ETH_P_IP, ETH_P_IPV6},
    scope,
    skb::SkBuff,
    skb_drop::Typed,
};

/// Jiffies that a memo holds of a key none of whose events is wanted. Sets and scope may change meanwhile. That of a key whose
/// bucket is empty holds until the next jiffy: then it may have an event again.
const HOLDS_QUIET: u64 = 16;

/// Jiffies after which a memo that holds no longer may go to another key.
const IDLE: u64 = 25;

/// Memos that what is like this may be in: two storms at once may have the same first place.
const WAYS: usize = 2;

/// Places of [`Memo::packets`].
const LEFT_OUT: usize = 0;
const QUIET: usize = 1;
const IN_SHORT: usize = 2;

/// SYN, RST and ACK of a TCP header's flags.
const TCP_FLAGS: u64 = 0x16;

/// Jiffies, of which a second has 1,000 at most, in which a hint or mark may wait for its packet: as long as the oldest one
/// that is used.
const HINTS_WAIT: u64 = 10_001;

/// What this CPU remembers of frees.
#[inline(always)]
pub(crate) fn here() -> Option<&'static mut Frees> {
    // SAFETY: this CPU's.
    FREES.get_ptr_mut(0).map(|frees| unsafe { &mut *frees })
}

/// A hint or mark was left: before a memo is used, it is asked for.
#[inline(always)]
pub(crate) fn hinted() {
    if let Some(until) = HINTED_UNTIL.get_ptr_mut(0) {
        // SAFETY: no precondition; a plain word that CPUs may overwrite, with about the same.
        unsafe { write_volatile(until, bpf_jiffies64() + HINTS_WAIT) };
    }
}

/// Which memo is for what is like this, the first or the second one, in a first step that goes by what differs most.
#[inline(always)]
const fn place(like: &Like, way: usize) -> usize {
    let mixed = (like.location >> 2)
        ^ like.reason
        ^ (like.packet[1] >> 56)
        ^ (like.packet[2] >> 24)
        ^ (like.packet[4] >> 56);
    (mixed ^ mixed >> 6) as usize & (MEMOS - 1) ^ way
}

/// Whether both are about the same device and network namespaces. These are still pointers, with which one may not calculate:
/// each is compared by itself, and read only then, lest the compiler make one of it.
#[inline(always)]
fn same_places(like: &Like, known: &Like) -> bool {
    like.device == kernel::anew(&known.device)
        && like.sk_net == kernel::anew(&known.sk_net)
        && like.rx_net == kernel::anew(&known.rx_net)
}

/// All words are compared at once: each comparison would be a fork for the verifier.
#[inline(always)]
fn differs(like: &Like, memo: &Memo) -> u64 {
    let known = &memo.like;
    let mut differs = (like.location ^ known.location)
        | (like.refdst ^ known.refdst)
        | (like.reason ^ known.reason)
        | (like.kind ^ known.kind);
    for index in 0..MEMO_WORDS {
        differs |= (like.packet[index] ^ known.packet[index]) & memo.mask[index];
    }
    differs
}

/// Counts a free that is like one before, and has no hint. False: it is to be looked at.
#[inline(always)]
pub(crate) fn counts(ctx: &impl Typed, frees: &mut Frees) -> bool {
    let Some(until) = HINTED_UNTIL.get(0) else {
        return false;
    };
    // SAFETY: no precondition.
    let (now, hinted) = unsafe { (bpf_jiffies64(), read_volatile(until)) };
    let skb = ctx.word(0);
    if now < hinted && hint::may_be_of(kernel::any(&mut frees.way, skb)) {
        return false;
    }
    let Some((like, linear)) = ctx.like(skb) else {
        return false;
    };
    counts_like(frees, &like, linear, now, |memo| {
        brief::of_free(skb, &like, linear, memo)
    })
}

/// Takes what a drop is like that its hook tells, whose packet is in the buffer. No place of a free is as low as the number of a
/// site.
#[inline(always)]
pub(crate) fn take_told(buffer: &mut EventBuffer, site: u16, netns: u32, extra: u32) {
    let EventBuffer { work, packet, .. } = buffer;
    take(&mut work.like, &work.skb, packet, 0);
    work.like.location = u64::from(site);
    work.like.reason = u64::from(extra);
    work.like.rx_net = u64::from(netns);
}

/// Counts a drop that its hook tells if it is like one before. False: it is to be looked at.
#[inline(always)]
pub(crate) fn counts_told(buffer: &EventBuffer) -> bool {
    let Some(frees) = here() else { return false };
    let like = &buffer.work.like;
    let linear = u64::from(buffer.work.skb.extent().linear);
    // SAFETY: no precondition.
    let now = unsafe { bpf_jiffies64() };
    counts_like(frees, like, linear, now, |memo| brief::of_told(buffer, memo))
}

/// Counts what is like this, and has so many bytes at hand, where a memo holds for it; `send` sends it in short, where that is
/// asked for, and says whether there was room.
#[inline(always)]
fn counts_like(frees: &mut Frees, like: &Like, linear: u64, now: u64, send: impl Fn(&Memo) -> bool) -> bool {
    for way in 0..WAYS {
        let memo = &mut frees.memos[place(like, way)];
        if holds(memo, now) && is_of(memo, like, linear) {
            if memo.quiet != 0 {
                kernel::count_up(&mut memo.packets[QUIET]);
            } else if brief::wanted() && send(memo) {
                kernel::count_up(&mut memo.packets[IN_SHORT]);
            } else {
                kernel::count_up(&mut memo.packets[LEFT_OUT]);
            }
            return true;
        }
    }
    false
}

/// Whether a memo of this CPU holds, and is not being written. Who interrupts this program may write it, but gives one that
/// holds no other key.
#[inline(always)]
fn holds(memo: &Memo, now: u64) -> bool {
    // SAFETY: valid references.
    let (serial, until) = unsafe {
        (
            read_volatile(&raw const memo.serial),
            read_volatile(&raw const memo.until),
        )
    };
    now < until && serial & 1 == 0
}

/// Whether a memo is of what is like this.
#[inline(always)]
fn is_of(memo: &Memo, like: &Like, linear: u64) -> bool {
    linear >= memo.least && same_places(like, &memo.like) && differs(like, memo) == 0
}

/// Adds to the value of the key in `work` what its memo counted since an event last said for how many it stands.
#[inline(always)]
pub(crate) fn settle(work: &Work, value: &mut CountValue) {
    let Some(frees) = here() else { return };
    for way in 0..WAYS {
        let memo = &mut frees.memos[place(&work.like, way)];
        if memo.serial & 1 == 0 && same(&memo.key, &work.key) {
            let left_out = memo.packets[LEFT_OUT] + memo.packets[IN_SHORT];
            value.skipped += left_out.wrapping_sub(memo.settled);
            memo.settled = left_out;
        }
    }
}

/// Notes that frees like this one are counted under the key in `work`.
#[inline(always)]
pub(crate) fn note(work: &Work, ifindex: u32, quiet: bool) {
    let Some((mask, least)) = matters(work) else {
        return;
    };
    let Some(frees) = here() else { return };
    for way in 0..WAYS {
        let memo = &mut frees.memos[place(&work.like, way)];
        if is_free_for(memo, &work.key) {
            write(memo, work, mask, least, ifindex, quiet);
            return;
        }
    }
}

/// Whether a memo may be of this key: it is, or holds for none of late. One that is being written is left to who does.
#[inline(always)]
fn is_free_for(memo: &Memo, key: &CountKey) -> bool {
    // SAFETY: a valid reference.
    let serial = unsafe { read_volatile(&raw const memo.serial) };
    // SAFETY: no precondition.
    let idle = serial == 0 || unsafe { bpf_jiffies64() } >= memo.until + IDLE;
    serial & 1 == 0 && (idle || same(&memo.key, key))
}

/// Makes a memo be of what is in `work`.
#[inline(always)]
fn write(memo: &mut Memo, work: &Work, mask: [u64; MEMO_WORDS], least: u64, ifindex: u32, quiet: bool) {
    // SAFETY: valid references, of this CPU's memo.
    unsafe {
        let serial = read_volatile(&raw const memo.serial);
        write_volatile(&raw mut memo.serial, serial + 1);
        if !same(&memo.key, &work.key) {
            hand_over(memo);
        }
        kernel::copy(&mut memo.like, &work.like);
        for (index, word) in mask.into_iter().enumerate() {
            write_volatile(&raw mut memo.mask[index], word);
        }
        memo.least = least;
        // Else it is that of the device that a packet came by, which may be another each time.
        let is_of_all = kernel::anew(&work.like.device) != 0 || kernel::anew(&work.skb.iif) == 0;
        memo.ifindex = if is_of_all { u64::from(ifindex) } else { 0 };
        memo.quiet = u64::from(quiet);
        kernel::copy(&mut memo.key, &work.key);
        memo.until = bpf_jiffies64() + if quiet { HOLDS_QUIET } else { 1 };
        write_volatile(&raw mut memo.serial, serial + 2);
    }
}

/// Gives what a memo counted to the value of its key in the map.
#[inline(always)]
fn hand_over(memo: &mut Memo) {
    if let Some(value) = COUNTS.get_ptr_mut(&memo.key) {
        // SAFETY: this CPU's value.
        let value = unsafe { &mut *value };
        let left_out = memo.packets[LEFT_OUT] + memo.packets[IN_SHORT];
        value.packets += left_out + memo.packets[QUIET];
        value.sampled += memo.packets[LEFT_OUT];
        value.skipped += left_out.wrapping_sub(memo.settled);
    }
    memo.settled = 0;
    // In this order, for those who read meanwhile.
    // SAFETY: valid references.
    unsafe {
        write_volatile(&raw mut memo.keys, memo.keys + 1);
        write_volatile(&raw mut memo.packets[LEFT_OUT], 0);
        write_volatile(&raw mut memo.packets[QUIET], 0);
        write_volatile(&raw mut memo.packets[IN_SHORT], 0);
    }
}

/// Which bits of the packet's words decide its key, and how many bytes it must have for that. None for a packet whose headers
/// are not at their usual places.
#[inline(always)]
fn matters(work: &Work) -> Option<([u64; MEMO_WORDS], u64)> {
    const TCP: u8 = IpProto::Tcp as u8;
    const UDP: u8 = IpProto::Udp as u8;
    const ICMP: u8 = IpProto::Icmp as u8;
    const ICMPV6: u8 = IpProto::Ipv6Icmp as u8;
    let protocol = work.tuple.protocol;
    let (v4, at) = if work.skb.ethertype() == ETH_P_IP {
        (true, 20)
    } else if work.skb.ethertype() == ETH_P_IPV6 {
        (false, 40)
    } else {
        return None;
    };
    let ports: u64 = if scope::has(SCOPE_PORT) {
        0xffff_ffff
    } else if work.key.bits & bits::DESTINATION_IPVS != 0 {
        0xffff_0000
    } else {
        0
    };
    let (first, flags, least) = match protocol {
        TCP => (ports, TCP_FLAGS, at + 14),
        UDP => (ports, 0, at + 4),
        ICMP | ICMPV6 => (0xff, 0, at + 4),
        _ => return None,
    };
    if v4 {
        // Version and length of the header, fragment, protocol, addresses.
        if work.like.packet[0] & 0xff != 0x45 {
            return None;
        }
        Some((
            [
                0xff1f_0000_0000_00ff,
                0xffff_ffff_0000_ff00,
                0xffff_ffff | first << 32,
                0,
                flags << 8,
                0,
                0,
            ],
            least,
        ))
    } else {
        // Version, next header, addresses.
        Some((
            [
                0x00ff_0000_0000_00f0,
                u64::MAX,
                u64::MAX,
                u64::MAX,
                u64::MAX,
                first,
                flags << 40,
            ],
            least,
        ))
    }
}

/// Takes what a free is like from what was read of it.
#[inline(always)]
pub(crate) fn take(like: &mut Like, skb: &SkBuff, packet_bytes: &[u8; PACKET_MAX], rx_sk: u64) {
    like.device = skb.device();
    like.refdst = skb.refdst;
    like.sk_net = skb.sk_net();
    like.rx_net = if rx_sk == 0 { 0 } else { kernel::net_of_sock(rx_sk) };
    like.kind = skb.kind();
    for index in 0..MEMO_WORDS {
        let word: u64 = packet::word(packet_bytes, index * 8);
        // SAFETY: a valid reference; volatile, since the compiler's own way would be a loop over bytes.
        unsafe { write_volatile(&raw mut like.packet[index], word) };
    }
}

/// Whether both keys are one.
#[inline(always)]
fn same(one: &CountKey, other: &CountKey) -> bool {
    const { assert!(size_of::<CountKey>() == 24) };
    // SAFETY: three aligned words, all of which are initialised.
    let [one, other] = [one, other].map(|key| unsafe { &*(&raw const *key).cast::<[u64; 3]>() });
    (one[0] ^ other[0]) | (one[1] ^ other[1]) | (one[2] ^ other[2]) == 0
}
