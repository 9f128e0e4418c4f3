//! Errors as the user reads them: what failed, and what to do next.

use std::fmt;

/// Exit status of a failure.
pub const FAILURE: u8 = 1;
/// Exit status of a wrong command line.
pub const USAGE: u8 = 2;

/// What failed, and the next step. Any error that is none of these ends the program with status [`FAILURE`], too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    what: String,
    next: String,
    status: u8,
}

impl Problem {
    /// The command line is wrong: status 2.
    pub fn usage(what: impl Into<String>, next: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            next: next.into(),
            status: USAGE,
        }
    }

    /// Something did not work: status 1.
    pub fn failure(what: impl Into<String>, next: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            next: next.into(),
            status: FAILURE,
        }
    }

    /// Exit status.
    pub const fn status(&self) -> u8 {
        self.status
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; next: {}", self.what, self.next)
    }
}

impl std::error::Error for Problem {}
