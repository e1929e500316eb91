//! The processor time of a thread, for measurements on machines that other programs use too.

/// Seconds of processor time of the calling thread; without such a clock, seconds since the first call.
pub fn thread_seconds() -> f64 {
    #[cfg(all(target_os = "linux", target_pointer_width = "64"))]
    {
        /// `struct timespec` of 64-bit Linux.
        #[repr(C)]
        struct Time {
            seconds: i64,
            nanoseconds: i64,
        }
        unsafe extern "C" {
            fn clock_gettime(clock: i32, time: *mut Time) -> i32;
        }
        const THREAD: i32 = 3;
        let mut time = Time { seconds: 0, nanoseconds: 0 };
        // SAFETY: the C library, which std links, writes one timespec of this layout and nothing else.
        if unsafe { clock_gettime(THREAD, &mut time) } == 0 {
            return time.seconds as f64 + 1e-9 * time.nanoseconds as f64;
        }
    }
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
}
