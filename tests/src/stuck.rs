//! A thread that is stuck within a system call on a socket, with the socket locked.

use std::{
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, AsRawFd, FromRawFd, RawFd},
    ptr,
    thread::{self, JoinHandle},
};

use anyhow::{Context, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::Result;

/// `struct uffdio_api` and what the kernel is asked by (`include/uapi/linux/userfaultfd.h`).
#[repr(C)]
#[derive(Default)]
struct Api {
    version: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Default)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

const API: u64 = 0xaa;
const MODE_MISSING: u64 = 1;

mod ioctl {
    nix::ioctl_readwrite!(uffdio_api, 0xaa, 0x3f, super::Api);
    nix::ioctl_readwrite!(uffdio_register, 0xaa, 0x00, super::Register);
}

/// One page that is not there until this value lets it be.
struct Page {
    start: *mut libc::c_void,
    len: usize,
    faults: File,
}

impl Page {
    fn new() -> Result<Self> {
        // SAFETY: asks for a descriptor.
        let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
        ensure!(descriptor >= 0, "no userfaultfd: {}", io::Error::last_os_error());
        // SAFETY: a new descriptor that nobody else has.
        let faults = unsafe { File::from_raw_fd(descriptor as RawFd) };
        let mut api = Api {
            version: API,
            ..Api::default()
        };
        // SAFETY: a structure of the form that the call takes.
        unsafe { ioctl::uffdio_api(faults.as_raw_fd(), &raw mut api) }.context("UFFDIO_API")?;
        let len = 4096;
        // SAFETY: a new anonymous mapping.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        ensure!(
            start != libc::MAP_FAILED,
            "no memory: {}",
            io::Error::last_os_error()
        );
        let mut register = Register {
            start: start as u64,
            len: len as u64,
            mode: MODE_MISSING,
            ..Register::default()
        };
        // SAFETY: as above; the range is the mapping.
        unsafe { ioctl::uffdio_register(faults.as_raw_fd(), &raw mut register) }
            .context("UFFDIO_REGISTER")?;
        Ok(Self { start, len, faults })
    }
}

/// A thread that receives from a socket into memory that is not there yet; it goes on when this value goes.
pub struct Stuck {
    page: Option<Page>,
    thread: Option<JoinHandle<()>>,
}

impl Stuck {
    /// Receives on a thread of its own; on return the thread is stuck. There must be something to receive.
    pub fn receiving(socket: &impl AsRawFd) -> Result<Self> {
        let page = Page::new()?;
        let (descriptor, start, len) = (socket.as_raw_fd(), page.start as usize, page.len);
        let thread = thread::spawn(move || {
            // SAFETY: the mapping outlives the thread, which is joined before.
            unsafe { libc::recv(descriptor, start as *mut libc::c_void, len, 0) };
        });
        let mut stuck = Self {
            page: Some(page),
            thread: Some(thread),
        };
        stuck.wait()?;
        Ok(stuck)
    }

    fn wait(&mut self) -> Result<()> {
        let page = self.page.as_mut().context("a page")?;
        let mut fault = [PollFd::new(page.faults.as_fd(), PollFlags::POLLIN)];
        let ready = poll(&mut fault, PollTimeout::from(30_000_u16))?;
        ensure!(
            ready == 1,
            "the receiver did not touch its memory within half a minute"
        );
        // `struct uffd_msg`.
        page.faults.read_exact(&mut [0; 32])?;
        Ok(())
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        if let Some(page) = self.page.take() {
            let Page { start, len, faults } = page;
            // The kernel handles the fault itself from now on.
            drop(faults);
            if let Some(thread) = self.thread.take() {
                let _ = thread.join();
            }
            // SAFETY: the mapping of this value, which nobody uses any more.
            unsafe { libc::munmap(start, len) };
        }
    }
}
