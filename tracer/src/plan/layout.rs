//! The layout tables, filled from what the kernel says of its types.

use droptrace_common::{IpvsLayout, Layout};

use super::Types;

/// An entry that has no value, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Name of the layout entry.
    pub entry: &'static str,
    /// Why, in words.
    pub reason: String,
}

/// Fills the table that the programs get when they are loaded.
pub fn of_kernel(vmlinux: &Types) -> (Layout, Vec<Missing>) {
    let mut layout = Layout::ABSENT;
    let mut missing = Vec::new();
    for (index, entry) in Layout::ENTRIES.iter().enumerate() {
        match vmlinux.resolve(entry) {
            Ok(value) => layout.set(index, value),
            Err(reason) => missing.push(Missing {
                entry: entry.name,
                reason,
            }),
        }
    }
    (layout, missing)
}

/// Fills the table of what modules bring. An entry may come from any of these types: a module's, or vmlinux's where
/// the module is built in.
pub fn of_modules(types: &[&Types]) -> (IpvsLayout, Vec<Missing>) {
    let mut layout = IpvsLayout::ABSENT;
    let mut missing = Vec::new();
    for (index, entry) in IpvsLayout::ENTRIES.iter().enumerate() {
        let mut reason = "the modules that have it are not loaded".to_owned();
        let value = types.iter().find_map(|types| match types.resolve(entry) {
            Ok(value) => Some(value),
            Err(why) => {
                reason = why;
                None
            }
        });
        match value {
            Some(value) => layout.set(index, value),
            None => missing.push(Missing {
                entry: entry.name,
                reason,
            }),
        }
    }
    (layout, missing)
}

/// The same for Linux 5.10, which has no BTF for modules: the one table of offsets that is not read from the
/// kernel. The programs use what is read through it only if the addresses, ports and protocol that it gives equal
/// the packet's.
///
/// `struct ip_vs_conn`, `ip_vs_dest`, `ip_vs_service`: `include/net/ip_vs.h`, v5.10, with `CONFIG_IP_VS_IPV6`, without
/// lock debugging. Parameters: `net/netfilter/ipvs/ip_vs_core.c` (`ip_vs_leave`, and `ip_vs_in` for its body
/// `ip_vs_in.part.0`), `ip_vs_conn.c` (`ip_vs_conn_expire_now`, `ip_vs_conn_in_get_proto`), v5.10;
/// `nf_send_reset(net, sk, oldskb, hook)` and `nf_send_reset6`, `net/ipv4/netfilter/nf_reject_ipv4.c` and its IPv6 twin,
/// as 5.10 has them since a stable update gave them `sk` (before, the hint of a rejected packet finds no packet);
/// `nf_ct_l4proto_log_invalid(skb, ct, fmt, …)`, `nf_l4proto_log_invalid(skb, net, pf, protonum, fmt, …)`,
/// `net/netfilter/nf_conntrack_proto.c`, `nf_ct_helper_log(skb, ct, fmt, …)`, `net/netfilter/nf_conntrack_helper.c`, v5.10.
pub const LAYOUT_5_10: IpvsLayout = {
    const fn at(offset: u32, size: u32) -> u32 {
        offset | size << 16
    }
    const POINTER: u32 = 8;
    const ADDRESS: u32 = 16;
    IpvsLayout {
        ipvs_conn_cport: at(16, 2),
        ipvs_conn_dport: at(18, 2),
        ipvs_conn_vport: at(20, 2),
        ipvs_conn_af: at(22, 2),
        ipvs_conn_caddr: at(24, ADDRESS),
        ipvs_conn_vaddr: at(40, ADDRESS),
        ipvs_conn_daddr: at(56, ADDRESS),
        ipvs_conn_flags: at(72, 4),
        ipvs_conn_protocol: at(76, 2),
        ipvs_conn_state: at(148, 2),
        ipvs_conn_dest: at(184, POINTER),
        ipvs_dest_flags: at(52, 4),
        ipvs_dest_weight: at(60, 4),
        arg_leave_skb: 1,
        arg_expire_now_cp: 0,
        arg_in_skb: 2,
        arg_nf_send_reset_skb: 2,
        arg_nf_send_reset6_skb: 2,
        arg_entry_invalid_fmt: 2,
        arg_invalid_fmt: 4,
        arg_helper_log_fmt: 2,
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_for_5_10_is_whole() {
        for index in 0..IpvsLayout::ENTRIES.len() {
            assert_ne!(LAYOUT_5_10.get(index), Some(droptrace_common::ABSENT));
        }
    }
}
