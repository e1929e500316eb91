//! Allocates the places of a workspace.

use super::plan::View;
use crate::layout::MapShape;
use crate::network::Source;

/// The places of a workspace, which can be taken and given back.
#[derive(Default)]
pub(super) struct Places {
    lanes: usize,
    apart: bool,
    end: usize,
    free: Vec<(MapShape, [usize; 4], View)>,
    taken: Vec<(MapShape, [usize; 4], View)>,
    returned: Vec<Source>,
}

impl Places {
    /// For this many samples; if `apart`, all values of a sample lie side by side.
    pub(super) fn new(lanes: usize, apart: bool) -> Self {
        Self { lanes, apart, ..Default::default() }
    }

    /// Number of positions in use so far.
    pub(super) fn end(&self) -> usize {
        self.end
    }

    pub(super) fn take(&mut self, map: MapShape, margin: [usize; 4]) -> View {
        let found = self.free.iter().position(|(m, g, _)| (*m, *g) == (map, margin));
        let entry = match found {
            Some(k) => self.free.swap_remove(k),
            None => {
                // Places start at whole cache lines, whatever the number of lanes.
                let start = self.end.next_multiple_of(16);
                let view = View { apart: self.apart, ..View::new(map, margin, start, self.lanes) };
                self.end = start + view.channel * map.channels.max(1) + 16;
                (map, margin, view)
            }
        };
        self.taken.push(entry);
        entry.2
    }

    pub(super) fn give_back(&mut self, source: Source, view: View) {
        if self.returned.contains(&source) {
            return;
        }
        self.returned.push(source);
        if let Some(k) = self.taken.iter().position(|(_, _, v)| *v == view) {
            self.free.push(self.taken.swap_remove(k));
        }
    }
}
