//! Tables of iptables-legacy and ip6tables-legacy, as x_tables keeps them: `struct ipt_getinfo`, `ipt_get_entries`,
//! `ipt_entry` (include/uapi/linux/netfilter_ipv4/ip_tables.h, and the IPv6 twin), the same 5.10 - 7.3.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use super::{Ender, LEGACY, is_loaded, proc_net};
use crate::{
    context::netlink::{half, text, word},
    diagnose::{BaseChain, Ending, HookPoint, HookPoints},
};

/// `IPT_SO_GET_INFO`, `IPT_SO_GET_ENTRIES`; those of IPv6 have the same numbers.
const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
/// `XT_TABLE_MAXNAMELEN`.
const NAME: usize = 32;
/// Size of `struct ipt_getinfo`, and where in it valid_hooks, hook_entry, underflow and size are.
const INFO: usize = 84;
const VALID_HOOKS: usize = 32;
const HOOK_ENTRY: usize = 36;
const UNDERFLOW: usize = 56;
const SIZE: usize = 80;
/// Where the entries begin in `struct ipt_get_entries`.
const ENTRIES: usize = 40;
/// Head of a target (`struct xt_entry_target`): its size, its name; then its data, the verdict of a standard target.
const TARGET_NAME: usize = 2;
const TARGET_HEAD: usize = 32;
/// `-NF_DROP - 1`.
const DROP: i32 = -1;
/// How often a table that changes while it is read is tried.
const ATTEMPTS: u32 = 3;

/// IPv4's tables or IPv6's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    pub(super) name: &'static str,
    v6: bool,
    module: &'static str,
    names: &'static str,
    program: &'static str,
    address: AddressFamily,
    level: libc::c_int,
    /// Where in `struct ipt_entry` target_offset, next_offset and the packets of its counters are; its size.
    target_offset: usize,
    next_offset: usize,
    packets: usize,
    entry: usize,
}

pub(super) const V4: Family = Family {
    name: "ip",
    v6: false,
    module: "ip_tables",
    names: "ip_tables_names",
    program: "iptables-legacy",
    address: AddressFamily::Inet,
    level: libc::SOL_IP,
    target_offset: 88,
    next_offset: 90,
    packets: 96,
    entry: 112,
};

pub(super) const V6: Family = Family {
    name: "ip6",
    v6: true,
    module: "ip6_tables",
    names: "ip6_tables_names",
    program: "ip6tables-legacy",
    address: AddressFamily::Inet6,
    level: libc::SOL_IPV6,
    target_offset: 140,
    next_offset: 142,
    packets: 152,
    entry: 168,
};

impl Family {
    /// The tables that the netns has; asking another one would make it.
    pub(super) fn tables(self) -> Vec<String> {
        if !is_loaded(self.module) {
            return Vec::new();
        }
        proc_net(self.names).lines().map(str::to_owned).collect()
    }
}

/// Reads a table of the netns that the thread is in.
pub(super) fn read(family: Family, table: &str) -> io::Result<Vec<Ender>> {
    let socket = socket(
        family.address,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::Raw,
    )?;
    let mut name = [0; NAME];
    let bytes = table.as_bytes();
    name.get_mut(..bytes.len())
        .filter(|name| name.len() < NAME)
        .ok_or(io::ErrorKind::InvalidInput)?
        .copy_from_slice(bytes);
    for _ in 0..ATTEMPTS {
        let mut info = vec![0; INFO];
        info[..NAME].copy_from_slice(&name);
        ask(&socket, family.level, GET_INFO, &mut info)?;
        let size = word(&info, SIZE).unwrap_or(0);
        let mut entries = vec![0; ENTRIES + size as usize];
        entries[..NAME].copy_from_slice(&name);
        entries[NAME..NAME + 4].copy_from_slice(&size.to_ne_bytes());
        match ask(&socket, family.level, GET_ENTRIES, &mut entries) {
            Ok(()) => return Ok(enders(family, table, &info, &entries[ENTRIES..])),
            // Another size by now.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::Interrupted,
        "the table changed during every reading",
    ))
}

