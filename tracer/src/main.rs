//! The `droptrace` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    droptrace::cli::main()
}
