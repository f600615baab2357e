// Sparse attention of ragged queries over a slot cache (inference): index scores, exact top-k, absorbed attention.
//
// A query's bits depend neither on the batch nor on the thread count: its scores and heads are computed as if alone, the
// top-k is exact, and partial results of attention are combined in the order of the keys.

#include "absorbed.h"
#include "scores.h"
#include "topk.h"

namespace {

constexpr int64_t TOGETHER = 16;   // queries of one slot that share a panel of keys
constexpr int64_t CHUNK = 4096;    // keys below which a group's scores are not shared between threads

struct Cache {
    const void* entries;
    int64_t slots, capacity, dim;
    template <class T> const T* slot(int64_t index) const { return static_cast<const T*>(entries) + index * capacity * dim; }
};

// Which part of which slot each query reads: entries starts[m] (0 when null) .. lengths[m].
struct Queries {
    const int64_t *slots, *starts, *lengths;
    int64_t count;
    int64_t start(int64_t m) const { return starts ? starts[m] : 0; }
    int64_t visible(int64_t m) const { return lengths[m] - start(m); }

    // First query whose slot or range lies outside the cache, counted from 1; 0 = none.
    int outside(const Cache& cache) const {
        for (int64_t m = 0; m < count; m++)
            if (slots[m] < 0 || slots[m] >= cache.slots || start(m) < 0 || visible(m) < 0 || lengths[m] > cache.capacity)
                return (int)m + 1;
        return 0;
    }
};

// Queries first .. first + count of one slot; some of them must choose among keys low .. high.
struct Group {
    int64_t first, count, low, high;
};

// Index scores and top-k of the queries of a group at the same time, over a range of the keys.
template <class T> class Selector {
   public:
    static int64_t need(int64_t dim, int64_t k, int64_t together) {
        return Scratch::need(dim * PANEL) + Scratch::need(together, sizeof(TopkStream)) + together * TopkStream::need(k);
    }
    Selector(Scratch& scratch, int64_t dim, int64_t k, int64_t together)
        : streams(scratch.take<TopkStream>(together)), dim_(dim), panel_(scratch.take<float>(dim * PANEL)) {
        for (int64_t i = 0; i < together; i++) streams[i] = TopkStream(scratch, k);
    }

    void run(const Group& group, const Queries& queries, const float* iq, const float* iw, int64_t heads, const T* keys,
             int64_t k, int64_t begin, int64_t end) {
        for (int64_t i = 0; i < group.count; i++) streams[i].clear();
        for (int64_t first = begin; first < end; first += PANEL) {
            pack_keys(keys, first, end, dim_, panel_);
            Ahead ahead = panel_ahead(keys, first, end, heads, dim_, panel_);
            for (int64_t i = 0; i < group.count; i++) {
                int64_t m = group.first + i, low = queries.start(m), high = at_most(queries.lengths[m], end);
                if (queries.visible(m) <= k || high <= first || low >= first + PANEL) continue;
                vf scores[PANEL_VECTORS];
                score_panel(iq + m * heads * dim_, iw + m * heads, heads, dim_, panel_, ahead, scores);
                ahead.bytes = 0;  // once is enough
                streams[i].template push<PANEL_VECTORS>(scores, first, low, high);
            }
        }
    }

    TopkStream* streams;

   private:
    int64_t dim_;
    float* panel_;
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
        group.low = at_most(group.low, queries.start(m));
        group.high = queries.lengths[m] > group.high ? queries.lengths[m] : group.high;
    }
    return n;
}

