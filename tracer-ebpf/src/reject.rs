//! Packets that are answered by a RST or an ICMP error, and freed soon.

use droptrace_common::{FieldId, Site};

use crate::{
    args::Entry,
    hint,
    kernel::{has, ipvs_layout, layout},
};

/// Types and codes of ICMP (include/uapi/linux/icmp.h).
const ICMP_PORT_UNREACHABLE: (u64, u64) = (3, 3);
const ICMP_FRAGMENTATION_NEEDED: (u64, u64) = (3, 4);
const ICMP_TIME_EXCEEDED: (u64, u64) = (11, 0);
/// The same of ICMPv6 (include/uapi/linux/icmpv6.h).
const ICMPV6_PORT_UNREACHABLE: (u64, u64) = (1, 4);
const ICMPV6_PACKET_TOO_BIG: (u64, u64) = (2, 0);
const ICMPV6_TIME_EXCEEDED: (u64, u64) = (3, 0);

/// `tcp_v4_send_reset(sk, skb, …)`, net/ipv4/tcp_ipv4.c, and its IPv6 twin: without a socket nobody was there for
/// the segment. Hooked only where the kernel has no drop reasons.
#[inline(always)]
pub(crate) fn send_reset_entry(ctx: &impl Entry) {
    if ctx.argument(layout!(arg_send_reset_sk)) == 0 {
        let skb = ctx.argument(layout!(arg_send_reset_skb));
        // NAT would have sent it elsewhere.
        if hint::turn(skb, Site::ConntrackInvalidNat, Site::ConntrackInvalidReset) {
            return;
        }
        hint::leave(skb, Site::ResetWithoutSocket, 0, 0, 0, |_| {});
    }
}

/// `__icmp_send(skb_in, type, code, info, …)`, net/ipv4/icmp.c. Hooked only where the kernel has no drop reasons.
#[inline(always)]
pub(crate) fn icmp_send_entry(ctx: &impl Entry) {
    let kind = (
        ctx.argument(layout!(arg_icmp_send_type)) & 0xff,
        ctx.argument(layout!(arg_icmp_send_code)) & 0xff,
    );
    let site = match kind {
        ICMP_PORT_UNREACHABLE => Site::PortUnreachable,
        ICMP_FRAGMENTATION_NEEDED => Site::PacketTooBig,
        ICMP_TIME_EXCEEDED => Site::TtlExceeded,
        _ => return,
    };
    let mtu = u32::from_be(ctx.argument(layout!(arg_icmp_send_info)) as u32);
    told(ctx.argument(layout!(arg_icmp_send_skb)), site, mtu);
}

/// `icmp6_send(skb, type, code, info, …)`, net/ipv6/icmp.c. Hooked only where the kernel has no drop reasons.
#[inline(always)]
pub(crate) fn icmp6_send_entry(ctx: &impl Entry) {
    let kind = (
        ctx.argument(layout!(arg_icmp6_send_type)) & 0xff,
        ctx.argument(layout!(arg_icmp6_send_code)) & 0xff,
    );
    let site = match kind {
        ICMPV6_PORT_UNREACHABLE => Site::PortUnreachable,
        ICMPV6_PACKET_TOO_BIG => Site::PacketTooBig,
        ICMPV6_TIME_EXCEEDED => Site::TtlExceeded,
        _ => return,
    };
    let mtu = ctx.argument(layout!(arg_icmp6_send_info)) as u32;
    told(ctx.argument(layout!(arg_icmp6_send_skb)), site, mtu);
}

/// The sender is told why its packet will be freed.
#[inline(always)]
fn told(skb: u64, site: Site, mtu: u32) {
    // IPVS and netfilter answer the same way and know more: their hint stays.
    if hint::waits(skb) {
        return;
    }
    hint::leave(skb, site, 0, 0, 0, |fields| {
        if site as u16 == Site::PacketTooBig as u16 {
            fields.push(FieldId::Mtu, u64::from(mtu));
        }
    });
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
