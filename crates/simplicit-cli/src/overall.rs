//! How much of a whole training is done and how long the rest will take: one bar for the training instead of one per
//! step.

use std::time::{Duration, Instant};

use simplicit::train::Progress;

/// Models that a search for a target usually fits per stage; further ones are added when they come.
const MODELS_PER_TARGET: f64 = 4.0;
/// Models that a search for the largest drop usually fits.
const MODELS_PER_DROP: f64 = 10.0;
/// Share of the bar that training takes; the rest is measuring and writing.
const TRAINING: f64 = 0.95;
/// No estimate is shown before this share of the work or this time.
const LEAST_SHARE: f64 = 0.02;
const LEAST_TIME: Duration = Duration::from_secs(1);

/// The properties of a training that its length depends on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Plan {
    /// Groups of rows in a model: layers, and the outputs.
    pub(crate) groups: usize,
    /// The target sparsity, where it is approached in stages.
    pub(crate) staged_target: Option<f64>,
    /// Whether a strength is searched for.
    pub(crate) searched: bool,
    pub(crate) max_drop: bool,
    /// Trainings after the first one.
    pub(crate) again: usize,
}

impl Plan {
    /// About how many models will be fitted.
    fn models(&self) -> f64 {
        // The first stage leaves 35 % of the non-zeros, and every further one about 60 % of what the one before left.
        let stages = self.staged_target.map_or(1.0, |target| 1.0 + ((1.0 - target) / 0.35).ln().min(0.0) / 0.6f64.ln());
        let per_stage = match (self.max_drop, self.searched) {
            (true, _) => MODELS_PER_DROP,
            (false, true) => MODELS_PER_TARGET,
            (false, false) => 1.0,
        };
        per_stage * stages.ceil() * (1 + self.again) as f64
    }
}

/// The progress of a whole training.
#[derive(Debug)]
pub(crate) struct Overall {
    groups: usize,
    expected: f64,
    models: usize,
    /// Groups of the current model whose rows are done, and the part of the group in work that is done.
    finished: Vec<String>,
    within: f64,
    share: f64,
    begun: Instant,
    /// For trainings that count their own work: the work done so far, and the pass in work with an estimate of the
    /// passes after it.
    counted: Option<Counted>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    behind: f64,
    pass: f64,
    left: f64,
    within: f64,
}

impl Overall {
    pub(crate) fn new(plan: Plan) -> Self {
        Self {
            groups: plan.groups.max(1),
            expected: plan.models(),
            models: 0,
            finished: Vec::new(),
            within: 0.0,
            share: 0.0,
            begun: Instant::now(),
            counted: None,
        }
    }

    /// The share of the whole that is done; it never falls.
    pub(crate) fn after(&mut self, progress: &Progress) -> f64 {
        let part = |done: usize, total: usize| done as f64 / total.max(1) as f64;
        match progress {
            Progress::Phase(_) => {}
            // Gathering statistics is taken to be half of a group's work.
            Progress::Samples { done, total, .. } => self.within = 0.5 * part(*done, *total),
            Progress::Rows { group, done, total } => {
                self.within = 0.5 + 0.5 * part(*done, *total);
                if done == total && !self.finished.contains(group) {
                    self.finished.push(group.clone());
                    self.within = 0.0;
                }
            }
            Progress::Model { .. } => {
                self.models += 1;
                // Once a model is fitted, the number of its groups is known.
                self.groups = self.finished.len().max(1);
                self.finished.clear();
                self.within = 0.0;
            }
            Progress::Pass { work, left } => {
                let before = self.counted.unwrap_or_default();
                self.counted =
                    Some(Counted { behind: before.behind + before.pass, pass: *work, left: *left, within: 0.0 });
            }
            Progress::Group { share } => {
                if let Some(counted) = &mut self.counted {
                    counted.within = *share;
                }
            }
            _ => {}
        }
        if let Some(Counted { behind, pass, left, within }) = self.counted {
            let share = (behind + within * pass) / (behind + pass + left).max(1.0);
            self.share = self.share.max(TRAINING * share.min(1.0));
            return self.share;
        }
        // A search that takes longer than expected is assumed to need about one more model.
        let expected = self.expected.max(self.models as f64 + f64::from(u8::from(!self.finished.is_empty())));
        let model = ((self.finished.len() as f64 + self.within) / self.groups as f64).min(1.0);
        let share = TRAINING * ((self.models as f64 + model) / expected).min(1.0);
        self.share = self.share.max(share);
        self.share
    }

