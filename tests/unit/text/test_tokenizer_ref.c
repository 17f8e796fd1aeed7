/* Tokenizers against reference ids and texts made with the `tokenizers` package: the fixtures of
 * the repository, and real tokenizers where ../shared and the cache of tools/fetch_tokenizers.sh
 * are there. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "tests/check.h"
#include "tests/unit/text/tok_reference.h"

#define GOLDEN "tests/golden/tokenizers"
#define SHARED "../shared/data"

static void check(const char *label, const char *tokenizer, const char *ref_path,
                  const struct bt_tape *corpus)
{
    struct bt_tokenizer *t = NULL;
    struct bt_err err = {.status = BT_OK};
    struct bt_tape *ref = tok_ref_read(ref_path);
    enum bt_status st = bt_tokenizer_load(tokenizer, &t, &err);

    if (st != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
    }
    CHECK_EQ(st, BT_OK);
    CHECK(ref != NULL);
    if (st == BT_OK && ref != NULL) {
        CHECK_EQ(tok_ref_check(label, t, ref, corpus), 0);
    }
    bt_tokenizer_destroy(t);
    bt_tape_destroy(ref);
}

static void golden(void)
{
    static const char *const names[] = {"bytes", "bytes_nfc", "spm", "spm_meta", "odd"};
    struct bt_tape *corpus = tok_ref_read(GOLDEN "/corpus.json");

    CHECK(corpus != NULL);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]) && corpus != NULL; i++) {
        char tok[256], ref[256];
        (void)snprintf(tok, sizeof(tok), GOLDEN "/%s.tokenizer.json", names[i]);
        (void)snprintf(ref, sizeof(ref), GOLDEN "/%s.reference.json", names[i]);
        check(names[i], tok, ref, corpus);
    }
    bt_tape_destroy(corpus);
}

static void shared(void)
{
    static const char *const names[] = {"gpt2",        "mistral_v1", "deepseek_v3", "gemma3",
                                        "gptoss",      "llama3",     "llama3_1",    "qwen3",
                                        "llama2_meta", "mistral_v3"};
    const char *cache = getenv("BATON_TOKENIZER_CACHE");
    struct bt_tape *corpus = tok_ref_read(SHARED "/reference/tokenizers/corpus.json");

    if (corpus == NULL) {
        printf("skipped: " SHARED " is not there\n");
        return;
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char tok[512], ref[512];
        (void)snprintf(tok, sizeof(tok), SHARED "/tokenizers/%s/tokenizer.json", names[i]);
        if (access(tok, R_OK) != 0) {
            (void)snprintf(tok, sizeof(tok), "%s/%s/tokenizer.json",
                           cache == NULL ? "build/cache/tokenizers" : cache, names[i]);
        }
        if (access(tok, R_OK) != 0) {
            printf("skipped: %s is not there (tools/fetch_tokenizers.sh)\n", tok);
            continue;
        }
        (void)snprintf(ref, sizeof(ref), SHARED "/reference/tokenizers/%s.json.gz", names[i]);
        check(names[i], tok, ref, corpus);
    }
    bt_tape_destroy(corpus);
}

static void load_ids(const struct bt_tape_node *list, struct bt_ids *out)
{
    const struct bt_tape_node *v = list + 1;

    bt_ids_clear(out);
    for (uint32_t i = 0; i < list->len; i++, v += v->span) {
        uint32_t id = BT_TOK_NONE;
        CHECK(bt_tape_u32(v, &id));
        (void)!bt_ids_add(out, id);
    }
}

static bool same_ids(const struct bt_ids *a, const struct bt_ids *b)
{
    return a->len == b->len && (a->len == 0 || memcmp(a->v, b->v, a->len * sizeof(*a->v)) == 0);
}

static bool is_text(const struct bt_buf *b, const struct bt_tape_node *want)
{
    return b->len == want->len && (b->len == 0 || memcmp(b->data, want->s, b->len) == 0);
}

/* A trained model's prompts and answers: BOS in front, the answer alone and as the continuation of
 * its prompt. */
