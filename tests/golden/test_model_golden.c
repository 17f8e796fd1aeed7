/* Logits and greedy texts of whole models against an independent implementation: the committed
 * fixtures, and the larger set beside the repository where it is present. Every prompt is computed
 * whole and in chunks, with several page sizes; these must agree to the bit. */

#include <dirent.h>
#include <jansson.h>
#include <sys/stat.h>
#include "files/out_file.h"
#include "kernels/open.h"
#include "model/export.h"
#include "tests/check.h"
#include "tests/model_run.h"
#include "tests/tempfile.h"
#include "text/tokenizer_export.h"

#define LOGIT_TOLERANCE 1e-4
#define MARGIN_MIN      1e-3

enum { PROMPT_MAX = 1024, VOCAB_MAX = 4096 };

static struct bt_kctx *kctx;
static const char *backend = "cpu"; /* --backend NAME: another one, committed models only */

static uint32_t read_ids(const json_t *list, uint32_t *ids)
{
    uint32_t n = (uint32_t)json_array_size(list);

    CHECK(n <= PROMPT_MAX);
    for (uint32_t i = 0; i < n && i < PROMPT_MAX; i++) {
        ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    }
    return n < PROMPT_MAX ? n : PROMPT_MAX;
}

/* Greedy continuation; a step whose two best logits are closer than MARGIN_MIN may differ and ends
 * the comparison. */
static void check_greedy(struct bt_model_run *r, const json_t *want, const json_t *margins,
                         uint32_t pos, float *logits, const char *name)
{
    uint32_t vocab = bt_model_info(r->m)->vocab, n = (uint32_t)json_array_size(want);

    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = bt_model_run_argmax(logits, vocab),
                 ref = (uint32_t)json_integer_value(json_array_get(want, i));
        const json_t *margin = json_is_array(margins) ? json_array_get(margins, i) : NULL;
        if (id != ref && margin != NULL && json_number_value(margin) < MARGIN_MIN) {
            printf("  %s: greedy differs at step %u, margin %g: not compared further\n", name, i,
                   json_number_value(margin));
            return;
        }
        CHECK_EQ(id, ref);
        if (id != ref) {
            fprintf(stderr, "  %s: greedy step %u\n", name, i);
            return;
        }
        if (i + 1 < n) {
            CHECK_EQ(bt_model_run_tokens(r, &id, 1, pos + i, 1, logits), BT_OK);
        }
    }
}

static double max_error(const float *a, const json_t *ref, uint32_t n)
{
    double worst = 0.0;

    CHECK_EQ(json_array_size(ref), n);
    for (uint32_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - json_number_value(json_array_get(ref, i)));
        worst = d <= worst ? worst : d; /* a NaN stays */
    }
    return worst;
}

static double check_case(struct bt_model_run *r, const json_t *c, const char *model)
{
    static const struct {
        uint32_t chunk, page;
    } ways[] = {{PROMPT_MAX, 16}, {16, 16}, {64, 32}, {7, 8}, {PROMPT_MAX, 128}};
    static float first[VOCAB_MAX], logits[VOCAB_MAX];
    uint32_t ids[PROMPT_MAX], n = read_ids(json_object_get(c, "input_ids"), ids),
                              vocab = bt_model_info(r->m)->vocab;
    const json_t *greedy = json_object_get(c, "greedy");
    double error = 0.0;

    /* An emulated device is slow: two ways are enough there. */
    size_t n_ways = strcmp(backend, "cpu") == 0 ? sizeof(ways) / sizeof(ways[0]) : 2;

    for (size_t w = 0; w < n_ways; w++) {
        bt_model_run_pool(r, ways[w].page, BT_DTYPE_F32, n + (uint32_t)json_array_size(greedy));
        CHECK_EQ(bt_model_run_tokens(r, ids, n, 0, ways[w].chunk, logits), BT_OK);
        if (w == 0) {
            error = max_error(logits, json_object_get(c, "logits"), vocab);
            memcpy(first, logits, sizeof(first));
        }
        CHECK(memcmp(first, logits, vocab * sizeof(float)) == 0);
        if (w < 2) {
            check_greedy(r, greedy, json_object_get(c, "greedy_top1_top2_margin"), n, logits,
                         model);
        }
        bt_model_run_close_pool(r);
    }
    return error;
}

