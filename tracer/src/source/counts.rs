//! The exact counts: keys as the kernel made them, causes as the catalogue names them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use anyhow::Context as _;
use aya::{
    Ebpf,
    maps::{MapData, PerCpuArray, PerCpuHashMap, PerCpuValues},
};
use droptrace_common::{CountKey, CountValue, EventHeader, Frees, Site, Tally, bits};

use super::take_map;
use crate::{
    diagnose::{
        Cause, CauseCount, Counts, Signature, Split, Tallied, Verdict, cause_by_slug, classify, perhaps,
    },
    plan::{Reasons, Symbols},
};

/// How often the counts are read at most until no memo changes hands meanwhile.
const READINGS: u32 = 8;

/// Reads the maps of counts.
pub struct CountReader {
    counts: PerCpuHashMap<MapData, CountKey, CountValue>,
    tallies: PerCpuArray<MapData, u64>,
    quiet: aya::maps::HashMap<MapData, CountKey, u32>,
    frees: PerCpuArray<MapData, Frees>,
}

/// What the kernel counted, summed over its CPUs.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// By key: packets, events lost to a full ring, events left out by sampling.
    pub keys: Vec<(CountKey, CountValue)>,
    /// By [`Tally`].
    pub tallies: [u64; droptrace_common::TALLIES as usize],
}

impl CountReader {
    /// Takes the maps out of the loaded object.
    ///
    /// # Errors
    /// A map is missing.
    pub fn open(ebpf: &mut Ebpf) -> anyhow::Result<Self> {
        Ok(Self {
            counts: take_map(ebpf, "COUNTS")?,
            tallies: take_map(ebpf, "TALLIES_MAP")?,
            quiet: take_map(ebpf, "QUIET")?,
            frees: take_map(ebpf, "FREES")?,
        })
    }

    /// Has the kernel send no more events like this one, which nobody wants to see; it goes on counting them. Where the map
    /// has no room, they are sent and left out here.
    pub fn hush(&mut self, header: &EventHeader) {
        let _ = self.quiet.insert(header.key(), 1, 0);
    }

    /// Has the kernel send all events again: what they are may be known better now.
    pub fn unhush(&mut self) {
        let keys: Vec<_> = self.quiet.keys().filter_map(Result::ok).collect();
        for key in keys {
            let _ = self.quiet.remove(&key);
        }
    }

    /// What each key counts, in the map and in memos.
    fn read_keys(&self) -> anyhow::Result<Vec<(CountKey, CountValue)>> {
        let memos = || self.frees.get(&0, 0).context("cannot read the memos");
        let mut before = memos()?;
        let mut left = READINGS;
        loop {
            let mut keys = Vec::new();
            let mut places = HashMap::new();
            for entry in &self.counts {
                let (key, values) = entry.context("cannot read the counts")?;
                let sum = values
                    .iter()
                    .fold(CountValue::default(), |sum, value| CountValue {
                        packets: sum.packets + value.packets,
                        sent: sum.sent + value.sent,
                        ring_full: sum.ring_full + value.ring_full,
                        sampled: sum.sampled + value.sampled,
                        ..sum
                    });
                places.insert(key, keys.len());
                keys.push((key, sum));
            }
            let after = memos()?;
            left -= 1;
            if left > 0 && !same_memos(&before, &after) {
                before = after;
                continue;
            }
            // A memo is made of a key that the map has; one made since is counted the next time.
            for memo in after
                .iter()
                .flat_map(|frees| &frees.memos)
                .filter(|memo| memo.serial != 0)
            {
                if let Some(place) = places.get(&memo.key) {
                    let value = &mut keys[*place].1;
                    value.packets += memo.packets.iter().sum::<u64>();
                    value.sampled += memo.packets[0];
                }
            }
            return Ok(keys);
        }
    }

