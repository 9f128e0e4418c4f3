//! What the user asked for, as the commands hand it on.

use std::{
    ffi::OsString,
    fs::{File, TryLockError},
    io::{self, ErrorKind, IsTerminal, Write, stderr, stdout},
    net::IpAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use clap::Args;
use tokio::sync::Notify;

use super::{complain, problem::Problem, suggest};
use crate::{
    context::{Labels, PodRequest},
    diagnose::{Packet, PodPattern},
    sink::{
        Captured, Json, Paint, Pcapng, Selected, Selection, Sink, Storage, Text, Tui, Written,
        is_dumb_terminal,
    },
};

/// Largest capture file by default, in bytes.
pub const MAX_SIZE: u64 = 1 << 30;
/// Smallest limit of a capture file, in bytes: coverage and some drops fit.
const MIN_SIZE: u64 = 64 << 10;

/// Longest duration of a run: ten years.
const LONGEST: Duration = Duration::from_hours(10 * 366 * 24);

/// Which packets to see; for `show`, which drops to print.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Scope")]
pub struct ScopeArgs {
    /// Network namespace, by name (`ip netns`), path (/proc/PID/ns/net) or inode number; repeatable
    ///
    /// The host-side drops of the addresses in that namespace are kept, too.
    #[arg(long, value_name = "NAME|PATH|INODE")]
    pub netns: Vec<String>,
    /// Network namespace of this process
    #[arg(long, value_name = "PID", allow_hyphen_values = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// Packets from or to this address; repeatable
    #[arg(long, value_name = "ADDRESS", allow_hyphen_values = true)]
    pub addr: Vec<IpAddr>,
    /// Packets from or to this port
    #[arg(long, value_name = "PORT", allow_hyphen_values = true, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// Packets of this protocol: tcp, udp, icmp, icmpv6, sctp, or a number
    #[arg(long, value_name = "PROTOCOL", allow_hyphen_values = true, value_parser = parse_protocol)]
    pub protocol: Option<u8>,
    /// Drops of this cause; repeatable (`droptrace explain` lists the slugs)
    #[arg(long, value_name = "SLUG", allow_hyphen_values = true, value_parser = parse_slug)]
    pub cause: Vec<String>,
    /// Only this long: 30s, 5m, 1h30m
    #[arg(long = "for", value_name = "DURATION", allow_hyphen_values = true, value_parser = parse_duration)]
    pub duration: Option<Duration>,
}

/// Which pods and containers to see, beside the network namespaces of [`ScopeArgs`].
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Scope")]
pub struct PodArgs {
    /// Pod that is up, or all whose names begin so; repeatable
    ///
    /// All that is in its network namespace, and the host-side drops of its addresses. When it is started anew, it is
    /// followed. NAME alone will do where no other namespace has a pod of that name.
    #[arg(long, value_name = "NAMESPACE/NAME[*]")]
    pub pod: Vec<PodPattern>,
    /// Pods with these labels: KEY=VALUE, several with a comma between; repeatable
    #[arg(short = 'l', long = "labels", value_name = "LABELS")]
    pub labels: Vec<Labels>,
    /// Container, by its name, or by its id or the beginning of that; repeatable
    #[arg(long, value_name = "NAME|ID")]
    pub container: Vec<String>,
    /// Socket of the container runtime (CRI) to ask, instead of the usual ones and Docker's
    #[arg(long, value_name = "PATH")]
    pub cri_socket: Option<PathBuf>,
}

impl From<PodArgs> for PodRequest {
    fn from(args: PodArgs) -> Self {
        Self {
            pods: args.pod,
            labels: args.labels,
            containers: args.container,
            socket: args.cri_socket,
        }
    }
}

/// Where the records of a run go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// The full-screen view.
    Tui,
    /// Lines of text, to a file or to standard output.
    Text(Option<PathBuf>),
    /// JSON lines, to a file or to standard output.
    Json(Option<PathBuf>),
    /// A capture file; progress and summary go to the terminal.
    Capture(PathBuf),
}

/// A run: all that `live` and `capture` say to `cli::run::run`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// What to see, and how long.
    pub scope: ScopeArgs,
    /// Pods and containers to see.
    pub pods: PodRequest,
    /// Where records go.
    pub output: Output,
    /// Command to start once all hooks are attached; empty: none. It keeps its own standard streams.
    pub command: Vec<OsString>,
    /// Benign drops are shown one by one, too; they are always counted.
    pub benign: bool,
    /// Each drop is to have a line, in a flood too, instead of a sample.
    pub every_drop: bool,
    /// The IPVS entry hook is attached wherever IPVS is, not only where a setting makes it useful.
    pub ipvs: bool,
    /// Kernel symbols to treat as absent, for tests of reduced coverage.
    pub hide_symbols: Vec<String>,
    /// Size limit of the output file in bytes.
    pub max_size: u64,
}

