// Attention under a boolean mask for training (fp32): forward, backward and the indexer's target distribution.
//
// One task packs the keys and values of one head, then visits GROUP queries at a time. Where their masks fill most of
// the span they cover, the group is computed as small dense products with keys as lanes; otherwise each query visits its
// own keys one by one, so that a sparse row costs what it selects. The choice depends on the mask only. Gradients of
// keys and values are summed over queries in ascending order, whatever the thread count.

#include "gather.h"
#include "gemm.h"
#include "mask.h"

namespace {

constexpr int64_t GROUP = 4;     // queries of a dense group
constexpr int64_t CHUNK = 64;    // groups of a forward task
constexpr int64_t DENSITY = 4;   // dense when at least 1 / DENSITY of the span is valid

// [batch, tokens, heads, elements] with contiguous elements.
struct Rows {
    const float* data;
    int64_t batch, token, head;
    const float* at(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * token + h * head; }
};

struct Problem {
    Rows q, k, v;
    Mask mask;
    int64_t batches, queries, keys, heads, dim, width;
    float scale;
    int64_t query_row(int64_t b, int64_t t, int64_t h) const { return (b * queries + t) * heads + h; }
};

// The queries of one visit and what their masks cover.
struct Visit {
    int64_t first, count, low, high;
    bool dense;
    int64_t span() const { return high - low; }
};

static Visit plan_visit(const Problem& p, int64_t b, int64_t t) {
    Visit visit{t, at_most(GROUP, p.queries - t), p.keys, 0, false};
    int64_t valid = 0;
    for (int64_t i = 0; i < visit.count; i++) valid += p.mask.cover(b, t + i, visit.low, visit.high);
    if (!valid) visit.low = visit.high = 0;
    visit.low = visit.low / LANES * LANES;
    visit.high = round_up(visit.high);
    visit.dense = valid * DENSITY >= visit.count * visit.span() && visit.high <= p.keys;
    return visit;
}

// All visits of a problem, planned once for every head, and whether a batch entry has a dense one with keys.
struct Plan {
    int64_t groups;  // per batch entry
    Visit* visits;
    bool* dense;

    static int64_t need(const Problem& p) {
        return Scratch::need(p.batches * ((p.queries + GROUP - 1) / GROUP), sizeof(Visit)) + Scratch::need(p.batches, 1);
    }
    Plan(Scratch& scratch, const Problem& p, int threads)
        : groups((p.queries + GROUP - 1) / GROUP), visits(scratch.take<Visit>(p.batches * groups)),
          dense(scratch.take<bool>(p.batches)) {
        parallel(p.batches, 1, threads, [&](int64_t begin, int64_t end) {
            for (int64_t b = begin; b < end; b++) {
                dense[b] = false;
                for (int64_t g = 0; g < groups; g++) {
                    Visit visit = visits[b * groups + g] = plan_visit(p, b, g * GROUP);
                    dense[b] = dense[b] || (visit.dense && visit.span());
                }
            }
        });
    }
};

// Elements between columns: whole cache lines, an odd number of them, so that the columns of one key spread over the
// cache sets.
GLM5_INLINE int64_t column_stride(int64_t keys) { return ((keys + 15) / 16 | 1) * 16; }

// Keys and values of one head, as rows and as columns, and the work space of one visit.
struct Head {
    float *k, *v, *k_columns, *v_columns, *q, *g, *weights, *slopes;
    int32_t* positions;
    int64_t stride;  // elements between columns, and between the weights of two queries

    static int64_t need(const Problem& p) {
        int64_t stride = column_stride(p.keys);
        return Scratch::need(p.keys * p.dim) + Scratch::need(p.keys * p.width) + Scratch::need(stride * p.dim) +
               Scratch::need(stride * p.width) + Scratch::need(GROUP * p.dim) + Scratch::need(GROUP * p.width) +
               2 * Scratch::need(GROUP * stride) + Scratch::need(p.keys + 8);
    }
    Head(Scratch& scratch, const Problem& p)
        : k(scratch.take<float>(p.keys * p.dim)), v(scratch.take<float>(p.keys * p.width)),
          k_columns(scratch.take<float>(column_stride(p.keys) * p.dim)),
          v_columns(scratch.take<float>(column_stride(p.keys) * p.width)),
          q(scratch.take<float>(GROUP * p.dim)), g(scratch.take<float>(GROUP * p.width)),
          weights(scratch.take<float>(GROUP * column_stride(p.keys))),
          slopes(scratch.take<float>(GROUP * column_stride(p.keys))),
          positions(scratch.take<int32_t>(p.keys + 8)), stride(column_stride(p.keys)) {}

