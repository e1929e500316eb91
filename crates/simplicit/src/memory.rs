//! Memory as a setting: how much there is, how much was used, and a pile of blocks that continues in a file when a
//! budget is used up.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::linalg::Matrix;
use crate::{Error, Result};

/// Parses a number of bytes, or a number with K, M or G of 1024: `4G`, `512M`, `1073741824`.
pub fn parse(text: &str) -> Result<u64> {
    let wrong = || Error::setting("memory", "bytes, or a number with K, M or G such as 4G", text);
    let (number, unit) = match text.trim().char_indices().next_back() {
        Some((at, 'K' | 'k')) => (&text.trim()[..at], 1u64 << 10),
        Some((at, 'M' | 'm')) => (&text.trim()[..at], 1 << 20),
        Some((at, 'G' | 'g')) => (&text.trim()[..at], 1 << 30),
        _ => (text.trim(), 1),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).filter(|bytes| *bytes > 0).ok_or_else(wrong);
    }
    let plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let share = number.parse::<f64>().ok().filter(|v| plain && unit > 1 && *v > 0.0 && v * (unit as f64) < 1e18);
    share.map(|v| (v * unit as f64) as u64).ok_or_else(wrong)
}

/// A number of bytes as text, in units of 1024.
pub fn words(bytes: u64) -> String {
    let gigabytes = bytes as f64 / (1u64 << 30) as f64;
    if gigabytes >= 1.0 { format!("{gigabytes:.1} GB") } else { format!("{:.0} MB", gigabytes * 1024.0) }
}

/// The same, rounded up: the memory that a message asks for must be enough when the user grants it.
pub(crate) fn words_up(bytes: u64) -> String {
    words(bytes + if bytes >= 1 << 30 { (1 << 30) / 20 } else { 1 << 19 })
}

/// Bytes that this process could still take, by the machine and by the limit of its control group; `None` where the
/// system does not report it.
pub fn free() -> Option<u64> {
    let kilobytes = |file: &str, key: &str| {
        let text = std::fs::read_to_string(file).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|k| 1024 * k)
    };
    let number = |file: &str| std::fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let machine = kilobytes("/proc/meminfo", "MemAvailable:")?;
    let limit = number("/sys/fs/cgroup/memory.max");
    let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0);
    Some(limit.map_or(machine, |limit| machine.min(limit.saturating_sub(used))))
}

/// The value of a line in the process's own status, in bytes.
fn status(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kilobytes| 1024 * kilobytes)
}

/// The most bytes that this process has held at one time; `None` where the system does not report it.
pub fn peak() -> Option<u64> {
    status("VmHWM:")
}

/// The bytes that this process holds now; `None` where the system does not report it.
pub fn used() -> Option<u64> {
    status("VmRSS:")
}

/// The budget that everything large is booked on, and the folder for blocks that exceed it.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    budget: u64,
    held: AtomicU64,
    folder: PathBuf,
}

impl MemoryBudget {
    pub(crate) fn new(budget: u64, folder: &Path) -> Arc<Self> {
        Arc::new(Self { budget, held: AtomicU64::new(0), folder: folder.to_path_buf() })
    }

    /// Books this many bytes, if the budget has them.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let fits = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= self.budget);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    /// Returns bytes to the budget.
    pub(crate) fn give(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The fewest numbers in a piece of memory that blocks are put into: 40 MiB. The allocator requests an allocation of
/// that size directly from the operating system and returns it when it is dropped; a smaller one may stay with the
/// process, in gaps between others.
const SLAB: usize = 10 << 20;

/// Numbers that are read from a file at a time: few enough for their bytes to stay in the cache until they are
/// converted.
const READ: usize = 1 << 16;

/// Blocks that are written once, in order, and read in any order by several threads: in memory while the budget
/// lasts, after that in a file of their own. Their values do not depend on where they are.
#[derive(Debug)]
pub(crate) struct Pile {
    memory_budget: Arc<MemoryBudget>,
    blocks: Vec<Place>,
    slabs: Vec<Vec<f32>>,
    held: u64,
    file: Option<Spill>,
}

/// The place of a block with this many columns.
#[derive(Debug)]
enum Place {
    Held { slab: usize, span: Range<usize>, cols: usize },
    File { at: u64, rows: usize, cols: usize },
}

/// One block: its numbers, row after row.
#[derive(Debug)]
pub(crate) struct Block<'a> {
    values: Cow<'a, [f32]>,
    cols: usize,
}

impl Block<'_> {
    pub(crate) fn rows(&self) -> usize {
        self.values.len() / self.cols.max(1)
    }

