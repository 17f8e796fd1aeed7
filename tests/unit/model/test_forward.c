/* The forward pass on a tiny random model: a ragged batch equals its sequences computed alone, to
 * the bit; layer_done is called in order and can abandon a pass at any layer; KV types round as
 * they should. */

#include "model/model.h"

#include "tests/check.h"
#include "tests/model_run.h"
#include "tests/tiny_model.h"

enum { N_SEQ = 3, LEN = 40, PAGE = 8, PAGES = LEN / PAGE };

static struct bt_kctx *kctx;
static uint32_t ids[N_SEQ][LEN];
static float alone[N_SEQ][LEN][TINY_VOCAB];

static const char windowed[] = "\"mistral\", \"sliding_window\": 12, "
                               "\"layer_types\": [\"sliding_attention\", \"full_attention\"]";

static const char *config(bool windows)
{
    static char out[2048];
    const char *at = strstr(tiny_config, "\"llama\"");

    (void)snprintf(out, sizeof(out), "%.*s%s%s", (int)(at - tiny_config), tiny_config,
                   windows ? windowed : "\"llama\"", at + 7);
    return out;
}

/* Every sequence token by token, alone in the batch. */
static void run_alone(struct bt_model_run *r, enum bt_dtype dtype)
{
    for (uint32_t s = 0; s < N_SEQ; s++) {
        bt_model_run_pool(r, PAGE, dtype, LEN);
        for (uint32_t i = 0; i < LEN; i++) {
            CHECK_EQ(bt_model_run_tokens(r, &ids[s][i], 1, i, 1, alone[s][i]), BT_OK);
        }
        bt_model_run_close_pool(r);
    }
}

/* All sequences in one pool, in passes that mix chunks of different sizes; logits of every row. */
static void run_ragged(struct bt_model_run *r)
{
    static const uint32_t steps[][N_SEQ] = {
        {9, 1, 0}, {1, 17, 5}, {0, 1, 1}, {30, 20, 1}, {0, 1, 33}};
    static float logits[N_SEQ * LEN][TINY_VOCAB];
    uint32_t pos[N_SEQ] = {0}, pages[BT_MODEL_KV_GROUPS_MAX][N_SEQ][PAGES], rows[N_SEQ * LEN],
             tokens[N_SEQ * LEN];

    bt_model_run_pool(r, PAGE, BT_DTYPE_F32, N_SEQ * LEN);
    for (uint32_t g = 0; g < BT_MODEL_KV_GROUPS_MAX; g++) {
        for (uint32_t p = 0; p < N_SEQ * PAGES; p++) {
            pages[g][p % N_SEQ][p / N_SEQ] = (p * 7 + g) % (N_SEQ * PAGES);
        }
    }
    for (size_t k = 0; k < sizeof(steps) / sizeof(steps[0]); k++) {
        struct bt_model_span spans[N_SEQ];
        struct bt_model_batch b = {
            .tokens = tokens, .spans = spans, .out_rows = rows, .logits = logits[0]};
        for (uint32_t s = 0; s < N_SEQ; s++) {
            uint32_t n = steps[k][s];
            if (n == 0) {
                continue;
            }
            struct bt_model_span *span = &spans[b.n_spans++];
            *span = (struct bt_model_span){.n = n, .pos = pos[s]};
            for (uint32_t g = 0; g < BT_MODEL_KV_GROUPS_MAX; g++) {
                span->pages[g] = pages[g][s];
            }
            for (uint32_t i = 0; i < n; i++) {
                rows[b.n_tokens] = b.n_tokens;
                tokens[b.n_tokens++] = ids[s][pos[s] + i];
            }
        }
        b.n_out = b.n_tokens;
        CHECK_EQ(bt_model_forward(r->m, r->ws, &r->kv, &b), BT_OK);
        uint32_t row = 0;
        for (uint32_t s = 0; s < N_SEQ; s++) {
            for (uint32_t i = 0; i < steps[k][s]; i++, row++) {
                CHECK(memcmp(logits[row], alone[s][pos[s] + i], sizeof(logits[row])) == 0);
            }
            pos[s] += steps[k][s];
        }
    }
    for (uint32_t s = 0; s < N_SEQ; s++) {
        CHECK_EQ(pos[s], LEN);
    }
    bt_model_run_close_pool(r);
}

