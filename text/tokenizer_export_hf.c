/* GGUF's tokenizer keys as tokenizer.json and tokenizer_config.json. Owns the inverse of tokenizer_gguf.c for byte-level
 * vocabularies; what it wrote is read again and must give the same ids. */

#include "text/tokenizer_export.h"

#include <string.h>
#include "base/mem.h"
#include "text/tokenizer_int.h"

static void add_str(struct bt_buf *b, const struct bt_tok_str *s)
{
    (void)bt_buf_add_json_str(b, s->s, s->len);
}

static void add_text(struct bt_buf *b, const char *s)
{
    (void)bt_buf_add_json_str(b, s, strlen(s));
}

static int32_t type_of(const struct bt_tok_gguf *g, size_t i)
{
    return g->types != NULL ? g->types[i] : BT_TOK_GGUF_NORMAL;
}

static void add_added_tokens(struct bt_buf *b, const struct bt_tok_gguf *g)
{
    bool first = true;

    (void)bt_buf_adds(b, "\"added_tokens\":[");
    for (size_t i = 0; i < g->n_tokens; i++) {
        int32_t type = type_of(g, i);
        if (type != BT_TOK_GGUF_CONTROL && type != BT_TOK_GGUF_UNKNOWN &&
            type != BT_TOK_GGUF_USER) {
            continue;
        }
        (void)bt_buf_addf(b, "%s\n{\"id\":%zu,\"content\":", first ? "" : ",", i);
        add_str(b, &g->tokens[i]);
        (void)bt_buf_addf(b,
                          ",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"
                          "\"normalized\":false,\"special\":%s}",
                          type != BT_TOK_GGUF_USER ? "true" : "false");
        first = false;
    }
    (void)bt_buf_adds(b, "],\n");
}

static void add_pre_tokenizer(struct bt_buf *b, const struct bt_tok_gguf_pre *pre)
{
    (void)bt_buf_addf(b, "\"normalizer\":%s,\n", pre->nfc ? "{\"type\":\"NFC\"}" : "null");
    (void)bt_buf_adds(b, "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[");
    for (size_t i = 0; i < sizeof(pre->splits) / sizeof(pre->splits[0]) && pre->splits[i] != NULL;
         i++) {
        (void)bt_buf_adds(b, "{\"type\":\"Split\",\"pattern\":{\"Regex\":");
        add_text(b, pre->splits[i]);
        (void)bt_buf_adds(b, "},\"behavior\":\"Isolated\",\"invert\":false},");
    }
    (void)bt_buf_adds(b, "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,"
                         "\"use_regex\":false}]},\n");
}

static void add_special(struct bt_buf *b, const struct bt_tok_gguf *g, uint32_t id, int type_id)
{
    (void)bt_buf_adds(b, "{\"SpecialToken\":{\"id\":");
    add_str(b, &g->tokens[id]);
    (void)bt_buf_addf(b, ",\"type_id\":%d}}", type_id);
}

/* BOS, sequence, EOS; sequences A and B for a pair. */
static void add_pattern(struct bt_buf *b, const struct bt_tok_gguf *g, int n)
{
    for (int i = 0; i < n; i++) {
        (void)bt_buf_adds(b, i > 0 ? "," : "");
        if (g->add_bos) {
            add_special(b, g, g->bos, i);
            (void)bt_buf_addc(b, ',');
        }
        (void)bt_buf_addf(b, "{\"Sequence\":{\"id\":\"%c\",\"type_id\":%d}}", 'A' + i, i);
        if (g->add_eos) {
            (void)bt_buf_addc(b, ',');
            add_special(b, g, g->eos, i);
        }
    }
}

static void add_ids_of(struct bt_buf *b, const struct bt_tok_gguf *g, uint32_t id)
{
    add_str(b, &g->tokens[id]);
    (void)bt_buf_adds(b, ":{\"id\":");
    add_str(b, &g->tokens[id]);
    (void)bt_buf_addf(b, ",\"ids\":[%u],\"tokens\":[", id);
    add_str(b, &g->tokens[id]);
    (void)bt_buf_adds(b, "]}");
}

static void add_post_processor(struct bt_buf *b, const struct bt_tok_gguf *g)
{
    if (!g->add_bos && !g->add_eos) {
        (void)bt_buf_adds(b, "\"post_processor\":null,\n");
        return;
    }
    (void)bt_buf_adds(b, "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[");
    add_pattern(b, g, 1);
    (void)bt_buf_adds(b, "],\"pair\":[");
    add_pattern(b, g, 2);
    (void)bt_buf_adds(b, "],\"special_tokens\":{");
    if (g->add_bos) {
        add_ids_of(b, g, g->bos);
    }
    if (g->add_eos && !(g->add_bos && g->bos == g->eos)) {
        (void)bt_buf_adds(b, g->add_bos ? "," : "");
        add_ids_of(b, g, g->eos);
    }
    (void)bt_buf_adds(b, "}},\n");
}

