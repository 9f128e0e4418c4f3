//! Which records reach a sink.

use std::{io, net::IpAddr};

use super::{Origin, Sink};
use crate::diagnose::{Brief, Counts, Drop, PodPattern, Record, Summary};

/// Which drops are wanted. An empty list or `None` asks nothing; what is asked must hold all together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Benign drops, too.
    pub benign: bool,
    /// Slugs.
    pub causes: Vec<String>,
    /// Source or destination.
    pub addresses: Vec<IpAddr>,
    /// Source or destination.
    pub port: Option<u16>,
    /// As [`Drop::protocol`] names it.
    pub protocol: Option<String>,
    /// Names or inode numbers.
    pub netns: Vec<String>,
    /// Pods; they and `containers` add to `netns`.
    pub pods: Vec<PodPattern>,
    /// Containers.
    pub containers: Vec<String>,
}

/// What is asked of a drop.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    benign: bool,
    cause: &'a str,
    src: Option<IpAddr>,
    dst: Option<IpAddr>,
    sport: Option<u16>,
    dport: Option<u16>,
    protocol: Option<&'a str>,
    netns: Option<u32>,
    netns_name: Option<&'a str>,
    pod: Option<&'a str>,
    container: Option<&'a str>,
    src_name: Option<&'a str>,
    dst_name: Option<&'a str>,
}

/// A drop in full or in short.
macro_rules! asked_of {
    ($($drop:ty: |$named:ident| $names:expr;)*) => {$(
        impl<'a> From<&'a $drop> for Asked<'a> {
            fn from(drop: &'a $drop) -> Self {
                let $named = drop;
                let [src_name, dst_name] = $names;
                Self {
                    benign: drop.benign,
                    cause: &drop.cause,
                    src: drop.src,
                    dst: drop.dst,
                    sport: drop.sport,
                    dport: drop.dport,
                    protocol: drop.protocol.as_deref(),
                    netns: drop.netns,
                    netns_name: drop.netns_name.as_deref(),
                    pod: drop.pod.as_deref(),
                    container: drop.container.as_deref(),
                    src_name,
                    dst_name,
                }
            }
        }
    )*};
}

asked_of! {
    Drop: |drop| [drop.src_name.as_deref(), drop.dst_name.as_deref()];
    Brief: |_drop| [None; 2];
}

impl Selection {
    /// Whether this drop is wanted.
    pub fn wants<'a>(&self, drop: impl Into<Asked<'a>>) -> bool {
        let drop = drop.into();
        let address = |address: &IpAddr| drop.src == Some(*address) || drop.dst == Some(*address);
        let netns = |netns: &String| {
            drop.netns_name == Some(netns) || drop.netns.is_some_and(|inode| inode.to_string() == *netns)
        };
        (self.benign || !drop.benign)
            && (self.causes.is_empty() || self.causes.iter().any(|cause| cause == drop.cause))
            && (self.addresses.is_empty() || self.addresses.iter().any(address))
            && self
                .port
                .is_none_or(|port| drop.sport == Some(port) || drop.dport == Some(port))
            && (self.protocol.is_none() || self.protocol.as_deref() == drop.protocol)
            && (self.netns.is_empty() && self.pods.is_empty() && self.containers.is_empty()
                || self.netns.iter().any(netns)
                || self.wants_holder(drop))
    }

    /// Whether a pod or container that was asked for has the netns or an address.
    fn wants_holder(&self, drop: Asked<'_>) -> bool {
        let mut pods = [drop.pod, drop.src_name, drop.dst_name].into_iter().flatten();
        let mut containers = [drop.container, drop.src_name, drop.dst_name]
            .into_iter()
            .flatten();
        pods.any(|name| self.pods.iter().any(|pattern| pattern.matches_full_name(name)))
            || containers.any(|name| self.containers.iter().any(|container| container == name))
    }

    /// What was asked for, in words; empty where everything is wanted.
    pub fn words(&self) -> String {
        let pods = self.pods.iter().map(|pod| format!("pod {pod}"));
        let containers = self.containers.iter().map(|name| format!("container {name}"));
        let netns = self.netns.iter().map(|netns| format!("netns {netns}"));
        let mut parts: Vec<String> = pods.chain(containers).chain(netns).collect();
        parts.extend(self.addresses.iter().map(|address| format!("address {address}")));
        parts.extend(self.port.map(|port| format!("port {port}")));
        parts.extend(
            self.protocol
                .iter()
                .map(|protocol| format!("protocol {protocol}")),
        );
        parts.extend(self.causes.iter().map(|cause| format!("cause {cause}")));
        parts.join(", ")
    }

    /// Takes out of totals what is not wanted; drops pass as they are.
    fn narrow(&self, record: Record) -> Record {
        match record {
            Record::Counts(counts) => Record::Counts(self.counts(counts)),
            Record::Summary(summary) => Record::Summary(Summary {
                counts: self.counts(summary.counts),
                ..summary
            }),
            other => other,
        }
    }

    /// The totals of the wanted causes. Exact totals are made by cause and netns only, hence no other wish narrows them.
    fn counts(&self, mut counts: Counts) -> Counts {
        if !self.causes.is_empty() {
            counts.causes.retain(|total| self.causes.contains(&total.cause));
            counts.lost.retain(|cause, _| self.causes.contains(cause));
        }
        counts
    }
}

