// The library's own kernels, compiled at run time. Matrices are stored by columns; a batch is one matrix after the other.
// Every index of an element is a size_t: a batch may hold more than 2^31 of them.

#define PANEL 64
#define CANDIDATES 8
#define WORTH 1e-6

typedef unsigned long long size64;

// ---- inverses of many symmetric positive definite matrices, in place, a panel of PANEL columns at a time ----

// D = (diagonal block at q)^-1 by Gauss-Jordan steps; pivots are Schur complements and positive. One block a matrix.
extern "C" __global__ void invert_diagonal(const double* a, double* diagonal, int n, int q) {
    __shared__ double t[PANEL][PANEL + 1];
    __shared__ double column[PANEL];
    const double* m = a + (size64)blockIdx.x * n * n;
    for (int e = threadIdx.x; e < PANEL * PANEL; e += blockDim.x)
        t[e / PANEL][e % PANEL] = m[(size64)(q + e / PANEL) * n + q + e % PANEL];
    __syncthreads();
    for (int p = 0; p < PANEL; p++) {
        double inverse = 1.0 / t[p][p];
        if (threadIdx.x < PANEL) column[threadIdx.x] = t[threadIdx.x][p];
        __syncthreads();
        for (int e = threadIdx.x; e < PANEL * PANEL; e += blockDim.x) {
            int i = e / PANEL, j = e % PANEL;
            if (i == p) continue;
            double pivot_row = j == p ? 1.0 : t[p][j];
            double rest = j == p ? 0.0 : t[i][j];
            t[i][j] = rest - column[i] * inverse * pivot_row;
        }
        __syncthreads();
        if (threadIdx.x < PANEL) {
            int j = threadIdx.x;
            t[p][j] = (j == p ? 1.0 : t[p][j]) * inverse;
        }
        __syncthreads();
    }
    double* d = diagonal + (size64)blockIdx.x * PANEL * PANEL;
    for (int e = threadIdx.x; e < PANEL * PANEL; e += blockDim.x) d[e] = t[e % PANEL][e / PANEL];
}

// Copies the column panel at q to `columns`, without its rows at q, and sets it to zero in the matrix.
extern "C" __global__ void take_columns(double* a, double* columns, int n, int q) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= (size64)n * PANEL) return;
    int i = (int)(e % n), j = (int)(e / n);
    double* at = a + (size64)blockIdx.y * n * n + (size64)(q + j) * n + i;
    columns[(size64)blockIdx.y * n * PANEL + e] = (i >= q && i < q + PANEL) ? 0.0 : *at;
    *at = 0.0;
}

// The block of the pivot rows in these columns is D.
extern "C" __global__ void fill_pivot(double* rows, const double* diagonal, int n, int q) {
    double* r = rows + (size64)blockIdx.x * n * PANEL + (size64)q * PANEL;
    const double* d = diagonal + (size64)blockIdx.x * PANEL * PANEL;
    for (int e = threadIdx.x; e < PANEL * PANEL; e += blockDim.x) r[e] = d[e];
}

extern "C" __global__ void put_rows(double* a, const double* rows, int n, int q) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= (size64)n * PANEL) return;
    int i = (int)(e % PANEL), j = (int)(e / PANEL);
    a[(size64)blockIdx.y * n * n + (size64)j * n + q + i] = rows[(size64)blockIdx.y * n * PANEL + e];
}

// ---- the ladder: matrix b of the batch is G + rho_b, padded with the identity to n ----

extern "C" __global__ void fill_ladder(double* a, const double* gram, const double* rho, int d, int n) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= (size64)n * n) return;
    int i = (int)(e % n), j = (int)(e / n);
    double value = i == j ? 1.0 : 0.0;
    if (i < d && j < d) value = gram[(size64)j * d + i] + (i == j ? rho[blockIdx.y] : 0.0);
    a[(size64)blockIdx.y * n * n + e] = value;
}

// rho (G + rho)^-1 in single precision, both halves averaged, without the padding.
extern "C" __global__ void to_single(const double* inverse, float* out, double rho, int d, int n) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= (size64)d * d) return;
    int i = (int)(e % d), j = (int)(e / d);
    out[e] = (float)(0.5 * rho * (inverse[(size64)j * n + i] + inverse[(size64)i * n + j]));
}

