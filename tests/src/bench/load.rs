//! What is done with and without droptrace, and how long it takes.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::{
    Counters, Netns, Result,
    netns::modprobe,
    packet::Segment,
    sockets::{self, accept_queue, connect, connect_here, listen, wait_until},
};

/// A port that a rule drops.
const RULED: u16 = 9000;
/// A port that nobody has.
pub(super) const CLOSED: u16 = 9;
/// A port of a socket that nobody reads.
const UNREAD: u16 = 5300;
/// A port of a listener that accepts nothing.
const FULL: u16 = 8080;
/// A port that answers.
const OPEN: u16 = 80;
/// Connections that the full listener's queue may hold; it takes one more.
const BACKLOG: i32 = 8;
/// Bytes that a connection carries each way, and a datagram of the stream.
const PAYLOAD: [u8; 1000] = [7; 1000];
/// Bytes of a datagram that is dropped.
const SMALL: [u8; 16] = [7; 16];
/// How long a counter must stay as it is to be believed.
const STILL: Duration = Duration::from_millis(100);

/// A client and a server, each in a netns of its own, joined by a veth pair `wire`.
pub(super) struct Hosts {
    pub(super) client: Netns,
    pub(super) server: Netns,
    subnet: u8,
}

impl Hosts {
    fn new(name: &str, subnet: u8) -> Result<Self> {
        let client = Netns::new(&format!("{name}.client"))?;
        let server = Netns::new(&format!("{name}.server"))?;
        server.veth("wire", &client, "wire")?;
        let hosts = Self {
            client,
            server,
            subnet,
        };
        hosts
            .client
            .address("wire", &format!("{}/24", hosts.client_at(0).ip()))?;
        hosts
            .server
            .address("wire", &format!("{}/24", hosts.server_at(0).ip()))?;
        Ok(hosts)
    }

    /// Hosts that track every connection, as nodes and pods do.
    pub(super) fn tracking() -> Result<Self> {
        let hosts = Self::new("clean", 1)?;
        for host in [&hosts.client, &hosts.server] {
            host.nft(
                "table ip t { chain c { type filter hook input priority 0; ct state established accept; }\n}",
            )?;
        }
        Ok(hosts)
    }

    /// Hosts of which the server drops what comes to one port by a rule.
    pub(super) fn dropping() -> Result<Self> {
        let hosts = Self::new("storm", 2)?;
        hosts.server.nft(&format!(
            "table ip t {{ chain c {{ type filter hook input priority 0; udp dport {RULED} counter drop; }}\n}}"
        ))?;
        Ok(hosts)
    }

    fn client_at(&self, port: u16) -> SocketAddr {
        SocketAddr::from(([10, 200, self.subnet, 2], port))
    }

    pub(super) fn server_at(&self, port: u16) -> SocketAddr {
        SocketAddr::from(([10, 200, self.subnet, 1], port))
    }
}

/// Connections one after the other, each with a question and an answer. One thread plays both ends, so that no switch
/// between threads is measured.
pub(super) fn connections(hosts: &Hosts, number: u64) -> Result<Duration> {
    let to = hosts.server_at(OPEN);
    connections_to(&hosts.client, to, (&hosts.server, to), number)
}

/// The same where what the client connects to need not be what the server listens on.
fn connections_to(
    client: &Netns,
    to: SocketAddr,
    server: (&Netns, SocketAddr),
    number: u64,
) -> Result<Duration> {
    let listener = listen(server.0, server.1, 16)?;
    // Bounds accept(), too.
    listener.set_read_timeout(Some(Duration::from_secs(30)))?;
    client.enter(|| {
        let start = Instant::now();
        for _ in 0..number {
            let client = connect_here(None, to)?;
            let (server, _) = listener.accept()?;
            exchange(client, server.into())?;
        }
        Ok(start.elapsed())
    })
}

/// A client, a node with services of IPVS as kube-proxy sets them up, and a pod behind it.
pub(super) struct Services {
    client: Netns,
    /// Held as long as it is needed.
    _node: Netns,
    pod: Netns,
}

/// Services of the node; the first one's server answers.
const SERVICES: u8 = 50;
const POD: [u8; 4] = [10, 200, 4, 2];
/// A port of the pod that is no service's: from the same port of a client, answers of both would be the same for conntrack.
const PAST: u16 = 81;

