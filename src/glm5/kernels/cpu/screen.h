// Which keys can beat a bar in the index scores of a query, told by 8-bit integers at a fraction of the cost of scores.
//
// Queries and keys are rounded: q / a = q' + e, k / b = k' + f with integers q', k', and steps a per head, b per key. So
//     |q.k / (a b) - q'.k'|  <=  |q' + e| |f| + |e| |k'|
// in Euclidean norms, and since relu only rises, replacing each head's q'.k' by what this bound allows (upwards where the
// head's weight is positive, downwards where it is negative) gives an upper bound of the score; it is exactly 0 where
// every head is below zero for certain. `SLACK` covers the fp32 rounding of the score itself and of the bound. A key
// whose bound does not exceed the bar needs no score, so a selection that screens is the one that scores every key.
//
// Integer products are exact: a chunk of 32 dims of a query has norm 140 at most and one of a key 232, so that any part
// of their product fits 16 bits. Keys are stored with 128 added, because the instruction multiplies unsigned by signed
// bytes; sums start from what this adds to them, and may wrap on the way.
#pragma once

#include "simd.h"

#if GLM5_LANES == 16 || GLM5_LANES == 8
#include <immintrin.h>
#endif

namespace {

typedef int16_t vs __attribute__((vector_size(4 * GLM5_LANES)));
typedef uint16_t vus __attribute__((vector_size(4 * GLM5_LANES)));  // sums that may wrap

// Lane l: a[2l] * b[2l] + a[2l + 1] * b[2l + 1] over unsigned bytes of a and signed ones of b; sums fit 16 bits.
GLM5_INLINE vus byte_products(vi a, vi b) {
#if GLM5_LANES == 16
    return (vus)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#elif GLM5_LANES == 8
    return (vus)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#else
    return ((vus)a & 255) * (vus)(((vs)b << 8) >> 8) + ((vus)a >> 8) * (vus)((vs)b >> 8);
#endif
}

// Lane l: a[2l] + a[2l + 1] as signed numbers.
GLM5_INLINE vi pair_sums(vus a) {
#if GLM5_LANES == 16
    return (vi)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1));
#elif GLM5_LANES == 8
    return (vi)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1));
#else
    return (((vi)a << 16) >> 16) + ((vi)a >> 16);
#endif
}

