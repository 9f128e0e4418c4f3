//! Drops that no hook sees, and that a counter of the kernel alone proves.

use std::{collections::BTreeMap, net::IpAddr};

use droptrace_common::{EventHeader, FieldId, Site};

use crate::{
    context::{CounterMoves, Missed, Suspect},
    diagnose::{PROOFS, Proof, RawEvent, Tallied, proving},
};

/// Suspects that an event can name.
const SUSPECTS: usize = 6;

/// Compares the kernel's counters with the drops that were seen, as they move.
#[derive(Debug, Default)]
pub struct Prover {
    /// What was told of each netns: its serial, and by cause.
    told: BTreeMap<u32, (u64, BTreeMap<&'static str, u64>)>,
}

/// Drops of one cause in one netns that only a counter tells.
#[derive(Debug)]
pub struct Proven {
    /// As hooks would have sent it, with [`Site::Counter`] and, as its reason, the place among [`proving`] counters, from 1 on.
    pub event: RawEvent,
    /// The cause, by its counter.
    pub proof: &'static Proof,
    /// Packets.
    pub packets: u64,
}

impl Prover {
    /// What these moves prove beyond the drops that were seen, `tallied` after the counters were read, and beyond what was
    /// told before. `now_ns` is the kernel's monotonic clock.
    pub fn prove(
        &mut self,
        moves: &BTreeMap<u32, CounterMoves>,
        tallied: &[Tallied],
        now_ns: u64,
    ) -> Vec<Proven> {
        let mut found = Vec::new();
        for (netns, moves) in moves {
            let (serial, told) = self.told.entry(*netns).or_default();
            if *serial != moves.serial {
                *serial = moves.serial;
                told.clear();
            }
            for proof in PROOFS {
                let told = told.entry(proof.cause).or_default();
                let seen = proof.seen(*netns, tallied) + *told;
                let packets = proof.moved(&moves.moved).saturating_sub(seen);
                if packets > 0 {
                    *told += packets;
                    let suspects = moves.suspects.iter().filter(|each| each.cause == proof.cause);
                    found.push(Proven {
                        event: event(header(*netns, proof.counter(), packets, now_ns), suspects),
                        proof,
                        packets,
                    });
                }
            }
        }
        found
    }
}

/// Frames that a network card had no room for, as hooks would have sent it if one saw them.
pub fn missed(missed: &Missed, now_ns: u64) -> RawEvent {
    let header = EventHeader {
        iif: missed.ifindex,
        ifindex: missed.ifindex,
        ..header(missed.netns, missed.counter, missed.frames, now_ns)
    };
    RawEvent::new(header, &[], &[])
}

/// The counter whose place an event of [`Site::Counter`] bears as its reason.
pub fn counter_of(event: &RawEvent) -> Option<&'static str> {
    let index = (event.header.reason as usize).checked_sub(1)?;
    (event.site == Site::Counter).then(|| proving().nth(index))?
}

fn header(netns: u32, counter: &str, packets: u64, now_ns: u64) -> EventHeader {
    let place = proving().position(|each| each == counter);
    EventHeader {
        site: Site::Counter as u16,
        ktime_ns: now_ns,
        netns,
        reason: place.map_or(0, |place| place as u32 + 1),
        skipped: u32::try_from(packets - 1).unwrap_or(u32::MAX),
        ..EventHeader::default()
    }
}

fn event<'a>(header: EventHeader, suspects: impl Iterator<Item = &'a Suspect>) -> RawEvent {
    let fields: Vec<(FieldId, u64)> = suspects
        .take(SUSPECTS)
        .flat_map(|suspect| {
            let address = match suspect.address.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
                IpAddr::V6(ip) => ip.to_bits(),
            };
            [
                (FieldId::ListenerAddressHi, (address >> 64) as u64),
                (FieldId::ListenerAddressLo, address as u64),
                (FieldId::ListenerPort, u64::from(suspect.address.port())),
                (FieldId::ListenerInode, suspect.inode),
                (FieldId::AcceptQueueLength, u64::from(suspect.accept_queue)),
                (FieldId::SynQueueLength, u64::from(suspect.syn_queue)),
                (FieldId::AcceptQueueLimit, u64::from(suspect.limit)),
            ]
        })
        .collect();
    RawEvent::new(header, &[], &fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::Moved;

    fn moves(serial: u64, overflows: u64) -> BTreeMap<u32, CounterMoves> {
        let suspect = Suspect {
            cause: "accept-queue-full",
            address: "0.0.0.0:80".parse().unwrap(),
            inode: 9,
            accept_queue: 129,
            syn_queue: 0,
            limit: 128,
        };
        let moves = CounterMoves {
            serial,
            moved: Moved::from([("TcpExtListenOverflows", overflows)]),
            suspects: vec![suspect],
        };
        BTreeMap::from([(7, moves)])
    }

    fn seen(packets: u64) -> [Tallied; 1] {
        [Tallied {
            cause: "accept-queue-full",
            netns: 7,
            bits: 0,
            packets,
            perhaps: None,
            by_counter: false,
        }]
    }

    #[test]
    fn what_hooks_saw_is_not_told_again() {
        let mut prover = Prover::default();
        assert!(prover.prove(&moves(1, 3), &seen(3), 5).is_empty());
        let found = prover.prove(&moves(1, 10), &seen(4), 5);
        assert_eq!(found.len(), 1);
        let Proven { event, packets, .. } = &found[0];
        assert_eq!((*packets, event.header.netns, event.header.ktime_ns), (6, 7, 5));
        assert_eq!(counter_of(event), Some("TcpExtListenOverflows"));
        assert_eq!(event.field(FieldId::ListenerPort), Some(80));
        assert_eq!(event.header.skipped, 5);
        // Told once; the next only what is new.
        assert!(prover.prove(&moves(1, 10), &seen(4), 6).is_empty());
        assert_eq!(prover.prove(&moves(1, 12), &seen(4), 6)[0].packets, 2);
    }

    #[test]
    fn a_card_is_named_with_its_counter() {
        let frames = Missed {
            netns: 7,
            ifindex: 2,
            counter: "rx_fifo_errors",
            frames: 12,
        };
        let event = missed(&frames, 5);
        assert_eq!(counter_of(&event), Some("rx_fifo_errors"));
        let header = &event.header;
        assert_eq!((header.netns, header.ifindex, header.iif), (7, 2, 2));
        assert_eq!(header.skipped, 11);
    }

    #[test]
    fn another_netns_with_the_same_inode_starts_anew() {
        let mut prover = Prover::default();
        assert_eq!(prover.prove(&moves(1, 3), &[], 5)[0].packets, 3);
        assert_eq!(prover.prove(&moves(2, 2), &[], 6)[0].packets, 2);
    }
}
