//! A live run: plan, hooks, events, facts, labels, sink.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    io,
    os::unix::process::ExitStatusExt as _,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use droptrace_common::{
    BriefEvent, FieldId, SCOPE_ADDRESSES, SCOPE_NETNS, SCOPE_PORT, SCOPE_PROTOCOL, Sampling, Scope, Site,
    bits,
};
use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesOrdered};
use tokio::{
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
    sync::Notify,
    task::JoinHandle,
    time::{MissedTickBehavior, interval},
};

use super::{
    late::LateNames,
    limits,
    options::{self, Opened, Output, RunOptions, ScopeArgs},
    problem::Problem,
};
use crate::{
    bpf,
    context::{self, Context, ContextError, LostSyns, PodRequest, Pods, ScopeRequest},
    diagnose::{
        self, BriefLine, Cause, Coverage, Facts, Family, Need, RawEvent, Reconciled, Record, ScopeText,
        Signature, Summary, SynUnanswered, classify,
    },
    plan::{
        self, LoadOptions, Loaded, ModuleLayoutSource, ModuleWatch, Plan, PlanError, ProbeOptions, Symbols,
        detach,
    },
    sink::{Origin, Sink},
    source::{
        CountReader, KernelSets, Labels, Ledger, Ring, log,
        proof::{self, Prover},
    },
};

/// How often totals are told.
const COUNTS_EVERY: Duration = Duration::from_secs(10);
/// How often totals reach a full-screen view, and sinks are told that time passes.
const TICK: Duration = Duration::from_secs(1);
/// Events whose facts are being gathered at the same time; more stay in the ring.
const PENDING_MAX: usize = 1024;
/// Exit status where the run ended before its command, as `timeout` gives it.
const NOT_ENDED: u8 = 124;
/// Places of frees in modules that are looked at; a kernel has few.
const PLACES_MAX: usize = 1_024;
/// Events taken from the ring at once.
const BATCH: usize = 512;
/// Bytes of the ring of drops in short: more than come in the time in which they gather.
const BRIEFS: u32 = 4 << 20;
/// How long the drops of a command that ended may still come in.
const AFTER_COMMAND: Duration = Duration::from_millis(700);
/// From a counter of the kernel to the count of the hook that sees the same drop, at most.
const COUNTED: Duration = Duration::from_millis(20);
/// How long, at the end, events may wait for their facts.
const LAST_EVENTS: Duration = Duration::from_secs(1);

/// Runs until the user, the clock or the command ends it. The exit status is the command's, where there is one.
///
/// # Errors
/// Something that the run cannot do without failed; the message names the next step.
pub fn run(options: &RunOptions) -> Result<ExitCode> {
    let object = bpf::OBJECT.ok_or_else(|| {
        Problem::failure(
            "this droptrace was built without its BPF object, so it cannot watch a kernel",
            "build it with `cargo xtask build`; the other commands work as they are",
        )
    })?;
    limits::leave_room()?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(async { Run::start(options, object)?.until_end().await })
}

/// A labelled event on its way to the sink.
struct Labelled {
    event: RawEvent,
    facts: Box<Facts>,
}

/// A run in progress.
struct Run<'a> {
    options: &'a RunOptions,
    plan: Plan,
    loaded: Loaded,
    context: Context,
    ring: Ring<RawEvent>,
    /// Drops without a full event, where each is asked for.
    briefs: Option<Ring<BriefEvent>>,
    /// What they are.
    labels: Labels,
    /// The line of the last one.
    line: BriefLine,
    reader: CountReader,
    ledger: Ledger,
    sink: Box<dyn Sink>,
    quit: Option<Arc<Notify>>,
    started: Instant,
    pending: FuturesOrdered<BoxFuture<'static, Labelled>>,
    /// SYNs that were seen lost here.
    lost_syns: LostSyns,
    /// Finds drops that only counters tell.
    prover: Prover,
    /// What drops were told without a name.
    late: LateNames,
    /// The namespaces in scope, as last told.
    scoped: Option<BTreeSet<u32>>,
    /// What context could not do, as last told.
    problems: BTreeMap<String, String>,
    /// Reads the kernel's symbols where attaching did without; until they are there, drops that rest on them wait.
    symbols: Option<JoinHandle<Result<Symbols, PlanError>>>,
    /// Events that wait for them, in order.
    nameless: Vec<RawEvent>,
    /// Places of frees outside the kernel proper that were seen.
    places: HashSet<u64>,
    /// Why the sink takes no more, once it does not.
    ended: Option<&'static str>,
}

