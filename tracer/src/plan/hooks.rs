//! The hook table: one row for each place in the kernel that droptrace looks
//! at. A new hook is one row here and one program of the same name.

/// A place in the kernel, what is to be learnt there, and what a look costs.
#[derive(Debug, PartialEq, Eq)]
pub struct Hook {
    /// Name: the programs are called `NAME_fentry`, `NAME_fexit`, `NAME_kprobe`, `NAME_kretprobe`; those of a tracepoint are
    /// listed with it.
    pub name: &'static str,
    /// What it tells.
    pub doc: &'static str,
    /// What it is attached to.
    pub target: Target,
    /// The module that brings the target; the kernel may have it built in.
    pub module: Option<&'static str>,
    /// On which kernels and in which runs it is attached.
    pub when: When,
    /// Layout entries without which it cannot tell the truth.
    pub needs: &'static [&'static str],
    /// Causes that are not seen, or not wholly seen, without it.
    pub serves: &'static [Serves],
    /// When the kernel calls it, hence what it costs.
    pub price: &'static str,
    /// Hardly ever called: what attaching costs, of which probes at entry and exit need half, counts more than what a call
    /// does, so probes are tried first.
    pub rare: bool,
}

/// What a hook is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A raw tracepoint, and the programs that are attached to it, in the order in which the kernel calls them.
    Tracepoint(&'static str, &'static [&'static str]),
    /// The first of these functions that the kernel has and lets be hooked.
    Function(&'static [&'static str], Phases),
}

/// Which ends of a function's call are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phases {
    /// Its start.
    Entry,
    /// Its return.
    Exit,
    /// Both, or nothing.
    EntryAndExit,
}

impl Phases {
    /// Whether its start is looked at.
    pub const fn entry(self) -> bool {
        matches!(self, Self::Entry | Self::EntryAndExit)
    }

    /// Whether its return is looked at.
    pub const fn exit(self) -> bool {
        matches!(self, Self::Exit | Self::EntryAndExit)
    }
}

/// On which kernels and in which runs a hook is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Always.
    Always,
    /// Only where `skb:kfree_skb` has no reason (before 5.17), since the reason says the same.
    WithoutReasons,
    /// Only where `skb:kfree_skb` has a reason, but not the receiving socket (5.17 - 6.10).
    WithoutSocket,
    /// Only where a task can be preempted within a tracepoint: on 6.13 and later.
    Preempted,
    /// Only where a netns in scope has IPVS services and `expire_nodest_conn=0`, or the user asked for it: it is on the path
    /// of every packet.
    IpvsWanted,
}

/// A cause that a hook serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Serves {
    /// Slug of the cause.
    pub cause: &'static str,
    /// Which of the cause's drops or which of its evidence need the hook; `None`: all of it does.
    pub part: Option<&'static str>,
    /// The hook is not needed for this where the kernel itself gives a drop this reason.
    pub unless_reason: Option<&'static str>,
}

/// All of the cause needs the hook.
const fn all(cause: &'static str) -> Serves {
    Serves {
        cause,
        part: None,
        unless_reason: None,
    }
}

/// A part of the cause needs the hook.
const fn part(cause: &'static str, part: &'static str) -> Serves {
    Serves {
        cause,
        part: Some(part),
        unless_reason: None,
    }
}

/// All of the cause needs the hook unless the kernel gives the drop this reason.
const fn all_unless(cause: &'static str, reason: &'static str) -> Serves {
    Serves {
        cause,
        part: None,
        unless_reason: Some(reason),
    }
}

/// A row that most rows differ from in few places.
const ROW: Hook = Hook {
    name: "",
    doc: "",
    target: Target::Function(&[], Phases::Entry),
    module: None,
    when: When::Always,
    needs: &[],
    serves: &[],
    price: "",
    rare: false,
};

