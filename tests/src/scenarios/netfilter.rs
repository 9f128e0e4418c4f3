//! Rules that drop, reject, or give packets to programs.

use std::{net::SocketAddr, sync::Arc, thread, time::Duration};

use anyhow::{Context, bail, ensure};
use droptrace::diagnose::{Direction, Drop as Labelled, Verdict};
use nfq::Queue;
use serde_json::Value;

use super::Wire;
use crate::{
    Expected, IpFamily,
    IpFamily::{V4, V6},
    Netns, Outcome, Result, Scenario, Test, Tun,
    netns::modprobe,
    packet::{Segment, frame, udp},
    sockets::{self, wait_until},
    tun::mac,
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("netfilter-rule-iptables-input-v4", |t| {
        input(t, V4, Engine::Legacy)
    })
    .family(),
    Scenario::new("netfilter-rule-iptables-input-v6", |t| {
        input(t, V6, Engine::Legacy)
    }),
    Scenario::new("netfilter-rule-iptables-output-v4", |t| {
        output(t, V4, Engine::Legacy)
    }),
    Scenario::new("netfilter-rule-iptables-output-v6", |t| {
        output(t, V6, Engine::Legacy)
    }),
    Scenario::new("netfilter-rule-iptables-forward-v4", |t| {
        forward(t, V4, Engine::Legacy)
    }),
    Scenario::new("netfilter-rule-iptables-forward-v6", |t| {
        forward(t, V6, Engine::Legacy)
    }),
    Scenario::new("netfilter-rule-iptables-nft-input-v4", |t| {
        input(t, V4, Engine::IptablesNft)
    }),
    Scenario::new("netfilter-rule-iptables-nft-input-v6", |t| {
        input(t, V6, Engine::IptablesNft)
    }),
    Scenario::new("netfilter-rule-nft-input-v4", |t| input(t, V4, Engine::Nft)),
    Scenario::new("netfilter-rule-nft-input-v6", |t| input(t, V6, Engine::Nft)),
    Scenario::new("netfilter-rule-nft-output-v4", |t| output(t, V4, Engine::Nft)),
    Scenario::new("netfilter-rule-nft-output-v6", |t| output(t, V6, Engine::Nft)),
    Scenario::new("netfilter-rule-nft-forward-v4", |t| forward(t, V4, Engine::Nft)),
    Scenario::new("netfilter-rule-nft-forward-v6", |t| forward(t, V6, Engine::Nft)),
    Scenario::new("netfilter-rule-prerouting-v4", |t| {
        before_and_after(t, V4, "prerouting")
    }),
    Scenario::new("netfilter-rule-prerouting-v6", |t| {
        before_and_after(t, V6, "prerouting")
    }),
    Scenario::new("netfilter-rule-postrouting-v4", |t| {
        before_and_after(t, V4, "postrouting")
    }),
    Scenario::new("netfilter-rule-postrouting-v6", |t| {
        before_and_after(t, V6, "postrouting")
    }),
    Scenario::new("netfilter-rule-of-several", several),
    Scenario::new("netfilter-rule-iptables-policy", |t| policy(t, Engine::Legacy)),
    Scenario::new("netfilter-rule-nft-policy", |t| policy(t, Engine::Nft)),
    Scenario::new("netfilter-reject-iptables-v4", |t| reject(t, V4, Engine::Legacy)),
    Scenario::new("netfilter-reject-iptables-v6", |t| reject(t, V6, Engine::Legacy)),
    Scenario::new("netfilter-reject-iptables-nft-v4", |t| {
        reject(t, V4, Engine::IptablesNft)
    }),
    Scenario::new("netfilter-reject-nft-v4", |t| reject(t, V4, Engine::Nft)),
    Scenario::new("netfilter-reject-nft-v6", |t| reject(t, V6, Engine::Nft)),
    Scenario::new("bridge-netfilter-v4", |t| bridged(t, V4)),
    Scenario::new("bridge-netfilter-v6", |t| bridged(t, V6)),
    Scenario::new("netfilter-rule-of-a-bridge", own_rule_of_a_bridge),
    Scenario::new("masquerade-no-address", masquerade),
    Scenario::new("nfqueue-no-listener-v4", |t| no_listener(t, V4)),
    Scenario::new("nfqueue-no-listener-v6", |t| no_listener(t, V6)),
    Scenario::new("nfqueue-full-v4", |t| queue_full(t, V4)),
    Scenario::new("nfqueue-full-v6", |t| queue_full(t, V6)),
    Scenario::new("nfqueue-verdict-v4", |t| queue_verdict(t, V4)),
    Scenario::new("nfqueue-verdict-v6", |t| queue_verdict(t, V6)),
];

