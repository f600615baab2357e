// A paged cache, and which part of it each of many queries reads.
//
// A slot is a row of the block table: its position s is entry s % block of block table[slot][s / block].
#pragma once

#include "simd.h"

namespace {

// The keys of a query in a paged cache: position s of its slot is row blocks[s / block] * block + s % block.
struct Keys {
    const int32_t* blocks;     // of the slot
    int64_t block;             // positions of a block
    const int32_t* positions;  // ascending; null: 0, 1, ...

    // Rows of keys begin .. end of the list.
    void rows(int64_t begin, int64_t end, int32_t* out) const {
        int64_t stop = 0, shift = 0;
        for (int64_t i = begin; i < end; i++) {
            int64_t s = positions ? positions[i] : i;
            if (s >= stop) {
                int64_t number = (uint32_t)s / (uint32_t)block;
                stop = (number + 1) * block, shift = (blocks[number] - number) * block;
            }
            out[i - begin] = (int32_t)(s + shift);
        }
    }
};

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

}  // namespace