/// The table.
pub const HOOKS: &[Hook] = &[
    Hook {
        name: "kfree_skb",
        doc: "every packet that is freed as dropped",
        target: Target::Tracepoint("kfree_skb", &["kfree_skb"]),
        needs: &[
            "skb_len",
            "skb_head",
            "skb_data",
            "skb_protocol",
            "skb_network_header",
        ],
        serves: &[
            all("kernel-reason"),
            all("unknown"),
            all("netfilter-rule"),
            all("netfilter-reject"),
            all("nfqueue"),
            all("bridge-netfilter"),
            all("conntrack-dying"),
            all("masquerade-no-address"),
            all("no-socket"),
            all("vip-no-service"),
            all("no-route"),
            all("ttl-exceeded"),
            all("packet-too-big"),
            all("not-forwarding"),
            all("blackhole-route"),
            all("neigh-failed"),
            all("socket-rcvbuf-full"),
            all("udp-memory"),
            all("socket-backlog-full"),
            all("socket-filter"),
            all("cgroup-bpf"),
            all("tcp-memory"),
            all("tcp-md5"),
            all("tcp-ao"),
            all("local-source"),
            all("rp-filter"),
            all("martian-source"),
            all("martian-destination"),
            all("conntrack-insert-race"),
            all("conntrack-nat-exhausted"),
            all("conntrack-table-full"),
            all("paws-timewait"),
            all("paws-request"),
            all("timewait-old-sequence"),
            all("tcp-challenge-ack"),
            all("tcp-out-of-window"),
            all("tcp-zero-window"),
            all("tcp-ofo-pruned"),
            all("ipvs-no-destination"),
            all("syncookie-invalid"),
        ],
        price: "once for each packet dropped",
        ..ROW
    },
    Hook {
        name: "kfree_skb_preempted",
        doc: "packets that are freed while both kfree_skb and kfree_skb_again are at work on the same CPU, by a task that runs meanwhile",
        target: Target::Tracepoint("kfree_skb", &["kfree_skb_second", "kfree_skb_third"]),
        when: When::Preempted,
        needs: &["skb_head", "skb_data"],
        serves: &[part(
            "unknown",
            "drops of a task that runs while the handling of another one is put off, on the same CPU",
        )],
        price: "twice for each packet dropped, for a look at whether another program has seen it",
        ..ROW
    },
    Hook {
        name: "kfree_skb_again",
        doc: "packets that are freed while kfree_skb is at work on the same CPU: the kernel passes that program over then",
        target: Target::Tracepoint("kfree_skb", &["kfree_skb_last"]),
        needs: &["skb_head", "skb_data"],
        serves: &[part(
            "unknown",
            "drops within the handling of another one, on the same CPU",
        )],
        price: "once for each packet dropped, for a look at whether another program has seen it",
        ..ROW
    },
    Hook {
        name: "tcp_conn_request",
        doc: "a SYN that a listener refuses: the kernel consumes it without a trace, so the counters ListenOverflows, ListenDrops and TCPReqQFullDrop are compared before and after",
        target: Target::Function(&["tcp_conn_request"], Phases::EntryAndExit),
        needs: &[
            "arg_conn_request_sk",
            "arg_conn_request_skb",
            "sock_net",
            "net_statistics",
            "bpf_array_pptrs",
            "mib_listen_overflows",
            "mib_listen_drops",
            "mib_req_queue_full_drop",
        ],
        serves: &[
            part("accept-queue-full", "stage: syn"),
            all("syn-queue-full"),
            all("syn-backlog-last-quarter"),
            all("syn-refused"),
        ],
        price: "once for each SYN that reaches a listener",
        ..ROW
    },
    Hook {
        name: "tcp_peer_is_proven",
        doc: "a SYN refused since the last quarter of tcp_max_syn_backlog is kept for known peers",
        target: Target::Function(&["tcp_peer_is_proven"], Phases::Exit),
        needs: &["parameters_peer_is_proven"],
        serves: &[all("syn-backlog-last-quarter")],
        price: "once for each SYN while three quarters of tcp_max_syn_backlog are used and syncookies are off",
        rare: true,
        ..ROW
    },
    Hook {
        name: "tcp_v4_conn_request",
        doc: "a SYN to a broadcast or multicast address",
        target: Target::Function(&["tcp_v4_conn_request"], Phases::Entry),
        needs: &["arg_v4_conn_request_sk", "arg_v4_conn_request_skb"],
        serves: &[part("syn-refused", "not unicast, IPv4")],
        price: "once for each SYN that reaches a listener",
        ..ROW
    },
    Hook {
        name: "tcp_v6_conn_request",
        doc: "a SYN to a multicast address",
        target: Target::Function(&["tcp_v6_conn_request"], Phases::Entry),
        needs: &["arg_v4_conn_request_sk", "arg_v4_conn_request_skb"],
        serves: &[part("syn-refused", "not unicast, IPv6")],
        price: "once for each SYN that reaches a listener",
        ..ROW
    },
    Hook {
        name: "tcp_v4_syn_recv_sock",
        doc: "the last ACK of a handshake that finds the accept queue full",
        target: Target::Function(&["tcp_v4_syn_recv_sock"], Phases::EntryAndExit),
        needs: &[
            "arg_syn_recv_sk",
            "arg_syn_recv_skb",
            "arg_syn_recv_req",
            "sock_refcnt",
            "sock_net",
            "net_statistics",
            "bpf_array_pptrs",
            "mib_listen_overflows",
        ],
        serves: &[part("accept-queue-full", "stage: ack and syncookie-ack, IPv4")],
        price: "once for each connection accepted",
        ..ROW
    },
    Hook {
        name: "tcp_v6_syn_recv_sock",
        doc: "the last ACK of a handshake that finds the accept queue full",
        target: Target::Function(&["tcp_v6_syn_recv_sock"], Phases::EntryAndExit),
        needs: &[
            "arg_syn_recv_sk",
            "arg_syn_recv_skb",
            "arg_syn_recv_req",
            "sock_refcnt",
            "sock_net",
            "net_statistics",
            "bpf_array_pptrs",
            "mib_listen_overflows",
        ],
        serves: &[part("accept-queue-full", "stage: ack and syncookie-ack, IPv6")],
        price: "once for each connection accepted",
        ..ROW
    },
    Hook {
        name: "cookie_v4_check",
        doc: "an ACK whose syncookie the kernel refuses: the counter SyncookiesFailed is compared before and after",
        target: Target::Function(&["cookie_v4_check"], Phases::EntryAndExit),
        needs: &[
            "arg_cookie_check_sk",
            "arg_cookie_check_skb",
            "sock_net",
            "net_statistics",
            "bpf_array_pptrs",
            "mib_syncookies_failed",
        ],
        serves: &[part("syncookie-invalid", "IPv4")],
        price: "once for each ACK without a connection or request that reaches a listener",
        rare: true,
        ..ROW
    },
    Hook {
        name: "cookie_v6_check",
        doc: "the same, IPv6",
        target: Target::Function(&["cookie_v6_check"], Phases::EntryAndExit),
        needs: &[
            "arg_cookie_check_sk",
            "arg_cookie_check_skb",
            "sock_net",
            "net_statistics",
            "bpf_array_pptrs",
            "mib_syncookies_failed",
        ],
        serves: &[part("syncookie-invalid", "IPv6")],
        price: "once for each ACK without a connection or request that reaches a listener",
        rare: true,
        ..ROW
    },
    Hook {
        name: "tcp_timewait_state_process",
        doc: "a segment that meets a TIME_WAIT socket: refused by its timestamp, by its sequence number, or handled as it should be",
        target: Target::Function(&["tcp_timewait_state_process"], Phases::EntryAndExit),
        needs: &[
            "arg_tw_process_tw",
            "arg_tw_process_skb",
            "tw_ts_recent",
            "tw_ts_recent_stamp",
            "tw_rcv_nxt",
        ],
        serves: &[
            all_unless("paws-timewait", "TCP_RFC7323_TW_PAWS"),
            part("paws-timewait", "timestamp_stored"),
            all("timewait-old-sequence"),
            all("timewait-segment"),
        ],
        price: "once for each segment that meets a TIME_WAIT socket",
        rare: true,
        ..ROW
    },
    Hook {
        name: "tcp_check_req",
        doc: "a segment that meets a pending request: refused by its timestamp, or a SYN sent again",
        target: Target::Function(&["tcp_check_req"], Phases::EntryAndExit),
        needs: &[
            "arg_check_req_skb",
            "arg_check_req_req",
            "arg_check_req_stolen",
            "request_ts_recent",
        ],
        serves: &[all("paws-request"), all("request-retransmit")],
        price: "once for each segment that meets a pending request",
        ..ROW
    },
    Hook {
        name: "tcp_validate_incoming",
        doc: "a segment of an established connection refused by its timestamp or sequence number, or a RST or SYN that is not believed",
        target: Target::Function(&["tcp_validate_incoming"], Phases::EntryAndExit),
        when: When::WithoutReasons,
        needs: &[
            "arg_validate_sk",
            "tcp_rcv_nxt",
            "tcp_rcv_wup",
            "tcp_rcv_wnd",
            "tcp_rcv_tsval",
            "tcp_ts_recent",
            "tcp_ts_recent_stamp",
        ],
        serves: &[
            all("paws-established"),
            all("tcp-out-of-window"),
            part("tcp-challenge-ack", "segment: reset and syn"),
        ],
        price: "once for each segment off the TCP fast path",
        ..ROW
    },
    Hook {
        name: "tcp_send_dupack",
        doc: "a segment of an established connection that is refused by its timestamp or sequence number, and answered",
        target: Target::Function(&["tcp_send_dupack"], Phases::Entry),
        when: When::WithoutSocket,
        needs: &[
            "arg_dupack_sk",
            "arg_dupack_skb",
            "sock_net",
            "tcp_rcv_nxt",
            "tcp_rcv_wup",
            "tcp_rcv_wnd",
        ],
        serves: &[
            all_unless("tcp-out-of-window", "TCP_OLD_SEQUENCE"),
            part("paws-established", "timestamp_stored"),
        ],
        price: "once for each segment refused so",
        rare: true,
        ..ROW
    },
    Hook {
        name: "udp_enqueue",
        doc: "a datagram that its socket has no room for",
        target: Target::Function(&["__udp_enqueue_schedule_skb"], Phases::EntryAndExit),
        when: When::WithoutReasons,
        needs: &["arg_udp_enqueue_sk", "arg_udp_enqueue_skb"],
        serves: &[all("socket-rcvbuf-full"), all("udp-memory")],
        price: "once for each datagram that reaches a socket",
        ..ROW
    },
    Hook {
        name: "tcp_add_backlog",
        doc: "a segment whose socket is locked by its owner, and may keep no more of them until it is unlocked",
        target: Target::Function(&["tcp_add_backlog"], Phases::EntryAndExit),
        when: When::WithoutReasons,
        needs: &[
            "arg_add_backlog_sk",
            "arg_add_backlog_skb",
            "sock_net",
            "net_statistics",
            "bpf_array_pptrs",
            "mib_backlog_drop",
        ],
        serves: &[all("socket-backlog-full")],
        price: "once for each segment that comes while its socket's owner has it locked",
        ..ROW
    },
    Hook {
        name: "tcp_try_rmem_schedule",
        doc: "a segment for which TCP has no memory, although its socket has room",
        target: Target::Function(&["tcp_try_rmem_schedule"], Phases::EntryAndExit),
        when: When::WithoutReasons,
        needs: &[
            "arg_try_rmem_sk",
            "arg_try_rmem_skb",
            "parameters_try_rmem",
            "sock_rmem_alloc",
            "sock_rcvbuf",
            "skb_protocol",
        ],
        serves: &[all_unless("tcp-memory", "PROTO_MEM")],
        price: "once for each segment off the TCP fast path that meets others in its socket's queue, or a gap before it",
        ..ROW
    },
    Hook {
        name: "tcp_v4_send_reset",
        doc: "a segment that belongs to no socket",
        target: Target::Function(&["tcp_v4_send_reset"], Phases::Entry),
        when: When::WithoutReasons,
        needs: &["arg_send_reset_sk", "arg_send_reset_skb"],
        serves: &[part("no-socket", "TCP, IPv4")],
        price: "once for each RST sent for a segment",
        ..ROW
    },
    Hook {
        name: "tcp_v6_send_reset",
        doc: "a segment that belongs to no socket",
        target: Target::Function(&["tcp_v6_send_reset"], Phases::Entry),
        when: When::WithoutReasons,
        needs: &["arg_send_reset_sk", "arg_send_reset_skb"],
        serves: &[part("no-socket", "TCP, IPv6")],
        price: "once for each RST sent for a segment",
        ..ROW
    },
    Hook {
        name: "icmp_send",
        doc: "a datagram to a port that no socket has, a packet that may not go on",
        target: Target::Function(&["__icmp_send"], Phases::Entry),
        when: When::WithoutReasons,
        needs: &[
            "arg_icmp_send_skb",
            "arg_icmp_send_type",
            "arg_icmp_send_code",
            "arg_icmp_send_info",
        ],
        serves: &[
            part("no-socket", "UDP, IPv4"),
            part("ttl-exceeded", "IPv4"),
            part("packet-too-big", "IPv4"),
        ],
        price: "once for each ICMP error sent",
        ..ROW
    },
    Hook {
        name: "icmp6_send",
        doc: "the same, IPv6",
        target: Target::Function(&["icmp6_send"], Phases::Entry),
        when: When::WithoutReasons,
        needs: &[
            "arg_icmp6_send_skb",
            "arg_icmp6_send_type",
            "arg_icmp6_send_code",
            "arg_icmp6_send_info",
        ],
        serves: &[
            part("no-socket", "UDP, IPv6"),
            part("ttl-exceeded", "IPv6"),
            part("packet-too-big", "IPv6"),
        ],
        price: "once for each ICMPv6 error sent",
        ..ROW
    },
    Hook {
        name: "tcp_req_err",
        doc: "an ICMP error that ends a pending request: it is counted in ListenDrops, though no packet is lost",
        target: Target::Function(&["tcp_req_err"], Phases::Entry),
        needs: &[
            "arg_req_err_sk",
            "arg_req_err_seq",
            "arg_req_err_abort",
            "request_snt_isn",
        ],
        serves: &[
            part("syn-refused", "reconciliation with ListenDrops"),
            all("request-killed-by-icmp"),
        ],
        price: "once for each ICMP error for a pending request",
        rare: true,
        ..ROW
    },
    Hook {
        name: "ip_handle_martian_source",
        doc: "a packet whose source address the routing code refuses",
        target: Target::Function(&["ip_handle_martian_source"], Phases::Entry),
        needs: &["arg_martian_dev", "arg_martian_skb"],
        serves: &[
            all_unless("local-source", "IP_LOCAL_SOURCE"),
            all_unless("rp-filter", "IP_RPFILTER"),
            all_unless("martian-source", "IP_INVALID_SOURCE"),
            part("local-source", "accept_local"),
            part("rp-filter", "rp_filter"),
        ],
        price: "once for each packet so refused",
        rare: true,
        ..ROW
    },
    Hook {
        name: "arp_error_report",
        doc: "a packet whose IPv4 neighbour did not answer",
        target: Target::Function(&["arp_error_report"], Phases::Entry),
        needs: &["arg_arp_error_neigh", "arg_arp_error_skb"],
        serves: &[part("neigh-failed", "neighbour, IPv4")],
        price: "once for each packet whose neighbour did not answer",
        rare: true,
        ..ROW
    },
    Hook {
        name: "ndisc_error_report",
        doc: "a packet whose IPv6 neighbour did not answer: freed without a reason on all kernels",
        target: Target::Function(&["ndisc_error_report"], Phases::Entry),
        needs: &["arg_arp_error_neigh", "arg_arp_error_skb"],
        serves: &[part("neigh-failed", "neighbour, IPv6")],
        price: "once for each packet whose neighbour did not answer",
        rare: true,
        ..ROW
    },
    Hook {
        name: "nf_ct_resolve_clash",
        doc: "two first packets whose conntrack entries clash: one is lost, or the kernel merges them",
        target: Target::Function(&["nf_ct_resolve_clash"], Phases::EntryAndExit),
        module: Some("nf_conntrack"),
        needs: &[
            "skb_nfct",
            "ct_tuplehash",
            "ct_status",
            "tuplehash_size",
            "tuplehash_tuple",
            "tuple_dir",
        ],
        serves: &[
            all("conntrack-insert-race"),
            all("conntrack-nat-exhausted"),
            all("conntrack-clash-resolved"),
            part("netfilter-rule", "told from a lost conntrack clash"),
        ],
        price: "once for each clash",
        ..ROW
    },
    Hook {
        name: "early_drop",
        doc: "a first packet that finds the conntrack table full, and no entry to evict",
        target: Target::Function(&["early_drop"], Phases::EntryAndExit),
        module: Some("nf_conntrack"),
        serves: &[
            all("conntrack-table-full"),
            part("netfilter-rule", "told from a full conntrack table"),
        ],
        price: "once for each new connection while the table is full",
        ..ROW
    },
    Hook {
        name: "nf_ct_l4proto_log_invalid",
        doc: "a packet that does not fit its conntrack entry, and why",
        target: Target::Function(&["nf_ct_l4proto_log_invalid"], Phases::Entry),
        module: Some("nf_conntrack"),
        needs: &["arg_entry_invalid_fmt", "ct_status"],
        serves: &[
            part("conntrack-invalid", "packets that do not fit their connection"),
            part("netfilter-rule", "told from an INVALID packet"),
        ],
        price: "once for each such packet",
        ..ROW
    },
    Hook {
        name: "nf_l4proto_log_invalid",
        doc: "a packet that conntrack can make nothing of, and why",
        target: Target::Function(&["nf_l4proto_log_invalid"], Phases::Entry),
        module: Some("nf_conntrack"),
        needs: &["arg_invalid_fmt"],
        serves: &[part("conntrack-invalid", "packets with damaged headers")],
        price: "once for each such packet",
        ..ROW
    },
    Hook {
        name: "nf_ct_helper_log",
        doc: "a conntrack helper drops a packet, and why",
        target: Target::Function(&["nf_ct_helper_log"], Phases::Entry),
        module: Some("nf_conntrack"),
        needs: &["arg_helper_log_fmt"],
        serves: &[all("conntrack-helper")],
        price: "once for each such packet",
        ..ROW
    },
    Hook {
        name: "nf_send_reset",
        doc: "a rule answers a packet with RST",
        target: Target::Function(&["nf_send_reset"], Phases::Entry),
        module: Some("nf_reject_ipv4"),
        needs: &["arg_nf_send_reset_skb"],
        serves: &[part("netfilter-reject", "answered with RST, IPv4")],
        price: "once for each packet so rejected",
        ..ROW
    },
    Hook {
        name: "nf_send_unreach",
        doc: "a rule answers a packet with an ICMP error",
        target: Target::Function(&["nf_send_unreach"], Phases::Entry),
        module: Some("nf_reject_ipv4"),
        serves: &[part("netfilter-reject", "answered with ICMP error, IPv4")],
        price: "once for each packet so rejected",
        ..ROW
    },
    Hook {
        name: "nf_send_reset6",
        doc: "a rule answers a packet with RST",
        target: Target::Function(&["nf_send_reset6"], Phases::Entry),
        module: Some("nf_reject_ipv6"),
        needs: &["arg_nf_send_reset6_skb"],
        serves: &[part("netfilter-reject", "answered with RST, IPv6")],
        price: "once for each packet so rejected",
        ..ROW
    },
    Hook {
        name: "nf_send_unreach6",
        doc: "a rule answers a packet with an ICMPv6 error",
        target: Target::Function(&["nf_send_unreach6"], Phases::Entry),
        module: Some("nf_reject_ipv6"),
        serves: &[part("netfilter-reject", "answered with ICMPv6 error, IPv6")],
        price: "once for each packet so rejected",
        ..ROW
    },
    Hook {
        name: "ip_vs_leave",
        doc: "a packet to an IPVS service that has no usable real server",
        target: Target::Function(&["ip_vs_leave"], Phases::Entry),
        module: Some("ip_vs"),
        needs: &["arg_leave_skb"],
        serves: &[all("ipvs-no-destination")],
        price: "once for each such packet",
        ..ROW
    },
    Hook {
        name: "ip_vs_conn_expire_now",
        doc: "a SYN that met a left-over IPVS entry, which IPVS gives up; the SYN may be lost",
        target: Target::Function(&["ip_vs_conn_expire_now"], Phases::Entry),
        module: Some("ip_vs"),
        needs: &[
            "arg_expire_now_cp",
            "ipvs_conn_caddr",
            "ipvs_conn_vaddr",
            "ipvs_conn_cport",
            "ipvs_conn_vport",
            "ipvs_conn_protocol",
        ],
        serves: &[part("ipvs-timewait-reuse", "dropped while the entry is given up")],
        price: "once for each entry given up early",
        ..ROW
    },
    Hook {
        name: "ip_vs_in",
        doc: "what IPVS does with each packet: an entry whose real server was removed swallows packets without a trace, or sends a SYN to a dead server",
        // Renamed about 5.16; before, the compiler splits the body off.
        target: Target::Function(
            &["ip_vs_in_hook", "ip_vs_in.part.0", "ip_vs_in"],
            Phases::EntryAndExit,
        ),
        module: Some("ip_vs"),
        when: When::IpvsWanted,
        needs: &["arg_in_skb", "ipvs_conn_dest", "ipvs_dest_flags"],
        serves: &[
            part("ipvs-timewait-reuse", "misdelivered, or dropped without a trace"),
            all("ipvs-destination-gone"),
        ],
        price: "once for each packet in a netns with IPVS services",
        ..ROW
    },
    Hook {
        name: "ip_vs_conn_in_get",
        doc: "the IPVS entry that a packet belongs to",
        target: Target::Function(&["ip_vs_conn_in_get_proto"], Phases::Exit),
        module: Some("ip_vs"),
        when: When::IpvsWanted,
        needs: &["ipvs_conn_dest", "ipvs_dest_flags"],
        serves: &[
            part("ipvs-timewait-reuse", "misdelivered, or dropped without a trace"),
            all("ipvs-destination-gone"),
        ],
        price: "once for each packet in a netns with IPVS services",
        ..ROW
    },
];

