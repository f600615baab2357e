// Routed experts (SwiGLU) for hidden sizes that fit the caches: tokens grouped by expert, gathered by pointer, and their
// gradients. A row's result has the same bits whichever rows share its expert.

#include "gemm.h"
#include "swiglu.h"

namespace {

constexpr int64_t ROWS = 32;

struct Shape {
    int64_t tokens, choices, experts, dim, hidden;
    int64_t rows() const { return tokens * choices; }
};

// Flat rows (token * choices + choice) in expert order: rows of expert e are order[starts[e] .. starts[e + 1]).
// False when an id is not an expert.
static bool sort_by_expert(const int64_t* ids, const Shape& shape, int64_t* order, int64_t* starts) {
    memset(starts, 0, sizeof(int64_t) * (shape.experts + 2));
    for (int64_t r = 0; r < shape.rows(); r++) {
        if (ids[r] < 0 || ids[r] >= shape.experts) return false;
        starts[ids[r] + 2]++;
    }
    for (int64_t e = 2; e <= shape.experts; e++) starts[e] += starts[e - 1];
    for (int64_t r = 0; r < shape.rows(); r++) order[starts[ids[r] + 1]++] = r;
    return true;
}

// Rows order[begin .. end) of one expert: pre-activations into gate_up[row], weighted outputs into y[row].
static void forward_block(const float* x, int64_t x_stride, const int64_t* order, int64_t count, const Shape& shape,
                          const float* weights, const float* gate_up_w, const float* down_w, float* gate_up, float* h,
                          float* y) {
    const float *rows[ROWS], *hidden_rows[ROWS];
    for (int64_t i = 0; i < count; i++) {
        rows[i] = x + order[i] / shape.choices * x_stride;
        hidden_rows[i] = h + i * shape.hidden;
    }
    if (count == 1) multiply_transposed_row(rows[0], gate_up_w, 2 * shape.hidden, shape.dim, gate_up);
    else multiply_transposed(rows, count, gate_up_w, 2 * shape.hidden, shape.dim, gate_up, 2 * shape.hidden);
    for (int64_t i = 0; i < count; i++) swiglu(gate_up + i * 2 * shape.hidden, shape.hidden, h + i * shape.hidden);
    if (count == 1) multiply_transposed_row(h, down_w, shape.dim, shape.hidden, y);
    else multiply_transposed(hidden_rows, count, down_w, shape.dim, shape.hidden, y, shape.dim);
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < shape.dim; d++) y[i * shape.dim + d] *= weights[order[i]];
}

// out[token] = sum over choices of rows[place[token * choices + choice]], in the order of the choices.
static void combine(const float* rows, const int64_t* place, const Shape& shape, float* out, int threads) {
    parallel(shape.tokens, 256, threads, [&](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; m++)
            for (int64_t a = 0; a < shape.choices; a++) {
                const float* row = rows + place[m * shape.choices + a] * shape.dim;
                if (a == 0) memcpy(out + m * shape.dim, row, sizeof(float) * shape.dim);
                else
                    for (int64_t d = 0; d < shape.dim; d++) out[m * shape.dim + d] += row[d];
            }
    });
}

static void invert(const int64_t* order, int64_t count, int64_t* place) {
    for (int64_t i = 0; i < count; i++) place[order[i]] = i;
}

// One expert's share of the backward pass. Sorted rows: x, dy, gate_up are gathered, dx_rows and dweights written.
struct Backward {
    const float *x, *weights, *gate_up_w, *down_w, *gate_up, *dy;
    int64_t x_stride;
    float *dx_rows, *dweights, *dgate_up_w, *ddown_w;
    Shape shape;

    int64_t need() const {
        return 2 * Scratch::need(ROWS * shape.dim) + 2 * Scratch::need(ROWS * shape.hidden) + Scratch::need(ROWS * 2 * shape.hidden);
    }
    void run(const int64_t* order, int64_t start, int64_t end, int64_t expert) const {
        Scratch scratch(need());
        float *xs = scratch.take<float>(ROWS * shape.dim), *g = scratch.take<float>(ROWS * shape.dim);
        float *dh = scratch.take<float>(ROWS * shape.hidden), *h = scratch.take<float>(ROWS * shape.hidden);
        float* dgu = scratch.take<float>(ROWS * 2 * shape.hidden);
        int64_t dim = shape.dim, hidden = shape.hidden;
        const float *w1 = gate_up_w + expert * 2 * hidden * dim, *w2 = down_w + expert * dim * hidden;
        float *dw1 = dgate_up_w + expert * 2 * hidden * dim, *dw2 = ddown_w + expert * dim * hidden;
        for (int64_t i = start; i < end; i += ROWS) {
            int64_t count = at_most(ROWS, end - i);
            for (int64_t r = 0; r < count; r++) {
                memcpy(xs + r * dim, x + order[i + r] / shape.choices * x_stride, sizeof(float) * dim);
                memcpy(g + r * dim, dy + order[i + r] / shape.choices * dim, sizeof(float) * dim);
            }
            multiply_outer(g, dim, 1, count, w2, hidden, hidden, dim, dh, hidden, false);
            for (int64_t r = 0; r < count; r++) {
                int64_t row = order[i + r];
                dweights[row] = swiglu_backward(gate_up + (i + r) * 2 * hidden, dh + r * hidden, weights[row], hidden,
                                                h + r * hidden, dgu + r * 2 * hidden);
                for (int64_t d = 0; d < dim; d++) g[r * dim + d] *= weights[row];
            }
            bool add = i > start;
            multiply_outer(g, 1, dim, dim, h, hidden, hidden, count, dw2, hidden, add);
            multiply_outer(dgu, 1, 2 * hidden, 2 * hidden, xs, dim, dim, count, dw1, dim, add);
            multiply_outer(dgu, 2 * hidden, 1, count, w1, dim, dim, 2 * hidden, dx_rows + i * dim, dim, false);
        }
        if (start == end) {
            memset(dw1, 0, sizeof(float) * 2 * hidden * dim);
            memset(dw2, 0, sizeof(float) * dim * hidden);
        }
    }
};

}  // namespace

