//! What droptrace says: the records that every sink renders, that JSON lines
//! and capture files carry, and from which the JSON schema is made.

use std::{collections::BTreeMap, net::IpAddr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Named values, in the order in which the cause lists them.
pub type Evidence = serde_json::Map<String, serde_json::Value>;

/// One line of JSON output, one custom block of a capture file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Record {
    /// What this run can see; first, and again when a kernel module comes or goes.
    Coverage(Coverage),
    /// One labelled drop.
    Drop(Box<Drop>),
    /// The name of a netns, told later than a drop there.
    Name(Name),
    /// One labelled drop in short, with `--every-drop`.
    Brief(Box<super::Brief>),
    /// Exact totals so far.
    Counts(Counts),
    /// The end of a run.
    Summary(Summary),
}

/// What became of the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Discarded without a word to the sender.
    Dropped,
    /// Discarded, and the sender was told (RST or ICMP error).
    Rejected,
    /// Knowingly sent to a dead end.
    Misdelivered,
}

impl Verdict {
    /// The word in JSON and on screen.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dropped => "dropped",
            Self::Rejected => "rejected",
            Self::Misdelivered => "misdelivered",
        }
    }
}

/// Which way the packet went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Came in by an interface.
    In,
    /// Made on this host.
    Out,
    /// Passing through this host.
    Forward,
}

/// How the drop came to be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FoundBy {
    /// A hook of its own, since the free is not traced or says less.
    Hook,
    /// The tracepoint `skb:kfree_skb`.
    KfreeSkb,
    /// A kernel counter that moved.
    Counter,
}

impl FoundBy {
    /// The word in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hook => "hook",
            Self::KfreeSkb => "kfree_skb",
            Self::Counter => "counter",
        }
    }
}

/// The protocol of a packet that is not IP, by its EtherType; 0 for none.
pub(super) fn ethertype(number: u16) -> Option<String> {
    (number != 0).then(|| format!("ethertype {number:#06x}"))
}

/// A labelled drop: which packet, where, whose, why, how we know, what to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Drop {
    /// Wall clock time of the drop, RFC 3339 with nanoseconds, UTC.
    pub time: String,
    /// The same moment on the kernel's monotonic clock, in nanoseconds.
    pub ktime_ns: u64,
    /// What became of the packet.
    pub verdict: Verdict,
    /// Slug of the root cause; `droptrace explain SLUG` tells more.
    pub cause: String,
    /// The cause in a few words.
    pub title: String,
    /// Not a loss: hidden unless asked for.
    pub benign: bool,
    /// How it came to be known.
    pub found_by: FoundBy,
    /// How many drops this line stands for: itself and those of the same kind, counted but not sent before it; with
    /// `--every-drop` itself alone. 0 where it only tells how a drop reported before went on (`died_as`).
    pub packets: u64,
    /// Inode number of the network namespace; null when the kernel does not say.
    pub netns: Option<u32>,
    /// Name of the network namespace, where it has one.
    pub netns_name: Option<String>,
    /// Pod that has the network namespace, as `NAMESPACE/NAME`; absent when none is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Container that has the network namespace: of a pod, its only one; of Docker, that for which it was made. Absent when
    /// none or several are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Interface that the packet came by or was to leave by.
    pub interface: Option<String>,
    /// Which way the packet went.
    pub direction: Option<Direction>,
    /// Source address.
    pub src: Option<IpAddr>,
    /// Destination address.
    pub dst: Option<IpAddr>,
    /// Pod of this host, else container, that has the source address; absent when none is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub src_name: Option<String>,
    /// The same of the destination address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dst_name: Option<String>,
    /// Source port.
    pub sport: Option<u16>,
    /// Destination port.
    pub dport: Option<u16>,
    /// Protocol: `tcp`, `udp`, `icmp`, `icmpv6`, or its number, or the EtherType as `ethertype 0x88cc`.
    pub protocol: Option<String>,
    /// TCP flags, such as `S`, `SA`, `.` (ACK only), `FA`, `R`.
    pub flags: Option<String>,
    /// Bytes from the network header on.
    pub length: u32,
    /// The process that owns the socket in question.
    pub owner: Option<super::Owner>,
    /// Kernel counter that counts this drop, as `nstat` or the file names it; several names where the drop does not tell which.
    pub counter: Option<String>,
    /// How we know: typed values, named by the cause.
    pub evidence: Evidence,
    /// What to change.
    pub remedy: Vec<Remedy>,
    /// Slug of what the packet died of later, where one drop ends elsewhere (a misdelivered SYN). Such a line follows the
    /// one that reported the packet, and stands for no packet itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub died_as: Option<String>,
    /// Values that could not be had, each with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub missing: BTreeMap<String, String>,
}

