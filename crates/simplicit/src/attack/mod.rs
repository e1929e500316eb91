//! Attacks: inputs that are hardly changed and classified wrongly.
//!
//! The threat model: every value of an input may move by at most ε, in raw·scale units (before mean and std), or all
//! together by at most ε in the Euclidean norm, and stays in [0, 1]; `pixels` limits the attacker to a random share
//! of the values of every image. FGSM increases the cross-entropy along its exact gradient. PGD does so too and, from
//! further starts, increases differences of outputs. The gradient is that of the model itself (white box, through the
//! equilibrium) or that of the baseline (transfer, the paper's setting). The square search needs no gradient, so a
//! model cannot hide from it behind a masked gradient.
//!
//! Three orderings hold by construction, example by example: what fools a model at ε fools it at every larger ε (its
//! point is tried again), PGD starts at FGSM's point, and a white-box attack also tries the transferred point.

mod classifier;
mod gradient;
mod region;
mod square;

pub use classifier::Classifier;
use region::Region;
pub(crate) use region::limits;

use crate::arrays::PerFeature;
use crate::parallel::{self, Cancel, Threads};
use crate::states::InputSource;
use crate::{Error, Result};

/// Samples that are attacked together; the number has no influence on the result.
const BLOCK: usize = 64;

/// How a perturbation is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Norm {
    /// Every value changes by at most ε.
    #[default]
    Linf,
    /// The Euclidean length of the change is at most ε.
    L2,
}

impl std::fmt::Display for Norm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Norm::Linf => "linf",
            Norm::L2 => "l2",
        })
    }
}

/// The attacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    /// One step of size ε along the gradient: its sign, or its direction in the Euclidean norm.
    Fgsm,
    /// Projected steps of the same kind: from FGSM's point, then from random points, each of these towards one other
    /// class.
    Pgd,
    /// Random search over squares of extreme values; needs outputs only.
    Square,
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Method::Fgsm => "fgsm",
            Method::Pgd => "pgd",
            Method::Square => "square",
        })
    }
}

/// Whose gradient an attack follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gradient {
    /// The baseline's: a transferred attack.
    Baseline,
    /// The attacked model's own: white box.
    Model,
}

impl std::fmt::Display for Gradient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Gradient::Baseline => "baseline",
            Gradient::Model => "model",
        })
    }
}

/// What the attacker may do, and how much effort it makes.
#[derive(Debug, Clone, PartialEq)]
pub struct AttackSettings {
    /// Largest changes, in raw·scale units.
    pub epsilon: Vec<f64>,
    /// Default: all three.
    pub methods: Vec<Method>,
    /// Whose gradients FGSM and PGD follow. Default: the model's.
    pub gradients: Vec<Gradient>,
    /// Share of the values of a sample that may change, chosen at random per sample. Default 1.
    pub pixels: f64,
    /// PGD's first step in raw·scale units; the others shrink in proportion to those left. Default ε.
    pub step: Option<f64>,
    /// PGD's steps per start. Default 10.
    pub iterations: usize,
    /// PGD's starts: FGSM's point, then random ones, the k-th towards the class with the k-th largest output. Default 5.
    pub restarts: usize,
    /// Outputs the square search may ask for per ε. Default 300.
    pub queries: usize,
    /// Seed of masks, starts and squares. Default 0.
    pub seed: u64,
    /// How ε is measured. Default: every value on its own.
    pub norm: Norm,
}

impl Default for AttackSettings {
    fn default() -> Self {
        Self {
            epsilon: vec![1.0 / 255.0, 2.0 / 255.0],
            methods: vec![Method::Fgsm, Method::Pgd, Method::Square],
            gradients: vec![Gradient::Model],
            pixels: 1.0,
            step: None,
            iterations: 10,
            restarts: 5,
            queries: 300,
            seed: 0,
            norm: Norm::Linf,
        }
    }
}

impl AttackSettings {
    fn check(&self) -> Result<()> {
        check_epsilon(&self.epsilon)?;
        if self.methods.is_empty() || self.gradients.is_empty() {
            return Err(Error::setting("method and gradient", "at least one of each", "none"));
        }
        if !(self.pixels > 0.0 && self.pixels <= 1.0) {
            return Err(Error::setting("pixels", "a share above 0 and at most 1, such as 0.5", self.pixels));
        }
        if let Some(step) = self.step.filter(|step| !(*step > 0.0 && step.is_finite())) {
            return Err(Error::setting("step", "a positive number", step));
        }
        if let Some(step) = self.step.filter(|_| !self.methods.contains(&Method::Pgd)) {
            return Err(Error::setting("step", "none without PGD, the only method that takes steps of a size", step));
        }
        for (name, value) in [("iterations", self.iterations), ("restarts", self.restarts), ("queries", self.queries)] {
            if value == 0 {
                return Err(Error::setting(name, "at least 1", value));
            }
        }
        Ok(())
    }