// positions [count, k]: the selection of every query, ascending, padded with -1.
template <class T>
static void select(const float* iq, const float* iw, int64_t heads, const Cache& index, const Queries& queries, int64_t k,
                   int32_t* positions, int threads) {
    Scratch shared(Scratch::need(queries.count, sizeof(Group)));
    Group* groups = shared.take<Group>(queries.count);
    int64_t count = form_groups(queries, k, groups), chunks = 1, longest = 0, together = 1;
    for (int64_t g = 0; g < count; g++) {
        if (groups[g].high) longest = groups[g].high - groups[g].low > longest ? groups[g].high - groups[g].low : longest;
        together = groups[g].count > together ? groups[g].count : together;
    }
    if (count < 2 * threads) chunks = at_most(threads, (longest + CHUNK - 1) / CHUNK);
    if (chunks < 1) chunks = 1;
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
            Scratch scratch(Selector<T>::need(index.dim, k, together));
            Selector<T> selector(scratch, index.dim, k, together);
            for (int64_t g = begin; g < end; g++) {
                const Group& group = groups[g];
                selector.run(group, queries, iq, iw, heads, index.slot<T>(queries.slots[group.first]), k, group.low, group.high);
                keep(group, selector.streams);
            }
        });
        return;
    }
    Scratch kept(Scratch::need(count * chunks * together, 8) + 2 * Scratch::need(count * chunks * together * k));
    int64_t* sizes = kept.take<int64_t>(count * chunks * together);
    int32_t *kept_keys = kept.take<int32_t>(count * chunks * together * k), *kept_positions = kept.take<int32_t>(count * chunks * together * k);
    parallel(count * chunks, 1, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(Selector<T>::need(index.dim, k, together));
        Selector<T> selector(scratch, index.dim, k, together);
        for (int64_t task = begin; task < end; task++) {
            const Group& group = groups[task / chunks];
            int64_t span = group.high > group.low ? group.high - group.low : 0, step = (span + chunks - 1) / chunks;
            int64_t first = group.low + task % chunks * step;
            selector.run(group, queries, iq, iw, heads, index.slot<T>(queries.slots[group.first]), k, first,
                         at_most(group.high, first + step));
            for (int64_t i = 0; i < group.count; i++) {
                int64_t place = task * together + i, n = sizes[place] = selector.streams[i].finish();
                memcpy(kept_keys + place * k, selector.streams[i].keys(), sizeof(int32_t) * n);
                memcpy(kept_positions + place * k, selector.streams[i].positions(), sizeof(int32_t) * n);
            }
        }
    });
    Scratch scratch(Selector<T>::need(index.dim, k, together));
    Selector<T> merged(scratch, index.dim, k, together);
    for (int64_t g = 0; g < count; g++) {
        for (int64_t i = 0; i < groups[g].count; i++) {
            merged.streams[i].clear();
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                int64_t place = (g * chunks + chunk) * together + i;
                merged.streams[i].append(kept_keys + place * k, kept_positions + place * k, sizes[place]);
            }
        }
        keep(groups[g], merged.streams);
    }
}

// Which keys a query attends to: `row` lists them (null: entries first .. first + count).
struct Selection {
    const int32_t* row;
    int64_t count;
};

// out [count, heads, latent] over `positions` [count, width], or all visible entries when that is null; log_sums
// [count, heads] unless null. The first entries of query m + 1 are loaded while query m is computed.
template <class T>
static void attend(const float* q, const AttentionShape& shape, const Cache& latents, const Queries& queries,
                   const int32_t* positions, int64_t width, float scale, float* out, float* log_sums, int threads) {
    auto choice = [&](int64_t m) {
        if (!positions) return Selection{nullptr, queries.visible(m)};
        const int32_t* row = positions + m * width;
        int64_t n = width;
        while (n > 0 && row[n - 1] < 0) n--;
        return Selection{row, n};
    };
    auto entries = [&](int64_t m) {
        return latents.slot<T>(queries.slots[m]) + (positions ? 0 : queries.start(m) * latents.dim);
    };
    auto sums = [&](int64_t m) { return log_sums ? log_sums + m * shape.heads : nullptr; };
    int64_t size = shape.heads * shape.latent, parts = 0;
    for (int64_t m = 0; m < queries.count; m++) parts += (choice(m).count + PART - 1) / PART;
    if (threads <= 1 || queries.count >= 4 * threads || parts <= queries.count) {
        int64_t grain = queries.count / (4 * (int64_t)(threads > 0 ? threads : 1));
        parallel(queries.count, grain < 1 ? 1 : at_most(grain, 16), threads, [&](int64_t begin, int64_t end) {
            Scratch scratch(AbsorbedAttention<T>::need(shape));
            AbsorbedAttention<T> attention(scratch, shape);
            for (int64_t m = begin; m < end; m++) {
                if (m + 1 < end) attention.prefetch(entries(m + 1), choice(m + 1).row, choice(m + 1).count);
                attention.set_query(q + m * shape.heads * shape.dim, scale);
                attention.run(entries(m), choice(m).row, choice(m).count, out + m * size, sums(m));
            }
        });
        return;
    }
    Scratch shared(parts * Partial::need(shape) + 2 * Scratch::need(parts, 8) + Scratch::need(parts, sizeof(Partial)));
    Partial* partials = shared.take<Partial>(parts);
    int64_t *owners = shared.take<int64_t>(parts), *begins = shared.take<int64_t>(parts), n = 0;
    for (int64_t m = 0; m < queries.count; m++)
        for (int64_t begin = 0; begin < choice(m).count; begin += PART, n++)
            partials[n] = Partial(shared, shape), owners[n] = m, begins[n] = begin;
    parallel(parts, 1, threads, [&](int64_t first, int64_t last) {
        Scratch scratch(AbsorbedAttention<T>::need(shape));
        AbsorbedAttention<T> attention(scratch, shape);
        for (int64_t p = first; p < last; p++) {
            int64_t m = owners[p];
            attention.set_query(q + m * shape.heads * shape.dim, scale);
            attention.run_part(entries(m), choice(m).row, begins[p], at_most(choice(m).count, begins[p] + PART), partials[p]);
        }
    });
    for (int64_t m = 0, p = 0; m < queries.count; m++) {
        int64_t first = p, count = choice(m).count;
        for (; p < parts && owners[p] == m; p++)
            if (p > first) partials[first].add(shape, partials[p]);
        AbsorbedAttention<T>::finish(shape, count, partials[count ? first : 0], out + m * size, sums(m));
    }
}

}  // namespace

