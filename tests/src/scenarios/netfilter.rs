//! Rules that drop and reject.

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use droptrace::diagnose::{Direction, Verdict};

use super::Wire;
use crate::{
    Expected, IpFamily,
    IpFamily::{V4, V6},
    Netns, Outcome, Result, Scenario, Test, Tun,
    packet::{Segment, udp},
    sockets,
    test::Kernel,
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
    Scenario::new("netfilter-rule-iptables-reject-v4", |t| {
        reject(t, V4, Engine::Legacy)
    }),
    Scenario::new("netfilter-rule-iptables-reject-v6", |t| {
        reject(t, V6, Engine::Legacy)
    }),
    Scenario::new("netfilter-rule-nft-input-v4", |t| input(t, V4, Engine::Nft)),
    Scenario::new("netfilter-rule-nft-input-v6", |t| input(t, V6, Engine::Nft)),
    Scenario::new("netfilter-rule-nft-output-v4", |t| output(t, V4, Engine::Nft)),
    Scenario::new("netfilter-rule-nft-forward-v4", |t| forward(t, V4, Engine::Nft)),
    Scenario::new("netfilter-rule-nft-reject-v4", |t| reject(t, V4, Engine::Nft)),
    Scenario::new("netfilter-rule-nft-reject-v6", |t| reject(t, V6, Engine::Nft)),
];

const PORT: u16 = 9000;
const SENT: u64 = 4;

/// Who evaluates the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    /// x_tables.
    Legacy,
    /// nf_tables.
    Nft,
}

impl Engine {
    /// Adds a rule for packets to [`PORT`]; `target` as iptables names it.
    fn rule(self, netns: &Netns, family: IpFamily, chain: &str, protocol: &str, target: &str) -> Result<()> {
        match self {
            Self::Legacy => {
                let program = match family {
                    V4 => "iptables-legacy",
                    V6 => "ip6tables-legacy",
                };
                netns
                    .run(&format!(
                        "{program} -w 10 -A {chain} -p {protocol} --dport {PORT} -j {target}"
                    ))
                    .map(drop)
            }
            Self::Nft => {
                let verdict = match target {
                    "DROP" => "drop",
                    "REJECT --reject-with tcp-reset" => "reject with tcp reset",
                    _ => "reject",
                };
                let hook = chain.to_lowercase();
                netns.nft(&format!(
                    "table inet t {{ chain {hook} {{ type filter hook {hook} priority 0; \
                     {protocol} dport {PORT} counter {verdict}; }}\n}}"
                ))
            }
        }
    }

