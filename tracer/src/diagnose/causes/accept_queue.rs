//! `accept-queue-full`: connections that the application does not accept.

use droptrace_common::{FieldId, Site, bits};

use super::{
    evidence::joined,
    listener::{self, CANDIDATES, LIMIT_FROM, LimitFrom, Refuser},
    progress::{self, HeldUp},
    values::{in_netns, sysctl_number},
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The accept queue of a listener was full.
pub(super) static CAUSE: Cause = Cause {
    slug: "accept-queue-full",
    family: Family::Listener,
    title: "accept queue of the listener is full",
    mechanism: "A finished handshake waits in the listener's accept queue until the application calls accept(). \
        The queue holds min(backlog of listen(), net.core.somaxconn) + 1 connections; both are read when listen() is \
        called. While it is full the kernel drops each new SYN (tcp_conn_request, net/ipv4/tcp_input.c) and each \
        last ACK of a handshake (tcp_v4_syn_recv_sock, net/ipv4/tcp_ipv4.c; tcp_v6_syn_recv_sock), and counts \
        ListenOverflows and ListenDrops. A Linux client sends its SYN again after 1 s, then after 2 s, 4 s … more; from 6.5 on the first waits \
        are of 1 s each (net.ipv4.tcp_syn_linear_timeouts, 4 by default). Hence the slow connects. \
        With net.ipv4.tcp_abort_on_overflow=1 the last ACK is answered by RST instead. The SYN is freed as consumed: \
        no tool that watches kfree_skb sees it. Where the functions cannot be hooked, ListenOverflows, which nothing else moves, tells how many there \
        were, and the listener that is over its limit by then whose.",
    evidence: joined![
        [
            (
                "stage",
                "what was refused: syn, ack (last ACK of the handshake), syncookie-ack (the same, rebuilt from a cookie); null where only a counter tells",
            ),
            ("listener", "address and port of the listener"),
            ("queue_length", "connections waiting for accept() when it refused"),
            ("queue_limit", "limit of the queue; limit + 1 connections fit"),
            ("somaxconn", "net.core.somaxconn of that netns now"),
            ("limit_from", LIMIT_FROM),
            (
                "abort_on_overflow",
                "net.ipv4.tcp_abort_on_overflow of that netns",
            ),
            (
                "sharing",
                "listeners that share the address and port (SO_REUSEPORT)",
            ),
            CANDIDATES,
            (
                "sharing_full",
                "of those, how many have a full queue, when asked just after",
            ),
        ],
        progress::EVIDENCE
    ],
    remedy: "Find out why the application does not call accept(): blocked on a disk or NFS, stopped, out of CPU. If \
        bursts are the reason, raise its backlog and net.core.somaxconn of its netns, then restart the listener.",
    counter: Some(Counter {
        name: "TcpExtListenOverflows",
    }),
    benign: false,
    needs: &[
        Need::Listener,
        Need::Progress,
        Need::Sysctl("net.core.somaxconn"),
        Need::Sysctl("net.ipv4.tcp_abort_on_overflow"),
    ],
    matches,
    verdict,
    find,
    refine: None,
};

fn matches(signature: &Signature<'_>) -> bool {
    match signature.site {
        Site::AcceptQueueSyn | Site::AcceptQueueAck | Site::AcceptQueueCookie => true,
        Site::Counter => signature.because(&["TcpExtListenOverflows"]),
        _ => false,
    }
}

fn verdict(signature: &Signature<'_>) -> Verdict {
    if signature.site != Site::AcceptQueueSyn && signature.has(bits::ABORTED) {
        Verdict::Rejected
    } else {
        Verdict::Dropped
    }
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let refuser = Refuser::of(event, facts);
    let abort = event
        .field(FieldId::TcpAbortOnOverflow)
        .or_else(|| sysctl_number(facts, "net.ipv4.tcp_abort_on_overflow"));
    found
        .put(
            "stage",
            match event.site {
                Site::AcceptQueueAck => Some("ack"),
                Site::AcceptQueueCookie => Some("syncookie-ack"),
                Site::Counter => None,
                _ => Some("syn"),
            },
        )
        .put("listener", refuser.address.clone())
        .put("queue_length", listener::field(event, FieldId::AcceptQueueLength))
        .put("queue_limit", refuser.limit)
        .put("somaxconn", refuser.somaxconn)
        .put("limit_from", refuser.limit_from().map(LimitFrom::name))
        .put("abort_on_overflow", abort.map(|value| value != 0))
        .put("sharing", refuser.sharing)
        .put(
            CANDIDATES.0,
            listener::candidates(event, FieldId::AcceptQueueLength),
        )
        .put(
            "sharing_full",
            facts.listener.as_ref().map(|known| known.sharing_full),
        );
    found.owner = refuser.owner.cloned();
    advise(&mut found, facts, &refuser);
    found
}

fn advise(found: &mut Finding, facts: &Facts, refuser: &Refuser<'_>) {
    let who = refuser.who();
    let held = progress::put(found, facts, refuser.owner, "call accept()");
    if let Some(known) = facts
        .listener
        .as_ref()
        .filter(|known| known.sharing_full < known.sharing)
    {
        found.advise(
            format!(
                "{} of {} listeners on {} have room: the kernel gives each connection to one of them by its addresses and ports, however full it is. Mend the one that is full.",
                known.sharing - known.sharing_full,
                known.sharing,
                known.address
            ),
            Some(in_netns(facts, refuser.owner, &format!("ss -ltnp sport = :{}", known.address.port()))),
            "Reads only: Recv-Q is what waits, Send-Q the limit, and the process stands behind.",
        );
    }
    if held.is_some_and(HeldUp::takes_nothing) {
        return;
    }
    let (Some(limit), Some(somaxconn), Some(from)) = (refuser.limit, refuser.somaxconn, refuser.limit_from())
    else {
        return;
    };
    let raise = in_netns(
        facts,
        refuser.owner,
        &format!("sysctl -w net.core.somaxconn={}", (limit * 4).max(1024)),
    );
    match from {
        LimitFrom::Somaxconn => found.advise(
            format!("If bursts fill the queue: raise net.core.somaxconn (now {somaxconn}) in that netns, have {who} ask for a backlog as large, and restart it."),
            Some(raise),
            "The limit is fixed at listen(): without a restart of the listener nothing changes. Waiting connections take memory.",
        ),
        LimitFrom::Application => found.advise(
            format!("If bursts fill the queue: raise the backlog that {who} gives to listen() (now {limit}; net.core.somaxconn {somaxconn} allows more), and restart or reload it."),
            None,
            "Such as `listen 80 backlog=4096;` in nginx. The limit is fixed at listen(); should somaxconn have been lower then, the restart alone mends it.",
        ),
        LimitFrom::ChangedSince => found.advise(
            format!("net.core.somaxconn is {somaxconn} now, lower than when {who} called listen() with a limit of {limit}: after a restart the limit would fall to it. Raise it first."),
            Some(raise),
            "The limit is fixed at listen(): it holds until the listener is restarted, and grows only then.",
        ),
        LimitFrom::ApplicationOrChangedSince => found.advise(
            format!("net.core.somaxconn is {somaxconn} now, yet the limit is {limit}: either {who} asked for {limit}, or it called listen() before somaxconn was raised. Restart it; if the limit stays, raise its own backlog."),
            None,
            "The limit is fixed at listen(): only a restart of the listener takes up a new somaxconn.",
        ),
    };
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, bits};

    use crate::diagnose::causes::progress;
    use crate::diagnose::causes::sample::{ACK, Kernel, SYN, Sample, V5_10, V6_1, V6_12, V7_3};
    use crate::diagnose::{FoundBy, Listener, Owner, Progress, Verdict};

    fn at(kernel: Kernel, site: Site) -> Sample {
        let sample = match (site, kernel) {
            (Site::AcceptQueueSyn, _) => Sample::hook(kernel, site).tcp("10.0.0.9:40000", "10.0.0.1:80", SYN),
            (Site::AcceptQueueCookie, V5_10 | V6_1) => {
                Sample::freed(kernel, site, "tcp_v4_do_rcv").tcp("10.0.0.9:40000", "10.0.0.1:80", ACK)
            }
            (Site::AcceptQueueCookie, _) => Sample::freed(kernel, site, "cookie_v4_check")
                .reason("NO_SOCKET")
                .tcp("10.0.0.9:40000", "10.0.0.1:80", ACK),
            _ => Sample::freed(kernel, site, "tcp_v6_rcv")
                .reason_since(V7_3, "TCP_LISTEN_OVERFLOW")
                .tcp("[fd00::9]:40000", "[fd00::1]:80", ACK),
        };
        sample
            .on("eth0")
            .field(FieldId::AcceptQueueLength, 129)
            .field(FieldId::AcceptQueueLimit, 128)
            .field(FieldId::Somaxconn, 128)
            .field(FieldId::TcpAbortOnOverflow, 0)
            .field(FieldId::ListenerPort, 80)
    }

    fn owned(sample: Sample) -> Sample {
        sample.fact(|facts| {
            facts.listener = Some(Listener {
                address: "10.0.0.1:80".parse().expect("an address"),
                queue_length: 129,
                queue_limit: 128,
                inode: 7,
                owner: Some(Owner {
                    pid: 42,
                    comm: "nginx".to_owned(),
                    ..Owner::default()
                }),
                sharing: 2,
                sharing_full: 2,
            });
            facts.progress = Some(Progress {
                throttled: Some(0),
                blocked: 0,
                ..progress::tests::throttled()
            });
        })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    Site::AcceptQueueSyn,
                    Site::AcceptQueueAck,
                    Site::AcceptQueueCookie,
                ]
                .map(|site| owned(at(kernel, site)))
            })
            .chain([by_counter(1), by_counter(2)])
            .collect()
    }

    /// Known by counter, with this many listeners over their limit.
    fn by_counter(listeners: u64) -> Sample {
        (0..listeners).fold(
            Sample::hook(V6_1, Site::Counter).counter("TcpExtListenOverflows"),
            |sample, index| {
                sample
                    .address(FieldId::ListenerAddressHi, FieldId::ListenerAddressLo, "10.0.0.1")
                    .field(FieldId::ListenerPort, 80 + index)
                    .field(FieldId::AcceptQueueLength, 129)
                    .field(FieldId::AcceptQueueLimit, 128)
            },
        )
    }

    #[test]
    fn a_counter_names_one_listener_or_all_that_it_may_be() {
        let one = owned(by_counter(1)).label();
        assert_eq!(one.found_by, FoundBy::Counter);
        assert_eq!(one.evidence["listener"], "10.0.0.1:80");
        assert_eq!(one.evidence["queue_length"], 129);
        assert!(one.evidence["stage"].is_null() && one.evidence["candidates"].is_null());
        assert_eq!(one.owner.map(|owner| owner.pid), Some(42));
        let two = by_counter(2).label();
        assert!(two.evidence["listener"].is_null() && two.evidence["queue_limit"].is_null());
        assert_eq!(
            two.evidence["candidates"],
            serde_json::json!(["10.0.0.1:80 (129 of 128)", "10.0.0.1:81 (129 of 128)"])
        );
    }

    #[test]
    fn stage_and_verdict_follow_the_site() {
        for kernel in Kernel::ALL {
            for (site, stage) in [
                (Site::AcceptQueueSyn, "syn"),
                (Site::AcceptQueueAck, "ack"),
                (Site::AcceptQueueCookie, "syncookie-ack"),
            ] {
                let drop = at(kernel, site).label();
                assert_eq!(drop.evidence["stage"], stage);
                assert_eq!(drop.verdict, Verdict::Dropped);
                let aborted = at(kernel, site).bits(bits::ABORTED).label();
                let rejected = site != Site::AcceptQueueSyn;
                assert_eq!(aborted.verdict == Verdict::Rejected, rejected, "{stage}");
            }
        }
    }

    #[test]
    fn owner_is_the_listeners() {
        let drop = owned(at(V6_12, Site::AcceptQueueSyn))
            .fact(|facts| facts.netns_name = Some("web".to_owned()))
            .label();
        assert_eq!(drop.owner.map(|owner| owner.pid), Some(42));
        assert_eq!(drop.evidence["listener"], "10.0.0.1:80");
        assert_eq!(drop.remedy[0].command.as_deref(), Some("top -H -b -n 1 -p 42"));
        assert_eq!(
            drop.remedy[1].command.as_deref(),
            Some("nsenter -t 42 -n sysctl -w net.core.somaxconn=1024")
        );
        assert!(drop.remedy[1].effect.contains("without a restart"));
    }

    #[test]
    fn limit_tells_where_it_came_from() {
        for (limit, somaxconn, from) in [
            (128, 128, "somaxconn"),
            (128, 4096, "application-or-changed-since"),
            (511, 4096, "application"),
            (4096, 1024, "changed-since"),
        ] {
            let drop = Sample::hook(V5_10, Site::AcceptQueueSyn)
                .tcp("10.0.0.9:40000", "10.0.0.1:80", SYN)
                .field(FieldId::AcceptQueueLimit, limit)
                .sysctl("net.core.somaxconn", &somaxconn.to_string())
                .label();
            assert_eq!(drop.evidence["limit_from"], from);
            assert_eq!(drop.evidence["somaxconn"], somaxconn);
            let raises = drop.remedy[1].command.is_some();
            assert_eq!(raises, matches!(from, "somaxconn" | "changed-since"), "{from}");
            assert!(drop.remedy[1].action.contains(&limit.to_string()));
        }
    }
}
