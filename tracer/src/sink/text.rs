//! Lines for people: one per drop, with its evidence and remedy below.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io::{self, BufWriter, Write},
};

use anstyle::{AnsiColor, Style};

use super::{Learned, Origin, Sink, is_dumb_terminal, summary, words};
use crate::diagnose::{Brief, Coverage, Drop, FoundBy, Gap, Name, Record, Split, Verdict};

/// Colours, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paint {
    /// No escape sequence at all.
    Plain,
    /// For a terminal.
    Colour,
}

impl Paint {
    /// Colour for a terminal that is not dumb, unless the environment holds a `NO_COLOR` that is not empty.
    pub fn for_terminal(terminal: bool) -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if terminal && !refused && !is_dumb_terminal() {
            Self::Colour
        } else {
            Self::Plain
        }
    }

    /// A heading.
    pub(crate) fn heading(self, text: &str) -> String {
        self.paint(AnsiColor::Cyan.on_default().bold(), text)
    }

    /// What matters most in a line.
    pub(crate) fn strong(self, text: &str) -> String {
        self.paint(CAUSE, text)
    }

    /// What matters least.
    pub(crate) fn faint(self, text: &str) -> String {
        self.paint(FAINT, text)
    }

    fn paint(self, style: Style, text: &str) -> String {
        match self {
            Self::Plain => text.to_owned(),
            Self::Colour => format!("{style}{text}{style:#}"),
        }
    }
}

const CAUSE: Style = Style::new().bold();
const FAINT: Style = Style::new().dimmed();
const fn verdict_style(verdict: Verdict) -> Style {
    let colour = match verdict {
        Verdict::Dropped => AnsiColor::Red,
        Verdict::Rejected => AnsiColor::Yellow,
        Verdict::Misdelivered => AnsiColor::Magenta,
    };
    colour.on_default()
}

/// What a later drop of the same cause need not tell again.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    /// Clock time of the drop whose remedy was shown in full.
    time: String,
    counter: Option<String>,
    /// Commands of the remedy: those of another port or address are others.
    commands: Vec<Option<String>>,
}

/// Writes text lines, each drop as soon as it comes.
#[derive(Debug)]
pub struct Text<W: Write> {
    out: BufWriter<W>,
    paint: Paint,
    /// What was last told of a cause in full.
    told: BTreeMap<String, Told>,
    names: Learned,
    coverage: Option<Coverage>,
    gaps_told: BTreeSet<(String, Option<String>)>,
    notes_told: BTreeSet<String>,
    lost_told: u64,
}

impl<W: Write> Text<W> {
    /// A sink that writes to `out`.
    pub fn new(out: W, paint: Paint) -> Self {
        Self {
            out: BufWriter::new(out),
            paint,
            told: BTreeMap::new(),
            names: Learned::default(),
            coverage: None,
            gaps_told: BTreeSet::new(),
            notes_told: BTreeSet::new(),
            lost_told: 0,
        }
    }

    fn coverage(&mut self, coverage: &Coverage) -> String {
        let mut text = String::new();
        let _ = match &self.coverage {
            None => writeln!(
                text,
                "droptrace {} on Linux {}, watching {}; {}; times are UTC",
                coverage.version,
                coverage.kernel,
                words::scope(coverage),
                words::coverage(coverage)
            ),
            Some(before) if before.scope != coverage.scope => {
                writeln!(text, "scope changed: {}", words::scope(coverage))
            }
            Some(_) => writeln!(text, "coverage changed: {}", words::coverage(coverage)),
        };
        let new: Vec<&Gap> = coverage
            .gaps
            .iter()
            .filter(|gap| self.gaps_told.insert((gap.cause.clone(), gap.field.clone())))
            .collect();
        for line in words::gaps(new) {
            let _ = writeln!(text, "{}", self.paint.paint(FAINT, &format!("  {line}")));
        }
        for note in &coverage.notes {
            if self.notes_told.insert(note.clone()) {
                let _ = writeln!(text, "{}", self.paint.paint(FAINT, &format!("  note: {note}")));
            }
        }
        self.coverage = Some(coverage.clone());
        text
    }

