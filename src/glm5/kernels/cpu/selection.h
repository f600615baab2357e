// Index scores and exact top-k of many queries over a paged cache.
//
// Consecutive queries of one slot form groups that visit the keys together, tile by tile. Where enough queries of a slot
// see many keys, these are first rounded to integers (screen.h): as soon as such a query has k candidates, only keys that
// may beat the worst of them are scored. Long ranges of few groups are shared between threads and their results merged.
// Scores have the same bits everywhere and the top-k is exact, so the result does not depend on any of this.
#pragma once

#include "index.h"
#include "paged.h"
#include "screen.h"
#include "topk.h"

namespace {

constexpr int64_t TOGETHER = 16;     // queries of one slot that share a tile of keys
constexpr int64_t TILE = 4 * LANES;  // keys of a tile
constexpr int64_t CHUNK = 4096;      // keys below which a group's scores are not shared between threads
constexpr int64_t SCREENED = 64;     // queries of a slot that are worth rounding its keys for
constexpr int64_t RARE = 32;         // keys per chosen one from which on screening is faster than scoring

// Queries first .. first + count of one slot; some of them must choose among keys low .. high.
struct Group {
    int64_t first, count, low, high;
    const RoundedKeys* rounded;  // low .. high at least; null: no screening
};

// Index queries, fp32, with their head weights.
struct IndexHeads {
    const float *q, *w;  // [count, heads, dim], [count, heads]
    int64_t heads;
};

// A choice of k among the keys of a cache.
template <class T> struct Choice {
    const IndexHeads& index;
    const Cache& cache;
    const Queries& queries;
    int64_t k;

    bool is_needed(int64_t m) const { return queries.visible(m) > k; }
    bool is_screened(int64_t m) const { return queries.visible(m) > RARE * k; }
    // Entries of the positions first .. last of a slot, LANES * n of them; those behind the last are repeated.
    void entries(int64_t slot, int64_t first, int64_t last, int64_t n, const T** out) const {
        int32_t rows[TILE];
        int64_t count = at_most(n, last - first);
        cache.keys(slot).rows(first, first + count, rows);
        for (int64_t i = 0; i < n; i++) out[i] = cache.base<T>() + rows[at_most(i, count - 1)] * cache.dim;
    }
};

// What one query of a group has chosen so far.
template <class T> struct Chooser {
    IndexQuery query;
    Screen screen;
    TopkStream stream;
    bool screens;
    int64_t waiting;  // keys that passed the screen and are scored together when they have arrived from memory
    const T* entries[TILE];
    int32_t positions[TILE];

    static int64_t need(int64_t heads, int64_t dim, int64_t k) {
        return IndexQuery::need(heads, dim) + Screen::need(heads, dim) + TopkStream::need(k);
    }
    Chooser(Scratch& scratch, int64_t heads, int64_t dim, int64_t k)
        : query(scratch, heads, dim), screen(scratch, heads, dim), stream(scratch, k), screens(false), waiting(0) {}

    void score_waiting() {
        for (int64_t i = waiting; i % LANES; i++) entries[i] = entries[0];
        for (int64_t i = 0; i < waiting; i += LANES)
            stream.push(index_scores_block(query, entries + i), positions + i, at_most(LANES, waiting - i));
        waiting = 0;
    }

    // Passes those of the TILE keys from `first` on that lie in [low, high) through the screen.
    void sift(const RoundedKeys& keys, int64_t first, int64_t low, int64_t high, const T* const* tile) {
        uint64_t better = 0;
        for (int64_t v = 0; v < TILE / LANES; v += 2) {
            vf bounds[2];
            screen.bounds<2>(keys, first + v * LANES, bounds);
            better |= (uint64_t)lanes_above(bounds[0], stream.bar()) << v * LANES;
            better |= (uint64_t)lanes_above(bounds[1], stream.bar()) << (v + 1) * LANES;
        }
        if (low > first) better &= ~(uint64_t)0 << (low - first);
        if (high < first + TILE) better &= ~(~(uint64_t)0 << (high - first));
        for (; better; better &= better - 1) {
            int64_t i = __builtin_ctzll(better);
            entries[waiting] = tile[i], positions[waiting] = (int32_t)(first + i);
            for (int64_t byte = 0; byte < query.dim * (int64_t)sizeof(T); byte += 64) __builtin_prefetch((const char*)tile[i] + byte);
            if (++waiting == TILE) score_waiting();
        }
    }
};

// Consecutive groups of one slot, and the keys among which they choose.
struct Run {
    int64_t begin, end, low, high;