const PORT: u16 = 9000;
const SENT: u64 = 4;
/// How often one more packet is sent until its rule is told: a busy guest may be too late with an event.
const TRIES: u64 = 12;

/// Who evaluates the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    /// x_tables.
    Legacy,
    /// nf_tables, by the commands of x_tables.
    IptablesNft,
    /// nf_tables.
    Nft,
}

impl Engine {
    const fn program(self, family: IpFamily) -> &'static str {
        match (self, family) {
            (Self::Legacy, V4) => "iptables-legacy",
            (Self::Legacy, V6) => "ip6tables-legacy",
            (_, V4) => "iptables",
            (_, V6) => "ip6tables",
        }
    }

    /// Adds a rule for packets to [`PORT`]; `target` as iptables names it.
    fn rule(self, netns: &Netns, family: IpFamily, chain: &str, protocol: &str, target: &str) -> Result<()> {
        if self == Self::Nft {
            let verdict = match target {
                "DROP" => "drop",
                "REJECT --reject-with tcp-reset" => "reject with tcp reset",
                _ => "reject",
            };
            let hook = chain.to_lowercase();
            return netns.nft(&format!(
                "table inet t {{ chain {hook} {{ type filter hook {hook} priority 0; \
                 {protocol} dport {PORT} counter {verdict}; }}\n}}"
            ));
        }
        let program = self.program(family);
        netns
            .run(&format!(
                "{program} -w 10 -A {chain} -p {protocol} --dport {PORT} -j {target}"
            ))
            .map(drop)
    }

    /// Packets that the rules of a chain took, as the engine counted them.
    fn counted(self, netns: &Netns, family: IpFamily, chain: &str) -> Result<u64> {
        let text = match self {
            Self::Nft => netns.run("nft list ruleset")?,
            _ => netns.run(&format!("{} -w 10 -nvxL {chain}", self.program(family)))?,
        };
        let numbers = text.lines().filter_map(|line| match self {
            Self::Nft => line.contains(COUNTER).then(|| counted_by(line)),
            _ => line.contains(&format!("dpt:{PORT}")).then(|| {
                line.split_whitespace()
                    .next()
                    .and_then(|packets| packets.parse::<u64>().ok())
            }),
        });
        numbers
            .sum::<Option<u64>>()
            .with_context(|| format!("no rule counter in: {text}"))
    }

    fn check_count(self, netns: &Netns, family: IpFamily, chain: &str, expected: u64) -> Result<()> {
        let counted = self.counted(netns, family, chain)?;
        ensure!(
            counted == expected,
            "the rule counted {counted} packets, not {expected}"
        );
        Ok(())
    }

    /// Engine, table and chain of a rule that [`Self::rule`] added, as evidence names them.
    fn names(self, family: IpFamily, chain: &str) -> [String; 3] {
        let table = match (self, family) {
            (Self::Nft, _) => "inet t",
            (_, V4) => "ip filter",
            (_, V6) => "ip6 filter",
        };
        let engine = match self {
            Self::Legacy => "iptables-legacy",
            _ => "nftables",
        };
        let chain = match self {
            Self::Nft => chain.to_lowercase(),
            _ => chain.to_owned(),
        };
        [engine.to_owned(), table.to_owned(), chain]
    }

    /// How evidence names the first rule of a chain, or begins to.
    const fn first_rule(self) -> &'static str {
        match self {
            Self::Legacy => "rule 1",
            _ => "handle ",
        }
    }
}

