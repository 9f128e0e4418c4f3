//! Labels of brief records: found once for what the kernel counts as the same, and then again with each full event of it.

use std::collections::{BTreeMap, HashMap};

use droptrace_common::{BriefEvent, CountKey};

use super::Ledger;
use crate::diagnose::{Cause, Drop, Facts, Label, RawEvent, Split, Verdict, cause_by_slug};

/// Names of devices that are kept.
const DEVICES_MAX: usize = 16_384;

/// What is known of a key.
struct Known {
    /// The cause that the key alone tells.
    parent: (&'static Cause, Verdict),
    /// The cause of the last full event.
    cause: (&'static Cause, Verdict),
    like: Option<u64>,
    netns_name: Option<String>,
    pod: Option<String>,
    container: Option<String>,
    /// Brief records that had another cause than the parent, since the ledger was told.
    moved: u64,
}

/// Labels by count key.
#[derive(Default)]
pub struct Labels {
    places: HashMap<CountKey, usize>,
    known: Vec<Known>,
    /// Where the last one was: the next is mostly like it.
    last: Option<(CountKey, usize)>,
    /// Names of devices, by netns and index.
    devices: BTreeMap<(u32, u32), String>,
}

impl Labels {
    /// Takes over what a full event told of all that is counted as it was.
    pub fn learn(&mut self, event: &RawEvent, facts: &Facts, drop: &Drop, ledger: &mut Ledger) {
        let key = event.header.key();
        let place = self.place(&key, ledger);
        let Some(cause) = cause_by_slug(&drop.cause) else {
            return;
        };
        let known = &mut self.known[place];
        if known.cause != (cause, drop.verdict) {
            known.tell(key.netns, ledger);
        }
        known.cause = (cause, drop.verdict);
        known.like = Some(drop.ktime_ns);
        known.netns_name.clone_from(&drop.netns_name);
        known.pod.clone_from(&drop.pod);
        known.container.clone_from(&drop.container);
        if self.devices.len() > DEVICES_MAX {
            self.devices.clear();
        }
        for (index, name) in &facts.devices {
            self.devices
                .entry((key.netns, *index))
                .or_default()
                .clone_from(name);
        }
    }

    /// The label of a brief record.
    pub fn of(&mut self, event: &BriefEvent, ledger: &mut Ledger) -> Label<'_> {
        let place = self.place(&event.key, ledger);
        let known = &mut self.known[place];
        let (cause, verdict) = known.cause;
        known.moved += u64::from(known.cause != known.parent);
        Label {
            cause,
            verdict,
            split: if known.parent.0.refine.is_some() {
                Split::Sampled
            } else {
                Split::Exact
            },
            like: known.like,
            netns_name: known.netns_name.as_deref(),
            pod: known.pod.as_deref(),
            container: known.container.as_deref(),
            interface: self
                .devices
                .get(&(event.key.netns, event.ifindex))
                .map(String::as_str),
        }
    }

    /// Tells the ledger which packets had another cause than their key tells.
    pub fn tell(&mut self, ledger: &mut Ledger) {
        for (key, place) in &self.places {
            self.known[*place].tell(key.netns, ledger);
        }
    }

    /// The kernel's names changed: what keys tell is found anew.
    pub fn forget(&mut self, ledger: &mut Ledger) {
        self.tell(ledger);
        self.places.clear();
        self.known.clear();
        self.last = None;
    }

    fn place(&mut self, key: &CountKey, ledger: &mut Ledger) -> usize {
        if let Some((last, place)) = self.last
            && last == *key
        {
            return place;
        }
        let place = *self.places.entry(*key).or_insert_with(|| {
            let parent = ledger.told_by(key);
            self.known.push(Known {
                parent,
                cause: parent,
                like: None,
                netns_name: None,
                pod: None,
                container: None,
                moved: 0,
            });
            self.known.len() - 1
        });
        self.last = Some((*key, place));
        place
    }
}

impl Known {
    /// See [`Labels::tell`].
    fn tell(&mut self, netns: u32, ledger: &mut Ledger) {
        if self.moved > 0 {
            let slugs = |(cause, verdict): (&'static Cause, Verdict)| (cause.slug, verdict);
            ledger.refine(slugs(self.parent), slugs(self.cause), netns, self.moved);
            self.moved = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write as _, sync::Arc};

    use droptrace_common::EventHeader;

    use super::*;
    use crate::{
        diagnose::diagnose,
        plan::{Reasons, Symbols},
        source::Totals,
    };

    const PLACE: u64 = 0xffff_ffff_8100_0000;
    const NETNS: u32 = 4_026_531_840;

    /// A kernel without reasons that has these functions, one after the other.
    fn ledger(functions: [&str; 2]) -> Ledger {
        let mut symbols = String::new();
        for (index, name) in functions.into_iter().enumerate() {
            let _ = writeln!(symbols, "{:x} T {name}", PLACE + 4096 * index as u64);
        }
        let symbols = Symbols::parse(symbols.as_bytes(), "");
        Ledger::new(Arc::new(symbols), Arc::new(Reasons::default()))
    }

    fn event(ktime_ns: u64, function: u64) -> RawEvent {
        let header = EventHeader {
            ktime_ns,
            location: PLACE + 4096 * function + 16,
            netns: NETNS,
            ifindex: 2,
            ..EventHeader::default()
        };
        RawEvent::new(header, &[], &[])
    }

    fn brief(event: &RawEvent) -> BriefEvent {
        BriefEvent {
            key: event.header.key(),
            ifindex: event.header.ifindex,
            ..BriefEvent::default()
        }
    }

    fn facts() -> Facts {
        Facts {
            netns_name: Some("web".to_owned()),
            devices: BTreeMap::from([(2, "eth0".to_owned())]),
            ..Facts::default()
        }
    }

    #[test]
    fn a_label_is_that_of_the_last_event_of_its_key() {
        let (mut labels, mut ledger) = (Labels::default(), ledger(["nf_hook_slow", "other"]));
        let first = event(5, 0);
        let before = labels.of(&brief(&first), &mut ledger);
        assert_eq!(
            (before.cause.slug, before.split),
            ("netfilter-rule", Split::Sampled)
        );
        assert_eq!(
            (before.like, before.netns_name, before.interface),
            (None, None, None)
        );
        let mut drop = diagnose(&first, &facts());
        drop.cause = "conntrack-invalid".to_owned();
        labels.learn(&first, &facts(), &drop, &mut ledger);
        let after = labels.of(&brief(&first), &mut ledger);
        assert_eq!(
            (after.cause.slug, after.split),
            ("conntrack-invalid", Split::Sampled)
        );
        assert_eq!(
            (after.like, after.netns_name, after.interface),
            (Some(5), Some("web"), Some("eth0"))
        );
        // Another key is another kind.
        let other = event(6, 1);
        let label = labels.of(&brief(&other), &mut ledger);
        assert_eq!((label.like, label.interface), (None, Some("eth0")));
        assert_ne!(label.cause.slug, "conntrack-invalid");
    }

    #[test]
    fn totals_follow_the_labels() {
        let (mut labels, mut ledger) = (Labels::default(), ledger(["nf_hook_slow", "other"]));
        let first = event(5, 0);
        labels.of(&brief(&first), &mut ledger);
        let mut drop = diagnose(&first, &facts());
        drop.cause = "conntrack-invalid".to_owned();
        labels.learn(&first, &facts(), &drop, &mut ledger);
        for _ in 0..3 {
            labels.of(&brief(&first), &mut ledger);
        }
        // Names are found anew, and nothing is told twice.
        labels.forget(&mut ledger);
        labels.tell(&mut ledger);
        let value = droptrace_common::CountValue {
            packets: 10,
            ..Default::default()
        };
        let totals = Totals {
            keys: vec![(first.header.key(), value)],
            ..Totals::default()
        };
        let counts = ledger.counts(&totals, BTreeMap::new(), String::new());
        let packets: BTreeMap<&str, (u64, Split)> = counts
            .causes
            .iter()
            .map(|total| (total.cause.as_str(), (total.packets, total.split)))
            .collect();
        assert_eq!(packets["conntrack-invalid"], (3, Split::Sampled));
        assert_eq!(packets["netfilter-rule"], (7, Split::Sampled));
    }
}
