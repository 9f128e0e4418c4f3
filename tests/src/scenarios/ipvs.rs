//! IPVS: left-over entries, removed servers, services without servers.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, ensure};

use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Netns, Outcome, Result, Scenario, Test, Tun,
    counters::grown,
    netns::modprobe,
    packet::{ACK, FIN, PSH, Packet, RST, SYN, Segment, udp},
    sockets::{start_connect, wait_until},
    tun::{PEER, mac},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("ipvs-timewait-reuse-weight-zero-v4", |t| {
        reuse(t, V4, Server::WeightZero)
    })
    .family(),
    Scenario::new("ipvs-timewait-reuse-weight-zero-v6", |t| {
        reuse(t, V6, Server::WeightZero)
    }),
    Scenario::new("ipvs-timewait-reuse-removed-v4", |t| {
        reuse(t, V4, Server::Removed)
    }),
    Scenario::new("ipvs-timewait-reuse-removed-v6", |t| {
        reuse(t, V6, Server::Removed)
    }),
    Scenario::new("ipvs-timewait-reuse-dead-neighbour", dead_neighbour),
    Scenario::new("ipvs-timewait-reuse-from-node", from_node),
    Scenario::new("ipvs-expire-nodest-conn-weight-zero", |t| {
        rescheduled(t, Server::WeightZero)
    }),
    Scenario::new("ipvs-expire-nodest-conn-removed", |t| {
        rescheduled(t, Server::Removed)
    }),
    Scenario::new("ipvs-destination-gone-v4", |t| destination_gone(t, V4)),
    Scenario::new("ipvs-destination-gone-v6", |t| destination_gone(t, V6)),
    Scenario::new("ipvs-no-destination-v4", |t| no_destination(t, V4)),
    Scenario::new("ipvs-no-destination-v6", |t| no_destination(t, V6)),
    Scenario::new("vip-no-service-v4", |t| no_service(t, V4)),
    Scenario::new("vip-no-service-v6", |t| no_service(t, V6)),
];

const FLOWS: u16 = 3;

/// What happens to a real server while its entries are left over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    WeightZero,
    Removed,
}

/// A director: clients are hosts of subnet 0 behind `wire`, real servers are hosts 2 and 3 of subnet 1
/// behind `servers`, and the virtual address is on kube-ipvs0.
pub(super) struct Director {
    netns: Arc<Netns>,
    wire: Tun,
    servers: Tun,
    vip: SocketAddr,
    real: [SocketAddr; 2],
}

impl Director {
    /// Without a service yet.
    fn bare(t: &Test, family: IpFamily, ethernet: bool) -> Result<Self> {
        modprobe("ip_vs")?;
        modprobe("ip_vs_rr")?;
        let netns = t.netns("director")?;
        let wire = Tun::new(&netns, "wire", &[t.net(family, 0, 1)])?;
        let open = if ethernet { Tun::tap } else { Tun::new };
        let servers = open(&netns, "servers", &[t.net(family, 1, 1)])?;
        let vip = t.at(family, 9, 9, 80);
        netns.ip(&["link add kube-ipvs0 type dummy"])?;
        let length = match family {
            V4 => 32,
            V6 => 128,
        };
        netns.address("kube-ipvs0", &format!("{}/{length}", vip.ip()))?;
        netns.forward(true)?;
        Ok(Self {
            netns,
            wire,
            servers,
            vip,
            real: [t.at(family, 1, 2, 8080), t.at(family, 1, 3, 8080)],
        })
    }

    /// With a service on the virtual address that has the first real server.
    fn new(t: &Test, family: IpFamily, ethernet: bool) -> Result<Self> {
        let director = Self::bare(t, family, ethernet)?;
        director.ipvsadm(&format!("-A -t {} -s rr", director.vip))?;
        director.add_server(0)?;
        // Entries whose server is gone live on, as before kube-proxy changed the settings.
        director.netns.sysctl("net.ipv4.vs.conn_reuse_mode", "0")?;
        director.netns.sysctl("net.ipv4.vs.expire_nodest_conn", "0")?;
        Ok(director)
    }

