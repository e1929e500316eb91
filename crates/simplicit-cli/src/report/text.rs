//! Numbers and words as the page shows them.

/// Shown in place of a value that is not known.
pub(super) const UNKNOWN: &str = "–";

/// Escapes text for HTML, also inside an attribute.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Control characters are not allowed in HTML at all.
            c if c.is_control() && c != '\n' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// `f` of a value that is known, a dash otherwise.
pub(super) fn known<T>(value: Option<T>, f: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| UNKNOWN.to_string(), f)
}

/// A number with separators: 52,896.
pub(super) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (k, c) in digits.chars().enumerate() {
        if k > 0 && (digits.len() - k).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A number and a noun in singular or plural: 1 row, 2,000 rows.
pub(super) fn counted(value: usize, noun: &str) -> String {
    format!("{} {noun}{}", count(value as u64), if value == 1 { "" } else { "s" })
}

/// A fraction as 87.98 %.
pub(super) fn percent(value: f64, decimals: usize) -> String {
    format!("{} %", fixed(100.0 * value, decimals))
}

/// A number with a proper minus sign, and without a minus on zero.
pub(super) fn fixed(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return if value.is_nan() { UNKNOWN.into() } else { format!("{}∞", if value < 0.0 { "−" } else { "" }) };
    }
    let text = format!("{value:.decimals$}");
    match text.strip_prefix('-') {
        Some(rest) if rest.chars().any(|c| c.is_ascii_digit() && c != '0') => format!("−{rest}"),
        Some(rest) => rest.to_string(),
        None => text,
    }
}

/// As [`fixed`], with a plus sign before positive numbers.
pub(super) fn signed(value: f64, decimals: usize) -> String {
    let text = fixed(value, decimals);
    let zero = !text.chars().any(|c| ('1'..='9').contains(&c) || c == '∞');
    if value > 0.0 && !zero { format!("+{text}") } else { text }
}

/// A size in three digits: 219 kB, 1.18 MB.
pub(super) fn bytes(value: u64) -> String {
    let (value, unit) = match value {
        0..1_000 => return format!("{value} B"),
        1_000..1_000_000 => (value as f64 / 1e3, "kB"),
        1_000_000..1_000_000_000 => (value as f64 / 1e6, "MB"),
        _ => (value as f64 / 1e9, "GB"),
    };
    format!("{} {unit}", three_digits(value))
}

/// A number in three digits: 0.0123, 1.23, 12.3, 123.
pub(super) fn three_digits(value: f64) -> String {
    let decimals = if value == 0.0 || !value.is_finite() {
        0
    } else {
        (2.0 - value.abs().log10().floor()).clamp(0.0, 6.0) as usize
    };
    fixed(value, decimals)
}

/// A number as 3.2 × 10⁻⁵ in HTML; plain where that is short.
pub(super) fn scientific(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    if !value.is_finite() {
        return fixed(value, 0);
    }
    if (1e-3..1e4).contains(&value.abs()) {
        return three_digits(value);
    }
    let text = format!("{value:.1e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    format!("{} × 10<sup>{}</sup>", mantissa.replace('-', "−"), exponent.replace('-', "−"))
}

/// A number as 3.21e−5, for places without markup.
pub(super) fn plain(value: f64) -> String {
    if value.is_finite() { format!("{value:.2e}").replace('-', "−") } else { fixed(value, 0) }
}

/// A time: 250 ms, 12.3 s, 3 min 20 s.
pub(super) fn seconds(value: f64) -> String {
    if value < 1.0 {
        format!("{} ms", three_digits(1e3 * value))
    } else if value < 120.0 {
        format!("{} s", three_digits(value))
    } else {
        format!("{} min {} s", count((value / 60.0) as u64), (value % 60.0) as u64)
    }
}

/// A percentage of a bar's track for a style attribute.
pub(super) fn width(share: f64) -> String {
    let share = if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) };
    format!("{:.2}%", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([count(0), count(999), count(52_896), count(1_000_000)], ["0", "999", "52,896", "1,000,000"]);
        assert_eq!([counted(1, "row"), counted(2000, "row")], ["1 row", "2,000 rows"]);
        assert_eq!([fixed(-0.004, 2), fixed(-1.5, 1), fixed(f64::NAN, 1)], ["0.00", "−1.5", "–"]);
        assert_eq!([signed(0.001, 2), signed(0.25, 2), signed(-0.25, 2)], ["0.00", "+0.25", "−0.25"]);
        assert_eq!([bytes(12), bytes(83_312), bytes(1_178_079)], ["12 B", "83.3 kB", "1.18 MB"]);
        assert_eq!([three_digits(0.01234), three_digits(123.4), three_digits(0.0)], ["0.0123", "123", "0"]);
        assert_eq!(
            [scientific(0.0), scientific(0.02), scientific(-3.21e-5)],
            ["0", "0.0200", "−3.2 × 10<sup>−5</sup>"]
        );
        assert_eq!([plain(-3.21e-5), plain(f64::INFINITY)], ["−3.21e−5", "∞"]);
        assert_eq!([seconds(0.25), seconds(12.34), seconds(200.0)], ["250 ms", "12.3 s", "3 min 20 s"]);
        assert_eq!(
            [percent(0.8798, 2), width(0.5), width(7.0), width(f64::NAN)],
            ["87.98 %", "50.00%", "100.00%", "0.00%"]
        );
    }

    #[test]
    fn nothing_escapes() {
        assert_eq!(escape("<a href=\"x\">'&\u{0}"), "&lt;a href=&quot;x&quot;&gt;&#39;&amp;\u{fffd}");
    }
}
