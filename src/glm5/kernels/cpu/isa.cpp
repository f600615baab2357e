// Which instruction set this machine can run, and which sources this library was built from.

#define GLM5_VISIBLE extern "C" __attribute__((visibility("default")))

GLM5_VISIBLE const char* glm5_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "plain";
}

GLM5_VISIBLE const char* glm5_sources() { return GLM5_SOURCES; }
