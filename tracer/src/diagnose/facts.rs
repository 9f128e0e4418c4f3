//! What context found out about the surroundings of a drop.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{MISSED, Rules};

/// All that a rule may know beyond the event. What could not be had is absent,
/// with the reason in `missing` under the field's name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// Wall clock time of the event, nanoseconds since 1970 UTC.
    pub time_ns: i128,
    /// Name of the kernel's drop reason, without the prefix `SKB_DROP_REASON_`.
    pub reason: Option<String>,
    /// Symbol that freed the packet.
    pub location: Option<String>,
    /// Symbols of the frames that came with the event, innermost first.
    pub frames: Vec<String>,
    /// Conntrack is there, and was not yet, or cannot be, watched for first packets that it drops: they look like those that a
    /// verdict dropped.
    #[serde(default)]
    pub clashes_unseen: bool,
    /// Inode of the netns; 0 where the kernel does not say, or a capture of an earlier version does not.
    #[serde(default)]
    pub netns: u32,
    /// Name of the netns.
    pub netns_name: Option<String>,
    /// Pod that has the netns, as `NAMESPACE/NAME`.
    #[serde(default)]
    pub pod: Option<String>,
    /// Container that has the netns.
    #[serde(default)]
    pub container: Option<String>,
    /// Pod of this host, else container, that has the source address.
    #[serde(default)]
    pub src_name: Option<String>,
    /// The same of the destination address.
    #[serde(default)]
    pub dst_name: Option<String>,
    /// Names of devices in the netns, by index, as far as the event names them.
    pub devices: BTreeMap<u32, String>,
    /// Who holds the source address in this netns; outer `None`: not asked or not known, inner: nobody.
    pub source_holder: Option<Option<AddressHolder>>,
    /// Who holds the destination address in this netns.
    pub destination_holder: Option<Option<AddressHolder>>,
    /// The listener that refused.
    pub listener: Option<Listener>,
    /// The process that owns the packet's socket.
    pub owner: Option<Owner>,
    /// BPF programs that look at what the packet's socket receives and sends.
    #[serde(default)]
    pub cgroup_programs: Option<CgroupPrograms>,
    /// How the owner of the socket or listener gets on.
    #[serde(default)]
    pub progress: Option<Progress>,
    /// The memory of the packet's socket, when asked.
    #[serde(default)]
    pub socket: Option<SocketMemory>,
    /// Settings of the netns by sysctl name (`net.core.somaxconn`).
    pub sysctls: BTreeMap<String, String>,
    /// Where the netns would send a packet to the event's source address.
    pub reverse_route: Option<RouteAnswer>,
    /// Where the netns would send the packet itself.
    pub route: Option<RouteAnswer>,
    /// IPVS services that have the destination address, in this netns.
    pub ipvs_services: Option<Vec<IpvsService>>,
    /// Fill of the netns' conntrack table.
    pub conntrack: Option<ConntrackUsage>,
    /// What stands between the stack and the device that the packet is on.
    #[serde(default)]
    pub link: Option<Link>,
    /// How the device is set up that the packet came by, and what it had no room for.
    #[serde(default)]
    pub nic: Option<Nic>,
    /// Fill of the table of neighbours of the packet's family.
    #[serde(default)]
    pub neighbour_table: Option<NeighbourTable>,
    /// What the rulesets of the netns tell of the packet's end.
    #[serde(default)]
    pub rules: Option<Rules>,
    /// Whether the device that the packet is on has an address of the packet's family.
    #[serde(default)]
    pub out_has_address: Option<bool>,
    /// Queues of the netns to which rules give packets (NFQUEUE).
    #[serde(default)]
    pub queues: Option<Vec<NfQueue>>,
    /// Pages that all sockets of the packet's protocol hold on this host.
    #[serde(default)]
    pub memory_pages: Option<u64>,
    /// Kernel's ticks per second.
    pub hz: Option<u32>,
    /// What could not be had: field → reason.
    pub missing: BTreeMap<String, String>,
}

/// A device that holds an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressHolder {
    /// Name of the device.
    pub device: String,
    /// Kind of the device (`dummy`, `veth`, …); `None` for a physical one.
    pub kind: Option<String>,
}

