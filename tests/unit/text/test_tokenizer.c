/* Tokenizers built from small JSON texts: what is refused and how it is named, flags, limits,
 * lookups, streams of broken bytes, failing allocations. Ids against the reference are in
 * test_tokenizer_ref.c. */

#include "text/tokenizer.h"

#include <pthread.h>
#include <stdlib.h>
#include "base/clock.h"
#include "base/utf8.h"
#include "base/mem.h"
#include "tests/check.h"
#include "tests/tempfile.h"
#include "text/detok.h"

#define MODEL(extra)                                                                               \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"<unk>\":3},\"merges\":["    \
    "\"a b\"]" extra "}"

static struct bt_tokenizer *build(const char *json)
{
    struct bt_tokenizer *t = NULL;
    struct bt_err err = {.status = BT_OK};

    if (bt_tokenizer_from_json("t.json", json, strlen(json), &t, &err) != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        t = NULL;
    }
    CHECK(t != NULL);
    return t;
}

static void refuse(const char *json, enum bt_status st, const char *want)
{
    struct bt_tokenizer *t = NULL;
    struct bt_err err = {.status = BT_OK};
    size_t live = bt_test_live_bytes();

    CHECK_EQ(bt_tokenizer_from_json("t.json", json, strlen(json), &t, &err), st);
    CHECK(strncmp(err.msg, "t.json: ", 8) == 0);
    CHECK(strstr(err.msg, want) != NULL);
    if (strstr(err.msg, want) == NULL) {
        fprintf(stderr, "  message: %s\n  wanted:  %s\n", err.msg, want);
    }
    CHECK_EQ(bt_test_live_bytes(), live);
}

static void refused(void)
{
    refuse("{", BT_ERR_INVALID, "byte 1");
    refuse("[]", BT_ERR_INVALID, "model.vocab");
    refuse("{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", BT_ERR_UNSUPPORTED,
           "model.type: \"Unigram\"");
    refuse("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", BT_ERR_INVALID,
           "model.vocab[\"a\"]");
    refuse("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":9000000},\"merges\":[]}}", BT_ERR_INVALID,
           "model.vocab[\"a\"]");
    refuse("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0}}}", BT_ERR_INVALID, "model.merges");
    refuse("{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a\"]}}", BT_ERR_INVALID,
           "model.merges[0]");
    refuse("{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\",\"a\"]]}}", BT_ERR_INVALID,
           "model.merges[0]");
    refuse("{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b c\"]}}", BT_ERR_INVALID,
           "model.merges[0]");
    refuse("{" MODEL(",\"dropout\":0.1") "}", BT_ERR_UNSUPPORTED, "model.dropout");
    refuse("{" MODEL(",\"end_of_word_suffix\":\"</w>\"") "}", BT_ERR_UNSUPPORTED,
           "model.end_of_word_suffix");
    refuse("{" MODEL(",\"unk_token\":\"[UNK]\"") "}", BT_ERR_INVALID, "model.unk_token");
    refuse("{" MODEL("") ",\"added_tokens\":[{\"id\":4}]}", BT_ERR_INVALID,
           "added_tokens[0].content");
    refuse("{" MODEL("") ",\"normalizer\":{\"type\":\"Precompiled\"}}", BT_ERR_UNSUPPORTED,
           "normalizer.type: \"Precompiled\"");
    refuse("{" MODEL("") ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":"
                         "\"NFC\"},{\"type\":\"Nmt\"}]}}",
           BT_ERR_UNSUPPORTED, "normalizer.normalizers[1].type: \"Nmt\"");
    refuse("{" MODEL("") ",\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}}", BT_ERR_UNSUPPORTED,
           "pre_tokenizer.type");
    refuse("{" MODEL("") ",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a&&b]\"}"
                         ",\"behavior\":\"Isolated\"}}",
           BT_ERR_UNSUPPORTED, "pre_tokenizer.pattern: regex offset 2");
    refuse("{" MODEL("") ",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a{1,2}+"
                         "\"},\"behavior\":\"Isolated\"}}",
           BT_ERR_UNSUPPORTED, "pre_tokenizer.pattern");
    refuse("{" MODEL("") ",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(a\"},"
                         "\"behavior\":\"Isolated\"}}",
           BT_ERR_INVALID, "pre_tokenizer.pattern");
    refuse("{" MODEL("") ",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"a\"},"
                         "\"behavior\":\"Sideways\"}}",
           BT_ERR_INVALID, "pre_tokenizer.behavior");
    refuse("{" MODEL("") ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{"
                         "\"SpecialToken\":{\"id\":\"x\"}}]}}",
           BT_ERR_INVALID, "post_processor.single[0]");
    refuse("{" MODEL("") ",\"decoder\":{\"type\":\"CTC\"}}", BT_ERR_UNSUPPORTED,
           "decoder.type: \"CTC\"");
    refuse("{" MODEL("") ",\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},{"
                         "\"type\":\"Replace\"}]}}",
           BT_ERR_UNSUPPORTED, "decoder.decoders[1].type");
    refuse("{" MODEL("") ",\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},"
                         "{\"type\":\"Strip\",\"content\":\" \",\"start\":0,\"stop\":1}]}}",
           BT_ERR_UNSUPPORTED, "decoder.decoders[1].stop");
}

