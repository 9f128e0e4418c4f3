//! Packets that their socket does not take.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd,
};

use anyhow::{Context, ensure};
use droptrace::diagnose::Drop as Labelled;
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::Wire;
use crate::{
    Counters, Expected, IpFamily,
    IpFamily::{V4, V6},
    Netns, Outcome, Result, Scenario, Test,
    actor::{Actor, PACE, Role},
    cgroup::{Cgroup, Way},
    counters::{grown, pages},
    netns::{Restore, modprobe},
    packet::{ACK, Client, PSH, Segment, raw, udp},
    sockets::{self, accept, listen, wait_until},
    stuck::Stuck,
    test::{Kernel, late},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("socket-rcvbuf-full-udp-v4", |t| datagrams(t, V4)).family(),
    Scenario::new("socket-rcvbuf-full-udp-v6", |t| datagrams(t, V6)),
    Scenario::new("socket-rcvbuf-full-raw-v4", |t| raw_copies(t, V4)),
    Scenario::new("socket-rcvbuf-full-raw-v6", |t| raw_copies(t, V6)),
    Scenario::new("socket-backlog-full-v4", |t| backlog(t, V4)),
    Scenario::new("socket-backlog-full-v6", |t| backlog(t, V6)),
    Scenario::new("udp-memory-v4", |t| memory(t, V4)).alone(),
    Scenario::new("udp-memory-v6", |t| memory(t, V6)).alone(),
    Scenario::new("socket-filter-v4", |t| filter(t, V4)),
    Scenario::new("socket-filter-v6", |t| filter(t, V6)),
    Scenario::new("cgroup-bpf-egress-v4", |t| cgroup(t, V4, Way::Egress)),
    Scenario::new("cgroup-bpf-egress-v6", |t| cgroup(t, V6, Way::Egress)),
    Scenario::new("cgroup-bpf-ingress-v4", |t| cgroup(t, V4, Way::Ingress)),
    Scenario::new("cgroup-bpf-ingress-v6", |t| cgroup(t, V6, Way::Ingress)),
    Scenario::new("tcp-md5-v4", |t| md5(t, V4)),
    Scenario::new("tcp-md5-v6", |t| md5(t, V6)),
    Scenario::new("tcp-ao-v4", |t| ao(t, V4)),
    Scenario::new("tcp-ao-v6", |t| ao(t, V6)),
];

const PORT: u16 = 5300;
/// What a socket is asked to hold; the kernel doubles it.
const BUFFER: usize = 4096;
/// More than such a socket holds.
const SENT: u64 = 40;

/// The counter of a family: `UdpRcvbufErrors` or `Udp6RcvbufErrors`.
fn of(family: IpFamily, name: &str) -> String {
    match family {
        V4 => format!("Udp{name}"),
        V6 => format!("Udp6{name}"),
    }
}

/// Sends what the wire is to carry and waits until the netns has received all of it.
fn send(wire: &Wire, family: IpFamily, count: u64, packet: &[u8]) -> Result<()> {
    let (counter, all) = match family {
        V4 => ("IpExtInOctets", count * packet.len() as u64),
        V6 => ("Ip6InReceives", count),
    };
    let before = Counters::read(&wire.netns)?;
    for _ in 0..count {
        wire.tun.send(packet)?;
    }
    wait_until("all packets", || Ok(grown(&wire.netns, &before, counter)? >= all))
}

/// The same one by one: what a busy guest does not answer in time for the first is known for the next.
fn send_slowly(wire: &Wire, family: IpFamily, count: u64, packet: &[u8]) -> Result<()> {
    for _ in 0..count {
        send(wire, family, 1, packet)?;
        std::thread::sleep(PACE);
    }
    Ok(())
}

