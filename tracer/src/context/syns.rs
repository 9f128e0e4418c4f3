//! SYNs that local sockets sent again: the counter of a netns tells that there
//! are some, its sockets tell where they went.

use std::{collections::BTreeMap, net::IpAddr};

use droptrace_common::FieldId;

use super::{
    sockets::Connecting,
    state::{Flow, Unanswered},
};
use crate::diagnose::{Brief, Drop, RawEvent};

/// Flows of which lost SYNs are kept; a flood of others explains nothing.
const FLOWS: usize = 4_096;

/// SYNs and their answers that were seen lost on this host, by the flow of the SYN as its sender made it.
#[derive(Debug, Default)]
pub struct LostSyns {
    packets: BTreeMap<Flow, u64>,
}

impl LostSyns {
    /// Takes a labelled drop into account if it is a SYN, or the answer to one. After source or destination NAT its flow
    /// is known only where conntrack told the original one.
    pub fn note(&mut self, event: &RawEvent, drop: &Drop) {
        let flow = flow_of(event, drop);
        self.add(flow, drop.packets);
    }

    /// The same of a drop in short, of which conntrack tells nothing.
    pub fn note_brief(&mut self, brief: &Brief) {
        let (from, to) = ((brief.src, brief.sport), (brief.dst, brief.dport));
        let flow = (!brief.benign).then(|| flow(brief.flags.as_deref()?, from, to));
        self.add(flow.flatten(), brief.packets);
    }

    fn add(&mut self, flow: Option<Flow>, packets: u64) {
        if let Some(flow) = flow
            && (self.packets.len() < FLOWS || self.packets.contains_key(&flow))
        {
            *self.packets.entry(flow).or_default() += packets;
        }
    }

    /// What is left of these retransmissions when each packet that was seen lost explains one.
    pub(super) fn unexplained<'a>(
        &self,
        unanswered: &'a Unanswered,
    ) -> BTreeMap<(u32, IpAddr, u16), (Option<&'a str>, u64)> {
        let mut lost = self.packets.clone();
        let mut open: BTreeMap<_, (Option<&str>, u64)> = BTreeMap::new();
        for ((netns, flow), (interface, count)) in unanswered {
            let explained = lost.get_mut(flow).map_or(0, |lost| {
                let explained = (*lost).min(*count);
                *lost -= explained;
                explained
            });
            if explained < *count {
                let entry = open.entry((*netns, flow.dst, flow.dport)).or_default();
                entry.0 = entry.0.or(interface.as_deref());
                entry.1 += count - explained;
            }
        }
        open
    }
}

/// The flow of the SYN that is lost with this packet, or asked for it.
fn flow_of(event: &RawEvent, drop: &Drop) -> Option<Flow> {
    if drop.benign {
        return None;
    }
    let flags = drop.flags.as_deref()?;
    let original = (flags == "S").then(|| original(event)).flatten();
    original.or_else(|| flow(flags, (drop.src, drop.sport), (drop.dst, drop.dport)))
}

/// The same by the packet alone: where it is from, and where it goes.
fn flow(flags: &str, from: (Option<IpAddr>, Option<u16>), to: (Option<IpAddr>, Option<u16>)) -> Option<Flow> {
    let (asked, by) = match flags {
        "S" => (to, from),
        "SA" => (from, to),
        _ => return None,
    };
    Some(Flow {
        src: by.0?,
        dst: asked.0?,
        dport: asked.1?,
    })
}

/// The flow before NAT, where conntrack told it.
fn original(event: &RawEvent) -> Option<Flow> {
    Some(Flow {
        src: event.address(FieldId::LoserOrigSrcHi, FieldId::LoserOrigSrcLo)?,
        dst: event.address(FieldId::LoserOrigDstHi, FieldId::LoserOrigDstLo)?,
        dport: event.field(FieldId::LoserOrigPorts)? as u16,
    })
}

/// Sockets that sent their SYN again since the last look, each with how often; together never more often than the
/// counter grew. Sockets that are gone are forgotten.
pub(super) fn growth<'a>(
    counted: &mut BTreeMap<u64, u8>,
    connecting: &'a [Connecting],
    counter: u64,
) -> Vec<(&'a Connecting, u64)> {
    let mut left = counter;
    let grown = connecting
        .iter()
        .filter_map(|socket| {
            let before = counted.get(&socket.cookie).copied().unwrap_or(0);
            let count = u64::from(socket.retransmissions.saturating_sub(before)).min(left);
            left -= count;
            (count > 0).then_some((socket, count))
        })
        .collect();
    *counted = connecting
        .iter()
        .map(|socket| (socket.cookie, socket.retransmissions))
        .collect();
    grown
}

