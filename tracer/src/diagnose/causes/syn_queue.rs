//! `syn-queue-full`: more half-open connections than the listener's backlog allows.

use droptrace_common::{FieldId, Site};

use super::listener::{self, CANDIDATES, LIMIT_FROM, LimitFrom, Refuser};
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
        queue: when both are full, this one is blamed. Where the function cannot be hooked, TCPReqQFullDrop, which nothing else moves, tells how many \
        there were.",
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
        CANDIDATES,
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
    matches: |signature| {
        signature.site == Site::SynQueueFull
            || signature.site == Site::Counter && signature.because(&["TcpExtTCPReqQFullDrop"])
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let refuser = Refuser::of(event, facts);
    found
        .put("listener", refuser.address.clone())
        .put(
            "syn_queue_length",
            listener::field(event, FieldId::SynQueueLength),
        )
        .put("queue_limit", refuser.limit)
        .put(
            "accept_queue_length",
            listener::field(event, FieldId::AcceptQueueLength),
        )
        .put("syncookies", refuser.syncookies)
        .put("somaxconn", refuser.somaxconn)
        .put("limit_from", refuser.limit_from().map(LimitFrom::name))
        .put("max_syn_backlog", refuser.max_syn_backlog)
        .put("sharing", refuser.sharing)
        .put(CANDIDATES.0, listener::candidates(event, FieldId::SynQueueLength));
    found.owner = refuser.owner.cloned();
    advise(&mut found, facts, &refuser);
    found
}

fn advise(found: &mut Finding, facts: &Facts, refuser: &Refuser<'_>) {
    refuser.advise_syncookies(
        found,
        facts,
        "Turn syncookies on in that netns: a SYN that finds the queue full is then answered without keeping state.",
    );
    refuser.advise_longer_queue(
        found,
        facts,
        "The limit is fixed at listen(): without a restart of the listener nothing changes. It bounds the accept queue too. \
         Against a SYN flood a longer queue only lasts a little longer.",
    );
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V5_10};
    use crate::diagnose::{Listener, Verdict};

    pub(in super::super) fn samples() -> Vec<Sample> {
        let by_counter = Sample::hook(V5_10, Site::Counter).counter("TcpExtTCPReqQFullDrop");
        let two = (443..445).fold(by_counter, |sample, port| {
            sample
                .address(FieldId::ListenerAddressHi, FieldId::ListenerAddressLo, "fd00::1")
                .field(FieldId::ListenerPort, port)
                .field(FieldId::SynQueueLength, 512)
                .field(FieldId::AcceptQueueLimit, 511)
        });
        let mut samples = seen();
        samples.push(two);
        samples
    }

    fn seen() -> Vec<Sample> {
        Kernel::ALL
            .map(|kernel| {
                Sample::hook(kernel, Site::SynQueueFull)
                    .tcp("[fd00::9]:40000", "[fd00::1]:443", SYN)
                    .on("eth0")
                    .field(FieldId::SynQueueLength, 512)
                    .field(FieldId::AcceptQueueLength, 3)
                    .field(FieldId::AcceptQueueLimit, 511)
                    .field(FieldId::Somaxconn, 4096)
                    .field(FieldId::TcpSyncookies, 0)
                    .field(FieldId::TcpMaxSynBacklog, 1024)
                    .fact(|facts| {
                        facts.netns_name = Some("web".to_owned());
                        facts.listener = Some(Listener {
                            address: "[::]:443".parse().expect("an address"),
                            queue_length: 3,
                            queue_limit: 511,
                            inode: 7,
                            owner: None,
                            sharing: 1,
                            sharing_full: 1,
                        });
                    })
            })
            .into()
    }

    #[test]
    fn remedy_speaks_of_cookies_and_backlog_not_of_max_syn_backlog() {
        for sample in seen() {
            let drop = sample.label();
            assert_eq!(drop.verdict, Verdict::Dropped);
            assert_eq!(drop.evidence["syn_queue_length"], 512);
            assert_eq!(drop.evidence["limit_from"], "application");
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("ip netns exec web sysctl -w net.ipv4.tcp_syncookies=1")
            );
            assert!(
                drop.remedy[1]
                    .action
                    .contains("backlog that the listener on [::]:443 gives")
            );
            assert!(
                drop.remedy
                    .iter()
                    .all(|remedy| !remedy.action.contains("max_syn_backlog"))
            );
        }
    }

    #[test]
    fn a_small_somaxconn_is_raised_first() {
        let drop = Sample::hook(V5_10, Site::SynQueueFull)
            .tcp("10.0.0.9:40000", "10.0.0.1:80", SYN)
            .field(FieldId::AcceptQueueLimit, 128)
            .field(FieldId::Somaxconn, 128)
            .label();
        assert_eq!(
            drop.remedy[1].command.as_deref(),
            Some("sysctl -w net.core.somaxconn=1024")
        );
    }
}