/// Datagrams to a socket that nobody reads.
fn datagrams(t: &Test, family: IpFamily) -> Result<Outcome> {
    modprobe("udp_diag")?;
    let wire = Wire::new(t, family)?;
    let socket = sockets::udp(&wire.netns, wire.address(PORT))?;
    SockRef::from(&socket).set_recv_buffer_size(BUFFER)?;
    t.known();
    let before = Counters::read(&wire.netns)?;
    send(
        &wire,
        family,
        SENT,
        &udp(wire.peer(3000), wire.address(PORT), &[0; 400])?,
    )?;
    let counter = of(family, "RcvbufErrors");
    wait_until(&counter, || Ok(grown(&wire.netns, &before, &counter)? > 0))?;
    // The last ones may still be on their way from the counter of the wire to that of the socket.
    std::thread::sleep(std::time::Duration::from_millis(300));
    let lost = grown(&wire.netns, &before, &counter)?;
    ensure!(
        lost == grown(&wire.netns, &before, &of(family, "InErrors"))?,
        "InErrors grew for other reasons, too"
    );
    t.expect(&[Expected::dropped(&wire.netns, "socket-rcvbuf-full", lost)])?;
    if let Some(seen) = t.drop(&wire.netns, "socket-rcvbuf-full")? {
        seen.goes(wire.peer(3000), wire.address(PORT))?
            .counter(&counter)?
            .owned_here()?
            .evidence("socket", wire.address(PORT).to_string())?
            .evidence("receive_buffer", 2 * BUFFER as u64)?
            .has_evidence("queued")?
            .has_evidence("socket_drops")?
            .has_evidence("rmem_max")?
            .evidence("limit_from", "application")?;
    }
    drop(socket);
    Ok(Outcome::Passed(format!("{counter} and droptrace: {lost}")))
}

/// Datagrams for a socket that has room, while another one holds more than all may.
fn memory(t: &Test, family: IpFamily) -> Result<Outcome> {
    const LIMIT: u64 = 64;
    const DATAGRAMS: u64 = 5;
    /// A megabyte and more: from 6.0 on each CPU keeps up to one before the host knows of it (`sk_memory_allocated_add`,
    /// include/net/sock.h).
    const HELD: usize = 6 << 20;
    const DATA: [u8; 8000] = [0; 8000];
    modprobe("udp_diag")?;
    let wire = Wire::new(t, family)?;
    let netns = &wire.netns;
    netns.ip(&["link set wire mtu 9000"])?;
    let (holder, reader) = (
        sockets::udp(netns, wire.address(PORT + 1))?,
        sockets::udp(netns, wire.address(PORT))?,
    );
    setsockopt(&holder, RcvBufForce, &(4 * HELD))?;
    t.known();
    let to = |port| udp(wire.peer(3000), wire.address(port), &DATA);
    send(&wire, family, (HELD / DATA.len()) as u64, &to(PORT + 1)?)?;
    wait_until("pages that are held", || Ok(pages("UDP")? > 2 * LIMIT))?;
    let held = pages("UDP")?;
    let restore = Restore::set(
        "net.ipv4.udp_mem",
        &format!("{} {} {LIMIT}", LIMIT / 4, LIMIT / 2),
    )?;
    let before = Counters::read(netns)?;
    send(&wire, family, DATAGRAMS, &to(PORT)?)?;
    let own = of(family, "MemErrors");
    // Since 5.11; all errors before.
    let counter = if before.has(&own) {
        own
    } else {
        of(family, "InErrors")
    };
    wait_until(&counter, || Ok(grown(netns, &before, &counter)? >= DATAGRAMS))?;
    let lost = grown(netns, &before, &counter)?;
    ensure!(lost == DATAGRAMS, "{counter} grew by {lost}, not {DATAGRAMS}");
    if t.kernel().hides_socket() {
        t.expect_without_netns(wire.peer(0).ip(), "udp-memory", lost)?;
    } else {
        t.expect(&[Expected::dropped(netns, "udp-memory", lost)])?;
        if let Some(seen) = t.drop(netns, "udp-memory")? {
            seen.goes(wire.peer(3000), wire.address(PORT))?
                .counter(&counter)?
                .owned_here()?
                .evidence("udp_mem", format!("{}\t{}\t{LIMIT}", LIMIT / 4, LIMIT / 2))?
                .has_evidence("pages")?
                .remedy_says("net.ipv4.udp_mem")?;
        }
    }
    drop(restore);
    drop((holder, reader));
    Ok(Outcome::Passed(format!(
        "{held} pages held, {counter} and droptrace: {lost}"
    )))
}

