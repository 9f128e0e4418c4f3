//! The page of figures.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::figures::{self, DROPTRACE, Figure, Point, Program, Ratio};
use super::user_space::Found;
use super::{Bench, Measured};

/// What the figures are, and what they are not.
const READING: &str = "\
How to repeat: `cargo xtask bench`, with `--kernel` for other kernels and `--quick` for a look in between (less of
everything, written to `target/bench`). The same figures one by one are in [performance.json](performance.json).

All of this runs in emulated guests with unmodified Debian kernels. Traffic goes over a veth pair between two network
namespaces, and droptrace is the static release build as `droptrace live --json -o FILE`.

- *Counted time* is the clock of a guest with one CPU that counts instructions, 1 ns each (`-icount shift=0`). What else
  the machine does changes nothing; the cost of cache misses is not in it. Every ratio, time and cost below is counted.
  As there is one CPU, what droptrace does in user space meanwhile is in the sender's time.
- *Plain* guests have two CPUs that run at once. There it is seen whether counts and lines hold in a race. Their seconds
  depend on the machine and on what else it does, so only CPU seconds of droptrace are given, as an order of magnitude.

Under flood droptrace counts every drop and writes a line for a sample of them (200 at once, then 100 a second, for each
CPU and kind of drop).";

/// What is missing here.
const LIMITS: &str = "\
## Not measured

Sending is from one thread. Other tracers that Debian does not package are not here.";

/// The whole page.
pub(super) fn markdown(bench: &Bench) -> String {
    let mut page = format!(
        "# Performance\n\n`cargo xtask bench{}` on {}, at {}.\n\n{READING}\n",
        if bench.quick { " --quick" } else { "" },
        bench.date,
        bench.commit
    );
    for kernel in &bench.kernels {
        writeln!(page, "\nKernel {}: package {}.", kernel.series, kernel.package).expect(WRITABLE);
    }
    let peers: Vec<_> = bench
        .peers
        .iter()
        .map(|package| format!("{} {}", package.name, package.version))
        .collect();
    writeln!(page, "\nOther tracers: Debian's packages {}.", peers.join(", ")).expect(WRITABLE);
    for part in PARTS {
        part.render(&bench.kernels, &mut page);
    }
    if let Some(found) = &bench.user_space {
        user_space(found, &mut page);
    }
    write!(page, "\n{LIMITS}\n").expect(WRITABLE);
    page
}

/// What user space alone does.
fn user_space(found: &Found, page: &mut String) {
    let rows: Vec<_> = found
        .sinks
        .iter()
        .map(|sink| {
            format!(
                "| {} | {:.0} | {:.1} |",
                sink.sink, sink.events_per_second, sink.allocations_per_event
            )
        })
        .collect();
    write!(
        page,
        "\n## User space alone\n\n\
         `cargo bench -p droptrace`: one thread, from the bytes of the ring to the bytes of a sink (decoding, cause, facts asked of the \
         host, label, sink), without the kernel and\nwithout the loop that waits for the ring. This machine's own time, in which other \
         work kept {:.2} of its {} CPUs busy. An allocation is a call of the allocator.\n\n\
         | to | events per second | allocations per event |\n|---|---|---|\n{}\n",
        found.machine.other_cpus,
        found.machine.cpus,
        rows.join("\n")
    )
    .expect(WRITABLE);
}

const WRITABLE: &str = "a string can be written to";

/// One table with what it tells.
struct Part {
    title: &'static str,
    about: &'static str,
    columns: &'static [&'static str],
    /// A row that stands before those of all kernels.
    first: Option<&'static [&'static str]>,
    /// The rows of one kernel, without its name.
    rows: fn(&[Figure]) -> Vec<Vec<String>>,
}

