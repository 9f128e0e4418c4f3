//! Which rule ended a packet: what rules counted between two readings of the ruleset, against the packets that were seen
//! to end meanwhile.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use super::rulesets::{Ender, Reading};
use crate::diagnose::{Ending, HookPoints, Rule, RuleEnd, Rules};

/// Packets of a netns that are remembered.
const NOTES: usize = 8_192;
/// Readings of a netns that are kept.
const READINGS: usize = 8;
/// Rules that are listed where none is told.
const LISTED: usize = 8;

/// Why no rule is told where none seems to have done it.
const UNMOVED: &str = "no counter of a rule that can have done it moved";

/// A packet that a rule ended, or several of which only the last is known.
#[derive(Clone, Copy, Debug)]
struct Note {
    ktime_ns: u64,
    end: RuleEnd,
    packets: u64,
}

/// What is known of a netns.
#[derive(Debug, Default)]
pub(super) struct Witness {
    notes: VecDeque<Note>,
    /// Packets up to here are forgotten.
    forgotten: u64,
    readings: VecDeque<Read>,
    /// What was told since the last reading: the same for all packets that ended so between the same readings.
    told: Vec<(Between, RuleEnd, Rules)>,
}

/// When the reading before a packet began, 0 without one, and when the one after it.
type Between = (u64, u64);

/// A reading of the ruleset.
#[derive(Debug)]
struct Read {
    reading: Arc<Reading>,
    /// Packets ended meanwhile: it is not known which of them its counters have.
    disturbed: bool,
}

impl Note {
    fn is_during(&self, reading: &Reading) -> bool {
        (reading.begun..=reading.ended).contains(&self.ktime_ns)
    }
}

impl Witness {
    /// Remembers `packets` packets that ended so, the last of them now.
    pub(super) fn note(&mut self, ktime_ns: u64, end: RuleEnd, packets: u64) {
        if self.notes.len() == NOTES
            && let Some(note) = self.notes.pop_front()
        {
            self.forgotten = self.forgotten.max(note.ktime_ns);
        }
        let note = Note {
            ktime_ns,
            end,
            packets,
        };
        for read in &mut self.readings {
            read.disturbed |= note.is_during(&read.reading);
        }
        self.notes.push_back(note);
    }

    /// Takes over a reading.
    pub(super) fn read(&mut self, reading: Reading) {
        if self.readings.len() == READINGS {
            self.readings.pop_front();
        }
        self.readings.push_back(Read {
            disturbed: self.notes.iter().any(|note| note.is_during(&reading)),
            reading: Arc::new(reading),
        });
        self.told.clear();
    }

    /// Whether one more reading may tell what those so far do not, since packets ended during each after this one. In a
    /// flood that leaves events out none does.
    pub(super) fn wants_another(&self, ktime_ns: u64) -> bool {
        let mut after = self.after(ktime_ns).peekable();
        after.peek().is_some()
            && after.all(|read| read.disturbed)
            && self.before(ktime_ns).next().is_some()
            && self.notes.back().is_none_or(|note| note.packets == 1)
    }

    /// The readings after a packet, the nearest first.
    fn after(&self, ktime_ns: u64) -> impl Iterator<Item = &Read> {
        self.readings
            .iter()
            .filter(move |read| read.reading.begun > ktime_ns)
    }

    /// The readings before a packet, the nearest first.
    fn before(&self, ktime_ns: u64) -> impl Iterator<Item = &Reading> {
        self.readings
            .iter()
            .rev()
            .map(|read| &*read.reading)
            .filter(move |reading| reading.ended < ktime_ns)
    }

    /// Whether the ruleset was read since.
    pub(super) fn is_read_since(&self, ktime_ns: u64) -> bool {
        self.readings
            .back()
            .is_some_and(|read| read.reading.begun > ktime_ns)
    }

