// Which instruction set this machine can run, and which sources this library was built from.

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define GLM5_VISIBLE extern "C" __attribute__((visibility("default")))

namespace {

// AMX needs the processor and, as its state is large, the kernel's permission for this process.
bool has_matrix_unit() {
#if defined(__x86_64__) && defined(__linux__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1u << 22) || !(d & 1u << 24)) return false;  // AMX-BF16, -TILE
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return false;                      // AVX512-BF16
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}

}  // namespace

GLM5_VISIBLE const char* glm5_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
        return has_matrix_unit() ? "amx" : "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "plain";
}

GLM5_VISIBLE const char* glm5_sources() { return GLM5_SOURCES; }
