//! Context against the running kernel, in network namespaces that the tests
//! make. Without root they say so and test nothing.

use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use droptrace_common::{EventHeader, FieldId, address_flags};
use nix::sys::socket::{Backlog, listen};

use super::{
    Context, LostSyns, PodRequest, Pods, ScopeRequest, addresses::whole, publish::tests::Held, runtime::fake,
};
use crate::diagnose::{Facts, Need, RawEvent};

/// How long a test waits for what takes milliseconds where CPU is to be had.
const PATIENCE: Duration = Duration::from_mins(1);

/// A netns of the test's own: a thread in it, and a process so that it is found.
struct Lab {
    work: mpsc::Sender<Box<dyn FnOnce() + Send>>,
    process: Child,
    inode: u32,
}

impl Lab {
    /// `None`, with the reason printed, where namespaces cannot be made.
    fn new() -> Option<Self> {
        let (work, jobs) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let (made, is_made) = mpsc::channel();
        std::thread::spawn(move || {
            if let Err(error) = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET) {
                let _ = made.send(Err(error.to_string()));
                return;
            }
            let process = Command::new("sleep").arg("120").stdin(Stdio::null()).spawn();
            let _ = made.send(process.map_err(|error| error.to_string()));
            for job in jobs {
                job();
            }
        });
        match is_made.recv().unwrap() {
            Ok(process) => {
                let inode = super::resolve_pid(process.id()).unwrap().inode;
                let lab = Self { work, process, inode };
                lab.ip("link set lo up");
                Some(lab)
            }
            Err(error) => {
                eprintln!("skipped: a network namespace of its own needs root ({error})");
                None
            }
        }
    }

    fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, is_done) = mpsc::channel();
        self.work
            .send(Box::new(move || {
                let _ = done.send(job());
            }))
            .unwrap();
        is_done.recv().unwrap()
    }

    fn ip(&self, arguments: &str) {
        assert!(self.try_ip(arguments), "ip {arguments}");
    }

    fn try_ip(&self, arguments: &str) -> bool {
        let arguments: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
        self.run(move || Command::new("ip").args(arguments).status().unwrap().success())
    }

    fn listener(&self, address: &'static str, backlog: i32) -> TcpListener {
        self.run(move || {
            let listener = TcpListener::bind(address).unwrap();
            listen(&listener, Backlog::new(backlog).unwrap()).unwrap();
            listener
        })
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start(request: &ScopeRequest) -> (Context, Held) {
    let held = Held::default();
    (
        Context::start(request, Pods::default(), Box::new(held.clone())).unwrap(),
        held,
    )
}

/// Facts; asked again, as the next event would, where a machine short of CPU did not answer in time.
fn facts(context: &Context, event: &RawEvent, needs: &[Need]) -> Facts {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let start = Instant::now();
    loop {
        let found = runtime.block_on(context.facts(event, Facts::default(), needs));
        let late = |reason: &String| reason.starts_with("no answer within");
        if start.elapsed() > PATIENCE || !found.missing.values().any(late) {
            return *found;
        }
    }
}

/// A TCP or UDP packet that came by device 1.
fn packet(netns: u32, protocol: u8, from: SocketAddr, to: SocketAddr) -> RawEvent {
    let mut bytes = Vec::new();
    match (from.ip(), to.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            bytes.extend_from_slice(&[0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0]);
            bytes.extend_from_slice(&source.octets());
            bytes.extend_from_slice(&destination.octets());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            bytes.extend_from_slice(&[0x60, 0, 0, 0, 0, 20, protocol, 64]);
            bytes.extend_from_slice(&source.octets());
            bytes.extend_from_slice(&destination.octets());
        }
        _ => panic!("two families"),
    }
    bytes.extend_from_slice(&from.port().to_be_bytes());
    bytes.extend_from_slice(&to.port().to_be_bytes());
    bytes.resize(bytes.len() + 16, 0);
    let header = EventHeader {
        netns,
        ifindex: 1,
        iif: 1,
        segments: 1,
        ..EventHeader::default()
    };
    RawEvent::new(header, &bytes, &[])
}

