//! The kernel's own description of its types (BTF): vmlinux and the split BTF of
//! modules.

use std::{
    collections::BTreeMap,
    collections::{BTreeSet, HashSet},
    fs,
    io::{self, Write as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use btf_rs::{Backend, Btf, BtfType, Func, Member, Type};
use droptrace_common::{IpvsLayout, Layout, LayoutEntry, Resolve};
use memmap2::Mmap;
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::scan::{Enumerators, Ids, Raw};

/// Why BTF could not be read.
#[derive(Debug, thiserror::Error)]
pub enum BtfError {
    /// There is none.
    #[error("{path} does not exist")]
    Absent {
        /// The file.
        path: PathBuf,
    },
    /// It is there and cannot be read.
    #[error("cannot read {path}: {error}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// It was read and makes no sense.
    #[error("{path} is no BTF that droptrace understands: {error}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: btf_rs::Error,
    },
}

/// The types of the kernel, or of one of its modules, as far as somebody asks for them.
pub struct Types {
    btf: Btf,
    /// The file of the kernel proper, whose names those of a module continue.
    kernel: Option<Mmap>,
    ids: Ids,
    enumerators: Enumerators,
}

/// What BTF describes that a program can be attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachable {
    /// A function.
    Function(&'static str),
    /// A tracepoint, by the name of the type that stands for it.
    Tracepoint(&'static str),
}

/// Names that [`Types`] indexes; a kernel has some 100,000 types, of which a plan needs a hundred.
#[derive(Clone, Debug, Default)]
pub struct Wanted(HashSet<&'static str>);

impl Wanted {
    /// All that the two layout tables name.
    pub fn by_layouts() -> Self {
        let mut names = HashSet::new();
        for entry in Layout::ENTRIES.iter().chain(IpvsLayout::ENTRIES) {
            for resolve in entry.resolve {
                match *resolve {
                    Resolve::Member(name, _)
                    | Resolve::Bit(name, _)
                    | Resolve::Size(name)
                    | Resolve::Parameter(name, _)
                    | Resolve::ParameterCount(name) => names.extend([name]),
                    Resolve::Enumerator(name, enumerator) => names.extend([name, enumerator]),
                    Resolve::TracepointArguments(_) => {}
                }
            }
        }
        // An enumerator of any enum has no enum name.
        names.remove("");
        names.insert(KFREE_SKB_TYPEDEF);
        Self(names)
    }

    /// These as well.
    #[must_use]
    pub fn and(mut self, names: impl IntoIterator<Item = &'static str>) -> Self {
        self.0.extend(names);
        self
    }
}

/// Every tracepoint NAME has a typedef `btf_trace_NAME` of its prototype
/// (`include/trace/bpf_probe.h` `__DEFINE_EVENT`, 5.10 - 7.3).
const KFREE_SKB_TYPEDEF: &str = "btf_trace_kfree_skb";

/// Bytes of a pointer: droptrace runs on 64-bit kernels only.
const POINTER: usize = 8;

/// A member of a struct, found by its path.
struct Found {
    bit_offset: u32,
    bitfield: bool,
    type_id: u32,
}

impl Types {
    /// Reads the BTF of the kernel proper.
    pub fn read(path: &Path, wanted: &Wanted) -> Result<Self, BtfError> {
        let (file, bytes) = mapped(path)?;
        // Parsing all types costs 70 ms and more; mapped, only what is asked for is parsed.
        let btf = Btf::from_file_with_backend(format!("/proc/self/fd/{}", file.as_raw_fd()), Backend::Mmap)
            .map_err(|error| malformed(path, error))?;
        let types = Self::index(btf, &bytes, &[], wanted, path)?;
        Ok(Self {
            kernel: Some(bytes),
            ..types
        })
    }

    /// Reads the split BTF of a module, which continues this one.
    pub fn read_module(&self, path: &Path, wanted: &Wanted) -> Result<Self, BtfError> {
        let bytes = read(path)?;
        let btf = Btf::from_split_bytes(&bytes, &self.btf).map_err(|error| malformed(path, error))?;
        let kernel = self.kernel.as_deref().and_then(Raw::new);
        let names = kernel.map_or(&[][..], |kernel| kernel.strings());
        Self::index(btf, &bytes, names, wanted, path)
    }

    fn index(
        btf: Btf,
        bytes: &[u8],
        base_strings: &[u8],
        wanted: &Wanted,
        path: &Path,
    ) -> Result<Self, BtfError> {
        let first = btf.split().map_or(1, |split| split.type_id_range().0);
        let found = Raw::new(bytes).and_then(|raw| raw.find(&wanted.0, first, base_strings));
        let Some((ids, enumerators)) = found else {
            let error = btf_rs::Error::Format("a type of unknown kind".to_owned());
            return Err(malformed(path, error));
        };
        Ok(Self {
            btf,
            kernel: None,
            ids,
            enumerators,
        })
    }

    /// Whether there is a function of this (wanted) name. BTF knows functions of which no symbol is left: ask
    /// [`super::Symbols`], too.
    pub fn has_function(&self, name: &str) -> bool {
        self.functions(name).next().is_some()
    }

    /// What programs can be attached to: those of these (wanted) names that are functions, and the tracepoint of frees, by
    /// their ids.
    pub fn attachable(&self, functions: impl Iterator<Item = &'static str>) -> BTreeMap<u32, Attachable> {
        let kind = |id: u32, name| match self.btf.resolve_type_by_id(id) {
            Ok(Type::Func(_)) => Some(Attachable::Function(name)),
            Ok(Type::Typedef(_)) => Some(Attachable::Tracepoint(name)),
            _ => None,
        };
        functions
            .chain([KFREE_SKB_TYPEDEF])
            .flat_map(|name| self.ids_of(name).iter().map(move |id| (*id, name)))
            .filter_map(|(id, name)| Some((id, kind(id, name)?)))
            .collect()
    }

    /// Names and values of an enum of this (wanted) name, in the kernel's order.
    pub fn enumeration(&self, name: &str) -> Option<Vec<(String, u64)>> {
        let read = |id: u32| -> btf_rs::Result<Option<Vec<(String, u64)>>> {
            Ok(match self.btf.resolve_type_by_id(id)? {
                Type::Enum(each) => Some(
                    each.members
                        .iter()
                        .map(|member| Ok((self.btf.resolve_name(member)?, u64::from(member.val()))))
                        .collect::<btf_rs::Result<_>>()?,
                ),
                Type::Enum64(each) => Some(
                    each.members
                        .iter()
                        .map(|member| Ok((self.btf.resolve_name(member)?, member.val())))
                        .collect::<btf_rs::Result<_>>()?,
                ),
                _ => None,
            })
        };
        self.ids_of(name).iter().find_map(|id| read(*id).ok().flatten())
    }

    /// Resolves a layout entry: its first alternative that this kernel has.
    ///
    /// # Errors
    /// Why there is no value, in words.
    pub fn resolve(&self, entry: &LayoutEntry) -> Result<u32, String> {
        let mut reasons = Vec::new();
        for resolve in entry.resolve {
            match self.resolve_one(resolve) {
                Ok(value) => return Ok(value),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(reasons.join(", "))
    }

    fn resolve_one(&self, resolve: &Resolve) -> Result<u32, String> {
        match *resolve {
            Resolve::Member(name, path) => unique(&format!("{name}.{path}"), self.structs(name), |id| {
                self.member(id, path)
            }),
            Resolve::Bit(name, path) => unique(&format!("{name}.{path}"), self.structs(name), |id| {
                self.walk(id, path).map(|found| found.bit_offset)
            }),
            Resolve::Size(name) => unique(&format!("struct {name}"), self.structs(name), |id| {
                self.size(id).and_then(|size| u32::try_from(size).ok())
            }),
            Resolve::Enumerator(name, enumerator) => {
                let named = self.ids_of(name);
                let values = self
                    .enumerators
                    .get(enumerator)
                    .into_iter()
                    .flatten()
                    .filter(|(id, _)| name.is_empty() || named.contains(id))
                    .map(|(_, value)| *value);
                unique(enumerator, values, |value| u32::try_from(value).ok())
            }
            Resolve::Parameter(name, parameter) => unique(
                &format!("{name}({parameter})"),
                self.functions(name),
                |function| {
                    self.parameters(&function)?
                        .iter()
                        .position(|each| each == parameter)
                        .map(|index| index as u32)
                },
            ),
            Resolve::ParameterCount(name) => unique(&format!("{name}()"), self.functions(name), |function| {
                Some(self.parameters(&function)?.len() as u32)
            }),
            Resolve::TracepointArguments(name) => {
                let typedef = format!("btf_trace_{name}");
                unique(&typedef, self.ids_of(&typedef).iter().copied(), |id| {
                    self.tracepoint_arguments(id)
                })
            }
        }
    }

    fn ids_of(&self, name: &str) -> &[u32] {
        self.ids.get(name).map_or(&[], Vec::as_slice)
    }

    fn structs(&self, name: &str) -> impl Iterator<Item = u32> + '_ {
        self.ids_of(name).iter().copied().filter(|id| {
            matches!(
                self.btf.resolve_type_by_id(*id),
                Ok(Type::Struct(_) | Type::Union(_))
            )
        })
    }

    fn functions(&self, name: &str) -> impl Iterator<Item = Func> + '_ {
        self.ids_of(name)
            .iter()
            .filter_map(|id| match self.btf.resolve_type_by_id(*id) {
                Ok(Type::Func(function)) => Some(function),
                _ => None,
            })
    }

    fn parameters(&self, function: &Func) -> Option<Vec<String>> {
        match self.btf.resolve_chained_type(function).ok()? {
            Type::FuncProto(prototype) => prototype
                .parameters
                .iter()
                .map(|parameter| self.btf.resolve_name(parameter).ok())
                .collect(),
            _ => None,
        }
    }

    /// typedef → pointer → prototype, whose first parameter is the tracepoint's own context.
    fn tracepoint_arguments(&self, typedef: u32) -> Option<u32> {
        let Type::Ptr(pointer) = self.bare(typedef)?.1 else {
            return None;
        };
        match self.btf.resolve_chained_type(&pointer).ok()? {
            Type::FuncProto(prototype) => u32::try_from(prototype.parameters.len().checked_sub(1)?).ok(),
            _ => None,
        }
    }

    /// Offset in bytes, and the size of the last member above it.
    fn member(&self, id: u32, path: &str) -> Option<u32> {
        let found = self.walk(id, path)?;
        if found.bitfield || found.bit_offset % 8 != 0 {
            return None;
        }
        let offset = u16::try_from(found.bit_offset / 8).ok()?;
        let size = u16::try_from(self.size(found.type_id)?).unwrap_or(u16::MAX);
        Some(u32::from(offset) | u32::from(size) << 16)
    }

    /// Follows a dotted path of member names.
    fn walk(&self, id: u32, path: &str) -> Option<Found> {
        let mut found = Found {
            bit_offset: 0,
            bitfield: false,
            type_id: id,
        };
        for name in path.split('.') {
            let inner = self.find(found.type_id, name)?;
            found = Found {
                bit_offset: found.bit_offset + inner.bit_offset,
                ..inner
            };
        }
        Some(found)
    }

    /// A member of this name, directly or in an anonymous struct or union.
    fn find(&self, id: u32, name: &str) -> Option<Found> {
        let (Type::Struct(each) | Type::Union(each)) = self.bare(id)?.1 else {
            return None;
        };
        let found = |member: &Member| {
            Some(Found {
                bit_offset: member.bit_offset(),
                bitfield: member.bitfield_size().is_some_and(|bits| bits != 0),
                type_id: member.get_type_id()?,
            })
        };
        for member in &each.members {
            let member_name = self.btf.resolve_name(member).ok()?;
            if member_name == name {
                return found(member);
            }
            if member_name.is_empty()
                && let Some(inner) = member.get_type_id().and_then(|id| self.find(id, name))
            {
                return Some(Found {
                    bit_offset: member.bit_offset() + inner.bit_offset,
                    ..inner
                });
            }
        }
        None
    }

    /// The type behind typedefs and qualifiers.
    fn bare(&self, id: u32) -> Option<(u32, Type)> {
        let mut id = id;
        // Bounded: no kernel type has that many.
        for _ in 0..32 {
            let each = self.btf.resolve_type_by_id(id).ok()?;
            id = match &each {
                Type::Typedef(each) => each.get_type_id()?,
                Type::Const(each) | Type::Volatile(each) | Type::Restrict(each) => each.get_type_id()?,
                Type::TypeTag(each) => each.get_type_id()?,
                _ => return Some((id, each)),
            };
        }
        None
    }

    /// Bytes that a type takes.
    fn size(&self, id: u32) -> Option<usize> {
        Some(match self.bare(id)?.1 {
            Type::Int(each) => each.size(),
            Type::Ptr(_) => POINTER,
            Type::Struct(each) | Type::Union(each) => each.size(),
            Type::Enum(each) => each.size(),
            Type::Enum64(each) => each.size(),
            Type::Float(each) => each.size(),
            Type::Array(each) => each.len().checked_mul(self.size(each.get_type_id()?)?)?,
            _ => return None,
        })
    }
}

/// The one value that all candidates have; two types of one name that differ give none.
fn unique<T>(
    what: &str,
    candidates: impl Iterator<Item = T>,
    value: impl Fn(T) -> Option<u32>,
) -> Result<u32, String> {
    let values: BTreeSet<u32> = candidates.filter_map(value).collect();
    let mut values = values.into_iter();
    match (values.next(), values.next()) {
        (Some(value), None) => Ok(value),
        (Some(_), Some(_)) => Err(format!(
            "this kernel's BTF has {what} twice, with different values"
        )),
        _ => Err(format!("this kernel's BTF has no {what}")),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, BtfError> {
    fs::read(path).map_err(|error| absent_or_unreadable(path, error))
}

/// The file in memory: itself where the kernel lets it be mapped (6.15 and later do), else a copy.
fn mapped(path: &Path) -> Result<(fs::File, Mmap), BtfError> {
    // SAFETY: nobody changes the kernel's description of its types, nor a copy that only this process knows.
    let map = |file: fs::File| unsafe { Mmap::map(&file) }.map(|bytes| (file, bytes));
    let file = fs::File::open(path).map_err(|error| absent_or_unreadable(path, error))?;
    map(file).or_else(|_| {
        let bytes = read(path)?;
        in_memory(&bytes)
            .and_then(map)
            .map_err(|error| unreadable(path, error))
    })
}

fn absent_or_unreadable(path: &Path, error: io::Error) -> BtfError {
    match error.kind() {
        io::ErrorKind::NotFound => BtfError::Absent {
            path: path.to_owned(),
        },
        _ => unreadable(path, error),
    }
}

fn unreadable(path: &Path, error: io::Error) -> BtfError {
    BtfError::Unreadable {
        path: path.to_owned(),
        error,
    }
}

fn malformed(path: &Path, error: btf_rs::Error) -> BtfError {
    BtfError::Malformed {
        path: path.to_owned(),
        error,
    }
}

/// A file without a name that holds these bytes.
fn in_memory(bytes: &[u8]) -> io::Result<fs::File> {
    let mut file = fs::File::from(memfd_create(c"btf", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::{super::blob::Blob, *};

    fn wanted() -> Wanted {
        Wanted(HashSet::from([
            "outer",
            "twice",
            "function",
            "colours",
            "A",
            "B",
            "C",
            "in_module",
            "of_module",
            KFREE_SKB_TYPEDEF,
        ]))
    }

    fn written(blob: &Blob) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&blob.bytes()).unwrap();
        file
    }

    fn types(blob: &Blob) -> Types {
        Types::read(written(blob).path(), &wanted()).unwrap()
    }

    fn resolve(types: &Types, resolve: Resolve) -> Result<u32, String> {
        types.resolve_one(&resolve)
    }

    #[test]
    fn members_are_found_through_anonymous_unions_typedefs_and_arrays() {
        let mut blob = Blob::new();
        let byte = blob.int("u8", 1);
        let word = blob.int("u16", 2);
        let number = blob.typedef("number", word);
        let number = blob.constant(number);
        let bytes = blob.array(byte, 5);
        let pointer = blob.pointer(0);
        let inner = blob.structure(
            "inner",
            8,
            &[("x", byte, 0, 0), ("y", number, 16, 0), ("many", bytes, 24, 0)],
        );
        let anonymous = blob.union("", 8, &[("plain", pointer, 0, 0), ("in", inner, 0, 0)]);
        let large = blob.array(pointer, 20_000);
        blob.structure(
            "outer",
            24,
            &[
                ("first", word, 0, 0),
                ("", anonymous, 64, 0),
                ("flag", byte, 131, 1),
                ("wide", byte, 132, 3),
                ("large", large, 192, 0),
            ],
        );
        let types = types(&blob);
        let member = |path| resolve(&types, Resolve::Member("outer", path));
        assert_eq!(member("first"), Ok(2 << 16));
        assert_eq!(member("plain"), Ok(8 << 16 | 8));
        assert_eq!(member("in"), Ok(8 << 16 | 8));
        assert_eq!(member("in.y"), Ok((2 << 16) + 10));
        assert_eq!(member("in.many"), Ok((5 << 16) + 11));
        assert_eq!(member("large"), Ok((0xffff << 16) + 24));
        assert_eq!(
            member("in.z"),
            Err("this kernel's BTF has no outer.in.z".to_owned())
        );
        assert!(member("flag").is_err(), "a bit field has no byte of its own");
        assert_eq!(resolve(&types, Resolve::Bit("outer", "flag")), Ok(131));
        assert_eq!(resolve(&types, Resolve::Bit("outer", "wide")), Ok(132));
        assert_eq!(resolve(&types, Resolve::Size("outer")), Ok(24));
        assert!(
            resolve(&types, Resolve::Size("inner")).is_err(),
            "nobody wanted it"
        );
    }

    #[test]
    fn types_of_one_name_must_agree() {
        let mut blob = Blob::new();
        let byte = blob.int("u8", 1);
        blob.structure("twice", 8, &[("same", byte, 0, 0), ("other", byte, 8, 0)]);
        blob.structure(
            "twice",
            8,
            &[
                ("same", byte, 0, 0),
                ("other", byte, 16, 0),
                ("more", byte, 24, 0),
            ],
        );
        let types = types(&blob);
        let member = |path| resolve(&types, Resolve::Member("twice", path));
        assert_eq!(member("same"), Ok(1 << 16));
        assert_eq!(member("more"), Ok(1 << 16 | 3));
        assert!(
            member("other")
                .unwrap_err()
                .contains("twice, with different values")
        );
    }

    #[test]
    fn enumerators_are_found_in_any_enum_or_in_theirs() {
        let mut blob = Blob::new();
        blob.enumeration("", &[("A", 3), ("unwanted", 4)]);
        blob.enumeration64("", &[("B", 0xffff_0000)]);
        blob.enumeration("colours", &[("C", 5)]);
        blob.enumeration("shapes", &[("C", 6)]);
        let types = types(&blob);
        assert_eq!(resolve(&types, Resolve::Enumerator("", "A")), Ok(3));
        assert_eq!(resolve(&types, Resolve::Enumerator("", "B")), Ok(0xffff_0000));
        assert_eq!(resolve(&types, Resolve::Enumerator("colours", "C")), Ok(5));
        assert!(resolve(&types, Resolve::Enumerator("", "C")).is_err());
        assert!(resolve(&types, Resolve::Enumerator("colours", "A")).is_err());
        assert_eq!(types.enumeration("colours"), Some(vec![("C".to_owned(), 5)]));
        assert_eq!(types.enumeration("shapes"), None);
    }

    #[test]
    fn parameters_are_found_by_name() {
        let mut blob = Blob::new();
        let int = blob.int("int", 4);
        blob.function("function", &[("a", int), ("b", int), ("skb", int)]);
        blob.tracepoint("kfree_skb", 4);
        let types = types(&blob);
        assert_eq!(resolve(&types, Resolve::Parameter("function", "skb")), Ok(2));
        assert_eq!(resolve(&types, Resolve::ParameterCount("function")), Ok(3));
        assert!(resolve(&types, Resolve::Parameter("function", "sk")).is_err());
        assert!(types.has_function("function") && !types.has_function("outer"));
        assert_eq!(resolve(&types, Resolve::TracepointArguments("kfree_skb")), Ok(4));
        let entry = LayoutEntry {
            name: "",
            resolve: &[
                Resolve::Parameter("function", "sk"),
                Resolve::Parameter("function", "b"),
            ],
        };
        assert_eq!(types.resolve(&entry), Ok(1));
    }

    #[test]
    fn a_module_continues_the_kernel() {
        let mut kernel = Blob::new();
        let word = kernel.int("u16", 2);
        kernel.structure("outer", 2, &[("x", word, 0, 0)]);
        let mut module = kernel.split();
        module.structure("of_module", 6, &[("y", word, 32, 0)]);
        module.function("in_module", &[("skb", word)]);
        let base = types(&kernel);
        let module = base.read_module(written(&module).path(), &wanted()).unwrap();
        assert_eq!(
            resolve(&module, Resolve::Member("of_module", "y")),
            Ok(2 << 16 | 4)
        );
        assert_eq!(resolve(&module, Resolve::Parameter("in_module", "skb")), Ok(0));
        assert!(resolve(&base, Resolve::Size("of_module")).is_err());
    }

    #[test]
    fn what_is_no_btf_is_told() {
        let read = |bytes: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(bytes).unwrap();
            Types::read(file.path(), &wanted()).map(|_| ())
        };
        assert!(matches!(read(b""), Err(BtfError::Malformed { .. })));
        assert!(matches!(
            read(b"not btf at all, but long enough"),
            Err(BtfError::Malformed { .. })
        ));
        let mut blob = Blob::new();
        blob.int("u8", 1);
        let bytes = blob.bytes();
        for length in 0..bytes.len() {
            assert!(read(&bytes[..length]).is_err(), "cut at {length}");
        }
        assert!(matches!(
            Types::read(Path::new("/nonexistent/btf"), &wanted()),
            Err(BtfError::Absent { .. })
        ));
    }
}