/// A listening socket, from sock_diag.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listener {
    /// Where it listens.
    pub address: SocketAddr,
    /// Connections that wait for accept(), when asked.
    pub queue_length: u32,
    /// `sk_max_ack_backlog`.
    pub queue_limit: u32,
    /// Inode of the socket.
    pub inode: u64,
    /// The process that owns it.
    pub owner: Option<Owner>,
    /// How many listeners share address and port (SO_REUSEPORT).
    pub sharing: u32,
    /// How many of those have a full queue.
    #[serde(default)]
    pub sharing_full: u32,
}

/// A process that owns a socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Owner {
    /// Process id, as the initial pid namespace numbers it.
    pub pid: u32,
    /// Name of the process (`/proc/PID/comm`).
    pub comm: String,
    /// Pod that it runs in, by its cgroup; absent when none is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Container that it runs in, by its cgroup; absent when none is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
}

/// BPF programs of a socket's cgroup and of those above it, each as `NAME (id NUMBER)`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupPrograms {
    /// Path of the cgroup in the unified hierarchy.
    pub cgroup: String,
    /// Those that look at what it receives.
    pub ingress: Vec<String>,
    /// Those that look at what it sends.
    pub egress: Vec<String>,
}

/// How the processes that hold a socket get on: its owner, and those of the owner's children that hold it, too.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// How many they are.
    pub processes: u32,
    /// Their threads.
    pub threads: u32,
    /// Threads that are stopped or traced (state T or t).
    pub stopped: u32,
    /// Threads that waited and could not be interrupted (state D), and did so a tenth of a second later still.
    pub blocked: u32,
    /// Threads that run or are ready to (state R).
    pub running: u32,
    /// Kernel function in which one of them waits: one in state D, else the first.
    pub waits_in: Option<String>,
    /// The owner's cgroup in the unified hierarchy.
    pub cgroup: Option<String>,
    /// That cgroup, or one above it, is frozen.
    pub frozen: bool,
    /// Percent of the last ten seconds in which all of the cgroup waited for memory.
    pub memory_stall: Option<f64>,
    /// The tightest CPU limit of the cgroup and those above it.
    pub cpu_limit: Option<CpuLimit>,
    /// Times that this limit held back while it was looked at.
    pub throttled: Option<u64>,
}

/// A limit of CPU time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuLimit {
    /// The cgroup that has it.
    pub cgroup: String,
    /// Percent of one CPU.
    pub percent: u64,
    /// Times that it held back so far (`nr_throttled`).
    pub throttled: u64,
}

/// How much a socket holds, and may hold; `None`: not told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketMemory {
    /// Bytes that received packets take in it, overhead included (`sk_rmem_alloc`).
    pub queued: Option<u64>,
    /// Limit of that in bytes (`sk_rcvbuf`).
    pub receive_buffer: Option<u64>,
    /// Limit of what it sends, in bytes (`sk_sndbuf`).
    pub send_buffer: Option<u64>,
    /// Bytes of packets that came while its owner had it locked (`sk_backlog.len`).
    pub backlog: Option<u64>,
    /// Packets that it has lost (`sk_drops`).
    pub drops: Option<u64>,
}

/// Answer of the routing table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteAnswer {
    /// Device by which the packet would leave; `None`: unreachable.
    pub device: Option<String>,
    /// Gateway, where the route has one.
    pub gateway: Option<IpAddr>,
    /// Type of the route (`unicast`, `local`, `blackhole`, …).
    pub kind: String,
    /// Bytes that fit: the route's own MTU where it has one, else the device's.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Whether that is the route's own.
    #[serde(default)]
    pub mtu_of_route: bool,
}

/// A virtual service of IPVS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpvsService {
    /// Virtual address.
    pub address: IpAddr,
    /// Virtual port.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Scheduler.
    pub scheduler: String,
    /// Real servers.
    pub destinations: Vec<IpvsDestination>,
}

/// A real server of IPVS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpvsDestination {
    /// Address.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
    /// Weight; 0 takes no new connections.
    pub weight: i32,
}

