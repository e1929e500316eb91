//! Models with cycles: acyclic stages as a sequence of Gemm and activation, every cycle as a Loop.

use super::OnnxSettings;
use super::activation::Precision;
use super::writer::{Writer, batch_of, constant_ints, floats, integer, node, scalar, scalar_value, value};
use crate::equilibrium::Schedule;
use crate::layout::Activation;
use crate::linalg::Csr;
use crate::model::{ImplicitModel, component_contraction};
use crate::onnx::proto::{AttributeProto, GraphProto, ValueInfoProto, attribute_type, data_type};
use crate::{Error, Result};

/// Writes a model without tap blocks, stage by stage; returns the graph's input.
pub(super) fn write(model: &ImplicitModel, settings: OnnxSettings, writer: &mut Writer) -> Result<ValueInfoProto> {
    let shape = model.shape();
    let mut graph = Graph { model, groups: Vec::new(), writer };
    let live = Schedule::read_by_outputs(model.a(), model.c());
    let activations = model.layout().activations();
    for (s, stage) in Schedule::new(model.a(), |i| live[i]).stages.into_iter().enumerate() {
        if stage.cyclic {
            graph.cycle(s, stage.units, &activations, settings)?;
        } else {
            let mut rest = stage.units;
            let mut part = 0;
            while let Some(&first) = rest.first() {
                // One group per activation.
                let (same, other) = rest.iter().partition(|&&i| activations[i] == activations[first]);
                rest = other;
                graph.group(&format!("s{s}_{part}"), same, activations[first]);
                part += 1;
            }
        }
    }
    let rows: Vec<usize> = (0..shape.outputs).collect();
    let last = graph.pre_activation("out", &rows, model.c(), model.d(), model.output_bias());
    graph.writer.make("Identity", &[&last], "y", vec![]);
    Ok(value("u", &[shape.inputs]))
}

/// States that form one tensor of the graph.
struct Group {
    tensor: String,
    units: Vec<usize>,
}

struct Graph<'a> {
    model: &'a ImplicitModel,
    groups: Vec<Group>,
    writer: &'a mut Writer,
}

