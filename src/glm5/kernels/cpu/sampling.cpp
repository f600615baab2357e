// Fused sampling: one token per row by one uniform number and the inverse of the cumulative distribution (fp32 logits).
//
// A row is read twice when nothing is cut. A cut is a threshold on the logits, found by bisection on their bits with fp64
// sums over the row, plus how many of the tokens that equal it stay: no sort.

#include "topk.h"

namespace {

constexpr int64_t SPAN = 1024;  // weights summed in lanes before they join a fp64 sum

// One row: weights exp((logit - peak) / temperature) and keys that order like the logits.
struct Row {
    const float* logits;
    int64_t width;
    float peak, inverse;
    const int32_t* keys;

    vf weight(int64_t i) const { return exp_lanes((load(logits + i) - peak) * inverse); }

    // Number and total weight of the tokens with key >= least.
    double mass(int32_t least, int64_t* count) const {
        double total = 0.0;
        int64_t n = 0;
        for (int64_t start = 0; start < width; start += SPAN) {
            vf sum = {};
            vi found = {};
            int64_t end = at_most(width, start + SPAN), i = start;
            for (; i + LANES <= end; i += LANES) {
                vi in = *(const vi_loose*)(keys + i) >= least - (vi){};
                found -= in;
                sum += in ? weight(i) : (vf){};
            }
            for (int lane = 0; lane < LANES; lane++) n += found[lane];
            total += sum_lanes(sum);
            for (; i < end; i++)
                if (keys[i] >= least) total += single(i), n++;
        }
        if (count) *count = n;
        return total;
    }
    float single(int64_t i) const { return exp_lanes(splat((logits[i] - peak) * inverse))[0]; }
};

// The kept tokens are those with key > least, and the first `ties` of those with key == least.
struct Cut {
    int32_t least;
    int64_t ties;
};

// The likeliest `k` tokens.
static Cut cut_count(const Row& row, int64_t k) {
    int32_t low = INT32_MIN, high = INT32_MAX;  // largest t with count(>= t) >= k
    while (low < high) {
        int32_t middle = (int32_t)(low + ((int64_t)high - low + 1) / 2);  // 64 bits: all keys together overflow 32
        int64_t count;
        row.mass(middle, &count);
        if (count >= k) low = middle;
        else high = middle - 1;
    }
    int64_t above = 0;
    if (low != INT32_MAX) row.mass(low + 1, &above);
    return {low, k - above};
}

// Mass of a cut: what lies above it and its ties.
static double cut_mass(const Row& row, Cut cut, float* tie) {
    *tie = exp_lanes(splat((key_to_float(cut.least) - row.peak) * row.inverse))[0];
    return (cut.least == INT32_MAX ? 0.0 : row.mass(cut.least + 1, nullptr)) + (double)*tie * (double)cut.ties;
}

// The smallest set of the likeliest tokens inside `limit` whose mass reaches `goal`: a token stays while the mass before
// it is below the goal.
static Cut cut_mass_at(const Row& row, Cut limit, double goal) {
    int32_t low = limit.least, high = INT32_MAX;  // smallest t with mass(> t) < goal, not below the limit
    while (low < high) {
        int32_t middle = (int32_t)(low + ((uint32_t)high - (uint32_t)low) / 2);
        if ((middle == INT32_MAX ? 0.0 : row.mass(middle + 1, nullptr)) < goal) high = middle;
        else low = middle + 1;
    }
    int64_t count, above = 0;
    row.mass(low, &count);
    double mass = 0.0;
    if (low != INT32_MAX) mass = row.mass(low + 1, &above);
    float tie = exp_lanes(splat((key_to_float(low) - row.peak) * row.inverse))[0];
    int64_t room = low == limit.least ? limit.ties : count - above, ties = 0;
    while (ties < room && mass + (double)tie * (double)ties < goal) ties++;
    return {low, ties};
}

// First token whose cumulative weight within the cut exceeds `goal`; the last kept one when rounding leaves none. Whole
// spans are passed over by their sums, which are those of `mass`.
static int64_t invert(const Row& row, Cut cut, double goal) {
    float weights[SPAN + LANES];
    double total = 0.0;
    int64_t last = 0;
    for (int64_t start = 0; start < row.width; start += SPAN) {
        int64_t count = at_most(row.width, start + SPAN) - start, i = 0;
        vf sum = {};
        for (; i + LANES <= count; i += LANES) {
            vi kept = *(const vi_loose*)(row.keys + start + i) > cut.least - (vi){};
            vf weight = kept ? row.weight(start + i) : (vf){};
            store(weights + i, weight);
            sum += weight;
        }
        double span = sum_lanes(sum);
        for (; i < count; i++) {
            weights[i] = row.keys[start + i] > cut.least ? row.single(start + i) : 0.0f;
            span += weights[i];
        }
        for (i = 0; i < count && cut.ties > 0; i++)
            if (row.keys[start + i] == cut.least) weights[i] = row.single(start + i), span += weights[i], cut.ties--;
        bool is_within = total + span > goal;
        for (i = is_within ? 0 : count; i < count; i++) {
            if (!(weights[i] > 0.0f)) continue;
            total += weights[i], last = start + i;
            if (total > goal) return last;
        }
        if (is_within) continue;
        total += span;
        while (i > 0 && !(weights[i - 1] > 0.0f)) i--;
        if (i > 0) last = start + i - 1;
    }
    return last;
}

static void sample_row(const float* logits, int64_t width, float temperature, int64_t top_k, float top_p, float min_p,
                       float uniform, int32_t* keys, int64_t* id, float* logprob) {
    float peak = -INFINITY;
    int64_t best = 0;
    bool broken = false;
    for (int64_t i = 0; i < width; i++) {
        keys[i] = float_to_key(logits[i] > -INFINITY ? logits[i] : -3.402823466e+38f);
        broken |= logits[i] != logits[i] || logits[i] == INFINITY;
        if (logits[i] > peak) peak = logits[i], best = i;
    }
    if (broken || peak == -INFINITY) {
        *id = best, *logprob = NAN;
        return;
    }
    Row row{logits, width, peak, temperature == 0.0f ? 1.0f : 1.0f / temperature, keys};
    double whole = row.mass(INT32_MIN, nullptr);
    *id = best;
    if (temperature != 0.0f) {
        Cut cut{INT32_MIN, 0};
        float tie;
        if (top_k > 0 && top_k < width) cut = cut_count(row, top_k);
        if (top_p < 1.0f) cut = cut_mass_at(row, cut, (double)top_p * (top_k > 0 && top_k < width ? cut_mass(row, cut, &tie) : whole));
        if (min_p > 0.0f) {
            int32_t low = cut.least, high = float_to_key(peak);  // smallest t whose weight reaches min_p
            while (low < high) {
                int32_t middle = (int32_t)(low + ((uint32_t)high - (uint32_t)low) / 2);
                if (exp_lanes(splat((key_to_float(middle) - peak) * row.inverse))[0] >= min_p) high = middle;
                else low = middle + 1;
            }
            if (low > cut.least) cut = {low - 1, 0};
        }
        if (float_to_key(peak) < cut.least || (float_to_key(peak) == cut.least && cut.ties < 1)) cut = {float_to_key(peak), 1};
        double mass = cut.least == INT32_MIN ? whole : cut_mass(row, cut, &tie);
        *id = invert(row, cut, (double)uniform * mass);
    }
    *logprob = (float)((double)((logits[*id] - peak) * row.inverse) - log(whole));
}

}  // namespace

// ids [rows] and logprobs [rows]: `sample` of the reference. logits [rows, width]; one setting of each kind per row.
GLM5_EXPORT(sample)(const float* logits, int64_t rows, int64_t width, const float* temperature, const int64_t* top_k,
                    const float* top_p, const float* min_p, const float* uniform, int64_t* ids, float* logprobs, int threads) {
    parallel(rows, 1, threads, [&](int64_t begin, int64_t end) {
        Scratch scratch(Scratch::need(width + LANES));
        int32_t* keys = scratch.take<int32_t>(width + LANES);
        for (int64_t r = begin; r < end; r++)
            sample_row(logits + r * width, width, temperature[r], top_k[r], top_p[r], min_p[r], uniform[r], keys, ids + r, logprobs + r);
    });
    return 0;
}
