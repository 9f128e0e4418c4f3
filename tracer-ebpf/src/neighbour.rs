//! Neighbours that do not answer: `arp_error_report(neigh, skb)`, net/ipv4/arp.c, and
//! `ndisc_error_report(neigh, skb)`, net/ipv6/ndisc.c.

use droptrace_common::{FieldId, Site};

use crate::{
    args::Entry,
    hint,
    kernel::{self, layout, member, net_of_device, offset},
    packet,
};

/// The neighbour failed: the packet that waited for it is freed soon.
#[inline(always)]
pub(crate) fn error_report_entry(ctx: &impl Entry, v6: bool) {
    let neighbour = ctx.argument(layout!(arg_arp_error_neigh));
    let skb = ctx.argument(layout!(arg_arp_error_skb));
    let device: u64 = member(neighbour, layout!(neigh_dev));
    let netns = kernel::inode_of_net(net_of_device(device));
    hint::leave(skb, Site::NeighbourFailed, netns, 0, 0, |fields| {
        let address = packet::address_at(neighbour + offset(layout!(neigh_primary_key)), v6);
        fields.push_address(FieldId::NeighbourHi, FieldId::NeighbourLo, &address);
        fields.push(
            FieldId::NeighbourIfindex,
            u64::from(member::<u32>(device, layout!(dev_ifindex))),
        );
    });
}
