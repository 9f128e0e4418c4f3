//! What the programs say of themselves (aya-log), for those who work on droptrace.

use anyhow::Context as _;
use aya::Ebpf;
use aya_log::EbpfLogger;
use log::{Level, LevelFilter, Log, Metadata, Record};
use tokio::io::{Interest, unix::AsyncFd};

/// Environment variable that turns it on.
pub const SWITCH: &str = "DROPTRACE_BPF_LOG";

/// Whether the programs are to log.
pub fn wanted() -> bool {
    std::env::var_os(SWITCH).is_some_and(|value| !value.is_empty() && value != "0")
}

/// Writes what the programs log to standard error, until the runtime ends.
///
/// # Errors
/// The object has no log.
pub fn follow(ebpf: &mut Ebpf) -> anyhow::Result<()> {
    let logger = EbpfLogger::init_with_logger(ebpf, StandardError).context("the BPF object has no log")?;
    log::set_max_level(LevelFilter::Trace);
    // SAFETY: the logger owns its descriptor for as long as it lives, and AsyncFd owns the logger.
    let mut logger = unsafe { AsyncFd::register_with_interest(logger, Interest::READABLE) }
        .context("cannot wait for the log of the programs")?;
    tokio::spawn(async move {
        while let Ok(mut ready) = logger.readable_mut().await {
            ready.get_inner_mut().flush();
            ready.clear_ready();
        }
    });
    Ok(())
}

/// A line each.
struct StandardError;

impl Log for StandardError {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Trace
    }

    fn log(&self, record: &Record<'_>) {
        eprintln!("bpf: {}", record.args());
    }

    fn flush(&self) {}
}
