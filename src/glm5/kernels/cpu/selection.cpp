// Sparse attention in training by lists of selected keys (fp32): which keys, attention over them, the indexer's loss.
//
// A list is one row of `positions` [batches, queries, room]: ascending keys, then -1. Cost and memory of everything but
// the selection itself follow the length of the lists, not that of the row.

#include "gather.h"
#include "indexer.h"
#include "select.h"

namespace {

constexpr int64_t QUERY_BLOCK = 16;  // queries that visit a tile of keys together
constexpr int64_t PARTS = 8;         // shares of a batch entry whose key gradients are summed apart, then in order

// Rows of [batch, tokens, heads, elements] with contiguous elements.
struct Tokens {
    const float* data;
    int64_t batch, token, head;
    const float* at(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * token + h * head; }
};

struct Lists {
    const int32_t* positions;
    int64_t queries, room;
    const int32_t* row(int64_t b, int64_t t) const { return positions + (b * queries + t) * room; }
    int64_t count(int64_t b, int64_t t) const {  // ascending, so the end is found by bisection
        const int32_t* list = row(b, t);
        int64_t low = 0, high = room;
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (list[middle] >= 0) low = middle + 1;
            else high = middle;
        }
        return low;
    }
};

// The k best of the candidates by exact score; all keys [begin, end) are candidates when these are not usable.
struct Chooser {
    IndexQuery query;
    int32_t *all, *order, *spare, *best;
    float* values;

    static int64_t need(int64_t heads, int64_t dim, int64_t keys, int64_t room) {
        int64_t n = keys > room ? keys : room;
        return IndexQuery::need(heads, dim) + 2 * Scratch::need(n + 8) + 2 * Scratch::need(topk_scratch(n)) +
               Scratch::need(n + LANES);
    }
    Chooser(Scratch& scratch, int64_t heads, int64_t dim, int64_t keys, int64_t room) : query(scratch, heads, dim) {
        int64_t n = keys > room ? keys : room;
        all = scratch.take<int32_t>(n + 8), best = scratch.take<int32_t>(n + 8);
        order = scratch.take<int32_t>(topk_scratch(n)), spare = scratch.take<int32_t>(topk_scratch(n));
        values = scratch.take<float>(n + LANES);
    }
    void choose(const float* q, const float* w, float scale, const float* keys, int64_t dim, const int32_t* positions,
                int64_t count, int64_t topk, int32_t* list) {
        query.set(q, w, scale);
        for (int64_t i = 0; i < count; i += LANES) {
            const float* rows[LANES];
            for (int j = 0; j < LANES; j++) rows[j] = keys + positions[at_most(i + j, count - 1)] * dim;
            store(values + i, index_scores_block(query, rows));
        }
        int64_t kept = select_topk(values, count, topk, order, spare, best);
        for (int64_t i = 0; i < kept; i++) list[i] = positions[best[i]];
    }
};

// Asks for the listed rows of `size` elements before they are used: the next list is known while this one is worked on.
GLM5_INLINE void fetch_rows(const float* rows, int64_t stride, const int32_t* list, int64_t n, int64_t size) {
    for (int64_t i = 0; i < n; i++) {
        const char* row = reinterpret_cast<const char*>(rows + list[i] * stride);
        for (int64_t byte = 0; byte < size * (int64_t)sizeof(float); byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }
}

static int64_t list_range(int64_t first, int64_t last, int32_t* list) {
    for (int64_t s = first; s < last; s++) list[s - first] = (int32_t)s;
    return last - first;
}

}  // namespace