    template <class T> Run(const Choice<T>& choice, const Group* groups, int64_t count, int64_t begin_)
        : begin(begin_), end(begin_), low(INT64_MAX), high(0) {
        int64_t slot = choice.queries.slots[groups[begin].first], screened = 0;
        for (; end < count && choice.queries.slots[groups[end].first] == slot; end++) {
            low = at_most(low, groups[end].low), high = groups[end].high > high ? groups[end].high : high;
            for (int64_t i = 0; i < groups[end].count; i++) screened += choice.is_screened(groups[end].first + i);
        }
        is_screened = screened >= SCREENED;
    }
    bool is_screened;
    int64_t keys() const { return (high - low + TILE - 1) / TILE * TILE; }
};

// Rounds the keys of the runs that are screened.
template <class T> class Rounded {
   public:
    Rounded(const Choice<T>& choice, Group* groups, int64_t count, int threads)
        : memory_(bytes(choice, groups, count)), keys_(memory_.template take<RoundedKeys>(count)) {
        for (int64_t g = 0, n = 0; g < count;) {
            Run run(choice, groups, count, g);
            if (run.is_screened) {
                RoundedKeys& keys = keys_[n++] = RoundedKeys(memory_, run.low, run.low + run.keys(), choice.cache.dim);
                fill(choice, choice.queries.slots[groups[g].first], run.high, keys, threads);
                for (; g < run.end; g++) groups[g].rounded = &keys;
            }
            g = run.end;
        }
    }

   private:
    static int64_t bytes(const Choice<T>& choice, const Group* groups, int64_t count) {
        int64_t total = Scratch::need(count, sizeof(RoundedKeys));
        for (int64_t g = 0; g < count;) {
            Run run(choice, groups, count, g);
            if (run.is_screened) total += RoundedKeys::need(run.keys(), choice.cache.dim);
            g = run.end;
        }
        return total;
    }
    static void fill(const Choice<T>& choice, int64_t slot, int64_t high, RoundedKeys& keys, int threads) {
        parallel((keys.last - keys.first) / LANES, 16, threads, [&](int64_t begin, int64_t end) {
            Scratch scratch(Rounder::need(choice.cache.dim));
            Rounder rounder(scratch, choice.cache.dim);
            for (int64_t block = begin; block < end; block++) {
                const T* entries[LANES];
                int64_t at = keys.first + block * LANES;
                choice.entries(slot, at_most(at, high - 1), high, LANES, entries);
                keys.round(at, entries, rounder);
            }
        });
        keys.finish();
    }

    Scratch memory_;
    RoundedKeys* keys_;
};

// Index scores and top-k of the queries of a group at the same time, over a range of the keys.
template <class T> class Selector {
   public:
    using Entry = T;
    using Prepared = Rounded<T>;

    static int64_t need(int64_t heads, int64_t dim, int64_t k, int64_t together) {
        return together * Chooser<T>::need(heads, dim, k) + Scratch::need(together, sizeof(Chooser<T>)) +
               Scratch::need(TILE * dim) + Rounder::need(dim);
    }
    Selector(Scratch& scratch, const Choice<T>& choice, int64_t together)
        : choosers(scratch.take<Chooser<T>>(together)), choice_(choice), rounder_(scratch, choice.cache.dim),
          copies_(scratch.take<float>(TILE * choice.cache.dim)) {
        for (int64_t i = 0; i < together; i++)
            choosers[i] = Chooser<T>(scratch, choice.index.heads, choice.cache.dim, choice.k);
    }

    void run(const Group& group, int64_t begin, int64_t end) {
        const IndexHeads& index = choice_.index;
        int64_t slot = choice_.queries.slots[group.first], dim = choice_.cache.dim;
        for (int64_t i = 0; i < group.count; i++) {
            int64_t m = group.first + i;
            const float *q = index.q + m * index.heads * dim, *w = index.w + m * index.heads;
            bool chooses = choice_.is_needed(m);
            choosers[i].screens = group.rounded && choice_.is_screened(m) && choosers[i].screen.set(q, w, *group.rounded, rounder_);
            choosers[i].stream.clear(choosers[i].screens);
            if (chooses) choosers[i].query.set(q, w, 1.0f);
        }
        for (int64_t first = begin; first < end; first += TILE) {
            const T *tile[TILE], *next[1];
            choice_.entries(slot, first, end, TILE, tile);
            choice_.entries(slot, at_most(first + TILE, end - 1), end, 1, next);
            visit(group, first, tile, (const char*)next[0]);
        }
        for (int64_t i = 0; i < group.count; i++) choosers[i].score_waiting();
    }

    TopkStream& stream(int64_t i) { return choosers[i].stream; }

    Chooser<T>* choosers;

   private:
    // Shows the keys first .. first + TILE to every query that sees them; `ahead` is where the next tile begins.
    void visit(const Group& group, int64_t first, const T* const* tile, const char* ahead) {
        const float* copied[TILE];
        bool is_copied = false;
        for (int64_t i = 0; i < group.count; i++) {
            int64_t m = group.first + i, low = choice_.queries.start(m), high = choice_.queries.lengths[m];
            if (!choice_.is_needed(m) || high <= first || low >= first + TILE) continue;
            Chooser<T>& chooser = choosers[i];
            if (chooser.screens && chooser.stream.is_full()) {
                chooser.sift(*group.rounded, first, low, high, tile);
            } else if (group.count > 1 && sizeof(T) != sizeof(float)) {
                if (!is_copied) copy(tile, copied);
                is_copied = true;
                score(chooser, first, low, high, copied, nullptr);
            } else {
                score(chooser, first, low, high, tile, ahead);
            }
        }
    }

    // A tile as fp32 rows.
    void copy(const T* const* tile, const float** out) {
        int64_t dim = choice_.cache.dim;
        for (int64_t i = 0; i < TILE; i++) {
            float* row = copies_ + i * dim;
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) store(row + d, load(tile[i] + d));
            for (; d < dim; d++) row[d] = as_float(tile[i][d]);
            out[i] = row;
        }
    }

