//! nftables over netlink (`net/netfilter/nf_tables_api.c`, 5.10 - 7.3), rules of iptables-nft included.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{Ender, NFTABLES};
use crate::{
    context::netlink::{Message, Netlink, attributes, text},
    diagnose::{BaseChain, Ending, HookPoint, HookPoints},
};

// include/uapi/linux/netfilter/nfnetlink.h, nf_tables.h
const SUBSYSTEM: u16 = 10 << 8;
const GET_CHAIN: u16 = SUBSYSTEM | 4;
const GET_RULE: u16 = SUBSYSTEM | 7;
/// `struct nfgenmsg`.
const HEAD: usize = 4;
const LIST_ELEM: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const HOOK_NUMBER: u16 = 1;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_HANDLE: u16 = 3;
const RULE_EXPRESSIONS: u16 = 4;
const RULE_USERDATA: u16 = 7;
const EXPR_NAME: u16 = 1;
const EXPR_DATA: u16 = 2;
const COUNTER_PACKETS: u16 = 2;
const IMMEDIATE_REGISTER: u16 = 1;
const IMMEDIATE_DATA: u16 = 2;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;
const LOOKUP_DREG: u16 = 3;
const TARGET_NAME: u16 = 1;
/// `NFT_REG_VERDICT`.
const REGISTER_VERDICT: u32 = 0;
/// `NF_DROP`, `NFT_JUMP`, `NFT_GOTO`.
const DROP: i32 = 0;
const JUMP: i32 = -3;
const GOTO: i32 = -4;
/// `NFTNL_UDATA_RULE_COMMENT` of libnftnl: what `nft` writes into a rule for itself.
const USERDATA_COMMENT: u8 = 0;

// include/uapi/linux/netfilter.h
const FAMILY_INET: u8 = 1;
const FAMILY_IPV4: u8 = 2;
const FAMILY_NETDEV: u8 = 5;
const FAMILY_BRIDGE: u8 = 7;
const FAMILY_IPV6: u8 = 10;

/// Family, table, chain.
type Key = (u8, String, String);