impl<'a> Run<'a> {
    /// Attaches the hooks and opens the output.
    fn start(options: &'a RunOptions, object: &[u8]) -> Result<Self> {
        let request = ScopeRequest {
            netns: options.scope.netns.clone(),
            pids: options.scope.pid.into_iter().collect(),
            pods: options.pods.clone(),
            addresses: options.scope.addr.clone(),
        };
        check_scope(&request)?;
        let pods = find_pods(&options.pods)?;
        let mut plan = Plan::probe(&ProbeOptions {
            hide_symbols: options.hide_symbols.clone(),
            ..ProbeOptions::default()
        })?;
        let load = LoadOptions {
            scope: scope_of(options),
            ipvs: options.ipvs,
            log: log::wanted(),
            sampling: if options.every_drop {
                Sampling::EVERY
            } else {
                Sampling::DEFAULT
            },
            map_entries: if options.every_drop {
                vec![("BRIEFS", BRIEFS)]
            } else {
                Vec::new()
            },
        };
        let mut loaded = plan::load(&plan, object, &load)?;
        if log::wanted() {
            log::follow(&mut loaded.ebpf)?;
        }
        let ring = Ring::of_events(&mut loaded.ebpf)?;
        let briefs = options
            .every_drop
            .then(|| Ring::of_briefs(&mut loaded.ebpf))
            .transpose()?;
        let reader = CountReader::open(&mut loaded.ebpf)?;
        let sets = KernelSets::open(&mut loaded.ebpf)?;
        // Before the hooks, so that the first drop finds the sets filled.
        let context = Context::start(&request, pods, Box::new(sets))?;
        if context.ipvs_needs_entry_hook() {
            loaded.want_ipvs(&plan, true);
        }
        loaded.attach(&mut plan)?;
        context.expect_questions();
        let ledger = Ledger::new(plan.symbols.clone(), plan.reasons.clone());
        let Opened { sink, quit } = options.open()?;
        Ok(Self {
            options,
            plan,
            loaded,
            context,
            ring,
            briefs,
            labels: Labels::default(),
            line: BriefLine::default(),
            reader,
            ledger,
            sink,
            quit,
            started: Instant::now(),
            pending: FuturesOrdered::new(),
            lost_syns: LostSyns::default(),
            prover: Prover::default(),
            late: LateNames::default(),
            scoped: None,
            problems: BTreeMap::new(),
            symbols: None,
            nameless: Vec::new(),
            places: HashSet::new(),
            ended: None,
        })
    }

