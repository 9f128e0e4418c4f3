//! What the full-screen view knows, and what keys do to it. Pure: no terminal, no clock.

use std::collections::{BTreeMap, VecDeque};

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::events::{EVENTS_MAX, Event, Events};
use crate::{
    diagnose::{Counts, Coverage, Record, Split, Summary, Verdict},
    sink::Learned,
};

/// Rates that a cause's sparkline shows.
const RATES: usize = 24;
/// Lines that a page key moves.
const PAGE: usize = 10;

/// What a key asks of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing beyond the view.
    None,
    /// End the run.
    Quit,
}

/// The pane that keys move in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Focus {
    Causes,
    Events,
    Detail,
}

/// What covers the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Popup {
    Coverage,
    Help,
}

/// The total of a cause, over all its netns.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Total {
    pub(super) cause: String,
    pub(super) verdict: Verdict,
    pub(super) benign: bool,
    pub(super) sampled: bool,
    pub(super) packets: u64,
    /// Packets per second between the last totals, oldest first.
    pub(super) rates: VecDeque<f64>,
}

impl Total {
    /// Packets per second now.
    pub(super) fn rate(&self) -> f64 {
        self.rates.back().copied().unwrap_or_default()
    }
}

/// Everything that is shown.
pub(super) struct State {
    pub(super) coverage: Option<Coverage>,
    pub(super) counts: Counts,
    pub(super) summary: Option<Summary>,
    pub(super) names: Learned,
    totals: BTreeMap<String, Total>,
    events: Events,
    pub(super) focus: Focus,
    pub(super) popup: Option<Popup>,
    pub(super) filter: Option<String>,
    pub(super) benign: bool,
    /// Number of the first drop that came after the pause began.
    paused_at: Option<u64>,
    selected_cause: Option<String>,
    /// Number of the selected drop; `None` follows the newest.
    selected_event: Option<u64>,
    /// Lines by which the detail pane, or the popup, is scrolled.
    pub(super) scroll: usize,
    /// The run is ending.
    pub(super) quitting: bool,
}

impl State {
    /// At the start; `benign` as the user asked.
    pub(super) fn new(benign: bool) -> Self {
        Self::with_room(benign, EVENTS_MAX)
    }

    fn with_room(benign: bool, events_max: usize) -> Self {
        Self {
            coverage: None,
            counts: Counts::default(),
            summary: None,
            names: Learned::default(),
            totals: BTreeMap::new(),
            events: Events::new(events_max),
            focus: Focus::Events,
            popup: None,
            filter: None,
            benign,
            paused_at: None,
            selected_cause: None,
            selected_event: None,
            scroll: 0,
            quitting: false,
        }
    }

    /// Takes a record.
    pub(super) fn apply(&mut self, record: &Record) {
        self.names.learn(record);
        match record {
            Record::Coverage(coverage) => self.coverage = Some(coverage.clone()),
            Record::Drop(drop) => self.events.push((**drop).clone()),
            Record::Name(name) => self.events.join(name),
            Record::Brief(brief) => self.events.push(brief.row()),
            Record::Counts(counts) => self.count(counts),
            Record::Summary(summary) => {
                self.count(&summary.counts);
                self.summary = Some(summary.clone());
            }
        }
    }

    fn count(&mut self, counts: &Counts) {
        let seconds = seconds_between(&self.counts.time, &counts.time);
        let mut packets: BTreeMap<&str, u64> = BTreeMap::new();
        for count in &counts.causes {
            *packets.entry(&count.cause).or_default() += count.packets;
            let total = self.totals.entry(count.cause.clone()).or_insert_with(|| Total {
                cause: count.cause.clone(),
                verdict: count.verdict,
                benign: count.benign,
                sampled: false,
                packets: 0,
                rates: VecDeque::new(),
            });
            total.sampled |= count.split == Split::Sampled;
        }
        for total in self.totals.values_mut() {
            let now = packets.get(total.cause.as_str()).copied().unwrap_or_default();
            if let Some(seconds) = seconds {
                if total.rates.len() == RATES {
                    total.rates.pop_front();
                }
                total
                    .rates
                    .push_back(now.saturating_sub(total.packets) as f64 / seconds);
            }
            total.packets = now;
        }
        self.counts = counts.clone();
    }

    /// The causes to show, most packets first.
    pub(super) fn causes(&self) -> Vec<&Total> {
        let mut causes: Vec<&Total> = self
            .totals
            .values()
            .filter(|total| total.packets > 0 && (self.benign || !total.benign))
            .collect();
        causes.sort_by_key(|total| std::cmp::Reverse(total.packets));
        causes
    }

    /// Packets of all causes: lost, and benign.
    pub(super) fn packets(&self) -> (u64, u64) {
        let sum = |benign| {
            self.totals
                .values()
                .filter(|total| total.benign == benign)
                .map(|total| total.packets)
                .sum()
        };
        (sum(false), sum(true))
    }

