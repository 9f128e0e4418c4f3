//! All commands and their arguments.

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
    process::ExitCode,
};

use clap::{Args, CommandFactory as _, Parser, Subcommand, error::ErrorKind};

use crate::diagnose::PodPattern;

use super::{
    options::{self, PodArgs, ScopeArgs},
    problem,
};

/// Tells why the Linux kernel dropped a packet: every drop with its root cause, the evidence and a remedy
#[derive(Debug, Parser)]
#[command(
    name = "droptrace",
    version,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true,
    disable_help_subcommand = true,
    after_help = "\
Examples:
  droptrace live                              watch this host, full screen
  droptrace live --netns web --port 80        only one namespace and port
  droptrace live --json | jq .cause           for scripts
  droptrace capture --for 30s -o drops.pcapng keep them in a file
  droptrace show drops.pcapng                 read them anywhere, without root
  droptrace explain accept-queue-full         what a cause means

Exit status: 0 done, 1 failure, 2 wrong command line; with `-- COMMAND` that of the command."
)]
pub(super) struct Cli {
    #[command(subcommand)]
    pub(super) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Watch drops as they happen (root)
    #[command(after_help = "\
Examples:
  droptrace live                                    full screen on a terminal, else lines of text
  droptrace live --no-tui --for 5m                  lines of text, five minutes
  droptrace live --json --cause accept-queue-full   JSON lines of one cause
  droptrace live --pod default/web                  a pod, inside and on the host, also after its restart
  droptrace live --container redis                  a container of Docker's
  droptrace live --pid 1234                         the network namespace of a process
  droptrace live --json -o drops.json -- ab -n 1000 http://10.0.0.2/

Every run ends with the packets dropped by cause, coverage, loss, and SYNs that nobody answered.")]
    Live(LiveArgs),
    /// Write drops to a pcapng file (root)
    #[command(after_help = "\
Examples:
  droptrace capture --for 30s -o drops.pcapng
  droptrace capture --netns web -o drops.pcapng      until Ctrl-C
  droptrace capture -o drops.pcapng -- ./reproduce.sh
  droptrace capture -o - | wireshark -k -i -

The file opens in Wireshark: each drop is a packet with its cause as comment (display filter
frame.comment). `droptrace show` reads all of it.")]
    Capture(CaptureArgs),
    /// Print the drops of a capture file (any host, no root)
    #[command(after_help = "\
Examples:
  droptrace show drops.pcapng
  droptrace show drops.pcapng --cause no-socket --port 443
  droptrace show drops.pcapng --json | jq 'select(.type == \"drop\") | .src'

Filters choose which drops are printed; totals are always those of the whole capture.")]
    Show(ShowArgs),
    /// List pods and containers: where they are, what was lost there, listeners near their limit (root)
    #[command(after_help = "\
Examples:
  droptrace pods
  droptrace pods --json | jq '.pods[] | select(.counters != {}) | .pod'

What was lost is told by the kernel's counters of each network namespace, since that was made; one packet may
be in two of them. A run of `droptrace live --pod` tells the causes.")]
    Pods(PodsArgs),
    /// Tell what this kernel offers, and what on this host makes drops likely
    #[command(after_help = "\
Examples:
  droptrace doctor
  droptrace doctor --json | jq .coverage.gaps")]
    Doctor(DoctorArgs),
    /// Explain a cause: mechanism, evidence, remedy, counter
    #[command(after_help = "\
Examples:
  droptrace explain                    all causes
  droptrace explain ipvs-timewait-reuse
  droptrace explain tw-recycle         why tcp_tw_recycle is no remedy, and what looks like it today")]
    Explain(ExplainArgs),
    /// Print the JSON schema of the lines that `--json` gives
    Schema,
}

