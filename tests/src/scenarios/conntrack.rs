//! Connection tracking: clashes, exhausted ports, a full table.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use nfq::{Message, Queue, Verdict};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use super::Wire;
use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Netns, Outcome, Result, Scenario, Test, Tun,
    counters::{grown, grown_by},
    netns::{self, Restore, modprobe},
    packet::{ACK, Client, Packet, SYN, Segment, udp},
    sockets::{accept, listen},
    test::Kernel,
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("conntrack-insert-race-tcp-v4", |t| race(t, V4, Transport::Tcp)).family(),
    Scenario::new("conntrack-insert-race-tcp-v6", |t| race(t, V6, Transport::Tcp)),
    Scenario::new("conntrack-insert-race-udp-v4", |t| race(t, V4, Transport::Udp)),
    Scenario::new("conntrack-insert-race-udp-v6", |t| race(t, V6, Transport::Udp)),
    Scenario::new("conntrack-nat-exhausted-v4", |t| exhausted(t, V4)),
    Scenario::new("conntrack-nat-exhausted-v6", |t| exhausted(t, V6)),
    Scenario::new("conntrack-clash-resolved-dns-v4", |t| dns(t, V4)).alone(),
    Scenario::new("conntrack-clash-resolved-dns-v6", |t| dns(t, V6)).alone(),
    Scenario::new("conntrack-invalid-rule-v4", |t| invalid_by_rule(t, V4)),
    Scenario::new("conntrack-invalid-rule-v6", |t| invalid_by_rule(t, V6)),
    Scenario::new("conntrack-invalid-held-up", invalid_held_up),
    Scenario::new("conntrack-invalid-reset-v4", |t| invalid_reset(t, V4)),
    Scenario::new("conntrack-invalid-reset-v6", |t| invalid_reset(t, V6)),
    Scenario::new("conntrack-invalid-checksum", invalid_checksum),
    Scenario::new("conntrack-helper-v4", |t| helper(t, V4)).alone(),
    Scenario::new("conntrack-helper-v6", |t| helper(t, V6)).alone(),
    Scenario::new("conntrack-dying-rerouted-v4", |t| rerouted(t, V4)),
    Scenario::new("conntrack-dying-rerouted-v6", |t| rerouted(t, V6)),
    Scenario::new("conntrack-dying-unconfirmed", unconfirmed).alone(),
    Scenario::new("conntrack-table-full-v4", |t| table_full(t, V4)).alone(),
    Scenario::new("conntrack-table-full-v6", |t| table_full(t, V6)).alone(),
];

const QUEUE: u16 = 7;
const PAIRS: u16 = 3;

/// A router: clients are hosts of subnet 0 behind `inside`, servers are hosts of subnet 1 behind `outside`.
struct Router {
    netns: Arc<Netns>,
    inside: Tun,
    outside: Tun,
    family: IpFamily,
}

impl Router {
    fn new(t: &Test, family: IpFamily) -> Result<Self> {
        modprobe("nf_conntrack")?;
        let netns = t.netns("router")?;
        let inside = Tun::new(&netns, "inside", &[t.net(family, 0, 1)])?;
        let outside = Tun::new(&netns, "outside", &[t.net(family, 1, 1)])?;
        netns.forward(true)?;
        Ok(Self {
            netns,
            inside,
            outside,
            family,
        })
    }

