//! Counters that alone prove a cause, as they move in a netns, and the listeners that it may be about.

use std::{collections::BTreeMap, io, net::SocketAddr};

use super::{
    counters,
    netlink::Netlink,
    sockets::{self, Listening},
};
use crate::diagnose::Moved;

/// Counters of a netns that moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CounterMoves {
    /// Another number when a netns that came later has the inode.
    pub serial: u64,
    /// How far they moved since they were first read.
    pub moved: Moved,
    /// Listeners over a limit when they moved.
    pub suspects: Vec<Suspect>,
}

/// A listener over one of its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspect {
    /// Slug of the cause that this explains.
    pub cause: &'static str,
    /// Where it listens.
    pub address: SocketAddr,
    /// Inode of its socket.
    pub inode: u64,
    /// Connections that wait for accept().
    pub accept_queue: u32,
    /// Handshakes that wait for their last ACK.
    pub syn_queue: u32,
    /// Limit of both.
    pub limit: u32,
}

/// What is kept of a netns from one reading to the next.
#[derive(Debug, Default)]
pub(super) struct Followed {
    serial: u64,
    first: Moved,
    last: Moved,
    told: Moved,
    suspects: Vec<Suspect>,
}

impl Followed {
    /// From this reading on.
    pub(super) fn new(serial: u64, first: Moved) -> Self {
        Self {
            serial,
            last: first.clone(),
            first,
            ..Self::default()
        }
    }

    /// Counts from this reading on.
    pub(super) fn restart(&mut self, first: Moved) {
        *self = Self::new(self.serial, first);
    }

    /// Whether this is what the last reading said.
    pub(super) fn is_at(&self, now: &Moved) -> bool {
        *now == self.last
    }

    /// Takes a reading. Gives what was told by the one before, if that is news; `ask` says who is over a limit, where a
    /// counter of listeners moved: also of SYN queues, if it is told so.
    pub(super) fn take(
        &mut self,
        now: Moved,
        ask: impl FnOnce(bool) -> Vec<Suspect>,
    ) -> Option<CounterMoves> {
        let news = self.news();
        if !self.is_at(&now) {
            let moved = |name| now.get(name) != self.last.get(name);
            let syn_queues = moved("TcpExtTCPReqQFullDrop");
            if syn_queues || moved("TcpExtListenOverflows") {
                self.suspects = ask(syn_queues);
            }
            self.last = now;
        }
        news
    }

    /// What the last reading tells, if it was not told yet.
    pub(super) fn news(&mut self) -> Option<CounterMoves> {
        let moved = counters::moved(&self.first, &self.last);
        if moved == self.told || self.told.is_empty() && moved.values().all(|moved| *moved == 0) {
            return None;
        }
        self.told.clone_from(&moved);
        Some(CounterMoves {
            serial: self.serial,
            moved,
            suspects: self.suspects.clone(),
        })
    }
}

/// The listeners of a netns whose queues are over their limits now: the accept queue holds one more than its limit when it
/// refuses (`sk_acceptq_is_full`, include/net/sock.h), the SYN queue as many as it, or one more
/// (`inet_csk_reqsk_queue_is_full`, include/net/inet_connection_sock.h; 5.10 - 7.3). SYN queues are looked at if wanted:
/// for that the kernel goes through all connections.
///
/// # Errors
/// The kernel lists no TCP sockets.
pub(super) fn over_their_limit(diag: &mut Netlink, syn_queues: bool) -> io::Result<Vec<Suspect>> {
    let listeners = sockets::listeners(diag, 0)?;
    let requests = if syn_queues {
        sockets::requests(diag)?
    } else {
        Vec::new()
    };
    Ok(suspects(&listeners, &requests))
}

fn suspects(listeners: &[Listening], requests: &[SocketAddr]) -> Vec<Suspect> {
    let mut waiting: BTreeMap<u64, u32> = BTreeMap::new();
    for request in requests {
        let of_port: Vec<Listening> = listeners
            .iter()
            .filter(|each| each.address.port() == request.port())
            .cloned()
            .collect();
        if let Some(listener) = sockets::choose(&of_port, request.ip(), 0, None) {
            *waiting.entry(listener.inode).or_default() += 1;
        }
    }
    let mut found = Vec::new();
    for listener in listeners {
        let syn_queue = waiting.get(&listener.inode).copied().unwrap_or(0);
        let suspect = |cause| Suspect {
            cause,
            address: listener.address,
            inode: listener.inode,
            accept_queue: listener.queue_length,
            syn_queue,
            limit: listener.queue_limit,
        };
        if listener.queue_length > listener.queue_limit {
            found.push(suspect("accept-queue-full"));
        }
        if syn_queue > 0 && syn_queue >= listener.queue_limit {
            found.push(suspect("syn-queue-full"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(overflows: u64) -> Moved {
        Moved::from([("TcpExtListenOverflows", overflows)])
    }

    #[test]
    fn a_move_is_told_a_reading_later_and_once() {
        let mut followed = Followed::new(7, reading(100));
        let mut asked = 0;
        let mut take = |overflows| {
            followed.take(reading(overflows), |syn_queues| {
                assert!(!syn_queues);
                asked += 1;
                Vec::new()
            })
        };
        assert_eq!(take(100), None);
        assert_eq!(take(103), None);
        let told = take(103).unwrap();
        assert_eq!((told.serial, told.moved), (7, reading(3)));
        assert_eq!(take(103), None);
        assert_eq!(take(104), None);
        assert_eq!(take(106).unwrap().moved, reading(4));
        assert_eq!(take(106).unwrap().moved, reading(6));
        assert_eq!(asked, 3);
    }

    #[test]
    fn who_is_over_a_limit_is_named() {
        let on = |address: &str, inode, queue_length, queue_limit| Listening {
            address: address.parse().unwrap(),
            ifindex: 0,
            v6only: false,
            queue_length,
            queue_limit,
            inode,
        };
        let listeners = [
            on("0.0.0.0:80", 1, 129, 128),
            on("0.0.0.0:81", 2, 128, 128),
            on("0.0.0.0:82", 3, 0, 2),
        ];
        let request = |port: u16| SocketAddr::from(([10, 0, 0, 1], port));
        let found = suspects(&listeners, &[request(82), request(82), request(80)]);
        let named: Vec<_> = found.iter().map(|each| (each.cause, each.inode)).collect();
        assert_eq!(named, [("accept-queue-full", 1), ("syn-queue-full", 3)]);
        assert_eq!(found[1].syn_queue, 2);
    }
}
