//! Control groups, with BPF programs that refuse packets.

use std::{
    fs::{self, File},
    path::PathBuf,
    thread,
    time::Duration,
};

use anyhow::Context;

use crate::{
    Result,
    bpf::{Kind, Program},
};

/// Where a guest has the unified hierarchy.
const MOUNTED: &str = "/sys/fs/cgroup";

/// Verdict of a program that refuses a packet.
const REFUSE: i32 = 0;

/// Which packets a program looks at: `enum bpf_attach_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// What sockets receive.
    Ingress = 0,
    /// What sockets send.
    Egress = 1,
}

/// A cgroup; it goes when this value goes, after its processes.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    programs: Vec<Program>,
}

impl Cgroup {
    /// Makes one below the root, with a CPU controller.
    pub fn new(name: &str) -> Result<Self> {
        let controllers = format!("{MOUNTED}/cgroup.subtree_control");
        fs::write(&controllers, "+cpu").with_context(|| format!("cannot write +cpu to {controllers}"))?;
        let path = PathBuf::from(MOUNTED).join(name);
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self {
            path,
            programs: Vec::new(),
        })
    }

    /// Its path in the hierarchy.
    pub fn name(&self) -> String {
        let name = self.path.strip_prefix(MOUNTED).unwrap_or(&self.path);
        format!("/{}", name.display())
    }

    /// Sets one of its files.
    pub fn set(&self, file: &str, value: &str) -> Result<()> {
        let file = self.path.join(file);
        fs::write(&file, value).with_context(|| format!("cannot write {value} to {}", file.display()))
    }

    /// Attaches a program that refuses all packets of one way.
    pub fn refuse(&mut self, way: Way) -> Result<()> {
        let program = Program::load(Kind::CgroupSkb(way), REFUSE, "refuse_all")?;
        program.attach_to(&File::open(&self.path)?, way)?;
        self.programs.push(program);
        Ok(())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has ended leaves a moment later.
        for _ in 0..50 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}
