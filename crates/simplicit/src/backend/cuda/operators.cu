
// ---- operators of layers: values with a channel per unit, unit u of sample s at u * count + s ----

// Adds `scale` times the unit that the map names; -1 stands for no unit.
extern "C" __global__ void pick_units(float* out, const float* in, const int* map, size64 n, int count, float scale) {
    size64 e = ELEMENT;
    if (e >= n) return;
    int from = map[e / count];
    if (from >= 0) out[e] += scale * in[(size64)from * count + e % count];
}

// Adds `scale` times the sum of the units in a list, list[starts[u]] to list[starts[u + 1]] for unit u.
extern "C" __global__ void sum_units(float* out, const float* in, const int* starts, const int* list, size64 n, int count, float scale) {
    size64 e = ELEMENT;
    if (e >= n) return;
    size64 unit = e / count, s = e % count;
    float sum = 0.0f;
    for (int i = starts[unit]; i < starts[unit + 1]; i++) sum += in[(size64)list[i] * count + s];
    out[e] += scale * sum;
}

// kind 0: a + b, 1: a - b, 2: a * b, 3: a / b.
extern "C" __global__ void binary_units(float* out, const float* a, const float* b, const int* of_a, const int* of_b, size64 n, int count, int kind) {
    size64 e = ELEMENT;
    if (e >= n) return;
    size64 unit = e / count, s = e % count;
    float x = a[(size64)of_a[unit] * count + s], y = b[(size64)of_b[unit] * count + s];
    out[e] = kind == 0 ? x + y : kind == 1 ? x - y : kind == 2 ? x * y : x / y;
}

// Adds the cotangent of operand `side`; the list names the results that each of its units goes into.
extern "C" __global__ void binary_back(float* dx, const float* dout, const float* a, const float* b, const int* of_a, const int* of_b, const int* starts, const int* list, size64 n, int count, int kind, int side) {
    size64 e = ELEMENT;
    if (e >= n) return;
    size64 unit = e / count, s = e % count;
    float sum = 0.0f;
    for (int i = starts[unit]; i < starts[unit + 1]; i++) {
        float d = dout[(size64)list[i] * count + s];
        float x = a[(size64)of_a[list[i]] * count + s], y = b[(size64)of_b[list[i]] * count + s];
        float factor = 1.0f;
        if (kind == 1) factor = side == 0 ? 1.0f : -1.0f;
        if (kind == 2) factor = side == 0 ? y : x;
        if (kind == 3) factor = side == 0 ? 1.0f / y : -x / y / y;
        sum += d * factor;
    }
    dx[e] += sum;
}

// Adds products of matrices: out(i, j) += sum over l of a(i, l) b(l, j), for every matrix of a batch and every sample.
extern "C" __global__ void product_units(float* out, const float* a, const float* b, size64 n, int count, int rows, int cols, int depth, int a_row, int a_step, int b_row, int b_step, size64 a_size, size64 b_size) {
    size64 e = ELEMENT;
    if (e >= n) return;
    size64 unit = e / count, s = e % count, matrix = unit / ((size64)rows * cols);
    size64 i = unit / cols % rows, j = unit % cols;
    const float* left = a + (matrix * a_size + i * a_row) * count + s;
    const float* right = b + (matrix * b_size + j * b_row) * count + s;
    float sum = 0.0f;
    for (int l = 0; l < depth; l++) sum += left[(size64)l * a_step * count] * right[(size64)l * b_step * count];
    out[e] += sum;
}

// Along an axis of `size` units that are `inner` apart; n counts the lines of all samples.
extern "C" __global__ void softmax_units(float* out, const float* x, size64 n, int count, int size, int inner) {
    size64 e = ELEMENT;
    if (e >= n) return;
    size64 line = e / count, s = e % count, first = (line / inner * size * inner + line % inner) * count + s;
    size64 step = (size64)inner * count;
    float largest = x[first];
    for (int k = 1; k < size; k++) largest = fmaxf(largest, x[first + k * step]);
    double sum = 0.0;
    for (int k = 0; k < size; k++) {
        float power = expf(x[first + k * step] - largest);
        out[first + k * step] = power;
        sum += power;
    }
    for (int k = 0; k < size; k++) out[first + k * step] = (float)(out[first + k * step] / sum);
}

extern "C" __global__ void softmax_back(float* dx, const float* y, const float* dout, size64 n, int count, int size, int inner) {
    size64 e = ELEMENT;
    if (e >= n) return;
    size64 line = e / count, s = e % count, first = (line / inner * size * inner + line % inner) * count + s;
    size64 step = (size64)inner * count;
    double sum = 0.0;
    for (int k = 0; k < size; k++) sum += (double)y[first + k * step] * dout[first + k * step];
    for (int k = 0; k < size; k++)
        dx[first + k * step] += (float)(y[first + k * step] * (dout[first + k * step] - sum));
}

// Runs of `size` units that are next to each other: (x - mean) / sqrt(variance + epsilon).
extern "C" __global__ void normalise_units(float* out, const float* x, size64 n, int count, int size, float epsilon) {
    size64 e = ELEMENT;
    if (e >= n) return;
    size64 first = e / count * size * count + e % count;
    double mean = 0.0, square = 0.0;
    for (int k = 0; k < size; k++) mean += x[first + (size64)k * count];
    mean /= size;
    for (int k = 0; k < size; k++) {
        double d = x[first + (size64)k * count] - mean;
        square += d * d;
    }
    double scale = 1.0 / sqrt(square / size + epsilon);
    for (int k = 0; k < size; k++) out[first + (size64)k * count] = (float)((x[first + (size64)k * count] - mean) * scale);
}

extern "C" __global__ void normalise_back(float* dx, const float* x, const float* y, const float* dout, size64 n, int count, int size, float epsilon) {
    size64 e = ELEMENT;
    if (e >= n) return;
    size64 first = e / count * size * count + e % count;
    double mean = 0.0, square = 0.0, along = 0.0, shift = 0.0;
    for (int k = 0; k < size; k++) {
        size64 at = first + (size64)k * count;
        mean += x[at];
        shift += dout[at];
        along += (double)dout[at] * y[at];
    }
    mean /= size;
    for (int k = 0; k < size; k++) {
        double d = x[first + (size64)k * count] - mean;
        square += d * d;
    }
    double scale = 1.0 / sqrt(square / size + epsilon);
    for (int k = 0; k < size; k++) {
        size64 at = first + (size64)k * count;
        dx[at] += (float)(scale * (dout[at] - shift / size - y[at] * (along / size)));
    }
}
