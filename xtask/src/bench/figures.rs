//! What a guest measured: reading it, and what comes of repeats.

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

/// One line of a guest's results, as `droptrace-tests bench` writes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub(crate) enum Figure {
    Sample(Sample),
    Storm(Storm),
    Program(Program),
    Start(Start),
    Needle(Needle),
    Memory(Memory),
    Point(Point),
    Idle(Idle),
    PerDrop(PerDrop),
    Told(Told),
    Cannot(Cannot),
    Machine(Machine),
}

/// What droptrace is called in figures.
pub(crate) const DROPTRACE: &str = "droptrace";

/// Work that was done once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) load: String,
    /// Connections or packets.
    pub(crate) packets: u64,
    pub(crate) seconds: f64,
    /// What watched meanwhile; droptrace, one of its modes, or another tracer.
    pub(crate) tracer: Option<String>,
    /// CPU time that it used itself, until it had nothing left to do.
    pub(crate) cpu_seconds: f64,
}

/// What came of a storm with droptrace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Storm {
    pub(crate) tracer: String,
    pub(crate) load: String,
    pub(crate) packets: u64,
    /// By the kernel's own counter.
    pub(crate) dropped: u64,
    /// By droptrace, of the storm's cause.
    pub(crate) counted: u64,
    /// With a line of their own.
    pub(crate) events: u64,
    /// Said to have no line.
    pub(crate) lost: u64,
    /// Drops in no total.
    pub(crate) uncounted: u64,
    pub(crate) cpu_seconds: f64,
    pub(crate) resident_kib: u64,
}

/// What one BPF program did during a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Program {
    pub(crate) tracer: String,
    pub(crate) load: String,
    pub(crate) packets: u64,
    /// Of which the kernel keeps 15 letters.
    pub(crate) name: String,
    pub(crate) calls: u64,
    /// Of all calls together.
    pub(crate) nanoseconds: u64,
}

/// A start and an end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) tracer: String,
    pub(crate) namespaces: usize,
    pub(crate) first_drop_seconds: f64,
    pub(crate) signal_to_prompt_seconds: f64,
    pub(crate) line_to_prompt_seconds: Option<f64>,
}

/// Rare drops in a storm of another cause.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Needle {
    pub(crate) needles: u64,
    /// With a line of their own.
    pub(crate) events: u64,
    /// Packets of the storm, and what became of them by the kernel and by droptrace.
    pub(crate) storm: u64,
    pub(crate) dropped: u64,
    pub(crate) counted: u64,
}

/// Resident memory after so many drops.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) drops: u64,
    pub(crate) resident_kib: u64,
}

/// The same load under one condition, without droptrace and with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    pub(crate) curve: String,
    /// How much there is of what the curve is over.
    pub(crate) at: u64,
    pub(crate) load: String,
    pub(crate) packets: u64,
    pub(crate) without_seconds: f64,
    pub(crate) with_seconds: f64,
    /// CPU time of droptrace for it.
    pub(crate) cpu_seconds: f64,
    /// CPU time of droptrace in ten seconds in which nothing happens.
    pub(crate) idle_cpu_seconds: f64,
}

/// CPU time of droptrace while nothing happens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Idle {
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
}

/// What the BPF programs take for one drop, by the kernel's own measure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PerDrop {
    /// Drops of which all should have a line, and how many have.
    pub(crate) few: u64,
    pub(crate) few_events: u64,
    /// Drops of which most have none, and how many have one.
    pub(crate) many: u64,
    pub(crate) many_events: u64,
    /// With a line.
    pub(crate) full_nanoseconds: f64,
    /// Without; where there are such.
    pub(crate) counted_nanoseconds: Option<f64>,
}

/// What another tracer told of a storm on two CPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) tracer: String,
    pub(crate) load: String,
    /// By the kernel's own counter.
    pub(crate) dropped: u64,
    /// That it told.
    pub(crate) drops: u64,
    pub(crate) resident_kib: u64,
}

/// What could not be measured of a tracer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cannot {
    pub(crate) tracer: String,
    pub(crate) what: String,
    pub(crate) why: String,
}

/// What this machine did beside a guest while it ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The way the guest was run.
    pub(crate) way: String,
    pub(crate) seconds: f64,
    pub(crate) cpus: usize,
    /// CPUs that the guest was given, on average.
    pub(crate) guest_cpus: f64,
    /// CPUs that other work kept busy, on average.
    pub(crate) other_cpus: f64,
}

/// Reads all lines.
///
/// # Errors
/// When one of them is no figure, or there is none.
pub(crate) fn parse(lines: &[String]) -> Result<Vec<Figure>> {
    anyhow::ensure!(!lines.is_empty(), "the guest measured nothing");
    lines
        .iter()
        .map(|line| serde_json::from_str(line).with_context(|| format!("no figure: {line}")))
        .collect()
}

/// The middle of repeats, or the mean of both that are in the middle.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    Some(f64::midpoint(sorted[sorted.len() / 2 - 1], upper))
}

/// How far repeats lie apart, as a part of their median.
pub(crate) fn spread(values: &[f64]) -> Option<f64> {
    let most = values.iter().copied().reduce(f64::max)?;
    let least = values.iter().copied().reduce(f64::min)?;
    Some((most - least) / median(values)?)
}

