//! How the parts of a record read in text, alike in every sink.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::IpAddr,
};

use serde_json::Value;

use crate::diagnose::{Brief, Coverage, Direction, Drop, Evidence, FoundBy, Gap, HookState, Owner};

/// Without control characters: names of processes and namespaces are chosen by others, and must not move the cursor.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    if text.contains(char::is_control) {
        Cow::Owned(text.replace(char::is_control, "\u{fffd}"))
    } else {
        Cow::Borrowed(text)
    }
}

/// Clock time of an RFC 3339 time, to the millisecond.
pub(crate) fn clock(time: &str) -> &str {
    time.get(11..23).unwrap_or(time)
}

/// `10.0.0.1:40000 → 10.0.0.2:80 tcp S 60 B`, as far as known.
pub(crate) fn packet(drop: &Drop) -> String {
    let length = (drop.found_by != FoundBy::Counter).then_some(drop.length);
    described(
        endpoints(drop),
        drop.protocol.as_deref(),
        drop.flags.as_deref(),
        length,
    )
}

/// The same of a drop in short, and where: `10.0.0.1:40000 → 10.0.0.2:80 tcp S 60 B eth0, netns web`, as far as known.
pub(crate) fn brief(brief: &Brief) -> String {
    let ends = ends((brief.src, brief.sport, None), (brief.dst, brief.dport, None));
    let ends = ends.unwrap_or_else(|| NO_HEADER.to_owned());
    let mut text = described(
        ends,
        brief.protocol.as_deref(),
        brief.flags.as_deref(),
        Some(brief.length),
    );
    if let Some(interface) = &brief.interface {
        let _ = write!(text, " {}", clean(interface));
    }
    if let Some(netns) = netns(brief.netns, brief.netns_name.as_deref()) {
        let comma = if brief.interface.is_some() { "," } else { "" };
        let _ = write!(text, "{comma} netns {netns}");
    }
    text
}

fn described(mut text: String, protocol: Option<&str>, flags: Option<&str>, length: Option<u32>) -> String {
    for word in [protocol, flags].into_iter().flatten() {
        let _ = write!(text, " {word}");
    }
    if let Some(length) = length {
        let _ = write!(text, " {length} B");
    }
    text
}

/// What is said of a packet whose addresses are not known.
const NO_HEADER: &str = "packet without IP header";

/// Address, port, and who has the address, where that is to be said.
type End<'a> = (Option<IpAddr>, Option<u16>, Option<&'a str>);

/// Where a packet came from and went to, where either is known.
fn ends(src: End<'_>, dst: End<'_>) -> Option<String> {
    let end = |(address, port, name): End<'_>| {
        let text = match (address, port) {
            (Some(address), Some(port)) => std::net::SocketAddr::new(address, port).to_string(),
            (Some(address), None) => address.to_string(),
            (None, _) => "?".to_owned(),
        };
        match name {
            Some(name) => format!("{text} ({})", clean(name)),
            None => text,
        }
    };
    (src.0.is_some() || dst.0.is_some()).then(|| format!("{} → {}", end(src), end(dst)))
}

/// `10.0.0.1:40000 → 10.0.0.2:80`, as far as known.
pub(crate) fn endpoints(drop: &Drop) -> String {
    let here = drop.pod.as_deref().or(drop.container.as_deref());
    // The place says so.
    let src_name = drop.src_name.as_deref().filter(|name| Some(*name) != here);
    let dst_name = drop.dst_name.as_deref().filter(|name| Some(*name) != here);
    let ends = ends((drop.src, drop.sport, src_name), (drop.dst, drop.dport, dst_name));
    ends.unwrap_or_else(|| match drop.found_by {
        FoundBy::Counter => "not seen, known by counter".to_owned(),
        _ => NO_HEADER.to_owned(),
    })
}

/// `in eth0, netns web`, as far as known; may be empty.
pub(crate) fn place(drop: &Drop) -> String {
    let direction = drop.direction.map(|direction| match direction {
        Direction::In => "in",
        Direction::Out => "out",
        Direction::Forward => "forward",
    });
    let mut text = direction.unwrap_or_default().to_owned();
    if let Some(interface) = &drop.interface {
        let interface = clean(interface);
        let _ = write!(text, "{}{interface}", if text.is_empty() { "" } else { " " });
    }
    let whose = whose(drop.pod.as_deref(), drop.container.as_deref());
    let netns = || netns(drop.netns, drop.netns_name.as_deref()).map(|netns| format!("netns {netns}"));
    if let Some(whose) = whose.or_else(netns) {
        let _ = write!(text, "{}{whose}", if text.is_empty() { "" } else { ", " });
    }
    text
}

