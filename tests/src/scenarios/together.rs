//! Many causes at once, one in a flood of another, and none at all.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream, UdpSocket},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use droptrace::diagnose::Counts;

use super::{Wire, clean};
use crate::{
    Expected,
    IpFamily::V4,
    Netns, Outcome, Result, Scenario, Test, Tun,
    netns::run,
    packet::{Client, Segment, udp, udp_with_hops},
    sockets::{self, accept_queue, listen, wait_until},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("together-mixed", mixed).alone(),
    Scenario::new("together-needle", needle).alone().long(),
    Scenario::new("together-idle", idle).alone().long(),
];

/// A port that nobody has.
const CLOSED: u16 = 9;
/// A port that a rule drops.
const RULED: u16 = 9000;
/// A port of a listener whose queue is full.
const FULL: u16 = 8080;
/// What fits by the device behind the router.
const MTU: u16 = 1300;

/// Drops of the rule in each netns, beside those of each round.
const FLOOD: u64 = 1_000;

/// Two threads that talk over the loopback device of a netns as long as this lives.
struct Load {
    stop: Arc<AtomicBool>,
    exchanged: Arc<AtomicU64>,
}

impl Load {
    fn start(netns: &Netns) -> Result<Self> {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let (asks, answers) = (sockets::udp(netns, any)?, sockets::udp(netns, any)?);
        let load = Self {
            stop: Arc::default(),
            exchanged: Arc::default(),
        };
        for socket in [&asks, &answers] {
            socket.set_read_timeout(Some(Duration::from_millis(200)))?;
        }
        asks.connect(answers.local_addr()?)?;
        answers.connect(asks.local_addr()?)?;
        for (socket, first) in [(answers, false), (asks, true)] {
            let (stop, exchanged) = (Arc::clone(&load.stop), Arc::clone(&load.exchanged));
            thread::spawn(move || ping_pong(&socket, first, &stop, &exchanged));
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// One datagram at a time, so that none is lost.
fn ping_pong(socket: &UdpSocket, first: bool, stop: &AtomicBool, exchanged: &AtomicU64) {
    let mut buffer = [0; 64];
    if first {
        let _ = socket.send(b"load");
    }
    while !stop.load(Ordering::Relaxed) {
        if socket.recv(&mut buffer).is_ok() {
            exchanged.fetch_add(1, Ordering::Relaxed);
            let _ = socket.send(b"load");
        }
    }
    // The other end stays open a little longer than what is under way to it.
    thread::sleep(Duration::from_millis(500));
}

/// A router with a full listener, a rule, a route that refuses, a narrow device and an address on a dummy device.
struct Host {
    wire: Wire,
    _beyond: Tun,
    _listener: socket2::Socket,
    number: u8,
}

impl Host {
    fn new(t: &Test, number: u8) -> Result<Self> {
        let at = |subnet: u8| 10 * number + subnet;
        let wire = Wire::of(t, &format!("host{number}"), V4, at(0))?;
        let netns = &wire.netns;
        let beyond = Tun::new(netns, "beyond", &[t.net(V4, at(1), 1)])?;
        netns.ip(&[
            &format!("link set beyond mtu {MTU}"),
            "link add vips type dummy",
            &format!("address add {}/32 dev vips", t.ip(V4, at(2), 1)),
            &format!("route add blackhole {}", t.net(V4, at(3), 0)),
        ])?;
        netns.sysctl("net.ipv4.ip_forward", "1")?;
        netns.sysctl("net.ipv4.conf.wire.rp_filter", "1")?;
        netns.nft(&format!(
            "table ip t {{ chain c {{ type filter hook input priority 0; udp dport {RULED} drop; }}\n}}"
        ))?;
        let listener = listen(netns, wire.address(FULL), 0)?;
        Client::new(wire.peer(4000), wire.address(FULL), 1000, None).connect(&wire.tun)?;
        wait_until("a waiting connection", || {
            Ok(accept_queue(netns, wire.address(FULL))? == 1)
        })?;
        Ok(Self {
            wire,
            _beyond: beyond,
            _listener: listener,
            number,
        })
    }

    /// Rounds of one packet for each cause: another number in each netns.
    fn rounds(&self) -> u64 {
        10 * u64::from(self.number) + 10
    }

    fn provoke(&self, t: &Test) -> Result<()> {
        let wire = &self.wire;
        let elsewhere = |port: u16| t.at(V4, 10 * self.number + 1, 8, port);
        let here = |port: u16| t.at(V4, 10 * self.number + 2, 1, port);
        let far = |subnet: u8| t.at(V4, 10 * self.number + subnet, 9, 9);
        let each = FLOOD / self.rounds();
        let mut flooded = 0;
        for round in 0..self.rounds() {
            let port = 3000 + round as u16;
            let from = wire.peer(port);
            for packet in [
                Segment::syn(from, wire.address(FULL), 1).bytes()?,
                udp(from, wire.address(CLOSED), b"closed")?,
                udp(from, wire.address(RULED), b"ruled")?,
                udp(elsewhere(port), wire.address(CLOSED), b"source is elsewhere")?,
                udp(here(port), wire.address(CLOSED), b"source is here")?,
                udp(
                    (Ipv4Addr::new(127, 0, 0, 9), port).into(),
                    wire.address(CLOSED),
                    b"loopback",
                )?,
                udp(from, (Ipv4Addr::LOCALHOST, CLOSED).into(), b"to loopback")?,
                udp(from, far(4), b"no route")?,
                udp(from, far(3), b"blackhole")?,
                udp_with_hops(from, far(1), b"one hop", 1)?,
                udp(from, far(1), &[0; MTU as usize])?,
            ] {
                wire.tun.send(&packet)?;
            }
            let end = if round + 1 == self.rounds() {
                FLOOD
            } else {
                flooded + each
            };
            let ruled = udp(wire.peer(2000), wire.address(RULED), b"flood")?;
            for _ in flooded..end {
                wire.tun.send(&ruled)?;
            }
            flooded = end;
        }
        Ok(())
    }

    fn expected(&self) -> Vec<Expected> {
        let (netns, rounds) = (&self.wire.netns, self.rounds());
        let mut expected: Vec<Expected> = [
            "accept-queue-full",
            "local-source",
            "martian-source",
            "martian-destination",
            "blackhole-route",
        ]
        .map(|cause| Expected::dropped(netns, cause, rounds))
        .into();
        expected.extend(
            ["no-socket", "no-route", "ttl-exceeded", "packet-too-big"]
                .map(|cause| Expected::rejected(netns, cause, rounds)),
        );
        // The source's route leads elsewhere, or to this very host.
        expected.push(Expected::dropped(netns, "rp-filter", rounds));
        expected.push(Expected::dropped(netns, "netfilter-rule", rounds + FLOOD));
        expected
    }
}

/// Eleven causes at once in four namespaces that are busy besides: each total is exact, in each netns.
fn mixed(t: &Test) -> Result<Outcome> {
    let hosts = (1..=4)
        .map(|number| Host::new(t, number))
        .collect::<Result<Vec<_>>>()?;
    t.known();
    let load = hosts
        .iter()
        .map(|host| Load::start(&host.wire.netns))
        .collect::<Result<Vec<_>>>()?;
    thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = hosts.iter().map(|host| scope.spawn(|| host.provoke(t))).collect();
        for thread in threads {
            thread
                .join()
                .map_err(|_| anyhow::anyhow!("a sender panicked"))??;
        }
        Ok(())
    })?;
    let expected: Vec<Expected> = hosts.iter().flat_map(Host::expected).collect();
    t.expect(&expected)?;
    let exchanged: u64 = load
        .iter()
        .map(|load| load.exchanged.load(Ordering::Relaxed))
        .sum();
    ensure!(exchanged > 0, "there was no load");
    let packets: u64 = expected.iter().map(Expected::packets).sum();
    Ok(Outcome::Passed(format!(
        "11 causes in 4 namespaces at once: {packets} packets, all totals exact, beside {exchanged} datagrams of load"
    )))
}

/// How often the rare drop happens.
const EVERY: Duration = Duration::from_mins(1);
/// How many rare drops there are.
const NEEDLES: u16 = 4;
/// Packets of the flood at once, and how long until the next.
const BURST: u64 = 10;
const PAUSE: Duration = Duration::from_millis(50);
/// Packets of the flood just before and after a rare drop.
const SURGE: u64 = 1_000;

/// One drop a minute in a flood of another cause: each has a line of its own that explains it, and so has the flood.
fn needle(t: &Test) -> Result<Outcome> {
    let wire = Wire::new(t, V4)?;
    wire.netns.nft(&format!(
        "table ip t {{ chain c {{ type filter hook input priority 0; udp dport {RULED} counter drop; }}\n}}"
    ))?;
    t.known();
    let ruled = udp(wire.peer(2000), wire.address(RULED), b"flood")?;
    let mut flooded = 0;
    let mut flood = |packets: u64| -> Result<()> {
        flooded += packets;
        (0..packets).try_for_each(|_| wire.tun.send(&ruled))
    };
    let start = Instant::now();
    for number in 0..NEEDLES {
        while start.elapsed() < EVERY * u32::from(number) {
            flood(BURST)?;
            thread::sleep(PAUSE);
        }
        flood(SURGE)?;
        let needle = udp(wire.peer(3000 + number), wire.address(CLOSED), b"needle")?;
        wire.tun.send(&needle)?;
        flood(SURGE)?;
    }
    t.expect(&[
        Expected::dropped(&wire.netns, "netfilter-rule", flooded),
        Expected::rejected(&wire.netns, "no-socket", NEEDLES.into()),
    ])?;
    for number in 0..NEEDLES {
        let port = 3000 + number;
        if let Some(seen) = t.drop_where(&wire.netns, "no-socket", |drop| drop.sport == Some(port))? {
            seen.goes(wire.peer(port), wire.address(CLOSED))?;
        }
    }
    t.drop(&wire.netns, "netfilter-rule")?;
    Ok(Outcome::Passed(format!(
        "{NEEDLES} drops, one a minute, each with a line, in {flooded} others"
    )))
}

/// How long nothing is lost.
const QUIET: Duration = Duration::from_mins(5);

/// A program that is ended with this value.
struct Running(Child);

impl Running {
    fn start(netns: &Netns, program: &str, arguments: &[&str]) -> Result<Self> {
        netns.enter(|| {
            let child = Command::new(program)
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .with_context(|| format!("cannot start {program}"))?;
            Ok(Self(child))
        })
    }