    /// Sees drops until something ends the run.
    async fn until_end(mut self) -> Result<ExitCode> {
        let mut modules = ModuleWatch::new();
        let mut ipvs = self.context.ipvs_entry_hook_changes();
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let mut ask_counts = signal(SignalKind::user_defined1())?;
        let mut counts = interval(COUNTS_EVERY);
        counts.set_missed_tick_behavior(MissedTickBehavior::Delay);
        counts.reset();
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let full_screen = self.options.output == Output::Tui;
        let quit = self.quit.clone().unwrap_or_default();

        self.problems = self.context.problems();
        self.tell_coverage()?;
        let mut child = self.spawn_command()?;
        if !self.plan.has_symbols() {
            self.symbols = Some(tokio::task::spawn_blocking(self.plan.symbol_reader()));
        }
        let mut status = None;
        let deadline = self
            .options
            .scope
            .duration
            .map(|duration| tokio::time::Instant::now() + duration);
        let mut command_over = None;
        let ended = loop {
            let flushed = self.sink.flush();
            self.accept(flushed)?;
            if let Some(ended) = self.ended {
                break ended;
            }
            tokio::select! {
                biased;
                _ = interrupt.recv() => break "interrupted",
                _ = terminate.recv() => break "terminated",
                _ = hangup.recv() => break "terminated",
                () = quit.notified() => break "quit",
                () = reached(deadline) => break "duration",
                () = reached(command_over) => break "command",
                exit = ended_child(&mut child) => {
                    status = Some(exit?);
                    child = None;
                    command_over = Some(tokio::time::Instant::now() + AFTER_COMMAND);
                }
                found = found(&mut self.symbols) => self.name_by(found?)?,
                () = modules.changed(), if self.symbols.is_none() => self.modules_changed()?,
                Some(labelled) = self.pending.next(), if !self.pending.is_empty() => self.deliver(&labelled)?,
                events = self.ring.read(BATCH), if self.has_room() => {
                    for event in events.context("cannot read the ring buffer")? {
                        self.take_from_ring(event)?;
                    }
                }
                events = read_some(&mut self.briefs), if self.symbols.is_none() => {
                    self.take_briefs(&events.context("cannot read the ring buffer")?)?;
                }
                Ok(()) = ipvs.changed() => {
                    let wanted = self.options.ipvs || *ipvs.borrow_and_update();
                    if self.loaded.want_ipvs(&self.plan, wanted) {
                        self.tell_coverage()?;
                    }
                }
                _ = ask_counts.recv(), if self.symbols.is_none() => self.tell_counts()?,
                _ = counts.tick(), if self.symbols.is_none() => self.tell_counts()?,
                _ = tick.tick(), if self.symbols.is_none() => {
                    self.tell_problems()?;
                    self.tell_names()?;
                    self.take_proven()?;
                    if full_screen {
                        self.tell_counts()?;
                    }
                    let ticked = self.sink.tick();
                    self.accept(ticked)?;
                    self.loaded.prepare_next();
                }
            }
        };
        self.finish(ended).await?;
        if let Some(mut child) = child {
            // A Ctrl-C of the terminal ended both.
            status = child.try_wait().context("cannot wait for the command")?;
            if status.is_none() {
                let pid = child
                    .id()
                    .map_or_else(String::new, |pid| format!(", process {pid}"));
                eprintln!("droptrace: the command{pid}, has not ended; it is left running");
                return Ok(ExitCode::from(NOT_ENDED));
            }
        }
        Ok(match status {
            Some(status) => exit_code(status),
            None => ExitCode::SUCCESS,
        })
    }

    /// Names what the kernel tells by these symbols from now on.
    fn name_by(&mut self, symbols: Symbols) -> Result<()> {
        self.symbols = None;
        let changed = self.loaded.found_symbols(&mut self.plan, symbols);
        self.name_anew();
        if changed {
            self.tell_coverage()?;
        }
        for event in std::mem::take(&mut self.nameless) {
            self.take_from_ring(event)?;
        }
        Ok(())
    }

    /// Whether more events can be taken from the ring.
    fn has_room(&self) -> bool {
        self.pending.len() < PENDING_MAX && self.nameless.len() < PENDING_MAX
    }

    /// Takes an event, at once unless its label rests on symbols that are not there yet.
    fn take_from_ring(&mut self, event: RawEvent) -> Result<()> {
        if self.symbols.is_some() {
            let reason = self.reason(&event);
            if diagnose::rests_on_symbols(&event, reason.as_deref()) {
                self.nameless.push(event);
                return Ok(());
            }
        } else {
            self.learn_name(&event)?;
        }
        self.take(event)
    }

    /// What counts and events are is found anew, by the kernel's names as they are now.
    fn name_anew(&mut self) {
        self.labels.forget(&mut self.ledger);
        self.ledger
            .set_names(self.plan.symbols.clone(), self.plan.reasons.clone());
        self.reader.unhush();
    }

    fn modules_changed(&mut self) -> Result<()> {
        let changed = self.loaded.module_changed(&mut self.plan)?;
        self.name_anew();
        if changed {
            self.tell_coverage()?;
        }
        Ok(())
    }

    /// Sees to it that a place in a module, when it is first seen, is named by symbols of the modules that are loaded now:
    /// the kernel tells of a module that came a moment too late for its first drops.
    fn learn_name(&mut self, event: &RawEvent) -> Result<()> {
        let place = event.header.location;
        if place == 0
            || self.plan.symbols.is_of_kernel(place)
            || self.places.len() >= PLACES_MAX
            || !self.places.insert(place)
            || self.plan.symbols_are_current()
        {
            return Ok(());
        }
        self.modules_changed()
    }

