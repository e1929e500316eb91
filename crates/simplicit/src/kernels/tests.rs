//! Every kernel with every set of instructions this machine has, against sums in double precision in plain loops.

use super::*;
use crate::random::Random;

/// Rounding bound of a sum of n products: n·u/(1 − n·u) with u = 2⁻²⁴, and two more for residuals.
fn gamma(terms: usize) -> f64 {
    let nu = (terms + 3) as f64 * f64::powi(2.0, -24);
    nu / (1.0 - nu)
}

struct Case {
    channels: usize,
    rows: usize,
    kernel: [usize; 2],
    stride: usize,
    dilation: usize,
    out: [usize; 2],
    lanes: usize,
    density: f64,
    groups: usize,
}

/// A convolution on a padded map with odd distances between rows and channels, checked value by value; returns the
/// bits.
fn check(case: &Case, choice: Option<Choice>, instructions: Instructions, r: &mut Random) -> Vec<f32> {
    let Case { channels, rows, kernel: [kh, kw], stride, dilation, out: [height, width], lanes, density, groups } =
        *case;
    let row = (width - 1) * stride + (kw - 1) * dilation + 1 + r.below(3);
    let channel = row * ((height - 1) * stride + (kh - 1) * dilation + 1) + r.below(3);
    let source: Vec<f32> = (0..channels * channel * lanes).map(|_| r.normal() as f32).collect();
    let offsets: Vec<usize> = (0..channels * kh * kw)
        .map(|j| j / (kh * kw) * channel + (j / kw % kh) * dilation * row + j % kw * dilation)
        .collect();
    let per_group = (channels / groups).max(1) * kh * kw;
    let weights: Vec<Vec<(usize, f32)>> = (0..rows)
        .map(|i| {
            let own = i * groups / rows;
            (0..offsets.len())
                .filter(|j| groups == 1 || j / per_group == own)
                .map(|j| (j, if r.uniform() < density { r.normal() as f32 } else { 0.0 }))
                .collect()
        })
        .collect();
    let bundles = r.below(2) == 1;
    let cost = Cost { cache: 1 + r.below(4000), taps_per_chunk: 2.0, bundles, ..Cost::default() };
    let cost = choice.map_or(cost, |choice| cost.only(choice));
    let packed = GridWeights::new(&weights, &offsets, kh * kw, 64, None, cost);
    assert_eq!(packed.rows(), rows);
    let grid = Grid {
        height,
        width,
        lanes,
        source_row: row * stride,
        source_step: stride,
        out_row: width + r.below(2),
        out_channel: (width + 1) * height + r.below(3),
    };
    let size = (rows * grid.out_channel + grid.out_row) * lanes;
    let start: Vec<f32> = (0..size).map(|_| r.normal() as f32).collect();
    let residual: Vec<f32> = (0..size).map(|_| r.normal() as f32).collect();
    let bias: Vec<f32> = (0..rows).map(|_| r.normal() as f32).collect();
    let mut all = Vec::new();
    for kind in 0..4 {
        let extra = Residual { from: &residual, row: grid.out_row, channel: grid.out_channel };
        let finish = Finish {
            bias: (kind > 0).then_some(&bias[..]),
            before: (kind == 2).then_some(extra),
            after: (kind == 3).then_some(extra),
            relu: kind % 2 == 1,
        };
        let mut got = start.clone();
        packed.run(instructions, &grid, &source, &mut got, &finish);
        let mut shared = start.clone();
        with_crew(3, |crew| packed.run_on(crew, instructions, &grid, &source, &mut shared, &finish));
        assert_eq!(bits(&got), bits(&shared));
        let mut untouched = vec![true; got.len()];
        for i in 0..rows {
            for y in 0..height {
                for x in 0..width {
                    for s in 0..lanes {
                        let at = (i * grid.out_channel + y * grid.out_row + x) * lanes + s;
                        untouched[at] = false;
                        let mut terms: Vec<f64> = weights[i]
                            .iter()
                            .map(|&(j, w)| {
                                let from = (y * grid.source_row + x * stride + offsets[j]) * lanes + s;
                                f64::from(w) * f64::from(source[from])
                            })
                            .collect();
                        terms.push(f64::from(if kind > 0 { bias[i] } else { start[at] }));
                        if kind >= 2 {
                            terms.push(f64::from(residual[at]));
                        }
                        let (sum, size) = (terms.iter().sum::<f64>(), terms.iter().map(|t| t.abs()).sum::<f64>());
                        let wanted = if finish.relu { sum.max(0.0) } else { sum };
                        let error = (f64::from(got[at]) - wanted).abs();
                        assert!(error <= gamma(terms.len()) * size, "{instructions:?} {choice:?} {kind}: {error}");
                    }
                }
            }
        }
        // No number outside its results has been changed.
        assert!(got.iter().zip(&start).zip(&untouched).all(|((a, b), keep)| !keep || a.to_bits() == b.to_bits()));
        all.extend(got);
    }
    all
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// A call that is large enough for many parts, along every axis that can be divided, gives the bits of one thread.
#[test]
fn parts_of_a_large_call_give_the_same_bits() {
    let mut r = Random::new(13);
    for (channels, rows, side, lanes, density) in
        [(8, 24, 20, 16, 1.0), (64, 96, 4, 1, 0.3), (40, 40, 9, 4, 0.5), (300, 70, 1, 16, 1.0), (300, 200, 1, 1, 0.2)]
    {
        let row = side + 2;
        let channel = row * row + 3;
        let offsets: Vec<usize> = (0..channels * 9).map(|j| j / 9 * channel + j / 3 % 3 * row + j % 3).collect();
        let weights: Vec<Vec<(usize, f32)>> = (0..rows)
            .map(|_| {
                (0..offsets.len())
                    .map(|j| (j, r.normal() as f32, r.uniform()))
                    .filter(|t| t.2 < density)
                    .map(|t| (t.0, t.1))
                    .collect()
            })
            .collect();
        let source: Vec<f32> = (0..channels * channel * lanes).map(|_| r.normal() as f32).collect();
        let packed = GridWeights::new(&weights, &offsets, 9, 2000, None, Cost::default());
        let out_channel = side * side;
        let grid =
            Grid { height: side, width: side, lanes, source_row: row, source_step: 1, out_row: side, out_channel };
        let bias: Vec<f32> = (0..rows).map(|_| r.normal() as f32).collect();
        let finish = Finish { bias: Some(&bias), relu: true, ..Default::default() };
        for &instructions in Instructions::available() {
            let mut alone = vec![0.0; rows * out_channel * lanes];
            packed.run(instructions, &grid, &source, &mut alone, &finish);
            for threads in [2, 5, 16] {
                let mut shared = vec![0.0; alone.len()];
                with_crew(threads, |crew| packed.run_on(crew, instructions, &grid, &source, &mut shared, &finish));
                assert_eq!(bits(&alone), bits(&shared), "{rows} {side} {lanes} {threads} {instructions:?}");
            }
            if (side, lanes) == (1, 1) {
                let x: Vec<f32> = offsets.iter().map(|o| source[*o]).collect();
                for dense in [false, true] {
                    let packed = RowWeights::only(&weights, x.len(), Samples::Beside(1), instructions, dense);
                    for threads in [1, 2, 7] {
                        let mut shared = vec![0.0; rows];
                        with_crew(threads, |crew| packed.run_on(crew, &x, &mut shared, Some(&bias), true));
                        assert_eq!(bits(&alone), bits(&shared), "{dense} {threads} {instructions:?}");
                    }
                }
            }
        }
    }
}

/// Taps that read padding are left out at the borders; the results equal those with zeros.
#[test]
fn borders_are_left_out_where_they_read_zeros() {
    let mut r = Random::new(14);
    for (side, lanes, pad, kernel) in [
        (4, 16, 1, 3),
        (8, 16, 1, 3),
        (5, 16, 2, 5),
        (3, 16, 2, 3),
        (6, 8, 1, 3),
        (8, 1, 1, 3),
        (16, 2, 1, 3),
        (32, 1, 1, 3),
    ] {
        let (channels, rows, area) = (5, 11, kernel * kernel);
        let row = side + kernel - 1;
        let mut source = vec![0.0f32; channels * row * row * lanes];
        for (k, v) in source.iter_mut().enumerate() {
            let (y, x) = (k / lanes / row % row, k / lanes % row);
            if (pad..row + 1 + pad - kernel).contains(&y) && (pad..row + 1 + pad - kernel).contains(&x) {
                *v = r.normal() as f32;
            }
        }
        let offsets: Vec<usize> =
            (0..channels * area).map(|j| j / area * row * row + j / kernel % kernel * row + j % kernel).collect();
        let weights: Vec<Vec<(usize, f32)>> =
            (0..rows).map(|_| (0..offsets.len()).map(|j| (j, r.normal() as f32)).collect()).collect();
        // The map is the part of `row` without the padding before and after it.
        let behind = kernel - 1 - pad;
        let borders = Borders { kernel: [kernel; 2], rows: [pad, behind], columns: [pad, behind] };
        let out_channel = side * side;
        let grid =
            Grid { height: side, width: side, lanes, source_row: row, source_step: 1, out_row: side, out_channel };
        for &instructions in Instructions::available() {
            let run = |borders| {
                let mut out = vec![1.0; rows * out_channel * lanes];
                let packed =
                    GridWeights::new(&weights, &offsets, area, 500, borders, Cost::default().only(Choice::Dense));
                packed.run(instructions, &grid, &source, &mut out, &Finish::default());
                out
            };
            assert_eq!(run(None), run(Some(borders)), "{side} {lanes} {instructions:?}");
        }
    }
}

fn cases() -> Vec<Case> {
    let mut r = Random::new(11);
    let mut cases = Vec::new();
    for k in 0..60 {
        let stride = if k % 4 == 3 { 2 } else { 1 };
        let lanes = if stride == 2 { 16 } else { [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64][k % 12] };
        let kernel = [[1, 1], [3, 3], [2, 3], [5, 1]][r.below(4)];
        let groups = [1, 1, 2, 0][r.below(4)];
        let channels = 1 + r.below(7);
        let (channels, rows, groups) = match groups {
            1 => (channels, 1 + r.below(19), 1),
            2 => (2 * channels, 2 * (1 + r.below(9)), 2),
            // Depthwise.
            _ => (channels, channels, channels),
        };
        cases.push(Case {
            channels,
            rows,
            kernel,
            stride,
            dilation: 1 + r.below(2),
            out: [1 + r.below(10), 1 + r.below(if lanes < 8 { 40 } else { 9 })],
            lanes,
            density: [1.0, 0.5, 0.2, 0.05][r.below(4)],
            groups,
        });
    }
    // Single rows of more vectors than stay in registers at once.
    for (width, lanes) in [(70, 4), (35, 8), (19, 16), (5, 64), (3, 32)] {
        for density in [1.0, 0.3] {
            let (kernel, out) = ([1, 1], [1, width]);
            cases.push(Case { channels: 13, rows: 11, kernel, stride: 1, dilation: 1, out, lanes, density, groups: 1 });
        }
    }
    cases
}

#[test]
fn grids_match_the_definition_and_the_choice_changes_no_bit() {
    for (k, case) in cases().iter().enumerate() {
        for &instructions in Instructions::available() {
            let run = |choice| check(case, choice, instructions, &mut Random::new(k as u64));
            let bits = |values: Vec<f32>| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let sparse = bits(run(Some(Choice::Sparse)));
            assert_eq!(sparse, bits(run(Some(Choice::Dense))), "{k} {instructions:?}");
            assert_eq!(sparse, bits(run(None)), "{k} {instructions:?}");
        }
    }
}

#[test]
fn vectors_of_8_and_of_16_give_the_same_bits() {
    if Instructions::available().len() < 3 {
        return;
    }
    for (k, case) in cases().iter().enumerate() {
        let run = |instructions| check(case, None, instructions, &mut Random::new(k as u64));
        assert_eq!(run(Instructions::Avx2), run(Instructions::Avx512), "{k}");
    }
}

#[test]
fn single_samples_match_the_definition_and_a_grid_of_one_lane() {
    let mut r = Random::new(12);
    for k in 0..80 {
        let (rows, columns) = (1 + r.below(150), 1 + r.below(130));
        let density = [1.0, 0.5, 0.1, 0.02, 0.0][r.below(5)];
        let weights: Vec<Vec<(usize, f32)>> = (0..rows)
            .map(|_| {
                let mut row = Vec::new();
                for j in 0..columns {
                    if r.uniform() < density {
                        row.push((j, r.normal() as f32));
                    }
                }
                row
            })
            .collect();
        let x: Vec<f32> = (0..columns).map(|_| r.normal() as f32).collect();
        let bias: Vec<f32> = (0..rows).map(|_| r.normal() as f32).collect();
        let start: Vec<f32> = (0..rows).map(|_| r.normal() as f32).collect();
        for &instructions in Instructions::available() {
            for (has_bias, relu) in [(true, false), (true, true), (false, false)] {
                let bias = has_bias.then_some(&bias[..]);
                let mut results = Vec::new();
                for dense in [false, true] {
                    let mut out = start.clone();
                    RowWeights::only(&weights, columns, Samples::Beside(1), instructions, dense)
                        .run(&x, &mut out, bias, relu);
                    for (i, row) in weights.iter().enumerate() {
                        let first = f64::from(bias.map_or(start[i], |b| b[i]));
                        let terms = row.iter().map(|&(j, w)| f64::from(w) * f64::from(x[j]));
                        let (sum, size) = terms.fold((first, first.abs()), |(sum, size), t| (sum + t, size + t.abs()));
                        let wanted = if relu { sum.max(0.0) } else { sum };
                        let error = (f64::from(out[i]) - wanted).abs();
                        assert!(error <= gamma(row.len()) * size, "{k} {instructions:?} {dense}: {error}");
                    }
                    results.push(out);
                }
                let offsets: Vec<usize> = (0..columns).collect();
                let grid =
                    Grid { height: 1, width: 1, lanes: 1, source_row: 1, source_step: 1, out_row: 1, out_channel: 1 };
                let mut out = start.clone();
                let packed = GridWeights::new(&weights, &offsets, 1, 4, None, Cost::default());
                packed.run(instructions, &grid, &x, &mut out, &Finish { bias, relu, ..Default::default() });
                results.push(out);
                assert!(results.iter().all(|o| *o == results[0]), "{k} {instructions:?}");
            }
        }
    }
}

/// Dense panels for a few samples against one sample at a time, and against the sparse bundles that take their place.
#[test]
fn few_samples_give_the_bits_of_one_at_a_time() {
    let mut r = Random::new(15);
    for k in 0..64 {
        let (rows, columns, samples) = (1 + r.below(150), 1 + r.below(90), 1 + k % FEW);
        let density = [1.0, 0.5, 0.1, 0.0][r.below(4)];
        let weights: Vec<Vec<(usize, f32)>> = (0..rows)
            .map(|_| {
                let drawn: Vec<_> = (0..columns).map(|j| (j, r.normal() as f32, r.uniform())).collect();
                drawn.into_iter().filter(|t| t.2 < density).map(|t| (t.0, t.1)).collect()
            })
            .collect();
        let x: Vec<f32> = (0..columns * samples).map(|_| r.normal() as f32).collect();
        let bias: Vec<f32> = (0..rows).map(|_| r.normal() as f32).collect();
        let start: Vec<f32> = (0..rows * samples).map(|_| r.normal() as f32).collect();
        let one = |all: &[f32], s: usize| all.iter().skip(s).step_by(samples).copied().collect::<Vec<_>>();
        let offsets: Vec<usize> = (0..columns).collect();
        let grid =
            Grid { height: 1, width: 1, lanes: samples, source_row: 1, source_step: 1, out_row: 1, out_channel: 1 };
        for &instructions in Instructions::available() {
            for (has_bias, relu) in [(true, false), (true, true), (false, false)] {
                let bias = has_bias.then_some(&bias[..]);
                let few = RowWeights::only(&weights, columns, Samples::Beside(samples), instructions, true);
                let mut together = start.clone();
                few.run(&x, &mut together, bias, relu);
                let mut shared = start.clone();
                with_crew(3, |crew| few.run_on(crew, &x, &mut shared, bias, relu));
                assert_eq!(bits(&together), bits(&shared));
                for s in 0..samples {
                    let mut alone = one(&start, s);
                    RowWeights::only(&weights, columns, Samples::Beside(1), instructions, false).run(
                        &one(&x, s),
                        &mut alone,
                        bias,
                        relu,
                    );
                    assert_eq!(bits(&alone), bits(&one(&together, s)), "{k} {instructions:?} {samples}");
                }
                // All values of a sample, then those of the next one.
                let apart = |all: &[f32]| (0..samples).flat_map(|s| one(all, s)).collect::<Vec<_>>();
                for dense in [false, true] {
                    let few = RowWeights::only(&weights, columns, Samples::Apart(samples), instructions, dense);
                    let mut out = apart(&start);
                    with_crew(3, |crew| few.run_on(crew, &apart(&x), &mut out, bias, relu));
                    assert_eq!(bits(&out), bits(&apart(&together)), "{k} {instructions:?} {samples} {dense}");
                }
                let cost = Cost { bundles: true, ..Cost::default().only(Choice::Sparse) };
                let mut bundles = start.clone();
                let packed = GridWeights::new(&weights, &offsets, 1, 4 * samples, None, cost);
                packed.run(instructions, &grid, &x, &mut bundles, &Finish { bias, relu, ..Default::default() });
                assert_eq!(bits(&together), bits(&bundles), "{k} {instructions:?} {samples}");
            }
        }
    }
}

/// Bundles have offsets of sixteen bits; offsets that are further apart, or that fit only when counted in steps,
/// still give the sums of a plain loop.
#[test]
fn far_apart_columns_of_bundles_are_read_where_they_lie() {
    let mut r = Random::new(21);
    // One chunk of columns that lie 16 and 8192 positions, a step of four, and an odd number of positions apart.
    for apart in [16, 8192, 4 * 1021, 20_011] {
        let (rows, columns, lanes) = (7, 24, 2);
        let offsets: Vec<usize> = (0..columns).map(|j| j * apart).collect();
        let weights: Vec<Vec<(usize, f32)>> = (0..rows)
            .map(|i| {
                let kept = (0..columns).filter(|_| i != 3 && r.uniform() < 0.4).collect::<Vec<_>>();
                kept.into_iter().map(|j| (j, r.normal() as f32)).collect()
            })
            .collect();
        let x: Vec<f32> = (0..(columns * apart) * lanes).map(|_| r.normal() as f32).collect();
        let bias: Vec<f32> = (0..rows).map(|_| r.normal() as f32).collect();
        let cost = Cost { bundles: true, ..Cost::default().only(Choice::Sparse) };
        let packed = GridWeights::new(&weights, &offsets, 1, 1, None, cost);
        let grid = Grid { height: 1, width: 1, lanes, source_row: 1, source_step: 1, out_row: 1, out_channel: 1 };
        for &instructions in Instructions::available() {
            let mut out = vec![0.0; rows * lanes];
            packed.run(instructions, &grid, &x, &mut out, &Finish { bias: Some(&bias), ..Default::default() });
            for (i, row) in weights.iter().enumerate() {
                for s in 0..lanes {
                    let mut terms: Vec<f64> =
                        row.iter().map(|&(j, w)| f64::from(w) * f64::from(x[offsets[j] * lanes + s])).collect();
                    terms.push(f64::from(bias[i]));
                    let (sum, size) = (terms.iter().sum::<f64>(), terms.iter().map(|t| t.abs()).sum::<f64>());
                    let error = (f64::from(out[i * lanes + s]) - sum).abs();
                    assert!(error <= gamma(terms.len()) * size, "{apart} {instructions:?} row {i}: {error}");
                }
            }
        }
    }
}
