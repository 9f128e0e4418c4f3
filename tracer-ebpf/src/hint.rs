//! Hints: what a context hook knows about a packet whose free is still to come.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use droptrace_common::{Field, Site, Tally};

use crate::{
    emit::{self, Fields},
    kernel,
    maps::{HINTS, MARKS},
    packet::Tuple,
};

/// Fields that a hint can carry.
pub(crate) const HINT_FIELDS: usize = 24;
/// A synchronous hint is consumed within microseconds, unless the CPU stalls (a hypervisor that gives it to others, a
/// sender that is preempted); an older one may belong to another packet.
const STALE_NS: u64 = 50_000_000;
/// The same where the hint names the packet's conntrack entry, too: longer than a CPU stalls without a complaint of the kernel.
const STALE_WITH_ENTRY_NS: u64 = 10_000_000_000;
/// A CPU mark is consumed by the very next free of a packet like it.
const MARK_STALE_NS: u64 = 20_000_000;

/// What is known about a packet.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Hint {
    pub(crate) ktime_ns: u64,
    /// To compare with at the free: IPReversePathFilter ([`Site::MartianSource`]), or the address of the packet's
    /// conntrack entry ([`Site::ConntrackClash`]).
    pub(crate) before: u64,
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
    hint.netns = netns;
    hint.bits = bits;
    hint.site = site as u16;
    // SAFETY: only asks whether there is one.
    let fresh = unsafe { HINTS.get(skb) }.is_none();
    if HINTS.insert(skb, &*hint, 0).is_ok() && fresh {
        emit::tally(Tally::HintsLeft);
    }
    emit::release();
}

/// Whether a hint waits for this packet; one that no free consumed is of an earlier packet.
#[inline(always)]
pub(crate) fn waits(skb: u64) -> bool {
    // SAFETY: an entry of an LRU map may be reused by another CPU while we read it; it stays mapped.
    let Some(hint) = (unsafe { HINTS.get(skb) }) else {
        return false;
    };
    // SAFETY: no precondition.
    unsafe { bpf_ktime_get_ns() }.wrapping_sub(hint.ktime_ns) < STALE_NS
}

/// What a hint or a mark tells of a packet that is being freed.
#[derive(Clone, Copy)]
pub(crate) enum Told {
    /// Nothing.
    Nothing,
    /// It is about this packet.
    Hint(&'static Hint),
    /// A netfilter verdict was seen, but too long ago to be sure that it was this packet's.
    Stale,
}

/// The hint of a packet with this conntrack entry that is being freed. The caller removes it afterwards.
#[inline(always)]
pub(crate) fn find(skb: u64, entry: u64, now: u64) -> Told {
    // SAFETY: an entry of an LRU map may be reused by another CPU while we read it; it stays mapped.
    let Some(hint) = (unsafe { HINTS.get(skb) }) else {
        return Told::Nothing;
    };
    let age = now.wrapping_sub(hint.ktime_ns);
    if hint.site == Site::ConntrackClash as u16 {
        // NF_DROP leaves the packet its entry (`nf_ct_resolve_clash`, net/netfilter/nf_conntrack_core.c, 5.10 - 7.3):
        // with another one it is another packet.
        if hint.before != entry {
            emit::tally(Tally::HintsStale);
            return Told::Nothing;
        }
        if age < STALE_WITH_ENTRY_NS {
            return Told::Hint(hint);
        }
    } else if age < STALE_NS {
        return Told::Hint(hint);
    }
    emit::tally(Tally::HintsStale);
    if is_verdict(hint.site) {
        Told::Stale
    } else {
        Told::Nothing
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
    mark.hint.site = site as u16;
    // SAFETY: no precondition.
    mark.hint.ktime_ns = unsafe { bpf_ktime_get_ns() };
    emit::tally(Tally::HintsLeft);
}

/// What the mark of this CPU tells of such a packet; it is used up.
#[inline(always)]
pub(crate) fn take_mark(tuple: &Tuple, has_conntrack: bool, now: u64) -> Told {
    let Some(mark) = MARKS.get_ptr_mut(0) else {
        return Told::Nothing;
    };
    // SAFETY: this CPU's slot.
    let mark = unsafe { &mut *mark };
    if mark.hint.ktime_ns == 0 {
        return Told::Nothing;
    }
    let fits = if mark.hint.site == Site::ConntrackTableFull as u16 {
        !has_conntrack
    } else {
        mark.tuple.src == tuple.src
            && mark.tuple.dst == tuple.dst
            && mark.tuple.sport == tuple.sport
            && mark.tuple.dport == tuple.dport
    };
    let stale = now.wrapping_sub(mark.hint.ktime_ns) > MARK_STALE_NS;
    if !fits && !stale {
        return Told::Nothing;
    }
    mark.hint.ktime_ns = 0;
    if !stale {
        emit::tally(Tally::HintsConsumed);
        return Told::Hint(&mark.hint);
    }
    emit::tally(Tally::HintsStale);
    if fits { Told::Stale } else { Told::Nothing }
}