    static void pack(const Rows& source, int64_t b, int64_t h, int64_t keys, int64_t size, float* rows) {
        for (int64_t s = 0; s < keys; s++) memcpy(rows + s * size, source.at(b, s, h), sizeof(float) * size);
    }
    static void turn(const float* rows, int64_t keys, int64_t size, int64_t stride, float* columns) {
        for (int64_t d = 0; d < size; d++)
            for (int64_t s = 0; s < keys; s++) columns[d * stride + s] = rows[s * size + d];
    }
    // `dense`: some visit reads columns; `values` and `value_columns`: what is read of v.
    void load_head(const Problem& p, int64_t b, int64_t h, bool dense, bool values, bool value_columns) {
        pack(p.k, b, h, p.keys, p.dim, k);
        if (dense) turn(k, p.keys, p.dim, stride, k_columns);
        if (values) pack(p.v, b, h, p.keys, p.width, v);
        if (dense && value_columns) turn(v, p.keys, p.width, stride, v_columns);
    }
};

// Weights of the queries of a dense visit over its span (0 off the mask) and, unless null, their log sums.
static void dense_weights(const Problem& p, Head& head, int64_t b, int64_t h, const Visit& visit, float* log_sums) {
    for (int64_t i = 0; i < visit.count; i++)
        for (int64_t d = 0; d < p.dim; d++) head.q[i * p.dim + d] = p.q.at(b, visit.first + i, h)[d] * p.scale;
    multiply_outer(head.q, p.dim, 1, visit.count, head.k_columns + visit.low, head.stride, visit.span(), p.dim, head.weights,
                   head.stride, false);
    for (int64_t i = 0; i < visit.count; i++) {
        const uint8_t* valid = p.mask.bytes(b, visit.first + i) + visit.low;
        float* w = head.weights + i * head.stride;
        bool any = memchr(valid, 1, visit.span()) != nullptr;
        for (int64_t s = 0; s < visit.span(); s += LANES) store(w + s, where(valid + s, load(w + s), splat(any ? -INFINITY : 0.0f)));
        float log_sum = any ? softmax(w, visit.span()) : 0.0f;
        if (log_sums) log_sums[p.query_row(b, visit.first + i, h)] = log_sum;
    }
}

// The same for one query over its listed keys; returns their number.
static int64_t sparse_weights(const Problem& p, Head& head, int64_t b, int64_t t, int64_t h, float* log_sums) {
    int64_t n = p.mask.row(b, t, head.positions);
    float log_sum = 0.0f;
    if (n) {
        dots(p.q.at(b, t, h), head.k, p.dim, head.positions, n, p.dim, p.scale, head.weights);
        for (int64_t i = n; i < round_up(n); i++) head.weights[i] = -INFINITY;
        log_sum = softmax(head.weights, round_up(n));
    }
    if (log_sums) log_sums[p.query_row(b, t, h)] = log_sum;
    return n;
}

// What the backward pass of one query needs from its forward pass.
struct Saved {
    const float *out, *log_sums, *dout;
    float delta(const Problem& p, int64_t row) const {
        float sum = 0.0f;
        for (int64_t c = 0; c < p.width; c++) sum += dout[row * p.width + c] * out[row * p.width + c];
        return sum;
    }
};

static void dense_backward(const Problem& p, Head& head, int64_t b, int64_t h, const Visit& visit, const Saved& saved,
                           float* dq, float* dk, float* dv) {
    int64_t span = visit.span(), row = p.query_row(b, visit.first, h);
    for (int64_t i = 0; i < visit.count; i++) {
        memcpy(head.q + i * p.dim, p.q.at(b, visit.first + i, h), sizeof(float) * p.dim);
        memcpy(head.g + i * p.width, saved.dout + (row + i * p.heads) * p.width, sizeof(float) * p.width);
    }
    multiply_outer(head.q, p.dim, 1, visit.count, head.k_columns + visit.low, head.stride, span, p.dim, head.weights,
                   head.stride, false);
    multiply_outer(head.g, p.width, 1, visit.count, head.v_columns + visit.low, head.stride, span, p.width, head.slopes,
                   head.stride, false);
    for (int64_t i = 0; i < visit.count; i++) {
        float *w = head.weights + i * head.stride, *slope = head.slopes + i * head.stride;
        for (int64_t s = 0; s < span; s += LANES) store(w + s, load(w + s) * p.scale);
        slopes_of(w, slope, span, saved.log_sums[row + i * p.heads], saved.delta(p, row + i * p.heads), p.scale,
                  p.mask.bytes(b, visit.first + i) + visit.low);
    }
    multiply_outer(head.slopes, head.stride, 1, visit.count, head.k + visit.low * p.dim, p.dim, p.dim, span,
                   dq + row * p.dim, p.heads * p.dim, false);
    multiply_outer(head.slopes, 1, head.stride, span, head.q, p.dim, p.dim, visit.count, dk + visit.low * p.dim, p.dim, true);
    multiply_outer(head.weights, 1, head.stride, span, head.g, p.width, p.width, visit.count, dv + visit.low * p.width,
                   p.width, true);
}

static void sparse_backward(const Problem& p, Head& head, int64_t b, int64_t h, int64_t t, const Saved& saved, float* dq,
                            float* dk, float* dv) {
    int64_t n = p.mask.row(b, t, head.positions), row = p.query_row(b, t, h);
    const float *q = p.q.at(b, t, h), *g = saved.dout + row * p.width;
    if (n) {
        dots(q, head.k, p.dim, head.positions, n, p.dim, p.scale, head.weights);
        dots(g, head.v, p.width, head.positions, n, p.width, 1.0f, head.slopes);
        slopes_of(head.weights, head.slopes, round_up(n), saved.log_sums[row], saved.delta(p, row), p.scale, nullptr);
    }
    gather(head.slopes, head.k, p.dim, head.positions, n, p.dim, dq + row * p.dim);
    scatter(head.slopes, q, head.positions, n, p.dim, dk, p.dim);
    scatter(head.weights, g, head.positions, n, p.width, dv, p.width);
}

// Rows of one head into [batch, keys, heads, size].
static void unpack(const float* rows, int64_t b, int64_t h, int64_t keys, int64_t heads, int64_t size, float* out) {
    for (int64_t s = 0; s < keys; s++)
        memcpy(out + ((b * keys + s) * heads + h) * size, rows + s * size, sizeof(float) * size);
}

}  // namespace

