//! `cargo xtask bench`: what droptrace costs, and what it delivers, measured in guests.

mod figures;
mod page;

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use figures::Figure;

use crate::build;
use crate::guest::{Guest, Kernel, Series, Tools};
use crate::shell::step;
use crate::workspace::Workspace;

/// The kernels that are measured without being asked.
const USUAL: &[&str] = &["6.1", "6.12"];

/// How long one guest may take.
const LIMIT: Duration = Duration::from_hours(2);

/// A way of running a guest, and what is measured so.
struct Way {
    name: &'static str,
    icount: bool,
    cpus: u32,
    parts: &'static [&'static str],
}

/// For everything that is a time.
const COUNTED: Way = Way {
    name: "counted",
    icount: true,
    cpus: 1,
    parts: &["ratios", "cost", "start"],
};

/// For everything that races.
const PLAIN: Way = Way {
    name: "plain",
    icount: false,
    cpus: 2,
    parts: &["storms", "needle", "memory"],
};

/// What `cargo xtask bench` is asked.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only guests with these kernels [default: 6.1 and 6.12]
    #[arg(long = "kernel", value_name = "KERNEL")]
    kernels: Vec<String>,
    /// Less of everything, for a look in between: writes to target/bench instead of docs
    #[arg(long)]
    quick: bool,
}

/// What was measured on one kernel.
#[derive(Serialize)]
pub(crate) struct Measured {
    /// What `--kernel` calls it.
    series: &'static str,
    /// The version of the package.
    package: String,
    figures: Vec<Figure>,
}

/// A whole run, as it is kept.
#[derive(Serialize)]
struct Bench {
    /// `2026-12-01`.
    date: String,
    commit: String,
    quick: bool,
    kernels: Vec<Measured>,
}

/// Measures, and writes a page and the figures behind it.
pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    let names: Vec<&str> = if arguments.kernels.is_empty() {
        USUAL.to_vec()
    } else {
        arguments.kernels.iter().map(String::as_str).collect()
    };
    let series = names.into_iter().map(Series::named).collect::<Result<Vec<_>>>()?;
    let rig = Rig::prepare(workspace, arguments.quick)?;
    let kernels = rig.measure(&series)?;
    let bench = Bench {
        date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
        commit: workspace.commit(),
        quick: arguments.quick,
        kernels,
    };
    let folder = if arguments.quick {
        rig.folder
    } else {
        workspace.root.join("docs")
    };
    for (name, text) in [
        ("performance.md", page::markdown(&bench)),
        ("performance.json", serde_json::to_string_pretty(&bench)? + "\n"),
    ] {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        step(&format!("wrote {}", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// What every guest of a run needs.
struct Rig<'a> {
    workspace: &'a Workspace,
    tools: Tools,
    init: PathBuf,
    files: Vec<(PathBuf, String)>,
    /// Where what guests print and find is kept.
    folder: PathBuf,
    quick: bool,
}

impl<'a> Rig<'a> {
    fn prepare(workspace: &'a Workspace, quick: bool) -> Result<Self> {
        let tools = {
            let _lock = workspace.lock_cache()?;
            Tools::get(workspace)?
        };
        let programs = build::guest_programs(workspace, false)?;
        let folder = workspace.target.join("bench");
        fs::create_dir_all(&folder)?;
        Ok(Self {
            workspace,
            tools,
            init: programs.join("droptrace-init"),
            // What measures may be any build; what is measured is what users get.
            files: vec![
                (
                    programs.join("droptrace-tests"),
                    "/usr/bin/droptrace-tests".to_owned(),
                ),
                (build::static_release(workspace)?, "/usr/bin/droptrace".to_owned()),
            ],
            folder,
            quick,
        })
    }

    /// Measures these kernels in both ways.
    fn measure(&self, series: &[&'static Series]) -> Result<Vec<Measured>> {
        let kernels = {
            let _lock = self.workspace.lock_cache()?;
            series
                .iter()
                .map(|series| series.newest(self.workspace, &self.tools))
                .collect::<Result<Vec<_>>>()?
        };
        let counted = self.at_once(&kernels, &COUNTED)?;
        kernels
            .into_iter()
            .zip(counted)
            .map(|(kernel, mut figures)| {
                figures.extend(self.boot(&kernel, &PLAIN)?);
                Ok(Measured {
                    series: kernel.series.name,
                    package: kernel.version,
                    figures,
                })
            })
            .collect()
    }

    /// Boots guests with all these kernels side by side: right for a way in which they do not disturb each other.
    fn at_once(&self, kernels: &[Kernel], way: &Way) -> Result<Vec<Vec<Figure>>> {
        thread::scope(|threads| {
            let running: Vec<_> = kernels
                .iter()
                .map(|kernel| threads.spawn(move || self.boot(kernel, way)))
                .collect();
            running
                .into_iter()
                .map(|guest| {
                    guest
                        .join()
                        .map_err(|_| anyhow::anyhow!("the thread that ran a guest panicked"))?
                })
                .collect()
        })
    }

    fn boot(&self, kernel: &Kernel, way: &Way) -> Result<Vec<Figure>> {
        let name = format!("{}-{}", kernel.series.name, way.name);
        let log = self.folder.join(format!("{name}.log"));
        step(&format!(
            "measuring {} on Linux {}; what the guest prints goes to {}",
            way.parts.join(", "),
            kernel.release,
            log.display()
        ));
        let outcome = Guest {
            kernel,
            tools: &self.tools,
            init: self.init.clone(),
            files: self.files.clone(),
            command: self.command(way),
            cpus: way.cpus,
            memory: 1024,
            icount: way.icount,
            log: Some(File::create(&log).with_context(|| format!("cannot write {}", log.display()))?),
            limit: LIMIT,
        }
        .run()?;
        fs::write(
            self.folder.join(format!("{name}.jsonl")),
            outcome.results.join("\n"),
        )?;
        if outcome.status != 0 {
            bail!(
                "measuring {name} failed with status {}; see {}",
                outcome.status,
                log.display()
            );
        }
        if let Some(warning) = outcome.warnings.first() {
            bail!("the kernel warned while {name} was measured: {warning}");
        }
        figures::parse(&outcome.results)
    }

    fn command(&self, way: &Way) -> Vec<String> {
        let mut command: Vec<_> = ["droptrace-tests", "bench", "--results", "/run/droptrace/results"]
            .map(str::to_owned)
            .into();
        for part in way.parts {
            command.extend(["--part".to_owned(), (*part).to_owned()]);
        }
        if self.quick {
            command.push("--quick".to_owned());
        }
        command
    }
}