// y [tokens, dim]: experts of the reference. ids [tokens, choices], weights alike; gate_up_w [experts, 2 * hidden, dim],
// down_w [experts, dim, hidden]; x has x_stride elements between tokens. gate_up [tokens * choices, 2 * hidden] receives
// the pre-activations in expert order for the backward pass unless it is null. Returns 1 when an id is not an expert.
GLM5_EXPORT(experts)(const float* x, int64_t x_stride, const int64_t* ids, const float* weights, const float* gate_up_w,
                     const float* down_w, int64_t tokens, int64_t choices, int64_t experts, int64_t dim, int64_t hidden,
                     float* gate_up, float* y, int threads) {
    Shape shape{tokens, choices, experts, dim, hidden};
    Scratch scratch(2 * Scratch::need(shape.rows(), 8) + 2 * Scratch::need(experts + 2, 8) +
                    Scratch::need(shape.rows() * dim) + Scratch::need((shape.rows() / ROWS + experts) * 2, 8));
    int64_t *order = scratch.take<int64_t>(shape.rows()), *place = scratch.take<int64_t>(shape.rows());
    int64_t* starts = scratch.take<int64_t>(experts + 2);
    if (!sort_by_expert(ids, shape, order, starts)) return 1;
    invert(order, shape.rows(), place);
    float* rows = scratch.take<float>(shape.rows() * dim);
    int64_t *blocks = scratch.take<int64_t>((shape.rows() / ROWS + experts) * 2), count = 0;
    for (int64_t e = 0; e < experts; e++)
        for (int64_t i = starts[e]; i < starts[e + 1]; i += ROWS) blocks[2 * count] = e, blocks[2 * count++ + 1] = i;
    parallel(count, 1, threads, [&](int64_t begin, int64_t end) {
        Scratch local(Scratch::need(ROWS * 2 * hidden) + Scratch::need(ROWS * hidden));
        float *pre = local.take<float>(ROWS * 2 * hidden), *h = local.take<float>(ROWS * hidden);
        for (int64_t b = begin; b < end; b++) {
            int64_t e = blocks[2 * b], i = blocks[2 * b + 1];
            forward_block(x, x_stride, order + i, at_most(ROWS, starts[e + 1] - i), shape, weights,
                          gate_up_w + e * 2 * hidden * dim, down_w + e * dim * hidden,
                          gate_up ? gate_up + i * 2 * hidden : pre, h, rows + i * dim);
        }
    });
    combine(rows, place, shape, y, threads);
    return 0;
}

// Gradients of `experts` from dy [tokens, dim] and the saved gate_up: dx [tokens, dim], dweights [tokens, choices],
// dgate_up_w and ddown_w like the weights. All contiguous and written whole.
GLM5_EXPORT(experts_backward)(const float* x, int64_t x_stride, const int64_t* ids, const float* weights,
                              const float* gate_up_w, const float* down_w, const float* gate_up, const float* dy,
                              int64_t tokens, int64_t choices, int64_t experts, int64_t dim, int64_t hidden, float* dx,
                              float* dweights, float* dgate_up_w, float* ddown_w, int threads) {
    Shape shape{tokens, choices, experts, dim, hidden};
    Scratch scratch(2 * Scratch::need(shape.rows(), 8) + Scratch::need(experts + 2, 8) + Scratch::need(shape.rows() * dim));
    int64_t *order = scratch.take<int64_t>(shape.rows()), *place = scratch.take<int64_t>(shape.rows());
    int64_t* starts = scratch.take<int64_t>(experts + 2);
    if (!sort_by_expert(ids, shape, order, starts)) return 1;
    invert(order, shape.rows(), place);
    Backward pass{x, weights, gate_up_w, down_w, gate_up, dy, x_stride, scratch.take<float>(shape.rows() * dim), dweights,
                  dgate_up_w, ddown_w, shape};
    parallel(experts, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t e = begin; e < end; e++) pass.run(order, starts[e], starts[e + 1], e);
    });
    combine(pass.dx_rows, place, shape, dx, threads);
    return 0;
}
