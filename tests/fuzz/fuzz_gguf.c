/* Any bytes as a GGUF file: refused or opened; of an opened one every key reads by its type, every
 * tensor byte is readable. */

#include "files/gguf.h"
#include "tests/fuzz/fuzz_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void read_key(const struct bt_gguf *g, const char *key)
{
    struct bt_gguf_iter it;
    struct bt_err err;
    const char *s;
    size_t n;
    uint64_t u;
    double d;
    bool b;
    volatile char c = 0;

    (void)!bt_gguf_get_u64(g, key, &u, &err);
    (void)!bt_gguf_get_f64(g, key, &d, &err);
    (void)!bt_gguf_get_bool(g, key, &b, &err);
    if (bt_gguf_get_str(g, key, &s, &n, &err) == BT_OK && n > 0) {
        c = s[n - 1];
    }
    if (bt_gguf_iter_numbers(g, key, &it, &err) == BT_OK) {
        while (bt_gguf_next_f64(&it, &d)) {
        }
    }
    if (bt_gguf_iter_strings(g, key, &it, &err) == BT_OK) {
        while (bt_gguf_next_str(&it, &s, &n)) {
            c = n > 0 ? s[n - 1] : c;
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char *const keys[] = {"general.architecture",
                                       "general.alignment",
                                       "u8",
                                       "i16",
                                       "words",
                                       "nums",
                                       "nested",
                                       "f32",
                                       "yes",
                                       "u64"};
    struct bt_gguf *g;
    struct bt_err err;
    volatile uint8_t sum = 0;

    if (bt_gguf_open(bt_fuzz_path(data, n), &g, &err) != BT_OK) {
        return 0;
    }
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        read_key(g, keys[i]);
    }
    for (size_t i = 0; i < bt_gguf_tensor_count(g); i++) {
        const struct bt_tensor *t = bt_gguf_tensor_at(g, i);
        for (size_t k = 0; t->supported && k < t->bytes; k++) {
            sum = (uint8_t)(sum + ((const uint8_t *)t->data)[k]);
        }
    }
    bt_gguf_close(g);
    return 0;
}
