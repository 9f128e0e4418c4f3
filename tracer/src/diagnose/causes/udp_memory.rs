//! `udp-memory`: all UDP sockets together hold as much as they may.

use droptrace_common::{Site, bits};

use super::values::{counter_of, sysctl, who};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The limit that `net.ipv4.udp_mem` sets.
pub(super) static CAUSE: Cause = Cause {
    slug: "udp-memory",
    family: Family::Socket,
    title: "UDP sockets hold as much memory as they may together",
    mechanism: "What waits in the receive buffers of all UDP sockets of the host may take as many pages as the third number of \
        net.ipv4.udp_mem says. Beyond that a datagram is dropped although its own socket has room (__udp_enqueue_schedule_skb, \
        net/ipv4/udp.c, answers ENOBUFS; reason PROTO_MEM from 6.1 on), and InErrors counts it, with MemErrors among them from 5.11 on; 7.x, which drops some of them \
        in a batch, does not always.",
    evidence: &[
        (
            "pages",
            "pages that UDP sockets hold on this host, when asked just after",
        ),
        (
            "udp_mem",
            "net.ipv4.udp_mem: three numbers of pages, the third of which is the limit",
        ),
    ],
    remedy: "Find the sockets that hold the memory: somebody does not read. If there are many and each holds little, raise net.ipv4.udp_mem.",
    counter: Some(Counter {
        name: "UdpMemErrors or Udp6MemErrors; UdpInErrors or Udp6InErrors before 5.11",
    }),
    benign: false,
    needs: &[
        Need::Owner,
        Need::MemoryPages,
        Need::HostSysctl("net.ipv4.udp_mem"),
    ],
    matches: |signature| {
        signature.site == Site::UdpMemory
            || signature.site == Site::Free && signature.because(&["PROTO_MEM"]) && signature.has(bits::UDP)
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    // The hook is for kernels without drop reasons, not all of which have MemErrors.
    let (v4, v6) = if event.site == Site::UdpMemory {
        ("UdpInErrors", "Udp6InErrors")
    } else {
        ("UdpMemErrors", "Udp6MemErrors")
    };
    let mut found = Finding {
        counter: counter_of(event.parse().dst, v4, v6),
        ..Finding::default()
    };
    found
        .put("pages", facts.memory_pages)
        .put("udp_mem", sysctl(facts, "net.ipv4.udp_mem"));
    found.advise(
        format!(
            "Find the sockets that hold the memory; {} got none for this datagram.",
            who(facts.owner.as_ref())
        ),
        Some("ss -uanmp".to_owned()),
        "Reads only, in one network namespace: r in skmem is what waits, rb its limit.",
    );
    found.advise(
        "If all of them are in use, raise net.ipv4.udp_mem: pages, of which the third number is the limit.",
        Some("sysctl net.ipv4.udp_mem".to_owned()),
        "Reads only. It is one setting for the whole host, by default an eighth of its memory (`udp_init`, net/ipv4/udp.c); the kernel takes that memory from everybody else.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10};

    fn at(kernel: Kernel, source: &str, destination: &str) -> Sample {
        let sample = if kernel == V5_10 {
            Sample::freed(kernel, Site::UdpMemory, "udp_queue_rcv_one_skb")
        } else {
            Sample::freed(kernel, Site::Free, "udp_queue_rcv_one_skb").reason("PROTO_MEM")
        };
        sample
            .udp(source, destination)
            .on("eth0")
            .sysctl("net.ipv4.udp_mem", "1\t2\t3")
            .fact(|facts| facts.memory_pages = Some(4))
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    at(kernel, "10.0.0.9:4000", "10.0.0.1:53"),
                    at(kernel, "[fd00::9]:4000", "[fd00::1]:53"),
                ]
            })
            .collect()
    }

    #[test]
    fn the_limit_stands_beside_what_is_used() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, "10.0.0.9:4000", "10.0.0.1:53").label();
            assert_eq!(drop.cause, "udp-memory");
            assert_eq!(drop.evidence["pages"], 4);
            assert_eq!(drop.evidence["udp_mem"], "1\t2\t3");
            let six = at(kernel, "[fd00::9]:4000", "[fd00::1]:53").label();
            let counters = if kernel == V5_10 {
                ["UdpInErrors", "Udp6InErrors"]
            } else {
                ["UdpMemErrors", "Udp6MemErrors"]
            };
            for (drop, counter) in [drop, six].into_iter().zip(counters) {
                assert_eq!(drop.counter.as_deref(), Some(counter));
            }
        }
    }
}
