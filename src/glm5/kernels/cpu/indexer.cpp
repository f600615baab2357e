// The lightning indexer in training (fp32): scores and their gradients, top-k masks, and the KL loss with its gradient.

#include "indexer.h"
#include "mask.h"
#include "topk.h"


// scores [batches, queries, keys] contiguous, written whole: 0 where the mask is false.
GLM5_EXPORT(index_scores)(const float* q, const float* k, const float* w, const uint8_t* mask, int64_t mask_batch,
                          int64_t mask_query, int64_t batches, int64_t queries, int64_t keys, int64_t heads, int64_t dim,
                          float scale, float* scores, int threads) {
    Mask valid{mask, mask_batch, mask_query, keys};
    parallel(batches * queries, 64, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(IndexQuery::need(heads, dim) + Scratch::need(keys + 8));
        IndexQuery query(scratch, heads, dim);
        int32_t* positions = scratch.take<int32_t>(keys + 8);
        for (int64_t row = begin; row < end; row++) {
            int64_t b = row / queries, n = valid.row(b, row % queries, positions);
            float* out = scores + row * keys;
            memset(out, 0, sizeof(float) * keys);
            query.set(q + row * heads * dim, w + row * heads, scale);
            for (int64_t i = 0; i < n; i += LANES) {
                const float* rows[LANES];
                for (int j = 0; j < LANES; j++) rows[j] = k + (b * keys + positions[at_most(i + j, n - 1)]) * dim;
                float values[LANES];
                store(values, index_scores_block(query, rows));
                for (int64_t j = 0; j < at_most(LANES, n - i); j++) out[positions[i + j]] = values[j];
            }
        }
    });
    return 0;
}

// dq, dk, dw like q, k, w, written whole, from dscores [batches, queries, keys] contiguous.
GLM5_EXPORT(index_scores_backward)(const float* q, const float* k, const float* w, const uint8_t* mask, int64_t mask_batch,
                                   int64_t mask_query, int64_t batches, int64_t queries, int64_t keys, int64_t heads,
                                   int64_t dim, float scale, const float* dscores, float* dq, float* dk, float* dw,
                                   int threads) {
    Mask valid{mask, mask_batch, mask_query, keys};
    Indexer p{q, k, w, batches, queries, keys, heads, dim, scale};
    memset(dk, 0, sizeof(float) * batches * keys * dim);
    parallel(batches, 1, threads, [&](int64_t first, int64_t last) {
        Scratch scratch(2 * IndexQuery::need(heads, dim) + Scratch::need(LANES * round_up(heads)) +
                        2 * Scratch::need(keys + 8));
        IndexQuery query(scratch, heads, dim), gradient(scratch, heads, dim);
        float* slopes = scratch.take<float>(LANES * round_up(heads));
        int32_t* positions = scratch.take<int32_t>(keys + 8);
        float* g = scratch.take<float>(keys + 8);
        for (int64_t row = first * queries; row < last * queries; row++) {
            int64_t b = row / queries, all = valid.row(b, row % queries, positions), n = 0;
            for (int64_t i = 0; i < all; i++) {  // keys without a gradient cost nothing
                int32_t s = positions[i];
                positions[n] = s, g[n] = dscores[row * keys + s];
                n += g[n] != 0.0f;
            }
            query.set(q + row * heads * dim, w + row * heads, scale);
            backward_query(query, p, q + row * heads * dim, k + b * keys * dim, positions, g, n, gradient.q, gradient.w,
                           slopes, dk + b * keys * dim);
            write_gradient(gradient, heads, dim, dq + row * heads * dim, dw + row * heads);
        }
    });
    return 0;
}

// selected [batches, queries, keys] contiguous bytes, written whole: select_topk of the reference with k > 0.
GLM5_EXPORT(select_topk)(const float* scores, const uint8_t* mask, int64_t mask_batch, int64_t mask_query, int64_t batches,
                         int64_t queries, int64_t keys, int64_t k, uint8_t* selected, int threads) {
    Mask valid{mask, mask_batch, mask_query, keys};
    parallel(batches * queries, 64, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(2 * Scratch::need(keys + 8) + Scratch::need(keys + LANES) + 2 * Scratch::need(topk_scratch(keys)));
        int32_t *positions = scratch.take<int32_t>(keys + 8), *best = scratch.take<int32_t>(keys + 8);
        float* values = scratch.take<float>(keys + LANES);
        int32_t *order = scratch.take<int32_t>(topk_scratch(keys)), *spare = scratch.take<int32_t>(topk_scratch(keys));
        for (int64_t row = begin; row < end; row++) {
            int64_t n = valid.row(row / queries, row % queries, positions);
            uint8_t* out = selected + row * keys;
            memset(out, 0, keys);
            for (int64_t i = 0; i < n; i++) values[i] = scores[row * keys + positions[i]];
            int64_t kept = select_topk(values, n, k, order, spare, best);
            for (int64_t i = 0; i < kept; i++) out[positions[best[i]]] = 1;
        }
    });
    return 0;
}

// losses [batches * queries] (0 for a row without keys) and slope [batches, queries, keys], written whole: the gradient
// of the mean loss by the scores. Returns 0; rows [1] receives the number of rows with a key.
GLM5_EXPORT(indexer_kl)(const float* scores, const float* target, const uint8_t* mask, int64_t mask_batch,
                        int64_t mask_query, int64_t batches, int64_t queries, int64_t keys, float* losses, float* slope,
                        int64_t* rows, int threads) {
    Mask valid{mask, mask_batch, mask_query, keys};
    *rows = 0;
    for (int64_t row = 0; row < batches * queries; row++)
        *rows += memchr(mask + row / queries * mask_batch + row % queries * mask_query, 1, keys) != nullptr;
    float share = 1.0f / (float)(*rows ? *rows : 1);
    parallel(batches * queries, 64, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(Scratch::need(keys + 8) + 2 * Scratch::need(keys + LANES));
        int32_t* positions = scratch.take<int32_t>(keys + 8);
        float *p = scratch.take<float>(keys + LANES), *t = scratch.take<float>(keys + LANES);
        for (int64_t row = begin; row < end; row++) {
            int64_t n = valid.row(row / queries, row % queries, positions);
            for (int64_t i = 0; i < n; i++) p[i] = scores[row * keys + positions[i]], t[i] = target[row * keys + positions[i]];
            losses[row] = n ? kl_row(p, t, n) : 0.0f;
            memset(slope + row * keys, 0, sizeof(float) * keys);
            for (int64_t i = 0; i < n; i++) slope[row * keys + positions[i]] = (p[i] - t[i]) * share;
        }
    });
    return 0;
}
