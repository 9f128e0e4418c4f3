//! What the causes about the state of a TCP connection have in common: a segment that is held against what the socket
//! expects.

use droptrace_common::FieldId;

use super::values::in_netns;
use crate::diagnose::{Facts, Finding, RawEvent};

/// The evidence that these causes give.
pub(super) const SEQUENCE: (&str, &str) = ("sequence", "sequence number of the segment");
/// See [`SEQUENCE`].
pub(super) const EXPECTED: (&str, &str) = (
    "expected_sequence",
    "sequence number that the socket expects next (rcv_nxt); null where the kernel does not name the socket",
);
/// See [`SEQUENCE`].
pub(super) const WINDOW: (&str, &str) = (
    "window",
    "bytes that the socket has room for from there on (its receive window); null as above",
);
/// See [`SEQUENCE`].
pub(super) const AHEAD: (&str, &str) = (
    "ahead",
    "bytes by which the segment starts after the expected sequence number; negative: before it; null as above",
);
/// See [`SEQUENCE`].
pub(super) const DATA: (&str, &str) = ("data", "bytes of data in the segment");

/// A segment and what it was held against.
pub(super) struct Held {
    pub(super) sequence: Option<u32>,
    expected: Option<u32>,
    pub(super) window: Option<u64>,
    /// Bytes of data.
    pub(super) data: Option<u32>,
}

impl Held {
    /// From the packet, and the fields that the hook or the free read of the socket.
    pub(super) fn of(event: &RawEvent) -> Self {
        let packet = event.parse();
        Self {
            sequence: packet.tcp.map(|tcp| tcp.sequence),
            expected: event.field(FieldId::ExpectedSequence).map(|value| value as u32),
            window: event.field(FieldId::ReceiveWindow),
            data: data(event),
        }
    }

    /// How far after the expected sequence number it starts.
    pub(super) fn ahead(&self) -> Option<i32> {
        Some(self.sequence?.wrapping_sub(self.expected?) as i32)
    }

    /// Writes the evidence.
    pub(super) fn put(&self, found: &mut Finding) {
        found
            .put(SEQUENCE.0, self.sequence)
            .put(EXPECTED.0, self.expected)
            .put(WINDOW.0, self.window)
            .put(AHEAD.0, self.ahead())
            .put(DATA.0, self.data);
    }
}

/// Bytes of data in a TCP segment.
pub(super) fn data(event: &RawEvent) -> Option<u32> {
    let headers = event.parse().headers?;
    Some(event.header.len.saturating_sub(headers))
}

/// The command that shows the connection, as far as the packet tells it; all connections where nothing does.
pub(super) fn show_connection(event: &RawEvent, facts: &Facts) -> String {
    let packet = event.parse();
    let peer = packet.src.zip(packet.sport);
    let filter = peer.map_or_else(String::new, |(src, sport)| {
        format!(" dst {}", std::net::SocketAddr::new(src, sport))
    });
    in_netns(facts, None, &format!("ss -tmino{filter}"))
}

/// The process that owns the socket, in words.
pub(super) fn reader(facts: &Facts) -> String {
    match &facts.owner {
        Some(owner) => format!("{} (pid {})", owner.comm, owner.pid),
        None => "the process that owns the socket".to_owned(),
    }
}
