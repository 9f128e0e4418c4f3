//! From a raw event and the facts about its surroundings to a labelled drop.
//!
//! Pure: nothing here asks the system, so every rule is tested from recorded
//! events, and a capture file gives the label that the live run gave.

mod brief;
mod catalogue;
pub mod causes;
mod event;
mod facts;
mod netfilter;
mod pods;
pub mod reasons;
mod reconcile;
mod record;
mod topics;

pub use brief::{Brief, BriefLine, Label, has_line};
pub use catalogue::{
    Cause, CountedBy, Counter, Family, Finding, Location, Need, Signature, Split, catalogue, cause_by_slug,
    classify, diagnose, join_misdelivered, rests_on_symbols,
};
pub use causes::UNPROVOKED;
pub use event::{DecodeError, Packet, RawEvent, Tcp, address_from_halves};
pub use facts::{
    Action, AddressHolder, BpfProgram, CgroupPrograms, ConntrackUsage, CpuLimit, Facts, Filter,
    IpvsDestination, IpvsService, Link, Listener, NeighbourTable, NfQueue, Nic, Owner, Progress, Qdisc,
    RouteAnswer, Side, SocketMemory, Xdp,
};
pub use netfilter::{BaseChain, Ending, HookPoint, HookPoints, Rule, RuleEnd, Rules};
pub use pods::PodPattern;
pub use reconcile::{
    MISSED, Moved, PROOFS, Proof, Reconciled, Tallied, WITNESSES, Witness, counter_names, perhaps, proving,
    reconcile,
};
pub use record::{
    CauseCount, Counts, Coverage, Direction, Drop, Evidence, FoundBy, Gap, HookState, Name, Record, Remedy,
    ScopeText, Summary, SynUnanswered, Verdict,
};
pub use topics::{Topic, topic_by_slug, topics};
