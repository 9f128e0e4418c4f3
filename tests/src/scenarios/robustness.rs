//! Hidden symbols, modules that come and go, bad input, violent ends, captures.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Read,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Output, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use droptrace::{
    diagnose::{Drop as Labelled, FoundBy, Record, reasons::KERNELS},
    plan::{HOOKS, Reasons, Target},
};
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    mount::{MsFlags, mount},
    pty::{Winsize, openpty},
    sched::{CloneFlags, unshare},
    sys::signal::Signal,
};

use super::Wire;
use crate::{
    Counters, Expected,
    IpFamily::V4,
    Netns, Outcome, Result, Scenario, Test, Tun,
    counters::grown,
    netns::{modprobe, run},
    packet::{RST, Segment, udp},
    sockets::{listen, wait_until},
    test::{Kernel, late},
    trace::{PROGRAM, Trace},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new("hidden-symbol", hidden_symbol).alone().family(),
    Scenario::new("counter-source", counter_source).alone().family(),
    Scenario::new("drop-reasons-known", drop_reasons),
    Scenario::new("late-module-ip-vs", late_module).alone(),
    Scenario::new("kill-leaves-nothing", kill_leaves_nothing).alone(),
    Scenario::new("interrupt-leaves-nothing", interrupt_leaves_nothing).alone(),
    Scenario::new("capture-and-show", capture_and_show)
        .alone()
        .family(),
    Scenario::new("bad-input", bad_input).alone(),
    Scenario::new("terminal-gone-leaves-nothing", terminal_gone).alone(),
];

const NO_DROPTRACE: &str = "needs droptrace";

/// Limit 0, one connection waits, then this many SYNs are refused.
fn overflow(wire: &Wire, refused: u16) -> Result<socket2::Socket> {
    overflow_at(wire, 8080, refused)
}

/// The same at another port.
fn overflow_at(wire: &Wire, port: u16, refused: u16) -> Result<socket2::Socket> {
    let address = wire.address(port);
    let listener = listen(&wire.netns, address, 0)?;
    let mut client = crate::packet::Client::new(wire.peer(4000), address, 1000, None);
    // A limit of 0 leaves no room in the SYN queue of some kernels, but cookies are on.
    client.connect(&wire.tun)?;
    wait_until("a waiting connection", || {
        Ok(crate::sockets::accept_queue(&wire.netns, address)? == 1)
    })?;
    for number in 0..refused {
        wire.tun
            .send(&Segment::syn(wire.peer(5000 + number), address, 1).bytes()?)?;
    }
    Ok(listener)
}

/// SYNs to a port that nobody has.
fn closed_port(wire: &Wire, sent: u16) -> Result<()> {
    for number in 0..sent {
        wire.tun
            .send(&Segment::syn(wire.peer(6000 + number), wire.address(9), 1).bytes()?)?;
        wire.tun.receive("a RST", |packet| {
            packet.dst == wire.peer(6000 + number) && packet.has(RST)
        })?;
    }
    Ok(())
}