// ---- splitting: x = v - s is what the next product needs, s the dual ----

extern "C" __global__ void start_splitting(const float* v, float* x, float* s, size64 count) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= count) return;
    x[e] = v[e];
    s[e] = 0.0f;
}

// t = ridge solution + product + s; an entry that is worth its price stays, the rest of t is the dual.
extern "C" __global__ void threshold(const float* y, const double* ridge, const double* price, float* x, float* s,
                                     double half_rho, size64 count) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= count) return;
    float t = (float)ridge[e] + y[e] + s[e];
    bool keep = half_rho * (double)t * (double)t > price[e];
    x[e] = keep ? t : -t;
    s[e] = keep ? 0.0f : t;
}

// A new rho keeps v and the product of rho and s.
extern "C" __global__ void rescale_dual(float* x, float* s, float factor, size64 count) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= count) return;
    float v = x[e] + s[e];
    s[e] *= factor;
    x[e] = v - s[e];
}

// The support of every row (the entries where v = x + s is not zero) in ascending order, and its size. One warp per
// row.
extern "C" __global__ void supports(const float* x, const float* s, int* set, int* size, int d) {
    size64 row = (size64)blockIdx.x * d;
    int count = 0;
    for (int base = 0; base < d; base += 32) {
        int j = base + threadIdx.x;
        bool in = j < d && x[row + j] + s[row + j] != 0.0f;
        unsigned mask = __ballot_sync(0xffffffffu, in);
        if (in) set[row + count + __popc(mask & ((1u << threadIdx.x) - 1u))] = j;
        count += __popc(mask);
    }
    if (threadIdx.x == 0) size[blockIdx.x] = count;
}

// ---- the rows of a chunk: (G_SS + ridge)^-1 of each, room n >= its support; set[i] = -1 is an unused place ----

extern "C" __global__ void fill_supports(double* a, const double* gram, const int* set, const int* used, double ridge,
                                         int d, int n) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= (size64)n * n) return;
    int i = (int)(e % n), j = (int)(e / n), k = used[blockIdx.y];
    const int* own = set + (size64)blockIdx.y * n;
    double value = i == j ? 1.0 : 0.0;
    if (i < k && j < k) value = gram[(size64)own[j] * d + own[i]] + (i == j ? ridge : 0.0);
    a[(size64)blockIdx.y * n * n + e] = value;
}

// The padding becomes zero, so that entries which come in later find their place empty; the diagonal is kept apart.
extern "C" __global__ void clear_padding(double* a, double* diagonal, const int* used, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double* at = a + (size64)blockIdx.y * n * n + (size64)i * n + i;
    if (i >= used[blockIdx.y]) *at = 0.0;
    diagonal[(size64)blockIdx.y * n + i] = i >= used[blockIdx.y] ? 1.0 : *at;
}

// out[i] = full[row, set[i]], zero where set[i] = -1. `rows` names the row of `full` for each matrix of the chunk.
extern "C" __global__ void gather(const double* full, const int* rows, const int* set, double* out, int d, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size64 e = (size64)blockIdx.y * n + i;
    int j = set[e];
    out[e] = j < 0 ? 0.0 : full[(size64)rows[blockIdx.y] * d + j];
}

extern "C" __global__ void scatter(const double* w, const int* rows, const int* set, double* full, int d, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size64 e = (size64)blockIdx.y * n + i;
    if (set[e] >= 0) full[(size64)rows[blockIdx.y] * d + set[e]] = w[e];
}

// r = h - ridge w of the chunk's rows; the product with G is subtracted afterwards.
extern "C" __global__ void start_residual(const double* h, const int* rows, const double* w, double* r, double ridge,
                                          int d) {
    int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= d) return;
    size64 e = (size64)blockIdx.y * d + j;
    r[e] = h[(size64)rows[blockIdx.y] * d + j] - ridge * w[e];
}

extern "C" __global__ void add_to(double* w, const double* step, size64 count) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e < count) w[e] += step[e];
}

// The larger of two sizes, or NaN if either is one.
__device__ double larger(double a, double b) { return a > b || isnan(a) ? a : b; }

