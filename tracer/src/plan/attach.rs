//! Carries a plan out: loads the programs that it needs, attaches them, keeps
//! them attached while modules come and go, and says what became of each hook.

use std::{
    any::Any,
    collections::{BTreeMap, HashMap, HashSet},
    error::Error,
    fs, io,
    os::fd::{AsFd as _, AsRawFd as _},
    thread,
};

use aya::{
    Btf, Ebpf, EbpfError, EbpfLoader, VerifierLogLevel,
    maps::{Array, MapData, MapError, MapType, ProgramArray},
    programs::{Program, ProgramError, ProgramFd},
};
use aya_obj::btf::{BtfKind, BtfType, Func, FuncLinkage, Typedef};
use droptrace_common::{IpvsLayout, Layout, Sampling, Scope};
use nix::{
    sched::{CloneFlags, unshare},
    sys::resource::{RLIM_INFINITY, Resource, setrlimit},
    unistd::chroot,
};

use super::{
    Attachable, Choice, Hook, Method, Phases, Place, Plan, PlanError, PlannedHook, Symbols, Target, When,
    module_identities,
};
use crate::{
    context::monotonic_ns,
    diagnose::{Gap, HookState},
};

/// Map that carries the layout of modules to the programs.
const MODULE_LAYOUT_MAP: &str = "IPVS_LAYOUT";

/// Map that carries full events to user space.
const EVENTS_MAP: &str = "EVENTS";

/// A folder that every system has, and that holds no BTF.
const ELSEWHERE: &str = "/proc/self/fdinfo";

/// What all programs of the tracepoint call as their tail, and the map by which they do so, for each way to attach them.
const TAILS: [(Method, &str, &str); 2] = [
    (
        Method::TypedTracepoint,
        "kfree_skb_look_typed",
        "FREE_TAILS_TYPED",
    ),
    (Method::RawTracepoint, "kfree_skb_look", "FREE_TAILS"),
];

/// The kernel's own "operation not supported" (`include/linux/errno.h` `ENOTSUPP`): trampolines refuse a function with it.
const ENOTSUPP: i32 = 524;

/// What a run asks of the programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Which packets count.
    pub scope: Scope,
    /// Attach hooks of [`When::IpvsWanted`] from the start.
    pub ipvs: bool,
    /// Have the programs log what they see (aya-log); off, the verifier removes what would log.
    pub log: bool,
    /// How many full events travel.
    pub sampling: Sampling,
    /// Maps whose number of entries is not the one that they were built with.
    pub map_entries: Vec<(&'static str, u32)>,
}

/// Why nothing could be attached.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// This process may not use BPF.
    #[error(
        "BPF needs root, or the capabilities CAP_BPF and CAP_PERFMON, of which this process lacks {lacks}; next: run it with sudo"
    )]
    NotPermitted {
        /// The capabilities that it lacks.
        lacks: String,
    },
    /// It may, and the kernel refuses all the same.
    #[error("the kernel refuses BPF to this process ({error}): {because}")]
    Refused {
        /// Likely reason and next step.
        because: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// The programs and this binary do not fit together, or the kernel lacks a map type.
    #[error("cannot load the BPF object: {}; next: build both anew with `cargo xtask build`", chain(.0))]
    Object(#[from] EbpfError),
    /// A map could not be written.
    #[error(
        "cannot write the BPF map {MODULE_LAYOUT_MAP}: {0}; next: build object and program anew with `cargo xtask build`"
    )]
    Map(#[from] MapError),
    /// No hook could be attached.
    #[error(
        "no hook could be attached; the first failure was {hook}: {reason}; next: `droptrace doctor` lists them all"
    )]
    Nothing {
        /// The first hook that failed.
        hook: &'static str,
        /// Why.
        reason: String,
    },
}

/// What became of a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Attached,
    Waiting,
    NotNeeded,
    Failed,
}

impl State {
    const fn name(self) -> &'static str {
        match self {
            Self::Attached => "attached",
            Self::Waiting => "waiting",
            Self::NotNeeded => "not_needed",
            Self::Failed => "failed",
        }
    }
}

/// A hook in this run. Dropping the links detaches.
struct Attached {
    hook: &'static Hook,
    state: State,
    symbol: Option<String>,
    method: Option<String>,
    reason: Option<String>,
    links: Vec<Link>,
    /// When it was attached, on the kernel's monotonic clock; 0 if it is not.
    since_ns: u64,
}

