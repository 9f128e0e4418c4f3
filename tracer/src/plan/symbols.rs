//! The kernel's functions: which one an address lies in, and what one is
//! really called.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read},
    ops::Range,
    path::Path,
};

use memchr::{memchr, memrchr};

/// No function is longer, in bytes: an address further behind the last symbol belongs to nothing that we know.
const FUNCTION_MAX: u64 = 128 << 10;

/// Bytes of the kernel's listing that are held at once.
const LISTED_AT_ONCE: usize = 64 << 10;

/// Suffixes that compilers put behind a name when they split or specialise a function.
const SUFFIXES: &[&str] = &["constprop", "isra", "part", "cold", "llvm"];

/// A snapshot of the functions in `/proc/kallsyms`.
#[derive(Clone, Debug, Default)]
pub struct Symbols {
    /// Ordered by address.
    functions: Vec<Symbol>,
    /// All names, one behind the other.
    names: String,
    modules: Vec<Module>,
    /// Where each module lay when this was read.
    places: HashMap<String, Range<u64>>,
}

/// A module that has functions, and where its code may lie.
#[derive(Clone, Debug)]
struct Module {
    name: String,
    addresses: Range<u64>,
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
    /// Reads `kallsyms` and `modules` in `/proc`, or in a folder like it.
    ///
    /// # Errors
    /// `kallsyms` cannot be read.
    pub fn read(proc: &Path) -> io::Result<Self> {
        // A kernel without modules has no such file.
        let modules = fs::read_to_string(proc.join("modules")).unwrap_or_default();
        let mut listing = File::open(proc.join("kallsyms"))?;
        let modules = module_addresses(&modules);
        let mut symbols = Self::default();
        // The whole listing is 10 MB and more, of which little is kept.
        let (mut text, mut filled) = (vec![0; LISTED_AT_ONCE], 0);
        loop {
            let read = listing.read(&mut text[filled..])?;
            filled += read;
            if read == 0 || filled == text.len() {
                // A line without an end is the last one, or longer than any symbol.
                let whole = match memrchr(b'\n', &text[..filled]) {
                    Some(end) if read > 0 => end + 1,
                    _ => filled,
                };
                symbols.lines(&text[..whole], &modules);
                text.copy_within(whole..filled, 0);
                filled -= whole;
            }
            if read == 0 {
                return Ok(symbols.ready(modules));
            }
        }
    }

    /// Parses the text: lines of address, type, name, and the module in brackets where there is one. Lines of another
    /// form are passed over. `modules` is the text of `/proc/modules`.
    pub fn parse(text: &[u8], modules: &str) -> Self {
        let mut symbols = Self::default();
        let modules = module_addresses(modules);
        symbols.lines(text, &modules);
        symbols.ready(modules)
    }

    fn lines(&mut self, mut text: &[u8], modules: &HashMap<&str, Range<u64>>) {
        while !text.is_empty() {
            let end = memchr(b'\n', text).unwrap_or(text.len());
            self.line(&text[..end], modules);
            text = text.get(end + 1..).unwrap_or_default();
        }
    }

    /// All lines were taken.
    fn ready(mut self, modules: HashMap<&str, Range<u64>>) -> Self {
        self.places = modules
            .into_iter()
            .map(|(name, place)| (name.to_owned(), place))
            .collect();
        self.functions.sort_by_key(|symbol| symbol.address);
        self.functions.shrink_to_fit();
        self.names.shrink_to_fit();
        self
    }

