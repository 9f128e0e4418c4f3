//! `tc-program`: a filter of tc, or a BPF program attached like one, drops the packet.

use super::{
    unknown,
    values::{in_netns, on},
};
use crate::diagnose::{
    Cause, Counter, Facts, Family, Filter, Finding, Need, RawEvent, Side, Signature, Verdict,
};
use droptrace_common::bits;

/// A filter on a device's way in or out says drop.
pub(super) static CAUSE: Cause = Cause {
    slug: "tc-program",
    family: Family::Device,
    title: "filter or program of tc dropped the packet",
    mechanism: "Filters on a device's clsact or ingress qdisc, and BPF programs that are attached there without one (tcx, from 6.6 on), see each packet that it receives or \
        sends, and their verdict may be to drop it (TC_ACT_SHOT: an action drop, a rate limit by police, a program's return value). Container networks, traffic shapers and \
        firewalls work that way. sch_handle_ingress or sch_handle_egress (net/core/dev.c) frees the packet, with the reason TC_INGRESS or TC_EGRESS from 6.1 on. On 5.10 the place \
        tells, if a filter is there that may have done it.",
    evidence: &[
        ("interface", "device whose filter dropped the packet"),
        ("side", "ingress (received) or egress (to be sent)"),
        (
            "filter",
            "the filter that dropped it, with its program or the drops of its actions; null if several may have, or none is there by now",
        ),
        (
            "filters",
            "every filter of that side that has a program or an action",
        ),
        (
            "by",
            "program (a BPF program's verdict) or action; null where that stays open",
        ),
    ],
    remedy: "Find out who attached the filter or program, and what it is meant to drop; tc shows the drops of actions, and a program may tell by its own means.",
    counter: Some(Counter {
        name: "dropped of the clsact or ingress qdisc (tc -s qdisc)",
    }),
    benign: false,
    needs: &[Need::Link],
    matches: |signature| {
        signature.because(&["TC_INGRESS", "TC_EGRESS"])
            || signature.reason.is_none()
                && signature.bits & (bits::NOT_IP | bits::NO_PROTOCOL) == 0
                && signature.at(&["__netif_receive_skb_core", "__dev_queue_xmit"])
    },
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: Some(|_, facts| {
        (facts.reason.is_none() && suspects(facts).is_empty()).then_some(&unknown::UNKNOWN)
    }),
};

fn side(facts: &Facts) -> Side {
    let out = match &facts.reason {
        Some(reason) => reason == "TC_EGRESS",
        None => facts
            .location
            .as_ref()
            .is_some_and(|location| location.starts_with("__dev_queue_xmit")),
    };
    if out { Side::Egress } else { Side::Ingress }
}

fn on_side(facts: &Facts) -> impl Iterator<Item = &Filter> {
    let side = side(facts);
    facts
        .link
        .iter()
        .flat_map(|link| &link.filters)
        .filter(move |filter| filter.side == side)
}

/// Filters that may have dropped the packet: programs, and those whose actions did drop some. The first drop may not be
/// counted yet when the filters are listed: where there are none, those whose actions can drop.
fn suspects(facts: &Facts) -> Vec<&Filter> {
    let can = |filter: &&Filter| {
        filter
            .actions
            .iter()
            .any(|action| matches!(action.kind.as_str(), "gact" | "police" | "bpf"))
    };
    let did =
        |filter: &&Filter| filter.program.is_some() || filter.actions.iter().any(|action| action.drops > 0);
    let found: Vec<_> = on_side(facts).filter(did).collect();
    if found.is_empty() {
        on_side(facts).filter(can).collect()
    } else {
        found
    }
}

