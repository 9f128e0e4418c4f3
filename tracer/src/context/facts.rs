//! Gathers what a cause needs to know about the surroundings of an event.

use std::{collections::BTreeMap, future::Future, net::SocketAddr, time::Duration};

use droptrace_common::{FieldId, Site, bits};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{
    cgroups::Cgroup,
    clock,
    questions::{Answer, Asked, Question, Reply},
    runtime::Named,
    sockets,
    state::Shared,
    sysctls,
};
use crate::diagnose::{Facts, Need, Owner, Packet, RawEvent, RuleEnd};

/// An event waits this long for its facts; what is unknown then stays unknown.
pub const PATIENCE: Duration = Duration::from_millis(250);
/// How long an event may take from the kernel to here, with which another one's count is compared.
const OTHERS: Duration = Duration::from_millis(20);

/// A CPU limit is looked at for as long: its period is a tenth of a second by default.
const LOOK: Duration = Duration::from_millis(110);
/// What is left of [`PATIENCE`] for the second look.
const LAST_QUESTION: Duration = Duration::from_millis(30);

/// One event's gathering.
struct Gathering {
    shared: std::sync::Arc<Shared>,
    deadline: Instant,
    /// In a box, as a future has room for every place that its values go through.
    facts: Box<Facts>,
    /// When and how a rule ended the packet, where that is asked.
    rule_end: Option<(u64, RuleEnd)>,
    /// Of the listener, else of the packet's socket.
    inode: Option<u64>,
    /// Number of the socket's cgroup.
    cgroup: Option<u64>,
}

/// Gathers; the future waits only for what is not known already.
pub(super) fn gather(
    shared: std::sync::Arc<Shared>,
    event: &RawEvent,
    known: Facts,
    needs: &[Need],
) -> impl Future<Output = Box<Facts>> + Send + 'static {
    let event = event.clone();
    let needs = needs.to_vec();
    let mut gathering = Gathering {
        shared,
        deadline: Instant::now() + PATIENCE,
        facts: Box::new(Facts {
            time_ns: clock::wall_time_ns(event.header.ktime_ns),
            netns: event.header.netns,
            ..known
        }),
        rule_end: None,
        inode: None,
        cgroup: None,
    };
    async move {
        gathering.run(&event, &needs).await;
        gathering.take_names(&event);
        gathering.facts
    }
}

impl Gathering {
    async fn run(&mut self, event: &RawEvent, needs: &[Need]) {
        self.facts.hz = self.shared.hz;
        if self.facts.hz.is_none() {
            self.miss("hz", "the coarse clock does not tell the kernel's tick");
        }
        let netns = event.header.netns;
        let packet = event.parse();
        let (of_host, of_netns): (Vec<Need>, Vec<Need>) =
            needs.iter().copied().partition(|need| need.is_of_host());
        let mut questions = self.look_at_host(&of_host, netns, &packet);
        let nowhere = self.nowhere(netns).await;
        if let Some(reason) = &nowhere {
            self.miss("netns_name", reason.clone());
            self.miss_all(&of_netns, reason);
        } else {
            questions.extend(self.look(event, &packet, &of_netns));
        }
        // All are asked before the first is waited for.
        let asked: Vec<_> = questions
            .into_iter()
            .map(|(name, question)| {
                let asked = self.shared.ask(&question);
                (name, question, asked)
            })
            .collect();
        for (name, question, asked) in asked {
            let reply = self.wait(asked).await;
            self.take(name, &question, reply).await;
        }
        if nowhere.is_some() {
            return;
        }
        if needs.contains(&Need::CgroupPrograms) {
            self.look_at_cgroup(event).await;
        }
        if needs.contains(&Need::Progress) {
            self.look_at_owner(event).await;
        }
    }