static void add_model(struct bt_buf *b, const struct bt_tok_gguf *g,
                      const struct bt_tok_gguf_pre *pre)
{
    bool first = true;

    (void)bt_buf_adds(b, "\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,"
                         "\"trim_offsets\":true,\"use_regex\":true},\n");
    (void)bt_buf_addf(b,
                      "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
                      "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,"
                      "\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":%s,\n",
                      pre->ignore_merges ? "true" : "false");
    (void)bt_buf_adds(b, "\"vocab\":{");
    for (size_t i = 0; i < g->n_tokens; i++) {
        if (type_of(g, i) == BT_TOK_GGUF_UNUSED) {
            continue; /* a place without a token */
        }
        (void)bt_buf_adds(b, first ? "" : ",");
        add_str(b, &g->tokens[i]);
        (void)bt_buf_addf(b, ":%zu", i);
        first = false;
    }
    (void)bt_buf_adds(b, "},\n\"merges\":[");
    for (size_t i = 0; i < g->n_merges; i++) {
        (void)bt_buf_adds(b, i == 0 ? "" : ",");
        add_str(b, &g->merges[i]);
    }
    (void)bt_buf_adds(b, "]}}\n");
}

static void add_token_key(struct bt_buf *b, const struct bt_tok_gguf *g, const char *key,
                          uint32_t id)
{
    if (id != BT_TOK_NONE && id < g->n_tokens) {
        (void)bt_buf_addf(b, ",\n  \"%s\": ", key);
        add_str(b, &g->tokens[id]);
    }
}

static void add_config(struct bt_buf *b, const struct bt_gguf *file, const struct bt_tok_gguf *g)
{
    struct bt_err ignored;
    struct bt_tok_str text;

    (void)bt_buf_adds(b, "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n"
                         "  \"clean_up_tokenization_spaces\": false");
    add_token_key(b, g, "bos_token", g->bos);
    add_token_key(b, g, "eos_token", g->eos);
    add_token_key(b, g, "unk_token", g->unk);
    add_token_key(b, g, "pad_token", g->pad);
    if (bt_gguf_get_str(file, "tokenizer.chat_template", &text.s, &text.len, &ignored) == BT_OK) {
        (void)bt_buf_adds(b, ",\n  \"chat_template\": ");
        add_str(b, &text);
    }
    (void)bt_buf_adds(b, "\n}\n");
}

static enum bt_status write_files(const struct bt_gguf *file, const struct bt_tok_gguf *g,
                                  struct bt_buf *json, struct bt_buf *config, struct bt_err *err)
{
    const struct bt_tok_gguf_pre *pre =
        strcmp(g->model, "gpt2") == 0 ? bt_tok_gguf_find_pre(g->pre != NULL ? g->pre : "") : NULL;
    struct bt_tokenizer *a = NULL, *b = NULL;
    enum bt_status st;

    if (pre == NULL) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED,
                          "%s: tokenizer.ggml.model %s, tokenizer.ggml.pre %s: tokenizer.json is "
                          "not supported for it",
                          bt_gguf_path(file), g->model, g->pre != NULL ? g->pre : "is absent");
    }
    st = bt_tokenizer_from_gguf(bt_gguf_path(file), g, &a, err); /* checks all ids */
    if (st != BT_OK) {
        return st;
    }
    (void)bt_buf_adds(json, "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\n");
    add_added_tokens(json, g);
    add_pre_tokenizer(json, pre);
    add_post_processor(json, g);
    add_model(json, g, pre);
    add_config(config, file, g);
    if (json->failed || config->failed) {
        st = bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", bt_gguf_path(file));
    }
    st =
        st == BT_OK ? bt_tokenizer_from_json("tokenizer.json", json->data, json->len, &b, err) : st;
    if (st == BT_OK && !bt_tok_same_ids(a, b)) {
        st = bt_err_set(err, BT_ERR_UNSUPPORTED, "%s: its tokenizer.json would give other ids",
                        bt_gguf_path(file));
    }
    bt_tokenizer_destroy(a);
    bt_tokenizer_destroy(b);
    return st;
}

enum bt_status bt_tokenizer_export_hf(const struct bt_gguf *file, struct bt_buf *json,
                                      struct bt_buf *config, struct bt_err *err)
{
    struct bt_tok_gguf_arrays a = {0};
    struct bt_tok_gguf g = {0};
    enum bt_status st = bt_tok_gguf_collect(file, &a, &g, err);

    if (st == BT_OK) {
        st = write_files(file, &g, json, config, err);
    }
    bt_tok_gguf_arrays_fini(&a);
    return st;
}