    // A function of its own, because inlined it is about 7% slower.
    template <class Entry>
    __attribute__((noinline)) static void score(Chooser<T>& chooser, int64_t first, int64_t low, int64_t high, const Entry* const* tile, const char* ahead) {
        vf scores[TILE / LANES];
        for (int64_t v = 0; v < TILE / LANES; v++) {
            const char* next = ahead ? ahead + v * LANES * chooser.query.dim * (int64_t)sizeof(Entry) : nullptr;
            bool seen = high > first + v * LANES && low < first + (v + 1) * LANES;
            scores[v] = seen ? index_scores_block(chooser.query, tile + v * LANES, next) : splat(-INFINITY);
        }
        chooser.stream.template push<TILE / LANES>(scores, first, low, high);
    }

    const Choice<T>& choice_;
    Rounder rounder_;
    float* copies_;
};

// Consecutive queries of one slot, at most TOGETHER, into `groups`; their number.
template <class T> static int64_t form_groups(const Choice<T>& choice, Group* groups) {
    const Queries& queries = choice.queries;
    int64_t n = 0;
    for (int64_t m = 0; m < queries.count; m++) {
        bool joins = n && groups[n - 1].count < TOGETHER && queries.slots[m] == queries.slots[groups[n - 1].first];
        if (!joins) groups[n++] = {m, 0, INT64_MAX, 0, nullptr};
        Group& group = groups[n - 1];
        group.count++;
        if (!choice.is_needed(m)) continue;  // sees no more than it may keep
        group.low = at_most(group.low, queries.start(m) / TILE * TILE);
        group.high = queries.lengths[m] > group.high ? queries.lengths[m] : group.high;
    }
    return n;
}

// positions [count, k]: the selection of every query, ascending, padded with -1. `Select` is a Selector or takes its place.
template <class Select>
static void select(const IndexHeads& index, const Cache& cache, const Queries& queries, int64_t k, int32_t* positions, int threads) {
    Choice<typename Select::Entry> choice{index, cache, queries, k};
    Scratch shared(Scratch::need(queries.count, sizeof(Group)));
    Group* groups = shared.take<Group>(queries.count);
    int64_t count = form_groups(choice, groups), chunks = 1, longest = 0, together = 1;
    for (int64_t g = 0; g < count; g++) {
        if (groups[g].high) longest = groups[g].high - groups[g].low > longest ? groups[g].high - groups[g].low : longest;
        together = groups[g].count > together ? groups[g].count : together;
    }
    if (count < 2 * threads) chunks = at_most(threads, (longest + CHUNK - 1) / CHUNK);
    if (chunks < 1) chunks = 1;
    typename Select::Prepared prepared(choice, groups, count, threads);
    int64_t each = Select::need(index.heads, cache.dim, k, together);
    auto keep = [&](int64_t m, TopkStream& stream) {
        int64_t n = queries.visible(m);
        int32_t* row = positions + m * k;
        if (n > k) n = stream.finish(), memcpy(row, stream.positions(), sizeof(int32_t) * n);
        else
            for (int64_t s = 0; s < n; s++) row[s] = (int32_t)(queries.start(m) + s);
        for (int64_t s = n; s < k; s++) row[s] = -1;
    };
    if (chunks == 1) {
        parallel(count, 1, threads, [&](int64_t begin, int64_t end) {
            Scratch scratch(each);
            Select selector(scratch, choice, together);
            for (int64_t g = begin; g < end; g++) {
                selector.run(groups[g], groups[g].low, groups[g].high);
                for (int64_t i = 0; i < groups[g].count; i++) keep(groups[g].first + i, selector.stream(i));
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
        Select selector(scratch, choice, together);
        for (int64_t task = begin; task < end; task++) {
            const Group& group = groups[task / chunks];
            int64_t span = group.high > group.low ? group.high - group.low : 0;
            int64_t step = (span + chunks * TILE - 1) / (chunks * TILE) * TILE, first = group.low + task % chunks * step;
            selector.run(group, first, at_most(group.high, first + step));
            for (int64_t i = 0; i < group.count; i++) {
                TopkStream& stream = selector.stream(i);
                int64_t place = task * together + i, n = sizes[place] = stream.finish();
                memcpy(kept_keys + place * k, stream.keys(), sizeof(int32_t) * n);
                memcpy(kept_positions + place * k, stream.positions(), sizeof(int32_t) * n);
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
            keep(groups[g].first + i, merged);
        }
    }
}

}  // namespace
