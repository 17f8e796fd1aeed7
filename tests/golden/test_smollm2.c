/* A real model end to end below the engine: SmolLM2-135M-Instruct from its GGUF file. Token ids, the rendered chat, the
 * best logits and the greedy text of every prompt against tests/golden/smollm2.json.
 * usage: PROGRAM [FILE.gguf]; without one, $BATON_SMOLLM2_GGUF; skipped when neither is there. */

#include <jansson.h>
#include <unistd.h>
#include "files/gguf.h"
#include "tests/check.h"
#include "tests/model_run.h"
#include "text/template.h"
#include "text/tokenizer.h"

enum { IDS_MAX = 512 };

#define LOGIT_TOLERANCE 5e-4 /* float32 over 30 layers, logits of about 20 */
#define MARGIN_MIN      1e-2
#define OTHER_MARGIN    0.5 /* llama.cpp quantises activations: steps closer than this may part */

static uint32_t read_ids(const json_t *list, uint32_t *ids)
{
    uint32_t n = (uint32_t)json_array_size(list);

    n = n < IDS_MAX ? n : IDS_MAX;
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    }
    return n;
}

static void check_text(const struct bt_tokenizer *t, const json_t *c, bool chat)
{
    const json_t *text = json_object_get(c, "text");
    uint32_t want[IDS_MAX], n = read_ids(json_object_get(c, "input_ids"), want);
    struct bt_ids ids = {0};

    CHECK_EQ(bt_tokenizer_encode(t, json_string_value(text), json_string_length(text),
                                 chat ? BT_TOK_PARSE_SPECIAL : 0, &ids, NULL),
             BT_OK);
    CHECK(ids.len == n && memcmp(ids.v, want, n * sizeof(want[0])) == 0);
    bt_ids_fini(&ids);
}

static void check_chat(const struct bt_template_files *f, const json_t *c)
{
    json_t *vars = json_pack("{s:O, s:b, s:n, s:s, s:s}", "messages",
                             json_object_get(c, "messages"), "add_generation_prompt", 1, "tools",
                             "bos_token", f->bos_token, "eos_token", f->eos_token);
    char *dump = json_dumps(vars, 0);
    struct bt_buf out = {0};

    CHECK_EQ(bt_template_render_json(f->tmpl, dump, strlen(dump), 0, &out, NULL), BT_OK);
    CHECK_STR(out.data, json_string_value(json_object_get(c, "text")));
    bt_buf_fini(&out);
    free(dump);
    json_decref(vars);
}

/* How many of the steps that a reference took are taken; a miss at a step with less than margin_min is no failure. */
static uint32_t check_greedy(const uint32_t *got, const json_t *want, const json_t *margins,
                             double margin_min, const char *name)
{
    uint32_t n = (uint32_t)json_array_size(want);

    for (uint32_t i = 0; i < n; i++) {
        if (got[i] != (uint32_t)json_integer_value(json_array_get(want, i))) {
            CHECK(json_number_value(json_array_get(margins, i)) < margin_min);
            if (json_number_value(json_array_get(margins, i)) >= margin_min) {
                fprintf(stderr, "  %s: step %u\n", name, i);
            }
            return i;
        }
    }
    return n;
}

static void check_case(struct bt_model_run *r, const json_t *c, float *logits)
{
    const json_t *best = json_object_get(c, "exact_best"),
                 *exact = json_object_get(c, "exact_greedy");
    uint32_t ids[IDS_MAX], n = read_ids(json_object_get(c, "input_ids"), ids),
                           vocab = bt_model_info(r->m)->vocab;
    uint32_t got[64] = {0}, steps = (uint32_t)json_array_size(exact);
    const char *name = json_string_value(json_object_get(c, "name"));
    double worst = 0.0;

    steps = steps < 64 ? steps : 64;
    bt_model_run_pool(r, 16, BT_DTYPE_F32, n + steps);
    CHECK_EQ(bt_model_run_tokens(r, ids, n, 0, 128, logits), BT_OK);
    for (size_t i = 0; i < json_array_size(best); i++) {
        const json_t *pair = json_array_get(best, i);
        double d = fabs((double)logits[json_integer_value(json_array_get(pair, 0))] -
                        json_number_value(json_array_get(pair, 1)));

        worst = d <= worst ? worst : d;
    }
    CHECK(worst <= LOGIT_TOLERANCE);
    for (uint32_t i = 0; i < steps; i++) {
        got[i] = bt_model_run_argmax(logits, vocab);
        if (i + 1 < steps) {
            CHECK_EQ(bt_model_run_tokens(r, &got[i], 1, n + i, 1, logits), BT_OK);
        }
    }
    bt_model_run_close_pool(r);
    printf(
        "%-8s %3u tokens, logit error %.2g, greedy as float32 for %u steps, as llama.cpp for %u\n",
        name, n, worst,
        check_greedy(got, exact, json_object_get(c, "exact_top1_top2_margin"), MARGIN_MIN, name),
        check_greedy(got, json_object_get(c, "greedy"),
                     json_object_get(c, "greedy_top1_top2_margin"), OTHER_MARGIN, name));
}

static void check_file(const char *path, struct bt_kctx *k)
{
    struct bt_template_files files = {0};
    struct bt_tokenizer *tok = NULL;
    struct bt_model_run r = {0};
    struct bt_gguf *g = NULL;
    struct bt_err err = {0};
    json_t *doc = json_load_file("tests/golden/smollm2.json", 0, NULL), *c;
    float *logits = NULL;
    size_t i;
    bool ok = bt_gguf_open(path, &g, &err) == BT_OK &&
              bt_tokenizer_open_gguf(g, &tok, &err) == BT_OK &&
              bt_template_load(path, &files, &err) == BT_OK &&
              bt_model_run_open(&r, path, k, &err) == BT_OK;

    CHECK(ok && doc != NULL && files.tmpl != NULL);
    if (ok && doc != NULL) {
        logits = bt_calloc(bt_model_info(r.m)->vocab, sizeof(float));
        json_array_foreach(json_object_get(doc, "cases"), i, c)
        {
            bool chat = json_object_get(c, "messages") != NULL;

            check_text(tok, c, chat);
            if (chat) {
                check_chat(&files, c);
            }
            check_case(&r, c, logits);
        }
    } else {
        fprintf(stderr, "%s\n", err.msg);
    }
    bt_free(logits);
    bt_model_run_close(&r);
    bt_template_files_fini(&files);
    bt_tokenizer_destroy(tok);
    bt_gguf_close(g);
    json_decref(doc);
}

int main(int argc, char **argv)
{
    const char *path = argc > 1 ? argv[1] : getenv("BATON_SMOLLM2_GGUF");
    struct bt_k_opts opts = {.n_threads = 2, .isa = "auto"};
    struct bt_kctx *k = NULL;
    struct bt_err err = {0};

    if (path == NULL || access(path, R_OK) != 0) {
        printf("skipped: no SmolLM2-135M-Instruct.Q4_1.gguf (set BATON_SMOLLM2_GGUF)\n");
        return BT_TEST_SKIP;
    }
    if (bt_k_create_cpu(&opts, &k, &err) != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    check_file(path, k);
    bt_k_destroy(k);
    return bt_test_done();
}
