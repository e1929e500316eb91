
// ---- layers: the value of channel c, sample s, position p lies at (c * count + s) * positions + p ----
// Where blockIdx.y counts channels or taps, it walks over all of them in steps of gridDim.y.

struct Geometry {
    int channels, height, width, out_height, out_width;
    int kernel_height, kernel_width, stride_y, stride_x, top, left, down, right;
};

#define ELEMENT (size64)blockIdx.x * blockDim.x + threadIdx.x

// (raw scale - mean) / std of chosen rows, in f64 and rounded once.
extern "C" __global__ void take_rows(float* out, const float* raw, const int* chosen, double scale, const double* mean,
                                     const double* std, int d, size64 count) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= count) return;
    int j = (int)(e % d);
    double value = __dmul_rn((double)raw[(size64)chosen[e / d] * d + j], scale);
    out[e] = (float)((value - mean[j]) / std[j]);
}

// Copies the units of samples whose channels have `from` positions to a layout in which channels have `to` positions.
extern "C" __global__ void relayout(float* out, const float* in, size64 n, int count, int from, int to) {
    size64 e = ELEMENT;
    if (e >= n) return;
    size64 unit = e / ((size64)count * to) * to + e % to, s = e / to % count;
    out[e] = in[(unit / from * count + s) * from + unit % from];
}

extern "C" __global__ void fill_bias(float* out, const float* bias, size64 n, size64 per_channel) {
    size64 e = ELEMENT;
    if (e < n) out[e] = bias[e / per_channel];
}

// Every tap of every window of some samples: column i = (sample, position out) of tap t at t * m + i.
extern "C" __global__ void windows(float* columns, const float* x, struct Geometry g, int first, int samples, int count) {
    size64 e = ELEMENT;
    int positions = g.out_height * g.out_width, area = g.kernel_height * g.kernel_width;
    size64 m = (size64)samples * positions;
    if (e >= m) return;
    int s = first + (int)(e / positions), p = (int)(e % positions);
    int y0 = p / g.out_width * g.stride_y - g.top, x0 = p % g.out_width * g.stride_x - g.left;
    for (int t = blockIdx.y; t < g.channels * area; t += gridDim.y) {
        int y = y0 + t / g.kernel_width % g.kernel_height * g.down, at = x0 + t % g.kernel_width * g.right;
        int inside = y >= 0 && y < g.height && at >= 0 && at < g.width;
        size64 from = (((size64)(t / area) * count + s) * g.height + (inside ? y : 0)) * g.width + (inside ? at : 0);
        columns[t * m + e] = inside ? x[from] : 0.0f;
    }
}

// The output position whose window reads pixel v of an axis with its tap k; -1 where there is none.
__device__ inline int window_of(int v, int k, int before, int dilation, int stride, int out) {
    int start = v + before - k * dilation;
    if (start < 0 || start % stride) return -1;
    return start / stride < out ? start / stride : -1;
}

// Calls visit(tap, y, x) for every window that reads a pixel: the tap that reads it, and where its result is.
template <class Visit>
__device__ inline void for_windows(const struct Geometry& g, int pixel, Visit visit) {
    for (int i = 0; i < g.kernel_height; i++) {
        int y = window_of(pixel / g.width, i, g.top, g.down, g.stride_y, g.out_height);
        if (y < 0) continue;
        for (int j = 0; j < g.kernel_width; j++) {
            int x = window_of(pixel % g.width, j, g.left, g.right, g.stride_x, g.out_width);
            if (x >= 0) visit(i * g.kernel_width + j, y, x);
        }
    }
}

// The transpose of `windows`; adds to dx.
extern "C" __global__ void fold(float* dx, const float* columns, struct Geometry g, int first, int samples, int count) {
    size64 e = ELEMENT;
    int pixels = g.height * g.width, positions = g.out_height * g.out_width, area = g.kernel_height * g.kernel_width;
    if (e >= (size64)samples * pixels) return;
    int s = (int)(e / pixels), pixel = (int)(e % pixels);
    size64 m = (size64)samples * positions;
    for (int c = blockIdx.y; c < g.channels; c += gridDim.y) {
        float sum = 0.0f;
        for_windows(g, pixel, [&](int tap, int y, int x) {
            sum += columns[((size64)c * area + tap) * m + (size64)s * positions + y * g.out_width + x];
        });
        dx[((size64)c * count + first + s) * pixels + pixel] += sum;
    }
}