static void check_model(const char *path, const char *ref_path, const char *label)
{
    struct bt_model_run r;
    struct bt_err err = {0};
    json_error_t je;
    json_t *ref = json_load_file(ref_path, 0, &je);
    const json_t *cases = json_object_get(ref, "cases"),
                 *tolerance = json_object_get(ref, "tolerance");
    double worst = 0.0,
           limit = json_is_number(tolerance) ? json_number_value(tolerance) : LOGIT_TOLERANCE;
    size_t i;
    json_t *c;

    CHECK(json_array_size(cases) > 0);
    enum bt_status st = bt_model_run_open(&r, path, kctx, &err);
    CHECK_EQ(st, BT_OK);
    if (st == BT_OK) {
        CHECK(bt_model_info(r.m)->vocab <= VOCAB_MAX);
        json_array_foreach(cases, i, c)
        {
            double e = check_case(&r, c, label);
            worst = e <= worst ? worst : e;
        }
        CHECK(worst <= limit);
        printf("%-28s max logit error %.3g, %zu cases\n", label, worst, json_array_size(cases));
    } else {
        fprintf(stderr, "%s: %s\n", label, err.msg);
    }
    bt_model_run_close(&r);
    json_decref(ref);
}

static bool exists(const char *path)
{
    struct stat sb;

    return stat(path, &sb) == 0;
}

/* The same weights under the other spelling of config.json: the same model to the last bit of its
 * fingerprint. */
static void check_v5(const char *dir, const char *ref_path, const char *label)
{
    static const char *const names[] = {"config.json", "model.safetensors",
                                        "generation_config.json"};
    char from[2048], cwd[512], full_label[300];
    struct bt_model *a = NULL, *b = NULL;
    struct bt_err err = {0};

    CHECK(getcwd(cwd, sizeof(cwd)) != NULL);
    for (size_t i = 0; i < 3; i++) {
        (void)snprintf(from, sizeof(from), "%s/%s/%s", cwd, dir,
                       i == 0 ? "config_v5.json" : names[i]);
        (void)unlink(bt_temp_path(names[i]));
        if (exists(from)) {
            CHECK_EQ(symlink(from, bt_temp_path(names[i])), 0);
        }
    }
    (void)snprintf(full_label, sizeof(full_label), "%s (v5 config)", label);
    check_model(bt_temp_dir(), ref_path, full_label);
    CHECK_EQ(bt_model_open(dir, &a, &err), BT_OK);
    CHECK_EQ(bt_model_open(bt_temp_dir(), &b, &err), BT_OK);
    if (a != NULL && b != NULL) {
        CHECK(bt_model_info(a)->fingerprint == bt_model_info(b)->fingerprint);
    }
    bt_model_destroy(a);
    bt_model_destroy(b);
    bt_temp_clean(names, 3);
    (void)mkdir(bt_temp_dir(), 0700);
}

static enum bt_status export(const char *dir, const char *to, struct bt_err *err) {
    struct bt_model *m = NULL, *back = NULL; struct bt_gguf_writer *w = NULL;
    struct bt_export *e = NULL; struct bt_tok_export_opts tok = {.has_bos = true, .has_eos = true};
    enum bt_status st = bt_model_open(dir, &m, err);

    st = st == BT_OK ? bt_gguf_writer_create(to, &w, err) : st;
    st = st == BT_OK ? bt_export_create(m, BT_DTYPE_F32, w, &e, err) : st; if (st == BT_OK){
        tok.vocab = bt_model_info(m)->vocab; st = bt_tokenizer_export_gguf(dir, &tok, w, err);}
st = st == BT_OK ? bt_gguf_writer_begin(w, err) : st;
st = st == BT_OK ? bt_export_data(e, kctx, NULL, NULL, err) : st;
st = st == BT_OK ? bt_gguf_writer_finish(w, err) : st;
st = st == BT_OK ? bt_model_open(to, &back, err) : st;
st = st == BT_OK ? bt_export_check(m, back, err) : st;
bt_export_destroy(e);
bt_gguf_writer_destroy(w);
bt_model_destroy(m);
bt_model_destroy(back);
return st;
}