fn text(filter: &Filter) -> String {
    let mut parts = vec![filter.kind.clone()];
    if filter.kind != "tcx" {
        parts.push(format!("pref {}", filter.preference));
    }
    if let Some(program) = &filter.program {
        parts.push(program.text());
    }
    for action in &filter.actions {
        parts.push(format!("action {} ({} dropped)", action.kind, action.drops));
    }
    parts.join(" ")
}

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let interface = on(event, facts);
    let suspects = suspects(facts);
    let only = match suspects[..] {
        [only] => Some(only),
        _ => None,
    };
    let side = match side(facts) {
        Side::Ingress => "ingress",
        Side::Egress => "egress",
    };
    found
        .put("interface", interface)
        .put("side", side)
        .put("filter", only.map(text))
        .put("filters", on_side(facts).map(text).collect::<Vec<_>>())
        .put(
            "by",
            only.map(|filter| {
                if filter.program.is_some() && filter.actions.iter().all(|action| action.drops == 0) {
                    "program"
                } else {
                    "action"
                }
            }),
        );
    let Some(interface) = interface else {
        return found;
    };
    found.advise(
        format!("See the filters of {interface} with what their actions dropped."),
        Some(in_netns(
            facts,
            None,
            &format!("tc -s filter show dev {interface} {side}"),
        )),
        "Reads only. Programs that are attached without a qdisc are shown by `bpftool net`.",
    );
    if let Some(program) = only.and_then(|filter| filter.program.as_ref()) {
        found.advise(
            "See who loaded the program, and since when.",
            Some(format!("bpftool prog show id {}", program.id)),
            "Reads only. `pids` names processes that hold it open.",
        );
    }
    found
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{Site, bits};

    use crate::diagnose::causes::sample::{Kernel, Sample, V5_10, V6_1};
    use crate::diagnose::{Action, BpfProgram, Filter, Link, Side};

    fn program() -> Filter {
        Filter {
            side: Side::Ingress,
            kind: "bpf".to_owned(),
            preference: 49152,
            program: Some(BpfProgram {
                id: 42,
                name: Some("guard".to_owned()),
            }),
            ..Filter::default()
        }
    }

    fn action(drops: u32) -> Filter {
        Filter {
            side: Side::Egress,
            kind: "matchall".to_owned(),
            preference: 1,
            actions: vec![Action {
                kind: "gact".to_owned(),
                drops,
            }],
            ..Filter::default()
        }
    }

    fn at(kernel: Kernel, filters: &[Filter]) -> Sample {
        let side = filters.first().map_or(Side::Ingress, |filter| filter.side);
        let (place, reason) = match side {
            Side::Ingress => ("__netif_receive_skb_core.constprop.0", "TC_INGRESS"),
            Side::Egress => ("__dev_queue_xmit", "TC_EGRESS"),
        };
        let sample = Sample::freed(kernel, Site::Free, place)
            .reason_since(V6_1, reason)
            .udp("10.0.0.9:4000", "10.0.0.1:53");
        match side {
            Side::Ingress => sample.on("eth0").moved_to(2),
            Side::Egress => sample.leaving("eth0"),
        }
        .fact(|facts| {
            facts.link = Some(Link {
                filters: filters.to_vec(),
                ..Link::default()
            });
        })
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| [at(kernel, &[program()]), at(kernel, &[action(4)])])
            .collect()
    }

    #[test]
    fn the_filter_is_named_where_only_one_may_have_done_it() {
        for kernel in Kernel::ALL {
            let drop = at(kernel, &[program()]).label();
            assert_eq!(drop.evidence["filter"], "bpf pref 49152 guard (id 42)");
            assert_eq!(drop.evidence["by"], "program");
            assert_eq!(drop.evidence["side"], "ingress");
            assert_eq!(drop.remedy[1].command.as_deref(), Some("bpftool prog show id 42"));
            let drop = at(kernel, &[action(4), action(0)]).label();
            assert_eq!(drop.evidence["filter"], "matchall pref 1 action gact (4 dropped)");
            assert_eq!(drop.evidence["by"], "action");
            assert_eq!(drop.evidence["side"], "egress");
            assert_eq!(drop.evidence["filters"].as_array().map(Vec::len), Some(2));
            assert_eq!(at(kernel, &[action(0)]).label().evidence["by"], "action");
            let drop = at(kernel, &[action(4), action(3)]).label();
            assert!(drop.evidence["filter"].is_null() && drop.evidence["by"].is_null());
        }
    }

    #[test]
    fn without_reasons_a_filter_must_be_there() {
        for kernel in Kernel::ALL {
            let cause = at(kernel, &[]).label().cause;
            assert_eq!(cause, if kernel == V5_10 { "unknown" } else { "tc-program" });
        }
        let lldp = at(V5_10, &[program()]).bits(bits::NOT_IP).label();
        assert_eq!(lldp.cause, "unknown-ethertype");
    }
}