    /// Takes the names of pods and containers: last, since a new one may have become known meanwhile.
    fn take_names(&mut self, event: &RawEvent) {
        let names = self.shared.names();
        if names.is_empty() {
            return;
        }
        let netns = event.header.netns;
        let packet = event.parse();
        let state = self.shared.state();
        let here = names.of_netns(netns);
        // Elsewhere than on the host and among pods, the same addresses may be others'.
        let among_pods = here.is_some() || state.initial_netns() == Some(netns);
        let known = state.namespaces.get(&netns);
        let name = |address: Option<std::net::IpAddr>| {
            let address = address?;
            let own = known.is_some_and(|known| known.addresses.holder(address).is_some());
            let named = match (own, among_pods) {
                (true, _) => here,
                (false, true) => names.of_address(address),
                (false, false) => None,
            };
            named.and_then(Named::one).cloned()
        };
        self.facts.src_name = name(packet.src);
        self.facts.dst_name = name(packet.dst);
        if let Some(here) = here {
            self.facts.pod.clone_from(&here.pod);
            self.facts.container.clone_from(&here.container);
        }
    }

    /// Asks which programs look at the socket's packets: by its cgroup, else by that of its owner.
    async fn look_at_cgroup(&mut self, event: &RawEvent) {
        let owner = self
            .facts
            .owner
            .as_ref()
            .map(|owner| Cgroup::OfProcess(owner.pid));
        let Some(cgroup) = self.cgroup.map(Cgroup::Number).or(owner) else {
            return self.miss("cgroup_programs", "the cgroup of the socket is not known");
        };
        let question = Question::CgroupPrograms {
            netns: event.header.netns,
            cgroup,
        };
        match self.reply(question).await {
            Ok(Answer::CgroupPrograms(programs)) => self.facts.cgroup_programs = Some(programs),
            Ok(_) => {}
            Err(reason) => self.miss("cgroup_programs", reason),
        }
    }

    /// Asks how the owner of the listener or socket gets on; one with a CPU limit or a thread in state D is looked at twice.
    async fn look_at_owner(&mut self, event: &RawEvent) {
        let netns = event.header.netns;
        let owner = match &self.facts.listener {
            Some(listener) => listener.owner.as_ref(),
            None => self.facts.owner.as_ref(),
        };
        let (Some(pid), Some(inode)) = (owner.map(|owner| owner.pid), self.inode) else {
            return self.miss("progress", "the owner is not known");
        };
        let asked = self.reply(Question::Progress { netns, pid, inode }).await;
        let (mut progress, blocked, when) = match asked {
            Ok(Answer::Progress(progress, blocked, when)) => (progress, blocked, when),
            Ok(_) => return,
            Err(reason) => return self.miss("progress", reason),
        };
        if progress.cpu_limit.is_some() || progress.blocked > 0 {
            sleep_until((Instant::from_std(when) + LOOK).min(self.deadline - LAST_QUESTION)).await;
        }
        // Many a thread is in state D for a moment.
        if progress.blocked > 0 {
            let threads = blocked;
            progress.blocked = match self.reply(Question::Blocked { netns, threads }).await {
                Ok(Answer::Blocked(still)) => still,
                Ok(_) => 0,
                Err(reason) => {
                    self.miss("blocked_threads", reason);
                    0
                }
            };
        }
        if let Some(limit) = &progress.cpu_limit {
            let cgroup = limit.cgroup.clone();
            match self.reply(Question::Throttled { netns, cgroup }).await {
                Ok(Answer::Throttled(now)) => {
                    progress.throttled = Some(now.saturating_sub(limit.throttled));
                }
                Ok(_) => {}
                Err(reason) => self.miss("throttled", reason),
            }
        }
        self.facts.progress = Some(progress);
    }

