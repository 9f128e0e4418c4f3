//! How the state looks. Nothing here changes it.

use std::time::Duration;

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Cell, Clear, Paragraph, Row, Table},
};

use super::{
    detail::{self, Look},
    events::Event,
    state::{Focus, Popup, State, Total},
};
use crate::{
    diagnose::Verdict,
    sink::{text::Paint, words},
};

/// Columns from which the detail stands beside the lists.
const WIDE: u16 = 110;
/// Rows, without header and footer, from which all panes are shown.
const TALL: u16 = 14;
/// Rows of the detail pane from which each value of evidence has a line of its own.
const ROOMY: u16 = 18;
/// Below this, nothing fits.
const SMALLEST: (u16, u16) = (24, 5);
/// Rates that the trend column shows.
const TREND: usize = 10;
/// Columns that a slug takes; the longest has 24 letters.
const SLUG: u16 = 24;

/// Colours, unless `NO_COLOR` forbids them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Theme {
    colour: bool,
}

impl Theme {
    /// As the environment asks.
    pub(super) fn from_environment() -> Self {
        Self {
            colour: Paint::for_terminal(true) == Paint::Colour,
        }
    }

    fn fg(self, colour: Color) -> Style {
        if self.colour {
            Style::new().fg(colour)
        } else {
            Style::new()
        }
    }

    fn verdict(self, verdict: Verdict) -> Style {
        self.fg(match verdict {
            Verdict::Dropped => Color::Red,
            Verdict::Rejected => Color::Yellow,
            Verdict::Misdelivered => Color::Magenta,
        })
    }

    fn warning(self, warns: bool) -> Style {
        if warns {
            self.fg(Color::Yellow).add_modifier(Modifier::BOLD)
        } else {
            Style::new()
        }
    }

    fn look(self, look: Look) -> Style {
        match look {
            Look::Title => Style::new().add_modifier(Modifier::BOLD),
            Look::Heading => self.fg(Color::Cyan).add_modifier(Modifier::BOLD),
            Look::Plain => Style::new(),
            Look::Command => self.fg(Color::Green),
            Look::Faint => Style::new().add_modifier(Modifier::DIM),
        }
    }
}

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State, elapsed: Duration, theme: Theme) {
    let area = frame.area();
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        frame.render_widget(Paragraph::new("droptrace: window too small"), area);
        return;
    }
    let [header, body, footer] =
        Layout::vertical([Constraint::Length(2), Constraint::Min(0), Constraint::Length(1)]).areas(area);
    draw_header(frame, header, state, elapsed, theme);
    for (focus, pane) in panes(body, state) {
        match focus {
            Focus::Causes => draw_causes(frame, pane, state, theme),
            Focus::Events => draw_events(frame, pane, state, theme),
            Focus::Detail => draw_detail(frame, pane, state, theme),
        }
    }
    draw_footer(frame, footer, theme);
    match state.popup {
        Some(Popup::Coverage) => {
            draw_popup(frame, body, "Coverage", &detail::of_coverage(state), state, theme);
        }
        Some(Popup::Help) => draw_popup(frame, body, "Keys", &detail::of_help(), state, theme),
        None => {}
    }
}

/// Which panes there is room for, and where.
fn panes(body: Rect, state: &State) -> Vec<(Focus, Rect)> {
    if body.height < TALL {
        return vec![(state.focus, body)];
    }
    if body.width >= WIDE {
        let [left, detail] =
            Layout::horizontal([Constraint::Percentage(60), Constraint::Percentage(40)]).areas(body);
        let [causes, events] =
            Layout::vertical([Constraint::Percentage(40), Constraint::Percentage(60)]).areas(left);
        return vec![
            (Focus::Causes, causes),
            (Focus::Events, events),
            (Focus::Detail, detail),
        ];
    }
    // Frame and head take three rows; the detail needs the room most.
    let causes = (state.causes().len() as u16 + 3).min(body.height * 3 / 10).max(5);
    let [causes, events, detail] = Layout::vertical([
        Constraint::Length(causes),
        Constraint::Length(body.height * 3 / 10),
        Constraint::Min(0),
    ])
    .areas(body);
    vec![
        (Focus::Causes, causes),
        (Focus::Events, events),
        (Focus::Detail, detail),
    ]
}

