//! Hints: what a context hook knows about a packet whose free is still to come.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use droptrace_common::{Field, Site, Tally, bits};

use crate::{
    emit::{self, Fields},
    kernel,
    maps::{HINTS, MARKS},
    memo,
    packet::{self, Tuple},
};

/// Fields that a hint can carry.
pub(crate) const HINT_FIELDS: usize = 24;
/// A synchronous hint is consumed within microseconds, unless the CPU stalls (a hypervisor that gives it to others, a
/// sender that is preempted); an older one may belong to another packet, unless that has the same first bytes.
const STALE_NS: u64 = 50_000_000;
/// Even then: what a peer sends again, or regularly, has the same first bytes, and comes no sooner as a rule (`TCP_TIMEOUT_INIT`,
/// include/net/tcp.h).
const STALE_WITH_BYTES_NS: u64 = 1_000_000_000;
/// The same where the hint names the packet's conntrack entry, too: longer than a CPU stalls without a complaint of the kernel.
const STALE_WITH_ENTRY_NS: u64 = 10_000_000_000;
/// A CPU mark is consumed by the very next free of a packet like it.
const MARK_STALE_NS: u64 = 20_000_000;

/// What is known about a packet.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Hint {
    pub(crate) ktime_ns: u64,
    /// To compare with at the free: IPReversePathFilter ([`Site::MartianSource`]) or the address of the packet's
    /// conntrack entry ([`Site::ConntrackClash`]).
    pub(crate) before: u64,
    /// The packet's [`packet::first_bytes`].
    pub(crate) first_bytes: u64,
    pub(crate) netns: u32,
    pub(crate) bits: u32,
    pub(crate) site: u16,
    pub(crate) pad: [u16; 3],
    pub(crate) fields: [Field; HINT_FIELDS],
}

/// What is known about the next packet that fits.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    /// The packet must be of this flow; all zero for any that has no conntrack entry.
    pub(crate) tuple: Tuple,
    pub(crate) hint: Hint,
}

