/* Runs reference cases of tokenizers; see the header. */

#include "tests/unit/text/tok_reference.h"

#include <stdio.h>
#include <string.h>
#include "text/detok.h"

struct bt_tape *tok_ref_read(const char *path)
{
    struct bt_tape *t = NULL;
    struct bt_err err = {.status = BT_OK};
    struct bt_buf text = {0};
    char cmd[1024], chunk[65536];
    size_t n = strlen(path);

    if (n < 3 || strcmp(path + n - 3, ".gz") != 0) {
        enum bt_status st = bt_tape_read(path, (size_t)64 << 20, &t, &err);
        if (st != BT_OK && st != BT_ERR_NOT_FOUND) {
            fprintf(stderr, "%s\n", err.msg);
        }
        return st == BT_OK ? t : NULL;
    }
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        return NULL;
    }
    (void)fclose(f);
    (void)snprintf(cmd, sizeof(cmd), "gzip -dc '%s'", path);
    f = popen(cmd, "r");
    while (f != NULL && (n = fread(chunk, 1, sizeof(chunk), f)) > 0) {
        (void)bt_buf_add(&text, chunk, n);
    }
    if (f == NULL || pclose(f) != 0 ||
        bt_tape_parse(path, text.data, text.len, &t, &err) != BT_OK) {
        fprintf(stderr, "%s: cannot be unpacked or parsed: %s\n", path, err.msg);
    }
    bt_buf_fini(&text);
    return t;
}

static const struct bt_tape_node *find_text(const struct bt_tape *corpus,
                                            const struct bt_tape_node *name)
{
    const struct bt_tape_node *root = bt_tape_root(corpus), *c = root + 1;

    for (uint32_t i = 0; i < root->len; i++, c += c->span) {
        if (bt_tape_str_eq(bt_tape_get(c, "name"), name->s)) {
            return bt_tape_get(c, "text");
        }
    }
    return NULL;
}

static void load_ids(const struct bt_tape_node *list, struct bt_ids *out)
{
    const struct bt_tape_node *v = list + 1;

    bt_ids_clear(out);
    for (uint32_t i = 0; list != NULL && i < list->len; i++, v += v->span) {
        uint32_t id = BT_TOK_NONE;
        (void)bt_tape_u32(v, &id);
        (void)!bt_ids_add(out, id);
    }
}

static bool same_ids(const char *label, const char *name, const char *what,
                     const struct bt_ids *got, const struct bt_ids *want)
{
    size_t i = 0;

    while (i < got->len && i < want->len && got->v[i] == want->v[i]) {
        i++;
    }
    if (i == got->len && i == want->len) {
        return true;
    }
    fprintf(stderr, "%s: %s: %s: %zu ids, want %zu; first difference at %zu: %u, want %u\n", label,
            name, what, got->len, want->len, i, i < got->len ? got->v[i] : BT_TOK_NONE,
            i < want->len ? want->v[i] : BT_TOK_NONE);
    return false;
}

static bool same_text(const char *label, const char *name, const char *what,
                      const struct bt_buf *got, const char *want, size_t want_len)
{
    if (got->len == want_len && (want_len == 0 || memcmp(got->data, want, want_len) == 0)) {
        return true;
    }
    fprintf(stderr, "%s: %s: %s:\n  got  (%zu) %.300s\n  want (%zu) %.300s\n", label, name, what,
            got->len, got->data ? got->data : "", want_len, want);
    return false;
}

static bool encode_is(const char *label, const char *name, const struct bt_tokenizer *t,
                      const struct bt_tape_node *text, unsigned flags, const struct bt_ids *want)
{
    struct bt_ids got = {0};
    struct bt_err err = {.status = BT_OK};
    bool ok = bt_tokenizer_encode(t, text->s, text->len, flags, &got, &err) == BT_OK;

    if (!ok) {
        fprintf(stderr, "%s: %s: %s\n", label, name, err.msg);
    }
    ok = ok && same_ids(label, name, flags & BT_TOK_PARSE_SPECIAL ? "ids" : "ids, specials as text",
                        &got, want);
    bt_ids_fini(&got);
    return ok;
}

static bool decode_is(const char *label, const char *name, const struct bt_tokenizer *t,
                      const struct bt_ids *ids, unsigned flags, const struct bt_tape_node *want)
{
    struct bt_buf got = {0};
    struct bt_detok d;
    const char *what = flags ? "decoded without specials" : "decoded";
    bool ok = bt_tokenizer_decode(t, ids->v, ids->len, flags, &got, NULL) == BT_OK &&
              same_text(label, name, what, &got, want->s, want->len);

    /* The stream: the same text, and whole characters in every piece. */
    bt_buf_clear(&got);
    bt_detok_init(&d, t, flags);
    for (size_t i = 0; i < ids->len && ok; i++) {
        size_t before = got.len;
        ok = bt_detok_push(&d, ids->v[i], &got) == BT_OK &&
             (got.len == before || (((unsigned char)got.data[before] & 0xC0) != 0x80));
    }
    ok = ok && bt_detok_finish(&d, &got) == BT_OK &&
         same_text(label, name, "stream", &got, want->s, want->len);
    bt_buf_fini(&got);
    return ok;
}

