//! What is freed as dropped although nothing was lost: counted, and hidden unless asked for.

use droptrace_common::{Site, bits};

use super::{no_socket, unknown};
use crate::diagnose::{Cause, Counter, Family, Need, Signature, Verdict};

/// A cause that is not a loss.
const fn benign(
    slug: &'static str,
    title: &'static str,
    mechanism: &'static str,
    matches: fn(&Signature<'_>) -> bool,
) -> Cause {
    Cause {
        slug,
        family: Family::Benign,
        title,
        mechanism,
        evidence: unknown::EVIDENCE,
        remedy: "Nothing was lost: nothing to do.",
        counter: None,
        benign: true,
        needs: &[Need::Symbols],
        matches,
        verdict: |_: &Signature<'_>| Verdict::Dropped,
        find: unknown::find,
        refine: None,
    }
}

/// Adds the counter that grows with it.
const fn counted(mut cause: Cause, name: &'static str) -> Cause {
    cause.counter = Some(Counter { name });
    cause
}

pub(super) static TIMEWAIT_SEGMENT: Cause = benign(
    "timewait-segment",
    "segment of a connection in TIME_WAIT, handled as it should be",
    "A socket in TIME_WAIT swallows late segments of its connection, such as a FIN sent again, which it answers by an ACK \
     (tcp_timewait_state_process, net/ipv4/tcp_minisocks.c); the free at tcp_v4_rcv or tcp_v6_rcv looks like a drop.",
    |signature| signature.site == Site::TimewaitSegment,
);

pub(super) static REQUEST_RETRANSMIT: Cause = benign(
    "request-retransmit",
    "SYN sent again for a handshake that is pending",
    "A SYN that meets a request in the SYN queue has the SYN-ACK sent again and is freed (tcp_check_req, \
     net/ipv4/tcp_minisocks.c); the listener's sk_drops grows, although nothing was lost here. Many of them say that \
     SYN-ACKs do not arrive.",
    |signature| signature.site == Site::RequestRetransmit,
);

pub(super) static REQUEST_KILLED_BY_ICMP: Cause = counted(
    benign(
        "request-killed-by-icmp",
        "ICMP error ended a pending handshake",
        "An ICMP error (such as host unreachable) that answers a SYN-ACK removes the request from the SYN queue \
         (tcp_req_err, net/ipv4/tcp_ipv4.c). No packet is lost, yet ListenDrops grows by one: it is named so that the \
         sum is right.",
        |signature| signature.site == Site::RequestKilledByIcmp,
    ),
    "TcpExtListenDrops",
);

pub(super) static CONNTRACK_CLASH_RESOLVED: Cause = counted(
    benign(
        "conntrack-clash-resolved",
        "conntrack clash that the kernel resolved",
        "Two first packets wanted one conntrack tuple, and nf_ct_resolve_clash (net/netfilter/nf_conntrack_core.c) \
         joined them or kept both: nothing was dropped. Two DNS queries from one socket through DNAT do this.",
        |signature| signature.site == Site::ConntrackClashResolved,
    ),
    "nf_conntrack clash_resolve (conntrack -S)",
);

pub(super) static PAWS_OLD_ACK: Cause = counted(
    benign(
        "paws-old-ack",
        "ACK without data, overtaken by a later one",
        "An ACK without data whose timestamp is older than the last one's was overtaken on its way. A later ACK said \
         more, so nothing is lost. Newer kernels, such as 7.x, tell it from other PAWS drops (TCP_RFC7323_PAWS_ACK, \
         tcp_validate_incoming); older ones count it as PAWSEstab, and it is paws-established there.",
        |signature| signature.because(&["TCP_RFC7323_PAWS_ACK"]),
    ),
    "TcpExtPAWSOldAck",
);

pub(super) static DUPLICATE_DATA: Cause = benign(
    "duplicate-data",
    "segment with data that was received before",
    "A segment that holds only what was received before: sent again although the first one arrived, or a keepalive \
     probe, which carries the last old sequence number on purpose. It is acknowledged again and freed (tcp_data_queue, \
     tcp_ofo_queue, tcp_validate_incoming, net/ipv4/tcp_input.c; reasons TCP_OLD_DATA, TCP_OLD_SEQUENCE, TCP_OFOMERGE, \
     TCP_OFO_DROP). 6.1 calls an old segment TCP_INVALID_SEQUENCE, as it does one beyond the window: there the hook at \
     tcp_send_dupack, which the kernel calls for each that has data, tells them apart, and one that it does not see has nothing \
     to lose.",
    |signature| {
        signature.because(&["TCP_OLD_DATA", "TCP_OLD_SEQUENCE", "TCP_OFOMERGE", "TCP_OFO_DROP"])
            || signature.site == Site::SegmentBefore
                && !signature.has(bits::RST)
                && signature.because(&["TCP_INVALID_SEQUENCE"])
    },
);

pub(super) static SEGMENT_AFTER_FIN: Cause = benign(
    "segment-after-fin",
    "segment without new data, from a peer that has sent its FIN",
    "A peer that closed its sending side goes on acknowledging what it receives. In CLOSE_WAIT, CLOSING and LAST_ACK \
     the kernel processes such a segment, has nothing to queue, and frees it through the function for drops, without a \
     reason (tcp_rcv_state_process, net/ipv4/tcp_input.c, 6.1 - 7.3; 5.10 frees it untraced). Data after a FIN, which no \
     correct peer sends, ends at the same place.",
    |signature| {
        // 5.19 and later name every other reason to drop there.
        signature.site == Site::Free
            && signature.has(bits::TCP)
            && signature.because(&["NOT_SPECIFIED"])
            && signature.at(&["tcp_rcv_state_process"])
    },
);

pub(super) static TCP_RESET_RECEIVED: Cause = benign(
    "tcp-reset-received",
    "RST that did its work, or had nothing to end",
    "A RST is freed as dropped after it ended a pending handshake (tcp_check_req), when it came to a listener or to a \
     connection that is being opened and whose SYN it does not acknowledge (reason TCP_RESET, tcp_rcv_state_process), and \
     when there is no socket for it. One that ends a connection is freed untraced. A RST carries no data and is never \
     answered. One that a connection does not believe is tcp-challenge-ack.",
    |signature| {
        signature.has(bits::RST)
            && (signature.site == Site::RequestOther && signature.unspecified()
                || signature.site == Site::Free && signature.because(&["TCP_RESET"])
                || no_socket::found_none(signature))
    },
);

pub(super) static ICMP_HANDLED: Cause = benign(
    "icmp-handled",
    "ICMP message that was handled, or a reply that no ping socket waits for",
    "icmpv6_rcv of 5.10 and 6.1 frees every message but echo as dropped after handling it, neighbour discovery \
     included. An echo reply that no ping socket takes is freed as dropped by ping_rcv or icmp_rcv, although ping over a \
     raw socket has had its copy. On kernels without drop reasons a bad checksum is freed at the same place: \
     IcmpInCsumErrors and Icmp6InCsumErrors tell.",
    |signature| {
        signature.site == Site::Free
            && (signature.has(bits::ICMP) && signature.unspecified() && signature.at(&["icmpv6_rcv"])
                || signature.has(bits::ECHO_REPLY)
                    && (signature.unspecified() || signature.because(&["NO_SOCKET"]))
                    && signature.at(&["icmp_rcv", "icmpv6_rcv", "ping_rcv"]))
    },
);

pub(super) static QUEUE_PURGE: Cause = benign(
    "queue-purge",
    "left in a queue when its owner was closed",
    "Packets that nobody read before a socket or device was closed are freed as dropped (sk_stream_kill_queues, \
     inet_sock_destruct, skb_queue_purge; reason QUEUE_PURGE from 6.12 on). They had arrived: the application did not \
     want them.",
    |signature| {
        const OF_A_SOCKET: [&str; 8] = [
            "sk_stream_kill_queues",
            "inet_sock_destruct",
            "udp_destruct_sock",
            "udp_destruct_common",
            "tcp_disconnect",
            "skb_queue_purge",
            "skb_queue_purge_reason",
            "packet_release",
        ];
        signature.site == Site::Free
            && (signature.because(&["QUEUE_PURGE", "SOCKET_CLOSE"]) || signature.unspecified())
            && (signature.at(&OF_A_SOCKET) || signature.has(bits::TCP) && signature.at(&["skb_rbtree_purge"]))
    },
);

pub(super) static TAP_OVERFLOW: Cause = benign(
    "tap-overflow",
    "copy for a packet capture that was too slow",
    "A packet socket (tcpdump, DHCP clients, LLDP daemons) whose receive buffer is full does not get its copy \
     (packet_rcv, tpacket_rcv, net/packet/af_packet.c). The packet itself goes its way.",
    |signature| signature.site == Site::Free && signature.at(&["packet_rcv", "tpacket_rcv"]),
);

pub(super) static OTHER_HOST: Cause = benign(
    "other-host",
    "frame for another host",
    "The device showed a frame whose hardware address is not its own, since it is promiscuous or a switch floods; \
     ip_rcv_core and ip6_rcv_core free it (reason OTHERHOST from 6.1 on).",
    |signature| {
        signature.because(&["OTHERHOST"])
            || signature.site == Site::Free
                && signature.reason.is_none()
                && signature.has(bits::OTHER_HOST)
                && signature.at(&["ip_rcv", "ip_rcv_core", "ipv6_rcv", "ip6_rcv_core"])
    },
);

pub(super) static UNKNOWN_ETHERTYPE: Cause = benign(
    "unknown-ethertype",
    "frame of a protocol that this host does not speak",
    "Nothing on this host takes frames of this EtherType (such as LLDP or a vendor's loop detection); \
     __netif_receive_skb_core (net/core/dev.c) frees them and the device counts them as rx_dropped. On kernels without \
     drop reasons a tc filter's drop of such a frame looks the same.",
    |signature| {
        const HERE: [&str; 3] = [
            "__netif_receive_skb_core",
            "__netif_receive_skb_one_core",
            "__netif_receive_skb",
        ];
        // ARP has a handler: its free there without a reason is something else.
        signature.has(bits::NOT_IP)
            && !signature.has(bits::NO_PROTOCOL)
            && (signature.because(&["UNHANDLED_PROTO", "PTYPE_ABSENT"])
                || signature.reason.is_none() && !signature.has(bits::ARP) && signature.at(&HERE))
    },
);

pub(super) static MULTICAST_NOT_JOINED: Cause = benign(
    "multicast-not-joined",
    "multicast packet of a group that nobody here joined",
    "The device or bridge let a multicast packet through that no socket of this netns asked for: ip6_mc_input \
     (net/ipv6/ip6_input.c) frees it, or ip6_pkt_discard while the device has no multicast route yet; for IPv4 the route \
     lookup fails (ip_rcv_finish_core). So it does for a source that is refused: for IPv4 the groups of the device are \
     looked through at the free. Where that does not tell (behind a VRF, on a device that routes multicast on or has more \
     than 32 groups, where only some sources were asked for), a packet stays unknown on kernels without drop reasons.",
    |signature| {
        signature.site == Site::GroupNotJoined
            || signature.site == Site::Free
                && signature.has(bits::MULTICAST)
                && (signature.unspecified() && signature.at(&["ip6_mc_input"])
                    || (signature.unspecified() || signature.because(&["IP_INNOROUTES"]))
                        && signature.at(&["ip6_pkt_discard", "ip6_pkt_drop"])
                    || signature.because(&["NOT_SPECIFIED"])
                        && route_lookup_failed(signature)
                        && signature.bits & (bits::SOURCE_LOCAL | bits::SOURCE_NOT_UNICAST) == 0)
    },
);

/// Whether the packet may have been freed since the lookup of its route failed, for which no reason is given.
pub(super) fn route_lookup_failed(signature: &Signature<'_>) -> bool {
    signature.unspecified() && signature.at(&["ip_rcv_finish_core"])
}

/// Where packets that this host makes have no protocol yet.
const STILL_A_PACKET: [&str; 5] = [
    "__ip_queue_xmit",
    "ip_queue_xmit",
    "inet6_csk_xmit",
    "__ip_local_out",
    "__ip6_local_out",
];

pub(super) static NOT_A_PACKET: Cause = benign(
    "not-a-packet",
    "kernel buffer that is no network packet",
    "Buffers of Unix sockets, netlink and NFQUEUE messages are freed through the same function as packets \
     (unix_stream_connect, nfnetlink_rcv_batch, __nfqnl_enqueue_packet, …); they have no protocol and were never on a \
     network. Neither was the packet that the kernel makes up to answer `ip route get` (inet_rtm_getroute).",
    |signature| {
        if signature.site == Site::Free && signature.at(&["inet_rtm_getroute", "inet6_rtm_getroute"]) {
            return true;
        }
        signature.site == Site::Free
            && signature.has(bits::NO_PROTOCOL)
            && signature.bits & (bits::TCP | bits::UDP | bits::ICMP) == 0
            && (signature.unspecified()
                || signature.because(&[
                    "QUEUE_PURGE",
                    "SOCKET_CLOSE",
                    "UNIX_DISCONNECT",
                    "UNIX_INFLIGHT_FD_LIMIT",
                    "UNIX_SKIP_OOB",
                ]))
            && !signature.at(&STILL_A_PACKET)
    },
);
