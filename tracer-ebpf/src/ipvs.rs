//! IPVS (net/netfilter/ipvs): services without servers, and packets that meet the entry of an old connection.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use droptrace_common::{Address, EventHeader, Field, FieldId, IpvsLayout, PACKET_MAX, Site, bits};

use crate::{
    args::{Entry, Exit},
    emit::{self, Fields},
    hint::{self, HINT_FIELDS},
    kernel::{self, has, ipvs_layout, layout, member, offset, read},
    maps::{CANDIDATES, MISDELIVERED},
    packet::{self, Tuple},
    scratch::{self, Function},
};

/// AF_INET6.
const AF_INET6: u64 = 10;
/// `IP_VS_DEST_F_AVAILABLE`/`IP_VS_DEST_CF_AVAILABLE` (include/net/ip_vs.h).
const AVAILABLE: u32 = 1;
/// `IP_VS_TCP_S_SYN_SENT`, `IP_VS_TCP_S_SYN_RECV` (include/net/ip_vs.h): the SYN is one sent again.
const SYN_SENT: u64 = 2;
const SYN_RECV: u64 = 3;
/// A misdelivered packet that dies later than this is another drop.
const DIED_WITHIN_NS: u64 = 10_000_000_000;
/// Netfilter verdict NF_DROP.
const NF_DROP: u32 = 0;

/// Place in the scratch of [`Function::IpvsIn`]: calls within the call.
const NESTED: usize = 0;

/// What a packet looks like once IPVS has sent it to its server.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Flow {
    src: Address,
    dst: Address,
    sport: u16,
    dport: u16,
    pad: u32,
}

/// A packet that met a left-over entry; `skb` is 0 when there is none.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Candidate {
    skb: u64,
    entry: u64,
    bits: u32,
    pad: u32,
    tuple: Tuple,
    server: Flow,
    header: EventHeader,
    packet: [u8; PACKET_MAX],
    fields: [Field; HINT_FIELDS],
}

/// `ip_vs_leave(svc, skb, pd, iph)`: the service has no usable server; an ICMP error follows, then NF_DROP.
#[inline(always)]
pub(crate) fn leave_entry(ctx: &impl Entry) {
    let Some(layout) = kernel::ipvs() else { return };
    let skb = ctx.argument(ipvs_layout!(layout, arg_leave_skb));
    hint::leave(skb, Site::IpvsNoDestination, 0, 0, 0, |_| {});
}

/// `ip_vs_conn_expire_now(cp)`: a packet met a left-over entry, which ends; the packet is scheduled anew, or dropped
/// when its conntrack entry is confirmed.
#[inline(always)]
pub(crate) fn expire_now_entry(ctx: &impl Entry) {
    let Some(layout) = kernel::ipvs() else { return };
    let entry = ctx.argument(ipvs_layout!(layout, arg_expire_now_cp));
    let Some(buffer) = emit::acquire() else { return };
    let tuple = &mut buffer.work.entry;
    place_tuple(tuple, layout, entry);
    if let Some(candidate) = candidate()
        && candidate.entry == entry
    {
        candidate.skb = 0;
    }
    hint::mark(Site::IpvsExpired, tuple, 0, |fields| {
        push_entry(fields, layout, entry, tuple);
    });
    emit::release(buffer);
}

/// Entry function of IPVS, `ip_vs_in_hook(priv, skb, state)` (6.1 and later) or `ip_vs_in(ipvs, hooknum, skb, af)` (5.10).
#[inline(always)]
pub(crate) fn in_entry(ctx: &impl Entry) {
    let Some(layout) = kernel::ipvs() else { return };
    let skb = ctx.argument(ipvs_layout!(layout, arg_in_skb));
    let Some(call) = scratch::slot(Function::IpvsIn) else {
        return;
    };
    if kernel::bit_field(skb, layout!(skb_ipvs_property), 1) != 0 {
        // IPVS sends the packet on through LOCAL_OUT, where its own hook lets it pass: a call within the call.
        if call.skb != 0 {
            call.values[NESTED] += 1;
        }
        return;
    }
    call.skb = skb;
    call.values[NESTED] = 0;
    if let Some(candidate) = candidate() {
        candidate.skb = 0;
    }
}

