//! Which causes this kernel shows.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    cli::run,
    diagnose::{Coverage, Gap, HookState, ScopeText, catalogue},
    plan::{Choice, Loaded, Method, Plan, PlannedHook, When},
};

/// How much of a cause can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Seen {
    /// All of it.
    Full,
    /// All of it, once a module is loaded; until then nothing is dropped there.
    WithModule,
    /// Some of its drops, or not all of its evidence.
    Partly,
    /// Nothing of it.
    No,
}

impl Seen {
    /// `tried`: attaching was, hence this is known.
    pub(super) const fn words(self, tried: bool) -> &'static str {
        match self {
            Self::Full if !tried => "would be seen",
            Self::WithModule if !tried => {
                "would be seen once its module is loaded; until then it cannot occur"
            }
            Self::Partly if !tried => "would be seen in part",
            Self::Full => "seen",
            Self::WithModule => "seen once its module is loaded; until then it cannot occur",
            Self::Partly => "seen in part",
            Self::No => "not seen",
        }
    }
}

/// What this kernel shows of a cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct CauseCoverage {
    pub(super) cause: &'static str,
    pub(super) seen: Seen,
    /// What is missing, and why.
    pub(super) gaps: Vec<String>,
}

/// The plan as a record of coverage, before anything is attached.
pub(super) fn of_plan(plan: &Plan) -> Coverage {
    let hooks = plan.hooks.iter().map(hook_state).collect();
    coverage(plan, hooks, plan.gaps.clone())
}

/// What really became of the hooks.
pub(super) fn of_run(plan: &Plan, loaded: &Loaded) -> Coverage {
    coverage(plan, loaded.states(), loaded.gaps(plan))
}

fn coverage(plan: &Plan, hooks: Vec<HookState>, gaps: Vec<Gap>) -> Coverage {
    Coverage {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel: plan.kernel.release.clone(),
        boot_id: plan.kernel.boot_id.clone(),
        scope: ScopeText::default(),
        hooks,
        gaps,
        notes: run::notes(plan, &BTreeMap::new()),
    }
}

fn hook_state(planned: &PlannedHook) -> HookState {
    let mut hook = HookState {
        hook: planned.hook.name.to_owned(),
        symbol: None,
        method: None,
        state: String::new(),
        reason: None,
    };
    let (state, reason) = match &planned.choice {
        Choice::Attach(place) => {
            let methods: Vec<&str> = place.methods.iter().map(|method| method_name(*method)).collect();
            hook.symbol = Some(place.symbol.clone());
            hook.method = Some(methods.join(", else "));
            let condition = (planned.hook.when == When::IpvsWanted).then(|| {
                "attached only where IPVS services have expire_nodest_conn=0, or with --ipvs".to_owned()
            });
            ("attachable", condition)
        }
        Choice::Waiting { module } => ("waiting", Some(format!("module {module} is not loaded"))),
        Choice::NotNeeded { reason } => ("not_needed", Some(reason.clone())),
        Choice::Impossible { reason } => ("failed", Some(reason.clone())),
    };
    state.clone_into(&mut hook.state);
    hook.reason = reason;
    hook
}

const fn method_name(method: Method) -> &'static str {
    match method {
        Method::TypedTracepoint => "tp_btf",
        Method::RawTracepoint => "raw_tracepoint",
        Method::Trampoline => "fentry/fexit",
        Method::Probe => "kprobe/kretprobe",
    }
}

/// Each cause of the catalogue.
pub(super) fn by_cause(plan: &Plan, gaps: &[Gap]) -> Vec<CauseCoverage> {
    catalogue()
        .iter()
        .map(|cause| {
            let gaps: Vec<_> = gaps.iter().filter(|gap| gap.cause == cause.slug).collect();
            let waits = waits(plan, cause.slug);
            let seen = if gaps.iter().any(|gap| gap.field.is_none()) {
                Seen::No
            } else if !gaps.is_empty() {
                Seen::Partly
            } else if waits {
                Seen::WithModule
            } else {
                Seen::Full
            };
            CauseCoverage {
                cause: cause.slug,
                seen,
                gaps: gaps
                    .iter()
                    .map(|gap| match &gap.field {
                        Some(field) => format!("without {field}: {}", gap.reason),
                        None => gap.reason.clone(),
                    })
                    .collect(),
            }
        })
        .collect()
}

/// Whether the cause needs a module that is not loaded.
fn waits(plan: &Plan, slug: &str) -> bool {
    let serving = || {
        plan.hooks.iter().filter_map(|planned| {
            let serves = planned.hook.serves.iter().find(|serves| serves.cause == slug)?;
            let waiting = matches!(planned.choice, Choice::Waiting { .. });
            Some((waiting, serves.part.is_none()))
        })
    };
    let all_wait = serving().next().is_some() && serving().all(|(waiting, _)| waiting);
    all_wait || serving().any(|(waiting, whole)| waiting && whole)
}
