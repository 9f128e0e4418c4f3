//! The packet behind an `sk_buff`: where its headers are and what they say.

use core::{
    mem::offset_of,
    ptr::{read_volatile, write_volatile},
};

use droptrace_common::{Address, AddressKey, NETNS_PREFIX_BITS, PACKET_MAX, address_flags, bits};

use aya_ebpf::maps::lpm_trie::Key;
use network_types::{
    eth::EtherType,
    ip::{IpProto, Ipv4Hdr, Ipv6Hdr},
};

use crate::{
    emit::Work,
    kernel::{self, layout, member, net_of_device, net_of_sock, read},
    maps::{ADDRESSES, SERVICES},
};

/// Low bits of `_skb_refdst` and `_nfct` are flags.
pub(crate) const POINTER: u64 = !7;
pub(crate) const ETH_P_IP: u16 = u16::from_be(EtherType::Ipv4 as u16);
const ETH_P_ARP: u16 = u16::from_be(EtherType::Arp as u16);
pub(crate) const ETH_P_IPV6: u16 = u16::from_be(EtherType::Ipv6 as u16);

/// Who sends what to whom.
///
/// Aligned, so that the compiler moves it in words.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(crate) struct Tuple {
    pub(crate) src: Address,
    pub(crate) dst: Address,
    pub(crate) sport: u16,
    pub(crate) dport: u16,
    pub(crate) protocol: u8,
    pub(crate) tcp_flags: u8,
    pub(crate) pad: u16,
}

/// Bits of the last word of a [`Tuple`] that are its ports.
const PORTS: u64 = 0xffff_ffff;
/// The same, and its protocol.
const FLOW: u64 = 0xff_ffff_ffff;

impl Tuple {
    /// Whether both are of one flow and protocol.
    #[inline(always)]
    pub(crate) fn same_flow(&self, other: &Self) -> bool {
        self.differs(other, FLOW) == 0
    }

    /// Whether both have the same addresses and ports.
    #[inline(always)]
    pub(crate) fn same_endpoints(&self, other: &Self) -> bool {
        self.differs(other, PORTS) == 0
    }

    /// Source, destination, and in the last word ports, protocol and flags.
    #[inline(always)]
    pub(crate) const fn words(&self) -> &[u64; 5] {
        // SAFETY: five aligned words, all of which are initialised.
        unsafe { &*(&raw const *self).cast::<[u64; 5]>() }
    }

    /// Sets all words.
    #[inline(always)]
    pub(crate) fn set(&mut self, words: [u64; 5]) {
        // SAFETY: as in `words`. Volatile, since the compiler's own way would be a loop over bytes.
        let own = unsafe { &mut *(&raw mut *self).cast::<[u64; 5]>() };
        for (place, word) in own.iter_mut().zip(words) {
            // SAFETY: a valid reference.
            unsafe { write_volatile(place, word) };
        }
    }

    /// All words are compared at once: each comparison would be a fork for the verifier.
    #[inline(always)]
    fn differs(&self, other: &Self, of_last: u64) -> u64 {
        let (a, b) = (self.words(), other.words());
        let addresses = (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]);
        addresses | (a[4] ^ b[4]) & of_last
    }
}

/// Where the network header is and how much of the packet follows it.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    /// Address of the network header.
    pub(crate) network: u64,
    /// Bytes from there to the end of the linear part.
    pub(crate) linear: u32,
    /// Bytes from there to the end of the packet.
    pub(crate) len: u32,
}

/// EtherType of an skb in host order.
#[inline(always)]
pub(crate) fn ethertype(skb: u64) -> u16 {
    u16::from_be(member(skb, layout!(skb_protocol)))
}

/// The first eight bytes behind the network header: of TCP the ports and the sequence number. Anything where it is not known
/// where they are, which [`has_first_bytes`] tells.
#[inline(always)]
pub(crate) fn first_bytes(skb: u64) -> u64 {
    let head: u64 = member(skb, layout!(skb_head));
    read(head + u64::from(member::<u16>(skb, layout!(skb_transport_header))))
}

/// Whether these are its [`first_bytes`], and it is known where they are (`skb_transport_header_was_set`,
/// include/linux/skbuff.h).
#[inline(always)]
pub(crate) fn has_first_bytes(skb: u64, bytes: u64) -> bool {
    let transport: u16 = member(skb, layout!(skb_transport_header));
    transport != u16::MAX && bytes != 0 && first_bytes(skb) == bytes
}

/// `::ffff:a.b.c.d`.
#[inline(always)]
pub(crate) const fn mapped(v4: [u8; 4]) -> Address {
    [
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, v4[0], v4[1], v4[2], v4[3],
    ]
}

