//! Putting an event together, counting it, and sending it.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::{
    EbpfContext,
    bindings::BPF_NOEXIST,
    helpers::{
        bpf_get_current_pid_tgid, bpf_get_smp_processor_id, bpf_get_stack, bpf_ktime_get_ns,
        bpf_probe_read_kernel_buf,
    },
    maps::lpm_trie::Key,
};
use droptrace_common::{
    AddressKey, CountKey, CountValue, EventHeader, FIELDS_MAX, Field, FieldId, Like, PACKET_MAX, Sampling,
    ServiceKey, Site, Tally, bits,
};

use crate::{
    brief,
    hint::{HINT_FIELDS, Hint},
    kernel,
    maps::{BUFFERS, COUNTS, EVENTS, QUIET, TALLIES_MAP},
    memo,
    packet::{self, Extent, Tuple},
    scope,
    skb::SkBuff,
};

/// Places of an event's fields: what the free tells of the packet, then frames of the kernel stack, then what a hook
/// left as a hint. Constant places, since the verifier follows each possible one.
pub(crate) const FREE_FIELDS: usize = 6;
/// Frames of the kernel stack that an event can carry.
pub(crate) const FRAMES: usize = 12;
/// Where the fields of a hint start.
pub(crate) const HINT_AT: usize = FREE_FIELDS + FRAMES;
/// Buffers of a CPU: for programs that interrupt each other (process, softirq, hardirq, NMI), and, where the kernel lets
/// a program be preempted (7.x), for those that run meanwhile.
pub(crate) const BUFFERS_MAX: u32 = 4;

/// Filled by user space before loading.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".rodata")]
pub(crate) static SAMPLING: Sampling = Sampling::DEFAULT;

/// Nanoseconds in which a count key's bucket earns one event.
#[inline(always)]
fn token_ns() -> u64 {
    // SAFETY: a plain number in read-only data; volatile, since user space replaced it.
    unsafe { read_volatile(&raw const SAMPLING.token_ns) }
}

/// Nanoseconds in which an empty bucket is full.
#[inline(always)]
fn bucket_ns() -> u64 {
    // SAFETY: as above.
    token_ns() * unsafe { read_volatile(&raw const SAMPLING.burst) }
}

/// Where an event is put together. The first three members are what goes to the ring.
#[repr(C)]
pub(crate) struct EventBuffer {
    pub(crate) header: EventHeader,
    pub(crate) packet: [u8; PACKET_MAX],
    pub(crate) fields: [Field; FIELDS_MAX],
    pub(crate) hint: Hint,
    pub(crate) frames: [u64; FRAMES],
    pub(crate) work: Work,
    /// Taken by a program.
    taken: u32,
    pad: u32,
}

/// What the stack has no room for.
#[repr(C)]
pub(crate) struct Work {
    /// Of the packet in the buffer.
    pub(crate) tuple: Tuple,
    /// The packet's `sk_buff`.
    pub(crate) skb: SkBuff,
    /// What its free is like.
    pub(crate) like: Like,
    /// What [`kernel::any`] takes a pointer of the kernel by.
    pub(crate) way: u64,
    /// Whether a hook told of the packet before its free: 1 or 0.
    pub(crate) hinted: u32,
    /// Whether it is netfilter's verdict that frees it: 1 or 0.
    pub(crate) verdict: u32,
    /// What conntrack and IPVS made of it, in bits.
    pub(crate) made: u32,
    /// Whether it is on its way through a bridge that asks the hooks of IP: 1 or 0.
    pub(crate) bridged: u32,
    /// Of the IPVS entry that it belongs to.
    pub(crate) entry: Tuple,
    pub(crate) key: CountKey,
    pub(crate) fresh: CountValue,
    pub(crate) address: Key<AddressKey>,
    pub(crate) service: ServiceKey,
}

/// Appends fields to an event or hint; what does not fit is left out.
pub(crate) struct Fields<'a> {
    fields: &'a mut [Field],
    len: usize,
}

impl<'a> Fields<'a> {
    /// Fields of an event, from the first place on.
    #[inline(always)]
    pub(crate) fn new(fields: &'a mut [Field; FIELDS_MAX]) -> Self {
        Self { fields, len: 0 }
    }

    /// Fields of a hint.
    #[inline(always)]
    pub(crate) fn new_hint(fields: &'a mut [Field; HINT_FIELDS]) -> Self {
        Self { fields, len: 0 }
    }

    /// How many there are.
    #[inline(always)]
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Appends a value.
    #[inline(always)]
    pub(crate) fn push(&mut self, id: FieldId, value: u64) {
        if let Some(field) = self.fields.get_mut(self.len) {
            *field = Field {
                id: id as u32,
                pad: 0,
                value,
            };
            self.len += 1;
        }
    }

