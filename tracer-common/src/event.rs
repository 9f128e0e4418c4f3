//! The raw event: a fixed header, the first bytes of the packet, and a short
//! list of (field, value).

use crate::CountKey;

/// Bytes of packet headers that travel with an event, from the network header on.
pub const PACKET_MAX: usize = 128;
/// Fields that one event can carry.
pub const FIELDS_MAX: usize = 42;
/// Bytes of the largest event: header, packet, fields.
pub const EVENT_MAX: usize = size_of::<EventHeader>() + PACKET_MAX + FIELDS_MAX * size_of::<Field>();

/// What every event says. On the wire follow [`PACKET_MAX`] packet bytes (of
/// which `packet_len` are valid) and `fields` times a [`Field`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventHeader {
    /// Kernel's monotonic clock when the packet was dropped, in nanoseconds.
    pub ktime_ns: u64,
    /// Address of the `sk_buff`: joins events of one packet, never shown.
    pub skb: u64,
    /// Address in the kernel from which the packet was freed; 0 where the hook is not a free.
    pub location: u64,
    /// Inode number of the network namespace; 0 when the kernel does not say.
    pub netns: u32,
    /// Kernel's drop reason (`enum skb_drop_reason`); 0 where the kernel has none. With [`Site::Counter`] which counter it is.
    pub reason: u32,
    /// Membership tests made in the kernel: see [`bits`].
    pub bits: u32,
    /// Index of the device that the packet is on (`skb->dev`), else of the one it came by (`skb->skb_iif`); 0 if neither.
    pub ifindex: u32,
    /// Index of the device that the packet came by (`skb->skb_iif`); 0 for a packet made on this host.
    pub iif: u32,
    /// Bytes of the packet from the network header on.
    pub len: u32,
    /// Process that was running, as a hint only: it seldom owns the packet.
    pub pid: u32,
    /// Which hook or branch saw it: a [`Site`].
    pub site: u16,
    /// EtherType in host order.
    pub protocol: u16,
    /// CPU that dropped it.
    pub cpu: u16,
    /// Segments that the packet stands for (`skb_shared_info.gso_segs`), at least 1.
    pub segments: u16,
    /// Valid bytes of the packet area.
    pub packet_len: u16,
    /// Number of fields that follow.
    pub fields: u16,
    /// Events of this count key, on this CPU, counted but not sent since the previous one that was.
    pub skipped: u32,
    /// `skb->pkt_type`: 0 host, 1 broadcast, 2 multicast, 3 other host, 4 outgoing.
    pub pkt_type: u16,
    /// Whether those not sent travelled as brief records, as far as there was room: 1 or 0. Then this one stands for itself alone.
    pub briefly: u16,
}

impl EventHeader {
    /// What the event was counted as.
    pub const fn key(&self) -> CountKey {
        CountKey {
            location: CountKey::place(Site::from_number(self.site), self.location),
            netns: self.netns,
            reason: self.reason,
            bits: self.bits,
            site: self.site,
            pad: 0,
        }
    }
}

/// One value that a hook read in the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Field {
    /// A [`FieldId`], or 0 for a place that is not used.
    pub id: u32,
    /// Zero.
    pub pad: u32,
    /// The value; an address takes two fields (see [`FieldId`]).
    pub value: u64,
}