    /// Takes what context holds already, and lists what must be asked: the field's name and the question.
    fn look(&mut self, event: &RawEvent, packet: &Packet, needs: &[Need]) -> Vec<(String, Question)> {
        let header = &event.header;
        let netns = header.netns;
        let mut questions = Vec::new();
        let shared = self.shared.clone();
        let mut state = shared.state();
        let Some(known) = state.namespaces.get_mut(&netns) else {
            drop(state);
            self.miss_all(needs, "the netns vanished");
            return questions;
        };
        self.facts.netns_name.clone_from(&known.name);
        let martian = event.field(FieldId::MartianIfindex).unwrap_or(0) as u32;
        let neighbour = event.field(FieldId::NeighbourIfindex).unwrap_or(0) as u32;
        for ifindex in [header.ifindex, header.iif, martian, neighbour] {
            if let Some(device) = known.addresses.device(ifindex) {
                self.facts.devices.insert(ifindex, device.name.clone());
            }
        }
        let came_by = [martian, header.iif, header.ifindex]
            .into_iter()
            .find(|&index| index != 0);
        let local = |address| known.addresses.holder(address).is_some();
        let mut missing = Vec::new();
        for need in needs {
            match need {
                // A counter may be about one of several.
                Need::Listener if event.all(FieldId::ListenerPort).count() > 1 => {
                    missing.push(("listener", "several listeners are over their limit"));
                }
                Need::Listener => match (listener_address(event, packet), listener_port(event, packet)) {
                    (Some(to), Some(port)) => questions.push((
                        "listener".to_owned(),
                        Question::Listener {
                            netns,
                            to,
                            port,
                            ifindex: came_by.unwrap_or(0),
                            inode: event.field(FieldId::ListenerInode).filter(|&inode| inode != 0),
                        },
                    )),
                    _ if event.site == Site::Counter => {
                        missing.push((
                            "listener",
                            "no listener was over its limit when the counter was read",
                        ));
                    }
                    _ => missing.push(("listener", "the packet has no destination port")),
                },
                Need::Owner if event.site == Site::Counter => {
                    missing.push(("owner", "a counter does not tell of which connection it was"));
                }
                Need::Owner => {
                    let inode = event.field(FieldId::SocketInode).filter(|&inode| inode != 0);
                    let question = match inode {
                        Some(inode) => Ok(Question::Process { netns, inode }),
                        None => socket(event, packet, came_by.unwrap_or(0), local),
                    };
                    match question {
                        Ok(question) => questions.push(("owner".to_owned(), question)),
                        Err(reason) => missing.push(("owner", reason)),
                    }
                }
                Need::Socket => {
                    if let Some(inode) = event.field(FieldId::SocketInode).filter(|&inode| inode != 0) {
                        questions.push(("owner".to_owned(), Question::Process { netns, inode }));
                    }
                    match socket(event, &sockets::as_raw(*packet), came_by.unwrap_or(0), local) {
                        Ok(question) => questions.push(("socket".to_owned(), question)),
                        Err(reason) => missing.push(("socket", reason)),
                    }
                }
                // Once the owner is known; of the host.
                Need::Progress
                | Need::CgroupPrograms
                | Need::MemoryPages
                | Need::HostSysctl(_)
                | Need::Symbols => {}
                Need::SourceHolder => match packet.src {
                    Some(source) => self.facts.source_holder = Some(known.addresses.holder(source)),
                    None => missing.push(("source_holder", "the packet has no source address")),
                },
                Need::DestinationHolder => match packet.dst {
                    Some(destination) => {
                        self.facts.destination_holder = Some(known.addresses.holder(destination));
                    }
                    None => missing.push(("destination_holder", "the packet has no destination address")),
                },
                Need::ReverseRoute => match packet.src {
                    Some(to) => questions.push((
                        "reverse_route".to_owned(),
                        Question::Route {
                            netns,
                            to,
                            from: packet.dst.filter(|&address| local(address)),
                            iif: None,
                        },
                    )),
                    None => missing.push(("reverse_route", "the packet has no source address")),
                },
                Need::Route => match packet.dst {
                    Some(to) => {
                        let iif = Some(header.iif).filter(|&index| index != 0);
                        let from = packet.src.filter(|&address| iif.is_some() || local(address));
                        questions.push(("route".to_owned(), Question::Route { netns, to, from, iif }));
                    }
                    None => missing.push(("route", "the packet has no destination address")),
                },
                Need::IpvsServices => match packet.dst {
                    Some(address) => {
                        questions.push(("ipvs_services".to_owned(), Question::Services { netns, address }));
                    }
                    None => missing.push(("ipvs_services", "the packet has no destination address")),
                },
                Need::Conntrack => questions.push(("conntrack".to_owned(), Question::Conntrack { netns })),
                Need::Link => match [header.ifindex, header.iif].into_iter().find(|&index| index != 0) {
                    Some(index) => questions.push(("link".to_owned(), Question::Link { netns, index })),
                    None => missing.push(("link", "the device is not known")),
                },
                Need::Nic => questions.push((
                    "nic".to_owned(),
                    Question::Nic {
                        netns,
                        index: header.ifindex,
                    },
                )),
                Need::NeighbourTable => match packet.dst {
                    Some(to) => {
                        let family = super::netlink::family(to);
                        let question = Question::NeighbourTable { netns, family };
                        questions.push(("neighbour_table".to_owned(), question));
                    }
                    None => missing.push(("neighbour_table", "the packet has no destination address")),
                },
                Need::Queues => questions.push(("queues".to_owned(), Question::Queues { netns })),
                Need::Rules => {
                    if let Some(end) = RuleEnd::of(event, &self.facts) {
                        let packets = 1 + u64::from(header.skipped);
                        known.rules.note(header.ktime_ns, end, packets);
                        self.rule_end = Some((header.ktime_ns, end));
                        questions.push(("rules".to_owned(), Question::Rulesets { netns }));
                        let v6 = packet.dst.is_some_and(|address| address.is_ipv6());
                        self.facts.out_has_address = Some(known.addresses.has_address(header.ifindex, v6));
                    }
                }
                Need::Sysctl(name) => {
                    let device = |index| known.addresses.device(index).map(|device| device.name.as_str());
                    let resolved = sysctls::resolve(name, |word| match word {
                        "{device}" => came_by.and_then(device),
                        "{on}" => device(header.ifindex),
                        "{ip}" => packet.dst.map(|to| if to.is_ipv6() { "ipv6" } else { "ipv4" }),
                        _ => None,
                    });
                    match resolved {
                        Some((name, path)) => questions.push((name, Question::Sysctl { netns, path })),
                        None => missing.push((name, "the device is not known")),
                    }
                }
            }
        }
        drop(state);
        for (name, reason) in missing {
            self.miss(name, reason);
        }
        questions
    }

