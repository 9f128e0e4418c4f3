//! Segments judged by old state: TIME_WAIT sockets, pending requests, and PAWS
//! (protection against wrapped sequence numbers, RFC 7323).

use aya_ebpf::helpers::bpf_ktime_get_ns;
use droptrace_common::{FieldId, PACKET_MAX, Site, bits};

use crate::{
    args::{Entry, Exit},
    emit::{self, Fields},
    hint,
    kernel::{self, layout, member, read_bytes},
    packet,
    scratch::{self, Function, TCP_HEADER},
};

/// `TCP_TW_SYN` of `enum tcp_tw_status` (include/net/tcp.h): the SYN may open a new connection.
const TCP_TW_SYN: u32 = 3;
/// Offset of the sequence number in a TCP header.
const TCP_SEQUENCE: u64 = 4;
/// Offset of the flags byte in a TCP header, and the flags.
const TCP_FLAGS: usize = 13;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;
/// A socket whose connection has ended (include/net/tcp_states.h).
const TCP_CLOSE: u8 = 7;

const PAWS: usize = 0;
const PAWS_TIMEWAIT: usize = 1;
const STORED: usize = 2;
const STAMP: usize = 3;
const EXPECTED: usize = 4;
const SUBSTATE: usize = 5;
const LENGTH: usize = 6;
const STOLEN: usize = 7;

/// Seconds since boot, as the kernel stamps `ts_recent`.
#[inline(always)]
fn uptime() -> u64 {
    // SAFETY: no preconditions.
    unsafe { bpf_ktime_get_ns() / 1_000_000_000 }
}

/// `tcp_timewait_state_process(tw, skb, th, …)`, net/ipv4/tcp_minisocks.c.
#[inline(always)]
pub(crate) fn timewait_entry(ctx: &impl Entry) {
    let Some(call) = scratch::slot(Function::TimewaitProcess) else {
        return;
    };
    let tw = ctx.argument(layout!(arg_tw_process_tw));
    call.begin(ctx, tw, ctx.argument(layout!(arg_tw_process_skb)));
    call.values[PAWS] = call.counter(layout!(mib_paws_established));
    call.values[PAWS_TIMEWAIT] = call.counter(layout!(mib_paws_timewait));
    call.values[STORED] = u64::from(member::<u32>(tw, layout!(tw_ts_recent)));
    call.values[STAMP] = kernel::number(tw, layout!(tw_ts_recent_stamp)).unwrap_or(0);
    call.values[EXPECTED] = u64::from(member::<u32>(tw, layout!(tw_rcv_nxt)));
    call.values[SUBSTATE] = u64::from(member::<u8>(tw, layout!(tw_substate)));
}

/// Its end: all but a SYN that may open a new connection is freed soon.
#[inline(always)]
pub(crate) fn timewait_exit(ctx: &impl Exit) {
    let Some(call) = scratch::take(Function::TimewaitProcess) else {
        return;
    };
    let skb = call.skb;
    call.skb = 0;
    if ctx.returned(layout!(parameters_tw_process)) as u32 == TCP_TW_SYN {
        return;
    }
    let net = call.net;
    let rejected = call.counter(layout!(mib_paws_established)) != call.values[PAWS]
        || call.counter(layout!(mib_paws_timewait)) != call.values[PAWS_TIMEWAIT];
    let flags = tcp_flags(skb);
    let site = if rejected {
        Site::PawsTimewait
    } else if flags & 0x12 == 0x02 {
        Site::TimewaitOldSequence
    } else {
        Site::TimewaitSegment
    };
    let (stored, stamp, expected, substate) = (
        call.values[STORED],
        call.values[STAMP],
        call.values[EXPECTED],
        call.values[SUBSTATE],
    );
    hint::leave(skb, site, kernel::inode_of_net(net), 0, 0, |fields| {
        fields.push(FieldId::TimestampStored, stored);
        push_age(fields, stamp);
        fields.push(FieldId::ExpectedSequence, expected);
        fields.push(FieldId::TimewaitSubstate, substate);
    });
}

/// `tcp_check_req(sk, skb, req, …)`, net/ipv4/tcp_minisocks.c: a segment for a pending request.
#[inline(always)]
pub(crate) fn check_req_entry(ctx: &impl Entry) {
    let Some(call) = scratch::slot(Function::CheckReq) else {
        return;
    };
    let sk = ctx.argument(layout!(arg_check_req_sk));
    let request = ctx.argument(layout!(arg_check_req_req));
    let stored: u32 = ctx.member(request, layout!(request_ts_recent));
    call.begin(ctx, sk, ctx.argument(layout!(arg_check_req_skb)));
    call.values[PAWS] = call.counter(layout!(mib_paws_established));
    call.values[STORED] = u64::from(stored);
    call.values[STOLEN] = ctx.argument(layout!(arg_check_req_stolen));
}