/// A symbol that cannot be hooked costs only the causes that it serves, and coverage names them.
fn hidden_symbol(t: &Test) -> Result<Outcome> {
    if t.trace().is_none() {
        return Ok(Outcome::Skipped(NO_DROPTRACE.to_owned()));
    }
    let wire = Wire::new(t, V4)?;
    let trace = Trace::start(&["--hide-symbol", "tcp_conn_request"])?;
    let gaps: BTreeSet<String> = trace.look(|so_far| {
        so_far
            .coverage
            .last()
            .map(|coverage| coverage.gaps.iter().map(|gap| gap.cause.clone()).collect())
            .unwrap_or_default()
    });
    for cause in [
        "accept-queue-full",
        "syn-queue-full",
        "syn-backlog-last-quarter",
        "syn-refused",
    ] {
        ensure!(
            gaps.contains(cause),
            "coverage does not name {cause}: it names {gaps:?}"
        );
    }
    for cause in ["no-socket", "netfilter-rule", "paws-timewait", "local-source"] {
        ensure!(!gaps.contains(cause), "coverage gives up {cause}: {gaps:?}");
    }
    let whole = Trace::start(&[])?;
    t.known();
    let listener = overflow(&wire, 3)?;
    closed_port(&wire, 4)?;
    // The droptrace with all hooks sees both.
    t.expect(&[
        Expected::dropped(&wire.netns, "accept-queue-full", 3),
        Expected::rejected(&wire.netns, "no-socket", 4),
    ])?;
    let by_counter = proven(&trace, &wire.netns, "accept-queue-full", 3)?;
    let seen = losses(&trace, &wire.netns)?;
    ensure!(
        seen == BTreeMap::from([("accept-queue-full".to_owned(), 3), ("no-socket".to_owned(), 4)]),
        "without tcp_conn_request droptrace counted {seen:?}"
    );
    whose(&by_counter, &wire.address(8080).to_string())?;
    // Where all hooks are attached, the counter tells nothing that was not seen.
    let twice = by_counter_so_far(&whole, &wire.netns, "accept-queue-full");
    ensure!(
        twice.is_empty(),
        "what a hook saw was told a second time: {twice:?}"
    );
    let (_, without) = trace.stop()?;
    let (_, with) = whole.stop()?;
    for counter in ["TcpExtListenOverflows", "TcpExtListenDrops"] {
        for (end, explained) in [(&without, 0), (&with, 3)] {
            let row = end.reconciled(&wire.netns, counter)?;
            ensure!(
                (row.delta, row.explained, row.by_counter, row.unexplained)
                    == (3, explained, 3 - explained, 0),
                "{counter} was reconciled as {row:?}"
            );
        }
    }
    drop(listener);
    Ok(Outcome::Passed(format!(
        "coverage names {gaps:?}; 4 no-socket still seen; ListenDrops: 3 told by counter without the hook, 0 with it"
    )))
}

/// What a droptrace counted in a netns that is no benign drop.
fn losses(trace: &Trace, netns: &Netns) -> Result<BTreeMap<String, u64>> {
    let mut seen = BTreeMap::new();
    for count in trace.counts()?.causes {
        if count.netns == netns.inode() && !count.benign {
            *seen.entry(count.cause).or_insert(0) += count.packets;
        }
    }
    Ok(seen)
}

/// Waits until a counter told of this many packets of a cause in a netns; gives the lines.
fn proven(trace: &Trace, netns: &Netns, cause: &str, packets: u64) -> Result<Vec<Arc<Labelled>>> {
    let sum = |drops: &[Arc<Labelled>]| -> u64 { drops.iter().map(|drop| drop.packets).sum() };
    wait_until(&format!("{packets} {cause} by counter"), || {
        Ok(sum(&by_counter_so_far(trace, netns, cause)) >= packets)
    })
    .with_context(|| format!("it counted {:?}", losses(trace, netns)))?;
    let drops = by_counter_so_far(trace, netns, cause);
    ensure!(
        sum(&drops) == packets,
        "lines stand for {} packets, not {packets}: {drops:?}",
        sum(&drops)
    );
    Ok(drops)
}

/// The drops of a cause in a netns that only a counter told of.
fn by_counter_so_far(trace: &Trace, netns: &Netns, cause: &str) -> Vec<Arc<Labelled>> {
    trace.look(|so_far| {
        let drops = so_far.drops.iter().filter(|drop| {
            drop.found_by == FoundBy::Counter && drop.netns == Some(netns.inode()) && drop.cause == cause
        });
        drops.cloned().collect()
    })
}

