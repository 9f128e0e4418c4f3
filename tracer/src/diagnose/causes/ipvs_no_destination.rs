//! `ipvs-no-destination`: a virtual service without a usable real server.

use droptrace_common::Site;

use super::{
    ipvs::Entry,
    values::{counter_of, endpoint, in_netns},
};
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
        name: "IcmpOutDestUnreachs or Icmp6OutDestUnreachs",
    }),
    benign: false,
    needs: &[Need::IpvsServices],
    matches: |signature| signature.site == Site::IpvsNoDestination,
    verdict: |_: &Signature<'_>| Verdict::Rejected,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding {
        counter: counter_of(event.parse().dst, "IcmpOutDestUnreachs", "Icmp6OutDestUnreachs"),
        ..Finding::default()
    };
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
                let server = endpoint(Some(server.address), Some(server.port))?;
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

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, bits};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V6_1};
    use crate::diagnose::{IpvsDestination, IpvsService, Verdict};

    fn at(kernel: Kernel, weights: &[i32]) -> Sample {
        let destinations = weights
            .iter()
            .enumerate()
            .map(|(index, weight)| IpvsDestination {
                address: std::net::Ipv4Addr::new(10, 244, 1, index as u8 + 1).into(),
                port: 8080,
                weight: *weight,
            })
            .collect();
        Sample::freed(kernel, Site::IpvsNoDestination, "nf_hook_slow")
            .reason_since(V6_1, "NETFILTER_DROP")
            .tcp("10.0.0.9:40000", "10.96.0.10:80", SYN)
            .on("eth0")
            .bits(bits::SERVICE_IPVS)
            .fact(|facts| {
                facts.ipvs_services = Some(vec![IpvsService {
                    address: "10.96.0.10".parse().expect("an address"),
                    port: 80,
                    protocol: 6,
                    scheduler: "rr".to_owned(),
                    destinations,
                }]);
            })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL.map(|kernel| at(kernel, &[0, 0])).into()
    }

    #[test]
    fn remedy_depends_on_the_servers() {
        for kernel in Kernel::ALL {
            let none = at(kernel, &[]).label();
            assert_eq!(none.verdict, Verdict::Rejected);
            assert_eq!(none.evidence["real_servers"], 0);
            assert_eq!(none.counter.as_deref(), Some("IcmpOutDestUnreachs"));
            let six = at(kernel, &[])
                .tcp("[fd00::9]:40000", "[fd00::10]:80", SYN)
                .label();
            assert_eq!(six.counter.as_deref(), Some("Icmp6OutDestUnreachs"));
            assert!(none.remedy[0].action.contains("no ready endpoint"));
            let zero = at(kernel, &[0, 0]).label();
            assert_eq!(zero.evidence["weight_zero"], 2);
            assert_eq!(
                zero.remedy[0].command.as_deref(),
                Some("ipvsadm -e -t 10.96.0.10:80 -r 10.244.1.1:8080 -w 1")
            );
            let overloaded = at(kernel, &[1]).label();
            assert_eq!(
                overloaded.remedy[0].command.as_deref(),
                Some("ipvsadm -Ln -t 10.96.0.10:80 --thresholds")
            );
        }
    }
}