fn draw_header(frame: &mut Frame<'_>, area: Rect, state: &State, elapsed: Duration, theme: Theme) {
    let [first, second] = Layout::vertical([Constraint::Length(1), Constraint::Length(1)]).areas(area);
    let (lost, benign) = state.packets();
    let (what, coverage, gaps) = match &state.coverage {
        Some(coverage) => (
            format!(
                " {} · Linux {} · {}",
                coverage.version,
                coverage.kernel,
                words::scope(coverage)
            ),
            words::coverage(coverage),
            !coverage.gaps.is_empty(),
        ),
        None => (
            " · attaching the hooks".to_owned(),
            "coverage not known yet".to_owned(),
            false,
        ),
    };
    let mut right = words::elapsed(elapsed.as_secs());
    if state.quitting {
        right.insert_str(0, "ENDING · ");
    } else if let Some(more) = state.paused() {
        right.insert_str(0, &format!("PAUSED, {more} new · "));
    }
    let right = Line::from(right)
        .style(theme.warning(state.paused().is_some()))
        .right_aligned();
    let [left, clock] =
        Layout::horizontal([Constraint::Min(0), Constraint::Length(right.width() as u16 + 1)]).areas(first);
    frame.render_widget(
        Line::from(vec![Span::styled("droptrace", Modifier::BOLD), Span::raw(what)]),
        left,
    );
    frame.render_widget(right, clock);
    let events_lost = state.counts.lost_events + state.counts.uncounted;
    frame.render_widget(
        Line::from(vec![
            Span::styled(
                format!("dropped {lost}"),
                theme.fg(Color::Red).add_modifier(Modifier::BOLD),
            ),
            Span::raw("  "),
            Span::styled(format!("lost {events_lost}"), theme.warning(events_lost > 0)),
            Span::raw("  "),
            Span::styled(coverage, theme.warning(gaps)),
            Span::styled(
                format!(
                    "  benign {benign}{}",
                    if state.benign || benign == 0 {
                        ""
                    } else {
                        " hidden"
                    }
                ),
                theme.look(Look::Faint),
            ),
        ]),
        second,
    );
}

fn draw_footer(frame: &mut Frame<'_>, area: Rect, theme: Theme) {
    const KEYS: [&str; 9] = [
        "q quit",
        "? help",
        "space pause",
        "tab pane",
        "↑↓ move",
        "enter filter",
        "esc all",
        "b benign",
        "c coverage",
    ];
    let mut text = String::new();
    for key in KEYS {
        let more = if text.is_empty() {
            key.to_owned()
        } else {
            format!("  {key}")
        };
        if text.chars().count() + more.chars().count() > usize::from(area.width) {
            break;
        }
        text.push_str(&more);
    }
    frame.render_widget(Line::from(text).style(theme.look(Look::Faint)), area);
}

fn frame_of(title: &str, focused: bool, theme: Theme) -> Block<'static> {
    let style = if focused {
        theme.fg(Color::Cyan).add_modifier(Modifier::BOLD)
    } else {
        theme.look(Look::Faint)
    };
    Block::new()
        .borders(Borders::ALL)
        .border_style(style)
        .title(Span::styled(
            format!("{}{title} ", if focused { "▸" } else { " " }),
            style,
        ))
}

/// Index of the first row to show, so that the selected one is in sight.
fn first_row(selected: usize, rows: u16) -> usize {
    (selected + 1).saturating_sub(usize::from(rows.max(1)))
}

fn selection(focused: bool) -> Style {
    Style::new().add_modifier(if focused {
        Modifier::REVERSED
    } else {
        Modifier::BOLD
    })
}

