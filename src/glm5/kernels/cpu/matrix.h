// Index scores and absorbed attention of bf16 queries over bf16 caches on the matrix unit (AMX): the two classes have the
// interfaces of `Selector` and `AbsorbedAttention`, and take their place where queries and caches hold bf16 values.
//
// Products of bf16 values are exact and added in fp32, 32 elements of a key at a time and in order, so that a result
// depends neither on its place in a tile nor on which operand was the left one. Weights of attention are rounded to bf16.
#pragma once

#if defined(__AMX_BF16__)
#include <immintrin.h>

#include "absorbed.h"
#include "selection.h"

// The number of a tile is part of the instruction, and the compiler does not know that these read and write memory.
#define GLM5_TILE_LOAD(tile, memory, bytes)  \
    do {                                     \
        asm volatile("" ::: "memory");       \
        _tile_loadd(tile, memory, bytes);    \
    } while (0)
#define GLM5_TILE_STORE(tile, memory, bytes) \
    do {                                     \
        _tile_stored(tile, memory, bytes);   \
        asm volatile("" ::: "memory");       \
    } while (0)

namespace {

constexpr int64_t SIDE = 16;            // rows of a tile, and its columns of 32 bits
constexpr int64_t PAIRED = 2 * SIDE;    // bf16 elements of a tile's row
constexpr int64_t SQUARE = SIDE * SIDE;

GLM5_INLINE int64_t whole_rows(int64_t dim) { return (dim + PAIRED - 1) / PAIRED * PAIRED; }

// Sets the matrix unit of this thread up for eight full tiles; other users find their own set-up again afterwards.
class Tiles {
   public:
    Tiles() {
        _tile_storeconfig(before_);
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } full;
        _tile_loadconfig(&full);
    }
    ~Tiles() {
        if (before_[0]) _tile_loadconfig(before_);
        else _tile_release();
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

   private:
    alignas(64) uint8_t before_[64];
};

// Rows [SIDE, dim] of values that are exact in bf16 (null: zeros) become the right operand: for every PAIRED elements
// [SIDE pairs, SIDE rows, 2].
static void pack_rows(const float* const* rows, int64_t dim, uint16_t* out) {
    for (int64_t d = 0; d < dim; d += PAIRED, out += SIDE * PAIRED) {
        const int64_t left = at_most(dim - d, PAIRED), more = left > SIDE ? left - SIDE : 0;
        const __mmask16 low = (__mmask16)(0xffffu >> (left < SIDE ? SIDE - left : 0)), high = (__mmask16)((1u << more) - 1);
        vf pairs[SIDE];
        GLM5_UNROLL
        for (int r = 0; r < SIDE; r++) {
            const float* row = rows[r] ? rows[r] + d : nullptr;
            pairs[r] = row ? (vf)(__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, row + SIDE), _mm512_maskz_loadu_ps(low, row)) : (vf){};
        }
        transpose(pairs);
        GLM5_UNROLL
        for (int r = 0; r < SIDE; r++) store((float*)out + r * SIDE, pairs[r]);
    }
}

// Keys as left operands: read where they lie if that is possible, else copied and filled up with zeros.
class KeyTiles {
   public:
    static int64_t need(int64_t keys, int64_t dim) { return Scratch::need(keys * whole_rows(dim), 2) + Scratch::need(keys / SIDE, 8); }
    KeyTiles(Scratch& scratch, int64_t keys, int64_t dim)
        : dim_(dim), wide_(whole_rows(dim)), copies_(scratch.take<bf16>(keys * whole_rows(dim))),
          tiles_(scratch.take<const bf16*>(keys / SIDE)) {
        memset(copies_, 0, sizeof(bf16) * keys * wide_);
    }

    // Tile t of the keys at `rows`, which are SIDE pointers.
    GLM5_INLINE void set(int64_t t, const bf16* const* rows) {
        bool in_place = wide_ == dim_;
        for (int64_t i = 1; i < SIDE; i++) in_place = in_place && rows[i] == rows[0] + i * dim_;
        tiles_[t] = in_place ? rows[0] : copies_ + t * SIDE * wide_;
        if (!in_place)
            for (int64_t i = 0; i < SIDE; i++) memcpy(copies_ + (t * SIDE + i) * wide_, rows[i], sizeof(bf16) * dim_);
    }
    const bf16* at(int64_t t) const { return tiles_[t]; }
    int64_t wide() const { return wide_; }
    int64_t bytes() const { return wide_ * (int64_t)sizeof(bf16); }

