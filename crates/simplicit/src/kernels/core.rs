//! Properties in which cores with the same instructions differ, and on which the choice of kernels depends.

/// A core, as its processor describes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Core {
    /// Two multiply-adds of 16 numbers in a cycle, so that loads limit sparse rows; other cores have one.
    pub(super) two_wide: bool,
    /// A permutation of one register of 16 numbers takes half as long as that of two.
    pub(super) quick_permutation: bool,
    /// Size of the first-level data cache in bytes.
    pub(super) cache: usize,
}

impl Core {
    /// The core of this process; found once.
    pub(super) fn own() -> Self {
        static OWN: std::sync::OnceLock<Core> = std::sync::OnceLock::new();
        *OWN.get_or_init(Self::ask)
    }

    #[cfg(target_arch = "x86_64")]
    fn ask() -> Self {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        // Intel describes caches in leaf 4, AMD in a leaf of its own in the same format. SAFETY: every processor of
        // 64 bits has `cpuid`, and leaves are asked for only where they exist.
        #[allow(unused_unsafe)] // Safe only from later compilers on than the lowest this builds with.
        let (intel, family, cache) = unsafe {
            let (first, last) = (__cpuid(0), __cpuid(0x8000_0000).eax);
            let intel = first.ebx == u32::from_le_bytes(*b"Genu");
            let version = __cpuid(1).eax;
            let family = (version >> 8 & 15) + (version >> 20 & 255);
            let cache = match () {
                () if intel && first.eax >= 4 => Some(__cpuid_count(4, 0)),
                () if !intel && last >= 0x8000_001d => Some(__cpuid_count(0x8000_001d, 0)),
                () => None,
            };
            (intel, family, cache)
        };
        // Ways, partitions, bytes of a line and sets, each less one.
        let bytes = cache.map(|c| {
            let b = c.ebx;
            ((b >> 22) as usize + 1)
                * ((b >> 12 & 1023) as usize + 1)
                * ((b & 4095) as usize + 1)
                * (c.ecx as usize + 1)
        });
        // AMD's cores have two from family 26 on.
        let two_wide = intel || family >= 26;
        Self {
            two_wide,
            quick_permutation: !intel && two_wide,
            cache: bytes.unwrap_or(USUAL).clamp(16 << 10, 128 << 10),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn ask() -> Self {
        Self { two_wide: false, quick_permutation: false, cache: USUAL }
    }
}

/// Bytes of the first-level cache that are assumed if the processor does not report them.
const USUAL: usize = 32 << 10;