fn draw_causes(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let causes = state.causes();
    let focused = state.focus == Focus::Causes;
    let block = frame_of("Causes", focused, theme);
    let inner = block.inner(area);
    let selected = state.selected_cause(&causes);
    let first = first_row(selected, inner.height.saturating_sub(1));
    let rows = causes
        .iter()
        .enumerate()
        .skip(first)
        .take(inner.height.into())
        .map(|(index, total)| {
            let mut verdict = vec![total.verdict.name()];
            verdict.extend(total.sampled.then_some("split sampled"));
            verdict.extend(total.benign.then_some("benign"));
            let row = Row::new([
                Cell::from(Line::from(total.packets.to_string()).right_aligned()),
                Cell::from(Line::from(rate(total.rate())).right_aligned()),
                Cell::from(trend(total)),
                Cell::from(total.cause.clone()),
                Cell::from(Span::styled(verdict.join(", "), theme.verdict(total.verdict))),
            ]);
            if index == selected {
                row.style(selection(focused))
            } else {
                row
            }
        });
    let widths = [
        Constraint::Length(9),
        Constraint::Length(6),
        Constraint::Length(TREND as u16),
        Constraint::Length(SLUG),
        Constraint::Min(0),
    ];
    let head = Row::new([
        Cell::from(Line::from("packets").right_aligned()),
        Cell::from(Line::from("per s").right_aligned()),
        Cell::from("trend"),
        Cell::from("cause"),
        Cell::from("verdict"),
    ])
    .style(theme.look(Look::Faint));
    frame.render_widget(Table::new(rows, widths).header(head).block(block), area);
}

/// `0`, `0.3`, `25`, `12k`.
fn rate(per_second: f64) -> String {
    match per_second {
        rate if rate <= 0.0 => "0".to_owned(),
        rate if rate < 10.0 => format!("{rate:.1}"),
        rate if rate < 10_000.0 => format!("{rate:.0}"),
        rate if rate < 10_000_000.0 => format!("{:.0}k", rate / 1e3),
        rate => format!("{:.0}M", rate / 1e6),
    }
}

/// The last rates as bars, the highest full.
fn trend(total: &Total) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let skip = total.rates.len().saturating_sub(TREND);
    let rates: Vec<f64> = total.rates.iter().copied().skip(skip).collect();
    let highest = rates.iter().copied().fold(0.0, f64::max);
    rates
        .into_iter()
        .map(|rate| {
            if highest <= 0.0 || rate <= 0.0 {
                BARS[0]
            } else {
                BARS[((rate / highest * 7.0).ceil() as usize).min(7)]
            }
        })
        .collect()
}

fn draw_events(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let events = state.events();
    let focused = state.focus == Focus::Events;
    let title = match &state.filter {
        Some(filter) => format!("Drops of {filter}"),
        None => "Drops".to_owned(),
    };
    let block = frame_of(&title, focused, theme);
    let inner = block.inner(area);
    if events.is_empty() {
        frame.render_widget(block, area);
        draw_lines(frame, inner, &detail::of_nothing(state), 0, theme);
        return;
    }
    let selected = state.selected_event(&events);
    let first = first_row(selected, inner.height);
    let cause_width = events
        .iter()
        .skip(first)
        .take(inner.height.into())
        .map(|event| event.drop.cause.len())
        .max()
        .unwrap_or_default()
        .min(SLUG.into());
    let rows = events
        .iter()
        .enumerate()
        .skip(first)
        .take(inner.height.into())
        .map(|(index, event)| {
            let row = event_row(event, theme);
            if index == selected {
                row.style(selection(focused))
            } else {
                row
            }
        });
    let widths = [
        Constraint::Length(12),
        Constraint::Length(cause_width as u16),
        Constraint::Min(20),
    ];
    frame.render_widget(Table::new(rows, widths).block(block), area);
}

fn event_row(event: &Event, theme: Theme) -> Row<'static> {
    let drop = &event.drop;
    let times = (drop.packets > 1).then(|| format!("×{}", drop.packets));
    let what: Vec<String> = [Some(words::packet(drop)), times, Some(words::place(drop))]
        .into_iter()
        .flatten()
        .collect();
    Row::new([
        Cell::from(words::clock(&drop.time).to_owned()),
        Cell::from(Span::styled(drop.cause.clone(), theme.verdict(drop.verdict))),
        Cell::from(what.join(" ")),
    ])
}

