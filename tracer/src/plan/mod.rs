//! What this kernel offers, looked at once: its types, its symbols, its drop
//! reasons, and for each hook where it can be attached or why not. A plan is a
//! value: `doctor` prints it, [`attach`] carries it out.

pub mod attach;
#[cfg(test)]
mod blob;
pub mod btf;
pub mod detach;
pub mod hooks;
pub mod layout;
pub mod reasons;
mod scan;
pub mod symbols;
#[cfg(test)]
mod tests;
pub mod watch;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use droptrace_common::{ABSENT, IpvsLayout, Layout};

pub use self::{
    attach::{LoadError, LoadOptions, Loaded, load},
    btf::{Attachable, BtfError, Types},
    hooks::{EVIDENCE, HOOKS, Hook, Phases, Target, When},
    layout::Missing,
    reasons::Reasons,
    symbols::{Symbols, base_name},
    watch::ModuleWatch,
};
use crate::diagnose::{Cause, Gap, PROOFS, reasons::told_by_place};

/// Where to look, and what to overlook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeOptions {
    /// Prefix of `/proc` and `/sys`, for tests.
    pub root: PathBuf,
    /// Functions to treat as absent, for tests of reduced coverage.
    pub hide_symbols: Vec<String>,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self {
            root: PathBuf::from("/"),
            hide_symbols: Vec::new(),
        }
    }
}

impl ProbeOptions {
    fn path(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The kernel does not describe its types.
    #[error(
        "{0}, so no field of the kernel's structures can be found; next: use a kernel built with CONFIG_DEBUG_INFO_BTF=y (Debian's are, from 5.10 on)"
    )]
    NoBtf(BtfError),
    /// A file that every kernel has cannot be read.
    #[error("cannot read {path}: {error}; next: mount /proc, and see that this process may read it")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// Which kernel it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kernel {
    /// Release, as `uname -r` gives it.
    pub release: String,
    /// Boot id.
    pub boot_id: String,
}

impl Kernel {
    fn read(options: &ProbeOptions) -> Result<Self, PlanError> {
        let line = |relative| {
            let path = options.path(relative);
            match fs::read_to_string(&path) {
                Ok(text) => Ok(text.trim().to_owned()),
                Err(error) => Err(PlanError::Unreadable { path, error }),
            }
        };
        Ok(Self {
            release: line("proc/sys/kernel/osrelease")?,
            boot_id: line("proc/sys/kernel/random/boot_id")?,
        })
    }

    /// Major and minor number, where the release starts with them.
    pub fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self
            .release
            .split(|character: char| !character.is_ascii_digit())
            .map_while(|number| number.parse().ok());
        Some((numbers.next()?, numbers.next()?))
    }
}

/// How a hook can be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Raw tracepoint by a program that knows the types of its arguments (`tp_btf`): cheaper than the next.
    TypedTracepoint,
    /// Raw tracepoint.
    RawTracepoint,
    /// `fentry` and `fexit`: cheapest, for functions of the kernel proper.
    Trampoline,
    /// `kprobe` and `kretprobe`.
    Probe,
}

impl Method {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::TypedTracepoint,
        Self::RawTracepoint,
        Self::Trampoline,
        Self::Probe,
    ];
}

/// Where a hook goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Function or tracepoint, as the kernel calls it.
    pub symbol: String,
    /// Module that it lies in; `None` for the kernel proper.
    pub module: Option<String>,
    /// Ways to attach to it, to be tried in this order.
    pub methods: Vec<Method>,
}

/// What the kernel offers for a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// It can be attached here, as far as can be told without trying.
    Attach(Place),
    /// Its module is not loaded, so nothing can be dropped there.
    Waiting {
        /// Name of the module.
        module: &'static str,
    },
    /// This kernel tells the same in another way.
    NotNeeded {
        /// Which.
        reason: String,
    },
    /// It cannot be attached.
    Impossible {
        /// Why.
        reason: String,
    },
}

