//! Nothing is lost: no label but benign ones may appear, and what PAWS rejects where two CPUs reorder segments.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context, ensure};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use crate::{
    Counters,
    IpFamily::V4,
    Netns, Outcome, Result, Scenario, Test,
    cost::Cost,
    netns::modprobe,
    sockets::{self, accept, connect_here, listen, wait_until},
    trace::Trace,
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("clean-one-cpu", one_cpu).alone().family(),
    Scenario::new("clean-two-cpus", two_cpus).alone(),
];

/// What PAWS may reject in a healthy connection when a segment overtakes another one.
const PAWS: [&str; 3] = ["paws-established", "paws-request", "paws-timewait"];
/// The counters that move with them (`tcp_validate_incoming`, net/ipv4/tcp_input.c; `tcp_check_req` and
/// `tcp_timewait_state_process`, net/ipv4/tcp_minisocks.c; 5.10 - 7.3); the last one only on 7.x.
const PAWS_COUNTERS: [&str; 2] = ["TcpExtPAWSEstab", "TcpExtPAWSTimewait"];
/// Benign, 7.x only: an ACK without data that was overtaken (`tcp_validate_incoming`).
const OLD_ACK: &str = "paws-old-ack";
const OLD_ACK_COUNTER: &str = "TcpExtPAWSOldAck";

/// Connections by each of the three ways.
const CONNECTIONS: usize = 700;
const DATAGRAMS: usize = 300;
const AT_ONCE: usize = 64;
/// Connections with data both ways at once.
const STREAMS: usize = 60;
/// Bytes each way; no more than one window, so that no acknowledgement can come too late to be valid
/// (`TCP_TOO_OLD_ACK`; `tcp_ack`, net/ipv4/tcp_input.c).
const STREAM_LENGTH: usize = 60_000;
const PORT: u16 = 8080;

/// A client, a node that forwards, and a server.
struct Path {
    client: Arc<Netns>,
    node: Arc<Netns>,
    server: Arc<Netns>,
    plain: SocketAddr,
    translated: SocketAddr,
    balanced: SocketAddr,
}

impl Path {
    /// Client, node, server.
    fn all(&self) -> [&Netns; 3] {
        [&self.client, &self.node, &self.server]
    }

    /// The counters of each.
    fn counters(&self) -> Result<Vec<Counters>> {
        self.all().into_iter().map(Counters::read).collect()
    }
}

fn path(t: &Test) -> Result<Path> {
    for module in ["ip_vs", "ip_vs_rr", "nf_conntrack"] {
        modprobe(module)?;
    }
    let client = t.netns("client")?;
    let node = t.netns("node")?;
    let server = t.netns("server")?;
    node.veth("inside", &client, "wire")?;
    node.veth("outside", &server, "wire")?;
    node.address("inside", &t.net(V4, 0, 1))?;
    client.address("wire", &t.net(V4, 0, 2))?;
    node.address("outside", &t.net(V4, 1, 1))?;
    // An address for each way: a port that the client uses again would otherwise meet the entry that IPVS or
    // conntrack keeps of another way's connection to the same place.
    for host in 2..=4 {
        server.address("wire", &t.net(V4, 1, host))?;
    }
    client.ip(&[&format!("route add default via {}", t.ip(V4, 0, 1))])?;
    server.ip(&[&format!("route add default via {}", t.ip(V4, 1, 1))])?;
    node.sysctl("net.ipv4.ip_forward", "1")?;
    let plain = t.at(V4, 1, 2, PORT);
    let behind_nat = t.at(V4, 1, 3, PORT);
    let behind_ipvs = t.at(V4, 1, 4, PORT);
    let translated = t.at(V4, 0, 1, 7001);
    let balanced = t.at(V4, 9, 9, 80);
    node.nft(&format!(
        "table ip nat {{ chain pre {{ type nat hook prerouting priority -100; tcp dport {} dnat to {behind_nat}; }}\n}}",
        translated.port()
    ))?;
    node.ip(&["link add kube-ipvs0 type dummy"])?;
    node.address("kube-ipvs0", &format!("{}/32", balanced.ip()))?;
    node.run(&format!("ipvsadm -A -t {balanced} -s rr"))?;
    node.run(&format!("ipvsadm -a -t {balanced} -r {behind_ipvs} -m"))?;
    // As kube-proxy sets it.
    node.sysctl("net.ipv4.vs.expire_nodest_conn", "1")?;
    node.sysctl("net.ipv4.vs.conntrack", "1")?;
    Ok(Path {
        client,
        node,
        server,
        plain,
        translated,
        balanced,
    })
}