/// How a counter begins in what `nft list` prints.
const COUNTER: &str = "counter packets ";

/// What the counter in a line of `nft list` says.
fn counted_by(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once(COUNTER)?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Checks the first packets, of which no rule but the chain is told, then sends one more until its rule is told. Gives
/// the packets that were sent.
fn label(
    t: &Test,
    netns: &Netns,
    expected: fn(&Netns, &str, u64) -> Expected,
    (cause, hook_point): (&str, &str),
    [engine, table, chain]: &[String; 3],
    rule: &str,
    mut one_more: impl FnMut() -> Result<()>,
) -> Result<u64> {
    t.expect(&[expected(netns, cause, SENT)])?;
    if t.trace().is_none() {
        return Ok(SENT);
    }
    let first = |drop: &Labelled| drop.evidence["told_by"] != "counter";
    if let Some(seen) = t.drop_where(netns, cause, first)? {
        seen.evidence("hook_point", hook_point)?
            .evidence("engine", engine.as_str())?
            .evidence("table", table.as_str())?
            .evidence("chain", chain.as_str())?
            .evidence("told_by", "elimination")?
            .evidence("rule", Value::Null)?
            .has_evidence("untold")?
            .has_evidence("read_us")?;
    }
    for sent in SENT + 1..=SENT + TRIES {
        one_more()?;
        t.expect(&[expected(netns, cause, sent)])?;
        let told = |drop: &Labelled| drop.evidence["told_by"] == "counter";
        wait_until("labels", || Ok(t.drops(netns, cause).len() as u64 >= sent))?;
        if !t.drops(netns, cause).iter().any(|drop| told(drop)) {
            continue;
        }
        if let Some(seen) = t.drop_where(netns, cause, told)? {
            let said = seen.0.evidence["rule"].as_str().unwrap_or_default().to_owned();
            ensure!(said.starts_with(rule), "rule is {said}, not {rule}: {seen}");
            seen.evidence("hook_point", hook_point)?
                .evidence("engine", engine.as_str())?
                .evidence("table", table.as_str())?
                .evidence("chain", chain.as_str())?
                .evidence("untold", Value::Null)?;
        }
        return Ok(sent);
    }
    let drops = t.drops(netns, cause);
    let last = drops.last().and_then(|drop| serde_json::to_string(&**drop).ok());
    bail!("no rule was told for one of {TRIES} single packets: {last:?}")
}

/// Packets on one way through a netns, and the chain on it.
struct Way {
    chain: &'static str,
    protocol: &'static str,
    from: SocketAddr,
    to: SocketAddr,
    direction: Direction,
}

/// Packets that a rule drops; `send` sends one, if it can from the port that it is given.
fn dropped(
    t: &Test,
    netns: &Netns,
    family: IpFamily,
    engine: Engine,
    way: &Way,
    mut send: impl FnMut(u16) -> Result<()>,
) -> Result<Outcome> {
    engine.rule(netns, family, way.chain, way.protocol, "DROP")?;
    (3000..3000 + SENT as u16).try_for_each(&mut send)?;
    engine.check_count(netns, family, way.chain, SENT)?;
    let sent = label(
        t,
        netns,
        Expected::dropped,
        ("netfilter-rule", &way.chain.to_lowercase()),
        &engine.names(family, way.chain),
        engine.first_rule(),
        || send(7000),
    )?;
    engine.check_count(netns, family, way.chain, sent)?;
    if let Some(seen) = t.drop(netns, "netfilter-rule")? {
        seen.goes(way.from, way.to)?
            .direction(way.direction)?
            .interface("wire")?;
    }
    Ok(Outcome::Passed(format!("rule counter and droptrace: {sent}")))
}

/// SYNs from outside that a rule in INPUT drops.
fn input(t: &Test, family: IpFamily, engine: Engine) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let way = Way {
        chain: "INPUT",
        protocol: "tcp",
        from: wire.peer(0),
        to: wire.address(PORT),
        direction: Direction::In,
    };
    dropped(t, &wire.netns, family, engine, &way, |port| {
        wire.tun.send(&Segment::syn(wire.peer(port), way.to, 1).bytes()?)
    })
}