/// An opened output.
pub struct Opened {
    /// Where records go. Dropping it gives the terminal back.
    pub sink: Box<dyn Sink>,
    /// Told when the user asks to quit; only the full-screen view has it.
    pub quit: Option<Arc<Notify>>,
}

impl RunOptions {
    /// Opens the output, with its filters (benign, causes). The full-screen view takes the terminal at once: open it
    /// when everything that may fail has been tried.
    pub fn open(&self) -> anyhow::Result<Opened> {
        let selection = Selection {
            benign: self.benign,
            causes: self.scope.cause.clone(),
            ..Selection::default()
        };
        let sink: Box<dyn Sink> = match &self.output {
            Output::Tui => return self.open_tui(selection),
            Output::Text(None) => {
                let paint = Paint::for_terminal(stdout().is_terminal());
                Box::new(Selected::new(selection, Text::new(stdout(), paint)))
            }
            Output::Text(Some(path)) => {
                let text = Text::new(create(path)?, Paint::Plain);
                Box::new(Selected::new(selection, written(text, path, true)))
            }
            Output::Json(None) => Box::new(Selected::new(selection, Json::new(stdout()))),
            Output::Json(Some(path)) => {
                let json = Json::new(create(path)?);
                Box::new(Selected::new(
                    selection,
                    written(json, path, stderr().is_terminal()),
                ))
            }
            Output::Capture(path) => self.open_capture(selection, path)?,
        };
        Ok(Opened { sink, quit: None })
    }

    fn open_capture(&self, selection: Selection, path: &Path) -> anyhow::Result<Box<dyn Sink>> {
        let terminal = stderr().is_terminal() && !is_dumb_terminal();
        let storage: Box<dyn Storage> = if path == Path::new("-") {
            Box::new(stdout())
        } else {
            Box::new(create(path)?)
        };
        let summary: Box<dyn Write + Send> = if path == Path::new("-") {
            Box::new(stderr())
        } else {
            Box::new(stdout())
        };
        let file = Pcapng::new(storage, self.max_size)
            .with_context(|| format!("cannot begin the capture file {}", path.display()))?;
        let captured = Captured::new(file, path.display().to_string(), terminal, summary);
        Ok(Box::new(Selected::new(selection, captured)))
    }

    fn open_tui(&self, selection: Selection) -> anyhow::Result<Opened> {
        let (tui, quit) =
            Tui::start(self.benign).context("cannot take the terminal; --no-tui gives lines of text")?;
        // The view hides what is benign by itself.
        let selection = Selection {
            benign: true,
            ..selection
        };
        Ok(Opened {
            sink: Box::new(Selected::new(selection, tui)),
            quit: Some(quit),
        })
    }
}

/// Lines to a file: said on standard error, unless a script reads JSON.
fn written<S: Sink>(sink: S, path: &Path, said: bool) -> Written<S> {
    let says: Box<dyn Write + Send> = if said {
        Box::new(stderr())
    } else {
        Box::new(io::sink())
    };
    Written::new(sink, path.display().to_string(), says)
}

/// Creates a file that no other run writes to, or tells how to go on. It stays locked while it is open.
fn create(path: &Path) -> Result<File, Problem> {
    let refused = |error: &io::Error| {
        Problem::failure(
            format!("cannot write {}: {error}", path.display()),
            "give -o a file in a folder that exists, has space, and that you may write to",
        )
    };
    let held = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file);
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(|error| refused(&error))?;
    // Pipes and terminals may be shared, and a file system without locks is no reason not to write.
    if file.metadata().is_ok_and(|now| now.is_file()) {
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(Problem::failure(
                format!("another droptrace writes to {}", path.display()),
                "give each run a file of its own",
            ));
        }
        file.set_len(0).map_err(|error| refused(&error))?;
    }
    if let Some(held) = held.filter(|held| held.len() > 0) {
        complain(
            "note",
            &format!("{} is overwritten; it held {} bytes", path.display(), held.len()),
        );
    }
    Ok(file)
}

impl ScopeArgs {
    /// The same as a filter of drops that were recorded, maybe on another host.
    pub fn selection(&self, benign: bool) -> Result<Selection, Problem> {
        let mut netns = self
            .netns
            .iter()
            .map(|netns| recorded_netns(netns))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(pid) = self.pid {
            netns.push(recorded_netns(&format!("/proc/{pid}/ns/net"))?);
        }
        Ok(Selection {
            benign,
            causes: self.cause.clone(),
            addresses: self.addr.clone(),
            port: self.port,
            protocol: self.protocol.and_then(protocol_name),
            netns,
            ..Selection::default()
        })
    }
}