   private:
    int64_t dim_, wide_;
    bf16* copies_;
    const bf16** tiles_;
};

// Two tiles of keys by one of packed rows: logits [2, SIDE keys, SIDE rows].
static void multiply_pair(const KeyTiles& keys, int64_t tile, const uint16_t* packed, float* logits) {
    const bf16 *x = keys.at(tile), *y = keys.at(tile + 1);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < keys.wide(); d += PAIRED) {
        GLM5_TILE_LOAD(4, x + d, keys.bytes());
        GLM5_TILE_LOAD(5, y + d, keys.bytes());
        GLM5_TILE_LOAD(6, packed + d * SIDE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
    }
    GLM5_TILE_STORE(0, logits, 64);
    GLM5_TILE_STORE(1, logits + SQUARE, 64);
}

// relu(logits) * w is added to a sum, in this form wherever a score is computed.
GLM5_INLINE vf add_head(vf sum, vf logits, vf w) {
    __m512 positive = _mm512_max_ps(_mm512_setzero_ps(), (__m512)logits);  // NaN stays NaN
    return (vf)_mm512_fmadd_ps(positive, (__m512)w, (__m512)sum);
}

// Selector of bf16 queries: either the queries of a group are the columns of a tile, one head at a time, or, for few
// queries, the heads of one query are.
class MatrixSelector {
   public:
    using Entry = bf16;
    struct Prepared {  // keys are scored as they lie
        Prepared(const Choice<bf16>&, const Group*, int64_t, int) {}
    };

    static int64_t need(int64_t heads, int64_t dim, int64_t k, int64_t together) {
        return together * TopkStream::need(k) + Scratch::need(together, sizeof(TopkStream)) + KeyTiles::need(TILE, dim) +
               Scratch::need(packs(heads) * SIDE * whole_rows(dim), 2) + Scratch::need(packs(heads) * SIDE) +
               Scratch::need(4 * SQUARE) + Scratch::need(TILE * SIDE);
    }
    MatrixSelector(Scratch& scratch, const Choice<bf16>& choice, int64_t together)
        : streams_(scratch.take<TopkStream>(together)), choice_(choice), heads_(choice.index.heads),
          keys_(scratch, TILE, choice.cache.dim),
          packed_(scratch.take<uint16_t>(packs(heads_) * SIDE * whole_rows(choice.cache.dim))),
          factors_(scratch.take<float>(packs(heads_) * SIDE)), logits_(scratch.take<float>(4 * SQUARE)),
          sums_(scratch.take<float>(TILE * SIDE)) {
        for (int64_t i = 0; i < together; i++) streams_[i] = TopkStream(scratch, choice.k);
    }
    TopkStream& stream(int64_t i) { return streams_[i]; }

    void run(const Group& group, int64_t begin, int64_t end) {
        Tiles tiles;
        for (int64_t i = 0; i < group.count; i++) streams_[i].clear();
        int64_t tile_rows = (heads_ + SIDE - 1) / SIDE;
        if (group.count * tile_rows < heads_) {
            for (int64_t i = 0; i < group.count; i++) pack_heads(group.first + i, i * tile_rows);
            visit(group, begin, end, [&](int64_t first) { score_by_heads(group, first, tile_rows); });
        } else {
            pack_queries(group);
            visit(group, begin, end, [&](int64_t first) { score_by_queries(group, first); });
        }
    }

   private:
    // Tiles of packed rows: one per head, or fewer of all heads of some queries.
    static int64_t packs(int64_t heads) { return heads + heads % 2; }
    uint16_t* packed(int64_t pack) { return packed_ + pack * SIDE * keys_.wide(); }
    const float* query(int64_t m, int64_t head) const { return choice_.index.q + (m * heads_ + head) * choice_.cache.dim; }

    void pack_heads(int64_t m, int64_t pack) {
        for (int64_t h = 0; h < heads_; h += SIDE, pack++) {
            const float* rows[SIDE];
            for (int64_t i = 0; i < SIDE; i++) rows[i] = h + i < heads_ ? query(m, h + i) : nullptr;
            pack_rows(rows, choice_.cache.dim, packed(pack));
        }
    }
    void pack_queries(const Group& group) {
        for (int64_t h = 0; h < packs(heads_); h++) {
            const float* rows[SIDE];
            for (int64_t i = 0; i < SIDE; i++) {
                bool is_there = h < heads_ && i < group.count;
                rows[i] = is_there ? query(group.first + i, h) : nullptr;
                factors_[h * SIDE + i] = is_there ? choice_.index.w[(group.first + i) * heads_ + h] : 0.0f;
            }
            pack_rows(rows, choice_.cache.dim, packed(h));
        }
    }

