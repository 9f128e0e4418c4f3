//! From a brief record to its line. In a flood there are many: a line is written over the one before, without asking for
//! memory.

use std::{collections::BTreeMap, net::IpAddr};

use droptrace_common::{BriefEvent, Site, bits};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Cause, Drop, Evidence, FoundBy, Packet, Record, Split, Verdict, catalogue::rfc3339, cause_by_slug, record,
};

/// Why a drop in short has no evidence of its own.
const IN_SHORT: &str =
    "this drop came in short: drops of its kind that came in full have evidence and remedy";
const SECOND: i128 = 1_000_000_000;
/// Where the digits of the nanoseconds begin in a time.
const FRACTION: usize = "2026-01-02T03:04:05.".len();

/// A drop in short, with `--every-drop`: which packet, where and why. How we know, and what to do, is told by the line of a
/// drop of the same kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Brief {
    /// Wall clock time of the drop, RFC 3339 with nanoseconds, UTC.
    pub time: String,
    /// The same moment on the kernel's monotonic clock, in nanoseconds.
    pub ktime_ns: u64,
    /// What became of the packet.
    pub verdict: Verdict,
    /// Slug of the root cause: that of the drop named by `like`, else what the kernel's count of it says.
    pub cause: String,
    /// Not a loss: hidden unless asked for.
    pub benign: bool,
    /// How it came to be known.
    pub found_by: FoundBy,
    /// How many drops this line stands for: 1.
    pub packets: u64,
    /// Inode number of the network namespace; null when the kernel does not say.
    pub netns: Option<u32>,
    /// Name of the network namespace, where a drop of the same kind told it.
    pub netns_name: Option<String>,
    /// Pod that has the namespace, where a drop of the same kind told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The same of the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Interface that the packet came by or was to leave by, where a drop told its name before.
    pub interface: Option<String>,
    /// Source address.
    pub src: Option<IpAddr>,
    /// Destination address.
    pub dst: Option<IpAddr>,
    /// Source port.
    pub sport: Option<u16>,
    /// Destination port.
    pub dport: Option<u16>,
    /// Protocol: `tcp`, `udp`, `icmp`, `icmpv6`, or its number, or the EtherType as `ethertype 0x88cc`.
    pub protocol: Option<String>,
    /// TCP flags, such as `S`, `SA`, `.` (ACK only), `FA`, `R`.
    pub flags: Option<String>,
    /// Bytes from the network header on.
    pub length: u32,
    /// `exact`: every drop that the kernel counts as this one has this cause. `sampled`: only full events tell this cause from
    /// its sisters, and the label is that of the drop named by `like`.
    pub split: Split,
    /// `ktime_ns` of the last drop with evidence and remedy that the kernel counted as the same; null before the first.
    pub like: Option<u64>,
}

/// What is known of a brief record by what it was counted as.
#[derive(Clone, Copy, Debug)]
pub struct Label<'a> {
    /// The cause.
    pub cause: &'static Cause,
    /// What became of the packet.
    pub verdict: Verdict,
    /// Whether the count alone tells the cause.
    pub split: Split,
    /// See [`Brief::like`].
    pub like: Option<u64>,
    /// Name of the network namespace.
    pub netns_name: Option<&'a str>,
    /// Pod that has it.
    pub pod: Option<&'a str>,
    /// Container that has it.
    pub container: Option<&'a str>,
    /// Name of the device.
    pub interface: Option<&'a str>,
}

/// Whether a brief record is a drop that has a line: not the later end of a packet that has one already, nor a clash that
/// the kernel resolved, nor from a site of a later version.
pub fn has_line(event: &BriefEvent) -> bool {
    event.key.bits & bits::DIED_AS == 0
        && Site::from_number(event.key.site).is_some_and(|site| site != Site::ConntrackClashResolved)
}

/// A line that is written over and over.
#[derive(Debug)]
pub struct BriefLine {
    record: Record,
    /// The second of the time that stands there.
    second: Option<i128>,
}