// All exports of this file return 0, or 1 + the first query whose slot or range is outside the cache (nothing is
// computed then). half: the caches hold bf16, else fp32; everything else is fp32 and contiguous. starts may be null.

// positions [tokens, k]: ragged_select of the reference. iq [tokens, heads, dim], iw [tokens, heads].
GLM5_EXPORT(ragged_select)(int half, const float* iq, const float* iw, int64_t heads, const void* keys, int64_t slot_count,
                           int64_t capacity, int64_t dim, const int64_t* slots, const int64_t* starts,
                           const int64_t* lengths, int64_t tokens, int64_t k, int32_t* positions, int threads) {
    Cache index{keys, slot_count, capacity, dim};
    Queries queries{slots, starts, lengths, tokens};
    if (int outside = queries.outside(index)) return outside;
    (half ? select<bf16> : select<float>)(iq, iw, heads, index, queries, k, positions, threads);
    return 0;
}

// out [tokens, heads, latent]: ragged_attention of the reference. q [tokens, heads, dim]; positions [tokens, width] may
// be null; log_sums [tokens, heads] receives log(sum exp) unless it is null.
GLM5_EXPORT(ragged_attention)(int half, const float* q, int64_t heads, const void* latents, int64_t slot_count,
                              int64_t capacity, int64_t dim, int64_t latent, const int64_t* slots, const int64_t* starts,
                              const int64_t* lengths, int64_t tokens, const int32_t* positions, int64_t width, float scale,
                              float* out, float* log_sums, int threads) {
    Cache cache{latents, slot_count, capacity, dim};
    Queries queries{slots, starts, lengths, tokens};
    if (int outside = queries.outside(cache)) return outside;
    (half ? attend<bf16> : attend<float>)(q, AttentionShape{heads, dim, latent}, cache, queries, positions, width, scale, out,
                                          log_sums, threads);
    return 0;
}

// out [tokens, heads, latent]: ragged_dsa of the reference with k > 0.
GLM5_EXPORT(ragged_dsa)(int half, const float* q, int64_t heads, const float* iq, const float* iw, int64_t index_heads,
                        const void* latents, int64_t slot_count, int64_t capacity, int64_t dim, int64_t latent,
                        const void* keys, int64_t index_dim, const int64_t* slots, const int64_t* lengths, int64_t tokens,
                        int64_t k, float scale, float* out, int threads) {
    Cache cache{latents, slot_count, capacity, dim}, index{keys, slot_count, capacity, index_dim};
    Queries queries{slots, nullptr, lengths, tokens};
    if (int outside = queries.outside(cache)) return outside;
    int64_t longest = 0;
    for (int64_t m = 0; m < tokens; m++) longest = lengths[m] > longest ? lengths[m] : longest;
    Scratch scratch(Scratch::need(longest > k ? tokens * k : 0));
    int32_t* positions = longest > k ? scratch.take<int32_t>(tokens * k) : nullptr;
    if (positions) (half ? select<bf16> : select<float>)(iq, iw, index_heads, index, queries, k, positions, threads);
    (half ? attend<bf16> : attend<float>)(q, AttentionShape{heads, dim, latent}, cache, queries, positions, k, scale, out,
                                          nullptr, threads);
    return 0;
}
