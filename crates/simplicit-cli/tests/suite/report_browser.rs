//! The report in a real browser: it loads without an error, nothing is empty, nothing sticks out, the zoom works.
//!
//! Needs Chromium (Debian's package `chromium`, or `CHROMIUM` with its path). Without one the test fails where `CI` is
//! set and says so elsewhere.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use simplicit::equilibrium::{Equilibrium, EquilibriumSettings};
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::{Csr, Matrix};
use simplicit::model::{ImplicitModel, ModelParts};
use simplicit::random::Random;
use simplicit::train::{RowReport, TrainSettings};
use simplicit_cli::report::{Input, Robustness, RobustnessCurve, RobustnessKind, render};

/// Goes in front of everything else on the page and collects what goes wrong.
const WATCH: &str = r#"<script>
window.problems = [];
addEventListener("error", (e) => problems.push(e.message || "cannot load " + (e.target.currentSrc || "something")), true);
addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));
for (const kind of ["error", "warn"]) console[kind] = (...words) => problems.push(words.join(" "));
</script>"#;

/// In the page around the report: looks into the frame once it is loaded and writes what it finds.
const MEASURE: &str = r##"<script>
const measure = (frame) => {
  const page = frame.contentDocument, view = frame.contentWindow;
  const box = (e) => { const r = e.getBoundingClientRect(); return [r.width, r.height]; };
  const width = page.documentElement.clientWidth;
  const scrolls = (e) => e && (["auto", "scroll"].includes(view.getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const sticking = () => [...page.body.querySelectorAll("*")]
    .filter((e) => !e.closest("svg") && e.getBoundingClientRect().right > width + 0.5 && !scrolls(e.parentElement))
    .map((e) => e.tagName + "." + e.className);
  const pattern = page.querySelector(".view img");
  const fit = box(pattern)[0];
  const plus = page.querySelector("[data-step='1']");
  plus.click(); plus.click();
  const zoomed = box(pattern)[0], natural = Number(pattern.getAttribute("width"));
  const overflowZoomed = page.documentElement.scrollWidth - width;
  page.querySelector("[data-step='0']").click();
  return {
    width, fit, zoomed, natural, overflowZoomed,
    refit: box(pattern)[0],
    overflow: page.documentElement.scrollWidth - width,
    sticking: sticking(),
    problems: view.problems,
    figures: [...page.querySelectorAll("figure")].map((f) => ({ title: f.querySelector("h3").textContent, box: box(f) })),
    drawings: [...page.querySelectorAll("svg, img")].map((e) => ({ box: box(e), loaded: e.tagName !== "IMG" || e.naturalWidth > 0,
      alt: e.getAttribute("alt") || e.getAttribute("aria-label") || "" })),
    marks: page.querySelectorAll("svg circle, svg path, svg rect").length,
    smallest: Math.min(...[...page.querySelectorAll("svg text:not(:empty)")].map((t) => t.getBoundingClientRect().height)),
    background: view.getComputedStyle(page.body).backgroundColor,
    text: page.body.textContent.length,
  };
};
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.querySelector("#found").textContent = JSON.stringify(found);
});
</script>"##;

fn chromium() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("CHROMIUM") {
        return Some(path.into());
    }
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    std::env::split_paths(&path).flat_map(|folder| names.map(|name| folder.join(name))).find(|file| file.is_file())
}

/// The page after its scripts ran, and what the browser logged.
fn dump(browser: &Path, page: &Path, folder: &Path, dark: bool) -> (String, String) {
    let (out, log) = (folder.join("dom.html"), folder.join("log.txt"));
    let mut command = Command::new(browser);
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"])
        .args(["--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--v=0", "--dump-dom"])
        .args(["--window-size=1400,1000", "--virtual-time-budget=10000"])
        .arg(format!("--user-data-dir={}", folder.join("profile").display()))
        .arg(format!("--blink-settings=preferredColorScheme={}", if dark { 0 } else { 1 }))
        .arg(format!("file://{}", page.display()))
        .stdout(std::fs::File::create(&out).unwrap())
        .stderr(std::fs::File::create(&log).unwrap())
        .stdin(Stdio::null());
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("the browser did not finish within two minutes");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let log = String::from_utf8_lossy(&std::fs::read(log).unwrap()).into_owned();
    assert!(status.success(), "{log}");
    (String::from_utf8_lossy(&std::fs::read(out).unwrap()).into_owned(), log)
}