    /// The word of nft for this family.
    fn table(&self) -> &'static str {
        match self.family {
            V4 => "ip",
            V6 => "ip6",
        }
    }

    /// Translates the source of what leaves by `outside`.
    fn translate_source(&self, to: &str) -> Result<()> {
        self.netns.nft(&format!(
            "table {} nat {{ chain post {{ type nat hook postrouting priority 100; oifname \"outside\" \
             meta l4proto {{ tcp, udp }} snat to {to}; }}\n}}",
            self.table()
        ))
    }

    /// Opens a connection, both ends of which are played by hand: of a client that the server sees as `seen`.
    fn connect(&self, local: SocketAddr, seen: SocketAddr, server: SocketAddr) -> Result<(Client, Client)> {
        let mut client = Client::new(local, server, 1000, None);
        self.inside.send(&client.segment(SYN, &[]).bytes()?)?;
        self.outside
            .receive("the SYN", |packet| packet.goes(seen, server) && packet.has(SYN))?;
        let mut peer = Client::new(server, seen, 9000, None);
        peer.expected = 1001;
        peer.send(&self.outside, SYN | ACK, &[])?;
        client.take(&self.inside, SYN | ACK)?;
        client.sequence += 1;
        client.send(&self.inside, ACK, &[])?;
        Ok((client, peer))
    }

    /// Holds what leaves by `outside` after NAT has chosen and before the entry is confirmed.
    fn hold(&self) -> Result<Held> {
        let held = Held::bind(&self.netns)?;
        self.netns.nft(&format!(
            "table {} hold {{ chain post {{ type filter hook postrouting priority 200; oifname \"outside\" \
             meta l4proto {{ tcp, udp }} queue num {QUEUE}; }}\n}}",
            self.table()
        ))?;
        Ok(held)
    }
}

/// Packets held in an NFQUEUE.
struct Held {
    queue: Queue,
}

impl Held {
    /// Those that rules of this netns give to [`QUEUE`].
    fn bind(netns: &Netns) -> Result<Self> {
        modprobe("nfnetlink_queue")?;
        let queue = netns.enter(|| {
            let mut queue = Queue::open().context("cannot open an NFQUEUE socket")?;
            queue.bind(QUEUE).context("cannot bind the NFQUEUE")?;
            queue.set_nonblocking(true);
            Ok(queue)
        })?;
        Ok(Self { queue })
    }

    /// Waits for the next held packet.
    fn next(&mut self) -> Result<Message> {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            match self.queue.recv() {
                Ok(message) => return Ok(message),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    ensure!(
                        Instant::now() < until,
                        "no packet was queued within twenty seconds"
                    );
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => bail!("cannot read the NFQUEUE: {error}"),
            }
        }
    }

    fn release(&mut self, mut message: Message) -> Result<()> {
        message.set_verdict(Verdict::Accept);
        self.queue
            .verdict(message)
            .context("cannot release a held packet")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Tcp,
    Udp,
}

impl Transport {
    fn first(self, src: SocketAddr, dst: SocketAddr) -> Result<Vec<u8>> {
        match self {
            Self::Tcp => Segment::syn(src, dst, 1).bytes(),
            Self::Udp => udp(src, dst, b"hello"),
        }
    }
}

/// First packets of two clients that SNAT gives the same port, held until both have it.
fn race(t: &Test, family: IpFamily, transport: Transport) -> Result<Outcome> {
    let router = Router::new(t, family)?;
    let nat = t.ip(family, 1, 1);
    router.translate_source(&nat.to_string())?;
    let mut held = router.hold()?;
    t.attached(&["nf_ct_resolve_clash"])?;
    let before = Counters::read(&router.netns)?;
    let server = t.at(family, 1, 9, 8080);
    for number in 0..PAIRS {
        let [winner, loser] = [2, 3].map(|host| t.at(family, 0, host, 5000 + number));
        router.inside.send(&transport.first(winner, server)?)?;
        let first = held.next()?;
        router.inside.send(&transport.first(loser, server)?)?;
        let second = held.next()?;
        held.release(first)?;
        router
            .outside
            .receive("the winner's packet", |packet| packet.dst == server)?;
        held.release(second)?;
    }
    let failed = u64::from(PAIRS);
    grown_by(&router.netns, &before, "conntrack:insert_failed", failed)?;
    t.expect(&[Expected::dropped(&router.netns, "conntrack-insert-race", failed)])?;
    let loser = t.at(family, 0, 3, 5000);
    if let Some(seen) = t.drop_where(&router.netns, "conntrack-insert-race", |drop| {
        drop.sport == Some(5000)
            || drop
                .evidence
                .get("loser_original")
                .is_some_and(|tuple| tuple == &format!("{loser} > {server}"))
    })? {
        let reply = format!("{server} > {}", SocketAddr::new(nat, 5000));
        seen.counter("insert_failed")?
            .evidence("nat", "source")?
            .evidence("loser_original", format!("{loser} > {server}"))?
            .evidence("loser_reply", reply.clone())?
            .evidence(
                "winner_original",
                format!("{} > {server}", t.at(family, 0, 2, 5000)),
            )?
            .evidence("winner_reply", reply)?
            .evidence("same_flow", false)?
            .has_evidence("winner_state")?
            .remedy_says("random")?;
    }
    Ok(Outcome::Passed(format!("insert_failed and droptrace: {failed}")))
}

