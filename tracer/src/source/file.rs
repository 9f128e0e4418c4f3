//! A capture file as a source of records.
//!
//! Reads block by block, so that a large file needs little memory, and shows
//! all that is whole before it tells what is wrong.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use pcap_file::pcapng::{
    Block, PcapNgReadError, PcapNgReader,
    blocks::{CUSTOM_BLOCK_NON_COPIABLE, section_header::SectionHeaderOption},
};

use crate::{
    capture::{self, Entry, PayloadError},
    diagnose::{Name, Record},
};

/// Largest block that is read, in bytes; `droptrace` itself writes no larger one.
const BLOCK_MAX: usize = 16 << 20;
/// Type of the block that begins a pcapng file, the same in both byte orders.
const SECTION_HEADER: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];

/// Why a file gives no (more) records.
#[derive(Debug)]
pub enum FileError {
    /// The system refused.
    Io(io::Error),
    /// It has no byte at all.
    Empty,
    /// It is not pcapng.
    NotPcapng,
    /// It is pcapng, without a single record of droptrace.
    Foreign,
    /// Begun by droptrace, but ended before the first record.
    NoRecord,
    /// It ends within a block; what came before is whole.
    Cut {
        /// Bytes up to the end of the last whole block.
        whole: u64,
    },
    /// Written by a later version of the format.
    Later(u16),
    /// A block contradicts its format.
    Broken {
        /// Where the block begins, in bytes.
        at: u64,
        /// What is wrong.
        what: String,
    },
}

impl FileError {
    /// What the user can do.
    ///
    /// `seen`: some record was whole, and was shown.
    pub fn next_step(&self, seen: bool) -> &'static str {
        match self {
            Self::Cut { .. } | Self::Broken { .. } if !seen => {
                "nothing of it can be shown; copy the file again, or run `droptrace capture -o FILE` again"
            }
            Self::Io(error) if error.kind() == io::ErrorKind::NotFound => {
                "check the path; `droptrace capture -o FILE` writes such a file"
            }
            Self::Io(_) => "check that it is a file that you may read",
            Self::Empty | Self::NoRecord => {
                "the capture ended before it began; run `droptrace capture -o FILE` again"
            }
            Self::NotPcapng => "give a file that `droptrace capture -o FILE` wrote",
            Self::Foreign => {
                "give a file that `droptrace capture -o FILE` wrote; this one opens in Wireshark or tcpdump"
            }
            Self::Cut { .. } => "what is whole was shown; copy the file again if its source is longer",
            Self::Later(_) => "read it with the version of droptrace that wrote it, or a later one",
            Self::Broken { .. } => "what came before was shown; copy the file again",
        }
    }
}

impl std::fmt::Display for FileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(error) => write!(f, "{error}"),
            Self::Empty => write!(f, "the file is empty"),
            Self::NotPcapng => write!(f, "not a pcapng file"),
            Self::Foreign => write!(f, "a pcapng file that holds no record of droptrace"),
            Self::NoRecord => write!(f, "the file holds no record"),
            Self::Cut { whole } => write!(f, "the file is cut off within a block, after {whole} whole bytes"),
            Self::Later(version) => write!(
                f,
                "written in format {version} by a later version; this one reads up to format {}",
                capture::VERSION
            ),
            Self::Broken { at, what } => write!(f, "the block at byte {at} is broken: {what}"),
        }
    }
}

impl std::error::Error for FileError {}

/// Gives the records of a capture file, then at most one error.
pub struct Records<R: Read> {
    reader: PcapNgReader<io::Chain<io::Cursor<Vec<u8>>, R>>,
    /// Some record was whole.
    seen: bool,
    /// Nothing more will come.
    ended: bool,
    /// Whether a payload is to be decoded; others are passed over.
    wanted: fn(&[u8]) -> bool,
}

/// Opens a capture file; `-` is standard input.
pub fn open(path: &Path) -> Result<Records<Box<dyn Read>>, FileError> {
    if path == Path::new("-") {
        return Records::new(Box::new(io::stdin()));
    }
    let file = File::open(path).map_err(FileError::Io)?;
    if file.metadata().map_err(FileError::Io)?.is_dir() {
        return Err(FileError::Io(io::ErrorKind::IsADirectory.into()));
    }
    Records::new(Box::new(file))
}

