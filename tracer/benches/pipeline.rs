//! What user space does with one event, and with one brief record, from the bytes of the ring to JSON and to pcapng: time by criterion,
//! and allocations.
//!
//! Every event goes through what a live run calls, in its order: decoding, names, cause, facts (asked of this host, as any user may),
//! label, sink. What is not in it: the ring itself, and the loop that waits for it.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    hint::black_box,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput};
use droptrace::{
    context::{Context, NoSets, Pods, ScopeRequest, monotonic_ns, offset_ns, resolve_pid},
    diagnose::{self, BriefLine, Facts, RawEvent, Record, Signature, classify},
    plan::{Reasons, Symbols},
    sink::{Json, Origin, Pcapng, Sink, Storage},
    source::{Labels, Ledger},
};
use droptrace_common::{BriefEvent, CountKey, EventHeader, MEMO_WORDS, Site};
use tokio::runtime::Runtime;

/// Events that are put through at once.
const EVENTS: u64 = 1_000;

/// Counts what is allocated, whoever asks.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is passed on to the system's allocator as it comes.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of this very function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Takes bytes and forgets them.
struct Nowhere;

impl io::Write for Nowhere {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        black_box(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Storage for Nowhere {
    fn cut(&mut self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

/// What stands between the ring and a sink.
struct Pipeline {
    runtime: Runtime,
    context: Context,
    /// One event as the ring holds it: a datagram to a port that no socket has, of this netns.
    wire: Vec<u8>,
}

impl Pipeline {
    fn new() -> Self {
        let context = Context::start(&ScopeRequest::default(), Pods::default(), Box::new(NoSets))
            .expect("namespaces can be looked at");
        let netns = resolve_pid(std::process::id()).expect("this process has a netns");
        let header = EventHeader {
            ktime_ns: monotonic_ns(),
            netns: netns.inode,
            // NO_SOCKET on 6.1 and 6.12; the name is given as the kernel's BTF would.
            reason: 3,
            ifindex: 1,
            iif: 1,
            len: 44,
            site: Site::Free as u16,
            protocol: 0x0800,
            segments: 1,
            ..EventHeader::default()
        };
        let mut packet = vec![
            0x45, 0, 0, 44, 0, 1, 0, 0, 64, 17, 0, 0, 127, 0, 0, 1, 127, 0, 0, 1, // IPv4
            0x9c, 0x40, 0, 9, 0, 24, 0, 0, // UDP from port 40000 to 9
        ];
        packet.extend([7; 16]);
        Self {
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime"),
            context,
            wire: RawEvent::new(header, &packet, &[]).wire().to_vec(),
        }
    }

    /// Puts events through.
    fn run(&self, events: u64, sink: &mut dyn Sink) {
        self.runtime.block_on(async {
            for _ in 0..events {
                let event = RawEvent::decode(Bytes::copy_from_slice(&self.wire)).expect("an event");
                let known = Facts {
                    reason: Some("NO_SOCKET".to_owned()),
                    location: Some("__udp4_lib_rcv".to_owned()),
                    ..Facts::default()
                };
                let cause = classify(&Signature::of_event(&event, &known));
                let facts = self.context.facts(&event, known, cause.needs).await;
                let drop = diagnose::diagnose(&event, &facts);
                assert_eq!(drop.cause, "no-socket");
                let origin = Origin::Event {
                    event: &event,
                    facts: &facts,
                };
                sink.record(&Record::Drop(Box::new(drop)), Some(origin))
                    .expect("a sink that takes all");
            }
        });
    }
}

/// What stands between the ring of brief records and a sink.
struct InShort {
    labels: Labels,
    ledger: Ledger,
    line: BriefLine,
    /// One record as the ring holds it: a datagram that netfilter dropped on 5.10.
    wire: Vec<u8>,
}

impl InShort {
    fn new() -> Self {
        const PLACE: u64 = 0xffff_ffff_8100_0000;
        let symbols = format!("{PLACE:x} T nf_hook_slow\n{:x} T next\n", PLACE + 4096);
        let mut packet = [0; MEMO_WORDS];
        packet[..4].copy_from_slice(&[
            u64::from_ne_bytes([0x45, 0, 0, 44, 0, 1, 0, 0]),
            u64::from_ne_bytes([64, 17, 0, 0, 10, 0, 0, 1]),
            u64::from_ne_bytes([10, 0, 0, 2, 0x9c, 0x40, 0, 9]),
            u64::from_ne_bytes([0, 24, 0, 0, 7, 7, 7, 7]),
        ]);
        let record = BriefEvent {
            ktime_ns: monotonic_ns(),
            key: CountKey {
                location: PLACE + 16,
                netns: 4_026_531_840,
                ..CountKey::default()
            },
            ifindex: 1,
            len: 44,
            packet_len: 44,
            protocol: 0x0800,
            freed: 1,
            packet,
            ..BriefEvent::default()
        };
        // SAFETY: the record is plain numbers without padding.
        let wire =
            unsafe { std::slice::from_raw_parts((&raw const record).cast::<u8>(), size_of::<BriefEvent>()) };
        Self {
            labels: Labels::default(),
            ledger: Ledger::new(
                Arc::new(Symbols::parse(symbols.as_bytes(), "")),
                Arc::new(Reasons::default()),
            ),
            line: BriefLine::default(),
            wire: wire.to_vec(),
        }
    }

    /// Puts records through.
    fn run(&mut self, records: u64, sink: &mut dyn Sink) {
        let offset = offset_ns();
        for number in 0..records {
            let mut record = BriefEvent::decode(black_box(&self.wire)).expect("a record");
            record.ktime_ns += number;
            assert!(diagnose::has_line(&record));
            let label = self.labels.of(&record, &mut self.ledger);
            assert_eq!(label.cause.slug, "netfilter-rule");
            let time_ns = i128::from(record.ktime_ns) + offset;
            let line = self.line.write(&record, &label, time_ns);
            sink.record(line, Some(Origin::Brief(&record, time_ns)))
                .expect("a sink that takes all");
        }
        sink.flush().expect("a sink that takes all");
    }
}

fn sinks() -> [(&'static str, Box<dyn Sink>); 2] {
    let pcapng = Pcapng::new(Nowhere, u64::MAX).expect("a capture");
    [
        ("json", Box::new(Json::new(Nowhere))),
        ("pcapng", Box::new(pcapng)),
    ]
}

fn main() {
    let pipeline = Pipeline::new();
    for (name, mut sink) in sinks() {
        // The first ones fill caches and buffers.
        pipeline.run(EVENTS, &mut *sink);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        pipeline.run(EVENTS, &mut *sink);
        let each = (ALLOCATIONS.load(Ordering::Relaxed) - before) as f64 / EVENTS as f64;
        println!("allocations per event to {name}: {each:.1}");
    }
    let mut in_short = InShort::new();
    for (name, mut sink) in sinks() {
        in_short.run(EVENTS, &mut *sink);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        in_short.run(EVENTS, &mut *sink);
        let each = (ALLOCATIONS.load(Ordering::Relaxed) - before) as f64 / EVENTS as f64;
        println!("allocations per brief record to {name}: {each:.3}");
    }
    let mut criterion = Criterion::default()
        .measurement_time(Duration::from_secs(5))
        .configure_from_args();
    let mut group = criterion.benchmark_group("pipeline");
    group.throughput(Throughput::Elements(EVENTS));
    for (name, mut sink) in sinks() {
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            bencher.iter(|| pipeline.run(EVENTS, &mut *sink));
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("in short");
    group.throughput(Throughput::Elements(EVENTS));
    for (name, mut sink) in sinks() {
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            bencher.iter(|| in_short.run(EVENTS, &mut *sink));
        });
    }
    group.finish();
    criterion.final_summary();
}
