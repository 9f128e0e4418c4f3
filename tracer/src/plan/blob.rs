//! BTF written by hand (`Documentation/bpf/btf.rst`), for tests: a kernel's own takes megabytes.

/// A member, parameter or enumerator: name, type or value, offset in bits, bits of a bit field.
pub(super) type Part<'a> = (&'a str, u32, u32, u32);

const HEADER: u32 = 24;
const INT: u32 = 1;
const POINTER: u32 = 2;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const TYPEDEF: u32 = 8;
const CONST: u32 = 10;
const FUNC: u32 = 12;
const FUNC_PROTO: u32 = 13;
const ENUM64: u32 = 19;

/// BTF in the making. Every method adds a type and gives its id.
pub(super) struct Blob {
    strings: Vec<u8>,
    strings_before: u32,
    types: Vec<u8>,
    last: u32,
}

impl Blob {
    pub(super) fn new() -> Self {
        Self {
            strings: vec![0],
            strings_before: 0,
            types: Vec::new(),
            last: 0,
        }
    }

    /// Split BTF that continues this one.
    pub(super) fn split(&self) -> Self {
        Self {
            strings: vec![0],
            strings_before: self.strings_before + self.strings.len() as u32,
            types: Vec::new(),
            last: self.last,
        }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
        let mut bytes = vec![0x9f, 0xeb, 1, 0];
        for number in [HEADER, 0, types, types, strings] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(&self.types);
        bytes.extend(&self.strings);
        bytes
    }

    fn string(&mut self, text: &str) -> u32 {
        if text.is_empty() {
            return 0;
        }
        let offset = self.strings_before + self.strings.len() as u32;
        self.strings.extend(text.as_bytes());
        self.strings.push(0);
        offset
    }

    fn add(&mut self, name: &str, kind: u32, count: u32, flag: bool, size_or_type: u32, rest: &[u32]) -> u32 {
        let name = self.string(name);
        let info = count | kind << 24 | u32::from(flag) << 31;
        for number in [name, info, size_or_type].iter().chain(rest) {
            self.types.extend(number.to_le_bytes());
        }
        self.last += 1;
        self.last
    }

    pub(super) fn int(&mut self, name: &str, size: u32) -> u32 {
        self.add(name, INT, 0, false, size, &[size * 8])
    }

    pub(super) fn pointer(&mut self, to: u32) -> u32 {
        self.add("", POINTER, 0, false, to, &[])
    }

    pub(super) fn constant(&mut self, of: u32) -> u32 {
        self.add("", CONST, 0, false, of, &[])
    }

    pub(super) fn typedef(&mut self, name: &str, of: u32) -> u32 {
        self.add(name, TYPEDEF, 0, false, of, &[])
    }

    pub(super) fn array(&mut self, of: u32, length: u32) -> u32 {
        self.add("", ARRAY, 0, false, 0, &[of, of, length])
    }

    pub(super) fn structure(&mut self, name: &str, size: u32, members: &[Part<'_>]) -> u32 {
        self.composite(name, STRUCT, size, members)
    }

    pub(super) fn union(&mut self, name: &str, size: u32, members: &[Part<'_>]) -> u32 {
        self.composite(name, UNION, size, members)
    }

    fn composite(&mut self, name: &str, kind: u32, size: u32, members: &[Part<'_>]) -> u32 {
        let rest: Vec<u32> = members
            .iter()
            .flat_map(|(name, of, offset, bits)| [self.string(name), *of, offset | bits << 24])
            .collect();
        self.add(name, kind, members.len() as u32, true, size, &rest)
    }

    pub(super) fn enumeration(&mut self, name: &str, values: &[(&str, u32)]) -> u32 {
        let rest: Vec<u32> = values
            .iter()
            .flat_map(|(name, value)| [self.string(name), *value])
            .collect();
        self.add(name, ENUM, values.len() as u32, false, 4, &rest)
    }

    pub(super) fn enumeration64(&mut self, name: &str, values: &[(&str, u64)]) -> u32 {
        let rest: Vec<u32> = values
            .iter()
            .flat_map(|(name, value)| [self.string(name), *value as u32, (*value >> 32) as u32])
            .collect();
        self.add(name, ENUM64, values.len() as u32, false, 8, &rest)
    }

    pub(super) fn prototype(&mut self, parameters: &[(&str, u32)]) -> u32 {
        let rest: Vec<u32> = parameters
            .iter()
            .flat_map(|(name, of)| [self.string(name), *of])
            .collect();
        self.add("", FUNC_PROTO, parameters.len() as u32, false, 0, &rest)
    }

    pub(super) fn function(&mut self, name: &str, parameters: &[(&str, u32)]) -> u32 {
        let prototype = self.prototype(parameters);
        self.add(name, FUNC, 0, false, prototype, &[])
    }

    /// The typedef of a tracepoint with so many arguments.
    pub(super) fn tracepoint(&mut self, name: &str, arguments: usize) -> u32 {
        let int = self.int("long", 8);
        let prototype = self.prototype(&vec![("", int); arguments + 1]);
        let pointer = self.pointer(prototype);
        self.typedef(&format!("btf_trace_{name}"), pointer)
    }
}
