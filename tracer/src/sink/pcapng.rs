//! The capture file: pcapng that any reader opens, with the whole of every record beside the packets.
//!
//! The format is [`crate::capture`]. Every record is written by one call, so
//! that a killed process leaves whole blocks; a failed write is taken back, so
//! that a full disk leaves a readable file.

use std::{
    borrow::Cow,
    collections::HashMap,
    fs::File,
    io::{self, Write},
    time::Duration,
};

use pcap_file::{
    DataLink, Endianness,
    pcapng::{
        PcapNgBlock, PcapNgWriteError, PcapNgWriter,
        blocks::{
            custom::CustomBlock,
            enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption},
            interface_description::{
                InterfaceDescriptionBlock, InterfaceDescriptionOption, InterfaceTsResolution,
            },
            opt_common::CommonOption,
            section_header::{SectionHeaderBlock, SectionHeaderOption},
        },
    },
};

use super::{Origin, Sink, words};
use crate::{
    capture,
    diagnose::{Direction, Drop, Record},
};

/// Interfaces that get a description of their own; packets of further ones share the first of their link type.
const INTERFACES_MAX: usize = 1024;
/// Evidence values that the comment of a packet names.
const COMMENT_EVIDENCE: usize = 4;
/// EtherTypes of IP, whose packets need no pseudo header.
const ETHERTYPES_IP: [u16; 2] = [0x0800, 0x86dd];
/// `ARPHRD_VOID`: nothing is known of the link layer.
const ARPHRD_VOID: u16 = 0xffff;

/// Where a capture is written to.
pub trait Storage: Write + Send {
    /// Takes back what a failed write left beyond `length` bytes.
    fn cut(&mut self, length: u64) -> io::Result<()>;
}

impl Storage for File {
    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }
}

impl Storage for io::Stdout {
    fn cut(&mut self, _: u64) -> io::Result<()> {
        // What a pipe took cannot be taken back; its reader stops at the whole blocks.
        Ok(())
    }
}

impl<S: Storage + ?Sized> Storage for Box<S> {
    fn cut(&mut self, length: u64) -> io::Result<()> {
        (**self).cut(length)
    }
}

/// Writes a capture file.
pub struct Pcapng<S> {
    storage: S,
    /// Blocks of the record at hand.
    blocks: PcapNgWriter<Vec<u8>>,
    interfaces: HashMap<(String, bool), u32>,
    written: u64,
    max_size: u64,
    drops: u64,
}

impl<S: Storage> Pcapng<S> {
    /// Begins the file. At `max_size` bytes it takes no more records but the summary.
    pub fn new(storage: S, max_size: u64) -> io::Result<Self> {
        let section = SectionHeaderBlock {
            endianness: Endianness::Little,
            options: vec![SectionHeaderOption::UserApplication(
                concat!("droptrace ", env!("CARGO_PKG_VERSION")).into(),
            )],
            ..SectionHeaderBlock::default()
        };
        let mut sink = Self {
            storage,
            blocks: PcapNgWriter::with_section_header(Vec::new(), section).map_err(to_io)?,
            interfaces: HashMap::new(),
            written: 0,
            max_size,
            drops: 0,
        };
        sink.commit(u64::MAX)?;
        Ok(sink)
    }

    /// Bytes in the file.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Drops in the file.
    pub fn drops(&self) -> u64 {
        self.drops
    }