// positions [batches, queries, topk], written whole: the min(topk, visible) best of the keys [first, last) of each query
// (int32 [batches, queries]). q [batches, queries, heads, dim], k [batches, keys, dim], w [batches, queries, heads].
GLM5_EXPORT(select_positions)(const float* q, const float* k, const float* w, const int32_t* first, const int32_t* last,
                              int64_t batches, int64_t queries, int64_t keys, int64_t heads, int64_t dim, float scale,
                              int64_t topk, int32_t* positions, int threads) {
    int64_t blocks = (queries + QUERY_BLOCK - 1) / QUERY_BLOCK;
    memset(positions, 0xff, sizeof(int32_t) * batches * queries * topk);
    for (int64_t b = 0; b < batches; b++) {
        Scratch shared(RoundedKeys::need(keys, dim));
        const float* keys_of_row = k + b * keys * dim;
        RoundedKeys rounded(shared, keys_of_row, keys, dim);
        parallel(blocks, 1, threads, [&](int64_t begin, int64_t end) {
            int64_t room = Candidates::room_of(topk), each = Candidates::need(heads, dim, topk);
            Scratch scratch(QUERY_BLOCK * each + Chooser::need(heads, dim, keys, room) + Scratch::need(KEY_TILE));
            Chooser chooser(scratch, heads, dim, keys, room);
            float* scores = scratch.take<float>(KEY_TILE);
            Candidates* lanes = static_cast<Candidates*>(malloc(sizeof(Candidates) * QUERY_BLOCK));
            if (!lanes) abort();
            for (int64_t i = 0; i < QUERY_BLOCK; i++) lanes[i] = Candidates(scratch, heads, dim, topk);
            for (int64_t block = begin; block < end; block++) {
                int64_t from = b * queries + block * QUERY_BLOCK, count = at_most(QUERY_BLOCK, queries - block * QUERY_BLOCK);
                int64_t low = keys, high = 0;
                for (int64_t i = 0; i < count; i++) {
                    int64_t row = from + i;
                    if (last[row] - first[row] <= topk) continue;
                    lanes[i].start(q + row * heads * dim, w + row * heads, scale, rounded);
                    low = at_most(low, first[row]), high = last[row] > high ? last[row] : high;
                }
                for (int64_t tile = low / KEY_TILE * KEY_TILE; tile < high; tile += KEY_TILE)
                    for (int64_t i = 0; i < count; i++) {
                        int64_t row = from + i, start = first[row] > tile ? first[row] : tile;
                        int64_t stop = at_most(last[row], tile + KEY_TILE);
                        if (last[row] - first[row] <= topk || start >= stop || !lanes[i].usable) continue;
                        lanes[i].score(rounded, tile / LANES, ceil_to(stop - tile, 2 * LANES) / LANES, scores);
                        lanes[i].offer(scores, tile, start, stop, chooser.order, chooser.spare);
                    }
                for (int64_t i = 0; i < count; i++) {
                    int64_t row = from + i;
                    int32_t* list = positions + row * topk;
                    if (last[row] - first[row] <= topk) {
                        list_range(first[row], last[row], list);
                        continue;
                    }
                    if (lanes[i].usable) lanes[i].prune(chooser.order, chooser.spare);
                    int64_t n = lanes[i].usable ? lanes[i].count : list_range(first[row], last[row], chooser.all);
                    chooser.choose(q + row * heads * dim, w + row * heads, scale, keys_of_row, dim,
                                   lanes[i].usable ? lanes[i].positions : chooser.all, n, topk, list);
                }
            }
            free(lanes);
        });
    }
    return 0;
}

#define GLM5_SELECTED_ARGUMENTS                                                                                          \
    const float *q, int64_t q_batch, int64_t q_token, int64_t q_head, const float *k, int64_t k_batch, int64_t k_token, \
        int64_t k_head, const float *v, int64_t v_batch, int64_t v_token, int64_t v_head, const int32_t *positions,     \
        int64_t room, int64_t batches, int64_t queries, int64_t keys, int64_t heads, int64_t dim, int64_t width,        \
        float scale
#define GLM5_SELECTED                                                        \
    Tokens q_rows{q, q_batch, q_token, q_head}, k_rows{k, k_batch, k_token, k_head}, v_rows{v, v_batch, v_token, v_head}; \
    Lists lists { positions, queries, room }