fn soon(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if holds() {
            return start.elapsed();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("not within {PATIENCE:?}: {what}");
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn a_device_is_asked_for_what_packets_meet_there() {
    let Some(lab) = Lab::new() else { return };
    let (context, _) = start(&ScopeRequest::default());
    let needs = [
        Need::Link,
        Need::NeighbourTable,
        Need::Sysctl("net.{ip}.neigh.{on}.unres_qlen_bytes"),
        Need::HostSysctl("net.core.somaxconn"),
    ];
    for (from, to, name) in [
        (
            "192.0.2.9:555",
            "127.0.0.1:8080",
            "net.ipv4.neigh.lo.unres_qlen_bytes",
        ),
        (
            "[2001:db8::9]:555",
            "[::1]:8080",
            "net.ipv6.neigh.lo.unres_qlen_bytes",
        ),
    ] {
        let found = facts(
            &context,
            &packet(lab.inode, 17, address(from), address(to)),
            &needs,
        );
        let link = found.link.unwrap();
        assert!(link.name == "lo" && link.up && link.filters.is_empty() && link.xdp.is_none());
        assert!(found.neighbour_table.unwrap().limit > 0);
        assert!(found.sysctls.contains_key(name), "{:?}", found.missing);
    }
}

#[test]
fn a_listener_is_found_with_its_limit_and_owner() {
    let Some(lab) = Lab::new() else { return };
    let (context, _) = start(&ScopeRequest::default());
    let v4 = lab.listener("0.0.0.0:8080", 7);
    let v6 = lab.listener("[::]:8081", 9);
    let waiting = lab.run(|| TcpStream::connect("127.0.0.1:8080").unwrap());
    let needs = [
        Need::Listener,
        Need::Sysctl("net.core.somaxconn"),
        Need::Sysctl("net.ipv4.conf.{device}.rp_filter"),
        Need::Sysctl("net.no.such_setting"),
        Need::DestinationHolder,
        Need::SourceHolder,
    ];
    let event = packet(lab.inode, 6, address("192.0.2.9:555"), address("127.0.0.1:8080"));
    let facts_v4 = facts(&context, &event, &needs);
    let listener = facts_v4.listener.unwrap();
    assert_eq!(listener.address, address("0.0.0.0:8080"));
    assert_eq!(
        (listener.queue_length, listener.queue_limit, listener.sharing),
        (1, 7, 1)
    );
    assert_eq!(listener.owner.unwrap().pid, std::process::id());
    assert_eq!(facts_v4.devices[&1], "lo");
    assert!(facts_v4.sysctls.contains_key("net.core.somaxconn"));
    assert!(facts_v4.sysctls.contains_key("net.ipv4.conf.lo.rp_filter"));
    assert!(facts_v4.missing["net.no.such_setting"].contains("does not exist"));
    assert_eq!(facts_v4.destination_holder.unwrap().unwrap().device, "lo");
    assert_eq!(facts_v4.source_holder, Some(None));

    let event = packet(lab.inode, 6, address("[2001:db8::9]:555"), address("[::1]:8081"));
    let listener = facts(&context, &event, &[Need::Listener]).listener.unwrap();
    assert_eq!(
        (listener.address, listener.queue_limit),
        (address("[::]:8081"), 9)
    );
    // The kernel takes a dual-stack listener for IPv4.
    let event = packet(lab.inode, 6, address("192.0.2.9:555"), address("127.0.0.1:8081"));
    let listener = facts(&context, &event, &[Need::Listener]).listener.unwrap();
    assert_eq!(listener.queue_limit, 9);

    let event = packet(lab.inode, 6, address("192.0.2.9:555"), address("127.0.0.1:8082"));
    let nothing = facts(&context, &event, &[Need::Listener, Need::Conntrack]);
    match nothing.conntrack {
        Some(usage) => assert!(usage.max > 0 && usage.count <= usage.max, "{usage:?}"),
        None => assert!(
            nothing.missing["conntrack"].contains("nf_conntrack"),
            "{:?}",
            nothing.missing
        ),
    }
    assert_eq!(nothing.listener, None);
    assert!(
        nothing.missing["listener"].contains("nothing listens"),
        "{:?}",
        nothing.missing
    );
    drop((v4, v6, waiting));
}

#[test]
fn the_kernels_inode_picks_among_listeners_that_share_a_port() {
    let Some(lab) = Lab::new() else { return };
    let (context, _) = start(&ScopeRequest::default());
    let listeners: Vec<TcpListener> = (0..3)
        .map(|number| {
            lab.run(move || {
                use nix::sys::socket::{
                    AddressFamily, SockFlag, SockType, SockaddrIn, bind, setsockopt, socket, sockopt,
                };
                let fd = socket(
                    AddressFamily::Inet,
                    SockType::Stream,
                    SockFlag::SOCK_CLOEXEC,
                    None,
                )
                .unwrap();
                setsockopt(&fd, sockopt::ReusePort, &true).unwrap();
                bind(fd.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 9000)).unwrap();
                listen(&fd, Backlog::new(10 + number).unwrap()).unwrap();
                TcpListener::from(fd)
            })
        })
        .collect();
    let link = std::fs::read_link(format!("/proc/self/fd/{}", listeners[2].as_raw_fd())).unwrap();
    let inode: u64 = link
        .to_str()
        .and_then(|link| link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok())
        .unwrap();
    let event = packet(lab.inode, 6, address("127.0.0.1:5"), address("127.0.0.1:9000"));
    let event = RawEvent::new(event.header, &event.packet, &[(FieldId::ListenerInode, inode)]);
    let listener = facts(&context, &event, &[Need::Listener]).listener.unwrap();
    assert_eq!(
        (listener.inode, listener.queue_limit, listener.sharing),
        (inode, 12, 3)
    );
}

#[test]
fn the_owner_of_a_packets_socket_is_found() {
    let Some(lab) = Lab::new() else { return };
    let (context, _) = start(&ScopeRequest::default());
    let _server = lab.listener("127.0.0.1:7000", 5);
    let client = lab.run(|| TcpStream::connect("127.0.0.1:7000").unwrap());
    let port = client.local_addr().unwrap();
    let event = packet(lab.inode, 6, address("127.0.0.1:7000"), port);
    let found = facts(&context, &event, &[Need::Owner]);
    assert_eq!(found.owner.as_ref().unwrap().pid, std::process::id(), "{found:?}");

    for bound in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0"] {
        let udp = lab.run(move || UdpSocket::bind(bound).unwrap());
        let mut to = udp.local_addr().unwrap();
        if to.ip().is_unspecified() {
            to.set_ip("127.0.0.1".parse().unwrap());
        }
        let from = SocketAddr::new(to.ip(), 4242);
        let event = packet(lab.inode, 17, from, to);
        let found = facts(&context, &event, &[Need::Owner]);
        assert_eq!(
            found.owner.as_ref().map(|owner| owner.pid),
            Some(std::process::id()),
            "{bound} {found:?}"
        );
    }

    let event = packet(lab.inode, 17, address("127.0.0.1:1"), address("127.0.0.1:2"));
    let found = facts(&context, &event, &[Need::Owner]);
    assert_eq!(found.owner, None);
    assert!(
        found.missing["owner"].contains("no process"),
        "{:?}",
        found.missing
    );
}

