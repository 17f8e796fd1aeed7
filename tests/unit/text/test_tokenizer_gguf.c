/* Tokenizers from GGUF metadata: made from the repository's tokenizer.json fixtures, they must give
 * the same ids. The byte-level one goes through a real file. */

#include <stdlib.h>
#include "files/gguf.h"
#include "tests/check.h"
#include "tests/tempfile.h"
#include "tests/unit/text/tok_reference.h"

#define GOLDEN "tests/golden/tokenizers/"
#define N_MAX  2048

struct vocab {
    struct bt_tape *tape;
    struct bt_tok_str tokens[N_MAX];
    int32_t types[N_MAX];
    float scores[N_MAX];
    size_t n;
    struct bt_buf merges; /* "left right\n" … */
    size_t n_merges;
};

/* The vocabulary of a fixture as GGUF would carry it. */
static void read_vocab(const char *path, struct vocab *v)
{
    v->tape = tok_ref_read(path);
    const struct bt_tape_node *root = bt_tape_root(v->tape), *model = bt_tape_get(root, "model");
    const struct bt_tape_node *vocab = bt_tape_get(model, "vocab"), *key = vocab + 1;
    const struct bt_tape_node *added = bt_tape_get(root, "added_tokens"), *a = added + 1;
    const struct bt_tape_node *merges = bt_tape_get(model, "merges"), *m = merges + 1;
    uint32_t id;

    for (uint32_t i = 0; i < vocab->len; i++, key += 2) {
        CHECK(bt_tape_u32(key + 1, &id) && id < N_MAX);
        v->tokens[id] = (struct bt_tok_str){key->s, key->len};
        v->types[id] =
            key->len == 6 && memcmp(key->s, "<0x", 3) == 0 ? BT_TOK_GGUF_BYTE : BT_TOK_GGUF_NORMAL;
        v->scores[id] = -(float)id;
    }
    v->n = vocab->len;
    for (uint32_t i = 0; i < added->len; i++, a += a->span) {
        const struct bt_tape_node *content = bt_tape_get(a, "content");
        CHECK(bt_tape_u32(bt_tape_get(a, "id"), &id) && id < N_MAX);
        v->tokens[id] = (struct bt_tok_str){content->s, content->len};
        v->types[id] = bt_tape_is(bt_tape_get(a, "special"), BT_TAPE_TRUE) ? BT_TOK_GGUF_CONTROL
                                                                           : BT_TOK_GGUF_USER;
        v->n = id + 1 > v->n ? id + 1 : v->n;
    }
    for (uint32_t i = 0; i < merges->len && m->type == BT_TAPE_ARRAY; i++, m += m->span) {
        bt_buf_addf(&v->merges, "%s %s\n", m[1].s, m[2].s);
        v->n_merges++;
    }
}

static void vocab_fini(struct vocab *v)
{
    bt_tape_destroy(v->tape);
    bt_buf_fini(&v->merges);
    free(v);
}

static void put(struct bt_buf *b, uint64_t v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bt_buf_addc(b, (char)(v >> (8 * i)));
    }
}

static void put_str(struct bt_buf *b, const char *s, size_t n)
{
    put(b, n, 8);
    bt_buf_add(b, s, n);
}

static void put_key(struct bt_buf *b, const char *key, enum bt_gguf_type type)
{
    put_str(b, key, strlen(key));
    put(b, type, 4);
}

static const char *write_gguf(const struct vocab *v, const char *pre)
{
    struct bt_buf b = {0};

    bt_buf_adds(&b, "GGUF");
    put(&b, 3, 4);
    put(&b, 0, 8);
    put(&b, 7, 8);
    put_key(&b, "tokenizer.ggml.model", BT_GGUF_STRING);
    put_str(&b, "gpt2", 4);
    put_key(&b, "tokenizer.ggml.pre", BT_GGUF_STRING);
    put_str(&b, pre, strlen(pre));
    put_key(&b, "tokenizer.ggml.tokens", BT_GGUF_ARRAY);
    put(&b, BT_GGUF_STRING, 4);
    put(&b, v->n, 8);
    for (size_t i = 0; i < v->n; i++) {
        put_str(&b, v->tokens[i].s, v->tokens[i].len);
    }
    put_key(&b, "tokenizer.ggml.token_type", BT_GGUF_ARRAY);
    put(&b, BT_GGUF_I32, 4);
    put(&b, v->n, 8);
    for (size_t i = 0; i < v->n; i++) {
        put(&b, (uint64_t)v->types[i], 4);
    }
    put_key(&b, "tokenizer.ggml.merges", BT_GGUF_ARRAY);
    put(&b, BT_GGUF_STRING, 4);
    put(&b, v->n_merges, 8);
    for (const char *s = v->merges.data; *s != '\0'; s = strchr(s, '\n') + 1) {
        put_str(&b, s, (size_t)(strchr(s, '\n') - s));
    }
    put_key(&b, "tokenizer.ggml.bos_token_id", BT_GGUF_U32);
    put(&b, v->n - 9, 4);
    put_key(&b, "tokenizer.ggml.add_bos_token", BT_GGUF_BOOL);
    put(&b, 1, 1);
    const char *path = bt_temp_write("t.gguf", b.data, b.len);
    bt_buf_fini(&b);
    return path;
}

