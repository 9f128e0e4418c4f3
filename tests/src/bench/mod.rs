//! What droptrace costs, and what it delivers: figures for `cargo xtask bench`.
//!
//! Nothing here judges: a figure that is not what it should be is written down all the same.

mod curves;
mod load;
mod peers;
mod process;
mod tracer;

use std::{
    collections::BTreeSet,
    fs::File,
    io::Write,
    net::{Ipv4Addr, UdpSocket},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::ValueEnum;
use droptrace::diagnose::Counts;
use serde::Serialize;

use self::{
    load::{CLOSED, Hosts, STORMS, Services, Storm},
    peers::{PEERS, Peer},
    process::Process,
    tracer::{Mode, Tracer},
};
use crate::{Netns, Result, cost::Cost, netns::modprobe, sockets};

/// A part of the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// The same work without and with droptrace, in turn.
    Ratios,
    /// What each BPF program costs in the same work, by the kernel's own measure.
    Cost,
    /// From the start to the first labelled drop, and from the last line to the prompt.
    Start,
    /// Storms with droptrace: what is counted and delivered.
    Storms,
    /// A rare drop in a storm of another cause.
    Needle,
    /// Resident memory in a long storm.
    Memory,
    /// What grows with what; and what an idle droptrace uses.
    Curves,
    /// Other tracers: the same work, what their BPF programs cost, their start.
    Peers,
    /// Other tracers: what they tell of a storm.
    PeerStorms,
}

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Measurements without droptrace, and as many with it.
    rounds: u32,
    connections: u64,
    datagrams: u64,
    /// Dropped packets of a storm.
    drops: u64,
    /// Numbers of network namespaces for each start; the very first one is that of a host on which nothing was traced before.
    namespaces: &'static [usize],
    /// Rare drops, one a second.
    needles: u16,
    /// Drops of the long storm.
    many: u64,
    /// Points of each curve.
    curves: curves::Points,
}

impl Size {
    /// What is published.
    pub const FULL: Self = Self {
        // Counted time: a third one agrees with these within 1 %.
        rounds: 2,
        connections: 2_000,
        datagrams: 20_000,
        drops: 100_000,
        namespaces: &[1, 1, 50, 500],
        needles: 20,
        many: 1_000_000,
        curves: curves::Points::FULL,
    };
    /// For a look in between.
    pub const QUICK: Self = Self {
        rounds: 2,
        connections: 500,
        datagrams: 4_000,
        drops: 20_000,
        namespaces: &[1, 1, 50],
        needles: 5,
        many: 100_000,
        curves: curves::Points::QUICK,
    };
}

