//! What about the settings of a netns makes a cause likely. Pure: each rule is a function of a [`Survey`].

use std::net::IpAddr;

use serde::Serialize;

use crate::{
    context::survey::{Held, Survey},
    diagnose::Remedy,
};

/// How sure it is that packets are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Likelihood {
    /// What it takes is there now.
    Likely,
    /// What it takes may come.
    Possible,
    /// Often meant so.
    Note,
}

/// A finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Advice {
    pub(super) netns: u32,
    pub(super) netns_name: Option<String>,
    /// Slug of the cause that becomes likely.
    pub(super) cause: &'static str,
    pub(super) likelihood: Likelihood,
    /// What was found, with its values.
    pub(super) finding: String,
    pub(super) remedy: Vec<Remedy>,
}

/// `net.core.somaxconn` below which it limits busy servers; 4096 is the default since Linux 5.4.
const SOMAXCONN_SMALL: u32 = 1024;
/// Share of a limit, in percent, from which it counts as nearly reached.
const NEARLY: u64 = 75;

/// All findings of a netns, surest first.
pub(super) fn of_netns(survey: &Survey) -> Vec<Advice> {
    let rules = [
        accept_queues,
        somaxconn,
        abort_on_overflow,
        syncookies,
        strict_rp_filter,
        other_way_out,
        conntrack_fill,
        expire_nodest_conn,
        accept_local,
        dummy_addresses,
    ];
    let mut advice: Vec<Advice> = rules
        .iter()
        .flat_map(|rule| rule(survey))
        .map(|(cause, likelihood, finding, remedy)| Advice {
            netns: survey.netns,
            netns_name: survey.netns_name.clone(),
            cause,
            likelihood,
            finding,
            remedy,
        })
        .collect();
    advice.sort_by_key(|advice| advice.likelihood);
    advice
}

