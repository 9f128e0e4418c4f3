//! BPF programs that look at the packets of a cgroup's sockets.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsRawFd, FromRawFd},
    path::Path,
};

use super::links;
use crate::diagnose::CgroupPrograms;

/// Where the unified hierarchy of cgroups is mounted: alone, or beside those of version 1.
pub(super) const MOUNTED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Programs of one kind that are asked for.
const PROGRAMS: usize = 64;

/// `BPF_PROG_QUERY`, `BPF_CGROUP_INET_INGRESS`, `BPF_CGROUP_INET_EGRESS`, `BPF_F_QUERY_EFFECTIVE` (include/uapi/linux/bpf.h).
const QUERY: libc::c_int = 16;
const INGRESS: u32 = 0;
const EGRESS: u32 = 1;
const EFFECTIVE: u32 = 1;
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
        let numbers =
            query(&folder, kind).map_err(|error| format!("programs of the cgroup {path}: {error}"))?;
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

fn query(folder: &File, kind: u32) -> io::Result<Vec<u32>> {
    /// The part of `union bpf_attr` that the command reads.
    #[repr(C)]
    #[derive(Default)]
    struct Query {
        target: u32,
        kind: u32,
        flags: u32,
        attach_flags: u32,
        numbers: u64,
        count: u32,
        pad: u32,
    }
    let mut numbers = vec![0_u32; PROGRAMS];
    let mut query = Query {
        target: folder.as_raw_fd() as u32,
        kind,
        flags: EFFECTIVE,
        numbers: numbers.as_mut_ptr() as u64,
        count: PROGRAMS as u32,
        ..Query::default()
    };
    // SAFETY: the structure is as large as is said, and the kernel writes at most `count` numbers.
    let result = unsafe { libc::syscall(libc::SYS_bpf, QUERY, &raw mut query, size_of::<Query>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    numbers.truncate(query.count as usize);
    Ok(numbers)
}