impl Services {
    pub(super) fn new() -> Result<Self> {
        for module in ["ip_vs", "ip_vs_rr"] {
            modprobe(module)?;
        }
        let client = Netns::new("ipvs.client")?;
        let node = Netns::new("ipvs.node")?;
        let pod = Netns::new("ipvs.pod")?;
        node.veth("wire", &client, "wire")?;
        node.veth("pod", &pod, "wire")?;
        client.address("wire", "10.200.3.2/24")?;
        client.ip(&["route add default via 10.200.3.1"])?;
        node.address("wire", "10.200.3.1/24")?;
        node.address("pod", "10.200.4.1/24")?;
        pod.address("wire", "10.200.4.2/24")?;
        pod.ip(&["route add default via 10.200.4.1"])?;
        node.forward(true)?;
        for (name, value) in [
            ("net.ipv4.vs.conntrack", "1"),
            ("net.ipv4.vs.expire_nodest_conn", "1"),
            ("net.ipv4.vs.expire_quiescent_template", "1"),
        ] {
            node.sysctl(name, value)?;
        }
        node.nft(
            "table ip t { chain c { type filter hook forward priority 0; ct state established accept; }\n}",
        )?;
        node.ip(&["link add kube-ipvs0 type dummy"])?;
        let addresses: Vec<String> = (1..=SERVICES)
            .map(|service| format!("address add {}/32 dev kube-ipvs0", vip(service).ip()))
            .collect();
        node.ip(&addresses.iter().map(String::as_str).collect::<Vec<_>>())?;
        let server = SocketAddr::from((POD, OPEN));
        let mut services = Vec::new();
        for vip in (1..=SERVICES).map(vip) {
            services.push(format!("-A -t {vip} -s rr"));
            services.push(format!("-a -t {vip} -r {server} -m"));
        }
        node.run_with_input("ipvsadm -R", &format!("{}\n", services.join("\n")))?;
        Ok(Self {
            client,
            _node: node,
            pod,
        })
    }

    /// Connections to a service.
    pub(super) fn to_service(&self, number: u64) -> Result<Duration> {
        let server = SocketAddr::from((POD, OPEN));
        connections_to(&self.client, vip(1), (&self.pod, server), number)
    }

    /// Connections to the pod itself, which the node forwards all the same.
    pub(super) fn past(&self, number: u64) -> Result<Duration> {
        let server = SocketAddr::from((POD, PAST));
        connections_to(&self.client, server, (&self.pod, server), number)
    }
}

/// The virtual address of a service.
fn vip(service: u8) -> SocketAddr {
    SocketAddr::from(([10, 200, 5, service], OPEN))
}

fn exchange(mut client: TcpStream, mut server: TcpStream) -> Result<()> {
    let mut buffer = PAYLOAD;
    client.write_all(&PAYLOAD)?;
    server.read_exact(&mut buffer)?;
    server.write_all(&buffer)?;
    client.read_exact(&mut buffer)?;
    // The client closes first: the port that stays in TIME_WAIT is its own.
    drop(client);
    ensure!(server.read(&mut buffer)? == 0, "data after the last");
    Ok(())
}

/// Datagrams of 1,000 bytes, each of which is received.
pub(super) fn stream(hosts: &Hosts, number: u64) -> Result<Duration> {
    let to = hosts.server_at(OPEN);
    let server = sockets::udp(&hosts.server, to)?;
    server.set_read_timeout(Some(Duration::from_secs(30)))?;
    let client = sender(hosts)?;
    let mut buffer = PAYLOAD;
    let start = Instant::now();
    for _ in 0..number {
        client.send_to(&PAYLOAD, to)?;
        server.recv(&mut buffer)?;
    }
    Ok(start.elapsed())
}

/// A socket of the client that is not connected, so that no ICMP error keeps it from sending.
fn sender(hosts: &Hosts) -> Result<UdpSocket> {
    sockets::udp(
        &hosts.client,
        SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
    )
}

/// Packets that the server drops for one cause.
#[derive(Clone, Copy, Debug)]
pub(super) struct Storm {
    /// What drops them.
    pub(super) name: &'static str,
    /// The slug of the cause.
    pub(super) cause: &'static str,
    /// Makes the server drop, and gives what sends one packet.
    prepare: fn(&Hosts) -> Result<Sender>,
    /// Packets so dropped, as the server's kernel counts them.
    counted: fn(&Hosts) -> Result<u64>,
}

