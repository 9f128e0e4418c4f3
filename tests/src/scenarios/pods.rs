//! Pods of a real container runtime: scope, restart, names, and a runtime that hangs.

use std::{
    collections::BTreeMap,
    fs,
    net::{SocketAddr, UdpSocket},
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use droptrace::diagnose::{Drop as Labelled, Record};
use nix::sys::signal::Signal;
use socket2::{Domain, Socket, Type};

use crate::{
    Netns, Outcome, Result, Scenario, Test,
    containers::{Containerd, Pod},
    netns::run,
    sockets::{accept_queue, wait_until},
    trace::{PROGRAM, Trace},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("pod-scope", scope).pods(),
    Scenario::new("pod-owner", owner).pods(),
    Scenario::new("pod-restart", restart).pods(),
    Scenario::new("pod-runtime-hangs", runtime_hangs).pods(),
];

const NO_RUNTIME: &str = "needs a guest with a container runtime (`cargo xtask vm --containers`)";
/// A port that nobody listens on, and one that a rule of the host drops.
const CLOSED: u16 = 9;
const REFUSED: u16 = 9001;
/// How soon the successor of a pod is in scope.
const FOLLOWED: Duration = Duration::from_secs(1);
/// How soon a mistake is told.
const TOLD: Duration = Duration::from_secs(2);
/// What starting a program takes in an emulated guest, beside what it does.
const STARTING: Duration = Duration::from_millis(700);

/// Totals of losses: netns and cause → packets.
type Totals = BTreeMap<(u32, String), u64>;

/// Datagrams to a closed port of the pod, sent inside it: as many `no-socket` there.
fn drop_inside(pod: &Pod, count: u64) -> Result<()> {
    let to = SocketAddr::new(pod.address, CLOSED);
    pod.netns.enter(|| {
        let socket = UdpSocket::bind((pod.address, 0))?;
        for _ in 0..count {
            socket.send_to(b"hello", to)?;
        }
        Ok(())
    })
}

/// Datagrams from the host to a port of the pod that a rule of the host drops: as many `netfilter-rule` there.
fn drop_on_host(pod: &Pod, count: u64) -> Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    for _ in 0..count {
        // The sender is told that it may not.
        let sent = socket.send_to(b"hello", SocketAddr::new(pod.address, REFUSED));
        ensure!(sent.is_err(), "the rule let a packet pass");
    }
    Ok(())
}

/// The rule of the host, until this value goes.
struct Rule;

impl Rule {
    fn set() -> Result<Self> {
        run("nft add table ip pods")?;
        let rule = Self;
        run("nft add chain ip pods out { type filter hook output priority 0 ; }")?;
        run(&format!(
            "nft add rule ip pods out udp dport {REFUSED} counter drop"
        ))?;
        Ok(rule)
    }
}

impl Drop for Rule {
    fn drop(&mut self) {
        if let Err(error) = run("nft delete table ip pods") {
            eprintln!("{error:#}");
        }
    }
}

fn host() -> Result<Netns> {
    Netns::of_another(Path::new("/proc/1/ns/net"))
}

fn key(netns: &Netns, cause: &str) -> (u32, String) {
    (netns.inode(), cause.to_owned())
}

fn totals(trace: &Trace) -> Result<Totals> {
    let mut totals = Totals::new();
    for count in trace.counts()?.causes.into_iter().filter(|count| !count.benign) {
        *totals.entry((count.netns, count.cause)).or_default() += count.packets;
    }
    Ok(totals)
}

/// Waits for these totals, and sees that no more come.
fn expect(trace: &Trace, expected: &Totals) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let seen = totals(trace)?;
        if seen == *expected {
            thread::sleep(Duration::from_millis(500));
            let later = totals(trace)?;
            ensure!(later == *expected, "more came: {later:?}");
            return Ok(());
        }
        ensure!(
            Instant::now() < until,
            "expected {expected:?}, droptrace counted {seen:?}"
        );
        thread::sleep(Duration::from_millis(200));
    }
}