    fn drop(&mut self, drop: &Drop) -> String {
        let mut text = String::new();
        let time = words::clock(&drop.time);
        let _ = write!(
            text,
            "{time} {} {} {}",
            self.paint.paint(CAUSE, &drop.cause),
            self.paint.paint(verdict_style(drop.verdict), drop.verdict.name()),
            words::packet(drop)
        );
        let place = words::place(drop);
        if !place.is_empty() {
            let _ = write!(text, " {place}");
        }
        if let Some(owner) = &drop.owner {
            let _ = write!(text, " {}", words::owner(owner));
        }
        if drop.found_by == FoundBy::Counter {
            let _ = write!(text, " ×{}", drop.packets);
        } else if drop.packets > 1 {
            let _ = write!(
                text,
                " ×{} (with {} more of its kind)",
                drop.packets,
                drop.packets - 1
            );
        }
        text.push('\n');
        self.below(&mut text, drop, time);
        text
    }

    fn name(&self, name: &Name) -> String {
        let whose = words::whose(name.pod.as_deref(), name.container.as_deref()).unwrap_or_default();
        let addresses: Vec<String> = name.addresses.iter().map(ToString::to_string).collect();
        let text = format!(
            "netns {} is that of {whose} ({})",
            name.netns,
            addresses.join(", ")
        );
        self.paint.paint(FAINT, text.trim_end_matches(" ()")) + "\n"
    }

    /// One line: evidence and remedy are below another drop of its kind.
    fn brief(&self, brief: &Brief) -> String {
        let split = match brief.split {
            Split::Exact => "",
            Split::Sampled => " (label of its kind)",
        };
        format!(
            "{} {} {} {}{split}\n",
            words::clock(&brief.time),
            self.paint.paint(CAUSE, &brief.cause),
            self.paint
                .paint(verdict_style(brief.verdict), brief.verdict.name()),
            words::brief(brief)
        )
    }

    /// Evidence and remedy, indented.
    fn below(&mut self, text: &mut String, drop: &Drop, time: &str) {
        let mut line = |name: &str, content: &str| {
            let name = self.paint.paint(FAINT, &format!("{name:<9}"));
            let _ = writeln!(text, "    {name} {}", words::clean(content));
        };
        let commands: Vec<_> = drop.remedy.iter().map(|remedy| remedy.command.clone()).collect();
        let told = self.told.get(&drop.cause);
        if told.is_none() {
            line("why", &drop.title);
        }
        let evidence = words::pairs(&drop.evidence);
        if !evidence.is_empty() {
            line("evidence", &evidence);
        }
        if let Some(died_as) = &drop.died_as {
            line("died as", died_as);
        }
        if let Some(counter) = &drop.counter
            && told.is_none_or(|told| told.counter.as_ref() != Some(counter))
        {
            line("counter", counter);
        }
        if told.is_none() {
            for (field, reason) in &drop.missing {
                line("missing", &format!("{field}: {reason}"));
            }
        }
        if let Some(told) = told.filter(|told| told.commands == commands) {
            if let Some(remedy) = drop.remedy.first() {
                line("remedy", &format!("in full at {}; {}", told.time, remedy.action));
            }
            return;
        }
        for remedy in &drop.remedy {
            line("remedy", &remedy.action);
            if let Some(command) = &remedy.command {
                line("", &format!("$ {command}"));
            }
            line("", &remedy.effect);
        }
        let told = Told {
            time: time.to_owned(),
            counter: drop.counter.clone(),
            commands,
        };
        self.told.insert(drop.cause.clone(), told);
    }
}

