//! Exact counts: made in the kernel, per CPU, before anything is sampled.

use crate::Site;

/// What is counted apart. The catalogue maps every key to exactly one cause.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CountKey {
    /// See [`crate::EventHeader::location`].
    pub location: u64,
    /// See [`crate::EventHeader::netns`].
    pub netns: u32,
    /// See [`crate::EventHeader::reason`].
    pub reason: u32,
    /// See [`crate::EventHeader::bits`].
    pub bits: u32,
    /// A [`crate::Site`].
    pub site: u16,
    /// Zero.
    pub pad: u16,
}

impl CountKey {
    /// The place that the key of a drop holds: where a hook saw what it is, mostly none.
    pub const fn place(site: Option<Site>, location: u64) -> u64 {
        match site {
            Some(Site::Free) | None => location,
            Some(site) if site.needs_place() => location,
            Some(_) => 0,
        }
    }
}

/// One CPU's count of a key, and the token bucket that decides which of its
/// events travel whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountValue {
    /// Packets dropped.
    pub packets: u64,
    /// Of these, sent as full events.
    pub sent: u64,
    /// Not sent, in full or in short, because the ring was full.
    pub ring_full: u64,
    /// Not sent because the key's token bucket was empty; one that travelled in short is not among them.
    pub sampled: u64,
    /// Events not sent in full since the last one that was.
    pub skipped: u64,
    /// Tokens left in the bucket.
    pub tokens: u64,
    /// When the bucket was last filled, in nanoseconds of the monotonic clock.
    pub filled_ns: u64,
}

/// Indexes of the per-CPU tally array: what droptrace itself lost or left over.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tally {
    /// Drops whose key did not fit into the count map: they are in no cause's total.
    KeysLost = 0,
    /// Hints left by context hooks.
    HintsLeft = 1,
    /// Hints that a free consumed.
    HintsConsumed = 2,
    /// Hints found too old, hence not used.
    HintsStale = 3,
    /// Exits whose entry was overwritten by a nested call, hence not judged.
    ExitsUnpaired = 4,
    /// Frees that later programs of `skb:kfree_skb` took over from the first, which the kernel had passed over.
    FreesTakenOver = 5,
    /// Calls of programs that found no free buffer, hence did nothing.
    BuffersTaken = 6,
}

/// Number of tallies.
pub const TALLIES: u32 = 7;

/// Keys none of whose events is wanted, at most.
pub const QUIET_MAX: u32 = 1024;

/// What travels of the drops. Read-only for the programs, set before they are loaded.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// Nanoseconds in which a count key earns one full event, on each CPU.
    pub token_ns: u64,
    /// Full events that a key can have saved up.
    pub burst: u64,
    /// Whether drops without a full event travel as brief records: 1 or 0.
    pub briefs: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Sampling {
    /// 100 events per second for each key and CPU, and 200 at once: more than anyone reads.
    pub const DEFAULT: Self = Self {
        token_ns: 10_000_000,
        burst: 200,
        briefs: 0,
    };

    /// Every drop, as far as the rings have room: those beyond [`Sampling::DEFAULT`] in short.
    pub const EVERY: Self = Self {
        briefs: 1,
        ..Self::DEFAULT
    };

    /// Bytes of the largest ring.
    pub const RING_MAX: u32 = 4 << 20;

    /// Bytes of the ring on a host with so many CPUs: more than twice what a key can have saved up on each, at the largest size of an
    /// event. Each page of it counts twice for the process that reads it, hence no more.
    pub const fn ring_bytes(cpus: u32) -> u32 {
        const EACH_CPU: u32 = 512 << 10;
        let wanted = cpus.saturating_mul(EACH_CPU);
        if wanted >= Self::RING_MAX {
            Self::RING_MAX
        } else if wanted <= EACH_CPU {
            EACH_CPU * 2
        } else {
            wanted.next_power_of_two()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EVENT_MAX;

    #[test]
    fn the_ring_holds_what_a_key_can_have_saved_up() {
        for cpus in 1..=8 {
            let burst = Sampling::DEFAULT.burst * u64::from(cpus) * EVENT_MAX as u64;
            let ring = Sampling::ring_bytes(cpus);
            assert!(
                ring.is_power_of_two() && u64::from(ring) >= burst,
                "{cpus}: {ring}"
            );
        }
        assert_eq!(Sampling::ring_bytes(1), 1 << 20);
        assert_eq!(Sampling::ring_bytes(u32::MAX), Sampling::RING_MAX);
    }
}