#[derive(Debug, PartialEq, Eq)]
struct Chain {
    key: Key,
    /// Where the kernel calls it; `None`: only other chains lead to it.
    hook: Option<HookPoints>,
    drops: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Rule {
    key: Key,
    handle: u64,
    comment: Option<String>,
    ending: Option<Ending>,
    leads_to: Vec<String>,
    /// A verdict map can lead anywhere in the table, or drop.
    by_map: bool,
    packets: Option<u64>,
}

/// Reads all of the netns that the thread is in.
pub(super) fn read() -> io::Result<Vec<Ender>> {
    let mut netlink = Netlink::open(NETLINK_NETFILTER)?;
    // All families.
    let head = [0; HEAD];
    let chains: Vec<Chain> = netlink.dump(GET_CHAIN, &head)?.iter().filter_map(chain).collect();
    if chains.is_empty() {
        return Ok(Vec::new());
    }
    let rules: Vec<Rule> = netlink.dump(GET_RULE, &head)?.iter().filter_map(rule).collect();
    Ok(enders(&chains, &rules))
}

fn chain(message: &Message) -> Option<Chain> {
    let family = *message.body.first()?;
    let (mut table, mut name, mut hook, mut policy) = (None, None, None, None);
    for (attribute, value) in attributes(&message.body, HEAD) {
        match attribute {
            CHAIN_TABLE => table = Some(text(value)),
            CHAIN_NAME => name = Some(text(value)),
            CHAIN_HOOK => {
                hook = attributes(value, 0)
                    .find(|(number, _)| *number == HOOK_NUMBER)
                    .and_then(|(_, number)| big(number));
            }
            CHAIN_POLICY => policy = big(value),
            _ => {}
        }
    }
    Some(Chain {
        key: (family, table?, name?),
        hook: hook.map(|number| points(family, number)),
        drops: policy == Some(DROP as u32),
    })
}

/// Where a base chain is called (`enum nf_inet_hooks`, `nf_dev_hooks`, include/uapi/linux/netfilter.h).
fn points(family: u8, number: u32) -> HookPoints {
    let point = match number {
        _ if family == FAMILY_BRIDGE => HookPoint::Bridge,
        0 if family == FAMILY_NETDEV => HookPoint::Ingress,
        _ if family == FAMILY_NETDEV => return HookPoints::NONE,
        0 => HookPoint::Prerouting,
        1 => HookPoint::Input,
        2 => HookPoint::Forward,
        3 => HookPoint::Output,
        4 => HookPoint::Postrouting,
        5 => HookPoint::Ingress,
        _ => return HookPoints::NONE,
    };
    let (v4, v6) = (HookPoints::one(point, false), HookPoints::one(point, true));
    match family {
        FAMILY_IPV4 => v4,
        FAMILY_IPV6 => v6,
        FAMILY_INET | FAMILY_NETDEV | FAMILY_BRIDGE => v4.with(v6),
        _ => HookPoints::NONE,
    }
}

fn rule(message: &Message) -> Option<Rule> {
    let family = *message.body.first()?;
    let (mut table, mut chain) = (None, None);
    let mut rule = Rule::default();
    for (attribute, value) in attributes(&message.body, HEAD) {
        match attribute {
            RULE_TABLE => table = Some(text(value)),
            RULE_CHAIN => chain = Some(text(value)),
            RULE_HANDLE => rule.handle = big_long(value)?,
            RULE_EXPRESSIONS => {
                for (_, expression) in attributes(value, 0).filter(|(kind, _)| *kind == LIST_ELEM) {
                    rule.take(expression);
                }
            }
            RULE_USERDATA => rule.comment = comment(value),
            _ => {}
        }
    }
    rule.key = (family, table?, chain?);
    Some(rule)
}

impl Rule {
    /// Takes over an expression; they come in the order in which the kernel asks them.
    fn take(&mut self, expression: &[u8]) {
        let (mut name, mut data) = (String::new(), &[][..]);
        for (attribute, value) in attributes(expression, 0) {
            match attribute {
                EXPR_NAME => name = text(value),
                EXPR_DATA => data = value,
                _ => {}
            }
        }
        let number = |wanted| {
            attributes(data, 0)
                .find(|(attribute, _)| *attribute == wanted)
                .and_then(|(_, value)| big(value))
        };
        match name.as_str() {
            "counter" => {
                self.packets = attributes(data, 0)
                    .find(|(attribute, _)| *attribute == COUNTER_PACKETS)
                    .and_then(|(_, value)| big_long(value));
            }
            "immediate" if number(IMMEDIATE_REGISTER) == Some(REGISTER_VERDICT) => {
                let verdict = attributes(data, 0)
                    .find(|(attribute, _)| *attribute == IMMEDIATE_DATA)
                    .and_then(|(_, value)| attributes(value, 0).find(|(kind, _)| *kind == DATA_VERDICT))
                    .map_or(&[][..], |(_, verdict)| verdict);
                for (attribute, value) in attributes(verdict, 0) {
                    match attribute {
                        VERDICT_CODE if big(value) == Some(DROP as u32) => self.ending = Some(Ending::Drop),
                        VERDICT_CHAIN if is_lead(verdict) => self.leads_to.push(text(value)),
                        _ => {}
                    }
                }
            }
            "reject" => self.ending = Some(Ending::Reject),
            "masq" => self.ending = Some(Ending::Masquerade),
            "target" => {
                let target = attributes(data, 0).find(|(attribute, _)| *attribute == TARGET_NAME);
                match target.map(|(_, name)| text(name)).as_deref() {
                    Some("REJECT") => self.ending = Some(Ending::Reject),
                    Some("MASQUERADE") => self.ending = Some(Ending::Masquerade),
                    _ => {}
                }
            }
            "lookup" if number(LOOKUP_DREG) == Some(REGISTER_VERDICT) => {
                self.by_map = true;
                self.packets = None;
            }
            "log" | "immediate" => {}
            // What asks after the counter may let the packet go.
            _ => self.packets = None,
        }
    }
}

/// Whether a verdict leads to another chain.
fn is_lead(verdict: &[u8]) -> bool {
    attributes(verdict, 0).any(|(attribute, value)| {
        attribute == VERDICT_CODE && matches!(big(value).map(|code| code as i32), Some(JUMP | GOTO))
    })
}

/// The comment among what `nft` wrote into a rule: type, length, value.
fn comment(mut bytes: &[u8]) -> Option<String> {
    while let [kind, length, rest @ ..] = bytes {
        let value = rest.get(..usize::from(*length))?;
        if *kind == USERDATA_COMMENT {
            return Some(text(value));
        }
        bytes = &rest[value.len()..];
    }
    None
}

/// What can end a packet, and by which base chains a packet comes to it.
fn enders(chains: &[Chain], rules: &[Rule]) -> Vec<Ender> {
    let mut leads: BTreeMap<&Key, BTreeSet<Key>> = BTreeMap::new();
    for rule in rules {
        let (family, table, _) = &rule.key;
        let targets = leads.entry(&rule.key).or_default();
        targets.extend(
            rule.leads_to
                .iter()
                .map(|chain| (*family, table.clone(), chain.clone())),
        );
        if rule.by_map {
            let same_table = |chain: &&Chain| chain.key.0 == *family && chain.key.1 == *table;
            let without_hook = chains
                .iter()
                .filter(same_table)
                .filter(|chain| chain.hook.is_none());
            targets.extend(without_hook.map(|chain| chain.key.clone()));
        }
    }
    let mut bases: BTreeMap<&Key, Vec<(HookPoints, BaseChain)>> = BTreeMap::new();
    for (chain, hook) in chains
        .iter()
        .filter_map(|chain| chain.hook.map(|hook| (chain, hook)))
    {
        let (family, table, name) = &chain.key;
        let base = BaseChain {
            engine: NFTABLES.to_owned(),
            table: format!("{} {table}", family_name(*family)),
            chain: name.clone(),
        };
        let mut seen = BTreeSet::from([&chain.key]);
        let mut open = vec![&chain.key];
        while let Some(key) = open.pop() {
            bases.entry(key).or_default().push((hook, base.clone()));
            open.extend(
                leads
                    .get(key)
                    .into_iter()
                    .flatten()
                    .filter(|key| seen.insert(key)),
            );
        }
    }
    let of_rules = rules.iter().filter_map(|rule| {
        let ending = rule.ending.or(rule.by_map.then_some(Ending::Drop))?;
        let (family, table, chain) = &rule.key;
        let from = bases.get(&rule.key)?.clone();
        let mut words = format!("handle {}", rule.handle);
        if from.iter().any(|(_, base)| base.chain != *chain) {
            words = format!("{words} of chain {chain}");
        }
        if let Some(comment) = &rule.comment {
            words = format!("{words}, \"{comment}\"");
        }
        if rule.ending.is_none() {
            words += ", a verdict map";
        }
        Some(Ender {
            identity: format!("nft {family} {table} {chain} {}", rule.handle),
            ending,
            bases: from,
            rule: words,
            list: format!("nft -a list chain {} {table} {chain}", family_name(*family)),
            packets: rule.packets,
        })
    });
    let of_policies = chains.iter().filter(|chain| chain.drops).filter_map(|chain| {
        let (family, table, name) = &chain.key;
        let own = bases.get(&chain.key)?.first()?.clone();
        Some(Ender {
            identity: format!("nft {family} {table} {name} policy"),
            ending: Ending::Drop,
            bases: vec![own],
            rule: "policy".to_owned(),
            list: format!("nft -a list chain {} {table} {name}", family_name(*family)),
            packets: None,
        })
    });
    of_rules.chain(of_policies).collect()
}

const fn family_name(family: u8) -> &'static str {
    match family {
        FAMILY_INET => "inet",
        FAMILY_IPV4 => "ip",
        FAMILY_IPV6 => "ip6",
        FAMILY_NETDEV => "netdev",
        FAMILY_BRIDGE => "bridge",
        _ => "arp",
    }
}

