//! What each kernel shows, and which cause it is: one row per behaviour seen on the four kernels.

use droptrace_common::{Site, bits::*};

use super::sample::{Kernel, Sample, V5_10, V6_1, V6_12, V7_3};
use crate::diagnose::{Location, Signature, classify};

/// Kernels, site, reason, location, bits, slug.
type Row = (
    &'static [Kernel],
    Site,
    Option<&'static str>,
    Option<&'static str>,
    u32,
    &'static str,
);

const ALL: &[Kernel] = &Kernel::ALL;
/// Without drop reasons.
const OLD: &[Kernel] = &[V5_10];
/// With drop reasons.
const NEW: &[Kernel] = &[V6_1, V6_12, V7_3];
/// NOT_SPECIFIED in a row for kernels that have reasons.
const NOT: Option<&str> = Some("NOT_SPECIFIED");
const DUMMY_VIP: u32 = DESTINATION_LOCAL | DESTINATION_DUMMY | DESTINATION_IPVS;

#[rustfmt::skip]
const ROWS: &[Row] = &[
    // Listener: no free is traced.
    (ALL, Site::AcceptQueueSyn, None, None, TCP | SYN, "accept-queue-full"),
    (ALL, Site::SynQueueFull, None, None, TCP | SYN, "syn-queue-full"),
    (ALL, Site::SynBacklogLastQuarter, None, None, TCP | SYN, "syn-backlog-last-quarter"),
    (ALL, Site::SynRefused, None, None, TCP | SYN, "syn-refused"),
    (ALL, Site::SynNotUnicast, None, None, TCP | SYN | MULTICAST, "syn-refused"),
    (ALL, Site::RequestKilledByIcmp, None, None, 0, "request-killed-by-icmp"),
    // Last ACK: the hint decides, whatever reason the free bears.
    (OLD, Site::AcceptQueueAck, None, Some("tcp_v4_rcv"), TCP, "accept-queue-full"),
    (&[V6_1, V6_12], Site::AcceptQueueAck, NOT, Some("tcp_v4_rcv"), TCP, "accept-queue-full"),
    (&[V7_3], Site::AcceptQueueAck, Some("TCP_LISTEN_OVERFLOW"), Some("tcp_v4_rcv"), TCP, "accept-queue-full"),
    (OLD, Site::AcceptQueueCookie, None, Some("tcp_v4_do_rcv"), TCP, "accept-queue-full"),
    (&[V6_1], Site::AcceptQueueCookie, NOT, Some("tcp_v4_do_rcv"), TCP, "accept-queue-full"),
    (&[V6_12, V7_3], Site::AcceptQueueCookie, Some("NO_SOCKET"), Some("cookie_v4_check"), TCP, "accept-queue-full"),
    (&[V7_3], Site::ChildRefused, Some("TCP_LISTEN_OVERFLOW"), Some("tcp_v4_rcv"), TCP, "syn-refused"),
    (&[V6_12, V7_3], Site::ChildRefused, Some("NO_SOCKET"), Some("cookie_v4_check"), TCP, "syn-refused"),
    // A cookie that is refused; without the hook it looks like any ACK to a listener.
    (OLD, Site::SyncookieInvalid, None, Some("tcp_v4_do_rcv"), TCP, "syncookie-invalid"),
    (&[V6_1], Site::SyncookieInvalid, NOT, Some("tcp_v6_do_rcv"), TCP, "syncookie-invalid"),
    (&[V6_12, V7_3], Site::SyncookieInvalid, Some("TCP_FLAGS"), Some("tcp_v4_do_rcv"), TCP, "syncookie-invalid"),
    // Without the hook the same signs prove nothing.
    (&[V7_3], Site::Free, Some("TCP_LISTEN_OVERFLOW"), Some("tcp_v4_rcv"), TCP, "kernel-reason"),
    (&[V6_12, V7_3], Site::Free, Some("NO_SOCKET"), Some("cookie_v4_check"), TCP, "kernel-reason"),
    (ALL, Site::Free, None, Some("tcp_v4_rcv"), TCP, "unknown"),
    (ALL, Site::Free, None, Some("tcp_v4_rcv"), TCP | SYN, "unknown"),
    (ALL, Site::Free, None, Some("tcp_v4_rcv"), TCP | RST, "unknown"),
    (OLD, Site::Free, None, Some("tcp_v4_do_rcv"), TCP, "unknown"),
    (&[V6_12, V7_3], Site::Free, Some("TCP_FLAGS"), Some("tcp_v4_do_rcv"), TCP, "kernel-reason"),
    // TIME_WAIT and PAWS.
    (OLD, Site::PawsEstablished, None, None, TCP, "paws-established"),
    (NEW, Site::Free, Some("TCP_RFC7323_PAWS"), Some("tcp_validate_incoming"), TCP, "paws-established"),
    (NEW, Site::Free, Some("TCP_RFC7323_PAWS"), Some("tcp_rcv_state_process"), TCP, "kernel-reason"),
    (&[V7_3], Site::Free, Some("TCP_RFC7323_PAWS_ACK"), Some("tcp_validate_incoming"), TCP, "paws-old-ack"),
    // A peer's ACKs after its FIN; other reasons at that place are named.
    (NEW, Site::Free, NOT, Some("tcp_rcv_state_process"), TCP, "segment-after-fin"),
    (NEW, Site::Free, Some("TCP_OLD_ACK"), Some("tcp_rcv_state_process"), TCP, "kernel-reason"),
    // The state of a connection.
    (OLD, Site::TcpChallengeAck, None, None, TCP | RST, "tcp-challenge-ack"),
    (OLD, Site::TcpChallengeAck, None, None, TCP | SYN, "tcp-challenge-ack"),
    (NEW, Site::Free, Some("TCP_INVALID_SYN"), Some("tcp_validate_incoming"), TCP | SYN, "tcp-challenge-ack"),
    (NEW, Site::Free, Some("TCP_TOO_OLD_ACK"), Some("tcp_rcv_established"), TCP, "tcp-challenge-ack"),
    (NEW, Site::Free, Some("TCP_ACK_UNSENT_DATA"), Some("tcp_v4_do_rcv"), TCP, "tcp-challenge-ack"),
    (NEW, Site::Free, Some("TCP_RESET"), Some("tcp_rcv_state_process"), TCP | RST, "tcp-reset-received"),
    (OLD, Site::TcpOutOfWindow, None, None, TCP, "tcp-out-of-window"),
    (NEW, Site::Free, Some("TCP_INVALID_SEQUENCE"), Some("tcp_validate_incoming"), TCP, "tcp-out-of-window"),
    (&[V6_1], Site::SegmentBeyond, Some("TCP_INVALID_SEQUENCE"), Some("tcp_validate_incoming"), TCP, "tcp-out-of-window"),
    (&[V6_1], Site::SegmentBefore, Some("TCP_INVALID_SEQUENCE"), Some("tcp_validate_incoming"), TCP, "duplicate-data"),
    (&[V6_1], Site::SegmentBefore, Some("TCP_RFC7323_PAWS"), Some("tcp_validate_incoming"), TCP, "paws-established"),
    (&[V6_1], Site::SegmentBeyond, Some("TCP_RFC7323_PAWS"), Some("tcp_validate_incoming"), TCP, "paws-established"),
    (&[V6_12, V7_3], Site::Free, Some("TCP_OLD_SEQUENCE"), Some("tcp_validate_incoming"), TCP | RST, "tcp-out-of-window"),
    (NEW, Site::Free, Some("TCP_OVERWINDOW"), Some("tcp_data_queue"), TCP, "tcp-out-of-window"),
    (NEW, Site::Free, Some("TCP_ZEROWINDOW"), Some("tcp_data_queue"), TCP, "tcp-zero-window"),
    (&[V7_3], Site::Free, Some("TCP_INVALID_END_SEQUENCE"), Some("tcp_validate_incoming"), TCP, "tcp-zero-window"),
    (NEW, Site::Free, Some("TCP_OFO_QUEUE_PRUNE"), Some("tcp_try_rmem_schedule"), TCP, "tcp-ofo-pruned"),
    (NEW, Site::Free, Some("TCP_OFO_DROP"), Some("tcp_ofo_queue"), TCP, "duplicate-data"),
    (NEW, Site::Free, NOT, Some("tcp_v4_do_rcv"), TCP, "unknown"),
    (OLD, Site::Free, None, Some("tcp_rcv_state_process"), TCP, "unknown"),
    (ALL, Site::PawsTimewait, None, Some("tcp_v4_rcv"), TCP | SYN, "paws-timewait"),
    (&[V7_3], Site::PawsTimewait, Some("TCP_RFC7323_TW_PAWS"), Some("tcp_v4_rcv"), TCP | SYN, "paws-timewait"),
    (&[V7_3], Site::Free, Some("TCP_RFC7323_TW_PAWS"), Some("tcp_v6_rcv"), TCP | SYN, "paws-timewait"),
    (ALL, Site::PawsRequest, None, Some("tcp_v4_rcv"), TCP, "paws-request"),
    (&[V7_3], Site::Free, Some("TCP_RFC7323_PAWS"), Some("tcp_v4_rcv"), TCP, "paws-request"),
    (&[V7_3], Site::RequestOther, Some("TCP_RFC7323_TSECR"), Some("tcp_v4_rcv"), TCP, "kernel-reason"),
    (&[V7_3], Site::RequestOther, Some("TCP_OVERWINDOW"), Some("tcp_v4_rcv"), TCP, "tcp-out-of-window"),
    (ALL, Site::TimewaitOldSequence, None, Some("tcp_v4_rcv"), TCP | SYN, "timewait-old-sequence"),
    (ALL, Site::TimewaitSegment, None, Some("tcp_v4_rcv"), TCP, "timewait-segment"),
    (ALL, Site::RequestRetransmit, None, Some("tcp_v4_rcv"), TCP | SYN, "request-retransmit"),
    (ALL, Site::RequestOther, None, Some("tcp_v4_rcv"), TCP | RST, "tcp-reset-received"),
    (ALL, Site::RequestOther, None, Some("tcp_v4_rcv"), TCP, "unknown"),
    // Source check.
    (OLD, Site::MartianSource, None, Some("ip_rcv_finish_core.constprop.0"), SOURCE_LOCAL, "local-source"),
    (&[V6_1], Site::MartianSource, NOT, Some("ip_rcv_finish_core.constprop.0"), SOURCE_LOCAL | SOURCE_DUMMY, "local-source"),
    (&[V6_12], Site::MartianSource, NOT, Some("ip_rcv_finish_core.isra.0"), SOURCE_LOCAL, "local-source"),
    (&[V7_3], Site::MartianSource, Some("IP_LOCAL_SOURCE"), Some("ip_rcv_finish_core"), SOURCE_LOCAL, "local-source"),
    (&[V7_3], Site::Free, Some("IP_LOCAL_SOURCE"), Some("ip_rcv_finish_core"), 0, "local-source"),
    (OLD, Site::MartianSource, None, Some("ip_rcv_finish_core.constprop.0"), RP_FILTER, "rp-filter"),
    (NEW, Site::MartianSource, Some("IP_RPFILTER"), Some("ip_rcv_finish_core"), RP_FILTER, "rp-filter"),
    (NEW, Site::Free, Some("IP_RPFILTER"), Some("ip_rcv_finish_core"), MULTICAST, "rp-filter"),
    // accept_local=1: the local test is off, rp_filter's is not.
    (OLD, Site::MartianSource, None, Some("ip_rcv_finish_core"), SOURCE_LOCAL | RP_FILTER, "rp-filter"),
    (NEW, Site::MartianSource, Some("IP_RPFILTER"), Some("ip_rcv_finish_core"), SOURCE_LOCAL | RP_FILTER, "rp-filter"),
    // 127/8 stands in the table local, too.
    (OLD, Site::MartianSource, None, Some("ip_rcv_finish_core"), SOURCE_LOCAL | SOURCE_NOT_UNICAST, "martian-source"),
    (&[V6_1, V6_12], Site::MartianSource, NOT, Some("ip_rcv_finish_core"), SOURCE_LOCAL | SOURCE_NOT_UNICAST, "martian-source"),
    (&[V7_3], Site::MartianSource, Some("IP_LOCALNET"), Some("ip_rcv_finish_core"), SOURCE_LOCAL | SOURCE_NOT_UNICAST, "martian-source"),
    (&[V7_3], Site::MartianSource, Some("IP_INVALID_SOURCE"), Some("ip_rcv_finish_core"), 0, "martian-source"),
    (&[V5_10, V6_1, V6_12], Site::MartianSource, None, Some("ip_rcv_finish_core"), 0, "martian-source"),
    (&[V5_10, V6_1, V6_12], Site::Free, None, Some("ip_rcv_finish_core"), DESTINATION_LOOPBACK | DESTINATION_LOCAL, "martian-destination"),
    (&[V5_10, V6_1, V6_12], Site::Free, None, Some("ip_rcv_finish_core"), DESTINATION_INVALID, "martian-destination"),
    (&[V7_3], Site::Free, Some("IP_LOCALNET"), Some("ip_rcv_finish_core"), DESTINATION_LOOPBACK, "martian-destination"),
    (&[V7_3], Site::Free, Some("IP_INVALID_DEST"), Some("ip_rcv_finish_core"), DESTINATION_INVALID, "martian-destination"),
    (ALL, Site::Free, None, Some("ip_rcv_finish_core"), 0, "unknown"),
    // Conntrack; lost behind NFQUEUE it is freed elsewhere.
    (OLD, Site::ConntrackClash, None, Some("nf_hook_slow"), TCP | SYN, "conntrack-insert-race"),
    (NEW, Site::ConntrackClash, Some("NETFILTER_DROP"), Some("nf_hook_slow"), UDP, "conntrack-insert-race"),
    (&[V6_12, V7_3], Site::ConntrackClash, NOT, Some("nfqnl_reinject"), TCP | SYN, "conntrack-insert-race"),
    (OLD, Site::ConntrackClash, None, Some("nf_reinject"), UDP, "conntrack-insert-race"),
    (OLD, Site::ConntrackClash, None, Some("nf_hook_slow"), TCP | WINNER_ASSURED, "conntrack-nat-exhausted"),
    (NEW, Site::ConntrackClash, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | WINNER_ASSURED, "conntrack-nat-exhausted"),
    (ALL, Site::ConntrackClashResolved, None, None, UDP, "conntrack-clash-resolved"),
    (OLD, Site::ConntrackTableFull, None, Some("nf_hook_slow"), TCP | SYN, "conntrack-table-full"),
    (NEW, Site::ConntrackTableFull, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SYN, "conntrack-table-full"),
    // IPVS.
    (OLD, Site::IpvsReuseDropped, None, Some("nf_hook_slow"), TCP | SYN | SERVICE_IPVS, "ipvs-timewait-reuse"),
    (NEW, Site::IpvsReuseDropped, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SYN | SERVICE_IPVS, "ipvs-timewait-reuse"),
    (ALL, Site::IpvsReuseMisdelivered, None, None, TCP | SYN | SERVICE_IPVS, "ipvs-timewait-reuse"),
    (OLD, Site::IpvsExpired, None, Some("nf_hook_slow"), TCP | SYN | SERVICE_IPVS, "ipvs-timewait-reuse"),
    (NEW, Site::IpvsExpired, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SYN | SERVICE_IPVS, "ipvs-timewait-reuse"),
    (OLD, Site::IpvsExpired, None, Some("nf_hook_slow"), TCP | SERVICE_IPVS, "ipvs-destination-gone"),
    (NEW, Site::IpvsExpired, Some("NETFILTER_DROP"), Some("nf_hook_slow"), UDP | SERVICE_IPVS, "ipvs-destination-gone"),
    (OLD, Site::IpvsDestinationGone, None, Some("nf_hook_slow"), TCP | SERVICE_IPVS, "ipvs-destination-gone"),
    (NEW, Site::IpvsDestinationGone, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SERVICE_IPVS, "ipvs-destination-gone"),
    (OLD, Site::IpvsNoDestination, None, Some("nf_hook_slow"), TCP | SYN | SERVICE_IPVS, "ipvs-no-destination"),
    (NEW, Site::IpvsNoDestination, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SYN | SERVICE_IPVS, "ipvs-no-destination"),
    (OLD, Site::ResetWithoutSocket, None, Some("tcp_v4_rcv"), TCP | SYN | DUMMY_VIP, "vip-no-service"),
    (NEW, Site::Free, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP | SYN | DUMMY_VIP, "vip-no-service"),
    (NEW, Site::Free, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP | SYN_ACK | DUMMY_VIP, "vip-no-service"),
    (OLD, Site::ResetWithoutSocket, None, Some("tcp_v4_rcv"), TCP | SYN_ACK | DUMMY_VIP, "vip-no-service"),
    (NEW, Site::Free, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP | RST | DUMMY_VIP, "vip-no-service"),
    (OLD, Site::PortUnreachable, None, Some("__udp4_lib_rcv"), UDP | DUMMY_VIP, "vip-no-service"),
    (&[V7_3], Site::Free, Some("NO_SOCKET"), Some("udp_rcv"), UDP | DUMMY_VIP, "vip-no-service"),
    // A service of IPVS without an entry is no foreign port; nor is an address on a dummy that IPVS does not know.
    (NEW, Site::Free, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP | DUMMY_VIP | SERVICE_IPVS, "no-socket"),
    (NEW, Site::Free, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP | SYN | DESTINATION_LOCAL | DESTINATION_DUMMY, "no-socket"),
    (NEW, Site::Free, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP | SYN | DESTINATION_LOCAL | DESTINATION_IPVS, "no-socket"),
    // Sockets.
    (OLD, Site::ResetWithoutSocket, None, Some("tcp_v4_rcv"), TCP | SYN, "no-socket"),
    (OLD, Site::ResetWithoutSocket, None, Some("tcp_v6_rcv"), TCP, "no-socket"),
    (OLD, Site::PortUnreachable, None, Some("__udp4_lib_rcv"), UDP, "no-socket"),
    (OLD, Site::PortUnreachable, None, Some("__udp6_lib_rcv"), UDP, "no-socket"),
    (OLD, Site::PortUnreachable, None, Some("nf_hook_slow"), UDP, "unknown"),
    (OLD, Site::Free, None, Some("__udp4_lib_rcv"), UDP, "unknown"),
    (NEW, Site::Free, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP | SYN, "no-socket"),
    (NEW, Site::Free, Some("NO_SOCKET"), Some("tcp_v6_rcv"), TCP | SYN, "no-socket"),
    (&[V6_1, V6_12], Site::Free, Some("NO_SOCKET"), Some("__udp4_lib_rcv"), UDP, "no-socket"),
    (&[V7_3], Site::Free, Some("NO_SOCKET"), Some("udp_rcv"), UDP, "no-socket"),
    (&[V7_3], Site::Free, Some("NO_SOCKET"), Some("udpv6_rcv"), UDP, "no-socket"),
    (OLD, Site::ResetWithoutSocket, None, Some("tcp_v4_rcv"), TCP | RST, "tcp-reset-received"),
    (NEW, Site::Free, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP | RST, "tcp-reset-received"),
    (NEW, Site::Free, Some("TCP_RESET"), Some("tcp_validate_incoming"), TCP | RST, "tcp-challenge-ack"),
    (OLD, Site::ReceiveBufferFull, None, Some("udp_queue_rcv_one_skb"), UDP, "socket-rcvbuf-full"),
    (OLD, Site::UdpMemory, None, Some("udp_queue_rcv_one_skb"), UDP, "udp-memory"),
    (OLD, Site::Free, None, Some("udp_queue_rcv_one_skb"), UDP, "unknown"),
    (NEW, Site::Free, Some("SOCKET_RCVBUFF"), Some("udp_queue_rcv_one_skb"), UDP, "socket-rcvbuf-full"),
    (NEW, Site::Free, Some("PROTO_MEM"), Some("udp_queue_rcv_one_skb"), UDP, "udp-memory"),
    (OLD, Site::SocketBacklogFull, None, Some("tcp_v4_rcv"), TCP, "socket-backlog-full"),
    (NEW, Site::Free, Some("SOCKET_BACKLOG"), Some("tcp_v4_rcv"), TCP, "socket-backlog-full"),
    (NEW, Site::Free, Some("SOCKET_FILTER"), Some("tcp_v4_rcv"), TCP, "socket-filter"),
    (NEW, Site::Free, Some("BPF_CGROUP_EGRESS"), Some("ip_finish_output"), UDP, "cgroup-bpf"),
    (OLD, Site::Free, None, Some("ip6_finish_output"), UDP, "cgroup-bpf"),
    (NEW, Site::Free, Some("TCP_MD5NOTFOUND"), Some("tcp_v4_rcv"), TCP | SYN, "tcp-md5"),
    (&[V6_12, V7_3], Site::Free, Some("TCP_AOFAILURE"), Some("tcp_v6_rcv"), TCP, "tcp-ao"),
    (NEW, Site::Free, Some("PROTO_MEM"), Some("tcp_data_queue"), TCP, "tcp-memory"),
    (OLD, Site::TcpMemory, None, None, TCP, "tcp-memory"),
    // Netfilter.
    (OLD, Site::Free, None, Some("nf_hook_slow"), TCP | SYN, "netfilter-rule"),
    (NEW, Site::Free, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SYN, "netfilter-rule"),
    (NEW, Site::Free, Some("NETFILTER_DROP"), Some("nft_do_chain"), TCP | SYN | SERVICE_IPVS, "netfilter-rule"),
    (OLD, Site::Free, None, Some("nf_hook_slow"), TCP | SERVICE_IPVS | DUMMY_VIP, "unknown"),
    (NEW, Site::Free, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SERVICE_IPVS | DUMMY_VIP, "kernel-reason"),
    (NEW, Site::Free, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SERVICE_IPVS | IPVS_PROPERTY, "netfilter-rule"),
    (OLD, Site::Free, None, Some("nf_hook_slow"), TCP | CONNTRACK_DYING, "unknown"),
    (NEW, Site::Free, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | CONNTRACK_DYING, "kernel-reason"),
    // A hint that is too old to be trusted: a lost race and a rule look the same.
    (OLD, Site::Free, None, Some("nf_hook_slow"), TCP | SYN | STALE_HINT, "unknown"),
    (OLD, Site::Free, None, Some("nf_reinject"), TCP | SYN | STALE_HINT, "unknown"),
    (NEW, Site::Free, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SYN | STALE_HINT, "kernel-reason"),
    (&[V6_12, V7_3], Site::Free, Some("NETFILTER_DROP"), Some("nft_do_chain"), TCP | SYN | STALE_HINT, "kernel-reason"),
    (&[V6_12, V7_3], Site::Free, NOT, Some("nfqnl_reinject"), UDP | STALE_HINT, "unknown"),
    (NEW, Site::Free, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP | SYN | STALE_HINT, "no-socket"),
    (&[V6_12, V7_3], Site::Free, Some("NETFILTER_DROP"), Some("br_nf_pre_routing"), TCP, "kernel-reason"),
    (&[V5_10, V6_1], Site::Free, None, Some("nf_reinject"), TCP, "nfqueue"),
    (&[V6_12, V7_3], Site::Free, NOT, Some("nfqnl_reinject"), TCP, "nfqueue"),
    (ALL, Site::Free, None, Some("nf_queue"), TCP, "nfqueue"),
    (OLD, Site::NetfilterReject, None, Some("nf_hook_slow"), TCP | SYN, "netfilter-reject"),
    (NEW, Site::NetfilterReject, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SYN | SERVICE_IPVS, "netfilter-reject"),
    (&[V6_12, V7_3], Site::NetfilterReject, Some("NETFILTER_DROP"), Some("nft_do_chain"), UDP, "netfilter-reject"),
    (ALL, Site::ConntrackHelper, None, Some("nf_hook_slow"), TCP, "conntrack-helper"),
    (OLD, Site::ConntrackInvalid, None, Some("nf_hook_slow"), TCP, "conntrack-invalid"),
    (NEW, Site::ConntrackInvalid, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP, "conntrack-invalid"),
    (&[V6_12, V7_3], Site::ConntrackInvalidNat, Some("NETFILTER_DROP"), Some("nft_do_chain"), TCP, "conntrack-invalid"),
    (NEW, Site::ConntrackInvalidNat, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP, "conntrack-invalid"),
    (OLD, Site::ConntrackInvalidReset, None, Some("tcp_v6_rcv"), TCP, "conntrack-invalid"),
    (NEW, Site::ConntrackInvalid, Some("NO_SOCKET"), Some("tcp_v4_rcv"), TCP, "no-socket"),
    (NEW, Site::ConntrackInvalid, Some("NETFILTER_DROP"), Some("nf_hook_slow"), TCP | SERVICE_IPVS, "kernel-reason"),
    (OLD, Site::ConntrackInvalidNat, None, Some("tcp_v4_rcv"), TCP, "unknown"),
    (OLD, Site::BridgeNetfilter, None, Some("nf_hook_slow"), UDP, "bridge-netfilter"),
    (NEW, Site::BridgeNetfilter, Some("NETFILTER_DROP"), Some("nf_hook_slow"), UDP, "bridge-netfilter"),
    (OLD, Site::BridgeNetfilter, None, Some("br_handle_frame"), UDP, "unknown"),
    // Neighbour.
    (OLD, Site::NeighbourFailed, None, Some("neigh_invalidate"), TCP | SYN, "neigh-failed"),
    (OLD, Site::Free, None, Some("neigh_invalidate"), TCP | SYN, "neigh-failed"),
    (NEW, Site::Free, Some("NEIGH_FAILED"), Some("neigh_invalidate"), TCP | SYN, "neigh-failed"),
    (NEW, Site::Free, Some("NEIGH_FAILED"), Some("__neigh_event_send"), TCP | SYN, "neigh-failed"),
    (NEW, Site::NeighbourFailed, NOT, Some("ndisc_error_report"), TCP | SYN, "neigh-failed"),
    (OLD, Site::Free, None, Some("__neigh_event_send"), TCP | SYN, "neigh-queue-full"),
    (NEW, Site::Free, Some("NEIGH_QUEUEFULL"), Some("__neigh_event_send"), UDP, "neigh-queue-full"),
    (NEW, Site::Free, Some("NEIGH_CREATEFAIL"), Some("ip_finish_output2"), UDP, "neigh-table-full"),
    (OLD, Site::Free, None, Some("ip_finish_output2"), UDP, "neigh-table-full"),
    (OLD, Site::Free, None, Some("ip6_finish_output2"), ICMP | MULTICAST, "neigh-table-full"),
    (&[V6_12, V7_3], Site::Free, Some("QUEUE_PURGE"), Some("neigh_invalidate"), UDP, "kernel-reason"),
    // Route.
    (OLD, Site::Free, None, Some("ip_error"), TCP | NO_ROUTE, "no-route"),
    (NEW, Site::Free, Some("IP_INNOROUTES"), Some("ip_error"), TCP | NO_ROUTE, "no-route"),
    // Without knowing whether it forwards; and IP switched off on the device.
    (ALL, Site::Free, None, Some("ip_error"), TCP, "unknown"),
    (OLD, Site::Free, None, Some("ip_error"), TCP | NO_ROUTE | NOT_FORWARDING, "not-forwarding"),
    (NEW, Site::Free, Some("IP_INADDRERRORS"), Some("ip_error"), TCP | NO_ROUTE | ROUTE_REFUSES, "not-forwarding"),
    (NEW, Site::Free, Some("IP_INADDRERRORS"), Some("ip6_forward"), TCP, "not-forwarding"),
    (NEW, Site::Free, Some("IP_INADDRERRORS"), Some("ip6_protocol_deliver_rcu"), UDP | MULTICAST, "kernel-reason"),
    (OLD, Site::Free, None, Some("ip6_forward"), TCP, "unknown"),
    (ALL, Site::Free, None, Some("ip_error"), TCP | NO_ROUTE | ROUTE_REFUSES, "blackhole-route"),
    (ALL, Site::Free, None, Some("ip_error"), TCP | ROUTE_REFUSES, "blackhole-route"),
    (OLD, Site::Free, None, Some("ip6_pkt_drop.isra.0"), TCP | ROUTE_REFUSES, "blackhole-route"),
    (NEW, Site::Free, Some("IP_INNOROUTES"), Some("ip6_pkt_drop.isra.0"), TCP | NO_ROUTE | ROUTE_REFUSES, "blackhole-route"),
    (NEW, Site::Free, Some("IP_INNOROUTES"), Some("ip6_pkt_drop.isra.0"), TCP | ROUTE_REFUSES, "blackhole-route"),
    (ALL, Site::Free, None, Some("dst_discard"), TCP | ROUTE_REFUSES, "blackhole-route"),
    (ALL, Site::Free, None, Some("dst_discard"), TCP, "unknown"),
    // Forwarding.
    (OLD, Site::TtlExceeded, None, Some("ip_forward"), TCP, "ttl-exceeded"),
    (OLD, Site::TtlExceeded, None, Some("nf_hook_slow"), TCP | SERVICE_IPVS, "ttl-exceeded"),
    (NEW, Site::Free, Some("IP_INHDR"), Some("ip_forward"), UDP, "ttl-exceeded"),
    (NEW, Site::Free, Some("IP_INHDR"), Some("ip6_forward"), UDP, "ttl-exceeded"),
    (NEW, Site::Free, Some("IP_INHDR"), Some("ip_rcv_core"), 0, "bad-header"),
    (NEW, Site::Free, Some("PKT_TOO_SMALL"), Some("tcp_v4_rcv"), TCP, "bad-header"),
    // The bytes of a full event may prove a wrong checksum or header.
    (OLD, Site::Free, None, Some("ip_rcv_core.isra.0"), 0, "unknown"),
    (NEW, Site::Free, Some("TCP_CSUM"), Some("tcp_v4_rcv"), TCP, "checksum-error"),
    (ALL, Site::Free, None, Some("udp_recvmsg"), UDP, "checksum-error"),
    (&[V6_12, V7_3], Site::Free, Some("FRAG_REASM_TIMEOUT"), Some("ip_expire"), UDP, "fragment-reassembly"),
    (ALL, Site::Free, None, Some("ip_defrag"), UDP, "fragment-reassembly"),
    (&[V6_12, V7_3], Site::Free, Some("DUP_FRAG"), Some("ip_defrag"), UDP, "kernel-reason"),
    (NEW, Site::Free, Some("XFRM_POLICY"), Some("ip_forward"), UDP, "xfrm-policy"),
    (OLD, Site::PacketTooBig, None, Some("ip6_forward"), TCP, "packet-too-big"),
    (NEW, Site::Free, Some("PKT_TOO_BIG"), Some("ip_forward"), TCP, "packet-too-big"),
    (NEW, Site::Free, Some("PKT_TOO_BIG"), Some("ip6_forward"), TCP, "packet-too-big"),
    (ALL, Site::Free, None, Some("ip_fragment.constprop.0"), UDP, "packet-too-big"),
    (ALL, Site::Free, None, Some("__dev_forward_skb"), UDP, "unknown"),
    (NEW, Site::Free, Some("IP_OUTNOROUTES"), Some("__ip_queue_xmit"), TCP | NO_PROTOCOL, "no-route"),
    (NEW, Site::Free, Some("IP_OUTNOROUTES"), Some("__ip_queue_xmit"), NO_PROTOCOL, "no-route"),
    (OLD, Site::Free, None, Some("__ip_queue_xmit"), NO_PROTOCOL, "no-route"),
    (ALL, Site::Free, None, Some("ip6_pkt_drop.isra.0"), TCP | NO_ROUTE, "no-route"),
    (NEW, Site::Free, Some("IP_INNOROUTES"), Some("ip6_pkt_drop.isra.0"), TCP | NO_ROUTE, "no-route"),
    (NEW, Site::Free, Some("IP_INNOROUTES"), Some("ip6_pkt_drop.isra.0"), TCP, "kernel-reason"),
    (ALL, Site::Free, None, Some("ip_forward"), TCP | SYN, "unknown"),
    // Benign.
    (NEW, Site::Free, Some("TCP_OLD_DATA"), Some("tcp_data_queue"), TCP, "duplicate-data"),
    (NEW, Site::Free, Some("TCP_OLD_SEQUENCE"), Some("tcp_validate_incoming"), TCP, "duplicate-data"),
    (NEW, Site::Free, Some("TCP_OFOMERGE"), Some("tcp_data_queue_ofo"), TCP, "duplicate-data"),
    (&[V5_10, V6_1], Site::Free, None, Some("sk_stream_kill_queues"), TCP, "queue-purge"),
    (&[V6_12, V7_3], Site::Free, Some("QUEUE_PURGE"), Some("sk_stream_kill_queues"), TCP, "queue-purge"),
    (ALL, Site::Free, None, Some("udp_destruct_common"), UDP, "queue-purge"),
    (&[V5_10, V6_1], Site::Free, None, Some("icmpv6_rcv"), ICMP, "icmp-handled"),
    (OLD, Site::Free, None, Some("icmp_rcv"), ICMP | ECHO_REPLY, "icmp-handled"),
    (OLD, Site::Free, None, Some("icmp_rcv"), ICMP, "unknown"),
    (NEW, Site::Free, Some("NO_SOCKET"), Some("ping_rcv"), ICMP | ECHO_REPLY, "icmp-handled"),
    (NEW, Site::Free, Some("ICMP_CSUM"), Some("icmp_rcv"), ICMP | ECHO_REPLY, "checksum-error"),
    (ALL, Site::Free, None, Some("packet_rcv"), TCP, "tap-overflow"),
    (&[V6_12, V7_3], Site::Free, Some("PACKET_SOCK_ERROR"), Some("tpacket_rcv"), TCP, "tap-overflow"),
    (OLD, Site::Free, None, Some("ip_rcv_core.isra.0"), OTHER_HOST | TCP, "other-host"),
    (NEW, Site::Free, Some("OTHERHOST"), Some("ip_rcv_core"), OTHER_HOST | TCP, "other-host"),
    (ALL, Site::Free, None, Some("ip6_mc_input"), MULTICAST | UDP, "multicast-not-joined"),
    (NEW, Site::Free, NOT, Some("ip_rcv_finish_core"), MULTICAST | UDP, "multicast-not-joined"),
    (OLD, Site::Free, None, Some("ip_rcv_finish_core"), MULTICAST | UDP, "unknown"),
    (ALL, Site::GroupNotJoined, None, Some("ip_rcv_finish_core.constprop.0"), MULTICAST | UDP, "multicast-not-joined"),
    (ALL, Site::GroupJoined, None, Some("ip_rcv_finish_core"), MULTICAST | UDP, "unknown"),
    (NEW, Site::GroupNotJoined, Some("IP_RPFILTER"), Some("ip_rcv_finish_core"), MULTICAST | UDP, "rp-filter"),
    (OLD, Site::GroupNotJoined, None, Some("packet_rcv"), MULTICAST | UDP, "tap-overflow"),
    (OLD, Site::GroupJoined, None, Some("nf_hook_slow"), MULTICAST | UDP, "netfilter-rule"),
    (NEW, Site::Free, NOT, Some("ip_rcv_finish_core"), MULTICAST | UDP | SOURCE_LOCAL, "unknown"),
    (OLD, Site::Free, None, Some("__netif_receive_skb_core.constprop.0"), NOT_IP, "unknown-ethertype"),
    (OLD, Site::Free, None, Some("__netif_receive_skb_core.constprop.0"), NOT_IP | ARP, "unknown"),
    (NEW, Site::Free, Some("UNHANDLED_PROTO"), Some("__netif_receive_skb_core.constprop.0"), NOT_IP, "unknown-ethertype"),
    (OLD, Site::Free, None, Some("__netif_receive_skb_core.constprop.0"), TCP, "tc-program"),
    (NEW, Site::Free, Some("UNHANDLED_PROTO"), Some("__netif_receive_skb_core"), TCP, "kernel-reason"),
    (ALL, Site::Free, None, Some("unix_stream_connect"), NO_PROTOCOL, "not-a-packet"),
    (ALL, Site::Free, None, Some("nfnetlink_rcv_batch"), NO_PROTOCOL, "not-a-packet"),
    (ALL, Site::Free, None, Some("__nfqnl_enqueue_packet"), NO_PROTOCOL, "not-a-packet"),
    (ALL, Site::Free, None, Some("inet6_csk_xmit"), NO_PROTOCOL, "unknown"),
    (NEW, Site::Free, Some("QDISC_DROP"), Some("__dev_queue_xmit"), NO_PROTOCOL, "qdisc-full"),
    // The rest.
    // Devices, queues, programs; the facts of a full event may leave it open after all.
    (OLD, Site::Free, None, Some("kfree_skb_list"), TCP, "qdisc-full"),
    (NEW, Site::Free, Some("QDISC_DROP"), Some("__dev_queue_xmit"), TCP, "qdisc-full"),
    (NEW, Site::Free, NOT, Some("kfree_skb_list_reason"), TCP, "unknown"),
    (&[V7_3], Site::Free, Some("QDISC_DROP_GENERIC"), Some("__tcf_kfree_skb_list"), TCP, "qdisc-full"),
    (&[V7_3], Site::Free, Some("QDISC_DROP_OVERLIMIT"), Some("__tcf_kfree_skb_list"), TCP, "qdisc-full"),
    (&[V7_3], Site::Free, Some("QDISC_DROP_CONGESTED"), Some("__tcf_kfree_skb_list"), TCP, "qdisc-policy"),
    (OLD, Site::Free, None, Some("enqueue_to_backlog"), TCP, "cpu-backlog-full"),
    (NEW, Site::Free, Some("CPU_BACKLOG"), Some("enqueue_to_backlog"), TCP, "cpu-backlog-full"),
    (OLD, Site::Free, None, Some("tun_net_xmit"), TCP, "device-tx-drop"),
    (NEW, Site::Free, Some("FULL_RING"), Some("tun_net_xmit"), TCP, "device-tx-drop"),
    (NEW, Site::Free, NOT, Some("tun_net_xmit"), TCP, "unknown"),
    (NEW, Site::Free, Some("DEV_READY"), Some("tun_net_xmit"), TCP, "device-tx-drop"),
    (NEW, Site::Free, Some("DEV_READY"), Some("enqueue_to_backlog"), TCP, "kernel-reason"),
    (OLD, Site::Free, None, Some("__dev_queue_xmit"), TCP, "tc-program"),
    (OLD, Site::Free, None, Some("__dev_queue_xmit"), NO_PROTOCOL, "not-a-packet"),
    (NEW, Site::Free, Some("TC_INGRESS"), Some("__netif_receive_skb_core"), TCP, "tc-program"),
    (NEW, Site::Free, Some("TC_EGRESS"), Some("__dev_queue_xmit"), TCP, "tc-program"),
    (OLD, Site::Free, None, Some("veth_poll"), TCP, "xdp-program"),
    (NEW, Site::Free, NOT, Some("do_xdp_generic"), TCP, "xdp-program"),
    (NEW, Site::Free, Some("OPENVSWITCH_LAST_ACTION"), Some("do_execute_actions"), TCP, "kernel-reason"),
    (ALL, Site::Free, None, None, TCP, "unknown"),
    (ALL, Site::Counter, None, None, 0, "unknown"),
];