const PARTS: &[Part] = &[
    Part {
        title: "What each tracer costs, and what it gives for it",
        about: "\
Each in the same boots with the same work, other tracers once: *storm*, *connections*, *datagrams* are ratios to no tracer, *BPF* is per
drop of that storm by the kernel's own measure, *first drop* is from the start to the first drop in its output; all of them
counted. *Told* is the share of a storm's drops that its output tells, and *resident* its memory after it, with two CPUs, plain.
dropwatch has no BPF program.",
        columns: &[
            "tracer",
            "gives",
            "storm",
            "connections",
            "datagrams",
            "BPF ns",
            "BPF calls",
            "told",
            "first drop, s",
            "resident MiB",
        ],
        first: Some(&[
            "*to reach*",
            "exact counts and labelled lines, a sample in a flood; every drop with a line",
            "≤ 1.18; ≤ 2.0",
            "≤ 1.02",
            "≤ 1.01",
            "",
            "",
            "all counted; all told",
            "≤ 1.0",
            "≤ 24",
        ]),
        rows: tracer_rows,
    },
    Part {
        title: "What could not be measured",
        about: "By name, with the reason.",
        columns: &["tracer", "what", "why"],
        first: None,
        rows: cannot_rows,
    },
    Part {
        title: "With droptrace and without",
        about: "\
Counted time, same boot, in turn; medians. *Connections* are short ones with 1,000 bytes each way, *datagrams* a stream of
1,000 bytes each, both with conntrack at both ends and without a loss. Those *to a service of IPVS* and *past* it are forwarded by a netns
with 50 services as kube-proxy sets them up (`kube-ipvs0`, round robin, masquerading, `conntrack=1`, `expire_nodest_conn=1`). The others are storms of which the server's netns drops
every packet: by a rule of nftables, since the port is closed, since a UDP socket's buffer or a listener's accept queue is
full; hosts without conntrack. droptrace's own CPU time is that until it had nothing left to do; as there is one CPU, most of it
falls into the sender's time. *Spread* is how far repeats lie apart. The fewer packets a storm has, the more of them
have a line of their own, and the higher is its ratio.",
        columns: &[
            "tracer",
            "load",
            "packets",
            "repeats",
            "without, µs each",
            "with, µs each",
            "ratio",
            "droptrace's CPU, µs each",
            "spread without",
            "spread with",
        ],
        first: None,
        rows: ratio_rows,
    },
    Part {
        title: "What the BPF programs cost",
        about: "\
Counted time by the kernel's own measure (`bpf_stats_enabled`), which holds its own two readings of the clock per call: about as many
nanoseconds as instructions, per connection or packet of each load. Full events of the sample are in it.",
        columns: &[
            "tracer",
            "load",
            "ns each",
            "calls each",
            "calls × ns of each program",
        ],
        first: None,
        rows: cost_rows,
    },
    Part {
        title: "What the BPF programs take for one drop",
        about: "\
Counted, of the rule's storm: few drops, which all have a line, tell what a full event takes; many, of which most have none, what a drop takes that
is only counted. To reach are 1,200 instructions and 250. The kernel's own two readings of the clock, for each of the programs that a drop
calls, are in it: the programs that find nothing to do, in the table above, hold little else.",
        columns: &[
            "few drops",
            "of them with a line",
            "ns with a line",
            "many drops",
            "of them with a line",
            "ns without",
        ],
        first: None,
        rows: per_drop_rows,
    },
    Part {
        title: "Storms on two CPUs",
        about: "\
Plain. *Dropped* is the kernel's own counter (of the rule, UdpNoPorts, UdpRcvbufErrors, TcpExtListenOverflows); the error is droptrace's
total less that. Lines and those said to have none must add up to the total.",
        columns: &[
            "tracer",
            "storm",
            "sent",
            "dropped",
            "counted",
            "error",
            "lines",
            "said to have none",
            "in no total",
            "CPU s",
            "resident MiB",
        ],
        first: None,
        rows: storm_rows,
    },
    Part {
        title: "Start and end",
        about: "\
Counted time from the start of the program to the first drop with a label in its file, with one packet to a closed port about every 10
ms; then from SIGINT, and from the last line, to the prompt. Namespaces are the initial one and empty ones. The first row
of a kernel is the first start since it booted.",
        columns: &[
            "namespaces",
            "first drop, s",
            "SIGINT to prompt, s",
            "last line to prompt, s",
        ],
        first: None,
        rows: start_rows,
    },
    Part {
        title: "A rare drop in a storm",
        about: "Plain. Once a second one packet to a closed port, in a storm that a rule drops as fast as one thread sends.",
        columns: &[
            "rare drops",
            "with a line",
            "sent by the storm",
            "dropped by the kernel",
            "counted",
        ],
        first: None,
        rows: needle_rows,
    },
    Part {
        title: "Resident memory",
        about: "Plain; a storm that a rule drops.",
        columns: &["drops so far", "resident MiB"],
        first: None,
        rows: memory_rows,
    },
    Part {
        title: "What the cost grows with",
        about: "\
Counted. The same load without droptrace and with it, while there is more and more of one thing: of connections and of drops in the load
itself; of open sockets on the server, of network namespaces, of seconds since droptrace started beside it. *In all* is what the load takes
longer; *idle* is droptrace's CPU time in ten seconds in which nothing happens.",
        columns: &[
            "over",
            "at",
            "load",
            "without, µs each",
            "with, µs each",
            "ratio",
            "in all, ms",
            "droptrace's CPU, ms",
            "idle, ms",
        ],
        first: None,
        rows: point_rows,
    },
    Part {
        title: "Idle",
        about: "Counted: CPU time of droptrace while nothing happens.",
        columns: &["seconds", "CPU ms", "of a CPU"],
        first: None,
        rows: idle_rows,
    },
    Part {
        title: "What else the machine did",
        about: "While the plain guests ran: CPUs that the guest was given, and that other work kept busy.",
        columns: &["guest", "seconds", "CPUs", "for the guest", "for other work"],
        first: None,
        rows: machine_rows,
    },
];