// The largest value over a block of 256 threads, or NaN if one is.
__device__ double largest_of_block(double own, double* room) {
    room[threadIdx.x] = own;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) room[threadIdx.x] = larger(room[threadIdx.x], room[threadIdx.x + half]);
        __syncthreads();
    }
    own = room[0];
    __syncthreads();
    return own;
}

// The largest residual on each row's support, which a refit should have brought to zero. One block per row.
extern "C" __global__ void largest(const double* r, double* out, int n) {
    __shared__ double room[256];
    double own = 0.0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) own = larger(own, fabs(r[(size64)blockIdx.x * n + i]));
    own = largest_of_block(own, room);
    if (threadIdx.x == 0) out[blockIdx.x] = own;
}

// The place of the largest value over the block; ties go to the smaller place. Needs 256 threads.
__device__ void best_of_block(double* value, int* place, double* values, int* places) {
    values[threadIdx.x] = *value;
    places[threadIdx.x] = *place;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            double other = values[threadIdx.x + half];
            int at = places[threadIdx.x + half];
            bool wins = at >= 0 && (places[threadIdx.x] < 0 || other > values[threadIdx.x] ||
                                    (other == values[threadIdx.x] && at < places[threadIdx.x]));
            if (wins) {
                values[threadIdx.x] = other;
                places[threadIdx.x] = at;
            }
        }
        __syncthreads();
    }
    *value = values[0];
    *place = places[0];
    __syncthreads();
}

// Single moves. The inverse of a row is P + sum_b sign_b u_b u_b^T: `moves` columns of u wait to be added to P in one
// product. Weights and diagonal are always up to date. A row with a reason in `again` makes no moves: it needs more
// room (FULL), or its inverse has lost too much to rounding (STALE).
#define FULL 1
#define STALE 2

// Entries that are not worth their price leave, the cheapest first, while there is room for waiting columns.
extern "C" __global__ void leave(const double* p, int* set, const int* used, double* w, double* diagonal, double* u,
                                 double* sign, int* waiting, const double* price, const int* rows, int* changed,
                                 int* again, int d, int n, int room) {
    __shared__ double values[256];
    __shared__ int places[256];
    __shared__ double at_pivot[64];
    size64 b = blockIdx.x;
    const double* own_p = p + b * n * n;
    int* own_set = set + b * n;
    double* own_w = w + b * n;
    double* own_diagonal = diagonal + b * n;
    double* own_u = u + b * n * room;
    double* own_sign = sign + b * room;
    const double* own_price = price + (size64)rows[b] * d;
    int k = used[b];
    int count = waiting[b];
    int moved = 0;
    while (again[b] == 0 && count < room) {
        double gain = -1.0;
        int at = -1;
        for (int i = threadIdx.x; i < k; i += blockDim.x) {
            int j = own_set[i];
            // A diagonal that rounding made negative has no meaning; `check` finds such a row.
            if (j < 0 || !(own_diagonal[i] > 0.0)) continue;
            double here = own_price[j] - 0.5 * own_w[i] * own_w[i] / own_diagonal[i];
            if (here > WORTH * own_price[j] && (at < 0 || here > gain)) {
                gain = here;
                at = i;
            }
        }
        best_of_block(&gain, &at, values, places);
        if (at < 0) break;
        if (threadIdx.x < count) at_pivot[threadIdx.x] = own_sign[threadIdx.x] * own_u[(size64)threadIdx.x * n + at];
        __syncthreads();
        double pivot = own_p[(size64)at * n + at];
        for (int c = 0; c < count; c++) pivot += at_pivot[c] * own_u[(size64)c * n + at];
        double weight = own_w[at];
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            double column = 0.0;
            if (i < k && own_set[i] >= 0) {
                column = own_p[(size64)at * n + i];
                for (int c = 0; c < count; c++) column += at_pivot[c] * own_u[(size64)c * n + i];
                own_w[i] -= weight * column / pivot;
                own_diagonal[i] -= column * column / pivot;
            }
            own_u[(size64)count * n + i] = column;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            own_set[at] = -1;
            own_w[at] = 0.0;
            own_diagonal[at] = 1.0;
            own_sign[count] = -1.0 / pivot;
        }
        count++;
        moved++;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        waiting[b] = count;
        changed[b] = moved;
    }
}