#define GLM5_PROBLEM_ARGUMENTS                                                                                          \
    const float *q, int64_t q_batch, int64_t q_token, int64_t q_head, const float *k, int64_t k_batch, int64_t k_token, \
        int64_t k_head, const float *v, int64_t v_batch, int64_t v_token, int64_t v_head, const uint8_t *mask,          \
        int64_t mask_batch, int64_t mask_query, int64_t batches, int64_t queries, int64_t keys, int64_t heads,          \
        int64_t dim, int64_t width, float scale
#define GLM5_PROBLEM                                                                                               \
    Problem {                                                                                                      \
        {q, q_batch, q_token, q_head}, {k, k_batch, k_token, k_head}, {v, v_batch, v_token, v_head},               \
            {mask, mask_batch, mask_query, keys}, batches, queries, keys, heads, dim, width, scale                 \
    }

// out [batches, queries, heads, width] and log_sums [batches, queries, heads], contiguous, written whole.
GLM5_EXPORT(masked_attention)(GLM5_PROBLEM_ARGUMENTS, float* out, float* log_sums, int threads) {
    Problem p = GLM5_PROBLEM;
    Scratch shared(Plan::need(p));
    Plan plan(shared, p, threads);
    int64_t chunks = (plan.groups + CHUNK - 1) / CHUNK;
    parallel(batches * heads * chunks, 1, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(Head::need(p));
        Head head(scratch, p);
        for (int64_t task = begin; task < end; task++) {
            int64_t b = task / chunks / heads, h = task / chunks % heads, first = task % chunks * CHUNK;
            if (task == begin || first == 0) head.load_head(p, b, h, plan.dense[b], true, false);
            for (int64_t g = first; g < at_most(plan.groups, first + CHUNK); g++) {
                const Visit& visit = plan.visits[b * plan.groups + g];
                if (visit.dense) {
                    dense_weights(p, head, b, h, visit, log_sums);
                    multiply_outer(head.weights, head.stride, 1, visit.count, head.v + visit.low * width, width, width,
                                   visit.span(), out + p.query_row(b, visit.first, h) * width, heads * width, false);
                    continue;
                }
                for (int64_t t = visit.first; t < visit.first + visit.count; t++) {
                    int64_t n = sparse_weights(p, head, b, t, h, log_sums);
                    gather(head.weights, head.v, width, head.positions, n, width, out + p.query_row(b, t, h) * width);
                }
            }
        }
    });
    return 0;
}

