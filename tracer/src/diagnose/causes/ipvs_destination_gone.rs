//! `ipvs-destination-gone`: a packet of a connection whose real server was removed.

use droptrace_common::{Site, bits};

use super::{
    ipvs::Entry,
    values::{endpoint, in_netns, sysctl_number},
};
use crate::diagnose::{Cause, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The entry's server is no longer in the service.
pub(super) static CAUSE: Cause = Cause {
    slug: "ipvs-destination-gone",
    family: Family::Ipvs,
    title: "real server of the IPVS connection was removed",
    mechanism: "When a real server is removed from its service, its entries stay until they expire. A packet that meets one \
        is dropped silently while net.ipv4.vs.expire_nodest_conn is 0 (ip_vs_in, net/netfilter/ipvs/ip_vs_core.c): the \
        client hangs until its own timeout. With 1 the entry expires at once; only a packet that carries a confirmed \
        conntrack entry is dropped then, and the next one finds no entry. No counter of the kernel shows it.",
    evidence: &[
        ("virtual_service", "address and port of the service"),
        ("client", "address and port of the client"),
        (
            "state",
            "state of the entry, as ipvsadm -Lnc shows it; null for UDP",
        ),
        ("real_server", "server that was removed"),
        (
            "expire_nodest_conn",
            "net.ipv4.vs.expire_nodest_conn of that netns",
        ),
    ],
    remedy: "Drain before removing: set the weight to 0 and wait for the connections to end. Or set \
        net.ipv4.vs.expire_nodest_conn=1, so that they end at once.",
    counter: None,
    benign: false,
    needs: &[Need::Sysctl("net.ipv4.vs.expire_nodest_conn")],
    matches: |signature| {
        signature.site == Site::IpvsDestinationGone
            || signature.site == Site::IpvsExpired && !signature.has(bits::SYN)
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let entry = Entry::of(event);
    let packet = event.parse();
    let expire = sysctl_number(facts, "net.ipv4.vs.expire_nodest_conn");
    found
        .put("virtual_service", entry.service_text())
        .put("client", endpoint(packet.src, packet.sport))
        .put("state", entry.state)
        .put("real_server", entry.server_text())
        .put("expire_nodest_conn", expire);
    if expire != Some(1) {
        found.advise(
            "Have connections of removed servers end at once instead of hanging.",
            Some(in_netns(facts, None, "sysctl -w net.ipv4.vs.expire_nodest_conn=1")),
            "Takes effect at once; kube-proxy sets it. The client's next packet is answered by a RST, or scheduled to another server if it opens a connection.",
        );
    }
    if let Some((service, server)) = entry.service_option().zip(entry.server_text()) {
        found.advise(
            format!("Before removing a server such as {server}, set its weight to 0 and wait until its connections ended."),
            Some(in_netns(
                facts,
                None,
                &format!("ipvsadm -e {service} -r {server} -w 0"),
            )),
            "While it is still in the service. It takes no new connections; the old ones go on.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, bits};

    use crate::diagnose::Verdict;
    use crate::diagnose::causes::sample::{ACK, Kernel, Sample, V6_1};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .map(|kernel| {
                Sample::freed(kernel, Site::IpvsDestinationGone, "nf_hook_slow")
                    .reason_since(V6_1, "NETFILTER_DROP")
                    .tcp("[fd00::9]:40000", "[fd00:96::10]:80", ACK)
                    .on("eth0")
                    .bits(bits::SERVICE_IPVS)
                    .address(FieldId::IpvsServerHi, FieldId::IpvsServerLo, "fd00:244::7")
                    .field(FieldId::IpvsServerPort, 8080)
                    .field(FieldId::IpvsState, 1)
                    .sysctl("net.ipv4.vs.expire_nodest_conn", "0")
            })
            .into()
    }

    #[test]
    fn server_and_drain_are_named() {
        for sample in samples() {
            let drop = sample.label();
            assert_eq!(drop.verdict, Verdict::Dropped);
            assert_eq!(drop.evidence["state"], "ESTABLISHED");
            assert_eq!(drop.evidence["real_server"], "[fd00:244::7]:8080");
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("ipvsadm -e -t [fd00:96::10]:80 -r [fd00:244::7]:8080 -w 0")
            );
        }
    }
}