impl<W: Write + Send> Sink for Text<W> {
    fn record(&mut self, record: &Record, _: Option<Origin<'_>>) -> io::Result<()> {
        self.names.learn(record);
        let text = match record {
            Record::Coverage(coverage) => self.coverage(coverage),
            Record::Drop(drop) => self.drop(drop),
            Record::Brief(brief) => self.brief(brief),
            Record::Counts(counts) if counts.lost_events > self.lost_told => {
                let more = counts.lost_events - self.lost_told;
                self.lost_told = counts.lost_events;
                format!(
                    "{} not shown one by one, but counted: they came faster than full events could follow\n",
                    words::count(more, "drop")
                )
            }
            Record::Name(name) => self.name(name),
            Record::Counts(_) => String::new(),
            Record::Summary(end) => summary::text(end, self.coverage.as_ref(), &self.names),
        };
        self.out.write_all(text.as_bytes())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn hidden(&mut self, record: &Record) {
        self.names.learn(record);
    }

    fn finish(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::samples;

    fn render(records: &[Record], paint: Paint) -> String {
        let mut out = Vec::new();
        let mut sink = Text::new(&mut out, paint);
        for record in records {
            sink.record(record, None).unwrap();
        }
        sink.finish().unwrap();
        drop(sink);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_run_reads_well() {
        let mut records = samples::records_of_every_drop();
        let mut again = samples::accept_queue();
        again.time = "2026-01-02T03:04:06.000000000Z".into();
        again.sport = Some(40001);
        records.insert(3, Record::Drop(Box::new(again)));
        insta::assert_snapshot!(render(&records, Paint::Plain));
    }

    #[test]
    fn pods_stand_where_their_netns_stood() {
        let first = samples::accept_queue();
        let mut second = first.clone();
        samples::name().join(&mut second);
        second.dst_name = Some("default/db".into());
        let records = [
            Record::Drop(Box::new(first)),
            Record::Name(samples::name()),
            Record::Drop(Box::new(second)),
            Record::Summary(samples::summary()),
        ];
        let text = render(&records, Paint::Plain);
        for expected in [
            "60 B in eth0, netns web nginx[1234]",
            "netns 4026532000 is that of pod default/web (10.0.0.2)\n",
            "10.0.0.1:40000 → 10.0.0.2:80 (default/db) tcp S 60 B in eth0, pod default/web nginx[1234]",
            "accept-queue-full      dropped       default/web",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }

    #[test]
    fn another_command_is_never_folded_away() {
        let first = samples::accept_queue();
        let mut second = first.clone();
        second.remedy[0].command = Some("ss -tlnp sport = :81".into());
        second.counter = Some("TcpOutRsts".into());
        let same = second.clone();
        let records = [first, second, same].map(|drop| Record::Drop(Box::new(drop)));
        let text = render(&records, Paint::Plain);
        assert_eq!(text.matches("$ ss -tlnp sport = :81").count(), 1, "{text}");
        assert_eq!(text.matches("in full at").count(), 1, "{text}");
        assert_eq!(text.matches("TcpOutRsts").count(), 1, "{text}");
    }

    #[test]
    fn a_hidden_drop_still_names_its_netns() {
        let mut out = Vec::new();
        let mut sink = Text::new(&mut out, Paint::Plain);
        let mut drop = samples::accept_queue();
        drop.netns = Some(samples::counts().causes[0].netns);
        drop.netns_name = Some("hidden".into());
        sink.hidden(&Record::Drop(Box::new(drop)));
        let mut end = samples::summary();
        end.reconcile.clear();
        end.syn_unanswered.clear();
        sink.record(&Record::Summary(end), None).unwrap();
        sink.finish().unwrap();
        std::mem::drop(sink);
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("hidden"), "{text}");
    }

    #[test]
    fn no_escape_sequence_without_a_terminal() {
        assert!(!render(&samples::records(), Paint::Plain).contains('\x1b'));
        assert!(render(&samples::records(), Paint::Colour).contains('\x1b'));
    }

    #[test]
    fn a_gap_is_told_once() {
        let coverage = Record::Coverage(samples::coverage());
        let text = render(&[coverage.clone(), coverage], Paint::Plain);
        assert_eq!(text.matches("not seen: conntrack-table-full: ").count(), 1);
        assert!(text.contains("coverage changed"));
    }
}