/// One port for source NAT, held by an established connection.
fn exhausted(t: &Test, family: IpFamily) -> Result<Outcome> {
    const REFUSED: u64 = 3;
    let router = Router::new(t, family)?;
    let nat = SocketAddr::new(t.ip(family, 1, 1), 40_000);
    router.translate_source(&nat.to_string())?;
    t.attached(&["nf_ct_resolve_clash"])?;
    let server = t.at(family, 1, 9, 8080);
    let holder = t.at(family, 0, 2, 5000);
    // The holder shakes hands, so that its entry is ASSURED.
    router.inside.send(&Segment::syn(holder, server, 1).bytes()?)?;
    router.outside.receive("the holder's SYN", |packet| {
        packet.goes(nat, server) && packet.has(SYN)
    })?;
    let mut answer = Segment::syn(server, nat, 100).flags(SYN | ACK);
    answer.acknowledged = 2;
    router.outside.send(&answer.bytes()?)?;
    router
        .inside
        .receive("the holder's SYN-ACK", |packet| packet.goes(server, holder))?;
    let mut last = Segment::syn(holder, server, 2).flags(ACK);
    last.acknowledged = 101;
    router.inside.send(&last.bytes()?)?;
    router
        .outside
        .receive("the holder's ACK", |packet| packet.goes(nat, server))?;
    let before = Counters::read(&router.netns)?;
    for number in 0..REFUSED as u16 {
        let late = t.at(family, 0, 3, 6000 + number);
        router.inside.send(&Segment::syn(late, server, 1).bytes()?)?;
    }
    grown_by(&router.netns, &before, "conntrack:insert_failed", REFUSED)?;
    t.expect(&[Expected::dropped(
        &router.netns,
        "conntrack-nat-exhausted",
        REFUSED,
    )])?;
    if let Some(seen) = t.drop(&router.netns, "conntrack-nat-exhausted")? {
        ensure!(
            seen.0
                .evidence
                .get("winner_state")
                .and_then(|state| state.as_str())
                .is_some_and(|state| state.contains("ASSURED") && state.contains("ESTABLISHED")),
            "the winner's state is not ESTABLISHED ASSURED: {seen}"
        );
        seen.counter("insert_failed")?
            .evidence("nat", "source")?
            .evidence("winner_original", format!("{holder} > {server}"))?
            .evidence("winner_reply", format!("{server} > {nat}"))?;
    }
    Ok(Outcome::Passed(format!("insert_failed and droptrace: {REFUSED}")))
}