impl Graph<'_> {
    /// The part of `m` with these rows and columns as an initialiser, or `None` if it is zero.
    fn block(&mut self, name: &str, m: &Csr<f32>, rows: &[usize], columns: &[usize]) -> Option<String> {
        let mut place = vec![usize::MAX; m.cols()];
        columns.iter().enumerate().for_each(|(k, &j)| place[j] = k);
        let mut values = vec![0.0f32; rows.len() * columns.len()];
        let mut any = false;
        for (row, &i) in rows.iter().enumerate() {
            for (j, v) in m.row(i).filter(|(j, _)| place[*j] != usize::MAX) {
                values[row * columns.len() + place[j]] = v;
                any = true;
            }
        }
        any.then(|| {
            self.writer.initialisers.push(floats(name, &[rows.len(), columns.len()], &values));
            name.to_string()
        })
    }

    /// Σ over everything that is read, plus the bias; returns the name of a tensor of batch × rows.
    fn pre_activation(
        &mut self,
        name: &str,
        rows: &[usize],
        states: &Csr<f32>,
        inputs: &Csr<f32>,
        bias: &[f32],
    ) -> String {
        let bias: Vec<f32> = rows.iter().map(|&i| bias[i]).collect();
        let all: Vec<usize> = (0..inputs.cols()).collect();
        let mut sources = Vec::new();
        if let Some(w) = self.block(&format!("{name}_u"), inputs, rows, &all) {
            sources.push(("u".to_string(), w));
        }
        for k in 0..self.groups.len() {
            let units = self.groups[k].units.clone();
            if let Some(w) = self.block(&format!("{name}_{}", self.groups[k].tensor), states, rows, &units) {
                sources.push((self.groups[k].tensor.clone(), w));
            }
        }
        if sources.is_empty() {
            // There is only the bias, but the size of the batch still has to come from some value.
            let zero = format!("{name}_u");
            self.writer.initialisers.push(floats(
                &zero,
                &[rows.len(), inputs.cols()],
                &vec![0.0; rows.len() * inputs.cols()],
            ));
            sources.push(("u".to_string(), zero));
        }
        let mut sum = String::new();
        for (k, (tensor, weights)) in sources.into_iter().enumerate() {
            let term = format!("{name}_t{k}");
            let transposed = vec![integer("transB", 1)];
            if k == 0 {
                let b = format!("{name}_b");
                self.writer.initialisers.push(floats(&b, &[rows.len()], &bias));
                self.writer.make("Gemm", &[&tensor, &weights, &b], &term, transposed);
                sum = term;
            } else {
                self.writer.make("Gemm", &[&tensor, &weights], &term, transposed);
                let next = format!("{name}_s{k}");
                self.writer.make("Add", &[&sum, &term], &next, vec![]);
                sum = next;
            }
        }
        sum
    }

    fn group(&mut self, name: &str, units: Vec<usize>, activation: Activation) {
        let model = self.model;
        let z = self.pre_activation(name, &units, model.a(), model.b(), model.state_bias());
        let x = format!("{name}_x");
        let nodes = self.writer.activation(activation, Precision::Single, &z, &x);
        self.writer.nodes.extend(nodes);
        self.groups.push(Group { tensor: x, units });
    }

    /// A Loop that carries x: z = A x + w, x′ = φ(z), until max |x′ − x| is small enough.
    fn cycle(
        &mut self,
        s: usize,
        mut units: Vec<usize>,
        activations: &[Activation],
        settings: OnnxSettings,
    ) -> Result<()> {
        let model = self.model;
        let name = format!("s{s}");
        let mut kinds: Vec<Activation> = Vec::new();
        for &i in &units {
            if !kinds.contains(&activations[i]) {
                kinds.push(activations[i]);
            }
        }
        units.sort_by_key(|&i| kinds.iter().position(|k| *k == activations[i]));
        let mut place = vec![usize::MAX; model.shape().states];
        units.iter().enumerate().for_each(|(k, &i)| place[i] = k);
        let contraction = component_contraction(model.a(), &units, &place);
        if contraction.rho >= 1.0 {
            return Err(Error::unsupported(
                format!("export of a cycle of {} states", units.len()),
                format!("its contraction cannot be shown (λ_pf ≤ {:.4}); rescale or train with kappa", contraction.rho),
            ));
        }
        // The step size at which the certificate reaches the tolerance, from the bound on a Picard step.
        let (small, large) =
            contraction.scaling.iter().fold((f64::INFINITY, 0.0f64), |(a, b), s| (a.min(*s), b.max(*s)));
        let step = settings.tolerance * (1.0 - contraction.rho) / contraction.rho.max(1e-3) * small / large;
        let w = self.pre_activation(&name, &units, model.a(), model.b(), model.state_bias());
        let n = |part: &str| format!("{name}_{part}");
        self.block(&n("a"), model.a(), &units, &units);
        let to = |kind: i32| vec![integer("to", i64::from(kind))];
        self.writer.make("Cast", &[&w], &n("w64"), to(data_type::DOUBLE));
        self.writer.make("Cast", &[&n("a")], &n("a64"), to(data_type::DOUBLE));
        self.writer.make("Sub", &[&n("w64"), &n("w64")], &n("start"), vec![]);
        self.writer.initialisers.push(scalar(
            &n("limit"),
            data_type::INT64,
            &(settings.max_iterations as i64).to_le_bytes(),
        ));
        self.writer.initialisers.push(scalar(&n("go"), data_type::BOOL, &[1]));
        self.writer.initialisers.push(scalar(&n("step"), data_type::DOUBLE, &step.to_le_bytes()));
        let mut body = vec![node("Gemm", &[&n("in"), &n("a64"), &n("w64")], &n("z"), vec![integer("transB", 1)])];
        let mut pieces = Vec::new();
        let mut sizes: Vec<i64> = Vec::new();
        for kind in &kinds {
            sizes.push(units.iter().filter(|&&i| activations[i] == *kind).count() as i64);
        }
        self.writer.initialisers.push(constant_ints(&n("sizes"), &sizes));
        let parts: Vec<String> = (0..kinds.len()).map(|k| n(&format!("z{k}"))).collect();
        let mut split = node("Split", &[&n("z"), &n("sizes")], "", vec![integer("axis", 1)]);
        split.output = parts.clone();
        body.push(split);
        for (k, kind) in kinds.iter().enumerate() {
            let x = n(&format!("x{k}"));
            body.extend(self.writer.activation(*kind, Precision::Double, &parts[k], &x));
            pieces.push(x);
        }
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        body.push(node("Concat", &pieces, &n("next"), vec![integer("axis", 1)]));
        body.push(node("Sub", &[&n("next"), &n("in")], &n("moved"), vec![]));
        body.push(node("Abs", &[&n("moved")], &n("size"), vec![]));
        body.push(node("ReduceMax", &[&n("size")], &n("largest"), vec![integer("keepdims", 0)]));
        body.push(node("Greater", &[&n("largest"), &n("step")], &n("again"), vec![]));
        let body = GraphProto {
            name: n("body"),
            node: body,
            input: vec![
                scalar_value(&n("count"), data_type::INT64),
                scalar_value(&n("running"), data_type::BOOL),
                batch_of(&n("in"), data_type::DOUBLE, &[units.len()]),
            ],
            output: vec![
                scalar_value(&n("again"), data_type::BOOL),
                batch_of(&n("next"), data_type::DOUBLE, &[units.len()]),
            ],
            ..Default::default()
        };
        let body = AttributeProto {
            name: "body".into(),
            g: Some(body),
            kind: Some(attribute_type::GRAPH),
            ..Default::default()
        };
        self.writer.make("Loop", &[&n("limit"), &n("go"), &n("start")], &n("x64"), vec![body]);
        self.writer.make("Cast", &[&n("x64")], &n("x"), to(data_type::FLOAT));
        self.groups.push(Group { tensor: n("x"), units });
        Ok(())
    }
}
