//! A storm of drops: totals stay exact, and what no line tells is said.

use std::{collections::BTreeSet, thread, time::Duration};

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

/// A storm of which each drop is asked for: most come in short, and together with what is said to be lost they are as many as
/// the rule counted.
fn every_drop(t: &Test) -> Result<Outcome> {
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
    let dropped = wire.netns.nft_packets()?;
    ensure!(dropped == DROPS, "the rule dropped {dropped} of {DROPS} packets");
    let lost = trace.counts()?.lost.get(CAUSE).copied().unwrap_or(0);
    let lines = |so_far: &SoFar| (so_far.drops.len() + so_far.briefs.len()) as u64;
    trace.wait_for("a line for every drop", Duration::from_secs(30), |so_far| {
        lines(so_far) + lost == dropped
    })?;
    let (_, end) = trace.stop()?;
    ensure!(
        lines(&end) + lost == dropped,
        "{} lines and {lost} lost for {dropped} drops",
        lines(&end)
    );
    ensure!(
        t.trace().is_none_or(|trace| trace.look(failed) == failed(&end)),
        "hooks fail that do not where no drop comes in short: {:?}",
        failed(&end)
    );
    let full: BTreeSet<u64> = end.drops.iter().map(|drop| drop.ktime_ns).collect();
    for drop in &end.drops {
        ensure!(drop.cause == CAUSE && drop.packets == 1, "{drop:?}");
    }
    for brief in &end.briefs {
        ensure!(
            brief.cause == CAUSE
                && brief.netns == Some(wire.netns.inode())
                && brief.dst == Some(wire.address(PORT).ip())
                && (brief.sport, brief.dport) == (Some(3000), Some(PORT))
                && brief.protocol.as_deref() == Some("udp")
                && brief.like.is_none_or(|like| full.contains(&like)),
            "{brief:?}"
        );
    }
    let like = end.briefs.iter().filter(|brief| brief.like.is_some()).count();
    ensure!(like > 0, "no drop in short names one with evidence");
    Ok(Outcome::Passed(format!(
        "{DROPS} drops: {} lines in full, {} in short ({like} name one in full), {lost} said to be lost",
        end.drops.len(),
        end.briefs.len()
    )))
}

/// Hooks that could not be attached.
fn failed(so_far: &SoFar) -> BTreeSet<String> {
    let last = so_far.coverage.last().into_iter();
    let hooks = last.flat_map(|coverage| &coverage.hooks);
    hooks
        .filter(|hook| hook.state == "failed")
        .map(|hook| hook.hook.clone())
        .collect()
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