// dq, dk, dv contiguous like [batch, tokens, heads, dim or width], written whole; out, log_sums from the forward pass.
GLM5_EXPORT(masked_attention_backward)(GLM5_PROBLEM_ARGUMENTS, const float* out, const float* log_sums, const float* dout,
                                       float* dq, float* dk, float* dv, int threads) {
    Problem p = GLM5_PROBLEM;
    Saved saved{out, log_sums, dout};
    Scratch shared(Plan::need(p));
    Plan plan(shared, p, threads);
    parallel(batches * heads, 1, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(Head::need(p) + Scratch::need(keys * dim) + Scratch::need(keys * width));
        Head head(scratch, p);
        float *dk_rows = scratch.take<float>(keys * dim), *dv_rows = scratch.take<float>(keys * width);
        for (int64_t task = begin; task < end; task++) {
            int64_t b = task / heads, h = task % heads;
            head.load_head(p, b, h, plan.dense[b], true, true);
            memset(dk_rows, 0, sizeof(float) * keys * dim);
            memset(dv_rows, 0, sizeof(float) * keys * width);
            for (int64_t g = 0; g < plan.groups; g++) {
                const Visit& visit = plan.visits[b * plan.groups + g];
                if (visit.dense) {
                    dense_backward(p, head, b, h, visit, saved, dq, dk_rows, dv_rows);
                    continue;
                }
                for (int64_t t = visit.first; t < visit.first + visit.count; t++)
                    sparse_backward(p, head, b, h, t, saved, dq, dk_rows, dv_rows);
            }
            unpack(dk_rows, b, h, keys, heads, dim, dk);
            unpack(dv_rows, b, h, keys, heads, width, dv);
        }
    });
    return 0;
}

// target [batches, queries, keys] contiguous, written whole: mean over heads of the attention weights, 0 off the mask.
// v is not read.
GLM5_EXPORT(attention_targets)(GLM5_PROBLEM_ARGUMENTS, float* target, int threads) {
    Problem p = GLM5_PROBLEM;
    memset(target, 0, sizeof(float) * batches * queries * keys);
    Scratch shared(Plan::need(p));
    Plan plan(shared, p, threads);
    int64_t chunks = (plan.groups + CHUNK - 1) / CHUNK;
    float share = 1.0f / (float)heads;
    parallel(batches * chunks, 1, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(Head::need(p));
        Head head(scratch, p);
        for (int64_t task = begin; task < end; task++) {
            int64_t b = task / chunks, first = task % chunks * CHUNK;
            for (int64_t h = 0; h < heads; h++) {
                head.load_head(p, b, h, plan.dense[b], false, false);
                for (int64_t g = first; g < at_most(plan.groups, first + CHUNK); g++) {
                    const Visit& visit = plan.visits[b * plan.groups + g];
                    if (visit.dense) dense_weights(p, head, b, h, visit, nullptr);
                    for (int64_t i = 0; i < visit.count; i++) {
                        float *row = target + (b * queries + visit.first + i) * keys, *w = head.weights + i * head.stride;
                        if (visit.dense) {
                            for (int64_t s = 0; s < visit.span(); s += LANES)
                                store(row + visit.low + s, load(row + visit.low + s) + load(w + s) * share);
                            continue;
                        }
                        int64_t n = sparse_weights(p, head, b, visit.first + i, h, nullptr);
                        for (int64_t j = 0; j < n; j++) row[head.positions[j]] += head.weights[j] * share;
                    }
                }
            }
        }
    });
    return 0;
}
