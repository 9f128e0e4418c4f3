//! The base event: tracepoint `skb:kfree_skb`, which fires when the last reference to a packet is
//! given up as dropped (net/core/skbuff.c: `kfree_skb` 5.10, `kfree_skb_reason` 6.1,
//! `sk_skb_reason_drop` 6.12 and later).

use core::ptr::write_volatile;

use aya_ebpf::{
    EbpfContext,
    helpers::bpf_ktime_get_ns,
    maps::ProgramArray,
    programs::{BtfTracePointContext, RawTracePointContext},
};
use aya_log_ebpf::debug;
use droptrace_common::{CountKey, FIELDS_MAX, Field, FieldId, Like, Site, Tally, bits, ct_status, route};

use crate::{
    emit::{self, Counted, Drop, EventBuffer, FREE_FIELDS, HINT_AT, Work},
    hint::{self, HINT_FIELDS},
    ipvs,
    kernel::{self, layout, member, net_of_device, tcp_ext},
    maps::{FREE_TAILS, FREE_TAILS_TYPED},
    memo, multicast, packet, scope,
    skb::{self, SkBuff},
    source_check, time_wait,
};

/// TIME_WAIT and NEW_SYN_RECV (include/net/tcp_states.h): not full sockets, only `sock_common` may be read.
const TCP_TIME_WAIT: u8 = 6;
const TCP_NEW_SYN_RECV: u8 = 12;
/// LISTEN: a full socket, but of no connection.
const TCP_LISTEN: u8 = 10;

/// Places in [`FREE_TAILS`]: the program that looks, and one that is left empty.
const LOOK: u32 = 0;
const NOTHING: u32 = 1;

/// Where in [`droptrace_common::Frees::done`] a packet is noted.
#[inline(always)]
const fn place_of(skb: u64) -> usize {
    (skb >> 8 & 7) as usize
}

/// The tracepoint has several programs that all call one as their tail, [`look`]. From 6.1 on the kernel passes a program
/// over that is at work on this CPU already (`__bpf_trace_run`, kernel/trace/bpf_trace.c): a free in an interrupt, or by
/// who preempts (7.x), would be lost. The next program takes it over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    First,
    Later,
    Last,
}

/// A program of the tracepoint.
pub(crate) trait Free: EbpfContext {
    /// The programs of the same kind that it may call.
    fn tails() -> &'static ProgramArray;

    /// The argument with this index.
    fn word(&self, index: usize) -> u64;

    /// Reads the packet's `sk_buff`, its first argument.
    fn read(&self, into: &mut SkBuff);
}

impl Free for RawTracePointContext {
    #[inline(always)]
    fn tails() -> &'static ProgramArray {
        &FREE_TAILS
    }

    #[inline(always)]
    fn word(&self, index: usize) -> u64 {
        self.arg(index)
    }

    #[inline(always)]
    fn read(&self, into: &mut SkBuff) {
        into.read(self.arg(0));
    }
}

impl Free for BtfTracePointContext {
    #[inline(always)]
    fn tails() -> &'static ProgramArray {
        &FREE_TAILS_TYPED
    }

    #[inline(always)]
    fn word(&self, index: usize) -> u64 {
        self.arg(index)
    }

    #[inline(always)]
    fn read(&self, into: &mut SkBuff) {
        into.read_typed(self.arg(0));
    }
}

/// A program of the tracepoint that knows the types of its arguments.
pub(crate) trait Typed: Free {
    /// What the free is like, and how many bytes of the packet are at hand.
    fn like(&self, skb: u64) -> Option<(Like, u64)>;
}

impl Typed for BtfTracePointContext {
    #[inline(always)]
    fn like(&self, skb: u64) -> Option<(Like, u64)> {
        let (mut like, linear) = skb::like(skb)?;
        like.location = self.word(1);
        let arguments = layout!(kfree_skb_arguments);
        if kernel::has(arguments) && arguments >= 3 {
            like.reason = u64::from(self.word(2) as u32);
        }
        if kernel::has(arguments) && arguments >= 4 {
            let sk = self.word(3);
            if sk != 0 {
                like.rx_net = kernel::typed(sk, layout!(sock_net));
            }
        }
        Some((like, linear))
    }
}

