//! Embeds the BPF object, where there is one: `cargo xtask build` compiles it and
//! names it in `DROPTRACE_BPF_OBJECT`. A plain `cargo build` needs no BPF toolchain
//! and embeds nothing.

use std::{env, fs, path::PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=DROPTRACE_BPF_OBJECT");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let source = match env::var_os("DROPTRACE_BPF_OBJECT").map(PathBuf::from) {
        Some(object) => {
            println!("cargo::rerun-if-changed={}", object.display());
            fs::copy(&object, out.join("droptrace.bpf.o"))
                .unwrap_or_else(|error| panic!("cannot copy the BPF object {}: {error}", object.display()));
            "Some(aya::include_bytes_aligned!(concat!(env!(\"OUT_DIR\"), \"/droptrace.bpf.o\")))"
        }
        None => "None",
    };
    fs::write(out.join("object.rs"), source).expect("OUT_DIR is writable");
}