    /// Takes drops that no hook saw, and that a counter alone proves.
    fn take_proven(&mut self) -> Result<()> {
        let (moves, missed) = (self.context.counter_moves(), self.context.missed());
        if !counts_all(&self.options.scope) {
            return Ok(());
        }
        for missed in missed {
            self.take_told(proof::missed(&missed, context::monotonic_ns()), missed.frames)?;
        }
        if moves.is_empty() {
            return Ok(());
        }
        // Counters first: what is dropped meanwhile is seen rather than proven.
        let tallied = self.ledger.tallied(&self.reader.read()?);
        for found in self.prover.prove(&moves, &tallied, context::monotonic_ns()) {
            self.take_told(found.event, found.packets)?;
        }
        Ok(())
    }

    /// Takes packets that a counter told.
    fn take_told(&mut self, event: RawEvent, packets: u64) -> Result<()> {
        let mut facts = Facts::default();
        self.name(&event, &mut facts);
        let signature = Signature::of_event(&event, &facts);
        let cause = classify(&signature);
        let verdict = (cause.verdict)(&signature);
        self.ledger
            .told_by_counter(cause.slug, verdict, event.header.netns, packets);
        self.take(event)
    }

    /// Starts to gather an event's facts, unless nobody wants to see it.
    fn take(&mut self, event: RawEvent) -> Result<()> {
        let mut known = Facts::default();
        self.name(&event, &mut known);
        let signature = Signature::of_event(&event, &known);
        let parent = classify(&signature);
        if self.hidden(&event, parent) {
            self.reader.hush(&event.header);
            return Ok(());
        }
        if parent.family == Family::Netfilter {
            let at = event.header.ktime_ns;
            known.clashes_unseen = self.loaded.missed(&self.plan, "nf_ct_resolve_clash", at);
        }
        let sister = parent.refine.and_then(|refine| refine(&event, &known));
        let needs: Vec<_> = parent
            .needs
            .iter()
            .chain(sister.into_iter().flat_map(|sister| sister.needs))
            .filter(|need| **need != Need::Symbols)
            .copied()
            .collect();
        let gather = self.context.facts(&event, known, &needs);
        let mut labelled = async move {
            let facts = gather.await;
            Labelled { event, facts }
        }
        .boxed();
        // In a flood the answers are there already. Those that came earlier go first.
        if self.pending.is_empty()
            && let Some(labelled) = (&mut labelled).now_or_never()
        {
            return self.deliver(&labelled);
        }
        self.pending.push_back(labelled);
        Ok(())
    }

    /// Whether no line is wanted for this event; it is in the totals all the same.
    fn hidden(&self, event: &RawEvent, cause: &Cause) -> bool {
        event.site == Site::ConntrackClashResolved || is_unwanted(self.options, cause)
    }

    /// Hands drops in short to the sink.
    fn take_briefs(&mut self, events: &[BriefEvent]) -> Result<()> {
        let offset = context::offset_ns();
        for event in events.iter().filter(|event| diagnose::has_line(event)) {
            let label = self.labels.of(event, &mut self.ledger);
            let time_ns = i128::from(event.ktime_ns) + offset;
            let record = self.line.write(event, &label, time_ns);
            if let Record::Brief(brief) = record {
                self.lost_syns.note_brief(brief);
            }
            if self.ended.is_none() && !is_unwanted(self.options, label.cause) {
                let taken = self.sink.record(record, Some(Origin::Brief(event, time_ns)));
                self.accept(taken)?;
            }
        }
        Ok(())
    }

    /// The same of all that are there now.
    fn take_briefs_left(&mut self) -> Result<()> {
        let mut left = BRIEFS as usize / size_of::<BriefEvent>();
        while let Some(ring) = &mut self.briefs
            && left > 0
        {
            let events = ring.take(BATCH);
            self.take_briefs(&events)?;
            left = if events.is_empty() {
                0
            } else {
                left.saturating_sub(events.len())
            };
        }
        Ok(())
    }

    /// Fills in the kernel's own names.
    fn name(&self, event: &RawEvent, facts: &mut Facts) {
        facts.reason = self.reason(event);
        facts.location = self.symbol(event.header.location);
        facts.frames = event
            .all(FieldId::Frame)
            .filter_map(|frame| self.symbol(frame))
            .collect();
    }

    fn reason(&self, event: &RawEvent) -> Option<String> {
        match event.site {
            Site::Counter => proof::counter_of(event).map(str::to_owned),
            _ => self.plan.reasons.name(event.header.reason),
        }
    }

    fn symbol(&self, address: u64) -> Option<String> {
        if address == 0 {
            None
        } else {
            self.plan.symbols.name(address).map(str::to_owned)
        }
    }