/// Who has a netns, where that came to be known only after drops there had been told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Name {
    /// Wall clock time, RFC 3339, UTC.
    pub time: String,
    /// Drops from this moment on are meant, on the kernel's monotonic clock, in nanoseconds.
    pub since_ktime_ns: u64,
    /// Inode number of the network namespace.
    pub netns: u32,
    /// Pod, as `NAMESPACE/NAME`.
    pub pod: Option<String>,
    /// Container.
    pub container: Option<String>,
    /// Addresses, as the container runtime tells them.
    pub addresses: Vec<IpAddr>,
}

impl Name {
    /// Gives the name to a drop that was told before it was known.
    pub fn join(&self, drop: &mut Drop) {
        if drop.ktime_ns < self.since_ktime_ns {
            return;
        }
        if drop.netns == Some(self.netns) && drop.pod.is_none() && drop.container.is_none() {
            drop.pod.clone_from(&self.pod);
            drop.container.clone_from(&self.container);
        }
        let one = self.pod.as_ref().or(self.container.as_ref());
        let ends = [(drop.src, &mut drop.src_name), (drop.dst, &mut drop.dst_name)];
        for (address, name) in ends {
            if name.is_none() && address.is_some_and(|address| self.addresses.contains(&address)) {
                *name = one.cloned();
            }
        }
    }
}

/// One thing that the operator can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Remedy {
    /// What to do, in a sentence that holds the drop's own values.
    pub action: String,
    /// A command that does it, where one does.
    pub command: Option<String>,
    /// Its side effects and limits.
    pub effect: String,
}

/// What this run can see.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Coverage {
    /// Version of droptrace.
    pub version: String,
    /// Kernel release.
    pub kernel: String,
    /// Boot id of the kernel.
    pub boot_id: String,
    /// What the run was asked to see.
    pub scope: ScopeText,
    /// Each hook: where it is attached, or why not.
    pub hooks: Vec<HookState>,
    /// What cannot be seen, and why.
    pub gaps: Vec<Gap>,
    /// What else bears on how far this run can be trusted: where offsets come from, what the system did not answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The scope as the user gave it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScopeText {
    /// Pods, as they were named. Where they are at the moment, `netns` tells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<String>,
    /// Labels of pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// Containers, as they were named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<String>,
    /// Network namespaces, as inode numbers.
    pub netns: Vec<u32>,
    /// Their names, in the same order; null for one without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub netns_names: Vec<Option<String>>,
    /// Addresses.
    pub addresses: Vec<String>,
    /// Port.
    pub port: Option<u16>,
    /// Protocol.
    pub protocol: Option<String>,
    /// Slugs of causes.
    pub causes: Vec<String>,
}

/// One hook and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HookState {
    /// Name of the hook.
    pub hook: String,
    /// Symbol or tracepoint really attached to.
    pub symbol: Option<String>,
    /// How: `fentry`, `fexit`, `kprobe`, `kretprobe`, `tp_btf`, `raw_tracepoint`, joined by `+`.
    pub method: Option<String>,
    /// Attached, waiting for a module or condition, not needed here, or failed.
    pub state: String,
    /// Why it is not attached.
    pub reason: Option<String>,
}

