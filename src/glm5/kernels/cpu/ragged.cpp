// Sparse attention of ragged queries over a paged cache: index scores, exact top-k, absorbed attention.
//
// A slot is a row of the block table: its position s is entry s % block of block table[slot][s / block]. A query's bits
// depend neither on the batch nor on the thread count nor on where its blocks lie: its scores and heads are computed as
// if alone, the top-k is exact, and partial results of attention are combined in the order of the keys.

#include "absorbed.h"
#include "index.h"
#include "topk.h"

namespace {

constexpr int64_t TOGETHER = 16;     // queries of one slot that share a tile of keys
constexpr int64_t TILE = 4 * LANES;  // keys of a tile
constexpr int64_t CHUNK = 4096;      // keys below which a group's scores are not shared between threads
constexpr int64_t STEP = 256;        // queries that are selected, then attended to, before the next ones

// Blocks of `block` entries, and for each slot the blocks that hold its positions.
struct Cache {
    const void* entries;
    int64_t blocks, block, dim;
    const int32_t* table;  // [slots, width]
    int64_t slots, width;

    template <class T> const T* base() const { return static_cast<const T*>(entries); }
    Keys keys(int64_t slot, const int32_t* positions = nullptr) const { return {table + slot * width, block, positions}; }
};

// Which part of which slot each query reads: positions starts[m] (0 when null) .. lengths[m].
struct Queries {
    const int64_t *slots, *starts, *lengths;
    int64_t count;
    int64_t start(int64_t m) const { return starts ? starts[m] : 0; }
    int64_t visible(int64_t m) const { return lengths[m] - start(m); }
    Queries part(int64_t first, int64_t n) const { return {slots + first, starts ? starts + first : nullptr, lengths + first, n}; }

    // First query whose slot, range or blocks lie outside the cache, counted from 1; 0 = none.
    int outside(const Cache& cache) const {
        for (int64_t m = 0; m < count; m++) {
            bool inside = slots[m] >= 0 && slots[m] < cache.slots && lengths[m] <= cache.width * cache.block;
            if (!inside || start(m) < 0 || visible(m) < 0) return (int)m + 1;
            auto blocks = [&](int64_t query) { return (lengths[query] + cache.block - 1) / cache.block; };
            if (m && slots[m] == slots[m - 1] && blocks(m) <= blocks(m - 1)) continue;
            const int32_t* mine = cache.table + slots[m] * cache.width;
            for (int64_t b = 0; b < blocks(m); b++)
                if (mine[b] < 0 || mine[b] >= cache.blocks) return (int)m + 1;
        }
        return 0;
    }
};

// Queries first .. first + count of one slot; some of them must choose among keys low .. high.
struct Group {
    int64_t first, count, low, high;
};

// Index queries, fp32, with their head weights.
struct IndexHeads {
    const float *q, *w;  // [count, heads, dim], [count, heads]
    int64_t heads;
};

// Index scores and top-k of the queries of a group at the same time, over a range of the keys.
template <class T> class Selector {
   public:
    static int64_t need(int64_t heads, int64_t dim, int64_t k, int64_t together) {
        return together * (IndexQuery::need(heads, dim) + TopkStream::need(k)) + Scratch::need(TILE * dim) +
               Scratch::need(together, sizeof(IndexQuery)) + Scratch::need(together, sizeof(TopkStream));
    }
    Selector(Scratch& scratch, int64_t heads, int64_t dim, int64_t k, int64_t together)
        : streams(scratch.take<TopkStream>(together)), indexes_(scratch.take<IndexQuery>(together)),
          copies_(scratch.take<float>(TILE * dim)) {
        for (int64_t i = 0; i < together; i++)
            streams[i] = TopkStream(scratch, k), indexes_[i] = IndexQuery(scratch, heads, dim);
    }

    void run(const Group& group, const Queries& queries, const IndexHeads& index, const Cache& cache, int64_t k,
             int64_t begin, int64_t end) {
        Keys keys = cache.keys(queries.slots[group.first]);
        for (int64_t i = 0; i < group.count; i++) {
            int64_t m = group.first + i;
            streams[i].clear();
            if (queries.visible(m) > k)
                indexes_[i].set(index.q + m * index.heads * cache.dim, index.w + m * index.heads, 1.0f);
        }
        for (int64_t first = begin; first < end; first += TILE) {
            const T* entries[TILE];
            int32_t rows[TILE];
            int64_t n = at_most(TILE, end - first);
            keys.rows(first, first + n, rows);
            for (int64_t i = 0; i < TILE; i++) entries[i] = cache.base<T>() + rows[at_most(i, n - 1)] * cache.dim;
            if (group.count > 1 && sizeof(T) != sizeof(float)) {
                visit(group, queries, k, first, copy(entries, cache.dim), nullptr);
                continue;
            }
            int32_t next = rows[n - 1];
            if (first + TILE < end) keys.rows(first + TILE, first + TILE + 1, &next);
            visit(group, queries, k, first, entries, (const char*)(cache.base<T>() + next * cache.dim));
        }
    }

    TopkStream* streams;

   private:
    // A tile as fp32 rows.
    const float* const* copy(const T* const* entries, int64_t dim) {
        for (int64_t i = 0; i < TILE; i++) {
            float* out = copies_ + i * dim;
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) store(out + d, load(entries[i] + d));
            for (; d < dim; d++) out[d] = as_float(entries[i][d]);
            copied_[i] = out;
        }
        return copied_;
    }