impl Attached {
    fn failed(hook: &'static Hook, reason: Option<String>) -> Self {
        Self {
            hook,
            state: State::Failed,
            symbol: None,
            method: None,
            reason,
            links: Vec::new(),
            since_ns: 0,
        }
    }
}

/// A link of any kind, kept only to be dropped.
type Link = Box<dyn Any + Send>;

/// Programs that run in the kernel. Dropping it detaches and unloads all of them; nothing is pinned.
pub struct Loaded {
    hooks: Vec<Attached>,
    /// The loaded object, with its maps.
    pub ebpf: Ebpf,
    /// What programs can be attached to, by their ids in the kernel's BTF.
    attachable: BTreeMap<u32, Attachable>,
    ipvs: bool,
    modules: Vec<(&'static str, u64)>,
    /// One for each of [`TAILS`].
    tails: Vec<Tail>,
    /// Programs that were loaded, or could not be, before their module came.
    prepared: HashSet<String>,
}

/// Loads the object: its maps can be filled, and [`Loaded::attach`] does the rest.
///
/// # Errors
/// BPF cannot be used at all.
pub fn load(plan: &Plan, object: &[u8], options: &LoadOptions) -> Result<Loaded, LoadError> {
    may_use_bpf()?;
    // Before 5.11 maps count as locked memory. Where it fails, the kernel is newer or says so when a map is made.
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);

    let layout: [u32; Layout::ENTRIES.len()] =
        std::array::from_fn(|index| plan.layout.get(index).unwrap_or(droptrace_common::ABSENT));
    let scope = scope_bytes(options.scope);
    // Levels of aya-log: 0 is none, 5 all.
    let log_level: u8 = if options.log { 5 } else { 0 };
    let mut loader = loader();
    // No program has relocations against the kernel's types: user space resolves them. Of the verifier's log only
    // the error is wanted; what it says of each instruction takes megabytes, and several attempts to fit them.
    loader
        .btf(None)
        .verifier_log_level(VerifierLogLevel::STATS)
        .override_global("LAYOUT", &layout, true)
        .override_global("SCOPE", &scope, true)
        .override_global("SAMPLING", &options.sampling, true)
        .override_global("AYA_LOG_LEVEL", &log_level, true)
        .map_max_entries(EVENTS_MAP, Sampling::ring_bytes(cpus()));
    for (map, entries) in &options.map_entries {
        loader.map_max_entries(map, *entries);
    }
    let mut ebpf = loader.load(object)?;
    let tails = TAILS
        .iter()
        .map(|(method, program, map)| Tail::of(&mut ebpf, *method, program, map))
        .collect::<Result<_, _>>()?;
    let mut loaded = Loaded {
        ebpf,
        tails,
        attachable: plan.attachable.clone(),
        hooks: Vec::new(),
        ipvs: options.ipvs,
        modules: module_identities(&plan.options.root),
        prepared: HashSet::new(),
    };
    loaded.write_module_layout(&plan.module_layout)?;
    Ok(loaded)
}

/// CPUs that may bring events; where the kernel does not say, as many as would fill the largest ring.
fn cpus() -> u32 {
    aya::util::nr_cpus().map_or(u32::MAX, |cpus| u32::try_from(cpus).unwrap_or(u32::MAX))
}

/// A loader that did not parse the kernel's BTF. aya's parses it when it is made, whatever it is told afterwards, which takes
/// a tenth of a second and 20 MB. It goes on without where there is none: so it is made by a thread of its own whose root is
/// a folder without it. Where that is not permitted it is parsed for nothing.
fn loader() -> EbpfLoader<'static> {
    let elsewhere = || -> nix::Result<()> {
        unshare(CloneFlags::CLONE_FS)?;
        chroot(ELSEWHERE)
    };
    thread::scope(|scope| {
        let made = scope.spawn(|| {
            let _ = elsewhere();
            EbpfLoader::new()
        });
        made.join()
            .unwrap_or_else(|panicked| std::panic::resume_unwind(panicked))
    })
}