type Found = (&'static str, Likelihood, String, Vec<Remedy>);

fn remedy(action: impl Into<String>, command: Option<String>, effect: &str) -> Remedy {
    Remedy {
        action: action.into(),
        command,
        effect: effect.to_owned(),
    }
}

/// A setting that is a number.
fn number(survey: &Survey, name: &str) -> Option<u64> {
    survey.settings.get(name)?.parse().ok()
}

/// A command as it is run in that netns.
fn in_netns(survey: &Survey, command: &str) -> String {
    match &survey.path {
        Some(path) => format!("nsenter --net={} {command}", path.display()),
        None => command.to_owned(),
    }
}

fn nearly(value: u64, limit: u64) -> bool {
    limit > 0 && value.saturating_mul(100) >= limit.saturating_mul(NEARLY)
}

fn accept_queues(survey: &Survey) -> Vec<Found> {
    survey
        .listeners
        .iter()
        .filter(|each| each.queue_limit > 0 && nearly(each.queue_length.into(), each.queue_limit.into()))
        .map(|each| {
            (
                "accept-queue-full",
                Likelihood::Likely,
                format!(
                    "{} has {} connections that wait for accept(), its limit is {}",
                    each.address, each.queue_length, each.queue_limit
                ),
                vec![remedy(
                    "See what keeps its process from calling accept(); if bursts do, raise its backlog and net.core.somaxconn, and restart it.",
                    Some(in_netns(survey, &format!("ss -lntp 'sport = :{}'", each.address.port()))),
                    "The command only shows the process. The limit is fixed at listen().",
                )],
            )
        })
        .collect()
}

/// A small somaxconn matters only to listeners that it limits, and loopback alone is no busy server.
fn somaxconn(survey: &Survey) -> Vec<Found> {
    let Some(somaxconn) = number(survey, "net.core.somaxconn") else {
        return Vec::new();
    };
    let limited: Vec<String> = survey
        .listeners
        .iter()
        .filter(|each| u64::from(each.queue_limit) == somaxconn && !each.address.ip().is_loopback())
        .map(|each| each.address.to_string())
        .collect();
    if somaxconn >= SOMAXCONN_SMALL.into() || limited.is_empty() {
        return Vec::new();
    }
    vec![(
        "accept-queue-full",
        Likelihood::Possible,
        format!(
            "net.core.somaxconn is {somaxconn} and limits the accept queue of {}",
            some(&limited)
        ),
        vec![remedy(
            "Raise it, and restart these listeners.",
            Some(in_netns(survey, "sysctl -w net.core.somaxconn=4096")),
            "The limit is fixed at listen(): without a restart nothing changes. Waiting connections take memory.",
        )],
    )]
}

/// The first few of a list.
fn some(items: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = items[..items.len().min(SHOWN)].join(", ");
    match items.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn abort_on_overflow(survey: &Survey) -> Vec<Found> {
    if number(survey, "net.ipv4.tcp_abort_on_overflow").is_none_or(|value| value == 0) {
        return Vec::new();
    }
    vec![(
        "accept-queue-full",
        Likelihood::Note,
        "net.ipv4.tcp_abort_on_overflow is on: clients of a full accept queue are reset instead of waiting"
            .to_owned(),
        vec![remedy(
            "Turn it off, unless clients must fail at once.",
            Some(in_netns(survey, "sysctl -w net.ipv4.tcp_abort_on_overflow=0")),
            "Clients then retry, and short bursts pass unnoticed.",
        )],
    )]
}

fn syncookies(survey: &Survey) -> Vec<Found> {
    if number(survey, "net.ipv4.tcp_syncookies") != Some(0) || survey.listeners.is_empty() {
        return Vec::new();
    }
    let backlog = number(survey, "net.ipv4.tcp_max_syn_backlog")
        .map(|value| format!(", net.ipv4.tcp_max_syn_backlog is {value}"))
        .unwrap_or_default();
    vec![(
        "syn-queue-full",
        Likelihood::Possible,
        format!(
            "net.ipv4.tcp_syncookies is off{backlog}: a burst of SYNs fills the SYN queue, and its last quarter is kept for known peers (syn-backlog-last-quarter)"
        ),
        vec![remedy(
            "Turn syncookies on.",
            Some(in_netns(survey, "sysctl -w net.ipv4.tcp_syncookies=1")),
            "Connections made from a cookie lose TCP options that the timestamp cannot carry.",
        )],
    )]
}

/// Devices with addresses that others reach, without dummies.
fn ways_out(survey: &Survey) -> Vec<&str> {
    let mut devices: Vec<&str> = survey
        .addresses
        .iter()
        .filter(|held| !is_dummy(survey, held))
        .map(|held| held.device.as_str())
        .collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

fn is_dummy(survey: &Survey, held: &Held) -> bool {
    survey
        .devices
        .get(&held.device)
        .is_some_and(|device| device.kind.as_deref() == Some("dummy"))
}

fn strict_rp_filter(survey: &Survey) -> Vec<Found> {
    let ways = ways_out(survey);
    let strict: Vec<String> = ways
        .iter()
        .filter(|device| {
            survey
                .devices
                .get(**device)
                .is_some_and(|each| each.rp_filter == 1)
        })
        .map(|device| (*device).to_owned())
        .collect();
    if ways.len() < 2 || strict.is_empty() {
        return Vec::new();
    }
    let asymmetric = survey.addresses.iter().any(|held| {
        held.address.is_ipv4() && strict.contains(&held.device) && leaves_elsewhere(survey, held).is_some()
    });
    let likelihood = if asymmetric {
        Likelihood::Likely
    } else {
        Likelihood::Possible
    };
    vec![(
        "rp-filter",
        likelihood,
        format!(
            "rp_filter is strict (1) on {}, and this netns has {} ways out: a packet whose reply would leave by another device is dropped",
            some(&strict),
            ways.len()
        ),
        strict
            .iter()
            .map(|device| {
                remedy(
                    format!("If replies may leave by another device than {device}, make its check loose."),
                    Some(in_netns(survey, &format!("sysctl -w net.ipv4.conf.{}.rp_filter=2", device.replace('.', "/")))),
                    "2 (loose) still drops sources without any route. The larger of `all` and the device counts.",
                )
            })
            .collect(),
    )]
}

/// By which other device replies from the address leave.
fn leaves_elsewhere<'a>(survey: &'a Survey, held: &'a Held) -> Option<&'a str> {
    if is_dummy(survey, held) {
        return None;
    }
    [&held.near, &held.far]
        .into_iter()
        .flatten()
        .map(String::as_str)
        .find(|device| *device != held.device)
}

fn other_way_out(survey: &Survey) -> Vec<Found> {
    survey
        .addresses
        .iter()
        .filter_map(|held| {
            let device = leaves_elsewhere(survey, held)?;
            let whom = if held.near.as_deref() == Some(device) { "its own prefix" } else { "hosts far away" };
            let table = if held.address.is_ipv4() { "ip" } else { "ip -6" };
            Some((
                "rp-filter",
                Likelihood::Possible,
                format!(
                    "{} is on {}, but replies from it to {whom} leave by {device}: a router or host with strict source validation drops them, and so does this one when packets come by {}",
                    held.address, held.device, held.device
                ),
                vec![remedy(
                    format!("Give the address a routing table of its own that leaves by {}.", held.device),
                    Some(in_netns(
                        survey,
                        &format!("{table} rule add from {} lookup 100 && {}", held.address, in_netns(survey, &format!("{table} route add default via GATEWAY dev {} table 100", held.device))),
                    )),
                    "GATEWAY is the router on that device; table 100 must be free.",
                )],
            ))
        })
        .collect()
}

fn conntrack_fill(survey: &Survey) -> Vec<Found> {
    let Some(fill) = survey.conntrack.filter(|fill| nearly(fill.count, fill.max)) else {
        return Vec::new();
    };
    vec![(
        "conntrack-table-full",
        Likelihood::Likely,
        format!("the conntrack table holds {} of {} entries", fill.count, fill.max),
        vec![remedy(
            "See what fills it; if the load is real, raise the limit.",
            Some(format!(
                "sysctl -w net.netfilter.nf_conntrack_max={}",
                fill.max.saturating_mul(2)
            )),
            "Each entry takes some 300 bytes of kernel memory. Only the initial netns can set it.",
        )],
    )]
}

fn expire_nodest_conn(survey: &Survey) -> Vec<Found> {
    if survey.ipvs_services == 0 || number(survey, "net.ipv4.vs.expire_nodest_conn") != Some(0) {
        return Vec::new();
    }
    vec![(
        "ipvs-timewait-reuse",
        Likelihood::Possible,
        format!(
            "{} IPVS services and net.ipv4.vs.expire_nodest_conn=0: packets of connections to a removed real server go to a dead end (ipvs-destination-gone), and a client that uses its port again meets the old entry",
            survey.ipvs_services
        ),
        vec![remedy(
            "Let entries of removed servers expire at once, as kube-proxy does.",
            Some(in_netns(survey, "sysctl -w net.ipv4.vs.expire_nodest_conn=1")),
            "Connections to removed servers end at once instead of lingering.",
        )],
    )]
}

fn accept_local(survey: &Survey) -> Vec<Found> {
    let devices: Vec<String> = survey
        .devices
        .iter()
        .filter(|(name, device)| device.accept_local && name.as_str() != "lo")
        .map(|(name, _)| name.clone())
        .collect();
    if devices.is_empty() {
        return Vec::new();
    }
    vec![(
        "vip-no-service",
        Likelihood::Note,
        format!(
            "accept_local is on for {}: packets from an address of this host are taken, but the reply to that address stays on this host and dies here",
            some(&devices)
        ),
        vec![remedy(
            "Turn it off unless two devices of this host talk to each other through a wire.",
            Some(in_netns(
                survey,
                &format!(
                    "sysctl -w net.ipv4.conf.{}.accept_local=0",
                    devices[0].replace('.', "/")
                ),
            )),
            "Such packets are then dropped where they come in (local-source). `all` or the device is enough to turn it on.",
        )],
    )]
}

/// An address on a dummy device is local, so a packet that comes in with it as source is dropped.
fn dummy_addresses(survey: &Survey) -> Vec<Found> {
    let mut by_device: std::collections::BTreeMap<&str, Vec<IpAddr>> = std::collections::BTreeMap::new();
    for held in survey.addresses.iter().filter(|held| is_dummy(survey, held)) {
        by_device.entry(&held.device).or_default().push(held.address);
    }
    by_device
        .into_iter()
        .map(|(device, addresses)| {
            let names: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            (
                "local-source",
                Likelihood::Note,
                format!(
                    "dummy device {device} holds {}: replies from there leave by other devices, which is how virtual addresses work; a packet that comes in with such a source is dropped",
                    some(&names)
                ),
                vec![remedy(
                    "Nothing, unless another host sends packets from these addresses to this one.",
                    None,
                    "Two hosts that hold the same virtual address cannot talk to each other from it.",
                )],
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        context::survey::{Device, Listening},
        diagnose::{ConntrackUsage, cause_by_slug},
    };

    fn quiet() -> Survey {
        let setting = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        Survey {
            netns: 1,
            settings: [
                ("net.core.somaxconn", "4096"),
                ("net.ipv4.tcp_abort_on_overflow", "0"),
                ("net.ipv4.tcp_syncookies", "1"),
                ("net.ipv4.tcp_max_syn_backlog", "512"),
                ("net.ipv4.vs.expire_nodest_conn", "0"),
            ]
            .into_iter()
            .map(setting)
            .collect(),
            devices: [("lo", 0), ("eth0", 1), ("eth1", 0)]
                .into_iter()
                .map(|(name, rp_filter)| {
                    let device = Device {
                        rp_filter,
                        ..Device::default()
                    };
                    (name.to_owned(), device)
                })
                .collect(),
            listeners: vec![listener("0.0.0.0:80", 0, 4096)],
            conntrack: Some(ConntrackUsage { count: 10, max: 1000 }),
            addresses: vec![held("10.0.0.1", "eth0", Some("eth0"), Some("eth0"))],
            ..Survey::default()
        }
    }

    fn listener(address: &str, queue_length: u32, queue_limit: u32) -> Listening {
        Listening {
            address: address.parse().unwrap(),
            queue_length,
            queue_limit,
        }
    }

    fn held(address: &str, device: &str, near: Option<&str>, far: Option<&str>) -> Held {
        Held {
            address: address.parse().unwrap(),
            device: device.into(),
            far: far.map(Into::into),
            near: near.map(Into::into),
        }
    }

    fn set(survey: &mut Survey, name: &str, value: &str) {
        survey.settings.insert(name.into(), value.into());
    }

    /// What a change of the quiet netns brings.
    fn found(change: impl FnOnce(&mut Survey)) -> Vec<(&'static str, Likelihood)> {
        let mut survey = quiet();
        change(&mut survey);
        of_netns(&survey)
            .iter()
            .map(|advice| {
                assert!(cause_by_slug(advice.cause).is_some(), "{}", advice.cause);
                assert!(!advice.remedy.is_empty());
                (advice.cause, advice.likelihood)
            })
            .collect()
    }

    #[test]
    fn a_quiet_netns_gives_no_advice() {
        assert_eq!(found(|_| ()), []);
    }

    #[test]
    fn a_nearly_full_accept_queue() {
        let full = ("accept-queue-full", Likelihood::Likely);
        assert_eq!(found(|survey| survey.listeners[0].queue_length = 4000), [full]);
        assert_eq!(found(|survey| survey.listeners[0].queue_length = 1000), []);
        assert_eq!(found(|survey| survey.listeners[0].queue_limit = 0), []);
    }

    #[test]
    fn a_small_somaxconn_only_where_it_limits() {
        let small = ("accept-queue-full", Likelihood::Possible);
        assert_eq!(
            found(|survey| {
                set(survey, "net.core.somaxconn", "128");
                survey.listeners = vec![listener("0.0.0.0:80", 0, 128)];
            }),
            [small]
        );
        assert_eq!(found(|survey| set(survey, "net.core.somaxconn", "128")), []);
        assert_eq!(
            found(|survey| {
                set(survey, "net.core.somaxconn", "128");
                survey.listeners = vec![listener("127.0.0.1:80", 0, 128)];
            }),
            []
        );
    }

    #[test]
    fn switches() {
        assert_eq!(
            found(|survey| set(survey, "net.ipv4.tcp_abort_on_overflow", "1")),
            [("accept-queue-full", Likelihood::Note)]
        );
        assert_eq!(
            found(|survey| set(survey, "net.ipv4.tcp_syncookies", "0")),
            [("syn-queue-full", Likelihood::Possible)]
        );
        assert_eq!(
            found(|survey| survey.ipvs_services = 3),
            [("ipvs-timewait-reuse", Likelihood::Possible)]
        );
        assert_eq!(
            found(|survey| {
                survey.ipvs_services = 3;
                set(survey, "net.ipv4.vs.expire_nodest_conn", "1");
            }),
            []
        );
        assert_eq!(
            found(|survey| survey.devices.get_mut("eth0").unwrap().accept_local = true),
            [("vip-no-service", Likelihood::Note)]
        );
    }

    #[test]
    fn a_nearly_full_conntrack_table() {
        let fill =
            |count| move |survey: &mut Survey| survey.conntrack = Some(ConntrackUsage { count, max: 1000 });
        assert_eq!(found(fill(750)), [("conntrack-table-full", Likelihood::Likely)]);
        assert_eq!(found(fill(749)), []);
    }

    #[test]
    fn strict_source_validation_needs_a_second_way() {
        let second = |survey: &mut Survey| {
            survey
                .addresses
                .push(held("10.1.0.1", "eth1", Some("eth1"), None));
        };
        assert_eq!(found(second), [("rp-filter", Likelihood::Possible)]);
        assert_eq!(
            found(|survey| {
                second(survey);
                survey.devices.get_mut("eth0").unwrap().rp_filter = 2;
            }),
            []
        );
    }

    #[test]
    fn replies_that_leave_elsewhere() {
        let elsewhere = |survey: &mut Survey| {
            survey
                .addresses
                .push(held("10.1.0.1", "eth1", Some("eth1"), Some("eth0")));
        };
        assert_eq!(
            found(elsewhere),
            [
                ("rp-filter", Likelihood::Possible),
                ("rp-filter", Likelihood::Possible)
            ]
        );
        assert_eq!(
            found(|survey| {
                elsewhere(survey);
                survey.devices.get_mut("eth1").unwrap().rp_filter = 1;
            }),
            [
                ("rp-filter", Likelihood::Likely),
                ("rp-filter", Likelihood::Possible)
            ]
        );
    }

    #[test]
    fn virtual_addresses_on_a_dummy_are_meant_so() {
        let dummy = |survey: &mut Survey| {
            survey.devices.insert(
                "kube-ipvs0".into(),
                Device {
                    kind: Some("dummy".into()),
                    ..Device::default()
                },
            );
            survey
                .addresses
                .push(held("10.96.0.1", "kube-ipvs0", None, Some("eth0")));
        };
        assert_eq!(found(dummy), [("local-source", Likelihood::Note)]);
    }

    #[test]
    fn commands_enter_the_netns() {
        let mut survey = quiet();
        assert_eq!(in_netns(&survey, "x"), "x");
        survey.path = Some("/run/netns/web".into());
        assert_eq!(in_netns(&survey, "x"), "nsenter --net=/run/netns/web x");
    }
}
