//! A [`Keep`] in a directory: the next run finds the results of a run that was killed.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use crate::arrays::digest;
use crate::files::{read_capped, write_bytes_atomically};
use crate::train::{Keep, Key};
use crate::{Error, Result};

const FINGERPRINT: &str = "fingerprint.json";
const LOCK: &str = "lock";
/// Our own values are smaller than this; a larger one was not written by this program.
const MAX_VALUE: u64 = 1 << 36;
/// Number of hexadecimal digits of the hash in front of every value.
const DIGEST: usize = 64;

/// Intermediate results of one training run, one file each, for the settings and inputs of its fingerprint alone.
///
/// A value that is damaged counts as absent and is computed again. Directories are locked: two runs at once are refused.
#[derive(Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    /// The system releases the lock when the process ends, in whatever way.
    _lock: File,
}

impl Checkpoint {
    /// Opens a directory, or makes it. `fingerprint` contains everything that the results depend on. A directory with
    /// another fingerprint is refused, and the error names the first difference; a directory with other files is
    /// refused too.
    pub fn open(directory: impl AsRef<Path>, fingerprint: &BTreeMap<String, String>) -> Result<Self> {
        let directory = directory.as_ref();
        std::fs::create_dir_all(directory).map_err(|e| Error::io(directory, e))?;
        let entries = entries(directory)?;
        let known = entries.iter().any(|name| name == FINGERPRINT);
        if !known && let Some(stranger) = entries.iter().find(|name| *name != LOCK && !is_abandoned(name)) {
            return Err(Error::file(
                directory,
                format!("holds {stranger:?} but no checkpoint; give a new or an empty directory"),
            ));
        }
        let lock = directory.join(LOCK);
        let lock = File::create(&lock).map_err(|e| Error::io(&lock, e))?;
        if lock.try_lock().is_err() {
            return Err(Error::file(directory, "in use by another run; wait for it or give another directory"));
        }
        for name in entries.iter().filter(|name| is_abandoned(name)) {
            let _ = std::fs::remove_file(directory.join(name));
        }
        let path = directory.join(FINGERPRINT);
        if known {
            let bytes = read_capped(&path, 1 << 24)?;
            let found: BTreeMap<String, String> =
                serde_json::from_slice(&bytes).map_err(|e| Error::file(&path, format!("unreadable: {e}")))?;
            if let Some(difference) = difference(&found, fingerprint) {
                return Err(Error::file(
                    directory,
                    format!("a checkpoint of other settings or inputs: {difference}; give another directory"),
                ));
            }
        } else {
            let text = serde_json::to_vec_pretty(fingerprint).map_err(|e| Error::file(&path, e.to_string()))?;
            write_bytes_atomically(&path, &text)?;
        }
        Ok(Self { directory: directory.to_path_buf(), _lock: lock })
    }

    /// The path of a value: files are named by the text of their keys.
    fn path(&self, key: &str) -> PathBuf {
        self.directory.join(digest(&[key.as_bytes()]))
    }
}

impl Keep for Checkpoint {
    fn folder(&self) -> Option<&Path> {
        Some(&self.directory)
    }

    fn get(&self, key: &Key) -> Result<Option<Vec<u8>>> {
        let key = key.to_string();
        let path = self.path(&key);
        if !path.exists() {
            return Ok(None);
        }
        let mut bytes = read_capped(&path, MAX_VALUE)?;
        let Some((stored, value)) = bytes.split_at_checked(DIGEST) else { return Ok(None) };
        if stored != digest(&[key.as_bytes(), &[0], value]).as_bytes() {
            return Ok(None);
        }
        bytes.drain(..DIGEST);
        Ok(Some(bytes))
    }

    fn put(&self, key: &Key, value: &[u8]) -> Result<()> {
        let key = key.to_string();
        let head = digest(&[key.as_bytes(), &[0], value]);
        let mut file = crate::files::OutputFile::create(self.path(&key))?;
        file.write(head.as_bytes())?;
        file.write(value)?;
        file.finish()
    }
}

fn entries(directory: &Path) -> Result<Vec<String>> {
    let list = std::fs::read_dir(directory).map_err(|e| Error::io(directory, e))?;
    let mut names = Vec::new();
    for entry in list {
        names.push(entry.map_err(|e| Error::io(directory, e))?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Whether a file was left by a run that was killed in the middle of a write.
fn is_abandoned(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".part")
}

/// The first entry that differs, with both values shortened.
fn difference(found: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>) -> Option<String> {
    let short = |value: Option<&String>| {
        value.map_or("nothing".to_string(), |v| {
            let head: String = v.chars().take(60).collect();
            if head.len() < v.len() { format!("{head}…") } else { head }
        })
    };
    let key = found.keys().chain(wanted.keys()).find(|key| found.get(*key) != wanted.get(*key))?;
    Some(format!("{key} was {}, is {}", short(found.get(key)), short(wanted.get(key))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(beta: &str) -> BTreeMap<String, String> {
        BTreeMap::from([("beta".to_string(), beta.to_string()), ("version".to_string(), "1".to_string())])
    }

    #[test]
    fn values_survive_and_damage_is_absence() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/one");
        let keep = Checkpoint::open(&path, &fingerprint("1")).unwrap();
        let [a, b, c] = [0, 1, 2].map(|round| Key::output_refit(1.0, round));
        assert_eq!(keep.get(&a).unwrap(), None);
        keep.put(&a, b"value").unwrap();
        keep.put(&b, b"").unwrap();
        assert!(Checkpoint::open(&path, &fingerprint("1")).unwrap_err().to_string().contains("in use"));
        drop(keep);
        std::fs::write(path.join(".left.1.2.part"), b"half").unwrap();
        let keep = Checkpoint::open(&path, &fingerprint("1")).unwrap();
        assert!(!path.join(".left.1.2.part").exists());
        assert_eq!(keep.get(&a).unwrap().unwrap(), b"value");
        assert_eq!(keep.get(&b).unwrap().unwrap(), b"");
        // A value under another key, a flipped bit, a shorter file: each is detected and not used.
        let file = keep.path(&a.to_string());
        std::fs::copy(&file, keep.path(&c.to_string())).unwrap();
        assert_eq!(keep.get(&c).unwrap(), None);
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(keep.get(&a).unwrap(), None);
        std::fs::write(&file, &bytes[..10]).unwrap();
        assert_eq!(keep.get(&a).unwrap(), None);
    }

    #[test]
    fn other_settings_and_other_directories_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        drop(Checkpoint::open(directory.path(), &fingerprint("1")).unwrap());
        let message = Checkpoint::open(directory.path(), &fingerprint("2")).unwrap_err().to_string();
        assert!(message.contains("beta was 1, is 2"), "{message}");
        let other = tempfile::tempdir().unwrap();
        std::fs::write(other.path().join("holiday.jpg"), b"x").unwrap();
        let message = Checkpoint::open(other.path(), &fingerprint("1")).unwrap_err().to_string();
        assert!(message.contains("holiday.jpg"), "{message}");
        assert_eq!(std::fs::read_dir(other.path()).unwrap().count(), 1);
    }
}