static enum bt_status open_gguf(const char *path, struct bt_tokenizer **out, struct bt_err *err)
{
    struct bt_gguf *g = NULL;
    enum bt_status st = bt_gguf_open(path, &g, err);

    if (st == BT_OK) {
        st = bt_tokenizer_open_gguf(g, out, err);
        bt_gguf_close(g);
    }
    return st;
}

/* GGUF has no flags for added tokens (spaces around, single words): texts with those are left out.
 */
static bool comparable(const char *s)
{
    return strstr(s, "<left>") == NULL && strstr(s, "<right>") == NULL &&
           strstr(s, "<both>") == NULL && strstr(s, "word") == NULL;
}

static void byte_level(void)
{
    struct vocab *v = calloc(1, sizeof(*v));
    struct bt_tokenizer *t = NULL, *json = NULL;
    struct bt_err err = {.status = BT_OK};
    struct bt_tape *corpus = tok_ref_read(GOLDEN "corpus.json");
    const struct bt_tape_node *root = bt_tape_root(corpus), *c = root + 1;
    unsigned compared = 0;

    read_vocab(GOLDEN "bytes.tokenizer.json", v);
    CHECK_EQ(open_gguf(write_gguf(v, "llama-bpe"), &t, &err), BT_OK);
    CHECK(t != NULL);
    CHECK_EQ(bt_tokenizer_load(GOLDEN "bytes.tokenizer.json", &json, &err), BT_OK);
    CHECK_EQ(bt_tokenizer_vocab_size(t), bt_tokenizer_vocab_size(json));
    for (uint32_t i = 0; i < root->len; i++, c += c->span) {
        const struct bt_tape_node *text = bt_tape_get(c, "text");
        for (unsigned flags = 0; flags < 4 && comparable(text->s); flags++, compared++) {
            struct bt_ids a = {0}, b = {0};
            CHECK_EQ(bt_tokenizer_encode(t, text->s, text->len, flags, &a, &err), BT_OK);
            CHECK_EQ(bt_tokenizer_encode(json, text->s, text->len, flags, &b, &err), BT_OK);
            CHECK(a.len == b.len && (a.len == 0 || memcmp(a.v, b.v, a.len * sizeof(*a.v)) == 0));
            bt_ids_fini(&a);
            bt_ids_fini(&b);
        }
    }
    CHECK(compared > 300);
    bt_tokenizer_destroy(t);
    bt_tokenizer_destroy(json);
    CHECK_EQ(open_gguf(write_gguf(v, "no-such"), &t, &err), BT_ERR_UNSUPPORTED);
    CHECK(strstr(err.msg, "tokenizer.ggml.pre: \"no-such\"") != NULL);
    bt_temp_clean((const char *[]){"t.gguf"}, 1);
    bt_tape_destroy(corpus);
    vocab_fini(v);
}

/* Scores instead of merges: the reference of the SentencePiece-style fixture. */
static void by_scores(void)
{
    struct vocab *v = calloc(1, sizeof(*v));
    struct bt_tokenizer *t = NULL;
    struct bt_err err = {.status = BT_OK};
    struct bt_tape *corpus = tok_ref_read(GOLDEN "corpus.json"),
                   *ref = tok_ref_read(GOLDEN "spm.reference.json");

    read_vocab(GOLDEN "spm.tokenizer.json", v);
    v->types[0] = BT_TOK_GGUF_UNKNOWN;
    struct bt_tok_gguf g = {.model = "llama",
                            .tokens = v->tokens,
                            .scores = v->scores,
                            .types = v->types,
                            .n_tokens = v->n,
                            .bos = 1,
                            .eos = 2,
                            .unk = 0,
                            .pad = BT_TOK_NONE,
                            .add_bos = true,
                            .add_space_prefix = true};
    CHECK_EQ(bt_tokenizer_from_gguf("g", &g, &t, &err), BT_OK);
    CHECK(t != NULL);
    CHECK_EQ(tok_ref_check("spm by scores", t, ref, corpus), 0);
    bt_tokenizer_destroy(t);
    g.scores = NULL;
    CHECK_EQ(bt_tokenizer_from_gguf("g", &g, &t, &err), BT_ERR_INVALID);
    CHECK_STR(err.msg, "g: tokenizer.ggml.scores is missing");
    g.model = "t5";
    CHECK_EQ(bt_tokenizer_from_gguf("g", &g, &t, &err), BT_ERR_UNSUPPORTED);
    g.model = "llama";
    g.scores = v->scores;
    g.eos = (uint32_t)v->n;
    CHECK_EQ(bt_tokenizer_from_gguf("g", &g, &t, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "eos_token_id") != NULL);
    bt_tape_destroy(corpus);
    bt_tape_destroy(ref);
    vocab_fini(v);
}

int main(void)
{
    byte_level();
    by_scores();
    return bt_test_done();
}
