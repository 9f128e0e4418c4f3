//! The end of a run: the kernel takes its hooks off while the caller goes on.
//!
//! Who closes the last descriptor of a link waits until no CPU can be in what is taken off. Each function with a trampoline
//! takes a grace period of RCU tasks, 130 ms and more, one after the other under a lock of ftrace (`ftrace_shutdown`,
//! kernel/trace/ftrace.c, 5.10 - 7.3), so that all hooks take 1.7 s, however many threads close them.

use std::os::fd::IntoRawFd as _;

use nix::{
    fcntl::OFlag,
    sys::signal::{SigHandler, Signal, signal},
    unistd::{ForkResult, close, fork, pipe2, setsid},
};

/// Drops what holds programs, and leaves the wait for the kernel to a child: it has the same descriptors, closes all of them
/// when this process has ended, and ends. It holds no terminal, no standard stream, no session and no folder. Where no child
/// can be made, this process waits by itself.
///
/// What else is open at this moment stays open for as long.
pub fn leave_to_child<T>(held: T) {
    let Ok((ended, open)) = pipe2(OFlag::O_CLOEXEC) else {
        return;
    };
    // SAFETY: the child makes system calls only, none of which needs what another thread may have locked.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            drop(open);
            close_after(&ended);
        }
        Ok(ForkResult::Parent { .. }) => {
            drop(ended);
            // It is closed by the end of this process, which the child waits for: the last one to close is the one that waits.
            let _ = open.into_raw_fd();
        }
        Err(_) => {}
    }
    drop(held);
}

/// Waits until nobody can write, and ends, which closes every descriptor.
fn close_after(ended: &impl std::os::fd::AsFd) -> ! {
    for stream in 0..=2 {
        let _ = close(stream);
    }
    let _ = setsid();
    let _ = nix::unistd::chdir("/");
    // SAFETY: the default action is no handler.
    let _ = unsafe { signal(Signal::SIGTERM, SigHandler::SigDfl) };
    // A signal that is handled here does nothing.
    while nix::unistd::read(ended, &mut [0]) == Err(nix::errno::Errno::EINTR) {}
    // SAFETY: it ends the process without running any of its code.
    unsafe { libc::_exit(0) }
}