    /// Labels an event whose facts are there, and hands it to the sink.
    fn deliver(&mut self, labelled: &Labelled) -> Result<()> {
        let Labelled { event, facts } = labelled;
        let signature = Signature::of_event(event, facts);
        let parent = classify(&signature);
        let mut drop = diagnose::diagnose(event, facts);
        if event.has(bits::DIED_AS) {
            diagnose::join_misdelivered(&mut drop);
            return self.tell(
                &Record::Drop(Box::new(drop)),
                Some(Origin::Event { event, facts }),
            );
        }
        self.lost_syns.note(event, &drop);
        if self.briefs.is_some() && event.site != Site::Counter {
            self.labels.learn(event, facts, &drop, &mut self.ledger);
        }
        if drop.cause != parent.slug
            && let Some(cause) = diagnose::cause_by_slug(&drop.cause)
        {
            let before = (parent.slug, (parent.verdict)(&signature));
            self.ledger.refine(
                before,
                (cause.slug, drop.verdict),
                event.header.netns,
                drop.packets,
            );
            // Known only now.
            if self.hidden(event, cause) {
                return Ok(());
            }
        }
        if self.context.asks_for_names() {
            self.late.note(&drop);
        }
        self.tell(
            &Record::Drop(Box::new(drop)),
            Some(Origin::Event { event, facts }),
        )
    }

    fn tell_coverage(&mut self) -> Result<()> {
        let scope = &self.options.scope;
        self.scoped = self.context.scoped_netns();
        let netns = self.scoped.clone().unwrap_or_default();
        let pods = &self.options.pods;
        let coverage = Coverage {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: self.plan.kernel.release.clone(),
            boot_id: self.plan.kernel.boot_id.clone(),
            scope: ScopeText {
                pods: pods.pods.iter().map(ToString::to_string).collect(),
                labels: pods.labels.iter().map(ToString::to_string).collect(),
                containers: pods.containers.clone(),
                netns: netns.iter().copied().collect(),
                netns_names: netns
                    .iter()
                    .map(|&inode| self.context.netns_name(inode))
                    .collect(),
                addresses: scope.addr.iter().map(ToString::to_string).collect(),
                port: scope.port,
                protocol: scope.protocol.and_then(options::protocol_name),
                causes: scope.cause.clone(),
            },
            hooks: self.loaded.states(),
            gaps: self.loaded.gaps(&self.plan),
            notes: notes(&self.plan, &self.problems),
        };
        self.tell(&Record::Coverage(coverage), None)
    }

    /// Tells coverage again when context could not do something that it could before, or pods in scope came or went.
    fn tell_problems(&mut self) -> Result<()> {
        let problems = self.context.problems();
        if problems == self.problems && self.context.scoped_netns() == self.scoped {
            return Ok(());
        }
        self.problems = problems;
        self.tell_coverage()
    }

    /// Tells the names that came later than drops.
    fn tell_names(&mut self) -> Result<()> {
        for name in self.late.news(&self.context) {
            self.tell(&Record::Name(name), None)?;
        }
        Ok(())
    }

    /// Compares the drops that were seen with the kernel's counters.
    async fn reconcile(&mut self) -> Result<Vec<Reconciled>> {
        if !counts_all(&self.options.scope) {
            return Ok(Vec::new());
        }
        // Counters first: what is dropped meanwhile is then explained rather than missed.
        let moved = self.context.counters_moved().await;
        // Who saw a drop that they count has counted it within microseconds.
        tokio::time::sleep(COUNTED).await;
        self.take_proven()?;
        let last = tokio::time::Instant::now() + LAST_EVENTS;
        while let Ok(Some(labelled)) = tokio::time::timeout_at(last, self.pending.next()).await {
            self.deliver(&labelled)?;
        }
        self.labels.tell(&mut self.ledger);
        let tallied = self.ledger.tallied(&self.reader.read()?);
        let mut reconciled = diagnose::reconcile(&moved, &tallied);
        for each in &mut reconciled {
            each.netns_name = self.context.netns_name(each.netns);
        }
        Ok(reconciled)
    }