    // Shows the keys begin .. end to `score`, TILE at a time, while the next ones are loaded.
    template <class Score> void visit(const Group& group, int64_t begin, int64_t end, const Score& score) {
        int64_t slot = choice_.queries.slots[group.first], size = choice_.cache.dim * (int64_t)sizeof(bf16);
        const bf16 *rows[TILE], *next[TILE];
        if (begin < end) choice_.entries(slot, begin, end, TILE, rows);
        for (int64_t first = begin; first < end; first += TILE) {
            bool more = first + TILE < end;
            if (more) choice_.entries(slot, first + TILE, end, TILE, next);
            for (int64_t t = 0; t < TILE / SIDE; t++) {
                keys_.set(t, rows + t * SIDE);
                for (int64_t i = t * SIDE; more && i < (t + 1) * SIDE; i++)
                    for (int64_t byte = 0; byte < size; byte += 64) __builtin_prefetch((const char*)next[i] + byte);
            }
            score(first);
            if (more) memcpy(rows, next, sizeof(rows));
        }
    }

    void push(const Group& group, int64_t i, int64_t first, const vf* scores) {
        int64_t m = group.first + i, low = choice_.queries.start(m), high = choice_.queries.lengths[m];
        if (choice_.is_needed(m) && high > first && low < first + TILE)
            streams_[i].template push<TILE / LANES>(scores, first, low, high);
    }

    // Two tiles of keys by two of packed rows: logits_[2 * rows + keys].
    void multiply(int64_t key_tile, const uint16_t* a, const uint16_t* b) {
        const bf16 *x = keys_.at(key_tile), *y = keys_.at(key_tile + 1);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < keys_.wide(); d += PAIRED) {
            GLM5_TILE_LOAD(4, x + d, keys_.bytes());
            GLM5_TILE_LOAD(5, y + d, keys_.bytes());
            GLM5_TILE_LOAD(6, a + d * SIDE, 64);
            GLM5_TILE_LOAD(7, b + d * SIDE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        GLM5_TILE_STORE(0, logits_, 64);
        GLM5_TILE_STORE(1, logits_ + SQUARE, 64);
        GLM5_TILE_STORE(2, logits_ + 2 * SQUARE, 64);
        GLM5_TILE_STORE(3, logits_ + 3 * SQUARE, 64);
    }

    void score_by_queries(const Group& group, int64_t first) {
        for (int64_t t = 0; t < TILE / SIDE; t += 2) {
            for (int64_t h = 0; h < heads_; h += 2) {
                multiply(t, packed(h), packed(h + 1));
                vf a = load(factors_ + h * SIDE), b = load(factors_ + (h + 1) * SIDE);
                bool both = h + 1 < heads_;
                for (int64_t i = 0; i < 2 * SIDE; i++) {
                    float* place = sums_ + (t * SIDE + i) * SIDE;
                    vf sum = add_head(h ? load(place) : (vf){}, load(logits_ + i * SIDE), a);
                    if (both) sum = add_head(sum, load(logits_ + 2 * SQUARE + i * SIDE), b);
                    store(place, sum);
                }
            }
        }
        for (int64_t t = 0; t < TILE / SIDE; t++) {
            vf square[SIDE];
            GLM5_UNROLL
            for (int i = 0; i < SIDE; i++) square[i] = load(sums_ + (t * SIDE + i) * SIDE);
            transpose(square);
            GLM5_UNROLL
            for (int i = 0; i < SIDE; i++) store(sums_ + (t * SIDE + i) * SIDE, square[i]);
        }
        for (int64_t i = 0; i < group.count; i++) {
            vf scores[TILE / SIDE];
            for (int64_t t = 0; t < TILE / SIDE; t++) scores[t] = load(sums_ + (t * SIDE + i) * SIDE);
            push(group, i, first, scores);
        }
    }

    void score_by_heads(const Group& group, int64_t first, int64_t tile_rows) {
        for (int64_t i = 0; i < group.count; i++) {
            vf scores[TILE / SIDE] = {};
            const float* w = choice_.index.w + (group.first + i) * heads_;
            for (int64_t t = 0; t < TILE / SIDE; t += 2)
                for (int64_t r = 0; r < tile_rows; r++) {
                    multiply_pair(keys_, t, packed(i * tile_rows + r), logits_);
                    for (int64_t key = 0; key < 2; key++) {
                        vf square[SIDE];
                        GLM5_UNROLL
                        for (int h = 0; h < SIDE; h++) square[h] = load(logits_ + key * SQUARE + h * SIDE);
                        transpose(square);
                        for (int64_t h = 0; h < at_most(SIDE, heads_ - r * SIDE); h++)
                            scores[t + key] = add_head(scores[t + key], square[h], splat(w[r * SIDE + h]));
                    }
                }
            push(group, i, first, scores);
        }
    }

    TopkStream* streams_;
    const Choice<bf16>& choice_;
    int64_t heads_;
    KeyTiles keys_;
    uint16_t* packed_;
    float *factors_, *logits_, *sums_;
};

// Absorbed attention of bf16 queries: SIDE heads of a query are the columns of a tile of logits and the rows of a tile of
// sums. Queries of one slot that see all its first keys are computed together, so that keys are prepared once.
//
// Elements of the sums stand in an order of their own within every PAIRED of them: the even ones, then the odd ones,
// because that is how pairs of values come out of two entries without moving anything between lanes.
class MatrixAttention {
   public:
    using Entry = bf16;
    static constexpr int64_t TOGETHER = 8;

