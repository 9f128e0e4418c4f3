//! Debian's kernels: the newest package of each series, with the modules that networking needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::archive::Archive;
use super::tools::Tools;
use crate::debian::{self, Apt, Installed, Suite};
use crate::shell::step;
use crate::store;
use crate::workspace::Workspace;

/// A series of kernels that droptrace is tested on.
pub(crate) struct Series {
    /// What `--kernel` calls it.
    pub(crate) name: &'static str,
    suites: &'static [Suite],
}

/// All series, oldest first.
pub(crate) const SERIES: &[Series] = &[
    Series {
        name: "5.10",
        suites: &["bullseye", "bullseye-security"],
    },
    Series {
        name: "6.1",
        suites: &["bookworm", "bookworm-security"],
    },
    Series {
        name: "6.12",
        suites: &["trixie", "trixie-security"],
    },
    Series {
        name: "7.x",
        suites: &["trixie-backports", "sid"],
    },
];

/// The package that depends on a suite's newest kernel for virtual machines.
const META_PACKAGE: &str = "linux-image-cloud-amd64";

/// Folders whose modules a guest gets, beside the drivers and all that these depend on.
const MODULE_FOLDERS: &[&str] = &[
    "kernel/net/802/",
    "kernel/net/8021q/",
    "kernel/net/bridge/",
    "kernel/net/core/",
    "kernel/net/ipv4/",
    "kernel/net/ipv6/",
    "kernel/net/key/",
    "kernel/net/llc/",
    "kernel/net/mptcp/",
    "kernel/net/netfilter/",
    "kernel/net/netlink/",
    "kernel/net/openvswitch/",
    "kernel/net/packet/",
    "kernel/net/psample/",
    "kernel/net/sched/",
    "kernel/net/unix/",
    "kernel/net/vmw_vsock/",
    "kernel/net/xfrm/",
    "kernel/drivers/net/bonding/",
    "kernel/drivers/net/ipvlan/",
    "kernel/drivers/net/vxlan/",
];

/// Drivers that stand in folders with many others.
const DRIVERS: &[&str] = &[
    "dummy",
    "geneve",
    "ifb",
    "ip_gre",
    "macvlan",
    "macvtap",
    "netconsole",
    "nlmon",
    "tap",
    "tun",
    "veth",
    "vrf",
    "vxlan",
    "wireguard",
];

/// Files of a modules folder that depmod reads.
const MODULE_LISTS: &[&str] = &["modules.builtin", "modules.builtin.modinfo", "modules.order"];

/// A kernel that is ready to boot.
pub(crate) struct Kernel {
    /// Its series.
    pub(crate) series: &'static Series,
    /// The version of the package.
    pub(crate) version: String,
    /// What `uname -r` says in it.
    pub(crate) release: String,
    folder: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Note {
    release: String,
}

/// What earlier test runs learned about a series.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The newest package version whose tests all passed.
    pub(crate) passed: Option<String>,
}

