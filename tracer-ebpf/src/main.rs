//! The BPF programs of droptrace: thin; one module per mechanism does the work.
//!
//! Every hooked function has a program for each way to hook it; user space
//! loads the one that the running kernel offers (`plan`).
#![feature(asm_experimental_arch)]
#![no_std]
#![no_main]
#![allow(missing_docs, reason = "a program is documented where its work is done")]
#![allow(unreachable_pub, reason = "programs and globals are found by their symbol")]
#![allow(
    clippy::needless_borrows_for_generic_args,
    reason = "keys and values stay in the maps that they lie in: the stack has no room for copies"
)]
#![allow(clippy::needless_pass_by_value, reason = "the form that a program has")]
#![allow(
    clippy::no_effect_underscore_binding,
    reason = "not every exit needs its context"
)]
#![allow(
    clippy::inline_always,
    reason = "BPF functions take at most five arguments, and the stack has 512 bytes"
)]

mod args;
mod brief;
mod conntrack;
mod emit;
mod hint;
mod ipvs;
mod kernel;
mod listen;
mod maps;
mod memo;
mod multicast;
mod neighbour;
mod packet;
mod receive;
mod reject;
mod scope;
mod scratch;
mod skb;
mod skb_drop;
mod source_check;
mod time_wait;

use aya_ebpf::{
    macros::{btf_tracepoint, fentry, fexit, kprobe, kretprobe, raw_tracepoint},
    programs::{
        BtfTracePointContext, FEntryContext, FExitContext, ProbeContext, RawTracePointContext,
        RetProbeContext,
    },
};

use crate::{scratch::Function, skb_drop::Turn};

/// The programs of the tracepoint `skb:kfree_skb`: those that know the type of its arguments, and those for kernels that
/// refuse these.
macro_rules! at_free {
    (typed: $($btf_tracepoint:ident => |$ctx:ident| $work:expr;)*) => {$(
        #[btf_tracepoint(function = "kfree_skb")]
        fn $btf_tracepoint(ctx: BtfTracePointContext) -> i32 {
            let $ctx = &ctx;
            $work;
            0
        }
    )*};
    ($($raw_tracepoint:ident => |$ctx:ident| $work:expr;)*) => {$(
        #[raw_tracepoint]
        fn $raw_tracepoint(ctx: RawTracePointContext) -> i32 {
            let $ctx = &ctx;
            $work;
            0
        }
    )*};
}

at_free! { typed:
    kfree_skb_typed => |ctx| skb_drop::on_typed_free(ctx);
    kfree_skb_second_typed => |ctx| skb_drop::on_free(ctx, Turn::Later);
    kfree_skb_third_typed => |ctx| skb_drop::on_free(ctx, Turn::Later);
    kfree_skb_last_typed => |ctx| skb_drop::on_free(ctx, Turn::Last);
    kfree_skb_look_typed => |ctx| skb_drop::look(ctx);
}

at_free! {
    kfree_skb => |ctx| skb_drop::on_free(ctx, Turn::First);
    kfree_skb_second => |ctx| skb_drop::on_free(ctx, Turn::Later);
    kfree_skb_third => |ctx| skb_drop::on_free(ctx, Turn::Later);
    kfree_skb_last => |ctx| skb_drop::on_free(ctx, Turn::Last);
    kfree_skb_look => |ctx| skb_drop::look(ctx);
}

/// The programs of a function's entry.
macro_rules! at_entry {
    ($($fentry:ident, $kprobe:ident => |$ctx:ident| $work:expr;)*) => {$(
        #[fentry]
        fn $fentry(ctx: FEntryContext) -> i32 {
            let $ctx = &ctx;
            $work;
            0
        }

        #[kprobe]
        fn $kprobe(ctx: ProbeContext) -> u32 {
            let $ctx = &ctx;
            $work;
            0
        }
    )*};
}

/// The programs of a function's exit.
macro_rules! at_exit {
    ($($fexit:ident, $kretprobe:ident => |$ctx:ident| $work:expr;)*) => {$(
        #[fexit]
        fn $fexit(ctx: FExitContext) -> i32 {
            let $ctx = &ctx;
            $work;
            0
        }

        #[kretprobe]
        fn $kretprobe(ctx: RetProbeContext) -> u32 {
            let $ctx = &ctx;
            $work;
            0
        }
    )*};
}

/// The programs of a module's function, which are never fentry or fexit.
macro_rules! in_module {
    ($($kprobe:ident => |$ctx:ident| $work:expr;)*) => {$(
        #[kprobe]
        fn $kprobe(ctx: ProbeContext) -> u32 {
            let $ctx = &ctx;
            $work;
            0
        }
    )*};
    (exit: $($kretprobe:ident => |$ctx:ident| $work:expr;)*) => {$(
        #[kretprobe]
        fn $kretprobe(ctx: RetProbeContext) -> u32 {
            let $ctx = &ctx;
            $work;
            0
        }
    )*};
}