    fn ipvsadm(&self, arguments: &str) -> Result<String> {
        self.netns.run(&format!("ipvsadm {arguments}"))
    }

    fn add_server(&self, index: usize) -> Result<()> {
        self.ipvsadm(&format!("-a -t {} -r {} -m", self.vip, self.real[index]))?;
        Ok(())
    }

    /// Takes the first server out of service and adds the second.
    fn replace_server(&self, how: Server) -> Result<()> {
        match how {
            Server::WeightZero => {
                self.ipvsadm(&format!("-e -t {} -r {} -m -w 0", self.vip, self.real[0]))?;
            }
            Server::Removed => {
                self.ipvsadm(&format!("-d -t {} -r {}", self.vip, self.real[0]))?;
            }
        }
        self.add_server(1)
    }

    /// A connection of a client outside, played from both ends.
    fn open(&self, client: SocketAddr) -> Result<Flow<'_>> {
        let flow = Flow {
            director: self,
            client,
            server: self.real[0],
        };
        flow.client_sends(SYN, 1, 0, b"")?;
        flow.server_sends(SYN | ACK, 100, 2, b"")?;
        flow.client_sends(ACK, 2, 101, b"")?;
        Ok(flow)
    }

    /// State of the entry of this client, as `/proc/net/ip_vs_conn` names it.
    fn state(&self, client: SocketAddr) -> Result<Option<String>> {
        let port = format!("{:04X}", client.port());
        Ok(self.netns.proc_net("ip_vs_conn")?.lines().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            (words.len() > 7 && words[2] == port).then(|| words[7].to_owned())
        }))
    }

    fn wait_state(&self, client: SocketAddr, state: &str) -> Result<()> {
        wait_until(&format!("an entry in {state}"), || {
            Ok(self.state(client)?.as_deref() == Some(state))
        })
    }
}

/// Waits until the hooks of IPVS are attached and the services known.
fn hooked(t: &Test) -> Result<()> {
    t.attached(&["ip_vs_in", "ip_vs_leave", "ip_vs_conn_expire_now"])?;
    t.known();
    Ok(())
}

/// A connection through the director, both of whose ends are played by hand.
struct Flow<'a> {
    director: &'a Director,
    client: SocketAddr,
    server: SocketAddr,
}

impl Flow<'_> {
    /// Sends from the client and takes it at the server.
    fn client_sends(&self, flags: u8, sequence: u32, acknowledged: u32, data: &[u8]) -> Result<Packet> {
        let mut segment = Segment::syn(self.client, self.director.vip, sequence)
            .flags(flags)
            .data(data);
        segment.acknowledged = acknowledged;
        self.director.wire.send_ip(&segment.bytes()?)?;
        self.director
            .servers
            .receive(&format!("segment {flags:#x} at the server"), |packet| {
                packet.goes(self.client, self.server) && packet.has(flags)
            })
    }

    /// Sends from the server and takes it at the client.
    fn server_sends(&self, flags: u8, sequence: u32, acknowledged: u32, data: &[u8]) -> Result<Packet> {
        let mut segment = Segment::syn(self.server, self.client, sequence)
            .flags(flags)
            .data(data);
        segment.acknowledged = acknowledged;
        self.director.servers.send_ip(&segment.bytes()?)?;
        self.director
            .wire
            .receive(&format!("segment {flags:#x} at the client"), |packet| {
                packet.goes(self.director.vip, self.client) && packet.has(flags)
            })
    }

    /// Closes from both ends; the entry is left in TIME_WAIT.
    fn close(&self) -> Result<()> {
        self.client_sends(FIN | ACK, 2, 101, b"")?;
        self.server_sends(FIN | ACK, 101, 3, b"")?;
        self.client_sends(ACK, 3, 102, b"")?;
        self.director.wait_state(self.client, "TIME_WAIT")
    }
}