/// Loads the report at desktop and phone width, light or dark: what was measured at each, and what the console says.
fn measure(browser: &Path, report: &str, dark: bool) -> (Vec<Value>, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let watched = report.replacen("<head>", &format!("<head>{WATCH}"), 1);
    let quoted = watched.replace('&', "&amp;").replace('"', "&quot;");
    // Frames, because the window of a headless browser does not become as narrow as a phone.
    let frames: String = [1200, 390]
        .map(|width| format!("<iframe width=\"{width}\" height=\"900\" srcdoc=\"{quoted}\"></iframe>"))
        .concat();
    let page = folder.path().join("page.html");
    std::fs::write(
        &page,
        format!("<!doctype html><meta charset=\"utf-8\"><title>t</title>{MEASURE}<pre id=\"found\"></pre>{frames}"),
    )
    .unwrap();
    let (dom, log) = dump(browser, &page, folder.path(), dark);
    let console = log.lines().filter(|line| line.contains("CONSOLE")).map(String::from).collect();
    let found = dom.split("<pre id=\"found\">").nth(1).and_then(|rest| rest.split("</pre>").next()).unwrap();
    let plain = found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let found: Vec<Value> = serde_json::from_str(&plain).unwrap_or_else(|e| panic!("{e}: {plain}\n{log}"));
    assert_eq!(found.len(), 2);
    (found, console)
}

fn check(found: &Value) {
    let positive = |size: &Value| size.as_array().unwrap().iter().all(|v| v.as_f64().unwrap() > 20.0);
    let number = |key: &str| found[key].as_f64().unwrap();
    assert_eq!(found["problems"].as_array().unwrap().len(), 0, "{}", found["problems"]);
    assert!(number("overflow") <= 0.0, "the page scrolls sideways: {}", found["sticking"]);
    assert!(number("overflowZoomed") <= 0.0, "the zoomed page scrolls sideways");
    assert_eq!(found["sticking"].as_array().unwrap().len(), 0, "{}", found["sticking"]);
    for figure in found["figures"].as_array().unwrap() {
        assert!(positive(&figure["box"]), "{figure}");
    }
    for drawing in found["drawings"].as_array().unwrap() {
        assert!(positive(&drawing["box"]) && drawing["loaded"] == true, "{drawing}");
        assert!(drawing["alt"].as_str().unwrap().len() > 20, "{drawing}");
    }
    assert_eq!(number("zoomed"), 2.0 * number("natural"));
    assert!(number("fit") <= number("width") && number("fit") == number("refit"));
    assert!(number("smallest") >= 7.0, "text of {} pixels", number("smallest"));
}

/// A cyclic model with everything that an acyclic one has not.
fn cyclic_report() -> String {
    let mut r = Random::new(4);
    let n = 12;
    let mut rows = |count: usize, cols: usize, size: f64| -> Vec<Vec<(usize, f32)>> {
        (0..count).map(|_| (0..cols).map(|j| (j, (size * r.normal()) as f32)).collect()).collect()
    };
    let model = ImplicitModel::new(ModelParts {
        a: Csr::from_rows(n, rows(n, n, 0.06)),
        b: Csr::from_rows(5, rows(n, 5, 1.0)),
        c: Csr::from_rows(n, rows(3, n, 1.0)),
        d: Csr::from_rows(5, rows(3, 5, 1.0)),
        state_bias: vec![0.1; n],
        output_bias: vec![0.0; 3],
        layout: Layout::new(vec![Layer::dense("a_name_that_is_much_too_long_".repeat(6), n, Activation::Relu)]),
        ..Default::default()
    })
    .unwrap();
    let u = Matrix::from_fn(300, 5, |_, _| r.normal() as f32);
    let solution = Equilibrium::new(&model, EquilibriumSettings::default()).unwrap().outputs(&u).unwrap();
    let rows: Vec<RowReport> = (0..n + 3)
        .map(|k| RowReport {
            name: format!("z[{k}]"),
            nonzeros: 9,
            relative_gap: Some(if k == 3 { 0.0 } else { 10f64.powi(-(k as i32)) }),
            at_limit: k == 0,
            relative_residual: 0.01 * (k + 1) as f64,
            target_rms: 1.0,
            bound_distance: Some(0.2),
            proven: k == 1,
            on_gpu: false,
        })
        .collect();
    let curve = |kind, share: f64| RobustnessCurve {
        kind,
        points: (1..=4).map(|k| (f64::from(k) / 255.0, share / f64::from(k))).collect(),
    };
    let robustness = [Robustness {
        clean: 0.9,
        curves: vec![
            curve(RobustnessKind::Transfer, 0.85),
            curve(RobustnessKind::WhiteBox, 0.7),
            curve(RobustnessKind::Certified, 0.5),
        ],
        ..Robustness::default()
    }];
    render(&Input {
        rows: &rows,
        diagnostics: &solution.diagnostics,
        robustness: &robustness,
        ..Input::new("cyclic", &model)
    })
}

