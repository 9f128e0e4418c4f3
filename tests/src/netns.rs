//! Network namespaces of a scenario.

use std::{
    fs::{self, File},
    io::Write,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, bail, ensure};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
};

use crate::Result;

/// Where `ip netns` keeps names, and where droptrace finds them.
const NAMES: &str = "/run/netns";

/// A network namespace with a name; it goes when this value goes.
#[derive(Debug)]
pub struct Netns {
    name: String,
    path: PathBuf,
    file: File,
    inode: u32,
    /// Made by another program, which sees to its end.
    of_another: bool,
}

impl Netns {
    /// Makes one, with loopback up and without IPv6 address detection delays.
    pub fn new(name: &str) -> Result<Self> {
        let path = Path::new(NAMES).join(name);
        fs::create_dir_all(NAMES).with_context(|| format!("cannot make {NAMES}"))?;
        File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let bound = {
            let path = path.clone();
            thread::spawn(move || -> Result<()> {
                unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")?;
                mount(
                    Some("/proc/thread-self/ns/net"),
                    &path,
                    None::<&str>,
                    MsFlags::MS_BIND,
                    None::<&str>,
                )
                .with_context(|| format!("cannot bind the network namespace to {}", path.display()))
            })
            .join()
        };
        bound.map_err(|_| anyhow::anyhow!("the thread that makes {name} panicked"))??;
        let file = File::open(&path)?;
        let inode = u32::try_from(file.metadata()?.ino()).context("a netns inode fits 32 bits")?;
        let netns = Self {
            name: name.to_owned(),
            path,
            file,
            inode,
            of_another: false,
        };
        for (name, value) in [
            ("net.ipv6.conf.default.accept_dad", "0"),
            ("net.ipv6.conf.all.accept_dad", "0"),
            ("net.ipv6.conf.default.router_solicitations", "0"),
        ] {
            netns.sysctl(name, value)?;
        }
        netns.ip(&["link set lo up"])?;
        Ok(netns)
    }

    /// One that another program made.
    pub fn of_another(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let name = path.file_name().context("a netns has a name")?;
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            path: path.to_owned(),
            inode: u32::try_from(file.metadata()?.ino()).context("a netns inode fits 32 bits")?,
            file,
            of_another: true,
        })
    }

    /// The name that `ip netns` shows.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its path, by which other programs can enter it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its inode, by which droptrace names it.
    pub fn inode(&self) -> u32 {
        self.inode
    }

    /// Does something inside, on a thread of its own; sockets made there stay there.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    setns(self.file.as_fd(), CloneFlags::CLONE_NEWNET)
                        .with_context(|| format!("cannot enter the netns {}", self.name))?;
                    work()
                })
                .join()
                .map_err(|_| anyhow::anyhow!("a thread inside the netns {} panicked", self.name))?
        })
    }

    /// Runs a command line (words parted by spaces) inside, gives its standard output.
    pub fn run(&self, line: &str) -> Result<String> {
        self.enter(|| run(line))
            .with_context(|| format!("in the netns {}", self.name))
    }

    /// Runs a command inside with this on its standard input, gives its standard output.
    pub fn run_with_input(&self, line: &str, input: &str) -> Result<String> {
        self.enter(|| run_with_input(line, input))
            .with_context(|| format!("in the netns {}", self.name))
    }

    /// Runs several `ip` commands (without the word `ip`) in one process.
    pub fn ip(&self, lines: &[&str]) -> Result<()> {
        self.run_with_input("ip -batch -", &format!("{}\n", lines.join("\n")))
            .with_context(|| format!("ip {lines:?}"))?;
        Ok(())
    }

    /// Loads an nftables ruleset.
    pub fn nft(&self, ruleset: &str) -> Result<()> {
        self.run_with_input("nft -f -", ruleset)
            .with_context(|| format!("nft: {ruleset}"))?;
        Ok(())
    }

    /// What the first counter of its nftables ruleset counted.
    pub fn nft_packets(&self) -> Result<u64> {
        let ruleset = self.run("nft list ruleset")?;
        packets_of_rule(&ruleset).with_context(|| format!("no counter in {ruleset}"))
    }

    /// Sets a sysctl (`net.ipv4.tcp_syncookies`); a slash stands for a dot inside a device name.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<()> {
        let path = sysctl_path(name);
        self.enter(|| {
            fs::write(&path, value).with_context(|| format!("cannot write {value} to {}", path.display()))
        })
    }

    /// Makes it a router of both families, or none.
    pub fn forward(&self, on: bool) -> Result<()> {
        let switch = if on { "1" } else { "0" };
        self.sysctl("net.ipv4.ip_forward", switch)?;
        self.sysctl("net.ipv6.conf.all.forwarding", switch)
    }

    /// Reads a file below this netns' `/proc/net`.
    pub fn proc_net(&self, file: &str) -> Result<String> {
        self.enter(|| {
            let path = format!("/proc/thread-self/net/{file}");
            fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
        })
    }

    /// Lays a veth pair: `device` here, `peer_device` in `peer`; both up.
    pub fn veth(&self, device: &str, peer: &Self, peer_device: &str) -> Result<()> {
        self.ip(&[
            &format!(
                "link add {device} type veth peer name {peer_device} netns {}",
                peer.path.display()
            ),
            &format!("link set {device} up"),
        ])?;
        peer.ip(&[&format!("link set {peer_device} up")])
    }

    /// Gives an address such as `10.1.0.1/24` or `fd00::1/64` to a device.
    pub fn address(&self, device: &str, address: &str) -> Result<()> {
        let nodad = if address.contains(':') { " nodad" } else { "" };
        self.ip(&[&format!("address add {address} dev {device}{nodad}")])
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        if self.of_another {
            return;
        }
        // What stays behind ends with the guest.
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
        let _ = fs::remove_file(&self.path);
    }
}