/// The same as [`on_free`] for the first program, where it knows the types of its arguments: what is like one before is
/// counted at once.
#[inline(always)]
pub(crate) fn on_typed_free<F: Typed>(ctx: &F) {
    if let Some(frees) = memo::here()
        && memo::counts(ctx, frees)
    {
        // Else the next programs would take it over where another free is looked at meanwhile.
        let skb = kernel::any(&mut frees.way, ctx.word(0));
        frees.done[place_of(skb)] = skb;
        return;
    }
    on_free(ctx, Turn::First);
}

/// The free of a packet, once for each program of the tracepoint.
#[inline(always)]
pub(crate) fn on_free<F: Free>(ctx: &F, turn: Turn) {
    if turn != Turn::First && !is_left_over(ctx, turn) {
        return;
    }
    // SAFETY: the index is within the array. Where the call fails, user space has not filled the array, and attached nothing.
    unsafe { F::tails().tail_call(ctx, LOOK) };
}

/// Whether no program before has looked at this free.
#[inline(always)]
fn is_left_over(ctx: &impl Free, turn: Turn) -> bool {
    let Some(frees) = memo::here() else { return false };
    let skb = kernel::any(&mut frees.way, ctx.word(0));
    let done = &mut frees.done[place_of(skb)];
    if *done == skb {
        if turn == Turn::Last {
            *done = 0;
        }
        return false;
    }
    if frees.running == 0 {
        return false;
    }
    emit::tally(Tally::FreesTakenOver);
    true
}

/// The tail of these programs: what there is to be learnt from the free.
#[inline(always)]
pub(crate) fn look<F: Free>(ctx: &F) {
    let Some(frees) = memo::here() else { return };
    // SAFETY: valid references; volatile, for those who look from an interrupt.
    unsafe { write_volatile(&raw mut frees.running, frees.running + 1) };
    if !examine(ctx) {
        // From 6.13 on, the stack of a program that the kernel never runs within itself may be one per CPU, unless it calls
        // a tail (`check_max_stack_depth`, kernel/bpf/verifier.c, `bpf_prog_alloc_jit_priv_stack`, kernel/bpf/core.c). This
        // one runs within itself: so it calls one, of which there is none.
        // SAFETY: the index is within the array.
        unsafe { F::tails().tail_call(ctx, NOTHING) };
    }
    let Some(frees) = memo::here() else { return };
    // SAFETY: as above.
    unsafe { write_volatile(&raw mut frees.running, frees.running - 1) };
    let skb = kernel::any(&mut frees.way, ctx.word(0));
    frees.done[place_of(skb)] = skb;
}