    /// Writes the gathered blocks at once, or nothing of them.
    fn commit(&mut self, limit: u64) -> io::Result<()> {
        let blocks = std::mem::take(self.blocks.get_mut());
        let end = self.written + blocks.len() as u64;
        if end > limit {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("the size limit of {limit} bytes is reached"),
            ));
        }
        let result = self.storage.write_all(&blocks);
        match result {
            Ok(()) => self.written = end,
            // The first error is the one to tell.
            Err(_) => drop(self.storage.cut(self.written)),
        }
        // Keeps the allocation.
        let mut blocks = blocks;
        blocks.clear();
        *self.blocks.get_mut() = blocks;
        result
    }

    fn packet(&mut self, drop: &Drop, origin: Origin<'_>) -> io::Result<()> {
        let header = &origin.event.header;
        let is_ip = ETHERTYPES_IP.contains(&header.protocol);
        let interface_id = self.interface(drop, is_ip)?;
        let bytes = &origin.event.packet;
        let (data, original_len) = if is_ip {
            (Cow::Borrowed(&bytes[..]), header.len)
        } else {
            let pseudo = cooked(header.pkt_type as u16, header.protocol);
            let length = header.len + pseudo.len() as u32;
            (Cow::Owned([&pseudo[..], bytes].concat()), length)
        };
        let mut options = vec![EnhancedPacketOption::Common(CommonOption::Comment(
            comment(drop).into(),
        ))];
        options.extend(drop.direction.and_then(|direction| match direction {
            Direction::In => Some(EnhancedPacketOption::Flags(1)),
            Direction::Out => Some(EnhancedPacketOption::Flags(2)),
            Direction::Forward => None,
        }));
        self.blocks
            .write_block(
                &EnhancedPacketBlock {
                    interface_id,
                    timestamp: Duration::from_nanos(u64::try_from(origin.facts.time_ns).unwrap_or_default()),
                    original_len: original_len.max(data.len() as u32),
                    data,
                    options,
                }
                .into_block(),
            )
            .map_err(to_io)?;
        Ok(())
    }

    /// The description of the drop's interface, written where it is new.
    fn interface(&mut self, drop: &Drop, is_ip: bool) -> io::Result<u32> {
        let netns = words::netns(drop.netns, drop.netns_name.as_deref());
        let mut name = drop.interface.clone().unwrap_or_else(|| "unknown".to_owned());
        if let Some(netns) = netns {
            name = format!("{name}@{netns}");
        }
        if let Some(id) = self.interfaces.get(&(name.clone(), is_ip)) {
            return Ok(*id);
        }
        let is_new_name = self.interfaces.len() < INTERFACES_MAX;
        if !is_new_name {
            "others".clone_into(&mut name);
            if let Some(id) = self.interfaces.get(&(name.clone(), is_ip)) {
                return Ok(*id);
            }
        }
        let link_type = if is_ip { DataLink::RAW } else { DataLink::LINUX_SLL };
        let mut block = InterfaceDescriptionBlock::new(link_type, 0);
        block.options = vec![
            InterfaceDescriptionOption::IfName(name.clone().into()),
            InterfaceDescriptionOption::IfTsResol(InterfaceTsResolution::NANO),
        ];
        self.blocks.write_block(&block.into_block()).map_err(to_io)?;
        let id = self.interfaces.len() as u32;
        self.interfaces.insert((name, is_ip), id);
        Ok(id)
    }
}

impl<S: Storage> Sink for Pcapng<S> {
    fn record(&mut self, record: &Record, origin: Option<Origin<'_>>) -> io::Result<()> {
        let limit = match record {
            Record::Summary(_) => u64::MAX,
            _ => self.max_size,
        };
        if let (Record::Drop(drop), Some(origin)) = (record, origin) {
            self.packet(drop, origin)?;
        }
        let payload = capture::encode(record, origin.map(|origin| (origin.event, origin.facts)))?;
        let block: CustomBlock<'_, false> = CustomBlock {
            pen: capture::PEN,
            payload: payload.into(),
        };
        self.blocks.write_block(&block.into_block()).map_err(to_io)?;
        self.commit(limit)?;
        self.drops += u64::from(matches!(record, Record::Drop(_)));
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.storage.flush()
    }
}

/// The pseudo header of LINKTYPE_LINUX_SLL, for packets that are not IP: packet type, kind of device and link-layer
/// address (both unknown), EtherType.
fn cooked(packet_type: u16, ethertype: u16) -> [u8; 16] {
    let mut header = [0; 16];
    header[0..2].copy_from_slice(&packet_type.to_be_bytes());
    header[2..4].copy_from_slice(&ARPHRD_VOID.to_be_bytes());
    header[14..16].copy_from_slice(&ethertype.to_be_bytes());
    header
}

/// The label in a line, as other readers show it.
fn comment(drop: &Drop) -> String {
    let evidence: Vec<_> = words::known(&drop.evidence)
        .take(COMMENT_EVIDENCE)
        .map(|(name, value)| format!("{name}={}", words::value(value)))
        .collect();
    let mut comment = format!("{}: {}", drop.cause, drop.title);
    if !evidence.is_empty() {
        comment.push_str(" — ");
        comment.push_str(&evidence.join(" "));
    }
    comment
}

fn to_io(error: PcapNgWriteError) -> io::Error {
    match error {
        PcapNgWriteError::Io(error) => error,
        error => io::Error::new(io::ErrorKind::InvalidData, error),
    }
}

#[cfg(test)]
mod tests {
    use pcap_file::pcapng::{Block, PcapNgReader};

    use super::*;
    use crate::sink::samples;

    /// A disk with so much space.
    struct Disk {
        bytes: Vec<u8>,
        space: usize,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let room = self.space - self.bytes.len();
            if room == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let taken = room.min(bytes.len());
            self.bytes.extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Storage for Disk {
        fn cut(&mut self, length: u64) -> io::Result<()> {
            self.bytes.truncate(length as usize);
            Ok(())
        }
    }

