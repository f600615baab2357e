// Lightning-indexer scores of one query against many keys: score[s] = sum_j w[j] * relu(q[j] . key[s]).
//
// Lanes are index heads: the query is stored transposed, each key element is broadcast, LANES keys run together. A key's
// score therefore has the same bits wherever it stands in a block.
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

// Logits of LANES keys for one group of heads: out[i] has heads as lanes.
GLM5_INLINE void index_logits(const IndexQuery& query, int64_t group, const float* const* keys, vf* out) {
    vf sums[LANES];
    GLM5_UNROLL
    for (int i = 0; i < LANES; i++) sums[i] = (vf){};
    const float* q = query.q + group * query.dim * LANES;
    for (int64_t x = 0; x < query.dim; x++) {
        vf heads = load(q + x * LANES);
        GLM5_UNROLL
        for (int i = 0; i < LANES; i++) sums[i] += heads * keys[i][x];
    }
    GLM5_UNROLL
    for (int i = 0; i < LANES; i++) out[i] = sums[i];
}

GLM5_INLINE vf relu(vf x) { return (vf){} > x ? (vf){} : x; }  // NaN stays NaN

// Scores of LANES keys given by pointers, one per lane.
GLM5_INLINE vf index_scores_block(const IndexQuery& query, const float* const* keys) {
    vf logits[LANES], sums[LANES];
    index_logits(query, 0, keys, logits);
    vf w = load(query.w);
    GLM5_UNROLL
    for (int i = 0; i < LANES; i++) sums[i] = relu(logits[i]) * w;
    for (int64_t group = 1; group < query.groups; group++) {
        index_logits(query, group, keys, logits);
        w = load(query.w + group * LANES);
        GLM5_UNROLL
        for (int i = 0; i < LANES; i++) sums[i] += relu(logits[i]) * w;
    }
    return reduce_lanes(sums);
}

}  // namespace