#[test]
fn a_pod_that_restarts_is_followed() {
    let (Some(first), Some(second)) = (Lab::new(), Lab::new()) else {
        return;
    };
    for (lab, address) in [(&first, "192.0.2.78"), (&second, "192.0.2.79")] {
        lab.ip(&format!("addr add {address}/32 dev lo"));
    }
    let path = |lab: &Lab| format!("/proc/{}/ns/net", lab.process.id());
    let server = fake::cri(fake::Behaviour::Pods(|| fake::Pods::at(&[])));
    server.set(fake::Pods::at(&[("1", "default", "web", path(&first))]));
    let request = ScopeRequest {
        pods: PodRequest {
            pods: vec!["web".parse().unwrap()],
            socket: Some(server.path().to_owned()),
            ..PodRequest::default()
        },
        ..ScopeRequest::default()
    };
    let pods = Pods::find(&request.pods).unwrap();
    let held = Held::default();
    let context = Context::start(&request, pods, Box::new(held.clone())).unwrap();
    let scope = |text: &str| held.contents().scope.contains_key(&whole(text.parse().unwrap()));
    assert_eq!(context.scoped_netns(), Some([first.inode].into()));
    assert_eq!(held.contents().netns, [first.inode].into());
    assert!(scope("192.0.2.78") && !scope("192.0.2.79"));

    server.set(fake::Pods::at(&[]));
    soon("a pod that ended", || {
        held.contents().netns.is_empty() && !scope("192.0.2.78")
    });
    soon("nothing in scope, which is not all", || {
        context.scoped_netns() == Some([].into())
    });
    server.set(fake::Pods::at(&[
        ("2", "default", "web", path(&second)),
        ("3", "other", "web", path(&first)),
    ]));
    let took = soon("its successor", || {
        held.contents().netns == [second.inode].into() && scope("192.0.2.79")
    });
    eprintln!("the successor was in scope after {took:?}");
    assert!(!scope("192.0.2.78"));
    soon("the new scope", || {
        context.scoped_netns() == Some([second.inode].into())
    });
}