    pub(crate) fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.cols..(i + 1) * self.cols]
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        &self.values
    }
}

impl From<Matrix<f32>> for Block<'_> {
    fn from(matrix: Matrix<f32>) -> Self {
        let cols = matrix.cols();
        Self { values: Cow::Owned(matrix.into_vec()), cols }
    }
}

#[derive(Debug)]
struct Spill {
    path: PathBuf,
    file: Mutex<File>,
    length: u64,
}

impl Spill {
    fn new(folder: &Path) -> Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        loop {
            // Under this name a checkpoint's folder takes the file for the rest of an interrupted write and removes
            // it.
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!(".simplicit-layers.{}.{count}.part", std::process::id()));
            match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => {
                    // Where an open file may be removed, nothing is left behind, even if the process is killed.
                    let _ = std::fs::remove_file(&path);
                    return Ok(Self { path, file: Mutex::new(file), length: 0 });
                }
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Error::io(folder, e)),
            }
        }
    }

    fn file(&self) -> std::sync::MutexGuard<'_, File> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Pile {
    pub(crate) fn new(memory_budget: &Arc<MemoryBudget>) -> Self {
        Self { memory_budget: memory_budget.clone(), blocks: Vec::new(), slabs: Vec::new(), held: 0, file: None }
    }

    /// Adds a block.
    pub(crate) fn push(&mut self, block: Matrix<f32>) -> Result<()> {
        let bytes = 4 * block.as_slice().len() as u64;
        if self.memory_budget.take(bytes) {
            self.held += bytes;
            self.hold(&block);
            return Ok(());
        }
        let spill = match &mut self.file {
            Some(spill) => spill,
            None => self.file.insert(Spill::new(&self.memory_budget.folder)?),
        };
        let mut raw = vec![0u8; 4 * block.as_slice().len()];
        for (out, v) in raw.chunks_exact_mut(4).zip(block.as_slice()) {
            out.copy_from_slice(&v.to_le_bytes());
        }
        spill.file().write_all(&raw).map_err(|e| Error::io(&self.memory_budget.folder, e))?;
        self.blocks.push(Place::File { at: spill.length, rows: block.rows(), cols: block.cols() });
        spill.length += bytes;
        Ok(())
    }

    /// Puts a block after the one before, or into a new slab.
    fn hold(&mut self, block: &Matrix<f32>) {
        let values = block.as_slice();
        if self.slabs.last().is_none_or(|slab| slab.capacity() - slab.len() < values.len()) {
            self.slabs.push(Vec::with_capacity(values.len().max(SLAB)));
        }
        let number = self.slabs.len() - 1;
        let slab = &mut self.slabs[number];
        let span = slab.len()..slab.len() + values.len();
        slab.extend_from_slice(values);
        self.blocks.push(Place::Held { slab: number, span, cols: block.cols() });
    }

    /// A block, by its number.
    pub(crate) fn get(&self, number: usize) -> Result<Block<'_>> {
        self.rows(number, 0..usize::MAX)
    }

    /// Some rows of a block, fewer if the block ends before. A block in a file may have hundreds of megabytes, of
    /// which a reader of one sample needs only a few.
    pub(crate) fn rows(&self, number: usize, range: Range<usize>) -> Result<Block<'_>> {
        let missing = || Error::shape("block of a layer", format!("one of {}", self.blocks.len()), number);
        let within = |rows: usize| range.start.min(rows)..range.end.min(rows);
        let (at, rows, cols) = match self.blocks.get(number).ok_or_else(missing)? {
            Place::Held { slab, span, cols } => {
                let all = &self.slabs[*slab][span.clone()];
                let rows = within(all.len() / (*cols).max(1));
                return Ok(Block { values: Cow::Borrowed(&all[rows.start * cols..rows.end * cols]), cols: *cols });
            }
            Place::File { at, rows, cols } => (*at, *rows, *cols),
        };
        let rows = within(rows);
        let failed = |e| Error::io(&self.memory_budget.folder, e);
        let spill = self.file.as_ref().ok_or_else(missing)?;
        let (mut at, mut left) = (at + 4 * (rows.start * cols) as u64, rows.len() * cols);
        let mut values = Vec::with_capacity(left);
        let mut raw = vec![0u8; 4 * left.min(READ)];
        while left > 0 {
            let part = &mut raw[..4 * left.min(READ)];
            {
                let mut file = spill.file();
                file.seek(SeekFrom::Start(at)).map_err(failed)?;
                file.read_exact(part).map_err(failed)?;
            }
            values.extend(part.as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)));
            (at, left) = (at + part.len() as u64, left - part.len() / 4);
        }
        Ok(Block { values: Cow::Owned(values), cols })
    }

    /// Number of its bytes that are in a file.
    #[cfg(test)]
    fn spilled(&self) -> u64 {
        self.file.as_ref().map_or(0, |f| f.length)
    }
}

