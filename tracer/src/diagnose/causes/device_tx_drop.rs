//! `device-tx-drop`: a device does not take what is sent by it.

use super::values::{in_netns, on};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The driver, or the stand-in of a device that is off, frees the packet.
pub(super) static CAUSE: Cause = Cause {
    slug: "device-tx-drop",
    family: Family::Device,
    title: "device does not take what is sent by it",
    mechanism: "A device frees a packet that it cannot take. A TUN or TAP device, through which a virtual machine or a VPN gets its packets, does so when as many packets wait as its \
        queue holds (txqueuelen) since the program behind it reads too slowly, or when no program has it open (tun_net_xmit, drivers/net/tun.c; reasons FULL_RING and DEV_READY \
        from 6.1 on). A device without carrier, such as a veth whose peer is off, has a stand-in for a queueing discipline that frees everything (noop_qdisc, \
        net/sched/sch_generic.c), with the reason of any queueing discipline: that the device has no carrier tells then. On 5.10 the place tells, for TUN and TAP.",
    evidence: &[
        ("interface", "device that the packet was sent by"),
        (
            "why",
            "ring-full, not-ready, or no-carrier; null where the kernel does not say",
        ),
        ("up", "whether the device is switched on"),
        (
            "carrier",
            "whether it has a carrier: a peer that is on, or a program that has it open",
        ),
        ("queue_length", "its txqueuelen, in packets"),
    ],
    remedy: "Find out why the program or peer behind the device does not take packets: it hangs, is too slow, or is gone.",
    counter: Some(Counter {
        name: "tx_dropped of the device (ip -s link)",
    }),
    benign: false,
    needs: &[Need::Link],
    matches: |signature| {
        // A device that receives may be not ready, too.
        signature.because(&["FULL_RING"])
            || (signature.because(&["DEV_READY"]) || signature.reason.is_none())
                && signature.at(&["tun_net_xmit"])
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let link = facts.link.as_ref();
    let interface = on(event, facts);
    let why = match facts.reason.as_deref() {
        Some("FULL_RING") => Some("ring-full"),
        Some("DEV_READY") => Some("not-ready"),
        _ => link
            .filter(|link| !link.carrier || !link.up)
            .map(|_| "no-carrier"),
    };
    found
        .put("interface", interface)
        .put("why", why)
        .put("up", link.map(|link| link.up))
        .put("carrier", link.map(|link| link.carrier))
        .put("queue_length", link.map(|link| link.queue_length));
    let Some(interface) = interface else {
        return found;
    };
    found.advise(
        format!("See the state of {interface}, its peer or kind, and what it dropped."),
        Some(in_netns(facts, None, &format!("ip -s -d link show {interface}"))),
        "Reads only. NO-CARRIER means that the peer is off, or that no program has a TUN or TAP device open.",
    );
    if let (Some("ring-full"), Some(link)) = (why, link) {
        found.advise(
            "If the program behind it reads, but not fast enough for bursts: let more packets wait.",
            Some(in_netns(
                facts,
                None,
                &format!(
                    "ip link set {interface} txqueuelen {}",
                    (2 * link.queue_length).max(1000)
                ),
            )),
            "What waits longer comes later; a program that hangs is not helped.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use super::super::qdisc_full::tests::{at, qdisc};
    use crate::diagnose::Link;
    use crate::diagnose::causes::sample::{Kernel, Sample, V6_1};

    fn ring(kernel: Kernel) -> Sample {
        Sample::freed(kernel, Site::Free, "tun_net_xmit")
            .reason_since(V6_1, "FULL_RING")
            .udp("10.0.0.1:4000", "10.0.0.7:53")
            .leaving("tap0")
            .fact(|facts| {
                facts.link = Some(Link {
                    name: "tap0".to_owned(),
                    up: true,
                    carrier: true,
                    queue_length: 500,
                    ..Link::default()
                });
            })
    }

    fn without_carrier(kernel: Kernel) -> Sample {
        at(kernel, qdisc("pfifo", Some(3))).fact(|facts| {
            facts.link.as_mut().expect("a link").carrier = false;
        })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| [ring(kernel), without_carrier(kernel)])
            .collect()
    }

    #[test]
    fn a_full_ring_is_enlarged_and_a_lost_carrier_named() {
        for kernel in Kernel::ALL {
            let drop = ring(kernel).label();
            if kernel >= V6_1 {
                assert_eq!(drop.evidence["why"], "ring-full");
                assert_eq!(
                    drop.remedy[1].command.as_deref(),
                    Some("ip link set tap0 txqueuelen 1000")
                );
            } else {
                assert!(drop.evidence["why"].is_null());
            }
            let drop = without_carrier(kernel).label();
            assert_eq!(drop.evidence["why"], "no-carrier");
            assert_eq!(drop.evidence["carrier"], false);
        }
    }
}
