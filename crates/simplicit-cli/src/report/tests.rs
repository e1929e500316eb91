use super::*;
use simplicit::attack::Norm;
use simplicit::layout::{Activation, Layer, Layout};
use simplicit::linalg::Csr;
use simplicit::model::ModelParts;

fn model(name: &str) -> ImplicitModel {
    let mut parts = ModelParts {
        a: Csr::from_rows(2, [vec![(1, 0.5f32)], vec![]]),
        b: Csr::from_rows(4, [vec![(0, 1.0f32)], vec![(2, 1.0), (3, -1.0)]]),
        c: Csr::from_rows(2, [vec![(0, 1.0f32)], vec![(1, 1.0)]]),
        d: Csr::empty(2, 4),
        state_bias: vec![0.0; 2],
        output_bias: vec![0.0; 2],
        layout: Layout::new(vec![Layer::dense(name, 1, Activation::Relu), Layer::dense("first", 1, Activation::Tanh)]),
        ..Default::default()
    };
    parts.metadata.provenance.insert("seed".into(), "<b>7</b>".into());
    ImplicitModel::new(parts).unwrap()
}

fn row(k: usize, gap: Option<f64>, at_limit: bool) -> RowReport {
    RowReport {
        name: format!("z[{k}]"),
        nonzeros: k,
        relative_gap: gap,
        at_limit,
        relative_residual: 0.125,
        target_rms: 1.0,
        bound_distance: None,
        proven: false,
        on_gpu: false,
    }
}

#[test]
fn a_model_alone_makes_a_page_without_empty_cards() {
    let model = model("second");
    let page = render(&Input::new("model", &model));
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    assert!(page.contains("<td class=\"num\">–</td>"));
    for absent in ["id=\"loss\"", "id=\"rows\"", "id=\"robustness\"", "worst gap", "rows proven"] {
        assert!(!page.contains(absent), "{absent}");
    }
    assert!(!page.contains("NaN") && !page.contains("inf%"));
}

#[test]
fn names_from_a_file_cannot_break_out() {
    let hostile = "\"><script>alert(1)</script>";
    let model = model(hostile);
    let rows = [row(0, Some(1e-9), false), row(1, None, true)];
    let names = [hostile.to_string(), hostile.to_string()];
    let classes = simplicit::evaluate::class_changes(
        &simplicit::linalg::Matrix::from_vec(2, 2, vec![0.0f32, 1.0, 1.0, 0.0]).unwrap(),
        &simplicit::linalg::Matrix::from_vec(2, 2, vec![1.0f32, 0.0, 1.0, 0.0]).unwrap(),
        &[0, 0],
    )
    .unwrap();
    let settings = [(hostile.to_string(), hostile.to_string())];
    let page = render(&Input {
        baseline: Some(&model),
        rows: &rows,
        classes: &classes,
        class_names: &names,
        settings: &settings,
        phases: &[(hostile.to_string(), 1.0)],
        ..Input::new(hostile, &model)
    });
    assert!(!page.contains("<script>alert"));
    assert_eq!(page.matches("<script>").count(), 1);
    assert!(page.contains("&lt;b&gt;7&lt;/b&gt;"));
}

#[test]
fn nothing_comes_from_elsewhere() {
    let model = model("second");
    let page = render(&Input { baseline: Some(&model), ..Input::new("model", &model) });
    assert!(!page.contains("http:") && !page.contains("https:") && !page.contains("@import"));
    for source in page.split("src=\"").skip(1) {
        assert!(source.starts_with("data:image/png;base64,"), "{}", &source[..40]);
    }
    assert_eq!(page.matches("<img ").count(), page.matches(" alt=\"").count());
    assert_eq!(page.matches("<svg ").count(), page.matches(" role=\"img\"").count());
}

#[test]
fn the_worst_gap_and_the_limits_are_told() {
    let model = model("second");
    let rows = [row(0, Some(1e-9), false), row(1, Some(2.5e-4), true), row(2, None, false)];
    let page = render(&Input { rows: &rows, ..Input::new("model", &model) });
    assert!(page.contains("2.5 × 10<sup>−4</sup>") && page.contains("1 row at a limit"));
    let none = [row(0, None, false)];
    let page = render(&Input { rows: &none, ..Input::new("model", &model) });
    assert!(page.contains("Row residuals") && !page.contains("Distance from the optimum"));
    let bounded = [(0.0, true), (0.25, false), (0.5, false)].map(|(distance, proven)| RowReport {
        bound_distance: Some(distance),
        proven,
        ..row(0, None, false)
    });
    let page = render(&Input { rows: &bounded, ..Input::new("model", &model) });
    assert!(page.contains("1 of 3") && page.contains("median 25.0 %, worst 50.0 %") && !page.contains("worst gap"));
}

#[test]
fn degenerate_models_and_numbers_make_a_page_too() {
    let (infinite, nan) = (f64::INFINITY, f64::NAN);
    let errors: Vec<LayerError> = [(infinite, infinite), (infinite, nan), (0.0, -infinite)]
        .map(|(output_error, added)| LayerError { name: "l".into(), state_error: Some(nan), output_error, added })
        .to_vec();
    let rows = [RowReport { relative_residual: nan, ..row(0, Some(infinite), true) }, row(1, Some(0.0), false)];
    let curve = |points: &[(f64, f64)]| RobustnessCurve { kind: RobustnessKind::Certified, points: points.to_vec() };
    let robustness = [
        Robustness { clean: 0.9, curves: vec![curve(&[(nan, 0.5), (0.01, infinite), (0.02, 0.5)])], norm: Norm::Linf },
        Robustness { clean: nan, curves: vec![curve(&[(0.01, 0.5)])], norm: Norm::L2 },
        Robustness { clean: 0.5, ..Default::default() },
    ];
    for (turn, (n, p, q)) in [(0, 0, 0), (0, 3, 1), (2, 0, 1), (1, 1, 0), (0, 0, 2)].into_iter().enumerate() {
        let model = ImplicitModel::new(ModelParts {
            a: Csr::from_rows(n, (0..n).map(|i| vec![(i, 2.0f32)])),
            b: Csr::empty(n, p),
            c: Csr::empty(q, n),
            d: Csr::empty(q, p),
            state_bias: vec![0.0; n],
            output_bias: vec![0.0; q],
            layout: Layout::new(if n > 0 { vec![Layer::dense("l", n, Activation::Relu)] } else { vec![] }),
            ..Default::default()
        })
        .unwrap();
        let page = render(&Input {
            baseline: Some(&model),
            rows: &rows,
            layer_errors: &errors,
            accuracy: Some(nan),
            baseline_accuracy: Some(nan),
            milliseconds: Some(0.0),
            baseline_milliseconds: Some(0.0),
            equilibrium_error: Some(infinite),
            robustness: robustness.get(turn..=turn).unwrap_or(&[]),
            ..Input::new("degenerate", &model)
        });
        assert!(!page.contains("NaN") && !page.contains("inf"), "{n} {p} {q}");
    }
}
