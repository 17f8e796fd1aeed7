/* Peak arithmetic and peak reading, measured on the calling thread. */

#include "bench/kernels/bench_limits.h"

#include <stdint.h>
#include <time.h>
#include "base/clock.h"

static uint64_t thread_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts); /* others on the machine do not lower the limit */
    return (uint64_t)ts.tv_sec * BT_NS_PER_S + (uint64_t)ts.tv_nsec;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* 12 independent chains hide the latency; the empty asm keeps them in registers and the loop alive. */
#define FMA_LOOP(T, SET1, FMA)                                                                     \
    T a[12], x = SET1(0.999F), y = SET1(1e-6F);                                                    \
    for (int i = 0; i < 12; i++) {                                                                 \
        a[i] = SET1((float)i);                                                                     \
    }                                                                                              \
    for (uint64_t n = 0; n < rounds; n++) {                                                        \
        _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++)                                      \
        {                                                                                          \
            a[i] = FMA(a[i], x, y);                                                                \
        }                                                                                          \
        __asm__ volatile(""                                                                        \
                         : "+v"(a[0]), "+v"(a[1]), "+v"(a[2]), "+v"(a[3]), "+v"(a[4]), "+v"(a[5]), \
                           "+v"(a[6]), "+v"(a[7]), "+v"(a[8]), "+v"(a[9]), "+v"(a[10]),            \
                           "+v"(a[11]));                                                           \
    }

__attribute__((target("avx2,fma"), noinline)) static void fma_256(uint64_t rounds)
{
    FMA_LOOP(__m256, _mm256_set1_ps, _mm256_fmadd_ps)
}

__attribute__((target("avx512f"), noinline)) static void fma_512(uint64_t rounds)
{
    FMA_LOOP(__m512, _mm512_set1_ps, _mm512_fmadd_ps)
}

double bt_bench_fma_peak(int vector_bits)
{
    const uint64_t rounds = 20000000;

    if (vector_bits == 512 ? !__builtin_cpu_supports("avx512f") : !__builtin_cpu_supports("fma")) {
        return 0;
    }
    uint64_t t = thread_ns();
    (vector_bits == 512 ? fma_512 : fma_256)(rounds);
    t = thread_ns() - t;
    return (double)rounds * 12 * 2 * (vector_bits / 32) / (double)t;
}
#else
double bt_bench_fma_peak(int vector_bits)
{
    (void)vector_bits;
    return 0;
}
#endif

double bt_bench_read_peak(const void *p, size_t n)
{
    const uint64_t *q = p;
    size_t quarter = n / 32;
    uint64_t sum[8] = {0};

    uint64_t t = thread_ns();
    for (size_t i = 0; i + 8 <= quarter; i += 8) {
        for (size_t s = 0; s < 4; s++) {
            for (size_t j = 0; j < 8; j++) {
                sum[j] += q[s * quarter + i + j];
            }
        }
        __builtin_prefetch(&q[i + 128]);
    }
    t = thread_ns() - t;
    __asm__ volatile("" ::"r"(sum) : "memory");
    return (double)n / (double)t;
}
