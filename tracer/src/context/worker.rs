//! The thread that visits network namespaces: it hears their changes, asks
//! them what events want to know, and keeps the sets current.

mod answers;
mod pace;
mod scope;
mod visit;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, Read, Seek},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use droptrace_common::Address;
use netlink_sys::protocols::{NETLINK_ROUTE, NETLINK_SOCK_DIAG};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    resource::{Resource, getrlimit},
};

use self::{
    pace::{Happened, Round},
    scope::Scope,
    visit::{Visit, words},
};
use super::{
    addresses::{self, Addresses, Change},
    counters::{self, Netstat, WatchedCounters},
    ipvs::{self, Ipvs},
    netlink::{Message, Netlink},
    netns::{self, Found},
    nic::{self, Missed},
    publish::Publisher,
    routes,
    runtime::Resolver,
    sockets,
    state::{Flow, Namespace, Shared},
    suspects::{CounterMoves, Followed},
    syns, sysctls,
};
use crate::diagnose::Moved;

/// Token of the wake-up; every other token is an inode number of a netns.
const WAKE: u64 = u64::MAX;
/// Token of the mount table, which changes when a named netns comes or goes.
const MOUNTS: u64 = u64::MAX - 1;
/// Token of what is new of pods and containers.
const PODS: u64 = u64::MAX - 2;
/// Processes are looked through this often, and with such a part of a CPU at most while nothing happens.
const SCAN_EVERY: Duration = Duration::from_secs(1);
const SCAN_PART: u32 = 100;
/// Mounts that change in a flood are looked through this often.
const SCAN_REST: Duration = Duration::from_millis(50);
/// Services are asked for this often in a netns, and with such a part of a CPU at most while nothing happens.
const IPVS_EVERY: Duration = Duration::from_millis(500);
const IPVS_PART: u32 = 500;
/// Namespaces without services are asked in turn, this many in each round.
const IPVS_EMPTY_PER_ROUND: usize = 64;
/// Counters are read this often, more seldom by this much per netns where there are many, and with such a part of a CPU at
/// most while nothing happens.
const COUNTERS_EVERY: Duration = Duration::from_secs(1);
const COUNTERS_PER_NETNS: Duration = Duration::from_millis(10);
const COUNTERS_PART: u32 = 500;
/// Datagrams of one netns that are heard before others have their turn.
const HEARD_AT_ONCE: usize = 1_000;
/// Descriptors that namespaces leave to others.
const DESCRIPTORS_LEFT: u64 = 256;
/// Flows of unanswered SYNs that are kept apart.
const UNANSWERED: usize = 4_096;

/// A netns whose changes are heard.
struct Watched {
    /// Hears links and routes, and leads into the netns.
    route: Netlink,
    /// Kept open where there are descriptors enough.
    netstat: Option<Netstat>,
    /// TCPSynRetrans when it was last read.
    syn_retransmissions: Option<u64>,
    /// SYN retransmissions of each connecting socket that were counted.
    connecting: BTreeMap<u64, u8>,
    /// Its counters when it was first seen.
    counters: Moved,
    /// Those that alone prove a cause.
    followed: Followed,
    /// What its network cards had no room for.
    cards: nic::Followed,
    /// When its rules may be read again.
    rules_due: Instant,
    /// Someone waits for that.
    rules_wanted: bool,
}

/// The thread's own.
pub(super) struct Worker {
    shared: Arc<Shared>,
    publisher: Publisher,
    home: OwnedFd,
    epoll: Epoll,
    mounts: File,
    watched: BTreeMap<u32, Watched>,
    scope: Scope,
    limit: usize,
    scanned: Round,
    happened: Happened,
    /// The mount table changed since the last scan.
    mounts_changed: bool,
    ipvs_asked: Round,
    /// Number of the netlink family IPVS, while its module is loaded.
    ipvs_family: Option<u16>,
    /// Where the round of namespaces without services goes on.
    ipvs_turn: u32,
    counters_read: Round,
    /// Namespaces that were watched so far.
    serial: u64,
    /// The kernel does not list TCP sockets.
    tcp_unlisted: bool,
}