    /// Why nothing can be asked of this netns, if so.
    async fn nowhere(&self, netns: u32) -> Option<String> {
        if netns == 0 {
            Some("the kernel does not say in which netns".to_owned())
        } else if self.shared.knows(netns) {
            None
        } else {
            self.reply(Question::Netns(netns)).await.err()
        }
    }

    /// Lists what must be asked of the whole host: it is known even where the packet's netns is not.
    fn look_at_host(&mut self, needs: &[Need], netns: u32, packet: &Packet) -> Vec<(String, Question)> {
        let initial = (!needs.is_empty())
            .then(|| self.shared.state().initial_netns())
            .flatten();
        let mut questions = Vec::new();
        for need in needs {
            let name = field_of(need);
            let question = if *need == Need::MemoryPages {
                // Each netns shows them.
                let netns = initial.unwrap_or(netns);
                let question = |protocol| Question::MemoryPages { netns, protocol };
                packet.protocol.map(question).ok_or("the packet has no protocol")
            } else {
                let question = |(netns, path)| Question::Sysctl { netns, path };
                let asked = initial.zip(sysctls::path(name, None)).map(question);
                asked.ok_or("the initial network namespace is not known")
            };
            match question {
                Ok(question) => questions.push((name.to_owned(), question)),
                Err(reason) => self.miss(name, reason),
            }
        }
        questions
    }

