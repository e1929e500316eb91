//! FashionMNIST with the 4-layer network: figures 2 to 6 and the two tables of settings.

use crate::report::{Chart, Series, patterns};
use simplicit::evaluate::rank;
use simplicit::model::ImplicitModel;

use super::{
    Experiment, Files, Found, Item, Picture, Step, attacked_accuracy, curve, drop, number, percent, points,
    under_attack,
};

/// Non-zero parameters of the network, and rows of the model.
const PARAMETERS: f64 = 52_896.0;
const ROWS: f64 = 122.0;

/// A row of the paper's table of settings: samples, λ₁ = λ₂, weight of the penalty, then the results that it reports:
/// sparsity in per cent and accuracy under the two attacks.
struct Setting {
    samples: usize,
    lambda: f64,
    weight: f64,
    sparsity: f64,
    attacked: [f64; 2],
}

const fn setting(samples: usize, lambda: f64, weight: f64, sparsity: f64, attacked: [f64; 2]) -> Setting {
    Setting { samples, lambda, weight, sparsity, attacked }
}

const PERSPECTIVE: [Setting; 6] = [
    setting(700, 0.1, 0.01, 15.0, [78.7, 75.4]),
    setting(500, 0.1, 0.01, 23.0, [77.3, 73.8]),
    setting(400, 0.1, 0.01, 28.0, [76.6, 72.8]),
    setting(300, 0.1, 0.01, 36.0, [74.9, 72.4]),
    setting(200, 0.1, 0.01, 54.0, [73.7, 70.1]),
    setting(100, 0.1, 0.01, 77.0, [57.2, 49.5]),
];
const L1: [Setting; 6] = [
    setting(600, 0.1, 0.001, 20.0, [79.6, 76.2]),
    setting(1000, 0.01, 0.001, 47.0, [79.3, 76.2]),
    setting(500, 0.01, 0.01, 26.0, [78.3, 75.0]),
    setting(2000, 0.01, 0.01, 6.0, [77.6, 74.6]),
    setting(900, 0.01, 0.001, 65.0, [74.9, 69.9]),
    setting(400, 0.01, 0.001, 76.0, [72.3, 68.4]),
];
/// Numbers of samples in figure 3.
const SAMPLES: [usize; 7] = [100, 200, 400, 700, 1000, 1500, 2000];
/// Our own levels, for the default method and for ℓ1 in the same walk.
const LEVELS: [f64; 6] = [0.5, 0.7, 0.8, 0.85, 0.9, 0.93];
const L1_LEVELS: [f64; 4] = [0.2, 0.47, 0.65, 0.8];
/// A model with feedback, as sparse as the paper's picture: its name, number of images and flags.
const CYCLIC: (&str, usize, &str) =
    ("ours-full", 5000, "--connectivity full --rescale --kappa 0.8 --penalty l1 --target-sparsity 0.3");

/// The experiment's files.
pub(crate) struct Fashion {
    pub(crate) files: Files,
    pub(crate) fast: bool,
    pub(crate) threads: usize,
}

impl Fashion {
    /// In a fast run only the first few.
    fn some<'a, T>(&self, all: &'a [T]) -> &'a [T] {
        if self.fast { &all[..all.len().min(2)] } else { all }
    }

    fn own_samples(&self) -> usize {
        if self.fast { 2000 } else { 20_000 }
    }

    fn settings(penalty: &str, s: &Setting) -> (String, String) {
        let weight = if penalty == "l1" { "beta" } else { "alpha" };
        (
            format!("{penalty}-{}-{}", s.samples, s.weight),
            format!(
                "--preset paper --rescale --penalty {penalty} --{weight} {} --lambda1 {1} --lambda2 {1}",
                s.weight, s.lambda
            ),
        )
    }
}

fn by_samples(penalty: &str, samples: usize) -> String {
    format!("{penalty}-by-samples-{samples}")
}

fn ours(level: f64) -> String {
    format!("ours-{level}")
}

fn ours_l1(level: f64) -> String {
    format!("ours-l1-{level}")
}

