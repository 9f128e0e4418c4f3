//! One pass over raw BTF (`Documentation/bpf/btf.rst`): which types and
//! enumerators bear wanted names. A kernel has 100,000 types and more, of which
//! a plan needs a hundred: parsing each, as a library does, costs half of what
//! the whole start may take.

use std::collections::{HashMap, HashSet};

use memchr::memchr;

const HEADER: usize = 24;
/// How many different looks names have for [`Sought`].
const PRINTS: usize = 1 << 12;
/// Bytes of what every type starts with: name, kind and count, size or type.
const TYPE: usize = 12;

/// Wanted names, with the ids of the types that bear them.
pub(super) type Ids = HashMap<&'static str, Vec<u32>>;
/// Wanted enumerators, with the id of their enum and their value.
pub(super) type Enumerators = HashMap<&'static str, Vec<(u32, i128)>>;

/// Wanted names, and a look at a few bytes of a name that most others do not pass.
struct Sought<'a> {
    names: HashMap<&'a [u8], &'static str>,
    prints: [bool; PRINTS],
}

impl<'a> Sought<'a> {
    fn new(wanted: &'a HashSet<&'static str>) -> Self {
        let names: HashMap<&[u8], &'static str> =
            wanted.iter().map(|name| (name.as_bytes(), *name)).collect();
        let mut prints = [false; PRINTS];
        for name in names.keys() {
            prints[Self::print(name)] = true;
        }
        Self { names, prints }
    }

    /// Of its length and its last two bytes, in which names of one part of the kernel differ most.
    fn print(name: &[u8]) -> usize {
        let end = match name {
            [.., before, last] => usize::from(*before) << 5 ^ usize::from(*last),
            _ => 0,
        };
        (end ^ name.len() << 2) % PRINTS
    }

    fn find(&self, name: &[u8]) -> Option<&'static str> {
        if self.prints[Self::print(name)] {
            self.names.get(name).copied()
        } else {
            None
        }
    }
}

/// A BTF file, in the byte order of this machine.
pub(super) struct Raw<'a> {
    types: &'a [u8],
    strings: &'a [u8],
}

impl<'a> Raw<'a> {
    /// `None` for what is no BTF.
    pub(super) fn new(bytes: &'a [u8]) -> Option<Self> {
        let section = |offset_at: usize, length_at: usize| {
            let start = number(bytes, 4)?.checked_add(number(bytes, offset_at)?)? as usize;
            bytes.get(start..start.checked_add(number(bytes, length_at)? as usize)?)
        };
        bytes.get(..HEADER)?;
        Some(Self {
            types: section(8, 12)?,
            strings: section(16, 20)?,
        })
    }

    /// The section of names, which split BTF continues.
    pub(super) fn strings(&self) -> &'a [u8] {
        self.strings
    }

    /// Finds the wanted names. `first` is the id of the first type, `base` are the names that these continue.
    /// `None` for a kind of type that is not known.
    pub(super) fn find(
        &self,
        wanted: &HashSet<&'static str>,
        first: u32,
        base: &[u8],
    ) -> Option<(Ids, Enumerators)> {
        let wanted = Sought::new(wanted);
        let name = |offset: u32| {
            let offset = offset as usize;
            let text = match offset.checked_sub(base.len()) {
                None => base.get(offset..)?,
                Some(own) => self.strings.get(own..)?,
            };
            wanted.find(text.get(..memchr(0, text)?)?)
        };
        let (mut ids, mut enumerators) = (Ids::new(), Enumerators::new());
        let (mut at, mut id) = (0, first);
        while at < self.types.len() {
            let info = number(self.types, at + 4)?;
            let count = (info & 0xffff) as usize;
            let parts = at + TYPE;
            let size = match info >> 24 & 0x1f {
                // Pointer, forward declaration, volatile, const, restrict, float, type tag.
                2 | 7 | 9 | 10 | 11 | 16 | 18 => 0,
                // Integer, variable, declaration tag: no names that anybody wants.
                1 | 14 | 17 => 4,
                // Array.
                3 => 12,
                // Parameters of a function.
                13 => 8 * count,
                // Variables of a section.
                15 => 12 * count,
                // What has a name: struct, union, enum, typedef, function, enum of 64 bits.
                kind @ (4 | 5 | 6 | 8 | 12 | 19) => {
                    if let Some(name) = name(number(self.types, at)?) {
                        ids.entry(name).or_default().push(id);
                    }
                    match kind {
                        4 | 5 => 12 * count,
                        6 | 19 => {
                            let each = if kind == 6 { 8 } else { 12 };
                            let signed = info >> 31 != 0;
                            for part in (parts..parts + each * count).step_by(each) {
                                if let Some(name) = name(number(self.types, part)?) {
                                    let low = number(self.types, part + 4)?;
                                    let value = match (kind, signed) {
                                        (6, true) => i128::from(low as i32),
                                        (6, false) => i128::from(low),
                                        _ => i128::from(
                                            u64::from(number(self.types, part + 8)?) << 32 | u64::from(low),
                                        ),
                                    };
                                    enumerators.entry(name).or_default().push((id, value));
                                }
                            }
                            each * count
                        }
                        _ => 0,
                    }
                }
                _ => return None,
            };
            at = parts + size;
            id += 1;
        }
        Some((ids, enumerators))
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}