    /// The drops to show, newest first.
    pub(super) fn events(&self) -> Vec<&Event> {
        let until = self.paused_at.unwrap_or(u64::MAX);
        self.events
            .newest_first(until, self.filter.as_deref(), self.benign)
    }

    /// Whether the list stands still, and how many drops came since.
    pub(super) fn paused(&self) -> Option<u64> {
        self.paused_at.map(|at| self.events.next() - at)
    }

    /// While the list stands still: how many more drops it would show.
    pub(super) fn waiting(&self) -> Option<usize> {
        self.paused_at.map(|_| {
            let all = self
                .events
                .newest_first(u64::MAX, self.filter.as_deref(), self.benign);
            all.len() - self.events().len()
        })
    }

    /// Index of the selected cause among [`State::causes`].
    pub(super) fn selected_cause(&self, causes: &[&Total]) -> usize {
        self.selected_cause
            .as_ref()
            .and_then(|slug| causes.iter().position(|total| total.cause == *slug))
            .unwrap_or_default()
    }

    /// Index of the selected drop among [`State::events`]; one that was given up passes on to the next older.
    pub(super) fn selected_event(&self, events: &[&Event]) -> usize {
        let Some(number) = self.selected_event else {
            return 0;
        };
        events
            .iter()
            .position(|event| event.number <= number)
            .unwrap_or(events.len().saturating_sub(1))
    }

    /// What a key does.
    pub(super) fn key(&mut self, key: KeyEvent) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::None;
        }
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return self.quit();
        }
        // With Ctrl or Alt a key means something else: Ctrl-Space, as a NUL byte reads, is no wish to pause.
        if key
            .modifiers
            .intersects(KeyModifiers::CONTROL | KeyModifiers::ALT)
        {
            return Action::None;
        }
        if self.popup.is_some() {
            return self.key_in_popup(key.code);
        }
        match key.code {
            KeyCode::Char('q') => return self.quit(),
            KeyCode::Char(' ') => self.toggle_pause(),
            KeyCode::Tab => self.focus_next(true),
            KeyCode::BackTab => self.focus_next(false),
            KeyCode::Enter | KeyCode::Char('f') => self.filter_by_selection(),
            KeyCode::Esc => self.clear_filter(),
            KeyCode::Char('b') => self.benign = !self.benign,
            KeyCode::Char('c') => self.open(Popup::Coverage),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.open(Popup::Help),
            code => self.move_by_key(code),
        }
        Action::None
    }

    fn quit(&mut self) -> Action {
        self.quitting = true;
        Action::Quit
    }

    fn key_in_popup(&mut self, code: KeyCode) -> Action {
        match code {
            KeyCode::Up | KeyCode::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.scroll += 1,
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(PAGE),
            KeyCode::PageDown => self.scroll += PAGE,
            _ => {
                self.popup = None;
                self.scroll = 0;
            }
        }
        Action::None
    }

    fn open(&mut self, popup: Popup) {
        self.popup = Some(popup);
        self.scroll = 0;
    }

    fn toggle_pause(&mut self) {
        self.paused_at = match self.paused_at {
            Some(_) => None,
            None => Some(self.events.next()),
        };
        self.events.freeze(self.paused_at.is_some());
    }

    fn focus_next(&mut self, forward: bool) {
        self.focus = match (self.focus, forward) {
            (Focus::Causes, true) | (Focus::Detail, false) => Focus::Events,
            (Focus::Events, true) | (Focus::Causes, false) => Focus::Detail,
            (Focus::Detail, true) | (Focus::Events, false) => Focus::Causes,
        };
        self.scroll = 0;
    }

    /// Only the drops of the cause that is selected, in the causes or by the selected drop.
    fn filter_by_selection(&mut self) {
        let slug = match self.focus {
            Focus::Causes => {
                let causes = self.causes();
                causes
                    .get(self.selected_cause(&causes))
                    .map(|total| total.cause.clone())
            }
            Focus::Events | Focus::Detail => {
                let events = self.events();
                events
                    .get(self.selected_event(&events))
                    .map(|event| event.drop.cause.clone())
            }
        };
        if slug.is_some() {
            self.filter = slug;
            self.scroll = 0;
        }
    }

    fn clear_filter(&mut self) {
        self.filter = None;
        self.selected_event = None;
        self.scroll = 0;
    }

    fn move_by_key(&mut self, code: KeyCode) {
        let step = match code {
            KeyCode::Up | KeyCode::Char('k') => Step::Back(1),
            KeyCode::Down | KeyCode::Char('j') => Step::On(1),
            KeyCode::PageUp => Step::Back(PAGE),
            KeyCode::PageDown => Step::On(PAGE),
            KeyCode::Home | KeyCode::Char('g') => Step::First,
            KeyCode::End | KeyCode::Char('G') => Step::Last,
            _ => return,
        };
        match self.focus {
            Focus::Causes => {
                let causes = self.causes();
                let index = step.from(self.selected_cause(&causes), causes.len());
                self.selected_cause = causes.get(index).map(|total| total.cause.clone());
                self.scroll = 0;
            }
            Focus::Events => {
                let events = self.events();
                let index = step.from(self.selected_event(&events), events.len());
                // The top follows what comes.
                self.selected_event = events.get(index).filter(|_| index > 0).map(|event| event.number);
                self.scroll = 0;
            }
            Focus::Detail => self.scroll = step.from(self.scroll, usize::MAX),
        }
    }
}