impl Experiment for Fashion {
    fn title(&self) -> &'static str {
        "The paper's FashionMNIST experiments"
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        steps.push(self.files.convert("baseline"));
        steps.push(self.files.attack("baseline", ""));
        for (penalty, table) in [("perspective", &PERSPECTIVE), ("l1", &L1)] {
            for setting in self.some(table) {
                let (name, flags) = Self::settings(penalty, setting);
                steps.push(self.files.train(&name, setting.samples, &flags));
                steps.push(self.files.attack(&name, ""));
            }
            for &samples in self.some(&SAMPLES) {
                let flags = format!("--preset paper --rescale --penalty {penalty}");
                steps.push(self.files.train(&by_samples(penalty, samples), samples, &flags));
            }
        }
        // No item shows the lower bounds of rows, which take longer than the rest of the fast variant.
        let unbounded = if self.fast { " --bounds off" } else { "" };
        for &level in self.some(&LEVELS) {
            let flags = format!("--target-sparsity {level}{unbounded}");
            steps.push(self.files.train(&ours(level), self.own_samples(), &flags));
            steps.push(self.files.attack(&ours(level), ""));
        }
        for &level in self.some(&L1_LEVELS) {
            let flags = format!("--penalty l1 --target-sparsity {level}");
            steps.push(self.files.train(&ours_l1(level), self.own_samples(), &flags));
            steps.push(self.files.attack(&ours_l1(level), ""));
        }
        let (name, images, flags) = CYCLIC;
        // Few images, because with all connections the refits would take minutes.
        let (images, quick) = if self.fast { (500, " --rounds 1 --output-refit 0") } else { (images, "") };
        steps.push(self.files.train(name, images, &format!("{flags}{quick}")));
        steps.push(self.files.attack(name, ""));
        let mut threads = 1;
        while threads <= self.threads {
            let flags = format!("--preset paper --rescale --penalty l1 --threads {threads}");
            steps.push(self.files.train(&format!("threads-{threads}"), if self.fast { 500 } else { 1000 }, &flags));
            threads *= 2;
        }
        steps
    }

    fn items(&self, found: &Found) -> anyhow::Result<Vec<Item>> {
        Ok(vec![
            self.trade_off(found),
            self.samples(found),
            self.robustness(found),
            self.settings_table(found, "perspective", &PERSPECTIVE),
            self.settings_table(found, "l1", &L1),
            self.structure(found)?,
            self.run_time(found),
        ])
    }
}

impl Fashion {
    fn paper_steps(&self, penalty: &'static str, table: &'static [Setting]) -> impl Iterator<Item = String> {
        self.some(table).iter().map(move |s| Self::settings(penalty, s).0)
    }

    fn trade_off(&self, found: &Found) -> Item {
        let perspective = curve(found, self.paper_steps("perspective", &PERSPECTIVE), |s| drop(found, s));
        let l1 = curve(found, self.paper_steps("l1", &L1), |s| drop(found, s));
        let best = curve(found, self.some(&LEVELS).iter().map(|l| ours(*l)), |s| drop(found, s));
        let our_l1 = curve(found, self.some(&L1_LEVELS).iter().map(|l| ours_l1(*l)), |s| drop(found, s));
        let cyclic = curve(found, std::iter::once(CYCLIC.0.to_string()), |s| drop(found, s));
        let mut rows = Vec::new();
        for (name, curve) in [
            ("perspective, the paper's settings", &perspective),
            ("ℓ1, the paper's settings", &l1),
            ("ℓ1, our walk", &our_l1),
            ("ℓ1 with feedback, our walk", &cyclic),
            ("cardinality, our walk", &best),
        ] {
            rows.extend(curve.iter().map(|(x, y)| vec![name.to_string(), format!("{x:.1}"), points(Some(*y))]));
        }
        Item {
            id: "figure-2",
            title: "Figure 2: sparsity against accuracy drop",
            paper: "28 % fewer parameters without a drop (baseline 80 %), perspective ahead of ℓ1; accuracy above the \
                    baseline at 15 %. The curves have no table."
                .into(),
            finding: "The paper's settings are one convex solve on all connections in raw units, its objective as printed \
                      (perspective with μ = α, which breaks at |x| = 1 and is ℓ1 on A). Our walk: baseline connections, \
                      cascade, output-aware rows, refit; with feedback, all connections and κ = 0.8 in coordinates in which the baseline \
                      satisfies it. The baseline here has 87.98 %, not 80 %."
                .into(),
            head: vec!["method", "sparsity %", "accuracy, points"],
            rows,
            picture: Some(Picture::chart(&Chart {
                    x: "sparsity, %".into(),
                    y: "accuracy − baseline, points".into(),
                    series: vec![
                        Series::line("cardinality, our walk", best),
                        Series::points("perspective, the paper's settings", perspective),
                        Series::points("ℓ1, the paper's settings", l1),
                        Series::line("ℓ1, our walk", our_l1),
                        Series::points("ℓ1 with feedback, our walk", cyclic),
                    ],
                    level: Some((0.0, "baseline".into())),
                    log_x: false,
                    least_y: None,
                }, "Accuracy minus the baseline's against sparsity, method by method")),
        }
    }