macro_rules! numbered {
    ($(#[$meta:meta])* $name:ident : $repr:ty { $($(#[$doc:meta])* $variant:ident = $number:literal => $text:literal,)* }) => {
        $(#[$meta])*
        #[repr($repr)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$doc])* $variant = $number,)* }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The value with this number.
            pub const fn from_number(number: $repr) -> Option<Self> {
                match number { $($number => Some(Self::$variant),)* _ => None }
            }

            /// The name in files and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

numbered! {
    /// Which hook, or which branch of the hooked function, saw the drop.
    ///
    /// The sites after [`Site::Free`] either emit by themselves or leave a hint
    /// that the free of the same packet consumes: one drop, one event.
    Site: u16 {
        /// Tracepoint `skb:kfree_skb` without a hint.
        Free = 0 => "kfree_skb",
        /// `tcp_conn_request`: ListenOverflows and ListenDrops grew by one during the call.
        AcceptQueueSyn = 1 => "tcp_conn_request:accept-queue",
        /// `tcp_conn_request`: ListenDrops and TCPReqQFullDrop grew.
        SynQueueFull = 2 => "tcp_conn_request:syn-queue",
        /// `tcp_conn_request`: ListenDrops grew and `tcp_peer_is_proven` had answered false.
        SynBacklogLastQuarter = 3 => "tcp_conn_request:last-quarter",
        /// `tcp_conn_request`: ListenDrops grew for none of these reasons; `refused` says which.
        SynRefused = 4 => "tcp_conn_request:refused",
        /// `tcp_v4_conn_request`/`tcp_v6_conn_request`: not to a unicast address.
        SynNotUnicast = 5 => "tcp_conn_request:not-unicast",
        /// `tcp_v4/v6_syn_recv_sock` gave no socket and ListenOverflows grew; the request was in the SYN queue.
        AcceptQueueAck = 6 => "syn_recv_sock:accept-queue",
        /// The same for a request rebuilt from a syncookie.
        AcceptQueueCookie = 7 => "syn_recv_sock:accept-queue-cookie",
        /// `tcp_v4/v6_syn_recv_sock` gave no socket for another reason.
        ChildRefused = 8 => "syn_recv_sock:refused",
        /// `tcp_validate_incoming` refused the segment and PAWSEstab is the counter (kernels whose free is not traced).
        PawsEstablished = 9 => "tcp_validate_incoming:paws",
        /// `tcp_timewait_state_process`: PAWS rejected the segment.
        PawsTimewait = 10 => "tcp_timewait_state_process:paws",
        /// `tcp_timewait_state_process`: a SYN that is not newer than the old connection.
        TimewaitOldSequence = 11 => "tcp_timewait_state_process:old-sequence",
        /// `tcp_timewait_state_process`: a segment of the old connection, handled as it should be.
        TimewaitSegment = 12 => "tcp_timewait_state_process:segment",
        /// `tcp_check_req`: PAWS rejected the segment.
        PawsRequest = 13 => "tcp_check_req:paws",
        /// `tcp_check_req`: a SYN sent again for a pending request; the SYN-ACK is sent again.
        RequestRetransmit = 14 => "tcp_check_req:retransmit",
        /// `tcp_check_req`: any other segment that it consumed.
        RequestOther = 15 => "tcp_check_req:other",
        /// `ip_handle_martian_source`.
        MartianSource = 16 => "ip_handle_martian_source",
        /// `nf_ct_resolve_clash` answered NF_DROP.
        ConntrackClash = 17 => "nf_ct_resolve_clash",
        /// `nf_ct_resolve_clash` resolved the clash: nothing was lost.
        ConntrackClashResolved = 18 => "nf_ct_resolve_clash:resolved",
        /// `early_drop` found nothing to evict.
        ConntrackTableFull = 19 => "early_drop",
        /// `ip_vs_leave`: a service without usable destination.
        IpvsNoDestination = 20 => "ip_vs_leave",
        /// `ip_vs_conn_expire_now`, then the SYN that met the entry was dropped.
        IpvsExpired = 21 => "ip_vs_conn_expire_now",
        /// IPVS entry function: a SYN met a left-over entry and was dropped.
        IpvsReuseDropped = 22 => "ip_vs_in:reuse-dropped",
        /// IPVS entry function: a SYN met a left-over entry and was sent to its dead server.
        IpvsReuseMisdelivered = 23 => "ip_vs_in:reuse-misdelivered",
        /// IPVS entry function: a packet of an entry whose server was removed was dropped.
        IpvsDestinationGone = 24 => "ip_vs_in:destination-gone",
        /// `arp_error_report`/`ndisc_error_report`: the neighbour did not answer.
        NeighbourFailed = 25 => "neigh_error_report",
        /// `tcp_v4_send_reset`/`tcp_v6_send_reset` without a socket (kernels without drop reasons).
        ResetWithoutSocket = 26 => "tcp_send_reset",
        /// `__icmp_send`/`icmp6_send` port unreachable (kernels without drop reasons).
        PortUnreachable = 27 => "icmp_send:port-unreachable",
        /// `tcp_req_err`: an ICMP error ended a pending request; reconciles ListenDrops, no packet is lost.
        RequestKilledByIcmp = 28 => "tcp_req_err",
        /// `nf_send_reset`/`nf_send_unreach` and their IPv6 twins: a rule rejected the packet.
        NetfilterReject = 29 => "nf_reject",
        /// Made in user space: a kernel counter that alone proves a cause moved, and no hook saw why. No packet comes with it.
        Counter = 30 => "counter",
        /// `__icmp_send`/`icmp6_send` time exceeded in transit (kernels without drop reasons).
        TtlExceeded = 31 => "icmp_send:time-exceeded",
        /// `__icmp_send` fragmentation needed, `icmp6_send` packet too big (kernels without drop reasons).
        PacketTooBig = 32 => "icmp_send:packet-too-big",
        /// `tcp_validate_incoming` refused the segment by its sequence number (kernels whose free is not traced).
        TcpOutOfWindow = 40 => "tcp_validate_incoming:out-of-window",
        /// `tcp_validate_incoming` answered a RST or SYN by a challenge ACK (kernels whose free is not traced).
        TcpChallengeAck = 41 => "tcp_validate_incoming:challenge-ack",
        /// `nf_ct_l4proto_log_invalid`, `nf_l4proto_log_invalid`: conntrack called the packet INVALID.
        ConntrackInvalid = 42 => "nf_ct_l4proto_log_invalid",
        /// The same, where NAT translates the connection.
        ConntrackInvalidNat = 43 => "nf_ct_l4proto_log_invalid:nat",
        /// The same, and it was answered by RST since no socket was there for it (kernels without drop reasons).
        ConntrackInvalidReset = 44 => "nf_ct_l4proto_log_invalid:reset",
        /// `nf_ct_helper_log`: a conntrack helper drops the packet.
        ConntrackHelper = 45 => "nf_ct_helper_log",
        /// A free of a packet on its way through a bridge that passes it to the hooks of IP (`br_netfilter`).
        BridgeNetfilter = 46 => "br_netfilter",
        /// `__udp_enqueue_schedule_skb` answered ENOMEM: the receive buffer is full (kernels without drop reasons).
        ReceiveBufferFull = 47 => "udp_enqueue:receive-buffer",
        /// `__udp_enqueue_schedule_skb` answered ENOBUFS: UDP has no memory left (kernels without drop reasons).
        UdpMemory = 48 => "udp_enqueue:memory",
        /// `tcp_add_backlog` refused and TCPBacklogDrop grew (kernels without drop reasons).
        SocketBacklogFull = 49 => "tcp_add_backlog",
        /// `cookie_v4_check`/`cookie_v6_check`: SyncookiesFailed grew by one during the call.
        SyncookieInvalid = 50 => "cookie_check",
        /// A free of an IPv4 packet to a group that the device it is on has not joined, and does not route on (kernels whose reasons
        /// do not tell refused sources).
        GroupNotJoined = 51 => "kfree_skb:group-not-joined",
        /// The same, but the device has joined the group, or the packet has a route.
        GroupJoined = 52 => "kfree_skb:group-joined",
        /// `tcp_try_rmem_schedule` refused a segment whose socket has room: there is no memory (kernels without drop reasons, whose
        /// free is not traced).
        TcpMemory = 53 => "tcp_try_rmem_schedule",
        /// `tcp_send_dupack`: a segment that starts before what its connection expects is refused and answered (kernels whose free
        /// has a reason, but not the socket).
        SegmentBefore = 54 => "tcp_send_dupack:before",
        /// The same, of one that does not start before it.
        SegmentBeyond = 55 => "tcp_send_dupack:beyond",
    }
}

impl Site {
    /// Whether a hint with this site says something only together with the place of the free, which its count key then has.
    pub const fn needs_place(self) -> bool {
        matches!(
            self,
            Self::PortUnreachable
                | Self::ConntrackInvalid
                | Self::ConntrackInvalidNat
                | Self::ConntrackInvalidReset
                | Self::BridgeNetfilter
                | Self::GroupNotJoined
                | Self::GroupJoined
                | Self::SegmentBefore
                | Self::SegmentBeyond
        )
    }
}

numbered! {
    /// What a field holds. `…Hi`/`…Lo` are the two halves of an IPv6 or
    /// IPv4-mapped address, in network order read as big-endian numbers.
    FieldId: u32 {
        /// Listener: `sock.sk_ack_backlog`, connections waiting for accept().
        AcceptQueueLength = 1 => "accept_queue_length",
        /// Listener: `sock.sk_max_ack_backlog`, set by listen() to min(backlog, somaxconn).
        AcceptQueueLimit = 2 => "accept_queue_limit",
        /// Listener: `request_sock_queue.qlen`, requests in the SYN queue at entry.
        SynQueueLength = 3 => "syn_queue_length",
        /// netns: `netns_ipv4.sysctl_tcp_syncookies`.
        TcpSyncookies = 4 => "tcp_syncookies",
        /// netns: `netns_ipv4.sysctl_tcp_abort_on_overflow`.
        TcpAbortOnOverflow = 5 => "tcp_abort_on_overflow",
        /// netns: `netns_ipv4.sysctl_max_syn_backlog`.
        TcpMaxSynBacklog = 6 => "tcp_max_syn_backlog",
        /// netns: `netns_core.sysctl_somaxconn`.
        Somaxconn = 7 => "somaxconn",
        /// Listener: local port (`sock_common.skc_num`), host order.
        ListenerPort = 8 => "listener_port",
        /// Listener: bound address, first half; all zero = any address.
        ListenerAddressHi = 9 => "listener_address_hi",
        /// Listener: bound address, second half.
        ListenerAddressLo = 10 => "listener_address_lo",
        /// Listener: inode of its socket, from `socket_alloc.vfs_inode`.
        ListenerInode = 11 => "listener_inode",
        /// Which refusal of [`Site::SynRefused`]: 1 no route, 2 memory, 3 security module, 0 not told.
        Refused = 12 => "refused",
        /// PAWS: timestamp stored for the connection (`ts_recent`).
        TimestampStored = 13 => "timestamp_stored",
        /// PAWS: timestamp in the segment.
        TimestampReceived = 14 => "timestamp_received",
        /// PAWS: age of the stored timestamp, in seconds.
        TimestampAge = 15 => "timestamp_age_s",
        /// Sequence number that the socket expects: `tw_rcv_nxt` in TIME_WAIT, else `tcp_sock.rcv_nxt`.
        ExpectedSequence = 16 => "expected_sequence",
        /// TIME_WAIT: `tw_substate`, 5 FIN_WAIT2 or 6 TIME_WAIT.
        TimewaitSubstate = 17 => "timewait_substate",
        /// Martian: index of the device it came by.
        MartianIfindex = 18 => "martian_ifindex",
        /// `IPV4_DEVCONF_RP_FILTER` of `all`.
        RpFilterAll = 19 => "rp_filter_all",
        /// `IPV4_DEVCONF_RP_FILTER` of the device.
        RpFilterDevice = 20 => "rp_filter_device",
        /// `IPV4_DEVCONF_ACCEPT_LOCAL` of `all`.
        AcceptLocalAll = 21 => "accept_local_all",
        /// `IPV4_DEVCONF_ACCEPT_LOCAL` of the device.
        AcceptLocalDevice = 22 => "accept_local_device",
        /// Listener: jiffies since it last noted that it sends syncookies, as a 32-bit difference; absent where it never did. The
        /// kernel notes it once a second at most, in `sock_reuseport.synq_overflow_ts` for those that share a port, else in
        /// `tcp_sock.rx_opt.ts_recent_stamp`.
        SyncookieAge = 23 => "syncookie_age_jiffies",
        /// Loser's original tuple: source, destination (four halves), ports (source << 16 | destination).
        LoserOrigSrcHi = 30 => "loser_orig_src_hi",
        /// See [`FieldId::LoserOrigSrcHi`].
        LoserOrigSrcLo = 31 => "loser_orig_src_lo",
        /// See [`FieldId::LoserOrigSrcHi`].
        LoserOrigDstHi = 32 => "loser_orig_dst_hi",
        /// See [`FieldId::LoserOrigSrcHi`].
        LoserOrigDstLo = 33 => "loser_orig_dst_lo",
        /// See [`FieldId::LoserOrigSrcHi`].
        LoserOrigPorts = 34 => "loser_orig_ports",
        /// Loser's reply tuple, in the same form.
        LoserReplySrcHi = 35 => "loser_reply_src_hi",
        /// See [`FieldId::LoserReplySrcHi`].
        LoserReplySrcLo = 36 => "loser_reply_src_lo",
        /// See [`FieldId::LoserReplySrcHi`].
        LoserReplyDstHi = 37 => "loser_reply_dst_hi",
        /// See [`FieldId::LoserReplySrcHi`].
        LoserReplyDstLo = 38 => "loser_reply_dst_lo",
        /// See [`FieldId::LoserReplySrcHi`].
        LoserReplyPorts = 39 => "loser_reply_ports",
        /// Winner's original tuple, in the same form.
        WinnerOrigSrcHi = 40 => "winner_orig_src_hi",
        /// See [`FieldId::WinnerOrigSrcHi`].
        WinnerOrigSrcLo = 41 => "winner_orig_src_lo",
        /// See [`FieldId::WinnerOrigSrcHi`].
        WinnerOrigDstHi = 42 => "winner_orig_dst_hi",
        /// See [`FieldId::WinnerOrigSrcHi`].
        WinnerOrigDstLo = 43 => "winner_orig_dst_lo",
        /// See [`FieldId::WinnerOrigSrcHi`].
        WinnerOrigPorts = 44 => "winner_orig_ports",
        /// Winner's reply tuple, in the same form.
        WinnerReplySrcHi = 45 => "winner_reply_src_hi",
        /// See [`FieldId::WinnerReplySrcHi`].
        WinnerReplySrcLo = 46 => "winner_reply_src_lo",
        /// See [`FieldId::WinnerReplySrcHi`].
        WinnerReplyDstHi = 47 => "winner_reply_dst_hi",
        /// See [`FieldId::WinnerReplySrcHi`].
        WinnerReplyDstLo = 48 => "winner_reply_dst_lo",
        /// See [`FieldId::WinnerReplySrcHi`].
        WinnerReplyPorts = 49 => "winner_reply_ports",
        /// Winner's `nf_conn.status`: see [`ct_status`].
        WinnerStatus = 50 => "winner_status",
        /// Jiffies until the winner expires (`nf_conn.timeout` - now).
        WinnerTimeout = 51 => "winner_timeout_jiffies",
        /// Winner's TCP state (`nf_conn.proto.tcp.state`), where it is TCP.
        WinnerTcpState = 52 => "winner_tcp_state",
        /// IPVS entry or service: virtual address, first half.
        IpvsVirtualHi = 60 => "ipvs_virtual_hi",
        /// IPVS entry or service: virtual address, second half.
        IpvsVirtualLo = 61 => "ipvs_virtual_lo",
        /// IPVS entry or service: virtual port, host order.
        IpvsVirtualPort = 62 => "ipvs_virtual_port",
        /// IPVS entry: real server's address, first half.
        IpvsServerHi = 63 => "ipvs_server_hi",
        /// IPVS entry: real server's address, second half.
        IpvsServerLo = 64 => "ipvs_server_lo",
        /// IPVS entry: real server's port, host order.
        IpvsServerPort = 65 => "ipvs_server_port",
        /// IPVS entry: `ip_vs_conn.state`.
        IpvsState = 66 => "ipvs_state",
        /// IPVS entry's server: `ip_vs_dest.weight`, -1 when there is none.
        IpvsWeight = 67 => "ipvs_weight",
        /// IPVS entry's server: 1 when it was removed from the service, else 0.
        IpvsRemoved = 68 => "ipvs_removed",
        /// IPVS entry: `ip_vs_conn.flags`.
        IpvsFlags = 69 => "ipvs_flags",
        /// A return address on the kernel stack, innermost first; the field repeats.
        Frame = 71 => "frame",
        /// Local socket: inode, where the packet belongs to one.
        SocketInode = 72 => "socket_inode",
        /// Local socket: `sk_state`.
        SocketState = 73 => "socket_state",
        /// `dst_entry.error` of the packet's route, positive errno.
        RouteError = 74 => "route_error",
        /// Neighbour that did not answer, first half.
        NeighbourHi = 75 => "neighbour_hi",
        /// Neighbour that did not answer, second half.
        NeighbourLo = 76 => "neighbour_lo",
        /// Neighbour's device index.
        NeighbourIfindex = 77 => "neighbour_ifindex",
        /// Where the packet's route leads: see [`route`]. Absent without a route.
        Route = 78 => "route",
        /// MTU that the kernel told the sender of a packet that is too big, in bytes.
        Mtu = 79 => "mtu",
        /// Bytes that the socket has room for from [`FieldId::ExpectedSequence`] on: `tcp_receive_window`.
        ReceiveWindow = 90 => "receive_window",
        /// Conntrack entry of the packet: original source, first half.
        EntryOrigSrcHi = 100 => "entry_orig_src_hi",
        /// See [`FieldId::EntryOrigSrcHi`].
        EntryOrigSrcLo = 101 => "entry_orig_src_lo",
        /// See [`FieldId::EntryOrigSrcHi`].
        EntryOrigDstHi = 102 => "entry_orig_dst_hi",
        /// See [`FieldId::EntryOrigSrcHi`].
        EntryOrigDstLo = 103 => "entry_orig_dst_lo",
        /// Original ports of the entry, as of [`FieldId::LoserOrigPorts`].
        EntryOrigPorts = 104 => "entry_orig_ports",
        /// `nf_conn.status` of the entry: see [`ct_status`]. Of a packet without a hint, too, which netfilter may have dropped.
        EntryStatus = 105 => "entry_status",
        /// TCP state of the entry, where it is TCP.
        EntryTcpState = 106 => "entry_tcp_state",
        /// Eight bytes of the kernel's own words for it, the first one lowest; the field repeats.
        Words = 107 => "words",
        /// Receiving socket: `sk_rmem_alloc`, bytes that received packets take in it.
        SocketQueued = 91 => "socket_queued",
        /// Receiving socket: `sk_rcvbuf`, limit of that in bytes.
        SocketReceiveBuffer = 92 => "socket_receive_buffer",
        /// Receiving socket: `sk_sndbuf`, in bytes.
        SocketSendBuffer = 93 => "socket_send_buffer",
        /// Receiving socket: `sk_backlog.len`, bytes that wait while its owner has it locked.
        SocketBacklog = 94 => "socket_backlog",
        /// Receiving socket: 1 without a filter (`sk_filter`), 2 with one; for packets that a filter may have refused.
        SocketFilter = 95 => "socket_filter",
    }
}

/// Bits of [`EventHeader::bits`] and of a count key.
pub mod bits {
    /// The source address is local to the netns (its table `local`).
    pub const SOURCE_LOCAL: u32 = 1 << 0;
    /// The source address sits on a dummy device.
    pub const SOURCE_DUMMY: u32 = 1 << 1;
    /// The destination address is local to the netns.
    pub const DESTINATION_LOCAL: u32 = 1 << 2;
    /// The destination address sits on a dummy device.
    pub const DESTINATION_DUMMY: u32 = 1 << 3;
    /// Some IPVS service has the destination address.
    pub const DESTINATION_IPVS: u32 = 1 << 4;
    /// An IPVS service has the destination address, port and protocol.
    pub const SERVICE_IPVS: u32 = 1 << 5;
    /// IPReversePathFilter grew between the martian handler and the free.
    pub const RP_FILTER: u32 = 1 << 6;
    /// The winner of a conntrack clash is ASSURED.
    pub const WINNER_ASSURED: u32 = 1 << 7;
    /// TCP segment with SYN and without ACK.
    pub const SYN: u32 = 1 << 8;
    /// TCP segment with RST.
    pub const RST: u32 = 1 << 9;
    /// TCP segment with SYN and ACK.
    pub const SYN_ACK: u32 = 1 << 10;
    /// The packet was already reported (misdelivered by IPVS): its free is no second drop.
    pub const DIED_AS: u32 = 1 << 11;
    /// For another host (`PACKET_OTHERHOST`).
    pub const OTHER_HOST: u32 = 1 << 12;
    /// Neither IPv4 nor IPv6 by `skb->protocol`.
    pub const NOT_IP: u32 = 1 << 13;
    /// `skb->protocol` is 0: no packet that came from or went to a network.
    pub const NO_PROTOCOL: u32 = 1 << 14;
    /// The route of the packet says unreachable (`dst_entry.error` EHOSTUNREACH or ENETUNREACH).
    pub const NO_ROUTE: u32 = 1 << 15;
    /// Its conntrack entry is dying.
    pub const CONNTRACK_DYING: u32 = 1 << 16;
    /// IPVS handled the packet (`skb->ipvs_property`).
    pub const IPVS_PROPERTY: u32 = 1 << 17;
    /// The address is IPv4 multicast or broadcast, or IPv6 multicast.
    pub const MULTICAST: u32 = 1 << 18;
    /// An ICMP or ICMPv6 packet.
    pub const ICMP: u32 = 1 << 19;
    /// The source address is 0.0.0.0/8, multicast, broadcast or loopback.
    pub const SOURCE_NOT_UNICAST: u32 = 1 << 20;
    /// A TCP segment.
    pub const TCP: u32 = 1 << 21;
    /// A UDP datagram.
    pub const UDP: u32 = 1 << 22;
    /// `tcp_abort_on_overflow` was on: the peer got a RST.
    pub const ABORTED: u32 = 1 << 23;
    /// The destination is 127.0.0.0/8 or ::1.
    pub const DESTINATION_LOOPBACK: u32 = 1 << 24;
    /// The destination is 0.0.0.0/8, 240.0.0.0/4 (not broadcast).
    pub const DESTINATION_INVALID: u32 = 1 << 25;
    /// An ICMP or ICMPv6 echo reply.
    pub const ECHO_REPLY: u32 = 1 << 26;
    /// An ARP packet.
    pub const ARP: u32 = 1 << 27;
    /// A hint or mark of a netfilter verdict waited for such a packet, but is too old to be surely of this one.
    pub const STALE_HINT: u32 = 1 << 28;
    /// The packet's route is of a type that refuses (`dst_entry.error`): EINVAL blackhole, EACCES prohibit,
    /// EHOSTUNREACH unreachable. IPv4 gives the last one, too, where forwarding is off: see [`NOT_FORWARDING`].
    pub const ROUTE_REFUSES: u32 = 1 << 29;
    /// The error is EHOSTUNREACH, and the device that the packet is on does not forward IPv4. Kernels without drop
    /// reasons alone: on others the reason tells.
    pub const NOT_FORWARDING: u32 = 1 << 30;
}

/// Values of [`FieldId::Route`].
pub mod route {
    /// To this host.
    pub const HERE: u64 = 1;
    /// To another host.
    pub const ELSEWHERE: u64 = 2;
    /// Nowhere (`dst_entry.error`).
    pub const NOWHERE: u64 = 3;
}

/// Bits of `nf_conn.status` (`include/uapi/linux/netfilter/nf_conntrack_common.h`,
/// `enum ip_conntrack_status`, unchanged 5.10 - 7.3).
pub mod ct_status {
    /// A reply was seen.
    pub const SEEN_REPLY: u64 = 1 << 1;
    /// Never evicted early.
    pub const ASSURED: u64 = 1 << 2;
    /// In the table.
    pub const CONFIRMED: u64 = 1 << 3;
    /// NAT translates source or destination.
    pub const NAT: u64 = 1 << 4 | 1 << 5;
    /// Being removed.
    pub const DYING: u64 = 1 << 9;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_round_trip() {
        for site in Site::ALL {
            assert_eq!(Site::from_number(*site as u16), Some(*site));
        }
        for id in FieldId::ALL {
            assert_eq!(FieldId::from_number(*id as u32), Some(*id));
        }
    }

    #[test]
    fn wire_structs_have_no_padding() {
        assert_eq!(size_of::<EventHeader>(), 3 * 8 + 7 * 4 + 6 * 2 + 2 * 4);
        assert_eq!(size_of::<EventHeader>() % 8, 0);
        assert_eq!(size_of::<Field>(), 16);
    }
}