/// One line of the results.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
enum Figure {
    /// Work that was done once.
    Sample {
        load: &'static str,
        packets: u64,
        seconds: f64,
        /// What watched meanwhile.
        tracer: Option<&'static str>,
        /// CPU time that it used itself for it, until it had nothing left to do.
        cpu_seconds: f64,
    },
    /// What came of a storm with droptrace.
    Storm {
        tracer: &'static str,
        load: &'static str,
        packets: u64,
        /// By the kernel's own counter.
        dropped: u64,
        /// By droptrace, of the storm's cause.
        counted: u64,
        /// With a line of their own.
        events: u64,
        /// Said to have no line.
        lost: u64,
        /// Drops in no total.
        uncounted: u64,
        cpu_seconds: f64,
        resident_kib: u64,
    },
    /// What one BPF program did.
    Program {
        tracer: &'static str,
        load: &'static str,
        packets: u64,
        name: String,
        calls: u64,
        nanoseconds: u64,
    },
    /// A start and an end.
    Start {
        tracer: &'static str,
        namespaces: usize,
        first_drop_seconds: f64,
        signal_to_prompt_seconds: f64,
        /// Only of droptrace, whose last line is not told by its start.
        line_to_prompt_seconds: Option<f64>,
    },
    /// A rare drop in a storm.
    Needle {
        needles: u64,
        /// With a line of their own.
        events: u64,
        storm: u64,
        /// Of the storm's packets, by the kernel and by droptrace.
        dropped: u64,
        counted: u64,
    },
    /// Memory so far.
    Memory { drops: u64, resident_kib: u64 },
    /// The same load under one condition, without droptrace and with it.
    Point {
        curve: &'static str,
        /// How much there is of what the curve is over.
        at: u64,
        load: &'static str,
        packets: u64,
        without_seconds: f64,
        with_seconds: f64,
        /// CPU time of droptrace for it.
        cpu_seconds: f64,
        /// CPU time of droptrace in ten seconds in which nothing happens.
        idle_cpu_seconds: f64,
    },
    /// CPU time of droptrace while nothing happens.
    Idle { seconds: f64, cpu_seconds: f64 },
    /// What the BPF programs take for one drop, by the kernel's own measure.
    PerDrop {
        /// Drops of which all should have a line, and how many have.
        few: u64,
        few_events: u64,
        /// Drops of which most have none, and how many have one.
        many: u64,
        many_events: u64,
        /// With a line.
        full_nanoseconds: f64,
        /// Without; where there are such.
        counted_nanoseconds: Option<f64>,
    },
    /// What another tracer told of a storm.
    Told {
        tracer: &'static str,
        load: &'static str,
        /// By the kernel's own counter.
        dropped: u64,
        /// That it told.
        drops: u64,
        resident_kib: u64,
    },
    /// What could not be measured of a tracer.
    Cannot {
        tracer: &'static str,
        what: &'static str,
        why: String,
    },
}

/// Where figures go.
struct Results(File);

impl Results {
    fn write(&mut self, figure: &Figure) -> Result<()> {
        let line = serde_json::to_string(figure)?;
        println!("{line}");
        writeln!(self.0, "{line}").context("cannot write a figure")
    }

    fn cannot(&mut self, peer: Peer, what: &'static str, error: &anyhow::Error) -> Result<()> {
        self.write(&Figure::Cannot {
            tracer: peer.name,
            what,
            why: format!("{error:#}"),
        })
    }
}

/// Takes these parts, one after the other.
///
/// # Errors
/// When something cannot be set up or droptrace fails; figures so far are written by then.
pub fn run(parts: &[Part], size: &Size, results: &Path) -> Result<()> {
    let file = File::create(results)
        .with_context(|| format!("cannot write the results to {}", results.display()))?;
    let mut results = Results(file);
    for module in ["nf_conntrack", "udp_diag", "tcp_diag"] {
        modprobe(module)?;
    }
    for part in parts {
        match part {
            Part::Ratios => ratios(size, &mut results),
            Part::Cost => cost(size, &mut results),
            Part::Start => start(size, &mut results),
            Part::Storms => storms(size, &mut results),
            Part::Needle => needle(size, &mut results),
            Part::Memory => memory(size, &mut results),
            Part::Curves => curves::run(&size.curves, &mut results),
            Part::Peers => peers(size, &mut results),
            Part::PeerStorms => peer_storms(size, &mut results),
        }
        .with_context(|| format!("bench {part:?}"))?;
    }
    Ok(())
}

/// Work during which nothing is dropped.
struct Clean {
    name: &'static str,
    run: fn(&Place, u64) -> Result<Duration>,
    packets: fn(&Size) -> u64,
}

const CLEAN: &[Clean] = &[
    Clean {
        name: "connections",
        run: |place, number| load::connections(&place.tracking, number),
        packets: |size| size.connections,
    },
    Clean {
        name: "datagrams",
        run: |place, number| load::stream(&place.tracking, number),
        packets: |size| size.datagrams,
    },
    Clean {
        name: "connections to a service of IPVS",
        run: |place, number| place.services.to_service(number),
        packets: |size| size.connections,
    },
    Clean {
        name: "connections past IPVS",
        run: |place, number| place.services.past(number),
        packets: |size| size.connections,
    },
];

/// The hosts of all loads.
struct Place {
    tracking: Hosts,
    services: Services,
    dropping: Hosts,
}

