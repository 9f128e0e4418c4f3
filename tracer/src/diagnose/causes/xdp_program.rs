//! `xdp-program`: an XDP program drops the packet.

use super::values::{in_netns, on};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// Functions that free what a program said to drop of packets that have an `sk_buff` already: generic XDP, and veth's own.
const PLACES: [&str; 5] = [
    "do_xdp_generic",
    "netif_receive_generic_xdp",
    "veth_xdp_rcv_skb",
    "veth_xdp_rcv",
    "veth_poll",
];

/// The verdict of an XDP program.
pub(super) static CAUSE: Cause = Cause {
    slug: "xdp-program",
    family: Family::Device,
    title: "XDP program dropped the packet",
    mechanism: "An XDP program sees each packet that its device receives, before the stack does. If it says XDP_DROP, or fails (XDP_ABORTED), the packet is freed: by generic XDP in do_xdp_generic \
        (net/core/dev.c; netif_receive_generic_xdp on 5.10), by veth's own in veth_xdp_rcv_skb (drivers/net/veth.c; veth_poll on 5.10). The kernel gives no reason, or XDP. Drivers of hardware \
        run the program before a packet has an sk_buff: what is dropped there is seen by no tracepoint of packets, and only the counters of the device or of the program know of it.",
    evidence: &[
        ("interface", "device whose program dropped the packet"),
        (
            "mode",
            "native, generic, offloaded or several; null when it is gone by now",
        ),
        ("program", "name and id of the program"),
    ],
    remedy: "Find out who attached the program and what it is meant to drop; firewalls, load balancers and DDoS filters work that way.",
    counter: Some(Counter {
        name: "of the device: rx_xdp_drops (ethtool -S), where its driver has it",
    }),
    benign: false,
    needs: &[Need::Link],
    matches: |signature| signature.because(&["XDP"]) || signature.unspecified() && signature.at(&PLACES),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let interface = on(event, facts);
    let xdp = facts.link.as_ref().and_then(|link| link.xdp.as_ref());
    let program = xdp.and_then(|xdp| xdp.program.as_ref());
    found
        .put("interface", interface)
        .put("mode", xdp.map(|xdp| xdp.mode.clone()))
        .put("program", program.map(crate::diagnose::BpfProgram::text));
    match program {
        Some(program) => found.advise(
            "See who loaded the program, and since when.",
            Some(format!("bpftool prog show id {}", program.id)),
            "Reads only. `pids` names processes that hold it open.",
        ),
        None => found.advise(
            "See which devices have an XDP program.",
            Some(in_netns(facts, None, "bpftool net show")),
            "Reads only.",
        ),
    };
    if let Some(interface) = interface {
        found.advise(
            format!("If nobody wants it: detach it from {interface}."),
            Some(in_netns(facts, None, &format!("ip link set dev {interface} xdp off"))),
            "Whatever the program keeps away reaches the stack then. One that a process holds by a BPF link goes only with that.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10};
    use crate::diagnose::{BpfProgram, Link, Xdp};

    fn at(kernel: Kernel, mode: &str) -> Sample {
        let place = match (mode, kernel) {
            ("native", V5_10) => "veth_poll",
            ("native", _) => "veth_xdp_rcv_skb",
            (_, V5_10) => "netif_receive_generic_xdp",
            _ => "do_xdp_generic",
        };
        Sample::freed(kernel, Site::Free, place)
            .udp("10.0.0.9:4000", "10.0.0.1:53")
            .on("eth0")
            .fact(|facts| {
                facts.link = Some(Link {
                    xdp: Some(Xdp {
                        mode: mode.to_owned(),
                        program: Some(BpfProgram { id: 7, name: None }),
                    }),
                    ..Link::default()
                });
            })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| [at(kernel, "generic"), at(kernel, "native")])
            .collect()
    }

    #[test]
    fn the_program_is_named() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, "generic").label();
            assert_eq!(drop.evidence["mode"], "generic");
            assert_eq!(drop.evidence["program"], "id 7");
            assert_eq!(drop.remedy[0].command.as_deref(), Some("bpftool prog show id 7"));
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("ip link set dev eth0 xdp off")
            );
            let gone = at(kernel, "native").fact(|facts| facts.link = None).label();
            assert!(gone.evidence["program"].is_null());
            assert_eq!(gone.remedy[0].command.as_deref(), Some("bpftool net show"));
        }
    }
}
