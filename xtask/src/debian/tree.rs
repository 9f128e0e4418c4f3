//! Packages unpacked with all that they need into a folder of their own, and programs started from there.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::apt::{Apt, unpack};

/// Folders that current Debian keeps as links into `usr`.
const MERGED: &[&str] = &["bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// Fetches these packages with all that they depend on, and unpacks them into a folder as the root of a system.
///
/// # Errors
/// As for [`Apt::fetch_with_dependencies`], and when the folder cannot be written.
pub(crate) fn unpack_tree(apt: &Apt, packages: &[&str], root: &Path) -> Result<()> {
    for name in MERGED {
        fs::create_dir_all(root.join("usr").join(name))?;
        std::os::unix::fs::symlink(format!("usr/{name}"), root.join(name))?;
    }
    let downloads = tempfile::tempdir()?;
    for package in apt.fetch_with_dependencies(packages, downloads.path())? {
        unpack(&package, root)?;
    }
    Ok(())
}

/// A program of such a folder, called by this name, with the libraries that stand there instead of this machine's.
pub(crate) fn foreign(root: &Path, program: &str, name: &str) -> Command {
    let mut command = Command::new(root.join("usr/lib64/ld-linux-x86-64.so.2"));
    command
        .args(["--argv0", name])
        .arg("--library-path")
        .arg(root.join("usr/lib/x86_64-linux-gnu"))
        .arg(root.join(program));
    command
}