impl Drop for Pile {
    fn drop(&mut self) {
        self.memory_budget.give(self.held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written_and_anything_else_is_refused() {
        for (text, bytes) in
            [("4G", 4 << 30), ("512m", 512 << 20), ("3K", 3072), ("17", 17), ("1.5G", 3 << 29), (" 2G ", 2 << 30)]
        {
            assert_eq!(parse(text).unwrap(), bytes, "{text}");
        }
        for wrong in ["", "G", "0", "-1G", "1.5", "4T", "4 GB", "1e3M", "inf G", "99999999999999G", "nanM", "0.0G"] {
            let message = parse(wrong).unwrap_err().to_string();
            assert!(message.contains("K, M or G"), "{wrong}: {message}");
        }
        assert_eq!((words(3 << 29).as_str(), words(300 << 20).as_str()), ("1.5 GB", "300 MB"));
    }

    /// Runs in a process of its own, because tests in the same process take memory too.
    #[test]
    fn a_pile_gives_its_memory_back_to_the_system() {
        const ALONE: &str = "SIMPLICIT_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let name = "memory::tests::a_pile_gives_its_memory_back_to_the_system";
            let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
            let out = alone.args(["--exact", name]).env(ALONE, "1").output().unwrap();
            let said = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let Some(before) = used() else { return };
        let folder = tempfile::tempdir().unwrap();
        // From here on the allocator takes blocks of this size from its heap, where later blocks prevent it from
        // returning them.
        drop(vec![1.0f32; 7 << 20]);
        let memory_budget = MemoryBudget::new(u64::MAX, folder.path());
        let mut pile = Pile::new(&memory_budget);
        let fast: Vec<Vec<u8>> = (0..200)
            .map(|k| {
                pile.push(Matrix::from_fn(1 << 10, 1 << 9, |_, _| k as f32)).unwrap();
                vec![1; 512]
            })
            .collect();
        let (held, all) = (used().unwrap(), 200 << 21);
        assert!(held >= before + all / 2, "{held} after {before}");
        drop(pile);
        let left = used().unwrap();
        assert!(left <= before + all / 3, "{left} after {before}: of {all} bytes too many stayed; {}", fast.len());
    }

    #[test]
    fn blocks_come_back_to_the_bit_wherever_they_are_and_room_is_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let block = |k: usize| Matrix::from_fn(3, 5, |i, j| ((k * 31 + i * 7 + j) as f32).sin());
        let same = |pile: &Pile, k: usize| {
            let got = pile.get(k).unwrap();
            assert_eq!((got.rows(), got.as_slice(), got.row(2)), (3, block(k).as_slice(), block(k).row(2)));
            let got = pile.rows(k, 1..3).unwrap();
            assert_eq!((got.rows(), got.row(0), got.row(1)), (2, block(k).row(1), block(k).row(2)));
            assert_eq!(pile.rows(k, 3..9).unwrap().rows(), 0);
        };
        let memory_budget = MemoryBudget::new(150, folder.path());
        let mut pile = Pile::new(&memory_budget);
        (0..6).for_each(|k| pile.push(block(k)).unwrap());
        assert_eq!((pile.held, pile.spilled()), (120, 240), "two of six blocks of 60 bytes fit");
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..6).rev().for_each(|k| same(&pile, k)));
            }
        });
        assert!(pile.get(6).is_err());
        assert!(!memory_budget.take(40) && memory_budget.take(30));
        memory_budget.give(30);
        drop(pile);
        assert!(memory_budget.take(150), "what a pile held is free again");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let mut nowhere = Pile::new(&MemoryBudget::new(0, &folder.path().join("missing")));
        assert!(nowhere.push(block(0)).is_err());
    }
}
