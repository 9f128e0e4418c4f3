//! What holds for every cause of the catalogue.

use std::collections::BTreeSet;

use droptrace_common::{FieldId, Site, bits, route};

use super::{
    ALL, accept_queue, bad_header, blackhole_route, bridge_netfilter, cgroup_bpf, checksum_error,
    conntrack_dying, conntrack_helper, conntrack_insert_race, conntrack_invalid, conntrack_nat_exhausted,
    conntrack_table_full, cpu_backlog_full, device_tx_drop, fragment_reassembly, ipvs_destination_gone,
    ipvs_no_destination, ipvs_timewait_reuse, local_source, martian_destination, martian_source,
    masquerade_no_address, neigh_failed, neigh_queue_full, neigh_table_full, netfilter_reject,
    netfilter_rule, nfqueue, nic_rx_missed, no_route, no_socket, not_forwarding, packet_too_big,
    paws_established, paws_request, paws_timewait, qdisc_full, qdisc_policy, rp_filter,
    sample::{Kernel, Sample, V5_10, V6_1, V6_12, V7_3},
    socket_backlog_full, socket_filter, socket_rcvbuf_full, syn_backlog, syn_queue, syn_refused,
    syncookie_invalid, table, tc_program, tcp_ao, tcp_challenge_ack, tcp_md5, tcp_memory, tcp_ofo_pruned,
    tcp_out_of_window, tcp_zero_window, timewait_old_sequence, ttl_exceeded, udp_memory, unknown,
    vip_no_service, xdp_program, xfrm_policy,
};
use crate::diagnose::{Cause, Direction, rests_on_symbols};

/// The samples of a cause: its own, else the bare signatures of the table.
fn samples(cause: &Cause) -> Vec<Sample> {
    match cause.slug {
        "accept-queue-full" => accept_queue::tests::samples(),
        "syn-queue-full" => syn_queue::tests::samples(),
        "syn-backlog-last-quarter" => syn_backlog::tests::samples(),
        "syn-refused" => syn_refused::tests::samples(),
        "syncookie-invalid" => syncookie_invalid::tests::samples(),
        "conntrack-insert-race" => conntrack_insert_race::tests::samples(),
        "conntrack-nat-exhausted" => conntrack_nat_exhausted::tests::samples(),
        "conntrack-table-full" => conntrack_table_full::tests::samples(),
        "paws-established" => paws_established::tests::samples(),
        "paws-timewait" => paws_timewait::tests::samples(),
        "paws-request" => paws_request::tests::samples(),
        "timewait-old-sequence" => timewait_old_sequence::tests::samples(),
        "tcp-challenge-ack" => tcp_challenge_ack::tests::samples(),
        "tcp-out-of-window" => tcp_out_of_window::tests::samples(),
        "tcp-zero-window" => tcp_zero_window::tests::samples(),
        "tcp-ofo-pruned" => tcp_ofo_pruned::tests::samples(),
        "local-source" => local_source::tests::samples(),
        "rp-filter" => rp_filter::tests::samples(),
        "martian-source" => martian_source::tests::samples(),
        "martian-destination" => martian_destination::tests::samples(),
        "ipvs-timewait-reuse" => ipvs_timewait_reuse::tests::samples(),
        "ipvs-destination-gone" => ipvs_destination_gone::tests::samples(),
        "ipvs-no-destination" => ipvs_no_destination::tests::samples(),
        "vip-no-service" => vip_no_service::tests::samples(),
        "netfilter-rule" => netfilter_rule::tests::samples(),
        "netfilter-reject" => netfilter_reject::tests::samples(),
        "nfqueue" => nfqueue::tests::samples(),
        "bridge-netfilter" => bridge_netfilter::tests::samples(),
        "conntrack-invalid" => conntrack_invalid::tests::samples(),
        "conntrack-helper" => conntrack_helper::tests::samples(),
        "conntrack-dying" => conntrack_dying::tests::samples(),
        "masquerade-no-address" => masquerade_no_address::tests::samples(),
        "no-socket" => no_socket::tests::samples(),
        "socket-rcvbuf-full" => socket_rcvbuf_full::tests::samples(),
        "socket-backlog-full" => socket_backlog_full::tests::samples(),
        "udp-memory" => udp_memory::tests::samples(),
        "tcp-memory" => tcp_memory::tests::samples(),
        "socket-filter" => socket_filter::tests::samples(),
        "cgroup-bpf" => cgroup_bpf::tests::samples(),
        "tcp-md5" => tcp_md5::tests::samples(),
        "tcp-ao" => tcp_ao::tests::samples(),
        "neigh-failed" => neigh_failed::tests::samples(),
        "checksum-error" => checksum_error::tests::samples(),
        "bad-header" => bad_header::tests::samples(),
        "fragment-reassembly" => fragment_reassembly::tests::samples(),
        "xfrm-policy" => xfrm_policy::tests::samples(),
        "neigh-queue-full" => neigh_queue_full::tests::samples(),
        "neigh-table-full" => neigh_table_full::tests::samples(),
        "nic-rx-missed" => nic_rx_missed::tests::samples(),
        "cpu-backlog-full" => cpu_backlog_full::tests::samples(),
        "qdisc-full" => qdisc_full::tests::samples(),
        "qdisc-policy" => qdisc_policy::tests::samples(),
        "device-tx-drop" => device_tx_drop::tests::samples(),
        "tc-program" => tc_program::tests::samples(),
        "xdp-program" => xdp_program::tests::samples(),
        "ttl-exceeded" => ttl_exceeded::tests::samples(),
        "packet-too-big" => packet_too_big::tests::samples(),
        "not-forwarding" => not_forwarding::tests::samples(),
        "blackhole-route" => blackhole_route::tests::samples(),
        "no-route" => no_route::tests::samples(),
        "kernel-reason" => unknown::tests::samples_with_reason(),
        "unknown" => unknown::tests::samples_without_reason(),
        slug => {
            assert!(cause.benign, "{slug} has no samples of its own");
            table::samples(slug)
        }
    }
}

