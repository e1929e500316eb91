//! NumPy's `.npy`: a short header (a Python dict with three fixed keys), then the numbers.

use super::bytes::Bytes;
use super::element::Element;
use crate::files::OutputFile;
use crate::linalg::Matrix;
use crate::{Error, Result};

/// What `\x93NUMPY` files begin with.
pub(super) const MAGIC: &[u8] = b"\x93NUMPY";
/// NumPy pads its headers to a few hundred bytes; a header near this limit is not genuine.
const HEADER_LIMIT: u64 = 1 << 16;
const AXES_LIMIT: usize = 32;

/// The content of a header.
#[derive(Debug, PartialEq)]
pub(super) struct Header {
    pub(super) element: Element,
    pub(super) big_endian: bool,
    /// Whether the first axis is the fastest.
    pub(super) fortran_order: bool,
    pub(super) shape: Vec<usize>,
}

/// The header and the bytes after it.
pub(super) fn parse(bytes: &Bytes) -> Result<(Header, Bytes)> {
    let fixed = bytes.read_vec(0, 10)?;
    let bad = |problem: String| Error::file(bytes.path(), problem);
    if !fixed.starts_with(MAGIC) {
        return Err(bad("not an .npy file (its first bytes are not \\x93NUMPY); save it with numpy.save".into()));
    }
    let (start, len) = match fixed[6] {
        1 => (10, u64::from(u16::from_le_bytes([fixed[8], fixed[9]]))),
        2 | 3 => {
            let mut len = [0; 4];
            bytes.read_at(8, &mut len)?;
            (12, u64::from(u32::from_le_bytes(len)))
        }
        version => return Err(bad(format!(".npy version {version}, expected 1, 2 or 3"))),
    };
    if len > HEADER_LIMIT {
        return Err(bad(format!("a header of {len} bytes, expected at most {HEADER_LIMIT}; the file is damaged")));
    }
    let text = String::from_utf8(bytes.read_vec(start, len)?)
        .map_err(|_| bad("the header is not text; the file is damaged".into()))?;
    let header =
        parse_header(&text).map_err(|problem| bad(format!("{problem} in the header {:?}", text.trim_end())))?;
    let data = bytes.slice(start + len, bytes.len() - start - len)?;
    Ok((header, data))
}

/// Writes a matrix as a float32 `.npy` file that appears whole or not at all.
pub fn write_npy(path: impl AsRef<std::path::Path>, matrix: &Matrix<f32>) -> Result<()> {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {cols}), }}");
    // The numbers begin at a multiple of 64 bytes, as NumPy writes them; the last byte before them is a line end.
    let padding = (10 + header.len() + 1).next_multiple_of(64) - (10 + header.len() + 1);
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    let mut output = OutputFile::create(path)?;
    output.write(&bytes)?;
    for rows in matrix.as_slice().chunks(1 << 16) {
        bytes.clear();
        bytes.extend(rows.iter().flat_map(|v| v.to_le_bytes()));
        output.write(&bytes)?;
    }
    output.finish()
}

fn parse_header(text: &str) -> Result<Header, String> {
    let mut cursor = Cursor(text);
    let (mut descr, mut order, mut shape) = (None, None, None);
    cursor.expect("{")?;
    while !cursor.take("}") {
        let key = cursor.string()?;
        cursor.expect(":")?;
        match key {
            "descr" if cursor.take("[") => return Err("structured records, expected one number type".into()),
            "descr" => descr = Some(cursor.string()?),
            "fortran_order" => {
                order = Some(if cursor.take("True") {
                    true
                } else {
                    cursor.expect("False")?;
                    false
                });
            }
            "shape" => shape = Some(cursor.tuple()?),
            other => return Err(format!("unknown key {other:?}")),
        }
        if !cursor.take(",") {
            cursor.expect("}")?;
            break;
        }
    }
    let descr = descr.ok_or("no key 'descr'")?;
    let (big_endian, element) = number_type(descr).ok_or_else(|| {
        format!("number type {descr:?} (expected real floating-point or integer, such as <f4, <f8 or |u1)")
    })?;
    Ok(Header {
        element,
        big_endian,
        fortran_order: order.ok_or("no key 'fortran_order'")?,
        shape: shape.ok_or("no key 'shape'")?,
    })
}

