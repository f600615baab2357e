// Row-wise operations with their gradients: RMSNorm, SwiGLU and rotary embedding, fp32.

#include "swiglu.h"

namespace {

constexpr int64_t ROWS = 256;  // rows of one task; weight gradients are summed per task, then over tasks in order

// One row normalised: returns 1 / rms.
GLM5_INLINE float inverse_rms(const float* x, int64_t dim, float eps) {
    vf squares = {};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) squares += load(x + d) * load(x + d);
    float total = sum_lanes(squares);
    for (; d < dim; d++) total += x[d] * x[d];
    return 1.0f / sqrtf(total / (float)dim + eps);
}

}  // namespace

// y [rows, dim] contiguous; x has `stride` elements between rows. inverse [rows] receives 1 / rms unless it is null.
GLM5_EXPORT(rms_norm)(const float* x, int64_t stride, const float* weight, float eps, int64_t rows, int64_t dim, float* y,
                      float* inverse, int threads) {
    parallel(rows, ROWS, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const float* in = x + row * stride;
            float* out = y + row * dim;
            float scale = inverse_rms(in, dim, eps);
            if (inverse) inverse[row] = scale;
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) store(out + d, load(weight + d) * (load(in + d) * scale));
            for (; d < dim; d++) out[d] = weight[d] * (in[d] * scale);
        }
    });
    return 0;
}

// dx [rows, dim] contiguous and dweight [dim] from dy [rows, dim] contiguous.
GLM5_EXPORT(rms_norm_backward)(const float* x, int64_t stride, const float* weight, const float* inverse, const float* dy,
                               int64_t rows, int64_t dim, float* dx, float* dweight, int threads) {
    int64_t tasks = (rows + ROWS - 1) / ROWS;
    Scratch scratch(Scratch::need(tasks * dim));
    float* partial = scratch.take<float>(tasks * dim);
    memset(partial, 0, sizeof(float) * tasks * dim);
    parallel(tasks, 1, threads, [&](int64_t first, int64_t last) {
        for (int64_t task = first; task < last; task++) {
            float* sums = partial + task * dim;
            for (int64_t row = task * ROWS; row < at_most(rows, (task + 1) * ROWS); row++) {
                const float *in = x + row * stride, *g = dy + row * dim;
                float* out = dx + row * dim;
                float scale = inverse[row];
                vf dots = {};
                int64_t d = 0;
                for (; d + LANES <= dim; d += LANES) {
                    vf normal = load(in + d) * scale, product = load(g + d) * normal;
                    store(sums + d, load(sums + d) + product);
                    dots += product * load(weight + d);
                }
                float mean = sum_lanes(dots);
                for (; d < dim; d++) {
                    float product = g[d] * (in[d] * scale);
                    sums[d] += product;
                    mean += product * weight[d];
                }
                mean /= (float)dim;
                for (d = 0; d + LANES <= dim; d += LANES)
                    store(out + d, (load(g + d) * load(weight + d) - load(in + d) * scale * mean) * scale);
                for (; d < dim; d++) out[d] = (g[d] * weight[d] - in[d] * scale * mean) * scale;
            }
        }
    });
    memset(dweight, 0, sizeof(float) * dim);
    for (int64_t task = 0; task < tasks; task++)
        for (int64_t d = 0; d < dim; d++) dweight[d] += partial[task * dim + d];
    return 0;
}

// y [rows, hidden] from gate_up [rows, 2 * hidden], contiguous.
GLM5_EXPORT(swiglu)(const float* gate_up, int64_t rows, int64_t hidden, float* y, int threads) {
    parallel(rows, ROWS, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) swiglu(gate_up + row * 2 * hidden, hidden, y + row * hidden);
    });
    return 0;
}

// dgate_up [rows, 2 * hidden] from dy [rows, hidden], contiguous.
GLM5_EXPORT(swiglu_backward)(const float* gate_up, const float* dy, int64_t rows, int64_t hidden, float* dgate_up, int threads) {
    parallel(rows, ROWS, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            swiglu_backward(gate_up + row * 2 * hidden, dy + row * hidden, 1.0f, hidden, nullptr, dgate_up + row * 2 * hidden);
    });
    return 0;
}

// y [tokens, heads, 2 * pairs] contiguous, halves (first, second); x has the given strides between tokens and heads and
// element strides `pair` between pairs and `partner` within one. cos and sin [tokens, pairs] with `angle` elements
// between tokens.
GLM5_EXPORT(rope)(const float* x, int64_t token, int64_t head, int64_t pair, int64_t partner, const float* cosine,
                  const float* sine, int64_t angle, int64_t tokens, int64_t heads, int64_t pairs, float* y, int threads) {
    parallel(tokens, ROWS, threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const float *c = cosine + t * angle, *s = sine + t * angle;
            for (int64_t h = 0; h < heads; h++) {
                const float* in = x + t * token + h * head;
                float* out = y + (t * heads + h) * 2 * pairs;
                for (int64_t j = 0; j < pairs; j++) {
                    float first = in[j * pair], second = in[j * pair + partner];
                    out[j] = first * c[j] - second * s[j];
                    out[pairs + j] = second * c[j] + first * s[j];
                }
            }
        }
    });
    return 0;
}

// The transpose of `rope`: dx [tokens, heads, 2 * pairs] contiguous in the layout of x from dy, contiguous halves.
GLM5_EXPORT(rope_backward)(const float* dy, const float* cosine, const float* sine, int64_t angle, int64_t tokens,
                           int64_t heads, int64_t pairs, int64_t pair, int64_t partner, float* dx, int threads) {
    parallel(tokens, ROWS, threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const float *c = cosine + t * angle, *s = sine + t * angle;
            for (int64_t h = 0; h < heads; h++) {
                const float* in = dy + (t * heads + h) * 2 * pairs;
                float* out = dx + (t * heads + h) * 2 * pairs;
                for (int64_t j = 0; j < pairs; j++) {
                    float first = in[j], second = in[pairs + j];
                    out[j * pair] = first * c[j] + second * s[j];
                    out[j * pair + partner] = second * c[j] - first * s[j];
                }
            }
        }
    });
    return 0;
}