/// What `live` and `capture` share.
#[derive(Args, Debug)]
pub(super) struct RunArgs {
    /// Show benign drops one by one, too; they are always counted
    #[arg(long)]
    pub(super) benign: bool,
    /// A line for every drop, in a flood too, instead of a sample of each kind
    ///
    /// Those beyond the sample have a line in short: packet and cause, and which drop of their kind has evidence and remedy. It
    /// costs more: what does not fit is told as lost. Totals are exact with and without it.
    #[arg(long)]
    pub(super) every_drop: bool,
    /// Attach the IPVS entry hook, which runs for every packet, wherever IPVS is
    ///
    /// Without it, it is attached where a namespace in scope has IPVS services and expire_nodest_conn=0.
    #[arg(long)]
    pub(super) ipvs: bool,
    /// Treat a kernel symbol as absent; repeatable
    #[arg(long = "hide-symbol", value_name = "NAME", hide = true)]
    pub(super) hide_symbols: Vec<String>,
    #[command(flatten)]
    pub(super) scope: ScopeArgs,
    #[command(flatten)]
    pub(super) pods: PodArgs,
    /// Start this once all hooks are attached, stop shortly after it ends, exit with its status
    #[arg(last = true, value_name = "COMMAND")]
    pub(super) command: Vec<OsString>,
}

/// `droptrace live`.
#[derive(Args, Debug)]
pub(super) struct LiveArgs {
    /// Lines of text instead of the full-screen view
    #[arg(long)]
    pub(super) no_tui: bool,
    /// JSON lines: see `droptrace schema`
    #[arg(long)]
    pub(super) json: bool,
    /// Write to FILE instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

/// `droptrace capture`.
#[derive(Args, Debug)]
pub(super) struct CaptureArgs {
    /// File to write, in pcapng; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    pub(super) output: PathBuf,
    /// End when the file would be larger: bytes, or with K, M, G
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, default_value = "1G", value_parser = options::parse_size)]
    pub(super) max_size: u64,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

/// `droptrace show`.
#[derive(Args, Debug)]
pub(super) struct ShowArgs {
    /// Capture file; `-` is standard input
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,
    /// JSON lines, as `live --json` gave them
    #[arg(long)]
    pub(super) json: bool,
    /// Show benign drops, too
    #[arg(long)]
    pub(super) benign: bool,
    #[command(flatten)]
    pub(super) scope: ScopeArgs,
    /// Drops in the network namespace of this pod, or from or to it; with * all whose names begin so; repeatable
    #[arg(long, value_name = "NAMESPACE/NAME[*]", help_heading = "Scope")]
    pub(super) pod: Vec<PodPattern>,
    /// The same of a container, by the name that the capture shows; repeatable
    #[arg(long, value_name = "NAME", help_heading = "Scope")]
    pub(super) container: Vec<String>,
}

/// `droptrace pods`.
#[derive(Args, Debug)]
pub(super) struct PodsArgs {
    /// One JSON object
    #[arg(long)]
    pub(super) json: bool,
    /// Socket of the container runtime (CRI) to ask, instead of the usual ones and Docker's
    #[arg(long, value_name = "PATH")]
    pub(super) cri_socket: Option<PathBuf>,
}

/// `droptrace doctor`.
#[derive(Args, Debug)]
pub(super) struct DoctorArgs {
    /// One JSON object
    #[arg(long)]
    pub(super) json: bool,
    /// Treat a kernel symbol as absent; repeatable
    #[arg(long = "hide-symbol", value_name = "NAME", hide = true)]
    pub(super) hide_symbols: Vec<String>,
}

/// `droptrace explain`.
#[derive(Args, Debug)]
pub(super) struct ExplainArgs {
    /// Slug of a cause, or the topic tw-recycle; none lists all
    pub(super) slug: Option<String>,
    /// Write a page per cause into DIR
    #[arg(long, value_name = "DIR", hide = true, conflicts_with = "slug")]
    pub(super) markdown: Option<PathBuf>,
    /// Write what becomes of each of the kernel's drop reasons into FILE
    #[arg(long, value_name = "FILE", hide = true, conflicts_with_all = ["slug", "markdown"])]
    pub(super) reasons: Option<PathBuf>,
}

impl Cli {
    /// What these words ask for, of which the first is the program's name.
    ///
    /// # Errors
    /// They are wrong, or ask for help.
    pub(super) fn of(words: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let words: Vec<OsString> = words.into_iter().collect();
        // clap takes that for no command at all: the run would never end.
        if words.last().is_some_and(|last| last == "--") {
            return Err(Self::command().error(ErrorKind::MissingRequiredArgument, "no COMMAND after --"));
        }
        Self::try_parse_from(words)
    }
}