/// What raw sockets of a netns have lost: the last column of `/proc/net/raw` and `raw6`.
fn lost_by_raw(netns: &Netns) -> Result<u64> {
    let mut lost = 0;
    for file in ["raw", "raw6"] {
        for line in netns.proc_net(file)?.lines().skip(1) {
            let drops = line.split_whitespace().nth(12).context("a column of drops")?;
            lost += drops.parse::<u64>()?;
        }
    }
    Ok(lost)
}

/// Packets of a protocol that only a raw socket takes, which nobody reads.
fn raw_copies(t: &Test, family: IpFamily) -> Result<Outcome> {
    /// For experiments (RFC 3692).
    const PROTOCOL: u8 = 253;
    let wire = Wire::new(t, family)?;
    let (domain, address) = match family {
        V4 => (Domain::IPV4, wire.address(0)),
        V6 => (Domain::IPV6, wire.address(0)),
    };
    let socket = wire.netns.enter(|| {
        let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(i32::from(PROTOCOL))))?;
        socket.bind(&address.into())?;
        socket.set_recv_buffer_size(BUFFER)?;
        Ok(socket)
    })?;
    t.known();
    let ip = |address: SocketAddr| -> IpAddr { address.ip() };
    let packet = raw(ip(wire.peer(0)), ip(wire.address(0)), PROTOCOL, &[0; 400])?;
    send(&wire, family, SENT, &packet)?;
    wait_until("lost copies", || Ok(lost_by_raw(&wire.netns)? > 0))?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    let lost = lost_by_raw(&wire.netns)?;
    // Without a reason the place says no more than that a raw socket did not take it. Newer kernels make no copy for a full
    // socket, and drop the packet itself since nobody else takes it (`raw_v4_input`, net/ipv4/raw.c).
    let cause = match (t.kernel(), family) {
        (Kernel(5, ..=16), _) | (Kernel(6, 1), V6) => "unknown",
        (Kernel(6, 1), V4) => "socket-rcvbuf-full",
        _ => "kernel-reason",
    };
    t.expect(&[Expected::dropped(&wire.netns, cause, lost)])?;
    if cause == "socket-rcvbuf-full"
        && let Some(seen) = t.drop(&wire.netns, cause)?
    {
        seen.goes(wire.peer(0), wire.address(0))?
            .owned_here()?
            .has_evidence("queued")?
            .has_evidence("socket_drops")?;
    }
    drop(socket);
    Ok(Outcome::Passed(format!(
        "drops in /proc/net/raw and {cause}: {lost}"
    )))
}

/// Segments of a connection whose owner is stuck within recv().
fn backlog(t: &Test, family: IpFamily) -> Result<Outcome> {
    const SEGMENTS: u64 = 150;
    let wire = Wire::new(t, family)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    // Inherited by what is accepted.
    listener.set_recv_buffer_size(BUFFER)?;
    listener.set_send_buffer_size(BUFFER)?;
    let mut client = Client::new(wire.peer(3000), wire.address(PORT), 1000, None);
    client.connect(&wire.tun)?;
    let accepted = accept(&listener)?;
    client.send(&wire.tun, ACK | PSH, &[1; 64])?;
    let stuck = Stuck::receiving(&accepted)?;
    t.known();
    let before = Counters::read(&wire.netns)?;
    // The same one each time: the kernel would merge those that follow one another.
    send(
        &wire,
        family,
        SEGMENTS,
        &client.segment(ACK | PSH, &[2; 1000]).bytes()?,
    )?;
    let counter = "TcpExtTCPBacklogDrop";
    wait_until(counter, || Ok(grown(&wire.netns, &before, counter)? > 0))?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    let lost = grown(&wire.netns, &before, counter)?;
    if t.kernel().hides_socket() {
        // Nothing says which netns such a segment was in.
        if let Some(trace) = t.trace() {
            wait_until("the total without a netns", || {
                let counts = trace.counts()?;
                let counted = counts
                    .causes
                    .iter()
                    .filter(|count| count.netns == 0 && count.cause == "socket-backlog-full");
                Ok(counted.map(|count| count.packets).sum::<u64>() >= lost)
            })?;
        }
    } else {
        t.expect(&[Expected::dropped(&wire.netns, "socket-backlog-full", lost)])?;
        if let Some(seen) = t.drop(&wire.netns, "socket-backlog-full")? {
            seen.goes(client.local, client.remote)?
                .counter(counter)?
                .owned_here()?
                .evidence("socket", client.remote.to_string())?
                .evidence("peer", client.local.to_string())?
                .evidence("receive_buffer", 2 * BUFFER as u64)?
                .has_evidence("backlog")?
                .has_evidence("send_buffer")?;
        }
    }
    drop(stuck);
    drop((accepted, listener));
    Ok(Outcome::Passed(format!("TCPBacklogDrop and droptrace: {lost}")))
}