/// A move in a list.
#[derive(Clone, Copy)]
enum Step {
    Back(usize),
    On(usize),
    First,
    Last,
}

impl Step {
    fn from(self, index: usize, len: usize) -> usize {
        let last = len.saturating_sub(1);
        match self {
            Self::Back(by) => index.saturating_sub(by),
            Self::On(by) => index.saturating_add(by).min(last),
            Self::First => 0,
            // The end of a scrolled text is not known here; the view stops at its last line.
            Self::Last if len == usize::MAX => u16::MAX.into(),
            Self::Last => last,
        }
    }
}

/// Seconds from one RFC 3339 time to a later one.
fn seconds_between(earlier: &str, later: &str) -> Option<f64> {
    let earlier: jiff::Timestamp = earlier.parse().ok()?;
    let later: jiff::Timestamp = later.parse().ok()?;
    let seconds = (later.as_nanosecond() - earlier.as_nanosecond()) as f64 / 1e9;
    (seconds > 0.0).then_some(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{diagnose::Drop, sink::samples};

    fn press(state: &mut State, code: KeyCode) -> Action {
        state.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn drop_of(cause: &str, benign: bool) -> Record {
        Record::Drop(Box::new(Drop {
            cause: cause.into(),
            benign,
            ..samples::accept_queue()
        }))
    }

    fn running() -> State {
        let mut state = State::new(false);
        for record in &samples::records()[..4] {
            state.apply(record);
        }
        state
    }

    fn causes(state: &State) -> Vec<String> {
        state.causes().iter().map(|total| total.cause.clone()).collect()
    }

    #[test]
    fn totals_come_from_counts_alone() {
        let mut state = running();
        assert_eq!(causes(&state), ["accept-queue-full", "conntrack-insert-race"]);
        assert_eq!(state.packets(), (134, 40));
        state.apply(&drop_of("accept-queue-full", false));
        assert_eq!(state.packets(), (134, 40));
        press(&mut state, KeyCode::Char('b'));
        assert_eq!(
            causes(&state),
            ["accept-queue-full", "tcp-duplicate", "conntrack-insert-race"]
        );
    }

    #[test]
    fn rates_are_per_second_of_the_totals() {
        let mut state = running();
        let mut later = samples::counts();
        later.time = "2026-01-02T03:04:17.000000000Z".into();
        later.causes[0].packets += 50;
        state.apply(&Record::Counts(later));
        let causes = state.causes();
        assert!((causes[0].rate() - 25.0).abs() < 1e-9);
        assert!(causes[1].rate().abs() < 1e-9);
        for second in 0..100 {
            let mut counts = samples::counts();
            counts.time = format!("2026-01-02T03:{:02}:{:02}.0Z", 5 + second / 60, second % 60);
            state.apply(&Record::Counts(counts));
        }
        assert_eq!(state.causes()[0].rates.len(), RATES);
    }

    #[test]
    fn a_cause_of_several_netns_is_one_row() {
        let mut counts = samples::counts();
        let mut other = counts.causes[0].clone();
        other.netns = 1;
        other.packets = 5;
        counts.causes.push(other);
        let mut state = State::new(false);
        state.apply(&Record::Counts(counts));
        assert_eq!(state.causes()[0].packets, 135);
        assert_eq!(state.causes().len(), 2);
    }

    #[test]
    fn a_pause_holds_the_list_and_counts_on() {
        let mut state = running();
        let before = state.events().len();
        press(&mut state, KeyCode::Char(' '));
        state.apply(&drop_of("accept-queue-full", false));
        assert_eq!(state.events().len(), before);
        assert_eq!(state.paused(), Some(1));
        assert_eq!(state.waiting(), Some(1));
        press(&mut state, KeyCode::Char(' '));
        assert_eq!(state.events().len(), before + 1);
        assert_eq!(state.paused(), None);
    }

    #[test]
    fn a_flood_is_bounded() {
        let mut state = State::with_room(false, 50);
        state.apply(&drop_of("rare", false));
        for _ in 0..1000 {
            state.apply(&drop_of("flood", false));
        }
        assert_eq!(state.events().len(), 50);
        assert!(state.events().iter().any(|event| event.drop.cause == "rare"));
    }

    #[test]
    fn the_selection_stays_on_its_drop() {
        let mut state = State::new(false);
        for _ in 0..5 {
            state.apply(&drop_of("a", false));
        }
        let selected = |state: &State| {
            let events = state.events();
            events[state.selected_event(&events)].number
        };
        assert_eq!(selected(&state), 4);
        press(&mut state, KeyCode::Down);
        assert_eq!(selected(&state), 3);
        state.apply(&drop_of("a", false));
        assert_eq!(selected(&state), 3);
        press(&mut state, KeyCode::Home);
        state.apply(&drop_of("a", false));
        assert_eq!(selected(&state), 6, "the top follows");
        press(&mut state, KeyCode::End);
        assert_eq!(selected(&state), 0);
        press(&mut state, KeyCode::Down);
        assert_eq!(selected(&state), 0);
    }

    #[test]
    fn a_selected_drop_that_was_given_up_passes_on() {
        let mut state = State::with_room(false, 3);
        for _ in 0..3 {
            state.apply(&drop_of("a", false));
        }
        press(&mut state, KeyCode::End);
        for _ in 0..3 {
            state.apply(&drop_of("a", false));
        }
        let events = state.events();
        assert_eq!(state.selected_event(&events), 2);
    }

    #[test]
    fn the_filter_follows_the_focus() {
        let mut state = running();
        assert_eq!(state.focus, Focus::Events);
        press(&mut state, KeyCode::Enter);
        assert_eq!(state.filter.as_deref(), Some("accept-queue-full"));
        press(&mut state, KeyCode::Esc);
        assert_eq!(state.filter, None);
        press(&mut state, KeyCode::BackTab);
        assert_eq!(state.focus, Focus::Causes);
        press(&mut state, KeyCode::Char('j'));
        press(&mut state, KeyCode::Char('f'));
        assert_eq!(state.filter.as_deref(), Some("conntrack-insert-race"));
        assert!(state.events().is_empty());
        press(&mut state, KeyCode::Esc);
        assert_eq!(state.events().len(), 1);
    }

    #[test]
    fn the_selected_cause_keeps_its_slug_when_the_order_changes() {
        let mut state = running();
        press(&mut state, KeyCode::BackTab);
        press(&mut state, KeyCode::Down);
        let mut counts = samples::counts();
        counts.causes[1].packets = 10_000;
        state.apply(&Record::Counts(counts));
        let causes = state.causes();
        assert_eq!(
            causes[state.selected_cause(&causes)].cause,
            "conntrack-insert-race"
        );
        assert_eq!(state.selected_cause(&causes), 0);
    }

    #[test]
    fn benign_drops_are_remembered_but_hidden() {
        let mut state = running();
        assert_eq!(state.events().len(), 1);
        press(&mut state, KeyCode::Char('b'));
        assert_eq!(state.events().len(), 2);
    }

    #[test]
    fn quit_and_popups() {
        let mut state = running();
        assert_eq!(press(&mut state, KeyCode::Char('c')), Action::None);
        assert_eq!(state.popup, Some(Popup::Coverage));
        press(&mut state, KeyCode::Down);
        assert_eq!(state.scroll, 1);
        assert_eq!(press(&mut state, KeyCode::Char('q')), Action::None);
        assert_eq!(state.popup, None);
        press(&mut state, KeyCode::Char('?'));
        assert_eq!(state.popup, Some(Popup::Help));
        press(&mut state, KeyCode::Esc);
        assert_eq!(press(&mut state, KeyCode::Char('q')), Action::Quit);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(running().key(control_c), Action::Quit);
    }

    #[test]
    fn keys_with_control_or_alt_do_nothing() {
        let mut state = running();
        for modifiers in [KeyModifiers::CONTROL, KeyModifiers::ALT] {
            for code in [' ', 'q', 'f', 'b'] {
                let key = KeyEvent::new(KeyCode::Char(code), modifiers);
                assert_eq!(state.key(key), Action::None);
            }
        }
        assert_eq!(state.paused(), None);
        assert_eq!(state.filter, None);
        assert!(!state.benign);
    }

    #[test]
    fn keys_on_an_empty_view_do_nothing() {
        let mut state = State::new(false);
        for focus in [Focus::Causes, Focus::Events, Focus::Detail] {
            state.focus = focus;
            for code in [
                KeyCode::Up,
                KeyCode::Down,
                KeyCode::PageDown,
                KeyCode::End,
                KeyCode::Home,
                KeyCode::Enter,
            ] {
                assert_eq!(press(&mut state, code), Action::None);
            }
        }
        assert_eq!(state.filter, None);
    }
}