/* The model as a GGUF file computes the same. */
static void check_export(const char *dir, const char *ref, const char *label)
{
    char path[512], full_label[300];
    struct bt_err err = {0};

    (void)snprintf(path, sizeof(path), "%s", bt_temp_path("export.gguf"));
    (void)snprintf(full_label, sizeof(full_label), "%s (as GGUF)", label);
    CHECK_EQ(export(dir, path, &err), BT_OK);
    if (exists(path)) {
        check_model(path, ref, full_label);
    } else {
        fprintf(stderr, "%s: %s\n", label, err.msg);
    }
    (void)unlink(path);
}

/* The values of a GGUF file as a Hugging Face directory. */
static enum bt_status export_hf(const char *gguf, const char *folder, struct bt_err *err)
{
    char path[600];
    struct bt_model *m = NULL;
    struct bt_st_writer *w = NULL;
    struct bt_export *e = NULL;
    struct bt_buf config = {0};
    enum bt_status st = bt_model_open(gguf, &m, err);

    (void)mkdir(folder, 0700);
    (void)snprintf(path, sizeof(path), "%s/model.safetensors", folder);
    st = st == BT_OK ? bt_st_writer_create(path, &w, err) : st;
    st = st == BT_OK ? bt_export_create_hf(m, BT_DTYPE_F32, w, &config, &e, err) : st;
    st = st == BT_OK ? bt_st_writer_begin(w, err) : st;
    st = st == BT_OK ? bt_export_data(e, kctx, NULL, NULL, err) : st;
    st = st == BT_OK ? bt_st_writer_finish(w, err) : st;
    (void)snprintf(path, sizeof(path), "%s/config.json", folder);
    st = st == BT_OK ? bt_out_file_put(path, config.data, config.len, err) : st;
    bt_export_destroy(e);
    bt_st_writer_destroy(w);
    bt_buf_fini(&config);
    bt_model_destroy(m);
    return st;
}

static void check_export_hf(const char *gguf, const char *ref, const char *label)
{
    char folder[512], full_label[300];
    struct bt_err err = {0};

    (void)snprintf(folder, sizeof(folder), "%s", bt_temp_path("hf"));
    (void)snprintf(full_label, sizeof(full_label), "%s (as directory)", label);
    enum bt_status st = export_hf(gguf, folder, &err);
    CHECK_EQ(st, BT_OK);
    if (st == BT_OK) {
        check_model(folder, ref, full_label);
    } else {
        fprintf(stderr, "%s: %s\n", label, err.msg);
    }
    bt_temp_remove_folder(folder);
}

static void check_refused(const char *dir, const char *type)
{
    struct bt_model *m = NULL;
    struct bt_err err = {0};

    CHECK_EQ(bt_model_open(dir, &m, &err), BT_ERR_UNSUPPORTED);
    CHECK(strstr(err.msg, type) != NULL && strstr(err.msg, "not supported") != NULL);
    bt_model_destroy(m);
}

static int visible(const struct dirent *d)
{
    return d->d_name[0] != '.';
}

/* Committed: DIR/NAME/{config.json, model.safetensors | model.gguf, reference.json}. */
static int scan_committed(const char *root)
{
    struct dirent **entries;
    int n = scandir(root, &entries, visible, alphasort), found = 0;

    for (int i = 0; i < n; i++) {
        char dir[512], ref[600], gguf[600];
        (void)snprintf(dir, sizeof(dir), "%s/%s", root, entries[i]->d_name);
        (void)snprintf(ref, sizeof(ref), "%s/reference.json", dir);
        (void)snprintf(gguf, sizeof(gguf), "%s/model.gguf", dir);
        if (exists(ref)) {
            check_model(exists(gguf) ? gguf : dir, ref, entries[i]->d_name);
            if (exists(gguf) && strcmp(backend, "cpu") == 0) {
                check_export_hf(gguf, ref, entries[i]->d_name);
            }
            (void)snprintf(gguf, sizeof(gguf), "%s/tokenizer.json", dir);
            if (exists(gguf) && strcmp(backend, "cpu") == 0) {
                check_export(dir, ref, entries[i]->d_name);
            }
            found++;
        }
        free(entries[i]);
    }
    if (n >= 0) {
        free(entries);
    }
    return found;
}

