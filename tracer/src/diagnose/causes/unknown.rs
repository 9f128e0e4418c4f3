//! What the catalogue does not explain keeps the kernel's own word, or none.

use crate::diagnose::{Cause, Facts, Family, Finding, RawEvent, Signature, Verdict};

/// The kernel gives a reason that the catalogue has no cause for.
pub(super) static KERNEL_REASON: Cause = Cause {
    slug: "kernel-reason",
    family: Family::Other,
    title: "dropped for the kernel's own reason",
    mechanism: "The kernel names a drop reason (enum skb_drop_reason, include/net/dropreason-core.h) that this \
        catalogue does not explain further.",
    evidence: &[
        ("reason", "the kernel's name of the reason"),
        ("location", "kernel function that freed the packet"),
    ],
    remedy: "The comment at this reason in the kernel's include/net/dropreason-core.h says what it means.",
    counter: None,
    benign: false,
    needs: &[],
    matches: |signature| !signature.unspecified(),
    verdict,
    find,
    refine: None,
};

/// Neither the catalogue nor the kernel tells.
pub static UNKNOWN: Cause = Cause {
    slug: "unknown",
    family: Family::Other,
    title: "dropped, cause not known",
    mechanism: "The packet was freed as dropped, without a reason from the kernel, at a place that this catalogue \
        does not know.",
    evidence: &[
        ("reason", "the kernel's name of the reason, where it has one"),
        ("location", "kernel function that freed the packet"),
    ],
    remedy: "The location is the kernel function that freed the packet; its source tells which checks it makes.",
    counter: None,
    benign: false,
    needs: &[],
    matches: |_| true,
    verdict,
    find,
    refine: None,
};

fn verdict(_: &Signature<'_>) -> Verdict {
    Verdict::Dropped
}

fn find(_: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    found
        .put("reason", facts.reason.clone())
        .put("location", facts.location.clone());
    found
}