/// Clients use their ports again while entries to a server that is no longer there are left over.
fn reuse(t: &Test, family: IpFamily, server: Server) -> Result<Outcome> {
    let director = Director::new(t, family, false)?;
    hooked(t)?;
    let clients: Vec<_> = (0..FLOWS)
        .map(|number| t.at(family, 0, 2, 5000 + number))
        .collect();
    for client in &clients {
        director.open(*client)?.close()?;
    }
    director.replace_server(server)?;
    director.servers.drain();
    for client in &clients {
        director
            .wire
            .send(&Segment::syn(*client, director.vip, 90_000).bytes()?)?;
    }
    let flows = u64::from(FLOWS);
    match server {
        Server::WeightZero => {
            for client in &clients {
                director.servers.receive("the SYN at the old server", |packet| {
                    packet.goes(*client, director.real[0]) && packet.has(SYN)
                })?;
            }
            t.expect(&[Expected::misdelivered(
                &director.netns,
                "ipvs-timewait-reuse",
                flows,
            )])?;
        }
        Server::Removed => {
            std::thread::sleep(Duration::from_millis(200));
            ensure!(
                !director.servers.drain().iter().any(|packet| packet.has(SYN)),
                "a SYN came through to a server"
            );
            t.expect(&[Expected::dropped(&director.netns, "ipvs-timewait-reuse", flows)])?;
        }
    }
    if let Some(seen) = t.drop(&director.netns, "ipvs-timewait-reuse")? {
        let removed = server == Server::Removed;
        let seen = seen
            .goes(t.at(family, 0, 2, 0), director.vip)?
            .flags("S")?
            .evidence("virtual_service", director.vip.to_string())?
            .evidence("state", "TIME_WAIT")?
            .evidence("real_server", director.real[0].to_string())?
            .evidence("removed", removed)?
            .evidence("fate", if removed { "dropped" } else { "sent-to-old-server" })?
            .evidence("expire_nodest_conn", 0)?;
        if !removed {
            seen.evidence("weight", 0)?;
        }
    }
    Ok(Outcome::Passed(format!("sent {flows} SYNs, droptrace: {flows}")))
}

/// The dead server is on this network: the SYN that was sent to it dies here as well, and is one drop.
fn dead_neighbour(t: &Test) -> Result<Outcome> {
    let director = Director::new(t, V4, true)?;
    let server = director.real[0].ip();
    director
        .netns
        .sysctl("net.ipv4.neigh.servers.retrans_time_ms", "300")?;
    director.netns.ip(&[&format!(
        "neigh add {server} lladdr {} dev servers nud permanent",
        mac(PEER)
    )])?;
    hooked(t)?;
    let client = t.at(V4, 0, 2, 5000);
    director.open(client)?.close()?;
    director.replace_server(Server::WeightZero)?;
    director.netns.ip(&[&format!("neigh del {server} dev servers")])?;
    director
        .wire
        .send(&Segment::syn(client, director.vip, 90_000).bytes()?)?;
    wait_until("a failed neighbour", || {
        Ok(director.netns.run("ip neigh show")?.contains("FAILED"))
    })?;
    t.expect(&[Expected::misdelivered(&director.netns, "ipvs-timewait-reuse", 1)])?;
    Ok(Outcome::Passed(
        "sent 1 SYN, droptrace: 1, and its death is the same drop".to_owned(),
    ))
}

