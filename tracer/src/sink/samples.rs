//! Records for the tests of this room.

use std::collections::BTreeMap;

use droptrace_common::{EventHeader, FieldId, Site, bits};
use serde_json::json;

use crate::diagnose::{
    Brief, CauseCount, Counts, Coverage, Direction, Drop, Evidence, Facts, FoundBy, Gap, HookState, Name,
    Owner, RawEvent, Reconciled, Record, Remedy, ScopeText, Split, Summary, SynUnanswered, Verdict, diagnose,
};

fn evidence(value: &serde_json::Value) -> Evidence {
    value.as_object().unwrap().clone()
}

pub(crate) fn accept_queue() -> Drop {
    Drop {
        time: "2026-01-02T03:04:05.123456789Z".into(),
        ktime_ns: 77_000_000_000,
        verdict: Verdict::Dropped,
        cause: "accept-queue-full".into(),
        title: "accept queue of the listener is full".into(),
        benign: false,
        found_by: FoundBy::Hook,
        packets: 1,
        netns: Some(4_026_532_000),
        netns_name: Some("web".into()),
        pod: None,
        container: None,
        interface: Some("eth0".into()),
        direction: Some(Direction::In),
        src: Some("10.0.0.1".parse().unwrap()),
        dst: Some("10.0.0.2".parse().unwrap()),
        src_name: None,
        dst_name: None,
        sport: Some(40000),
        dport: Some(80),
        protocol: Some("tcp".into()),
        flags: Some("S".into()),
        length: 60,
        owner: Some(Owner {
            pid: 1234,
            comm: "nginx".into(),
            ..Owner::default()
        }),
        counter: Some("TcpExtListenOverflows".into()),
        evidence: evidence(&json!({
            "stage": "syn", "listener": "0.0.0.0:80", "queue_length": 129, "queue_limit": 128, "somaxconn": 4096,
            "limit_from": "application", "abort_on_overflow": false, "sharing": null
        })),
        remedy: vec![
            Remedy {
                action: "See what keeps nginx (pid 1234) from calling accept().".into(),
                command: Some("cat /proc/1234/stack /proc/1234/status".into()),
                effect: "Reads only.".into(),
            },
            Remedy {
                action: "Raise the backlog that nginx gives to listen() (now 128), and restart it.".into(),
                command: None,
                effect: "The limit is fixed at listen().".into(),
            },
        ],
        died_as: None,
        missing: BTreeMap::from([("sharing".into(), "sock_diag did not answer within 250 ms".into())]),
    }
}

pub(crate) fn name() -> Name {
    Name {
        time: "2026-01-02T03:04:07Z".into(),
        since_ktime_ns: 76_000_000_000,
        netns: 4_026_532_000,
        pod: Some("default/web".into()),
        container: Some("nginx".into()),
        addresses: vec!["10.0.0.2".parse().unwrap()],
    }
}

pub(crate) fn brief() -> Brief {
    let drop = accept_queue();
    Brief {
        time: "2026-01-02T03:04:05.200000000Z".into(),
        ktime_ns: 77_076_543_211,
        verdict: drop.verdict,
        cause: drop.cause,
        benign: false,
        found_by: drop.found_by,
        packets: 1,
        netns: drop.netns,
        netns_name: drop.netns_name,
        pod: None,
        container: None,
        interface: drop.interface,
        src: drop.src,
        dst: drop.dst,
        sport: Some(40001),
        dport: drop.dport,
        protocol: drop.protocol,
        flags: drop.flags,
        length: 60,
        split: Split::Exact,
        like: Some(drop.ktime_ns),
    }
}

pub(crate) fn benign() -> Drop {
    Drop {
        cause: "tcp-duplicate".into(),
        title: "a duplicate segment".into(),
        benign: true,
        netns: None,
        netns_name: None,
        interface: None,
        direction: None,
        src: Some("2001:db8::1".parse().unwrap()),
        dst: Some("2001:db8::2".parse().unwrap()),
        sport: None,
        dport: None,
        flags: None,
        owner: None,
        counter: None,
        packets: 37,
        evidence: Evidence::new(),
        remedy: Vec::new(),
        missing: BTreeMap::new(),
        ..accept_queue()
    }
}