// Convolution in groups of channels; adds to out. Weights have one row per output channel, over the taps of its own
// group.
extern "C" __global__ void grouped(float* out, const float* x, const float* weights, struct Geometry g, int count, int rows, int groups) {
    size64 e = ELEMENT;
    int positions = g.out_height * g.out_width, area = g.kernel_height * g.kernel_width;
    if (e >= (size64)count * positions) return;
    int s = (int)(e / positions), p = (int)(e % positions), own = g.channels / groups;
    int y0 = p / g.out_width * g.stride_y - g.top, x0 = p % g.out_width * g.stride_x - g.left;
    for (int o = blockIdx.y; o < rows; o += gridDim.y) {
        int first = o / (rows / groups) * own;
        float sum = 0.0f;
        for (int c = 0; c < own; c++)
            for (int i = 0; i < g.kernel_height; i++) {
                int y = y0 + i * g.down;
                if (y < 0 || y >= g.height) continue;
                for (int j = 0; j < g.kernel_width; j++) {
                    int at = x0 + j * g.right;
                    if (at < 0 || at >= g.width) continue;
                    float w = weights[((size64)o * own + c) * area + i * g.kernel_width + j];
                    sum += w * x[(((size64)(first + c) * count + s) * g.height + y) * g.width + at];
                }
            }
        out[((size64)o * count + s) * positions + p] += sum;
    }
}

// The transpose of `grouped`; adds to dx.
extern "C" __global__ void grouped_back(float* dx, const float* dout, const float* weights, struct Geometry g, int count, int rows, int groups) {
    size64 e = ELEMENT;
    int pixels = g.height * g.width, positions = g.out_height * g.out_width, area = g.kernel_height * g.kernel_width;
    if (e >= (size64)count * pixels) return;
    int s = (int)(e / pixels), pixel = (int)(e % pixels), own = g.channels / groups, each = rows / groups;
    for (int c = blockIdx.y; c < g.channels; c += gridDim.y) {
        float sum = 0.0f;
        for_windows(g, pixel, [&](int tap, int y, int x) {
            for (int o = c / own * each; o < (c / own + 1) * each; o++) {
                float w = weights[((size64)o * own + c % own) * area + tap];
                sum += w * dout[((size64)o * count + s) * positions + y * g.out_width + x];
            }
        });
        dx[((size64)c * count + s) * pixels + pixel] += sum;
    }
}

