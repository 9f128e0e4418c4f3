//! What the two causes of a lost conntrack clash have in common: loser, winner, and how old the winner is.

use droptrace_common::{FieldId, ct_status};
use serde_json::Value;

use super::values::{Tuple, sysctl_number};
use crate::diagnose::{Facts, Finding, Need, RawEvent};

/// Fixed by a rule or by the clash itself: such a timeout tells no age (`IPS_FIXED_TIMEOUT_BIT`).
const FIXED_TIMEOUT: u64 = 1 << 10;

/// A winner whose timer was set longer ago than this, in seconds, is no party of a race: no packet
/// waits that long between its NAT decision and its confirmation.
const LONGEST_RACE_S: f64 = 5.0;

/// States of a TCP entry (`enum tcp_conntrack`, include/uapi/linux/netfilter/nf_conntrack_tcp.h), each
/// with the last word of its timeout's sysctl.
const TCP_STATES: [(&str, &str); 10] = [
    ("NONE", ""),
    ("SYN_SENT", "syn_sent"),
    ("SYN_RECV", "syn_recv"),
    ("ESTABLISHED", "established"),
    ("FIN_WAIT", "fin_wait"),
    ("CLOSE_WAIT", "close_wait"),
    ("LAST_ACK", "last_ack"),
    ("TIME_WAIT", "time_wait"),
    ("CLOSE", "close"),
    ("SYN_SENT2", "syn_sent"),
];

/// What context must find out to tell a winner's age.
pub(super) const NEEDS: &[Need] = &[
    Need::Owner,
    Need::Sysctl("net.netfilter.nf_conntrack_udp_timeout"),
    Need::Sysctl("net.netfilter.nf_conntrack_udp_timeout_stream"),
    Need::Sysctl("net.netfilter.nf_conntrack_tcp_timeout_syn_sent"),
    Need::Sysctl("net.netfilter.nf_conntrack_tcp_timeout_syn_recv"),
    Need::Sysctl("net.netfilter.nf_conntrack_tcp_timeout_established"),
    Need::Sysctl("net.netfilter.nf_conntrack_tcp_timeout_fin_wait"),
    Need::Sysctl("net.netfilter.nf_conntrack_tcp_timeout_close_wait"),
    Need::Sysctl("net.netfilter.nf_conntrack_tcp_timeout_last_ack"),
    Need::Sysctl("net.netfilter.nf_conntrack_tcp_timeout_time_wait"),
    Need::Sysctl("net.netfilter.nf_conntrack_tcp_timeout_close"),
];

/// The evidence that both causes give.
pub(super) const EVIDENCE: &[(&str, &str)] = &[
    (
        "nat",
        "what NAT changes in the loser: none, source, destination, or both",
    ),
    (
        "loser_original",
        "loser's tuple as the packet came: source > destination",
    ),
    ("loser_reply", "loser's tuple as a reply would come"),
    ("winner_original", "winner's tuple as its first packet came"),
    ("winner_reply", "winner's tuple as its replies come"),
    (
        "same_flow",
        "whether loser and winner are packets of one flow (equal original tuples)",
    ),
    (
        "winner_state",
        "winner's TCP state, and UNREPLIED, SEEN_REPLY or ASSURED, as conntrack -L shows them",
    ),
    (
        "winner_age_s",
        "seconds since the winner's timer was last set: it is at least as old",
    ),
    (
        "winner_expires_s",
        "seconds until the winner expires if no packet comes",
    ),
];

/// Loser and winner of a clash.
pub(super) struct Clash {
    pub(super) loser_original: Option<Tuple>,
    pub(super) loser_reply: Option<Tuple>,
    winner_original: Option<Tuple>,
    winner_reply: Option<Tuple>,
    winner_status: Option<u64>,
    winner_tcp_state: Option<usize>,
    winner_expires_s: Option<f64>,
    winner_age_s: Option<f64>,
}