/// Its end: NULL means that the segment is used up or refused, and freed soon; unless the request is stolen: then another
/// CPU has made the connection, and the segment goes there (tcp_v4_rcv, net/ipv4/tcp_ipv4.c, 5.10 - 7.3).
#[inline(always)]
pub(crate) fn check_req_exit(ctx: &impl Exit) {
    let Some(call) = scratch::take(Function::CheckReq) else {
        return;
    };
    let skb = call.skb;
    call.skb = 0;
    if ctx.returned(layout!(parameters_check_req)) != 0 {
        return;
    }
    let stolen: u8 = kernel::read(call.values[STOLEN]);
    if stolen != 0 || hint::waits(skb) {
        return;
    }
    let net = call.net;
    let flags = tcp_flags(skb);
    let site = if call.counter(layout!(mib_paws_established)) != call.values[PAWS] {
        Site::PawsRequest
    } else if flags & 0x12 == 0x02 {
        Site::RequestRetransmit
    } else {
        Site::RequestOther
    };
    let stored = call.values[STORED];
    hint::leave(skb, site, kernel::inode_of_net(net), 0, 0, |fields| {
        fields.push(FieldId::TimestampStored, stored);
    });
}

/// `tcp_validate_incoming(sk, skb, th, …)`, net/ipv4/tcp_input.c; hooked only where the free of what it
/// refuses is not traced (5.10: `tcp_drop` calls `__kfree_skb`).
#[inline(always)]
pub(crate) fn validate_entry(ctx: &impl Entry) {
    let Some(call) = scratch::slot(Function::ValidateIncoming) else {
        return;
    };
    let sk = ctx.argument(layout!(arg_validate_sk));
    let skb = ctx.argument(layout!(arg_validate_skb));
    let length: u32 = ctx.member(skb, layout!(skb_len));
    call.begin(ctx, sk, skb);
    call.values[PAWS] = call.counter(layout!(mib_paws_established));
    call.values[LENGTH] = u64::from(length);
    read_bytes(ctx.argument(layout!(arg_validate_th)), &mut call.tcp);
}

/// Its end. The segment is freed by now: the event's headers are made from the socket and from what the entry read.
#[inline(always)]
pub(crate) fn validate_exit(ctx: &impl Exit) {
    let Some(call) = scratch::take(Function::ValidateIncoming) else {
        return;
    };
    let skb = call.skb;
    call.skb = 0;
    let net = call.net;
    let sk = call.sk;
    if ctx.returned(layout!(parameters_validate)) as u8 != 0 {
        return;
    }
    let site = if call.counter(layout!(mib_paws_established)) != call.values[PAWS] {
        Site::PawsEstablished
    } else if let Some(site) = refusal(sk, &call.tcp) {
        site
    } else {
        return;
    };
    let Some(buffer) = emit::acquire() else { return };
    let length = rebuild(&mut buffer.work.tuple, &mut buffer.packet, sk, &call.tcp);
    let header = &mut buffer.header;
    header.skb = skb;
    header.protocol = if length == IPV6_HEADER { 0x86dd } else { 0x0800 };
    header.packet_len = (length + TCP_HEADER) as u16;
    header.len = (call.values[LENGTH] as usize + length) as u32;
    header.segments = 1;
    header.pkt_type = 0;
    header.iif = 0;
    let flags = call.tcp[TCP_FLAGS];
    let mut found = bits::TCP;
    if flags & RST != 0 {
        found |= bits::RST;
    }
    found |= match flags & (SYN | ACK) {
        SYN => bits::SYN,
        flags if flags & SYN != 0 => bits::SYN_ACK,
        _ => 0,
    };
    emit::finish(buffer, site as u16, kernel::inode_of_net(net), found, |fields| {
        fields.push_some(FieldId::SocketInode, crate::skb_drop::socket_inode(sk));
        if !matches!(site, Site::PawsEstablished) {
            let (expected, window) = receive_window(sk);
            fields.push(FieldId::ExpectedSequence, u64::from(expected));
            fields.push(FieldId::ReceiveWindow, u64::from(window));
            return;
        }
        fields.push(
            FieldId::TimestampStored,
            u64::from(member::<u32>(sk, layout!(tcp_ts_recent))),
        );
        fields.push(
            FieldId::TimestampReceived,
            u64::from(member::<u32>(sk, layout!(tcp_rcv_tsval))),
        );
        if let Some(stamp) = kernel::number(sk, layout!(tcp_ts_recent_stamp)) {
            push_age(fields, stamp);
        }
    });
    emit::release(buffer);
}

/// `tcp_send_dupack(sk, skb)`, net/ipv4/tcp_input.c: `tcp_validate_incoming` refuses the segment, and frees it next. It answers
/// each that has data, and of others as many as `tcp_oow_rate_limited` lets through.
#[inline(always)]
pub(crate) fn duplicate_ack_entry(ctx: &impl Entry) {
    let sk = ctx.argument(layout!(arg_dupack_sk));
    let skb = ctx.argument(layout!(arg_dupack_skb));
    let (expected, window) = receive_window(sk);
    let sequence = u32::from_be(kernel::read(transport(skb) + TCP_SEQUENCE));
    let site = if (sequence.wrapping_sub(expected) as i32) < 0 {
        Site::SegmentBefore
    } else {
        Site::SegmentBeyond
    };
    let netns = kernel::inode_of_net(kernel::net_of_sock(sk));
    hint::leave(skb, site, netns, 0, 0, |fields| {
        fields.push_some(FieldId::SocketInode, crate::skb_drop::socket_inode(sk));
        fields.push(FieldId::ExpectedSequence, u64::from(expected));
        fields.push(FieldId::ReceiveWindow, u64::from(window));
        fields.push(
            FieldId::TimestampStored,
            u64::from(member::<u32>(sk, layout!(tcp_ts_recent))),
        );
        push_age(
            fields,
            kernel::number(sk, layout!(tcp_ts_recent_stamp)).unwrap_or(0),
        );
    });
}