    /// Transfer comes before white box, which also tries its points; FGSM comes before PGD for the same reason.
    fn attacks(&self) -> Vec<(Method, Option<Gradient>)> {
        let mut list: Vec<(Option<Gradient>, Method)> = Vec::new();
        for &method in &self.methods {
            match method {
                Method::Square => list.push((None, method)),
                _ => list.extend(self.gradients.iter().map(|&g| (Some(g), method))),
            }
        }
        list.sort_unstable_by_key(|&(gradient, method)| (gradient.is_none(), gradient, method));
        list.dedup();
        list.into_iter().map(|(gradient, method)| (method, gradient)).collect()
    }
}

/// Checks ε: at least one, and each a positive number.
pub(crate) fn check_epsilon(epsilon: &[f64]) -> Result<()> {
    if epsilon.is_empty() {
        return Err(Error::setting("epsilon", "at least one number, such as 1/255", "none"));
    }
    match epsilon.iter().find(|e| !(**e > 0.0 && e.is_finite())) {
        Some(bad) => Err(Error::setting("epsilon", "positive numbers, such as 1/255", bad)),
        None => Ok(()),
    }
}

/// The attacked model and the samples.
#[derive(Clone, Copy)]
pub struct AttackInput<'a> {
    /// The attacked model.
    pub target: &'a Classifier,
    /// The model whose gradients transferred attacks follow.
    pub baseline: Option<&'a Classifier>,
    /// The samples without changes, preprocessed.
    pub inputs: &'a dyn InputSource,
    /// The right class of every sample.
    pub labels: &'a [u32],
    /// The preprocessing, to measure ε and the range [0, 1] in raw·scale units.
    pub per_feature: &'a PerFeature,
    /// Axes of a sample, such as 28 × 28 or 3 × 32 × 32: the image that squares are placed on. With any other number
    /// of axes a sample is one line of values.
    pub sample_shape: &'a [usize],
}

/// One attack's result.
#[derive(Debug, Clone, PartialEq)]
pub struct Attack {
    /// The method.
    pub method: Method,
    /// The model whose gradient it follows; `None` for the square search.
    pub gradient: Option<Gradient>,
    /// Share of samples still classified correctly, one number for each ε in the order asked for.
    pub accuracy: Vec<f64>,
}

/// The results of all attacks.
#[derive(Debug, Clone, PartialEq)]
pub struct AttackReport {
    /// ε in the order asked.
    pub epsilon: Vec<f64>,
    /// Number of samples attacked.
    pub samples: usize,
    /// Share of samples classified correctly without any change.
    pub clean_accuracy: f64,
    /// Results of transferred attacks, then white-box ones, then the square search.
    pub attacks: Vec<Attack>,
    /// Share of samples that no attack fooled, one for each ε.
    pub attacked_accuracy: Vec<f64>,
    /// For every sample and ε (in the order asked for): whether some attack fooled it, or it was wrong to begin with.
    pub fooled: Vec<Vec<bool>>,
}

/// Runs every attack at every ε. The result depends on neither the number of threads nor the order of ε.
pub fn attack(
    input: &AttackInput,
    settings: &AttackSettings,
    threads: Threads,
    cancel: &Cancel,
    mut progress: impl FnMut(usize),
) -> Result<AttackReport> {
    settings.check()?;
    check_input(input, settings)?;
    let attacks = settings.attacks();
    let mut order: Vec<usize> = (0..settings.epsilon.len()).collect();
    order.sort_by(|&a, &b| settings.epsilon[a].total_cmp(&settings.epsilon[b]));
    let ascending: Vec<f64> = order.iter().map(|&k| settings.epsilon[k]).collect();
    let samples = input.inputs.samples();
    let mut clean = 0usize;
    // Number of samples fooled at each ε, ascending: for every attack, and last for any of them.
    let mut counts = vec![vec![0usize; ascending.len()]; attacks.len() + 1];
    let mut fooled = Vec::with_capacity(samples);
    parallel::fold(
        threads,
        samples.div_ceil(BLOCK),
        |block| {
            cancel.check()?;
            let range = block * BLOCK..((block + 1) * BLOCK).min(samples);
            attack_block(input, settings, &attacks, &ascending, range, cancel)
        },
        |_, outcome: Outcome| {
            for (s, &right) in outcome.right.iter().enumerate() {
                clean += usize::from(right);
                let firsts = outcome.first.iter().map(|first| first[s]);
                let any = firsts.clone().min().unwrap_or(usize::MAX);
                for (count, first) in counts.iter_mut().zip(firsts.chain([any])) {
                    // A sample that is fooled at one ε counts as fooled at every larger one; a sample that is wrong
                    // to begin with counts at every ε.
                    count.iter_mut().enumerate().for_each(|(e, c)| *c += usize::from(!right || first <= e));
                }
                let mut row = vec![false; ascending.len()];
                order.iter().enumerate().for_each(|(e, &k)| row[k] = !right || any <= e);
                fooled.push(row);
            }
            progress(fooled.len());
            Ok(())
        },
    )?;
    let share = |count: usize| count as f64 / samples.max(1) as f64;
    let asked = |count: &[usize]| {
        let mut out = vec![0.0; count.len()];
        order.iter().zip(count).for_each(|(&k, &c)| out[k] = share(samples - c));
        out
    };
    Ok(AttackReport {
        epsilon: settings.epsilon.clone(),
        samples,
        clean_accuracy: share(clean),
        attacks: attacks
            .iter()
            .zip(&counts)
            .map(|(&(method, gradient), count)| Attack { method, gradient, accuracy: asked(count) })
            .collect(),
        attacked_accuracy: asked(&counts[attacks.len()]),
        fooled,
    })
}