/// Sends one packet; holds what makes the server drop it.
pub(super) type Sender = Box<dyn Fn() -> Result<()>>;

/// All that are measured; the rule's is the first.
pub(super) const STORMS: &[Storm] = &[
    Storm {
        name: "rule",
        cause: "netfilter-rule",
        prepare: |hosts| datagrams(hosts, RULED),
        counted: |hosts| hosts.server.nft_packets(),
    },
    Storm {
        name: "closed port",
        cause: "no-socket",
        prepare: |hosts| datagrams(hosts, CLOSED),
        counted: |hosts| counter(hosts, "UdpNoPorts"),
    },
    Storm {
        name: "full UDP buffer",
        cause: "socket-rcvbuf-full",
        prepare: unread,
        counted: |hosts| counter(hosts, "UdpRcvbufErrors"),
    },
    Storm {
        name: "full accept queue",
        cause: "accept-queue-full",
        prepare: not_accepted,
        counted: |hosts| counter(hosts, "TcpExtListenOverflows"),
    },
];

impl Storm {
    /// Makes the server drop, as long as what is given lives.
    pub(super) fn prepare(&self, hosts: &Hosts) -> Result<Sender> {
        (self.prepare)(hosts)
    }

    /// Packets that the server's kernel has dropped so, once it drops no more: what stands in the queue of a busy CPU is
    /// late, not lost.
    pub(super) fn settled(&self, hosts: &Hosts) -> Result<u64> {
        let mut last = None;
        wait_until(self.name, || {
            thread::sleep(STILL);
            let now = (self.counted)(hosts)?;
            Ok(last.replace(now) == Some(now))
        })?;
        last.context("a counter")
    }
}

/// Sends this many packets, and gives how long that took.
pub(super) fn send(one: &Sender, number: u64) -> Result<Duration> {
    let start = Instant::now();
    for _ in 0..number {
        one()?;
    }
    Ok(start.elapsed())
}

fn datagrams(hosts: &Hosts, port: u16) -> Result<Sender> {
    let (socket, to) = (sender(hosts)?, hosts.server_at(port));
    Ok(Box::new(move || {
        socket.send_to(&SMALL, to)?;
        Ok(())
    }))
}

/// A socket whose buffer is full already.
fn unread(hosts: &Hosts) -> Result<Sender> {
    let socket = sockets::udp(&hosts.server, hosts.server_at(UNREAD))?;
    SockRef::from(&socket).set_recv_buffer_size(0)?;
    let send = datagrams(hosts, UNREAD)?;
    let before = counter(hosts, "UdpRcvbufErrors")?;
    wait_until("a full buffer", || {
        send()?;
        Ok(counter(hosts, "UdpRcvbufErrors")? > before)
    })?;
    Ok(Box::new(move || {
        // It stays bound as long as packets are sent.
        let _unread = &socket;
        send()
    }))
}

/// A listener whose queue is full already; each SYN is sent by hand, so that none is repeated.
fn not_accepted(hosts: &Hosts) -> Result<Sender> {
    let to = hosts.server_at(FULL);
    let listener = listen(&hosts.server, to, BACKLOG)?;
    let limit = u64::try_from(BACKLOG)? + 1;
    let waiting = (0..limit)
        .map(|_| connect(&hosts.client, None, to))
        .collect::<Result<Vec<_>>>()?;
    wait_until("a full accept queue", || {
        Ok(accept_queue(&hosts.server, to)? == limit)
    })?;
    let socket = hosts.client.enter(|| {
        let raw = Protocol::from(libc::IPPROTO_RAW);
        Socket::new(Domain::IPV4, Type::RAW, Some(raw)).context("cannot make a raw socket")
    })?;
    let syn = Segment::syn(hosts.client_at(2000), to, 100).bytes()?;
    Ok(Box::new(move || {
        let _full = (&listener, &waiting);
        socket.send_to(&syn, &to.into())?;
        Ok(())
    }))
}

fn counter(hosts: &Hosts, name: &str) -> Result<u64> {
    Ok(Counters::read(&hosts.server)?.get(name))
}