// The derivative by the weights of `grouped`, from the cotangent of its result: `parts` gets blockDim.x sums for each of
// the weights from `first` on, each in a fixed order.
extern "C" __global__ void grouped_outer(double* parts, const float* x, const float* dout, struct Geometry g, int first, int count, int rows, int groups) {
    int positions = g.out_height * g.out_width, area = g.kernel_height * g.kernel_width, own = g.channels / groups;
    int w = first + blockIdx.x, o = w / (own * area), c = o / (rows / groups) * own + w / area % own;
    int i = w % area / g.kernel_width, j = w % g.kernel_width;
    double sum = 0.0;
    for (size64 e = threadIdx.x; e < (size64)count * positions; e += blockDim.x) {
        int p = (int)(e % positions);
        int y = p / g.out_width * g.stride_y - g.top + i * g.down, at = p % g.out_width * g.stride_x - g.left + j * g.right;
        if (y < 0 || y >= g.height || at < 0 || at >= g.width) continue;
        float value = x[(((size64)c * count + e / positions) * g.height + y) * g.width + at];
        sum += (double)(dout[(size64)o * count * positions + e] * value);
    }
    parts[(size64)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// blockDim.x sums of every channel, each in a fixed order.
extern "C" __global__ void channel_sums(double* parts, const float* v, size64 m) {
    double sum = 0.0;
    for (size64 i = threadIdx.x; i < m; i += blockDim.x) sum += v[blockIdx.x * m + i];
    parts[(size64)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Adds the `each` parts of every number to it.
extern "C" __global__ void add_parts(float* out, const double* parts, size64 n, int each) {
    size64 e = ELEMENT;
    if (e >= n) return;
    double sum = 0.0;
    for (int k = 0; k < each; k++) sum += parts[e * each + k];
    out[e] += (float)sum;
}

// Number of places of a window that lie inside the map along one axis.
__device__ inline int inside_of(int out, int kernel, int stride, int before, int size) {
    int start = out * stride, low = start > before ? start : before;
    int end = start + kernel < before + size ? start + kernel : before + size;
    return end > low ? end - low : 0;
}

__device__ inline double divisor_of(const struct Geometry& g, int y, int x, int kind) {
    if (kind == 2) return g.kernel_height * g.kernel_width;
    return (double)inside_of(y, g.kernel_height, g.stride_y, g.top, g.height)
        * inside_of(x, g.kernel_width, g.stride_x, g.left, g.width);
}

// The largest pixel of a window, the first one row by row; -1 where the window has none.
__device__ inline int winner_of(const float* map, const struct Geometry& g, int y, int x) {
    int best = -1;
    for (int i = 0; i < g.kernel_height; i++)
        for (int j = 0; j < g.kernel_width; j++) {
            int py = y * g.stride_y + i - g.top, px = x * g.stride_x + j - g.left;
            if (py < 0 || py >= g.height || px < 0 || px >= g.width) continue;
            int at = py * g.width + px;
            if (best < 0 || map[at] > map[best] || map[at] != map[at]) best = at;
        }
    return best;
}

// kind 0: maximum; 1: mean of the values inside; 2: mean with zeros of the padding. Every channel of every sample is
// a map of its own. `taken` is x itself or, for the change of the result, a change of x: x says which pixel is largest.
extern "C" __global__ void pool(float* out, const float* x, const float* taken, struct Geometry g, size64 n, int kind) {
    size64 e = ELEMENT;
    if (e >= n) return;
    int positions = g.out_height * g.out_width, p = (int)(e % positions);
    int oy = p / g.out_width, ox = p % g.out_width;
    size64 first = e / positions * g.height * g.width;
    const float* map = taken + first;
    if (kind == 0) {
        int best = winner_of(x + first, g, oy, ox);
        out[e] = best < 0 ? 0.0f : map[best];
        return;
    }
    double sum = 0.0;
    for (int i = 0; i < g.kernel_height; i++)
        for (int j = 0; j < g.kernel_width; j++) {
            int y = oy * g.stride_y + i - g.top, at = ox * g.stride_x + j - g.left;
            if (y >= 0 && y < g.height && at >= 0 && at < g.width) sum += map[y * g.width + at];
        }
    out[e] = (float)(sum / divisor_of(g, oy, ox, kind));
}

// The transpose of `pool`; adds to dx. The first largest value of a window receives all of its cotangent.
extern "C" __global__ void pool_back(float* dx, const float* x, const float* dout, struct Geometry g, size64 n, int kind) {
    size64 e = ELEMENT;
    if (e >= n) return;
    int pixels = g.height * g.width, pixel = (int)(e % pixels);
    const float* map = x + e / pixels * pixels;
    const float* d = dout + e / pixels * g.out_height * g.out_width;
    double sum = 0.0;
    for_windows(g, pixel, [&](int, int y, int x) {
        float cotangent = d[y * g.out_width + x];
        if (kind == 0) sum += winner_of(map, g, y, x) == pixel ? cotangent : 0.0f;
        else sum += cotangent / divisor_of(g, y, x, kind);
    });
    dx[e] += (float)sum;
}

// ---- activations, numbered as in layers.rs ----

__device__ inline double logistic(double z) { return 1.0 / (1.0 + exp(-z)); }
__device__ inline double soft_plus(double z) { return fmax(z, 0.0) + log1p(exp(-fabs(z))); }
__device__ inline double gated(double z, double weight) { return weight == 0.0 ? 0.0 : z * weight; }
__device__ inline double ramp(double z, double slope, double offset) { return fmin(fmax(slope * z + offset, 0.0), 1.0); }
__device__ inline double normal_share(double z) { return 0.5 * erfc(-z * 0.70710678118654752); }

#define SELU_ALPHA 1.6732632
#define SELU_GAMMA 1.050701
#define GELU_SCALE 0.7978845608028654
#define GELU_CUBIC 0.044715

__device__ inline double phi(int kind, double z, double a, double b) {
    switch (kind) {
        case 0: return z > 0.0 ? z : 0.0;
        case 1: return fmax(z, 0.0) + a * fmin(z, 0.0);
        case 2: return tanh(z);
        case 3: return logistic(z);
        case 4: return z;
        case 5: return fmin(fmax(z, a), b);
        case 6: return soft_plus(z);
        case 7: return z / (1.0 + fabs(z));
        case 8: return z < 0.0 ? a * expm1(z) : z;
        case 9: return z < 0.0 ? a * expm1(z / a) : z;
        case 10: return z < 0.0 ? SELU_GAMMA * SELU_ALPHA * expm1(z) : SELU_GAMMA * z;
        case 11: return ramp(z, a, b);
        case 12: return gated(z, ramp(z, 1.0 / 6.0, 0.5));
        case 13: return gated(z, normal_share(z));
        case 14: return gated(z, 0.5 + 0.5 * tanh(GELU_SCALE * (z + GELU_CUBIC * z * z * z)));
        case 15: return gated(z, logistic(z));
        default: return gated(z, tanh(soft_plus(z)));
    }
}

__device__ inline double slope(int kind, double z, double a, double b) {
    double t;
    switch (kind) {
        case 0: return z > 0.0 ? 1.0 : 0.0;
        case 1: return z > 0.0 ? 1.0 : a;
        case 2: t = tanh(z); return 1.0 - t * t;
        case 3: t = logistic(z); return t * (1.0 - t);
        case 4: return 1.0;
        case 5: return z > a && z <= b ? 1.0 : 0.0;
        case 6: return logistic(z);
        case 7: t = 1.0 / (1.0 + fabs(z)); return t * t;
        case 8: return z <= 0.0 ? a * exp(z) : 1.0;
        case 9: return z <= 0.0 ? exp(z / a) : 1.0;
        case 10: return z <= 0.0 ? SELU_GAMMA * SELU_ALPHA * exp(z) : SELU_GAMMA;
        case 11: t = a * z + b; return (a > 0.0 ? t > 0.0 && t <= 1.0 : t >= 0.0 && t < 1.0) ? a : 0.0;
        case 12: return z <= -3.0 ? 0.0 : z <= 3.0 ? z / 3.0 + 0.5 : 1.0;
        case 13: return normal_share(z) + gated(z, 0.3989422804014327 * exp(-0.5 * z * z));
        case 14:
            t = tanh(GELU_SCALE * (z + GELU_CUBIC * z * z * z));
            return 0.5 + 0.5 * t + gated(0.5 * z * GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * z * z), 1.0 - t * t);
        case 15: t = logistic(z); return t + gated(z, t * (1.0 - t));
        default: t = tanh(soft_plus(z)); return t + gated(z, logistic(z) * (1.0 - t * t));
    }
}

extern "C" __global__ void activate(float* x, size64 n, int kind, float a, float b) {
    size64 e = ELEMENT;
    if (e < n) x[e] = kind == 0 ? (x[e] > 0.0f ? x[e] : 0.0f) : (float)phi(kind, x[e], a, b);
}

// Cotangents of pre-activations from those of the values.
extern "C" __global__ void gate(float* w, const float* z, size64 n, int kind, float a, float b) {
    size64 e = ELEMENT;
    if (e < n) w[e] *= (float)slope(kind, z[e], a, b);
}

// Adds values times one number, and times a factor per channel where there are any.
extern "C" __global__ void add_scaled(float* out, const float* x, const float* factors, size64 n, size64 per_channel, float scale) {
    size64 e = ELEMENT;
    if (e < n) out[e] += scale * (factors ? factors[e / per_channel] * x[e] : x[e]);
}

// Multiplies values by a factor per unit and, where there are any, by one per sample.
extern "C" __global__ void weigh(float* x, const float* units, const float* samples, size64 n, int count, int positions) {
    size64 e = ELEMENT;
    if (e >= n) return;
    float factor = units[e / ((size64)count * positions) * positions + e % positions];
    x[e] *= samples ? factor * samples[e / positions % count] : factor;
}

// ---- statistics: places are (sample, position out) as sample * positions + position; sample i of column j at j * m + i ----

// Copies taps of the channels from `channel` on into the columns from `column` on.
extern "C" __global__ void gather_taps(double* f, const float* x, const int* places, struct Geometry g, int channel, int taps, int column, int m, int first, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= m) return;
    int positions = g.out_height * g.out_width, area = g.kernel_height * g.kernel_width;
    int s = places[first + i] / positions, p = places[first + i] % positions;
    int y0 = p / g.out_width * g.stride_y - g.top, x0 = p % g.out_width * g.stride_x - g.left;
    for (int t = blockIdx.y; t < taps; t += gridDim.y) {
        int y = y0 + t / g.kernel_width % g.kernel_height * g.down, at = x0 + t % g.kernel_width * g.right;
        int inside = y >= 0 && y < g.height && at >= 0 && at < g.width;
        size64 map = ((size64)(channel + t / area) * count + s) * g.height;
        f[(size64)(column + t) * m + i] = inside ? (double)x[(map + y) * g.width + at] : 0.0;
    }
}

// Copies single units of a source whose channels have `positions` positions; a place is a sample here.
extern "C" __global__ void gather_units(double* f, const float* x, const int* places, const int* units, int positions, int columns, int column, int m, int first, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= m) return;
    int s = places[first + i];
    for (int j = blockIdx.y; j < columns; j += gridDim.y)
        f[(size64)(column + j) * m + i] = x[((size64)(units[j] / positions) * count + s) * positions + units[j] % positions];
}

extern "C" __global__ void fill_double(double* f, size64 n, double value) {
    size64 e = ELEMENT;
    if (e < n) f[e] = value;
}

// Pre-activations at the chosen places.
extern "C" __global__ void gather_targets(float* t, const float* z, const int* places, int rows, int m, int positions, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= m) return;
    int s = places[i] / positions, p = places[i] % positions;
    for (int k = blockIdx.y; k < rows; k += gridDim.y)
        t[(size64)k * m + i] = z[((size64)k * count + s) * positions + p];
}

