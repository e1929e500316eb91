//! A folder of JPEG and PNG files as one array of bytes: samples × 3 × height × width.

use std::path::{Path, PathBuf};

use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::array::Array;
use super::element::Element;
use super::selection::Selection;
use crate::{Error, Result};

/// The greatest width and height of a picture that is decoded, in pixels.
const MAX_SIDE: usize = 1 << 14;

/// How a picture becomes a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PictureSettings {
    /// Resize so that the shorter side has this many pixels; the other one in proportion.
    pub resize: Option<usize>,
    /// Cut a square of this many pixels a side from the middle.
    pub crop: Option<usize>,
}

/// Red, green and blue, one byte each, row by row.
#[derive(Debug, Clone, PartialEq)]
struct Picture {
    width: usize,
    height: usize,
    bytes: Vec<u8>,
}

/// The entries of a folder, in the order of their names.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io(folder, e))?;
    let mut paths =
        entries.map(|e| e.map(|e| e.path()).map_err(|e| Error::io(folder, e))).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

fn pictures(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let is_picture = |path: &PathBuf| {
        let kind = path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase());
        matches!(kind.as_deref(), Some("jpg" | "jpeg" | "png")) && path.is_file()
    };
    paths.into_iter().filter(is_picture).collect()
}

/// The JPEG and PNG files of a folder in the order of their names or, if it has none itself, those of its subfolders,
/// which are classes: one list per class.
fn picture_classes(folder: &Path) -> Result<Vec<Vec<PathBuf>>> {
    let all = entries(folder)?;
    let own = pictures(all.clone());
    if !own.is_empty() {
        return Ok(vec![own]);
    }
    let mut classes = Vec::new();
    for inner in all.into_iter().filter(|path| path.is_dir()) {
        classes.push(pictures(entries(&inner)?));
    }
    classes.retain(|files| !files.is_empty());
    if classes.is_empty() {
        return Err(Error::file(folder, "no .jpg, .jpeg or .png file in this folder or in a folder in it"));
    }
    Ok(classes)
}

/// The JPEG and PNG files of a folder; class after class if it has a subfolder for each.
pub(crate) fn picture_files(folder: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    Ok(picture_classes(folder.as_ref())?.concat())
}

impl Array {
    /// The class of every picture in the subfolders of a folder; classes are numbered in the order of the subfolders'
    /// names.
    pub(super) fn from_class_folders(folder: &Path) -> Result<Self> {
        let classes = picture_classes(folder)?;
        if let [_] = classes[..] {
            return Err(Error::file(folder, "labels: expected a folder for every class, got the pictures of one"));
        }
        let labels = classes.iter().enumerate().flat_map(|(class, files)| vec![class as u32; files.len()]);
        let bytes: Vec<u8> = labels.flat_map(u32::to_le_bytes).collect();
        Array::from_le_bytes(&folder.display().to_string(), Element::U32, &[bytes.len() / 4], bytes)
    }

    /// Reads a folder of pictures, all or some of them; all must have one size after resizing and cropping.
    pub fn from_pictures(folder: impl AsRef<Path>, settings: PictureSettings, selection: &Selection) -> Result<Self> {
        let folder = folder.as_ref();
        for (name, side) in [("resize", settings.resize), ("crop", settings.crop)] {
            if side.is_some_and(|s| !(1..=MAX_SIDE).contains(&s)) {
                return Err(Error::setting(name, format!("1 to {MAX_SIDE}"), format!("{side:?}")));
            }
        }
        let all = picture_files(folder)?;
        let chosen: Vec<&PathBuf> = match selection.indices(all.len())? {
            None => all.iter().collect(),
            Some(indices) => indices.into_iter().map(|k| &all[k]).collect(),
        };
        let mut bytes = Vec::new();
        let mut size = None;
        for path in &chosen {
            let picture = read(path)?;
            let picture = settings.resize.map_or_else(|| picture.clone(), |side| resized(&picture, side));
            let picture = match settings.crop {
                Some(side) => cropped(&picture, side).map_err(|got| {
                    Error::shape(path.display().to_string(), format!("at least {side} × {side} to crop"), got)
                })?,
                None => picture,
            };
            let own = [picture.height, picture.width];
            if *size.get_or_insert(own) != own {
                return Err(Error::shape(
                    path.display().to_string(),
                    format!("{:?} as the first picture; use --resize and --crop", size.unwrap_or(own)),
                    format!("{own:?}"),
                ));
            }
            bytes.extend((0..3).flat_map(|c| picture.bytes.iter().skip(c).step_by(3).copied()));
        }
        let [height, width] = size.unwrap_or([0, 0]);
        let name = folder.display().to_string();
        Array::from_le_bytes(&name, Element::U8, &[chosen.len(), 3, height, width], bytes)
    }
}

