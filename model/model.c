/* Opening and closing a model: which kind of files, which family, and the order of the checks. Owns
 * struct bt_model; reading of configuration and weights is in config_*.c and weights.c, the forward
 * pass in forward.c. */

#include "model/model.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/mem.h"
#include "model/model_int.h"

static const size_t ARENA_BYTES_MAX = (size_t)1 << 30;

static enum bt_status open_hf(struct bt_model *m, struct bt_err *err)
{
    struct bt_hf *c;
    enum bt_status st = bt_hf_open(m->path, &c, err);

    if (st != BT_OK) {
        return st;
    }
    m->family = bt_config_hf_family(c);
    st = bt_hf_status(c, err);
    if (st == BT_OK) {
        st = bt_st_open(m->path, &m->st, err);
    }
    if (st == BT_OK) {
        st = bt_config_hf_read(m, c, err);
    }
    bt_hf_close(c);
    return st;
}

static enum bt_status open_gguf(struct bt_model *m, struct bt_err *err)
{
    struct bt_err own = {0};
    enum bt_status st = bt_gguf_open(m->path, &m->gguf, err);

    if (st != BT_OK) {
        return st;
    }
    m->family = bt_config_gguf_family(m->gguf, &own);
    if (m->family == NULL) {
        if (err != NULL) {
            *err = own;
        }
        return own.status;
    }
    return bt_config_gguf_read(m, err);
}

static void fill_name(struct bt_model_info *info, const char *path)
{
    size_t n = strlen(path);

    while (n > 1 && path[n - 1] == '/') {
        n--;
    }
    size_t from = n;
    while (from > 0 && path[from - 1] != '/') {
        from--;
    }
    if (n - from > 5 && strncmp(path + n - 5, ".gguf", 5) == 0) {
        n -= 5;
    }
    (void)snprintf(info->name, sizeof(info->name), "%.*s", (int)(n - from), path + from);
}

static void fill_info(struct bt_model *m)
{
    struct bt_model_info *info = &m->info;
    const struct bt_model_config *c = &m->config;

    (void)snprintf(info->arch, sizeof(info->arch), "%s", m->family->name);
    fill_name(info, m->path);
    info->n_layers = c->n_layers;
    info->dim = c->dim;
    info->n_heads = c->n_heads;
    info->n_kv_heads = c->n_kv_heads;
    info->head_dim = c->head_dim;
    info->vocab = c->vocab;
    info->context = c->context;
    info->layer_group = m->layer_group;
    info->layer_index = m->layer_index;
    info->n_eos = c->n_eos;
    memcpy(info->eos, c->eos, sizeof(info->eos));
    info->bos = c->bos;
}

static enum bt_status open_rest(struct bt_model *m, struct bt_err *err)
{
    enum bt_status st = bt_weights_bind(m, err);

    if (st == BT_OK) {
        st = bt_fingerprint(m, err);
    }
    for (uint32_t i = 0; st == BT_OK && i < m->config.n_ropes; i++) {
        st = bt_rope_table_init(&m->ropes[i], &m->config.ropes[i], i == 0 ? m->rope_divisors : NULL,
                                m->config.context);
        if (st != BT_OK) {
            (void)bt_err_set(err, st, "%s: out of memory for %u positions of rope", m->path,
                             m->config.context);
        }
    }
    return st;
}

enum bt_status bt_model_open(const char *path, struct bt_model **out, struct bt_err *err)
{
    struct bt_model *m = bt_calloc(1, sizeof(*m));
    struct stat sb;
    enum bt_status st;

    if (m == NULL || (m->path = bt_strdup(path)) == NULL) {
        bt_free(m);
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", path);
    }
    bt_arena_init(&m->arena, ARENA_BYTES_MAX);
    st = stat(path, &sb) == 0 && S_ISDIR(sb.st_mode) ? open_hf(m, err) : open_gguf(m, err);
    if (st == BT_OK) {
        st = open_rest(m, err);
    }
    if (st != BT_OK) {
        bt_model_destroy(m);
        return st;
    }
    fill_info(m);
    *out = m;
    return BT_OK;
}

const struct bt_model_info *bt_model_info(const struct bt_model *m)
{
    return &m->info;
}

const char *bt_model_numerics(const struct bt_model *m, const char *backend)
{
    uint64_t floats = 0, bf16 = 0, blocks = 0;

    for (size_t i = 0; i < m->n_slots; i++) {
        const struct bt_slot *s = &m->slots[i];
        enum bt_dtype type = bt_slot_desc(s).dtype;
        uint64_t n = s->for_gemm ? (uint64_t)s->n_rows * s->n_cols : 0;

        /* e4m3 has no integers to multiply */
        *(type == BT_DTYPE_BF16 || type == BT_DTYPE_GF8 ? &bf16
          : type > BT_DTYPE_BF16                        ? &blocks
                                                        : &floats) += n;
    }
    if (strcmp(backend, "cuda") == 0) {
        return bf16 + blocks > floats ? "cuda-bf16" : "cuda-f32";
    }
    return blocks > floats && blocks > bf16 ? "cpu-int8" : bf16 > floats ? "cpu-bf16" : "cpu-f32";
}

const struct bt_model_packed *bt_model_packed(const struct bt_model *m)
{
    return &m->packed;
}

void bt_model_destroy(struct bt_model *m)
{
    if (m == NULL) {
        return;
    }
    bt_weights_unload(m, false);
    for (uint32_t i = 0; i < BT_ROPES_MAX; i++) {
        bt_rope_table_fini(&m->ropes[i]);
    }
    bt_free(m->slots);
    bt_arena_fini(&m->arena);
    bt_st_close(m->st);
    bt_gguf_close(m->gguf);
    bt_free(m->path);
    bt_free(m);
}