at_entry! {
    tcp_conn_request_fentry, tcp_conn_request_kprobe => |ctx| listen::conn_request_entry(ctx);
    tcp_v4_conn_request_fentry, tcp_v4_conn_request_kprobe => |ctx| listen::v4_conn_request_entry(ctx);
    tcp_v6_conn_request_fentry, tcp_v6_conn_request_kprobe => |ctx| listen::v6_conn_request_entry(ctx);
    tcp_v4_syn_recv_sock_fentry, tcp_v4_syn_recv_sock_kprobe
        => |ctx| listen::syn_recv_sock_entry(ctx, Function::SynRecvSock);
    tcp_v6_syn_recv_sock_fentry, tcp_v6_syn_recv_sock_kprobe
        => |ctx| listen::syn_recv_sock_entry(ctx, Function::SynRecvSockV6);
    cookie_v4_check_fentry, cookie_v4_check_kprobe => |ctx| listen::cookie_check_entry(ctx);
    cookie_v6_check_fentry, cookie_v6_check_kprobe => |ctx| listen::cookie_check_entry(ctx);
    tcp_req_err_fentry, tcp_req_err_kprobe => |ctx| listen::request_error_entry(ctx);
    tcp_timewait_state_process_fentry, tcp_timewait_state_process_kprobe => |ctx| time_wait::timewait_entry(ctx);
    tcp_check_req_fentry, tcp_check_req_kprobe => |ctx| time_wait::check_req_entry(ctx);
    tcp_validate_incoming_fentry, tcp_validate_incoming_kprobe => |ctx| time_wait::validate_entry(ctx);
    tcp_send_dupack_fentry, tcp_send_dupack_kprobe => |ctx| time_wait::duplicate_ack_entry(ctx);
    udp_enqueue_fentry, udp_enqueue_kprobe => |ctx| receive::udp_enqueue_entry(ctx);
    tcp_add_backlog_fentry, tcp_add_backlog_kprobe => |ctx| receive::add_backlog_entry(ctx);
    tcp_try_rmem_schedule_fentry, tcp_try_rmem_schedule_kprobe => |ctx| receive::try_rmem_entry(ctx);
    tcp_v4_send_reset_fentry, tcp_v4_send_reset_kprobe => |ctx| reject::send_reset_entry(ctx);
    tcp_v6_send_reset_fentry, tcp_v6_send_reset_kprobe => |ctx| reject::send_reset_entry(ctx);
    icmp_send_fentry, icmp_send_kprobe => |ctx| reject::icmp_send_entry(ctx);
    icmp6_send_fentry, icmp6_send_kprobe => |ctx| reject::icmp6_send_entry(ctx);
    ip_handle_martian_source_fentry, ip_handle_martian_source_kprobe => |ctx| source_check::martian_entry(ctx);
    arp_error_report_fentry, arp_error_report_kprobe => |ctx| neighbour::error_report_entry(ctx, false);
    ndisc_error_report_fentry, ndisc_error_report_kprobe => |ctx| neighbour::error_report_entry(ctx, true);
}

at_exit! {
    tcp_conn_request_fexit, tcp_conn_request_kretprobe => |_ctx| listen::conn_request_exit();
    tcp_peer_is_proven_fexit, tcp_peer_is_proven_kretprobe => |ctx| listen::peer_is_proven_exit(ctx);
    tcp_v4_syn_recv_sock_fexit, tcp_v4_syn_recv_sock_kretprobe
        => |_ctx| listen::syn_recv_sock_exit(Function::SynRecvSock);
    tcp_v6_syn_recv_sock_fexit, tcp_v6_syn_recv_sock_kretprobe
        => |_ctx| listen::syn_recv_sock_exit(Function::SynRecvSockV6);
    cookie_v4_check_fexit, cookie_v4_check_kretprobe => |_ctx| listen::cookie_check_exit();
    cookie_v6_check_fexit, cookie_v6_check_kretprobe => |_ctx| listen::cookie_check_exit();
    tcp_timewait_state_process_fexit, tcp_timewait_state_process_kretprobe => |ctx| time_wait::timewait_exit(ctx);
    tcp_check_req_fexit, tcp_check_req_kretprobe => |ctx| time_wait::check_req_exit(ctx);
    udp_enqueue_fexit, udp_enqueue_kretprobe => |ctx| receive::udp_enqueue_exit(ctx);
    tcp_add_backlog_fexit, tcp_add_backlog_kretprobe => |ctx| receive::add_backlog_exit(ctx);
    tcp_try_rmem_schedule_fexit, tcp_try_rmem_schedule_kretprobe => |ctx| receive::try_rmem_exit(ctx);
    tcp_validate_incoming_fexit, tcp_validate_incoming_kretprobe => |ctx| time_wait::validate_exit(ctx);
}

in_module! {
    nf_ct_resolve_clash_kprobe => |ctx| conntrack::resolve_clash_entry(ctx);
    early_drop_kprobe => |ctx| conntrack::early_drop_entry(ctx);
    nf_ct_l4proto_log_invalid_kprobe => |ctx| conntrack::entry_invalid_entry(ctx);
    nf_l4proto_log_invalid_kprobe => |ctx| conntrack::invalid_entry(ctx);
    nf_ct_helper_log_kprobe => |ctx| conntrack::helper_log_entry(ctx);
    ip_vs_leave_kprobe => |ctx| ipvs::leave_entry(ctx);
    ip_vs_conn_expire_now_kprobe => |ctx| ipvs::expire_now_entry(ctx);
    ip_vs_in_kprobe => |ctx| ipvs::in_entry(ctx);
    nf_send_reset_kprobe => |ctx| reject::nf_send_reset_entry(ctx, false);
    nf_send_reset6_kprobe => |ctx| reject::nf_send_reset_entry(ctx, true);
    nf_send_unreach_kprobe => |ctx| reject::nf_send_unreach_entry(ctx);
    nf_send_unreach6_kprobe => |ctx| reject::nf_send_unreach6_entry(ctx);
}

in_module! { exit:
    nf_ct_resolve_clash_kretprobe => |ctx| conntrack::resolve_clash_exit(ctx);
    early_drop_kretprobe => |ctx| conntrack::early_drop_exit(ctx);
    ip_vs_in_kretprobe => |ctx| ipvs::in_exit(ctx);
    ip_vs_conn_in_get_kretprobe => |ctx| ipvs::conn_in_get_exit(ctx);
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
