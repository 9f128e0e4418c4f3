//! Source validation: `ip_handle_martian_source(dev, in_dev, skb, daddr, saddr)`, net/ipv4/route.c, which
//! runs for every packet that `fib_validate_source` refuses and for invalid sources, and for nothing else.

use droptrace_common::{FieldId, Site};

use crate::{
    args::Entry,
    hint,
    kernel::{self, has, layout, member, net_of_device, offset, read, tcp_ext},
};

/// A martian source: the packet is freed soon.
#[inline(always)]
pub(crate) fn martian_entry(ctx: &impl Entry) {
    let device = ctx.argument(layout!(arg_martian_dev));
    let skb = ctx.argument(layout!(arg_martian_skb));
    let net = net_of_device(device);
    let before = tcp_ext!(net, mib_rp_filter);
    hint::leave(
        skb,
        Site::MartianSource,
        kernel::inode_of_net(net),
        0,
        before,
        |fields| {
            fields.push(
                FieldId::MartianIfindex,
                u64::from(member::<u32>(device, layout!(dev_ifindex))),
            );
            let all: u64 = member(net, layout!(net_devconf_all));
            let rp_filter = layout!(devconf_rp_filter);
            let accept_local = layout!(devconf_accept_local);
            if all != 0 {
                let data = all + offset(layout!(devconf_data));
                fields.push_some(FieldId::RpFilterAll, setting(data, rp_filter));
                fields.push_some(FieldId::AcceptLocalAll, setting(data, accept_local));
            }
            fields.push_some(FieldId::RpFilterDevice, device_setting(device, rp_filter));
            fields.push_some(FieldId::AcceptLocalDevice, device_setting(device, accept_local));
        },
    );
}

/// One of a device's own IPv4 settings; `None` where IPv4 is off.
#[inline(always)]
pub(crate) fn device_setting(device: u64, number: u32) -> Option<u64> {
    let in_device: u64 = member(device, layout!(dev_ip_ptr));
    if device == 0 || in_device == 0 || !has(layout!(in_device_cnf_data)) {
        return None;
    }
    setting(in_device + offset(layout!(in_device_cnf_data)), number)
}

/// One value of `struct ipv4_devconf` (include/linux/inetdevice.h): an array of int, counted from 1.
#[inline(always)]
fn setting(data: u64, number: u32) -> Option<u64> {
    has(number).then(|| u64::from(read::<u32>(data + u64::from(number - 1) * 4)))
}