static void texts(void)
{
    struct bt_tokenizer *t = build("{" MODEL(",\"unk_token\":\"<unk>\"") "}");
    struct bt_ids ids = {0};
    struct bt_err err;
    char *big = malloc(BT_TOK_TEXT_BYTES_MAX + 1);

    CHECK_EQ(bt_tokenizer_encode(t, "abba", 4, 0, &ids, &err), BT_OK);
    CHECK(ids.len == 3 && ids.v[0] == 2 && ids.v[1] == 1 && ids.v[2] == 0);
    CHECK_EQ(bt_tokenizer_encode(t, "", 0, 0, &ids, &err), BT_OK); /* appends */
    CHECK_EQ(ids.len, 3);
    CHECK_EQ(bt_tokenizer_encode(t, "ab\xff", 3, 0, &ids, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "byte 2") != NULL);
    CHECK_EQ(bt_tokenizer_encode(t, "\xed\xa0\x80", 3, 0, &ids, &err), BT_ERR_INVALID);
    memset(big, 'a', BT_TOK_TEXT_BYTES_MAX + 1);
    CHECK_EQ(bt_tokenizer_encode(t, big, BT_TOK_TEXT_BYTES_MAX + 1, 0, &ids, &err), BT_ERR_INVALID);
    CHECK_EQ(ids.len, 3);
    free(big);
    bt_ids_fini(&ids);
    bt_tokenizer_destroy(t);
}

static void lookups(void)
{
    struct bt_tokenizer *t =
        build("{" MODEL("") ",\"added_tokens\":[{\"id\":4,\"content\":\"<s>\",\"special\":true},"
                            "{\"id\":5,\"content\":\"tool\"}],\"decoder\":{\"type\":\"Fuse\"}}");
    struct bt_buf out = {0};
    struct bt_err err;
    size_t n;

    CHECK_EQ(bt_tokenizer_vocab_size(t), 6);
    CHECK_EQ(bt_tokenizer_id_of(t, "<s>", 3), 4);
    CHECK_EQ(bt_tokenizer_id_of(t, "ab", 2), 2);
    CHECK_EQ(bt_tokenizer_id_of(t, "abc", 3), BT_TOK_NONE);
    CHECK(bt_tokenizer_is_special(t, 4) && !bt_tokenizer_is_special(t, 5) &&
          !bt_tokenizer_is_special(t, 99));
    CHECK(strcmp(bt_tokenizer_token_name(t, 5, &n), "tool") == 0 && n == 4);
    CHECK(bt_tokenizer_token_text(t, 6, &n) == NULL && n == 0);
    CHECK_EQ(bt_tokenizer_bos(t), BT_TOK_NONE);
    CHECK_EQ(bt_tokenizer_decode(t, (uint32_t[]){4, 2, 5}, 3, BT_DETOK_SKIP_SPECIAL, &out, &err),
             BT_OK);
    CHECK_STR(out.data, "abtool");
    CHECK_EQ(bt_tokenizer_decode(t, (uint32_t[]){0, 6}, 2, 0, &out, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "token id 6 at index 1") != NULL);
    bt_buf_fini(&out);
    bt_tokenizer_destroy(t);
}

/* Ids 0..255 are the bytes; the decoder decides what broken ones become. */
static struct bt_tokenizer *bytes_tokenizer(const char *decoder)
{
    struct bt_buf json = {0};

