// Exact top-k of one row of scores: the k best positions in ascending order, ties towards the lower position.
#pragma once

#include "simd.h"

namespace {

// Keys are int32 that order like the scores: NaN and -inf become the lowest finite float, -0 becomes +0.
GLM5_INLINE vi order_keys(vf scores) {
    const vf lowest = splat(-3.402823466e+38f);
    vf s = scores + 0.0f;
    vi bits = (vi)(s > lowest ? s : lowest);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

GLM5_INLINE float key_to_float(int32_t key) {
    int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

GLM5_INLINE int32_t float_to_key(float value) {
    int32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Number of keys >= limit. `keys` is padded with INT32_MIN to a multiple of 4 * LANES; limit > INT32_MIN.
static int64_t count_from(const int32_t* keys, int64_t n, int32_t limit) {
    vi least = limit - (vi){}, c0 = {}, c1 = {}, c2 = {}, c3 = {};
    for (int64_t i = 0; i < n; i += 4 * LANES) {
        c0 -= *(const vi_loose*)(keys + i) >= least;
        c1 -= *(const vi_loose*)(keys + i + LANES) >= least;
        c2 -= *(const vi_loose*)(keys + i + 2 * LANES) >= least;
        c3 -= *(const vi_loose*)(keys + i + 3 * LANES) >= least;
    }
    c0 += c1 + c2 + c3;
    int64_t total = 0;
    for (int i = 0; i < LANES; i++) total += c0[i];
    return total;
}

static void pad_keys(int32_t* keys, int64_t n) {
    for (int64_t i = n; i % (4 * LANES); i++) keys[i] = INT32_MIN;
}

// Midpoint of lo < hi, in (lo, hi]: between the floats while that converges fast, then between the integers.
GLM5_INLINE int32_t middle(int32_t lo, int32_t hi, int step) {
    int32_t mid = (int32_t)(lo + ((uint32_t)hi - (uint32_t)lo + 1) / 2);
    if (step < 16) {
        float guess = 0.5f * key_to_float(lo) + 0.5f * key_to_float(hi);
        int32_t key = float_to_key(guess);
        if (guess == guess && key > lo && key <= hi) mid = key;
    }
    return mid;
}

// Largest t with count(keys >= t) >= k, 1 <= k <= n, by bisection; candidates are gathered into `spare` when few are left.
static int32_t kth_largest(const int32_t* keys, int32_t* spare, int64_t n, int64_t k) {
    vi low = INT32_MAX - (vi){}, high = INT32_MIN - (vi){};
    for (int64_t i = 0; i < n; i += LANES) {
        vi v = *(const vi_loose*)(keys + i);
        high = v > high ? v : high;
        v = v == INT32_MIN ? (vi){} + INT32_MAX : v;
        low = v < low ? v : low;
    }
    int32_t lo = low[0], hi = high[0];
    for (int i = 1; i < LANES; i++) {
        lo = low[i] < lo ? low[i] : lo;
        hi = high[i] > hi ? high[i] : hi;
    }
    int64_t above = 0, from_lo = n;  // counts over all keys: > hi, >= lo
    for (int step = 0; lo < hi; step++) {
        int32_t mid = middle(lo, hi, step);
        int64_t count = count_from(keys, n, mid) + (keys == spare ? above : 0);
        if (count >= k) {
            lo = mid, from_lo = count;
            if (count == k) break;
        } else {
            hi = mid - 1;
            if (keys != spare) above = count;
        }
        if (keys != spare && n > 2048 && from_lo - above < n / 4) {
            int64_t kept = 0;
            for (int64_t i = 0; i < n; i++) {
                spare[kept] = keys[i];
                kept += keys[i] >= lo && keys[i] <= hi;
            }
            pad_keys(spare, kept);
            keys = spare, n = kept;
        }
    }
    return lo;
}

// Elements of `keys` and of `spare` that select_topk needs for n scores.
GLM5_INLINE int64_t topk_scratch(int64_t n) { return n + 4 * LANES + 1; }

// Writes min(k, n) positions. `scores` must be readable up to a multiple of LANES.
[[maybe_unused]] static int64_t select_topk(const float* scores, int64_t n, int64_t k, int32_t* keys, int32_t* spare, int32_t* positions) {
    if (k >= n) {
        for (int64_t i = 0; i < n; i++) positions[i] = (int32_t)i;
        return n;
    }
    for (int64_t i = 0; i < n; i += LANES) *(vi_loose*)(keys + i) = order_keys(load(scores + i));
    pad_keys(keys, n);
    int32_t threshold = kth_largest(keys, spare, n, k);
    int64_t room = k - (threshold == INT32_MAX ? 0 : count_from(keys, n, threshold + 1)), written = 0;
    for (int64_t i = 0; written < k; i++) {
        int64_t tied = keys[i] == threshold && room > 0;
        positions[written] = (int32_t)i;
        written += tied | (keys[i] > threshold);
        room -= tied;
    }
    return k;
}

// Exact top-k of scores that arrive in ascending positions, in memory that does not grow with their number: candidates
// above a rising threshold are kept, and cut to the k best when there is no more room.
class TopkStream {
   public:
    static int64_t capacity(int64_t k) { return 4 * k + 64 * LANES; }
    static int64_t need(int64_t k) { return 2 * Scratch::need(topk_scratch(capacity(k))) + Scratch::need(capacity(k)); }

    TopkStream(Scratch& scratch, int64_t k)
        : k_(k), keys_(scratch.take<int32_t>(topk_scratch(capacity(k)))),
          spare_(scratch.take<int32_t>(topk_scratch(capacity(k)))), positions_(scratch.take<int32_t>(capacity(k))) {
        clear();
    }

    // `eager` cuts more often, for callers who save work on scores below the threshold.
    void clear(bool eager = false) {
        count_ = 0, threshold_ = INT32_MIN;
        limit_ = eager ? k_ + k_ / 2 + 16 * LANES : capacity(k_) - 8 * LANES;
    }

    // Scores of positions first, first + 1, ... for V vectors; those in [low, high) count.
    template <int V> GLM5_INLINE void push(const vf* scores, int64_t first, int64_t low, int64_t high) {
        vi keys[V], better = {};
        GLM5_UNROLL
        for (int v = 0; v < V; v++) {
            keys[v] = order_keys(scores[v]);
            better |= keys[v] > threshold_;
        }
        if (!any_lane(better)) return;
        low = low > first ? low : first, high = at_most(high, first + V * LANES);
#if GLM5_LANES == 16
        const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        GLM5_UNROLL
        for (int v = 0; v < V; v++) {  // writes whole vectors: there is room behind the limit
            int64_t start = first + v * LANES, from = low - start, to = high - start;
            if (from >= LANES || to <= 0) continue;
            uint32_t inside = (0xffffu << (from > 0 ? from : 0)) & (0xffffu >> (to < LANES ? LANES - to : 0));
            __mmask16 kept = _mm512_cmpgt_epi32_mask((__m512i)keys[v], _mm512_set1_epi32(threshold_)) & inside;
            _mm512_storeu_si512(keys_ + count_, _mm512_maskz_compress_epi32(kept, (__m512i)keys[v]));
            _mm512_storeu_si512(positions_ + count_, _mm512_maskz_compress_epi32(kept, _mm512_add_epi32(steps, _mm512_set1_epi32((int32_t)start))));
            count_ += __builtin_popcount(kept);
        }
#else
        int32_t lanes[V * LANES];
        GLM5_UNROLL
        for (int v = 0; v < V; v++) *(vi_loose*)(lanes + v * LANES) = keys[v];
        for (int64_t s = low; s < high; s++) add(lanes[s - first], (int32_t)s);
#endif
        if (count_ > limit_) cut();
    }

    // Scores of n ascending positions.
    GLM5_INLINE void push(vf scores, const int32_t* positions, int64_t n) {
        int32_t keys[LANES];
        *(vi_loose*)keys = order_keys(scores);
        append(keys, positions, n);
    }

    // Only scores above the bar change anything from here on; there is none before k candidates were told apart.
    bool is_full() const { return threshold_ != INT32_MIN; }
    float bar() const { return key_to_float(threshold_); }

    // What another stream of earlier positions has kept is followed by what this one has.
    void append(const int32_t* keys, const int32_t* positions, int64_t n) {
        for (int64_t i = 0; i < n; i++) {
            add(keys[i], positions[i]);
            if (count_ > limit_) cut();
        }
    }

    // Cuts to the k best; their number.
    int64_t finish() {
        if (count_ > k_) cut();
        return count_;
    }
    const int32_t* keys() const { return keys_; }
    const int32_t* positions() const { return positions_; }  // ascending

   private:
    GLM5_INLINE void add(int32_t key, int32_t position) {
        keys_[count_] = key, positions_[count_] = position;
        count_ += key > threshold_;
    }

    // A later position never replaces an equal key, so that only greater ones are candidates from here on.
    void cut() {
        pad_keys(keys_, count_);
        threshold_ = kth_largest(keys_, spare_, count_, k_);
        int64_t room = k_ - (threshold_ == INT32_MAX ? 0 : count_from(keys_, count_, threshold_ + 1)), kept = 0;
        for (int64_t i = 0; i < count_; i++) {
            int32_t key = keys_[i];
            int64_t tied = key == threshold_ && room > 0;
            keys_[kept] = key, positions_[kept] = positions_[i];
            kept += tied | (key > threshold_);
            room -= tied;
        }
        count_ = kept;
    }

    int64_t k_, count_, limit_;
    int32_t threshold_;
    int32_t *keys_, *spare_, *positions_;
};

}  // namespace
