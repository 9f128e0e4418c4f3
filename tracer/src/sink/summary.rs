//! The end of a run, in text.

use std::fmt::Write as _;

use super::{Learned, words};
use crate::diagnose::{Coverage, Split, Summary};

/// What was dropped, what could be seen, what was lost, and what went unanswered.
pub(crate) fn text(summary: &Summary, coverage: Option<&Coverage>, names: &Learned) -> String {
    let counts = &summary.counts;
    let mut text = format!(
        "\nwatched for {:.1} s, ended by {}\n",
        summary.seconds, summary.ended
    );
    let netns =
        |inode: u32| words::netns(Some(inode), names.name(inode)).unwrap_or_else(|| "not known".to_owned());
    let mut totals: Vec<_> = counts.causes.iter().filter(|total| !total.benign).collect();
    totals.sort_by_key(|total| std::cmp::Reverse(total.packets));
    if !totals.is_empty() {
        let width = totals
            .iter()
            .map(|total| total.cause.len())
            .max()
            .unwrap_or_default();
        let _ = writeln!(
            text,
            "{:>10}  {:<width$}  {:<12}  netns",
            "packets", "cause", "verdict"
        );
        for total in &totals {
            let split = match total.split {
                Split::Exact => "",
                Split::Sampled => "  (split from its sister cause is sampled)",
            };
            let _ = writeln!(
                text,
                "{:>10}  {:<width$}  {:<12}  {}{split}",
                total.packets,
                total.cause,
                total.verdict.name(),
                netns(total.netns)
            );
        }
    }
    let sum = |benign| -> u64 {
        counts
            .causes
            .iter()
            .filter(|total| total.benign == benign)
            .map(|total| total.packets)
            .sum()
    };
    let _ = writeln!(text, "{} dropped in scope", words::count(sum(false), "packet"));
    if sum(true) > 0 {
        let _ = writeln!(
            text,
            "{} freed without loss (benign; --benign shows them)",
            words::count(sum(true), "packet")
        );
    }
    if counts.clashes_resolved > 0 {
        let _ = writeln!(
            text,
            "conntrack clashes resolved by the kernel without loss: {}",
            counts.clashes_resolved
        );
    }
    loss(&mut text, summary);
    if let Some(coverage) = coverage {
        let _ = writeln!(text, "{}", words::coverage(coverage));
        for line in words::gaps_in_short(coverage) {
            let _ = writeln!(text, "  {line}");
        }
        for note in &coverage.notes {
            let _ = writeln!(text, "  note: {note}");
        }
    }
    witness(&mut text, summary, &netns);
    for open in &summary.syn_unanswered {
        let to = match (open.dst, open.dport) {
            (Some(dst), Some(dport)) => std::net::SocketAddr::new(dst, dport).to_string(),
            (Some(dst), None) => dst.to_string(),
            (None, _) => "addresses not known".to_owned(),
        };
        let _ = writeln!(
            text,
            "{} again from netns {} to {to}: sent by {}, unanswered: {}",
            words::count(open.retransmissions, "SYN"),
            open.netns_name.clone().unwrap_or_else(|| netns(open.netns)),
            open.interface.as_deref().unwrap_or("an interface not known"),
            match open.held_by {
                Some(held_by) if held_by == open.netns =>
                    "its netns has that address itself, so they were lost here, unseen".to_owned(),
                Some(held_by) => format!(
                    "netns {} of this host has that address: look there, and at what is not seen",
                    netns(held_by)
                ),
                None => "look beyond this host".to_owned(),
            }
        );
    }
    text
}

/// What the kernel's own counters say.
fn witness(text: &mut String, summary: &Summary, netns: &dyn Fn(u32) -> String) {
    let moved = summary.reconcile.iter().filter(|row| row.delta > 0).count();
    if moved > 0 && summary.reconcile.iter().all(|row| row.unexplained == 0) {
        let counters = if moved == 1 {
            "counter that drops add to moved"
        } else {
            "counters that drops add to moved"
        };
        let _ = writeln!(
            text,
            "the kernel agrees: {moved} {counters}, and drops above explain all of it"
        );
    }
    if summary.reconcile.iter().any(|row| row.by_counter > 0) {
        text.push_str("no hook saw some of these: counters that nothing else moves told of them\n");
    }
    for row in summary.reconcile.iter().filter(|row| row.unexplained > 0) {
        let _ = writeln!(
            text,
            "{} of netns {} grew by {}, of which drops above explain {}: {} not seen",
            row.counter,
            row.netns_name.clone().unwrap_or_else(|| netns(row.netns)),
            row.delta,
            row.explained + row.by_counter,
            row.unexplained
        );
    }
}

fn loss(text: &mut String, summary: &Summary) {
    let counts = &summary.counts;
    let _ = write!(text, "lost {}", words::count(counts.lost_events, "event"));
    if counts.lost_events > 0 {
        let by_cause: Vec<_> = counts
            .lost
            .iter()
            .map(|(cause, lost)| format!("{cause} {lost}"))
            .collect();
        let _ = write!(
            text,
            " (in the totals, but not shown one by one): {}",
            by_cause.join(", ")
        );
    }
    text.push('\n');
    if counts.uncounted > 0 {
        let _ = writeln!(
            text,
            "{} in no total, since the count table was full or droptrace was at work on the same CPU already",
            words::count(counts.uncounted, "drop")
        );
    }
    if counts.hints_orphaned > 0 {
        let _ = writeln!(
            text,
            "{} of context hooks that no free consumed",
            words::count(counts.hints_orphaned, "hint")
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{diagnose::Record, sink::samples};

    #[test]
    fn an_end_reads_well() {
        let mut names = Learned::default();
        names.learn(&Record::Drop(Box::new(samples::accept_queue())));
        insta::assert_snapshot!(text(&samples::summary(), Some(&samples::coverage()), &names));
    }

    #[test]
    fn a_quiet_run_says_so() {
        insta::assert_snapshot!(text(&Summary::default(), None, &Learned::default()));
    }
}