/// End of `ip_vs_conn_in_get_proto(ipvs, af, skb, iph)` inside it: the entry that the packet belongs to.
#[inline(always)]
pub(crate) fn conn_in_get_exit(ctx: &impl Exit) {
    let entry = ctx.returned(0);
    if entry == 0 {
        return;
    }
    let Some(call) = scratch::take(Function::IpvsIn) else {
        return;
    };
    let Some(layout) = kernel::ipvs() else { return };
    let dest: u64 = member(entry, ipvs_layout!(layout, ipvs_conn_dest));
    let removed = dest == 0
        || kernel::number_or_zero(dest, ipvs_layout!(layout, ipvs_dest_flags)) as u32 & AVAILABLE == 0;
    let idle = dest != 0 && member::<u32>(dest, ipvs_layout!(layout, ipvs_dest_weight)) == 0;
    if removed || idle {
        consider(layout, call.skb, entry, removed);
    }
}

/// Keeps a packet of an entry whose server is removed or takes no new connections until the verdict is known:
/// by then the packet may be gone.
#[inline(always)]
fn consider(layout: &IpvsLayout, skb: u64, entry: u64, removed: bool) {
    let Some(buffer) = emit::acquire() else { return };
    let found = emit::take_packet(buffer, skb);
    place_tuple(&mut buffer.work.entry, layout, entry);
    let (tuple, of_entry) = (&buffer.work.tuple, &buffer.work.entry);
    let state = kernel::number_or_zero(entry, ipvs_layout!(layout, ipvs_conn_state));
    let fresh = state == SYN_SENT || state == SYN_RECV;
    let syn = found & bits::SYN != 0;
    if tuple.same_flow(of_entry)
        && (removed || syn && !fresh)
        && let Some(candidate) = candidate()
    {
        let v6 = is_v6(layout, entry);
        candidate.skb = skb;
        candidate.entry = entry;
        candidate.bits = found;
        kernel::copy(&mut candidate.tuple, tuple);
        let server = &mut candidate.server;
        kernel::copy(&mut server.src, &tuple.src);
        packet::place_address(
            &mut server.dst,
            entry + offset(ipvs_layout!(layout, ipvs_conn_daddr)),
            v6,
        );
        server.sport = tuple.sport;
        server.dport = u16::from_be(member(entry, ipvs_layout!(layout, ipvs_conn_dport)));
        server.pad = 0;
        kernel::copy(&mut candidate.header, &buffer.header);
        candidate.header.netns = packet::netns(skb);
        kernel::copy(&mut candidate.packet, &buffer.packet);
        kernel::empty(&mut candidate.fields);
        let mut fields = Fields::new_hint(&mut candidate.fields);
        push_entry(&mut fields, layout, entry, of_entry);
    }
    emit::release(buffer);
}

/// End of the entry function.
#[inline(always)]
pub(crate) fn in_exit(ctx: &impl Exit) {
    let Some(call) = scratch::take(Function::IpvsIn) else {
        return;
    };
    if call.values[NESTED] != 0 {
        call.values[NESTED] -= 1;
        return;
    }
    let skb = call.skb;
    call.skb = 0;
    let Some(candidate) = candidate() else { return };
    if candidate.skb != skb {
        return;
    }
    candidate.skb = 0;
    let syn = candidate.bits & bits::SYN != 0;
    if ctx.returned(0) as u32 & 0xff == NF_DROP {
        let site = if syn {
            Site::IpvsReuseDropped
        } else {
            Site::IpvsDestinationGone
        };
        if !hint::waits(skb) {
            hint::leave(skb, site, 0, 0, 0, |fields| fields.take(&candidate.fields));
        }
    } else if syn {
        misdelivered(candidate);
    }
}

/// The SYN went to a server that does not want it.
#[inline(always)]
fn misdelivered(candidate: &Candidate) {
    // SAFETY: no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    let _ = MISDELIVERED.insert(candidate.server, now, 0);
    let Some(buffer) = emit::acquire() else { return };
    kernel::copy(&mut buffer.header, &candidate.header);
    kernel::copy(&mut buffer.packet, &candidate.packet);
    kernel::copy(&mut buffer.work.tuple, &candidate.tuple);
    emit::finish(
        buffer,
        Site::IpvsReuseMisdelivered as u16,
        candidate.header.netns,
        candidate.bits,
        |fields| fields.take(&candidate.fields),
    );
    emit::release(buffer);
}

