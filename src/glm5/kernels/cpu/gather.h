// Attention of one query over listed rows: products, softmax, weighted sums and their gradients.
#pragma once

#include "mask.h"

namespace {

// values[i] = x . rows[position i] * factor for n positions; written up to a multiple of LANES. Rows are `stride` apart.
[[maybe_unused]] static void dots(const float* x, const float* rows, int64_t stride, const int32_t* positions, int64_t n,
                                  int64_t size, float factor, float* values) {
    for (int64_t i = 0; i < n; i += LANES) {
        const float* columns[LANES];
        for (int j = 0; j < LANES; j++) columns[j] = rows + positions[at_most(i + j, n - 1)] * stride;
        store(values + i, dot_tile<1, LANES>(&x, columns, size) * factor);
    }
}

// Softmax in place over n logits, n a multiple of LANES and some above -inf; returns log(sum exp).
[[maybe_unused]] static float softmax(float* x, int64_t n) {
    vf best = splat(-INFINITY), total = {};
    for (int64_t i = 0; i < n; i += LANES) best = larger(load(x + i), best);
    float peak = max_lanes(best);
    for (int64_t i = 0; i < n; i += LANES) {
        vf p = exp_lanes(load(x + i) - peak);
        store(x + i, p);
        total += p;
    }
    float sum = sum_lanes(total);
    vf inverse = splat(1.0f / sum);
    for (int64_t i = 0; i < n; i += LANES) store(x + i, load(x + i) * inverse);
    return peak + logf(sum);
}

// out[0 .. V * LANES) = sum_i weights[i] * rows[position i]; two chains hide the latency of the additions.
template <int V>
GLM5_INLINE void gather_tile(const float* weights, const float* rows, int64_t stride, const int32_t* positions, int64_t n,
                             float* out) {
    vf even[V], odd[V];
    GLM5_UNROLL
    for (int v = 0; v < V; v++) even[v] = odd[v] = (vf){};
    int64_t i = 0;
    for (; i + 2 <= n; i += 2) {
        const float *a = rows + positions[i] * stride, *b = rows + positions[i + 1] * stride;
        GLM5_UNROLL
        for (int v = 0; v < V; v++) {
            even[v] += weights[i] * load(a + v * LANES);
            odd[v] += weights[i + 1] * load(b + v * LANES);
        }
    }
    if (i < n) {
        GLM5_UNROLL
        for (int v = 0; v < V; v++) even[v] += weights[i] * load(rows + positions[i] * stride + v * LANES);
    }
    GLM5_UNROLL
    for (int v = 0; v < V; v++) store(out + v * LANES, even[v] + odd[v]);
}

[[maybe_unused]] static void gather(const float* weights, const float* rows, int64_t stride, const int32_t* positions,
                                    int64_t n, int64_t size, float* out) {
    int64_t c = 0;
    for (; c + 4 * LANES <= size; c += 4 * LANES) gather_tile<4>(weights, rows + c, stride, positions, n, out + c);
    for (; c + 2 * LANES <= size; c += 2 * LANES) gather_tile<2>(weights, rows + c, stride, positions, n, out + c);
    for (; c + LANES <= size; c += LANES) gather_tile<1>(weights, rows + c, stride, positions, n, out + c);
    for (; c < size; c++) {
        float sum = 0.0f;
        for (int64_t i = 0; i < n; i++) sum += weights[i] * rows[positions[i] * stride + c];
        out[c] = sum;
    }
}

// rows[position i] += weights[i] * x.
[[maybe_unused]] static void scatter(const float* weights, const float* x, const int32_t* positions, int64_t n, int64_t size,
                                     float* rows, int64_t stride) {
    for (int64_t i = 0; i < n; i++) {
        float *row = rows + positions[i] * stride, w = weights[i];
        int64_t c = 0;
        for (; c + LANES <= size; c += LANES) store(row + c, load(row + c) + w * load(x + c));
        for (; c < size; c++) row[c] += w * x[c];
    }
}

// Weights and score gradients from logits and value products, for n entries (a multiple of LANES).
GLM5_INLINE void slopes_of(float* weights, float* slopes, int64_t n, float log_sum, float delta, float scale,
                           const uint8_t* valid) {
    for (int64_t i = 0; i < n; i += LANES) {
        vf w = exp_lanes(load(weights + i) - log_sum);
        if (valid) w = where(valid + i, w, (vf){});
        store(weights + i, w);
        store(slopes + i, w * (load(slopes + i) - delta) * scale);
    }
}

}  // namespace
