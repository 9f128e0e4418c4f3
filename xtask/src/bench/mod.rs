//! `cargo xtask bench`: what droptrace costs, and what it delivers, measured in guests.

mod figures;
mod machine;
mod page;
mod peers;
mod user_space;

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use figures::Figure;
use machine::Watch;
use peers::{Package, Peers};

use crate::build;
use crate::guest::{Guest, Kernel, Series, Tools};
use crate::shell::step;
use crate::workspace::Workspace;

/// The kernels that are measured without being asked.
const USUAL: &[&str] = &["6.1", "6.12"];

/// MiB of a guest: the compiler in bpftrace alone takes 300 of them, and all programs stand in memory.
const MEMORY: u32 = 3072;

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
    parts: &["ratios", "cost", "start", "curves", "peers"],
};

/// For everything that races.
const PLAIN: Way = Way {
    name: "plain",
    icount: false,
    cpus: 2,
    parts: &["storms", "needle", "memory", "peer-storms"],
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
    /// Only these parts, for a look in between: ratios, cost, start, curves, peers, storms, needle, memory, peer-storms, user-space
    #[arg(long = "part", value_name = "PART", requires = "quick")]
    parts: Vec<String>,
}

/// The part that is measured on this machine itself.
const USER_SPACE: &str = "user-space";

impl Arguments {
    /// Whether a part is to be measured.
    fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|wanted| wanted == part)
    }
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
    /// The other tracers.
    peers: Vec<Package>,
    user_space: Option<user_space::Found>,
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
    let rig = Rig::prepare(workspace, arguments)?;
    let kernels = rig.measure(&series)?;
    let user_space = arguments
        .wants(USER_SPACE)
        .then(|| user_space::measure(workspace))
        .transpose()?;
    let bench = Bench {
        date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
        commit: workspace.commit(),
        quick: arguments.quick,
        peers: rig.peers.packages.clone(),
        user_space,
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
    peers: Peers,
    init: PathBuf,
    files: Vec<(PathBuf, String)>,
    /// Where what guests print and find is kept.
    folder: PathBuf,
    arguments: &'a Arguments,
}

impl<'a> Rig<'a> {
    fn prepare(workspace: &'a Workspace, arguments: &'a Arguments) -> Result<Self> {
        let (tools, peers) = {
            let _lock = workspace.lock_cache()?;
            (Tools::get(workspace)?, Peers::get(workspace)?)
        };
        let programs = build::guest_programs(workspace, false)?;
        let folder = workspace.target.join("bench");
        fs::create_dir_all(&folder)?;
        Ok(Self {
            workspace,
            tools,
            peers,
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
            arguments,
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
        let parts = self.parts(way);
        if parts.is_empty() {
            return Ok(Vec::new());
        }
        let name = format!("{}-{}", kernel.series.name, way.name);
        let log = self.folder.join(format!("{name}.log"));
        step(&format!(
            "measuring {} on Linux {}; what the guest prints goes to {}",
            parts.join(", "),
            kernel.release,
            log.display()
        ));
        let watch = Watch::start()?;
        let outcome = Guest {
            kernel,
            tools: &self.tools,
            init: self.init.clone(),
            more: vec![self.peers.archive.clone()],
            files: self.files.clone(),
            command: self.command(&parts),
            cpus: way.cpus,
            memory: MEMORY,
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
        let mut figures = figures::parse(&outcome.results)?;
        let machine = watch.end(way.name)?;
        step(&format!("measured {name} in {:.0} min", machine.seconds / 60.0));
        if !way.icount {
            figures.push(Figure::Machine(machine));
        }
        Ok(figures)
    }

    /// What is measured this way.
    fn parts(&self, way: &Way) -> Vec<&'static str> {
        let parts = way.parts.iter().copied();
        parts.filter(|part| self.arguments.wants(part)).collect()
    }

    fn command(&self, parts: &[&str]) -> Vec<String> {
        let mut command: Vec<_> = ["droptrace-tests", "bench", "--results", "/run/droptrace/results"]
            .map(str::to_owned)
            .into();
        for part in parts {
            command.extend(["--part".to_owned(), (*part).to_owned()]);
        }
        if self.arguments.quick {
            command.push("--quick".to_owned());
        }
        command
    }
}