/// BTF in which nothing but these is left, under their ids; nameless types hold the places of all others. What loads a program
/// that is attached to one looks it up there: in all of the kernel's BTF that takes 5 ms each.
fn alone(attachable: &BTreeMap<u32, Attachable>) -> Btf {
    let mut btf = Btf::new();
    // Id 0 is that of `void`.
    let mut next = 1;
    for (id, each) in attachable {
        while next < *id {
            next = btf.add_type(BtfType::Unknown) + 1;
        }
        let named = match each {
            Attachable::Function(name) => {
                BtfType::Func(Func::new(btf.add_string(name), 0, FuncLinkage::Static))
            }
            Attachable::Tracepoint(name) => BtfType::Typedef(typedef(btf.add_string(name))),
        };
        next = btf.add_type(named) + 1;
    }
    btf
}

/// A typedef of this name, of `void`.
const fn typedef(name: u32) -> Typedef {
    const KIND: u32 = (BtfKind::Typedef as u32) << 24;
    // SAFETY: repr(C), three numbers (`struct btf_type`, include/uapi/linux/btf.h), which aya lets nobody else set.
    unsafe { std::mem::transmute([name, KIND, 0]) }
}

/// A program that others call as their tail.
struct Tail {
    /// How those are attached that call it.
    method: Method,
    program: &'static str,
    map: ProgramArray<MapData>,
    /// Whether it is in the map, else why not; `None` before it was tried.
    ready: Option<Result<(), String>>,
}

impl Tail {
    fn of(ebpf: &mut Ebpf, method: Method, program: &'static str, map: &str) -> Result<Self, MapError> {
        let taken = ebpf
            .take_map(map)
            .ok_or_else(|| MapError::InvalidName { name: map.to_owned() })?;
        Ok(Self {
            method,
            program,
            map: ProgramArray::try_from(taken)?,
            ready: None,
        })
    }

    /// Loads it and puts it where it is called, the first time that this is asked for.
    fn prepare(&mut self, programs: &mut HashMap<&str, &mut Program>, ids: &Btf) -> Result<(), String> {
        if self.ready.is_none() {
            self.ready = Some(self.load(programs, ids));
        }
        self.ready.clone().unwrap_or(Ok(()))
    }

    fn load(&mut self, programs: &mut HashMap<&str, &mut Program>, ids: &Btf) -> Result<(), String> {
        let name = self.program;
        let told = |error: &ProgramError| {
            if is_refused(error) {
                REFUSED.to_owned()
            } else {
                format!("{name}: {}", in_words(error))
            }
        };
        let program = match programs.get_mut(name) {
            Some(Program::BtfTracePoint(program)) => program.load("kfree_skb", ids).map(|()| program.fd()),
            Some(Program::RawTracePoint(program)) => program.load().map(|()| program.fd()),
            _ => return Err(format!("the BPF object has no {name}")),
        };
        let program = program
            .and_then(|program| Ok(program?.try_clone()?))
            .map_err(|error| told(&error))?;
        self.map
            .set(0, &program, 0)
            .map_err(|error| format!("{name}: {}", chain(&error)))
    }
}

impl Loaded {
    /// Attaches all hooks of the plan that this run needs. One that fails on its own is told by [`Self::states`] and
    /// [`Self::gaps`].
    ///
    /// # Errors
    /// No hook could be attached.
    pub fn attach(&mut self, plan: &mut Plan) -> Result<(), LoadError> {
        let all: Vec<&PlannedHook> = plan.hooks.iter().collect();
        self.hooks = self.attach_all(&all);
        // BTF knows functions of which no symbol is left. Without symbols the failures stay what they are.
        if self.failures().next().is_some() && !plan.has_symbols() {
            let chosen = plan.hooks.clone();
            if plan.find_symbols().is_ok() {
                self.follow(plan, &chosen);
            }
        }
        if self.hooks.iter().any(|each| each.state == State::Attached) {
            return Ok(());
        }
        let (hook, reason) = self
            .failures()
            .next()
            .map_or(("all", String::new()), |(hook, reason)| {
                (hook.name, reason.to_owned())
            });
        Err(LoadError::Nothing { hook, reason })
    }

    /// What became of each hook, in the order of the table.
    pub fn states(&self) -> Vec<HookState> {
        self.hooks
            .iter()
            .map(|each| HookState {
                hook: each.hook.name.to_owned(),
                symbol: each.symbol.clone(),
                method: each.method.clone(),
                state: each.state.name().to_owned(),
                reason: each.reason.clone(),
            })
            .collect()
    }