#[test]
fn the_report_renders_on_desktop_and_phone() {
    let Some(browser) = chromium() else {
        let why = "no Chromium on the path and CHROMIUM is not set; install Debian's package `chromium`";
        assert!(std::env::var_os("CI").is_none(), "{why}");
        eprintln!("skipped: {why}");
        return;
    };
    let fashion = crate::fashion::fashion_report(300, 500, &TrainSettings { strength: 2e-6, ..Default::default() });
    let mut backgrounds = Vec::new();
    // Of ten cards each page leaves out the two that it has nothing for.
    for (report, dark) in [(&fashion, false), (&fashion, true), (&cyclic_report(), false)] {
        let (found, console) = measure(&browser, report, dark);
        assert!(console.is_empty(), "{console:?}");
        for (found, width) in found.iter().zip([1200.0, 390.0]) {
            // A scroll bar may take its part.
            assert!(found["width"].as_f64().unwrap() > width - 20.0);
            assert_eq!(found["figures"].as_array().unwrap().len(), 8);
            assert!(found["marks"].as_u64().unwrap() > 20 && found["text"].as_u64().unwrap() > 1000);
            check(found);
            backgrounds.push(found["background"].to_string());
        }
    }
    assert_eq!(backgrounds[0], backgrounds[1]);
    assert_ne!(backgrounds[0], backgrounds[2], "dark is not light");
}

#[test]
fn a_broken_page_is_noticed() {
    let Some(browser) = chromium() else { return };
    let model = ImplicitModel::new(ModelParts {
        a: Csr::empty(1, 1),
        b: Csr::from_rows(2, [vec![(0, 1.0f32)]]),
        c: Csr::from_rows(1, [vec![(0, 1.0f32)]]),
        d: Csr::empty(1, 2),
        state_bias: vec![0.0],
        output_bias: vec![0.0],
        layout: Layout::new(vec![Layer::dense("l", 1, Activation::Relu)]),
        ..Default::default()
    })
    .unwrap();
    let good = render(&Input::new("small", &model));
    let bad = good
        .replacen(
            "<main>",
            "<main><div style=\"width:3000px\">wide</div><img src=\"data:image/png;base64,AAAA\" alt=\"\">",
            1,
        )
        .replacen("</body>", "<script>nobody.home()</script></body>", 1);
    let (found, console) = measure(&browser, &good, false);
    found.iter().for_each(check);
    assert!(console.is_empty(), "{console:?}");
    let (found, console) = measure(&browser, &bad, false);
    assert!(console.iter().any(|line| line.contains("nobody is not defined")), "{console:?}");
    for found in found {
        assert!(found["problems"].as_array().unwrap().len() >= 2, "the script and the image: {found}");
        assert!(found["overflow"].as_f64().unwrap() > 1000.0);
        assert!(found["sticking"].as_array().unwrap().iter().any(|e| e == "DIV."));
        assert!(found["drawings"].as_array().unwrap().iter().any(|d| d["loaded"] == false));
    }
}
