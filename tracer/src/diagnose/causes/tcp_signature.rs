//! What the causes of segments that are signed, or should be, have in common.

use super::values::{endpoint, in_netns};
use crate::diagnose::{CountedBy, Facts, Finding, RawEvent, Signature};

/// Reason, what is wrong, counter.
pub(super) type Wrong = (&'static str, &'static str, &'static str);

/// Their evidence.
pub(super) const EVIDENCE: &[(&str, &str)] = &[
    (
        "signature",
        "missing (the socket has a key for this peer), unexpected (it has none), unknown-key (none of this number; tcp-ao only), or wrong (another password, or a segment that was changed on its way)",
    ),
    ("socket", "local address and port"),
    ("peer", "the other end, which the key is for"),
];

/// Whether the kernel gives one of these reasons.
pub(super) fn reasons(signature: &Signature<'_>, wrong: &[Wrong]) -> bool {
    wrong.iter().any(|(reason, ..)| signature.because(&[reason]))
}

/// Evidence and remedy; `counters` is how the names of the counters begin.
pub(super) fn find(event: &RawEvent, facts: &Facts, wrong: &[Wrong], counters: &str) -> Finding {
    let mut found = Finding::default();
    let case = wrong
        .iter()
        .find(|(reason, ..)| facts.reason.as_deref() == Some(reason));
    if let Some((.., counter)) = case {
        found.counter = CountedBy::Named(counter);
    }
    let packet = event.parse();
    let peer = endpoint(packet.src, packet.sport);
    found
        .put("signature", case.map(|(_, what, _)| *what))
        .put("socket", endpoint(packet.dst, packet.dport))
        .put("peer", peer);
    found.advise(
        match packet.src {
            Some(src) => format!("Compare the keys of both ends for {src} and for the address that the peer knows this host by; see which counter grows."),
            None => "Compare the keys of both ends; see which counter grows.".to_owned(),
        },
        Some(in_netns(facts, None, &format!("nstat -az 'TcpExtTCP{counters}*'"))),
        "Reads only. NAT between the ends breaks the signature.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use super::*;
    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V7_3};

    pub(in super::super) fn samples(kernels: &[Kernel], wrong: &[Wrong]) -> Vec<Sample> {
        kernels
            .iter()
            .flat_map(|kernel| wrong.iter().map(|(reason, ..)| at(*kernel, reason)))
            .collect()
    }

    fn at(kernel: Kernel, reason: &str) -> Sample {
        Sample::freed(kernel, Site::Free, "tcp_v4_rcv")
            .reason(reason)
            .tcp("10.0.0.9:4000", "10.0.0.1:179", SYN)
            .on("eth0")
    }

    /// Each reason is a case with its counter.
    pub(in super::super) fn each_is_told(slug: &str, wrong: &[Wrong]) {
        for (reason, what, counter) in wrong {
            let drop = at(V7_3, reason).label();
            assert_eq!(drop.cause, slug);
            assert_eq!(drop.evidence["signature"], *what);
            assert_eq!(drop.counter.as_deref(), Some(*counter));
            assert_eq!(drop.evidence["peer"], "10.0.0.9:4000");
        }
    }
}