/// Help goes where it belongs; anything else is one line with the next step.
///
/// `first`: the first argument, which is the command, where there is one.
pub(super) fn report(error: &clap::Error, first: Option<&OsStr>) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A reader that went away has seen enough.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            problem::USAGE.into()
        }
        _ => {
            super::complain("error", &one_line(&error.to_string(), first));
            problem::USAGE.into()
        }
    }
}

/// What clap says, without its layout, and the command that tells more.
fn one_line(rendered: &str, first: Option<&OsStr>) -> String {
    let mut what = Vec::new();
    // Not every message of clap's says which command it is about.
    let mut command = match first.and_then(OsStr::to_str) {
        Some(name) if Cli::command().find_subcommand(name).is_some() => format!("droptrace {name}"),
        _ => "droptrace".to_owned(),
    };
    for line in rendered.lines().map(str::trim) {
        if let Some(usage) = line.strip_prefix("Usage: ") {
            command = usage
                .split_whitespace()
                .take_while(|word| !word.starts_with(['-', '[', '<']))
                .collect::<Vec<_>>()
                .join(" ");
        } else if !["For more information", "tip: to pass"]
            .iter()
            .any(|start| line.starts_with(start))
            && !line.is_empty()
        {
            what.push(line.trim_start_matches("error: "));
        }
    }
    format!("{}; next: {command} --help", what.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Cli, clap::Error> {
        Cli::of([&["droptrace"], words].concat().into_iter().map(OsString::from))
    }

    #[test]
    fn the_definitions_hold() {
        Cli::command().debug_assert();
    }

    #[test]
    fn errors_are_one_line_with_the_next_step() {
        for (words, expected) in [
            (
                &["live", "--for", "soon"][..],
                "invalid value 'soon' for '--for <DURATION>': expected number at 0; write it as 30s, 5m or 1h30m; next: droptrace live --help",
            ),
            (
                &["live", "--for", "-5s"],
                "invalid value '-5s' for '--for <DURATION>': expected number at 0; write it as 30s, 5m or 1h30m; next: droptrace live --help",
            ),
            (
                &["live", "--pid", "-1"],
                "invalid value '-1' for '--pid <PID>': -1 is not in 1..=4294967295; next: droptrace live --help",
            ),
            (
                &["live", "--cause", "full-queue"],
                "invalid value 'full-queue' for '--cause <SLUG>': no such cause (is accept-queue-full or syn-queue-full or neigh-queue-full meant?); `droptrace explain` lists them; next: droptrace live --help",
            ),
            (
                &["capture"],
                "the following required arguments were not provided: --output <FILE>; next: droptrace capture --help",
            ),
            (
                &["live", "--json", "--"],
                "no COMMAND after --; next: droptrace --help",
            ),
            (
                &["live", "--tui"],
                "unexpected argument '--tui' found; next: droptrace live --help",
            ),
        ] {
            let rendered = parse(words).unwrap_err().to_string();
            assert_eq!(one_line(&rendered, Some(OsStr::new(words[0]))), expected);
        }
    }

    #[test]
    fn a_command_comes_after_two_dashes() {
        let Command::Live(live) = parse(&["live", "-o", "f", "--", "ls", "-l"]).unwrap().command else {
            panic!("not live");
        };
        assert_eq!(live.run.command, ["ls", "-l"]);
        assert!(parse(&["live", "ls"]).is_err());
    }

    #[test]
    fn wrong_values_are_refused() {
        for words in [
            &["live", "--port", "0"][..],
            &["live", "--port", "65536"],
            &["live", "--pid", "0"],
            &["live", "--pid", "me"],
            &["live", "--addr", "10.0.0"],
            &["live", "--protocol", "256"],
            &["live", "--for", "0s"],
            &["live", "--for", "5"],
            &["live", "--for", "99999999999999d"],
            &["live", "--for", "11y"],
            &["capture", "-o", "f", "--max-size", "1T"],
            &["capture", "-o", "f", "--max-size", "1K"],
            &["watch"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
        assert!(parse(&["live", "--protocol", "UDP", "--for", "1h30m", "--addr", "::1"]).is_ok());
    }

    #[test]
    fn the_help_fits_a_terminal() {
        for line in Cli::command().render_long_help().to_string().lines() {
            assert!(line.chars().count() <= 100, "{line}");
        }
    }
}
