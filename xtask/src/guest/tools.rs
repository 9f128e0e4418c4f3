//! The programs in every guest: network tools of one Debian release, unpacked with the libraries that they need.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::archive::Archive;
use super::emulator::Emulator;
use crate::debian::{self, Apt, GUEST_SUITES, Installed};
use crate::shell::{self, step};
use crate::store;
use crate::workspace::Workspace;

/// What a scenario or a developer may call.
///
/// The shell is dash, because busybox's prefers its own small `ip` and `tc` to the full ones; bash is for people.
const PACKAGES: &[&str] = &[
    "bash",
    "bpftool",
    "busybox-static",
    "conntrack",
    "dash",
    "dropbear-bin",
    "iproute2",
    "iptables",
    "ipvsadm",
    "kmod",
    "nftables",
    "tcpdump",
];

/// What no program in a guest opens.
pub(crate) const LEFT_OUT: &[&str] = &[
    "usr/include",
    "usr/lib/x86_64-linux-gnu/audit",
    "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/perl-base",
    "usr/lib/systemd",
    "usr/share",
    "var",
];

/// What every guest needs beside its kernel: the emulator, and the unpacked tools.
pub(crate) struct Tools {
    pub(crate) emulator: Emulator,
    root: PathBuf,
    /// The archive of them, a part of every guest's initial file system.
    pub(crate) archive: PathBuf,
}

impl Tools {
    /// Takes emulator and tools from the cache, or fetches them.
    ///
    /// # Errors
    /// When they are not cached and cannot be fetched.
    pub(crate) fn get(workspace: &Workspace) -> Result<Self> {
        let folder = workspace.cache.join("guest-tools");
        let tools = Self {
            emulator: Emulator::get(workspace)?,
            root: folder.join("root"),
            archive: folder.join("tools.cpio"),
        };
        let wanted: Vec<String> = PACKAGES.iter().map(ToString::to_string).collect();
        if store::open::<Vec<String>>(&folder).is_some_and(|packages| packages == wanted) {
            return Ok(tools);
        }
        let apt = Apt::open(workspace, "guest", GUEST_SUITES, Installed::Nothing)?;
        step(&format!(
            "fetching the programs of the guests: {}",
            PACKAGES.join(", ")
        ));
        store::make(&folder, |work| {
            let root = work.join("root");
            debian::unpack_tree(&apt, PACKAGES, &root)?;
            choose_alternatives(&root)?;
            link_applets(&root)?;
            let mut archive = Archive::new(fs::File::create(work.join("tools.cpio"))?);
            archive.tree(&root, "", &|path| !LEFT_OUT.contains(&path))?;
            archive.finish()?;
            Ok(wanted)
        })?;
        Ok(tools)
    }

    /// Runs kmod's `depmod` from the tools, so that this machine needs none.
    ///
    /// # Errors
    /// When depmod fails.
    pub(crate) fn depmod(&self, base: &Path, release: &str) -> Result<()> {
        shell::output(
            debian::foreign(&self.root, "usr/bin/kmod", "depmod")
                .arg("-b")
                .args([base.as_os_str(), release.as_ref()]),
        )
        .map(drop)
        .with_context(|| format!("cannot index the modules of {release}"))
    }
}

/// Debian chooses between iptables' two back ends by links that a package's installation makes.
///
/// The plain names are the nft variant, as on Debian; the old one is reached as `iptables-legacy`.
fn choose_alternatives(root: &Path) -> Result<()> {
    for name in ["iptables", "ip6tables"] {
        for suffix in ["", "-save", "-restore"] {
            let link = root.join(format!("usr/sbin/{name}{suffix}"));
            if link.symlink_metadata().is_err() {
                std::os::unix::fs::symlink("xtables-nft-multi", link)?;
            }
        }
    }
    Ok(())
}

/// Gives every busybox applet its name where no full program has it.
fn link_applets(root: &Path) -> Result<()> {
    let busybox = root.join("usr/bin/busybox");
    for applet in shell::output(Command::new(&busybox).arg("--list"))?.lines() {
        let taken = ["usr/bin", "usr/sbin"]
            .iter()
            .any(|folder| root.join(folder).join(applet).symlink_metadata().is_ok());
        if !taken {
            std::os::unix::fs::symlink("busybox", root.join("usr/bin").join(applet))?;
        }
    }
    Ok(())
}