impl Place {
    fn new() -> Result<Self> {
        Ok(Self {
            tracking: Hosts::tracking()?,
            services: Services::new()?,
            dropping: Hosts::dropping()?,
        })
    }
}

/// The kernel puts off some of the work that the end of a run leaves, such as freeing its maps and programs; it is done by
/// then.
const PUT_OFF: Duration = Duration::from_secs(10);

/// Every load, without and with droptrace in turn, in one boot; storms once with a line for every drop. A first round, which
/// warms up caches and tables, is not written down.
fn ratios(size: &Size, results: &mut Results) -> Result<()> {
    let place = Place::new()?;
    for ready in loads(&place, size) {
        ready?.take(None)?;
    }
    let every_drop = every_drop(results)?;
    for round in 0..size.rounds {
        thread::sleep(PUT_OFF);
        for ready in loads(&place, size) {
            ready?.sample(None, results)?;
        }
        thread::sleep(PUT_OFF);
        let tracer = Tracer::start(Mode::DEFAULT)?;
        for ready in loads(&place, size) {
            ready?.sample(Some(&tracer.process), results)?;
        }
        tracer.stop()?;
        if let Some(mode) = every_drop
            && round == 0
        {
            thread::sleep(PUT_OFF);
            let tracer = Tracer::start(mode)?;
            for storm in STORMS {
                storm_load(storm, &place, size)?.sample(Some(&tracer.process), results)?;
            }
            tracer.stop()?;
        }
    }
    Ok(())
}

/// The mode with a line for every drop; it is told where this droptrace has none.
fn every_drop(results: &mut Results) -> Result<Option<Mode>> {
    let mode = Mode::EVERY_DROP;
    if mode.exists()? {
        return Ok(Some(mode));
    }
    results.write(&Figure::Cannot {
        tracer: mode.name,
        what: "everything",
        why: "this droptrace has no such option".to_owned(),
    })?;
    Ok(None)
}

/// A load of which everything but itself is done.
struct Ready<'a> {
    load: &'static str,
    packets: u64,
    /// Gives how long its sender takes.
    run: Box<dyn Fn() -> Result<Duration> + 'a>,
}

/// A load that was done.
struct Done {
    load: &'static str,
    packets: u64,
    took: Duration,
    /// Of what watches.
    cpu: Duration,
}

impl Ready<'_> {
    /// Does it, from when what watches has nothing left to do until it has again.
    fn take(&self, tracer: Option<&Process>) -> Result<Done> {
        let rest = || tracer.map_or(Ok(Duration::ZERO), Process::rest);
        let before = rest()?;
        let took = (self.run)()?;
        Ok(Done {
            load: self.load,
            packets: self.packets,
            took,
            cpu: rest()?.saturating_sub(before),
        })
    }

    /// The same, written down.
    fn sample(&self, tracer: Option<&Process>, results: &mut Results) -> Result<()> {
        let done = self.take(tracer)?;
        results.write(&Figure::Sample {
            load: done.load,
            packets: done.packets,
            seconds: done.took.as_secs_f64(),
            tracer: tracer.map(|process| process.name),
            cpu_seconds: done.cpu.as_secs_f64(),
        })
    }
}

/// All loads; each is made ready when it is asked for.
fn loads<'a>(place: &'a Place, size: &'a Size) -> impl Iterator<Item = Result<Ready<'a>>> {
    let clean = CLEAN.iter().map(|clean| clean_load(clean, place, size));
    clean.chain(STORMS.iter().map(|storm| storm_load(storm, place, size)))
}

fn clean_load<'a>(clean: &'a Clean, place: &'a Place, size: &Size) -> Result<Ready<'a>> {
    let packets = (clean.packets)(size);
    // What has to be done once in a while, such as asking for a neighbour's address, is done by then.
    (clean.run)(place, packets / 10)?;
    Ok(Ready {
        load: clean.name,
        packets,
        run: Box::new(move || (clean.run)(place, packets)),
    })
}

