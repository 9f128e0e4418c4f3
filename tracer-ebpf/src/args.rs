//! Arguments and return values, whatever kind of program reads them.

use aya_ebpf::{
    EbpfContext,
    programs::{FEntryContext, FExitContext, ProbeContext, RetProbeContext},
};

/// A program at a function's entry.
pub(crate) trait Entry {
    /// The argument with this index, as a register.
    fn argument(&self, index: u32) -> u64;
}

/// A program at a function's exit.
pub(crate) trait Exit {
    /// What the function returned; `parameters` is how many the function takes.
    fn returned(&self, parameters: u32) -> u64;
}

/// The verifier wants every access to the context at a constant offset: one branch an index, of
/// which it prunes all but one, since the index is read-only data.
macro_rules! at_constant {
    ($index:expr, $ctx:expr, $($n:literal)*) => {
        match $index {
            $($n => {
                let address = $ctx.as_ptr() as *const u64;
                // SAFETY: BPF contexts of fentry and fexit are arrays of 64-bit words; the verifier checks the index.
                unsafe { core::ptr::read_volatile(address.add($n)) }
            })*
            _ => 0,
        }
    };
}

impl Entry for FEntryContext {
    #[inline(always)]
    fn argument(&self, index: u32) -> u64 {
        at_constant!(index, self, 0 1 2 3 4 5)
    }
}

impl Exit for FExitContext {
    #[inline(always)]
    fn returned(&self, parameters: u32) -> u64 {
        at_constant!(parameters, self, 1 2 3 4 5 6 7 8)
    }
}

impl Entry for ProbeContext {
    #[inline(always)]
    fn argument(&self, index: u32) -> u64 {
        match index {
            0 => self.arg(0),
            1 => self.arg(1),
            2 => self.arg(2),
            3 => self.arg(3),
            4 => self.arg(4),
            5 => self.arg(5),
            _ => None,
        }
        .unwrap_or(0)
    }
}

impl Exit for RetProbeContext {
    #[inline(always)]
    fn returned(&self, _parameters: u32) -> u64 {
        self.ret()
    }
}
