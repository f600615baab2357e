// Sparse attention in training (fp32): gradients of absorbed attention over listed keys, index scores of listed keys with
// their gradients, and the indexer's target. Nothing here has the size queries x keys.
//
// positions [queries, width]: ascending keys of each query, padded with -1 at the end. A backward pass takes STEP queries
// at a time: first the weights and slopes of each query with its own gradient, queries in parallel; then what these add
// to the keys, ranges of keys in parallel, each key in the order of the queries. So no sum depends on the threads.

#include "absorbed.h"
#include "index.h"

namespace {

constexpr int64_t STEP = 64;
constexpr int64_t RANGE = 1024;

struct Problem {
    int64_t batches, queries, keys, heads, dim, width;  // queries and keys of one batch entry, width listed keys
    const int32_t* positions;

    int64_t rows() const { return batches * queries; }
    int64_t padded() const { return round_up(heads); }
    const int32_t* row(int64_t m) const { return positions + m * width; }
    int64_t count(int64_t m) const {
        int64_t n = width;
        while (n > 0 && row(m)[n - 1] < 0) n--;
        return n;
    }
};

// out[j][c ..] += sum_h weights[j][h] * rows[h][c ..] for J keys and V vectors; weights [J, padded], rows [heads, stride].
template <int J, int V>
GLM5_INLINE void spread_tile(const float* weights, int64_t padded, const float* rows, int64_t stride, int64_t heads,
                             float* const* out, int64_t c) {
    vf total[J * V];
    GLM5_UNROLL
    for (int i = 0; i < J * V; i++) total[i] = load(out[i / V] + c + (i % V) * LANES);
    for (int64_t h = 0; h < heads; h++) {
        vf x[V];
        GLM5_UNROLL
        for (int v = 0; v < V; v++) x[v] = load(rows + h * stride + c + v * LANES);
        GLM5_UNROLL
        for (int j = 0; j < J; j++) {
            float factor = weights[j * padded + h];
            GLM5_UNROLL
            for (int v = 0; v < V; v++) total[j * V + v] += factor * x[v];
        }
    }
    GLM5_UNROLL
    for (int i = 0; i < J * V; i++) store(out[i / V] + c + (i % V) * LANES, total[i]);
}

template <int J>
GLM5_INLINE void spread_keys(const float* weights, int64_t padded, const float* rows, int64_t stride, int64_t heads,
                             float* const* out, int64_t size) {
    int64_t c = 0;
    for (; c + 3 * LANES <= size; c += 3 * LANES) spread_tile<J, 3>(weights, padded, rows, stride, heads, out, c);
    for (; c < size; c += LANES) spread_tile<J, 1>(weights, padded, rows, stride, heads, out, c);
}

// One product that a backward pass adds to the keys: key += sum_h weights[query, key, h] * rows[query, h].
struct Spread {
    const float* weights;  // [STEP, width, padded]
    const float* rows;     // [queries, heads, stride], readable up to a multiple of LANES
    int64_t stride, size;  // elements between heads, and added to a key (a multiple of LANES)
};

// Adds the spreads of queries first .. first + n (of one batch entry) to the key gradients dk [keys, stride_k].
static void spread(const Problem& p, int64_t first, int64_t n, const Spread* spreads, int count, float* dk, int64_t stride_k,
                   int threads) {
    parallel((p.keys + RANGE - 1) / RANGE, 1, threads, [&](int64_t begin, int64_t end) {
        int32_t low = (int32_t)(begin * RANGE), high = (int32_t)at_most(p.keys, end * RANGE);
        for (int64_t i = 0; i < n; i++) {
            const int32_t* row = p.row(first + i);
            int64_t keys = p.count(first + i), from = 0, to;
            for (int64_t size = keys; size > 0;) {  // lower bound
                int64_t half = size / 2;
                if (row[from + half] < low) from += half + 1, size -= half + 1;
                else size = half;
            }
            for (to = from; to < keys && row[to] < high;) to++;
            for (int64_t j = from; j < to;) {
                float* out[4];
                int64_t taken = to - j >= 4 ? 4 : 1;
                for (int64_t t = 0; t < taken; t++) out[t] = dk + row[j + t] * stride_k;
                for (int s = 0; s < count; s++) {
                    const float* weights = spreads[s].weights + (i * p.width + j) * p.padded();
                    const float* rows = spreads[s].rows + (first + i) * p.heads * spreads[s].stride;
                    if (taken == 4) spread_keys<4>(weights, p.padded(), rows, spreads[s].stride, p.heads, out, spreads[s].size);
                    else spread_keys<1>(weights, p.padded(), rows, spreads[s].stride, p.heads, out, spreads[s].size);
                }
                j += taken;
            }
        }
    });
}

// rows [n, size] with `stride` elements between them, zero past `size`.
static void pad_rows(const float* source, int64_t n, int64_t size, int64_t stride, float* out, int threads) {
    parallel(n, 256, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            memcpy(out + i * stride, source + i * size, sizeof(float) * size);
            memset(out + i * stride + size, 0, sizeof(float) * (stride - size));
        }
    });
}

