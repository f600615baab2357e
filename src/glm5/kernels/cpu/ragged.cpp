// Sparse attention of ragged queries over a paged cache (inference): index scores, exact top-k, absorbed attention.
//
// A slot is a row of the block table: its position s is entry s % block of block table[slot][s / block]. Keys are
// scored block by block; attention reads entries through the rows that the selected positions have in the cache.
// Every query is computed alone, so its bits depend neither on the batch nor on the thread count.

#include "index.h"
#include "topk.h"

namespace {

constexpr int64_t BLOCK = 64;  // keys per softmax block
constexpr int HEADS = 4;       // heads that share one pass over a block

// Absorbed attention of one query: `dim` = latent + rope, the output is the weighted sum of the first `latent` elements.
template <class T> class AbsorbedAttention {
   public:
    static int64_t need(int64_t heads, int64_t dim, int64_t latent) {
        int64_t padded = (heads + HEADS - 1) / HEADS * HEADS;
        return Scratch::need(padded * round_up(dim)) + Scratch::need(padded * round_up(latent)) + 2 * Scratch::need(padded) +
               Scratch::need(BLOCK * round_up(dim)) + Scratch::need(HEADS * BLOCK);
    }

    AbsorbedAttention(Scratch& scratch, int64_t heads, int64_t dim, int64_t latent)
        : heads_(heads), padded_heads_((heads + HEADS - 1) / HEADS * HEADS), dim_(dim), latent_(latent),
          q_(scratch.take<float>(padded_heads_ * round_up(dim))), sums_(scratch.take<float>(padded_heads_ * round_up(latent))),
          peaks_(scratch.take<float>(padded_heads_)), totals_(scratch.take<float>(padded_heads_)),
          rows_(scratch.take<float>(BLOCK * round_up(dim))), weights_(scratch.take<float>(HEADS * BLOCK)) {
        memset(q_, 0, sizeof(float) * padded_heads_ * round_up(dim));
        memset(rows_, 0, sizeof(float) * BLOCK * round_up(dim));
    }

    // Attend from q [heads, dim] to n entries of `cache`, at `positions` or, without them, at 0..n-1.
    void run(const float* q, float scale, const T* cache, const int32_t* positions, int64_t n, float* out) {
        int64_t stride = round_up(dim_);
        for (int64_t h = 0; h < heads_; h++)
            for (int64_t d = 0; d < dim_; d++) q_[h * stride + d] = q[h * dim_ + d] * scale;
        for (int64_t start = 0; start < n; start += BLOCK) {
            int64_t count = at_most(BLOCK, n - start);
            const float* entries[BLOCK];
            gather(cache, positions, start, count, entries);
            for (int64_t h = 0; h < padded_heads_; h += HEADS) add_block(h, entries, count, start == 0);
        }
        for (int64_t h = 0; h < heads_; h++) {
            float inverse = n ? 1.0f / totals_[h] : 0.0f;
            for (int64_t c = 0; c < latent_; c++)
                out[h * latent_ + c] = n ? sums_[h * round_up(latent_) + c] * inverse : 0.0f;
        }
    }

    // Starts loading the first block of entries that a later `run` reads.
    void prefetch(const T* cache, const int32_t* positions, int64_t n) const {
        for (int64_t i = 0; i < at_most(BLOCK, n); i++) {
            const char* entry = (const char*)(cache + (positions ? positions[i] : i) * dim_);
            for (int64_t byte = 0; byte < dim_ * (int64_t)sizeof(T); byte += 64) __builtin_prefetch(entry + byte);
        }
    }

   private:
    // fp32 entries are read where they lie when their length fills whole vectors; the tail repeats the last entry.
    void gather(const T* cache, const int32_t* positions, int64_t start, int64_t count, const float** entries) {
        int64_t stride = round_up(dim_);
        for (int64_t i = 0; i < count; i++) {
            const T* entry = cache + (positions ? positions[start + i] : start + i) * dim_;
            if (sizeof(T) == sizeof(float) && stride == dim_) {
                entries[i] = reinterpret_cast<const float*>(entry);
            } else {
                for (int64_t d = 0; d < dim_; d++) rows_[i * stride + d] = as_float(entry[d]);
                entries[i] = rows_ + i * stride;
            }
        }
        for (int64_t i = count; i < at_most(BLOCK, round_up(count)); i++) entries[i] = entries[count - 1];
    }

    // Online softmax: fold `count` entries into the running peak, total and weighted sum of HEADS heads.
    void add_block(int64_t head, const float* const* entries, int64_t count, bool first) {
        int64_t stride = round_up(dim_), width = round_up(latent_);
        const float* rows[HEADS];
        for (int h = 0; h < HEADS; h++) rows[h] = q_ + (head + h) * stride;
        constexpr int N = LANES / HEADS;
        for (int64_t i = 0; i < count; i += N) {
            float logits[LANES];
            store(logits, dot_tile<HEADS, N>(rows, entries + i, stride));
            for (int h = 0; h < HEADS; h++)
                for (int n = 0; n < N; n++) weights_[h * BLOCK + i + n] = logits[h * N + n];
        }
        for (int h = 0; h < HEADS; h++) {
            float* w = weights_ + h * BLOCK;
            for (int64_t i = count; i < round_up(count); i++) w[i] = -INFINITY;
            vf best = splat(first ? -INFINITY : peaks_[head + h]), total = {};
            for (int64_t i = 0; i < count; i += LANES) best = larger(load(w + i), best);
            float peak = max_lanes(best);
            for (int64_t i = 0; i < count; i += LANES) {
                vf p = exp_lanes(load(w + i) - peak);
                store(w + i, p);
                total += p;
            }
            float keep = first ? 0.0f : expf(peaks_[head + h] - peak);
            float* sums = sums_ + (head + h) * width;
            if (first) memset(sums, 0, sizeof(float) * width);
            else if (keep != 1.0f)
                for (int64_t c = 0; c < width; c += LANES) store(sums + c, load(sums + c) * keep);
            totals_[head + h] = (first ? 0.0f : totals_[head + h] * keep) + sum_lanes(total);
            peaks_[head + h] = peak;
        }
        int64_t c = 0;
        for (; c + 3 * LANES <= width; c += 3 * LANES) add_values<3>(head, entries, count, c);
        if (c + 2 * LANES <= width) add_values<2>(head, entries, count, c), c += 2 * LANES;
        if (c < width) add_values<1>(head, entries, count, c);
    }

    // sums[head + h][c ..] += weights[h][i] * entries[i][c ..] for V vectors of the latent.
    template <int V> void add_values(int64_t head, const float* const* entries, int64_t count, int64_t c) {
        int64_t width = round_up(latent_);
        float* sums = sums_ + head * width + c;
        const float* weights = weights_;
        vf total[HEADS * V];
        GLM5_UNROLL
        for (int h = 0; h < HEADS; h++) {
            GLM5_UNROLL
            for (int v = 0; v < V; v++) total[h * V + v] = load(sums + h * width + v * LANES);
        }
        for (int64_t i = 0; i < count; i++) {
            vf x[V];
            GLM5_UNROLL
            for (int v = 0; v < V; v++) x[v] = load(entries[i] + c + v * LANES);
            GLM5_UNROLL
            for (int h = 0; h < HEADS; h++) {
                GLM5_UNROLL
                for (int v = 0; v < V; v++) total[h * V + v] += weights[h * BLOCK + i] * x[v];
            }
        }
        GLM5_UNROLL
        for (int h = 0; h < HEADS; h++) {
            GLM5_UNROLL
            for (int v = 0; v < V; v++) store(sums + h * width + v * LANES, total[h * V + v]);
        }
    }

    int64_t heads_, padded_heads_, dim_, latent_;
    float *q_, *sums_, *peaks_, *totals_, *rows_, *weights_;
};

// Blocks of `block` entries, and for each slot the blocks that hold its positions.
struct Cache {
    const void* entries;
    int64_t blocks, block, dim;
    const int32_t* table;  // [slots, width]
    int64_t slots, width;

