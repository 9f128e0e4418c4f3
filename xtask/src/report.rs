//! What a test run tells at its end, on the terminal and in `docs/`.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::matrix::Matrix;
use crate::results::{self, Check, Status, Tally};
use crate::shell::step;

/// How the name of a stage begins whose checks are the scenarios of a guest.
pub(crate) const GUEST: &str = "guest ";

/// One stage of a test run.
pub(crate) struct Stage {
    name: String,
    checks: Vec<Check>,
    duration: Duration,
}

impl Stage {
    /// How its checks ended.
    pub(crate) fn tally(&self) -> Tally {
        results::tally(&self.checks)
    }

    /// Whether a check that passed tells what was seen.
    fn has_figures(&self) -> bool {
        self.checks
            .iter()
            .any(|check| check.status == Status::Passed && !check.detail.is_empty())
    }

    fn minutes(&self) -> f64 {
        self.duration.as_secs_f64() / 60.0
    }
}

/// A whole test run.
#[derive(Default)]
pub(crate) struct Report {
    stages: Vec<Stage>,
    notes: Vec<String>,
}

impl Report {
    /// Runs a stage.
    pub(crate) fn stage(&mut self, name: &str, work: impl FnOnce() -> Vec<Check>) {
        step(name);
        let start = Instant::now();
        let checks = work();
        self.stages.push(Stage {
            name: name.to_owned(),
            checks,
            duration: start.elapsed(),
        });
    }

    /// Adds a stage that ran beside others.
    pub(crate) fn add(&mut self, name: String, checks: Vec<Check>, duration: Duration) {
        self.stages.push(Stage {
            name,
            checks,
            duration,
        });
    }

    /// The stage that ran last.
    ///
    /// # Panics
    /// When none ran.
    pub(crate) fn last(&self) -> &Stage {
        self.stages.last().expect("a stage ran")
    }

    /// Adds what a reader of the result must know.
    pub(crate) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// How all checks ended.
    pub(crate) fn total(&self) -> Tally {
        let mut total = Tally::default();
        for stage in &self.stages {
            total += stage.tally();
        }
        total
    }

    /// Every check that did not pass, with its stage.
    fn not_passed(&self) -> impl Iterator<Item = (&Stage, &Check)> {
        self.stages
            .iter()
            .flat_map(|stage| stage.checks.iter().map(move |check| (stage, check)))
            .filter(|(_, check)| check.status != Status::Passed)
    }

    /// Prints minutes and figures per stage, then what failed or was skipped, and why.
    pub(crate) fn print(&self) {
        println!();
        for stage in &self.stages {
            println!(
                "{:<44} {:>5.1} min  {}",
                stage.name,
                stage.minutes(),
                stage.tally()
            );
        }
        for (stage, check) in self.not_passed() {
            let word = if check.status == Status::Failed {
                "FAILED"
            } else {
                "skipped"
            };
            println!("{word} {}: {}: {}", stage.name, check.name, brief(&check.detail));
        }
        for note in &self.notes {
            println!("note: {note}");
        }
        print!("{}", self.matrix().summary());
    }

    /// What packets were labelled as, scenario by scenario, in each guest.
    pub(crate) fn matrix(&self) -> Matrix<'_> {
        let mut matrix = Matrix::default();
        for stage in &self.stages {
            if let Some(guest) = stage.name.strip_prefix(GUEST) {
                matrix.add(guest, &stage.checks);
            }
        }
        matrix
    }

    /// The result as a page of documentation.
    pub(crate) fn markdown(&self, run: &str) -> String {
        let mut page = format!(
            "# Test results\n\n{run}: **{}**. What was labelled as what: [confusion-matrix.md](confusion-matrix.md).\n\n\
             | stage | minutes | passed | failed | skipped |\n|---|---|---|---|---|\n",
            self.total()
        );
        for stage in &self.stages {
            let tally = stage.tally();
            writeln!(
                page,
                "| {} | {:.1} | {} | {} | {} |",
                stage.name,
                stage.minutes(),
                tally.passed,
                tally.failed,
                tally.skipped
            )
            .expect("a string can be written to");
        }
        for note in &self.notes {
            write!(page, "\n{note}\n").expect("a string can be written to");
        }
        for stage in self.stages.iter().filter(|stage| stage.has_figures()) {
            write!(
                page,
                "\n## {}\n\n| check | result | what was seen |\n|---|---|---|\n",
                stage.name
            )
            .expect("a string can be written to");
            for check in &stage.checks {
                let status = match check.status {
                    Status::Passed => "passed",
                    Status::Failed => "**failed**",
                    Status::Skipped => "skipped",
                };
                writeln!(page, "| {} | {status} | {} |", check.name, cell(&check.detail))
                    .expect("a string can be written to");
            }
        }
        page
    }
}

/// How many characters of a detail are shown; the guest's results hold all of it.
const SHOWN: usize = 600;

/// A detail without what only a debugger wants to read.
fn brief(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text.to_owned(),
    }
}

/// Text that may stand in a cell of a table.
fn cell(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    brief(&words.join(" ")).replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_cut_between_characters() {
        assert_eq!(brief("short"), "short");
        assert_eq!(brief(&"ü".repeat(SHOWN + 1)), "ü".repeat(SHOWN) + " …");
    }

    #[test]
    fn the_page_holds_every_scenario_of_a_guest() {
        let mut report = Report::default();
        report.stage("formatting", || vec![Check::passed("rustfmt", "")]);
        report.stage("guest 6.1 (package 1)", || {
            vec![
                Check::passed("accept-queue-full", "12 drops\nby | hook"),
                Check::skipped("paws", "no such counter"),
            ]
        });
        report.note("a note".to_owned());
        let page = report.markdown("abc");
        assert!(page.contains("abc: **2 passed, 0 failed, 1 skipped**"), "{page}");
        assert!(page.contains("| formatting | 0.0 | 1 | 0 | 0 |"), "{page}");
        assert!(
            page.contains("| accept-queue-full | passed | 12 drops by \\| hook |"),
            "{page}"
        );
        assert!(page.contains("| paws | skipped | no such counter |"), "{page}");
        assert!(page.contains("\na note\n"), "{page}");
        assert!(!page.contains("## formatting"), "{page}");
    }
}