impl Series {
    /// Finds a series by the name that `--kernel` was given.
    ///
    /// # Errors
    /// When there is no such series; the error lists those there are.
    pub(crate) fn named(name: &str) -> Result<&'static Self> {
        SERIES
            .iter()
            .find(|series| series.name == name || (series.name == "7.x" && name.starts_with('7')))
            .with_context(|| {
                let names: Vec<_> = SERIES.iter().map(|series| series.name).collect();
                format!("no kernel `{name}`: choose one of {}", names.join(", "))
            })
    }

    fn folder(&self, workspace: &Workspace) -> PathBuf {
        workspace.cache.join("kernels").join(self.name)
    }

    /// Gets the newest kernel of this series: from the cache where it is there, else from the mirror.
    ///
    /// When the mirror cannot be asked, the newest cached one is used, and this is said.
    ///
    /// # Errors
    /// When there is neither.
    pub(crate) fn newest(&'static self, workspace: &Workspace, tools: &Tools) -> Result<Kernel> {
        let online = Apt::open(
            workspace,
            &format!("kernel-{}", self.name),
            self.suites,
            Installed::Nothing,
        )
        .and_then(|apt| Ok((apt.candidate(META_PACKAGE)?.version, apt)));
        let error = match online {
            Ok((version, apt)) => {
                if let Some(kernel) = self.cached(workspace, &version) {
                    return Ok(kernel);
                }
                match self.fetch(workspace, tools, &apt, &version) {
                    Ok(kernel) => return Ok(kernel),
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        let Some(kernel) = self.newest_cached(workspace) else {
            return Err(error.context(format!("no kernel {}", self.name)));
        };
        step(&format!(
            "using the cached kernel {}, because: {error:#}",
            kernel.version
        ));
        Ok(kernel)
    }

    /// A kernel of this version, if it is in the cache and undamaged.
    pub(crate) fn cached(&'static self, workspace: &Workspace, version: &str) -> Option<Kernel> {
        let folder = self.folder(workspace).join(version);
        let note: Note = store::open(&folder)?;
        Some(Kernel {
            series: self,
            version: version.to_owned(),
            release: note.release,
            folder,
        })
    }

    fn newest_cached(&'static self, workspace: &Workspace) -> Option<Kernel> {
        let mut folders: Vec<_> = fs::read_dir(self.folder(workspace))
            .ok()?
            .filter_map(|entry| {
                let entry = entry.ok()?;
                Some((entry.metadata().ok()?.modified().ok()?, entry.file_name()))
            })
            .collect();
        folders.sort();
        folders
            .iter()
            .rev()
            .find_map(|(_, name)| self.cached(workspace, name.to_str()?))
    }

    fn fetch(
        &'static self,
        workspace: &Workspace,
        tools: &Tools,
        apt: &Apt,
        version: &str,
    ) -> Result<Kernel> {
        step(&format!(
            "fetching the kernel {} ({version}) for guests",
            self.name
        ));
        let folder = self.folder(workspace).join(version);
        let note = store::make(&folder, |work| {
            let downloads = tempfile::tempdir_in(work)?;
            let unpacked = tempfile::tempdir_in(work)?;
            let root = unpacked.path();
            for package in apt.fetch(&kernel_packages(apt)?, downloads.path())? {
                debian::unpack(&package, root)?;
            }
            let (release, modules) = find_modules(root)?;
            let image = [
                root.join(format!("boot/vmlinuz-{release}")),
                modules.join("vmlinuz"),
            ];
            let image = image
                .iter()
                .find(|path| path.is_file())
                .context("the packages hold no kernel image")?;
            fs::copy(image, work.join("vmlinuz"))?;
            pack_modules(tools, &modules, &release, &work.join("modules.cpio"))?;
            Ok(Note { release })
        })
        .with_context(|| format!("cannot prepare the kernel {version}"))?;
        Ok(Kernel {
            series: self,
            version: version.to_owned(),
            release: note.release,
            folder,
        })
    }

    /// Reads what earlier runs learned.
    pub(crate) fn record(&self, workspace: &Workspace) -> Record {
        fs::read(self.folder(workspace).join("record.json"))
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default()
    }

    /// Keeps what this run learned.
    ///
    /// # Errors
    /// When the cache cannot be written.
    pub(crate) fn keep_record(&self, workspace: &Workspace, record: &Record) -> Result<()> {
        let folder = self.folder(workspace);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("record.json"), serde_json::to_vec_pretty(record)?)?;
        Ok(())
    }
}

impl Kernel {
    /// The kernel image.
    pub(crate) fn image(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    /// The archive of its modules, a part of the guest's initial file system.
    pub(crate) fn modules(&self) -> PathBuf {
        self.folder.join("modules.cpio")
    }
}

/// The packages that hold the newest kernel's image and modules.
///
/// Up to 6.12 that is `linux-image-RELEASE` alone; later that one is empty and depends on `linux-binary-RELEASE`
/// and `linux-modules-RELEASE`.
fn kernel_packages(apt: &Apt) -> Result<Vec<String>> {
    let meta = apt.candidate(META_PACKAGE)?;
    let image = meta
        .depends
        .iter()
        .find(|name| name.starts_with("linux-image-"))
        .with_context(|| format!("{META_PACKAGE} {} depends on no kernel", meta.version))?;
    let image = apt.candidate(image)?;
    let parts = image
        .depends
        .iter()
        .filter(|name| name.starts_with("linux-binary-") || name.starts_with("linux-modules-"));
    Ok(std::iter::once(&image.package)
        .chain(parts)
        .map(|name| format!("{name}={}", image.version))
        .collect())
}

/// The folder of modules in unpacked packages, and the release that it belongs to.
fn find_modules(root: &Path) -> Result<(String, PathBuf)> {
    for folder in ["usr/lib/modules", "lib/modules"] {
        let Ok(mut releases) = fs::read_dir(root.join(folder)) else {
            continue;
        };
        if let Some(release) = releases.next() {
            let release = release?;
            let name = release.file_name().to_string_lossy().into_owned();
            return Ok((name, release.path()));
        }
    }
    bail!("the packages hold no modules")
}

/// Writes the archive of the modules that guests need, decompressed and indexed.
fn pack_modules(tools: &Tools, folder: &Path, release: &str, archive: &Path) -> Result<()> {
    let all = tempfile::tempdir()?;
    fs::create_dir_all(all.path().join("lib/modules"))?;
    std::os::unix::fs::symlink(folder, all.path().join("lib/modules").join(release))?;
    tools.depmod(all.path(), release)?;
    let index = fs::read_to_string(folder.join("modules.dep"))?;
    let dependencies = parse_dependencies(&index);

    let chosen = tempfile::tempdir()?;
    let target = chosen.path().join("lib/modules").join(release);
    fs::create_dir_all(&target)?;
    for list in MODULE_LISTS {
        if folder.join(list).exists() {
            fs::copy(folder.join(list), target.join(list))?;
        }
    }
    for module in choose(&dependencies) {
        copy_module(folder, &target, module)?;
    }
    tools.depmod(chosen.path(), release)?;

    let mut writer = Archive::new(std::io::BufWriter::new(fs::File::create(archive)?));
    writer.directory("usr")?;
    writer.directory("usr/lib")?;
    writer.directory("usr/lib/modules")?;
    let inside = chosen.path().join("usr");
    fs::create_dir(&inside)?;
    fs::rename(chosen.path().join("lib"), inside.join("lib"))?;
    writer.tree(chosen.path(), "", &|path| {
        path.len() > "usr/lib/modules".len() || "usr/lib/modules".starts_with(path)
    })?;
    writer.finish()?;
    Ok(())
}

/// Reads `modules.dep`: each module's path with the paths it depends on.
fn parse_dependencies(text: &str) -> BTreeMap<&str, Vec<&str>> {
    text.lines()
        .filter_map(|line| {
            let (module, dependencies) = line.split_once(':')?;
            Some((module, dependencies.split_whitespace().collect()))
        })
        .collect()
}

fn is_wanted(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let stem = name.split('.').next().unwrap_or(name);
    MODULE_FOLDERS.iter().any(|folder| path.starts_with(folder))
        || (path.starts_with("kernel/drivers/net/") && DRIVERS.contains(&stem))
}

/// The wanted modules and all that they depend on.
fn choose<'a>(dependencies: &BTreeMap<&'a str, Vec<&'a str>>) -> BTreeSet<&'a str> {
    dependencies
        .iter()
        .filter(|(module, _)| is_wanted(module))
        .flat_map(|(module, needed)| std::iter::once(*module).chain(needed.iter().copied()))
        .collect()
}

fn copy_module(from: &Path, to: &Path, module: &str) -> Result<()> {
    let source = from.join(module);
    let plain = module.strip_suffix(".xz").unwrap_or(module);
    let target = to.join(plain);
    fs::create_dir_all(target.parent().context("a module has a folder")?)?;
    if plain == module {
        fs::copy(&source, &target)?;
        return Ok(());
    }
    let mut input = BufReader::new(fs::File::open(&source)?);
    let mut data = Vec::new();
    lzma_rs::xz_decompress(&mut input, &mut data)
        .map_err(|error| anyhow::anyhow!("cannot decompress {}: {error:?}", source.display()))?;
    fs::write(target, data)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wanted_modules_come_with_what_they_depend_on() {
        let dependencies = parse_dependencies(
            "kernel/net/netfilter/nf_conntrack.ko: kernel/lib/libcrc32c.ko\n\
             kernel/drivers/net/veth.ko.xz:\n\
             kernel/drivers/net/ethernet/intel/e1000/e1000.ko:\n\
             kernel/lib/libcrc32c.ko:\n\
             kernel/fs/xfs/xfs.ko: kernel/lib/libcrc32c.ko\n",
        );
        let chosen: Vec<_> = choose(&dependencies).into_iter().collect();
        assert_eq!(
            chosen,
            [
                "kernel/drivers/net/veth.ko.xz",
                "kernel/lib/libcrc32c.ko",
                "kernel/net/netfilter/nf_conntrack.ko"
            ]
        );
    }

    #[test]
    fn kernels_are_found_by_name() {
        assert_eq!(Series::named("6.12").expect("a series").name, "6.12");
        assert_eq!(Series::named("7.3").expect("a series").name, "7.x");
        let error = Series::named("4.19").err().expect("no such series");
        assert_eq!(
            error.to_string(),
            "no kernel `4.19`: choose one of 5.10, 6.1, 6.12, 7.x"
        );
    }
}
