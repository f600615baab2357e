// Integer matrix products: inputs rounded to 8 bits per token, INT8 weights by row or INT4 weights in groups.
//
// Contracts: `int8_linear` and `int4_linear` of `kernels/integer.py`, bit for bit: integer sums are exact, group sums
// are added in double in ascending order, and each output is scaled in the order that the reference states.

#include "simd.h"

#if GLM5_LANES == 16 || GLM5_LANES == 8
#include <immintrin.h>
#endif

namespace {

constexpr int64_t WIDTH = 2 * LANES;  // int16 values in one vector
constexpr int64_t BLOCK = 4;          // weight rows that are multiplied at once
constexpr int64_t CHUNK = 64;         // tokens whose rounded inputs stay in the caches

#if GLM5_LANES == 16
typedef __m512i sums;
GLM5_INLINE sums no_sums() { return _mm512_setzero_si512(); }
GLM5_INLINE sums add_products(sums s, const int16_t* a, const int16_t* b) {
    return _mm512_add_epi32(s, _mm512_madd_epi16(_mm512_loadu_si512(a), _mm512_loadu_si512(b)));
}
#elif GLM5_LANES == 8
typedef __m256i sums;
GLM5_INLINE sums no_sums() { return _mm256_setzero_si256(); }
GLM5_INLINE sums add_products(sums s, const int16_t* a, const int16_t* b) {
    return _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_loadu_si256((const __m256i*)a), _mm256_loadu_si256((const __m256i*)b)));
}
#else
struct sums {
    int32_t x[LANES];
};
GLM5_INLINE sums no_sums() { return sums{}; }
GLM5_INLINE sums add_products(sums s, const int16_t* a, const int16_t* b) {
    for (int i = 0; i < LANES; i++) s.x[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return s;
}
#endif

GLM5_INLINE int32_t total(sums s) {
    int32_t x[LANES], sum = 0;
    memcpy(x, &s, sizeof x);
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

// out[i] = x[i] . rows[i] over n values, n a multiple of WIDTH (the caller pads with zeros).
GLM5_INLINE void dot_block(const int16_t* x, const int16_t* const* rows, int64_t n, int32_t* out) {
    sums s[BLOCK];
    for (int i = 0; i < BLOCK; i++) s[i] = no_sums();
    for (int64_t d = 0; d < n; d += WIDTH)
        for (int i = 0; i < BLOCK; i++) s[i] = add_products(s[i], x + d, rows[i] + d);
    for (int i = 0; i < BLOCK; i++) out[i] = total(s[i]);
}

// How the inputs of a row lie in memory: groups of `group`, each padded to `padded` with zeros.
struct Layout {
    int64_t inputs, group, groups, padded;
    Layout(int64_t inputs, int64_t group) : inputs(inputs), group(group) {
        groups = (inputs + group - 1) / group;
        padded = (group + WIDTH - 1) / WIDTH * WIDTH;
    }
    int64_t row() const { return groups * padded; }
    int64_t count(int64_t g) const { return at_most(group, inputs - g * group); }
};

// One token: 8-bit levels at `out` (spread by `layout`, gaps zeroed) and the scale.
static float round_token(const float* x, const Layout& layout, int16_t* out) {
    float largest = 0.0f;
    bool is_number = true;
    for (int64_t i = 0; i < layout.inputs; i++) {
        float size = fabsf(x[i]);
        is_number &= size == size;
        largest = size > largest ? size : largest;
    }
    float scale = largest / 127.0f;
    if (!is_number) scale = NAN;
    if (scale < 0x1p-126f) scale = 0x1p-126f;
    memset(out, 0, sizeof(int16_t) * layout.row());
    for (int64_t g = 0; g < layout.groups; g++)
        for (int64_t i = 0; i < layout.count(g); i++) {
            float level = rintf(x[g * layout.group + i] / scale);
            level = level < 127.0f ? level : 127.0f;  // NaN becomes 127: its row is NaN by its scale
            out[g * layout.padded + i] = (int16_t)(level > -127.0f ? level : -127.0f);
        }
    return scale;
}

static void spread_int8(const int8_t* row, const Layout& layout, int16_t* out) {
    for (int64_t i = 0; i < layout.inputs; i++) out[i] = row[i];
}

static void spread_int4(const int32_t* words, const Layout& layout, int16_t* out) {
    const uint8_t* bytes = (const uint8_t*)words;  // little-endian: byte j holds levels 2j and 2j + 1
    for (int64_t g = 0; g < layout.groups; g++) {
        const uint8_t* from = bytes + g * layout.group / 2;
        int16_t* to = out + g * layout.padded;
        int64_t count = layout.count(g);
        for (int64_t j = 0; j < count / 2; j++) {
            to[2 * j] = (int16_t)((from[j] & 15) - 8);
            to[2 * j + 1] = (int16_t)((from[j] >> 4) - 8);
        }
        if (count % 2) to[count - 1] = (int16_t)((from[count / 2] & 15) - 8);
    }
}

// y[m][n] for all tokens and outputs; `spread(n, row)` writes weight row n, `finish(sums, n)` scales its group sums.
template <class Spread, class Finish>
static void multiply(const float* x, int64_t stride, int64_t tokens, int64_t outputs, const Layout& layout, float* y,
                     int threads, const Spread& spread, const Finish& finish) {
    Scratch inputs(Scratch::need(CHUNK * layout.row(), 2) + Scratch::need(CHUNK));
    int16_t* levels = inputs.take<int16_t>(CHUNK * layout.row());
    float* scales = inputs.take<float>(CHUNK);
    for (int64_t first = 0; first < tokens; first += CHUNK) {
        int64_t count = at_most(CHUNK, tokens - first);
        parallel(count, 8, threads, [&](int64_t begin, int64_t end) {
            for (int64_t m = begin; m < end; m++)
                scales[m] = round_token(x + (first + m) * stride, layout, levels + m * layout.row());
        });
        parallel((outputs + BLOCK - 1) / BLOCK, 4, threads, [&](int64_t begin, int64_t end) {
            Scratch scratch(Scratch::need(BLOCK * layout.row(), 2) + Scratch::need(BLOCK * layout.groups));
            int16_t* weights = scratch.take<int16_t>(BLOCK * layout.row());
            int32_t* sums = scratch.take<int32_t>(BLOCK * layout.groups);
            memset(weights, 0, sizeof(int16_t) * BLOCK * layout.row());
            for (int64_t block = begin; block < end; block++) {
                int64_t n = block * BLOCK, rows = at_most(BLOCK, outputs - n);
                for (int64_t i = 0; i < rows; i++) spread(n + i, weights + i * layout.row());
                for (int64_t m = 0; m < count; m++) {
                    for (int64_t g = 0; g < layout.groups; g++) {
                        const int16_t* rows_g[BLOCK];
                        for (int64_t i = 0; i < BLOCK; i++) rows_g[i] = weights + i * layout.row() + g * layout.padded;
                        dot_block(levels + m * layout.row() + g * layout.padded, rows_g, layout.padded, sums + g * BLOCK);
                    }
                    for (int64_t i = 0; i < rows; i++)
                        y[(first + m) * outputs + n + i] = finish(sums + i, n + i) * scales[m];
                }
            }
        });
    }
}

}  // namespace

// x [tokens, inputs] with row stride, weight int8 [outputs, inputs], scale bf16 [outputs] -> y [tokens, outputs].
GLM5_EXPORT(int8_linear)(const float* x, int64_t stride, const int8_t* weight, const bf16* scale, int64_t tokens,
                         int64_t outputs, int64_t inputs, float* y, int threads) {
    Layout layout(inputs, inputs);
    multiply(x, stride, tokens, outputs, layout, y, threads,
             [&](int64_t n, int16_t* row) { spread_int8(weight + n * inputs, layout, row); },
             [&](const int32_t* sum, int64_t n) { return (float)sum[0] * as_float(scale[n]); });
    return 0;
}

// The same with words int32 [outputs, ceil(inputs / 8)] and scale bf16 [outputs, ceil(inputs / group)]; group is a
// multiple of 8 or the whole row.
GLM5_EXPORT(int4_linear)(const float* x, int64_t stride, const int32_t* words, const bf16* scale, int64_t tokens,
                         int64_t outputs, int64_t inputs, int64_t group, float* y, int threads) {
    Layout layout(inputs, group);
    multiply(x, stride, tokens, outputs, layout, y, threads,
             [&](int64_t n, int16_t* row) { spread_int4(words + n * ((inputs + 7) / 8), layout, row); },
             [&](const int32_t* sums, int64_t n) {
                 double sum = 0.0;
                 for (int64_t g = 0; g < layout.groups; g++)
                     sum += (double)sums[g * BLOCK] * (double)as_float(scale[n * layout.groups + g]);
                 return (float)sum;
             });
    return 0;
}