/// Checks that these lines name the one listener that was over its limit, and this process as its owner.
fn whose(drops: &[Arc<Labelled>], listener: &str) -> Result<()> {
    for drop in drops {
        let owner = drop.owner.as_ref().map(|owner| owner.pid);
        ensure!(
            drop.evidence["listener"] == listener && owner == Some(std::process::id()) || late(drop),
            "not of {listener}, owned by this process: {drop:?}"
        );
    }
    Ok(())
}

/// On a host that lets no function be hooked, counters still tell of what a listener refuses, and sock_diag whose it is.
fn counter_source(t: &Test) -> Result<Outcome> {
    if t.trace().is_none() {
        return Ok(Outcome::Skipped(NO_DROPTRACE.to_owned()));
    }
    let functions = HOOKS.iter().flat_map(|hook| match hook.target {
        Target::Function(names, _) => names,
        Target::Tracepoint(..) => &[],
    });
    let hidden: Vec<&str> = functions.flat_map(|name| ["--hide-symbol", name]).collect();
    let trace = Trace::start(&hidden)?;
    // One listener over its limit, then two, which are not told apart.
    let wire = Wire::new(t, V4)?;
    t.known();
    let first = overflow(&wire, 3)?;
    let one = proven(&trace, &wire.netns, "accept-queue-full", 3)?;
    whose(&one, &wire.address(8080).to_string())?;
    let second = overflow_at(&wire, 8081, 2)?;
    let lines = proven(&trace, &wire.netns, "accept-queue-full", 5)?;
    let both = lines.last().context("no line")?;
    ensure!(
        both.evidence["candidates"].as_array().map(Vec::len) == Some(2)
            && both.evidence["listener"].is_null()
            && both.owner.is_none(),
        "two listeners are over their limit: {both:?}"
    );

    // A SYN queue: the limit of 4 lets five or six wait.
    let netns = t.netns("syn-queue")?;
    let tun = Tun::new(&netns, "wire", &[t.net(V4, 1, 1)])?;
    netns.sysctl("net.ipv4.tcp_syncookies", "0")?;
    netns.sysctl("net.ipv4.tcp_max_syn_backlog", "1024")?;
    let address = t.at(V4, 1, 1, 8080);
    let third = listen(&netns, address, 4)?;
    t.known();
    let before = Counters::read(&netns)?;
    for number in 0..10 {
        tun.send(&Segment::syn(t.at(V4, 1, 2, 5000 + number), address, 1).bytes()?)?;
    }
    wait_until("refused SYNs", || {
        Ok(grown(&netns, &before, "TcpExtTCPReqQFullDrop")? >= 5)
    })?;
    thread::sleep(Duration::from_millis(100));
    let refused = grown(&netns, &before, "TcpExtTCPReqQFullDrop")?;
    let lines = proven(&trace, &netns, "syn-queue-full", refused)?;
    whose(&lines, &address.to_string())?;

    // The droptrace with all hooks saw the same, and nothing by counter.
    t.expect(&[
        Expected::dropped(&wire.netns, "accept-queue-full", 5),
        Expected::dropped(&netns, "syn-queue-full", refused),
    ])?;
    let seen = [losses(&trace, &wire.netns)?, losses(&trace, &netns)?];
    let wanted = [
        BTreeMap::from([("accept-queue-full".to_owned(), 5)]),
        BTreeMap::from([("syn-queue-full".to_owned(), refused)]),
    ];
    ensure!(seen == wanted, "by counters droptrace knows of {seen:?}");
    let hooked = t.drops(&wire.netns, "accept-queue-full");
    ensure!(
        hooked.iter().all(|drop| drop.found_by == FoundBy::Hook),
        "what a hook saw was told a second time: {hooked:?}"
    );
    drop((first, second, third));
    Ok(Outcome::Passed(format!(
        "without a hooked function: 5 accept-queue-full and {refused} syn-queue-full by counter, with listener and owner"
    )))
}

