//! Einstein sums: products of two values over the letters that they share, one product after the other.

use super::constant::broadcast;
use super::import::{Importer, Value};
use super::nodes::Inputs;
use super::proto::NodeProto;
use crate::graph::{Binary, Reduction, Structure};
use crate::{Error, Result};

/// A letter, or an axis of the ellipsis counted from its last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    Ellipsis(std::cmp::Reverse<usize>),
    Letter(char),
}

/// A value and the label of each of its axes.
struct Labelled {
    value: Value,
    labels: Vec<Label>,
}

/// The labels of one operand or of the result; `rank` is the number of axes including those of the ellipsis, where it
/// is known.
fn labels(text: &str, rank: Option<usize>, ellipsis: usize) -> Option<Vec<Label>> {
    let letters = |text: &str| {
        let each = text.chars().map(|c| c.is_ascii_alphabetic().then_some(Label::Letter(c)));
        each.collect::<Option<Vec<Label>>>()
    };
    let Some((front, back)) = text.split_once("...") else {
        return letters(text).filter(|l| rank.is_none_or(|rank| l.len() == rank));
    };
    let (front, back) = (letters(front)?, letters(back)?);
    let open = rank.map_or(Some(ellipsis), |rank| rank.checked_sub(front.len() + back.len()))?;
    Some(front.into_iter().chain((0..open).rev().map(|k| Label::Ellipsis(std::cmp::Reverse(k)))).chain(back).collect())
}

/// The labels of all operands and of the result.
fn parsed(equation: &str, ranks: &[usize]) -> Option<(Vec<Vec<Label>>, Vec<Label>)> {
    let equation: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left, Some(right)),
        None => (equation.as_str(), None),
    };
    let terms: Vec<&str> = left.split(',').collect();
    if terms.len() != ranks.len() {
        return None;
    }
    let operands = terms.iter().zip(ranks).map(|(term, &rank)| labels(term, Some(rank), 0));
    let operands = operands.collect::<Option<Vec<_>>>()?;
    let mut all: Vec<Label> = operands.concat();
    all.sort_unstable();
    let open = all.iter().filter_map(|l| if let Label::Ellipsis(k) = l { Some(k.0 + 1) } else { None }).max();
    let result = match right {
        Some(text) => labels(text, None, open.unwrap_or(0))?,
        // The axes of the ellipsis, then the labels that occur once, in alphabetical order.
        None => {
            let once = |l: &Label| all.iter().filter(|other| *other == l).count() == 1;
            let mut result: Vec<Label> =
                all.iter().copied().filter(|l| !matches!(l, Label::Letter(_)) || once(l)).collect();
            result.dedup();
            result
        }
    };
    result.iter().all(|l| all.contains(l)).then_some((operands, result))
}

/// The axes of weights in the order of a dense layer, the units first, if the sum is a dense layer.
fn dense_order(x: &[Label], weights: &[Label], result: &[Label]) -> Option<Vec<usize>> {
    let unit = weights.iter().position(|l| !x.contains(l))?;
    let over: Vec<Label> = x.iter().copied().filter(|l| !result.contains(l)).collect();
    let all_summed = weights.len() == over.len() + 1 && over.iter().all(|l| weights.contains(l));
    if !all_summed || result.last() != Some(&weights[unit]) {
        return None;
    }
    let summed = over.iter().filter_map(|l| weights.iter().position(|own| own == l));
    Some(std::iter::once(unit).chain(summed).collect())
}

