//! What the causes of a refusing listener have in common.

use std::net::SocketAddr;

use droptrace_common::FieldId;

use super::values::{in_netns, sysctl_number};
use crate::diagnose::{Facts, Finding, Owner, RawEvent, address_from_halves};

/// The listener as event and facts know it.
pub(super) struct Refuser<'a> {
    /// Address and port.
    pub(super) address: Option<String>,
    /// Its process.
    pub(super) owner: Option<&'a Owner>,
    /// `sk_max_ack_backlog`: limit of the accept queue and of the SYN queue.
    pub(super) limit: Option<u64>,
    /// `net.core.somaxconn` of its netns now.
    pub(super) somaxconn: Option<u64>,
    /// `net.ipv4.tcp_syncookies` of its netns.
    pub(super) syncookies: Option<u64>,
    /// `net.ipv4.tcp_max_syn_backlog` of its netns.
    pub(super) max_syn_backlog: Option<u64>,
    /// Listeners that share address and port.
    pub(super) sharing: Option<u32>,
}

impl<'a> Refuser<'a> {
    /// Reads it: the event's own values first, since they are of the moment of the drop.
    pub(super) fn of(event: &RawEvent, facts: &'a Facts) -> Self {
        let known = facts.listener.as_ref();
        let port = field(event, FieldId::ListenerPort)
            .map(|port| port as u16)
            .or_else(|| event.parse().dport);
        let bound = || {
            if several(event) {
                return None;
            }
            let ip = event.address(FieldId::ListenerAddressHi, FieldId::ListenerAddressLo)?;
            Some(SocketAddr::new(ip, port?).to_string())
        };
        let setting = |id, name| field(event, id).or_else(|| sysctl_number(facts, name));
        Self {
            address: known.map(|known| known.address.to_string()).or_else(bound),
            owner: known.and_then(|known| known.owner.as_ref()),
            limit: field(event, FieldId::AcceptQueueLimit)
                .or_else(|| known.map(|known| known.queue_limit.into())),
            somaxconn: setting(FieldId::Somaxconn, "net.core.somaxconn"),
            syncookies: setting(FieldId::TcpSyncookies, "net.ipv4.tcp_syncookies"),
            max_syn_backlog: setting(FieldId::TcpMaxSynBacklog, "net.ipv4.tcp_max_syn_backlog"),
            sharing: known.map(|known| known.sharing),
        }
    }

    /// The process, else the listener, in words.
    pub(super) fn who(&self) -> String {
        match self.owner {
            Some(owner) => format!("{} (pid {})", owner.comm, owner.pid),
            None => format!(
                "the listener on {}",
                self.address.as_deref().unwrap_or("this port")
            ),
        }
    }

    /// Advises to turn syncookies on; `why` says what it does about the cause.
    pub(super) fn advise_syncookies(&self, found: &mut Finding, facts: &Facts, why: &str) {
        found.advise(
            why,
            Some(in_netns(facts, self.owner, "sysctl -w net.ipv4.tcp_syncookies=1")),
            "Takes effect at once, and only while a queue is full. A connection made from a cookie has no window scaling and \
             no SACK unless the client sends TCP timestamps; a lost last ACK is not repaired by the server.",
        );
    }

    /// Advises to make the SYN queue longer; `effect` says what it does about the cause.
    pub(super) fn advise_longer_queue(&self, found: &mut Finding, facts: &Facts, effect: &str) {
        let Some(limit) = self.limit else {
            return;
        };
        let who = self.who();
        let wanted = (limit * 4).max(1024);
        match self.somaxconn {
            Some(somaxconn) if somaxconn < wanted => found.advise(
                format!(
                    "Raise the limit, now {limit}: net.core.somaxconn (now {somaxconn}) in that netns, and the backlog that {who} gives to listen(); then restart it."
                ),
                Some(in_netns(facts, self.owner, &format!("sysctl -w net.core.somaxconn={wanted}"))),
                effect,
            ),
            _ => found.advise(
                format!(
                    "Raise the backlog that {who} gives to listen(), now {limit}; net.core.somaxconn allows more. Then restart it."
                ),
                None,
                effect,
            ),
        };
    }

    /// Where the limit came from, as far as it can be told afterwards: it was
    /// min(backlog, somaxconn) when listen() was called.
    pub(super) fn limit_from(&self) -> Option<LimitFrom> {
        let (limit, somaxconn) = (self.limit?, self.somaxconn?);
        Some(match limit.cmp(&somaxconn) {
            std::cmp::Ordering::Equal => LimitFrom::Somaxconn,
            std::cmp::Ordering::Greater => LimitFrom::ChangedSince,
            // Defaults of somaxconn: 128 before 5.4, 4096 since (net/core/net_namespace.c).
            std::cmp::Ordering::Less if limit == 128 || limit == 4096 => LimitFrom::ApplicationOrChangedSince,
            std::cmp::Ordering::Less => LimitFrom::Application,
        })
    }
}

/// Whether a counter may be about each of several listeners.
fn several(event: &RawEvent) -> bool {
    event.all(FieldId::ListenerPort).count() > 1
}

/// What the hook read of the listener; nothing where there are several.
pub(super) fn field(event: &RawEvent, id: FieldId) -> Option<u64> {
    event.field(id).filter(|_| !several(event))
}

/// The listeners that a counter may be about, where there are several: address, and how many wait of how many.
pub(super) fn candidates(event: &RawEvent, length: FieldId) -> Option<Vec<String>> {
    if !several(event) {
        return None;
    }
    let all = |id| event.all(id).collect::<Vec<_>>();
    let (his, los) = (all(FieldId::ListenerAddressHi), all(FieldId::ListenerAddressLo));
    let (ports, lengths) = (all(FieldId::ListenerPort), all(length));
    let limits = all(FieldId::AcceptQueueLimit);
    let of_index = |index: usize| {
        let ip = address_from_halves(*his.get(index)?, *los.get(index)?);
        let address = SocketAddr::new(ip, ports[index] as u16);
        Some(format!(
            "{address} ({} of {})",
            lengths.get(index)?,
            limits.get(index)?
        ))
    };
    Some((0..ports.len()).filter_map(of_index).collect())
}

/// The evidence of [`candidates`].
pub(super) const CANDIDATES: (&str, &str) = (
    "candidates",
    "listeners over their limit, how many wait of how many, where only a counter tells and it may be about each of them",
);

/// Origin of a listener's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitFrom {
    /// Equal to somaxconn.
    Somaxconn,
    /// Smaller than somaxconn: the backlog that the application gave.
    Application,
    /// Larger than somaxconn, which was lowered after listen().
    ChangedSince,
    /// Smaller than somaxconn, and a former default of it.
    ApplicationOrChangedSince,
}

impl LimitFrom {
    /// The word in evidence.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Somaxconn => "somaxconn",
            Self::Application => "application",
            Self::ChangedSince => "changed-since",
            Self::ApplicationOrChangedSince => "application-or-changed-since",
        }
    }
}

/// What each value of `limit_from` means, for the list of evidence.
pub(super) const LIMIT_FROM: &str = "where the limit came from: somaxconn (equal to it), application (its backlog is \
    smaller), changed-since (somaxconn was lowered after listen()), or application-or-changed-since (smaller than \
    somaxconn now, and equal to a default that somaxconn had)";
