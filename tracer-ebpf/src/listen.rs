//! What a listener refuses: `tcp_conn_request`, `tcp_v4/v6_syn_recv_sock` and `cookie_v4/v6_check` (net/ipv4, net/ipv6).
//!
//! They run with softirqs off, so that between entry and exit only this call
//! moves this CPU's counters: the counter's step tells which branch ran.

use aya_ebpf::helpers::bpf_jiffies64;
use droptrace_common::{Address, FieldId, Site, bits};

use crate::{
    args::{Entry, Exit},
    emit::{self, Fields},
    hint,
    kernel::{self, layout, member, net_of_sock, number},
    packet,
    scratch::{self, Function, Scratch},
    skb_drop,
};

/// AF_INET6.
const AF_INET6: u16 = 10;
/// Flags of a route to a broadcast or multicast address (include/uapi/linux/in_route.h).
const RTCF_BROADCAST_OR_MULTICAST: u32 = 0x1000_0000 | 0x2000_0000;
/// Flag of a route to an address of this host (include/uapi/linux/ipv6_route.h).
const RTF_LOCAL: u32 = 0x8000_0000;

// values[] of `Function::ConnRequest`
const OVERFLOWS: usize = 0;
const DROPS: usize = 1;
const QUEUE_FULL: usize = 2;
const NO_ROUTES: usize = 3;
const NOT_PROVEN: usize = 6;
const NO_ROUTES_V6: usize = 7;

// values[] of `Function::SynRecvSock`, beside those of the same name
const PENDING: usize = 2;

// values[] of `Function::CookieCheck`
const COOKIES_FAILED: usize = 0;

fn no_routes(net: u64) -> u64 {
    kernel::counter(net, layout!(net_ip_statistics), layout!(ipstats_out_no_routes))
}

fn no_routes_v6(net: u64) -> u64 {
    kernel::counter(net, layout!(net_ipv6_statistics), layout!(ipstats_out_no_routes))
}

/// `tcp_conn_request(rsk_ops, af_ops, sk, skb)`, net/ipv4/tcp_input.c: a SYN reached a listener.
#[inline(always)]
pub(crate) fn conn_request_entry(ctx: &impl Entry) {
    let Some(call) = scratch::slot(Function::ConnRequest) else {
        return;
    };
    let sk = ctx.argument(layout!(arg_conn_request_sk));
    let net: u64 = ctx.member(sk, layout!(sock_net));
    let tables: [u64; 2] =
        [layout!(net_ip_statistics), layout!(net_ipv6_statistics)].map(|entry| ctx.member(net, entry));
    call.begin(ctx, sk, ctx.argument(layout!(arg_conn_request_skb)));
    for (place, table) in [NO_ROUTES, NO_ROUTES_V6].into_iter().zip(tables) {
        let table = kernel::of_this_cpu(kernel::any(&mut call.values[place], table));
        call.values[place] = kernel::counter_at(table, layout!(ipstats_out_no_routes));
    }
    [call.values[OVERFLOWS], call.values[DROPS]] = refusals(call);
    call.values[QUEUE_FULL] = call.counter(layout!(mib_req_queue_full_drop));
    call.values[NOT_PROVEN] = 0;
}

/// ListenOverflows and ListenDrops, which are neighbours (`enum`, include/uapi/linux/snmp.h, 5.10 - 7.3).
#[inline(always)]
fn refusals(call: &Scratch) -> [u64; 2] {
    let (overflows, drops) = (layout!(mib_listen_overflows), layout!(mib_listen_drops));
    if call.mib != 0 && kernel::has(overflows) && drops == overflows + 1 {
        kernel::read(call.mib + u64::from(overflows) * 8)
    } else {
        [call.counter(overflows), call.counter(drops)]
    }
}

/// `tcp_peer_is_proven`, net/ipv4/tcp_metrics.c: asked by `tcp_conn_request` only when syncookies are off and
/// less than a quarter of tcp_max_syn_backlog is left; false means that the SYN is dropped.
#[inline(always)]
pub(crate) fn peer_is_proven_exit(ctx: &impl Exit) {
    let proven = ctx.returned(layout!(parameters_peer_is_proven)) as u8;
    if proven == 0
        && let Some(call) = scratch::take(Function::ConnRequest)
    {
        call.values[NOT_PROVEN] = 1;
    }
}

/// End of `tcp_conn_request`: it always returns 0, and its caller frees the SYN as consumed.
#[inline(always)]
pub(crate) fn conn_request_exit() {
    let Some(call) = scratch::take(Function::ConnRequest) else {
        return;
    };
    let skb = call.skb;
    call.skb = 0;
    let net = call.net;
    if call.counter(layout!(mib_listen_drops)) == call.values[DROPS] {
        return;
    }
    let mut refused = 0;
    let site = if call.counter(layout!(mib_listen_overflows)) != call.values[OVERFLOWS] {
        Site::AcceptQueueSyn
    } else if call.counter(layout!(mib_req_queue_full_drop)) != call.values[QUEUE_FULL] {
        Site::SynQueueFull
    } else if call.values[NOT_PROVEN] != 0 {
        Site::SynBacklogLastQuarter
    } else {
        if no_routes(net) != call.values[NO_ROUTES] || no_routes_v6(net) != call.values[NO_ROUTES_V6] {
            refused = 1;
        }
        Site::SynRefused
    };
    let sk = call.sk;
    let site = kernel::any(&mut call.values[DROPS], site as u64) as u16;
    let refused = kernel::any(&mut call.values[NO_ROUTES], refused);
    emit::direct(skb, site, kernel::inode_of_net(net), 0, |fields| {
        push_listener(fields, sk, net);
        fields.push(FieldId::Refused, refused);
    });
}

