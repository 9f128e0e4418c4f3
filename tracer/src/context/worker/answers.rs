//! What events want to know of a netns, asked there.

use std::time::{Duration, Instant};

use super::{
    Worker,
    visit::{Visit, words},
};
use crate::{
    context::{
        cgroups, datagrams,
        ipvs::{self, Ipvs},
        links, memory, nic, progress,
        questions::{Answer, Question, Reply},
        routes, rulesets, sockets, sysctls,
    },
    diagnose::{Listener, RouteAnswer},
};

/// The rules of a netns are read this often at most, and such a part of the time at most.
const RULES_EVERY: Duration = Duration::from_millis(100);
const RULES_PART: u32 = 20;

impl Worker {
    /// Answers what was asked meanwhile, netns by netns.
    pub(super) fn answer_all(&mut self) {
        let mut asked = std::mem::take(&mut self.shared.state().asked);
        if asked.is_empty() {
            return;
        }
        self.happened.now();
        let searched = asked.iter().any(|question| match question {
            Question::Netns(netns) => !self.watched.contains_key(netns),
            _ => false,
        });
        if searched {
            self.scan(true);
        }
        asked.retain(|question| !self.put_off(question));
        asked.sort_by_key(netns_of);
        let mut visited = None;
        let mut visit = Visit::default();
        for question in asked {
            let netns = netns_of(&question);
            let reply = if let Question::Netns(netns) = question {
                self.present(netns)
            } else {
                if visited != Some(netns) {
                    visited = None;
                    match self.visit(netns) {
                        Ok(new) => {
                            visit = new;
                            visited = Some(netns);
                        }
                        Err(error) => {
                            self.shared.answer(question, Err(error.to_string()));
                            continue;
                        }
                    }
                }
                self.answer(&mut visit, &question)
            };
            self.shared.answer(question, reply);
        }
        self.go_home();
    }

    /// Puts a question off until the rules may be read again.
    fn put_off(&mut self, question: &Question) -> bool {
        let Question::Rulesets { netns } = question else {
            return false;
        };
        let watched = self.watched.get_mut(netns);
        watched.is_some_and(|watched| {
            watched.rules_wanted = true;
            true
        })
    }

    /// Reads rules where someone waits for them and they are due.
    pub(super) fn read_rules(&mut self) {
        let now = Instant::now();
        let due: Vec<u32> = self
            .watched
            .iter()
            .filter(|(_, watched)| watched.rules_wanted && watched.rules_due <= now)
            .map(|(netns, _)| *netns)
            .collect();
        if due.is_empty() {
            return;
        }
        for netns in due {
            let reply = self.visit(netns).map_err(words).map(|_| rulesets::read());
            let took = reply.as_ref().map_or(Duration::ZERO, |(_, took)| *took);
            if let Some(watched) = self.watched.get_mut(&netns) {
                watched.rules_wanted = false;
                watched.rules_due = Instant::now() + RULES_EVERY.max(took * RULES_PART);
            }
            let reply = reply.map(|(reading, _)| {
                if let Some(known) = self.shared.state().namespaces.get_mut(&netns) {
                    known.rules.read(reading);
                }
                Answer::Read
            });
            self.shared.answer(Question::Rulesets { netns }, reply);
        }
        self.go_home();
    }

    fn present(&self, netns: u32) -> Reply {
        if self.watched.contains_key(&netns) {
            Ok(Answer::Present)
        } else if self.watched.len() >= self.limit {
            Err(format!(
                "not watched: the limit of open files allows {} network namespaces",
                self.limit
            ))
        } else {
            Err(format!(
                "no process and no mount leads to network namespace {netns}"
            ))
        }
    }