/// False: there was no buffer to do it in.
#[inline(always)]
fn examine(ctx: &impl Free) -> bool {
    let Some(buffer) = emit::acquire() else {
        return false;
    };
    ctx.read(&mut buffer.work.skb);
    let location = ctx.word(1);
    let arguments = layout!(kfree_skb_arguments);
    let has_reason = kernel::has(arguments) && arguments >= 3;
    let reason: u32 = if has_reason { ctx.word(2) as u32 } else { 0 };
    let rx_sk = if kernel::has(arguments) && arguments >= 4 {
        kernel::any(&mut buffer.work.way, ctx.word(3))
    } else {
        0
    };
    buffer.header.bits = emit::take_headers(buffer);
    let packet = &buffer.work.skb;
    let (skb, sk, device) = (packet.address(), packet.sk(), packet.device());
    let (refdst, ct) = (packet.refdst & packet::POINTER, packet.entry & packet::POINTER);
    let verdict = !has_reason || reason == layout!(reason_netfilter_drop);
    buffer.work.verdict = u32::from(verdict);
    buffer.work.bridged = u32::from(verdict && buffer.work.skb.is_bridged());
    buffer.work.made = made_of(&buffer.work.skb, ct);
    let EventBuffer { work, packet, .. } = &mut *buffer;
    work.like.location = location;
    work.like.reason = u64::from(reason);
    memo::take(&mut work.like, &work.skb, packet, rx_sk);
    // SAFETY: no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    hint::take(&mut buffer.hint, skb, ct, &buffer.work.tuple, now);
    buffer.work.hinted = u32::from(buffer.hint.site != Site::Free as u16);
    if kernel::anew(&buffer.work.hinted) == 0 && kernel::anew(&buffer.work.bridged) != 0 {
        buffer.hint.site = Site::BridgeNetfilter as u16;
    }
    if kernel::anew(&buffer.hint.site) == Site::Free as u16 && buffer.header.bits & bits::MULTICAST != 0 {
        multicast::look(buffer, device, refdst);
    }
    let hinted = kernel::anew(&buffer.work.hinted) != 0;
    let netns = if hinted && buffer.hint.netns != 0 {
        buffer.hint.netns
    } else {
        packet::netns_of(rx_sk, sk, device, refdst, ct)
    };
    let netns = kernel::any(&mut buffer.header.netns, netns);
    // Which of them said so is not to be followed on.
    let [rx_sk, sk, device, refdst] =
        [rx_sk, sk, device, refdst].map(|pointer| kernel::any(&mut buffer.work.way, pointer));
    let found = &mut buffer.header.bits;
    kernel::add(found, buffer.hint.bits);
    if kernel::anew(&buffer.hint.site) == Site::MartianSource as u16
        && rp_filtered(buffer.hint.before, device)
    {
        kernel::add(found, bits::RP_FILTER);
    }
    kernel::add(found, refusal(refdst, device, has_reason));
    kernel::add(found, kernel::anew(&buffer.work.made));
    if kernel::anew(&buffer.work.made) & bits::IPVS_PROPERTY != 0 && ipvs::died(&buffer.work.tuple, now) {
        kernel::add(found, bits::DIED_AS);
    }
    if scope::admits(&buffer.work.tuple, netns) {
        packet::memberships(found, &mut buffer.work, netns);
        let found = *found;
        let site = kernel::anew(&buffer.hint.site);
        let hinted = kernel::anew(&buffer.work.hinted) != 0;
        let ifindex = device_index(device, buffer.header.iif, refdst);
        let drop = Drop {
            site,
            netns,
            ifindex,
            reason,
            location,
            bits: found,
        };
        // A hint's site tells the cause: its count does not depend on the place of the free.
        // Not so an answer alone: who answers a port unreachable is told by the place.
        debug!(
            ctx,
            "free of {:x} at {:x}: site {}, reason {}, bits {:x}, netns {}",
            skb,
            location,
            site,
            reason,
            found,
            netns
        );
        let place = CountKey::place(Site::from_number(site), location);
        let key_location = kernel::any(&mut buffer.work.way, place);
        let counted = emit::count(buffer, &drop, key_location, memo::settle);
        if counted == Counted::Wanted {
            buffer.header.segments = buffer.work.skb.segments();
            let [rx_sk, sk, refdst] =
                [rx_sk, sk, refdst].map(|pointer| kernel::any(&mut buffer.work.way, pointer));
            place_about(
                &mut buffer.fields,
                if rx_sk != 0 { rx_sk } else { sk },
                route_error(refdst),
                route_kind(refdst, buffer.header.protocol),
            );
            let (hinted, verdict) = (
                kernel::anew(&buffer.work.hinted) != 0,
                kernel::anew(&buffer.work.verdict) != 0,
            );
            let about_connection = !hinted
                && has_reason
                && reason >= layout!(reason_tcp_first)
                && reason <= layout!(reason_tcp_last);
            place_connection(
                &mut buffer.fields,
                if about_connection { rx_sk } else { 0 },
                reason == layout!(reason_paws),
            );
            if has_reason && reason == layout!(reason_socket_filter) {
                place_filter(&mut buffer.fields, rx_sk);
            }
            if verdict && !hinted {
                place_entry(&mut buffer.fields[3], skb);
            }
            let mut fields = FREE_FIELDS;
            if verdict {
                emit::take_frames(ctx, buffer);
                fields = HINT_AT;
            } else if hinted {
                emit::no_frames(buffer);
            }
            if hinted {
                emit::take_hint(buffer);
                fields = HINT_AT + HINT_FIELDS;
            }
            emit::send(buffer, fields);
        } else if counted != Counted::Lost
            && is_plain(&buffer.work)
            && kernel::anew(&buffer.hint.bits) == 0
            && !hinted
        {
            memo::note(&buffer.work, ifindex, counted == Counted::Quiet);
        }
    }
    emit::release(buffer);
    true
}

/// What conntrack and IPVS made of the packet: its entry is dying, it is IPVS's.
#[inline(always)]
fn made_of(skb: &SkBuff, ct: u64) -> u32 {
    let dying = ct != 0 && member::<u64>(ct, layout!(ct_status)) & ct_status::DYING != 0;
    (u32::from(dying) * bits::CONNTRACK_DYING) | (skb.ipvs_property() * bits::IPVS_PROPERTY)
}

