//! `qdisc-full`: the queue before a device is full.

use super::{
    device_tx_drop,
    qdisc::{self, EVIDENCE, Told, culprit},
    qdisc_policy, unknown,
    values::{in_netns, on},
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// A queueing discipline holds as much as it may.
pub(super) static CAUSE: Cause = Cause {
    slug: "qdisc-full",
    family: Family::Device,
    title: "queue before the device full",
    mechanism: "What is sent by a device waits in its queueing discipline (qdisc), which frees packets that do not fit. __dev_queue_xmit (net/core/dev.c) frees what it \
        refused: with the reason QDISC_DROP on 6.1 and 6.12, with finer ones on newer kernels, such as QDISC_DROP_OVERLIMIT on 7.3. QDISC_DROP alone does not say that a queue is full, since random loss and \
        early drop have it, too: the kind of the qdisc that counts drops decides then, as it does on 5.10, where the stack must show that the packet was being sent. Where that \
        stays open, the kernel's reason stays.",
    evidence: &EVIDENCE,
    remedy: "The device or its rate limit is slower than what is sent: send less, allow more rate, or let more packets wait at the price of delay.",
    counter: Some(Counter {
        name: "dropped of the qdisc (tc -s qdisc)",
    }),
    benign: false,
    needs: &[Need::Link],
    matches: |signature| qdisc::dropped(signature) && !signature.because(&qdisc::POLICY),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(|_, facts| match qdisc::told(facts) {
        Told::Full => None,
        Told::Policy => Some(&qdisc_policy::CAUSE),
        Told::Down => Some(&device_tx_drop::CAUSE),
        Told::Open => Some(unknown::left_open(facts)),
    }),
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    qdisc::put(&mut found, event, facts);
    let (Some(qdisc), Some(interface)) = (culprit(facts), on(event, facts)) else {
        return found;
    };
    let change = match (qdisc.kind.as_str(), qdisc.limit_packets, qdisc.limit_bytes) {
        ("pfifo_fast", ..) => facts.link.as_ref().map(|link| {
            format!(
                "ip link set {interface} txqueuelen {}",
                (2 * link.queue_length).max(1000)
            )
        }),
        // Of tbf and netem the other values would have to be given, too.
        (kind @ ("pfifo" | "codel" | "fq_codel" | "fq" | "sfq"), Some(limit), _) if qdisc.handle != "0:" => {
            Some(format!(
                "tc qdisc change dev {interface} handle {} {kind} limit {}",
                qdisc.handle,
                u64::from(limit) * 2
            ))
        }
        ("bfifo", _, Some(limit)) if qdisc.handle != "0:" => Some(format!(
            "tc qdisc change dev {interface} handle {} bfifo limit {}",
            qdisc.handle,
            u64::from(limit) * 2
        )),
        _ => None,
    };
    if let Some(change) = change {
        found.advise(
            "If it is bursts that do not fit: let twice as much wait.",
            Some(in_netns(facts, None, &change)),
            "What waits longer comes later: a queue that is always full only adds delay.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10, V6_1, V6_12, V7_3};
    use crate::diagnose::{Link, Qdisc};

    /// A datagram that the qdisc of a device dropped; the kernel's reason tells no more than that.
    pub(in super::super) fn at(kernel: Kernel, qdisc: Qdisc) -> Sample {
        let place = match kernel {
            V5_10 => "kfree_skb_list",
            V6_1 => "kfree_skb_list_reason",
            V6_12 => "__dev_queue_xmit",
            V7_3 => "__tcf_kfree_skb_list",
        };
        let sample = Sample::freed(kernel, Site::Free, place)
            .udp("10.0.0.1:4000", "10.0.0.7:53")
            .leaving("eth0")
            .fact(|facts| {
                facts.link = Some(Link {
                    name: "eth0".to_owned(),
                    up: true,
                    carrier: true,
                    queue_length: 1000,
                    qdiscs: vec![qdisc],
                    ..Link::default()
                });
            });
        match kernel {
            V5_10 => sample.fact(|facts| {
                facts.frames = ["kfree_skb_list", "__dev_queue_xmit"].map(str::to_owned).to_vec();
            }),
            V6_1 | V6_12 => sample.reason("QDISC_DROP"),
            V7_3 => sample.reason("QDISC_DROP_GENERIC"),
        }
    }

    pub(in super::super) fn qdisc(kind: &str, limit: Option<u32>) -> Qdisc {
        Qdisc {
            kind: kind.to_owned(),
            handle: "8001:".to_owned(),
            leaf: true,
            limit_packets: limit,
            queued_packets: 3,
            queued_bytes: 300,
            drops: 5,
            ..Qdisc::default()
        }
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    at(kernel, qdisc("pfifo", Some(3))),
                    at(kernel, qdisc("pfifo_fast", None)),
                ]
            })
            .chain([at(V7_3, qdisc("fq", Some(10))).reason("QDISC_DROP_FLOW_LIMIT")])
            .collect()
    }

    #[test]
    fn the_qdisc_that_drops_is_named_and_enlarged() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, qdisc("pfifo", Some(3))).label();
            assert_eq!(drop.evidence["qdisc"], "pfifo 8001:");
            assert_eq!(drop.evidence["limit"], "3 packets");
            assert_eq!(drop.evidence["queued"], "3 packets, 300 bytes");
            assert_eq!(drop.evidence["dropped"], 5);
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("tc qdisc change dev eth0 handle 8001: pfifo limit 6")
            );
            let drop = at(kernel, qdisc("pfifo_fast", None)).label();
            assert_eq!(drop.evidence["limit"], "1000 packets in each of three bands");
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("ip link set eth0 txqueuelen 2000")
            );
        }
    }

    #[test]
    fn a_full_queue_is_claimed_only_where_it_is_proven() {
        for kernel in Kernel::ALL {
            let open = if kernel == V5_10 {
                "unknown"
            } else {
                "kernel-reason"
            };
            let idle = Qdisc {
                drops: 0,
                ..qdisc("pfifo", Some(3))
            };
            assert_eq!(at(kernel, idle).label().cause, open);
            let unasked = at(kernel, qdisc("pfifo", Some(3))).fact(|facts| facts.link = None);
            assert_eq!(unasked.label().cause, open);
            let mixed = at(kernel, qdisc("pfifo", Some(3))).fact(|facts| {
                let link = facts.link.as_mut().expect("a link");
                link.qdiscs.push(qdisc("red", None));
            });
            assert_eq!(mixed.label().cause, open);
        }
        // Other lists of packets are freed at the same place on 5.10.
        let elsewhere = at(V5_10, qdisc("pfifo", Some(3))).fact(|facts| facts.frames.truncate(1));
        assert_eq!(elsewhere.label().cause, "unknown");
    }
}
