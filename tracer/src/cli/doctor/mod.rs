//! `droptrace doctor`: what this kernel offers, and what on this host makes drops likely.

mod advice;
mod coverage;

use std::{
    fmt::Write as _,
    io::{IsTerminal, stdout},
    process::ExitCode,
};

use serde::Serialize;

use self::{
    advice::{Advice, Likelihood},
    coverage::{CauseCoverage, Seen},
};
use super::args::DoctorArgs;
use crate::{
    bpf,
    context::survey::{Survey, survey},
    diagnose::Coverage,
    plan::{self, LoadOptions, Loaded, Plan, ProbeOptions},
    sink::{Paint, words},
};

/// Everything that doctor says.
#[derive(Debug, Serialize)]
struct Report {
    coverage: Coverage,
    causes: Vec<CauseCoverage>,
    advice: Vec<Advice>,
    /// Why attaching was not tried, so that a hook called attachable may yet fail; null when it was.
    attach_not_tried: Option<String>,
    /// What could not be looked at, and why.
    problems: Vec<String>,
}

/// Attaches every hook and takes it off again: only this tells for sure.
fn try_to_attach(plan: &mut Plan) -> Result<Loaded, String> {
    let object = bpf::OBJECT
        .ok_or("this droptrace was built without its BPF object; next: build it with `cargo xtask build`")?;
    let attached = plan::load(plan, object, &LoadOptions::default()).and_then(|mut loaded| {
        loaded.attach(plan)?;
        Ok(loaded)
    });
    attached.map_err(|error| error.to_string())
}

pub(super) fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let mut plan = Plan::probe(&ProbeOptions {
        hide_symbols: args.hide_symbols.clone(),
        ..ProbeOptions::default()
    })?;
    plan.find_symbols()?;
    let (surveys, failed) = match survey() {
        Ok(surveys) => (surveys, None),
        Err(error) => (Vec::new(), Some(format!("no netns could be looked at: {error}"))),
    };
    let tried = try_to_attach(&mut plan);
    let coverage = match &tried {
        Ok(loaded) => coverage::of_run(&plan, loaded),
        Err(_) => coverage::of_plan(&plan),
    };
    let report = Report {
        causes: coverage::by_cause(&plan, &coverage.gaps),
        coverage,
        attach_not_tried: tried.err(),
        advice: surveys.iter().flat_map(advice::of_netns).collect(),
        problems: failed
            .into_iter()
            .chain(surveys.iter().flat_map(problems))
            .collect(),
    };
    let text = if args.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        let paint = Paint::for_terminal(stdout().is_terminal());
        text(&report, plan.has_reasons(), paint)
    };
    super::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn problems(survey: &Survey) -> Vec<String> {
    let netns = words::netns(Some(survey.netns), survey.netns_name.as_deref()).unwrap_or_default();
    survey
        .problems
        .iter()
        .map(|problem| format!("netns {netns}: {problem}"))
        .collect()
}

