//! The ring buffers: full events, and brief records, as the programs send them.

use std::{io, os::fd::AsRawFd, time::Duration};

use anyhow::Context as _;
use aya::{
    Ebpf,
    maps::{MapData, RingBuf},
};
use bytes::Bytes;
use droptrace_common::BriefEvent;
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::{Instant, sleep_until},
};

use super::take_map;
use crate::diagnose::RawEvent;

/// How long events gather once the ring was emptied.
const REST: Duration = Duration::from_millis(20);

/// The reading end of a ring.
pub struct Ring<T> {
    map: AsyncFd<RingBuf<MapData>>,
    decode: fn(&[u8]) -> Option<T>,
    /// Until when events may gather.
    rests_until: Instant,
    /// Records that were not of this kind; a sign of a fault in droptrace itself.
    malformed: u64,
}

impl Ring<RawEvent> {
    /// That of full events.
    ///
    /// # Errors
    /// The object has no such map, or no runtime is running.
    pub fn of_events(ebpf: &mut Ebpf) -> anyhow::Result<Self> {
        Self::open(ebpf, "EVENTS", |wire| {
            RawEvent::decode(Bytes::copy_from_slice(wire)).ok()
        })
    }
}

impl Ring<BriefEvent> {
    /// That of brief records.
    ///
    /// # Errors
    /// As [`Ring::of_events`].
    pub fn of_briefs(ebpf: &mut Ebpf) -> anyhow::Result<Self> {
        Self::open(ebpf, "BRIEFS", BriefEvent::decode)
    }
}

impl<T> Ring<T> {
    fn open(ebpf: &mut Ebpf, map: &str, decode: fn(&[u8]) -> Option<T>) -> anyhow::Result<Self> {
        let ring: RingBuf<MapData> = take_map(ebpf, map)?;
        debug_assert!(ring.as_raw_fd() >= 0);
        // SAFETY: the ring owns its descriptor for as long as it lives, and AsyncFd owns the ring.
        let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) }
            .context("cannot wait for the ring buffer")?;
        Ok(Self {
            map: ring,
            decode,
            rests_until: Instant::now(),
            malformed: 0,
        })
    }

    /// Waits until there are events, then takes up to `limit` of them. The first after a rest come at once; those that follow
    /// gather meanwhile, and the kernel wakes nobody for them.
    ///
    /// # Errors
    /// Waiting failed.
    pub async fn read(&mut self, limit: usize) -> io::Result<Vec<T>> {
        sleep_until(self.rests_until).await;
        let mut ready = self.map.readable_mut().await?;
        let events = drain(ready.get_inner_mut(), limit, self.decode, &mut self.malformed);
        if events.len() < limit {
            ready.clear_ready();
            self.rests_until = Instant::now() + REST;
        }
        Ok(events)
    }

    /// Takes what is there now, up to `limit`.
    pub fn take(&mut self, limit: usize) -> Vec<T> {
        drain(self.map.get_mut(), limit, self.decode, &mut self.malformed)
    }

    /// Records that were not of this kind so far: drops that are counted, but not shown one by one.
    pub fn malformed(&self) -> u64 {
        self.malformed
    }
}

fn drain<T>(
    ring: &mut RingBuf<MapData>,
    limit: usize,
    decode: fn(&[u8]) -> Option<T>,
    malformed: &mut u64,
) -> Vec<T> {
    let mut events = Vec::new();
    while events.len() < limit
        && let Some(item) = ring.next()
    {
        match decode(&item) {
            Some(event) => events.push(event),
            None => *malformed += 1,
        }
    }
    events
}