fn ask(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, bytes: &mut [u8]) -> io::Result<()> {
    let mut length = bytes.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, all of which are the buffer's.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            option,
            bytes.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// An entry: a rule, a policy, or the head of a chain.
struct Entry<'a> {
    /// Its chain.
    chain: String,
    /// Its number in the chain, from 1.
    number: usize,
    bytes: &'a [u8],
    packets: u64,
    target: String,
    /// Verdict of a standard target: a place to go on at where it is not negative.
    verdict: Option<i32>,
}

/// Reads what can end a packet, and by which built-in chain a packet comes to it.
fn enders(family: Family, table: &str, info: &[u8], bytes: &[u8]) -> Vec<Ender> {
    // `enum nf_inet_hooks`.
    const HOOKS: [(HookPoint, &str); 5] = [
        (HookPoint::Prerouting, "PREROUTING"),
        (HookPoint::Input, "INPUT"),
        (HookPoint::Forward, "FORWARD"),
        (HookPoint::Output, "OUTPUT"),
        (HookPoint::Postrouting, "POSTROUTING"),
    ];
    let valid = word(info, VALID_HOOKS).unwrap_or(0);
    let hooks: Vec<_> = HOOKS
        .iter()
        .enumerate()
        .filter(|(number, _)| valid & 1 << number != 0)
        .filter_map(|(number, (point, name))| {
            let start = word(info, HOOK_ENTRY + 4 * number)?;
            let policy = word(info, UNDERFLOW + 4 * number)?;
            Some((*point, *name, start as usize, policy as usize))
        })
        .collect();
    let entries = entries(family, bytes, |at| {
        hooks
            .iter()
            .find(|(_, _, start, _)| *start == at)
            .map(|(_, name, _, _)| *name)
    });
    // Which chains lead where.
    let mut leads: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for entry in entries.values() {
        let target = entry.verdict.and_then(|verdict| usize::try_from(verdict).ok());
        if let Some(target) = target.and_then(|target| entries.get(&target)) {
            leads.entry(&entry.chain).or_default().insert(&target.chain);
        }
    }
    let mut bases: BTreeMap<&str, Vec<(HookPoints, BaseChain)>> = BTreeMap::new();
    for (point, name, ..) in &hooks {
        let base = BaseChain {
            engine: LEGACY.to_owned(),
            table: format!("{} {table}", family.name),
            chain: (*name).to_owned(),
        };
        let mut seen = BTreeSet::from([*name]);
        let mut open = vec![*name];
        while let Some(chain) = open.pop() {
            let point = HookPoints::one(*point, family.v6);
            bases.entry(chain).or_default().push((point, base.clone()));
            open.extend(
                leads
                    .get(chain)
                    .into_iter()
                    .flatten()
                    .filter(|chain| seen.insert(chain)),
            );
        }
    }
    entries
        .iter()
        .filter_map(|(at, entry)| {
            let ending = match entry.verdict {
                Some(DROP) => Ending::Drop,
                None if entry.target == "REJECT" => Ending::Reject,
                None if entry.target == "MASQUERADE" => Ending::Masquerade,
                _ => return None,
            };
            let bases = bases.get(entry.chain.as_str())?.clone();
            let policy = hooks.iter().any(|(_, _, _, policy)| policy == at);
            let mut rule = if policy {
                "policy".to_owned()
            } else {
                format!("rule {}", entry.number)
            };
            if bases.iter().any(|(_, base)| base.chain != entry.chain) {
                rule = format!("{rule} of chain {}", entry.chain);
            }
            Some(Ender {
                identity: format!(
                    "{LEGACY} {} {table} {at} {}",
                    family.name,
                    digest(family, entry.bytes)
                ),
                ending,
                bases,
                rule,
                list: format!(
                    "{} -t {table} -nvL {} --line-numbers",
                    family.program, entry.chain
                ),
                packets: Some(entry.packets),
            })
        })
        .collect()
}

