//! What building the BPF object needs: the source of Rust's core library and bpf-linker. Only what is missing is fetched,
//! and it goes into the cache; nothing is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::debian::{self, Apt, Installed};
use crate::shell::{self, step};
use crate::store;
use crate::workspace::Workspace;

/// The version of bpf-linker that goes with the workspace's aya.
const LINKER_VERSION: &str = "0.13.0";

/// The target of BPF programs for little-endian machines.
const BPF_TARGET: &str = "bpfel-unknown-none";

/// Names the folder of the standard library's source to a cargo whose toolchain has none (cargo's
/// `core/compiler/standard_lib.rs`, `detect_sysroot_src_path`); the alternative would be writing into the toolchain.
const SOURCE_VARIABLE: &str = "__CARGO_TESTS_ONLY_SRC_ROOT";

/// Suites that carry the source of several Rust versions.
const RUST_SOURCE_SUITES: &[&str] = &["trixie", "trixie-backports", "sid"];

/// Everything that building the BPF object needs.
pub(crate) struct Toolchain {
    linker: PathBuf,
    /// The source of the core library, where the compiler does not bring it.
    source: Option<PathBuf>,
}

impl Toolchain {
    /// Finds what is there and fetches what is missing.
    ///
    /// # Errors
    /// When something missing cannot be fetched; the error says what it is and how to get it by hand.
    pub(crate) fn get(workspace: &Workspace) -> Result<Self> {
        let compiler = Compiler::ask()?;
        Ok(Self {
            source: core_source(workspace, &compiler)?,
            linker: linker(workspace, &compiler)?,
        })
    }

    /// The linker of BPF programs.
    pub(crate) fn linker(&self) -> &Path {
        &self.linker
    }

    /// Compiles the BPF object and returns its path.
    ///
    /// # Errors
    /// When it does not compile.
    pub(crate) fn build_object(&self, workspace: &Workspace) -> Result<PathBuf> {
        step("building the BPF object");
        let folder = workspace.target.join("bpf");
        shell::run_long(
            self.cargo(workspace, "build")
                .args(["--quiet", "--release", "--target-dir"])
                .arg(&folder),
        )?;
        Ok(folder.join(BPF_TARGET).join("release/droptrace-ebpf"))
    }

    /// A cargo subcommand for the BPF package.
    pub(crate) fn cargo(&self, workspace: &Workspace, subcommand: &str) -> Command {
        let flags = [
            "--cfg=bpf_target_arch=\"x86_64\"",
            // The kernel would check types and line numbers of each program that is loaded, and nothing here needs them.
            "-Cdebuginfo=0",
            // The instructions that kernels have had since 5.1: jumps and arithmetic of 32 bits.
            "-Ctarget-cpu=v3",
            // One function each: what calls another takes newer verifiers twice as long, and stack.
            "-Clink-arg=--llvm-args=--inline-threshold=5000",
            &format!("-Clinker={}", self.linker.display()),
        ]
        .join("\u{1f}");
        let mut cargo = workspace.cargo();
        cargo
            // Building the core library is an unstable feature, which this opens on a stable compiler.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", flags)
            .args([subcommand, "--package", "droptrace-ebpf"])
            .args(["--target", BPF_TARGET, "-Zbuild-std=core"]);
        if let Some(source) = &self.source {
            cargo.env(SOURCE_VARIABLE, source);
        }
        cargo
    }
}

/// The compiler that builds the workspace.
#[derive(Debug, PartialEq, Eq)]
struct Compiler {
    /// Its version, such as `1.95.0`.
    release: String,
    /// The major version of the LLVM inside it.
    llvm: u32,
}

impl Compiler {
    fn ask() -> Result<Self> {
        Self::parse(&shell::output(rustc().arg("-vV"))?)
            .context("`rustc -vV` does not name its version and that of its LLVM")
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        Some(Self {
            release: field("release: ")?.to_owned(),
            llvm: field("LLVM version: ")?.split('.').next()?.parse().ok()?,
        })
    }
}

