//! The maps, shared by all programs.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap, ProgramArray, RingBuf},
};
use droptrace_common::{
    Address, AddressKey, AddressValue, CountKey, CountValue, Frees, IpvsLayout, QUIET_MAX, Sampling,
    ServiceKey, TALLIES,
};

use crate::{
    emit::{self, EventBuffer},
    hint::{Hint, Mark},
    ipvs::{Candidate, Flow},
    kernel::PerCpu,
    scratch::Scratch,
};

/// Full events. User space gives it the size that it takes.
#[map]
pub(crate) static EVENTS: RingBuf = RingBuf::with_byte_size(Sampling::RING_MAX, 0);

/// Brief records; user space makes it larger where they are wanted.
#[map]
pub(crate) static BRIEFS: RingBuf = RingBuf::with_byte_size(4 << 10, 0);

/// Exact counts.
#[map]
pub(crate) static COUNTS: PerCpuHashMap<CountKey, CountValue> = PerCpuHashMap::with_max_entries(8192, 0);

/// Keys none of whose events is wanted; the value means nothing.
#[map]
pub(crate) static QUIET: HashMap<CountKey, u32> = HashMap::with_max_entries(QUIET_MAX, 0);

/// The jiffy before which a hint or mark may wait for its packet.
#[map]
pub(crate) static HINTED_UNTIL: Array<u64> = Array::with_max_entries(1, 0);

/// What droptrace itself lost or left over.
#[map]
pub(crate) static TALLIES_MAP: PerCpuArray<u64> = PerCpuArray::with_max_entries(TALLIES, 0);

/// Local addresses of every netns: longest prefix of table `local`.
#[map]
pub(crate) static ADDRESSES: LpmTrie<AddressKey, AddressValue> = LpmTrie::with_max_entries(1 << 16, 0);

/// IPVS services.
#[map]
pub(crate) static SERVICES: HashMap<ServiceKey, u32> = HashMap::with_max_entries(1 << 15, 0);

/// Network namespaces in scope, by inode.
#[map]
pub(crate) static SCOPE_NETNS: HashMap<u32, u32> = HashMap::with_max_entries(4096, 0);

/// Addresses in scope.
#[map]
pub(crate) static SCOPE_ADDRESSES: HashMap<Address, u32> = HashMap::with_max_entries(1 << 14, 0);

/// Layout of the IPVS module's structures.
#[map]
pub(crate) static IPVS_LAYOUT: Array<IpvsLayout> = Array::with_max_entries(1, 0);

/// Where an event is put together; several, since a program may be interrupted by another.
#[map]
pub(crate) static BUFFERS: PerCpuArray<EventBuffer> = PerCpuArray::with_max_entries(emit::BUFFERS_MAX, 0);

/// What the programs of the tracepoint of frees call as their tail.
#[map]
pub(crate) static FREE_TAILS: ProgramArray = ProgramArray::with_max_entries(2, 0);

/// The same of those that know the type of the tracepoint's arguments: a map takes programs of one kind only.
#[map]
pub(crate) static FREE_TAILS_TYPED: ProgramArray = ProgramArray::with_max_entries(2, 0);

/// Which frees are being looked at, and what those before came to.
#[map]
pub(crate) static FREES: PerCpuArray<Frees> = PerCpuArray::with_max_entries(1, 0);

/// Hints by the packet's address.
#[map]
pub(crate) static HINTS: LruHashMap<u64, Hint> = LruHashMap::with_max_entries(4096, 0);

/// Hints of hooks that do not see the packet, one per CPU.
#[map]
pub(crate) static MARKS: PerCpuArray<Mark> = PerCpuArray::with_max_entries(1, 0);

/// Where this CPU's per-CPU variables are.
#[map]
pub(crate) static PER_CPU: PerCpuArray<PerCpu> = PerCpuArray::with_max_entries(1, 0);

/// From a function's entry to its exit.
#[map]
pub(crate) static SCRATCH: PerCpuArray<Scratch> =
    PerCpuArray::with_max_entries(crate::scratch::Function::COUNT, 0);

/// A packet that met a left-over IPVS entry, until the verdict is known.
#[map]
pub(crate) static CANDIDATES: PerCpuArray<Candidate> = PerCpuArray::with_max_entries(1, 0);

/// Packets sent to a dead server, by what they look like afterwards.
#[map]
pub(crate) static MISDELIVERED: LruHashMap<Flow, u64> = LruHashMap::with_max_entries(4096, 0);
