//! The only room that asks the running system: network namespaces, addresses,
//! IPVS services, sockets, processes, routes and settings.
//!
//! Two threads do the asking, so that whoever reads the ring never waits for
//! the system: one visits network namespaces ([`worker`]), one looks through
//! processes. [`Context::facts`] takes what is known and waits a bounded time
//! for the rest; answers serve many events. Netlink announces addresses and
//! devices, and the mount table named namespaces, hence the [`Sets`] that the
//! BPF programs test against are current within milliseconds. A netns that only
//! processes hold is found within a second, or when an event names it.

mod addresses;
mod bpf;
mod cgroups;
mod clock;
mod counters;
mod datagrams;
mod facts;
mod ipvs;
mod links;
mod memory;
mod netlink;
mod netns;
mod nic;
pub mod pods;
mod processes;
mod progress;
mod publish;
mod questions;
mod routes;
mod rulesets;
mod runtime;
mod sets;
mod sockets;
mod state;
pub mod survey;
mod suspects;
mod syns;
mod sysctls;
#[cfg(test)]
mod tests;
mod witness;
mod worker;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    future::Future,
    io,
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::Duration,
};

pub use clock::{monotonic_ns, offset_ns, wall_time};
pub use facts::PATIENCE;
pub use netns::{Netns, resolve, resolve_pid};
pub use nic::Missed;
use nix::sys::eventfd::{EfdFlags, EventFd};
pub(crate) use runtime::Names;
pub use runtime::{Labels, PodRequest};
use runtime::{PodError, Resolver};
pub use sets::{NoSets, Sets};
pub use suspects::{CounterMoves, Suspect};
pub use syns::LostSyns;
use tokio::sync::{oneshot, watch};

use crate::diagnose::{Facts, Moved, Need, RawEvent, SynUnanswered};

/// How long the counters of all namespaces are waited for.
pub const COUNTERS: Duration = Duration::from_secs(1);

/// What the user wants to see, as far as context must find it out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScopeRequest {
    /// Network namespaces by name, path or inode number.
    pub netns: Vec<String>,
    /// Processes whose network namespaces are meant.
    pub pids: Vec<u32>,
    /// Pods and containers.
    pub pods: PodRequest,
    /// Addresses.
    pub addresses: Vec<IpAddr>,
}

/// The pods and containers of this host, and those among them that the user named.
#[derive(Debug, Default)]
pub struct Pods(Option<Resolver>);

impl Pods {
    /// Looks for those that the user named. Where none is named, nobody waits: their names come when they come.
    ///
    /// # Errors
    /// They cannot be found; told within two seconds, and the text names the next step.
    pub fn find(request: &PodRequest) -> Result<Self, ContextError> {
        Resolver::start(request).map(Self).map_err(|error| match error {
            PodError::Refused(_) => ContextError::Runtime(error.to_string()),
            PodError::Unmet(..) => ContextError::Pod(error.to_string()),
            PodError::Start(error) => ContextError::Start(error),
        })
    }
}

/// Why context could not start, or did not find what the user named.
#[derive(Debug)]
pub enum ContextError {
    /// No netns has this name.
    NetnsName(String),
    /// No netns has this inode number.
    NetnsInode(u32),
    /// The path leads to no netns.
    NetnsPath(PathBuf, io::Error),
    /// The process is not there, or may not be looked at.
    Pid(u32, io::Error),
    /// No container runtime tells who runs here.
    Runtime(String),
    /// The pod or container is not here, or more than one is meant.
    Pod(String),
    /// A thread or descriptor could not be had.
    Start(io::Error),
}

impl fmt::Display for ContextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NetnsName(name) => write!(
                f,
                "no network namespace named {name}: `ip netns list` shows the names; a path or an inode number \
                 (`lsns -t net`) will do too"
            ),
            Self::NetnsInode(inode) => write!(
                f,
                "no network namespace with inode {inode}: `lsns -t net` lists those of processes, `ip netns list` \
                 those with a name"
            ),
            Self::NetnsPath(path, error) => write!(
                f,
                "{} leads to no network namespace ({error}): give a path such as /run/netns/NAME or /proc/PID/ns/net",
                path.display()
            ),
            Self::Pid(pid, error) if error.kind() == io::ErrorKind::NotFound => write!(
                f,
                "no process with pid {pid}: `ps -e` lists them, numbered as this pid namespace does"
            ),
            Self::Pid(pid, error) => write!(
                f,
                "cannot look at the network namespace of process {pid} ({error}): run as root"
            ),
            Self::Runtime(text) | Self::Pod(text) => f.write_str(text),
            Self::Start(error) => write!(
                f,
                "cannot look at the network namespaces of this host ({error}): run as root, and see `ulimit -n`"
            ),
        }
    }
}