#[cfg(test)]
mod tests {
    use droptrace_common::{EventHeader, Site};

    use super::*;
    use crate::diagnose::{Facts, diagnose};

    #[test]
    fn retransmissions_are_counted_once_and_never_above_the_counter() {
        let socket = |cookie, retransmissions| Connecting {
            cookie,
            local: "192.0.2.9".parse().unwrap(),
            remote: "192.0.2.1:80".parse().unwrap(),
            retransmissions,
        };
        let mut counted = BTreeMap::new();
        let first = [socket(1, 2), socket(2, 1)];
        let sum = |grown: Vec<(&Connecting, u64)>| grown.iter().map(|(_, count)| count).sum::<u64>();
        assert_eq!(sum(growth(&mut counted, &first, 3)), 3);
        assert_eq!(sum(growth(&mut counted, &first, 5)), 0);
        let later = [socket(1, 4), socket(3, 6)];
        // Socket 3 was connecting before counting began: only what the counter saw is counted.
        assert_eq!(sum(growth(&mut counted, &later, 3)), 3);
        assert_eq!(counted.keys().copied().collect::<Vec<_>>(), [1, 3]);
    }

    fn flow(src: &str, dst: &str, dport: u16) -> Flow {
        Flow {
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            dport,
        }
    }

    /// A dropped TCP segment, `skipped` others like it before.
    fn segment(source: [u8; 4], destination: [u8; 4], ports: [u16; 2], flags: u8, skipped: u32) -> RawEvent {
        let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0];
        packet.extend(source.into_iter().chain(destination));
        packet.extend(ports.into_iter().flat_map(u16::to_be_bytes));
        packet.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 255, 255, 0, 0, 0, 0]);
        let header = EventHeader {
            site: Site::AcceptQueueSyn as u16,
            skipped,
            ..EventHeader::default()
        };
        RawEvent::new(header, &packet, &[])
    }

    #[test]
    fn a_lost_syn_explains_one_that_is_sent_again() {
        const SYN: u8 = 2;
        const SYN_ACK: u8 = 18;
        const ACK: u8 = 16;
        let (client, server) = ([192, 0, 2, 9], [192, 0, 2, 1]);
        let mut lost = LostSyns::default();
        for event in [
            segment(client, server, [4000, 80], SYN, 1),
            segment(server, client, [80, 4001], SYN_ACK, 0),
            // Neither of these is a lost SYN or answer.
            segment(client, server, [4000, 80], ACK, 0),
            segment([192, 0, 2, 8], server, [4000, 80], SYN, 0),
        ] {
            lost.note(&event, &diagnose(&event, &Facts::default()));
        }
        let unanswered: Unanswered = [
            (
                (7, flow("192.0.2.9", "192.0.2.1", 80)),
                (Some("eth0".to_owned()), 5),
            ),
            ((8, flow("192.0.2.9", "192.0.2.1", 81)), (None, 2)),
            ((8, flow("192.0.2.8", "192.0.2.1", 80)), (None, 1)),
        ]
        .into();
        let open = lost.unexplained(&unanswered);
        let (server, eth0) = ("192.0.2.1".parse().unwrap(), Some("eth0"));
        assert_eq!(
            open,
            [((7, server, 80), (eth0, 2)), ((8, server, 81), (None, 2))].into()
        );
        let all = LostSyns::default().unexplained(&unanswered);
        assert_eq!(all.values().map(|(_, count)| count).sum::<u64>(), 8);
    }

    #[test]
    fn a_lost_packet_explains_no_more_than_one() {
        let mut lost = LostSyns::default();
        let event = segment([192, 0, 2, 9], [192, 0, 2, 1], [4000, 80], 2, 0);
        lost.note(&event, &diagnose(&event, &Facts::default()));
        // The same addresses in two namespaces: only one of the two lost it.
        let same = flow("192.0.2.9", "192.0.2.1", 80);
        let unanswered: Unanswered = [((7, same), (None, 1)), ((8, same), (None, 1))].into();
        let open = lost.unexplained(&unanswered);
        assert_eq!(open.values().map(|(_, count)| count).sum::<u64>(), 1);
    }
}
