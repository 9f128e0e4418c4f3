//! `syn-backlog-last-quarter`: the last quarter of tcp_max_syn_backlog is kept for known peers.

use droptrace_common::{FieldId, Site};

use super::{
    listener::Refuser,
    values::{endpoint, in_netns},
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The SYN came from an unproven peer while less than a quarter of tcp_max_syn_backlog was free.
pub(super) static CAUSE: Cause = Cause {
    slug: "syn-backlog-last-quarter",
    family: Family::Listener,
    title: "last quarter of tcp_max_syn_backlog is kept for known peers",
    mechanism: "With net.ipv4.tcp_syncookies=0 the kernel keeps the last quarter of net.ipv4.tcp_max_syn_backlog for \
        peers that it knows: once fewer than a quarter of it is free of half-open connections, a SYN is accepted only \
        from an address whose round-trip time is in the tcp_metrics cache (tcp_conn_request and tcp_peer_is_proven, \
        net/ipv4/tcp_input.c and tcp_metrics.c, 5.10 - 7.3). Every other SYN is dropped and counted in ListenDrops \
        alone. New clients are refused while old ones still get in. This is the only use of tcp_max_syn_backlog.",
    evidence: &[
        ("listener", "address and port of the listener"),
        ("syn_queue_length", "requests in the SYN queue when the SYN came"),
        ("max_syn_backlog", "net.ipv4.tcp_max_syn_backlog of that netns"),
        (
            "syncookies",
            "net.ipv4.tcp_syncookies of that netns; the rule holds only while it is 0",
        ),
        (
            "queue_limit",
            "limit of the listener: min(backlog, somaxconn) at listen()",
        ),
        ("peer", "address that is not in the tcp_metrics cache"),
    ],
    remedy: "Raise net.ipv4.tcp_max_syn_backlog, or turn syncookies on, which ends the rule.",
    counter: Some(Counter {
        name: "TcpExtListenDrops",
    }),
    benign: false,
    needs: &[
        Need::Listener,
        Need::Sysctl("net.ipv4.tcp_syncookies"),
        Need::Sysctl("net.ipv4.tcp_max_syn_backlog"),
    ],
    matches: |signature| signature.site == Site::SynBacklogLastQuarter,
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let refuser = Refuser::of(event, facts);
    found
        .put("listener", refuser.address.clone())
        .put("syn_queue_length", event.field(FieldId::SynQueueLength))
        .put("max_syn_backlog", refuser.max_syn_backlog)
        .put("syncookies", refuser.syncookies)
        .put("queue_limit", refuser.limit)
        .put("peer", endpoint(event.parse().src, None));
    found.owner = refuser.owner.cloned();
    if let Some(now) = refuser.max_syn_backlog {
        let wanted = (now * 4).max(4096);
        found.advise(
            format!("Raise net.ipv4.tcp_max_syn_backlog (now {now}) in that netns."),
            Some(in_netns(
                facts,
                refuser.owner,
                &format!("sysctl -w net.ipv4.tcp_max_syn_backlog={wanted}"),
            )),
            "Takes effect at once, without a restart. Half-open connections take memory. The listener's own limit still holds.",
        );
    }
    refuser.advise_syncookies(
        &mut found,
        facts,
        "Or turn syncookies on in that netns: the rule holds only while they are off.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .map(|kernel| {
                Sample::hook(kernel, Site::SynBacklogLastQuarter)
                    .tcp("10.0.0.9:40000", "10.0.0.1:80", SYN)
                    .on("eth0")
                    .field(FieldId::SynQueueLength, 97)
                    .field(FieldId::TcpMaxSynBacklog, 128)
                    .field(FieldId::TcpSyncookies, 0)
                    .field(FieldId::AcceptQueueLimit, 4096)
                    .field(FieldId::ListenerPort, 80)
                    .address(FieldId::ListenerAddressHi, FieldId::ListenerAddressLo, "::")
            })
            .into()
    }

    #[test]
    fn remedy_is_tcp_max_syn_backlog() {
        for sample in samples() {
            let drop = sample.label();
            assert_eq!(drop.evidence["peer"], "10.0.0.9");
            assert_eq!(drop.evidence["listener"], "[::]:80");
            assert_eq!(drop.evidence["max_syn_backlog"], 128);
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("sysctl -w net.ipv4.tcp_max_syn_backlog=4096")
            );
            assert!(drop.remedy[0].effect.contains("without a restart"));
            assert_eq!(drop.counter.as_deref(), Some("TcpExtListenDrops"));
        }
    }
}