    fn runs(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_none())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A host with an SSH server that is looked at now and then, datagrams every second, multicast with and without a
/// receiver, and tcpdump: no loss anywhere on the host.
fn idle(t: &Test) -> Result<Outcome> {
    let Some(trace) = t.trace() else {
        return Ok(Outcome::Skipped("needs droptrace".to_owned()));
    };
    // On two CPUs segments overtake each other on a veth pair, and PAWS rejects some.
    clean::pin()?;
    let (host, peer) = (t.netns("host")?, t.netns("peer")?);
    host.veth("wire", &peer, "wire")?;
    host.address("wire", &t.net(V4, 0, 1))?;
    peer.address("wire", &t.net(V4, 0, 2))?;
    let key = "/tmp/idle-host-key";
    run(&format!("dropbearkey -t ed25519 -f {key}"))?;
    let ssh = t.at(V4, 0, 1, 22);
    let mut programs = [
        Running::start(&host, "dropbear", &["-F", "-r", key, "-p", "22"])?,
        Running::start(&host, "tcpdump", &["-i", "any", "-Z", "root", "-w", "/dev/null"])?,
    ];
    wait_until("the SSH server", || Ok(peer.enter(|| banner(ssh)).is_ok()))?;
    let (receiver, listener) = (
        sockets::udp(&host, t.at(V4, 0, 1, 5000))?,
        sockets::udp(&host, (Ipv4Addr::UNSPECIFIED, 5001).into())?,
    );
    let group = Ipv4Addr::new(239, 1, 1, 1);
    let std::net::IpAddr::V4(here) = t.ip(V4, 0, 1) else {
        unreachable!("an IPv4 address")
    };
    listener.join_multicast_v4(&group, &here)?;
    for socket in [&receiver, &listener] {
        socket.set_nonblocking(true)?;
    }
    let sender = sockets::udp(&peer, t.at(V4, 0, 2, 4000))?;
    let sender_v6 = sockets::udp(&peer, (Ipv6Addr::UNSPECIFIED, 4001).into())?;
    let index = peer.enter(|| Ok(nix::net::if_::if_nametoindex("wire")?))?;
    let everybody = SocketAddr::from(SocketAddrV6::new(
        Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0xfb),
        5353,
        0,
        index,
    ));
    t.known();
    let before = trace.counts()?;
    let (start, mut second, mut received) = (Instant::now(), 0_u32, 0);
    let mut not_joined = 0;
    while start.elapsed() < QUIET {
        sender.send_to(b"every second", t.at(V4, 0, 1, 5000))?;
        sender.send_to(b"to a group", (group, 5001))?;
        if second.is_multiple_of(5) {
            // Nobody has joined these.
            not_joined += 1;
            sender.send_to(b"to nobody", (Ipv4Addr::new(239, 9, 9, 9), 5002))?;
            sender_v6.send_to(b"to nobody", everybody)?;
        }
        if second.is_multiple_of(10) {
            peer.enter(|| banner(ssh))?;
        }
        thread::sleep(Duration::from_secs(1));
        let mut buffer = [0; 64];
        for socket in [&receiver, &listener] {
            while socket.recv(&mut buffer).is_ok() {
                received += 1;
            }
        }
        second += 1;
    }
    for program in &mut programs {
        ensure!(program.runs()?, "a program of the idle host has ended");
    }
    ensure!(
        received >= 2 * second - 2,
        "{received} datagrams came of {}",
        2 * second
    );
    let after = trace.counts()?;
    let losses = since(&before, &after, false);
    ensure!(
        losses.is_empty(),
        "losses on an idle host: {losses:?}; {}",
        t.last_losses()
    );
    let benign = since(&before, &after, true);
    Ok(Outcome::Passed(format!(
        "no loss in {} s on the whole host: {received} datagrams received, {} looks at the SSH server; benign: {benign:?}, \
         {not_joined} of a group of IPv4 that nobody joined",
        QUIET.as_secs(),
        second.div_ceil(10)
    )))
}

/// Waits for the first words of an SSH server, and leaves.
fn banner(server: SocketAddr) -> Result<()> {
    use std::io::Read;

    let mut stream = TcpStream::connect_timeout(&server, Duration::from_secs(10))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut words = [0; 4];
    stream.read_exact(&mut words)?;
    ensure!(&words == b"SSH-", "not an SSH server");
    // So that nothing is left unread on either side.
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest)?;
    Ok(())
}

/// What was counted in between, by cause, anywhere.
fn since(before: &Counts, after: &Counts, benign: bool) -> BTreeMap<String, u64> {
    let sums = |counts: &Counts| {
        let mut sums: BTreeMap<String, u64> = BTreeMap::new();
        for count in counts.causes.iter().filter(|count| count.benign == benign) {
            *sums.entry(count.cause.clone()).or_default() += count.packets;
        }
        sums
    };
    let before = sums(before);
    sums(after)
        .into_iter()
        .map(|(cause, packets)| {
            let since = packets - before.get(&cause).copied().unwrap_or(0);
            (cause, since)
        })
        .filter(|(_, packets)| *packets > 0)
        .collect()
}