    int64_t row(int64_t slot, int64_t s) const { return table[slot * width + s / block] * block + s % block; }
    template <class T> const T* base() const { return static_cast<const T*>(entries); }
    template <class T> const T* at(int64_t slot, int64_t s) const { return base<T>() + row(slot, s) * dim; }

    // Rows of n ascending positions of a slot; without positions of the first n.
    void rows(int64_t slot, const int32_t* positions, int64_t n, int32_t* out) const {
        const int32_t* mine = table + slot * width;
        for (int64_t i = 0, stop = block; i < n; stop += block) {
            int32_t shift = (int32_t)(*mine++ * block + block - stop);
            if (positions)
                for (; i < n && positions[i] < stop; i++) out[i] = positions[i] + shift;
            else
                for (; i < at_most(n, stop); i++) out[i] = (int32_t)i + shift;
        }
    }
};

// First query whose slot, length or blocks lie outside the cache, counted from 1; 0 = none.
static int first_outside(const Cache& cache, const int64_t* slots, const int64_t* lengths, int64_t tokens) {
    for (int64_t m = 0; m < tokens; m++) {
        bool inside = slots[m] >= 0 && slots[m] < cache.slots && lengths[m] >= 0 && lengths[m] <= cache.width * cache.block;
        if (!inside) return (int)m + 1;
        auto blocks = [&](int64_t query) { return (lengths[query] + cache.block - 1) / cache.block; };
        if (m && slots[m] == slots[m - 1] && blocks(m) <= blocks(m - 1)) continue;
        const int32_t* mine = cache.table + slots[m] * cache.width;
        for (int64_t b = 0; b < blocks(m); b++)
            if (mine[b] < 0 || mine[b] >= cache.blocks) return (int)m + 1;
    }
    return 0;
}

// Index scores and top-k of one query at a time.
template <class T> class Selector {
   public:
    static int64_t need(int64_t heads, int64_t dim, int64_t longest) {
        return IndexQuery::need(heads, dim) + Scratch::need(LANES * dim) + Scratch::need(round_up(longest)) +
               2 * Scratch::need(topk_scratch(longest));
    }
    Selector(Scratch& scratch, int64_t heads, int64_t dim, int64_t longest)
        : query_(scratch, heads, dim), rows_(scratch.take<float>(LANES * dim)), scores_(scratch.take<float>(round_up(longest))),
          keys_(scratch.take<int32_t>(topk_scratch(longest))), spare_(scratch.take<int32_t>(topk_scratch(longest))) {}

    // The first n keys of `slot`; those of `next` are the ones of the next run.
    int64_t run(const float* q, const float* weights, const Cache& index, int64_t slot, int64_t n, int64_t next, int64_t k,
                int32_t* positions) {
        if (n > k) {
            query_.set(q, weights, 1.0f);
            for (int64_t s = 0; s < n; s += index.block)
                index_scores_row(query_, index.at<T>(slot, s), at_most(index.block, n - s), following(index, slot, s, n, next),
                                 rows_, scores_ + s);
        }
        return select_topk(scores_, n, k, keys_, spare_, positions);
    }

   private:
    // Keys to load while those at s are scored.
    static const T* following(const Cache& index, int64_t slot, int64_t s, int64_t n, int64_t next) {
        return s + index.block < n ? index.at<T>(slot, s + index.block) : index.at<T>(next, 0);
    }

    IndexQuery query_;
    float *rows_, *scores_;
    int32_t *keys_, *spare_;
};

static int64_t longest_of(const int64_t* lengths, int64_t tokens) {
    int64_t longest = 0;
    for (int64_t m = 0; m < tokens; m++) longest = lengths[m] > longest ? lengths[m] : longest;
    return longest;
}

// Queries per task: enough tasks to balance uneven lengths.
static int64_t share(int64_t tokens, int threads) {
    int64_t grain = tokens / (4 * (int64_t)(threads > 0 ? threads : 1));
    return grain < 1 ? 1 : at_most(grain, 16);
}

template <class T>
static void select(const float* iq, const float* iw, int64_t heads, const Cache& index, const int64_t* slots,
                   const int64_t* lengths, int64_t tokens, int64_t k, int32_t* positions, int threads) {
    int64_t longest = longest_of(lengths, tokens);
    parallel(tokens, share(tokens, threads), threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(Selector<T>::need(heads, index.dim, longest));
        Selector<T> selector(scratch, heads, index.dim, longest);
        for (int64_t m = begin; m < end; m++) {
            int32_t* row = positions + m * k;
            int64_t n = selector.run(iq + m * heads * index.dim, iw + m * heads, index, slots[m], lengths[m],
                                     slots[at_most(m + 1, end - 1)], k, row);
            for (int64_t i = n; i < k; i++) row[i] = -1;
        }
    });
}

