//! What a scenario is, and what it is given.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use droptrace::diagnose::{Counts, Direction, Drop, Verdict};
use serde::Serialize;
use serde_json::Value;

use crate::{Netns, Result, sockets::wait_until, trace::Trace};

/// How long a drop may take from the kernel to the totals in an emulated guest.
const SETTLE: Duration = Duration::from_secs(30);
/// How long droptrace may take to notice a new namespace, address or IPVS service.
const KNOWN: Duration = Duration::from_secs(3);
/// How long totals must stay as they are to be believed.
const STILL: Duration = Duration::from_millis(500);

/// One scenario.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Unique name, the cause's slug first.
    pub name: &'static str,
    /// Builds, provokes, checks.
    pub run: fn(&Test) -> Result<Outcome>,
    /// Changes a global setting or depends on timing: nothing else runs meanwhile.
    pub alone: bool,
    /// Stands for its family in a short run.
    pub family: bool,
    /// In which run it has its place.
    pub place: Place,
}

/// In which run a scenario has its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In every whole run.
    Usual,
    /// Takes minutes, most of which it waits: runs only when asked for.
    Long,
    /// Needs a guest with a container runtime: runs only there.
    Pods,
}

impl Scenario {
    /// One that may run beside others.
    pub const fn new(name: &'static str, run: fn(&Test) -> Result<Outcome>) -> Self {
        Self {
            name,
            run,
            alone: false,
            family: false,
            place: Place::Usual,
        }
    }

    /// One that must run alone.
    #[must_use]
    pub const fn alone(mut self) -> Self {
        self.alone = true;
        self
    }

    /// One that stands for its family in a short run.
    #[must_use]
    pub const fn family(mut self) -> Self {
        self.family = true;
        self
    }

    /// One that needs a container runtime, which it has for itself.
    #[must_use]
    pub const fn pods(mut self) -> Self {
        self.place = Place::Pods;
        self.alone = true;
        self
    }

    /// One that takes minutes.
    #[must_use]
    pub const fn long(mut self) -> Self {
        self.place = Place::Long;
        self
    }
}

/// How a scenario ended well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All held; the figures seen.
    Passed(String),
    /// Could not occur here, and why.
    Skipped(String),
}

/// IPv4 or IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpFamily {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Version of the running kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kernel(pub u32, pub u32);

impl Kernel {
    /// The running one.
    pub fn running() -> Result<Self> {
        let release = nix::sys::utsname::uname()?;
        let release = release.release().to_string_lossy();
        Self::parse(&release).with_context(|| format!("kernel release {release}"))
    }

    /// Whether `skb:kfree_skb` gives a reason but not the receiving socket (5.17 - 6.10). Nothing then says which netns a
    /// segment was in that waited for its busy socket: `tcp_add_backlog` (net/ipv4/tcp_ipv4.c) takes its route, and
    /// `tcp_v4_rcv` its device.
    pub fn hides_socket(self) -> bool {
        (Self(5, 17)..Self(6, 11)).contains(&self)
    }

    fn parse(release: &str) -> Option<Self> {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        Some(Self(numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }
}

/// What a scenario expects to be counted in one netns.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Expected {
    netns: u32,
    cause: String,
    verdict: Verdict,
    packets: u64,
}

impl Expected {
    /// This many packets of this cause, dropped.
    pub fn dropped(netns: &Netns, cause: &str, packets: u64) -> Self {
        Self {
            netns: netns.inode(),
            cause: cause.to_owned(),
            verdict: Verdict::Dropped,
            packets,
        }
    }

    /// How many packets.
    pub fn packets(&self) -> u64 {
        self.packets
    }

    /// The same, rejected.
    pub fn rejected(netns: &Netns, cause: &str, packets: u64) -> Self {
        Self {
            verdict: Verdict::Rejected,
            ..Self::dropped(netns, cause, packets)
        }
    }

