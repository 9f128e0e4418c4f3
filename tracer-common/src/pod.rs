//! Lets aya copy the shared types to and from maps.

use crate::{
    AddressKey, AddressValue, CountKey, CountValue, Frees, IpvsLayout, Layout, Sampling, Scope, ServiceKey,
};

// SAFETY: each is repr(C), of plain integers, without padding (the fields named `pad` fill it).
unsafe impl aya::Pod for AddressKey {}
// SAFETY: as above.
unsafe impl aya::Pod for AddressValue {}
// SAFETY: as above.
unsafe impl aya::Pod for CountKey {}
// SAFETY: as above.
unsafe impl aya::Pod for CountValue {}
// SAFETY: as above.
unsafe impl aya::Pod for IpvsLayout {}
// SAFETY: as above.
unsafe impl aya::Pod for Layout {}
// SAFETY: as above.
unsafe impl aya::Pod for Frees {}
// SAFETY: as above.
unsafe impl aya::Pod for Sampling {}
// SAFETY: as above.
unsafe impl aya::Pod for Scope {}
// SAFETY: as above.
unsafe impl aya::Pod for ServiceKey {}
