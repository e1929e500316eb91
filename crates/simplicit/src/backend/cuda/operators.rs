//! Operators of layers on the device: values with a channel per unit. An operator that only moves units is a map from
//! units to units, which the CPU's operator is run once to find.

use super::layers::Values;
use super::memory::Buffer;
use super::{Session, arguments};
use crate::{Error, Result};

/// For every unit of a result the unit of an operand that it is made from, and the inverse of this map.
pub(crate) struct UnitMap {
    /// For every unit of the result its unit of the operand; -1 stands for none.
    from: Buffer<i32>,
    /// For every unit of the operand the place in the list where its units of the result begin.
    starts: Buffer<i32>,
    list: Buffer<i32>,
    operand: usize,
    result: usize,
}

/// A function of two values, by its number in `operators.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Pairwise {
    Add = 0,
    Subtract = 1,
    Multiply = 2,
    Divide = 3,
}

/// A batch of products: rows × depth times depth × cols.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Products {
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    pub(crate) cols: usize,
}

impl Session {
    /// The maps from the operand's unit of every unit of the result, or -1.
    pub(crate) fn unit_map(&self, from: &[i32], operand: usize) -> Result<UnitMap> {
        let mut lists: Vec<Vec<i32>> = vec![Vec::new(); operand];
        for (to, &unit) in from.iter().enumerate() {
            if unit >= 0 {
                match lists.get_mut(unit as usize) {
                    Some(list) => list.push(to as i32),
                    None => return Err(Error::shape("unit of an operand", format!("below {operand}"), unit)),
                }
            }
        }
        let mut starts = vec![0];
        for list in &lists {
            starts.push(starts[starts.len() - 1] + list.len() as i32);
        }
        let list = lists.concat();
        Ok(UnitMap {
            from: self.uploaded(from)?,
            starts: self.uploaded(&starts)?,
            list: self.uploaded(&list)?,
            operand,
            result: from.len(),
        })
    }

    fn line_up(&self, what: &str, values: &Values, units: usize) -> Result<()> {
        if values.channels == units && values.positions == 1 {
            return Ok(());
        }
        Err(Error::shape(what, format!("{units} units"), format!("{} × {}", values.channels, values.positions)))
    }

    /// out += scale · x at the units of a map.
    pub(crate) fn pick(&self, out: &Values, x: &Values, map: &UnitMap, scale: f32) -> Result<()> {
        self.line_up("values that are picked", x, map.operand)?;
        self.line_up("picked values", out, map.result)?;
        let n = map.result * x.count;
        let arguments = arguments!(&out.data, &x.data, &map.from, n as u64, x.count, scale);
        self.each(self.cuda.kernels.pick_units, n, 1, arguments)
    }

    /// dx += scale · the sum of all units of `dout` that a unit of x goes to: the transpose of [`Session::pick`].
    pub(crate) fn pick_back(&self, dx: &Values, dout: &Values, map: &UnitMap, scale: f32) -> Result<()> {
        self.line_up("values that are picked", dx, map.operand)?;
        self.line_up("picked values", dout, map.result)?;
        let n = map.operand * dx.count;
        let arguments = arguments!(&dx.data, &dout.data, &map.starts, &map.list, n as u64, dx.count, scale);
        self.each(self.cuda.kernels.sum_units, n, 1, arguments)
    }

    /// A function of two values, each repeated as its map says.
    pub(crate) fn pairwise(&self, kind: Pairwise, [a, b]: [&Values; 2], maps: &[UnitMap; 2]) -> Result<Values> {
        self.line_up("first value", a, maps[0].operand)?;
        self.line_up("second value", b, maps[1].operand)?;
        let out = self.no_values(maps[0].result, a.count, 1)?;
        let n = maps[0].result * a.count;
        let arguments =
            arguments!(&out.data, &a.data, &b.data, &maps[0].from, &maps[1].from, n as u64, a.count, kind as usize);
        self.each(self.cuda.kernels.binary_units, n, 1, arguments)?;
        Ok(out)
    }