/// Sets an option of a socket.
fn set_option<T>(socket: &impl AsRawFd, level: libc::c_int, option: libc::c_int, value: &T) -> Result<()> {
    // SAFETY: the value has the form that the option takes, and the length is its own.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const *value).cast(),
            libc::socklen_t::try_from(size_of::<T>())?,
        )
    };
    ensure!(
        result == 0,
        "socket option {option}: {}",
        io::Error::last_os_error()
    );
    Ok(())
}

/// Checks the total of what only facts tell apart: what is not known in time on a busy guest stays open.
fn refused(t: &Test, wire: &Wire, cause: &str, packets: u64) -> Result<()> {
    let open = if t.kernel() < Kernel(5, 17) {
        "unknown"
    } else {
        "kernel-reason"
    };
    let mut in_doubt = 0;
    if t.trace().is_some() && open != cause {
        wait_until("all events", || {
            let lines = |cause| t.drops(&wire.netns, cause);
            in_doubt = lines(open).iter().filter(|drop| late(drop)).count() as u64;
            Ok(lines(cause).len() as u64 + in_doubt >= packets)
        })?;
    }
    t.expect(&[
        Expected::dropped(&wire.netns, cause, packets - in_doubt),
        Expected::dropped(&wire.netns, open, in_doubt),
    ])
}

/// Datagrams that the filter of their socket refuses.
fn filter(t: &Test, family: IpFamily) -> Result<Outcome> {
    const REFUSED: u64 = 3;
    let wire = Wire::new(t, family)?;
    let socket = sockets::udp(&wire.netns, wire.address(PORT))?;
    // BPF_RET with 0 bytes.
    let mut refuse = libc::sock_filter {
        code: 0x06,
        jt: 0,
        jf: 0,
        k: 0,
    };
    let program = libc::sock_fprog {
        len: 1,
        filter: &raw mut refuse,
    };
    set_option(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)?;
    t.known();
    let before = Counters::read(&wire.netns)?;
    send_slowly(
        &wire,
        family,
        REFUSED,
        &udp(wire.peer(3000), wire.address(PORT), b"hello")?,
    )?;
    let counter = of(family, "InErrors");
    wait_until(&counter, || Ok(grown(&wire.netns, &before, &counter)? >= REFUSED))?;
    let told = t.kernel() >= Kernel(5, 17);
    let cause = if told { "socket-filter" } else { "unknown" };
    refused(t, &wire, cause, REFUSED)?;
    if told && let Some(seen) = t.drop(&wire.netns, cause)? {
        let knows_socket = !t.kernel().hides_socket();
        seen.goes(wire.peer(3000), wire.address(PORT))?
            .counter(&counter)?
            .owned_here()?
            .evidence("socket", wire.address(PORT).to_string())?
            .evidence("has_filter", knows_socket.then_some(true))?
            .has_evidence("cgroup")?;
    }
    drop(socket);
    Ok(Outcome::Passed(format!("{counter} and {cause}: {REFUSED}")))
}

