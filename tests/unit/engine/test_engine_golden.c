/* Engine answers against an independent implementation: greedy tokens and the log-probabilities of
 * prompts (echo), all cases of a model in one batch. Arguments: model folders. A folder's reference is the
 * reference.json in it or, for those of ../shared, a file there; what is absent is skipped. */

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include "base/mem.h"
#include "kernels/kv_type.h"
#include "tests/check.h"
#include "tests/unit/engine/engine_drive.h"

#define REFERENCES "../shared/data/reference/models/"
#define MARGIN_MIN 1e-3
#define CASES_MAX  16

static uint32_t id_at(const json_t *list, size_t i)
{
    return (uint32_t)json_integer_value(json_array_get(list, i));
}

static struct drive_run *submit_case(struct drive *d, const json_t *c)
{
    const json_t *ids = json_object_get(c, "input_ids");
    uint32_t n = (uint32_t)json_array_size(ids);
    uint32_t n_out = (uint32_t)json_array_size(json_object_get(c, "greedy"));
    struct drive_run *r = drive_make(bt_engine_model(d->engine), n, n_out, 0);

    for (uint32_t i = 0; i < n; i++) {
        r->prompt[i] = id_at(ids, i);
    }
    r->sampling.temperature = 0.0F;
    r->sampling.ignore_eos = true;
    r->echo = true;
    CHECK_EQ(drive_submit(d, r), BT_OK);
    return r;
}

static void check_case(const struct drive_run *r, const json_t *c, const char *name)
{
    const json_t *greedy = json_object_get(c, "greedy");
    const json_t *margins = json_object_get(c, "greedy_top1_top2_margin");
    const char *label = json_string_value(json_object_get(c, "name"));
    const json_t *want = json_object_get(c, "prompt_nll_sum"); /* not in every reference */
    double nll = 0.0;

    CHECK_EQ(r->n_out, json_array_size(greedy));
    for (uint32_t i = 0; i < r->n_out; i++) {
        double margin = json_number_value(json_array_get(margins, i));

        if (r->out[i].token == id_at(greedy, i)) {
            continue;
        }
        fprintf(stderr, "%s %s: token %u differs, margin %g\n", name, label, i, margin);
        CHECK(margin < MARGIN_MIN);
        break;
    }
    for (uint32_t i = 1; i < r->n_prompt; i++) {
        nll -= (double)r->prompt_logprobs[i];
    }
    CHECK_EQ(r->n_prompt_logprobs, r->n_prompt - 1);
    if (want != NULL) {
        CHECK_NEAR(nll, json_number_value(want), 1e-4 * r->n_prompt);
    }
}

/* false: files are not there. */
static bool check_model(const char *folder)
{
    const char *slash = strrchr(folder, '/'), *name = slash != NULL ? slash + 1 : folder;
    char path[256];
    json_error_t je;

    (void)snprintf(path, sizeof(path), "%s/reference.json", folder);
    json_t *ref = json_load_file(path, 0, &je);

    if (ref == NULL) {
        (void)snprintf(path, sizeof(path), REFERENCES "%s.json", name);
        ref = json_load_file(path, 0, &je);
    }
    if (ref == NULL) {
        printf("skipped: no %s\n", path);
        return false;
    }
    const json_t *cases = json_object_get(ref, "cases");
    size_t n = json_array_size(cases);
    struct drive_run *runs[CASES_MAX];
    struct drive d;

    struct bt_engine_opts o = drive_opts(folder, 16, 100, 4);

    o.kv_dtype = BT_DTYPE_F32;
    drive_init(&d, drive_open(&o), NULL);
    CHECK(n >= 1 && n <= CASES_MAX);
    for (size_t i = 0; i < n && i < CASES_MAX; i++) {
        runs[i] = submit_case(&d, json_array_get(cases, i));
    }
    drive_finish(&d);
    for (size_t i = 0; i < n && i < CASES_MAX; i++) {
        check_case(runs[i], json_array_get(cases, i), name);
        bt_free(runs[i]);
    }
    drive_fini(&d);
    json_decref(ref);
    return true;
}

/* Pages of the type that suits the class, whatever it is that names the class. */
static void check_kv_auto(const char *folder)
{
    static const char *const numerics[] = {NULL, "cpu-f32", "cpu-bf16", "cpu-int8"};
    static const char *const want[] = {"dtype=f32 ", "dtype=f32 ", "dtype=bf16 ", "dtype=bf16 "};

    for (size_t i = 0; i < 4; i++) {
        struct bt_engine_opts o = drive_opts(folder, 16, 100, 4);

        o.kv_dtype = BT_DTYPE_AUTO;
        o.numerics = numerics[i];
        struct bt_engine *e = drive_open(&o);
        CHECK(strstr(bt_engine_layout(e)->kv_layout, want[i]) != NULL);
        bt_engine_destroy(e);
    }
}

int main(int argc, char **argv)
{
    int n = 0;

    check_kv_auto("tests/golden/models/llama");
    for (int i = 1; i < argc; i++) {
        n += check_model(argv[i]);
    }
    return n == 0 ? BT_TEST_SKIP : bt_test_done();
}