// The entries of query m + 1 are loaded while query m is computed.
template <class T>
static void attend(const float* q, int64_t heads, const Cache& latents, int64_t latent, const int64_t* slots,
                   const int64_t* lengths, int64_t tokens, const int32_t* positions, int64_t width, float scale, float* out,
                   int threads) {
    int64_t most = positions ? width : longest_of(lengths, tokens);
    parallel(tokens, share(tokens, threads), threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(AbsorbedAttention<T>::need(heads, latents.dim, latent) + 2 * Scratch::need(most));
        AbsorbedAttention<T> attention(scratch, heads, latents.dim, latent);
        int32_t* rows[2] = {scratch.take<int32_t>(most), scratch.take<int32_t>(most)};
        int64_t counts[2] = {0, 0};
        for (int64_t m = begin; m <= end; m++) {
            if (m < end) {
                const int32_t* row = positions ? positions + m * width : nullptr;
                int64_t n = row ? 0 : lengths[m];
                if (row)
                    while (n < width && row[n] >= 0) n++;
                counts[m % 2] = n;
                latents.rows(slots[m], row, n, rows[m % 2]);
                attention.prefetch(latents.base<T>(), rows[m % 2], n);
            }
            if (m == begin) continue;
            int64_t p = m - 1;
            attention.run(q + p * heads * latents.dim, scale, latents.base<T>(), rows[p % 2], counts[p % 2],
                          out + p * heads * latent);
        }
    });
}