/// The lists of drop reasons that the documentation is made from are those of the running kernels.
fn drop_reasons(t: &Test) -> Result<Outcome> {
    let running = Reasons::of_kernel(Path::new("/sys/kernel/btf/vmlinux"))?;
    let running = running.all();
    let Kernel(major, minor) = t.kernel();
    let series = [format!("{major}.{minor}"), format!("{major}.x")];
    let Some((series, list)) = KERNELS
        .iter()
        .find(|(name, _)| series.iter().any(|each| each == name))
    else {
        ensure!(
            running.is_empty(),
            "there is no list for this kernel's reasons: {running:?}"
        );
        return Ok(Outcome::Passed("no reasons on this kernel".to_owned()));
    };
    let known: Vec<&str> = list.lines().collect();
    let differ = |one: &[&str], other: &[&str]| -> Vec<String> {
        let only = one.iter().filter(|name| !other.contains(name));
        only.map(|name| (*name).to_owned()).collect()
    };
    ensure!(
        running == known,
        "tracer/src/diagnose/reasons/{series}.txt lacks {:?}, and has {:?} too much: `droptrace-tests reasons` prints this kernel's",
        differ(&running, &known),
        differ(&known, &running)
    );
    Ok(Outcome::Passed(format!("{} reasons", known.len())))
}

/// ip_vs is loaded after the start, unloaded, and loaded again.
fn late_module(t: &Test) -> Result<Outcome> {
    let Some(trace) = t.trace() else {
        return Ok(Outcome::Skipped(NO_DROPTRACE.to_owned()));
    };
    let state = || -> Option<String> {
        trace.look(|so_far| {
            let hooks = &so_far.coverage.last()?.hooks;
            let hook = hooks.iter().find(|hook| hook.hook == "ip_vs_leave")?;
            Some(hook.state.clone())
        })
    };
    let mut expected = Vec::new();
    for round in ["first", "second"] {
        // Earlier scenarios may have left it loaded; namespaces that used it are being removed.
        wait_until("ip_vs to be unloaded", || {
            if Path::new("/sys/module/ip_vs").exists() {
                // Refused while in use.
                let _ = run("modprobe -r ip_vs_rr ip_vs");
            }
            Ok(!Path::new("/sys/module/ip_vs").exists())
        })?;
        wait_until("coverage to say that ip_vs is gone", || {
            Ok(state().as_deref() == Some("waiting"))
        })
        .with_context(|| {
            format!(
                "{round} time: ip_vs_leave is {:?}, /sys/module/ip_vs exists: {}",
                state(),
                Path::new("/sys/module/ip_vs").exists()
            )
        })?;
        modprobe("ip_vs_rr")?;
        t.attached(&["ip_vs_leave"])?;
        let netns = t.netns(round)?;
        let wire = Tun::new(&netns, "wire", &[t.net(V4, 0, 1)])?;
        let service = t.at(V4, 0, 1, 80);
        netns.run(&format!("ipvsadm -A -t {service} -s rr"))?;
        for number in 0..3 {
            let client = t.at(V4, 0, 2 + number, 5000);
            wire.send(&Segment::syn(client, service, 1).bytes()?)?;
        }
        expected.push(Expected::rejected(&netns, "ipvs-no-destination", 3));
        t.expect(&expected)?;
        // An unused ip_vs can be unloaded again.
        netns.run("ipvsadm -C")?;
    }
    Ok(Outcome::Passed(format!(
        "loaded twice after the start, {} drops seen",
        3 * expected.len()
    )))
}

/// Ids of the BPF programs and maps in the kernel.
fn bpf_objects() -> Result<(BTreeSet<u32>, BTreeSet<u32>)> {
    let programs = aya::programs::loaded_programs()
        .map(|program| program.map(|program| program.id()))
        .collect::<std::result::Result<_, _>>()
        .context("cannot list BPF programs")?;
    let maps = aya::maps::loaded_maps()
        .map(|map| map.map(|map| map.id()))
        .collect::<std::result::Result<_, _>>()
        .context("cannot list BPF maps")?;
    Ok((programs, maps))
}