fn sysctl_path(name: &str) -> PathBuf {
    Path::new("/proc/sys").join(name.replace('.', "/").replace("//", "."))
}

/// Sets a sysctl of the initial namespace.
pub fn sysctl(name: &str, value: &str) -> Result<()> {
    let path = sysctl_path(name);
    fs::write(&path, value).with_context(|| format!("cannot write {value} to {}", path.display()))
}

/// Reads a sysctl of the initial namespace.
pub fn read_sysctl(name: &str) -> Result<String> {
    let path = sysctl_path(name);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

/// Puts a setting of the initial namespace back.
#[derive(Debug)]
pub struct Restore {
    name: &'static str,
    value: String,
}

impl Restore {
    /// Sets it until this value goes.
    pub fn set(name: &'static str, value: &str) -> Result<Self> {
        let restore = Self {
            name,
            value: read_sysctl(name)?,
        };
        sysctl(name, value)?;
        Ok(restore)
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        if let Err(error) = sysctl(self.name, &self.value) {
            eprintln!("cannot put {} back to {}: {error:#}", self.name, self.value);
        }
    }
}

/// Runs a command line (words parted by spaces) where this thread is, gives its standard output.
pub fn run(line: &str) -> Result<String> {
    run_with_input(line, "")
}

fn run_with_input(line: &str, input: &str) -> Result<String> {
    let mut words = line.split_whitespace();
    let program = words.next().context("an empty command line")?;
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read its input may be gone by now.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child
        .wait_with_output()
        .with_context(|| format!("cannot wait for {program}"))?;
    if !output.status.success() {
        bail!(
            "`{line}` ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Loads a kernel module.
pub fn modprobe(module: &str) -> Result<()> {
    run(&format!("modprobe {module}")).map(drop)
}

/// Loads a kernel module and says whether this kernel has it.
pub fn has_module(module: &str) -> bool {
    modprobe(module).is_ok()
}

/// Checks that this runs as root in a guest, where it may do as it likes.
pub fn ensure_guest() -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "scenarios need root");
    ensure!(
        Path::new("/etc/droptrace/command.json").exists()
            || std::env::var_os("DROPTRACE_TESTS_HERE").is_some(),
        "scenarios change global settings of the kernel: run them in a guest (`cargo xtask vm`); \
         DROPTRACE_TESTS_HERE=1 runs them here nevertheless"
    );
    Ok(())
}

/// What the first counter of a ruleset counted.
fn packets_of_rule(ruleset: &str) -> Option<u64> {
    let (_, rest) = ruleset.split_once("counter packets ")?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_of_a_rule_is_read() {
        assert_eq!(
            packets_of_rule("chain c {\n udp dport 9000 counter packets 1200 bytes 52800 drop\n}"),
            Some(1200)
        );
        assert_eq!(packets_of_rule("chain c { }"), None);
    }
}