/// How full a conntrack table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConntrackUsage {
    /// Entries.
    pub count: u64,
    /// `net.netfilter.nf_conntrack_max`.
    pub max: u64,
}

/// A device with what packets meet before and behind it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Name.
    pub name: String,
    /// Whether it is switched on.
    pub up: bool,
    /// Whether it has a carrier: a cable, or a peer that is on.
    pub carrier: bool,
    /// `txqueuelen`, in packets.
    pub queue_length: u32,
    /// Queueing disciplines for what it sends; empty where it has none that the kernel lists.
    pub qdiscs: Vec<Qdisc>,
    /// Filters of tc that have a program or an action, on both sides.
    pub filters: Vec<Filter>,
    /// Program that sees each packet that it receives.
    pub xdp: Option<Xdp>,
}

/// A network card, as its driver tells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// What each of [`MISSED`] says.
    pub missed: [u64; MISSED.len()],
    /// Name of the driver.
    pub driver: Option<String>,
    /// Frames for which a receive queue has buffers.
    pub ring: Option<u32>,
    /// As many as it can have.
    pub ring_max: Option<u32>,
    /// Receive queues.
    pub queues: Option<u32>,
    /// How often CPUs of the host stopped to take frames out of rings though there were more, since boot.
    pub squeezed: Option<u64>,
}

/// A queueing discipline.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Qdisc {
    /// Such as `fq_codel`.
    pub kind: String,
    /// As tc writes it.
    pub handle: String,
    /// Whether no other hangs below it.
    pub leaf: bool,
    /// Packets that fit, where its kind says so.
    pub limit_packets: Option<u32>,
    /// Bytes that fit, where its kind says so.
    pub limit_bytes: Option<u32>,
    /// Packets in it when asked.
    pub queued_packets: u32,
    /// Bytes in it when asked.
    pub queued_bytes: u32,
    /// Packets that it dropped so far.
    pub drops: u32,
    /// Whether it is told to lose packets (netem).
    pub loses: bool,
}

/// Which way a filter's packets go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// Received.
    #[default]
    Ingress,
    /// Sent.
    Egress,
}

/// A filter of tc, or a program that is attached like one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// Which way its packets go.
    pub side: Side,
    /// Such as `flower`; `tcx` for a program without qdisc.
    pub kind: String,
    /// tc's `pref`; the smallest is asked first.
    pub preference: u32,
    /// Its program.
    pub program: Option<BpfProgram>,
    /// Its actions, in order.
    pub actions: Vec<Action>,
}

/// An action of a filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Action {
    /// Such as `gact` or `police`.
    pub kind: String,
    /// Packets that it dropped so far.
    pub drops: u32,
}

/// A BPF program in the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BpfProgram {
    /// As bpftool numbers it.
    pub id: u32,
    /// Its name, where it has one.
    pub name: Option<String>,
}

impl BpfProgram {
    /// As text: `NAME (id N)`, or `id N`.
    pub fn text(&self) -> String {
        match &self.name {
            Some(name) => format!("{name} (id {})", self.id),
            None => format!("id {}", self.id),
        }
    }
}

/// The XDP program of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Xdp {
    /// `native`, `generic`, `offloaded` or `several`.
    pub mode: String,
    /// The program.
    pub program: Option<BpfProgram>,
}

/// How full a table of neighbours is, which all network namespaces share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeighbourTable {
    /// Entries.
    pub entries: u32,
    /// `gc_thresh3`.
    pub limit: u32,
    /// How often an entry was refused since boot, for being too many (`table_fulls`).
    pub refused: Option<u64>,
}

/// A queue that a program reads packets from, as `/proc/net/netfilter/nfnetlink_queue` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NfQueue {
    /// Its number.
    pub number: u16,
    /// Netlink port id of the program.
    pub port_id: u32,
    /// Packets that wait for a verdict.
    pub waiting: u32,
    /// Packets dropped since the queue was full.
    pub dropped: u64,
    /// Packets dropped since the program's socket buffer was full.
    pub user_dropped: u64,
}
