//! How the rules read values of an event and its facts.

use std::net::{IpAddr, SocketAddr};

use droptrace_common::{FieldId, bits};

use crate::diagnose::{CountedBy, Facts, Owner, Packet, RawEvent, SocketMemory, address_from_halves};

/// A setting of the netns, as text.
pub(super) fn sysctl<'a>(facts: &'a Facts, name: &str) -> Option<&'a str> {
    facts.sysctls.get(name).map(|text| text.trim())
}

/// A setting of the netns that is a number.
pub(super) fn sysctl_number(facts: &Facts, name: &str) -> Option<u64> {
    sysctl(facts, name)?.parse().ok()
}

/// Name of the device that the packet came by, else of the one it is on.
pub(super) fn device<'a>(event: &RawEvent, facts: &'a Facts) -> Option<&'a str> {
    [event.header.iif, event.header.ifindex]
        .iter()
        .find_map(|index| facts.devices.get(index))
        .map(String::as_str)
}

/// Name of the device that the packet is on, else of the one that it came by.
pub(super) fn on<'a>(event: &RawEvent, facts: &'a Facts) -> Option<&'a str> {
    [event.header.ifindex, event.header.iif]
        .iter()
        .find_map(|index| facts.devices.get(index))
        .map(String::as_str)
}

/// Name of a sysctl in which `{on}` and `{ip}` stand for what they do in [`crate::diagnose::Need::Sysctl`].
pub(super) fn setting(event: &RawEvent, facts: &Facts, name: &str) -> Option<String> {
    let ip = if event.parse().dst?.is_ipv6() {
        "ipv6"
    } else {
        "ipv4"
    };
    let on = facts.devices.get(&event.header.ifindex).map(String::as_str);
    if on.is_none() && name.contains("{on}") {
        return None;
    }
    Some(name.replace("{on}", on.unwrap_or_default()).replace("{ip}", ip))
}

/// `command` as it is run in the netns of the drop: through the owner's process where that is known, else by the name of
/// the netns, else through a process that lives in it. Where none is found the command fails: it never falls back to the
/// netns of the shell. On the host itself it is run as it is.
pub(super) fn in_netns(facts: &Facts, owner: Option<&Owner>, command: &str) -> String {
    match (owner, &facts.netns_name) {
        (_, Some(name)) if name == "host" => command.to_owned(),
        (Some(owner), _) => format!("nsenter -t {} -n {command}", owner.pid),
        (None, Some(name)) => format!("ip netns exec {name} {command}"),
        (None, None) if facts.netns != 0 => format!(
            "nsenter -t \"$(lsns -t net -nro NS,PID | sed -n 's/^{} //p')\" -n {command}",
            facts.netns
        ),
        (None, None) => format!("nsenter --net=/run/netns/NAME {command}"),
    }
}

/// The command that asks how the packet to `dst` is routed: as one that came by a device, or as one of this host's.
pub(super) fn on_the_way(event: &RawEvent, facts: &Facts, dst: IpAddr) -> String {
    let came_by = facts.devices.get(&event.header.iif).zip(event.parse().src);
    match came_by {
        Some((interface, src)) => format!("ip route get {dst} from {src} iif {interface}"),
        None => format!("ip route get {dst}"),
    }
}

/// Address and port, as `10.0.0.1:80` or `[fd00::1]:80`; the address alone without a port.
pub(super) fn endpoint(address: Option<IpAddr>, port: Option<u16>) -> Option<String> {
    Some(match (address?, port) {
        (address, Some(port)) => SocketAddr::new(address, port).to_string(),
        (address, None) => address.to_string(),
    })
}

/// What the packet's socket holds, and may hold: as the event saw it, else when asked.
pub(super) fn socket_memory(event: &RawEvent, facts: &Facts) -> SocketMemory {
    let asked = facts.socket.unwrap_or_default();
    SocketMemory {
        queued: event.field(FieldId::SocketQueued).or(asked.queued),
        receive_buffer: event.field(FieldId::SocketReceiveBuffer).or(asked.receive_buffer),
        send_buffer: event.field(FieldId::SocketSendBuffer).or(asked.send_buffer),
        backlog: event.field(FieldId::SocketBacklog).or(asked.backlog),
        drops: asked.drops,
    }
}