static void unpad_rows(const float* source, int64_t n, int64_t size, int64_t stride, float* out) {
    for (int64_t i = 0; i < n; i++) memcpy(out + i * size, source + i * stride, sizeof(float) * size);
}

// What the attention gradient of one query needs.
struct AttentionBackward {
    Problem p;
    const float *q, *latents, *out, *log_sums, *dout;
    int64_t latent;
    float scale;
    float *weights, *slopes, *dq;  // weights and slopes [STEP, width, padded]

    int64_t stride() const { return round_up(p.dim); }
    int64_t need() const {
        return Scratch::need(p.padded() * p.dim) + Scratch::need(p.padded() * latent) + 2 * Scratch::need(p.padded()) +
               Scratch::need(p.padded() * stride()) + Entries<float>::need(p.dim);
    }
    void run(int64_t m, int64_t place) const {
        Scratch scratch(need());
        int64_t padded = p.padded(), n = p.count(m), row = m * p.heads;
        float *turned_q = scratch.take<float>(padded * p.dim), *turned_g = scratch.take<float>(padded * latent);
        float *log_sum = scratch.take<float>(padded), *delta = scratch.take<float>(padded);
        float* sums = scratch.take<float>(padded * stride());
        Entries<float> entries(scratch, p.dim);
        turn_heads(q + row * p.dim, p.heads, p.dim, padded, scale, turned_q);
        turn_heads(dout + row * latent, p.heads, latent, padded, 1.0f, turned_g);
        memset(sums, 0, sizeof(float) * padded * stride());
        for (int64_t h = 0; h < padded; h++) {
            log_sum[h] = delta[h] = 0.0f;
            if (h >= p.heads) continue;
            log_sum[h] = log_sums[row + h];
            for (int64_t c = 0; c < latent; c++) delta[h] += dout[(row + h) * latent + c] * out[(row + h) * latent + c];
        }
        const float* keys = latents + m / p.queries * p.keys * p.dim;
        for (int64_t start = 0; start < n; start += BLOCK) {
            int64_t block = at_most(BLOCK, n - start);
            float *w = weights + (place * p.width + start) * padded, *s = slopes + (place * p.width + start) * padded;
            entries.fetch(keys, p.row(m), start, block, n);
            block_logits(turned_q, padded, entries.rows, block, p.dim, &entries.ahead, w);
            block_logits(turned_g, padded, entries.rows, block, latent, nullptr, s);
            for (int64_t i = 0; i < block * padded; i += LANES) {
                vf weight = exp_lanes(load(w + i) - load(log_sum + i % padded));
                store(w + i, weight);
                store(s + i, weight * (load(s + i) - load(delta + i % padded)) * scale);
            }
            block_values(s, padded, p.heads, entries.rows, block, sums, stride());
        }
        for (int64_t h = 0; h < p.heads; h++) memcpy(dq + (row + h) * p.dim, sums + h * stride(), sizeof(float) * p.dim);
    }
};

// The same for index scores: slopes [STEP, width, padded].
struct ScoresBackward {
    Problem p;
    const float *q, *keys, *w, *dscores;
    float scale;
    float *slopes, *dq, *dw;

