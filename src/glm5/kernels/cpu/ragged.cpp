// Sparse attention of ragged queries over a paged cache: index scores, exact top-k, absorbed attention.
//
// A slot is a row of the block table: its position s is entry s % block of block table[slot][s / block]. A query's bits
// depend neither on the batch nor on the thread count nor on where its blocks lie: its scores and heads are computed as
// if alone, the top-k is exact, and partial results of attention are combined in the order of the keys.

#include "absorbed.h"
#include "matrix.h"
#include "selection.h"

namespace {

#if defined(__AMX_BF16__)
using HalfSelector = MatrixSelector;
using HalfAttention = MatrixAttention;
#else
using HalfSelector = Selector<bf16>;
using HalfAttention = AbsorbedAttention<bf16>;
#endif

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

// Consecutive queries of one slot that a kernel takes together, and the most keys that one of them sees.
struct Team {
    int64_t first, count, keys;
};

// Some keys of a team, and where the results of its queries go.
struct Part {
    const Team* team;
    int64_t begin;
    Partial* out;
};

// Attends to `positions` [count, width], or to all visible entries when that is null. The first entries of the next team
// are loaded while one is computed.
template <class Kernel>
static void attend(const Attention& work, const Cache& latents, const Queries& queries, const int32_t* positions,
                   int64_t width, int threads) {
    AttentionShape shape = work.shape;
    shape.unit = Kernel::UNIT;
    const auto* cache = latents.base<typename Kernel::Entry>();
    Scratch plan(Scratch::need(queries.count, sizeof(int64_t)) + Scratch::need(queries.count, sizeof(Team)));
    int64_t *seen = plan.take<int64_t>(queries.count), count = 0, parts = 0, partials = 0;
    Team* teams = plan.take<Team>(queries.count);
    for (int64_t m = 0; m < queries.count; m++) {
        seen[m] = positions ? width : queries.lengths[m];
        if (positions)
            while (seen[m] > 0 && positions[m * width + seen[m] - 1] < 0) seen[m]--;
        bool joins = count && !positions && teams[count - 1].count < Kernel::TOGETHER &&
                     queries.slots[m] == queries.slots[teams[count - 1].first];
        if (!joins) teams[count++] = {m, 0, 0};
        Team& team = teams[count - 1];
        team.count++, team.keys = seen[m] > team.keys ? seen[m] : team.keys;
    }
    for (int64_t t = 0; t < count; t++) {
        int64_t n = (teams[t].keys + PART - 1) / PART;
        parts += n, partials += n * teams[t].count;
    }
    auto keys = [&](const Team& team) {
        return latents.keys(queries.slots[team.first], positions ? positions + team.first * width : nullptr);
    };
    auto run = [&](Kernel& kernel, const Team& team, int64_t begin, Partial* out) {
        kernel.run_part(cache, keys(team), begin, at_most(team.keys, begin + PART), seen + team.first, team.count, out);
    };
    auto finish = [&](const Team& team, const Partial* whole) {
        for (int64_t i = 0; i < team.count; i++) {
            int64_t m = team.first + i;
            Kernel::finish(shape, seen[m], whole[i], work.result(m), work.sums(m));
        }
    };
    auto add = [&](const Team& team, int64_t begin, const Partial* part, Partial* whole) {
        for (int64_t i = 0; i < team.count; i++)
            if (seen[team.first + i] > begin) whole[i].add(shape, part[i]);
    };

    if (threads <= 1 || count >= 4 * threads || parts <= count) {
        int64_t grain = count / (4 * (int64_t)(threads > 0 ? threads : 1));
        parallel(count, grain < 1 ? 1 : at_most(grain, 16), threads, [&](int64_t first, int64_t last) {
            constexpr int64_t N = Kernel::TOGETHER;
            Scratch scratch(Kernel::need(shape) + 2 * (N * Partial::need(shape) + Scratch::need(N, sizeof(Partial))));
            Kernel kernel(scratch, shape);
            Partial *whole = scratch.take<Partial>(N), *part = scratch.take<Partial>(N);
            for (int64_t i = 0; i < N; i++) whole[i] = Partial(scratch, shape), part[i] = Partial(scratch, shape);
            for (int64_t t = first; t < last; t++) {
                const Team& team = teams[t];
                if (t + 1 < last) kernel.prefetch(cache, keys(teams[t + 1]), teams[t + 1].keys);
                kernel.set_queries(work.query(team.first), team.count, work.scale);
                for (int64_t begin = 0; begin < team.keys; begin += PART) {
                    run(kernel, team, begin, begin ? part : whole);
                    if (begin) add(team, begin, part, whole);
                }
                finish(team, whole);
            }
        });
        return;
    }
    Scratch shared(partials * Partial::need(shape) + Scratch::need(partials, sizeof(Partial)) + Scratch::need(parts, sizeof(Part)));
    Part* list = shared.take<Part>(parts);
    Partial* next = shared.take<Partial>(partials);
    for (int64_t t = 0, n = 0; t < count; t++)
        for (int64_t begin = 0; begin < teams[t].keys; begin += PART, next += teams[t].count) {
            list[n++] = {teams + t, begin, next};
            for (int64_t i = 0; i < teams[t].count; i++) next[i] = Partial(shared, shape);
        }
    parallel(parts, 1, threads, [&](int64_t first, int64_t last) {
        Scratch scratch(Kernel::need(shape));
        Kernel kernel(scratch, shape);
        for (int64_t p = first; p < last; p++) {
            kernel.set_queries(work.query(list[p].team->first), list[p].team->count, work.scale);
            run(kernel, *list[p].team, list[p].begin, list[p].out);
        }
    });
    for (int64_t t = 0, p = 0; t < count; t++) {
        Partial* whole = list[p < parts ? p : 0].out;  // not read for a team without keys
        for (; p < parts && list[p].team == teams + t; p++)
            if (list[p].begin) add(teams[t], list[p].begin, list[p].out, whole);
        finish(teams[t], whole);
    }
}

// STEP queries at a time, so that the selection takes little memory and is still in the caches when it is attended to.
template <class Select, class Kernel>
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
        if (longest > k) select<Select>(queried, index, some, k, positions, threads);
        attend<Kernel>(part, latents, some, longest > k ? positions : nullptr, k, threads);
    }
}

}  // namespace

