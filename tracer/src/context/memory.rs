//! Memory of all sockets of a protocol together.

/// Pages that sockets of an IP protocol hold on this host, in whatever netns: `mem` in `/proc/net/sockstat`
/// (`sockstat_seq_show`, `net/ipv4/proc.c`, 5.10 - 7.3). IPv6 sockets are among them.
///
/// # Errors
/// The reason in words.
pub(super) fn pages(protocol: u8) -> Result<u64, String> {
    let path = "/proc/thread-self/net/sockstat";
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    of_protocol(&text, protocol).ok_or_else(|| format!("{path} does not tell"))
}

fn of_protocol(text: &str, protocol: u8) -> Option<u64> {
    let name = match i32::from(protocol) {
        libc::IPPROTO_TCP => "TCP:",
        libc::IPPROTO_UDP => "UDP:",
        _ => return None,
    };
    let mut words = text
        .lines()
        .find(|line| line.starts_with(name))?
        .split_whitespace();
    words.find(|word| *word == "mem")?;
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_protocol_has_its_own() {
        let text =
            "sockets: used 7\nTCP: inuse 1 orphan 0 tw 0 alloc 2 mem 3\nUDP: inuse 0 mem 4\nRAW: inuse 0\n";
        assert_eq!(of_protocol(text, 6), Some(3));
        assert_eq!(of_protocol(text, 17), Some(4));
        assert_eq!(of_protocol(text, 255), None);
        assert_eq!(of_protocol("", 6), None);
    }
}