/// Whether a memo can be made of its free: it holds nothing of a bridge, conntrack and IPVS.
#[inline(always)]
fn is_plain(work: &Work) -> bool {
    kernel::anew(&work.made) | kernel::anew(&work.bridged) == 0
}

/// Index of the device that the packet is on, came by, or is to leave by. `skb->dev` shares its place with other
/// things once the packet is queued in a socket (include/linux/skbuff.h): what has no netns is no device.
#[inline(always)]
fn device_index(device: u64, iif: u32, refdst: u64) -> u32 {
    if device != 0 && kernel::inode_of_net(net_of_device(device)) != 0 {
        member(device, layout!(dev_ifindex))
    } else if iif != 0 || refdst == 0 {
        iif
    } else {
        member(member(refdst, layout!(dst_dev)), layout!(dev_ifindex))
    }
}

/// Why a route leads nowhere (`dst_entry.error`), as a positive errno: IPv4 keeps it positive, IPv6 negative
/// (net/ipv4/route.c `ip_route_input_slow`, net/ipv6/route.c `ip6_rt_type_to_error`, 5.10 - 7.3).
#[inline(always)]
fn route_error(refdst: u64) -> u16 {
    if refdst == 0 {
        return 0;
    }
    member::<i16>(refdst, layout!(dst_error)).unsigned_abs()
}

/// What that says of the packet's route, in bits. Where forwarding is off, IPv4 has EHOSTUNREACH instead of any other
/// error, and for a route that leads on, too (net/ipv4/route.c `ip_route_input_slow`, 5.10 - 7.3).
#[inline(always)]
fn refusal(refdst: u64, device: u64, has_reason: bool) -> u32 {
    const EACCES: u16 = 13;
    const EINVAL: u16 = 22;
    const ENETUNREACH: u16 = 101;
    const EHOSTUNREACH: u16 = 113;
    match route_error(refdst) {
        ENETUNREACH => bits::NO_ROUTE,
        EHOSTUNREACH if has_reason => bits::NO_ROUTE | bits::ROUTE_REFUSES,
        EHOSTUNREACH => match source_check::device_setting(device, layout!(devconf_forwarding)) {
            Some(0) => bits::NO_ROUTE | bits::NOT_FORWARDING,
            Some(_) => bits::NO_ROUTE | bits::ROUTE_REFUSES,
            None => 0,
        },
        EACCES | EINVAL => bits::ROUTE_REFUSES,
        _ => 0,
    }
}

/// Where a route leads (see [`route`]), 0 for none. IPv4 marks routes of this host's unicast, broadcast and joined
/// multicast addresses RTCF_LOCAL (`ip_route_input_slow`, `__mkroute_output`, net/ipv4/route.c), IPv6 those of its unicast and
/// anycast addresses RTF_LOCAL and RTF_ANYCAST (`addrconf_f6i_alloc`, net/ipv6/route.c), 5.10 - 7.3.
#[inline(always)]
fn route_kind(refdst: u64, ethertype: u16) -> u64 {
    // include/net/dst.h: no route, but a bridge's or a tunnel's stand-in.
    const DST_FAKE_RTABLE_OR_METADATA: u16 = 0x0010 | 0x0080;
    // include/uapi/linux/in_route.h, ipv6_route.h
    const RTCF_LOCAL: u32 = 0x8000_0000;
    const RTF_LOCAL_OR_ANYCAST: u32 = 0x8000_0000 | 0x0010_0000;
    if refdst == 0
        || !kernel::has(layout!(dst_flags))
        || member::<u16>(refdst, layout!(dst_flags)) & DST_FAKE_RTABLE_OR_METADATA != 0
    {
        return 0;
    }
    let (entry, here) = match ethertype {
        0x0800 => (layout!(rtable_flags), RTCF_LOCAL),
        0x86dd => (layout!(rt6_flags), RTF_LOCAL_OR_ANYCAST),
        _ => return 0,
    };
    if !kernel::has(entry) {
        0
    } else if route_error(refdst) != 0 {
        route::NOWHERE
    } else if member::<u32>(refdst, entry) & here != 0 {
        route::HERE
    } else {
        route::ELSEWHERE
    }
}