// v = u sign, column by column; columns that have not been written are zero in both.
extern "C" __global__ void sign_columns(double* u, double* v, const double* sign, const int* waiting, int n, int room) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= (size64)n * room) return;
    int c = (int)(e / n);
    size64 at = (size64)blockIdx.y * n * room + e;
    if (c >= waiting[blockIdx.y]) {
        u[at] = 0.0;
        v[at] = 0.0;
    } else {
        v[at] = u[at] * sign[(size64)blockIdx.y * room + c];
    }
}

// Whether the weights are still those of the support: r = h - G w is ridge w there. If not, the inverse that they
// follow has lost its digits. That happens where a support had more entries than samples and most of them left.
extern "C" __global__ void check(const double* h, const double* r, const int* rows, const int* set, const int* used,
                                 const double* w, const double* diagonal, int* again, double ridge, double drift, int d,
                                 int n) {
    __shared__ double room[256];
    size64 b = blockIdx.x;
    double size = 0.0, off = 0.0;
    for (int j = threadIdx.x; j < d; j += blockDim.x) size = larger(size, fabs(h[(size64)rows[b] * d + j]));
    for (int i = threadIdx.x; i < used[b]; i += blockDim.x) {
        int j = set[b * n + i];
        if (j < 0) continue;
        off = larger(off, fabs(r[b * d + j] - ridge * w[b * n + i]));
        if (!(diagonal[b * n + i] > 0.0)) off = 1e300;
    }
    size = largest_of_block(size, room);
    off = largest_of_block(off, room);
    if (threadIdx.x == 0 && again[b] == 0 && !(off <= drift * size)) again[b] = STALE;
}

// The entries outside with the largest r^2 - 2 price. One block of 256 threads a row; `inside` is scratch.
extern "C" __global__ void choose(const double* r, const double* price, const int* rows, const int* set,
                                  const int* used, unsigned char* inside, int* candidates, int d, int n) {
    __shared__ double values[256];
    __shared__ int places[256];
    size64 b = blockIdx.x;
    unsigned char* in = inside + b * d;
    const double* own_price = price + (size64)rows[b] * d;
    for (int j = threadIdx.x; j < d; j += blockDim.x) in[j] = isinf(own_price[j]) ? 1 : 0;
    __syncthreads();
    for (int i = threadIdx.x; i < used[b]; i += blockDim.x)
        if (set[b * n + i] >= 0) in[set[b * n + i]] = 1;
    __syncthreads();
    for (int c = 0; c < CANDIDATES; c++) {
        double size = 0.0;
        int at = -1;
        for (int j = threadIdx.x; j < d; j += blockDim.x) {
            if (in[j]) continue;
            double here = r[b * d + j] * r[b * d + j] - 2.0 * own_price[j];
            if (at < 0 || here > size) {
                size = here;
                at = j;
            }
        }
        best_of_block(&size, &at, values, places);
        if (threadIdx.x == 0) {
            candidates[b * CANDIDATES + c] = at;
            if (at >= 0) in[at] = 1;
        }
        __syncthreads();
    }
}

// Columns of G for the candidates of each row, on its support.
extern "C" __global__ void gather_candidates(const double* gram, const int* set, const int* candidates, double* out,
                                             int d, int n) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= (size64)n * CANDIDATES) return;
    int i = (int)(e % n), c = (int)(e / n);
    int j = set[(size64)blockIdx.y * n + i], candidate = candidates[blockIdx.y * CANDIDATES + c];
    out[(size64)blockIdx.y * n * CANDIDATES + e] = j < 0 || candidate < 0 ? 0.0 : gram[(size64)candidate * d + j];
}

