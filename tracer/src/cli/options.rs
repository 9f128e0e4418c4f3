//! What the user asked for, as the commands hand it on.

use std::{ffi::OsString, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use clap::Args;
use tokio::sync::Notify;

use super::problem::Problem;
use crate::sink::Sink;

/// Largest capture file by default, in bytes.
pub const MAX_SIZE: u64 = 1 << 30;

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
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// Packets from or to this address; repeatable
    #[arg(long, value_name = "ADDRESS")]
    pub addr: Vec<IpAddr>,
    /// Packets from or to this port
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// Packets of this protocol: tcp, udp, icmp, icmpv6, sctp, or a number
    #[arg(long, value_name = "PROTOCOL", value_parser = parse_protocol)]
    pub protocol: Option<u8>,
    /// Drops of this cause; repeatable (`droptrace explain` lists the slugs)
    #[arg(long, value_name = "SLUG", value_parser = parse_slug)]
    pub cause: Vec<String>,
    /// Only this long: 30s, 5m, 1h30m
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration)]
    pub duration: Option<Duration>,
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
    /// Where records go.
    pub output: Output,
    /// Command to start once all hooks are attached; empty: none. It keeps its own standard streams.
    pub command: Vec<OsString>,
    /// Benign drops are shown one by one, too; they are always counted.
    pub benign: bool,
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
        match &self.output {
            Output::Json(None) => Ok(Opened {
                sink: Box::new(crate::sink::Json::new(std::io::stdout())),
                quit: None,
            }),
            _ => anyhow::bail!("this output is not built yet"),
        }
    }
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration.is_zero() => Err("it is zero; say how long, such as 30s".to_owned()),
        Ok(duration) => Ok(duration),
        Err(error) => Err(format!("{error}; write it as 30s, 5m or 1h30m")),
    }
}

fn parse_slug(text: &str) -> Result<String, String> {
    crate::diagnose::cause_by_slug(text)
        .map(|cause| cause.slug.to_owned())
        .ok_or_else(|| "no such cause; `droptrace explain` lists them".to_owned())
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
                "a command keeps the terminal for itself, so the drops need a file",
                "say -o FILE before the `--`",
            ));
        }
        Ok(())
    }
}