    bt_buf_adds(&json,
                "{\"model\":{\"type\":\"BPE\",\"byte_fallback\":true,\"merges\":[],\"vocab\":{");
    for (unsigned i = 0; i < 256; i++) {
        bt_buf_addf(&json, "\"<0x%02X>\":%u,", i, i);
    }
    bt_buf_addf(&json, "\"x\":256}},\"decoder\":%s}", decoder);
    struct bt_tokenizer *t = build(json.data);
    bt_buf_fini(&json);
    return t;
}

static void stream_is(const struct bt_tokenizer *t, const char *bytes, const char *want)
{
    struct bt_detok d;
    struct bt_buf piece = {0}, all = {0}, whole = {0};
    uint32_t ids[64];
    size_t n = strlen(bytes);

    bt_detok_init(&d, t, 0);
    for (size_t i = 0; i < n; i++) {
        ids[i] = bytes[i] == 'x' ? 256 : (uint8_t)bytes[i];
        bt_buf_clear(&piece);
        CHECK_EQ(bt_detok_push(&d, ids[i], &piece), BT_OK);
        CHECK(bt_utf8_valid(piece.data == NULL ? "" : piece.data, piece.len, NULL));
        bt_buf_add(&all, piece.data, piece.len);
        CHECK_EQ(bt_detok_push(&d, 257, &all), BT_ERR_INVALID); /* leaves the stream alone */
    }
    CHECK_EQ(bt_detok_finish(&d, &all), BT_OK);
    CHECK_STR(all.data, want);
    CHECK_EQ(bt_tokenizer_decode(t, ids, n, 0, &whole, NULL), BT_OK);
    CHECK_STR(whole.data, want);
    bt_buf_fini(&piece);
    bt_buf_fini(&all);
    bt_buf_fini(&whole);
}

#define R "\xef\xbf\xbd"

static void broken_bytes(void)
{
    struct bt_tokenizer *t = bytes_tokenizer(
        "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]}");

    stream_is(t, "\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80");
    stream_is(t, "\xf0\x9f\x98", R R R);
    stream_is(t, "\xf0\x9fx", R R "x");
    stream_is(t, "\xc3\xa9\xff\xc3\xa9", "\xc3\xa9" R "\xc3\xa9");
    stream_is(t, "\xe2\x82\xe2\x82\xac", R R "\xe2\x82\xac");
    stream_is(t, "\xed\xa0\x80", R R R);
    stream_is(t, "\x80\x80x\xc0", R R "x" R);
    bt_tokenizer_destroy(t);
}

/* Byte-level: one U+FFFD for a maximal broken sequence, as Rust's and Python's decoders have it. */
static void broken_byte_level(void)
{
    struct bt_tokenizer *t = build("{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{"
                                   "\"\\u00c3\":0,\"\\u00a9\":1,\"\\u00f0\\u0141\":2,"
                                   "\"a\":3,\"\\u0120b\":4,\"\\u0120\\u00c3\":5,\"<x "
                                   "y>\":6}},\"decoder\":{\"type\":\"ByteLevel\"}}");
    static const struct {
        uint32_t ids[4];
        const char *want;
    } c[] = {
        {{0, 1, 3, 4},
         "\xc3\xa9"
         "a b"},
        {{0, 3, 0, 1}, R "a\xc3\xa9"},
        {{2, 3, 1, 1}, R "a" R R},
        {{5, 1, 5, 3}, " \xc3\xa9 " R "a"},
        {{3, 3, 3, 2}, "aaa" R},
        {{0, 6, 3, 0}, R "<x y>a" R},
    };
    struct bt_buf out = {0};

    for (size_t i = 0; i < sizeof(c) / sizeof(c[0]); i++) {
        bt_buf_clear(&out);
        CHECK_EQ(bt_tokenizer_decode(t, c[i].ids, 4, 0, &out, NULL), BT_OK);
        CHECK_STR(out.data, c[i].want);
    }
    bt_buf_fini(&out);
    bt_tokenizer_destroy(t);
}

