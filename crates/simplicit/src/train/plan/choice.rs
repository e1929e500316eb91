//! The choice of layers that are trained, by name or kind. All other layers keep the baseline's weights, to the bit.

use crate::model::{ImplicitModel, OUTPUT, TapWeights, Target};
use crate::problem::Connectivity;
use crate::train::{TrainInput, TrainSettings};
use crate::{Error, Result};

/// Number of names that an error gives as examples.
const EXAMPLES: usize = 8;

/// Layers with weights, from first to last, then the outputs; each with its name and kinds.
struct Choosable<'a> {
    target: Target,
    name: &'a str,
    kinds: Vec<&'static str>,
}

/// An error if a choice of layers matches nothing, or leaves more non-zeros than a target allows.
pub(in crate::train) fn check(input: &TrainInput, settings: &TrainSettings) -> Result<()> {
    if settings.allowed.include.is_empty() && settings.allowed.exclude.is_empty() {
        return Ok(());
    }
    let what = "include, exclude";
    if !matches!(settings.allowed.connectivity, Connectivity::Baseline | Connectivity::Feedforward) {
        let expected = "connectivity baseline or feedforward, whose layers are solved one by one";
        return Err(Error::setting(what, expected, "another"));
    }
    if let Some(kappa) = settings.allowed.kappa {
        return Err(Error::setting("kappa", "none with layers that keep their weights: it cannot limit these", kappa));
    }
    if settings.model.robust_rounds > 0 {
        let expected = "none with layers that keep their weights, which have no price";
        return Err(Error::setting("robust", expected, settings.model.robust_rounds));
    }
    let kept = kept(input, settings)?;
    let Some((target, baseline)) = settings.target_sparsity.zip(input.baseline) else { return Ok(()) };
    let mut parts = baseline.clone().into_parts();
    parts.metadata.kept = names(baseline, &kept);
    let count = ImplicitModel::new(parts)?.sparsity();
    let most = 1.0 - count.fixed as f64 / count.baseline_nonzeros.max(1) as f64;
    if target >= most {
        let expected = format!("less than {most:.4}: {} parameters stay with the layers left out", count.fixed);
        return Err(Error::setting("target-sparsity", expected, target));
    }
    Ok(())
}

/// The layers that keep their weights, or the outputs.
pub(in crate::train) fn kept(input: &TrainInput, settings: &TrainSettings) -> Result<Vec<Target>> {
    if settings.allowed.include.is_empty() && settings.allowed.exclude.is_empty() {
        return Ok(Vec::new());
    }
    let Some(baseline) = input.baseline else {
        return Err(Error::setting("include, exclude", "a network or a model, whose weights are kept", "states"));
    };
    let layers = choosable(baseline);
    let any = |patterns: &[String], layer: &Choosable| patterns.iter().any(|pattern| matches(pattern, layer));
    for (what, patterns) in [("include", &settings.allowed.include), ("exclude", &settings.allowed.exclude)] {
        for pattern in patterns {
            if !layers.iter().any(|layer| matches(pattern, layer)) {
                let examples: Vec<&str> = layers.iter().take(EXAMPLES).map(|layer| layer.name).collect();
                let expected = format!("names or kinds of layers with weights, such as {}", examples.join(", "));
                return Err(Error::setting(what, expected, format!("{pattern:?}, which matches no layer")));
            }
        }
    }
    let trained = |layer: &Choosable| {
        (settings.allowed.include.is_empty() || any(&settings.allowed.include, layer))
            && !any(&settings.allowed.exclude, layer)
    };
    if !layers.iter().any(trained) {
        return Err(Error::setting("include, exclude", "at least one layer to train", "none"));
    }
    Ok(layers.iter().filter(|layer| !trained(layer)).map(|layer| layer.target).collect())
}

/// Their names in a model's file.
pub(in crate::train) fn names(baseline: &ImplicitModel, kept: &[Target]) -> Vec<String> {
    let name = |target: &Target| match target {
        Target::Layer(k) => baseline.layout().layers()[*k].name.clone(),
        Target::Output => OUTPUT.to_string(),
    };
    kept.iter().map(name).collect()
}

fn choosable(baseline: &ImplicitModel) -> Vec<Choosable<'_>> {
    let layout = baseline.layout();
    let layers = (0..layout.layers().len()).rev().map(|k| (Target::Layer(k), layout.layers()[k].name.as_str()));
    let all = layers.chain([(Target::Output, OUTPUT)]).map(|(target, name)| {
        let (from_states, from_inputs, rows) = match target {
            Target::Layer(k) => (baseline.a(), baseline.b(), layout.range(k)),
            Target::Output => (baseline.c(), baseline.d(), 0..baseline.shape().outputs),
        };
        let any = [from_states, from_inputs].iter().any(|m| m.indptr()[rows.end] > m.indptr()[rows.start]);
        // A dense layer that has lost all of its weights during training is still a dense layer.
        let dense = any || baseline.taps().is_empty() && !layout.has_operators();
        let mut kinds: Vec<&'static str> = dense.then_some("dense").into_iter().collect();
        for block in baseline.taps().iter().filter(|b| b.target == target) {
            if let TapWeights::Taps(_) = block.weights {
                kinds.push(if block.groups > 1 { "grouped convolution" } else { "convolution" });
            }
        }
        Choosable { target, name, kinds }
    });
    all.filter(|layer| !layer.kinds.is_empty()).collect()
}

/// A pattern names a layer, everything below a name, or a kind.
fn matches(pattern: &str, layer: &Choosable) -> bool {
    let below = layer.name.strip_prefix(pattern).is_some_and(|rest| rest.starts_with(['.', '/']));
    below || glob(pattern.as_bytes(), layer.name.as_bytes()) || layer.kinds.contains(&pattern)
}

/// `*` stands for any characters, `?` for one.
fn glob(pattern: &[u8], name: &[u8]) -> bool {
    // The place of the last star in the pattern, and how much of the name it has matched.
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == name[n] => (p, n) = (p + 1, n + 1),
            _ => {
                let Some((at, taken)) = star else { return false };
                star = Some((at, taken + 1));
                (p, n) = (at + 1, taken + 1);
            }
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_names_what_is_below_them_and_kinds() {
        let layer = |name| Choosable { target: Target::Output, name, kinds: vec!["dense"] };
        for (pattern, name, expected) in [
            ("/layer1", "/layer1/relu/Relu", true),
            ("/layer1", "/layer10/relu/Relu", false),
            ("layer1", "layer1.0.conv", true),
            ("*relu*", "/layer1/relu/Relu", true),
            ("/*/relu/Relu", "/layer1/relu/Relu", true),
            ("*.conv?", "layer1.0.conv2", true),
            ("*.conv?", "layer1.0.conv", false),
            ("*", "", true),
            ("", "a", false),
            ("a*b*c", "aXbYbc", true),
            ("a*b*c", "aXbYbd", false),
            ("dense", "anything", true),
            ("convolution", "anything", false),
        ] {
            assert_eq!(matches(pattern, &layer(name)), expected, "{pattern:?} on {name:?}");
        }
    }
}
