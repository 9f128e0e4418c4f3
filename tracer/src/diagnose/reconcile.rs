//! The kernel's counters as a second witness: which causes add to which
//! counter, and what is left when the drops that were seen are taken off.

use std::collections::BTreeMap;

use droptrace_common::bits;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Counters of a netns that count the same drops as some causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Witness {
    /// Names as `nstat` prints them, those of `/proc/net/stat/nf_conntrack` as `conntrack:NAME`. Where there are several,
    /// one is IPv4's and one IPv6's: a total is not split by family.
    pub counters: &'static [&'static str],
    /// Slugs of the causes each packet of which adds one.
    pub causes: &'static [&'static str],
    /// Only packets with all these [`bits`] do.
    pub bits: u32,
    /// Not on kernels that have this counter, which counts some of these causes apart.
    pub unless: Option<&'static str>,
}

const ROW: Witness = Witness {
    counters: &[],
    causes: &[],
    bits: 0,
    unless: None,
};

/// The table. Each row was seen to hold in a scenario on 5.10, 6.1, 6.12 and 7.3.
pub const WITNESSES: &[Witness] = &[
    Witness {
        counters: &["TcpExtListenOverflows"],
        causes: &["accept-queue-full"],
        ..ROW
    },
    Witness {
        counters: &["TcpExtListenDrops"],
        causes: &[
            "accept-queue-full",
            "syn-queue-full",
            "syn-backlog-last-quarter",
            "syn-refused",
            "request-killed-by-icmp",
        ],
        ..ROW
    },
    Witness {
        counters: &["TcpExtTCPReqQFullDrop"],
        causes: &["syn-queue-full"],
        ..ROW
    },
    Witness {
        counters: &["TcpExtPAWSEstab"],
        causes: &["paws-established", "paws-request", "paws-timewait"],
        unless: Some("TcpExtPAWSTimewait"),
        ..ROW
    },
    Witness {
        counters: &["TcpExtPAWSTimewait"],
        causes: &["paws-timewait"],
        ..ROW
    },
    Witness {
        counters: &["TcpExtIPReversePathFilter"],
        causes: &["rp-filter"],
        ..ROW
    },
    Witness {
        counters: &["UdpNoPorts", "Udp6NoPorts"],
        causes: &["no-socket", "vip-no-service"],
        bits: bits::UDP,
        ..ROW
    },
    Witness {
        counters: &["conntrack:insert_failed"],
        causes: &["conntrack-insert-race", "conntrack-nat-exhausted"],
        ..ROW
    },
];

/// Every counter that the table names.
pub fn counter_names() -> impl Iterator<Item = &'static str> {
    WITNESSES
        .iter()
        .flat_map(|witness| witness.counters.iter().chain(&witness.unless).copied())
}

/// How far the counters of a netns moved, by name. One that the kernel does not have is absent.
pub type Moved = BTreeMap<&'static str, u64>;

/// Packets of one total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tallied {
    /// Slug of the cause.
    pub cause: &'static str,
    /// Inode of the netns.
    pub netns: u32,
    /// See [`droptrace_common::bits`].
    pub bits: u32,
    /// Packets.
    pub packets: u64,
}

/// What a counter of a netns says of the drops that were seen there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reconciled {
    /// Name of the counter, or of two that were added up.
    pub counter: String,
    /// Inode of the netns.
    pub netns: u32,
    /// Name of the netns, where it has one.
    pub netns_name: Option<String>,
    /// How far the kernel moved it.
    pub delta: u64,
    /// Packets of the causes that add to it.
    pub explained: u64,
    /// What of `delta` no drop that was seen explains.
    pub unexplained: u64,
}

