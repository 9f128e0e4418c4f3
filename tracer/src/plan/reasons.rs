//! The kernel's drop reasons by name, from its own enums, never from a table:
//! their numbers move in almost every release.

use std::{collections::HashMap, path::Path};

use super::btf::{BtfError, Types, Wanted};

/// Reasons of the kernel proper (`include/net/dropreason-core.h`, since 5.17).
const CORE: &str = "skb_drop_reason";
/// Subsystems that number reasons of their own (`include/net/dropreason.h`, since 6.4): the upper half of a reason.
const SUBSYSTEMS: &str = "skb_drop_reason_subsys";
/// Enums of subsystems: in vmlinux or in the module that they are named after. Their values hold the subsystem in
/// the upper half.
const OTHERS: &[&str] = &[
    "ovs_drop_reason",
    "qdisc_drop_reason",
    "mac80211_drop_reason",
    "___mac80211_drop_reason",
];
/// Bits of a reason below its subsystem (`SKB_DROP_REASON_SUBSYS_SHIFT`, 6.4 - 7.3).
const SUBSYSTEM_SHIFT: u32 = 16;

/// Modules that bring reasons of their own.
pub const MODULES: &[&str] = &["mac80211", "openvswitch"];

/// The enums that [`Reasons::add`] looks for.
pub fn wanted() -> impl Iterator<Item = &'static str> {
    [CORE, SUBSYSTEMS].into_iter().chain(OTHERS.iter().copied())
}

/// Names of drop reasons.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasons {
    names: HashMap<u32, String>,
    subsystems: HashMap<u32, String>,
}

impl Reasons {
    /// Adds the reasons that these types know.
    pub fn add(&mut self, types: &Types) {
        for (name, value) in types.enumeration(CORE).unwrap_or_default() {
            if let Some(name) = core_name(&name) {
                self.names.insert(value as u32, name.to_owned());
            }
        }
        for (name, value) in types.enumeration(SUBSYSTEMS).unwrap_or_default() {
            if let Some(name) = name.strip_prefix("SKB_DROP_REASON_SUBSYS_")
                && name != "NUM"
            {
                self.subsystems.insert(value as u32, name.to_owned());
            }
        }
        for (name, value) in OTHERS.iter().filter_map(|name| types.enumeration(name)).flatten() {
            let value = value as u32;
            // The first enumerator only marks the start of the range, the last one its end.
            if value >> SUBSYSTEM_SHIFT != 0 && value & 0xffff != 0 && !name.ends_with("_MAX") {
                self.names.insert(value, name.trim_start_matches('_').to_owned());
            }
        }
    }

    /// The kernel's name of this reason, without the prefix `SKB_DROP_REASON_`. A subsystem's reason whose name is not
    /// known is `SUBSYSTEM_number`, of an unknown subsystem `SUBSYS_n:m`. `None` for 0, and for a number that the
    /// kernel does not have.
    pub fn name(&self, reason: u32) -> Option<String> {
        if let Some(name) = self.names.get(&reason) {
            return Some(name.clone());
        }
        let (subsystem, number) = (reason >> SUBSYSTEM_SHIFT, reason & 0xffff);
        if subsystem == 0 {
            return None;
        }
        Some(match self.subsystems.get(&subsystem) {
            Some(name) => format!("{name}_{number}"),
            None => format!("SUBSYS_{subsystem}:{number}"),
        })
    }

    /// Whether the kernel has the reason of this name, without prefix.
    pub fn has(&self, name: &str) -> bool {
        self.names.values().any(|each| each == name)
    }

    /// All names, sorted.
    pub fn all(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.names.values().map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Those of the kernel proper and what is built into it, by the types in the file at `path`.
    ///
    /// # Errors
    /// The file is no BTF.
    pub fn of_kernel(path: &Path) -> Result<Self, BtfError> {
        let types = Types::read(path, &Wanted::default().and(wanted()))?;
        let mut reasons = Self::default();
        reasons.add(&types);
        Ok(reasons)
    }

    /// Whether the kernel has reasons at all (since 5.17).
    pub fn any(&self) -> bool {
        !self.names.is_empty()
    }
}

/// Leaves out what is no reason: the "not dropped" value, the end of the enum, the mask.
fn core_name(name: &str) -> Option<&str> {
    match name {
        "SKB_NOT_DROPPED_YET" | "SKB_DROP_REASON_MAX" | "SKB_DROP_REASON_SUBSYS_MASK" => None,
        "SKB_CONSUMED" => Some("CONSUMED"),
        _ => name.strip_prefix("SKB_DROP_REASON_"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::{super::blob::Blob, *};

    fn reasons(blob: &Blob) -> Reasons {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&blob.bytes()).unwrap();
        Reasons::of_kernel(file.path()).unwrap()
    }

    #[test]
    fn names_come_from_the_kernel() {
        let mut blob = Blob::new();
        blob.enumeration(
            "skb_drop_reason",
            &[
                ("SKB_NOT_DROPPED_YET", 0),
                ("SKB_CONSUMED", 1),
                ("SKB_DROP_REASON_NOT_SPECIFIED", 2),
                ("SKB_DROP_REASON_NO_SOCKET", 3),
                ("SKB_DROP_REASON_MAX", 4),
                ("SKB_DROP_REASON_SUBSYS_MASK", 0xffff_0000),
            ],
        );
        blob.enumeration(
            "skb_drop_reason_subsys",
            &[
                ("SKB_DROP_REASON_SUBSYS_CORE", 0),
                ("SKB_DROP_REASON_SUBSYS_OPENVSWITCH", 2),
                ("SKB_DROP_REASON_SUBSYS_NUM", 3),
            ],
        );
        blob.enumeration(
            "ovs_drop_reason",
            &[
                ("__OVS_DROP_REASON", 2 << 16),
                ("OVS_DROP_LAST_ACTION", (2 << 16) + 1),
                ("OVS_DROP_MAX", (2 << 16) + 2),
            ],
        );
        let reasons = reasons(&blob);
        let name = |reason| reasons.name(reason);
        assert_eq!(name(3).as_deref(), Some("NO_SOCKET"));
        assert_eq!(name(1).as_deref(), Some("CONSUMED"));
        assert_eq!(name((2 << 16) + 1).as_deref(), Some("OVS_DROP_LAST_ACTION"));
        assert_eq!(name((2 << 16) + 9).as_deref(), Some("OPENVSWITCH_9"));
        assert_eq!(
            reasons.all(),
            ["CONSUMED", "NOT_SPECIFIED", "NO_SOCKET", "OVS_DROP_LAST_ACTION"]
        );
        assert_eq!(name((7 << 16) + 9).as_deref(), Some("SUBSYS_7:9"));
        assert_eq!(name((3 << 16) + 1).as_deref(), Some("SUBSYS_3:1"));
        for nothing in [0, 4, 5] {
            assert_eq!(name(nothing), None);
        }
        assert!(reasons.any() && reasons.has("NO_SOCKET") && !reasons.has("MAX"));
    }

    #[test]
    fn a_kernel_without_reasons_has_none() {
        let mut blob = Blob::new();
        blob.int("u8", 1);
        let reasons = reasons(&blob);
        assert!(!reasons.any());
        assert_eq!(reasons.name(3), None);
    }
}
