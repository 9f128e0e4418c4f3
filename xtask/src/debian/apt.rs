//! A private apt: its own sources, lists and downloads, verified by Debian's signatures.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::mirror::Mirror;
use crate::shell::{self, step};
use crate::workspace::Workspace;

/// How old package lists may be before they are fetched again.
const LISTS_FRESH: Duration = Duration::from_hours(12);

/// Where Debian's `debian-archive-keyring` puts its keys.
const KEYRINGS: &[&str] = &[
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
];

/// Which packages apt may take as installed when it follows dependencies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Installed {
    /// None: the answer is complete by itself.
    Nothing,
    /// This machine's: the answer is what is missing here.
    Host,
}

/// A private apt for a set of suites of equal rank: the newest version of a package is the candidate.
pub(crate) struct Apt {
    directory: PathBuf,
}

/// What the package lists say about the candidate version of a package.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// The package's name.
    pub(crate) package: String,
    /// The version as Debian writes it.
    pub(crate) version: String,
    /// Names of the packages it depends on, first alternatives only.
    pub(crate) depends: Vec<String>,
}

impl Apt {
    /// Prepares a private apt and makes its package lists current.
    ///
    /// Lists that cannot be made current, because the machine is offline, are used as they are.
    ///
    /// # Errors
    /// When there are no lists at all, no apt, or no Debian keyring.
    pub(crate) fn open(
        workspace: &Workspace,
        name: &str,
        suites: &[&str],
        installed: Installed,
    ) -> Result<Self> {
        let directory = workspace.cache.join("apt").join(name);
        for folder in ["lists/partial", "archives/partial", "parts", "preferences.d"] {
            let path = directory.join(folder);
            fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        let apt = Self { directory };
        apt.write("status", "")?;
        apt.write("preferences", "Package: *\nPin: release *\nPin-Priority: 500\n")?;
        apt.write("apt.conf", &apt.configuration(installed))?;

        let updated = apt.directory.join("updated");
        let fresh = updated
            .metadata()
            .and_then(|metadata| metadata.modified())
            .is_ok_and(|time| time.elapsed().is_ok_and(|age| age < LISTS_FRESH));
        if fresh {
            return Ok(apt);
        }
        let update = Self::sources(suites).and_then(|sources| {
            apt.write("sources.list", &sources)?;
            step(&format!("fetching the package lists of {}", suites.join(", ")));
            shell::output(apt.get().args(["-q", "--error-on=any", "update"]))
        });
        match update {
            Ok(_) => apt.write("updated", "")?,
            Err(error) if updated.exists() => {
                let error = format!("{error:#}");
                step(&format!("using older package lists: {}", complaint(&error)));
            }
            Err(error) => {
                return Err(error.context(format!(
                    "cannot fetch the package lists of {}: check the network, or name another mirror in DROPTRACE_DEBIAN_MIRROR",
                    suites.join(", ")
                )));
            }
        }
        Ok(apt)
    }

    fn sources(suites: &[&str]) -> Result<String> {
        let keyring = KEYRINGS
            .iter()
            .find(|path| Path::new(path).exists())
            .context("Debian's keys are missing, so that no package could be verified: install the package debian-archive-keyring")?;
        let mirror = Mirror::find()?;
        Ok(suites
            .iter()
            .map(|suite| mirror.source_line(suite, keyring))
            .collect())
    }

    fn configuration(&self, installed: Installed) -> String {
        let directory = self.directory.display();
        let status = match installed {
            Installed::Nothing => format!("{directory}/status"),
            Installed::Host => "/var/lib/dpkg/status".to_owned(),
        };
        let sandbox = if shell::is_root() {
            "APT::Sandbox::User \"root\";\n"
        } else {
            ""
        };
        format!(
            "Dir::State \"{directory}\";\n\
             Dir::State::lists \"{directory}/lists\";\n\
             Dir::State::status \"{status}\";\n\
             Dir::Cache \"{directory}\";\n\
             Dir::Cache::archives \"{directory}/archives\";\n\
             Dir::Etc::sourcelist \"{directory}/sources.list\";\n\
             Dir::Etc::sourceparts \"{directory}/parts\";\n\
             Dir::Etc::preferences \"{directory}/preferences\";\n\
             Dir::Etc::preferencesparts \"{directory}/preferences.d\";\n\
             APT::Architecture \"amd64\";\n\
             APT::Architectures {{ \"amd64\"; }};\n\
             APT::Install-Recommends \"false\";\n\
             pkgCacheGen::ForceEssential \"none\";\n\
             Acquire::Check-Valid-Until \"false\";\n\
             Acquire::Languages \"none\";\n\
             Acquire::Retries \"3\";\n\
             Acquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
             {sandbox}"
        )
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.directory.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn program(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("APT_CONFIG", self.directory.join("apt.conf"))
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("LC_ALL", "C.UTF-8");
        command
    }

    fn get(&self) -> Command {
        self.program("apt-get")
    }

    /// Reads what the lists say about a package.
    ///
    /// # Errors
    /// When the suites have no such package.
    pub(crate) fn candidate(&self, package: &str) -> Result<Candidate> {
        let text = shell::output(
            self.program("apt-cache")
                .args(["show", "--no-all-versions", package]),
        )?;
        Candidate::parse(&text).with_context(|| format!("apt says nothing about the package {package}"))
    }

    /// All versions of a package that the suites offer, newest first.
    ///
    /// # Errors
    /// When apt cannot be asked.
    pub(crate) fn versions(&self, package: &str) -> Result<Vec<String>> {
        let text = shell::output(self.program("apt-cache").args(["madison", package]))?;
        Ok(parse_madison(&text))
    }

    /// Downloads exactly these packages (`name` or `name=version`) into a folder; apt verifies them.
    ///
    /// # Errors
    /// When a download fails or does not have the size and hash that the signed lists state.
    pub(crate) fn fetch(&self, packages: &[String], folder: &Path) -> Result<Vec<PathBuf>> {
        shell::output(
            self.get()
                .args(["-q", "download"])
                .args(packages)
                .current_dir(folder),
        )?;
        packages_in(folder)
    }

    /// Downloads these packages and all that they depend on into a folder; apt verifies them.
    ///
    /// # Errors
    /// When a dependency cannot be met, or as for [`Apt::fetch`].
    pub(crate) fn fetch_with_dependencies(&self, packages: &[&str], folder: &Path) -> Result<Vec<PathBuf>> {
        let archives = folder.join("partial");
        fs::create_dir_all(&archives).with_context(|| format!("cannot make {}", archives.display()))?;
        shell::output(
            self.get()
                .args(["-q", "-y", "--download-only", "-o"])
                .arg(format!("Dir::Cache::archives={}", folder.display()))
                .args(["-o", "Debug::NoLocking=true", "install"])
                .args(packages),
        )?;
        packages_in(folder)
    }
}

/// The line in which apt says what went wrong, out of all that it printed.
fn complaint(output: &str) -> &str {
    output
        .lines()
        .find_map(|line| line.strip_prefix("E: "))
        .unwrap_or(output)
}

fn packages_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut packages = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            packages.push(path);
        }
    }
    if packages.is_empty() {
        bail!("apt downloaded nothing into {}", folder.display());
    }
    packages.sort();
    Ok(packages)
}