    /// Half of the lines are about data: they are told by their kind before anything else is looked at.
    fn line(&mut self, line: &[u8], modules: &HashMap<&str, Range<u64>>) -> Option<()> {
        let space = memchr(b' ', line)?;
        let (address, rest) = (&line[..space], &line[space + 1..]);
        let kind = *rest.first()?;
        if !matches!(kind, b't' | b'T' | b'w' | b'W') {
            return None;
        }
        let rest = rest.get(2..)?;
        let end = memchr(b'\t', rest).unwrap_or(rest.len());
        let (name, module) = (&rest[..end], rest.get(end + 1..));
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
                if self.modules.last().is_none_or(|last| last.name != module) {
                    self.modules.push(Module {
                        name: module.to_owned(),
                        addresses: modules.get(module).cloned().unwrap_or_default(),
                    });
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

    /// Whether the kernel shows where its symbols are (`kernel.kptr_restrict`).
    pub fn has_addresses(&self) -> bool {
        self.functions.iter().any(|symbol| symbol.address != 0)
    }

    /// Whether this module is loaded.
    pub fn has_module(&self, name: &str) -> bool {
        self.modules.iter().any(|module| module.name == name)
    }

    /// Whether `modules`, the text of `/proc/modules`, tells of the modules that this tells of: code of another one may lie
    /// where the code of none of them is, which only their sizes in all say something about.
    pub fn are_of(&self, modules: &str) -> bool {
        let now = module_addresses(modules);
        now.len() == self.places.len()
            && now.iter().all(|(name, place)| {
                self.places
                    .get(*name)
                    .is_some_and(|then| then.start == place.start)
            })
    }

    /// Whether the address lies in the kernel proper.
    pub fn is_of_kernel(&self, address: u64) -> bool {
        self.at(address).is_some_and(|symbol| symbol.module == 0)
    }

    /// The function that this address lies in.
    pub fn name(&self, address: u64) -> Option<&str> {
        let symbol = self.at(address)?;
        // Behind a module's code may lie a module that came later, and in place of the code that it ran only once.
        if self
            .module(symbol)
            .is_some_and(|module| !module.addresses.contains(&address))
        {
            return None;
        }
        Some(self.text(symbol))
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

    /// The symbol that an address lies behind. Several names of one address: the one that other files of the kernel use,
    /// else the first.
    fn at(&self, address: u64) -> Option<&Symbol> {
        let after = self.functions.partition_point(|symbol| symbol.address <= address);
        let start = self.functions[..after].last()?.address;
        if start == 0 || address - start > FUNCTION_MAX {
            return None;
        }
        let first = self.functions.partition_point(|symbol| symbol.address < start);
        let same = &self.functions[first..after];
        same.iter().find(|symbol| symbol.global).or(same.first())
    }

    fn function(&self, symbol: &Symbol) -> Function<'_> {
        Function {
            name: self.text(symbol),
            address: symbol.address,
            module: self.module(symbol).map(|module| module.name.as_str()),
        }
    }

    fn module(&self, symbol: &Symbol) -> Option<&Module> {
        let index = usize::from(symbol.module).checked_sub(1)?;
        self.modules.get(index)
    }

    fn text(&self, symbol: &Symbol) -> &str {
        let start = symbol.name as usize;
        &self.names[start..start + usize::from(symbol.name_len)]
    }
}

/// Where each module lies: lines of name, size, users, needed by, state, address (`kernel/module/procfs.c` `m_show`,
/// 5.10 - 7.3). The size includes other parts of the module, which newer kernels put elsewhere.
pub(super) fn module_addresses(text: &str) -> HashMap<&str, Range<u64>> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let name = words.next()?;
            let size: u64 = words.next()?.parse().ok()?;
            let start = hexadecimal(words.nth(3)?.strip_prefix("0x")?.as_bytes())?;
            Some((name, start..start.checked_add(size)?))
        })
        .collect()
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    digits.iter().try_fold(0, |number: u64, digit| {
        Some(number << 4 | u64::from(char::from(*digit).to_digit(16)?))
    })
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
ffffffff82000008 D jiffies
ffffffffbf000000 t once_only\t[nf_conntrack]
ffffffffc0000010 t early_drop\t[nf_conntrack]
ffffffffc0000100 d nf_conntrack_max\t[nf_conntrack]
ffffffffc0000200 t ip_vs_in.part.0\t[ip_vs]
ffffffffc0100000 t bpf_prog_1234\t[bpf]
nonsense
";

    const MODULES: &str = "\
ip_vs 4096 1 - Live 0xffffffffc0000200 (E)
nf_conntrack 256 2 ip_vs,nf_nat, Live 0xffffffffc0000000
";

    #[test]
    fn a_listing_is_read_whole() {
        let proc = tempfile::tempdir().unwrap();
        let lines: Vec<String> = (0..10_000)
            .map(|number| format!("ffffffff{number:08x} t function_{number}"))
            .collect();
        fs::write(proc.path().join("kallsyms"), lines.join("\n")).unwrap();
        let symbols = Symbols::read(proc.path()).unwrap();
        assert_eq!(symbols.functions.len(), 10_000);
        for number in 0..10_000 {
            let name = format!("function_{number}");
            assert_eq!(symbols.name(0xffff_ffff_0000_0000 + number), Some(name.as_str()));
        }
    }

    #[test]
    fn an_address_names_its_function() {
        let symbols = Symbols::parse(TEXT, MODULES);
        assert_eq!(symbols.name(0xffff_ffff_8100_0000), Some("_stext"));
        assert_eq!(symbols.name(0xffff_ffff_8100_01ff), Some("tcp_conn_request"));
        assert_eq!(symbols.name(0xffff_ffff_8100_00f8), Some("_stext"));
        assert_eq!(symbols.name(0xffff_ffff_8100_0300), Some("global_alias"));
        assert_eq!(symbols.name(0xffff_ffff_c000_0020), Some("early_drop"));
        assert_eq!(symbols.name(0), None);
        assert_eq!(symbols.name(0xffff_ffff_80ff_ffff), None);
        assert_eq!(symbols.name(0xffff_ffff_8100_0500 + FUNCTION_MAX + 1), None);
    }

    #[test]
    fn a_module_names_no_address_outside_of_it() {
        let symbols = Symbols::parse(TEXT, MODULES);
        assert_eq!(symbols.name(0xffff_ffff_c000_0210), Some("ip_vs_in.part.0"));
        assert_eq!(symbols.name(0xffff_ffff_c000_1200), None);
        // Code that is given back once the module has started.
        assert_eq!(symbols.name(0xffff_ffff_bf00_0000), None);
        assert_eq!(Symbols::parse(TEXT, "").name(0xffff_ffff_c000_0020), None);
    }

    #[test]
    fn modules_that_came_or_moved_are_noticed() {
        let symbols = Symbols::parse(TEXT, MODULES);
        assert!(symbols.are_of(MODULES));
        assert!(!symbols.are_of(&MODULES.replace("c0000200", "c0000400")));
        assert!(!symbols.are_of(&format!("{MODULES}nf_tables 4096 0 - Live 0xffffffffc0000800\n")));
        assert!(!symbols.are_of(""));
        // Users come and go.
        assert!(symbols.are_of(&MODULES.replace(" 1 -", " 2 -")));
        assert!(symbols.is_of_kernel(0xffff_ffff_8100_0210));
        assert!(!symbols.is_of_kernel(0xffff_ffff_c000_0020));
    }

    #[test]
    fn static_functions_may_share_a_name() {
        let symbols = Symbols::parse(TEXT, MODULES);
        assert_eq!(symbols.functions("twice").count(), 2);
        assert_eq!(symbols.functions("jiffies").count(), 0);
        assert_eq!(symbols.functions("bpf_prog_1234").count(), 0);
    }

    #[test]
    fn variants_leave_out_the_cold_part() {
        let symbols = Symbols::parse(TEXT, MODULES);
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
        let symbols = Symbols::parse(b"0000000000000000 T tcp_conn_request\n", "");
        assert!(!symbols.has_addresses());
        assert!(Symbols::parse(TEXT, MODULES).has_addresses());
        assert_eq!(symbols.functions("tcp_conn_request").count(), 1);
        assert_eq!(symbols.name(0xffff_ffff_8100_0000), None);
    }
}
