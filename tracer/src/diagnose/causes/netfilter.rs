//! What all causes share that a rule of netfilter ends a packet for.

use droptrace_common::{FieldId, Site, bits, ct_status};

use super::{
    benign,
    evidence::{Field, joined},
    no_socket,
    values::{Segment, Tuple, device, in_netns},
};
use crate::diagnose::{Facts, Finding, HookPoint, RawEvent, Rule, Rules, Signature};

/// Functions at which netfilter frees what a verdict dropped; nftables frees by itself from 6.12 on, and in 6.1.192.
const HOOKS: &[&str] = &["nf_hook_slow", "nft_do_chain"];
/// The same behind NFQUEUE.
const BEHIND_QUEUE: &[&str] = &["nf_reinject", "nfqnl_reinject"];

/// The site of a signature, where that says something only together with the place of the free: a packet that conntrack
/// called INVALID, or that a bridge passes to the hooks of IP, or that goes to a group, may end like any other.
pub(in crate::diagnose) fn settled_site(signature: &Signature<'_>) -> Site {
    let verdict = by_verdict(signature);
    match signature.site {
        Site::ConntrackInvalid | Site::BridgeNetfilter if !verdict => Site::Free,
        Site::GroupNotJoined | Site::GroupJoined if !benign::route_lookup_failed(signature) => Site::Free,
        Site::ConntrackInvalidNat if !verdict && !no_socket::no_tcp_socket(signature) => Site::Free,
        site => site,
    }
}