fn text(report: &Report, has_reasons: bool, paint: Paint) -> String {
    let mut text = format!(
        "Linux {}, drop reasons from the kernel: {}\n",
        report.coverage.kernel,
        if has_reasons { "yes" } else { "no" }
    );
    let tried = match &report.attach_not_tried {
        None => "Hooks (each was attached and taken off again)",
        Some(_) => "Hooks (as far as can be told without attaching)",
    };
    let _ = writeln!(text, "\n{}", paint.heading(tried));
    if let Some(reason) = &report.attach_not_tried {
        let _ = writeln!(text, "  {}", paint.faint(reason));
    }
    for hook in &report.coverage.hooks {
        let where_to = match (&hook.symbol, &hook.method, &hook.reason) {
            (_, _, Some(reason)) => reason.clone(),
            (Some(symbol), Some(method), None) if *symbol == hook.hook => method.clone(),
            (Some(symbol), Some(method), None) => format!("{method} on {symbol}"),
            _ => String::new(),
        };
        let state = hook.state.replace('_', " ");
        let _ = writeln!(text, "  {:<26} {state:<11} {where_to}", hook.hook);
    }
    for note in &report.coverage.notes {
        let _ = writeln!(text, "  {}", paint.faint(&format!("note: {note}")));
    }
    let _ = writeln!(text, "\n{}", paint.heading("Causes"));
    for cause in &report.causes {
        let _ = writeln!(
            text,
            "  {:<26} {}",
            cause.cause,
            cause.seen.words(report.attach_not_tried.is_none())
        );
        for gap in &cause.gaps {
            let _ = writeln!(text, "      {}", paint.faint(gap));
        }
    }
    let _ = writeln!(
        text,
        "\n{}",
        paint.heading("What makes drops likely on this host")
    );
    if report.advice.is_empty() {
        text.push_str("  nothing was found\n");
    }
    for advice in &report.advice {
        advise(&mut text, advice, paint);
    }
    if !report.problems.is_empty() {
        let _ = writeln!(text, "\n{}", paint.heading("Not looked at"));
        for problem in &report.problems {
            let _ = writeln!(text, "  {problem}");
        }
    }
    let seen = if report.attach_not_tried.is_some() {
        "attaching was not tried: the hooks could be attached as far as their symbols tell, so no cause is counted as seen"
            .to_owned()
    } else {
        let full = report
            .causes
            .iter()
            .filter(|cause| matches!(cause.seen, Seen::Full | Seen::WithModule));
        format!(
            "{} of {} causes are seen in full",
            full.count(),
            report.causes.len()
        )
    };
    let findings = words::count(report.advice.len() as u64, "finding");
    let _ = writeln!(text, "\n{seen}; {findings}");
    text
}

fn advise(text: &mut String, advice: &Advice, paint: Paint) {
    let likelihood = match advice.likelihood {
        Likelihood::Likely => "likely",
        Likelihood::Possible => "possible",
        Likelihood::Note => "note",
    };
    let netns = words::netns(Some(advice.netns), advice.netns_name.as_deref()).unwrap_or_default();
    let _ = writeln!(
        text,
        "  {} {likelihood} in netns {netns}: {}",
        paint.strong(advice.cause),
        words::clean(&advice.finding)
    );
    for remedy in &advice.remedy {
        let _ = writeln!(text, "      {}", words::clean(&remedy.action));
        if let Some(command) = &remedy.command {
            let _ = writeln!(text, "      $ {}", words::clean(command));
        }
        let _ = writeln!(text, "      {}", paint.faint(&remedy.effect));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        diagnose::{Gap, HookState, Remedy, ScopeText},
        sink::Paint,
    };

    #[test]
    fn a_report_reads_well() {
        let report = Report {
            coverage: Coverage {
                version: "0.1.0".into(),
                kernel: "6.12.1".into(),
                boot_id: String::new(),
                scope: ScopeText::default(),
                hooks: vec![HookState {
                    hook: "kfree_skb".into(),
                    symbol: Some("kfree_skb".into()),
                    method: Some("raw_tracepoint".into()),
                    state: "attachable".into(),
                    reason: None,
                }],
                gaps: vec![Gap {
                    cause: "syn-refused".into(),
                    field: None,
                    reason: "no kprobes".into(),
                }],
                notes: vec!["IPVS: offsets come from a table".into()],
            },
            causes: vec![CauseCoverage {
                cause: "syn-refused",
                seen: Seen::No,
                gaps: vec!["no kprobes".into()],
            }],
            attach_not_tried: Some("BPF needs root; next: run it with sudo".into()),
            advice: vec![Advice {
                netns: 4_026_532_000,
                netns_name: Some("web".into()),
                cause: "accept-queue-full",
                likelihood: Likelihood::Likely,
                finding: "0.0.0.0:80 has 127 of 128".into(),
                remedy: vec![Remedy {
                    action: "Raise it.".into(),
                    command: Some("sysctl -w net.core.somaxconn=1024".into()),
                    effect: "After a restart.".into(),
                }],
            }],
            problems: vec!["netns host: IPVS services are not known: EPERM".into()],
        };
        insta::assert_snapshot!(text(&report, true, Paint::Plain));
    }
}