impl Part {
    /// Writes the table; none where nothing was measured.
    fn render(&self, kernels: &[Measured], page: &mut String) {
        let mut rows: Vec<_> = kernels
            .iter()
            .flat_map(|kernel| {
                (self.rows)(&kernel.figures)
                    .into_iter()
                    .map(|row| format!("| {} | {} |", kernel.series, row.join(" | ")))
            })
            .collect();
        if rows.is_empty() {
            return;
        }
        if let Some(first) = self.first {
            rows.insert(0, format!("| | {} |", first.join(" | ")));
        }
        write!(
            page,
            "\n## {}\n\n{}\n\n| kernel | {} |\n|{}\n{}\n",
            self.title,
            self.about,
            self.columns.join(" | "),
            "---|".repeat(self.columns.len() + 1),
            rows.join("\n")
        )
        .expect(WRITABLE);
    }
}

/// Whether it is droptrace, in whatever mode.
fn is_droptrace(tracer: &str) -> bool {
    tracer.starts_with(DROPTRACE)
}

/// What each tracer gives.
const GIVES: &[(&str, &str)] = &[
    (
        DROPTRACE,
        "exact counts per cause; lines with packet, cause, evidence and remedy, in a flood a sample",
    ),
    (
        "droptrace --every-drop",
        "exact counts per cause; a line with its cause for every drop",
    ),
    (
        "bpftrace, count per reason",
        "a count per reason of the kernel; nothing of single drops",
    ),
    (
        "bpftrace, printf per drop",
        "a line with the kernel's reason and function; no packet, no cause",
    ),
    (
        "pwru, drop function only",
        "a line with the packet's address in memory and the process that ran; no reason, no cause",
    ),
    (
        "dropwatch",
        "a count per place in the kernel; no reason, nothing of single drops",
    ),
];