pub(crate) fn coverage() -> Coverage {
    let hook = |hook: &str, method: Option<&str>, state: &str, reason: Option<&str>| HookState {
        hook: hook.into(),
        symbol: method.map(|_| hook.into()),
        method: method.map(Into::into),
        state: state.into(),
        reason: reason.map(Into::into),
    };
    Coverage {
        version: "0.1.0".into(),
        kernel: "6.12.1".into(),
        boot_id: "b8c6e0b1-0000-4000-8000-000000000001".into(),
        scope: ScopeText {
            netns: vec![4_026_532_000, 4_026_532_001],
            netns_names: vec![Some("web".into()), None],
            ..ScopeText::default()
        },
        hooks: vec![
            hook("kfree_skb", Some("raw_tracepoint"), "attached", None),
            hook("tcp_conn_request", Some("fentry+fexit"), "attached", None),
            hook("ip_vs_leave", None, "waiting", Some("module ip_vs is not loaded")),
            hook(
                "early_drop",
                None,
                "failed",
                Some("the kernel refused the kprobe (EINVAL)"),
            ),
            hook("icmp_send", None, "not_needed", Some("kfree_skb gives reasons")),
        ],
        gaps: vec![Gap {
            cause: "conntrack-table-full".into(),
            field: None,
            reason: "early_drop: the kernel refused the kprobe (EINVAL)".into(),
        }],
        notes: vec!["IPVS services: out of date for a while: Operation not permitted".into()],
    }
}

pub(crate) fn counts() -> Counts {
    let total = |cause: &str, benign, packets, split| CauseCount {
        cause: cause.into(),
        netns: 4_026_532_000,
        verdict: Verdict::Dropped,
        benign,
        packets,
        split,
    };
    Counts {
        time: "2026-01-02T03:04:15.000000000Z".into(),
        causes: vec![
            total("accept-queue-full", false, 130, Split::Exact),
            total("conntrack-insert-race", false, 4, Split::Sampled),
            total("tcp-duplicate", true, 40, Split::Exact),
        ],
        lost_events: 9,
        lost: BTreeMap::from([("accept-queue-full".into(), 9)]),
        uncounted: 0,
        passed_over: BTreeMap::new(),
        clashes_resolved: 3,
        hints_orphaned: 0,
    }
}

pub(crate) fn summary() -> Summary {
    Summary {
        seconds: 30.25,
        ended: "duration".into(),
        counts: counts(),
        reconcile: vec![Reconciled {
            counter: "TcpExtListenDrops".to_owned(),
            netns: 4_026_531_840,
            netns_name: None,
            delta: 12,
            explained: 9,
            by_counter: 1,
            unexplained: 2,
        }],
        syn_unanswered: vec![SynUnanswered {
            netns: 4_026_532_000,
            netns_name: Some("web".into()),
            interface: Some("eth0".into()),
            held_by: None,
            dst: Some("192.0.2.9".parse().unwrap()),
            dport: Some(443),
            retransmissions: 3,
        }],
    }
}

/// One record of each type that every run gives, in the order in which it gives them.
pub(crate) fn records() -> Vec<Record> {
    vec![
        Record::Coverage(coverage()),
        Record::Drop(Box::new(accept_queue())),
        Record::Drop(Box::new(benign())),
        Record::Counts(counts()),
        Record::Summary(summary()),
    ]
}

/// The same with a drop in short, as `--every-drop` has it.
pub(crate) fn records_of_every_drop() -> Vec<Record> {
    let mut records = records();
    records.insert(3, Record::Brief(Box::new(brief())));
    records
}

/// An IPv4 SYN from 10.0.0.1:40000 to 10.0.0.2:80.
pub(crate) const SYN: [u8; 40] = [
    0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, // IPv4
    0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0, // TCP
];

/// A drop that was really diagnosed, with what it was made from.
pub(crate) fn diagnosed() -> (Record, RawEvent, Facts) {
    let header = EventHeader {
        ktime_ns: 77_000_000_000,
        netns: 4_026_532_000,
        bits: bits::TCP | bits::SYN | bits::DESTINATION_LOCAL,
        iif: 2,
        ifindex: 2,
        len: 1500,
        site: Site::AcceptQueueSyn as u16,
        protocol: 0x0800,
        segments: 1,
        ..EventHeader::default()
    };
    let event = RawEvent::new(
        header,
        &SYN,
        &[
            (FieldId::AcceptQueueLength, 129),
            (FieldId::AcceptQueueLimit, 128),
        ],
    );
    let facts = Facts {
        time_ns: 1_767_323_045_123_456_789,
        netns_name: Some("web".into()),
        devices: BTreeMap::from([(2, "eth0".into())]),
        ..Facts::default()
    };
    let record = Record::Drop(Box::new(diagnose(&event, &facts)));
    (record, event, facts)
}