/* The reference holds back whole tokens, we only the bytes that are not certain: when it emits,
 * both are even. */
static bool stream_is(const char *label, const char *name, const struct bt_tokenizer *t,
                      const struct bt_ids *ids, const struct bt_tape_node *pieces)
{
    struct bt_buf got = {0}, want = {0};
    struct bt_detok d;
    const struct bt_tape_node *p = pieces + 1;
    bool ok = pieces->len == ids->len;

    bt_detok_init(&d, t, 0);
    for (size_t i = 0; i < ids->len && ok; i++, p++) {
        ok = bt_detok_push(&d, ids->v[i], &got) == BT_OK;
        if (p->type == BT_TAPE_STRING) {
            (void)bt_buf_add(&want, p->s, p->len);
            ok = ok && same_text(label, name, "stream so far", &got, want.data, want.len);
        } else {
            ok = ok && got.len >= want.len &&
                 (want.len == 0 || memcmp(got.data, want.data, want.len) == 0);
        }
    }
    if (!ok) {
        fprintf(stderr, "%s: %s: stream differs\n", label, name);
    }
    bt_buf_fini(&got);
    bt_buf_fini(&want);
    return ok;
}

static bool check_case(const char *label, const struct bt_tokenizer *t,
                       const struct bt_tape_node *c, const struct bt_tape_node *text,
                       const struct bt_ids *prefix, const struct bt_ids *suffix)
{
    const struct bt_tape_node *as_text = bt_tape_get(c, "ids_specials_as_text"),
                              *decoded = bt_tape_get(c, "decoded");
    const struct bt_tape_node *skipped = bt_tape_get(c, "decoded_skip_special"),
                              *stream = bt_tape_get(c, "stream");
    const char *name = bt_tape_get(c, "name")->s;
    struct bt_ids ids = {0}, plain = {0}, all = {0};
    bool ok;

    load_ids(bt_tape_get(c, "ids"), &ids);
    load_ids(as_text != NULL ? as_text : bt_tape_get(c, "ids"), &plain);
    ok = encode_is(label, name, t, text, BT_TOK_PARSE_SPECIAL, &ids);
    ok = encode_is(label, name, t, text, 0, &plain) && ok;
    for (size_t i = 0; i < prefix->len + ids.len + suffix->len; i++) {
        (void)!bt_ids_add(&all, i < prefix->len             ? prefix->v[i]
                                : i < prefix->len + ids.len ? ids.v[i - prefix->len]
                                                            : suffix->v[i - prefix->len - ids.len]);
    }
    ok = encode_is(label, name, t, text, BT_TOK_PARSE_SPECIAL | BT_TOK_ADD_SPECIAL, &all) && ok;
    decoded = decoded != NULL ? decoded : text;
    ok = decode_is(label, name, t, &ids, 0, decoded) && ok;
    ok = decode_is(label, name, t, &ids, BT_DETOK_SKIP_SPECIAL,
                   skipped != NULL ? skipped : decoded) &&
         ok;
    if (stream != NULL && stream->type == BT_TAPE_ARRAY) {
        ok = stream_is(label, name, t, &ids, stream) && ok;
    }
    bt_ids_fini(&ids);
    bt_ids_fini(&plain);
    bt_ids_fini(&all);
    return ok;
}

int tok_ref_check(const char *label, const struct bt_tokenizer *t, const struct bt_tape *ref,
                  const struct bt_tape *corpus)
{
    const struct bt_tape_node *cases = bt_tape_get(bt_tape_root(ref), "cases"), *c = cases + 1;
    struct bt_ids prefix = {0}, suffix = {0};
    int failed = 0;

    load_ids(bt_tape_get(bt_tape_root(ref), "special_prefix_ids"), &prefix);
    load_ids(bt_tape_get(bt_tape_root(ref), "special_suffix_ids"), &suffix);
    for (uint32_t i = 0; i < cases->len; i++, c += c->span) {
        const struct bt_tape_node *text = find_text(corpus, bt_tape_get(c, "name"));
        failed += text == NULL || !check_case(label, t, c, text, &prefix, &suffix);
    }
    printf("%s: %u cases, %d failed\n", label, cases->len, failed);
    bt_ids_fini(&prefix);
    bt_ids_fini(&suffix);
    return failed + (cases->len == 0);
}