    fn disk(space: usize) -> Disk {
        Disk {
            bytes: Vec::new(),
            space,
        }
    }

    fn write_one(sink: &mut Pcapng<Disk>) -> io::Result<()> {
        let (record, event, facts) = samples::diagnosed();
        sink.record(
            &record,
            Some(Origin {
                event: &event,
                facts: &facts,
            }),
        )
    }

    #[test]
    fn other_readers_see_the_packet_and_its_label() {
        let mut sink = Pcapng::new(disk(1 << 20), 1 << 20).unwrap();
        write_one(&mut sink).unwrap();
        assert_eq!(sink.written(), sink.storage.bytes.len() as u64);
        let mut reader = PcapNgReader::new(&sink.storage.bytes[..]).unwrap();
        let mut packets = 0;
        while let Some(block) = reader.next_block() {
            if let Block::EnhancedPacket(packet) = block.unwrap().0 {
                packets += 1;
                assert_eq!(packet.data, &samples::SYN[..]);
                assert_eq!(packet.original_len, 1500);
                assert_eq!(packet.timestamp.as_nanos(), 1_767_323_045_123_456_789);
                let EnhancedPacketOption::Common(CommonOption::Comment(comment)) = &packet.options[0] else {
                    panic!("no comment: {:?}", packet.options);
                };
                assert!(
                    comment
                        .starts_with("accept-queue-full: accept queue of the listener is full — stage=syn"),
                    "{comment}"
                );
            }
        }
        assert_eq!(packets, 1);
        assert_eq!(
            reader.interfaces()[0].options[0],
            InterfaceDescriptionOption::IfName("eth0@web".into())
        );
        assert_eq!(reader.interfaces()[0].linktype, DataLink::RAW);
    }

    #[test]
    fn a_packet_that_is_not_ip_gets_a_pseudo_header() {
        let (record, event, facts) = samples::diagnosed();
        let mut header = event.header;
        header.protocol = 0x88cc;
        header.len = 40;
        let event = crate::diagnose::RawEvent::new(header, &[1, 2, 3], &[]);
        let mut sink = Pcapng::new(disk(1 << 20), 1 << 20).unwrap();
        sink.record(
            &record,
            Some(Origin {
                event: &event,
                facts: &facts,
            }),
        )
        .unwrap();
        let mut reader = PcapNgReader::new(&sink.storage.bytes[..]).unwrap();
        let mut seen = false;
        while let Some(block) = reader.next_block() {
            if let Block::EnhancedPacket(packet) = block.unwrap().0 {
                seen = true;
                assert_eq!(packet.data.len(), 16 + 3);
                assert_eq!(packet.data[14..16], [0x88, 0xcc]);
                assert_eq!(packet.original_len, 56);
            }
        }
        assert!(seen);
        assert_eq!(reader.interfaces()[0].linktype, DataLink::LINUX_SLL);
    }

    #[test]
    fn a_full_disk_leaves_whole_blocks() {
        let mut whole = Pcapng::new(disk(1 << 20), 1 << 20).unwrap();
        let begin = whole.written() as usize;
        write_one(&mut whole).unwrap();
        let one = whole.written() as usize;
        for space in begin..one {
            let mut sink = Pcapng::new(disk(space), 1 << 20).unwrap();
            let error = write_one(&mut sink).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(sink.storage.bytes.len(), begin, "{space}");
        }
    }

    #[test]
    fn the_size_limit_keeps_room_for_the_summary() {
        let mut sink = Pcapng::new(disk(1 << 20), 4096).unwrap();
        let error = loop {
            if let Err(error) = write_one(&mut sink) {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(sink.written() <= 4096);
        let before = sink.written();
        sink.record(&Record::Summary(samples::summary()), None).unwrap();
        assert!(sink.written() > before);
    }

    #[test]
    fn interfaces_are_described_once_and_never_without_bound() {
        let (_, event, facts) = samples::diagnosed();
        let mut sink = Pcapng::new(disk(1 << 24), 1 << 24).unwrap();
        for number in 0..INTERFACES_MAX + 10 {
            let mut drop = samples::accept_queue();
            drop.interface = Some(format!("veth{number}"));
            for _ in 0..2 {
                sink.packet(
                    &drop,
                    Origin {
                        event: &event,
                        facts: &facts,
                    },
                )
                .unwrap();
            }
        }
        assert_eq!(sink.interfaces.len(), INTERFACES_MAX + 1);
    }
}