static void scan_shared(const char *models, const char *refs)
{
    struct dirent **entries;
    int n = scandir(models, &entries, visible, alphasort);

    if (n < 0) {
        printf("skipped: no %s\n", models);
        return;
    }
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        char dir[512], ref[600], v5[600];
        (void)snprintf(dir, sizeof(dir), "%s/%s", models, name);
        (void)snprintf(ref, sizeof(ref), "%s/%s.json", refs, name);
        (void)snprintf(v5, sizeof(v5), "%s/config_v5.json", dir);
        if (strncmp(name, "tiny-deepseek", 13) == 0 || strcmp(name, "tiny-gpt-oss") == 0) {
            check_refused(dir, name[5] == 'd' ? "deepseek" : "gpt_oss");
        } else if (exists(ref)) {
            check_model(dir, ref, name);
            if (exists(v5)) {
                check_v5(dir, ref, name);
            }
        }
        free(entries[i]);
    }
    free(entries);
}

static void check_story(struct bt_model_run *r, const json_t *c)
{
    static float logits[VOCAB_MAX];
    uint32_t ids[PROMPT_MAX], n = read_ids(json_object_get(c, "prompt_ids"), ids);
    const json_t *want = json_object_get(c, "output_ids");

    bt_model_run_pool(r, 16, BT_DTYPE_F32, n + (uint32_t)json_array_size(want));
    CHECK_EQ(bt_model_run_tokens(r, ids, n, 0, 64, logits), BT_OK);
    check_greedy(r, want, NULL, n, logits, "stories260K");
    bt_model_run_close_pool(r);
}

static void check_stories(void)
{
    static const char dir[] = "../shared/data/models/stories260K";
    struct bt_model_run r;
    struct bt_err err = {0};
    json_error_t je;
    json_t *ref = json_load_file("../shared/data/reference/stories260K.json", 0, &je), *c;
    size_t i;

    if (ref == NULL || !exists(dir)) {
        printf("skipped: no %s\n", dir);
        json_decref(ref);
        return;
    }
    CHECK_EQ(bt_model_run_open(&r, dir, kctx, &err), BT_OK);
    CHECK_EQ(bt_model_info(r.m)->n_eos, 2);
    check_story(&r, json_object_get(ref, "golden_from_bos"));
    json_array_foreach(json_object_get(ref, "cases"), i, c)
    {
        check_story(&r, c);
    }
    printf("stories260K: %zu greedy texts\n", i + 1);
    bt_model_run_close(&r);
    json_decref(ref);
}

int main(int argc, char **argv)
{
    struct bt_k_opts opts = {.n_threads = 2, .isa = "auto"};
    struct bt_err err = {0};

    if (argc >= 3 && strcmp(argv[1], "--backend") == 0) {
        backend = argv[2];
        argv += 2;
        argc -= 2;
    }
    enum bt_status st = bt_k_create(backend, &opts, &kctx, &err);

    if (st != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return st == BT_ERR_UNSUPPORTED ? 77 : 1;
    }
    printf("%s\n", bt_k_describe(kctx));
    if (argc == 3) {
        check_model(argv[1], argv[2], argv[1]);
    } else {
        int n = scan_committed("tests/golden/models");
        CHECK(n > 0);
        printf("%d committed models\n", n);
        if (strcmp(backend, "cpu") == 0) { /* an emulated device is too slow for the larger ones */
            scan_shared("../shared/data/models", "../shared/data/reference/models");
            check_stories();
        }
        (void)rmdir(bt_temp_dir());
    }
    bt_k_destroy(kctx);
    return bt_test_done();
}