fn draw_detail(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let focused = state.focus == Focus::Detail;
    let (title, lines) = detail_of(state, area.height < ROOMY);
    let block = frame_of(&title, focused, theme);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let scroll = if focused { state.scroll } else { 0 };
    draw_lines(frame, inner, &lines, scroll, theme);
}

/// The cause, while the causes are looked at, else the drop.
fn detail_of(state: &State, compact: bool) -> (String, Vec<detail::Line>) {
    if state.focus == Focus::Causes {
        let causes = state.causes();
        if let Some(total) = causes.get(state.selected_cause(&causes)) {
            return (total.cause.clone(), detail::of_cause(state, &total.cause));
        }
    }
    let events = state.events();
    match events.get(state.selected_event(&events)) {
        Some(event) => (event.drop.cause.clone(), detail::of_drop(&event.drop, compact)),
        None => ("Detail".to_owned(), Vec::new()),
    }
}

fn draw_popup(
    frame: &mut Frame<'_>,
    body: Rect,
    title: &str,
    lines: &[detail::Line],
    state: &State,
    theme: Theme,
) {
    let width = (body.width * 9 / 10).clamp(body.width.min(40), 90);
    let needed = wrap(lines, width.saturating_sub(2), theme).len() as u16 + 2;
    let height = needed.min(body.height);
    let area = Rect {
        x: body.x + (body.width - width) / 2,
        y: body.y + (body.height - height) / 2,
        width,
        height,
    };
    let block = frame_of(&format!("{title}, any key closes"), true, theme);
    let inner = block.inner(area);
    frame.render_widget(Clear, area);
    frame.render_widget(block, area);
    draw_lines(frame, inner, lines, state.scroll, theme);
}

/// Draws wrapped lines from `scroll` on, at most to the last line.
fn draw_lines(frame: &mut Frame<'_>, area: Rect, lines: &[detail::Line], scroll: usize, theme: Theme) {
    let wrapped = wrap(lines, area.width, theme);
    let last = wrapped.len().saturating_sub(area.height.into());
    let shown: Vec<Line<'_>> = wrapped
        .into_iter()
        .skip(scroll.min(last))
        .take(area.height.into())
        .collect();
    frame.render_widget(Paragraph::new(shown), area);
}