/// The client is the node itself.
fn from_node(t: &Test) -> Result<Outcome> {
    let director = Director::new(t, V4, false)?;
    hooked(t)?;
    let client = t.at(V4, 0, 1, 5000);
    let server = director.real[0];
    let at_server = |what: &str, flags: u8| {
        director
            .servers
            .receive(what, |packet| packet.goes(client, server) && packet.has(flags))
    };
    let answer = |flags: u8, sequence: u32, acknowledged: u32| -> Result<()> {
        let mut segment = Segment::syn(server, client, sequence).flags(flags);
        segment.acknowledged = acknowledged;
        director.servers.send(&segment.bytes()?)
    };
    // The server closes first, so that no TIME_WAIT of the client's own socket is in the way.
    let socket = start_connect(&director.netns, Some(client), director.vip)?;
    let syn = at_server("the SYN", SYN)?.tcp.context("a SYN is TCP")?;
    answer(SYN | ACK, 100, syn.sequence.wrapping_add(1))?;
    at_server("the ACK", ACK)?;
    answer(FIN | ACK, 101, syn.sequence.wrapping_add(1))?;
    at_server("the ACK of the FIN", ACK)?;
    drop(socket);
    let fin = at_server("the client's FIN", FIN)?.tcp.context("a FIN is TCP")?;
    answer(ACK, 102, fin.sequence.wrapping_add(1))?;
    director.wait_state(client, "TIME_WAIT")?;

    director.replace_server(Server::WeightZero)?;
    director.servers.drain();
    let mut again = None;
    // The old socket has left the table once the last ACK was handled.
    wait_until("the port to be free again", || {
        again = start_connect(&director.netns, Some(client), director.vip).ok();
        Ok(again.is_some())
    })?;
    at_server("the SYN at the old server", SYN)?;
    drop(again);
    t.expect(&[Expected::misdelivered(&director.netns, "ipvs-timewait-reuse", 1)])?;
    if let Some(seen) = t.drop(&director.netns, "ipvs-timewait-reuse")? {
        seen.goes(client, director.vip)?
            .evidence("state", "TIME_WAIT")?
            .evidence("weight", 0)?;
    }
    Ok(Outcome::Passed(
        "sent 1 SYN from the node, droptrace: 1".to_owned(),
    ))
}

/// With expire_nodest_conn=1 the SYN is scheduled anew: nothing is lost.
fn rescheduled(t: &Test, server: Server) -> Result<Outcome> {
    let director = Director::new(t, V4, false)?;
    t.attached(&["ip_vs_leave", "ip_vs_conn_expire_now"])?;
    director.netns.sysctl("net.ipv4.vs.expire_nodest_conn", "1")?;
    t.known();
    let clients: Vec<_> = (0..FLOWS).map(|number| t.at(V4, 0, 2, 5000 + number)).collect();
    for client in &clients {
        director.open(*client)?.close()?;
    }
    director.replace_server(server)?;
    for client in &clients {
        director
            .wire
            .send(&Segment::syn(*client, director.vip, 90_000).bytes()?)?;
        director.servers.receive("the SYN at the new server", |packet| {
            packet.goes(*client, director.real[1]) && packet.has(SYN)
        })?;
    }
    t.expect(&[])?;
    Ok(Outcome::Passed(format!(
        "{FLOWS} SYNs came to the new server, no label"
    )))
}

/// Data of connections whose server was removed.
fn destination_gone(t: &Test, family: IpFamily) -> Result<Outcome> {
    let director = Director::new(t, family, false)?;
    hooked(t)?;
    let clients: Vec<_> = (0..FLOWS)
        .map(|number| t.at(family, 0, 2, 5000 + number))
        .collect();
    for client in &clients {
        director.open(*client)?;
    }
    director.replace_server(Server::Removed)?;
    for client in &clients {
        let mut segment = Segment::syn(*client, director.vip, 2)
            .flags(ACK | PSH)
            .data(b"hello");
        segment.acknowledged = 101;
        director.wire.send(&segment.bytes()?)?;
    }
    let flows = u64::from(FLOWS);
    t.expect(&[Expected::dropped(&director.netns, "ipvs-destination-gone", flows)])?;
    if let Some(seen) = t.drop(&director.netns, "ipvs-destination-gone")? {
        seen.goes(t.at(family, 0, 2, 0), director.vip)?
            .evidence("virtual_service", director.vip.to_string())?
            .evidence("real_server", director.real[0].to_string())?
            .evidence("state", "ESTABLISHED")?
            .evidence("expire_nodest_conn", 0)?
            .remedy_says("expire_nodest_conn=1")?;
    }
    Ok(Outcome::Passed(format!(
        "sent {flows} segments, droptrace: {flows}"
    )))
}