impl std::error::Error for ContextError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NetnsPath(_, error) | Self::Pid(_, error) | Self::Start(error) => Some(error),
            Self::NetnsName(_) | Self::NetnsInode(_) | Self::Runtime(_) | Self::Pod(_) => None,
        }
    }
}

/// What is known of the running system. Clones share it; with the last one its threads end.
#[derive(Clone, Debug)]
pub struct Context {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<state::Shared>,
    /// A container runtime is asked for names.
    names: bool,
    threads: Vec<JoinHandle<()>>,
}

impl Context {
    /// Starts to look. On return every netns that was found has its addresses and services in the sets. `pods` were found
    /// for the same request.
    ///
    /// # Errors
    /// The request names what does not exist, or the system refuses; the text names the next step.
    pub fn start(
        request: &ScopeRequest,
        Pods(pods): Pods,
        sets: Box<dyn Sets + Send>,
    ) -> Result<Self, ContextError> {
        let mut scope = BTreeMap::new();
        let named = request.netns.iter().map(|text| netns::find(text));
        let of_pids = request.pids.iter().map(|&pid| netns::find_pid(pid));
        for found in named.chain(of_pids) {
            let (netns, path) = found?;
            scope.insert(netns.inode, path);
        }
        let user: BTreeSet<_> = request
            .addresses
            .iter()
            .map(|&address| addresses::whole(address))
            .collect();

        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| ContextError::Start(errno.into()))?;
        let (ask, asked) = mpsc::channel();
        let shared = Arc::new(state::Shared::new(ask, wake));
        let names = pods.is_some();
        let (ready, is_ready) = mpsc::channel();
        let visitor = spawn("netns", {
            let shared = shared.clone();
            move || {
                let (publisher, written) = publish::Publisher::new(sets, user);
                if let Err(error) = written {
                    shared.problem("scope", format!("not all addresses are in scope: {error}"));
                }
                match worker::Worker::new(shared, publisher, scope, pods) {
                    Ok(worker) => {
                        let _ = ready.send(Ok(()));
                        worker.run();
                    }
                    Err(error) => {
                        let _ = ready.send(Err(error));
                    }
                }
            }
        })?;
        is_ready
            .recv()
            .unwrap_or_else(|_| Err(io::Error::other("its thread ended")))
            .map_err(ContextError::Start)?;
        let finder = spawn("owners", {
            let shared = shared.clone();
            move || processes::find_owners(&shared, &asked)
        })?;
        Ok(Self {
            inner: Arc::new(Inner {
                shared,
                names,
                threads: vec![visitor, finder],
            }),
        })
    }

    /// Gets ready for questions about sockets, and counts from now on what [`Self::counter_moves`] tells. Not done at the
    /// start, since it takes time from those who attach hooks meanwhile, and what came before them nobody saw.
    pub fn expect_questions(&self) {
        self.inner.shared.state().questions_near = true;
        // A full counter wakes as well.
        let _ = self.inner.shared.wake().write(1);
    }

    /// The namespaces in scope now; `None`: all.
    pub fn scoped_netns(&self) -> Option<BTreeSet<u32>> {
        self.inner.shared.state().scope.clone()
    }

    /// Every netns known now.
    pub fn namespaces(&self) -> Vec<Netns> {
        self.inner
            .shared
            .state()
            .namespaces
            .iter()
            .map(|(inode, known)| Netns {
                inode: *inode,
                name: known.name.clone(),
            })
            .collect()
    }

    /// Name of a netns, where it has one.
    pub fn netns_name(&self, netns: u32) -> Option<String> {
        self.inner.shared.state().namespaces.get(&netns)?.name.clone()
    }

    /// Whether a container runtime is asked for names.
    pub fn asks_for_names(&self) -> bool {
        self.inner.names
    }

    /// Whether this netns is known now.
    pub fn knows_netns(&self, netns: u32) -> bool {
        self.inner.shared.knows(netns)
    }

    /// Names of pods and containers, as known now; empty where no container runtime is there.
    pub(crate) fn names(&self) -> Arc<Names> {
        self.inner.shared.names()
    }

    /// Finds out what these needs ask about an event, within [`PATIENCE`]; what could not be had is named in
    /// [`Facts::missing`]. A sysctl is found in [`Facts::sysctls`] under its name, the device's name in place of
    /// `{device}`. The kernel's names (`reason`, `location`, `frames`) are not context's: they come with `known`.
    pub fn facts(
        &self,
        event: &RawEvent,
        known: Facts,
        needs: &[Need],
    ) -> impl Future<Output = Box<Facts>> + Send + 'static {
        facts::gather(self.inner.shared.clone(), event, known, needs)
    }

    /// Whether a netns in scope has IPVS services and keeps entries of removed servers
    /// (`net.ipv4.vs.expire_nodest_conn=0`), so that only the IPVS entry hook sees what becomes of their packets.
    pub fn ipvs_needs_entry_hook(&self) -> bool {
        *self.inner.shared.entry_hook.borrow()
    }

    /// Tells when [`Self::ipvs_needs_entry_hook`] changes.
    pub fn ipvs_entry_hook_changes(&self) -> watch::Receiver<bool> {
        self.inner.shared.entry_hook.subscribe()
    }

    /// SYNs that local sockets in scope sent again since the start and that no lost packet explains, by destination. At
    /// most a second old, up to some seconds where there are many namespaces; after [`Self::counters_moved`] of that moment.
    pub fn syn_unanswered(&self, lost: &LostSyns) -> Vec<SynUnanswered> {
        let state = self.inner.shared.state();
        lost.unexplained(&state.unanswered)
            .into_iter()
            .map(|((netns, dst, dport), (interface, count))| SynUnanswered {
                netns,
                netns_name: state.namespaces.get(&netns).and_then(|known| known.name.clone()),
                interface: interface.map(str::to_owned),
                held_by: holder(&state, netns, dst),
                dst: Some(dst),
                dport: Some(dport),
                retransmissions: count,
            })
            .collect()
    }

    /// How far the kernel's counters of each netns in scope moved since it was first seen, as of now. A netns that went
    /// meanwhile is left out. Empty where nobody answers within [`COUNTERS`].
    pub async fn counters_moved(&self) -> BTreeMap<u32, Moved> {
        let (asker, answer) = oneshot::channel();
        self.inner.shared.state().counters_wanted.push(asker);
        // A full counter wakes as well.
        let _ = self.inner.shared.wake().write(1);
        match tokio::time::timeout(COUNTERS, answer).await {
            Ok(Ok(moved)) => moved,
            _ => BTreeMap::new(),
        }
    }

    /// The counters of [`crate::diagnose::PROOFS`] that moved in a netns in scope, as they were about a second ago: by now
    /// whoever saw a drop that they count has counted it, too. After [`Self::counters_moved`] they are of that moment. Each
    /// reading is given once.
    pub fn counter_moves(&self) -> BTreeMap<u32, CounterMoves> {
        std::mem::take(&mut self.inner.shared.state().counter_moves)
    }

    /// What network cards of the namespaces in scope had no room for since it was last asked, or since
    /// questions about sockets are near. After [`Self::counters_moved`] it is of that moment.
    pub fn missed(&self) -> Vec<Missed> {
        std::mem::take(&mut self.inner.shared.state().missed)
    }

    /// What context could not do, and its effect: subject → reason.
    pub fn problems(&self) -> BTreeMap<String, String> {
        self.inner.shared.state().problems.clone()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.stop();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// The netns that has this address: the one that asks, else any other.
fn holder(state: &state::State, netns: u32, address: IpAddr) -> Option<u32> {
    let holds = |known: &state::Namespace| known.addresses.holder(address).is_some();
    if state.namespaces.get(&netns).is_some_and(holds) || address.is_loopback() {
        return Some(netns);
    }
    let mut others = state.namespaces.iter().filter(|(_, known)| holds(known));
    others.next().map(|(inode, _)| *inode)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, ContextError> {
    std::thread::Builder::new()
        .name(format!("droptrace-{name}"))
        .spawn(work)
        .map_err(ContextError::Start)
}
