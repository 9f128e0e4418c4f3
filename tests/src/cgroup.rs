//! Control groups, with BPF programs that refuse packets.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::PathBuf,
    thread,
    time::Duration,
};

use anyhow::Context;
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

use crate::Result;

/// Where a guest has the unified hierarchy.
const MOUNTED: &str = "/sys/fs/cgroup";

/// `include/uapi/linux/bpf.h`.
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_TYPE_CGROUP_SKB: u32 = 8;

/// Which packets a program looks at: `enum bpf_attach_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// What sockets receive.
    Ingress = 0,
    /// What sockets send.
    Egress = 1,
}

/// A cgroup; it goes when this value goes, after its processes.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    programs: Vec<OwnedFd>,
}

impl Cgroup {
    /// Makes one below the root, with a CPU controller.
    pub fn new(name: &str) -> Result<Self> {
        let controllers = format!("{MOUNTED}/cgroup.subtree_control");
        fs::write(&controllers, "+cpu").with_context(|| format!("cannot write +cpu to {controllers}"))?;
        let path = PathBuf::from(MOUNTED).join(name);
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self {
            path,
            programs: Vec::new(),
        })
    }

    /// Its path in the hierarchy.
    pub fn name(&self) -> String {
        let name = self.path.strip_prefix(MOUNTED).unwrap_or(&self.path);
        format!("/{}", name.display())
    }

    /// Sets one of its files.
    pub fn set(&self, file: &str, value: &str) -> Result<()> {
        let file = self.path.join(file);
        fs::write(&file, value).with_context(|| format!("cannot write {value} to {}", file.display()))
    }

    /// Attaches a program that refuses all packets of one way.
    pub fn refuse(&mut self, way: Way) -> Result<()> {
        /// r0 = 0; exit
        const REFUSE: [u64; 2] = [0xb7, 0x95];
        #[repr(C)]
        #[derive(Default)]
        struct Load {
            kind: u32,
            count: u32,
            instructions: u64,
            license: u64,
            log: [u32; 2],
            log_buffer: u64,
            version: u32,
            flags: u32,
            name: [u8; 16],
            ifindex: u32,
            way: u32,
        }
        #[repr(C)]
        struct Attach {
            target: u32,
            program: u32,
            way: u32,
            flags: u32,
        }
        let mut name = [0; 16];
        name[..10].copy_from_slice(b"refuse_all");
        // Before 5.11 a program counts as locked memory.
        setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY)?;
        let load = Load {
            kind: BPF_PROG_TYPE_CGROUP_SKB,
            count: 2,
            instructions: REFUSE.as_ptr() as u64,
            license: c"GPL".as_ptr() as u64,
            name,
            way: way as u32,
            ..Load::default()
        };
        let descriptor = bpf(BPF_PROG_LOAD, &load).context("cannot load a program")?;
        // SAFETY: a new descriptor that nobody else has.
        let program = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let folder = File::open(&self.path)?;
        let attach = Attach {
            target: folder.as_raw_fd() as u32,
            program: program.as_raw_fd() as u32,
            way: way as u32,
            flags: 0,
        };
        bpf(BPF_PROG_ATTACH, &attach).context("cannot attach a program to a cgroup")?;
        self.programs.push(program);
        Ok(())
    }
}

fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<i32> {
    // SAFETY: a structure of the form that the command takes, as large as is said.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const *attributes, size_of::<T>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result as i32)
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has ended leaves a moment later.
        for _ in 0..50 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}