impl Default for BriefLine {
    fn default() -> Self {
        Self {
            record: Record::Brief(Box::new(Brief {
                time: String::new(),
                ktime_ns: 0,
                verdict: Verdict::Dropped,
                cause: String::new(),
                benign: false,
                found_by: FoundBy::KfreeSkb,
                packets: 1,
                netns: None,
                netns_name: None,
                pod: None,
                container: None,
                interface: None,
                src: None,
                dst: None,
                sport: None,
                dport: None,
                protocol: None,
                flags: None,
                length: 0,
                split: Split::Exact,
                like: None,
            })),
            second: None,
        }
    }
}

impl BriefLine {
    /// Writes the line of a brief record; `time_ns` is its wall clock time in nanoseconds since 1970 UTC.
    pub fn write(&mut self, event: &BriefEvent, label: &Label<'_>, time_ns: i128) -> &Record {
        if let Record::Brief(line) = &mut self.record {
            write_time(&mut line.time, &mut self.second, time_ns);
            line.tell(event, label);
        }
        &self.record
    }

    /// What was written last.
    pub fn last(&self) -> Option<&Brief> {
        match &self.record {
            Record::Brief(line) => Some(line),
            _ => None,
        }
    }
}

impl Brief {
    /// The drop that it is in short; what is told in full only is missing.
    pub fn row(&self) -> Drop {
        let title = cause_by_slug(&self.cause).map_or(self.cause.as_str(), |cause| cause.title);
        Drop {
            time: self.time.clone(),
            ktime_ns: self.ktime_ns,
            verdict: self.verdict,
            cause: self.cause.clone(),
            title: title.to_owned(),
            benign: self.benign,
            found_by: self.found_by,
            packets: self.packets,
            netns: self.netns,
            netns_name: self.netns_name.clone(),
            pod: self.pod.clone(),
            container: self.container.clone(),
            src_name: None,
            dst_name: None,
            interface: self.interface.clone(),
            direction: None,
            src: self.src,
            dst: self.dst,
            sport: self.sport,
            dport: self.dport,
            protocol: self.protocol.clone(),
            flags: self.flags.clone(),
            length: self.length,
            owner: None,
            counter: None,
            evidence: Evidence::new(),
            remedy: Vec::new(),
            died_as: None,
            missing: BTreeMap::from([("evidence".to_owned(), IN_SHORT.to_owned())]),
        }
    }

    /// Everything but the time.
    fn tell(&mut self, event: &BriefEvent, label: &Label<'_>) {
        let packet = Packet::parse(event.bytes());
        self.ktime_ns = event.ktime_ns;
        self.verdict = label.verdict;
        replace(&mut self.cause, label.cause.slug);
        self.benign = label.cause.benign;
        self.found_by = if event.freed == 0 {
            FoundBy::Hook
        } else {
            FoundBy::KfreeSkb
        };
        self.netns = (event.key.netns != 0).then_some(event.key.netns);
        replace_some(&mut self.netns_name, label.netns_name);
        replace_some(&mut self.pod, label.pod);
        replace_some(&mut self.container, label.container);
        replace_some(&mut self.interface, label.interface);
        self.src = packet.src;
        self.dst = packet.dst;
        self.sport = packet.sport;
        self.dport = packet.dport;
        self.protocol = match packet.protocol {
            Some(_) => packet.write_protocol_name(self.protocol.take().unwrap_or_default()),
            None => record::ethertype(event.protocol),
        };
        self.flags = packet
            .tcp
            .map(|tcp| tcp.write_flags(self.flags.take().unwrap_or_default()));
        self.length = event.len;
        self.split = label.split;
        self.like = label.like;
    }
}

/// Writes a time, of which mostly only the nanoseconds differ from the one before.
fn write_time(time: &mut String, second: &mut Option<i128>, time_ns: i128) {
    let now = time_ns.div_euclid(SECOND);
    if *second != Some(now) || time.len() <= FRACTION {
        *time = rfc3339(time_ns);
        *second = Some(now);
        return;
    }
    time.truncate(FRACTION);
    let mut rest = time_ns.rem_euclid(SECOND) as u32;
    let mut place = SECOND as u32 / 10;
    while place > 0 {
        time.push(char::from(b'0' + (rest / place) as u8));
        rest %= place;
        place /= 10;
    }
    time.push('Z');
}

fn replace(text: &mut String, by: &str) {
    text.clear();
    text.push_str(by);
}