    /// Adds the cotangent of one of the two values.
    pub(crate) fn pairwise_back(
        &self,
        kind: Pairwise,
        side: usize,
        dx: &Values,
        dout: &Values,
        [a, b]: [&Values; 2],
        maps: &[UnitMap; 2],
    ) -> Result<()> {
        self.line_up("cotangent", dx, maps[side].operand)?;
        let n = maps[side].operand * dx.count;
        let arguments = arguments!(
            &dx.data,
            &dout.data,
            &a.data,
            &b.data,
            &maps[0].from,
            &maps[1].from,
            &maps[side].starts,
            &maps[side].list,
            n as u64,
            dx.count,
            kind as usize,
            side
        );
        self.each(self.cuda.kernels.binary_back, n, 1, arguments)
    }

    /// out += a·b for every matrix of a batch; `[row, step]` of each factor are the distances, in units, from one row
    /// (or column) of the result to the next, and along the sum.
    fn add_products(
        &self,
        out: &Values,
        (rows, cols, depth): (usize, usize, usize),
        (a, a_steps): (&Values, [usize; 2]),
        (b, b_steps): (&Values, [usize; 2]),
    ) -> Result<()> {
        let n = out.channels * out.count;
        let arguments = arguments!(
            &out.data,
            &a.data,
            &b.data,
            n as u64,
            out.count,
            rows,
            cols,
            depth,
            a_steps[0],
            a_steps[1],
            b_steps[0],
            b_steps[1],
            (rows * depth) as u64,
            (cols * depth) as u64
        );
        self.each(self.cuda.kernels.product_units, n, 1, arguments)
    }

    /// a·b, matrix by matrix.
    pub(crate) fn products_of(&self, a: &Values, b: &Values, sizes: Products) -> Result<Values> {
        let Products { rows, depth, cols } = sizes;
        let batch = a.channels / (rows * depth).max(1);
        self.line_up("second factor", b, batch * depth * cols)?;
        let out = self.no_values(batch * rows * cols, a.count, 1)?;
        self.add_products(&out, (rows, cols, depth), (a, [depth, 1]), (b, [1, cols]))?;
        Ok(out)
    }

    /// Adds the cotangents of those factors for which they are asked.
    pub(crate) fn products_back(
        &self,
        [da, db]: [Option<&Values>; 2],
        dout: &Values,
        [a, b]: [&Values; 2],
        sizes: Products,
    ) -> Result<()> {
        let Products { rows, depth, cols } = sizes;
        if let Some(da) = da {
            self.add_products(da, (rows, depth, cols), (dout, [cols, 1]), (b, [cols, 1]))?;
        }
        if let Some(db) = db {
            self.add_products(db, (depth, cols, rows), (a, [1, depth]), (dout, [1, cols]))?;
        }
        Ok(())
    }

    /// eˣ/Σeˣ along an axis of `size` units that are `inner` apart.
    pub(crate) fn softmax(&self, x: &Values, size: usize, inner: usize) -> Result<Values> {
        let out = self.no_values(x.channels, x.count, 1)?;
        let n = x.channels / size.max(1) * x.count;
        let arguments = arguments!(&out.data, &x.data, n as u64, x.count, size, inner);
        self.each(self.cuda.kernels.softmax_units, n, 1, arguments)?;
        Ok(out)
    }

    pub(crate) fn softmax_back(&self, dx: &Values, y: &Values, dout: &Values, size: usize, inner: usize) -> Result<()> {
        let n = y.channels / size.max(1) * y.count;
        let arguments = arguments!(&dx.data, &y.data, &dout.data, n as u64, y.count, size, inner);
        self.each(self.cuda.kernels.softmax_back, n, 1, arguments)
    }

    /// (x − mean)/√(variance + ε) of every `size` units.
    pub(crate) fn normalised(&self, x: &Values, size: usize, epsilon: f32) -> Result<Values> {
        let out = self.no_values(x.channels, x.count, 1)?;
        let n = x.channels / size.max(1) * x.count;
        let arguments = arguments!(&out.data, &x.data, n as u64, x.count, size, epsilon);
        self.each(self.cuda.kernels.normalise_units, n, 1, arguments)?;
        Ok(out)
    }

    pub(crate) fn normalised_back(
        &self,
        dx: &Values,
        [x, y]: [&Values; 2],
        dout: &Values,
        size: usize,
        epsilon: f32,
    ) -> Result<()> {
        let n = x.channels / size.max(1) * x.count;
        let arguments = arguments!(&dx.data, &x.data, &y.data, &dout.data, n as u64, x.count, size, epsilon);
        self.each(self.cuda.kernels.normalise_back, n, 1, arguments)
    }
}