    static constexpr int64_t UNIT = PAIRED;

    static int64_t need(const AttentionShape& s) {
        return Scratch::need(TOGETHER * s.padded() * whole_rows(s.dim), 2) + KeyTiles::need(STRETCH, s.dim) +
               Scratch::need(STRETCH * s.width(), 2) + Scratch::need(STRETCH * SIDE) + Scratch::need(STRETCH * SIDE, 2) +
               Scratch::need(s.dim, 2) + Scratch::need(PART);
    }
    MatrixAttention(Scratch& scratch, const AttentionShape& shape)
        : shape_(shape), scale_(0.0f), q_(scratch.take<uint16_t>(TOGETHER * shape.padded() * whole_rows(shape.dim))),
          keys_(scratch, STRETCH, shape.dim), values_(scratch.take<uint32_t>(STRETCH / 2 * shape.width())),
          logits_(scratch.take<float>(STRETCH * SIDE)), weights_(scratch.take<uint16_t>(STRETCH * SIDE)),
          nothing_(scratch.take<bf16>(shape.dim)), rows_(scratch.take<int32_t>(PART)) {
        memset(nothing_, 0, sizeof(bf16) * shape.dim);
        memset(values_, 0, sizeof(uint32_t) * STRETCH / 2 * shape.width());
    }

    void set_queries(const float* q, int64_t count, float scale) {
        scale_ = scale;
        for (int64_t i = 0; i < count; i++)
            for (int64_t h = 0; h < shape_.padded(); h += SIDE) {
                const float* rows[SIDE];
                for (int64_t j = 0; j < SIDE; j++) rows[j] = h + j < shape_.heads ? q + (i * shape_.heads + h + j) * shape_.dim : nullptr;
                pack_rows(rows, shape_.dim, packed(i * shape_.padded() + h));
            }
    }

    void prefetch(const bf16* cache, const Keys& keys, int64_t n) {
        keys.rows(0, at_most(SIDE, n), rows_);
        for (int64_t i = 0; i < at_most(SIDE, n); i++) preload(cache + rows_[i] * shape_.dim);
    }

    // Keys begin .. end (at most PART, at least one) into `out`, one per query; query i sees the first seen[i] keys.
    void run_part(const bf16* cache, const Keys& keys, int64_t begin, int64_t end, const int64_t* seen, int64_t count, Partial* out) {
        Tiles tiles;
        keys.rows(begin, end, rows_);
        for (int64_t start = begin; start < end; start += STRETCH) {
            int64_t stop = at_most(end, start + STRETCH), least = stop;
            for (int64_t i = 0; i < count; i++) least = at_most(least, seen[i]);
            if (least >= stop) {
                fetch(cache, start - begin, stop - start, end - begin);
                for (int64_t i = 0; i < count; i++) visit(i, stop - start, start == begin, out[i]);
                continue;
            }
            for (int64_t i = 0; i < count; i++) {  // each alone, so that no query reads what it does not see
                int64_t n = at_most(stop, seen[i]) - start;
                if (n <= 0) continue;
                fetch(cache, start - begin, n, n + start - begin);
                visit(i, n, start == begin, out[i]);
            }
        }
    }

