//! Branch and bound: the case with the lowest bound is split first; its parts start from its point and its diagonal.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::certificate::{Case, Certificate, Evidence, Place, Terms, Then};
use super::reduced::Reduced;
use super::relaxation::{Relaxation, Stop, Workspace};
use super::{PricedRow, ProveSettings, diagonal, incumbent};
use crate::Result;
use crate::linalg::{Cholesky, Matrix, dot};
use crate::parallel::Cancel;

/// Rounds that improve the diagonal of the whole problem, and the factor of the barrier from each to the next.
const ROOT_ROUNDS: usize = 14;
const BARRIER: f64 = 0.4;
/// The barrier of a case's diagonal, as a share of the gain per entry.
const CASE_BARRIER: f64 = 0.01;
/// Steps on the diagonal of a case.
const CASE_STEPS: usize = 2;
/// The diagonal on entries that are in, where it only absorbs rounding, as a share of 1/(G⁻¹)_jj.
const INSIDE: f64 = 1e-3;
/// In every case whose number is a multiple of this, a support is rounded from the relaxation.
const ROUNDING: usize = 16;
/// With up to this many open entries, a bound alone tries both scaled diagonals.
const FEW: usize = 200;
/// Relative gap of a relaxation.
const TOLERANCE: f64 = 1e-4;

/// The results of a search.
pub(super) struct Found {
    pub(super) best: f64,
    pub(super) weights: Vec<f64>,
    pub(super) certificate: Certificate,
}

/// A case that waits to be bounded.
struct Waiting {
    bound: f64,
    case: usize,
    places: Vec<Place>,
    point: Arc<Vec<f64>>,
    delta: Arc<Vec<f64>>,
    /// The number of its diagonal in the certificate.
    diagonal: usize,
}

/// The order of the cases: the lowest bound first, then the earliest case.
struct Order(f64, usize);

impl PartialEq for Order {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Order {}
impl PartialOrd for Order {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Order {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

/// A certificate of a single case, with the better of the two scaled diagonals.
pub(super) fn root(row: &PricedRow) -> Certificate {
    let mut search = Search::new(row);
    let places = row.places();
    match search.start(&places, &vec![0.0; row.features()], f64::INFINITY) {
        Some(start) => {
            search.certificate.diagonals.push(start.delta);
            let evidence = Evidence { diagonal: 0, point: start.point, fixed: Vec::new() };
            search.certificate.cases.push(Case { evidence: Some(evidence), then: Then::Ends });
        }
        None => search.certificate.cases.push(Case { evidence: None, then: Then::Ends }),
    }
    search.certificate
}

/// The scaled diagonals of a matrix that many rows share, verified once. They are valid for every row with the same
/// entries without a price, whichever entries it forbids.
pub struct Shared {
    gram: Arc<Matrix>,
    inside: Vec<usize>,
    diagonals: Vec<Arc<Vec<f64>>>,
}

impl Shared {
    /// The diagonals for this row and all rows like it.
    pub fn new(row: &PricedRow) -> Self {
        let mut search = Search::new(row);
        let place = |p: &f64| if *p == 0.0 { Place::In } else { Place::Open };
        let places: Vec<Place> = row.prices.iter().map(place).collect();
        let mut diagonals = Vec::new();
        if let Some(reduced) = Reduced::new(row, &places) {
            for delta in diagonal::scaled(&reduced.gram, &mut search.factor) {
                diagonals.extend(search.whole(&reduced, &delta));
            }
        }
        Self { gram: row.gram.clone(), inside: inside(row), diagonals }
    }

    /// Whether these diagonals are valid for a row.
    pub fn serves(&self, row: &PricedRow) -> bool {
        Arc::ptr_eq(&self.gram, &row.gram) && self.inside == inside(row)
    }