fn replace_some(text: &mut Option<String>, by: Option<&str>) {
    match (text.as_mut(), by) {
        (Some(text), Some(by)) => replace(text, by),
        _ => *text = by.map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use droptrace_common::{CountKey, MEMO_WORDS};

    use super::*;
    use crate::diagnose::{RawEvent, cause_by_slug, diagnose};

    const UDP: [u8; 28] = [
        0x45, 0, 0, 28, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, // IPv4
        0x9c, 0x40, 0, 9, 0, 8, 0, 0, // UDP from port 40000 to 9
    ];
    const SYN: [u8; 40] = crate::sink::samples::SYN;

    fn event(bytes: &[u8]) -> BriefEvent {
        let mut packet = [0; MEMO_WORDS];
        for (word, chunk) in packet.iter_mut().zip(bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            *word = u64::from_ne_bytes(padded);
        }
        BriefEvent {
            ktime_ns: 5,
            key: CountKey {
                netns: 4_026_531_840,
                ..CountKey::default()
            },
            len: bytes.len() as u32,
            packet_len: bytes.len() as u16,
            protocol: 0x0800,
            freed: 1,
            packet,
            ..BriefEvent::default()
        }
    }

    fn label<'a>() -> Label<'a> {
        Label {
            cause: cause_by_slug("netfilter-rule").unwrap(),
            verdict: Verdict::Dropped,
            split: Split::Sampled,
            like: Some(3),
            netns_name: Some("web"),
            pod: Some("default/web"),
            container: None,
            interface: None,
        }
    }

    #[test]
    fn a_line_tells_the_packet_as_a_drop_does() {
        let mut line = BriefLine::default();
        for (bytes, time_ns) in [
            (&UDP[..], 1_767_323_045_123_456_789),
            (&SYN[..], 1_767_323_045_000_000_001),
            (&UDP[..], 1_767_323_046_999_999_999),
        ] {
            let event = event(bytes);
            line.write(&event, &label(), time_ns);
            let header = droptrace_common::EventHeader {
                protocol: 0x0800,
                len: event.len,
                netns: 4_026_531_840,
                location: 1,
                ..Default::default()
            };
            let facts = crate::diagnose::Facts {
                time_ns,
                ..Default::default()
            };
            let drop = diagnose(&RawEvent::new(header, bytes, &[]), &facts);
            let brief = line.last().unwrap();
            assert_eq!(brief.time, drop.time);
            assert_eq!((brief.src, brief.dst), (drop.src, drop.dst));
            assert_eq!((brief.sport, brief.dport), (drop.sport, drop.dport));
            assert_eq!((&brief.protocol, &brief.flags), (&drop.protocol, &drop.flags));
            assert_eq!((brief.netns, brief.length), (drop.netns, drop.length));
            assert_eq!(brief.found_by, drop.found_by);
            assert_eq!((brief.cause.as_str(), brief.packets), ("netfilter-rule", 1));
            assert_eq!((brief.netns_name.as_deref(), brief.like), (Some("web"), Some(3)));
        }
    }

    #[test]
    fn a_packet_without_headers_leaves_nothing_of_the_one_before() {
        let mut line = BriefLine::default();
        line.write(&event(&SYN), &label(), 1);
        let nameless = Label {
            netns_name: None,
            ..label()
        };
        let foreign = BriefEvent {
            protocol: 0x88cc,
            packet_len: 0,
            freed: 0,
            ..event(&[])
        };
        line.write(&foreign, &nameless, 2);
        let brief = line.last().unwrap();
        assert_eq!((brief.src, brief.sport, &brief.flags), (None, None, &None));
        assert_eq!(brief.protocol.as_deref(), Some("ethertype 0x88cc"));
        assert_eq!((&brief.netns_name, brief.found_by), (&None, FoundBy::Hook));
    }

    #[test]
    fn what_is_no_drop_of_its_own_has_no_line() {
        let mut later = event(&SYN);
        assert!(has_line(&later));
        later.key.bits |= bits::DIED_AS;
        assert!(!has_line(&later));
        for site in [Site::ConntrackClashResolved as u16, u16::MAX] {
            let mut other = event(&SYN);
            other.key.site = site;
            assert!(!has_line(&other));
        }
    }
}