/// The second half of that as a word of a [`Tuple`], from the four bytes as a word.
#[inline(always)]
const fn mapped_low(v4: u32) -> u64 {
    (v4 as u64) << 32 | 0xffff_0000
}

/// A word of the packet, at a place that is a multiple of its size: the buffer is aligned.
#[inline(always)]
pub(crate) fn word<T: Copy>(bytes: &[u8; PACKET_MAX], at: usize) -> T {
    // SAFETY: the callers' places are constants within the bytes.
    unsafe { read_volatile(bytes.as_ptr().add(at).cast()) }
}

/// The halves of an address as numbers, as [`droptrace_common::FieldId`] wants them.
#[inline(always)]
pub(crate) fn halves(address: &Address) -> (u64, u64) {
    let a = address;
    (
        u64::from_be_bytes([a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]]),
        u64::from_be_bytes([a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]]),
    )
}

/// Reads an `union nf_inet_addr`-like address of this family from the kernel.
#[inline(always)]
pub(crate) fn address_at(address: u64, v6: bool) -> Address {
    if v6 { read(address) } else { mapped(read(address)) }
}

/// The same, to a place in a map, where the two ways of writing it are one to the verifier.
#[inline(always)]
pub(crate) fn place_address(into: &mut Address, address: u64, v6: bool) {
    if v6 {
        kernel::read_bytes(address, into);
    } else {
        *into = mapped([0; 4]);
        kernel::read_bytes(address, &mut into[12..]);
    }
}

/// Parses the headers in `bytes`, which hold `len` valid bytes of a packet with this EtherType.
#[inline(always)]
pub(crate) fn parse(tuple: &mut Tuple, bytes: &[u8; PACKET_MAX], len: u32, ethertype: u16) -> u32 {
    tuple.set([0; 5]);
    let mut found = 0;
    let at;
    if ethertype == ETH_P_IP && len >= Ipv4Hdr::LEN as u32 {
        let [src, dst] =
            [offset_of!(Ipv4Hdr, src_addr), offset_of!(Ipv4Hdr, dst_addr)].map(|at| word::<u32>(bytes, at));
        tuple.set([0, mapped_low(src), 0, mapped_low(dst), 0]);
        tuple.protocol = bytes[offset_of!(Ipv4Hdr, proto)];
        found |= v4_kinds(src.to_le_bytes(), dst.to_le_bytes());
        if u16::from_be_bytes([bytes[6], bytes[7]]) & 0x1fff != 0 {
            return found;
        }
        at = usize::from(bytes[0] & 0xf) * 4;
    } else if ethertype == ETH_P_IPV6 && len >= Ipv6Hdr::LEN as u32 {
        const SRC: usize = offset_of!(Ipv6Hdr, src_addr);
        tuple.set([
            word(bytes, SRC),
            word(bytes, SRC + 8),
            word(bytes, SRC + 16),
            word(bytes, SRC + 24),
            0,
        ]);
        tuple.protocol = bytes[offset_of!(Ipv6Hdr, next_hdr)];
        if tuple.dst[0] == 0xff {
            found |= bits::MULTICAST;
        }
        at = Ipv6Hdr::LEN;
    } else {
        return found
            | match ethertype {
                0 => bits::NO_PROTOCOL,
                ETH_P_ARP => bits::NOT_IP | bits::ARP,
                _ => bits::NOT_IP,
            };
    }
    found | transport(tuple, bytes, at, len)
}

#[inline(always)]
fn transport(tuple: &mut Tuple, bytes: &[u8; PACKET_MAX], at: usize, len: u32) -> u32 {
    const TCP: u8 = IpProto::Tcp as u8;
    const UDP: u8 = IpProto::Udp as u8;
    const ICMP: u8 = IpProto::Icmp as u8;
    const ICMPV6: u8 = IpProto::Ipv6Icmp as u8;
    const ICMP_ECHO_REPLY: u8 = 0;
    const ICMPV6_ECHO_REPLY: u8 = 129;
    // An IPv4 header has at most 60 bytes; the ports and the flags are within 14 more.
    let at = at & 63;
    if (at as u32) + 14 > len && tuple.protocol == TCP || (at as u32) + 4 > len {
        return 0;
    }
    match tuple.protocol {
        TCP | UDP => {
            tuple.sport = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
            tuple.dport = u16::from_be_bytes([bytes[at + 2], bytes[at + 3]]);
        }
        ICMP if bytes[at] == ICMP_ECHO_REPLY => return bits::ICMP | bits::ECHO_REPLY,
        ICMPV6 if bytes[at] == ICMPV6_ECHO_REPLY => return bits::ICMP | bits::ECHO_REPLY,
        ICMP | ICMPV6 => return bits::ICMP,
        _ => return 0,
    }
    if tuple.protocol == UDP {
        return bits::UDP;
    }
    tuple.tcp_flags = bytes[at + 13];
    let kind = match tuple.tcp_flags & 0x12 {
        0x02 => bits::SYN,
        0x12 => bits::SYN_ACK,
        _ => 0,
    };
    bits::TCP | kind | if tuple.tcp_flags & 4 != 0 { bits::RST } else { 0 }
}