fn check_input(input: &AttackInput, settings: &AttackSettings) -> Result<()> {
    let samples = input.inputs.samples();
    if input.labels.len() != samples {
        return Err(Error::shape("labels", format!("{samples}, one for each input"), input.labels.len()));
    }
    if let Some(bad) = input.labels.iter().find(|l| **l as usize >= input.target.classes()) {
        return Err(Error::shape("labels", format!("classes below {}", input.target.classes()), bad));
    }
    let features = input.inputs.features();
    let mut sizes = vec![("the model", input.target.inputs()), ("the preprocessing", input.per_feature.std.len())];
    sizes.extend(input.baseline.map(|b| ("the baseline", b.inputs())));
    for (who, size) in sizes {
        if size != features {
            return Err(Error::shape(
                "inputs",
                format!("{size} values per sample for {who}"),
                format!("{features} values per sample"),
            ));
        }
    }
    match input.baseline {
        None if settings.gradients.contains(&Gradient::Baseline) => {
            Err(Error::setting("gradient", "a baseline to take the gradient from", "none"))
        }
        Some(baseline) if baseline.classes() != input.target.classes() => {
            Err(Error::shape("baseline", format!("{} outputs", input.target.classes()), baseline.classes()))
        }
        _ => Ok(()),
    }
}

/// The results for the samples of one block.
struct Outcome {
    /// Whether each sample is classified correctly without any change.
    right: Vec<bool>,
    /// For every attack, the position of the smallest ε that fooled each sample.
    first: Vec<Vec<usize>>,
}

fn attack_block(
    input: &AttackInput,
    settings: &AttackSettings,
    attacks: &[(Method, Option<Gradient>)],
    ascending: &[f64],
    range: std::ops::Range<usize>,
    cancel: &Cancel,
) -> Result<Outcome> {
    let u = input.inputs.rows(range.clone())?;
    u.require_finite("inputs", range.start)?;
    let labels = &input.labels[range.clone()];
    let wrong = classifier::fooled(&input.target.logits(&u)?, labels);
    let mut first = vec![vec![usize::MAX; u.rows()]; attacks.len()];
    for (e, &epsilon) in ascending.iter().enumerate() {
        let region = Region::of_block(
            &u,
            input.per_feature,
            (epsilon, settings.norm),
            settings.pixels,
            settings.seed,
            range.start,
        );
        for (k, &(method, gradient)) in attacks.iter().enumerate() {
            cancel.check()?;
            // A white-box attack tries the points that transfer found, and PGD those that FGSM found, which are its
            // first points.
            let weaker = attacks[..k].iter().enumerate().filter(|(_, (m, g))| g.is_some() && *m <= method);
            let weaker: Vec<usize> = weaker.map(|(j, _)| j).collect();
            if gradient.is_some() {
                for s in 0..u.rows() {
                    first[k][s] = weaker.iter().map(|&j| first[j][s]).fold(first[k][s], usize::min);
                }
            }
            let open: Vec<usize> = (0..u.rows()).filter(|&s| !wrong[s] && first[k][s] > e).collect();
            if open.is_empty() {
                continue;
            }
            let part = region.part(&u, labels, &open);
            let found = match (method, gradient) {
                (Method::Square, _) | (_, None) => {
                    square::search(input.target, &part, input.sample_shape, settings, range.start)?
                }
                (method, Some(gradient)) => {
                    let source = match gradient {
                        Gradient::Model => None,
                        Gradient::Baseline => input.baseline,
                    };
                    let steps = gradient::Steps::of(settings, method, epsilon, &input.per_feature.std, range.start);
                    gradient::search(input.target, source, &part, &steps)?
                }
            };
            for (&s, found) in open.iter().zip(found) {
                if found {
                    first[k][s] = e;
                }
            }
        }
    }
    Ok(Outcome { right: wrong.into_iter().map(|w| !w).collect(), first })
}

#[cfg(test)]
mod tests;