/// The kernels that can show a cause.
fn kernels(slug: &str) -> &'static [Kernel] {
    match slug {
        // Counted as PAWSEstab before.
        "paws-old-ack" => &[V7_3],
        // 5.10 has no reason to keep, and frees old segments untraced.
        "kernel-reason" | "xfrm-policy" | "duplicate-data" | "segment-after-fin" | "socket-filter"
        | "tcp-md5" => &[V6_1, V6_12, V7_3],
        // Since 6.7.
        "tcp-ao" => &[V6_12, V7_3],
        _ => &Kernel::ALL,
    }
}

#[test]
fn slugs_are_unique_and_kebab_case() {
    let mut seen = BTreeSet::new();
    for cause in ALL {
        assert!(seen.insert(cause.slug), "{} twice", cause.slug);
        assert!(
            cause.slug.split('-').all(|word| !word.is_empty()
                && word
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())),
            "{}",
            cause.slug
        );
    }
}

/// Whether a text is prose without slips of line joining.
fn proper(text: &str) -> bool {
    !text.is_empty()
        && text.trim() == text
        && !text.contains("  ")
        && !text.contains(" ,")
        && !text.contains('\n')
}

#[test]
fn texts_are_whole() {
    for cause in ALL {
        let slug = cause.slug;
        assert!(
            proper(cause.title) && !cause.title.ends_with('.'),
            "{slug}: {}",
            cause.title
        );
        for text in [cause.mechanism, cause.remedy] {
            assert!(proper(text) && text.ends_with('.'), "{slug}: {text}");
        }
        let mut names = BTreeSet::new();
        for (name, meaning) in cause.evidence {
            assert!(names.insert(name), "{slug}: {name} twice");
            assert!(
                name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'),
                "{slug}: {name}"
            );
            assert!(proper(meaning) && !meaning.ends_with('.'), "{slug}: {meaning}");
        }
        if let Some(counter) = cause.counter {
            assert!(proper(counter.name), "{slug}");
        }
    }
}

#[test]
fn samples_are_their_cause_on_every_kernel_that_can_show_it() {
    for cause in ALL {
        let mut seen = BTreeSet::new();
        for sample in samples(cause) {
            let drop = sample.label();
            assert_eq!(drop.cause, cause.slug, "{sample:?}");
            assert_eq!(drop.benign, cause.benign);
            seen.insert(sample.kernel);
        }
        assert!(
            kernels(cause.slug).iter().all(|kernel| seen.contains(kernel)),
            "{} has no sample for some kernel: {seen:?}",
            cause.slug
        );
    }
}

#[test]
fn evidence_is_what_is_documented() {
    // What is no loss shares one list of evidence.
    let mut given_by_benign = BTreeSet::new();
    for cause in ALL {
        let documented: Vec<_> = cause.evidence.iter().map(|(name, _)| *name).collect();
        let mut given = BTreeSet::new();
        for sample in samples(cause) {
            let evidence = sample.label().evidence;
            let names: Vec<_> = evidence.keys().map(String::as_str).collect();
            assert_eq!(names, documented, "{}", cause.slug);
            let known = evidence.into_iter().filter(|(_, value)| !value.is_null());
            given.extend(known.map(|(name, _)| name));
        }
        if cause.benign {
            given_by_benign.extend(given);
        } else {
            assert!(
                documented.iter().all(|name| given.contains(*name)),
                "{}: samples show only {given:?}",
                cause.slug
            );
        }
    }
    assert!(
        unknown::EVIDENCE
            .iter()
            .all(|(name, _)| given_by_benign.contains(*name))
    );
}

