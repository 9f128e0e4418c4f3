//! What the PAWS causes have in common: a timestamp older than the one stored.

use droptrace_common::FieldId;

use super::values::{endpoint, in_netns};
use crate::diagnose::{Facts, Finding, RawEvent};

/// The evidence that the PAWS causes give.
pub(super) const STORED: (&str, &str) = (
    "timestamp_stored",
    "TCP timestamp last accepted from that peer (ts_recent), in ticks of the peer's clock, mostly 1 ms",
);
/// See [`STORED`].
pub(super) const RECEIVED: (&str, &str) = (
    "timestamp_received",
    "TCP timestamp in the segment, in the same ticks",
);
/// See [`STORED`].
pub(super) const BEHIND: (&str, &str) = (
    "behind",
    "ticks by which the received timestamp is older than the stored one",
);
/// See [`STORED`].
pub(super) const AGE: (&str, &str) = (
    "age_s",
    "seconds since it was stored; null where the kernel keeps no time, as for a pending handshake",
);

/// See [`STORED`].
pub(super) const PEER: (&str, &str) = ("peer", "address and port that the segment came from");

/// What a cause of this kind finds before it adds its own: the timestamps; and the peer, for evidence and in words.
pub(super) fn begin(event: &RawEvent) -> (Finding, Option<String>) {
    let mut found = Finding::default();
    Timestamps::of(event).put(&mut found);
    let packet = event.parse();
    (found, endpoint(packet.src, packet.sport))
}

/// The command that shows what this netns holds of the peer in a state (`time-wait`, `syn-recv`).
pub(super) fn show_peer(event: &RawEvent, facts: &Facts, state: &str) -> Option<String> {
    let src = event.parse().src?;
    Some(in_netns(facts, None, &format!("ss -tan state {state} dst {src}")))
}

/// The timestamps of a rejected segment.
pub(super) struct Timestamps {
    stored: Option<u32>,
    pub(super) received: Option<u32>,
    age_s: Option<u64>,
}

impl Timestamps {
    /// From the fields that the hook read; the received one else from the packet itself.
    pub(super) fn of(event: &RawEvent) -> Self {
        Self {
            stored: event.field(FieldId::TimestampStored).map(|value| value as u32),
            received: event
                .field(FieldId::TimestampReceived)
                .map(|value| value as u32)
                .or_else(|| event.parse().tcp?.timestamp.map(|(value, _)| value)),
            age_s: event.field(FieldId::TimestampAge),
        }
    }

    /// Writes the evidence.
    pub(super) fn put(&self, found: &mut Finding) {
        let behind = self
            .stored
            .zip(self.received)
            .map(|(stored, received)| stored.wrapping_sub(received) as i32);
        found
            .put(STORED.0, self.stored)
            .put(RECEIVED.0, self.received)
            .put(BEHIND.0, behind)
            .put(AGE.0, self.age_s);
    }
}