impl<R: Read> Records<R> {
    /// From bytes. Errors of the first block are told here.
    pub fn new(mut reader: R) -> Result<Self, FileError> {
        // The first bytes are looked at alone: an empty file and one of another kind have errors of their own.
        let mut head = Vec::new();
        reader
            .by_ref()
            .take(SECTION_HEADER.len() as u64)
            .read_to_end(&mut head)
            .map_err(FileError::Io)?;
        if head.is_empty() {
            return Err(FileError::Empty);
        }
        if !SECTION_HEADER.starts_with(&head) {
            return Err(FileError::NotPcapng);
        }
        let reader =
            PcapNgReader::with_capacity(io::Cursor::new(head).chain(reader), BLOCK_MAX).map_err(|error| {
                match error {
                    PcapNgReadError::Io(error) => from_io(error, 0),
                    _ => FileError::NotPcapng,
                }
            })?;
        Ok(Self {
            reader,
            seen: false,
            ended: false,
            wanted: |_| true,
        })
    }

    /// Whether droptrace began the file.
    fn is_own(&self) -> bool {
        self.reader.section().options.iter().any(|option| {
            matches!(option, SectionHeaderOption::UserApplication(name) if name.starts_with("droptrace "))
        })
    }

    /// The next record, or the end with or without an error.
    fn advance(&mut self) -> Result<Option<Entry>, FileError> {
        loop {
            let at = self.reader.bytes_parsed();
            let broken = |error: &dyn std::error::Error| FileError::Broken {
                at,
                what: error.to_string(),
            };
            let Some(next) = self.reader.next_raw_block() else {
                return match (self.seen, self.is_own()) {
                    (true, _) => Ok(None),
                    (false, true) => Err(FileError::NoRecord),
                    (false, false) => Err(FileError::Foreign),
                };
            };
            let (block, state) = match next {
                Ok(next) => next,
                Err(PcapNgReadError::Io(error)) => return Err(from_io(error, at)),
                Err(error) => return Err(broken(&error)),
            };
            if block.type_ != CUSTOM_BLOCK_NON_COPIABLE {
                continue;
            }
            let Block::CustomNonCopiable(custom) =
                block.try_into_block(state).map_err(|error| broken(&error))?
            else {
                continue;
            };
            if custom.pen != capture::PEN {
                continue;
            }
            if !(self.wanted)(&custom.payload) {
                self.seen = true;
                continue;
            }
            match capture::decode(&custom.payload) {
                Ok(entry) => {
                    self.seen = true;
                    return Ok(Some(entry));
                }
                Err(PayloadError::Foreign) => {}
                Err(PayloadError::Later(version)) => return Err(FileError::Later(version)),
                Err(PayloadError::Broken(what)) => return Err(FileError::Broken { at, what }),
            }
        }
    }
}

/// The names that a capture file tells later than drops.
///
/// # Errors
/// The file cannot be read, or is none of droptrace's. What is broken in it ends the list.
pub fn names(path: &Path) -> Result<Vec<Name>, FileError> {
    let mut records = open(path)?;
    records.wanted = |payload| capture::holds_name(payload);
    let named = records
        .map_while(Result::ok)
        .filter_map(|entry| match entry.record {
            Record::Name(name) => Some(name),
            _ => None,
        });
    Ok(named.collect())
}