    async fn take(&mut self, name: String, question: &Question, reply: Reply) {
        match reply {
            Ok(Answer::Listener(mut listener)) => {
                listener.owner = self.owner(question, listener.inode).await;
                self.facts.listener = Some(listener);
            }
            Ok(Answer::Socket(found)) => {
                if name == "socket" {
                    self.facts.socket = Some(found.memory);
                }
                self.inode = Some(found.inode);
                self.cgroup = found.cgroup;
                if self.facts.owner.is_none() {
                    self.facts.owner = self.owner(question, found.inode).await;
                }
            }
            Ok(Answer::Owner(owner)) => {
                if let Question::Process { inode, .. } = *question {
                    self.inode = self.inode.or(Some(inode));
                }
                self.facts.owner = Some(owner);
            }
            Ok(Answer::Route(route)) if name == "route" => self.facts.route = Some(route),
            Ok(Answer::Route(route)) => self.facts.reverse_route = Some(route),
            Ok(Answer::Services(services)) => self.facts.ipvs_services = Some(services),
            Ok(Answer::Conntrack(usage)) => self.facts.conntrack = Some(usage),
            Ok(Answer::Link(link)) => self.facts.link = Some(*link),
            Ok(Answer::Nic(nic)) => self.facts.nic = Some(nic),
            Ok(Answer::NeighbourTable(table)) => self.facts.neighbour_table = Some(table),
            Ok(Answer::Sysctl(value)) => {
                self.facts.sysctls.insert(name, value);
            }
            Ok(Answer::Queues(queues)) => self.facts.queues = Some(queues),
            Ok(Answer::Read) => self.take_rules(question).await,
            Ok(Answer::MemoryPages(pages)) => self.facts.memory_pages = Some(pages),
            Ok(
                Answer::Present
                | Answer::Progress(..)
                | Answer::Blocked(_)
                | Answer::Throttled(_)
                | Answer::CgroupPrograms(_),
            ) => {}
            Err(reason) => {
                // An earlier reading tells the chains all the same.
                self.take_rules(question).await;
                if self.facts.rules.is_none() || name != "rules" {
                    self.miss(name, reason);
                }
            }
        }
    }

    /// The process that holds the socket which the answer to `question` named.
    async fn owner(&mut self, question: &Question, inode: u64) -> Option<Owner> {
        let (Question::Listener { netns, .. } | Question::Socket { netns, .. }) = *question else {
            return None;
        };
        self.inode = Some(inode);
        match self.reply(Question::Process { netns, inode }).await {
            Ok(Answer::Owner(owner)) => Some(owner),
            Ok(_) => None,
            Err(reason) => {
                self.miss("owner", reason);
                None
            }
        }
    }

    /// What the rules counted, read after the packet.
    async fn take_rules(&mut self, question: &Question) {
        let (Question::Rulesets { netns }, Some((when, end))) = (question, self.rule_end) else {
            return;
        };
        let shared = self.shared.clone();
        let read_since = || {
            let state = shared.state();
            let known = state.namespaces.get(netns);
            known.is_some_and(|known| known.rules.is_read_since(when))
        };
        // The reading that was waited for may have begun before the packet.
        while !read_since() {
            if self.reply(question.clone()).await.is_err() {
                break;
            }
        }
        loop {
            // Other packets that ended before it may still be on their way here.
            sleep_until(self.deadline.min(Instant::now() + OTHERS)).await;
            let another = {
                let mut state = shared.state();
                let known = state.namespaces.get_mut(netns);
                known.is_some_and(|known| {
                    self.facts.rules = known.rules.tell(when, end);
                    let told = self
                        .facts
                        .rules
                        .as_ref()
                        .is_some_and(|rules| rules.told.is_some());
                    !told && known.rules.wants_another(when)
                })
            };
            // Readings are a tenth of a second apart, so the time that an event has bounds their number.
            if !another || self.reply(question.clone()).await.is_err() {
                break;
            }
        }
    }

