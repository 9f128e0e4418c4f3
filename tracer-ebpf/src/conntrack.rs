//! Connection tracking (net/netfilter/nf_conntrack_core.c): clashes at confirmation, and the full table.

use aya_ebpf::helpers::bpf_jiffies64;
use droptrace_common::{Address, FieldId, Site, bits, ct_status};

use crate::{
    args::{Entry, Exit},
    emit::{self, Fields},
    hint,
    kernel::{self, has, ipvs_layout, layout, member, offset},
    packet::{self, Tuple},
    scratch::{self, Function},
};

/// AF_INET6.
const AF_INET6: u16 = 10;
/// IPPROTO_TCP.
const TCP: u8 = 6;
const WINNER: usize = 0;

/// `nf_ct_resolve_clash(skb, h, reply_hash)`: another entry already owns a tuple of this packet's entry.
#[inline(always)]
pub(crate) fn resolve_clash_entry(ctx: &impl Entry) {
    let Some(call) = scratch::slot(Function::ResolveClash) else {
        return;
    };
    call.skb = ctx.argument(0);
    call.values[WINNER] = ctx.argument(1);
}

/// Its end: NF_DROP (0), or NF_ACCEPT when the clash was resolved without loss. The bucket lock is still held.
#[inline(always)]
pub(crate) fn resolve_clash_exit(ctx: &impl Exit) {
    let Some(call) = scratch::take(Function::ResolveClash) else {
        return;
    };
    let skb = call.skb;
    call.skb = 0;
    let loser = member::<u64>(skb, layout!(skb_nfct)) & !7;
    let netns = kernel::inode_of_net(member(loser, layout!(ct_net)));
    if ctx.returned(0) as u32 & 0xff != 0 {
        emit::count_only(Site::ConntrackClashResolved, netns);
        return;
    }
    let winner = entry_of(call.values[WINNER]);
    let status: u64 = member(winner, layout!(ct_status));
    let bits = if status & ct_status::ASSURED != 0 {
        bits::WINNER_ASSURED
    } else {
        0
    };
    hint::leave(skb, Site::ConntrackClash, netns, bits, loser, |fields| {
        push_tuple(
            fields,
            loser,
            0,
            [
                FieldId::LoserOrigSrcHi,
                FieldId::LoserOrigSrcLo,
                FieldId::LoserOrigDstHi,
                FieldId::LoserOrigDstLo,
                FieldId::LoserOrigPorts,
            ],
        );
        push_tuple(
            fields,
            loser,
            1,
            [
                FieldId::LoserReplySrcHi,
                FieldId::LoserReplySrcLo,
                FieldId::LoserReplyDstHi,
                FieldId::LoserReplyDstLo,
                FieldId::LoserReplyPorts,
            ],
        );
        push_tuple(
            fields,
            winner,
            0,
            [
                FieldId::WinnerOrigSrcHi,
                FieldId::WinnerOrigSrcLo,
                FieldId::WinnerOrigDstHi,
                FieldId::WinnerOrigDstLo,
                FieldId::WinnerOrigPorts,
            ],
        );
        push_tuple(
            fields,
            winner,
            1,
            [
                FieldId::WinnerReplySrcHi,
                FieldId::WinnerReplySrcLo,
                FieldId::WinnerReplyDstHi,
                FieldId::WinnerReplyDstLo,
                FieldId::WinnerReplyPorts,
            ],
        );
        fields.push(FieldId::WinnerStatus, status);
        // SAFETY: no preconditions.
        let now = unsafe { bpf_jiffies64() } as u32;
        let left = member::<u32>(winner, layout!(ct_timeout)).wrapping_sub(now);
        fields.push(FieldId::WinnerTimeout, u64::from(left));
        let tuple = winner + offset(layout!(ct_tuplehash)) + offset(layout!(tuplehash_tuple));
        if member::<u8>(tuple, layout!(tuple_protonum)) == TCP {
            fields.push(
                FieldId::WinnerTcpState,
                u64::from(member::<u8>(winner, layout!(ct_tcp_state))),
            );
        }
    });
}

/// The entry to which a tuple hash belongs: `dst.dir` says which of the two it is.
#[inline(always)]
fn entry_of(tuplehash: u64) -> u64 {
    let tuple = tuplehash + offset(layout!(tuplehash_tuple));
    let direction = u64::from(member::<u8>(tuple, layout!(tuple_dir)) & 1);
    tuplehash - direction * u64::from(layout!(tuplehash_size)) - offset(layout!(ct_tuplehash))
}

#[inline(always)]
fn push_tuple(fields: &mut Fields<'_>, entry: u64, direction: u64, ids: [FieldId; 5]) {
    let tuple = entry
        + offset(layout!(ct_tuplehash))
        + direction * u64::from(layout!(tuplehash_size))
        + offset(layout!(tuplehash_tuple));
    let v6 = member::<u16>(tuple, layout!(tuple_l3num)) == AF_INET6;
    let source: Address = packet::address_at(tuple + offset(layout!(tuple_src)), v6);
    let destination: Address = packet::address_at(tuple + offset(layout!(tuple_dst)), v6);
    fields.push_address(ids[0], ids[1], &source);
    fields.push_address(ids[2], ids[3], &destination);
    let sport = u64::from(u16::from_be(member(tuple, layout!(tuple_src_port))));
    let dport = u64::from(u16::from_be(member(tuple, layout!(tuple_dst_port))));
    fields.push(ids[4], sport << 16 | dport);
}

