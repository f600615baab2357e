// Exact top-k index keys of a query without an exact score for every key.
//
// Keys and queries are rounded to integers small enough that dot products fit int32; integer products run at twice the
// rate of fp32 ones. An upper bound of the rounding error of a score tells which keys can be among the k best; only those
// are scored exactly, with the bits of `index_scores_block`, and chosen by the rules of topk.h. The result is therefore
// that of scoring every key in fp32.
#pragma once

#include "index.h"
#include "topk.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

// Lane l: a[2l] * b[2l] + a[2l + 1] * b[2l + 1] over int16 pairs.
GLM5_INLINE vi multiply_pairs(vi a, vi b) {
#if GLM5_LANES == 16
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif GLM5_LANES == 8
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Whether any of LANES values reaches the bar.
GLM5_INLINE bool any_from(const float* values, float bar) {
#if GLM5_LANES == 16
    return _mm512_cmp_ps_mask((__m512)load(values), (__m512)splat(bar), _CMP_GE_OQ) != 0;
#elif GLM5_LANES == 8
    return _mm256_movemask_ps((__m256)(load(values) >= splat(bar))) != 0;
#else
    vi reached = load(values) >= splat(bar);
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= reached[i];
    return any != 0;
#endif
}

constexpr int64_t KEY_TILE = 32 * LANES;  // keys that are visited by all queries of a block before the next ones
constexpr int64_t HEAD_BLOCK = 4;         // heads that share a load of keys

GLM5_INLINE int64_t ceil_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
GLM5_INLINE float magnitude(float x) { return x < 0.0f ? -x : x; }

// Integers up to this keep a dot product over `dim` elements in int32.
GLM5_INLINE float integer_limit(int64_t dim) {
    float limit = floorf(sqrtf(2147483000.0f / (float)ceil_to(dim, 2)));
    return limit < 32767.0f ? limit : 32767.0f;
}

// The keys of one batch entry as integers: [keys / LANES, dim / 2, LANES] pairs.
struct RoundedKeys {
    int32_t* pairs;
    int64_t dim, keys;
    float step;     // key = integer * step, up to step / 2
    float largest;  // |element|
    float longest;  // sum of |elements| of a key
    bool finite;

    static int64_t need(int64_t keys, int64_t dim) { return Scratch::need(ceil_to(keys, KEY_TILE) * ceil_to(dim, 2) / 2); }
    RoundedKeys(Scratch& scratch, const float* source, int64_t keys_, int64_t dim_)
        : pairs(scratch.take<int32_t>(ceil_to(keys_, KEY_TILE) * ceil_to(dim_, 2) / 2)), dim(dim_), keys(keys_), largest(0.0f),
          longest(0.0f), finite(true) {
        for (int64_t s = 0; s < keys; s++) {
            float sum = 0.0f;
            for (int64_t x = 0; x < dim; x++) {
                float size = magnitude(source[s * dim + x]);
                largest = size > largest ? size : largest;
                sum += size;
            }
            finite = finite && sum <= 3e38f;  // false for NaN too
            longest = sum > longest ? sum : longest;
        }
        step = largest > 0.0f ? largest / integer_limit(dim) : 1.0f;
        if (!finite) return;
        memset(pairs, 0, sizeof(int32_t) * ceil_to(keys, KEY_TILE) * ceil_to(dim, 2) / 2);
        int16_t* elements = reinterpret_cast<int16_t*>(pairs);
        float inverse = 1.0f / step;
        for (int64_t s = 0; s < keys; s++)
            for (int64_t x = 0; x < dim; x++)
                elements[((s / LANES * (ceil_to(dim, 2) / 2) + x / 2) * LANES + s % LANES) * 2 + x % 2] =
                    (int16_t)lrintf(source[s * dim + x] * inverse);
    }
};

// One query: its integers, the error bound of its approximate scores, and the keys that may be among its k best.
struct Candidates {
    int64_t heads, dim, topk, room, count;
    int32_t* pairs;   // [heads, dim / 2]
    float* factors;   // approximate score = sum over heads of factor * relu(integer product)
    float* scores;    // of the candidates; [room]
    int32_t* positions;
    float error, bar;  // keys below bar cannot be among the k best
    bool usable;       // false: not finite, or more keys near the bar than there is room for; then score every key

    static int64_t padded(int64_t heads) { return ceil_to(heads, HEAD_BLOCK); }
    static int64_t room_of(int64_t topk) { return 4 * topk + 2 * KEY_TILE; }
    static int64_t need(int64_t heads, int64_t dim, int64_t topk) {
        return Scratch::need(padded(heads) * ceil_to(dim, 2) / 2) + Scratch::need(padded(heads)) +
               2 * Scratch::need(room_of(topk) + 4 * LANES);
    }
    Candidates(Scratch& scratch, int64_t heads_, int64_t dim_, int64_t topk_)
        : heads(heads_), dim(dim_), topk(topk_), room(room_of(topk_)), count(0),
          pairs(scratch.take<int32_t>(padded(heads_) * ceil_to(dim_, 2) / 2)), factors(scratch.take<float>(padded(heads_))),
          scores(scratch.take<float>(room_of(topk_) + 4 * LANES)), positions(scratch.take<int32_t>(room_of(topk_) + 4 * LANES)) {}

    // q [heads, dim] and w [heads] of one query.
    void start(const float* q, const float* w, float scale, const RoundedKeys& keys) {
        memset(pairs, 0, sizeof(int32_t) * padded(heads) * ceil_to(dim, 2) / 2);
        memset(factors, 0, sizeof(float) * padded(heads));
        int16_t* elements = reinterpret_cast<int16_t*>(pairs);
        float limit = integer_limit(dim), exact = (float)(dim + heads + 16) * 2.4e-7f;
        count = 0, error = 0.0f, bar = -INFINITY, usable = true;
        for (int64_t j = 0; j < heads; j++) {
            float largest = 0.0f, length = 0.0f;
            for (int64_t x = 0; x < dim; x++) {
                float size = magnitude(q[j * dim + x]);
                largest = size > largest ? size : largest;
                length += size;
            }
            usable = usable && length <= 3e38f && magnitude(w[j]) <= 3e38f;
            if (!usable) return;
            float step = largest > 0.0f ? largest / limit : 1.0f, inverse = 1.0f / step;
            for (int64_t x = 0; x < dim; x++)
                elements[j * ceil_to(dim, 2) + x] = (int16_t)lrintf(q[j * dim + x] * inverse);
            factors[j] = w[j] * scale * step * keys.step;
            // |q k - q' k'| summed over the head: each factor off by at most half a step; then fp32 rounding.
            float rounded = 0.51f * keys.step * (length + 0.5f * step * (float)dim) + 0.51f * step * keys.longest;
            error += magnitude(w[j]) * magnitude(scale) * (rounded + exact * length * keys.largest);
        }
        usable = keys.finite && error <= 3e38f;
    }

    // Approximate scores of the keys of one tile from group `first` on, groups of LANES keys, two at a time.
    void score(const RoundedKeys& keys, int64_t first, int64_t groups, float* out) const {
        int64_t half = ceil_to(dim, 2) / 2;
        for (int64_t g = 0; g < groups; g += 2) {
            const int32_t* block = keys.pairs + (first + g) * half * LANES;
            vf low = {}, high = {};
            for (int64_t j = 0; j < padded(heads); j += HEAD_BLOCK) {
                vi a[HEAD_BLOCK], b[HEAD_BLOCK];
                GLM5_UNROLL
                for (int i = 0; i < HEAD_BLOCK; i++) a[i] = b[i] = (vi){};
                const int32_t* q = pairs + j * half;
                for (int64_t x = 0; x < half; x++) {
                    vi k0 = *(const vi_loose*)(block + x * LANES), k1 = *(const vi_loose*)(block + (half + x) * LANES);
                    GLM5_UNROLL
                    for (int i = 0; i < HEAD_BLOCK; i++) {
                        vi pair = q[i * half + x] - (vi){};
                        a[i] += multiply_pairs(pair, k0);
                        b[i] += multiply_pairs(pair, k1);
                    }
                }
                GLM5_UNROLL
                for (int i = 0; i < HEAD_BLOCK; i++) {
                    vi zero = {};
                    low += __builtin_convertvector(a[i] > zero ? a[i] : zero, vf) * factors[j + i];
                    high += __builtin_convertvector(b[i] > zero ? b[i] : zero, vf) * factors[j + i];
                }
            }
            store(out + g * LANES, low);
            store(out + (g + 1) * LANES, high);
        }
    }

    // Takes in the keys [begin, end) whose approximate scores are values[position - base].
    void offer(const float* values, int64_t base, int64_t begin, int64_t end, int32_t* order, int32_t* spare) {
        for (int64_t s = begin; s < end;) {
            if (s + LANES <= end && !any_from(values + s - base, bar)) {
                s += LANES;
                continue;
            }
            int64_t stop = at_most(s + LANES, end);
            for (; s < stop; s++) {
                scores[count] = values[s - base], positions[count] = (int32_t)s;
                count += values[s - base] >= bar;
            }
        }
        if (count <= room - KEY_TILE) return;
        prune(order, spare);
        usable = count <= room - KEY_TILE;
    }

    // Raises the bar to what k candidates reach and drops those below. `order` and `spare` have topk_scratch(room).
    void prune(int32_t* order, int32_t* spare) {
        if (count <= topk) return;
        for (int64_t i = 0; i < count; i += LANES) *(vi_loose*)(order + i) = order_keys(load(scores + i));
        pad_keys(order, count);
        bar = key_to_float(kth_largest(order, spare, count, topk)) - 2.0f * error;
        bar -= magnitude(bar) * 1e-6f;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            scores[kept] = scores[i], positions[kept] = positions[i];
            kept += scores[i] >= bar;
        }
        count = kept;
    }
};

}  // namespace
