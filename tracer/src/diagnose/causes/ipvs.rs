//! What the IPVS causes have in common: virtual service, entry and real server.

use std::net::IpAddr;

use droptrace_common::FieldId;

use super::values::endpoint;
use crate::diagnose::{Facts, IpvsService, RawEvent};

/// Names of `ip_vs_conn.state` for TCP (`IP_VS_TCP_S_…`, include/net/ip_vs.h, unchanged 5.10 - 7.3).
const TCP_STATES: [&str; 11] = [
    "NONE",
    "ESTABLISHED",
    "SYN_SENT",
    "SYN_RECV",
    "FIN_WAIT",
    "TIME_WAIT",
    "CLOSE",
    "CLOSE_WAIT",
    "LAST_ACK",
    "LISTEN",
    "SYNACK",
];

/// The IPVS entry or service that a packet met.
pub(super) struct Entry {
    /// Address and port of the virtual service.
    pub(super) service: Option<(IpAddr, u16)>,
    /// Address and port of the entry's real server.
    pub(super) server: Option<(IpAddr, u16)>,
    /// State of the entry, as `ipvsadm -Lnc` shows it.
    pub(super) state: Option<&'static str>,
    /// Weight of the real server; none when there is no server.
    pub(super) weight: Option<i32>,
    /// Whether the server was removed from the service.
    pub(super) removed: Option<bool>,
    /// `tcp`, `udp`, `sctp`.
    pub(super) protocol: Option<String>,
}

impl Entry {
    /// Reads it; the virtual service is the packet's destination where no hook says otherwise.
    pub(super) fn of(event: &RawEvent) -> Self {
        let packet = event.parse();
        let service = event
            .address(FieldId::IpvsVirtualHi, FieldId::IpvsVirtualLo)
            .zip(event.field(FieldId::IpvsVirtualPort).map(|port| port as u16))
            .or_else(|| packet.dst.zip(packet.dport));
        Self {
            service,
            server: event
                .address(FieldId::IpvsServerHi, FieldId::IpvsServerLo)
                .zip(event.field(FieldId::IpvsServerPort).map(|port| port as u16)),
            state: event.field(FieldId::IpvsState).and_then(|state| {
                if packet.protocol == Some(6) {
                    TCP_STATES.get(state as usize).copied()
                } else {
                    None
                }
            }),
            weight: event
                .field(FieldId::IpvsWeight)
                .map(|weight| weight as i32)
                .filter(|weight| *weight >= 0),
            removed: event.field(FieldId::IpvsRemoved).map(|removed| removed != 0),
            protocol: packet.protocol_name(),
        }
    }

    /// Address and port of the virtual service.
    pub(super) fn service_text(&self) -> Option<String> {
        self.service.and_then(|(ip, port)| endpoint(Some(ip), Some(port)))
    }

    /// Address and port of the real server.
    pub(super) fn server_text(&self) -> Option<String> {
        self.server.and_then(|(ip, port)| endpoint(Some(ip), Some(port)))
    }

    /// The service as `ipvsadm` takes it: `-t 10.0.0.1:80`.
    pub(super) fn service_option(&self) -> Option<String> {
        let option = match self.protocol.as_deref() {
            Some("tcp") => "-t",
            Some("udp") => "-u",
            Some("sctp") => "--sctp-service",
            _ => return None,
        };
        Some(format!("{option} {}", self.service_text()?))
    }

    /// What context knows of the service.
    pub(super) fn known<'a>(&self, facts: &'a Facts) -> Option<&'a IpvsService> {
        let (ip, port) = self.service?;
        facts.ipvs_services.as_ref()?.iter().find(|known| {
            known.address == ip
                && known.port == port
                && Some(protocol_name(known.protocol)) == self.protocol.as_deref()
        })
    }
}

/// Name of a protocol that IPVS balances.
pub(super) fn protocol_name(number: u8) -> &'static str {
    match number {
        6 => "tcp",
        17 => "udp",
        132 => "sctp",
        _ => "other",
    }
}
