//! What crosses the border between the BPF programs and user space.
#![no_std]