    /// What the readings around a packet tell of its end; `None` where there is none at all.
    pub(super) fn tell(&mut self, ktime_ns: u64, end: RuleEnd) -> Option<Rules> {
        let Some(after) = self.after(ktime_ns).next().map(|read| Arc::clone(&read.reading)) else {
            let mut rules = list(&self.readings.back()?.reading, end).1;
            rules.untold = Some("the counters were not read soon enough after this packet".to_owned());
            return Some(rules);
        };
        let before = self.before(ktime_ns).next();
        let between = (before.map_or(0, |reading| reading.begun), after.begun);
        let known = self
            .told
            .iter()
            .find(|(when, how, _)| *when == between && *how == end);
        if let Some((_, _, rules)) = known {
            return Some(rules.clone());
        }
        let rules = self.find_out(ktime_ns, end, &after);
        self.told.push((between, end, rules.clone()));
        Some(rules)
    }

    fn find_out(&self, ktime_ns: u64, end: RuleEnd, nearest: &Reading) -> Rules {
        let mut rules = list(nearest, end).1;
        let mut untold = None;
        // The nearest ones may have been disturbed by packets: then others.
        for after in self.after(ktime_ns) {
            let can = list(&after.reading, end).0;
            for before in self.before(ktime_ns) {
                match self.compare(before, &after.reading, &can) {
                    Ok((ender, packets)) => {
                        rules.told = Some(named(ender, end));
                        rules.packets = packets;
                        return rules;
                    }
                    Err(reason) => {
                        let all_count = can.iter().all(|ender| ender.packets.is_some());
                        rules.unmoved |= reason == UNMOVED && all_count && after.reading.unread.is_empty();
                        untold = untold.or(Some(reason));
                    }
                }
            }
        }
        rules.untold = Some(
            untold
                .unwrap_or("its counters were first read after this packet")
                .to_owned(),
        );
        rules
    }

    /// The one of these whose counter alone moved between two readings, by as many packets as ended so.
    fn compare<'a>(
        &self,
        before: &Reading,
        after: &Reading,
        can: &[&'a Ender],
    ) -> Result<(&'a Ender, u64), &'static str> {
        let earlier: BTreeMap<&str, &Ender> = before
            .enders
            .iter()
            .map(|ender| (ender.identity.as_str(), ender))
            .collect();
        if before.enders.len() != after.enders.len()
            || after
                .enders
                .iter()
                .any(|ender| !earlier.contains_key(ender.identity.as_str()))
        {
            return Err("the ruleset changed between two readings");
        }
        let moved = |ender: &Ender| {
            let was = earlier.get(ender.identity.as_str())?.packets?;
            Some(ender.packets?.wrapping_sub(was))
        };
        let mut moving = can.iter().filter_map(|ender| {
            moved(ender)
                .filter(|&count| count != 0)
                .map(|count| (*ender, count))
        });
        let (ender, count) = match (moving.next(), moving.next()) {
            (Some(one), None) => one,
            (None, _) => return Err(UNMOVED),
            (Some(_), Some(_)) => return Err("the counters of several rules moved"),
        };
        let points = ender.points();
        let mut beside = after.enders.iter().filter(|other| {
            other.identity != ender.identity && other.ending == ender.ending && other.points().meets(points)
        });
        if beside.any(|other| moved(other).is_some_and(|count| count != 0)) {
            return Err("the counters of several rules moved");
        }
        if before.begun <= self.forgotten {
            return Err("more packets ended than are remembered");
        }
        if self.seen(before, after, points, ender.ending)? == count {
            Ok((ender, count))
        } else {
            Err("its counter moved by another number than packets were seen to end")
        }
    }

    /// How many packets ended so between two readings; else why that is not known.
    fn seen(
        &self,
        before: &Reading,
        after: &Reading,
        points: HookPoints,
        ending: Ending,
    ) -> Result<u64, &'static str> {
        let mut seen = 0;
        for note in &self.notes {
            if note.end.ending != ending || !note.end.points.meets(points) || note.ktime_ns < before.begun {
                continue;
            }
            if note.packets > 1 {
                return Err(
                    "events were left out: it is not known how many packets ended between two readings",
                );
            }
            if note.is_during(before) || note.is_during(after) {
                return Err(
                    "packets ended while the counters were read: it is not known which of them they have",
                );
            }
            seen += u64::from(note.ktime_ns < after.begun);
        }
        Ok(seen)
    }
}

