//! Short tables on stdout: a name, a value, sometimes a second value in the next column.

/// Rows of text cells, padded into columns when shown.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without a head.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// A table with a head of column names.
    pub(crate) fn with_head(head: &[&str]) -> Self {
        Self { rows: vec![head.iter().map(|h| (*h).to_string()).collect()] }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: &[&str]) -> &mut Self {
        self.rows.push(cells.iter().map(|c| (*c).to_string()).collect());
        self
    }

    /// The table as text: the first column is aligned left, the others right.
    pub(crate) fn show(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |j: usize| {
            // A row of two cells in a wider table is a remark and does not determine the width of its column.
            let cells = self.rows.iter().filter(|r| columns == 2 || r.len() != 2 || j == 0);
            cells.filter_map(|r| r.get(j)).map(|c| c.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut out = String::new();
        for row in &self.rows {
            for (j, cell) in row.iter().enumerate() {
                let padding = " ".repeat(widths[j].saturating_sub(cell.chars().count()));
                let loose = columns > 2 && row.len() == 2 && j == 1;
                match j {
                    0 => out.push_str(&format!("{cell}{padding}")),
                    _ if loose || columns == 2 => out.push_str(&format!("  {cell}")),
                    _ => out.push_str(&format!("  {padding}{cell}")),
                }
            }
            out.truncate(out.trim_end().len());
            out.push('\n');
        }
        out
    }
}

/// A number with separators: 52,896.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (k, digit) in digits.chars().enumerate() {
        if k > 0 && (digits.len() - k).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A fraction in per cent: 87.98 %.
pub(crate) fn percent(fraction: f64) -> String {
    format!("{:.2} %", 100.0 * fraction)
}

/// A size: 1.23 MB, 45.6 kB or 789 B.
pub(crate) fn bytes(value: u64) -> String {
    match value {
        0..1_000 => format!("{value} B"),
        1_000..1_000_000 => format!("{:.1} kB", value as f64 / 1e3),
        _ => format!("{:.2} MB", value as f64 / 1e6),
    }
}

/// The value's text, or a dash.
pub(crate) fn or_dash<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or("–".to_string(), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([count(7), count(999), count(1_000), count(52_896)], ["7", "999", "1,000", "52,896"]);
        assert_eq!([bytes(12), bytes(45_600), bytes(1_230_000)], ["12 B", "45.6 kB", "1.23 MB"]);
        assert_eq!(percent(0.8798), "87.98 %");
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::with_head(&["", "before", "after"]);
        table.row(&["parameters", "52,896", "18,000"]).row(&["gap", "a remark that is long"]);
        assert_eq!(
            table.show(),
            "            before   after\nparameters  52,896  18,000\ngap         a remark that is long\n"
        );
    }
}