    fn answer(&self, visit: &mut Visit, question: &Question) -> Reply {
        match question {
            Question::Listener {
                to,
                port,
                ifindex,
                inode,
                ..
            } => {
                let listeners = sockets::listeners(visit.diag()?, *port).map_err(words)?;
                let chosen = sockets::choose(&listeners, *to, *ifindex, *inode).ok_or_else(|| {
                    format!(
                        "nothing listens on {} any more",
                        std::net::SocketAddr::new(*to, *port)
                    )
                })?;
                let (sharing, sharing_full) = sockets::sharing(&listeners, chosen);
                Ok(Answer::Listener(Listener {
                    address: chosen.address,
                    queue_length: chosen.queue_length,
                    queue_limit: chosen.queue_limit,
                    inode: chosen.inode,
                    owner: None,
                    sharing,
                    sharing_full,
                }))
            }
            Question::Socket { protocol, .. }
                if self.tcp_unlisted && libc::IPPROTO_TCP == i32::from(*protocol) =>
            {
                Err("the kernel does not list TCP sockets".to_owned())
            }
            Question::Socket {
                protocol,
                local,
                remote,
                ifindex,
                ..
            } => {
                let found = match i32::from(*protocol) {
                    libc::IPPROTO_UDP if !sockets::lists_udp() => datagrams::lookup("udp", *local, *remote)?,
                    libc::IPPROTO_UDP | libc::IPPROTO_TCP => {
                        sockets::lookup(visit.diag()?, *protocol, *local, *remote, *ifindex).map_err(words)?
                    }
                    _ => datagrams::lookup("raw", *local, *remote)?,
                };
                found
                    .map(Answer::Socket)
                    .ok_or_else(|| "no process has a socket for this packet".to_owned())
            }
            Question::Route { netns, to, from, iif } => {
                let route = routes::lookup(visit.route()?, *to, *from, *iif).map_err(words)?;
                let of_device = route.ifindex.and_then(|index| self.device_mtu(*netns, index));
                Ok(Answer::Route(RouteAnswer {
                    mtu: route.mtu.or(of_device),
                    mtu_of_route: route.mtu.is_some(),
                    device: route.ifindex.map(|index| self.device_name(*netns, index)),
                    gateway: route.gateway,
                    kind: route.kind.to_owned(),
                }))
            }
            Question::Services { address, .. } => {
                if !ipvs::is_loaded() {
                    return Ok(Answer::Services(Vec::new()));
                }
                let services = Ipvs::open(&mut None)
                    .and_then(|mut ipvs| ipvs.services_at(*address))
                    .map_err(words)?;
                Ok(Answer::Services(services))
            }
            Question::Progress { pid, inode, .. } => progress::read(*pid, *inode)
                .map(|(progress, blocked)| Answer::Progress(progress, blocked, Instant::now())),
            Question::Blocked { threads, .. } => Ok(Answer::Blocked(threads.still())),
            Question::CgroupPrograms { cgroup, .. } => cgroups::programs(*cgroup).map(Answer::CgroupPrograms),
            Question::Throttled { cgroup, .. } => progress::throttled(cgroup).map(Answer::Throttled),
            Question::Conntrack { .. } => sysctls::conntrack().map(Answer::Conntrack),
            Question::Link { index, .. } => links::read(visit.route()?, *index)
                .map(|link| Answer::Link(Box::new(link)))
                .map_err(words),
            Question::Nic { index, .. } => nic::read(visit.route()?, *index).map(Answer::Nic).map_err(words),
            Question::NeighbourTable { family, .. } => links::neighbour_table(visit.route()?, *family)
                .map(Answer::NeighbourTable)
                .map_err(words),
            Question::Queues { .. } => rulesets::queues().map(Answer::Queues).map_err(words),
            Question::Sysctl { path, .. } => sysctls::read(path).map(Answer::Sysctl),
            Question::MemoryPages { protocol, .. } => memory::pages(*protocol).map(Answer::MemoryPages),
            Question::Netns(netns) => self.present(*netns),
            Question::Rulesets { .. } => Err("read at another time".to_owned()),
            Question::Process { .. } => Err("asked of the wrong thread".to_owned()),
        }
    }

    /// Name of a device, else its number in words.
    pub(super) fn device_name(&self, netns: u32, index: u32) -> String {
        self.shared
            .state()
            .namespaces
            .get(&netns)
            .and_then(|known| known.addresses.device(index))
            .map_or_else(|| format!("device {index}"), |device| device.name.clone())
    }

    fn device_mtu(&self, netns: u32, index: u32) -> Option<u32> {
        let state = self.shared.state();
        state.namespaces.get(&netns)?.addresses.device(index)?.mtu
    }
}

const fn netns_of(question: &Question) -> u32 {
    match question {
        Question::Netns(netns)
        | Question::Listener { netns, .. }
        | Question::Socket { netns, .. }
        | Question::Process { netns, .. }
        | Question::Route { netns, .. }
        | Question::Services { netns, .. }
        | Question::Conntrack { netns }
        | Question::Link { netns, .. }
        | Question::Nic { netns, .. }
        | Question::NeighbourTable { netns, .. }
        | Question::Queues { netns }
        | Question::Rulesets { netns }
        | Question::Progress { netns, .. }
        | Question::Blocked { netns, .. }
        | Question::CgroupPrograms { netns, .. }
        | Question::Throttled { netns, .. }
        | Question::MemoryPages { netns, .. }
        | Question::Sysctl { netns, .. } => *netns,
    }
}