extern "C" __global__ void targets_double(double* out, const float* t, int rows, int row, int m, int first, int all) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= m) return;
    for (int k = blockIdx.y; k < rows; k += gridDim.y)
        out[(size64)k * m + i] = t[(size64)(row + k) * all + first + i];
}

extern "C" __global__ void subtract_residual(double* out, const float* x, const float* factors, const int* places, int rows, int row, int m, int first, int positions, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= m) return;
    int s = places[first + i] / positions, p = places[first + i] % positions;
    for (int k = blockIdx.y; k < rows; k += gridDim.y) {
        float value = x[((size64)(row + k) * count + s) * positions + p];
        out[(size64)k * m + i] -= factors ? factors[row + k] * value : value;
    }
}

// Adds the squares of every column to its blockDim.x partial sums, each in a fixed order.
extern "C" __global__ void squares_double(double* partial, const double* v, size64 m) {
    double sum = 0.0;
    const double* column = v + blockIdx.x * m;
    for (size64 i = threadIdx.x; i < m; i += blockDim.x) sum += column[i] * column[i];
    partial[(size64)blockIdx.x * blockDim.x + threadIdx.x] += sum;
}

extern "C" __global__ void squares_single(double* partial, const float* v, size64 m) {
    double sum = 0.0;
    const float* column = v + blockIdx.x * m;
    for (size64 i = threadIdx.x; i < m; i += blockDim.x) sum += (double)column[i] * column[i];
    partial[(size64)blockIdx.x * blockDim.x + threadIdx.x] += sum;
}

// The product of two values over the units of every sample, in gridDim.y parts of the channels.
extern "C" __global__ void sample_products(double* out, const float* a, const float* b, int channels, int count, int positions) {
    int s = blockIdx.x * blockDim.x + threadIdx.x;
    if (s >= count) return;
    double sum = 0.0;
    for (int c = blockIdx.y; c < channels; c += gridDim.y) {
        size64 first = ((size64)c * count + s) * positions;
        for (int p = 0; p < positions; p++) sum += (double)(a[first + p] * b[first + p]);
    }
    out[(size64)blockIdx.y * count + s] = sum;
}
