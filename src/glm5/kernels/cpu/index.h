// Lightning-indexer scores of one query against many keys: score[s] = sum_j w[j] * relu(q[j] . key[s]).
//
// Lanes are index heads: the query is stored transposed, each key element is broadcast, LANES keys run together. A key's
// score therefore has the same bits wherever it stands in a block, and those of its fp32 copy when it is bf16.
#pragma once

#include "simd.h"

namespace {

struct IndexQuery {
    int64_t heads, dim, groups;  // groups = ceil(heads / LANES)
    float* q;                    // [groups, dim, LANES], zero for missing heads
    float* w;                    // [groups, LANES], zero for missing heads

    static int64_t need(int64_t heads, int64_t dim) {
        return Scratch::need(round_up(heads) * dim) + Scratch::need(round_up(heads));
    }
    IndexQuery(Scratch& scratch, int64_t heads_, int64_t dim_)
        : heads(heads_), dim(dim_), groups(round_up(heads_) / LANES), q(scratch.take<float>(round_up(heads_) * dim_)),
          w(scratch.take<float>(round_up(heads_))) {
        memset(q, 0, sizeof(float) * round_up(heads) * dim);
        memset(w, 0, sizeof(float) * round_up(heads));
    }
    // source [heads, dim]; logits are multiplied by `scale` through q.
    template <class T> void set(const T* source, const float* weights, float scale) {
        for (int64_t j = 0; j < heads; j++) {
            float* column = q + (j / LANES) * dim * LANES + j % LANES;
            for (int64_t x = 0; x < dim; x++) column[x * LANES] = as_float(source[j * dim + x]) * scale;
            w[j] = weights[j];
        }
    }
};

// sums[i] += heads of element x * keys[i][x] for all elements; those of bf16 are taken from their 32-bit words in pairs.
GLM5_INLINE void add_products(const float* q, const float* const* keys, int64_t dim, const char* ahead, vf* sums) {
    for (int64_t x = 0; x < dim; x++) {
        if (ahead) __builtin_prefetch(ahead + x * LANES * (int64_t)sizeof(float));
        vf heads = load(q + x * LANES);
        GLM5_UNROLL
        for (int i = 0; i < LANES; i++) sums[i] += heads * keys[i][x];
    }
}
GLM5_INLINE void add_products(const float* q, const bf16* const* keys, int64_t dim, const char* ahead, vf* sums) {
    int64_t x = 0;
    for (; x + 2 <= dim; x += 2) {
        if (ahead) __builtin_prefetch(ahead + x * LANES * (int64_t)sizeof(bf16));
        vf even = load(q + x * LANES), odd = load(q + (x + 1) * LANES);
        GLM5_UNROLL
        for (int i = 0; i < LANES; i++) {
            float word;  // a float, because those are broadcast by the load itself
            memcpy(&word, keys[i] + x, 4);
            vi words = (vi)splat(word);
            sums[i] += even * (vf)(words << 16);
            sums[i] += odd * (vf)(words & splat_bits(0xffff0000u));
        }
    }
    for (; x < dim; x++)
        for (int i = 0; i < LANES; i++) sums[i] += load(q + x * LANES) * as_float(keys[i][x]);
}

// Logits of LANES keys for one group of heads: out[i] has heads as lanes. `ahead`, unless null, is the memory of LANES
// keys that are needed later: its loads are spread over the work, because a burst would wait for itself.
template <class T>
GLM5_INLINE void index_logits(const IndexQuery& query, int64_t group, const T* const* keys, const char* ahead, vf* out) {
    vf sums[LANES];
    GLM5_UNROLL
    for (int i = 0; i < LANES; i++) sums[i] = (vf){};
    add_products(query.q + group * query.dim * LANES, keys, query.dim, ahead, sums);
    GLM5_UNROLL
    for (int i = 0; i < LANES; i++) out[i] = sums[i];
}

GLM5_INLINE vf relu(vf x) { return (vf){} > x ? (vf){} : x; }  // NaN stays NaN

// Scores of LANES keys given by pointers, one per lane.
template <class T>
GLM5_INLINE vf index_scores_block(const IndexQuery& query, const T* const* keys, const char* ahead = nullptr) {
    vf logits[LANES], sums[LANES];
    index_logits(query, 0, keys, ahead, logits);
    vf w = load(query.w);
    GLM5_UNROLL
    for (int i = 0; i < LANES; i++) sums[i] = relu(logits[i]) * w;
    for (int64_t group = 1; group < query.groups; group++) {
        index_logits(query, group, keys, nullptr, logits);
        w = load(query.w + group * LANES);
        GLM5_UNROLL
        for (int i = 0; i < LANES; i++) sums[i] += relu(logits[i]) * w;
    }
    return reduce_lanes(sums);
}

}  // namespace