#[inline(always)]
fn v4_kinds(src: [u8; 4], dst: [u8; 4]) -> u32 {
    let mut found = 0;
    if src[0] == 0 || src[0] == 127 || src[0] >= 224 {
        found |= bits::SOURCE_NOT_UNICAST;
    }
    match dst[0] {
        127 => found |= bits::DESTINATION_LOOPBACK,
        224..=239 => found |= bits::MULTICAST,
        255 if dst == [255; 4] => found |= bits::MULTICAST,
        0 | 240..=255 => found |= bits::DESTINATION_INVALID,
        _ => {}
    }
    found
}

/// Asks the sets that context keeps whether the addresses are local, on a dummy device, IPVS's, and adds what they say.
#[inline(always)]
pub(crate) fn memberships(found: &mut u32, work: &mut Work, netns: u32) {
    let source = held(&mut work.address, &work.tuple.src, netns);
    if source & address_flags::LOCAL != 0 {
        kernel::add(found, bits::SOURCE_LOCAL);
    }
    if source & address_flags::DUMMY != 0 {
        kernel::add(found, bits::SOURCE_DUMMY);
    }
    let destination = held(&mut work.address, &work.tuple.dst, netns);
    if destination & address_flags::LOCAL != 0 {
        kernel::add(found, bits::DESTINATION_LOCAL);
    }
    if destination & address_flags::DUMMY != 0 {
        kernel::add(found, bits::DESTINATION_DUMMY);
    }
    if destination & address_flags::IPVS != 0 {
        kernel::add(found, bits::DESTINATION_IPVS);
        work.service.netns = netns;
        work.service.port = work.tuple.dport;
        work.service.protocol = work.tuple.protocol;
        work.service.pad = 0;
        work.service.address = work.tuple.dst;
        // SAFETY: the value is not read.
        if unsafe { SERVICES.get(&work.service) }.is_some() {
            kernel::add(found, bits::SERVICE_IPVS);
        }
    }
}

#[inline(always)]
fn held(key: &mut Key<AddressKey>, address: &Address, netns: u32) -> u32 {
    *key = Key::new(
        NETNS_PREFIX_BITS + 128,
        AddressKey {
            netns,
            address: *address,
        },
    );
    ADDRESSES.get(&*key).map_or(0, |value| value.flags)
}

/// The netns of a packet that is under way.
#[inline(always)]
pub(crate) fn netns(skb: u64) -> u32 {
    netns_of(
        0,
        member(skb, layout!(skb_sk)),
        member(skb, layout!(skb_dev)),
        member::<u64>(skb, layout!(skb_refdst)) & POINTER,
        member::<u64>(skb, layout!(skb_nfct)) & POINTER,
    )
}

/// The netns by the first that says so: socket that received, device, socket that sent, route, conntrack entry. A packet
/// that crossed a veth pair keeps its sender's socket until IP takes it (`skb_scrub_packet`, net/core/skbuff.c, `ip_rcv_core`,
/// net/ipv4/ip_input.c, 5.10 - 7.3): its device says where it is.
#[inline(always)]
pub(crate) fn netns_of(rx_sk: u64, sk: u64, device: u64, refdst: u64, ct: u64) -> u32 {
    // Where there is none, nothing is read.
    let of_receiver = kernel::inode_of_net(net_of_sock(rx_sk));
    if of_receiver != 0 {
        return of_receiver;
    }
    let of_device = kernel::inode_of_net(net_of_device(device));
    if of_device != 0 {
        return of_device;
    }
    let of_sender = kernel::inode_of_net(net_of_sock(sk));
    if of_sender != 0 {
        return of_sender;
    }
    let of_route = kernel::inode_of_net(net_of_device(member(refdst, layout!(dst_dev))));
    if of_route != 0 {
        return of_route;
    }
    kernel::inode_of_net(member(ct, layout!(ct_net)))
}
