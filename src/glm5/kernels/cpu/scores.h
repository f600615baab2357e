// Lightning-indexer scores of a few queries against blocks of keys: score[s] = sum_j w[j] * relu(q[j] . key[s]).
//
// A panel holds PANEL keys as columns, so that keys are lanes: every score is one chain of additions over the key's
// elements per head and one over the heads in order. Its bits depend neither on the panel nor on the other queries.
#pragma once

#include "simd.h"

namespace {

constexpr int PANEL_VECTORS = 3;
constexpr int64_t PANEL = PANEL_VECTORS * LANES;
constexpr int HEAD_ROWS = LANES == 16 ? 8 : 4;  // heads of one register tile

GLM5_INLINE vf relu(vf x) { return (vf){} > x ? (vf){} : x; }  // NaN stays NaN

// panel[d * PANEL + i] = rows[i][d] for PANEL rows.
template <class T> static void pack_panel(const T* const* rows, int64_t dim, float* panel) {
    constexpr int64_t STEP = LANES * sizeof(float) / sizeof(T);  // elements of one vector of 32-bit words
    for (int v = 0; v < PANEL_VECTORS; v++) {
        const T* const* source = rows + v * LANES;
        float* out = panel + v * LANES;
        int64_t d = 0;
        for (; d + STEP <= dim; d += STEP) {
            vf words[LANES];
            GLM5_UNROLL
            for (int i = 0; i < LANES; i++) words[i] = *(const vf_loose*)(source[i] + d);
            transpose(words);
            GLM5_UNROLL
            for (int i = 0; i < LANES; i++) {
                if constexpr (sizeof(T) == sizeof(float)) {
                    store(out + (d + i) * PANEL, words[i]);
                } else {  // a word holds the elements 2i (low half) and 2i + 1
                    store(out + (d + 2 * i) * PANEL, (vf)((vi)words[i] << 16));
                    store(out + (d + 2 * i + 1) * PANEL, (vf)((vi)words[i] & splat_bits(0xffff0000u)));
                }
            }
        }
        for (; d < dim; d++)
            for (int i = 0; i < LANES; i++) out[d * PANEL + i] = as_float(source[i][d]);
    }
}

// Memory to load in small steps, `bytes` with every step: a burst would wait for itself.
struct Ahead {
    const char* next;
    int64_t bytes;
};

// scores += w[r] * relu(q[r] . keys) for R heads, q [R, dim].
template <int R>
GLM5_INLINE void add_heads(const float* q, const float* w, int64_t dim, const float* panel, Ahead& ahead, vf* scores) {
    vf sums[R * PANEL_VECTORS];
    GLM5_UNROLL
    for (int i = 0; i < R * PANEL_VECTORS; i++) sums[i] = (vf){};
    for (int64_t d = 0; d < dim; d++) {
        __builtin_prefetch(ahead.next + d * ahead.bytes);
        vf x[PANEL_VECTORS];
        GLM5_UNROLL
        for (int v = 0; v < PANEL_VECTORS; v++) x[v] = load(panel + d * PANEL + v * LANES);
        GLM5_UNROLL
        for (int r = 0; r < R; r++) {
            float factor = q[r * dim + d];
            GLM5_UNROLL
            for (int v = 0; v < PANEL_VECTORS; v++) sums[r * PANEL_VECTORS + v] += factor * x[v];
        }
    }
    ahead.next += dim * ahead.bytes;
    GLM5_UNROLL
    for (int r = 0; r < R; r++) {
        GLM5_UNROLL
        for (int v = 0; v < PANEL_VECTORS; v++) scores[v] += w[r] * relu(sums[r * PANEL_VECTORS + v]);
    }
}

// scores [PANEL] of one query, q [heads, dim].
static void score_panel(const float* q, const float* w, int64_t heads, int64_t dim, const float* panel, Ahead ahead,
                        vf* scores) {
    vf sums[PANEL_VECTORS] = {};
    int64_t j = 0;
    for (; j + HEAD_ROWS <= heads; j += HEAD_ROWS) add_heads<HEAD_ROWS>(q + j * dim, w + j, dim, panel, ahead, sums);
    for (; j < heads; j++) add_heads<1>(q + j * dim, w + j, dim, panel, ahead, sums);
    for (int v = 0; v < PANEL_VECTORS; v++) scores[v] = sums[v];
}

// Packs the keys [first, first + PANEL) of n contiguous ones; those past the end repeat the last.
template <class T> static void pack_keys(const T* keys, int64_t first, int64_t n, int64_t dim, float* panel) {
    const T* rows[PANEL];
    for (int64_t i = 0; i < PANEL; i++) rows[i] = keys + at_most(first + i, n - 1) * dim;
    pack_panel(rows, dim, panel);
}

// The keys that a later panel reads, to be loaded while this one is scored.
template <class T> GLM5_INLINE Ahead panel_ahead(const T* keys, int64_t first, int64_t n, int64_t heads, int64_t dim,
                                            const float* panel) {
    constexpr int64_t DISTANCE = 4 * PANEL;
    if (first + DISTANCE + PANEL > n) return {(const char*)panel, 0};
    return {(const char*)(keys + (first + DISTANCE) * dim), PANEL * (int64_t)sizeof(T) * HEAD_ROWS / (heads > HEAD_ROWS ? heads : HEAD_ROWS)};
}

}  // namespace