fn number_type(descr: &str) -> Option<(bool, Element)> {
    let big_endian = match descr.as_bytes().first()? {
        b'<' | b'|' => false,
        b'>' => true,
        _ => return None,
    };
    let element = match &descr[1..] {
        // Truth values are bytes that are 0 or 1.
        "u1" | "b1" => Element::U8,
        "i1" => Element::I8,
        "u2" => Element::U16,
        "i2" => Element::I16,
        "u4" => Element::U32,
        "i4" => Element::I32,
        "u8" => Element::U64,
        "i8" => Element::I64,
        "f2" => Element::F16,
        "f4" => Element::F32,
        "f8" => Element::F64,
        _ => return None,
    };
    Some((big_endian, element))
}

/// The part of the text that has not been parsed. Nothing in a header nests, so the parser does not recurse.
struct Cursor<'a>(&'a str);

impl<'a> Cursor<'a> {
    fn take(&mut self, token: &str) -> bool {
        self.0 = self.0.trim_start();
        match self.0.strip_prefix(token) {
            Some(rest) => {
                self.0 = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.take(token) { Ok(()) } else { Err(format!("expected {token:?}")) }
    }

    fn string(&mut self) -> Result<&'a str, String> {
        let quote = if self.take("'") {
            '\''
        } else {
            self.expect("\"")?;
            '"'
        };
        let (text, rest) = self.0.split_once(quote).ok_or("a string without an end")?;
        self.0 = rest;
        Ok(text)
    }

    fn tuple(&mut self) -> Result<Vec<usize>, String> {
        self.expect("(")?;
        let mut axes = Vec::new();
        while !self.take(")") {
            self.0 = self.0.trim_start();
            let end = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
            let axis = self.0[..end].parse().map_err(|_| "a shape that is not a tuple of sizes")?;
            self.0 = &self.0[end..];
            axes.push(axis);
            if axes.len() > AXES_LIMIT {
                return Err(format!("more than {AXES_LIMIT} axes"));
            }
            if !self.take(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(axes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_as_numpy_writes_them() {
        let header = parse_header("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }   \n").unwrap();
        let expected = Header { element: Element::F32, big_endian: false, fortran_order: false, shape: vec![3, 4] };
        assert_eq!(header, expected);
        let header = parse_header("{'descr': '>i8', 'fortran_order': True, 'shape': (7,), }").unwrap();
        assert_eq!((header.element, header.big_endian, header.fortran_order), (Element::I64, true, true));
        assert_eq!(header.shape, [7]);
        assert!(parse_header("{'descr': '|u1', 'fortran_order': False, 'shape': ()}").unwrap().shape.is_empty());
    }

    #[test]
    fn hostile_headers_are_errors() {
        for (text, part) in [
            ("", "expected \"{\""),
            ("{", "expected"),
            ("{'descr': '<f4'", "expected \"}\""),
            ("{'descr': '<f4}", "without an end"),
            ("{'descr': '<c8', 'fortran_order': False, 'shape': (1,)}", "number type"),
            ("{'descr': 'é4', 'fortran_order': False, 'shape': (1,)}", "number type"),
            ("{'descr': '', 'fortran_order': False, 'shape': (1,)}", "number type"),
            ("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", "structured"),
            ("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", "expected \"False\""),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", "tuple of sizes"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}", "tuple of sizes"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': ((((((1,))))))}", "tuple of sizes"),
            ("{'descr': '<f4', 'fortran_order': False}", "no key 'shape'"),
            ("{'evil': '<f4'}", "unknown key"),
        ] {
            let message = parse_header(text).unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
        let many = format!("{{'shape': ({})}}", "1,".repeat(33));
        assert!(parse_header(&many).unwrap_err().contains("axes"));
    }
}