// Query m + 1 is selected while the entries of query m are on their way from memory.
template <class T>
static void sparse(const float* q, int64_t heads, const float* iq, const float* iw, int64_t index_heads, const Cache& latents,
                   int64_t latent, const Cache& index, const int64_t* slots, const int64_t* lengths, int64_t tokens,
                   int64_t k, float scale, float* out, int threads) {
    int64_t longest = longest_of(lengths, tokens);
    parallel(tokens, share(tokens, threads), threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(AbsorbedAttention<T>::need(heads, latents.dim, latent) +
                        Selector<T>::need(index_heads, index.dim, longest) + 3 * Scratch::need(k));
        AbsorbedAttention<T> attention(scratch, heads, latents.dim, latent);
        Selector<T> selector(scratch, index_heads, index.dim, longest);
        int32_t *rows[2] = {scratch.take<int32_t>(k), scratch.take<int32_t>(k)}, *positions = scratch.take<int32_t>(k);
        for (int64_t m = begin; m <= end; m++) {
            if (m < end) {
                if (lengths[m] > k)
                    selector.run(iq + m * index_heads * index.dim, iw + m * index_heads, index, slots[m], lengths[m],
                                 slots[at_most(m + 1, end - 1)], k, positions);
                latents.rows(slots[m], lengths[m] > k ? positions : nullptr, at_most(lengths[m], k), rows[m % 2]);
                attention.prefetch(latents.base<T>(), rows[m % 2], at_most(lengths[m], k));
            }
            if (m == begin) continue;
            int64_t p = m - 1;
            attention.run(q + p * heads * latents.dim, scale, latents.base<T>(), rows[p % 2], at_most(lengths[p], k),
                          out + p * heads * latent);
        }
    });
}

}  // namespace

// All exports of this file return 0, or 1 + the first query whose slot, length or blocks are outside the cache (nothing
// is computed then). half: the caches hold bf16, else fp32; everything else is fp32 and contiguous. Caches are
// [blocks, block, dim], the table is [slots, width].

// positions [tokens, k]: ragged_select of the reference. iq [tokens, heads, dim], iw [tokens, heads].
GLM5_EXPORT(ragged_select)(int half, const float* iq, const float* iw, int64_t heads, const void* keys, int64_t blocks,
                           int64_t block, int64_t dim, const int32_t* table, int64_t slot_count, int64_t table_width,
                           const int64_t* slots, const int64_t* lengths, int64_t tokens, int64_t k, int32_t* positions,
                           int threads) {
    Cache index{keys, blocks, block, dim, table, slot_count, table_width};
    if (int outside = first_outside(index, slots, lengths, tokens)) return outside;
    (half ? select<bf16> : select<float>)(iq, iw, heads, index, slots, lengths, tokens, k, positions, threads);
    return 0;
}

// out [tokens, heads, latent]: ragged_attention of the reference. q [tokens, heads, dim]; positions may be null.
GLM5_EXPORT(ragged_attention)(int half, const float* q, int64_t heads, const void* latents, int64_t blocks,
                              int64_t block, int64_t dim, int64_t latent, const int32_t* table,
                              int64_t slot_count, int64_t table_width, const int64_t* slots, const int64_t* lengths,
                              int64_t tokens, const int32_t* positions, int64_t width, float scale, float* out,
                              int threads) {
    Cache cache{latents, blocks, block, dim, table, slot_count, table_width};
    if (int outside = first_outside(cache, slots, lengths, tokens)) return outside;
    (half ? attend<bf16> : attend<float>)(q, heads, cache, latent, slots, lengths, tokens, positions, width, scale, out,
                                          threads);
    return 0;
}

// out [tokens, heads, latent]: ragged_dsa of the reference with k > 0.
GLM5_EXPORT(ragged_dsa)(int half, const float* q, int64_t heads, const float* iq, const float* iw, int64_t index_heads,
                        const void* latents, int64_t blocks, int64_t block, int64_t dim, int64_t latent,
                        const void* keys, int64_t index_dim, const int32_t* table, int64_t slot_count,
                        int64_t table_width, const int64_t* slots, const int64_t* lengths, int64_t tokens,
                        int64_t k, float scale, float* out, int threads) {
    Cache cache{latents, blocks, block, dim, table, slot_count, table_width};
    Cache index{keys, blocks, block, index_dim, table, slot_count, table_width};
    if (int outside = first_outside(cache, slots, lengths, tokens)) return outside;
    (half ? sparse<bf16> : sparse<float>)(q, heads, iq, iw, index_heads, cache, latent, index, slots, lengths, tokens, k,
                                          scale, out, threads);
    return 0;
}