    fn samples(&self, found: &Found) -> Item {
        let sparsity = |penalty: &str, m: usize| number(found, &by_samples(penalty, m), "sparsity");
        let rows = self
            .some(&SAMPLES)
            .iter()
            .map(|&m| {
                vec![
                    m.to_string(),
                    percent(sparsity("perspective", m)),
                    points(drop(found, &by_samples("perspective", m))),
                    percent(sparsity("l1", m)),
                    points(drop(found, &by_samples("l1", m))),
                    format!("{:.1}", 100.0 * (1.0 - ROWS * m as f64 / PARAMETERS)),
                ]
            })
            .collect();
        let line = |penalty: &str| {
            let all = self.some(&SAMPLES).iter();
            all.filter_map(|&m| Some((m as f64, 100.0 * sparsity(penalty, m)?))).collect::<Vec<_>>()
        };
        Item {
            id: "figure-3",
            title: "Figure 3: samples against sparsity",
            paper: "A dense model from about 2,000 samples, a sparse one from about 1,000; negative sparsity means more \
                    parameters than the baseline. The curves have no table."
                .into(),
            finding: "Full connectivity has (112 + 10)·(112 + 784) = 109,312 entries, twice the network's parameters, so \
                      sparsity starts negative as soon as the samples force weights to be used. The last column is what \
                      m non-zeros in every row would give: where the curve follows it, the number of samples decides and \
                      not the penalty."
                .into(),
            head: vec!["samples", "perspective: sparsity %", "points", "ℓ1: sparsity %", "points", "m non-zeros a row, %"],
            rows,
            picture: Some(Picture::chart(&Chart {
                    x: "samples".into(),
                    y: "sparsity, %".into(),
                    series: vec![Series::line("perspective", line("perspective")), Series::line("ℓ1", line("l1"))],
                    level: Some((0.0, "the network's parameters".into())),
                    log_x: true,
                    least_y: None,
                }, "Sparsity against the number of samples for both objectives")),
        }
    }

    fn robustness(&self, found: &Found) -> Item {
        let families = [
            ("cardinality, our walk", self.some(&LEVELS).iter().map(|l| ours(*l)).collect()),
            ("perspective, the paper's settings", self.paper_steps("perspective", &PERSPECTIVE).collect()),
            ("ℓ1, the paper's settings", self.paper_steps("l1", &L1).collect()),
            ("ℓ1, our walk", self.some(&L1_LEVELS).iter().map(|l| ours_l1(*l)).collect()),
            ("ℓ1 with feedback, our walk", vec![CYCLIC.0.to_string()]),
        ];
        under_attack(
            found,
            families.map(|(name, steps): (&str, Vec<String>)| (name.to_string(), steps)).to_vec(),
            "FGSM with the baseline's gradient on half of the pixels, ε = 1/255 and 2/255: ℓ1 is more robust than \
             perspective and than the baseline up to about 45 % sparsity."
                .into(),
            "A transferred attack fools the network it was made for most, so every other model looks sturdier; \
             docs/experiments/robustness.md has white-box attacks and certificates beside it."
                .into(),
        )
    }

    fn settings_table(&self, found: &Found, penalty: &'static str, table: &'static [Setting]) -> Item {
        let rows = self
            .some(table)
            .iter()
            .map(|s| {
                let (step, _) = Self::settings(penalty, s);
                let attacked = |k| attacked_accuracy(found, &step, k);
                vec![
                    s.samples.to_string(),
                    s.lambda.to_string(),
                    s.weight.to_string(),
                    format!("{}", s.sparsity),
                    percent(number(found, &step, "sparsity")),
                    format!("{:.1}", 100.0 * (1.0 - ROWS * s.samples as f64 / PARAMETERS)),
                    format!("{} / {}", s.attacked[0], s.attacked[1]),
                    format!("{} / {}", percent(attacked(0)), percent(attacked(1))),
                    points(drop(found, &step)),
                ]
            })
            .collect();
        let (id, title) = match penalty {
            "l1" => ("table-3", "Settings for ℓ1"),
            _ => ("table-2", "Settings for the perspective relaxation"),
        };
        Item {
            id,
            title,
            paper: "One row per model: samples, λ₁ = λ₂, weight of the penalty, sparsity, accuracy under both attacks."
                .into(),
            finding: if penalty == "l1" {
                "The sparsity column of the paper does not follow from its settings: fewer samples and a larger penalty both \
                 give fewer non-zeros, yet 500 samples with ten times the penalty are listed as less sparse (26 %) than \
                 1,000 (47 %). Open."
                    .into()
            } else {
                "At 100 and 200 samples the paper's sparsity is exactly the bound of m non-zeros a row (77 and 54 %): the \
                 number of samples decides, not the objective, which as printed loses its cardinality term and is a ridge."
                    .into()
            },
            head: vec![
                "samples",
                "λ",
                "weight",
                "paper: sparsity %",
                "ours %",
                "m non-zeros a row %",
                "paper: attacked %",
                "ours %",
                "clean, points",
            ],
            rows,
            picture: None,
        }
    }

