//! Scenarios that make a kernel drop packets.