/// Two queries of one socket that DNAT sends to two servers: the kernel keeps both.
///
/// They come on two CPUs at once, and a long chain between NAT and confirmation gives them time to clash.
/// An NFQUEUE would not do: up to 6.1 its reinjection looks the entry up again (nf_conntrack_update,
/// net/netfilter/nf_conntrack_core.c) and finds the first query's.
fn dns(t: &Test, family: IpFamily) -> Result<Outcome> {
    const ATTEMPTS: u16 = 60;
    const RULES: usize = 1500;
    let router = Router::new(t, family)?;
    let service = t.at(family, 5, 5, 53);
    let servers = [t.at(family, 1, 8, 53), t.at(family, 1, 9, 53)];
    router.netns.nft(&format!(
        "table {0} nat {{ chain pre {{ type nat hook prerouting priority -100; udp dport 53 \
         dnat to numgen inc mod 2 map {{ 0 : {1}, 1 : {2} }}; }}\n}}\n\
         table {0} slow {{ chain post {{ type filter hook postrouting priority 200;\n{3}}}\n}}",
        router.table(),
        servers[0].ip(),
        servers[1].ip(),
        "meta mark 0x12345 accept\n".repeat(RULES)
    ))?;
    t.attached(&["nf_ct_resolve_clash"])?;
    let before = Counters::read(&router.netns)?;
    let mut attempts = 0;
    while attempts < ATTEMPTS && grown(&router.netns, &before, "conntrack:clashres")? < u64::from(PAIRS) {
        let client = t.at(family, 0, 2, 5000 + attempts);
        let together = Barrier::new(2);
        thread::scope(|scope| {
            let queries = [(0, &b"A?"[..]), (1, &b"AAAA?"[..])].map(|(cpu, data)| {
                let (router, together) = (&router, &together);
                scope.spawn(move || -> Result<()> {
                    let mut here = CpuSet::new();
                    here.set(cpu)?;
                    let packet = udp(client, service, data);
                    let pinned = sched_setaffinity(Pid::from_raw(0), &here);
                    together.wait();
                    pinned.context("this scenario needs two CPUs")?;
                    router.inside.send(&packet?)
                })
            });
            queries.into_iter().try_for_each(|query| {
                query
                    .join()
                    .map_err(|_| anyhow::anyhow!("a sending thread panicked"))?
            })
        })?;
        attempts += 1;
    }
    let all = 2 * usize::from(attempts);
    let mut arrived = 0;
    while arrived < all {
        router
            .outside
            .receive("every query at a server", |packet| servers.contains(&packet.dst))?;
        arrived += 1;
    }
    let now = Counters::read(&router.netns)?;
    let (resolved, failed) = (
        now.since(&before, "conntrack:clashres"),
        now.since(&before, "conntrack:insert_failed"),
    );
    ensure!(
        resolved > 0 && failed == 0,
        "in {attempts} attempts clash_resolve grew by {resolved}, insert_failed by {failed}"
    );
    t.expect_benign(&router.netns, "conntrack-clash-resolved", resolved)?;
    t.expect(&[])?;
    Ok(Outcome::Passed(format!(
        "clash_resolve grew by {resolved} in {attempts} pairs, all {all} queries arrived, no loss"
    )))
}

/// Half of the sequence numbers further on: out of any window.
const FAR: u32 = 0x4000_0000;
const INVALID: u64 = 4;

/// Waits until conntrack called that many packets INVALID.
fn called_invalid(netns: &Netns, before: &Counters) -> Result<()> {
    grown_by(netns, before, "conntrack:invalid", INVALID)?;
    Ok(())
}

