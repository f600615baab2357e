// Absorbed attention of one query: all heads share one key entry, whose first `latent` elements are also its value.
//
// Heads are lanes: a key element is broadcast against the same element of LANES heads, so that softmax needs no sums
// across lanes and every head's bits depend on itself only. Keys are taken in blocks of BLOCK and parts of PART, both
// counted from the query's first key; parts are combined in order, whether one thread or several computed them.
#pragma once

#include "paged.h"

namespace {

constexpr int64_t BLOCK = 64;   // keys per softmax step
constexpr int64_t PART = 1024;  // keys per partial result
constexpr int VALUE_HEADS = 4;  // heads of one register tile of the weighted sum

struct AttentionShape {
    int64_t heads, dim, latent;
    int64_t unit = LANES;  // the sums of a head are a multiple of this
    int64_t padded() const { return round_up(heads); }
    int64_t width() const { return (latent + unit - 1) / unit * unit; }
};

// Peaks, totals and unnormalised weighted sums of some keys: what softmax needs to combine them with others.
struct Partial {
    float *peaks, *totals, *sums;  // [padded], [padded], [padded, width]

    static int64_t need(const AttentionShape& s) {
        return 2 * Scratch::need(s.padded()) + Scratch::need(s.padded() * s.width());
    }
    Partial(Scratch& scratch, const AttentionShape& s)
        : peaks(scratch.take<float>(s.padded())), totals(scratch.take<float>(s.padded())),
          sums(scratch.take<float>(s.padded() * s.width())) {}

