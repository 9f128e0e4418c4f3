//! The form of a cause, and the two uses of the catalogue: a count key names
//! its cause, an event becomes a labelled drop.

use std::cell::Cell;

use droptrace_common::{CountKey, FieldId, Site, bits, route};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Direction, Drop, Evidence, Facts, FoundBy, RawEvent, Remedy, Verdict,
    causes::{ALL, IPVS_TIMEWAIT_REUSE, UNKNOWN, settled_site},
    record,
};

/// Groups of causes, as `explain` lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// Listening sockets.
    Listener,
    /// TIME_WAIT, PAWS and old sequence numbers.
    TimeWait,
    /// Source validation.
    SourceCheck,
    /// Connection tracking.
    Conntrack,
    /// IPVS.
    Ipvs,
    /// Netfilter rules.
    Netfilter,
    /// Routing and neighbours.
    Routing,
    /// Sockets.
    Socket,
    /// Devices, their queues, programs, and the headers of packets.
    Device,
    /// What is freed although nothing was lost.
    Benign,
    /// What the catalogue does not explain.
    Other,
}

/// Whether a total is counted by the kernel, or split by what full events told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Counted by the kernel.
    Exact,
    /// The sum with the sister cause is exact; the split is known from full events only.
    Sampled,
}

impl Split {
    /// The word in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Sampled => "sampled",
        }
    }
}

/// A kernel counter that a cause adds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// As `nstat` prints it (`TcpExtListenOverflows`), or file and column.
    pub name: &'static str,
}

/// Something that context must find out before a cause can be diagnosed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    /// [`Facts::listener`]: the listener at the packet's destination address and port.
    Listener,
    /// [`Facts::owner`]: the process that owns the local socket of the packet.
    Owner,
    /// [`Facts::socket`], and [`Facts::owner`]: the local socket of the packet.
    Socket,
    /// [`Facts::cgroup_programs`].
    CgroupPrograms,
    /// [`Facts::progress`]: of the owner of the listener, else of the packet's socket.
    Progress,
    /// [`Facts::source_holder`].
    SourceHolder,
    /// [`Facts::destination_holder`].
    DestinationHolder,
    /// [`Facts::reverse_route`].
    ReverseRoute,
    /// [`Facts::route`].
    Route,
    /// [`Facts::ipvs_services`].
    IpvsServices,
    /// [`Facts::conntrack`].
    Conntrack,
    /// [`Facts::memory_pages`].
    MemoryPages,
    /// [`Facts::rules`]: the rules that can have ended the packet.
    Rules,
    /// [`Facts::queues`].
    Queues,
    /// [`Facts::link`]: the device that the packet is on.
    Link,
    /// [`Facts::nic`].
    Nic,
    /// [`Facts::neighbour_table`].
    NeighbourTable,
    /// [`Facts::sysctls`]: this name; `{device}` stands for the device that the packet came by, else for the one that it
    /// is on, `{on}` for the one that it is on, `{ip}` for `ipv4` or `ipv6`.
    Sysctl(&'static str),
    /// The same of the initial netns, for settings that no other has.
    HostSysctl(&'static str),
    /// [`Facts::location`] and [`Facts::frames`], beyond what the rule asks: the kernel's symbols name them, nobody is asked.
    Symbols,
}

impl Need {
    /// Whether it is about the whole host, not about one netns.
    pub const fn is_of_host(self) -> bool {
        matches!(self, Self::MemoryPages | Self::HostSysctl(_))
    }

    /// Whether it takes the kernel's symbols: which rules can have ended a packet is told by the place of its free.
    const fn is_of_symbols(self) -> bool {
        matches!(self, Self::Symbols | Self::Rules)
    }
}

/// A location that is every one: for the question what drops with a reason may be.
pub(super) const ANYWHERE: &str = "*";

/// The symbol that freed a packet.
#[derive(Clone, Copy, Debug)]
pub enum Location<'a> {
    /// This one, without compiler suffixes such as `.constprop.0`; `None`: the packet was not freed, or it has no name.
    Known(Option<&'a str>),
    /// It has no name yet. Whoever asks is told so, and is noted here.
    Awaited(&'a Cell<bool>),
}

/// What a count key and an event alike tell of a drop.
#[derive(Clone, Copy, Debug)]
pub struct Signature<'a> {
    /// The hook or branch.
    pub site: Site,
    /// Name of the kernel's drop reason, without its prefix; `None` on kernels without reasons.
    pub reason: Option<&'a str>,
    /// Where the packet was freed.
    pub location: Location<'a>,
    /// See [`droptrace_common::bits`].
    pub bits: u32,
}

impl<'a> Signature<'a> {
    /// Of an event.
    pub fn of_event(event: &RawEvent, facts: &'a Facts) -> Self {
        Self {
            site: event.site,
            reason: facts.reason.as_deref(),
            location: Location::Known(facts.location.as_deref().map(plain_symbol)),
            bits: event.header.bits,
        }
        .settled()
    }

    /// Of a count key; the names are resolved by the caller, who knows the kernel.
    pub fn of_key(key: &CountKey, reason: Option<&'a str>, location: Option<&'a str>) -> Self {
        Self {
            site: Site::from_number(key.site).unwrap_or(Site::Free),
            reason,
            location: Location::Known(location.map(plain_symbol)),
            bits: key.bits,
        }
        .settled()
    }

    /// Some sites say something only together with the place of the free.
    pub(super) fn settled(mut self) -> Self {
        self.site = settled_site(&self);
        self
    }

    /// Whether all these bits are set.
    pub fn has(&self, wanted: u32) -> bool {
        self.bits & wanted == wanted
    }

    /// Symbol that freed the packet, as far as it is known.
    pub fn place(&self) -> Option<&'a str> {
        match self.location {
            Location::Known(location) => location,
            Location::Awaited(asked) => {
                asked.set(true);
                None
            }
        }
    }

    /// Whether the packet was freed by one of these functions.
    pub fn at(&self, symbols: &[&str]) -> bool {
        self.place()
            .is_some_and(|location| location == ANYWHERE || symbols.contains(&location))
    }

    /// Whether the kernel gives this reason.
    pub fn because(&self, reasons: &[&str]) -> bool {
        self.reason.is_some_and(|reason| reasons.contains(&reason))
    }

    /// Whether the kernel gives no reason: it has none, or says NOT_SPECIFIED.
    pub fn unspecified(&self) -> bool {
        self.reason.is_none_or(|reason| reason == "NOT_SPECIFIED")
    }
}

