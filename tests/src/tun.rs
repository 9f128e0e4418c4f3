//! A device whose wire is this process: packets are injected exactly as they
//! are meant to be, and no second network stack answers on its own.

use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{
    Netns, Result,
    netns::modprobe,
    packet::{Packet, frame},
};

/// How long an answer of the kernel may take in an emulated guest.
pub const ANSWER: Duration = Duration::from_secs(20);

/// Hardware address of every TAP device.
pub const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// Hardware address of the peer that is played by hand.
pub const PEER: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// A hardware address as `ip` takes it.
pub fn mac(address: [u8; 6]) -> String {
    address.map(|byte| format!("{byte:02x}")).join(":")
}

/// A TUN (IP packets) or TAP (Ethernet frames) device; it goes when this value goes.
#[derive(Debug)]
pub struct Tun {
    name: String,
    ethernet: bool,
    file: File,
    received: Arc<Received>,
    stop: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Received {
    frames: Mutex<VecDeque<Vec<u8>>>,
    more: Condvar,
}

impl Tun {
    /// A device for IP packets, up, with these addresses (with prefix length).
    pub fn new(netns: &Netns, name: &str, addresses: &[String]) -> Result<Self> {
        Self::open(netns, name, libc::IFF_TUN, addresses, true)
    }

    /// A device for Ethernet frames, up.
    pub fn tap(netns: &Netns, name: &str, addresses: &[String]) -> Result<Self> {
        Self::open(netns, name, libc::IFF_TAP, addresses, true)
    }

    /// A device for IP packets of which nobody reads, so that its queue fills.
    pub fn unread(netns: &Netns, name: &str, addresses: &[String]) -> Result<Self> {
        Self::open(netns, name, libc::IFF_TUN, addresses, false)
    }

    fn open(netns: &Netns, name: &str, mode: libc::c_int, addresses: &[String], read: bool) -> Result<Self> {
        modprobe("tun")?;
        let file = netns.enter(|| {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .open("/dev/net/tun")
                .context("cannot open /dev/net/tun")?;
            attach(&file, name, mode | libc::IFF_NO_PI)
                .with_context(|| format!("cannot make the device {name}"))?;
            Ok(file)
        })?;
        if mode == libc::IFF_TAP {
            netns.ip(&[&format!("link set {name} address {}", mac(OWN))])?;
        }
        for address in addresses {
            netns.address(name, address)?;
        }
        netns.ip(&[&format!("link set {name} up")])?;
        let received = Arc::new(Received::default());
        let stop = Arc::new(AtomicBool::new(false));
        let reader = if read {
            let (file, received, stop) = (file.try_clone()?, Arc::clone(&received), Arc::clone(&stop));
            Some(thread::spawn(move || read_all(file, &received, &stop)))
        } else {
            None
        };
        Ok(Self {
            name: name.to_owned(),
            ethernet: mode == libc::IFF_TAP,
            file,
            received,
            stop,
            reader,
        })
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Injects a packet (TUN) or frame (TAP): the kernel receives it by this device.
    pub fn send(&self, bytes: &[u8]) -> Result<()> {
        (&self.file)
            .write_all(bytes)
            .with_context(|| format!("cannot inject {} bytes by {}", bytes.len(), self.name))
    }

    /// Injects an IP packet, in a frame from [`PEER`] where the device wants frames.
    pub fn send_ip(&self, packet: &[u8]) -> Result<()> {
        const IPV4: u16 = 0x0800;
        const IPV6: u16 = 0x86dd;
        if !self.ethernet {
            return self.send(packet);
        }
        let ethertype = match packet.first() {
            Some(first) if first >> 4 == 6 => IPV6,
            _ => IPV4,
        };
        self.send(&frame(OWN, PEER, ethertype, packet))
    }

    /// The IP packet in what was received.
    fn parse(&self, bytes: &[u8]) -> Option<Packet> {
        const HEADER: usize = 14;
        Packet::parse(if self.ethernet {
            bytes.get(HEADER..)?
        } else {
            bytes
        })
    }

    /// Waits for a packet that the kernel sends by this device and that is wanted; others before it are dropped from memory.
    pub fn receive(&self, what: &str, wanted: impl FnMut(&Packet) -> bool) -> Result<Packet> {
        self.receive_within(ANSWER, wanted)
            .with_context(|| format!("{what}: the kernel sent none by {} within {ANSWER:?}", self.name))
    }

    /// The same within this time; `None` if none comes.
    pub fn receive_within(
        &self,
        patience: Duration,
        mut wanted: impl FnMut(&Packet) -> bool,
    ) -> Option<Packet> {
        let until = Instant::now() + patience;
        let mut frames = self
            .received
            .frames
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        loop {
            while let Some(frame) = frames.pop_front() {
                if let Some(packet) = self.parse(&frame)
                    && wanted(&packet)
                {
                    return Some(packet);
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            frames = self
                .received
                .more
                .wait_timeout(frames, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Everything received so far that nobody asked for.
    pub fn drain(&self) -> Vec<Packet> {
        let mut frames = self
            .received
            .frames
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        frames
            .drain(..)
            .filter_map(|frame| Packet::parse(&frame))
            .collect()
    }
}

impl Drop for Tun {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn read_all(mut file: File, received: &Received, stop: &AtomicBool) {
    let mut buffer = vec![0; 65536];
    while !stop.load(Ordering::Relaxed) {
        let mut wait = [PollFd::new(file.as_fd(), PollFlags::POLLIN)];
        match poll(&mut wait, PollTimeout::from(50_u8)) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => continue,
            Ok(_) => {}
            Err(_) => return,
        }
        match file.read(&mut buffer) {
            Ok(length) => {
                received
                    .frames
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push_back(buffer[..length].to_vec());
                received.more.notify_all();
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            // The device is gone or down.
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// `TUNSETIFF` (Documentation/networking/tuntap.rst).
fn attach(file: &File, name: &str, flags: libc::c_int) -> io::Result<()> {
    if name.len() >= libc::IFNAMSIZ {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the name is too long",
        ));
    }
    // SAFETY: `ifreq` is plain data for which all zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the descriptor is open and `request` outlives the call, which only reads and writes it.
    let status = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
