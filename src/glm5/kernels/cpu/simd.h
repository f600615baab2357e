// Vector arithmetic, scratch memory and threads for the kernels of this folder.
//
// Each source file is compiled once per instruction set with GLM5_ISA (the suffix of its exported names) and GLM5_LANES
// (floats per vector). Everything here has internal linkage and uses no C++ library template, so that the linker never
// merges code of one instruction set into another.
//
// Invariant: a result depends on its inputs only, never on the thread count, on its neighbours in a batch or on how a
// loop was blocked. Dot products keep one partial sum per lane and add the lanes in one fixed tree (`reduce_lanes`).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if GLM5_LANES == 16
#include <immintrin.h>
#endif

#define GLM5_PASTE_(a, b, c) a##b##_##c
#define GLM5_PASTE(a, b, c) GLM5_PASTE_(a, b, c)
#define GLM5_EXPORT(name) extern "C" __attribute__((visibility("default"))) int GLM5_PASTE(glm5_, name, GLM5_ISA)
#define GLM5_INLINE inline __attribute__((always_inline))

#if defined(__clang__)
#define GLM5_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define GLM5_UNROLL _Pragma("clang loop unroll(full)")
#else
#define GLM5_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#define GLM5_UNROLL _Pragma("GCC unroll 16")
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace {

constexpr int LANES = GLM5_LANES;
typedef float vf __attribute__((vector_size(4 * GLM5_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * GLM5_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * GLM5_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * GLM5_LANES)));
typedef float vf_loose __attribute__((vector_size(4 * GLM5_LANES), aligned(4), may_alias));
typedef int32_t vi_loose __attribute__((vector_size(4 * GLM5_LANES), aligned(4), may_alias));
typedef uint16_t vh_loose __attribute__((vector_size(2 * GLM5_LANES), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

GLM5_INLINE vf load(const float* p) { return *(const vf_loose*)p; }
GLM5_INLINE vf load(const bf16* p) { return (vf)(__builtin_convertvector(*(const vh_loose*)p, vu) << 16); }
GLM5_INLINE void store(float* p, vf v) { *(vf_loose*)p = v; }
GLM5_INLINE vf splat(float x) { return x - (vf){}; }
GLM5_INLINE vi splat_bits(uint32_t x) { return (int32_t)x - (vi){}; }
GLM5_INLINE float as_float(float x) { return x; }
GLM5_INLINE float as_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
GLM5_INLINE void put(float* p, float x) { *p = x; }
GLM5_INLINE void put(bf16* p, float x) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    p->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
GLM5_INLINE int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
GLM5_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Lane l of the result: a[l] + a[l ^ D] where bit D of l is clear, the same of b where it is set.
template <int D> GLM5_INLINE vf fold(vf a, vf b);
#if GLM5_LANES == 16
template <> GLM5_INLINE vf fold<8>(vf a, vf b) {
    return GLM5_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
           GLM5_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
}
template <> GLM5_INLINE vf fold<4>(vf a, vf b) {
    return GLM5_SHUFFLE(a, b, 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31) +
           GLM5_SHUFFLE(a, b, 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
}
template <> GLM5_INLINE vf fold<2>(vf a, vf b) {
    return GLM5_SHUFFLE(a, b, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31) +
           GLM5_SHUFFLE(a, b, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
}
template <> GLM5_INLINE vf fold<1>(vf a, vf b) {
    return GLM5_SHUFFLE(a, b, 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31) +
           GLM5_SHUFFLE(a, b, 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
}
#elif GLM5_LANES == 8
template <> GLM5_INLINE vf fold<4>(vf a, vf b) {
    return GLM5_SHUFFLE(a, b, 0, 1, 2, 3, 12, 13, 14, 15) + GLM5_SHUFFLE(a, b, 4, 5, 6, 7, 8, 9, 10, 11);
}
template <> GLM5_INLINE vf fold<2>(vf a, vf b) {
    return GLM5_SHUFFLE(a, b, 0, 1, 10, 11, 4, 5, 14, 15) + GLM5_SHUFFLE(a, b, 2, 3, 8, 9, 6, 7, 12, 13);
}
template <> GLM5_INLINE vf fold<1>(vf a, vf b) {
    return GLM5_SHUFFLE(a, b, 0, 9, 2, 11, 4, 13, 6, 15) + GLM5_SHUFFLE(a, b, 1, 8, 3, 10, 5, 12, 7, 14);
}
#else
template <> GLM5_INLINE vf fold<2>(vf a, vf b) { return GLM5_SHUFFLE(a, b, 0, 1, 6, 7) + GLM5_SHUFFLE(a, b, 2, 3, 4, 5); }
template <> GLM5_INLINE vf fold<1>(vf a, vf b) { return GLM5_SHUFFLE(a, b, 0, 5, 2, 7) + GLM5_SHUFFLE(a, b, 1, 4, 3, 6); }
#endif

template <int D> struct Tree {
    static GLM5_INLINE vf sum(vf* a) {
        GLM5_UNROLL
        for (int i = 0; i < D; i++) a[i] = fold<D>(a[i], a[i + D]);
        return Tree<D / 2>::sum(a);
    }
};
template <> struct Tree<0> {
    static GLM5_INLINE vf sum(vf* a) { return a[0]; }
};

// Of a pair of vectors that are D rows apart, swaps the lanes with bit D set of `a` with those with it clear of `b`.
template <int D> GLM5_INLINE void exchange(vf& a, vf& b);
#define GLM5_EXCHANGE(D, LOW, HIGH)                        \
    template <> GLM5_INLINE void exchange<D>(vf& a, vf& b) { \
        vf low = GLM5_SHUFFLE(a, b, LOW);                  \
        b = GLM5_SHUFFLE(a, b, HIGH);                      \
        a = low;                                           \
    }
#define GLM5_LIST(...) __VA_ARGS__
#if GLM5_LANES == 16
GLM5_EXCHANGE(8, GLM5_LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
              GLM5_LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
GLM5_EXCHANGE(4, GLM5_LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
              GLM5_LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
GLM5_EXCHANGE(2, GLM5_LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
              GLM5_LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
GLM5_EXCHANGE(1, GLM5_LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
              GLM5_LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#elif GLM5_LANES == 8
GLM5_EXCHANGE(4, GLM5_LIST(0, 1, 2, 3, 8, 9, 10, 11), GLM5_LIST(4, 5, 6, 7, 12, 13, 14, 15))
GLM5_EXCHANGE(2, GLM5_LIST(0, 1, 8, 9, 4, 5, 12, 13), GLM5_LIST(2, 3, 10, 11, 6, 7, 14, 15))
GLM5_EXCHANGE(1, GLM5_LIST(0, 8, 2, 10, 4, 12, 6, 14), GLM5_LIST(1, 9, 3, 11, 5, 13, 7, 15))
#else
GLM5_EXCHANGE(2, GLM5_LIST(0, 1, 4, 5), GLM5_LIST(2, 3, 6, 7))
GLM5_EXCHANGE(1, GLM5_LIST(0, 4, 2, 6), GLM5_LIST(1, 5, 3, 7))
#endif

// Rows become columns: LANES vectors, in place.
template <int D = LANES / 2> GLM5_INLINE void transpose(vf* a) {
    GLM5_UNROLL
    for (int i = 0; i < LANES; i++)
        if (!(i & D)) exchange<D>(a[i], a[i + D]);
    if constexpr (D > 1) transpose<D / 2>(a);
}

// Whether any lane of a comparison holds.
GLM5_INLINE bool any_lane(vi holds) {
#if GLM5_LANES == 16
    return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds) != 0;
#elif GLM5_LANES == 8 && defined(__AVX2__)
    return __builtin_ia32_movmskps256((vf)holds) != 0;
#else
    int32_t x[LANES];
    *(vi_loose*)x = holds;
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= x[i];
    return any != 0;
#endif
}

// Lane i of the result is the sum over the lanes of a[i], for LANES vectors (overwritten).
GLM5_INLINE vf reduce_lanes(vf* a) { return Tree<LANES / 2>::sum(a); }

// Sum over the lanes of one vector, in the same tree order as reduce_lanes.
GLM5_INLINE float sum_lanes(vf v) {
    float x[LANES];
    store(x, v);
    for (int d = LANES / 2; d; d /= 2)
        for (int i = 0; i < d; i++) x[i] += x[i + d];
    return x[0];
}

GLM5_INLINE float max_lanes(vf v) {
    float x[LANES];
    store(x, v);
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

GLM5_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }

// exp(x) for x <= 88 to 2 ulp; below -87.3 it is 0, NaN stays NaN (Cody-Waite reduction, degree-6 polynomial).
GLM5_INLINE vf exp_lanes(vf x) {
    const vf shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    vf bounded = x > splat(-87.3f) ? x : splat(-87.3f);
    bounded = bounded < splat(88.0f) ? bounded : splat(88.0f);
    vf turns = bounded * 1.44269504f + shift;
    vi exponent = (vi)turns << 23;
    turns -= shift;
    vf r = bounded - turns * 0.693359375f;
    r = r + turns * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vf result = (vf)((vi)p + exponent);
    result = x < splat(-87.3f) ? (vf){} : result;
    return x == x ? result : x;
}

// The first n < LANES elements at p, then zeros.
GLM5_INLINE vf load_part(const float* p, int64_t n) {
    float x[LANES] = {};
    memcpy(x, p, sizeof(float) * n);
    return load(x);
}

// R x N dot products over k, R * N == LANES: lane r * N + n is rows[r] . columns[n].
template <int R, int N> GLM5_INLINE vf dot_tile(const float* const* rows, const float* const* columns, int64_t k) {
    vf sums[LANES];
    GLM5_UNROLL
    for (int i = 0; i < LANES; i++) sums[i] = (vf){};
    int64_t d = 0;
    for (; d + LANES <= k; d += LANES) {
        vf c[N];
        GLM5_UNROLL
        for (int n = 0; n < N; n++) c[n] = load(columns[n] + d);
        GLM5_UNROLL
        for (int r = 0; r < R; r++) {
            vf x = load(rows[r] + d);
            GLM5_UNROLL
            for (int n = 0; n < N; n++) sums[r * N + n] += x * c[n];
        }
    }
    if (d < k)
        for (int i = 0; i < LANES; i++) sums[i] += load_part(rows[i / N] + d, k - d) * load_part(columns[i % N] + d, k - d);
    return reduce_lanes(sums);
}

// Aligned memory that is freed with its owner. Contents are not initialised. Large memory is asked for in huge pages,
// because rows that are gathered at random would miss the address cache at every row.
class Scratch {
   public:
    explicit Scratch(int64_t bytes) {
        const int64_t huge = 1 << 21, unit = bytes >= 2 * huge ? huge : 64, size = (bytes + 64 + unit - 1) / unit * unit;
        next_ = memory_ = static_cast<char*>(aligned_alloc(unit, size));
        if (!memory_) abort();
#if defined(MADV_HUGEPAGE)
        if (unit == huge) madvise(memory_, size, MADV_HUGEPAGE);
#endif
    }
    ~Scratch() { free(memory_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    template <class T> T* take(int64_t count) {
        T* result = reinterpret_cast<T*>(next_);
        next_ += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
        return result;
    }
    // Bytes that `take` uses for `count` elements of `size` bytes.
    static int64_t need(int64_t count, int64_t size = 4) { return (count * size + 63) / 64 * 64; }

   private:
    char* memory_;
    char* next_;
};

// body(begin, end) over [0, n) in pieces of `grain`; on one thread a single plain call.
template <class Body> static void parallel(int64_t n, int64_t grain, int threads, const Body& body) {
    int64_t pieces = (n + grain - 1) / grain;
    if (threads <= 1 || pieces <= 1) {
        if (n > 0) body((int64_t)0, n);
        return;
    }
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) schedule(dynamic)
#endif
    for (int64_t piece = 0; piece < pieces; piece++) body(piece * grain, at_most(n, (piece + 1) * grain));
}

}  // namespace