    // Scores the keys first .. first + TILE for every query that sees them; `ahead` is where the next tile begins.
    template <class Entry>
    void visit(const Group& group, const Queries& queries, int64_t k, int64_t first, const Entry* const* entries,
               const char* ahead) {
        for (int64_t i = 0; i < group.count; i++) {
            int64_t m = group.first + i, low = queries.start(m), high = queries.lengths[m];
            if (queries.visible(m) <= k || high <= first || low >= first + TILE) continue;
            vf scores[TILE / LANES];
            for (int64_t v = 0; v < TILE / LANES; v++) {
                const char* next = ahead ? ahead + v * LANES * indexes_[i].dim * (int64_t)sizeof(Entry) : nullptr;
                bool seen = high > first + v * LANES && low < first + (v + 1) * LANES;
                scores[v] = seen ? index_scores_block(indexes_[i], entries + v * LANES, next) : splat(-INFINITY);
            }
            streams[i].template push<TILE / LANES>(scores, first, low, high);
        }
    }

    IndexQuery* indexes_;
    float* copies_;
    const float* copied_[TILE];
};

// Consecutive queries of one slot, at most TOGETHER, into `groups`; their number.
static int64_t form_groups(const Queries& queries, int64_t k, Group* groups) {
    int64_t n = 0;
    for (int64_t m = 0; m < queries.count; m++) {
        bool joins = n && groups[n - 1].count < TOGETHER && queries.slots[m] == queries.slots[groups[n - 1].first];
        if (!joins) groups[n++] = {m, 0, INT64_MAX, 0};
        Group& group = groups[n - 1];
        group.count++;
        if (queries.visible(m) <= k) continue;  // sees no more than it may keep
        group.low = at_most(group.low, queries.start(m) / TILE * TILE);
        group.high = queries.lengths[m] > group.high ? queries.lengths[m] : group.high;
    }
    return n;
}

// positions [count, k]: the selection of every query, ascending, padded with -1.
template <class T>
static void select(const IndexHeads& heads, const Cache& index, const Queries& queries, int64_t k, int32_t* positions,
                   int threads) {
    Scratch shared(Scratch::need(queries.count, sizeof(Group)));
    Group* groups = shared.take<Group>(queries.count);
    int64_t count = form_groups(queries, k, groups), chunks = 1, longest = 0, together = 1;
    for (int64_t g = 0; g < count; g++) {
        if (groups[g].high) longest = groups[g].high - groups[g].low > longest ? groups[g].high - groups[g].low : longest;
        together = groups[g].count > together ? groups[g].count : together;
    }
    if (count < 2 * threads) chunks = at_most(threads, (longest + CHUNK - 1) / CHUNK);
    if (chunks < 1) chunks = 1;
    int64_t each = Selector<T>::need(heads.heads, index.dim, k, together);
    auto keep = [&](const Group& group, TopkStream* streams) {
        for (int64_t i = 0; i < group.count; i++) {
            int64_t m = group.first + i, n = queries.visible(m);
            int32_t* row = positions + m * k;
            if (n > k) n = streams[i].finish(), memcpy(row, streams[i].positions(), sizeof(int32_t) * n);
            else
                for (int64_t s = 0; s < n; s++) row[s] = (int32_t)(queries.start(m) + s);
            for (int64_t s = n; s < k; s++) row[s] = -1;
        }
    };
    if (chunks == 1) {
        parallel(count, 1, threads, [&](int64_t begin, int64_t end) {
            Scratch scratch(each);
            Selector<T> selector(scratch, heads.heads, index.dim, k, together);
            for (int64_t g = begin; g < end; g++) {
                selector.run(groups[g], queries, heads, index, k, groups[g].low, groups[g].high);
                keep(groups[g], selector.streams);
            }
        });
        return;
    }
    int64_t lists = count * chunks * together;
    Scratch kept(Scratch::need(lists, 8) + 2 * Scratch::need(lists * k));
    int64_t* sizes = kept.take<int64_t>(lists);
    int32_t *kept_keys = kept.take<int32_t>(lists * k), *kept_positions = kept.take<int32_t>(lists * k);
    parallel(count * chunks, 1, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(each);
        Selector<T> selector(scratch, heads.heads, index.dim, k, together);
        for (int64_t task = begin; task < end; task++) {
            const Group& group = groups[task / chunks];
            int64_t span = group.high > group.low ? group.high - group.low : 0;
            int64_t step = (span + chunks * TILE - 1) / (chunks * TILE) * TILE, first = group.low + task % chunks * step;
            selector.run(group, queries, heads, index, k, first, at_most(group.high, first + step));
            for (int64_t i = 0; i < group.count; i++) {
                int64_t place = task * together + i, n = sizes[place] = selector.streams[i].finish();
                memcpy(kept_keys + place * k, selector.streams[i].keys(), sizeof(int32_t) * n);
                memcpy(kept_positions + place * k, selector.streams[i].positions(), sizeof(int32_t) * n);
            }
        }
    });
    Scratch scratch(TopkStream::need(k));
    TopkStream merged(scratch, k);
    for (int64_t g = 0; g < count; g++) {
        for (int64_t i = 0; i < groups[g].count; i++) {
            merged.clear();
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                int64_t place = (g * chunks + chunk) * together + i;
                merged.append(kept_keys + place * k, kept_positions + place * k, sizes[place]);
            }
            keep({groups[g].first + i, 1, 0, 0}, &merged);
        }
    }
}

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
