/* The configuration of a model as config.json. Owns the inverse of config_hf.c for the families that need nothing beyond
 * it: llama, qwen2 and qwen3. */

#include <math.h>
#include <string.h>
#include "base/buf.h"
#include "files/map.h"
#include "model/export.h"
#include "model/export_int.h"

static const struct {
    const char *family, *architecture;
} known[] = {
    {"llama", "LlamaForCausalLM"}, {"qwen2", "Qwen2ForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"}};

static const char *architecture(const struct bt_model *m)
{
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (strcmp(known[i].family, m->family->name) == 0) {
            return known[i].architecture;
        }
    }
    return NULL;
}

static enum bt_status refuse(const struct bt_model *m, struct bt_err *err, const char *what)
{
    return bt_err_set(err, BT_ERR_UNSUPPORTED,
                      "%s: %s as a Hugging Face directory is not supported", m->path, what);
}

static enum bt_status check(const struct bt_model *m, struct bt_err *err)
{
    const struct bt_model_config *c = &m->config;

    if (architecture(m) == NULL) {
        return refuse(m, err, m->family->name);
    }
    if (m->rope_divisors != NULL) {
        return refuse(m, err, "rope_freqs.weight");
    }
    for (uint32_t i = 0; i < c->n_layers; i++) {
        if (m->layers[i].window != 0) {
            return refuse(m, err, "a sliding window");
        }
    }
    return c->qkv_bias == c->o_bias || strcmp(m->family->name, "qwen2") == 0
               ? BT_OK
               : refuse(m, err, "a bias on some of q, k, v and o");
}

static void add_rope(struct bt_buf *b, const struct bt_rope_spec *s)
{
    bt_buf_addf(b, ",\n  \"rope_theta\": %.17g", s->theta);
    if (s->type == BT_ROPE_LINEAR) {
        bt_buf_addf(b, ",\n  \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": %.17g}",
                    s->factor);
    } else if (s->type == BT_ROPE_LLAMA3) {
        bt_buf_addf(b,
                    ",\n  \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": %.17g, "
                    "\"low_freq_factor\": %.17g, \"high_freq_factor\": %.17g, "
                    "\"original_max_position_embeddings\": %.17g}",
                    s->factor, s->low_freq_factor, s->high_freq_factor, s->original_context);
    } else if (s->type == BT_ROPE_YARN) {
        bt_buf_addf(b,
                    ",\n  \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": %.17g, "
                    "\"beta_fast\": %.17g, \"beta_slow\": %.17g, "
                    "\"original_max_position_embeddings\": %.17g",
                    s->factor, s->beta_fast, s->beta_slow, s->original_context);
        if (s->attention_factor != 0.0) {
            bt_buf_addf(b, ", \"attention_factor\": %.17g", s->attention_factor);
        }
        bt_buf_addc(b, '}');
    } else {
        bt_buf_adds(b, ",\n  \"rope_scaling\": null");
    }
}

static void add_tokens(struct bt_buf *b, const struct bt_model_config *c)
{
    if (c->bos >= 0) {
        bt_buf_addf(b, ",\n  \"bos_token_id\": %lld", (long long)c->bos);
    }
    if (c->n_eos == 1) {
        bt_buf_addf(b, ",\n  \"eos_token_id\": %u", c->eos[0]);
    } else if (c->n_eos > 1) {
        for (uint32_t i = 0; i < c->n_eos; i++) {
            bt_buf_addf(b, "%s%u", i == 0 ? ",\n  \"eos_token_id\": [" : ", ", c->eos[i]);
        }
        bt_buf_addc(b, ']');
    }
}

enum bt_status bt_export_config_json(const struct bt_model *m, enum bt_dtype dtype,
                                     struct bt_buf *b, struct bt_err *err)
{
    static const char *const types[] = {"float32", "float16", "bfloat16"};
    const struct bt_model_config *c = &m->config;
    enum bt_status st = check(m, err);

    if (st != BT_OK) {
        return st;
    }
    bt_buf_addf(b, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\"", architecture(m),
                m->family->name);
    bt_buf_addf(b, ",\n  \"hidden_act\": \"silu\",\n  \"hidden_size\": %u", c->dim);
    bt_buf_addf(b, ",\n  \"intermediate_size\": %u,\n  \"num_hidden_layers\": %u", c->ffn_dim,
                c->n_layers);
    bt_buf_addf(b, ",\n  \"num_attention_heads\": %u,\n  \"num_key_value_heads\": %u", c->n_heads,
                c->n_kv_heads);
    bt_buf_addf(b, ",\n  \"head_dim\": %u,\n  \"vocab_size\": %u", c->head_dim, c->vocab);
    bt_buf_addf(b, ",\n  \"max_position_embeddings\": %u,\n  \"rms_norm_eps\": %.9g", c->context,
                c->rms_eps);
    bt_buf_addf(b, ",\n  \"tie_word_embeddings\": %s", c->tied ? "true" : "false");
    if (strcmp(m->family->name, "qwen2") != 0) {
        bt_buf_addf(b, ",\n  \"attention_bias\": %s", c->qkv_bias ? "true" : "false");
    }
    if (strcmp(m->family->name, "llama") == 0) {
        bt_buf_addf(b, ",\n  \"mlp_bias\": %s", c->mlp_bias ? "true" : "false");
    } else {
        bt_buf_adds(b, ",\n  \"use_sliding_window\": false");
    }
    add_rope(b, &c->ropes[0]);
    add_tokens(b, c);
    bt_buf_addf(b, ",\n  \"torch_dtype\": \"%s\"\n}\n", types[dtype]);
    return b->failed ? bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path) : BT_OK;
}

