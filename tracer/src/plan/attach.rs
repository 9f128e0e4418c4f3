//! Carries a plan out: loads the programs that it needs, attaches them, keeps
//! them attached while modules come and go, and says what became of each hook.

use std::{any::Any, error::Error, fs, io};

use aya::{
    Btf, Ebpf, EbpfError, EbpfLoader, VerifierLogLevel,
    maps::{Array, MapError, MapType},
    programs::{Program, ProgramError},
};
use droptrace_common::{IpvsLayout, Layout, Scope};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

use super::{
    Choice, Hook, Method, Phases, Place, Plan, PlanError, Target, When, module_identities,
    symbols::PER_CPU_OFFSET,
};
use crate::diagnose::{Gap, HookState};

/// Map that carries the layout of modules to the programs.
const MODULE_LAYOUT_MAP: &str = "IPVS_LAYOUT";

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
    /// The kernel does not describe its types.
    #[error("cannot read the kernel's BTF: {0}; next: use a kernel built with CONFIG_DEBUG_INFO_BTF=y")]
    NoBtf(#[from] aya::BtfError),
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
}

/// A link of any kind, kept only to be dropped.
type Link = Box<dyn Any + Send>;

/// Programs that run in the kernel. Dropping it detaches and unloads all of them; nothing is pinned.
pub struct Loaded {
    hooks: Vec<Attached>,
    /// The loaded object, with its maps.
    pub ebpf: Ebpf,
    btf: Btf,
    ipvs: bool,
    modules: Vec<(&'static str, u64)>,
}

/// Loads the object and attaches all hooks of the plan that this run needs.
///
/// # Errors
/// BPF cannot be used at all, or no hook could be attached. A hook that fails on its own is told by [`Loaded::states`]
/// and [`Loaded::gaps`].
pub fn load(plan: &Plan, object: &[u8], options: &LoadOptions) -> Result<Loaded, LoadError> {
    may_use_bpf()?;
    // Before 5.11 maps count as locked memory. Where it fails, the kernel is newer or says so when a map is made.
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);

    let layout: [u32; Layout::ENTRIES.len()] =
        std::array::from_fn(|index| plan.layout.get(index).unwrap_or(droptrace_common::ABSENT));
    let scope = scope_bytes(options.scope);
    // Levels of aya-log: 0 is none, 5 all.
    let log_level: u8 = if options.log { 5 } else { 0 };
    let per_cpu_offset = plan.variable(PER_CPU_OFFSET);
    let mut loader = EbpfLoader::new();
    // No program has relocations against the kernel's types: user space resolves them. Of the verifier's log only
    // the error is wanted; what it says of each instruction takes megabytes, and several attempts to fit them.
    loader
        .btf(None)
        .verifier_log_level(VerifierLogLevel::STATS)
        .override_global("LAYOUT", &layout, true)
        .override_global("SCOPE", &scope, true)
        .override_global("PER_CPU_OFFSET", &per_cpu_offset, true)
        .override_global("AYA_LOG_LEVEL", &log_level, true);
    for (map, entries) in &options.map_entries {
        loader.map_max_entries(map, *entries);
    }
    let mut loaded = Loaded {
        ebpf: loader.load(object)?,
        btf: Btf::from_sys_fs()?,
        hooks: Vec::new(),
        ipvs: options.ipvs,
        modules: module_identities(&plan.options.root),
    };
    loaded.write_module_layout(&plan.module_layout)?;
    // The free comes last: without the hooks that know why, it would have no more to say than its place.
    for planned in plan.hooks.iter().rev() {
        let attached = loaded.attach(planned.hook, &planned.choice);
        loaded.hooks.push(attached);
    }
    loaded.hooks.reverse();
    if !loaded.hooks.iter().any(|each| each.state == State::Attached) {
        let (hook, reason) = loaded
            .failures()
            .next()
            .map_or(("all", String::new()), |(hook, reason)| {
                (hook.name, reason.to_owned())
            });
        return Err(LoadError::Nothing { hook, reason });
    }
    Ok(loaded)
}

impl Loaded {
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

    /// What this run cannot see.
    pub fn gaps(&self, plan: &Plan) -> Vec<Gap> {
        plan.gaps_given(self.failures())
    }

    /// Looks at the kernel again after a module came or went: attaches the hooks that it brought, forgets those that
    /// went with it. Says whether anything became of a hook that was not so before.
    ///
    /// # Errors
    /// `/proc/kallsyms` cannot be read; all hooks stay as they are.
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
        for index in &changed {
            self.hooks[*index].links.clear();
        }
        // A map of one element that exists can be written.
        let _ = self.write_module_layout(&plan.module_layout);
        for index in changed {
            let planned = &plan.hooks[index];
            self.hooks[index] = self.attach(planned.hook, &planned.choice);
        }
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
        for index in 0..self.hooks.len() {
            let planned = &plan.hooks[index];
            if planned.hook.when == When::IpvsWanted {
                self.hooks[index].links.clear();
                self.hooks[index] = self.attach(planned.hook, &planned.choice);
            }
        }
        before != self.states()
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