impl Importer<'_> {
    pub(super) fn einsum(&mut self, node: &NodeProto, inputs: &Inputs<'_>) -> Result<Value> {
        let equation = node.text("equation", "");
        let values = inputs.all()?;
        let ranks: Vec<usize> = values.iter().map(|v| self.dims(v).len()).collect();
        let (operands, result) = parsed(equation, &ranks)
            .ok_or_else(|| Error::shape("equation", format!("letters for axes {ranks:?}"), format!("{equation:?}")))?;
        for letters in operands.iter().chain([&result]) {
            if (1..letters.len()).any(|k| letters[..k].contains(&letters[k])) {
                return Err(Error::unsupported(
                    format!("the diagonal that {equation:?} takes"),
                    "a letter may occur once in every operand; replace the layer in the network",
                ));
            }
        }
        // Weights after a single value, with one axis that is the last of the result, are a dense layer.
        self.turned = match (&values[..], &operands[..]) {
            ([Value::Node(_), Value::Constant(..)], [x, w]) => dense_order(x, w, &result),
            _ => None,
        };
        let mut terms = values.into_iter().zip(operands).map(|(value, labels)| Labelled { value, labels });
        let Some(mut out) = terms.next() else {
            return Err(Error::shape("Einsum", "at least one value", "none"));
        };
        let mut rest: Vec<Labelled> = terms.collect();
        rest.reverse();
        while let Some(next) = rest.pop() {
            let kept = |l: &Label| result.contains(l) || rest.iter().any(|term| term.labels.contains(l));
            out = self.contracted(out, next, kept)?;
        }
        out = self.summed(out, |l| result.contains(l))?;
        self.ordered(out, &result).map(|out| out.value)
    }

    /// Sums over the labels that are not kept.
    fn summed(&mut self, term: Labelled, kept: impl Fn(&Label) -> bool) -> Result<Labelled> {
        let axes: Vec<usize> = (0..term.labels.len()).filter(|&k| !kept(&term.labels[k])).collect();
        if axes.is_empty() {
            return Ok(term);
        }
        let labels = term.labels.iter().copied().filter(kept).collect();
        let reduce = Structure::Reduce { reduction: Reduction::Sum, axes, keep: false };
        Ok(Labelled { value: self.structure(reduce, &[term.value])?, labels })
    }

    /// The axes in this order.
    fn ordered(&mut self, term: Labelled, labels: &[Label]) -> Result<Labelled> {
        let order: Vec<usize> = labels.iter().filter_map(|l| term.labels.iter().position(|own| own == l)).collect();
        let value = if order.is_sorted() { term.value } else { self.transpose(&term.value, &order)? };
        Ok(Labelled { value, labels: labels.to_vec() })
    }

    /// The product of two values, summed over the labels of both that are not kept.
    fn contracted(&mut self, a: Labelled, b: Labelled, kept: impl Fn(&Label) -> bool) -> Result<Labelled> {
        let a = self.summed(a, |l| kept(l) || b.labels.contains(l))?;
        let b = self.summed(b, |l| kept(l) || a.labels.contains(l))?;
        // Weights come after the values that they multiply, as in a dense layer.
        let (a, b) = if matches!(a.value, Value::Constant(..)) { (b, a) } else { (a, b) };
        let of = |x: &[Label], f: &dyn Fn(&Label) -> bool| x.iter().copied().filter(|l| f(l)).collect::<Vec<_>>();
        let both = of(&a.labels, &|l| b.labels.contains(l) && kept(l));
        let over = of(&a.labels, &|l| b.labels.contains(l) && !kept(l));
        let left = of(&a.labels, &|l| !b.labels.contains(l));
        let right = of(&b.labels, &|l| !a.labels.contains(l));
        let (x, y) = (
            self.ordered(a, &[&both[..], &left, &over].concat())?,
            self.ordered(b, &[&both[..], &over, &right].concat())?,
        );
        let (own, other) = (self.dims(&x.value), self.dims(&y.value));
        let (n, m) = (both.len(), both.len() + left.len());
        // Axes of size one are repeated.
        let batch = broadcast(&own[..n], &other[..n])?;
        let depth = broadcast(&own[m..], &other[n..n + over.len()])?;
        let (rows, columns) = (own[n..m].to_vec(), other[n + over.len()..].to_vec());
        let x = self.expand(&x.value, &[&batch[..], &rows, &depth].concat())?;
        let y = self.expand(&y.value, &[&batch[..], &depth, &columns].concat())?;
        let labels = [&both[..], &left, &right].concat();
        let dims = [&batch[..], &rows, &columns].concat();
        let count = |sizes: &[usize]| sizes.iter().product::<usize>();
        let value = if over.is_empty() && right.is_empty() {
            let y = self.reshape(&y, &[&batch[..], &vec![1; rows.len()]].concat())?;
            self.binary(Binary::Multiply, &x, &y)?
        } else {
            // A dense layer reads any number of axes; a product of two values reads two, besides those that both
            // have.
            let front = if self.turned.is_some() { rows } else { [&batch[..], &[count(&rows)]].concat() };
            let x = self.reshape(&x, &[&front[..], &[count(&depth)]].concat())?;
            let y = self.reshape(&y, &[&batch[..], &[count(&depth), count(&columns)]].concat())?;
            let product =
                if self.turned.is_some() { self.product(&x, &y)? } else { self.structure(Structure::MatMul, &[x, y])? };
            self.reshape(&product, &dims)?
        };
        Ok(Labelled { value, labels })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equations_are_read_as_numpy_does() {
        let letter = |text: &str| text.chars().map(Label::Letter).collect::<Vec<_>>();
        let open = |k: usize| Label::Ellipsis(std::cmp::Reverse(k));
        let (operands, result) = parsed("bij, bjk -> bik", &[3, 3]).unwrap();
        assert_eq!((operands, result), (vec![letter("bij"), letter("bjk")], letter("bik")));
        // Without a result: the labels that occur once, in alphabetical order.
        assert_eq!(parsed("kj,ji", &[2, 2]).unwrap().1, letter("ik"));
        // The ellipsis is aligned from its last axis.
        let (operands, result) = parsed("...i,...i", &[3, 2]).unwrap();
        assert_eq!(operands, [[open(1), open(0), Label::Letter('i')].to_vec(), [open(0), Label::Letter('i')].to_vec()]);
        assert_eq!(result, [open(1), open(0)]);
        for (wrong, ranks) in [("ij,jk->ik", &[2][..]), ("ij->ik", &[2]), ("i1->i", &[2]), ("ijk->i", &[2]), ("", &[1])]
        {
            assert_eq!(parsed(wrong, ranks), None, "{wrong}");
        }
    }
}
