//! `socket-rcvbuf-full`: packets that the application does not read fast enough.

use std::net::IpAddr;

use droptrace_common::{Site, bits};

use super::{
    evidence::joined,
    progress::{self, HeldUp},
    values::{endpoint, socket_memory, sysctl_number, who},
};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// Protocol numbers of IP.
const UDP: u8 = 17;
const UDPLITE: u8 = 136;

/// The receive buffer of a socket, not TCP's, is full.
pub(super) static CAUSE: Cause = Cause {
    slug: "socket-rcvbuf-full",
    family: Family::Socket,
    title: "receive buffer of the socket is full",
    mechanism: "A packet for a UDP or raw socket waits in its receive buffer until the application reads it. What waits may take \
        sk_rcvbuf bytes, each packet with its overhead (hundreds of bytes even for a small one). While the buffer is full each further packet \
        is dropped, and nobody is told (__udp_enqueue_schedule_skb, net/ipv4/udp.c, which counts RcvbufErrors; sock_queue_rcv_skb, \
        net/core/sock.c, for raw sockets, which no counter of the netns shows). From 6.1 on the kernel gives the reason SOCKET_RCVBUFF; before, \
        what that function answers tells, for UDP. A raw socket is given a copy, which is lost; the packet itself goes its way. Newer kernels, such as 6.12, make no copy for one that is full: nothing is freed there. TCP does not lose data so: it shuts its window.",
    evidence: joined![
        [
            ("socket", "local address and port that the packet is for"),
            (
                "receive_buffer",
                "what may wait, in bytes, overhead included (sk_rcvbuf, twice what SO_RCVBUF asked for)",
            ),
            (
                "queued",
                "what waits, in bytes, overhead included (sk_rmem_alloc): at the drop where the kernel has no drop reasons, else when asked just after",
            ),
            (
                "socket_drops",
                "packets that this socket has lost so far, whatever the cause (sk_drops)",
            ),
            (
                "rmem_max",
                "net.core.rmem_max: the most that SO_RCVBUF may ask for",
            ),
            (
                "limit_from",
                "default (net.core.rmem_default: the application asks for nothing), rmem_max (it asks for as much or more), or application (it asks for less)",
            ),
        ],
        progress::EVIDENCE
    ],
    remedy: "Find out why the application does not keep up. If bursts are the reason: let it ask for a larger receive buffer (SO_RCVBUF), \
        raise net.core.rmem_max so that it gets it, or share the port among more sockets (SO_REUSEPORT).",
    counter: Some(Counter {
        name: "UdpRcvbufErrors or Udp6RcvbufErrors (UDP)",
    }),
    benign: false,
    needs: &[
        Need::Socket,
        Need::Progress,
        Need::HostSysctl("net.core.rmem_max"),
        Need::HostSysctl("net.core.rmem_default"),
    ],
    matches: |signature| {
        signature.site == Site::ReceiveBufferFull
            || signature.site == Site::Free
                && signature.because(&["SOCKET_RCVBUFF"])
                && !signature.has(bits::TCP)
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

/// UDP counts by the packet's family (`__udp_queue_rcv_skb`, net/ipv4/udp.c; `__udpv6_queue_rcv_skb`, net/ipv6/udp.c; 5.10 - 7.3).
fn counter(protocol: Option<u8>, dst: Option<IpAddr>) -> CountedBy {
    match (protocol, dst) {
        (Some(UDP), Some(IpAddr::V4(_))) => CountedBy::Named("UdpRcvbufErrors"),
        (Some(UDP), Some(IpAddr::V6(_))) => CountedBy::Named("Udp6RcvbufErrors"),
        (Some(UDPLITE), Some(IpAddr::V4(_))) => CountedBy::Named("UdpLiteRcvbufErrors"),
        (Some(UDPLITE), Some(IpAddr::V6(_))) => CountedBy::Named("UdpLite6RcvbufErrors"),
        _ => CountedBy::Nothing,
    }
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let packet = event.parse();
    let mut found = Finding {
        counter: counter(packet.protocol, packet.dst),
        ..Finding::default()
    };
    let memory = socket_memory(event, facts);
    let (rmem_max, default) = (
        sysctl_number(facts, "net.core.rmem_max"),
        sysctl_number(facts, "net.core.rmem_default"),
    );
    let from = limit_from(memory.receive_buffer, rmem_max, default);
    found
        .put("socket", endpoint(packet.dst, packet.dport))
        .put("receive_buffer", memory.receive_buffer)
        .put("queued", memory.queued)
        .put("socket_drops", memory.drops)
        .put("rmem_max", rmem_max)
        .put("limit_from", from);
    let held = progress::put(&mut found, facts, facts.owner.as_ref(), "read from the socket");
    if held.is_some_and(HeldUp::takes_nothing) {
        return found;
    }
    let who = who(facts.owner.as_ref());
    // 4 MiB take a burst of some thousand packets.
    let wanted = memory
        .receive_buffer
        .map_or(4 << 20, |now| (now * 4).max(4 << 20));
    // One for the whole host, and not to be set in other network namespaces (net/core/sysctl_net_core.c, 5.10 - 7.3).
    let raise = format!("sysctl -w net.core.rmem_max={wanted}");
    match from {
        Some("default") => found.advise(
            format!("If bursts fill the buffer: raise net.core.rmem_max, and have {who} ask for {wanted} bytes by SO_RCVBUF."),
            Some(raise),
            "Of the whole host. Sockets that ask for nothing keep net.core.rmem_default, which is read when a socket is made. The memory is taken only while packets wait.",
        ),
        Some("rmem_max") => found.advise(
            format!("If bursts fill the buffer: raise net.core.rmem_max, which is all that {who} gets of what it asks for, and restart it."),
            Some(raise),
            "Of the whole host. SO_RCVBUF takes the limit at the moment of asking: without a restart nothing changes.",
        ),
        Some(_) => found.advise(
            format!("If bursts fill the buffer: have {who} ask for a larger one by SO_RCVBUF; net.core.rmem_max allows more."),
            None,
            "Many programs have a setting for it. The memory is taken only while packets wait.",
        ),
        None => found.advise(
            format!("If bursts fill the buffer: have {who} ask for a larger one by SO_RCVBUF, and raise net.core.rmem_max if that is less."),
            Some("sysctl net.core.rmem_max net.core.rmem_default".to_owned()),
            "Reads only. The memory is taken only while packets wait.",
        ),
    };
    found
}

/// Where the size of the buffer comes from: SO_RCVBUF doubles what is asked for, up to rmem_max (`sk_setsockopt` and
/// `__sock_set_rcvbuf`, net/core/sock.c, 5.10 - 7.3).
fn limit_from(buffer: Option<u64>, rmem_max: Option<u64>, default: Option<u64>) -> Option<&'static str> {
    let (buffer, rmem_max, default) = (buffer?, rmem_max?, default?);
    Some(if buffer == default {
        "default"
    } else if buffer == rmem_max * 2 {
        "rmem_max"
    } else {
        "application"
    })
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, bits};

    use crate::diagnose::causes::progress;
    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10, V6_1, V6_12, V7_3};
    use crate::diagnose::{Owner, Progress, SocketMemory};

    fn at(kernel: Kernel, destination: &str) -> Sample {
        let source = if destination.starts_with('[') {
            "[fd00::9]:4000"
        } else {
            "10.0.0.9:4000"
        };
        let sample = if kernel == V5_10 {
            Sample::freed(kernel, Site::ReceiveBufferFull, "udp_queue_rcv_one_skb")
                .field(FieldId::SocketQueued, 213_504)
                .field(FieldId::SocketReceiveBuffer, 212_992)
        } else {
            Sample::freed(kernel, Site::Free, "udp_queue_rcv_one_skb").reason("SOCKET_RCVBUFF")
        };
        sample
            .udp(source, destination)
            .on("eth0")
            .sysctl("net.core.rmem_max", "212992")
            .sysctl("net.core.rmem_default", "212992")
            .fact(|facts| {
                facts.socket = Some(SocketMemory {
                    queued: Some(211_200),
                    receive_buffer: Some(212_992),
                    drops: Some(7),
                    ..SocketMemory::default()
                });
                facts.progress = Some(Progress {
                    throttled: Some(0),
                    blocked: 0,
                    ..progress::tests::throttled()
                });
                facts.owner = Some(Owner {
                    pid: 42,
                    comm: "named".to_owned(),
                    ..Owner::default()
                });
            })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| [at(kernel, "10.0.0.1:53"), at(kernel, "[fd00::1]:53")])
            .collect()
    }

    #[test]
    fn the_kernels_own_numbers_come_first() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, "10.0.0.1:53").label();
            assert_eq!(drop.cause, "socket-rcvbuf-full");
            assert_eq!(drop.counter.as_deref(), Some("UdpRcvbufErrors"));
            let queued = if kernel == V5_10 { 213_504 } else { 211_200 };
            assert_eq!(drop.evidence["queued"], queued);
            assert_eq!(drop.evidence["socket"], "10.0.0.1:53");
            assert_eq!(drop.evidence["socket_drops"], 7);
            let six = at(kernel, "[fd00::1]:53").label();
            assert_eq!(six.counter.as_deref(), Some("Udp6RcvbufErrors"));
        }
    }

    #[test]
    fn the_limit_tells_where_it_came_from() {
        for (buffer, from, says) in [
            (212_992, "default", Some("sysctl -w net.core.rmem_max=4194304")),
            (425_984, "rmem_max", Some("sysctl -w net.core.rmem_max=4194304")),
            (8_192, "application", None),
        ] {
            let drop = at(V7_3, "10.0.0.1:53")
                .fact(|facts| facts.socket.as_mut().expect("a socket").receive_buffer = Some(buffer))
                .label();
            assert_eq!(drop.evidence["limit_from"], from);
            assert_eq!(drop.remedy[1].command.as_deref(), says);
        }
    }

    #[test]
    fn a_raw_sockets_copy_is_lost_too_and_tcp_is_another_matter() {
        let raw = Sample::freed(V6_12, Site::Free, "raw_rcv")
            .reason("SOCKET_RCVBUFF")
            .bits(bits::ICMP)
            .label();
        assert_eq!((raw.cause.as_str(), raw.counter), ("socket-rcvbuf-full", None));
        let tcp = Sample::freed(V6_1, Site::Free, "tcp_v4_rcv")
            .reason("SOCKET_RCVBUFF")
            .bits(bits::TCP)
            .label();
        assert_eq!(tcp.cause, "kernel-reason");
    }
}
