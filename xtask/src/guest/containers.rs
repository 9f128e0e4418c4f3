//! A container runtime, as Debian packages it, for the guests that have pods.

use std::fs::{self, File};
use std::path::PathBuf;

use anyhow::Result;

use super::archive::Archive;
use crate::debian::{self, Apt, GUEST_SUITES, Installed};
use crate::shell::step;
use crate::store;
use crate::workspace::Workspace;

const PACKAGES: &[&str] = &["containerd", "containernetworking-plugins", "runc"];

/// What the guest's tools do not have, and the runtime needs.
const WANTED: &[&str] = &[
    "usr/bin/containerd",
    "usr/bin/containerd-shim-runc-v2",
    "usr/bin/ctr",
    "usr/lib/cni/bridge",
    "usr/lib/cni/host-local",
    "usr/lib/cni/loopback",
    "usr/sbin/runc",
];

/// How the names of its library begin, which is there under several.
const LIBRARY: &str = "usr/lib/x86_64-linux-gnu/libseccomp.so";

/// The unpacked runtime.
pub(crate) struct Containers {
    /// A part of a guest's initial file system.
    pub(crate) archive: PathBuf,
}

impl Containers {
    /// Takes it from the cache, or fetches it.
    ///
    /// # Errors
    /// When it is not cached and cannot be fetched.
    pub(crate) fn get(workspace: &Workspace) -> Result<Self> {
        let folder = workspace.cache.join("containers");
        let archive = folder.join("containers.cpio");
        let wanted: Vec<String> = WANTED.iter().map(ToString::to_string).collect();
        if store::open::<Vec<String>>(&folder).is_some_and(|files| files == wanted) {
            return Ok(Self { archive });
        }
        let apt = Apt::open(workspace, "guest", GUEST_SUITES, Installed::Nothing)?;
        step(&format!(
            "fetching a container runtime for guests: {}",
            PACKAGES.join(", ")
        ));
        store::make(&folder, |work| {
            let root = work.join("root");
            debian::unpack_tree(&apt, PACKAGES, &root)?;
            let mut archive = Archive::new(File::create(work.join("containers.cpio"))?);
            archive.tree(&root, "", &is_wanted)?;
            archive.finish()?;
            fs::remove_dir_all(&root)?;
            Ok(wanted)
        })?;
        Ok(Self { archive })
    }
}

/// Whether a path is wanted, or a folder above one that is.
fn is_wanted(path: &str) -> bool {
    let above = format!("{path}/");
    let is = |wanted: &str| path == wanted || wanted.starts_with(&above);
    WANTED.iter().chain([&LIBRARY]).any(|wanted| is(wanted)) || path.starts_with(LIBRARY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_above_and_names_of_libraries_are_wanted() {
        for path in [
            "usr",
            "usr/lib/cni",
            "usr/lib/cni/bridge",
            "usr/lib/x86_64-linux-gnu/libseccomp.so.2.5.4",
        ] {
            assert!(is_wanted(path), "{path}");
        }
        for path in [
            "bin",
            "usr/bin/ctr2",
            "usr/lib/cni/vlan",
            "usr/lib/x86_64-linux-gnu/libc.so.6",
        ] {
            assert!(!is_wanted(path), "{path}");
        }
    }
}