/// A symbol without what the compiler appended (`ip_rcv_finish_core.constprop.0`).
fn plain_symbol(symbol: &str) -> &str {
    symbol.split('.').next().unwrap_or(symbol)
}

/// What a cause makes of one drop.
#[derive(Clone, Debug, Default)]
pub struct Finding {
    /// Typed values, named as in [`Cause::evidence`].
    pub evidence: Evidence,
    /// What to change, made from the drop's own values.
    pub remedy: Vec<Remedy>,
    /// The owner of the socket in question, where the cause knows it better than [`Facts::owner`].
    pub owner: Option<super::Owner>,
    /// The counter that counts this drop.
    pub counter: CountedBy,
}

/// Which kernel counter counts one drop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CountedBy {
    /// That of the cause: it has one, or the drop does not tell which of several.
    #[default]
    Cause,
    /// This one.
    Named(&'static str),
    /// None.
    Nothing,
}

impl Finding {
    /// Adds a value.
    pub fn put(&mut self, name: &str, value: impl Into<serde_json::Value>) -> &mut Self {
        self.evidence.insert(name.to_owned(), value.into());
        self
    }

    /// Adds something to do.
    pub fn advise(
        &mut self,
        action: impl Into<String>,
        command: Option<String>,
        effect: impl Into<String>,
    ) -> &mut Self {
        self.remedy.push(Remedy {
            action: action.into(),
            command,
            effect: effect.into(),
        });
        self
    }
}

/// A root cause: everything about it is here.
pub struct Cause {
    /// Short name in the field's terms.
    pub slug: &'static str,
    /// Group.
    pub family: Family,
    /// The cause in a few words.
    pub title: &'static str,
    /// What the kernel does and why, in plain words, with the source (function, version).
    pub mechanism: &'static str,
    /// Each evidence field: name, and what it means with its unit.
    pub evidence: &'static [(&'static str, &'static str)],
    /// What to do, in general.
    pub remedy: &'static str,
    /// Counter that it is reconciled with.
    pub counter: Option<Counter>,
    /// Not a loss.
    pub benign: bool,
    /// What context must find out.
    pub needs: &'static [Need],
    /// Whether a count key or event is this cause; the first match in the catalogue wins.
    pub matches: fn(&Signature<'_>) -> bool,
    /// What became of the packets.
    pub verdict: fn(&Signature<'_>) -> Verdict,
    /// Evidence and remedy of one drop.
    pub find: fn(&RawEvent, &Facts) -> Finding,
    /// A sister cause that only the full event tells apart.
    pub refine: Option<fn(&RawEvent, &Facts) -> Option<&'static Self>>,
}

impl std::fmt::Debug for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Cause").field(&self.slug).finish()
    }
}

impl PartialEq for Cause {
    fn eq(&self, other: &Self) -> bool {
        self.slug == other.slug
    }
}

/// Every cause, in the order in which they are asked.
pub fn catalogue() -> &'static [&'static Cause] {
    ALL
}

/// The cause with this slug.
pub fn cause_by_slug(slug: &str) -> Option<&'static Cause> {
    ALL.iter().copied().find(|cause| cause.slug == slug)
}

