//! `ipvs-timewait-reuse`: a SYN met an IPVS entry that an earlier connection left.

use droptrace_common::{Site, bits};

use super::{
    ipvs::Entry,
    values::{endpoint, in_netns, sysctl_number},
};
use crate::diagnose::{Cause, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// A new connection follows an old IPVS entry instead of being scheduled.
pub(in crate::diagnose) static CAUSE: Cause = Cause {
    slug: "ipvs-timewait-reuse",
    family: Family::Ipvs,
    title: "SYN met a left-over IPVS entry of an earlier connection",
    mechanism: "IPVS remembers each connection after its end (TIME_WAIT: 2 min). A client that uses the same port \
        again meets that entry, and its SYN follows it instead of being scheduled (ip_vs_in, \
        net/netfilter/ipvs/ip_vs_core.c). If the entry's server is still in the service, the SYN is sent \
        there, even when its weight is 0 and nothing runs there any more: the kernel drops nothing, and the \
        client waits. If the server was removed, the SYN is dropped silently. Only expire_nodest_conn=1 (for \
        servers removed or of weight 0) or conn_reuse_mode other than 0 (for entries in TIME_WAIT or CLOSE) \
        has the SYN scheduled anew; a SYN that carries a confirmed conntrack entry is then dropped once, and \
        the next one, a second later, is scheduled. No counter of the kernel shows any of it.",
    evidence: &[
        ("virtual_service", "address and port of the service"),
        ("client", "address and port that the client uses again"),
        ("state", "state of the left-over entry, as ipvsadm -Lnc shows it"),
        ("real_server", "server of the entry"),
        (
            "weight",
            "its weight; 0 takes no new connections; null when it was removed",
        ),
        ("removed", "whether the server was removed from the service"),
        (
            "fate",
            "what IPVS did with the SYN: sent-to-old-server, dropped, or expired-and-dropped (the next SYN is scheduled)",
        ),
        ("conn_reuse_mode", "net.ipv4.vs.conn_reuse_mode of that netns"),
        (
            "expire_nodest_conn",
            "net.ipv4.vs.expire_nodest_conn of that netns",
        ),
    ],
    remedy: "Set net.ipv4.vs.expire_nodest_conn=1, as kube-proxy does, and conn_reuse_mode=1 where servers die without \
        being taken out of the service.",
    counter: None,
    benign: false,
    needs: &[
        Need::Sysctl("net.ipv4.vs.conn_reuse_mode"),
        Need::Sysctl("net.ipv4.vs.expire_nodest_conn"),
    ],
    matches: |signature| match signature.site {
        Site::IpvsReuseDropped | Site::IpvsReuseMisdelivered => true,
        Site::IpvsExpired => signature.has(bits::SYN),
        _ => false,
    },
    verdict: |signature: &Signature<'_>| {
        if signature.site == Site::IpvsReuseMisdelivered {
            Verdict::Misdelivered
        } else {
            Verdict::Dropped
        }
    },
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let entry = Entry::of(event);
    let packet = event.parse();
    let reuse = sysctl_number(facts, "net.ipv4.vs.conn_reuse_mode");
    let expire = sysctl_number(facts, "net.ipv4.vs.expire_nodest_conn");
    found
        .put("virtual_service", entry.service_text())
        .put("client", endpoint(packet.src, packet.sport))
        .put("state", entry.state)
        .put("real_server", entry.server_text())
        .put("weight", entry.weight)
        .put("removed", entry.removed)
        .put(
            "fate",
            match event.site {
                Site::IpvsReuseMisdelivered => "sent-to-old-server",
                Site::IpvsReuseDropped => "dropped",
                _ => "expired-and-dropped",
            },
        )
        .put("conn_reuse_mode", reuse)
        .put("expire_nodest_conn", expire);
    let server = entry.server_text().unwrap_or_else(|| "the old server".to_owned());
    if event.site == Site::IpvsExpired {
        found.advise(
            "Nothing to set: the entry is gone now, and the client's next SYN, a second later, is scheduled. If it happens often, let the client rest its ports longer, or keep connections open.",
            None,
            "The SYN was lost since it carried a confirmed conntrack entry, which cannot move to another server.",
        );
        return found;
    }
    let leaving = entry.removed == Some(true) || entry.weight == Some(0);
    if leaving && expire != Some(1) {
        found.advise(
            format!("Have IPVS forget entries of servers that were removed or have weight 0, such as {server}: the SYN is then scheduled anew."),
            Some(in_netns(facts, None, "sysctl -w net.ipv4.vs.expire_nodest_conn=1")),
            "Takes effect at once. A connection whose server is removed ends with the next packet instead of hanging; kube-proxy sets it. For weight 0 kernels before 5.16 want conn_reuse_mode=1 as well.",
        );
    }
    if !leaving && reuse == Some(0) {
        found.advise(
            format!("Have IPVS schedule a SYN that meets an entry in TIME_WAIT or CLOSE, instead of sending it to {server}."),
            Some(in_netns(facts, None, "sysctl -w net.ipv4.vs.conn_reuse_mode=1")),
            "Takes effect at once. With net.ipv4.vs.conntrack=1 kernels before 5.9 then delay such connections by a second.",
        );
    }
    if entry.removed != Some(true) {
        found.advise(
            format!(
                "If {server} is dead, take it out of the service, and let a health check do so in future."
            ),
            entry
                .service_option()
                .zip(entry.server_text())
                .map(|(service, server)| in_netns(facts, None, &format!("ipvsadm -d {service} -r {server}"))),
            "Its living connections end; with expire_nodest_conn=0 their packets are then dropped silently.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site, bits};

    use crate::diagnose::causes::sample::{Kernel, SYN, Sample, V6_1, V6_12};
    use crate::diagnose::{FoundBy, Verdict};

    fn at(kernel: Kernel, site: Site, weight: i64, removed: bool) -> Sample {
        let sample = if site == Site::IpvsReuseMisdelivered {
            Sample::hook(kernel, site)
        } else {
            Sample::freed(kernel, site, "nf_hook_slow").reason_since(V6_1, "NETFILTER_DROP")
        };
        sample
            .tcp("10.0.0.9:40000", "10.96.0.10:80", SYN)
            .on("eth0")
            .bits(bits::SERVICE_IPVS)
            .address(FieldId::IpvsServerHi, FieldId::IpvsServerLo, "10.244.1.7")
            .field(FieldId::IpvsServerPort, 8080)
            .field(FieldId::IpvsState, 5)
            .field(FieldId::IpvsWeight, weight as u64)
            .field(FieldId::IpvsRemoved, u64::from(removed))
            .sysctl("net.ipv4.vs.conn_reuse_mode", "0")
            .sysctl("net.ipv4.vs.expire_nodest_conn", "0")
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                [
                    at(kernel, Site::IpvsReuseMisdelivered, 0, false),
                    at(kernel, Site::IpvsReuseMisdelivered, 1, false),
                    at(kernel, Site::IpvsReuseDropped, -1, true),
                    at(kernel, Site::IpvsExpired, 0, true),
                ]
            })
            .collect()
    }

    #[test]
    fn verdict_follows_what_ipvs_did() {
        for kernel in Kernel::ALL {
            let sent = at(kernel, Site::IpvsReuseMisdelivered, 0, false).label();
            assert_eq!(sent.verdict, Verdict::Misdelivered);
            assert_eq!(sent.found_by, FoundBy::Hook);
            assert_eq!(sent.evidence["state"], "TIME_WAIT");
            assert_eq!(sent.evidence["real_server"], "10.244.1.7:8080");
            assert_eq!(sent.evidence["virtual_service"], "10.96.0.10:80");
            assert_eq!(sent.evidence["weight"], 0);
            let dropped = at(kernel, Site::IpvsReuseDropped, -1, true).label();
            assert_eq!(dropped.verdict, Verdict::Dropped);
            assert_eq!(dropped.evidence["removed"], true);
            assert!(dropped.evidence["weight"].is_null());
        }
    }

    #[test]
    fn remedy_fits_the_server() {
        let commands = |site, weight, removed| -> Vec<String> {
            at(V6_12, site, weight, removed)
                .label()
                .remedy
                .into_iter()
                .filter_map(|remedy| remedy.command)
                .collect()
        };
        let expire = "sysctl -w net.ipv4.vs.expire_nodest_conn=1";
        let reuse = "sysctl -w net.ipv4.vs.conn_reuse_mode=1";
        let remove = "ipvsadm -d -t 10.96.0.10:80 -r 10.244.1.7:8080";
        assert_eq!(commands(Site::IpvsReuseMisdelivered, 0, false), [expire, remove]);
        assert_eq!(commands(Site::IpvsReuseMisdelivered, 1, false), [reuse, remove]);
        assert_eq!(commands(Site::IpvsReuseDropped, -1, true), [expire]);
        assert!(commands(Site::IpvsExpired, -1, true).is_empty());
    }
}