    /// Takes over the fields that another hook has read; nothing was appended before.
    #[inline(always)]
    pub(crate) fn take(&mut self, read: &[Field; HINT_FIELDS]) {
        if let Some(places) = self.fields.first_chunk_mut::<HINT_FIELDS>() {
            kernel::copy(places, read);
            self.len = HINT_FIELDS;
        }
    }

    /// Appends a value if there is one.
    #[inline(always)]
    pub(crate) fn push_some(&mut self, id: FieldId, value: Option<u64>) {
        if let Some(value) = value {
            self.push(id, value);
        }
    }

    /// Appends an address as its two halves.
    #[inline(always)]
    pub(crate) fn push_address(&mut self, hi: FieldId, lo: FieldId, address: &droptrace_common::Address) {
        let (high, low) = packet::halves(address);
        self.push(hi, high);
        self.push(lo, low);
    }
}

/// Takes a free buffer of this CPU; [`release`] gives it back. None where that many programs are at work here.
#[inline(always)]
pub(crate) fn acquire() -> Option<&'static mut EventBuffer> {
    for index in 0..BUFFERS_MAX {
        let buffer = BUFFERS.get_ptr_mut(index)?;
        // SAFETY: a buffer of this CPU, which nobody else uses once it is taken; volatile, for those who look from an
        // interrupt.
        unsafe {
            if read_volatile(&raw const (*buffer).taken) == 0 {
                write_volatile(&raw mut (*buffer).taken, 1);
                return Some(&mut *buffer);
            }
        }
    }
    tally(Tally::BuffersTaken);
    None
}

/// Gives the buffer back.
#[inline(always)]
pub(crate) fn release(buffer: &mut EventBuffer) {
    // SAFETY: a valid reference; volatile, so that it comes last.
    unsafe { write_volatile(&raw mut buffer.taken, 0) };
}

/// Adds one to a tally.
#[inline(always)]
pub(crate) fn tally(which: Tally) {
    if let Some(value) = TALLIES_MAP.get_ptr_mut(which as u32) {
        // SAFETY: this CPU's value.
        unsafe { *value += 1 };
    }
}

/// Reads the packet's headers into the buffer and fills what the header says of the packet, and
/// its tuple. Gives the bits that the packet alone tells.
#[inline(always)]
pub(crate) fn take_packet(buffer: &mut EventBuffer, skb: u64) -> u32 {
    buffer.work.skb.read(skb);
    let found = take_headers(buffer);
    buffer.header.segments = buffer.work.skb.segments();
    found
}

/// The same of the packet whose `sk_buff` is read, without the number of its segments, which only an event needs.
#[inline(always)]
pub(crate) fn take_headers(buffer: &mut EventBuffer) -> u32 {
    take_bytes(buffer);
    parse(buffer)
}

/// Reads the first bytes of the packet whose `sk_buff` is read into the buffer, and fills what the header says of the packet.
#[inline(always)]
fn take_bytes(buffer: &mut EventBuffer) {
    let EventBuffer {
        header, packet, work, ..
    } = buffer;
    let skb = &work.skb;
    let ethertype = skb.ethertype();
    let Extent { network, linear, len } = skb.extent();
    let mut packet_len = if linear > PACKET_MAX as u32 {
        PACKET_MAX as u32
    } else {
        linear
    };
    if packet_len > len {
        packet_len = len;
    }
    // Always the whole area: shared info follows the linear part, so the memory is there.
    // SAFETY: bpf_probe_read_kernel checks the address.
    if unsafe { bpf_probe_read_kernel_buf(network as *const u8, packet) }.is_err() {
        packet_len = 0;
    }
    header.skb = skb.address();
    header.len = len;
    header.packet_len = packet_len as u16;
    header.protocol = ethertype;
    header.pkt_type = skb.packet_type() as u16;
    header.iif = skb.iif;
}

/// Fills the tuple from these bytes, and gives the bits that the packet alone tells.
#[inline(always)]
fn parse(buffer: &mut EventBuffer) -> u32 {
    let EventBuffer {
        header, packet, work, ..
    } = buffer;
    let mut found = packet::parse(
        &mut work.tuple,
        packet,
        u32::from(header.packet_len),
        header.protocol,
    );
    if header.pkt_type == 3 {
        found |= bits::OTHER_HOST;
    }
    kernel::any(&mut header.bits, found)
}

