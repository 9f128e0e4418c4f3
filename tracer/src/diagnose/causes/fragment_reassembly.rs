//! `fragment-reassembly`: a fragment whose packet never became whole.

use droptrace_common::Site;

use super::values::{in_netns, on, sysctl_number};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// Where the first fragment of a packet is freed that was waited for in vain.
const EXPIRED: [&str; 4] = [
    "ip_expire",
    "ip6_frag_expire",
    "ip6frag_expire_frag_queue",
    "nf_ct_frag6_expire",
];
/// Where any fragment is freed.
const PLACES: [&str; 9] = [
    "ip_defrag",
    "ip_frag_queue",
    "ip_frag_reasm",
    "ipv6_frag_rcv",
    "ip6_frag_queue",
    "nf_ct_frag6_gather",
    "nf_ct_frag6_queue",
    "inet_frag_rbtree_purge",
    "inet_frag_destroy",
];
const TIME: [&str; 2] = ["net.ipv4.ipfrag_time", "net.ipv6.ip6frag_time"];
const MEMORY: [&str; 2] = ["net.ipv4.ipfrag_high_thresh", "net.ipv6.ip6frag_high_thresh"];

/// Fragments were missing, did not fit together, or found no memory.
pub(super) static CAUSE: Cause = Cause {
    slug: "fragment-reassembly",
    family: Family::Routing,
    title: "fragments that could not be put together",
    mechanism: "A fragmented packet is whole only when all its fragments have come. Those that came wait for ipfrag_time (ip6frag_time) seconds, then ip_expire (net/ipv4/ip_fragment.c) or \
        ip6_frag_expire (net/ipv6/reassembly.c) frees them and tells the sender time exceeded if the first one is there. If fragments of this network namespace hold \
        ipfrag_high_thresh bytes, the first fragment of another packet is freed at once, as are fragments that overlap or are malformed. The reason is FRAG_REASM_TIMEOUT or \
        FRAG_TOO_FAR on newer kernels; on others the place tells. ReasmFails counts packets, not fragments. Of fragments but the first, the free does not name the network namespace.",
    evidence: &[
        (
            "why",
            "timeout; too-far (from too many packets behind); null where memory, overlap and malformed fragments look the same",
        ),
        ("timeout_s", "seconds that fragments wait for the rest"),
        (
            "limit_bytes",
            "kernel memory of all fragments that wait in this network namespace",
        ),
        ("interface", "device that the fragment came by"),
    ],
    remedy: "Find where the other fragments go: a firewall that lets only first fragments through, or loss. Better: send packets that need no fragments.",
    counter: Some(Counter {
        name: "IpReasmFails or Ip6ReasmFails",
    }),
    benign: false,
    needs: &[
        Need::Sysctl(TIME[0]),
        Need::Sysctl(TIME[1]),
        Need::Sysctl(MEMORY[0]),
        Need::Sysctl(MEMORY[1]),
    ],
    matches: |signature| {
        signature.because(&["FRAG_REASM_TIMEOUT", "FRAG_TOO_FAR"])
            || signature.site == Site::Free
                && signature.unspecified()
                && (signature.at(&EXPIRED) || signature.at(&PLACES))
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let v6 = packet.is_ipv6();
    found.counter = CountedBy::Named(if v6 { "Ip6ReasmFails" } else { "IpReasmFails" });
    let family = usize::from(v6);
    let why = match facts.reason.as_deref() {
        Some("FRAG_REASM_TIMEOUT") => Some("timeout"),
        Some("FRAG_TOO_FAR") => Some("too-far"),
        _ => Signature::of_event(event, facts)
            .at(&EXPIRED)
            .then_some("timeout"),
    };
    let limit = sysctl_number(facts, MEMORY[family]);
    found
        .put("why", why)
        .put("timeout_s", sysctl_number(facts, TIME[family]))
        .put("limit_bytes", limit)
        .put("interface", on(event, facts));
    found.advise(
        "See whether fragments come in at all, and which: those after the first have no ports, so a rule by port does not let them through.",
        Some(in_netns(
            facts,
            None,
            &format!(
                "tcpdump -c 20 -nvi any '{}'",
                if v6 { "ip6 proto 44" } else { "ip[6:2] & 0x3fff != 0" }
            ),
        )),
        "Copies packets to the terminal; ends after 20.",
    );
    if why.is_none() && limit.is_some() {
        found.advise(
            "See how much memory fragments hold; near the limit, let them have more.",
            Some(in_netns(
                facts,
                None,
                &format!(
                    "sh -c \"grep FRAG /proc/net/sockstat{}; sysctl {}\"",
                    if v6 { "6" } else { "" },
                    MEMORY[family]
                ),
            )),
            "Reads only.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::causes::sample::{Kernel, Sample, V6_12};

    fn expired(kernel: Kernel, version: u8) -> Sample {
        let place = if version == 4 {
            "ip_expire"
        } else {
            "ip6_frag_expire"
        };
        ask(
            Sample::freed(kernel, Site::Free, place).reason_since(V6_12, "FRAG_REASM_TIMEOUT"),
            version,
        )
    }

    fn refused(kernel: Kernel, version: u8) -> Sample {
        let place = if version == 4 {
            "ip_defrag"
        } else {
            "ipv6_frag_rcv"
        };
        ask(Sample::freed(kernel, Site::Free, place), version)
    }

    fn ask(sample: Sample, version: u8) -> Sample {
        if version == 4 {
            sample.udp("10.0.0.9:4000", "10.0.0.1:53")
        } else {
            sample.udp("[fd00::9]:4000", "[fd00::1]:53")
        }
        .on("eth0")
        .sysctl("net.ipv4.ipfrag_time", "30")
        .sysctl("net.ipv4.ipfrag_high_thresh", "4194304")
        .sysctl("net.ipv6.ip6frag_time", "60")
        .sysctl("net.ipv6.ip6frag_high_thresh", "4194304")
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    expired(kernel, 4),
                    expired(kernel, 6),
                    refused(kernel, 4),
                    refused(kernel, 6),
                ]
            })
            .collect()
    }

    #[test]
    fn a_timeout_is_told_from_what_is_refused_at_once() {
        for kernel in Kernel::ALL {
            let drop = expired(kernel, 6).label();
            assert_eq!(drop.evidence["why"], "timeout");
            assert_eq!(drop.evidence["timeout_s"], 60);
            assert_eq!(drop.remedy.len(), 1);
            let drop = refused(kernel, 4).label();
            assert!(drop.evidence["why"].is_null());
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("sh -c \"grep FRAG /proc/net/sockstat; sysctl net.ipv4.ipfrag_high_thresh\"")
            );
        }
    }
}