/// Nothing in the kernel but what was there before; it is freed a moment after the process.
fn nothing_left(before: &(BTreeSet<u32>, BTreeSet<u32>)) -> Result<()> {
    wait_until("programs and maps to be gone", || {
        // Whoever opens a map of programs while the kernel is about to clear it makes the kernel clear it again, and forget
        // one reference to it for good (`prog_array_map_clear`, kernel/bpf/arraymap.c, 5.10 - 7.3): so not at once.
        thread::sleep(Duration::from_secs(1));
        let now = bpf_objects()?;
        Ok(now.0.is_subset(&before.0) && now.1.is_subset(&before.1))
    })
    .with_context(|| format!("left are {:?}", names_of_new_objects(before)))
}

/// The same once they stay: the droptrace that all scenarios share loads a probe each second for modules that may come.
fn settled_bpf_objects() -> Result<(BTreeSet<u32>, BTreeSet<u32>)> {
    let mut before = bpf_objects()?;
    wait_until("programs to stay as they are", || {
        thread::sleep(Duration::from_millis(2_500));
        let now = bpf_objects()?;
        let same = now == before;
        before = now;
        Ok(same)
    })?;
    Ok(before)
}

/// Programs and maps that were not there before.
fn names_of_new_objects(before: &(BTreeSet<u32>, BTreeSet<u32>)) -> Vec<String> {
    let programs = aya::programs::loaded_programs()
        .filter_map(std::result::Result::ok)
        .filter(|program| !before.0.contains(&program.id()))
        .map(|program| program.name_as_str().unwrap_or("?").to_owned());
    let maps = aya::maps::loaded_maps()
        .filter_map(std::result::Result::ok)
        .filter(|map| !before.1.contains(&map.id()))
        .map(|map| map.name_as_str().unwrap_or("?").to_owned());
    programs.chain(maps).collect()
}

/// `kill -9` in the midst of a run.
fn kill_leaves_nothing(t: &Test) -> Result<Outcome> {
    if t.trace().is_none() {
        return Ok(Outcome::Skipped(NO_DROPTRACE.to_owned()));
    }
    let before = settled_bpf_objects()?;
    let trace = Trace::start(&[])?;
    let during = bpf_objects()?;
    let programs = during.0.difference(&before.0).count();
    ensure!(programs > 0, "a running droptrace has no BPF program");
    trace.kill()?;
    nothing_left(&before)?;
    Ok(Outcome::Passed(format!(
        "{programs} programs and {} maps gone",
        during.1.difference(&before.1).count()
    )))
}

/// SIGINT ends a run cleanly, with a summary and exit status 0.
fn interrupt_leaves_nothing(t: &Test) -> Result<Outcome> {
    if t.trace().is_none() {
        return Ok(Outcome::Skipped(NO_DROPTRACE.to_owned()));
    }
    let before = settled_bpf_objects()?;
    let trace = Trace::start(&["--netns", "/proc/1/ns/net"])?;
    let (status, said) = trace.stop()?;
    ensure!(status.success(), "it ended with {status}");
    let summary = said.summary.context("it gave no summary")?;
    ensure!(
        summary.ended == "interrupted",
        "the summary says it ended by {}",
        summary.ended
    );
    ensure!(
        said.unreadable.is_empty(),
        "lines that are no record: {:?}",
        said.unreadable
    );
    nothing_left(&before)?;
    Ok(Outcome::Passed(
        "exit status 0, a summary, nothing left".to_owned(),
    ))
}

