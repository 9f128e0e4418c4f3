//! Reading the kernel's memory by the layout of the running kernel.

use core::{
    arch::asm,
    mem::MaybeUninit,
    ptr::{read_volatile, write_volatile},
};

use aya_ebpf::helpers::{bpf_probe_read_kernel_buf, generated::bpf_probe_read_kernel};
use droptrace_common::{ABSENT, IpvsLayout, Layout};

use crate::maps::PER_CPU;

/// Filled by user space before loading; the verifier knows it as constants.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".rodata")]
pub(crate) static LAYOUT: Layout = Layout::ABSENT;

/// One entry of [`LAYOUT`].
macro_rules! layout {
    ($entry:ident) => {
        // SAFETY: a plain number in read-only data; volatile, since user space replaced it.
        unsafe { core::ptr::read_volatile(&raw const $crate::kernel::LAYOUT.$entry) }
    };
}
pub(crate) use layout;

/// One entry of the IPVS layout, which arrives in a map when the module does.
macro_rules! ipvs_layout {
    ($layout:expr, $entry:ident) => {
        $layout.$entry
    };
}
pub(crate) use ipvs_layout;

/// The IPVS layout, once user space has filled it.
#[inline(always)]
pub(crate) fn ipvs() -> Option<&'static IpvsLayout> {
    crate::maps::IPVS_LAYOUT.get(0)
}

/// Whether the kernel has what this entry describes.
#[inline(always)]
pub(crate) const fn has(entry: u32) -> bool {
    entry != ABSENT
}

/// Byte offset of a member entry.
#[inline(always)]
pub(crate) const fn offset(entry: u32) -> u64 {
    (entry & 0xffff) as u64
}

/// Reads a value; zero where the memory cannot be read, which no caller takes for a fact.
#[inline(always)]
pub(crate) fn read<T: Copy + Default>(address: u64) -> T {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the helper checks the address, and fills all of `value`: with zeros where it fails
    // (`bpf_probe_read_kernel_common`, kernel/trace/bpf_trace.c, 5.10 - 7.3), which are a value of the plain types read.
    unsafe {
        bpf_probe_read_kernel(
            value.as_mut_ptr().cast(),
            size_of::<T>() as u32,
            address as *const _,
        );
        value.assume_init()
    }
}

/// Reads bytes; false where the memory cannot be read.
#[inline(always)]
pub(crate) fn read_bytes(address: u64, into: &mut [u8]) -> bool {
    // SAFETY: bpf_probe_read_kernel checks the address.
    unsafe { bpf_probe_read_kernel_buf(address as *const u8, into) }.is_ok()
}

/// Copies what lies in another map. A helper's call is one step for the verifier, whereas the compiler's own `memcpy`
/// is a loop over bytes that it follows on every path.
#[inline(always)]
pub(crate) fn copy<T: Copy>(into: &mut T, from: &T) {
    // SAFETY: `into` is as large as a T, and any bytes that were a T are one again.
    let bytes = unsafe { core::slice::from_raw_parts_mut((&raw mut *into).cast::<u8>(), size_of::<T>()) };
    read_bytes((&raw const *from) as u64, bytes);
}

/// Zeros to copy from; as large as anything that is emptied.
#[unsafe(link_section = ".rodata")]
static ZEROS: [u8; 512] = [0; 512];

/// Empties a value whose zero bytes mean nothing. See [`copy`] for why.
#[inline(always)]
pub(crate) fn empty<T: Copy>(value: &mut T) {
    const { assert!(size_of::<T>() <= 512) };
    // SAFETY: the caller's types are plain numbers, for which zeros are a value.
    let bytes = unsafe { core::slice::from_raw_parts_mut((&raw mut *value).cast::<u8>(), size_of::<T>()) };
    read_bytes(&raw const ZEROS as u64, bytes);
}

/// Adds one, by one instruction: who interrupts this program may do the same.
#[inline(always)]
pub(crate) fn count_up(value: &mut u64) {
    // SAFETY: a valid reference. `AtomicU64` has no addition for this target.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) &raw mut *value, in(reg) 1_u64) };
}

/// The value by way of a map: the verifier forgets which it is, and so need not follow what comes after for each.
#[inline(always)]
pub(crate) fn any<T: Copy>(way: &mut T, value: T) -> T {
    // SAFETY: a valid reference.
    unsafe {
        write_volatile(way, value);
        read_volatile(way)
    }
}

/// What lies in a map, read anew: the verifier forgets what earlier comparisons of it told.
#[inline(always)]
pub(crate) fn anew<T: Copy>(value: &T) -> T {
    // SAFETY: a valid reference.
    unsafe { read_volatile(value) }
}

/// Adds bits to those in a map: the verifier need not follow what comes after with and without them.
#[inline(always)]
pub(crate) fn add(bits: &mut u32, more: u32) {
    // SAFETY: a valid reference.
    unsafe { write_volatile(bits, read_volatile(bits) | more) }
}

/// Reads a member of a fixed type; zero if the kernel does not have it, or there is nothing at the address.
#[inline(always)]
pub(crate) fn member<T: Copy + Default>(base: u64, entry: u32) -> T {
    if has(entry) {
        read(base + offset(entry))
    } else {
        T::default()
    }
}

