//! `cpu-backlog-full`: a CPU has too many received packets before it.

use super::{
    unknown,
    values::{on, sysctl_number},
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// Packets that may wait for a CPU.
const LIMIT: &str = "net.core.netdev_max_backlog";

/// The queue of received packets of a CPU is full.
pub(super) static CAUSE: Cause = Cause {
    slug: "cpu-backlog-full",
    family: Family::Device,
    title: "receive queue of a CPU full",
    mechanism: "Packets of devices that do not poll, such as veth, loopback and tunnels, and those that RPS hands to another CPU, wait in a queue of the CPU that is to \
        handle them. If net.core.netdev_max_backlog of them wait, enqueue_to_backlog (net/core/dev.c) frees the next one, with the reason CPU_BACKLOG from 6.1 on. So it \
        does with the packets of one large flow when the queue is half full, if net.core.flow_limit_cpu_bitmap has the CPU. On 5.10 the place alone tells; there, a packet \
        to a device that is off is freed at the same place, and stays unknown.",
    evidence: &[
        ("interface", "device that receives the packet"),
        (
            "limit",
            "net.core.netdev_max_backlog: packets that may wait for one CPU",
        ),
    ],
    remedy: "Let more packets wait if the load comes in bursts; else the CPU is too busy: spread its work.",
    counter: Some(Counter {
        name: "softnet_stat dropped, the second column (/proc/net)",
    }),
    benign: false,
    needs: &[Need::Link, Need::HostSysctl(LIMIT)],
    matches: |signature| {
        signature.because(&["CPU_BACKLOG"])
            || signature.reason.is_none() && signature.at(&["enqueue_to_backlog"])
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(|_, facts| {
        let off = facts.reason.is_none() && facts.link.as_ref().is_some_and(|link| !link.up);
        off.then_some(&unknown::UNKNOWN)
    }),
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let limit = sysctl_number(facts, LIMIT);
    found.put("interface", on(event, facts)).put("limit", limit);
    if let Some(limit) = limit {
        found.advise(
            "Let more packets wait for a CPU; on the host itself, since no other network namespace has the setting.",
            Some(format!("sysctl -w {LIMIT}={}", (2 * limit).max(1000))),
            "Packets may wait longer, and a flood takes more kernel memory. Lost at the next boot unless /etc/sysctl.d sets it, too.",
        );
    }
    found.advise(
        "See which CPU drops (a line each, the second column), and whether one does all the work.",
        Some("cat /proc/net/softnet_stat".to_owned()),
        "Reads only. If one CPU has it all: spread receive interrupts or flows over CPUs (RSS, RPS), or slow down the sender.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::Link;
    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10, V6_1};

    fn at(kernel: Kernel) -> Sample {
        Sample::freed(kernel, Site::Free, "enqueue_to_backlog")
            .reason_since(V6_1, "CPU_BACKLOG")
            .udp("10.0.0.9:4000", "10.0.0.1:53")
            .on("veth0")
            .sysctl("net.core.netdev_max_backlog", "1000")
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL.into_iter().map(at).collect()
    }

    #[test]
    fn the_limit_is_shown_and_raised_on_the_host() {
        for kernel in Kernel::ALL {
            let drop = at(kernel)
                .fact(|facts| facts.netns_name = Some("web".to_owned()))
                .label();
            assert_eq!(drop.evidence["limit"], 1000);
            assert_eq!(drop.evidence["interface"], "veth0");
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("sysctl -w net.core.netdev_max_backlog=2000")
            );
        }
    }

    #[test]
    fn a_device_that_is_off_is_told_apart() {
        let off = |kernel| {
            at(kernel)
                .fact(|facts| facts.link = Some(Link::default()))
                .label()
                .cause
        };
        assert_eq!(off(V5_10), "unknown");
        assert_eq!(off(V6_1), "cpu-backlog-full");
    }
}