    int64_t stride() const { return round_up(p.dim); }
    int64_t need() const {
        return Scratch::need(p.padded() * p.dim) + 2 * Scratch::need(p.padded()) + Scratch::need(p.padded() * stride()) +
               Entries<float>::need(p.dim);
    }
    void run(int64_t m, int64_t place) const {
        Scratch scratch(need());
        int64_t padded = p.padded(), n = p.count(m), row = m * p.heads;
        float *turned = scratch.take<float>(padded * p.dim), *weight = scratch.take<float>(padded);
        float *dweight = scratch.take<float>(padded), *sums = scratch.take<float>(padded * stride());
        Entries<float> entries(scratch, p.dim);
        turn_heads(q + row * p.dim, p.heads, p.dim, padded, scale, turned);
        memset(sums, 0, sizeof(float) * padded * stride());
        for (int64_t h = 0; h < padded; h++) weight[h] = h < p.heads ? w[row + h] : 0.0f, dweight[h] = 0.0f;
        const float* source = keys + m / p.queries * p.keys * p.dim;
        for (int64_t start = 0; start < n; start += BLOCK) {
            int64_t block = at_most(BLOCK, n - start);
            float* s = slopes + (place * p.width + start) * padded;
            entries.fetch(source, p.row(m), start, block, n);
            block_logits(turned, padded, entries.rows, block, p.dim, &entries.ahead, s);
            for (int64_t i = 0; i < block; i++) {
                float g = dscores[m * p.width + start + i];
                for (int64_t h = 0; h < padded; h += LANES) {
                    vf logits = load(s + i * padded + h);
                    store(dweight + h, load(dweight + h) + g * relu(logits));
                    store(s + i * padded + h, logits > (vf){} ? g * load(weight + h) * scale : (vf){});
                }
            }
            block_values(s, padded, p.heads, entries.rows, block, sums, stride());
        }
        for (int64_t h = 0; h < p.heads; h++) memcpy(dq + (row + h) * p.dim, sums + h * stride(), sizeof(float) * p.dim);
        memcpy(dw + row, dweight, sizeof(float) * p.heads);
    }
};

// Runs `backward` for every query, STEP at a time, and after each step adds its spreads to dk [batches, keys, dim].
template <class Backward>
static void run_backward(const Problem& p, const Backward& backward, const Spread* spreads, int count, float* dk, int threads) {
    int64_t stride = round_up(p.dim);
    Scratch scratch(Scratch::need(p.keys * stride));
    float* sums = scratch.take<float>(p.keys * stride);
    for (int64_t b = 0; b < p.batches; b++) {
        memset(sums, 0, sizeof(float) * p.keys * stride);
        for (int64_t first = b * p.queries; first < (b + 1) * p.queries; first += STEP) {
            int64_t n = at_most(STEP, (b + 1) * p.queries - first);
            parallel(n, 4, threads, [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; i++) backward.run(first + i, i);
            });
            spread(p, first, n, spreads, count, sums, stride, threads);
        }
        unpad_rows(sums, p.keys, p.dim, stride, dk + b * p.keys * p.dim);
    }
}

}  // namespace

// Gradients of ragged_attention over one slot per batch entry: q [batches, queries, heads, dim], latents [batches, keys,
// dim], out and dout [.., heads, latent], log_sums [.., heads], all contiguous; dq like q and dlatents like latents.
GLM5_EXPORT(sparse_attention_backward)(const float* q, const float* latents, const int32_t* positions, int64_t batches,
                                       int64_t queries, int64_t keys, int64_t heads, int64_t dim, int64_t latent,
                                       int64_t width, float scale, const float* out, const float* log_sums,
                                       const float* dout, float* dq, float* dlatents, int threads) {
    Problem p{batches, queries, keys, heads, dim, width, positions};
    int64_t rows = p.rows() * heads, wide = round_up(dim), narrow = round_up(latent);
    Scratch scratch(2 * Scratch::need(STEP * width * p.padded()) + Scratch::need(rows * wide) + Scratch::need(rows * narrow));
    float *weights = scratch.take<float>(STEP * width * p.padded()), *slopes = scratch.take<float>(STEP * width * p.padded());
    float *padded_q = scratch.take<float>(rows * wide), *padded_g = scratch.take<float>(rows * narrow);
    pad_rows(q, rows, dim, wide, padded_q, threads);
    pad_rows(dout, rows, latent, narrow, padded_g, threads);
    Spread spreads[2] = {{slopes, padded_q, wide, wide}, {weights, padded_g, narrow, narrow}};
    run_backward(p, AttentionBackward{p, q, latents, out, log_sums, dout, latent, scale, weights, slopes, dq}, spreads, 2,
                 dlatents, threads);
    return 0;
}

