//! What a run needs of the limits that this process is under: told beforehand, since each later failure would tell of what
//! happened to come first.

use std::{
    io,
    sync::{Mutex, PoisonError},
    thread,
};

use nix::sys::resource::{Resource, getrlimit};

use super::problem::Problem;
use crate::plan::HOOKS;

/// Threads beside those that attach hooks, one each: they watch namespaces, ask the system, read symbols, draw.
const OTHER_THREADS: usize = 8;
/// Descriptors that a run takes on a host with a few network namespaces: programs, links, maps.
const DESCRIPTORS: u64 = 256;

/// Sees that limits leave room for a run.
///
/// # Errors
/// They do not.
pub(super) fn leave_room() -> Result<(), Problem> {
    descriptors()?;
    threads(HOOKS.len() + OTHER_THREADS).map_err(|error| {
        Problem::failure(
            format!("cannot start the threads that a run takes: {error}"),
            "see `ulimit -u` and `ulimit -v`, and pids.max of the cgroup or TasksMax of the unit that it runs in",
        )
    })
}

fn descriptors() -> Result<(), Problem> {
    // Where the system does not tell, the run will.
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((limit, _)) if limit < DESCRIPTORS => Err(Problem::failure(
            format!("a run takes {DESCRIPTORS} descriptors and more, and this process may have {limit}"),
            "raise `ulimit -n`, or LimitNOFILE of the unit that it runs in",
        )),
        _ => Ok(()),
    }
}

/// Starts as many threads at once, which do nothing.
fn threads(number: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let _closed = gate.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..number {
            thread::Builder::new().spawn_scoped(scope, || {
                drop(gate.lock().unwrap_or_else(PoisonError::into_inner));
            })?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usual_process_has_room() {
        assert!(threads(HOOKS.len() + OTHER_THREADS).is_ok());
    }
}
