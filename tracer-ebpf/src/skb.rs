//! What an `sk_buff` says of its packet, read at once.

use droptrace_common::{Like, ct_status};

use crate::{
    kernel::{self, layout, member},
    packet::{self, Extent},
};

/// Bytes of an `sk_buff` that are copied: all that it has (232 on Debian's 5.10 - 7.3).
const COPIED: usize = 256;

/// What was read of an `sk_buff`.
#[repr(C)]
pub(crate) struct SkBuff {
    address: u64,
    sk: u64,
    sk_net: u64,
    device: u64,
    /// `_skb_refdst` and `_nfct`, with their flags.
    pub(crate) refdst: u64,
    pub(crate) entry: u64,
    head: u64,
    data: u64,
    tail: u32,
    end: u32,
    len: u32,
    pub(crate) iif: u32,
    protocol: u16,
    network_header: u16,
    /// The bytes with the bit fields of these names.
    pkt_type: u8,
    ipvs_property: u8,
    active_extensions: u8,
    pad: u8,
    copy: [u8; COPIED],
}

/// Where members are read from.
trait Members {
    fn member<T: Copy + Default>(&self, entry: u32) -> T;

    /// The byte that holds a bit field.
    fn byte(&self, bit: u32) -> u8;
}

/// A pointer of which the verifier knows that it is one to an `sk_buff`.
struct Typed(u64);

impl Members for Typed {
    #[inline(always)]
    fn member<T: Copy + Default>(&self, entry: u32) -> T {
        kernel::typed(self.0, entry)
    }

    #[inline(always)]
    fn byte(&self, bit: u32) -> u8 {
        kernel::typed(self.0, byte_entry(bit))
    }
}

/// A copy, and what it is of: one read of all costs as much as four of single members.
struct Copied<'a> {
    bytes: &'a [u8; COPIED],
    address: u64,
}

impl Members for Copied<'_> {
    #[inline(always)]
    fn member<T: Copy + Default>(&self, entry: u32) -> T {
        let at = kernel::offset(entry) as usize;
        if !kernel::has(entry) {
            T::default()
        } else if at + size_of::<T>() <= COPIED {
            // SAFETY: within the bytes, which are any plain value.
            unsafe { self.bytes.as_ptr().add(at).cast::<T>().read_volatile() }
        } else {
            member(self.address, entry)
        }
    }

    #[inline(always)]
    fn byte(&self, bit: u32) -> u8 {
        self.member(byte_entry(bit))
    }
}

/// The member entry of the byte in which a bit is.
#[inline(always)]
const fn byte_entry(bit: u32) -> u32 {
    if kernel::has(bit) { bit / 8 } else { bit }
}

/// A bit field of `width` bits in its byte; zero if the kernel does not have it.
#[inline(always)]
const fn field(byte: u8, bit: u32, width: u32) -> u32 {
    if kernel::has(bit) {
        (byte as u32 >> (bit % 8)) & ((1 << width) - 1)
    } else {
        0
    }
}

/// Reads all members, whatever from.
macro_rules! fill {
    ($into:expr, $from:expr) => {{
        let (into, from) = (&mut *$into, $from);
        into.refdst = from.member(layout!(skb_refdst));
        into.entry = from.member(layout!(skb_nfct));
        into.head = from.member(layout!(skb_head));
        into.data = from.member(layout!(skb_data));
        into.tail = from.member(layout!(skb_tail));
        into.end = from.member(layout!(skb_end));
        into.len = from.member(layout!(skb_len));
        into.iif = from.member(layout!(skb_iif));
        into.protocol = from.member(layout!(skb_protocol));
        into.network_header = from.member(layout!(skb_network_header));
        into.pkt_type = from.byte(layout!(skb_pkt_type));
        into.ipvs_property = from.byte(layout!(skb_ipvs_property));
        into.active_extensions = from.member(layout!(skb_active_extensions));
    }};
}

#[inline(always)]
const fn kind(pkt_type: u8, ipvs_property: u8, extensions: u8, protocol: u16) -> u64 {
    pkt_type as u64 | (ipvs_property as u64) << 8 | (extensions as u64) << 16 | (protocol as u64) << 32
}

/// What a free is like, as far as the packet tells, and how many bytes of it from the network header on are at hand; None if
/// it belongs to a connection that is dying.
#[inline(always)]
pub(crate) fn like(skb: u64) -> Option<(Like, u64)> {
    let from = Typed(skb);
    let entry = from.member::<u64>(layout!(skb_nfct)) & packet::POINTER;
    if entry != 0 && member::<u64>(entry, layout!(ct_status)) & ct_status::DYING != 0 {
        return None;
    }
    let head: u64 = from.member(layout!(skb_head));
    let start = u64::from(from.member::<u16>(layout!(skb_network_header)));
    let end = u64::from(from.member::<u32>(layout!(skb_tail)));
    let sk: u64 = from.member(layout!(skb_sk));
    let sk_net = if sk == 0 {
        0
    } else {
        kernel::typed(sk, layout!(sock_net))
    };
    Some((
        Like {
            location: 0,
            device: from.member(layout!(skb_dev)),
            refdst: from.member(layout!(skb_refdst)),
            sk_net,
            rx_net: 0,
            reason: 0,
            kind: kind(
                from.byte(layout!(skb_pkt_type)),
                from.byte(layout!(skb_ipvs_property)),
                from.member(layout!(skb_active_extensions)),
                from.member(layout!(skb_protocol)),
            ),
            packet: kernel::read(head + start),
        },
        end.wrapping_sub(start),
    ))
}