#[test]
fn netns_and_addresses_bear_the_names_of_pods() {
    let (Some(web), Some(other)) = (Lab::new(), Lab::new()) else {
        return;
    };
    web.ip("addr add 192.0.2.80/32 dev lo");
    let path = |lab: &Lab| format!("/proc/{}/ns/net", lab.process.id());
    let server = fake::cri(fake::Behaviour::Pods(|| fake::Pods::at(&[])));
    server.set(fake::Pods::at(&[("1", "default", "web", path(&web))]).with_address("192.0.2.80"));
    let request = PodRequest {
        socket: Some(server.path().to_owned()),
        ..PodRequest::default()
    };
    // Nothing is named: nobody waits for names.
    let pods = Pods::find(&request).unwrap();
    let context = Context::start(&ScopeRequest::default(), pods, Box::new(Held::default())).unwrap();
    assert_eq!(context.scoped_netns(), None);
    soon("the name of the pod", || !context.names().is_empty());
    let name = Some("default/web".to_owned());
    let found = |netns| {
        let event = packet(netns, 17, address("192.0.2.80:1000"), address("192.0.2.81:2000"));
        let found = facts(&context, &event, &[]);
        (found.pod, found.src_name, found.dst_name)
    };
    assert_eq!(found(web.inode), (name.clone(), name.clone(), None), "inside");
    match super::resolve_pid(1) {
        Ok(host) => assert_eq!(found(host.inode), (None, name, None), "on the host"),
        Err(error) => eprintln!("skipped in part: {error}"),
    }
    assert_eq!(
        found(other.inode),
        (None, None, None),
        "its addresses may be others'"
    );
    server.set(fake::Pods::at(&[]));
    soon("no name any more", || context.names().is_empty());
    assert_eq!(found(web.inode), (None, None, None));
}

#[test]
fn sets_follow_addresses_devices_and_scope() {
    let Some(lab) = Lab::new() else { return };
    let request = ScopeRequest {
        netns: vec![lab.inode.to_string()],
        addresses: vec!["198.51.100.7".parse().unwrap()],
        ..ScopeRequest::default()
    };
    let (context, held) = start(&request);
    assert_eq!(context.scoped_netns(), Some([lab.inode].into()));
    let inode = lab.inode;
    let flags = |text: &str, bits: u32| {
        let key = (inode, whole(text.parse().unwrap()), 32 + bits);
        held.contents().addresses.get(&key).copied()
    };
    let scope = |text: &str| held.contents().scope.get(&whole(text.parse().unwrap())).copied();
    assert_eq!(flags("127.0.0.1", 128), Some(address_flags::LOCAL));
    assert_eq!(flags("127.0.0.0", 96 + 8), Some(address_flags::LOCAL));
    assert_eq!(held.contents().netns, [inode].into());
    assert_eq!(scope("127.0.0.1"), None);
    assert_eq!(scope("198.51.100.7"), Some(droptrace_common::SCOPED_BY_USER));

    lab.ip("addr add 192.0.2.77/24 dev lo");
    let took = soon("a new address", || {
        flags("192.0.2.77", 128) == Some(address_flags::LOCAL)
    });
    eprintln!("a new address was in the sets {took:?} after `ip addr add` had ended");
    soon("its scope", || {
        scope("192.0.2.77") == Some(droptrace_common::SCOPED_BY_NETNS)
    });
    lab.ip("route add local 10.99.0.0/16 dev lo");
    soon("an AnyIP prefix", || {
        flags("10.99.0.0", 96 + 16) == Some(address_flags::LOCAL)
    });
    lab.ip("addr add 2001:db8::77/128 dev lo nodad");
    soon("an IPv6 address", || {
        flags("2001:db8::77", 128) == Some(address_flags::LOCAL)
    });
    lab.ip("addr del 192.0.2.77/24 dev lo");
    soon("a removed address", || {
        flags("192.0.2.77", 128).is_none() && scope("192.0.2.77").is_none()
    });
    lab.ip("route del local 10.99.0.0/16 dev lo");
    soon("a removed prefix", || flags("10.99.0.0", 96 + 16).is_none());

    if lab.try_ip("link add vip0 type dummy") {
        lab.ip("addr add 10.96.0.10/32 dev vip0");
        soon("a VIP on a dummy device", || {
            flags("10.96.0.10", 128) == Some(address_flags::LOCAL | address_flags::DUMMY)
        });
        lab.ip("link del vip0");
        soon("a removed device", || flags("10.96.0.10", 128).is_none());
    } else {
        eprintln!("skipped in part: this kernel has no dummy devices");
    }

    drop(lab);
    soon("a netns that vanished", || {
        let contents = held.contents();
        !contents.netns.contains(&inode) && contents.addresses.keys().all(|(netns, ..)| *netns != inode)
    });
    // Its last holder is gone: were context to keep it alive, its inode would still be found here.
    assert!(context.namespaces().iter().all(|netns| netns.inode != inode));
}