fn read(path: &Path) -> Result<Picture> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
    let problem = |text: String| Error::file(path, text);
    if bytes.starts_with(b"\x89PNG") { read_png(&bytes).map_err(problem) } else { read_jpeg(&bytes).map_err(problem) }
}

fn read_jpeg(bytes: &[u8]) -> Result<Picture, String> {
    let options = DecoderOptions::default()
        .jpeg_set_out_colorspace(ColorSpace::RGB)
        .set_max_width(MAX_SIDE)
        .set_max_height(MAX_SIDE);
    let mut decoder = JpegDecoder::new_with_options(bytes, options);
    let bytes = decoder.decode().map_err(|e| format!("not a JPEG or PNG file that can be read: {e:?}"))?;
    let (width, height) = decoder.dimensions().ok_or("a JPEG file without a size")?;
    if bytes.len() != 3 * width * height {
        return Err(format!("{} bytes for a picture of {width} × {height}", bytes.len()));
    }
    Ok(Picture { width, height, bytes })
}

fn read_png(bytes: &[u8]) -> Result<Picture, String> {
    let bad = |e: png::DecodingError| format!("not a PNG file that can be read: {e}");
    let mut decoder = png::Decoder::new(std::io::Cursor::new(bytes));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(bad)?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    if width.max(height) > MAX_SIDE {
        return Err(format!("{width} × {height} values; at most {MAX_SIDE} × {MAX_SIDE} are read"));
    }
    let mut values = vec![0; reader.output_buffer_size().ok_or("a PNG file that is too large")?];
    let frame = reader.next_frame(&mut values).map_err(bad)?;
    values.truncate(frame.buffer_size());
    let channels = frame.color_type.samples();
    // A grey picture has the same value in all three channels; transparency is ignored.
    let colours: [usize; 3] = if channels < 3 { [0; 3] } else { [0, 1, 2] };
    let bytes = values.chunks_exact(channels).flat_map(|pixel| colours.map(|c| pixel[c])).collect();
    Ok(Picture { width, height, bytes })
}

fn cropped(picture: &Picture, side: usize) -> Result<Picture, String> {
    if picture.width < side || picture.height < side {
        return Err(format!("{} × {}", picture.height, picture.width));
    }
    // Rounded as other programs do: half a pixel goes to the even side.
    let middle = |size: usize| ((size - side) as f64 / 2.0).round_ties_even() as usize;
    let (top, left) = (middle(picture.height), middle(picture.width));
    let row = |y: usize| {
        let start = ((top + y) * picture.width + left) * 3;
        &picture.bytes[start..start + 3 * side]
    };
    Ok(Picture { width: side, height: side, bytes: (0..side).flat_map(row).copied().collect() })
}

/// Makes the shorter side `side` pixels long. Every pixel is a mean of its neighbours, nearer ones with more weight
/// (a triangle as wide as the step between pixels), along the rows and then along the columns.
fn resized(picture: &Picture, side: usize) -> Picture {
    let (width, height) = (picture.width, picture.height);
    let short = width.min(height).max(1);
    let long = |size: usize| if size == short { side } else { (size * side / short).max(1) };
    let (new_width, new_height) = (long(width), long(height));
    if (new_width, new_height) == (width, height) {
        return picture.clone();
    }
    let columns = weights(width, new_width);
    let mut narrow = vec![0u8; height * new_width * 3];
    for (row, out) in picture.bytes.chunks_exact(width * 3).zip(narrow.chunks_exact_mut(new_width * 3)) {
        for (x, (first, shares)) in columns.iter().enumerate() {
            for c in 0..3 {
                let sum: f64 = shares.iter().enumerate().map(|(k, w)| w * f64::from(row[(first + k) * 3 + c])).sum();
                out[x * 3 + c] = (sum + 0.5).clamp(0.0, 255.0) as u8;
            }
        }
    }
    let rows = weights(height, new_height);
    let line = new_width * 3;
    let mut bytes = vec![0u8; new_height * line];
    for ((first, shares), out) in rows.iter().zip(bytes.chunks_exact_mut(line)) {
        for (x, out) in out.iter_mut().enumerate() {
            let sum: f64 = shares.iter().enumerate().map(|(k, w)| w * f64::from(narrow[(first + k) * line + x])).sum();
            *out = (sum + 0.5).clamp(0.0, 255.0) as u8;
        }
    }
    Picture { width: new_width, height: new_height, bytes }
}

