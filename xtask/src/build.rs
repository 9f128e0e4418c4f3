//! Building droptrace and what guests run.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};

use crate::shell::{self, step};
use crate::toolchain::Toolchain;
use crate::workspace::Workspace;

/// The target of fully static programs: with the C library of the machine that builds, linked in.
const STATIC_TARGET: &str = "x86_64-unknown-linux-gnu";

/// What `cargo xtask build` is asked.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Optimise
    #[arg(long)]
    release: bool,
    /// Link everything in: the program needs no shared library
    #[arg(long = "static")]
    fully_static: bool,
}

/// Builds the BPF object and droptrace; the last line on standard output is the program's path.
pub(crate) fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    let object = bpf_object(workspace)?;
    let build = Build {
        profile: if arguments.release {
            Profile::Release
        } else {
            Profile::Dev
        },
        fully_static: arguments.fully_static,
    };
    let program = build
        .run(workspace, &["droptrace"], Some(&object))?
        .join("droptrace");
    if arguments.fully_static {
        check_static(&program)?;
    }
    println!("{}", program.display());
    Ok(ExitCode::SUCCESS)
}

/// Builds the BPF object, with what that needs.
///
/// # Errors
/// When the toolchain cannot be completed or the object does not compile.
pub(crate) fn bpf_object(workspace: &Workspace) -> Result<PathBuf> {
    let toolchain = {
        let _lock = workspace.lock_cache()?;
        Toolchain::get(workspace)?
    };
    toolchain.build_object(workspace)
}

/// Builds droptrace as users get it, without any shared library, and returns its path.
///
/// # Errors
/// When it does not compile or is not static.
pub(crate) fn static_release(workspace: &Workspace) -> Result<PathBuf> {
    let object = bpf_object(workspace)?;
    let build = Build {
        profile: Profile::Release,
        fully_static: true,
    };
    let program = build
        .run(workspace, &["droptrace"], Some(&object))?
        .join("droptrace");
    check_static(&program)?;
    Ok(program)
}

/// Programs that stand in every guest's `/usr/bin`.
const GUEST_PROGRAMS: &[&str] = &["droptrace", "droptrace-tests"];

/// Builds what guests run and returns the folder of the programs.
///
/// # Errors
/// When something does not compile.
pub(crate) fn guest_programs(workspace: &Workspace, with_bpf: bool) -> Result<PathBuf> {
    let object = if with_bpf {
        Some(bpf_object(workspace)?)
    } else {
        None
    };
    let build = Build {
        profile: Profile::Guest,
        fully_static: true,
    };
    build.run(workspace, GUEST_PROGRAMS, object.as_deref())
}

/// The programs and where they stand in a guest.
pub(crate) fn files_for_guests(programs: &Path) -> Vec<(PathBuf, String)> {
    GUEST_PROGRAMS
        .iter()
        .map(|name| (programs.join(name), format!("/usr/bin/{name}")))
        .collect()
}

/// The workspace's profiles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// Quick to build, for debugging.
    Dev,
    /// What users get.
    Release,
    /// What guests run.
    Guest,
}

impl Profile {
    /// The name for `--profile`, and that of the folder of its programs.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Dev => ("dev", "debug"),
            Self::Release => ("release", "release"),
            Self::Guest => ("guest", "guest"),
        }
    }
}

/// How to build the user-space programs.
pub(crate) struct Build {
    /// With which profile.
    pub(crate) profile: Profile,
    /// Without any shared library.
    pub(crate) fully_static: bool,
}

impl Build {
    /// Builds these packages, with the BPF object in droptrace where one is given, and returns the folder of the programs.
    ///
    /// # Errors
    /// When a package does not compile.
    pub(crate) fn run(
        &self,
        workspace: &Workspace,
        packages: &[&str],
        bpf_object: Option<&Path>,
    ) -> Result<PathBuf> {
        step(&format!("building {}", packages.join(", ")));
        let mut cargo = workspace.cargo();
        cargo.args(["build", "--quiet"]);
        for package in packages {
            cargo.args(["--package", package]);
        }
        let mut folder = workspace.target.clone();
        if self.fully_static {
            folder = folder.join("static");
            cargo.args(["--target", STATIC_TARGET]);
            add_flags(&mut cargo, &["-Ctarget-feature=+crt-static"]);
        }
        cargo.arg("--target-dir").arg(&folder);
        if self.fully_static {
            folder = folder.join(STATIC_TARGET);
        }
        let (profile, programs) = self.profile.names();
        cargo.args(["--profile", profile]);
        if let Some(object) = bpf_object {
            cargo.env("DROPTRACE_BPF_OBJECT", object);
        }
        shell::run_long(&mut cargo)?;
        Ok(folder.join(programs))
    }
}

/// Adds compiler flags to those that the environment asks for.
fn add_flags(cargo: &mut Command, flags: &[&str]) {
    let mut all = OsString::new();
    if let Some(encoded) = std::env::var_os("CARGO_ENCODED_RUSTFLAGS") {
        all = encoded;
    } else if let Ok(plain) = std::env::var("RUSTFLAGS") {
        all = plain.split_whitespace().collect::<Vec<_>>().join("\u{1f}").into();
    }
    for flag in flags {
        if !all.is_empty() {
            all.push("\u{1f}");
        }
        all.push(flag);
    }
    cargo.env("CARGO_ENCODED_RUSTFLAGS", all);
}

/// Checks that a program needs no shared library and no dynamic loader.
///
/// # Errors
/// When it does.
pub(crate) fn check_static(program: &Path) -> Result<()> {
    let bytes = std::fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let needs =
        needs_loader(&bytes).with_context(|| format!("{} is no 64-bit ELF program", program.display()))?;
    if needs {
        bail!(
            "{} is not static: it asks for a dynamic loader",
            program.display()
        );
    }
    Ok(())
}

/// Whether an ELF64 little-endian file has a `PT_INTERP` segment (gabi, "Program Header").
fn needs_loader(elf: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    let bytes = |at: usize, length: usize| elf.get(at..at.checked_add(length)?);
    let half = |at| bytes(at, 2).map(|part| usize::from(u16::from_le_bytes([part[0], part[1]])));
    if bytes(0, 6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let table = usize::try_from(u64::from_le_bytes(bytes(32, 8)?.try_into().ok()?)).ok()?;
    let (size, count) = (half(54)?, half(56)?);
    for index in 0..count {
        let kind = bytes(table.checked_add(index * size)?, 4)?;
        if u32::from_le_bytes(kind.try_into().ok()?) == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(kinds: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = kinds.len() as u8;
        for kind in kinds {
            let mut header = [0; 56];
            header[..4].copy_from_slice(&kind.to_le_bytes());
            bytes.extend(header);
        }
        bytes
    }

    #[test]
    fn a_loader_is_seen_in_the_program_headers() {
        assert_eq!(needs_loader(&elf(&[1, 2])), Some(false));
        assert_eq!(needs_loader(&elf(&[6, 3, 1])), Some(true));
        assert_eq!(needs_loader(&elf(&[1, 3])[..80]), None);
        assert_eq!(needs_loader(b"#!/bin/sh\n"), None);
    }

    #[test]
    fn this_test_program_is_read_as_what_it_is() {
        let bytes = std::fs::read(std::env::current_exe().expect("a path")).expect("a program");
        assert_eq!(needs_loader(&bytes), Some(!cfg!(target_feature = "crt-static")));
    }
}