impl Clash {
    pub(super) fn of(event: &RawEvent, facts: &Facts) -> Self {
        let protocol = event.parse().protocol;
        let winner_status = event.field(FieldId::WinnerStatus);
        let winner_tcp_state = event
            .field(FieldId::WinnerTcpState)
            .filter(|_| protocol == Some(6))
            .map(|state| state as usize);
        // The field is a 32-bit difference of jiffies.
        let winner_expires_s = event
            .field(FieldId::WinnerTimeout)
            .zip(facts.hz.filter(|hz| *hz != 0))
            .map(|(jiffies, hz)| f64::from(jiffies as u32 as i32) / f64::from(hz));
        let full = winner_status
            .filter(|status| status & FIXED_TIMEOUT == 0)
            .and_then(|status| full_timeout(facts, protocol?, status, winner_tcp_state));
        let winner_age_s = full
            .zip(winner_expires_s)
            .map(|(full, left)| full as f64 - left)
            // A timeout that a rule set or that was changed since tells nothing.
            .filter(|age| *age >= 0.0);
        Self {
            loser_original: Tuple::read(
                event,
                [
                    FieldId::LoserOrigSrcHi,
                    FieldId::LoserOrigSrcLo,
                    FieldId::LoserOrigDstHi,
                    FieldId::LoserOrigDstLo,
                    FieldId::LoserOrigPorts,
                ],
            ),
            loser_reply: Tuple::read(
                event,
                [
                    FieldId::LoserReplySrcHi,
                    FieldId::LoserReplySrcLo,
                    FieldId::LoserReplyDstHi,
                    FieldId::LoserReplyDstLo,
                    FieldId::LoserReplyPorts,
                ],
            ),
            winner_original: Tuple::read(
                event,
                [
                    FieldId::WinnerOrigSrcHi,
                    FieldId::WinnerOrigSrcLo,
                    FieldId::WinnerOrigDstHi,
                    FieldId::WinnerOrigDstLo,
                    FieldId::WinnerOrigPorts,
                ],
            ),
            winner_reply: Tuple::read(
                event,
                [
                    FieldId::WinnerReplySrcHi,
                    FieldId::WinnerReplySrcLo,
                    FieldId::WinnerReplyDstHi,
                    FieldId::WinnerReplyDstLo,
                    FieldId::WinnerReplyPorts,
                ],
            ),
            winner_status,
            winner_tcp_state,
            winner_expires_s,
            winner_age_s,
        }
    }

    /// Whether both are packets of one flow: then no port was wanting.
    pub(super) fn same_flow(&self) -> Option<bool> {
        Some(self.loser_original? == self.winner_original?)
    }

    /// Whether the winner was there before any race with this packet could begin.
    pub(super) fn winner_is_older(&self) -> bool {
        self.winner_age_s.is_some_and(|age| age > LONGEST_RACE_S)
    }

    /// Whether the winner is ASSURED.
    pub(super) fn winner_is_assured(&self) -> bool {
        self.winner_status
            .is_some_and(|status| status & ct_status::ASSURED != 0)
    }

    /// What NAT changes in the loser.
    pub(super) fn nat(&self) -> Option<&'static str> {
        let expected = self.loser_original?.reversed();
        let reply = self.loser_reply?;
        Some(
            match (
                reply.destination != expected.destination,
                reply.source != expected.source,
            ) {
                (false, false) => "none",
                (true, false) => "source",
                (false, true) => "destination",
                (true, true) => "both",
            },
        )
    }

    fn winner_state(&self) -> Option<String> {
        let status = self.winner_status?;
        let reached = if status & ct_status::ASSURED != 0 {
            "ASSURED"
        } else if status & ct_status::SEEN_REPLY != 0 {
            "SEEN_REPLY"
        } else {
            "UNREPLIED"
        };
        Some(
            match self.winner_tcp_state.and_then(|state| TCP_STATES.get(state)) {
                Some((state, _)) => format!("{state} {reached}"),
                None => reached.to_owned(),
            },
        )
    }

    /// Writes the evidence of [`EVIDENCE`].
    pub(super) fn put(&self, found: &mut Finding) {
        let text = |tuple: Option<Tuple>| tuple.map(|tuple| tuple.to_string());
        found
            .put("nat", self.nat())
            .put("loser_original", text(self.loser_original))
            .put("loser_reply", text(self.loser_reply))
            .put("winner_original", text(self.winner_original))
            .put("winner_reply", text(self.winner_reply))
            .put("same_flow", self.same_flow())
            .put("winner_state", self.winner_state())
            .put("winner_age_s", seconds(self.winner_age_s))
            .put("winner_expires_s", seconds(self.winner_expires_s));
    }
}

/// To the tenth: a jiffy is no more exact than that.
fn seconds(value: Option<f64>) -> Value {
    value.map_or(Value::Null, |value| ((value * 10.0).round() / 10.0).into())
}

/// The timeout, in seconds, that an entry in this state starts with
/// (nf_conntrack_proto_udp.c, nf_conntrack_proto_tcp.c: UDP gets the stream timeout together with ASSURED).
fn full_timeout(facts: &Facts, protocol: u8, status: u64, tcp_state: Option<usize>) -> Option<u64> {
    let name = match protocol {
        6 => format!("tcp_timeout_{}", TCP_STATES.get(tcp_state?)?.1),
        17 if status & ct_status::ASSURED != 0 => "udp_timeout_stream".to_owned(),
        17 => "udp_timeout".to_owned(),
        _ => return None,
    };
    sysctl_number(facts, &format!("net.netfilter.nf_conntrack_{name}"))
}