/// Datagrams that a BPF program refuses, of a cgroup whose socket sends or receives them.
fn cgroup(t: &Test, family: IpFamily, way: Way) -> Result<Outcome> {
    const REFUSED: u64 = 3;
    let wire = Wire::new(t, family)?;
    let mut cgroup = Cgroup::new(&format!("{way:?}-{family:?}"))?;
    let (role, address) = match way {
        Way::Egress => (Role::Send, wire.peer(PORT)),
        Way::Ingress => (Role::Datagrams, wire.address(PORT)),
    };
    let mut actor = Actor::start(&wire.netns, Some(&cgroup), role, address, REFUSED as u32)?;
    cgroup.refuse(way)?;
    t.known();
    let before = Counters::read(&wire.netns)?;
    let mut counted = "EPERM of send()".to_owned();
    match way {
        Way::Egress => {
            let said = actor.go()?;
            ensure!(said == format!("{REFUSED} refused"), "the sender says: {said}");
        }
        Way::Ingress => {
            send_slowly(
                &wire,
                family,
                REFUSED,
                &udp(wire.peer(3000), wire.address(PORT), b"hello")?,
            )?;
            counted = of(family, "InErrors");
            wait_until(&counted, || Ok(grown(&wire.netns, &before, &counted)? >= REFUSED))?;
        }
    }
    // A filter of the socket has the same reason and place: only newer kernels say that it has none.
    let cause = match way {
        Way::Ingress if t.kernel() < Kernel(5, 17) => "unknown",
        Way::Ingress if t.kernel().hides_socket() => "kernel-reason",
        _ => "cgroup-bpf",
    };
    refused(t, &wire, cause, REFUSED)?;
    if cause == "kernel-reason"
        && let Some(seen) = t.drop(&wire.netns, cause)?
    {
        seen.has_evidence("doubt")?;
    }
    if cause == "cgroup-bpf"
        && let Some(seen) = t.drop(&wire.netns, cause)?
    {
        let (name, owner) = match way {
            Way::Egress => ("egress", seen.0.src),
            Way::Ingress => ("ingress", seen.0.dst),
        };
        ensure!(owner == Some(wire.address(0).ip()), "not of this netns: {seen}");
        let programs = seen.0.evidence.get("programs").map(ToString::to_string);
        ensure!(
            late(&seen.0) || programs.is_some_and(|text| text.contains("refuse_all (id ")),
            "the program is not named: {seen}"
        );
        seen.evidence("way", name)?
            .evidence("cgroup", cgroup.name())?
            .remedy_says("bpftool cgroup show")?;
    }
    drop(actor);
    Ok(Outcome::Passed(format!("{counted} and {cause}: {REFUSED}")))
}

/// SYNs of a peer that the listener has a key for: without a signature, with a wrong one, by another key; and signed ones to a
/// listener that has no keys.
fn ao(t: &Test, family: IpFamily) -> Result<Outcome> {
    /// `struct tcp_ao_add`, `TCP_AO_ADD_KEY` (include/uapi/linux/tcp.h, since 6.7).
    #[repr(C, align(8))]
    struct Ao {
        address: libc::sockaddr_storage,
        algorithm: [u8; 64],
        ifindex: i32,
        flags: u32,
        reserved: u16,
        prefix: u8,
        send_id: u8,
        receive_id: u8,
        code_length: u8,
        key_flags: u8,
        key_length: u8,
        key: [u8; 80],
    }
    const TCP_AO_ADD_KEY: libc::c_int = 38;
    const NUMBER: u8 = 100;
    const CASES: [(&str, &str, u64); 4] = [
        ("missing", "TcpExtTCPAORequired", 2),
        ("wrong", "TcpExtTCPAOBad", 3),
        ("unknown-key", "TcpExtTCPAOKeyNotFound", 4),
        ("unexpected", "TcpExtTCPAOKeyNotFound", 5),
    ];
    let wire = Wire::new(t, family)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let keyless = listen(&wire.netns, wire.address(PORT + 1), 16)?;
    let peer = socket2::SockAddr::from(SocketAddr::new(wire.peer(0).ip(), 0));
    // SAFETY: any bytes are a key.
    let mut key: Ao = unsafe { std::mem::zeroed() };
    // SAFETY: the address is shorter than the place for it.
    unsafe {
        std::ptr::copy_nonoverlapping(
            peer.as_ptr().cast::<u8>(),
            (&raw mut key.address).cast::<u8>(),
            peer.len() as usize,
        );
    }
    key.algorithm[..10].copy_from_slice(b"hmac(sha1)");
    key.prefix = match family {
        V4 => 32,
        V6 => 128,
    };
    (key.send_id, key.receive_id) = (NUMBER, NUMBER);
    key.key_length = 6;
    key.key[..6].copy_from_slice(b"secret");
    if let Err(error) = set_option(&listener, libc::IPPROTO_TCP, TCP_AO_ADD_KEY, &key) {
        let unknown = io::Error::from_raw_os_error(libc::ENOPROTOOPT).to_string();
        ensure!(error.to_string().ends_with(&unknown), error);
        return Ok(Outcome::Skipped("this kernel is built without TCP-AO".to_owned()));
    }
    let before = Counters::read(&wire.netns)?;
    let mut port = 3000;
    for (what, _, sent) in CASES {
        for _ in 0..sent {
            port += 1;
            let syn = |to| Segment::syn(wire.peer(port), wire.address(to), 1);
            let segment = match what {
                "missing" => syn(PORT),
                "wrong" => syn(PORT).authentication(NUMBER),
                "unknown-key" => syn(PORT).authentication(NUMBER + 1),
                _ => syn(PORT + 1).authentication(NUMBER),
            };
            wire.tun.send(&segment.bytes()?)?;
        }
    }
    for (_, counter, _) in CASES {
        let of_counter = CASES.iter().filter(|(_, other, _)| *other == counter);
        let expected = of_counter.map(|(.., sent)| sent).sum::<u64>();
        wait_until(counter, || Ok(grown(&wire.netns, &before, counter)? >= expected))?;
        let counted = grown(&wire.netns, &before, counter)?;
        ensure!(counted == expected, "{counter} grew by {counted}, not {expected}");
    }
    let all = CASES.iter().map(|(.., sent)| sent).sum();
    t.expect(&[Expected::dropped(&wire.netns, "tcp-ao", all)])?;
    for (what, counter, _) in CASES {
        let of_case = |drop: &Labelled| drop.evidence["signature"] == what;
        if let Some(seen) = t.drop_where(&wire.netns, "tcp-ao", of_case)? {
            let to = if what == "unexpected" { PORT + 1 } else { PORT };
            seen.goes(wire.peer(0), wire.address(to))?
                .counter(counter)?
                .has_evidence("peer")?;
        }
    }
    drop((listener, keyless));
    Ok(Outcome::Passed(format!(
        "missing 2, wrong 3, unknown key 4, unexpected 5: tcp-ao {all}"
    )))
}

