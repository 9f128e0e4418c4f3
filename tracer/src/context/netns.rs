//! Network namespaces: which there are, what they are called, how one enters
//! them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::{self, File},
    io::{self, Read as _},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, setns},
};

use super::ContextError;

/// Folder of `ip netns`, also under its old name: what has a name there can be entered by it.
const NAMED: [&str; 2] = ["/run/netns", "/var/run/netns"];
/// Folders in which other programs keep network namespaces by a name of theirs.
const KEPT: [&str; 1] = ["/run/docker/netns"];
/// A process is looked at again in each of this many scans after it appeared, since it may still unshare.
const YOUNG: u8 = 3;
/// In every scan of this number all processes and mounts are looked at again.
const FULL_EVERY: u32 = 16;

/// How often the table of mounts is read at most until it does not change meanwhile.
const MOUNTS_READ: u32 = 4;

mod ioctl {
    // `NSIO` 0xb7, `NS_GET_NSTYPE` (`include/uapi/linux/nsfs.h`).
    nix::ioctl_none!(ns_get_nstype, 0xb7, 3);
    // `SIOCGSKNS` (`include/uapi/linux/sockios.h`).
    nix::ioctl_none_bad!(socket_netns, libc::SIOCGSKNS);
}

/// A network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Netns {
    /// Inode number: what the kernel and `lsns` call it.
    pub inode: u32,
    /// Its name for `ip netns`; `host` for that of process 1.
    pub name: Option<String>,
}

/// A netns that was found, and a path to open it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) name: Option<String>,
    pub(super) path: PathBuf,
}

/// Finds the network namespaces of all processes and of all bind mounts.
#[derive(Debug, Default)]
pub(super) struct Discovery {
    /// Process → its netns, and how often it was looked at.
    processes: HashMap<u32, (u32, u8)>,
    mounts: Vec<(u32, PathBuf)>,
    scans: u32,
}

impl Discovery {
    /// Looks at `/proc`, and at the `mounts` if they may have changed. Processes known from before are looked at seldom,
    /// unless `thorough`.
    pub(super) fn scan(&mut self, thorough: bool, mounts: bool) -> BTreeMap<u32, Found> {
        let full = thorough || self.scans.is_multiple_of(FULL_EVERY);
        self.scan_processes(full);
        self.scans = self.scans.wrapping_add(1);
        if (mounts || full)
            && let Ok(text) = read_mounts()
        {
            self.mounts = mounted(&text);
        }
        self.found()
    }

    fn scan_processes(&mut self, full: bool) {
        let Ok(folder) = fs::read_dir("/proc") else {
            return;
        };
        let mut alive = HashMap::with_capacity(self.processes.len() + 16);
        for pid in folder.flatten().filter_map(|entry| pid_of(&entry.file_name())) {
            let known = self.processes.get(&pid).copied();
            let entry = match known {
                Some((inode, looks)) if looks >= YOUNG && !full => Some((inode, looks)),
                known => inode_of(&process_path(pid)).ok().map(|inode| {
                    let looks = known.map_or(0, |(_, looks)| looks);
                    (inode, looks.saturating_add(1))
                }),
            };
            if let Some(entry) = entry {
                alive.insert(pid, entry);
            }
        }
        self.processes = alive;
    }

    fn found(&self) -> BTreeMap<u32, Found> {
        let mut found = BTreeMap::new();
        for (&pid, &(inode, _)) in &self.processes {
            let path = process_path(pid);
            let lowest = found.entry(inode).or_insert((pid, path.clone()));
            if pid < lowest.0 {
                *lowest = (pid, path);
            }
        }
        let mut found: BTreeMap<u32, Found> = found
            .into_iter()
            .map(|(inode, (pid, path))| {
                let name = (pid == 1).then(|| "host".to_owned());
                (inode, Found { name, path })
            })
            .collect();
        for (inode, path) in &self.mounts {
            let name = named(path);
            let entry = found.entry(*inode).or_insert_with(|| Found {
                name: None,
                path: path.clone(),
            });
            // `host` is the netns of the initial process, where commands need no nsenter: no other is called so.
            if entry.name.is_none() && name.as_deref() != Some("host") {
                entry.name = name;
            }
        }
        found
    }

    /// The processes of a netns.
    pub(super) fn members(&self, netns: u32) -> BTreeSet<u32> {
        self.processes
            .iter()
            .filter(|(_, (inode, _))| *inode == netns)
            .map(|(pid, _)| *pid)
            .collect()
    }
}

fn pid_of(name: &std::ffi::OsStr) -> Option<u32> {
    name.to_str()?.parse().ok()
}

fn process_path(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/ns/net"))
}