/// The full-screen view ends with its terminal, also where no signal tells of that.
fn terminal_gone(t: &Test) -> Result<Outcome> {
    if t.trace().is_none() {
        return Ok(Outcome::Skipped(NO_DROPTRACE.to_owned()));
    }
    let before = settled_bpf_objects()?;
    let size = Winsize {
        ws_row: 24,
        ws_col: 80,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let terminal = openpty(Some(&size), None)?;
    for end in [&terminal.master, &terminal.slave] {
        fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    }
    let side = || -> Result<Stdio> { Ok(terminal.slave.try_clone()?.into()) };
    let mut view = Command::new(PROGRAM)
        .arg("live")
        .env("TERM", "xterm")
        .stdin(side()?)
        .stdout(side()?)
        .stderr(side()?)
        .spawn()?;
    let drawn = File::from(terminal.master.try_clone()?).read(&mut [0; 64]);
    drop(terminal);
    let ended = wait_until("the view to end", || Ok(view.try_wait()?.is_some()));
    if ended.is_err() {
        view.kill()?;
        view.wait()?;
    }
    ended?;
    ensure!(drawn? > 0, "nothing was drawn");
    let status = view.wait()?;
    ensure!(status.code().is_some(), "it ended with {status}");
    nothing_left(&before)?;
    Ok(Outcome::Passed("it ended, nothing left".to_owned()))
}

/// What names a drop in `live` and `show` alike.
fn identity(drop: &Labelled) -> String {
    format!(
        "{} {} {:?}:{:?} > {:?}:{:?} {:?} {:?}",
        drop.cause,
        drop.verdict.name(),
        drop.src,
        drop.sport,
        drop.dst,
        drop.dport,
        drop.flags,
        drop.netns
    )
}

/// How the owner gets on, which two droptraces look at one after the other.
const OF_THE_MOMENT: [&str; 5] = [
    "held_up_by",
    "threads",
    "blocked_threads",
    "waits_in",
    "throttled",
];

/// Checks that both say the same; what one of them was not told in time may be null there.
fn same_evidence(one: &Labelled, other: &Labelled) -> Result<()> {
    let unknown = |drop: &Labelled, value: &serde_json::Value| value.is_null() && late(drop);
    ensure!(
        one.evidence.keys().eq(other.evidence.keys()),
        "evidence {:?} and {:?}",
        one.evidence,
        other.evidence
    );
    let lasting = |(name, _): &(&String, _)| !OF_THE_MOMENT.contains(&name.as_str());
    for (name, value) in one.evidence.iter().filter(lasting) {
        let told = &other.evidence[name];
        ensure!(
            value == told || unknown(one, value) || unknown(other, told),
            "{}: {name} is {told} in live and {value} in the capture",
            identity(one)
        );
    }
    Ok(())
}

/// A capture gives the labels that live gave.
fn capture_and_show(t: &Test) -> Result<Outcome> {
    if t.trace().is_none() {
        return Ok(Outcome::Skipped(NO_DROPTRACE.to_owned()));
    }
    let wire = Wire::new(t, V4)?;
    let file = Path::new("/tmp/scenario.pcapng");
    let mut capture = Command::new(PROGRAM)
        .args(["capture", "-o"])
        .arg(file)
        .args(["--netns", wire.netns.name()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start droptrace capture")?;
    // The file holds the coverage block once all hooks are attached.
    wait_until("a capture that has begun", || {
        Ok(fs::metadata(file).is_ok_and(|found| found.len() > 500))
    })?;
    thread::sleep(Duration::from_millis(500));
    t.known();
    let listener = overflow(&wire, 3)?;
    closed_port(&wire, 4)?;
    for number in 0..2 {
        wire.tun
            .send(&udp(wire.peer(7000 + number), wire.address(9), b"hello")?)?;
    }
    t.expect(&[
        Expected::dropped(&wire.netns, "accept-queue-full", 3),
        Expected::rejected(&wire.netns, "no-socket", 6),
    ])?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(capture.id() as i32), Signal::SIGINT)?;
    let ended = capture.wait()?;
    ensure!(ended.success(), "capture ended with {ended}");
    let shown = Command::new(PROGRAM)
        .arg("show")
        .arg("--json")
        .arg(file)
        .output()?;
    ensure!(
        shown.status.success(),
        "show ended with {}: {}",
        shown.status,
        String::from_utf8_lossy(&shown.stderr)
    );
    let mut captured: Vec<Arc<Labelled>> = String::from_utf8_lossy(&shown.stdout)
        .lines()
        .filter_map(|line| match serde_json::from_str(line) {
            Ok(Record::Drop(drop)) if !drop.benign => Some(Arc::from(drop)),
            _ => None,
        })
        .collect();
    let mut live: Vec<_> = ["accept-queue-full", "no-socket"]
        .iter()
        .flat_map(|cause| t.drops(&wire.netns, cause))
        .collect();
    captured.sort_by_key(|drop| identity(drop));
    live.sort_by_key(|drop| identity(drop));
    ensure!(live.len() == 9, "live gave {} full events, not 9", live.len());
    let identities = |drops: &[Arc<Labelled>]| drops.iter().map(|drop| identity(drop)).collect::<Vec<_>>();
    ensure!(
        identities(&captured) == identities(&live),
        "show gives {:?}, live gave {:?}",
        identities(&captured),
        identities(&live)
    );
    for (shown, told) in captured.iter().zip(&live) {
        same_evidence(shown, told)?;
    }
    drop(listener);
    truncated(file)?;
    fs::remove_file(file)?;
    Ok(Outcome::Passed(
        "9 drops, equal in live and show; cut files are read".to_owned(),
    ))
}

/// A capture cut anywhere gives what is whole, or one clear line; never a panic.
fn truncated(file: &Path) -> Result<()> {
    let whole = fs::read(file)?;
    let cut = Path::new("/tmp/cut.pcapng");
    for part in 0..8 {
        let length = whole.len() * part / 8 + part % 3;
        fs::write(cut, &whole[..length.min(whole.len())])?;
        let output = Command::new(PROGRAM)
            .arg("show")
            .arg("--json")
            .arg(cut)
            .output()?;
        clear(&output, &[0, 1], &format!("a capture cut after {length} bytes"))?;
    }
    fs::remove_file(cut)?;
    Ok(())
}

/// Checks that a run ended with one of these statuses, without a panic, and with one line that says what to do.
fn clear(output: &Output, statuses: &[i32], what: &str) -> Result<()> {
    let errors = String::from_utf8_lossy(&output.stderr);
    let status = output
        .status
        .code()
        .with_context(|| format!("{what}: ended by {}", output.status))?;
    ensure!(
        statuses.contains(&status),
        "{what}: exit status {status}, not {statuses:?}: {errors}"
    );
    ensure!(!errors.contains("panicked"), "{what}: it panicked: {errors}");
    if status != 0 {
        ensure!(
            errors.lines().count() == 1,
            "{what}: {} lines on standard error, not one: {errors}",
            errors.lines().count()
        );
        ensure!(errors.contains("next:"), "{what}: no next step: {errors}");
    }
    Ok(())
}

/// Runs droptrace for at most a minute.
fn droptrace(arguments: &[&str], change: impl FnOnce(&mut Command)) -> Result<Output> {
    let mut command = Command::new(PROGRAM);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    change(&mut command);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {PROGRAM} {arguments:?}"))?;
    let until = Instant::now() + Duration::from_mins(1);
    while child.try_wait()?.is_none() {
        if Instant::now() > until {
            child.kill()?;
            child.wait()?;
            bail!("droptrace {arguments:?} did not end within a minute");
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(child.wait_with_output()?)
}

/// Runs droptrace where something was taken away; the thread, and with it its mount namespace, ends afterwards.
fn droptrace_without(what: &'static str, arguments: &'static [&'static str]) -> Result<Output> {
    thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).context("cannot make a mount namespace")?;
        mount(
            None::<&str>,
            "/",
            None::<&str>,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            None::<&str>,
        )
        .context("cannot make mounts private")?;
        mount(Some("none"), what, Some("tmpfs"), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("cannot cover {what}"))?;
        droptrace(arguments, |_| {})
    })
    .join()
    .map_err(|_| anyhow::anyhow!("the thread panicked"))?
}

/// Each kind of bad input gives one clear line, the right exit status, and leaves nothing attached.
fn bad_input(t: &Test) -> Result<Outcome> {
    const LIVE: &[&str] = &["live", "--json", "--for", "1s"];
    const NOBODY: u32 = 65_534;
    if t.trace().is_none() {
        return Ok(Outcome::Skipped(NO_DROPTRACE.to_owned()));
    }
    let before = settled_bpf_objects()?;
    let usage: &[(&str, &[&str])] = &[
        ("unknown slug", &["live", "--cause", "no-such-cause"]),
        ("unknown slug of explain", &["explain", "no-such-cause"]),
        ("bad duration", &["live", "--for", "soon"]),
        ("unknown option", &["live", "--no-such-option"]),
        ("port out of range", &["live", "--port", "70000"]),
    ];
    for (what, arguments) in usage {
        clear(&droptrace(arguments, |_| {})?, &[2], what)?;
    }
    // Whether a name that does not exist is a wrong command line or a failure is a matter of taste.
    let absent: &[(&str, &[&str])] = &[
        (
            "unknown netns",
            &["live", "--json", "--netns", "no-such-netns", "--for", "1s"],
        ),
        (
            "unknown pid",
            &["live", "--json", "--pid", "4194303", "--for", "1s"],
        ),
    ];
    for (what, arguments) in absent {
        clear(&droptrace(arguments, |_| {})?, &[1, 2], what)?;
    }
    fs::write("/tmp/empty.pcapng", b"")?;
    let mut noise = vec![0; 4096];
    File::open("/dev/urandom")?.read_exact(&mut noise)?;
    fs::write("/tmp/noise.pcapng", &noise)?;
    let files: &[(&str, &[&str])] = &[
        ("missing capture", &["show", "/tmp/no-such-file.pcapng"]),
        ("empty capture", &["show", "/tmp/empty.pcapng"]),
        ("random bytes", &["show", "/tmp/noise.pcapng"]),
        (
            "a folder as output",
            &["live", "--json", "-o", "/tmp", "--for", "1s"],
        ),
    ];
    for (what, arguments) in files {
        clear(&droptrace(arguments, |_| {})?, &[1], what)?;
    }
    let not_root = droptrace(LIVE, |command| {
        command.uid(NOBODY).gid(NOBODY);
    })?;
    clear(&not_root, &[1], "not root")?;
    let refused = droptrace(LIVE, |command| {
        // SAFETY: prctl is async-signal-safe, and nothing is allocated.
        unsafe { command.pre_exec(drop_capabilities) };
    })?;
    clear(&refused, &[1], "BPF refused")?;
    clear(&droptrace_without("/sys/kernel/btf", LIVE)?, &[1], "no BTF")?;
    let mut closed_pipe = Command::new(PROGRAM)
        .arg("explain")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    drop(closed_pipe.stdout.take());
    let closed_pipe = closed_pipe.wait_with_output()?;
    ensure!(
        closed_pipe.stderr.is_empty(),
        "a closed pipe makes it complain: {}",
        String::from_utf8_lossy(&closed_pipe.stderr)
    );
    nothing_left(&before)?;
    Ok(Outcome::Passed(format!(
        "{} kinds of bad input, nothing left attached",
        usage.len() + absent.len() + files.len() + 4
    )))
}

/// Leaves root without any capability: what it executes gets none (capabilities(7)).
#[expect(clippy::unnecessary_wraps, reason = "the form that pre_exec wants")]
fn drop_capabilities() -> std::io::Result<()> {
    for capability in 0..64 {
        // SAFETY: plain numbers; a capability that the kernel does not know is refused, which is as good.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    Ok(())
}