/// Why `tcp_validate_incoming` of 5.10 refused a segment that passed PAWS. None for what is no loss: a RST that ended the
/// connection, or old data that was received before (`tcp_sequence`).
#[inline(always)]
fn refusal(sk: u64, tcp: &[u8; TCP_HEADER]) -> Option<Site> {
    let flags = tcp[TCP_FLAGS];
    let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
    let (expected, window) = receive_window(sk);
    let ahead = sequence.wrapping_sub(expected) as i32;
    let beyond = ahead > window as i32;
    if flags & RST != 0 {
        if member::<u8>(sk, layout!(sock_state)) == TCP_CLOSE {
            return None;
        }
        let before = (sequence.wrapping_sub(member(sk, layout!(tcp_rcv_wup))) as i32) < 0;
        Some(if beyond || before {
            Site::TcpOutOfWindow
        } else {
            Site::TcpChallengeAck
        })
    } else if flags & SYN != 0 {
        Some(Site::TcpChallengeAck)
    } else {
        beyond.then_some(Site::TcpOutOfWindow)
    }
}

/// The next sequence number that a connection expects, and how many bytes from there on it has room for
/// (`tcp_receive_window`, include/net/tcp.h, 5.10 - 7.3).
#[inline(always)]
pub(crate) fn receive_window(sk: u64) -> (u32, u32) {
    let expected: u32 = member(sk, layout!(tcp_rcv_nxt));
    let promised: u32 = member(sk, layout!(tcp_rcv_wup));
    let end = promised.wrapping_add(member(sk, layout!(tcp_rcv_wnd)));
    let window = end.wrapping_sub(expected) as i32;
    (expected, if window < 0 { 0 } else { window as u32 })
}

const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;

/// Writes the headers that the segment had, as far as the socket tells: peer → this host. TCP options are left out, which
/// the length tells.
#[inline(always)]
fn rebuild(
    tuple: &mut packet::Tuple,
    packet: &mut [u8; PACKET_MAX],
    sk: u64,
    tcp: &[u8; TCP_HEADER],
) -> usize {
    const AF_INET6: u16 = 10;
    kernel::empty(tuple);
    tuple.protocol = 6;
    tuple.tcp_flags = tcp[TCP_FLAGS];
    tuple.sport = u16::from_be_bytes([tcp[0], tcp[1]]);
    tuple.dport = u16::from_be_bytes([tcp[2], tcp[3]]);
    kernel::empty(packet);
    let length;
    if member::<u16>(sk, layout!(sock_family)) == AF_INET6 {
        tuple.src = member(sk, layout!(sock_v6_daddr));
        tuple.dst = member(sk, layout!(sock_v6_rcv_saddr));
        packet[0] = 0x60;
        packet[6] = 6;
        packet[8..24].copy_from_slice(&tuple.src);
        packet[24..40].copy_from_slice(&tuple.dst);
        length = IPV6_HEADER;
        packet[IPV6_HEADER..IPV6_HEADER + TCP_HEADER].copy_from_slice(tcp);
    } else {
        let (src, dst): ([u8; 4], [u8; 4]) = (
            member(sk, layout!(sock_daddr)),
            member(sk, layout!(sock_rcv_saddr)),
        );
        tuple.src = packet::mapped(src);
        tuple.dst = packet::mapped(dst);
        packet[0] = 0x45;
        packet[9] = 6;
        packet[12..16].copy_from_slice(&src);
        packet[16..20].copy_from_slice(&dst);
        length = IPV4_HEADER;
        packet[IPV4_HEADER..IPV4_HEADER + TCP_HEADER].copy_from_slice(tcp);
    }
    length
}

/// Age in seconds of a stamp that the kernel took in seconds since boot; 0 for none.
#[inline(always)]
pub(crate) fn age(stamp: u64) -> u64 {
    if stamp == 0 {
        0
    } else {
        uptime().saturating_sub(stamp)
    }
}

#[inline(always)]
fn push_age(fields: &mut Fields<'_>, stamp: u64) {
    if stamp != 0 {
        fields.push(FieldId::TimestampAge, age(stamp));
    }
}

/// Flags of the TCP header.
#[inline(always)]
fn tcp_flags(skb: u64) -> u8 {
    kernel::read(transport(skb) + TCP_FLAGS as u64)
}

/// Address of the TCP header.
#[inline(always)]
fn transport(skb: u64) -> u64 {
    let head: u64 = member(skb, layout!(skb_head));
    head + u64::from(member::<u16>(skb, layout!(skb_transport_header)))
}