/// The reason that the row's kernel would give.
fn reason_on(kernel: Kernel, row: &Row) -> Option<&'static str> {
    if kernel == V5_10 {
        assert_eq!(row.2, None, "5.10 has no reasons: {row:?}");
        None
    } else {
        // A free on a kernel with reasons has one; a hook that is no free has none.
        row.2.or(row.3.and(NOT))
    }
}

#[test]
fn every_signature_seen_has_its_one_cause() {
    for row in ROWS {
        let (kernels, site, _, location, bits, slug) = *row;
        for kernel in kernels {
            let signature = Signature {
                site,
                reason: reason_on(*kernel, row),
                location: Location::Known(
                    location.map(|location| location.split('.').next().unwrap_or(location)),
                ),
                bits,
            }
            .settled();
            assert_eq!(classify(&signature).slug, slug, "{kernel:?}: {signature:?}");
            if site != Site::Free && !site.needs_place() && slug != "unknown" {
                // A hint's count key has no location, and must be the same cause.
                let key = Signature {
                    location: Location::Known(None),
                    ..signature
                };
                assert_eq!(classify(&key).slug, slug, "{kernel:?}: {key:?}");
            }
        }
    }
}

/// Samples of the rows whose cause is `slug`: bare signatures, without packet.
pub(super) fn samples(slug: &str) -> Vec<Sample> {
    ROWS.iter()
        .filter(|row| row.5 == slug)
        .flat_map(|row| {
            row.0.iter().map(|kernel| {
                let sample = match row.3 {
                    Some(location) => Sample::freed(*kernel, row.1, location),
                    None => Sample::hook(*kernel, row.1),
                };
                match reason_on(*kernel, row) {
                    Some(reason) => sample.reason(reason),
                    None => sample,
                }
                .bits(row.4)
            })
        })
        .collect()
}
