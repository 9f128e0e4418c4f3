//! One record per line, in the form that `docs/json.md` describes.

use std::{
    io::{self, BufWriter, Write},
    net::IpAddr,
};

use super::{Origin, Sink};
use crate::diagnose::{Brief, Record};

/// Bytes of lines that are written at once, at most.
const GATHERED: usize = 64 << 10;

/// Writes JSON lines; those that come at once together.
#[derive(Debug)]
pub struct Json<W: Write> {
    out: BufWriter<W>,
    line: Vec<u8>,
}

impl<W: Write> Json<W> {
    /// A sink that writes to `out`.
    pub fn new(out: W) -> Self {
        Self {
            out: BufWriter::with_capacity(GATHERED, out),
            line: Vec::new(),
        }
    }
}

impl<W: Write + Send> Sink for Json<W> {
    fn record(&mut self, record: &Record, _: Option<Origin<'_>>) -> io::Result<()> {
        self.line.clear();
        match record {
            Record::Brief(brief) => write_brief(&mut self.line, brief)?,
            _ => serde_json::to_writer(&mut self.line, record)?,
        }
        self.line.push(b'\n');
        self.out.write_all(&self.line)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn finish(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Writes what serde makes of a drop in short. There are many of them: the names of the keys are not looked through for what
/// must be escaped, which is most of serde's work.
fn write_brief(line: &mut Vec<u8>, brief: &Brief) -> io::Result<()> {
    line.extend_from_slice(br#"{"type":"brief","time":"#);
    text(line, &brief.time)?;
    line.extend_from_slice(br#","ktime_ns":"#);
    serde_json::to_writer(&mut *line, &brief.ktime_ns)?;
    line.extend_from_slice(br#","verdict":"#);
    text(line, brief.verdict.name())?;
    line.extend_from_slice(br#","cause":"#);
    text(line, &brief.cause)?;
    line.extend_from_slice(if brief.benign {
        br#","benign":true,"found_by":"#
    } else {
        br#","benign":false,"found_by":"#
    });
    text(line, brief.found_by.name())?;
    line.extend_from_slice(br#","packets":"#);
    serde_json::to_writer(&mut *line, &brief.packets)?;
    line.extend_from_slice(br#","netns":"#);
    number(line, brief.netns)?;
    line.extend_from_slice(br#","netns_name":"#);
    text_or_null(line, brief.netns_name.as_deref())?;
    for (key, name) in [
        (&br#","pod":"#[..], &brief.pod),
        (&br#","container":"#[..], &brief.container),
    ] {
        if let Some(name) = name {
            line.extend_from_slice(key);
            text(line, name)?;
        }
    }
    line.extend_from_slice(br#","interface":"#);
    text_or_null(line, brief.interface.as_deref())?;
    line.extend_from_slice(br#","src":"#);
    address(line, brief.src)?;
    line.extend_from_slice(br#","dst":"#);
    address(line, brief.dst)?;
    line.extend_from_slice(br#","sport":"#);
    number(line, brief.sport)?;
    line.extend_from_slice(br#","dport":"#);
    number(line, brief.dport)?;
    line.extend_from_slice(br#","protocol":"#);
    text_or_null(line, brief.protocol.as_deref())?;
    line.extend_from_slice(br#","flags":"#);
    text_or_null(line, brief.flags.as_deref())?;
    line.extend_from_slice(br#","length":"#);
    number(line, Some(brief.length))?;
    line.extend_from_slice(br#","split":"#);
    text(line, brief.split.name())?;
    line.extend_from_slice(br#","like":"#);
    number(line, brief.like)?;
    line.push(b'}');
    Ok(())
}

const NULL: &[u8] = b"null";

fn text(line: &mut Vec<u8>, text: &str) -> io::Result<()> {
    if text
        .bytes()
        .all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\')
    {
        line.push(b'"');
        line.extend_from_slice(text.as_bytes());
        line.push(b'"');
    } else {
        serde_json::to_writer(line, text)?;
    }
    Ok(())
}

fn text_or_null(line: &mut Vec<u8>, value: Option<&str>) -> io::Result<()> {
    match value {
        Some(value) => text(line, value)?,
        None => line.extend_from_slice(NULL),
    }
    Ok(())
}

fn number(line: &mut Vec<u8>, value: Option<impl Into<u64>>) -> io::Result<()> {
    match value {
        Some(value) => serde_json::to_writer(line, &value.into())?,
        None => line.extend_from_slice(NULL),
    }
    Ok(())
}

fn address(line: &mut Vec<u8>, value: Option<IpAddr>) -> io::Result<()> {
    match value {
        Some(IpAddr::V4(address)) => {
            let mut before = b'"';
            for byte in address.octets() {
                line.push(before);
                serde_json::to_writer(&mut *line, &byte)?;
                before = b'.';
            }
            line.push(b'"');
        }
        Some(IpAddr::V6(address)) => write!(line, "\"{address}\"")?,
        None => line.extend_from_slice(NULL),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        diagnose::{FoundBy, Split, Verdict},
        sink::samples,
    };

    /// The line of a drop in short, which is what serde makes of it.
    fn holds(change: impl FnOnce(&mut Brief)) {
        let mut brief = samples::brief();
        change(&mut brief);
        let record = Record::Brief(Box::new(brief));
        let mut line = Vec::new();
        let mut sink = Json::new(&mut line);
        sink.record(&record, None).unwrap();
        sink.finish().unwrap();
        drop(sink);
        assert_eq!(
            String::from_utf8(line).unwrap(),
            serde_json::to_string(&record).unwrap() + "\n"
        );
    }

    #[test]
    fn a_drop_in_short_is_written_as_serde_does() {
        holds(|_| ());
        for name in ["größe", "with \"quotes\" and \\", "a\u{1}b\nc\u{7f}", ""] {
            holds(|brief| brief.netns_name = Some(name.to_owned()));
        }
        holds(|brief| {
            brief.pod = Some("default/web".into());
            brief.container = Some("nginx".into());
        });
        for address in ["0.0.0.0", "255.10.1.200", "2001:db8::1", "::ffff:10.0.0.1"] {
            holds(|brief| brief.src = address.parse().ok());
        }
        holds(|brief| {
            (brief.netns, brief.netns_name, brief.interface) = (None, None, None);
            (brief.src, brief.dst, brief.sport, brief.dport) = (None, None, None, None);
            (brief.protocol, brief.flags, brief.like) = (None, None, None);
        });
        for verdict in [Verdict::Dropped, Verdict::Rejected, Verdict::Misdelivered] {
            holds(|brief| brief.verdict = verdict);
        }
        for found_by in [FoundBy::Hook, FoundBy::KfreeSkb, FoundBy::Counter] {
            holds(|brief| brief.found_by = found_by);
        }
        for split in [Split::Exact, Split::Sampled] {
            holds(|brief| (brief.split, brief.benign, brief.ktime_ns) = (split, true, u64::MAX));
        }
    }
}