// Bit l: a[l] > bar.
GLM5_INLINE uint32_t lanes_above(vf a, float bar) {
#if GLM5_LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, (__m512)splat(bar), _CMP_GT_OQ);
#elif GLM5_LANES == 8
    return (uint32_t)_mm256_movemask_ps((__m256)(a > splat(bar)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint32_t)(a[i] > bar) << i;
    return bits;
#endif
}

constexpr int64_t DIMS = 32;         // of a chunk, whose products are summed in 16 bits
constexpr int64_t WORDS = DIMS / 4;  // of four bytes
constexpr float QUERY_NORM = 137.0f, KEY_NORM = 229.0f;  // of a chunk before rounding, which adds sqrt(32) / 2 at most
static_assert((137 + 3) * (229 + 3) <= 32767 && 2 * 255 * 63 <= 32767, "products fit 16 bits");

GLM5_INLINE int64_t chunks_of(int64_t dim) { return (dim + DIMS - 1) / DIMS; }

// Steps and weights within which no product of the screen or of a score overflows or loses bits to denormals.
GLM5_INLINE bool is_moderate(float x) { return x == 0.0f || (fabsf(x) > 1e-12f && fabsf(x) < 1e9f); }

// row = step * (integers + rest): norms of both parts.
struct Rounding {
    float step, length, error;
    bool moderate;
};

// Rounds rows of `dim` elements, filled up with zeros to whole chunks.
class Rounder {
   public:
    static int64_t need(int64_t dim) { return 2 * Scratch::need(chunks_of(dim) * DIMS); }
    Rounder(Scratch& scratch, int64_t dim)
        : integers(scratch.take<int8_t>(chunks_of(dim) * DIMS)), dim_(dim), padded_(chunks_of(dim) * DIMS),
          row_(scratch.take<float>(chunks_of(dim) * DIMS)) {
        memset(row_, 0, sizeof(float) * padded_);
    }

    // Integers up to `largest` whose chunks have norms up to `norm`, and half a step per element.
    template <class T> Rounding round(const T* row, float largest, float norm) {
        for (int64_t x = 0; x < dim_; x++) row_[x] = as_float(row[x]);
        float longest = 0.0f, all = 0.0f;
        vf peaks = {};
        for (int64_t c = 0; c < padded_; c += DIMS) {
            vf squares = {};
            for (int64_t x = c; x < c + DIMS; x += LANES) {
                vf v = load(row_ + x);
                squares += v * v;
                peaks = larger(v, larger(-v, peaks));
            }
            float sum = sum_lanes(squares);
            longest = sum > longest ? sum : longest, all += sum;
        }
        float peak = max_lanes(peaks), by_peak = peak / largest, by_norm = sqrtf(longest) / norm;
        float step = by_peak > by_norm ? by_peak : by_norm;
        if (!is_moderate(step) || !(all < 1e30f) || (step == 0.0f && peak > 0.0f)) return {0.0f, 0.0f, 0.0f, false};
        return divide(step);
    }

    int8_t* integers;  // of the last row

   private:
    Rounding divide(float step) {
        const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
        float inverse = step > 0.0f ? 1.0f / step : 0.0f;
        vf lengths = {}, errors = {};
        for (int64_t x = 0; x < padded_; x += LANES) {
            vf scaled = load(row_ + x) * inverse, whole = (scaled + shift) - shift, rest = scaled - whole;
            lengths += whole * whole, errors += rest * rest;
            vi bits = __builtin_convertvector(whole, vi);
            for (int i = 0; i < LANES; i++) integers[x + i] = (int8_t)bits[i];
        }
        // A quotient is wrong by 1e-4 at most, a sum of squares by less than 1e-4 of itself.
        float lost = 1e-4f * sqrtf((float)dim_);
        return {step, 1.0001f * sqrtf(sum_lanes(lengths)), 1.0001f * sqrtf(sum_lanes(errors)) + lost, true};
    }

    int64_t dim_, padded_;
    float* row_;
};

// The keys first .. last of a slot: for every LANES keys [words, LANES], each word four bytes of one key.
struct RoundedKeys {
    int64_t first, last, dim;
    uint32_t* words;
    float *steps, *floors;    // of each key; the floor of one that cannot be screened is infinite, else 0
    float *lengths, *errors;  // of each key: norms of its integers and of its rest
    float longest, error;     // the greatest of them

    static int64_t need(int64_t keys, int64_t dim) {
        return Scratch::need(round_up(keys) * chunks_of(dim) * WORDS) + 4 * Scratch::need(round_up(keys));
    }
    RoundedKeys(Scratch& scratch, int64_t first_, int64_t last_, int64_t dim_)
        : first(first_), last(last_), dim(dim_),
          words(scratch.take<uint32_t>(round_up(last_ - first_) * chunks_of(dim_) * WORDS)),
          steps(scratch.take<float>(round_up(last_ - first_))), floors(scratch.take<float>(round_up(last_ - first_))),
          lengths(scratch.take<float>(round_up(last_ - first_))), errors(scratch.take<float>(round_up(last_ - first_))),
          longest(0.0f), error(0.0f) {}

    // Fills in LANES keys from key `at` on.
    template <class T> void round(int64_t at, const T* const* entries, Rounder& rounder) {
        int64_t count = chunks_of(dim) * WORDS, place = at - first;
        for (int64_t i = 0; i < LANES; i++) {
            Rounding rounding = rounder.round(entries[i], 127.0f, KEY_NORM);
            steps[place + i] = rounding.step, floors[place + i] = rounding.moderate ? 0.0f : INFINITY;
            lengths[place + i] = rounding.length, errors[place + i] = rounding.error;
            for (int64_t word = 0; word < count; word++) {
                uint32_t bytes = 0;
                if (rounding.moderate) memcpy(&bytes, rounder.integers + 4 * word, 4);
                words[place * count + word * LANES + i] = bytes ^ 0x80808080u;
            }
        }
    }

    // To be called when all keys are filled in.
    void finish() {
        for (int64_t i = 0; i < last - first; i++) {
            longest = lengths[i] > longest ? lengths[i] : longest;
            error = errors[i] > error ? errors[i] : error;
        }
    }
};

// One query against rounded keys.
class Screen {
   public:
    static int64_t need(int64_t heads, int64_t dim) {
        return Scratch::need(padded(heads) * chunks_of(dim) * WORDS) + Scratch::need(padded(heads) * chunks_of(dim)) +
               2 * Scratch::need(padded(heads));
    }
    Screen(Scratch& scratch, int64_t heads, int64_t dim)
        : heads_(heads), dim_(dim), words_(scratch.take<int32_t>(padded(heads) * chunks_of(dim) * WORDS)),
          starts_(scratch.take<int32_t>(padded(heads) * chunks_of(dim))), errors_(scratch.take<int32_t>(padded(heads))),
          factors_(scratch.take<float>(padded(heads))) {}

    // q [heads, dim], w [heads]. Whether the query can be screened.
    bool set(const float* q, const float* w, const RoundedKeys& keys, Rounder& rounder) {
        int64_t chunks = chunks_of(dim_);
        const float slack = (float)(heads_ + dim_ + 8) * SLACK;
        memset(words_, 0, sizeof(int32_t) * padded(heads_) * chunks * WORDS);
        memset(starts_, 0, sizeof(int32_t) * padded(heads_) * chunks);
        memset(errors_, 0, sizeof(int32_t) * padded(heads_));
        memset(factors_, 0, sizeof(float) * padded(heads_));
        for (int64_t j = 0; j < heads_; j++) {
            Rounding head = rounder.round(q + j * dim_, 63.0f, QUERY_NORM);
            if (!head.moderate || !is_moderate(w[j])) return false;
            memcpy(words_ + j * chunks * WORDS, rounder.integers, chunks * DIMS);
            for (int64_t c = 0; c < chunks; c++) starts_[j * chunks + c] = offset(rounder.integers + c * DIMS);
            float length = head.length + head.error;
            float error = length * keys.error + head.error * keys.longest + slack * length * (keys.longest + keys.error) + 1.0f;
            int32_t bound = (int32_t)ceilf(error);
            factors_[j] = w[j] * head.step, errors_[j] = w[j] > 0.0f ? bound : -bound;
        }
        return true;
    }

    // Upper bounds of the scores of V * LANES keys from `at` on.
    template <int V> GLM5_INLINE void bounds(const RoundedKeys& keys, int64_t at, vf* out) const {
        int64_t chunks = chunks_of(dim_), place = at - keys.first;
        const uint32_t* words = keys.words + place * chunks * WORDS;
        vf totals[V];
        GLM5_UNROLL
        for (int v = 0; v < V; v++) totals[v] = (vf){};
        for (int64_t j = 0; j < heads_; j += HEADS) {
            vi dots[HEADS * V];
            chunk_products<V>(words, j, 0, dots);
            for (int64_t c = 1; c < chunks; c++) {
                vi more[HEADS * V];
                chunk_products<V>(words, j, c, more);
                GLM5_UNROLL
                for (int i = 0; i < HEADS * V; i++) dots[i] += more[i];
            }
            GLM5_UNROLL
            for (int i = 0; i < HEADS * V; i++) {
                vi dot = dots[i] + errors_[j + i / V], zero = {};
                totals[i % V] += __builtin_convertvector(dot > zero ? dot : zero, vf) * factors_[j + i / V];
            }
        }
        GLM5_UNROLL
        for (int v = 0; v < V; v++)
            out[v] = totals[v] * load(keys.steps + place + v * LANES) + load(keys.floors + place + v * LANES);
    }

   private:
    static constexpr int HEADS = 4;  // that share a load of keys
    static constexpr float SLACK = 0x1p-22f;

    static int64_t padded(int64_t heads) { return (heads + HEADS - 1) / HEADS * HEADS; }

    // What the 128 in the keys adds to the two sums of a chunk, with its sign changed: 16 bits each.
    static int32_t offset(const int8_t* q) {
        uint32_t sums[2] = {0, 0};
        for (int64_t x = 0; x < DIMS; x++) sums[x / 2 % 2] -= 128u * (uint32_t)(int32_t)q[x];
        return (int32_t)((sums[0] & 0xffff) | sums[1] << 16);
    }

    template <int V> GLM5_INLINE void chunk_products(const uint32_t* words, int64_t j, int64_t c, vi* out) const {
        int64_t chunks = chunks_of(dim_), count = chunks * WORDS;
        vus sums[HEADS * V];
        GLM5_UNROLL
        for (int i = 0; i < HEADS * V; i++) sums[i] = (vus)(starts_[(j + i / V) * chunks + c] - (vi){});
        for (int64_t word = c * WORDS; word < (c + 1) * WORDS; word++) {
            vi key[V];
            GLM5_UNROLL
            for (int v = 0; v < V; v++) key[v] = *(const vi_loose*)(words + (v * count + word) * LANES);
            GLM5_UNROLL
            for (int h = 0; h < HEADS; h++) {
                vi q = words_[(j + h) * count + word] - (vi){};
                GLM5_UNROLL
                for (int v = 0; v < V; v++) sums[h * V + v] += byte_products(key[v], q);
            }
        }
        GLM5_UNROLL
        for (int i = 0; i < HEADS * V; i++) out[i] = pair_sums(sums[i]);
    }

    int64_t heads_, dim_;
    int32_t *words_, *starts_, *errors_;
    float* factors_;
};

}  // namespace