#[test]
fn a_netns_that_an_event_names_is_found_at_once() {
    let (context, _) = start(&ScopeRequest::default());
    let Some(lab) = Lab::new() else { return };
    let event = packet(lab.inode, 6, address("127.0.0.1:1"), address("127.0.0.1:2"));
    let found = facts(&context, &event, &[Need::DestinationHolder]);
    assert_eq!(
        found.destination_holder.unwrap().unwrap().device,
        "lo",
        "{:?}",
        found.missing
    );

    let event = packet(77, 6, address("127.0.0.1:1"), address("127.0.0.1:2"));
    let found = facts(&context, &event, &[Need::Listener, Need::Conntrack]);
    for name in ["netns_name", "listener", "conntrack"] {
        assert!(
            found.missing[name].contains("network namespace 77"),
            "{:?}",
            found.missing
        );
    }
    let event = packet(0, 6, address("127.0.0.1:1"), address("127.0.0.1:2"));
    let found = facts(&context, &event, &[Need::Owner]);
    assert!(
        found.missing["owner"].contains("does not say"),
        "{:?}",
        found.missing
    );
}

#[test]
fn the_reverse_route_is_the_kernels() {
    let Some(lab) = Lab::new() else { return };
    lab.ip("link add inner type veth peer name outer");
    lab.ip("link set outer up");
    lab.ip("link set inner up");
    lab.ip("addr add 192.0.2.1/24 dev inner");
    lab.ip("route add 198.51.100.0/24 via 192.0.2.254");
    lab.ip("route add blackhole 203.0.113.0/24");
    let (context, _) = start(&ScopeRequest::default());
    let route = |from: &str| {
        let event = packet(
            lab.inode,
            6,
            SocketAddr::new(from.parse().unwrap(), 9),
            address("192.0.2.1:80"),
        );
        let found = facts(&context, &event, &[Need::ReverseRoute]);
        found
            .reverse_route
            .unwrap_or_else(|| panic!("{:?}", found.missing))
    };
    let gateway = route("198.51.100.5");
    assert_eq!(gateway.device.as_deref(), Some("inner"));
    assert_eq!(gateway.gateway, Some("192.0.2.254".parse().unwrap()));
    assert_eq!(gateway.kind, "unicast");
    assert_eq!(route("192.0.2.1").kind, "local");
    assert_eq!(route("203.0.113.5").kind, "blackhole");
    let nowhere = route("8.8.8.8");
    assert_eq!((nowhere.device, nowhere.kind.as_str()), (None, "unreachable"));
}

