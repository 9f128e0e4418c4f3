//! Packets to a group of hosts: whether the device that they are on has joined the group.

use droptrace_common::Site;

use crate::{
    emit::EventBuffer,
    kernel::{has, layout, member, offset, read_bytes},
    source_check,
};

/// Groups of a device that are looked at; with more of them nothing is told.
const GROUPS_MAX: u32 = 32;

/// What is known of an IPv4 packet to a group when it is freed without a hint. The site says something only where the
/// route of a received packet is looked up (`ip_rcv_finish_core`, net/ipv4/ip_input.c, 5.10 - 7.3): that fails for a group that
/// the device has not joined, and for sources that are refused, which kernels tell since they have a reason for it (7.x).
#[inline(always)]
pub(crate) fn look(buffer: &mut EventBuffer, device: u64, refdst: u64) {
    if has(layout!(reason_invalid_source)) {
        return;
    }
    let to = [16, 17, 18, 19].map(|at| buffer.packet[at]);
    if buffer.header.protocol != 0x0800 || !(224..=239).contains(&to[0]) {
        return;
    }
    let site = if refdst != 0 {
        // The route was found: whatever it died of, somebody wants the group.
        Site::GroupJoined
    } else {
        match joined(device, u32::from_ne_bytes(to)) {
            Some(true) => Site::GroupJoined,
            Some(false) => Site::GroupNotJoined,
            None => return,
        }
    };
    buffer.hint.site = site as u16;
}

/// Whether the route lookup takes a packet to this group for one that the device has joined, or routes on: what
/// `ip_check_mc_rcu` (net/ipv4/igmp.c) and `ip_route_input_rcu` (net/ipv4/route.c, 5.10 - 7.3) ask. `None` where that is not
/// known: behind a VRF, whose device and the one below may both have joined, or with a filter of sources.
#[inline(always)]
fn joined(device: u64, group: u32) -> Option<bool> {
    let in_device: u64 = member(device, layout!(dev_ip_ptr));
    let needed = [
        layout!(in_device_mc_list),
        layout!(mc_list_multiaddr),
        layout!(mc_list_next),
        layout!(mc_list_sfcount),
        layout!(dev_priv_flags),
        layout!(iff_l3mdev_master),
        layout!(iff_l3mdev_slave),
    ];
    if device == 0 || in_device == 0 || needed.iter().any(|entry| !has(*entry)) {
        return None;
    }
    let mut at = in_device + offset(layout!(in_device_mc_list));
    for _ in 0..GROUPS_MAX {
        let mut next = [0; 8];
        if !read_bytes(at, &mut next) {
            return None;
        }
        let entry = u64::from_ne_bytes(next);
        if entry == 0 {
            return unwanted(device, group);
        }
        if member::<u32>(entry, layout!(mc_list_multiaddr)) == group {
            // `sfcount[MCAST_EXCLUDE]`: who wants any source.
            return (member::<u32>(entry, layout!(mc_list_sfcount)) != 0).then_some(true);
        }
        at = entry + offset(layout!(mc_list_next));
    }
    None
}

/// That a device which has not joined the group does not want its packets for another reason either.
#[inline(always)]
fn unwanted(device: u64, group: u32) -> Option<bool> {
    let flags: u32 = member(device, layout!(dev_priv_flags));
    if flags & (layout!(iff_l3mdev_master) | layout!(iff_l3mdev_slave)) != 0 {
        return None;
    }
    // Those of groups of the link, 224.0.0.0/24, are never routed on, others only where the device does so
    // (`IN_DEV_MFORWARD`, include/linux/inetdevice.h).
    let of_link = u32::from_be(group) >> 8 == 0x00e0_0000;
    if of_link || source_check::device_setting(device, layout!(devconf_mc_forwarding)) == Some(0) {
        Some(false)
    } else {
        None
    }
}
