//! What the causes of queueing disciplines share: which one dropped, and whether since it was full.

use super::values::{in_netns, on};
use crate::diagnose::{Facts, Finding, Link, Qdisc, RawEvent, Signature};

/// Reasons by which newer kernels say that no more fits: since about 6.14, and in the form that they have in 7.3.
pub(super) const FULL: [&str; 7] = [
    "QDISC_OVERLIMIT",
    "FQ_BAND_LIMIT",
    "FQ_FLOW_LIMIT",
    "QDISC_DROP_OVERLIMIT",
    "QDISC_DROP_MAXFLOWS",
    "QDISC_DROP_FQ_BAND_LIMIT",
    "QDISC_DROP_FLOW_LIMIT",
];
/// Those by which they say that a packet is dropped on purpose.
pub(super) const POLICY: [&str; 6] = [
    "QDISC_CONGESTED",
    "CAKE_FLOOD",
    "FQ_HORIZON_LIMIT",
    "QDISC_DROP_CONGESTED",
    "QDISC_DROP_CAKE_FLOOD",
    "QDISC_DROP_FQ_HORIZON_LIMIT",
];
/// Those that say no more than that a qdisc dropped it.
const ANY: [&str; 2] = ["QDISC_DROP", "QDISC_DROP_GENERIC"];

/// Kinds that drop when a packet comes before they are full.
const EARLY: [&str; 9] = [
    "red", "gred", "choke", "pie", "fq_pie", "sfb", "hhf", "dualpi2", "blue",
];

/// Whether a queueing discipline dropped the packet: by its reason, or by the place on kernels without reasons. There, other
/// lists of packets are freed at that place.
pub(super) fn dropped(signature: &Signature<'_>) -> bool {
    signature.because(&FULL)
        || signature.because(&POLICY)
        || signature.because(&ANY)
        || signature.reason.is_none() && signature.at(&["kfree_skb_list"])
}

/// What the facts say of such a drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// No more fitted in.
    Full,
    /// It was dropped on purpose.
    Policy,
    /// The device has no carrier or is off, and a stand-in drops whatever is sent by it.
    Down,
    /// Not told.
    Open,
}

/// Why a queueing discipline dropped the packet.
pub(super) fn told(facts: &Facts) -> Told {
    let reason = facts.reason.as_deref();
    let because = |reasons: &[&str]| reason.is_some_and(|reason| reasons.contains(&reason));
    if reason.is_none() && !sent(facts) {
        return Told::Open;
    }
    match &facts.link {
        _ if because(&FULL) => Told::Full,
        _ if because(&POLICY) => Told::Policy,
        None => Told::Open,
        // `dev_deactivate` puts `noop_qdisc` in place of a device's own (net/sched/sch_generic.c, 5.10 - 7.3).
        Some(link) if !link.up || !link.carrier => Told::Down,
        Some(link) => {
            let mut dropping = link.qdiscs.iter().filter(|qdisc| qdisc.leaf && qdisc.drops > 0);
            match (dropping.next(), dropping.next()) {
                (Some(qdisc), None) => by_kind(qdisc),
                // Several have dropped packets in their time: all must do so for the same reason.
                (Some(_), Some(_)) if dropping_all(link, Told::Full) => Told::Full,
                (Some(_), Some(_)) if dropping_all(link, Told::Policy) => Told::Policy,
                _ => Told::Open,
            }
        }
    }
}

fn dropping_all(link: &Link, told: Told) -> bool {
    link.qdiscs
        .iter()
        .filter(|qdisc| qdisc.leaf && qdisc.drops > 0)
        .all(|qdisc| by_kind(qdisc) == told)
}

/// Why a qdisc of this kind drops packets that come.
fn by_kind(qdisc: &Qdisc) -> Told {
    let nearly_full = qdisc
        .limit_packets
        .is_some_and(|limit| qdisc.queued_packets >= limit - limit / 8)
        || qdisc
            .limit_bytes
            .is_some_and(|limit| qdisc.queued_bytes >= limit - limit / 8);
    let early = EARLY.contains(&qdisc.kind.as_str()) || qdisc.loses;
    match (early, nearly_full) {
        (true, true) => Told::Open,
        (true, false) => Told::Policy,
        (false, _) => Told::Full,
    }
}

/// Whether the stack says that the list of packets was given up by who wanted to send them: for kernels without reasons.
fn sent(facts: &Facts) -> bool {
    let mut frames = facts.frames.iter().map(String::as_str);
    frames.any(|frame| frame == "kfree_skb_list")
        && frames.next().is_some_and(|caller| {
            caller.starts_with("__dev_queue_xmit") || caller.starts_with("__dev_xmit_skb")
        })
}

/// The one qdisc that drops, where only one does.
pub(super) fn culprit(facts: &Facts) -> Option<&Qdisc> {
    let link = facts.link.as_ref()?;
    let mut dropping = link.qdiscs.iter().filter(|qdisc| qdisc.leaf && qdisc.drops > 0);
    dropping.next().filter(|_| dropping.next().is_none())
}

/// Meaning of what [`put`] writes.
pub(super) const EVIDENCE: [(&str, &str); 5] = [
    ("interface", "device that the packet was to leave by"),
    (
        "qdisc",
        "kind and handle of the queueing discipline that drops; null where several do, or none by now",
    ),
    (
        "limit",
        "what fits into it, in packets or bytes; null where its kind does not say so",
    ),
    ("queued", "what is in it shortly after"),
    ("dropped", "packets that it dropped so far"),
];

/// Writes the evidence, and the remedy to look at it.
pub(super) fn put(found: &mut Finding, event: &RawEvent, facts: &Facts) {
    let qdisc = culprit(facts);
    let interface = on(event, facts);
    found
        .put("interface", interface)
        .put(
            "qdisc",
            qdisc.map(|qdisc| format!("{} {}", qdisc.kind, qdisc.handle)),
        )
        .put(
            "limit",
            qdisc.and_then(|qdisc| match (qdisc.limit_packets, qdisc.limit_bytes) {
                (Some(limit), _) => Some(format!("{limit} packets")),
                (None, Some(limit)) => Some(format!("{limit} bytes")),
                (None, None) if qdisc.kind == "pfifo_fast" => facts
                    .link
                    .as_ref()
                    .map(|link| format!("{} packets in each of three bands", link.queue_length)),
                (None, None) => None,
            }),
        )
        .put(
            "queued",
            qdisc.map(|qdisc| format!("{} packets, {} bytes", qdisc.queued_packets, qdisc.queued_bytes)),
        )
        .put("dropped", qdisc.map(|qdisc| qdisc.drops));
    if let Some(interface) = interface {
        found.advise(
            format!("See what the queues of {interface} hold, and which of them drops."),
            Some(in_netns(
                facts,
                None,
                &format!("tc -s -d qdisc show dev {interface}"),
            )),
            "Reads only.",
        );
    }
}
