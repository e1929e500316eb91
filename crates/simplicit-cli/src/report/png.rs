//! Images with a palette, as PNG inside the page.

use png::{ColorType, Compression, Encoder, Filter};

/// An image with one byte per pixel, which is an index into the palette.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Image {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) pixels: Vec<u8>,
    /// At most 256 colours.
    pub(super) palette: Vec<[u8; 3]>,
}

impl Image {
    /// A `data:` address that contains the whole PNG; empty for an empty image.
    pub(super) fn data_address(&self) -> String {
        if self.width == 0 || self.height == 0 {
            return String::new();
        }
        format!("data:image/png;base64,{}", base64(&self.png()))
    }

    fn png(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut encoder = Encoder::new(&mut out, self.width as u32, self.height as u32);
        encoder.set_color(ColorType::Indexed);
        encoder.set_palette(self.palette.as_flattened());
        encoder.set_compression(Compression::High);
        // Other filters do not make an image with a palette smaller.
        encoder.set_filter(Filter::NoFilter);
        // Writing to memory does not fail; an empty image would show if it did.
        let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&self.pixels));
        if written.is_ok() { out } else { Vec::new() }
    }
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |k: usize| u32::from(group.get(k).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for k in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * k)) as usize & 63];
            out.push(if k <= group.len() { letter as char } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn base64_of_the_standard() {
        for (plain, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
    }

    #[test]
    fn the_pixels_come_back() {
        let pixels: Vec<u8> = (0..35).map(|k| (k % 3) as u8).collect();
        let image = Image { width: 7, height: 5, pixels: pixels.clone(), palette: vec![[0; 3], [1, 2, 3], [255; 3]] };
        let png = image.png();
        let (mut at, mut kinds, mut packed) = (8, Vec::new(), Vec::new());
        while at < png.len() {
            let length = u32::from_be_bytes(png[at..at + 4].try_into().unwrap()) as usize;
            let body = &png[at + 4..at + 8 + length];
            // The CRC of ISO 3309, bit by bit.
            let mut crc = u32::MAX;
            for byte in body {
                crc ^= u32::from(*byte);
                for _ in 0..8 {
                    crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
                }
            }
            assert_eq!((!crc).to_be_bytes(), png[at + 8 + length..at + 12 + length]);
            kinds.push(String::from_utf8(body[..4].to_vec()).unwrap());
            if &body[..4] == b"IDAT" {
                packed.extend_from_slice(&body[4..]);
            }
            at += 12 + length;
        }
        assert_eq!(kinds, ["IHDR", "PLTE", "IDAT", "IEND"]);
        let mut rows = Vec::new();
        flate2::read::ZlibDecoder::new(packed.as_slice()).read_to_end(&mut rows).unwrap();
        let back: Vec<u8> = rows.chunks(8).flat_map(|row| row[1..].to_vec()).collect();
        assert_eq!(back, pixels);
    }
}