/// Passes on what the selection wants.
pub struct Selected<S> {
    selection: Selection,
    sink: S,
}

impl<S: Sink> Selected<S> {
    /// Before `sink`.
    pub fn new(selection: Selection, sink: S) -> Self {
        Self { selection, sink }
    }
}

impl<S: Sink> Sink for Selected<S> {
    fn record(&mut self, record: &Record, origin: Option<Origin<'_>>) -> io::Result<()> {
        match record {
            Record::Brief(brief) if !self.selection.wants(&**brief) => Ok(()),
            Record::Drop(drop) if !self.selection.wants(&**drop) => {
                self.sink.hidden(record);
                Ok(())
            }
            Record::Counts(_) | Record::Summary(_) if !self.selection.causes.is_empty() => {
                self.sink.record(&self.selection.narrow(record.clone()), None)
            }
            _ => self.sink.record(record, origin),
        }
    }

    fn hidden(&mut self, record: &Record) {
        self.sink.hidden(record);
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }

    fn tick(&mut self) -> io::Result<()> {
        self.sink.tick()
    }

    fn finish(&mut self) -> io::Result<()> {
        self.sink.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::samples;

    fn wants(change: impl FnOnce(&mut Selection)) -> bool {
        let mut selection = Selection::default();
        change(&mut selection);
        selection.wants(&samples::accept_queue())
    }

    #[test]
    fn each_wish_is_asked() {
        assert!(wants(|_| ()));
        assert!(wants(|wish| wish.causes = vec!["accept-queue-full".into()]));
        assert!(!wants(|wish| wish.causes = vec!["unknown".into()]));
        assert!(wants(|wish| wish.addresses = vec!["10.0.0.2".parse().unwrap()]));
        assert!(!wants(|wish| wish.addresses = vec!["10.0.0.3".parse().unwrap()]));
        assert!(wants(|wish| wish.port = Some(80)));
        assert!(!wants(|wish| wish.port = Some(81)));
        assert!(wants(|wish| wish.protocol = Some("tcp".into())));
        assert!(!wants(|wish| wish.protocol = Some("udp".into())));
        assert!(wants(|wish| wish.netns = vec!["web".into()]));
        assert!(wants(|wish| wish.netns = vec!["4026532000".into()]));
        assert!(!wants(|wish| wish.netns = vec!["4026531840".into()]));
    }

    #[test]
    fn pods_and_containers_are_found_inside_and_by_address() {
        let mut inside = samples::accept_queue();
        inside.pod = Some("default/web".into());
        inside.container = Some("nginx".into());
        let mut outside = samples::accept_queue();
        outside.dst_name = Some("default/web".into());
        let mut of_docker = samples::accept_queue();
        of_docker.src_name = Some("redis".into());
        let pod = |text: &str| Selection {
            pods: vec![text.parse().unwrap()],
            ..Selection::default()
        };
        let container = |name: &str| Selection {
            containers: vec![name.into()],
            ..Selection::default()
        };
        for (selection, wanted) in [
            (pod("default/web"), [true, true, false]),
            (pod("default/w*"), [true, true, false]),
            (pod("other/web"), [false, false, false]),
            (container("nginx"), [true, false, false]),
            (container("redis"), [false, false, true]),
        ] {
            let found = [&inside, &outside, &of_docker].map(|drop| selection.wants(drop));
            assert_eq!(found, wanted, "{}", selection.words());
        }
        let either = Selection {
            netns: vec!["web".into()],
            ..pod("default/db")
        };
        assert!(either.wants(&inside), "what names a netns adds up");
    }

    #[test]
    fn benign_drops_need_asking_for() {
        let drop = samples::benign();
        assert!(!Selection::default().wants(&drop));
        assert!(
            Selection {
                benign: true,
                ..Selection::default()
            }
            .wants(&drop)
        );
    }

    #[test]
    fn totals_follow_the_causes() {
        let selection = Selection {
            causes: vec!["unknown".into()],
            ..Selection::default()
        };
        assert!(selection.counts(samples::counts()).causes.is_empty());
        assert_eq!(Selection::default().counts(samples::counts()), samples::counts());
    }
}