/// Bytes of the packet from the network header on, and index of the device that it came by.
#[inline(always)]
pub(crate) fn length_and_device(skb: u64) -> (u32, u32) {
    let from = Typed(skb);
    let head: u64 = from.member(layout!(skb_head));
    let network = head + u64::from(from.member::<u16>(layout!(skb_network_header)));
    let data: u64 = from.member(layout!(skb_data));
    let len: u32 = from.member(layout!(skb_len));
    let length = len.wrapping_add(data.wrapping_sub(network) as u32);
    (length, from.member(layout!(skb_iif)))
}

/// `pkt_type` and EtherType, from `kind` of [`Like`].
#[inline(always)]
pub(crate) fn type_and_protocol(kind: u64) -> (u16, u16) {
    (
        field(kind as u8, layout!(skb_pkt_type), 3) as u16,
        u16::from_be((kind >> 32) as u16),
    )
}

impl SkBuff {
    /// Reads the one at this address.
    #[inline(always)]
    pub(crate) fn read(&mut self, address: u64) {
        kernel::read_bytes(address, &mut self.copy);
        let bytes = &raw const self.copy;
        let copied = Copied {
            // SAFETY: a valid reference to what nobody writes meanwhile; apart, since the others are written.
            bytes: unsafe { &*bytes },
            address,
        };
        fill!(self, &copied);
        self.address = address;
        self.device = copied.member(layout!(skb_dev));
        self.sk = copied.member(layout!(skb_sk));
        self.sk_net = if self.sk == 0 {
            0
        } else {
            kernel::net_of_sock(self.sk)
        };
    }

    /// The same where the verifier knows that it is one, by loads instead of helpers.
    #[inline(always)]
    pub(crate) fn read_typed(&mut self, skb: u64) {
        let typed = Typed(skb);
        fill!(self, &typed);
        let sk: u64 = typed.member(layout!(skb_sk));
        let net: u64 = if sk == 0 {
            0
        } else {
            kernel::typed(sk, layout!(sock_net))
        };
        // In the map they become numbers, with which one may calculate.
        kernel::any(&mut self.address, skb);
        kernel::any(&mut self.device, typed.member(layout!(skb_dev)));
        kernel::any(&mut self.sk, sk);
        kernel::any(&mut self.sk_net, net);
    }

    /// Where it is.
    #[inline(always)]
    pub(crate) fn address(&self) -> u64 {
        kernel::anew(&self.address)
    }

    /// Its socket, 0 for none.
    #[inline(always)]
    pub(crate) fn sk(&self) -> u64 {
        kernel::anew(&self.sk)
    }

    /// `struct net` of the socket.
    #[inline(always)]
    pub(crate) fn sk_net(&self) -> u64 {
        kernel::anew(&self.sk_net)
    }

    /// Its device, 0 for none: an address of the kernel, whose highest bit is set. A datagram in a socket's queue has other
    /// things in its place (`udp_set_dev_scratch`, net/ipv4/udp.c, 5.10 - 7.3), and 5.10 warns on some machines where that is
    /// read from.
    #[inline(always)]
    pub(crate) fn device(&self) -> u64 {
        let value = kernel::anew(&self.device);
        value & (value as i64 >> 63) as u64
    }

    /// What kind of packet it is: see `kind` of [`droptrace_common::Like`].
    #[inline(always)]
    pub(crate) const fn kind(&self) -> u64 {
        kind(
            self.pkt_type,
            self.ipvs_property,
            self.active_extensions,
            self.protocol,
        )
    }

    /// The EtherType in host order.
    #[inline(always)]
    pub(crate) const fn ethertype(&self) -> u16 {
        u16::from_be(self.protocol)
    }

    /// Finds the network header. `skb->data` may stand before or behind it, depending on the layer.
    #[inline(always)]
    pub(crate) const fn extent(&self) -> Extent {
        let network = self.head + self.network_header as u64;
        Extent {
            network,
            linear: (self.head + self.tail as u64).saturating_sub(network) as u32,
            len: self.len.wrapping_add(self.data.wrapping_sub(network) as u32),
        }
    }

    /// `skb->pkt_type`.
    #[inline(always)]
    pub(crate) fn packet_type(&self) -> u32 {
        field(self.pkt_type, layout!(skb_pkt_type), 3)
    }

    /// `skb->ipvs_property`.
    #[inline(always)]
    pub(crate) fn ipvs_property(&self) -> u32 {
        field(self.ipvs_property, layout!(skb_ipvs_property), 1)
    }

    /// Whether the packet is on its way through a bridge that asks the hooks of IP: it then has what `br_netfilter` remembers
    /// of it (`struct nf_bridge_info`, net/bridge/br_netfilter_hooks.c, 5.10 - 7.3).
    #[inline(always)]
    pub(crate) fn is_bridged(&self) -> bool {
        let extension = layout!(skb_ext_bridge_nf);
        kernel::has(extension) && self.active_extensions & 1 << (extension & 7) != 0
    }

    /// Segments that the packet stands for.
    #[inline(always)]
    pub(crate) fn segments(&self) -> u16 {
        let segments: u16 = member(self.head + u64::from(self.end), layout!(skb_shared_gso_segs));
        if segments == 0 { 1 } else { segments }
    }
}
