//! `neigh-queue-full`: too many packets wait for a neighbour's hardware address.

use super::{
    unknown,
    values::{counter_of, in_netns, on, setting, sysctl_number},
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// Bytes that may wait for one neighbour.
const QUEUE: &str = "net.{ip}.neigh.{on}.unres_qlen_bytes";
/// How often a neighbour is asked; with 0 there is no waiting.
const QUESTIONS: &str = "net.{ip}.neigh.{on}.mcast_solicit";

/// The queue of packets that wait for address resolution is full.
pub(super) static CAUSE: Cause = Cause {
    slug: "neigh-queue-full",
    family: Family::Routing,
    title: "too many packets waited for ARP or neighbour discovery of the next hop",
    mechanism: "While the hardware address of the next hop is asked for, packets to it wait in the neighbour's queue, up to unres_qlen_bytes of kernel memory. \
        For a packet that does not fit any more __neigh_event_send (net/core/neighbour.c) frees those that wait longest, with the reason NEIGH_QUEUEFULL from 6.1 \
        on, and counts each as unresolved_discards. If the next hop answers, the rest is sent; if it does not, the rest is neigh-failed. On 5.10 the place \
        alone tells; a device that asks no neighbour at all (mcast_solicit=0) frees there, too, and the drop stays unknown.",
    evidence: &[
        (
            "neighbour",
            "next hop that was asked for, as the routing table has it now",
        ),
        ("interface", "device that it was asked on"),
        (
            "limit_bytes",
            "unres_qlen_bytes: kernel memory of packets that may wait for one neighbour",
        ),
    ],
    remedy: "See whether the next hop answers at all; if it only answers late, let more packets wait.",
    counter: Some(Counter {
        name: "arp_cache or ndisc_cache unresolved_discards (/proc/net/stat)",
    }),
    benign: false,
    needs: &[Need::Route, Need::Sysctl(QUEUE), Need::Sysctl(QUESTIONS)],
    matches: |signature| {
        signature.because(&["NEIGH_QUEUEFULL"])
            || signature.reason.is_none() && signature.at(&["__neigh_event_send"])
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(|event, facts| {
        let asks_nobody = facts.reason.is_none()
            && setting(event, facts, QUESTIONS).and_then(|name| sysctl_number(facts, &name)) == Some(0);
        asks_nobody.then_some(&unknown::UNKNOWN)
    }),
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    found.counter = counter_of(
        packet.dst,
        "arp_cache unresolved_discards (/proc/net/stat)",
        "ndisc_cache unresolved_discards (/proc/net/stat)",
    );
    let interface = on(event, facts);
    let neighbour = facts
        .route
        .as_ref()
        .and_then(|route| route.gateway.or(packet.dst));
    let setting = setting(event, facts, QUEUE);
    let limit = setting.as_deref().and_then(|name| sysctl_number(facts, name));
    found
        .put("neighbour", neighbour.map(|ip| ip.to_string()))
        .put("interface", interface)
        .put("limit_bytes", limit);
    let Some(target) = neighbour.or(packet.dst) else {
        return found;
    };
    found.advise(
        format!("See the state of {target}: INCOMPLETE and FAILED mean that it does not answer."),
        Some(in_netns(facts, None, &format!("ip neigh show to {target}"))),
        "Reads only. Where it never answers, more room for packets that wait helps nothing.",
    );
    if let (Some(setting), Some(limit)) = (setting, limit) {
        found.advise(
            "If it answers, but later than a burst of packets comes: let more of them wait.",
            Some(in_netns(
                facts,
                None,
                &format!("sysctl -w {setting}={}", (2 * limit).max(65536)),
            )),
            "Costs up to that much kernel memory for each neighbour that is asked for. Lost at the next boot unless /etc/sysctl.d sets it, too.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10, V6_1, of_both_versions};

    fn at(kernel: Kernel, version: u8) -> Sample {
        let sample =
            Sample::freed(kernel, Site::Free, "__neigh_event_send").reason_since(V6_1, "NEIGH_QUEUEFULL");
        let (sample, gateway, ip) = if version == 4 {
            (sample.udp("10.0.0.1:4000", "10.9.0.7:53"), "10.0.0.254", "ipv4")
        } else {
            (sample.udp("[fd00::1]:4000", "[fd01::7]:53"), "fd00::fe", "ipv6")
        };
        sample
            .leaving("eth0")
            .sysctl(&format!("net.{ip}.neigh.eth0.unres_qlen_bytes"), "212992")
            .sysctl(&format!("net.{ip}.neigh.eth0.mcast_solicit"), "3")
            .routed("eth0", gateway)
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        of_both_versions(at)
    }

    #[test]
    fn the_limit_of_the_device_is_shown_and_raised() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, 6).label();
            assert_eq!(drop.evidence["limit_bytes"], 212_992);
            assert_eq!(drop.evidence["neighbour"], "fd00::fe");
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("sysctl -w net.ipv6.neigh.eth0.unres_qlen_bytes=425984")
            );
        }
    }

    #[test]
    fn a_device_that_asks_nobody_has_no_queue() {
        let ask = |kernel| {
            at(kernel, 4)
                .sysctl("net.ipv4.neigh.eth0.mcast_solicit", "0")
                .label()
                .cause
        };
        assert_eq!(ask(V5_10), "unknown");
        assert_eq!(ask(V6_1), "neigh-queue-full");
    }
}