    /// Attaches a hook if it can and should be.
    fn attach(&mut self, hook: &'static Hook, choice: &Choice) -> Attached {
        let mut attached = Attached {
            hook,
            state: State::Failed,
            symbol: None,
            method: None,
            reason: None,
            links: Vec::new(),
        };
        match choice {
            Choice::NotNeeded { reason } => {
                attached.state = State::NotNeeded;
                attached.reason = Some(reason.clone());
            }
            Choice::Impossible { reason } => attached.reason = Some(reason.clone()),
            Choice::Waiting { module } => {
                attached.state = State::Waiting;
                attached.reason = Some(format!("module {module} is not loaded"));
                self.prepare(hook);
            }
            Choice::Attach(_) if hook.when == When::IpvsWanted && !self.ipvs => {
                attached.state = State::NotNeeded;
                attached.reason = Some(
                    "no netns in scope has IPVS services with expire_nodest_conn=0, and --ipvs was not given"
                        .to_owned(),
                );
            }
            Choice::Attach(place) => {
                attached.symbol = Some(place.symbol.clone());
                match self.attach_at(hook, place) {
                    Ok((method, links)) => {
                        attached.state = State::Attached;
                        attached.method = Some(method);
                        attached.links = links;
                    }
                    Err(reason) => attached.reason = Some(reason),
                }
            }
        }
        attached
    }

    /// Tries the methods in order.
    fn attach_at(&mut self, hook: &Hook, place: &Place) -> Result<(String, Vec<Link>), String> {
        let mut reasons: Vec<String> = Vec::new();
        for method in &place.methods {
            let mut links: Vec<Link> = Vec::new();
            let programs = programs(hook, *method);
            let tried = programs.iter().try_for_each(|(program, kind)| {
                links.push(
                    self.attach_program(program, place)
                        .map_err(|reason| format!("{kind}: {reason}"))?,
                );
                Ok(())
            });
            match tried {
                Ok(()) => {
                    // Exits come first in the list, as they are attached first; entries come first in words.
                    let method: Vec<&str> = programs.iter().rev().map(|(_, kind)| *kind).collect();
                    return Ok((method.join("+"), links));
                }
                // The links made so far are dropped here: a hook is never half attached.
                Err(reason) => reasons.push(reason),
            }
        }
        Err(reasons.join("; "))
    }

    fn attach_program(&mut self, name: &str, place: &Place) -> Result<Link, String> {
        let program = self
            .ebpf
            .program_mut(name)
            .ok_or_else(|| format!("the BPF object has no program {name}"))?;
        let symbol = place.symbol.as_str();
        // A module's function by module and name: others may share the name.
        let function = match &place.module {
            Some(module) => format!("{module}:{symbol}"),
            None => symbol.to_owned(),
        };
        let loaded = program.fd().is_ok();
        let link = (|| -> Result<Link, ProgramError> {
            Ok(match program {
                Program::RawTracePoint(program) => {
                    if !loaded {
                        program.load()?;
                    }
                    let id = program.attach(symbol)?;
                    Box::new(program.take_link(id)?)
                }
                Program::FEntry(program) => {
                    if !loaded {
                        program.load(symbol, &self.btf)?;
                    }
                    let id = program.attach()?;
                    Box::new(program.take_link(id)?)
                }
                Program::FExit(program) => {
                    if !loaded {
                        program.load(symbol, &self.btf)?;
                    }
                    let id = program.attach()?;
                    Box::new(program.take_link(id)?)
                }
                Program::KProbe(program) => {
                    if !loaded {
                        program.load()?;
                    }
                    let id = program.attach(&function, 0)?;
                    Box::new(program.take_link(id)?)
                }
                _ => return Err(ProgramError::UnexpectedProgramType),
            })
        })();
        link.map_err(|error| in_words(&error))
    }

    /// Loads the probes of a hook whose module is not there yet, so that attaching takes little time when it comes. A
    /// failure is told then.
    fn prepare(&mut self, hook: &Hook) {
        for (name, _) in programs(hook, Method::Probe) {
            if let Some(Program::KProbe(program)) = self.ebpf.program_mut(&name)
                && program.fd().is_err()
            {
                let _ = program.load();
            }
        }
    }
}

/// The programs that attach a hook by this method, with the name of the method, in the order in which they are
/// attached: the exit first, so that no entry is noted whose exit is missed.
fn programs(hook: &Hook, method: Method) -> Vec<(String, &'static str)> {
    let (entry, exit) = match method {
        Method::RawTracepoint => return vec![(hook.name.to_owned(), "raw_tracepoint")],
        Method::Trampoline => ("fentry", "fexit"),
        Method::Probe => ("kprobe", "kretprobe"),
    };
    let Target::Function(_, phases) = hook.target else {
        return Vec::new();
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