/// Leaves a hint for the free of this packet. `fill` adds its fields.
#[inline(always)]
pub(crate) fn leave(
    skb: u64,
    site: Site,
    netns: u32,
    bits: u32,
    before: u64,
    fill: impl FnOnce(&mut Fields<'_>),
) {
    let Some(buffer) = emit::acquire() else { return };
    let hint = &mut buffer.hint;
    kernel::empty(&mut hint.fields);
    fill(&mut Fields::new_hint(&mut hint.fields));
    // SAFETY: no precondition.
    hint.ktime_ns = unsafe { bpf_ktime_get_ns() };
    hint.before = before;
    hint.first_bytes = packet::first_bytes(skb);
    hint.netns = netns;
    hint.bits = bits;
    hint.site = site as u16;
    memo::hinted();
    // SAFETY: only asks whether there is one.
    let fresh = unsafe { HINTS.get(skb) }.is_none();
    if HINTS.insert(skb, &*hint, 0).is_ok() && fresh && !goes_on(site as u16) {
        emit::tally(Tally::HintsLeft);
    }
    emit::release(buffer);
}

/// Whether a hint waits for this packet that tells of its end; one that no free consumed is of an earlier packet.
#[inline(always)]
pub(crate) fn waits(skb: u64) -> bool {
    // SAFETY: an entry of an LRU map may be reused by another CPU while we read it; it stays mapped.
    let Some(hint) = (unsafe { HINTS.get(skb) }) else {
        return false;
    };
    // SAFETY: no precondition.
    let now = unsafe { bpf_ktime_get_ns() };
    !goes_on(hint.site) && is_current(hint, skb, now)
}

/// Whether a hint or mark may tell of this packet.
#[inline(always)]
pub(crate) fn may_be_of(skb: u64) -> bool {
    // SAFETY: as in `waits`; only asks whether there is one.
    let hint = unsafe { HINTS.get(skb) }.is_some();
    // SAFETY: this CPU's slot.
    hint || MARKS
        .get_ptr_mut(0)
        .is_none_or(|mark| unsafe { (*mark).hint.ktime_ns } != 0)
}

/// Whether it is young enough to be of this packet, by its first bytes if need be.
#[inline(always)]
fn is_current(hint: &Hint, skb: u64, now: u64) -> bool {
    let age = now.wrapping_sub(hint.ktime_ns);
    age < STALE_NS || age < STALE_WITH_BYTES_NS && packet::has_first_bytes(skb, hint.first_bytes)
}

/// Whether a hint that the packet goes on with waits for it: one that was left for its first bytes.
#[inline(always)]
pub(crate) fn goes_on_with(skb: u64) -> bool {
    // SAFETY: as in `waits`.
    unsafe { HINTS.get(skb) }
        .is_some_and(|hint| goes_on(hint.site) && packet::has_first_bytes(skb, hint.first_bytes))
}

/// Turns the hint of one site that waits for this packet into that of another; false where none does.
#[inline(always)]
pub(crate) fn turn(skb: u64, from: Site, into: Site) -> bool {
    let Some(hint) = HINTS.get_ptr_mut(skb) else {
        return false;
    };
    // SAFETY: an entry of an LRU map may be reused by another CPU while we use it; it stays mapped.
    let hint = unsafe { &mut *hint };
    let turned = hint.site == from as u16 && packet::has_first_bytes(skb, hint.first_bytes);
    if turned {
        hint.site = into as u16;
    }
    turned
}

/// Whether a packet goes on after the hook that leaves a hint with this site, and may end as it likes, or not at all. Such
/// a hint tells of a packet without a conntrack entry, and is no orphan where no free consumes it.
#[inline(always)]
pub(crate) const fn goes_on(site: u16) -> bool {
    site >= Site::ConntrackInvalid as u16 && site <= Site::ConntrackInvalidReset as u16
}

/// Takes what a hint or a mark tells of a packet with this conntrack entry that is being freed. Where neither tells
/// anything, the site is that of a free. Copied, so that no path of the verifier carries a pointer on.
#[inline(always)]
pub(crate) fn take(into: &mut Hint, skb: u64, entry: u64, tuple: &Tuple, now: u64) {
    forget(into);
    // SAFETY: an entry of an LRU map may be reused by another CPU while we read it; it stays mapped.
    if let Some(hint) = unsafe { HINTS.get(skb) } {
        kernel::copy(into, hint);
        judge(into, skb, entry, now);
        // Whatever it was worth: the address is free for another packet now.
        let _ = HINTS.remove(skb);
    }
    if into.site == Site::Free as u16 && into.bits == 0 {
        take_mark(into, tuple, entry != 0, now);
    }
}

/// Makes it the hint that tells nothing.
#[inline(always)]
fn forget(hint: &mut Hint) {
    hint.site = Site::Free as u16;
    hint.netns = 0;
    hint.bits = 0;
}

/// Forgets a hint that is of another packet, or may be: for a netfilter verdict, which was seen too long ago to be sure
/// that it was this packet's, the bit is left.
#[inline(always)]
fn judge(hint: &mut Hint, skb: u64, entry: u64, now: u64) {
    if goes_on(hint.site) {
        let age = now.wrapping_sub(hint.ktime_ns);
        if entry != 0 || age >= STALE_WITH_BYTES_NS || !packet::has_first_bytes(skb, hint.first_bytes) {
            forget(hint);
        }
        return;
    }
    let clash = hint.site == Site::ConntrackClash as u16;
    // NF_DROP leaves the packet its entry (`nf_ct_resolve_clash`, net/netfilter/nf_conntrack_core.c, 5.10 - 7.3): with
    // another one it is another packet.
    let other = clash && hint.before != entry;
    let current = if clash {
        now.wrapping_sub(hint.ktime_ns) < STALE_WITH_ENTRY_NS
    } else {
        is_current(hint, skb, now)
    };
    if !other && current {
        emit::tally(Tally::HintsConsumed);
        return;
    }
    emit::tally(Tally::HintsStale);
    let verdict = !other && is_verdict(hint.site);
    forget(hint);
    if verdict {
        hint.bits = bits::STALE_HINT;
    }
}

/// Whether netfilter drops the packet at the hook that leaves a hint with this site: without the hint, the free looks
/// like that of a rule.
#[inline(always)]
const fn is_verdict(site: u16) -> bool {
    site == Site::ConntrackClash as u16
        || site == Site::ConntrackTableFull as u16
        || site == Site::IpvsNoDestination as u16
        || site == Site::IpvsExpired as u16
        || site == Site::IpvsReuseDropped as u16
        || site == Site::IpvsDestinationGone as u16
        || site == Site::NetfilterReject as u16
        || site == Site::ConntrackHelper as u16
}

/// Leaves a mark on this CPU.
#[inline(always)]
pub(crate) fn mark(site: Site, tuple: &Tuple, netns: u32, fill: impl FnOnce(&mut Fields<'_>)) {
    let Some(mark) = MARKS.get_ptr_mut(0) else { return };
    // SAFETY: this CPU's slot.
    let mark = unsafe { &mut *mark };
    kernel::empty(&mut mark.hint.fields);
    fill(&mut Fields::new_hint(&mut mark.hint.fields));
    kernel::copy(&mut mark.tuple, tuple);
    mark.hint.netns = netns;
    mark.hint.bits = 0;
    mark.hint.before = 0;
    mark.hint.first_bytes = 0;
    mark.hint.site = site as u16;
    // SAFETY: no precondition.
    mark.hint.ktime_ns = unsafe { bpf_ktime_get_ns() };
    memo::hinted();
    emit::tally(Tally::HintsLeft);
}

/// Takes what the mark of this CPU tells of such a packet; it is used up.
#[inline(always)]
fn take_mark(into: &mut Hint, tuple: &Tuple, has_conntrack: bool, now: u64) {
    let Some(mark) = MARKS.get_ptr_mut(0) else { return };
    // SAFETY: this CPU's slot.
    let mark = unsafe { &mut *mark };
    if mark.hint.ktime_ns == 0 {
        return;
    }
    let fits = if mark.hint.site == Site::ConntrackTableFull as u16 {
        !has_conntrack
    } else {
        mark.tuple.same_endpoints(tuple)
    };
    let stale = now.wrapping_sub(mark.hint.ktime_ns) > MARK_STALE_NS;
    if !fits && !stale {
        return;
    }
    mark.hint.ktime_ns = 0;
    if !stale {
        emit::tally(Tally::HintsConsumed);
        kernel::copy(into, &mark.hint);
        return;
    }
    emit::tally(Tally::HintsStale);
    if fits {
        into.bits = bits::STALE_HINT;
    }
}