/// A cause, or a field of its evidence, that this kernel or run cannot show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Gap {
    /// Slug of the cause.
    pub cause: String,
    /// Name of the evidence field; null when the whole cause is not seen.
    pub field: Option<String>,
    /// Why, and what would mend it.
    pub reason: String,
}

/// Exact totals, cumulative since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Counts {
    /// Wall clock time, RFC 3339, UTC.
    pub time: String,
    /// Totals by cause, netns and verdict.
    pub causes: Vec<CauseCount>,
    /// Drops that did not reach this program one by one, in full or in short; they are in the totals.
    pub lost_events: u64,
    /// The same by cause.
    pub lost: BTreeMap<String, u64>,
    /// Drops that are in no total, since the count table was full, or droptrace was at work on the same CPU already.
    pub uncounted: u64,
    /// Calls of hooks that the kernel passed over, since the hook's program was at work on the same CPU already, by hook:
    /// what they had told is missing.
    #[serde(default)]
    pub passed_over: BTreeMap<String, u64>,
    /// Clashes of conntrack entries that the kernel resolved without loss.
    pub clashes_resolved: u64,
    /// Hints of context hooks that no free consumed.
    pub hints_orphaned: u64,
}

/// One total.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CauseCount {
    /// Slug of the cause.
    pub cause: String,
    /// Inode of the netns; 0 when the kernel did not say.
    pub netns: u32,
    /// What became of the packets.
    pub verdict: Verdict,
    /// Not a loss.
    pub benign: bool,
    /// Packets.
    pub packets: u64,
    /// `exact`, or `sampled` where the split between this and its sister cause is known from full events only.
    pub split: super::Split,
}

/// The end of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Summary {
    /// How long the run saw drops, in seconds.
    pub seconds: f64,
    /// Why it ended: `interrupted`, `duration`, `command`, `size`, `pipe`, …
    pub ended: String,
    /// The last totals.
    pub counts: Counts,
    /// Connection attempts of local sockets that stayed unanswered although no drop was seen here.
    pub syn_unanswered: Vec<SynUnanswered>,
    /// What the kernel's counters say of the drops that were seen, in every netns in scope that is still there. Empty where
    /// the scope leaves out drops by address, port or protocol: counters do not.
    #[serde(default)]
    pub reconcile: Vec<super::Reconciled>,
}

/// SYNs sent again by local sockets that no local drop explains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SynUnanswered {
    /// Inode of the netns.
    pub netns: u32,
    /// Name of the netns, where it has one.
    pub netns_name: Option<String>,
    /// Interface by which the route leaves.
    pub interface: Option<String>,
    /// Inode of a netns of this host that has the destination address; null: none that is known.
    #[serde(default)]
    pub held_by: Option<u32>,
    /// Destination address.
    pub dst: Option<IpAddr>,
    /// Destination port.
    pub dport: Option<u16>,
    /// SYNs sent again.
    pub retransmissions: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::samples;

    #[test]
    fn a_late_name_is_given_to_the_drops_that_it_means() {
        let joined = |change: fn(&mut Drop)| {
            let mut drop = samples::accept_queue();
            change(&mut drop);
            samples::name().join(&mut drop);
            [drop.pod, drop.container, drop.src_name, drop.dst_name].map(Option::unwrap_or_default)
        };
        assert_eq!(joined(|_| {}), ["default/web", "nginx", "", "default/web"]);
        assert_eq!(joined(|drop| drop.netns = Some(7)), ["", "", "", "default/web"]);
        assert_eq!(joined(|drop| drop.ktime_ns = 1), ["", "", "", ""]);
        assert_eq!(
            joined(|drop| drop.pod = Some("default/db".into())),
            ["default/db", "", "", "default/web"],
            "what is known stays"
        );
    }
}