/// `--pod` shows a pod's drops, inside and on the host, and nobody else's, with its names.
fn scope(_: &Test) -> Result<Outcome> {
    let Some(containerd) = Containerd::get()? else {
        return Ok(Outcome::Skipped(NO_RUNTIME.to_owned()));
    };
    let _rule = Rule::set()?;
    let host = host()?;
    let (web, db) = (containerd.run_pod("web")?, containerd.run_pod("db")?);
    let of_web = Trace::start(&["--pod", "default/web"])?;
    let of_db = Trace::start(&["-l", "app=db"])?;
    let of_both = Trace::start(&["--pod", "default/*"])?;
    drop_inside(&web, 3)?;
    drop_inside(&db, 5)?;
    drop_on_host(&web, 7)?;
    drop_on_host(&db, 11)?;
    let inside = |pod: &Pod, count| (key(&pod.netns, "no-socket"), count);
    let outside = |count| (key(&host, "netfilter-rule"), count);
    expect(&of_web, &[inside(&web, 3), outside(7)].into())?;
    expect(&of_db, &[inside(&db, 5), outside(11)].into())?;
    expect(&of_both, &[inside(&web, 3), inside(&db, 5), outside(18)].into())?;
    named(&of_web, &web, "default/web")?;
    named(&of_db, &db, "default/db")?;
    for trace in [of_web, of_db, of_both] {
        trace.stop()?;
    }
    containerd.remove(web)?;
    containerd.remove(db)?;
    Ok(Outcome::Passed(
        "two pods, 3 and 5 drops inside, 7 and 11 on the host: each exact".to_owned(),
    ))
}

/// Every drop that was told bears the pod's name, inside as its netns', on the host as its address'.
fn named(trace: &Trace, pod: &Pod, name: &str) -> Result<()> {
    let drops = trace.look(|so_far| so_far.drops.clone());
    ensure!(!drops.is_empty(), "no drop of {name} was told");
    for drop in drops.iter().filter(|drop| !drop.benign) {
        let (of_netns, of_address) = (drop.pod.as_deref(), drop.dst_name.as_deref());
        if drop.netns == Some(pod.netns.inode()) {
            ensure!(of_netns == Some(name), "inside {name}: {drop:?}");
            ensure!(
                drop.container.as_deref() == Some("app"),
                "container of {name}: {drop:?}"
            );
        } else {
            ensure!(of_netns.is_none(), "the host is no pod: {drop:?}");
        }
        ensure!(of_address == Some(name), "address of {name}: {drop:?}");
    }
    Ok(())
}