/// `tcp_v4_conn_request(sk, skb)`, net/ipv4/tcp_ipv4.c: never answers a SYN to a broadcast or multicast route.
#[inline(always)]
pub(crate) fn v4_conn_request_entry(ctx: &impl Entry) {
    let skb = ctx.argument(layout!(arg_v4_conn_request_skb));
    let route = ctx.member::<u64>(skb, layout!(skb_refdst)) & packet::POINTER;
    if route != 0 && member::<u32>(route, layout!(rtable_flags)) & RTCF_BROADCAST_OR_MULTICAST != 0 {
        not_unicast(ctx.argument(layout!(arg_v4_conn_request_sk)), skb);
    }
}

/// `tcp_v6_conn_request(sk, skb)`, net/ipv6/tcp_ipv6.c: answers only a SYN to a local unicast address
/// (`ipv6_unicast_destination`, include/net/ip6_route.h).
#[inline(always)]
pub(crate) fn v6_conn_request_entry(ctx: &impl Entry) {
    const ETH_P_IPV6: u16 = 0x86dd;
    let skb = ctx.argument(layout!(arg_v4_conn_request_skb));
    let route = ctx.member::<u64>(skb, layout!(skb_refdst)) & packet::POINTER;
    if packet::ethertype(skb) == ETH_P_IPV6
        && route != 0
        && kernel::has(layout!(rt6_flags))
        && member::<u32>(route, layout!(rt6_flags)) & RTF_LOCAL == 0
    {
        not_unicast(ctx.argument(layout!(arg_v4_conn_request_sk)), skb);
    }
}

#[inline(always)]
fn not_unicast(sk: u64, skb: u64) {
    let net = net_of_sock(sk);
    emit::direct(
        skb,
        Site::SynNotUnicast as u16,
        kernel::inode_of_net(net),
        0,
        |fields| push_name(fields, sk),
    );
}

/// `tcp_v4_syn_recv_sock(sk, skb, req, …)` and its IPv6 twin: a handshake is complete.
#[inline(always)]
pub(crate) fn syn_recv_sock_entry(ctx: &impl Entry, function: Function) {
    let Some(call) = scratch::slot(function) else {
        return;
    };
    let sk = ctx.argument(layout!(arg_syn_recv_sk));
    let request = ctx.argument(layout!(arg_syn_recv_req));
    let references: u32 = ctx.member(request, layout!(sock_refcnt));
    call.begin(ctx, sk, ctx.argument(layout!(arg_syn_recv_skb)));
    [call.values[OVERFLOWS], call.values[DROPS]] = refusals(call);
    // A request that was found in the table is held by it and by the finder; one rebuilt from a cookie by nobody yet
    // (`reqsk_alloc`, include/net/request_sock.h or net/ipv4/tcp_input.c; `tcp_get_cookie_sock`, net/ipv4/syncookies.c).
    call.values[PENDING] = u64::from(references);
}

/// End of `tcp_v4/v6_syn_recv_sock`: a refusal counts ListenDrops, and the last ACK is freed soon.
#[inline(always)]
pub(crate) fn syn_recv_sock_exit(function: Function) {
    let Some(call) = scratch::take(function) else {
        return;
    };
    let skb = call.skb;
    call.skb = 0;
    let net = call.net;
    if call.counter(layout!(mib_listen_drops)) == call.values[DROPS] {
        return;
    }
    // With TCP Fast Open the child is made while the SYN is judged: that exit reports it.
    if scratch::slot(Function::ConnRequest).is_some_and(|outer| outer.skb == skb) {
        return;
    }
    let pending = call.values[PENDING] != 0;
    let site = if call.counter(layout!(mib_listen_overflows)) == call.values[OVERFLOWS] {
        Site::ChildRefused
    } else if pending {
        Site::AcceptQueueAck
    } else {
        Site::AcceptQueueCookie
    };
    let aborts = number(net, layout!(net_abort_on_overflow)).unwrap_or(0) != 0;
    let bits = if pending && aborts { bits::ABORTED } else { 0 };
    let sk = call.sk;
    hint::leave(skb, site, kernel::inode_of_net(net), bits, 0, |fields| {
        push_listener(fields, sk, net);
    });
}