    /// A row's lower bound, rounded downwards; −∞ where there is none. The relaxation starts from an `answer`, which
    /// saves most of its rounds, and is solved only as accurately as the answer's `value` requires: up to that value,
    /// or to a small part of the distance from it.
    pub fn bound(&self, row: &PricedRow, answer: &[f64], value: f64) -> f64 {
        let places = row.places();
        let Some(reduced) = Reduced::new(row, &places) else { return f64::NEG_INFINITY };
        let mut search = Search::new(row);
        // With many entries the second diagonal is rarely better, and it costs as much as the first.
        let few = if reduced.open.len() > FEW { 1 } else { self.diagonals.len() };
        let bound = |delta: &Arc<Vec<f64>>| {
            let start = reduced.open.iter().map(|&j| answer[j]).collect();
            let (_, x) = search.relax(&reduced, delta, start, value);
            Terms::of(row, &places, delta, &reduced.lift(row, &x)).bound()
        };
        self.diagonals.iter().take(few).map(bound).fold(f64::NEG_INFINITY, f64::max)
    }
}

fn inside(row: &PricedRow) -> Vec<usize> {
    (0..row.features()).filter(|&j| row.prices[j] == 0.0).collect()
}

/// Implements [`PricedRow::prove`].
pub(super) fn search(
    row: &PricedRow,
    answer: &[f64],
    value: f64,
    settings: &ProveSettings,
    cancel: &Cancel,
) -> Result<Found> {
    let deadline = Instant::now() + Duration::from_secs_f64(settings.seconds.min(1e9));
    let mut search = Search::new(row);
    search.best = (value, answer.to_vec());
    search.tolerance = settings.tolerance;
    let places = row.places();
    let open = places.iter().filter(|p| **p == Place::Open).count();
    let enough = search.enough();
    let Some(start) = search.start(&places, answer, enough) else {
        search.certificate.cases.push(Case { evidence: None, then: Then::Ends });
        return Ok(search.found());
    };
    let start = search.improve_root(&places, start, deadline, cancel)?;
    let mut queue = BinaryHeap::new();
    let mut waiting: Vec<Option<Waiting>> = Vec::new();
    search.certificate.diagonals.push(start.delta.clone());
    search.certificate.cases.push(Case { evidence: None, then: Then::Ends });
    queue.push(Reverse(Order(start.bound, 0)));
    waiting.push(Some(Waiting {
        bound: start.bound,
        case: 0,
        places,
        point: Arc::new(start.point),
        delta: start.delta,
        diagonal: 0,
    }));
    let mut taken = 0;
    while let Some(Reverse(Order(bound, at))) = queue.pop() {
        cancel.check()?;
        let full = search.certificate.cases.len() + 2 > settings.cases || open > settings.largest;
        if taken > 0 && (full || bound >= search.enough() || Instant::now() >= deadline) {
            break;
        }
        let Some(case) = waiting[at].take() else { continue };
        for part in search.case(case, taken, full) {
            queue.push(Reverse(Order(part.bound, waiting.len())));
            waiting.push(Some(part));
        }
        taken += 1;
    }
    Ok(search.found())
}

/// The first bound of the whole problem.
struct Start {
    bound: f64,
    point: Vec<f64>,
    delta: Arc<Vec<f64>>,
}

struct Search<'a> {
    row: &'a PricedRow,
    workspace: Workspace,
    factor: Cholesky,
    best: (f64, Vec<f64>),
    tolerance: f64,
    certificate: Certificate,
}

impl<'a> Search<'a> {
    fn new(row: &'a PricedRow) -> Self {
        let d = row.features();
        Self {
            row,
            workspace: Workspace::new(d),
            factor: Cholesky::with_capacity(d),
            best: (f64::INFINITY, vec![0.0; d]),
            tolerance: 0.0,
            certificate: Certificate::default(),
        }
    }

    fn found(self) -> Found {
        Found { best: self.best.0, weights: self.best.1, certificate: self.certificate }
    }

    /// A case with at least this bound contains nothing better than the best answer; this includes a margin for the
    /// checker's rounding.
    fn enough(&self) -> f64 {
        self.best.0 - 0.5 * self.tolerance * self.best.0.abs()
    }

    /// Tries a support that the relaxation suggests, and keeps it if single moves make it the best so far.
    fn try_support(&mut self, reduced: &Reduced, relaxation: &Relaxation, x: &[f64]) {
        let likely = (0..x.len()).filter(|&j| relaxation.share(j, x[j]) > 0.5).map(|j| reduced.open[j]);
        let set: Vec<usize> = likely.chain(reduced.inside.iter().copied()).collect();
        if let Some((_, weights)) = incumbent::settle(self.row, set) {
            let value = self.row.value(&weights);
            if value < self.best.0 {
                self.best = (value, weights);
            }
        }
    }

