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
/// A synchronous hint is consumed within microseconds; an older one belongs to another packet.
const STALE_NS: u64 = 50_000_000;
/// A CPU mark is consumed by the very next free of a packet like it.
const MARK_STALE_NS: u64 = 20_000_000;

/// What is known about a packet.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Hint {
    pub(crate) ktime_ns: u64,
    /// Counter value to compare with at the free; see the site.
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

/// Whether a hint waits for this packet.
#[inline(always)]
pub(crate) fn waits(skb: u64) -> bool {
    // SAFETY: only asks whether there is one.
    unsafe { HINTS.get(skb) }.is_some()
}

/// The hint of a packet that is being freed, if it is fresh. The caller removes it afterwards.
#[inline(always)]
pub(crate) fn find(skb: u64, now: u64) -> Option<&'static Hint> {
    // SAFETY: an entry of an LRU map may be reused by another CPU while we read it; it stays mapped.
    let hint = unsafe { HINTS.get(skb) }?;
    if now.wrapping_sub(hint.ktime_ns) < STALE_NS {
        Some(hint)
    } else {
        emit::tally(Tally::HintsStale);
        None
    }
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

/// The mark of this CPU, if it is about such a packet; it is used up.
#[inline(always)]
pub(crate) fn take_mark(tuple: &Tuple, has_conntrack: bool, now: u64) -> Option<&'static Hint> {
    // SAFETY: this CPU's slot.
    let mark = unsafe { &mut *MARKS.get_ptr_mut(0)? };
    if mark.hint.ktime_ns == 0 {
        return None;
    }
    if now.wrapping_sub(mark.hint.ktime_ns) > MARK_STALE_NS {
        mark.hint.ktime_ns = 0;
        emit::tally(Tally::HintsStale);
        return None;
    }
    let fits = if mark.hint.site == Site::ConntrackTableFull as u16 {
        !has_conntrack
    } else {
        mark.tuple.src == tuple.src
            && mark.tuple.dst == tuple.dst
            && mark.tuple.sport == tuple.sport
            && mark.tuple.dport == tuple.dport
    };
    if !fits {
        return None;
    }
    mark.hint.ktime_ns = 0;
    emit::tally(Tally::HintsConsumed);
    Some(&mark.hint)
}
