//! What this kernel offers, looked at once: its types, its symbols, its drop
//! reasons, and for each hook where it can be attached or why not. A plan is a
//! value: `doctor` prints it, [`attach`] carries it out.

pub mod attach;
pub mod btf;
pub mod hooks;
pub mod reasons;
mod scan;
pub mod symbols;
pub mod watch;

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use droptrace_common::{ABSENT, IpvsLayout, Layout};

pub use self::{
    attach::{LoadError, LoadOptions, Loaded, load},
    btf::{BtfError, Missing, Types},
    hooks::{EVIDENCE, HOOKS, Hook, Phases, Target, When},
    reasons::Reasons,
    symbols::{Symbols, base_name},
    watch::ModuleWatch,
};
use crate::diagnose::{Gap, PROOFS};

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
    /// Raw tracepoint.
    RawTracepoint,
    /// `fentry` and `fexit`: cheapest, for functions of the kernel proper.
    Trampoline,
    /// `kprobe` and `kretprobe`.
    Probe,
}

impl Method {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::RawTracepoint, Self::Trampoline, Self::Probe];
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
    /// [`btf::LAYOUT_5_10`].
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
    types: Types,
    /// Functions that the BTF of loaded modules describes, by module.
    module_functions: HashMap<&'static str, HashSet<&'static str>>,
    modules: Vec<(&'static str, u64)>,
    has_symbols: bool,
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
        let types =
            Types::read(&options.path("sys/kernel/btf/vmlinux"), &wanted()).map_err(PlanError::NoBtf)?;
        let (layout, missing) = btf::layout(&types);
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
            types,
            module_functions: HashMap::new(),
            modules: Vec::new(),
            has_symbols: false,
            has_kprobes: options.path("sys/bus/event_source/devices/kprobe").exists(),
            options: options.clone(),
        };
        plan.read_modules();
        if !plan.choose_all() {
            plan.find_symbols()?;
        }
        Ok(plan)
    }

    /// Looks again at what changes when a module comes or goes: symbols, and all that depends on them.
    ///
    /// # Errors
    /// `/proc/kallsyms` cannot be read.
    pub fn refresh(&mut self) -> Result<(), PlanError> {
        let symbols = self.symbol_reader()()?;
        self.read_modules();
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

    /// The ids of those functions of the kernel proper that trampolines may go to.
    fn function_ids(&self) -> Result<aya::Btf, aya::BtfError> {
        let functions = self.types.functions_alone(function_names());
        aya::Btf::parse(&functions, aya::Endianness::default())
    }

    /// Reads the BTF of those modules that hooks and reasons need.
    fn read_modules(&mut self) {
        let wanted = wanted();
        self.modules = module_identities(&self.options.root);
        self.module_functions.clear();
        let mut loaded: Vec<Types> = Vec::new();
        for module in module_names() {
            let path = self.options.path("sys/kernel/btf").join(module);
            if let Ok(types) = self.types.read_module(&path, &wanted) {
                let functions = function_names().filter(|name| types.has_function(name)).collect();
                self.module_functions.insert(module, functions);
                loaded.push(types);
            }
        }
        let mut reasons = Reasons::default();
        let all: Vec<&Types> = loaded.iter().chain([&self.types]).collect();
        for types in &all {
            reasons.add(types);
        }
        self.reasons = Arc::new(reasons);
        (self.module_layout, self.module_missing) = btf::module_layout(&all);
        self.module_layout_source = ModuleLayoutSource::Btf;
        if self.kernel.version() == Some((5, 10))
            && self.module_layout == IpvsLayout::ABSENT
            && !self.options.path("sys/kernel/btf/ip_vs").exists()
        {
            self.module_layout = btf::LAYOUT_5_10;
            self.module_missing.clear();
            self.module_layout_source = ModuleLayoutSource::Table;
        }
    }

    /// `None`: it takes the symbols to tell.
    fn choose(&self, hook: &'static Hook) -> Option<Choice> {
        if hook.when == When::WithoutReasons && self.has_reasons() {
            return Some(Choice::NotNeeded {
                reason: "skb:kfree_skb gives a reason that says the same".to_owned(),
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
            methods: vec![Method::RawTracepoint],
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
        let (module, methods) = if self.types.has_function(name) {
            (None, self.methods(hook.module.is_none()))
        } else {
            let module = hook.module?;
            self.module_functions.get(module)?.get(name)?;
            (Some(module.to_owned()), self.methods(false))
        };
        (!methods.is_empty()).then(|| Place {
            symbol: name.to_owned(),
            module,
            methods,
        })
    }

    fn methods(&self, trampoline: bool) -> Vec<Method> {
        let mut methods = Vec::new();
        if trampoline {
            methods.push(Method::Trampoline);
        }
        if self.has_kprobes {
            methods.push(Method::Probe);
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
            hook.module.is_none()
                && function.module.is_none()
                && function.name == name
                && self.types.has_function(name),
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
        if self.has_reasons() && self.layout.kfree_skb_arguments < 4 {
            let fields = OF_THE_SOCKET.iter().flat_map(|(causes, fields)| {
                causes
                    .iter()
                    .flat_map(|cause| fields.iter().map(move |field| (cause, field)))
            });
            gaps.extend(fields.map(|(cause, field)| {
                Gap {
                    cause: (*cause).to_owned(),
                    field: Some((*field).to_owned()),
                    reason: "the tracepoint skb:kfree_skb of this kernel does not name the receiving socket"
                        .to_owned(),
                }
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
            gaps.push(Gap {
                cause: "unknown".to_owned(),
                field: Some("location".to_owned()),
                reason: "/proc/kallsyms hides addresses, so that what only the place of the drop tells is unknown: run as root, with `sysctl kernel.kptr_restrict` below 2".to_owned(),
            });
        }
        gaps
    }
}

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

#[cfg(test)]
mod tests {
    use super::{btf::blob::Blob, *};

    const KALLSYMS: &str = "\
ffffffff81000100 T tcp_conn_request
ffffffff81000200 t tcp_peer_is_proven.isra.0
ffffffff81000300 T tcp_v4_syn_recv_sock
ffffffff81000400 t ip_handle_martian_source.isra.0
ffffffff81000500 t tcp_check_req
ffffffff81000600 t tcp_check_req
ffffffff81000700 T arp_error_report
";

    const IP_VS: &str = "\
ffffffffc0000100 t ip_vs_leave\t[ip_vs]
ffffffffc0000200 t ip_vs_in.part.0\t[ip_vs]
";

    struct Fixture {
        root: tempfile::TempDir,
    }

    impl Fixture {
        /// A kernel that has what its hooks need, with functions whose types it does not describe.
        fn new(release: &str, kfree_skb_arguments: usize, kallsyms: &str) -> Self {
            const DESCRIBED: &[&str] = &[
                "tcp_conn_request",
                "tcp_v4_syn_recv_sock",
                "ip_handle_martian_source",
                "arp_error_report",
                "tcp_peer_is_proven",
            ];
            Self::describing(DESCRIBED.iter().copied(), release, kfree_skb_arguments, kallsyms)
        }

        fn describing(
            functions: impl Iterator<Item = &'static str>,
            release: &str,
            kfree_skb_arguments: usize,
            kallsyms: &str,
        ) -> Self {
            let fixture = Self {
                root: tempfile::tempdir().unwrap(),
            };
            let mut blob = Blob::new();
            let word = blob.int("u32", 4);
            let parameters = [
                ("sk", word),
                ("skb", word),
                ("req", word),
                ("dev", word),
                ("neigh", word),
            ];
            for function in functions {
                let count = if function == "tcp_peer_is_proven" { 2 } else { 5 };
                blob.function(function, &parameters[..count]);
            }
            let members =
                ["len", "head", "data", "protocol", "network_header"].map(|name| (name, word, 0, 0));
            blob.structure("sk_buff", 4, &members);
            blob.structure("bpf_array", 8, &[("pptrs", word, 0, 0)]);
            let pair = blob.structure("", 8, &[("net", word, 0, 0), ("net_statistics", word, 32, 0)]);
            blob.structure("net", 16, &[("mib", pair, 0, 0)]);
            blob.structure(
                "sock_common",
                20,
                &[("skc_net", pair, 64, 0), ("skc_refcnt", word, 128, 0)],
            );
            blob.enumeration(
                "",
                &[
                    ("LINUX_MIB_LISTENOVERFLOWS", 19),
                    ("LINUX_MIB_LISTENDROPS", 20),
                    ("LINUX_MIB_TCPREQQFULLDROP", 75),
                ],
            );
            blob.tracepoint("kfree_skb", kfree_skb_arguments);
            if kfree_skb_arguments > 2 {
                blob.enumeration("skb_drop_reason", &[("SKB_DROP_REASON_IP_RPFILTER", 16)]);
            }
            fixture.write("sys/kernel/btf/vmlinux", &blob.bytes());
            fixture.write("proc/kallsyms", kallsyms.as_bytes());
            if kallsyms.contains("[ip_vs]") {
                fixture.write("sys/module/ip_vs/initstate", b"live\n");
            }
            fixture.write("proc/sys/kernel/osrelease", format!("{release}\n").as_bytes());
            fixture.write("proc/sys/kernel/random/boot_id", b"0-1\n");
            fixture.write("sys/bus/event_source/devices/kprobe/type", b"8\n");
            fixture
        }

        fn write(&self, path: &str, bytes: &[u8]) {
            let path = self.root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }

        fn remove(&self, path: &str) {
            fs::remove_dir_all(self.root.path().join(path)).unwrap();
        }

        fn plan(&self, hidden: &[&str]) -> Plan {
            self.try_plan(hidden).unwrap()
        }

        fn try_plan(&self, hidden: &[&str]) -> Result<Plan, PlanError> {
            Plan::probe(&ProbeOptions {
                root: self.root.path().to_owned(),
                hide_symbols: hidden.iter().map(|name| (*name).to_owned()).collect(),
            })
        }
    }

    fn choice<'a>(plan: &'a Plan, name: &str) -> &'a Choice {
        &plan
            .hooks
            .iter()
            .find(|planned| planned.hook.name == name)
            .unwrap()
            .choice
    }

    fn place(symbol: &str, module: Option<&str>, methods: &[Method]) -> Choice {
        Choice::Attach(Place {
            symbol: symbol.to_owned(),
            module: module.map(str::to_owned),
            methods: methods.to_vec(),
        })
    }

    fn impossible(choice: &Choice) -> &str {
        match choice {
            Choice::Impossible { reason } => reason,
            other => panic!("it can be attached: {other:?}"),
        }
    }

    fn gaps<'a>(plan: &'a Plan, cause: &str) -> Vec<Option<&'a str>> {
        plan.gaps
            .iter()
            .filter(|gap| gap.cause == cause)
            .map(|gap| gap.field.as_deref())
            .collect()
    }

    #[test]
    fn each_hook_goes_where_this_kernel_lets_it() {
        let plan = Fixture::new("6.12.1", 4, KALLSYMS).plan(&[]);
        assert_eq!(plan.kernel.version(), Some((6, 12)));
        assert_eq!(
            *choice(&plan, "tcp_conn_request"),
            place("tcp_conn_request", None, &[Method::Trampoline, Method::Probe])
        );
        // Split by the compiler: only its return value can be had.
        assert_eq!(
            *choice(&plan, "tcp_peer_is_proven"),
            place("tcp_peer_is_proven.isra.0", None, &[Method::Probe])
        );
        assert!(impossible(choice(&plan, "ip_handle_martian_source")).contains("no function"));
        assert!(impossible(choice(&plan, "tcp_check_req")).contains("2 functions"));
        assert_eq!(*choice(&plan, "ip_vs_leave"), Choice::Waiting { module: "ip_vs" });
    }

    #[test]
    fn reasons_make_hooks_needless_and_causes_seen() {
        let without = Fixture::new("5.10.0-46-amd64", 2, KALLSYMS).plan(&[]);
        assert!(!without.has_reasons());
        assert!(matches!(choice(&without, "arp_error_report"), Choice::Attach(_)));
        assert_eq!(gaps(&without, "rp-filter"), [None]);
        let with = Fixture::new("6.1.0", 3, KALLSYMS).plan(&[]);
        assert!(with.has_reasons());
        assert!(matches!(choice(&with, "icmp_send"), Choice::NotNeeded { .. }));
        // The reason tells the cause; what the hook reads is missing.
        assert!(!gaps(&with, "rp-filter").contains(&None));
        assert!(gaps(&with, "rp-filter").contains(&Some("rp_filter")));
        assert_eq!(gaps(&with, "local-source"), [None]);
    }

    #[test]
    fn a_hidden_symbol_costs_its_own_causes_alone() {
        let fixture = Fixture::new("6.12.1", 4, KALLSYMS);
        let (whole, hidden) = (fixture.plan(&[]), fixture.plan(&["tcp_v4_syn_recv_sock"]));
        assert!(impossible(choice(&hidden, "tcp_v4_syn_recv_sock")).contains("hidden by request"));
        let more: Vec<&Gap> = hidden
            .gaps
            .iter()
            .filter(|gap| !whole.gaps.contains(gap))
            .collect();
        assert_eq!(more.len(), 1);
        assert_eq!(more[0].cause, "accept-queue-full");
        assert_eq!(
            more[0].field.as_deref(),
            Some("stage: ack and syncookie-ack, IPv4")
        );
        assert!(whole.gaps.iter().all(|gap| hidden.gaps.contains(gap)));
    }

    #[test]
    fn only_5_10_without_module_btf_takes_the_table() {
        let kallsyms = format!("{KALLSYMS}{IP_VS}");
        let old = Fixture::new("5.10.0-46-amd64", 2, &kallsyms).plan(&[]);
        assert_eq!(old.module_layout_source, ModuleLayoutSource::Table);
        assert_eq!(
            *choice(&old, "ip_vs_leave"),
            place("ip_vs_leave", Some("ip_vs"), &[Method::Probe])
        );
        assert_eq!(
            *choice(&old, "ip_vs_in"),
            place("ip_vs_in.part.0", Some("ip_vs"), &[Method::Probe])
        );
        let other = Fixture::new("5.12.0", 2, &kallsyms).plan(&[]);
        assert_eq!(other.module_layout, IpvsLayout::ABSENT);
        assert!(impossible(choice(&other, "ip_vs_leave")).contains("ip_vs_leave(skb)"));
        assert_eq!(gaps(&other, "ipvs-no-destination"), [None]);
    }

    #[test]
    fn a_module_that_comes_brings_its_hooks() {
        let fixture = Fixture::new("5.10.0-46-amd64", 2, KALLSYMS);
        let mut plan = fixture.plan(&[]);
        assert_eq!(*choice(&plan, "ip_vs_leave"), Choice::Waiting { module: "ip_vs" });
        fixture.write("proc/kallsyms", format!("{KALLSYMS}{IP_VS}").as_bytes());
        fixture.write("sys/module/ip_vs/initstate", b"live\n");
        plan.refresh().unwrap();
        assert!(matches!(choice(&plan, "ip_vs_leave"), Choice::Attach(_)));
    }

    #[test]
    fn without_kprobes_fentry_remains() {
        let fixture = Fixture::new("6.12.1", 4, &format!("{KALLSYMS}{IP_VS}"));
        fixture.remove("sys/bus");
        let plan = fixture.plan(&[]);
        assert_eq!(
            *choice(&plan, "tcp_conn_request"),
            place("tcp_conn_request", None, &[Method::Trampoline])
        );
        assert!(impossible(choice(&plan, "ip_vs_leave")).contains("no kprobes"));
    }

    #[test]
    fn hidden_addresses_are_told_as_such() {
        let kallsyms = KALLSYMS
            .lines()
            .map(|line| format!("0000000000000000{}", &line[16..]))
            .collect::<Vec<_>>()
            .join("\n");
        let plan = Fixture::new("6.12.1", 4, &kallsyms).plan(&[]);
        let gap = plan
            .gaps
            .iter()
            .find(|gap| gap.field.as_deref() == Some("location"));
        assert!(gap.unwrap().reason.contains("kptr_restrict"));
        // What is attached by name needs no address.
        assert!(matches!(choice(&plan, "tcp_conn_request"), Choice::Attach(_)));
    }

    #[test]
    fn symbols_are_left_for_later_where_types_say_enough() {
        let kallsyms = format!("{KALLSYMS}ffffffff81000800 t tcp_v4_syn_recv_sock\n");
        let fixture = Fixture::describing(function_names(), "6.12.1", 4, &kallsyms);
        let mut plan = fixture.plan(&["tcp_v6_conn_request"]);
        assert!(!plan.has_symbols());
        assert_eq!(
            *choice(&plan, "tcp_v4_syn_recv_sock"),
            place("tcp_v4_syn_recv_sock", None, &[Method::Trampoline, Method::Probe])
        );
        assert!(impossible(choice(&plan, "tcp_v6_conn_request")).contains("hidden by request"));
        plan.find_symbols().unwrap();
        assert!(impossible(choice(&plan, "tcp_v4_syn_recv_sock")).contains("2 functions"));
        assert!(impossible(choice(&plan, "tcp_v6_syn_recv_sock")).contains("no function"));
        assert!(matches!(choice(&plan, "tcp_conn_request"), Choice::Attach(_)));
    }

    #[test]
    fn no_btf_is_an_error_that_names_the_next_step() {
        let fixture = Fixture::new("6.12.1", 4, KALLSYMS);
        fixture.remove("sys/kernel/btf");
        let Err(error) = fixture.try_plan(&[]) else {
            panic!("a plan without BTF")
        };
        assert!(matches!(error, PlanError::NoBtf(BtfError::Absent { .. })));
        assert!(error.to_string().contains("next:"));
    }

    #[test]
    fn identities_of_modules_leave_out_what_is_built_in_or_going() {
        let fixture = Fixture::new("6.12.1", 4, KALLSYMS);
        fixture.write("sys/module/ip_vs/initstate", b"live\n");
        fixture.write("sys/module/nf_conntrack/initstate", b"going\n");
        fixture.write("sys/module/nf_reject_ipv4/parameters/x", b"");
        let names: Vec<&str> = module_identities(fixture.root.path())
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["ip_vs"]);
    }
}