/// `pod default/web`, `container redis`; of a pod with one container, the pod.
pub(crate) fn whose(pod: Option<&str>, container: Option<&str>) -> Option<String> {
    let pod = pod.map(|pod| format!("pod {}", clean(pod)));
    pod.or_else(|| container.map(|container| format!("container {}", clean(container))))
}

/// The name of a netns, else its inode.
pub(crate) fn netns(inode: Option<u32>, name: Option<&str>) -> Option<String> {
    name.map(|name| clean(name).into_owned())
        .or_else(|| inode.filter(|inode| *inode != 0).map(|inode| inode.to_string()))
}

/// `nginx[1234]`.
pub(crate) fn owner(owner: &Owner) -> String {
    let mut text = format!("{}[{}]", clean(&owner.comm), owner.pid);
    if let Some(container) = &owner.container {
        let _ = write!(text, " in container {}", clean(container));
    }
    text
}

/// One value of evidence.
pub(crate) fn value(value: &Value) -> String {
    match value {
        Value::Null => "not known".to_owned(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::String(text) => clean(text).into_owned(),
        Value::Number(number) => number.to_string(),
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items.iter().map(self::value).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => format!("{{{}}}", pairs(fields)),
    }
}

/// `name=value` of all that is known; a value of several words stands in quotation marks.
pub(crate) fn pairs(evidence: &Evidence) -> String {
    known(evidence)
        .map(|(name, value)| match value {
            Value::String(text) if text.contains(' ') => format!("{name}=\"{}\"", clean(text)),
            value => format!("{name}={}", self::value(value)),
        })
        .collect::<Vec<_>>()
        .join(" ")
}

/// The values that are known.
pub(crate) fn known(evidence: &Evidence) -> impl Iterator<Item = (&String, &Value)> {
    evidence.iter().filter(|(_, value)| !value.is_null())
}

/// `coverage 17/19 hooks, 2 gaps`.
pub(crate) fn coverage(coverage: &Coverage) -> String {
    let (attached, wanted) = hooks(coverage);
    let gaps = match coverage.gaps.len() {
        0 => "no gaps".to_owned(),
        1 => "1 gap".to_owned(),
        count => format!("{count} gaps"),
    };
    format!("coverage {attached}/{wanted} hooks, {gaps}")
}

/// What is not seen, a line for each reason.
pub(crate) fn gaps<'a>(gaps: impl IntoIterator<Item = &'a Gap>) -> Vec<String> {
    let mut by_reason: BTreeMap<&str, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
    for gap in gaps {
        // Several hooks may fail for one reason.
        let reason = match gap
            .reason
            .strip_prefix("hook ")
            .and_then(|rest| rest.split_once(": "))
        {
            Some((_, reason)) => reason,
            None => &gap.reason,
        };
        let parts = by_reason
            .entry(reason)
            .or_default()
            .entry(&gap.cause)
            .or_default();
        parts.extend(gap.field.as_deref());
    }
    by_reason
        .into_iter()
        .map(|(reason, causes)| {
            let causes: Vec<String> = causes
                .into_iter()
                .map(|(cause, parts)| {
                    if parts.is_empty() {
                        cause.to_owned()
                    } else {
                        format!("{cause} (in part: {})", parts.join("; "))
                    }
                })
                .collect();
            format!("not seen: {}: {reason}", causes.join(", "))
        })
        .collect()
}

/// The same in short: which causes are not seen, and which not wholly.
pub(crate) fn gaps_in_short(coverage: &Coverage) -> Vec<String> {
    let names = |whole: bool| -> BTreeSet<&str> {
        let gaps = coverage.gaps.iter().filter(|gap| gap.field.is_none() == whole);
        gaps.map(|gap| gap.cause.as_str()).collect()
    };
    let line = |what: &str, names: BTreeSet<&str>| {
        let names: Vec<&str> = names.into_iter().collect();
        (!names.is_empty()).then(|| format!("{what}: {} (`droptrace doctor` says why)", names.join(", ")))
    };
    [line("not seen", names(true)), line("seen in part", names(false))]
        .into_iter()
        .flatten()
        .collect()
}

