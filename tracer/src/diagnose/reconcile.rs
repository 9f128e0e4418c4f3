//! The kernel's counters as a second witness: which causes add to which
//! counter, and what is left when the drops that were seen are taken off.

use std::collections::BTreeMap;

use droptrace_common::{Site, bits};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Signature;

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
    /// Packets with one of these [`bits`] do not.
    pub but: u32,
    /// Only on kernels that have this counter, which counts some of the causes apart, or more of them.
    pub with: Option<&'static str>,
    /// Not on kernels that have this counter.
    pub without: Option<&'static str>,
}

const ROW: Witness = Witness {
    counters: &[],
    causes: &[],
    bits: 0,
    but: 0,
    with: None,
    without: None,
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
        counters: &["TcpExtSyncookiesFailed"],
        causes: &["syncookie-invalid"],
        ..ROW
    },
    Witness {
        counters: &["TcpExtPAWSEstab"],
        causes: &["paws-established", "paws-request", "paws-timewait"],
        without: Some("TcpExtPAWSTimewait"),
        ..ROW
    },
    Witness {
        counters: &["TcpExtPAWSEstab"],
        causes: &["paws-established", "paws-request"],
        with: Some("TcpExtPAWSTimewait"),
        ..ROW
    },
    Witness {
        counters: &["TcpExtPAWSTimewait"],
        causes: &["paws-timewait"],
        ..ROW
    },
    Witness {
        counters: &["TcpExtTCPChallengeACK", "TcpExtTCPACKSkippedChallenge"],
        causes: &["tcp-challenge-ack"],
        ..ROW
    },
    Witness {
        counters: &["TcpExtTCPZeroWindowDrop"],
        causes: &["tcp-zero-window"],
        without: Some("TcpExtBeyondWindow"),
        ..ROW
    },
    Witness {
        counters: &["TcpExtTCPZeroWindowDrop", "TcpExtBeyondWindow"],
        causes: &["tcp-zero-window", "tcp-out-of-window"],
        but: bits::RST,
        with: Some("TcpExtBeyondWindow"),
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
        counters: &["UdpRcvbufErrors", "Udp6RcvbufErrors"],
        causes: &["socket-rcvbuf-full"],
        bits: bits::UDP,
        ..ROW
    },
    Witness {
        counters: &["conntrack:insert_failed"],
        causes: &["conntrack-insert-race", "conntrack-nat-exhausted"],
        ..ROW
    },
];

/// A counter that alone proves a cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Names as `nstat` prints them; all of `TcpExt`. Each drop adds to one of them.
    pub counters: &'static [&'static str],
    /// Slug of the cause.
    pub cause: &'static str,
}

/// The counters that nothing but drops of one cause moves. Where no hook sees those drops, what moved is told as they are.
/// OfoPruned counts how often segments were thrown away, one or more each time (`tcp_prune_ofo_queue`,
/// net/ipv4/tcp_input.c, 5.10 - 7.3): it is never more than the segments that a hook sees.
pub const PROOFS: &[Proof] = &[
    Proof {
        counters: &["TcpExtListenOverflows"],
        cause: "accept-queue-full",
    },
    Proof {
        counters: &["TcpExtTCPReqQFullDrop"],
        cause: "syn-queue-full",
    },
    Proof {
        counters: &["TcpExtTCPChallengeACK", "TcpExtTCPACKSkippedChallenge"],
        cause: "tcp-challenge-ack",
    },
    Proof {
        counters: &["TcpExtTCPZeroWindowDrop"],
        cause: "tcp-zero-window",
    },
    Proof {
        counters: &["TcpExtOfoPruned"],
        cause: "tcp-ofo-pruned",
    },
];

/// Counters of a device for frames that came and found no room, be it in the host's ring of buffers or in the device's own memory
/// (`struct rtnl_link_stats64`, include/uapi/linux/if_link.h, 5.10 - 7.3). No hook sees those frames. Drivers do not agree on which
/// of them is which, and some count a frame in two.
pub const MISSED: [&str; 3] = ["rx_missed_errors", "rx_over_errors", "rx_fifo_errors"];

/// Every counter by which a drop can be known, in the order in which events number them from 1 on.
pub fn proving() -> impl Iterator<Item = &'static str> {
    PROOFS.iter().map(Proof::counter).chain(MISSED)
}

impl Proof {
    /// The counter by which a drop that it proves is known.
    pub const fn counter(&self) -> &'static str {
        self.counters[0]
    }

    /// How far its counters moved.
    pub fn moved(&self, moved: &Moved) -> u64 {
        self.counters.iter().filter_map(|name| moved.get(name)).sum()
    }

    /// How many drops that were seen its counters may have counted, at most: those of its cause, those without a label
    /// that may be of it, both also where the kernel did not say in which netns they were.
    pub fn seen(&self, netns: u32, tallied: &[Tallied]) -> u64 {
        tallied
            .iter()
            .filter(|total| !total.by_counter && (total.netns == netns || total.netns == 0))
            .filter(|total| total.cause == self.cause || total.perhaps == Some(self.cause))
            .map(|total| total.packets)
            .sum()
    }
}

