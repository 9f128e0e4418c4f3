//! `nic-rx-missed`: a network card had no room for frames that it received.

use droptrace_common::Site;

use super::values::{in_netns, on};
use crate::diagnose::{
    Cause, Counter, Facts, Family, Finding, MISSED, Need, Nic, RawEvent, Signature, Verdict,
};

/// A card lost frames before the kernel saw them.
pub(super) static CAUSE: Cause = Cause {
    slug: "nic-rx-missed",
    family: Family::Device,
    title: "network card had no room for received frames",
    mechanism: "A network card writes what it receives into buffers that its driver lays out in a ring for each queue. If the CPU of the queue does not take \
        them out in time, no buffer is free, and the card loses the next frame; or its own memory overflows first. The kernel never sees such a frame: what the card \
        counted, the driver adds to rx_missed_errors, rx_over_errors or rx_fifo_errors of the device (struct rtnl_link_stats64, include/uapi/linux/if_link.h, 5.10 - 7.3). \
        They are read about once a second, of every device that no command made. Drivers do not agree which counter is for what, and some \
        count a frame in two: of those that moved, the one that moved most tells, so that no frame is told twice.",
    evidence: &[
        ("interface", "the network card"),
        (
            "counter",
            "counter of the device that moved most, by as many as there are packets",
        ),
        (
            MISSED[0],
            "what it says since the driver was loaded, when asked just after",
        ),
        (MISSED[1], "the same"),
        (MISSED[2], "the same"),
        ("driver", "driver of the card; null if it does not tell"),
        (
            "ring",
            "frames for which each receive queue has buffers; null if the driver does not tell",
        ),
        (
            "ring_max",
            "as many as it can have; null if the driver does not tell",
        ),
        ("queues", "receive queues; null if the driver does not tell"),
        (
            "squeezed",
            "how often CPUs of the host stopped to take frames out of rings though there were more, since boot (time_squeeze, the third column of /proc/net/softnet_stat)",
        ),
    ],
    remedy: "Give the card a longer ring if the load comes in bursts; else a CPU is too busy: spread the receive queues, or the flows, over more of them.",
    counter: Some(Counter {
        name: "rx_missed_errors, rx_over_errors or rx_fifo_errors of the device (ip -s -s link)",
    }),
    benign: false,
    needs: &[Need::Nic],
    matches: |signature| signature.site == Site::Counter && signature.because(&MISSED),
    verdict: |_: &Signature<'_>| Verdict::Dropped,
    find,
    refine: None,
};

fn find(event: &RawEvent, facts: &Facts) -> Finding {
    let mut found = Finding::default();
    let interface = on(event, facts);
    let nic = facts.nic.as_ref();
    found
        .put("interface", interface)
        .put("counter", facts.reason.as_deref());
    for (place, name) in MISSED.into_iter().enumerate() {
        found.put(name, nic.map(|nic| nic.missed[place]));
    }
    found
        .put("driver", nic.and_then(|nic| nic.driver.as_deref()))
        .put("ring", nic.and_then(|nic| nic.ring))
        .put("ring_max", nic.and_then(|nic| nic.ring_max))
        .put("queues", nic.and_then(|nic| nic.queues))
        .put("squeezed", nic.and_then(|nic| nic.squeezed));
    if let Some(interface) = interface {
        advise(&mut found, facts, interface, nic);
    }
    found
}

fn advise(found: &mut Finding, facts: &Facts, interface: &str, nic: Option<&Nic>) {
    let here = |command: &str| Some(in_netns(facts, None, command));
    let ring = nic.and_then(|nic| nic.ring.zip(nic.ring_max));
    match ring {
        Some((ring, most)) if ring < most => {
            found.advise(
                format!("Let {interface} have buffers for more frames: {ring} now, {most} at most."),
                here(&format!("ethtool -G {interface} rx {}", (2 * ring).min(most))),
                "Many drivers take the card down and up again for it, which loses frames for a moment. A longer ring takes more memory, and what waits longer comes later.",
            );
        }
        Some((ring, _)) => {
            found.advise(
                format!("The ring of {interface} is as long as it can be ({ring} frames): a longer one is no way out."),
                here(&format!("ethtool -g {interface}")),
                "Reads only.",
            );
        }
        None => {}
    }
    found.advise(
        "See whether one CPU takes all that the card receives: its interrupts, and the CPUs that ran out of time (a line each, the third column).",
        here(&format!(
            "sh -c \"grep -e CPU0 -e {interface} /proc/interrupts; cat /proc/net/softnet_stat; ethtool -l {interface}\""
        )),
        "Reads only. Some drivers name their interrupts after themselves or the bus. If one CPU has it all: use more queues (`ethtool -L`), spread their interrupts (irqbalance), or, with one queue, hand flows to other CPUs (RPS).",
    );
}

#[cfg(test)]
pub(super) mod tests {
    use droptrace_common::Site;

    use crate::diagnose::{
        FoundBy, MISSED, Nic,
        causes::sample::{Kernel, Sample, V6_12},
    };

    fn nic(ring: u32) -> Nic {
        Nic {
            missed: [900, 0, 900],
            driver: Some("igb".to_owned()),
            ring: Some(ring),
            ring_max: Some(4096),
            queues: Some(4),
            squeezed: Some(17),
        }
    }

    fn at(kernel: Kernel, counter: &str) -> Sample {
        Sample::hook(kernel, Site::Counter)
            .counter(counter)
            .on("eth0")
            .fact(|facts| facts.netns_name = Some("host".to_owned()))
    }

    pub(in super::super) fn samples() -> Vec<Sample> {
        Kernel::ALL
            .into_iter()
            .flat_map(|kernel| {
                MISSED.map(|counter| at(kernel, counter).fact(|facts| facts.nic = Some(nic(256))))
            })
            .collect()
    }

    #[test]
    fn the_ring_is_made_longer_as_far_as_it_goes() {
        let command = |ring| {
            let drop = at(V6_12, MISSED[0])
                .fact(|facts| facts.nic = Some(nic(ring)))
                .label();
            drop.remedy[0].command.clone()
        };
        assert_eq!(command(256).as_deref(), Some("ethtool -G eth0 rx 512"));
        assert_eq!(command(3000).as_deref(), Some("ethtool -G eth0 rx 4096"));
        assert_eq!(command(4096).as_deref(), Some("ethtool -g eth0"));
    }

    #[test]
    fn the_counter_that_moved_stands_beside_all() {
        for counter in MISSED {
            let drop = at(V6_12, counter)
                .fact(|facts| facts.nic = Some(nic(256)))
                .label();
            assert_eq!(drop.found_by, FoundBy::Counter);
            assert_eq!(drop.evidence["counter"], counter);
            assert_eq!(drop.evidence["rx_missed_errors"], 900);
            assert_eq!(drop.evidence["rx_over_errors"], 0);
            assert_eq!(drop.interface.as_deref(), Some("eth0"));
        }
        let untold = at(V6_12, MISSED[0]).label();
        assert!(untold.evidence["ring"].is_null() && untold.evidence["driver"].is_null());
        assert_eq!(untold.remedy.len(), 1);
    }
}
