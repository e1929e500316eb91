//! The files of a command: no output may be an input, no two outputs one file, and every output can be written. Found out
//! before any work, not after an hour.

use std::path::{Path, PathBuf};

use anyhow::bail;
use simplicit::files::OutputFile;
use simplicit::onnx::OnnxFile;

/// The parts of a folder of states.
const STATES: [&str; 4] = ["U.npy", "Z.npy", "X.npy", "Y.npy"];

/// What a command reads and what it writes, each file under the name that messages give it.
#[derive(Default)]
pub(crate) struct Paths<'a> {
    reads: Vec<(&'static str, &'a Path)>,
    writes: Vec<(&'static str, &'a Path)>,
}

impl<'a> Paths<'a> {
    /// One more input, if there is one.
    pub(crate) fn reads(mut self, name: &'static str, path: Option<&'a Path>) -> Self {
        self.reads.extend(path.map(|path| (name, path)));
        self
    }

    /// One more output, if there is one.
    pub(crate) fn writes(mut self, name: &'static str, path: Option<&'a Path>) -> Self {
        self.writes.extend(path.map(|path| (name, path)));
        self
    }

    /// An error where something would be overwritten that this command reads or writes, or where an output cannot be written.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        for (k, (name, path)) in self.writes.iter().enumerate() {
            // A place without a name or a folder is refused below.
            let Some(place) = place(path) else { continue };
            if let Some((input, _)) = self.reads.iter().find(|(_, read)| is_read(read, &place)) {
                bail!(
                    "{name} {}: expected another file than {input}, which this command reads, got the same; nothing was written",
                    path.display()
                );
            }
            if let Some((output, _)) =
                self.writes[..k].iter().find(|(_, written)| self::place(written).as_ref() == Some(&place))
            {
                bail!(
                    "{name} {}: expected another file than {output}, which this command writes as well, got the same",
                    path.display()
                );
            }
        }
        for (_, path) in &self.writes {
            drop(OutputFile::create(path)?);
        }
        Ok(())
    }
}

/// A file by the folder it is in, links followed, whether it is there yet or not; nothing where the folder is not there.
fn place(path: &Path) -> Option<PathBuf> {
    if let Ok(place) = path.canonicalize() {
        return Some(place);
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Some(folder.canonicalize().ok()?.join(path.file_name()?))
}

/// Whether two names are one file.
pub(crate) fn same_file(one: &Path, other: &Path) -> bool {
    place(one).is_some_and(|one| place(other) == Some(one))
}

/// Whether a command that is given `input` reads the file at `place`: of `file.npz:key` it is the file, of a folder its states
/// and its pictures, the latter also in folders in it, and of an ONNX file those that hold its weights, too.
fn is_read(input: &Path, place: &Path) -> bool {
    if input.is_dir() {
        let within = |folder: PathBuf| place.ancestors().skip(1).take(2).any(|above| above == folder);
        return place.exists() && is_part(place) && input.canonicalize().is_ok_and(within);
    }
    let is_onnx = input.extension().is_some_and(|e| e.eq_ignore_ascii_case("onnx"));
    // Only where something is about to be overwritten is the ONNX file opened for this.
    if is_onnx && place.exists() && OnnxFile::weight_files(input).iter().any(|file| file == place) {
        return true;
    }
    let file = input.to_str().filter(|_| !input.exists()).and_then(|text| text.rsplit_once(':'));
    self::place(file.map_or(input, |(file, _)| Path::new(file))).is_some_and(|read| read == place)
}

/// Whether a folder is read for files with this name.
fn is_part(path: &Path) -> bool {
    let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase());
    let picture = extension.is_some_and(|e| matches!(e.as_str(), "jpg" | "jpeg" | "png"));
    picture || path.file_name().is_some_and(|name| STATES.iter().any(|state| name == *state))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(reads: &Path, writes: &[&Path]) -> Result<(), String> {
        let mut paths = Paths::default().reads("--inputs", Some(reads));
        for path in writes {
            paths = paths.writes("--out", Some(path));
        }
        paths.check().map_err(|e| e.to_string())
    }

    #[test]
    fn no_output_is_an_input_by_whatever_name() {
        let directory = tempfile::tempdir().unwrap();
        let d = directory.path();
        std::fs::create_dir(d.join("pictures")).unwrap();
        for name in ["u.npy", "u.npz", "pictures/a.png", "pictures/Z.npy"] {
            std::fs::write(d.join(name), b"kept").unwrap();
        }
        let u = d.join("u.npy");
        assert!(check(&u, &[&d.join("pictures/../u.npy")]).unwrap_err().contains("another file than --inputs"));
        assert!(check(&d.join("u.npz:key"), &[&d.join("u.npz")]).is_err());
        assert!(check(&d.join("pictures"), &[&d.join("pictures/a.png")]).is_err());
        assert!(check(&d.join("pictures"), &[&d.join("pictures/Z.npy")]).is_err());
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&u, d.join("link.npy")).unwrap();
            assert!(check(&d.join("link.npy"), &[&u]).is_err());
        }
        assert!(check(&u, &[&d.join("m"), &d.join("pictures/../m")]).unwrap_err().contains("writes as well"));
        // New files beside what is read, and the result of an earlier run.
        std::fs::write(d.join("pictures/m"), b"old").unwrap();
        check(&d.join("pictures"), &[&d.join("pictures/m"), &d.join("n")]).unwrap();
        assert!(check(&u, &[&d.join("no/such/m")]).unwrap_err().contains("does not exist"));
        assert_eq!(std::fs::read(&u).unwrap(), b"kept");
    }

    /// An ONNX file with nothing but a tensor whose values are in `w.bin`.
    #[test]
    fn weights_beside_an_onnx_file_are_inputs_too() {
        let directory = tempfile::tempdir().unwrap();
        let d = directory.path();
        // A field of a protocol buffer: number and kind, length, content.
        let field = |number: u8, content: &[u8]| [&[number << 3 | 2, content.len() as u8], content].concat();
        let location = [field(1, b"location"), field(2, b"w.bin")].concat();
        let onnx = field(7, &field(5, &field(13, &location)));
        for (name, bytes) in
            [("net.onnx", &onnx[..]), ("w.bin", &b"kept"[..]), ("m.bin", &b"old"[..]), ("bad.onnx", &b"\xff"[..])]
        {
            std::fs::write(d.join(name), bytes).unwrap();
        }
        let refused = check(&d.join("net.onnx"), &[&d.join("w.bin")]).unwrap_err();
        assert!(refused.contains("another file than --inputs"), "{refused}");
        check(&d.join("net.onnx"), &[&d.join("m.bin"), &d.join("new.bin")]).unwrap();
        check(&d.join("bad.onnx"), &[&d.join("w.bin")]).unwrap();
        assert_eq!(std::fs::read(d.join("w.bin")).unwrap(), b"kept");
    }
}
