//! What the cost grows with, and what not.

use std::{net::UdpSocket, thread, time::Duration};

use anyhow::ensure;
use nix::sys::resource::{Resource, setrlimit};

use super::{
    Figure, PUT_OFF, Results,
    load::{self, Hosts, STORMS},
    process::Process,
    tracer::{Mode, Tracer},
};
use crate::{Netns, Result, sockets};

/// How far each curve goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Points {
    connections: &'static [u64],
    namespaces: &'static [u64],
    sockets: &'static [u64],
    /// Seconds since the start.
    uptime: &'static [u64],
    drops: &'static [u64],
    /// Connections of the load of the other curves than the first.
    load: u64,
    idle: Duration,
}

impl Points {
    pub(super) const FULL: Self = Self {
        connections: &[500, 2_000, 8_000],
        namespaces: &[1, 50, 500],
        sockets: &[100, 1_000, 10_000],
        uptime: &[10, 300],
        drops: &[1_000, 10_000, 100_000],
        load: 500,
        idle: Duration::from_mins(1),
    };
    pub(super) const QUICK: Self = Self {
        connections: &[100, 400],
        namespaces: &[1, 50],
        sockets: &[100, 1_000],
        uptime: &[10, 100],
        drops: &[1_000, 10_000],
        load: 100,
        idle: Duration::from_mins(1),
    };
}

/// How long an idle droptrace is looked at for a point.
const LOOK: Duration = Duration::from_secs(10);
/// Files that may be open: a socket each, and what else there is.
const OPEN_FILES: u64 = 20_000;
/// The first port of those that are open without a load.
const PORTS: u16 = 20_000;

/// How long a port stays in TIME_WAIT (`TCP_TIMEWAIT_LEN`, include/net/tcp.h, 5.10 - 7.3), and a little: connect() goes through
/// those that are taken one by one, and prefers half of them (`__inet_hash_connect`, net/ipv4/inet_hashtables.c).
const PORTS_BACK: Duration = Duration::from_secs(61);

/// A load by its size.
struct Load<'a> {
    name: &'static str,
    size: u64,
    run: &'a dyn Fn(u64) -> Result<Duration>,
}

/// Takes every curve.
pub(super) fn run(points: &Points, results: &mut Results) -> Result<()> {
    setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)?;
    let hosts = Hosts::tracking()?;
    let connections = |number| load::connections(&hosts, number);
    let load = |size| Load {
        name: "connections",
        size,
        run: &connections,
    };
    // Warms up caches and tables.
    connections(points.load)?;
    let with_all_ports = |number| {
        thread::sleep(PORTS_BACK);
        connections(number)
    };
    for &at in points.connections {
        let load = Load {
            run: &with_all_ports,
            ..load(at)
        };
        point("connections", at, &load, results)?;
    }
    over_drops(points, results)?;
    over_sockets(points, &hosts, &load(points.load), results)?;
    over_uptime(points, &load(points.load), results)?;
    over_namespaces(points, &load(points.load), results)
}

fn over_drops(points: &Points, results: &mut Results) -> Result<()> {
    let hosts = Hosts::dropping()?;
    let storm = &STORMS[0];
    let one = storm.prepare(&hosts)?;
    let send = |number| {
        let took = load::send(&one, number)?;
        storm.settled(&hosts)?;
        Ok(took)
    };
    send(points.drops[0])?;
    for &at in points.drops {
        let load = Load {
            name: storm.name,
            size: at,
            run: &send,
        };
        point("drops", at, &load, results)?;
    }
    Ok(())
}

/// UDP sockets that are open on the server and do nothing.
fn over_sockets(points: &Points, hosts: &Hosts, load: &Load<'_>, results: &mut Results) -> Result<()> {
    let mut open: Vec<UdpSocket> = Vec::new();
    for &at in points.sockets {
        while (open.len() as u64) < at {
            let port = PORTS + u16::try_from(open.len())?;
            open.push(sockets::udp(&hosts.server, hosts.server_at(port))?);
        }
        point("sockets", at, load, results)?;
    }
    Ok(())
}

fn over_namespaces(points: &Points, load: &Load<'_>, results: &mut Results) -> Result<()> {
    let mut others = Vec::new();
    for &at in points.namespaces {
        while (others.len() as u64) + 1 < at {
            others.push(Netns::new(&format!("other{}", others.len()))?);
        }
        point("namespaces", at, load, results)?;
    }
    Ok(())
}

/// One droptrace all the time.
fn over_uptime(points: &Points, load: &Load<'_>, results: &mut Results) -> Result<()> {
    thread::sleep(PUT_OFF);
    let without = (load.run)(load.size)?;
    let tracer = Tracer::start(Mode::DEFAULT)?;
    let mut up = Duration::ZERO;
    for &at in points.uptime {
        let rest = Duration::from_secs(at).saturating_sub(up + LOOK);
        thread::sleep(rest);
        with("uptime", at, load, without, &tracer.process, results)?;
        up = Duration::from_secs(at);
    }
    let before = tracer.process.cpu_time()?;
    thread::sleep(points.idle);
    let used = tracer.process.cpu_time()?.saturating_sub(before);
    results.write(&Figure::Idle {
        seconds: points.idle.as_secs_f64(),
        cpu_seconds: used.as_secs_f64(),
    })?;
    tracer.stop().map(drop)
}

/// The load without droptrace and with one of its own.
fn point(curve: &'static str, at: u64, load: &Load<'_>, results: &mut Results) -> Result<()> {
    thread::sleep(PUT_OFF);
    let without = (load.run)(load.size)?;
    let tracer = Tracer::start(Mode::DEFAULT)?;
    with(curve, at, load, without, &tracer.process, results)?;
    tracer.stop().map(drop)
}

fn with(
    curve: &'static str,
    at: u64,
    load: &Load<'_>,
    without: Duration,
    tracer: &Process,
    results: &mut Results,
) -> Result<()> {
    let before = tracer.rest()?;
    thread::sleep(LOOK);
    let idle = tracer.cpu_time()?;
    let took = (load.run)(load.size)?;
    ensure!(!took.is_zero(), "a load that takes no time");
    let after = tracer.rest()?;
    results.write(&Figure::Point {
        curve,
        at,
        load: load.name,
        packets: load.size,
        without_seconds: without.as_secs_f64(),
        with_seconds: took.as_secs_f64(),
        cpu_seconds: after.saturating_sub(idle).as_secs_f64(),
        idle_cpu_seconds: idle.saturating_sub(before).as_secs_f64(),
    })
}