fn wrap(lines: &[detail::Line], width: u16, theme: Theme) -> Vec<Line<'static>> {
    lines
        .iter()
        .flat_map(|line| {
            let indent = " ".repeat(line.indent.min(usize::from(width) / 4));
            let options = textwrap::Options::new(usize::from(width.max(1))).subsequent_indent(&indent);
            textwrap::wrap(&line.text, options)
                .into_iter()
                .map(|part| Line::from(part.into_owned()).style(theme.look(line.look)))
                .collect::<Vec<_>>()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::{
        diagnose::{Drop, Record, Verdict},
        sink::samples,
    };

    fn render(state: &State, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let theme = Theme { colour: true };
        terminal
            .draw(|frame| draw(frame, state, Duration::from_secs(83), theme))
            .unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn an_empty_list_that_stands_still_says_how_many_drops_wait() {
        let mut state = State::new(false);
        state.apply(&Record::Coverage(samples::coverage()));
        state.key(KeyCode::Char(' ').into());
        for record in &samples::records()[1..4] {
            state.apply(record);
        }
        let text = render(&state, 80, 24);
        assert!(text.contains("Paused: 1 new drop not listed yet."), "{text}");
        assert!(text.contains("space resumes"), "{text}");
        assert!(!text.contains("full event"), "{text}");
    }

    fn busy() -> State {
        let mut state = State::new(false);
        for record in &samples::records()[..4] {
            state.apply(record);
        }
        for second in 16..22_u64 {
            let mut counts = samples::counts();
            counts.time = format!("2026-01-02T03:04:{second}.000000000Z");
            counts.causes[0].packets += (second - 15) * (second - 15) * 3;
            state.apply(&Record::Counts(counts));
            state.apply(&Record::Drop(Box::new(Drop {
                time: format!("2026-01-02T03:04:{second}.250000000Z"),
                sport: Some(40_000 + second as u16),
                verdict: if second % 2 == 0 {
                    Verdict::Dropped
                } else {
                    Verdict::Rejected
                },
                ..samples::accept_queue()
            })));
        }
        state
    }

    fn press(state: &mut State, code: KeyCode) {
        state.key(KeyEvent::new(code, KeyModifiers::NONE));
    }

    fn watching() -> State {
        let mut state = State::new(false);
        state.apply(&samples::records()[0]);
        state
    }

    #[test]
    fn first_screen() {
        insta::assert_snapshot!(render(&watching(), 80, 24));
    }

    #[test]
    fn busy_narrow() {
        insta::assert_snapshot!(render(&busy(), 80, 24));
    }

    #[test]
    fn busy_wide() {
        insta::assert_snapshot!(render(&busy(), 120, 40));
    }

    #[test]
    fn causes_in_focus() {
        let mut state = busy();
        press(&mut state, KeyCode::BackTab);
        insta::assert_snapshot!(render(&state, 120, 40));
    }

    #[test]
    fn filtered_and_paused() {
        let mut state = busy();
        press(&mut state, KeyCode::Enter);
        press(&mut state, KeyCode::Char(' '));
        state.apply(&samples::records()[1]);
        press(&mut state, KeyCode::Down);
        insta::assert_snapshot!(render(&state, 80, 24));
    }

    #[test]
    fn coverage_popup() {
        let mut state = busy();
        press(&mut state, KeyCode::Char('c'));
        insta::assert_snapshot!(render(&state, 80, 24));
    }

    #[test]
    fn help_popup() {
        let mut state = busy();
        press(&mut state, KeyCode::Char('?'));
        insta::assert_snapshot!(render(&state, 80, 24));
    }

    #[test]
    fn low_window_shows_the_focused_pane() {
        insta::assert_snapshot!(render(&busy(), 60, 10));
    }

    #[test]
    fn no_size_and_no_focus_panics() {
        let mut state = busy();
        for popup in [None, Some(Popup::Help), Some(Popup::Coverage)] {
            state.popup = popup;
            for focus in [Focus::Causes, Focus::Events, Focus::Detail] {
                state.focus = focus;
                state.scroll = 1000;
                for width in (1..130).step_by(16) {
                    for height in (1..45).step_by(3) {
                        render(&state, width, height);
                    }
                }
            }
        }
    }

    #[test]
    fn no_slug_is_cut() {
        for cause in crate::diagnose::catalogue() {
            assert!(cause.slug.len() <= SLUG.into(), "{}", cause.slug);
        }
    }

    #[test]
    fn loss_and_coverage_are_seen_in_every_usable_size() {
        for (width, height) in [(60, 6), (80, 24), (120, 40)] {
            let text = render(&busy(), width, height);
            assert!(text.contains("lost 9"), "{text}");
            assert!(text.contains("coverage 2/3 hooks, 1 gap"), "{text}");
        }
    }

    #[test]
    fn a_name_with_control_characters_cannot_reach_the_terminal() {
        let mut state = watching();
        let mut drop = samples::accept_queue();
        drop.owner.as_mut().unwrap().comm = "\x1b[31mred".into();
        drop.netns_name = Some("a\nb".into());
        state.apply(&Record::Drop(Box::new(drop)));
        assert!(!render(&state, 120, 40).contains('\x1b'));
    }

    #[test]
    fn rates_are_short() {
        for (given, text) in [
            (0.0, "0"),
            (0.25, "0.2"),
            (25.4, "25"),
            (12_345.0, "12k"),
            (2e7, "20M"),
        ] {
            assert_eq!(rate(given), text);
        }
    }
}
