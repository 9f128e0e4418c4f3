//! A storm of drops: totals stay exact, and what no line tells is said.

use std::{thread, time::Duration};

use anyhow::ensure;

use super::Wire;
use crate::{Expected, IpFamily::V4, Outcome, Result, Scenario, Test, cost::Cost, packet::udp};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario::new("storm", storm).alone().family()];

const DROPS: u64 = 10_000;
const PORT: u16 = 9000;
const CAUSE: &str = "netfilter-rule";

fn storm(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    wire.netns.nft(&format!(
        "table ip t {{ chain c {{ type filter hook input priority 0; udp dport {PORT} counter drop; }}\n}}"
    ))?;
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

/// Events of the cause that are said not to have become lines.
fn lost(t: &Test) -> Result<u64> {
    let Some(trace) = t.trace() else {
        return Ok(0);
    };
    Ok(trace.counts()?.lost.get(CAUSE).copied().unwrap_or(0))
}