    static void finish(const AttentionShape& s, int64_t n, const Partial& whole, float* out, float* log_sums) {
        for (int64_t h = 0; h < s.heads; h++) {
            float inverse = n ? 1.0f / whole.totals[h] : 0.0f;
            const float* sums = whole.sums + h * s.width();
            for (int64_t c = 0; c < s.latent; c++)
                out[h * s.latent + c] = n ? sums[c / PAIRED * PAIRED + c % 2 * SIDE + c % PAIRED / 2] * inverse : 0.0f;
            if (log_sums) log_sums[h] = n ? whole.peaks[h] + logf(whole.totals[h]) : 0.0f;
        }
    }

   private:
    static constexpr int64_t STRETCH = 128;  // keys of a softmax step: few enough for the second cache level

    uint16_t* packed(int64_t row) { return q_ + row * keys_.wide(); }
    void preload(const bf16* entry) const {
        for (int64_t byte = 0; byte < shape_.dim * (int64_t)sizeof(bf16); byte += 64) __builtin_prefetch((const char*)entry + byte);
    }

    // Keys rows_[first .. first + n) as tiles, and their values in pairs; missing ones of a whole PAIRED are zeros.
    // Begins to load keys that come later, up to rows_[end].
    void fetch(const bf16* cache, int64_t first, int64_t n, int64_t end) {
        constexpr int64_t AHEAD = 8;
        const int64_t width = shape_.width();
        for (int64_t start = 0; start < n; start += PAIRED) {
            const bf16* entries[PAIRED];
            for (int64_t i = 0; i < PAIRED; i++) {
                int64_t at = first + start + i;
                entries[i] = start + i < n ? cache + rows_[at] * shape_.dim : nothing_;
                if (at + AHEAD < end) preload(cache + rows_[at + AHEAD] * shape_.dim);
                if (i % SIDE == SIDE - 1) keys_.set((start + i) / SIDE, entries + i + 1 - SIDE);
            }
            for (int64_t i = 0; i < PAIRED; i += 2) {
                uint32_t* out = values_ + (start + i) / 2 * width;
                const bf16 *a = keys_.at((start + i) / SIDE) + i % SIDE * keys_.wide(), *b = a + keys_.wide();
                int64_t c = 0;
                for (; c + PAIRED <= shape_.latent; c += PAIRED) pair(_mm512_loadu_si512(a + c), _mm512_loadu_si512(b + c), out + c);
                if (c < shape_.latent) {
                    __mmask32 rest = ((__mmask32)1 << (shape_.latent - c)) - 1;
                    pair(_mm512_maskz_loadu_epi16(rest, a + c), _mm512_maskz_loadu_epi16(rest, b + c), out + c);
                }
            }
        }
    }
    // Elements 0, 2, ... of both, then elements 1, 3, ... of both.
    static GLM5_INLINE void pair(__m512i a, __m512i b, uint32_t* out) {
        const __m512i low = _mm512_set1_epi32(0xffff);
        _mm512_storeu_si512(out, _mm512_ternarylogic_epi32(low, a, _mm512_slli_epi32(b, 16), 0xca));
        _mm512_storeu_si512(out + SIDE, _mm512_ternarylogic_epi32(low, _mm512_srli_epi32(a, 16), b, 0xca));
    }

    // All heads of query i over the n keys that were fetched.
    void visit(int64_t i, int64_t n, bool first, Partial& out) {
        for (int64_t h = 0; h < shape_.padded(); h += SIDE) {
            multiply_keys(packed(i * shape_.padded() + h), n);
            soften(h, n, first, out);
            add_values(n, first, out.sums + h * shape_.width());
        }
    }

    void multiply_keys(const uint16_t* q, int64_t n) {
        for (int64_t t = 0; t * SIDE < n; t += 2) multiply_pair(keys_, t, q, logits_ + t * SQUARE);
    }

