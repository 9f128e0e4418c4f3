//! droptrace: why did the kernel drop this packet?
