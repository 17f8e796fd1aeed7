#ifndef BT_BENCH_ENGINE_PART_TIMES_H
#define BT_BENCH_ENGINE_PART_TIMES_H

/* Where the time of a forward pass goes: a backend's table with a clock around each call. The calls of one context come from
 * one thread, so wall time adds up. One context at a time. */

#include <stdbool.h>
#include <stdint.h>
#include "model/model_int.h"

enum bench_part {
    BENCH_EMBED,
    BENCH_GEMM,
    BENCH_NORM,
    BENCH_ROPE,
    BENCH_KV_STORE,
    BENCH_ATTENTION,
    BENCH_GLU,
    BENCH_ADD,
    BENCH_MOE,   /* experts with their products */
    BENCH_OTHER, /* gather, softcap, reads */
    BENCH_PARTS,
};

struct bench_times {
    uint64_t ns[BENCH_PARTS], calls[BENCH_PARTS];
};

const char *bench_part_name(enum bench_part p);
/* From here on every call through k is timed. k: borrowed, and must live as long as the process measures. */
void bench_parts_watch(struct bt_kctx *k);
/* What was counted since the last call. */
struct bench_times bench_parts_take(void);

/* A stretch of calls begins that is like the ones before it, call for call (a step, a prompt); forget: like none before. */
void bench_parts_begin(bool forget);
/* The fastest that each call of such a stretch was, and the fastest time between calls, added up: what the stretch takes when
 * nobody else has the CPU. 0: nothing was measured, or a stretch of too many calls. Nanoseconds. */
uint64_t bench_parts_fastest(void);
/* The stretch ends; took: its whole time, nanoseconds. */
void bench_parts_end(uint64_t took);

/* Products alone, by matrix: names such as "ffn_down" with what all layers took, largest first. Counted since watch or the last
 * call. Returns how many. */
struct bench_matrix {
    char name[64];
    uint32_t n_matrices;
    uint64_t packed_bytes; /* of all of them */
    uint64_t ns;
};
uint32_t bench_parts_matrices(const struct bt_model *m, struct bench_matrix *out, uint32_t max);

#endif