/// Segments out of the window of a connection to this host, which a rule drops.
fn invalid_by_rule(t: &Test, family: IpFamily) -> Result<Outcome> {
    modprobe("nf_conntrack")?;
    let wire = Wire::new(t, family)?;
    wire.netns.nft(
        "table inet t { chain in { type filter hook input priority 0; ct state invalid counter drop; }\n}",
    )?;
    t.attached(&["nf_ct_l4proto_log_invalid"])?;
    let _listener = listen(&wire.netns, wire.address(80), 5)?;
    let mut client = Client::new(wire.peer(5000), wire.address(80), 1000, None);
    client.connect(&wire.tun)?;
    let before = Counters::read(&wire.netns)?;
    for number in 0..INVALID as u32 {
        let mut segment = client.segment(ACK, b"late");
        segment.sequence = client.sequence.wrapping_add(FAR + number);
        wire.tun.send(&segment.bytes()?)?;
    }
    called_invalid(&wire.netns, &before)?;
    t.expect(&[Expected::dropped(&wire.netns, "conntrack-invalid", INVALID)])?;
    if let Some(seen) = t.drop(&wire.netns, "conntrack-invalid")? {
        let why = seen.0.evidence["why"].as_str().unwrap_or_default().to_owned();
        ensure!(why.contains("SEQ"), "why is {why}: {seen}");
        seen.goes(wire.peer(5000), wire.address(80))?
            .evidence("outcome", "rule")?
            .evidence(
                "connection",
                format!("{} > {}", wire.peer(5000), wire.address(80)),
            )?
            .evidence("nat", false)?
            .evidence("hook_point", "input")?
            .evidence("chain", "in")?
            .remedy_says("be_liberal")?;
    }
    Ok(Outcome::Passed(format!("invalid and droptrace: {INVALID}")))
}

/// The same, but a program holds each of them up for longer than a hint is believed without a look at the packet.
fn invalid_held_up(t: &Test) -> Result<Outcome> {
    const HELD_UP: Duration = Duration::from_millis(150);
    modprobe("nf_conntrack")?;
    let wire = Wire::new(t, V4)?;
    wire.netns.nft(&format!(
        "table ip t {{ chain pre {{ type filter hook prerouting priority 0; ct state invalid queue num {QUEUE}; }}\n \
         chain in {{ type filter hook input priority 0; ct state invalid counter drop; }}\n}}"
    ))?;
    t.attached(&["nf_ct_l4proto_log_invalid"])?;
    let mut held = Held::bind(&wire.netns)?;
    let _listener = listen(&wire.netns, wire.address(80), 5)?;
    let mut client = Client::new(wire.peer(5000), wire.address(80), 1000, None);
    client.connect(&wire.tun)?;
    for number in 0..INVALID as u32 {
        let mut segment = client.segment(ACK, b"late");
        segment.sequence = client.sequence.wrapping_add(FAR + number);
        wire.tun.send(&segment.bytes()?)?;
        let message = held.next()?;
        thread::sleep(HELD_UP);
        held.release(message)?;
    }
    t.expect(&[Expected::dropped(&wire.netns, "conntrack-invalid", INVALID)])?;
    if let Some(seen) = t.drop(&wire.netns, "conntrack-invalid")? {
        seen.goes(wire.peer(5000), wire.address(80))?
            .evidence("outcome", "rule")?
            .has_evidence("why")?
            .evidence("hook_point", "input")?;
    }
    Ok(Outcome::Passed(format!(
        "held up for {} ms each: {INVALID}",
        HELD_UP.as_millis()
    )))
}

/// Answers out of the window of a connection whose source NAT translates: they stay here, and are answered by RST.
fn invalid_reset(t: &Test, family: IpFamily) -> Result<Outcome> {
    let router = Router::new(t, family)?;
    let nat = t.at(family, 1, 1, 5000);
    router.translate_source(&nat.ip().to_string())?;
    t.attached(&["nf_ct_l4proto_log_invalid"])?;
    let (inner, server) = (t.at(family, 0, 2, 5000), t.at(family, 1, 9, 8080));
    let (_, peer) = router.connect(inner, nat, server)?;
    router
        .outside
        .receive("the ACK", |packet| packet.goes(nat, server) && !packet.has(SYN))?;
    let before = Counters::read(&router.netns)?;
    for number in 0..INVALID as u32 {
        let mut segment = peer.segment(ACK, b"late");
        segment.sequence = peer.sequence.wrapping_add(FAR + number);
        router.outside.send(&segment.bytes()?)?;
    }
    grown_by(&router.netns, &before, "TcpOutRsts", INVALID)?;
    // The RSTs are out of the window, too, and may be INVALID themselves.
    let invalid = grown(&router.netns, &before, "conntrack:invalid")?;
    ensure!(
        invalid == INVALID || invalid == 2 * INVALID,
        "invalid grew by {invalid}"
    );
    t.expect(&[Expected::rejected(&router.netns, "conntrack-invalid", INVALID)])?;
    if let Some(seen) = t.drop(&router.netns, "conntrack-invalid")? {
        seen.goes(server, nat)?
            .evidence("outcome", "reset")?
            .evidence("connection", format!("{inner} > {server}"))?
            .evidence("nat", true)?
            .has_evidence("why")?
            .remedy_says("--ctstate INVALID -j DROP")?;
    }
    Ok(Outcome::Passed(format!(
        "invalid: {invalid}, TcpOutRsts and droptrace: {INVALID}"
    )))
}

