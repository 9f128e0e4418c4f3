//! Other tracers, as Debian packages them, for the guests of `cargo xtask bench` alone.

use std::fs::File;
use std::path::PathBuf;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::debian::{self, Apt, Installed, Suite};
use crate::guest::{self, Archive};
use crate::shell::step;
use crate::store;
use crate::workspace::Workspace;

/// The release that they are taken from: the oldest one that has them all.
const SUITES: &[Suite] = &["trixie", "trixie-security"];

const PACKAGES: &[&str] = &["bpftrace", "dropwatch", "pwru"];

/// What they call without depending on it, since every system has it: bpftrace a shell.
const BESIDE: &[&str] = &["dash"];

/// Where they stand in a guest, with libraries of their own: those of the guest's tools are older.
const AT: &str = "peers/";

/// A package that is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
}

/// The unpacked peers.
pub(crate) struct Peers {
    /// A part of a guest's initial file system.
    pub(crate) archive: PathBuf,
    pub(crate) packages: Vec<Package>,
}

impl Peers {
    /// Takes them from the cache, or fetches them.
    ///
    /// # Errors
    /// When they are not cached and cannot be fetched.
    pub(crate) fn get(workspace: &Workspace) -> Result<Self> {
        let folder = workspace.cache.join("bench-peers");
        let archive = folder.join("peers.cpio");
        if let Some(packages) = store::open::<Vec<Package>>(&folder)
            && packages.iter().map(|package| &package.name).eq(PACKAGES)
        {
            return Ok(Self { archive, packages });
        }
        let apt = Apt::open(workspace, "peers", SUITES, Installed::Nothing)?;
        step(&format!(
            "fetching other tracers to measure: {}",
            PACKAGES.join(", ")
        ));
        let packages = store::make(&folder, |work| {
            let root = work.join("root");
            debian::unpack_tree(&apt, &[PACKAGES, BESIDE].concat(), &root)?;
            let mut archive = Archive::new(File::create(work.join("peers.cpio"))?);
            archive.directory(AT.trim_end_matches('/'))?;
            archive.tree(&root, AT, &|path| !guest::LEFT_OUT.contains(&path))?;
            archive.finish()?;
            std::fs::remove_dir_all(&root)?;
            PACKAGES
                .iter()
                .map(|name| {
                    Ok(Package {
                        name: (*name).to_owned(),
                        version: apt.candidate(name)?.version,
                    })
                })
                .collect()
        })?;
        Ok(Self { archive, packages })
    }
}