/// Datagrams made here that a rule in OUTPUT drops.
fn output(t: &Test, family: IpFamily, engine: Engine) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let socket = sockets::udp(&wire.netns, wire.address(3000))?;
    let way = Way {
        chain: "OUTPUT",
        protocol: "udp",
        from: wire.address(0),
        to: wire.peer(PORT),
        direction: Direction::Out,
    };
    dropped(t, &wire.netns, family, engine, &way, |_| {
        let sent = socket.send_to(b"hello", way.to);
        ensure!(
            sent.as_ref()
                .is_err_and(|error| error.raw_os_error() == Some(libc::EPERM)),
            "sending gave {sent:?}, not EPERM"
        );
        Ok(())
    })
}

/// A router; the tun device is the other way out.
fn router(t: &Test, family: IpFamily) -> Result<(Wire, Tun)> {
    let (wire, beyond) = Wire::with_beyond(t, family)?;
    wire.netns.forward(true)?;
    Ok((wire, beyond))
}

/// Packets passing through that a rule in FORWARD drops.
fn forward(t: &Test, family: IpFamily, engine: Engine) -> Result<Outcome> {
    let (wire, _beyond) = router(t, family)?;
    let way = Way {
        chain: "FORWARD",
        protocol: "udp",
        from: wire.peer(0),
        to: t.at(family, 1, 2, PORT),
        direction: Direction::Forward,
    };
    dropped(t, &wire.netns, family, engine, &way, |port| {
        wire.tun.send(&udp(wire.peer(port), way.to, b"hello")?)
    })
}

/// Packets passing through that a chain before or after routing drops, in a chain that the base chain jumps to.
fn before_and_after(t: &Test, family: IpFamily, hook: &str) -> Result<Outcome> {
    let (wire, _beyond) = router(t, family)?;
    wire.netns.nft(&format!(
        "table inet t {{ chain bad {{ udp dport {PORT} counter log drop; }}\n \
         chain base {{ type filter hook {hook} priority 0; meta l4proto udp jump bad; }}\n \
         chain elsewhere {{ type filter hook input priority 0; counter drop; }}\n}}"
    ))?;
    let target = t.at(family, 1, 2, PORT);
    let send = |number| wire.tun.send(&udp(wire.peer(3000 + number), target, b"hello")?);
    (0..SENT as u16).try_for_each(send)?;
    let names = ["nftables", "inet t", "base"].map(str::to_owned);
    let sent = label(
        t,
        &wire.netns,
        Expected::dropped,
        ("netfilter-rule", hook),
        &names,
        "handle ",
        || send(4000),
    )?;
    if let Some(seen) = t.drop_where(&wire.netns, "netfilter-rule", |drop| {
        drop.evidence["told_by"] == "counter"
    })? {
        let rule = seen.0.evidence["rule"].as_str().unwrap_or_default();
        ensure!(rule.ends_with(" of chain bad"), "rule is {rule}: {seen}");
        seen.remedy_says("nft -a list chain inet t bad")?;
    }
    Engine::Nft.check_count(&wire.netns, family, hook, sent)?;
    Ok(Outcome::Passed(format!("rule counter and droptrace: {sent}")))
}