/// SYNs with a damaged checksum, which the policy of a chain drops.
fn invalid_checksum(t: &Test) -> Result<Outcome> {
    modprobe("nf_conntrack")?;
    let wire = Wire::new(t, V4)?;
    wire.netns.nft(
        "table ip t { chain in { type filter hook input priority 0; policy drop; \
         ct state new,established counter accept; }\n}",
    )?;
    t.attached(&["nf_l4proto_log_invalid"])?;
    let before = Counters::read(&wire.netns)?;
    for number in 0..INVALID as u16 {
        let mut bytes = Segment::syn(wire.peer(5000 + number), wire.address(80), 1).bytes()?;
        // The checksum behind the IPv4 header.
        bytes[20 + 16] ^= 0x55;
        wire.tun.send(&bytes)?;
    }
    called_invalid(&wire.netns, &before)?;
    t.expect(&[Expected::dropped(&wire.netns, "conntrack-invalid", INVALID)])?;
    if let Some(seen) = t.drop(&wire.netns, "conntrack-invalid")? {
        seen.evidence("outcome", "rule")?
            .evidence("why", "bad checksum")?
            .evidence("connection", serde_json::Value::Null)?
            .evidence("told_by", "elimination")?
            .remedy_says("nf_conntrack_checksum")?;
    }
    Ok(Outcome::Passed(format!("invalid and droptrace: {INVALID}")))
}

/// Announcements of FTP data connections that find no room for an expectation.
fn helper(t: &Test, family: IpFamily) -> Result<Outcome> {
    const MAX: &str = "net.netfilter.nf_conntrack_expect_max";
    const CLIENTS: u64 = 4;
    let announces = |packet: &Packet| packet.data.starts_with(b"PORT") || packet.data.starts_with(b"EPRT");
    modprobe("nf_conntrack_ftp")?;
    let router = Router::new(t, family)?;
    let table = router.table();
    router.netns.nft(&format!(
        "table {table} f {{ ct helper ftp {{ type \"ftp\" protocol tcp; }}\n \
         chain pre {{ type filter hook prerouting priority 0; tcp dport 21 ct helper set \"ftp\"; }}\n}}"
    ))?;
    t.attached(&["nf_ct_helper_log"])?;
    let _restore = Restore::set(MAX, "1")?;
    let server = t.at(family, 1, 9, 21);
    for number in 0..=CLIENTS as u16 {
        let local = t.at(family, 0, 2, 6000 + number);
        let (mut client, _) = router.connect(local, local, server)?;
        // The helper reads what follows a whole line.
        client.send(&router.inside, ACK, b"USER a\r\n")?;
        let port = 7000 + number;
        let command = match local.ip() {
            IpAddr::V4(ip) => {
                let host = ip.to_string().replace('.', ",");
                format!("PORT {host},{},{}\r\n", port >> 8, port & 0xff)
            }
            IpAddr::V6(ip) => format!("EPRT |2|{ip}|{port}|\r\n"),
        };
        client.send(&router.inside, ACK, command.as_bytes())?;
        if number == 0 {
            router.outside.receive("the first announcement", |packet| {
                packet.goes(local, server) && announces(packet)
            })?;
        }
    }
    t.expect(&[Expected::dropped(&router.netns, "conntrack-helper", CLIENTS)])?;
    let passed = router
        .outside
        .drain()
        .iter()
        .filter(|packet| announces(packet))
        .count();
    ensure!(passed == 0, "{passed} announcements more went through");
    if let Some(seen) = t.drop(&router.netns, "conntrack-helper")? {
        seen.evidence("why", "cannot add expectation")?
            .has_evidence("connection")?
            .remedy_says("expect_max")?;
    }
    Ok(Outcome::Passed(format!(
        "announcements that did not arrive, and droptrace: {CLIENTS}"
    )))
}

