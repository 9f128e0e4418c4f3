//! Results of tests: reading them, and summing them up.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Deserialize;

/// How many ended which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            passed,
            failed,
            skipped,
        } = self;
        write!(formatter, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// How one check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// What was expected was seen.
    Passed,
    /// It was not.
    Failed,
    /// It could not be checked here; the detail says why.
    Skipped,
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    pub(crate) name: String,
    pub(crate) status: Status,
    /// What was seen; for a skip, the reason.
    pub(crate) detail: String,
    /// Of a scenario: what packets were labelled as.
    pub(crate) labels: Labels,
}

/// Packets of one label in a scenario.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Labelled {
    /// As many were provoked.
    pub(crate) expected: u64,
    /// As many droptrace gave the label.
    pub(crate) seen: u64,
}

/// What was expected and seen, by the slug of the cause.
pub(crate) type Labels = BTreeMap<String, Labelled>;

impl Check {
    pub(crate) fn passed(name: &str, detail: impl Into<String>) -> Self {
        Self::new(name, Status::Passed, detail)
    }

    pub(crate) fn failed(name: &str, detail: impl Into<String>) -> Self {
        Self::new(name, Status::Failed, detail)
    }

    pub(crate) fn skipped(name: &str, reason: impl Into<String>) -> Self {
        Self::new(name, Status::Skipped, reason)
    }

    fn new(name: &str, status: Status, detail: impl Into<String>) -> Self {
        Self {
            name: name.to_owned(),
            status,
            detail: detail.into(),
            labels: Labels::new(),
        }
    }
}

/// Sums up checks.
pub(crate) fn tally(checks: &[Check]) -> Tally {
    let count = |status| checks.iter().filter(|check| check.status == status).count();
    Tally {
        passed: count(Status::Passed),
        failed: count(Status::Failed),
        skipped: count(Status::Skipped),
    }
}

/// Reads what `cargo test` printed: one check per test.
pub(crate) fn parse_cargo_test(output: &str) -> Vec<Check> {
    output
        .lines()
        .filter_map(|line| {
            let (name, result) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
            match result {
                "ok" => Some(Check::passed(name, "")),
                "FAILED" => Some(Check::failed(name, "see above")),
                ignored => {
                    let reason = ignored.strip_prefix("ignored")?;
                    let reason = reason.trim_start_matches([',', ' ']);
                    Some(Check::skipped(
                        name,
                        if reason.is_empty() { "ignored" } else { reason },
                    ))
                }
            }
        })
        .collect()
}

/// A line of a guest's results.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Line {
    Plan {
        scenarios: Vec<String>,
    },
    Result {
        scenario: String,
        status: Status,
        #[serde(default)]
        detail: String,
        #[serde(default)]
        labels: Labels,
    },
    #[serde(other)]
    Other,
}

/// Reads the lines of a guest: one check per scenario; one that was planned and has no result failed.
pub(crate) fn parse_guest(lines: &[String]) -> Vec<Check> {
    let mut planned = Vec::new();
    let mut checks = Vec::new();
    for line in lines {
        match serde_json::from_str(line) {
            Ok(Line::Plan { scenarios }) => planned = scenarios,
            Ok(Line::Result {
                scenario,
                status,
                detail,
                labels,
            }) => checks.push(Check {
                name: scenario,
                status,
                detail,
                labels,
            }),
            Ok(Line::Other) => {}
            Err(error) => checks.push(Check::failed(
                "results",
                format!("unreadable line `{line}`: {error}"),
            )),
        }
    }
    for scenario in planned {
        if !checks.iter().any(|check| check.name == scenario) {
            checks.push(Check::failed(&scenario, "no result: the guest ended before it"));
        }
    }
    if checks.is_empty() {
        checks.push(Check::failed("results", "the guest gave no result"));
    }
    checks
}

/// Reads a line of two points in time, in seconds.
pub(crate) fn parse_interval(lines: &[String]) -> Option<Duration> {
    let (start, end) = lines.last()?.split_once(' ')?;
    let seconds = |text: &str| text.trim().parse::<f64>().ok();
    Duration::try_from_secs_f64(seconds(end)? - seconds(start)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_tests_are_counted_one_by_one() {
        let checks = parse_cargo_test(
            "running 4 tests\ntest a::b ... ok\ntest c ... FAILED\ntest d ... ignored\n\
             test e ... ignored, needs a disk\n\n\
             test result: FAILED. 1 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out\n\
             test src/lib.rs - f (line 3) ... ok\n",
        );
        assert_eq!(tally(&checks).to_string(), "2 passed, 1 failed, 2 skipped");
        assert_eq!(checks[2].detail, "ignored");
        assert_eq!(checks[3].detail, "needs a disk");
        assert_eq!(checks[4].name, "src/lib.rs - f (line 3)");
    }

    fn guest(lines: &[&str]) -> Vec<Check> {
        parse_guest(&lines.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn a_scenario_without_result_failed() {
        let checks = guest(&[
            r#"{"type":"plan","scenarios":["a","b"]}"#,
            r#"{"type":"result","scenario":"a","status":"passed","detail":"3 drops","seconds":1.5,"labels":{"x":{"expected":3,"seen":2}}}"#,
            r#"{"type":"note"}"#,
        ]);
        assert_eq!(checks[0].labels["x"], Labelled { expected: 3, seen: 2 });
        assert_eq!(tally(&checks).to_string(), "1 passed, 1 failed, 0 skipped");
        assert_eq!(checks[1].name, "b");
    }

    #[test]
    fn silence_and_damage_are_failures() {
        assert_eq!(tally(&guest(&[])).failed, 1);
        assert_eq!(tally(&guest(&["{\"type\":\"res"])).failed, 1);
        assert_eq!(
            tally(&guest(&[r#"{"type":"result","scenario":"a","status":"fine"}"#])).failed,
            1
        );
    }

    #[test]
    fn an_interval_needs_two_points_in_order() {
        let parse = |line: &str| parse_interval(&[line.to_owned()]);
        assert_eq!(parse("2.25 3.50"), Some(Duration::from_millis(1250)));
        assert_eq!(parse("3.50 2.25"), None);
        assert_eq!(parse("3.50"), None);
        assert_eq!(parse_interval(&[]), None);
    }

    #[test]
    fn tallies_add_up() {
        let mut sum = Tally::default();
        sum += tally(&[Check::passed("a", ""), Check::skipped("b", "why")]);
        sum += tally(&[Check::failed("c", "what")]);
        assert_eq!(sum.to_string(), "1 passed, 1 failed, 1 skipped");
    }
}