fn rustc() -> Command {
    Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
}

/// The folder of the core library's source, or `None` where the compiler brings it.
fn core_source(workspace: &Workspace, compiler: &Compiler) -> Result<Option<PathBuf>> {
    let sysroot = shell::output(rustc().args(["--print", "sysroot"]))?;
    let own = Path::new(sysroot.trim_end()).join("lib/rustlib/src/rust/library/core");
    if own.exists() {
        return Ok(None);
    }
    let folder = workspace.cache.join(format!("rust-src-{}", compiler.release));
    let source = folder.join(format!("usr/src/rustc-{}/library", compiler.release));
    if store::open::<()>(&folder).is_some() && source.join("core/src/lib.rs").exists() {
        return Ok(Some(source));
    }
    let by_rustup = match rustup_source() {
        Ok(()) if own.exists() => return Ok(None),
        Ok(()) => "rustup added none".to_owned(),
        Err(error) => format!("{error:#}"),
    };
    debian_source(workspace, compiler, &folder).with_context(|| {
        format!(
            "the source of Rust {}'s core library is missing, which the BPF target needs (rustup: {by_rustup}): \
             get it with `rustup component add rust-src`",
            compiler.release
        )
    })?;
    Ok(Some(source))
}

fn rustup_source() -> Result<()> {
    let toolchain = std::env::var("RUSTUP_TOOLCHAIN").context("this compiler does not come from rustup")?;
    step("adding the component rust-src to the Rust toolchain: BPF programs need their own core library");
    shell::output(Command::new("rustup").args(["component", "add", "rust-src", "--toolchain", &toolchain]))
        .map(drop)
}

/// Fetches Debian's package of the source of exactly the compiler's version.
fn debian_source(workspace: &Workspace, compiler: &Compiler, folder: &Path) -> Result<()> {
    let apt = Apt::open(workspace, "rust-source", RUST_SOURCE_SUITES, Installed::Nothing)?;
    let version = apt
        .versions("rust-src")?
        .into_iter()
        .find(|version| version.starts_with(&format!("{}+", compiler.release)))
        .with_context(|| format!("Debian has no package rust-src {}", compiler.release))?;
    step(&format!(
        "fetching rust-src {version}: BPF programs need their own core library"
    ));
    store::make(folder, |work| {
        let downloads = tempfile::tempdir_in(work)?;
        for package in apt.fetch(&[format!("rust-src={version}")], downloads.path())? {
            debian::unpack(&package, work)?;
        }
        Ok(())
    })
}

/// The path of bpf-linker, built with the LLVM of the compiler's major version.
fn linker(workspace: &Workspace, compiler: &Compiler) -> Result<PathBuf> {
    let folder = workspace
        .cache
        .join(format!("bpf-linker-{LINKER_VERSION}-llvm-{}", compiler.llvm));
    let program = folder.join("bpf-linker");
    if store::open::<()>(&folder).is_some() && shell::output(Command::new(&program).arg("--version")).is_ok()
    {
        return Ok(program);
    }
    store::make(&folder, |work| build_linker(workspace, compiler.llvm, work))
        .with_context(|| format!("cannot get bpf-linker {LINKER_VERSION}, which links BPF programs"))?;
    shell::output(Command::new(&program).arg("--version"))
        .context("bpf-linker was built and does not run")?;
    Ok(program)
}