/// A row of the hook table, and what this kernel offers for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedHook {
    /// The row.
    pub hook: &'static Hook,
    /// What the kernel offers.
    pub choice: Choice,
}

/// Where the [layout of modules](Plan::module_layout) comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleLayoutSource {
    /// The kernel's own BTF.
    Btf,
    /// [`layout::LAYOUT_5_10`].
    Table,
}

/// What this kernel offers.
pub struct Plan {
    /// Which kernel it is.
    pub kernel: Kernel,
    /// Offsets and argument indexes of the kernel proper.
    pub layout: Layout,
    /// Those of modules that are loaded.
    pub module_layout: IpvsLayout,
    /// Where the latter come from.
    pub module_layout_source: ModuleLayoutSource,
    /// Symbols, as of the last look; empty until they are looked for.
    pub symbols: Arc<Symbols>,
    /// Names of drop reasons.
    pub reasons: Arc<Reasons>,
    /// Every hook.
    pub hooks: Vec<PlannedHook>,
    /// What cannot be seen, as far as can be told without attaching.
    pub gaps: Vec<Gap>,
    missing: Vec<Missing>,
    module_missing: Vec<Missing>,
    /// What of the kernel proper programs can be attached to, by its id. The BTF itself is megabytes, hence not kept.
    attachable: BTreeMap<u32, Attachable>,
    /// Functions that the BTF of loaded modules describes, by module.
    module_functions: HashMap<&'static str, HashSet<&'static str>>,
    modules: Vec<(&'static str, u64)>,
    has_symbols: bool,
    /// Causes of which some drops go unnamed, since the kernel hides its addresses.
    placeless: Vec<&'static Cause>,
    has_kprobes: bool,
    options: ProbeOptions,
}

/// Why a hook has no place.
enum Nowhere {
    /// BTF alone does not tell: the symbols must be looked at.
    NotKnown,
    /// The kernel offers none, and why.
    Refused(String),
}

impl Plan {
    /// Looks at the running kernel. Its symbols are left for later where its types say enough to attach all hooks: they
    /// take the kernel longer to list than all the rest takes.
    ///
    /// # Errors
    /// The kernel has no BTF, or `/proc` cannot be read. Anything else that is missing is a gap.
    pub fn probe(options: &ProbeOptions) -> Result<Self, PlanError> {
        let types = kernel_types(options)?;
        let (layout, missing) = layout::of_kernel(&types);
        let mut plan = Self {
            kernel: Kernel::read(options)?,
            layout,
            module_layout: IpvsLayout::ABSENT,
            module_layout_source: ModuleLayoutSource::Btf,
            symbols: Arc::default(),
            reasons: Arc::default(),
            hooks: Vec::new(),
            gaps: Vec::new(),
            missing,
            module_missing: Vec::new(),
            attachable: types.attachable(function_names()),
            module_functions: HashMap::new(),
            modules: Vec::new(),
            has_symbols: false,
            placeless: Vec::new(),
            has_kprobes: options.path("sys/bus/event_source/devices/kprobe").exists(),
            options: options.clone(),
        };
        plan.read_modules(&types);
        if !plan.choose_all() {
            plan.find_symbols()?;
        }
        Ok(plan)
    }

    /// Looks again at what changes when a module comes or goes: symbols, and all that depends on them.
    ///
    /// # Errors
    /// `/proc/kallsyms` or the kernel's BTF cannot be read.
    pub fn refresh(&mut self) -> Result<(), PlanError> {
        let symbols = self.symbol_reader()()?;
        self.read_modules(&kernel_types(&self.options)?);
        self.found_symbols(symbols);
        Ok(())
    }

    /// Looks at the symbols now if that was left for later, and chooses the places of hooks by them.
    ///
    /// # Errors
    /// `/proc/kallsyms` cannot be read.
    pub fn find_symbols(&mut self) -> Result<(), PlanError> {
        if self.has_symbols {
            return Ok(());
        }
        let symbols = self.symbol_reader()()?;
        self.found_symbols(symbols);
        Ok(())
    }