#[test]
fn remedies_are_whole_and_their_commands_parse() {
    let mut commands = BTreeSet::new();
    for cause in ALL {
        for sample in samples(cause) {
            let remedies = sample.label().remedy;
            assert!(
                !remedies.is_empty() || cause.benign || cause.slug == "unknown",
                "{} offers nothing: {sample:?}",
                cause.slug
            );
            for remedy in remedies {
                for text in [&remedy.action, &remedy.effect] {
                    assert!(proper(text) && text.ends_with('.'), "{}: {text}", cause.slug);
                    assert!(
                        !text.contains("None") && !text.contains("Some("),
                        "{}: {text}",
                        cause.slug
                    );
                }
                commands.extend(remedy.command);
            }
        }
    }
    for command in commands {
        assert!(proper(&command), "{command}");
        // Asked by what runs it, once more within `sh -c`.
        for text in [Some(command.as_str()), inner(&command).as_deref()]
            .into_iter()
            .flatten()
        {
            let output = std::process::Command::new("sh")
                .args(["-n", "-c", text])
                .output()
                .expect("sh runs");
            assert!(output.status.success(), "{text}: {output:?}");
        }
    }
}

/// What `sh -c "…"` in a command runs.
fn inner(command: &str) -> Option<String> {
    let (_, rest) = command.split_once("sh -c \"")?;
    Some(rest.strip_suffix('"')?.to_owned())
}

#[test]
fn context_knows_what_a_cause_needs_once() {
    for cause in ALL {
        let distinct: std::collections::HashSet<_> = cause.needs.iter().collect();
        assert_eq!(distinct.len(), cause.needs.len(), "{}", cause.slug);
    }
}

/// Drops that no rule asks the place of, by cause and kernel; the label of each is the same without names.
#[test]
fn what_rests_on_no_symbol_has_its_label_without() {
    let mut told = BTreeSet::new();
    for cause in ALL {
        for sample in samples(cause) {
            let nameless = sample.clone().fact(|facts| {
                facts.location = None;
                facts.frames.clear();
            });
            let placed = sample.event().header.location != 0;
            if placed && !rests_on_symbols(&sample.event(), sample.reason_name()) {
                assert_eq!(nameless.label(), sample.label(), "{sample:?}");
                told.insert((cause.slug, sample.kernel));
            }
        }
    }
    assert!(
        Kernel::ALL[1..]
            .iter()
            .all(|kernel| told.contains(&("no-socket", *kernel))),
        "{told:?}"
    );
    // Their rules ask the place, or their evidence names it.
    for slug in ["netfilter-rule", "unknown", "kernel-reason", "xfrm-policy"] {
        assert!(told.iter().all(|(told, _)| *told != slug), "{slug}");
    }
}

#[test]
fn direction_follows_device_and_route() {
    let packet = |bits| {
        Sample::freed(V6_12, Site::Free, "ip_forward")
            .udp("10.0.0.9:4000", "10.0.1.1:53")
            .bits(bits)
    };
    let routed = |sample: Sample, kind| sample.field(FieldId::Route, kind);
    for (sample, direction) in vec![
        (packet(0).on("eth0"), Some(Direction::In)),
        (routed(packet(0).on("eth0"), route::HERE), Some(Direction::In)),
        (routed(packet(0).on("eth0"), route::NOWHERE), Some(Direction::In)),
        (
            routed(packet(0).on("eth0"), route::ELSEWHERE),
            Some(Direction::Forward),
        ),
        (
            routed(packet(bits::MULTICAST).on("eth0"), route::ELSEWHERE),
            Some(Direction::In),
        ),
        (
            routed(packet(bits::MULTICAST).on("eth0").moved_to(3), route::ELSEWHERE),
            Some(Direction::Forward),
        ),
        // The route is given up when a device sends.
        (packet(0).on("eth0").moved_to(3), None),
        (packet(0).leaving("eth0"), Some(Direction::Out)),
        (packet(0).field(FieldId::SocketState, 1), Some(Direction::Out)),
        // Lost before the stack saw it, or made by nobody known.
        (packet(0), None),
        (packet(bits::NO_PROTOCOL).leaving("eth0"), None),
        (Sample::hook(V5_10, Site::PawsEstablished), Some(Direction::In)),
    ] {
        assert_eq!(sample.label().direction, direction, "{sample:?}");
    }
}