impl<R: Read> Iterator for Records<R> {
    type Item = Result<Entry, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.advance().transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

fn from_io(error: io::Error, whole: u64) -> FileError {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        FileError::Cut { whole }
    } else {
        FileError::Io(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        diagnose::{Facts, RawEvent},
        sink::{Origin, Pcapng, Sink, samples},
    };

    /// The records of a short capture, its bytes, and the offsets at which its records end.
    fn capture() -> (Vec<Record>, Vec<u8>, Vec<usize>) {
        let (diagnosed, event, facts) = samples::diagnosed();
        let records = vec![
            Record::Coverage(samples::coverage()),
            diagnosed,
            Record::Name(samples::name()),
            Record::Summary(samples::summary()),
        ];
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut sink = Pcapng::new(file.reopen().unwrap(), u64::MAX).unwrap();
        let mut ends = vec![sink.written() as usize];
        for (index, record) in records.iter().enumerate() {
            let origin = (index == 1).then_some(Origin::Event {
                event: &event,
                facts: &facts,
            });
            sink.record(record, origin).unwrap();
            ends.push(sink.written() as usize);
        }
        sink.finish().unwrap();
        (records, std::fs::read(file.path()).unwrap(), ends)
    }

    fn read(bytes: &[u8]) -> (Vec<Entry>, Option<FileError>) {
        let mut entries = Vec::new();
        let records = match Records::new(bytes) {
            Ok(records) => records,
            Err(error) => return (entries, Some(error)),
        };
        for next in records {
            match next {
                Ok(entry) => entries.push(entry),
                Err(error) => return (entries, Some(error)),
            }
        }
        (entries, None)
    }

    #[test]
    fn what_was_written_is_read() {
        let (records, bytes, _) = capture();
        let (entries, error) = read(&bytes);
        assert!(error.is_none(), "{error:?}");
        let read: Vec<_> = entries.iter().map(|entry| entry.record.clone()).collect();
        assert_eq!(read, records);
        let origin: Option<&(RawEvent, Facts)> = entries[1].origin.as_ref();
        let (event, facts) = origin.expect("the diagnosed drop has its origin");
        assert_eq!(
            Record::Drop(Box::new(crate::diagnose::diagnose(event, facts))),
            records[1],
            "the same event and facts give the same label"
        );
    }

    #[test]
    fn names_are_found_without_the_rest() {
        let (_, bytes, ends) = capture();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        assert_eq!(names(file.path()).unwrap(), [samples::name()]);
        std::fs::write(file.path(), &bytes[..ends[2]]).unwrap();
        assert_eq!(names(file.path()).unwrap(), []);
    }

    #[test]
    fn a_cut_at_every_byte_shows_what_is_whole() {
        let (records, bytes, ends) = capture();
        for length in 0..bytes.len() {
            let (entries, error) = read(&bytes[..length]);
            let whole = ends[1..].iter().filter(|end| **end <= length).count();
            assert_eq!(entries.len(), whole, "cut at {length}");
            assert!(
                entries
                    .iter()
                    .zip(&records)
                    .all(|(entry, record)| entry.record == *record)
            );
            match error {
                Some(FileError::Empty) => assert_eq!(length, 0),
                Some(FileError::NoRecord) => assert!(length < ends[1]),
                Some(FileError::Cut { whole }) => assert!(whole <= length as u64),
                None => assert!(whole > 0, "cut at {length}"),
                other => panic!("cut at {length}: {other:?}"),
            }
        }
    }

    /// A generator of bytes that is the same in every run (xorshift, Marsaglia 2003).
    fn random(seed: u64) -> impl Iterator<Item = u8> {
        let mut state = seed;
        std::iter::repeat_with(move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
    }

    #[test]
    fn random_bytes_end_with_an_error() {
        for seed in 1..2000 {
            let bytes: Vec<u8> = random(seed).take(seed as usize % 300 + 1).collect();
            assert!(read(&bytes).1.is_some(), "seed {seed}");
            let mut bytes = bytes;
            bytes.splice(
                0..0,
                [SECTION_HEADER, [28, 0, 0, 0], [0x4d, 0x3c, 0x2b, 0x1a]].concat(),
            );
            let _ = read(&bytes);
        }
    }

    #[test]
    fn a_changed_byte_never_panics() {
        let (_, bytes, _) = capture();
        let mut noise = random(7);
        for at in (0..bytes.len()).step_by(3) {
            let mut changed = bytes.clone();
            changed[at] ^= noise.next().unwrap().max(1);
            let _ = read(&changed);
        }
    }

    #[test]
    fn a_later_version_is_named() {
        let (_, mut bytes, _) = capture();
        let at = bytes
            .windows(capture::MAGIC.len())
            .position(|window| window == capture::MAGIC)
            .unwrap();
        bytes[at + capture::MAGIC.len()] = 9;
        let (entries, error) = read(&bytes);
        assert!(entries.is_empty());
        assert!(matches!(error, Some(FileError::Later(9))), "{error:?}");
    }

    #[test]
    fn other_captures_are_told_apart() {
        use pcap_file::pcapng::PcapNgWriter;
        let foreign = PcapNgWriter::new(Vec::new()).unwrap().into_inner();
        assert!(matches!(read(&foreign).1, Some(FileError::Foreign)));
        let classic = [0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0];
        assert!(matches!(read(&classic).1, Some(FileError::NotPcapng)));
        assert!(matches!(read(&[]).1, Some(FileError::Empty)));
        assert!(matches!(
            open(Path::new("/nonexistent/drops.pcapng")).err(),
            Some(FileError::Io(_))
        ));
        assert!(matches!(open(Path::new("/")).err(), Some(FileError::Io(_))));
    }
}
