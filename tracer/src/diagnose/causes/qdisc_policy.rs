//! `qdisc-policy`: a queueing discipline drops on purpose.

use super::{
    qdisc::{self, EVIDENCE, culprit},
    values::{in_netns, on},
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// Random loss, early drop, or the like.
pub(super) static CAUSE: Cause = Cause {
    slug: "qdisc-policy",
    family: Family::Device,
    title: "dropped by a queueing discipline on purpose, before it was full",
    mechanism: "Some queueing disciplines drop packets that would still fit: netem loses some at random, as it is told, to emulate a bad network; red, pie, choke and others drop \
        early so that senders slow down before the queue is full; cake and sfb defend against floods. Newer kernels give a reason of its own to most of these, but not to netem. Else the \
        reason is that of a full queue, QDISC_DROP, or none: the kind of the qdisc that counts drops tells then, if it is not near its limit.",
    evidence: &EVIDENCE,
    remedy: "Whoever set up the queueing discipline wants it so. netem has no place on a host in production.",
    counter: Some(Counter {
        name: "dropped of the qdisc (tc -s qdisc)",
    }),
    benign: false,
    needs: &[Need::Link],
    matches: |signature| signature.because(&qdisc::POLICY),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    qdisc::put(&mut found, event, facts);
    if let (Some(qdisc), Some(interface)) = (culprit(facts), on(event, facts))
        && qdisc.kind == "netem"
    {
        found.advise(
            format!(
                "If nobody tests with a bad network on {interface}: remove netem, here if it is at the root."
            ),
            Some(in_netns(
                facts,
                None,
                &format!("tc qdisc del dev {interface} root"),
            )),
            "The device gets its default queueing discipline; what waits in the old one is lost.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::qdisc_full::tests::{at, qdisc};
    use crate::diagnose::Qdisc;
    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10, V7_3};

    fn lossy(queued: u32) -> Qdisc {
        Qdisc {
            loses: true,
            queued_packets: queued,
            ..qdisc("netem", Some(1000))
        }
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| [at(kernel, lossy(0)), at(kernel, qdisc("red", None))])
            .chain([at(V7_3, qdisc("red", None)).reason("QDISC_DROP_CONGESTED")])
            .collect()
    }

    #[test]
    fn loss_is_told_from_a_full_queue() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, lossy(0)).label();
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("tc qdisc del dev eth0 root")
            );
            let open = if kernel == V5_10 {
                "unknown"
            } else {
                "kernel-reason"
            };
            assert_eq!(at(kernel, lossy(1000)).label().cause, open);
            assert_eq!(at(kernel, qdisc("netem", Some(3))).label().cause, "qdisc-full");
        }
    }
}