/// The counter of IPv4 or that of IPv6, by the family of an address; without one it stays open which of them.
pub(super) const fn counter_of(address: Option<IpAddr>, v4: &'static str, v6: &'static str) -> CountedBy {
    match address {
        Some(IpAddr::V4(_)) => CountedBy::Named(v4),
        Some(IpAddr::V6(_)) => CountedBy::Named(v6),
        None => CountedBy::Cause,
    }
}

/// The command of iptables for such packets.
pub(super) fn iptables(packet: &Packet) -> &'static str {
    if packet.is_ipv6() { "ip6tables" } else { "iptables" }
}

/// The owner of a socket in words.
pub(super) fn who(owner: Option<&Owner>) -> String {
    match owner {
        Some(owner) => format!("{} (pid {})", owner.comm, owner.pid),
        None => "the owner of the socket".to_owned(),
    }
}

/// Which part of a connection a TCP segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    /// Opens a connection.
    Syn,
    /// Answers one (SYN with ACK).
    Reply,
    /// Everything later.
    MidStream,
}

impl Segment {
    /// Of a TCP segment; `None` for anything else.
    pub(super) fn of(event: &RawEvent) -> Option<Self> {
        if event.has(bits::SYN) {
            Some(Self::Syn)
        } else if event.has(bits::SYN_ACK) {
            Some(Self::Reply)
        } else if event.has(bits::TCP) {
            Some(Self::MidStream)
        } else {
            None
        }
    }

    /// The word in evidence.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Syn => "syn",
            Self::Reply => "reply",
            Self::MidStream => "mid-stream",
        }
    }
}

/// A conntrack tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuple {
    /// Source address and port.
    pub(super) source: (IpAddr, u16),
    /// Destination address and port.
    pub(super) destination: (IpAddr, u16),
}

impl Tuple {
    /// From the fields that hold it: source, destination (two halves each), ports.
    pub(super) fn read(event: &RawEvent, fields: [FieldId; 5]) -> Option<Self> {
        let [source_hi, source_lo, destination_hi, destination_lo, ports] = fields;
        let address = |hi, lo| Some(address_from_halves(event.field(hi)?, event.field(lo)?));
        let ports = event.field(ports)?;
        Some(Self {
            source: (address(source_hi, source_lo)?, (ports >> 16) as u16),
            destination: (address(destination_hi, destination_lo)?, ports as u16),
        })
    }

    /// The tuple of the other direction.
    pub(super) const fn reversed(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
        }
    }
}

impl std::fmt::Display for Tuple {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} > {}",
            SocketAddr::from(self.source),
            SocketAddr::from(self.destination)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_never_falls_back_to_the_host() {
        let owner = Owner {
            pid: 42,
            comm: "nginx".to_owned(),
            ..Owner::default()
        };
        let named = |name: Option<&str>, netns| Facts {
            netns,
            netns_name: name.map(str::to_owned),
            ..Facts::default()
        };
        for (facts, owner, command) in [
            (named(Some("host"), 1), Some(&owner), "x"),
            (named(Some("web"), 7), Some(&owner), "nsenter -t 42 -n x"),
            (named(Some("web"), 7), None, "ip netns exec web x"),
            (named(None, 7), Some(&owner), "nsenter -t 42 -n x"),
            (
                named(None, 7),
                None,
                "nsenter -t \"$(lsns -t net -nro NS,PID | sed -n 's/^7 //p')\" -n x",
            ),
            (named(None, 0), None, "nsenter --net=/run/netns/NAME x"),
        ] {
            assert_eq!(in_netns(&facts, owner, "x"), command);
        }
    }
}
