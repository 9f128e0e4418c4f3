//! Which namespaces are in scope: those that the user named, and those of
//! pods and containers, which come and go.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::{Worker, counters};
use crate::context::{
    netns,
    runtime::{Names, Resolver},
    suspects::Followed,
};

/// The namespaces in scope, each with a path that leads to it.
#[derive(Debug, Default)]
pub(super) struct Scope {
    /// As the user named them, which keeps them watched.
    named: BTreeMap<u32, PathBuf>,
    /// Those of pods and containers that are up.
    pods: BTreeMap<u32, PathBuf>,
    /// Knows of pods and containers.
    resolver: Option<Resolver>,
    /// What bears on how far the pods can be trusted, as last told.
    problems: BTreeMap<String, String>,
}

impl Scope {
    pub(super) fn new(named: BTreeMap<u32, PathBuf>, resolver: Option<Resolver>) -> Self {
        Self {
            named,
            resolver,
            ..Self::default()
        }
    }

    /// Knows of pods and containers.
    pub(super) const fn resolver(&self) -> Option<&Resolver> {
        self.resolver.as_ref()
    }

    /// Whether pods or containers were named.
    pub(super) fn follows(&self) -> bool {
        self.resolver.as_ref().is_some_and(Resolver::follows)
    }

    /// Whether nothing was named.
    fn is_all(&self) -> bool {
        self.named.is_empty() && !self.follows()
    }

    /// Whether the netns was named.
    pub(super) fn names(&self, netns: u32) -> bool {
        self.named.contains_key(&netns) || self.pods.contains_key(&netns)
    }

    /// Whether drops of the netns are wanted.
    pub(super) fn has(&self, netns: u32) -> bool {
        self.is_all() || self.names(netns)
    }

    /// What was named.
    pub(super) fn paths(&self) -> impl Iterator<Item = (u32, &Path)> {
        let all = self.named.iter().chain(&self.pods);
        all.map(|(netns, path)| (*netns, path.as_path()))
    }

    /// Forgets a netns of a pod that vanished: another one may get its number.
    pub(super) fn forget(&mut self, netns: u32) {
        self.pods.remove(&netns);
    }

    /// As others are told: `None` is all.
    fn told(&self) -> Option<BTreeSet<u32>> {
        (!self.is_all()).then(|| self.paths().map(|(netns, _)| netns).collect())
    }
}

impl Worker {
    /// Takes what is new of pods and containers: their names, and where those are that were named.
    pub(super) fn take_pods(&mut self) {
        let Some(told) = self.scope.resolver().map(Resolver::told) else {
            return;
        };
        self.shared.set_names(Names::of(&told.inventory));
        for (subject, reason) in &told.problems {
            self.shared.problem(subject, reason.clone());
        }
        for subject in self.scope.problems.keys() {
            if !told.problems.contains_key(subject) {
                self.shared.solved(subject);
            }
        }
        self.scope.problems = told.problems;
        if self.scope.follows() {
            self.follow(told.places);
        }
    }

    /// Puts these namespaces into scope, beside those that the user named, and takes others out.
    fn follow(&mut self, mut places: BTreeMap<u32, PathBuf>) {
        places.retain(|inode, path| netns::open(path).is_ok_and(|(_, found)| found == *inode));
        let before: BTreeSet<u32> = self.scope.paths().map(|(netns, _)| netns).collect();
        self.scope.pods = places;
        let now: BTreeSet<u32> = self.scope.paths().map(|(netns, _)| netns).collect();
        for &netns in before.difference(&now) {
            let written = self.publisher.unscope(netns);
            self.written(written);
        }
        let (watched, new): (Vec<u32>, Vec<u32>) = now
            .difference(&before)
            .partition(|netns| self.watched.contains_key(netns));
        for netns in watched {
            self.publish(netns);
            self.count_from_now(netns);
        }
        if !new.is_empty() {
            self.scan(false);
        }
        self.tell_scope();
    }

    /// Others are told what is in scope.
    pub(super) fn tell_scope(&self) {
        self.shared.state().scope = self.scope.told();
        self.tell_entry_hook();
    }

    /// Begins with the counters of a netns where they are: what moved them before was not in scope.
    fn count_from_now(&mut self, netns: u32) {
        if let Ok(mut visit) = self.visit(netns) {
            self.read_cards(netns, &mut visit);
            let now = counters::read();
            if let Some(watched) = self.watched.get_mut(&netns) {
                self.serial += 1;
                watched.followed = Followed::new(self.serial, counters::proofs_of(&now));
                watched.counters = now;
                watched.syn_retransmissions = None;
            }
        }
        self.go_home();
    }
}
