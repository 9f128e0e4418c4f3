//! `accept-queue-full`: connections that the application does not accept.

use droptrace_common::{FieldId, Site, bits};

use crate::diagnose::{
    Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict, address_from_halves,
};

/// The accept queue of a listener was full.
pub(super) static CAUSE: Cause = Cause {
    slug: "accept-queue-full",
    family: Family::Listener,
    title: "accept queue of the listener is full",
    mechanism: "A finished handshake waits in the listener's accept queue until the application calls accept(). \
        The queue holds min(backlog of listen(), net.core.somaxconn) + 1 connections; both are read when listen() is \
        called. While it is full the kernel drops each new SYN (tcp_conn_request, net/ipv4/tcp_input.c) and each \
        last ACK of a handshake (tcp_v4_syn_recv_sock, net/ipv4/tcp_ipv4.c; tcp_v6_syn_recv_sock), and counts \
        ListenOverflows and ListenDrops. The client sends again after 1 s, 2 s, 4 s …, hence the slow connects. \
        With net.ipv4.tcp_abort_on_overflow=1 the last ACK is answered by RST instead. The SYN is freed as consumed: \
        no tool that watches kfree_skb sees it.",
    evidence: &[
        (
            "stage",
            "what was refused: syn, ack (last ACK of the handshake), syncookie-ack (the same, rebuilt from a cookie)",
        ),
        ("listener", "address and port of the listener"),
        ("queue_length", "connections waiting for accept() when it refused"),
        ("queue_limit", "limit of the queue; limit + 1 connections fit"),
        ("somaxconn", "net.core.somaxconn of that netns now"),
        (
            "limit_from",
            "where the limit came from: somaxconn (equal to it), application (its backlog is smaller), changed-since (somaxconn was lowered after listen()), or application-or-changed-since (smaller than somaxconn now; 128 is an old default)",
        ),
        (
            "abort_on_overflow",
            "net.ipv4.tcp_abort_on_overflow of that netns",
        ),
        (
            "sharing",
            "listeners that share the address and port (SO_REUSEPORT)",
        ),
    ],
    remedy: "Find out why the application does not call accept(): blocked on a disk or NFS, stopped, out of CPU. If \
        bursts are the reason, raise its backlog and net.core.somaxconn of its netns, then restart the listener.",
    counter: Some(Counter {
        name: "TcpExtListenOverflows",
    }),
    benign: false,
    needs: &[
        Need::Listener,
        Need::Sysctl("net.core.somaxconn"),
        Need::Sysctl("net.ipv4.tcp_abort_on_overflow"),
    ],
    matches,
    verdict,
    find,
    refine: None,
};

fn matches(signature: &Signature<'_>) -> bool {
    matches!(
        signature.site,
        Site::AcceptQueueSyn | Site::AcceptQueueAck | Site::AcceptQueueCookie
    )
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
    let length = event.field(FieldId::AcceptQueueLength);
    let limit = event.field(FieldId::AcceptQueueLimit);
    let somaxconn = event.field(FieldId::Somaxconn).or_else(|| {
        facts
            .sysctls
            .get("net.core.somaxconn")
            .and_then(|text| text.parse().ok())
    });
    let abort = event.field(FieldId::TcpAbortOnOverflow);
    let listener = facts.listener.as_ref();
    let port = event
        .field(FieldId::ListenerPort)
        .or_else(|| event.parse().dport.map(u64::from));
    let address = listener.map(|listener| listener.address.to_string()).or_else(|| {
        let ip = address_from_halves(
            event.field(FieldId::ListenerAddressHi)?,
            event.field(FieldId::ListenerAddressLo)?,
        );
        Some(std::net::SocketAddr::new(ip, port? as u16).to_string())
    });
    let limit_from = limit
        .zip(somaxconn)
        .map(|(limit, somaxconn)| limit_from(limit, somaxconn));
    found
        .put(
            "stage",
            match event.site {
                Site::AcceptQueueAck => "ack",
                Site::AcceptQueueCookie => "syncookie-ack",
                _ => "syn",
            },
        )
        .put("listener", address.clone())
        .put("queue_length", length)
        .put("queue_limit", limit)
        .put("somaxconn", somaxconn)
        .put("limit_from", limit_from)
        .put("abort_on_overflow", abort.map(|value| value != 0))
        .put("sharing", listener.map(|listener| listener.sharing));
    found.owner = listener.and_then(|listener| listener.owner.clone());
    advise(&mut found, address.as_deref(), limit, somaxconn, limit_from);
    found
}

fn limit_from(limit: u64, somaxconn: u64) -> &'static str {
    match limit.cmp(&somaxconn) {
        std::cmp::Ordering::Equal => "somaxconn",
        std::cmp::Ordering::Greater => "changed-since",
        // Defaults of somaxconn: 128 before 5.4, 4096 since (net/core/net_namespace.c).
        std::cmp::Ordering::Less if limit == 128 || limit == 4096 => "application-or-changed-since",
        std::cmp::Ordering::Less => "application",
    }
}

fn advise(
    found: &mut Finding,
    address: Option<&str>,
    limit: Option<u64>,
    somaxconn: Option<u64>,
    limit_from: Option<&'static str>,
) {
    let who = match &found.owner {
        Some(owner) => format!("{} (pid {})", owner.comm, owner.pid),
        None => format!("the listener on {}", address.unwrap_or("this port")),
    };
    let command = found
        .owner
        .as_ref()
        .map(|owner| format!("cat /proc/{0}/stack /proc/{0}/status", owner.pid));
    found.advise(
        format!(
            "See what keeps {who} from calling accept(): blocked on a file system, stopped, or short of CPU."
        ),
        command,
        "Reads only. A larger queue only delays the loss when accept() is not called at all.",
    );
    let (Some(limit), Some(somaxconn), Some(from)) = (limit, somaxconn, limit_from) else {
        return;
    };
    let wanted = (limit * 4).max(1024);
    match from {
        "somaxconn" => found.advise(
            format!("If bursts fill the queue: raise net.core.somaxconn (now {somaxconn}) in that netns, have {who} ask for a backlog as large, and restart it."),
            Some(format!("sysctl -w net.core.somaxconn={wanted}")),
            "The limit is fixed at listen(): without a restart of the listener nothing changes. Waiting connections take memory.",
        ),
        "application" => found.advise(
            format!("If bursts fill the queue: raise the backlog that {who} gives to listen() (now {limit}; net.core.somaxconn {somaxconn} allows more), and restart or reload it."),
            None,
            "Such as `listen 80 backlog=4096;` in nginx. The limit is fixed at listen().",
        ),
        "changed-since" => found.advise(
            format!("net.core.somaxconn is {somaxconn} now, lower than when {who} called listen(): after a restart the limit would fall to it. Raise it first."),
            Some(format!("sysctl -w net.core.somaxconn={wanted}")),
            "The limit is fixed at listen().",
        ),
        _ => found.advise(
            format!("net.core.somaxconn is {somaxconn} now, yet the limit is {limit}: either {who} asked for {limit}, or it called listen() before somaxconn was raised. Restart it; if the limit stays, raise its own backlog."),
            None,
            "The limit is fixed at listen(): only a restart of the listener takes up a new somaxconn.",
        ),
    };
}
