//! `ipvs-no-destination`: a virtual service without a usable real server.

use droptrace_common::Site;

use super::{ipvs::Entry, values::in_netns};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The scheduler found no server.
pub(super) static CAUSE: Cause = Cause {
    slug: "ipvs-no-destination",
    family: Family::Ipvs,
    title: "IPVS service has no usable real server",
    mechanism: "A new connection to a virtual service needs a real server. When the service has none, all have weight 0, or \
        all are overloaded (upper threshold), ip_vs_leave (net/netfilter/ipvs/ip_vs_core.c, 5.10 - 7.3) answers with \
        ICMP port unreachable, for TCP too, and drops the packet. A TCP client sees `connection refused`; a client on this \
        host may meanwhile hold its socket locked and then tries again after 1 s.",
    evidence: &[
        ("virtual_service", "address and port of the service"),
        ("scheduler", "scheduler of the service"),
        (
            "real_servers",
            "servers in the service, when asked just afterwards",
        ),
        ("weight_zero", "of these, with weight 0"),
    ],
    remedy: "Add a real server, or raise the weight or threshold of one. In Kubernetes the service has no ready endpoint.",
    counter: Some(Counter {
        name: "IcmpOutDestUnreachs",
    }),
    benign: false,
    needs: &[Need::IpvsServices],
    matches: |signature| signature.site == Site::IpvsNoDestination,
    verdict: |_: &Signature<'_>| Verdict::Rejected,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let entry = Entry::of(event);
    let known = entry.known(facts);
    let servers = known.map(|service| service.destinations.len());
    let weight_zero = known.map(|service| {
        service
            .destinations
            .iter()
            .filter(|server| server.weight == 0)
            .count()
    });
    found
        .put("virtual_service", entry.service_text())
        .put("scheduler", known.map(|service| service.scheduler.clone()))
        .put("real_servers", servers)
        .put("weight_zero", weight_zero);
    let Some(option) = entry.service_option() else {
        return found;
    };
    let service = entry.service_text().unwrap_or_default();
    let first = known.and_then(|service| service.destinations.first());
    match (servers, weight_zero) {
        (Some(0), _) => found.advise(
            format!("Add a real server to {service}. In Kubernetes: find out why the service has no ready endpoint."),
            Some(in_netns(facts, None, &format!("ipvsadm -a {option} -r SERVER:PORT -m"))),
            "New connections go there at once. kube-proxy takes servers that it does not know out again.",
        ),
        (Some(all), Some(zero)) if all == zero => found.advise(
            format!("All {all} servers of {service} have weight 0: give one a weight."),
            first.and_then(|server| {
                let server = super::values::endpoint(Some(server.address), Some(server.port))?;
                Some(in_netns(facts, None, &format!("ipvsadm -e {option} -r {server} -w 1")))
            }),
            "It takes new connections at once. Weight 0 is how a server is drained: see who set it.",
        ),
        _ => found.advise(
            format!("See the servers of {service}, their weights and thresholds."),
            Some(in_netns(facts, None, &format!("ipvsadm -Ln {option} --thresholds"))),
            "Reads only.",
        ),
    };
    found
}
