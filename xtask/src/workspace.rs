//! Where things are: the checkout, its build output, and the cache outside of it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::shell;

/// The folders that every command works in.
pub(crate) struct Workspace {
    /// The checkout.
    pub(crate) root: PathBuf,
    /// What cargo builds.
    pub(crate) target: PathBuf,
    /// Downloads and tools, shared by all checkouts; safe to delete.
    pub(crate) cache: PathBuf,
}

impl Workspace {
    /// Finds the folders.
    ///
    /// The cache is `$DROPTRACE_CACHE`, else `$XDG_CACHE_HOME/droptrace`, else `~/.cache/droptrace`.
    ///
    /// # Errors
    /// When no cache folder can be named or made.
    pub(crate) fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask has no parent folder")?
            .to_path_buf();
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        let from = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let cache = from("DROPTRACE_CACHE")
            .or_else(|| from("XDG_CACHE_HOME").map(|path| path.join("droptrace")))
            .or_else(|| from("HOME").map(|path| path.join(".cache/droptrace")))
            .context("no cache folder: set DROPTRACE_CACHE to a folder that may hold about 3 GB")?;
        std::fs::create_dir_all(&cache).with_context(|| {
            format!(
                "cannot make the cache folder {}: set DROPTRACE_CACHE to another one",
                cache.display()
            )
        })?;
        Ok(Self { root, target, cache })
    }

    /// Waits until no other run changes the cache; the lock ends when the returned file is dropped.
    ///
    /// # Errors
    /// When the lock file cannot be made.
    pub(crate) fn lock_cache(&self) -> Result<File> {
        let path = self.cache.join("lock");
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        if file.try_lock().is_err() {
            shell::step("waiting for another run that fills the cache");
            file.lock()
                .with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Ok(file)
    }

    /// The commit that is checked out, for a written result.
    pub(crate) fn commit(&self) -> String {
        let git =
            |arguments: &[&str]| shell::output(Command::new("git").current_dir(&self.root).args(arguments));
        match (
            git(&["rev-parse", "--short=12", "HEAD"]),
            git(&["status", "--porcelain"]),
        ) {
            (Ok(commit), Ok(changes)) if changes.is_empty() => commit.trim().to_owned(),
            (Ok(commit), _) => format!("{} with uncommitted changes", commit.trim()),
            (Err(_), _) => "unknown commit".to_owned(),
        }
    }

    /// The cargo that runs this program, started in the checkout.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.current_dir(&self.root);
        command
    }
}