/// `cookie_v4_check(sk, skb)`, net/ipv4/syncookies.c, and its IPv6 twin: an ACK that belongs to no connection or request
/// reached a listener. They never call each other, hence share their scratch.
#[inline(always)]
pub(crate) fn cookie_check_entry(ctx: &impl Entry) {
    let Some(call) = scratch::slot(Function::CookieCheck) else {
        return;
    };
    let sk = ctx.argument(layout!(arg_cookie_check_sk));
    call.begin(ctx, sk, ctx.argument(layout!(arg_cookie_check_skb)));
    call.values[COOKIES_FAILED] = call.counter(layout!(mib_syncookies_failed));
}

/// Its end. What it returns does not tell a cookie that is refused from an ACK whose cookie is not looked at since the
/// listener sent none of late, nor from one with options that are switched off: SyncookiesFailed does. Such an ACK is
/// answered by RST and freed soon (`tcp_v4_do_rcv`, net/ipv4/tcp_ipv4.c; `tcp_v6_do_rcv`, net/ipv6/tcp_ipv6.c).
#[inline(always)]
pub(crate) fn cookie_check_exit() {
    let Some(call) = scratch::take(Function::CookieCheck) else {
        return;
    };
    let (skb, sk, net) = (call.skb, call.sk, call.net);
    call.skb = 0;
    if call.counter(layout!(mib_syncookies_failed)) == call.values[COOKIES_FAILED] {
        return;
    }
    let noted = cookie_noted(sk);
    // SAFETY: no preconditions.
    let age = (unsafe { bpf_jiffies64() } as u32).wrapping_sub(noted);
    let inode = skb_drop::socket_inode(sk);
    let netns = kernel::inode_of_net(net);
    hint::leave(skb, Site::SyncookieInvalid, netns, 0, 0, |fields| {
        // Its address and port are the packet's; this tells it from those that share them.
        fields.push_some(FieldId::ListenerInode, inode);
        if noted != 0 {
            fields.push(FieldId::SyncookieAge, u64::from(age));
        }
    });
}

/// When the listener, or one of those that share its port, last noted that it sends syncookies, in jiffies; 0: never
/// (`tcp_synq_overflow`, include/net/tcp.h, 5.10 - 7.3).
#[inline(always)]
fn cookie_noted(sk: u64) -> u32 {
    let group: u64 = member(sk, layout!(sock_reuseport));
    if group == 0 {
        member(sk, layout!(tcp_ts_recent_stamp))
    } else {
        member(group, layout!(reuseport_overflow))
    }
}

/// `tcp_req_err(sk, seq, abort)`, net/ipv4/tcp_ipv4.c, 5.10 - 7.3: an ICMP error for a pending request. One that is to end it
/// and quotes its sequence number is counted in ListenDrops, yet no packet is lost.
#[inline(always)]
pub(crate) fn request_error_entry(ctx: &impl Entry) {
    let request = ctx.argument(layout!(arg_req_err_sk));
    let aborts = ctx.argument(layout!(arg_req_err_abort)) as u8 != 0;
    let quoted = ctx.argument(layout!(arg_req_err_seq)) as u32;
    if aborts && quoted == member::<u32>(request, layout!(request_snt_isn)) {
        emit::count_only(
            Site::RequestKilledByIcmp,
            kernel::inode_of_net(net_of_sock(request)),
        );
    }
}

/// What there is to know of a listener and its netns.
#[inline(always)]
fn push_listener(fields: &mut Fields<'_>, sk: u64, net: u64) {
    fields.push(
        FieldId::AcceptQueueLength,
        u64::from(member::<u32>(sk, layout!(sock_ack_backlog))),
    );
    fields.push_some(
        FieldId::AcceptQueueLimit,
        number(sk, layout!(sock_max_ack_backlog)),
    );
    fields.push(
        FieldId::SynQueueLength,
        u64::from(member::<u32>(sk, layout!(icsk_queue_length))),
    );
    fields.push_some(FieldId::TcpSyncookies, number(net, layout!(net_syncookies)));
    fields.push_some(
        FieldId::TcpAbortOnOverflow,
        number(net, layout!(net_abort_on_overflow)),
    );
    fields.push_some(
        FieldId::TcpMaxSynBacklog,
        number(net, layout!(net_max_syn_backlog)),
    );
    fields.push_some(FieldId::Somaxconn, number(net, layout!(net_somaxconn)));
    push_name(fields, sk);
}

/// Which listener it is.
#[inline(always)]
fn push_name(fields: &mut Fields<'_>, sk: u64) {
    fields.push(
        FieldId::ListenerPort,
        u64::from(member::<u16>(sk, layout!(sock_num))),
    );
    let address = listening_address(sk);
    fields.push_address(FieldId::ListenerAddressHi, FieldId::ListenerAddressLo, &address);
    fields.push_some(FieldId::ListenerInode, skb_drop::socket_inode(sk));
}

#[inline(always)]
fn listening_address(sk: u64) -> Address {
    if member::<u16>(sk, layout!(sock_family)) == AF_INET6 {
        member(sk, layout!(sock_v6_rcv_saddr))
    } else {
        packet::mapped(member(sk, layout!(sock_rcv_saddr)))
    }
}
