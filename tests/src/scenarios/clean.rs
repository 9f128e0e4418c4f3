//! Nothing is lost: no label but benign ones may appear.

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
    sockets::{self, accept, connect_here, listen},
};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario::new("clean-one-cpu", clean).alone().family()];

/// Connections by each of the three ways.
const CONNECTIONS: usize = 700;
const DATAGRAMS: usize = 300;
const AT_ONCE: usize = 64;
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
fn pin() -> Result<()> {
    let mut first = CpuSet::new();
    first.set(0)?;
    sched_setaffinity(Pid::from_raw(0), &first).context("cannot pin to one CPU")
}

fn exchange(mut stream: TcpStream) -> Result<()> {
    let question = [7_u8; 1000];
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(&question)?;
    let mut answer = [0_u8; 1000];
    stream.read_exact(&mut answer)?;
    ensure!(answer == question, "the answer differs from the question");
    Ok(())
}

/// Serves this many connections one after the other, then returns.
fn serve(listener: &socket2::Socket, connections: usize) -> Result<()> {
    for _ in 0..connections {
        let mut stream = accept(listener)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let mut question = [0_u8; 1000];
        stream.read_exact(&mut question)?;
        stream.write_all(&question)?;
        // The client closes first.
        let _ = stream.read(&mut question)?;
    }
    Ok(())
}

fn clean(t: &Test) -> Result<Outcome> {
    pin()?;
    let path = path(t)?;
    t.known();
    let cost = Cost::start()?;
    let before = [
        Counters::read(&path.client)?,
        Counters::read(&path.node)?,
        Counters::read(&path.server)?,
    ];
    let listener = listen(
        &path.server,
        SocketAddr::new(sockets::any(path.plain.ip()), PORT),
        1024,
    )?;
    let total = 3 * CONNECTIONS;
    thread::scope(|scope| -> Result<()> {
        let server = scope.spawn(|| serve(&listener, total));
        path.client.enter(|| {
            for _ in 0..CONNECTIONS {
                for to in [path.plain, path.translated, path.balanced] {
                    exchange(connect_here(None, to)?)?;
                }
            }
            Ok(())
        })?;
        server
            .join()
            .map_err(|_| anyhow::anyhow!("the server panicked"))?
    })?;
    busy(&path, &listener)?;
    datagrams(&path)?;
    let retransmitted: u64 = [&path.client, &path.server]
        .into_iter()
        .zip([&before[0], &before[2]])
        .map(|(netns, before)| Ok(Counters::read(netns)?.since(before, "TcpRetransSegs")))
        .sum::<Result<u64>>()?;
    drop(listener);
    t.expect(&[])?;
    Ok(Outcome::Passed(format!(
        "{total} connections, {AT_ONCE} at once, {DATAGRAMS} datagrams, no label; {retransmitted} segments sent again; {}",
        cost.so_far()?
    )))
}

/// Many connections at once, accepted late.
fn busy(path: &Path, listener: &socket2::Socket) -> Result<()> {
    let clients = path.client.enter(|| {
        (0..AT_ONCE)
            .map(|_| connect_here(None, path.plain))
            .collect::<Result<Vec<_>>>()
    })?;
    let accepted = (0..AT_ONCE)
        .map(|_| accept(listener))
        .collect::<Result<Vec<_>>>()?;
    drop(clients);
    for mut stream in accepted {
        let _ = stream.read(&mut [0; 1])?;
    }
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
