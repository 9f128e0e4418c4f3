//! `droptrace explain`: the catalogue, in words.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    io::{IsTerminal, stdout},
    path::Path,
    process::ExitCode,
};

use anyhow::Context;

use super::{args::ExplainArgs, problem::Problem, suggest};
use crate::diagnose::{
    Cause, Family, Topic, UNPROVOKED, catalogue, cause_by_slug,
    reasons::{KERNELS, causes_of},
    topic_by_slug, topics,
};

/// Width of text where no terminal tells its own.
const WIDTH: usize = 100;

pub(super) fn run(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    if let Some(path) = &args.reasons {
        std::fs::write(path, reasons()).with_context(|| format!("cannot write {}", path.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = match (&args.markdown, args.slug.as_deref()) {
        (Some(dir), _) => {
            write_pages(dir)?;
            return Ok(ExitCode::SUCCESS);
        }
        (None, None) => list(),
        (None, Some(slug)) => match (cause_by_slug(slug), topic_by_slug(slug)) {
            (Some(cause), _) => explain(cause),
            (None, Some(topic)) => explain_topic(topic),
            (None, None) => {
                return Err(Problem::usage(
                    format!("no cause is called {slug:?}{}", suggest::meant(slug)),
                    "`droptrace explain` lists all",
                )
                .into());
            }
        },
    };
    super::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

const FAMILIES: [(Family, &str); 11] = [
    (Family::Listener, "Listening sockets"),
    (Family::TimeWait, "TIME_WAIT, PAWS and old sequence numbers"),
    (Family::SourceCheck, "Source validation"),
    (Family::Conntrack, "Connection tracking"),
    (Family::Ipvs, "IPVS"),
    (Family::Netfilter, "Netfilter rules"),
    (Family::Routing, "Routing and neighbours"),
    (Family::Socket, "Sockets"),
    (Family::Device, "Devices, queues, programs and headers"),
    (Family::Benign, "Benign: freed, although nothing was lost"),
    (Family::Other, "What the catalogue does not explain"),
];

fn of_family(family: Family) -> impl Iterator<Item = &'static Cause> {
    catalogue()
        .iter()
        .copied()
        .filter(move |cause| cause.family == family)
}

fn list() -> String {
    let width = catalogue()
        .iter()
        .map(|cause| cause.slug.len())
        .max()
        .unwrap_or_default();
    let mut text = String::new();
    for (family, title) in FAMILIES {
        let mut causes = of_family(family).peekable();
        if causes.peek().is_none() {
            continue;
        }
        let _ = writeln!(text, "{title}");
        for cause in causes {
            let _ = writeln!(text, "  {:<width$}  {}", cause.slug, cause.title);
        }
        text.push('\n');
    }
    text.push_str("Topics\n");
    for topic in topics() {
        let _ = writeln!(text, "  {:<width$}  {}", topic.slug, topic.title);
    }
    text.push_str("\ndroptrace explain SLUG tells mechanism, evidence, remedy and counter.\n");
    text
}

fn explain_topic(topic: &Topic) -> String {
    let mut text = format!("{}: {}\n", topic.slug, topic.title);
    for paragraph in topic.text.split("\n\n") {
        let _ = writeln!(text, "\n{}", wrap(paragraph, "  "));
    }
    text.push_str("\nSee also\n");
    for slug in topic.see {
        let _ = writeln!(text, "  droptrace explain {slug}");
    }
    text
}

fn explain(cause: &Cause) -> String {
    let mut text = format!("{}: {}\n", cause.slug, cause.title);
    if cause.benign {
        text.push_str("benign: nothing was lost; shown with --benign only, always counted\n");
    }
    let _ = writeln!(text, "\nMechanism\n{}", wrap(cause.mechanism, "  "));
    if !cause.evidence.is_empty() {
        text.push_str("\nEvidence\n");
        for (name, meaning) in cause.evidence {
            let _ = writeln!(text, "  {name}\n{}", wrap(meaning, "      "));
        }
    }
    let _ = writeln!(text, "\nRemedy\n{}", wrap(cause.remedy, "  "));
    let _ = writeln!(
        text,
        "\nCounter\n  {}",
        cause.counter.map_or("none", |counter| counter.name)
    );
    text
}

fn wrap(text: &str, indent: &str) -> String {
    let columns = stdout()
        .is_terminal()
        .then(|| crossterm::terminal::size().ok())
        .flatten();
    let width = columns.map_or(WIDTH, |(columns, _)| usize::from(columns).clamp(40, WIDTH));
    textwrap::fill(
        text,
        textwrap::Options::new(width)
            .initial_indent(indent)
            .subsequent_indent(indent),
    )
}

/// Writes the page of each cause, and the list of all.
fn write_pages(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make the folder {}", dir.display()))?;
    for (name, page) in pages() {
        let path = dir.join(name);
        std::fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn pages() -> impl Iterator<Item = (String, String)> {
    catalogue()
        .iter()
        .map(|cause| (format!("{}.md", cause.slug), page(cause)))
        .chain([("README.md".to_owned(), index())])
}

fn index() -> String {
    let mut page =
        "# Causes\n\nMade from the catalogue by `droptrace explain --markdown docs/causes`.\n".to_owned();
    for (family, title) in FAMILIES {
        let mut causes = of_family(family).peekable();
        if causes.peek().is_none() {
            continue;
        }
        let _ = write!(page, "\n## {title}\n\n");
        for cause in causes {
            let _ = writeln!(page, "- [`{0}`]({0}.md): {1}", cause.slug, cause.title);
        }
    }
    page
}

fn page(cause: &Cause) -> String {
    let mut page = format!("# `{}`: {}\n", cause.slug, cause.title);
    if cause.benign {
        page.push_str("\nBenign: nothing was lost. Shown with `--benign` only, always counted.\n");
    }
    let _ = write!(page, "\n## Mechanism\n\n{}\n", markdown(cause.mechanism));
    if !cause.evidence.is_empty() {
        page.push_str("\n## Evidence\n\n| field | meaning |\n|---|---|\n");
        for (name, meaning) in cause.evidence {
            let _ = writeln!(page, "| `{name}` | {} |", markdown(meaning).replace('|', "\\|"));
        }
    }
    let _ = write!(page, "\n## Remedy\n\n{}\n", markdown(cause.remedy));
    let counter = cause
        .counter
        .map_or_else(|| "None.".to_owned(), |counter| format!("`{}`", counter.name));
    let _ = write!(page, "\n## Counter\n\n{counter}\n");
    if let Some((_, why)) = UNPROVOKED.iter().find(|(slug, _)| *slug == cause.slug) {
        let _ = write!(
            page,
            "\n## Proof\n\nThis cause rests on unit tests from events in the shape of each kernel; no scenario provokes it: {}.\n",
            markdown(why)
        );
    }
    page
}

/// The page that tells what becomes of each of the kernel's drop reasons.
fn reasons() -> String {
    let names: BTreeSet<&str> = KERNELS.iter().flat_map(|(_, list)| list.lines()).collect();
    let mut page = "# Drop reasons\n\n\
        Made from the catalogue by `droptrace explain --reasons docs/reasons.md`. The names are those of the kernels that droptrace is tested \
        on, from their BTF and without the prefix `SKB_DROP_REASON_`; 5.10 has no reasons. A drop with a reason is one of the causes \
        beside it, which one is told by its place, the packet, and what a hook saw before; if it is none of them, and where none is named, it \
        is `kernel-reason` (of NOT_SPECIFIED, `unknown`) and keeps the kernel's own word. Causes that go by the place alone, whatever the \
        reason, such as `tap-overflow`, are left out.\n\n\
        | kernel | reasons | with a cause |\n|---|---|---|\n"
        .to_owned();
    for (series, list) in KERNELS {
        let known = list.lines().filter(|name| !causes_of(name).is_empty()).count();
        let _ = writeln!(page, "| {series} | {} | {known} |", list.lines().count());
    }
    page.push_str("\n| reason | kernels | causes |\n|---|---|---|\n");
    for name in names {
        let kernels: Vec<&str> = KERNELS
            .iter()
            .filter(|(_, list)| list.lines().any(|each| each == name))
            .map(|(series, _)| *series)
            .collect();
        let causes: Vec<String> = causes_of(name)
            .iter()
            .map(|cause| {
                let benign = if cause.benign { " (benign)" } else { "" };
                format!("[`{0}`](causes/{0}.md){benign}", cause.slug)
            })
            .collect();
        let causes = if causes.is_empty() {
            "`kernel-reason`".to_owned()
        } else {
            causes.join(", ")
        };
        let _ = writeln!(page, "| `{name}` | {} | {causes} |", kernels.join(", "));
    }
    page
}

/// Plain text as Markdown: words such as `__icmp_send` or `*` would be taken for emphasis.
fn markdown(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('*', "\\*")
        .replace('_', "\\_")
        .replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checked_in_pages_are_those_of_the_catalogue() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/causes");
        let mut expected: Vec<String> = Vec::new();
        for (name, page) in pages() {
            let checked_in = std::fs::read_to_string(dir.join(&name)).unwrap_or_default();
            assert!(
                checked_in == page,
                "docs/causes/{name} is out of date: droptrace explain --markdown docs/causes"
            );
            expected.push(name);
        }
        for entry in std::fs::read_dir(dir).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(expected.contains(&name), "docs/causes/{name} is no cause's page");
        }
    }

    #[test]
    fn the_checked_in_reasons_are_those_of_the_catalogue() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reasons.md");
        assert!(
            std::fs::read_to_string(path).unwrap_or_default() == reasons(),
            "docs/reasons.md is out of date: droptrace explain --reasons docs/reasons.md"
        );
    }

    #[test]
    fn every_cause_is_listed_and_explained() {
        let list = list();
        for cause in catalogue() {
            assert!(list.contains(&format!("  {} ", cause.slug)), "{}", cause.slug);
            let text = explain(cause);
            assert!(text.contains(cause.title));
            assert!(cause.evidence.iter().all(|(name, _)| text.contains(name)));
        }
    }

    #[test]
    fn a_topic_is_listed_and_explained() {
        for topic in topics() {
            assert!(list().contains(topic.slug));
            assert!(explain_topic(topic).contains(topic.title));
        }
    }
}