// out [batches, queries, heads, width], log_sums [batches, queries, heads] and, unless null, target [batches, queries,
// room] (mean over heads of the attention weights, 0 behind the list), contiguous, written whole.
GLM5_EXPORT(selected_attention)(GLM5_SELECTED_ARGUMENTS, float* out, float* log_sums, float* target, int threads) {
    GLM5_SELECTED;
    int64_t pair = dim + width, stride = heads * pair;  // key and value of a head side by side, all heads of a token
    Scratch shared(Scratch::need(batches * keys * stride));
    float* pairs = shared.take<float>(batches * keys * stride);
    parallel(batches * keys, 256, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            for (int64_t h = 0; h < heads; h++) {
                memcpy(pairs + row * stride + h * pair, k_rows.at(row / keys, row % keys, h), sizeof(float) * dim);
                memcpy(pairs + row * stride + h * pair + dim, v_rows.at(row / keys, row % keys, h), sizeof(float) * width);
            }
    });
    parallel(batches * queries, 64, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(Scratch::need(room + LANES));
        float* weights = scratch.take<float>(room + LANES);
        for (int64_t row = begin; row < end; row++) {
            int64_t b = row / queries, t = row % queries, n = lists.count(b, t);
            const int32_t* list = lists.row(b, t);
            const float* rows = pairs + b * keys * stride;
            if (t + 1 < queries) fetch_rows(rows, stride, lists.row(b, t + 1), lists.count(b, t + 1), stride);
            if (target) memset(target + row * room, 0, sizeof(float) * room);
            for (int64_t h = 0; h < heads; h++) {
                float log_sum = 0.0f;
                if (n) {
                    dots(q_rows.at(b, t, h), rows + h * pair, stride, list, n, dim, scale, weights);
                    for (int64_t i = n; i < round_up(n); i++) weights[i] = -INFINITY;
                    log_sum = softmax(weights, round_up(n));
                }
                log_sums[row * heads + h] = log_sum;
                gather(weights, rows + h * pair + dim, stride, list, n, width, out + (row * heads + h) * width);
                if (target)
                    for (int64_t i = 0; i < n; i++) target[row * room + i] += weights[i] / (float)heads;
            }
        }
    });
    return 0;
}

// dq, dk, dv contiguous like [batch, tokens, heads, dim or width], written whole; out, log_sums from the forward pass.
GLM5_EXPORT(selected_attention_backward)(GLM5_SELECTED_ARGUMENTS, const float* out, const float* log_sums, const float* dout,
                                         float* dq, float* dk, float* dv, int threads) {
    GLM5_SELECTED;
    int64_t pair = dim + width;
    parallel(batches * heads, 1, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(2 * Scratch::need(room + LANES) + 2 * Scratch::need(keys * pair));
        float *weights = scratch.take<float>(room + LANES), *slopes = scratch.take<float>(room + LANES);
        float *pairs = scratch.take<float>(keys * pair), *sums = scratch.take<float>(keys * pair);
        for (int64_t task = begin; task < end; task++) {
            int64_t b = task / heads, h = task % heads;
            for (int64_t s = 0; s < keys; s++) {
                memcpy(pairs + s * pair, k_rows.at(b, s, h), sizeof(float) * dim);
                memcpy(pairs + s * pair + dim, v_rows.at(b, s, h), sizeof(float) * width);
            }
            memset(sums, 0, sizeof(float) * keys * pair);
            for (int64_t t = 0; t < queries; t++) {
                int64_t row = (b * queries + t) * heads + h, n = lists.count(b, t);
                const int32_t* list = lists.row(b, t);
                const float *x = q_rows.at(b, t, h), *g = dout + row * width;
                if (t + 1 < queries) {
                    fetch_rows(pairs, pair, lists.row(b, t + 1), lists.count(b, t + 1), pair);
                    fetch_rows(sums, pair, lists.row(b, t + 1), lists.count(b, t + 1), pair);
                }
                if (n) {
                    float delta = 0.0f;
                    for (int64_t c = 0; c < width; c++) delta += g[c] * out[row * width + c];
                    dots(x, pairs, pair, list, n, dim, scale, weights);
                    dots(g, pairs + dim, pair, list, n, width, 1.0f, slopes);
                    slopes_of(weights, slopes, round_up(n), log_sums[row], delta, scale, nullptr);
                }
                gather(slopes, pairs, pair, list, n, dim, dq + row * dim);
                scatter(slopes, x, list, n, dim, sums, pair);
                scatter(weights, g, list, n, width, sums + dim, pair);
            }
            for (int64_t s = 0; s < keys; s++) {
                memcpy(dk + ((b * keys + s) * heads + h) * dim, sums + s * pair, sizeof(float) * dim);
                memcpy(dv + ((b * keys + s) * heads + h) * width, sums + s * pair + dim, sizeof(float) * width);
            }
        }
    });
    return 0;
}

