//! `syncookie-invalid`: an ACK that brings no cookie of this host back.

use droptrace_common::{FieldId, Site};

use super::{
    listener::Refuser,
    values::{endpoint, in_netns},
    window::{DATA, data},
};
use crate::diagnose::{
    AddressHolder, Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict,
};

/// How long after it last sent one a listener looks for cookies, in seconds: TCP_SYNCOOKIE_VALID, include/net/tcp.h, 5.10 - 7.3.
const LOOKED_FOR_S: f64 = 120.0;

/// A listener that sends syncookies got an ACK without a valid one.
pub(super) static CAUSE: Cause = Cause {
    slug: "syncookie-invalid",
    family: Family::Listener,
    title: "ACK to a listener that brings no valid syncookie back",
    mechanism: "A listener whose SYN queue is full answers SYNs by a syncookie instead of keeping them: the sequence number of the SYN-ACK is made from addresses, \
        ports, the minute and a secret that each host draws at boot, and the last ACK of the handshake brings it back (net/ipv4/syncookies.c, 5.10 - 7.3). \
        For two minutes after the last cookie, each ACK that belongs to no connection is held against that (cookie_v4_check, net/ipv4/syncookies.c; \
        cookie_v6_check, net/ipv6/syncookies.c). If the cookie is older than one to two minutes, of another host or an earlier boot, or none at \
        all, SyncookiesFailed counts it, and the ACK is answered by RST (tcp_v4_do_rcv, net/ipv4/tcp_ipv4.c; tcp_v6_do_rcv). An ACK to a listener that sent \
        no cookie of late is answered by RST too, but no cookie is looked for: that is not this cause. A listener that never sent one is taken for one \
        that just did while the kernel's 32-bit tick counter passes zero, from 299 to 420 s after boot (tcp_synq_no_recent_overflow, include/net/tcp.h).",
    evidence: &[
        ("listener", "address and port of the listener"),
        ("peer", "who sent the ACK"),
        (
            "cookie",
            "what should have been the cookie: the acknowledged sequence number less one, which was that of the SYN-ACK",
        ),
        DATA,
        (
            "last_cookie_s",
            "seconds since the listener, or one of those that share its port, noted that it sends cookies, once a second at most; null where it never did",
        ),
        (
            "syncookies",
            "net.ipv4.tcp_syncookies of that netns: 1 sends them while a queue is full, 2 always",
        ),
        (
            "queue_limit",
            "limit of the listener's SYN queue: min(backlog, somaxconn) at listen()",
        ),
        ("holder", "device that holds the destination address"),
        (
            "shared_address",
            "whether several hosts may answer for the destination address: it sits on a dummy device or lo, as behind a balancer",
        ),
        ("meaning", "what that says"),
    ],
    remedy: "Let each packet of a connection reach the host that answered its SYN. If the ACKs are late, see that the SYN queue is long enough to do without \
        cookies. If there are many that nobody asked for, let conntrack drop them.",
    counter: Some(Counter {
        name: "TcpExtSyncookiesFailed",
    }),
    benign: false,
    needs: &[
        Need::Listener,
        Need::DestinationHolder,
        Need::Sysctl("net.ipv4.tcp_syncookies"),
        Need::Sysctl("net.core.somaxconn"),
    ],
    matches: |signature| signature.site == Site::SyncookieInvalid,
    verdict: |_: &Signature<'_>| Verdict::Rejected,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let refuser = Refuser::of(event, facts);
    let packet = event.parse();
    let data = data(event);
    let holder = facts.destination_holder.as_ref().map(Option::as_ref);
    let shared = holder.map(|holder| {
        let loopback = packet.dst.is_some_and(|ip| ip.is_loopback());
        !loopback && holder.is_some_and(often_shared)
    });
    found
        .put("listener", refuser.address.clone())
        .put("peer", endpoint(packet.src, packet.sport))
        .put(
            "cookie",
            packet.tcp.map(|tcp| tcp.acknowledgement.wrapping_sub(1)),
        )
        .put(DATA.0, data)
        .put("last_cookie_s", last_cookie_s(event, facts))
        .put("syncookies", refuser.syncookies)
        .put("queue_limit", refuser.limit)
        .put("holder", holder.flatten().map(|holder| holder.device.clone()))
        .put("shared_address", shared)
        .put(
            "meaning",
            if data.is_some_and(|bytes| bytes > 0) {
                "data of a connection that this host does not know, such as one from before a restart or of another host, or the first data behind a handshake whose cookie is late"
            } else {
                "the end of a handshake that came late or to another host than its SYN, or an ACK of a connection that this host does not know, or of none"
            },
        );
    found.owner = refuser.owner.cloned();
    advise(&mut found, facts, &refuser, shared == Some(true));
    found
}

/// Whether addresses on such a device are often held by several hosts at once: those of a service behind a balancer.
fn often_shared(holder: &AddressHolder) -> bool {
    holder.device == "lo" || holder.kind.as_deref() == Some("dummy")
}

/// Seconds since the listener noted a cookie. What the kernel would not have looked at a cookie for is another stamp.
fn last_cookie_s(event: &RawEvent, facts: &Facts) -> Option<f64> {
    let hz = facts.hz.filter(|hz| *hz != 0)?;
    // Another CPU may be a moment ahead.
    let jiffies = event.field(FieldId::SyncookieAge)? as u32 as i32;
    let seconds = f64::from(jiffies) / f64::from(hz);
    (-1.0..=LOOKED_FOR_S)
        .contains(&seconds)
        .then_some(seconds.max(0.0))
}

