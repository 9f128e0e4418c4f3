//! The capture file: pcapng that any reader opens, with the whole of every record beside the packets.
//!
//! The format is [`crate::capture`]. Every record is written by one call, drops in short
//! as many as come at once, so that a killed process leaves whole blocks; a failed write is taken back, so
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

use droptrace_common::BriefEvent;

use super::{Origin, Sink, words};
use crate::{
    capture,
    diagnose::{Brief, Direction, Drop, RawEvent, Record, cause_by_slug},
};

/// Interfaces that get a description of their own; packets of further ones share the first of their link type.
const INTERFACES_MAX: usize = 1024;
/// Evidence values that the comment of a packet names.
const COMMENT_EVIDENCE: usize = 4;
/// Bytes of drops in short that are written at once, at most.
const GATHERED: usize = 64 << 10;
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
    /// Drops among the blocks that are not written yet.
    gathered: u64,
}

/// A packet and where it goes.
struct Packet<'a> {
    /// Name and whether it is of IP.
    interface: (String, bool),
    bytes: &'a [u8],
    /// Bytes from the network header on.
    length: u32,
    ethertype: u16,
    /// `skb->pkt_type`.
    kind: u16,
    time_ns: i128,
    direction: Option<Direction>,
    comment: String,
}

impl<'a> Packet<'a> {
    fn of_drop(drop: &Drop, event: &'a RawEvent, time_ns: i128) -> Self {
        let header = &event.header;
        Self {
            interface: (
                interface(drop.interface.as_deref(), drop.netns, drop.netns_name.as_deref()),
                is_ip(header.protocol),
            ),
            bytes: &event.packet,
            length: header.len,
            ethertype: header.protocol,
            kind: header.pkt_type,
            time_ns,
            direction: drop.direction,
            comment: comment(drop),
        }
    }

    fn of_brief(brief: &Brief, event: &'a BriefEvent, time_ns: i128) -> Self {
        let title = cause_by_slug(&brief.cause).map_or("", |cause| cause.title);
        Self {
            interface: (
                interface(
                    brief.interface.as_deref(),
                    brief.netns,
                    brief.netns_name.as_deref(),
                ),
                is_ip(event.protocol),
            ),
            bytes: event.bytes(),
            length: event.len,
            ethertype: event.protocol,
            kind: event.pkt_type,
            time_ns,
            direction: None,
            comment: format!("{}: {title}", brief.cause),
        }
    }
}

/// Whether a packet needs no pseudo header.
fn is_ip(ethertype: u16) -> bool {
    ETHERTYPES_IP.contains(&ethertype)
}

/// `INTERFACE@NETNS`, as far as known.
fn interface(name: Option<&str>, netns: Option<u32>, netns_name: Option<&str>) -> String {
    let name = name.unwrap_or("unknown");
    match words::netns(netns, netns_name) {
        Some(netns) => format!("{name}@{netns}"),
        None => name.to_owned(),
    }
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
            gathered: 0,
        };
        sink.commit()?;
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
    fn commit(&mut self) -> io::Result<()> {
        let blocks = std::mem::take(self.blocks.get_mut());
        let drops = std::mem::take(&mut self.gathered);
        let result = self.storage.write_all(&blocks);
        match result {
            Ok(()) => {
                self.written += blocks.len() as u64;
                self.drops += drops;
            }
            // The first error is the one to tell.
            Err(_) => drop(self.storage.cut(self.written)),
        }
        // Keeps the allocation.
        let mut blocks = blocks;
        blocks.clear();
        *self.blocks.get_mut() = blocks;
        result
    }

    fn packet(&mut self, packet: Packet<'_>) -> io::Result<()> {
        let (name, is_ip) = packet.interface;
        let interface_id = self.interface(name, is_ip)?;
        let (data, original_len) = if is_ip {
            (Cow::Borrowed(packet.bytes), packet.length)
        } else {
            let pseudo = cooked(packet.kind, packet.ethertype);
            let length = packet.length + pseudo.len() as u32;
            (Cow::Owned([&pseudo[..], packet.bytes].concat()), length)
        };
        let mut options = vec![EnhancedPacketOption::Common(CommonOption::Comment(
            packet.comment.into(),
        ))];
        options.extend(packet.direction.and_then(|direction| match direction {
            Direction::In => Some(EnhancedPacketOption::Flags(1)),
            Direction::Out => Some(EnhancedPacketOption::Flags(2)),
            Direction::Forward => None,
        }));
        self.blocks
            .write_block(
                &EnhancedPacketBlock {
                    interface_id,
                    timestamp: Duration::from_nanos(u64::try_from(packet.time_ns).unwrap_or_default()),
                    original_len: original_len.max(data.len() as u32),
                    data,
                    options,
                }
                .into_block(),
            )
            .map_err(to_io)?;
        Ok(())
    }

    /// The description of an interface of this name, written where it is new.
    fn interface(&mut self, mut name: String, is_ip: bool) -> io::Result<u32> {
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

    /// Adds the blocks of a record to those at hand.
    fn gather(&mut self, record: &Record, origin: Option<Origin<'_>>) -> io::Result<()> {
        match (record, origin) {
            (Record::Drop(drop), Some(Origin::Event { event, facts })) => {
                self.packet(Packet::of_drop(drop, event, facts.time_ns))?;
            }
            (Record::Brief(brief), Some(Origin::Brief(event, time_ns))) => {
                self.packet(Packet::of_brief(brief, event, time_ns))?;
            }
            _ => {}
        }
        let payload = capture::encode(record, origin.and_then(Origin::event))?;
        let block: CustomBlock<'_, false> = CustomBlock {
            pen: capture::PEN,
            payload: payload.into(),
        };
        self.blocks.write_block(&block.into_block()).map_err(to_io)?;
        Ok(())
    }
}