    fn counts(&mut self) -> Result<diagnose::Counts> {
        let totals = self.reader.read()?;
        self.labels.tell(&mut self.ledger);
        let now = context::wall_time();
        let mut counts = self.ledger.counts(&totals, self.loaded.passed_over(), now);
        counts.lost_events += self.ring.malformed() + self.briefs.as_ref().map_or(0, Ring::malformed);
        Ok(counts)
    }

    fn tell_counts(&mut self) -> Result<()> {
        let counts = self.counts()?;
        self.tell(&Record::Counts(counts), None)
    }

    fn tell(&mut self, record: &Record, origin: Option<Origin<'_>>) -> Result<()> {
        if self.ended.is_some() {
            return Ok(());
        }
        let taken = self.sink.record(record, origin);
        self.accept(taken)
    }

    /// Takes the sink's answer: a reader that went away and a full file end the run, anything else is a failure.
    fn accept(&mut self, answer: io::Result<()>) -> Result<()> {
        match answer {
            Ok(()) => Ok(()),
            Err(error) => match error.kind() {
                io::ErrorKind::BrokenPipe => {
                    self.ended = Some("pipe");
                    Ok(())
                }
                io::ErrorKind::FileTooLarge => {
                    self.ended = Some("size");
                    Ok(())
                }
                _ => Err(error).context("cannot write the output"),
            },
        }
    }

    fn spawn_command(&self) -> Result<Option<Child>> {
        let [program, arguments @ ..] = self.options.command.as_slice() else {
            return Ok(None);
        };
        let child = Command::new(program).args(arguments).spawn().map_err(|error| {
            Problem::failure(
                format!("cannot start {}: {error}", program.to_string_lossy()),
                "check the command after `--`",
            )
        })?;
        Ok(Some(child))
    }

    /// Takes what is still under way, then tells the end.
    async fn finish(mut self, ended: &'static str) -> Result<()> {
        if self.symbols.is_some() {
            let symbols = found(&mut self.symbols).await?;
            self.name_by(symbols)?;
        }
        let last = tokio::time::Instant::now() + LAST_EVENTS;
        for event in self.ring.take(PENDING_MAX) {
            self.take_from_ring(event)?;
        }
        while let Ok(Some(labelled)) = tokio::time::timeout_at(last, self.pending.next()).await {
            self.deliver(&labelled)?;
        }
        self.take_briefs_left()?;
        self.tell_problems()?;
        self.tell_names()?;
        let reconcile = self.reconcile().await?;
        let counts = self.counts()?;
        // What was counted until now has been sent.
        self.take_briefs_left()?;
        self.tell(&Record::Counts(counts.clone()), None)?;
        let summary = Summary {
            seconds: self.started.elapsed().as_secs_f64(),
            ended: ended.to_owned(),
            counts,
            syn_unanswered: self
                .context
                .syn_unanswered(&self.lost_syns)
                .into_iter()
                .filter(|open| would_be_seen(&self.options.scope, open))
                .collect(),
            reconcile,
        };
        if self.ended != Some("pipe") {
            let told = self.sink.record(&Record::Summary(summary), None);
            let finished = told.and_then(|()| self.sink.finish());
            self.accept(finished)?;
        }
        let Self {
            loaded,
            context,
            ring,
            briefs,
            reader,
            sink,
            ..
        } = self;
        drop((sink, context));
        detach::leave_to_child((loaded, ring, briefs, reader));
        Ok(())
    }
}

/// What bears on how far a run with this plan can be trusted, beside its gaps; `problems` are context's.
pub(super) fn notes(plan: &Plan, problems: &BTreeMap<String, String>) -> Vec<String> {
    let table = plan.module_layout_source == ModuleLayoutSource::Table;
    table
        .then(|| {
            "IPVS: this kernel has no BTF for modules, so offsets come from the built-in table for Debian's 5.10; \
             an entry is used only if its addresses and ports equal the packet's"
                .to_owned()
        })
        .into_iter()
        .chain(problems.iter().map(|(subject, reason)| format!("{subject}: {reason}")))
        .collect()
}

/// Whether no line is wanted for drops of this cause. The full-screen view hides them by itself.
fn is_unwanted(options: &RunOptions, cause: &Cause) -> bool {
    cause.benign && !options.benign && options.output != Output::Tui
}

/// Whether the totals leave out no drop that the kernel's counters count.
fn counts_all(scope: &ScopeArgs) -> bool {
    scope.port.is_none() && scope.protocol.is_none() && scope.addr.is_empty()
}

