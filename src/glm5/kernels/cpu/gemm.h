// Small matrix products for row blocks that fit the first cache levels; none of them packs its operands.
#pragma once

#include "simd.h"

namespace {

// out[r][n] = rows[r] . w[n] for n in [0, columns): w is [columns, k] with k contiguous. The bits of an output depend on
// its own row and column only.
[[maybe_unused]] static void multiply_transposed(const float* const* rows, int64_t count, const float* w, int64_t columns, int64_t k,
                                float* out, int64_t stride) {
    constexpr int R = LANES == 4 ? 2 : 4, N = LANES / R;
    for (int64_t n = 0; n < columns; n += N) {
        const float* c[N];
        for (int i = 0; i < N; i++) c[i] = w + at_most(n + i, columns - 1) * k;
        for (int64_t r = 0; r < count; r += R) {
            const float* x[R];
            for (int i = 0; i < R; i++) x[i] = rows[at_most(r + i, count - 1)];
            float tile[LANES];
            store(tile, dot_tile<R, N>(x, c, k));
            for (int i = 0; i < R && r + i < count; i++)
                for (int j = 0; j < N && n + j < columns; j++) out[(r + i) * stride + n + j] = tile[i * N + j];
        }
    }
}

// The same for a single row: LANES columns at a time.
[[maybe_unused]] static void multiply_transposed_row(const float* row, const float* w, int64_t columns, int64_t k, float* out) {
    for (int64_t n = 0; n < columns; n += LANES) {
        const float* c[LANES];
        for (int i = 0; i < LANES; i++) c[i] = w + at_most(n + i, columns - 1) * k;
        vf tile = dot_tile<1, LANES>(&row, c, k);
        if (n + LANES <= columns) {
            store(out + n, tile);
        } else {
            float x[LANES];
            store(x, tile);
            memcpy(out + n, x, sizeof(float) * (columns - n));
        }
    }
}

// out[i][j] (+)= sum_k a[i * ai + k * ak] * b[k * bk + j] for one tile of R rows and V vectors of columns.
template <int R, int V>
GLM5_INLINE void outer_tile(const float* a, int64_t ai, int64_t ak, const float* b, int64_t bk, int64_t k, float* out,
                            int64_t stride, bool add) {
    vf sums[R * V];
    GLM5_UNROLL
    for (int i = 0; i < R * V; i++) sums[i] = add ? load(out + (i / V) * stride + (i % V) * LANES) : (vf){};
    for (int64_t d = 0; d < k; d++) {
        vf x[V];
        GLM5_UNROLL
        for (int v = 0; v < V; v++) x[v] = load(b + d * bk + v * LANES);
        GLM5_UNROLL
        for (int r = 0; r < R; r++) {
            float factor = a[r * ai + d * ak];
            GLM5_UNROLL
            for (int v = 0; v < V; v++) sums[r * V + v] += factor * x[v];
        }
    }
    GLM5_UNROLL
    for (int i = 0; i < R * V; i++) store(out + (i / V) * stride + (i % V) * LANES, sums[i]);
}

template <int V>
GLM5_INLINE void outer_columns(const float* a, int64_t ai, int64_t ak, int64_t rows, const float* b, int64_t bk, int64_t k,
                               float* out, int64_t stride, bool add) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) outer_tile<4, V>(a + i * ai, ai, ak, b, bk, k, out + i * stride, stride, add);
    for (; i < rows; i++) outer_tile<1, V>(a + i * ai, ai, ak, b, bk, k, out + i * stride, stride, add);
}

// out[i][j] (+)= sum_k a[i * ai + k * ak] * b[k * bk + j] for i in [0, rows), j in [0, columns).
[[maybe_unused]] static void multiply_outer(const float* a, int64_t ai, int64_t ak, int64_t rows, const float* b, int64_t bk, int64_t columns,
                           int64_t k, float* out, int64_t stride, bool add) {
    int64_t j = 0;
    for (int64_t left = columns / LANES; left > 0; left = (columns - j) / LANES) {
        if (left >= 3 && left != 4) {
            outer_columns<3>(a, ai, ak, rows, b + j, bk, k, out + j, stride, add), j += 3 * LANES;
        } else if (left >= 2) {
            outer_columns<2>(a, ai, ak, rows, b + j, bk, k, out + j, stride, add), j += 2 * LANES;
        } else {
            outer_columns<1>(a, ai, ak, rows, b + j, bk, k, out + j, stride, add), j += LANES;
        }
    }
    for (; j < columns; j++)
        for (int64_t i = 0; i < rows; i++) {
            float sum = add ? out[i * stride + j] : 0.0f;
            for (int64_t d = 0; d < k; d++) sum += a[i * ai + d * ak] * b[d * bk + j];
            out[i * stride + j] = sum;
        }
}

}  // namespace
