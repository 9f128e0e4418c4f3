//! Names of pods and containers that come to be known after drops were told
//! without them.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use crate::{
    context::{Context, Names, monotonic_ns, wall_time},
    diagnose::{Drop, Name},
};

/// Nameless network namespaces and addresses that are remembered; beyond that, names come with drops only.
const REMEMBERED: usize = 4_096;
/// A name that comes later than this after the drop may be that of another pod with the same address.
const LATEST: Duration = Duration::from_secs(10);

/// What drops were told without a name, each since when (monotonic, in nanoseconds).
#[derive(Debug, Default)]
pub(super) struct LateNames {
    namespaces: BTreeMap<u32, u64>,
    addresses: BTreeMap<IpAddr, u64>,
}

impl LateNames {
    /// Remembers what a drop has no name for.
    pub(super) fn note(&mut self, drop: &Drop) {
        let at = drop.ktime_ns;
        if let Some(netns) = drop.netns
            && drop.pod.is_none()
            && drop.container.is_none()
        {
            remember(&mut self.namespaces, netns, at);
        }
        let ends = [(drop.src, &drop.src_name), (drop.dst, &drop.dst_name)];
        for (address, name) in ends {
            if let (Some(address), None) = (address, name) {
                remember(&mut self.addresses, address, at);
            }
        }
    }

    /// The names that are known by now, each once.
    pub(super) fn news(&mut self, context: &Context) -> Vec<Name> {
        // One that vanished can have no name any more, and another may get its number.
        self.namespaces.retain(|netns, _| context.knows_netns(*netns));
        self.known(&context.names(), monotonic_ns(), &wall_time())
    }

    fn known(&mut self, names: &Names, now: u64, time: &str) -> Vec<Name> {
        let oldest = now.saturating_sub(LATEST.as_nanos() as u64);
        self.addresses.retain(|_, since| *since >= oldest);
        let mut known = Vec::new();
        for (netns, holder) in names.holders() {
            let since = self.namespaces.remove(&netns);
            let of_addresses = holder
                .addresses
                .iter()
                .filter_map(|address| self.addresses.remove(address));
            let Some(since_ktime_ns) = of_addresses.chain(since).min() else {
                continue;
            };
            known.push(Name {
                time: time.to_owned(),
                since_ktime_ns,
                netns,
                pod: holder.named.pod.clone(),
                container: holder.named.container.clone(),
                addresses: holder.addresses.clone(),
            });
        }
        known
    }
}

fn remember<K: Ord>(nameless: &mut BTreeMap<K, u64>, key: K, at: u64) {
    if nameless.len() < REMEMBERED {
        nameless.entry(key).or_insert(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::samples;

    const SECOND: u64 = 1_000_000_000;

    fn late(drops: impl IntoIterator<Item = Drop>) -> LateNames {
        let mut late = LateNames::default();
        for drop in drops {
            late.note(&drop);
        }
        late
    }

    #[test]
    fn a_name_is_told_once_for_drops_that_had_none() {
        let drop = samples::accept_queue();
        let (netns, at) = (drop.netns.unwrap(), drop.ktime_ns);
        let names = Names::of_one(netns, "default/web", &["192.0.2.9".parse().unwrap()]);
        let mut late = late([drop]);
        let told = late.known(&names, at + SECOND, "now");
        assert_eq!(told.len(), 1);
        assert_eq!((told[0].netns, told[0].since_ktime_ns), (netns, at));
        assert_eq!(told[0].pod.as_deref(), Some("default/web"));
        assert_eq!(late.known(&names, at + SECOND, "now"), []);
    }

    #[test]
    fn an_address_gets_its_name_for_a_while() {
        let drop = samples::accept_queue();
        let at = drop.ktime_ns;
        let names = Names::of_one(7, "default/db", &[drop.dst.unwrap()]);
        assert_eq!(late([drop.clone()]).known(&names, at + SECOND, "now").len(), 1);
        assert_eq!(late([drop]).known(&names, at + 11 * SECOND, "now"), []);
    }

    #[test]
    fn what_was_told_with_its_name_needs_none() {
        let mut drop = samples::accept_queue();
        let at = drop.ktime_ns;
        drop.pod = Some("default/web".into());
        drop.dst_name.clone_from(&drop.pod);
        let names = Names::of_one(drop.netns.unwrap(), "default/web", &[drop.dst.unwrap()]);
        assert_eq!(late([drop]).known(&names, at, "now"), []);
    }

    #[test]
    fn memory_is_bounded() {
        let drops = (0..100_000).map(|netns| Drop {
            netns: Some(netns),
            ..samples::accept_queue()
        });
        assert_eq!(late(drops).namespaces.len(), REMEMBERED);
    }
}
