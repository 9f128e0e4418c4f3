//! Requests in a netns that the worker is in for a while.

use std::io;

use netlink_sys::protocols::{NETLINK_ROUTE, NETLINK_SOCK_DIAG};

use crate::context::{netlink::Netlink, suspects};

/// Requests in one netns, opened when first needed.
#[derive(Default)]
pub(super) struct Visit {
    route: Option<Netlink>,
    diag: Option<Netlink>,
}

impl Visit {
    /// Asks for sockets.
    pub(super) fn diag(&mut self) -> Result<&mut Netlink, String> {
        open(&mut self.diag, NETLINK_SOCK_DIAG)
    }

    /// Asks for routes, devices and neighbours.
    pub(super) fn route(&mut self) -> Result<&mut Netlink, String> {
        open(&mut self.route, NETLINK_ROUTE)
    }

    /// Listeners over a limit; none where the kernel does not list them.
    pub(super) fn suspects(&mut self, syn_queues: bool) -> Vec<suspects::Suspect> {
        let found = self
            .diag()
            .and_then(|diag| suspects::over_their_limit(diag, syn_queues).map_err(words));
        found.unwrap_or_default()
    }
}

fn open(slot: &mut Option<Netlink>, protocol: isize) -> Result<&mut Netlink, String> {
    if slot.is_none() {
        *slot = Some(Netlink::open(protocol).map_err(words)?);
    }
    slot.as_mut().ok_or_else(String::new)
}

/// What an error says.
#[allow(clippy::needless_pass_by_value, reason = "made for map_err")]
pub(super) fn words(error: io::Error) -> String {
    error.to_string()
}