    /// The same, misdelivered.
    pub fn misdelivered(netns: &Netns, cause: &str, packets: u64) -> Self {
        Self {
            verdict: Verdict::Misdelivered,
            ..Self::dropped(netns, cause, packets)
        }
    }
}

/// Totals by netns, cause and verdict.
type Totals = BTreeMap<(u32, String, Verdict), u64>;

/// Packets of one label in a scenario.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Labelled {
    /// As many were provoked.
    pub expected: u64,
    /// As many droptrace gave the label.
    pub seen: u64,
}

/// What was expected and seen, by the slug of the cause: a row of the confusion matrix.
pub type Labels = BTreeMap<String, Labelled>;

/// What a running scenario holds.
pub struct Test {
    name: String,
    number: u8,
    trace: Option<Arc<Trace>>,
    kernel: Kernel,
    netns: Mutex<Vec<Made>>,
    labels: Mutex<Labels>,
}

struct Made {
    netns: Arc<Netns>,
    /// What was counted under this inode before this netns had it.
    before: Totals,
    benign_before: Totals,
    /// Drops that were said before this netns was made.
    drops_before: usize,
}

impl Test {
    /// For the scenario with this name; `number` makes its addresses its own.
    pub fn new(name: &str, number: u8, trace: Option<Arc<Trace>>) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            number,
            trace,
            kernel: Kernel::running()?,
            netns: Mutex::default(),
            labels: Mutex::default(),
        })
    }

    /// The running kernel.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// The droptrace that all scenarios share; `None` where only the kernel is looked at.
    pub fn trace(&self) -> Option<&Trace> {
        self.trace.as_deref()
    }

    /// Makes a netns whose drops belong to this scenario.
    pub fn netns(&self, role: &str) -> Result<Arc<Netns>> {
        let netns = Arc::new(Netns::new(&format!("{}.{role}", self.name))?);
        let (before, benign_before, drops_before) = match &self.trace {
            Some(trace) => {
                let counts = trace.counts()?;
                (
                    totals(&counts, netns.inode(), false),
                    totals(&counts, netns.inode(), true),
                    trace.look(|so_far| so_far.drops.len()),
                )
            }
            None => Default::default(),
        };
        self.made().push(Made {
            netns: Arc::clone(&netns),
            before,
            benign_before,
            drops_before,
        });
        Ok(netns)
    }

    fn made(&self) -> std::sync::MutexGuard<'_, Vec<Made>> {
        self.netns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Address number `host` in subnet `subnet` of this scenario: `10.N.subnet.host` or `fd00:N:subnet::host`.
    pub fn ip(&self, family: IpFamily, subnet: u8, host: u8) -> IpAddr {
        match family {
            IpFamily::V4 => IpAddr::V4(Ipv4Addr::new(10, self.number, subnet, host)),
            IpFamily::V6 => IpAddr::V6(Ipv6Addr::new(
                0xfd00,
                u16::from(self.number),
                u16::from(subnet),
                0,
                0,
                0,
                0,
                u16::from(host),
            )),
        }
    }

    /// The same with its prefix length, as a device takes it.
    pub fn net(&self, family: IpFamily, subnet: u8, host: u8) -> String {
        let length = match family {
            IpFamily::V4 => 24,
            IpFamily::V6 => 64,
        };
        format!("{}/{length}", self.ip(family, subnet, host))
    }

    /// The same with a port.
    pub fn at(&self, family: IpFamily, subnet: u8, host: u8, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip(family, subnet, host), port)
    }

    /// Waits until droptrace knows the addresses, devices and IPVS services that were just made.
    ///
    /// On a real host they are there long before a packet is lost; droptrace looks for new namespaces once
    /// a second, and at IPVS services every half second.
    pub fn known(&self) {
        if self.trace.is_some() {
            thread::sleep(KNOWN);
        }
    }

    /// Waits until the hooks with these names are attached, such as those of a module that was just loaded.
    pub fn attached(&self, hooks: &[&str]) -> Result<()> {
        let Some(trace) = &self.trace else {
            return Ok(());
        };
        trace
            .wait_for("hooks of a module that was loaded", SETTLE, |so_far| {
                hooks.iter().all(|hook| {
                    so_far.coverage.last().is_some_and(|coverage| {
                        coverage
                            .hooks
                            .iter()
                            .any(|state| state.hook == *hook && state.state == "attached")
                    })
                })
            })
            .with_context(|| format!("hooks {hooks:?}"))
    }

    /// Checks that droptrace counted exactly this, and no other loss, in all netns of this scenario.
    pub fn expect(&self, expected: &[Expected]) -> Result<()> {
        self.expect_but(expected, &[])
    }

    /// The same, but causes named in `beside` may have been counted too (side effects that the scenario cannot number).
    pub fn expect_but(&self, expected: &[Expected], beside: &[&str]) -> Result<()> {
        let Some(trace) = &self.trace else {
            return Ok(());
        };
        let mut wanted = Totals::new();
        for one in expected.iter().filter(|one| one.packets > 0) {
            *wanted
                .entry((one.netns, one.cause.clone(), one.verdict))
                .or_default() += one.packets;
        }
        let until = Instant::now() + SETTLE;
        let mut right_since = None;
        loop {
            let counts = trace.counts()?;
            let mut seen = self.grown(&counts, false);
            self.note_labels(&wanted, &seen);
            seen.retain(|(_, cause, _), _| !beside.contains(&cause.as_str()));
            if seen == wanted {
                let since = *right_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= STILL {
                    return Ok(());
                }
            } else {
                right_since = None;
                if Instant::now() > until {
                    bail!(
                        "totals differ: expected {}, droptrace counted {}{}",
                        self.text(&wanted),
                        self.text(&seen),
                        self.unexpected(&wanted, beside)
                    );
                }
            }
            thread::sleep(Duration::from_millis(150));
        }
    }

    /// Labels as of the last [`Self::expect`], which is about all that the scenario did.
    pub fn labels(&self) -> Labels {
        self.labels.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note_labels(&self, wanted: &Totals, seen: &Totals) {
        let mut labels = Labels::new();
        for ((_, cause, _), packets) in wanted {
            labels.entry(cause.clone()).or_default().expected += packets;
        }
        for ((_, cause, _), packets) in seen {
            labels.entry(cause.clone()).or_default().seen += packets;
        }
        *self.labels.lock().unwrap_or_else(PoisonError::into_inner) = labels;
    }

    /// The same as [`Self::expect`], for causes that only the facts of an event prove. What had to stay open, since the system did not answer in
    /// time, counts for the one loss that is expected in its netns.
    pub fn expect_by_facts(&self, expected: &[Expected]) -> Result<()> {
        let left_open = |netns: u32| -> BTreeMap<String, u64> {
            let mut packets = BTreeMap::new();
            for drop in self.all_drops() {
                let open = matches!(drop.cause.as_str(), "unknown" | "kernel-reason");
                if open && late(&drop) && drop.netns == Some(netns) {
                    *packets.entry(drop.cause.clone()).or_default() += drop.packets;
                }
            }
            packets
        };
        let mut result = Ok(());
        // Those that are late are known once the totals stand still.
        for _ in 0..2 {
            let mut wanted = expected.to_vec();
            for one in expected {
                for (cause, packets) in left_open(one.netns) {
                    if let Some(least) = wanted.iter_mut().find(|each| *each == one) {
                        least.packets = least.packets.saturating_sub(packets);
                    }
                    wanted.push(Expected {
                        cause,
                        verdict: Verdict::Dropped,
                        packets,
                        ..one.clone()
                    });
                }
            }
            result = self.expect(&wanted);
            if result.is_ok() {
                break;
            }
        }
        result
    }

    /// Checks that this many packets of a benign cause were counted in a netns, at least.
    pub fn expect_benign(&self, netns: &Netns, cause: &str, at_least: u64) -> Result<()> {
        let Some(trace) = &self.trace else {
            return Ok(());
        };
        let until = Instant::now() + SETTLE;
        loop {
            let counts = trace.counts()?;
            let seen = self.grown(&counts, true);
            let packets: u64 = seen
                .iter()
                .filter(|((inode, slug, _), _)| *inode == netns.inode() && slug == cause)
                .map(|(_, packets)| packets)
                .sum();
            if packets >= at_least {
                return Ok(());
            }
            ensure!(
                Instant::now() < until,
                "expected at least {at_least} benign {cause}, droptrace counted {packets} (benign: {})",
                self.text(&seen)
            );
            thread::sleep(Duration::from_millis(150));
        }
    }

    /// Waits until droptrace tells of this many packets of a cause from there although the kernel does not say in which netns they
    /// were, as 6.1 does once a packet has given up device and route, and checks that nothing is counted in the netns of this scenario.
    pub fn expect_without_netns(&self, source: IpAddr, cause: &str, packets: u64) -> Result<()> {
        let Some(trace) = &self.trace else {
            return Ok(());
        };
        let told = || -> u64 {
            trace.look(|so_far| {
                let drops = so_far
                    .drops
                    .iter()
                    .filter(|drop| drop.cause == cause && drop.netns.is_none() && drop.src == Some(source));
                drops.map(|drop| drop.packets).sum()
            })
        };
        wait_until(&format!("{packets} {cause} without netns"), || {
            Ok(told() >= packets)
        })?;
        // Where a counter moved in the netns, it must not tell of them once more.
        thread::sleep(Duration::from_secs(4));
        self.expect(&[])?;
        ensure!(
            told() == packets,
            "{} {cause} without netns, not {packets}",
            told()
        );
        Ok(())
    }

    /// Packets of these causes, benign or not, that droptrace counted in a netns of this scenario since it was made.
    pub fn counted(&self, netns: &Netns, causes: &[&str], counts: &Counts) -> u64 {
        [false, true]
            .into_iter()
            .flat_map(|benign| self.grown(counts, benign))
            .filter(|((inode, cause, _), _)| *inode == netns.inode() && causes.contains(&cause.as_str()))
            .map(|(_, packets)| packets)
            .sum()
    }

    /// What was counted in this scenario's netns since they were made.
    fn grown(&self, counts: &Counts, benign: bool) -> Totals {
        let mut grown = Totals::new();
        for made in self.made().iter() {
            let before = if benign { &made.benign_before } else { &made.before };
            for (key, packets) in totals(counts, made.netns.inode(), benign) {
                let since = packets - before.get(&key).copied().unwrap_or(0).min(packets);
                if since > 0 {
                    grown.insert(key, since);
                }
            }
        }
        grown
    }

    fn text(&self, totals: &Totals) -> String {
        if totals.is_empty() {
            return "nothing".to_owned();
        }
        let made = self.made();
        let name = |inode: u32| {
            made.iter()
                .find(|made| made.netns.inode() == inode)
                .and_then(|made| made.netns.name().rsplit('.').next())
                .unwrap_or("?")
                .to_owned()
        };
        let lines: Vec<String> = totals
            .iter()
            .map(|((inode, cause, verdict), packets)| {
                format!("{packets} {cause} {} in {}", verdict.name(), name(*inode))
            })
            .collect();
        lines.join(", ")
    }

    /// The full events that nobody expected, the first one of each kind, to understand a failure.
    fn unexpected(&self, wanted: &Totals, beside: &[&str]) -> String {
        let mut kinds: BTreeMap<String, (u64, Arc<Drop>)> = BTreeMap::new();
        for drop in self.all_drops() {
            let key = (drop.netns.unwrap_or(0), drop.cause.clone(), drop.verdict);
            if !drop.benign && !wanted.contains_key(&key) && !beside.contains(&drop.cause.as_str()) {
                let of = |name: &str| drop.evidence.get(name).map(ToString::to_string);
                let kind = format!("{key:?} {:?} {:?} {:?}", of("reason"), of("location"), drop.flags);
                kinds.entry(kind).or_insert_with(|| (0, Arc::clone(&drop))).0 += 1;
            }
        }
        kinds
            .values()
            .take(8)
            .map(|(count, drop)| {
                let line = serde_json::to_string(&**drop).unwrap_or_default();
                format!("; unexpected, {count} times with a line: {line}")
            })
            .collect::<Vec<_>>()
            .concat()
    }

    /// The last losses with a line, in whatever netns, to understand a failure.
    pub fn last_losses(&self) -> String {
        const LAST: usize = 5;
        self.trace().map_or_else(String::new, |trace| {
            trace.look(|so_far| {
                let losses = so_far.drops.iter().rev().filter(|drop| !drop.benign);
                format!("last drops {:?}", losses.take(LAST).collect::<Vec<_>>())
            })
        })
    }

    fn all_drops(&self) -> Vec<Arc<Drop>> {
        let Some(trace) = &self.trace else {
            return Vec::new();
        };
        let made = self.made();
        trace.look(|so_far| {
            so_far
                .drops
                .iter()
                .enumerate()
                .filter(|(index, drop)| {
                    made.iter()
                        .any(|made| *index >= made.drops_before && drop.netns == Some(made.netns.inode()))
                })
                .map(|(_, drop)| Arc::clone(drop))
                .collect()
        })
    }

    /// Full events of a cause in a netns, so far.
    pub fn drops(&self, netns: &Netns, cause: &str) -> Vec<Arc<Drop>> {
        self.all_drops()
            .into_iter()
            .filter(|drop| drop.netns == Some(netns.inode()) && drop.cause == cause)
            .collect()
    }

    /// Waits for a full event of a cause that is wanted and checks what every drop must have: netns and its
    /// name, addresses, a remedy; `None` where only the kernel is looked at.
    pub fn drop_where(
        &self,
        netns: &Netns,
        cause: &str,
        wanted: impl Fn(&Drop) -> bool,
    ) -> Result<Option<Seen>> {
        if self.trace.is_none() {
            return Ok(None);
        }
        let until = Instant::now() + SETTLE;
        loop {
            let drops = self.drops(netns, cause);
            // Of equal events the one that droptrace knows most of.
            if let Some(drop) = drops
                .iter()
                .filter(|drop| wanted(drop))
                .min_by_key(|drop| drop.missing.len())
            {
                let seen = Seen(Arc::clone(drop));
                seen.complete(netns)?;
                return Ok(Some(seen));
            }
            ensure!(
                Instant::now() < until,
                "no full event of {cause} in {} as wanted; {} others: {}",
                netns.name(),
                drops.len(),
                drops
                    .first()
                    .and_then(|drop| serde_json::to_string(&**drop).ok())
                    .unwrap_or_default()
            );
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits for a full event of a cause.
    pub fn drop(&self, netns: &Netns, cause: &str) -> Result<Option<Seen>> {
        self.drop_where(netns, cause, |_| true)
    }
}

/// A labelled drop under test.
#[derive(Clone, Debug)]
pub struct Seen(pub Arc<Drop>);

impl Seen {
    fn complete(&self, netns: &Netns) -> Result<()> {
        let drop = &*self.0;
        ensure!(
            drop.netns_name.as_deref() == Some(netns.name()) || drop.netns_name.is_none() && self.late(),
            "netns_name is {:?}, not {}: {self}",
            drop.netns_name,
            netns.name()
        );
        ensure!(drop.ktime_ns > 0 && !drop.time.is_empty(), "no time: {self}");
        ensure!(drop.src.is_some() && drop.dst.is_some(), "no addresses: {self}");
        ensure!(drop.benign || !drop.remedy.is_empty(), "no remedy: {self}");
        Ok(())
    }

    /// Whether droptrace says that the system did not answer in time. A busy emulated guest may need longer
    /// than an event waits for its facts; what was asked for is null then, with this reason.
    fn late(&self) -> bool {
        late(&self.0)
    }

    /// Checks an evidence field.
    pub fn evidence(self, name: &str, expected: impl Into<Value>) -> Result<Self> {
        let expected = expected.into();
        let seen = self.0.evidence.get(name);
        ensure!(
            seen == Some(&expected) || seen == Some(&Value::Null) && self.late(),
            "evidence {name} is {}, not {expected}: {self}",
            seen.map_or_else(|| "missing".to_owned(), ToString::to_string)
        );
        Ok(self)
    }

    /// Checks that an evidence field is there and not null.
    pub fn has_evidence(self, name: &str) -> Result<Self> {
        ensure!(
            self.0
                .evidence
                .get(name)
                .is_some_and(|value| !value.is_null() || self.late()),
            "no evidence {name}: {self}"
        );
        Ok(self)
    }

    /// Checks that some remedy says this.
    pub fn remedy_says(self, words: &str) -> Result<Self> {
        ensure!(
            self.late()
                || self.0.remedy.iter().any(|remedy| {
                    remedy.action.contains(words)
                        || remedy.effect.contains(words)
                        || remedy
                            .command
                            .as_ref()
                            .is_some_and(|command| command.contains(words))
                }),
            "no remedy says `{words}`: {self}"
        );
        Ok(self)
    }

    /// Checks that no remedy's action or command says this.
    pub fn remedy_does_not_say(self, words: &str) -> Result<Self> {
        ensure!(
            !self.0.remedy.iter().any(|remedy| {
                remedy.action.contains(words)
                    || remedy
                        .command
                        .as_ref()
                        .is_some_and(|command| command.contains(words))
            }),
            "a remedy says `{words}`: {self}"
        );
        Ok(self)
    }

    /// Checks source and destination; a port of 0 is not looked at.
    pub fn goes(self, src: SocketAddr, dst: SocketAddr) -> Result<Self> {
        let drop = &self.0;
        let port = |wanted: u16, seen: Option<u16>| wanted == 0 || seen == Some(wanted);
        ensure!(
            drop.src == Some(src.ip())
                && drop.dst == Some(dst.ip())
                && port(src.port(), drop.sport)
                && port(dst.port(), drop.dport),
            "not from {src} to {dst}: {self}"
        );
        Ok(self)
    }

    /// Checks which way it went.
    pub fn direction(self, direction: Direction) -> Result<Self> {
        ensure!(
            self.0.direction == Some(direction),
            "direction is not {direction:?}: {self}"
        );
        Ok(self)
    }

    /// Checks the interface.
    pub fn interface(self, name: &str) -> Result<Self> {
        ensure!(
            self.0.interface.as_deref() == Some(name) || self.0.interface.is_none() && self.late(),
            "interface is not {name}: {self}"
        );
        Ok(self)
    }

    /// Checks the TCP flags.
    pub fn flags(self, flags: &str) -> Result<Self> {
        ensure!(
            self.0.flags.as_deref() == Some(flags),
            "flags are not {flags}: {self}"
        );
        Ok(self)
    }

    /// Checks the counter that it is reconciled with.
    pub fn counter(self, counter: &str) -> Result<Self> {
        ensure!(
            self.0
                .counter
                .as_deref()
                .is_some_and(|name| name.contains(counter)),
            "counter is not {counter}: {self}"
        );
        Ok(self)
    }

    /// Checks that the owner is this process.
    pub fn owned_here(self) -> Result<Self> {
        let owner = self.0.owner.as_ref().map(|owner| owner.pid);
        ensure!(
            owner == Some(std::process::id()) || owner.is_none() && self.late(),
            "the owner is {owner:?}, not this process ({}): {self}",
            std::process::id()
        );
        Ok(self)
    }
}

/// Whether an event had to go without a fact, since the system did not answer in time.
pub fn late(drop: &Drop) -> bool {
    drop.missing
        .values()
        .any(|reason| reason.contains("no answer within"))
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&serde_json::to_string(&*self.0).map_err(|_| std::fmt::Error)?)
    }
}

fn totals(counts: &Counts, netns: u32, benign: bool) -> Totals {
    let mut totals = Totals::new();
    for count in &counts.causes {
        if count.netns == netns && count.benign == benign {
            *totals
                .entry((netns, count.cause.clone(), count.verdict))
                .or_default() += count.packets;
        }
    }
    totals
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_versions_order() {
        assert_eq!(Kernel::parse("5.10.0-32-cloud-amd64"), Some(Kernel(5, 10)));
        assert_eq!(Kernel::parse("7.3.4+deb14-cloud-amd64"), Some(Kernel(7, 3)));
        assert!(Kernel(5, 10) < Kernel(6, 1));
        assert!(Kernel(6, 12) > Kernel(6, 1));
        assert!(
            Kernel(6, 1).hides_socket() && !Kernel(5, 10).hides_socket() && !Kernel(6, 12).hides_socket()
        );
    }
}