/// The one cause of a count key or event.
pub fn classify(signature: &Signature<'_>) -> &'static Cause {
    ALL.iter()
        .copied()
        .find(|cause| (cause.matches)(signature))
        .unwrap_or(&UNKNOWN)
}

/// Whether it takes the kernel's symbols to label an event with this reason, or to say what is known of it. Where no rule
/// asks for the place on the way to a cause, the event is that cause wherever it was freed.
pub fn rests_on_symbols(event: &RawEvent, reason: Option<&str>) -> bool {
    if event.header.location == 0 && event.field(FieldId::Frame).is_none() {
        return false;
    }
    let asked = Cell::new(false);
    let signature = Signature {
        site: event.site,
        reason,
        location: Location::Awaited(&asked),
        bits: event.header.bits,
    }
    .settled();
    let cause = classify(&signature);
    let _ = (cause.verdict)(&signature);
    // What a sister rests on is known only once it is told from this one.
    asked.get() || cause.refine.is_some() || cause.needs.iter().any(|need| need.is_of_symbols())
}

/// Labels an event.
pub fn diagnose(event: &RawEvent, facts: &Facts) -> Drop {
    let signature = Signature::of_event(event, facts);
    let parent = classify(&signature);
    let cause = parent
        .refine
        .and_then(|refine| refine(event, facts))
        .unwrap_or(parent);
    let found = (cause.find)(event, facts);
    let packet = event.parse();
    let header = &event.header;
    Drop {
        time: rfc3339(facts.time_ns),
        ktime_ns: header.ktime_ns,
        verdict: (cause.verdict)(&signature),
        cause: cause.slug.to_owned(),
        title: cause.title.to_owned(),
        benign: cause.benign,
        found_by: found_by(event),
        packets: if header.briefly == 0 {
            1 + u64::from(header.skipped)
        } else {
            1
        },
        netns: (header.netns != 0).then_some(header.netns),
        netns_name: facts.netns_name.clone(),
        pod: facts.pod.clone(),
        container: facts.container.clone(),
        interface: facts.devices.get(&header.ifindex).cloned(),
        direction: direction(event),
        src: packet.src,
        dst: packet.dst,
        src_name: facts.src_name.clone(),
        dst_name: facts.dst_name.clone(),
        sport: packet.sport,
        dport: packet.dport,
        protocol: packet
            .protocol_name()
            .or_else(|| record::ethertype(header.protocol)),
        flags: packet.tcp.map(super::Tcp::flags_text),
        length: header.len,
        owner: found.owner.or_else(|| facts.owner.clone()),
        counter: match found.counter {
            CountedBy::Cause => cause.counter.map(|counter| counter.name.to_owned()),
            CountedBy::Named(name) => Some(name.to_owned()),
            CountedBy::Nothing => None,
        },
        evidence: found.evidence,
        remedy: found.remedy,
        died_as: None,
        missing: facts.missing.clone(),
    }
}

/// Makes the later end of a packet that was reported when IPVS sent it astray what it is: no second drop, but news of
/// the first. It stands for no packet, and says what the packet died of.
pub fn join_misdelivered(drop: &mut Drop) {
    let cause = &IPVS_TIMEWAIT_REUSE;
    drop.died_as = Some(std::mem::replace(&mut drop.cause, cause.slug.to_owned()));
    cause.title.clone_into(&mut drop.title);
    drop.verdict = Verdict::Misdelivered;
    drop.packets = 0;
    drop.counter = None;
    drop.remedy.clear();
}

fn found_by(event: &RawEvent) -> FoundBy {
    match event.site {
        Site::Counter => FoundBy::Counter,
        _ if event.header.location != 0 => FoundBy::KfreeSkb,
        _ => FoundBy::Hook,
    }
}

/// Which way the packet went, by the device that it came by (`skb_iif`) and its route; `None` where they do not tell.
pub(super) fn direction(event: &RawEvent) -> Option<Direction> {
    let (iif, route) = (event.header.iif, event.field(FieldId::Route));
    if event.has(bits::NO_PROTOCOL) {
        None
    } else if matches!(
        event.site,
        Site::PawsEstablished | Site::TcpOutOfWindow | Site::TcpChallengeAck
    ) {
        // Its headers are made from the socket, which does not know the device.
        Some(Direction::In)
    } else if iif == 0 {
        // A packet that no receive function has seen yet has no device either, but then neither route nor socket.
        (route.is_some() || event.field(FieldId::SocketState).is_some()).then_some(Direction::Out)
    } else {
        match route {
            // IPv6 has one route to a multicast address for both ways: what is received is still on the device that it came by.
            Some(route::ELSEWHERE) if event.has(bits::MULTICAST) && event.header.ifindex == iif => {
                Some(Direction::In)
            }
            Some(route::ELSEWHERE) => Some(Direction::Forward),
            Some(_) => Some(Direction::In),
            // A route is not looked up yet, or given up already on the way out.
            None => (event.header.ifindex == iif).then_some(Direction::In),
        }
    }
}

/// RFC 3339 with nanoseconds, UTC.
pub(crate) fn rfc3339(nanoseconds: i128) -> String {
    jiff::Timestamp::from_nanosecond(nanoseconds).map_or_else(|_| String::new(), |time| format!("{time:.9}"))
}
