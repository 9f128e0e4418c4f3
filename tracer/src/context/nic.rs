//! Network cards: frames that they had no room for, and how they are set up.

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::netlink::{Message, Netlink, attributes, text};
use crate::diagnose::{MISSED, Nic};

const IFINFOMSG: usize = 16;
// Numbers of include/uapi/linux/ethtool.h.
const ETHTOOL_GDRVINFO: u32 = 0x3;
const ETHTOOL_GRINGPARAM: u32 = 0x10;
const ETHTOOL_GCHANNELS: u32 = 0x3c;
/// Where [`MISSED`] stand among the 64-bit numbers of `struct rtnl_link_stats64` (include/uapi/linux/if_link.h, 5.10 - 7.3).
const PLACES: [usize; MISSED.len()] = [15, 11, 14];

/// What the counters of [`MISSED`] say, in that order.
type Reading = [u64; MISSED.len()];

/// Frames that a card had no room for since the reading before, at least: of the counters that moved, the one that moved most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missed {
    /// Inode of the netns.
    pub netns: u32,
    /// Index of the card.
    pub ifindex: u32,
    /// Name of the counter, of [`MISSED`].
    pub counter: &'static str,
    /// Frames.
    pub frames: u64,
}

/// The last reading of each card of a netns.
#[derive(Debug, Default)]
pub(super) struct Followed(BTreeMap<u32, Reading>);

impl Followed {
    /// Reads these cards anew; what moved since the reading before. The first one is where counting starts.
    pub(super) fn take(&mut self, netns: u32, route: &mut Netlink, cards: &[u32]) -> Vec<Missed> {
        let readings = cards.iter().filter_map(|index| {
            let answer = ask(route, *index).ok()?;
            Some((*index, reading(&answer)?))
        });
        self.compare(netns, readings.collect())
    }

    fn compare(&mut self, netns: u32, now: BTreeMap<u32, Reading>) -> Vec<Missed> {
        let before = std::mem::replace(&mut self.0, now);
        let moved = |(ifindex, now): (&u32, &Reading)| {
            let before = before.get(ifindex)?;
            let steps = now
                .iter()
                .zip(before)
                .map(|(now, before)| now.saturating_sub(*before));
            // Of equal ones the first.
            let (counter, frames) = MISSED
                .into_iter()
                .zip(steps)
                .rev()
                .max_by_key(|(_, step)| *step)?;
            (frames > 0).then_some(Missed {
                netns,
                ifindex: *ifindex,
                counter,
                frames,
            })
        };
        self.0.iter().filter_map(moved).collect()
    }
}

/// Asks about the card with this index in the netns of the socket, which must be the thread's own.
///
/// # Errors
/// There is no such device, or the kernel did not answer.
pub(super) fn read(route: &mut Netlink, index: u32) -> io::Result<Nic> {
    let answer = ask(route, index)?;
    let name = attributes(&answer.body, IFINFOMSG)
        .find(|(each, _)| *each == libc::IFLA_IFNAME)
        .map(|(_, value)| text(value))
        .unwrap_or_default();
    let driver = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // The first word of each answer is the command.
    let ring: Option<[u32; 9]> = ethtool(&driver, &name, ETHTOOL_GRINGPARAM);
    let channels: Option<[u32; 9]> = ethtool(&driver, &name, ETHTOOL_GCHANNELS);
    Ok(Nic {
        missed: reading(&answer).unwrap_or_default(),
        driver: ethtool(&driver, &name, ETHTOOL_GDRVINFO).and_then(driver_name),
        ring: ring.map(|ring| ring[5]),
        ring_max: ring.map(|ring| ring[1]),
        // For receiving alone, and for both ways.
        queues: channels.map(|channels| channels[5] + channels[8]),
        squeezed: fs::read_to_string("/proc/thread-self/net/softnet_stat")
            .ok()
            .map(|text| squeezed(&text)),
    })
}

fn ask(route: &mut Netlink, index: u32) -> io::Result<Message> {
    let mut body = vec![0; IFINFOMSG];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    route.ask(libc::RTM_GETLINK, &body)
}

