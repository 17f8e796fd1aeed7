/* Tokenizers against reference ids and texts made with the `tokenizers` package: the fixtures of the repository, and
 * real tokenizers where ../shared and the cache of tools/fetch_tokenizers.sh are there. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "tests/check.h"
#include "tests/unit/text/tok_reference.h"

#define GOLDEN "tests/golden/tokenizers"
#define SHARED "../shared/data"

static void check(const char *label, const char *tokenizer, const char *ref_path, const struct bt_tape *corpus)
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
    static const char *const names[] = {"gpt2",   "mistral_v1", "deepseek_v3", "gemma3",      "gptoss",
                                        "llama3", "llama3_1",   "qwen3",       "llama2_meta", "mistral_v3"};
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
            (void)snprintf(tok, sizeof(tok), "%s/%s/tokenizer.json", cache == NULL ? "build/cache/tokenizers" : cache,
                           names[i]);
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

int main(void)
{
    golden();
    shared();
    return bt_test_done();
}
