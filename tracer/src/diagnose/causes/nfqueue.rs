//! `nfqueue`: a packet for a program behind NFQUEUE was lost, or dropped by its verdict.

use droptrace_common::Site;

use super::{
    evidence::joined,
    netfilter::{self, PACKET},
    unknown,
    values::in_netns,
};
use crate::diagnose::{Cause, Facts, Family, Finding, HookPoint, Need, RawEvent, Signature, Verdict};

/// Functions at which netfilter frees a packet that no queue took.
const NOT_TAKEN: &[&str] = &["nf_queue"];

/// A queue lost or dropped the packet.
pub(super) static CAUSE: Cause = Cause {
    slug: "nfqueue",
    family: Family::Netfilter,
    title: "NFQUEUE lost the packet, or its program dropped it",
    mechanism: "A rule gave the packet to a program (NFQUEUE target, queue statement). If no program listens on that queue, if \
        the queue is full, or if the program's socket buffer is, nf_queue (net/netfilter/nf_queue.c) frees the packet. One that the \
        program gave back with the verdict drop, or that a rule dropped afterwards, is freed at nf_reinject (5.10, 6.1) or \
        nfqnl_reinject (net/netfilter/nfnetlink_queue.c, 6.12 and later). The kernel gives no reason in either case.",
    evidence: joined![
        [
            (
                "why",
                "no-listener: no program listens on the queue; queue-full: the queue was full; buffer-full: the program's socket buffer was; verdict: the program's, or that of a rule after the queue; null when a packet was not taken and the queues do not tell why",
            ),
            (
                "queues",
                "queues of the netns: number, port id of the program, packets waiting, dropped because the queue was full, dropped because the program's socket buffer was; null when they could not be read",
            ),
            (
                "hook_point",
                "prerouting, input, forward, output or postrouting; null when the stack does not tell, as it never does after a program's verdict",
            ),
        ],
        PACKET
    ],
    remedy: "See whether the program runs, keeps up and means to drop; a rule with --queue-bypass (nft: bypass) lets packets pass while no program listens.",
    counter: None,
    benign: false,
    needs: &[Need::Owner, Need::Queues],
    matches: |signature| {
        signature.site == Site::Free
            && netfilter::doubt(signature).is_none()
            && (netfilter::behind_queue(signature) || is_not_taken(signature))
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(|event, facts| {
        let open = netfilter::may_be_clash_behind_queue(&Signature::of_event(event, facts), facts);
        open.then(|| unknown::left_open(facts))
    }),
};

fn is_not_taken(signature: &Signature<'_>) -> bool {
    signature.unspecified() && signature.at(NOT_TAKEN)
}

/// Why a queue did not take the packet, as far as its counters tell: they count from when the program bound the queue.
fn why(facts: &Facts) -> Option<&'static str> {
    let queues = facts.queues.as_ref()?;
    let mut dropping = queues
        .iter()
        .filter(|queue| queue.dropped > 0 || queue.user_dropped > 0);
    match (dropping.next(), dropping.next()) {
        (None, _) => Some("no-listener"),
        // Its own, unless another rule names a queue without a program.
        (Some(queue), None) if queue.user_dropped == 0 && queue.waiting > 0 => Some("queue-full"),
        (Some(queue), None) if queue.dropped == 0 => Some("buffer-full"),
        _ => None,
    }
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let not_taken = is_not_taken(&Signature::of_event(event, facts));
    found
        .put("why", if not_taken { why(facts) } else { Some("verdict") })
        .put(
            "queues",
            facts.queues.as_ref().map(|queues| {
                let lines = queues.iter().map(|queue| {
                    format!(
                        "{}: port id {}, waiting {}, queue full {}, buffer full {}",
                        queue.number, queue.port_id, queue.waiting, queue.dropped, queue.user_dropped
                    )
                });
                lines.collect::<Vec<_>>()
            }),
        )
        .put("hook_point", HookPoint::of(facts).map(HookPoint::name));
    netfilter::put_packet(&mut found, event, facts, false);
    found.advise(
        if not_taken {
            "See which program should take packets from the queue, whether it runs and keeps up."
        } else {
            "See which program gives the verdicts; its own log or rules tell why it drops."
        },
        Some(in_netns(facts, None, "cat /proc/net/netfilter/nfnetlink_queue")),
        "Reads only: queue, port id of the program (its pid, mostly), waiting, copy mode and range, dropped by the queue and for the program's buffer. A rule with `--queue-bypass` (nft: `bypass`) lets packets pass while no program listens.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::{
        NfQueue,
        causes::{
            netfilter::tests::frames,
            sample::{Kernel, SYN, Sample, V6_12},
        },
    };

    fn freed(kernel: Kernel, location: &str) -> Sample {
        Sample::freed(kernel, Site::Free, location)
            .tcp("10.0.0.9:40000", "10.0.0.1:80", SYN)
            .on("eth0")
    }

    const fn queue(number: u16, waiting: u32, dropped: u64, user_dropped: u64) -> NfQueue {
        NfQueue {
            number,
            port_id: 42,
            waiting,
            dropped,
            user_dropped,
        }
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                let reinject = if kernel >= V6_12 {
                    "nfqnl_reinject"
                } else {
                    "nf_reinject"
                };
                [
                    frames(freed(kernel, "nf_queue"), &["nf_hook_slow", "ip_local_deliver"])
                        .fact(|facts| facts.queues = Some(vec![queue(0, 1024, 3, 0)])),
                    freed(kernel, reinject),
                ]
            })
            .collect()
    }

    #[test]
    fn counters_tell_why_a_packet_was_not_taken() {
        for (queues, why) in [
            (vec![], Some("no-listener")),
            (vec![queue(1, 5, 0, 0)], Some("no-listener")),
            (vec![queue(1, 5, 0, 0), queue(2, 1024, 1, 0)], Some("queue-full")),
            // Drained by now, or of long ago.
            (vec![queue(2, 0, 1, 0)], None),
            (vec![queue(2, 0, 0, 1)], Some("buffer-full")),
            (vec![queue(2, 9, 1, 1)], None),
            (vec![queue(1, 9, 1, 0), queue(2, 9, 1, 0)], None),
        ] {
            for kernel in Kernel::ALL {
                let drop = freed(kernel, "nf_queue")
                    .fact(|facts| facts.queues = Some(queues.clone()))
                    .label();
                assert_eq!(drop.evidence["why"], serde_json::json!(why), "{queues:?}");
                assert!(drop.remedy[0].effect.contains("bypass"));
            }
        }
        let unread = freed(V6_12, "nf_queue").label();
        assert!(unread.evidence["why"].is_null() && unread.evidence["queues"].is_null());
        assert_eq!(freed(V6_12, "nfqnl_reinject").label().evidence["why"], "verdict");
    }

    #[test]
    fn where_clashes_are_not_seen_no_verdict_is_blamed() {
        let unseen = |place| {
            freed(V6_12, place)
                .fact(|facts| facts.clashes_unseen = true)
                .label()
        };
        assert_eq!(unseen("nfqnl_reinject").cause, "unknown");
        let doubt = &unseen("nfqnl_reinject").evidence["doubt"];
        assert!(
            doubt
                .as_str()
                .is_some_and(|doubt| doubt.contains("nf_ct_resolve_clash"))
        );
        // It never came to conntrack again.
        assert_eq!(unseen("nf_queue").cause, "nfqueue");
    }
}
