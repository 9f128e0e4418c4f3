//! SYNs that local sockets sent again: the counter of a netns tells that there
//! are some, its sockets tell where they went.

use std::collections::BTreeMap;

use super::sockets::Connecting;

/// TcpExtTCPSynRetrans of the netns that the thread is in.
pub(super) fn retransmissions() -> Option<u64> {
    counter(
        &std::fs::read_to_string("/proc/thread-self/net/netstat").ok()?,
        "TcpExt:",
        "TCPSynRetrans",
    )
}

/// A counter of `/proc/net/netstat`: a line of names, then one of values.
fn counter(netstat: &str, group: &str, name: &str) -> Option<u64> {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix(group));
    let names = lines.next()?.split_whitespace();
    let values = lines.next()?.split_whitespace();
    names.zip(values).find(|(each, _)| *each == name)?.1.parse().ok()
}

/// Sockets that sent their SYN again since the last look, each with how often; together never more often than the
/// counter grew. Sockets that are gone are forgotten.
pub(super) fn growth<'a>(
    counted: &mut BTreeMap<u64, u8>,
    connecting: &'a [Connecting],
    counter: u64,
) -> Vec<(&'a Connecting, u64)> {
    let mut left = counter;
    let grown = connecting
        .iter()
        .filter_map(|socket| {
            let before = counted.get(&socket.cookie).copied().unwrap_or(0);
            let count = u64::from(socket.retransmissions.saturating_sub(before)).min(left);
            left -= count;
            (count > 0).then_some((socket, count))
        })
        .collect();
    *counted = connecting
        .iter()
        .map(|socket| (socket.cookie, socket.retransmissions))
        .collect();
    grown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_found_by_its_name() {
        let text =
            "TcpExt: SyncookiesSent TCPSynRetrans Other\nTcpExt: 1 22 3\nIpExt: InNoRoutes\nIpExt: 9\n";
        assert_eq!(counter(text, "TcpExt:", "TCPSynRetrans"), Some(22));
        assert_eq!(counter(text, "IpExt:", "InNoRoutes"), Some(9));
        assert_eq!(counter(text, "TcpExt:", "Absent"), None);
        assert_eq!(counter("", "TcpExt:", "TCPSynRetrans"), None);
    }

    #[test]
    fn retransmissions_are_counted_once_and_never_above_the_counter() {
        let socket = |cookie, retransmissions| Connecting {
            cookie,
            local: "192.0.2.9".parse().unwrap(),
            remote: "192.0.2.1:80".parse().unwrap(),
            retransmissions,
        };
        let mut counted = BTreeMap::new();
        let first = [socket(1, 2), socket(2, 1)];
        let sum = |grown: Vec<(&Connecting, u64)>| grown.iter().map(|(_, count)| count).sum::<u64>();
        assert_eq!(sum(growth(&mut counted, &first, 3)), 3);
        assert_eq!(sum(growth(&mut counted, &first, 5)), 0);
        let later = [socket(1, 4), socket(3, 6)];
        // Socket 3 was connecting before counting began: only what the counter saw is counted.
        assert_eq!(sum(growth(&mut counted, &later, 3)), 3);
        assert_eq!(counted.keys().copied().collect::<Vec<_>>(), [1, 3]);
    }
}
