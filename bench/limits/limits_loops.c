/* The inner loops of the limits: arithmetic on registers, reading of memory. Knows no clock and no thread. */

#include "bench/limits/limits.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define CHAINS 12 /* independent: they hide the latency */

/* Assembly, because compilers keep some of these chains in memory. S(n): the instructions of chain n. */
#define LOOP(NAME, TARGET, T, X, Y, S)                                                             \
    __attribute__((target(TARGET), noinline)) static void NAME(uint64_t rounds)                    \
    {                                                                                              \
        T x = X, y = Y, c0 = x, c1 = x, c2 = x, c3 = x, c4 = x, c5 = x, c6 = x, c7 = x, c8 = x,    \
          c9 = x, c10 = x, c11 = x, t;                                                             \
        for (uint64_t n = 0; n < rounds; n++) {                                                    \
            __asm__ volatile(S("0") S("1") S("2") S("3") S("4") S("5") S("6") S("7") S("8") S("9") \
                                 S("10") S("11")                                                   \
                             : "+v"(c0), "+v"(c1), "+v"(c2), "+v"(c3), "+v"(c4), "+v"(c5),         \
                               "+v"(c6), "+v"(c7), "+v"(c8), "+v"(c9), "+v"(c10),                  \
                               "+v"(c11), [t] "=&v"(t)                                             \
                             : [x] "v"(x), [y] "v"(y));                                            \
        }                                                                                          \
    }

#define FMA(n)  "vfmadd231ps %[x], %[y], %" n "\n\t"
#define VNNI(n) "vpdpbusd %[x], %[y], %" n "\n\t"
#define BF16(n) "vdpbf16ps %[x], %[y], %" n "\n\t"
/* The product takes the chain as its input, as it would take data that was loaded. */
#define INT8(n)                                                                                    \
    "vpmaddubsw %[x], %" n ", %[t]\n\tvpmaddwd %[y], %[t], %[t]\n\tvpaddd %[t], %" n ", %" n "\n"  \
    "\t"

LOOP(fma_256, "avx2,fma", __m256, _mm256_set1_ps(0.999F), _mm256_set1_ps(1e-6F), FMA)
LOOP(fma_512, "avx512f", __m512, _mm512_set1_ps(0.999F), _mm512_set1_ps(1e-6F), FMA)
LOOP(int8_256, "avx2", __m256i, _mm256_set1_epi8(3), _mm256_set1_epi16(1), INT8)
LOOP(int8_512, "avx512f,avx512bw", __m512i, _mm512_set1_epi8(3), _mm512_set1_epi16(1), INT8)
LOOP(vnni_256, "avx512vnni,avx512vl", __m256i, _mm256_set1_epi8(3), _mm256_set1_epi8(1), VNNI)
LOOP(vnni_512, "avx512vnni,avx512f", __m512i, _mm512_set1_epi8(3), _mm512_set1_epi8(1), VNNI)
LOOP(bf16_512, "avx512bf16,avx512f", __m512, _mm512_set1_ps(0.999F), _mm512_set1_ps(1e-6F), BF16)

uint64_t bench_loop_ops(enum bench_limit l)
{
    static const uint64_t one[BENCH_LIMITS] = {
        [BENCH_FMA_256] = 16,   [BENCH_FMA_512] = 32,  [BENCH_INT8_256] = 64,
        [BENCH_INT8_512] = 128, [BENCH_VNNI_256] = 64, [BENCH_VNNI_512] = 128,
        [BENCH_BF16_512] = 64,
    };
    return one[l] * CHAINS;
}

void bench_loop_run(enum bench_limit l, uint64_t rounds)
{
    static void (*const loops[BENCH_LIMITS])(uint64_t) = {
        [BENCH_FMA_256] = fma_256,   [BENCH_FMA_512] = fma_512,   [BENCH_INT8_256] = int8_256,
        [BENCH_INT8_512] = int8_512, [BENCH_VNNI_256] = vnni_256, [BENCH_VNNI_512] = vnni_512,
        [BENCH_BF16_512] = bf16_512,
    };
    loops[l](rounds);
}

bool bench_limit_present(enum bench_limit l)
{
    bool f512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    bool vnni = f512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");

    switch (l) {
    case BENCH_FMA_256:
    case BENCH_INT8_256:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case BENCH_FMA_512:
    case BENCH_INT8_512:
        return f512;
    case BENCH_VNNI_256:
    case BENCH_VNNI_512:
        return vnni;
    case BENCH_BF16_512:
        return f512 && __builtin_cpu_supports("avx512bf16");
    default:
        return bench_limit_is_read(l);
    }
}

#define READ_LOOP(NAME, TARGET, T, LOAD, OR)                                                       \
    __attribute__((target(TARGET), noinline)) static void NAME(const char *p, size_t n,            \
                                                               size_t streams)                     \
    {                                                                                              \
        size_t each = n / streams;                                                                 \
        T s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};                                                  \
        for (size_t i = 0; i < each; i += 4 * sizeof(T)) {                                         \
            for (size_t s = 0; s < streams; s++) {                                                 \
                const T *q = (const T *)(const void *)(p + s * each + i);                          \
                s0 = OR(s0, LOAD(q));                                                              \
                s1 = OR(s1, LOAD(q + 1));                                                          \
                s2 = OR(s2, LOAD(q + 2));                                                          \
                s3 = OR(s3, LOAD(q + 3));                                                          \
            }                                                                                      \
        }                                                                                          \
        __asm__ volatile("" : : "v"(s0), "v"(s1), "v"(s2), "v"(s3));                               \
    }

READ_LOOP(read_256, "avx2", __m256i, _mm256_loadu_si256, _mm256_or_si256)
READ_LOOP(read_512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_or_si512)
#else
uint64_t bench_loop_ops(enum bench_limit l)
{
    (void)l;
    return 1;
}

void bench_loop_run(enum bench_limit l, uint64_t rounds)
{
    (void)l;
    (void)rounds;
}

bool bench_limit_present(enum bench_limit l)
{
    return bench_limit_is_read(l); /* no other instruction set has loops here */
}
#endif

static void read_words(const char *p, size_t n, size_t streams)
{
    size_t each = n / streams;
    uint64_t sum[8] = {0};

    for (size_t i = 0; i < each; i += 64) {
        for (size_t s = 0; s < streams; s++) {
            const uint64_t *q = (const uint64_t *)(const void *)(p + s * each + i);
            for (size_t j = 0; j < 8; j++) {
                sum[j] |= q[j];
            }
        }
    }
    __asm__ volatile("" ::"r"(sum) : "memory");
}

void bench_loop_read(enum bench_limit l, const void *p, uint64_t n)
{
    size_t streams = l == BENCH_READ_1 ? 1 : l == BENCH_READ_4 ? 4 : 8;

#if defined(__x86_64__)
    if (bench_limit_present(BENCH_FMA_512)) {
        read_512(p, n, streams);
        return;
    }
    if (bench_limit_present(BENCH_FMA_256)) {
        read_256(p, n, streams);
        return;
    }
#endif
    read_words(p, n, streams);
}
