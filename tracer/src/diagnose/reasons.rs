//! The drop reasons of the kernels that droptrace is tested on, and what the catalogue makes of each.
//!
//! The lists are what `droptrace-tests reasons` prints in a guest: names from the running kernel's BTF, without the prefix
//! `SKB_DROP_REASON_`, modules left out. The scenario `drop-reasons-known` holds them to the running kernel. They serve the
//! documentation only: a run takes names from the kernel that it runs on.

use droptrace_common::{Site, bits};

use super::{
    Cause, Location, Signature, catalogue,
    catalogue::ANYWHERE,
    causes::{KERNEL_REASON, UNKNOWN},
};

/// Series of kernels, oldest first, each with its reasons, a line each. 5.10 has none.
pub const KERNELS: [(&str, &str); 3] = [
    ("6.1", include_str!("reasons/6.1.txt")),
    ("6.12", include_str!("reasons/6.12.txt")),
    ("7.x", include_str!("reasons/7.x.txt")),
];

/// The causes that a drop with this reason may be, by its place and packet, in the order in which they are asked. Empty: it
/// keeps the kernel's own word.
pub fn causes_of(reason: &str) -> Vec<&'static Cause> {
    let is = |cause: &&Cause| {
        kinds_of_packets().any(|bits| {
            [None, Some(ANYWHERE)].into_iter().any(|location| {
                let matches = |reason| {
                    (cause.matches)(&Signature {
                        site: Site::Free,
                        reason: Some(reason),
                        location: Location::Known(location),
                        bits,
                    })
                };
                // A rule that takes any reason does not rest on this one.
                matches(reason) && !matches("of no kernel")
            })
        })
    };
    catalogue()
        .iter()
        .copied()
        .filter(|cause| **cause != KERNEL_REASON && **cause != UNKNOWN)
        .filter(is)
        .collect()
}

/// The causes of which some drops are told by the place of the free alone, on a kernel with these reasons.
pub fn told_by_place(reasons: &[&str]) -> Vec<&'static Cause> {
    let without = reasons.is_empty().then_some(None);
    let reasons = || reasons.iter().copied().map(Some).chain(without);
    let sites = || {
        let needs_place = Site::ALL.iter().copied().filter(|site| site.needs_place());
        needs_place.chain([Site::Free])
    };
    let is = |cause: &&Cause| {
        sites().any(|site| {
            reasons().any(|reason| {
                kinds_of_packets().any(|bits| {
                    let matches = |location| {
                        (cause.matches)(&Signature {
                            site,
                            reason,
                            location: Location::Known(location),
                            bits,
                        })
                    };
                    matches(Some(ANYWHERE)) && !matches(None)
                })
            })
        })
    };
    catalogue().iter().copied().filter(is).collect()
}

/// Bits that a packet may have, one by one with those of each kind of packet.
fn kinds_of_packets() -> impl Iterator<Item = u32> {
    /// A virtual address that IPVS holds on a dummy device.
    const VIRTUAL: u32 = bits::DESTINATION_LOCAL | bits::DESTINATION_DUMMY | bits::DESTINATION_IPVS;
    const KINDS: [u32; 8] = [
        0,
        bits::TCP,
        bits::UDP,
        bits::ICMP,
        bits::NOT_IP,
        bits::NO_PROTOCOL,
        bits::TCP | bits::RST,
        bits::TCP | VIRTUAL,
    ];
    (0..=u32::BITS).flat_map(|bit| {
        let one = 1_u32.checked_shl(bit).unwrap_or(0);
        KINDS.iter().map(move |kind| kind | one)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slugs(reason: &str) -> Vec<&'static str> {
        causes_of(reason).iter().map(|cause| cause.slug).collect()
    }

    #[test]
    fn lists_are_sorted_and_hold_what_is_known_of_them() {
        for (series, list) in KERNELS {
            let names: Vec<&str> = list.lines().collect();
            assert!(names.is_sorted() && names.contains(&"NOT_SPECIFIED"), "{series}");
        }
        let [old, middle, new] = KERNELS.map(|(_, list)| list.lines().count());
        assert!(old < middle && middle < new);
    }

    #[test]
    fn a_reason_is_what_its_drops_may_be() {
        assert_eq!(slugs("TCP_RESET"), ["tcp-challenge-ack", "tcp-reset-received"]);
        assert_eq!(slugs("TCP_OFO_QUEUE_PRUNE"), ["tcp-ofo-pruned"]);
        assert_eq!(slugs("TCP_OLD_SEQUENCE"), ["tcp-out-of-window", "duplicate-data"]);
        assert!(slugs("NO_SOCKET").contains(&"vip-no-service"));
        assert!(slugs("NO_SUCH_REASON").is_empty());
    }

    #[test]
    fn what_only_the_place_tells_is_known() {
        let slugs: Vec<&str> = told_by_place(&["NO_SOCKET", "TCP_RESET"])
            .iter()
            .map(|cause| cause.slug)
            .collect();
        // Datagrams by their reason, segments by the place.
        assert!(slugs.contains(&"no-socket"));
        // A RST by its reason and the place, an accept queue by its hook.
        assert!(slugs.contains(&"tcp-reset-received"));
        assert!(!slugs.contains(&"accept-queue-full"));
    }
}