// losses [batches * queries] (0 for an empty list) and slope [batches, queries, room], written whole: the gradient of the
// mean loss by the scores of the listed keys. rows [1] receives the number of lists with a key.
GLM5_EXPORT(selected_kl)(const float* q, const float* k, const float* w, const int32_t* positions, const float* target,
                         int64_t batches, int64_t queries, int64_t keys, int64_t heads, int64_t dim, int64_t room, float scale,
                         float* losses, float* slope, int64_t* rows, int threads) {
    Lists lists{positions, queries, room};
    *rows = 0;
    for (int64_t row = 0; row < batches * queries; row++) *rows += positions[row * room] >= 0;
    float share = 1.0f / (float)(*rows ? *rows : 1);
    parallel(batches * queries, 64, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(IndexQuery::need(heads, dim) + Scratch::need(room + LANES));
        IndexQuery query(scratch, heads, dim);
        float* p = scratch.take<float>(room + LANES);
        for (int64_t row = begin; row < end; row++) {
            int64_t b = row / queries, n = lists.count(b, row % queries);
            const int32_t* list = lists.row(b, row % queries);
            query.set(q + row * heads * dim, w + row * heads, scale);
            for (int64_t i = 0; i < n; i += LANES) {
                const float* keys_of_list[LANES];
                for (int j = 0; j < LANES; j++) keys_of_list[j] = k + (b * keys + list[at_most(i + j, n - 1)]) * dim;
                store(p + i, index_scores_block(query, keys_of_list));
            }
            losses[row] = n ? kl_row(p, target + row * room, n) : 0.0f;
            for (int64_t i = 0; i < n; i++) slope[row * room + i] = (p[i] - target[row * room + i]) * share;
            for (int64_t i = n; i < room; i++) slope[row * room + i] = 0.0f;
        }
    });
    return 0;
}

// dq, dk, dw like q, k, w, written whole, from slope [batches, queries, room] times dloss.
GLM5_EXPORT(selected_kl_backward)(const float* q, const float* k, const float* w, const int32_t* positions, const float* slope,
                                  int64_t batches, int64_t queries, int64_t keys, int64_t heads, int64_t dim, int64_t room,
                                  float scale, float dloss, float* dq, float* dk, float* dw, int threads) {
    Lists lists{positions, queries, room};
    Indexer p{q, k, w, batches, queries, keys, heads, dim, scale};
    int64_t share = (queries + PARTS - 1) / PARTS, size = keys * dim;
    Scratch shared(Scratch::need(PARTS * size));
    float* sums = shared.take<float>(PARTS * size);
    for (int64_t b = 0; b < batches; b++) {
        memset(sums, 0, sizeof(float) * PARTS * size);
        parallel(PARTS, 1, threads, [&](int64_t begin, int64_t end) {
            Scratch scratch(2 * IndexQuery::need(heads, dim) + Scratch::need(LANES * round_up(heads)) +
                            Scratch::need(room + LANES));
            IndexQuery query(scratch, heads, dim), gradient(scratch, heads, dim);
            float *slopes = scratch.take<float>(LANES * round_up(heads)), *g = scratch.take<float>(room + LANES);
            for (int64_t part = begin; part < end; part++)
                for (int64_t t = part * share; t < at_most(queries, (part + 1) * share); t++) {
                    int64_t row = b * queries + t, n = lists.count(b, t);
                    for (int64_t i = 0; i < n; i++) g[i] = slope[row * room + i] * dloss;
                    query.set(q + row * heads * dim, w + row * heads, scale);
                    backward_query(query, p, q + row * heads * dim, k + b * size, lists.row(b, t), g, n, gradient.q,
                                   gradient.w, slopes, sums + part * size);
                    write_gradient(gradient, heads, dim, dq + row * heads * dim, dw + row * heads);
                }
        });
        float* total = dk + b * size;
        memcpy(total, sums, sizeof(float) * size);
        for (int64_t part = 1; part < PARTS; part++)
            for (int64_t i = 0; i < size; i++) total[i] += sums[part * size + i];
    }
    return 0;
}
