//! Numbers known to lie between two floating-point numbers; every operation rounds its ends outwards.

/// The interval [low, high].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Interval {
    low: f64,
    high: f64,
}

impl Interval {
    /// The neighbouring numbers outside the interval; the exact result lies between the neighbours of a rounded one.
    fn outward(low: f64, high: f64) -> Self {
        Self { low: low.next_down(), high: high.next_up() }
    }

    pub(super) fn of(value: f64) -> Self {
        Self { low: value, high: value }
    }

    pub(super) fn product(a: f64, b: f64) -> Self {
        Self::outward(a * b, a * b)
    }

    pub(super) fn low(self) -> f64 {
        self.low
    }

    pub(super) fn high(self) -> f64 {
        self.high
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self::outward(self.low + other.low, self.high + other.high)
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self::outward(self.low - other.high, self.high - other.low)
    }

    pub(super) fn times(self, factor: f64) -> Self {
        let (a, b) = (self.low * factor, self.high * factor);
        Self::outward(a.min(b), a.max(b))
    }

    /// The interval divided by a positive number.
    pub(super) fn over(self, divisor: f64) -> Self {
        Self::outward(self.low / divisor, self.high / divisor)
    }

    pub(super) fn half(self) -> Self {
        Self::outward(0.5 * self.low, 0.5 * self.high)
    }

    pub(super) fn square(self) -> Self {
        let (a, b) = (self.low * self.low, self.high * self.high);
        let smallest = if self.low <= 0.0 && self.high >= 0.0 { 0.0 } else { a.min(b).next_down().max(0.0) };
        Self { low: smallest, high: a.max(b).next_up() }
    }

    pub(super) fn at_least_zero(self) -> Self {
        Self { low: self.low.max(0.0), high: self.high.max(0.0) }
    }
}
