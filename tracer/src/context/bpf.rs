//! What the kernel tells of single BPF programs. aya can only walk through all that are loaded.

use std::{
    ffi::CStr,
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

/// Programs of one kind that are asked for.
const PROGRAMS: usize = 64;

/// `enum bpf_cmd`, and `BPF_F_QUERY_EFFECTIVE` (include/uapi/linux/bpf.h).
const PROG_GET_FD_BY_ID: libc::c_int = 13;
const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const PROG_QUERY: libc::c_int = 16;
const EFFECTIVE: u32 = 1;

/// Name of the program with this id; `None` where it has none, is gone, or may not be asked.
pub(super) fn name(id: u32) -> Option<String> {
    /// The part of `union bpf_attr` that the first command reads.
    #[repr(C)]
    struct ById {
        id: u32,
        next_id: u32,
        flags: u32,
    }
    /// That of the second.
    #[repr(C)]
    struct Ask {
        program: u32,
        length: u32,
        info: u64,
    }
    /// `struct bpf_prog_info` as far as the name.
    #[repr(C, align(8))]
    struct Info {
        before: [u8; 64],
        name: [u8; 16],
    }
    let mut by_id = ById {
        id,
        next_id: 0,
        flags: 0,
    };
    // SAFETY: the kernel reads a number.
    let descriptor = unsafe { call(PROG_GET_FD_BY_ID, &mut by_id) }.ok()?;
    // SAFETY: a new descriptor that nobody else has.
    let program = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let mut info = Info {
        before: [0; 64],
        name: [0; 16],
    };
    let mut ask = Ask {
        program: program.as_raw_fd() as u32,
        length: size_of::<Info>() as u32,
        info: &raw mut info as u64,
    };
    // SAFETY: the kernel writes at most `length` bytes there, and as all before is zero, nothing elsewhere.
    unsafe { call(OBJ_GET_INFO_BY_FD, &mut ask) }.ok()?;
    let name = CStr::from_bytes_until_nul(&info.name).ok()?.to_str().ok()?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// Ids of the programs of a kind (`enum bpf_attach_type`) that work in a cgroup, those of the cgroups above it included.
///
/// # Errors
/// The kernel refuses to tell.
pub(super) fn of_cgroup(folder: &File, kind: u32) -> io::Result<Vec<u32>> {
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
    // SAFETY: the kernel writes at most `count` numbers there.
    unsafe { call(PROG_QUERY, &mut query) }?;
    numbers.truncate(query.count as usize);
    Ok(numbers)
}

/// Gives a command to the kernel; its answer is a descriptor or zero.
///
/// # Errors
/// What the kernel said.
///
/// # Safety
/// The attributes have the form that the command takes, and what they point to is large enough for what it writes there.
unsafe fn call<T>(command: libc::c_int, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: the structure is as large as is said; the rest the caller grants.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, size_of::<T>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result as i32)
}
