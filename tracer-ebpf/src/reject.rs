//! Packets that are answered by a RST or an ICMP error, and freed soon.

use droptrace_common::Site;

use crate::{
    args::Entry,
    hint,
    kernel::{has, ipvs_layout, layout},
};

/// ICMP destination unreachable, port unreachable (include/uapi/linux/icmp.h, icmpv6.h).
const ICMP_PORT_UNREACHABLE: (u64, u64) = (3, 3);
const ICMPV6_PORT_UNREACHABLE: (u64, u64) = (1, 4);

/// `tcp_v4_send_reset(sk, skb, …)`, net/ipv4/tcp_ipv4.c, and its IPv6 twin: without a socket nobody was there for
/// the segment. Hooked only where the kernel has no drop reasons.
#[inline(always)]
pub(crate) fn send_reset_entry(ctx: &impl Entry) {
    if ctx.argument(layout!(arg_send_reset_sk)) == 0 {
        let skb = ctx.argument(layout!(arg_send_reset_skb));
        hint::leave(skb, Site::ResetWithoutSocket, 0, 0, 0, |_| {});
    }
}

/// `__icmp_send(skb_in, type, code, …)`, net/ipv4/icmp.c. Hooked only where the kernel has no drop reasons.
#[inline(always)]
pub(crate) fn icmp_send_entry(ctx: &impl Entry) {
    let kind = (
        ctx.argument(layout!(arg_icmp_send_type)) & 0xff,
        ctx.argument(layout!(arg_icmp_send_code)) & 0xff,
    );
    if kind == ICMP_PORT_UNREACHABLE {
        port_unreachable(ctx.argument(layout!(arg_icmp_send_skb)));
    }
}

/// `icmp6_send(skb, type, code, …)`, net/ipv6/icmp.c. Hooked only where the kernel has no drop reasons.
#[inline(always)]
pub(crate) fn icmp6_send_entry(ctx: &impl Entry) {
    let kind = (
        ctx.argument(layout!(arg_icmp6_send_type)) & 0xff,
        ctx.argument(layout!(arg_icmp6_send_code)) & 0xff,
    );
    if kind == ICMPV6_PORT_UNREACHABLE {
        port_unreachable(ctx.argument(layout!(arg_icmp6_send_skb)));
    }
}

#[inline(always)]
fn port_unreachable(skb: u64) {
    // IPVS and netfilter answer the same way and know more: their hint stays.
    if !hint::waits(skb) {
        hint::leave(skb, Site::PortUnreachable, 0, 0, 0, |_| {});
    }
}

/// `nf_send_reset(net, [sk,] oldskb, hook)`, net/ipv4/netfilter/nf_reject_ipv4.c, and its IPv6 twin.
#[inline(always)]
pub(crate) fn nf_send_reset_entry(ctx: &impl Entry, v6: bool) {
    let Some(layout) = crate::kernel::ipvs() else {
        return;
    };
    let index = if v6 {
        ipvs_layout!(layout, arg_nf_send_reset6_skb)
    } else {
        ipvs_layout!(layout, arg_nf_send_reset_skb)
    };
    if has(index) {
        rejected(ctx.argument(index));
    }
}

/// `nf_send_unreach(skb_in, code, hook)`.
#[inline(always)]
pub(crate) fn nf_send_unreach_entry(ctx: &impl Entry) {
    rejected(ctx.argument(0));
}

/// `nf_send_unreach6(net, skb_in, code, hooknum)`.
#[inline(always)]
pub(crate) fn nf_send_unreach6_entry(ctx: &impl Entry) {
    rejected(ctx.argument(1));
}

#[inline(always)]
fn rejected(skb: u64) {
    hint::leave(skb, Site::NetfilterReject, 0, 0, 0, |_| {});
}