    /// The model of about 30 % as in the paper's picture, next to the network and our default.
    fn structure(&self, found: &Found) -> anyhow::Result<Item> {
        let mut rows = Vec::new();
        let near = |target: f64| {
            let steps = self.paper_steps("l1", &L1).chain(self.paper_steps("perspective", &PERSPECTIVE));
            let distance = |s: &String| (number(found, s, "sparsity").unwrap_or(f64::INFINITY) - target).abs();
            steps.min_by(|a, b| distance(a).total_cmp(&distance(b)))
        };
        let named = [("network", Some("baseline".to_string())), ("the paper's settings, nearest to 30 %", near(0.3))];
        let own = self.some(&LEVELS).iter().map(|l| ("our walk", Some(ours(*l))));
        let cyclic = ("our walk with feedback", Some(CYCLIC.0.to_string()));
        let mut shown = Vec::new();
        for (what, step) in named.into_iter().chain([cyclic]).chain(own) {
            let Some(step) = step else { continue };
            let model = ImplicitModel::load(self.files.model(&step))?;
            let sparsity = model.sparsity();
            let found_rank = rank(model.a())?;
            let read: std::collections::BTreeSet<u32> = model.b().indices().iter().copied().collect();
            let n = model.shape().states;
            let feedback: usize = (0..n).map(|i| model.a().row(i).filter(|(j, _)| *j <= i).count()).sum();
            rows.push(vec![
                what.into(),
                format!("{:.1}", 100.0 * sparsity.sparsity),
                format!("{} of {n}", found_rank.rank),
                feedback.to_string(),
                (model.shape().inputs - read.len()).to_string(),
                format!("{:.3}", model.well_posedness().lambda_pf_upper),
            ]);
            if shown.len() < 4 {
                shown.push((format!("{what}: {:.1} % sparse", 100.0 * sparsity.sparsity), model));
            }
        }
        let alt = "Non-zeros of A, B, C and D of the network, of a model by the paper's settings and of two of ours";
        Ok(Item {
            id: "figure-5",
            title: "Figure 5: pattern and rank",
            paper: "A model with about 30 % fewer parameters: feedback below the diagonal of A, about 40 % of A's \
                    dimensions redundant, some columns of B zero."
                .into(),
            finding:
                "A top left, B top right, C and D below, states from the last layer to the first: below the diagonal of A is \
                 feedback. `simplicit report --model M --network F --out R.html` draws a model to zoom into; steps/ holds \
                 the models."
                    .into(),
            head: vec!["model", "sparsity %", "rank of A", "feedback weights", "pixels never read", "λ_pf ≤"],
            rows,
            picture: Some(Picture { svg: patterns(&shown, alt), alt: alt.into() }),
        })
    }

    fn run_time(&self, found: &Found) -> Item {
        let mut rows = Vec::new();
        let mut times = Vec::new();
        let mut threads = 1;
        while threads <= self.threads {
            let seconds = found.get(&format!("threads-{threads}")).and_then(|v| v["seconds"]["train"].as_f64());
            rows.push(vec![threads.to_string(), seconds.map_or("–".into(), |s| format!("{s:.2}"))]);
            times.extend(seconds.map(|s| (threads as f64, s)));
            threads *= 2;
        }
        Item {
            id: "figure-6",
            title: "Figure 6: serial against parallel",
            paper: "Serial, multiprocessing and Ray on 8 processors; multiprocessing is the fastest. The bars have no \
                    table."
                .into(),
            finding:
                "Threads of one process on the paper's problem (ℓ1, all 122 rows, set-up counted). Ray and Python's \
                      multiprocessing on the same problem are in docs/python.md."
                    .into(),
            head: vec!["threads", "seconds"],
            rows,
            picture: Some(Picture::chart(
                &Chart {
                    x: "threads".into(),
                    y: "seconds".into(),
                    series: vec![Series::line("all rows of the paper's problem", times)],
                    level: None,
                    log_x: false,
                    least_y: None,
                },
                "Seconds against threads",
            )),
        }
    }
}
