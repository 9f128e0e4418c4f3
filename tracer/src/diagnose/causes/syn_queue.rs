//! `syn-queue-full`: more half-open connections than the listener's backlog allows.

use droptrace_common::{FieldId, Site};

use super::{
    listener::{LIMIT_FROM, LimitFrom, Refuser},
    values::{in_netns, sysctl_number},
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The SYN queue of a listener was full while syncookies were off.
pub(super) static CAUSE: Cause = Cause {
    slug: "syn-queue-full",
    family: Family::Listener,
    title: "SYN queue of the listener is full and syncookies are off",
    mechanism: "Each SYN that the listener answers waits in its SYN queue until the last ACK of the handshake comes. \
        The queue is full when it holds as many requests as the listener's limit, min(backlog of listen(), \
        net.core.somaxconn), not as net.ipv4.tcp_max_syn_backlog (inet_csk_reqsk_queue_is_full, \
        include/net/inet_connection_sock.h: at the limit on 5.10, above it from 6.1 on). With net.ipv4.tcp_syncookies=1 \
        the kernel then answers without keeping state; with 0 it drops the SYN (tcp_conn_request, \
        net/ipv4/tcp_input.c) and counts TCPReqQFullDrop and ListenDrops. This test comes before the one of the accept \
        queue: when both are full, this one is blamed.",
    evidence: &[
        ("listener", "address and port of the listener"),
        ("syn_queue_length", "requests in the SYN queue when the SYN came"),
        (
            "queue_limit",
            "limit of the listener: min(backlog, somaxconn) at listen()",
        ),
        (
            "accept_queue_length",
            "connections waiting for accept() at that moment",
        ),
        ("syncookies", "net.ipv4.tcp_syncookies of that netns"),
        ("somaxconn", "net.core.somaxconn of that netns now"),
        ("limit_from", LIMIT_FROM),
        (
            "max_syn_backlog",
            "net.ipv4.tcp_max_syn_backlog of that netns; it does not bound this queue",
        ),
        (
            "sharing",
            "listeners that share the address and port (SO_REUSEPORT)",
        ),
    ],
    remedy: "Turn syncookies on, or raise the backlog of the listener and net.core.somaxconn of its netns and restart \
        the listener. net.ipv4.tcp_max_syn_backlog does not help here.",
    counter: Some(Counter {
        name: "TcpExtTCPReqQFullDrop",
    }),
    benign: false,
    needs: &[
        Need::Listener,
        Need::Sysctl("net.core.somaxconn"),
        Need::Sysctl("net.ipv4.tcp_syncookies"),
        Need::Sysctl("net.ipv4.tcp_max_syn_backlog"),
    ],
    matches: |signature| signature.site == Site::SynQueueFull,
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let refuser = Refuser::of(event, facts);
    let syncookies = event
        .field(FieldId::TcpSyncookies)
        .or_else(|| sysctl_number(facts, "net.ipv4.tcp_syncookies"));
    let max_syn_backlog = event
        .field(FieldId::TcpMaxSynBacklog)
        .or_else(|| sysctl_number(facts, "net.ipv4.tcp_max_syn_backlog"));
    found
        .put("listener", refuser.address.clone())
        .put("syn_queue_length", event.field(FieldId::SynQueueLength))
        .put("queue_limit", refuser.limit)
        .put("accept_queue_length", event.field(FieldId::AcceptQueueLength))
        .put("syncookies", syncookies)
        .put("somaxconn", refuser.somaxconn)
        .put("limit_from", refuser.limit_from().map(LimitFrom::name))
        .put("max_syn_backlog", max_syn_backlog)
        .put("sharing", refuser.sharing);
    found.owner = refuser.owner.cloned();
    advise(&mut found, facts, &refuser);
    found
}

fn advise(found: &mut Finding, facts: &Facts, refuser: &Refuser<'_>) {
    let who = refuser.who();
    found.advise(
        "Turn syncookies on in that netns: a SYN that finds the queue full is then answered without keeping state.",
        Some(in_netns(facts, refuser.owner, "sysctl -w net.ipv4.tcp_syncookies=1")),
        "Takes effect at once, and only while a queue is full. A connection made from a cookie has no window scaling and \
         no SACK unless the client sends TCP timestamps; a lost last ACK is not repaired by the server.",
    );
    let Some(limit) = refuser.limit else {
        return;
    };
    let wanted = (limit * 4).max(1024);
    let (action, command) = match refuser.somaxconn {
        Some(somaxconn) if somaxconn < wanted => (
            format!(
                "Raise the limit, now {limit}: net.core.somaxconn (now {somaxconn}) in that netns, and the backlog that {who} gives to listen(); then restart it."
            ),
            Some(in_netns(
                facts,
                refuser.owner,
                &format!("sysctl -w net.core.somaxconn={wanted}"),
            )),
        ),
        _ => (
            format!(
                "Raise the backlog that {who} gives to listen(), now {limit}; net.core.somaxconn allows more. Then restart it."
            ),
            None,
        ),
    };
    found.advise(
        action,
        command,
        "The limit is fixed at listen(): without a restart of the listener nothing changes. It bounds the accept queue too. \
         Against a SYN flood a longer queue only lasts a little longer.",
    );
}