    /// Reads them.
    ///
    /// # Errors
    /// The kernel refuses to read a map.
    pub fn read(&self) -> anyhow::Result<Totals> {
        let mut totals = Totals {
            keys: self.read_keys()?,
            ..Totals::default()
        };
        for (index, tally) in totals.tallies.iter_mut().enumerate() {
            *tally = self
                .tallies
                .get(&(index as u32), 0)
                .context("cannot read the tallies")?
                .iter()
                .sum();
        }
        Ok(totals)
    }
}

/// Whether no memo was written, or gave its counts to the map, between these two readings.
fn same_memos(before: &PerCpuValues<Frees>, after: &PerCpuValues<Frees>) -> bool {
    let before = before.iter().flat_map(|frees| &frees.memos);
    let after = after.iter().flat_map(|frees| &frees.memos);
    before
        .zip(after)
        .all(|(before, after)| before.keys == after.keys && after.serial & 1 == 0)
}

/// What a key is.
#[derive(Clone, Copy)]
struct Named {
    cause: &'static Cause,
    verdict: Verdict,
    perhaps: Option<&'static str>,
}

/// Names the causes of what the kernel counted.
pub struct Ledger {
    symbols: Arc<Symbols>,
    reasons: Arc<Reasons>,
    /// Cause of a key, found once.
    causes: HashMap<CountKey, Named>,
    /// Packets that full events moved from a cause to its sister: (from, to, netns, verdicts) → packets.
    refined: BTreeMap<(&'static str, &'static str, u32, Verdict, Verdict), u64>,
    /// Packets that no hook saw and a counter told.
    by_counter: BTreeMap<(&'static str, u32, Verdict), u64>,
}

impl Ledger {
    /// An empty ledger for this kernel's names.
    pub fn new(symbols: Arc<Symbols>, reasons: Arc<Reasons>) -> Self {
        Self {
            symbols,
            reasons,
            causes: HashMap::new(),
            refined: BTreeMap::new(),
            by_counter: BTreeMap::new(),
        }
    }

    /// A module came or went: the kernel's names changed, and an address may have belonged to none of them before.
    pub fn set_names(&mut self, symbols: Arc<Symbols>, reasons: Arc<Reasons>) {
        self.symbols = symbols;
        self.reasons = reasons;
        self.causes.clear();
    }

