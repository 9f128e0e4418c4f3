//! `local-source`: a packet from outside that says it comes from an address of this host.

use droptrace_common::{FieldId, Site, bits};

use super::{
    rp_filter,
    values::{device, in_netns, sysctl_number},
};
use crate::diagnose::{Cause, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// The source address of a received packet is local to the netns.
pub(super) static CAUSE: Cause = Cause {
    slug: "local-source",
    family: Family::SourceCheck,
    title: "source address of the received packet is an address of this host",
    mechanism: "An IPv4 packet that comes in by a device must not have a source address that the routing table `local` of \
        this netns holds: fib_validate_source (net/ipv4/fib_frontend.c) refuses it before any rp_filter test, unless \
        accept_local is 1 for `all` or the device, and ip_handle_martian_source notes it. No counter but the global \
        in_martian_src grows; 7.x gives the reason IP_LOCAL_SOURCE, older kernels none. It happens when the \
        address of a load balancer is bound on the node itself: kube-proxy in IPVS mode puts the addresses of services, also external ones, on \
        the dummy device kube-ipvs0, and health checks or connections from the load balancer's own address die here. Segments of established TCP \
        connections found early are not tested. IPv6 has no such test.",
    evidence: &[
        ("source", "source address of the packet"),
        (
            "holder",
            "device of this netns that holds the address; null when only a route of type local does",
        ),
        (
            "holder_kind",
            "kind of that device, such as dummy; null for a physical one",
        ),
        ("interface", "device that the packet came by"),
        (
            "accept_local",
            "net.ipv4.conf.{all,device}.accept_local: the test is off when either is 1",
        ),
    ],
    remedy: "Take the address off this host, or have the sender use another one. accept_local=1 alone is no remedy: the reply \
        goes to that address, which is here, and never leaves.",
    counter: None,
    benign: false,
    needs: &[
        Need::SourceHolder,
        Need::Sysctl("net.ipv4.conf.all.accept_local"),
        Need::Sysctl("net.ipv4.conf.{device}.accept_local"),
    ],
    matches: |signature| {
        signature.because(&["IP_LOCAL_SOURCE"])
            || signature.site == Site::MartianSource
                && signature.unspecified()
                && signature.has(bits::SOURCE_LOCAL)
                && !signature.has(bits::SOURCE_NOT_UNICAST)
                && !rp_filter::counted(signature)
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let source = event.parse().src;
    let interface = device(event, facts);
    let holder = facts.source_holder.as_ref().and_then(Option::as_ref);
    let accept_local = [
        (FieldId::AcceptLocalAll, Some("all")),
        (FieldId::AcceptLocalDevice, interface),
    ]
    .into_iter()
    .filter_map(|(field, name)| {
        event
            .field(field)
            .or_else(|| sysctl_number(facts, &format!("net.ipv4.conf.{}.accept_local", name?)))
    })
    .reduce(|all, device| all | device);
    found
        .put("source", source.map(|ip| ip.to_string()))
        .put("holder", holder.map(|holder| holder.device.clone()))
        .put("holder_kind", holder.and_then(|holder| holder.kind.clone()))
        .put("interface", interface)
        .put("accept_local", accept_local.map(|value| value != 0));
    let Some(source) = source else {
        return found;
    };
    match holder {
        Some(holder) if holder.device == "kube-ipvs0" => {
            found.advise(
                format!("Stop kube-proxy from binding {source} to kube-ipvs0: it does so since {source} is in the service's status.loadBalancer.ingress or spec.externalIPs. Let the load balancer's controller set ipMode: Proxy or a hostname there instead of the address, or take {source} out of externalIPs."),
                Some(format!("kubectl get services -A -o wide | grep -w -F {source}")),
                "The command only finds the service. With ipMode: Proxy (Kubernetes 1.29 and later) or a hostname, pods and nodes reach the service through the load balancer instead of directly.",
            );
            found.advise(
                "Or run kube-proxy in mode nftables or iptables, which binds no address.",
                None,
                "A change of the cluster. --ipvs-exclude-cidrs does not help: it keeps kube-proxy from cleaning up, not from binding.",
            );
        }
        Some(holder) => {
            let dummy = holder.kind.as_deref() == Some("dummy");
            found.advise(
                if dummy {
                    format!("If the sender is the real owner of {source}: take it off {} here.", holder.device)
                } else {
                    format!("Two hosts use {source}, or this host's own packet came back by {}: find the other one by its hardware address; if the address is not for this host, take it off {}.", interface.unwrap_or("that device"), holder.device)
                },
                Some(in_netns(
                    facts,
                    None,
                    &if dummy {
                        format!("ip address del {source}/32 dev {}", holder.device)
                    } else {
                        format!("arping -D -c 3 -I {} {source}", interface.unwrap_or(&holder.device))
                    },
                )),
                if dummy {
                    "This host then no longer answers on that address (direct server return, AnyIP). Whatever bound it may bind it again."
                } else {
                    "Sends three ARP probes; an answer is from another host with the address."
                },
            );
        }
        None => {
            found.advise(
                format!("See which route makes {source} local here, and remove it or have the sender use another address."),
                Some(in_netns(facts, None, "ip route show table local")),
                "Reads only. Without the route this host no longer takes packets to those addresses.",
            );
        }
    }
    found.advise(
        "Or have the sender use a source address that is not on this host: then its packets pass the test, and replies to them leave.",
        None,
        "Such as a load balancer that translates to an address of its own network. accept_local=1 alone would let the packet in, yet the reply to an address that is here stays here.",
    );
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, bits};

    use crate::diagnose::AddressHolder;
    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V5_10, V6_1, V6_12, V7_3};

    fn at(kernel: Kernel, device: &str, kind: Option<&str>) -> Sample {
        let location = match kernel {
            V5_10 | V6_1 => "ip_rcv_finish_core.constprop.0",
            V6_12 => "ip_rcv_finish_core.isra.0",
            V7_3 => "ip_rcv_finish_core",
        };
        Sample::freed(kernel, Site::MartianSource, location)
            .reason_since(V7_3, "IP_LOCAL_SOURCE")
            .tcp("10.96.0.10:40000", "10.0.0.1:80", SYN)
            .on("eth0")
            .bits(bits::SOURCE_LOCAL)
            .field(FieldId::AcceptLocalAll, 0)
            .field(FieldId::AcceptLocalDevice, 0)
            .fact(|facts| {
                facts.source_holder = Some(Some(AddressHolder {
                    device: device.to_owned(),
                    kind: kind.map(str::to_owned),
                }));
            })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    at(kernel, "kube-ipvs0", Some("dummy")),
                    at(kernel, "vip0", Some("dummy")),
                    at(kernel, "eth1", None),
                    at(kernel, "eth1", None).fact(|facts| facts.source_holder = Some(None)),
                    at(kernel, "eth1", None).fact(|facts| facts.source_holder = None),
                ]
            })
            .collect()
    }

    #[test]
    fn address_and_holder_are_named() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, "kube-ipvs0", Some("dummy")).label();
            assert_eq!(drop.evidence["source"], "10.96.0.10");
            assert_eq!(drop.evidence["holder"], "kube-ipvs0");
            assert_eq!(drop.evidence["holder_kind"], "dummy");
            assert_eq!(drop.evidence["interface"], "eth0");
            assert_eq!(drop.evidence["accept_local"], false);
            assert!(drop.remedy[0].action.contains("ipMode: Proxy"));
            let dummy = at(kernel, "vip0", Some("dummy")).label();
            assert_eq!(
                dummy.remedy[0].command.as_deref(),
                Some("ip address del 10.96.0.10/32 dev vip0")
            );
            let other = at(kernel, "eth1", None).label();
            assert_eq!(
                other.remedy[0].command.as_deref(),
                Some("arping -D -c 3 -I eth0 10.96.0.10")
            );
        }
    }

    #[test]
    fn accept_local_is_never_offered() {
        for sample in samples() {
            for remedy in sample.label().remedy {
                assert!(!remedy.action.contains("accept_local"), "{remedy:?}");
                assert!(!remedy.command.unwrap_or_default().contains("accept_local"));
            }
        }
    }

    #[test]
    fn settings_of_the_facts_serve_where_the_hook_read_none() {
        let drop = Sample::freed(V6_1, Site::MartianSource, "ip_rcv_finish_core")
            .tcp("10.96.0.10:40000", "10.0.0.1:80", SYN)
            .on("eth0")
            .bits(bits::SOURCE_LOCAL)
            .sysctl("net.ipv4.conf.all.accept_local", "0")
            .sysctl("net.ipv4.conf.eth0.accept_local", "1")
            .label();
        assert_eq!(drop.evidence["accept_local"], true);
    }
}