struct stop {
    uint32_t calls, stop_at;
};

static bool on_layer(void *arg, uint32_t layer)
{
    struct stop *s = arg;

    CHECK_EQ(layer, s->calls);
    s->calls++;
    return layer != s->stop_at;
}

static void test_layer_done(struct bt_model_run *r)
{
    float logits[TINY_VOCAB], before[TINY_VOCAB];

    bt_model_run_pool(r, PAGE, BT_DTYPE_F32, LEN);
    r->layer_done = on_layer;
    for (uint32_t at = 0; at <= TINY_LAYERS; at++) {
        struct stop s = {.stop_at = at};
        r->arg = &s;
        memset(logits, 0x55, sizeof(logits));
        memcpy(before, logits, sizeof(logits));
        enum bt_status st = bt_model_run_tokens(r, ids[0], 20, 0, 20, logits);
        if (at < TINY_LAYERS) {
            CHECK_EQ(st, BT_ERR_CANCELLED);
            CHECK_EQ(s.calls, at + 1);
            CHECK(memcmp(logits, before, sizeof(logits)) == 0);
        } else {
            CHECK_EQ(st, BT_OK);
            CHECK_EQ(s.calls, TINY_LAYERS);
            CHECK(memcmp(logits, alone[0][19], sizeof(logits)) == 0);
        }
    }
    r->layer_done = NULL;
    bt_model_run_close_pool(r);
}

/* Rounded KV is close to, and not the same as, f32 KV; and still independent of chunks. */
static void test_kv_types(struct bt_model_run *r)
{
    static const enum bt_dtype types[] = {BT_DTYPE_F16, BT_DTYPE_BF16, BT_DTYPE_F8};
    static const double most[] = {0.01, 0.08, 0.8};
    static float chunked[TINY_VOCAB], whole[TINY_VOCAB];

    for (size_t t = 0; t < 3; t++) {
        double worst = 0.0;
        bt_model_run_pool(r, PAGE, types[t], LEN);
        CHECK_EQ(bt_model_run_tokens(r, ids[1], LEN, 0, 7, chunked), BT_OK);
        bt_model_run_close_pool(r);
        bt_model_run_pool(r, PAGE, types[t], LEN);
        CHECK_EQ(bt_model_run_tokens(r, ids[1], LEN, 0, LEN, whole), BT_OK);
        bt_model_run_close_pool(r);
        CHECK(memcmp(chunked, whole, sizeof(whole)) == 0);
        for (uint32_t i = 0; i < TINY_VOCAB; i++) {
            worst = fmax(worst, fabs((double)whole[i] - (double)alone[1][LEN - 1][i]));
        }
        CHECK(worst > most[t] / 100 && worst < most[t]);
    }
}

static void count_progress(void *arg, double fraction)
{
    double *last = arg;

    CHECK(fraction >= *last && fraction <= 1.0);
    *last = fraction;
}

int main(void)
{
    struct bt_k_opts opts = {.n_threads = 2};
    struct bt_err err = {0};
    struct tiny_model t;
    uint32_t x = 1;

    CHECK_EQ(bt_k_create_cpu(&opts, &kctx, &err), BT_OK);
    for (uint32_t i = 0; i < N_SEQ * LEN; i++) {
        x = x * 1664525U + 1013904223U;
        ids[i / LEN][i % LEN] = (x >> 16) % TINY_VOCAB;
    }
    for (int w = 0; w < 2; w++) {
        struct bt_model_run r = {.k = kctx};
        double last = 0.0;
        tiny_llama(&t);
        CHECK_EQ(bt_model_open(tiny_write(&t, config(w == 1), 7), &r.m, &err), BT_OK);
        const struct bt_model_load_opts load = {.progress = count_progress, .arg = &last};
        CHECK_EQ(bt_model_load(r.m, kctx, &load, &err), BT_OK);
        CHECK_NEAR(last, 1.0, 1e-12);
        CHECK_EQ(bt_model_info(r.m)->n_groups, w == 1 ? 2 : 1);
        run_alone(&r, BT_DTYPE_F32);
        run_ragged(&r);
        test_layer_done(&r);
        test_kv_types(&r);
        bt_model_run_close(&r);
    }
    bt_k_destroy(kctx);
    tiny_clean();
    return bt_test_done();
}