/// The entries by their places; `built_in` names the chain that begins at one.
fn entries(
    family: Family,
    bytes: &[u8],
    built_in: impl Fn(usize) -> Option<&'static str>,
) -> BTreeMap<usize, Entry<'_>> {
    let mut found = BTreeMap::new();
    let (mut chain, mut number, mut at) = (String::new(), 0, 0);
    while let Some(rest) = bytes.get(at..).filter(|rest| rest.len() > family.entry) {
        let Some(next) = half(rest, family.next_offset)
            .map(usize::from)
            .filter(|&next| next > family.entry)
        else {
            break;
        };
        let entry = rest.get(..next).unwrap_or(rest);
        if let Some(name) = built_in(at) {
            name.clone_into(&mut chain);
            number = 0;
        }
        let target = half(entry, family.target_offset).map_or(0, usize::from);
        let target = entry.get(target..).unwrap_or_default();
        let name = text(target.get(TARGET_NAME..TARGET_HEAD).unwrap_or_default());
        let data = target.get(TARGET_HEAD..).unwrap_or_default();
        if name == "ERROR" {
            // Heads a chain of the user's, and ends the table.
            chain = text(data);
            number = 0;
        } else {
            number += 1;
            let packets = entry.get(family.packets..family.packets + 8);
            found.insert(
                at,
                Entry {
                    chain: chain.clone(),
                    number,
                    bytes: entry,
                    packets: packets
                        .and_then(|bytes| bytes.try_into().ok())
                        .map_or(0, u64::from_ne_bytes),
                    verdict: name
                        .is_empty()
                        .then(|| word(data, 0))
                        .flatten()
                        .map(|word| word as i32),
                    target: name,
                },
            );
        }
        at += next;
    }
    found
}

/// The same for the same rule, whatever it counted.
fn digest(family: Family, bytes: &[u8]) -> String {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    let counters = family.packets..family.packets + 16;
    bytes.get(..counters.start).hash(&mut hasher);
    bytes.get(counters.end..).hash(&mut hasher);
    format!("{:x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry with this target and data.
    fn entry(family: Family, packets: u64, target: &str, data: &[u8]) -> Vec<u8> {
        let size = family.entry + TARGET_HEAD + data.len().next_multiple_of(8);
        let mut bytes = vec![0; size];
        bytes[family.target_offset..][..2].copy_from_slice(&(family.entry as u16).to_ne_bytes());
        bytes[family.next_offset..][..2].copy_from_slice(&(size as u16).to_ne_bytes());
        bytes[family.packets..][..8].copy_from_slice(&packets.to_ne_bytes());
        bytes[family.entry + TARGET_NAME..][..target.len()].copy_from_slice(target.as_bytes());
        bytes[family.entry + TARGET_HEAD..][..data.len()].copy_from_slice(data);
        bytes
    }

    #[test]
    fn drops_rejects_and_policies_are_found_through_jumps() {
        for family in [V4, V6] {
            let standard = |packets, verdict: i32| entry(family, packets, "", &verdict.to_ne_bytes());
            let size = standard(0, 0).len();
            let mut user = b"BAD".to_vec();
            user.resize(30, 0);
            let head = entry(family, 0, "ERROR", &user);
            // INPUT: jump to BAD, policy DROP; BAD: drop, reject, return.
            let bad = 2 * size + head.len();
            let table = [
                standard(9, bad as i32),
                standard(3, DROP),
                head,
                standard(5, DROP),
                entry(family, 6, "REJECT", &[0; 4]),
                standard(0, -5),
                entry(family, 0, "ERROR", b"ERROR"),
            ]
            .concat();
            let mut info = vec![0; INFO];
            info[VALID_HOOKS] = 1 << 1;
            info[UNDERFLOW + 4..][..4].copy_from_slice(&(size as u32).to_ne_bytes());
            let found = enders(family, "filter", &info, &table);
            let told: Vec<_> = found
                .iter()
                .map(|ender| (ender.rule.as_str(), ender.ending, ender.packets))
                .collect();
            assert_eq!(
                told,
                [
                    ("policy", Ending::Drop, Some(3)),
                    ("rule 1 of chain BAD", Ending::Drop, Some(5)),
                    ("rule 2 of chain BAD", Ending::Reject, Some(6)),
                ]
            );
            assert!(
                found[0]
                    .points()
                    .meets(HookPoints::one(HookPoint::Input, family.v6))
            );
            assert!(
                !found[0]
                    .points()
                    .meets(HookPoints::one(HookPoint::Input, !family.v6))
            );
            assert!(found[1].list.ends_with("-t filter -nvL BAD --line-numbers"));
            assert!(enders(family, "filter", &info, &table[..table.len() / 2]).len() < 3);
        }
    }
}
