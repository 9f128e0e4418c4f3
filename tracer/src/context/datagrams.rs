//! UDP and raw sockets from `/proc/net/udp`, `udp6`, `raw` and `raw6`: to ask sock_diag would load a module that is not
//! loaded.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::sockets::Local;
use crate::diagnose::SocketMemory;

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    local: SocketAddr,
    remote: SocketAddr,
    queued: u64,
    inode: u64,
    drops: u64,
}

/// The socket of a table (`udp` or `raw`, where the protocol is the port) that takes a packet from `remote` to `local`, in
/// the netns that the thread is in; `None`: there is none.
///
/// # Errors
/// Several may take it, and only the kernel knows which does.
pub(super) fn lookup(table: &str, local: SocketAddr, remote: SocketAddr) -> Result<Option<Local>, String> {
    let read = |name: &str| {
        std::fs::read_to_string(format!("/proc/thread-self/net/{name}"))
            .map_err(|error| format!("/proc/net/{name}: {error}"))
    };
    let mut lines = parse(&read(&format!("{table}6")).unwrap_or_default());
    if local.is_ipv4() {
        lines.extend(parse(&read(table)?));
    }
    choose(&lines, local, remote)
}

/// The one with the best score, as the kernel chooses (`compute_score`, net/ipv4/udp.c and net/ipv6/udp.c, 5.10 - 7.3). The
/// table does not tell the device that a socket is bound to.
fn choose(lines: &[Line], local: SocketAddr, remote: SocketAddr) -> Result<Option<Local>, String> {
    let best = lines.iter().filter_map(|line| score(line, local, remote)).max();
    let mut chosen = lines
        .iter()
        .filter(|line| best.is_some() && score(line, local, remote) == best);
    match (chosen.next(), chosen.next()) {
        (_, Some(_)) => Err(format!(
            "several sockets take packets to {local}, and without the module udp_diag the kernel does not tell which of them this one"
        )),
        (one, None) => Ok(one.map(|line| Local {
            inode: line.inode,
            memory: SocketMemory {
                queued: Some(line.queued),
                drops: Some(line.drops),
                ..SocketMemory::default()
            },
            ..Local::default()
        })),
    }
}

fn score(line: &Line, local: SocketAddr, remote: SocketAddr) -> Option<u8> {
    let fits = |bound: SocketAddr, packet: SocketAddr, any_port: bool| {
        let ip = bound.ip();
        let exact = ip.to_canonical() == packet.ip().to_canonical();
        let any = ip.is_unspecified() && (ip.is_ipv6() || packet.is_ipv4());
        let port = bound.port() == packet.port() || any_port && bound.port() == 0;
        ((exact || any) && port).then_some(u8::from(exact))
    };
    let family = u8::from(line.local.is_ipv4() == local.is_ipv4());
    Some(fits(line.local, local, false)? * 2 + fits(line.remote, remote, true)? * 4 + family)
}

/// Lines as `udp4_seq_show` and `udp6_seq_show` write them (net/ipv4/udp.c, `__ip6_dgram_sock_seq_show`,
/// net/ipv6/datagram.c, 5.10 - 7.3).
fn parse(text: &str) -> Vec<Line> {
    text.lines()
        .skip(1)
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [_, local, remote, _, queues, _, _, _, _, inode, _, _, drops, ..] = words[..] else {
                return None;
            };
            let (_, queued) = queues.split_once(':')?;
            Some(Line {
                local: endpoint(local)?,
                remote: endpoint(remote)?,
                queued: u64::from_str_radix(queued, 16).ok()?,
                inode: inode.parse().ok()?,
                drops: drops.parse().ok()?,
            })
        })
        .collect()
}

/// An address in words of four bytes, each as this machine reads it, and a port.
fn endpoint(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let word = |at: usize| {
        let word = u32::from_str_radix(address.get(at * 8..at * 8 + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    let ip = if address.len() == 8 {
        IpAddr::V4(Ipv4Addr::from(word(0)?))
    } else {
        let mut bytes = [0; 16];
        for (at, four) in bytes.chunks_exact_mut(4).enumerate() {
            four.copy_from_slice(&word(at)?);
        }
        IpAddr::V6(Ipv6Addr::from(bytes))
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: &str = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n  \
         85: 00000000:0035 00000000:0000 07 00000000:00000D00 00:00000000 00000000     0        0 41 2 0000000000000000 7\n  \
         86: 010200C0:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 42 2 0000000000000000 0\n";
    const V6: &str = "  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n  \
         90: 00000000000000000000000000000000:0035 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 43 2 0000000000000000 0\n";

    fn chosen(text: &str, local: &str) -> Option<u64> {
        choose(
            &parse(text),
            local.parse().unwrap(),
            "192.0.2.9:4000".parse().unwrap(),
        )
        .unwrap()
        .map(|found| found.inode)
    }

    #[test]
    fn the_bound_address_decides() {
        assert_eq!(chosen(V4, "192.0.2.1:53"), Some(42));
        assert_eq!(chosen(V4, "192.0.2.2:53"), Some(41));
        assert_eq!(chosen(V4, "192.0.2.2:54"), None);
        assert_eq!(chosen(V6, "192.0.2.2:53"), Some(43));
    }

    #[test]
    fn what_waits_and_what_was_lost_is_read() {
        let found = choose(
            &parse(V4),
            "192.0.2.2:53".parse().unwrap(),
            "192.0.2.9:4000".parse().unwrap(),
        );
        let memory = found.unwrap().unwrap().memory;
        assert_eq!((memory.queued, memory.drops), (Some(0xd00), Some(7)));
        assert_eq!(memory.receive_buffer, None);
    }

    #[test]
    fn of_equals_none_is_chosen() {
        let twice = format!("{V4}{}", V4.lines().nth(1).unwrap());
        let both = choose(
            &parse(&twice),
            "192.0.2.2:53".parse().unwrap(),
            "192.0.2.9:4000".parse().unwrap(),
        );
        assert!(both.unwrap_err().contains("udp_diag"));
    }
}