/// Whether a packet that IPVS handled was reported as misdelivered when IPVS sent it.
#[inline(always)]
pub(crate) fn died(tuple: &Tuple, now: u64) -> bool {
    let flow = Flow {
        src: tuple.src,
        dst: tuple.dst,
        sport: tuple.sport,
        dport: tuple.dport,
        pad: 0,
    };
    // SAFETY: the value is copied at once.
    unsafe { MISDELIVERED.get(flow) }.is_some_and(|sent| now.wrapping_sub(*sent) < DIED_WITHIN_NS)
}

#[inline(always)]
fn candidate() -> Option<&'static mut Candidate> {
    // SAFETY: this CPU's slot.
    CANDIDATES
        .get_ptr_mut(0)
        .map(|candidate| unsafe { &mut *candidate })
}

#[inline(always)]
fn is_v6(layout: &IpvsLayout, entry: u64) -> bool {
    kernel::number_or_zero(entry, ipvs_layout!(layout, ipvs_conn_af)) == AF_INET6
}

/// Client → virtual service, as the entry has it. User space, and every reader here, uses an entry only if this
/// equals the packet: on 5.10 the layout is a built-in table.
#[inline(always)]
fn place_tuple(into: &mut Tuple, layout: &IpvsLayout, entry: u64) {
    let v6 = is_v6(layout, entry);
    packet::place_address(
        &mut into.src,
        entry + offset(ipvs_layout!(layout, ipvs_conn_caddr)),
        v6,
    );
    packet::place_address(
        &mut into.dst,
        entry + offset(ipvs_layout!(layout, ipvs_conn_vaddr)),
        v6,
    );
    into.sport = u16::from_be(member(entry, ipvs_layout!(layout, ipvs_conn_cport)));
    into.dport = u16::from_be(member(entry, ipvs_layout!(layout, ipvs_conn_vport)));
    into.protocol = kernel::number_or_zero(entry, ipvs_layout!(layout, ipvs_conn_protocol)) as u8;
    into.tcp_flags = 0;
    into.pad = 0;
}

#[inline(always)]
fn push_entry(fields: &mut Fields<'_>, layout: &IpvsLayout, entry: u64, tuple: &Tuple) {
    let v6 = is_v6(layout, entry);
    fields.push_address(FieldId::IpvsVirtualHi, FieldId::IpvsVirtualLo, &tuple.dst);
    fields.push(FieldId::IpvsVirtualPort, u64::from(tuple.dport));
    let server = packet::address_at(entry + offset(ipvs_layout!(layout, ipvs_conn_daddr)), v6);
    fields.push_address(FieldId::IpvsServerHi, FieldId::IpvsServerLo, &server);
    let port = u16::from_be(member(entry, ipvs_layout!(layout, ipvs_conn_dport)));
    fields.push(FieldId::IpvsServerPort, u64::from(port));
    fields.push(
        FieldId::IpvsState,
        kernel::number_or_zero(entry, ipvs_layout!(layout, ipvs_conn_state)),
    );
    fields.push(
        FieldId::IpvsFlags,
        kernel::number_or_zero(entry, ipvs_layout!(layout, ipvs_conn_flags)),
    );
    let dest: u64 = member(entry, ipvs_layout!(layout, ipvs_conn_dest));
    let available = dest != 0
        && kernel::number_or_zero(dest, ipvs_layout!(layout, ipvs_dest_flags)) as u32 & AVAILABLE != 0;
    fields.push(FieldId::IpvsRemoved, u64::from(!available));
    if dest != 0 && has(ipvs_layout!(layout, ipvs_dest_weight)) {
        let weight: u32 = read(dest + offset(ipvs_layout!(layout, ipvs_dest_weight)));
        fields.push(FieldId::IpvsWeight, i64::from(weight as i32) as u64);
    }
}
