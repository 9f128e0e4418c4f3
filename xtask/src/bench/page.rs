//! The page of figures.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::figures::{self, Figure, Program, Ratio};
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

Under flood droptrace counts every drop and writes a line for a sample of them (2,000 at once, then 2,000 a second, for each
CPU and kind of drop). A line for every drop is not an option that it has: there is no figure for that.";

/// What is missing here.
const LIMITS: &str = "\
## Not measured

No other tracers in the same boot; no events per second of user space alone; no netns with IPVS services; no connections,
sockets or uptime as a curve. Sending is from one thread.";

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
    for part in PARTS {
        part.render(&bench.kernels, &mut page);
    }
    write!(page, "\n{LIMITS}\n").expect(WRITABLE);
    page
}

const WRITABLE: &str = "a string can be written to";

/// One table with what it tells.
struct Part {
    title: &'static str,
    about: &'static str,
    columns: &'static [&'static str],
    /// The rows of one kernel, without its name.
    rows: fn(&[Figure]) -> Vec<Vec<String>>,
}

const PARTS: &[Part] = &[
    Part {
        title: "With droptrace and without",
        about: "\
Counted time, same boot, in turn; medians. *Connections* are short ones with 1,000 bytes each way, *datagrams* a stream of
1,000 bytes each, both with conntrack at both ends and without a loss. The others are storms of which the server's netns drops
every packet: by a rule of nftables, since the port is closed, since a UDP socket's buffer or a listener's accept queue is
full; hosts without conntrack. droptrace's own CPU time is that until it had nothing left to do; as there is one CPU, most of it
falls into the sender's time. *Spread* is how far repeats lie apart. The fewer packets a storm has, the more of them
have a line of their own, and the higher is its ratio.",
        columns: &[
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
        rows: ratio_rows,
    },
    Part {
        title: "What the BPF programs cost",
        about: "\
Counted time by the kernel's own measure (`bpf_stats_enabled`), which holds its own two readings of the clock per call: about as many
nanoseconds as instructions, per connection or packet of each load. Full events of the sample are in it.",
        columns: &["load", "ns each", "calls each", "calls × ns of each program"],
        rows: cost_rows,
    },
    Part {
        title: "Storms on two CPUs",
        about: "\
Plain. *Dropped* is the kernel's own counter (of the rule, UdpNoPorts, UdpRcvbufErrors, TcpExtListenOverflows); the error is droptrace's
total less that. Lines and those said to have none must add up to the total.",
        columns: &[
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
        rows: needle_rows,
    },
    Part {
        title: "Resident memory",
        about: "Plain; a storm that a rule drops.",
        columns: &["drops so far", "resident MiB"],
        rows: memory_rows,
    },
];

impl Part {
    /// Writes the table; none where nothing was measured.
    fn render(&self, kernels: &[Measured], page: &mut String) {
        let rows: Vec<_> = kernels
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

fn ratio_rows(figures: &[Figure]) -> Vec<Vec<String>> {
    figures::ratios(figures)
        .iter()
        .map(|ratio| {
            vec![
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
    let mut loads: Vec<(&str, Vec<&Program>)> = Vec::new();
    for figure in figures {
        let Figure::Program(program) = figure else {
            continue;
        };
        match loads.last_mut() {
            Some((load, programs)) if *load == program.load => programs.push(program),
            _ => loads.push((&program.load, vec![program])),
        }
    }
    loads
        .into_iter()
        .map(|(load, programs)| {
            let each = |value: fn(&Program) -> u64| {
                programs
                    .iter()
                    .map(|program| value(program) as f64 / program.packets as f64)
                    .sum::<f64>()
            };
            vec![
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
            Figure::Start(start) => Some(start),
            _ => None,
        })
        .map(|start| {
            vec![
                start.namespaces.to_string(),
                format!("{:.2}", start.first_drop_seconds),
                format!("{:.2}", start.signal_to_prompt_seconds),
                format!("{:.2}", start.line_to_prompt_seconds),
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
    use super::super::figures::{Sample, Storm};
    use super::*;

    fn bench(figures: Vec<Figure>) -> Bench {
        Bench {
            date: "2026-12-01".to_owned(),
            commit: "abc".to_owned(),
            quick: false,
            kernels: vec![Measured {
                series: "6.12",
                package: "6.12.118-1".to_owned(),
                figures,
            }],
        }
    }

    fn program(name: &str, calls: u64, nanoseconds: u64) -> Figure {
        Figure::Program(Program {
            load: "rule".to_owned(),
            packets: 100,
            name: name.to_owned(),
            calls,
            nanoseconds,
        })
    }

    #[test]
    fn a_ratio_has_a_row() {
        let sample = |seconds, traced| {
            Figure::Sample(Sample {
                load: "rule".to_owned(),
                packets: 100_000,
                seconds,
                traced,
                cpu_seconds: 0.25,
            })
        };
        let page = markdown(&bench(vec![sample(1.0, false), sample(1.15, true)]));
        let row = "| 6.12 | rule | 100000 | 1 | 10.00 | 11.50 | **1.150** | 2.50 | 0.0 % | 0.0 % |";
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
        let row = "| 6.12 | rule | 410 | 2.1 | `kfree_skb` 200 × 200, `other` 10 × 100 |";
        assert!(page.contains(row), "{page}");
    }

    #[test]
    fn a_count_that_is_not_exact_stands_out() {
        let page = markdown(&bench(vec![Figure::Storm(Storm {
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
        let row = "| 6.12 | rule | 100 | 100 | 98 | **-2** | 50 | 48 | 2 | 0.50 | 20.0 |";
        assert!(page.contains(row), "{page}");
    }
}
