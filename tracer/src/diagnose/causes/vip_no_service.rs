//! `vip-no-service`: a virtual address that IPVS serves on other ports only.

use droptrace_common::bits;

use super::{
    ipvs::protocol_name,
    no_socket,
    values::{Segment, endpoint, in_netns},
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent};

/// Nobody serves this port of a virtual address.
pub(super) static CAUSE: Cause = Cause {
    slug: "vip-no-service",
    family: Family::Ipvs,
    title: "virtual address has no IPVS service on this port",
    mechanism: "The destination sits on a dummy device (such as kube-ipvs0) and IPVS has services on it, but none for this \
        port and protocol. IPVS lets the packet pass, the address is local, so it goes on to a socket lookup that \
        finds nothing (tcp_v4_rcv, __udp4_lib_rcv and their IPv6 twins): TCP is answered by RST, UDP by ICMP port unreachable. A reply or a \
        segment of a running connection arrives here when the connection was made from the virtual address: since the address is \
        local on this host too, the answer never leaves it (see local-source).",
    evidence: &[
        ("destination", "virtual address and port"),
        ("holder", "device that holds the address"),
        ("holder_kind", "kind of that device"),
        ("services", "services that IPVS has on the address: port/protocol"),
        (
            "segment",
            "syn, reply (SYN-ACK) or mid-stream; null when it is not TCP",
        ),
        ("meaning", "what that says"),
    ],
    remedy: "Use a port that the service has, add one to it, or, for a reply, take the address off the host that must not \
        hold it.",
    counter: Some(Counter {
        name: "TcpOutRsts (TCP), UdpNoPorts or Udp6NoPorts (UDP)",
    }),
    benign: false,
    needs: &[Need::DestinationHolder, Need::IpvsServices],
    matches: |signature| {
        no_socket::found_none(signature)
            && signature.has(bits::DESTINATION_DUMMY | bits::DESTINATION_IPVS)
            && !signature.has(bits::SERVICE_IPVS)
    },
    verdict: no_socket::verdict,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding {
        counter: no_socket::counter(event),
        ..Finding::default()
    };
    let packet = event.parse();
    let destination = endpoint(packet.dst, packet.dport);
    let holder = facts.destination_holder.as_ref().and_then(Option::as_ref);
    let segment = Segment::of(event);
    let services: Option<Vec<String>> = facts.ipvs_services.as_ref().map(|services| {
        services
            .iter()
            .map(|service| format!("{}/{}", service.port, protocol_name(service.protocol)))
            .collect()
    });
    let meaning = match segment {
        Some(Segment::Reply) => {
            "an answer to a connection made from the virtual address: the address is local here, so the answer stayed on this host instead of going back to where the connection came from"
        }
        Some(Segment::MidStream) => {
            "a segment of a connection that this host does not know: made from the virtual address elsewhere, or to a service that was removed"
        }
        Some(Segment::Syn) => "a client tries a port that the service does not have; it is refused",
        None => "a client tries a port that the service does not have",
    };
    found
        .put("destination", destination.clone())
        .put("holder", holder.map(|holder| holder.device.clone()))
        .put("holder_kind", holder.and_then(|holder| holder.kind.clone()))
        .put("services", services.clone())
        .put("segment", segment.map(Segment::name))
        .put("meaning", meaning);
    let (Some(ip), Some(destination)) = (packet.dst, destination) else {
        return found;
    };
    let on = holder.map_or("its dummy device", |holder| holder.device.as_str());
    if segment == Some(Segment::Reply) {
        found.advise(
            format!("Take {ip} off {on} here, or have the connection made from an address that is not on this host."),
            Some(in_netns(facts, None, &format!("ip address show to {ip}"))),
            "The command only shows who holds it. accept_local=1 leads here: it lets the request in, while the reply stays.",
        );
        return found;
    }
    found.advise(
        match services.as_deref() {
            Some([_, ..]) => format!(
                "Use a port that the service has: {}.",
                services.unwrap_or_default().join(", ")
            ),
            _ => format!("See which services IPVS has on {ip}."),
        },
        Some(in_netns(facts, None, &format!("ipvsadm -Ln | grep -F {ip}"))),
        "Reads only.",
    );
    let option = match packet.protocol {
        Some(6) => "-t",
        Some(17) => "-u",
        _ => return found,
    };
    found.advise(
        format!("Or add {destination} to the service. In Kubernetes: add the port to the Service object."),
        Some(in_netns(
            facts,
            None,
            &format!("ipvsadm -A {option} {destination} -s rr"),
        )),
        "The new service needs real servers (ipvsadm -a); until then it answers port unreachable. kube-proxy removes services that it does not know.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, bits};

    use crate::diagnose::causes::sample::{ACK, Kernel, RST, SYN, SYN_ACK, Sample, V5_10};
    use crate::diagnose::{AddressHolder, IpvsService, Verdict};

    const VIP: u32 = bits::DESTINATION_LOCAL | bits::DESTINATION_DUMMY | bits::DESTINATION_IPVS;

    fn at(kernel: Kernel, flags: u8) -> Sample {
        let sample = if kernel == V5_10 {
            Sample::freed(kernel, Site::ResetWithoutSocket, "tcp_v4_rcv")
        } else {
            Sample::freed(kernel, Site::Free, "tcp_v4_rcv").reason("NO_SOCKET")
        };
        with_facts(sample.tcp("10.0.0.9:443", "10.96.0.10:8443", flags))
    }

    fn with_facts(sample: Sample) -> Sample {
        sample.on("eth0").bits(VIP).fact(|facts| {
            facts.destination_holder = Some(Some(AddressHolder {
                device: "kube-ipvs0".to_owned(),
                kind: Some("dummy".to_owned()),
            }));
            facts.ipvs_services = Some(vec![IpvsService {
                address: "10.96.0.10".parse().expect("an address"),
                port: 80,
                protocol: 6,
                scheduler: "rr".to_owned(),
                destinations: Vec::new(),
            }]);
        })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| [SYN, SYN_ACK, ACK, RST | ACK].map(|flags| at(kernel, flags)))
            .collect()
    }

    #[test]
    fn a_syn_is_shown_the_ports_that_exist() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, SYN).label();
            assert_eq!(drop.verdict, Verdict::Rejected);
            assert_eq!(drop.evidence["segment"], "syn");
            assert_eq!(drop.evidence["holder"], "kube-ipvs0");
            assert_eq!(drop.evidence["services"], serde_json::json!(["80/tcp"]));
            assert!(drop.remedy[0].action.contains("80/tcp"));
            assert_eq!(
                drop.remedy[1].command.as_deref(),
                Some("ipvsadm -A -t 10.96.0.10:8443 -s rr")
            );
        }
    }

    #[test]
    fn a_reply_says_that_the_address_must_not_be_here() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, SYN_ACK).label();
            assert_eq!(drop.evidence["segment"], "reply");
            assert!(drop.remedy[0].action.contains("Take 10.96.0.10 off kube-ipvs0"));
            let reset = at(kernel, RST | ACK).label();
            assert_eq!(reset.cause, "vip-no-service");
            assert_eq!(reset.verdict, Verdict::Dropped);
            assert_eq!(reset.counter, None);
        }
    }

    #[test]
    fn udp_is_known_by_its_error_on_old_kernels() {
        let old = Sample::freed(V5_10, Site::PortUnreachable, "__udp4_lib_rcv");
        let drop = with_facts(old.udp("10.0.0.9:40000", "10.96.0.10:53")).label();
        assert_eq!(drop.cause, "vip-no-service");
        assert_eq!(drop.counter.as_deref(), Some("UdpNoPorts"));
        assert!(drop.evidence["segment"].is_null());
    }
}
