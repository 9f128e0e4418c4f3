//! Tells when kernel modules come or go.

use std::{collections::HashMap, fs, io, ops::Range, os::fd::AsRawFd as _, time::Duration};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};
use std::os::fd::OwnedFd;
use tokio::{
    io::unix::AsyncFd,
    time::{self, Instant},
};

use super::symbols::module_addresses;

/// Multicast group of the kernel's own device events (`lib/kobject_uevent.c`).
const KERNEL_EVENTS: u32 = 1;

/// How often `/proc/modules` is read, since the kernel may not tell.
const POLL: Duration = Duration::from_secs(1);

/// A module brings others with it: how long to wait for them.
const SETTLE: Duration = Duration::from_millis(20);

/// The kernel tells of a module that goes before its symbols are gone (`free_module`, kernel/module/main.c): how long
/// until a second look.
const GONE: Duration = Duration::from_secs(1);

/// Waits for modules to come or go: by the kernel's device events where they can be had, and by reading `/proc/modules`
/// every second.
pub struct ModuleWatch {
    events: Option<AsyncFd<OwnedFd>>,
    /// Modules as of the last look, and when to look again: an event may be lost.
    last: HashMap<String, Range<u64>>,
    look: Instant,
    /// When to tell what has happened, soonest last. Kept here, since the caller may give up waiting meanwhile.
    due: Vec<Instant>,
}

impl ModuleWatch {
    /// Starts to watch; what happens from now on is told. Needs a tokio runtime.
    pub fn new() -> Self {
        Self {
            events: events().ok(),
            last: modules(),
            look: Instant::now() + POLL,
            due: Vec::new(),
        }
    }

    /// Waits until a module comes or goes. Cancel safe: what it has not told it tells next time.
    pub async fn changed(&mut self) {
        loop {
            let next = self.due.last().copied();
            tokio::select! {
                () = time::sleep_until(next.unwrap_or(self.look)), if next.is_some() => {
                    self.due.pop();
                    return;
                }
                () = time::sleep_until(self.look) => {
                    self.look = Instant::now() + POLL;
                    let now = modules();
                    if now != self.last {
                        self.last = now;
                        self.tell_after(Duration::ZERO);
                    }
                }
                heard = heard(self.events.as_ref()) => match heard {
                    Ok(true) => self.tell_after(SETTLE),
                    Ok(false) => {}
                    // No more events from this socket: the list is left.
                    Err(_) => self.events = None,
                }
            }
        }
    }

    fn tell_after(&mut self, rest: Duration) {
        let now = Instant::now();
        self.due = vec![now + GONE, now + rest];
    }
}

/// Waits for events, for ever without a socket; says whether one was about a module.
async fn heard(events: Option<&AsyncFd<OwnedFd>>) -> io::Result<bool> {
    let Some(socket) = events else {
        return std::future::pending().await;
    };
    let mut ready = socket.readable().await?;
    let about_module = drain(socket.get_ref());
    ready.clear_ready();
    Ok(about_module)
}

impl Default for ModuleWatch {
    fn default() -> Self {
        Self::new()
    }
}

fn events() -> io::Result<AsyncFd<OwnedFd>> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        SockProtocol::NetlinkKObjectUEvent,
    )?;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL_EVENTS))?;
    // SAFETY: an OwnedFd gives always the same descriptor, which stays open until it is dropped.
    Ok(unsafe { AsyncFd::register(socket) }?)
}

/// Reads all events that wait; says whether one was about a module. A socket that overflowed may have lost one.
fn drain(socket: &OwnedFd) -> bool {
    let mut seen = false;
    let mut buffer = [0; 4096];
    // Bounded, so that a flood of other devices' events cannot hold us here.
    for _ in 0..10_000 {
        match recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            Ok(length) => seen |= is_module_event(&buffer[..length]),
            Err(nix::errno::Errno::ENOBUFS) => seen = true,
            Err(_) => break,
        }
    }
    seen
}

/// `add@/module/ip_vs` or `remove@/module/ip_vs` (`lib/kobject_uevent.c` `kobject_uevent_env`, 5.10 - 7.3).
fn is_module_event(message: &[u8]) -> bool {
    message.starts_with(b"add@/module/") || message.starts_with(b"remove@/module/")
}

/// Modules, each with where it lies.
fn modules() -> HashMap<String, Range<u64>> {
    let text = fs::read_to_string("/proc/modules").unwrap_or_default();
    let places = module_addresses(&text).into_iter();
    places.map(|(name, place)| (name.to_owned(), place)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_events_are_told_from_others() {
        assert!(is_module_event(b"add@/module/ip_vs\0ACTION=add\0"));
        assert!(is_module_event(b"remove@/module/ip_vs\0ACTION=remove\0"));
        assert!(!is_module_event(b"add@/devices/virtual/net/veth0\0ACTION=add\0"));
        assert!(!is_module_event(b""));
    }
}