/// The rules that can have ended a packet so.
fn list(reading: &Reading, end: RuleEnd) -> (Vec<&Ender>, Rules) {
    let can: Vec<&Ender> = reading
        .enders
        .iter()
        .filter(|ender| ender.ending == end.ending && ender.points().meets(end.points))
        .filter(|ender| !end.nftables || ender.is_nftables())
        .collect();
    let mut rules = Rules {
        count: can.len(),
        rules: can.iter().take(LISTED).map(|ender| named(ender, end)).collect(),
        unread: reading.unread.clone(),
        masquerades: reading
            .enders
            .iter()
            .any(|ender| ender.ending == Ending::Masquerade && ender.points().meets(end.points)),
        read_us: (reading.ended - reading.begun) / 1_000,
        ..Rules::default()
    };
    for (_, base) in can
        .iter()
        .flat_map(|ender| &ender.bases)
        .filter(|(points, _)| points.meets(end.points))
    {
        if !rules.chains.contains(base) {
            rules.chains.push(base.clone());
        }
    }
    (can, rules)
}

/// A rule as it is told, by the chain that calls it where the packet ended.
fn named(ender: &Ender, end: RuleEnd) -> Rule {
    let base = ender.bases.iter().find(|(points, _)| points.meets(end.points));
    Rule {
        base: base.or(ender.bases.first()).map_or_else(
            || unreachable!("an ender has a base chain"),
            |(_, base)| base.clone(),
        ),
        rule: ender.rule.clone(),
        list: ender.list.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::{BaseChain, HookPoint};

    fn ender(name: &str, point: HookPoint, packets: Option<u64>) -> Ender {
        Ender {
            identity: name.to_owned(),
            ending: Ending::Drop,
            bases: vec![(
                HookPoints::one(point, false),
                BaseChain {
                    engine: "nftables".to_owned(),
                    table: "ip t".to_owned(),
                    chain: point.name().to_owned(),
                },
            )],
            rule: name.to_owned(),
            list: String::new(),
            packets,
        }
    }

    fn reading(at: u64, enders: &[Ender]) -> Reading {
        Reading {
            begun: at,
            ended: at + 9,
            enders: enders.to_vec(),
            unread: Vec::new(),
        }
    }

    fn at(point: HookPoint) -> RuleEnd {
        RuleEnd {
            points: HookPoints::one(point, false),
            ending: Ending::Drop,
            nftables: false,
        }
    }

    const INPUT: HookPoint = HookPoint::Input;

    /// Two rules at input of which the first counts this, the second that; packets end at these times between the
    /// readings at 100 and 1000.
    fn told(first: (Option<u64>, Option<u64>), second: (Option<u64>, Option<u64>), ends: &[u64]) -> Rules {
        let mut witness = Witness::default();
        witness.read(reading(
            100,
            &[ender("a", INPUT, first.0), ender("b", INPUT, second.0)],
        ));
        for end in ends {
            witness.note(*end, at(INPUT), 1);
        }
        witness.read(reading(
            1000,
            &[ender("a", INPUT, first.1), ender("b", INPUT, second.1)],
        ));
        witness.tell(500, at(INPUT)).unwrap()
    }

    #[test]
    fn a_rule_is_told_when_it_alone_moved_by_the_same_number() {
        let rules = told((Some(5), Some(7)), (Some(1), Some(1)), &[500, 600]);
        assert_eq!(rules.told.unwrap().rule, "a");
        assert_eq!((rules.packets, rules.count, rules.chains.len()), (2, 2, 1));
        // The other one does not count: the number must be the same.
        let rules = told((Some(5), Some(7)), (None, None), &[500, 600]);
        assert_eq!(rules.told.unwrap().rule, "a");
        for (first, second, ends) in [
            // Another number: the rule without counter ended one, or an event came late.
            ((Some(5), Some(7)), (None, None), &[500, 600, 700][..]),
            ((Some(5), Some(7)), (None, None), &[500]),
            ((Some(5), Some(6)), (Some(1), Some(2)), &[500, 600]),
            ((Some(5), Some(5)), (None, None), &[500]),
            // While it was read.
            ((Some(5), Some(7)), (None, None), &[105, 500]),
            // Reset.
            ((Some(5), Some(0)), (None, None), &[500]),
        ] {
            let rules = told(first, second, ends);
            assert_eq!(rules.told, None, "{first:?} {second:?} {ends:?}");
            assert!(rules.untold.is_some());
        }
        // Also where nothing else can have ended them, the number must be known.
        let rules = told((Some(5), Some(7)), (Some(1), Some(1)), &[105, 500]);
        assert_eq!(rules.told, None);
        assert!(
            rules
                .untold
                .is_some_and(|untold| untold.contains("while the counters were read"))
        );
    }

    #[test]
    fn where_packets_ended_during_a_reading_another_one_tells() {
        let mut witness = Witness::default();
        let counts = |packets| [ender("a", INPUT, Some(packets)), ender("b", INPUT, None)];
        witness.note(50, at(INPUT), 1);
        witness.read(reading(100, &counts(1)));
        witness.note(500, at(INPUT), 1);
        assert!(!witness.wants_another(500));
        witness.read(reading(1000, &counts(2)));
        witness.note(1005, at(INPUT), 1);
        assert_eq!(witness.tell(500, at(INPUT)).unwrap().told, None);
        assert!(witness.wants_another(500));
        // Nothing was known before it.
        assert!(!witness.wants_another(50));
        witness.read(reading(2000, &counts(3)));
        assert!(!witness.wants_another(500));
        let rules = witness.tell(500, at(INPUT)).unwrap();
        assert_eq!((rules.told.unwrap().rule.as_str(), rules.packets), ("a", 2));
        witness.note(3000, at(INPUT), 40);
        witness.read(reading(4000, &counts(43)));
        witness.note(4005, at(INPUT), 40);
        assert!(!witness.wants_another(3000));
    }

    #[test]
    fn rules_that_all_count_and_did_not_move_have_not_done_it() {
        for (first, second, unmoved) in [
            ((Some(5), Some(5)), (Some(1), Some(1)), true),
            ((Some(5), Some(5)), (None, None), false),
            ((Some(5), Some(6)), (Some(1), Some(1)), false),
        ] {
            // Also if others end while the counters are read.
            let rules = told(first, second, &[105, 500]);
            assert_eq!((rules.told, rules.unmoved), (None, unmoved));
        }
    }

    #[test]
    fn what_was_before_the_first_reading_has_no_rule() {
        let mut witness = Witness::default();
        witness.note(50, at(INPUT), 1);
        assert_eq!(witness.tell(50, at(INPUT)), None);
        witness.read(reading(30, &[ender("a", INPUT, Some(0))]));
        let late = witness.tell(50, at(INPUT)).unwrap();
        assert_eq!((late.told, late.count), (None, 1));
        let mut witness = Witness::default();
        witness.read(reading(100, &[ender("a", INPUT, Some(1))]));
        assert!(witness.is_read_since(50) && !witness.is_read_since(100));
        let rules = witness.tell(50, at(INPUT)).unwrap();
        assert_eq!((rules.told, rules.count), (None, 1));
    }

    #[test]
    fn a_packet_of_another_place_counts_only_where_the_rule_is_asked() {
        let mut witness = Witness::default();
        let rules = [
            ender("a", INPUT, Some(0)),
            ender("b", HookPoint::Forward, Some(0)),
        ];
        witness.read(reading(100, &rules));
        witness.note(500, at(INPUT), 1);
        witness.note(501, at(HookPoint::Forward), 1);
        let rules = [
            ender("a", INPUT, Some(1)),
            ender("b", HookPoint::Forward, Some(1)),
        ];
        witness.read(reading(1000, &rules));
        assert_eq!(witness.tell(500, at(INPUT)).unwrap().told.unwrap().rule, "a");
        // One whose hook point is not known may have been anyone's.
        let nowhere = RuleEnd {
            points: HookPoints::ALL,
            ..at(INPUT)
        };
        assert_eq!(witness.tell(502, nowhere).unwrap().told, None);
        witness.note(502, nowhere, 1);
        let counts = |packets| [ender("a", INPUT, Some(packets)), ender("b", INPUT, None)];
        let mut witness = Witness::default();
        witness.read(reading(100, &counts(0)));
        witness.note(500, at(INPUT), 1);
        witness.note(502, nowhere, 1);
        witness.read(reading(1000, &counts(1)));
        assert_eq!(witness.tell(500, at(INPUT)).unwrap().told, None);
    }

    #[test]
    fn a_rule_of_two_places_counts_those_of_both() {
        let shared = |packets| {
            let mut shared = ender("shared", INPUT, Some(packets));
            shared.bases.extend(ender("", HookPoint::Forward, None).bases);
            shared
        };
        let mut witness = Witness::default();
        witness.read(reading(
            100,
            &[shared(0), ender("silent", HookPoint::Forward, None)],
        ));
        witness.note(500, at(INPUT), 1);
        witness.note(501, at(HookPoint::Forward), 1);
        witness.read(reading(
            1000,
            &[shared(1), ender("silent", HookPoint::Forward, None)],
        ));
        // One of the two was the silent rule's.
        assert_eq!(witness.tell(500, at(INPUT)).unwrap().told, None);
        witness.notes.pop_back();
        witness.told.clear();
        let rules = witness.tell(500, at(INPUT)).unwrap();
        assert_eq!(rules.told.unwrap().base.chain, "input");
    }

    #[test]
    fn a_ruleset_that_changed_and_forgotten_packets_tell_nothing() {
        let mut witness = Witness::default();
        witness.read(reading(100, &[ender("a", INPUT, Some(0))]));
        witness.note(500, at(INPUT), 1);
        witness.read(reading(1000, &[ender("b", INPUT, Some(1))]));
        let untold = witness.tell(500, at(INPUT)).unwrap().untold.unwrap();
        assert!(untold.contains("changed"), "{untold}");
        let mut witness = Witness::default();
        witness.read(reading(100, &[ender("a", INPUT, Some(0))]));
        for time in 0..=NOTES as u64 {
            witness.note(500 + time, at(INPUT), 1);
        }
        let all = NOTES as u64 + 1;
        witness.read(reading(100_000, &[ender("a", INPUT, Some(all))]));
        assert_eq!(witness.tell(600, at(INPUT)).unwrap().told, None);
    }

    #[test]
    fn with_left_out_events_no_rule_is_told() {
        for other in [Some(0), None] {
            let mut witness = Witness::default();
            witness.read(reading(
                100,
                &[ender("a", INPUT, Some(0)), ender("b", INPUT, other)],
            ));
            witness.note(500, at(INPUT), 40);
            witness.read(reading(
                1000,
                &[ender("a", INPUT, Some(30)), ender("b", INPUT, other)],
            ));
            let rules = witness.tell(500, at(INPUT)).unwrap();
            assert_eq!(rules.told, None);
            assert!(rules.untold.is_some_and(|untold| untold.contains("left out")));
        }
    }
}
