//! The catalogue: one cause, one place. The order matters: the first that
//! matches a signature is its cause, so the particular stands before the general.

mod accept_queue;
mod bad_header;
mod benign;
mod blackhole_route;
mod bridge_netfilter;
mod cgroup_bpf;
mod checksum_error;
mod clash;
mod conntrack_dying;
mod conntrack_helper;
mod conntrack_insert_race;
mod conntrack_invalid;
mod conntrack_nat_exhausted;
mod conntrack_table_full;
mod cpu_backlog_full;
mod device_tx_drop;
mod evidence;
mod fragment_reassembly;
mod ipvs;
mod ipvs_destination_gone;
mod ipvs_no_destination;
mod ipvs_timewait_reuse;
mod listener;
mod local_source;
mod martian_destination;
mod martian_source;
mod masquerade_no_address;
mod neigh_failed;
mod neigh_queue_full;
mod neigh_table_full;
mod netfilter;
mod netfilter_reject;
mod netfilter_rule;
mod nfqueue;
mod nic_rx_missed;
mod no_route;
mod no_socket;
mod not_forwarding;
mod packet_too_big;
mod paws_established;
mod paws_request;
mod paws_timewait;
mod progress;
mod qdisc;
mod qdisc_full;
mod qdisc_policy;
mod rp_filter;
mod socket_backlog_full;
mod socket_filter;
mod socket_rcvbuf_full;
mod sums;
mod syn_backlog;
mod syn_queue;
mod syn_refused;
mod syncookie_invalid;
mod tc_program;
mod tcp_ao;
mod tcp_challenge_ack;
mod tcp_md5;
mod tcp_memory;
mod tcp_ofo_pruned;
mod tcp_out_of_window;
mod tcp_signature;
mod tcp_zero_window;
mod timestamps;
mod timewait_old_sequence;
mod ttl_exceeded;
mod udp_memory;
mod unknown;
mod values;
mod vip_no_service;
mod window;
mod xdp_program;
mod xfrm_policy;

use super::Cause;

/// Every cause.
pub(super) static ALL: &[&Cause] = &[
    // Named by their own hook.
    &accept_queue::CAUSE,
    &syn_queue::CAUSE,
    &syn_backlog::CAUSE,
    &syn_refused::CAUSE,
    &syncookie_invalid::CAUSE,
    &conntrack_insert_race::CAUSE,
    &conntrack_nat_exhausted::CAUSE,
    &conntrack_table_full::CAUSE,
    &ipvs_timewait_reuse::CAUSE,
    &ipvs_destination_gone::CAUSE,
    &ipvs_no_destination::CAUSE,
    &timewait_old_sequence::CAUSE,
    &benign::TIMEWAIT_SEGMENT,
    &benign::REQUEST_RETRANSMIT,
    &benign::REQUEST_KILLED_BY_ICMP,
    &benign::CONNTRACK_CLASH_RESOLVED,
    // Named by hook or reason.
    &paws_timewait::CAUSE,
    &paws_request::CAUSE,
    &paws_established::CAUSE,
    &benign::PAWS_OLD_ACK,
    &tcp_challenge_ack::CAUSE,
    &tcp_out_of_window::CAUSE,
    &tcp_zero_window::CAUSE,
    &tcp_ofo_pruned::CAUSE,
    // The counter of rp_filter decides before the address does.
    &rp_filter::CAUSE,
    &local_source::CAUSE,
    &martian_source::CAUSE,
    &martian_destination::CAUSE,
    // A RST to a virtual address is somebody's answer; elsewhere it has nothing to end.
    &vip_no_service::CAUSE,
    &benign::TCP_RESET_RECEIVED,
    &no_socket::CAUSE,
    &socket_rcvbuf_full::CAUSE,
    &socket_backlog_full::CAUSE,
    &udp_memory::CAUSE,
    &tcp_memory::CAUSE,
    &socket_filter::CAUSE,
    &cgroup_bpf::CAUSE,
    &tcp_md5::CAUSE,
    &tcp_ao::CAUSE,
    &neigh_failed::CAUSE,
    &neigh_queue_full::CAUSE,
    &neigh_table_full::CAUSE,
    &benign::MULTICAST_NOT_JOINED,
    &ttl_exceeded::CAUSE,
    &packet_too_big::CAUSE,
    &not_forwarding::CAUSE,
    &blackhole_route::CAUSE,
    &no_route::CAUSE,
    &conntrack_helper::CAUSE,
    &conntrack_invalid::CAUSE,
    &netfilter_reject::CAUSE,
    &bridge_netfilter::CAUSE,
    &netfilter_rule::CAUSE,
    // Devices, queues, programs.
    &qdisc_policy::CAUSE,
    &qdisc_full::CAUSE,
    &cpu_backlog_full::CAUSE,
    &nic_rx_missed::CAUSE,
    &device_tx_drop::CAUSE,
    &tc_program::CAUSE,
    &xdp_program::CAUSE,
    // What the headers say; a router's use of one of the reasons stands above.
    &checksum_error::CAUSE,
    &bad_header::CAUSE,
    &fragment_reassembly::CAUSE,
    &xfrm_policy::CAUSE,
    &nfqueue::CAUSE,
    // Told from a rule by the rulesets.
    &conntrack_dying::CAUSE,
    &masquerade_no_address::CAUSE,
    &benign::DUPLICATE_DATA,
    &benign::SEGMENT_AFTER_FIN,
    &benign::ICMP_HANDLED,
    &benign::TAP_OVERFLOW,
    &benign::OTHER_HOST,
    &benign::UNKNOWN_ETHERTYPE,
    &benign::QUEUE_PURGE,
    &benign::NOT_A_PACKET,
    // What is left.
    &KERNEL_REASON,
    &UNKNOWN,
];

/// Causes that no scenario provokes, and why: they rest on unit tests from events in the shape of each kernel.
pub const UNPROVOKED: &[(&str, &str)] = &[(
    "nic-rx-missed",
    "the emulated guests of the tests have no network card",
)];

pub(super) use ipvs_timewait_reuse::CAUSE as IPVS_TIMEWAIT_REUSE;
pub(super) use netfilter::settled_site;
pub use unknown::{KERNEL_REASON, UNKNOWN};

#[cfg(test)]
mod sample;
#[cfg(test)]
mod table;
#[cfg(test)]
mod tests;