/// A listener in a container that does not accept: the drop names its pod and container, and `droptrace pods` its full queue.
fn owner(_: &Test) -> Result<Outcome> {
    let Some(containerd) = Containerd::get()? else {
        return Ok(Outcome::Skipped(NO_RUNTIME.to_owned()));
    };
    let pod = containerd.run_pod_with("server", "nc -l -p 80")?;
    let trace = Trace::start(&["--pod", "default/server", "--cause", "accept-queue-full"])?;
    let address = SocketAddr::new(pod.address, 80);
    wait_until("the listener in the pod", || {
        Ok(every(80).iter().any(|at| accept_queue(&pod.netns, *at).is_ok()))
    })?;
    containerd.stop(&pod)?;
    let mut clients = Vec::new();
    for _ in 0..8 {
        let client = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        client.set_nonblocking(true)?;
        // It goes on by itself.
        let _ = client.connect(&address.into());
        clients.push(client);
    }
    let full = |drop: &Labelled| drop.cause == "accept-queue-full" && drop.owner.is_some();
    trace.wait_for("a drop with its owner", Duration::from_secs(30), |so_far| {
        so_far.drops.iter().any(|drop| full(drop))
    })?;
    let drops = trace.look(|so_far| so_far.drops.clone());
    for drop in drops.iter().filter(|drop| full(drop)) {
        let owner = drop.owner.clone().unwrap_or_default();
        ensure!(
            owner.pod.as_deref() == Some("default/server") && owner.container.as_deref() == Some("app"),
            "the owner runs in the pod: {drop:?}"
        );
    }
    let listed = Command::new(PROGRAM).args(["pods", "--json"]).output()?;
    ensure!(
        listed.status.success(),
        "pods: {}",
        String::from_utf8_lossy(&listed.stderr)
    );
    let picture: serde_json::Value = serde_json::from_slice(&listed.stdout)?;
    let pods = picture["pods"].as_array().context("no list of pods")?;
    let found = pods.iter().find(|each| each["pod"] == "default/server");
    let found = found.with_context(|| format!("the pod is not in {picture}"))?;
    ensure!(found["netns"] == pod.netns.inode(), "netns of {found}");
    ensure!(
        found["addresses"][0] == pod.address.to_string(),
        "addresses of {found}"
    );
    ensure!(found["containers"][0] == "app", "containers of {found}");
    ensure!(
        found["counters"]["TcpExtListenOverflows"]
            .as_u64()
            .is_some_and(|count| count > 0),
        "counters of {found}"
    );
    ensure!(
        found["listeners_near_limit"]
            .as_array()
            .is_some_and(|all| all.len() == 1),
        "listeners of {found}"
    );
    trace.stop()?;
    containerd.remove(pod)?;
    Ok(Outcome::Passed(format!(
        "{} drops, each with pod and container of the owner",
        drops.len()
    )))
}

/// Every address of each family, with a port.
fn every(port: u16) -> [SocketAddr; 2] {
    [
        SocketAddr::from(([0; 4], port)),
        SocketAddr::from(([0u16; 8], port)),
    ]
}

/// A pod that ends and is started anew during a capture: the drops of both are in it.
fn restart(_: &Test) -> Result<Outcome> {
    let Some(containerd) = Containerd::get()? else {
        return Ok(Outcome::Skipped(NO_RUNTIME.to_owned()));
    };
    let file = Path::new("/tmp/pods.pcapng");
    let first = containerd.run_pod("web")?;
    let mut capture = Command::new(PROGRAM)
        .args(["capture", "--pod", "default/web", "-o"])
        .arg(file)
        .stdin(Stdio::null())
        .spawn()?;
    wait_until("the capture", || {
        Ok(fs::metadata(file).is_ok_and(|file| file.len() > 0))
    })?;
    thread::sleep(Duration::from_secs(1));
    drop_inside(&first, 3)?;
    thread::sleep(Duration::from_secs(1));
    let old = first.netns.inode();
    containerd.remove(first)?;
    let second = containerd.run_pod("web")?;
    let other = containerd.run_pod("other")?;
    thread::sleep(FOLLOWED);
    drop_inside(&second, 4)?;
    drop_inside(&other, 6)?;
    thread::sleep(Duration::from_secs(2));
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(i32::try_from(capture.id())?),
        Signal::SIGINT,
    )?;
    let ended = capture.wait()?;
    ensure!(ended.success(), "capture ended with {ended}");
    let seen = shown(file)?;
    let mut expected: Vec<(Option<u32>, u64)> = vec![(Some(old), 3), (Some(second.netns.inode()), 4)];
    // The kernel may give the number again.
    if old == second.netns.inode() {
        expected = vec![(Some(old), 7)];
    }
    let mut packets: BTreeMap<Option<u32>, u64> = BTreeMap::new();
    for drop in &seen {
        ensure!(
            drop.pod.as_deref() == Some("default/web"),
            "not of the pod: {drop:?}"
        );
        *packets.entry(drop.netns).or_default() += drop.packets;
    }
    ensure!(
        packets == expected.iter().copied().collect(),
        "expected {expected:?}, the capture has {packets:?}"
    );
    fs::remove_file(file)?;
    containerd.remove(second)?;
    containerd.remove(other)?;
    Ok(Outcome::Passed(format!(
        "3 drops before, 4 of the pod that had the name {} s later",
        FOLLOWED.as_secs()
    )))
}