    /// Whether this hook of a module saw nothing of what was there at that time, on the kernel's monotonic clock: the module is
    /// loaded, and the hook was attached later, or is not. False for the name of no such hook.
    pub fn missed(&self, plan: &Plan, hook: &str, at_ns: u64) -> bool {
        let own = self.hooks.iter().find(|each| each.hook.name == hook);
        own.is_some_and(|each| {
            let attached = each.state == State::Attached && each.since_ns < at_ns;
            let module = || Some(plan.options.path("sys/module").join(each.hook.module?));
            !attached && module().is_some_and(|module| module.exists())
        })
    }

    /// What this run cannot see.
    pub fn gaps(&self, plan: &Plan) -> Vec<Gap> {
        plan.gaps_given(self.failures())
    }

    /// Looks at the kernel again after a module came or went: attaches the hooks that it brought, forgets those that
    /// went with it. Says whether anything became of a hook that was not so before.
    ///
    /// # Errors
    /// `/proc/kallsyms` or the kernel's BTF cannot be read; all hooks stay as they are.
    pub fn module_changed(&mut self, plan: &mut Plan) -> Result<bool, PlanError> {
        let modules = module_identities(&plan.options.root);
        plan.refresh()?;
        let stays = |module: &str| {
            let identity =
                |of: &[(&str, u64)]| of.iter().find(|(name, _)| *name == module).map(|(_, id)| *id);
            identity(&self.modules) == identity(&modules)
        };
        // One that failed is tried again: the first look may have come while the module was half gone.
        let changed: Vec<usize> = (0..self.hooks.len())
            .filter(|index| {
                let each = &self.hooks[*index];
                each.hook
                    .module
                    .is_some_and(|module| !stays(module) || each.state == State::Failed)
            })
            .collect();
        self.modules = modules;
        let before = self.states();
        // A map of one element that exists can be written.
        let _ = self.write_module_layout(&plan.module_layout);
        self.attach_again(plan, &changed);
        Ok(before != self.states())
    }

    /// Attaches or detaches the hooks of [`When::IpvsWanted`]. Says whether anything became of a hook that was not so
    /// before.
    pub fn want_ipvs(&mut self, plan: &Plan, wanted: bool) -> bool {
        if self.ipvs == wanted {
            return false;
        }
        self.ipvs = wanted;
        let before = self.states();
        let those: Vec<usize> = (0..self.hooks.len())
            .filter(|index| self.hooks[*index].hook.when == When::IpvsWanted)
            .collect();
        self.attach_again(plan, &those);
        before != self.states()
    }

    /// Loads one more probe of the hooks whose module is not there yet, so that attaching takes little time when it
    /// comes. A failure is told then.
    pub fn prepare_next(&mut self) {
        let waiting = self.hooks.iter().filter(|each| each.state == State::Waiting);
        for (name, _) in waiting.flat_map(|each| programs_of(each.hook, Method::Probe)) {
            if let Some(Program::KProbe(program)) = self.ebpf.program_mut(&name)
                && program.fd().is_err()
                && self.prepared.insert(name)
            {
                let _ = program.load();
                return;
            }
        }
    }

    /// Has the symbols, which were left for later when the plan was made. Says whether anything became of a hook, or cannot
    /// be seen, that was not so before.
    pub fn found_symbols(&mut self, plan: &mut Plan, symbols: Symbols) -> bool {
        let (chosen, before) = (plan.hooks.clone(), (self.states(), self.gaps(plan)));
        plan.found_symbols(symbols);
        self.follow(plan, &chosen);
        before != (self.states(), self.gaps(plan))
    }

    /// Attaches those hooks again for which the plan has another place than before.
    fn follow(&mut self, plan: &Plan, before: &[PlannedHook]) {
        let moved: Vec<usize> = (0..plan.hooks.len())
            .filter(|index| plan.hooks[*index] != before[*index])
            .collect();
        self.attach_again(plan, &moved);
    }