    // Logits become weights, heads as rows; the running peaks, totals and sums follow.
    void soften(int64_t h, int64_t n, bool first, Partial& out) {
        vf before = first ? splat(-INFINITY) : load(out.peaks + h), peak = before, total = {};
        for (int64_t i = 0; i < n; i++) {
            vf logits = load(logits_ + i * SIDE) * scale_;
            store(logits_ + i * SIDE, logits);
            peak = larger(logits, peak);
        }
        for (int64_t i = n; i % PAIRED; i++) store(logits_ + i * SIDE, splat(-INFINITY));
        for (int64_t i = 0; i < n; i += SIDE) {
            vf square[SIDE];
            GLM5_UNROLL
            for (int j = 0; j < SIDE; j++) {
                square[j] = exp_lanes(load(logits_ + (i + j) * SIDE) - peak);
                total += square[j];
            }
            transpose(square);
            GLM5_UNROLL
            for (int j = 0; j < SIDE; j++)
                _mm256_storeu_si256((__m256i*)(weights_ + j * STRETCH + i), (__m256i)_mm512_cvtneps_pbh((__m512)square[j]));
        }
        if (n % PAIRED && n % PAIRED <= SIDE)
            for (int64_t j = 0; j < SIDE; j++) memset(weights_ + j * STRETCH + n / PAIRED * PAIRED + SIDE, 0, SIDE * sizeof(uint16_t));
        vf keep = exp_lanes(before - peak);
        store(out.peaks + h, peak);
        store(out.totals + h, first ? total : load(out.totals + h) * keep + total);
        if (first || !any_lane(keep != splat(1.0f))) return;
        for (int64_t lane = 0; lane < SIDE; lane++) {
            float* sums = out.sums + (h + lane) * shape_.width();
            for (int64_t c = 0; c < shape_.width(); c += LANES) store(sums + c, load(sums + c) * keep[lane]);
        }
    }

    // sums [SIDE, width] (+)= weights . values.
    void add_values(int64_t n, bool first, float* sums) {
        const int64_t width = shape_.width(), bytes = width * 4;
        int64_t c = 0;
        for (; c + 2 * PAIRED <= width; c += 2 * PAIRED) {
            if (first) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            } else {
                GLM5_TILE_LOAD(0, sums + c, bytes);
                GLM5_TILE_LOAD(1, sums + c + SIDE, bytes);
                GLM5_TILE_LOAD(2, sums + c + 2 * SIDE, bytes);
                GLM5_TILE_LOAD(3, sums + c + 3 * SIDE, bytes);
            }
            for (int64_t i = 0; i < n; i += PAIRED) {
                const uint32_t* values = values_ + i / 2 * width + c;
                GLM5_TILE_LOAD(4, weights_ + i, STRETCH * 2);
                GLM5_TILE_LOAD(5, values, bytes);
                GLM5_TILE_LOAD(6, values + SIDE, bytes);
                GLM5_TILE_LOAD(7, values + 2 * SIDE, bytes);
                _tile_dpbf16ps(0, 4, 5);
                GLM5_TILE_LOAD(5, values + 3 * SIDE, bytes);
                _tile_dpbf16ps(1, 4, 6);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 4, 5);
            }
            GLM5_TILE_STORE(0, sums + c, bytes);
            GLM5_TILE_STORE(1, sums + c + SIDE, bytes);
            GLM5_TILE_STORE(2, sums + c + 2 * SIDE, bytes);
            GLM5_TILE_STORE(3, sums + c + 3 * SIDE, bytes);
        }
        if (c == width) return;
        if (first) {
            _tile_zero(0);
            _tile_zero(1);
        } else {
            GLM5_TILE_LOAD(0, sums + c, bytes);
            GLM5_TILE_LOAD(1, sums + c + SIDE, bytes);
        }
        for (int64_t i = 0; i < n; i += PAIRED) {
            const uint32_t* values = values_ + i / 2 * width + c;
            GLM5_TILE_LOAD(4, weights_ + i, STRETCH * 2);
            GLM5_TILE_LOAD(5, values, bytes);
            GLM5_TILE_LOAD(6, values + SIDE, bytes);
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 4, 6);
        }
        GLM5_TILE_STORE(0, sums + c, bytes);
        GLM5_TILE_STORE(1, sums + c + SIDE, bytes);
    }

    AttentionShape shape_;
    float scale_;
    uint16_t* q_;
    KeyTiles keys_;
    uint32_t* values_;
    float* logits_;
    uint16_t* weights_;
    bf16* nothing_;
    int32_t* rows_;
};

}  // namespace
#endif
