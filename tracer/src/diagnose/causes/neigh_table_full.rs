//! `neigh-table-full`: no room for another neighbour.

use droptrace_common::bits;

use super::{
    unknown,
    values::{in_netns, on},
};
use crate::diagnose::{
    Cause, CountedBy, Counter, Facts, Family, Finding, Need, NeighbourTable, RawEvent, Signature, Verdict,
};

/// The neighbour table has as many entries as it may.
pub(super) static CAUSE: Cause = Cause {
    slug: "neigh-table-full",
    family: Family::Routing,
    title: "neighbour table full",
    mechanism: "Each next hop that packets are sent to needs an entry in the table of neighbours, which all network namespaces of the host share: one for ARP, one for \
        neighbour discovery. With gc_thresh3 entries the kernel collects those that are unused, and if that frees none, refuses the new one (neigh_alloc, \
        net/core/neighbour.c), counts table_fulls, and logs `neighbor table overflow`. ip_finish_output2 or ip6_finish_output2 then frees the packet, \
        with the reason NEIGH_CREATEFAIL from 6.1 on. An entry can be refused for other reasons, such as a device that is just going: the cause is named only \
        if the table was refused entries and is at least half full, else the kernel's reason stays.",
    evidence: &[
        (
            "entries",
            "entries of the table shortly after, of all network namespaces",
        ),
        ("limit", "gc_thresh3"),
        (
            "refused",
            "how often an entry was refused since boot for being too many (table_fulls)",
        ),
        ("interface", "device that the packet should leave by"),
        ("destination", "where the packet goes to"),
    ],
    remedy: "Raise gc_thresh3 above the number of hosts that this one talks to at once on its own networks; or find who scans a large network.",
    counter: Some(Counter {
        name: "arp_cache or ndisc_cache table_fulls (/proc/net/stat)",
    }),
    benign: false,
    needs: &[Need::NeighbourTable],
    matches: |signature| {
        signature.because(&["NEIGH_CREATEFAIL"])
            || signature.reason.is_none() && signature.at(&["ip_finish_output2", "ip6_finish_output2"])
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(|event, facts| {
        // Multicast that may not leave this host is freed at that place, too.
        let stays = event.has(bits::MULTICAST) && event.packet.get(7) == Some(&0);
        let full = |table: &NeighbourTable| {
            table.refused.is_some_and(|times| times > 0) && table.entries >= table.limit / 2
        };
        let proven = facts.neighbour_table.as_ref().is_some_and(full) && !(facts.reason.is_none() && stays);
        (!proven).then(|| unknown::left_open(facts))
    }),
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let packet = event.parse();
    let table = facts.neighbour_table.as_ref();
    found
        .put("entries", table.map(|table| table.entries))
        .put("limit", table.map(|table| table.limit))
        .put("refused", table.and_then(|table| table.refused))
        .put("interface", on(event, facts))
        .put("destination", packet.dst.map(|ip| ip.to_string()));
    let (family, version, counter) = if packet.is_ipv6() {
        ("ipv6", "-6", "ndisc_cache table_fulls (/proc/net/stat)")
    } else {
        ("ipv4", "-4", "arp_cache table_fulls (/proc/net/stat)")
    };
    found.counter = CountedBy::Named(counter);
    if let Some(table) = table {
        found.advise(
            "Let the table have more entries; on the host itself, since no other network namespace has the setting.",
            Some(format!(
                "sysctl -w net.{family}.neigh.default.gc_thresh3={}",
                (4 * table.limit).max(4096)
            )),
            "Costs about 400 bytes of kernel memory for each entry in use. gc_thresh1 and gc_thresh2, from which unused entries are collected, should grow with it.",
        );
    }
    found.advise(
        "See which neighbours fill it: many that are FAILED or INCOMPLETE come from a scan, or from a route without gateway that covers a large network.",
        Some(in_netns(facts, None, &format!("ip {version} -s neigh show"))),
        "Reads only. Shows one network namespace; the table is shared by all.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, bits};

    use crate::diagnose::NeighbourTable;
    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10, V6_1};

    fn at(kernel: Kernel, version: u8, entries: u32, refused: u64) -> Sample {
        let place = if version == 4 {
            "ip_finish_output2"
        } else {
            "ip6_finish_output2"
        };
        let sample = Sample::freed(kernel, Site::Free, place).reason_since(V6_1, "NEIGH_CREATEFAIL");
        if version == 4 {
            sample.udp("10.0.0.1:4000", "10.0.0.7:53")
        } else {
            sample.udp("[fd00::1]:4000", "[fd00::7]:53")
        }
        .leaving("eth0")
        .fact(|facts| {
            facts.neighbour_table = Some(NeighbourTable {
                entries,
                limit: 1024,
                refused: Some(refused),
            });
        })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| [at(kernel, 4, 1024, 3), at(kernel, 6, 1020, 1)])
            .collect()
    }

    #[test]
    fn the_limit_is_raised_on_the_host() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, 6, 1024, 3)
                .fact(|facts| facts.netns_name = Some("web".to_owned()))
                .label();
            assert_eq!(drop.evidence["entries"], 1024);
            assert_eq!(
                drop.remedy[0].command.as_deref(),
                Some("sysctl -w net.ipv6.neigh.default.gc_thresh3=4096")
            );
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("ip netns exec web ip -6 -s neigh show")
            );
        }
    }

    #[test]
    fn an_entry_that_was_refused_for_another_reason_is_not_this() {
        for (entries, refused) in [(20, 0), (1024, 0), (20, 5)] {
            assert_eq!(at(V5_10, 4, entries, refused).label().cause, "unknown");
            assert_eq!(at(V6_1, 4, entries, refused).label().cause, "kernel-reason");
        }
        // The samples' hop limit is 64: multicast that may leave.
        let multicast = at(V5_10, 6, 1024, 3).bits(bits::MULTICAST);
        assert_eq!(multicast.label().cause, "neigh-table-full");
    }
}
