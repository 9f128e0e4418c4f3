//! Questions to the system and their answers: each is asked once however many
//! events want it, and its answer serves for a while.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use super::{cgroups::Cgroup, progress::Blocked, sockets::Local};
use crate::diagnose::{
    CgroupPrograms, ConntrackUsage, IpvsService, Link, Listener, NeighbourTable, NfQueue, Nic, Owner,
    Progress, RouteAnswer,
};

/// Answers kept; beyond that the stale ones, and if need be all, are forgotten.
const KEPT: usize = 16_384;
/// Questions open at once; beyond that events do without.
const OPEN: usize = 2_048;

/// Something that only the system knows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Question {
    /// Is there such a netns?
    Netns(u32),
    /// Which listener does a packet meet?
    Listener {
        netns: u32,
        to: IpAddr,
        port: u16,
        ifindex: u32,
        inode: Option<u64>,
    },
    /// Which socket is a packet for or from?
    Socket {
        netns: u32,
        protocol: u8,
        local: SocketAddr,
        remote: SocketAddr,
        ifindex: u32,
    },
    /// Which process holds a socket?
    Process { netns: u32, inode: u64 },
    /// How do the processes that hold a socket get on?
    Progress { netns: u32, pid: u32, inode: u64 },
    /// How many of these threads are in state D still?
    Blocked { netns: u32, threads: Blocked },
    /// Which programs look at the packets of a cgroup's sockets?
    CgroupPrograms { netns: u32, cgroup: Cgroup },
    /// How often was a cgroup held back by its CPU limit?
    Throttled { netns: u32, cgroup: String },
    /// Where would a packet go?
    Route {
        netns: u32,
        to: IpAddr,
        from: Option<IpAddr>,
        /// Device that the packet came by, for one that is to be sent on.
        iif: Option<u32>,
    },
    /// Which IPVS services have an address?
    Services { netns: u32, address: IpAddr },
    /// How full is the conntrack table?
    Conntrack { netns: u32 },
    /// What stands between the stack and a device?
    Link { netns: u32, index: u32 },
    /// How is a network card set up?
    Nic { netns: u32, index: u32 },
    /// How full is the table of neighbours of a family?
    NeighbourTable { netns: u32, family: u8 },
    /// Which queues take packets for programs?
    Queues { netns: u32 },
    /// What do the rules count by now?
    Rulesets { netns: u32 },
    /// How many pages do all sockets of a protocol hold?
    MemoryPages { netns: u32, protocol: u8 },
    /// What does a file below `/proc/sys` say?
    Sysctl { netns: u32, path: PathBuf },
}

impl Question {
    /// How long an answer serves.
    const fn keeps(&self) -> Duration {
        match self {
            // Whoever asks wants to know what they count after a packet of its own.
            Self::Rulesets { .. } => Duration::ZERO,
            Self::Conntrack { .. }
            | Self::MemoryPages { .. }
            | Self::Link { .. }
            | Self::Nic { .. }
            | Self::NeighbourTable { .. }
            | Self::Queues { .. } => Duration::from_millis(200),
            Self::Throttled { .. } | Self::Blocked { .. } => Duration::from_millis(50),
            Self::Services { .. } => Duration::from_millis(500),
            _ => Duration::from_secs(1),
        }
    }
}

/// What the system said.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Answer {
    Present,
    /// Its owner is a question of its own.
    Listener(Listener),
    Socket(Local),
    Owner(Owner),
    /// Its threads in state D, and when that was.
    Progress(Progress, Blocked, Instant),
    Blocked(u32),
    Throttled(u64),
    CgroupPrograms(CgroupPrograms),
    Route(RouteAnswer),
    Services(Vec<IpvsService>),
    Conntrack(ConntrackUsage),
    Link(Box<Link>),
    Nic(Nic),
    NeighbourTable(NeighbourTable),
    MemoryPages(u64),
    Sysctl(String),
    Queues(Vec<NfQueue>),
    /// The witness of the netns knows.
    Read,
}

/// The answer, or why there is none.
pub(super) type Reply = Result<Answer, String>;

/// What becomes of a question.
#[derive(Debug)]
pub(super) enum Asked {
    Known(Reply),
    /// Someone must find out; true when nobody was asked yet.
    Wait(oneshot::Receiver<Reply>, bool),
}

/// Answers known and questions open.
#[derive(Debug, Default)]
pub(super) struct Questions {
    known: HashMap<Question, (Instant, Reply)>,
    open: HashMap<Question, Vec<oneshot::Sender<Reply>>>,
}

impl Questions {
    pub(super) fn ask(&mut self, question: &Question, now: Instant) -> Asked {
        if let Some((when, reply)) = self.known.get(question)
            && now.saturating_duration_since(*when) < question.keeps()
        {
            return Asked::Known(reply.clone());
        }
        let (sender, receiver) = oneshot::channel();
        if let Some(waiting) = self.open.get_mut(question) {
            waiting.push(sender);
            return Asked::Wait(receiver, false);
        }
        if self.open.len() >= OPEN {
            return Asked::Known(Err(
                "not asked: too many different questions to the system at once".to_owned(),
            ));
        }
        self.open.insert(question.clone(), vec![sender]);
        Asked::Wait(receiver, true)
    }

    pub(super) fn answer(&mut self, question: Question, reply: Reply, now: Instant) {
        for waiting in self.open.remove(&question).unwrap_or_default() {
            // Who waited too long is gone.
            let _ = waiting.send(reply.clone());
        }
        if self.known.len() >= KEPT {
            self.known
                .retain(|question, (when, _)| now.saturating_duration_since(*when) < question.keeps());
            if self.known.len() >= KEPT {
                self.known.clear();
            }
        }
        self.known.insert(question, (now, reply));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn ten_thousand_events_ask_once() {
        let mut questions = Questions::default();
        let question = Question::Conntrack { netns: 1 };
        let now = Instant::now();
        let mut waiting = Vec::new();
        let mut asked = 0;
        for _ in 0..10_000 {
            match questions.ask(&question, now) {
                Asked::Wait(receiver, new) => {
                    asked += u32::from(new);
                    waiting.push(receiver);
                }
                Asked::Known(reply) => panic!("nobody answered, yet {reply:?}"),
            }
        }
        assert_eq!(asked, 1);
        questions.answer(question.clone(), Ok(Answer::Present), now);
        for mut receiver in waiting {
            assert_eq!(receiver.try_recv().unwrap(), Ok(Answer::Present));
        }
        assert!(matches!(
            questions.ask(&question, now),
            Asked::Known(Ok(Answer::Present))
        ));
        assert!(matches!(
            questions.ask(&question, now + SECOND),
            Asked::Wait(_, true)
        ));
    }

    #[test]
    fn memory_is_bounded() {
        let mut questions = Questions::default();
        let now = Instant::now();
        let refused = (0..10_000)
            .filter(|&netns| matches!(questions.ask(&Question::Netns(netns), now), Asked::Known(Err(_))))
            .count();
        assert_eq!(refused, 10_000 - OPEN);
        for netns in 0..100_000 {
            questions.answer(Question::Netns(netns), Ok(Answer::Present), now);
        }
        assert!(questions.known.len() <= KEPT && questions.open.is_empty());
    }
}