// All exports of this file return 0, or 1 + the first query whose slot, range or blocks are outside the cache (nothing
// is computed then). half: 0 when the caches hold fp32, 1 when they hold bf16, 2 when all values of the queries (not the
// head weights) are bf16 too, which the matrix unit makes use of; arguments are fp32 and contiguous in every case. Caches
// are [blocks, block, dim], the table is [slots, width].

// positions [tokens, k]: ragged_select of the reference, from starts[m] on (0 when null). iq [tokens, heads, dim], iw
// [tokens, heads].
GLM5_EXPORT(ragged_select)(int half, const float* iq, const float* iw, int64_t heads, const void* keys, int64_t blocks,
                           int64_t block, int64_t dim, const int32_t* table, int64_t slot_count, int64_t table_width,
                           const int64_t* slots, const int64_t* starts, const int64_t* lengths, int64_t tokens, int64_t k,
                           int32_t* positions, int threads) {
    Cache index{keys, blocks, block, dim, table, slot_count, table_width};
    Queries queries{slots, starts, lengths, tokens};
    if (int outside = queries.outside(index)) return outside;
    auto run = half == 2 ? select<HalfSelector> : half ? select<Selector<bf16>> : select<Selector<float>>;
    run(IndexHeads{iq, iw, heads}, index, queries, k, positions, threads);
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
    auto run = half == 2 ? attend<HalfAttention> : half ? attend<AbsorbedAttention<bf16>> : attend<AbsorbedAttention<float>>;
    run(work, cache, queries, positions, width, threads);
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
    auto run = half == 2 ? sparse<HalfSelector, HalfAttention>
               : half    ? sparse<Selector<bf16>, AbsorbedAttention<bf16>>
                         : sparse<Selector<float>, AbsorbedAttention<float>>;
    run(work, IndexHeads{iq, iw, index_heads}, cache, index, queries, k, threads);
    return 0;
}