    /// Chooses the places of hooks by these symbols.
    pub fn found_symbols(&mut self, symbols: Symbols) {
        self.symbols = Arc::new(symbols);
        self.has_symbols = true;
        self.placeless = if self.symbols.has_addresses() {
            Vec::new()
        } else {
            told_by_place(&self.reasons.all())
        };
        let chosen = self.choose_all();
        debug_assert!(chosen, "symbols leave no question open");
    }

    /// Whether the symbols are those of the modules that are loaded now.
    pub fn symbols_are_current(&self) -> bool {
        let modules = fs::read_to_string(self.options.path("proc/modules")).unwrap_or_default();
        self.symbols.are_of(&modules)
    }

    /// Whether the symbols were looked at.
    pub const fn has_symbols(&self) -> bool {
        self.has_symbols
    }

    /// What reads the symbols, on whatever thread. It fails where `/proc/kallsyms` cannot be read.
    pub fn symbol_reader(&self) -> impl FnOnce() -> Result<Symbols, PlanError> + Send + use<> {
        let proc = self.options.path("proc");
        move || {
            Symbols::read(&proc).map_err(|error| PlanError::Unreadable {
                path: proc.join("kallsyms"),
                error,
            })
        }
    }

    /// Chooses a place for each hook. False: it takes the symbols to tell.
    fn choose_all(&mut self) -> bool {
        let chosen = HOOKS
            .iter()
            .map(|hook| self.choose(hook))
            .collect::<Option<Vec<_>>>();
        let Some(chosen) = chosen else {
            return false;
        };
        self.hooks = HOOKS
            .iter()
            .zip(chosen)
            .map(|(hook, choice)| PlannedHook { hook, choice })
            .collect();
        self.gaps = self.gaps_given(self.hooks.iter().filter_map(|planned| match &planned.choice {
            Choice::Impossible { reason } => Some((planned.hook, reason.as_str())),
            _ => None,
        }));
        true
    }

    /// Whether `skb:kfree_skb` gives a reason.
    pub fn has_reasons(&self) -> bool {
        self.layout.kfree_skb_arguments != ABSENT && self.layout.kfree_skb_arguments >= 3
    }

    /// Whether `skb:kfree_skb` gives a reason, but not the receiving socket (5.17 - 6.10).
    fn hides_socket(&self) -> bool {
        self.has_reasons() && self.layout.kfree_skb_arguments < 4
    }

    /// Whether BTF describes this function of the kernel proper.
    fn has_function(&self, name: &str) -> bool {
        self.attachable
            .values()
            .any(|each| matches!(each, Attachable::Function(own) if *own == name))
    }

    /// Reads the BTF of those modules that hooks and reasons need.
    fn read_modules(&mut self, types: &Types) {
        let wanted = wanted();
        self.modules = module_identities(&self.options.root);
        self.module_functions.clear();
        let mut loaded: Vec<Types> = Vec::new();
        for module in module_names() {
            let path = self.options.path("sys/kernel/btf").join(module);
            if let Ok(own) = types.read_module(&path, &wanted) {
                let functions = function_names().filter(|name| own.has_function(name)).collect();
                self.module_functions.insert(module, functions);
                loaded.push(own);
            }
        }
        let mut reasons = Reasons::default();
        let all: Vec<&Types> = loaded.iter().chain([types]).collect();
        for types in &all {
            reasons.add(types);
        }
        self.reasons = Arc::new(reasons);
        (self.module_layout, self.module_missing) = layout::of_modules(&all);
        self.module_layout_source = ModuleLayoutSource::Btf;
        if self.kernel.version() == Some((5, 10))
            && self.module_layout == IpvsLayout::ABSENT
            && !self.options.path("sys/kernel/btf/ip_vs").exists()
        {
            self.module_layout = layout::LAYOUT_5_10;
            self.module_missing.clear();
            self.module_layout_source = ModuleLayoutSource::Table;
        }
    }