/// `nf_ct_l4proto_log_invalid(skb, ct, [state,] fmt, …)`, net/netfilter/nf_conntrack_proto.c, 5.10 - 7.3: the packet does
/// not fit its connection. Called whether `nf_conntrack_log_invalid` is set or not. The packet goes on, mostly without its
/// entry: then it is INVALID.
#[inline(always)]
pub(crate) fn entry_invalid_entry(ctx: &impl Entry) {
    let Some(layout) = kernel::ipvs() else { return };
    let format = ipvs_layout!(layout, arg_entry_invalid_fmt);
    if !has(format) {
        return;
    }
    let (skb, entry) = (ctx.argument(0), ctx.argument(1));
    let status: u64 = member(entry, layout!(ct_status));
    let site = if status & ct_status::NAT == 0 {
        Site::ConntrackInvalid
    } else {
        Site::ConntrackInvalidNat
    };
    let words = words(ctx, format);
    hint::leave(skb, site, 0, 0, 0, |fields| {
        push_words(fields, words);
        push_entry(fields, entry, status);
    });
}

/// `nf_l4proto_log_invalid(skb, …, fmt, …)`, in the same file: the packet fits no connection, or the above goes on to log.
#[inline(always)]
pub(crate) fn invalid_entry(ctx: &impl Entry) {
    let Some(layout) = kernel::ipvs() else { return };
    let format = ipvs_layout!(layout, arg_invalid_fmt);
    let skb = ctx.argument(0);
    if !has(format) || hint::goes_on_with(skb) {
        return;
    }
    let words = words(ctx, format);
    hint::leave(skb, Site::ConntrackInvalid, 0, 0, 0, |fields| {
        push_words(fields, words);
    });
}

/// `nf_ct_helper_log(skb, ct, fmt, …)`, net/netfilter/nf_conntrack_helper.c, 5.10 - 7.3: a helper drops the packet.
#[inline(always)]
pub(crate) fn helper_log_entry(ctx: &impl Entry) {
    let Some(layout) = kernel::ipvs() else { return };
    let format = ipvs_layout!(layout, arg_helper_log_fmt);
    if !has(format) {
        return;
    }
    let (skb, entry) = (ctx.argument(0), ctx.argument(1));
    let words = words(ctx, format);
    hint::leave(skb, Site::ConntrackHelper, 0, 0, 0, |fields| {
        push_words(fields, words);
        push_entry(fields, entry, member(entry, layout!(ct_status)));
    });
}

/// Where the kernel's words are: the format, whose index this is, or what it refers to where that is all of it.
#[inline(always)]
fn words(ctx: &impl Entry, index: u32) -> u64 {
    const TEXT: u32 = u32::from_le_bytes(*b"%s\0\0");
    const FORMAT: u32 = u32::from_le_bytes(*b"%pV\0");
    // All at constant indices: from one to be chosen the compiler would make an access at a computed offset.
    let [second, third, fourth, fifth] = [ctx.argument(2), ctx.argument(3), ctx.argument(4), ctx.argument(5)];
    let (format, argument) = match index {
        2 => (second, third),
        3 => (third, fourth),
        4 => (fourth, fifth),
        _ => return 0,
    };
    let head: u32 = kernel::read(format);
    if head & 0xff_ffff == TEXT {
        argument
    } else if head == FORMAT {
        member(argument, layout!(va_format_fmt))
    } else {
        format
    }
}

/// The words, as far as they fit; what follows them in the kernel's memory is cut off by who reads them.
#[inline(always)]
fn push_words(fields: &mut Fields<'_>, words: u64) {
    fields.push(FieldId::Words, kernel::read(words));
    fields.push(FieldId::Words, kernel::read(words + 8));
    fields.push(FieldId::Words, kernel::read(words + 16));
    fields.push(FieldId::Words, kernel::read(words + 24));
    fields.push(FieldId::Words, kernel::read(words + 32));
    fields.push(FieldId::Words, kernel::read(words + 40));
    fields.push(FieldId::Words, kernel::read(words + 48));
    fields.push(FieldId::Words, kernel::read(words + 56));
}

/// What the packet's entry is.
#[inline(always)]
fn push_entry(fields: &mut Fields<'_>, entry: u64, status: u64) {
    push_tuple(
        fields,
        entry,
        0,
        [
            FieldId::EntryOrigSrcHi,
            FieldId::EntryOrigSrcLo,
            FieldId::EntryOrigDstHi,
            FieldId::EntryOrigDstLo,
            FieldId::EntryOrigPorts,
        ],
    );
    fields.push(FieldId::EntryStatus, status);
    fields.push(
        FieldId::EntryTcpState,
        u64::from(member::<u8>(entry, layout!(ct_tcp_state))),
    );
}

/// `early_drop(net, hash)`: the table is full, and an entry is looked for that may be evicted.
#[inline(always)]
pub(crate) fn early_drop_entry(ctx: &impl Entry) {
    let Some(call) = scratch::slot(Function::EarlyDrop) else {
        return;
    };
    call.net = ctx.argument(0);
    call.skb = call.net;
}

/// Its end: none was found, and the packet is dropped soon, on this CPU; it has no conntrack entry.
#[inline(always)]
pub(crate) fn early_drop_exit(ctx: &impl Exit) {
    let Some(call) = scratch::take(Function::EarlyDrop) else {
        return;
    };
    call.skb = 0;
    if ctx.returned(0) as u8 == 0 {
        let netns = kernel::inode_of_net(call.net);
        hint::mark(Site::ConntrackTableFull, &Tuple::default(), netns, |_| {});
    }
}