    /// How often the kernel passed a program over that was at work on the same CPU already, by hook. Kernels before
    /// 5.12 do not say.
    pub fn passed_over(&self) -> BTreeMap<&'static str, u64> {
        let mut passed_over = BTreeMap::new();
        for attached in &self.hooks {
            let names = Method::ALL
                .iter()
                .flat_map(|method| programs_of(attached.hook, *method));
            let misses: u64 = names
                .filter_map(|(name, _)| self.ebpf.program(&name)?.fd().ok().and_then(misses))
                .sum();
            if misses > 0 {
                passed_over.insert(attached.hook.name, misses);
            }
        }
        passed_over
    }

    fn failures(&self) -> impl Iterator<Item = (&Hook, &str)> {
        self.hooks
            .iter()
            .filter(|each| each.state == State::Failed)
            .map(|each| (each.hook, each.reason.as_deref().unwrap_or_default()))
    }

    fn write_module_layout(&mut self, layout: &IpvsLayout) -> Result<(), MapError> {
        let values: [u32; IpvsLayout::ENTRIES.len()] =
            std::array::from_fn(|index| layout.get(index).unwrap_or(droptrace_common::ABSENT));
        let map = self
            .ebpf
            .map_mut(MODULE_LAYOUT_MAP)
            .ok_or(MapError::InvalidName {
                name: MODULE_LAYOUT_MAP.to_owned(),
            })?;
        Array::<_, [u32; IpvsLayout::ENTRIES.len()]>::try_from(map)?.set(0, values, 0)
    }

    /// Attaches these hooks of the plan once more.
    fn attach_again(&mut self, plan: &Plan, indexes: &[usize]) {
        for index in indexes {
            self.hooks[*index].links.clear();
        }
        let those: Vec<&PlannedHook> = indexes.iter().map(|index| &plan.hooks[*index]).collect();
        for (index, attached) in indexes.iter().zip(self.attach_all(&those)) {
            self.hooks[*index] = attached;
        }
    }

    /// Attaches hooks side by side, since the kernel lets each wait until no CPU runs the code that it changes. The free
    /// comes last: without the hooks that know why, it would have no more to say than its place.
    fn attach_all(&mut self, hooks: &[&PlannedHook]) -> Vec<Attached> {
        let (ipvs, tails) = (self.ipvs, &mut self.tails);
        let by_id = |planned: &&PlannedHook| match &planned.choice {
            Choice::Attach(place) => [Method::Trampoline, Method::TypedTracepoint]
                .iter()
                .any(|method| place.methods.contains(method)),
            _ => false,
        };
        // Several megabytes, and needed by few hooks after the start.
        let functions = &if hooks.iter().any(by_id) {
            alone(&self.attachable)
        } else {
            Btf::new()
        };
        let mut programs: HashMap<&str, &mut Program> = self.ebpf.programs_mut().collect();
        let mut attached: Vec<Option<Attached>> = hooks.iter().map(|_| None).collect();
        let is_tracepoint = |planned: &PlannedHook| matches!(planned.hook.target, Target::Tracepoint(..));
        thread::scope(|scope| {
            for (planned, place) in hooks.iter().zip(&mut attached) {
                if !is_tracepoint(planned) {
                    let mut programs = own(&mut programs, planned.hook);
                    scope.spawn(move || *place = Some(attach(planned, &mut programs, functions, ipvs)));
                }
            }
            // While those wait.
            for planned in hooks.iter().filter(|planned| is_tracepoint(planned)) {
                load_tracepoint(planned, &mut programs, functions, tails);
            }
        });
        // In the order of the table, in which the kernel calls them.
        for (planned, place) in hooks.iter().zip(&mut attached) {
            if is_tracepoint(planned) {
                *place = Some(attach_tracepoint(planned, &mut programs, functions, tails));
            }
        }
        attached.into_iter().flatten().collect()
    }
}

/// Loads what it takes to attach a hook of the tracepoint in the first way. Where that fails, attaching says why.
fn load_tracepoint(
    planned: &PlannedHook,
    programs: &mut HashMap<&str, &mut Program>,
    ids: &Btf,
    tails: &mut [Tail],
) {
    let Choice::Attach(place) = &planned.choice else {
        return;
    };
    let Some(method) = place.methods.first() else {
        return;
    };
    let tail = tails.iter_mut().find(|tail| tail.method == *method);
    if let Some(Err(_)) = tail.map(|tail| tail.prepare(programs, ids)) {
        return;
    }
    for (name, _) in programs_of(planned.hook, *method) {
        if let Some(program) = programs.get_mut(name.as_str()) {
            let _ = load_program(program, &place.symbol, ids);
        }
    }
}