fn inode_of(path: &Path) -> io::Result<u32> {
    // The file system of namespaces numbers them with 32 bits (`ns_common.inum`, `include/linux/ns_common.h`).
    Ok(fs::metadata(path)?.ino() as u32)
}

/// Reads the table of mounts, and again where it changed meanwhile: it is read piece by piece, and what changes between two of
/// them can hide others (`m_start`, fs/namespace.c). Who asks to wait for a change is told of one since the file was opened
/// (`mounts_poll`, fs/proc_namespace.c, 5.10 - 7.3).
fn read_mounts() -> io::Result<String> {
    let mut text = String::new();
    for _ in 0..MOUNTS_READ {
        let mut table = File::open("/proc/self/mountinfo")?;
        text.clear();
        table.read_to_string(&mut text)?;
        let mut changed = [PollFd::new(table.as_fd(), PollFlags::POLLPRI)];
        if poll(&mut changed, PollTimeout::ZERO)? == 0 {
            break;
        }
    }
    Ok(text)
}

/// Bind-mounted network namespaces of a `/proc/PID/mountinfo`: inode and mount point.
fn mounted(mountinfo: &str) -> Vec<(u32, PathBuf)> {
    mountinfo
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(3);
            let inode = words
                .next()?
                .strip_prefix("net:[")?
                .strip_suffix(']')?
                .parse()
                .ok()?;
            Some((inode, PathBuf::from(unescaped(words.next()?))))
        })
        .collect()
}

/// A path of mountinfo, in which space, tab, newline and backslash are octal (`\040`).
fn unescaped(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        result.push_str(&rest[..at]);
        let code = rest
            .get(at + 1..at + 4)
            .and_then(|code| u8::from_str_radix(code, 8).ok());
        if let Some(code) = code {
            result.push(char::from(code));
            rest = &rest[at + 4..];
        } else {
            result.push('\\');
            rest = &rest[at + 1..];
        }
    }
    result + rest
}

/// The name that a mount point gives.
fn named(path: &Path) -> Option<String> {
    let folder = path.parent()?.to_str()?;
    NAMED
        .contains(&folder)
        .then(|| path.file_name()?.to_str().map(str::to_owned))
        .flatten()
}

/// Opens a netns by path, if it is one.
pub(super) fn open(path: &Path) -> io::Result<(OwnedFd, u32)> {
    let file = File::open(path)?;
    // SAFETY: an ioctl without argument on an open file; what is no namespace answers ENOTTY.
    let kind = unsafe { ioctl::ns_get_nstype(file.as_raw_fd()) };
    if !matches!(kind, Ok(kind) if kind == libc::CLONE_NEWNET) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a network namespace",
        ));
    }
    let inode = file.metadata()?.ino() as u32;
    Ok((file.into(), inode))
}

/// Moves the calling thread into a netns.
///
/// # Errors
/// The netns is gone, or CAP_SYS_ADMIN is missing.
pub(super) fn enter(netns: impl AsFd) -> io::Result<()> {
    setns(netns, CloneFlags::CLONE_NEWNET).map_err(io::Error::from)
}