/// Whether IPReversePathFilter grew since the martian handler ran
/// (`ip_rcv_finish_core`, net/ipv4/ip_input.c, counts it just before the free).
#[inline(always)]
fn rp_filtered(before: u64, device: u64) -> bool {
    device != 0 && tcp_ext!(net_of_device(device), mib_rp_filter) > before
}

/// What the free tells of the packet's socket and route, at constant places.
#[inline(always)]
fn place_about(fields: &mut [Field; FIELDS_MAX], sk: u64, route_error: u16, route: u64) {
    let state: u8 = if sk != 0 {
        member(sk, layout!(sock_state))
    } else {
        0
    };
    unless_zero(&mut fields[0], FieldId::SocketState, u64::from(state));
    let (state, sk) = (fields[0].value as u8, kernel::any(&mut fields[1].value, sk));
    let full = state != 0 && state != TCP_TIME_WAIT && state != TCP_NEW_SYN_RECV;
    let inode = if full { socket_inode(sk).unwrap_or(0) } else { 0 };
    unless_zero(&mut fields[1], FieldId::SocketInode, inode);
    unless_zero(&mut fields[2], FieldId::RouteError, u64::from(route_error));
    unless_zero(&mut fields[5], FieldId::Route, route);
}

/// What the segment of a connection was held against: the timestamp that is stored (PAWS), else what is expected, and how
/// much of it fits. Without a hint it is no request's.
#[inline(always)]
fn place_connection(fields: &mut [Field; FIELDS_MAX], sk: u64, paws: bool) {
    let state: u8 = if sk != 0 {
        member(sk, layout!(sock_state))
    } else {
        0
    };
    fields[3].id = 0;
    fields[4].id = 0;
    if state == 0 || state == TCP_LISTEN || state == TCP_TIME_WAIT || state == TCP_NEW_SYN_RECV {
        return;
    }
    if paws {
        let stored: u32 = member(sk, layout!(tcp_ts_recent));
        place(&mut fields[3], FieldId::TimestampStored, u64::from(stored));
        let stamp = kernel::number(sk, layout!(tcp_ts_recent_stamp)).unwrap_or(0);
        unless_zero(&mut fields[4], FieldId::TimestampAge, time_wait::age(stamp));
    } else {
        let (expected, window) = time_wait::receive_window(sk);
        place(&mut fields[3], FieldId::ExpectedSequence, u64::from(expected));
        place(&mut fields[4], FieldId::ReceiveWindow, u64::from(window));
    }
}

/// A field.
#[inline(always)]
fn place(place: &mut Field, id: FieldId, value: u64) {
    *place = Field {
        id: id as u32,
        pad: 0,
        value,
    };
}

/// Whether the socket has a filter, in the place of [`place_connection`], which has no other use for such a packet.
#[inline(always)]
fn place_filter(fields: &mut [Field; FIELDS_MAX], sk: u64) {
    let state = fields[0].value as u8;
    if sk != 0 && fields[0].id != 0 && state != TCP_TIME_WAIT && state != TCP_NEW_SYN_RECV {
        let has = member::<u64>(sk, layout!(sock_filter)) != 0;
        unless_zero(&mut fields[3], FieldId::SocketFilter, 1 + u64::from(has));
    }
}

/// Of what conntrack entry the packet is, in the place of [`place_connection`], too.
#[inline(always)]
fn place_entry(field: &mut Field, skb: u64) {
    let ct = member::<u64>(skb, layout!(skb_nfct)) & packet::POINTER;
    if ct != 0 && kernel::has(layout!(ct_status)) {
        place(field, FieldId::EntryStatus, member(ct, layout!(ct_status)));
    }
}

/// A field, or an empty place.
#[inline(always)]
fn unless_zero(place: &mut Field, id: FieldId, value: u64) {
    let value = kernel::any(&mut place.value, value);
    place.id = if value == 0 { 0 } else { id as u32 };
    place.pad = 0;
}

/// Inode by which `/proc/PID/fd` knows a full socket (`struct socket_alloc`, include/net/sock.h).
#[inline(always)]
pub(crate) fn socket_inode(sk: u64) -> Option<u64> {
    if !kernel::has(layout!(socket_alloc_inode)) || !kernel::has(layout!(socket_alloc_socket)) {
        return None;
    }
    let socket: u64 = member(sk, layout!(sock_socket));
    if socket == 0 {
        return None;
    }
    let alloc = socket - kernel::offset(layout!(socket_alloc_socket));
    Some(member(alloc, layout!(socket_alloc_inode)))
}