/// Why a verdict of netfilter is not laid to a rule: conntrack or IPVS may just as well have given it.
pub(super) fn doubt(signature: &Signature<'_>) -> Option<&'static str> {
    if signature.has(bits::STALE_HINT) && (signature.at(HOOKS) || signature.at(BEHIND_QUEUE)) {
        Some(
            "conntrack, IPVS or a reject rule gave a verdict on such a packet too long before this free: it stays open whether the packet is the same",
        )
    } else if !signature.at(&["nf_hook_slow"]) && !signature.at(BEHIND_QUEUE) {
        None
    } else if signature.has(bits::CONNTRACK_DYING) {
        Some(
            "conntrack drops a packet whose entry is being removed at the same place as a rule: it stays open which of them did",
        )
    } else if signature.has(bits::SERVICE_IPVS) && !signature.has(bits::IPVS_PROPERTY) {
        Some(
            "the destination is an IPVS service, and IPVS drops silently at the same place as a rule: run with --ipvs to tell them apart",
        )
    } else {
        None
    }
}

/// Whether the packet was freed for a verdict at a hook point.
pub(super) fn by_verdict(signature: &Signature<'_>) -> bool {
    let named = signature.because(&["NETFILTER_DROP"]);
    named && signature.at(HOOKS) || signature.reason.is_none() && signature.at(&["nf_hook_slow"])
}

/// Whether no rule and no policy can have dropped a packet at its hook point, as far as all rulesets tell.
pub(super) fn no_rule_can(facts: &Facts) -> bool {
    let none = |rules: &Rules| rules.count == 0 && rules.unread.is_empty();
    HookPoint::of(facts).is_some() && facts.rules.as_ref().is_some_and(none)
}

/// Whether none of the rules and policies that can drop a packet at its hook point has, since all of them count.
pub(super) fn no_rule_moved(facts: &Facts) -> bool {
    facts.rules.as_ref().is_some_and(|rules| rules.unmoved)
}

/// Why something else than a rule or policy gave the verdict, as far as all rulesets tell. nftables that frees the packet
/// itself had a rule, which is gone.
pub(super) fn dropped_without_rule(signature: &Signature<'_>, facts: &Facts) -> Option<&'static str> {
    if !by_verdict(signature) || !signature.at(&["nf_hook_slow"]) {
        None
    } else if no_rule_can(facts) {
        Some(RULELESS)
    } else {
        no_rule_moved(facts).then_some(UNMOVED)
    }
}

const RULELESS: &str = "no rule or policy can drop at this hook point: conntrack or NAT did, which drop a first packet whose entry became \
    invalid without a trace in it, or a BPF program or security module; or the rule was removed at once";

const UNMOVED: &str = "the counter of each rule and policy that can drop at this hook point stayed as it was: conntrack or NAT did, which drop a \
    first packet whose entry became invalid without a trace in it, or a BPF program or security module; or the rule was removed at once";

/// Whether conntrack may have given the verdict as well as a rule, of which nothing is known: it drops the first packet of a connection
/// where it confirms its entry, behind all rules at input and postrouting (`__nf_conntrack_confirm`,
/// net/netfilter/nf_conntrack_core.c, 5.10 - 7.3), which leaves no trace in the entry on some kernels (6.1.192). Where clashes are
/// not seen, rules that can drop it prove nothing.
pub(super) fn may_be_unconfirmed(signature: &Signature<'_>, event: &RawEvent, facts: &Facts) -> bool {
    let known = facts
        .rules
        .as_ref()
        .is_some_and(|rules| rules.told.is_some() || rules.count > 0 && !facts.clashes_unseen);
    let confirms = matches!(
        HookPoint::of(facts),
        None | Some(HookPoint::Input | HookPoint::Postrouting | HookPoint::Bridge)
    );
    let entry = event.field(FieldId::EntryStatus);
    !known
        && confirms
        && by_verdict(signature)
        && signature.at(&["nf_hook_slow"])
        && entry.is_some_and(|status| status & ct_status::CONFIRMED == 0)
}

/// Why a verdict of which [`may_be_unconfirmed`] is true is not laid to a rule.
pub(super) const UNREAD: &str = "conntrack drops the first packet of a connection at the same place as a rule, and no rule was read that can drop it: it stays open which of \
    them did";

/// Whether conntrack may have dropped it where it confirms its entry, after a queue gave it back.
pub(super) fn may_be_clash_behind_queue(signature: &Signature<'_>, facts: &Facts) -> bool {
    facts.clashes_unseen && signature.site == Site::Free && behind_queue(signature)
}

/// Why a packet that conntrack may have dropped unseen is not laid to a rule or queue.
pub(super) const CLASHES_UNSEEN: &str = "conntrack drops the first packet of a connection at the same place as a rule or a verdict behind NFQUEUE, and its hook nf_ct_resolve_clash was not attached: it \
    stays open which of them did";

/// Whether it was freed for a verdict behind NFQUEUE.
pub(super) fn behind_queue(signature: &Signature<'_>) -> bool {
    signature.unspecified() && signature.at(BEHIND_QUEUE)
}

/// What [`put_rule`] puts.
pub(super) const RULE: [(&str, &str); 9] = [
    (
        "hook_point",
        "prerouting, input, forward, output, postrouting, ingress or bridge; null when the stack does not tell",
    ),
    (
        "engine",
        "nftables (rules of iptables-nft, too) or iptables-legacy; null when it may be either",
    ),
    (
        "table",
        "family and name of the table, as chain; null when it may be several",
    ),
    (
        "chain",
        "base chain at the hook point by which the packet came to its rule; null when it may be several",
    ),
    (
        "told_by",
        "counter: it holds the rule; elimination: no other chain that was read can end a packet so at this hook point; null when neither tells",
    ),
    (
        "rule",
        "the one rule whose counter moved, and by as many packets as were seen to end so between two readings; its handle for nftables, its number in the chain for iptables-legacy; null when none is told",
    ),
    ("untold", "why no rule is told; null when one is"),
    (
        "candidates",
        "rules and policies that can end a packet so there, a few of them, and how many more; null when the rulesets could not be read",
    ),
    (
        "read_us",
        "how long it took to read the rulesets of the netns for this packet, in microseconds; they are read after such a packet only, ten times a second at most, with a twentieth of a CPU at most",
    ),
];

/// What [`put_entry`] puts.
pub(super) const ENTRY: [(&str, &str); 2] = [
    (
        "why",
        "the kernel's words for it, as it would log them; numbers in them are left out",
    ),
    (
        "connection",
        "original tuple of the conntrack entry that the packet belongs to; null when it belongs to none",
    ),
];

/// Why conntrack did it, and the entry.
pub(super) fn put_entry(found: &mut Finding, event: &RawEvent) {
    let connection = Tuple::read(
        event,
        [
            FieldId::EntryOrigSrcHi,
            FieldId::EntryOrigSrcLo,
            FieldId::EntryOrigDstHi,
            FieldId::EntryOrigDstLo,
            FieldId::EntryOrigPorts,
        ],
    );
    found
        .put("why", words(event))
        .put("connection", connection.map(|tuple| tuple.to_string()));
}

/// The kernel's words, where it gave some: a format without what it would print.
pub(super) fn words(event: &RawEvent) -> Option<String> {
    let bytes: Vec<u8> = event.all(FieldId::Words).flat_map(u64::to_le_bytes).collect();
    let text = bytes.split(|byte| *byte == 0).next()?;
    let text = String::from_utf8_lossy(text);
    let mut words = String::new();
    let mut rest = text.chars();
    while let Some(letter) = rest.next() {
        if letter == '%' {
            words.push('…');
            // Flags and lengths, then the conversion.
            let _ = rest.find(|letter| "dsuxXcp%".contains(*letter));
        } else {
            words.push(letter);
        }
    }
    let words = words.trim();
    (!words.is_empty()).then(|| words.to_owned())
}

/// What [`put_packet`] puts.
pub(super) const PACKET: [(&str, &str); 3] = [
    ("interface", "device that the packet came by or leaves by"),
    (
        "segment",
        "syn, reply (SYN-ACK) or mid-stream; null when it is not TCP",
    ),
    (
        "meaning",
        "what the loss of it does to the connection; null when it is not TCP",
    ),
];

/// What [`find`] puts.
pub(super) const EVIDENCE: &[Field] = joined![RULE, PACKET];

/// What to do about a rule, in general.
pub(super) const REMEDY: &str = "Look at the rule, or find it by its counter or by a trace of one packet; add an accept before it if the packet is wanted.";

/// Evidence and remedy of a packet that a rule dropped, or `rejected`, and of which there is no more to say.
pub(super) fn find(event: &RawEvent, facts: &Facts, rejected: bool) -> Finding {
    let mut found = Finding::default();
    put_rule(&mut found, event, facts);
    put_packet(&mut found, event, facts, rejected);
    advise(&mut found, event, facts);
    found
}

/// Which rule it was, as far as context found out.
pub(super) fn put_rule(found: &mut Finding, event: &RawEvent, facts: &Facts) {
    let signature = Signature::of_event(event, facts);
    let rules = facts.rules.as_ref();
    let told = rules.and_then(|rules| rules.told.as_ref());
    let only = rules.and_then(|rules| match rules.chains.as_slice() {
        [chain] if rules.unread.is_empty() && HookPoint::of(facts).is_some() => Some(chain),
        _ => None,
    });
    let chain = told.map(|rule| &rule.base).or(only);
    let by_place = signature.at(&["nft_do_chain"]).then_some("nftables");
    let told_by = if told.is_some() {
        Some("counter")
    } else {
        only.map(|_| "elimination")
    };
    let untold = match (rules, facts.missing.get("rules")) {
        (Some(rules), _) => rules.untold.clone(),
        (None, Some(reason)) => Some(format!("not observed: {reason}")),
        (None, None) => Some("not observed".to_owned()),
    };
    found
        .put("hook_point", HookPoint::of(facts).map(HookPoint::name))
        .put("engine", chain.map(|chain| chain.engine.as_str()).or(by_place))
        .put("table", chain.map(|chain| chain.table.as_str()))
        .put("chain", chain.map(|chain| chain.chain.as_str()))
        .put("told_by", told_by)
        .put("rule", told.map(|rule| rule.rule.as_str()))
        .put("untold", untold)
        .put(
            "candidates",
            rules.map(|rules| {
                let mut list: Vec<String> = rules.rules.iter().map(whole).collect();
                if rules.count > list.len() {
                    list.push(format!("and {} more", rules.count - list.len()));
                }
                list.extend(rules.unread.iter().map(|unread| format!("not read: {unread}")));
                list
            }),
        )
        .put("read_us", rules.map(|rules| rules.read_us));
}

/// A rule with all that it takes to find it.
fn whole(rule: &Rule) -> String {
    let base = &rule.base;
    let engine = if base.engine == "nftables" {
        "nft"
    } else {
        "iptables"
    };
    format!("{engine} {} {} {}", base.table, base.chain, rule.rule)
}

/// What the packet was.
pub(super) fn put_packet(found: &mut Finding, event: &RawEvent, facts: &Facts, rejected: bool) {
    let segment = Segment::of(event);
    found
        .put("interface", device(event, facts))
        .put("segment", segment.map(Segment::name))
        .put(
            "meaning",
            segment.map(|segment| match (segment, rejected) {
                (Segment::Syn, true) => "the connection is refused at once",
                (Segment::Syn, false) => "the connection cannot be opened: the client tries again until it gives up",
                (Segment::Reply, _) => {
                    "the connection was let through one way, its answer is not: a rule forgets the way back"
                }
                (Segment::MidStream, true) => "a running connection is cut",
                (Segment::MidStream, false) => {
                    "a running connection stalls: a rule came later than the connection, or its conntrack state is lost or INVALID"
                }
            }),
        );
}

/// How to find the rule: shown where it is told, else by its counter or by a trace of one packet.
pub(super) fn advise(found: &mut Finding, event: &RawEvent, facts: &Facts) {
    if let Some(rule) = facts.rules.as_ref().and_then(|rules| rules.told.as_ref()) {
        found.advise(
            format!("Look at the rule ({}) and what stands before it.", whole(rule)),
            Some(in_netns(facts, None, &rule.list)),
            "Reads only. If the packet is wanted, an accept must come before this rule.",
        );
        return;
    }
    found.advise(
        "Find the rule: its counter grows with each such packet.",
        Some(in_netns(
            facts,
            None,
            "sh -c \"iptables-save -c | grep -e DROP -e REJECT -e QUEUE; nft list ruleset | grep -n -e drop -e reject -e queue\"",
        )),
        "Reads only. For IPv6 rules of iptables: ip6tables-save -c. nft counts only where a rule says `counter`.",
    );
    let packet = event.parse();
    if let Some((src, dst)) = packet.src.zip(packet.dst) {
        let family = if src.is_ipv4() { "ip" } else { "ip6" };
        let transport = match (packet.protocol_name(), packet.dport) {
            (Some(name), Some(port)) if matches!(name.as_str(), "tcp" | "udp" | "sctp") => {
                format!(" {name} dport {port}")
            }
            _ => String::new(),
        };
        let outgoing = matches!(
            HookPoint::of(facts),
            Some(HookPoint::Output | HookPoint::Postrouting)
        );
        let hook = if outgoing && event.header.iif == 0 {
            "output"
        } else {
            "prerouting"
        };
        found.advise(
            "Or trace one such packet through all nftables rules, those of iptables-nft included.",
            Some(in_netns(
                facts,
                None,
                &format!("sh -c \"nft add table inet look; nft 'add chain inet look c {{ type filter hook {hook} priority -350; }}'; nft add rule inet look c {family} saddr {src} {family} daddr {dst}{transport} meta nftrace set 1; timeout 10 nft monitor trace; nft delete table inet look\""),
            )),
            "Adds a table `look` for ten seconds (broken off, it stays: `nft delete table inet look`). Each traced packet costs time. Rules of iptables-legacy do not show.",
        );
    }
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::{FieldId, Site};

    use super::super::sample::{Kernel, SYN, Sample, V6_1, V6_12};
    use crate::diagnose::{BaseChain, Facts, Rule, Rules};

    /// A SYN that netfilter freed there.
    pub(in super::super) fn freed(kernel: Kernel, site: Site, location: &str) -> Sample {
        Sample::freed(kernel, site, location)
            .reason_since(V6_1, "NETFILTER_DROP")
            .tcp("10.0.0.9:40000", "10.0.0.1:80", SYN)
            .on("eth0")
    }

    /// A SYN that a rule of nftables dropped, which frees the packet itself from 6.12 on.
    pub(in super::super) fn by_nftables(kernel: Kernel, site: Site) -> Sample {
        let location = if kernel >= V6_12 {
            "nft_do_chain"
        } else {
            "nf_hook_slow"
        };
        freed(kernel, site, location)
    }

    pub(in super::super) fn frames(sample: Sample, names: &[&str]) -> Sample {
        sample.fact(|facts| facts.frames = names.iter().map(|name| (*name).to_owned()).collect())
    }

    fn rule(chain: &str) -> Rule {
        Rule {
            base: BaseChain {
                engine: "nftables".to_owned(),
                table: "inet t".to_owned(),
                chain: chain.to_owned(),
            },
            rule: "handle 4".to_owned(),
            list: format!("nft -a list chain inet t {chain}"),
        }
    }

    #[test]
    fn words_are_cut_at_their_end_and_lose_their_numbers() {
        let said = |text: &str| {
            let mut bytes = text.as_bytes().to_vec();
            bytes.resize(64, b'x');
            let event = bytes.chunks_exact(8).fold(
                Sample::freed(V6_1, Site::ConntrackInvalid, "nf_hook_slow"),
                |sample, chunk| {
                    let word = u64::from_le_bytes(chunk.try_into().expect("eight bytes"));
                    sample.field(FieldId::Words, word)
                },
            );
            super::words(&event.event())
        };
        assert_eq!(said("bad checksum \0next").as_deref(), Some("bad checksum"));
        assert_eq!(
            said("index %d of %hhu, state %s.\0").as_deref(),
            Some("index … of …, state ….")
        );
        assert_eq!(said("\0"), None);
    }

    /// What a hook read of an entry, and of the kernel's words.
    pub(in super::super) fn entry(sample: Sample, words: &str) -> Sample {
        let tuple = [
            FieldId::EntryOrigSrcHi,
            FieldId::EntryOrigSrcLo,
            FieldId::EntryOrigDstHi,
            FieldId::EntryOrigDstLo,
            FieldId::EntryOrigPorts,
        ];
        let mut bytes = words.as_bytes().to_vec();
        bytes.resize(64, 0);
        bytes
            .chunks_exact(8)
            .map(|chunk| u64::from_le_bytes(chunk.try_into().expect("eight bytes")))
            .fold(sample, |sample, word| sample.field(FieldId::Words, word))
            .tuple(tuple, "10.0.0.9:40000", "10.0.0.1:80")
    }

    /// What context found where these chains can end a packet; whether a counter tells the first one.
    pub(in super::super) fn rules(chains: &[&str], told: bool) -> impl FnOnce(&mut Facts) {
        let rules: Vec<Rule> = chains.iter().map(|chain| rule(chain)).collect();
        let told = told.then(|| rules[0].clone());
        let untold = told
            .is_none()
            .then(|| "the counters of several rules moved".to_owned());
        |facts| {
            facts.rules = Some(Rules {
                chains: rules.iter().map(|rule| rule.base.clone()).collect(),
                count: rules.len() + 3,
                rules,
                masquerades: false,
                told,
                packets: 1,
                untold,
                unmoved: false,
                unread: Vec::new(),
                read_us: 120,
            });
        }
    }

    /// The packet where a counter tells its rule in this chain, and where it may be of another chain, too.
    pub(in super::super) fn told_or_not(sample: &Sample, chain: &str) -> [Sample; 2] {
        [
            sample.clone().fact(rules(&[chain], true)),
            sample.clone().fact(rules(&[chain, "late"], false)),
        ]
    }
}