    /// Packets that the rules of a chain took, as the engine counted them.
    fn counted(self, netns: &Netns, family: IpFamily, chain: &str) -> Result<u64> {
        let text = match self {
            Self::Legacy => {
                let program = match family {
                    V4 => "iptables-legacy",
                    V6 => "ip6tables-legacy",
                };
                netns.run(&format!("{program} -w 10 -nvxL {chain}"))?
            }
            Self::Nft => netns.run("nft list ruleset")?,
        };
        let numbers = text.lines().filter_map(|line| match self {
            Self::Legacy => line.contains(&format!("dpt:{PORT}")).then(|| {
                line.split_whitespace()
                    .next()
                    .and_then(|packets| packets.parse::<u64>().ok())
            }),
            Self::Nft => line.split_once("counter packets ").map(|(_, rest)| {
                rest.split_whitespace()
                    .next()
                    .and_then(|packets| packets.parse().ok())
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
}

fn label(
    t: &Test,
    netns: &Netns,
    hook_point: &str,
    engine: Engine,
    (src, dst): (SocketAddr, SocketAddr),
) -> Result<()> {
    t.expect(&[Expected::dropped(netns, "netfilter-rule", SENT)])?;
    if let Some(seen) = t.drop(netns, "netfilter-rule")? {
        let told = engine == Engine::Nft && t.kernel() >= Kernel(6, 12);
        let seen = seen
            .goes(src, dst)?
            .evidence("by", "rule")?
            .evidence("hook_point", hook_point)?;
        // Debian's 6.1 tells since some point release: 6.1.192 does, 6.1.176 does not.
        if engine == Engine::Legacy || t.kernel() != Kernel(6, 1) {
            seen.evidence(
                "engine",
                if told {
                    "nftables".into()
                } else {
                    serde_json::Value::Null
                },
            )?;
        }
    }
    Ok(())
}

/// SYNs from outside that a rule in INPUT drops.
fn input(t: &Test, family: IpFamily, engine: Engine) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    engine.rule(&wire.netns, family, "INPUT", "tcp", "DROP")?;
    for number in 0..SENT as u16 {
        wire.tun
            .send(&Segment::syn(wire.peer(3000 + number), wire.address(PORT), 1).bytes()?)?;
    }
    engine.check_count(&wire.netns, family, "INPUT", SENT)?;
    label(
        t,
        &wire.netns,
        "input",
        engine,
        (wire.peer(0), wire.address(PORT)),
    )?;
    if let Some(seen) = t.drop(&wire.netns, "netfilter-rule")? {
        seen.direction(Direction::In)?.interface("wire")?;
    }
    Ok(Outcome::Passed(format!("rule counter and droptrace: {SENT}")))
}

/// Datagrams made here that a rule in OUTPUT drops.
fn output(t: &Test, family: IpFamily, engine: Engine) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    engine.rule(&wire.netns, family, "OUTPUT", "udp", "DROP")?;
    let socket = sockets::udp(&wire.netns, wire.address(3000))?;
    for _ in 0..SENT {
        let sent = socket.send_to(b"hello", wire.peer(PORT));
        ensure!(
            sent.as_ref()
                .is_err_and(|error| error.raw_os_error() == Some(libc::EPERM)),
            "sending gave {sent:?}, not EPERM"
        );
    }
    engine.check_count(&wire.netns, family, "OUTPUT", SENT)?;
    label(
        t,
        &wire.netns,
        "output",
        engine,
        (wire.address(0), wire.peer(PORT)),
    )?;
    if let Some(seen) = t.drop(&wire.netns, "netfilter-rule")? {
        seen.direction(Direction::Out)?.interface("wire")?;
    }
    Ok(Outcome::Passed(format!("rule counter and droptrace: {SENT}")))
}

/// Packets passing through that a rule in FORWARD drops.
fn forward(t: &Test, family: IpFamily, engine: Engine) -> Result<Outcome> {
    let wire = Wire::new(t, family)?;
    let _beyond = Tun::new(&wire.netns, "beyond", &[t.net(family, 1, 1)])?;
    wire.netns.sysctl("net.ipv4.ip_forward", "1")?;
    wire.netns.sysctl("net.ipv6.conf.all.forwarding", "1")?;
    engine.rule(&wire.netns, family, "FORWARD", "udp", "DROP")?;
    let target = t.at(family, 1, 2, PORT);
    for number in 0..SENT as u16 {
        wire.tun.send(&udp(wire.peer(3000 + number), target, b"hello")?)?;
    }
    engine.check_count(&wire.netns, family, "FORWARD", SENT)?;
    label(t, &wire.netns, "forward", engine, (wire.peer(0), target))?;
    if let Some(seen) = t.drop(&wire.netns, "netfilter-rule")? {
        seen.direction(Direction::Forward)?.interface("wire")?;
    }
    Ok(Outcome::Passed(format!("rule counter and droptrace: {SENT}")))
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
    for number in 0..SENT as u16 {
        wire.tun
            .send(&Segment::syn(wire.peer(3000 + number), wire.address(PORT), 1).bytes()?)?;
        wire.tun.receive("an answer to the SYN", |packet| {
            packet.dst == wire.peer(3000 + number) && packet.has(crate::packet::RST)
        })?;
    }
    if engine == Engine::Legacy {
        engine.rule(&wire.netns, family, "INPUT", "udp", "REJECT")?;
    } else {
        wire.netns
            .nft(&format!("add rule inet t input udp dport {PORT} counter reject"))?;
    }
    for number in 0..SENT as u16 {
        wire.tun
            .send(&udp(wire.peer(3000 + number), wire.address(PORT), b"hello")?)?;
    }
    engine.check_count(&wire.netns, family, "INPUT", 2 * SENT)?;
    t.expect(&[Expected::rejected(&wire.netns, "netfilter-rule", 2 * SENT)])?;
    for protocol in ["tcp", "udp"] {
        if let Some(seen) = t.drop_where(&wire.netns, "netfilter-rule", |drop| {
            drop.protocol.as_deref() == Some(protocol)
        })? {
            ensure!(seen.0.verdict == Verdict::Rejected, "not rejected: {seen}");
            seen.goes(wire.peer(0), wire.address(PORT))?
                .evidence("by", "reject")?
                .evidence("hook_point", "input")?;
        }
    }
    Ok(Outcome::Passed(format!(
        "rule counters and droptrace: {}",
        2 * SENT
    )))
}
