/* A clock around each call of a backend's table. Owns the changed table; refuses to know what the calls compute. */

#include "bench/engine/part_times.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/clock.h"
#include "kernels/backend_int.h"

#define CALLS_MAX   65536U
#define WEIGHTS_MAX 8192U /* a power of two, well above any model's matrices */

static struct bt_backend_ops timed;
static const struct bt_backend_ops *inner;
static struct bench_times times;
static struct {
    const struct bt_kweight *w;
    uint64_t ns;
} by_weight[WEIGHTS_MAX]; /* open addressing */
static struct {
    uint64_t call[CALLS_MAX];
    uint64_t between; /* all times between calls of a stretch together */
    uint64_t inside;  /* of the current one: all calls together */
    uint32_t n, i;    /* calls of a stretch; of the current one until now */
    bool first;
} fastest;

const char *bench_part_name(enum bench_part p)
{
    static const char *const names[BENCH_PARTS] = {"embed",     "gemm", "norm", "rope", "kv store",
                                                   "attention", "glu",  "add",  "moe",  "other"};
    return names[p];
}

static uint64_t count(enum bench_part p, uint64_t t0)
{
    uint64_t ns = bt_clock_ns() - t0;

    times.ns[p] += ns;
    times.calls[p]++;
    if (fastest.i < CALLS_MAX) {
        uint64_t *least = &fastest.call[fastest.i++];
        *least = fastest.first || ns < *least ? ns : *least;
    }
    fastest.inside += ns;
    return ns;
}

void bench_parts_begin(bool forget)
{
    fastest.first = forget;
    fastest.i = 0;
    fastest.inside = 0;
}

void bench_parts_end(uint64_t took)
{
    uint64_t between = took - fastest.inside;

    BT_ASSERT(fastest.first || fastest.i == fastest.n);
    fastest.n = fastest.i;
    fastest.between = fastest.first || between < fastest.between ? between : fastest.between;
}

uint64_t bench_parts_fastest(void)
{
    uint64_t ns = fastest.between;

    for (uint32_t i = 0; i < fastest.n; i++) {
        ns += fastest.call[i];
    }
    return fastest.n < CALLS_MAX ? ns : 0;
}

static uint64_t *ns_of(const struct bt_kweight *w)
{
    uint32_t i = (uint32_t)((uintptr_t)w / 16 * 2654435761U) % WEIGHTS_MAX;

    for (uint32_t n = 0; by_weight[i].w != NULL && by_weight[i].w != w; n++) {
        BT_ASSERT(n < WEIGHTS_MAX);
        i = (i + 1) % WEIGHTS_MAX;
    }
    by_weight[i].w = w;
    return &by_weight[i].ns;
}

static void t_embed(struct bt_kctx *k, float *y, const struct bt_kweight *table,
                    const uint32_t *ids, uint32_t n_ids, float scale)
{
    uint64_t t0 = bt_clock_ns();
    inner->embed(k, y, table, ids, n_ids, scale);
    count(BENCH_EMBED, t0);
}

static void t_gemm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                   const struct bt_kweight *w, const float *bias, uint32_t n_rows)
{
    uint64_t t0 = bt_clock_ns();
    inner->gemm(k, y, ldy, x, ldx, w, bias, n_rows);
    *ns_of(w) += count(BENCH_GEMM, t0);
}

static void t_gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                       const float *x, size_t ldx, uint32_t n_rows)
{
    uint64_t t0 = bt_clock_ns();
    size_t bytes = 0;

    inner->gemm_all(k, products, n, x, ldx, n_rows);
    uint64_t ns = count(BENCH_GEMM, t0);
    for (uint32_t i = 0; i < n; i++) {
        bytes += products[i].w->packed_bytes;
    }
    for (uint32_t i = 0; i < n; i++) { /* shared out by their size */
        *ns_of(products[i].w) += ns * products[i].w->packed_bytes / bytes;
    }
}

static void t_rmsnorm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                      const float *w, float w_offset, float eps, uint32_t n_rows, uint32_t n_sub,
                      uint32_t dim)
{
    uint64_t t0 = bt_clock_ns();
    inner->rmsnorm(k, y, ldy, x, ldx, w, w_offset, eps, n_rows, n_sub, dim);
    count(BENCH_NORM, t0);
}

static void t_rope(struct bt_kctx *k, float *x, size_t ldx, const float *cos, const float *sin,
                   uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, uint32_t rot_dim,
                   bool interleaved)
{
    uint64_t t0 = bt_clock_ns();
    inner->rope(k, x, ldx, cos, sin, n_rows, n_heads, head_dim, rot_dim, interleaved);
    count(BENCH_ROPE, t0);
}

static void t_kv_store(struct bt_kctx *k, const struct bt_k_kv *kv, const float *key, size_t ldk,
                       const float *value, size_t ldv, const struct bt_k_span *spans,
                       uint32_t n_spans)
{
    uint64_t t0 = bt_clock_ns();
    inner->kv_store(k, kv, key, ldk, value, ldv, spans, n_spans);
    count(BENCH_KV_STORE, t0);
}