fn tracer_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    let ratios = figures::ratios(figures);
    GIVES
        .iter()
        .filter_map(|&(tracer, gives)| {
            let ratio = |load: &str| {
                ratios
                    .iter()
                    .find(|ratio| ratio.tracer == tracer && ratio.load == load)
                    .map(|ratio| format!("{:.2}", ratio.ratio()))
            };
            let bpf = |value: fn(&Program) -> u64| {
                let programs = figures.iter().filter_map(|figure| match figure {
                    Figure::Program(program) if program.tracer == tracer && program.load == "rule" => {
                        Some(value(program) as f64 / program.packets as f64)
                    }
                    _ => None,
                });
                programs.reduce(|sum, each| sum + each)
            };
            let first = figures.iter().find_map(|figure| match figure {
                Figure::Start(start) if start.tracer == tracer => {
                    Some(format!("{:.2}", start.first_drop_seconds))
                }
                _ => None,
            });
            let (told, resident) = figures
                .iter()
                .find_map(|figure| told(figure, tracer))
                .unwrap_or_default();
            let cells = [
                ratio("rule"),
                ratio("connections"),
                ratio("datagrams"),
                bpf(|program| program.nanoseconds).map(|ns| format!("{ns:.0}")),
                bpf(|program| program.calls).map(|calls| format!("{calls:.1}")),
                told,
                first,
                resident,
            ];
            if cells.iter().all(Option::is_none) {
                return None;
            }
            let mut row = vec![tracer.to_owned(), gives.to_owned()];
            row.extend(cells.map(Option::unwrap_or_default));
            Some(row)
        })
        .collect()
}

/// What a tracer told of a storm that a rule drops, and its memory after it.
fn told(figure: &Figure, tracer: &str) -> Option<(Option<String>, Option<String>)> {
    let part = |of: u64, all: u64| percent(of as f64 / all as f64);
    match figure {
        Figure::Storm(storm) if storm.tracer == tracer && storm.load == "rule" => {
            let (counted, lines) = (
                part(storm.counted, storm.dropped),
                part(storm.events, storm.dropped),
            );
            Some((
                Some(format!("counted {counted}, lines {lines}")),
                Some(mebibytes(storm.resident_kib)),
            ))
        }
        Figure::Told(told) if told.tracer == tracer => Some((
            Some(part(told.drops, told.dropped)),
            Some(mebibytes(told.resident_kib)),
        )),
        _ => None,
    }
}

fn cannot_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for figure in figures {
        if let Figure::Cannot(cannot) = figure {
            let row = vec![
                cannot.tracer.clone(),
                cannot.what.clone(),
                cannot.why.replace('|', "\\|"),
            ];
            // Told once in each guest.
            if !rows.contains(&row) {
                rows.push(row);
            }
        }
    }
    rows
}

fn point_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    figures
        .iter()
        .filter_map(|figure| match figure {
            Figure::Point(point) => Some(point_row(point)),
            _ => None,
        })
        .collect()
}

fn point_row(point: &Point) -> Vec<String> {
    let each = |seconds: f64| format!("{:.2}", seconds * 1e6 / point.packets as f64);
    let milliseconds = |seconds: f64| format!("{:.1}", seconds * 1e3);
    vec![
        point.curve.clone(),
        point.at.to_string(),
        format!("{} {}", point.packets, point.load),
        each(point.without_seconds),
        each(point.with_seconds),
        format!("{:.3}", point.with_seconds / point.without_seconds),
        milliseconds(point.with_seconds - point.without_seconds),
        milliseconds(point.cpu_seconds),
        milliseconds(point.idle_cpu_seconds),
    ]
}

fn per_drop_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    figures
        .iter()
        .filter_map(|figure| match figure {
            Figure::PerDrop(each) => Some(vec![
                each.few.to_string(),
                each.few_events.to_string(),
                format!("{:.0}", each.full_nanoseconds),
                each.many.to_string(),
                each.many_events.to_string(),
                each.counted_nanoseconds
                    .map_or_else(String::new, |nanoseconds| format!("{nanoseconds:.0}")),
            ]),
            _ => None,
        })
        .collect()
}

fn idle_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    figures
        .iter()
        .filter_map(|figure| match figure {
            Figure::Idle(idle) => Some(vec![
                format!("{:.0}", idle.seconds),
                format!("{:.1}", idle.cpu_seconds * 1e3),
                format!("{:.3} %", idle.cpu_seconds / idle.seconds * 100.0),
            ]),
            _ => None,
        })
        .collect()
}

fn machine_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    figures
        .iter()
        .filter_map(|figure| match figure {
            Figure::Machine(machine) => Some(vec![
                machine.way.clone(),
                format!("{:.0}", machine.seconds),
                machine.cpus.to_string(),
                format!("{:.2}", machine.guest_cpus),
                format!("{:.2}", machine.other_cpus),
            ]),
            _ => None,
        })
        .collect()
}