/// Attaches a hook of the tracepoint in the first way that the kernel takes.
fn attach_tracepoint(
    planned: &PlannedHook,
    programs: &mut HashMap<&str, &mut Program>,
    ids: &Btf,
    tails: &mut [Tail],
) -> Attached {
    let Choice::Attach(place) = &planned.choice else {
        return attach(planned, &mut Programs::new(), ids, false);
    };
    let mut own = own(programs, planned.hook);
    let mut reasons = Vec::new();
    for method in &place.methods {
        let tail = tails.iter_mut().find(|tail| tail.method == *method);
        if let Some(Err(reason)) = tail.map(|tail| tail.prepare(programs, ids)) {
            reasons.push(reason);
            continue;
        }
        let one = PlannedHook {
            hook: planned.hook,
            choice: Choice::Attach(Place {
                methods: vec![*method],
                ..place.clone()
            }),
        };
        let attached = attach(&one, &mut own, ids, false);
        if attached.state == State::Attached {
            return attached;
        }
        reasons.extend(attached.reason);
    }
    reasons.dedup();
    Attached::failed(planned.hook, Some(reasons.join(", ")))
}

/// The programs of a hook, by name.
type Programs<'a> = HashMap<String, &'a mut Program>;

/// Takes the programs of a hook out of all.
fn own<'a>(programs: &mut HashMap<&str, &'a mut Program>, hook: &Hook) -> Programs<'a> {
    Method::ALL
        .iter()
        .flat_map(|method| programs_of(hook, *method))
        .filter_map(|(name, _)| Some((programs.remove(name.as_str())?, name)))
        .map(|(program, name)| (name, program))
        .collect()
}

/// Attaches a hook if it can and should be.
fn attach(planned: &PlannedHook, programs: &mut Programs<'_>, functions: &Btf, ipvs: bool) -> Attached {
    let hook = planned.hook;
    let mut attached = Attached::failed(hook, None);
    match &planned.choice {
        Choice::NotNeeded { reason } => {
            attached.state = State::NotNeeded;
            attached.reason = Some(reason.clone());
        }
        Choice::Impossible { reason } => attached.reason = Some(reason.clone()),
        Choice::Waiting { module } => {
            attached.state = State::Waiting;
            attached.reason = Some(format!("module {module} is not loaded"));
        }
        Choice::Attach(_) if hook.when == When::IpvsWanted && !ipvs => {
            attached.state = State::NotNeeded;
            attached.reason = Some(
                "no netns in scope has IPVS services with expire_nodest_conn=0, and --ipvs was not given"
                    .to_owned(),
            );
        }
        Choice::Attach(place) => {
            attached.symbol = Some(place.symbol.clone());
            match attach_at(hook, place, programs, functions) {
                Ok((method, links)) => {
                    attached.state = State::Attached;
                    attached.method = Some(method);
                    attached.links = links;
                    attached.since_ns = monotonic_ns();
                }
                Err(reason) => attached.reason = Some(reason),
            }
        }
    }
    attached
}

/// Tries the methods in order.
fn attach_at(
    hook: &Hook,
    place: &Place,
    programs: &mut Programs<'_>,
    functions: &Btf,
) -> Result<(String, Vec<Link>), String> {
    let mut reasons: Vec<String> = Vec::new();
    for method in &place.methods {
        let mut links: Vec<Link> = Vec::new();
        let named = programs_of(hook, *method);
        let tried = named.iter().try_for_each(|(name, kind)| {
            let program = programs
                .get_mut(name)
                .ok_or_else(|| format!("the BPF object has no program {name}"))?;
            let link = attach_program(program, place, functions).map_err(|error| {
                if matches!(method, Method::Trampoline | Method::TypedTracepoint) && is_refused(&error) {
                    REFUSED.to_owned()
                } else {
                    format!("{kind}: {}", in_words(&error))
                }
            })?;
            links.push(link);
            Ok(())
        });
        match tried {
            Ok(()) => {
                // Exits come first in the list, as they are attached first; entries come first in words.
                let mut method: Vec<&str> = named.iter().rev().map(|(_, kind)| *kind).collect();
                method.dedup();
                return Ok((method.join("+"), links));
            }
            // The links made so far are dropped here: a hook is never half attached.
            Err(reason) => reasons.push(reason),
        }
    }
    if !place.methods.contains(&Method::Probe) && reasons.iter().any(|reason| reason == REFUSED) {
        reasons.push("it has no kprobes to use instead (CONFIG_KPROBE_EVENTS)".to_owned());
    }
    Err(reasons.join(", and "))
}

