//! BPF programs that look at the packets of a cgroup's sockets.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsRawFd, FromRawFd},
    path::Path,
};

use super::{bpf, links};
use crate::diagnose::CgroupPrograms;

/// Where the unified hierarchy of cgroups is mounted: alone, or beside those of version 1.
pub(super) const MOUNTED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// `BPF_CGROUP_INET_INGRESS` and `BPF_CGROUP_INET_EGRESS` (include/uapi/linux/bpf.h).
const INGRESS: u32 = 0;
const EGRESS: u32 = 1;
/// `FILEID_KERNFS` (include/linux/exportfs.h).
const KERNFS: i32 = 0xfe;

/// A cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Cgroup {
    /// By its number, which sock_diag tells.
    Number(u64),
    /// That of a process.
    OfProcess(u32),
}

/// The programs that look at what sockets of a cgroup receive and send, those of the cgroups above it included.
///
/// # Errors
/// The cgroup is gone, or may not be asked.
pub(super) fn programs(cgroup: Cgroup) -> Result<CgroupPrograms, String> {
    let (folder, path) = open(cgroup)?;
    let names = |kind| {
        let numbers = bpf::of_cgroup(&folder, kind)
            .map_err(|error| format!("programs of the cgroup {path}: {error}"))?;
        Ok::<_, String>(numbers.into_iter().map(|id| links::program(id).text()).collect())
    };
    Ok(CgroupPrograms {
        ingress: names(INGRESS)?,
        egress: names(EGRESS)?,
        cgroup: path.clone(),
    })
}

/// Path of a process's cgroup in the unified hierarchy; `None` where it has none there, or lies outside of what this
/// program may see.
pub(super) fn of_process(pid: u32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    (!path.contains("..")).then(|| path.to_owned())
}

/// Its folder, and its path in the hierarchy.
fn open(cgroup: Cgroup) -> Result<(File, String), String> {
    let failed = |error: io::Error| format!("the cgroup of the socket: {error}");
    match cgroup {
        Cgroup::OfProcess(pid) => {
            let path = of_process(pid).ok_or("the owner is in no cgroup of the unified hierarchy")?;
            let folder = MOUNTED
                .iter()
                .find_map(|mounted| File::open(Path::new(mounted).join(path.trim_start_matches('/'))).ok())
                .ok_or_else(|| format!("the cgroup {path} is not there"))?;
            Ok((folder, path))
        }
        Cgroup::Number(number) => {
            let (folder, mounted) = MOUNTED
                .iter()
                .find_map(|mounted| Some((by_number(&File::open(mounted).ok()?, number).ok()?, mounted)))
                .ok_or_else(|| failed(io::Error::last_os_error()))?;
            let target = fs::read_link(format!("/proc/self/fd/{}", folder.as_raw_fd())).map_err(failed)?;
            let path = target.strip_prefix(mounted).unwrap_or(&target);
            Ok((folder, format!("/{}", path.display())))
        }
    }
}

/// Opens a cgroup by its number: the file system knows it by that alone (`kernfs_fh_to_dentry`, fs/kernfs/mount.c, 5.10 - 7.3).
fn by_number(mounted: &File, number: u64) -> io::Result<File> {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        number: u64,
    }
    let mut handle = Handle {
        bytes: 8,
        kind: KERNFS,
        number,
    };
    // SAFETY: the handle has the form of `struct file_handle`, and as many bytes as it says.
    let descriptor = unsafe {
        libc::open_by_handle_at(
            mounted.as_raw_fd(),
            (&raw mut handle).cast(),
            libc::O_RDONLY | libc::O_CLOEXEC,
        )
    };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else has.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}