    /// δ over all entries: slightly smaller on the open ones, small on those that are in. It is verified.
    fn whole(&mut self, reduced: &Reduced, delta: &[f64]) -> Option<Arc<Vec<f64>>> {
        let smallest = delta.iter().copied().fold(f64::INFINITY, f64::min);
        let smallest = if smallest.is_finite() { smallest } else { f64::EPSILON.sqrt() };
        let set: Vec<usize> = reduced.open.iter().chain(&reduced.inside).copied().collect();
        for (share, inside) in [(1.0 - 1e-6, INSIDE), (0.999, INSIDE), (0.99, 0.01 * INSIDE), (0.9, 1e-4 * INSIDE)] {
            let mut out = vec![0.0; self.row.features()];
            reduced.open.iter().zip(delta).for_each(|(&j, d)| out[j] = share * d);
            reduced.inside.iter().for_each(|&j| out[j] = inside * smallest);
            if diagonal::is_certain(&self.row.gram, &set, &out, &mut self.factor) {
                return Some(Arc::new(out));
            }
        }
        None
    }

    /// The better of the scaled diagonals, for the whole problem; relaxations start from `answer`.
    fn start(&mut self, places: &[Place], answer: &[f64], enough: f64) -> Option<Start> {
        let reduced = Reduced::new(self.row, places)?;
        if reduced.open.is_empty() {
            let delta = self.whole(&reduced, &[])?;
            return Some(Start { bound: reduced.constant, point: reduced.lift(self.row, &[]), delta });
        }
        let mut best: Option<Start> = None;
        for delta in diagonal::scaled(&reduced.gram, &mut self.factor) {
            let Some(delta) = self.whole(&reduced, &delta) else { continue };
            let first = reduced.open.iter().map(|&j| answer[j]).collect();
            let start = self.relax(&reduced, &delta, first, enough);
            if best.as_ref().is_none_or(|b| start.0 > b.bound) {
                best = Some(Start { bound: start.0, point: reduced.lift(self.row, &start.1), delta });
            }
        }
        best
    }

    fn relax(&mut self, reduced: &Reduced, delta: &[f64], mut x: Vec<f64>, enough: f64) -> (f64, Vec<f64>) {
        let delta: Vec<f64> = reduced.open.iter().map(|&j| delta[j]).collect();
        let relaxation = relaxation(reduced, &delta);
        let solved = relaxation.solve(&mut x, Stop { tolerance: TOLERANCE, enough }, &mut self.workspace);
        (solved.dual, x)
    }

    /// Improves the diagonal for the whole problem, as long as that raises the bound and time is left.
    fn improve_root(&mut self, places: &[Place], mut best: Start, deadline: Instant, cancel: &Cancel) -> Result<Start> {
        let Some(reduced) = Reduced::new(self.row, places).filter(|r| !r.open.is_empty()) else { return Ok(best) };
        let of = |full: &[f64]| reduced.open.iter().map(|&j| full[j]).collect::<Vec<f64>>();
        let mut delta = of(&best.delta);
        let mut x = of(&best.point);
        delta.iter_mut().for_each(|d| *d *= 0.99);
        let mut tau = None;
        for _ in 0..ROOT_ROUNDS {
            cancel.check()?;
            if best.bound >= self.enough() || Instant::now() >= deadline {
                break;
            }
            let gain = gains(&relaxation(&reduced, &delta), &x);
            let now = tau.unwrap_or_else(|| dot(&gain, &delta) / delta.len() as f64);
            let usable = now > 0.0 && now.is_finite();
            if !(usable && diagonal::improve(&reduced.gram, &mut delta, &gain, now, 2, &mut self.factor)) {
                break;
            }
            tau = Some(BARRIER * now);
            let Some(whole) = self.whole(&reduced, &delta) else { break };
            let enough = self.enough();
            let (bound, point) = self.relax(&reduced, &whole, x, enough);
            x = point;
            if bound > best.bound {
                best = Start { bound, point: reduced.lift(self.row, &x), delta: whole };
            }
        }
        let delta = of(&best.delta);
        self.try_support(&reduced, &relaxation(&reduced, &delta), &of(&best.point));
        Ok(best)
    }