/// A kernel that has BPF, but not for this.
const REFUSED: &str = "this kernel refuses tracing programs (fentry and fexit)";

/// Whether the kernel takes no such program at all, whoever loads it.
fn is_refused(error: &ProgramError) -> bool {
    matches!(error, ProgramError::LoadError { io_error, .. } if io_error.raw_os_error() == Some(libc::EPERM))
}

/// Has the verifier look at a program, once.
fn load_program(program: &mut Program, symbol: &str, ids: &Btf) -> Result<(), ProgramError> {
    if program.fd().is_ok() {
        return Ok(());
    }
    match program {
        Program::RawTracePoint(program) => program.load(),
        Program::BtfTracePoint(program) => program.load(symbol, ids),
        Program::FEntry(program) => program.load(symbol, ids),
        Program::FExit(program) => program.load(symbol, ids),
        Program::KProbe(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    }
}

fn attach_program(program: &mut Program, place: &Place, ids: &Btf) -> Result<Link, ProgramError> {
    let symbol = place.symbol.as_str();
    load_program(program, symbol, ids)?;
    Ok(match program {
        Program::RawTracePoint(program) => {
            let id = program.attach(symbol)?;
            Box::new(program.take_link(id)?)
        }
        Program::BtfTracePoint(program) => {
            let id = program.attach()?;
            Box::new(program.take_link(id)?)
        }
        Program::FEntry(program) => {
            let id = program.attach()?;
            Box::new(program.take_link(id)?)
        }
        Program::FExit(program) => {
            let id = program.attach()?;
            Box::new(program.take_link(id)?)
        }
        Program::KProbe(program) => {
            // A module's function by module and name: others may share the name.
            let function = match &place.module {
                Some(module) => format!("{module}:{symbol}"),
                None => symbol.to_owned(),
            };
            let id = program.attach(&function, 0)?;
            Box::new(program.take_link(id)?)
        }
        _ => return Err(ProgramError::UnexpectedProgramType),
    })
}

/// The programs that attach a hook by this method, with the name of the method, in the order in which they are
/// attached: the exit first, so that no entry is noted whose exit is missed; those of a tracepoint as the kernel is to
/// call them.
fn programs_of(hook: &Hook, method: Method) -> Vec<(String, &'static str)> {
    let (phases, entry, exit) = match (hook.target, method) {
        (Target::Tracepoint(_, programs), Method::RawTracepoint) => {
            return programs
                .iter()
                .map(|name| ((*name).to_owned(), "raw_tracepoint"))
                .collect();
        }
        (Target::Tracepoint(_, programs), Method::TypedTracepoint) => {
            return programs
                .iter()
                .map(|name| (format!("{name}_typed"), "tp_btf"))
                .collect();
        }
        (Target::Function(_, phases), Method::Trampoline) => (phases, "fentry", "fexit"),
        (Target::Function(_, phases), Method::Probe) => (phases, "kprobe", "kretprobe"),
        _ => return Vec::new(),
    };
    let kinds: &[&'static str] = match phases {
        Phases::Entry => &[entry],
        Phases::Exit => &[exit],
        Phases::EntryAndExit => &[exit, entry],
    };
    kinds
        .iter()
        .map(|kind| (format!("{}_{kind}", hook.name), *kind))
        .collect()
}

/// What the kernel tells of a program beside its descriptor (`bpf_prog_show_fdinfo`, kernel/bpf/syscall.c, 5.12 - 7.3).
fn misses(program: &ProgramFd) -> Option<u64> {
    let path = format!("/proc/self/fdinfo/{}", program.as_fd().as_raw_fd());
    status_value(&fs::read_to_string(path).ok()?, "recursion_misses:")?
        .parse()
        .ok()
}

fn scope_bytes(scope: Scope) -> [u8; size_of::<Scope>()] {
    // SAFETY: Scope is repr(C), plain numbers, without padding; any bytes are a valid array of u8.
    unsafe { std::mem::transmute(scope) }
}

/// What the kernel said, in a few words.
fn in_words(error: &ProgramError) -> String {
    if let ProgramError::LoadError {
        io_error,
        verifier_log,
    } = error
    {
        let log = verifier_log.to_string();
        // The log ends with what the verifier has counted; before that it says what it does not like.
        let last = log
            .lines()
            .map(str::trim)
            .rfind(|line| !line.is_empty() && !is_verifier_statistics(line));
        return match last {
            Some(line) => format!(
                "the kernel does not load it: {} ({})",
                line,
                errno_in_words(io_error)
            ),
            None => format!("the kernel does not load it: {}", errno_in_words(io_error)),
        };
    }
    match io_error(error) {
        Some(io_error) => errno_in_words(io_error),
        None => chain(error),
    }
}

fn is_verifier_statistics(line: &str) -> bool {
    ["processed ", "verification time ", "stack depth ", "peak_states "]
        .iter()
        .any(|start| line.starts_with(start))
}

fn errno_in_words(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(ENOTSUPP) => "not supported for this function (ENOTSUPP)".to_owned(),
        _ => error.to_string(),
    }
}