/// Number of four bytes, network order.
fn big(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(..4)?.try_into().ok()?))
}

/// Number of eight bytes, network order.
fn big_long(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.get(..8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::netlink::put;

    fn nest(parts: &[(u16, Vec<u8>)]) -> Vec<u8> {
        let mut body = Vec::new();
        for (kind, value) in parts {
            put(&mut body, *kind, value);
        }
        body
    }

    fn message(parts: &[(u16, Vec<u8>)]) -> Message {
        let mut body = vec![FAMILY_INET, 0, 0, 0];
        body.extend(nest(parts));
        Message { kind: 0, body }
    }

    fn expression(name: &str, data: &[(u16, Vec<u8>)]) -> (u16, Vec<u8>) {
        let parts = [(EXPR_NAME, name.as_bytes().to_vec()), (EXPR_DATA, nest(data))];
        (LIST_ELEM, nest(&parts))
    }

    fn verdict(code: i32, chain: Option<&str>) -> (u16, Vec<u8>) {
        let mut parts = vec![(VERDICT_CODE, code.to_be_bytes().to_vec())];
        parts.extend(chain.map(|chain| (VERDICT_CHAIN, chain.as_bytes().to_vec())));
        expression(
            "immediate",
            &[
                (IMMEDIATE_REGISTER, vec![0; 4]),
                (IMMEDIATE_DATA, nest(&[(DATA_VERDICT, nest(&parts))])),
            ],
        )
    }

    fn counter(packets: u64) -> (u16, Vec<u8>) {
        expression("counter", &[(COUNTER_PACKETS, packets.to_be_bytes().to_vec())])
    }

    fn base(name: &str, number: u32, policy: u32) -> Chain {
        let hook = nest(&[(HOOK_NUMBER, number.to_be_bytes().to_vec())]);
        chain(&message(&[
            (CHAIN_TABLE, b"t".to_vec()),
            (CHAIN_NAME, name.as_bytes().to_vec()),
            (CHAIN_HOOK, hook),
            (CHAIN_POLICY, policy.to_be_bytes().to_vec()),
        ]))
        .unwrap()
    }

    fn plain(name: &str) -> Chain {
        chain(&message(&[
            (CHAIN_TABLE, b"t".to_vec()),
            (CHAIN_NAME, name.as_bytes().to_vec()),
        ]))
        .unwrap()
    }

    fn in_chain(chain: &str, handle: u64, expressions: &[(u16, Vec<u8>)]) -> Rule {
        rule(&message(&[
            (RULE_TABLE, b"t\0".to_vec()),
            (RULE_CHAIN, chain.as_bytes().to_vec()),
            (RULE_HANDLE, handle.to_be_bytes().to_vec()),
            (RULE_EXPRESSIONS, nest(expressions)),
        ]))
        .unwrap()
    }

    #[test]
    fn rules_that_end_packets_are_found_through_jumps() {
        let chains = [base("in", 1, 1), base("fwd", 2, 0), plain("bad"), plain("unused")];
        let rules = [
            in_chain(
                "in",
                4,
                &[expression("cmp", &[]), counter(7), verdict(DROP, None)],
            ),
            in_chain("in", 5, &[counter(9), verdict(1, None)]),
            in_chain("in", 6, &[verdict(JUMP, Some("bad"))]),
            in_chain("bad", 7, &[counter(2), expression("reject", &[])]),
            in_chain("unused", 8, &[verdict(DROP, None)]),
        ];
        let found = enders(&chains, &rules);
        let told: Vec<_> = found
            .iter()
            .map(|ender| {
                (
                    ender.rule.as_str(),
                    ender.bases[0].1.chain.as_str(),
                    ender.ending,
                    ender.packets,
                )
            })
            .collect();
        assert_eq!(
            told,
            [
                ("handle 4", "in", Ending::Drop, Some(7)),
                ("handle 7 of chain bad", "in", Ending::Reject, Some(2)),
                ("policy", "fwd", Ending::Drop, None),
            ]
        );
        assert_eq!(found[1].list, "nft -a list chain inet t bad");
        let input = HookPoints::one(HookPoint::Input, true);
        assert!(found[0].points().meets(input) && !found[2].points().meets(input));
    }

    #[test]
    fn a_counter_before_a_test_counts_others_too() {
        let early = [counter(7), expression("cmp", &[]), verdict(DROP, None)];
        assert_eq!(in_chain("in", 1, &early).packets, None);
        let logged = [counter(7), expression("log", &[]), verdict(DROP, None)];
        assert_eq!(in_chain("in", 1, &logged).packets, Some(7));
    }

    #[test]
    fn a_verdict_map_may_lead_anywhere_in_its_table() {
        let map = expression("lookup", &[(LOOKUP_DREG, vec![0; 4])]);
        let found = enders(
            &[base("in", 1, 1), plain("bad")],
            &[
                in_chain("in", 4, &[counter(1), map]),
                in_chain("bad", 5, &[counter(1), verdict(DROP, None)]),
            ],
        );
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].packets, None);
        assert_eq!(found[1].bases[0].1.chain, "in");
    }

    #[test]
    fn circles_and_comments_are_read() {
        let mut one = in_chain("a", 1, &[verdict(JUMP, Some("b"))]);
        one.comment = comment(&[1, 1, 0, 0, 4, b'b', b'a', b'd', 0]);
        assert_eq!(one.comment.as_deref(), Some("bad"));
        assert_eq!(comment(&[0, 9, 1]), None);
        let two = in_chain("b", 2, &[verdict(GOTO, Some("a"))]);
        assert!(enders(&[base("a", 0, 1), plain("b")], &[one, two]).is_empty());
    }
}