    /// `about 12 s left`, as soon as enough of the work is done for an estimate.
    pub(crate) fn left(&self) -> String {
        left(self.share, self.begun.elapsed())
    }
}

/// The time that the rest would take at the speed so far.
fn left(share: f64, elapsed: Duration) -> String {
    if share < LEAST_SHARE || elapsed < LEAST_TIME {
        return String::new();
    }
    let seconds = elapsed.as_secs_f64() * (1.0 - share) / share;
    match seconds {
        s if s < 90.0 => format!("about {:.0} s left", s.max(1.0)),
        s if s < 5400.0 => format!("about {:.0} min left", s / 60.0),
        s => format!("about {:.1} h left", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_is_counted_decides_where_it_is() {
        let mut overall = Overall::new(Plan { groups: 9, searched: true, ..Plan::default() });
        assert_eq!(overall.after(&Progress::Pass { work: 10.0, left: 90.0 }), 0.0);
        assert!((overall.after(&Progress::Group { share: 0.5 }) - TRAINING * 0.05).abs() < 1e-12);
        // The rows of single groups then do not move the bar.
        assert!((overall.after(&rows("a", 8)) - TRAINING * 0.05).abs() < 1e-12);
        overall.after(&Progress::Pass { work: 70.0, left: 20.0 });
        assert!((overall.after(&Progress::Group { share: 1.0 }) - TRAINING * 0.8).abs() < 1e-12);
        // A pass was not needed, or one more than expected was: the bar never falls back.
        assert!((overall.after(&Progress::Pass { work: 70.0, left: 0.0 }) - TRAINING * 0.8).abs() < 1e-12);
        assert!((overall.after(&Progress::Group { share: 1.0 }) - TRAINING).abs() < 1e-12);
    }

    fn model() -> Progress {
        Progress::Model { strength: 1.0, sparsity: 0.5 }
    }

    fn rows(group: &str, done: usize) -> Progress {
        Progress::Rows { group: group.into(), done, total: 8 }
    }

    #[test]
    fn the_share_grows_to_the_end_of_training() {
        let mut overall = Overall::new(Plan { groups: 2, ..Plan::default() });
        let mut shares = vec![0.0];
        for event in [
            Progress::Samples { group: "a".into(), done: 4, total: 8 },
            rows("a", 4),
            rows("a", 8),
            rows("b", 8),
            model(),
        ] {
            shares.push(overall.after(&event));
        }
        assert!(shares.windows(2).all(|w| w[0] <= w[1]), "{shares:?}");
        assert!((shares[3] - 0.5 * TRAINING).abs() < 1e-12, "{shares:?}");
        assert!((shares[5] - TRAINING).abs() < 1e-12, "{shares:?}");
    }

    #[test]
    fn a_search_that_takes_longer_waits() {
        let plan = Plan { groups: 1, staged_target: Some(0.5), searched: true, ..Plan::default() };
        let mut overall = Overall::new(plan);
        let shares: Vec<f64> =
            (0..9).flat_map(|_| [rows("a", 8), model()]).map(|event| overall.after(&event)).collect();
        assert!(shares.windows(2).all(|w| w[0] <= w[1]) && shares[2] < 0.5 && shares[17] <= TRAINING, "{shares:?}");
        assert_eq!(Plan { staged_target: Some(0.9), searched: true, ..plan }.models(), 16.0);
    }

    #[test]
    fn time_left_in_words() {
        let minute = Duration::from_secs(60);
        assert_eq!(left(0.01, minute), "");
        assert_eq!(left(0.5, minute), "about 60 s left");
        assert_eq!(left(0.1, minute), "about 9 min left");
        assert_eq!(left(0.1, 60 * minute), "about 9.0 h left");
    }
}
