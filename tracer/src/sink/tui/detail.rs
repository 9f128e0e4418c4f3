//! The lines of the detail pane and of the popups, before they are wrapped.

use super::state::State;
use crate::{
    diagnose::{Drop, cause_by_slug},
    sink::words,
};

/// How a line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Title,
    Heading,
    Plain,
    Command,
    Faint,
}

/// A line, and how far what is wrapped from it is set in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) look: Look,
    pub(super) indent: usize,
    pub(super) text: String,
}

fn line(look: Look, indent: usize, text: impl Into<String>) -> Line {
    Line {
        look,
        indent,
        text: text.into(),
    }
}

/// Everything about one drop; `compact` where rows are few.
pub(super) fn of_drop(drop: &Drop, compact: bool) -> Vec<Line> {
    let mut lines = vec![
        line(Look::Title, 0, &drop.title),
        line(Look::Plain, 0, words::packet(drop)),
    ];
    let mut facts = vec![drop.verdict.name().to_owned()];
    facts.extend(Some(words::place(drop)).filter(|place| !place.is_empty()));
    facts.extend(drop.owner.as_ref().map(words::owner));
    lines.push(line(Look::Plain, 0, facts.join(", ")));
    if drop.packets > 1 {
        lines.push(line(
            Look::Faint,
            0,
            format!("stands for {} packets of its kind", drop.packets),
        ));
    }
    let has_evidence = words::known(&drop.evidence).next().is_some();
    if has_evidence && compact {
        let text = format!("evidence: {}", words::pairs(&drop.evidence));
        lines.push(line(Look::Plain, 2, text));
    } else if has_evidence {
        lines.push(line(Look::Heading, 0, "Evidence"));
        for (name, value) in words::known(&drop.evidence) {
            lines.push(line(Look::Plain, 4, format!("  {name}: {}", words::value(value))));
        }
    }
    if let Some(died_as) = &drop.died_as {
        lines.push(line(Look::Plain, 4, format!("  died as: {died_as}")));
    }
    if !drop.remedy.is_empty() {
        lines.push(line(Look::Heading, 0, "Remedy"));
    }
    for remedy in &drop.remedy {
        lines.push(line(
            Look::Plain,
            2,
            format!("• {}", words::clean(&remedy.action)),
        ));
        if let Some(command) = &remedy.command {
            lines.push(line(Look::Command, 4, format!("  $ {}", words::clean(command))));
        }
        lines.push(line(
            Look::Faint,
            2,
            format!("  {}", words::clean(&remedy.effect)),
        ));
    }
    if let Some(counter) = &drop.counter {
        lines.push(line(Look::Heading, 0, "Counter"));
        lines.push(line(Look::Plain, 2, format!("  {counter}")));
    }
    lines.push(line(Look::Heading, 0, "Time"));
    lines.push(line(
        Look::Plain,
        2,
        format!("  {} UTC", drop.time.trim_end_matches('Z').replace('T', " ")),
    ));
    if !drop.missing.is_empty() {
        lines.push(line(Look::Heading, 0, "Not known"));
        for (field, reason) in &drop.missing {
            lines.push(line(
                Look::Faint,
                4,
                format!("  {field}: {}", words::clean(reason)),
            ));
        }
    }
    lines
}

/// A cause in general, and its totals.
pub(super) fn of_cause(state: &State, slug: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    let Some(cause) = cause_by_slug(slug) else {
        return vec![line(Look::Title, 0, slug)];
    };
    lines.push(line(Look::Title, 0, cause.title));
    lines.push(line(Look::Heading, 0, "Packets by netns"));
    for count in state.counts.causes.iter().filter(|count| count.cause == slug) {
        let netns = words::netns(Some(count.netns), state.names.name(count.netns))
            .unwrap_or_else(|| "not known".to_owned());
        lines.push(line(
            Look::Plain,
            4,
            format!("  {} {} in {netns}", count.packets, count.verdict.name()),
        ));
    }
    if let Some(lost) = state.counts.lost.get(slug).filter(|lost| **lost > 0) {
        lines.push(line(
            Look::Faint,
            4,
            format!("  {lost} of them counted, but not listed"),
        ));
    }
    for (heading, text) in [("Mechanism", cause.mechanism), ("Remedy", cause.remedy)] {
        lines.push(line(Look::Heading, 0, heading));
        lines.push(line(Look::Plain, 0, text));
    }
    if let Some(counter) = cause.counter {
        lines.push(line(Look::Heading, 0, "Counter"));
        lines.push(line(Look::Plain, 2, format!("  {}", counter.name)));
    }
    lines
}