fn storm_load<'a>(storm: &'a Storm, place: &'a Place, size: &Size) -> Result<Ready<'a>> {
    let packets = size.drops;
    let one = storm.prepare(&place.dropping)?;
    Ok(Ready {
        load: storm.name,
        packets,
        run: Box::new(move || {
            let took = load::send(&one, packets)?;
            storm.settled(&place.dropping)?;
            Ok(took)
        }),
    })
}

/// One round while the kernel measures its BPF programs, which itself makes each call slower.
fn cost(size: &Size, results: &mut Results) -> Result<()> {
    let place = Place::new()?;
    let mut tracer = Tracer::start(Mode::DEFAULT)?;
    for ready in loads(&place, size) {
        cost_of(&ready?, &tracer.process, results)?;
    }
    results.write(&per_drop(&place, size, &mut tracer)?)?;
    tracer.stop()?;
    if let Some(mode) = Mode::EVERY_DROP.exists()?.then_some(Mode::EVERY_DROP) {
        let tracer = Tracer::start(mode)?;
        cost_of(&storm_load(&STORMS[0], &place, size)?, &tracer.process, results)?;
        tracer.stop()?;
    }
    Ok(())
}

fn cost_of(ready: &Ready<'_>, tracer: &Process, results: &mut Results) -> Result<()> {
    tracer.rest()?;
    let cost = Cost::start()?;
    let done = ready.take(Some(tracer))?;
    for ran in cost.programs()? {
        results.write(&Figure::Program {
            tracer: tracer.name,
            load: done.load,
            packets: done.packets,
            name: ran.name,
            calls: ran.calls,
            nanoseconds: u64::try_from(ran.time.as_nanos())?,
        })?;
    }
    Ok(())
}

/// Drops that all have a line of their own, since fewer come at once than do in a flood.
const FEW: u64 = 1_000;

/// What the programs take for a drop with a line, and for one that is only counted.
fn per_drop(place: &Place, size: &Size, tracer: &mut Tracer) -> Result<Figure> {
    let storm = &STORMS[0];
    let one = storm.prepare(&place.dropping)?;
    let mut took = |packets| -> Result<(Duration, u64)> {
        thread::sleep(PUT_OFF);
        tracer.counts()?;
        let before = tracer.events(storm.cause);
        let cost = Cost::start()?;
        load::send(&one, packets)?;
        storm.settled(&place.dropping)?;
        let time = cost.programs()?.iter().map(|ran| ran.time).sum();
        drop(cost);
        tracer.counts()?;
        Ok((time, tracer.events(storm.cause) - before))
    };
    let (few, few_events) = took(FEW)?;
    let (many, many_events) = took(size.drops)?;
    let full = few.as_secs_f64() / few_events as f64;
    let only_counted = size.drops.saturating_sub(many_events);
    Ok(Figure::PerDrop {
        few: FEW,
        few_events,
        many: size.drops,
        many_events,
        full_nanoseconds: full * 1e9,
        counted_nanoseconds: (only_counted > 0)
            .then(|| (many.as_secs_f64() - full * many_events as f64) / only_counted as f64 * 1e9),
    })
}

/// Loads that other tracers are measured with.
fn loads_of_peers<'a>(place: &'a Place, size: &Size) -> Result<[Ready<'a>; 3]> {
    Ok([
        clean_load(&CLEAN[0], place, size)?,
        clean_load(&CLEAN[1], place, size)?,
        storm_load(&STORMS[0], place, size)?,
    ])
}

/// Each other tracer in turn; what one cannot is written down.
fn peers(size: &Size, results: &mut Results) -> Result<()> {
    peers::prepare()?;
    let place = Place::new()?;
    for ready in loads_of_peers(&place, size)? {
        ready.take(None)?;
    }
    thread::sleep(PUT_OFF);
    for ready in loads_of_peers(&place, size)? {
        ready.sample(None, results)?;
    }
    for &peer in PEERS {
        thread::sleep(PUT_OFF);
        if let Err(error) = peer_start(peer, results) {
            results.cannot(peer, "start", &error)?;
            continue;
        }
        thread::sleep(PUT_OFF);
        if let Err(error) = peer_ratios(peer, &place, size, results) {
            results.cannot(peer, "load", &error)?;
        }
    }
    Ok(())
}