// scores [batches, queries, width]: index scores of the listed keys, 0 for padding. q [batches, queries, heads, dim], k
// [batches, keys, dim], w [batches, queries, heads], contiguous.
GLM5_EXPORT(sparse_scores)(const float* q, const float* k, const float* w, const int32_t* positions, int64_t batches,
                           int64_t queries, int64_t keys, int64_t heads, int64_t dim, int64_t width, float scale,
                           float* scores, int threads) {
    Problem p{batches, queries, keys, heads, dim, width, positions};
    parallel(p.rows(), 16, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(IndexQuery::need(heads, dim));
        IndexQuery query(scratch, heads, dim);
        for (int64_t m = begin; m < end; m++) {
            int64_t n = p.count(m);
            float* out = scores + m * width;
            memset(out, 0, sizeof(float) * width);
            query.set(q + m * heads * dim, w + m * heads, scale);
            for (int64_t i = 0; i < n; i += LANES) {
                const float* rows[LANES];
                for (int j = 0; j < LANES; j++) rows[j] = k + (m / queries * keys + p.row(m)[at_most(i + j, n - 1)]) * dim;
                vf values = index_scores_block(query, rows);
                memcpy(out + i, &values, sizeof(float) * at_most(LANES, n - i));
            }
        }
    });
    return 0;
}

// Gradients of sparse_scores: dq like q, dk like k, dw like w, written whole.
GLM5_EXPORT(sparse_scores_backward)(const float* q, const float* k, const float* w, const int32_t* positions,
                                    int64_t batches, int64_t queries, int64_t keys, int64_t heads, int64_t dim,
                                    int64_t width, float scale, const float* dscores, float* dq, float* dk, float* dw,
                                    int threads) {
    Problem p{batches, queries, keys, heads, dim, width, positions};
    int64_t rows = p.rows() * heads, wide = round_up(dim);
    Scratch scratch(Scratch::need(STEP * width * p.padded()) + Scratch::need(rows * wide));
    float *slopes = scratch.take<float>(STEP * width * p.padded()), *padded_q = scratch.take<float>(rows * wide);
    pad_rows(q, rows, dim, wide, padded_q, threads);
    Spread spreads[1] = {{slopes, padded_q, wide, wide}};
    run_backward(p, ScoresBackward{p, q, k, w, dscores, scale, slopes, dq, dw}, spreads, 1, dk, threads);
    return 0;
}

// target [batches, queries, width]: mean over heads of the attention weights of the listed keys, 0 for padding.
GLM5_EXPORT(sparse_targets)(const float* q, const float* latents, const int32_t* positions, int64_t batches,
                            int64_t queries, int64_t keys, int64_t heads, int64_t dim, int64_t width, float scale,
                            float* target, int threads) {
    Problem p{batches, queries, keys, heads, dim, width, positions};
    int64_t padded = p.padded();
    parallel(p.rows(), 4, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(Scratch::need(padded * dim) + Scratch::need(padded * width) + Entries<float>::need(dim));
        float *turned = scratch.take<float>(padded * dim), *weights = scratch.take<float>(padded * width);
        Entries<float> entries(scratch, dim);
        for (int64_t m = begin; m < end; m++) {
            int64_t n = p.count(m);
            turn_heads(q + m * heads * dim, heads, dim, padded, scale, turned);
            for (int64_t start = 0; start < n; start += BLOCK) {
                entries.fetch(latents + m / queries * keys * dim, p.row(m), start, at_most(BLOCK, n - start), n);
                block_logits(turned, padded, entries.rows, at_most(BLOCK, n - start), dim, &entries.ahead, weights + start * padded);
            }
            float* out = target + m * width;
            memset(out, 0, sizeof(float) * width);
            for (int64_t h = 0; h < padded; h += LANES) {
                vf peak = splat(-INFINITY), total = {};
                for (int64_t i = 0; i < n; i++) peak = larger(load(weights + i * padded + h), peak);
                for (int64_t i = 0; i < n; i++) {
                    vf weight = exp_lanes(load(weights + i * padded + h) - peak);
                    store(weights + i * padded + h, weight);
                    total += weight;
                }
                vf share = 1.0f / (total * (float)heads);
                for (int64_t i = 0; i < n; i++)
                    for (int64_t lane = 0; lane < at_most(LANES, heads - h); lane++)
                        out[i] += weights[i * padded + h + lane] * share[lane];
            }
        }
    });
    return 0;
}
