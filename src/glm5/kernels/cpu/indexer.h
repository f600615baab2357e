// The indexer of one query in training: gradients of its scores, and the KL loss over a row of scores.
#pragma once

#include "index.h"

namespace {

struct Indexer {
    const float *q, *k, *w;  // q [batches, queries, heads, dim], k [batches, keys, dim], w [batches, queries, heads]
    int64_t batches, queries, keys, heads, dim;
    float scale;
};

// Gradients of one query from the score gradients g of its n keys. dqt [groups, dim, LANES] and dw [groups, LANES] are
// overwritten, dk rows are added to.
[[maybe_unused]] static void backward_query(const IndexQuery& query, const Indexer& p, const float* q, const float* keys,
                           const int32_t* positions, const float* g, int64_t n, float* dqt, float* dw, float* slopes,
                           float* dk) {
    memset(dqt, 0, sizeof(float) * query.groups * LANES * p.dim);
    memset(dw, 0, sizeof(float) * query.groups * LANES);
    int64_t padded = query.groups * LANES;
    for (int64_t i = 0; i < n; i += LANES) {
        int64_t count = at_most(LANES, n - i);
        const float* rows[LANES];
        for (int j = 0; j < LANES; j++) rows[j] = keys + positions[at_most(i + j, n - 1)] * p.dim;
        for (int64_t group = 0; group < query.groups; group++) {
            vf logits[LANES], slope[LANES], sum = load(dw + group * LANES), w = load(query.w + group * LANES);
            index_logits(query, group, rows, nullptr, logits);
            GLM5_UNROLL
            for (int j = 0; j < LANES; j++) {
                vf gradient = splat(j < count ? g[i + j] : 0.0f);
                sum += gradient * relu(logits[j]);
                slope[j] = logits[j] > (vf){} ? gradient * w * p.scale : (vf){};
                store(slopes + j * padded + group * LANES, slope[j]);
            }
            store(dw + group * LANES, sum);
            float* column = dqt + group * p.dim * LANES;
            for (int64_t x = 0; x < p.dim; x++) {
                vf total = load(column + x * LANES);
                GLM5_UNROLL
                for (int j = 0; j < LANES; j++) total += slope[j] * rows[j][x];
                store(column + x * LANES, total);
            }
        }
        for (int64_t j = 0; j < count; j++) {
            float* row = dk + positions[i + j] * p.dim;
            int64_t x = 0;
            for (; x + 4 * LANES <= p.dim; x += 4 * LANES) {
                vf a = load(row + x), b = load(row + x + LANES), c = load(row + x + 2 * LANES), d = load(row + x + 3 * LANES);
                for (int64_t h = 0; h < p.heads; h++) {
                    float slope = slopes[j * padded + h];
                    const float* source = q + h * p.dim + x;
                    a += slope * load(source), b += slope * load(source + LANES);
                    c += slope * load(source + 2 * LANES), d += slope * load(source + 3 * LANES);
                }
                store(row + x, a), store(row + x + LANES, b), store(row + x + 2 * LANES, c), store(row + x + 3 * LANES, d);
            }
            for (; x < p.dim; x++)
                for (int64_t h = 0; h < p.heads; h++) row[x] += slopes[j * padded + h] * q[h * p.dim + x];
        }
    }
}

// KL(target || softmax(scores)) over n entries; scores become the softmax.
[[maybe_unused]] static float kl_row(float* scores, const float* target, int64_t n) {
    for (int64_t i = n; i < round_up(n); i++) scores[i] = -INFINITY;
    vf best = splat(-INFINITY), total = {};
    for (int64_t i = 0; i < n; i += LANES) best = larger(load(scores + i), best);
    float peak = max_lanes(best);
    for (int64_t i = 0; i < n; i += LANES) total += exp_lanes(load(scores + i) - peak);
    float log_sum = peak + logf(sum_lanes(total)), loss = 0.0f;
    for (int64_t i = 0; i < n; i++)
        if (target[i] > 0.0f) loss += target[i] * (logf(target[i]) - (scores[i] - log_sum));
    for (int64_t i = 0; i < n; i += LANES) store(scores + i, exp_lanes(load(scores + i) - log_sum));
    return loss;
}

// The gradients that backward_query left in lanes, as dq [heads, dim] and dw [heads].
[[maybe_unused]] static void write_gradient(const IndexQuery& gradient, int64_t heads, int64_t dim, float* dq, float* dw) {
    for (int64_t h = 0; h < heads; h++) {
        const float* column = gradient.q + (h / LANES) * dim * LANES + h % LANES;
        for (int64_t x = 0; x < dim; x++) dq[h * dim + x] = column[x * LANES];
        dw[h] = gradient.w[h];
    }
}

}  // namespace
