// Sparse attention of ragged queries over a paged cache: index scores, exact top-k, absorbed attention.
//
// A slot is a row of the block table: its position s is entry s % block of block table[slot][s / block]. A query's bits
// depend neither on the batch nor on the thread count nor on where its blocks lie: its scores and heads are computed as
// if alone, the top-k is exact, and partial results of attention are combined in the order of the keys.

#include "absorbed.h"
#include "selection.h"

namespace {

constexpr int64_t STEP = 256;  // queries that are selected, then attended to, before the next ones

// Absorbed attention of all heads; results of query m at out + m * heads * latent and log_sums (unless null) + m * heads.
struct Attention {
    AttentionShape shape;
    const float* q;  // [count, heads, dim]
    float scale;
    float *out, *log_sums;

    const float* query(int64_t m) const { return q + m * shape.heads * shape.dim; }
    float* result(int64_t m) const { return out + m * shape.heads * shape.latent; }
    float* sums(int64_t m) const { return log_sums ? log_sums + m * shape.heads : nullptr; }
};

// Attends to `positions` [count, width], or to all visible entries when that is null. The first entries of query m + 1
// are loaded while query m is computed.
template <class T>
static void attend(const Attention& work, const Cache& latents, const Queries& queries, const int32_t* positions,
                   int64_t width, int threads) {
    const AttentionShape& shape = work.shape;
    const T* cache = latents.base<T>();
    auto keys = [&](int64_t m) { return latents.keys(queries.slots[m], positions ? positions + m * width : nullptr); };
    auto listed = [&](int64_t m) {
        int64_t n = positions ? width : queries.lengths[m];
        if (positions)
            while (n > 0 && positions[m * width + n - 1] < 0) n--;
        return n;
    };
    int64_t parts = 0;
    for (int64_t m = 0; m < queries.count; m++) parts += (listed(m) + PART - 1) / PART;
    if (threads <= 1 || queries.count >= 4 * threads || parts <= queries.count) {
        int64_t grain = queries.count / (4 * (int64_t)(threads > 0 ? threads : 1));
        parallel(queries.count, grain < 1 ? 1 : at_most(grain, 16), threads, [&](int64_t begin, int64_t end) {
            Scratch scratch(AbsorbedAttention<T>::need(shape));
            AbsorbedAttention<T> attention(scratch, shape);
            for (int64_t m = begin; m < end; m++) {
                if (m + 1 < end) attention.prefetch(cache, keys(m + 1), listed(m + 1));
                attention.set_query(work.query(m), work.scale);
                attention.run(cache, keys(m), listed(m), work.result(m), work.sums(m));
            }
        });
        return;
    }
    Scratch shared(parts * Partial::need(shape) + 2 * Scratch::need(parts, 8) + Scratch::need(parts, sizeof(Partial)));
    Partial* partials = shared.take<Partial>(parts);
    int64_t *owners = shared.take<int64_t>(parts), *begins = shared.take<int64_t>(parts), n = 0;
    for (int64_t m = 0; m < queries.count; m++)
        for (int64_t begin = 0; begin < listed(m); begin += PART, n++)
            partials[n] = Partial(shared, shape), owners[n] = m, begins[n] = begin;
    parallel(parts, 1, threads, [&](int64_t first, int64_t last) {
        Scratch scratch(AbsorbedAttention<T>::need(shape));
        AbsorbedAttention<T> attention(scratch, shape);
        for (int64_t p = first; p < last; p++) {
            int64_t m = owners[p];
            attention.set_query(work.query(m), work.scale);
            attention.run_part(cache, keys(m), begins[p], at_most(listed(m), begins[p] + PART), partials[p]);
        }
    });
    for (int64_t m = 0, p = 0; m < queries.count; m++) {
        int64_t first = p, count = listed(m);
        for (; p < parts && owners[p] == m; p++)
            if (p > first) partials[first].add(shape, partials[p]);
        AbsorbedAttention<T>::finish(shape, count, partials[count ? first : 0], work.result(m), work.sums(m));
    }
}

// STEP queries at a time, so that the selection takes little memory and is still in the caches when it is attended to.
template <class T>
static void sparse(const Attention& work, const IndexHeads& heads, const Cache& latents, const Cache& index,
                   const Queries& queries, int64_t k, int threads) {
    const AttentionShape& shape = work.shape;
    Scratch scratch(Scratch::need(at_most(STEP, queries.count) * k));
    int32_t* positions = scratch.take<int32_t>(at_most(STEP, queries.count) * k);
    for (int64_t first = 0; first < queries.count; first += STEP) {
        Queries some = queries.part(first, at_most(STEP, queries.count - first));
        int64_t longest = 0;
        for (int64_t m = 0; m < some.count; m++) longest = some.lengths[m] > longest ? some.lengths[m] : longest;
        Attention part{shape, work.query(first), work.scale, work.result(first), nullptr};
        IndexHeads queried{heads.q + first * heads.heads * index.dim, heads.w + first * heads.heads, heads.heads};
        if (longest > k) select<T>(queried, index, some, k, positions, threads);
        attend<T>(part, latents, some, longest > k ? positions : nullptr, k, threads);
    }
}

}  // namespace

// All exports of this file return 0, or 1 + the first query whose slot, range or blocks are outside the cache (nothing
// is computed then). half: the caches hold bf16, else fp32; everything else is fp32 and contiguous. Caches are
// [blocks, block, dim], the table is [slots, width].

// positions [tokens, k]: ragged_select of the reference, from starts[m] on (0 when null). iq [tokens, heads, dim], iw
// [tokens, heads].
GLM5_EXPORT(ragged_select)(int half, const float* iq, const float* iw, int64_t heads, const void* keys, int64_t blocks,
                           int64_t block, int64_t dim, const int32_t* table, int64_t slot_count, int64_t table_width,
                           const int64_t* slots, const int64_t* starts, const int64_t* lengths, int64_t tokens, int64_t k,
                           int32_t* positions, int threads) {
    Cache index{keys, blocks, block, dim, table, slot_count, table_width};
    Queries queries{slots, starts, lengths, tokens};
    if (int outside = queries.outside(index)) return outside;
    (half ? select<bf16> : select<float>)(IndexHeads{iq, iw, heads}, index, queries, k, positions, threads);
    return 0;
}

// out [tokens, heads, latent]: ragged_attention of the reference. q [tokens, heads, dim]; positions [tokens, width] may
// be null; log_sums [tokens, heads] receives log(sum exp) unless it is null.
GLM5_EXPORT(ragged_attention)(int half, const float* q, int64_t heads, const void* latents, int64_t blocks,
                              int64_t block, int64_t dim, int64_t latent, const int32_t* table, int64_t slot_count,
                              int64_t table_width, const int64_t* slots, const int64_t* lengths, int64_t tokens,
                              const int32_t* positions, int64_t width, float scale, float* out, float* log_sums,
                              int threads) {
    Cache cache{latents, blocks, block, dim, table, slot_count, table_width};
    Queries queries{slots, nullptr, lengths, tokens};
    if (int outside = queries.outside(cache)) return outside;
    Attention work{AttentionShape{heads, dim, latent}, q, scale, out, log_sums};
    (half ? attend<bf16> : attend<float>)(work, cache, queries, positions, width, threads);
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
    Queries queries{slots, nullptr, lengths, tokens};
    if (int outside = queries.outside(cache)) return outside;
    Attention work{AttentionShape{heads, dim, latent}, q, scale, out, nullptr};
    (half ? sparse<bf16> : sparse<float>)(work, IndexHeads{iq, iw, index_heads}, cache, index, queries, k, threads);
    return 0;
}
