//! What a function's entry leaves for its exit, on the same CPU.

use crate::{
    args::Entry,
    kernel::{self, layout},
    maps::SCRATCH,
};

/// Hooked functions with entry and exit.
#[repr(u32)]
#[derive(Clone, Copy)]
pub(crate) enum Function {
    ConnRequest = 0,
    SynRecvSock = 1,
    SynRecvSockV6 = 2,
    TimewaitProcess = 3,
    CheckReq = 4,
    ValidateIncoming = 5,
    ResolveClash = 6,
    EarlyDrop = 7,
    IpvsIn = 8,
    UdpEnqueue = 9,
    AddBacklog = 10,
    CookieCheck = 11,
    TryRmemSchedule = 12,
}

impl Function {
    /// How many there are.
    pub(crate) const COUNT: u32 = 13;
}

/// Bytes of a TCP header without options.
pub(crate) const TCP_HEADER: usize = 20;

/// One call in progress; `skb` is 0 when there is none.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Scratch {
    pub(crate) skb: u64,
    pub(crate) sk: u64,
    pub(crate) net: u64,
    /// This CPU's `struct linux_mib` of the netns: the counters of `TcpExt` and `IpExt`.
    pub(crate) mib: u64,
    /// Function's own values; see its entry.
    pub(crate) values: [u64; 8],
    pub(crate) tcp: [u8; TCP_HEADER],
    pub(crate) pad: u32,
}

impl Scratch {
    /// A call begins that is about this socket, an argument, and packet.
    #[inline(always)]
    pub(crate) fn begin(&mut self, ctx: &impl Entry, sk: u64, skb: u64) {
        let net: u64 = ctx.member(sk, layout!(sock_net));
        let table: u64 = ctx.member(net, layout!(net_statistics));
        self.skb = skb;
        self.sk = sk;
        self.net = net;
        self.mib = kernel::of_this_cpu(kernel::any(&mut self.values[0], table));
    }

    /// A counter of the socket's netns, by its index.
    #[inline(always)]
    pub(crate) fn counter(&self, index: u32) -> u64 {
        kernel::counter_at(self.mib, index)
    }
}

/// The slot of a function on this CPU.
#[inline(always)]
pub(crate) fn slot(function: Function) -> Option<&'static mut Scratch> {
    // SAFETY: a per-CPU slot; a nested call on this CPU may overwrite it, which the exit notices by the skb.
    SCRATCH
        .get_ptr_mut(function as u32)
        .map(|slot| unsafe { &mut *slot })
}

/// The slot, if a call is in progress; ends the call.
#[inline(always)]
pub(crate) fn take(function: Function) -> Option<&'static mut Scratch> {
    let slot = slot(function)?;
    (slot.skb != 0).then_some(slot)
}