/// SYNs to a service without servers, then to one whose only server has weight 0.
fn no_destination(t: &Test, family: IpFamily) -> Result<Outcome> {
    const SENT: u64 = 2;
    let counter = match family {
        V4 => "IcmpOutDestUnreachs",
        V6 => "Icmp6OutDestUnreachs",
    };
    let director = Director::bare(t, family, false)?;
    director.ipvsadm(&format!("-A -t {} -s rr", director.vip))?;
    t.attached(&["ip_vs_leave"])?;
    t.known();
    let before = Counters::read(&director.netns)?;
    let send = |first_port: u16| -> Result<()> {
        for number in 0..SENT as u16 {
            // A client each, so that the limit of ICMP errors per host is not met.
            let client = t.at(family, 0, 10 + number as u8, first_port);
            director
                .wire
                .send(&Segment::syn(client, director.vip, 1).bytes()?)?;
        }
        Ok(())
    };
    send(5000)?;
    wait_until("port unreachable messages", || {
        Ok(grown(&director.netns, &before, counter)? >= SENT)
    })?;
    t.expect(&[Expected::rejected(&director.netns, "ipvs-no-destination", SENT)])?;
    if let Some(seen) = t.drop(&director.netns, "ipvs-no-destination")? {
        seen.flags("S")?
            .counter(counter)?
            .evidence("virtual_service", director.vip.to_string())?
            .evidence("scheduler", "rr")?
            .evidence("real_servers", 0)?;
    }
    director.ipvsadm(&format!("-a -t {} -r {} -m -w 0", director.vip, director.real[0]))?;
    t.known();
    send(6000)?;
    wait_until("port unreachable messages", || {
        Ok(grown(&director.netns, &before, counter)? >= 2 * SENT)
    })?;
    t.expect(&[Expected::rejected(
        &director.netns,
        "ipvs-no-destination",
        2 * SENT,
    )])?;
    if let Some(seen) = t.drop_where(&director.netns, "ipvs-no-destination", |drop| {
        drop.sport == Some(6000)
    })? {
        seen.evidence("real_servers", 1)?.evidence("weight_zero", 1)?;
    }
    Ok(Outcome::Passed(format!("{counter} and droptrace: {}", 2 * SENT)))
}

/// SYNs and datagrams to a port of the virtual address that has no service.
fn no_service(t: &Test, family: IpFamily) -> Result<Outcome> {
    const SENT: u64 = 3;
    let director = Director::new(t, family, false)?;
    t.known();
    let closed = SocketAddr::new(director.vip.ip(), 81);
    let before = Counters::read(&director.netns)?;
    for number in 0..SENT as u16 {
        let client = t.at(family, 0, 2, 5000 + number);
        director.wire.send(&Segment::syn(client, closed, 1).bytes()?)?;
        director
            .wire
            .receive("a RST", |packet| packet.goes(closed, client) && packet.has(RST))?;
    }
    let resets = grown(&director.netns, &before, "TcpOutRsts")?;
    ensure!(resets == SENT, "TcpOutRsts grew by {resets}, not {SENT}");
    let counter = match family {
        V4 => "UdpNoPorts",
        V6 => "Udp6NoPorts",
    };
    for number in 0..SENT as u16 {
        let client = t.at(family, 0, 2, 5000 + number);
        director.wire.send(&udp(client, closed, b"hello")?)?;
    }
    wait_until("refused datagrams", || {
        Ok(grown(&director.netns, &before, counter)? >= SENT)
    })?;
    t.expect(&[Expected::rejected(&director.netns, "vip-no-service", 2 * SENT)])?;
    if let Some(seen) = t.drop_where(&director.netns, "vip-no-service", |drop| {
        drop.protocol.as_deref() == Some("tcp")
    })? {
        seen.goes(t.at(family, 0, 2, 0), closed)?
            .evidence("destination", closed.to_string())?
            .evidence("holder", "kube-ipvs0")?
            .evidence("holder_kind", "dummy")?
            .evidence("segment", "syn")?
            .evidence("services", serde_json::json!(["80/tcp"]))?;
    }
    Ok(Outcome::Passed(format!(
        "TcpOutRsts + {counter} and droptrace: {}",
        2 * SENT
    )))
}
