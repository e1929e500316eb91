//! The page of an experiment: Markdown for people, JSON for scripts, one SVG per picture.

use std::fmt::Write;
use std::path::Path;

use crate::report::Chart;
use serde_json::json;

use super::{Found, Step};
use crate::results::Staged;

/// A drawing and a text for readers who cannot see it.
pub(crate) struct Picture {
    pub(crate) svg: String,
    pub(crate) alt: String,
}

impl Picture {
    pub(super) fn chart(chart: &Chart, alt: &str) -> Self {
        Self { svg: chart.svg(alt), alt: alt.into() }
    }
}

/// One figure or table of the paper, and ours.
pub(crate) struct Item {
    /// Identifier, which also names the file of its picture.
    pub(crate) id: &'static str,
    pub(crate) title: &'static str,
    /// What the paper says.
    pub(crate) paper: String,
    /// What we found and, where it differs from the paper, why.
    pub(crate) finding: String,
    pub(crate) head: Vec<&'static str>,
    pub(crate) rows: Vec<Vec<String>>,
    pub(crate) picture: Option<Picture>,
}

/// Everything an experiment has to show.
pub(crate) struct Page<'a> {
    pub(crate) title: &'a str,
    pub(crate) items: &'a [Item],
    pub(crate) steps: &'a [Step],
    pub(crate) found: &'a Found,
    /// The command that made the page.
    pub(crate) command: &'a str,
    pub(crate) seconds: f64,
}

impl Page<'_> {
    /// Writes `results.md`, `results.json` and the pictures; all of them appear at the same moment.
    pub(crate) fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let mut files = Staged::default();
        for item in self.items {
            if let Some(picture) = &item.picture {
                files.stage(&directory.join(format!("{}.svg", item.id)), picture.svg.as_bytes())?;
            }
        }
        files.stage(&directory.join("results.json"), self.json()?.as_bytes())?;
        files.stage(&directory.join("results.md"), self.markdown().as_bytes())?.finish()
    }

    fn markdown(&self) -> String {
        let mut out = format!("# {}\n\n`{}`, version {}", self.title, self.command, env!("CARGO_PKG_VERSION"));
        let _ = writeln!(out, ", {:.0} s of steps.", self.seconds);
        for item in self.items {
            let _ = write!(out, "\n## {}\n\nPaper: {}\n\n", item.title, item.paper);
            if let Some(picture) = &item.picture {
                let _ = write!(out, "![{}]({}.svg)\n\n", picture.alt, item.id);
            }
            if !item.rows.is_empty() {
                let _ = writeln!(out, "| {} |\n|{}", item.head.join(" | "), "---|".repeat(item.head.len()));
                for row in &item.rows {
                    let _ = writeln!(out, "| {} |", row.join(" | "));
                }
                out.push('\n');
            }
            let _ = writeln!(out, "{}", item.finding);
        }
        out.push_str("\n## The commands\n\n```\n");
        for step in self.steps {
            let _ = writeln!(out, "simplicit {}", step.args.join(" "));
        }
        out.push_str("```\n");
        out
    }

    fn json(&self) -> anyhow::Result<String> {
        let items: Vec<_> = self
            .items
            .iter()
            .map(|i| json!({ "id": i.id, "title": i.title, "paper": i.paper, "finding": i.finding, "head": i.head, "rows": i.rows }))
            .collect();
        let commands: Vec<_> = self.steps.iter().map(|s| json!({ "name": s.name, "command": s.args })).collect();
        let value = json!({
            "title": self.title, "version": env!("CARGO_PKG_VERSION"), "seconds": self.seconds, "items": items,
            "steps": commands, "results": self.found
        });
        Ok(serde_json::to_string_pretty(&value)? + "\n")
    }
}
