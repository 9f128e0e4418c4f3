//! What the programs must know of the running kernel's types. User space
//! resolves every entry from the kernel's BTF and writes the table into the
//! programs' read-only data before they are loaded, so that the verifier sees
//! constants and prunes what is absent.

/// Value of an entry that the running kernel does not have.
pub const ABSENT: u32 = u32::MAX;

/// How an entry's value is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolve {
    /// A member: value = byte offset in the outermost struct | size in bytes << 16.
    /// The path walks through named members; anonymous ones are searched.
    Member(&'static str, &'static str),
    /// A one-bit member: value = bit offset in the outermost struct.
    Bit(&'static str, &'static str),
    /// Size of a type in bytes.
    Size(&'static str),
    /// An enumerator of this enum: its value.
    Enumerator(&'static str, &'static str),
    /// A function's parameter: its index, found by name.
    Parameter(&'static str, &'static str),
    /// The number of parameters of a function: where a fexit program finds the return value.
    ParameterCount(&'static str),
    /// The number of arguments of a tracepoint, without the leading context.
    TracepointArguments(&'static str),
}

/// One entry: its name, where its value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutEntry {
    /// Name of the field of [`Layout`].
    pub name: &'static str,
    /// Alternatives, first found wins.
    pub resolve: &'static [Resolve],
}

macro_rules! layout {
    ($(#[$meta:meta])* $table:ident { $($(#[$doc:meta])* $name:ident = $first:expr $(, or $other:expr)*;)* }) => {
        $(#[$meta])*
        /// Every field is a number as [`Resolve`] tells, or [`ABSENT`].
        #[allow(missing_docs, reason = "each field's meaning is its entry in the table")]
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $table { $($(#[$doc])* pub $name: u32,)* }

        impl $table {
            /// The entries, in the order of the fields.
            pub const ENTRIES: &'static [LayoutEntry] = &[
                $(LayoutEntry { name: stringify!($name), resolve: &[$first $(, $other)*] },)*
            ];

            /// A table in which every entry is absent.
            pub const ABSENT: Self = Self { $($name: ABSENT,)* };

            /// Sets the entry with this index of [`Self::ENTRIES`].
            pub fn set(&mut self, index: usize, value: u32) {
                let mut at = 0;
                $(if at == index { self.$name = value; } at += 1;)*
                let _ = at;
            }

            /// Reads the entry with this index of [`Self::ENTRIES`].
            pub fn get(&self, index: usize) -> Option<u32> {
                let mut at = 0;
                $(if at == index { return Some(self.$name); } at += 1;)*
                let _ = at;
                None
            }
        }
    };
}

use Resolve::{Bit, Enumerator, Member, Parameter, ParameterCount, Size, TracepointArguments};

layout! {
    /// What is known when the programs are loaded: all of vmlinux.
    Layout {
    // skb
    skb_dev = Member("sk_buff", "dev");
    skb_sk = Member("sk_buff", "sk");
    skb_iif = Member("sk_buff", "skb_iif");
    skb_len = Member("sk_buff", "len");
    skb_head = Member("sk_buff", "head");
    skb_data = Member("sk_buff", "data");
    skb_tail = Member("sk_buff", "tail");
    skb_end = Member("sk_buff", "end");
    skb_protocol = Member("sk_buff", "protocol");
    skb_network_header = Member("sk_buff", "network_header");
    skb_transport_header = Member("sk_buff", "transport_header");
    skb_refdst = Member("sk_buff", "_skb_refdst");
    skb_nfct = Member("sk_buff", "_nfct");
    /// Three bits.
    skb_pkt_type = Bit("sk_buff", "pkt_type");
    skb_ipvs_property = Bit("sk_buff", "ipvs_property");
    skb_active_extensions = Member("sk_buff", "active_extensions");
    skb_ext_bridge_nf = Enumerator("skb_ext_id", "SKB_EXT_BRIDGE_NF");
    skb_shared_gso_segs = Member("skb_shared_info", "gso_segs");

    // Where the netns is found.
    net_inum = Member("net", "ns.inum");
    dev_net = Member("net_device", "nd_net.net");
    dev_ifindex = Member("net_device", "ifindex");
    /// A member up to 6.12; later one of single bits.
    dev_priv_flags = Member("net_device", "priv_flags");
    iff_l3mdev_master = Enumerator("netdev_priv_flags", "IFF_L3MDEV_MASTER");
    iff_l3mdev_slave = Enumerator("netdev_priv_flags", "IFF_L3MDEV_SLAVE");
    dst_dev = Member("dst_entry", "dev");
    dst_error = Member("dst_entry", "error");
    dst_flags = Member("dst_entry", "flags");
    rt6_flags = Member("rt6_info", "rt6i_flags");
    rtable_flags = Member("rtable", "rt_flags");
    sock_net = Member("sock_common", "skc_net.net");
    sock_family = Member("sock_common", "skc_family");
    sock_state = Member("sock_common", "skc_state");
    sock_refcnt = Member("sock_common", "skc_refcnt");
    sock_num = Member("sock_common", "skc_num");
    sock_rcv_saddr = Member("sock_common", "skc_rcv_saddr");
    sock_v6_rcv_saddr = Member("sock_common", "skc_v6_rcv_saddr");
    sock_daddr = Member("sock_common", "skc_daddr");
    sock_v6_daddr = Member("sock_common", "skc_v6_daddr");
    sock_socket = Member("sock", "sk_socket");
    socket_alloc_inode = Member("socket_alloc", "vfs_inode.i_ino");
    socket_alloc_socket = Member("socket_alloc", "socket");

    // What a socket holds, and may hold.
    sock_rmem_alloc = Member("sock", "sk_backlog.rmem_alloc");
    sock_backlog_len = Member("sock", "sk_backlog.len");
    sock_rcvbuf = Member("sock", "sk_rcvbuf");
    sock_sndbuf = Member("sock", "sk_sndbuf");
    sock_filter = Member("sock", "sk_filter");

    // Listener.
    sock_ack_backlog = Member("sock", "sk_ack_backlog");
    sock_max_ack_backlog = Member("sock", "sk_max_ack_backlog");
    icsk_queue_length = Member("inet_connection_sock", "icsk_accept_queue.qlen");
    sock_reuseport = Member("sock", "sk_reuseport_cb");
    reuseport_overflow = Member("sock_reuseport", "synq_overflow_ts");

    // netns settings and counters.
    bpf_array_pptrs = Member("bpf_array", "pptrs");
    net_statistics = Member("net", "mib.net_statistics");
    net_ip_statistics = Member("net", "mib.ip_statistics");
    net_ipv6_statistics = Member("net", "mib.ipv6_statistics");
    net_syncookies = Member("net", "ipv4.sysctl_tcp_syncookies");
    net_abort_on_overflow = Member("net", "ipv4.sysctl_tcp_abort_on_overflow");
    net_max_syn_backlog = Member("net", "ipv4.sysctl_max_syn_backlog");
    net_somaxconn = Member("net", "core.sysctl_somaxconn");
    net_devconf_all = Member("net", "ipv4.devconf_all");
    dev_ip_ptr = Member("net_device", "ip_ptr");
    in_device_mc_list = Member("in_device", "mc_list");
    mc_list_multiaddr = Member("ip_mc_list", "multiaddr");
    mc_list_next = Member("ip_mc_list", "next_rcu");
    /// Of `MCAST_EXCLUDE`, then `MCAST_INCLUDE`.
    mc_list_sfcount = Member("ip_mc_list", "sfcount");
    in_device_cnf_data = Member("in_device", "cnf.data");
    devconf_data = Member("ipv4_devconf", "data");
    /// Counted from 1.
    devconf_mc_forwarding = Enumerator("", "IPV4_DEVCONF_MC_FORWARDING");
    /// Counted from 1.
    devconf_forwarding = Enumerator("", "IPV4_DEVCONF_FORWARDING");
    devconf_rp_filter = Enumerator("", "IPV4_DEVCONF_RP_FILTER");
    /// Counted from 1.
    devconf_accept_local = Enumerator("", "IPV4_DEVCONF_ACCEPT_LOCAL");
    mib_listen_overflows = Enumerator("", "LINUX_MIB_LISTENOVERFLOWS");
    mib_listen_drops = Enumerator("", "LINUX_MIB_LISTENDROPS");
    mib_req_queue_full_drop = Enumerator("", "LINUX_MIB_TCPREQQFULLDROP");
    mib_paws_established = Enumerator("", "LINUX_MIB_PAWSESTABREJECTED");
    /// 7.x only.
    mib_paws_timewait = Enumerator("", "LINUX_MIB_PAWS_TW_REJECTED");
    mib_rp_filter = Enumerator("", "LINUX_MIB_IPRPFILTER");
    mib_backlog_drop = Enumerator("", "LINUX_MIB_TCPBACKLOGDROP");
    mib_syncookies_failed = Enumerator("", "LINUX_MIB_SYNCOOKIESFAILED");

    ipstats_out_no_routes = Enumerator("", "IPSTATS_MIB_OUTNOROUTES");

    // TIME_WAIT and PAWS.
    tw_ts_recent = Member("tcp_timewait_sock", "tw_ts_recent");
    tw_ts_recent_stamp = Member("tcp_timewait_sock", "tw_ts_recent_stamp");
    tw_rcv_nxt = Member("tcp_timewait_sock", "tw_rcv_nxt"), or Member("sock_common", "skc_tw_rcv_nxt");
    tw_substate = Member("inet_timewait_sock", "tw_substate");
    tcp_rcv_nxt = Member("tcp_sock", "rcv_nxt");
    tcp_rcv_wup = Member("tcp_sock", "rcv_wup");
    tcp_rcv_wnd = Member("tcp_sock", "rcv_wnd");
    tcp_rcv_tsval = Member("tcp_sock", "rx_opt.rcv_tsval");
    tcp_ts_recent = Member("tcp_sock", "rx_opt.ts_recent");
    tcp_ts_recent_stamp = Member("tcp_sock", "rx_opt.ts_recent_stamp");
    request_ts_recent = Member("request_sock", "ts_recent");
    request_snt_isn = Member("tcp_request_sock", "snt_isn");

    // Conntrack.
    ct_status = Member("nf_conn", "status");
    ct_timeout = Member("nf_conn", "timeout");
    ct_net = Member("nf_conn", "ct_net.net");
    ct_tuplehash = Member("nf_conn", "tuplehash");
    ct_tcp_state = Member("nf_conn", "proto.tcp.state");
    tuplehash_size = Size("nf_conntrack_tuple_hash");
    tuplehash_tuple = Member("nf_conntrack_tuple_hash", "tuple");
    tuple_src = Member("nf_conntrack_tuple", "src.u3");
    tuple_src_port = Member("nf_conntrack_tuple", "src.u");
    tuple_l3num = Member("nf_conntrack_tuple", "src.l3num");
    tuple_dst = Member("nf_conntrack_tuple", "dst.u3");
    tuple_dst_port = Member("nf_conntrack_tuple", "dst.u");
    tuple_protonum = Member("nf_conntrack_tuple", "dst.protonum");
    tuple_dir = Member("nf_conntrack_tuple", "dst.dir");
    va_format_fmt = Member("va_format", "fmt");

    // Neighbour.
    neigh_primary_key = Member("neighbour", "primary_key");
    neigh_dev = Member("neighbour", "dev");

    // Drop reasons that a program itself must know.
    reason_invalid_source = Enumerator("skb_drop_reason", "SKB_DROP_REASON_IP_INVALID_SOURCE");
    reason_paws = Enumerator("skb_drop_reason", "SKB_DROP_REASON_TCP_RFC7323_PAWS");
    /// First and last of the reasons about the state of a connection.
    reason_tcp_first = Enumerator("skb_drop_reason", "SKB_DROP_REASON_TCP_ZEROWINDOW");
    reason_tcp_last = Enumerator("skb_drop_reason", "SKB_DROP_REASON_TCP_OFO_DROP");
    reason_socket_filter = Enumerator("skb_drop_reason", "SKB_DROP_REASON_SOCKET_FILTER");
    reason_netfilter_drop = Enumerator("skb_drop_reason", "SKB_DROP_REASON_NETFILTER_DROP");

    // Arguments.
    kfree_skb_arguments = TracepointArguments("kfree_skb");
    arg_conn_request_sk = Parameter("tcp_conn_request", "sk");
    arg_conn_request_skb = Parameter("tcp_conn_request", "skb");
    arg_syn_recv_sk = Parameter("tcp_v4_syn_recv_sock", "sk");
    arg_syn_recv_skb = Parameter("tcp_v4_syn_recv_sock", "skb");
    arg_syn_recv_req = Parameter("tcp_v4_syn_recv_sock", "req");
    arg_cookie_check_sk = Parameter("cookie_v4_check", "sk");
    arg_cookie_check_skb = Parameter("cookie_v4_check", "skb");
    arg_tw_process_tw = Parameter("tcp_timewait_state_process", "tw");
    arg_tw_process_skb = Parameter("tcp_timewait_state_process", "skb");
    arg_check_req_sk = Parameter("tcp_check_req", "sk");
    arg_check_req_skb = Parameter("tcp_check_req", "skb");
    arg_check_req_req = Parameter("tcp_check_req", "req");
    arg_check_req_stolen = Parameter("tcp_check_req", "req_stolen");
    arg_validate_sk = Parameter("tcp_validate_incoming", "sk");
    arg_validate_skb = Parameter("tcp_validate_incoming", "skb");
    arg_dupack_sk = Parameter("tcp_send_dupack", "sk");
    arg_dupack_skb = Parameter("tcp_send_dupack", "skb");
    arg_martian_dev = Parameter("ip_handle_martian_source", "dev");
    arg_martian_skb = Parameter("ip_handle_martian_source", "skb");
    arg_arp_error_neigh = Parameter("arp_error_report", "neigh");
    arg_arp_error_skb = Parameter("arp_error_report", "skb");
    arg_validate_th = Parameter("tcp_validate_incoming", "th");
    arg_req_err_sk = Parameter("tcp_req_err", "sk");
    arg_req_err_seq = Parameter("tcp_req_err", "seq");
    arg_req_err_abort = Parameter("tcp_req_err", "abort");
    arg_v4_conn_request_sk = Parameter("tcp_v4_conn_request", "sk");
    arg_v4_conn_request_skb = Parameter("tcp_v4_conn_request", "skb");
    arg_send_reset_sk = Parameter("tcp_v4_send_reset", "sk");
    arg_send_reset_skb = Parameter("tcp_v4_send_reset", "skb");
    arg_icmp_send_skb = Parameter("__icmp_send", "skb_in");
    arg_icmp_send_type = Parameter("__icmp_send", "type");
    arg_icmp_send_code = Parameter("__icmp_send", "code");
    arg_icmp_send_info = Parameter("__icmp_send", "info");
    arg_icmp6_send_skb = Parameter("icmp6_send", "skb");
    arg_icmp6_send_type = Parameter("icmp6_send", "type");
    arg_icmp6_send_code = Parameter("icmp6_send", "code");
    arg_icmp6_send_info = Parameter("icmp6_send", "info");
    arg_udp_enqueue_sk = Parameter("__udp_enqueue_schedule_skb", "sk");
    arg_udp_enqueue_skb = Parameter("__udp_enqueue_schedule_skb", "skb");
    arg_add_backlog_sk = Parameter("tcp_add_backlog", "sk");
    arg_add_backlog_skb = Parameter("tcp_add_backlog", "skb");
    arg_try_rmem_sk = Parameter("tcp_try_rmem_schedule", "sk");
    arg_try_rmem_skb = Parameter("tcp_try_rmem_schedule", "skb");
    parameters_try_rmem = ParameterCount("tcp_try_rmem_schedule");
    parameters_udp_enqueue = ParameterCount("__udp_enqueue_schedule_skb");
    parameters_add_backlog = ParameterCount("tcp_add_backlog");
    parameters_peer_is_proven = ParameterCount("tcp_peer_is_proven");
    parameters_tw_process = ParameterCount("tcp_timewait_state_process");
    parameters_check_req = ParameterCount("tcp_check_req");
    parameters_validate = ParameterCount("tcp_validate_incoming");
    }
}

layout! {
    /// What is known once the module `ip_vs` is loaded; travels in a map that
    /// user space fills before the IPVS hooks are attached.
    IpvsLayout {
    ipvs_conn_cport = Member("ip_vs_conn", "cport");
    ipvs_conn_vport = Member("ip_vs_conn", "vport");
    ipvs_conn_dport = Member("ip_vs_conn", "dport");
    ipvs_conn_af = Member("ip_vs_conn", "af");
    ipvs_conn_caddr = Member("ip_vs_conn", "caddr");
    ipvs_conn_vaddr = Member("ip_vs_conn", "vaddr");
    ipvs_conn_daddr = Member("ip_vs_conn", "daddr");
    ipvs_conn_flags = Member("ip_vs_conn", "flags");
    ipvs_conn_protocol = Member("ip_vs_conn", "protocol");
    ipvs_conn_state = Member("ip_vs_conn", "state");
    ipvs_conn_dest = Member("ip_vs_conn", "dest");
    ipvs_dest_flags = Member("ip_vs_dest", "cflags"), or Member("ip_vs_dest", "flags");
    ipvs_dest_weight = Member("ip_vs_dest", "weight");
    arg_leave_skb = Parameter("ip_vs_leave", "skb");
    arg_expire_now_cp = Parameter("ip_vs_conn_expire_now", "cp");
    arg_in_skb = Parameter("ip_vs_in_hook", "skb"), or Parameter("ip_vs_in", "skb");
    // Module nf_reject_ipv4: not IPVS, but known as late.
    arg_nf_send_reset_skb = Parameter("nf_send_reset", "oldskb");
    arg_nf_send_reset6_skb = Parameter("nf_send_reset6", "oldskb");
    // Module nf_conntrack.
    arg_entry_invalid_fmt = Parameter("nf_ct_l4proto_log_invalid", "fmt");
    arg_invalid_fmt = Parameter("nf_l4proto_log_invalid", "fmt");
    arg_helper_log_fmt = Parameter("nf_ct_helper_log", "fmt");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_follow_the_fields() {
        assert_eq!(Layout::ENTRIES.len() * size_of::<u32>(), size_of::<Layout>());
        let mut layout = Layout::ABSENT;
        for index in 0..Layout::ENTRIES.len() {
            assert_eq!(layout.get(index), Some(ABSENT));
            layout.set(index, index as u32);
        }
        for index in 0..Layout::ENTRIES.len() {
            assert_eq!(layout.get(index), Some(index as u32));
        }
        assert_eq!(layout.get(Layout::ENTRIES.len()), None);
    }
}