    void add(const AttentionShape& s, const Partial& other) {
        for (int64_t h = 0; h < s.heads; h++) {
            float peak = peaks[h] > other.peaks[h] ? peaks[h] : other.peaks[h];
            float a = expf(peaks[h] - peak), b = expf(other.peaks[h] - peak);
            totals[h] = totals[h] * a + other.totals[h] * b, peaks[h] = peak;
            float *x = sums + h * s.width(), *y = other.sums + h * s.width();
            for (int64_t c = 0; c < s.width(); c += LANES) store(x + c, load(x + c) * a + load(y + c) * b);
        }
    }
};

// Rows that are needed later, `bytes` per element: loaded in small steps, because a burst would wait for itself.
struct Ahead {
    const char* rows[BLOCK];
    int64_t bytes;
};

// logits[i][h] = entries[i] . q[h] for K keys and V vectors of heads; q [dim, stride], logits [K, stride]. Starts to load
// K of the rows `ahead` unless that is null.
template <int K, int V>
GLM5_INLINE void logits_tile(const float* q, int64_t stride, const float* const* entries, int64_t dim, const Ahead* ahead,
                             int64_t first, float* logits) {
    vf sums[K * V];
    GLM5_UNROLL
    for (int i = 0; i < K * V; i++) sums[i] = (vf){};
    for (int64_t d = 0; d < dim; d++) {
        if (ahead && d % 16 == 0)
            for (int i = 0; i < K; i++) __builtin_prefetch(ahead->rows[first + i] + d * ahead->bytes);
        vf x[V];
        GLM5_UNROLL
        for (int v = 0; v < V; v++) x[v] = load(q + d * stride + v * LANES);
        GLM5_UNROLL
        for (int i = 0; i < K; i++) {
            float factor = entries[i][d];
            GLM5_UNROLL
            for (int v = 0; v < V; v++) sums[i * V + v] += factor * x[v];
        }
    }
    GLM5_UNROLL
    for (int i = 0; i < K * V; i++) store(logits + (i / V) * stride + (i % V) * LANES, sums[i]);
}

// The same for n keys, and for all heads.
template <int V>
static void logits_columns(const float* q, int64_t stride, const float* const* entries, int64_t n, int64_t dim,
                           const Ahead* ahead, float* logits) {
    constexpr int K = LANES == 16 ? 12 : 12 / V / 2 * 2;
    int64_t i = 0;
    for (; i + K <= n; i += K) logits_tile<K, V>(q, stride, entries + i, dim, ahead, i, logits + i * stride);
    for (; i + 4 <= n; i += 4) logits_tile<4, V>(q, stride, entries + i, dim, ahead, i, logits + i * stride);
    for (; i < n; i++) logits_tile<1, V>(q, stride, entries + i, dim, ahead, i, logits + i * stride);
}

static void block_logits(const float* q, int64_t stride, const float* const* entries, int64_t n, int64_t dim,
                         const Ahead* ahead, float* logits) {
    for (int64_t h = 0; h < stride; h += 2 * LANES) {
        const Ahead* once = h ? nullptr : ahead;
        if (h + 2 * LANES <= stride) logits_columns<2>(q + h, stride, entries, n, dim, once, logits + h);
        else logits_columns<1>(q + h, stride, entries, n, dim, once, logits + h);
    }
}

// sums[h][0 .. V * LANES) += sum_i weights[i][h] * entries[i][0 .. V * LANES) for H heads; weights [n, padded].
template <int H, int V>
GLM5_INLINE void values_tile(const float* weights, int64_t padded, const float* const* entries, int64_t n, int64_t c,
                             float* sums, int64_t width) {
    vf total[H * V];
    GLM5_UNROLL
    for (int i = 0; i < H * V; i++) total[i] = load(sums + (i / V) * width + (i % V) * LANES);
    for (int64_t i = 0; i < n; i++) {
        vf x[V];
        GLM5_UNROLL
        for (int v = 0; v < V; v++) x[v] = load(entries[i] + c + v * LANES);
        GLM5_UNROLL
        for (int h = 0; h < H; h++) {
            float factor = weights[i * padded + h];
            GLM5_UNROLL
            for (int v = 0; v < V; v++) total[h * V + v] += factor * x[v];
        }
    }
    GLM5_UNROLL
    for (int i = 0; i < H * V; i++) store(sums + (i / V) * width + (i % V) * LANES, total[i]);
}

template <int V>
static void values_columns(const float* weights, int64_t padded, int64_t heads, const float* const* entries, int64_t n,
                           int64_t c, float* sums, int64_t width) {
    int64_t h = 0;
    for (; h + VALUE_HEADS <= heads; h += VALUE_HEADS)
        values_tile<VALUE_HEADS, V>(weights + h, padded, entries, n, c, sums + h * width + c, width);
    for (; h < heads; h++) values_tile<1, V>(weights + h, padded, entries, n, c, sums + h * width + c, width);
}

// sums [heads, width] += weights^T . entries, the first `width` elements of every entry (a multiple of LANES).
static void block_values(const float* weights, int64_t padded, int64_t heads, const float* const* entries, int64_t n,
                         float* sums, int64_t width) {
    int64_t c = 0;
    for (; c + 3 * LANES <= width; c += 3 * LANES) values_columns<3>(weights, padded, heads, entries, n, c, sums, width);
    if (c + 2 * LANES <= width) values_columns<2>(weights, padded, heads, entries, n, c, sums, width), c += 2 * LANES;
    if (c < width) values_columns<1>(weights, padded, heads, entries, n, c, sums, width);
}

// q [heads, dim] * scale -> [dim, padded], zero for missing heads.
static void turn_heads(const float* q, int64_t heads, int64_t dim, int64_t padded, float scale, float* out) {
    for (int64_t h = 0; h < padded; h++)
        for (int64_t d = 0; d < dim; d++) out[d * padded + h] = h < heads ? q[h * dim + d] * scale : 0.0f;
}

// Entries of a cache of T as fp32 rows: where they lie when that needs no work, else copied. Rows are readable up to a
// multiple of LANES.
template <class T> class Entries {
   public:
    static int64_t need(int64_t dim) { return Scratch::need(BLOCK * copy_stride(dim)); }
    Entries(Scratch& scratch, int64_t dim)
        : rows{}, ahead{{}, sizeof(T)}, dim_(dim), stride_(copy_stride(dim)), copies_(scratch.take<float>(BLOCK * copy_stride(dim))) {
        memset(copies_, 0, sizeof(float) * BLOCK * stride_);
    }

    // Entries positions[first .. first + n) of `cache`; `ahead` becomes the next BLOCK of the `end` positions.
    void fetch(const T* cache, const int32_t* positions, int64_t first, int64_t n, int64_t end) {
        for (int64_t i = 0; i < n; i++) {
            const T* source = cache + positions[first + i] * dim_;
            ahead.rows[i] = (const char*)(first + BLOCK + i < end ? cache + positions[first + BLOCK + i] * dim_ : source);
            if constexpr (sizeof(T) == sizeof(float)) {
                if (dim_ % LANES == 0) {
                    rows[i] = source;
                    continue;
                }
            }
            float* copy = copies_ + i * stride_;
            int64_t d = 0;
            for (; d + LANES <= dim_; d += LANES) store(copy + d, load(source + d));
            for (; d < dim_; d++) copy[d] = as_float(source[d]);
            rows[i] = copy;
        }
    }
    void preload(const T* entry) const {
        for (int64_t byte = 0; byte < dim_ * (int64_t)sizeof(T); byte += 64) __builtin_prefetch((const char*)entry + byte);
    }

    const float* rows[BLOCK];
    Ahead ahead;

   private:
    // An odd number of cache lines, so that the same element of several rows spreads over the cache sets.
    static int64_t copy_stride(int64_t dim) { return ((dim + 15) / 16 | 1) * 16; }

    int64_t dim_, stride_;
    float* copies_;
};

template <class T> class AbsorbedAttention {
   public:
    using Entry = T;
    static constexpr int64_t TOGETHER = 1;  // queries of a call
    static constexpr int64_t UNIT = LANES;

    static int64_t need(const AttentionShape& s) {
        return Scratch::need(s.padded() * s.dim) + Entries<T>::need(s.dim) + Scratch::need(BLOCK * s.padded()) +
               Scratch::need(PART);
    }
    AbsorbedAttention(Scratch& scratch, const AttentionShape& shape)
        : shape_(shape), q_(scratch.take<float>(shape.padded() * shape.dim)), entries_(scratch, shape.dim),
          weights_(scratch.take<float>(BLOCK * shape.padded())), rows_(scratch.take<int32_t>(PART)) {}

    void set_queries(const float* q, int64_t, float scale) { turn_heads(q, shape_.heads, shape_.dim, shape_.padded(), scale, q_); }

    // Starts loading the first of n entries that a later call reads.
    void prefetch(const T* cache, const Keys& keys, int64_t n) {
        keys.rows(0, at_most(BLOCK, n), rows_);
        for (int64_t i = 0; i < at_most(BLOCK, n); i++) entries_.preload(cache + rows_[i] * shape_.dim);
    }

    // Keys begin .. end (at most PART, at least one) of the query into `out`.
    void run_part(const T* cache, const Keys& keys, int64_t begin, int64_t end, const int64_t*, int64_t, Partial* out) {
        keys.rows(begin, end, rows_);
        for (int64_t start = 0; start < end - begin; start += BLOCK) {
            int64_t n = at_most(BLOCK, end - begin - start);
            entries_.fetch(cache, rows_, start, n, end - begin);
            block_logits(q_, shape_.padded(), entries_.rows, n, shape_.dim, &entries_.ahead, weights_);
            for (int64_t h = 0; h < shape_.padded(); h += LANES) soften(h, n, start == 0, *out);
            block_values(weights_, shape_.padded(), shape_.heads, entries_.rows, n, out->sums, shape_.width());
        }
    }

    static void finish(const AttentionShape& s, int64_t n, const Partial& whole, float* out, float* log_sums) {
        for (int64_t h = 0; h < s.heads; h++) {
            float inverse = n ? 1.0f / whole.totals[h] : 0.0f;
            for (int64_t c = 0; c < s.latent; c++) out[h * s.latent + c] = n ? whole.sums[h * s.width() + c] * inverse : 0.0f;
            if (log_sums) log_sums[h] = n ? whole.peaks[h] + logf(whole.totals[h]) : 0.0f;
        }
    }

   private:
    // Logits of LANES heads over n keys become weights; the running peaks, totals and sums follow.
    void soften(int64_t h, int64_t n, bool first, Partial& out) {
        int64_t padded = shape_.padded(), width = shape_.width();
        vf before = first ? splat(-INFINITY) : load(out.peaks + h), peak = before, total = {};
        for (int64_t i = 0; i < n; i++) peak = larger(load(weights_ + i * padded + h), peak);
        for (int64_t i = 0; i < n; i++) {
            vf p = exp_lanes(load(weights_ + i * padded + h) - peak);
            store(weights_ + i * padded + h, p);
            total += p;
        }
        vf keep = exp_lanes(before - peak);
        store(out.peaks + h, peak);
        store(out.totals + h, first ? total : load(out.totals + h) * keep + total);
        for (int64_t lane = 0; lane < at_most(LANES, shape_.heads - h); lane++) {
            float* sums = out.sums + (h + lane) * width;
            if (first) memset(sums, 0, sizeof(float) * width);
            else if (keep[lane] != 1.0f)
                for (int64_t c = 0; c < width; c += LANES) store(sums + c, load(sums + c) * keep[lane]);
        }
    }

    AttentionShape shape_;
    float* q_;
    Entries<T> entries_;
    float* weights_;
    int32_t* rows_;
};

}  // namespace