/// What the popup of coverage says.
pub(super) fn of_coverage(state: &State) -> Vec<Line> {
    let Some(coverage) = &state.coverage else {
        return vec![line(Look::Plain, 0, "The hooks are not attached yet.")];
    };
    let mut lines = vec![line(Look::Title, 0, words::coverage(coverage))];
    if !coverage.gaps.is_empty() {
        lines.push(line(Look::Heading, 0, "Gaps"));
    }
    for gap in &coverage.gaps {
        let what = match &gap.field {
            Some(field) => format!("{} without {field}", gap.cause),
            None => format!("{} is not seen", gap.cause),
        };
        lines.push(line(Look::Plain, 4, format!("  {what}: {}", gap.reason)));
    }
    if !coverage.notes.is_empty() {
        lines.push(line(Look::Heading, 0, "Notes"));
    }
    for note in &coverage.notes {
        lines.push(line(Look::Plain, 4, format!("  {note}")));
    }
    lines.push(line(Look::Heading, 0, "Hooks"));
    for hook in &coverage.hooks {
        let mut text = format!("  {}: {}", hook.hook, hook.state.replace('_', " "));
        if let Some(method) = &hook.method {
            text.push_str(", ");
            text.push_str(method);
        }
        if let Some(symbol) = hook.symbol.as_ref().filter(|symbol| **symbol != hook.hook) {
            text.push_str(" on ");
            text.push_str(symbol);
        }
        if let Some(reason) = &hook.reason {
            text.push_str(": ");
            text.push_str(reason);
        }
        let look = if words::is_attached(hook) {
            Look::Plain
        } else {
            Look::Faint
        };
        lines.push(line(look, 4, text));
    }
    lines
}

/// Keys and what they do.
pub(super) const KEYS: [(&str, &str); 11] = [
    ("q", "quit; the summary stays on the screen"),
    ("space", "pause the list; counting goes on"),
    ("tab", "next pane: causes, drops, detail"),
    ("↑↓ jk", "move, or scroll the detail"),
    ("pgup pgdn", "move by ten"),
    ("home end", "newest (follows what comes), oldest"),
    ("enter f", "only drops of the selected cause"),
    ("esc", "all drops again"),
    ("b", "show or hide what is benign"),
    ("c", "coverage: hooks and gaps"),
    ("?", "this help"),
];

/// What the popup of help says.
pub(super) fn of_help() -> Vec<Line> {
    let mut lines: Vec<Line> = KEYS
        .iter()
        .map(|(key, what)| line(Look::Plain, 12, format!("{key:<10}  {what}")))
        .collect();
    lines.push(line(Look::Plain, 0, ""));
    lines.push(line(
        Look::Faint,
        0,
        "Totals are counted in the kernel and are exact. The list shows the drops that came as full events; lost are \
         those that were counted only.",
    ));
    lines
}

/// What to say while there is no drop to list.
pub(super) fn of_nothing(state: &State) -> Vec<Line> {
    let Some(coverage) = &state.coverage else {
        return vec![line(Look::Plain, 0, "Attaching the hooks …")];
    };
    if let Some(waiting) = state.waiting() {
        let waiting = words::count(waiting as u64, "new drop");
        return vec![
            line(Look::Plain, 0, format!("Paused: {waiting} not listed yet.")),
            line(Look::Faint, 0, "space resumes."),
        ];
    }
    if let Some(filter) = &state.filter {
        return vec![
            line(Look::Plain, 0, format!("No drop of {filter} is listed.")),
            line(Look::Faint, 0, "esc shows all drops again."),
        ];
    }
    let (lost, benign) = state.packets();
    let attached = coverage
        .hooks
        .iter()
        .filter(|hook| words::is_attached(hook))
        .count();
    let watching = format!(
        "Watching {} with {} on Linux {}.",
        words::scope(coverage),
        words::count(attached as u64, "hook"),
        coverage.kernel
    );
    if lost > 0 {
        return vec![
            line(
                Look::Plain,
                0,
                "Drops were counted, but none came as a full event yet.",
            ),
            line(Look::Faint, 0, watching),
        ];
    }
    let mut lines = vec![
        line(Look::Plain, 0, "Nothing was dropped yet."),
        line(Look::Faint, 0, watching),
    ];
    if benign > 0 {
        lines.push(line(
            Look::Faint,
            0,
            format!(
                "{} freed without loss: b shows them.",
                words::count(benign, "packet")
            ),
        ));
    }
    lines.push(line(
        Look::Faint,
        0,
        "To see one, connect to a port that nobody listens on: curl http://127.0.0.1:9",
    ));
    lines
}