/// Rules of two engines at one hook point, one of which does not count: a rule is told only where the numbers agree.
fn several(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    let netns = &wire.netns;
    netns.run(&format!(
        "iptables-legacy -w 10 -A INPUT -p udp --dport {} -j DROP",
        PORT + 1
    ))?;
    netns.nft(&format!(
        "table ip t {{ chain in {{ type filter hook input priority 10; \
         udp dport {PORT} counter drop comment \"mine\"; udp dport {} drop; }}\n}}",
        PORT + 2
    ))?;
    let send = |port: u16| {
        wire.tun
            .send(&udp(wire.peer(3000), wire.address(port), b"hello")?)
    };
    let cause = "netfilter-rule";
    let (mut sent, mut told) = (0, [0_u64; 3]);
    let mut one = |port: u16| -> Result<()> {
        send(port)?;
        sent += 1;
        t.expect(&[Expected::dropped(netns, cause, sent)])?;
        if t.trace().is_some() {
            wait_until("labels", || Ok(t.drops(netns, cause).len() as u64 >= sent))?;
        }
        Ok(())
    };
    for _ in 0..=TRIES {
        (PORT..PORT + 3).try_for_each(&mut one)?;
    }
    if t.trace().is_some() {
        for drop in t.drops(netns, cause) {
            let said = |name: &str| drop.evidence[name].as_str().unwrap_or_default();
            let port = drop.dport.unwrap_or_default();
            let rule = said("rule");
            ensure!(
                rule.is_empty()
                    || match port - PORT {
                        0 => rule.starts_with("handle ") && rule.ends_with(", \"mine\""),
                        1 => rule == "rule 1" && said("engine") == "iptables-legacy",
                        _ => false,
                    },
                "port {port} has the rule {rule}: {drop:?}"
            );
            told[usize::from(port - PORT)] += u64::from(!rule.is_empty());
        }
        ensure!(
            told[0] > 0 && told[1] > 0,
            "of {} packets each, {told:?} were told a rule",
            TRIES + 1
        );
    }
    Ok(Outcome::Passed(format!(
        "{sent} packets of three rules; told right: {} and {}, told wrong: none",
        told[0], told[1]
    )))
}

/// SYNs that the policy of a chain drops; x_tables counts those.
fn policy(t: &Test, engine: Engine) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    match engine {
        Engine::Nft => wire.netns.nft(
            "table ip t { chain in { type filter hook input priority 0; policy drop; \
             meta l4proto icmp accept; }\n}",
        )?,
        _ => wire.netns.run("iptables-legacy -w 10 -P INPUT DROP").map(drop)?,
    }
    let send = |number| {
        wire.tun
            .send(&Segment::syn(wire.peer(3000 + number), wire.address(PORT), 1).bytes()?)
    };
    (0..SENT as u16).try_for_each(send)?;
    let mut sent = SENT;
    if engine == Engine::Nft {
        t.expect(&[Expected::dropped(&wire.netns, "netfilter-rule", SENT)])?;
        if let Some(seen) = t.drop(&wire.netns, "netfilter-rule")? {
            seen.evidence("engine", "nftables")?
                .evidence("table", "ip t")?
                .evidence("chain", "in")?
                .evidence("told_by", "elimination")?
                .evidence("candidates", serde_json::json!(["nft ip t in policy"]))?;
        }
    } else {
        sent = label(
            t,
            &wire.netns,
            Expected::dropped,
            ("netfilter-rule", "input"),
            &engine.names(V4, "INPUT"),
            "policy",
            || send(4000),
        )?;
        let text = wire.netns.run("iptables-legacy -w 10 -nvxL INPUT")?;
        ensure!(
            text.contains(&format!("policy DROP {sent} packets")),
            "not {sent} packets by the policy: {text}"
        );
    }
    Ok(Outcome::Passed(format!("policy and droptrace: {sent}")))
}