/// This thread, and those that it starts, on the first CPU.
pub(super) fn pin() -> Result<()> {
    let mut first = CpuSet::new();
    first.set(0)?;
    sched_setaffinity(Pid::from_raw(0), &first).context("cannot pin to one CPU")
}

fn exchange(mut stream: TcpStream) -> Result<TcpStream> {
    let question = [7_u8; 1000];
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(&question)?;
    let mut answer = [0_u8; 1000];
    stream.read_exact(&mut answer)?;
    ensure!(answer == question, "the answer differs from the question");
    Ok(stream)
}

/// Serves this many connections one after the other, and gives them back open.
fn serve(listener: &socket2::Socket, connections: usize) -> Result<Vec<TcpStream>> {
    (0..connections)
        .map(|_| {
            let mut stream = accept(listener)?;
            stream.set_read_timeout(Some(Duration::from_secs(30)))?;
            let mut question = [0_u8; 1000];
            stream.read_exact(&mut question)?;
            stream.write_all(&question)?;
            Ok(stream)
        })
        .collect()
}

/// On one CPU segments keep their order.
fn one_cpu(t: &Test) -> Result<Outcome> {
    pin()?;
    let path = path(t)?;
    t.known();
    let seen = traffic(&path)?;
    t.expect(&[])?;
    Ok(Outcome::Passed(format!("no label; {}", seen.text)))
}

/// On two CPUs segments overtake each other on a veth pair, and PAWS rejects some: as many as the kernel counts,
/// and nothing else.
fn two_cpus(t: &Test) -> Result<Outcome> {
    let cpus = thread::available_parallelism()?.get();
    if cpus < 2 {
        return Ok(Outcome::Skipped(format!("needs two CPUs, has {cpus}")));
    }
    let path = path(t)?;
    t.known();
    let before = path.counters()?;
    let nowhere_before = nowhere(t)?;
    let late_before = late_hints(t)?;
    let seen = traffic(&path)?;
    let beside = [&PAWS[..], &["unknown", "no-socket"]].concat();
    t.expect_but(&[], &beside)?;
    // A busy machine makes its guests stand still now and then. Between a hook and the free that costs the hint: droptrace
    // says so, and calls the drop unknown rather than guess. Elsewhere it has a FIN sent again, whose second
    // acknowledgement meets no socket any more.
    let late = late_hints(t)? - late_before;
    let unknown = labelled(t, &path, "unknown")?;
    let answered_twice = labelled(t, &path, "no-socket")?;
    ensure!(
        unknown <= late && answered_twice <= seen.sent_again,
        "{unknown} unknown drops, {late} hints that came too late; {answered_twice} segments without a socket, {} sent \
         again; {}",
        seen.sent_again,
        t.last_losses()
    );
    let (mut paws, mut old_acks) = (Vec::new(), Vec::new());
    let mut unlocated = 0;
    wait_until("droptrace and the kernel to count alike", || {
        paws = compare(t, &path, &before, &PAWS, &PAWS_COUNTERS)?;
        old_acks = compare(t, &path, &before, &[OLD_ACK], &[OLD_ACK_COUNTER])?;
        unlocated = nowhere(t)? - nowhere_before;
        let alike = if t.kernel().hides_socket() {
            let sum = |number: fn(&Both) -> u64| paws.iter().map(number).sum::<u64>();
            sum(|both| both.labelled) + unlocated == sum(|both| both.counted)
                && paws.iter().all(|both| both.labelled <= both.counted)
        } else {
            unlocated == 0 && paws.iter().all(Both::alike)
        };
        Ok(alike && old_acks.iter().all(Both::alike))
    })
    .with_context(|| {
        format!(
            "PAWS {paws:?} and {unlocated} in no netns, overtaken ACKs {old_acks:?}; {}",
            t.last_losses()
        )
    })?;
    let figures = |all: &[Both]| {
        let counted: Vec<_> = all.iter().map(|both| both.counted.to_string()).collect();
        counted.join(", ")
    };
    Ok(Outcome::Passed(format!(
        "no label but PAWS, as often as the kernel counts it in client, node and server: {} ({unlocated} in no netns); \
         overtaken ACKs: {}; {unknown} unknown, {late} hints too late; {answered_twice} without a socket; {}",
        figures(&paws),
        figures(&old_acks),
        seen.text
    )))
}