/* A decoder that drops the first space does so only at the start of a text. */
static void continued(void)
{
    static const char *const files[] = {"tests/golden/tokenizers/spm.tokenizer.json",
                                        "tests/golden/tokenizers/spm_meta.tokenizer.json"};

    for (size_t i = 0; i < 2; i++) {
        struct bt_tokenizer *t = NULL;
        struct bt_ids ids = {0};
        struct bt_buf out = {0};
        CHECK_EQ(bt_tokenizer_load(files[i], &t, NULL), BT_OK);
        CHECK_EQ(bt_tokenizer_encode(t, "the page", 8, 0, &ids, NULL), BT_OK);
        CHECK_EQ(bt_tokenizer_decode(t, ids.v, ids.len, 0, &out, NULL), BT_OK);
        CHECK_STR(out.data, "the page");
        bt_buf_clear(&out);
        CHECK_EQ(bt_tokenizer_decode(t, ids.v, ids.len, BT_DETOK_CONTINUE, &out, NULL), BT_OK);
        CHECK_STR(out.data, " the page");
        bt_ids_fini(&ids);
        bt_buf_fini(&out);
        bt_tokenizer_destroy(t);
    }
}

static void directory(void)
{
    static const char tok[] =
        "{" MODEL("") ",\"added_tokens\":[{\"id\":4,\"content\":\"<s>\",\"special\":true}]}";
    static const char conf[] =
        "{\"bos_token\":{\"content\":\"<s>\"},\"eos_token\":\"ab\",\"pad_token\":null,"
        "\"tokenizer_class\":\"LlamaTokenizerFast\",\"add_bos_token\":true}";
    struct bt_tokenizer *t = NULL;
    struct bt_err err;
    size_t n;

    (void)bt_temp_write("tokenizer.json", tok, sizeof(tok) - 1);
    CHECK_EQ(bt_tokenizer_load(bt_temp_dir(), &t, &err), BT_OK);
    CHECK_EQ(bt_tokenizer_bos(t), BT_TOK_NONE);
    bt_tokenizer_destroy(t);
    (void)bt_temp_write("tokenizer_config.json", conf, sizeof(conf) - 1);
    CHECK_EQ(bt_tokenizer_load(bt_temp_dir(), &t, &err), BT_OK);
    CHECK_EQ(bt_tokenizer_bos(t), 4);
    CHECK_EQ(bt_tokenizer_eos(t), 2);
    CHECK_EQ(bt_tokenizer_pad(t), BT_TOK_NONE);
    CHECK(bt_tokenizer_prefix(t, &n)[0] == 4 &&
          n == 1); /* the class asks for it, the file has no post-processor */
    (void)bt_tokenizer_suffix(t, &n);
    CHECK_EQ(n, 0);
    bt_tokenizer_destroy(t);
    (void)bt_temp_write("tokenizer_config.json", "{", 1);
    CHECK_EQ(bt_tokenizer_load(bt_temp_dir(), &t, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "tokenizer_config.json: byte 1") != NULL);
    bt_temp_clean((const char *[]){"tokenizer.json", "tokenizer_config.json"}, 2);
    CHECK_EQ(bt_tokenizer_load("/nonexistent/tokenizer.json", &t, &err), BT_ERR_NOT_FOUND);
}

/* Every allocation fails once, in building, encoding and decoding. */
static void memory(void)
{
    static const char *const files[] = {"tests/golden/tokenizers/bytes_nfc.tokenizer.json",
                                        "tests/golden/tokenizers/odd.tokenizer.json"};
    static const char text[] = "a word <|eos|> e\xcc\x81\xcc\xa3, 12 <left> "
                               "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    size_t live = bt_test_live_bytes();

    for (size_t i = 0; i < 2; i++) {
        bool fired = true;
        /* Building makes some thousand map insertions; steps grow so that the test stays short. */
        for (uint64_t nth = 0; fired; nth += nth < 60 ? 1 : nth / 20) {
            struct bt_tokenizer *t = NULL;
            bt_test_fail_alloc(nth);
            enum bt_status st = bt_tokenizer_load(files[i], &t, NULL);
            fired = bt_test_fail_alloc_off();
            CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
            bt_tokenizer_destroy(st == BT_OK ? t : NULL);
            CHECK_EQ(bt_test_live_bytes(), live);
        }
        struct bt_tokenizer *t = NULL;
        CHECK_EQ(bt_tokenizer_load(files[i], &t, NULL), BT_OK);
        fired = true;
        for (uint64_t nth = 0; fired && t != NULL; nth++) {
            struct bt_ids ids = {0};
            struct bt_buf out = {0};
            bt_test_fail_alloc(nth);
            enum bt_status st = bt_tokenizer_encode(t, text, sizeof(text) - 1, 3, &ids, NULL);
            if (st == BT_OK) {
                st = bt_tokenizer_decode(t, ids.v, ids.len, 0, &out, NULL);
            }
            fired = bt_test_fail_alloc_off();
            CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
            bt_ids_fini(&ids);
            bt_buf_fini(&out);
        }
        bt_tokenizer_destroy(t);
        CHECK_EQ(bt_test_live_bytes(), live);
    }
}

