//! The emulator in which guests run: this machine's, where it is new enough, else one of a current Debian release, unpacked
//! with the libraries that it needs and never installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::debian::{self, Apt, EMULATOR_SUITES, Installed};
use crate::shell::{self, step};
use crate::store;
use crate::workspace::Workspace;

/// The emulator's program.
pub(crate) const EMULATOR: &str = "qemu-system-x86_64";

/// The package that brings it.
const PACKAGE: &str = "qemu-system-x86";

/// The first version that locks a page of code before it translates it. An older one may miss that another CPU changes the
/// code meanwhile, as Linux does to code that runs: the guest then meets a breakpoint that is gone and crashes (seen with 7.2,
/// at every fiftieth boot or so).
const SOUND: (u32, u32) = (8, 1);

/// Where the package and its firmware have the files that it reads.
const DATA: &[&str] = &["usr/share/qemu", "usr/share/seabios"];

/// What the emulator does not read.
const LEFT_OUT: &[&str] = &[
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/icons",
];

/// The emulator.
pub(crate) enum Emulator {
    /// This machine's.
    Installed(PathBuf),
    /// The root of an unpacked one.
    Unpacked(PathBuf),
}

impl Emulator {
    /// Takes this machine's emulator if it is new enough, else that of the cache, else fetches one.
    ///
    /// # Errors
    /// When there is none and none can be fetched.
    pub(crate) fn get(workspace: &Workspace) -> Result<Self> {
        let installed = shell::which(EMULATOR);
        let version = installed.as_deref().and_then(version);
        if let (Some(program), Some(version)) = (&installed, version)
            && version >= SOUND
        {
            return Ok(Self::Installed(program.clone()));
        }
        match (Self::unpacked(workspace), installed) {
            (Ok(emulator), _) => Ok(emulator),
            (Err(error), Some(program)) => {
                step(&format!(
                    "using this machine's {EMULATOR}, in which guests crash once in a while: {error:#}"
                ));
                Ok(Self::Installed(program))
            }
            (Err(error), None) => Err(error.context(format!(
                "the emulator is missing: install the package {PACKAGE}, {}.{} or newer",
                SOUND.0, SOUND.1
            ))),
        }
    }

    fn unpacked(workspace: &Workspace) -> Result<Self> {
        let folder = workspace.cache.join("emulator");
        let emulator = Self::Unpacked(folder.join("root"));
        let wanted = PACKAGE.to_owned();
        if store::open::<String>(&folder).is_some_and(|package| package == wanted) {
            return Ok(emulator);
        }
        let apt = Apt::open(workspace, "emulator", EMULATOR_SUITES, Installed::Nothing)?;
        step(&format!("fetching {PACKAGE}: guests run in its emulator"));
        store::make(&folder, |work| {
            let root = work.join("root");
            debian::unpack_tree(&apt, &[PACKAGE], &root)?;
            for folder in LEFT_OUT {
                fs::remove_dir_all(root.join(folder)).ok();
            }
            shell::output(Self::Unpacked(root).command().arg("--version"))
                .context("the fetched emulator does not run")?;
            Ok(wanted)
        })?;
        Ok(emulator)
    }

    /// The emulator's program, with the arguments that it needs to be found with its files.
    pub(crate) fn command(&self) -> Command {
        match self {
            Self::Installed(program) => Command::new(program),
            Self::Unpacked(root) => {
                let mut command = debian::foreign(root, &format!("usr/bin/{EMULATOR}"), EMULATOR);
                for folder in DATA {
                    command.arg("-L").arg(root.join(folder));
                }
                command
            }
        }
    }
}

/// The version of a program that says it as the emulator does; `None` where it does not.
fn version(program: &Path) -> Option<(u32, u32)> {
    parse_version(&shell::output(Command::new(program).arg("--version")).ok()?)
}

fn parse_version(text: &str) -> Option<(u32, u32)> {
    let number = text.strip_prefix("QEMU emulator version ")?;
    let mut parts = number.split(['.', ' ']).map_while(|part| part.parse().ok());
    Some((parts.next()?, parts.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_emulators_are_told_from_sound_ones() {
        let old = parse_version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright");
        assert_eq!(old, Some((7, 2)));
        assert!(old < Some(SOUND));
        assert!(parse_version("QEMU emulator version 10.0.13 (Debian 1:10.0.13+ds-0)") >= Some(SOUND));
        assert_eq!(parse_version("something else"), None);
    }
}
