//! BPF programs of two instructions, which give every packet the same verdict.

use std::{
    ffi::CString,
    fs::File,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
};

use anyhow::Context as _;

use crate::{Netns, Result, cgroup::Way};

// Numbers of include/uapi/linux/bpf.h, which never change.
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_PROG_ATTACH: libc::c_long = 8;
const BPF_LINK_CREATE: libc::c_long = 28;

/// What a program is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// `BPF_PROG_TYPE_SCHED_CLS`.
    Tc,
    /// `BPF_PROG_TYPE_XDP`.
    Xdp,
    /// `BPF_PROG_TYPE_CGROUP_SKB`.
    CgroupSkb(Way),
}

impl Kind {
    /// Type of program, and the attach type that is expected of it.
    const fn numbers(self) -> (u64, u64) {
        match self {
            Self::Tc => (3, 0),
            Self::Xdp => (6, 0),
            Self::CgroupSkb(way) => (8, way as u64),
        }
    }
}

/// Where a program is attached by a link.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Point {
    /// `BPF_XDP` with `XDP_FLAGS_SKB_MODE`.
    XdpGeneric,
    /// `BPF_XDP` with `XDP_FLAGS_DRV_MODE`.
    XdpNative,
    /// `BPF_TCX_INGRESS`, since 6.6.
    TcxIngress,
}

/// Verdict of a tc program.
pub(crate) const TC_ACT_SHOT: i32 = 2;
/// Verdict of an XDP program.
pub(crate) const XDP_DROP: i32 = 1;

/// A program in the kernel; it goes when this value, its links and its pins go.
#[derive(Debug)]
pub(crate) struct Program(OwnedFd);

/// The first members of `union bpf_attr` that each command uses.
type Attributes = [u64; 16];

impl Program {
    /// Loads `return verdict`, under a name of at most 15 letters.
    pub(crate) fn load(kind: Kind, verdict: i32, name: &str) -> Result<Self> {
        // Before 5.11 the kernel counts programs as locked memory.
        let unlimited = nix::sys::resource::RLIM_INFINITY;
        nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_MEMLOCK, unlimited, unlimited)?;
        // mov r0, verdict; exit
        let instructions: [u64; 2] = [0xb7 | u64::from(verdict.cast_unsigned()) << 32, 0x95];
        let (kind, attach_type) = kind.numbers();
        let license = CString::new("GPL")?;
        let mut text = [0_u8; 16];
        text[..name.len()].copy_from_slice(name.as_bytes());
        let mut attributes = Attributes::default();
        attributes[0] = kind | (instructions.len() as u64) << 32;
        attributes[1] = instructions.as_ptr() as u64;
        attributes[2] = license.as_ptr() as u64;
        attributes[6] = u64::from_ne_bytes(text[..8].try_into()?);
        attributes[7] = u64::from_ne_bytes(text[8..].try_into()?);
        attributes[8] = attach_type << 32;
        bpf(BPF_PROG_LOAD, &attributes)
            .map(Self)
            .with_context(|| format!("cannot load the program {name}"))
    }

    /// Gives it a path in a BPF file system.
    pub(crate) fn pin(&self, path: &Path) -> Result<()> {
        let name = CString::new(path.as_os_str().as_encoded_bytes())?;
        let mut attributes = Attributes::default();
        attributes[0] = name.as_ptr() as u64;
        attributes[1] = self.0.as_raw_fd() as u64;
        command(BPF_OBJ_PIN, &attributes)
            .map(drop)
            .with_context(|| format!("cannot pin a program to {}", path.display()))
    }

    /// Attaches it to a cgroup, until that goes.
    pub(crate) fn attach_to(&self, cgroup: &File, way: Way) -> Result<()> {
        let mut attributes = Attributes::default();
        attributes[0] = cgroup.as_raw_fd() as u64 | (self.0.as_raw_fd() as u64) << 32;
        attributes[1] = way as u64;
        command(BPF_PROG_ATTACH, &attributes)
            .map(drop)
            .context("cannot attach a program to a cgroup")
    }

    /// Attaches it to a device, until the link goes.
    pub(crate) fn attach(&self, netns: &Netns, device: &str, point: Point) -> Result<OwnedFd> {
        let (point, flags) = match point {
            Point::XdpGeneric => (37, 1 << 1),
            Point::XdpNative => (37, 1 << 2),
            Point::TcxIngress => (46, 0),
        };
        netns.enter(|| {
            let name = CString::new(device)?;
            // SAFETY: the name is a string that ends with zero.
            let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
            let mut attributes = Attributes::default();
            attributes[0] = self.0.as_raw_fd() as u64 | u64::from(index) << 32;
            attributes[1] = point | flags << 32;
            bpf(BPF_LINK_CREATE, &attributes).with_context(|| format!("cannot attach a program to {device}"))
        })
    }
}

/// Runs a command whose answer is a descriptor.
fn bpf(number: libc::c_long, attributes: &Attributes) -> Result<OwnedFd> {
    let descriptor = command(number, attributes)?;
    // SAFETY: the kernel has just opened it for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn command(number: libc::c_long, attributes: &Attributes) -> Result<i32> {
    // SAFETY: the attributes are of this size, and what they point to outlives the call.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            number,
            std::ptr::from_ref(attributes),
            size_of::<Attributes>(),
        )
    };
    let answer = nix::errno::Errno::result(answer)?;
    Ok(i32::try_from(answer)?)
}