static void t_attention(struct bt_kctx *k, const struct bt_k_attn *a, const struct bt_k_kv *kv,
                        const struct bt_k_span *spans, uint32_t n_spans)
{
    uint64_t t0 = bt_clock_ns();
    inner->attention(k, a, kv, spans, n_spans);
    count(BENCH_ATTENTION, t0);
}

static void t_glu(struct bt_kctx *k, float *y, size_t ldy, const float *gate, size_t ldg,
                  const float *up, size_t ldu, uint32_t n_rows, uint32_t n_cols, enum bt_k_act act)
{
    uint64_t t0 = bt_clock_ns();
    inner->glu(k, y, ldy, gate, ldg, up, ldu, n_rows, n_cols, act);
    count(BENCH_GLU, t0);
}

static void t_add(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                  uint32_t n_rows, uint32_t n_cols)
{
    uint64_t t0 = bt_clock_ns();
    inner->add(k, y, ldy, x, ldx, n_rows, n_cols);
    count(BENCH_ADD, t0);
}

static void t_softcap(struct bt_kctx *k, float *x, size_t ldx, float cap, uint32_t n_rows,
                      uint32_t n_cols)
{
    uint64_t t0 = bt_clock_ns();
    inner->softcap(k, x, ldx, cap, n_rows, n_cols);
    count(BENCH_OTHER, t0);
}

static void t_gather_rows(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                          const uint32_t *rows, uint32_t n, uint32_t n_cols)
{
    uint64_t t0 = bt_clock_ns();
    inner->gather_rows(k, y, ldy, x, ldx, rows, n, n_cols);
    count(BENCH_OTHER, t0);
}

static void t_read(struct bt_kctx *k, void *host, const void *dev, size_t bytes)
{
    uint64_t t0 = bt_clock_ns();
    inner->read(k, host, dev, bytes);
    count(BENCH_OTHER, t0);
}

static void t_moe_ffn(struct bt_kctx *k, float *out, const float *x, const float *logits,
                      const struct bt_k_moe *moe, uint32_t n_rows)
{
    uint64_t t0 = bt_clock_ns();
    inner->moe_ffn(k, out, x, logits, moe, n_rows);
    count(BENCH_MOE, t0);
}

void bench_parts_watch(struct bt_kctx *k)
{
    inner = k->ops;
    timed = *inner;
    timed.embed = t_embed;
    timed.gemm = t_gemm;
    timed.gemm_all = inner->gemm_all != NULL ? t_gemm_all : NULL;
    timed.rmsnorm = t_rmsnorm;
    timed.rope = t_rope;
    timed.kv_store = t_kv_store;
    timed.attention = t_attention;
    timed.glu = t_glu;
    timed.add = t_add;
    timed.softcap = t_softcap;
    timed.gather_rows = t_gather_rows;
    timed.read = t_read;
    timed.moe_ffn = t_moe_ffn;
    k->ops = &timed;
}

struct bench_times bench_parts_take(void)
{
    struct bench_times t = times;

    memset(&times, 0, sizeof(times));
    return t;
}

/* "model.layers.3.mlp.up_proj.weight", "blk.3.ffn_up.weight": what follows the last number, without ".weight". */
static void matrix_name(char out[64], const char *tensor)
{
    const char *from = tensor;

    for (const char *p = tensor; *p != 0; p++) {
        if (*p == '.' && p[1] >= '0' && p[1] <= '9') {
            const char *q = p + 1;
            while (*q >= '0' && *q <= '9') {
                q++;
            }
            from = *q == '.' ? q + 1 : from;
        }
    }
    (void)snprintf(out, 64, "%s", from); /* cut if long: it is for reading */
    char *tail = strstr(out, ".weight");
    if (tail != NULL) {
        *tail = 0;
    }
}

static int by_ns(const void *a, const void *b)
{
    uint64_t x = ((const struct bench_matrix *)a)->ns, y = ((const struct bench_matrix *)b)->ns;
    return x < y ? 1 : x > y ? -1 : 0;
}

uint32_t bench_parts_matrices(const struct bt_model *m, struct bench_matrix *out, uint32_t max)
{
    uint32_t n = 0;

    for (size_t i = 0; i < m->n_slots; i++) {
        char name[64];
        uint32_t at = 0;
        if (m->slots[i].weight == NULL || !m->slots[i].for_gemm) {
            continue;
        }
        matrix_name(name, m->slots[i].tensor->name);
        while (at < n && strcmp(out[at].name, name) != 0) {
            at++;
        }
        if (at == max) {
            continue;
        }
        if (at == n) {
            out[n++] = (struct bench_matrix){0};
            memcpy(out[at].name, name, sizeof(name));
        }
        uint64_t *ns = ns_of(*m->slots[i].weight);
        out[at].n_matrices++;
        out[at].packed_bytes += bt_k_weight_bytes(*m->slots[i].weight);
        out[at].ns += *ns;
        *ns = 0;
    }
    qsort(out, n, sizeof(*out), by_ns);
    return n;
}