struct job {
    const struct bt_tokenizer *t;
    struct bt_ids ids;
    bool same;
};

static const char thread_text[] = "Don't  stop: e\xcc\x81\xcc\xa3 12 <|eos|>\n\n  "
                                  "\xe8\xb5\xb0\xe8\x80\x85 word relayrelayrelayrelay";

static void *encode_often(void *arg)
{
    struct job *j = arg;

    j->same = true;
    for (int i = 0; i < 200; i++) {
        struct bt_buf out = {0};
        bt_ids_clear(&j->ids);
        j->same = j->same &&
                  bt_tokenizer_encode(j->t, thread_text, sizeof(thread_text) - 1, 3, &j->ids,
                                      NULL) == BT_OK &&
                  bt_tokenizer_decode(j->t, j->ids.v, j->ids.len, 0, &out, NULL) == BT_OK;
        bt_buf_fini(&out);
    }
    return NULL;
}

/* One tokenizer, several threads (of interest under the thread sanitizer). */
static void threads(void)
{
    struct bt_tokenizer *t = NULL;
    struct job jobs[4] = {0};
    pthread_t th[4];

    CHECK_EQ(bt_tokenizer_load("tests/golden/tokenizers/bytes_nfc.tokenizer.json", &t, NULL),
             BT_OK);
    for (size_t i = 0; i < 4; i++) {
        jobs[i].t = t;
        CHECK_EQ(pthread_create(&th[i], NULL, encode_often, &jobs[i]), 0);
    }
    for (size_t i = 0; i < 4; i++) {
        CHECK_EQ(pthread_join(th[i], NULL), 0);
        CHECK(jobs[i].same && jobs[i].ids.len == jobs[0].ids.len &&
              memcmp(jobs[i].ids.v, jobs[0].ids.v, jobs[0].ids.len * sizeof(uint32_t)) == 0);
    }
    for (size_t i = 0; i < 4; i++) {
        bt_ids_fini(&jobs[i].ids);
    }
    bt_tokenizer_destroy(t);
}

/* A megabyte without a place to cut: far from quadratic (which would take hours), whatever the
 * machine. */
static void long_texts(void)
{
    static const char *const files[] = {"tests/golden/tokenizers/bytes.tokenizer.json",
                                        "tests/golden/tokenizers/spm.tokenizer.json",
                                        "tests/golden/tokenizers/bytes_nfc.tokenizer.json"};
    size_t n = 1 << 20;
    char *s = malloc(n);
    uint64_t before = bt_clock_ns();

    for (size_t i = 0; i < 3; i++) {
        struct bt_tokenizer *t = NULL;
        struct bt_buf out = {0};
        struct bt_ids ids = {0};
        CHECK_EQ(bt_tokenizer_load(files[i], &t, NULL), BT_OK);
        for (size_t k = 0; k < n; k++) {
            s[k] = (char)('a' + k * k % 7);
        }
        CHECK_EQ(bt_tokenizer_encode(t, s, n, 0, &ids, NULL), BT_OK);
        CHECK_EQ(bt_tokenizer_decode(t, ids.v, ids.len, 0, &out, NULL), BT_OK);
        CHECK(out.len >= n && memcmp(out.data + out.len - n, s, n) == 0);
        for (size_t k = 0; k < n; k += 4) { /* two marks in the wrong order, over and over */
            memcpy(s + k, "\xcc\x81\xcc\xa3", 4);
        }
        CHECK_EQ(bt_tokenizer_encode(t, s, n, 0, &ids, NULL), BT_OK);
        bt_ids_fini(&ids);
        bt_buf_fini(&out);
        bt_tokenizer_destroy(t);
    }
    printf("six texts of 1 MiB: %.2f s\n", (double)(bt_clock_ns() - before) / 1e9);
    free(s);
}

int main(void)
{
    refused();
    texts();
    lookups();
    broken_bytes();
    broken_byte_level();
    continued();
    directory();
    memory();
    threads();
    long_texts();
    return bt_test_done();
}
