//! Packets that their socket has no room or memory for. Hooked only where the kernel has no drop reasons: there the free does not
//! tell them from others.

use droptrace_common::{FieldId, Site};

use crate::{
    args::{Entry, Exit},
    emit::{self, Fields},
    hint,
    kernel::{self, layout, member, net_of_sock},
    packet,
    scratch::{self, Function},
};

/// include/uapi/asm-generic/errno-base.h, errno.h
const ENOMEM: i32 = 12;
const ENOBUFS: i32 = 105;

const BACKLOG_DROPS: usize = 0;

/// `__udp_enqueue_schedule_skb(sk, skb)`, net/ipv4/udp.c: a datagram for a socket, IPv4 and IPv6.
#[inline(always)]
pub(crate) fn udp_enqueue_entry(ctx: &impl Entry) {
    let Some(call) = scratch::slot(Function::UdpEnqueue) else {
        return;
    };
    call.sk = ctx.argument(layout!(arg_udp_enqueue_sk));
    call.skb = ctx.argument(layout!(arg_udp_enqueue_skb));
}

/// Its end: ENOMEM where the receive buffer is full, ENOBUFS where all of UDP may have no more memory.
#[inline(always)]
pub(crate) fn udp_enqueue_exit(ctx: &impl Exit) {
    let Some(call) = scratch::take(Function::UdpEnqueue) else {
        return;
    };
    let (skb, sk) = (call.skb, call.sk);
    call.skb = 0;
    let returned = ctx.returned(layout!(parameters_udp_enqueue)) as i32;
    let site = if returned == -ENOMEM {
        Site::ReceiveBufferFull
    } else if returned == -ENOBUFS {
        Site::UdpMemory
    } else {
        return;
    };
    full(skb, sk, site);
}

/// `tcp_add_backlog(sk, skb)`, net/ipv4/tcp_ipv4.c: a segment whose socket is locked by its owner, IPv4 and IPv6.
#[inline(always)]
pub(crate) fn add_backlog_entry(ctx: &impl Entry) {
    let Some(call) = scratch::slot(Function::AddBacklog) else {
        return;
    };
    let sk = ctx.argument(layout!(arg_add_backlog_sk));
    call.begin(ctx, sk, ctx.argument(layout!(arg_add_backlog_skb)));
    call.values[BACKLOG_DROPS] = call.counter(layout!(mib_backlog_drop));
}

/// Its end: true says that the segment is to be freed, also for a bad checksum; TCPBacklogDrop tells.
#[inline(always)]
pub(crate) fn add_backlog_exit(ctx: &impl Exit) {
    let Some(call) = scratch::take(Function::AddBacklog) else {
        return;
    };
    let (skb, sk) = (call.skb, call.sk);
    call.skb = 0;
    if ctx.returned(layout!(parameters_add_backlog)) as u8 != 0
        && call.counter(layout!(mib_backlog_drop)) != call.values[BACKLOG_DROPS]
    {
        full(skb, sk, Site::SocketBacklogFull);
    }
}

/// `tcp_try_rmem_schedule(sk, skb, size)`, net/ipv4/tcp_input.c: room for a segment that is to be queued, IPv4 and IPv6.
#[inline(always)]
pub(crate) fn try_rmem_entry(ctx: &impl Entry) {
    let Some(call) = scratch::slot(Function::TryRmemSchedule) else {
        return;
    };
    call.sk = ctx.argument(layout!(arg_try_rmem_sk));
    call.skb = ctx.argument(layout!(arg_try_rmem_skb));
}

/// Its end: -1 says that the segment is to be freed, which no tracepoint tells. It gives up a socket whose receive buffer is
/// full as long as it is (`tcp_prune_queue`), and any other only since `sk_rmem_schedule` got no memory.
#[inline(always)]
pub(crate) fn try_rmem_exit(ctx: &impl Exit) {
    let Some(call) = scratch::take(Function::TryRmemSchedule) else {
        return;
    };
    let (skb, sk) = (call.skb, call.sk);
    call.skb = 0;
    let queued: u32 = member(sk, layout!(sock_rmem_alloc));
    let limit: u32 = member(sk, layout!(sock_rcvbuf));
    // `tcp_send_rcvq` asks for what a program puts into the queue itself: no packet.
    if ctx.returned(layout!(parameters_try_rmem)) as i32 == 0
        || queued as i32 > limit as i32
        || packet::ethertype(skb) == 0
    {
        return;
    }
    let netns = kernel::inode_of_net(net_of_sock(sk));
    emit::direct(skb, Site::TcpMemory as u16, netns, 0, |fields| {
        fields.push(
            FieldId::ExpectedSequence,
            u64::from(member::<u32>(sk, layout!(tcp_rcv_nxt))),
        );
        about(fields, sk);
    });
}

#[inline(always)]
fn full(skb: u64, sk: u64, site: Site) {
    let netns = kernel::inode_of_net(net_of_sock(sk));
    hint::leave(skb, site, netns, 0, 0, |fields| about(fields, sk));
}

/// What the socket holds, and may hold.
#[inline(always)]
fn about(fields: &mut Fields<'_>, sk: u64) {
    for (id, entry) in [
        (FieldId::SocketQueued, layout!(sock_rmem_alloc)),
        (FieldId::SocketReceiveBuffer, layout!(sock_rcvbuf)),
        (FieldId::SocketSendBuffer, layout!(sock_sndbuf)),
        (FieldId::SocketBacklog, layout!(sock_backlog_len)),
    ] {
        fields.push(id, u64::from(member::<u32>(sk, entry)));
    }
    fields.push_some(FieldId::SocketInode, crate::skb_drop::socket_inode(sk));
}