/// The netns of a socket: one descriptor per netns is enough to hear it and to enter it.
///
/// # Errors
/// CAP_NET_ADMIN is missing, or no descriptor is left.
pub(super) fn of_socket(socket: &impl AsRawFd) -> io::Result<OwnedFd> {
    // SAFETY: an ioctl without argument on an open socket; it answers with a descriptor that is ours.
    unsafe {
        let fd = ioctl::socket_netns(socket.as_raw_fd())?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Finds the netns that the user means by NAME, PATH or INODE.
///
/// # Errors
/// There is none, or it cannot be opened; the text names the next step.
pub fn resolve(text: &str) -> Result<Netns, ContextError> {
    find(text).map(|(netns, _)| netns)
}

/// Finds the netns of a process.
///
/// # Errors
/// There is no such process, or it may not be looked at; the text names the next step.
pub fn resolve_pid(pid: u32) -> Result<Netns, ContextError> {
    find_pid(pid).map(|(netns, _)| netns)
}

pub(super) fn find(text: &str) -> Result<(Netns, PathBuf), ContextError> {
    let known = Discovery::default().scan(true, true);
    let with_name = |inode: u32| Netns {
        inode,
        name: known.get(&inode).and_then(|found| found.name.clone()),
    };
    if text.contains('/') {
        let path = PathBuf::from(text);
        return match open(&path) {
            Ok((_, inode)) => Ok((with_name(inode), path)),
            Err(error) => Err(ContextError::NetnsPath(path, error)),
        };
    }
    if let Some((inode, found)) = known
        .iter()
        .find(|(_, found)| found.name.as_deref() == Some(text))
    {
        return Ok((with_name(*inode), found.path.clone()));
    }
    for folder in KEPT {
        let path = Path::new(folder).join(text);
        if let Ok((_, inode)) = open(&path) {
            return Ok((with_name(inode), path));
        }
    }
    match text.parse::<u32>() {
        Ok(inode) => match known.get(&inode) {
            Some(found) => Ok((with_name(inode), found.path.clone())),
            None => Err(ContextError::NetnsInode(inode)),
        },
        Err(_) => Err(ContextError::NetnsName(text.to_owned())),
    }
}

pub(super) fn find_pid(pid: u32) -> Result<(Netns, PathBuf), ContextError> {
    let path = process_path(pid);
    match open(&path) {
        Ok((_, inode)) => {
            let known = Discovery::default().scan(true, true);
            let name = known.get(&inode).and_then(|found| found.name.clone());
            Ok((Netns { inode, name }, path))
        }
        Err(error) => Err(ContextError::Pid(pid, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTINFO: &str = "\
22 28 0:21 / /proc rw,nosuid shared:12 - proc proc rw
28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
340 25 0:4 net:[4026532281] /run/netns/blue rw shared:180 - nsfs nsfs rw
341 28 0:4 net:[4026532281] /var/run/netns/blue rw shared:180 - nsfs nsfs rw
400 25 0:4 net:[4026532500] /run/docker/netns/1a2b3c rw shared:190 - nsfs nsfs rw
401 25 0:4 net:[4026532600] /srv/some\\040place/ns rw shared:191 - nsfs nsfs rw
402 25 0:4 mnt:[4026532700] /run/snapd/ns/lxd.mnt rw - nsfs nsfs rw
garbage
";

    #[test]
    fn mountinfo_names_bind_mounted_namespaces() {
        let mounts = mounted(MOUNTINFO);
        assert_eq!(mounts.len(), 4);
        assert_eq!(mounts[0], (4_026_532_281, "/run/netns/blue".into()));
        assert_eq!(mounts[3], (4_026_532_600, "/srv/some place/ns".into()));
        assert_eq!(named(&mounts[0].1), Some("blue".into()));
        assert_eq!(named(&mounts[2].1), None);
        assert_eq!(named(&mounts[3].1), None);
    }

    #[test]
    fn processes_and_mounts_make_one_list() {
        let discovery = Discovery {
            processes: HashMap::from([(1, (100, 3)), (40, (100, 3)), (50, (200, 3)), (45, (200, 1))]),
            mounts: vec![
                (100, "/run/docker/netns/default".into()),
                (300, "/run/netns/blue".into()),
                (200, "/run/netns/red".into()),
                (400, "/run/netns/host".into()),
            ],
            scans: 0,
        };
        let found = discovery.found();
        let summary: Vec<_> = found
            .iter()
            .map(|(inode, found)| {
                (
                    *inode,
                    found.name.as_deref(),
                    found.path.to_str().unwrap_or_default(),
                )
            })
            .collect();
        assert_eq!(
            summary,
            [
                (100, Some("host"), "/proc/1/ns/net"),
                (200, Some("red"), "/proc/45/ns/net"),
                (300, Some("blue"), "/run/netns/blue"),
                (400, None, "/run/netns/host"),
            ]
        );
        assert_eq!(discovery.members(200), [45, 50].into());
    }

    #[test]
    fn octal_escapes_are_undone() {
        assert_eq!(unescaped("/a\\040b\\134c"), "/a b\\c");
        assert_eq!(unescaped("/a\\04"), "/a\\04");
        assert_eq!(unescaped("plain"), "plain");
    }

    #[test]
    fn unknown_namespaces_say_what_to_do() {
        let error = resolve("no-such-netns").unwrap_err().to_string();
        assert!(
            error.contains("no network namespace named no-such-netns") && error.contains("ip netns list"),
            "{error}"
        );
        let error = resolve("4").unwrap_err().to_string();
        assert!(error.contains("inode 4") && error.contains("lsns"), "{error}");
        let error = resolve("/proc/self/status").unwrap_err().to_string();
        assert!(error.contains("not a network namespace"), "{error}");
        let error = resolve("/no/such/file").unwrap_err().to_string();
        assert!(error.contains("/no/such/file"), "{error}");
        let error = resolve_pid(u32::MAX).unwrap_err().to_string();
        assert!(error.contains("no process with pid"), "{error}");
    }

    #[test]
    fn a_process_is_in_the_netns_that_its_path_names() {
        let own = resolve_pid(std::process::id()).unwrap();
        assert_eq!(resolve("/proc/self/ns/net").unwrap(), own);
        assert_eq!(resolve(&own.inode.to_string()).unwrap(), own);
    }
}
