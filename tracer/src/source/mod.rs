//! Where records come from.

pub mod file;