    /// Notes that a full event told a sister cause apart.
    pub fn refine(
        &mut self,
        from: (&'static str, Verdict),
        to: (&'static str, Verdict),
        netns: u32,
        packets: u64,
    ) {
        *self
            .refined
            .entry((from.0, to.0, netns, from.1, to.1))
            .or_default() += packets;
    }

    /// Takes packets into the totals that a counter alone told.
    pub fn told_by_counter(&mut self, cause: &'static str, verdict: Verdict, netns: u32, packets: u64) {
        *self.by_counter.entry((cause, netns, verdict)).or_default() += packets;
    }

    /// What the key alone tells.
    pub(super) fn told_by(&mut self, key: &CountKey) -> (&'static Cause, Verdict) {
        let named = self.cause(key);
        (named.cause, named.verdict)
    }

    fn cause(&mut self, key: &CountKey) -> Named {
        if let Some(known) = self.causes.get(key) {
            return *known;
        }
        let reason = self.reasons.name(key.reason);
        let location = if key.location == 0 {
            None
        } else {
            self.symbols.name(key.location)
        };
        let signature = Signature::of_key(key, reason.as_deref(), location);
        let cause = classify(&signature);
        let known = Named {
            cause,
            verdict: (cause.verdict)(&signature),
            perhaps: perhaps(&signature, cause.slug),
        };
        self.causes.insert(*key, known);
        known
    }

    /// The totals as far as counters of the kernel witness them.
    pub fn tallied(&mut self, totals: &Totals) -> Vec<Tallied> {
        let mut tallied: Vec<Tallied> = totals
            .keys
            .iter()
            .filter(|(key, _)| key.bits & bits::DIED_AS == 0)
            .map(|(key, value)| {
                let named = self.cause(key);
                Tallied {
                    cause: named.cause.slug,
                    netns: key.netns,
                    bits: key.bits,
                    packets: value.packets,
                    perhaps: named.perhaps,
                    by_counter: false,
                }
            })
            .collect();
        tallied.extend(
            self.by_counter
                .iter()
                .map(|((cause, netns, _), packets)| Tallied {
                    cause,
                    netns: *netns,
                    bits: 0,
                    packets: *packets,
                    perhaps: None,
                    by_counter: true,
                }),
        );
        tallied
    }

    /// The totals by cause.
    /// `passed_over` is what [`crate::plan::Loaded::passed_over`] tells.
    pub fn counts(
        &mut self,
        totals: &Totals,
        mut passed_over: BTreeMap<&'static str, u64>,
        time: String,
    ) -> Counts {
        let mut packets: BTreeMap<(&'static str, u32, Verdict), (u64, bool)> = BTreeMap::new();
        let mut counts = Counts {
            time,
            ..Counts::default()
        };
        for (key, value) in &totals.keys {
            if key.site == Site::ConntrackClashResolved as u16 {
                counts.clashes_resolved += value.packets;
            }
            // The later end of a packet that was counted when it was sent astray.
            if key.bits & bits::DIED_AS != 0 {
                continue;
            }
            let Named { cause, verdict, .. } = self.cause(key);
            packets
                .entry((cause.slug, key.netns, verdict))
                .or_insert((0, cause.benign))
                .0 += value.packets;
            let lost = value.ring_full + value.sampled;
            if lost > 0 {
                counts.lost_events += lost;
                *counts.lost.entry(cause.slug.to_owned()).or_default() += lost;
            }
        }
        let mut sampled: BTreeSet<(&'static str, u32, Verdict)> = BTreeSet::new();
        for ((from, to, netns, before, after), moved) in &self.refined {
            let Some((left, _)) = packets.get_mut(&(*from, *netns, *before)) else {
                continue;
            };
            let moved = (*moved).min(*left);
            *left -= moved;
            let benign = cause_by_slug(to).is_some_and(|cause| cause.benign);
            packets.entry((to, *netns, *after)).or_insert((0, benign)).0 += moved;
            sampled.insert((from, *netns, *before));
            sampled.insert((to, *netns, *after));
        }
        for ((slug, netns, verdict), told) in &self.by_counter {
            packets.entry((slug, *netns, *verdict)).or_insert((0, false)).0 += told;
        }
        counts.causes = packets
            .into_iter()
            .filter(|(_, (packets, _))| *packets > 0)
            .map(|((slug, netns, verdict), (packets, benign))| CauseCount {
                cause: slug.to_owned(),
                netns,
                verdict,
                benign,
                packets,
                split: if sampled.contains(&(slug, netns, verdict)) {
                    Split::Sampled
                } else {
                    Split::Exact
                },
            })
            .collect();
        let tally = |which: Tally| totals.tallies[which as usize];
        // What later programs of the tracepoint took over from the first is not lost.
        for later in ["kfree_skb_preempted", "kfree_skb_again"] {
            passed_over.remove(later);
        }
        let frees = passed_over.remove("kfree_skb").unwrap_or(0);
        let frees_lost = frees.saturating_sub(tally(Tally::FreesTakenOver));
        if frees_lost > 0 {
            passed_over.insert("kfree_skb", frees_lost);
        }
        counts.passed_over = passed_over
            .into_iter()
            .map(|(hook, calls)| (hook.to_owned(), calls))
            .collect();
        counts.uncounted = tally(Tally::KeysLost) + tally(Tally::BuffersTaken) + frees_lost;
        counts.hints_orphaned = tally(Tally::HintsLeft).saturating_sub(tally(Tally::HintsConsumed));
        counts
    }
}