    /// Why this kernel needs no hook that is attached then.
    fn not_needed(&self, when: When) -> Option<&'static str> {
        let preempts = || self.kernel.version().is_none_or(|version| version >= (6, 13));
        match when {
            When::WithoutReasons => self
                .has_reasons()
                .then_some("skb:kfree_skb gives a reason that says the same"),
            When::WithoutSocket => (!self.hides_socket()).then_some("what it tells is known without it"),
            When::Preempted => {
                (!preempts()).then_some("a task is not preempted within a tracepoint of this kernel")
            }
            When::Always | When::IpvsWanted => None,
        }
    }

    /// `None`: it takes the symbols to tell.
    fn choose(&self, hook: &'static Hook) -> Option<Choice> {
        if let Some(reason) = self.not_needed(hook.when) {
            return Some(Choice::NotNeeded {
                reason: reason.to_owned(),
            });
        }
        let place = match hook.target {
            Target::Tracepoint(name, _) => self.tracepoint(name),
            Target::Function(names, phases) => self.function(hook, names, phases),
        };
        let place = match place {
            Ok(place) => place,
            Err(_)
                if let Some(module) = hook.module
                    && !self.has_module(module) =>
            {
                return Some(Choice::Waiting { module });
            }
            Err(Nowhere::NotKnown) => return None,
            Err(Nowhere::Refused(reason)) => return Some(Choice::Impossible { reason }),
        };
        if let Some(missing) = self
            .missing
            .iter()
            .chain(&self.module_missing)
            .find(|missing| hook.needs.contains(&missing.entry))
        {
            return Some(Choice::Impossible {
                reason: missing.reason.clone(),
            });
        }
        Some(Choice::Attach(place))
    }

    fn is_hidden(&self, name: &str) -> bool {
        self.options.hide_symbols.iter().any(|hidden| hidden == name)
    }

    fn has_module(&self, name: &str) -> bool {
        self.modules.iter().any(|(module, _)| *module == name)
    }

    fn tracepoint(&self, name: &str) -> Result<Place, Nowhere> {
        if self.is_hidden(name) {
            return Err(Nowhere::Refused(format!(
                "tracepoint {name} is hidden by request"
            )));
        }
        Ok(Place {
            symbol: name.to_owned(),
            module: None,
            methods: vec![Method::TypedTracepoint, Method::RawTracepoint],
        })
    }