fn ratio_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    figures::ratios(figures)
        .iter()
        .filter(|ratio| is_droptrace(ratio.tracer))
        .map(|ratio| {
            vec![
                ratio.tracer.to_owned(),
                ratio.load.to_owned(),
                ratio.packets.to_string(),
                ratio.repeats.to_string(),
                format!("{:.2}", ratio.without),
                format!("{:.2}", ratio.with),
                ratio_text(ratio),
                format!("{:.2}", ratio.own),
                percent(ratio.spreads[0]),
                percent(ratio.spreads[1]),
            ]
        })
        .collect()
}

/// The ratio; where repeats lie further apart than both sides of it, that is said.
fn ratio_text(ratio: &Ratio<'_>) -> String {
    let value = ratio.ratio();
    if ratio.is_difference() {
        format!("**{value:.3}**")
    } else {
        format!("{value:.3}, within the spread")
    }
}

fn percent(part: f64) -> String {
    format!("{:.1} %", part * 100.0)
}

fn cost_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    let mut loads: Vec<(&str, &str, Vec<&Program>)> = Vec::new();
    for figure in figures {
        let Figure::Program(program) = figure else {
            continue;
        };
        match loads.last_mut() {
            Some((tracer, load, programs)) if *tracer == program.tracer && *load == program.load => {
                programs.push(program);
            }
            _ => loads.push((&program.tracer, &program.load, vec![program])),
        }
    }
    loads
        .into_iter()
        .map(|(tracer, load, programs)| {
            let each = |value: fn(&Program) -> u64| {
                programs
                    .iter()
                    .map(|program| value(program) as f64 / program.packets as f64)
                    .sum::<f64>()
            };
            vec![
                tracer.to_owned(),
                load.to_owned(),
                format!("{:.0}", each(|program| program.nanoseconds)),
                format!("{:.1}", each(|program| program.calls)),
                programs_text(&programs),
            ]
        })
        .collect()
}

/// The programs by name, since several bear the 15 letters that the kernel keeps.
fn programs_text(programs: &[&Program]) -> String {
    let mut by_name: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for program in programs {
        let (calls, nanoseconds) = by_name.entry(&program.name).or_default();
        *calls += program.calls;
        *nanoseconds += program.nanoseconds;
    }
    by_name
        .into_iter()
        .map(|(name, (calls, nanoseconds))| format!("`{name}` {calls} × {}", nanoseconds / calls.max(1)))
        .collect::<Vec<_>>()
        .join(", ")
}

fn storm_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    figures
        .iter()
        .filter_map(|figure| match figure {
            Figure::Storm(storm) => Some(storm),
            _ => None,
        })
        .map(|storm| {
            vec![
                storm.tracer.clone(),
                storm.load.clone(),
                storm.packets.to_string(),
                storm.dropped.to_string(),
                storm.counted.to_string(),
                error(storm.counted, storm.dropped),
                storm.events.to_string(),
                storm.lost.to_string(),
                storm.uncounted.to_string(),
                format!("{:.2}", storm.cpu_seconds),
                mebibytes(storm.resident_kib),
            ]
        })
        .collect()
}

/// How far a count is from what it should be.
fn error(counted: u64, dropped: u64) -> String {
    let error = i128::from(counted) - i128::from(dropped);
    if error == 0 {
        "0".to_owned()
    } else {
        format!("**{error:+}**")
    }
}

fn mebibytes(kib: u64) -> String {
    format!("{:.1}", kib as f64 / 1024.0)
}

fn start_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    figures
        .iter()
        .filter_map(|figure| match figure {
            Figure::Start(start) if is_droptrace(&start.tracer) => Some(start),
            _ => None,
        })
        .map(|start| {
            vec![
                start.namespaces.to_string(),
                format!("{:.2}", start.first_drop_seconds),
                format!("{:.2}", start.signal_to_prompt_seconds),
                start
                    .line_to_prompt_seconds
                    .map_or_else(String::new, |seconds| format!("{seconds:.2}")),
            ]
        })
        .collect()
}