    /// Bounds a case and records it; returns the cases that it is split into, if any.
    fn case(&mut self, case: Waiting, taken: usize, last: bool) -> Vec<Waiting> {
        let Waiting { case: at, mut places, point, mut delta, mut diagonal, bound: above, .. } = case;
        let Some(reduced) = Reduced::new(self.row, &places) else { return Vec::new() };
        let of = |full: &[f64]| reduced.open.iter().map(|&j| full[j]).collect::<Vec<f64>>();
        let enough = self.enough();
        let (mut bound, mut x) = self.relax(&reduced, &delta, of(&point), enough);
        if bound < enough && !reduced.open.is_empty() && at > 0 {
            let mut better = of(&delta);
            let gain = gains(&relaxation(&reduced, &better), &x);
            let tau = CASE_BARRIER * dot(&gain, &better) / better.len() as f64;
            if tau > 0.0
                && diagonal::improve(&reduced.gram, &mut better, &gain, tau, CASE_STEPS, &mut self.factor)
                && let Some(whole) = self.whole(&reduced, &better)
            {
                let (second, y) = self.relax(&reduced, &whole, x.clone(), enough);
                if second > bound {
                    (bound, x, delta) = (second, y, whole);
                    diagonal = self.certificate.diagonals.len();
                    self.certificate.diagonals.push(delta.clone());
                }
            }
        }
        let lifted = reduced.lift(self.row, &x);
        let open_delta = of(&delta);
        let relaxation = relaxation(&reduced, &open_delta);
        if reduced.open.is_empty() || taken.is_multiple_of(ROUNDING) {
            self.try_support(&reduced, &relaxation, &x);
        }
        let enough = self.enough();
        let mut evidence = Evidence { diagonal, point: lifted.clone(), fixed: Vec::new() };
        let mut then = Then::Ends;
        let mut parts = Vec::new();
        if bound < enough && !reduced.open.is_empty() && !last {
            let mut gx = vec![0.0; x.len()];
            relaxation.multiply(&x, &mut gx);
            for (k, &j) in reduced.open.iter().enumerate() {
                let excess = relaxation.excess(k, &x, &gx);
                if bound + excess.abs() >= enough {
                    evidence.fixed.push((j, excess > 0.0));
                    places[j] = if excess > 0.0 { Place::In } else { Place::Out };
                }
            }
            let is_open = |k: usize| places[reduced.open[k]] == Place::Open;
            let most = relaxation.split_at(&x, is_open, &mut self.workspace).or_else(|| {
                let half = (0..x.len()).filter(|&k| is_open(k)).map(|k| ((relaxation.share(k, x[k]) - 0.5).abs(), k));
                half.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, k)| k)
            });
            let bound = bound.max(above);
            let cases = &mut self.certificate.cases;
            let (point, first) = (Arc::new(lifted), cases.len());
            let mut waits = |case: usize, places: Vec<Place>| {
                cases.push(Case { evidence: None, then: Then::Ends });
                parts.push(Waiting { bound, case, places, point: point.clone(), delta: delta.clone(), diagonal });
            };
            if let Some(entry) = most.map(|k| reduced.open[k]) {
                let mut other = places.clone();
                places[entry] = Place::Out;
                other[entry] = Place::In;
                waits(first, places);
                waits(first + 1, other);
                then = Then::Splits { entry, without: first, with: first + 1 };
            } else {
                // Every entry is fixed, so one more case is needed, whose bound is its value.
                let mut other = places.clone();
                if let Some((j, _)) = evidence.fixed.pop() {
                    places[j] = Place::Out;
                    other[j] = Place::In;
                    waits(first, places);
                    waits(first + 1, other);
                    then = Then::Splits { entry: j, without: first, with: first + 1 };
                }
            }
        }
        self.certificate.cases[at] = Case { evidence: Some(evidence), then };
        parts
    }
}

fn relaxation<'b>(reduced: &'b Reduced, delta: &'b [f64]) -> Relaxation<'b> {
    let Reduced { gram, cross, constant, prices, .. } = reduced;
    Relaxation { gram, cross, constant: *constant, delta, prices }
}

/// ∂bound/∂δ_j = ½x_j²(1/t_j − 1), but at least a small number, because entries at zero gain as soon as they leave
/// it.
fn gains(relaxation: &Relaxation, x: &[f64]) -> Vec<f64> {
    let gain = |j: usize| {
        let share = relaxation.share(j, x[j]);
        if share > 0.0 { 0.5 * x[j] * x[j] * (1.0 / share - 1.0) } else { 0.0 }
    };
    let gains: Vec<f64> = (0..x.len()).map(gain).collect();
    let floor = 1e-2 * gains.iter().sum::<f64>() / gains.len().max(1) as f64;
    gains.into_iter().map(|g| g.max(floor)).collect()
}