/// Compares the counters with the totals; one that stood still where no drop was seen is left out.
pub fn reconcile(moved: &BTreeMap<u32, Moved>, tallied: &[Tallied]) -> Vec<Reconciled> {
    let mut reconciled = Vec::new();
    for (netns, counters) in moved {
        for witness in WITNESSES {
            let known: Vec<u64> = witness
                .counters
                .iter()
                .filter_map(|name| counters.get(name).copied())
                .collect();
            if known.is_empty() {
                continue;
            }
            let apart = witness.unless.is_some_and(|other| counters.contains_key(other));
            let explains = |total: &&Tallied| {
                total.netns == *netns
                    && witness.causes.contains(&total.cause)
                    && !(apart && total.cause == "paws-timewait")
                    && total.bits & witness.bits == witness.bits
            };
            let delta: u64 = known.iter().sum();
            let explained: u64 = tallied.iter().filter(explains).map(|total| total.packets).sum();
            if delta > 0 || explained > 0 {
                reconciled.push(Reconciled {
                    counter: witness.counters.join(" + "),
                    netns: *netns,
                    netns_name: None,
                    delta,
                    explained,
                    unexplained: delta.saturating_sub(explained),
                });
            }
        }
    }
    reconciled
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::cause_by_slug;

    fn tallied(cause: &'static str, netns: u32, bits: u32, packets: u64) -> Tallied {
        Tallied {
            cause,
            netns,
            bits,
            packets,
        }
    }

    fn row<'a>(rows: &'a [Reconciled], counter: &str) -> &'a Reconciled {
        rows.iter().find(|row| row.counter == counter).unwrap()
    }

    #[test]
    fn the_table_names_causes_that_exist() {
        for cause in WITNESSES.iter().flat_map(|witness| witness.causes) {
            assert!(cause_by_slug(cause).is_some(), "{cause}");
        }
    }

    #[test]
    fn what_no_drop_explains_is_left() {
        let moved = [(
            7,
            Moved::from([("TcpExtListenDrops", 9), ("TcpExtListenOverflows", 4)]),
        )]
        .into();
        let rows = reconcile(
            &moved,
            &[
                tallied("accept-queue-full", 7, bits::TCP, 4),
                tallied("syn-refused", 7, bits::TCP, 2),
                // Of another netns.
                tallied("syn-refused", 8, bits::TCP, 5),
            ],
        );
        assert_eq!(rows.len(), 2);
        let drops = row(&rows, "TcpExtListenDrops");
        assert_eq!((drops.delta, drops.explained, drops.unexplained), (9, 6, 3));
        assert_eq!(row(&rows, "TcpExtListenOverflows").unexplained, 0);
    }

    #[test]
    fn families_are_added_up_and_protocols_told_apart() {
        let moved = [(7, Moved::from([("UdpNoPorts", 2), ("Udp6NoPorts", 3)]))].into();
        let rows = reconcile(
            &moved,
            &[
                tallied("no-socket", 7, bits::UDP, 5),
                tallied("no-socket", 7, bits::TCP, 8),
            ],
        );
        let ports = row(&rows, "UdpNoPorts + Udp6NoPorts");
        assert_eq!((ports.delta, ports.explained, ports.unexplained), (5, 5, 0));
    }

    #[test]
    fn a_counter_of_its_own_takes_its_drops_from_the_common_one() {
        let drops = [
            tallied("paws-timewait", 7, bits::TCP, 2),
            tallied("paws-established", 7, bits::TCP, 1),
        ];
        let old = [(7, Moved::from([("TcpExtPAWSEstab", 3)]))].into();
        assert_eq!(row(&reconcile(&old, &drops), "TcpExtPAWSEstab").explained, 3);
        let new = [(
            7,
            Moved::from([("TcpExtPAWSEstab", 1), ("TcpExtPAWSTimewait", 2)]),
        )]
        .into();
        let rows = reconcile(&new, &drops);
        assert_eq!(row(&rows, "TcpExtPAWSEstab").explained, 1);
        assert_eq!(row(&rows, "TcpExtPAWSTimewait").unexplained, 0);
    }
}