    async fn reply(&self, question: Question) -> Reply {
        let asked = self.shared.ask(&question);
        self.wait(asked).await
    }

    async fn wait(&self, asked: Asked) -> Reply {
        match asked {
            Asked::Known(reply) => reply,
            Asked::Wait(receiver, _) => match timeout_at(self.deadline, receiver).await {
                Ok(Ok(reply)) => reply,
                Ok(Err(_)) => Err("context ended before it answered".to_owned()),
                Err(_) => Err(format!("no answer within {} ms", PATIENCE.as_millis())),
            },
        }
    }

    fn miss(&mut self, name: impl Into<String>, reason: impl Into<String>) {
        self.facts.missing.insert(name.into(), reason.into());
    }

    fn miss_all(&mut self, needs: &[Need], reason: &str) {
        let missing: BTreeMap<String, String> = needs
            .iter()
            .map(|need| (field_of(need).to_owned(), reason.to_owned()))
            .collect();
        self.facts.missing.extend(missing);
    }
}

/// Name of the field of [`Facts`] that a need fills; a sysctl's own name for a sysctl.
const fn field_of(need: &Need) -> &'static str {
    match need {
        Need::Listener => "listener",
        Need::Owner => "owner",
        Need::Socket => "socket",
        Need::Progress => "progress",
        Need::CgroupPrograms => "cgroup_programs",
        Need::SourceHolder => "source_holder",
        Need::DestinationHolder => "destination_holder",
        Need::ReverseRoute => "reverse_route",
        Need::Route => "route",
        Need::IpvsServices => "ipvs_services",
        Need::Conntrack => "conntrack",
        Need::MemoryPages => "memory_pages",
        Need::Link => "link",
        Need::Nic => "nic",
        Need::NeighbourTable => "neighbour_table",
        Need::Queues => "queues",
        Need::Rules => "rules",
        Need::Symbols => "location",
        Need::Sysctl(name) | Need::HostSysctl(name) => name,
    }
}

/// The address that a listener takes packets to: the packet's, else its own.
fn listener_address(event: &RawEvent, packet: &Packet) -> Option<std::net::IpAddr> {
    packet
        .dst
        .or_else(|| event.address(FieldId::ListenerAddressHi, FieldId::ListenerAddressLo))
}

/// The listener's port: the kernel's word, else the packet's.
fn listener_port(event: &RawEvent, packet: &Packet) -> Option<u16> {
    event
        .field(FieldId::ListenerPort)
        .filter(|&port| port != 0)
        .map(|port| port as u16)
        .or(packet.dport)
}

/// The question for the local socket of a packet.
fn socket(
    event: &RawEvent,
    packet: &Packet,
    ifindex: u32,
    local: impl Fn(std::net::IpAddr) -> bool,
) -> Result<Question, &'static str> {
    let (Some(src), Some(dst), Some(sport), Some(dport), Some(protocol)) = (
        packet.src,
        packet.dst,
        packet.sport,
        packet.dport,
        packet.protocol,
    ) else {
        return Err("the packet has no ports");
    };
    let outgoing = event.header.iif == 0;
    let (local, remote) = sockets::ends(
        SocketAddr::new(src, sport),
        SocketAddr::new(dst, dport),
        local(src) || event.has(bits::SOURCE_LOCAL),
        local(dst) || event.has(bits::DESTINATION_LOCAL),
        outgoing,
    )
    .ok_or("neither end of the packet is in this netns")?;
    Ok(Question::Socket {
        netns: event.header.netns,
        protocol,
        local,
        remote,
        // An outgoing packet's device says nothing about where its socket would hear.
        ifindex: if outgoing { 0 } else { ifindex },
    })
}
