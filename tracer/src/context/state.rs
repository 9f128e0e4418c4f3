//! What the threads of context share.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Instant,
};

use nix::sys::eventfd::EventFd;
use tokio::sync::{oneshot, watch};

use super::{
    addresses::Addresses,
    ipvs::Service,
    netns::Discovery,
    nic::Missed,
    questions::{Asked, Question, Questions, Reply},
    runtime::Names,
    suspects::CounterMoves,
    witness::Witness,
};
use crate::diagnose::Moved;

/// What is known of a netns at any moment.
#[derive(Debug, Default)]
pub(super) struct Namespace {
    pub(super) name: Option<String>,
    pub(super) addresses: Addresses,
    pub(super) services: BTreeSet<Service>,
    /// `net.ipv4.vs.expire_nodest_conn`; `None` where there are no services.
    pub(super) expire_nodest_conn: Option<bool>,
    /// What its rules count, once a rule was seen to end a packet.
    pub(super) rules: Witness,
}

/// Whence and whither a SYN goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Flow {
    pub(super) src: IpAddr,
    pub(super) dst: IpAddr,
    pub(super) dport: u16,
}

/// Retransmitted SYNs by netns and flow: the interface, and how many.
pub(super) type Unanswered = BTreeMap<(u32, Flow), (Option<String>, u64)>;

/// Everything behind the lock.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Questions about sockets are near, for which the thread in charge should get ready.
    pub(super) questions_near: bool,
    /// Who waits for the counters of all namespaces.
    /// Counters that moved, by netns, as last read and not yet taken.
    pub(super) counter_moves: BTreeMap<u32, CounterMoves>,
    /// What network cards had no room for, not yet taken.
    pub(super) missed: Vec<Missed>,
    pub(super) counters_wanted: Vec<oneshot::Sender<BTreeMap<u32, Moved>>>,
    pub(super) namespaces: BTreeMap<u32, Namespace>,
    /// The namespaces in scope; `None`: all.
    pub(super) scope: Option<BTreeSet<u32>>,
    /// Asked by events, to be answered by the worker.
    pub(super) asked: Vec<Question>,
    questions: Questions,
    pub(super) unanswered: Unanswered,
    /// What context could not do: subject → reason.
    pub(super) problems: BTreeMap<String, String>,
}

impl State {
    /// Inode of the netns that the host started with.
    pub(super) fn initial_netns(&self) -> Option<u32> {
        let mut all = self.namespaces.iter();
        all.find(|(_, known)| known.name.as_deref() == Some("host"))
            .map(|(netns, _)| *netns)
    }
}

/// Shared by [`super::Context`] and its threads.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    discovery: Mutex<Discovery>,
    names: Mutex<Arc<Names>>,
    wake: EventFd,
    stop: AtomicBool,
    sockets: mpsc::Sender<Question>,
    /// Whether the IPVS entry hook is needed.
    pub(super) entry_hook: watch::Sender<bool>,
    /// Kernel's ticks per second.
    pub(super) hz: Option<u32>,
}

impl Shared {
    /// `sockets` takes the questions about processes.
    pub(super) fn new(sockets: mpsc::Sender<Question>, wake: EventFd) -> Self {
        Self {
            state: Mutex::default(),
            discovery: Mutex::default(),
            names: Mutex::default(),
            wake,
            stop: AtomicBool::new(false),
            sockets,
            entry_hook: watch::channel(false).0,
            hz: super::clock::hz(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn discovery(&self) -> MutexGuard<'_, Discovery> {
        self.discovery.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names of pods and containers, as last told.
    pub(super) fn names(&self) -> Arc<Names> {
        self.held_names().clone()
    }

    pub(super) fn set_names(&self, names: Names) {
        *self.held_names() = Arc::new(names);
    }

    /// Forgets the names of a netns that vanished.
    pub(super) fn forget_name(&self, netns: u32) {
        let mut held = self.held_names();
        if held.of_netns(netns).is_some() {
            Arc::make_mut(&mut held).forget(netns);
        }
    }

    fn held_names(&self) -> MutexGuard<'_, Arc<Names>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wake(&self) -> &EventFd {
        &self.wake
    }

    pub(super) fn knows(&self, netns: u32) -> bool {
        self.state().namespaces.contains_key(&netns)
    }

    /// Asks the thread in charge, unless the answer is known or on its way.
    pub(super) fn ask(&self, question: &Question) -> Asked {
        let mut state = self.state();
        let asked = state.questions.ask(question, Instant::now());
        if matches!(asked, Asked::Wait(_, true)) {
            if matches!(question, Question::Process { .. }) {
                // A closed channel means that context ends; who waits is told by the dropped sender.
                let _ = self.sockets.send(question.clone());
            } else {
                state.asked.push(question.clone());
                if state.asked.len() == 1 {
                    let _ = self.wake.write(1);
                }
            }
        }
        asked
    }

    pub(super) fn answer(&self, question: Question, reply: Reply) {
        self.state().questions.answer(question, reply, Instant::now());
    }

    pub(super) fn problem(&self, subject: &str, reason: String) {
        self.state().problems.insert(subject.to_owned(), reason);
    }

    /// What could not be done can be done again.
    pub(super) fn solved(&self, subject: &str) {
        self.state().problems.remove(subject);
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.wake.write(1);
        // Any question wakes the other thread.
        let _ = self.sockets.send(Question::Netns(0));
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}