/// SYNs answered by RST and datagrams answered by port unreachable.
fn reject(t: &Test, family: IpFamily, engine: Engine) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    engine.rule(
        &wire.netns,
        family,
        "INPUT",
        "tcp",
        "REJECT --reject-with tcp-reset",
    )?;
    // The rule has loaded the module that answers.
    t.attached(match family {
        V4 => &["nf_send_reset", "nf_send_unreach"],
        V6 => &["nf_send_reset6", "nf_send_unreach6"],
    })?;
    let syn = |number| {
        wire.tun
            .send(&Segment::syn(wire.peer(3000 + number), wire.address(PORT), 1).bytes()?)?;
        wire.tun
            .receive("an answer to the SYN", |packet| {
                packet.dst == wire.peer(3000 + number) && packet.has(crate::packet::RST)
            })
            .map(drop)
    };
    (0..SENT as u16).try_for_each(syn)?;
    let sent = label(
        t,
        &wire.netns,
        Expected::rejected,
        ("netfilter-reject", "input"),
        &engine.names(family, "INPUT"),
        engine.first_rule(),
        || syn(1000),
    )?;
    if engine == Engine::Nft {
        wire.netns
            .nft(&format!("add rule inet t input udp dport {PORT} counter reject"))?;
    } else {
        engine.rule(&wire.netns, family, "INPUT", "udp", "REJECT")?;
    }
    for number in 0..SENT as u16 {
        wire.tun
            .send(&udp(wire.peer(3000 + number), wire.address(PORT), b"hello")?)?;
    }
    engine.check_count(&wire.netns, family, "INPUT", sent + SENT)?;
    t.expect(&[Expected::rejected(&wire.netns, "netfilter-reject", sent + SENT)])?;
    for protocol in ["tcp", "udp"] {
        if let Some(seen) = t.drop_where(&wire.netns, "netfilter-reject", |drop| {
            drop.protocol.as_deref() == Some(protocol)
        })? {
            ensure!(seen.0.verdict == Verdict::Rejected, "not rejected: {seen}");
            seen.goes(wire.peer(0), wire.address(PORT))?
                .evidence("hook_point", "input")?;
        }
    }
    Ok(Outcome::Passed(format!(
        "rule counters and droptrace: {}",
        sent + SENT
    )))
}

/// Hosts behind the two ports of a bridge.
const HERE: [u8; 6] = [2, 0, 0, 0, 7, 1];
const THERE: [u8; 6] = [2, 0, 0, 0, 7, 2];

/// A bridge with two ports; frames from one are for a host behind the other.
fn bridge(t: &Test, family: IpFamily) -> Result<(Arc<Netns>, Tun, Vec<Vec<u8>>)> {
    modprobe("br_netfilter")?;
    let netns = t.netns("bridge")?;
    // Its own packets are none of the scenario's.
    netns.sysctl("net.ipv6.conf.default.disable_ipv6", "1")?;
    netns.ip(&["link add br0 type bridge mcast_snooping 0", "link set br0 up"])?;
    let near = Tun::tap(&netns, "near", &[])?;
    let far = Tun::tap(&netns, "far", &[])?;
    netns.ip(&["link set near master br0", "link set far master br0"])?;
    // Where both are, so that nothing is flooded.
    netns.run(&format!(
        "bridge fdb replace {} dev near master static",
        mac(HERE)
    ))?;
    netns.run(&format!(
        "bridge fdb replace {} dev far master static",
        mac(THERE)
    ))?;
    let ethertype = if family == V4 { 0x0800 } else { 0x86dd };
    let frames = (0..SENT as u16)
        .map(|number| {
            let packet = udp(
                t.at(family, 0, 8, 3000 + number),
                t.at(family, 0, 9, PORT),
                b"hello",
            )?;
            Ok(frame(THERE, HERE, ethertype, &packet))
        })
        .collect::<Result<_>>()?;
    // Kept open: the port goes down without.
    std::mem::forget(far);
    Ok((netns, near, frames))
}