/// Packets of a cause in client, node and server.
fn labelled(t: &Test, path: &Path, cause: &str) -> Result<u64> {
    let Some(trace) = t.trace() else { return Ok(0) };
    let counts = trace.counts()?;
    Ok(path
        .all()
        .into_iter()
        .map(|netns| t.counted(netns, &[cause], &counts))
        .sum())
}

/// Hints that no free took in time, so far.
fn late_hints(t: &Test) -> Result<u64> {
    t.trace()
        .map_or(Ok(0), |trace| Ok(trace.counts()?.hints_orphaned))
}

/// Packets of one netns, as droptrace labels them and as the kernel's counters moved.
#[derive(Debug)]
struct Both {
    labelled: u64,
    counted: u64,
}

impl Both {
    fn alike(&self) -> bool {
        self.labelled == self.counted
    }
}

/// What droptrace and the kernel counted in client, node and server. Where only the kernel is looked at, its number is both.
fn compare(
    t: &Test,
    path: &Path,
    before: &[Counters],
    causes: &[&str],
    counters: &[&str],
) -> Result<Vec<Both>> {
    let counts = t.trace().map(Trace::counts).transpose()?;
    path.all()
        .into_iter()
        .zip(before)
        .map(|(netns, before)| {
            let now = Counters::read(netns)?;
            let counted = counters.iter().map(|name| now.since(before, name)).sum();
            Ok(Both {
                labelled: counts
                    .as_ref()
                    .map_or(counted, |counts| t.counted(netns, causes, counts)),
                counted,
            })
        })
        .collect()
}

/// Segments rejected by PAWS that droptrace knows no netns of.
fn nowhere(t: &Test) -> Result<u64> {
    let Some(trace) = t.trace() else { return Ok(0) };
    let counts = trace.counts()?;
    Ok(counts
        .causes
        .iter()
        .filter(|count| count.netns == 0 && PAWS.contains(&count.cause.as_str()))
        .map(|count| count.packets)
        .sum())
}

/// What was sent.
struct Traffic {
    /// Segments that client or server sent again, since an answer took too long.
    sent_again: u64,
    /// What there was, and what it cost.
    text: String,
}