/// SYNs without a signature, of a peer that the listener has a password for.
fn md5(t: &Test, family: IpFamily) -> Result<Outcome> {
    /// `struct tcp_md5sig`, `TCP_MD5SIG` (include/uapi/linux/tcp.h).
    #[repr(C)]
    struct Md5 {
        address: libc::sockaddr_storage,
        flags: u8,
        prefix: u8,
        length: u16,
        ifindex: libc::c_int,
        key: [u8; 80],
    }
    const TCP_MD5SIG: libc::c_int = 14;
    const SENT: u64 = 3;
    let wire = Wire::new(t, family)?;
    let listener = listen(&wire.netns, wire.address(PORT), 16)?;
    let peer = socket2::SockAddr::from(SocketAddr::new(wire.peer(0).ip(), 0));
    let mut key = [0; 80];
    key[..6].copy_from_slice(b"secret");
    let mut password = Md5 {
        // SAFETY: any bytes are an address.
        address: unsafe { std::mem::zeroed() },
        flags: 0,
        prefix: 0,
        length: 6,
        ifindex: 0,
        key,
    };

    // SAFETY: the address is shorter than the place for it.
    unsafe {
        std::ptr::copy_nonoverlapping(
            peer.as_ptr().cast::<u8>(),
            (&raw mut password.address).cast::<u8>(),
            peer.len() as usize,
        );
    }
    set_option(&listener, libc::IPPROTO_TCP, TCP_MD5SIG, &password)?;
    let counter = "TcpExtTCPMD5NotFound";
    let before = Counters::read(&wire.netns)?;
    for number in 0..SENT as u16 {
        wire.tun
            .send(&Segment::syn(wire.peer(3000 + number), wire.address(PORT), 1).bytes()?)?;
    }
    wait_until(counter, || Ok(grown(&wire.netns, &before, counter)? >= SENT))?;
    let told = t.kernel() >= Kernel(5, 17);
    let cause = if told { "tcp-md5" } else { "unknown" };
    t.expect(&[Expected::dropped(&wire.netns, cause, SENT)])?;
    if told && let Some(seen) = t.drop(&wire.netns, cause)? {
        seen.goes(wire.peer(0), wire.address(PORT))?
            .counter(counter)?
            .evidence("signature", "missing")?
            .has_evidence("peer")?;
    }
    drop(listener);
    Ok(Outcome::Passed(format!("{counter} and {cause}: {SENT}")))
}