static enum bt_status copy_config(const struct bt_model *m, struct bt_buf *b, struct bt_err *err)
{
    struct bt_file_map map = {0};
    struct bt_buf path = {0};
    enum bt_status st = bt_buf_addf(&path, "%s/config.json", m->path)
                            ? bt_file_map_open(&map, path.data, 2, err)
                            : bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path);

    if (st == BT_OK) {
        (void)bt_buf_add(b, map.data, map.bytes);
    }
    bt_file_map_close(&map);
    bt_buf_fini(&path);
    return st;
}

/* Takes away every "quantization_config": null, which says nothing, and a comma with it. In a string of checked JSON a quote comes after
 * a backslash. */
static void drop_null(struct bt_buf *b)
{
    static const char key[] = "\"quantization_config\"", blank[] = "\r\n\t ";
    char *from = b->data;

    while (from != NULL && (from = strstr(from, key)) != NULL) {
        char *start = from, *end = from + strlen(key);
        from = end;
        end += strspn(end, blank);
        end += *end == ':';
        end += strspn(end, blank);
        if (start[-1] == '\\' || strncmp(end, "null", 4) != 0) {
            continue;
        }
        end += 4 + strspn(end + 4, blank);
        if (*end == ',') {
            end += 1 + strspn(end + 1, blank);
        } else {
            for (char *p = start; p > b->data && strchr("\r\n\t ,", p[-1]) != NULL;) {
                start = --p;
            }
        }
        memmove(start, end, b->len - (size_t)(end - b->data) + 1);
        b->len -= (size_t)(end - start);
        from = start;
    }
}

/* Takes away the last brace, which ends the one object that the text is (opening the model has checked that), and the space before. */
static void reopen(struct bt_buf *b)
{
    while (b->len > 0 && b->data[b->len - 1] != '}') {
        b->len--;
    }
    do {
        b->len -= b->len > 0;
    } while (b->len > 0 && strchr("\r\n\t ", b->data[b->len - 1]) != NULL);
    if (b->data != NULL) {
        b->data[b->len] = 0;
    }
}

enum bt_status bt_export_config_f8(const struct bt_model *m, bt_export_plain_fn *plain,
                                   struct bt_buf *b, struct bt_err *err)
{
    const char *comma = "";
    enum bt_status st = m->st == NULL ? bt_export_config_json(m, BT_DTYPE_BF16, b, err)
                        : m->quant.kind == BT_QUANT_NONE
                            ? copy_config(m, b, err)
                            : refuse(m, err, "what is quantised already");

    if (st != BT_OK) {
        return st;
    }
    drop_null(b);
    reopen(b);
    (void)bt_buf_adds(
        b, ",\n  \"quantization_config\": {\"quant_method\": \"compressed-tensors\", "
           "\"format\": \"float-quantized\", \"quantization_status\": \"compressed\",\n"
           "    \"kv_cache_scheme\": null, \"config_groups\": {\"group_0\": {"
           "\"targets\": [\"Linear\"], \"output_activations\": null,\n"
           "      \"input_activations\": {\"num_bits\": 8, \"type\": \"float\", "
           "\"symmetric\": true, \"strategy\": \"token\", \"dynamic\": true},\n"
           "      \"weights\": {\"num_bits\": 8, \"type\": \"float\", \"symmetric\": true, "
           "\"strategy\": \"channel\", \"dynamic\": false}}},\n    \"ignore\": [");
    for (size_t i = 0; i < m->n_slots; i++) {
        const struct bt_slot *s = &m->slots[i];
        if (s->weight != NULL && !s->for_embed && plain(m, s)) {
            (void)bt_buf_addf(b, "%s\"%.*s\"", comma, (int)(strlen(s->hf_name) - strlen(".weight")),
                              s->hf_name);
            comma = ", ";
        }
    }
    (void)bt_buf_addf(b, "%s]}\n}\n",
                      m->config.tied ? (comma[0] == 0 ? "\"lm_head\"" : ", \"lm_head\"") : "");
    return b->failed ? bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path) : BT_OK;
}