/// An error and all that caused it.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// The system's error at the root of this one.
fn io_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    let mut each = Some(error);
    while let Some(error) = each {
        if let Some(io_error) = error.downcast_ref::<io::Error>() {
            return Some(io_error);
        }
        each = error.source();
    }
    None
}

/// Capabilities by number (`include/uapi/linux/capability.h`).
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// Tries the smallest thing that BPF can do, since an object that fails says little about why.
fn may_use_bpf() -> Result<(), LoadError> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let capabilities = status_value(&status, "CapEff:")
        .and_then(|value| u64::from_str_radix(value, 16).ok())
        .unwrap_or(u64::MAX);
    let has = |capability: u32| capabilities & (1 << capability | 1 << CAP_SYS_ADMIN) != 0;
    let lacks: Vec<&str> = [(CAP_BPF, "CAP_BPF"), (CAP_PERFMON, "CAP_PERFMON")]
        .into_iter()
        .filter(|(capability, _)| !has(*capability))
        .map(|(_, name)| name)
        .collect();
    if !lacks.is_empty() {
        return Err(LoadError::NotPermitted {
            lacks: lacks.join(" and "),
        });
    }
    match aya::sys::is_map_supported(MapType::Array) {
        Ok(_) => Ok(()),
        Err(error) => Err(LoadError::Refused {
            because: why_refused(&status, error.io_error.raw_os_error()),
            error: error.io_error,
        }),
    }
}

fn why_refused(status: &str, errno: Option<i32>) -> String {
    if errno == Some(libc::ENOSYS) {
        return "it has no bpf() system call; next: use a kernel with CONFIG_BPF_SYSCALL=y".to_owned();
    }
    if status_value(status, "Seccomp:").is_some_and(|mode| mode != "0") {
        return "a seccomp filter is in force; next: run it on the host, or in a privileged container"
            .to_owned();
    }
    let in_user_namespace = fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_whitespace().ne(["0", "0", "4294967295"]));
    if in_user_namespace {
        return "root of a user namespace is not enough; next: run it as root of the host".to_owned();
    }
    if fs::read_to_string("/sys/kernel/security/lockdown").is_ok_and(|modes| !modes.contains("[none]")) {
        return "the kernel is locked down; next: see /sys/kernel/security/lockdown and secure boot"
            .to_owned();
    }
    "next: ask the host's security module (dmesg, audit log) which rule forbids bpf()".to_owned()
}

fn status_value<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(key))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_attached_to_keeps_its_id() {
        let btf = alone(&BTreeMap::from([
            (3, Attachable::Function("early")),
            (4, Attachable::Tracepoint("next")),
            (90_000, Attachable::Function("late")),
        ]));
        let id = |name, kind| btf.id_by_type_name_kind(name, kind).ok();
        assert_eq!(
            [
                id("early", BtfKind::Func),
                id("next", BtfKind::Typedef),
                id("late", BtfKind::Func),
                id("next", BtfKind::Func),
            ],
            [Some(3), Some(4), Some(90_000), None]
        );
    }
}