/// Builds bpf-linker into a folder, with the shared libraries that it needs beside it.
fn build_linker(workspace: &Workspace, llvm: u32, work: &Path) -> Result<()> {
    let scratch = tempfile::tempdir_in(work)?;
    let installed = PathBuf::from(format!("/usr/lib/llvm-{llvm}"));
    let tree = scratch.path().join("llvm");
    let libraries = tree.join("usr/lib/x86_64-linux-gnu");
    fs::create_dir_all(&libraries)?;
    let complete = installed.join("bin/llvm-config").exists() && installed.join("include/llvm-c").exists();
    let prefix = if complete {
        installed
    } else {
        fetch_llvm(workspace, llvm, &tree)?;
        tree.join(format!("usr/lib/llvm-{llvm}"))
    };

    step(&format!(
        "building bpf-linker {LINKER_VERSION} with LLVM {llvm}: it links BPF programs (about a minute)"
    ));
    // The old kind of run path also serves the libraries of libraries.
    let flags = "-Clink-arg=-Wl,--disable-new-dtags,-rpath,$ORIGIN";
    shell::run_long(
        workspace
            .cargo()
            .current_dir(work)
            .args(["install", "--quiet", "--locked", "bpf-linker"])
            .args(["--version", LINKER_VERSION, "--no-default-features"])
            .args(["--features", &format!("llvm-{llvm}"), "--no-track"])
            .arg("--root")
            .arg(scratch.path())
            .arg("--target-dir")
            .arg(scratch.path().join("target"))
            .env("LLVM_PREFIX", &prefix)
            .env(format!("LLVM_SYS_{llvm}1_PREFIX"), &prefix)
            .env("LD_LIBRARY_PATH", &libraries)
            .env("CARGO_ENCODED_RUSTFLAGS", flags),
    )?;
    fs::rename(scratch.path().join("bin/bpf-linker"), work.join("bpf-linker"))?;
    for entry in fs::read_dir(&libraries)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().contains(".so") {
            fs::rename(entry.path(), work.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Unpacks LLVM's development files, and the libraries that this machine lacks for them, into a folder.
fn fetch_llvm(workspace: &Workspace, llvm: u32, tree: &Path) -> Result<()> {
    let suites = host_suites()?;
    let library = format!("libllvm{llvm}");
    let apt = Apt::open(workspace, "host", &suites, Installed::Host)?;
    step(&format!(
        "fetching LLVM {llvm} from {}: bpf-linker is built with it (unpacked into the cache, not installed)",
        suites.join(", ")
    ));
    let downloads = tempfile::tempdir_in(tree)?;
    let packages = [
        format!("llvm-{llvm}"),
        format!("llvm-{llvm}-dev"),
        library.clone(),
    ];
    apt.fetch(&packages, downloads.path())?;
    for package in apt.fetch_with_dependencies(&[&library], downloads.path())? {
        debian::unpack(&package, tree)?;
    }
    Ok(())
}

/// The suites of this machine's own release, so that libraries taken from them run here.
fn host_suites() -> Result<Vec<&'static str>> {
    let system = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    suites_of(&system).context(
        "this machine runs no known Debian release, so that no LLVM for it is known: install LLVM's development files of the compiler's version (`rustc -vV`) to /usr/lib/llvm-VERSION",
    )
}

fn suites_of(system: &str) -> Option<Vec<&'static str>> {
    let codename = system
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))?
        .trim_matches('"');
    match codename {
        "bookworm" => Some(vec!["bookworm", "bookworm-security"]),
        "trixie" => Some(vec!["trixie", "trixie-security"]),
        "forky" => Some(vec!["forky"]),
        "sid" => Some(vec!["sid"]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiler_says_what_it_is() {
        let compiler = Compiler::parse(
            "rustc 1.95.0 (59807616e 2026-04-14)\nbinary: rustc\nhost: x86_64-unknown-linux-gnu\n\
             release: 1.95.0\nLLVM version: 22.1.2\n",
        );
        assert_eq!(
            compiler,
            Some(Compiler {
                release: "1.95.0".to_owned(),
                llvm: 22
            })
        );
        assert_eq!(Compiler::parse("release: 1.95.0\n"), None);
    }

    #[test]
    fn suites_belong_to_the_machines_release() {
        assert_eq!(
            suites_of("NAME=\"Debian GNU/Linux\"\nVERSION_CODENAME=trixie\n"),
            Some(vec!["trixie", "trixie-security"])
        );
        assert_eq!(suites_of("VERSION_CODENAME=jammy\n"), None);
        assert_eq!(suites_of(""), None);
    }
}