static void stories(void)
{
    struct bt_tape *ref = tok_ref_read(SHARED "/reference/stories260K.json");
    struct bt_tokenizer *t = NULL;
    struct bt_err err;

    if (ref == NULL) {
        return; /* shared() has said so */
    }
    CHECK_EQ(bt_tokenizer_load(SHARED "/models/stories260K", &t, &err), BT_OK);
    CHECK_EQ(bt_tokenizer_bos(t), 1);
    CHECK_EQ(bt_tokenizer_eos(t), 2);
    const struct bt_tape_node *cases = bt_tape_get(bt_tape_root(ref), "cases"), *c = cases + 1;
    for (uint32_t i = 0; i < cases->len; i++, c += c->span) {
        const struct bt_tape_node *prompt = bt_tape_get(c, "prompt");
        struct bt_ids want = {0}, got = {0};
        struct bt_buf out = {0};
        uint32_t n_out;
        load_ids(bt_tape_get(c, "prompt_ids"), &want);
        CHECK_EQ(bt_tokenizer_encode(t, prompt->s, prompt->len, BT_TOK_ADD_SPECIAL, &got, &err),
                 BT_OK);
        CHECK(same_ids(&got, &want));
        load_ids(bt_tape_get(c, "output_ids"), &want);
        n_out = bt_tape_u32(bt_tape_get(c, "stop_index"), &n_out) ? n_out : (uint32_t)want.len;
        CHECK_EQ(bt_tokenizer_decode(t, want.v, n_out, 0, &out, &err), BT_OK);
        CHECK(is_text(&out, bt_tape_get(c, "output_text")));
        bt_buf_clear(&out);
        bt_buf_add(&out, prompt->s, prompt->len);
        CHECK_EQ(bt_tokenizer_decode(t, want.v, n_out, prompt->len > 0 ? BT_DETOK_CONTINUE : 0,
                                     &out, &err),
                 BT_OK);
        CHECK(is_text(&out, bt_tape_get(c, "full_text")));
        bt_ids_fini(&want);
        bt_ids_fini(&got);
        bt_buf_fini(&out);
    }
    bt_tokenizer_destroy(t);
    bt_tape_destroy(ref);
}

/* Rendered chats: special tokens in the text become ids. */
static void chats(void)
{
    const char *cache = getenv("BATON_TOKENIZER_CACHE");
    struct bt_tape *ref = tok_ref_read(SHARED "/reference/tokenizers/chat_rendered.json");

    if (ref == NULL) {
        return;
    }
    const struct bt_tape_node *all = bt_tape_get(bt_tape_root(ref), "rendered"), *key = all + 1;
    for (uint32_t k = 0; k < all->len; k++, key = key + 1 + key[1].span) {
        char path[512];
        struct bt_tokenizer *t = NULL;
        const struct bt_tape_node *c = key + 2;
        (void)snprintf(path, sizeof(path), "%s/%s/tokenizer.json",
                       cache == NULL ? "build/cache/tokenizers" : cache, key->s);
        if (access(path, R_OK) != 0 || bt_tokenizer_load(path, &t, NULL) != BT_OK) {
            continue;
        }
        for (uint32_t i = 0; i < key[1].len; i++, c += c->span) {
            const struct bt_tape_node *text = bt_tape_get(c, "text"), *ids = bt_tape_get(c, "ids");
            struct bt_ids want = {0}, got = {0};
            if (bt_tape_is(text, BT_TAPE_STRING) && bt_tape_is(ids, BT_TAPE_ARRAY)) {
                load_ids(ids, &want);
                CHECK_EQ(
                    bt_tokenizer_encode(t, text->s, text->len, BT_TOK_PARSE_SPECIAL, &got, NULL),
                    BT_OK);
                CHECK(same_ids(&got, &want));
            }
            bt_ids_fini(&want);
            bt_ids_fini(&got);
        }
        printf("%s: rendered chats\n", key->s);
        bt_tokenizer_destroy(t);
    }
    bt_tape_destroy(ref);
}

int main(void)
{
    golden();
    shared();
    stories();
    chats();
    return bt_test_done();
}