/// The losses of a capture.
fn shown(file: &Path) -> Result<Vec<Labelled>> {
    let output = Command::new(PROGRAM)
        .args(["show", "--json"])
        .arg(file)
        .output()?;
    ensure!(output.status.success(), "show ended with {}", output.status);
    let lines = String::from_utf8(output.stdout)?;
    let records = lines
        .lines()
        .map(serde_json::from_str)
        .collect::<serde_json::Result<Vec<Record>>>()?;
    let losses = records.into_iter().filter_map(|record| match record {
        Record::Drop(drop) if !drop.benign => Some(*drop),
        _ => None,
    });
    Ok(losses.collect())
}

/// A run that is refused, and how long it took to say so.
fn refused(arguments: &[&str]) -> Result<(Output, Duration)> {
    let started = Instant::now();
    let output = Command::new(PROGRAM)
        .args(["live", "--json"])
        .args(arguments)
        .stdin(Stdio::null())
        .output()?;
    Ok((output, started.elapsed()))
}

/// Checks what a run is refused with.
fn refuses(arguments: &[&str], status: i32, words: &str) -> Result<Duration> {
    let (output, took) = refused(arguments)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(status) && errors.contains(words) && errors.lines().count() == 1,
        "{arguments:?} ended with {}: {errors}",
        output.status
    );
    ensure!(took < TOLD + STARTING, "{arguments:?} was refused after {took:?}");
    Ok(took)
}

/// Mistakes are told soon; a runtime that hangs is named, and events go on.
fn runtime_hangs(_: &Test) -> Result<Outcome> {
    let Some(containerd) = Containerd::get()? else {
        return Ok(Outcome::Skipped(NO_RUNTIME.to_owned()));
    };
    let pod = containerd.run_pod("web")?;
    refuses(&["--pod", "default/none"], 2, "up are default/web")?;
    refuses(&["--container", "none"], 2, "app of default/web")?;
    refuses(
        &["--cri-socket", "/no/such.sock", "--pod", "web"],
        1,
        "cannot connect to /no/such.sock",
    )?;
    let trace = Trace::start(&["--pod", "default/web"])?;
    containerd.signal(Signal::SIGSTOP)?;
    let answered = hung(&trace, &pod);
    containerd.signal(Signal::SIGCONT)?;
    let took = answered?;
    wait_until("the runtime is back", || Ok(notes(&trace).is_empty()))?;
    expect(&trace, &[(key(&pod.netns, "no-socket"), 5)].into())?;
    trace.stop()?;
    containerd.remove(pod)?;
    Ok(Outcome::Passed(format!(
        "a runtime that hangs was told after {:.1} s; 5 drops meanwhile",
        took.as_secs_f64()
    )))
}

/// While the runtime hangs: a new run says so, and the running one does, too, and goes on.
fn hung(trace: &Trace, pod: &Pod) -> Result<Duration> {
    let took = refuses(&["--pod", "default/web"], 1, "does not answer")?;
    wait_until("the runtime that hangs is named", || {
        Ok(notes(trace).iter().any(|note| note.contains("does not answer")))
    })?;
    drop_inside(pod, 5)?;
    expect(trace, &[(key(&pod.netns, "no-socket"), 5)].into())?;
    Ok(took)
}

/// Notes on the container runtime in the last coverage.
fn notes(trace: &Trace) -> Vec<String> {
    let last = trace.look(|so_far| so_far.coverage.last().cloned());
    let notes = last
        .context("no coverage")
        .map(|coverage| coverage.notes)
        .unwrap_or_default();
    notes
        .into_iter()
        .filter(|note| note.contains("container runtime"))
        .collect()
}
