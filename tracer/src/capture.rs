//! The capture format: what a custom block of a capture file holds.
//!
//! Described for readers of other programs in `docs/capture-format.md`. The writer
//! is [`crate::sink::Pcapng`], the reader [`crate::source::file`].

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::diagnose::{Facts, RawEvent, Record};

/// Private enterprise number of the custom blocks: the one kept for examples (RFC 5612), since droptrace has none of
/// its own. [`MAGIC`] tells its blocks from those of others.
pub const PEN: u32 = 32473;
/// First bytes of every payload.
pub const MAGIC: [u8; 8] = *b"droptrc\x1a";
/// Version of the format that this program reads, and writes where an earlier one does not do. Keys that are only added do
/// not raise it.
pub const VERSION: u16 = 3;

/// The version that brought a record: readers of an earlier one do not know it.
const fn version_of(record: &Record) -> u16 {
    match record {
        Record::Name(_) => 2,
        Record::Brief(_) => 3,
        Record::Coverage(_) | Record::Drop(_) | Record::Counts(_) | Record::Summary(_) => 1,
    }
}
/// Bytes before the JSON: magic, version, zero, length.
const PREFIX: usize = MAGIC.len() + 2 + 2 + 4;

/// One record of a capture file.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// As the run gave it out.
    pub record: Record,
    /// What a drop was made from; `None` for other records, and for an event that this version cannot decode.
    pub origin: Option<(RawEvent, Facts)>,
}

/// Why a payload is not an [`Entry`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PayloadError {
    /// Another program's custom block.
    Foreign,
    /// Written by a later version of the format.
    Later(u16),
    /// Its bytes contradict the format.
    Broken(String),
}

/// The JSON beside a drop's own keys.
#[derive(Deserialize, Serialize)]
struct Recorded<F> {
    event: String,
    facts: F,
}

#[derive(Serialize)]
struct WithOrigin<'a> {
    #[serde(flatten)]
    record: &'a Record,
    recorded: Recorded<&'a Facts>,
}

#[derive(Deserialize)]
struct OnlyOrigin {
    recorded: Option<Recorded<Facts>>,
}

/// The payload of a record's custom block.
pub fn encode(record: &Record, origin: Option<(&RawEvent, &Facts)>) -> serde_json::Result<Vec<u8>> {
    let mut payload = Vec::with_capacity(2048);
    payload.extend_from_slice(&MAGIC);
    payload.extend_from_slice(&version_of(record).to_le_bytes());
    payload.extend_from_slice(&[0; 2 + 4]);
    match origin {
        Some((event, facts)) => serde_json::to_writer(
            &mut payload,
            &WithOrigin {
                record,
                recorded: Recorded {
                    event: BASE64.encode(event.wire()),
                    facts,
                },
            },
        )?,
        None => serde_json::to_writer(&mut payload, record)?,
    }
    let length = (payload.len() - PREFIX) as u32;
    payload[PREFIX - 4..PREFIX].copy_from_slice(&length.to_le_bytes());
    Ok(payload)
}

/// Whether a payload tells a name; quicker than to read it.
pub fn holds_name(payload: &[u8]) -> bool {
    payload
        .get(PREFIX..)
        .is_some_and(|json| json.starts_with(br#"{"type":"name""#))
}

/// Reads a payload back.
pub fn decode(payload: &[u8]) -> Result<Entry, PayloadError> {
    let Some(rest) = payload.strip_prefix(&MAGIC) else {
        return Err(PayloadError::Foreign);
    };
    let broken = |what: &str| PayloadError::Broken(what.to_owned());
    let [v0, v1, _, _, l0, l1, l2, l3, rest @ ..] = rest else {
        return Err(broken("the block ends before its length"));
    };
    let version = u16::from_le_bytes([*v0, *v1]);
    if version > VERSION {
        return Err(PayloadError::Later(version));
    }
    let length = u32::from_le_bytes([*l0, *l1, *l2, *l3]) as usize;
    let json = rest
        .get(..length)
        .ok_or_else(|| broken("the record is longer than its block"))?;
    // Twice, since a tagged record cannot share its keys with another structure while reading.
    let record: Record =
        serde_json::from_slice(json).map_err(|error| PayloadError::Broken(error.to_string()))?;
    let recorded = match &record {
        Record::Drop(_) => {
            serde_json::from_slice::<OnlyOrigin>(json)
                .map_err(|error| PayloadError::Broken(error.to_string()))?
                .recorded
        }
        _ => None,
    };
    let origin = recorded.and_then(|recorded| {
        let wire = BASE64.decode(recorded.event).ok()?;
        Some((RawEvent::decode(Bytes::from(wire)).ok()?, recorded.facts))
    });
    Ok(Entry { record, origin })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::samples;

    #[test]
    fn every_record_comes_back() {
        for record in samples::records_of_every_drop() {
            let payload = encode(&record, None).unwrap();
            assert_eq!(decode(&payload).unwrap(), Entry { record, origin: None });
        }
    }

    #[test]
    fn a_drop_brings_its_event_and_facts() {
        let (record, event, facts) = samples::diagnosed();
        let payload = encode(&record, Some((&event, &facts))).unwrap();
        assert_eq!(
            decode(&payload).unwrap(),
            Entry {
                record,
                origin: Some((event, facts))
            }
        );
    }

    #[test]
    fn only_later_records_need_a_later_version() {
        let records = samples::records_of_every_drop()
            .into_iter()
            .chain([Record::Name(samples::name())]);
        for record in records {
            let payload = encode(&record, None).unwrap();
            let version = match record {
                Record::Name(_) => 2,
                Record::Brief(_) => 3,
                _ => 1,
            };
            assert_eq!(payload[MAGIC.len()], version, "{record:?}");
            assert_eq!(holds_name(&payload), version == 2);
            assert_eq!(decode(&payload).unwrap().record, record);
        }
    }

    #[test]
    fn a_later_version_is_recognised() {
        let mut payload = encode(&samples::records()[0], None).unwrap();
        payload[MAGIC.len()] = 4;
        assert_eq!(decode(&payload), Err(PayloadError::Later(4)));
    }

    #[test]
    fn what_is_cut_or_foreign_is_told_apart() {
        let payload = encode(&samples::records()[0], None).unwrap();
        for length in 0..payload.len() {
            let expected_foreign = length < MAGIC.len();
            match decode(&payload[..length]) {
                Err(PayloadError::Foreign) => assert!(expected_foreign, "{length}"),
                Err(PayloadError::Broken(_)) => assert!(!expected_foreign, "{length}"),
                other => panic!("{length}: {other:?}"),
            }
        }
    }
}