/// Masqueraded flows that suddenly leave by another device than the one whose address they bear: `nf_nat_inet_fn` removes
/// the entry and drops the packet (`nf_nat_oif_changed`, net/netfilter/nf_nat_core.c, 5.10 - 7.3).
fn rerouted(t: &Test, family: IpFamily) -> Result<Outcome> {
    const FLOWS: u16 = 4;
    let router = Router::new(t, family)?;
    let other = Tun::new(&router.netns, "other", &[t.net(family, 2, 1)])?;
    router.netns.nft(&format!(
        "table {} nat {{ chain post {{ type nat hook postrouting priority 100; \
         oifname {{ \"outside\", \"other\" }} masquerade; }}\n}}",
        router.table()
    ))?;
    t.known();
    let server = t.at(family, 1, 9, 8080);
    let send = || {
        (0..FLOWS).try_for_each(|number| {
            router
                .inside
                .send(&udp(t.at(family, 0, 2, 5000 + number), server, b"hello")?)
        })
    };
    let arrive = |by: &Tun, subnet: u8| {
        (0..FLOWS).try_for_each(|_| {
            by.receive("a masqueraded datagram", |packet| {
                packet.src.ip() == t.ip(family, subnet, 1) && packet.dst == server
            })
            .map(drop)
        })
    };
    send()?;
    arrive(&router.outside, 1)?;
    router
        .netns
        .ip(&[&format!("route add {} dev other", server.ip())])?;
    send()?;
    let dropped = u64::from(FLOWS);
    t.expect_by_facts(&[Expected::dropped(&router.netns, "conntrack-dying", dropped)])?;
    let passed =
        [&router.outside, &other].map(|by| by.drain().iter().filter(|packet| packet.dst == server).count());
    ensure!(passed == [0, 0], "{passed:?} datagrams went through");
    // With the entry gone, the next one of each flow makes a new one.
    send()?;
    arrive(&other, 2)?;
    if let Some(seen) = t.drop(&router.netns, "conntrack-dying")? {
        seen.goes(t.at(family, 0, 2, 0), server)?
            .evidence("hook_point", "postrouting")?
            .has_evidence("interface")?
            .remedy_says("conntrack -E -e DESTROY")?;
    }
    Ok(Outcome::Passed(format!(
        "datagrams that did not arrive, and droptrace: {dropped}"
    )))
}

