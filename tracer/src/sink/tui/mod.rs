//! The full-screen view: what it knows ([`state`]), how that looks ([`view`]),
//! and the thread that draws it and reads keys.

mod detail;
mod events;
mod state;
mod view;

use std::{
    fs::File,
    io::{self, IsTerminal as _, Write, stdin, stdout},
    os::fd::{AsFd as _, OwnedFd},
    panic,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossterm::event::{self, Event as TerminalEvent};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use ratatui::DefaultTerminal;
use tokio::sync::Notify;

use self::{
    state::{Action, State},
    view::Theme,
};
use super::{Origin, Sink, summary};
use crate::diagnose::Record;

/// Least time between two drawings: at most ten a second, however many drops come.
const FRAME: Duration = Duration::from_millis(100);
/// The clock in the header moves on this often, even when nothing comes.
const CLOCK: Duration = Duration::from_secs(1);
/// Longer than the thread takes to end, unless its terminal takes nothing more.
const HANGS: Duration = Duration::from_secs(2);
/// Name of the thread that draws.
const THREAD: &str = "droptrace-tui";

/// The full-screen view, as a sink. Dropping it gives the terminal back.
pub struct Tui {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

struct Shared {
    state: Mutex<State>,
    keyboard: Keyboard,
    /// Something came since the last drawing.
    changed: AtomicBool,
    /// The thread shall end.
    stop: AtomicBool,
    /// The terminal is as it was before.
    given_back: AtomicBool,
    quit: Arc<Notify>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while drawing leaves the records as they were.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the terminal back, once.
    fn give_back(&self) {
        if !self.given_back.swap(true, Ordering::Relaxed) {
            // A terminal that is gone takes nothing back.
            let _ = ratatui::try_restore();
        }
    }
}

/// Without this, the next drawing would cover the message of the panic.
fn stop_before_panic_is_told(shared: Arc<Shared>) {
    let next = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !shared.given_back.swap(true, Ordering::Relaxed) {
            shared.stop.store(true, Ordering::Relaxed);
            if thread::current().name() != Some(THREAD) {
                thread::sleep(2 * FRAME);
            }
        }
        next(info);
    }));
}

impl Tui {
    /// Takes the terminal. `benign`: benign drops are shown from the start. The second value is told once when the user
    /// asks to quit, or when the terminal is lost.
    pub fn start(benign: bool) -> io::Result<(Self, Arc<Notify>)> {
        let quit = Arc::new(Notify::new());
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(benign)),
            keyboard: Keyboard::open()?,
            changed: AtomicBool::new(true),
            stop: AtomicBool::new(false),
            given_back: AtomicBool::new(false),
            quit: quit.clone(),
        });
        // Its panic hook gives the terminal back, whichever thread panics.
        let mut terminal = ratatui::try_init()?;
        stop_before_panic_is_told(shared.clone());
        let thread = thread::Builder::new().name(THREAD.to_owned()).spawn({
            let shared = shared.clone();
            move || {
                let _told = TellQuit(shared.quit.clone());
                let result = draw_until_stopped(&shared, &mut terminal);
                if terminal.show_cursor().is_err() {
                    // Dropping it would try again, and panic where standard error is the same dead terminal.
                    std::mem::forget(terminal);
                }
                result
            }
        });
        let thread = match thread {
            Ok(thread) => thread,
            Err(error) => {
                shared.give_back();
                return Err(error);
            }
        };
        let tui = Self {
            shared,
            thread: Some(thread),
        };
        Ok((tui, quit))
    }

    /// Ends the thread and gives the terminal back; the error is the thread's. One that hangs on its terminal is left.
    fn stop(&mut self) -> io::Result<()> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        self.shared.stop.store(true, Ordering::Relaxed);
        let asked = Instant::now();
        while !thread.is_finished() {
            if asked.elapsed() > HANGS {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the terminal takes nothing more",
                ));
            }
            thread::sleep(FRAME / 10);
        }
        let result = thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the full-screen view panicked")));
        self.shared.give_back();
        result
    }
}

/// Tells the run to end when the thread ends, for whatever reason.
struct TellQuit(Arc<Notify>);

impl Drop for TellQuit {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl Sink for Tui {
    fn record(&mut self, record: &Record, _: Option<Origin<'_>>) -> io::Result<()> {
        self.shared.state().apply(record);
        self.shared.changed.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn hidden(&mut self, record: &Record) {
        self.shared.state().names.learn(record);
    }

    fn tick(&mut self) -> io::Result<()> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.stop()?;
        }
        // The thread may have met a terminal that went away just before it read keys.
        self.shared.keyboard.wait(Duration::ZERO)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.stop()?;
        let state = self.shared.state();
        if let Some(end) = &state.summary {
            let text = summary::text(end, state.coverage.as_ref(), &state.names);
            stdout().write_all(text.trim_start().as_bytes())?;
        }
        stdout().flush()
    }
}

impl Drop for Tui {
    fn drop(&mut self) {
        // The terminal is given back either way, and nobody is left to hear of an error.
        let _ = self.stop();
    }
}

/// What keys come from. crossterm reads on for ever from a terminal that is gone, so that has to be noticed before.
struct Keyboard(OwnedFd);

impl Keyboard {
    /// Where crossterm reads keys.
    fn open() -> io::Result<Self> {
        let input = stdin();
        if input.is_terminal() {
            return input.as_fd().try_clone_to_owned().map(Self);
        }
        File::open("/dev/tty").map(|terminal| Self(terminal.into()))
    }

    /// Waits for a key, at most this long. The error says that the terminal is gone.
    fn wait(&self, longest: Duration) -> io::Result<()> {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        match poll(
            &mut fds,
            PollTimeout::try_from(longest).unwrap_or(PollTimeout::MAX),
        ) {
            // A signal; whoever waits here comes again.
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
        if fds[0].revents().is_some_and(|told| told.intersects(gone)) {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the terminal is gone"));
        }
        Ok(())
    }
}

fn draw_until_stopped(shared: &Shared, terminal: &mut DefaultTerminal) -> io::Result<()> {
    let started = Instant::now();
    let theme = Theme::from_environment();
    let mut drawn: Option<Instant> = None;
    while !shared.stop.load(Ordering::Relaxed) {
        let since = drawn.map_or(CLOCK, |drawn| drawn.elapsed());
        let wait = if shared.changed.load(Ordering::Relaxed) {
            FRAME.saturating_sub(since)
        } else {
            FRAME
        };
        shared.keyboard.wait(wait)?;
        while event::poll(Duration::ZERO)? {
            match event::read()? {
                TerminalEvent::Key(key) => {
                    if shared.state().key(key) == Action::Quit {
                        shared.quit.notify_one();
                    }
                    shared.changed.store(true, Ordering::Relaxed);
                }
                TerminalEvent::Resize(..) => shared.changed.store(true, Ordering::Relaxed),
                _ => {}
            }
        }
        let since = drawn.map_or(CLOCK, |drawn| drawn.elapsed());
        let due = since >= CLOCK || (since >= FRAME && shared.changed.load(Ordering::Relaxed));
        if due {
            shared.changed.store(false, Ordering::Relaxed);
            // The lock is held while the picture is made, not while a slow terminal takes it.
            terminal.draw(|frame| view::draw(frame, &shared.state(), started.elapsed(), theme))?;
            drawn = Some(Instant::now());
        }
    }
    Ok(())
}
