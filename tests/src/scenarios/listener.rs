//! Listening sockets: accept queue, SYN queue, and what else refuses a SYN.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::ensure;
use socket2::Socket;

use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Netns, Outcome, Result, Scenario, Test,
    counters::grown,
    sockets::{accept_queue, connect, listen, start_connect, wait_until},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("accept-queue-full-syn-v4", |t| accept_queue_syn(t, V4)).family(),
    Scenario::new("accept-queue-full-syn-v6", |t| accept_queue_syn(t, V6)),
];

const PORT: u16 = 8080;

/// A server and a client netns, joined by a veth pair `wire`; server is host 1, client is host 2 of subnet 0.
struct Pair {
    server: Arc<Netns>,
    client: Arc<Netns>,
    address: SocketAddr,
}

fn pair(t: &Test, family: IpFamily) -> Result<Pair> {
    let server = t.netns("server")?;
    let client = t.netns("client")?;
    server.veth("wire", &client, "wire")?;
    server.address("wire", &t.net(family, 0, 1))?;
    client.address("wire", &t.net(family, 0, 2))?;
    Ok(Pair {
        server,
        client,
        address: t.at(family, 0, 1, PORT),
    })
}

/// Connects until the accept queue holds one more than its limit.
fn fill(pair: &Pair, limit: u64) -> Result<Vec<std::net::TcpStream>> {
    let mut connections = Vec::new();
    for _ in 0..=limit {
        connections.push(connect(&pair.client, None, pair.address)?);
    }
    // connect() returns when the SYN-ACK came; the last ACK may still be under way.
    wait_until("a full accept queue", || {
        Ok(accept_queue(&pair.server, pair.address)? == limit + 1)
    })?;
    Ok(connections)
}

/// Sends this many first SYNs and waits until the listener has refused as many; gives how many it refused in all.
fn refused(pair: &Pair, before: &Counters, so_far: u64, attempts: u64) -> Result<u64> {
    let mut sockets: Vec<Socket> = Vec::new();
    for _ in 0..attempts {
        sockets.push(start_connect(&pair.client, None, pair.address)?);
    }
    wait_until("refused SYNs", || {
        Ok(grown(&pair.server, before, "TcpExtListenOverflows")? >= so_far + attempts)
    })?;
    drop(sockets);
    // A SYN sent again before its socket was closed may still be under way.
    std::thread::sleep(Duration::from_millis(100));
    let now = Counters::read(&pair.server)?;
    let overflows = now.since(before, "TcpExtListenOverflows");
    ensure!(
        now.since(before, "TcpExtListenDrops") == overflows,
        "ListenDrops grew by {}, ListenOverflows by {overflows}",
        now.since(before, "TcpExtListenDrops")
    );
    Ok(overflows)
}

/// Limit 128, then somaxconn raised without a restart, then the limit that a restart brings.
fn accept_queue_syn(t: &Test, family: IpFamily) -> Result<Outcome> {
    let pair = pair(t, family)?;
    let before = Counters::read(&pair.server)?;
    pair.server.sysctl("net.core.somaxconn", "128")?;
    let listener = listen(&pair.server, pair.address, 1024)?;
    let connections = fill(&pair, 128)?;

    let first = refused(&pair, &before, 0, 5)?;
    t.expect(&[Expected::dropped(&pair.server, "accept-queue-full", first)])?;
    if let Some(seen) = t.drop(&pair.server, "accept-queue-full")? {
        seen.goes(t.at(family, 0, 2, 0), pair.address)?
            .flags("S")?
            .counter("TcpExtListenOverflows")?
            .owned_here()?
            .evidence("stage", "syn")?
            .evidence("listener", pair.address.to_string())?
            .evidence("queue_length", 129)?
            .evidence("queue_limit", 128)?
            .evidence("somaxconn", 128)?
            .evidence("limit_from", "somaxconn")?
            .remedy_says("restart")?;
    }

    pair.server.sysctl("net.core.somaxconn", "511")?;
    let second = refused(&pair, &before, first, 3)?;
    t.expect(&[Expected::dropped(&pair.server, "accept-queue-full", second)])?;
    let raised = |drop: &droptrace::diagnose::Drop| drop.evidence.get("somaxconn") == Some(&511.into());
    if let Some(seen) = t.drop_where(&pair.server, "accept-queue-full", raised)? {
        seen.evidence("queue_limit", 128)?
            .evidence("limit_from", "application-or-changed-since")?
            .remedy_says("Restart")?;
    }

    drop((connections, listener));
    let listener = listen(&pair.server, pair.address, 1024)?;
    let connections = fill(&pair, 511)?;
    let third = refused(&pair, &before, second, 4)?;
    t.expect(&[Expected::dropped(&pair.server, "accept-queue-full", third)])?;
    let restarted = |drop: &droptrace::diagnose::Drop| drop.evidence.get("queue_limit") == Some(&511.into());
    if let Some(seen) = t.drop_where(&pair.server, "accept-queue-full", restarted)? {
        seen.evidence("queue_length", 512)?
            .evidence("somaxconn", 511)?
            .evidence("limit_from", "somaxconn")?;
    }
    drop((connections, listener));
    Ok(Outcome::Passed(format!(
        "ListenOverflows and droptrace: {first} at limit 128, {} after somaxconn was raised, {} at limit 511",
        second - first,
        third - second
    )))
}