fn reading(link: &Message) -> Option<Reading> {
    let (_, counters) = attributes(&link.body, IFINFOMSG).find(|(each, _)| *each == libc::IFLA_STATS64)?;
    let number = |place: usize| {
        let bytes = counters.get(8 * place..)?.first_chunk()?;
        Some(u64::from_ne_bytes(*bytes))
    };
    let [missed, over, fifo] = PLACES.map(number);
    Some([missed?, over?, fifo?])
}

/// What a driver answers to a command of ethtool, `N` words; `None` if it does not know.
fn ethtool<const N: usize>(socket: &OwnedFd, device: &str, command: u32) -> Option<[u32; N]> {
    let mut words = [0; N];
    words[0] = command;
    // SAFETY: all zeros are a valid `struct ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero.
    let name = device.bytes().take(libc::IFNAMSIZ - 1);
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = words.as_mut_ptr().cast();
    // SAFETY: the request leads to words that are as many as the kernel writes for the command, and both live on.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    (result == 0).then_some(words)
}

/// The name in a `struct ethtool_drvinfo`, which is of 196 bytes.
fn driver_name(words: [u32; 49]) -> Option<String> {
    let bytes: Vec<u8> = words[1..9].iter().flat_map(|word| word.to_ne_bytes()).collect();
    Some(text(&bytes)).filter(|name| !name.is_empty())
}

/// How often all CPUs stopped to take frames out of rings though there were more: `time_squeeze`, the third column, a line for each
/// CPU (`softnet_seq_show`, net/core/net-procfs.c, 5.10 - 7.3).
fn squeezed(softnet_stat: &str) -> u64 {
    let column = |line: &str| u64::from_str_radix(line.split_whitespace().nth(2)?, 16).ok();
    softnet_stat.lines().filter_map(column).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::netlink::put;
    use netlink_sys::protocols::NETLINK_ROUTE;

    #[test]
    fn what_moved_most_is_told_once() {
        let mut followed = Followed::default();
        let mut take = |two: Reading| followed.compare(9, BTreeMap::from([(2, two), (3, [7, 7, 7])]));
        assert_eq!(take([5, 0, 5]), []);
        let told = |counter, frames| {
            [Missed {
                netns: 9,
                ifindex: 2,
                counter,
                frames,
            }]
        };
        // A driver that counts a frame twice.
        assert_eq!(take([8, 0, 8]), told("rx_missed_errors", 3));
        assert_eq!(take([8, 0, 8]), []);
        assert_eq!(take([9, 4, 8]), told("rx_over_errors", 4));
        // The driver was loaded anew.
        assert_eq!(take([0, 0, 0]), []);
        assert_eq!(take([0, 0, 2]), told("rx_fifo_errors", 2));
    }

    #[test]
    fn counters_are_found_by_their_places() {
        let counters: Vec<u8> = (0_u64..24).flat_map(u64::to_ne_bytes).collect();
        let mut body = vec![0; IFINFOMSG];
        put(&mut body, libc::IFLA_STATS64, &counters);
        let link = |body| Message {
            kind: libc::RTM_NEWLINK,
            body,
        };
        assert_eq!(reading(&link(body)), Some([15, 11, 14]));
        let mut short = vec![0; IFINFOMSG];
        put(&mut short, libc::IFLA_STATS64, &counters[..96]);
        assert_eq!(reading(&link(short)), None);
    }

    #[test]
    fn a_driver_has_a_name_and_cpus_a_column() {
        let mut words = [0; 49];
        words[1] = u32::from_ne_bytes(*b"igb\0");
        assert_eq!(driver_name(words).as_deref(), Some("igb"));
        assert_eq!(driver_name([0; 49]), None);
        assert_eq!(squeezed("0000 0001 0000000a 0\n0000 0001 00000006 0\n"), 16);
    }

    #[test]
    fn loopback_has_neither_ring_nor_losses() {
        let lo = read(&mut Netlink::open(NETLINK_ROUTE).unwrap(), 1).unwrap();
        assert_eq!((lo.missed, lo.ring), ([0; 3], None));
        assert!(lo.squeezed.is_some());
    }
}