    fn function(&self, hook: &Hook, names: &[&str], phases: Phases) -> Result<Place, Nowhere> {
        let mut reasons = Vec::new();
        let mut known = true;
        for name in names {
            let place = if self.is_hidden(name) {
                Err(format!("{name} is hidden by request"))
            } else if self.has_symbols {
                self.place_by_symbols(hook, name, phases)
            } else if let Some(place) = self.place_by_types(hook, name) {
                Ok(place)
            } else {
                known = false;
                continue;
            };
            match place {
                Ok(place) => return Ok(place),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(if known {
            Nowhere::Refused(reasons.join(", "))
        } else {
            Nowhere::NotKnown
        })
    }

    /// Where a function is that BTF describes; whether it can be attached there the kernel says.
    fn place_by_types(&self, hook: &Hook, name: &str) -> Option<Place> {
        let (module, methods) = if self.has_function(name) {
            (None, self.methods(hook, hook.module.is_none()))
        } else {
            let module = hook.module?;
            self.module_functions.get(module)?.get(name)?;
            (Some(module.to_owned()), self.methods(hook, false))
        };
        (!methods.is_empty()).then(|| Place {
            symbol: name.to_owned(),
            module,
            methods,
        })
    }

    fn methods(&self, hook: &Hook, trampoline: bool) -> Vec<Method> {
        let mut methods = Vec::new();
        if trampoline {
            methods.push(Method::Trampoline);
        }
        if self.has_kprobes {
            methods.push(Method::Probe);
        }
        if hook.rare {
            methods.reverse();
        }
        methods
    }

    fn place_by_symbols(&self, hook: &Hook, name: &str, phases: Phases) -> Result<Place, String> {
        let ours =
            |function: &symbols::Function<'_>| function.module.is_none() || function.module == hook.module;
        let mut found: Vec<_> = self.symbols.functions(name).filter(ours).collect();
        if found.is_empty() && phases == Phases::Exit {
            // Arguments may have moved in what the compiler made of the function; its return value has not.
            found = self.symbols.variants(name).filter(ours).collect();
        }
        let function = match found.as_slice() {
            [] => return Err(format!("this kernel has no function {name}")),
            [function] => function,
            several => return Err(format!("this kernel has {} functions {name}", several.len())),
        };
        // aya attaches trampolines to functions of the kernel proper only, hence hooks of what is a module elsewhere have
        // probes alone.
        let methods = self.methods(
            hook,
            hook.module.is_none()
                && function.module.is_none()
                && function.name == name
                && self.has_function(name),
        );
        if methods.is_empty() {
            return Err(format!(
                "this kernel has no kprobes (CONFIG_KPROBE_EVENTS), and {} is out of reach of fentry",
                function.name
            ));
        }
        Ok(Place {
            symbol: function.name.to_owned(),
            module: function.module.map(str::to_owned),
            methods,
        })
    }

    /// What cannot be seen when these hooks are lost, each for its reason.
    pub fn gaps_given<'a>(&self, lost: impl IntoIterator<Item = (&'a Hook, &'a str)>) -> Vec<Gap> {
        let mut gaps: Vec<Gap> = Vec::new();
        for (hook, reason) in lost {
            for serves in hook.serves {
                if serves
                    .unless_reason
                    .is_some_and(|reason| self.reasons.has(reason))
                {
                    continue;
                }
                let whole = |gap: &Gap| gap.cause == serves.cause && gap.field.is_none();
                let same = |gap: &Gap| gap.cause == serves.cause && gap.field.as_deref() == serves.part;
                if gaps.iter().any(|gap| whole(gap) || same(gap)) {
                    continue;
                }
                if serves.part.is_none() {
                    gaps.retain(|gap| gap.cause != serves.cause);
                }
                gaps.push(Gap {
                    cause: serves.cause.to_owned(),
                    field: serves.part.map(str::to_owned),
                    reason: match PROOFS.iter().find(|proof| proof.cause == serves.cause) {
                        Some(proof) => format!(
                            "hook {}: {reason}; {} tells how many there are, not of which packets",
                            hook.name,
                            proof.counter()
                        ),
                        None => format!("hook {}: {reason}", hook.name),
                    },
                });
            }
        }
        // What a module brings is missing while it is not loaded, and then nothing is dropped in it.
        let module_missing = self.module_missing.iter().filter(|_| self.has_module("ip_vs"));
        for missing in self.missing.iter().chain(module_missing) {
            for evidence in EVIDENCE.iter().filter(|evidence| evidence.entry == missing.entry) {
                for cause in evidence.causes {
                    if !gaps.iter().any(|gap| gap.cause == *cause && gap.field.is_none()) {
                        gaps.push(Gap {
                            cause: (*cause).to_owned(),
                            field: Some(evidence.field.to_owned()),
                            reason: missing.reason.clone(),
                        });
                    }
                }
            }
        }
        // What a connection has stored is read from the socket that the tracepoint names; kernels without reasons have a
        // hook of their own for it.
        if self.hides_socket() {
            let fields = OF_THE_SOCKET.iter().flat_map(|(causes, fields)| {
                causes
                    .iter()
                    .flat_map(|cause| fields.iter().map(move |field| (cause, field)))
            });
            gaps.extend(fields.map(|(cause, field)| Gap {
                cause: (*cause).to_owned(),
                field: Some((*field).to_owned()),
                reason: if OF_ANSWERED_SEGMENTS.contains(cause) {
                    "the tracepoint skb:kfree_skb of this kernel does not name the receiving socket: known of segments with data, by \
                     the hook tcp_send_dupack"
                } else {
                    "the tracepoint skb:kfree_skb of this kernel does not name the receiving socket"
                }
                .to_owned(),
            }));
        }
        if !self.has_reasons() {
            gaps.extend(UNTRACED.iter().map(|(cause, part)| Gap {
                cause: (*cause).to_owned(),
                field: Some((*part).to_owned()),
                reason: "this kernel frees such segments untraced: a counter tells how many there are, not of which connection"
                    .to_owned(),
            }));
        }
        if self.has_symbols && !self.symbols.has_addresses() {
            let hidden = |cause: &str, field: &str| Gap {
                cause: cause.to_owned(),
                field: Some(field.to_owned()),
                reason: HIDDEN_ADDRESSES.to_owned(),
            };
            let whole: Vec<String> = gaps
                .iter()
                .filter(|gap| gap.field.is_none())
                .map(|gap| gap.cause.clone())
                .collect();
            gaps.extend(
                self.placeless
                    .iter()
                    .filter(|cause| !whole.iter().any(|slug| slug == cause.slug))
                    .map(|cause| hidden(cause.slug, "drops that only their place tells")),
            );
            gaps.push(hidden("unknown", "location"));
        }
        gaps
    }
}

/// Why no place of a drop has a name.
const HIDDEN_ADDRESSES: &str = "/proc/kallsyms hides addresses, so a drop that only its place tells keeps the kernel's reason, or is \
    unknown: run as root, or with CAP_SYSLOG, and with `sysctl kernel.kptr_restrict` below 2";

/// What kernels without drop reasons free without a tracepoint: causes, and what of them is not seen.
const UNTRACED: &[(&str, &str)] = &[
    ("tcp-challenge-ack", "segment: ack"),
    ("tcp-zero-window", "packet"),
    ("tcp-ofo-pruned", "packet"),
];

/// Evidence that is read from the receiving socket: causes, and fields of each.
const OF_THE_SOCKET: &[(&[&str], &[&str])] = &[
    (&["paws-established"], &["timestamp_stored", "behind", "age_s"]),
    (
        &[
            "tcp-challenge-ack",
            "tcp-out-of-window",
            "tcp-zero-window",
            "tcp-ofo-pruned",
        ],
        &["expected_sequence", "window", "ahead"],
    ),
];

/// Those of them whose segments the kernel answers where they have data.
const OF_ANSWERED_SEGMENTS: &[&str] = &["paws-established", "tcp-out-of-window"];

/// Reads the BTF of the kernel proper.
fn kernel_types(options: &ProbeOptions) -> Result<Types, PlanError> {
    Types::read(&options.path("sys/kernel/btf/vmlinux"), &wanted()).map_err(PlanError::NoBtf)
}

/// Functions that hooks may go to.
fn function_names() -> impl Iterator<Item = &'static str> {
    HOOKS.iter().flat_map(|hook| match hook.target {
        Target::Function(names, _) => names.iter().copied(),
        Target::Tracepoint(..) => [].iter().copied(),
    })
}

/// All that is looked for in BTF.
fn wanted() -> btf::Wanted {
    btf::Wanted::by_layouts()
        .and(function_names())
        .and(reasons::wanted())
}

/// Modules whose BTF is read, each once.
fn module_names() -> impl Iterator<Item = &'static str> {
    let mut names: Vec<&str> = HOOKS
        .iter()
        .filter_map(|hook| hook.module)
        .chain(reasons::MODULES.iter().copied())
        .collect();
    names.sort_unstable();
    names.dedup();
    names.into_iter()
}

/// Modules that hooks wait for, with a number that changes when one is unloaded and loaded again.
fn module_identities(root: &Path) -> Vec<(&'static str, u64)> {
    use std::os::unix::fs::MetadataExt as _;

    module_names()
        .filter_map(|name| {
            let directory = root.join("sys/module").join(name);
            // A module that is built in has no such file.
            let state = fs::read_to_string(directory.join("initstate")).ok()?;
            (state.trim() != "going").then_some(())?;
            Some((name, fs::metadata(directory).ok()?.ino()))
        })
        .collect()
}
