//! A storm of drops: totals stay exact, and what no line tells is said.

use std::{thread, time::Duration};

use anyhow::ensure;

use super::Wire;
use crate::{
    Expected,
    IpFamily::V4,
    Outcome, Result, Scenario, Test,
    cost::Cost,
    packet::udp,
    trace::{SoFar, Trace},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("storm", storm).alone().family(),
    Scenario::new("storm-in-turns", in_turns),
    Scenario::new("storm-every-drop", every_drop).alone(),
];

const DROPS: u64 = 10_000;
const PORT: u16 = 9000;
const CAUSE: &str = "netfilter-rule";

/// Longer than a memo of the programs waits before it goes to another key: 25 jiffies, of which a second has 100 at least.
const MEMO_WAITS: Duration = Duration::from_secs(1);

/// Has a rule drop what comes to the port.
fn rule(wire: &Wire) -> Result<()> {
    wire.netns.nft(&format!(
        "table ip t {{ chain c {{ type filter hook input priority 0; udp dport {PORT} counter drop; }}\n}}"
    ))
}

fn storm(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    rule(&wire)?;
    t.known();
    let lost_before = lost(t)?;
    let cost = Cost::start()?;
    let packet = udp(wire.peer(3000), wire.address(PORT), b"hello")?;
    for _ in 0..DROPS {
        wire.tun.send(&packet)?;
    }
    t.expect(&[Expected::dropped(&wire.netns, CAUSE, DROPS)])?;
    let text = cost.so_far()?;
    // Lines may still be on their way.
    let mut told = 0;
    for _ in 0..50 {
        told = t.drops(&wire.netns, CAUSE).len() as u64 + lost(t)? - lost_before;
        if told == DROPS {
            break;
        }
        thread::sleep(Duration::from_millis(200));
    }
    ensure!(
        t.trace().is_none() || told == DROPS,
        "{told} of {DROPS} drops have a line or are said to have none"
    );
    let lines = t.drops(&wire.netns, CAUSE).len();
    Ok(Outcome::Passed(format!(
        "{DROPS} drops counted, {lines} with a line of their own, the others said to have none; {text}"
    )))
}

/// A storm of which each drop is asked for: more than a sample would have, and less than the ring holds.
fn every_drop(t: &Test) -> Result<Outcome> {
    const DROPS: u64 = 2_000;
    if t.trace().is_none() {
        return Ok(Outcome::Skipped("needs droptrace".to_owned()));
    }
    let wire = Wire::new(t, V4)?;
    rule(&wire)?;
    let scope = wire.netns.path().display().to_string();
    let trace = Trace::start(&["--every-drop", "--netns", &scope])?;
    t.known();
    let packet = udp(wire.peer(3000), wire.address(PORT), b"hello")?;
    for _ in 0..DROPS {
        wire.tun.send(&packet)?;
    }
    t.expect(&[Expected::dropped(&wire.netns, CAUSE, DROPS)])?;
    let told = |so_far: &SoFar| so_far.drops.iter().filter(|drop| drop.cause == CAUSE).count() as u64;
    trace.wait_for("a line for every drop", Duration::from_secs(30), |so_far| {
        told(so_far) == DROPS
    })?;
    let sample = t.drops(&wire.netns, CAUSE).len();
    let (_, end) = trace.stop()?;
    ensure!(told(&end) == DROPS, "{} lines for {DROPS} drops", told(&end));
    Ok(Outcome::Passed(format!(
        "{DROPS} drops, each with a line; {sample} where a sample is wanted"
    )))
}

/// Storms in three namespaces whose packets are alike: they share two memos, which change hands.
fn in_turns(t: &Test) -> Result<Outcome> {
    const EACH: u64 = 3_000;
    let hosts = [
        Wire::of(t, "one", V4, 0)?,
        Wire::of(t, "other", V4, 0)?,
        Wire::of(t, "third", V4, 0)?,
    ];
    for host in &hosts {
        rule(host)?;
    }
    t.known();
    let mut expected = [0; 3];
    for (turn, host) in [0, 1, 2, 2, 0, 1, 2, 0].into_iter().enumerate() {
        if turn > 2 {
            thread::sleep(MEMO_WAITS);
        }
        let wire = &hosts[host];
        let packet = udp(wire.peer(3000), wire.address(PORT), b"hello")?;
        for _ in 0..EACH {
            wire.tun.send(&packet)?;
        }
        expected[host] += EACH;
    }
    let each: Vec<Expected> = hosts
        .iter()
        .zip(expected)
        .map(|(host, drops)| Expected::dropped(&host.netns, CAUSE, drops))
        .collect();
    t.expect(&each)?;
    Ok(Outcome::Passed(format!(
        "{expected:?} drops counted, {EACH} at a time in turns"
    )))
}

/// Events of the cause that are said not to have become lines.
fn lost(t: &Test) -> Result<u64> {
    let Some(trace) = t.trace() else {
        return Ok(0);
    };
    Ok(trace.counts()?.lost.get(CAUSE).copied().unwrap_or(0))
}
