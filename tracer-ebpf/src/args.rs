//! Arguments and return values, whatever kind of program reads them.

use aya_ebpf::{
    EbpfContext,
    programs::{FEntryContext, FExitContext, ProbeContext, RetProbeContext},
};

use crate::kernel;

/// A program at a function's entry.
pub(crate) trait Entry {
    /// Whether the verifier knows what the arguments point to: then they are read without a helper.
    const TYPED: bool;

    /// The argument with this index, as a register.
    fn argument(&self, index: u32) -> u64;

    /// Reads a member of what an argument, or a pointer read by this, points to; zero where there is nothing. The pointer must
    /// not have been in a map meanwhile: there it becomes a number.
    #[inline(always)]
    fn member<T: Copy + Default>(&self, base: u64, entry: u32) -> T {
        if Self::TYPED {
            kernel::typed(base, entry)
        } else {
            kernel::member(base, entry)
        }
    }
}

/// A program at a function's exit.
pub(crate) trait Exit {
    /// What the function returned; `parameters` is how many the function takes.
    fn returned(&self, parameters: u32) -> u64;
}

/// Reads the word with this index of a context. The verifier wants every access at a constant
/// offset: each word up to the index is read in turn, and the last one counts. Branches to be
/// chosen from would be merged by the compiler into one access at a computed offset.
macro_rules! word {
    ($index:expr, $first:expr, $($n:literal => $read:expr),*) => {{
        let index = $index;
        let mut word = $first;
        $(if index >= $n {
            word = $read;
        })*
        word
    }};
}

/// Reads a word of a context that is an array of 64-bit words.
#[inline(always)]
fn at(ctx: &impl EbpfContext, index: usize) -> u64 {
    let words = ctx.as_ptr() as *const u64;
    // SAFETY: the verifier checks the index against the function's prototype.
    unsafe { core::ptr::read_volatile(words.add(index)) }
}

impl Entry for FEntryContext {
    const TYPED: bool = true;

    #[inline(always)]
    fn argument(&self, index: u32) -> u64 {
        word!(index, at(self, 0), 1 => at(self, 1), 2 => at(self, 2), 3 => at(self, 3), 4 => at(self, 4), 5 => at(self, 5))
    }
}

impl Exit for FExitContext {
    #[inline(always)]
    fn returned(&self, parameters: u32) -> u64 {
        word!(
            parameters, 0,
            1 => at(self, 1), 2 => at(self, 2), 3 => at(self, 3), 4 => at(self, 4), 5 => at(self, 5), 6 => at(self, 6),
            7 => at(self, 7), 8 => at(self, 8)
        )
    }
}

/// Where x86-64 and arm64 keep a function's arguments in `struct pt_regs`, in words
/// (arch/x86/include/uapi/asm/ptrace.h, arch/arm64/include/uapi/asm/ptrace.h).
#[cfg(bpf_target_arch = "x86_64")]
const REGISTERS: [usize; 6] = [14, 13, 12, 11, 9, 8];
#[cfg(not(bpf_target_arch = "x86_64"))]
const REGISTERS: [usize; 6] = [0, 1, 2, 3, 4, 5];

impl Entry for ProbeContext {
    const TYPED: bool = false;

    #[inline(always)]
    fn argument(&self, index: u32) -> u64 {
        word!(
            index, at(self, REGISTERS[0]),
            1 => at(self, REGISTERS[1]), 2 => at(self, REGISTERS[2]), 3 => at(self, REGISTERS[3]),
            4 => at(self, REGISTERS[4]), 5 => at(self, REGISTERS[5])
        )
    }
}

impl Exit for RetProbeContext {
    #[inline(always)]
    fn returned(&self, _parameters: u32) -> u64 {
        self.ret()
    }
}