impl Worker {
    /// Prepares on the thread that will run it.
    ///
    /// # Errors
    /// A descriptor could not be had.
    pub(super) fn new(
        shared: Arc<Shared>,
        publisher: Publisher,
        named: BTreeMap<u32, PathBuf>,
        pods: Option<Resolver>,
    ) -> io::Result<Self> {
        let (home, _) = netns::open(Path::new("/proc/thread-self/ns/net"))?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let mounts = File::open("/proc/self/mountinfo")?;
        epoll.add(shared.wake(), EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        epoll.add(&mounts, EpollEvent::new(EpollFlags::EPOLLPRI, MOUNTS))?;
        if let Some(pods) = &pods {
            epoll.add(pods.news(), EpollEvent::new(EpollFlags::EPOLLIN, PODS))?;
        }
        let descriptors = getrlimit(Resource::RLIMIT_NOFILE)?.0;
        let limit = descriptors.saturating_sub(DESCRIPTORS_LEFT).max(64) as usize;
        let mut worker = Self {
            shared,
            publisher,
            home,
            epoll,
            mounts,
            watched: BTreeMap::new(),
            scope: Scope::new(named, pods),
            limit,
            scanned: Round::of(|| ()),
            happened: Happened::default(),
            mounts_changed: true,
            ipvs_asked: Round::of(|| ()),
            ipvs_family: None,
            tcp_unlisted: false,
            ipvs_turn: 0,
            counters_read: Round::of(|| ()),
            serial: 0,
        };
        worker.scan(true);
        worker.tell_scope();
        worker.take_pods();
        worker.ask_ipvs(true);
        worker.look_at_counters();
        Ok(worker)
    }

    /// Asks for no socket at all: the kernel loads modules at the first question, which takes longer than an event waits.
    fn try_sock_diag(&mut self) {
        let tried = Netlink::open(NETLINK_SOCK_DIAG).and_then(|mut diag| sockets::try_listing(&mut diag));
        if let Err(error) = tried {
            self.tcp_unlisted = true;
            self.shared.problem(
                "TCP sockets",
                format!("the kernel does not list them, hence listeners and owners stay unknown: {error}"),
            );
        }
    }

    /// Works until context ends.
    pub(super) fn run(mut self) {
        let mut events = [EpollEvent::empty(); 64];
        while !self.shared.stopped() {
            let timeout = EpollTimeout::try_from(self.rest()).unwrap_or(EpollTimeout::ZERO);
            // An interrupted wait is an empty one.
            let count = self.epoll.wait(&mut events, timeout).unwrap_or(0);
            let mut changed = BTreeSet::new();
            let mut pods_changed = false;
            for event in &events[..count] {
                match event.data() {
                    WAKE => self.read_wake(),
                    MOUNTS => self.read_mounts(),
                    PODS => pods_changed = true,
                    netns => {
                        changed.insert(netns as u32);
                    }
                }
            }
            let mut addresses_changed = false;
            for netns in changed {
                addresses_changed |= self.hear(netns);
            }
            if pods_changed {
                self.take_pods();
            }
            if addresses_changed || pods_changed {
                self.happened.now();
            }
            if std::mem::take(&mut self.shared.state().questions_near) {
                self.try_sock_diag();
                self.follow_from_now();
            }
            let wanted = std::mem::take(&mut self.shared.state().counters_wanted);
            if !wanted.is_empty() {
                let moved = self.counters_moved();
                for asker in wanted {
                    // Who no longer waits has ended.
                    let _ = asker.send(moved.clone());
                }
            }
            self.answer_all();
            self.read_rules();
            self.keep_up(addresses_changed);
        }
    }

    /// Time until something is due.
    fn rest(&self) -> Duration {
        [
            self.scanned.rest(self.scan_every()),
            self.ipvs_asked.rest(self.ipvs_every()),
            self.counters_read.rest(self.counters_every()),
        ]
        .into_iter()
        .chain(self.watched.values().filter_map(|watched| {
            let due = watched.rules_wanted.then_some(watched.rules_due)?;
            Some(due.saturating_duration_since(Instant::now()))
        }))
        .min()
        .map_or(SCAN_EVERY, |rest| rest + Duration::from_millis(1))
    }

    fn in_scope(&self, netns: u32) -> bool {
        self.scope.has(netns)
    }

    fn scan_every(&self) -> Duration {
        if self.mounts_changed {
            SCAN_REST
        } else {
            self.unless_something_happens(&self.scanned, SCAN_PART, SCAN_EVERY)
        }
    }

    fn ipvs_every(&self) -> Duration {
        self.unless_something_happens(&self.ipvs_asked, IPVS_PART, IPVS_EVERY)
    }

    fn counters_every(&self) -> Duration {
        let every = COUNTERS_EVERY.max(COUNTERS_PER_NETNS * self.watched.len() as u32);
        self.unless_something_happens(&self.counters_read, COUNTERS_PART, every)
    }

    /// How often such a round is due: more seldom the more CPU time it takes, unless something happens.
    fn unless_something_happens(&self, round: &Round, part: u32, every: Duration) -> Duration {
        if self.happened.lately() {
            every
        } else {
            round.at_most(part, every)
        }
    }

    fn keep_up(&mut self, addresses_changed: bool) {
        if self.scanned.rest(self.scan_every()).is_zero() {
            self.scan(false);
        }
        // A service usually comes with its address.
        let services_every = if addresses_changed {
            SCAN_REST
        } else {
            self.ipvs_every()
        };
        if self.ipvs_asked.rest(services_every).is_zero() {
            self.ask_ipvs(false);
        }
        if self.counters_read.rest(self.counters_every()).is_zero() {
            self.look_at_counters();
        }
    }

    fn read_wake(&self) {
        let mut count = [0; 8];
        // Only clears the counter.
        let _ = nix::unistd::read(self.shared.wake(), &mut count);
    }

    fn read_mounts(&mut self) {
        self.mounts_changed = true;
        // The change counts as seen once the table was read.
        let _ = self.mounts.rewind();
        let _ = io::copy(&mut self.mounts.by_ref(), &mut io::sink());
    }

    // Namespaces.

    /// Finds out which namespaces there are.
    fn scan(&mut self, thorough: bool) {
        self.scanned = Round::of(|| self.follow_namespaces(thorough));
    }

    fn follow_namespaces(&mut self, thorough: bool) {
        let mounts = std::mem::take(&mut self.mounts_changed) || thorough;
        let mut found = self.shared.discovery().scan(thorough, mounts);
        for (netns, path) in self.scope.paths() {
            if let std::collections::btree_map::Entry::Vacant(entry) = found.entry(netns)
                && netns::open(path).is_ok_and(|(_, inode)| inode == netns)
            {
                entry.insert(Found {
                    name: None,
                    path: path.to_owned(),
                });
            }
        }
        let gone: Vec<u32> = self
            .watched
            .keys()
            .filter(|netns| !found.contains_key(netns))
            .copied()
            .collect();
        for netns in gone {
            self.leave(netns);
            self.scope.forget(netns);
            self.shared.forget_name(netns);
            self.tell_scope();
        }
        let mut left_out = 0;
        for (netns, found) in found {
            if self.watched.contains_key(&netns) {
                if let Some(known) = self.shared.state().namespaces.get_mut(&netns) {
                    known.name = found.name;
                }
            } else if self.watched.len() >= self.limit {
                left_out += 1;
            } else if let Err(error) = self.adopt(netns, found)
                && !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
            {
                self.shared.problem(
                    &format!("network namespace {netns}"),
                    format!("not watched: {error}"),
                );
            }
        }
        if left_out > 0 {
            self.shared.problem(
                "network namespaces",
                format!(
                    "{left_out} of them are not watched: the limit of open files allows {}; raise it (ulimit -n) and start again",
                    self.limit
                ),
            );
        }
        self.go_home();
    }

    fn adopt(&mut self, netns: u32, found: Found) -> io::Result<()> {
        let (fd, inode) = netns::open(&found.path)?;
        if inode != netns {
            return Err(io::Error::from_raw_os_error(libc::ENOENT));
        }
        netns::enter(fd)?;
        // Heard first, asked second: no change falls between.
        let route = Netlink::subscribe(NETLINK_ROUTE, addresses::GROUPS)?;
        let addresses = Addresses::load(&mut Netlink::open(NETLINK_ROUTE)?)?;
        self.epoll
            .add(&route, EpollEvent::new(EpollFlags::EPOLLIN, u64::from(netns)))?;
        let counters = counters::read();
        let netstat = if self.spares_descriptor() {
            Netstat::open().ok()
        } else {
            None
        };
        self.serial += 1;
        self.watched.insert(
            netns,
            Watched {
                route,
                netstat,
                syn_retransmissions: None,
                connecting: BTreeMap::new(),
                followed: Followed::new(self.serial, counters::proofs_of(&counters)),
                counters,
                cards: nic::Followed::default(),
                rules_due: Instant::now(),
                rules_wanted: false,
            },
        );
        self.shared.state().namespaces.insert(
            netns,
            Namespace {
                name: found.name,
                addresses,
                ..Namespace::default()
            },
        );
        self.publish(netns);
        Ok(())
    }

    /// Whether there is a descriptor for what is quicker with one; where there is none, the next netns gets such a one.
    fn spares_descriptor(&mut self) -> bool {
        let kept = |watched: &Watched| watched.netstat.is_some();
        let taken = self.watched.len() + self.watched.values().filter(|each| kept(each)).count();
        if taken + 1 >= self.limit
            && let Some(watched) = self.watched.values_mut().find(|each| kept(each))
        {
            watched.netstat = None;
        }
        taken + 1 < self.limit
    }

    fn leave(&mut self, netns: u32) {
        if let Some(mut watched) = self.watched.remove(&netns) {
            let _ = self.epoll.delete(&watched.route);
            self.tell_moves(netns, watched.followed.news());
        }
        self.shared.state().namespaces.remove(&netns);
        let written = self.publisher.forget(netns);
        self.written(written);
        self.tell_entry_hook();
    }

    /// Enters a netns for a while; [`Self::go_home`] must follow, since a visitor keeps a netns alive.
    fn visit(&self, netns: u32) -> io::Result<Visit> {
        let watched = self
            .watched
            .get(&netns)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the netns vanished"))?;
        netns::enter(netns::of_socket(&watched.route)?)?;
        Ok(Visit::default())
    }

    fn go_home(&self) {
        if let Err(error) = netns::enter(&self.home) {
            self.shared
                .problem("own network namespace", format!("cannot go back to it: {error}"));
        }
    }

    // Addresses.

    /// Takes over what a netns announced; tells whether an address or device changed.
    fn hear(&mut self, netns: u32) -> bool {
        let Some(watched) = self.watched.get(&netns) else {
            return false;
        };
        let mut change = Change::None;
        let heard = listen(
            || watched.route.heard(),
            |messages| {
                if let Some(known) = self.shared.state().namespaces.get_mut(&netns) {
                    for message in messages {
                        change = change.max(known.addresses.take(message));
                    }
                }
            },
        );
        match heard {
            Ok(false) => {}
            Ok(true) => change = Change::Reload,
            Err(error) => {
                self.shared.problem(
                    &format!("network namespace {netns}"),
                    format!("its changes could not be heard for up to a second: {error}"),
                );
                // The next scan finds it again, and opens another socket.
                self.leave(netns);
                return false;
            }
        }
        if change == Change::Reload {
            let loaded = self
                .visit(netns)
                .and_then(|_| Addresses::load(&mut Netlink::open(NETLINK_ROUTE)?));
            self.go_home();
            match loaded {
                Ok(addresses) => {
                    if let Some(known) = self.shared.state().namespaces.get_mut(&netns) {
                        known.addresses = addresses;
                    }
                }
                Err(error) => self.shared.problem(
                    &format!("network namespace {netns}"),
                    format!("its addresses may be out of date: {error}"),
                ),
            }
        }
        if change != Change::None {
            self.publish(netns);
        }
        change != Change::None
    }

    fn publish(&mut self, netns: u32) {
        let state = self.shared.state();
        let Some(known) = state.namespaces.get(&netns) else {
            return;
        };
        let ipvs: BTreeSet<Address> = ipvs::addresses(&known.services);
        let wanted = known.addresses.wanted(&ipvs);
        let scoped = self.scope.names(netns).then(|| known.addresses.scoped());
        drop(state);
        let written = self.publisher.addresses(netns, wanted);
        self.written(written);
        if let Some(scoped) = scoped {
            let written = self.publisher.scope(netns, scoped);
            self.written(written);
        }
    }

    fn written(&self, result: io::Result<()>) {
        if let Err(error) = result {
            self.shared.problem(
                "membership sets",
                format!(
                    "incomplete, hence causes that rest on local or IPVS addresses may be missed: {error}"
                ),
            );
        }
    }

    // IPVS.

    /// Finds out which services there are; `all`: in every netns.
    fn ask_ipvs(&mut self, all: bool) {
        self.ipvs_asked = Round::of(|| self.follow_services(all));
    }

    fn follow_services(&mut self, all: bool) {
        let loaded = ipvs::is_loaded();
        let (busy, empty): (Vec<u32>, Vec<u32>) = {
            let state = self.shared.state();
            state
                .namespaces
                .iter()
                .map(|(netns, known)| (*netns, known.services.is_empty()))
                .fold(
                    (Vec::new(), Vec::new()),
                    |(mut busy, mut empty), (netns, is_empty)| {
                        if is_empty { &mut empty } else { &mut busy }.push(netns);
                        (busy, empty)
                    },
                )
        };
        if !loaded {
            self.ipvs_family = None;
            for netns in busy {
                self.take_services(netns, BTreeSet::new(), None);
            }
            return;
        }
        let turn = self.ipvs_turn;
        let mut due = busy;
        let in_turn = empty
            .iter()
            .filter(|&&netns| netns > turn)
            .chain(empty.iter().filter(|&&netns| netns <= turn))
            .take(if all { usize::MAX } else { IPVS_EMPTY_PER_ROUND });
        for netns in in_turn {
            self.ipvs_turn = *netns;
            due.push(*netns);
        }
        for netns in due {
            if self.visit(netns).is_err() {
                continue;
            }
            let asked = Ipvs::open(&mut self.ipvs_family).and_then(|mut ipvs| ipvs.services());
            match asked {
                Ok(services) => {
                    let expire = (!services.is_empty()).then(expire_nodest_conn).flatten();
                    self.take_services(netns, services, expire);
                }
                Err(error) => {
                    // The module may have been loaded anew under another number.
                    self.ipvs_family = None;
                    self.shared
                        .problem("IPVS services", format!("out of date for a while: {error}"));
                }
            }
        }
        self.go_home();
    }

    fn take_services(&mut self, netns: u32, services: BTreeSet<ipvs::Service>, expire: Option<bool>) {
        let mut state = self.shared.state();
        let Some(known) = state.namespaces.get_mut(&netns) else {
            return;
        };
        if known.services == services && known.expire_nodest_conn == expire {
            return;
        }
        known.services = services;
        known.expire_nodest_conn = expire;
        let keys: Vec<_> = known.services.iter().map(|service| service.key(netns)).collect();
        drop(state);
        let written = self.publisher.services(netns, keys.into_iter());
        self.written(written);
        self.publish(netns);
        self.tell_entry_hook();
    }

    /// The entry hook is needed where a netns in scope has services and keeps entries of removed servers. The packets of pods
    /// meet those of the host.
    fn tell_entry_hook(&self) {
        let host = |known: &Namespace| self.scope.follows() && known.name.as_deref() == Some("host");
        let needed = self.shared.state().namespaces.iter().any(|(netns, known)| {
            (self.in_scope(*netns) || host(known))
                && !known.services.is_empty()
                && known.expire_nodest_conn == Some(false)
        });
        self.shared
            .entry_hook
            .send_if_modified(|held| std::mem::replace(held, needed) != needed);
    }

    // Counters.

    fn watched_in_scope(&self) -> Vec<u32> {
        let all = self.watched.keys().copied();
        all.filter(|netns| self.in_scope(*netns)).collect()
    }

    /// How far the counters of each netns in scope moved since it was first seen. Those that alone prove a cause are told
    /// as of now, too, and so are SYNs that stay unanswered.
    fn counters_moved(&mut self) -> BTreeMap<u32, Moved> {
        self.look_at_counters();
        let mut moved = BTreeMap::new();
        for netns in self.watched_in_scope() {
            let Ok(mut visit) = self.visit(netns) else {
                continue;
            };
            self.look_at_cards(netns, &mut visit);
            let now = counters::read();
            if let Some(watched) = self.watched.get_mut(&netns) {
                moved.insert(netns, counters::moved(&watched.counters, &now));
                let followed = &mut watched.followed;
                let former =
                    followed.take(counters::proofs_of(&now), |syn_queues| visit.suspects(syn_queues));
                let news = followed.news().or(former);
                self.tell_moves(netns, news);
            }
        }
        self.go_home();
        moved
    }

    fn tell_moves(&self, netns: u32, news: Option<CounterMoves>) {
        if let Some(moves) = news.filter(|_| self.in_scope(netns)) {
            self.shared.state().counter_moves.insert(netns, moves);
        }
    }

    /// Tells what the network cards of a netns had no room for since they were last read.
    fn look_at_cards(&mut self, netns: u32, visit: &mut Visit) {
        let missed = self.read_cards(netns, visit);
        self.shared.state().missed.extend(missed);
    }

    fn read_cards(&mut self, netns: u32, visit: &mut Visit) -> Vec<Missed> {
        let known = self.shared.state();
        let cards = known.namespaces.get(&netns).map(|known| known.addresses.cards());
        drop(known);
        let Some(cards) = cards.filter(|cards| !cards.is_empty()) else {
            return Vec::new();
        };
        match (visit.route(), self.watched.get_mut(&netns)) {
            (Ok(route), Some(watched)) => watched.cards.take(netns, route, &cards),
            _ => Vec::new(),
        }
    }

    /// Counts from now on what only counters tell: hooks see what comes from now on.
    fn follow_from_now(&mut self) {
        for netns in self.watched_in_scope() {
            let Ok(mut visit) = self.visit(netns) else {
                continue;
            };
            self.read_cards(netns, &mut visit);
            let now = self.read_watched(netns);
            if let (Ok(now), Some(watched)) = (now, self.watched.get_mut(&netns)) {
                watched.followed.restart(now.proofs);
            }
        }
        self.shared.state().missed.clear();
        self.go_home();
    }

    /// Looks for drops that only counters tell, and for SYNs that stay unanswered.
    fn look_at_counters(&mut self) {
        self.counters_read = Round::of(|| self.follow_counters());
    }

    fn follow_counters(&mut self) {
        for netns in self.watched_in_scope() {
            if self.has_cards(netns)
                && let Ok(mut visit) = self.visit(netns)
            {
                self.look_at_cards(netns, &mut visit);
            }
            let now = self.read_watched(netns);
            if let Ok(now) = now {
                self.follow_netns(netns, now);
            }
        }
        self.go_home();
    }

    fn has_cards(&self, netns: u32) -> bool {
        let state = self.shared.state();
        let known = state.namespaces.get(&netns);
        known.is_some_and(|known| !known.addresses.cards().is_empty())
    }

    /// Reads the counters of a netns that are watched all the time; [`Self::go_home`] must follow.
    fn read_watched(&self, netns: u32) -> io::Result<WatchedCounters> {
        let kept = self
            .watched
            .get(&netns)
            .and_then(|watched| watched.netstat.as_ref());
        if let Some(netstat) = kept {
            return netstat.watched();
        }
        let _inside = self.visit(netns)?;
        Netstat::open()?.watched()
    }

    /// Takes what the counters of a netns say now.
    fn follow_netns(&mut self, netns: u32, now: WatchedCounters) {
        let Some(watched) = self.watched.get_mut(&netns) else {
            return;
        };
        // The first reading is where counting starts.
        let total = now.syn_retransmissions;
        let before = watched.syn_retransmissions.or(total);
        watched.syn_retransmissions = total.or(before);
        let retransmitted = total.unwrap_or(0).saturating_sub(before.unwrap_or(0));
        let moved = retransmitted > 0 || !watched.followed.is_at(&now.proofs);
        let mut visit = None;
        if moved {
            self.happened.now();
            visit = self.visit(netns).ok();
        }
        let Some(watched) = self.watched.get_mut(&netns) else {
            return;
        };
        let news = watched.followed.take(now.proofs, |syn_queues| {
            visit
                .as_mut()
                .map_or_else(Vec::new, |visit| visit.suspects(syn_queues))
        });
        self.tell_moves(netns, news);
        if retransmitted > 0
            && let Some(mut visit) = visit
        {
            self.look_for_unanswered(netns, &mut visit, retransmitted);
        }
    }

    /// Finds the sockets of so many SYNs that were sent again.
    fn look_for_unanswered(&mut self, netns: u32, visit: &mut Visit, retransmitted: u64) {
        let Ok(connecting) = visit
            .diag()
            .and_then(|diag| sockets::connecting(diag).map_err(words))
        else {
            return;
        };
        let Some(watched) = self.watched.get_mut(&netns) else {
            return;
        };
        let grown = syns::growth(&mut watched.connecting, &connecting, retransmitted);
        for (socket, count) in grown {
            let route = visit
                .route()
                .ok()
                .and_then(|route| routes::lookup(route, socket.remote.ip(), Some(socket.local), None).ok());
            let interface = route
                .and_then(|route| route.ifindex)
                .map(|index| self.device_name(netns, index));
            let mut state = self.shared.state();
            let flow = Flow {
                src: socket.local,
                dst: socket.remote.ip(),
                dport: socket.remote.port(),
            };
            let key = (netns, flow);
            if state.unanswered.len() < UNANSWERED || state.unanswered.contains_key(&key) {
                let entry = state.unanswered.entry(key).or_default();
                entry.0 = interface.or_else(|| entry.0.take());
                entry.1 += count;
            }
        }
    }
}

/// Hears what waits, up to [`HEARD_AT_ONCE`] datagrams: the rest wakes the worker again. Tells whether messages were lost.
///
/// # Errors
/// The socket is of no use any more.
fn listen(
    mut heard: impl FnMut() -> io::Result<Vec<Message>>,
    mut take: impl FnMut(&[Message]),
) -> io::Result<bool> {
    let mut lost = false;
    for _ in 0..HEARD_AT_ONCE {
        match heard() {
            Ok(messages) if messages.is_empty() => break,
            Ok(messages) => take(&messages),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => lost = true,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(lost)
}

/// `net.ipv4.vs.expire_nodest_conn` of the netns that the thread is in.
fn expire_nodest_conn() -> Option<bool> {
    let path = sysctls::path("net.ipv4.vs.expire_nodest_conn", None)?;
    sysctls::read(&path).ok().map(|value| value != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_keeps_failing_is_not_listened_to_for_ever() {
        let message = || Message {
            kind: 16,
            body: Vec::new(),
        };
        let mut calls = 0;
        let mut always = |errno| {
            calls += 1;
            Err(io::Error::from_raw_os_error(errno))
        };
        assert!(listen(|| always(libc::ENOBUFS), |_| {}).unwrap());
        assert!(listen(|| always(libc::ENOTCONN), |_| {}).is_err());
        assert_eq!(calls, HEARD_AT_ONCE + 1);

        let mut waiting = vec![
            Ok(Vec::new()),
            Ok(vec![message()]),
            Err(io::Error::from_raw_os_error(libc::EINTR)),
            Ok(vec![message(), message()]),
        ];
        let mut taken = 0;
        let lost = listen(|| waiting.pop().unwrap(), |messages| taken += messages.len());
        assert!(!lost.unwrap());
        assert_eq!(taken, 3);

        let mut endless = 0;
        assert!(!listen(|| Ok(vec![message()]), |_| endless += 1).unwrap());
        assert_eq!(endless, HEARD_AT_ONCE);
    }
}
