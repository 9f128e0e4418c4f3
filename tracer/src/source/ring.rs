//! The ring buffer: full events as the programs send them.

use std::{io, os::fd::AsRawFd, time::Duration};

use anyhow::Context as _;
use aya::{
    Ebpf,
    maps::{MapData, RingBuf},
};
use bytes::Bytes;
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::{Instant, sleep_until},
};

use super::take_map;
use crate::diagnose::RawEvent;

/// How long events gather once the ring was emptied.
const REST: Duration = Duration::from_millis(20);

/// The reading end of the ring.
pub struct Ring {
    map: AsyncFd<RingBuf<MapData>>,
    /// Until when events may gather.
    rests_until: Instant,
    /// Records that were no event; a sign of a fault in droptrace itself.
    malformed: u64,
}

impl Ring {
    /// Takes the map `EVENTS` out of the loaded object.
    ///
    /// # Errors
    /// The object has no such map, or no runtime is running.
    pub fn open(ebpf: &mut Ebpf) -> anyhow::Result<Self> {
        let ring: RingBuf<MapData> = take_map(ebpf, "EVENTS")?;
        debug_assert!(ring.as_raw_fd() >= 0);
        // SAFETY: the ring owns its descriptor for as long as it lives, and AsyncFd owns the ring.
        let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) }
            .context("cannot wait for the ring buffer")?;
        Ok(Self {
            map: ring,
            rests_until: Instant::now(),
            malformed: 0,
        })
    }

    /// Waits until there are events, then takes up to `limit` of them. The first after a rest come at once; those that follow
    /// gather meanwhile, and the kernel wakes nobody for them.
    ///
    /// # Errors
    /// Waiting failed.
    pub async fn read(&mut self, limit: usize) -> io::Result<Vec<RawEvent>> {
        sleep_until(self.rests_until).await;
        let mut ready = self.map.readable_mut().await?;
        let events = drain(ready.get_inner_mut(), limit, &mut self.malformed);
        if events.len() < limit {
            ready.clear_ready();
            self.rests_until = Instant::now() + REST;
        }
        Ok(events)
    }

    /// Takes what is there now, up to `limit`.
    pub fn take(&mut self, limit: usize) -> Vec<RawEvent> {
        drain(self.map.get_mut(), limit, &mut self.malformed)
    }

    /// Records that were no event so far: drops that are counted, but not shown one by one.
    pub fn malformed(&self) -> u64 {
        self.malformed
    }
}

fn drain(ring: &mut RingBuf<MapData>, limit: usize, malformed: &mut u64) -> Vec<RawEvent> {
    let mut events = Vec::new();
    while events.len() < limit
        && let Some(item) = ring.next()
    {
        match RawEvent::decode(Bytes::copy_from_slice(&item)) {
            Ok(event) => events.push(event),
            Err(_) => *malformed += 1,
        }
    }
    events
}