fn needle_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    figures
        .iter()
        .filter_map(|figure| match figure {
            Figure::Needle(needle) => Some(needle),
            _ => None,
        })
        .map(|needle| {
            let numbers = [
                needle.needles,
                needle.events,
                needle.storm,
                needle.dropped,
                needle.counted,
            ];
            numbers.map(|number| number.to_string()).to_vec()
        })
        .collect()
}

fn memory_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    figures
        .iter()
        .filter_map(|figure| match figure {
            Figure::Memory(memory) => Some(vec![memory.drops.to_string(), mebibytes(memory.resident_kib)]),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::figures::{Cannot, Sample, Storm, Told};
    use super::*;

    fn bench(figures: Vec<Figure>) -> Bench {
        Bench {
            date: "2026-12-01".to_owned(),
            commit: "abc".to_owned(),
            quick: false,
            peers: Vec::new(),
            user_space: None,
            kernels: vec![Measured {
                series: "6.12",
                package: "6.12.118-1".to_owned(),
                figures,
            }],
        }
    }

    fn program(name: &str, calls: u64, nanoseconds: u64) -> Figure {
        Figure::Program(Program {
            tracer: DROPTRACE.to_owned(),
            load: "rule".to_owned(),
            packets: 100,
            name: name.to_owned(),
            calls,
            nanoseconds,
        })
    }

    #[test]
    fn a_ratio_has_a_row() {
        let sample = |seconds, traced: bool| {
            Figure::Sample(Sample {
                load: "rule".to_owned(),
                packets: 100_000,
                seconds,
                tracer: traced.then(|| DROPTRACE.to_owned()),
                cpu_seconds: 0.25,
            })
        };
        let page = markdown(&bench(vec![sample(1.0, false), sample(1.15, true)]));
        let row =
            "| 6.12 | droptrace | rule | 100000 | 1 | 10.00 | 11.50 | **1.150** | 2.50 | 0.0 % | 0.0 % |";
        assert!(page.contains(row), "{page}");
        assert!(page.starts_with("# Performance\n\n`cargo xtask bench` on 2026-12-01, at abc."));
        // What was not measured has no table.
        assert!(!page.contains("## Resident memory"), "{page}");
    }

    #[test]
    fn programs_of_one_name_are_one() {
        let page = markdown(&bench(vec![
            program("kfree_skb", 100, 30_000),
            program("kfree_skb", 100, 10_000),
            program("other", 10, 1_000),
        ]));
        let row = "| 6.12 | droptrace | rule | 410 | 2.1 | `kfree_skb` 200 × 200, `other` 10 × 100 |";
        assert!(page.contains(row), "{page}");
    }

    #[test]
    fn a_count_that_is_not_exact_stands_out() {
        let page = markdown(&bench(vec![Figure::Storm(Storm {
            tracer: DROPTRACE.to_owned(),
            load: "rule".to_owned(),
            packets: 100,
            dropped: 100,
            counted: 98,
            events: 50,
            lost: 48,
            uncounted: 2,
            cpu_seconds: 0.5,
            resident_kib: 20_480,
        })]));
        let row = "| 6.12 | droptrace | rule | 100 | 100 | 98 | **-2** | 50 | 48 | 2 | 0.50 | 20.0 |";
        assert!(page.contains(row), "{page}");
    }

    #[test]
    fn other_tracers_stand_beside_the_goals() {
        let tracer = "dropwatch".to_owned();
        let page = markdown(&bench(vec![
            Figure::Told(Told {
                tracer: tracer.clone(),
                load: "rule".to_owned(),
                dropped: 200,
                drops: 150,
                resident_kib: 2048,
            }),
            Figure::Cannot(Cannot {
                tracer,
                what: "load".to_owned(),
                why: "a | b".to_owned(),
            }),
        ]));
        assert!(page.contains("| | *to reach* | "), "{page}");
        assert!(page.contains(" | 75.0 % |  | 2.0 |\n"), "{page}");
        assert!(page.contains("| 6.12 | dropwatch | load | a \\| b |\n"), "{page}");
        // Others have no rows among droptrace's own.
        assert!(!page.contains("## With droptrace and without"), "{page}");
    }
}