#[test]
fn the_route_of_a_packet_that_came_by_a_device_is_the_kernels() {
    const INNER: u32 = 10;
    let Some(lab) = Lab::new() else { return };
    lab.ip(&format!("link add inner index {INNER} type veth peer name outer"));
    lab.ip("link add beyond mtu 1300 type veth peer name far");
    for device in ["inner", "outer", "beyond", "far"] {
        lab.ip(&format!("link set {device} up"));
    }
    lab.ip("addr add 192.0.2.1/24 dev inner");
    lab.ip("addr add 198.51.100.1/24 dev beyond");
    lab.ip("route add 203.0.113.0/25 via 198.51.100.9 mtu 1280");
    lab.ip("route add prohibit 203.0.113.128/25");
    // The netns of the thread that opens it.
    if let Err(error) = lab.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")) {
        return eprintln!("skipped: forwarding cannot be turned on here ({error})");
    }
    let (context, _) = start(&ScopeRequest::default());
    let route = |to: &str| {
        let event = packet(
            lab.inode,
            6,
            address("192.0.2.5:9"),
            SocketAddr::new(to.parse().unwrap(), 80),
        );
        let header = EventHeader {
            ifindex: INNER,
            iif: INNER,
            ..event.header
        };
        let event = RawEvent::new(header, &event.packet, &[]);
        let found = facts(&context, &event, &[Need::Route]);
        found.route.unwrap_or_else(|| panic!("{:?}", found.missing))
    };
    let device = route("198.51.100.7");
    assert_eq!(device.device.as_deref(), Some("beyond"));
    assert_eq!((device.mtu, device.mtu_of_route), (Some(1300), false));
    let own = route("203.0.113.5");
    assert_eq!(own.gateway, Some("198.51.100.9".parse().unwrap()));
    assert_eq!((own.mtu, own.mtu_of_route), (Some(1280), true));
    assert_eq!(route("203.0.113.200").kind, "prohibit");
}