/// First packets that a long chain holds up, while a helper's module goes and all entries that are not confirmed are done
/// away with.
///
/// Up to 5.18 the kernel marks these as dying (`nf_ct_unconfirmed_destroy`, net/netfilter/nf_conntrack_core.c). From 5.19 on it
/// keeps no list of them, and only makes their extensions invalid (`nf_ct_ext_bump_genid`): nothing tells the packet that
/// `__nf_conntrack_confirm` then drops from one that something else at that hook point drops, and it stays open (seen on 6.1.192). 6.12.118
/// and 7.3.4 have not even that function.
fn unconfirmed(t: &Test) -> Result<Outcome> {
    const RULES: usize = 1500;
    const ATTEMPTS: u16 = 20;
    const PORTS: u16 = 60_000;
    const LOST: u64 = 3;
    if t.kernel() >= Kernel(5, 19) {
        return Ok(Outcome::Skipped(
            "this kernel marks no unconfirmed entry as dying".to_owned(),
        ));
    }
    modprobe("nf_conntrack_ftp")?;
    let router = Router::new(t, V4)?;
    router.netns.nft(&format!(
        "table {} slow {{ chain post {{ type filter hook postrouting priority 200;\nct state new counter\n{}}}\n}}",
        router.table(),
        "meta mark 0x12345 accept\n".repeat(RULES)
    ))?;
    t.known();
    let before = Counters::read(&router.netns)?;
    let failed = || grown(&router.netns, &before, "conntrack:insert_failed");
    let server = t.at(V4, 1, 9, 8080);
    let enough = AtomicBool::new(false);
    let sent = thread::scope(|scope| -> Result<u16> {
        let sender = scope.spawn(|| -> Result<u16> {
            let mut sent = 0;
            while !enough.load(Ordering::Relaxed) && sent < PORTS {
                let client = t.at(V4, 0, 2, 1024 + sent);
                router.inside.send(&udp(client, server, b"hello")?)?;
                sent += 1;
            }
            Ok(sent)
        });
        let unloaded = (0..ATTEMPTS).try_for_each(|_| {
            if failed()? < LOST {
                netns::run("modprobe -r nf_conntrack_ftp")?;
                modprobe("nf_conntrack_ftp")?;
            }
            Ok(())
        });
        enough.store(true, Ordering::Relaxed);
        let sent = sender
            .join()
            .map_err(|_| anyhow::anyhow!("the sending thread panicked"))??;
        unloaded.map(|()| sent)
    })?;
    let failed = failed()?;
    ensure!(failed > 0, "insert_failed did not grow with {sent} packets");
    for _ in failed..u64::from(sent) {
        router
            .outside
            .receive("every other packet", |packet| packet.dst == server)?;
    }
    t.expect_by_facts(&[Expected::dropped(&router.netns, "conntrack-dying", failed)])?;
    if let Some(seen) = t.drop(&router.netns, "conntrack-dying")? {
        seen.goes(t.at(V4, 0, 2, 0), server)?
            .evidence("hook_point", "postrouting")?;
    }
    Ok(Outcome::Passed(format!(
        "insert_failed and droptrace: {failed} of {sent}"
    )))
}

/// Ten established connections and room for ten entries.
fn table_full(t: &Test, family: IpFamily) -> Result<Outcome> {
    const MAX: &str = "net.netfilter.nf_conntrack_max";
    const REFUSED: u64 = 4;
    modprobe("nf_conntrack")?;
    let wire = Wire::new(t, family)?;
    wire.netns.nft(
        "table inet t { chain input { type filter hook input priority 0; ct state new counter accept; }\n}",
    )?;
    t.attached(&["early_drop"])?;
    let listener = listen(&wire.netns, wire.address(8080), 64)?;
    let mut connections = Vec::new();
    for number in 0..10 {
        let mut client = Client::new(wire.peer(5000 + number), wire.address(8080), 1000, None);
        client.connect(&wire.tun)?;
        connections.push(accept(&listener)?);
    }
    let _restore = Restore::set(MAX, "10")?;
    let before = Counters::read(&wire.netns)?;
    for number in 0..REFUSED as u16 {
        wire.tun
            .send(&Segment::syn(wire.peer(6000 + number), wire.address(8080), 1).bytes()?)?;
    }
    grown_by(&wire.netns, &before, "conntrack:drop", REFUSED)?;
    t.expect(&[Expected::dropped(&wire.netns, "conntrack-table-full", REFUSED)])?;
    if let Some(seen) = t.drop(&wire.netns, "conntrack-table-full")? {
        seen.goes(wire.peer(0), wire.address(8080))?
            .flags("S")?
            .evidence("max", 10)?
            .has_evidence("count")?
            .remedy_says("nf_conntrack_max")?;
    }
    drop((connections, listener));
    Ok(Outcome::Passed(format!("drop and droptrace: {REFUSED}")))
}