/// The same where the verifier knows what the address points to, and checks that the member lies within. Where there is nothing,
/// the kernel reads zero.
#[inline(always)]
pub(crate) fn typed<T: Copy + Default>(base: u64, entry: u32) -> T {
    if has(entry) {
        // SAFETY: the kernel handles the fault of a read that the verifier let pass (BPF_PROBE_MEM).
        unsafe { read_volatile((base + offset(entry)) as *const T) }
    } else {
        T::default()
    }
}

/// Reads an unsigned member of whatever size the kernel gives it.
#[inline(always)]
pub(crate) fn number(base: u64, entry: u32) -> Option<u64> {
    if has(entry) {
        Some(number_or_zero(base, entry))
    } else {
        None
    }
}

/// The same, 0 where the kernel does not have it. For layouts that the verifier does not know: an `Option` would let
/// the compiler touch the value that a `None` does not have.
#[inline(always)]
pub(crate) fn number_or_zero(base: u64, entry: u32) -> u64 {
    let (size, mut value) = (entry >> 16, 0_u64);
    if !has(entry) || size > size_of_val(&value) as u32 {
        return 0;
    }
    let address = base + offset(entry);
    // SAFETY: the helper checks the address; the first bytes of `value`, as many as the number has, are its lowest, for
    // BPF has the byte order of the machines that droptrace knows.
    unsafe { bpf_probe_read_kernel((&raw mut value).cast(), size, address as *const _) };
    value
}

/// Reads a bit field of `width` bits.
#[inline(always)]
pub(crate) fn bit_field(base: u64, entry: u32, width: u32) -> u32 {
    if !has(entry) {
        return 0;
    }
    let byte: u8 = read(base + u64::from(entry / 8));
    (u32::from(byte) >> (entry % 8)) & ((1 << width) - 1)
}

/// The network namespace of a socket, as the address of its `struct net`.
#[inline(always)]
pub(crate) fn net_of_sock(sk: u64) -> u64 {
    member(sk, layout!(sock_net))
}

/// The network namespace of a device.
#[inline(always)]
pub(crate) fn net_of_device(device: u64) -> u64 {
    member(device, layout!(dev_net))
}

/// The inode number by which user space knows a `struct net`; 0 for what is none.
#[inline(always)]
pub(crate) fn inode_of_net(net: u64) -> u32 {
    // Namespace inodes are numbered from PROC_DYNAMIC_FIRST 0xf0000000 (fs/proc/generic.c), those of the initial
    // namespaces from just below it in newer kernels; anything else means that `net` was no struct net.
    const LOWEST: u32 = 0xefff_ff00;
    let inode: u32 = member(net, layout!(net_inum));
    if inode >= LOWEST { inode } else { 0 }
}

/// What [`per_cpu_base`] knows of this CPU, and the two addresses from which it found that.
#[repr(C)]
pub(crate) struct PerCpu {
    base: u64,
    map: u64,
    value: u64,
}

/// How far this CPU's per-CPU variables lie behind their nominal addresses (`__per_cpu_offset`); 0 when unknown. No
/// helper tells it, but a per-CPU map does: the kernel keeps the nominal address of its value (`struct bpf_array`
/// `pptrs`, include/linux/bpf.h, 5.10 - 7.3) and gives this program that of this CPU.
#[inline(always)]
fn per_cpu_base() -> u64 {
    let Some(here) = PER_CPU.get_ptr_mut(0) else {
        return 0;
    };
    let nominal_at = layout!(bpf_array_pptrs);
    // SAFETY: this CPU's value. An interrupt meanwhile would write the same. Through memory, since the verifier lets
    // nobody calculate with the pointers themselves.
    unsafe {
        let known = read_volatile(&raw const (*here).base);
        if known != 0 || !has(nominal_at) {
            return known;
        }
        write_volatile(&raw mut (*here).map, &raw const PER_CPU as u64);
        write_volatile(&raw mut (*here).value, here as u64);
        let nominal: u64 = member(read_volatile(&raw const (*here).map), nominal_at);
        let base = read_volatile(&raw const (*here).value).wrapping_sub(nominal);
        write_volatile(&raw mut (*here).base, base);
        base
    }
}

/// Where this CPU has its part of what the kernel allocated per CPU; 0 when unknown.
#[inline(always)]
pub(crate) fn of_this_cpu(allocated: u64) -> u64 {
    let base = per_cpu_base();
    if base == 0 || allocated == 0 {
        0
    } else {
        allocated.wrapping_add(base)
    }
}

/// A counter of such a table (`struct linux_mib`, `struct ipstats_mib`: an array of 64-bit numbers per CPU). Between entry
/// and exit of a function that runs with softirqs off only that function moves it.
#[inline(always)]
pub(crate) fn counter_at(table: u64, index: u32) -> u64 {
    if table == 0 || !has(index) {
        0
    } else {
        read(table + u64::from(index) * 8)
    }
}

/// This CPU's value of a counter of the netns. `table` is the entry of the pointer in `struct net`.
#[inline(always)]
pub(crate) fn counter(net: u64, table: u32, index: u32) -> u64 {
    if has(table) {
        counter_at(of_this_cpu(member(net, table)), index)
    } else {
        0
    }
}

/// A counter of `TcpExt`/`IpExt` (`struct linux_mib`).
macro_rules! tcp_ext {
    ($net:expr, $index:ident) => {
        $crate::kernel::counter(
            $net,
            $crate::kernel::layout!(net_statistics),
            $crate::kernel::layout!($index),
        )
    };
}
pub(crate) use tcp_ext;
