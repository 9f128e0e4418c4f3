//! The kernel's symbols: which function an address lies in, where a function
//! or a variable is, and what a function is really called.

use std::{fs, io, path::Path};

/// Variables whose addresses the programs need; no other data symbol is kept.
const VARIABLES: &[&str] = &[PER_CPU_OFFSET];

/// Array of each CPU's offset to per-CPU memory (`mm/percpu.c`, 5.10 - 7.3).
pub const PER_CPU_OFFSET: &str = "__per_cpu_offset";

/// No function is longer, in bytes: an address further behind the last symbol belongs to nothing that we know.
const FUNCTION_MAX: u64 = 128 << 10;

/// Suffixes that compilers put behind a name when they split or specialise a function.
const SUFFIXES: &[&str] = &["constprop", "isra", "part", "cold", "llvm"];

/// A snapshot of `/proc/kallsyms`: functions, and the few variables that droptrace needs.
#[derive(Clone, Debug, Default)]
pub struct Symbols {
    /// Ordered by address.
    functions: Vec<Symbol>,
    variables: Vec<(&'static str, u64)>,
    /// All names, one behind the other.
    names: String,
    modules: Vec<String>,
    hidden: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    address: u64,
    name: u32,
    name_len: u16,
    /// Index into `modules` + 1; 0 for the kernel proper.
    module: u16,
    global: bool,
}

/// A function, as the kernel lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function<'a> {
    /// Its name, with any suffix.
    pub name: &'a str,
    /// Where it starts; 0 when the kernel hides addresses.
    pub address: u64,
    /// The module that it belongs to; `None` for the kernel proper.
    pub module: Option<&'a str>,
}

impl Symbols {
    /// Reads `/proc/kallsyms`, or a file of its form.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(Self::parse(&fs::read(path)?))
    }

    /// Parses the text: lines of address, type, name, and the module in brackets where there is one. Lines of another
    /// form are passed over.
    pub fn parse(text: &[u8]) -> Self {
        let mut symbols = Self::default();
        for line in text.split(|byte| *byte == b'\n') {
            symbols.line(line);
        }
        symbols.functions.sort_by_key(|symbol| symbol.address);
        symbols
    }

    /// Half of the lines are about data: they are told by their kind before anything else is looked at.
    fn line(&mut self, line: &[u8]) -> Option<()> {
        let space = line.iter().position(|byte| *byte == b' ')?;
        let (address, rest) = (&line[..space], &line[space + 1..]);
        let (kind, rest) = (*rest.first()?, rest.get(2..)?);
        let end = rest.iter().position(|byte| *byte == b'\t').unwrap_or(rest.len());
        let (name, module) = (&rest[..end], rest.get(end + 1..));
        if !matches!(kind, b't' | b'T' | b'w' | b'W') {
            let variable = VARIABLES.iter().find(|each| each.as_bytes() == name)?;
            self.variables.push((variable, hexadecimal(address)?));
            return None;
        }
        let name = str::from_utf8(name).ok()?;
        let module = match module {
            Some(module) => Some(str::from_utf8(module).ok()?.trim_matches(['[', ']'])),
            None => None,
        };
        // Programs and trampolines come and go; they free no packets.
        if module.is_some_and(|module| module == "bpf" || module.starts_with("__builtin__"))
            || name.starts_with("__pfx_")
        {
            return None;
        }
        let module = match module {
            None => 0,
            Some(module) => {
                if self.modules.last().is_none_or(|last| last != module) {
                    self.modules.push(module.to_owned());
                }
                u16::try_from(self.modules.len()).ok()?
            }
        };
        self.functions.push(Symbol {
            address: hexadecimal(address)?,
            name: u32::try_from(self.names.len()).ok()?,
            name_len: u16::try_from(name.len()).ok()?,
            module,
            global: kind == b'T',
        });
        self.names.push_str(name);
        Some(())
    }

    /// Treats functions of these names as absent when a hook looks for its target.
    pub fn hide(&mut self, names: &[String]) {
        names.clone_into(&mut self.hidden);
    }

    /// Whether this name was [hidden](Self::hide).
    pub fn is_hidden(&self, name: &str) -> bool {
        self.hidden.iter().any(|each| each == name)
    }

    /// Whether the kernel shows where its symbols are (`kernel.kptr_restrict`).
    pub fn has_addresses(&self) -> bool {
        self.functions.iter().any(|symbol| symbol.address != 0)
    }

    /// Whether this module is loaded.
    pub fn has_module(&self, name: &str) -> bool {
        self.modules.iter().any(|module| module == name)
    }

    /// The function that this address lies in.
    pub fn name(&self, address: u64) -> Option<&str> {
        let after = self.functions.partition_point(|symbol| symbol.address <= address);
        let start = self.functions[..after].last()?.address;
        if start == 0 || address - start > FUNCTION_MAX {
            return None;
        }
        // Several names of one address: the one that other files of the kernel use, else the first.
        let first = self.functions.partition_point(|symbol| symbol.address < start);
        let same = &self.functions[first..after];
        let symbol = same.iter().find(|symbol| symbol.global).or(same.first())?;
        Some(self.text(symbol))
    }

    /// Where the function or variable of exactly this name is; `None` also when several have it or the kernel hides
    /// addresses.
    pub fn address(&self, name: &str) -> Option<u64> {
        let mut addresses = self
            .variables
            .iter()
            .filter(|(each, _)| *each == name)
            .map(|(_, address)| *address)
            .chain(self.functions(name).map(|function| function.address))
            .filter(|address| *address != 0);
        let address = addresses.next()?;
        addresses.next().is_none().then_some(address)
    }

    /// The functions of exactly this name: static ones may share it.
    pub fn functions<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Function<'a>> {
        self.functions
            .iter()
            .filter(move |symbol| usize::from(symbol.name_len) == name.len() && self.text(symbol) == name)
            .map(|symbol| self.function(symbol))
    }

    /// The functions that the compiler made of this one: `NAME.constprop.0`, `NAME.isra.0`, `NAME.part.0`, but not
    /// `NAME.cold`, which is only the unlikely part of it.
    pub fn variants<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Function<'a>> {
        self.functions
            .iter()
            .filter(move |symbol| {
                let text = self.text(symbol);
                text.len() > name.len()
                    && text.starts_with(name)
                    && text.as_bytes()[name.len()] == b'.'
                    && base_name(text) == name
                    && !text[name.len()..].split('.').any(|part| part == "cold")
            })
            .map(|symbol| self.function(symbol))
    }

    fn function(&self, symbol: &Symbol) -> Function<'_> {
        Function {
            name: self.text(symbol),
            address: symbol.address,
            module: usize::from(symbol.module)
                .checked_sub(1)
                .map(|index| self.modules[index].as_str()),
        }
    }

    fn text(&self, symbol: &Symbol) -> &str {
        let start = symbol.name as usize;
        &self.names[start..start + usize::from(symbol.name_len)]
    }
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()
}