/// What an event is, beside its packet.
#[derive(Clone, Copy)]
pub(crate) struct Drop {
    /// Number of a [`Site`].
    pub(crate) site: u16,
    pub(crate) netns: u32,
    pub(crate) ifindex: u32,
    pub(crate) reason: u32,
    pub(crate) location: u64,
    pub(crate) bits: u32,
}

/// What becomes of an event that was counted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counted {
    /// It is to be sent.
    Wanted,
    /// Its key's bucket is empty; it travels in short where that is asked for.
    LeftOut,
    /// Nobody wants to see one of its key.
    Quiet,
    /// There was no room for its key.
    Lost,
}

/// Counts the drop. If its event is to be sent, the buffer's header is complete then; `settle` adds to the value what was
/// counted elsewhere.
#[inline(always)]
pub(crate) fn count(
    buffer: &mut EventBuffer,
    drop: &Drop,
    key_location: u64,
    settle: impl FnOnce(&Work, &mut CountValue),
) -> Counted {
    set_key(&mut buffer.work.key, drop, key_location);
    // SAFETY: no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    let Some(value) = counted(&mut buffer.work, now) else {
        tally(Tally::KeysLost);
        return Counted::Lost;
    };
    value.packets += 1;
    let earned = value.tokens + now.wrapping_sub(value.filled_ns);
    value.filled_ns = now;
    let tokens = if earned > bucket_ns() { bucket_ns() } else { earned };
    if tokens < token_ns() {
        value.tokens = tokens;
        return left_out(buffer, drop, value, now);
    }
    value.tokens = tokens;
    // SAFETY: the value is not read.
    if unsafe { QUIET.get(&buffer.work.key) }.is_some() {
        return Counted::Quiet;
    }
    value.tokens = tokens - token_ns();
    settle(&buffer.work, value);
    let header = &mut buffer.header;
    header.skipped = value.skipped as u32;
    header.briefly = u16::from(brief::wanted());
    header.ktime_ns = now;
    header.location = drop.location;
    header.netns = drop.netns;
    header.reason = drop.reason;
    header.bits = drop.bits;
    header.ifindex = drop.ifindex;
    header.site = drop.site;
    header.pid = (bpf_get_current_pid_tgid() >> 32) as u32;
    // SAFETY: no precondition.
    header.cpu = unsafe { bpf_get_smp_processor_id() } as u16;
    Counted::Wanted
}

/// What becomes of a drop without a full event: it travels in short, where that is asked for.
#[inline(always)]
fn left_out(buffer: &EventBuffer, drop: &Drop, value: &mut CountValue, now: u64) -> Counted {
    if !brief::wanted() {
        value.sampled += 1;
        value.skipped += 1;
        return Counted::LeftOut;
    }
    // SAFETY: the value is not read.
    if unsafe { QUIET.get(&buffer.work.key) }.is_some() {
        return Counted::Quiet;
    }
    value.skipped += 1;
    if !brief::of_event(buffer, &buffer.work.key, drop.ifindex, drop.location != 0, now) {
        value.ring_full += 1;
    }
    Counted::LeftOut
}

#[inline(always)]
fn set_key(key: &mut CountKey, drop: &Drop, location: u64) {
    key.location = location;
    key.netns = drop.netns;
    key.reason = drop.reason;
    key.bits = drop.bits;
    key.site = drop.site;
    key.pad = 0;
}

/// This CPU's value of the key, made on first use with a full bucket.
#[inline(always)]
fn counted(work: &mut Work, now: u64) -> Option<&'static mut CountValue> {
    if let Some(value) = COUNTS.get_ptr_mut(&work.key) {
        // SAFETY: this CPU's value.
        return Some(unsafe { &mut *value });
    }
    kernel::empty(&mut work.fresh);
    work.fresh.tokens = bucket_ns();
    work.fresh.filled_ns = now;
    // Another CPU may have made the key meanwhile: then its value for this CPU is zero, and the bucket fills.
    let _ = COUNTS.insert(&work.key, &work.fresh, u64::from(BPF_NOEXIST));
    // SAFETY: this CPU's value.
    COUNTS.get_ptr_mut(&work.key).map(|value| unsafe { &mut *value })
}

/// Sends the event, whose header `count` completed.
#[inline(always)]
pub(crate) fn send(buffer: &mut EventBuffer, fields: usize) {
    let fields = if fields > FIELDS_MAX { FIELDS_MAX } else { fields };
    buffer.header.fields = fields as u16;
    let size = size_of::<EventHeader>() + PACKET_MAX + fields * size_of::<Field>();
    let sent = output(buffer, size);
    if let Some(value) = COUNTS.get_ptr_mut(&buffer.work.key) {
        // SAFETY: this CPU's value.
        let value = unsafe { &mut *value };
        if sent {
            value.sent += 1;
            value.skipped = 0;
        } else {
            value.ring_full += 1;
            value.skipped += 1;
        }
    }
}

