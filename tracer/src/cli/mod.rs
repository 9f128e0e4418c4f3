//! The command line: arguments and wiring only, one file per command.

pub mod options;
pub mod problem;
