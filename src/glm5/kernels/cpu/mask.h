// Boolean masks of queries and keys, read row by row as ascending key positions.
#pragma once

#include "simd.h"

namespace {

// [batch, queries, keys] with the last dimension contiguous; a stride of 0 repeats.
struct Mask {
    const uint8_t* valid;
    int64_t batch_stride, query_stride, keys;

    // Writes the valid positions of a row, returns their number. `positions` has room for keys + 8.
    int64_t row(int64_t b, int64_t t, int32_t* positions) const {
        const uint8_t* bytes = this->bytes(b, t);
        int64_t n = 0, s = 0;
        for (; s + 8 <= keys; s += 8) {
            uint64_t word;
            memcpy(&word, bytes + s, 8);
            if (!word) continue;
            for (int i = 0; i < 8; i++) {
                positions[n] = (int32_t)(s + i);
                n += bytes[s + i];
            }
        }
        for (; s < keys; s++) {
            positions[n] = (int32_t)s;
            n += bytes[s];
        }
        return n;
    }

    const uint8_t* bytes(int64_t b, int64_t t) const { return valid + b * batch_stride + t * query_stride; }

    // Number of valid keys of a row; widens [first, last) to cover them.
    int64_t cover(int64_t b, int64_t t, int64_t& first, int64_t& last) const {
        const uint8_t* row = bytes(b, t);
        int64_t n = 0, s = 0, low = keys, high = 0;
        for (; s + 8 <= keys; s += 8) {
            uint64_t word;
            memcpy(&word, row + s, 8);
            if (!word) continue;
            n += __builtin_popcountll(word);
            low = low < s ? low : s, high = s + 8;
        }
        for (; s < keys; s++)
            if (row[s]) n++, low = low < s ? low : s, high = s + 1;
        if (low < first) first = low;
        if (high > last) last = high;
        return n;
    }
};

typedef uint8_t vb_loose __attribute__((vector_size(GLM5_LANES), aligned(1), may_alias));

// x where the mask byte is set, `other` elsewhere.
GLM5_INLINE vf where(const uint8_t* bytes, vf x, vf other) {
    return __builtin_convertvector(*(const vb_loose*)bytes, vi) != 0 ? x : other;
}

}  // namespace