/// A netns as a record names it: a path becomes its inode number, a name or number stays.
fn recorded_netns(netns: &str) -> Result<String, Problem> {
    if !netns.contains('/') {
        return Ok(netns.to_owned());
    }
    std::fs::metadata(netns)
        .map(|metadata| metadata.ino().to_string())
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound => Problem::usage(
                format!("no network namespace at {netns}: {error}"),
                "give the name or inode number that the capture shows",
            ),
            _ => Problem::usage(
                format!("cannot look at the network namespace {netns}: {error}"),
                "as root, or give the name or inode number that the capture shows",
            ),
        })
}

/// The protocol as [`crate::diagnose::Drop::protocol`] names it.
pub(super) fn protocol_name(protocol: u8) -> Option<String> {
    Packet {
        protocol: Some(protocol),
        ..Packet::default()
    }
    .protocol_name()
}

/// A size in bytes: a number, or one with K, M or G (powers of 1024).
pub(super) fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.trim_end_matches(|unit: char| unit.is_ascii_alphabetic()) {
        digits if digits.len() == text.len() => (digits, 0),
        digits => match text[digits.len()..].to_ascii_uppercase().as_str() {
            "K" | "KIB" => (digits, 10),
            "M" | "MIB" => (digits, 20),
            "G" | "GIB" => (digits, 30),
            unit => return Err(format!("{unit} is no unit; write bytes, or K, M, G")),
        },
    };
    let bytes = digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| "not a size; write bytes, or K, M, G".to_owned())?;
    if bytes < MIN_SIZE {
        return Err(format!("too small for a capture; at least {MIN_SIZE} bytes"));
    }
    Ok(bytes)
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration.is_zero() => Err("it is zero; say how long, such as 30s".to_owned()),
        Ok(duration) if duration > LONGEST => {
            Err("longer than ten years; without it the run goes on until Ctrl-C".to_owned())
        }
        Ok(duration) => Ok(duration),
        Err(error) => Err(format!("{error}; write it as 30s, 5m or 1h30m")),
    }
}

fn parse_slug(text: &str) -> Result<String, String> {
    crate::diagnose::cause_by_slug(text)
        .map(|cause| cause.slug.to_owned())
        .ok_or_else(|| {
            let meant = suggest::cause_meant(text);
            format!("no such cause{meant}; `droptrace explain` lists them")
        })
}

fn parse_protocol(text: &str) -> Result<u8, String> {
    Ok(match text.to_ascii_lowercase().as_str() {
        "icmp" => 1,
        "tcp" => 6,
        "udp" => 17,
        "icmpv6" => 58,
        "sctp" => 132,
        other => other
            .parse()
            .map_err(|_| "neither tcp, udp, icmp, icmpv6, sctp nor a number up to 255".to_owned())?,
    })
}

impl RunOptions {
    /// Whether the parts fit together.
    pub fn check(&self) -> Result<(), Problem> {
        if !self.command.is_empty()
            && matches!(self.output, Output::Tui | Output::Text(None) | Output::Json(None))
        {
            return Err(Problem::usage(
                "a command keeps standard output for itself, so the drops need a file",
                "say -o FILE before the `--`",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_cannot_write_to_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drops");
        std::fs::write(&path, "of a run before").unwrap();
        let first = create(&path).unwrap();
        assert_eq!(first.metadata().unwrap().len(), 0);
        (&first).write_all(b"mine").unwrap();
        let refused = create(&path).unwrap_err().to_string();
        assert!(refused.contains("another droptrace writes to"), "{refused}");
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        drop(first);
        assert!(create(&path).is_ok());
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("65536"), Ok(65536));
        assert_eq!(parse_size("64K"), Ok(65536));
        assert_eq!(parse_size("10m"), Ok(10 << 20));
        assert_eq!(parse_size("1GiB"), Ok(1 << 30));
        for wrong in ["", "K", "1.5G", "1T", "-1", "0", "100", "99999999999G"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_recorded_netns_is_named_as_given_or_by_inode() {
        assert_eq!(recorded_netns("web").unwrap(), "web");
        let own = std::fs::metadata("/proc/self/ns/net").unwrap().ino().to_string();
        assert_eq!(recorded_netns("/proc/self/ns/net").unwrap(), own);
        assert!(recorded_netns("/run/netns/no such name").is_err());
    }

    #[test]
    fn protocols_are_named_as_in_records() {
        assert_eq!(parse_protocol("TCP"), Ok(6));
        assert_eq!(protocol_name(6).as_deref(), Some("tcp"));
        assert_eq!(protocol_name(47).as_deref(), Some("47"));
    }
}