/// For every new place the first old place that it reads, and the weights of that place and those after it.
fn weights(from: usize, to: usize) -> Vec<(usize, Vec<f64>)> {
    let scale = from as f64 / to as f64;
    let reach = scale.max(1.0);
    (0..to)
        .map(|k| {
            let centre = (k as f64 + 0.5) * scale;
            let first = (centre - reach + 0.5).max(0.0) as usize;
            let end = ((centre + reach + 0.5) as usize).clamp(first + 1, from.max(first + 1));
            let share = |j: usize| (1.0 - ((j as f64 - centre + 0.5) / reach).abs()).max(0.0);
            let shares: Vec<f64> = (first..end).map(share).collect();
            let total: f64 = shares.iter().sum();
            (first, shares.into_iter().map(|s| if total > 0.0 { s / total } else { 0.0 }).collect())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn png(path: &Path, width: u32, height: u32, pixel: impl Fn(u32, u32) -> [u8; 3]) {
        let file = std::fs::File::create(path).unwrap();
        let mut encoder = png::Encoder::new(file, width, height);
        encoder.set_color(png::ColorType::Rgb);
        let bytes: Vec<u8> =
            (0..height).flat_map(|y| (0..width).map(move |x| (x, y))).flat_map(|(x, y)| pixel(x, y)).collect();
        encoder.write_header().unwrap().write_image_data(&bytes).unwrap();
    }

    #[test]
    fn a_folder_is_an_array_of_channels() {
        let folder = tempfile::tempdir().unwrap();
        png(&folder.path().join("b.png"), 4, 2, |x, y| [x as u8, y as u8, 7]);
        png(&folder.path().join("a.png"), 4, 2, |_, _| [1, 2, 3]);
        std::fs::write(folder.path().join("notes.txt"), "not a picture").unwrap();
        let read = |settings, selection| Array::from_pictures(folder.path(), settings, &selection);
        let all = read(PictureSettings::default(), Selection::all()).unwrap();
        assert_eq!(all.shape(), [2, 3, 2, 4]);
        let rows = all.rows::<f32>(0..2).unwrap();
        assert_eq!(rows.row(0)[..9], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]);
        assert_eq!(rows.row(1)[..8], [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]);
        let cut = read(PictureSettings { crop: Some(2), resize: None }, Selection::all()).unwrap();
        assert_eq!(cut.rows::<f32>(1..2).unwrap().row(0)[..4], [1.0, 2.0, 1.0, 2.0]);
        assert!(read(PictureSettings { crop: Some(3), resize: None }, Selection::all()).is_err());
        let large = read(PictureSettings { crop: Some(4), resize: Some(4) }, Selection::random(1, 0)).unwrap();
        assert_eq!(large.shape(), [1, 3, 4, 4]);
        png(&folder.path().join("c.png"), 5, 5, |_, _| [0, 0, 0]);
        assert!(read(PictureSettings::default(), Selection::all()).unwrap_err().to_string().contains("--resize"));
        std::fs::write(folder.path().join("d.jpg"), b"\xff\xd8 broken").unwrap();
        assert!(read(PictureSettings { crop: Some(2), resize: Some(2) }, Selection::all()).is_err());
    }

    #[test]
    fn folders_are_classes() {
        let folder = tempfile::tempdir().unwrap();
        for (class, name, red) in
            [("dog", "b.png", 3), ("cat", "z.png", 1), ("dog", "a.png", 2), ("empty", "none.txt", 0)]
        {
            let inner = folder.path().join(class);
            std::fs::create_dir_all(&inner).unwrap();
            if name == "none.txt" {
                std::fs::write(inner.join(name), b"").unwrap();
            } else {
                png(&inner.join(name), 1, 1, |_, _| [red, 0, 0]);
            }
        }
        let array = Array::from_pictures(folder.path(), PictureSettings::default(), &Selection::all()).unwrap();
        let reds: Vec<f32> = (0..3).map(|k| array.rows(k..k + 1).unwrap()[(0, 0)]).collect();
        assert_eq!(reds, [1.0, 2.0, 3.0]);
        let labels = crate::arrays::Labels::read(folder.path(), &Selection::all()).unwrap();
        assert_eq!(labels.as_slice(), [0, 1, 1]);
        // The pictures inside the folder of one class have no classes.
        assert!(crate::arrays::Labels::read(folder.path().join("dog"), &Selection::all()).is_err());
    }

    #[test]
    fn resizing_keeps_what_is_even_and_the_mean() {
        let even = Picture { width: 9, height: 6, bytes: vec![80; 9 * 6 * 3] };
        let small = resized(&even, 4);
        assert_eq!((small.width, small.height), (6, 4));
        assert!(small.bytes.iter().all(|&b| b == 80));
        for (from, to) in [(9, 4), (4, 9), (7, 7), (100, 3)] {
            for (first, shares) in weights(from, to) {
                assert!(first + shares.len() <= from);
                assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-12);
            }
        }
    }
}
