//! The confusion matrix: which label the packets of each scenario were given,
//! on each kernel. Off its diagonal is every label that no scenario asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::results::{Check, Labelled};

/// Scenario by label by guest.
#[derive(Debug, Default)]
pub(crate) struct Matrix<'a> {
    guests: Vec<&'a str>,
    cells: BTreeMap<&'a str, BTreeMap<&'a str, BTreeMap<usize, Labelled>>>,
}

/// What the labels of a guest come to, in packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    expected: u64,
    right: u64,
    /// Given a label that was not expected, or more often than it was.
    wrong: u64,
}

impl Sum {
    fn add(&mut self, cell: Labelled) {
        self.expected += cell.expected;
        self.right += cell.seen.min(cell.expected);
        self.wrong += cell.seen.saturating_sub(cell.expected);
    }
}

impl<'a> Matrix<'a> {
    /// Adds what the scenarios of a guest gave; the first word of its name says which kernel it has.
    pub(crate) fn add(&mut self, guest: &'a str, checks: &'a [Check]) {
        let kernel = guest.split([' ', ',']).next().unwrap_or(guest);
        let column = self.guests.iter().position(|known| *known == kernel);
        let column = column.unwrap_or_else(|| {
            self.guests.push(kernel);
            self.guests.len() - 1
        });
        for check in checks {
            for (label, labelled) in &check.labels {
                self.cells
                    .entry(&check.name)
                    .or_default()
                    .entry(label)
                    .or_default()
                    .insert(column, *labelled);
            }
        }
    }

    fn sum(&self, column: usize) -> Sum {
        let mut sum = Sum::default();
        for cell in self
            .cells
            .values()
            .flat_map(BTreeMap::values)
            .filter_map(|row| row.get(&column))
        {
            sum.add(*cell);
        }
        sum
    }

    /// A line for each guest.
    pub(crate) fn summary(&self) -> String {
        let mut text = String::new();
        for (column, guest) in self.guests.iter().enumerate() {
            let Sum {
                expected,
                right,
                wrong,
            } = self.sum(column);
            writeln!(
                text,
                "confusion matrix {guest}: {expected} packets provoked, {right} labelled as expected, {wrong} given another label"
            )
            .expect("a string can be written to");
        }
        text
    }

    /// The matrix as a page of documentation.
    pub(crate) fn markdown(&self, run: &str) -> String {
        let mut page = format!(
            "# Confusion matrix\n\n{run}.\n\nA row is a scenario and a label; a cell says how many packets got this label, and of how many if \
             these are not the same. A label that the scenario did not ask for is in bold: it is off the diagonal. Benign causes are not in it, as they are \
             no loss.\n\n| kernel | packets provoked | labelled as expected | given another label | causes |\n|---|---|---|---|---|\n"
        );
        for (column, guest) in self.guests.iter().enumerate() {
            let sum = self.sum(column);
            let causes: BTreeSet<&str> = self
                .cells
                .values()
                .flat_map(BTreeMap::iter)
                .filter(|(_, row)| row.get(&column).is_some_and(|cell| cell.expected > 0))
                .map(|(label, _)| *label)
                .collect();
            writeln!(
                page,
                "| {guest} | {} | {} | {} | {} |",
                sum.expected,
                sum.right,
                sum.wrong,
                causes.len()
            )
            .expect("a string can be written to");
        }
        write!(
            page,
            "\n| scenario | label | {} |\n|---|---|{}\n",
            self.guests.join(" | "),
            "---|".repeat(self.guests.len())
        )
        .expect("a string can be written to");
        for (scenario, rows) in &self.cells {
            for (label, row) in rows {
                let asked = row.values().any(|cell| cell.expected > 0);
                let label = if asked {
                    (*label).to_owned()
                } else {
                    format!("**{label}**")
                };
                let cells: Vec<String> = (0..self.guests.len())
                    .map(|column| {
                        row.get(&column)
                            .map_or_else(String::new, |cell| text(*cell, asked))
                    })
                    .collect();
                writeln!(page, "| {scenario} | {label} | {} |", cells.join(" | "))
                    .expect("a string can be written to");
            }
        }
        page
    }
}

fn text(cell: Labelled, asked: bool) -> String {
    if cell.seen == cell.expected {
        cell.seen.to_string()
    } else if asked {
        format!("**{} of {}**", cell.seen, cell.expected)
    } else {
        format!("**{}**", cell.seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, labels: &[(&str, u64, u64)]) -> Check {
        let mut check = Check::passed(name, "");
        for (label, expected, seen) in labels {
            let labelled = Labelled {
                expected: *expected,
                seen: *seen,
            };
            check.labels.insert((*label).to_owned(), labelled);
        }
        check
    }

    #[test]
    fn a_label_that_nobody_asked_for_is_off_the_diagonal() {
        let old = [
            check("rp-filter-strict", &[("rp-filter", 4, 4)]),
            check("bad-input", &[]),
        ];
        let new = [check(
            "rp-filter-strict",
            &[("rp-filter", 4, 3), ("unknown", 0, 1)],
        )];
        let mut matrix = Matrix::default();
        matrix.add("5.10 (package 1)", &old);
        matrix.add("7.x (package 2)", &new);
        let long = [check("needle", &[("no-socket", 2, 2)])];
        matrix.add("7.x, long scenarios", &long);
        assert_eq!(
            matrix.summary(),
            "confusion matrix 5.10: 4 packets provoked, 4 labelled as expected, 0 given another label\n\
             confusion matrix 7.x: 6 packets provoked, 5 labelled as expected, 1 given another label\n"
        );
        let page = matrix.markdown("a run");
        assert!(page.contains("| 5.10 | 4 | 4 | 0 | 1 |"), "{page}");
        assert!(
            page.contains("| scenario | label | 5.10 | 7.x |\n|---|---|---|---|\n"),
            "{page}"
        );
        assert!(
            page.contains("| rp-filter-strict | rp-filter | 4 | **3 of 4** |"),
            "{page}"
        );
        assert!(
            page.contains("| rp-filter-strict | **unknown** |  | **1** |"),
            "{page}"
        );
        assert!(!page.contains("bad-input"), "{page}");
    }
}