fn peer_start(peer: Peer, results: &mut Results) -> Result<()> {
    let (first_drop, after_signal) = peer.first_drop(EVERY)?;
    results.write(&Figure::Start {
        tracer: peer.name,
        namespaces: 1,
        first_drop_seconds: first_drop.as_secs_f64(),
        signal_to_prompt_seconds: after_signal.as_secs_f64(),
        line_to_prompt_seconds: None,
    })
}

fn peer_ratios(peer: Peer, place: &Place, size: &Size, results: &mut Results) -> Result<()> {
    let running = peer.start()?;
    for ready in loads_of_peers(place, size)? {
        ready.sample(Some(&running.process), results)?;
    }
    for ready in loads_of_peers(place, size)? {
        cost_of(&ready, &running.process, results)?;
    }
    running.stop().map(drop)
}

/// One storm with each other tracer.
fn peer_storms(size: &Size, results: &mut Results) -> Result<()> {
    peers::prepare()?;
    let hosts = Hosts::dropping()?;
    let storm = &STORMS[0];
    for &peer in PEERS {
        let told = peer_storm(peer, &hosts, storm, size.drops);
        match told {
            Ok(figure) => results.write(&figure)?,
            Err(error) => results.cannot(peer, "storm on two CPUs", &error)?,
        }
    }
    Ok(())
}

fn peer_storm(peer: Peer, hosts: &Hosts, storm: &Storm, packets: u64) -> Result<Figure> {
    let running = peer.start()?;
    let one = storm.prepare(hosts)?;
    let before = storm.settled(hosts)?;
    load::send(&one, packets)?;
    let dropped = storm.settled(hosts)? - before;
    running.process.rest()?;
    let resident_kib = running.process.resident()?;
    Ok(Figure::Told {
        tracer: peer.name,
        load: storm.name,
        dropped,
        drops: running.stop()?.drops,
        resident_kib,
    })
}

/// Packets of a cause in a netns.
fn counted(counts: &Counts, netns: &Netns, cause: &str) -> u64 {
    counts
        .causes
        .iter()
        .filter(|count| count.netns == netns.inode() && count.cause == cause)
        .map(|count| count.packets)
        .sum()
}

/// Every storm with one droptrace over all of them, in each mode.
fn storms(size: &Size, results: &mut Results) -> Result<()> {
    let hosts = Hosts::dropping()?;
    let modes = [Some(Mode::DEFAULT), every_drop(results)?];
    for mode in modes.into_iter().flatten() {
        let mut tracer = Tracer::start(mode)?;
        for storm in STORMS {
            results.write(&one_storm(&hosts, storm, size.drops, &mut tracer)?)?;
        }
        tracer.stop()?;
    }
    Ok(())
}

fn one_storm(hosts: &Hosts, storm: &Storm, packets: u64, tracer: &mut Tracer) -> Result<Figure> {
    let one = storm.prepare(hosts)?;
    let dropped_before = storm.settled(hosts)?;
    let before = tracer.counts()?;
    let (events_before, cpu_before) = (tracer.events(storm.cause), tracer.process.cpu_time()?);
    load::send(&one, packets)?;
    let dropped = storm.settled(hosts)? - dropped_before;
    let after = tracer.counts()?;
    let lost = |counts: &Counts| counts.lost.get(storm.cause).copied().unwrap_or(0);
    let total = |counts| counted(counts, &hosts.server, storm.cause);
    Ok(Figure::Storm {
        tracer: tracer.process.name,
        load: storm.name,
        packets,
        dropped,
        counted: total(&after) - total(&before),
        events: tracer.events(storm.cause) - events_before,
        lost: lost(&after) - lost(&before),
        uncounted: after.uncounted - before.uncounted,
        cpu_seconds: tracer
            .process
            .cpu_time()?
            .saturating_sub(cpu_before)
            .as_secs_f64(),
        resident_kib: tracer.process.resident()?,
    })
}

