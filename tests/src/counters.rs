//! The kernel's own counters of a network namespace.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};

use crate::{Netns, Result, sockets::wait_until};

/// A snapshot of `/proc/net/{netstat,snmp,snmp6}` and, where present,
/// `/proc/net/stat/nf_conntrack`; names as `nstat` prints them
/// (`TcpExtListenDrops`, `Ip6InNoRoutes`), those of conntrack as
/// `conntrack:insert_failed`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    values: BTreeMap<String, u64>,
}

impl Counters {
    /// Reads all counters of a netns.
    pub fn read(netns: &Netns) -> Result<Self> {
        let mut values = BTreeMap::new();
        values.extend(parse_pairs(&netns.proc_net("netstat")?));
        values.extend(parse_pairs(&netns.proc_net("snmp")?));
        if let Ok(text) = netns.proc_net("snmp6") {
            values.extend(parse_columns(&text));
        }
        if let Ok(text) = netns.proc_net("stat/nf_conntrack") {
            values.extend(parse_per_cpu("conntrack", &text));
        }
        Ok(Self { values })
    }

    /// The value of a counter; zero where the kernel has none of this name.
    pub fn get(&self, name: &str) -> u64 {
        self.values.get(name).copied().unwrap_or(0)
    }

    /// Whether the kernel has a counter of this name.
    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// How much a counter grew since `before`.
    pub fn since(&self, before: &Self, name: &str) -> u64 {
        self.get(name).saturating_sub(before.get(name))
    }
}

/// How much one counter of a netns grew since `before`.
pub(crate) fn grown(netns: &Netns, before: &Counters, name: &str) -> Result<u64> {
    Ok(Counters::read(netns)
        .with_context(|| format!("counter {name}"))?
        .since(before, name))
}

/// Waits until a counter of a netns has grown by so much since `before`, and checks that it did not grow by more.
pub(crate) fn grown_by(netns: &Netns, before: &Counters, name: &str, much: u64) -> Result<()> {
    wait_until(name, || Ok(grown(netns, before, name)? >= much))?;
    let counted = grown(netns, before, name)?;
    ensure!(counted == much, "{name} grew by {counted}, not {much}");
    Ok(())
}

/// A counter of the whole host, in `/proc/net/stat` of the initial namespace.
pub(crate) fn of_host(table: &str, column: &str) -> Result<u64> {
    let path = format!("/proc/net/stat/{table}");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    parse_per_cpu(table, &text)
        .into_iter()
        .find_map(|(name, value)| (name == format!("{table}:{column}")).then_some(value))
        .with_context(|| format!("{path} has no column {column}"))
}

/// Packets that all CPUs found no room for in their receive queues: the second column of `/proc/net/softnet_stat`.
pub(crate) fn softnet_dropped() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/softnet_stat")?;
    let dropped = |line: &str| u64::from_str_radix(line.split_whitespace().nth(1)?, 16).ok();
    Ok(text.lines().filter_map(dropped).sum())
}

/// Pages that all sockets of a protocol (`TCP`, `UDP`) of the host hold.
pub(crate) fn pages(protocol: &str) -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/sockstat")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(protocol)?.strip_prefix(':'));
    line.and_then(|line| line.rsplit_once("mem ")?.1.trim().parse().ok())
        .with_context(|| format!("no memory of {protocol} in {text}"))
}

/// Packets that a device should have sent and dropped (`/proc/net/dev`).
pub(crate) fn tx_dropped(netns: &Netns, device: &str) -> Result<u64> {
    const TX_DROP: usize = 11;
    let text = netns.proc_net("dev")?;
    let line = text
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'));
    line.and_then(|line| line.split_whitespace().nth(TX_DROP)?.parse().ok())
        .with_context(|| format!("/proc/net/dev has no drops of {device}"))
}

/// What stands behind `dropped` in the statistics that `tc` shows of the qdisc or action with these words.
pub(crate) fn tc_dropped(netns: &Netns, show: &str, words: &str) -> Result<u64> {
    let text = netns.run(&format!("tc -s {show}"))?;
    let (_, rest) = text
        .split_once(words)
        .with_context(|| format!("tc shows no {words}: {text}"))?;
    rest.split_once("dropped ")
        .and_then(|(_, rest)| rest.split([',', ' ']).next()?.parse().ok())
        .with_context(|| format!("tc shows no drops of {words}: {text}"))
}

/// Lines in pairs: names, then values, both with the group in front.
fn parse_pairs(text: &str) -> Vec<(String, u64)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for pair in lines.chunks_exact(2) {
        let (Some((group, names)), Some((_, values))) = (pair[0].split_once(':'), pair[1].split_once(':'))
        else {
            continue;
        };
        for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
            if let Ok(value) = value.parse() {
                found.push((format!("{group}{name}"), value));
            }
        }
    }
    found
}

/// One name and value a line.
fn parse_columns(text: &str) -> Vec<(String, u64)> {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(char::is_whitespace)?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        })
        .collect()
}

/// A line of names, then a line of hexadecimal values per CPU; summed.
fn parse_per_cpu(group: &str, text: &str) -> Vec<(String, u64)> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split_whitespace().collect();
    let mut sums = vec![0_u64; names.len()];
    for line in lines {
        for (sum, value) in sums.iter_mut().zip(line.split_whitespace()) {
            *sum += u64::from_str_radix(value, 16).unwrap_or(0);
        }
    }
    names
        .iter()
        .zip(sums)
        .map(|(name, sum)| (format!("{group}:{name}"), sum))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_take_the_group_into_the_name() {
        let text = "TcpExt: SyncookiesSent ListenDrops\nTcpExt: 3 7\nIp: Forwarding DefaultTTL\nIp: 1 64\n";
        assert_eq!(
            parse_pairs(text),
            [
                ("TcpExtSyncookiesSent".to_owned(), 3),
                ("TcpExtListenDrops".to_owned(), 7),
                ("IpForwarding".to_owned(), 1),
                ("IpDefaultTTL".to_owned(), 64),
            ]
        );
    }

    #[test]
    fn columns_are_a_name_and_a_value() {
        assert_eq!(
            parse_columns("Ip6InReceives                   \t12\nIcmp6InMsgs \t0\n"),
            [("Ip6InReceives".to_owned(), 12), ("Icmp6InMsgs".to_owned(), 0)]
        );
    }

    #[test]
    fn per_cpu_values_are_hexadecimal_and_summed() {
        let text =
            "entries  clashres insert_failed\n00000010  00000001 0000000a\n00000010  00000002 00000001\n";
        assert_eq!(
            parse_per_cpu("conntrack", text),
            [
                ("conntrack:entries".to_owned(), 32),
                ("conntrack:clashres".to_owned(), 3),
                ("conntrack:insert_failed".to_owned(), 11),
            ]
        );
    }
}