impl<S: Storage> Sink for Pcapng<S> {
    fn record(&mut self, record: &Record, origin: Option<Origin<'_>>) -> io::Result<()> {
        let limit = match record {
            Record::Summary(_) => u64::MAX,
            _ => self.max_size,
        };
        let before = self.blocks.get_mut().len();
        let gathered = self.gather(record, origin);
        let length = self.blocks.get_mut().len();
        if gathered.is_err() || self.written + length as u64 > limit {
            // What came before is whole, and fits.
            self.blocks.get_mut().truncate(before);
            self.commit()?;
            return gathered.and(Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("the size limit of {limit} bytes is reached"),
            )));
        }
        self.gathered += u64::from(matches!(record, Record::Drop(_) | Record::Brief(_)));
        if matches!(record, Record::Brief(_)) && length < GATHERED {
            return Ok(());
        }
        self.commit()
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.blocks.get_mut().is_empty() {
            return Ok(());
        }
        self.commit()
    }

    fn finish(&mut self) -> io::Result<()> {
        self.flush()?;
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
            Some(Origin::Event {
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
        let event = RawEvent::new(header, &[1, 2, 3], &[]);
        let mut sink = Pcapng::new(disk(1 << 20), 1 << 20).unwrap();
        sink.record(
            &record,
            Some(Origin::Event {
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
    fn drops_in_short_are_gathered_up_to_the_limit() {
        let brief = Record::Brief(Box::new(samples::brief()));
        let event = BriefEvent {
            protocol: 0x0800,
            len: 1500,
            packet_len: 40,
            ..BriefEvent::default()
        };
        let mut sink = Pcapng::new(disk(1 << 20), 8192).unwrap();
        let begin = sink.written();
        let origin = Some(Origin::Brief(&event, 7));
        sink.record(&brief, origin).unwrap();
        assert_eq!((sink.written(), sink.drops()), (begin, 0));
        sink.flush().unwrap();
        assert_eq!(sink.drops(), 1);
        let one = sink.written() - begin;
        let error = loop {
            if let Err(error) = sink.record(&brief, origin) {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(sink.written() <= 8192 && sink.written() + one > 8192);
        let mut reader = PcapNgReader::new(&sink.storage.bytes[..]).unwrap();
        let mut packets = 0;
        while let Some(block) = reader.next_block() {
            if let Block::EnhancedPacket(packet) = block.unwrap().0 {
                packets += 1;
                assert_eq!((packet.data.len(), packet.original_len), (40, 1500));
                assert_eq!(
                    packet.options[0],
                    EnhancedPacketOption::Common(CommonOption::Comment(
                        "accept-queue-full: accept queue of the listener is full".into()
                    ))
                );
            }
        }
        assert_eq!(packets, sink.drops());
        assert!(packets > 5);
    }

    #[test]
    fn interfaces_are_described_once_and_never_without_bound() {
        let (_, event, facts) = samples::diagnosed();
        let mut sink = Pcapng::new(disk(1 << 24), 1 << 24).unwrap();
        for number in 0..INTERFACES_MAX + 10 {
            let mut drop = samples::accept_queue();
            drop.interface = Some(format!("veth{number}"));
            for _ in 0..2 {
                sink.packet(Packet::of_drop(&drop, &event, facts.time_ns))
                    .unwrap();
            }
        }
        assert_eq!(sink.interfaces.len(), INTERFACES_MAX + 1);
    }
}