/// Starts droptrace with more and more network namespaces.
fn start(size: &Size, results: &mut Results) -> Result<()> {
    let mut others = Vec::new();
    for &namespaces in size.namespaces {
        // Beside the initial one.
        while others.len() + 1 < namespaces {
            others.push(Netns::new(&format!("other{}", others.len()))?);
        }
        results.write(&one_start(namespaces)?)?;
    }
    Ok(())
}

/// Time between the drops of which the first one with a label is waited for, beside that between two looks.
const EVERY: Duration = Duration::from_millis(5);

/// One start while packets to a closed port of the loopback device are dropped all the time.
fn one_start(namespaces: usize) -> Result<Figure> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let started = Instant::now();
    let mut tracer = Tracer::spawn(Mode::DEFAULT)?;
    let mut sent = Ok(0);
    tracer.wait_for("a labelled drop", |tracer| {
        sent = socket.send_to(b"closed", (Ipv4Addr::LOCALHOST, CLOSED));
        thread::sleep(EVERY);
        sent.is_err() || tracer.events("no-socket") > 0
    })?;
    sent?;
    let first_drop = started.elapsed();
    let end = tracer.stop()?;
    Ok(Figure::Start {
        tracer: Mode::DEFAULT.name,
        namespaces,
        first_drop_seconds: first_drop.as_secs_f64(),
        signal_to_prompt_seconds: end.after_signal.as_secs_f64(),
        line_to_prompt_seconds: Some(end.after_line.as_secs_f64()),
    })
}

/// A storm from one thread, and once a second one packet to a closed port, each from a port of its own.
fn needle(size: &Size, results: &mut Results) -> Result<()> {
    let hosts = Hosts::dropping()?;
    let mut tracer = Tracer::start(Mode::DEFAULT)?;
    let storm = &STORMS[0];
    let dropped_before = storm.settled(&hosts)?;
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let needles = thread::scope(|scope| -> Result<BTreeSet<u16>> {
        let flood = scope.spawn(|| flood(&hosts, storm, &stop, &sent));
        let needles = (0..size.needles)
            .map(|_| {
                thread::sleep(Duration::from_secs(1));
                rare_drop(&hosts)
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        flood
            .join()
            .map_err(|_| anyhow::anyhow!("the flood panicked"))??;
        needles
    })?;
    let dropped = storm.settled(&hosts)? - dropped_before;
    let counts = tracer.counts()?;
    let seen = tracer.ports("no-socket");
    results.write(&Figure::Needle {
        needles: needles.len() as u64,
        events: needles.intersection(&seen).count() as u64,
        storm: sent.into_inner(),
        dropped,
        counted: counted(&counts, &hosts.server, storm.cause),
    })?;
    tracer.stop().map(drop)
}

fn flood(hosts: &Hosts, storm: &Storm, stop: &AtomicBool, sent: &AtomicU64) -> Result<()> {
    let one = storm.prepare(hosts)?;
    while !stop.load(Ordering::Relaxed) {
        one()?;
        sent.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Sends a packet to a closed port, and gives its source port.
fn rare_drop(hosts: &Hosts) -> Result<u16> {
    let socket: UdpSocket = sockets::udp(&hosts.client, ([0, 0, 0, 0], 0).into())?;
    socket.send_to(b"needle", hosts.server_at(CLOSED))?;
    Ok(socket.local_addr()?.port())
}

/// Readings of resident memory in the long storm.
const READINGS: u64 = 5;

/// A long storm, with resident memory before, during and after.
fn memory(size: &Size, results: &mut Results) -> Result<()> {
    let hosts = Hosts::dropping()?;
    let mut tracer = Tracer::start(Mode::DEFAULT)?;
    let storm = &STORMS[0];
    let one = storm.prepare(&hosts)?;
    for reading in 0..=READINGS {
        if reading > 0 {
            load::send(&one, size.many / READINGS)?;
        }
        let drops = counted(&tracer.counts()?, &hosts.server, storm.cause);
        results.write(&Figure::Memory {
            drops,
            resident_kib: tracer.process.resident()?,
        })?;
    }
    tracer.stop().map(drop)
}