/// Hooks that are attached, and those that should be: one that waits for its module, or is not needed, misses nothing.
fn hooks(coverage: &Coverage) -> (usize, usize) {
    let attached = coverage.hooks.iter().filter(|hook| is_attached(hook)).count();
    let failed = coverage
        .hooks
        .iter()
        .filter(|hook| hook.state == "failed")
        .count();
    (attached, attached + failed)
}

/// Whether the hook sees packets now.
pub(crate) fn is_attached(hook: &HookState) -> bool {
    hook.state == "attached"
}

/// The scope in words.
pub(crate) fn scope(coverage: &Coverage) -> String {
    let scope = &coverage.scope;
    let pods = scope.pods.iter().map(|pod| format!("pod {pod}"));
    let labels = scope
        .labels
        .iter()
        .map(|labels| format!("pods with {}", clean(labels)));
    let containers = scope.containers.iter();
    let containers = containers.map(|container| format!("container {}", clean(container)));
    let mut parts: Vec<String> = pods.chain(labels).chain(containers).collect();
    let namespaces = scope.netns.iter().enumerate();
    parts.extend(
        namespaces.map(|(index, netns)| match scope.netns_names.get(index) {
            Some(Some(name)) => format!("netns {}", clean(name)),
            _ => format!("netns {netns}"),
        }),
    );
    parts.extend(scope.addresses.iter().map(|address| format!("address {address}")));
    parts.extend(scope.port.map(|port| format!("port {port}")));
    parts.extend(
        scope
            .protocol
            .iter()
            .map(|protocol| format!("protocol {protocol}")),
    );
    parts.extend(scope.causes.iter().map(|cause| format!("cause {cause}")));
    if parts.is_empty() {
        "the whole host".to_owned()
    } else {
        parts.join(", ")
    }
}

/// `1 packet`, `2 packets`.
pub(crate) fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// `1h02m03s`, `2m03s`, `3s`.
pub(crate) fn elapsed(seconds: u64) -> String {
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds}s"),
        (0, minutes, seconds) => format!("{minutes}m{seconds:02}s"),
        (hours, minutes, seconds) => format!("{hours}h{minutes:02}m{seconds:02}s"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn gaps_of_one_reason_are_one_line() {
        let gap = |cause: &str, field: Option<&str>, reason: &str| Gap {
            cause: cause.to_owned(),
            field: field.map(str::to_owned),
            reason: reason.to_owned(),
        };
        let all = [
            gap("b", None, "hook x: refused"),
            gap("a", Some("IPv4"), "hook y: refused"),
            gap("a", Some("IPv6"), "hook z: refused"),
            gap("c", None, "no BTF"),
        ];
        assert_eq!(
            gaps(&all),
            [
                "not seen: c: no BTF",
                "not seen: a (in part: IPv4; IPv6), b: refused"
            ]
        );
    }

    #[test]
    fn values_read_as_words() {
        for (given, text) in [
            (json!(null), "not known"),
            (json!(true), "yes"),
            (json!("syn"), "syn"),
            (json!(128), "128"),
            (json!([]), "none"),
            (json!([1, 2]), "1, 2"),
            (
                json!({"src": "10.0.0.1:1", "dst": null, "port": 2}),
                "{src=10.0.0.1:1 port=2}",
            ),
            (json!({"why": "two words"}), "{why=\"two words\"}"),
        ] {
            assert_eq!(value(&given), text);
        }
    }

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(clean("a\x1b[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
        assert_eq!(clean("größe"), "größe");
    }

    #[test]
    fn elapsed_time_is_short() {
        assert_eq!(elapsed(3), "3s");
        assert_eq!(elapsed(123), "2m03s");
        assert_eq!(elapsed(3723), "1h02m03s");
    }

    #[test]
    fn a_broken_time_is_shown_as_it_is() {
        assert_eq!(clock("2026-01-02T03:04:05.123456789Z"), "03:04:05.123");
        assert_eq!(clock("?"), "?");
    }
}