fn advise(found: &mut Finding, facts: &Facts, refuser: &Refuser<'_>, shared: bool) {
    let run = |command: &str| Some(in_netns(facts, refuser.owner, command));
    found.advise(
        "See how many cookies were sent, came back valid, and did not.",
        run("nstat -asz TcpExtSyncookiesSent TcpExtSyncookiesRecv TcpExtSyncookiesFailed"),
        "Reads only. More failures than cookies sent are ACKs that nobody here asked for: a flood, or connections of another host or of an earlier boot.",
    );
    if shared {
        found.advise(
            "Several hosts may answer for this address, and only the one that answered the SYN knows its cookie: let the balancer send all packets of a connection to one host, by a hash over addresses and ports that does not change with the path.",
            None,
            "Where a host comes or goes, connections may move: a balancer that remembers them keeps them.",
        );
    }
    match refuser.syncookies {
        Some(2) => {
            found.advise(
                "Send cookies only while a SYN queue is full: now every SYN is answered by one.",
                run("sysctl -w net.ipv4.tcp_syncookies=1"),
                "Takes effect at once. A handshake then waits in the SYN queue, and its last ACK needs no cookie.",
            );
        }
        Some(1) => refuser.advise_longer_queue(
            found,
            facts,
            "The limit is fixed at listen(): without a restart of the listener nothing changes. What waits in the SYN queue needs no cookie; a SYN flood fills any queue.",
        ),
        _ => {}
    }
    found.advise(
        "If they are a flood: have conntrack call an ACK without a connection INVALID, and drop what is INVALID before the listener.",
        run("sysctl -w net.netfilter.nf_conntrack_tcp_loose=0"),
        "Needs conntrack and a rule such as `ct state invalid drop`. Connections that conntrack did not see from their start are cut.",
    );
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{ACK, Kernel, Sample, V5_10, V6_12};
    use crate::diagnose::{AddressHolder, Listener, Verdict};

    fn refused(kernel: Kernel) -> Sample {
        Sample::freed(kernel, Site::SyncookieInvalid, "tcp_v4_do_rcv")
            .reason_since(V6_12, "TCP_FLAGS")
            .tcp("10.0.0.9:40000", "10.0.0.1:80", ACK)
            .on("eth0")
            .field(FieldId::ListenerInode, 7)
            .field(FieldId::SyncookieAge, 750)
            .sysctl("net.ipv4.tcp_syncookies", "1")
            .sysctl("net.core.somaxconn", "4096")
            .fact(|facts| {
                facts.listener = Some(Listener {
                    address: "10.0.0.1:80".parse().expect("an address"),
                    queue_length: 0,
                    queue_limit: 128,
                    inode: 7,
                    owner: None,
                    sharing: 1,
                    sharing_full: 0,
                });
            })
    }

    fn held_by(sample: Sample, device: &str, kind: Option<&str>) -> Sample {
        sample.fact(|facts| {
            facts.destination_holder = Some(Some(AddressHolder {
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
                    held_by(refused(kernel), "eth0", None),
                    held_by(refused(kernel), "dummy0", Some("dummy")).more_data(100),
                    refused(kernel).sysctl("net.ipv4.tcp_syncookies", "2"),
                ]
            })
            .collect()
    }

    #[test]
    fn evidence_is_of_the_ack_and_its_listener() {
        for kernel in Kernel::ALL {
            let drop = held_by(refused(kernel), "eth0", None).label();
            assert_eq!(drop.verdict, Verdict::Rejected);
            assert_eq!(drop.evidence["listener"], "10.0.0.1:80");
            assert_eq!(drop.evidence["peer"], "10.0.0.9:40000");
            // The sample acknowledges 0.
            assert_eq!(drop.evidence["cookie"], u32::MAX);
            assert_eq!(drop.evidence["last_cookie_s"], 3.0);
            assert_eq!(drop.evidence["data"], 0);
            assert_eq!(drop.evidence["shared_address"], false);
        }
    }

    #[test]
    fn a_stamp_that_no_cookie_is_looked_for_after_is_not_shown() {
        let at = |jiffies| {
            let event = Sample::freed(V5_10, Site::SyncookieInvalid, "tcp_v4_do_rcv");
            event.field(FieldId::SyncookieAge, jiffies).label().evidence["last_cookie_s"].clone()
        };
        assert_eq!(at(250 * 120), 120.0);
        assert_eq!(at(u64::from((-2i32).cast_unsigned())), 0.0);
        assert!(at(250 * 120 + 1).is_null());
        assert!(at(u64::from((-251i32).cast_unsigned())).is_null());
    }

    #[test]
    fn remedy_is_for_the_setting_the_queue_and_the_address() {
        let says = |sample: Sample, words: &str| {
            let remedies = sample.label().remedy;
            remedies
                .iter()
                .any(|remedy| remedy.action.contains(words) || remedy.command.as_deref() == Some(words))
        };
        let longer = "Raise the backlog that the listener on 10.0.0.1:80 gives to listen(), now 128";
        let only_when_full = "sysctl -w net.ipv4.tcp_syncookies=1";
        let one_host = "Several hosts may answer for this address";
        for kernel in Kernel::ALL {
            let always = || refused(kernel).sysctl("net.ipv4.tcp_syncookies", "2");
            assert!(says(refused(kernel), longer) && !says(refused(kernel), only_when_full));
            assert!(says(always(), only_when_full) && !says(always(), longer));
            assert!(says(held_by(refused(kernel), "lo", None), one_host));
            assert!(says(
                held_by(refused(kernel), "kube-ipvs0", Some("dummy")),
                one_host
            ));
            assert!(!says(held_by(refused(kernel), "eth0", None), one_host));
        }
    }
}