/// Connections one after the other by each way, many at once, and datagrams.
fn traffic(path: &Path) -> Result<Traffic> {
    let cost = Cost::start()?;
    let before = path.counters()?;
    let listener = listen(
        &path.server,
        SocketAddr::new(sockets::any(path.plain.ip()), PORT),
        1024,
    )?;
    let total = 3 * CONNECTIONS;
    let (mut clients, mut servers) = thread::scope(|scope| -> Result<_> {
        let server = scope.spawn(|| serve(&listener, total));
        let clients = path.client.enter(|| {
            (0..CONNECTIONS)
                .flat_map(|_| [path.plain, path.translated, path.balanced])
                .map(|to| exchange(connect_here(None, to)?))
                .collect::<Result<Vec<_>>>()
        })?;
        let servers = server
            .join()
            .map_err(|_| anyhow::anyhow!("the server panicked"))??;
        Ok((clients, servers))
    })?;
    for more in [busy(path, &listener)?, both_ways(path, &listener)?] {
        clients.extend(more.0);
        servers.extend(more.1);
    }
    datagrams(path)?;
    // A segment that arrives after its connection has ended is answered by a RST, rightly: let them all arrive first.
    thread::sleep(Duration::from_secs(1));
    drop(listener);
    close(clients);
    for mut server in &servers {
        ensure!(server.read(&mut [0; 1])? == 0, "data after the last");
    }
    close(servers);
    let sent_again: u64 = path
        .counters()?
        .iter()
        .zip(&before)
        .map(|(now, before)| now.since(before, "TcpRetransSegs"))
        .sum();
    let text = format!(
        "{total} connections, {AT_ONCE} at once, {STREAMS} with data both ways, {DATAGRAMS} datagrams; {sent_again} segments \
         sent again; {}",
        cost.so_far()?
    );
    Ok(Traffic { sent_again, text })
}

/// Closes a few at a time: a CPU's backlog holds 1,000 packets (net.core.netdev_max_backlog).
fn close(streams: Vec<TcpStream>) {
    for (number, stream) in (1..).zip(streams) {
        drop(stream);
        if number % 32 == 0 {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Both ends of open connections.
type Ends = (Vec<TcpStream>, Vec<TcpStream>);

/// Many connections at once, accepted late.
fn busy(path: &Path, listener: &socket2::Socket) -> Result<Ends> {
    let clients = path.client.enter(|| {
        (0..AT_ONCE)
            .map(|_| connect_here(None, path.plain))
            .collect::<Result<Vec<_>>>()
    })?;
    let servers = (0..AT_ONCE)
        .map(|_| accept(listener))
        .collect::<Result<Vec<_>>>()?;
    Ok((clients, servers))
}

/// Data both ways at once: acknowledgements leave from where the other side's data arrives as well as from where the
/// application reads, so that on two CPUs some overtake others.
fn both_ways(path: &Path, listener: &socket2::Socket) -> Result<Ends> {
    let mut ends = Ends::default();
    for to in [path.plain, path.translated, path.balanced]
        .into_iter()
        .cycle()
        .take(STREAMS)
    {
        let client = path.client.enter(|| connect_here(None, to))?;
        let server = accept(listener)?;
        thread::scope(|scope| -> Result<()> {
            let threads =
                [&client, &server].map(|end| [scope.spawn(|| send(end)), scope.spawn(|| receive(end))]);
            for thread in threads.into_iter().flatten() {
                thread.join().map_err(|_| anyhow::anyhow!("one end panicked"))??;
            }
            Ok(())
        })?;
        ends.0.push(client);
        ends.1.push(server);
    }
    Ok(ends)
}

fn send(mut stream: &TcpStream) -> Result<()> {
    stream.set_write_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(&vec![7; STREAM_LENGTH])?;
    Ok(())
}

fn receive(mut stream: &TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.read_exact(&mut vec![0; STREAM_LENGTH])?;
    Ok(())
}

fn datagrams(path: &Path) -> Result<()> {
    let server = sockets::udp(&path.server, path.plain)?;
    let client = sockets::udp(&path.client, SocketAddr::new(sockets::any(path.plain.ip()), 0))?;
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(Duration::from_secs(30)))?;
    }
    let mut buffer = [0; 64];
    for _ in 0..DATAGRAMS {
        client.send_to(b"question", path.plain)?;
        let (length, from) = server.recv_from(&mut buffer)?;
        server.send_to(&buffer[..length], from)?;
        client.recv_from(&mut buffer)?;
    }
    Ok(())
}