/// A piece of evidence that one layout entry gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvidenceEntry {
    /// Name of the layout entry.
    pub entry: &'static str,
    /// Name of the evidence field that is null without it.
    pub field: &'static str,
    /// Slugs of the causes that show it.
    pub causes: &'static [&'static str],
}

const fn evidence(
    entry: &'static str,
    field: &'static str,
    causes: &'static [&'static str],
) -> EvidenceEntry {
    EvidenceEntry { entry, field, causes }
}

/// Causes about listeners.
const LISTENER: &[&str] = &[
    "accept-queue-full",
    "syn-queue-full",
    "syn-backlog-last-quarter",
    "syn-refused",
];
/// Causes about lost races for a conntrack entry.
const CLASH: &[&str] = &["conntrack-insert-race", "conntrack-nat-exhausted"];
/// Causes about the source address.
const SOURCE: &[&str] = &["local-source", "rp-filter"];
/// Causes about IPVS entries.
const IPVS_ENTRY: &[&str] = &["ipvs-timewait-reuse", "ipvs-destination-gone"];

/// Evidence that is null where the kernel lacks an entry, although the hook works.
pub const EVIDENCE: &[EvidenceEntry] = &[
    evidence("sock_ack_backlog", "accept_queue_length", LISTENER),
    evidence("sock_max_ack_backlog", "accept_queue_limit", LISTENER),
    evidence("icsk_queue_length", "syn_queue_length", LISTENER),
    evidence("net_syncookies", "tcp_syncookies", LISTENER),
    evidence(
        "net_abort_on_overflow",
        "tcp_abort_on_overflow",
        &["accept-queue-full"],
    ),
    evidence("net_max_syn_backlog", "tcp_max_syn_backlog", LISTENER),
    evidence("net_somaxconn", "somaxconn", LISTENER),
    evidence("sock_num", "listener_port", LISTENER),
    evidence("sock_rcv_saddr", "listener_address", LISTENER),
    evidence("socket_alloc_inode", "owner", LISTENER),
    evidence("tcp_ts_recent_stamp", "last_cookie_s", &["syncookie-invalid"]),
    evidence("net_devconf_all", "rp_filter_all", SOURCE),
    evidence("in_device_cnf_data", "rp_filter_device", SOURCE),
    evidence("ct_timeout", "winner_timeout_jiffies", CLASH),
    evidence("ct_tcp_state", "winner_tcp_state", CLASH),
    evidence("ipvs_conn_state", "ipvs_state", IPVS_ENTRY),
    evidence("ipvs_dest_weight", "ipvs_weight", IPVS_ENTRY),
    evidence("neigh_primary_key", "neighbour", &["neigh-failed"]),
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use droptrace_common::{IpvsLayout, Layout};

    use super::*;

    fn is_entry(name: &str) -> bool {
        Layout::ENTRIES
            .iter()
            .chain(IpvsLayout::ENTRIES)
            .any(|entry| entry.name == name)
    }

    #[test]
    fn names_are_unique_and_every_row_is_filled() {
        let mut names = HashSet::new();
        for hook in HOOKS {
            assert!(names.insert(hook.name), "{} is there twice", hook.name);
            assert!(!hook.doc.is_empty() && !hook.price.is_empty(), "{}", hook.name);
            assert!(!hook.serves.is_empty(), "{} serves no cause", hook.name);
            for serves in hook.serves {
                assert!(!serves.cause.is_empty() && serves.part.is_none_or(|part| !part.is_empty()));
            }
            if let Target::Function(names, _) = hook.target {
                assert!(!names.is_empty(), "{} has no target", hook.name);
            }
        }
    }

    #[test]
    fn needs_are_layout_entries() {
        for hook in HOOKS {
            for need in hook.needs {
                assert!(
                    is_entry(need),
                    "{} needs {need}, which is no layout entry",
                    hook.name
                );
            }
        }
        for each in EVIDENCE {
            assert!(is_entry(each.entry), "{} is no layout entry", each.entry);
        }
    }
}