/// Packets between two ports of a bridge that a rule in FORWARD drops.
fn bridged(t: &Test, family: IpFamily) -> Result<Outcome> {
    let (netns, near, frames) = bridge(t, family)?;
    let call = match family {
        V4 => "net.bridge.bridge-nf-call-iptables",
        V6 => "net.bridge.bridge-nf-call-ip6tables",
    };
    netns.sysctl(call, "1")?;
    Engine::Legacy.rule(&netns, family, "FORWARD", "udp", "DROP")?;
    frames.iter().try_for_each(|frame| near.send(frame))?;
    wait_until("packets at the rule", || {
        Ok(Engine::Legacy.counted(&netns, family, "FORWARD")? >= SENT)
    })?;
    Engine::Legacy.check_count(&netns, family, "FORWARD", SENT)?;
    let sent = label(
        t,
        &netns,
        Expected::dropped,
        ("bridge-netfilter", "forward"),
        &Engine::Legacy.names(family, "FORWARD"),
        "rule 1",
        || near.send(&frames[0]),
    )?;
    if let Some(seen) = t.drop(&netns, "bridge-netfilter")? {
        seen.goes(t.at(family, 0, 8, 0), t.at(family, 0, 9, PORT))?
            .evidence("call", "1")?
            .remedy_says(call)?;
    }
    Ok(Outcome::Passed(format!("rule counter and droptrace: {sent}")))
}

/// The same by a rule of the bridge's own tables.
fn own_rule_of_a_bridge(t: &Test) -> Result<Outcome> {
    let (netns, near, frames) = bridge(t, V4)?;
    netns.sysctl("net.bridge.bridge-nf-call-iptables", "1")?;
    netns.nft(&format!(
        "table bridge t {{ chain through {{ type filter hook forward priority -200; \
         ether daddr {} counter drop; }}\n}}",
        mac(THERE)
    ))?;
    frames.iter().try_for_each(|frame| near.send(frame))?;
    wait_until("packets at the rule", || {
        Ok(Engine::Nft.counted(&netns, V4, "through")? >= SENT)
    })?;
    Engine::Nft.check_count(&netns, V4, "through", SENT)?;
    t.expect(&[Expected::dropped(&netns, "netfilter-rule", SENT)])?;
    if let Some(seen) = t.drop(&netns, "netfilter-rule")? {
        seen.evidence("hook_point", "bridge")?
            .evidence("table", "bridge t")?
            .evidence("chain", "through")?;
    }
    Ok(Outcome::Passed(format!("rule counter and droptrace: {SENT}")))
}