// Candidates that are worth their price come in, the best first. y = P g of each; the Schur complements, residuals and
// y of the others follow every arrival, so that several can come in one round. One block of 256 threads a row.
extern "C" __global__ void enter(const double* gram, const double* r, const double* price, const int* rows,
                                 const int* candidates, const double* g, double* y, int* set, int* used, double* w,
                                 double* diagonal, double* u, double* sign, int* waiting, int* changed, int* again,
                                 double ridge, int d, int n, int room) {
    __shared__ double sums[256];
    __shared__ double schur[CANDIDATES][CANDIDATES];
    __shared__ double residual[CANDIDATES];
    __shared__ int taken[CANDIDATES];
    __shared__ int chosen;
    size64 b = blockIdx.x;
    const int* own = candidates + b * CANDIDATES;
    const double* own_g = g + b * n * CANDIDATES;
    double* own_y = y + b * n * CANDIDATES;
    int* own_set = set + b * n;
    const double* own_price = price + (size64)rows[b] * d;
    int k = used[b];
    int count = waiting[b];
    int moved = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        if (i >= k || own_set[i] < 0)
            for (int c = 0; c < CANDIDATES; c++) own_y[(size64)c * n + i] = 0.0;
    __syncthreads();
    for (int pair = 0; pair < CANDIDATES * CANDIDATES; pair++) {
        int a = pair / CANDIDATES, c = pair % CANDIDATES;
        if (a > c) continue;
        double sum = 0.0;
        for (int i = threadIdx.x; i < k; i += blockDim.x) sum += own_g[(size64)a * n + i] * own_y[(size64)c * n + i];
        sums[threadIdx.x] = sum;
        __syncthreads();
        for (int half = blockDim.x / 2; half > 0; half /= 2) {
            if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            double value = own[a] < 0 || own[c] < 0 ? 0.0 : gram[(size64)own[a] * d + own[c]] - sums[0];
            if (a == c) value += ridge;
            schur[a][c] = value;
            schur[c][a] = value;
        }
        __syncthreads();
    }
    if (threadIdx.x < CANDIDATES) {
        int j = own[threadIdx.x];
        residual[threadIdx.x] = j < 0 ? 0.0 : r[b * d + j];
        taken[threadIdx.x] = j < 0;
    }
    __syncthreads();
    while (count < room) {
        if (threadIdx.x == 0) {
            double best = 0.0;
            chosen = -1;
            // A Schur complement is at least the ridge; a smaller one comes from an inverse that lost its digits.
            for (int c = 0; c < CANDIDATES; c++)
                if (!taken[c] && !(schur[c][c] >= 0.5 * ridge) && again[b] == 0) again[b] = STALE;
            for (int c = 0; c < CANDIDATES; c++) {
                if (taken[c]) continue;
                double cost = own_price[own[c]];
                double gain = 0.5 * residual[c] * residual[c] / fmax(schur[c][c], ridge) - cost;
                if (gain > WORTH * cost && gain > best) {
                    best = gain;
                    chosen = c;
                }
            }
            if (chosen >= 0 && k >= n && again[b] == 0) again[b] = FULL;
            if (again[b] != 0) chosen = -1;
        }
        __syncthreads();
        int c = chosen;
        if (c < 0) break;
        double pivot = fmax(schur[c][c], ridge);
        double weight = residual[c] / pivot;
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            double value = i < k ? own_y[(size64)c * n + i] : (i == k ? -1.0 : 0.0);
            u[b * n * room + (size64)count * n + i] = value;
            if (i > k || (i < k && own_set[i] < 0)) continue;
            size64 at = b * n + i;
            w[at] = (i < k ? w[at] : 0.0) - weight * value;
            diagonal[at] = (i < k ? diagonal[at] : 0.0) + value * value / pivot;
            for (int o = 0; o < CANDIDATES; o++) {
                if (o == c || taken[o]) continue;
                double share = schur[o][c] / pivot;
                double before = i < k ? own_y[(size64)o * n + i] : 0.0;
                own_y[(size64)o * n + i] = before - share * value;
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            taken[c] = 1;
            own_set[k] = own[c];
            sign[b * room + count] = 1.0 / pivot;
            for (int o = 0; o < CANDIDATES; o++)
                if (!taken[o]) residual[o] -= schur[o][c] * weight;
            for (int o = 0; o < CANDIDATES; o++) {
                if (taken[o]) continue;
                for (int q = 0; q < CANDIDATES; q++)
                    if (!taken[q]) schur[o][q] -= schur[o][c] * schur[c][q] / pivot;
            }
        }
        k++;
        count++;
        moved++;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        used[b] = k;
        waiting[b] = count;
        changed[b] += moved;
    }
}

// ---- statistics ----

// The upper half of a symmetric matrix, from the lower one.
extern "C" __global__ void mirror(double* a, int d) {
    size64 e = (size64)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= (size64)d * d) return;
    int i = (int)(e % d), j = (int)(e / d);
    if (i < j) a[e] = a[(size64)i * d + j];
}
