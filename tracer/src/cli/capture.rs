//! `droptrace capture`.

use std::process::ExitCode;

use super::{
    args::CaptureArgs,
    options::{Output, RunOptions},
    run,
};

pub(super) fn run(args: CaptureArgs) -> anyhow::Result<ExitCode> {
    let options = RunOptions {
        scope: args.run.scope,
        pods: args.run.pods.into(),
        output: Output::Capture(args.output),
        command: args.run.command,
        benign: args.run.benign,
        every_drop: args.run.every_drop,
        ipvs: args.run.ipvs,
        hide_symbols: args.run.hide_symbols,
        max_size: args.max_size,
    };
    options.check()?;
    run::run(&options)
}