/// Whether a drop of these SYNs would have been seen: outside the scope nothing is known of them.
fn would_be_seen(scope: &ScopeArgs, open: &SynUnanswered) -> bool {
    const TCP: u8 = 6;
    scope.port.is_none_or(|port| open.dport == Some(port))
        && scope.protocol.is_none_or(|protocol| protocol == TCP)
        && (scope.addr.is_empty() || open.dst.is_some_and(|dst| scope.addr.contains(&dst)))
}

/// Whether what the user named exists, before anything is attached.
fn check_scope(request: &ScopeRequest) -> Result<()> {
    let named = request.netns.iter().map(|text| context::resolve(text));
    let of_pids = request.pids.iter().map(|&pid| context::resolve_pid(pid));
    for found in named.chain(of_pids) {
        found.map_err(|error| Problem::usage(error.to_string(), "name one that exists"))?;
    }
    Ok(())
}

/// Finds the pods and containers that the user named, before anything is attached.
fn find_pods(request: &PodRequest) -> Result<Pods> {
    Pods::find(request).map_err(pods_problem)
}

/// What to do where pods cannot be found.
pub(super) fn pods_problem(error: ContextError) -> anyhow::Error {
    match error {
        ContextError::Runtime(text) => Problem::failure(
            text,
            "as root, while it runs; --cri-socket names another socket, and --netns and --pid need no container runtime",
        )
        .into(),
        ContextError::Pod(text) => Problem::usage(text, "name one that is up on this host").into(),
        other => other.into(),
    }
}

/// What the programs must test.
fn scope_of(options: &RunOptions) -> Scope {
    let args = &options.scope;
    let mut scope = Scope {
        port: args.port.unwrap_or(0),
        protocol: args.protocol.unwrap_or(0),
        ..Scope::default()
    };
    let asked = [
        (
            !args.netns.is_empty() || args.pid.is_some() || !options.pods.is_empty(),
            SCOPE_NETNS,
        ),
        (!args.addr.is_empty(), SCOPE_ADDRESSES),
        (args.port.is_some(), SCOPE_PORT),
        (args.protocol.is_some(), SCOPE_PROTOCOL),
    ];
    for (_, flag) in asked.into_iter().filter(|(asked, _)| *asked) {
        scope.flags |= flag;
    }
    scope
}

/// Some of the drops in short, once there are any.
async fn read_some(briefs: &mut Option<Ring<BriefEvent>>) -> io::Result<Vec<BriefEvent>> {
    match briefs {
        Some(ring) => ring.read(BATCH).await,
        None => std::future::pending().await,
    }
}

async fn reached(moment: Option<tokio::time::Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

async fn found(symbols: &mut Option<JoinHandle<Result<Symbols, PlanError>>>) -> Result<Symbols> {
    match symbols {
        Some(reading) => Ok(reading
            .await
            .context("the thread that reads the kernel's symbols ended")??),
        None => std::future::pending().await,
    }
}

async fn ended_child(child: &mut Option<Child>) -> Result<std::process::ExitStatus> {
    match child {
        Some(child) => child.wait().await.context("cannot wait for the command"),
        None => std::future::pending().await,
    }
}

/// The command's exit status, as a shell would give it.
fn exit_code(status: std::process::ExitStatus) -> ExitCode {
    let number = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(1);
    ExitCode::from(u8::try_from(number).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_claimed_of_syns_outside_the_scope() {
        let open = SynUnanswered {
            netns: 1,
            netns_name: None,
            interface: None,
            held_by: None,
            dst: "192.0.2.1".parse().ok(),
            dport: Some(80),
            retransmissions: 1,
        };
        let seen = |change: fn(&mut ScopeArgs)| {
            let mut scope = ScopeArgs::default();
            change(&mut scope);
            would_be_seen(&scope, &open)
        };
        assert!(seen(|_| {}));
        assert!(seen(|scope| scope.port = Some(80)) && !seen(|scope| scope.port = Some(443)));
        assert!(seen(|scope| scope.protocol = Some(6)) && !seen(|scope| scope.protocol = Some(17)));
        assert!(seen(|scope| scope
            .addr
            .extend("192.0.2.1".parse::<std::net::IpAddr>())));
        assert!(!seen(|scope| scope
            .addr
            .extend("192.0.2.2".parse::<std::net::IpAddr>())));
    }
}