/// Datagrams passing through to a device without address, whose source a rule would masquerade.
fn masquerade(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    let _bare = Tun::new(&wire.netns, "bare", &[])?;
    wire.netns.sysctl("net.ipv4.ip_forward", "1")?;
    let target = t.at(V4, 3, 2, PORT);
    wire.netns
        .ip(&[&format!("route add {} dev bare scope link", t.net(V4, 3, 0))])?;
    // Without another address on the way either: the kernel would take one of any device.
    wire.netns.ip(&[
        &format!("address del {} dev wire", t.net(V4, 0, 1)),
        &format!("route add {} dev wire", t.net(V4, 0, 0)),
    ])?;
    wire.netns.nft(
        "table ip n { chain post { type nat hook postrouting priority 100; oifname \"bare\" counter masquerade; }\n}",
    )?;
    t.known();
    for number in 0..SENT as u16 {
        wire.tun.send(&udp(wire.peer(3000 + number), target, b"hello")?)?;
    }
    Engine::Nft.check_count(&wire.netns, V4, "post", SENT)?;
    t.expect(&[Expected::dropped(&wire.netns, "masquerade-no-address", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "masquerade-no-address")? {
        seen.goes(wire.peer(0), target)?
            .evidence("interface", "bare")?
            .evidence("address", false)?;
    }
    Ok(Outcome::Passed(format!("rule counter and droptrace: {SENT}")))
}

/// A rule at input that gives datagrams to [`PORT`] to queue [`QUEUE`].
fn queue_rule(wire: &Wire) -> Result<()> {
    modprobe("nfnetlink_queue")?;
    wire.netns.nft(&format!(
        "table inet t {{ chain in {{ type filter hook input priority 0; \
         udp dport {PORT} counter queue num {QUEUE}; }}\n}}"
    ))
}

const QUEUE: u16 = 11;

fn send_datagrams(wire: &Wire, count: u64) -> Result<()> {
    (0..count as u16).try_for_each(|number| {
        wire.tun
            .send(&udp(wire.peer(3000 + number), wire.address(PORT), b"hello")?)
    })
}

fn bind(netns: &Netns, length: u32) -> Result<Queue> {
    netns.enter(|| {
        let mut queue = Queue::open().context("cannot open an NFQUEUE socket")?;
        queue.bind(QUEUE).context("cannot bind the NFQUEUE")?;
        queue
            .set_queue_max_len(QUEUE, length)
            .context("cannot limit the NFQUEUE")?;
        queue.set_nonblocking(true);
        Ok(queue)
    })
}

/// No program listens on the queue.
fn no_listener(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    queue_rule(&wire)?;
    send_datagrams(&wire, SENT)?;
    Engine::Nft.check_count(&wire.netns, family, "in", SENT)?;
    t.expect(&[Expected::dropped(&wire.netns, "nfqueue", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "nfqueue")? {
        seen.goes(wire.peer(0), wire.address(PORT))?
            .evidence("why", "no-listener")?
            .evidence("queues", serde_json::json!([]))?
            .remedy_says("bypass")?;
    }
    Ok(Outcome::Passed(format!("rule counter and droptrace: {SENT}")))
}

/// The program does not keep up.
fn queue_full(t: &Test, family: IpFamily) -> Result<Outcome> {
    const FIT: u64 = 2;
    let wire = Wire::new(t, family)?;
    queue_rule(&wire)?;
    let queue = bind(&wire.netns, FIT as u32)?;
    send_datagrams(&wire, FIT + SENT)?;
    let line = wire.netns.proc_net("netfilter/nfnetlink_queue")?;
    let dropped = line.split_whitespace().nth(5).and_then(|word| word.parse().ok());
    ensure!(dropped == Some(SENT), "queue_dropped is not {SENT}: {line}");
    t.expect(&[Expected::dropped(&wire.netns, "nfqueue", SENT)])?;
    if let Some(seen) = t.drop(&wire.netns, "nfqueue")? {
        seen.goes(wire.peer(0), wire.address(PORT))?
            .evidence("why", "queue-full")?
            .has_evidence("queues")?;
    }
    // What waits is dropped when the program goes, as the queue is closed then.
    drop(queue);
    Ok(Outcome::Passed(format!("queue_dropped and droptrace: {SENT}")))
}

/// The program gives the verdict drop.
fn queue_verdict(t: &Test, family: IpFamily) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    queue_rule(&wire)?;
    let mut queue = bind(&wire.netns, 100)?;
    send_datagrams(&wire, SENT)?;
    let mut given = 0;
    wait_until("queued packets", || {
        while let Ok(mut message) = queue.recv() {
            message.set_verdict(nfq::Verdict::Drop);
            queue.verdict(message).context("cannot give a verdict")?;
            given += 1;
        }
        thread::sleep(Duration::from_millis(5));
        Ok(given >= SENT)
    })?;
    t.expect(&[Expected::dropped(&wire.netns, "nfqueue", given)])?;
    if let Some(seen) = t.drop(&wire.netns, "nfqueue")? {
        seen.goes(wire.peer(0), wire.address(PORT))?
            .evidence("why", "verdict")?;
    }
    Ok(Outcome::Passed(format!("verdicts and droptrace: {given}")))
}
