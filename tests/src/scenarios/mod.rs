//! The scenarios, by family of causes.

use std::{net::SocketAddr, sync::Arc};

use crate::{IpFamily, Netns, Result, Scenario, Test, Tun};

mod benign;
mod clean;
mod conntrack;
mod device;
mod forwarding;
mod headers;
mod ipvs;
mod listener;
mod netfilter;
mod pods;
mod receivers;
mod robustness;
mod routing;
mod sockets;
mod source_check;
mod storm;
mod tcp;
mod time_wait;
mod together;

/// Every scenario.
pub fn all() -> Vec<Scenario> {
    [
        listener::SCENARIOS,
        time_wait::SCENARIOS,
        tcp::SCENARIOS,
        source_check::SCENARIOS,
        netfilter::SCENARIOS,
        sockets::SCENARIOS,
        receivers::SCENARIOS,
        routing::SCENARIOS,
        forwarding::SCENARIOS,
        device::SCENARIOS,
        headers::SCENARIOS,
        conntrack::SCENARIOS,
        ipvs::SCENARIOS,
        benign::SCENARIOS,
        clean::SCENARIOS,
        storm::SCENARIOS,
        together::SCENARIOS,
        robustness::SCENARIOS,
        pods::SCENARIOS,
    ]
    .concat()
}

/// One netns with a device whose wire is the test: this netns is host 1 of subnet 0, the peer played by
/// hand is host 2.
struct Wire {
    netns: Arc<Netns>,
    tun: Tun,
    address: SocketAddr,
    peer: SocketAddr,
}

impl Wire {
    fn new(t: &Test, family: IpFamily) -> Result<Self> {
        Self::of(t, "host", family, 0)
    }

    /// The same for a netns with this name, in another subnet.
    fn of(t: &Test, role: &str, family: IpFamily, subnet: u8) -> Result<Self> {
        let netns = t.netns(role)?;
        let tun = Tun::new(&netns, "wire", &[t.net(family, subnet, 1)])?;
        Ok(Self {
            netns,
            tun,
            address: t.at(family, subnet, 1, 0),
            peer: t.at(family, subnet, 2, 0),
        })
    }

    /// With another device `beyond`, on which this netns is host 1 of subnet 1.
    fn with_beyond(t: &Test, family: IpFamily) -> Result<(Self, Tun)> {
        let wire = Self::new(t, family)?;
        let beyond = Tun::new(&wire.netns, "beyond", &[t.net(family, 1, 1)])?;
        Ok((wire, beyond))
    }

    /// This netns' address with a port.
    fn address(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.address.ip(), port)
    }

    /// The peer's address with a port.
    fn peer(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.peer.ip(), port)
    }
}

#[cfg(test)]
mod tests {
    use droptrace::diagnose::{Family, UNPROVOKED, catalogue, cause_by_slug};

    use super::*;

    #[test]
    fn names_are_unique_and_short_enough_for_a_netns() {
        let mut names: Vec<_> = all().iter().map(|scenario| scenario.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(names.iter().all(|name| name.len() < 200));
    }

    #[test]
    fn every_loss_is_provoked_or_said_not_to_be() {
        let losses = catalogue()
            .iter()
            .filter(|cause| !cause.benign && cause.family != Family::Other);
        for cause in losses {
            let provoked = all().iter().any(|scenario| {
                let rest = scenario.name.strip_prefix(cause.slug);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
            });
            let said = UNPROVOKED.iter().any(|(slug, _)| *slug == cause.slug);
            assert!(
                provoked != said,
                "{}: provoked: {provoked}, said not to be: {said}",
                cause.slug
            );
        }
        assert!(UNPROVOKED.iter().all(|(slug, _)| cause_by_slug(slug).is_some()));
    }

    #[test]
    fn every_family_of_causes_has_a_scenario_in_the_short_run() {
        assert!(all().iter().filter(|scenario| scenario.family).count() >= 7);
    }
}