#[inline(always)]
fn output(buffer: &EventBuffer, size: usize) -> bool {
    // SAFETY: the buffer holds at least `size` bytes: fields are bounded by FIELDS_MAX.
    let bytes = unsafe { core::slice::from_raw_parts((&raw const *buffer).cast::<u8>(), size) };
    EVENTS.output::<[u8]>(bytes, 0).is_ok()
}

/// Counts and sends a drop that the free does not show, from the hook that sees it.
#[inline(always)]
pub(crate) fn direct(skb: u64, site: u16, netns: u32, extra: u32, fill: impl FnOnce(&mut Fields<'_>)) {
    let Some(buffer) = acquire() else { return };
    buffer.work.skb.read(skb);
    take_bytes(buffer);
    memo::take_told(buffer, site, netns, extra);
    if memo::counts_told(buffer) {
        release(buffer);
        return;
    }
    let found = parse(buffer) | extra;
    buffer.header.segments = buffer.work.skb.segments();
    let counted = finish_settled(buffer, site, netns, found, memo::settle, fill);
    if matches!(counted, Some(Counted::LeftOut | Counted::Quiet)) {
        memo::note(&buffer.work, buffer.header.iif, counted == Some(Counted::Quiet));
    }
    release(buffer);
}

/// Counts and sends what the buffer's packet area and tuple already hold.
#[inline(always)]
pub(crate) fn finish(
    buffer: &mut EventBuffer,
    site: u16,
    netns: u32,
    found: u32,
    fill: impl FnOnce(&mut Fields<'_>),
) {
    finish_settled(buffer, site, netns, found, |_, _| {}, fill);
}

/// The same; `settle` is that of [`count`]. None: it is out of scope.
#[inline(always)]
fn finish_settled(
    buffer: &mut EventBuffer,
    site: u16,
    netns: u32,
    found: u32,
    settle: impl FnOnce(&Work, &mut CountValue),
    fill: impl FnOnce(&mut Fields<'_>),
) -> Option<Counted> {
    if !scope::admits(&buffer.work.tuple, netns) {
        return None;
    }
    buffer.header.bits = found;
    packet::memberships(&mut buffer.header.bits, &mut buffer.work, netns);
    let drop = Drop {
        site,
        netns,
        ifindex: buffer.header.iif,
        reason: 0,
        location: 0,
        bits: buffer.header.bits,
    };
    let counted = count(buffer, &drop, 0, settle);
    if counted == Counted::Wanted {
        let fields = {
            let mut fields = Fields::new(&mut buffer.fields);
            fill(&mut fields);
            fields.len()
        };
        send(buffer, fields);
    }
    Some(counted)
}

/// Counts something that is no drop of a packet, without an event.
#[inline(always)]
pub(crate) fn count_only(site: Site, netns: u32) {
    let Some(buffer) = acquire() else { return };
    let drop = Drop {
        site: site as u16,
        netns,
        ifindex: 0,
        reason: 0,
        location: 0,
        bits: 0,
    };
    set_key(&mut buffer.work.key, &drop, 0);
    match counted(&mut buffer.work, 0) {
        Some(value) => value.packets += 1,
        None => tally(Tally::KeysLost),
    }
    release(buffer);
}

/// Reads the kernel's stack into the places for frames.
#[inline(always)]
pub(crate) fn take_frames(ctx: &impl EbpfContext, buffer: &mut EventBuffer) {
    kernel::empty(&mut buffer.frames);
    // SAFETY: the area has this size.
    unsafe {
        bpf_get_stack(
            ctx.as_ptr(),
            buffer.frames.as_mut_ptr().cast(),
            size_of::<[u64; FRAMES]>() as u32,
            0,
        )
    };
    // A stack that is shorter ends with zeros.
    for index in 0..FRAMES {
        buffer.fields[FREE_FIELDS + index] = Field {
            id: FieldId::Frame as u32,
            pad: 0,
            value: buffer.frames[index],
        };
    }
}

/// Takes over the fields of the buffer's hint, to their places.
#[inline(always)]
pub(crate) fn take_hint(buffer: &mut EventBuffer) {
    if let Some(places) = buffer.fields[HINT_AT..].first_chunk_mut::<HINT_FIELDS>() {
        kernel::copy(places, &buffer.hint.fields);
    }
}

/// Leaves the places for frames empty.
#[inline(always)]
pub(crate) fn no_frames(buffer: &mut EventBuffer) {
    for index in 0..FRAMES {
        buffer.fields[FREE_FIELDS + index].id = 0;
    }
}