/// The name in the source: without what the compiler put behind it.
pub fn base_name(name: &str) -> &str {
    match name.split_once('.') {
        Some((base, suffix))
            if suffix
                .split('.')
                .all(|part| SUFFIXES.contains(&part) || part.bytes().all(|byte| byte.is_ascii_digit())) =>
        {
            base
        }
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"\
ffffffff81000000 T _stext
ffffffff81000100 t tcp_conn_request
ffffffff810000f0 t __pfx_tcp_conn_request
ffffffff81000200 t ip_rcv_finish_core.constprop.0
ffffffff81000280 t ip_rcv_finish_core.constprop.0.cold
ffffffff81000300 t local_alias
ffffffff81000300 T global_alias
ffffffff81000300 T second_alias
ffffffff81000400 t twice
ffffffff81000500 t twice
ffffffff82000000 D __per_cpu_offset
ffffffff82000008 D jiffies
ffffffffc0000010 t early_drop\t[nf_conntrack]
ffffffffc0000100 d nf_conntrack_max\t[nf_conntrack]
ffffffffc0000200 t ip_vs_in.part.0\t[ip_vs]
ffffffffc0100000 t bpf_prog_1234\t[bpf]
nonsense
";

    #[test]
    fn an_address_names_its_function() {
        let symbols = Symbols::parse(TEXT);
        assert_eq!(symbols.name(0xffff_ffff_8100_0000), Some("_stext"));
        assert_eq!(symbols.name(0xffff_ffff_8100_01ff), Some("tcp_conn_request"));
        assert_eq!(symbols.name(0xffff_ffff_8100_00f8), Some("_stext"));
        assert_eq!(symbols.name(0xffff_ffff_8100_0300), Some("global_alias"));
        assert_eq!(symbols.name(0xffff_ffff_c000_0020), Some("early_drop"));
        assert_eq!(symbols.name(0), None);
        assert_eq!(symbols.name(0xffff_ffff_80ff_ffff), None);
        assert_eq!(symbols.name(0xffff_ffff_c000_0200 + FUNCTION_MAX + 1), None);
    }

    #[test]
    fn a_name_has_one_address_or_none() {
        let symbols = Symbols::parse(TEXT);
        assert_eq!(symbols.address("tcp_conn_request"), Some(0xffff_ffff_8100_0100));
        assert_eq!(symbols.address(PER_CPU_OFFSET), Some(0xffff_ffff_8200_0000));
        assert_eq!(symbols.address("twice"), None);
        assert_eq!(symbols.address("jiffies"), None);
        assert_eq!(symbols.address("bpf_prog_1234"), None);
    }

    #[test]
    fn variants_leave_out_the_cold_part() {
        let symbols = Symbols::parse(TEXT);
        let names = |name| {
            symbols
                .variants(name)
                .map(|function| (function.name.to_owned(), function.module.map(str::to_owned)))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            names("ip_rcv_finish_core"),
            [("ip_rcv_finish_core.constprop.0".to_owned(), None)]
        );
        assert_eq!(
            names("ip_vs_in"),
            [("ip_vs_in.part.0".to_owned(), Some("ip_vs".to_owned()))]
        );
        assert_eq!(names("tcp_conn_request"), []);
    }

    #[test]
    fn base_names_lose_only_what_compilers_add() {
        for (name, base) in [
            ("tcp_v4_rcv", "tcp_v4_rcv"),
            ("ip_rcv_finish_core.isra.0", "ip_rcv_finish_core"),
            ("a.constprop.0.isra.12.cold", "a"),
            ("a.llvm.123", "a"),
            ("a.other.1", "a.other.1"),
        ] {
            assert_eq!(base_name(name), base);
        }
    }

    #[test]
    fn hidden_addresses_are_told() {
        let symbols =
            Symbols::parse(b"0000000000000000 T tcp_conn_request\n0000000000000000 D __per_cpu_offset\n");
        assert!(!symbols.has_addresses());
        assert!(Symbols::parse(TEXT).has_addresses());
        assert_eq!(symbols.functions("tcp_conn_request").count(), 1);
        assert_eq!(symbols.address(PER_CPU_OFFSET), None);
        assert_eq!(symbols.name(0xffff_ffff_8100_0000), None);
    }
}