/// Unpacks the files of a package into a folder, installing nothing; links to folders that are there stay links.
///
/// # Errors
/// When the package is damaged or the folder cannot be written.
pub(crate) fn unpack(package: &Path, folder: &Path) -> Result<()> {
    let mut content = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start dpkg-deb")?;
    let stream = content.stdout.take().context("dpkg-deb has no output")?;
    let unpacked = Command::new("tar")
        .args(["--extract", "--keep-directory-symlink", "--no-same-owner"])
        .arg("--directory")
        .arg(folder)
        .stdin(stream)
        .status()
        .context("cannot start tar")?;
    let read = content.wait()?;
    if !read.success() || !unpacked.success() {
        bail!("cannot unpack {}", package.display());
    }
    Ok(())
}

impl Candidate {
    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.lines()
                .take_while(|line| !line.is_empty())
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        };
        let depends = field("Depends")
            .unwrap_or_default()
            .split(',')
            .filter_map(|dependency| dependency.split(['(', '|', ' ']).find(|part| !part.is_empty()))
            .map(str::to_owned)
            .collect();
        Some(Self {
            package: field("Package")?.to_owned(),
            version: field("Version")?.to_owned(),
            depends,
        })
    }
}

fn parse_madison(text: &str) -> Vec<String> {
    let mut versions = Vec::new();
    for line in text.lines() {
        let version = line.split('|').nth(1).unwrap_or_default().trim();
        if !version.is_empty() && !versions.iter().any(|known| known == version) {
            versions.push(version.to_owned());
        }
    }
    versions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_candidate_is_read_from_its_stanza() {
        let candidate = Candidate::parse(
            "Package: linux-image-cloud-amd64\nVersion: 7.3.4-1~bpo13+1\n\
             Depends: linux-base-cloud-amd64 (= 7.3.4-1~bpo13+1), linux-image-7.3.4+deb13-cloud-amd64 (= 7.3.4-1~bpo13+1) | other\n\
             Size: 1524\n\nPackage: other\nVersion: 1\n",
        )
        .expect("a stanza");
        assert_eq!(candidate.package, "linux-image-cloud-amd64");
        assert_eq!(candidate.version, "7.3.4-1~bpo13+1");
        assert_eq!(
            candidate.depends,
            ["linux-base-cloud-amd64", "linux-image-7.3.4+deb13-cloud-amd64"]
        );
    }

    #[test]
    fn fields_of_a_second_stanza_are_not_taken() {
        assert_eq!(Candidate::parse("Package: a\n\nVersion: 1\n"), None);
        assert_eq!(Candidate::parse(""), None);
    }

    #[test]
    fn a_complaint_is_one_line() {
        assert_eq!(
            complaint("Ign:1 x\nE: Failed to fetch\nE: more"),
            "Failed to fetch"
        );
        assert_eq!(complaint("no apt"), "no apt");
    }

    #[test]
    fn versions_keep_the_order_of_apt_without_repetitions() {
        assert_eq!(
            parse_madison(
                " rust-src | 1.97.1-1 | http://a sid/main amd64 Packages\n\
                 rust-src | 1.97.1-1 | http://b sid/main amd64 Packages\n\
                 rust-src | 1.95.0-2~bpo13+1 | http://a bpo/main amd64 Packages\n"
            ),
            ["1.97.1-1", "1.95.0-2~bpo13+1"]
        );
    }
}