/// The cause of [`PROOFS`] that a drop may be although it is labelled otherwise: where the hook that knows better is missing, a
/// last ACK that a listener refuses is freed like many others, and a RST that a pending handshake does not believe like
/// one that ends it.
pub fn perhaps(signature: &Signature<'_>, cause: &str) -> Option<&'static str> {
    const LAST_ACK: [&str; 7] = [
        "tcp_v4_rcv",
        "tcp_v6_rcv",
        "tcp_v4_do_rcv",
        "tcp_v6_do_rcv",
        "cookie_v4_check",
        "cookie_v6_check",
        "tcp_get_cookie_sock",
    ];
    match cause {
        "unknown" | "kernel-reason"
            if signature.has(bits::TCP)
                && !signature.has(bits::SYN)
                && signature.at(&LAST_ACK)
                && (signature.unspecified() || signature.because(&["TCP_LISTEN_OVERFLOW", "NO_SOCKET"])) =>
        {
            Some("accept-queue-full")
        }
        "tcp-reset-received" if signature.site == Site::RequestOther => Some("tcp-challenge-ack"),
        _ => None,
    }
}

/// Every counter that the tables name.
pub fn counter_names() -> impl Iterator<Item = &'static str> {
    let of_witnesses = WITNESSES.iter().flat_map(|witness| {
        witness
            .counters
            .iter()
            .chain(&witness.with)
            .chain(&witness.without)
            .copied()
    });
    of_witnesses.chain(PROOFS.iter().flat_map(|proof| proof.counters.iter().copied()))
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
    /// The cause that they may be instead: see [`perhaps`].
    pub perhaps: Option<&'static str>,
    /// No hook saw them: a counter told.
    pub by_counter: bool,
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
    /// Packets of the causes that add to it, as hooks saw them.
    pub explained: u64,
    /// Packets that no hook saw, and that were told since this counter, or another one, alone proves their cause.
    #[serde(default)]
    pub by_counter: u64,
    /// What of `delta` is neither.
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
            let has = |other: Option<&'static str>| other.map(|other| counters.contains_key(other));
            if has(witness.with) == Some(false) || has(witness.without) == Some(true) {
                continue;
            }
            let explains = |total: &&Tallied| {
                total.netns == *netns
                    && witness.causes.contains(&total.cause)
                    && total.bits & witness.bits == witness.bits
                    && total.bits & witness.but == 0
            };
            let sum = |by_counter| -> u64 {
                let those = tallied.iter().filter(explains);
                those
                    .filter(|total| total.by_counter == by_counter)
                    .map(|total| total.packets)
                    .sum()
            };
            let delta: u64 = known.iter().sum();
            let (explained, by_counter) = (sum(false), sum(true));
            if delta > 0 || explained > 0 {
                reconciled.push(Reconciled {
                    counter: witness.counters.join(" + "),
                    netns: *netns,
                    netns_name: None,
                    delta,
                    explained,
                    by_counter,
                    unexplained: delta.saturating_sub(explained + by_counter),
                });
            }
        }
    }
    reconciled
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::{Location, cause_by_slug, classify};

    fn tallied(cause: &'static str, netns: u32, bits: u32, packets: u64) -> Tallied {
        Tallied {
            cause,
            netns,
            bits,
            packets,
            perhaps: None,
            by_counter: false,
        }
    }

    fn row<'a>(rows: &'a [Reconciled], counter: &str) -> &'a Reconciled {
        rows.iter().find(|row| row.counter == counter).unwrap()
    }

    #[test]
    fn the_table_names_causes_that_exist() {
        let proven = PROOFS.iter().map(|proof| &proof.cause);
        for cause in WITNESSES.iter().flat_map(|witness| witness.causes).chain(proven) {
            assert!(cause_by_slug(cause).is_some(), "{cause}");
        }
    }

    #[test]
    fn a_proven_drop_is_its_cause() {
        for proof in PROOFS {
            let signature = Signature {
                site: Site::Counter,
                reason: Some(proof.counter()),
                location: Location::Known(None),
                bits: 0,
            };
            assert_eq!(classify(&signature).slug, proof.cause);
            assert!(proof.counters.iter().all(|name| name.starts_with("TcpExt")));
        }
    }

    #[test]
    fn what_may_have_been_counted_is_taken_off() {
        let proof = &PROOFS[0];
        let unlabelled = Tallied {
            perhaps: Some("accept-queue-full"),
            ..tallied("unknown", 7, bits::TCP, 2)
        };
        let drops = [
            tallied("accept-queue-full", 7, bits::TCP, 4),
            tallied("accept-queue-full", 8, bits::TCP, 8),
            tallied("accept-queue-full", 0, bits::TCP, 1),
            unlabelled,
            tallied("unknown", 7, bits::TCP, 16),
        ];
        assert_eq!(proof.seen(7, &drops), 7);
        let last_ack = |reason, flags| Signature {
            site: Site::Free,
            reason,
            location: Location::Known(Some("tcp_v4_rcv")),
            bits: bits::TCP | flags,
        };
        assert_eq!(
            perhaps(&last_ack(Some("TCP_LISTEN_OVERFLOW"), 0), "kernel-reason"),
            Some("accept-queue-full")
        );
        assert_eq!(perhaps(&last_ack(None, bits::SYN), "unknown"), None);
        assert_eq!(perhaps(&last_ack(None, 0), "no-socket"), None);
    }

    #[test]
    fn what_a_counter_told_is_marked() {
        let moved = [(7, Moved::from([("TcpExtListenOverflows", 5)]))].into();
        let told = Tallied {
            by_counter: true,
            ..tallied("accept-queue-full", 7, 0, 3)
        };
        let rows = reconcile(&moved, &[tallied("accept-queue-full", 7, bits::TCP, 1), told]);
        let overflows = row(&rows, "TcpExtListenOverflows");
        assert_eq!(
            (overflows.explained, overflows.by_counter, overflows.unexplained),
            (1, 3, 1)
        );
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