/// A load without and with something that watches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ratio<'a> {
    pub(crate) tracer: &'a str,
    pub(crate) load: &'a str,
    pub(crate) packets: u64,
    pub(crate) repeats: usize,
    /// Microseconds per connection or packet, median of the repeats.
    pub(crate) without: f64,
    pub(crate) with: f64,
    /// CPU time of what watches itself, likewise.
    pub(crate) own: f64,
    /// Of the repeats without and with it: which differences mean nothing.
    pub(crate) spreads: [f64; 2],
}

impl Ratio<'_> {
    /// How many times as long it takes with it.
    pub(crate) fn ratio(&self) -> f64 {
        self.with / self.without
    }

    /// Whether the difference is larger than that between repeats of the same.
    pub(crate) fn is_difference(&self) -> bool {
        (self.ratio() - 1.0).abs() > self.spreads[0].max(self.spreads[1])
    }
}

/// What samples say of each tracer with each load, in their order. A load that was not measured both ways is left out.
pub(crate) fn ratios(figures: &[Figure]) -> Vec<Ratio<'_>> {
    let samples: Vec<&Sample> = figures
        .iter()
        .filter_map(|figure| match figure {
            Figure::Sample(sample) => Some(sample),
            _ => None,
        })
        .collect();
    let mut pairs: Vec<(&str, &str)> = Vec::new();
    for sample in &samples {
        if let Some(tracer) = &sample.tracer
            && !pairs.contains(&(tracer, &sample.load))
        {
            pairs.push((tracer, &sample.load));
        }
    }
    pairs
        .into_iter()
        .filter_map(|(tracer, load)| ratio(tracer, load, &samples))
        .collect()
}

fn ratio<'a>(tracer: &'a str, load: &'a str, samples: &[&Sample]) -> Option<Ratio<'a>> {
    let of = |tracer: Option<&str>, seconds: fn(&Sample) -> f64| -> Vec<f64> {
        samples
            .iter()
            .filter(|sample| sample.load == load && sample.tracer.as_deref() == tracer)
            .map(|sample| seconds(sample) * 1e6 / sample.packets as f64)
            .collect()
    };
    let (without, with) = (
        of(None, |sample| sample.seconds),
        of(Some(tracer), |sample| sample.seconds),
    );
    Some(Ratio {
        tracer,
        load,
        packets: samples.iter().find(|sample| sample.load == load)?.packets,
        repeats: without.len().min(with.len()),
        without: median(&without)?,
        with: median(&with)?,
        own: median(&of(Some(tracer), |sample| sample.cpu_seconds))?,
        spreads: [spread(&without)?, spread(&with)?],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(seen: Option<f64>, expected: f64) {
        let seen = seen.expect("a value");
        assert!((seen - expected).abs() < 1e-9, "{seen} is not {expected}");
    }

    #[test]
    fn the_median_is_in_the_middle() {
        near(median(&[3.0, 1.0, 2.0]), 2.0);
        near(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn the_spread_is_relative() {
        near(spread(&[2.0, 1.9, 2.1]), 0.1);
        assert_eq!(spread(&[]), None);
    }

    fn sample(load: &str, seconds: f64, traced: bool) -> Figure {
        let tracer = traced.then(|| DROPTRACE.to_owned());
        Figure::Sample(Sample {
            load: load.to_owned(),
            packets: 1000,
            seconds,
            tracer,
            cpu_seconds: 0.0,
        })
    }

    #[test]
    fn a_ratio_is_that_of_medians() {
        let figures = [
            sample("rule", 1.0, false),
            sample("rule", 1.1, true),
            sample("rule", 1.0, false),
            sample("rule", 1.2, true),
            sample("rule", 9.0, false),
            sample("rule", 1.2, true),
            // Never measured without.
            sample("closed port", 1.0, true),
        ];
        let ratios = ratios(&figures);
        assert_eq!(ratios.len(), 1);
        assert_eq!((ratios[0].tracer, ratios[0].load), (DROPTRACE, "rule"));
        assert_eq!(ratios[0].repeats, 3);
        near(Some(ratios[0].ratio()), 1.2);
        near(Some(ratios[0].without), 1000.0);
        // One repeat took nine times as long.
        assert!(!ratios[0].is_difference());
    }

    #[test]
    fn a_difference_is_larger_than_the_spread() {
        let figures = [1.0, 1.01].map(|seconds| {
            [
                sample("rule", seconds, false),
                sample("rule", seconds + 0.05, true),
            ]
        });
        assert!(ratios(figures.as_flattened())[0].is_difference());
    }

    #[test]
    fn lines_are_figures_or_an_error() {
        let lines = [r#"{"type":"memory","drops":5,"resident_kib":20480}"#.to_owned()];
        let memory = Memory {
            drops: 5,
            resident_kib: 20_480,
        };
        assert_eq!(parse(&lines).expect("figures"), [Figure::Memory(memory)]);
        assert!(parse(&[r#"{"type":"memory"}"#.to_owned()]).is_err());
        assert!(parse(&[]).is_err());
    }
}
