//! `syn-refused`: a listener refuses a connection for another reason than a full queue.

use droptrace_common::{FieldId, Site};

use super::{
    listener::Refuser,
    values::{endpoint, in_netns},
};
use crate::diagnose::{Cause, Counter, Facts, Family, Finding, Need, RawEvent, Signature, Verdict};

/// A listener refused a SYN or the last ACK of a handshake although its queues had room.
pub(super) static CAUSE: Cause = Cause {
    slug: "syn-refused",
    family: Family::Listener,
    title: "listener refused the connection, not for a full queue",
    mechanism: "tcp_conn_request (net/ipv4/tcp_input.c) also drops a SYN when there is no route for the SYN-ACK, no \
        memory for the request, or when a security module says no; tcp_v4_conn_request (net/ipv4/tcp_ipv4.c) and \
        tcp_v6_conn_request when the SYN went to a broadcast, multicast or anycast address; tcp_v4_syn_recv_sock and \
        tcp_v6_syn_recv_sock refuse the last ACK of a handshake when the new socket cannot be made (memory, route, \
        TCP-MD5 or TCP-AO key). Each counts ListenDrops alone (5.10 - 7.3).",
    evidence: &[
        (
            "stage",
            "what was refused: syn, or ack (the last ACK of the handshake)",
        ),
        (
            "refusal",
            "which refusal: no-route, memory, security-module, not-unicast, or not-told when the kernel leaves no trace",
        ),
        ("listener", "address and port of the listener"),
        ("peer", "who wanted to connect"),
    ],
    remedy: "The refusal says where to look: the route back to the client, memory, the log of the security module, or \
        the sender that connects to a broadcast address.",
    counter: Some(Counter {
        name: "TcpExtListenDrops",
    }),
    benign: false,
    needs: &[Need::Listener],
    matches: |signature| {
        matches!(
            signature.site,
            Site::SynRefused | Site::SynNotUnicast | Site::ChildRefused
        )
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let refuser = Refuser::of(event, facts);
    let packet = event.parse();
    let refusal = match (event.site, event.field(FieldId::Refused)) {
        (Site::SynNotUnicast, _) => "not-unicast",
        (_, Some(1)) => "no-route",
        (_, Some(2)) => "memory",
        (_, Some(3)) => "security-module",
        _ => "not-told",
    };
    found
        .put(
            "stage",
            if event.site == Site::ChildRefused {
                "ack"
            } else {
                "syn"
            },
        )
        .put("refusal", refusal)
        .put("listener", refuser.address.clone())
        .put("peer", endpoint(packet.src, packet.sport));
    found.owner = refuser.owner.cloned();
    let run = |command: String| Some(in_netns(facts, refuser.owner, &command));
    let peer = packet
        .src
        .map_or_else(|| "the client".to_owned(), |ip| ip.to_string());
    match refusal {
        "no-route" => found.advise(
            format!("Give that netns a route to {peer}: it has none for the SYN-ACK."),
            packet.src.zip(packet.dst).and_then(|(src, dst)| {
                run(format!("ip route get {src} from {dst}"))
            }),
            "The command reads only; a new route changes where other packets to that network go.",
        ),
        "memory" => found.advise(
            "The kernel had no memory for the request: see what takes it.",
            Some("cat /proc/net/sockstat /proc/buddyinfo".to_owned()),
            "Reads only.",
        ),
        "security-module" => found.advise(
            "A security module (SELinux, Smack, AppArmor, or a BPF program of type LSM) refused the connection: see its log.",
            Some("journalctl -k --grep 'avc|apparmor|smack' --since -5min".to_owned()),
            "Reads only.",
        ),
        "not-unicast" => found.advise(
            format!(
                "{peer} opens a TCP connection to {}, which is no unicast address here: mend the address that it was given.",
                packet.dst.map_or_else(|| "an address".to_owned(), |ip| ip.to_string())
            ),
            None,
            "TCP has no broadcast: there is no setting that accepts it.",
        ),
        _ => found.advise(
            format!("See whether that netns has a route to {peer}, and whether the kernel logs a refusal."),
            packet.src.zip(packet.dst).and_then(|(src, dst)| {
                run(format!("ip route get {src} from {dst}"))
            }),
            "Reads only. The kernel does not tell this refusal apart from others.",
        ),
    };
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use crate::diagnose::causes::sample::{ACK, Kernel, SYN, Sample, V7_3};

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                let refused = |number| {
                    Sample::hook(kernel, Site::SynRefused)
                        .tcp("10.9.0.9:40000", "10.0.0.1:80", SYN)
                        .on("eth0")
                        .field(FieldId::Refused, number)
                };
                [
                    refused(0),
                    refused(1),
                    refused(2),
                    refused(3),
                    Sample::hook(kernel, Site::SynNotUnicast)
                        .tcp("10.0.0.9:40000", "10.0.0.255:80", SYN)
                        .on("eth0"),
                    Sample::freed(kernel, Site::ChildRefused, "tcp_v4_rcv")
                        .reason_since(V7_3, "TCP_LISTEN_OVERFLOW")
                        .tcp("10.9.0.9:40000", "10.0.0.1:80", ACK)
                        .on("eth0"),
                ]
            })
            .map(|sample| {
                sample.field(FieldId::ListenerPort, 80).address(
                    FieldId::ListenerAddressHi,
                    FieldId::ListenerAddressLo,
                    "::ffff:0.0.0.0",
                )
            })
            .collect()
    }

    #[test]
    fn refusal_is_named() {
        let told: Vec<_> = samples()
            .iter()
            .take(6)
            .map(|sample| {
                let drop = sample.label();
                assert_eq!(drop.evidence["listener"], "0.0.0.0:80");
                (
                    drop.evidence["stage"].as_str().map(str::to_owned),
                    drop.evidence["refusal"].as_str().map(str::to_owned),
                )
            })
            .collect();
        let expected = [
            ("syn", "not-told"),
            ("syn", "no-route"),
            ("syn", "memory"),
            ("syn", "security-module"),
            ("syn", "not-unicast"),
            ("ack", "not-told"),
        ]
        .map(|(stage, refusal)| (Some(stage.to_owned()), Some(refusal.to_owned())));
        assert_eq!(told, expected);
    }

    #[test]
    fn remedy_for_a_missing_route_asks_for_this_client() {
        let drop = samples()[1].label();
        assert_eq!(
            drop.remedy[0].command.as_deref(),
            Some("ip route get 10.9.0.9 from 10.0.0.1")
        );
    }
}