#[test]
fn ten_thousand_events_of_one_listener_cost_next_to_nothing() {
    let Some(lab) = Lab::new() else { return };
    let (context, _) = start(&ScopeRequest::default());
    let _listener = lab.listener("127.0.0.1:8080", 7);
    let event = packet(lab.inode, 6, address("127.0.0.1:5"), address("127.0.0.1:8080"));
    let needs = [Need::Listener, Need::Sysctl("net.core.somaxconn")];
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let started = Instant::now();
    let labelled = runtime.block_on(async {
        let mut labelled = 0;
        for _ in 0..10_000 {
            let found = context.facts(&event, Facts::default(), &needs).await;
            labelled += u32::from(found.listener.is_some_and(|listener| listener.owner.is_some()));
        }
        labelled
    });
    let took = started.elapsed();
    eprintln!("facts for 10,000 events took {took:?}");
    assert_eq!(labelled, 10_000);
    // An emulated guest takes fifty times as long as a real host.
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn syns_sent_again_are_counted_where_no_answer_comes() {
    let Some(lab) = Lab::new() else { return };
    lab.ip("link add inner type veth peer name outer");
    lab.ip("link set outer up");
    lab.ip("link set inner up");
    lab.ip("addr add 192.0.2.1/24 dev inner");
    lab.ip("neigh add 192.0.2.254 lladdr 02:00:00:00:00:01 dev inner");
    let (context, _) = start(&ScopeRequest::default());
    // The first look is where counting starts.
    std::thread::sleep(Duration::from_millis(100));
    let connect = || {
        let _ = TcpStream::connect_timeout(&address("192.0.2.254:81"), PATIENCE);
    };
    lab.work.send(Box::new(connect)).unwrap();
    soon("a retransmitted SYN", || {
        !context.syn_unanswered(&LostSyns::default()).is_empty()
    });
    let unanswered = context.syn_unanswered(&LostSyns::default());
    let [one] = unanswered.as_slice() else {
        panic!("{unanswered:?}");
    };
    assert_eq!(
        (one.netns, one.dst, one.dport, one.interface.as_deref()),
        (
            lab.inode,
            Some("192.0.2.254".parse().unwrap()),
            Some(81),
            Some("inner")
        )
    );
    assert!((1..=6).contains(&one.retransmissions), "{one:?}");
}

#[test]
fn ipvs_services_and_their_servers_are_followed() {
    let Some(lab) = Lab::new() else { return };
    if Command::new("ipvsadm").arg("--version").output().is_err() {
        eprintln!("skipped: ipvsadm is not installed");
        return;
    }
    let ipvsadm = |lab: &Lab, arguments: &str| {
        let arguments: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
        let status = lab.run(move || Command::new("ipvsadm").args(arguments).status());
        status.is_ok_and(|status| status.success())
    };
    let (context, held) = start(&ScopeRequest::default());
    let changes = context.ipvs_entry_hook_changes();
    assert!(!context.ipvs_needs_entry_hook());
    if !ipvsadm(&lab, "-A -t 10.96.0.10:80 -s rr") {
        eprintln!("skipped: this kernel has no IPVS");
        return;
    }
    assert!(ipvsadm(&lab, "-a -t 10.96.0.10:80 -r 10.0.0.2:8080 -m -w 3"));
    assert!(ipvsadm(&lab, "-A -u [2001:db8::10]:53 -s rr"));
    assert!(ipvsadm(
        &lab,
        "-a -u [2001:db8::10]:53 -r [2001:db8::2]:5353 -m -w 0"
    ));
    assert!(ipvsadm(&lab, "-A -f 7 -s rr"));
    let vip = whole("10.96.0.10".parse().unwrap());
    let vip6 = whole("2001:db8::10".parse().unwrap());
    let inode = lab.inode;
    let took = soon("two services", || {
        held.contents().services == [(inode, vip, 80, 6), (inode, vip6, 53, 17)].into()
    });
    eprintln!("IPVS services were in the sets {took:?} after they were added");
    let flags = |address| held.contents().addresses.get(&(inode, address, 160)).copied();
    soon("their addresses", || {
        [vip, vip6].map(flags) == [Some(address_flags::IPVS); 2]
    });
    soon("the need of the entry hook", || context.ipvs_needs_entry_hook());
    assert!(changes.has_changed().unwrap());

    let event = packet(lab.inode, 6, address("192.0.2.9:555"), address("10.96.0.10:81"));
    let services = facts(&context, &event, &[Need::IpvsServices])
        .ipvs_services
        .unwrap();
    let [service] = services.as_slice() else {
        panic!("{services:?}");
    };
    assert_eq!(
        (service.port, service.protocol, service.scheduler.as_str()),
        (80, 6, "rr")
    );
    let [server] = service.destinations.as_slice() else {
        panic!("{service:?}");
    };
    assert_eq!(
        (server.address, server.port, server.weight),
        ("10.0.0.2".parse().unwrap(), 8080, 3)
    );
    let event = packet(
        lab.inode,
        17,
        address("[2001:db8::9]:5"),
        address("[2001:db8::10]:53"),
    );
    let services = facts(&context, &event, &[Need::IpvsServices])
        .ipvs_services
        .unwrap();
    assert_eq!(services[0].destinations[0].weight, 0);
    assert_eq!(
        services[0].destinations[0].address,
        "2001:db8::2".parse::<IpAddr>().unwrap()
    );

    lab.run(|| std::fs::write("/proc/sys/net/ipv4/vs/expire_nodest_conn", "1").unwrap());
    soon("the hook to be needless", || !context.ipvs_needs_entry_hook());
    assert!(ipvsadm(&lab, "-C"));
    soon("no services", || {
        held.contents().services.is_empty() && flags(vip).is_none()
    });
}

#[test]
#[ignore = "makes 500 network namespaces, which takes half a minute"]
fn five_hundred_namespaces_are_watched_at_little_cost() {
    let Some(lab) = Lab::new() else { return };
    let mut processes: Vec<Child> = (0..500)
        .map(|_| {
            Command::new("unshare")
                .args(["-n", "sleep", "300"])
                .spawn()
                .unwrap()
        })
        .collect();
    std::thread::sleep(Duration::from_secs(2));
    let started = Instant::now();
    let (context, held) = start(&ScopeRequest::default());
    eprintln!(
        "{} namespaces after {:?}",
        context.namespaces().len(),
        started.elapsed()
    );
    assert!(context.namespaces().len() >= 501);
    lab.ip("addr add 192.0.2.77/24 dev lo");
    let key = (lab.inode, whole("192.0.2.77".parse().unwrap()), 160);
    let took = soon("a new address", || held.contents().addresses.contains_key(&key));
    eprintln!("a new address was in the sets {took:?} after `ip addr add` had ended");
    let before = cpu_time();
    std::thread::sleep(Duration::from_secs(10));
    eprintln!(
        "10 s of watching took {:?} of CPU",
        cpu_time().saturating_sub(before)
    );
    eprintln!(
        "descriptors: {}",
        std::fs::read_dir("/proc/self/fd").unwrap().count()
    );
    for process in &mut processes {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    soon("their end", || context.namespaces().len() < 50);
    assert!(context.problems().is_empty(), "{:?}", context.problems());
}

fn cpu_time() -> Duration {
    use nix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).unwrap().into()
}
